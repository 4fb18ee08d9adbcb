"""Numbers in prose that look measured, and whether something above shows them. A number looks measured with a decimal point or with a
unit of time, speed, size, power or proportion. Counts, shapes and definitions don't: 16 bits, 4 bytes, 1024 tokens, 64 × 1024."""
import ast, re
from helpers.cells import directives, output_text, parsed, source

SCALES = {"%": .01, "": 1, "n": 1e-9, "µ": 1e-6, "μ": 1e-6, "u": 1e-6, "m": 1e-3, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9,
          "T": 1e12, "P": 1e15, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "micro": 1e-6, "milli": 1e-3}
UNIT = re.compile(r"""\s?(?:(?P<percent>%) | (?:times|dB|°C|×(?!\s?\d)|x(?!\s?\d)|percent|dollars?|euros?)(?!\w)
    | (?P<word>micro|milli)?seconds?\b(?!\w) | (?P<small>[nmµμu])s\b | s\b
    | (?P<prefix>[KMGTP]i?|[km])?(?:B(?:/s)?|FLOPs?(?:/s)?|W|J|Wh|Hz|(?:\ ?tokens(?:/s|\ (?:a|per)\ second))|(?:\ ?(?:watts?|joules?)))(?![\w/]) )""", re.X)
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
FREE = re.compile(r"^```.*?^```|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)|<[^>]*>|arXiv:\S+|https?:\S+|\bv?\d+\.\d+\.\d+\S*"
                  r"|\b(?:PyTorch|torch|Triton|triton|CUDA|cuBLAS|cuDNN|ptxas|Python|transformers|version|driver)\s\d+\.\d+", re.M | re.S)
QUOTED = re.compile(r"`([^`\n]*)`")
PLAIN = re.compile(rf"[~≈]?{NUMBER}(\s?[\w%×/°]+)?")

SENTENCE = re.compile(r"(?<=[.?!])(?:\*\*)?\s+(?=[A-Z*])|\n\n")
NOT_OURS = re.compile(r"\b(claims?|guides?|datasheets?)\b|^(Let|Say|Suppose|Imagine)\b", re.I)
COURSE = re.compile(r"\b(72 GiB|80 GB)\b")      # the memory that a step may take, and the card that it's for

def text_of(md):
    """Its prose: without code, formulas, addresses and versions (a number alone is no code), and without sentences that say whose the
    number is: a guide's, a datasheet's, an example's"""
    md = FREE.sub(" · ", md)
    md = QUOTED.sub(lambda m: m[1] if PLAIN.fullmatch(m[1]) else " · ", md)
    return COURSE.sub(" · ", " ".join(o for o in SENTENCE.split(md) if not NOT_OURS.search(o)))

def unit_scale(m): return SCALES[m["percent"] or m["small"] or m["word"] or m["prefix"] or ""]

def measured_numbers(md):
    "Triples: a number as it's written, what its unit stands for, and the words around it"
    prose = text_of(md)
    for m in re.finditer(rf"(?<![\w.,^/-]){NUMBER}(?![\w]*[_^])", prose):
        rest = re.sub(rf"^(\s?(to|and|or|–|-)\s?{NUMBER})(?=\s?[%\w×°])", "", prose[m.end():m.end() + 60]) # `24 to 28 dB`
        unit = UNIT.match(prose[m.end():]) or UNIT.match(rest)
        if unit and m[0] + unit[0] != "100%" or "." in m[0]:
            yield m[0], unit_scale(unit) if unit else 1, " ".join(prose[max(0, m.start() - 40):m.end() + 30].split())

def numbers_in_code(code):
    "The constants of Python `code`, without what stands in comments and strings"
    return [n.value for n in ast.walk(parsed(code)) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]

def numbers_in_output(s):
    s = re.sub(r"<[A-Za-z][^>]*>", "", s)
    return [float(x.replace(",", "")) for x in re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?", s)]

def shows(values, number, scale):
    "Whether one of `values` is `number`, or rounded is; with a unit also where the unit is left away"
    x, digits = float(number.replace(",", "")), number.replace(",", "")
    zeros = len(digits) - len(digits.rstrip("0"))       # 700 may be 692, and isn't 640
    half = .5001*10**-len(digits.partition(".")[2]) if "." in digits else max(.5001, min(.05*x, .5*10**zeros))
    return any(abs(v/s - x) <= half for v in values for s in {1, scale})

EXERCISE = re.compile(r"\*\*\d\. [^*]+\*\* \(")

def typed_numbers(cells):
    "Pairs of a number in prose that no output and no code above shows, and the words around it. Exercises are free"
    values = []
    for c in cells:
        if c["cell_type"] == "code":
            if directives(c).get("eval") != "false": values += numbers_in_code(source(c))
            values += [x for o in c["outputs"] for s in output_text(o) for x in numbers_in_output(s)]
        elif not EXERCISE.match(source(c)):
            for number, scale, context in measured_numbers(source(c)):
                if not shows(values, number, scale): yield number, context
