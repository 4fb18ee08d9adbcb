"Notebooks as the tests read them."
import ast, json, re
from make_readme import ROOT, text

NBS = sorted((ROOT/"nbs").glob("*.ipynb"))
# Annotated source: literate, tested and exported, and no part of the course
SOURCE = [p for p in NBS if p.stem in """
    03_data 03b_text_files 03c_tokenizer 03d_token_files 03e_corpus 05a_records 06_files 06a_choices 06b_architectures 06c_plugins 06d_course 07_compat
    13a_kernel_ops 16a_fp8_kernels 30a_resolve 30b_train_data 30c_train_step 30d_console 30e_coordinator 30f_checkpointer 30g_validator 30h_callbacks
    31a_save 32_presets 32a_autotune 33_config 33a_run_dir 33b_launch 33c_cli 34a_run_charts 35_report 36a_machine_checks 37_encoder_pool
    38_prepare_data 48a_clock 48b_adapters 48c_race_report 49a_model_registry 50a_spawn 50b_watchdog 50d_parallel 54a_load 54b_state
    60a_sample 62a_pretrained 64_comparison""".split()]
NUMBERED = [p for p in NBS if p.stem[:2].isdigit()]
LESSONS = [p for p in NUMBERED if p not in SOURCE]
LADDER = [p for p in LESSONS if 10 <= int(p.stem[:2]) < 30]
# Notebooks whose outputs are of older code, or still missing
OLD = ["30c_train_step", "32_presets", "32a_autotune"]
# Notebooks whose code has changed since they were run on the GPU: these, and those in which the change shows nowhere. A name leaves
# this list with the next run.
AWAITING = [*OLD, *"""
    00_gpu 01_measure 02_roofline 03_data 03d_token_files 04_model 05_runs 06_files 10_tf32 11_amp 12_flash 13_triton
    14_fused_ops 15_chunked_ce 16_fp8 16a_fp8_kernels 17_fused_fp8 18_compile 19_cuda_graphs 20_checkpointing 21_optim 22_ladder 23_fastest 24_documents
    25_peers 26_claims 27_fewer_bytes 28_fewer_passes 29_epilogues 29a_fused_ce 29b_fp8_epilogues 30_trainer
    31_saving 31a_save 33a_run_dir 34_metrics 35_report 36_doctor 36a_machine_checks 37_encoder_pool 38_prepare_data 39_loader
    40_schedules 42_batch 43_muon 44_fast_muon 45_normuon 46_architecture 47_speedrun 49_beyond 49a_model_registry
    50c_collectives 51_ddp 52_fsdp 53_tensor_parallel 54_sharded_saving 54a_load 54b_state 60_generate 60a_sample
    62_export 63_finale 03e_corpus 05a_records 30a_resolve 30b_train_data 33_config 33c_cli 41_recipe 48_race 50_world 55_cluster 61_evals
    65_plan""".split()]
def with_outputs(paths): return [p for p in paths if p.stem not in OLD]

def read(path): return json.loads(path.read_text(encoding="utf-8"))
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

def parsed(code):
    "The syntax tree of a cell's Python, without the lines of `%magic` and `!command`"
    return ast.parse(re.sub(r"^\s*[%!].*$", "", code, flags=re.M))
