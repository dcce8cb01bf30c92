"""The attention plan against brute force, and the torch backend against the float64 oracle."""

import functools

import numpy as np
import pytest
import torch
import tiny
from ragged import SEEN, attend, int64, ragged, random_draft, random_tree, seen_columns, shared_len, split_everything, tree_columns

from nano_sgl import attention, model, native
from nano_sgl.memory import KVPool

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# ---- plan ----


def audit(rows, q_lens, bounds, shared, plan) -> None:
    """Every (token, column <= its bound) is in exactly one item, read through a row with the same slot; the merge is right."""
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
    assert plan.tokens == len(member) and all(
        x.dtype == np.int32 for x in (plan.items, plan.segment, plan.seg_first, plan.shifts)
    )


def test_plan_covers_every_column_once():
    rng = np.random.default_rng(0)
    for _ in range(250):
        count = int(rng.integers(1, 9))
        shared = random_tree(rng, count)
        q_lens = [int(rng.integers(0, 4) if rng.random() < 0.5 else rng.integers(0, 40)) for _ in range(count)]
        bounds = [shared_len(shared, b) + n + int(rng.integers(0, 60)) for b, n in enumerate(q_lens)]
        rows = rng.permutation(50)[:count].tolist()
        options = dict(
            group=int(rng.choice([1, 3, 4])),
            tiles=[(16, 64), (1 << 30,), (32,)][rng.integers(3)],
            programs=int(rng.integers(1, 9)),
            min_split=[16, 64, 1 << 30][rng.integers(3)],
            item_cost=[0, 8, 64][rng.integers(3)],
            partial_cost=[0, 2, 8][rng.integers(3)],
        )
        plan = attention.plan(rows, q_lens, bounds, shared, **options)
        audit(rows, q_lens, bounds, shared, plan)
        again = attention.plan(rows, q_lens, bounds, shared, **options)
        assert np.array_equal(plan.items, again.items) and np.array_equal(plan.shifts, again.shifts)


def test_shared_runs_at_every_level_are_read_once():
    shared = [(0, 8, 0, 1000), (0, 4, 1000, 1300), (4, 8, 1000, 1200), (0, 2, 1300, 1500)]
    plan = attention.plan(range(8), [1] * 8, [1600] * 8, shared, item_cost=0, partial_cost=0)
    read = sorted((end - start, q_len) for _, q_len, _, start, end, _ in plan.items.tolist() if q_len > 1)
    assert read == [(200, 2), (200, 4), (300, 4), (1000, 8)]
    assert (
        sum(end - start for _, _, _, start, end, _ in plan.items.tolist()) == 1000 + 300 + 200 + 200 + 2 * 100 + 2 * 300 + 4 * 400
    )


def test_short_shared_runs_are_folded_into_what_lies_below():
    shared = [(0, 8, 0, 10), (0, 4, 10, 500)]  # a chat template's first tokens, then a long document of four rows
    plan = attention.plan(range(8), [1] * 8, [600] * 8, shared, item_cost=64, partial_cost=8)
    runs = sorted((q_start, q_len, start, end) for q_start, q_len, _, start, end, _ in plan.items.tolist())
    assert runs == [
        (0, 1, 500, 600),
        (0, 4, 0, 500),
        *((b, 1, 500, 600) for b in (1, 2, 3)),
        *((b, 1, 0, 600) for b in (4, 5, 6, 7)),
    ]


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


# ---- the CPU backends ----


@functools.cache
def oracle_cases(dtype, trees, page) -> list:
    """Random batches, and what the oracle says of them: made once for all kernel sets."""
    rng, cases = np.random.default_rng([page, trees, dtype.itemsize]), []
    for case in range(8):
        batch = ragged(
            rng,
            int(rng.integers(1, 9)),
            q_max=[40, 200][case % 5 == 4],
            kv_max=int(rng.choice([1, 60, 200])),
            page=page,
            trees=trees,
        )
        group = int(rng.choice([1, 3, 4, 7, 8]))
        tensors = batch.tensors(2 * group, 2, int(rng.choice([16, 24, 40, 80])), dtype, seed=case)
        flags = dict(window=int(rng.choice([0, 0, 1, 7, 30, 100])), softcap=float(rng.choice([0, 0, 5])))
        flags["sinks"] = torch.randn(2 * group) if rng.random() < 0.3 else None
        scale = tensors[0].shape[2] ** -0.5
        want = attention.attention_reference(*tensors, batch.table, batch.token_rows, batch.cols, scale, batch.base, batch.bits, **flags)
        cases.append((batch, group, tensors, flags, want))
    return cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_a_backend_equals_the_oracle(kernel_set, dtype, trees, page):
    for batch, group, tensors, flags, want in oracle_cases(dtype, trees, page):
        for options in (None, split_everything(group)):
            got = attend(attention, kernel_set, batch, *tensors, options=options, **flags)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype])


def test_a_long_prefill_is_a_full_and_a_causal_part_and_builds_no_big_mask():
    rng = np.random.default_rng(0)
    batch = ragged(rng, 1, kv_max=0)
    batch.q_lens, batch.bounds = [300], [750]
    batch.cols = torch.arange(430, 730)
    batch.table, batch.num_slots = torch.randperm(800, dtype=torch.int32)[None].repeat(4, 1) + 1, 801
    q, k_cache, v_cache = batch.tensors(6, 2, 16, torch.float32)
    backend = attention.ATTENTION["torch"](6, 2, 16)
    ctx = backend.prepare(attention.plan(batch.rows, batch.q_lens, batch.bounds), batch.table, batch.cols)
    got = backend.run(q, k_cache, v_cache, ctx, 0.25)
    assert sorted((call.m, call.causal) for call in ctx.calls[0]) == [(300, False), (300, True)]
    assert all(call.mask is None or call.mask.numel() < 1000 for call in ctx.calls[0])
    want = attention.attention_reference(q, k_cache, v_cache, batch.table, batch.token_rows, batch.cols, 0.25)
    assert (got.double() - want).abs().max() < 1e-5


def test_a_run_that_one_row_computes_while_others_read_it(kernel_set):
    """The leader's chunk is the followers' prefix in the same step: its own tokens see it causally, theirs wholly."""
    for leader, follower in ((200, 3), (40, 1), (500, 30)):
        q_lens = [leader, follower, follower]
        table = torch.zeros(3, leader + 40, dtype=torch.int32)
        table[:, :leader] = torch.arange(1, leader + 1)
        for b in (1, 2):
            table[b, leader : leader + 40] = torch.arange(40) + leader + 1 + 40 * b
        cols = torch.cat((torch.arange(leader), torch.arange(leader - 5, leader - 5 + follower).repeat(2)))
        shared = [(0, 3, 0, leader - 5)]
        bounds = [leader, leader - 5 + follower, leader - 5 + follower]
        plan = attention.plan([0, 1, 2], q_lens, bounds, shared, item_cost=0, partial_cost=0)
        torch.manual_seed(0)
        q, (k_cache, v_cache) = torch.randn(sum(q_lens), 6, 16), torch.randn(2, leader + 161, 2, 16)
        backend = attention.ATTENTION[kernel_set](6, 2, 16)
        got = backend.run(q, k_cache, v_cache, backend.prepare(plan, table, cols), 0.25)
        want = attention.attention_reference(q, k_cache, v_cache, table, np.repeat([0, 1, 2], q_lens), cols, 0.25)
        assert (got.double() - want).abs().max() < 1e-5


def test_sixteen_rows_that_share_a_prefix_gather_it_once():
    rows, prefix = 16, 1000
    table = torch.zeros(rows, prefix + 64, dtype=torch.int32)
    table[:, :prefix] = torch.randperm(prefix, dtype=torch.int32) + 1
    table[:, prefix:] = torch.randperm(rows * 64, dtype=torch.int32).view(rows, 64) + prefix + 1
    tails = torch.arange(20, 52, 2)
    backend = attention.ATTENTION["torch"](9, 3, 64)
    plan = attention.plan(range(rows), [1] * rows, (prefix + tails).tolist(), [(0, rows, 0, prefix)], **backend.plan_options)
    ctx = backend.prepare(plan, table, prefix + tails - 1)
    q, (k_cache, v_cache) = torch.randn(rows, 9, 64), torch.randn(2, prefix + rows * 64 + 1, 3, 64)
    got = backend.run(q, k_cache, v_cache, ctx, 0.125)
    gathered = sum(call.slots.numel() for call in ctx.calls[0])
    assert gathered < prefix + 16 + rows * 64 and len(ctx.calls[0]) == 2
    want = attention.attention_reference(q, k_cache, v_cache, table, np.arange(rows), prefix + tails - 1, 0.125)
    assert (got.double() - want).abs().max() < 1e-5


def test_tokens_that_see_nothing_give_zero_and_no_nan(kernel_set):
    table = torch.zeros(2, 8, dtype=torch.int32)
    q, caches = torch.randn(3, 2, 16), torch.full((2, 9, 1, 16), float("nan"))
    backend = attention.ATTENTION[kernel_set](2, 1, 16)
    ctx = backend.prepare(attention.plan([0, 1], [2, 1], [8, 8]), table, torch.tensor([-1, -1, -1]))
    assert torch.equal(backend.run(q, *caches, ctx, 0.25), torch.zeros(3, 2, 16))
    ctx = backend.prepare(attention.plan([], [], []), table, torch.zeros(0, dtype=torch.int64))
    assert backend.run(q[:0], *caches, ctx, 0.25).shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 16, 34, 48, 64, 80, 96, 104, 128, 192, 256])
def test_head_dims_that_are_no_power_of_two(kernel_set, dim, dtype, api_case):
    """F055, the CPU backends; the Triton backend: test_attention_triton."""
    assert "80, 96, 192 fail to compile or read past the row" in api_case("F055")["fault"]
    torch.manual_seed(0)
    for length in (1, 15, 16, 17, 129, 1000):
        k_cache, v_cache = torch.randn(2, length + 1, 3, dim).to(dtype)
        q = torch.randn(length, 9, dim).to(dtype)
        table = torch.randperm(length, dtype=torch.int32)[None] + 1
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1).float() for x in (q, k_cache[table[0].long()], v_cache[table[0].long()])),
            is_causal=True,
            enable_gqa=True,
        )
        backend = attention.ATTENTION[kernel_set](9, 3, dim)
        for first in (0, length - 1):  # prefill of all, decode of the last
            plan = attention.plan([0], [length - first], [length])
            got = backend.run(q[first:], k_cache, v_cache, backend.prepare(plan, table, torch.arange(first, length)), dim**-0.5)
            assert (got.float() - want.transpose(0, 1)[first:]).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("dim", [64, 128])
def test_both_halves_of_a_head_count(kernel_set, dim, half, api_case):
    """F057."""
    assert api_case("F057")["snippet"].startswith("q,k,v zero in the first half")
    torch.manual_seed(0)
    batch = ragged(np.random.default_rng(0), 4)
    q, k_cache, v_cache = batch.tensors(6, 2, dim, torch.bfloat16)
    for x in (q, k_cache, v_cache):
        x[..., half * dim // 2 : (half + 1) * dim // 2] = 0
    want = attention.attention_reference(q, k_cache, v_cache, batch.table, batch.token_rows, batch.cols, dim**-0.5)
    got = attend(attention, kernel_set, batch, q, k_cache, v_cache)
    assert (got.double() - want).abs().max() <= 2e-2 and got.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_that_share_one_tensor(kernel_set, dtype):
    """A slot's keys and values side by side, as elsewhere: slots are then not contiguous in either cache."""
    batch = ragged(np.random.default_rng(1), 5)
    q, k_cache, v_cache = batch.tensors(6, 2, 40, dtype)
    both = torch.stack((k_cache, v_cache), 1)
    want = attend(attention, kernel_set, batch, q, k_cache, v_cache)
    assert torch.equal(attend(attention, kernel_set, batch, q, both[:, 0], both[:, 1]), want)


def test_a_row_computes_the_same_alone_and_in_company(kernel_set):
    rng = np.random.default_rng(3)
    batch = ragged(rng, 6)
    q, k_cache, v_cache = batch.tensors(6, 2, 32, torch.float32)
    together = attend(attention, kernel_set, batch, q, k_cache, v_cache)
    first = np.concatenate(([0], np.cumsum(batch.q_lens)))
    backend = attention.ATTENTION[kernel_set](6, 2, 32)
    for b in range(6):
        part = slice(first[b], first[b + 1])
        ctx = backend.prepare(
            attention.plan([batch.rows[b]], [batch.q_lens[b]], [batch.bounds[b]]), batch.table, batch.cols[part]
        )
        torch.testing.assert_close(backend.run(q[part], k_cache, v_cache, ctx, 32**-0.5), together[part], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_make_no_difference(kernel_set, dtype):
    batch = ragged(np.random.default_rng(5), 8, kv_max=600)
    q, k_cache, v_cache = batch.tensors(9, 3, 64, dtype)
    alone = attend(attention, kernel_set, batch, q, k_cache, v_cache)
    torch.set_num_threads(2)
    try:
        many = attend(attention, kernel_set, batch, q, k_cache, v_cache)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(many, alone, rtol=0, atol=TOLERANCE[dtype])


def test_a_token_that_is_not_a_number_spoils_no_other_row(kernel_set):
    """Row 0's own keys and values are NaN; row 1 shares a prefix with it, and must not notice."""
    table = torch.zeros(2, 80, dtype=torch.int32)
    table[:, :40] = torch.arange(1, 41)
    table[0, 40:], table[1, 40:] = torch.arange(41, 81), torch.arange(81, 121)
    torch.manual_seed(0)
    q, caches = torch.randn(2, 6, 32), torch.randn(2, 121, 2, 32)
    caches[:, 41:81] = float("nan")
    backend = attention.ATTENTION[kernel_set](6, 2, 32)
    plan = attention.plan([0, 1], [1, 1], [70, 70], [(0, 2, 0, 40)], item_cost=0, partial_cost=0)
    got = backend.run(q, *caches, backend.prepare(plan, table, torch.tensor([69, 69])), 0.2)
    assert got[0].isnan().all()
    want = attention.attention_reference(q[1:], *caches, table, [1], torch.tensor([69]), 0.2)
    torch.testing.assert_close(got[1:].double(), want, rtol=0, atol=1e-5)


# ---- draft trees ----


@pytest.mark.parametrize("window", SEEN)
def test_a_window_is_counted_from_the_position_of_a_node(kernel_set, window):
    for options in (None, dict(min_split=3, programs=99), dict(tiles=(2,))):
        assert seen_columns(attention, kernel_set, window, options) == SEEN[window]


class Verifier:
    """A model and four rows of KV: steps that extend rows by a piece of text, or by a draft tree."""

    def __init__(self, net: model.Model, backend: str):
        c = net.config
        self.net, self.kv = net, KVPool(4 * 400, 1, c.num_layers, c.num_kv_heads, c.head_dim, net.dtype, "cpu")
        self.table = torch.randperm(4 * 400, dtype=torch.int32).view(4, 400) + 1
        self.backend = attention.ATTENTION[backend](c.num_heads, c.num_kv_heads, c.head_dim)

    @torch.no_grad()
    def step(self, *pieces: tuple[int, int, list[int], list[int] | None], slack: int = 0) -> list[torch.Tensor]:
        """pieces: (row, its length, ids, ancestor bits or None for text). Returns the logits of each; bounds are too large by `slack`."""
        rows, lengths, ids, bits = zip(*pieces)
        q_lens = [len(new) for new in ids]
        cols = torch.tensor([length + at for length, n, tree in zip(lengths, q_lens, bits) for at in (tree_columns(tree) if tree else range(n))])
        positions = torch.tensor([length + at for length, n, tree in zip(lengths, q_lens, bits)
                                  for at in ([word.bit_count() - 1 for word in tree] if tree else range(n))])
        base = torch.tensor([attention.NO_TREE if tree is None else length for length, tree in zip(lengths, bits)])
        plan = attention.plan(rows, q_lens, [length + n + slack for length, n in zip(lengths, q_lens)],
                              **self.backend.plan_options | {"min_split": 64, "programs": 99})
        trees = base.repeat_interleave(torch.tensor(q_lens)), torch.from_numpy(int64(sum((t or [0] * n for t, n in zip(bits, q_lens)), [])))
        context = self.backend.prepare(plan, self.table, cols, *trees if any(bits) else ())
        padding = [tree is not None and tree_columns(tree)[at] != at for n, tree in zip(q_lens, bits) for at in range(n)]
        slots = self.table[np.repeat(rows, q_lens), cols].long().masked_fill(torch.tensor(padding), 0)
        hidden = self.net.forward(model.ForwardBatch(torch.tensor(sum(ids, [])), positions, slots, (self.backend, context)), self.kv)
        return self.net.logits(hidden).split(q_lens)


@pytest.mark.parametrize("window", [0, 90, 33, 5, 1])
def test_a_model_verifies_a_tree_as_it_would_run_each_branch(kernel_set, window, tmp_path, monkeypatch):
    """Trees beside a decode and a prompt, in one call for all layers and in several; then on from the end of a branch."""
    net = model.load(tiny.checkpoint(tmp_path, "mistral", sliding_window=window or None), progress=False)
    rng, texts, new = np.random.default_rng(window), [tiny.ids(n, n) for n in (150, 40, 70, 6)], [tiny.ids(n, n + 1) for n in (64, 20, 1, 15)]
    trees = [random_draft(rng, 64), None, None, random_draft(rng, 15)]
    for calls in (native.ANY, 0) if kernel_set == "cpp" else (0,):
        monkeypatch.setattr(native, "few", lambda *args: calls)
        batch, alone = Verifier(net, kernel_set), Verifier(net, kernel_set)
        batch.step(*((row, 0, text, None) for row, text in enumerate(texts)))
        batch.kv.k[0][0] = batch.kv.v[0][0] = 1e4  # slot 0 holds anything
        batch.table[:, 220:] = 0
        got = batch.step(*zip(range(4), map(len, texts), new, trees), slack=130)
        for row, tree in enumerate(trees):
            for node in [n for n, column in enumerate(tree_columns(tree)) if n == column] if tree else [len(new[row]) - 1]:
                path = [n for n in range(node + 1) if tree is None or tree[node] >> n & 1]
                want, = alone.step((0, 0, texts[row] + [new[row][n] for n in path], None))
                torch.testing.assert_close(got[row][path], want[-len(path):], rtol=0, atol=5e-5)
        first, end = len(texts[0]), len(texts[0]) + len(path := [n for n in range(64) if trees[0][30] >> n & 1])
        batch.table[0, first:end] = batch.table[0, first:][path].clone()
        want, = alone.step((0, 0, texts[0] + [new[0][n] for n in path] + [7, 8], None))
        torch.testing.assert_close(batch.step((0, end, [7, 8], None))[0], want[-2:], rtol=0, atol=5e-5)


# ---- the seam ----


def test_another_backend_takes_a_few_lines():
    @attention.register_attention("mean")
    class MeanAttention:
        """Attends to all columns alike."""

        def __init__(self, heads, kv_heads, head_dim):
            self.group, self.plan_options = heads // kv_heads, {}

        def prepare(self, plan, table, cols, base=None, bits=None):
            return [table[row, : int(col) + 1].long() for (_, _, row, *_), col in zip(plan.items.tolist(), cols)]

        def run(self, q, k_cache, v_cache, ctx, scale, window=0, softcap=0.0, sinks=None):
            return torch.stack([v_cache[slots].mean(0) for slots in ctx]).repeat_interleave(self.group, 1)

    try:
        backend = attention.ATTENTION["mean"](4, 2, 8)
        plan = attention.plan([0], [1], [3], **backend.plan_options)
        v_cache = torch.randn(5, 2, 8)
        out = backend.run(
            torch.zeros(1, 4, 8), None, v_cache, backend.prepare(plan, torch.tensor([[4, 2, 1, 0]]), torch.tensor([2])), 1.0
        )
        assert torch.allclose(out[0, 2], v_cache[[4, 2, 1], 1].mean(0))
    finally:
        del attention.ATTENTION["mean"]


def test_the_triton_backend_is_refused_without_triton(monkeypatch):
    monkeypatch.setattr(attention, "triton", None)
    with pytest.raises(ImportError, match="triton is not installed"):
        attention.ATTENTION["triton"](3, 1, 16)
