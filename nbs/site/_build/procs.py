"""What the docs site adds to a lesson as it is committed: a box with its facts, links from names to
definitions, and at each exported cell its anchors and a folded table of parameters.

nbdev calls these processors for each notebook (`procs` in settings.ini; `make docs` puts this folder on the
path). No code of a lesson is imported or run: names and signatures are read from syntax trees, numbers from
records."""
import ast, io, json, posixpath, re, tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from pathlib import Path
from execnb.nbio import mk_cell
from nbdev.config import get_config
from nbdev.doclinks import patch_name
from nbdev.process import Processor

T4 = 7, 5    # the compute capability of the GPU that Colab lends for nothing, which has neither bf16 nor FP8

# --- what a notebook defines and imports ---

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DEFINITIONS = *FUNCTIONS, ast.ClassDef

@dataclass
class Definition:
    name: str    # with its class before a dot
    node: ast.AST
    source: str    # of its cell

    @property
    def last(self): return self.name.rpartition(".")[2]

@dataclass
class Lesson:
    "A notebook as it is committed, and what its code defines and imports"
    path: str    # below nbs, without .ipynb, such as 2_ladder/10_tf32
    cells: list
    module: str = ""    # that it exports, in full
    definitions: dict = field(default_factory=dict)    # id of a cell -> its `Definition`s
    imports: dict = field(default_factory=lambda: defaultdict(set))    # module, in full -> names, "*" for all
    uses: set = field(default_factory=set)    # the modules among them that exported cells import

    @property
    def names(self): return {d.name: d for ds in self.definitions.values() for d in ds}

    @property
    def stem(self): return self.path.rpartition("/")[2]

    @property
    def number(self): return int(self.stem[:2]) if self.stem[:2].isdigit() else -1    # of what is no lesson

    def link(self, o):
        "The address of another notebook, seen from this one"
        return posixpath.relpath(f"{o.path}.ipynb", posixpath.dirname(self.path) or ".")

def text(cell): return "".join(cell["source"])
def texts(lesson, kind): return [text(c) for c in lesson.cells if c["cell_type"] == kind]

def tree(source):
    "The syntax tree of a cell's Python without `%magic` and `!command`; empty where it doesn't parse"
    try: return ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))
    except SyntaxError: return ast.parse("")

def defined(source):
    "The functions, classes and methods that a cell defines, methods that are patched into a class among them"
    for o in tree(source).body:
        if not isinstance(o, DEFINITIONS): continue
        names = patch_name(o)
        for name in [names] if isinstance(names, str) else names: yield Definition(name, o, source)
        if isinstance(o, ast.ClassDef):
            methods = [m for m in o.body if isinstance(m, FUNCTIONS)]
            yield from (Definition(f"{o.name}.{m.name}", m, source) for m in methods)

def absolute(node, package):
    "The module of a `from ... import`, in full"
    if not node.level: return node.module
    parts = package.split(".")
    return ".".join([*parts[:len(parts) - node.level + 1], *filter(None, [node.module])])

def read_lesson(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    lesson = Lesson(path.relative_to(get_config().nbs_path).with_suffix("").as_posix(), cells)
    lib = get_config().lib_path.name
    for c in cells:
        if c["cell_type"] != "code": continue
        source = text(c)
        if m := re.search(r"^#\|\s*default_exp (\S+)", source, re.M): lesson.module = f"{lib}.{m[1]}"
        if re.search(r"^#\|\s*export", source, re.M): lesson.definitions[c["id"]] = list(defined(source))
        for o in tree(source).body:
            if isinstance(o, ast.ImportFrom):
                package = lesson.module.rpartition(".")[0]
                module = absolute(o, package)
                lesson.imports[module] |= {a.name for a in o.names}
                if c["id"] in lesson.definitions: lesson.uses.add(module)
    return lesson

@lru_cache
def lessons():
    "All notebooks of the site, by their stems, which are different in all folders"
    found = [p for p in get_config().nbs_path.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    return {p.stem: read_lesson(p) for p in sorted(found)}

@lru_cache
def by_module(): return {o.module: o for o in lessons().values() if o.module}

def lesson_of(nb): return lessons()[Path(nb.path_).stem]

def call_name(node):
    "The name that a call calls, without what stands before its last dot; nothing for what is no call"
    return getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""

@lru_cache
def rungs():
    "Name of a rung -> the notebook that defines it and its `@rung(...)`"
    return {d.name: (o, call) for o in lessons().values() for d in o.names.values()
            for call in d.node.decorator_list if call_name(call) == "rung"}

# --- anchors ---

def slug(heading):
    "The anchor that pandoc gives to a heading's text"
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    kept = "".join(c for c in plain.lower() if c.isalnum() or c in "_-. \t")
    return re.sub(r"^[^a-z]+", "", "-".join(kept.split())) or "section"

def without_fences(md): return re.sub(r"^(```+|~~~+).*?^\1[ \t]*$", "", md, flags=re.M | re.S)

def headings(md):
    "The anchors of the headings of a page's markdown"
    seen, res = Counter(), []
    for line in re.findall(r"^#{1,6}[ \t]+(.+)$", without_fences(md), re.M):
        if m := re.search(r"\{[^}]*#([\w.:-]+)[^}]*\}\s*$", line): res.append(m[1]); continue
        s = slug(re.sub(r"\{[^}]*\}\s*$", "", line))
        res.append(f"{s}-{seen[s]}" if seen[s] else s)
        seen[s] += 1
    return res

@lru_cache
def anchors(stem):
    """Name of a definition -> its anchors in the notebook `stem`. The first is the name, unless a
    heading has it; the second, if free, is the name in small letters, which nbdev links to"""
    lesson = lessons()[stem]
    taken = set(headings("\n\n".join(texts(lesson, "markdown")[1:])))
    res = {n: [f"def-{n}" if n in taken else n] for n in lesson.names}
    taken |= {a for own in res.values() for a in own}
    for n, own in res.items():
        if n.lower() not in taken: own.append(n.lower()); taken.add(n.lower())
    return res

# --- signatures ---

def html(s):
    "A docstring or a comment as HTML: nothing in it is markup but `code`"
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(s, quote=False))

def comments(source):
    "Line -> the comment on it, directives left out"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokens
            if t.type == tokenize.COMMENT and not t.string.startswith("#|")}

@dataclass
class Parameter:
    name: str
    line: int
    type: ast.AST = None
    default: ast.AST = None

    def __str__(self):
        kind = f": {ast.unparse(self.type)}" if self.type else ""
        return self.name + kind + (f"={ast.unparse(self.default)}" if self.default else "")

def parameters(node):
    "The parameters of a function, the fields of a dataclass, or what makes an object of another class"
    if isinstance(node, ast.ClassDef):
        if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            fields = [o for o in node.body if isinstance(o, ast.AnnAssign)]
            return [Parameter(o.target.id, o.lineno, o.annotation, o.value) for o in fields]
        methods = [o for o in node.body if isinstance(o, FUNCTIONS)]
        return next((parameters(o) for o in methods if o.name == "__init__"), [])
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None]*(len(plain) - len(a.defaults)) + a.defaults
    pairs = [*zip(plain, defaults), *zip(a.kwonlyargs, a.kw_defaults)]
    res = [Parameter(p.arg, p.lineno, p.annotation, default) for p, default in pairs]
    rest = ("*", a.vararg), ("**", a.kwarg)
    res += [Parameter(stars + p.arg, p.lineno, p.annotation) for stars, p in rest if p]
    return [p for p in res if p.name not in ("self", "cls", "ctx")]

def described(d):
    "The parameters in groups that share a comment, with that comment: on their line, or alone on those above"
    found, lines, groups = comments(d.source), d.source.splitlines(), defaultdict(list)
    for p in parameters(d.node): groups[p.line].append(p)
    alone = {n for n in found if n > d.node.lineno and lines[n - 1].lstrip().startswith("#")}
    for line, group in sorted(groups.items()):
        above, said = line - 1, [found[line]] if line in found else []
        while line not in found and above in alone: said.insert(0, found[above]); above -= 1
        yield group, " ".join(said)

def parameter_table(d):
    "Parameter, with type and default, and what it is; nothing where the call has said all"
    rows = list(described(d))
    if not any(said or p.type or p.default for group, said in rows for p in group): return ""
    cells = [(escape(", ".join(map(str, group))), html(said)) for group, said in rows]
    body = "".join(f"<tr><td><code>{names}</code></td><td>{what}</td></tr>" for names, what in cells)
    return f"<table><tbody>{body}</tbody></table>"

@lru_cache
def lines_of(path): return {d.name: d.node.lineno for d in defined(path.read_text(encoding="utf-8"))}

def source_link(d, module):
    "Where a definition stands in the module that is made of the notebook, on GitHub"
    cfg, path = get_config(), f"{module.replace('.', '/')}.py"
    line = lines_of(cfg.config_path/path).get(d.name)    # None before nbdev_export has seen the definition
    return f"{cfg.git_url}/blob/{cfg.branch}/{path}" + (f"#L{line}" if line else "")

def entry(d, module):
    "A definition in the folded table: how it is called, where it stands, what it does, its parameters"
    call = ", ".join(p.name for p in parameters(d.node))
    doc = re.sub(r"\s+", " ", ast.get_docstring(d.node) or "")
    called = f"<code>{escape(d.name)}({escape(call)})</code>"
    return (f'<dt><a href="{source_link(d, module)}">source</a> {called}</dt>'
            f"<dd>{html(doc)}{parameter_table(d)}</dd>")

def is_told(d):
    "Whether the folded table has it: what is public, methods if anything is said of them"
    says = ast.get_docstring(d.node) or any(said for _, said in described(d))
    return not any(part.startswith("_") for part in d.name.split(".")) and ("." not in d.name or bool(says))

def raw(html): return mk_cell("```{=html}\n" + html + "\n```", "markdown")

class definitions(Processor):
    "Anchors before each exported cell, and after it a folded table of what it defines"
    def begin(self):
        lesson, cells = lesson_of(self.nb), []
        for c in self.nb.cells:
            found = lesson.definitions.get(c.get("id"), [])
            spans = [f'<span id="{escape(a)}"></span>' for d in found for a in anchors(lesson.stem)[d.name]]
            if spans: cells.append(raw(f'<div class="api-anchors">{"".join(spans)}</div>'))
            cells.append(c)
            if told := [d for d in found if is_told(d)]:
                names = ", ".join(f"<code>{escape(d.name)}</code>" for d in told)
                entries = "".join(entry(d, lesson.module) for d in told)
                summary = f"<summary>parameters and source of {names}</summary>"
                cells.append(raw(f'<details class="api">{summary}<dl>{entries}</dl></details>'))
        self.nb.cells = cells

# --- links from names in the text ---

@lru_cache
def fields():
    "What a name in backticks also is, an option or a column of the records: such a name alone is no link"
    classes = [d.node for d in lessons()["config"].names.values() if isinstance(d.node, ast.ClassDef)]
    options = {o.target.id for c in classes for o in c.body if isinstance(o, ast.AnnAssign)}
    keys = {k for f in (get_config().nbs_path/"site/measurements").glob("*.json") if f.name != "published.json"
            for r in json.loads(f.read_text(encoding="utf-8")) for k in r}
    return options | keys

def in_notebook(lesson, name):
    "What `name` may mean of what this notebook defines, in full: the definition of that name, else methods"
    return [name] if name in lesson.names else [n for n, d in lesson.names.items() if d.last == name]

@lru_cache
def definitions_called():
    "Name, without what stands before its last dot -> how many definitions of the course have it"
    return Counter(d.last for o in lessons().values() for d in o.names.values())

def is_clear(d):
    """Whether the bare name of a definition can stand for it. That of a method can if the text introduces the
    method, which is patched into its class in a cell of its own, and nothing else has that name"""
    return "." not in d.name or patch_name(d.node) != d.node.name and definitions_called()[d.last] == 1

def meaning(lesson, name):
    """The notebook and the full name of what `name` means in the text of `lesson`, or None. That is what the
    notebook defines or imports; beyond it the name of a rung or a command means the same everywhere. A rung's
    own notebook has other things of its name, such as PyTorch's kernel, and no need of a link"""
    if name in rungs() and rungs()[name][0] is lesson: return None
    if own := in_notebook(lesson, name):
        return (lesson, own[0]) if "." in name or is_clear(lesson.names[own[0]]) else None
    module, _, rest = name.rpartition(".")
    imported = [(by_module()[m], names) for m, names in lesson.imports.items() if m in by_module()]
    others = set().union(*(names for m, names in lesson.imports.items() if m not in by_module()))
    if name in others: return None
    imported.sort(key=lambda o: name not in o[1])    # a name that is asked for comes before those of a star
    for o, names in imported:
        if name in o.names: return o, name
        if rest in o.names and o.module.endswith(f".{module}"): return o, rest
    if name in rungs(): return rungs()[name][0], name
    if re.fullmatch(r"speedrun_\w+", name): return lessons()["cli"], name
    return None

# Where no name becomes a link: in fences, headings, links, tags, longer code, and where a library's is meant
NOT_LINKED = "|".join((r"^(?P<fence>```+|~~~+)[\s\S]*?^(?P=fence)[ \t]*$", r"^#{1,6} .*$",
                       r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)", r"<[a-zA-Z/][^>\n]*>", r"``+[\s\S]*?``+",
                       r"`?\b(?:PyTorch|torch|torchao|transformers|library)`?'s?\s+`[^`]+`"))
NAME = re.compile(rf"(?P<skip>{NOT_LINKED})|`(?P<name>[A-Za-z_][\w.]*)(?P<call>\(\))?`"
                  r"|\b[Nn]otebook\s(?P<number>\d\d[a-z]?)\b", re.M)

def linked(lesson, md):
    "`md` with links: on names in backticks that mean a definition, on notebooks that are mentioned by number"
    def one(m):
        if m["number"]:
            stem = next((s for s in lessons() if s.startswith(m["number"] + "_")), "")
            return f"[{m[0]}]({lesson.link(lessons()[stem])})" if stem else m[0]
        if m["skip"] or m["name"] in fields() and not m["call"]: return m[0]
        if not (found := meaning(lesson, m["name"])): return m[0]
        o, name = found
        page = "" if o is lesson else lesson.link(o)
        return f"[{m[0]}]({page}#{anchors(o.stem)[name][0]})"
    return NAME.sub(one, md)

class links(Processor):
    "Names in the text become links to definitions; nbdev's `add_links` takes a name from any module"
    def cell(self, cell):
        if cell.cell_type == "markdown": cell.source = linked(lesson_of(self.nb), cell.source)

# --- the box with a lesson's facts ---

def minutes(cells, words=200, lines=20):    # of text and of code that somebody reads in a minute
    "Minutes to read a notebook, rounded to five. A glossary at its end is for looking up, and doesn't count"
    cells = cells[:next((i for i, c in enumerate(cells) if text(c).startswith("## Glossary")), None)]
    prose = sum(len(text(c).split()) for c in cells if c["cell_type"] == "markdown")
    code = [text(c) for c in cells if c["cell_type"] == "code"]
    shown = [s for s in code if not re.search(r"^#\| *(hide|echo: false|code-fold|default_exp)", s, re.M)]
    return max(5, 5*round((prose/words + sum(len(s.split("\n")) for s in shown)/lines)/5))

def rung_rows(lesson):
    """The records in which this notebook measured a rung on top of others, on the course's workload. Variants
    have more words after a comma: of these the first"""
    from llm_speedrun.measure import SPINE, load_records, records_path
    from llm_speedrun.course import COURSE
    known, rows = rungs().keys() | set(COURSE), {}
    for r in load_records(records_path("NVIDIA H200")):
        name = r["rung"].split(",")[0]
        here = r["notebook"] == lesson.stem and r["workload"] == SPINE[0]
        if here and name in known and r["before"] in known:
            rows.setdefault((name, r["before"], r["batch"]), r)
    return list(rows.values())

def added(r):
    "The rungs that a record has on top of the one it was measured against, in words"
    from llm_speedrun.measure import rung_names
    names = list(rung_names(r["rungs"]))
    more = names[names.index(r["before"]) + 1:] if r["before"] in names else names
    return f"`{more[0]}` to `{more[-1]}`" if len(more) > 1 else f"`{r['rung']}`"

def gains(lesson):
    "What the rungs of a lesson gain, a line each, but where the reader guesses it; nothing without records"
    guessed = any("my_guess" in s for s in texts(lesson, "code")) # then the answer comes after it
    def line(r):
        if guessed: return (f"- {added(r)} on top of `{r['before']}`, {r['batch']} × {r['seq']:,} tokens a step: you guess first, "
                            "then see what was measured\n")
        predicted = "" if r["predicted_ratio"] is None else f" (*predicted* {r['predicted_ratio']:.2f}×)"
        return (f"- {added(r)} on top of `{r['before']}`: **{r['ratio']:.2f}×** the speed{predicted}, "
                f"peak memory {r['peak_gib']:.1f} GiB, {r['batch']} × {r['seq']:,} tokens a step\n")
    rows = rung_rows(lesson)
    said = "{gpu}, workload {workload}, torch {torch}, triton {triton}, {date}"
    where = dict.fromkeys(said.format(**r) for r in rows)
    return "".join(map(line, rows)) + (f"\n[{'; '.join(where)}]{{.facts-where}}\n\n" if rows else "")

def marked(lesson):
    "The rung that the notebook marks on the ladder's chart, the last one if it shows all of it; None without"
    from llm_speedrun.course import COURSE
    charts = [s for s in texts(lesson, "code") if s.startswith("#| echo: false")]
    calls = [o for s in charts for o in ast.walk(tree(s)) if call_name(o) == "you_are_here"]
    return next((ast.literal_eval(o.args[0]) if o.args else COURSE[-1] for o in calls), None)

def told_before(lesson):
    "The notebooks that the lesson's opening asks its reader to have read"
    below_title = "\n".join(texts(lesson, "markdown")[1:])
    opening = " ".join(re.split(r"^#+ ", below_title, maxsplit=1, flags=re.M)[0].split())
    asks = [s for s in re.split(r"(?<=[.;:])\s", opening)
            if re.search(r"\b(should|must) have read\b|\b[Rr]ead\b.*\bbefore\b", s)]
    return {stem for s in asks for stem in re.findall(r"\]\((?:\.\./)*(?:\d\w+/)?(\d\d_\w+)\.ipynb", s)}

def imported_before(lesson):
    """The notebooks before it that this one imports from, for what it exports if it exports anything; and
    that of the rung which it marks on the ladder's chart"""
    found = {by_module()[m].stem for m, names in lesson.imports.items() if m in by_module()
             and (m in lesson.uses or not lesson.uses)
             and not all(n.endswith("Error") for n in names)}    # what is raised needs no lesson
    if (here := marked(lesson)) in rungs(): found.add(rungs()[here][0].stem)
    return {s for s in found if 0 <= lessons()[s].number < lesson.number}

@lru_cache
def all_before(stem):
    "All that has been read by who has read what is asked for before the notebook `stem`"
    direct = before(lessons()[stem])
    return set(direct).union(*map(all_before, direct))

def before(lesson):
    "What to read before a lesson: what its opening says, else what it imports without what that brings along"
    if told := told_before(lesson): return sorted(told)
    direct = imported_before(lesson)
    return sorted(s for s in direct if not any(s in all_before(o) for o in direct))

def capability(node, module):
    "The compute capability that `node` asks for by `needs_capability`, itself or by a function that it calls"
    found = [tuple(ast.literal_eval(a) for a in o.args[:2]) for o in ast.walk(node)
             if call_name(o) == "needs_capability"]
    o = by_module()[module]
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"needs_capability"}
    for source in [o, *(by_module()[m] for m in o.imports if m in by_module())]:
        for name in names & source.names.keys():
            if name.startswith("needs_"): found.append(capability(source.names[name].node, source.module))
    return max(found, default=(0, 0))

def rung_capability(name):
    "The compute capability that a rung needs"
    o, call = rungs()[name]
    return max((capability(k.value, o.module) for k in call.keywords if k.arg == "needs"), default=(0, 0))

def runs_on_a_t4(lesson):
    "Whether all that a notebook measures can run on a T4: its rungs and those below, and no bf16 or FP8"
    from llm_speedrun.course import rungs_below
    here = marked(lesson)
    used = [*rungs_below(here), here] if here in rungs() else []
    formats = re.search(r"bfloat16|float8|[\"'](bf16|fp8)", "\n".join(texts(lesson, "code")))
    return all(rung_capability(r) <= T4 for r in used) and not formats

def page_link(lesson, stem): return f"[{title(lessons()[stem])}]({lesson.link(lessons()[stem])})"

def title(lesson): return re.search(r"^# (.+)$", text(lesson.cells[0]), re.M)[1]

def box(lesson):
    "The facts of a lesson, as markdown"
    cfg = get_config()
    path = f"{cfg.user}/{cfg.repo}/blob/{cfg.branch}/{cfg.nbs_path.name}/{lesson.path}.ipynb"
    where = "a T4 or a CPU" if runs_on_a_t4(lesson) else "a CPU, as a smoke run"
    facts = [f"{minutes(lesson.cells)} minutes to read",
             *(["read before: " + ", ".join(page_link(lesson, s) for s in found)] if (found := before(lesson)) else []),
             f"[notebook on GitHub](https://github.com/{path})",
             f"[Open in Colab](https://colab.research.google.com/github/{path}){{.colab-badge}} on {where}, "
             f"after `%pip install git+{cfg.git_url}`"]
    return f"::: {{.lesson-facts}}\n{gains(lesson)}{' · '.join(facts)}\n:::"

class facts(Processor):
    "The box on top of a lesson, below its title"
    def begin(self):
        lesson = lesson_of(self.nb)
        if lesson.number >= 0: self.nb.cells.insert(1, mk_cell(box(lesson), "markdown"))
