"Reads the committed measurements. A file that doesn't hold what the pages show is an error with its name."
import msgspec
from llm_speedrun.io_utils import InputError, read_json
from llm_speedrun.measure import load_records

OTHERS = "outputs.json", "fits.json", "collectives.json", "published.json" # files in the same folder that hold something else

class Shown(msgspec.Struct):
    "What the pages show of every record"
    rung: str
    before: str | None
    workload: str
    batch: int
    seq: int
    dtype: str | None
    tok_s: float
    ms: float
    ms_p20: float
    ms_p80: float
    ratio: float
    predicted_ratio: float | None
    mfu_full: float | None
    mfu_causal: float | None
    peak_gib: float | None
    notebook: str
    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    date: str
    rungs: list[str] | None = None
    rungs_before: list[str] | None = None
    micro: int | None = None

class Fit(msgspec.Struct):
    "What fits into a card's memory, tried on a larger GPU under that limit"
    workload: str
    seq: int
    rungs: list[str]
    gib: float # memory of the card
    micro: int # sequences in the largest micro-batch that fits, of 64, 32, 16 ...; 0 where none does
    peak_gib: float | None # most GPU memory in tensors, GiB
    gpu: str
    torch: str
    date: str

def folder(root): return root/"nbs/site/measurements"

def by_gpu(root):
    "GPU -> its records, dicts. Raises `InputError` for a file that can't be used, or of several GPUs"
    res = {}
    for path in sorted(folder(root).glob("*.json")):
        if path.name in OTHERS: continue
        gpus = {r.gpu for r in read_json(path, list[Shown])}
        if len(gpus) != 1: raise InputError(f"{path} must hold the records of one GPU, not of {len(gpus)}")
        res[gpus.pop()] = load_records(path)
    return res

def all_records(root): return [r for records in by_gpu(root).values() for r in records]

def fits(root):
    "The records of micro-batches that were tried, a list of `Fit`, none where there is no such file"
    try: return read_json(folder(root)/"fits.json", list[Fit])
    except FileNotFoundError: return []
