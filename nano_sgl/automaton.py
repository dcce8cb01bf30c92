"""Automaton: what needs no stack in a grammar, as states over bytes, read against a whole vocabulary at once.

A state of a regular expression is what may still follow, itself an expression: after `"` of `"[a-z]*"` it is `[a-z]*"`. Expressions are interned
(nodes.py), so a state is a small set of numbers, and two grammars that share a piece of text to come share its states, without knowing of each
other:

    {"name": "…         state {[^"]*}  --[^"]--> itself          what comes after the string is no part of it: grammar.py keeps
    {"city": "…         state {[^"]*}  the same number           that on a stack

Names. A state *q* is an interned set of nodes; its row of `delta` (byte -> state) is filled in when q is first met. A *node set* is a set of
positions in the vocabulary's tree. A *template* says what becomes of q below them: which tokens end inside, and in which state; and at which
positions q may end and something else go on (*exits*, themselves a node set). Templates hang on the node set where they begin, so that
what follows a string's end is found again as well. If q repeats a prefix code and somebody counts, the class of a token is its state
and the number of characters it begins.

The walk. Three ways to follow a state down the tree, which differ in cost alone: position by position (a literal); as arrays of the positions that
are alive, their children by arithmetic (a few thousand); and level by level over all positions, dead ones too, which needs no selection
(most of a vocabulary).

Cost: 1.2 ms for all of 49,000 tokens, 20 us for few; a new state 30 us. Where it stops: states are not minimal, and never given back but with the
whole. Source: Brzozowski, "Derivatives of regular expressions" (1964), as the sets of Antimirov (1996).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from .nodes import EMPTY, Nodes, normalize, split_bytes
from .rules import Byte, Cat, GrammarError, Or, Repeat, Rules, tick
from .vocab import Vocab

MAX_STATES = 60_000             # of an automaton, 1 KB each
SMALL = 8                       # positions that are walked one by one rather than as arrays,
FEW = 100                       # with no more tokens below
MANY, MANY_LEVELS = 1 / 8, 16   # a part of the vocabulary that is walked as whole levels, so far down
DEAD = -1


class NodeSet:
    """Positions in the vocabulary's tree. `nodes` int32, a position may stand there more than once; of the set that a template began at, `source` is
    the index of the position above; `count` int32 are characters begun since, None if nobody counts. `templates` begin here; `unions` with others."""

    __slots__ = ("nodes", "source", "count", "templates", "unions", "_kids", "_index")

    def __init__(self, nodes: np.ndarray, source: np.ndarray | None = None, count: np.ndarray | None = None):
        self.nodes, self.source, self.count = nodes, source, count
        self.templates: dict[tuple[int, bool], Template] = {}
        self.unions: dict[tuple[int, ...], tuple[NodeSet, list[NodeSet]]] = {}
        self._kids: tuple | None = None
        self._index: np.ndarray | None = None           # node -> where it stands in `nodes`, -1; empty if one stands there twice

    def kids(self, vocab: Vocab, bytes_: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(children with one of the bytes, index of the parent of each)."""
        if self._kids is None and self.nodes.size > 256:
            found = self._by_byte(vocab, bytes_)
            if found is not None:
                return found
        if self._kids is None:
            kids, parent = spread(vocab, self.nodes)
            if kids.size > 64:                      # in buckets by byte
                by_byte = np.argsort(vocab.byte[kids], kind="stable")
                kids, parent = kids[by_byte], parent[by_byte]
                self._kids = kids, parent, np.searchsorted(vocab.byte[kids], np.arange(257)).tolist()
            else:
                self._kids = kids, parent, None
        kids, parent, buckets = self._kids
        if buckets is None or len(bytes_) > 32:
            return kids, parent
        ranges = [slice(buckets[byte], buckets[byte + 1]) for byte in bytes_ if buckets[byte] < buckets[byte + 1]]
        if len(ranges) == 1:
            return kids[ranges[0]], parent[ranges[0]]
        return (np.concatenate([kids[r] for r in ranges]), np.concatenate([parent[r] for r in ranges])) if ranges else (kids[:0], parent[:0])


    def _by_byte(self, vocab: Vocab, bytes_: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """The same from the bytes' side, if few nodes have them: is the parent one of ours?"""
        if sum(vocab.byte_starts[byte + 1] - vocab.byte_starts[byte] for byte in bytes_) > self.nodes.size:
            return None
        if self._index is None:
            index, places = np.full(vocab.byte.size, DEAD, np.int32), np.arange(self.nodes.size, dtype=np.int32)
            index[self.nodes] = places
            self._index = index if (index[self.nodes] == places).all() else index[:0]
        if not self._index.size:
            return None
        kids = np.concatenate([vocab.by_byte[:0], *(vocab.by_byte[vocab.byte_starts[byte] : vocab.byte_starts[byte + 1]] for byte in bytes_)])
        parent = self._index[vocab.parent[kids]]
        ours = (parent >= 0) & (kids > 0)               # the root is nobody's child
        return kids[ours], parent[ours]


class Template:
    """What becomes of a state below a node set. `tokens` int32 that end inside, `classes[cls[i]]` = (state, characters begun) there,
    `source` the index of the position each began at (None: there is one); `exits` where the state may end and tokens go on. `exact`: from whichever
    source."""

    __slots__ = ("number", "tokens", "cls", "classes", "source", "exits", "exact")

    def __init__(self, number, tokens, cls, classes, source, exits, exact):
        self.number, self.tokens, self.cls, self.classes = number, tokens, cls, classes
        self.source, self.exits, self.exact = source, exits, exact


@lru_cache(4096)
def bits_of(mask: int) -> tuple[np.ndarray, list[int]]:
    """The bytes of a mask, as an array and as a list."""
    bits = np.flatnonzero(np.unpackbits(np.frombuffer(mask.to_bytes(32, "little"), np.uint8), bitorder="little"))
    return bits, bits.tolist()


def spread(vocab: Vocab, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(children of all nodes, index of the parent of each)."""
    kids = vocab.kids[nodes]
    parent = np.repeat(np.arange(nodes.size, dtype=np.int32), kids)
    before = np.cumsum(kids) - kids
    return (vocab.child0[nodes] - before.astype(np.int32))[parent] + np.arange(parent.size, dtype=np.int32), parent


class Automaton:
    """Nodes, states and templates of one vocabulary, shared by all its grammars. `accepts[q]`: may end here; `goes_on[q]`: not only that."""

    def __init__(self, vocab: Vocab):
        self.vocab, self.nodes = vocab, Nodes(vocab.alphabet)
        self.members: list[frozenset[int]] = []
        self.accepts: list[bool] = []
        self.goes_on: list[bool] = []
        self.moves: list[dict[int, int] | None] = []    # byte -> state, once expanded
        self.alive: list[int] = []                      # the bytes it moves on, as a mask, once expanded
        self.delta = np.full((65, 256), DEAD, np.int32)  # one row more than states: its last is what DEAD, as an index, meets
        self._flags = np.zeros((2, 65), bool)           # accepts, expanded; of DEAD, too
        self._flags[1, -1] = True
        self._ids: dict[frozenset[int], int] = {}
        self.root = NodeSet(np.zeros(1, np.int32))
        self.template_bytes, self._number = 0, itertools.count().__next__

    def state(self, members: Iterable[int]) -> int:
        """The state in which any of the nodes may follow."""
        members = frozenset(members)
        q = self._ids.get(members)
        if q is None:
            q = self._ids[members] = len(self.members)
            if q >= MAX_STATES:
                raise GrammarError(f"more than {MAX_STATES} states", "grammar")
            if q == len(self.delta) - 1:
                self.delta = np.concatenate([self.delta[:q], np.full((q + 1, 256), DEAD, np.int32)])
                self._flags = np.concatenate([self._flags[:, :q], np.zeros((2, q), bool), self._flags[:, q:]], 1)
            self.members.append(members)
            self.accepts.append(any(self.nodes.nullable[node] for node in members))
            self.goes_on.append(any(node != EMPTY for node in members))
            self.moves.append(None)
            self.alive.append(0)
            self._flags[0, q] = self.accepts[q]
            tick()
        return q

    def expand(self, q: int) -> dict[int, int]:
        """Fill the state's row of `delta`; byte -> state."""
        if self.moves[q] is None:
            parts = split_bytes(arc for node in self.members[q] for arc in self.nodes.linear(node))
            targets = [(mask, self.state(nodes)) for mask, nodes in parts]
            row, moves = self.delta[q], {}
            row[:] = DEAD
            for mask, to in targets:
                self.alive[q] |= mask
                bits, listed = bits_of(mask)
                row[bits] = to
                moves.update(dict.fromkeys(listed, to))
            self.moves[q], self._flags[1, q] = moves, True
        return self.moves[q]

    def template(self, q: int, starts: NodeSet, counted: bool, marks: np.ndarray | None = None) -> Template:
        """What becomes of q below the positions. `counted`: q repeats a prefix code; how often it begins again is part of the class. Of positions
        that lie below each other, what comes to the same state is kept once, unless its sources have different `marks`."""
        found = starts.templates.get((q, counted))
        if found is None or marks is not None and not found.exact:
            found = self._walk(q, starts, counted, marks)
            if marks is not None and not found.exact:
                return found
            starts.templates[q, counted] = found
            self.template_bytes += 600 + found.tokens.nbytes + found.cls.nbytes + (found.exits.nodes.nbytes * 3 if found.exits else 0)
        return found

    def merged(self, sets: list[NodeSet]) -> NodeSet:
        """The union, each position once. Remembered, since templates hang on it."""
        key = tuple(map(id, sets))
        known = sets[0].unions.get(key)
        if known is None:
            seen = np.zeros(self.vocab.byte.size, bool)
            for each in sets:
                seen[each.nodes] = True
            known = sets[0].unions[key] = NodeSet(np.flatnonzero(seen).astype(np.int32)), sets    # which keeps the ids from being used again
            self.template_bytes += known[0].nodes.nbytes
        return known[0]

    def _walk(self, q: int, starts: NodeSet, counted: bool, marks: np.ndarray | None) -> Template:
        moves = self.expand(q)
        loop = q if counted and self.accepts[q] else self._loop(q) if counted else DEAD
        nodes, source = starts.kids(self.vocab, list(moves))
        states = self.delta[q][self.vocab.byte[nodes]]
        alive = np.flatnonzero(states >= 0)
        alive = alive[np.argsort(nodes[alive])]
        nodes, states, source = nodes[alive], states[alive], source[alive]
        count = np.full(nodes.size, int(q == loop), np.int32) if counted else None
        if not _disjoint(self.vocab, nodes):
            return self._finish(starts, *self._walk_nested(nodes, states, source, count, loop, marks), exact=False)
        if nodes.size and (self.vocab.end[nodes] - self.vocab.first[nodes]).sum() > self.vocab.size * MANY:
            return self._walk_many(starts, nodes, states, source, count, loop)
        return self._finish(starts, *self._walk_levels(nodes, states, source, count, loop))

    def _grow(self, nodes, states, source, count, loop) -> tuple:
        """The children that are alive."""
        self._expand_all(states)
        kids, parent = spread(self.vocab, nodes)
        above = states.take(parent)
        states = self.delta.reshape(-1).take((above << 8) + self.vocab.byte.take(kids))
        alive = np.flatnonzero(states >= 0)
        parent = parent.take(alive)
        if count is not None:
            count = count.take(parent) + (above.take(alive) == loop)
        return kids.take(alive), states.take(alive), source.take(parent), count

    def _walk_levels(self, nodes, states, source, count, loop) -> tuple:
        """All positions that are reached from some, these included: (nodes, states, source, count or None)."""
        levels = []
        while nodes.size > SMALL or self._below(nodes) > FEW:
            levels.append((nodes, states, source, count))
            nodes, states, source, count = self._grow(nodes, states, source, count, loop)
        levels.append(self._walk_few(nodes, states, source, count, loop))
        return _stacked(levels)

    def _walk_nested(self, nodes, states, source, count, loop, marks) -> tuple:
        """The same from positions below each other: depth by depth, so that what meets in a state goes on once."""
        if self.vocab.walker is not None:
            return self._walk_several(nodes, states, source, count, loop, marks)
        first, levels = (nodes, states, source, count), []
        here = tuple(None if column is None else column[:0] for column in first)
        for start, stop in zip(self.vocab.levels[1:], self.vocab.levels[2:]):
            level = slice(*np.searchsorted(nodes, (start, stop)).tolist())
            if level.start < level.stop:
                here = _stacked([here, tuple(None if column is None else column[level] for column in first)])
            if here[0].size:
                key = here[0].astype(np.int64) << 16 | here[1]
                if count is not None:
                    key = key << 12 | here[3]
                if marks is not None:
                    key = key << 13 | marks[here[2]] + 1
                kept = np.unique(key, return_index=True)[1]
                here = tuple(None if column is None else column[kept] for column in here)
                levels.append(here)
                here = self._grow(*here, loop)
        return _stacked(levels)

    def _walk_several(self, nodes, states, source, count, loop, marks) -> tuple:
        """The same by C++."""
        vocab, room = self.vocab, 4 * nodes.size + 4096
        marks = None if marks is None else np.ascontiguousarray(marks, np.int32)
        while True:
            items, head, size = np.empty((room, 5), np.int32), np.full(vocab.byte.size, -1, np.int32), np.array([nodes.size])
            given = items[: nodes.size]
            given[:, 0], given[:, 1], given[:, 2], given[:, 3], given[:, 4] = nodes, states, source, 0 if count is None else count, -1
            for i in np.flatnonzero(nodes[1:] == nodes[:-1]).tolist():      # they are sorted
                given[i + 1, 4] = i
            head[nodes] = np.arange(nodes.size)                             # the last one of each
            at = int(nodes[0])
            while 0 <= (at := vocab.walker.walk_several(self.delta, self._flags[1], loop, at, items, size, head, marks)) < vocab.byte.size:
                self._expand_all(items[: size[0]][items[: size[0], 0] == at, 1])
            if at >= 0:
                found = items[: size[0]]
                return found[:, 0], found[:, 1], found[:, 2], None if count is None else found[:, 3]
            room *= 4

    def _walk_many(self, starts: NodeSet, nodes, states, source, count, loop) -> Template:
        """The same where a good part of the vocabulary is reached: for every node of a level, by its parent's state, dead ones too. No position lies
        below another, and they are sorted."""
        if self.vocab.walker is not None:
            return self._walk_native(starts, nodes, states, source, count, loop)
        vocab, size = self.vocab, self.vocab.byte.size
        here = [states, source, count]
        reached = [np.full(size + 1, DEAD, np.int32), np.zeros(size + 1, np.int32), np.zeros(size + 1, np.int32)]     # of every node, and of none
        of_state, of_source, of_count = reached
        depth = min(MANY_LEVELS, len(vocab.levels) - 1)
        for start, stop in zip(vocab.levels[1:depth], vocab.levels[2:]):
            above = vocab.parent[start:stop]
            state = of_state.take(above)
            self._expand_all(state)
            of_state[start:stop] = self.delta.reshape(-1).take((state << 8) + vocab.byte[start:stop])
            if starts.nodes.size > 1:
                of_source[start:stop] = of_source.take(above)
            if count is not None:
                of_count[start:stop] = of_count.take(above) + (state == loop)
            level = slice(*np.searchsorted(nodes, (start, stop)).tolist())
            _scatter(reached, nodes[level], [None if values is None else values[level] for values in here])
        deeper = np.searchsorted(nodes, stop)       # what is below the last of these levels is thin
        edge = start + np.flatnonzero(of_state[start:stop] >= 0).astype(np.int32)
        found, *values = self._walk_levels(np.concatenate([edge, nodes[deeper:]]), *(
            None if b is None else np.concatenate([a[edge], b[deeper:]]) for a, b in zip(reached, here)), loop)
        _scatter(reached, found, values)

        tokens = np.flatnonzero(of_state.take(vocab.node_of) >= 0).astype(np.int32)
        at = vocab.node_of.take(tokens)
        key = of_state.take(at) if count is None else of_state.take(at).astype(np.int64) * 4096 + of_count.take(at)
        ends = np.flatnonzero(self._flags[0].take(of_state[:-1]) & (vocab.kids > 0)).astype(np.int32)
        exits = NodeSet(ends, of_source[ends], None if count is None else of_count[ends]) if ends.size else None
        return self._template(tokens, key, count is not None, of_source.take(at) if starts.nodes.size > 1 else None, exits)

    def _walk_native(self, starts: NodeSet, nodes, states, source, count, loop) -> Template:
        """The same by C++, in one pass over the tree."""
        vocab, walker = self.vocab, self.vocab.walker
        of_state = np.full(vocab.byte.size + 1, DEAD, np.int32)
        of_source, of_count = (None if values is None else np.zeros_like(of_state) for values in (source if starts.nodes.size > 1 else None, count))
        _scatter([column for column in (of_state, of_source, of_count) if column is not None], nodes,
                 [values for values, column in ((states, of_state), (source, of_source), (count, of_count)) if column is not None])
        at = int(nodes[0])
        while (at := walker.walk(self.delta, self._flags[1], loop, at, of_state, of_source, of_count)) < vocab.byte.size:
            self.expand(int(of_state[vocab.parent[at]]))
        tokens, cls, origins, keys, ends = walker.collect(self._flags[0], of_state, of_source, of_count)
        exits = NodeSet(ends, np.zeros_like(ends) if of_source is None else of_source[ends], None if count is None else of_count[ends])
        classes = [divmod(key, 4096) if count is not None else (key, 0) for key in keys]
        return Template(self._number(), tokens, cls, classes, origins, exits if ends.size else None, True)

    def _expand_all(self, states: np.ndarray) -> None:
        fresh = self._flags[1].take(states)
        if not fresh.all():
            for q in set(states[~fresh].tolist()):
                self.expand(q)

    def _below(self, nodes: np.ndarray) -> int:
        """How many tokens there are at and below a few positions."""
        _, _, first, end = self.vocab.lists
        return sum(end[node] - first[node] for node in nodes.tolist())

    def _loop(self, q: int) -> int:
        """The state between two items, of a state inside of one."""
        seen, todo = {q}, [q]
        while todo:
            for to in self.expand(todo.pop()).values():
                if self.accepts[to]:
                    return to
                if to not in seen:
                    seen.add(to)
                    todo.append(to)
        raise AssertionError("a repeat that never ends an item")

    def _walk_few(self, nodes, states, source, count, loop) -> tuple:
        """The rest of a walk, position by position: shorter than arrays of a few entries."""
        if not nodes.size:
            return nodes, states, source, count
        work = list(zip(nodes.tolist(), states.tolist(), source.tolist(), [0] * nodes.size if count is None else count.tolist()))
        (child0, kids, _, _), kid_bytes = self.vocab.lists, self.vocab.byte_string
        for node, state, origin, begun in work:     # grows while it is read
            n = kids[node]
            if n:
                moves = self.moves[state] or self.expand(state)
                begun += state == loop
                at = child0[node]
                if len(moves) < n:
                    for byte, to in moves.items():
                        kid = kid_bytes.find(byte, at, at + n)
                        if kid >= 0:
                            work.append((kid, to, origin, begun))
                else:
                    work += [(kid, moves[kid_bytes[kid]], origin, begun) for kid in range(at, at + n) if kid_bytes[kid] in moves]
        columns = np.array(work, np.int32).T
        return columns[0], columns[1], columns[2], None if count is None else columns[3]

    def _finish(self, starts: NodeSet, nodes, states, source, count, exact: bool = True) -> Template:
        """The template of all positions that were reached, each with its state."""
        vocab = self.vocab
        ends = np.flatnonzero(self._flags[0].take(states) & (vocab.kids[nodes] > 0))
        exits = NodeSet(nodes[ends], source[ends], None if count is None else count[ends]) if ends.size else None
        inside = np.flatnonzero(vocab.own[nodes])
        own = vocab.own[nodes[inside]]
        if own.size and own.max() > 1:              # several tokens with the same bytes
            inside = np.repeat(inside, own)
            at = vocab.first[nodes[inside]] + np.arange(inside.size) - np.repeat(np.cumsum(own) - own, own)
        else:
            at = vocab.first[nodes[inside]]
        key = states[inside] if count is None else states[inside].astype(np.int64) * 4096 + np.minimum(count[inside], 4095)
        return self._template(vocab.order[at], key, count is not None, source[inside] if starts.nodes.size > 1 else None, exits, exact)

    def _template(self, tokens, key, counted: bool, source, exits: NodeSet | None, exact: bool = True) -> Template:
        values, cls = distinct(key)
        return Template(self._number(), tokens, cls, [divmod(v, 4096) if counted else (v, 0) for v in values], source, exits, exact)


def _stacked(parts: list[tuple]) -> tuple:
    return tuple(None if column[0] is None else np.concatenate(column) for column in zip(*parts))


def _scatter(columns, at: np.ndarray, values) -> None:
    for column, new in zip(columns, values):
        if new is not None:
            column[at] = new


def _disjoint(vocab: Vocab, nodes: np.ndarray) -> bool:
    """Whether none of the positions lies below another."""
    first = vocab.first[nodes]
    order = np.argsort(first, kind="stable")
    return bool((first[order[1:]] >= vocab.end[nodes[order[:-1]]]).all())


def distinct(keys: np.ndarray) -> tuple[list[int], np.ndarray]:
    """(distinct keys, index of each key among them); no sorting of long arrays with few keys."""
    if keys.size < 4096:
        values, at = np.unique(keys, return_inverse=True)
        return values.tolist(), at.astype(np.int32)
    low = int(keys.min())
    span = int(keys.max()) - low + 1
    if span > 1 << 22:
        values, at = np.unique(keys, return_inverse=True)
        return values.tolist(), at.astype(np.int32)
    seen = np.zeros(span, bool)
    seen[keys - low] = True
    values = np.flatnonzero(seen)
    rank = np.zeros(span, np.int32)
    rank[values] = np.arange(values.size, dtype=np.int32)
    return (values + low).tolist(), rank[keys - low]


def _demo() -> None:
    """A JSON string's end, in two grammars; and what a template says of a few tokens."""
    vocab = Vocab([b'a', b'ab', b'"', b'a",', b'",', b'", "', b'\\n', b',', b'": "', b'pack my box with five dozen jugs'])
    automaton = Automaton(vocab)
    body = Repeat(Or((Byte((1 << 256) - 1 & ~(1 << 0x22 | 1 << 0x5C)), Cat((Byte(1 << 0x5C), Byte(1 << 0x6E | 1 << 0x22))))), 0, None)
    for word in (b"name", b"city"):
        text = Cat((*(Byte(1 << b) for b in b'"' + word + b'": "'), body, Byte(1 << 0x22)))
        (whole,) = normalize(automaton.nodes, Rules({"root": text}, "root"))[0].values()
        _, piece, _ = automaton.nodes.keys[automaton.nodes.cut(whole)]     # the string's start and loop, and its end
        q = automaton.state([automaton.nodes.keys[piece][1]])
        path = [q := automaton.expand(q)[byte] for byte in b'"' + word + b'": "']
        print(f'"{word.decode()}": "  goes through states {path}')
    found = automaton.template(path[-1], automaton.root, counted=True)
    for token, cls in zip(found.tokens.tolist(), found.cls.tolist()):
        state, begun = found.classes[cls]
        print(f"in state {path[-1]} the token {vocab.tokens[token]!r} begins {begun} characters and leads to state {state}")
    longer = {vocab.tokens[i] for node in found.exits.nodes for i in vocab.order[vocab.first[node]:vocab.end[node]]}
    print("the string may end inside, or right behind, of", sorted(longer))


if __name__ == "__main__":
    _demo()
