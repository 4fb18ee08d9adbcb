"Every token once per epoch, on any number of processes: orders without a list, rows by place, lanes of a stream."
import json, tracemalloc
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
import numpy as np, pytest, torch
from llm_speedrun.data.batches import PERMUTED, Batches, ComputedOrder
from llm_speedrun.data.corpus import open_corpus, train_tokenizer
from llm_speedrun.io_utils import InputError
from llm_speedrun.data.loader import LaneBatches, MixedBatches, StreamBatches, joined_lanes, lanes_for, shard_batches

class Length:
    "Tokens of which the number alone is known"
    def __init__(self, n): self.n, self.paths = n, ["long.bin"]
    def __len__(self): return self.n

def place(p, n): return SimpleNamespace(rank_and_size=lambda dim: (p, n))

# Orders

EXPECTED = [45951072, 25806309, 44078065, 18869796, 90417289, 15310628]

@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097, 65_535, 65_537, 262_145])
def test_computed_order_is_a_bijection(n):
    for seed in range(3 if n < 5000 else 1):
        assert np.array_equal(np.sort(ComputedOrder(n, np.random.default_rng(seed))[:]), np.arange(n))

def test_computed_order_is_the_same_everywhere():
    "To the bit: a run goes on where another machine stopped"
    order = ComputedOrder(10**8 + 7, np.random.default_rng((3, 0)))
    assert order[:4].tolist() == EXPECTED[:4] and order[10**8:10**8 + 2].tolist() == EXPECTED[4:]
    assert order[5:5].tolist() == [] and order[:4].dtype == np.int64

def test_computed_order_has_no_visible_order():
    "Steps between neighbours, pairs of neighbours and the first numbers of an epoch are as even as those of a random order"
    n = 50_021
    for seed in range(4):
        o = ComputedOrder(n, np.random.default_rng(seed))[:]
        for values in ((np.diff(o) % n), o[::2], o[:n//10], (o[:-1]//(n//7 + 1))*7 + o[1:]//(n//7 + 1)):
            cells = 49 if values.max() < 49 else 40
            got = np.histogram(values, cells, (0, 49 if cells == 49 else n))[0]
            chi = ((got - got.mean())**2/got.mean()).sum()
            assert chi < cells + 6*(2*cells)**.5, (seed, chi)
        assert abs(np.corrcoef(np.arange(n), o)[0, 1]) < 5*n**-.5
        assert (o == np.arange(n)).sum() < 12 # a random order has one in the mean

def test_epochs_and_seeds_have_orders_of_their_own():
    at = lambda seed, epoch: (b := Batches(Length(10**10), 64, 1024, seed=seed)).starts(epoch*b.per_epoch)
    a = at(0, 0)
    assert all(len({*a.tolist()} & {*b.tolist()}) < 3 for b in (at(0, 1), at(1, 0)))
    assert np.array_equal(at(0, 0), a)

@pytest.mark.parametrize("n, computed", [(PERMUTED, False), (PERMUTED + 8, True)])
def test_small_corpora_keep_their_order(n, computed):
    "A permutation as ever, to the bit, up to `PERMUTED` windows"
    b = Batches(Length(n*4 + 1), 8, 4, seed=5)
    b.starts(0)
    assert isinstance(b.order, ComputedOrder) is computed
    if computed: return
    rng = np.random.default_rng((5, 0))
    assert b.offset == int(rng.integers(1)) and np.array_equal(b.order, rng.permutation(n))

def test_memory_is_constant():
    "A hundred billion tokens take no more than a thousand batches do"
    b = Batches(Length(10**11), 64, 1024)
    tracemalloc.start()
    for i in (0, b.per_epoch - 1, b.per_epoch, 5*b.per_epoch//2): b.starts(i)
    peak = tracemalloc.get_traced_memory()[1]; tracemalloc.stop()
    assert peak < 2**20

@pytest.mark.parametrize("tokens", [4*30 + 1, 4*37 + 3])
def test_a_computed_epoch_has_every_window_once(monkeypatch, tokens):
    "Also where batches don't use up the windows, and over the end of an epoch"
    monkeypatch.setattr("llm_speedrun.data.batches.PERMUTED", 0)
    b = Batches(Length(tokens), 5, 4, seed=1)
    for epoch in range(3):
        starts = np.concatenate([b.starts(epoch*b.per_epoch + i) for i in range(b.per_epoch)])
        assert np.diff(np.sort(starts)).min() >= 4 and starts.min() >= 0 and starts.max() + 5 <= tokens
        assert len(starts) == b.per_epoch*5
    n = b.per_epoch*5
    assert np.array_equal(b.windows(n - 3, 2*n + 3), np.concatenate([b.windows(i, i + 1) for i in range(n - 3, 2*n + 3)]))

# Rows

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    folder.joinpath("text.txt").write_text("".join(f"line {i} of a text, number {i*i % 977}\n" for i in range(3000)))
    return open_corpus(folder/"text.txt", 300)

def made(corpus):
    return {"one corpus": lambda: Batches(corpus.train, 12, 32, seed=3),
            "a mixture": lambda: MixedBatches([(corpus.train, Fraction(2)), (corpus.val, Fraction(1))], 12, 32, seed=3)}

@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("kind", ["one corpus", "a mixture"])
def test_rows_on_any_number_of_processes(corpus, kind, computed, monkeypatch):
    "A run changes its number of processes in the middle of an epoch; its batches are those of one, each row in one place"
    if computed: monkeypatch.setattr("llm_speedrun.data.batches.PERMUTED", 0)
    make = made(corpus)[kind]
    one, i, seen = make(), 0, Counter()
    for n, steps in ((1, 7), (2, 9), (3, 5), (4, max(one.per_epoch - 21, 5))):
        crew = [shard_batches(make(), place(p, n)) for p in range(n)]
        for b in crew: b.i = i
        for _ in range(steps):
            x, y = (torch.cat(rows) for rows in zip(*map(next, crew)))
            assert x.equal(one[i][0]) and y.equal(one[i][1])
            seen.update(np.concatenate([b.starts(i) for b in crew]).tolist())
            i += 1
    if kind == "one corpus": assert i == one.per_epoch and set(seen.values()) == {1} and len(seen) == 12*one.per_epoch

def test_one_process_keeps_its_batches(corpus):
    "The same object: nothing between it and the trainer"
    for make in made(corpus).values():
        whole = make()
        assert shard_batches(whole, place(0, 1)) is whole

def test_more_processes_than_rows(corpus):
    for make in made(corpus).values():
        with pytest.raises(InputError, match="a batch of 12 rows can't be shared by 24 ranks"): shard_batches(make(), place(0, 24))
    with pytest.raises(InputError, match="can't be shared by 5"): shard_batches(make(), place(0, 5))

def test_mixtures_keep_their_order(corpus):
    "As each row was looked up alone"
    from llm_speedrun.data.loader import mixed_row
    mix = made(corpus)["a mixture"]()
    decks = [Batches(s, 1, 32, seed=d.seed) for s, d in zip((corpus.train, corpus.val), mix.shuffled_sources)]
    for i in (0, 3, mix.per_epoch - 1, mix.per_epoch, 3*mix.per_epoch + 1):
        rows = (mixed_row(n, mix.parts) for n in range(i*12, (i + 1)*12))
        assert mix.starts(i).tolist() == [mix.bases[s] + int(decks[s].starts(j)[0]) for s, j in rows]

# Lanes

DOCS = [f"document {i} and some words that it has, {i*i}" for i in range(240)]

@pytest.fixture(scope="module")
def tok(): return train_tokenizer(DOCS, 300)

def stream(tok, batch=12, docs=DOCS, **kw):
    return StreamBatches(lambda: iter(docs), tok, batch, 16, **dict(seed=4, buffer=7, workers=0) | kw)

def crew_of(tok, n, *state, lanes=12, **kw):
    res = [LaneBatches(stream(tok, **kw), p, n, lanes) for p in range(n)]
    for s in res if state else (): s.load_state_dict(*state)
    return res

def saved(crew, i=None): return json.loads(json.dumps(joined_lanes([s.state_dict(i) for s in crew])))

def test_lanes_on_any_number_of_processes(tok):
    "1, 2, 3, 4 and 2 processes, each from what the ones before saved: the rows of 12 lanes that were never stopped"
    never, state = [stream(tok, 1, rank=k, world=12) for k in range(12)], []
    for n in (1, 2, 3, 4, 2):
        crew = crew_of(tok, n, *state)
        for _ in range(3):
            rows, lanes = [next(s) for s in crew], [next(s) for s in never]
            for p, (x, y) in enumerate(rows):
                assert x.equal(torch.cat([b[0] for b in lanes[p::n]])) and y.equal(torch.cat([b[1] for b in lanes[p::n]]))
        state = [saved(crew)]
    assert [p["i"] for p in state[0]["lanes"]] == [15]*12 and [p["rank"] for p in state[0]["lanes"]] == [*range(12)]

def test_no_document_is_missed_or_doubled(tok):
    "Over a whole epoch with a change in its middle"
    crew, text = crew_of(tok, 2, lanes=4), [[] for _ in range(4)]
    for step in range(60):
        if step == 9: crew = crew_of(tok, 4, saved(crew), lanes=4)
        for p, s in enumerate(crew):
            for lane, y in zip(s.lanes, next(s)[1].split(3)): text[lane.rank] += y.flatten().tolist()
    assert all(lane.state_dict()["epoch"] for s in crew for lane in s.lanes)
    first = [tok.decode([0, *t], skip_special_tokens=False).split("<|endoftext|>")[1:61] for t in text]
    assert sorted(d for docs in first for d in docs) == sorted(DOCS)

def test_prefetched_positions(tok):
    "What is saved is the position after the batches that were used, though some more were taken"
    crew = crew_of(tok, 2, lanes=4)
    for _ in range(3): [next(s) for s in crew]
    state, wanted = saved(crew, 2), None
    for _ in range(2): wanted = [next(s) for s in crew]
    again = crew_of(tok, 2, state, lanes=2) # the number of lanes is that of the position
    for _ in range(3): got = [next(s) for s in again]
    assert all(a[0].equal(b[0]) for a, b in zip(got, wanted))

def test_one_lane_is_the_stream(tok):
    "One process: the bits, the position and the old positions of a stream without lanes"
    plain, alone = stream(tok), shard_batches(stream(tok), place(0, 1))
    for _ in range(30): assert next(plain)[1].equal(next(alone)[1])
    assert saved([alone]) == json.loads(json.dumps(plain.state_dict())) and alone.i == plain.i == 30
    new = shard_batches(stream(tok), place(0, 1)); new.load_state_dict(plain.state_dict())
    assert next(new)[0].equal(next(plain)[0])

def test_processes_that_share_a_model_share_lanes(tok):
    "Two places with two processes each send the same positions twice"
    crew = [s for s in crew_of(tok, 2, lanes=4) for _ in range(2)]
    assert len(saved(crew)["lanes"]) == 4

@pytest.mark.parametrize("rows, n, lanes", [(12, 1, 1), (12, 2, 4), (12, 3, 6), (12, 4, 4), (16, 4, 8), (7, 7, 7)])
def test_lanes_of_a_new_stream(rows, n, lanes): assert lanes_for(rows, n) == lanes

def test_numbers_that_do_not_divide(tok):
    state = saved(crew_of(tok, 2, lanes=4))
    with pytest.raises(InputError, match="4 lanes can't be shared by 3 processes: go on with 1, 2, 4"): crew_of(tok, 3, state)
    with pytest.raises(InputError, match="1 lane can't be shared by 2 processes: go on with 1"): crew_of(tok, 2, stream(tok).state_dict())
    with pytest.raises(InputError, match="12 sequences of a step can't be shared by 5 lanes"): shard_batches(stream(tok), place(0, 5))
    with pytest.raises(InputError, match="no document for rank 3 of 4"): [next(s) for s in crew_of(tok, 1, lanes=4, docs=DOCS[:3])]

@pytest.mark.parametrize("change", [lambda s: dict(lanes=[]), lambda s: dict(lanes="ab"), lambda s: dict(lanes=s["lanes"][:3]),
    lambda s: dict(lanes=s["lanes"][::-1]), lambda s: dict(lanes=[None]*4), lambda s: dict(), lambda s: None, lambda s: 7,
    lambda s: dict(lanes=[s["lanes"][0] | dict(seed=9), *s["lanes"][1:]])])
def test_tampered_lanes(tok, change):
    "A position that can't be is refused, and says so"
    crew = crew_of(tok, 1, lanes=4); next(crew[0])
    with pytest.raises(InputError): crew_of(tok, 1, change(saved(crew)))
