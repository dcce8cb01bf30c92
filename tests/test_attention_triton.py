"""The Triton attention kernels, in Triton's interpreter where there is no CUDA device, against the torch backend."""

import itertools
import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_sets import SETS
from ragged import SEEN, attend, ragged, seen_columns, split_everything
from triton_interpreter import DEVICE, FLOATS
from triton_interpreter import attention as interpreted
from triton_interpreter import kernels as interpreted_kernels

from nano_sgl import attention, kernels

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(
    batch, group: int, kv_heads: int, dim: int, dtype: torch.dtype, options: dict | None = None, seed: int = 0, **flags
) -> None:
    """Triton and torch agree on a batch; both may plan it as they like."""
    q, k_cache, v_cache = batch.tensors(group * kv_heads, kv_heads, dim, dtype, seed)
    want = attend(attention, "torch", batch, q, k_cache, v_cache, **flags)
    got = attend(interpreted, "triton", batch, q, k_cache, v_cache, DEVICE, options, **flags)
    assert got.dtype == dtype and got.shape == want.shape
    assert not len(got) or (got.double() - want.double()).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dim", [16, 24, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_every_group_and_head_dim(group, dim):
    rng = np.random.default_rng([group, dim])
    trees = (group + dim // 8) % 2 == 0
    batch = ragged(rng, 3, q_max=24, kv_max=150, page=[1, 16][dim // 8 % 2], trees=trees)
    check(batch, group, 1 if dim > 64 else 2, dim, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("cases", [2, pytest.param(4, marks=pytest.mark.long)])
def test_nested_runs_blocks_splits_and_trees(cases, page, trees, dtype):
    rng = np.random.default_rng([page, trees, dtype.itemsize])
    for case in range(cases):
        group = [3, 1, 4, 7][case]
        batch = ragged(rng, 5, q_max=[20, 8][case % 2], kv_max=140, page=page, trees=trees)
        check(batch, group, 2, 16, dtype, split_everything(group), seed=case)


@pytest.mark.parametrize("dtype", FLOATS)
def test_long_contexts(dtype):
    rng = np.random.default_rng(7)
    batch = ragged(rng, 4, q_max=3, kv_max=700, longest_shared=300)
    check(batch, 3, 1, 64, dtype)
    check(batch, 3, 1, 64, dtype, {**split_everything(3), "min_split": 128})


@pytest.mark.parametrize(
    "flags",
    [dict(window=1), dict(window=5), dict(window=30), dict(window=100), dict(softcap=5.0), dict(sinks=True), dict(window=9, softcap=3.0, sinks=True)],
    ids=str,
)
def test_window_softcap_and_sinks(flags):
    rng = np.random.default_rng(11)
    for options in (None, split_everything(3)):
        given = {**flags, "sinks": torch.randn(6)} if "sinks" in flags else flags
        for trees in (False, True):
            check(ragged(rng, 4, q_max=20, kv_max=90, trees=trees), 3, 2, 32, torch.float32, options, **given)


@pytest.mark.parametrize("window", SEEN)
def test_a_window_is_counted_from_the_position_of_a_node(window):
    for options in (None, dict(min_split=3, programs=99), dict(tiles=(2,))):
        assert seen_columns(interpreted, "triton", window, options, DEVICE) == SEEN[window]


def test_tokens_that_see_nothing_give_zero_and_a_log_sum_exp_of_minus_infinity():
    table = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
    q, caches = torch.randn(3, 2, 16, device=DEVICE), torch.full((2, 9, 1, 16), float("nan"), device=DEVICE)
    backend = interpreted.ATTENTION["triton"](2, 1, 16)
    for options in ({}, dict(min_split=4, programs=9)):  # written directly, and merged from two partials
        plan = interpreted.plan([0, 1], [2, 1], [8, 8], **{**backend.plan_options, **options})
        ctx = backend.prepare(plan, table, torch.tensor([-1, -1, -1], device=DEVICE))
        assert torch.equal(backend.run(q, *caches, ctx, 0.25).cpu(), torch.zeros(3, 2, 16))
        sinks = torch.zeros(2, device=DEVICE)
        assert torch.equal(backend.run(q, *caches, ctx, 0.25, sinks=sinks).cpu(), torch.zeros(3, 2, 16))
    assert plan.partials == 6 and bool((ctx.part_lse == -float("inf")).all())
    ctx = backend.prepare(interpreted.plan([], [], []), table, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert backend.run(q[:0], *caches, ctx, 0.25).shape == (0, 2, 16)


def test_the_item_count_is_read_on_the_device():
    """A launch for more items than there are, as a captured graph makes, runs those there are; few programs take several each."""
    batch = ragged(np.random.default_rng(5), 3, q_max=1, kv_max=40)
    q, k_cache, v_cache = (x.to(DEVICE) for x in batch.tensors(6, 2, 16, torch.float32))
    backend = interpreted.ATTENTION["triton"](6, 2, 16)
    plan = interpreted.plan(batch.rows, batch.q_lens, batch.bounds, batch.shared, **backend.plan_options)
    ctx = backend.prepare(plan, batch.table.to(DEVICE), batch.cols.to(DEVICE))
    want = backend.run(q, k_cache, v_cache, ctx, 0.25)
    backend.processors = 1
    assert torch.equal(backend.run(q, k_cache, v_cache, ctx, 0.25), want)
    backend.processors = 64
    ctx.plan = replace(plan, items=np.full((len(plan.items) + 9, 6), 2**30, np.int32))  # the host's copy: only its length is used
    assert torch.equal(backend.run(q, k_cache, v_cache, ctx, 0.25), want)


@pytest.mark.parametrize("dtype", [torch.float32] + FLOATS[2:])
@pytest.mark.parametrize("dim", [48, 80, 96, *(pytest.param(dim, marks=pytest.mark.long) for dim in (16, 64, 128))])
def test_head_dims_that_are_no_power_of_two(dim, dtype):
    """F055: prefill and decode against plain torch attention."""
    torch.manual_seed(0)
    backend = interpreted.ATTENTION["triton"](9, 3, dim)
    for length in (1, 15, 16, 17, 129, 1000):
        k_cache, v_cache = torch.randn(2, length + 1, 3, dim).to(dtype)
        table = torch.randperm(length, dtype=torch.int32)[None] + 1
        q = torch.randn(length, 9, dim).to(dtype)
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1).float() for x in (q, k_cache[table[0].long()], v_cache[table[0].long()])),
            is_causal=True,
            enable_gqa=True,
        )
        # The whole prefill (in the slow interpreter, of the longest one the last chunk), and the decode of its last token
        for first in {0 if length < 1000 or DEVICE == "cuda" else length - 30, length - 1}:
            plan = interpreted.plan([0], [length - first], [length], **backend.plan_options)
            ctx = backend.prepare(plan, table.to(DEVICE), torch.arange(first, length, device=DEVICE))
            got = backend.run(q[first:].to(DEVICE), k_cache.to(DEVICE), v_cache.to(DEVICE), ctx, dim**-0.5)
            assert (got.cpu().float() - want.transpose(0, 1)[first:]).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("dim", [64, 128])
def test_both_halves_of_a_head_count(dim, half):
    """F057."""
    batch = ragged(np.random.default_rng(0), 3, q_max=10, kv_max=60)
    q, k_cache, v_cache = batch.tensors(6, 2, dim, torch.float16)
    for x in (q, k_cache, v_cache):
        x[..., half * dim // 2 : (half + 1) * dim // 2] = 0
    want = attend(attention, "torch", batch, q, k_cache, v_cache)
    got = attend(interpreted, "triton", batch, q, k_cache, v_cache, DEVICE)
    assert (got.float() - want.float()).abs().max() <= 2e-2 and got.abs().max() > 0.1


def big_pool(slots: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[slots, heads, dim]. On CPU it is address space of which only the touched pages are ever backed by memory."""
    if device == "cuda":
        return torch.empty(slots, heads, dim, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, slots * heads * dim * 2, flags=flags), dtype=dtype).view(slots, heads, dim)


BACKENDS = dict.fromkeys(backend for backend, _ in SETS)  # on this CPU


@pytest.mark.parametrize("name, dtype", [("triton", torch.float16), *itertools.product(BACKENDS, (torch.float16, torch.bfloat16))])
def test_pools_of_more_than_two_to_the_31_elements(name, dtype, api_case):
    """F059: slot index times stride overflows 32 bits. The kernels compute addresses as on a device, in the interpreter too."""
    assert api_case("F059")["snippet"].startswith("Allocate K pool of 2,200,000 slots x 8 heads x 128")
    slots_in_pool, heads, dim = 2_200_000, 8, 128
    assert slots_in_pool * heads * dim > 2**31
    module, kernel_module, device = (interpreted, interpreted_kernels, DEVICE) if name == "triton" else (attention, kernels, "cpu")
    torch.manual_seed(0)
    k_cache, v_cache = (big_pool(slots_in_pool, heads, dim, dtype, device) for _ in range(2))
    slots = slots_in_pool - 1 - torch.randperm(100)
    k, v, q = torch.randn(3, 100, heads, dim).to(dtype)
    kernel_module.store_kv(k.to(device), v.to(device), k_cache, v_cache, slots.to(device), backend=name)
    assert torch.equal(k_cache[slots.to(device)].cpu(), k) and torch.equal(v_cache[slots.to(device)].cpu(), v)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).float() for x in (q, k, v)), is_causal=True
    ).transpose(0, 1)
    backend = module.ATTENTION[name](heads, heads, dim)
    for first in (0, 99):
        plan = module.plan([0], [100 - first], [100], **backend.plan_options)
        ctx = backend.prepare(plan, slots[None].to(torch.int32).to(device), torch.arange(first, 100, device=device))
        got = backend.run(q[first:].to(device), k_cache, v_cache, ctx, dim**-0.5)
        assert (got.cpu().float() - want[first:]).abs().max() < 2e-2
