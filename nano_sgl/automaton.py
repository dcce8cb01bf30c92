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

The walk. By C++ (cpu/trie.h) in preorder, where all that is below a node is one range, and is taken as one where the state loops on all that occurs
there:

    [^"]*, at "the"   below are letters, digits, blanks, Han:  the range stays in the state, unseen
           at "="     below is a quote somewhere:              child by child

From positions below each other, position by position. The twin by numpy stands here, for where there is no compiler: position by position (a
literal); as lists of the positions that are alive, their children by arithmetic (a few thousand); and level by level over all positions, dead ones
too, which needs no selection (most of a vocabulary). Of much, tokens and exits are not lists, but arrays by token and bits by node.

Cost: 0.03 to 0.1 ms for a class of characters, all of 49,000 tokens (by numpy 1.2), 0.2 to 0.5 of 129,000; 15 us for few (60); a new state 15 us.
Where it stops: states are not minimal, and never given back but with the whole. A walk by C++ can be one of 32,767 classes, not more. A state that
does not come back to itself, such as every second of (..)*, is followed node by node.
Source: Brzozowski, "Derivatives of regular expressions" (1964), as the sets of Antimirov (1996).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from .nodes import EMPTY, Nodes, split_bytes
from .normal_form import normalize
from .rules import Byte, Cat, GrammarError, Or, Repeat, Rules, tick
from .vocab import Vocab

AHEAD, LOOPS = 64, 80            # states of a literal that are made at once; bytes that come back to a state
AHEAD_BUT = 16                  # states of a word that may not come, likewise
ROWS = 256                      # of states, that are begun at once
MAX_STATES = 60_000             # of an automaton, 1 KB each; less than 65,535
SMALL = 8                       # positions that are walked one by one rather than as arrays,
FEW = 100                       # with no more tokens below
FEW_MERGED = 2048               # positions of several sets, up to which they are sorted
MANY, MANY_LEVELS = 1 / 5, 16   # a part of the vocabulary that is walked as whole levels, so far down
SPREAD = 1 / 64                 # a part of which C++ says by token what becomes of it
DEAD, UNKNOWN = -1, -2
_NONE, _ONLY_EMPTY, _NO_MEMBERS = np.zeros(0, np.int32), frozenset((EMPTY,)), frozenset()


class NodeSet:
    """Positions in the vocabulary's tree. `nodes` int32, each once and `ascending`, or not; of the set that a template began at, `source` is the
    index of the position above; `count` int32 are characters begun since, None if nobody counts; none is higher than `most`. `size` of them.
    `templates` begin here; `unions` with others; `parts`: some of them, by (lowest, highest count).

    A good part of all positions is kept as `members`, bits in `preorder`, the nodes depth first, with `counts` as of TrieWalker.spread; the columns
    are made when they are asked for."""

    __slots__ = ("size", "ascending", "members", "counts", "preorder", "templates", "unions", "parts", "_nodes", "_source", "_count", "_most",
                 "_counted", "_above", "_kids", "_index")

    def __init__(self, nodes: np.ndarray, source: np.ndarray | None = None, count: np.ndarray | None = None, ascending: bool = False):
        self.size, self.ascending, self.members, self._counted, self._above = nodes.size, ascending, None, count is not None, None
        self._nodes, self._source, self._count, self._most, self.counts = nodes, source, count, None, None
        self.templates: dict[tuple[int, bool], Template] = {}
        self.unions: dict[tuple[int, ...], tuple[NodeSet, list[NodeSet]]] = {}
        self.parts: dict[tuple[int, int], NodeSet] = {}
        self._kids: tuple | None = None
        self._index: np.ndarray | None = None           # node -> where it stands in `nodes`, -1; empty if one stands there twice

    @classmethod
    def by_node(cls, members: np.ndarray, counts: tuple[np.ndarray, np.ndarray] | None, size: int, most: int,
                above: tuple[NodeSet | None, np.ndarray] | None, preorder: np.ndarray) -> NodeSet:
        """From `members` and `counts`. above: of each node the source; or the set that a template began at, and the node of each one's source; None:
        it began at one."""
        found = cls(_NONE, ascending=True)
        found.members, found.counts, found.size, found._nodes, found._counted = members, counts, size, None, counts is not None
        found._most, found._above, found.preorder = most, above, preorder
        return found

    @property
    def nodes(self) -> np.ndarray:
        if self._nodes is None:
            self._nodes = np.sort(self.preorder[np.flatnonzero(np.unpackbits(self.members.view(np.uint8), bitorder="little"))])
        return self._nodes

    @property
    def source(self) -> np.ndarray:
        if self._source is None:
            self._source = np.zeros(self.size, np.int32) if self._above is None else _sources(self._above, self.nodes)
        return self._source

    @property
    def count(self) -> np.ndarray | None:
        if self._count is None and self._counted:
            (ranks, begun, more), found = self.counts, np.flatnonzero(np.unpackbits(self.members.view(np.uint8), bitorder="little"))
            self._count = (begun[found] if ranks is None else begun)[np.argsort(self.preorder[found])].astype(np.int32) + more
        return self._count

    @property
    def most(self) -> int:
        if self._most is None:
            self._most = int(self._count.max()) if self._counted and self.size else 0
        return self._most

    @property
    def nbytes(self) -> int:
        """What it takes, at most."""
        by_node = (self.members, self._above and self._above[1], *(self.counts[:2] if self.counts and self.counts[0] is not None else ()))
        return 12 * self.size + sum(array.nbytes for array in by_node if array is not None)

    def within(self, low: int, high: int) -> NodeSet:
        """Those whose count is low to high, low >= 0."""
        ok = (self.count >= low) & (self.count <= high)
        return self if ok.all() else NodeSet(self.nodes[ok], self.source[ok], self.count[ok], self.ascending)

    def places(self, nodes: np.ndarray) -> np.ndarray:
        """Where some nodes stand in `nodes`, which is sorted."""
        return np.searchsorted(self.nodes, nodes).astype(np.int32)

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
        if sum(vocab.byte_starts[byte + 1] - vocab.byte_starts[byte] for byte in bytes_) > self.size:
            return None
        if self._index is None:
            index, places = np.full(vocab.byte.size, DEAD, np.int32), np.arange(self.size, dtype=np.int32)
            index[self.nodes] = places
            self._index = index if (index[self.nodes] == places).all() else index[:0]
        if not self._index.size:
            return None
        kids = np.concatenate([vocab.by_byte[:0], *(vocab.by_byte[vocab.byte_starts[byte] : vocab.byte_starts[byte + 1]] for byte in bytes_)])
        parent = self._index[vocab.parent[kids]]
        ours = (parent >= 0) & (kids > 0)               # the root is nobody's child
        return kids[ours], parent[ours]


class Template:
    """What becomes of a state below a node set. `size` tokens end inside: `tokens` int32, `classes[cls[i]]` = (state, characters begun) there,
    `source` the index of the position each began at (None: there is one); the same by token is `map`, a class more, with `sizes`. `exits` where the
    state may end and tokens go on. `unique`: each token is there once; `exact`: from whichever source."""

    __slots__ = ("number", "size", "classes", "exits", "exact", "_unique", "_tokens", "_cls", "_source", "_map", "_sizes", "_above", "_vocab")

    def __init__(self, vocab: Vocab, number: int, tokens, cls, classes: list[tuple[int, int]], source, exits: NodeSet | None, exact: bool = True,
                 unique: bool | None = None):
        self.number, self.size, self.classes, self.exits, self.exact = number, tokens.size, classes, exits, exact
        self._tokens, self._cls, self._source, self._map, self._sizes, self._above, self._vocab = tokens, cls, source, None, None, None, vocab
        self._unique = True if source is None else unique

    @classmethod
    def by_token(cls, vocab: Vocab, number: int, map_: np.ndarray, sizes: np.ndarray, classes: list[tuple[int, int]], exits: NodeSet | None,
                 above: tuple[NodeSet | None, np.ndarray] | None) -> Template:
        """From a map. above: as of `NodeSet.by_node`."""
        found = cls(vocab, number, _NONE, _NONE, classes, None, exits)
        found.size, found._tokens, found._map, found._sizes, found._above = map_.size - int(sizes[0]), None, map_, sizes, above
        return found

    @property
    def tokens(self) -> np.ndarray:
        if self._tokens is None:
            self._tokens = np.flatnonzero(self._map).astype(np.int32)
        return self._tokens

    @property
    def cls(self) -> np.ndarray:
        if self._tokens is None or self._cls is _NONE:
            self._cls = self._map[self.tokens].astype(np.int32) - 1
        return self._cls

    @property
    def source(self) -> np.ndarray | None:
        if self._source is None and self._above is not None:
            self._source = _sources(self._above, self._vocab.node_of[self.tokens])
        return self._source

    @property
    def unique(self) -> bool:
        """Below positions of which one is inside the other it may not be."""
        if self._unique is None:
            seen = np.zeros(self._vocab.size, bool)
            seen[self._tokens] = True
            self._unique = int(seen.sum()) == self.size
        return self._unique

    @property
    def map(self) -> tuple[np.ndarray, np.ndarray]:
        """(class + 1 of each token, 0: none, int16 [V]; how many tokens each has)."""
        if self._map is None:
            self._map = np.zeros(self._vocab.size, np.int16)
            self._map[self._tokens] = self._cls + 1
            self._sizes = np.bincount(self._cls + 1, minlength=len(self.classes) + 1)
            self._sizes[0] = self._vocab.size - self.size
        return self._map, self._sizes

    @property
    def nbytes(self) -> int:
        """What it takes, with its exits."""
        return 600 + 8 * self.size + (0 if self._map is None else self._map.nbytes) + (0 if self.exits is None else self.exits.nbytes)


def _sources(above: tuple[NodeSet | None, np.ndarray], nodes: np.ndarray) -> np.ndarray:
    starts, of_node = above
    return of_node[nodes] if starts is None else starts.places(of_node[nodes])


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


def union(vocab: Vocab, sets: list[np.ndarray]) -> np.ndarray:
    """All nodes of some arrays, ascending, each once."""
    if sum(nodes.size for nodes in sets) < FEW_MERGED:
        return np.unique(np.concatenate([_NONE, *sets]))
    seen = np.zeros(vocab.byte.size, bool)
    for nodes in sets:
        seen[nodes] = True
    return np.flatnonzero(seen).astype(np.int32)


class Automaton:
    """Nodes, states and templates of one vocabulary, shared by all its grammars. `accepts[q]`: may end here; `goes_on[q]`: not only that."""

    def __init__(self, vocab: Vocab):
        self.vocab, self.nodes = vocab, Nodes(vocab.alphabet)
        self.members: list[frozenset[int]] = []
        self.accepts: list[bool] = []
        self.goes_on: list[bool] = []
        self.alive: list[int] = []                      # the bytes it moves on, as a mask, once expanded
        self._moves: dict[int, dict[int, int]] = {}     # byte -> state, of those that were asked for
        self._room = np.empty((MAX_STATES + 1, 256), np.int32)      # of the system, who gives what is written to
        self.delta = self._room[:65]                    # one row more than states: its last is what DEAD, as an index, meets
        self.delta[:-1], self.delta[-1] = UNKNOWN, DEAD
        self._flags = np.zeros((3, 65), bool)           # accepts, expanded, goes on; of DEAD, too
        self._flags[1, -1] = self._flags[2] = True
        self._ids: dict[frozenset[int], int] = {}
        self.expand(self.state(()))                     # state 0: nothing can follow, nor end here
        self.root = NodeSet(np.zeros(1, np.int32))
        self._at: dict[int, NodeSet] = {0: self.root}
        self._beside: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self.cuts: dict[int, int] = {}                  # five of grammar.py's
        self.firsts: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self.begun: dict[int, tuple[int, int]] = {}
        self.loops: list[tuple[int, int, int]] = [(DEAD, 1, 0)]
        self.loop_ids: dict[tuple[int, int, int], int] = {}
        self.frames = None if vocab.walker is None else vocab.walker.frames()       # what C++ knows of these
        self.wide: dict[tuple[int, bool], bool] = {}    # of (state, counted) where rows have met much: whether it is all in its own template
        self.template_bytes, self._number = 0, itertools.count().__next__

    def state(self, members: Iterable[int]) -> int:
        """The state in which any of the nodes may follow."""
        members = frozenset(members)
        q = self._ids.get(members)
        if q is None:
            q = self._ids[members] = self._add(1)
            self.members[q], self.goes_on[q] = members, members != _ONLY_EMPTY
            self._flags[2, q] = self.goes_on[q]
            self.accepts[q] = self._flags[0, q] = any([self.nodes.nullable[node] for node in members])
            tick()
        return q

    def _add(self, number: int) -> int:
        """So many states more; the first of them. They do not accept."""
        q, room = len(self.members), len(self.delta) - 1
        if q + number > MAX_STATES:
            raise GrammarError(f"more than {MAX_STATES} states", "grammar")
        if q + number > room:
            more = min(max(ROWS, number), MAX_STATES - room)
            self.delta = self._room[: room + more + 1]
            self.delta[room:-1], self.delta[-1] = UNKNOWN, DEAD
            fresh = np.zeros((3, more), bool)
            fresh[2] = True
            self._flags = np.concatenate([self._flags[:, :room], fresh, self._flags[:, room:]], 1)
        for column, value in ((self.members, _NO_MEMBERS), (self.accepts, False), (self.goes_on, True), (self.alive, 0)):
            column += [value] * number
        return q

    def expand(self, q: int) -> None:
        """Fill the state's row of `delta`; in a literal, also those of the states up to its end."""
        if self._flags[1, q] or self._expand_literal(q) or self._expand_but(q):
            return
        targets = [(mask, self.state(nodes)) for mask, nodes in split_bytes([arc for node in self.members[q] for arc in self.nodes.linear(node)])]
        row, alive = self.delta[q], 0
        row.fill(DEAD)
        for mask, to in targets:
            alive |= mask
            row[bits_of(mask)[0] if mask & mask - 1 else mask.bit_length() - 1] = to
        self.alive[q], self._flags[1, q] = alive, True

    def _expand_literal(self, q: int) -> bool:
        """The same where a few bytes must come, one after the other. What is left of a literal is not looked up among the nodes: it is long."""
        (node,) = self.members[q] if len(self.members[q]) == 1 else (EMPTY,)
        kind, *parts = self.nodes.keys[node]
        text = bytes(itertools.takewhile(lambda byte: byte >= 0, map(self._byte_of, parts[:AHEAD]))) if kind == "cat" else b""
        if len(text) < 2:
            return False
        end, first = self.state((self.nodes.cat(parts[len(text):]),)), self._add(len(text) - 1)
        last, delta = first + len(text) - 1, self.delta.reshape(-1)
        self.delta[q] = self.delta[first:last] = DEAD
        delta[256 * q + text[0]], self._flags[1, q], self.alive[q] = first, True, 1 << text[0]
        for state, byte in enumerate(text[1:], first):
            delta[256 * state + byte] = state + 1
            self.alive[state] = 1 << byte
        delta[256 * last - 256 + text[-1]], self._flags[1, first:last] = end, True
        return True

    def _expand_but(self, q: int) -> bool:
        """The same where any text may come but some words: all that differs from one state of this kind to another are the first bytes of its words.
        Where there is one such byte, also those of the states behind it."""
        (node,) = self.members[q] if len(self.members[q]) == 1 else (EMPTY,)
        kind, *parts = self.nodes.keys[node]
        if kind != "but" or parts[1] == (b"",):
            return False
        item, words = parts
        plain, singles = self.state((self.nodes.but(item, (b"",)),)), self.nodes.singles(item)
        self.expand(plain)
        for _ in range(AHEAD_BUT):
            below: dict[int, list[bytes]] = {}
            for word in words:
                if word and singles >> word[0] & 1:
                    below.setdefault(word[0], []).append(word[1:])
            targets = [(byte, self.state((self.nodes.but(item, tuple(tails)),))) for byte, tails in below.items()]
            self.delta[q] = self.delta[plain]
            for byte, to in targets:
                self.delta[q, byte] = to
            self.alive[q], self._flags[1, q] = self.alive[plain], True
            if len(targets) != 1 or self._flags[1, targets[0][1]]:
                break
            (byte, q), = targets
            words = below[byte]
        return True

    def _byte_of(self, node: int) -> int:
        """The byte that a node stands for, -1 if it is not one alone."""
        found = self._bytes.get(node)
        if found is None:
            kind, *parts = self.nodes.keys[node]
            found = self._bytes[node] = parts[0].bit_length() - 1 if kind == "byte" and not parts[0] & parts[0] - 1 else -1
        return found

    def beside(self, q: int) -> int:
        """The state, not q, to which most bytes lead, from q and from there: what follows q is the same but for a few texts. DEAD: there is none."""
        found = self._beside.get(q)
        if found is None:
            self.expand(q)
            found = DEAD
            if self.alive[q].bit_count() > LOOPS:
                most, number = Counter(self.moves(q).values()).most_common(1)[0]
                if number > LOOPS and most == q:
                    self.wide[q, False] = True
                elif number > LOOPS and Counter(self.moves(most).values())[most] > LOOPS:
                    found = most
            self._beside[q] = found
        return found

    def moves(self, q: int) -> dict[int, int]:
        """byte -> state."""
        found = self._moves.get(q)
        if found is None:
            self.expand(q)
            bits, listed = bits_of(self.alive[q])
            found = self._moves[q] = dict(zip(listed, self.delta[q, bits].tolist()))
        return found

    def unlike(self, q: int) -> None:
        """It differs too much from the state beside it."""
        self._beside[q] = DEAD

    def at(self, node: int) -> NodeSet:
        """One position, for the templates that begin there."""
        if node not in self._at:
            self._at[node] = NodeSet(np.array([node], np.int32), ascending=True)
        return self._at[node]

    def forget_templates(self) -> None:
        """Of those that begin at one position, and what hangs on them."""
        for one in self._at.values():
            one.templates.clear()
        self.template_bytes = 0
        if self.frames is not None:
            self.frames.forget_pieces()

    def template(self, q: int, starts: NodeSet, counted: bool, marks: np.ndarray | None = None) -> Template:
        """What becomes of q below the positions. `counted`: q repeats a prefix code; how often it begins again is part of the class. Of positions
        that lie below each other, what comes to the same state is kept once, unless its sources have different `marks`."""
        found = starts.templates.get((q, counted))
        if found is None or marks is not None and not found.exact:
            found = self._walk(q, starts, counted, marks)
            if marks is not None and not found.exact:
                return found
            starts.templates[q, counted] = found
            self.template_bytes += found.nbytes
        return found

    def merged(self, sets: list[NodeSet]) -> NodeSet:
        """The union, each position once. Remembered, since templates hang on it."""
        key = tuple(map(id, sets))
        known = sets[0].unions.get(key)
        if known is None:
            known = NodeSet(union(self.vocab, [each.nodes for each in sets]), ascending=True), sets     # which keeps the ids from being used again
            sets[0].unions[key] = known
            self.template_bytes += known[0].nodes.nbytes
        return known[0]

    def within(self, exits: NodeSet, low: int, high: int) -> NodeSet:
        """Those whose count is low to high. Remembered, likewise."""
        if low <= 0 and exits.most <= high:
            return exits
        known = exits.parts.get((low, high))
        if known is None:
            known = exits.parts[low, high] = exits.within(max(low, 0), high)
            self.template_bytes += known.nbytes
        return known

    def _walk(self, q: int, starts: NodeSet, counted: bool, marks: np.ndarray | None) -> Template:
        self.expand(q)
        loop = q if counted and self.accepts[q] else self._loop(q) if counted else DEAD
        if self.vocab.walker is not None:
            return self._walk_native(q, starts, loop, marks)
        nodes, source = starts.kids(self.vocab, bits_of(self.alive[q])[1])
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

    def _walk_many(self, starts: NodeSet, nodes, states, source, count, loop) -> Template:
        """The same where a good part of the vocabulary is reached: for every node of a level, by its parent's state, dead ones too. No position lies
        below another, and they are sorted."""
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

    def _walk_native(self, q: int, starts: NodeSet, loop: int, marks: np.ndarray | None) -> Template:
        """The same by C++."""
        vocab, walker, number, counted = self.vocab, self.vocab.walker, self._number(), loop != DEAD
        members = starts.members if marks is None else None
        with walker.lock:
            if members is None:
                walker.begin(q, loop, starts.nodes, starts.ascending, None if marks is None else np.ascontiguousarray(marks, np.int32), SPREAD)
            else:
                walker.begin_inside(q, loop, members, starts.size, SPREAD)
            try:
                while unknown := walker.go(self.delta, self._flags):
                    for state in unknown:
                        self.expand(state)
            except OverflowError:
                raise GrammarError("a state of the grammar leads to more than 32,767 others", "grammar") from None
            by_token = walker.is_spread
            found = walker.spread() if by_token else walker.listed()
        if by_token:
            map_, sizes, keys, exits, counts, num_exits, most, of_node = found
        else:
            (tokens, cls, source), keys, (nodes, above, count), repeated, dropped = found
            if members is not None:
                source, above = starts.places(source), starts.places(above)
        classes = [divmod(key, 4096) for key in keys] if counted else [(key, 0) for key in keys]
        if not by_token:
            if starts.size == 1 and (nodes[1:] < nodes[:-1]).any():         # in the order of the walk: by node is what C++ looks them up by
                order = nodes.argsort()
                nodes, above, count = nodes[order], above[order], count[order]
            exits = NodeSet(nodes, above, count if counted else None, starts.size == 1) if nodes.size else None
            return Template(vocab, number, tokens, cls, classes, source if starts.size > 1 else None, exits, not dropped, None if repeated else True)
        above = None if of_node is None else (starts if members is not None else None, of_node)
        exits = NodeSet.by_node(exits, counts, num_exits, most, above, walker.preorder) if num_exits else None
        return Template.by_token(vocab, number, map_, sizes, classes, exits, above)

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
            for to in self.moves(todo.pop()).values():
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
                moves = self.moves(state)
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
        return Template(self.vocab, self._number(), tokens, cls, [divmod(v, 4096) if counted else (v, 0) for v in values], source, exits, exact)


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
    """(distinct keys, index of each key among them); no sorting where they lie close together."""
    low, high = (int(keys.min()), int(keys.max())) if keys.size else (0, 0)
    span = high - low + 1
    if span > min(16 * keys.size + 4096, 1 << 22):
        values, at = np.unique(keys, return_inverse=True)
        return values.tolist(), at.astype(np.int32)
    keys, rank = keys - low, np.zeros(span, np.int32)
    rank[keys] = 1
    values = np.flatnonzero(rank)
    rank[values] = np.arange(values.size, dtype=np.int32)
    return (values + low).tolist(), rank[keys]


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
        path = [q := automaton.moves(q)[byte] for byte in b'"' + word + b'": "']
        print(f'"{word.decode()}": "  goes through states {path}')
    found = automaton.template(path[-1], automaton.root, counted=True)
    for token, cls in zip(found.tokens.tolist(), found.cls.tolist()):
        state, begun = found.classes[cls]
        print(f"in state {path[-1]} the token {vocab.tokens[token]!r} begins {begun} characters and leads to state {state}")
    longer = {vocab.tokens[i] for node in found.exits.nodes for i in vocab.order[vocab.first[node]:vocab.end[node]]}
    print("the string may end inside, or right behind, of", sorted(longer))


if __name__ == "__main__":
    _demo()
