"""Attention as a work list: every batch is a ragged extend, and which query tokens read which run of KV is a list.

Row b of a batch appends q_lens[b] tokens to a request whose earlier KV lies in the pool. Prefill chunk, decode, tree verification
and the common prefix of forty forks then differ only in their items, each "these query tokens attend to that run of columns":

    columns  0         40       60        70     token     items
    row 0    |--- A ----|-- B --|- tail -|         0       A: tokens 0-2, columns  0-40, read once for three rows
    row 1    |--- A ----|-- B --|-- tail --|       1       B: tokens 0-1, columns 40-60, read once for two
    row 2    |--- A ----|--- tail ---|             2       three tails, one token each

Names: a *column* is a place among a request's KV, a *slot* the place of that KV in the pool (table[row, column]), cols[t] token
t's own column; a *partial* is (output, log-sum-exp) of one token over one item. A token that one item covers is written directly,
others are merged: softmax over a union is the parts weighted by exp(lse). Splitting a long run over many programs (split-K),
prefixes shared at any level of the tree (cascades) and query blocks are one thing, decided by `plan` out of host integers.

Invariant: every (token t, column <= cols[t]) is in exactly one item. The mask, for all cases: token t sees column c iff
c <= cols[t] and, from column base[t] on (a draft tree), bit c - base[t] of bits[t] is set (its ancestors and itself); of these a
window leaves the last w in the order of the text. Items carry upper bounds, which the device clips by cols: lengths that the host
does not know yet never reach the list.

A tree's nodes lie in columns base, base + 1, .., parents before children: a node's column does not say how far on in the text it
is. Its *position*, base + depth, does, and ancestors are bits below its own, so depth is a count of bits:

    column  base+0  +1  +2  +3      D: bits 1011, depth 2, position base + 2
    node    A ----- B - C           window 3: A, B, D (counted from D's column it would hide A)
                    '------ D       window 2: B, D, the highest bits

Cost: a column is read once per item and kv head (the query heads of a group share the tile); a partial costs a round trip of
H x D floats, so a run too short to be worth it is folded into what lies below it. It stops holding where rows of a step are not
in depth-first tree order (then nothing is shared) and for draft trees of more than 64 nodes.

After: Milakov and Gimelshein 2018 (online softmax), Dao 2022 and 2023 (FlashAttention, Flash-Decoding), Kwon et al. 2023 (paged
KV), Juravsky et al. 2024 (Hydragen) and Ye et al. 2025 (FlashInfer) on shared prefixes, Miao et al. 2023 (SpecInfer) on trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from . import native
from .kernels import cdiv, compile_ahead, jit, pow2, tile_max, tile_min, tile_sum, tl, triton
from .tuned import attend_config, tiles_for

ATTENTION: dict[str, type] = {}
NO_TREE = 2**31 - 1  # base of an ordinary token beside tree tokens: no column reaches it, so its bits are never looked at
LOG2E = math.log2(math.e)


def register_attention(name: str):
    """Class decorator: makes a backend selectable as ATTENTION[name]. What it must offer: see TorchAttention."""

    def put(cls: type) -> type:
        ATTENTION[name] = cls
        return cls

    return put


def default_backend(device: str) -> str:
    """What attends on a device where nobody chose: the kernels, and on CPU torch where those cannot be built."""
    if not device.startswith("cpu"):
        return "triton"
    return "torch" if native.library() is None else "cpp"


# ---- the plan: host integers in, host integers out ---------------------------------------------------------------------------

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

    def padded(self) -> Plan:
        """With arrays of lengths that many plans have in common. What is behind `count`, and behind the last segment, nobody reads."""
        grow = lambda part, size: np.concatenate((part, np.zeros((max(size - len(part), 0), *part.shape[1:]), np.int32)))
        size = lambda n: 1 << (n - 1).bit_length() if n else 0
        return replace(self, items=grow(self.items, max(size(len(self.items)), self.tokens)), seg_first=grow(self.seg_first, self.tokens + 1),
                       shifts=grow(self.shifts, size(len(self.shifts))), partials=size(self.partials))

    def flat(self, count: int) -> np.ndarray:
        """All that a device needs of it, of whose items `count` are real, as one array [n] int32: `unpack` takes it apart."""
        parts = np.array([count], np.int32), self.items.ravel(), self.segment, self.seg_first, self.shifts
        return np.concatenate([part for values in parts for part in (values, np.zeros(-len(values) % 4, np.int32))])  # see `unpack`

    def unpack(self, flat):
        """(count, items, segment, seg_first, shifts) out of `flat`, in steps of 16 bytes: Triton treats aligned pointers apart. Reads no value."""
        parts, first = [], 0
        for size in (1, self.items.size, len(self.segment), len(self.seg_first), len(self.shifts)):
            parts.append(flat[first : first + size])
            first += -(-size // 4) * 4
        return parts

    def filled(self, flat: torch.Tensor) -> Plan:
        """A plan of the same lengths with the values of `flat`, in the host's memory."""
        count, items, *rest = self.unpack(flat.numpy())
        return replace(self, items=items.reshape(-1, 6)[: count[0]], **dict(zip(("segment", "seg_first", "shifts"), rest)))


def _pieces(lengths: np.ndarray, size: int) -> tuple[np.ndarray | slice, np.ndarray | int, np.ndarray]:
    """Cuts every length into pieces of at most `size`: (which length, offset in it, length of the piece), in order."""
    count = -(-lengths // size)
    if len(count) and count.min() == count.max() == 1:  # most often nothing is cut
        return slice(None), 0, lengths
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

    rows [B]: table rows in depth-first tree order. q_lens [B]: new tokens of each (0 is legal). kv_bounds [B] >= q_lens:
    exclusive upper bounds of their columns, new tokens included. shared: (first, last, start, end): batch rows first..last-1 hold
    columns [start, end) in the same slots; nested by tree level, and disjoint for any one row.

    group: query heads per kv head. tiles: rows (tokens x group) that a query tile may have, ascending: the smallest that holds
    the longest query range is taken, longer ranges are cut. Runs are cut at max(min_split, all columns / programs). item_cost,
    partial_cost: what one more item and one more partial cost, in columns read. Raises ValueError on a bound that is too small.
    """
    rows, q_lens, kv_bounds = (np.asarray(a, np.int64) for a in (rows, q_lens, kv_bounds))
    if (kv_bounds < q_lens).any():
        bad = int(np.argmax(kv_bounds < q_lens))
        raise ValueError(f"batch row {bad}: kv bound {kv_bounds[bad]} is below its {q_lens[bad]} new tokens, which it includes")
    q_first = _first(q_lens)
    runs = _worth_sharing(shared, q_first.tolist(), q_lens, max(tiles[-1] // group, 1), item_cost, partial_cost) if len(shared) else []
    runs = np.asarray(runs, np.int64).reshape(-1, 4)
    owner, start, end = _private(runs, q_lens, kv_bounds)
    q_start, q_len, row, bound = q_first[:-1][owner], q_lens[owner], rows[owner], kv_bounds[owner]
    if len(runs):  # one list for both kinds of run: tokens, table row, columns, and the row's bound where the tokens are one row's
        q_start = np.concatenate((q_first[runs[:, 0]], q_start))
        q_len = np.concatenate((q_first[runs[:, 1]] - q_first[runs[:, 0]], q_len))
        row = np.concatenate((rows[runs[:, 0]], row))
        start, end = np.concatenate((runs[:, 2], start)), np.concatenate((runs[:, 3], end))
        bound = np.concatenate((np.full(len(runs), np.iinfo(np.int32).max), bound))
    longest = max(int(q_len.max(initial=1)) * group, 1)
    block_q = max(next((tile for tile in tiles if tile >= longest), tiles[-1]) // group, 1)

    which, offset, length = _pieces(q_len, block_q)
    q_start, row, start = q_start[which] + offset, row[which], start[which]
    # The last token of a block sees no column of the row's later tokens
    end = np.minimum(end[which], bound[which] - (q_len[which] - offset - length))
    columns = np.maximum(end - start, 0)
    split = max(min_split, -(-int(columns.sum()) // programs))
    which, offset, columns = _pieces(columns, split)
    kv_start = start[which] + offset
    items = np.empty((len(columns), 6), np.int64)
    for i, values in enumerate((q_start[which], length[which], row[which], kv_start, kv_start + columns, -1)):
        items[:, i] = values
    items = items[(-columns).argsort(kind="stable")]  # longest first: the last programs to finish are short ones
    return _merge_index(items, q_first, block_q)


def _worth_sharing(shared, q_first: list[int], q_lens: np.ndarray, block_q: int, item_cost: int, partial_cost: int) -> list:
    """The shared runs that save more columns than they cost, each lengthened by runs just above it that do not: as `shared`."""
    runs = []
    for first, last, start, end in sorted(shared, key=lambda run: (run[0], -run[1], run[2])):  # ancestors before descendants
        if runs and runs[-1][:2] == [first, last] and runs[-1][3] == start:
            runs[-1][3] = end  # a chain of nodes with the same rows is one run
        elif start < end and q_first[first] < q_first[last]:
            runs.append([first, last, start, end])
    reads = _first(-(-q_lens // block_q)).tolist()  # prefix sums of how often each row's query blocks read a column of their own
    done, kept = [], []  # done: (first, last, start, reads of a column just above this run, the kept runs that begin at `start`)
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


def _private(runs: np.ndarray, q_lens: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray]:
    """What no kept run covers of the columns [0, bound) of rows that have tokens: (batch row, start, end) of every gap."""
    if not len(runs):
        owner = slice(None) if q_lens.all() else q_lens.nonzero()[0]
        return owner, np.zeros_like(bounds[owner]), bounds[owner]
    which, offset, _ = _pieces(runs[:, 1] - runs[:, 0], 1)  # an entry per run and member; one more per row stands at its bound
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
    if q_len.sum() == tokens:  # each is in one item: there is nothing to merge
        return Plan(items.astype(np.int32), np.zeros(tokens, np.int32), np.zeros(2, np.int32), np.zeros(0, np.int32), 0, tokens, block_q)
    q_end = q_start + q_len
    is_edge = np.zeros(tokens + 1, bool)
    is_edge[q_first] = is_edge[q_start] = is_edge[q_end] = True
    edges = is_edge.nonzero()[0]  # token ranges between two edges are covered alike
    nth = is_edge.cumsum() - 1
    lo, hi = nth[q_start], nth[q_end]
    which, offset, _ = _pieces(hi - lo, 1)  # one entry per item and segment
    segment, which = lo[which] + offset, np.arange(len(lo))[which]
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


# ---- the oracle --------------------------------------------------------------------------------------------------------------

def attention_reference(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, token_rows,
                        cols: torch.Tensor, scale: float, base: torch.Tensor | None = None, bits: torch.Tensor | None = None,
                        window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention token by token, column by column, in float64 and without any plan: slow and plain, to test the rest against.

    As a backend's run, with token_rows [T]: the table row of each token. Returns [T, H, D] float64; a token that sees nothing: 0.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    for t in range(q.shape[0]):
        tree = int(cols[t]) + 1 if base is None else min(int(base[t]), int(cols[t]) + 1)
        seen = [*range(tree), *(c for c in range(tree, int(cols[t]) + 1) if int(bits[t]) >> c - tree & 1)][-window:]
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


# ---- the C++ backend: the CPU path -------------------------------------------------------------------------------------------

@register_attention("cpp")
class CppAttention:
    """kernels.cpp's attention: items straight out of the pool. As TorchAttention in what it offers."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int):
        if native.library() is None:
            raise native.BuildError("the attention backend 'cpp' needs the C++ kernels, which could not be built here or are switched off")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        # A unit of work is an item's kv head; four a thread even out. Item and partial: packing a block, rescaling and merging rows
        self.plan_options = dict(group=heads // kv_heads, tiles=(256,), programs=-(-4 * torch.get_num_threads() // kv_heads),
                                 min_split=256, item_cost=64, partial_cost=4)

    def prepare(self, plan: Plan, table: torch.Tensor, cols: torch.Tensor, base: torch.Tensor | None = None,
                bits: torch.Tensor | None = None, flat: torch.Tensor | None = None) -> CppContext:
        """plan: of this step. table: [R, C] int32. cols, base, bits: [T] int64. Reads no value of the tensors, but keeps them: until
        the step's last layer they must not change. flat: [n] int32 on the device, the plan's arrays, where they were sent ahead."""
        plan = plan if flat is None else plan.filled(flat)
        part = torch.empty(plan.partials, self.heads, self.head_dim + 1)  # fp32; the log-sum-exps behind the outputs
        kept = [table, cols, base, bits, part, *map(np.ascontiguousarray, (plan.items, plan.segment, plan.seg_first, plan.shifts))]
        at = lambda x: None if x is None else x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
        table, cols, base, bits, part, items, segment, seg_first, shifts = map(at, kept)
        args = native.Attention(
            part=part, part_lse=part + 4 * plan.partials * self.heads * self.head_dim, items=items, segment=segment, seg_first=seg_first,
            shifts=shifts, table=table, cols=cols, base=base, bits=bits, table_stride=kept[0].stride(0), num_items=len(plan.items),
            tokens=plan.tokens, heads=self.heads, kv_heads=self.kv_heads, dim=self.head_dim, merges=plan.partials > 0,
            threads=torch.get_num_threads())
        return CppContext(args, kept)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: CppContext, scale: float, window: int = 0,
            softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of one layer, as TorchAttention.run."""
        out = torch.empty(q.shape, dtype=q.dtype)  # every token sees its own column, so every row is written
        sinks = None if sinks is None else sinks.float().contiguous()
        args = ctx.args
        args.q, args.k_cache, args.v_cache, args.out = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
        args.q_stride, args.q_head_stride, args.slot_stride = q.stride(0), q.stride(1), k_cache.stride(0)
        args.scale, args.window, args.softcap, args.sinks = scale, window, softcap, None if sinks is None else sinks.data_ptr()
        native.library().nano_attention(args, native.DTYPES[q.dtype])
        return out


@dataclass
class CppContext:
    """What CppAttention.prepare leaves for the layers of one step."""

    args: native.Attention
    kept: list  # what its pointers point into


# ---- the torch backend: any device, and the twin of the others ---------------------------------------------------------------

SHORT = 64  # query ranges up to this many tokens are batched with others of like shape, longer ones are a call of their own
CALL_COST = 5000  # what a call costs beside its work, in columns x (query tokens + 8), about 0.02 us each
LARGEST = 1 << 20  # entries x tokens x columns of a batch: bounds its masks
FULL, MASKED, CAUSAL = 0, 1, 2  # what an entry's queries see of its columns: all, what the mask says, a lower triangle
NOTHING = -1e30  # log-sum-exp of no column at all: finite, so that merging two of them gives 0 and not NaN


@dataclass
class _Call:
    """One dense attention call: n entries of m query tokens over C columns each."""

    n: int
    m: int
    tokens: slice | torch.Tensor  # [n * m] the query tokens; padding repeats a real one
    real: torch.Tensor | None  # which of them are real, where some are not
    out: slice | torch.Tensor  # the real ones
    slots: slice | torch.Tensor  # [n * C]; padding repeats a slot of the same run, so that no stray NaN is ever read
    mask: torch.Tensor | None  # [n, 1, 1 or m or m * group, C] fp32, added to the scores
    blind: torch.Tensor | None  # [real tokens, 1] bool: those that see no column here
    causal: bool
    fresh: bool = True  # nothing was written to these tokens before: copy instead of merging


@dataclass
class TorchContext:
    """What TorchAttention.prepare leaves for the layers of one step."""

    plan: Plan
    table: np.ndarray
    cols: np.ndarray
    base: np.ndarray | None
    bits: np.ndarray | None
    positions: np.ndarray  # [T]: where a token's window ends
    device: torch.device
    calls: dict[int, list[_Call]] = field(default_factory=dict)  # by window


@register_attention("torch")
class TorchAttention:
    """Items of like shape are padded into few calls of torch's flash attention, whose parts are merged by log-sum-exp.

    A backend is made once per model, from its head counts. It has plan_options, keywords for `plan`; prepare(), once a step; and
    run(), once a layer.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int):
        self.heads, self.kv_heads, self.group, self.head_dim = heads, kv_heads, heads // kv_heads, head_dim
        self.plan_options = dict(item_cost=512)  # columns: a shared run is a call of its own

    def prepare(self, plan: Plan, table: torch.Tensor, cols: torch.Tensor, base: torch.Tensor | None = None,
                bits: torch.Tensor | None = None, flat: torch.Tensor | None = None) -> TorchContext:
        """plan: of this step. table: [R, C] int32. cols: [T], each token's own column. For draft trees base and bits, [T] int64; base is
        NO_TREE for other tokens. A tree's columns are read for all of its tokens: what lies there must be finite.

        Reads the tensors' values, here and at the first run, so it must happen in stream order: when the worker gets to it.
        """
        base, bits = (None if x is None else x.cpu().numpy() for x in (base, bits))
        cols = cols.cpu().numpy()
        plan = plan if flat is None else plan.filled(flat.cpu())
        return TorchContext(plan, table.cpu().numpy(), cols, base, bits, cols, table.device)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: TorchContext, scale: float, window: int = 0,
            softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of one layer. q: [T, H, D], may be strided; caches: [S, G, D]; sinks: [H] -> [T, H, D]. Mutates nothing."""
        if window not in ctx.calls:
            ctx.calls[window] = self._calls(ctx, window)
        calls = ctx.calls[window]
        merging = sinks is not None or not all(call.fresh for call in calls)
        out = lse = None
        for call in calls:
            part, part_lse = self._attend(call, q, k_cache, v_cache, scale, softcap, merging)  # [real tokens, H, D], [.., H] f32
            if out is None and isinstance(call.out, slice) and len(part) == len(q):
                out, lse = part, part_lse
                continue
            if out is None:
                out = q.new_zeros(q.shape)
                lse = torch.full(q.shape[:2], NOTHING, device=q.device) if merging else None
            if not call.fresh:
                _merge_into(out, lse, call.out, part, part_lse)
                continue
            out[call.out] = part
            if merging:
                lse[call.out] = part_lse
        if out is None:
            return q.new_zeros(q.shape)
        if sinks is not None:  # one more score per head, without a value
            out = out * torch.sigmoid(lse - sinks.float()).unsqueeze(-1).to(out.dtype)
        return out

    def _attend(self, call: _Call, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, softcap: float,
                merging: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        n, m, group = call.n, call.m, self.group
        _, heads, dim = q.shape
        if isinstance(call.slots, slice):
            k, v = k_cache[call.slots], v_cache[call.slots]
        else:
            k, v = k_cache.index_select(0, call.slots), v_cache.index_select(0, call.slots)
        k, v = (x.view(n, -1, self.kv_heads, dim).transpose(1, 2) for x in (k, v))  # [n, G, C, D]
        q = q[call.tokens].view(n, m, self.kv_heads, group, dim)
        # A kv head's query heads stand where query tokens would, so that its columns are read once for all of them: worth it
        # while tokens are few. (Torch's kernel runs single bf16 query rows through a faster product, better in small groups.)
        fold = m <= SHORT and not (m == 1 and group <= 3 and q.dtype == torch.bfloat16)
        q = q.transpose(1, 2).reshape(n, self.kv_heads, m * group, dim) if fold else q.reshape(n, m, heads, dim).transpose(1, 2)
        mask = call.mask if call.mask is None else call.mask.expand(-1, -1, q.shape[2], -1)
        out, lse = dense_attention(q, k, v, mask, call.causal, scale, softcap)
        if fold:
            out = out.unflatten(2, (m, group)).transpose(1, 2).reshape(n * m, heads, dim)
            lse = lse.unflatten(2, (m, group)).transpose(1, 2).reshape(n * m, heads) if merging else None
        else:
            out = out.transpose(1, 2).reshape(n * m, heads, dim)
            lse = lse.transpose(1, 2).reshape(n * m, heads) if merging else None
        if call.real is not None:
            out, lse = out.index_select(0, call.real), lse.index_select(0, call.real) if merging else None
        if call.blind is not None and merging:
            lse = lse.masked_fill(call.blind, NOTHING)
        return out, lse

    def _calls(self, ctx: TorchContext, window: int) -> list[_Call]:
        """Sorts the step's items into dense calls; once a step and window."""
        if window and ctx.base is not None:
            ctx = _windowed(ctx, window)
        works = []  # (q_start, q_len, row, kv_start, kv_end, kind)
        items = ctx.plan.items
        single = items[items[:, 1] == 1]
        if len(single):  # one token: its columns are clipped to what it sees, and only a tree still needs a mask
            cols = ctx.cols[single[:, 0]]
            start, end = single[:, 3], np.minimum(single[:, 4], cols + 1)
            if window:
                start = np.maximum(start, ctx.positions[single[:, 0]] - window + 1)
            kind = np.zeros_like(start) if ctx.base is None else np.where(end > ctx.base[single[:, 0]], MASKED, FULL)
            columns = (single[:, 0], single[:, 1], single[:, 2], start, end, kind)
            works += [work for work in zip(*(x.tolist() for x in columns)) if work[3] < work[4]]
        for q_start, q_len, row, start, end, _ in items[items[:, 1] > 1].tolist():
            works += _clip(ctx, window, q_start, q_len, row, start, end)
        alone = [[work] for work in works if work[5] == CAUSAL or work[1] > SHORT]
        batches = alone + _batches([work for work in works if work[5] != CAUSAL and work[1] <= SHORT])
        calls = sorted((self._call(ctx, window, batch) for batch in batches), key=lambda call: -call.n * call.m)
        written = np.zeros(ctx.plan.tokens, bool)
        for call in calls:
            where = call.out if isinstance(call.out, slice) else call.out.cpu().numpy()
            call.fresh = not written[where].any()
            written[where] = True
        return calls

    def _call(self, ctx: TorchContext, window: int, works: list) -> _Call:
        works.sort()  # in token order: most often the batch is then a plain slice of the queries
        q_start, q_len, row, start, end, kind = np.asarray(works).T
        n, m, width = len(works), int(q_len.max()), int((end - start).max())
        if n > 1 or m > 1:
            width = -(-width // 16) * 16  # torch's kernel does columns beyond a multiple of 16 one by one, in twice the time
        causal = bool(kind[0] == CAUSAL)
        tokens = q_start[:, None] + np.minimum(np.arange(m), q_len[:, None] - 1)  # [n, m]
        real = np.arange(m) < q_len[:, None]
        inside = np.arange(width) < (end - start)[:, None]  # [n, C]
        columns = np.minimum(start[:, None] + np.arange(width), end[:, None] - 1)
        mask = blind = None
        if (kind == MASKED).any():
            seen = _visible(ctx, window, tokens, columns) & inside[:, None]  # [n, m, C]
            sees = seen.any(-1)[real]
            blind = None if sees.all() else torch.from_numpy(~sees)[:, None].to(ctx.device)
            if m <= SHORT:
                seen = seen.repeat(self.group if m > 1 else 1, 1)  # rows of the folded query: token-major, head-minor
        else:
            seen = inside[:, None]
        if not causal and not seen.all():  # (columns beyond a causal block's own are above its diagonal)
            mask = torch.where(torch.from_numpy(seen), 0.0, -math.inf)[:, None].to(ctx.device)
        some = None if real.all() else torch.from_numpy(real.ravel().nonzero()[0]).to(ctx.device)
        slots = _index(ctx.table[row[:, None], columns].ravel(), ctx.device)
        return _Call(n, m, _index(tokens.ravel(), ctx.device), some, _index(tokens[real], ctx.device), slots, mask, blind, causal)


def _batches(works: list) -> list[list]:
    """Groups works of like shape so that calls and padding cost least. No token is twice in one: its parts are merged."""
    works.sort(key=lambda work: work[1])  # private tails before shared runs, so that the tails of all rows meet in one layer
    seen: dict[int, int] = {}
    layers: dict[int, list] = {}
    for work in works:
        tokens = range(work[0], work[0] + work[1])
        layer = max(seen.get(t, 0) for t in tokens)
        seen.update(dict.fromkeys(tokens, layer + 1))
        layers.setdefault(layer, []).append(work)
    batches = []
    for layer in layers.values():
        layer.sort(key=lambda work: (work[1], work[4] - work[3]), reverse=True)
        size = [(work[4] - work[3] + 15) // 16 * 16 * (work[1] + 8) for work in layer]
        best, cut = [0] + [0] * len(layer), [0] * (len(layer) + 1)  # cost of the first j works, and where their last batch begins
        for j in range(1, len(layer) + 1):
            first = [i for i in range(max(0, j - SHORT), j) if i == j - 1 or (j - i) * size[i] < LARGEST]
            best[j], cut[j] = min((best[i] + CALL_COST + (j - i) * size[i], i) for i in first)
        j = len(layer)
        while j:
            batches.append(layer[cut[j] : j])
            j = cut[j]
    return batches


def _index(values: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """A slice where the values are consecutive (a view instead of a gather), else an int64 tensor."""
    first = int(values[0])
    if int(values[-1]) - first == len(values) - 1 and (np.diff(values) == 1).all():
        return slice(first, first + len(values))
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _windowed(ctx: TorchContext, window: int) -> TorchContext:
    """What layers with a window see: the positions of a tree's tokens, and of their paths the last `window` nodes, the highest bits."""
    length, bits = np.unpackbits(ctx.bits[:, None].view(np.uint8), axis=1).sum(1, dtype=np.int64), ctx.bits
    for longer in range(window, 64):
        bits = np.where(length > longer, bits & bits - 1, bits)
    return replace(ctx, bits=bits, positions=np.where(ctx.base > ctx.cols, ctx.cols, ctx.base + length - 1))


def _visible(ctx: TorchContext, window: int, tokens: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The mask rule: tokens [n, m], columns [n, C] -> [n, m, C] bool."""
    columns = columns[:, None]
    seen = columns <= ctx.cols[tokens][..., None]
    if ctx.bits is not None:
        node = columns - ctx.base[tokens][..., None]
        seen &= (node < 0) | (ctx.bits[tokens][..., None] >> np.clip(node, 0, 63) & 1).astype(bool)
    if window:  # (a node's column is never below its position: `_windowed` has taken what is too far up its path)
        seen &= columns > ctx.positions[tokens][..., None] - window
    return seen


def _clip(ctx: TorchContext, window: int, q_start: int, q_len: int, row: int, start: int, end: int) -> list:
    """Cuts an item of several tokens into works whose columns are all seen, are a causal square, or are few enough to mask."""
    cols = ctx.cols[q_start : q_start + q_len]
    low, high = int(cols.min()), int(cols.max())
    end = min(end, high + 1)
    start = max(start, int(ctx.positions[q_start : q_start + q_len].min()) - window + 1) if window else start
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
    # A shared run that a row computes in this very step, a window, a tree: cut where tokens begin to see all, else in halves
    edge = np.flatnonzero(np.diff((cols >= end - 1).astype(np.int8))) + 1
    part = int(edge[0]) if len(edge) else q_len // 2
    rest = _clip(ctx, window, q_start + part, q_len - part, row, start, end)
    return _clip(ctx, window, q_start, part, row, start, end) + rest


def _merge_into(out: torch.Tensor, lse: torch.Tensor, where: slice | torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges a partial result into tokens `where` of out [T, H, D] and lse [T, H], which it mutates."""
    old, old_lse = out[where], lse[where]
    weight = torch.sigmoid(part_lse - old_lse).unsqueeze(-1)  # exp(part) / (exp(old) + exp(part))
    out[where] = torch.lerp(old.float(), part.float(), weight).to(out.dtype)  # in float32: a cache hit must not cost precision
    lse[where] = torch.logaddexp(old_lse, part_lse)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float,
                    softcap: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention and its log-sum-exp: q [n, h, m, D], k, v [n, G, C, D], mask [n, 1, m, C] -> [n, h, m, D], [n, h, m] fp32.

    C must not be 0; causal: query i sees columns 0..i. A query that sees nothing gives 0 and a log-sum-exp that means nothing.
    """
    if q.device.type == "cpu" and not softcap and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
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


# ---- the Triton backend: CUDA and ROCm ---------------------------------------------------------------------------------------


@jit
def _bit_count(x):
    """How many bits of an int64 are set: the sums of 2, of 4 and of 8 neighbours side by side, then that of the bytes."""
    x = x - (x >> 1 & 0x5555555555555555)
    x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333)
    x = x + (x >> 4) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101 >> 56).to(tl.int32)


@jit
def _attend_columns(acc, best, total, q, cols, positions, base, bits, k_cache, v_cache, table_row, cache_stride, lo, hi, scale, softcap,
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
                seen = seen & (column[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tile_max(scores, 1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen nothing yet: -inf - -inf would be NaN
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        v = tl.load(v_cache + slot[:, None] * cache_stride + d[None, :], inside[:, None] & (d < HEAD_DIM)[None, :], 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tile_sum(p, 1)
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
        hi = tl.minimum(tl.load(item + 4), tile_max(col, 0) + 1)  # what the host knew only as a bound
        clear = tl.minimum(hi, tile_min(low, 0) + 1)  # columns below are seen by the whole tile
        position, tree_base, tree_bits = col, col, token  # not looked at, but for a window's position
        if TREE:
            tree_base, tree_bits = tl.load(base + token, real, 2147483647), tl.load(bits + token, real, 0)
            clear = tl.minimum(clear, tile_min(tree_base, 0))
            if WINDOW > 0:
                length = _bit_count(tree_bits)
                position = tl.where(tree_base > col, col, tree_base + length - 1)
                low = tl.where(real, position, 2147483647)
                for longer in range(WINDOW, 64):  # the last nodes of its path are the highest bits
                    tree_bits = tl.where(length > longer, tree_bits & (tree_bits - 1), tree_bits)
        if WINDOW > 0:
            lo = tl.maximum(lo, tile_min(low, 0) - WINDOW + 1)
            clear = lo
        clear = lo + tl.maximum(clear - lo, 0) // BLOCK_N * BLOCK_N
        table_row = table + tl.load(item + 2).to(tl.int64) * table_stride
        acc = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
        best, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.full((BLOCK_M,), 0.0, tl.float32)
        k_head, v_head = k_cache + kv_head * cache_head_stride, v_cache + kv_head * cache_head_stride
        acc, best, total = _attend_columns(
            acc, best, total, tile, col, position, tree_base, tree_bits, k_head, v_head, table_row, cache_stride, lo, clear, scale, softcap,
            WINDOW, TREE, SOFTCAP, False, HEAD_DIM, BLOCK_N, BLOCK_D)
        acc, best, total = _attend_columns(
            acc, best, total, tile, col, position, tree_base, tree_bits, k_head, v_head, table_row, cache_stride, clear, hi, scale, softcap,
            WINDOW, TREE, SOFTCAP, True, HEAD_DIM, BLOCK_N, BLOCK_D)
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
def _merge_kernel(part, part_lse, segment, seg_first, shifts, sinks, out, heads, head_dim, SINKS: tl.constexpr,
                  BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per token and few heads: the partials of its segment, weighted by 2^lse. Tokens written directly have none."""
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
            value = tl.load(part + row[:, None] * head_dim + d[None, :], inside, 0.0)
            acc = acc * shrink[:, None] + weight[:, None] * value
            total = total * shrink + weight
            best = new_best
        if SINKS:
            sink = tl.load(sinks + head, real, 0.0).to(tl.float32) * 1.4426950408889634
            total += tl.exp2(sink - tl.where(best == float("-inf"), sink, best))
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + (token.to(tl.int64) * heads + head)[:, None] * head_dim + d[None, :], acc, inside)


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
        tiles = tiles_for(head_dim, self.group)
        self.plan_options = dict(group=self.group, tiles=tiles, programs=-(-2 * self.processors // kv_heads), min_split=256)

    def prepare(self, plan: Plan, table: torch.Tensor, cols: torch.Tensor, base: torch.Tensor | None = None,
                bits: torch.Tensor | None = None, flat: torch.Tensor | None = None) -> TritonContext:
        """As TorchAttention.prepare; reads no tensor's value."""
        if flat is None:
            host = torch.from_numpy(plan.flat(len(plan.items)))
            flat = (host.pin_memory() if table.is_cuda else host).to(table.device, non_blocking=True)
        count, items, segment, seg_first, shifts = plan.unpack(flat)
        part = torch.empty((plan.partials, self.heads, self.head_dim), dtype=torch.float32, device=table.device)
        part_lse = torch.empty((plan.partials, self.heads), dtype=torch.float32, device=table.device)
        cols, base = (None if x is None else x.to(torch.int32) for x in (cols, base))
        return TritonContext(plan, table, cols, base, bits, items, count, segment, seg_first, shifts, part, part_lse)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: TritonContext, scale: float,
            window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """As TorchAttention.run; the two caches have the same strides."""
        tokens, heads, dim = q.shape
        out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
        if not len(ctx.plan.items):
            return out.zero_()
        tile = max(pow2(ctx.plan.block_q * self.group), 16)
        block_d = max(pow2(dim), 16)
        grid = min(len(ctx.plan.items) * self.kv_heads, 4 * self.processors)
        _attend_kernel[(grid,)](
            q, k_cache, v_cache, ctx.table, ctx.cols, ctx.base, ctx.bits, sinks, ctx.items, ctx.count, out, ctx.part,
            ctx.part_lse, scale * LOG2E, softcap * LOG2E, q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
            ctx.table.stride(0), self.kv_heads, self.group, window, ctx.base is not None, bool(softcap), sinks is not None, dim,
            tile, BLOCK_D=block_d, **attend_config(tile, block_d, q.element_size(), torch.version.hip is not None))
        if ctx.plan.partials:
            _merge_kernel[(tokens, cdiv(heads, 8))](ctx.part, ctx.part_lse, ctx.segment, ctx.seg_first, ctx.shifts, sinks, out,
                                                     heads, dim, sinks is not None, 8, block_d, num_warps=4)
        return out


def compile_all(target: str, dtype: str, head_dim: int, group: int, tiles=None, tree: bool = False, window: int = 0) -> dict:
    """A model's attention kernels compiled ahead (kernels.compile_ahead), by name: an _attend_kernel a tile, and the merge."""
    block_d, itemsize = max(pow2(head_dim), 16), 4 if dtype == "fp32" else 2
    done = {}
    for tile in tiles or tiles_for(head_dim, group, target):
        options = attend_config(tile, block_d, itemsize, target.startswith("gfx"), target)
        values = dict(GROUP=group, WINDOW=window, TREE=tree, SOFTCAP=False, SINKS=False, HEAD_DIM=head_dim, BLOCK_M=tile)
        values |= {"BLOCK_D": block_d, "BLOCK_N": options.pop("BLOCK_N"), "sinks": None} | ({} if tree else {"base": None, "bits": None})
        done[f"attend {tile}"] = compile_ahead(_attend_kernel, target, dtype, values, **options)
    values = dict(sinks=None, SINKS=False, BLOCK_H=8, BLOCK_D=block_d)
    return done | {"merge": compile_ahead(_merge_kernel, target, dtype, values, num_warps=4)}


def _demo() -> None:
    """Four rows under a small prefix tree: the work list, the merge, and the result against the oracle."""
    torch.manual_seed(0)
    heads, kv_heads, dim = 6, 2, 16
    shared = [(0, 4, 0, 40), (0, 2, 40, 60)]  # A under all rows, B under the first two
    q_lens, lengths = [1, 1, 3, 1], [69, 75, 47, 91]
    bounds = [length + n for n, length in zip(q_lens, lengths)]
    table = torch.arange(1, 401, dtype=torch.int32).view(4, 100)
    for first, last, start, end in shared:
        table[first:last, start:end] = table[first, start:end].clone()
    work = plan(range(4), q_lens, bounds, shared, item_cost=0, partial_cost=0, min_split=32, programs=8)
    print("rows 0-3 extend", lengths, "columns by", q_lens, "tokens; A = columns 0-39 of all, B = 40-59 of rows 0 and 1\n")
    print("item  tokens  row  columns   goes to")
    for i, (q_start, q_len, row, start, end, out) in enumerate(work.items.tolist()):
        to = "output" if out < 0 else f"partials {out}-{out + q_len - 1}"
        print(f"{i:4}  {q_start:2}-{q_start + q_len - 1:<2}  {row:4}  {start:3}-{end - 1:<4}  {to}")
    print("\ntoken  merges partials")
    for t, segment in enumerate(work.segment.tolist()):
        print(f"{t:5}  {[t + int(shift) for shift in work.shifts[work.seg_first[segment] : work.seg_first[segment + 1]]]}")
    print(f"\ncolumns read: {(work.items[:, 4] - work.items[:, 3]).sum()}; without sharing: {sum(bounds)}")
    cols = torch.cat([torch.arange(length, length + n) for length, n in zip(lengths, q_lens)])
    q, caches = torch.randn(len(cols), heads, dim), torch.randn(2, 401, kv_heads, dim)
    backend = ATTENTION["torch"](heads, kv_heads, dim)
    out = backend.run(q, *caches, backend.prepare(work, table, cols), dim**-0.5)
    want = attention_reference(q, *caches, table, np.repeat(range(4), q_lens), cols, dim**-0.5)
    print(f"largest difference from the dense oracle: {(out - want).abs().max():.1e}")


if __name__ == "__main__":
    _demo()
