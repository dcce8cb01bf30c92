"""The parts of bench/gpu.py that are about kernels alone: that they are right, how near to the card's ceilings attention comes, and what forks save.

    checks      every kernel against its twin in float32, on random ragged batches. `shard` i of n does each n-th: in processes side by side, since
                most of the time is Triton's compiler
    ceilings    bytes a second of a large copy, FLOPs a second of a large product: what all else is held against
    attention   decode at contexts of 1k to 32k against the copy, prefill against the product, both beside torch's own attention
    forks       rows that share prefixes, grouped against apart, the ratio predicted first by counting bytes

A time is that of a launch in a CUDA graph of several, so that what the host does between launches is not measured; the best of a few replays. What
is read is larger than the L2 cache, and slots are scattered over the pool at random.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from pathlib import Path

import numpy as np
import roofline
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from ragged import attend, ragged  # noqa: E402

from nano_sgl import attention, grammar, kernels, masks  # noqa: E402
from nano_sgl.vocab import Vocab  # noqa: E402

TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}     # of attention, whose values are of size one


# ---- checks


def checks(device: str, tiny: bool, shard: int = 0, of: int = 1) -> list[dict]:
    """What was found wrong and right: {"name", "error", "most"} each, error above most is wrong. `of` shards together do every check."""
    dtypes = [torch.float32, torch.float16] if tiny else [torch.bfloat16, torch.float16, torch.float32]
    todo = [(_check_attention, *case) for case in _attention_cases(tiny, dtypes)]
    todo += [(_check_elementwise, *case) for case in itertools.product(ELEMENTWISE, dtypes)] + [(_check_masks,)]
    found = []
    for check, *case in todo[shard::of]:
        started = time.perf_counter()
        try:
            found.append(check(device, tiny, *case))
        except Exception as error:  # the others are checked all the same
            found.append(dict(name=f"{check.__name__} {case}: {type(error).__name__}: {str(error)[:300]}", error=math.inf, most=0.0))
        found[-1]["seconds"] = time.perf_counter() - started
    return found


def _attention_cases(tiny: bool, dtypes: list) -> list[tuple]:
    """(head dim, group, dtype, tree, window, softcap and sinks)."""
    if tiny:
        return [(16, 3, dtypes[0], True, 0, False), (24, 1, dtypes[1], False, 7, True)]
    heads = ((128, 4, dtypes[0]), (64, 3, dtypes[0]), (128, 8, dtypes[1]), (80, 1, dtypes[2]))
    cases = [(*one, tree, window, False) for one in heads for tree in (False, True) for window in (0, 33)]
    return cases + [(128, 7, dtypes[0], True, 0, True), (256, 2, dtypes[0], False, 50, True)]


def _check_attention(device: str, tiny: bool, dim: int, group: int, dtype: torch.dtype, tree: bool, window: int, extras: bool) -> dict:
    """Nested prefixes, blocks, splits and merges, tiles of every size."""
    worst, kv_heads = 0.0, 1 if tiny else 2
    for case in range(1 if tiny else 4):
        rng = np.random.default_rng([dim, group, case])
        batch = ragged(rng, 3 if tiny else 10, q_max=10 if tiny else 70, kv_max=50 if tiny else 900, page=[1, 16][case % 2], trees=tree)
        q, k_cache, v_cache = batch.tensors(group * kv_heads, kv_heads, dim, dtype, case)
        flags = dict(window=window) | (dict(softcap=5.0, sinks=torch.randn(group * kv_heads)) if extras else {})
        options = attention.ATTENTION["triton"](group * kv_heads, kv_heads, dim).plan_options
        options = options | (dict(min_split=32, programs=9, item_cost=0, partial_cost=0) if case != 3 else {})
        got = attend(attention, "triton", batch, q, k_cache, v_cache, device, options, **flags)
        want = attend(attention, "torch", batch, q.float(), k_cache.float(), v_cache.float(), device, **flags)
        if len(got):
            worst = max(worst, (got.float() - want).abs().nan_to_num(math.inf).max().item())
    name = f"attention {dim}/{group} {str(dtype)[6:]}{', trees' * tree}{', window' * bool(window)}{', softcap and sinks' * extras}"
    return dict(name=name, error=worst, most=TOLERANCE[dtype])


def _norm(x, backend):
    t, size = x.shape[0], x.shape[-1]
    return kernels.add_rms_norm(x[:, 0].contiguous(), x[:, 1].contiguous(), _ramp(x, size), 1e-5, backend=backend), \
        kernels.rms_norm(x[:, : 3], _ramp(x, 3 * size).view(3, size), 1e-5, backend=backend), t


def _ramp(x, size):
    return torch.linspace(0.5, 1.5, size, device=x.device).to(x.dtype)


def _rope(x, backend):
    table = kernels.rope_gather(torch.linspace(-1, 1, 64 * x.shape[-1], device=x.device).view(64, -1),
                                torch.arange(x.shape[0], device=x.device) % 64, x.dtype)
    return kernels.rope_(x.clone()[:, 1:], table, backend=backend)


def _store(x, backend):
    pool = torch.zeros(2, 4 * len(x), x.shape[1] - 1, x.shape[2], dtype=x.dtype, device=x.device)
    kernels.store_kv(x[:, 1:], x[:, :-1], *pool, torch.arange(len(x), device=x.device) * 3 + 1, backend=backend)
    return pool


def _silu(x, backend):
    return kernels.silu_mul(x.reshape(len(x), -1)[:, : 2 * x.shape[-1]], backend=backend)


def _int8(x, backend):
    width, outputs = x.shape[-1], 50
    weight = kernels.QuantizedWeight(torch.empty(outputs, width, dtype=torch.int8, device=x.device), torch.empty(outputs, device=x.device))
    weight.copy_(torch.linspace(-1, 1, outputs * width, device=x.device).sin().view(outputs, width) / width**0.5)
    return kernels.linear(x[:, 0], weight, _ramp(x, outputs), backend=backend)


ELEMENTWISE = {"rms_norm": _norm, "rope_": _rope, "store_kv": _store, "silu_mul": _silu, "linear int8": _int8}


def _flat(found) -> torch.Tensor:
    return torch.cat([_flat(part) for part in found if not isinstance(part, int)]) if isinstance(found, tuple) else found.float().flatten()


def _check_elementwise(device: str, tiny: bool, name: str, dtype: torch.dtype) -> dict:
    """The kernel on the dtype's numbers against the twin on the same numbers in float32: some roundings apart."""
    error = 0.0
    for tokens, size in ((1, 64), (5, 48)) if tiny else ((1, 128), (17, 80), (300, 4096)):
        x = torch.randn(tokens, 5, size, generator=torch.Generator().manual_seed(tokens)).to(dtype).to(device)
        got, want = _flat(ELEMENTWISE[name](x, "triton")), _flat(ELEMENTWISE[name](x.float(), "torch"))
        error = max(error, ((got - want).abs() / (1 + want.abs())).nan_to_num(math.inf).max().item())
    return dict(name=f"{name} {str(dtype)[6:]}", error=error, most=(64 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps)


def _check_masks(device: str, tiny: bool) -> dict:
    """Masks, steps and trees of states: the same as torch's, bit for bit."""
    vocab = Vocab([bytes([i]) for i in range(256)] + [bytes([97 + i % 26, 97 + i // 26]) for i in range(400)] + [None] * 5, [256])
    patterns = (r"[a-f]{2,9}x?", r'\{"a": -?\d{1,4}\}', r"(ab|cd)*e{3,40}")[: 1 if tiny else 3]
    states = [state for pattern in patterns for state in _walked(grammar.compile("regex", pattern, vocab), 2 if tiny else 6)] + [masks.DEAD]
    ours, twin = (masks.DeviceTables(vocab.shared.tables, device, backend) for backend in ("triton", "torch"))
    states = torch.tensor(states, device=device)
    logits = torch.randn(len(states), vocab.size, device=device)
    found = []
    for tables in (ours, twin):
        masked = logits.clone()
        tables.mask(masked, None, states)
        tokens = torch.arange(len(states), device=device) * 7 % 256
        tree = torch.stack([tokens] * 6, 1) + torch.arange(6, device=device)
        parents = torch.tensor([0, 0, 0, 1, 1, 3], device=device).expand(len(states), -1)
        found.append((masked, tables.advance(states, tokens), tables.walk(states, tree, parents)))
    same = all(torch.equal(a, b) for a, b in zip(*found)) and bool((found[0][0] == -math.inf).any())
    return dict(name="grammar masks", error=0.0 if same else math.inf, most=0.0)


def _walked(machine, steps: int) -> list[int]:
    """States along a text: always the first token that may come."""
    states = [machine.start]
    for _ in range(steps):
        allowed = np.flatnonzero(np.unpackbits(machine.mask(states[-1]).view(np.uint8), bitorder="little"))
        after = next((s for token in allowed.tolist() if (s := machine.step(states[-1], token)) is not None), None)
        if after is None:
            break
        states.append(after)
    return states


# ---- the clock


def seconds(launch, device: str, inner: int = 8, replays: int = 4) -> float:
    """Of one launch: see above."""
    if device == "cpu":
        started = time.perf_counter()
        launch()
        return time.perf_counter() - started
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture wants what it calls to have run before, beside the default stream
        launch()
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            launch()
    graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for before, after in marks:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return min(before.elapsed_time(after) for before, after in marks) / 1e3 / inner


def ceilings(device: str, tiny: bool) -> tuple[float, float]:
    """(bytes a second of a copy, FLOPs a second of a bfloat16 product)."""
    source = torch.ones(2**20 if tiny else 2**31, dtype=torch.uint8, device=device)
    target, size = torch.empty_like(source), 128 if tiny else 8192
    bandwidth = 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    del source, target
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return bandwidth, 2 * size**3 / seconds(lambda: a @ b, device)


# ---- attention


class Layer:
    """A layer's attention over a pool of random KV: Llama-3-8B's heads, or tiny ones."""

    def __init__(self, device: str, tiny: bool, slots: int):
        self.device, self.tiny = device, tiny
        self.shape = roofline.Shape(heads=4, kv_heads=2, dim=16) if tiny else roofline.LLAMA3_8B
        self.dtype = torch.float16 if tiny else torch.bfloat16
        self.backend = attention.ATTENTION["triton"](self.shape.heads, self.shape.kv_heads, self.shape.dim)
        self.pools = torch.empty(2, slots + 1, self.shape.kv_heads, self.shape.dim, dtype=self.dtype, device=device).normal_()
        self.processors = self.backend.processors

    def table(self, rows: int, columns: int, shared=()) -> torch.Tensor:
        """Slots scattered over the pool."""
        table = (torch.randperm(rows * columns, device=self.device) + 1).to(torch.int32).view(rows, columns)
        for first, last, start, end in shared:
            table[first:last, start:end] = table[first, start:end].clone()
        return table

    def launch(self, q_lens, kv_lens, table: torch.Tensor, shared=(), tree: bool = False):
        """(a call of the layer, its work list). tree: each row's tokens are a tree of guesses, a chain with branches."""
        work = attention.plan(range(len(q_lens)), q_lens, kv_lens, shared, **self.backend.plan_options)
        cols = torch.cat([torch.arange(kv - q, kv) for q, kv in zip(q_lens, kv_lens)]).to(self.device)
        flags = ()
        if tree:
            base = torch.cat([torch.full((q,), kv - q) for q, kv in zip(q_lens, kv_lens)])
            path = [1]
            for node in range(1, max(q_lens)):
                path.append(path[(node - 1) // 2 if node % 4 == 0 else node - 1] | 1 << node)
            flags = base.to(self.device), torch.cat([torch.tensor(path[:q]) for q in q_lens]).to(self.device)
        made = torch.Generator(self.device).manual_seed(0)
        q = torch.randn(sum(q_lens), self.shape.heads, self.shape.dim, generator=made, device=self.device).to(self.dtype)
        context = self.backend.prepare(work, table, cols, *flags)
        return lambda: self.backend.run(q, *self.pools, context, self.shape.dim**-0.5), work


def attention_rates(run) -> None:
    """Decode and verify against the copy, prefill against the product."""
    sizes = [(2, 40)] if run.tiny else [(64, 1024), (64, 4096), (1, 32768), (16, 32768), (64, 32768)]
    prompts = [20] if run.tiny else [2048, 8192, 16384]
    layer = Layer(run.device, run.tiny, max([rows * columns for rows, columns in sizes] + prompts))
    for rows, columns in sizes:
        launch, work = layer.launch([1] * rows, [columns] * rows, layer.table(rows, columns))
        took, todo = seconds(launch, run.device), roofline.attend(layer.shape, work) + roofline.merge(layer.shape, work)
        run.row(f"decode attention, {rows} x {columns}", took, todo.bytes / took / run.bandwidth,
                f"{todo.bytes / took / 1e12:.3f} TB/s", 0.85 if columns >= 32768 else None)
    rows, columns, tokens = (2, 20, 5) if run.tiny else (64, 4096, 17)
    launch, work = layer.launch([tokens] * rows, [columns] * rows, layer.table(rows, columns), tree=True)
    took, todo = seconds(launch, run.device), roofline.attend(layer.shape, work, distinct=rows * columns)
    run.row(f"verify attention, {rows} x {tokens} tokens at {columns}", took, todo.seconds(run.bandwidth, run.flops) / took)
    for length in prompts:
        launch, work = layer.launch([length], [length], layer.table(1, length))
        took, todo = seconds(launch, run.device, inner=2), roofline.attend(layer.shape, work, distinct=length)
        run.row(f"prefill attention, {length}", took, todo.flops / took / run.flops, goal=0.6 if length >= 8192 else None)
        q, k, v = (torch.randn(1, layer.shape.heads, length, layer.shape.dim, device=run.device).to(layer.dtype) for _ in range(3))
        peer = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), run.device, inner=2)  # with KV for each query head
        run.row(f"prefill attention, {length}: torch's over dense tensors", peer, todo.flops / peer / run.flops)


def forks(run) -> None:
    """Grouped against apart: bytes counted, ratio predicted, then measured; both give the same."""
    cases = {"nested forks": roofline.forks(4, 192, 4, nested=1)} if run.tiny else roofline.FORKS
    layer = Layer(run.device, run.tiny, max(len(kv) * kv[0] for _, kv, _ in cases.values()))
    for name, (q_lens, kv_lens, shared) in cases.items():
        table = layer.table(len(q_lens), kv_lens[0], shared)
        took, outs, read = [], [], []
        for runs in (shared, ()):
            launch, work = layer.launch(q_lens, kv_lens, table, runs)
            outs.append(launch().float())
            took.append(seconds(launch, run.device))
            read.append((roofline.attend(layer.shape, work) + roofline.merge(layer.shape, work)).bytes)
        error = (outs[0] - outs[1]).abs().max().item()
        if not error < TOLERANCE[layer.dtype]:
            run.wrong(f"{name}: grouped and apart differ by {error:.2g}")
        predicted = read[1] / read[0]
        run.row(f"{name}: apart", took[1], read[1] / took[1] / run.bandwidth)
        run.row(f"{name}: grouped, {predicted:.1f}x fewer bytes, {took[1] / took[0]:.1f}x faster", took[0], read[0] / took[0] / run.bandwidth)
        run.note(name, predicted=predicted, measured=took[1] / took[0], bytes_grouped=read[0], bytes_apart=read[1])
