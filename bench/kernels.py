"""What one layer of attention costs on CPU, against F.scaled_dot_product_attention over the same tokens in dense, padded tensors.

    python bench/kernels.py [--threads 1] [--backend cpp,torch] [--march native]

The dense side is the plain batch as a simple engine keeps it: contiguous [B, G, C, D] tensors, ready before the clock starts, one
call. The paged side starts from the slot pool, so it pays its gathers and merges. Ratio > 1: the work list is faster. Also printed:
torch operations a layer (views not counted), and what plan and prepare cost once a step.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nano_sgl import attention, native  # noqa: E402

HEADS, KV_HEADS, DIM = 9, 3, 64  # SmolLM2-135M
VIEWS = {
    "view",
    "transpose",
    "expand",
    "slice",
    "unsqueeze",
    "select",
    "permute",
    "as_strided",
    "unflatten",
    "_unsafe_view",
    "alias",
    "detach",
}


class Count(TorchDispatchMode):
    """Counts the operations that do work (not views)."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def best_us(*calls, seconds: float = 0.5) -> list[float]:
    """Least wall time of each call in microseconds, taken in turn for a while: what is left when nothing else disturbs them."""
    best, until = [float("inf")] * len(calls), time.perf_counter() + seconds
    while time.perf_counter() < until or float("inf") in best:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
    return best


def ready(backend, ctx) -> None:
    """What the torch backend leaves to a step's first layer."""
    if isinstance(ctx, attention.TorchContext):
        backend._calls(ctx, 0)


def case(backend_name: str, name: str, q_lens: list[int], cached: list[int], shared: list[tuple], dtype: torch.dtype, scattered: bool) -> None:
    """Prints one line. Row b extends cached[b] columns by q_lens[b]; slots lie in order, or scattered over the pool."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    bounds = [c + n for c, n in zip(cached, q_lens)]
    rows, widest, tokens = len(q_lens), max(bounds), sum(q_lens)
    slots = np.arange(1, rows * widest + 1)
    table = (rng.permutation(slots) if scattered else slots).reshape(rows, widest).astype(np.int32)
    for first, last, start, end in shared:
        table[first:last, start:end] = table[first, start:end]
    k_cache, v_cache = torch.randn(2, rows * widest + 1, KV_HEADS, DIM).to(dtype)
    q = torch.randn(tokens, HEADS, DIM).to(dtype)
    cols = torch.from_numpy(np.concatenate([np.arange(c, c + n) for c, n in zip(cached, q_lens)]))
    backend = attention.ATTENTION[backend_name](HEADS, KV_HEADS, DIM)
    plan = attention.plan(range(rows), q_lens, bounds, shared, **backend.plan_options)
    plan_us, prepare_us = best_us(
        lambda: attention.plan(range(rows), q_lens, bounds, shared, **backend.plan_options),
        lambda: ready(backend, backend.prepare(plan, torch.from_numpy(table), cols)),
        seconds=0.1,
    )
    ctx = backend.prepare(plan, torch.from_numpy(table), cols)
    ours = backend.run(q, k_cache, v_cache, ctx, DIM**-0.5)
    with Count() as count:
        backend.run(q, k_cache, v_cache, ctx, DIM**-0.5)

    longest = max(q_lens)  # the dense side pads on the left, so that all rows end together
    dense_q = torch.zeros(rows, HEADS, longest, DIM, dtype=dtype)
    k, v = torch.zeros(2, rows, KV_HEADS, widest, DIM, dtype=dtype)
    mask = torch.full((rows, 1, longest, widest), float("-inf"))
    at = 0
    for b, (n, bound) in enumerate(zip(q_lens, bounds)):
        dense_q[b, :, longest - n :] = q[at : at + n].transpose(0, 1)
        k[b, :, widest - bound :] = k_cache[table[b, :bound]].transpose(0, 1)
        v[b, :, widest - bound :] = v_cache[table[b, :bound]].transpose(0, 1)
        mask[b, 0] = torch.where(torch.ones(longest, widest, dtype=torch.bool).tril(widest - longest), 0.0, float("-inf"))
        mask[b, 0, :, : widest - bound] = float("-inf")
        at += n
    mask = None if longest == 1 and min(bounds) == widest else mask.to(dtype)
    causal = longest > 1 and longest == widest and min(bounds) == widest
    mask = None if causal else mask

    def dense():
        return F.scaled_dot_product_attention(dense_q, k, v, mask, is_causal=causal, enable_gqa=True)

    want = torch.cat([dense()[b, :, longest - n :].transpose(0, 1) for b, n in enumerate(q_lens)])
    assert (ours.float() - want.float()).abs().max() < (0.03 if dtype != torch.float32 else 1e-4)
    ours_us, dense_us = best_us(lambda: backend.run(q, k_cache, v_cache, ctx, DIM**-0.5), dense)
    layout, ops = "scattered" if scattered else "in order", len(count.names)
    print(f"{backend_name:5} {name:32} {str(dtype)[6:]:9} {layout:9} {ours_us:8.0f} {dense_us:9.0f} {dense_us / ours_us:6.2f}x {ops:4}", end=" ")
    print(f"{plan_us:8.0f} {prepare_us:8.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", default="cpp,torch")
    parser.add_argument("--march", default="native", help="instruction set that the C++ kernels are compiled for")
    args = parser.parse_args()
    native.use(args.march)
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} thread(s), best of half a second")
    print(f"one layer: {HEADS} heads, {KV_HEADS} kv heads, head dim {DIM}; times in microseconds")
    print(f"{'':5} {'case':32} {'dtype':9} {'slots':9} {'ours':>8} {'dense':>9} {'ratio':>7} {'ops':>4} {'plan':>8} {'prepare':>8}")
    rng = np.random.default_rng(1)
    tails = rng.integers(20, 120, 16)
    cases = [
        ("1 decode, 1000 columns", [1], [1000], []),
        ("16 decode, 1000 shared + tails", [1] * 16, (1000 + tails).tolist(), [(0, 16, 0, 1000)]),
        ("16 decode, private 100-900", [1] * 16, rng.integers(100, 900, 16).tolist(), []),
        ("prefill 512 on 0", [512], [0], []),
        ("prefill 2048 on 0", [2048], [0], []),
        ("prefill 512 on 2048", [512], [2048], []),
        ("15 decode at 300 + prefill 256", [1] * 15 + [256], [300] * 15 + [0], []),
        ("32 prefills of 8..40", rng.integers(8, 40, 32).tolist(), [0] * 32, []),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for scattered in (False, True):
            for this in cases:
                for backend in args.backend.split(","):
                    case(backend, *this, dtype, scattered)


if __name__ == "__main__":
    main()
