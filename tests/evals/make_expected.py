"""What lm-evaluation-harness says of the model and the files beside this one: expected.json. Run it where the package lm_eval (with
`hf`) is installed, besides this one: python tests/evals/make_expected.py FOLDER. The folder is where it writes the model."""
import json, sys
from pathlib import Path
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from model import HERE, tiny_model

FILES = dict(hellaswag="hellaswag.jsonl", lambada_openai="lambada.jsonl", arc_easy="arc.jsonl")
SPLITS = "train", "validation", "test" # the harness opens them all, and scores the last that a task names

def harness_task(name, out):
    "The harness's own task, with our file in the place of the Hub's data set: a configuration in `out`"
    theirs = next((Path(lm_eval.__file__).parent/"tasks").rglob(f"{name}.yaml"))
    (out/f"our_{name}.yaml").write_text(f"include: {theirs}\ntask: our_{name}\ndataset_path: json\ndataset_name: null\n"
                                        "dataset_kwargs:\n  data_files:\n" + "".join(f"    {split}: {HERE/FILES[name]}\n" for split in SPLITS))
    return str(out/f"our_{name}.yaml")

def rolling(lm, text):
    "The harness's log-likelihood of a whole text"
    return lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])[0]

if __name__ == "__main__":
    out = tiny_model(sys.argv[1])
    lm = HFLM(pretrained=str(out), dtype="float32", device="cpu", batch_size=3)
    res = lm_eval.simple_evaluate(lm, tasks=[harness_task(n, out) for n in FILES], bootstrap_iters=2)
    said = dict(made_by=f"lm_eval {lm_eval.__version__}")
    for name in FILES:
        scores, samples = res["results"][f"our_{name}"], sorted(res["samples"][f"our_{name}"], key=lambda s: s["doc_id"])
        said[name] = dict(scores={k.removesuffix(",none"): v for k, v in scores.items() if k.endswith(",none") and isinstance(v, float)},
                          nats=[[float(r[0]) for r in s["filtered_resps"]] for s in samples],
                          greedy=[[str(r[1]) == "True" for r in s["filtered_resps"]] for s in samples])
    said["text"] = rolling(lm, (HERE/"text.txt").read_text(encoding="utf-8"))
    (HERE/"expected.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
