"""Memory: where KV lives, who owns which slot, and the device rows of the running requests.

A *slot* is the place of one token's keys and values, in every layer at once. The KV pool is nothing but slots; a request reaches its own
through a *row* of the slot table, position by position, so its KV may lie anywhere:

      row r of `table`   | 12 | 13 | 14 | 70 | 71 | 72 | 73 |  0 ...      slot of each position (column)
      row r of `tokens`  |  1 | 93 |  4 |  8 | 31 |  7 |  . |             id of each position
      `length[r]` = 6                                  ^ reserve          how many positions have their KV

Slots are handed out in *pages* of `page_size` consecutive slots. Page 0 is the padding page: no one owns it, writes that lead nowhere go to
slot 0, and nothing ever reads it for a live token.

Who owns a slot: exactly one of {free list, a tree node, a request row, limbo}. `SlotAllocator` keeps the first and the last; the scheduler
moves slots between the others and `Engine.check()` proves that the four partition the pool.

*Limbo* exists because a step runs on the device after the host has moved on. Slots and rows that the host gives up while a step still holds
them must not be reused before that step has committed: `free` parks them under the newest launched step, `commit(step)` releases them.

The device rows (`Rows`) hold what the next step needs. The host never writes them at will: the scheduler collects a step's changes in
`Writes`, and the engine applies them in stream order just before the step that needs them, so a step in flight never sees them move.

A page is shared whole or not at all, so a row that needs the beginning of another's page *copies* it. In the step in which it begins to, its
table leads to the other's slots; when that step has stored its KV, the slots are copied and the table leads to its own. So the other need not
have computed them before, only by then, and nothing is left over for a later step.

What the host knows of one step, the `Batch`, is a row of integers for each question that sampling, attention or the commit may ask.

Cost: one copy to the device (`Packed`, with all else that the step takes from the host) and three indexed ones, whatever the number of rows.

Stops holding: one pool, one kind of KV. Windows, recurrent state and a host tier come as further pools that the same slots address.
Source: paged KV is Kwon et al. 2023 (PagedAttention); the (row, position) table is SGLang's req_to_token pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

Req = Any  # a request: scheduler.Req, above


class KVPool:
    """Keys and values of every slot, one pair of tensors a layer. `num_slots` does not count the padding page."""

    def __init__(self, num_slots: int, page_size: int, num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str):
        shape = (num_slots + page_size, kv_heads, head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]  # [S, G, D] each
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]  # [S, G, D] each

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the keys and values of some slots to others, in stream order. [n] int64 each. Mutates k, v."""
        if len(source):
            for cache in (*self.k, *self.v):
                cache[target] = cache[source]

    @staticmethod
    def bytes_per_slot(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * kv_heads * head_dim * dtype.itemsize


class Limbo:
    """Things given up while a step holds them: kept under the newest launched step, released when that step commits."""

    def __init__(self):
        self.launched = self.committed = 0  # step numbers; equal: nothing is in flight
        self._waiting: list[tuple[int, np.ndarray]] = []

    def park(self, things: np.ndarray) -> None:
        self._waiting.append((self.launched, things))

    def commit(self, step: int) -> list[np.ndarray]:
        """Everything that no step still in flight can reach."""
        self.committed = max(self.committed, step)
        if not self._waiting:
            return []
        done = [things for at, things in self._waiting if at <= step]
        self._waiting = [(at, things) for at, things in self._waiting if at > step]
        return done

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def in_flight(self) -> bool:
        return self.launched > self.committed

    def contents(self) -> np.ndarray:
        return np.concatenate([things for _, things in self._waiting] or [np.empty(0, np.int32)])


class SlotAllocator:
    """The free list: a stack of page numbers. Pages 1..num_pages exist; page 0 is padding.

    >>> pool = SlotAllocator(num_slots=8, page_size=4)
    >>> pool.alloc(4)
    array([4, 5, 6, 7], dtype=int32)
    """

    def __init__(self, num_slots: int, page_size: int):
        if page_size < 1 or num_slots < page_size:
            raise ValueError(f"a pool of {num_slots} slots cannot hold one page of {page_size}")
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self._free = np.arange(1, self.num_pages + 1, dtype=np.int32)
        self._top = 0  # of the stack, which ends at the array's end: low pages go first
        self.available = self.capacity  # tokens that can be allocated now
        self._in_page = np.arange(page_size, dtype=np.int32)
        self._limbo = Limbo()

    @property
    def capacity(self) -> int:
        """Tokens the whole pool can hold."""
        return self.num_pages * self.page_size

    def alloc(self, num_slots: int) -> np.ndarray | None:
        """`num_slots` slots (whole pages), or None and no change where the free list is too short. [num_slots] int32."""
        num_pages = num_slots // self.page_size
        if num_pages * self.page_size != num_slots:
            raise ValueError(f"{num_slots} slots are not whole pages of {self.page_size}")
        if num_slots > self.available:
            return None
        pages = self._free[self._top:self._top + num_pages].copy()
        self._top += num_pages
        self.available -= num_slots
        return pages if self.page_size == 1 else np.add.outer(pages * self.page_size, self._in_page).reshape(-1)

    def free(self, slots: np.ndarray, *, held_by_step: bool = True) -> None:
        """Give back whole pages. `held_by_step=False` is for slots that no row in flight addresses (an evicted node's)."""
        if not len(slots):
            return
        pages = slots if self.page_size == 1 else slots[::self.page_size] // self.page_size
        if held_by_step and self._limbo.in_flight:
            self._limbo.park(pages)
        else:
            self._push(pages)

    def _push(self, pages: np.ndarray) -> None:
        if len(pages) > self._top:
            raise AssertionError(f"{len(pages)} pages freed beyond the pool: a page was freed twice")
        self._top -= len(pages)
        self._free[self._top:self._top + len(pages)] = pages
        self.available += len(pages) * self.page_size

    def launch(self, step: int) -> None:
        self._limbo.launched = step

    def commit(self, step: int) -> None:
        for pages in self._limbo.commit(step):
            self._push(pages)

    @property
    def in_limbo(self) -> bool:
        """Whether pages wait for a step in flight."""
        return bool(self._limbo)

    def free_pages(self) -> np.ndarray:
        """For the audit: pages on the free list."""
        return self._free[self._top:]

    def limbo_pages(self) -> np.ndarray:
        """For the audit: pages that wait for a step to commit."""
        return self._limbo.contents()


@dataclass
class Writes:
    """Changes to the device rows that one step needs. No cell is written twice: an indexed copy leaves open which value would win."""
    _tokens: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    _slots: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    _lengths: dict[int, int] = field(default_factory=dict)
    _copies: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> (row that it is of, slot that it is to be a copy of)

    def tokens(self, row: int, start: int, ids: np.ndarray) -> None:
        self._tokens.append((row, start, ids))

    def slots(self, row: int, start: int, slots: np.ndarray) -> None:
        self._slots.append((row, start, slots))

    def length(self, row: int, length: int) -> None:
        self._lengths[row] = length

    def copy(self, row: int, source: np.ndarray, target: np.ndarray) -> None:
        """Slots that the row got in this step take over the KV of others, when the step has stored its own; until then who leads to them
        leads to the others. What is itself such a copy yet to be made is copied from where it comes from."""
        for to, of in zip(target.tolist(), source.tolist()):
            self._copies[to] = row, self._copies.get(of, (row, of))[1]

    @property
    def copied(self) -> int:
        """Slots that are copied."""
        return len(self._copies)

    def forget(self, row: int) -> None:
        """The row was given up in the pass that wrote to it; it may be another request's before the pass ends."""
        if self._tokens or self._slots or self._lengths:
            self._tokens = [w for w in self._tokens if w[0] != row]
            self._slots = [w for w in self._slots if w[0] != row]
            self._copies = {to: (of_row, of) for to, (of_row, of) in self._copies.items() if of_row != row}
            self._lengths.pop(row, None)

    @property
    def rows(self) -> set[int]:
        """The rows that they change."""
        return {w[0] for w in self._tokens} | {w[0] for w in self._slots} | set(self._lengths)

    def arrays(self) -> list[np.ndarray]:
        """What `Rows.put` takes, as host arrays: (row, column, id) of tokens, (row, column, slot) of the table, (row, length). [n] ints each."""
        lengths = np.array(list(self._lengths.items()), np.int64).reshape(-1, 2)
        rows, columns, slots = self._flat(self._slots)
        slots = np.array([self._copies.get(slot, (0, slot))[1] for slot in slots.tolist()]) if self._copies else slots
        return [*self._flat(self._tokens), rows, columns, slots, lengths[:, 0], lengths[:, 1]]

    def late(self) -> list[np.ndarray]:
        """What follows once the step has stored its KV: (slot, copy) for `KVPool.copy`, (row, column, slot) for `Rows.point`. [n] ints each."""
        if not self._copies:
            return [np.empty(0, np.int64)] * 5
        rows, columns, slots = self._flat(self._slots)
        own = np.flatnonzero(np.isin(slots, list(self._copies)))
        return [np.array([of for _, of in self._copies.values()], np.int64), np.array(list(self._copies), np.int64),
                rows[own], columns[own], slots[own]]

    @staticmethod
    def _flat(writes: list[tuple[int, int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not writes:
            return (np.empty(0, np.int64),) * 3
        lens = np.fromiter((len(w[2]) for w in writes), np.int64, len(writes))
        rows = np.repeat(np.fromiter((w[0] for w in writes), np.int64, len(writes)), lens)
        ends = np.cumsum(lens)
        first = np.repeat(np.fromiter((w[1] for w in writes), np.int64, len(writes)) - (ends - lens), lens)
        return rows, first + np.arange(len(rows)), np.concatenate([w[2] for w in writes])


@dataclass
class Batch:
    """One step, as host integers. Rows lie in depth-first tree order."""
    step: int
    reqs: list[Req]
    rows: np.ndarray        # [B] i32 row of the device tables
    starts: np.ndarray      # [B] i32 first column computed, but for guesses in flight: then it may be up to `slack` further
    q_lens: np.ndarray      # [B] i32 columns computed, guesses included
    draft_lens: np.ndarray  # [B] i32 guesses at most that are verified behind the last known token
    slack: np.ndarray       # [B] i32
    limits: np.ndarray      # [B] i32 columns that have a slot
    store_from: np.ndarray  # [B] i32 columns before this one have their KV in the tree: what is recomputed there is not stored
    complete: np.ndarray    # [B] bool the step reaches the last known token
    samples: np.ndarray     # [B] bool and samples the next one
    owed_from: np.ndarray   # [B] i32 first prompt position whose logprob is owed; -1: none
    started: list[Req]      # those that got their row in this pass
    shared: list[tuple[int, int, int, int]]  # rows first..last-1 share the slots of columns start..end-1
    writes: Writes
    again: bool = False     # the same as the step before, a token later, with nothing to write

    @cached_property
    def kv_bounds(self) -> np.ndarray:
        """[B] i32 upper bounds of the columns that exist once the step has stored its KV."""
        return self.starts + self.q_lens + self.slack

    @cached_property
    def num_tokens(self) -> int:
        return int(self.q_lens.sum())


class Packed:
    """Host integers on their way to the device: laid side by side in one buffer by whoever plans a step, sent in one copy by whoever runs it.

    The buffer is pinned for a GPU, so that the copy waits for nothing, and written once, so that a step in flight may go on reading it.
    """

    def __init__(self, arrays: Sequence[np.ndarray], device: str):
        self.device, self.lens = device, [len(a) for a in arrays]
        self.buffer = torch.empty(sum(self.lens), dtype=torch.int64, pin_memory=device != "cpu")
        np.concatenate(arrays, out=self.buffer.numpy())
        self._sent: torch.Tensor | None = None

    def sent(self) -> torch.Tensor:
        """All of it on the device, in a row. [n] int64; sent once, however many steps read it."""
        if self._sent is None:
            self._sent = self.buffer.to(self.device, non_blocking=True)
        return self._sent

    def send(self) -> tuple[torch.Tensor, ...]:
        """The arrays on the device, in their order. [n] int64 each."""
        return self.sent().split(self.lens)


class Rows:
    """The device rows: one line of each tensor per running request. Row 0 is padding and belongs to no one.

    tokens [R, C] int32, table [R, C] int32, length [R] int32. Rows are taken and given back like slots: with a limbo.
    """

    def __init__(self, max_requests: int, columns: int, device: str):
        self.device, self.columns = device, columns
        self.tokens = torch.zeros(max_requests + 1, columns, dtype=torch.int32, device=device)  # [R, C] i32
        self.table = torch.zeros(max_requests + 1, columns, dtype=torch.int32, device=device)   # [R, C] i32
        self.length = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)           # [R] i32
        self._free = list(range(max_requests, 0, -1))
        self._limbo = Limbo()

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        if self._limbo.in_flight:
            self._limbo.park(np.array([row], np.int32))
        else:
            self._free.append(row)

    def launch(self, step: int) -> None:
        self._limbo.launched = step

    def commit(self, step: int) -> None:
        for rows in self._limbo.commit(step):
            self._free.extend(rows.tolist())

    @property
    def in_limbo(self) -> bool:
        """Whether rows wait for a step in flight."""
        return bool(self._limbo)

    def idle_rows(self) -> set[int]:
        """For the audit: rows on the free list or in limbo."""
        return set(self._free) | set(self._limbo.contents().tolist())

    def apply(self, writes: Writes) -> None:
        """Make one step's changes where no step runs, and so nothing is copied. Mutates tokens, table, length."""
        *now, _, _, late_rows, late_columns, late_slots = Packed([*writes.arrays(), *writes.late()], self.device).send()
        self.put(*now)
        self.point(late_rows, late_columns, late_slots)

    def put(self, token_rows: torch.Tensor, token_columns: torch.Tensor, ids: torch.Tensor, slot_rows: torch.Tensor, slot_columns: torch.Tensor,
            slots: torch.Tensor, length_rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """`apply`, of what `Writes.arrays` has sent ahead. [n] int64 each, on the device."""
        if len(ids):
            self.tokens[token_rows, token_columns] = ids.to(torch.int32)
        self.point(slot_rows, slot_columns, slots)
        if len(lengths):
            self.length[length_rows] = lengths.to(torch.int32)

    def point(self, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
        """Lead columns of rows to slots. [n] int64 each, on the device. Mutates table."""
        if len(slots):
            self.table[rows, columns] = slots.to(torch.int32)


def _demo() -> None:
    pool = SlotAllocator(num_slots=32, page_size=4)
    show = lambda: f"free {pool.free_pages()}  limbo {pool.limbo_pages()}"
    print("8 pages of 4 slots:        ", show())
    slots = pool.alloc(12)
    print("alloc(12) ->", slots, show())
    pool.launch(1)
    pool.free(slots[:8])
    print("freed while step 1 runs:   ", show())
    pool.commit(1)
    print("step 1 has committed:      ", show())
    rows, writes = Rows(max_requests=2, columns=8, device="cpu"), Writes()
    row = rows.alloc()
    writes.slots(row, 0, slots[:5])
    writes.tokens(row, 0, np.array([1, 93, 4, 8, 31], np.int32))
    writes.length(row, 5)
    rows.apply(writes)
    print(f"row {row}: table {rows.table[row].tolist()} tokens {rows.tokens[row].tolist()} length {int(rows.length[row])}")


if __name__ == "__main__":
    _demo()
