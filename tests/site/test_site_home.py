"The home page and the page that compares: what they claim is what records say, what they show is what commands print."
import ast, json, os, re, shutil, subprocess, sys
from statistics import mean
import matplotlib.pyplot as plt, pytest
from helpers.cells import cells, source
from helpers.files import read_yaml
from make_readme import ROOT, make_readme, site, targets
from helpers.prose import measured_numbers
from llm_speedrun.measure import SPINE, records_path
from llm_speedrun.course import COURSE, course_records
from llm_speedrun.benchmarks.race_report import shared_record, with_spread
import build_pages
build_pages.load()
import compare as site_compare, headline, train_pages
from helpers.timeouts import TIMEOUT

INDEX = cells(ROOT/"nbs/index.ipynb")
MARKDOWN = "\n\n".join(source(c) for c in INDEX if c["cell_type"] == "markdown")
README = (ROOT/"README.md").read_text(encoding="utf-8")
RECORDS = json.loads((ROOT/"nbs/site/measurements/nvidia-h200.json").read_text(encoding="utf-8"))
FIVE = shared_record("five", folder=ROOT/"nbs/site/measurements")
# --- the headline ---

def contender(name, ratio, **more): # as `race` of 3_past_the_ladder/38_peers.ipynb records it
    ours = dict(before=None) if name == "llm_speedrun" else dict(before="llm_speedrun")
    return dict(rung=name, ratio=ratio, workload=SPINE[0], batch=SPINE[1], seq=1024, tok_s=7e5*ratio, peak_gib=20.,
                source=f"commit of {name}", rungs=[], micro=64, parameters=124e6, in_products=99e6, gpu="NVIDIA H200", torch="2.11.0", driver="580",
                date="2026-11-23") | ours | more

SPEEDS = {"llm_speedrun": 1., "llm_speedrun, 16 bits": .8, "compile_blocks": .6, "compile_whole": .64, "nanogpt": .5,
          "nanochat": .4}
RACE = [contender(*o) for o in SPEEDS.items()]
WITHOUT = [r for r in RECORDS if headline.OURS not in (r["rung"], r["before"])]
RACED = headline.race(WITHOUT + RACE)

def outputs(): return ["".join(o["data"]["text/markdown"]) for c in INDEX if c["cell_type"] == "code" for o in c["outputs"]]

def test_the_home_page_is_what_records_say():
    "The facts, the table with its cautions, and the number that all of them share"
    race, again = headline.newest(), "run nbs/index.ipynb again: tests/run_notebook.py, then make readme"
    table = f'<div class="race">\n\n{site_compare.speeds(race)}\n\n</div>'
    assert outputs() == [headline.facts(race), headline.first_run(), f"{table}\n\n{headline.cautions(race)}"], again
    ours = race[headline.OURS]
    for part in (f"{ours['tok_s']/1e3:.0f} K tokens/s", ours["gpu"], ours["date"]): assert part in outputs()[0]

def test_no_number_is_typed():
    "In the prose of the home page: what is measured stands in its outputs"
    assert not [*measured_numbers(MARKDOWN)]

def test_one_number_leads():
    "Where a reader enters no other speed of ours stands beside it: the ladder's top has it in pictures and tables alone"
    lead = headline.thousands(headline.newest()[headline.OURS])
    made = [build_pages.written(k, ROOT) for k in ("course.qmd", "compare.qmd", "measured/index.qmd")]
    made += [text for _, text in train_pages.rendered(ROOT)]
    for text in [README, MARKDOWN, *outputs(), *made]:
        prose = re.sub(r"^\|.*$|^```.*?^```", "", text, flags=re.M | re.S)
        found = re.findall(r"[\d.,]+ K tokens/s|\b1[78]\.3 ?(?:×|times)|[\d,]{6,} tokens (?:a second|/s)", prose)
        assert {*found} <= {lead}

def test_facts_of_a_race():
    "The faster way to compile counts, and bf16 is said beside FP8"
    facts = headline.facts(RACED, "A loss").splitlines()
    assert facts[0] == '<div class="facts">' and facts[-1] == "</div>" and len([o for o in facts if o.startswith("- ")]) == 4
    assert "700 K tokens/s" in facts[2] and "2.00× nanoGPT, 1.56× torch.compile** with ours in FP8, theirs in bf16" in facts[3]
    assert "1.60× nanoGPT, 1.25× torch.compile** with ours in bf16 as well" in facts[4] and facts[5] == "- A loss."

def test_cautions():
    for part in ("in bf16", "no third party", "one NVIDIA H200", "2026-11-23"): assert part in headline.cautions(RACED)
    assert "needs" not in headline.cautions(RACED)
    assert headline.in_8_bits() in headline.cautions(RACED)
    with_both = RACED | {headline.OURS: RACED[headline.OURS] | dict(rungs=["flash4", "fp8_epilogues"])}
    assert "needs FlashAttention-4 and QuACK" in headline.cautions(with_both)

def test_8_bits_beside_8_bits(tmp_path):
    path, r = tmp_path/"peers.json", dict(gpu="NVIDIA H100 80GB HBM3", date="2026-11-26", workload="124m", ratio=.625)
    path.write_text(json.dumps([r | dict(rung="nanogpt_tensorwise"), r | dict(rung="nanogpt", ratio=.1), r | dict(rung="nanochat_fp8", workload="1b", ratio=.1)]))
    assert headline.in_8_bits(path) == "FP8 on both sides (NVIDIA H100 80GB HBM3, 2026-11-26): 1.60× nanoGPT with torchao. "
    path.write_text(json.dumps([r | dict(rung="nanogpt_tensorwise"), r | dict(rung="nanochat_fp8", date="2026-11-27", ratio=.5)]))
    assert "2026-11-26 and 2026-11-27): 1.60× nanoGPT with torchao, 2.00× nanochat" in headline.in_8_bits(path)
    assert headline.in_8_bits(tmp_path/"none.json") == ""

@pytest.mark.parametrize("left, there", [(["llm_speedrun", "nanogpt"], "nanoGPT"), (["llm_speedrun", "compile_whole"], "torch.compile")])
def test_who_has_no_record_is_left_out(left, there):
    said = headline.speedups(headline.race(WITHOUT + [r for r in RACE if r["rung"] in left]))
    assert said.endswith(f"× {there}") and "," not in said

def test_another_workload_is_no_rival():
    assert headline.race([r | dict(workload="1b", batch=16) for r in RACE]) == {}

def test_the_first_card_with_a_race_leads(tmp_path):
    "The H100 is the card of the course, and takes the place of the H200 as soon as it has records"
    def keep(gpu, records): (tmp_path/records_path(gpu).name).write_text(json.dumps([r | dict(gpu=gpu) for r in records]))
    h100, h200 = headline.CARDS
    assert headline.newest(tmp_path) == {}
    keep(h200, RACE)
    assert headline.newest(tmp_path)["llm_speedrun"]["gpu"] == h200
    keep(h100, RACE[:1])
    assert headline.newest(tmp_path)["llm_speedrun"]["gpu"] == h200, "alone, it is no race"
    keep(h100, RACE)
    assert headline.newest(tmp_path)["llm_speedrun"]["gpu"] == h100

def test_the_chart_has_a_line_for_each_rival():
    ax = headline.chart(RACED, course_records())
    assert [float(line.get_xdata()[0]) for line in ax.get_lines()] == pytest.approx([RACED[k]["tok_s"]/1e3 for k in ("nanogpt", "compile_whole")])
    assert [t.get_text() for t in ax.texts if "bf16" in t.get_text()] == ["nanoGPT, 350 K, bf16", "torch.compile, 448 K, bf16"]
    widths = [b.get_width() for b in ax.patches]
    assert len(widths) == len(course_records()) + 2 and widths[-2:] == pytest.approx([700, 560])
    plt.close(ax.figure)

# --- to a loss ---

def test_the_loss_needs_a_rival(monkeypatch):
    made = lambda loss: [dict(loss=loss, marks=[])]
    race = dict(clock=300., results=dict(nanochat=made(3.5), speedrun=made(3.), muon=made(3.2), modded=made(3.25)))
    monkeypatch.setattr(headline, "shared_record", lambda *a, **kw: race)
    assert "**Loss 3.00 after [5 minutes]" in headline.losses() and "modded-nanogpt's benchmark 3.25" in headline.losses()
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
    "A sentence of promise, one for whom, three ways in, the commands, four facts, then the chart"
    order = ["> Train", "for PyTorch users", "Take the course", "Train on your text", "Use the kernels", "git clone", "make speedrun",
             '<div class="facts">', "images/ladder.png", "## Try it"]
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
    for f in ("settings.ini", "tests/notebooks.py", "tests/helpers/quick_figures.py", "tests/helpers/quick_kernels.py", "tests/helpers/quick_start.py", "tests/helpers/timeouts.py"): shutil.copy(ROOT/f, tmp_path/f)
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
        (tmp_path/"nbs/site/measurements").mkdir(parents=True)
        (tmp_path/"nbs/site/measurements/nvidia-h200.json").write_text(json.dumps(records))
        shutil.copy(ROOT/"settings.ini", tmp_path)
        return tmp_path
    return made

def rows(page):
    cells = [[c.strip() for c in o.split("|")[1:-1]] for o in page.splitlines() if o.startswith("|")]
    return {o[0]: o[1:] for o in cells}

def missing(page): return re.search(r"^Not measured yet .*: (.*?)\. ", page, re.M)[1].split(", ")

def test_compare_without_a_race(checkout):
    root = checkout(WITHOUT)
    page = build_pages.written("compare.qmd", root)
    assert missing(page) == [*site_compare.RIVALS.values()] and "What exactly ran" not in page

def test_compare_with_a_race(checkout):
    page = build_pages.written("compare.qmd", checkout(WITHOUT + RACE))
    found = rows(page)
    assert found["nanoGPT"] == ["350,000", "20.0", "2.00×", "1.60×"] and found["**llm_speedrun**, FP8"][2:] == ["", ""]
    assert missing(page) == ["transformers with Liger", "litgpt", "torchtitan"]
    assert "commit of nanochat;\n  124.0 M weights, 99.0 M of them" in page and "2026-11-23" in page
    assert [k for k in found if found[k][0][:1].isdigit()] == ["**llm_speedrun**, FP8", "**llm_speedrun**, bf16 only",
        "torch.compile as a whole", "torch.compile by blocks", "nanoGPT", "nanochat"]

def test_compare_says_the_losses_of_the_record():
    page = build_pages.written("compare.qmd", ROOT)
    for k, rs in FIVE["results"].items():
        loss, seeds, bpb, *_ = rows(page)[site_compare.RACED[k]]
        assert (loss, seeds) == (with_spread([r["loss"] for r in rs]), str(len(rs)))
        assert bpb == f"{mean(r['bpb'] for r in rs):.4f}"
        low = min(m["loss"] for r in rs for m in r["marks"])
        assert (f"{site_compare.RACED[k]}'s loss had been down to {low:.4f}" in page) == (low + .02 < mean(r["loss"] for r in rs))
    waiting = [site_compare.RACED[k] for k in FIVE["field"] if k not in FIVE["results"]]
    assert f"not run yet: {', '.join(waiting)}" in page if waiting else "not run yet" not in page

def test_compare_without_losses(checkout):
    assert "To a loss" not in build_pages.written("compare.qmd", checkout(RACE))

def test_compare_takes_the_newest_race(checkout):
    old = [r | dict(date="2026-01-01", tok_s=1.) for r in [*RACE, contender("transformers", .3)]]
    found = rows(build_pages.written("compare.qmd", checkout(old + RACE)))
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
    page = build_pages.written("compare.qmd", ROOT)
    for feature, facts in FACTS["features"].items():
        row = rows(page)[f"**{feature}**"]
        assert len(row) == len(FACTS["projects"]) and sum("](" in c for c in row) == sum(bool(f) for f in facts.values())
    made = {"measured/trainers.qmd", *(f"train/{p.name}" for p in (ROOT/"nbs/site/_build/train").glob("*.qmd"))} # which test_links.py looks for
    for t in {*targets(page)} - made: assert (ROOT/"nbs/site"/t).exists(), t
