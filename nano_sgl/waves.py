"""Waves: a row of a grammar's table, from templates alone.

rows.py follows readings one by one, in C++, and falls back to this where there is no compiler, or where the readings of a grammar are too many for
that. A row goes wave by wave: where pieces end, what comes behind them begins, from whole sets of positions at once.

    wave 1   the state's own pieces, from the root of the vocabulary's tree      tokens inside of them; positions where they may end
    wave 2   from these positions, what comes behind, by the stack               tokens inside; where that may end
    ...      until nothing is left

Names. A *place* is what lies below a piece: the stack, and of a repeat of characters how many there were, or REGISTER, where the number beside the
state says so. A *template* (automaton.py) is what becomes of a piece below a set of positions. A *leaf* is the reading in which a token ends,
(place, state, characters begun, x), and its value what the tables say of it.

x. Behind the repeat that the state's count belongs to, everything holds for some counts only: x are the characters of that repeat that the token has
begun there, so low <= count + x <= high; -1: holds always. `xs` are those of positions.

Ambiguity. Readings at the same positions share one stack, positions with the same stack go together, and what an earlier wave has followed with a
stack that allows as much is left out. So a hostile grammar costs what its positions are, not what its readings are.

Invariant. Overrides only add to what the map of a row allows. Cost: ten numpy calls a piece, 0.1 to 0.6 ms a row; a template that is there already
costs nothing. Where it stops: MAX_FOLLOWED readings, then GrammarError.
"""

from __future__ import annotations

import threading

import numpy as np

from .automaton import Automaton, NodeSet, Template, distinct, union
from .nodes import COMPARED, DONE
from .readings import REGISTER, NativeReadings, Readings, make
from .rules import GrammarError
from .tables import INDEX, INF, Row, Tables
from .vocab import Vocab

MAX_FOLLOWED = 3000             # readings followed for one row
MAX_TEMPLATE_BYTES = 96 << 20
MAX_OVERRIDES = 4096            # of a row: with more it gets a map
MANY_OVERRIDES = 256            # with more it gets one once others have the same: see grammar.Shared.map_with
DENSE = 768                     # tokens from which a template is worth a map
MAX_JOINT = 3                   # templates in one map


class Places:
    """The places of one grammar, as numbers: `keys[place]` is (stack, loop, count)."""

    def __init__(self, readings: Readings | NativeReadings):
        self.readings, self.keys, self._ids = readings, [], {}
        self.values: dict[tuple[int, int, int], int] = {}           # (place, state, begun) -> value, of leaves without x

    def of(self, stack: int, loop: int, count: int) -> int:
        """The number of a place."""
        key = stack, loop, count
        place = self._ids.get(key)
        if place is None:
            place = self._ids[key] = len(self.keys)
            self.keys.append(key)
        return place


class WaveBuilder:
    """One row, wave by wave. `build` it under the lock of `Shared`."""

    def __init__(self, grammar, index: int):
        self.grammar, self.readings, self.tables, self.automaton = grammar, grammar.readings, grammar.tables, grammar.readings.automaton
        self.configs = self.readings.configs(index)
        registers = [c[2] for c in self.configs if c[3] == REGISTER]
        self.low, self.high = self.readings.loops[registers[0]][1:] if registers else (0, 0)
        self.dense: list[tuple[Template, list[int]]] = []
        self._throw_out()

    def _throw_out(self) -> None:
        """Templates, where they have become many."""
        if self.automaton.template_bytes > MAX_TEMPLATE_BYTES:
            self.automaton.forget_templates()

    def build(self) -> Row:
        """The row. Raises GrammarError."""
        self.dense = []
        self.sparse: list[tuple[np.ndarray, np.ndarray]] = []
        self.followed = self.begun = 0              # readings, and positions where they begin
        self.pending: dict[tuple, list[tuple[int, NodeSet, np.ndarray | None]]] = {}    # (q, loop, count) -> (stack, positions, xs)
        self.done: dict[tuple, list[tuple[int, NodeSet, np.ndarray | None]]] = {}
        for config, x in self._beginnings():
            self._later([config], self.automaton.root, None if x < 0 else np.zeros(1, np.int32))
        while self.pending:
            wave, self.pending = self.pending, {}
            for (q, loop, count), sources in wave.items():
                for stack, starts, xs in self._fresh((q, loop, count), sources):
                    self.followed += 1 + len(self.readings.frames(stack)) // 16
                    if self.followed > MAX_FOLLOWED:
                        raise GrammarError(f"the grammar is too ambiguous: more than {MAX_FOLLOWED} readings of the tokens after a text", "grammar")
                    self._follow((q, stack, loop, count), starts, xs)
        return self._assemble()

    def _fresh(self, place: tuple, sources: list) -> list[tuple[int, NodeSet, np.ndarray | None]]:
        """What of (stack, positions, xs) is to be followed: one stack for the same positions, positions with the same stack together, and none that
        an earlier wave has followed with a stack that allows as much. Of a few positions, that is not worth looking for."""
        self.begun += sum(starts.size + 100 for _, starts, _ in sources)
        many = self.begun > self.tables.vocab.byte.size
        if len(sources) > 1:
            known, stacks = self.readings, {}
            for stack, starts, xs in sources:
                stacks.setdefault((id(starts), id(xs)), [starts, xs, set()])[2].add(stack)
            places: dict[int, list] = {}
            for starts, xs, some in stacks.values():
                stack = some.pop() if len(some) == 1 else known.stack(frozenset().union(*map(known.frames, some)))
                places.setdefault(stack, []).append((starts, xs))
            sources = [(stack, *self._merge(found)) for stack, found in places.items()]
        elif many and sources[0][1].size > 64 and not sources[0][1].ascending:
            sources = [(sources[0][0], *self._merge([sources[0][1:]]))]
        done = self.done.setdefault(place, [])
        if many and done:
            sources = [left for source in sources if (left := self._left(*source, done))[1].size]
        done += sources
        return sources

    def _left(self, stack: int, starts: NodeSet, xs: np.ndarray | None, done: list) -> tuple[int, NodeSet, np.ndarray | None]:
        """The positions that were not followed before with a stack, and a condition, that allow as much; all of them if that is most."""
        before = [(other, more) for below, other, more in done[-COMPARED:] if self.readings.covers(below, stack)]
        if not before:
            return stack, starts, xs
        gone = np.isin(starts.nodes, self._always(before))
        if xs is not None:
            nodes, more = self._conditional(before)
            if self.low > 1:
                gone |= np.isin(starts.nodes.astype(np.int64) * 8192 + xs, nodes.astype(np.int64) * 8192 + more)
            else:                                   # fewer characters begun are better, but none: there must have been one
                least = np.full((2, self.tables.vocab.byte.size), 8192, np.int32)
                np.minimum.at(least, (np.minimum(more, 1), nodes), more)
                gone |= (xs >= 0) & (least[np.minimum(xs, 1), starts.nodes] <= xs)
        if gone.mean() < 0.5:
            return stack, starts, xs
        return stack, NodeSet(starts.nodes[~gone], ascending=starts.ascending), None if xs is None else xs[~gone]

    def _always(self, sources: list[tuple[NodeSet, np.ndarray | None]]) -> np.ndarray:
        """The positions that are in one of the sets without a condition, ascending, each once."""
        return union(self.tables.vocab, [starts.nodes if xs is None else starts.nodes[xs < 0] for starts, xs in sources])

    def _conditional(self, sources: list[tuple[NodeSet, np.ndarray | None]]) -> tuple[np.ndarray, np.ndarray]:
        """(positions, the x of each) in one of the sets with a condition."""
        held = [(starts.nodes[xs >= 0], xs[xs >= 0]) for starts, xs in sources if xs is not None]
        nodes, xs = zip(*held) if held else ((np.zeros(0, np.int32),), (np.zeros(0, np.int32),))
        return np.concatenate(nodes), np.concatenate(xs)

    def _merge(self, sources: list[tuple[NodeSet, np.ndarray | None]]) -> tuple[NodeSet, np.ndarray | None]:
        """Several sets of positions as one, each position (with the same x) once."""
        if len(sources) == 1 and (sources[0][0].ascending or sources[0][0].size <= 64):
            return sources[0]
        free = [starts for starts, xs in sources if xs is None]
        if len(free) == len(sources):
            return self.automaton.merged(free), None
        always = self._always(sources)
        nodes, xs = self._conditional(sources)
        left = np.isin(nodes, always, invert=True)  # what always holds needs no condition
        nodes, xs = nodes[left], xs[left]
        if not nodes.size and len(free) == 1 and free[0].ascending:
            return free[0], None
        if sum(more is not None for _, more in sources) > 1 or not all(starts.ascending for starts, _ in sources):
            keys = np.sort(nodes.astype(np.int64) * 8192 + xs)
            keys = keys[np.diff(keys, prepend=-1) > 0]
            nodes, xs = (keys >> 13).astype(np.int32), (keys & 8191).astype(np.int32)
            if self.low <= 1:                       # as above
                needed = np.diff(nodes, prepend=-1) > 0
                needed[1:] |= xs[:-1] < 1
                nodes, xs = nodes[needed], xs[needed]
        if not nodes.size:
            return NodeSet(always, ascending=True), None
        return NodeSet(np.concatenate([always, nodes])), np.concatenate([np.full(always.size, -1, np.int32), xs])

    def _later(self, configs, starts: NodeSet, xs: np.ndarray | None) -> None:
        for q, stack, loop, count in configs:
            self.pending.setdefault((q, loop, count), []).append((stack, starts, xs))

    def _follow(self, config: tuple, starts: NodeSet, xs: np.ndarray | None) -> None:
        q, stack, loop, count = config
        place = self.grammar.places_below.of(stack, loop, count)
        same = xs is None or bool((xs == xs[0]).all())
        template = self.automaton.template(q, starts, bool(loop), None if same else xs)
        if template.size:
            if same:
                x = -1 if xs is None else int(xs[0])
                values = [self._value(place, to, begun, x) for to, begun in template.classes]
                if template.size > DENSE and template.unique:
                    self.dense.append((template, values))
                else:
                    self.sparse.append((template.tokens, np.array(values, np.int64)[template.cls]))
            else:
                x = np.broadcast_to(xs, template.tokens.shape) if template.source is None else xs[template.source]
                keys, at = distinct(template.cls.astype(np.int64) * 8192 + x + 1)
                values = [self._value(place, *template.classes[key // 8192], key % 8192 - 1) for key in keys]
                self.sparse.append((template.tokens, np.array(values, np.int64)[at]))
        exits, after = template.exits, self._after(stack)
        if exits is None or not after:
            return
        if loop:
            _, low, high = self.readings.loops[loop]
            exits = self.automaton.within(exits, *((0, high) if count == REGISTER else (low - count, high - count)))
        if loop and count == REGISTER:
            xs = exits.count
        elif xs is not None:
            xs = xs[exits.source]
        if exits.size:
            self._later(after, exits, xs)

    # ---- what tokens come to

    def _beginnings(self) -> list[tuple[tuple, int]]:
        """(reading, x) that begin at the root."""
        readings, found = self.readings, [(config, -1) for config in self.configs]
        for q, stack, loop, count in self.configs:
            if loop and q == readings.loops[loop][0] and (count == REGISTER or readings.between(q, loop, count)):
                found += [(config, 0 if count == REGISTER else -1) for config in self._after(stack)]
        return found

    def _after(self, stack: int) -> tuple:
        return self.readings.at(self.readings.closure(stack))[1]

    def _value(self, place: int, to: int, begun: int, x: int) -> int:
        """The value of a leaf."""
        places = self.grammar.places_below
        key = place, to, begun
        if x < 0 and (found := places.values.get(key)) is not None:
            return found
        readings, (stack, loop, count) = self.readings, places.keys[place]
        low, high = (0, INF) if x < 0 else (max(self.low - x, 0), self.high - x if self.high < INF else INF)
        _, least, most = readings.loops[loop]
        lines = []
        if loop and count == REGISTER:
            enough = max(least - begun, 0) if most == INF else INF      # from which count on it no longer matters
            if begun <= most and enough:
                lines.append((0, min(most - begun, enough - 1), readings.set(False, ((to, stack, loop, REGISTER - begun),))))
            if most == INF:
                lines.append((enough, INF, readings.set(False, ((to, stack, loop, least),))))
        elif low > high or loop and count + begun > most:
            pass
        elif loop:
            lines.append((low, high, readings.set(False, ((to, stack, loop, count + begun),))))
        else:
            may_end, configs = False, ((to, stack, 0, 0),) if self.automaton.goes_on[to] else ()
            if self.automaton.accepts[to]:
                may_end, more = readings.at(readings.closure(stack))
                configs += more
            lines.append((low, high, readings.set(may_end, configs)))
        found = readings.value(lines) if lines else 0
        if x < 0:
            places.values[key] = found
        return found

    def _base(self) -> tuple[int, list[int]]:
        """(map of all wide pieces, the value of each of its classes)."""
        self.dense.sort(key=lambda item: item[0].number)
        which, split = self.grammar.shared.map_of([template for template, _ in self.dense])
        (_, first), *more = self.dense
        vec = [0, *first] if not more else [(0, *first)[classes[0]] for classes in split]
        for i, (_, values) in enumerate(more, start=1):
            vec = self.readings.join(vec, [(0, *values)[classes[i]] for classes in split])
        return which, vec

    # ---- from tokens and values to a row

    def _assemble(self) -> Row:
        self.dense.sort(key=lambda item: -item[0].size)
        for template, values in self.dense[MAX_JOINT:]:
            self.sparse.append((template.tokens, np.array(values, np.int64)[template.cls]))
        del self.dense[MAX_JOINT:]
        which, vec = self._base() if self.dense else (0, [0])
        vec = np.array(vec, np.int64)
        tokens, values = self._overrides()
        if self.dense and tokens.size:
            below = vec[self.tables.maps[which][tokens]]
            values = self._join(below, values)
            differs = values != below
            tokens, values = tokens[differs], values[differs]
        return self._row(which, vec, tokens, values)

    def _row(self, which: int, vec: np.ndarray, tokens: np.ndarray, values: np.ndarray) -> Row:
        """vec: the value of each class; and those of tokens that have others."""
        found, at = distinct(np.concatenate([vec, values]))
        lines = np.array(self.readings.lines_of(found), np.int32)[at]
        return self._bounded(which, lines[: vec.size], tokens.astype(np.int32), lines[vec.size:])

    def _bounded(self, which: int, vec: np.ndarray, tokens: np.ndarray, lines: np.ndarray) -> Row:
        """The same from lines. Too many overrides become a map; so do many that rows have again and again."""
        if tokens.size > MANY_OVERRIDES:
            shared = self.grammar.shared.map_with(which, len(vec), tokens, lines, at_once=tokens.size > MAX_OVERRIDES)
            if shared is not None:
                which, classes = shared
                vec, tokens, lines = np.concatenate([vec, classes]), tokens[:0], lines[:0]
        return Row(which, vec, tokens, lines)

    def _overrides(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, sorted and each once; their values)."""
        if not self.sparse:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        keys = np.sort(np.concatenate([tokens.astype(np.int64) << 32 | values for tokens, values in self.sparse]))
        keys = keys[(np.diff(keys, prepend=-1) > 0) & (keys & INDEX != 0)]
        tokens, values = keys >> 32, keys & INDEX
        while (again := np.flatnonzero(tokens[1:] == tokens[:-1]) + 1).size:    # two by two: of many readings, no long set is made often
            first = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]]))
            rank = np.arange(tokens.size) - np.repeat(first, np.diff(np.append(first, tokens.size)))
            odd = again[rank[again] % 2 == 1]
            values[odd - 1] = self._join(values[odd - 1], values[odd])
            left = rank % 2 == 0
            tokens, values = tokens[left], values[left]
        return tokens, values

    def _join(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        pairs, at = distinct(a << 32 | b)
        return np.array(self.readings.join([pair >> 32 for pair in pairs], [pair & INDEX for pair in pairs]), np.int64)[at]


class Sample:
    """A grammar of letters and a mark, as builders of rows see one. For the demos."""

    def __init__(self, vocab: Vocab):
        automaton, self.tables, self.shared = Automaton(vocab), Tables(vocab), self
        letters, mark = automaton.nodes.byte(sum(1 << b for b in range(97, 123))), automaton.nodes.text(automaton.nodes.byte(1 << 44 | 1 << 46))
        word, end = automaton.state([automaton.nodes.rep(letters, 1, None)]), automaton.state([automaton.nodes.keys[mark][1]])
        self.readings = make(automaton, self.tables, threading.RLock(), lambda frame: [(end, 0, ())])
        self.places_below, done = Places(self.readings), self.readings.stack(frozenset((DONE,)))
        sets = [self.readings.set(False, [one]) for one in ((word, self.readings.push(mark, done), 0, 0), (end, done, 0, 0))]
        self.states = [self.readings.state(each)[0] for each in sets]

    def map_of(self, templates: list[Template]) -> tuple[int, list]:
        return self.tables.add_map(templates[0].map[0]), []

    def show(self, builder: type[WaveBuilder]) -> None:
        """The tokens of both rows."""
        for index, name in zip(self.states, ("[a-z]+", "[,.]")):
            row, vocab, lines = builder(self, index).build(), self.tables.vocab, self.tables.lines.array
            tokens = dict(zip(row.over_tokens.tolist(), row.over_values.tolist()))
            tokens |= {t: int(row.vec[cls]) for t, cls in enumerate(self.tables.maps[row.map].tolist()) if cls and t not in tokens}
            print(f"{name:8s} map {row.map}", *(f"{vocab.tokens[t]!r} -> {self._show(lines[value, 2])}" for t, value in sorted(tokens.items())))

    def _show(self, state: int) -> str:
        may_end, configs = self.tables.states.array[state, 4] == 0, self.readings.configs(int(state))
        return " or ".join([f"in {q}" for q, *_ in configs] + ["the end"] * bool(may_end))


def _demo() -> None:
    """A state in a string, and one in what follows it: what their rows are made of."""
    Sample(Vocab([b"a", b"b", b"ab", b",", b"b.", b"a,b", None], [6])).show(WaveBuilder)


if __name__ == "__main__":
    _demo()
