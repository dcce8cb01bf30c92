"""Rows: what each token of a vocabulary leads to, in a state of a grammar.

A state is a set of readings, each a place in a piece of the rules and a stack of what comes after the piece (grammar.py). Few of 50,000 tokens leave
a piece: a row is what the automaton knows of the piece, which all grammars share, and what becomes of those few.

    in a string        map     piece [^"]*"  from the root: a token of letters leads to the same state, one with a quote to its end
                       over    ", "   " }  ... the tokens that go on behind the quote, by the stack:  "," " "  then a key, or "}"
    in {"name": "      over    the 12 tokens that begin what is left of it; no map

Names. As in waves.py: places, leaves, x. The *root* is that of the vocabulary's tree. *Exits* are positions at which a piece may end and the token
goes on. A piece is *wide* if many tokens are inside of it: then its template (automaton.py) is taken, as a map.

How. Pieces that begin with many bytes are asked at once whether they are wide (`_is_wide`). Narrow ones, and all that comes behind pieces, are
followed down the tree by C++ (cpu/row.h), reading by reading, and come back as groups of tokens with the same readings: Python looks at each group
once. What is found on the way may ask to begin anew: a piece turns out to be wide (`_learn`), or what comes behind the beginning of tokens is so much
that it should be a template, too (`_leave`). Each is asked once, so it ends.

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


class RowBuilder(waves.WaveBuilder):
    """One row. `build` it under the lock of `Shared`."""

    def build(self) -> Row:
        """The row. Raises GrammarError."""
        walker = self.tables.vocab.walker
        return walker and self._by_reading(walker) or super().build()

    def _by_reading(self, walker) -> Row | None:
        """By C++; None if the readings are too many, or too many are wide."""
        begin, places = self._beginnings(), self.grammar._below_pieces
        self.below: dict[tuple, list] = {}          # (node, state, counted) -> (place, x), of what is much behind a token's beginning
        leaves_out = True
        while True:
            seeds, exits, wide = self._sort(begin)
            if len(wide) > waves.MAX_JOINT:
                return None
            if len(wide) + len(self.below) > waves.MAX_JOINT:
                leaves_out, self.below = False, {}
            wide |= self.below
            self.dense = [self._take_template(*piece, same, exits, seeds, len(wide) == 1) for piece, same in wide.items()]
            which, vec = self._base() if wide else (0, [0])
            found = walker.read(seeds, exits, self.tables.maps[which] if wide else None, self.automaton, places, leaves_out)
            if found is None:
                return None
            if isinstance(found, int):
                self._learn(*seeds[found])
            elif not self._leave(found[4]):
                return self._gather(which, vec, *found[:4])

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

    def _leave(self, left: list[list[int]]) -> bool:
        """Whether something was left out that is not in `below` yet."""
        fresh = False
        for node, q, place, x in left:
            same = self.below.setdefault((node, q, self.grammar._below_pieces.keys[place][1] > 0), [])
            if (place, x) not in same:
                same.append((place, x))
                fresh = True
        return fresh

    def _gather(self, which: int, vec: list[int], tokens: np.ndarray, groups: np.ndarray, pairs: list[int], leaves: list[list[int]]) -> Row:
        """From a map, the value of each of its classes, and what `TrieWalker.read` has found."""
        grammar, of_leaf = self.grammar, self._values(leaves)
        used, values, changed = set(groups.tolist()), [0] * len(pairs), [False] * len(pairs)
        for group in used:
            parts, at = [], group
            while at >= 0:                          # back to a class: what is joined on the way is nobody's
                parts.append(of_leaf[pairs[at] & INDEX])
                at = pairs[at] >> 32
            base = vec[~at % INSTEAD]
            values[group] = grammar._join_all(parts if ~at >= INSTEAD else [base, *parts])
            changed[group] = values[group] != base
        if sum(changed) < len(used):
            kept = np.array(changed)[groups]
            tokens, groups = tokens[kept], groups[kept]
        if tokens.size > waves.MAX_OVERRIDES:
            return self._row(which, np.array(vec), tokens, np.array(values)[groups])
        entries = grammar._entries_of([*vec, *values])
        return Row(which, np.array(entries[: len(vec)], np.int32), tokens, np.array(entries[len(vec):], np.int32)[groups])

    def _take_template(self, node: int, q: int, counted: bool, below: list[tuple[int, int]], exits: list, seeds: list,
                       alone: bool) -> tuple[Template, list[int]]:
        """What is inside of a wide piece, from a node on, with all (place, x) that may lie below it; where it may end are new `exits`. alone: it may
        be the template of a state beside it, whose differences are new `seeds`."""
        beside = self.automaton.beside(q) if alone and not counted and not node else DEAD
        template, known = self.automaton.template(q if beside == DEAD else beside, self.automaton.at(node), counted), None
        for place, x in below:
            values = self._values([(place, to, begun, x) for to, begun in template.classes])
            known = values if known is None else list(map(self.grammar._join, known, values))
            if template.exits is not None:
                exits.append((place, template.exits, x))
            if beside != DEAD:
                seeds.append((q, place, x, False, beside))
        return template, known


class _Reader:
    """What cpu/row.h does, token by token, of pieces that count nothing. For the demo."""

    def __init__(self, vocab: Vocab):
        self.vocab = vocab

    def read(self, seeds, exits, base, automaton, places, leaves_out) -> tuple:
        tokens, groups, pairs, leaves = [], [], [], []
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
        return np.array(tokens, np.int32), np.array(groups, np.int32), pairs, leaves, []


def _demo() -> None:
    """The rows of waves.py's demo, reading by reading."""
    vocab = Vocab([b"a", b"b", b"ab", b",", b"b.", b"a,b", None], [6])
    vocab.walker = _Reader(vocab)
    waves._Sample(vocab).show(RowBuilder)


if __name__ == "__main__":
    _demo()
