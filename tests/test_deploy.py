"""The files in deploy/: their forms against Kubernetes' own models and rules of ours, without a network and without a cluster; their
scripts run with stand-ins for torchrun, Slurm and the like, and what those are given is parsed by the real parsers. A rule takes
the files and yields what is wrong; beside each stand edits of a file that break it, to show that the rule can fail."""
import ast, json, os, re, shlex, shutil, subprocess
from configparser import ConfigParser
from pathlib import Path
import msgspec, pytest, yaml
from torch.distributed.run import get_args_parser
from helpers.cells import NUMBERED, read, source
from llm_speedrun.train.config import TrainConfig, parse_options
from make_readme import ROOT
from helpers.timeouts import TIMEOUT

DEPLOY = ROOT/"deploy"
FILES = {str(p.relative_to(DEPLOY)): p.read_text(encoding="utf-8") for p in sorted(DEPLOY.rglob("*")) if p.is_file()}
JOB, QUEUE, SLICES, COMPOSE = "kubernetes/job.yaml", "kubernetes/queue.yaml", "kubernetes/time-slicing.yaml", "compose.yaml"
DOCKER, SLURM, SKY, START, COPY = "Dockerfile", "slurm.sbatch", "sky.yaml", "start_or_resume", "copy_runs"
RULES, BROKEN = {}, []

def rule(*edits): # triples: a file, a piece of it, what to write there
    "Register a rule, a function of the files"
    def add(f):
        RULES[f.__name__] = f
        BROKEN.extend((f.__name__, *e) for e in edits)
        return f
    return add

# --- what the files hold ---

class NoTwice(yaml.SafeLoader):
    "Reads YAML; a key that is there twice is an error, where PyYAML takes the last"
    def construct_mapping(self, node, deep=False):
        keys = [k.value for k, _ in node.value]
        if len(keys) > len({*keys}): raise yaml.YAMLError(f"a key is there twice: {keys}")
        return super().construct_mapping(node, deep)

def documents(text): return [*yaml.load_all(text, NoTwice)]
def document(files, name): return documents(files[name])[0]
def objects(files): return [d for name in files if name.startswith("kubernetes/") for d in documents(files[name])]
def of_kind(files, kind): return [d for d in objects(files) if d["kind"] == kind]

def pod_specs(files):
    "Pairs of an object that makes pods, and the pods' spec"
    for d in objects(files):
        if d["kind"] == "Pod": yield d, d["spec"]
        elif d["kind"] in ("Job", "ScaledJob"): yield d, d["spec"].get("jobTargetRef", d["spec"])["template"]["spec"]

def containers(spec): return spec.get("initContainers", []) + spec["containers"]
def env_of(container): return {e["name"]: e.get("value", "") for e in container.get("env", [])}

def instructions(text):
    "Triples of a Dockerfile: number of the stage, instruction, its words"
    stage, text = -1, re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.M))
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        stage += word == "FROM"
        yield stage, word, rest

def given(text, pattern): return m[1] if (m := re.search(pattern, text)) else ""
def seconds(text): return int(text[:-1])*dict(s=1, m=60, h=3600)[text[-1]]

# --- all files ---

@rule((JOB, "# NOT RUN", "# Run"), (DOCKER, "# NOT BUILT", "# Built"))
def each_says_what_was_not_run(files):
    for name, text in files.items():
        if name.endswith("ignore") or name in (START, COPY): continue
        if not re.search(r"^# NOT (BUILT OR )?RUN for this course", "\n".join(text.splitlines()[:6]), re.M):
            yield f"{name} doesn't say that it was not run"

@rule((COMPOSE, "name: speedrun\n", "name: speedrun\nname: other\n"), (JOB, "spec:\n  clusterIP", "spec: [\n  clusterIP"))
def yaml_is_read(files):
    for name in (n for n in files if n.endswith(".yaml")):
        try: documents(files[name])
        except yaml.YAMLError as e: yield f"{name}: {e}"

def graces(files):
    "Where a run is told to stop: seconds that torchrun gives its processes, seconds until all is killed"
    for d, spec in pod_specs(files):
        for c in spec["containers"]:
            if wait := env_of(c).get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"): yield JOB, int(wait), spec["terminationGracePeriodSeconds"]
    c = document(files, COMPOSE)["services"]["train"]
    yield COMPOSE, int(c["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]), seconds(c["stop_grace_period"])
    yield SLURM, int(given(files[SLURM], r"SHUTDOWN_TIMEOUT=(\d+)")), int(given(files[SLURM], r"--signal=TERM@(\d+)"))

@rule((JOB, "GracePeriodSeconds: 120", "GracePeriodSeconds: 90"), (COMPOSE, "2m", "10s"), (SLURM, "TERM@90", "TERM@60"))
def processes_may_finish_before_they_are_killed(files):
    for name, wait, grace in graces(files):
        if not 30 < wait < grace: yield f"{name}: torchrun waits {wait} s of {grace}"

# --- Docker ---

@rule((DOCKER, "python:3.12.11-slim-bookworm", "python"), (DOCKER, ":3.12.11-slim-bookworm", ":latest"),
      (DOCKER, "base AS wheel", "bas AS wheel"), (DOCKER, "from=wheel", "from=wheels"))
def stages_are_pinned_and_there(files):
    known = set()
    for _, word, rest in instructions(files[DOCKER]):
        for name in re.findall(r"from=(\w+)", rest):
            if name not in known: yield f"there is no stage {name}"
        if word != "FROM": continue
        image, *name = rest.split(" AS ")
        if image not in known and not re.search(r":\d+\.\d+\.\d+", image): yield f"{image} has no pinned version"
        known |= {*name}

@rule((DOCKER, "rm -rf /var/lib/apt/lists/*", "true"), (DOCKER, "apt-get update && ", ""), (DOCKER, "--no-install-recommends ", ""))
def apt_leaves_no_lists(files):
    for _, word, rest in instructions(files[DOCKER]):
        if word == "RUN" and "apt-get install" in rest:
            for part in ("apt-get update &&", " -y ", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*"):
                if part not in rest: yield f"no {part} in {rest}"

@rule((DOCKER, "RUN --mount=type=cache,target=/var/cache/pip pip install \"$TORCH\"\n", "RUN pip install \"$TORCH\"\n"))
def pip_is_cached(files):
    for _, word, rest in instructions(files[DOCKER]):
        if word != "RUN" or not re.search(r"\bpip (install|wheel)", rest) or "--no-index" in rest: continue
        if "type=cache,target=/var/cache/pip" not in rest: yield f"pip without its cache: {rest}"

@rule((DOCKER, "USER 10001:10001\n", ""), (DOCKER, "USER 10001:10001", "USER root"), (DOCKER, "USER 10001:10001", "USER speedrun"))
def nobody_is_root(files):
    last = max(stage for stage, *_ in instructions(files[DOCKER]))
    users = [rest for stage, word, rest in instructions(files[DOCKER]) if stage == last and word == "USER"]
    if not users or not re.match(r"[1-9]\d*", users[-1]): yield f"the image's user is {users}: Kubernetes wants a number, not 0"

@rule((DOCKER, "COPY settings.ini .", "ADD https://example.com/a ."), (DOCKER, "WORKDIR /src", "WORKDIR src"),
      (DOCKER, '["speedrun_train", "--help"]', "speedrun_train --help"), (DOCKER, "python -m venv", "cat /etc/os-release | python -m venv"),
      (DOCKER, "HEALTHCHECK NONE\n", ""), (DOCKER, "COPY llm_speedrun llm_speedrun", "COPY . ."))
def docker_good_habits(files):
    words = [word for _, word, _ in instructions(files[DOCKER])]
    if "ADD" in words: yield "ADD: COPY says what it does"
    if "HEALTHCHECK" not in words: yield "nothing is said about a health check"
    for _, word, rest in instructions(files[DOCKER]):
        if word == "WORKDIR" and not rest.startswith("/"): yield f"WORKDIR {rest} is relative"
        if word in ("CMD", "ENTRYPOINT") and not rest.startswith("["): yield f"{word} {rest} starts a shell, which takes the signals"
        if word == "RUN" and re.search(r"[^|]\|[^|]", rest): yield f"a pipe hides an error: {rest}"
        if word == "COPY" and rest.split()[0] in (".", "./"): yield "COPY . makes a new layer for any change"

def sent(files, path):
    "Whether the builder gets the path: the last line of the ignore file that matches it or a folder above it decides"
    res = True
    for line in files["Dockerfile.dockerignore"].splitlines():
        if not line or line.startswith("#"): continue
        pattern = line.lstrip("!")
        if any(Path(p).match(pattern.removeprefix("**/")) for p in (path, *map(str, Path(path).parents))): res = line.startswith("!")
    return res

@rule((DOCKER, "COPY settings.ini .", "COPY setings.ini ."), ("Dockerfile.dockerignore", "!setup.py\n", ""),
      ("Dockerfile.dockerignore", "*\n!LICENSE", "!LICENSE"))
def what_is_copied_is_sent_and_little_else(files):
    for _, word, rest in instructions(files[DOCKER]):
        if word != "COPY" or "--from" in rest: continue
        for path in [w for w in rest.split() if not w.startswith("--")][:-1]:
            if not (ROOT/path).exists(): yield f"there is no {path}"
            elif not sent(files, path): yield f"{path} isn't sent to the builder"
    for path in ("runs/a", ".git/config", "nbs/index.ipynb", "llm_speedrun/__pycache__/a.pyc"):
        if sent(files, path): yield f"{path} is sent to the builder"

@rule((DOCKER, "torch==2.13.0", "torch==2.99.0"), (DOCKER, "torch==2.13.0", "torch"), (SKY, "torch==2.13.0", "torch==2.9.0"))
def torch_is_one_that_is_tested(files):
    workflow = (ROOT/".github/workflows/test.yml").read_text(encoding="utf-8")
    minors = sorted(map(int, re.findall(r"torch: 2\.(\d+)\.", workflow)))
    low, high = minors[0], minors[-1] + 1
    for name in (DOCKER, SKY):
        minor = given(files[name], r"torch==2\.(\d+)\.\d+")
        if not minor or not int(low) <= int(minor) < int(high): yield f"{name}: torch 2.{minor}"

@rule((DOCKER, "COPY --from=packages /opt/venv /opt/venv\n", ""),
      (DOCKER, "COPY settings.ini setup.py", "COPY --from=packages /opt/venv /opt/venv\nCOPY settings.ini setup.py"))
def code_comes_after_packages(files):
    last = max(stage for stage, *_ in instructions(files[DOCKER]))
    steps = [(stage == last, rest) for stage, word, rest in instructions(files[DOCKER]) if word in ("RUN", "COPY")]
    at = lambda part: [(i, ends) for i, (ends, rest) in enumerate(steps) if part in rest]
    packages, code = at("--from=packages"), at("/wheels/*.whl")
    if [ends for _, ends in packages] != [True] or [ends for _, ends in code] != [True] or packages > code:
        yield "a change of code makes the packages' layer anew"

# --- Compose ---

SERVICE = dict(image=str, build=dict, command=list, deploy=dict, environment=dict, volumes=list, shm_size=str, ulimits=dict, init=bool,
               restart=str, stop_grace_period=str)

@rule((COMPOSE, "shm_size", "shm"), (COMPOSE, "init: true", "init: yes please"), (COMPOSE, "  runs:\n  cache:", "  runs:"),
      (COMPOSE, "  cache:\n", "  cache:\n  more:\n"), (COMPOSE, "${NAME:-first}", "${NAME}"), (COMPOSE, "8gb", "64mb"), (COMPOSE, "[gpu]", "[]"),
      (COMPOSE, "dockerfile: deploy/Dockerfile", "dockerfile: Dockerfile"))
def compose_fits(files):
    d = document(files, COMPOSE)
    service, volumes = d["services"]["train"], d["volumes"]
    for k, v in service.items():
        if not isinstance(v, SERVICE.get(k, ())): yield f"{k} is unknown, or no {SERVICE.get(k)}"
    if {*d} != {"name", "services", "volumes"}: yield f"what is {set(d)}"
    named = {v.split(":")[0] for v in service["volumes"] if re.match(r"\w+:", v)}
    if named != {*volumes}: yield f"volumes used: {named}, and declared: {[*volumes]}"
    for m in re.findall(r"(?<!\$)\$\{(\w+)\}", files[COMPOSE]): yield f"{m} has no default"
    build = service["build"]
    if not (DEPLOY/build["context"]/build["dockerfile"]).exists(): yield f"no {build['dockerfile']} there"
    if not re.fullmatch(r"\d+gb", service.get("shm_size", "")): yield "too little shared memory: Docker gives 64 MB"
    device, = service["deploy"]["resources"]["reservations"]["devices"]
    if device["capabilities"] != ["gpu"] or f"--gpus {device['count']} " not in service["command"][-1]: yield f"another GPU: {device}"

# --- Kubernetes ---

def model(d):
    "The class that Kubernetes' own description makes of such an object"
    registry = pytest.importorskip("lightkube.core.resource_registry").resource_registry
    import lightkube.resources.batch_v1, lightkube.resources.core_v1
    return registry.load(d["apiVersion"], d["kind"])

def lost(before, after, path=""):
    "The fields of `before` that the model has not kept: it knows none of that name"
    if isinstance(before, dict):
        for k, v in before.items(): yield from [f"{path}.{k}"] if k not in after else lost(v, after[k], f"{path}.{k}")
    elif isinstance(before, list):
        for i, (a, b) in enumerate(zip(before, after)): yield from lost(a, b, f"{path}[{i}]")

def misfits(d, kind):
    "What of a tree of plain values doesn't fit the class"
    try: made = msgspec.convert(d, kind)
    except msgspec.ValidationError as e: yield str(e)
    else: yield from (f"unknown: {p}" for p in lost(d, msgspec.to_builtins(made)))

SCALED = dict(pollingInterval=int, maxReplicaCount=int, successfulJobsHistoryLimit=int, failedJobsHistoryLimit=int, scalingStrategy=dict,
              triggers=list, jobTargetRef=dict) # KEDA's own kind, of which its documentation tells

@rule((JOB, "completions: 2", 'completions: "2"'), (JOB, "backoffLimit", "backOffLimit"), (JOB, "          operator: In\n", ""),
      (JOB, "apiVersion: batch/v1", "apiVersion: batch/v2"), (JOB, "subdomain", "subDomain"), (SLICES, "data:\n  shared: |-", "data:\n  shared:"),
      (QUEUE, "pollingInterval", "pollInterval"), (QUEUE, "LMOVE runs", "LMOVE list"),
      (QUEUE, "backoffLimit: 3", "backoffLimit: three"), (QUEUE, "accurate", "precise"))
def kubernetes_knows_the_fields(files):
    for d in objects(files):
        if d["kind"] == "ScaledJob":
            spec, job = d["spec"], dict(apiVersion="batch/v1", kind="Job")
            yield from (f"{k} is unknown, or no {SCALED.get(k)}" for k, v in spec.items() if not isinstance(v, SCALED.get(k, ())))
            if spec["scalingStrategy"]["strategy"] not in ("default", "custom", "accurate", "eager"): yield "an unknown strategy"
            if f"LMOVE {spec['triggers'][0]['metadata']['listName']} " not in files[QUEUE]: yield "the pods take from another list"
            yield from misfits(job | dict(spec=spec["jobTargetRef"]), model(job))
            continue
        if d["kind"] == "ConfigMap" and not all(isinstance(v, str) for v in d["data"].values()): yield "a ConfigMap holds texts"
        try: kind = model(d)
        except Exception as e: yield f"{d['apiVersion']} {d['kind']}: {e}"; continue
        yield from misfits(d, kind)

QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]|[KMGTP]i)?")

@rule((JOB, "nvidia.com/gpu: 8", "nvidia.com/gpu: 0.25"), (JOB, "memory: 512Gi\n            limits", "memory: 513Gi\n            limits"),
      (JOB, "1Ti", "1TiB"),
      (SLICES, "gpu.shared: 1", "gpu.shared: 2"), (SLICES, "gpu.shared: 1", "gpu: 1"), (SLICES, "replicas: 4", "replicas: 1"))
def quantities_are_valid(files):
    asked, disks = {}, [d["spec"]["resources"] for d in of_kind(files, "PersistentVolumeClaim")]
    for what in [c.get("resources", {}) for _, s in pod_specs(files) for c in containers(s)] + disks:
        for where, amounts in what.items():
            for k, v in amounts.items():
                if not QUANTITY.fullmatch(str(v)): yield f"{k}: {v} is no quantity"
                if "/" in k and not re.fullmatch(r"\d+", str(v)): yield f"{k}: {v}: a device is given whole"
                if where == "limits" and what.get("requests", {}).get(k, v) != v: yield f"{k}: another limit than is requested"
                if "/" in k: asked.setdefault(k, []).append(int(float(v)))
    config, = [yaml.safe_load(d["data"]["shared"]) for d in of_kind(files, "ConfigMap")]
    slicing = config["sharing"]["timeSlicing"]
    name = slicing["resources"][0]["name"] + ".shared"*slicing["renameByDefault"]
    if config["version"] != "v1" or slicing["resources"][0]["replicas"] < 2: yield f"nothing is shared: {config}"
    if slicing["failRequestsGreaterThanOne"] and asked.get(name) != [1]: yield f"{asked}, and one {name} each is what there is"

@rule((JOB, "job-name: speedrun", "job-name: speedrum"), (JOB, "clusterIP: None", "clusterIP: 10.0.0.1"),
      (JOB, "subdomain: speedrun", "subdomain: other"), (JOB, "DISABLE_SHARE", "SHARE"),
      (JOB, "speedrun-0.speedrun:29500", "speedrun-0:29500"), (JOB, "containerPort: 29500", "containerPort: 29501"),
      (JOB, "  name: speedrun\nspec:\n  completions", "  name: Speed_run\nspec:\n  completions"))
def pods_find_each_other(files):
    job, = of_kind(files, "Job")
    service, = of_kind(files, "Service")
    name, port, spec = job["metadata"]["name"], service["spec"]["ports"][0]["port"], job["spec"]["template"]["spec"]
    if service["spec"]["selector"] != {"batch.kubernetes.io/job-name": name}: yield "the service is for other pods"
    if service["spec"]["clusterIP"] != "None" or not service["spec"]["publishNotReadyAddresses"]: yield "pods have no names of their own"
    if spec["subdomain"] != service["metadata"]["name"]: yield "the pods' names aren't in the service"
    c, = spec["containers"]
    if f"--rdzv_endpoint {name}-0.{service['metadata']['name']}:{port} " not in c["args"][0]: yield "they meet elsewhere"
    if [p["containerPort"] for p in c["ports"]] != [port]: yield "they meet at another port"
    if env_of(c).get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1": yield "a pod that comes later waits in vain for the first one's address"
    for d in objects(files):
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", d["metadata"]["name"]): yield f"{d['metadata']['name']} is no name"

@rule((JOB, "parallelism: 2", "parallelism: 1"), (JOB, "--nproc_per_node 8", "--nproc_per_node 4"), (JOB, "--nnodes 2", "--nnodes 3"),
      (JOB, "Indexed", "NonIndexed"), (JOB, "restartPolicy: Never", "restartPolicy: OnFailure"),
      (JOB, "containerName: train", "containerName: trainer"), (JOB, "[2, 126, 127]", "[126, 2]"))
def the_job_is_one_of_a_kind(files):
    job, = of_kind(files, "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    c, = pod["containers"]
    if spec["completionMode"] != "Indexed" or spec["completions"] != spec["parallelism"]: yield "not all pods run at the same time"
    if f"--nnodes {spec['completions']} " not in c["args"][0]: yield "torchrun waits for other nodes"
    if f"--nproc_per_node {c['resources']['limits']['nvidia.com/gpu']} " not in c["args"][0]: yield "not a process for each GPU"
    for d, pod in pod_specs(files):
        rules = d["spec"].get("jobTargetRef", d["spec"]).get("podFailurePolicy", {}).get("rules", [])
        if rules and pod["restartPolicy"] != "Never": yield "podFailurePolicy needs restartPolicy: Never"
        for codes in (r["onExitCodes"] for r in rules if "onExitCodes" in r):
            if codes["containerName"] not in [c["name"] for c in containers(pod)]: yield f"no container {codes['containerName']}"
            if codes["values"] != sorted({*codes["values"]}): yield f"{codes['values']} aren't in order"

@rule((JOB, "- name: shm\n              mountPath", "- name: shared\n              mountPath"), (JOB, "claimName: speedrun-disk", "claimName: disk"),
      (JOB, "medium: Memory\n", ""), (QUEUE, "claimName: speedrun-disk", "claimName: disk"),
      (JOB, "sizeLimit: 16Gi", "sizeLimit: 600Gi"), (JOB, "runAsNonRoot: true", "runAsNonRoot: false"),
      (JOB, ":0.1.0", ":latest"), (QUEUE, "redis:7.4-alpine", "redis"), (QUEUE, "mountPath: /task", "mountPath: task"))
def pods_have_what_they_need(files):
    claims, gib = {d["metadata"]["name"] for d in of_kind(files, "PersistentVolumeClaim")}, lambda q: int(q.removesuffix("Gi"))
    for d, spec in pod_specs(files):
        if not spec["securityContext"]["runAsNonRoot"]: yield "a pod runs as root"
        volumes = {v["name"]: v for v in spec.get("volumes", [])}
        mounts = [m for c in containers(spec) for m in c.get("volumeMounts", [])]
        if {*volumes} != {m["name"] for m in mounts}: yield f"volumes {[*volumes]} and mounts {mounts}"
        if any(not m["mountPath"].startswith("/") for m in mounts): yield "a relative mountPath"
        for c in containers(spec):
            if not re.search(r":\d[\w.-]*$", c["image"]): yield f"{c['image']} has no pinned version"
            if c in spec["containers"] and "memory" not in c["resources"]["limits"]: yield f"{c['name']} has no limit of memory"
        for v in volumes.values():
            if v.get("persistentVolumeClaim", {}).get("claimName", next(iter(claims))) not in claims: yield f"nobody claims {v}"
    spec = of_kind(files, "Job")[0]["spec"]["template"]["spec"]
    shm, = [v["emptyDir"] for v in spec["volumes"] if v["name"] == "shm"]
    most = spec["containers"][0]["resources"]["limits"]["memory"]
    if shm.get("medium") != "Memory" or gib(shm["sizeLimit"]) >= gib(most): yield f"shared memory: {shm}"

@rule((JOB, "allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true"), (QUEUE, "drop: [ALL]", "drop: []"),
      (SLICES, "type: RuntimeDefault", "type: Unconfined"), (JOB, "          securityContext:", "          ports2:"))
def pods_are_restricted(files):
    "As Kubernetes' security standard of that name asks for"
    for d, spec in pod_specs(files):
        if spec["securityContext"].get("seccompProfile") != dict(type="RuntimeDefault"): yield f"{d['kind']}: any system call is allowed"
        for c in containers(spec):
            if c.get("securityContext") != dict(allowPrivilegeEscalation=False, capabilities=dict(drop=["ALL"])):
                yield f"{d['kind']}: {c['name']} may gain rights"

@rule((JOB, "values: [75]", "values: [76]"), (JOB, "exit 75", "exit 1"))
def a_lost_host_is_no_failure(files):
    job, = of_kind(files, "Job")
    ignored = [r["onExitCodes"]["values"] for r in job["spec"]["podFailurePolicy"]["rules"] if r["action"] == "Ignore" and "onExitCodes" in r]
    said = given(job["spec"]["template"]["spec"]["containers"][0]["args"][0], r"exit (\d+)\s*$")
    if ignored != [[int(said or 0)]]: yield f"the second pod ends with {said}, and {ignored} aren't counted"

# --- Slurm, SkyPilot ---

SBATCH = set("job-name nodes ntasks-per-node gpus-per-node cpus-per-task mem exclusive time signal requeue open-mode output".split())

@rule((SLURM, "--gpus-per-node=8", "--gpus-per-nodes=8"), (SLURM, "set -euo pipefail\n", ""), (SLURM, "#SBATCH --mem=0\n", ""),
      (SLURM, "#SBATCH --job-name", "name=big\n#SBATCH --job-name"), (SLURM, "then exit 0", "exit 0"),
      (SLURM, "--requeue", "--no-requeue"), (SLURM, "ntasks-per-node=1", "ntasks-per-node=8"))
def slurm_reads_it(files):
    lines = files[SLURM].splitlines()
    asked = [line.removeprefix("#SBATCH --").partition("=") for line in lines if line.startswith("#SBATCH")]
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    if any(line.startswith("#SBATCH") for line in lines[first:]): yield "Slurm reads no #SBATCH after the first command"
    if {name for name, *_ in asked} != SBATCH: yield f"not what was meant: {SBATCH ^ {name for name, *_ in asked}}"
    if ("ntasks-per-node", "=", "1") not in asked: yield "one torchrun for each machine"
    if lines[first] != "set -euo pipefail": yield "errors would go unseen"
    if error := said_by_bash(files[SLURM]): yield error

def said_by_bash(script): return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr

TASK = dict(name=str, workdir=str, resources=dict, file_mounts=dict, setup=str, run=str)
RESOURCES = dict(accelerators=str, use_spot=bool, disk_size=int, job_recovery=dict)

@rule((SKY, "use_spot: true", "use_spots: true"), (SKY, "--gpus 8", "--gpus 4"), (SKY, "mode: MOUNT\n", "mode: mount\n"),
      (SKY, "/bucket; done &", "/bucket &"), (SKY, "workdir: .", "work_dir: ."))
def skypilot_knows_the_fields(files):
    d = document(files, SKY)
    for what, known in ((d, TASK), (d["resources"], RESOURCES)):
        yield from (f"{k} is unknown, or no {known.get(k)}" for k, v in what.items() if not isinstance(v, known.get(k, ())))
    if any(m["mode"] not in ("MOUNT", "COPY", "MOUNT_CACHED") for m in d["file_mounts"].values()): yield "an unknown mode"
    if f"--gpus {d['resources']['accelerators'].partition(':')[2]} " not in d["run"]: yield "not all GPUs"
    for k in ("setup", "run"):
        if error := said_by_bash(d[k]): yield error

# --- the rules themselves ---

@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    if wrong := [*RULES[name](FILES)]: raise AssertionError(f"{name}:\n  " + "\n  ".join(wrong))

@pytest.mark.parametrize("name, path, part, other", BROKEN)
def test_rule_finds_what_is_broken(name, path, part, other):
    assert part in FILES[path], f"{path} has no {part!r} any more"
    assert [*RULES[name](FILES | {path: FILES[path].replace(part, other)})], f"{name} lets {other!r} pass"

def test_every_rule_is_tried(): assert {name for name, *_ in BROKEN} == {*RULES}

# --- the scripts, run with stand-ins ---

STAND_INS = dict(torchrun='say "$0" "$@"; [ -z "$STOPS" ] || { trap "say stopped; exit 1" TERM; kill -TERM $PPID; while :; do :; done; }; '
                          'exit "${TORCHRUN_ENDS:-0}"', speedrun_train='say "$0" "$@"', cp=":", sleep="exec /bin/sleep .02",
    srun='while [ "${1#--}" != "$1" ]; do shift; done; "$@"; [ -z "$MAKES" ] || mkdir -p "$MAKES"; exit "${ENDS:-0}"',
    scontrol='case $1 in show) echo node1; echo node2;; *) say "$0" "$@";; esac',
    **{"redis-cli": 'case $3 in LINDEX) echo "$TAKEN";; *) echo "$WAITING";; esac'})

@pytest.fixture
def shell(tmp_path):
    "Runs a script with stand-ins for programs. Returns its exit code and what they were told, lists of words"
    (tmp_path/"bin").mkdir()
    say = 'say() { for w; do printf "%s\\037" "$w"; done >> "$SAID"; echo >> "$SAID"; }\n'
    for name, body in (STAND_INS | dict(start_or_resume=f'exec {shlex.quote(str(DEPLOY/START))} "$@"')).items():
        (tmp_path/"bin"/name).write_text(f"#!/bin/sh\n{say}{body}\n")
        (tmp_path/"bin"/name).chmod(0o755)
    (tmp_path/".venv/bin").mkdir(parents=True)
    (tmp_path/".venv/bin/activate").touch()
    (tmp_path/"deploy").mkdir()
    shutil.copy(DEPLOY/START, tmp_path/"deploy")
    (tmp_path/"deploy"/COPY).write_text(f'#!/bin/sh\n{say}say "$0" "$@"\n')
    (tmp_path/"deploy"/COPY).chmod(0o755)
    def run(script, program="bash", **env):
        said = tmp_path/"said"
        said.write_text("")
        path = os.pathsep.join([str(tmp_path/"bin"), "/usr/local/bin", "/usr/bin", "/bin"])
        p = subprocess.run([program, "-c", script], cwd=tmp_path, timeout=TIMEOUT, capture_output=True, text=True,
                           env=dict(PATH=path, SAID=str(said), HOME=str(tmp_path)) | env)
        told = [line.rstrip("\037").split("\037") for line in said.read_text().splitlines()]
        return p.returncode, [[Path(words[0]).name, *words[1:]] for words in told], p.stderr
    return run

def in_compose(text): return re.sub(r"\$\$", "$", re.sub(r"(?<!\$)\$\{\w+:-(.*?)\}", r"\1", text))

def in_a_pod(text, env):
    "A container's argument as Kubernetes gives it on: $(NAME) is replaced where the container has such a variable"
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), text)

def scripts():
    "Of each file that starts a run: a name, the script, the shell, environment variables"
    yield COMPOSE, in_compose(document(FILES, COMPOSE)["services"]["train"]["command"][-1]), "sh", {}
    c, = of_kind(FILES, "Job")[0]["spec"]["template"]["spec"]["containers"]
    yield JOB, in_a_pod(c["args"][0], env_of(c)), "sh", dict(JOB_COMPLETION_INDEX="0")
    yield SLURM, FILES[SLURM], "bash", {f"SLURM_{k}": v for k, v in dict(
        JOB_NODELIST="node[1-2]", NNODES="2", GPUS_PER_NODE="8", JOB_ID="7", CPUS_PER_TASK="64").items()}
    yield SKY, document(FILES, SKY)["run"], "bash", {}

def known_options(words):
    "The options of speedrun_train as the command itself reads them"
    return parse_options(TrainConfig, "speedrun_train", words)[0]

def trained(told):
    "What torchrun and speedrun_train were told: torchrun's arguments or None, the options of the run"
    (name, *words), = [t for t in told if t[0] in ("torchrun", "speedrun_train")]
    if name == "speedrun_train": return None, known_options(words)
    args = get_args_parser().parse_args(words)
    assert Path(args.training_script).name == "speedrun_train"
    return args, known_options(args.training_script_args)

SCRIPTS = pytest.mark.parametrize("name, script, program, env", [*scripts()], ids=[name for name, *_ in scripts()])

@SCRIPTS
def test_a_run_starts_and_goes_on(name, script, program, env, shell, tmp_path):
    code, told, error = shell(script, program, RUNS="runs", **env)
    assert code == 0, error
    args, c = trained(told)
    assert c.name and c.data.endswith("tokens") and c.total_tokens >= 10**9 and c.overwrite and not c.resume and c.save_minutes == 5
    if args: assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", "8", "c10d") and args.max_restarts
    where = tmp_path/c.out/c.name if not Path(c.out).is_absolute() else Path(c.out)/c.name
    (where/"checkpoints/step-00000300.tmp").mkdir(parents=True)
    assert not trained(shell(script, program, RUNS="runs", **env)[1])[1].resume # it is none yet
    (where/"checkpoints/step-00000300").mkdir()
    c = trained(shell(script, program, RUNS="runs", **env)[1])[1]
    assert c.resume and Path(c.resume).name == where.name and not c.overwrite and not c.total_tokens

def test_each_pod_knows_whether_it_hosts(shell):
    name, script, program, env = [*scripts()][1]
    for index, host in (("0", "1"), ("1", "0")):
        args, _ = trained(shell(script, program, RUNS="runs", JOB_COMPLETION_INDEX=index)[1])
        assert args.rdzv_conf == f"is_host={host},join_timeout=1800" and args.rdzv_endpoint == "speedrun-0.speedrun:29500"

@pytest.mark.parametrize("index, ends, code", [("0", 0, 0), ("0", 1, 1), ("0", 2, 2), ("1", 0, 0), ("1", 1, 75), ("1", 2, 2), ("1", 127, 127), ("1", 137, 75)])
def test_a_pod_that_has_lost_the_first_is_not_counted(index, ends, code, shell):
    "Its torchrun fails since nobody hosts the meeting any more; a failure of the run's own is the first pod's too"
    name, script, program, env = [*scripts()][1]
    assert shell(script, program, RUNS="runs", JOB_COMPLETION_INDEX=index, TORCHRUN_ENDS=str(ends))[0] == code

@pytest.mark.parametrize("index, code", [("0", 1), ("1", 75)])
def test_a_pods_signal_reaches_torchrun(index, code, shell):
    "Which is waited for, and its exit code is what counts"
    name, script, program, env = [*scripts()][1]
    got, told, _ = shell(script, program, RUNS="runs", JOB_COMPLETION_INDEX=index, STOPS="1")
    assert got == code and [t[0] for t in told] == ["torchrun", "stopped"]

def test_spot_runs_are_copied(shell):
    "Every minute, and once more at the end, whatever that is"
    name, script, program, env = [*scripts()][3]
    code, told, error = shell(script, program, RUNS="runs")
    assert code == 0 and told[-1] == [COPY, "runs", "/bucket"], error

@pytest.fixture
def bucket(tmp_path):
    "Copies two checkpoints and a log into a folder that keeps no times: what is there, name -> text; the paths that a copy has written"
    runs, to = tmp_path/"from", tmp_path/"to"
    to.mkdir()
    def put(path, text): (runs/path).parent.mkdir(parents=True, exist_ok=True); (runs/path).write_text(text)
    def copy():
        for p in to.rglob("*"): os.utime(p, (0, 0))
        subprocess.run([DEPLOY/COPY, runs, to], check=True, timeout=TIMEOUT)
        files = [p for p in to.rglob("*") if p.is_file()]
        there = {str(p.relative_to(to)): p.read_text() for p in files}
        return there, {str(p.relative_to(to)) for p in files if p.stat().st_mtime}
    for step in (100, 200):
        for name in ("manifest.json", "model.safetensors", "about.json"): put(f"big/checkpoints/step-{step:08}/{name}", f"{name} {step}")
    put("big/metrics.jsonl", "1\n")
    put("big/checkpoints/step-00000300.tmp/model.safetensors", "half")
    return runs, to, put, copy

def test_a_checkpoint_is_copied_once(bucket):
    "Whatever the times; a log that has grown is copied again, also where only its content differs; what was removed goes"
    runs, to, put, copy = bucket
    there, new = copy()
    assert new == {*there} and len(there) == 7 and not any("tmp" in p for p in there)
    assert copy()[1] == set()
    put("big/metrics.jsonl", "2\n")
    assert copy()[1] == {"big/metrics.jsonl"}
    shutil.rmtree(runs/"big/checkpoints/step-00000100")
    put("big/checkpoints/step-00000200/manifest.json", "another run's, of the same sizes")
    there, new = copy()
    assert not any("step-00000100" in p for p in there) and new == {p for p in there if "step-00000200" in p}
    assert there["big/checkpoints/step-00000200/manifest.json"].startswith("another")

def test_a_half_copied_checkpoint_is_copied_again(bucket):
    "A machine that goes in the middle leaves no manifest"
    runs, to, put, copy = bucket
    copy()
    (to/"big/checkpoints/step-00000200/manifest.json").unlink()
    (to/"big/checkpoints/step-00000200/model.safetensors").write_text("mod")
    there, new = copy()
    assert there["big/checkpoints/step-00000200/model.safetensors"] == "model.safetensors 200" and len(new) == 3

def test_slurm_goes_on_only_where_something_was_saved(shell, tmp_path):
    name, script, program, env = [*scripts()][2]
    code, told, _ = shell(script, program, ENDS="1", **env)
    assert code == 1 and [t[0] for t in told] == ["torchrun"]
    code, told, error = shell(script, program, ENDS="1", MAKES=str(tmp_path/"runs/big/checkpoints/step-00000300"), **env)
    assert code == 0 and told[-1] == ["scontrol", "requeue", "7"], error
    code, told, _ = shell(script, program, ENDS="1", **env)
    assert code == 1 and "requeue" not in told[-1]

def test_a_queue_gives_a_line_to_a_job(shell, tmp_path):
    spec, = [s for d, s in pod_specs(FILES) if d["kind"] == "ScaledJob"]
    take, train = (c["args"][0].replace("/task/", f"{tmp_path}/") for c in (*spec["initContainers"], *spec["containers"]))
    line = given(FILES[QUEUE], r'RPUSH runs "(.*)"')
    for kept in (dict(WAITING=line, TAKEN=""), dict(WAITING="", TAKEN=line)): # the second pod of the same job finds the line again
        assert shell(f"set -e; {take}", "sh", JOB="job-1", **kept)[0] == 0
        _, c = trained(shell(f"set -e; {train}", "sh")[1])
        assert (c.name, c.model, c.steps, c.lr) == ("lr3e-4", "124m", 2000, 3e-4)
    assert shell(f"set -e; {take}", "sh", JOB="job-1", WAITING="", TAKEN="")[0] == 0
    assert shell(f"set -e; {train}", "sh")[:2] == (0, []) # nothing to do

def test_the_images_requirements_are_the_packages(tmp_path, monkeypatch):
    "The line of the Dockerfile that takes them out of settings.ini"
    code = json.loads(next(rest for _, word, rest in instructions(FILES[DOCKER]) if word == "RUN"))[-1]
    shutil.copy(ROOT/"settings.ini", tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    ini = ConfigParser()
    ini.read(ROOT/"settings.ini", encoding="utf-8")
    want = ini["DEFAULT"]["requirements"] + ini["DEFAULT"]["hopper_requirements"]
    assert (tmp_path/"requirements.txt").read_text().split("\n") == want.split("\n") and "quack-kernels" in want

def test_spot_machines_have_hoppers_kernels():
    d = document(FILES, SKY)
    assert ("[hopper]" in d["setup"]) == d["resources"]["accelerators"].startswith("H100")

# --- other tools, where they are ---

@pytest.mark.parametrize("tool, path", [("hadolint", DOCKER), ("shellcheck --exclude=SC1091", SLURM), ("shellcheck", START), ("shellcheck", COPY),
                                        ("docker compose -f compose.yaml config -q", "")])
def test_other_tools_agree(tool, path):
    if not shutil.which(tool.split()[0]): pytest.skip(f"there is no {tool.split()[0]}")
    if tool.startswith("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("there is no docker compose")
    p = subprocess.run([*tool.split(), *filter(None, [path])], cwd=DEPLOY, capture_output=True, text=True)
    assert p.returncode == 0, p.stdout + p.stderr

# --- the lesson explains every line once ---

def shown_lines(nb, files):
    "Pairs of a file and a line's number, for each line that the notebook shows by `part(file, how the piece begins, how many)`"
    for c in (c for c in nb["cells"] if c["cell_type"] == "code"):
        for call in (n for n in ast.walk(ast.parse(source(c))) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "part"):
            name, start, n = (a.value for a in call.args)
            lines = files[name].splitlines()
            at = next((i for i in range(len(lines)) if "\n".join(map(str.strip, lines[i:i+3])).startswith(start)), None)
            assert at is not None, f"{name} has nothing that begins with {start!r}"
            yield from ((name, at + i) for i in range(n))

def test_the_lesson_explains_every_line_once():
    path, = [p for p in NUMBERED if p.stem == "66_cluster"]
    found = [*shown_lines(read(path), FILES)]
    there = [(name, i) for name, text in FILES.items() for i, line in enumerate(text.splitlines()) if line.strip()]
    missing, twice = [o for o in there if o not in found], sorted({o for o in found if found.count(o) > 1})
    assert not missing and not twice, f"not explained: {missing[:9]}; twice: {twice[:9]}"
