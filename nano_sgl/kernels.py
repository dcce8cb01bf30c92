"""Kernels: attention as a work list, and the few elementwise operations around it.

Every batch is a ragged extend: row b appends q_lens[b] tokens to a request whose earlier KV lies in the pool. Prefill chunk, decode, tree
verification and the common prefix of forty forks then differ only in a list of items, each "these query tokens attend to that run of columns":

    columns   0          40        60       64      tokens (rows in depth-first tree order)
    row 0     |---- A ----|-- B --|- tail -|         0            items:  A    tokens 0-2   columns  0-40   read once for three rows
    row 1     |---- A ----|-- B --|-- tail --|       1                    B    tokens 0-1   columns 40-60   read once for two
    row 2     |---- A ----|--- tail ---|             2                    tail token 0, tail token 1, tail token 2

Names: a *column* is a position of a request's KV, a *slot* is where the pool keeps it (table[row, column]); *cols[t]* is token t's own column;
a *partial* is (output, log-sum-exp) of one token over one item. A token that one item covers is written directly; the others are merged:
softmax over a union of columns = the parts weighted by exp(lse). Splitting a long run over many programs (split-K), cascades over shared
prefixes and query blocks are therefore one thing, decided by `plan` on the host out of plain integers.

Invariant: every (token, column) with column <= cols[t] is in exactly one item. Mask rule, for all cases: token t sees column c iff c <= cols[t] and,
from column base[t] on (a draft-tree row), bit c - base[t] of bits[t] is set (its ancestors and itself); a window w adds c > cols[t] - w. Items carry
upper bounds only: the device clips them by cols, so lengths that the host does not know yet never reach the list.

Cost: a column is read once per item and kv head (all query heads of the group share the tile); a partial costs one round trip of H x D floats, so
short runs are not shared but folded into what lies below them. It stops holding where rows of one step do not lie in tree order (nothing is shared
then) and for draft trees of more than 64 nodes.

Each kernel exists twice: in Triton (CUDA, ROCm), and as a torch twin that is the oracle and the CPU path. `backend="triton"` or "torch" forces one.
After: Milakov and Gimelshein 2018 (online softmax), Dao 2022 (FlashAttention; split-K: Flash-Decoding 2023), Zheng et al. 2023 (SGLang),
Juravsky et al. 2024 (Hydragen) and Ye et al. 2024 (FlashInfer) for merging shared prefixes, Miao et al. 2023 (SpecInfer) for tree masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows, a bare CPU machine: the torch twins carry everything
    triton = None

ATTENTION: dict[str, type] = {}
NO_TREE = 2**31 - 1  # base of an ordinary token beside tree tokens: no column reaches it, so its bits are never looked at
LOG2E = math.log2(math.e)
NOTHING = -1e30  # log-sum-exp of no column at all, in the torch backend: finite, so that two of them still merge to 0 instead of NaN


def register_attention(name: str):
    """Class decorator: makes a backend selectable as ATTENTION[name]. What it must offer: see TorchAttention."""

    def put(cls: type) -> type:
        ATTENTION[name] = cls
        return cls

    return put


def _use_triton(x: torch.Tensor, backend: str | None) -> bool:
    if backend is None:
        return triton is not None and x.is_cuda
    if backend == "triton" and triton is None:
        raise ImportError("backend='triton' was asked for, but the package triton is not installed")
    return backend == "triton"


# ---- elementwise: torch twins, and the launch of their Triton form ---------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, backend: str | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32, rounded to x's dtype before the weight as transformers does.

    x [T, E] or [T, N, E], rows may be strided; weight [E], or [N, E]: one row a head, so that query and key norms are one call. Returns x's shape.
    """
    if _use_triton(x, backend):
        return _launch_rms_norm(x, None, weight, eps)[0]
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                 backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x [T, E] and its norm: returns (normed, new residual); mutates nothing."""
    if _use_triton(x, backend):
        return _launch_rms_norm(x, residual, weight, eps)
    residual = residual + x
    return rms_norm(residual, weight, eps, backend), residual


def rope_gather(cos_sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The step's rows of a rotary table, gathered once for all layers.

    cos_sin [Cmax, R] fp32: cosines of the R/2 frequencies, then their sines. positions [T] int64. Returns [2, T, 1, R] dtype: (cos, cos) and
    (-sin, sin), the two factors of x * cos + rotate_half(x) * sin, in the model's dtype as transformers has them.
    """
    cos, sin = cos_sin[positions].chunk(2, -1)  # [T, R/2] fp32
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(dtype).unsqueeze(2)


def rope_(x: torch.Tensor, cs: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """Rotates the first R entries of every head of x [T, N, D] in place (half-rotation, as Llama), cs = rope_gather(...) [2, T, 1, R].

    Query and key heads rotate alike, so pass both as one view of the fused projection: x may be strided. Returns x.
    """
    if _use_triton(x, backend):
        return _launch_rope(x, cs)
    half = x[..., : cs.shape[-1]]
    turned = half.roll(cs.shape[-1] // 2, -1)  # before the product below overwrites it
    half.mul_(cs[0]).addcmul_(turned, cs[1])
    return x


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
             backend: str | None = None) -> None:
    """Writes k, v [T, G, D] (strided views allowed) to rows `slots` [T] int64 of the caches [S, G, D], which it mutates."""
    if _use_triton(k, backend):
        return _launch_store_kv(k, v, k_cache, v_cache, slots)
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def silu_mul(gate_up: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """[T, 2I] -> silu(first half) * second half, [T, I]."""
    if _use_triton(gate_up, backend):
        return _launch_silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


# ---- the attention plan: host integers in, host integers out ---------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The work list of one step and how its partials are merged. All arrays int32."""

    items: np.ndarray  # [N, 6]: q_start, q_len, row, kv_start, kv_end, out_start (first partial row; -1: written directly)
    segment: np.ndarray  # [T]: the merge segment of each token; a segment is a token range that the same items cover
    seg_first: np.ndarray  # [segments + 1]: where a segment's shifts begin; an empty range: nothing to merge
    shifts: np.ndarray  # token t has a partial in row t + shift, for every shift of its segment
    partials: int  # P, rows of the partial buffers
    tokens: int  # T
    block_q: int  # the largest q_len of an item is at most this


def _pieces(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts every length into pieces of at most `size`: (which length, offset in it, length of the piece), in order."""
    count = -(-lengths // size)
    if (count == 1).all():  # most often nothing is cut
        return np.arange(len(lengths)), np.zeros_like(lengths), lengths
    which = np.arange(len(lengths)).repeat(count)
    offset = (np.arange(len(which)) - (count.cumsum() - count).repeat(count)) * size
    return which, offset, np.minimum(size, lengths[which] - offset)


def _first(lengths: np.ndarray) -> np.ndarray:
    """Where each of the ranges of these lengths begins, and where the last one ends."""
    first = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=first[1:])
    return first


def plan(rows, q_lens, kv_bounds, shared=(), *, group: int = 1, tiles: tuple[int, ...] = (1 << 30,), programs: int = 1,
         min_split: int = 1 << 30, item_cost: int = 64, partial_cost: int = 8) -> Plan:
    """Makes the work list of a step. Pure and deterministic; numpy and ints only.

    rows [B]: table rows in depth-first tree order; q_lens [B]: new tokens of each (0 is legal); kv_bounds [B] >= q_lens: exclusive upper bounds of
    their columns, new tokens included. shared: (first, last, start, end): batch rows first..last-1 hold columns [start, end) in the same slots,
    nested by tree level; one row's runs are disjoint. group: query heads per kv head. tiles: rows (tokens x group) of a query tile, ascending: the
    smallest that holds the longest query range is taken, and longer ranges are cut. Runs are cut at max(min_split, all columns / programs).
    item_cost and partial_cost: what one more item, one more partial cost, in columns read. Raises ValueError on a bound that is too small.
    """
    rows, q_lens, kv_bounds = (np.asarray(a, np.int64) for a in (rows, q_lens, kv_bounds))
    if (kv_bounds < q_lens).any():
        bad = int(np.argmax(kv_bounds < q_lens))
        raise ValueError(f"batch row {bad}: kv bound {kv_bounds[bad]} is below its {q_lens[bad]} new tokens, whose columns it must include")
    q_first = _first(q_lens)
    runs = _worth_sharing(shared, q_first.tolist(), -(-q_lens // max(tiles[-1] // group, 1)), tiles[-1] // group, item_cost, partial_cost)
    runs = np.asarray(runs, np.int64).reshape(-1, 4)
    owner, start, end = _private(runs, q_lens, kv_bounds)

    # One list of (first token, tokens, table row, columns, slack): slack = how much less than kv_end the first token's successors leave it
    run_len = q_first[runs[:, 1]] - q_first[runs[:, 0]]
    q_start = np.concatenate((q_first[runs[:, 0]], q_first[owner]))
    q_len = np.concatenate((run_len, q_lens[owner]))
    row = np.concatenate((rows[runs[:, 0]], rows[owner]))
    start, end = np.concatenate((runs[:, 2], start)), np.concatenate((runs[:, 3], end))
    bound = np.concatenate((np.full(len(runs), np.iinfo(np.int32).max), kv_bounds[owner]))
    longest = max(int(q_len.max(initial=1)) * group, 1)
    block_q = max(next((tile for tile in tiles if tile >= longest), tiles[-1]) // group, 1)

    which, offset, length = _pieces(q_len, block_q)
    q_start, row, start = q_start[which] + offset, row[which], start[which]
    # The last token of a block sees no column of the row's later tokens
    end = np.minimum(end[which], bound[which] - (q_len[which] - offset - length))
    columns = np.maximum(end - start, 0)
    split = max(min_split, -(-int(columns.sum()) // programs))
    which, offset, columns = _pieces(columns, split)
    order = (-columns).argsort(kind="stable")  # longest first: the last programs to finish are short ones
    which, offset, columns = which[order], offset[order], columns[order]
    kv_start = start[which] + offset
    items = np.empty((len(which), 6), np.int64)
    for i, values in enumerate((q_start[which], length[which], row[which], kv_start, kv_start + columns)):
        items[:, i] = values
    return _merge_index(items, q_first, block_q)


def _worth_sharing(shared, q_first: list[int], blocks: np.ndarray, block_q: int, item_cost: int, partial_cost: int) -> list:
    """The shared runs that save more columns than they cost, each lengthened by the runs above it that do not: [first, last, start, end]."""
    runs = []
    for first, last, start, end in sorted(shared, key=lambda run: (run[0], -run[1], run[2])):  # ancestors before descendants
        if runs and runs[-1][:2] == [first, last] and runs[-1][3] == start:
            runs[-1][3] = end  # a chain of nodes with the same rows is one run
        elif start < end and q_first[first] < q_first[last]:
            runs.append([first, last, start, end])
    reads = [0] + np.cumsum(blocks).tolist()  # reads of a column if every row's query blocks read it on their own: a prefix sum
    done, kept = [], []  # done: (first, last, start, reads of a column just above this run, kept runs that begin at `start`)
    for run in reversed(runs):
        first, last, start, end = run
        tokens = q_first[last] - q_first[first]
        below, heads = reads[last] - reads[first], []
        while done and done[-1][0] >= first and done[-1][1] <= last:
            child_first, child_last, child_start, child_reads, child_heads = done.pop()
            if child_start == end:
                below += child_reads - (reads[child_last] - reads[child_first])
                heads += child_heads
        together = -(-tokens // block_q)
        if (below - together) * (end - start) > item_cost + partial_cost * tokens:
            kept.append(run)
            below, heads = together, [run]
        else:
            for head in heads:
                head[2] = start
        done.append((first, last, start, below, heads))
    return kept


def _private(runs: np.ndarray, q_lens: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What no kept run covers of each row's columns [0, bound): (batch row, start, end) of every gap, rows without tokens left out."""
    if not len(runs):
        owner = (q_lens > 0).nonzero()[0]
        return owner, np.zeros_like(owner), bounds[owner]
    which, offset, _ = _pieces(runs[:, 1] - runs[:, 0], 1)  # one entry per run and member; one more per row stands at its bound
    owner = np.concatenate((runs[which, 0] + offset, np.arange(len(bounds))))
    start = np.concatenate((runs[which, 2], bounds))
    end = np.concatenate((runs[which, 3], bounds))
    order = np.lexsort((start, owner))
    owner, start, end = owner[order], start[order], end[order]
    before = np.zeros_like(end)
    before[1:] = end[:-1] * (owner[1:] == owner[:-1])
    gap = (start > before) & (q_lens[owner] > 0)
    return owner[gap], before[gap], start[gap]


def _merge_index(items: np.ndarray, q_first: np.ndarray, block_q: int) -> Plan:
    """Gives items with merged tokens their partial rows, and every token segment the list of its partials."""
    tokens, q_start, q_len = int(q_first[-1]), items[:, 0], items[:, 1]
    q_end = q_start + q_len
    is_edge = np.zeros(tokens + 1, bool)
    is_edge[q_first] = is_edge[q_start] = is_edge[q_end] = True
    edges = is_edge.nonzero()[0]  # token ranges between two edges are covered alike
    nth = is_edge.cumsum() - 1
    lo, hi = nth[q_start], nth[q_end]
    which, offset, _ = _pieces(hi - lo, 1)  # one entry per item and segment
    segment = lo[which] + offset
    cover = np.bincount(segment, minlength=len(edges) - 1)
    several = _first(cover > 1)
    merged = several[hi] > several[lo]
    rows = _first(q_len * merged)
    items[:, 5] = np.where(merged, rows[:-1], -1)
    keep = merged[which]
    which, segment = which[keep], segment[keep]
    order = segment.argsort(kind="stable")
    shifts = (items[:, 5] - q_start)[which[order]]
    seg_first = _first(np.bincount(segment, minlength=len(edges) - 1))
    items, per_token, seg_first, shifts = (x.astype(np.int32) for x in (items, nth[:tokens], seg_first, shifts))
    return Plan(items, per_token, seg_first, shifts, int(rows[-1]), tokens, block_q)


# ---- attention: the oracle -------------------------------------------------------------------------------------------------------


def attention_reference(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, token_rows: torch.Tensor,
                        cols: torch.Tensor, scale: float, base: torch.Tensor | None = None, bits: torch.Tensor | None = None,
                        window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention token by token through dense masks, in float64 and without any plan: slow and plain, to test the rest against.

    As a backend's run, but with token_rows [T]: the table row of each token. Returns [T, H, D] float64; a token that sees nothing gives 0.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    for t in range(q.shape[0]):
        seen = [c for c in range(int(cols[t]) + 1)
                if (bits is None or c < base[t] or int(bits[t]) >> int(c - base[t]) & 1) and (not window or c > cols[t] - window)]
        if not seen:
            continue
        slots = table[token_rows[t], seen].long()
        k = k_cache[slots].double().repeat_interleave(group, 1)  # [seen, H, D]
        v = v_cache[slots].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,chd->hc", q[t].double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:  # a sink is one more score per head, with no value
            scores = torch.cat((scores, sinks.double()[:, None]), 1)
        out[t] = torch.einsum("hc,chd->hd", scores.softmax(-1)[:, : len(seen)], v)
    return out


# ---- attention: the torch backend ------------------------------------------------------------------------------------------------

SHORT = 64  # query ranges up to this many tokens are batched with others, longer ones are a call of their own
CALL_COST = 256  # what one more call costs, in columns read: a batch is closed when its padding has wasted that much
FULL, MASKED, CAUSAL = 0, 1, 2


@dataclass
class _Call:
    """One dense attention call: n entries of m query tokens over C columns each."""

    n: int
    m: int
    tokens: slice | torch.Tensor  # [n * m] the query tokens; padding repeats a real one
    real: torch.Tensor | None  # which of them are real, where some are not
    out: slice | torch.Tensor  # the real ones
    slots: slice | torch.Tensor  # [n * C] int64; padding repeats a slot of the same run, so that no stray NaN is ever read
    mask: torch.Tensor | None  # [n, 1, m or m * group, C] fp32, added to the scores
    blind: torch.Tensor | None  # [real tokens, 1] bool: those that see no column here
    causal: bool = False
    fresh: bool = True  # nothing was written to these tokens before: copy instead of merging


@dataclass
class TorchContext:
    """What TorchAttention.prepare leaves for the layers of one step."""

    plan: Plan
    table: np.ndarray
    cols: np.ndarray
    base: np.ndarray | None
    bits: np.ndarray | None
    device: torch.device
    calls: dict[int, list[_Call]] = field(default_factory=dict)  # by window


@register_attention("torch")
class TorchAttention:
    """The CPU path: items of like shape are padded into few calls of torch's flash attention, whose parts are merged by log-sum-exp.

    A backend is made once per model, from its head counts, and has: plan_options, keywords for `plan`; prepare(), once a step; run(), once a layer.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int):
        self.heads, self.kv_heads, self.group, self.head_dim = heads, kv_heads, heads // kv_heads, head_dim
        self.plan_options = dict(item_cost=2 * CALL_COST)

    def prepare(self, plan: Plan, table: torch.Tensor, cols: torch.Tensor, base: torch.Tensor | None = None,
                bits: torch.Tensor | None = None) -> TorchContext:
        """plan: of this step; table [R, C] int32; cols [T], each token's own column; for draft trees base [T] and bits [T] int64, see the essay.

        Reads the tensors' values, so it must run in stream order: on CPU, when the worker gets to it.
        """
        base, bits = (None if x is None else x.cpu().numpy() for x in (base, bits))
        return TorchContext(plan, table.cpu().numpy(), cols.cpu().numpy(), base, bits, table.device)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: TorchContext, scale: float, window: int = 0,
            softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of one layer. q [T, H, D] (strided view allowed), caches [S, G, D], sinks [H] -> [T, H, D]. Mutates nothing."""
        if window not in ctx.calls:
            ctx.calls[window] = self._calls(ctx, window)
        calls = ctx.calls[window]
        out = lse = None
        for call in calls:
            part, part_lse = self._attend(call, q, k_cache, v_cache, scale, softcap)  # [real tokens, H, D], [.., H] fp32
            if out is None and isinstance(call.out, slice) and part.shape[0] == q.shape[0]:
                out, lse = part, part_lse
                continue
            if out is None:
                out = q.new_zeros(q.shape)
                lse = torch.full(q.shape[:2], NOTHING, device=q.device)
            if call.fresh:
                out[call.out], lse[call.out] = part, part_lse
            else:
                _merge_into(out, lse, call.out, part, part_lse)
        if out is None:
            return q.new_zeros(q.shape)
        if sinks is not None:
            out = out * torch.sigmoid(lse - sinks.float()).unsqueeze(-1).to(out.dtype)
        return out

    def _attend(self, call: _Call, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, softcap: float):
        n, m, group = call.n, call.m, self.group
        _, heads, dim = q.shape
        q = q[call.tokens]  # [n * m, H, D]
        if isinstance(call.slots, slice):
            k, v = k_cache[call.slots], v_cache[call.slots]
        else:
            k, v = k_cache.index_select(0, call.slots), v_cache.index_select(0, call.slots)
        k, v = (x.view(n, -1, self.kv_heads, dim).transpose(1, 2) for x in (k, v))  # [n, G, C, D]
        if m > SHORT:
            q = q.view(n, m, heads, dim).transpose(1, 2)  # [n, H, m, D]
        elif m == 1:
            q = q.view(n, self.kv_heads, group, dim)  # a kv head's query heads stand where query tokens would: it is read once for all
        else:
            q = q.view(n, m, self.kv_heads, group, dim).transpose(1, 2).reshape(n, self.kv_heads, m * group, dim)
        mask = call.mask if call.mask is None else call.mask.expand(-1, -1, q.shape[2], -1)
        out, lse = dense_attention(q, k, v, mask, call.causal, scale, softcap)
        if m > SHORT:
            out, lse = out.transpose(1, 2).reshape(n * m, heads, dim), lse.transpose(1, 2).reshape(n * m, heads)
        elif m == 1:
            out, lse = out.reshape(n, heads, dim), lse.reshape(n, heads)
        else:
            out = out.unflatten(2, (m, group)).transpose(1, 2).reshape(n * m, heads, dim)
            lse = lse.unflatten(2, (m, group)).transpose(1, 2).reshape(n * m, heads)
        if call.real is not None:
            out, lse = out.index_select(0, call.real), lse.index_select(0, call.real)
        if call.blind is not None:
            lse = lse.masked_fill(call.blind, NOTHING)
        return out, lse

    def _calls(self, ctx: TorchContext, window: int) -> list[_Call]:
        """Sorts the step's items into dense calls; once a step and window."""
        works = []  # (q_start, q_len, row, kv_start, kv_end, kind)
        items = ctx.plan.items
        single = items[items[:, 1] == 1]
        if len(single):  # one token: its columns are clipped to what it sees, and only a tree still needs a mask
            cols = ctx.cols[single[:, 0]]
            start, end = single[:, 3], np.minimum(single[:, 4], cols + 1)
            if window:
                start = np.maximum(start, cols - window + 1)
            kind = np.zeros_like(start) if ctx.base is None else np.where(end > ctx.base[single[:, 0]], MASKED, FULL)
            works += [w for w in zip(*(x.tolist() for x in (single[:, 0], single[:, 1], single[:, 2], start, end, kind))) if w[3] < w[4]]
        for q_start, q_len, row, start, end, _ in items[items[:, 1] > 1].tolist():
            works += _clip(ctx, window, q_start, q_len, row, start, end)
        calls = [self._call(ctx, window, [work]) for work in works if work[5] == CAUSAL or work[1] > SHORT]
        for batch in _batches([work for work in works if work[5] != CAUSAL and work[1] <= SHORT]):
            calls.append(self._call(ctx, window, batch))
        calls.sort(key=lambda call: -call.n * call.m)
        written = np.zeros(ctx.plan.tokens, bool)
        for call in calls:
            where = call.out if isinstance(call.out, slice) else call.out.numpy()
            call.fresh = not written[where].any()
            written[where] = True
        return calls

    def _call(self, ctx: TorchContext, window: int, works: list) -> _Call:
        works.sort()  # in token order: most often the batch is then a plain slice of the queries
        q_start, q_len, row, start, end, kind = np.asarray(works).T
        n, m, width = len(works), int(q_len.max()), int((end - start).max())
        tokens = q_start[:, None] + np.minimum(np.arange(m), q_len[:, None] - 1)  # [n, m]
        real = np.arange(m) < q_len[:, None]
        columns = start[:, None] + np.minimum(np.arange(width), (end - start)[:, None] - 1)  # [n, C]
        slots = ctx.table[row[:, None], columns]
        mask = blind = None
        if (kind == MASKED).any() or (end - start < width).any():
            seen = _visible(ctx, window, tokens, columns) & (np.arange(width) < (end - start)[:, None])[:, None]  # [n, m, C]
            if not seen.all():
                mask = torch.where(torch.from_numpy(seen), 0.0, -math.inf)[:, None].to(ctx.device)
                if 1 < m <= SHORT:
                    mask = mask.repeat_interleave(self.group, 2)  # rows of the folded query: token-major, head-minor
                sees = seen.any(-1)[real]
                blind = None if sees.all() else torch.from_numpy(~sees)[:, None].to(ctx.device)
        return _Call(n, m, _index(tokens.ravel(), ctx.device), None if real.all() else torch.from_numpy(real.ravel().nonzero()[0]).to(ctx.device),
                     _index(tokens[real], ctx.device), _index(slots.ravel(), ctx.device), mask, blind, bool(kind[0] == CAUSAL))


def _batches(works: list) -> list[list]:
    """Groups works of like shape whose padding costs less than the calls it saves; no token twice in a batch, for its parts must be merged."""
    works.sort(key=lambda work: work[1])  # private tails before shared runs, so that the tails of all rows meet in one layer
    seen: dict[int, int] = {}
    layered = []
    for work in works:
        tokens = range(work[0], work[0] + work[1])
        layer = max(seen.get(t, 0) for t in tokens)
        seen.update(dict.fromkeys(tokens, layer + 1))
        layered.append((layer, -work[1], work[3] - work[4], work))
    batches, last, waste, widest = [], None, 0, 0
    for layer, _, _, work in sorted(layered):
        size = (work[4] - work[3]) * (8 + work[1])  # a column costs its gather, and a little for every query token
        waste += widest - size
        if layer != last or waste > 9 * CALL_COST or (len(batches[-1]) + 1) * widest > 1 << 20:
            batches.append([])
            last, waste, widest = layer, 0, size
        batches[-1].append(work)
    return batches


def _index(values: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """A slice where the values are consecutive (a view instead of a gather), else an index tensor."""
    first = int(values[0])
    if int(values[-1]) - first == len(values) - 1 and (np.diff(values) == 1).all():
        return slice(first, first + len(values))
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _visible(ctx: TorchContext, window: int, tokens: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The mask rule: tokens [n, m], columns [n, C] -> [n, m, C] bool."""
    cols, columns = ctx.cols[tokens][..., None], columns[:, None]
    seen = columns <= cols
    if ctx.bits is not None:
        node = columns - ctx.base[tokens][..., None]
        seen &= (node < 0) | (ctx.bits[tokens][..., None] >> np.clip(node, 0, 63) & 1).astype(bool)
    if window:
        seen &= columns > cols - window
    return seen


def _clip(ctx: TorchContext, window: int, q_start: int, q_len: int, row: int, start: int, end: int) -> list:
    """Cuts an item of several tokens into works whose columns are all seen (FULL), a diagonal block (CAUSAL), or small enough to mask."""
    cols = ctx.cols[q_start : q_start + q_len]
    low, high = int(cols.min()), int(cols.max())
    end = min(end, high + 1)
    start = max(start, low - window + 1) if window else start
    if start >= end:
        return []
    base = NO_TREE if ctx.base is None else int(ctx.base[q_start : q_start + q_len].min())
    plain = end <= base and (not window or start > high - window)  # neither a tree nor a window cuts into these columns
    if plain and end <= low + 1:
        return [(q_start, q_len, row, start, end, FULL)]
    if q_len <= SHORT:
        return [(q_start, q_len, row, start, end, MASKED)]
    if plain and start <= low and end == high + 1 and (np.diff(cols) == 1).all():
        works = [(q_start, q_len, row, low, end, CAUSAL)]
        return works + [(q_start, q_len, row, start, low, FULL)] if start < low else works
    # A shared run that some row computes in this very step, a window, a tree: halve until it is one of the cases above
    half = q_len // 2
    edge = np.flatnonzero(np.diff((cols >= end - 1).astype(np.int8))) + 1
    half = int(edge[0]) if len(edge) else half
    return _clip(ctx, window, q_start, half, row, start, end) + _clip(ctx, window, q_start + half, q_len - half, row, start, end)


def _merge_into(out: torch.Tensor, lse: torch.Tensor, where: slice | torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges a partial result into tokens `where` of out [T, H, D] and lse [T, H], which it mutates."""
    old, old_lse = out[where], lse[where]
    weight = torch.sigmoid(part_lse - old_lse).unsqueeze(-1).to(out.dtype)  # exp(part) / (exp(old) + exp(part))
    out[where] = torch.lerp(old, part, weight)
    lse[where] = torch.logaddexp(old_lse, part_lse)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float,
                    softcap: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention with its log-sum-exp: q [n, h, m, D], k, v [n, G, C, D], mask [n, 1, m, C] additive -> ([n, h, m, D], [n, h, m] fp32).

    C must not be 0. causal is for C == m. A query that sees nothing gives 0, and a log-sum-exp that means nothing.
    """
    if q.device.type == "cpu" and not softcap and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        scores += torch.full(scores.shape[-2:], -math.inf, device=q.device).triu(1)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    lse = torch.where(lse == -math.inf, 0.0, lse)
    return (torch.exp(scores - lse.unsqueeze(-1)) @ v).to(q.dtype), lse


# ---- Triton ----------------------------------------------------------------------------------------------------------------------
# Offsets into the pool are products with a slot: they are made in 64 bits, for pools of more than 2^31 elements.

if triton is not None:
    jit, _cdiv, _pow2 = triton.jit, triton.cdiv, triton.next_power_of_2
    # Decorated here once more, so that Triton's interpreter switch counts as it stands when this module is imported, not when Triton was
    _max, _min, _sum = jit(tl.max.fn), jit(tl.min.fn), jit(tl.sum.fn)
else:
    def jit(kernel):
        return kernel


@jit
def _rms_norm_kernel(x, residual, weight, out, new_residual, eps, size, heads, x_stride, x_head_stride, weight_stride,
                     ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row (token, head) of x; out and new_residual are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    i = tl.arange(0, BLOCK)
    inside = i < size
    dtype = x.dtype.element_ty
    value = tl.load(x + row // heads * x_stride + head * x_head_stride + i, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * size + i, inside, 0.0).to(tl.float32)
        value = value.to(dtype)
        tl.store(new_residual + row * size + i, value, inside)
        value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(_sum(value * value, 0) / size + eps)
    w = tl.load(weight + head * weight_stride + i, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + i, (value * scale).to(dtype).to(tl.float32) * w, inside)


@jit
def _rope_kernel(x, cs, tokens, heads, x_stride, x_head_stride, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):
    """One program per token: all heads, both halves of the rotated part."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_R)[None]
    row = cs + token * 2 * HALF + i
    cos = tl.load(row, i < HALF, 0.0).to(tl.float32)
    sin = tl.load(row + (tokens * 2 + 1) * HALF, i < HALF, 0.0).to(tl.float32)  # the second factor's second half: + sin
    for start in range(0, heads, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H)[:, None]
        inside = (head < heads) & (i < HALF)
        at = x + token * x_stride + head * x_head_stride + i
        low, high = tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + HALF, inside, 0.0).to(tl.float32)
        tl.store(at, low * cos - high * sin, inside)
        tl.store(at + HALF, high * cos + low * sin, inside)


@jit
def _store_kv_kernel(k, v, k_cache, v_cache, slots, size, dim, k_stride, k_head_stride, v_stride, v_head_stride, cache_stride,
                     BLOCK: tl.constexpr):
    """One program per token; cache rows are contiguous."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        head, d = i // dim, i % dim
        tl.store(k_cache + slot * cache_stride + i, tl.load(k + token * k_stride + head * k_head_stride + d, i < size), i < size)
        tl.store(v_cache + slot * cache_stride + i, tl.load(v + token * v_stride + head * v_head_stride + d, i < size), i < size)


@jit
def _silu_mul_kernel(gate_up, out, size, gate_stride, BLOCK: tl.constexpr):
    """One program per token and block of columns."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + token * gate_stride + i, i < size, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_stride + size + i, i < size, 0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + token * size + i, silu * up, i < size)


@jit
def _attend_columns(acc, best, total, q, cols, base, bits, k_cache, v_cache, table_row, cache_stride, lo, hi, scale, softcap,
                    WINDOW: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, HEAD_DIM: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Online softmax of a query tile over columns lo..hi-1, continuing (acc, best, total); scores are in powers of two."""
    d = tl.arange(0, BLOCK_D)
    for start in range(lo, hi, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        inside = column < hi
        slot = tl.load(table_row + column, inside, 0).to(tl.int64)
        k = tl.load(k_cache + slot[None, :] * cache_stride + d[:, None], inside[None, :] & (d < HEAD_DIM)[:, None], 0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N] fp32
        if SOFTCAP:  # tanh through exp2; scale has log2(e) in it, so has softcap
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634) / softcap)))
        if MASK:
            seen = inside[None, :] & (column[None, :] <= cols[:, None])
            if TREE:
                node = column[None, :] - base[:, None]
                bit = bits[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64) & 1
                seen = seen & ((node < 0) | (bit != 0))
            if WINDOW > 0:
                seen = seen & (column[None, :] > cols[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, _max(scores, 1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen nothing yet: -inf - -inf would be NaN
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        v = tl.load(v_cache + slot[:, None] * cache_stride + d[None, :], inside[:, None] & (d < HEAD_DIM)[None, :], 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + _sum(p, 1)
        best = new_best
    return acc, best, total


@jit
def _attend_kernel(q, k_cache, v_cache, table, cols, base, bits, sinks, items, item_count, out, part, part_lse, scale, softcap,
                   q_stride, q_head_stride, cache_stride, cache_head_stride, table_stride, kv_heads,
                   GROUP: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
                   HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Every program takes work units (item, kv head) in turn until the list, whose length only the device knows, is done.

    A tile's row m is query token q_start + m // GROUP, head kv_head * GROUP + m % GROUP: GROUP need not be a power of two.
    """
    d = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    heads = kv_heads * GROUP
    for unit in range(tl.program_id(0), tl.load(item_count) * kv_heads, tl.num_programs(0)):
        item = items + unit // kv_heads * 6
        kv_head = (unit % kv_heads).to(tl.int64)
        q_start, q_len, out_start = tl.load(item), tl.load(item + 1), tl.load(item + 5)
        real = m < q_len * GROUP
        token = (q_start + m // GROUP).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        q_mask = real[:, None] & (d < HEAD_DIM)[None, :]
        tile = tl.load(q + token[:, None] * q_stride + head[:, None] * q_head_stride + d[None, :], q_mask, 0.0)
        col = tl.load(cols + token, real, -1)
        low = tl.load(cols + token, real, 2147483647)
        lo = tl.load(item + 3)
        hi = tl.minimum(tl.load(item + 4), _max(col, 0) + 1)  # what the host knew only as a bound
        clear = tl.minimum(hi, _min(low, 0) + 1)  # columns below are seen by the whole tile
        tree_base, tree_bits = col, token  # not looked at
        if TREE:
            tree_base, tree_bits = tl.load(base + token, real, 2147483647), tl.load(bits + token, real, 0)
            clear = tl.minimum(clear, _min(tree_base, 0))
        if WINDOW > 0:
            lo = tl.maximum(lo, _min(low, 0) - WINDOW + 1)
            clear = lo
        clear = lo + tl.maximum(clear - lo, 0) // BLOCK_N * BLOCK_N
        table_row = table + tl.load(item + 2).to(tl.int64) * table_stride
        acc = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
        best, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.full((BLOCK_M,), 0.0, tl.float32)
        k_head, v_head = k_cache + kv_head * cache_head_stride, v_cache + kv_head * cache_head_stride
        acc, best, total = _attend_columns(acc, best, total, tile, col, tree_base, tree_bits, k_head, v_head, table_row, cache_stride, lo, clear,
                                           scale, softcap, WINDOW, TREE, SOFTCAP, False, HEAD_DIM, BLOCK_N, BLOCK_D)
        acc, best, total = _attend_columns(acc, best, total, tile, col, tree_base, tree_bits, k_head, v_head, table_row, cache_stride, clear, hi,
                                           scale, softcap, WINDOW, TREE, SOFTCAP, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        if SINKS:
            if out_start < 0:
                sink = tl.load(sinks + head, real, 0.0).to(tl.float32) * 1.4426950408889634
                total += tl.exp2(sink - tl.where(best == float("-inf"), sink, best))
        total = tl.where(total == 0.0, 1.0, total)  # nothing seen: 0 / 1, and a log-sum-exp of -inf
        acc = acc / total[:, None]
        if out_start < 0:
            tl.store(out + (token * heads + head)[:, None] * HEAD_DIM + d[None, :], acc, q_mask)
        else:
            to = (out_start + m // GROUP).to(tl.int64) * heads + head
            tl.store(part + to[:, None] * HEAD_DIM + d[None, :], acc, q_mask)
            tl.store(part_lse + to, best + tl.log2(total), real)


@jit
def _merge_kernel(part, part_lse, segment, seg_first, shifts, sinks, out, heads, head_dim, SINKS: tl.constexpr, BLOCK_H: tl.constexpr,
                  BLOCK_D: tl.constexpr):
    """One program per token and few heads: the partials of its segment, weighted by 2^lse. Tokens that were written directly have none."""
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    real = head < heads
    inside = real[:, None] & (d < head_dim)[None, :]
    seg = tl.load(segment + token)
    first, last = tl.load(seg_first + seg), tl.load(seg_first + seg + 1)
    if first < last:
        acc = tl.full((BLOCK_H, BLOCK_D), 0.0, tl.float32)
        best, total = tl.full((BLOCK_H,), float("-inf"), tl.float32), tl.full((BLOCK_H,), 0.0, tl.float32)
        for i in range(first, last):
            row = (token + tl.load(shifts + i)).to(tl.int64) * heads + head
            lse = tl.load(part_lse + row, real, float("-inf"))
            new_best = tl.maximum(best, lse)
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
            shrink, weight = tl.exp2(best - safe), tl.exp2(lse - safe)
            acc = acc * shrink[:, None] + weight[:, None] * tl.load(part + row[:, None] * head_dim + d[None, :], inside, 0.0)
            total = total * shrink + weight
            best = new_best
        if SINKS:
            sink = tl.load(sinks + head, real, 0.0).to(tl.float32) * 1.4426950408889634
            total += tl.exp2(sink - tl.where(best == float("-inf"), sink, best))
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + (token.to(tl.int64) * heads + head)[:, None] * head_dim + d[None, :], acc, inside)


def _launch_rms_norm(x, residual, weight, eps):
    x = x if x.stride(-1) == 1 and x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = None if residual is None else torch.empty_like(out)
    if out.numel():
        _rms_norm_kernel[(out.numel() // size,)](
            x, residual if residual is None else residual.contiguous(), weight, out, new_residual, eps, size, heads, x.stride(0),
            x.stride(1) if x.dim() == 3 else 0, weight.stride(0) if weight.dim() == 2 else 0, residual is not None, _pow2(size),
            num_warps=min(max(_pow2(size) // 256, 1), 8))
    return out, new_residual


def _launch_rope(x, cs):
    half = cs.shape[-1] // 2
    if len(x):
        _rope_kernel[(len(x),)](x, cs, len(x), x.shape[1], x.stride(0), x.stride(1), half, 16, _pow2(half), num_warps=4)
    return x


def _launch_store_kv(k, v, k_cache, v_cache, slots):
    size = k.shape[1] * k.shape[2]
    if len(k):
        _store_kv_kernel[(len(k),)](k, v, k_cache, v_cache, slots, size, k.shape[2], k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                                    k_cache.stride(0), min(_pow2(size), 1024), num_warps=4)


def _launch_silu_mul(gate_up):
    size = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), size), dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        _silu_mul_kernel[(len(gate_up), _cdiv(size, 1024))](gate_up, out, size, gate_up.stride(0), 1024, num_warps=4)
    return out


def attend_config(tile: int, head_dim: int, itemsize: int, hip: bool) -> dict:
    """Compile options of _attend_kernel: columns a block, warps, pipeline stages, chosen to fit shared memory without spilling."""
    return dict(BLOCK_N=64, num_warps=4, num_stages=2)


@dataclass
class TritonContext:
    """What TritonAttention.prepare leaves for the layers of one step: the plan on the device, and room for the partials."""

    plan: Plan
    table: torch.Tensor
    cols: torch.Tensor  # [T] int32
    base: torch.Tensor | None  # [T] int32
    bits: torch.Tensor | None
    items: torch.Tensor
    count: torch.Tensor  # [1] int32, the number of items
    segment: torch.Tensor
    seg_first: torch.Tensor
    shifts: torch.Tensor
    part: torch.Tensor  # [P, H, D] fp32
    part_lse: torch.Tensor  # [P, H] fp32, in powers of two


@register_attention("triton")
class TritonAttention:
    """The GPU path: one launch over the work list, one that merges. See TorchAttention for what a backend has."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int):
        if triton is None:
            raise ImportError("attention backend 'triton' was asked for, but the package triton is not installed")
        self.heads, self.kv_heads, self.group, self.head_dim = heads, kv_heads, heads // kv_heads, head_dim
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 2
        tiles = tuple(tile for tile in (16, 64, 128) if tile >= self.group and tile * head_dim <= 128 * 128) or (_pow2(self.group),)
        self.plan_options = dict(group=self.group, tiles=tiles, programs=-(-2 * self.processors // kv_heads), min_split=256)

    def prepare(self, plan: Plan, table: torch.Tensor, cols: torch.Tensor, base: torch.Tensor | None = None,
                bits: torch.Tensor | None = None) -> TritonContext:
        """As TorchAttention.prepare; reads no tensor's value and uploads the plan in one copy."""
        parts = [np.array([len(plan.items)], np.int32), plan.items.ravel(), plan.segment, plan.seg_first, plan.shifts]
        first = np.cumsum([0] + [-(-len(part) // 4) * 4 for part in parts])  # 16-byte steps: Triton compiles aligned pointers apart
        packed = torch.empty(int(first[-1]), dtype=torch.int32, pin_memory=table.is_cuda)
        for at, part in zip(first, parts):
            packed.numpy()[at : at + len(part)] = part
        packed = packed.to(table.device, non_blocking=True)
        count, items, segment, seg_first, shifts = (packed[at : at + len(part)] for at, part in zip(first, parts))
        part = torch.empty((plan.partials, self.heads, self.head_dim), dtype=torch.float32, device=table.device)
        part_lse = torch.empty((plan.partials, self.heads), dtype=torch.float32, device=table.device)
        base = None if base is None else base.to(torch.int32)
        return TritonContext(plan, table, cols.to(torch.int32), base, bits, items, count, segment, seg_first, shifts, part, part_lse)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: TritonContext, scale: float, window: int = 0,
            softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """As TorchAttention.run."""
        tokens, heads, dim = q.shape
        out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
        if not len(ctx.plan.items):
            return out.zero_()
        tile = max(_pow2(ctx.plan.block_q * self.group), 16)
        block_d = max(_pow2(dim), 16)
        grid = min(len(ctx.plan.items) * self.kv_heads, 4 * self.processors)
        _attend_kernel[(grid,)](
            q, k_cache, v_cache, ctx.table, ctx.cols, ctx.base, ctx.bits, sinks, ctx.items, ctx.count, out, ctx.part, ctx.part_lse,
            scale * LOG2E, softcap * LOG2E, q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), ctx.table.stride(0), self.kv_heads,
            self.group, window, ctx.base is not None, bool(softcap), sinks is not None, dim, tile, BLOCK_D=block_d,
            **attend_config(tile, block_d, q.element_size(), torch.version.hip is not None))
        if ctx.plan.partials:
            _merge_kernel[(tokens, _cdiv(heads, 8))](ctx.part, ctx.part_lse, ctx.segment, ctx.seg_first, ctx.shifts, sinks, out, heads, dim,
                                                     sinks is not None, 8, block_d, num_warps=4)
        return out
