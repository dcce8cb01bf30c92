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

from collections.abc import Sequence

import numpy as np

from .automaton import Automaton, NodeSet, Template, distinct, union
from .nodes import COMPARED, DONE, Stacks
from .rules import GrammarError
from .tables import INDEX, INF, Pool, Row, Tables
from .vocab import Vocab

MAX_FOLLOWED = 3000             # readings followed for one row
MAX_TEMPLATE_BYTES = 96 << 20
MAX_OVERRIDES = 4096            # of a row: one with more gets a map of its own
DENSE = 768                     # tokens from which a template is worth a map
MAX_JOINT = 3                   # templates in one map
REGISTER = -1                   # in place of a count: the number beside the state; -1 - k: k more than that


class Places:
    """The places of one grammar, as numbers: `keys[place]` is (stack, loop, count), and `table` int32 [:, 6] says of each what cpu/row.h asks: where
    in `firsts` (state, place) begins and ends what comes behind it (-1: not known yet), and how it counts. `known`: the lines of `num_known` leaves,
    for cpu/row.h alone."""

    def __init__(self, grammar):
        self.grammar, self.keys, self._ids = grammar, [], {}
        self.known, self.num_known = np.full((64, 4), -1, np.int32), 0
        self._table, self._firsts = Pool(6), Pool(2)
        self.values: dict[tuple[int, int, int], int] = {}           # (place, state, begun) -> value, of leaves without x

    @property
    def table(self) -> np.ndarray:
        return self._table.whole

    @property
    def firsts(self) -> np.ndarray:
        return self._firsts.whole

    def of(self, stack: int, loop: int, count: int) -> int:
        """The number of a place."""
        key = stack, loop, count
        place = self._ids.get(key)
        if place is None:
            place = self._ids[key] = len(self.keys)
            self.keys.append(key)
            between, low, high = self.grammar._loops[loop]
            row = (-1, 0, between, 0, high, 1) if count == REGISTER else (-1, 0, between, low - count, high - count, 0)
            self._table.append_one(row if loop else (-1, 0, -1, 0, 0, 0))
        return place

    def forget(self) -> int:
        """What is known of leaves; how many there are now."""
        self.known[:, 0], self.num_known = -1, 0
        return 0

    def end(self, place: int) -> None:
        """Find out what comes behind it."""
        if self._table.array[place, 0] < 0:
            grammar = self.grammar
            after = grammar._sets[grammar._closure(self.keys[place][0])][1]
            for q, _, _, _ in after:
                grammar._automaton.expand(q)
            found = np.array([(q, self.of(*where)) for q, *where in after], np.int32).reshape(-1, 2)
            start = self._firsts.append(found)
            self._table.array[place, :2] = start, start + len(found)


class WaveBuilder:
    """One row, wave by wave. `build` it under the lock of `Shared`."""

    def __init__(self, grammar, index: int):
        self.grammar, self.automaton, self.tables = grammar, grammar._automaton, grammar.tables
        self.configs = grammar._configs[index]
        registers = [c[2] for c in self.configs if c[3] == REGISTER]
        self.low, self.high = grammar._loops[registers[0]][1:] if registers else (0, 0)
        self.dense: list[tuple[Template, list[int]]] = []
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
                    self.followed += 1 + len(self.grammar._stacks.frames[stack]) // 16
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
            known, stacks = self.grammar._stacks, {}
            for stack, starts, xs in sources:
                stacks.setdefault((id(starts), id(xs)), [starts, xs, set()])[2].add(stack)
            places: dict[int, list] = {}
            for starts, xs, some in stacks.values():
                stack = some.pop() if len(some) == 1 else known.of(frozenset().union(*map(known.frames.__getitem__, some)))
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
        before = [(other, more) for below, other, more in done[-COMPARED:] if self.grammar._stacks.covers(below, stack)]
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
        place = self.grammar._below_pieces.of(stack, loop, count)
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
            _, low, high = self.grammar._loops[loop]
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
        grammar, found = self.grammar, [(config, -1) for config in self.configs]
        for q, stack, loop, count in self.configs:
            if loop and q == grammar._loops[loop][0] and (count == REGISTER or grammar._between(q, loop, count)):
                found += [(config, 0 if count == REGISTER else -1) for config in self._after(stack)]
        return found

    def _after(self, stack: int) -> tuple:
        return self.grammar._sets[self.grammar._closure(stack)][1]

    def _values(self, leaves: Sequence[Sequence[int]]) -> list[int]:
        """The values of leaves (place, state, begun, x). Most are new readings that hold always: these together."""
        places, accepts, known, new = self.grammar._below_pieces, self.automaton.accepts, self.grammar._below_pieces.values, []
        for place, to, begun, x in leaves:
            if x < 0 and (place, to, begun) not in known and not places.keys[place][1] and not accepts[to]:
                new.append((place, to))
        if new:
            found = self.grammar._values_of([(to, places.keys[place][0]) for place, to in new])
            known.update(((place, to, 0), value) for (place, to), value in zip(new, found))
        return [self._value(*leaf) for leaf in leaves]

    def _value(self, place: int, to: int, begun: int, x: int) -> int:
        """The value of a leaf."""
        places = self.grammar._below_pieces
        key = place, to, begun
        if x < 0 and (found := places.values.get(key)) is not None:
            return found
        grammar, (stack, loop, count) = self.grammar, places.keys[place]
        low, high = (0, INF) if x < 0 else (max(self.low - x, 0), self.high - x)
        most = grammar._loops[loop][2]
        if loop and count == REGISTER:
            line = (0, most - begun, grammar._set(False, ((to, stack, loop, REGISTER - begun),))) if begun <= most else ()
        elif low > high or loop and count + begun > most:
            line = ()
        elif loop:
            line = low, high, grammar._set(False, ((to, stack, loop, count + begun),))
        else:
            may_end, configs = False, ((to, stack, 0, 0),) if self.automaton.goes_on[to] else ()
            if self.automaton.accepts[to]:
                may_end, more = grammar._sets[grammar._closure(stack)]
                configs += more
            line = low, high, grammar._set(may_end, configs)
        found = grammar._value((line,)) if line else 0
        if x < 0:
            places.values[key] = found
        return found

    def _base(self) -> tuple[int, list[int]]:
        """(map of all wide pieces, the value of each of its classes)."""
        self.dense.sort(key=lambda item: item[0].number)
        which, split = self.grammar.shared.map_of([template for template, _ in self.dense])
        if len(self.dense) == 1:
            return which, [0, *self.dense[0][1]]
        vec, values = [], [(0, *values) for _, values in self.dense]
        for classes in split:
            vec.append(0)
            for of_class, cls in zip(values, classes):
                vec[-1] = self.grammar._join(vec[-1], of_class[cls])
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
        lines = np.array(self.grammar._entries_of(found), np.int32)[at]
        return self._bounded(which, lines[: vec.size], tokens.astype(np.int32), lines[vec.size:])

    def _bounded(self, which: int, vec: np.ndarray, tokens: np.ndarray, lines: np.ndarray) -> Row:
        """The same from lines. Too many overrides become a map."""
        if tokens.size > MAX_OVERRIDES:
            whole = vec[self.tables.maps[which]]
            whole[tokens] = lines
            found, classes = distinct(whole)
            if found[0] != 0:
                found, classes = [0, *found], classes + 1
            which, vec = self.tables.add_map(classes), np.array(found, np.int32)
            tokens, lines = tokens[:0], lines[:0]
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
        known = len(self.grammar._values)
        keys, at = distinct(a * known + b)
        return np.array([self.grammar._join(*divmod(key, known)) for key in keys], np.int64)[at]


class _Sample:                                  
    def __init__(self, vocab: Vocab):
        self._automaton, self.tables = automaton, _ = Automaton(vocab), Tables(vocab)
        nodes = automaton.nodes
        letters, self._loops = nodes.byte(sum(1 << b for b in range(97, 123))), [(-1, 1, 0)]
        mark = nodes.byte(1 << 44 | 1 << 46)
        q, end, self._stacks = automaton.state([nodes.rep(letters, 1, None)]), automaton.state([mark]), Stacks(nodes)
        done = self._stacks.of(frozenset((DONE,)))
        self._configs, self._below_pieces = {0: ((q, self._stacks.push(mark, done), 0, 0),), 1: ((end, done, 0, 0),)}, Places(self)
        self._sets, self._lines, self.shared = [(True, ()), (False, ((end, done, 0, 0),))], [()], self

    def _closure(self, stack: int) -> int:
        return stack

    def _set(self, may_end: bool, configs: tuple) -> str:
        return "in " + " or ".join(str(q) for q, *_ in configs) + " or at the end" * may_end

    def _value(self, lines: tuple) -> int:
        self._lines.append(lines)
        return len(self._lines) - 1

    def _join_all(self, values: list[int]) -> int:
        return max(values)

    def _values_of(self, readings: list[tuple[int, int]]) -> list[int]:
        return [self._value(((0, INF, self._set(False, ((q, stack, 0, 0),))),)) for q, stack in readings]

    def _entries_of(self, values: list[int]) -> list[int]:
        return values

    def map_of(self, templates: list[Template]) -> tuple[int, list]:
        return self.tables.add_map(templates[0].map[0]), []

    def show(self, builder: type[WaveBuilder]) -> None:
        """The tokens of both rows."""
        for index, name in enumerate(("[a-z]+", "[,.]")):
            row, vocab = builder(self, index).build(), self.tables.vocab
            tokens = dict(zip(row.over_tokens.tolist(), row.over_values.tolist()))
            tokens |= {t: int(row.vec[cls]) for t, cls in enumerate(self.tables.maps[row.map].tolist()) if cls and t not in tokens}
            print(f"{name:8s} map {row.map}", *(f"{vocab.tokens[t]!r} -> {self._lines[v][0][2]}" for t, v in sorted(tokens.items())))


def _demo() -> None:
    """A state in a string, and one in what follows it: what their rows are made of."""
    _Sample(Vocab([b"a", b"b", b"ab", b",", b"b.", b"a,b", None], [6])).show(WaveBuilder)


if __name__ == "__main__":
    _demo()
