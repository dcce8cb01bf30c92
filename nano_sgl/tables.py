"""Tables: the rows of all grammars of a vocabulary, as arrays that a device can hold.

A row says what each of 50,000 or 130,000 tokens leads to, and there are thousands of rows. What they have in common is kept once:

    states   [map, vec, over..end, accept from]          one entry for each state, of any grammar
    maps     token -> class                              a few dozen, int16 [V], shared by many rows
    vec      class -> value                              a few numbers for each row
    over     token -> value                              the few tokens of a row that its map has in the wrong class
    lines    (min, max, next state, op)                  a value is one or more of these: while min <= count <= max, it leads there

Names. A *map* sorts tokens into *classes*, 0 for those that lead nowhere. A *value* is the index of its first line. *Pools* are arrays that grow
at their end. Two maps are *joined* into one whose classes are the pairs of theirs that occur.

Invariant. Everything is appended and nothing changes, but for a state's entry, once, when its row is built. So readers take no lock: they look at
`built`, the last thing that is written, and what it names is whole (masks.py brings it to the device).

Cost. A row takes 20 bytes, 4 for each class of its map, 8 for each override; a map 2 for each token, and 0.1 ms to join from two of 50,000. Where it
stops: a map has up to 32,768 classes, an int16.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .automaton import distinct
from .rules import INF, GrammarError
from .vocab import Vocab

COUNT_SHIFT = 32                # a state is index | count << 32
INDEX = (1 << COUNT_SHIFT) - 1
MORE, KEEP, ADD_SHIFT = 1, 2, 2  # of a line's op: another line follows; the count is kept; what is added to it (or to 0)
MAX_CLASSES = 1 << 15           # of a map
MAX_TABLE_BYTES = 256 << 20     # of a vocabulary's tables: from half of it on, new grammars begin new ones


class Row(NamedTuple):
    """What every token leads to: `value = over.get(token)`, else `vec[maps[map][token]]`. `over_tokens` int32, sorted."""
    map: int
    vec: np.ndarray             # int32 [classes]: index of the first line
    over_tokens: np.ndarray
    over_values: np.ndarray


class Pool:
    """An array that grows at its end. `array` is what is in use; `empty` are the items of the room behind it."""

    def __init__(self, *width: int, dtype=np.int32, empty: tuple | int = 0):
        self._data, self.size, self._empty = np.full((64, *width), empty, dtype), 0, empty

    @property
    def array(self) -> np.ndarray:
        return self._data[: self.size]

    @property
    def whole(self) -> np.ndarray:
        """With the room at its end: the same array until that is used up."""
        return self._data

    def more(self, number: int, column: int, values: np.ndarray | int) -> int:
        """So many items more, empty but for one column; where they begin."""
        start, end = self.size, self.size + number
        self._make_room(end)
        self._data[start:end, column] = values
        self.size = end                             # last: what is there is whole, for who reads without the lock
        return start

    def _make_room(self, size: int) -> None:
        while size > len(self._data):
            self._data = np.concatenate([self._data, np.full_like(self._data, self._empty)])

    def append(self, items: np.ndarray) -> int:
        """Where the items begin."""
        start, end = self.size, self.size + len(items)
        self._make_room(end)
        self._data[start:end] = items
        self.size = end
        return start

    def append_one(self, item: tuple) -> int:
        """Where it is."""
        if self.size == len(self._data):
            return self.append(np.array([item]))
        self._data[self.size] = item
        self.size += 1
        return self.size - 1

    def since(self, start: int) -> np.ndarray:
        """What was appended from `start` on; may be asked without the lock: what is being appended at this moment is not there yet."""
        size = self.size        # first: an array got later holds at least as much
        return self._data[start:size]


class Tables:
    """All that a device needs, for all grammars of a vocabulary. Everything is appended; nothing changes but a state's entry, once, when its row is
    built, and `habits`, which belong to the engine's thread.

    `maps` list of int16 [V], map 0 is all zero; `vec` int32 pool, values by class (class 0 is always "not allowed"); `over_token`, `over_value`
    int32 pools; `lines` int32 [:, 4] min, max, next state (index), op. A value is the index of its first line; 0 is never allowed.
    `states` int32 [:, 5] map (-1: no row yet), start in `vec`, start and end in `over_*`, the count from which it accepts (INF: never).
    """

    def __init__(self, vocab: Vocab):
        self.vocab = vocab
        self.maps = [np.zeros(vocab.size, np.int16)]
        self.class_sizes: list[np.ndarray] = [np.array([vocab.size])]
        self.vec, self.over_token, self.over_value = Pool(), Pool(), Pool()
        self.lines, self.states = Pool(4, empty=(0, INF, 0, 0)), Pool(5, empty=(-1, 0, 0, 0, INF))
        self.chains, self.chain_tokens, self.chain_of = Pool(3), Pool(), {}     # of forced text: jump.py's
        self.few: dict[int, list[np.ndarray | None]] = {}       # of a state and of those along its chain: all that may come, if it is few. jump.py's
        self.habits: dict[int, list[float]] = {}    # how far the chain of a state is followed: constraint.py's
        self.exits = Pool(2)                        # (state in which a model thinks, state in which it closes that), before the row is built
        self.lines.append(np.array([[1, 0, -1, 0]]))
        self.rows: list[Row | None] = []            # by state
        self.built: list[int] = []                  # the states whose rows are whole, in the order in which they became so

    @property
    def nbytes(self) -> int:
        """Bytes that a device copy needs."""
        numbers = self.vec.size + self.over_token.size + self.over_value.size + 4 * self.lines.size + 5 * self.states.size
        return 4 * numbers + 2 * len(self.maps) * self.vocab.size

    def check_size(self) -> None:
        """Raises GrammarError: they are too large."""
        if self.nbytes > MAX_TABLE_BYTES:
            raise GrammarError(f"the grammars need more than {MAX_TABLE_BYTES >> 20} MiB", "grammar")

    def add_states(self, number: int, accept_from: int | np.ndarray) -> int:
        """The first of so many new states, without rows. accept_from: of all, or of each."""
        self.rows += [None] * number
        return self.states.more(number, 4, accept_from)

    def add_map(self, classes: np.ndarray, sizes: np.ndarray | None = None) -> int:
        """`classes` by token, 0 for what is not allowed; `sizes`: how many tokens each has."""
        self.class_sizes.append(np.bincount(classes) if sizes is None else sizes)
        self.maps.append(classes.astype(np.int16, copy=False))
        if len(self.class_sizes[-1]) > MAX_CLASSES:
            raise GrammarError(f"a state of the grammar leads to more than {MAX_CLASSES} others", "grammar")
        return len(self.maps) - 1

    def add_row(self, state: int, row: Row) -> None:
        vec, over = self.vec.append(row.vec), self.over_token.append(row.over_tokens)
        self.over_value.append(row.over_values)
        self.states.array[state, :4] = row.map, vec, over, over + len(row.over_tokens)
        self.rows[state] = row
        self.built.append(state)                    # last: masks.py reads without the lock, and what is here must be whole

    def allowed(self, values: np.ndarray, count: int | np.ndarray) -> np.ndarray:
        """For each value the line that holds, 0 if none does. `count`: one, or one for each value."""
        lines = self.lines.array
        found, at = np.zeros_like(values), values
        while True:
            line = lines[at]
            found = np.where((line[:, 0] <= count) & (count <= line[:, 1]), at, found)
            if not (line[:, 3] & MORE).any():
                return found
            at = np.where(line[:, 3] & MORE, at + 1, 0)


def join_maps(a: np.ndarray, b: np.ndarray, classes_a: int, classes_b: int, walker=None) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Two maps as one: (classes [V], their sizes, of each class a * classes_b + b). Class 0 is for what is in class 0 of both. walker: by C++."""
    found = walker.join(a, b, classes_a, classes_b) if walker is not None else None
    if found is None:
        keys, classes = distinct(np.append(a.astype(np.int64) * classes_b + b, 0))
        classes = classes[:-1]                          # the last key is there for the sake of class 0
        found = classes.astype(np.int16 if len(keys) <= MAX_CLASSES else np.int32), np.bincount(classes, minlength=len(keys)), keys
    return found


def _demo() -> None:
    """Rows of a small vocabulary: inside a word of letters, and behind a number that a word may follow."""
    vocab = Vocab([b"a", b"b", b"ab", b"1", b"12", b"1a", None], [6])
    tables = Tables(vocab)
    inside, behind = (tables.add_states(1, accept_from) for accept_from in (0, 0))
    letters, digits = np.array([1, 1, 1, 0, 0, 0, 0], np.int16), np.array([0, 0, 0, 1, 1, 2, 0], np.int16)
    line = {state: tables.lines.append(np.array([[0, 0, state, 0]])) for state in (inside, behind)}
    none = np.zeros(0, np.int32)
    tables.add_row(inside, Row(tables.add_map(letters), np.array([0, line[inside]]), none, none))
    classes, sizes, keys = join_maps(letters, digits, 2, 3)
    vec = np.array([line[behind] if key % 3 == 1 else line[inside] if key else 0 for key in keys])
    tables.add_row(behind, Row(tables.add_map(classes, sizes), vec, none, none))
    for name, state in (("letters", inside), ("digits, letters", behind)):
        row = tables.rows[state]
        to = tables.lines.array[row.vec, 2][tables.maps[row.map]]
        print(f"{name:15s} state {state}, map {row.map}, classes {tables.maps[row.map].tolist()}, values {row.vec.tolist()}:",
              *(f"{(text or b'<end>').decode()}->{to[i]}" for i, text in enumerate(vocab.tokens) if to[i] >= 0))
    print(f"{tables.nbytes} bytes; the next of all states built: {tables.built}")


if __name__ == "__main__":
    _demo()
