"The home page and the page that compares: what they claim is what records say, what they show is what commands print."
import ast, json, os, re, shutil, subprocess, sys
from statistics import mean
import pytest, yaml
from cells import cells, source
from make_readme import ROOT, make_readme, site, targets
from llm_speedrun.measure import COURSE, SPINE, course_records
from llm_speedrun.race import shared_record, with_spread
import pages
pages.load()
import compare as site_compare
from timeouts import TIMEOUT

INDEX = cells(ROOT/"nbs/index.ipynb")
MARKDOWN = "\n\n".join(source(c) for c in INDEX if c["cell_type"] == "markdown")
README = (ROOT/"README.md").read_text(encoding="utf-8")
RECORDS = json.loads((ROOT/"nbs/measurements/nvidia-h200.json").read_text(encoding="utf-8"))
FIVE = shared_record("five", folder=ROOT/"nbs/measurements")
HEAD = next(c for c in INDEX if "headline" in source(c))

# --- the headline ---

def contender(name, ratio, **more): # as `race` of 25_peers.ipynb records it
    ours = dict(before=None) if name == "llm_speedrun" else dict(before="llm_speedrun")
    return dict(rung=name, ratio=ratio, workload=SPINE[0], batch=SPINE[1], seq=1024, tok_s=7e5*ratio, peak_gib=20.,
                source=f"commit of {name}", rungs=[], micro=64, parameters=124e6, in_products=99e6, gpu="NVIDIA H200", torch="2.11.0", driver="580",
                date="2026-11-23") | ours | more

SPEEDS = {"llm_speedrun": 1., "llm_speedrun, 16 bits": .8, "compile_blocks": .6, "compile_whole": .64, "nanogpt": .5,
          "nanochat": .4}
RACE = [contender(*o) for o in SPEEDS.items()]
WITHOUT = [r for r in RECORDS if site_compare.OURS not in (r["rung"], r["before"])]

@pytest.fixture(scope="module")
def head():
    "What the headline's cell defines"
    tree = ast.parse(source(HEAD))
    names = {"RIVALS", "OURS"}
    named = lambda o: {n.id for n in ast.walk(o.targets[0]) if isinstance(n, ast.Name)}
    keep = [o for o in tree.body if isinstance(o, (ast.FunctionDef, ast.ImportFrom))
            or isinstance(o, ast.Assign) and named(o) & names]
    space = {}
    exec(compile(ast.Module(keep, []), "headline", "exec"), space)
    return space

def said(head, records): return head["headline"](course_records(), head["race"](records))

def test_the_headline_is_what_records_say(head):
    shown = "".join(HEAD["outputs"][0]["data"]["text/markdown"])
    assert shown == said(head, RECORDS), "run nbs/index.ipynb again: tests/run_notebook.py, then make readme"
    first, last = course_records()[0], course_records()[-1]
    ours = site_compare.race(RECORDS).get(site_compare.OURS, last)
    for part in (f"{ours['tok_s']/1e3:.0f} K tokens/s", ours["gpu"], f"{first['ms']:.0f} ms to {last['ms']:.1f} ms"):
        assert part in shown

def test_the_headline_with_a_race(head):
    "The faster way to compile counts, and 16 bits are said beside FP8; the speed is that of the race"
    line = said(head, WITHOUT + RACE)
    assert line.startswith("**700 K tokens/s")
    assert "1.56× `torch.compile`, 2.00× nanoGPT**" in line
    assert "in 16 bits, as theirs are: 1.25× `torch.compile`, 1.60× nanoGPT." in line

@pytest.mark.parametrize("left, there", [([], []), (["llm_speedrun", "nanogpt"], ["nanoGPT"]),
                                         (["llm_speedrun", "compile_whole"], ["torch.compile"])])
def test_the_headline_leaves_out_who_has_no_record(head, left, there):
    line = said(head, WITHOUT + [r for r in RACE if r["rung"] in left])
    assert [k for k in ("nanoGPT", "torch.compile") if k in line] == there and "16 bits" not in line

def test_another_workload_is_no_rival(head):
    other = [r | dict(workload="1b", batch=16) for r in RACE]
    assert said(head, WITHOUT + other) == said(head, WITHOUT)

# --- to a loss ---

@pytest.fixture(scope="module")
def to_loss():
    cell = next(c for c in INDEX if "def time_to_loss" in source(c))
    space = {}
    exec(source(cell).partition("\nMarkdown(")[0], space)
    return cell, space["time_to_loss"]

def test_the_loss_is_the_record_s(to_loss):
    cell, said = to_loss
    assert "".join(cell["outputs"][0]["data"]["text/markdown"]) == said(FIVE), "run nbs/index.ipynb again, then make readme"
    assert "nats per token" in said(FIVE)

def test_the_loss_needs_a_rival(to_loss):
    made = lambda loss, *way: [dict(loss=loss, tokens=2e8, epochs=5., gpu="a GPU", marks=[dict(loss=v) for v in way])]
    race = dict(clock=300., results=dict(nanochat=made(3.5, 3.4, 3.5), speedrun=made(3.), muon=made(3.2), modded=made(3.25)))
    assert "is at 3.00 nats" in to_loss[1](race) and "40 million tokens" in to_loss[1](race)
    assert "benchmark of optimizers at 3.25, nanochat at 3.50 (3.40 on the way):" in to_loss[1](race) and "3.20" not in to_loss[1](race)
    for left in (dict(speedrun=made(3.)), dict(modded=made(3.))): assert to_loss[1](race | dict(results=left)) == ""
    assert to_loss[1]({}) == ""

# --- README ---

def test_readme_says_what_the_index_says():
    assert README == make_readme(dict(cells=INDEX)), "run make readme"
    assert "".join(HEAD["outputs"][0]["data"]["text/markdown"]).split("[")[0] in README
    for heading in re.findall(r"^## .+$", MARKDOWN, re.M): assert heading in README

def test_readme_links_to_the_site_for_its_pages():
    assert ".qmd" not in README and f"{site()}/compare.html" in README and f"{site()}/train/index.html" in README
    cell = dict(cell_type="markdown", source="[a](train/b.qmd#c) [d](e.ipynb)")
    assert f"[a]({site()}/train/b.html#c) [d](nbs/e.ipynb)" in make_readme(dict(cells=[cell]))

def test_readme_leaves_out_what_is_for_the_site():
    cell = dict(cell_type="markdown", source="<!-- not in the README -->\n\nMore.")
    assert "More." not in make_readme(dict(cells=[cell]))
    assert "More of what" in MARKDOWN and "More of what" not in README

# --- doors ---

def hrefs(contents):
    for o in contents: yield from hrefs(o["contents"]) if "contents" in o else [o["href"]] if isinstance(o, dict) else [o]

def test_the_doors_exist():
    "A page is a file, or one that the site's code writes: it stands in the sidebar then"
    doors = re.findall(r"^- \*\*\[.+?\]\(.+?\)\*\*: ", MARKDOWN, re.M)
    assert targets("".join(doors)) == ["00_gpu.ipynb", "train/index.qmd", "kernels.qmd"]
    sidebar = yaml.safe_load((ROOT/"nbs/sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    known = {*hrefs(sidebar)}
    for t in {*targets(MARKDOWN)}: assert (ROOT/"nbs"/t).exists() or t in known, f"{t} is no page"

# --- what the commands print ---

BLOCKS = dict(re.findall(r"```text\n(Installing|ok)(.*?)```", MARKDOWN, re.S))

def plain(text): return re.sub("  +", " ", text) # columns are as wide as what is in them

def masked(shown):
    "What is shown, with … for what differs by machine: numbers; and ⋮ for the sample and the rungs"
    s = re.sub(r"(--- sample ---\n).*?\n(?=-{14})", r"\1⋮\n", shown, flags=re.S)
    s = re.sub(r"^  \w+(:\S+)?( \(.*\))?\n", "⋮\n", s, flags=re.M)
    s = re.sub(r"\b[0-9a-f]{12}\b|(?<![a-uw-zA-Z\d])\d[\d.,]*", "…", s)
    return re.sub(r"(^⋮\n+)+", "⋮\n", s, flags=re.M)

def pattern(shown):
    "What is shown, as a regular expression for what `plain` leaves: … is something in a line, ⋮ are lines"
    line = lambda o: rf" ?{re.escape(o.strip()).replace('…', '.+?')} ?(?m:$)"
    parts = [re.split("\n+", o) for o in re.split("\n⋮\n", plain(masked(shown)).strip())]
    return r"\n(?s:.*?)(?m:^)".join("\n+".join(map(line, o)) for o in parts)

def program(folder, *args):
    env = os.environ | dict(LLM_SPEEDRUN_CACHE=str(folder/"cache"), PYTHONIOENCODING="utf-8", IN_TEST="1", COLUMNS="200")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    p = subprocess.run([*map(str, args)], cwd=folder, env=env, capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT)
    assert p.returncode == 0, p.stderr
    return p.stdout

def test_make_speedrun_prints_what_is_shown(tmp_path):
    "Seen on a run of a few steps. How `make speedrun` calls it, and what it says before, is in the Makefile"
    made = (ROOT/"Makefile").read_text(encoding="utf-8")
    torch = re.search(r"^TORCH +\?= (.+)$", made, re.M)[1]
    first, rest = ("Installing" + BLOCKS["Installing"]).split("\n", 1)
    assert re.search(pattern(first), made.replace("$(TORCH)", torch).replace("'", "")) and "$(BIN)/speedrun_train $(ARGS)" in made
    (tmp_path/"stdlib-3-v300").mkdir() # little text, so that it takes seconds
    for i in range(60):
        (tmp_path/f"stdlib-3-v300/{i}.txt").write_text(f"Document {i}. The fox jumps over the lazy dog, {i} times.\n" * 20)
    small = ("--data stdlib-3-v300 --vocab 300 --workload tiny --batch 4 --seq 16 --steps 3 "
             "--sample 8 --eval_tokens 64 --evals 1").split()
    call = "from llm_speedrun.train.options import speedrun_train as f; f()"
    printed = program(tmp_path, sys.executable, "-c", call, *small)
    assert re.search(pattern(rest), plain(printed)), f"shown:\n{rest}\nprinted:\n{printed}"

def test_make_test_prints_what_is_shown(tmp_path):
    "Seen on two notebooks and a test of a line each"
    made = (ROOT/"Makefile").read_text(encoding="utf-8")
    assert "$(BIN)/python tests/notebooks.py; notebooks=$$?; \\\n\t$(BIN)/python -m pytest -q" in made
    for folder in ("tests", "nbs"): (tmp_path/folder).mkdir()
    for f in ("settings.ini", "tests/notebooks.py", "tests/quick_kernels.py", "tests/quick_start.py", "tests/timeouts.py"): shutil.copy(ROOT/f, tmp_path/f)
    (tmp_path/".venv").symlink_to(ROOT/".venv")
    nb = dict(cells=[dict(cell_type="code", source="1+1", metadata={}, outputs=[], execution_count=None, id="a")],
              metadata={}, nbformat=4, nbformat_minor=5)
    for name in ("00_gpu", "01_measure"): (tmp_path/f"nbs/{name}.ipynb").write_text(json.dumps(nb))
    lines = program(tmp_path, sys.executable, "tests/notebooks.py").splitlines()
    lines.sort(key=lambda o: (o[:2] != "ok", o.split()[-1])) # two run at a time, so they end in any order
    (tmp_path/"test_a.py").write_text("import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n")
    tested = program(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_a.py")
    printed = "\n".join(lines) + "\n" + tested
    shown = "ok" + BLOCKS["ok"]
    assert re.search(pattern(shown), plain(printed)), f"shown:\n{shown}\nprinted:\n{printed}"

def test_what_differs_is_masked():
    shown = "a step of 1,024 tokens, with\n  bf16\n  flash:backend=flash (1 of 2 ms)\n  recipe adamw: rate 0.1\n\n--- sample ---\nsaid\n--------------\nend"
    assert masked(shown) == ("a step of … tokens, with\n⋮\n  recipe adamw: rate …\n\n--- sample ---\n⋮\n--------------\nend")

def test_a_wrong_shape_is_found():
    shown = pattern("step … of …\n⋮\nthe end")
    assert re.search(shown, "step 3 of 9\n\nmore\nthe end ") and re.search(shown, "step 3 of 9\nthe end")
    for wrong in ("step 3\nthe end", "step 3 of 9\nmore\nan end", "the end\nstep 3 of 9", "step 3 of 9\nthe end, really"):
        assert not re.search(shown, wrong)

def test_minutes_are_the_trainers():
    "Three on a GPU and a good one on a CPU"
    assert "three minutes on a\nlarge GPU, a tiny model for a good minute on a CPU" in MARKDOWN
    assert "c.minutes or (3. if gpu else 1.2)" in (ROOT/"llm_speedrun/train/trainer.py").read_text(encoding="utf-8")

def test_the_rungs_of_use_it_run():
    "The shown list is the course's, and the shown lines take a step, here with what any machine can run"
    import torch
    block = re.search(r"```python\n(.*?)```", MARKDOWN, re.S)[1]
    shown = re.search(r"rungs = (\[.*\])", block)[1]
    assert ast.literal_eval(shown) == COURSE[1:]
    x = y = torch.zeros(1, 8, dtype=torch.long)
    space = dict(x=x, y=y)
    exec(block.replace(shown, '["tf32", "bf16", "flash", "chunked_ce"]').replace("124m", "tiny"), space)
    assert space["loss"].isfinite()

# --- the page that compares ---

FACTS = yaml.safe_load((site_compare.HERE/"projects.yml").read_text(encoding="utf-8"))

@pytest.fixture
def checkout(tmp_path):
    "A function of records: a checkout with these alone"
    def made(records):
        (tmp_path/"nbs/measurements").mkdir(parents=True)
        (tmp_path/"nbs/measurements/nvidia-h200.json").write_text(json.dumps(records))
        shutil.copy(ROOT/"settings.ini", tmp_path)
        return tmp_path
    return made

def rows(page):
    cells = [[c.strip() for c in o.split("|")[1:-1]] for o in page.splitlines() if o.startswith("|")]
    return {o[0]: o[1:] for o in cells}

def missing(page): return re.search(r"^Not measured yet .*: (.*?)\. ", page, re.M)[1].split(", ")

def test_compare_without_a_race(checkout):
    root = checkout(WITHOUT)
    page = pages.written("compare.qmd", root)
    assert missing(page) == [*site_compare.RIVALS.values()] and "What exactly ran" not in page

def test_compare_with_a_race(checkout):
    page = pages.written("compare.qmd", checkout(WITHOUT + RACE))
    found = rows(page)
    assert found["nanoGPT"] == ["350,000", "20.0", "2.00×", "1.60×"] and found["llm_speedrun"][2:] == ["", ""]
    assert missing(page) == ["transformers with Liger", "litgpt", "torchtitan"]
    assert "commit of nanochat;\n  124.0 M weights, 99.0 M of them" in page and "2026-11-23" in page
    assert [k for k in found if found[k][0][:1].isdigit()] == ["llm_speedrun", "llm_speedrun, 16 bits",
        "torch.compile as a whole", "torch.compile by blocks", "nanoGPT", "nanochat"]

def test_compare_says_the_losses_of_the_record():
    page = pages.written("compare.qmd", ROOT)
    for k, rs in FIVE["results"].items():
        loss, seeds, bpb, *_ = rows(page)[site_compare.RACED[k]]
        assert (loss, seeds) == (with_spread([r["loss"] for r in rs]), str(len(rs)))
        assert bpb == f"{mean(r['bpb'] for r in rs):.4f}"
        low = min(m["loss"] for r in rs for m in r["marks"])
        assert (f"{site_compare.RACED[k]}'s loss had been down to {low:.4f}" in page) == (low + .02 < mean(r["loss"] for r in rs))
    waiting = [site_compare.RACED[k] for k in FIVE["field"] if k not in FIVE["results"]]
    assert f"not run yet: {', '.join(waiting)}" in page if waiting else "not run yet" not in page

def test_compare_without_losses(checkout):
    assert "To a loss" not in pages.written("compare.qmd", checkout(RACE))

def test_compare_takes_the_newest_race(checkout):
    old = [r | dict(date="2026-01-01", tok_s=1.) for r in [*RACE, contender("transformers", .3)]]
    found = rows(pages.written("compare.qmd", checkout(old + RACE)))
    assert found["nanoGPT"][0] == "350,000" and "transformers with Liger" not in found

def test_every_project_has_a_commit_and_a_date():
    for name, o in FACTS["projects"].items():
        if name == "llm_speedrun": continue
        assert re.fullmatch(r"[0-9a-f]{40}", o["commit"]) and o["date"] <= FACTS["looked_up"]
        assert o["repo"].startswith("https://github.com/")

@pytest.mark.parametrize("feature", FACTS["features"])
def test_every_fact_has_a_source(feature):
    facts = FACTS["features"][feature]
    assert facts.keys() == FACTS["projects"].keys()
    for project, fact in facts.items():
        text, file = site_compare.split(fact)
        assert file or text in ("no", "–")
        if file and project == "llm_speedrun": assert (ROOT/"nbs"/file).exists() or (ROOT/file).exists(), file

def test_a_fact_without_a_source_is_refused():
    with pytest.raises(ValueError, match="names no file"): site_compare.split("yes, the best")

def test_the_table_links_each_fact():
    page = pages.written("compare.qmd", ROOT)
    for feature, facts in FACTS["features"].items():
        row = rows(page)[f"**{feature}**"]
        assert len(row) == len(FACTS["projects"]) and sum("](" in c for c in row) == sum(bool(f) for f in facts.values())
    made = {"kernels.qmd", "measured/trainers.qmd"} # pages of the site's other makers, which test_links.py looks for
    for t in {*targets(page)} - made: assert (ROOT/"nbs"/t).exists(), t
