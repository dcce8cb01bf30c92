"""Grammar: which tokens may come next, as a row of a table.

What the output may be is a set of rules over bytes (rules.py); a model emits tokens, each of which may begin or end in the middle of a word, a
number or a character. So the rules are run as one automaton over bytes, without a lexer, and a token is allowed if after its bytes *some*
completion exists. A state is the set of ways in which the text so far can be read, each a place in a piece of the rules (automaton.py)
and a stack of what comes after the piece:

    rules    list ::= "[" (list ("," list)*)? "]"           text  [[],[
    state 2  = { at "[", and below it  ("," list)* "]"  ("," list)* "]"     --"["-->  a state with one frame more
                 at "]", and below it  ("," list)* "]" }                    --"]"-->  4, after [[]     --"]]"-->  6, accepting

States are interned: a state is an integer, rolling back is forgetting one, and a request's whole memory of its grammar is that integer. The automaton
is deterministic and lazy: only states that texts reach are made, each when it is first met.

A *row* is what a token leads to, for all tokens. Most of it is a *template*: what becomes of the places in pieces, kept per vocabulary as a map
token -> class. The rest are *overrides*: the few tokens that leave a piece, read on along the stack.

    row of a state    map  (int16 [V], shared)  and  vec (class -> value)     for 49,000 tokens inside a string
                      over (sorted tokens -> value)                           for the 200 with a quote in them
    value             one or more lines (min, max, next state, what becomes of the count)

The count. A bounded repeat of characters, `[^"]{0,4096}`, is one state and not 4,096: the state says where in the repeat, and a number beside it how
many characters were begun. A line of a value holds while min <= count <= max. One repeat of a state uses the number (REGISTER in its
place); others write theirs into the state.

Ambiguity. Readings multiply, so what others cover is left out: of x{0,7} and x{0,8} over equal stacks the first, of two places in one repeat the
one that has come further, of two conditions the narrower. A row follows each position once, with one stack for all ways to come there.

Invariants. Every state has a completion over the bytes that tokens have. States, rows, maps and values never change and only grow, in one set of
Tables for all grammars of a vocabulary, so that a batch of different grammars is one gather. What has the same top and was pushed at the same time
is one stack.

Cost: a row that exists one list index; a new one 0.1 to 1 ms, 2 to 4 if a large template is new, too; hundreds if words of any length may be split
anywhere, `(\\w{1,20} ?){1,9}`. Where it stops: tables are given back only all at once (`Shared.full`: compile begins new ones, the old grammars keep
theirs); a grammar that can be read in more than MAX_READINGS ways at once, or takes MAX_ROW_S for a row, raises GrammarError when it gets there; a
token's text is taken to be its bytes, whatever stands before it.
Source: Tomita's graph-structured stacks (1985); tables over tokens after Willard and Louf (2023); tokens that need no look at the stack after
XGrammar (Dong et al. 2024).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from . import schema
from .automaton import Automaton, NodeSet, Template, distinct
from .nodes import COMPARED, DONE, NEVER, Stacks, normalize
from .rules import Byte, Cat, GrammarError, Ref, Repeat, Rules, tick, time_limit
from .vocab import Vocab

MAX_READINGS = 1000             # configurations of one state
MAX_FOLLOWED = 3000             # configurations followed for one row
MAX_GRAMMAR_STATES = 50_000
MAX_TABLE_BYTES = 256 << 20     # of a vocabulary's tables, templates not counted: then `Shared.full`
MAX_TEMPLATE_BYTES = 96 << 20
MAX_OVERRIDES = 4096            # of a row: one with more gets a map of its own
MAX_FORCED = 1024               # bytes that `forced` looks ahead, and readings that it follows
MAX_PLACES = 400_000            # in the rules, that a grammar's states and stacks hold: some 450 bytes each
MAX_ROW_S = 3.0                 # of a row: who waits for one waits with all that share its tables
MAX_BUILD_S, USUAL_ROW_S = 10.0, 0.005  # CPU seconds of all rows of a grammar, beside what rows usually take
DENSE = 768                     # tokens from which a template is worth a map
MAX_JOINT = 3                   # templates in one map
INF = (1 << 31) - 1
COUNT_SHIFT = 32                # a state is index | count << 32
INDEX = (1 << COUNT_SHIFT) - 1
REGISTER = -1                   # in place of a count: the number beside the state; -1 - k: k more than that
MORE, KEEP, ADD_SHIFT = 1, 2, 2  # of a line's op: another line follows; the count is kept; what is added to it (or to 0)


class Row(NamedTuple):
    """What every token leads to: `value = over.get(token)`, else `vec[maps[map][token]]`. `over_tokens` int32, sorted."""
    map: int
    vec: np.ndarray             # int32 [classes]: index of the first line
    over_tokens: np.ndarray
    over_values: np.ndarray


class Pool:
    """An array that grows at its end. `array` is what is in use."""

    def __init__(self, *width: int, dtype=np.int32):
        self._data, self.size = np.zeros((64, *width), dtype), 0

    @property
    def array(self) -> np.ndarray:
        return self._data[: self.size]

    def append(self, items: np.ndarray) -> int:
        """Where the items begin."""
        start = self.size
        while start + len(items) > len(self._data):
            self._data = np.concatenate([self._data, np.zeros_like(self._data)])
        self._data[start : start + len(items)] = items
        self.size += len(items)
        return start

    def since(self, start: int) -> np.ndarray:
        """What was appended from `start` on; may be asked without the lock: what is being appended at this moment is not there yet."""
        size = self.size        # first: an array got later holds at least as much
        return self._data[start:size]


class Tables:
    """All that a device needs, for all grammars of a vocabulary. Everything is appended; nothing changes but a state's entry, once, when its row is
    built.

    `maps` list of int16 [V], map 0 is all zero; `vec` int32 pool, values by class (class 0 is always "not allowed"); `over_token`, `over_value`
    int32 pools; `lines` int32 [:, 4] min, max, next state (index), op. A value is the index of its first line; 0 is never allowed.
    `states` int32 [:, 5] map (-1: no row yet), start in `vec`, start and end in `over_*`, the count from which it accepts (INF: never).
    """

    def __init__(self, vocab: Vocab):
        self.vocab = vocab
        self.maps = [np.zeros(vocab.size, np.int16)]
        self.class_sizes: list[np.ndarray] = [np.array([vocab.size])]
        self.vec, self.over_token, self.over_value = Pool(), Pool(), Pool()
        self.lines, self.states = Pool(4), Pool(5)
        self.lines.append(np.array([[1, 0, -1, 0]]))
        self.rows: list[Row | None] = []            # by state
        self.built: list[int] = []                  # the states whose rows are whole, in the order in which they became so

    @property
    def nbytes(self) -> int:
        """Bytes that a device copy needs."""
        pools = (self.vec, self.over_token, self.over_value, self.lines, self.states)
        return sum(pool.array.nbytes for pool in pools) + len(self.maps) * self.maps[0].nbytes

    def add_state(self, accept_from: int) -> int:
        self.rows.append(None)
        return self.states.append(np.array([[-1, 0, 0, 0, accept_from]]))

    def add_map(self, classes: np.ndarray) -> int:
        """`classes` by token, 0 for what is not allowed."""
        self.class_sizes.append(np.bincount(classes))
        self.maps.append(classes.astype(np.int16))
        if len(self.class_sizes[-1]) > 1 << 15:
            raise GrammarError("a state of the grammar leads to more than 32,768 others", "grammar")
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


class Shared:
    """What the grammars of a vocabulary have in common. One lock guards all that is written; rows that exist are read without it."""

    def __init__(self, vocab: Vocab):
        self.automaton, self.tables, self.lock = Automaton(vocab), Tables(vocab), threading.RLock()
        self._maps: dict[tuple[int, ...], tuple[int, list[tuple[int, ...]]]] = {}

    @property
    def full(self) -> bool:
        """Whether it is time to begin anew: `compile` does so for the next grammar; the old ones keep these."""
        automaton = self.automaton
        return self.tables.nbytes > MAX_TABLE_BYTES // 2 or len(automaton.members) > 20_000 or len(automaton.nodes.keys) > 1_000_000

    def map_of(self, templates: list[Template]) -> tuple[int, list[tuple[int, ...]]]:
        """(map, for each of its classes the class in each template, 0: not in it)."""
        key = tuple(t.number for t in templates)
        if key not in self._maps and len(templates) == 1:
            classes, split = np.zeros(self.tables.vocab.size, np.int32), [(cls,) for cls in range(len(templates[0].classes) + 1)]
            classes[templates[0].tokens] = templates[0].cls + 1
            self._maps[key] = self.tables.add_map(classes), split
        elif key not in self._maps:
            classes = np.zeros(self.tables.vocab.size, np.int64)
            split = [(0,) * len(templates)]         # class 0 is for tokens that are in no template
            for i, t in sorted(enumerate(templates), key=lambda one: -one[1].tokens.size):
                width = len(t.classes)
                values, cls = distinct(classes[t.tokens] * width + t.cls)
                classes[t.tokens] = cls + len(split)
                split += [(*old[:i], value % width + 1, *old[i + 1 :]) for value in values for old in [split[value // width]]]
            used = np.bincount(classes, minlength=len(split)) > 0       # not those of which all tokens went on into others
            used[0] = True
            classes, split = (np.cumsum(used) - 1)[classes], [one for one, is_used in zip(split, used) if is_used]
            self._maps[key] = self.tables.add_map(classes), split
        return self._maps[key]


# ------------------------------------------------------------------------------------------------------------------------- grammars

def compile(kind: str, text, vocab: Vocab, *, whitespace: str = "fixed", deadline: float | None = None) -> Grammar:
    """A grammar of any kind that schema.py knows. Raises GrammarError, which names what is refused and where; so it does for what is not done by
    `deadline` (time.monotonic)."""
    with time_limit(deadline):
        return compile_rules(schema.rules(kind, text, whitespace=whitespace), vocab)


def compile_rules(rules: Rules, vocab: Vocab) -> Grammar:
    """A grammar from rules. No row is built yet. Raises GrammarError: too large, or nothing matches it."""
    shared = vocab.shared
    if shared is None or shared.full:
        shared = vocab.shared = Shared(vocab)
    with shared.lock, time_limit(None, shared.lock):
        return Grammar(shared, rules)


class Grammar:
    """An automaton over tokens. States are integers: index of the row in `tables`, and a count (`split`). `start` is the first.

    Made by `compile`. All methods may be called from any thread. Those that may build rows raise GrammarError if the grammar outgrows its bounds.
    """

    def __init__(self, shared: Shared, rules: Rules):
        self.vocab, self.tables, self.shared = shared.tables.vocab, shared.tables, shared
        self._automaton, self._nodes = shared.automaton, shared.automaton.nodes
        self._rules, start = normalize(self._nodes, rules)
        if start == NEVER:
            raise GrammarError("the grammar matches nothing that the model's tokens can write", "grammar", rules.start)
        self._cut: dict[int, int] = {}                              # rule -> its node, cut into pieces
        self._first: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self._stacks = Stacks(self._nodes)
        self._follow: dict[int, int] = {}
        self._sets: list[tuple[bool, tuple]] = []                   # set -> (may end, configurations (q, stack, loop, count))
        self._places, self._build_s = 0, 0.0
        self._set_ids: dict[tuple, int] = {}
        self._loops: list[tuple[int, int, int]] = [(-1, 1, 0)]      # loop -> (state between items, low, high); 0 is none
        self._loop_ids: dict[tuple, int] = {}
        self._values: list[tuple] = [()]                            # value -> lines (min, max, set)
        self._value_ids: dict[tuple, int] = {(): 0}
        self._joined: dict[tuple[int, int], int] = {}
        self._entries: dict[int, int] = {0: 0}                      # value -> index of its first line in the tables
        self._state_ids: dict[tuple, int] = {}
        self._configs: dict[int, tuple] = {}                        # state -> its configurations
        self._masks: dict[int, np.ndarray] = {}
        done = self._stacks.of(frozenset((DONE,)))
        self.start = self._pack(self._closure(self._stacks.push(self._nodes.cut(start), done)))

    # ---- what a reader came for

    @property
    def places(self) -> int:
        """What it holds of memory beside its tables: some 450 bytes each."""
        return self._places + self._stacks.places

    @staticmethod
    def split(state: int) -> tuple[int, int]:
        """(index of the row, count)."""
        return state & INDEX, state >> COUNT_SHIFT

    def row(self, state: int) -> Row:
        """The state's row; built if it is not there."""
        index = state & INDEX
        row = self.tables.rows[index]
        if row is None:
            with self.shared.lock:
                row = self.tables.rows[index]
                if row is None:
                    if self._build_s > MAX_BUILD_S:
                        raise GrammarError(f"the grammar is too ambiguous: its states have taken more than {MAX_BUILD_S:g} s", "grammar")
                    began = time.thread_time()
                    try:
                        with time_limit(time.monotonic() + MAX_ROW_S):
                            row = _RowBuilder(self, index).build()
                    finally:
                        self._build_s += max(time.thread_time() - began - USUAL_ROW_S, 0.0)
                    self.tables.add_row(index, row)
        return row

    def mask(self, state: int) -> np.ndarray:
        """int32 [ceil(V / 32)]: bit t % 32 of word t // 32 is set if token t may come next. End ids are allowed where the text may end."""
        mask = self._masks.get(state)
        if mask is None:
            row, count = self.row(state), state >> COUNT_SHIFT
            allowed = np.zeros((self.vocab.size + 31) // 32 * 32, bool)
            allowed[: self.vocab.size] = (self.tables.allowed(row.vec, count) > 0)[self.tables.maps[row.map]]
            allowed[row.over_tokens] |= self.tables.allowed(row.over_values, count) > 0
            if self.is_accepting(state):
                allowed[list(self.vocab.end_ids)] = True
            mask = np.packbits(allowed, bitorder="little").view(np.int32)
            if len(self._masks) >= 512:
                self._masks.clear()
            self._masks[state] = mask
        return mask

    def step(self, state: int, token: int) -> int | None:
        """The state after a token; None if it is not allowed, or is no text (an end id)."""
        row, count = self.row(state), state >> COUNT_SHIFT
        if not 0 <= token < self.vocab.size:
            return None
        at = int(np.searchsorted(row.over_tokens, token))
        if at < len(row.over_tokens) and row.over_tokens[at] == token:
            value = int(row.over_values[at])
        else:
            value = int(row.vec[self.tables.maps[row.map][token]])
        lines = self.tables.lines.array
        while True:
            low, high, to, op = lines[value].tolist()
            if low <= count <= high:
                return to | ((count if op & KEEP else 0) + (op >> ADD_SHIFT)) << COUNT_SHIFT
            if not op & MORE:
                return None
            value += 1

    def is_accepting(self, state: int) -> bool:
        """Whether the text may end here."""
        return int(self.tables.states.array[state & INDEX, 4]) <= state >> COUNT_SHIFT

    def forced(self, state: int) -> tuple[bytes, int]:
        """(the bytes that must follow, up to a choice or a possible end, state after them); at most MAX_FORCED."""
        with self.shared.lock:
            now, text, readings = self._unpack(state), bytearray(), 0
            while len(text) < MAX_FORCED and readings < 4 * MAX_FORCED and not self._may_end(now):
                readings += sum(len(self._automaton.members[q]) + len(self._stacks.frames[stack]) for q, stack, _, _ in self._sets[now][1])
                mask = self._alive(now)
                if mask.bit_count() != 1:
                    break
                text.append(mask.bit_length() - 1)
                now = self._advance(now, text[-1])
            return bytes(text), self._pack(now) if text else state

    def step_bytes(self, state: int, text: bytes) -> int | None:
        """The state after some bytes, None if no completion begins so."""
        with self.shared.lock:
            now = self._unpack(state)
            for byte in text:
                now = self._advance(now, byte)
                if now is None:
                    return None
            return self._pack(now)

    def edges(self, state: int) -> list[tuple[int, int]]:
        """(next state, number of tokens that lead there), the most likely first, if all tokens are equally so."""
        row, count, tables = self.row(state), state >> COUNT_SHIFT, self.tables
        sizes = tables.class_sizes[row.map].copy()
        np.subtract.at(sizes, tables.maps[row.map][row.over_tokens], 1)
        found: dict[int, int] = {}
        for values, numbers in ((row.vec, sizes), (row.over_values, np.ones(len(row.over_values), np.int64))):
            for line, number in zip(tables.allowed(values, count).tolist(), numbers.tolist()):
                if line and number:
                    _, _, to, op = tables.lines.array[line].tolist()
                    to |= ((count if op & KEEP else 0) + (op >> ADD_SHIFT)) << COUNT_SHIFT
                    found[to] = found.get(to, 0) + number
        return sorted(found.items(), key=lambda item: -item[1])

    # ---- stacks

    def _firsts(self, node: int) -> list[tuple[int, tuple[int, ...]]]:
        """(leaf, frames that lie below it, the lowest first) for each leaf that the node may begin with. Without recursion: chains are long."""
        work = [node]
        while work:
            tick()
            if work[-1] in self._first:
                work.pop()
                continue
            needs = [part for part in self._heads(work[-1]) if part not in self._first]
            if needs:
                work += needs
            else:
                top = work.pop()
                self._first[top] = self._firsts_of(top)
        return self._first[node]

    def _heads(self, node: int) -> list[int]:
        """The parts whose firsts are the node's."""
        kind, *parts = self._nodes.keys[node]
        if kind == "ref":
            if parts[0] not in self._cut:
                self._cut[parts[0]] = self._nodes.cut(self._rules.get(parts[0], NEVER))
            return [self._cut[parts[0]]]
        if kind == "cat":
            stop = next((i for i, part in enumerate(parts) if not self._nodes.nullable[part]), len(parts))
            return parts[: stop + 1]
        return parts if kind == "or" else parts[:1] if kind == "rep" else []

    def _firsts_of(self, node: int) -> list[tuple[int, tuple[int, ...]]]:
        kind, *parts = self._nodes.keys[node]
        if kind in ("text", "counted"):
            return [(node, ())]
        found = {}
        for i, part in enumerate(self._heads(node)):
            rest = ()
            if kind == "cat" and i + 1 < len(parts):
                rest = (self._nodes.cat(parts[i + 1 :]),)
            elif kind == "rep" and parts[2] != 1:
                rest = (self._nodes.rep(part, max(parts[1] - 1, 0), None if parts[2] is None else parts[2] - 1),)
            found.update(((leaf, rest + frames), None) for leaf, frames in self._first[part])
        if len(found) > MAX_READINGS:
            raise GrammarError(f"the grammar is too ambiguous: more than {MAX_READINGS} ways to begin", "grammar")
        return list(found)

    def _closure(self, stack: int) -> int:
        """The set of what may come when everything above the stack has ended."""
        found = self._follow.get(stack)
        if found is not None:
            return found
        seen, work = set(), set(self._stacks.frames[stack])
        below: dict[int, set] = {}                  # frame -> what lies below it, one stack for all ways to come here, or they would multiply
        while work:
            item = work.pop()
            seen.add(item)
            if item != DONE:
                frame, rest = item
                below.setdefault(frame, set()).update(self._stacks.frames[rest])
                if self._nodes.nullable[frame]:
                    work |= self._stacks.frames[rest] - seen
        configs = []
        for frame, rest in below.items():
            base = self._stacks.of(frozenset(rest))
            for leaf, frames in self._firsts(frame):
                top = base
                for pushed in frames:
                    top = self._stacks.push(pushed, top)
                configs.append(self._begin(leaf, top))
        self._follow[stack] = found = self._set(DONE in seen, configs)
        return found

    def _begin(self, leaf: int, stack: int) -> tuple[int, int, int, int]:
        kind, node, *bounds = self._nodes.keys[leaf]
        if kind == "text":
            return self._automaton.state((node,)), stack, 0, 0
        q = self._automaton.state((self._nodes.rep(node, 0, None),))
        key = (q, *bounds)
        if key not in self._loop_ids:
            self._loop_ids[key] = len(self._loops)
            self._loops.append(key)
        return q, stack, self._loop_ids[key], 0

    # ---- sets of configurations

    def _set(self, may_end: bool, configs: Iterable[tuple]) -> int:
        merged: dict[tuple[int, int, int], int] = {}
        for q, stack, loop, count in configs:
            other = merged.setdefault((q, loop, count), stack)
            if other != stack:
                merged[q, loop, count] = self._stacks.of(self._stacks.frames[other] | self._stacks.frames[stack])
        if len(merged) > 1 and any(key[1] for key in merged):
            merged = self._uncovered(merged)
        key = may_end, frozenset((q, stack, loop, count) for (q, loop, count), stack in merged.items())
        found = self._set_ids.get(key)
        if found is None:
            if len(merged) > MAX_READINGS:
                raise GrammarError(f"the grammar is too ambiguous: more than {MAX_READINGS} readings of a text", "grammar")
            found = self._set_ids[key] = len(self._sets)
            self._sets.append((may_end, tuple(sorted(key[1]))))
            self._places += len(merged) + 1
            if self.places > MAX_PLACES:
                raise GrammarError(f"the grammar is too ambiguous: its states hold more than {MAX_PLACES} places in its rules", "grammar")
            tick()
        return found

    def _uncovered(self, merged: dict[tuple[int, int, int], int]) -> dict[tuple[int, int, int], int]:
        """Without the places in a repeat that have come further than others, which may go on in the same ways and longer."""
        enough: dict[tuple[int, int], list[int]] = {}               # stacks of those that need no more turns
        kept = {}
        for (q, loop, count), stack in sorted(merged.items()):
            if loop and count >= 0:
                before = enough.setdefault((q, loop), [])
                if any(self._stacks.covers(other, stack) for other in before):
                    continue
                if count >= self._loops[loop][1] and len(before) < COMPARED:
                    before.append(stack)
            kept[q, loop, count] = stack
        return kept

    def _union(self, a: int, b: int) -> int:
        if a == b:
            return a
        (end_a, configs_a), (end_b, configs_b) = self._sets[a], self._sets[b]
        return self._set(end_a or end_b, configs_a + configs_b)

    def _between(self, q: int, loop: int, count: int) -> bool:
        """Whether a counted repeat may end here, by a count that is known."""
        between, low, _ = self._loops[loop]
        return q == between and count >= low

    def _pack(self, which: int) -> int:
        """The state of a set whose counts are all known."""
        index, _, add = self._state(which)
        return index | add << COUNT_SHIFT

    def _state(self, which: int) -> tuple[int, bool, int]:
        """(index of the state, whether the count is kept, what is added to it, or to 0) for a set."""
        may_end, configs = self._sets[which]
        keep, add, chosen = False, 0, None
        counted = [config for config in configs if config[2]]
        if counted:
            chosen = min(counted, key=lambda c: (c[3] >= 0, -self._loops[c[2]][2], c))
            keep, add = chosen[3] < 0, -1 - chosen[3] if chosen[3] < 0 else chosen[3]
        rest = [config for config in configs if config != chosen]
        accept_from = 0 if may_end or any(self._ends_after(c) for c in rest if self._between(c[0], c[2], c[3])) else INF
        if chosen:
            between, low, _ = self._loops[chosen[2]]
            if accept_from and chosen[0] == between and self._ends_after(chosen):
                accept_from = low
            rest.append((*chosen[:3], REGISTER))
        key = accept_from, frozenset(rest)
        index = self._state_ids.get(key)
        if index is None:
            if len(self._state_ids) >= MAX_GRAMMAR_STATES or self.tables.nbytes > MAX_TABLE_BYTES:
                raise GrammarError(f"the grammar needs more than {MAX_GRAMMAR_STATES} states or {MAX_TABLE_BYTES >> 20} MiB", "grammar")
            index = self._state_ids[key] = self.tables.add_state(accept_from)
            self._configs[index] = tuple(sorted(rest))
        return index, keep, add

    def _ends_after(self, config: tuple) -> bool:
        return self._sets[self._closure(config[1])][0]

    def _unpack(self, state: int) -> int:
        """A state as a set whose counts are all known."""
        index, count = self.split(state)
        may_end = int(self.tables.states.array[index, 4]) == 0
        return self._set(may_end, [(*c[:3], count if c[3] == REGISTER else c[3]) for c in self._configs[index]])

    # ---- byte by byte

    def _waiting(self, which: int) -> list[tuple[int, int, int, int]]:
        """The configurations that may read a byte, those behind a counted repeat that may end here included."""
        configs = list(self._sets[which][1])
        for q, stack, loop, count in self._sets[which][1]:
            if self._between(q, loop, count):
                configs += self._sets[self._closure(stack)][1]
        return [c for c in configs if not (c[0] == self._loops[c[2]][0] and c[3] >= self._loops[c[2]][2])]

    def _may_end(self, which: int) -> bool:
        may_end, configs = self._sets[which]
        return may_end or any(self._between(q, loop, count) and self._ends_after((q, stack)) for q, stack, loop, count in configs)

    def _alive(self, which: int) -> int:
        mask = 0
        for config in self._waiting(which):
            self._automaton.expand(config[0])
            mask |= self._automaton.alive[config[0]]
        return mask

    def _advance(self, which: int, byte: int) -> int | None:
        may_end, configs = False, []
        for q, stack, loop, count in self._waiting(which):
            to = self._automaton.expand(q).get(byte)
            if to is None:
                continue
            if loop:
                configs.append((to, stack, loop, count + (q == self._loops[loop][0])))
                continue
            if self._automaton.goes_on[to]:
                configs.append((to, stack, 0, 0))
            if self._automaton.accepts[to]:
                end, more = self._sets[self._closure(stack)]
                may_end, configs = may_end or end, configs + list(more)
        return self._set(may_end, configs) if configs or may_end else None

    # ---- values

    def _value(self, lines: tuple) -> int:
        found = self._value_ids.get(lines)
        if found is None:
            found = self._value_ids[lines] = len(self._values)
            self._values.append(lines)
        return found

    def _join(self, a: int, b: int) -> int:
        """Both at once: where both hold, the union of their sets."""
        if a == b or not a or not b:
            return a or b
        key = (a, b) if a < b else (b, a)
        found = self._joined.get(key)
        if found is None:
            both = self._values[a] + self._values[b]
            cuts = sorted({low for low, _, _ in both} | {high + 1 for _, high, _ in both})
            lines: list[tuple[int, int, int]] = []
            for low, above in zip(cuts, cuts[1:]):
                sets = [which for least, most, which in both if least <= low and above - 1 <= most]
                if sets:
                    which = sets[0] if len(sets) == 1 else self._union(*sets)
                    if lines and lines[-1][1:] == (low - 1, which):
                        low = lines.pop()[0]
                    lines.append((low, above - 1, which))
            found = self._joined[key] = self._value(tuple(lines))
        return found

    def _entry(self, value: int) -> int:
        """The value in the tables: the index of its first line. Makes the states that it leads to."""
        found = self._entries.get(value)
        if found is None:
            lines = []
            for i, (low, high, which) in enumerate(self._values[value], start=1):
                index, keep, add = self._state(which)
                lines.append((low, high, index, add << ADD_SHIFT | KEEP * keep | MORE * (i < len(self._values[value]))))
            found = self._entries[value] = self.tables.lines.append(np.array(lines))
        return found


# ----------------------------------------------------------------------------------------------------------------------------- rows

class _RowBuilder:
    """One row. Places in pieces are followed from the tree's root, and where a piece ends, what follows it from there, wave by wave.

    Behind the repeat that the state's count belongs to, everything holds for some counts only: `xs` are, by position, the characters of that repeat
    that the token has begun there, so low <= count + x <= high; -1: holds always.
    """

    def __init__(self, grammar: Grammar, index: int):
        self.grammar, self.automaton, self.tables = grammar, grammar._automaton, grammar.tables
        self.configs = grammar._configs[index]
        registers = [c[2] for c in self.configs if c[3] == REGISTER]
        self.low, self.high = grammar._loops[registers[0]][1:] if registers else (0, 0)
        self.dense: list[tuple[Template, list[int]]] = []
        self.sparse: list[tuple[np.ndarray, np.ndarray]] = []
        self.followed = self.begun = 0              # readings, and positions where they begin
        self.pending: dict[tuple, list[tuple[int, NodeSet, np.ndarray | None]]] = {}    # (q, loop, count) -> (stack, positions, xs)
        self.done: dict[tuple, list[tuple[int, NodeSet, np.ndarray | None]]] = {}
        if self.automaton.template_bytes > MAX_TEMPLATE_BYTES:
            self.automaton.root.templates.clear()
            self.automaton.template_bytes = 0

    def build(self) -> Row:
        grammar, root = self.grammar, self.automaton.root
        for config in self.configs:
            q, stack, loop, count = config
            self._later([config], root, None)
            if loop and q == grammar._loops[loop][0] and (count == REGISTER or grammar._between(q, loop, count)):
                self._later(self._after(stack), root, np.zeros(1, np.int32) if count == REGISTER else None)
        while self.pending:
            wave, self.pending = self.pending, {}
            for (q, loop, count), sources in wave.items():
                for stack, starts, xs in self._fresh((q, loop, count), sources):
                    self.followed += 1 + len(self.grammar._stacks.frames[stack]) // 16
                    if self.followed > MAX_FOLLOWED:
                        raise GrammarError(f"the grammar is too ambiguous: more than {MAX_FOLLOWED} readings of the tokens after a text", "grammar")
                    self._follow((q, stack, loop, count), starts, xs)
        return self._assemble()

    def _fresh(self, place: tuple, sources: list) -> list[tuple[int, NodeSet, np.ndarray | None]]:
        """What of (stack, positions, xs) is to be followed: one stack for the same positions, positions with the same stack together, and none that
        an earlier wave has followed with a stack that allows as much. Of a few positions, that is not worth looking for."""
        self.begun += sum(starts.nodes.size + 100 for _, starts, _ in sources)
        many = self.begun > self.tables.vocab.byte.size
        if len(sources) > 1:
            known, stacks = self.grammar._stacks, {}
            for stack, starts, xs in sources:
                stacks.setdefault((id(starts), id(xs)), [starts, xs, set()])[2].add(stack)
            places: dict[int, list] = {}
            for starts, xs, some in stacks.values():
                stack = some.pop() if len(some) == 1 else known.of(frozenset().union(*map(known.frames.__getitem__, some)))
                places.setdefault(stack, []).append((starts, xs))
            sources = [(stack, *self._merge(found)) for stack, found in places.items()]
        elif many and sources[0][1].nodes.size > 64:
            sources = [(sources[0][0], *self._merge([sources[0][1:]]))]
        done = self.done.setdefault(place, [])
        if many and done:
            sources = [left for source in sources if (left := self._left(*source, done))[1].nodes.size]
        done += sources
        return sources

    def _left(self, stack: int, starts: NodeSet, xs: np.ndarray | None, done: list) -> tuple[int, NodeSet, np.ndarray | None]:
        """The positions that were not followed before with a stack, and a condition, that allow as much; all of them if that is most."""
        before = [(other.nodes, more) for below, other, more in done[-COMPARED:] if self.grammar._stacks.covers(below, stack)]
        if not before:
            return stack, starts, xs
        width = 2 + max(int(more.max()) if more is not None else 0 for _, more in [*before, (None, xs)])
        seen = np.zeros((self.tables.vocab.byte.size, width), bool)
        for nodes, more in before:
            if more is None:
                seen[nodes] = True
            else:
                seen[nodes, more + 1] = True
                seen[nodes[more < 0]] = True
        if self.low <= 1:                           # fewer characters begun are better, but none: there must have been one
            np.logical_or.accumulate(seen[:, 2:], axis=1, out=seen[:, 2:])
        left = ~seen[starts.nodes, 0 if xs is None else xs + 1]
        if left.mean() > 0.5:
            return stack, starts, xs
        return stack, NodeSet(starts.nodes[left]), None if xs is None else xs[left]

    def _merge(self, sources: list[tuple[NodeSet, np.ndarray | None]]) -> tuple[NodeSet, np.ndarray | None]:
        """Several sets of positions as one, each position (with the same x) once."""
        if len(sources) == 1 and sources[0][0].nodes.size <= 64:
            return sources[0]
        if all(xs is None or not (xs >= 0).any() for _, xs in sources):
            return self.automaton.merged([starts for starts, _ in sources]), None
        xs = np.concatenate([np.full(starts.nodes.size, -1, np.int32) if xs is None else xs for starts, xs in sources])
        keys = np.sort(np.concatenate([starts.nodes for starts, _ in sources]).astype(np.int64) * 8192 + xs + 1)
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
        nodes, xs = (keys >> 13).astype(np.int32), ((keys & 8191) - 1).astype(np.int32)
        begins = np.concatenate([[True], nodes[1:] != nodes[:-1]])
        needed = begins | (np.repeat(xs[begins], np.diff(np.append(np.flatnonzero(begins), nodes.size))) >= 0)  # -1 holds always
        if self.low <= 1:
            needed[1:] &= begins[1:] | (xs[:-1] < 1)
        return NodeSet(nodes[needed]), xs[needed]

    def _later(self, configs, starts: NodeSet, xs: np.ndarray | None) -> None:
        for q, stack, loop, count in configs:
            self.pending.setdefault((q, loop, count), []).append((stack, starts, xs))

    def _after(self, stack: int) -> tuple:
        return self.grammar._sets[self.grammar._closure(stack)][1]

    def _follow(self, config: tuple, starts: NodeSet, xs: np.ndarray | None) -> None:
        q, stack, loop, count = config
        same = xs is None or bool((xs == xs[0]).all())
        template = self.automaton.template(q, starts, bool(loop), None if same else xs)
        if template.tokens.size:
            if same:
                x = -1 if xs is None else int(xs[0])
                values = [self._inside(config, to, begun, x) for to, begun in template.classes]
                if template.tokens.size > DENSE and _is_unique(template, self.tables.vocab.size):
                    self.dense.append((template, values))
                else:
                    self.sparse.append((template.tokens, np.array(values, np.int64)[template.cls]))
            else:
                x = np.broadcast_to(xs, template.tokens.shape) if template.source is None else xs[template.source]
                keys, at = distinct(template.cls.astype(np.int64) * 8192 + x + 1)
                values = [self._inside(config, *template.classes[key // 8192], key % 8192 - 1) for key in keys]
                self.sparse.append((template.tokens, np.array(values, np.int64)[at]))
        exits, after = template.exits, self._after(stack)
        if exits is None or not after:
            return
        xs = None if xs is None else xs[exits.source]
        if loop:
            _, low, high = self.grammar._loops[loop]
            ok = exits.count <= high if count == REGISTER else (low <= exits.count + count) & (exits.count + count <= high)
            if not ok.all():
                exits, xs = NodeSet(exits.nodes[ok], exits.source[ok], exits.count[ok]), None if xs is None else xs[ok]
            if count == REGISTER:
                xs = exits.count
        if exits.nodes.size:
            self._later(after, exits, xs)

    def _inside(self, config: tuple, to: int, begun: int, x: int) -> int:
        """The value of a token that ends in a piece, in state `to`."""
        grammar = self.grammar
        _, stack, loop, count = config
        low, high = (0, INF) if x < 0 else (max(self.low - x, 0), self.high - x)
        if not loop:
            configs, may_end = ((to, stack, 0, 0),) if self.automaton.goes_on[to] else (), False
            if self.automaton.accepts[to]:
                may_end, more = grammar._sets[grammar._closure(stack)]
                configs += more
            which = grammar._set(may_end, configs)
        else:
            most = grammar._loops[loop][2]
            if count == REGISTER:
                low, high = 0, most - begun
                which = grammar._set(False, ((to, stack, loop, REGISTER - begun),))
            else:
                high = high if count + begun <= most else -1
                which = grammar._set(False, ((to, stack, loop, count + begun),)) if high >= low else -1
        return grammar._value(((low, high, which),)) if low <= high else 0

    # ---- from tokens and values to a row

    def _assemble(self) -> Row:
        tables = self.tables
        which, vec = 0, np.zeros(1, np.int64)
        if self.dense:
            self.dense.sort(key=lambda item: -item[0].tokens.size)
            for template, values in self.dense[MAX_JOINT:]:
                self.sparse.append((template.tokens, np.array(values, np.int64)[template.cls]))
            self.dense = sorted(self.dense[:MAX_JOINT], key=lambda item: item[0].number)
            which, split = self.grammar.shared.map_of([template for template, _ in self.dense])
            values = [(0, *values) for _, values in self.dense]
            vec = np.zeros(len(split), np.int64)
            for i, classes in enumerate(split):
                for value, cls in zip(values, classes):
                    vec[i] = self.grammar._join(int(vec[i]), value[cls])
        tokens, values = self._overrides()
        if self.dense and tokens.size:
            below = vec[tables.maps[which][tokens]]
            values = self._join(below, values)
            differs = values != below
            tokens, values = tokens[differs], values[differs]
        if tokens.size > MAX_OVERRIDES:
            whole = vec[tables.maps[which]]
            whole[tokens] = values
            found, classes = distinct(whole)
            if found[0] != 0:
                found, classes = [0, *found], classes + 1
            which, vec = tables.add_map(classes), np.array(found)
            tokens, values = tokens[:0], values[:0]
        entry = self.grammar._entry
        found, at = np.unique(values, return_inverse=True)
        over = np.array([entry(value) for value in found.tolist()], np.int32)[at] if values.size else np.zeros(0, np.int32)
        return Row(which, np.array([entry(value) for value in vec.tolist()], np.int32), tokens.astype(np.int32), over)

    def _overrides(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, sorted and each once; their values)."""
        if not self.sparse:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        tokens, values = (np.concatenate(column) for column in zip(*self.sparse))
        order = np.argsort(tokens, kind="stable")
        order = order[values[order] != 0]
        tokens, values = tokens[order], values[order]
        while (again := np.flatnonzero(tokens[1:] == tokens[:-1]) + 1).size:    # two by two: of many readings, no long set is made often
            first = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]]))
            rank = np.arange(tokens.size) - np.repeat(first, np.diff(np.append(first, tokens.size)))
            odd = again[rank[again] % 2 == 1]
            values[odd - 1] = self._join(values[odd - 1], values[odd])
            left = rank % 2 == 0
            tokens, values = tokens[left], values[left]
        return tokens, values

    def _join(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        keys, at = distinct(a << 32 | b)
        return np.array([self.grammar._join(key >> 32, key & INDEX) for key in keys], np.int64)[at]


def _is_unique(template: Template, size: int) -> bool:
    """Whether each token is there once; below positions of which one is inside the other it may not be."""
    if template.source is None:
        return True
    seen = np.zeros(size, bool)
    seen[template.tokens] = True
    return int(seen.sum()) == template.tokens.size


def _demo() -> None:
    """The essay's lists: the states that a text meets, and what may follow each."""
    one = lambda text: Byte(1 << ord(text))  # noqa: E731
    item = Cat((Ref("list"), Repeat(Cat((one(","), Ref("list"))), 0, None)))
    rules = Rules({"list": Cat((one("["), Repeat(item, 0, 1), one("]")))}, "list")
    vocab = Vocab([b"[", b"]", b",", b"],", b",[", b"[[", b"]]", b",,", b"],[", None], end_ids=[9])
    grammar = compile_rules(rules, vocab)
    state, text = grammar.start, b""
    print('list ::= "[" (list ("," list)*)? "]"')
    for token in (5, 1, 4, 6, 9):
        mask = grammar.mask(state)
        allowed = [t for t in range(vocab.size) if mask[t // 32] >> t % 32 & 1]
        names = " ".join((vocab.tokens[t] or b"<end>").decode() for t in allowed)
        forced, _ = grammar.forced(state)
        print(f"{text.decode():8s} state {state}: {len(grammar._configs[state])} readings, {names:22s} mask {mask[0]:#06x} "
              f"forced {forced.decode()!r}")
        if token == 9:
            break
        state, text = grammar.step(state, token), text + vocab.tokens[token]
    built = sum(row is not None for row in grammar.tables.rows)
    print(f"{built} rows, {grammar.tables.nbytes} bytes of tables; accepting: {grammar.is_accepting(state)}")


if __name__ == "__main__":
    _demo()
