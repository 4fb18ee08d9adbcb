"Text of a run: with a cache what it is without one, whole characters, the same for a seed; one line for what can't be."
import io, json, random
from dataclasses import replace
import pytest, torch
from tokenizers import Tokenizer
from llm_speedrun.data.corpus import train_tokenizer
from llm_speedrun.io_utils import InputError
from llm_speedrun.tools.export import export_folder, write_folder
from llm_speedrun.pretrained import from_pretrained
from llm_speedrun.model import GPT, naive_heads
from llm_speedrun.recipes.architecture import NormedGPT, UntiedGPT
from llm_speedrun.recipes.recipe import RECIPES
from llm_speedrun.recipes.recipe_spec import parse_recipe
from llm_speedrun.runs import Run, baseline, build, rung
from llm_speedrun.rung_registry import RUNGS
from llm_speedrun.step_builder import uncompiled
from llm_speedrun.stepper import enter_all
from llm_speedrun.generate import draw, generate, is_causal, padded, top_k_top_p
from llm_speedrun.kv_cache import Generator
from llm_speedrun.tools import sample
from llm_speedrun.tools.sample import TextStream, in_dtype, open_model, stream_pieces
from llm_speedrun.cli import speedrun_sample
from llm_speedrun.train.trainer import train
from helpers.lessons import defined_in
from helpers.tiny_runs import NANO, fails, nano, options, texts

# The cache

def lively(config, model=GPT):
    "A run whose logits differ widely, with norms that aren't 1, so that a mistake shows"
    run, g = Run(model(config)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in run.model.parameters(): p.mul_(8) if p.ndim > 1 else p.add_(torch.randn(p.shape, generator=g), alpha=.3)
    return run

def tokens(*lengths):
    "A text of random tokens of each length"
    g = torch.Generator().manual_seed(2)
    return [torch.randint(NANO.vocab, (n,), generator=g).tolist() for n in lengths]

def gaps(run, generator, n):
    "Let the writer draw `n` tokens of each text. Yields how far its logits are from the plain model's on the same window"
    g = torch.Generator(run.device).manual_seed(0)
    for _ in range(n):
        logits = generator.read(generator.ahead)
        windows = [t[pad:generator.used] for t, pad in zip(generator.tokens, generator.cache.pad[:, 0].tolist())]
        with torch.no_grad(): want = torch.cat([run.model(w[None])[:, -1] for w in windows])
        yield (logits - want).abs().max().item()
        generator.ahead = draw(logits, g)

@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(1,), (7,), (22,), (5, 1, 11), (23, 3)], ids=str)
def test_logits_are_those_without_a_cache(kv_heads, lengths):
    "At every position, for texts of several lengths in a batch, and on after the context is full, several times"
    run = lively(replace(NANO, seq_len=23, kv_heads=kv_heads))
    generator = Generator(run, len(lengths))
    generator.begin(tokens(*lengths))
    assert max(gaps(run, generator, 40)) < 1e-5

@pytest.mark.parametrize("seq", [1, 2, 3, 4])
def test_shortest_contexts(seq):
    run = lively(replace(NANO, seq_len=seq))
    generator = Generator(run, 2)
    generator.begin(tokens(1, seq))
    assert max(gaps(run, generator, 12)) < 1e-5

def test_the_window_slides():
    "The newest three quarters of the context stay; all that was said is there while there is room"
    run, said = lively(replace(NANO, seq_len=20)), tokens(20)[0]
    generator = Generator(run)
    generator.begin([said[:17]])
    lengths = []
    for t, in generator.write(13, torch.Generator().manual_seed(0)): lengths.append(generator.used)
    assert lengths == [17, 18, 19, 20, 15, 16, 17, 18, 19, 20, 15, 16, 17]
    generator.add(said)    # what is added may be as long as the context
    assert max(gaps(run, generator, 3)) < 1e-5
    generator.add([*said, *said])    # and longer: its own beginning falls out
    generator.read(generator.ahead)
    assert generator.tokens[0].tolist() == said

def test_turns():
    "What is added between is read as if it had been one text"
    run, (a, b) = lively(NANO), tokens(5, 6)
    generator = Generator(run)
    generator.begin([a])
    said = a + [t for t, in generator.write(4, torch.Generator().manual_seed(0))]
    generator.add(b)
    logits = generator.read(generator.ahead)
    with torch.no_grad(): want = run.model(torch.tensor([said + b]))[:, -1]
    assert (logits - want).abs().max() < 1e-5

@pytest.mark.parametrize("seed", range(4))
def test_text_is_that_of_generate(seed):
    run, ids = lively(NANO), tokens(6)[0]
    generator = Generator(run)
    generator.begin([ids])
    said = [t for t, in generator.write(20, torch.Generator().manual_seed(seed), temperature=.9, top_k=20, top_p=.9)]
    assert ids + said == generate(run, ids, 20, temperature=.9, top_k=20, top_p=.9, seed=seed)

# Sequences that are padded

@torch.no_grad()
def padding_shows(run, lengths=(1, 7, 13)):
    "By how much the padding changes the logits of the last token, relative to them"
    run.model.eval()
    def logits(x, last):
        with uncompiled(), enter_all(run.forward_contexts): return run.model(x)[0, last].double()
    texts = [torch.tensor([t]) for t in tokens(*lengths)]
    pairs = [(logits(x, -1), logits(*padded(x, run.model.config.seq_len, 16))) for x in texts]
    return max(((a - b).norm()/a.norm()).item() for a, b in pairs)

@pytest.mark.parametrize("name", [r for r in RUNGS if r not in ("ddp", "fsdp", "tensor_parallel") and not RUNGS[r].needs() and not RUNGS[r].gpu_only])
def test_padding_is_not_seen_with_any_rung(name):
    run = build(NANO, [*RUNGS[name].requires, name], "cpu")
    assert is_causal(run) and padding_shows(run) < (.02 if run.fmt in ("bf16", "fp16", "fp8") else 1e-4)

@pytest.mark.parametrize("name", [*RECIPES])
def test_padding_is_not_seen_by_any_model(name):
    r = parse_recipe(name)
    run = lively(r.shape(replace(NANO, kv_heads=2)), r.model)
    assert is_causal(run) and padding_shows(Run(run.model.double())) < 1e-9

def test_what_a_plug_in_computes_is_not_padded():
    "Its logits may depend on later tokens or on how many there are; a sharded model is still the one that it was made from"
    class Both(GPT):
        def forward(self, x): return super().forward(x) + x.float().mean()
    run = lively(NANO, Both)
    assert not is_causal(run) and padding_shows(run) > .01
    try:
        @rung("parts", same_function=False)
        def own(run): return run
        assert not is_causal(build(NANO, ["own"], "cpu")) and is_causal(build(NANO, [], "cpu"))
    finally: del RUNGS["own"]
    for cls in (GPT, Both):
        sharded = type("Sharded", (cls,), dict(__module__="torch.distributed.fsdp"))
        assert is_causal(lively(NANO, sharded)) == (cls is GPT)

@pytest.mark.cuda
def test_a_gpu_reads_few_lengths():
    run, lengths = build(replace(NANO, seq_len=600), [], "cuda"), []
    run.model.register_forward_pre_hook(lambda model, args: lengths.append(args[0].shape[1]))
    text = generate(run, [1, 2, 3], 320, temperature=0)
    assert [*dict.fromkeys(lengths)] == [256, 512] and len(lengths) == 320
    assert text[:99] == generate(run, [1, 2, 3], 96, temperature=0, multiple=1)

@pytest.mark.cuda
@pytest.mark.parametrize("n", [20, 320])
def test_passes_that_are_replayed_write_the_same_text(n):
    "A run that captures its steps also captures the passes of a sample, one for each length"
    run = build(replace(NANO, seq_len=600), ["bf16", "fused_ops", "cuda_graphs"], "cuda")
    plain = replace(run, rungs=tuple(r for r in run.rungs if r != "cuda_graphs"))
    calls = []
    run.model.register_forward_pre_hook(lambda model, args: calls.append(args[0].shape[1]))
    text = generate(run, [1, 2, 3], n)
    assert len(calls) == 4*len({*calls}) and {*calls} == ({256} if n == 20 else {256, 512}) # three to warm up, one to capture
    assert text == generate(plain, [1, 2, 3], n)

def rooms(generator): return [room for _, room in generator.graphs] # slots that each captured pass looks at

@torch.no_grad()
def test_recorded_passes(monkeypatch):
    "With more slots than are filled, and with tokens that a recording reads where they always are"
    class Recording:
        def __init__(self, f, out): self.f, self.out = f, out
        def replay(self): self.out.copy_(self.f())
    recordings = []
    def capture_graph(f):
        out = f()
        recordings.append(Recording(f, torch.full_like(out, torch.nan)))
        return recordings[-1], recordings[-1].out
    monkeypatch.setattr("llm_speedrun.generate.capture_graph", capture_graph)
    run = lively(replace(NANO, seq_len=600))
    generator, plain = Generator(run, 2), Generator(run, 2)
    for w in (generator, plain): w.begin(tokens(250, 3)); w.ahead = draw(w.read(w.ahead), torch.Generator().manual_seed(0))
    for _ in range(12):
        want = plain.read(plain.ahead)
        generator.cache.at.fill_(generator.used)
        got = generator.replay(generator.ahead, generator.used + 1)
        generator.used += 1
        assert (got - want).abs().max() < 1e-5
        for w in (generator, plain): w.ahead = want.argmax(-1, keepdim=True)
    assert rooms(generator) == [256, 512] and len(recordings) == 2
    generator.replay(generator.ahead, 600)
    assert rooms(generator) == [256, 512, 600]    # no more slots than there are

@pytest.mark.cuda
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_recorded_on_a_gpu(kv_heads):
    "Logits by graphs are those without them, for texts of several lengths, also when the context is full"
    run = Run(lively(replace(NANO, seq_len=300, kv_heads=kv_heads)).model.cuda())
    generator = Generator(run, 2)
    generator.begin(tokens(9, 250))
    assert max(gaps(run, generator, 320)) < 1e-4
    assert rooms(generator) == [256, 300]

@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_text_on_a_gpu(folder, dtype):
    "The same text for a seed; in FP32 that of `generate`"
    run, tok = open_model(folder, "cuda", dtype)
    ids, said = tok.encode("7 times").ids, []
    for _ in range(2):
        generator = Generator(run)
        generator.begin([ids])
        said.append(ids + [t for t, in generator.write(40, torch.Generator("cuda").manual_seed(0))])
    assert said[0] == said[1] and len(said[0]) == len(ids) + 40
    if dtype == "fp32": assert said[0][:16] == generate(run, ids, 40)[:16]

def test_the_model_is_left_alone():
    "Its parts, its weights and its logits"
    run, (ids,) = lively(NANO), tokens(9)
    parts, weights = [vars(b).copy() for b in run.model.layers], [*run.model.parameters()]
    half = in_dtype(run, "bf16")
    for r in (run, half):
        generator = Generator(r)
        generator.begin([ids])
        assert len([*generator.write(3, torch.Generator().manual_seed(0))]) == 3
    assert [vars(b) for b in run.model.layers] == parts and run.model.layers[0].heads is naive_heads
    assert all(a is b and a.dtype == torch.float32 for a, b in zip(run.model.parameters(), weights))
    assert all(a is b for a, b in zip(generator.model.parameters(), half.model.parameters()))
    dtypes = {(p.ndim > 1, p.dtype) for p in half.model.parameters()}
    assert dtypes == {(True, torch.bfloat16), (False, torch.float32)} and generator.cache.k[0].dtype == torch.bfloat16

def test_bf16_is_near():
    run, (ids,) = baseline(NANO, "cpu"), tokens(20)
    generator = Generator(in_dtype(run, "bf16"))
    generator.begin([ids])
    with torch.no_grad(): want = run.model(torch.tensor([ids]))[:, -1]
    gap = (generator.read(generator.ahead) - want).norm() / want.norm()
    assert 1e-5 < gap < .03

@pytest.mark.parametrize("model", [UntiedGPT, NormedGPT])
def test_models_of_recipes(model):
    "A head of its own, an embedding with a norm"
    run = lively(NANO, model)
    generator = Generator(run)
    generator.begin(tokens(3))
    assert max(gaps(run, generator, 9)) < 2e-5

def test_an_untied_export(tmp_path):
    "What is exported with a head of its own writes as its model did, also in bf16"
    run = lively(NANO, UntiedGPT)
    write_folder(tmp_path/"export", NANO, run.model.state_dict())
    generator, (ids,) = Generator(from_pretrained(tmp_path/"export", "cpu")), tokens(5)
    generator.begin([ids])
    assert ids + [t for t, in generator.write(9, torch.Generator(), temperature=0)] == generate(run, ids, 9, temperature=0)
    half = in_dtype(from_pretrained(tmp_path/"export", "cpu"), "bf16").model
    assert half.lm_head.weight.dtype == torch.bfloat16

def test_what_a_writer_refuses():
    with fails(ValueError, "run with rungs .flash", "generate"): Generator(build(NANO, ["flash"], device="cpu"))
    generator = Generator(lively(NANO), 2)
    with fails(ValueError, "a token to begin with"): generator.begin([[1], []])
    with fails(ValueError, "33 tokens", "at most 32"): generator.begin([[1], [1]*33])

# Drawing

@pytest.mark.parametrize("top_p", [.05, .5, .9, .999])
@pytest.mark.parametrize("temperature", [.3, 1., 2.])
def test_the_nucleus(top_p, temperature):
    "As in float64: the fewest tokens that reach `top_p`, with their probabilities"
    logits = torch.randn(5, 4096, generator=torch.Generator().manual_seed(3))*3
    i, p = top_k_top_p(logits, temperature, 0, top_p)
    for row, order, got in zip(logits.double(), i, p.double()):
        want, by_size = (row/temperature).softmax(-1).sort(descending=True)
        n = next(n for n in range(1, 4097) if want[:n].sum() >= top_p)
        kept = int((got > 0).sum())
        assert kept == n and (order[:n] == by_size[:n]).all()
        assert torch.allclose(got[:n]/got[:n].sum(), want[:n]/want[:n].sum(), rtol=1e-5)

def test_the_nucleus_of_the_likeliest():
    "`top_k` first: then the nucleus is of what these have"
    i, p = top_k_top_p(torch.tensor([[4., 4., 4., 4., 1.]]).log(), 1., 4, .7)
    assert (p > 0).sum() == 3 and 4 not in i[p > 0]

@pytest.mark.parametrize("how", [dict(temperature=0), dict(temperature=0., top_k=0, top_p=.2), dict(top_k=1, temperature=100.), dict(top_p=1e-6)], ids=str)
def test_greedy_draws(how):
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(3))
    assert (draw(logits, torch.Generator().manual_seed(0), **how)[:, 0] == logits.argmax(-1)).all()

def test_draws_are_those_of_multinomial():
    "The same token for the same seed, so that texts are what they were"
    for seed in range(100):
        logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed))*3
        v, i = logits[0].topk(50)
        want = i[torch.multinomial((v/.8).softmax(-1), 1, generator=torch.Generator().manual_seed(seed))]
        assert draw(logits, torch.Generator().manual_seed(seed))[0] == want

def test_rows_draw_on_their_own():
    drawn = draw(torch.zeros(200, 50), torch.Generator().manual_seed(0), top_k=0)
    assert len(drawn.unique()) > 40

# Text

def test_whole_characters():
    "Streamed, a text is the same and no piece has half a character; bytes that are no text stay as they were decoded"
    tok = train_tokenizer(["naïve 漢字 and 🎉 party. "*20], 300)
    said = "naïve 漢字 🎉🎉 \u200d ß\n"*3
    stream = TextStream(tok)
    parts = [stream(i) for i in tok.encode(said).ids]
    assert "".join(parts) == said and stream.rest() == "" and not any("\ufffd" in p for p in parts)
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(1, tok.get_vocab_size()) for _ in range(30)]
        stream = TextStream(tok)
        parts = [stream(i) for i in ids]
        assert not any(p.endswith("\ufffd") for p in parts)
        assert "".join(parts) + stream.rest() == tok.decode(ids).rstrip("\ufffd")

class Script:
    "What `stream_pieces` asks of a `Generator`, with tokens that are known"
    def __init__(self, steps): self.steps, self.tokens = steps, steps[0]
    def write(self, n, g, **how): self.written = 0; yield from map(self.one, self.steps[:n])
    def one(self, step): self.written += 1; return step

def test_a_text_ends_at_the_token_of_the_end():
    "Each for itself; when all have ended, nothing more is computed"
    tok = train_tokenizer(["ab"], 257)
    (a,), (b,), half = tok.encode("a").ids, tok.encode("b").ids, tok.encode("漢").ids[0]
    script = Script([[a, b], [0, half], [a, b], [b, 0], [a, a]])
    assert [*stream_pieces(script, tok, 9, None)] == [["a", "b"], [None, ""], [None, "\ufffdb"], [None, None]] and script.written == 4
    assert [*stream_pieces(Script([[a, half]]), tok, 1, None)] == [["a", ""], [None, None]]

# The command

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Of a run that has a tokenizer"
    tmp = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("LLM_SPEEDRUN_CACHE", str(tmp/"cache"))
        train(options(tmp, data=str(texts(tmp/"texts")), steps=30, lr=.01), progress=False)
    return tmp/"runs/run"

def said(capsys, *args):
    speedrun_sample([str(a) for a in args])
    return capsys.readouterr().out

def test_command(folder, capsys):
    "The prompt and what follows it; the same for a seed, other text for another"
    args = folder, "--prompt", "- 3 times", "--n", 30, "--temperature", 1
    a, b, c = said(capsys, *args), said(capsys, *args), said(capsys, *args, "--seed", 1)
    assert a == b != c and a.startswith("- 3 times") and len(a) > 12
    assert said(capsys, folder, "--n=30") != ""

def test_greedy(folder, capsys):
    "`--top_k 1` takes the likeliest, whatever seed and temperature"
    one = [said(capsys, folder, "--prompt=7 times", "--top-k=1", "--n=20", f"--seed={s}", f"--temperature={t}") for s, t in ((0, 1), (1, 100), (2, .01))]
    assert len({*one}) == 1

def test_stops_at_the_end_of_a_document(folder, monkeypatch):
    "What the model writes after it would be another text"
    eot = Tokenizer.from_file(str(folder/"tokenizer.json")).token_to_id("<|endoftext|>")
    monkeypatch.setattr(Generator, "write", lambda self, n, g, **how: iter([[66], [67], [eot], [68]]))
    assert defined_in("sample", "continued").continued(folder, "x") == "x" + Tokenizer.from_file(str(folder/"tokenizer.json")).decode([66, 67])

def test_temperature_0_is_greedy(folder, capsys):
    text = said(capsys, folder, "--prompt=7 times", "--n=20", "--temperature=0", "--seed=3")
    assert text == said(capsys, folder, "--prompt=7 times", "--n=20", "--top_k=1")
    assert text == said(capsys, folder, "--prompt=7 times", "--n=20", "--top_p=0.000001", "--top_k=0")

def feed(monkeypatch, data):
    "Let standard input have these bytes"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

def test_several(folder, tmp_path, capsys, monkeypatch):
    "From the command line, a file and standard input; greedily, each as if it were alone"
    greedy = "--temperature=0", "--n=12"
    alone = {p: said(capsys, folder, "--prompt", p, *greedy) for p in ("7 times", "1, 2", "is not", "two\nlines")}
    def heads(*prompts): return "".join(f"--- {i} of {len(prompts)} ---\n{alone[p]}" for i, p in enumerate(prompts, 1))
    assert said(capsys, folder, "--prompt", "7 times", "--prompt", "1, 2", *greedy) == heads("7 times", "1, 2")
    (tmp_path/"prompts.txt").write_text("7 times\n\nis not\n", encoding="utf-8")
    assert said(capsys, folder, "--prompts", tmp_path/"prompts.txt", *greedy) == heads("7 times", "is not")
    feed(monkeypatch, b"1, 2\nis not")
    assert said(capsys, folder, "--prompt=7 times", "--prompts", "-", *greedy) == heads("7 times", "1, 2", "is not")
    feed(monkeypatch, b"two\nlines\n")
    assert said(capsys, folder, "--prompt", "-", *greedy) == alone["two\nlines"]
    assert said(capsys, folder, "--prompt=is not", "--num_samples=2", *greedy) == heads("is not", "is not")
    three = said(capsys, folder, "--prompt=is not", "--num_samples=3", "--n=12", "--temperature=2").split("---\n")[1:]
    assert len({t.split("\n---")[0] for t in three}) == 3

def test_many_are_written_in_batches(folder, capsys, monkeypatch):
    args = folder, "--prompt=7 times", "--num_samples=5", "--n=4", "--temperature=0"
    text = said(capsys, *args)
    sizes, begin = [], Generator.begin
    monkeypatch.setattr(sample, "BATCH", 2)
    monkeypatch.setattr(Generator, "begin", lambda self, texts: sizes.append(len(texts)) or begin(self, texts))
    assert said(capsys, *args) == text and sizes == [2, 2, 1]

def test_streaming(folder, monkeypatch):
    "Text is printed while it is written, piece by piece"
    seen, write = [], Generator.write
    out = io.StringIO()
    def watched(self, n, g, **how):
        for t in write(self, n, g, **how): seen.append(out.getvalue()); yield t
    monkeypatch.setattr(Generator, "write", watched)
    monkeypatch.setattr("sys.stdout", out)
    speedrun_sample([str(folder), "--prompt=7 times", "--n=20", "--temperature=0"])
    assert seen[0] == "7 times" and len(set(seen)) > 10 and all(b.startswith(a) for a, b in zip(seen, seen[1:]))

@pytest.mark.parametrize("args,message", [
    (["nowhere"], "there is no folder nowhere"), (["RUN", "--n", "0"], "n must be a whole number from 1"), (["RUN", "--temperature", "-1"], "temperature must be a number from 0"),
    (["RUN", "--temperature", "nan"], "temperature must"), (["RUN", "--top_k", "-1"], "top_k must"), (["RUN", "--top_p", "0"], "top_p must be a number above 0 to 1"), (["RUN", "--top_p", "1.5"], "top_p must"),
    (["RUN", "--num_samples", "0"], "num_samples must"), (["RUN", "--dtype", "fp8"], "unknown dtype"), (["RUN", "--device", "tpu"], "unknown device"), (["RUN", "--prompt", "7 times 8 "*90], "the model reads at most 16"),
    (["RUN", "--prompts", "nowhere.txt"], "nowhere.txt"), (["RUN", "--prompts", "EMPTY"], "has no line with a prompt"), (["RUN", "--prompts", "BYTES"], "seems to be UTF-16, or no text: save it as UTF-8"), (["RUN", "--prompt", "\udcff"], "is no text in UTF-8"),
    ([], "arguments are required: run"), (["RUN", "more"], "no option takes more")], ids=str)
def test_refused(folder, tmp_path, capsys, args, message):
    (tmp_path/"empty").write_text("\n\n")
    (tmp_path/"bytes").write_bytes(b"\xff\xfe")
    places = dict(RUN=folder, EMPTY=tmp_path/"empty", BYTES=tmp_path/"bytes")
    with pytest.raises(SystemExit) as e: speedrun_sample([str(places.get(a, a)) for a in args])
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and err.count("\n") == 1

def test_too_little_memory(folder, capsys, monkeypatch):
    def full(self, n, g, **how): raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(Generator, "write", full)
    with pytest.raises(SystemExit): speedrun_sample([str(folder), "--prompt=7"])
    assert "fewer --num_samples" in capsys.readouterr().err

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(folder, capsys):
    with pytest.raises(SystemExit): speedrun_sample([str(folder), "--device=cuda"])
    assert "no GPU that PyTorch can use" in capsys.readouterr().err

def test_greedy_text_is_that_of_transformers(tmp_path):
    "On exported weights, for prompts of several lengths in a batch"
    transformers = pytest.importorskip("transformers")
    config = replace(NANO, seq_len=64)
    model = lively(config).model
    for name, w in model.named_parameters(): w.data.mul_(6 if "proj" in name else 1)    # or each token would repeat itself
    write_folder(tmp_path/"export", config, model.state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path/"export").eval()
    ids, generator = tokens(3, 7, 13), Generator(from_pretrained(tmp_path/"export", "cpu"), 3)
    generator.begin(ids)
    texts = [*zip(*generator.write(50, torch.Generator().manual_seed(0), temperature=0))]
    assert max(len({*t}) for t in texts) > 15    # no text that a broken model could write too
    for i, text in zip(ids, texts):
        want = theirs.generate(torch.tensor([i]), attention_mask=torch.ones(1, len(i)), max_new_tokens=50, do_sample=False)
        assert i + [*text] == want[0].tolist()

def test_speed_beside_transformers(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("IN_TEST", "1")
    speed = defined_in("sample", "our_writing", "their_writing", "writing_speed").writing_speed(export_folder(folder, tmp_path/"export"), 2, prompt=3, n=4, device="cpu")
    assert "ours" in speed and all(v > 0 for v in speed.values())

@pytest.mark.parametrize("what,message", [("none", "has no tokenizer.json"), ("another", "it is another's"), ("no end", "can't begin from nothing: give a --prompt")])
def test_tokenizers(folder, tmp_path, capsys, what, message):
    "A run without one knows no text; one of another model, or without an end of text, is told"
    (tmp_path/"model.safetensors").symlink_to(folder/"model.safetensors")
    (tmp_path/"config.json").symlink_to(folder/"config.json")
    tok = json.loads((folder/"tokenizer.json").read_text(encoding="utf-8"))
    if what == "another": tok["model"]["vocab"] |= {f"{i}": i for i in range(2000, 3000)}
    if what == "no end":
        tok["added_tokens"] = []
        tok["model"]["vocab"] = {k: v for k, v in tok["model"]["vocab"].items() if k != "<|endoftext|>"}
    if what != "none": (tmp_path/"tokenizer.json").write_text(json.dumps(tok), encoding="utf-8")
    with pytest.raises(SystemExit) as e: speedrun_sample([str(tmp_path)])
    assert e.value.code == 2 and message in capsys.readouterr().err

def test_what_the_tokenizer_has_no_token_for():
    "A tokenizer of characters, as nanoGPT's meta.pkl makes one, raises a bare Exception for any other"
    from llm_speedrun.tools.sample import tokens_of
    from llm_speedrun.data.token_files import Characters, character_tokenizer
    tok = character_tokenizer(Characters({0: "a", 1: "b"}, 2))
    assert tokens_of("abba", tok, 99) == [0, 1, 1, 0]
    with fails(InputError, "can't encode 'é~'"): tokens_of("aé~a", tok, 99)
