"The end of a run: it says where its seconds went, and its result is written last."
import json, os, signal, threading, time
import pytest
from llm_speedrun.checkpoint import save
from llm_speedrun.checkpoint.format import step_of_name
from llm_speedrun.measure import Timings, format_duration
from llm_speedrun.train.callbacks import Callback
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.train.run_dir import RunDir
from llm_speedrun.train.launch import report
from llm_speedrun.train.trainer import Trainer, train
from helpers.tiny_runs import nano, options
from helpers.timeouts import TIMEOUT

@pytest.mark.parametrize("stop", [None, signal.SIGINT, signal.SIGTERM])
def test_a_run_says_where_its_seconds_went(tmp_path, monkeypatch, capsys, stop):
    "Its parts are in result.json and in one line at the end, and add up to the time since it began: none counts twice"
    cfg = options(tmp_path, num_samples=2, sample_tokens=4, save_minutes=0)
    def stopped(self):
        if self.done == 5 and stop: os.kill(os.getpid(), stop)
        return after_step(self)
    after_step = Trainer.after_step
    monkeypatch.setattr(Trainer, "after_step", stopped)
    timings = Timings(time.time() - 5)
    begun = timings.switched
    trainer, res = train(cfg, timings=timings)
    report(trainer, res)
    parts = trainer.timings.parts()
    assert sum(parts.values()) == pytest.approx(trainer.timings.switched - begun)
    written = json.loads((tmp_path/"runs/run/result.json").read_text())["parts"]
    assert set(written) <= set(parts) and all(s <= parts[k] for k, s in written.items())
    most = ["start", "training", "evaluations", "checkpoints", "samples", "the rest", "last checkpoint and weights", "charts and report"]
    assert set(parts) <= set(most) and (stop == signal.SIGTERM or set(parts) == set(most))
    line, = (s for s in capsys.readouterr().out.splitlines() if "from start to end" in s)
    assert line.startswith(format_duration(sum(parts.values()))) and " start" in line

def test_a_result_is_the_last_that_is_written(tmp_path, monkeypatch):
    "The checkpoint and the weights are on the disk before result.json, which says that a run is over; charts are drawn while they are written"
    done, order, write = threading.Event(), [], save.write_checkpoint
    def slow(folder, *args):
        if step_of_name(folder) == 6: assert done.wait(TIMEOUT)
        return write(folder, *args)
    def waited(self):
        if "drawn" in order and not done.is_set(): order.append("wait"); done.set()
        return wait(self)
    def result(self, *args):
        order.append("result while the disk works" if not done.is_set() else "result"); done.set()
        assert not self.path.joinpath("result.json").exists()
        return write_result(self, *args)
    class Drawn(Callback):
        def after_fit(self, trainer, res): order.append("drawn")
        def after_close(self, trainer): order.append("report")
    wait, write_result = save.Saver.wait, RunDir.write_result
    monkeypatch.setattr(save, "write_checkpoint", slow)
    monkeypatch.setattr(save.Saver, "wait", waited)
    monkeypatch.setattr(RunDir, "write_result", result)
    Trainer(options(tmp_path, steps=6), progress=False, callbacks=[Drawn()]).fit()
    assert order == ["drawn", "wait", "result", "report"]

def test_without_its_weights_a_run_has_no_result(tmp_path, monkeypatch):
    "A full disk under the last file: the error is raised, the report written, and the resumed run writes what is missing"
    write, full = save.replace_tensors, [True]
    def replace(tensors, path):
        if full: raise OSError(f"{path} can't be written: no space left")
        write(tensors, path)
    monkeypatch.setattr(save, "replace_tensors", replace)
    with pytest.raises(OSError, match="model.safetensors can't be written"): Trainer(options(tmp_path, steps=4), progress=False).fit()
    run = tmp_path/"runs/run"
    assert not (run/"result.json").exists() and (run/"report.html").exists()
    full.clear()
    _, res = train(TrainConfig(resume=str(run)), progress=False)
    assert res["steps"] == 4 and (run/"model.safetensors").exists() and (run/"result.json").exists()
