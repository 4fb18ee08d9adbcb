"""How long the path is: the words and minutes of each lesson, and the minutes up to its milestones. Minutes are those that the site shows
(`procs.minutes`): what is hidden or folded isn't counted."""
import pytest
import procs
from helpers.cells import LESSONS, directives, of_kind, read, source

PATH = [p for p in LESSONS if p.parent.name[0] in "12"] # in reading order
WORDS, MINUTES = 6000, 45 # the most that a lesson may have
# The minutes from the first lesson to the end of these: a speedup on one's own machine, the first rung, the first kernel, the whole ladder
GOALS = dict(start=20, tf32=90, triton=200, ladder=480)
# What is still longer than it may be, and its length today: a number here may only fall, and a name leaves once it is within the limit
LONGER = {"17_chunked_ce": 6900, "22_checkpointing": 6400}

def visible_words(cells):
    "Words of text, and of the code that is neither hidden nor folded"
    hidden = {"hide", "echo", "code-fold", "default_exp"}
    return sum(len(source(c).split()) for c in cells if c["cell_type"] == "markdown" or not directives(c).keys() & hidden)

def minutes(path): return procs.minutes(read(path)["cells"])

def over(sizes, limit, known): # name -> size; name -> size of what is known to be over the limit
    "Sentences on what is longer than it may be, and on what needn't be known any more"
    for name, n in sizes.items():
        if n > known.get(name, limit): yield f"{name}: {n}, and {known.get(name, limit)} is the most"
        elif name in known and n <= limit: yield f"{name} is within {limit}: take it off the list"

def test_words_of_a_lesson():
    assert not [*over({p.stem: visible_words(read(p)["cells"]) for p in PATH}, WORDS, LONGER)]

def test_minutes_of_a_lesson(): assert not [*over({p.stem: minutes(p) for p in PATH}, MINUTES, {})]

@pytest.mark.parametrize("name, goal", GOALS.items())
def test_minutes_of_the_path(name, goal):
    stems = [p.stem for p in PATH]
    end = next((i for i, s in enumerate(stems) if s.partition("_")[2] == name), None)
    if end is None: pytest.skip(f"no lesson {name} yet")
    before = {p.stem: minutes(p) for p in PATH[:end + 1]}
    assert sum(before.values()) <= goal, f"{sum(before.values())} minutes to the end of {name}, and {goal} are the most: {before}"

# --- the count itself ---

def md(words): return dict(cell_type="markdown", source=" ".join(["word"]*words))
def py(lines, *first): return dict(cell_type="code", source="\n".join([*first, *["x = 1"]*(lines - len(first))]), outputs=[], metadata={})

def test_what_is_counted():
    cells = [md(2000), py(100)]
    assert procs.minutes(cells) == 15 and visible_words(cells) == 2000 + 3*100
    for first in ("#| hide", "#| echo: false", "#| code-fold: true", "#| default_exp x"):
        assert procs.minutes(cells + [py(200, first)]) == 15 and visible_words(cells + [py(200, first)]) == 2300, first
    assert procs.minutes(cells + [py(200, "#| export")]) == 25

@pytest.mark.parametrize("sizes, known, n", [(dict(a=10), {}, 0), (dict(a=11), {}, 1), (dict(a=12), dict(a=12), 0), (dict(a=13), dict(a=12), 1),
                                             (dict(a=9), dict(a=12), 1), (dict(a=9, b=11), {}, 1)])
def test_what_is_over(sizes, known, n): assert len([*over(sizes, 10, known)]) == n
