"""Rows: what each token of a vocabulary leads to, in a state of a grammar.

A state is a set of readings, each a place in a piece of the rules and a stack of what comes after the piece (grammar.py). Few of 50,000 tokens leave
a piece: a row is what the automaton knows of the piece, which all grammars share, and what becomes of those few.

    in a string        map     piece [^"]*"  from the root: a token of letters leads to the same state, one with a quote to its end
                       over    ", "   " }  ... the tokens that go on behind the quote, by the stack:  "," " "  then a key, or "}"
    in {"name": "      over    the 12 tokens that begin what is left of it; no map

Names. As in waves.py: places, leaves, x. The *root* is that of the vocabulary's tree. *Exits* are positions at which a piece may end and the token
goes on. A piece is *wide* if many tokens are inside of it: then its template (automaton.py) is taken, as a map.

How. Pieces that begin with many bytes are asked at once whether they are wide (`_is_wide`). Narrow ones, and all that comes behind pieces, are
followed down the tree by C++ (cpu/row.h), reading by reading. Tokens with the same readings are a group, whose value is found once, there, too: the
sets and states that it leads to (readings.py). With one wide piece, as most have, C++ makes the whole row, and Python is asked only for what nobody
has met: states of the automaton, templates (`_tell`). With several, Python puts their maps together (`_by_reading`); also where what is found on the
way asks to begin anew: a piece turns out to be wide (`_learn`), or what comes behind the beginning of tokens is so much that it should be a template,
too (`leave`). Each is asked once, so it ends.

Beside. A state in a key that is none of an object's own differs from the state that most bytes lead to (Automaton.beside) in the few texts that
lead to a declared key: its row takes that one's map, and is followed only where they differ.

Invariant. The same tokens are allowed as by waves, and lead to states with the same continuations; overrides only add to the map. Cost: some 50 us
for a state in a literal, 100 in a string that was met in another grammar. Where it stops: at READINGS and NARROW of native.TrieWalker, and WORK of
cpu/row.h, waves take over; and where there is no compiler, as in the demo.
Source: XGrammar (Dong et al. 2024) for tokens that need no look at the stack.
"""

from __future__ import annotations

import numpy as np

from . import waves
from .automaton import DEAD, Template
from .tables import Row
from .vocab import Vocab

SOLE = -2                       # as in cpu/row.h
BROAD = 16                      # bytes on which a state moves on
NO_CLASSES = np.zeros(1, np.int32)


class RowBuilder(waves.WaveBuilder):
    """One row. `build` it under the lock of `Shared`."""

    def __init__(self, grammar, index: int):
        self.grammar, self.index, self.readings, self.tables = grammar, index, grammar.readings, grammar.tables
        self.automaton = self.readings.automaton

    def build(self) -> Row:
        """The row. Raises GrammarError."""
        walker = self.tables.vocab.walker if self.readings.native else None
        if walker is not None:
            self._throw_out()
            with self.readings:
                found = walker.read_row(self.index, self.readings, self._tell)
            if found is not None:
                return self._bounded(*found)
        super().__init__(self.grammar, self.index)
        return walker and self._by_reading(walker) or super().build()

    def _by_reading(self, walker) -> Row | None:
        """By C++; None if the readings are too many, or too many are wide."""
        begin, self.leaves_out = self._beginnings(), True
        self.below: dict[tuple, list] = {}          # (node, state, counted) -> (place, x), of what is much behind a token's beginning
        while True:
            seeds, exits, wide = self._sort(begin)
            if len(wide) > waves.MAX_JOINT:
                return None
            if len(wide) + len(self.below) > waves.MAX_JOINT:
                self.leaves_out, self.below = False, {}
            wide |= self.below
            taken = [self._take_template(*piece, same, exits, seeds, len(wide) == 1) for piece, same in wide.items()]
            which, classes = 0, None
            if len(taken) == 1 and len(taken[0][1]) == 1:           # as most are: of each class but the first a leaf
                (template, (classes,)) = taken[0]
                which, _ = self.grammar.shared.map_of([template])
            elif taken:
                self.dense = [(template, self._join_leaves(leaves)) for template, leaves in taken]
                which, values = self._base()
                classes = np.array(values, np.int32)
            with self.readings:
                found = walker.read(seeds, exits, self.tables.maps[which] if taken else None, classes, self)
            if found is None:
                return None
            if not isinstance(found, int):
                vec, tokens, lines = found
                if vec is None:
                    vec = np.array(self.readings.lines_of(values), np.int32) if taken else NO_CLASSES
                return self._bounded(which, vec, tokens, lines)
            if found >= 0:
                self._learn(*seeds[found])

    def _sort(self, begin: list[tuple[tuple, int]]) -> tuple[list, list, dict]:
        """(what is followed from the root, as `TrieWalker.read` has it; no exits yet; wide pieces: (node, state, counted) -> (place, x))."""
        automaton, seeds, wide = self.automaton, [], {}
        for (q, stack, loop, count), x in begin:
            counted, place = loop > 0, self.readings.place(stack, loop, count)
            inside = automaton.wide.get((q, counted))
            if inside is None and len(wide) < waves.MAX_JOINT:      # of more there are no joint maps
                automaton.expand(q)
                if counted or automaton.beside(q) == DEAD:
                    inside = self._is_wide(q, counted)
            if inside or inside is None and not counted and automaton.beside(q) != DEAD:
                wide.setdefault((0, q, counted), []).append((place, x))
            else:
                seeds.append((q, place, x, inside is not None, SOLE, counted))
        return seeds, [], wide

    def _tell(self, q: int, counted: bool) -> None:
        """Whether a state is wide, for C++."""
        automaton, frames = self.automaton, self.automaton.frames
        inside, beside = automaton.wide.get((q, counted)), DEAD
        if inside is None:
            automaton.expand(q)
            beside = DEAD if counted else automaton.beside(q)
            if beside == DEAD:
                inside = self._is_wide(q, counted)
        if not inside and beside == DEAD:
            frames.tell_piece(q, counted, frames.SPARSE if inside is None else frames.SURELY_SPARSE)
        else:
            template = automaton.template(q if beside == DEAD else beside, automaton.root, counted)
            which, _ = self.grammar.shared.map_of([template])
            frames.tell_wide_piece(q, counted, template, self.tables.maps[which], which, beside)

    def _is_wide(self, q: int, counted: bool) -> bool | None:
        """Of a state that moves on many bytes, or does behind one that much begins with, as a blank: its template is made faster than it is
        followed. None: of others nobody asks yet."""
        automaton, far = self.automaton, self.tables.vocab.far
        if not automaton.alive[q].bit_count() >= BROAD:
            ahead = [to for byte, to in automaton.moves(q).items() if far >> byte & 1] if automaton.alive[q] & far else []
            for to in ahead:
                automaton.expand(to)
            if not any(automaton.alive[to].bit_count() >= BROAD for to in ahead):
                return None
        automaton.wide[q, counted] = found = automaton.template(q, automaton.root, counted).size > waves.DENSE
        return found

    def _learn(self, q: int, place: int, x: int, is_long: bool, beside: int, counted: bool) -> None:
        """Following it from the root was too much."""
        if beside != SOLE:
            self.automaton.unlike(q)
        self.automaton.wide[q, counted] = self.automaton.template(q, self.automaton.root, counted).size > waves.DENSE
        self._tell(q, counted)

    def leave(self, left: list[list[int]]) -> bool:
        """Whether something was left out that is not in `below` yet."""
        fresh = False
        for node, q, place, x, counted in left:
            same = self.below.setdefault((node, q, counted > 0), [])
            if (place, x) not in same:
                same.append((place, x))
                fresh = True
        return fresh

    def _join_leaves(self, leaves: list[np.ndarray]) -> list[int]:
        """The values of a template's classes, which may be several leaves each."""
        values, *more = [self.readings.values(each, self.low, self.high) for each in leaves]
        for others in more:
            values = self.readings.join(values, others)
        return values

    def _take_template(self, node: int, q: int, counted: bool, below: list[tuple[int, int]], exits: list, seeds: list,
                       alone: bool) -> tuple[Template, list[np.ndarray]]:
        """What is inside of a wide piece, from a node on, and for each (place, x) that may lie below it the leaf of each class; where it may end are
        new `exits`. alone: it may be the template of a state beside it, whose differences are new `seeds`."""
        beside = self.automaton.beside(q) if alone and not counted and not node else DEAD
        template = self.automaton.template(q if beside == DEAD else beside, self.automaton.at(node), counted)
        for place, x in below:
            if template.exits is not None:
                exits.append((place, template.exits, x))
            if beside != DEAD:
                seeds.append((q, place, x, False, beside, counted))
        leaves = [np.empty((len(template.classes), 4), np.int32) for _ in below]
        for each, (place, x) in zip(leaves, below):
            each[:, 0], each[:, 1:3], each[:, 3] = place, np.array(template.classes, np.int32).reshape(-1, 2), x
        return template, leaves


def _demo() -> None:
    """The rows of waves.py's demo, reading by reading."""
    vocab = Vocab([b"a", b"b", b"ab", b",", b"b.", b"a,b", None], [6])
    waves.Sample(vocab).show(RowBuilder)


if __name__ == "__main__":
    _demo()
