"""The grammars' tables on the device: torch, C++ and Triton against Grammar.mask and Grammar.step."""

import contextlib
import random
import sys
import threading
import time

import numpy as np
import pytest
import torch
from kernel_sets import SETS
from test_grammar import HARD, THRESHOLDS, draw_expr, draw_vocab
from torch.utils._python_dispatch import TorchDispatchMode
from triton_interpreter import DEVICE
from triton_interpreter import masks as interpreted

from nano_sgl import grammar, masks, waves, weights
from nano_sgl.grammar import COUNT_SHIFT, INDEX
from nano_sgl.masks import DEAD
from nano_sgl.rules import GrammarError, Rules
from nano_sgl.tables import Pool
from nano_sgl.vocab import Vocab

BACKENDS = ["torch", "triton"] + ["cpp"] * (len(SETS) > 1)
TEXTS = {
    r'\{"name": "[^"\\\n]{1,20}", "n": -?\d+\}':
        ["", '{"name', '{"name": "', '{"name": "Some', '{"name": "nineteen characters.', '{"name": "x", "n": 5'],
    r"\w+( \w+){3,9}[.!?]": ["", "The", "The quick", "The quick brown fox jumps", "a b c d."], r"[a-z ]{30,40}": ["a" * 12, "a" * 39, "b" * 40]}
COUNTED = [r"(?:a|b|c){2,9}", r"a{0,3}b{2,40}c?", r"((ab){1,3}c){2,5}", r"[ab]{1,4}[abc]{3,30}"]


def device_tables(tables, backend: str) -> masks.DeviceTables:
    return interpreted.DeviceTables(tables, DEVICE, "triton") if backend == "triton" else masks.DeviceTables(tables, "cpu", backend)


def reference_mask(machine: grammar.Grammar, state: int) -> np.ndarray:
    """[V] bool."""
    return np.unpackbits(machine.mask(state).view(np.uint8), bitorder="little")[: machine.vocab.size].astype(bool)


def reachable(machine: grammar.Grammar, draw: random.Random, walks: int, steps: int) -> list[int]:
    """States that texts reach, with their rows."""
    found = []
    for _ in range(walks):
        state = machine.start
        for _ in range(steps):
            found.append(state)
            inside = np.flatnonzero(reference_mask(machine, state))
            inside = [t for t in inside.tolist() if t not in machine.vocab.end_ids]
            if not inside:
                break
            state = machine.step(state, draw.choice(inside))
    for state in found:
        machine.row(state)
    return found


def random_machines(seed: int, patch: pytest.MonkeyPatch, number: int = 3) -> tuple[list[grammar.Grammar], random.Random]:
    """Grammars of one vocabulary, whatever the thresholds that choose how rows are laid out."""
    draw, choose = random.Random(seed), random.Random(-1 - seed)
    for (module, name), values in THRESHOLDS.items():
        patch.setattr(module, name, choose.choice(values))
    vocab, found = draw_vocab(draw), []
    while len(found) < number:
        names = [f"r{i}" for i in range(draw.choice([1, 2, 3]))]
        try:
            found.append(grammar.compile_rules(Rules({name: draw_expr(draw, names, 3) for name in names}, "r0"), vocab))
        except GrammarError:
            pass
    found.append(grammar.compile("regex", draw.choice(COUNTED), vocab))
    found.append(grammar.compile_rules(Rules(HARD[draw.choice([n for n in HARD if n != "ambiguous"])], "S"), vocab))
    return found, draw


def check_mask(device: masks.DeviceTables, where: str, batch: list[tuple[grammar.Grammar | None, int]], width: int, draw: random.Random) -> None:
    """A batch of (grammar, state), grammar None: the row must be left alone; all rows, and some rows among others."""
    vocab_size = device.tables.vocab.size
    want = torch.from_numpy(np.stack([np.ones(vocab_size, bool) if m is None else reference_mask(m, s) for m, s in batch]))[:, :width]
    states = torch.tensor([s for _, s in batch], device=where)
    for spread in (False, True):
        count = len(batch) + 3 * spread
        logits = torch.randn(count, width)
        rows = torch.tensor(draw.sample(range(count), len(batch))) if spread else torch.arange(count)
        expected = logits.clone()
        expected[rows] = torch.where(want, logits[rows], -torch.inf)
        got = logits.to(where)
        device.mask(got, rows.to(where) if spread else None, states)
        assert torch.equal(got.cpu(), expected)


def check_steps(device: masks.DeviceTables, where: str, batch: list[tuple[grammar.Grammar | None, int]], draw: random.Random) -> None:
    """All tokens from some states, ids that are none among them, and whether there is a row."""
    size = device.tables.vocab.size
    tokens = [*range(size), -1, size, size + 7] if size < 100 else [draw.randrange(size) for _ in range(50)]
    states, ids, want = [], [], []
    for machine, state in batch:
        more = tokens if size < 100 or machine is None else tokens + draw.sample(np.flatnonzero(reference_mask(machine, state)).tolist(), 1)
        for token in more:
            after = None if machine is None else machine.step(state, token)
            states.append(state), ids.append(token), want.append(DEAD if after is None else after)
    got = device.advance(torch.tensor(states, device=where), torch.tensor(ids, device=where))
    assert got.dtype == torch.int64 and got.tolist() == want
    rows = device.has_row(torch.tensor([state for _, state in batch], device=where))
    assert rows.dtype == torch.bool and rows.tolist() == [machine is not None for machine, _ in batch]


def check_walks(device: masks.DeviceTables, where: str, machines: list[grammar.Grammar], draw: random.Random, nodes: int) -> None:
    """Draft trees of which some nodes are not allowed, from roots that are dead, too."""
    size, roots, tokens, parents, want = device.tables.vocab.size, [], [], [], []
    for machine in [*machines, None]:
        states, ids, above = [DEAD if machine is None else machine.start], [0], [0]
        for i in range(1, nodes):
            parent = i - 1 if machine is machines[0] else draw.choice([i - 1, draw.randrange(i)])
            state = states[parent]
            inside = [] if state == DEAD else np.flatnonzero(reference_mask(machine, state)).tolist()
            token = draw.choice(inside) if inside and draw.random() < 0.8 else draw.randrange(size)
            after = None if state == DEAD else machine.step(state, token)
            if after is not None:
                machine.row(after)
            states.append(DEAD if after is None else after), ids.append(token), above.append(parent)
        roots.append(states[0]), tokens.append(ids), parents.append(above), want.append(states)
    device.refresh()
    got = device.walk(torch.tensor(roots, device=where), torch.tensor(tokens, device=where), torch.tensor(parents, device=where))
    assert got.tolist() == want


class NoWaiting(TorchDispatchMode):
    """Raises where torch would wait for a device: a number to the host, or a shape that depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero"), f"{name} waits"
        if name in ("index", "index_put_", "index_put"):
            assert not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]), "a boolean index waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend, seed", [(backend, seed) for backend in BACKENDS for seed in range(2 if backend == "triton" else 8)])
def test_it_says_what_the_grammar_says(backend, seed, monkeypatch):
    """Random grammars in one batch, with dead states and states without a row, of logits as wide as the vocabulary or less."""
    machines, draw = random_machines(seed, monkeypatch)
    for module in (masks, interpreted):
        monkeypatch.setattr(module, "MASK_BLOCK", draw.choice([16, 32]))
        monkeypatch.setattr(module, "TWIN_AT_ONCE", draw.choice([1, 100, 2**22]))
    batch = [(machine, state) for machine in machines for state in draw.sample(reachable(machine, draw, 3, 6), 1 if backend == "triton" else 3)]
    tables, where = machines[0].tables, DEVICE if backend == "triton" else "cpu"
    device = device_tables(tables, backend)
    without = [(None, i) for i, row in enumerate(tables.rows) if row is None][:2] + [(None, DEAD), (None, len(tables.rows) + 5000 | 3 << COUNT_SHIFT)]
    batch = draw.sample(batch + without, len(batch + without))
    with NoWaiting() if backend == "torch" else contextlib.nullcontext():
        for width in (tables.vocab.size, draw.randrange(3, tables.vocab.size)):
            check_mask(device, where, batch, width, draw)
        check_steps(device, where, batch, draw)
        check_walks(device, where, machines, draw, 9)
        check_mask(device, where, [one for one in batch if one[0]][:1], tables.vocab.size, draw)     # what had no row may have got one


@pytest.fixture(scope="module")
def demo(demo_path):
    tokenizer = weights.load_tokenizer(demo_path)
    return Vocab.from_tokenizer(tokenizer, weights.end_ids(demo_path, tokenizer))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vocabulary_of_a_model(backend, demo, threads):
    """Strings, counts near their ends, numbers, words; one row goes to all threads in parts."""
    demo.shared, batch, machines = None, [], []
    for pattern, texts in TEXTS.items():
        machines.append(grammar.compile("regex", pattern, demo))
        batch += [(machines[-1], machines[-1].step_bytes(machines[-1].start, text.encode())) for text in texts]
    for machine, state in batch:
        machine.row(state)
    device, where, draw = device_tables(demo.shared.tables, backend), DEVICE if backend == "triton" else "cpu", random.Random(0)
    batch = draw.sample(batch, 3 if backend == "triton" else len(batch)) + [(None, DEAD)]
    check_mask(device, where, batch, demo.size, draw)
    check_steps(device, where, batch, draw)
    if backend == "triton":
        return
    for width in (demo.size, demo.size - 3, 20_000):
        for which in batch:
            check_mask(device, where, [which], width, draw)
    check_walks(device, where, machines, draw, 24)


@pytest.fixture(params=[1, 3])
def threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def test_every_set_of_kernels_masks(kernel_set, monkeypatch):
    """kernels.cpp compiled for each instruction set; without it, torch's operations."""
    machines, draw = random_machines(77, monkeypatch)
    batch = [(machine, state) for machine in machines for state in reachable(machine, draw, 3, 6)] + [(None, DEAD)]
    device = masks.DeviceTables(machines[0].tables, "cpu")
    assert bool(device._native()) == (kernel_set == "cpp")
    check_mask(device, "cpu", batch, machines[0].vocab.size, draw)
    check_steps(device, "cpu", batch, draw)
    check_walks(device, "cpu", machines, draw, 20)


def test_what_c_remembers_of_a_row_is_of_its_tables_and_count():
    """The same row of several tables, at counts that go up and down, by one thread: cpu/mask.h keeps what it found last."""
    pairs, rest = [], [b"%d" % i for i in range(200)]    # beside which few are few enough to be listed
    for pattern in ("[ab]{1,9}!", "[abc]{2,5}", "a{3,4}b?"):
        machine = grammar.compile("regex", pattern, Vocab([b"a", b"b", b"ab", b"aaa", b"c", b"!", b"a!", None, *rest], end_ids=[7]))
        states = {machine.start}
        for _ in range(9):
            states |= {after for state in states for token in range(7) if (after := machine.step(state, token)) is not None}
        expected = {state: reference_mask(machine, state) for state in sorted(states)}
        pairs.append((masks.DeviceTables(machine.tables, "cpu"), expected))
    draw = random.Random(0)
    for _ in range(300):
        device, expected = draw.choice(pairs)
        state = draw.choice([*expected])
        logits = torch.zeros(1, 208)
        device.mask(logits, None, torch.tensor([state]))
        assert ((logits[0] == 0).numpy() == expected[state]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_at_all(backend):
    vocab = Vocab([b"a", b"b"])
    machine = grammar.compile("regex", "a{2,5}b", vocab)
    where = DEVICE if backend == "triton" else "cpu"
    device = device_tables(machine.tables, backend)
    none = torch.zeros(0, dtype=torch.int64, device=where)
    assert device.refresh() == 0 and device.advance(none, none).shape == (0,) and device.has_row(none).shape == (0,)
    assert device.walk(none, none.view(0, 4), none.view(0, 4)).shape == (0, 4)
    logits = torch.randn(2, 2, device=where)
    before = logits.clone()
    device.mask(logits, none, none)
    start = torch.tensor([machine.start, DEAD], device=where)
    device.mask(logits, None, start)        # a vocabulary without ends, tables without rows
    assert torch.equal(logits, before)
    assert device.walk(start, start[:, None], start[:, None]).tolist() == [[machine.start], [DEAD]]
    for bad in (torch.zeros(2, 3), torch.zeros(2, 4)[:, ::2], torch.zeros(2, 2, dtype=torch.float16)):
        with pytest.raises(ValueError, match="contiguous fp32 of up to 2 columns"):
            device.mask(bad.to(where), None, start)


# ---- refresh

def test_nothing_new_is_nothing_sent():
    vocab = Vocab([b"a", b"b"])
    machine = grammar.compile("regex", "a{2,5}b", vocab)
    device = masks.DeviceTables(machine.tables, "cpu")
    machine.row(machine.start)
    assert device.refresh() > 0 and device.refresh() == 0
    grammar.compile("regex", "(ab){2,5}", vocab)    # new states, but no row
    assert device.refresh() == 0
    began = time.perf_counter()
    for _ in range(1000):
        device.refresh()
    assert time.perf_counter() - began < 0.05       # of 1 ms


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_there_stays_when_tensors_grow(backend, monkeypatch):
    """Refreshed at every row, from tensors of two entries up."""
    for module in (masks, interpreted):
        monkeypatch.setattr(module, "ROOM", 2)
    machines, draw = random_machines(3, monkeypatch, number=1 if backend == "triton" else 6)
    monkeypatch.setattr(waves, "DENSE", 0)
    where = DEVICE if backend == "triton" else "cpu"
    device, batch, rooms = device_tables(machines[0].tables, backend), [], []
    for machine in machines:
        state = machine.start
        for step in range(6):
            batch.append((machine, state))
            machine.row(state)
            assert device.refresh() > 0 or step or machine is not machines[0]
            rooms.append(len(device._states.data))
            assert not device.has_row(torch.tensor([DEAD], device=where)).any()
            inside = [t for t in np.flatnonzero(reference_mask(machine, state)).tolist() if t not in machine.vocab.end_ids]
            state = machine.step(state, draw.choice(inside)) if inside else machine.start
        check_steps(device, where, draw.sample(batch, min(len(batch), 8)), draw)
    assert len(set(rooms)) > 1
    check_mask(device, where, batch, machines[0].vocab.size, draw)
    anew = device_tables(machines[0].tables, backend)
    for name in ("maps", "vec", "over_token", "over_value", "lines", "shapes", "firsts", "others"):
        one, other = getattr(device, f"_{name}"), getattr(anew, f"_{name}")
        assert one.size == other.size and torch.equal(one.data[: one.size], other.data[: one.size]), name
    room = min(len(device._states.data), len(anew._states.data))
    assert torch.equal(device._states.data[:room], anew._states.data[:room]) and (device._states.data[room:] == -1).all()
    assert (device._classes, device._widest, device._longest) == (anew._classes, anew._widest, anew._longest)


@pytest.mark.parametrize("seed", range(4))
def test_a_refresh_between_any_two_writes_sees_whole_rows(seed, monkeypatch):
    """As if another thread were stopped before and after each thing that it appends."""
    machines, draw = random_machines(seed, monkeypatch)
    tables = machines[0].tables
    device, twin, seen = masks.DeviceTables(tables, "cpu"), masks.DeviceTables(tables, "cpu", "torch"), []

    def look() -> None:
        seen.append(device.refresh())
        twin.refresh()
        batch = [(by_index[index], index) for index in draw.sample(tables.built, min(len(tables.built), 3)) if index in by_index]
        batch += [(None, index) for index in coming if tables.rows[index] is None]
        for one in (device, twin):
            check_steps(one, "cpu", batch, draw)
            check_mask(one, "cpu", batch or [(None, DEAD)], tables.vocab.size, draw)

    def watched(original):
        def call(*args):
            look()
            done = original(*args)
            look()
            return done
        return call

    by_index: dict[int, grammar.Grammar] = {}
    coming: list[int] = []
    states = [(machine, state) for machine in machines for state in reachable(machine, draw, 1, 1)]
    for machine, state in states:
        by_index[state & INDEX] = machine
    monkeypatch.setattr(Pool, "append", watched(Pool.append))
    monkeypatch.setattr(Pool, "append_one", watched(Pool.append_one))
    monkeypatch.setattr(Pool, "append_one", watched(Pool.append_one))
    monkeypatch.setattr(grammar.Tables, "add_map", watched(grammar.Tables.add_map))
    for machine in machines:
        for _ in range(4):
            inside = [t for t in range(tables.vocab.size) if machine.step(machine.start, t) is not None]
            if not inside:
                break
            state = machine.step(machine.start, draw.choice(inside))
            coming.append(state & INDEX)
            machine.row(state)
            by_index[state & INDEX] = machine
    assert 0 in seen and max(seen) > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_row_that_is_built_while_a_refresh_reads_comes_with_the_next(seed, monkeypatch):
    """As if the thread that refreshes were stopped before each thing that it reads."""
    monkeypatch.setattr(masks, "ROOM", 2)
    machines, draw = random_machines(seed, monkeypatch)
    device, twin = (masks.DeviceTables(machines[0].tables, "cpu", backend) for backend in (None, "torch"))
    since, now, built = Pool.since, [machine.start for machine in machines], []

    def interrupted(pool: Pool, start: int) -> np.ndarray:
        which = draw.randrange(len(machines))
        machine, state = machines[which], now[which]
        machine.row(state)
        built.append((machine, state))
        inside = [t for t in range(machine.vocab.size) if machine.step(state, t) is not None]
        now[which] = machine.step(state, draw.choice(inside)) if inside else machine.start
        return since(pool, start)

    machines[0].row(machines[0].start)
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "since", interrupted)
        for _ in range(12):
            for one in (device, twin):
                one.refresh()
                there = one.has_row(torch.tensor([state for _, state in built])).tolist()
                batch = [which for which, here in zip(built, there) if here] or [(None, DEAD)]
                check_steps(one, "cpu", batch[-3:], draw)
                check_mask(one, "cpu", batch[-10:], machines[0].vocab.size, draw)
    for one in (device, twin):
        one.refresh()
        assert one.has_row(torch.tensor([state for _, state in built])).all()
        check_mask(one, "cpu", built, machines[0].vocab.size, draw)


def test_refreshes_while_threads_build_rows(monkeypatch):
    """Without a lock: whatever the device says it has is right at that moment."""
    monkeypatch.setattr(waves, "DENSE", 2)
    draw = random.Random(5)
    vocab = draw_vocab(draw)
    patterns = [*COUNTED, "(a|b)*abb(c{1,3}a){1,9}", "((a|bc){1,4}(b|ca)*c?){1,7}"]
    machines = [grammar.compile("regex", pattern, vocab) for pattern in patterns * 2]
    device, failures, known = masks.DeviceTables(machines[0].tables, "cpu"), [], [[] for _ in machines]

    def build(which: int) -> None:
        try:
            own, machine = random.Random(which), machines[which]
            for _ in range(60):
                state = machine.start
                for _ in range(8):
                    machine.row(state)
                    known[which].append(state)
                    inside = [t for t in own.sample(range(vocab.size), vocab.size) if machine.step(state, t) is not None]
                    if not inside:
                        break
                    state = machine.step(state, inside[0])
        except Exception as error:  # noqa: BLE001 - reported below
            failures.append(error)

    interval, sent = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=build, args=(i,)) for i in range(len(machines))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            sent.append(device.refresh())
            batch = [(machine, states[-1]) for machine, states in zip(machines, known) if states]
            rows = device.has_row(torch.tensor([state for _, state in batch], dtype=torch.int64)).tolist()
            check_steps(device, "cpu", [one for one, there in zip(batch, rows) if there][:2], draw) if any(rows) else None
    finally:
        sys.setswitchinterval(interval)
    for thread in threads:
        thread.join()
    device.refresh()
    assert not failures and sum(bytes_ > 0 for bytes_ in sent) > 1
    batch = [(machine, state) for machine, states in zip(machines, known) for state in states[-5:]]
    check_mask(device, "cpu", batch, vocab.size, draw)
    check_steps(device, "cpu", batch, draw)
