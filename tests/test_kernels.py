"""The elementwise kernels against transformers' formulas, their Triton form against the torch twin, and the plan against brute force."""

import math

import numpy as np
import pytest
import torch
from triton_interpreter import DEVICE
from triton_interpreter import kernels as interpreted

from nano_sgl import attention, kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to two roundings of the dtype (the interpreter truncates when it stores bfloat16)."""
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got.cpu().double(), want.cpu().double(), rtol=3 * torch.finfo(want.dtype).eps, atol=3 * torch.finfo(want.dtype).eps)


def hf_rms_norm(x, weight, eps):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def hf_rope(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_that_of_transformers(dtype):
    torch.manual_seed(0)
    for tokens, size in ((1, 576), (16, 576), (3, 100), (0, 64)):
        x, weight = torch.randn(tokens, size).to(dtype), torch.randn(size).to(dtype)
        got = kernels.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(got, hf_rms_norm(x, weight, 1e-5), rtol=torch.finfo(dtype).eps, atol=0)
        close(interpreted.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, backend="triton"), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norms_of_a_strided_view_with_a_weight_row_per_head(dtype):
    torch.manual_seed(0)
    qkv, weight = torch.randn(5, 9, 40).to(dtype), torch.randn(6, 40).to(dtype)
    view = qkv[:, 1:7]
    got = kernels.rms_norm(view, weight, 1e-6)
    close(got, torch.stack([hf_rms_norm(view[:, h], weight[h], 1e-6) for h in range(6)], 1))
    close(interpreted.rms_norm(view.to(DEVICE), weight.to(DEVICE), 1e-6, backend="triton"), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(7, 96).to(dtype), torch.randn(7, 96).to(dtype), torch.randn(96).to(dtype)
    kept = x.clone(), residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, hf_rms_norm(x + residual, weight, 1e-5))
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    for got, want in zip(interpreted.add_rms_norm(x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-5, backend="triton"), (normed, total)):
        close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, rotary", [(16, 16), (64, 64), (80, 32), (24, 8)])
def test_rope_on_a_strided_view_and_a_part_of_the_head(dtype, dim, rotary):
    torch.manual_seed(0)
    qkv = torch.randn(6, 7, dim).to(dtype)
    angle = torch.outer(torch.arange(50.0), 10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2)))
    table = torch.cat((angle.cos(), angle.sin()), -1)
    positions = torch.tensor([0, 3, 4, 49, 3, 17])
    cs = kernels.rope_gather(table, positions, dtype)
    want = qkv.clone()
    cos, sin = (torch.cat((x, x), -1).to(dtype)[:, None] for x in (angle[positions].cos(), angle[positions].sin()))
    want[:, :5, :rotary] = hf_rope(qkv[:, :5, :rotary], cos, sin)  # two heads stay: they are the values of a fused projection
    twin, triton = qkv.clone(), qkv.clone().to(DEVICE)
    kernels.rope_(twin[:, :5], cs)
    interpreted.rope_(triton[:, :5], cs.to(DEVICE), backend="triton")
    for got in (twin, triton):
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=0, atol=12 * torch.finfo(dtype).eps)
        assert torch.equal(got[:, 5:].cpu(), qkv[:, 5:]) and torch.equal(got[..., rotary:].cpu(), qkv[..., rotary:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_writes_its_slots_and_no_others(dtype):
    torch.manual_seed(0)
    qkv = torch.randn(5, 9, 24).to(dtype)
    slots = torch.tensor([29, 3, 7, 1, 12])
    for module, device, backend in ((kernels, "cpu", None), (interpreted, DEVICE, "triton")):
        caches = torch.randn(2, 30, 3, 24, device=device).to(dtype)
        want = caches.clone()
        for i in range(5):
            want[0, slots[i]], want[1, slots[i]] = qkv[i, 3:6].to(device), qkv[i, 6:9].to(device)
        on = qkv.to(device)
        module.store_kv(on[:, 3:6], on[:, 6:9], caches[0], caches[1], slots.to(device), backend=backend)
        assert torch.equal(caches, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype):
    torch.manual_seed(0)
    for tokens, size in ((4, 30), (1, 1536), (0, 8)):
        gate_up = torch.randn(tokens, 2 * size).to(dtype)
        kept = gate_up.clone()
        got = kernels.silu_mul(gate_up)
        close(got, torch.nn.functional.silu(gate_up[:, :size]) * gate_up[:, size:])
        assert torch.equal(gate_up, kept)
        close(interpreted.silu_mul(gate_up.to(DEVICE), backend="triton"), got)


# ---- plan ------------------------------------------------------------------------------------------------------------------------


def random_tree(rng: np.random.Generator, rows: int) -> list[tuple[int, int, int, int]]:
    """Shared runs of a random prefix tree over `rows` batch rows: nested at any level, some nodes in chains with the same rows."""
    runs = []

    def grow(first: int, last: int, at: int) -> None:
        if last - first < 2 or rng.random() < 0.2:
            return
        length = int(rng.integers(0, 40))
        cut = length // 2 if rng.random() < 0.3 else 0
        runs.extend((first, last, at + start, at + end) for start, end in ((0, cut), (cut, length)) if start < end)
        middle = sorted({first, last, *rng.integers(first, last + 1, 2).tolist()})
        for a, b in zip(middle, middle[1:]):
            if (a, b) != (first, last):
                grow(a, b, at + length)

    grow(0, rows, 0)
    return runs


def audit(rows, q_lens, bounds, shared, plan) -> None:
    """Every (token, column <= its bound) is in exactly one item, read through a row that holds the same slot; the merge index is right."""
    first = np.concatenate(([0], np.cumsum(q_lens)))
    member = np.repeat(np.arange(len(rows)), q_lens)
    batch_row = {row: b for b, row in enumerate(rows)}

    def slot(b: int, column: int):
        return next(((f, column) for f, last, start, end in shared if f <= b < last and start <= column < end), (b, column))

    seen = [set() for _ in member]
    partials = [[] for _ in member]
    for q_start, q_len, row, start, end, out in plan.items.tolist():
        assert 0 < q_len <= plan.block_q and start < end
        for t in range(q_start, q_start + q_len):
            assert not seen[t] & set(range(start, end)), "a column is covered twice"
            seen[t] |= set(range(start, end))
            assert all(slot(batch_row[row], c) == slot(member[t], c) for c in {start, (start + end) // 2, end - 1})
            partials[t].append(out if out < 0 else out + t - q_start)
    used = []
    for t, b in enumerate(member):
        col = bounds[b] - q_lens[b] + t - first[b]  # the largest that this token's own column can be
        assert set(range(col + 1)) <= seen[t]
        segment = plan.segment[t]
        merged = [t + int(s) for s in plan.shifts[plan.seg_first[segment] : plan.seg_first[segment + 1]]]
        assert partials[t] == [-1] and not merged or sorted(merged) == sorted(partials[t])
        used += merged
    assert sorted(used) == list(range(plan.partials))
    assert plan.tokens == len(member) and all(x.dtype == np.int32 for x in (plan.items, plan.segment, plan.seg_first, plan.shifts))


def test_plan_covers_every_column_once():
    rng = np.random.default_rng(0)
    for _ in range(250):
        count = int(rng.integers(1, 9))
        shared = random_tree(rng, count)
        q_lens = [int(rng.integers(0, 4) if rng.random() < 0.5 else rng.integers(0, 40)) for _ in range(count)]
        prefix = [max((end for f, last, _, end in shared if f <= b < last), default=0) for b in range(count)]
        bounds = [p + n + int(rng.integers(0, 60)) for p, n in zip(prefix, q_lens)]
        rows = rng.permutation(50)[:count].tolist()
        options = dict(group=int(rng.choice([1, 3, 4])), tiles=[(16, 64), (1 << 30,), (32,)][rng.integers(3)], programs=int(rng.integers(1, 9)),
                       min_split=[16, 64, 1 << 30][rng.integers(3)], item_cost=[0, 8, 64][rng.integers(3)], partial_cost=[0, 2, 8][rng.integers(3)])
        plan = attention.plan(rows, q_lens, bounds, shared, **options)
        audit(rows, q_lens, bounds, shared, plan)
        again = attention.plan(rows, q_lens, bounds, shared, **options)
        assert np.array_equal(plan.items, again.items) and np.array_equal(plan.shifts, again.shifts)


def test_shared_runs_at_every_level_are_read_once():
    shared = [(0, 8, 0, 1000), (0, 4, 1000, 1300), (4, 8, 1000, 1200), (0, 2, 1300, 1500)]
    plan = attention.plan(range(8), [1] * 8, [1600] * 8, shared, item_cost=0, partial_cost=0)
    read = sorted((end - start, q_len) for _, q_len, _, start, end, _ in plan.items.tolist() if q_len > 1)
    assert read == [(200, 2), (200, 4), (300, 4), (1000, 8)]
    assert sum(end - start for _, _, _, start, end, _ in plan.items.tolist()) == 1000 + 300 + 200 + 200 + 2 * 100 + 2 * 300 + 4 * 400


def test_short_shared_runs_are_folded_into_what_lies_below():
    shared = [(0, 8, 0, 10), (0, 4, 10, 500)]  # a chat template's first tokens, then a long document of four rows
    plan = attention.plan(range(8), [1] * 8, [600] * 8, shared, item_cost=64, partial_cost=8)
    runs = sorted((q_start, q_len, start, end) for q_start, q_len, _, start, end, _ in plan.items.tolist())
    assert runs == [(0, 1, 500, 600), (0, 4, 0, 500), *((b, 1, 500, 600) for b in (1, 2, 3)), *((b, 1, 0, 600) for b in (4, 5, 6, 7))]


def test_a_chain_of_nodes_is_one_item():
    plan = attention.plan([0, 1], [1, 1], [2000, 2000], [(0, 2, 0, 700), (0, 2, 700, 900), (0, 2, 900, 1500)])
    assert [(q_len, start, end) for _, q_len, _, start, end, _ in plan.items.tolist() if q_len == 2] == [(2, 0, 1500)]


def test_long_runs_are_split_until_the_programs_are_busy():
    alone = attention.plan([0], [1], [8192], programs=8, min_split=256)
    assert len(alone.items) == 8 and alone.partials == 8
    many = attention.plan(range(64), [1] * 64, [8192] * 64, programs=8, min_split=256)
    assert len(many.items) == 64 and many.partials == 0
    assert len(attention.plan([0], [1], [300], programs=64, min_split=256).items) == 2


def test_query_blocks_of_a_prefill_end_at_their_diagonal():
    plan = attention.plan([0], [100], [130], group=3, tiles=(16, 64))
    assert sorted(plan.items[:, [0, 1, 4]].tolist()) == [[0, 21, 51], [21, 21, 72], [42, 21, 93], [63, 21, 114], [84, 16, 130]]


def test_rows_without_tokens_and_an_empty_batch():
    assert len(attention.plan([], [], []).items) == 0
    plan = attention.plan([4, 5, 6], [0, 2, 0], [40, 50, 0], [(0, 3, 0, 40)], item_cost=0, partial_cost=0)
    audit([4, 5, 6], [0, 2, 0], [40, 50, 0], [(0, 3, 0, 40)], plan)


def test_a_bound_below_the_rows_own_tokens_is_refused():
    with pytest.raises(ValueError, match="batch row 1: kv bound 2 is below its 3 new tokens"):
        attention.plan([0, 1], [1, 3], [5, 2])


def test_the_triton_backend_is_refused_without_triton(monkeypatch):
    monkeypatch.setattr(kernels, "triton", None)
    monkeypatch.setattr(attention, "triton", None)
    with pytest.raises(ImportError, match="triton is not installed"):
        kernels.silu_mul(torch.zeros(1, 4), backend="triton")
    with pytest.raises(ImportError, match="triton is not installed"):
        attention.ATTENTION["triton"](3, 1, 16)
    assert math.isfinite(kernels.silu_mul(torch.ones(1, 4)).sum())
