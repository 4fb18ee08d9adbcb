"""A tiny Qwen3 model, and what lm-evaluation-harness says of it: evals/expected.json, for test_evals.py.

Run it where the package lm_eval is installed besides this one: python tests/make_evals.py FOLDER. The model is written to FOLDER."""
import json, sys
from pathlib import Path
import numpy as np, torch
from llm_speedrun.tools.export import write_folder
from llm_speedrun.model import GPT
from llm_speedrun.model_config import GPTConfig

EVALS = Path(__file__).parent/"evals"
TINY = GPTConfig(name="tiny", vocab=400, layers=2, width=32, heads=4, kv_heads=2, hidden=48, seq_len=48)
FILES = dict(hellaswag="hellaswag.jsonl", lambada_openai="lambada.jsonl", arc_easy="arc.jsonl") # the harness's names
SPLITS = "train", "validation", "test" # the harness opens all that a task names, and scores the last

def tiny_model(out, model=GPT):
    "Write it to `out`, with its tokenizer, as `transformers` reads it. Weights are numpy's, whose generators keep their numbers"
    rng, state = np.random.default_rng(61), model(TINY).state_dict()
    state = {k: torch.from_numpy(rng.standard_normal(v.shape, dtype=np.float32)) * .3 for k, v in state.items()}
    state |= {k: 1 + v if v.ndim == 1 else v if "embed" in k else v / 4 for k, v in state.items()}
    write_folder(out, TINY, state, EVALS/"tokenizer.json")
    return Path(out)

def harness_task(name, out):
    "The harness's own task, with our file in the place of the Hub's data set: a configuration in `out`"
    import lm_eval
    theirs = next((Path(lm_eval.__file__).parent/"tasks").rglob(f"{name}.yaml"))
    files = "".join(f"    {split}: {EVALS/FILES[name]}\n" for split in SPLITS)
    path = out/f"our_{name}.yaml"
    path.write_text(f"include: {theirs}\ntask: our_{name}\ndataset_path: json\ndataset_name: null\n"
                    f"dataset_kwargs:\n  data_files:\n{files}")
    return str(path)

def said_of(scores, samples):
    "What the harness returns of a task: its scores, and of each question the endings' log-likelihoods and greedy matches"
    samples = sorted(samples, key=lambda s: s["doc_id"])
    return dict(scores={k.removesuffix(",none"): v for k, v in scores.items() if k.endswith(",none") and isinstance(v, float)},
                nats=[[float(nats) for nats, _ in s["filtered_resps"]] for s in samples],
                greedy=[[str(greedy) == "True" for _, greedy in s["filtered_resps"]] for s in samples])

def harness_says(folder):
    "All of it, a dict"
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    lm = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=3)
    res = lm_eval.simple_evaluate(lm, tasks=[harness_task(n, folder) for n in FILES], bootstrap_iters=2)
    text = Instance("loglikelihood_rolling", {}, ((EVALS/"text.txt").read_text(encoding="utf-8"),), 0)
    return dict(made_by=f"lm_eval {lm_eval.__version__}", text=lm.loglikelihood_rolling([text])[0],
                **{n: said_of(res["results"][f"our_{n}"], res["samples"][f"our_{n}"]) for n in FILES})

if __name__ == "__main__":
    said = harness_says(tiny_model(sys.argv[1]))
    (EVALS/"expected.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
