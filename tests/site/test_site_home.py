"The home page and the page that compares: what they claim is what records say, what they show is what commands print."
import ast, json, os, re, shutil, subprocess, sys
from statistics import mean
import matplotlib.pyplot as plt, pytest
from helpers.cells import cells, source
from helpers.files import read_yaml
from make_readme import ROOT, make_readme, site, targets
from helpers.prose import measured_numbers
from llm_speedrun.measure import SPINE
from llm_speedrun.course import COURSE
from llm_speedrun.records import code_of
from llm_speedrun.benchmarks.race_report import shared_record, with_spread
import build_pages
build_pages.load()
import compare as site_compare, headline, templating, train_pages
from helpers.timeouts import TIMEOUT

INDEX = cells(ROOT/"nbs/index.ipynb")
MARKDOWN = "\n\n".join(source(c) for c in INDEX if c["cell_type"] == "markdown")
README = (ROOT/"README.md").read_text(encoding="utf-8")
FIVE = shared_record("five", folder=ROOT/"nbs/site/measurements")
# --- the headline ---

MEASUREMENTS = ROOT/"nbs/site/measurements"
H100, H200 = headline.CARDS
STACK = dict(gpu=H100, driver="580", torch="2.11.0", triton="3.6.0", date="2026-11-27", packages=dict(torchao="0.17"), commit="0123abcd", run="a", notebook="x")

def contender(rung, ratio, **more): # as a measuring run records it
    ours = dict(before=None, code=code_of(["flash4"]), rungs=["flash4"]) if rung.startswith("fastest") else dict(before="fastest", code=None, rungs=[])
    return STACK | dict(rung=rung, ratio=ratio, ratio_p10=ratio*.98, ratio_p90=ratio*1.02, workload=SPINE[0], batch=SPINE[1], seq=1024, tok_s=7e5*ratio, ms=65.536/.7/ratio,
                        peak_gib=20., source=f"commit of {rung}", micro=64, parameters=124e6, in_products=99e6, dtype="fp8" if rung in IN_FP8 else "bf16") | ours | more

IN_FP8 = "fastest", "nanogpt_tensorwise"
SPEEDS = {"fastest": 1., "fastest16": .8, "compile_whole": .6, "compile_flash4": .64, "nanogpt": .5, "nanogpt_tensorwise": .51, "nanochat": .4}
RACE = [contender(*o) for o in SPEEDS.items()]

def kept(folder, records, name="headline/nvidia-h100.json"):
    "A folder of measurements with these records in a file"
    (folder/name).parent.mkdir(parents=True, exist_ok=True)
    (folder/name).write_text(json.dumps(records))
    return folder

def run_of(folder, records=RACE, **more): return headline.newest(kept(folder, [r | more for r in records]))

def outputs(): return ["".join(o["data"]["text/markdown"]) for c in INDEX if c["cell_type"] == "code" for o in c["outputs"]]

def test_the_home_page_is_what_records_say():
    "The facts, the table with its cautions, and the number that all of them share"
    run, again = headline.newest(), "run nbs/index.ipynb again: tests/run_notebook.py, then make readme"
    table = f'<div class="race">\n\n{site_compare.speeds(headline.strongest(run))}\n\n</div>'
    assert outputs() == [headline.facts(run), headline.first_run(), f"{table}\n\n{headline.larger()}\n\n{headline.cautions(run)}"], again
    ours = run[headline.OURS]
    for part in (f"{ours['tok_s']/1e3:.0f} K tokens/s", ours["gpu"], ours["date"]): assert part in outputs()[0]

@pytest.mark.parametrize("workload", [SPINE[0], headline.LARGER])
def test_headline_numbers_come_from_one_run(workload):
    "One commit, card and stack, with the strongest form of each rival on record. A run kept for the headline is of a clean commit, and has the strongest form of those that lead"
    run = headline.newest(workload=workload)
    assert {headline.OURS, headline.OURS_16} <= run.keys() and headline.differences(run) == []
    for whose in {headline.project(r) for r in headline.rivals(run).values()}:
        best = headline.best(run, whose)
        others = [o for o in headline.raced() if headline.project(o) == whose and all(o[k] == best[k] for k in ("gpu", "workload", "batch", "seq"))]
        assert not [o["rung"] for o in others if o["rung"] not in run and o["tok_s"] > best["tok_s"]], f"a stronger {whose} is on record"
    for path in (MEASUREMENTS/"headline").glob("*.json"):
        for r in json.loads(path.read_text(encoding="utf-8")):
            assert re.fullmatch("[0-9a-f]{7,40}", str(r["commit"])) and {"run", "packages", "measured", *headline.SAME} <= r.keys(), (path.name, r["rung"])
    led = {headline.project(r) for k, r in headline.leading(workload=workload).items() if k not in run}
    if "run" in run[headline.OURS]: assert not led & {*headline.LED}, "race the stronger form of it in the same run"

@pytest.mark.parametrize("change", [dict(commit="4567abcd"), dict(gpu=H200), dict(torch="2.13.0"), dict(driver="590"), dict(packages=dict(torchao="0.18")), dict(workload="1b")])
def test_programs_that_never_coexisted_are_found(change):
    run = {r["rung"]: r for r in RACE}
    assert headline.differences(run) == []
    assert headline.differences(run | {"nanogpt": run["nanogpt"] | change}) == [*change]

def test_a_stronger_form_on_record_takes_the_rival_out(tmp_path):
    "In any file, on the same card, workload and precision; the same form on another day is no other form"
    for name, other, is_stronger in [("peers/nvidia-h100.json", contender("compile_autotuned", .7, run="b"), True),
                                     ("nvidia-h100.json", contender("compile_autotuned", .7, run="b"), True),
                                     ("peers/nvidia-h100.json", contender("compile_autotuned", .63, run="b"), False),
                                     ("peers/nvidia-h100.json", contender("compile_flash4", .7, run="b"), False),
                                     ("peers/nvidia-h200.json", contender("compile_autotuned", .7, run="b", gpu=H200), False),
                                     ("peers/nvidia-h100.json", contender("compile_tensorwise", .7, run="b", dtype="fp8"), False),
                                     ("peers/nvidia-h100.json", contender("compile_autotuned", .7, run="b", batch=32), False)]:
        shutil.rmtree(tmp_path); tmp_path.mkdir()
        kept(kept(tmp_path, RACE), [other], name)
        run = headline.newest(tmp_path)
        assert ("compile_flash4" not in run) == is_stronger, other
        assert headline.left_out(tmp_path) == (["torch.compile as a whole", "torch.compile, FlashAttention-4, chunked loss"] if is_stronger else [])
        assert ("torch.compile" in headline.speedups(run)) != is_stronger
    both = [*RACE, contender("compile_tensorwise", .55, dtype="fp8")]
    kept(kept(tmp_path, both), [contender("compile_autotuned", .7, run="b")], "peers/nvidia-h100.json")
    assert "torch.compile" not in headline.speedups(headline.newest(tmp_path)), "not its slower precision in place of the faster"

def test_no_number_is_typed():
    "In the prose of the home page: what is measured stands in its outputs"
    assert not [*measured_numbers(MARKDOWN)]

def test_few_numbers_lead():
    "Where a reader enters no other speed of ours stands beside those of the facts: the ladder's top has it in pictures and tables alone"
    lead = {*re.findall(r"[\d.,]+ K tokens/s", headline.facts(headline.newest()) + headline.larger())}
    assert len(lead) == 4
    made = [build_pages.written(k, ROOT) for k in ("course.qmd", "compare.qmd", "measured/index.qmd", "measured/compiler.qmd")]
    made += [text for _, text in train_pages.rendered(ROOT)]
    for text in [README, MARKDOWN, *outputs(), *made]:
        prose = re.sub(r"^\|.*$|^```.*?^```", "", text, flags=re.M | re.S)
        found = re.findall(r"[\d.,]+ K tokens/s|\b1[78]\.3 ?(?:×|times)|[\d,]{6,} tokens (?:a second|/s)", prose)
        assert {*found} <= lead

def test_facts_of_a_run(tmp_path):
    "The faster way to compile counts, of any precision beside FP8, and of bf16 beside bf16; training has a record of its own, or none"
    facts = headline.facts(run_of(tmp_path), "A loss", tmp_path).splitlines()
    assert facts[0] == '<div class="facts">' and facts[-1] == "</div>" and len([o for o in facts if o.startswith("- ")]) == 5
    assert "700 K tokens/s in FP8, 560 K tokens/s in bf16" in facts[2] and "commit 0123abcd" in facts[2] and "older code" not in facts[2]
    assert "1.56× torch.compile, 1.96× nanoGPT" in facts[3] and "1.25× torch.compile, 1.60× nanoGPT** with bf16 on both sides" in facts[4]
    assert facts[5] == "- Training with the default recipe on real text: not measured in that run." and facts[6] == "- A loss."
    trained = [*RACE, contender("fastest", 1., measured="training", tok_s=6e5, part="all", seconds=20.)]
    assert "600 K tokens/s in training** with the default recipe on real text, in the same run." in headline.facts(run_of(tmp_path, trained), "", tmp_path)
    old = [*RACE, {k: v for k, v in trained[-1].items() if k != "part"}]
    assert "in the same run (the second half of 20 seconds, with fewer updates a step than the first)." in headline.facts(run_of(tmp_path, old), "", tmp_path)
    assert "not measured in that run" in headline.facts(run_of(tmp_path, [*RACE, trained[-1] | dict(run="b")]), "", tmp_path)

@pytest.mark.parametrize("more", [dict(commit="0123abcd-dirty"), dict(commit=None), dict(code="0123456789abcdef", rungs=["flash"])])
def test_older_code_is_said(tmp_path, more):
    assert "measured with older code" in headline.facts(run_of(tmp_path, **more), "", tmp_path)

def test_lists_without_a_rung_are_no_headline(tmp_path):
    assert "fastest-without-flash4" not in run_of(tmp_path, [*RACE, contender("fastest-without-flash4", 1.1)])

def test_cautions(tmp_path):
    run = run_of(tmp_path)
    for part in ("in bf16", "No third party", "need FlashAttention-4"): assert part in headline.cautions(run)
    assert "need" not in headline.cautions({k: r | dict(rungs=[]) for k, r in run.items()})
    assert "FlashAttention-4 and QuACK" in headline.cautions(run | {"fastest": run["fastest"] | dict(rungs=["flash4", "fp8_epilogues"])})

def test_older_runs_have_ours_from_beside_the_others(tmp_path):
    "A process measured the joules of our step once: that tells its records from those of another"
    one = [{k: v for k, v in r.items() if k not in ("run", "commit")} | dict(joules_of_fastest=60., ms_of_fastest=ms) for r, ms in zip(RACE[1:], (90, 91, 92, 93, 94, 95))]
    run = headline.newest(kept(tmp_path, [*one, one[2] | dict(joules_of_fastest=61., rung="compile_blocks")], "peers/nvidia-h100.json"))
    assert [*run] == ["fastest", "fastest16", "compile_whole", "compile_flash4", "nanogpt", "nanogpt_tensorwise", "nanochat"]
    assert (run["fastest"]["ms"], headline.differences(run)) == (92.5, []) and run["fastest"]["tok_s"] == pytest.approx(65536/.0925)

def test_the_home_page_shows_the_strongest_forms(tmp_path):
    assert [*headline.strongest(run_of(tmp_path))] == ["fastest", "fastest16", "compile_flash4", "nanogpt", "nanogpt_tensorwise", "nanochat"]

def test_ranges(tmp_path):
    run = run_of(tmp_path)
    assert headline.times_of(run, run["nanogpt"]) == pytest.approx((2, .98/.51, 1.02/.49))
    assert headline.times_of(run, run["nanogpt"], "fastest16") == pytest.approx((1.6, .784/.51, .816/.49))

@pytest.mark.parametrize("left, there", [(["fastest", "nanogpt"], "nanoGPT"), (["fastest", "compile_whole"], "torch.compile")])
def test_who_has_no_record_is_left_out(tmp_path, left, there):
    said = headline.speedups(run_of(tmp_path, [r for r in RACE if r["rung"] in left]))
    assert said.endswith(f"× {there}") and "," not in said

def test_another_workload_is_no_rival(tmp_path):
    assert run_of(tmp_path, workload="1b") == {} and headline.larger(tmp_path).startswith("A model of a billion weights (`1b`, ")

def test_the_newest_run_of_the_first_card_leads(tmp_path):
    "The H100 is the card of the course, and takes the place of the H200 as soon as it has a run with rivals"
    def dates(): return [(r["gpu"], r["date"]) for r in headline.newest(tmp_path).values()][:1]
    assert headline.newest(tmp_path) == {}
    kept(tmp_path, [r | dict(gpu=H200, run="c") for r in RACE], "headline/nvidia-h200.json")
    assert dates() == [(H200, "2026-11-27")]
    kept(tmp_path, RACE[:1])
    assert dates() == [(H200, "2026-11-27")], "alone, it is no race"
    kept(tmp_path, [{k: v for k, v in r.items() if k != "run"} | dict(joules_of_fastest=60., date="2026-11-30") for r in RACE])
    assert dates() == [(H200, "2026-11-27")], "its records name neither run nor commit"
    kept(tmp_path, RACE + [r | dict(run="b", date="2026-11-28") for r in RACE])
    assert dates() == [(H100, "2026-11-28")]

def test_the_chart_has_a_bar_for_each(tmp_path):
    ax = headline.chart(run := run_of(tmp_path))
    assert [b.get_width() for b in ax.patches] == pytest.approx(sorted((r["tok_s"]/1e3 for r in run.values()), reverse=True))
    assert "2026-11-27" in ax.figure.get_supxlabel() and H100 in ax.figure.get_supxlabel()
    plt.close(ax.figure)

# --- to a loss ---

def test_the_loss_names_what_it_was_measured_with(monkeypatch):
    made = lambda loss: [dict(loss=loss, marks=[], updates=900, precision="bf16", gpu=H100, date="2026-11-29", step=900, kind="x")]*2
    race = dict(clock=300., corpus="120 M tokens of public code", results=dict(nanochat=made(3.5), speedrun=made(3.), muon=made(3.2), modded=made(3.25)))
    monkeypatch.setattr(headline, "shared_record", lambda *a, **kw: race)
    said = headline.losses()
    for part in ("**Loss 3.00 (bf16, 900 updates, 2 seeds) after [5 minutes]", "modded-nanogpt's benchmark 3.25 (bf16", "120 M tokens of public code", H100, "2026-11-29"): assert part in said
    for key in ("updates", "precision"):
        race["results"]["modded"] = [{k: v for k, v in r.items() if k != key} for r in made(3.25)]
        assert headline.losses() == "", f"without {key}"
    race["results"]["modded"] = made(3.25)
    assert headline.losses() and (race.pop("corpus"), headline.losses())[1] == ""
    race["corpus"] = "x"
    for left in ({}, dict(speedrun=made(3.)), dict(modded=made(3.))):
        race["results"] = left
        assert headline.losses() == ""

# --- README ---

def test_readme_says_what_the_index_says():
    assert README == make_readme(dict(cells=INDEX)), "run make readme"
    for heading in re.findall(r"^## .+$", MARKDOWN, re.M): assert heading in README

def test_readme_and_home_are_short(): # 900 words
    assert len(README.split()) <= 900 and len("\n".join([MARKDOWN, *outputs()]).split()) <= 900

def test_the_first_lines_say_what_it_is():
    "A sentence of promise, one for whom, three ways in, the commands, the facts, then the chart"
    order = ["> Train", "for PyTorch users", "Take the course", "Train on your text", "Use the kernels", "git clone", "make speedrun",
             '<div class="facts">', "images/speed.png", "## Try it"]
    places = [README.index(o) for o in order]
    assert places == sorted(places)
    promise, whom = README.split("\n\n")[2:4]
    assert len(promise.split()) < 30 and len(whom.split()) < 40

def test_readme_links_to_the_site_for_its_pages():
    assert ".qmd" not in README and f"{site()}/site/compare.html" in README and f"{site()}/site/train/index.html" in README
    cell = dict(cell_type="markdown", source="[a](train/b.qmd#c) [d](e.ipynb)")
    assert f"[a]({site()}/train/b.html#c) [d](nbs/e.ipynb)" in make_readme(dict(cells=[cell]))

def test_readme_leaves_out_what_is_for_the_site():
    cell = dict(cell_type="markdown", source="<!-- not in the README -->\n\nMore.")
    assert "More." not in make_readme(dict(cells=[cell]))

# --- links of the home page ---

def hrefs(contents):
    for o in contents: yield from hrefs(o["contents"]) if "contents" in o else [o["href"]] if isinstance(o, dict) else [o]

def test_links_of_the_home_page_exist():
    "A page is a file, or one that the site's code writes: it stands in the sidebar then"
    links = re.findall(r"^- \*\*\[.+?\]\(.+?\)\*\* ", MARKDOWN, re.M)
    assert targets("".join(links)) == ["site/course.qmd", "site/train/index.qmd", "site/kernels.qmd"]
    sidebar = read_yaml(ROOT/"nbs/sidebar.yml")["website"]["sidebar"]["contents"]
    known = {*hrefs(sidebar)}
    for t in {*targets(MARKDOWN)}: assert (ROOT/"nbs"/t).exists() or t in known, f"{t} is no page"

# --- what the commands print ---

BLOCKS = dict(re.findall(r"```text\n(A Hopper GPU|ok)(.*?)```", README, re.S))

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
    "Seen on a run of a few steps. How `make speedrun` calls it, and what it prints before, is in the Makefile"
    made = (ROOT/"Makefile").read_text(encoding="utf-8")
    first, rest = ("A Hopper GPU" + BLOCKS["A Hopper GPU"]).split("\n", 1)
    assert f"echo '{first}'" in made and "$(BIN)/speedrun_train $(ARGS)" in made
    rest = re.sub(r"^step .* MFU .*\n", "", rest, flags=re.M).replace("runs/124m", "runs/tiny") # a CPU has no MFU
    (tmp_path/"stdlib-3-v300").mkdir() # little text, so that it takes seconds
    for i in range(60):
        (tmp_path/f"stdlib-3-v300/{i}.txt").write_text(f"Document {i}. The fox jumps over the lazy dog, {i} times.\n" * 20)
    rest = rest.replace("\neverything is", "\n⋮\neverything is") # a line about the run's time, which wasn't printed on the date that is shown
    small = ("--data stdlib-3-v300 --vocab 300 --model tiny --micro_batch_size 4 --seq_len 16 --steps 3 "
             "--sample_tokens 8 --eval_tokens 64 --num_evals 1").split()
    call = "from llm_speedrun.cli import speedrun_train as f; f()"
    printed = program(tmp_path, sys.executable, "-c", call, *small)
    assert re.search(pattern(rest), plain(printed)), f"shown:\n{rest}\nprinted:\n{printed}"

def test_shown_lines():
    assert headline.shown_lines("a\nb\nc\nd\ne", ("b", "d", "e")) == "b\n⋮\nd\ne"

def test_make_test_prints_what_is_shown(tmp_path):
    "Seen on two notebooks and a test of a line each"
    made = (ROOT/"Makefile").read_text(encoding="utf-8")
    assert "$(BIN)/python tests/notebooks.py; notebooks=$$?; \\\n\t$(BIN)/python -m pytest -q" in made
    for folder in ("tests/helpers", "nbs/1_start"): (tmp_path/folder).mkdir(parents=True)
    for f in ("settings.ini", "tests/notebooks.py", "tests/helpers/cpu_times.py", "tests/helpers/quick_counts.py", "tests/helpers/quick_figures.py", "tests/helpers/quick_kernels.py", "tests/helpers/quick_start.py", "tests/helpers/timeouts.py"): shutil.copy(ROOT/f, tmp_path/f)
    (tmp_path/".venv").symlink_to(ROOT/".venv")
    nb = dict(cells=[dict(cell_type="code", source="1+1", metadata={}, outputs=[], execution_count=None, id="a")],
              metadata={}, nbformat=4, nbformat_minor=5)
    for name in ("01_gpu", "02_measure"): (tmp_path/f"nbs/1_start/{name}.ipynb").write_text(json.dumps(nb))
    lines = program(tmp_path, sys.executable, "tests/notebooks.py").splitlines()
    lines.sort(key=lambda o: (o[:2] != "ok", o.split()[-1])) # several run at a time, so they end in any order
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
    assert "three minutes on a\nlarge GPU, a tiny model for a little over a minute on a CPU" in MARKDOWN
    assert "3. if gpu else 1.2" in (ROOT/"llm_speedrun/train/resolve.py").read_text(encoding="utf-8")

def test_the_rungs_of_use_it_run():
    "The shown list is the course's, and the shown lines take a step, here with what any machine can run"
    import torch
    block = re.search(r"```python\n(.*?)```", build_pages.written("course.qmd", ROOT), re.S)[1]
    shown = re.search(r"rungs = (\[.*\])", block)[1]
    assert ast.literal_eval(shown) == COURSE[1:]
    x = y = torch.zeros(1, 8, dtype=torch.long)
    space = dict(x=x, y=y)
    exec(block.replace(shown, '["tf32", "bf16", "flash", "chunked_ce"]').replace("124m", "tiny"), space)
    assert space["loss"].isfinite()

# --- the page that compares ---

FACTS = read_yaml(site_compare.HERE/"projects.yml")

@pytest.fixture
def checkout(tmp_path):
    "A function of records: a checkout with these alone"
    def made(records):
        kept(tmp_path/"nbs/site/measurements", records)
        shutil.copy(ROOT/"settings.ini", tmp_path)
        return tmp_path
    return made

def rows(page):
    cells = [[c.strip() for c in o.split("|")[1:-1]] for o in page.splitlines() if o.startswith("|")]
    return {o[0]: o[1:] for o in cells}

def test_compare_without_a_race(checkout):
    page = build_pages.written("compare.qmd", checkout([]))
    assert f"Not measured yet in this run: {', '.join(headline.PROJECTS.values())}. " in page and "What exactly ran" not in page and "Published by others" not in page

def test_compare_with_a_race(checkout):
    page = build_pages.written("compare.qmd", checkout(RACE))
    found = rows(page)
    assert found["nanoGPT"] == ["350,000", "20.0", "2.00× (1.92–2.08)", "1.60× (1.54–1.67)"] and found["**llm_speedrun**, FP8"][2:] == ["", ""]
    assert found["nanoGPT, torchao's FP8"][-1] == "", "our bf16 is compared with bf16"
    assert "Not measured yet in this run: transformers, litgpt, torchtitan, LLMQ, modded-nanogpt. " in page
    assert "commit of nanochat;\n  124.0 M weights, 99.0 M of them" in page and "2026-11-27" in page
    assert [k for k in found if found[k][0][:1].isdigit()] == ["**llm_speedrun**, FP8", "**llm_speedrun**, bf16 only",
        "torch.compile, FlashAttention-4, chunked loss", "torch.compile as a whole", "nanoGPT, torchao's FP8", "nanoGPT", "nanochat"]

def test_compare_shows_what_others_publish():
    "Each with its source; whoever stands there is described on the page"
    page = build_pages.written("compare.qmd", ROOT)
    for r in json.loads((MEASUREMENTS/"published.json").read_text(encoding="utf-8")):
        assert r["source"].startswith("https://github.com/") and f"| [{r['project']}]({r['source']}) | {r['what']} | {r['model']} | {r['precision']} | {r['tok_s']:,} |" in page
        assert f"**{r['project']}** " in page

def test_compare_says_the_losses_of_the_record():
    page = build_pages.written("compare.qmd", ROOT)
    for k, rs in FIVE["results"].items():
        loss, seeds, bpb, precision, updates, *_ = rows(page)[site_compare.RACED[k]]
        assert (loss, seeds) == (with_spread([r["loss"] for r in rs]), str(len(rs)))
        assert bpb == f"{mean(r['bpb'] for r in rs):.4f}"
        steps = mean(r["step"] for r in rs) # ours make four, two, then one update in a step
        assert precision == ("FP8" if rs[0]["kind"] == "ours" else "bf16") and float(updates.replace(",", "")) == pytest.approx(steps*(7/3 if precision == "FP8" else 1), abs=2)
        low = min(m["loss"] for r in rs for m in r["marks"])
        assert (f"{site_compare.RACED[k]}'s loss had been down to {low:.4f}" in page) == (low + .02 < mean(r["loss"] for r in rs))
    waiting = [site_compare.RACED[k] for k in FIVE["field"] if k not in FIVE["results"]]
    assert f"not run yet: {', '.join(waiting)}" in page if waiting else "not run yet" not in page

def test_compare_without_losses(checkout):
    assert "To a loss" not in build_pages.written("compare.qmd", checkout(RACE))

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
    page = build_pages.written("compare.qmd", ROOT)
    for feature, facts in FACTS["features"].items():
        row = rows(page)[f"**{feature}**"]
        assert len(row) == len(FACTS["projects"]) and sum("](" in c for c in row) == sum(bool(f) for f in facts.values())
    made = {*templating.PAGES, *(f"train/{p.name}" for p in (ROOT/"nbs/site/_build/train").glob("*.qmd"))} # which test_links.py looks for
    for t in {*targets(page)} - made: assert (ROOT/"nbs/site"/t).exists(), t
