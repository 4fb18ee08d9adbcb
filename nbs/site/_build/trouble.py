"What the page on telemetry shows: four runs of a tiny model on a CPU, a baseline and three in trouble, as tests/bench_trouble.py kept them."
import json
from llm_speedrun.train.run_charts import curve
from records import folder

class Trouble:
    "The runs, and charts and numbers of their rows"
    def __init__(self, root): # of the repository
        about = json.loads((folder(root)/"trouble"/"cpu.json").read_text(encoding="utf-8"))
        self.runs, self.about = about.pop("runs"), about

    def rows(self, run):
        "Its rows, each with those of the baseline next to its own, as `quiet_loss` and so on"
        pairs = zip(self.runs[run]["rows"], self.runs["quiet"]["rows"])
        return [{f"quiet_{k}": v for k, v in quiet.items()} | row for row, quiet in pairs]

    def charts(self, run, *charts): # each a dict: a title, and what `curve` takes
        "Two charts side by side, as HTML"
        def one(c):
            keys = c["keys"] if isinstance(c["keys"], dict) else {c["keys"]: "this run", f"quiet_{c['keys']}": "baseline"}
            return f"<figure>{curve(self.rows(run), keys, c['title'], smooth=False, log=c.get('log', False))}</figure>"
        return f'<div style="display: grid; grid-template-columns: 1fr 1fr; gap: 1rem">{"".join(map(one, charts))}</div>'

    def value(self, run, key, step): # step: its number
        "A value of a row. `LookupError` where there is none"
        found = [r[key] for r in self.runs[run]["rows"] if r["step"] == step and r.get(key) is not None]
        if len(found) != 1: raise LookupError(f"{len(found)} values of {key} at step {step} of {run}")
        return found[0]

    def ratio(self, run, key, step):
        "Its ratio to the baseline's, as text"
        return f"{self.value(run, key, step)/self.value('quiet', key, step):.3g}"

    def mean(self, run, key, first, last): # steps
        "The mean of a value over steps"
        found = [r[key] for r in self.runs[run]["rows"] if first <= r["step"] <= last and r.get(key) is not None]
        return sum(found)/len(found)

    def measured_on(self):
        "A line for the foot of the page: the machine of its numbers, and when"
        a = self.about
        return f"*A tiny model on a {a['gpu']} with FP8 emulated, PyTorch {a['torch']}, {a['date']}: `tests/bench_trouble.py` reproduces it.*"
