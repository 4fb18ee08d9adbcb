"Recipes in the trainer: what a run takes by itself, what is refused, what a resumed run keeps; and on a GPU what a step of one costs."
import json, math
from functools import partial
from dataclasses import replace
import numpy as np, pytest, torch, torch.nn.functional as F
from llm_speedrun.io_utils import InputError
from llm_speedrun.timing import compare, ratio
from llm_speedrun.model_config import workload
from llm_speedrun.recipes.batch import in_window, window_mask, with_attention_windows
from llm_speedrun.recipes.recipe import set_groups
from llm_speedrun.recipes import recipe_spec
from llm_speedrun.recipes.recipe_spec import best_recipe, find_recipe, parse_recipe, why_not_best
from llm_speedrun.recipes.schedules import GuardedStepper, lr_at
from llm_speedrun.recipes.speedrun import decay_for, rate_for
from llm_speedrun.runs import build
from llm_speedrun.step_builder import resolve_options
from llm_speedrun.stepper import Stepper
from llm_speedrun.train.presets import parse_rungs
from llm_speedrun.train.config import TrainConfig
from llm_speedrun.checkpoint.format import load_named_state, named_state
from llm_speedrun.train.trainer import Trainer, train
from llm_speedrun.distributed.spawn import run_distributed
from helpers.tiny_runs import NANO, fails, nano, options, recorded, texts

@pytest.fixture(autouse=True)
def best(monkeypatch): monkeypatch.setattr("llm_speedrun.recipes.recipe_spec.BEST", "speedrun")

def made(folder, **kw):
    "A `Trainer` that has not begun, and its options"
    t = Trainer(options(folder, **kw), progress=False)
    t.run_dir.release()
    return t, t.cfg

# --- what a run takes by itself ---

@pytest.mark.parametrize("how, recipe", [
    (dict(), "speedrun"), (dict(lr=1e-3), "adamw"), (dict(rungs="adamw8bit"), "adamw"), (dict(rungs="bf16,bf16_weights"), "adamw"),
    (dict(recipe="muon"), "muon"), (dict(recipe="muon", lr=.01), "muon"), (dict(recipe="normuon:momentum=.9"), "normuon:momentum=0.9")])
def test_the_recipe(tmp_path, how, recipe): assert made(tmp_path, **how)[1].recipe == recipe

def test_what_was_given_stays(tmp_path):
    _, c = made(tmp_path, recipe="muon", schedule="cosine", weight_decay=.3, final_lr=.2, grad_clip=3.)
    assert (c.schedule, c.weight_decay, c.final_lr, c.grad_clip, c.cooldown, c.lr) == ("cosine", .3, .2, 3., .7, .02)
    _, c = made(tmp_path, recipe="adamw", name="b")
    assert (c.schedule, c.weight_decay, c.final_lr, c.grad_clip, c.warmup, c.lr) == ("cosine", .1, .1, 1., .05, .5/NANO.width)

def test_rate_and_decay_follow_the_length(tmp_path):
    "More steps, lower rate; more passes, more decay; and no step loses much of a weight"
    per_epoch = made(tmp_path)[0].data.batches.per_epoch
    for passes in (1, 4, 1000):
        n = round(passes*per_epoch)
        c = made(tmp_path, steps=n, name=f"p{passes}")[1]
        assert c.lr == rate_for(NANO, n) == pytest.approx(.04*max(.25, min(1, 400/n)**.5))
        assert c.weight_decay == decay_for(NANO, n, passes) <= 1

def test_a_token_costs_the_same_decay_in_each_phase(tmp_path):
    run, seen = find_recipe("speedrun")(build(NANO)), []
    opt = run.optimizer(run.model, lr=.04, weight_decay=.4)
    for step in (0, 50, 99, 0):
        set_groups(run, opt, step, 100, .04)
        updates = run.batching(step, 100)[0]
        seen.append({g["role"]: updates*g["lr"]*g["weight_decay"] for g in opt.param_groups})
    for lost in seen: assert lost == pytest.approx(dict(matrix=.016, embed=.008, vector=0.))

def test_decay_goes_on_where_it_was():
    "In a phase of several updates decay is lower for the time being, and a checkpoint doesn't take that for the whole"
    run = find_recipe("speedrun")(build(NANO))
    old, new = (run.optimizer(run.model, lr=.04, weight_decay=.4) for _ in range(2))
    set_groups(run, old, 0, 100, .04)
    load_named_state(run.model, new, named_state(run.model, old))
    assert new.param_groups[0]["weight_decay"] == pytest.approx(.2)
    set_groups(run, new, 99, 100, .04)
    assert new.param_groups[0]["weight_decay"] == pytest.approx(.4)

def test_each_group_has_its_rate(tmp_path):
    trainer, _ = train(options(tmp_path, recipe="speedrun:embed=.01", steps=10), progress=False)
    lr = {g["role"]: g["lr"] for g in trainer.step.opt.param_groups}
    wider = (NANO.width/768)**.5
    assert lr["embed"]/lr["matrix"] == pytest.approx(.5/wider) and lr["vector"]/lr["matrix"] == pytest.approx(.75)
    row = next(r for r in trainer.rows() if "lr_embed" in r)
    assert row["lr_embed"] == pytest.approx(row["lr"]/2/wider) and row["train_s"] > 0

def test_updates_follow_the_phases(tmp_path):
    "Steps of four sequences, in four updates of one, then two, then one; and sequences whole or cut"
    trainer = Trainer(options(tmp_path, recipe="speedrun:updates=4+2+1:pieces=2+1", steps=6, micro_batch_size=4), progress=False)
    shapes, step = [], trainer.step
    class Noted(type(step)):
        def __call__(self, *batches):
            shapes.append([tuple(x.shape) for x, _ in batches])
            return super().__call__(*batches)
    step.__class__ = Noted
    trainer.fit()
    T = trainer.cfg.seq_len
    assert shapes == [[(2, T//2)]]*8 + [[(4, T//2)]]*2 + [[(2, T)]]*2 + [[(4, T)]]*2
    rates = [r["lr"] for r in trainer.rows() if "loss" in r]
    assert rates[0] == pytest.approx(.02) and rates[2]/rates[1] == pytest.approx(2**.5, rel=.3)

def test_windows_follow_the_phases(tmp_path):
    "Two steps of six see 4 keys, two see 8, two see all; no evaluation sees fewer"
    trainer, seen = Trainer(options(tmp_path, recipe="speedrun:pieces=1:updates=1:windows=4+8+0", steps=6, micro_batch_size=4, num_evals=3), progress=False), []
    loss = trainer.run.loss
    inner = loss.loss
    def noted(model, x, y):
        now = next((w for w, m in loss.models.items() if m is model), 0)
        seen.append((now, torch.is_grad_enabled()))
        return inner(model, x, y)
    loss.loss = noted
    res = trainer.fit()
    assert [w for w, training in seen if training][-6:] == [4, 4, 8, 8, 0, 0] and not any(w for w, training in seen if not training)
    assert trainer.cfg.recipe == "speedrun:updates=1:pieces=1:windows=4+8+0" and math.isfinite(res["val_loss"])

@pytest.mark.parametrize("rungs", ["naive", "bf16,flash,fused_ops,chunked_ce,fp8,fused_adamw", "bf16,flash,checkpoint"])
def test_a_window_of_all_is_no_window(rungs):
    "After each update the second tree of modules has the loss of the first: nothing of older weights is kept in it"
    run = with_attention_windows(build(NANO, rungs.split(",") if rungs != "naive" else []), (NANO.seq_len,))
    x, y = torch.randint(NANO.vocab, (2, 2, NANO.seq_len), device=run.device)
    step, losses = Stepper(run), []
    for i in range(4):
        set_groups(run, step.opt, i, 4, .01)
        losses.append(step((x, y)).item())
        whole, window = (run.loss.loss(m, x, y).item() for m in (run.model, run.loss.models[NANO.seq_len]))
        assert whole == pytest.approx(window, rel=1e-3)
    assert losses[-1] < losses[0] - .1

def test_windows_and_documents_are_refused(tmp_path):
    with pytest.raises(InputError, match="or attention within documents"):
        train(options(tmp_path, data=str(texts(tmp_path/"texts")), recipe="speedrun:windows=8+0", document_mask=True, steps=4), progress=False)

@pytest.mark.cuda
@pytest.mark.parametrize("T, D, K, window", [(1024, 128, 6, 256), (1000, 64, 3, 100), (512, 128, 6, 512), (512, 64, 6, 900)])
def test_the_kernel_sees_the_window(T, D, K, window):
    "FlashAttention's kernel and the mask, both against double precision; KV heads that are shared, odd lengths"
    q, k, v, do = (torch.randn(4, h, T, D, device="cuda", dtype=torch.bfloat16) for h in (6, K, K, 6))
    mask, shared = window_mask(T, window, "cuda"), lambda t: t.repeat_interleave(6//K, 1)
    by_mask = lambda q, k, v: F.scaled_dot_product_attention(q, shared(k), shared(v), mask)
    def all_of(f, *ins):
        ins = [t.requires_grad_() for t in ins]
        o = f(*ins)
        return [o, *torch.autograd.grad(o, ins, do.to(o.dtype))]
    want = all_of(by_mask, *(t.double() for t in (q, k, v)))
    off = lambda found: [(a - b).norm()/b.norm() for a, b in zip(found, want)]
    for ours, theirs in zip(off(all_of(partial(in_window, window), q, k, v)), off(all_of(by_mask, q, k, v))): assert ours < 2*theirs

def with_and_without_graphs(spec, steps, rate):
    "Losses of a recipe's steps without CUDA graphs and with them, and how many passes were recorded"
    config, curves, r = replace(NANO, seq_len=128), [], parse_recipe(spec)
    x, y = torch.randint(NANO.vocab, (2, 4, 128), generator=torch.Generator().manual_seed(0)).cuda()
    before = recorded()
    for rungs in (["bf16", "flash"], ["bf16", "flash", "cuda_graphs"]):
        run = r(build(config, rungs, model=r.model))
        step = GuardedStepper(run)
        curves.append([])
        for i in range(steps):
            set_groups(run, step.opt, i, steps, rate)
            curves[-1].append(step((x, y)).item())
    return *curves, recorded() - before

@pytest.mark.cuda
def test_windows_are_recorded_each():
    "Under CUDA graphs, which record one pass for each window: the same losses as without"
    plain, replayed, passes = with_and_without_graphs("speedrun:updates=1:pieces=1:windows=16+64+0", 15, .01)
    assert plain == pytest.approx(replayed, rel=4e-3) and plain[-1] < plain[0] - .5     # another window: 1 % (CPU)
    assert passes == 3

@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["adamw", "tuned_adamw", "muon", "normuon", "without_muon"])
def test_recipes_are_recorded(recipe):
    "Under CUDA graphs, for every recipe: the same losses as without, and the step was recorded"
    plain, replayed, passes = with_and_without_graphs(recipe, 12, 1e-3 if recipe in ("adamw", "tuned_adamw", "without_muon") else .01)
    assert plain == pytest.approx(replayed, rel=1e-2) and plain[-1] < plain[0] - .1
    assert passes > 0

@pytest.mark.parametrize("spec", ["windows=x", "windows=8+x", "windows=-1", "updates=2+0", "pieces=a"])
def test_what_is_no_phase(spec):
    with pytest.raises(InputError, match=f"{spec.split('=')[0]} are whole numbers"): parse_recipe(f"speedrun:{spec}")(build(NANO))

def test_an_update_that_is_not_taken_is_told(tmp_path):
    "The second of four updates has gradients that aren't finite: its step has an event, and the run goes on"
    trainer, calls = Trainer(options(tmp_path, recipe="speedrun:pieces=1", steps=6, micro_batch_size=4), progress=False), []
    def poisoned(g):
        calls.append(1)
        return g*torch.nan if len(calls) == 6 else g     # the first step has four
    trainer.step.params[0].register_hook(poisoned)
    res = trainer.fit()
    assert [r["step"] for r in trainer.rows() if "event" in r] == [2] and math.isfinite(res["val_loss"])
    assert all(p.isfinite().all() for p in trainer.step.params)

def test_small_steps_have_fewer_updates(tmp_path):
    "A step of one sequence, which nothing can divide"
    trainer, res = train(options(tmp_path, recipe="speedrun", micro_batch_size=1, grad_accum_steps=1, steps=4), progress=False)
    assert res["steps"] == 4 and trainer.cfg.recipe == "speedrun:updates=1"

def test_rates_follow_the_updates_that_are_taken(tmp_path, capsys):
    "Eight were asked for, a step of four sequences has four: the rate is that of four, which is what is said and saved"
    trainer, _ = train(options(tmp_path, recipe="speedrun:updates=8+1:pieces=7+1", steps=6, micro_batch_size=4, grad_accum_steps=1))
    assert trainer.cfg.recipe == "speedrun:updates=4+1:pieces=4+1" and trainer.run.batching.updates == (4, 1)
    said = capsys.readouterr().out
    assert "in place of speedrun:updates=8+1:pieces=7+1" in said and "  6 steps, 15 optimizer updates: 4, 1 updates a step" in said
    rates = [r["lr"] for r in trainer.rows() if "loss" in r]
    assert rates[0] == pytest.approx(trainer.cfg.lr/2)

def test_why_it_is_adamw(tmp_path, capsys):
    "A rate without a recipe means AdamW's, and that is said"
    train(options(tmp_path, lr=1e-3, steps=4), given={"lr", "steps"})
    assert "the recipe is adamw and not the default: --lr without --recipe" in capsys.readouterr().out

@pytest.mark.parametrize("spec, said", [("embed=-1", "embed must be a number from 0, and -1 was given"),
                                        ("momentum=2", "momentum must be a number from 0 to below 1, and 2 was given")])
def test_numbers_that_no_recipe_can_use(spec, said):
    with pytest.raises(InputError, match=said): parse_recipe(f"speedrun:{spec}")

def test_the_average_is_of_the_tail(tmp_path):
    assert made(tmp_path, steps=90)[1].ema_decay == pytest.approx(.9)
    assert made(tmp_path, steps=90, ema_decay=.99, name="b")[1].ema_decay == .99

# --- what is refused ---

@pytest.mark.parametrize("how, said", [
    (dict(recipe="muno"), "unknown recipe 'muno'.*muon"), (dict(recipe="muon:momentom=.9"), "momentom.*momentum"),
    (dict(recipe="muon:momentum=x"), "takes float"), (dict(recipe="adamw:lr=1"), "has no options"),
    (dict(recipe="muon", rungs="adamw8bit"), "recipe 'muon' doesn't go with the rung 'adamw8bit'.*--recipe adamw"),
    (dict(recipe="speedrun", rungs="bf16,bf16_weights"), "'bf16_weights'.*rounds the weights")])
def test_what_is_refused(tmp_path, how, said):
    "At once, and nothing is left behind"
    with fails(InputError, said): Trainer(options(tmp_path, **how), progress=False)
    assert not (tmp_path/"runs/run").exists()

def test_matrices_in_parts_keep_their_recipe():
    "Each rung that cuts them: `distributed/test_sharded_muon.py` trains with it"
    for rung in ("fsdp", "tensor_parallel"):
        for recipe in ("muon", "normuon", "speedrun"): parse_recipe(recipe).check([rung])
        assert best_recipe([rung]) == recipe_spec.BEST and not why_not_best([rung])

# --- a run that goes on ---

def test_a_run_says_its_recipe(tmp_path):
    "Without it a run can't go on: another would not be told from it"
    train(options(tmp_path, recipe="adamw"), progress=False)
    path = tmp_path/"runs/run/config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "recipe"}))
    with fails(InputError, "it says no recipe"): Trainer(TrainConfig(resume=str(tmp_path/"runs/run"), steps=20), progress=False)

def test_another_recipe_is_another_run(tmp_path):
    train(options(tmp_path, recipe="muon"), progress=False)
    with fails(InputError, "keeps its options: leave out recipe"):
        Trainer(TrainConfig(resume=str(tmp_path/"runs/run"), recipe="adamw"), progress=False)

# --- every recipe learns, with every rung that it goes with ---

@pytest.mark.parametrize("rungs", ["naive", "bf16,flash,fused_ops,chunked_ce,fp8,fused_adamw", "bf16,flash,checkpoint"])
@pytest.mark.parametrize("recipe", ["adamw", "tuned_adamw", "muon", "normuon", "speedrun", "without_muon"])
def test_it_learns(tmp_path, recipe, rungs):
    if recipe != "adamw": rungs = rungs.removesuffix(",fused_adamw") # whose optimizer the others replace
    trainer, res = train(options(tmp_path, recipe=recipe, rungs=rungs, steps=36), progress=False)
    first = next(r["loss"] for r in trainer.rows() if "loss" in r)
    assert res["val_loss"] < first - (.3 if recipe in ("adamw", "tuned_adamw") else 1.)

def shared(world, steps): # in each of two processes
    "Weights after some steps of a recipe under ddp"
    config = replace(NANO, vocab=320)
    run = find_recipe("speedrun")(build(config, ["ddp"], world=world))
    from llm_speedrun.stepper import Stepper
    step = Stepper(replace(run, optimizer=partial(run.optimizer, lr=.02, weight_decay=.1)))
    place, n = world.rank_and_size("dp") if world.size > 1 else (0, 1)
    for i in range(steps):
        x, y = torch.randint(320, (2, 4, 16), generator=torch.Generator().manual_seed(i))
        set_groups(run, step.opt, i, steps, .02)
        step((x[place::n], y[place::n]))
    return {k: p.detach().numpy() for k, p in run.model.named_parameters()}

def test_two_processes_train_as_one():
    "Each does the whole update of gradients that are the mean of all"
    from llm_speedrun.distributed.world import World
    two = run_distributed(2, shared, 8)
    one = shared(World(), 8)
    for k, w in one.items():
        assert np.array_equal(two[0][k], two[1][k]), k
        np.testing.assert_allclose(two[0][k], w, atol=2e-4, err_msg=k)

# --- on a GPU ---

def begun(config, k):
    "A run of a recipe as if in its middle: at first some of its weights are zero"
    run = find_recipe(k)(build(config, resolve_options(config, parse_rungs("fastest" if torch.cuda.is_available() else "flash"))))
    with torch.no_grad():
        for p in run.model.parameters(): p.ndim == 2 and p.normal_(std=.02)
    return run

def whole_step(config, k, sequences, micro):
    "A builder of the recipe's step in one update, as in the last third of a run"
    step = GuardedStepper(begun(config, k))
    xy = torch.randint(config.vocab, (2, sequences, config.seq_len), device=step.run.device)
    parts = [*zip(*(t.split(micro) for t in xy))]
    return lambda: step(*parts)

@pytest.mark.cuda
def test_a_step_costs_three_percent_at_most():
    "The recipe's step of 131,072 tokens beside AdamW's, interleaved. Over all phases of a run: notebook 57"
    config = find_recipe("speedrun").shape(workload("124m"))
    res = compare({k: partial(whole_step, config, k, 128, 64) for k in ("adamw", "speedrun")}, reps=4)
    more = ratio(res["speedrun"], res["adamw"]) # its time in AdamW's
    print(f"{more:.3f} times AdamW's step")
    assert more < 1.03

@pytest.mark.cuda
def test_fp8_learns_as_bf16_does():
    "Losses at the end of two runs each, from two starts: two in bf16 differ, too, from the order of sums alone"
    from llm_speedrun.data.batches import Batches, prefetch
    from llm_speedrun.data.corpus import open_corpus
    from llm_speedrun.course import curve_gap
    corpus, curves = open_corpus(), {}
    config = find_recipe("speedrun").shape(replace(workload("124m"), vocab=max(1024, corpus.vocab)))
    for k in ("fastest16", "fastest")*2:
        seed = len(curves.setdefault(k, []))
        run = find_recipe("speedrun")(build(config, resolve_options(config, parse_rungs(k)), seed=seed))
        step = GuardedStepper(replace(run, optimizer=partial(run.optimizer, lr=.02, weight_decay=.05)))
        losses = []
        for i, b in zip(range(400), prefetch(Batches(corpus.train, 16, 1024), run.device)):
            set_groups(run, step.opt, i, 400, lr_at(i, 400, .02, 1, "wsd", .01, .7))
            losses.append(step(b))
        curves[k].append(torch.stack(losses))
    gap = curve_gap(*(torch.stack(v).mean(0).tolist() for v in curves.values()))
    print(f"gap of the last 50 of 400 steps, of means over two starts: {gap:.4f} nats")
    assert gap < .02
