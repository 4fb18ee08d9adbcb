"Notebooks as the tests read them."
import ast, json, re
from functools import lru_cache
from make_readme import ROOT, text

NBS = sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
SOURCE = [p for p in NBS if p.is_relative_to(ROOT/"nbs/source")] # annotated source: literate, tested and exported, and no part of the course
LESSONS = [p for p in NBS if p.parent.name[:1].isdigit()] # in reading order
NUMBERED = LESSONS + SOURCE # all but the home page
LADDER = [p for p in LESSONS if p.parent.name[0] in "23"]

# The one list of exceptions for outputs, empty after a run of all notebooks: those whose code has changed since they were run on the GPU, these and those in
# which the change shows nowhere. A name leaves this list with the next run. After a colon: cells that have no output yet, by id, or * where most have none
WAITING = """
    train_step:* presets:* autotune:* 14_matmul:*
    01_gpu 02_measure 03_roofline batches:4a7605a0,6a0ac687 token_files 04_model 05_rungs io_utils 10_tf32 11_amp 12_flash:12cmp002 13_triton
    16_fused_ops:fo16cmp3 17_chunked_ce:ce0cmp03 18_fp8 fp8_kernels 19_fused_fp8 20_compile 21_cuda_graphs:643da7c1,d051a09f 22_checkpointing 23_optim 24_ladder 31_flash4 37_documents
    38_peers 75_claims 32_fewer_bytes 33_fewer_passes 34_epilogues 36_loss_epilogue 35_fp8_epilogues 40_trainer
    41_checkpoints 42_memory save run_dir 44_metrics 45_doctor machine_checks encoder_pool:d262b423,e9b96ccb prepare_data 43_loader
    50_schedules 52_batch 53_muon 54_fast_muon 55_normuon 56_architecture 57_speedrun 59_beyond model_registry
    61_collectives 62_ddp 63_fsdp 64_tensor_parallel 65_sharded_checkpoints load 70_generate sample
    72_export 73_finale corpus train_data 51_recipe 58_race 66_cluster""".split()
AWAITING = [o.partition(":")[0] for o in WAITING]
AWAITING_CELLS = {k: {*ids.split(",")} for k, _, ids in (o.partition(":") for o in WAITING) if ids}
OLD = [k for k, ids in AWAITING_CELLS.items() if ids == {"*"}]
def with_outputs(paths): return [p for p in paths if p.stem not in OLD]

def read(path): return json.loads(path.read_text(encoding="utf-8"))
@lru_cache(8)
def read_once(path): return read(path) # for a notebook that many tests look at, one after another, and none changes
def cells(path): return read(path)["cells"]
def source(c): return text(c["source"])
def of_kind(nb, kind): return [c for c in nb["cells"] if c["cell_type"] == kind]

DIRECTIVE = re.compile(r"^#\|\s*([\w-]+):?[ \t]*(.*)$", re.M)

def directives(c): return dict(DIRECTIVE.findall(source(c)))
def exported(c): return directives(c).keys() & {"export", "exports", "exporti"}

def shown(c):
    "Whether the site shows this cell: all but what is hidden, and the line that names the module"
    return not directives(c).keys() & {"hide", "default_exp"}

def lines(c): return [o for o in source(c).splitlines() if o.strip() and not o.startswith("#|")]
def first_line(c): return (lines(c) or [""])[0]

def output_text(o):
    "The texts of an output, pictures left out"
    yield text(o.get("text", ""))
    for kind, v in o.get("data", {}).items():
        if kind.startswith("text/"): yield text(v)

def said(nb): return [s for c in of_kind(nb, "code") for o in c["outputs"] for s in output_text(o)]

@lru_cache(1000) # the cells of some notebooks: several rules look at each
def parsed(code):
    "The syntax tree of a cell's Python, without the lines of `%magic` and `!command`"
    return ast.parse(re.sub(r"^\s*[%!].*$", "", code, flags=re.M))
