"""Train models of four shapes without a `--model` name with `fastest`, export them, and compare logits with transformers' and speed with the roofline.
    tests/bench_shapes.py OUT [STEPS] [options of speedrun_train ...]
Prints a line for each shape and writes OUT/shapes.json at once: a shape that is already there is skipped. `predicted_ms` is the run's own prediction
of its step, `profile_kinds` the measured time of each kind of operation in three steps. `step_ms` is the median of the run's second half, without
evaluations. The recipe is the default one, but each step is one update of whole sequences: the prediction is of such a step."""
import json, os, subprocess, sys, time
from pathlib import Path
from statistics import median
import torch
from llm_speedrun.measure import machine
from llm_speedrun.pretrained import import_folder, opened

SHAPES = {"60m-d128": "--layers 10 --width 512 --heads 4 --head_dim 128 --hidden 1536",
          "qwen3-0.6b": "--layers 28 --width 1024 --heads 16 --kv_heads 8 --head_dim 128 --hidden 3072",
          "350m-gqa4": "--layers 24 --width 1024 --heads 16 --kv_heads 4 --head_dim 64 --hidden 2816 --seq_len 2048",
          "wide-shallow": "--layers 4 --width 2048 --heads 16 --kv_heads 8 --head_dim 128 --hidden 5632"}
TRAIN, EXPORT = ("import sys; from llm_speedrun.cli import {0}; sys.exit({0}())".format(c) for c in ("speedrun_train", "speedrun_export"))

def command(code, *args):
    "Run a command and return its seconds. Raises `RuntimeError` with the end of its output"
    start, env = time.time(), os.environ | dict(PYTHONPATH=os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]))
    p = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, env=env)
    if p.returncode: raise RuntimeError((p.stdout + p.stderr)[-1500:])
    return time.time() - start

def logits_gap(run):
    "Return the largest difference between our logits and transformers' on the exported run, in FP32 without TF32, and the logits' standard deviation"
    import transformers
    x = torch.randint(256, (2, 256), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run/"export", dtype=torch.float32).eval()
    ours = opened(*import_folder(run), torch.device("cpu")).model
    with torch.no_grad(): a, b = ours(x), theirs(x).logits
    return dict(logits_gap=(a - b).abs().max().item(), logits_std=a.std().item())

def measured(name, folder, steps, options):
    "Train, export and compare one shape. Returns a record"
    seconds = command(TRAIN, *SHAPES[name].split(), "--rungs", "fastest", "--recipe", "speedrun:updates=1:pieces=1", "--profile", 3, "--steps", steps, "--out", folder, "--name", name, *options)
    run = folder/name
    command(EXPORT, run)
    about, result = (json.loads((run/f"{k}.json").read_text()) for k in ("config", "result"))
    rows = [json.loads(l) for l in (run/"metrics.jsonl").read_text().splitlines()]
    tok_s = median(r["tok_s"] for r in rows if "tok_s" in r and r["step"] > about["steps"]//2)
    predicted, kinds = (json.loads(f.read_text()) if (f := run/f"{k}.json").exists() else {} for k in ("prediction", "profile_kinds")) # none on a CPU
    losses = [r["loss"] for r in rows if "loss" in r]
    return dict(shape=name, config=about["model_config"], parameters=sum(p.numel() for p in opened(*import_folder(run), torch.device("cpu")).model.parameters()), rungs=about["rungs"],
                why=about["why"], micro=about["micro_batch_size"], step_tokens=about["step_tokens"], steps=about["steps"], tok_s=tok_s, step_ms=1e3*about["step_tokens"]/tok_s,
                predicted_ms=predicted.get("predicted_ms") or 0., prediction=predicted, profile_kinds=kinds, losses=losses, val_loss=result["val_loss"], seconds=seconds, parts=result["parts"], **logits_gap(run), **machine())

def line(r):
    return ("{shape}: {tok_s:,.0f} tokens/s, {step_ms:.1f} ms a step of {step_tokens:,} tokens ({micro} sequences at once), predicted {predicted_ms:.1f}; "
            "loss {val_loss:.3f}; logits differ by {logits_gap:.1e}, their std {logits_std:.2f}; {seconds:.0f} s; {rungs}; {why}").format(**r)

def main(out, steps=300, *options):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    path = out/"shapes.json"
    records = json.loads(path.read_text()) if path.exists() else []
    for name in SHAPES:
        if name in {r["shape"] for r in records}: continue
        try: records.append(measured(name, out/"runs", steps, options))
        except Exception as e: print(f"{name} is left out: {type(e).__name__}: {e}", flush=True); continue
        path.write_text(json.dumps(records, indent=1))
        print(line(records[-1]), flush=True)

if __name__ == "__main__": main(*sys.argv[1:])
