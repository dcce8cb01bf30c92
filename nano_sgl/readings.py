"""Readings: in which ways a text can be read in a grammar, as numbers.

What the automaton does not know of a text (automaton.py) is what comes after the piece that it is in. A *reading* says both, and how many
characters of a counted repeat there were: a configuration (state of the automaton, stack, loop, count). Here they are put together,
and all that is met again gets a number, so that whoever compares two of them compares integers:

    stack      a set of (frame, stack below): what comes after a piece, the frame first. Of stacks that ways share, one
    closure    stack -> the set of what may come when all above it has ended
    set        whether the text may end, and configurations, of which none says what another does
    value      lines (min, max, set): while min <= count <= max, it leads to this set
    state      a set whose count may be a number beside it (REGISTER): what the tables have a row for

    list ::= "[" (list ("," list)*)? "]"        in [[  :   "[" | "]", and below it  stack 1 = { (("," list)* "]", stack 0) }
                                                closure of stack 1:   "," | "]", over their own stacks

The twins. `Readings` is plain Python, for where there is no compiler. `NativeReadings` keeps all of it in C++ (cpu/sets.h), where rows are made
(cpu/row.h): Python is asked there only for what the grammar says of a frame, once for all grammars, and told what the tables need.
Both find the same sets, under numbers of their own.

Invariant. Nothing changes, everything only grows; who writes holds the lock of `Shared`. What is left out is covered by what is kept. Cost: by C++
half a microsecond a reading, in Python twenty. Where it stops: MAX_READINGS of a set, nodes.MAX_FRAMES of a stack, MAX_GRAMMAR_STATES, MAX_PLACES:
then GrammarError.
Source: Tomita's graph-structured stacks (1985).
"""

from __future__ import annotations

import array
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from . import nodes
from .automaton import Automaton
from .nodes import COMPARED, DONE, Stacks
from .rules import CLOCK, INF, GrammarError, tick
from .tables import ADD_SHIFT, KEEP, MORE, Tables
from .vocab import Vocab

MAX_READINGS = 1000             # configurations of one state
MAX_GRAMMAR_STATES = 50_000
MAX_PLACES = 400_000            # in the rules, that a grammar's states and stacks hold: some 450 bytes each
REGISTER = -1                   # in place of a count: the number beside the state; -1 - k: k more than that
Config = tuple[int, int, int, int]
Begins = Callable[[int], list[tuple[int, int, tuple[int, ...]]]]    # of a frame: (state, loop, frames that lie below, the lowest first) each

TOO_LARGE = "the grammar is too ambiguous: its states hold more than {} places in its rules"
TOO_MANY_STATES = "the grammar needs more than {} states"
TOO_MANY_READINGS = "the grammar is too ambiguous: more than {} readings of a text"
TOO_MANY_FRAMES = "the grammar is too ambiguous: more than {} ways to go on"


def make(automaton: Automaton, tables: Tables, lock: threading.RLock, begins: Begins) -> Readings | NativeReadings:
    """Those of one grammar. begins: what it says of a frame."""
    return (Readings if automaton.frames is None else NativeReadings)(automaton, tables, lock, begins)


class Readings:
    """In Python. `loops[loop]` is (state between items, low, high), 0 is none; `places` is what it holds in memory."""

    native = None

    def __init__(self, automaton: Automaton, tables: Tables, lock: threading.RLock, begins: Begins):
        self.automaton, self.tables, self.loops, self._begins, self._nullable = automaton, tables, automaton.loops, begins, automaton.nodes.nullable
        self._stacks, self._follow, self._places = Stacks(automaton.nodes), {}, 0
        self._sets: list[tuple[bool, tuple]] = []
        self._set_ids: dict[tuple, int] = {}
        self._values: list[tuple] = [()]                            # value -> lines (min, max, set)
        self._value_ids: dict[tuple, int] = {(): 0}
        self._joined: dict[tuple[int, int], int] = {}
        self._lines: dict[int, int] = {0: 0}                        # value -> index of its first line in the tables
        self._state_ids: dict[tuple, int] = {}
        self._configs: dict[int, tuple[Config, ...]] = {}           # state -> its configurations
        self.push, self.stack, self.covers, self.frames = self._stacks.push, self._stacks.of, self._stacks.covers, self._stacks.frames.__getitem__
        self.at, self.configs, self.has = self._sets.__getitem__, self._configs.__getitem__, self._configs.__contains__

    @property
    def places(self) -> int:
        return self._places + self._stacks.places

    def closure(self, stack: int) -> int:
        """The set of what may come when everything above the stack has ended."""
        found = self._follow.get(stack)
        if found is not None:
            return found
        frames, configs, may_end = self._stacks.frames[stack], [], False
        if len(frames) == 1 and not self._nullable[(top := next(iter(frames)))[0]] and top != DONE:
            below = dict(frames)                    # as most are
        else:
            below, may_end = self._below(frames)
        for frame, base in below.items():
            for q, loop, pushes in self._begins(frame):
                top = base
                for pushed in pushes:
                    top = self._stacks.push(pushed, top)
                configs.append((q, top, loop, 0))
        self._follow[stack] = found = self.set(may_end, configs)
        return found

    def _below(self, frames: frozenset) -> tuple[dict[int, int], bool]:
        """(frame -> what lies below it, for all frames that may come next; whether the end may)."""
        seen, work = set(), set(frames)
        below: dict[int, set] = {}                  # one stack for all ways to come here, or they would multiply
        while work:
            item = work.pop()
            seen.add(item)
            if item != DONE:
                frame, rest = item
                below.setdefault(frame, set()).update(self._stacks.frames[rest])
                if self._nullable[frame]:
                    work |= self._stacks.frames[rest] - seen
        return {frame: self._stacks.of(frozenset(rest)) for frame, rest in below.items()}, DONE in seen

    # ---- sets

    def set(self, may_end: bool, configs: Sequence[Config]) -> int:
        """The set of some configurations."""
        if any([config[2] for config in configs]):
            configs = [(*config[:3], self._counted(*config[2:])) if config[2] else config for config in configs]
        if len(configs) == 1:
            return self._interned(may_end, tuple(configs))
        if not any([config[2] for config in configs]) and len({config[0] for config in configs}) == len(configs):
            return self._interned(may_end, sorted(configs))
        stacks: dict[tuple[int, int, int], dict[int, None]] = {}
        for q, stack, loop, count in configs:
            stacks.setdefault((q, loop, count), {})[stack] = None
        merged = {key: next(iter(some)) if len(some) == 1 else self._stacks.of(frozenset().union(*map(self._stacks.frames.__getitem__, some)))
                  for key, some in stacks.items()}
        if len(merged) > 1 and any(key[1] for key in merged):
            merged = self._uncovered(merged)
        return self._interned(may_end, sorted([(q, stack, loop, count) for (q, loop, count), stack in merged.items()]))

    def _counted(self, loop: int, count: int) -> int:
        """A count as far as it matters: in a repeat without an upper bound, up to the lower one."""
        _, low, high = self.loops[loop]
        return low if high == INF and count > low else count

    def _interned(self, may_end: bool, configs: Sequence[Config]) -> int:
        """A set of configurations, in order, of which none says what others do."""
        key = may_end, *configs
        found = self._set_ids.get(key)
        if found is None:
            if len(configs) > MAX_READINGS:
                raise GrammarError(TOO_MANY_READINGS.format(MAX_READINGS), "grammar")
            found = self._set_ids[key] = len(self._sets)
            self._sets.append((may_end, key[1:]))
            self._places += len(configs) + 1
            if self.places > MAX_PLACES:
                raise GrammarError(TOO_LARGE.format(MAX_PLACES), "grammar")
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
                if count >= self.loops[loop][1] and len(before) < COMPARED:
                    before.append(stack)
            kept[q, loop, count] = stack
        return kept

    def _union(self, a: int, b: int) -> int:
        if a == b:
            return a
        (end_a, configs_a), (end_b, configs_b) = self._sets[a], self._sets[b]
        return self.set(end_a or end_b, configs_a + configs_b)

    # ---- values

    def value(self, lines: Iterable[tuple[int, int, int]]) -> int:
        """The value of some lines."""
        lines = tuple(lines)
        found = self._value_ids.get(lines)
        if found is None:
            found = self._value_ids[lines] = len(self._values)
            self._values.append(lines)
        return found

    def join(self, some: Iterable[int], others: Iterable[int]) -> list[int]:
        """Of two values each both at once: where both hold, the union of their sets."""
        return [self._join(a, b) for a, b in zip(some, others)]

    def _join(self, a: int, b: int) -> int:
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
            found = self._joined[key] = self.value(lines)
        return found

    def lines_of(self, values: Sequence[int]) -> list[int]:
        """Values in the tables: the index of the first line of each. Makes the states that they lead to."""
        known, fresh, lines = self._lines, {}, []
        for value in values:
            if value not in known and value not in fresh:
                fresh[value] = self.tables.lines.size + len(lines)
                for low, high, which in self._values[value]:
                    index, keep, add = self.state(which)
                    lines.append((low, high, index, add << ADD_SHIFT | KEEP * keep | MORE))
                lines[-1] = (*lines[-1][:3], lines[-1][3] & ~MORE)
        if lines:
            self.tables.check_size()
            self.tables.lines.append(np.array(lines, np.int32))
            known.update(fresh)
        return [known[value] for value in values]

    # ---- states

    def state(self, which: int) -> tuple[int, bool, int]:
        """(index of the state, whether the count is kept, what is added to it, or to 0) for a set."""
        may_end, configs = self._sets[which]
        keep, add, accept_from = False, 0, 0 if may_end else INF
        if len(configs) > 1 or configs and configs[0][2]:
            configs, keep, add, accept_from = self._with_register(may_end, configs)
        key = accept_from, configs
        index = self._state_ids.get(key)
        if index is None:
            if len(self._state_ids) >= MAX_GRAMMAR_STATES:
                raise GrammarError(TOO_MANY_STATES.format(MAX_GRAMMAR_STATES), "grammar")
            index = self._state_ids[key] = self.tables.add_states(1, accept_from)
            self._configs[index] = configs
        return index, keep, add

    def _with_register(self, may_end: bool, configs: tuple) -> tuple[tuple, bool, int, int]:
        """(configurations, of which one has REGISTER in place of its count; whether that count is kept, what is added; from which one it accepts)."""
        counted = [config for config in configs if config[2]]
        if not counted:
            return configs, False, 0, 0 if may_end else INF
        chosen = min(counted, key=lambda c: (c[3] >= 0, -self.counts(c[2]), c))
        rest = [config for config in configs if config != chosen]
        accept_from = 0 if may_end or any(self._ends_after(c) for c in rest if self.between(c[0], c[2], c[3])) else INF
        between, low, _ = self.loops[chosen[2]]
        if accept_from and chosen[0] == between and self._ends_after(chosen):
            accept_from = low
        rest.append((*chosen[:3], REGISTER))
        return tuple(sorted(rest)), chosen[3] < 0, -1 - chosen[3] if chosen[3] < 0 else chosen[3], accept_from

    def counts(self, loop: int) -> int:
        """How far it is counted."""
        _, low, high = self.loops[loop]
        return low if high == INF else high

    def between(self, q: int, loop: int, count: int) -> bool:
        """Whether a counted repeat may end here, by a count that is known."""
        between, low, _ = self.loops[loop]
        return q == between and count >= low

    def _ends_after(self, config: Config) -> bool:
        return self._sets[self.closure(config[1])][0]


class NativeReadings:
    """In C++: the same, and what rows ask (native.TrieWalker.read). `native` are native.Sets. What is read often is kept here, too."""

    def __init__(self, automaton: Automaton, tables: Tables, lock: threading.RLock, begins: Begins):
        self.automaton, self.tables, self.loops, self.lock, self._begins = automaton, tables, automaton.loops, lock, begins
        self._own, self._kept_sets, self._kept_configs, self._follow = set(), {}, {}, {}
        self._lent: list[threading.RLock | None] = []       # the lock that the clock had, while it must not let go of it
        self.native = automaton.frames.sets((nodes.MAX_FRAMES, MAX_READINGS, MAX_GRAMMAR_STATES, MAX_PLACES, COMPARED))

    between = Readings.between

    @property
    def places(self) -> int:
        return self.native.head.places

    def has(self, state: int) -> bool:
        """Whether it is a state of this grammar."""
        return state in self._own

    def frames(self, stack: int) -> frozenset[tuple[int, int]]:
        """Of a stack, each with the stack below."""
        with self.lock:
            flat = self.native.numbers("stack", stack)
        return frozenset(zip(flat[::2], flat[1::2]))

    def at(self, which: int) -> tuple[bool, tuple[Config, ...]]:
        """A set: (whether the text may end, configurations)."""
        found = self._kept_sets.get(which)
        if found is None:
            with self.lock:
                flat = self.native.numbers("set", which)
            found = self._kept_sets[which] = bool(flat[0]), _configs(flat)
        return found

    def configs(self, state: int) -> tuple[Config, ...]:
        """Of a state. Raises KeyError: it is another grammar's."""
        found = self._kept_configs.get(state)
        if found is None:
            with self.lock:
                flat = self.native.numbers("state", state) if state in self._own else []
            if not flat:
                raise KeyError(state)
            found = self._kept_configs[state] = _configs(flat)
        return found

    def push(self, frame: int, stack: int) -> int:
        """The stack with one frame more."""
        return self.stack(((frame, stack),))

    def stack(self, frames: Iterable[tuple[int, int]]) -> int:
        """The stack that allows what any of the frames does."""
        frames = list(frames)
        for frame, _ in frames:
            self._tell(frame)
        return self._call("stack", _flat(frames), len(frames))

    def covers(self, one: int, other: int) -> bool:
        """Whether a stack allows all that another does; never wrongly true."""
        return self._call("covers", one, other) > 0

    def closure(self, stack: int) -> int:
        """The set of what may come when everything above the stack has ended."""
        found = self._follow.get(stack)
        if found is None:
            found = self._follow[stack] = self._call("closure", stack)
        return found

    def set(self, may_end: bool, configs: Sequence[Config]) -> int:
        """The set of some configurations."""
        tick()
        return self._call("set", may_end, _flat(configs), len(configs))

    def value(self, lines: Iterable[tuple[int, int, int]]) -> int:
        """The value of some lines."""
        lines = list(lines)
        return self._call("value", _flat(lines), len(lines))

    def join(self, some: Iterable[int], others: Iterable[int]) -> list[int]:
        """Of two values each both at once."""
        some = np.fromiter(some, np.int32)
        found = np.empty_like(some)
        self._call("join", some.tobytes(), np.fromiter(others, np.int32).tobytes(), len(some), found.ctypes.data)
        return found.tolist()

    def lines_of(self, values: Sequence[int]) -> list[int]:
        """Values in the tables: the index of the first line of each. Makes the states that they lead to."""
        found = np.empty(len(values), np.int32)
        with self:
            self._call("lines", np.array(values, np.int32).tobytes(), len(values), found.ctypes.data)
        return found.tolist()

    def state(self, which: int) -> tuple[int, bool, int]:
        """(index of the state, whether the count is kept, what is added to it, or to 0) for a set."""
        with self:
            index = self._call("state", which)
        return index, bool(self.native.head.keep), self.native.head.add

    def along(self, which: int, text: bytes | None, size: int, budget: int) -> tuple[bytes, int]:
        """From a set on along a text, or along what must follow: as native.TrieWalker.along."""
        self.native.head.deadline = CLOCK.deadline
        return self.automaton.frames.walker.along(which, text, size, budget, self)

    def values(self, leaves: np.ndarray, low: int, high: int) -> list[int]:
        """The value of each leaf: as native.TrieWalker.values."""
        self.native.head.deadline = CLOCK.deadline
        return self.automaton.frames.walker.values(leaves, self, low, high).tolist()

    def place(self, stack: int, loop: int, count: int) -> int:
        """The number of a place, as rows have it."""
        return self._call("place", stack, loop, count)

    def __enter__(self) -> None:
        """Within, states and lines are made; then the tables have them. Their numbers are given here, so nobody else may have the lock meanwhile."""
        self._lent.append(CLOCK.lock)
        CLOCK.lock = None
        head, tables = self.native.head, self.tables
        head.next_state, head.next_line, head.max_states, head.deadline = tables.states.size, tables.lines.size, MAX_GRAMMAR_STATES, CLOCK.deadline

    def __exit__(self, *error: object) -> None:
        CLOCK.lock = self._lent.pop()
        head = self.native.head
        accept_from, lines = self.native.written()
        if accept_from is not None:
            start = self.tables.add_states(len(accept_from), accept_from)
            assert start == head.next_state - len(accept_from), "states have other numbers than they were given"
            self._own.update(range(start, start + len(accept_from)))
        if lines is not None:
            self.tables.lines.append(lines)
            if error[0] is None:
                self.tables.check_size()
                if head.places > MAX_PLACES:
                    self.help(self.native.MANY_PLACES)

    def _call(self, name: str, *args) -> int:
        """native.Sets.call, as often as it is stopped."""
        self.native.head.deadline = CLOCK.deadline
        while (found := self.native.call(name, *args)) < 0:
            self.help(found)
        return found

    def help(self, why: int) -> None:
        """C++ has stopped: what it needs before it may go on. Raises GrammarError."""
        if why != self.native.ASKS_FRAME:
            text = {self.native.LATE: "the grammar takes too long", self.native.MANY_FRAMES: TOO_MANY_FRAMES.format(nodes.MAX_FRAMES),
                    self.native.MANY_READINGS: TOO_MANY_READINGS.format(MAX_READINGS), self.native.MANY_PLACES: TOO_LARGE.format(MAX_PLACES),
                    self.native.MANY_STATES: TOO_MANY_STATES.format(MAX_GRAMMAR_STATES),
                    self.native.FAILED: "the grammar takes too much memory, or one of its states is not its own"}
            raise GrammarError(text[why], "grammar")
        frame, told, flat = self.native.head.missing, self.automaton.frames, []
        for q, loop, pushes in self._begins(frame):
            for pushed in pushes:
                self._tell(pushed)
            flat += [q, loop, len(pushes), *pushes]
        while told.num_loops < len(self.loops):
            told.add_loop(*self.loops[told.num_loops])
        told.add_firsts(frame, array.array("i", flat).tobytes(), len(flat))

    def _tell(self, frame: int) -> None:
        if frame not in self.automaton.frames.told and frame != DONE[0]:
            item, low, high = self.automaton.nodes.bounds(frame)
            self.automaton.frames.add(frame, item, low, -1 if high is None else high, self.automaton.nodes.nullable[frame])


def _configs(flat: list[int]) -> tuple[Config, ...]:
    return tuple(zip(flat[4::4], flat[5::4], flat[6::4], flat[7::4]))


def _flat(rows: Iterable[tuple[int, ...]]) -> bytes:
    return array.array("i", [number for row in rows for number in row]).tobytes()


def _demo() -> None:
    """list ::= "(" list ")" | "x", byte by byte: each "(" puts a frame on the stack, and what closes it takes that off."""
    vocab = Vocab([b"(", b")", b"x"])
    automaton = Automaton(vocab)
    leaf = {byte: automaton.nodes.text(automaton.nodes.byte(1 << byte)) for byte in b"()x"}
    begin = {byte: automaton.state([automaton.nodes.keys[leaf[byte]][1]]) for byte in b"()x"}
    whole, (left, right, x) = automaton.nodes.ref(0), b"()x"
    frames = {whole: [(begin[left], 0, (leaf[right], whole)), (begin[x], 0, ())], leaf[right]: [(begin[right], 0, ())]}
    found = make(automaton, Tables(vocab), threading.RLock(), frames.__getitem__)
    names = {whole: "list", leaf[right]: '")"'}

    def show(stack: int) -> str:
        return " or ".join(" ".join((names[frame], show(below))) for frame, below in found.frames(stack) if (frame, below) != DONE)

    now = found.closure(found.push(whole, found.stack(frozenset((DONE,)))))
    for byte in b"((x))":
        may_end, configs = found.at(now)
        ways = (f"{chr(next(iter(automaton.moves(q))))!r}, then {show(stack).strip() or 'the end'}" for q, stack, *_ in configs)
        print(f"set {now}:", "; ".join(ways), f"  -- {chr(byte)!r} -->")
        (stack,) = [stack for q, stack, _, _ in configs if byte in automaton.moves(q)]
        now = found.closure(stack)
    print(f"set {now}:", "the end" if found.at(now)[0] else "")


if __name__ == "__main__":
    _demo()
