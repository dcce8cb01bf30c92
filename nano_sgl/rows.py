"""Rows: what each token of a vocabulary leads to, in a state of a grammar.

A state is a set of readings, each a place in a piece of the rules and a stack of what comes after the piece (grammar.py). Few of 50,000 tokens leave
a piece: a row is what the automaton knows of the piece, which all grammars share, and what becomes of those few.

    in a string        map     piece [^"]*"  from the root: a token of letters leads to the same state, one with a quote to its end
                       over    ", "   " }  ... the tokens that go on behind the quote, by the stack:  "," " "  then a key, or "}"
    in {"name": "      over    the 12 tokens that begin what is left of it; no map

Names. As in waves.py: places, leaves, x. The *root* is that of the vocabulary's tree. *Exits* are positions at which a piece may end and the token
goes on. A piece is *wide* if many tokens are inside of it: then its template (automaton.py) is taken, as a map.

How. Pieces that begin with many bytes are asked at once whether they are wide (`_is_wide`). Narrow ones, and all that comes behind pieces, are
followed down the tree by C++ (cpu/row.h), reading by reading, and come back as groups of tokens with the same readings. Most groups are one reading:
what the tables say of that is known there, too, and Python is told of new ones (`take`, `lines`); those of several it joins, each once. What is found
on the way may ask to begin anew: a piece turns out to be wide (`_learn`), or what comes behind the beginning of tokens is so much that it should be a
template, too (`leave`). Each is asked once, so it ends.

Beside. A state in a key that is none of an object's own differs from the state that most bytes lead to (Automaton.beside) in the few texts that
lead to a declared key: its row takes that one's map, and is followed only where they differ.

Invariant. The same tokens are allowed as by waves, and lead to states with the same continuations; overrides only add to the map. Cost: some 50 us
for a state in a literal, 100 in a string that was met in another grammar. Where it stops: at READINGS and NARROW of native.TrieWalker, and WORK of
cpu/row.h, waves take over.
Source: XGrammar (Dong et al. 2024) for tokens that need no look at the stack.
"""

from __future__ import annotations

import numpy as np

from . import waves
from .automaton import DEAD, Template
from .tables import INDEX, Row
from .vocab import Vocab

SOLE, INSTEAD = -2, 1 << 20     # as in cpu/row.h
BROAD = 16                      # bytes on which a state moves on
SAME = -1                       # in place of a line: as the class has it
NO_CLASSES = np.zeros(1, np.int32)


class RowBuilder(waves.WaveBuilder):
    """One row. `build` it under the lock of `Shared`."""

    def build(self) -> Row:
        """The row. Raises GrammarError."""
        walker = self.tables.vocab.walker
        return walker and self._by_reading(walker) or super().build()

    def _by_reading(self, walker) -> Row | None:
        """By C++; None if the readings are too many, or too many are wide."""
        begin, self.places = self._beginnings(), self.grammar._below_pieces
        self.below: dict[tuple, list] = {}          # (node, state, counted) -> (place, x), of what is much behind a token's beginning
        self.leaves_out = True
        while True:
            seeds, exits, wide = self._sort(begin)
            if len(wide) > waves.MAX_JOINT:
                return None
            if len(wide) + len(self.below) > waves.MAX_JOINT:
                self.leaves_out, self.below = False, {}
            wide |= self.below
            taken = [self._take_template(*piece, same, exits, seeds, len(wide) == 1) for piece, same in wide.items()]
            self.classes = taken[0][1][0] if len(taken) == 1 and len(taken[0][1]) == 1 else None
            if self.classes is not None:            # as most are: of each class but the first a leaf
                (which, _), self.values = self.grammar.shared.map_of([taken[0][0]]), [None] * (1 + len(self.classes))
                self.values[0], vec = 0, self.classes
            else:
                self.dense = [(template, self._join_leaves(leaves)) for template, leaves in taken]
                which, self.values = self._base() if wide else (0, [0])
                vec = np.array(self.values, np.int32) if wide else None
            found = walker.read(seeds, exits, self.tables.maps[which] if wide else None, vec, self)
            if found is None:
                return None
            if not isinstance(found, int):
                return self._gather(which, *found)
            if found >= 0:
                self._learn(*seeds[found])

    def _sort(self, begin: list[tuple[tuple, int]]) -> tuple[list, list, dict]:
        """(what is followed from the root, as `TrieWalker.read` has it; no exits yet; wide pieces: (node, state, counted) -> (place, x))."""
        automaton, places, seeds, wide = self.automaton, self.grammar._below_pieces, [], {}
        for (q, stack, loop, count), x in begin:
            counted, place = loop > 0, places.of(stack, loop, count)
            inside = automaton.wide.get((q, counted))
            if inside is None and len(wide) < waves.MAX_JOINT:      # of more there are no joint maps
                automaton.expand(q)
                if counted or automaton.beside(q) == DEAD:
                    inside = self._is_wide(q, counted)
            if inside or inside is None and not counted and automaton.beside(q) != DEAD:
                wide.setdefault((0, q, counted), []).append((place, x))
            else:
                seeds.append((q, place, x, inside is not None, SOLE))
        return seeds, [], wide

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

    def _learn(self, q: int, place: int, x: int, is_long: bool, beside: int) -> None:
        """Following it from the root was too much."""
        counted = self.grammar._below_pieces.keys[place][1] > 0
        if beside != SOLE:
            self.automaton.unlike(q)
        self.automaton.wide[q, counted] = self.automaton.template(q, self.automaton.root, counted).size > waves.DENSE

    def leave(self, left: list[list[int]]) -> bool:
        """Whether something was left out that is not in `below` yet."""
        fresh = False
        for node, q, place, x in left:
            same = self.below.setdefault((node, q, self.grammar._below_pieces.keys[place][1] > 0), [])
            if (place, x) not in same:
                same.append((place, x))
                fresh = True
        return fresh

    def take(self, leaves: list[list[int]]) -> None:
        """New leaves (place, state), each a reading alone, get the next lines of the tables."""
        keys = self.places.keys
        self.grammar._take([(q, keys[place][0]) for place, q in leaves])

    def lines(self, leaves: list[list[int]]) -> list[int]:
        """The lines of other leaves."""
        return self.grammar._entries_of([self._value(*leaf) for leaf in leaves])

    def _gather(self, which: int, vec: np.ndarray | None, tokens: np.ndarray, lines: np.ndarray, pairs: list[int], leaves: list[list[int]]) -> Row:
        """From a map, and what `TrieWalker.read` has found."""
        if vec is None:
            vec = NO_CLASSES
        elif self.classes is None:
            vec = np.array(self.grammar._entries_of(self.values), np.int32)
        if pairs:
            tokens, lines = self._join_groups(tokens, lines, pairs, leaves)
        return self._bounded(which, vec, tokens, lines)

    def _class_value(self, cls: int) -> int:
        value = self.values[cls]
        if value is None:
            value = self.values[cls] = self._value(*self.classes[cls - 1])
        return value

    def _join_leaves(self, leaves: list[list[tuple]]) -> list[int]:
        """The values of a template's classes, which may be several leaves each."""
        values, *more = map(self._values, leaves)
        for others in more:
            values = list(map(self.grammar._join, values, others))
        return values

    def _join_groups(self, tokens: np.ndarray, lines: np.ndarray, pairs: list[int], leaves: list[list[int]]) -> tuple:
        """What becomes of tokens in groups of several leaves, or beside a class that has a value: (tokens, lines), without those that are as their
        class is."""
        joined, found, of_leaf = np.flatnonzero(lines < 0), {}, {}
        groups = (~lines[joined]).tolist()
        for group in dict.fromkeys(groups):
            parts, at = [], group
            while at >= 0:                          # back to a class: what is joined on the way is nobody's
                leaf = pairs[at] & INDEX
                if leaf not in of_leaf:
                    of_leaf[leaf] = self._value(*leaves[leaf])
                parts.append(of_leaf[leaf])
                at = pairs[at] >> 32
            base = self._class_value(~at % INSTEAD)
            value = self.grammar._join_all(parts if ~at >= INSTEAD else [base, *parts])
            found[group] = value if value != base else SAME
        known = dict(zip(found, self.grammar._entries_of([0 if value == SAME else value for value in found.values()])))
        known.update((group, SAME) for group, value in found.items() if value == SAME)
        lines[joined] = [known[group] for group in groups]
        if SAME in known.values():
            kept = lines != SAME
            tokens, lines = tokens[kept], lines[kept]
        return tokens, lines

    def _take_template(self, node: int, q: int, counted: bool, below: list[tuple[int, int]], exits: list, seeds: list,
                       alone: bool) -> tuple[Template, list[list[tuple]]]:
        """What is inside of a wide piece, from a node on, and for each (place, x) that may lie below it the leaf of each class; where it may end are
        new `exits`. alone: it may be the template of a state beside it, whose differences are new `seeds`."""
        beside = self.automaton.beside(q) if alone and not counted and not node else DEAD
        template = self.automaton.template(q if beside == DEAD else beside, self.automaton.at(node), counted)
        for place, x in below:
            if template.exits is not None:
                exits.append((place, template.exits, x))
            if beside != DEAD:
                seeds.append((q, place, x, False, beside))
        return template, [[(place, to, begun, x) for to, begun in template.classes] for place, x in below]


class _Reader:
    """What cpu/row.h does, token by token, of pieces that count nothing. For the demo."""

    def __init__(self, vocab: Vocab):
        self.vocab = vocab

    def read(self, seeds, exits, base, vec, builder) -> tuple:
        automaton, places, tokens, groups, pairs, leaves = builder.automaton, builder.places, [], [], [], []
        for token, text in enumerate(self.vocab.tokens):
            now = {(q, place) for q, place, *_ in seeds if text}
            for i, byte in enumerate(text or b""):
                for q, place in list(now):
                    places.end(place)
                    if i and automaton.accepts[q]:
                        now |= set(map(tuple, places.firsts[slice(*places.table[place, :2])].tolist()))
                now = {(automaton.moves(q)[byte], place) for q, place in now if byte in automaton.moves(q)}
            group = -1
            for q, place in sorted(now):
                leaf = place, q, 0, -1
                leaves += [leaf] * (leaf not in leaves)
                pairs.append(group << 32 | leaves.index(leaf))
                group = len(pairs) - 1
            if now:
                tokens.append(token)
                groups.append(group)
        return vec, np.array(tokens, np.int32), ~np.array(groups, np.int32), pairs, leaves


def _demo() -> None:
    """The rows of waves.py's demo, reading by reading."""
    vocab = Vocab([b"a", b"b", b"ab", b",", b"b.", b"a,b", None], [6])
    vocab.walker = _Reader(vocab)
    waves._Sample(vocab).show(RowBuilder)


if __name__ == "__main__":
    _demo()
