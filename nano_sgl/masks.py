"""Masks: the grammars' tables on the device, and the three things that a step does with them, in stream order.

grammar.py compiles grammars to an automaton over tokens and keeps it as numbers that only grow. Here they are again, where the logits are, so that a
step needs no answer from the host: it masks a row by the row's state, and after the draw puts the next state in its place. A state is one
int64, index of its row | count << 32:

    state 7 | 12 << 32  --states[7]-->  map 3, vec 210, overrides 96..99, accepts from count 5
    token 4321          in over_token[96:99]?  value = over_value[there],  else  value = vec[210 + maps[3, 4321]]
    lines[value] ...    the first with min <= 12 <= max: the token may come next, after it the state is `next`, its count as `op` says

    mask     for all tokens of a row of logits: -inf where no line holds; end ids by the count alone
    advance  for one token a row: the next state, DEAD where no line holds
    walk     for the nodes of a draft tree, each from the state of its parent
    chains   for rows, the forced text that follows their states (jump.py)

`refresh` brings over what the host has appended. It takes no lock: a row counts once its state is in `Tables.built`, which is the last thing that the
host does for it. Read in this order, the list first, what a row points to is there when the row is.

Invariants. A state that the device has no row for (DEAD and states that it has not heard of among them) reads the last entry of `states`, which is
always empty: so there is one way to have no row, and no index is out of range. An override allows whatever the class beneath it does
(grammar.py joins them), so "class or override" and "override, else class" are the same mask. Nothing here waits for the device.

Three implementations, bit for bit the same: torch (the oracle and the fallback), C++ (cpu/mask.h), Triton. Torch and Triton look at every token of a
row. C++ does not: of each map it keeps the tokens of all classes but the largest, by class. Either the largest class is allowed, and -inf goes
to those few others that are not; or it is not, and the row is filled with -inf in whole registers after what is allowed was set aside. A row's
few are remembered, with the counts for which they are the same.

Cost: a refresh with nothing new is one comparison of lengths. What is sent is one pinned copy. Tensors grow by doubling, so one in a while copies
what is there. For C++ a map takes up to 4 bytes a token more, and half a millisecond; what a thread remembers, 5 MB at most (150,000 tokens).
Where it stops: one vocabulary, logits of no more columns than that; tables are never given back (a new library is a new object).
Source: the table walk is Willard and Louf's (2023); masking in place beside the draw is XGrammar's (Dong et al. 2024).
"""

from __future__ import annotations

import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from . import kernels, native
from .kernels import cdiv, jit, pow2, tile_max, tile_min, tile_sum, tl, triton

DEAD = -1       # in place of a state: the text has ended (an end id was sampled), or a token that the grammar does not allow
COUNT_SHIFT = 32
INDEX = (1 << COUNT_SHIFT) - 1
MORE, KEEP, ADD_SHIFT = 1, 2, 2     # of a line's op, as in grammar.py
MASK_BLOCK = 1024                   # tokens of a program of the Triton kernel
VARYING = ("longest", "last", "num_ends", "n", "nodes")  # numbers that serving changes: none of their values is worth a kernel of its own
ROOM = 1024                         # of a tensor that grows, at first
TWIN_AT_ONCE = 2**22                # tokens of a block of rows in the torch twin, whose scratch is 16 bytes each
_IDS = itertools.count(1)            # of tables: C++ remembers rows by them


class _Growing:
    """A tensor that grows at its end: `data` [room, ...], of which `size` rows are in use; the rest is `fill`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *width: int, fill: int = 0, room: int = 0):
        self.data, self.size, self.fill = torch.full((room or ROOM, *width), fill, dtype=dtype, device=device), 0, fill

    def reserve(self, size: int) -> None:
        """Room for so many rows."""
        room = len(self.data)
        if size > room:
            while size > room:
                room *= 2
            data = self.data.new_full((room, *self.data.shape[1:]), self.fill)
            data[: len(self.data)].copy_(self.data)
            self.data = data

    def append(self, items: torch.Tensor) -> None:
        self.reserve(self.size + len(items))
        self.data[self.size : self.size + len(items)].copy_(items)
        self.size += len(items)


class DeviceTables:
    """The tables of one vocabulary (`grammar.Tables`) on a device.

    All methods are called by one thread, the one that runs the steps, and act in stream order. States and tokens are int64 tensors on the device.
    """

    def __init__(self, tables: Any, device: torch.device | str, backend: str | None = None):
        """`backend`: "torch", "cpp" or "triton"; None goes by the device and by what is there."""
        self._tables, self.device, self.backend = weakref.ref(tables), torch.device(device), backend  # weak: a copy keeps no tables alive
        self.size, self._on_cpu = tables.vocab.size, self.device.type == "cpu"
        self._triton = backend == "triton" or backend is None and self.device.type == "cuda" and triton is not None
        self._map_stride = (self.size + 63) // 64 * 64
        grow = lambda dtype, *width, **options: _Growing(self.device, dtype, *width, **options)
        self._maps = grow(torch.int16, self._map_stride, room=4)            # [M, stride] int16
        self._vec, self._over_token, self._over_value = (grow(torch.int32) for _ in range(3))
        self._lines = grow(torch.int32, 4)                                  # [L, 4] int32: min, max, next, op
        self._states = grow(torch.int32, 5, fill=-1)                        # [S, 5] int32: map, vec, over, end, accept_from
        self._shapes, self._firsts, self._others = grow(torch.int32, 3), grow(torch.int32), grow(torch.int32)   # of maps, for C++: see cpu/mask.h
        ends = torch.tensor(tables.vocab.end_ids, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._ends = ends.to(self.device, non_blocking=True)
        self._chains, self._chain_tokens = grow(torch.int32, 2), grow(torch.int32)      # [S, 2] int32: start, length; length 0: none
        self._built = 0             # rows that are here
        self._chained = 0           # and chains
        self._exits, self._left = grow(torch.int32, fill=-1), 0     # [S] int32: where a state is left to, see `leave`; how many are here
        self._longest = 1           # lines of a value, at most
        self._widest = 0            # overrides of a row, at most
        self._classes = 1           # of a map, at most
        self._pointers, self._id = native.Grammars(), next(_IDS)
        self._locate()
        self.began_with = self.refresh()    # bytes

    @property
    def tables(self) -> Any:
        """What this is a copy of; None once that is gone, and with it the last grammar that could ask for more."""
        return self._tables()

    @property
    def version(self) -> tuple:
        """Equal as long as kernels would get the same arguments."""
        grown = (self._maps, self._vec, self._over_token, self._over_value, self._lines, self._states, self._chains, self._chain_tokens, self._exits)
        return *((one.data.data_ptr(), len(one.data)) for one in grown), self._longest, self._widest.bit_length(), self._classes

    def refresh(self) -> int:
        """Bring over what the host has appended since. Returns the bytes sent. Other threads may append meanwhile."""
        tables = self.tables
        if tables is None:
            return 0
        chains = tables.chains.since(self._chained)     # first: their rows are there already
        sent = self._bring_rows(tables) if len(tables.built) != self._built else 0
        if len(exits := tables.exits.since(self._left)):
            self._exits.reserve(int(exits[:, 0].max()) + 2)
            there = torch.from_numpy(exits.copy())
            there = (there.pin_memory() if self.device.type == "cuda" else there).to(self.device, non_blocking=True)
            self._exits.data.index_copy_(0, there[:, 0].long(), there[:, 1])
            self._left += len(exits)
        return sent + (self._bring_chains(tables, chains) if len(chains) else 0)

    def _bring_chains(self, tables: Any, chains: np.ndarray) -> int:
        """chains: [n, 3] state, start, length."""
        tokens = tables.chain_tokens.since(self._chain_tokens.size)
        buffer = torch.empty(chains.size + len(tokens), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        np.concatenate([chains.ravel(), tokens], out=buffer.numpy())
        chains_there, tokens_there = buffer.to(self.device, non_blocking=True).split([chains.size, len(tokens)])
        self._chain_tokens.append(tokens_there)
        self._chains.reserve(int(chains[:, 0].max()) + 2)
        self._chains.data.index_copy_(0, chains_there.view(-1, 3)[:, 0].long(), chains_there.view(-1, 3)[:, 1:])
        self._chained += len(chains)
        return buffer.nbytes

    def chains(self, states: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The forced text behind states [N]: (tokens [N, most] int64, how many of them [N] int64); behind those stands anything."""
        start, lens = self._chains.data[(states & INDEX).clamp(max=len(self._chains.data) - 1)].long().unbind(1)
        at = start[:, None] + torch.arange(most, device=self.device)
        return self._chain_tokens.data[at.clamp(max=len(self._chain_tokens.data) - 1)].long(), lens.clamp(max=most)

    def leave(self, states: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
        """The states [N] with which a step begins whose time for thinking is `over` [N] bool: those in which a model thinks are left."""
        to = self._exits.data[(states & INDEX).clamp(max=len(self._exits.data) - 1)].long()
        return torch.where(over & (to >= 0), to, states)

    def thinks(self, states: torch.Tensor) -> torch.Tensor:
        """Whether a model thinks in states [N]: [N] bool."""
        return self._exits.data[(states & INDEX).clamp(max=len(self._exits.data) - 1)] >= 0

    def _bring_rows(self, tables: Any) -> int:
        built = len(tables.built)
        rows = np.array(tables.built[self._built : built], np.int32)        # first: what they point to is there already
        maps = tables.maps[self._maps.size :]
        pools = (self._vec, self._over_token, self._over_value, self._lines)
        # The lines last: what points to one is appended after it
        news = [pool.since(mine.size) for pool, mine in zip((tables.vec, tables.over_token, tables.over_value, tables.lines), pools)]
        entries = tables.states.since(0)[rows]
        arrays = [rows, entries.ravel(), *(new.ravel() for new in news)]
        lens = [len(array) for array in arrays]
        words = sum(lens) + len(maps) * self._map_stride // 2
        buffer = torch.empty(words, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        host = buffer.numpy()
        np.concatenate(arrays, out=host[: sum(lens)])
        for target, classes in zip(host[sum(lens) :].view(np.int16).reshape(-1, self._map_stride), maps):
            target[: self.size], target[self.size :] = classes, 0
        which, entries_there, *parts, maps_there = buffer.to(self.device, non_blocking=True).split([*lens, words - sum(lens)])
        self._maps.append(maps_there.view(torch.int16).view(-1, self._map_stride))
        for mine, part in zip(pools, parts):
            mine.append(part.view(-1, *mine.data.shape[1:]))
        self._states.reserve(int(rows.max()) + 2)
        self._states.data.index_copy_(0, which.long(), entries_there.view(-1, 5))
        self._classes = max([self._classes, *(int(classes.max()) + 1 for classes in maps)])
        self._widest = max(self._widest, int((entries[:, 3] - entries[:, 2]).max()))
        if len(news[3]):
            last = np.flatnonzero(news[3][:, 3] & MORE == 0)                # of each value
            self._longest = max(self._longest, int(np.diff(last, prepend=-1).max()))
        if self._on_cpu:
            self._list_classes(tables)
            self._locate()
        self._built = built         # last: what an exception has interrupted is done again
        return buffer.nbytes

    def _list_classes(self, tables: Any) -> None:
        """The tokens of the classes of new maps, but the largest of each."""
        for classes, sizes in zip(tables.maps[self._shapes.size : self._maps.size], tables.class_sizes[self._shapes.size :]):
            sizes = sizes.copy()
            largest = int(sizes.argmax())
            tokens = np.flatnonzero(classes != largest)
            tokens = tokens[np.argsort(classes[tokens], kind="stable")]
            sizes[largest] = 0
            firsts = self._others.size + np.cumsum([0, *sizes])
            self._shapes.append(torch.tensor([[self._firsts.size, len(sizes), largest]], dtype=torch.int32))
            self._firsts.append(torch.from_numpy(firsts.astype(np.int32)))
            self._others.append(torch.from_numpy(tokens.astype(np.int32)))

    def _locate(self) -> None:
        """Where the tensors are, for C++."""
        tensors = (*(getattr(self, f"_{name}").data for name, _ in native.Grammars._fields_[:9]), self._ends)
        self._pointers = native.Grammars(*(tensor.data_ptr() for tensor in tensors), self._map_stride, len(self._states.data) - 1, self.size,
                                         len(self._ends), self._id)

    def has_row(self, states: torch.Tensor) -> torch.Tensor:
        """Whether the device has the rows of states [N]: [N] bool."""
        if library := self._native():
            states, out = states.contiguous(), torch.empty(states.shape, dtype=torch.bool)
            library.nano_has_row(self._pointers, states.data_ptr(), out.data_ptr(), len(states))
            return out
        return self._entries(states)[0] >= 0

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states after tokens, [N] each: DEAD where not allowed, for end ids, from DEAD and from a state without a row."""
        library = self._native()
        if not library and not self._triton:
            return self._advance(states, tokens)
        states, tokens, out = states.contiguous(), tokens.contiguous(), torch.empty_like(states, memory_format=torch.contiguous_format)
        if library:
            library.nano_advance(self._pointers, states.data_ptr(), tokens.data_ptr(), out.data_ptr(), len(states))
        elif len(states):
            _advance_kernel[(cdiv(len(states), 128),)](states, tokens, out, *self._arguments(), self.size, len(states), 128,
                                                       num_warps=4)
        return out

    def walk(self, roots: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """The states at the nodes of draft trees: [S, M]. Node 0 is the root, state roots[s]; node i is reached by tokens[s, i] from node
        parents[s, i] < i. roots [S]; tokens, parents [S, M]."""
        library, nodes = self._native(), tokens.shape[1]
        if not library and not self._triton:
            states = torch.full_like(tokens, DEAD)
            states[:, 0] = roots
            for i in range(1, nodes):
                states[:, i] = self._advance(states.gather(1, parents[:, i : i + 1])[:, 0], tokens[:, i])
            return states
        roots, tokens, parents = roots.contiguous(), tokens.contiguous(), parents.contiguous()
        out = torch.empty_like(tokens)
        if library:
            library.nano_walk(self._pointers, roots.data_ptr(), tokens.data_ptr(), parents.data_ptr(), out.data_ptr(), *tokens.shape)
        elif len(roots):
            _walk_kernel[(len(roots),)](roots, tokens, parents, out, *self._arguments(), self.size, nodes, max(pow2(nodes), 32),
                                        num_warps=1 if nodes <= 64 else 4)
        return out

    def mask(self, logits: torch.Tensor, rows: torch.Tensor | None, states: torch.Tensor) -> None:
        """-inf, in place, at every token that may not come next. End ids may where the text may end.

        logits [N, V'] fp32, contiguous, V' up to the vocabulary's size; rows [K] int64, distinct, or None: all in order; states [K]. Rows of a state
        without a row, and of DEAD, are left alone. ValueError for other logits."""
        n, width, library = states.numel(), logits.shape[1], self._native()
        if width > self.size or logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}: contiguous fp32 of up to {self.size} columns is what is masked")
        if not library and not self._triton:
            return self._mask(logits, rows, states)
        states, rows = states.contiguous(), None if rows is None else rows.contiguous()
        if library:
            library.nano_mask(self._pointers, logits.data_ptr(), width, None if rows is None else rows.data_ptr(), states.data_ptr(), n,
                              torch.get_num_threads())
        elif n:
            _mask_kernel[(n, cdiv(width, MASK_BLOCK))](logits, rows, states, self._ends, *self._arguments(), width, len(self._ends), MASK_BLOCK,
                                                       num_warps=8)

    def _arguments(self) -> tuple:
        """Of all Triton kernels, in their order."""
        tensors = (self._maps, self._vec, self._over_token, self._over_value, self._lines, self._states)
        return *(tensor.data for tensor in tensors), self._map_stride, len(self._states.data) - 1, self._longest

    def _native(self) -> Any:
        """The library, if C++ is what runs: not where there is none; then torch does."""
        return native.library() if self._on_cpu and self.backend in (None, "cpp") else None

    # ---- torch

    def _entries(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """map (-1: no row), vec, over, end, accept_from of states [N]: [N] int32 each."""
        return self._states.data[(states & INDEX).clamp(max=len(self._states.data) - 1)].unbind(1)

    def _line(self, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The line that holds of each value at a count, 0 if none does: int64."""
        at, found, go = values.long(), torch.zeros_like(values, dtype=torch.int64), torch.ones_like(values, dtype=torch.bool)
        for _ in range(self._longest):
            low, high, _, op = self._lines.data[at].unbind(-1)
            found = torch.where(go & (low <= counts) & (counts <= high), at, found)
            go = go & (op & MORE != 0)
            at = at + go.long()
        return found

    def _advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        which, vec, over, end, _ = self._entries(states)
        counts, inside = states >> COUNT_SHIFT, (which >= 0) & (tokens >= 0) & (tokens < self.size)
        token, last = tokens.clamp(0, self.size - 1), len(self._over_token.data) - 1
        low, high = over.long(), end.long()
        for _ in range(self._widest.bit_length()):                          # the first override that is not less
            middle = (low + high) // 2
            less = (low < high) & (self._over_token.data[middle.clamp(0, last)] < token)
            low, high = torch.where(less, middle + 1, low), torch.where(less, high, torch.minimum(middle, high))
        at = low.clamp(0, last)
        found = (low < end) & (self._over_token.data[at] == token)
        cls = self._maps.data[which.clamp(min=0).long(), token]
        value = torch.where(found, self._over_value.data[at], self._vec.data[(vec.long() + cls).clamp(min=0)])
        line = self._line(value, counts)
        _, _, to, op = self._lines.data[line].unbind(1)
        after = to.long() | torch.where(op & KEEP != 0, counts, 0) + (op >> ADD_SHIFT) << COUNT_SHIFT
        return torch.where(inside & (line > 0), after, DEAD)

    def _mask(self, logits: torch.Tensor, rows: torch.Tensor | None, states: torch.Tensor) -> None:
        block = max(1, TWIN_AT_ONCE // self.size)
        for start in range(0, len(states), block):
            here = states[start : start + block]
            forbidden = self._forbidden(here, logits.shape[1])
            if rows is None:
                logits[start : start + block].masked_fill_(forbidden, -torch.inf)
            else:
                at = rows[start : start + block]
                logits.index_copy_(0, at, logits[at].masked_fill_(forbidden, -torch.inf))

    def _forbidden(self, states: torch.Tensor, width: int) -> torch.Tensor:
        """[K, width] bool: the tokens to mask of states [K]."""
        which, vec, over, end, accept_from = self._entries(states)
        counts, device = (states >> COUNT_SHIFT)[:, None], self.device
        cls = vec.long().clamp(min=0)[:, None] + torch.arange(self._classes, device=device)                 # [K, C], beyond a row's own: never read
        good = self._line(self._vec.data[cls.clamp(max=len(self._vec.data) - 1)], counts) > 0
        allowed = torch.zeros(len(states), width + 1, dtype=torch.bool, device=device)                      # the last column is for what is none
        allowed[:, :width] = good.gather(1, self._maps.data[which.clamp(min=0).long(), :width].long())
        at = over.long()[:, None] + torch.arange(self._widest, device=device)                               # [K, W]
        mine, at = at < end[:, None], at.clamp(0, len(self._over_token.data) - 1)
        token = self._over_token.data[at].long()
        mine = mine & (self._line(self._over_value.data[at], counts) > 0)
        allowed.scatter_(1, torch.where(mine, token.clamp(max=width), width), True)
        ends = torch.where(accept_from[:, None] <= counts, self._ends.clamp(max=width), width)              # [K, E]
        allowed.scatter_(1, ends, True)
        return ~allowed[:, :width] & (which >= 0)[:, None]


# ---- Triton

@jit
def _line_kernel(lines, value, count, go, longest):
    """The line that holds of each value at a count, 0 if none does, or where not `go`."""
    found = value * 0
    for _ in range(longest):
        low, high, op = tl.load(lines + value * 4, go, 1), tl.load(lines + value * 4 + 1, go, 0), tl.load(lines + value * 4 + 3, go, 0)
        found = tl.where(go & (low <= count) & (count <= high), value, found)
        go = go & ((op & 1) != 0)
        value += 1
    return found


@jit
def _first_kernel(over_token, low, end, token, go):
    """The first override of low..end that is not less than a token."""
    high, left = end, tile_max(end - low, 0)
    while left > 0:
        middle = (low + high) // 2
        inside = go & (low < high)
        less = tl.load(over_token + middle, inside, 0) < token
        low, high = tl.where(inside & less, middle + 1, low), tl.where(inside & (less == 0), middle, high)
        left = left // 2
    return low


@jit(do_not_specialize=VARYING)
def _mask_kernel(logits, rows, states, ends, maps, vec, over_token, over_value, lines, entries, map_stride, last, longest, width, num_ends,
                 BLOCK: tl.constexpr):
    """One program per row and block of tokens. Overrides lie scattered among a row's tokens: each token looks for itself among those of its block,
    of which there are few, and nothing needs to be put back."""
    i = tl.program_id(0).to(tl.int64)
    state = tl.load(states + i)
    entry = entries + tl.minimum(state & 0xFFFFFFFF, last) * 5
    which, count = tl.load(entry), (state >> 32).to(tl.int32)
    if which >= 0:
        start = tl.program_id(1) * BLOCK
        token = start + tl.arange(0, BLOCK)
        inside = token < width
        cls = tl.load(maps + which.to(tl.int64) * map_stride + token, inside, 0).to(tl.int32)
        value = tl.load(vec + tl.load(entry + 1) + cls, inside, 0)
        low, end = tl.load(entry + 2), tl.load(entry + 3)
        if low < end:
            # Where those of the block begin and end, in one search
            edge = start + tl.arange(0, 2) * BLOCK
            found = _first_kernel(over_token, low + edge * 0, end + edge * 0, edge, edge >= 0)
            low, end = tile_min(found, 0), tile_max(found, 0)
            at = _first_kernel(over_token, low + token * 0, end + token * 0, token, inside)
            mine = inside & (at < end)
            mine = mine & (tl.load(over_token + at, mine, -1) == token)
            value = tl.where(mine, tl.load(over_value + at, mine, 0), value)
        allowed = _line_kernel(lines, value, count, inside, longest) > 0
        ending = tl.load(entry + 4) <= count
        for e in range(num_ends):
            allowed = allowed | (ending & (token == tl.load(ends + e)))
        if rows is not None:
            i = tl.load(rows + i)
        tl.store(logits + i * width + token, -float("inf"), inside & (allowed == 0))


@jit
def _step_kernel(state, token, go, maps, vec, over_token, over_value, lines, entries, map_stride, last, longest, size):
    """The states after tokens."""
    go = go & (token >= 0) & (token < size)
    entry = entries + tl.minimum(state & 0xFFFFFFFF, last) * 5
    which = tl.load(entry, go, -1)
    go = go & (which >= 0)
    end, count = tl.load(entry + 3, go, 0), (state >> 32).to(tl.int32)
    at = _first_kernel(over_token, tl.load(entry + 2, go, 0), end, token, go)
    mine = go & (at < end)
    mine = mine & (tl.load(over_token + at, mine, -1) == token)
    cls = tl.load(maps + which.to(tl.int64) * map_stride + token, go, 0).to(tl.int32)
    value = tl.where(mine, tl.load(over_value + at, mine, 0), tl.load(vec + tl.load(entry + 1, go, 0) + cls, go, 0))
    line = _line_kernel(lines, value, count, go, longest)
    to, op = tl.load(lines + line * 4 + 2, line > 0, 0), tl.load(lines + line * 4 + 3, line > 0, 0)
    after = tl.where((op & 2) != 0, count, 0) + (op >> 2)
    return tl.where(line > 0, to.to(tl.int64) | after.to(tl.int64) << 32, -1)


@jit(do_not_specialize=VARYING)
def _advance_kernel(states, tokens, out, maps, vec, over_token, over_value, lines, entries, map_stride, last, longest, size, n,
                    BLOCK: tl.constexpr):
    """One program per block of states."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state, token = tl.load(states + i, i < n, -1), tl.load(tokens + i, i < n, -1)
    after = _step_kernel(state, token, i < n, maps, vec, over_token, over_value, lines, entries, map_stride, last, longest, size)
    tl.store(out + i, after, i < n)


@jit(do_not_specialize=VARYING)
def _walk_kernel(roots, tokens, parents, out, maps, vec, over_token, over_value, lines, entries, map_stride, last, longest, size, nodes,
                 BLOCK: tl.constexpr):
    """One program per tree, level by level: as often as it is deep, all nodes at once whose parents are known."""
    tree = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    token = tl.load(tokens + tree * nodes + i, i < nodes, -1)
    parent = tl.load(parents + tree * nodes + i, (i > 0) & (i < nodes), 0).to(tl.int32)
    state = tl.where(i == 0, tl.load(roots + tree), -1)
    known = ((i == 0) | (i >= nodes)).to(tl.int32)
    left = tile_sum(1 - known, 0)
    while left > 0:
        now = (known == 0) & (tl.gather(known, parent, 0) > 0)
        above = tl.gather(state, parent, 0)
        after = _step_kernel(above, token, now, maps, vec, over_token, over_value, lines, entries, map_stride, last, longest, size)
        state, known = tl.where(now, after, state), known | now.to(tl.int32)
        left = tl.where(tile_min(known, 0) > 0, 0, left - 1)
    tl.store(out + tree * nodes + i, state, i < nodes)


_TYPES = {"logits": "*fp32", "maps": "*i16"} | dict.fromkeys(("rows", "states", "ends", "tokens", "parents", "roots", "out"), "*i64")
_TYPES |= dict.fromkeys(("vec", "over_token", "over_value", "lines", "entries"), "*i32")


def compile_all(target: str) -> dict:
    """This module's kernels compiled for a target of kernels.TARGETS, by name, as their first launches would; see kernels.compile_ahead."""
    done = {}
    for name, kernel, constants, warps in (
            ("mask", _mask_kernel, {"BLOCK": MASK_BLOCK}, 8), ("mask all rows", _mask_kernel, {"rows": None, "BLOCK": MASK_BLOCK}, 8),
            ("advance", _advance_kernel, {"BLOCK": 128}, 4), ("walk 64", _walk_kernel, {"BLOCK": 64}, 1),
            ("walk 128", _walk_kernel, {"BLOCK": 128}, 4)):
        types = {arg: "constexpr" if arg in constants else _TYPES.get(arg, "i32") for arg in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, (arg, kind) in enumerate(types.items()) if kind[0] == "*" or arg == "map_stride"}
        done[name] = triton.compile(kernels.ASTSource(kernel, types, constants, aligned), options={"num_warps": warps},
                                    target=kernels.GPUTarget(*kernels.TARGETS[target]))
    return done


def _demo() -> None:
    """The inside of a string of one to three letters, `[ab]{1,3}"`, by tables as grammar.py would make them."""
    def pool(*items):
        return SimpleNamespace(since=lambda start: np.array(items, np.int32)[start:])
    names = ["a", "b", "ab", '"', 'a"', "<end>"]
    classes = [np.zeros(6, np.int16), np.array([1, 1, 2, 3, 0, 0], np.int16)]
    lines = pool([1, 0, -1, 0], [0, 2, 0, KEEP | 1 << ADD_SHIFT], [0, 1, 0, KEEP | 2 << ADD_SHIFT], [1, 3, 1, 0], [0, 2, 1, 0])
    tables = type("Tables", (SimpleNamespace,), {})(
        vocab=SimpleNamespace(size=6, end_ids=(5,)), maps=classes, class_sizes=[np.bincount(c) for c in classes], vec=pool(0, 1, 2, 3, 0),
        lines=lines, over_token=pool(4), over_value=pool(4), states=pool([1, 0, 0, 1, 2**31 - 1], [0, 4, 1, 1, 0]), built=[0, 1],
        chains=pool(), exits=pool())
    device = DeviceTables(tables, "cpu")
    states = torch.tensor([*(count << COUNT_SHIFT for count in range(4)), 1, DEAD])
    logits = torch.zeros(len(states), 6)
    device.mask(logits, None, states)
    print(f"implementation: {'C++' if device._native() else 'torch'}; a string of 1 to 3 letters; what may come")
    for state, row in zip(states.tolist(), logits.tolist()):
        what = "dead: any, nobody asks" if state == DEAD else f"state {state & INDEX}, {state >> COUNT_SHIFT} letters"
        print(f"  {what:24s}", *(name for name, logit in zip(names, row) if logit == 0))
    found = device.walk(torch.tensor([0]), torch.tensor([[0, 2, 0, 3, 1, 5]]), torch.tensor([[0, 0, 1, 1, 2, 3]]))[0].tolist()
    show = ["dead" if state == DEAD else f"{state & INDEX} with {state >> COUNT_SHIFT}" for state in found]
    print(f"a draft tree: the root {show[0]}; ab {show[1]}; aba {show[2]}; ab\" {show[3]}; abab {show[4]}; ab\"<end> {show[5]}")
    print(f"a refresh with nothing new sends {device.refresh()} bytes")


if __name__ == "__main__":
    _demo()
