"""Eviction: which unlocked leaf of the tree goes next.

When the pool is full, somebody's KV has to go. Only an unlocked *leaf* can: what hangs below a node needs it. So an order ranks leaves,
and a parent joins them when its last child has gone:

      root --[A]--+--[B]--[C]      leaves C and D.  C goes first, then B has become a leaf, and so on up.
                  +--[D]           A stays as long as one of them.

Names. An *order* hears what happens to nodes (added, touched, locked, split, bare) and says who is next. A *chain* is the unlocked end
of a path, child before parent: what one `lock` or `unlock` changed. A *rule* is the other kind of policy: a function of a leaf, smallest
value first. A *ring* is a linked list through the nodes themselves, `before` and `after`.

    lru       a ring of all unlocked nodes: O(1) an event and a victim, nothing is searched        (`Lru`)
    rules     a heap with lazy deletion, O(log n): mru, fifo, filo, lfu, slru, priority            (`Heap`)
    cost      a ring for every kind of leaf; the heads of the rings compete                        (`Cost`)

`cost` asks what a slot will save: what its token costs to compute again, times how likely it is to be used again, over how long that may
take. The likelihood is learned as the engine runs: leaves at the same depth, with as many hits, fare alike. Where every chat has eight
turns, lru keeps what was said last, and `cost` finds out that after the eighth nobody comes back.

Invariants: `victims` yields unlocked leaves only. A parent never goes before its child, so output, which hangs below its prompt, goes
before it. What a victim costs does not depend on the size of the tree; a void entry of a heap is thrown out once. `check` proves the links.

The seam is `EVICTION`, by the decorator `eviction`: a class of its own, or a function of a leaf.

Stops holding: a value that changes while a leaf waits in the heap. A rule may use only what the tree changes with an event. And `cost`
only tells apart what differs in depth or hits: where these say nothing about the future (chats of any length), it does what lru does.

Source: lru, lfu, fifo are folklore; slru is Karedla's (et al. 1994); leaf first is RadixAttention's (Zheng et al. 2024). `cost` puts
together the worth over the age of hyperbolic caching (Blankstein et al. 2017), the kinds and their rates of least hit density (Beckmann
et al. 2018), and the price of a miss of GreedyDual-Size-Frequency (Cherkasova 1998).
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Iterator
from typing import Any

SLRU_THRESHOLD = 2         # requests that must have used a node before slru protects it
ATTENTION_PARITY = 24_576  # tokens before it that make a token's attention as dear as its matrix products: 6 x hidden size, here 4,096
MAX_LEVEL = 32             # nodes on a path, beyond which `cost` tells leaves apart no further
MEMORY = 4096              # leaves of a kind whose fate is known, after which `cost` counts those so far half
Node = Any                 # a radix.Node: the tree is above


class Ring:
    """The two ends of a linked list: `after` is the head, `before` the tail; itself where the list is empty."""

    __slots__ = ("before", "after")

    def __init__(self) -> None:
        self.before = self.after = self

    def nodes(self) -> list[Node]:
        """From the head to the tail; asserts that the links agree."""
        linked, node = [], self.after
        while node is not self:
            assert node.after.before is node and node.before.after is node, f"{node}: broken links in the eviction order"
            linked.append(node)
            node = node.after
        return linked


EVICTION: dict[str, type[Order] | Callable[[Node], object]] = {}


def eviction(name: str) -> Callable:
    """Registers a policy: an `Order`, or a function of a leaf whose smallest value goes first (a `Heap` is made of it).

    Of a node, such a function may use what changes only while the node is locked, has children, or is being inserted: its span,
    `hits`, `priority`, `born`, `used`.
    """

    def register(rule):
        EVICTION[name] = rule
        return rule

    return register


class Order:
    """The events that decide the order. A node's `before`, `after` and `ticket` are the order's to use.

    A *chain* is a list of nodes that changed together, each followed by its parent. Only the first can be a leaf.
    """

    def add(self, leaf: Node) -> None:
        """A new unlocked leaf hangs in the tree; `touch` follows."""

    def touch(self, chain: list[Node]) -> None:
        """These are unlocked and were used just now."""

    def lock(self, chain: list[Node]) -> None:
        """These were unlocked until now."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was made of the beginning of `lower`."""

    def bare(self, node: Node) -> None:
        """An unlocked node has lost its last child."""

    def remove(self, leaf: Node) -> None:
        """An unlocked leaf leaves the tree."""

    def victims(self) -> Iterator[Node]:
        """Unlocked leaves, next victim first. The caller removes each before it asks for another."""
        raise NotImplementedError

    def check(self, nodes: list[Node]) -> None:
        """Audits the order against the nodes of the tree."""

    def link(self, node: Node, before: Node | Ring) -> None:
        """Puts a node into a ring before another; before the ring itself is the tail."""
        last = before.before
        last.after = before.before = node
        node.before, node.after = last, before

    def unlink(self, node: Node) -> None:
        """Takes a node out of its ring."""
        node.before.after, node.after.before = node.after, node.before
        node.before = node.after = None


@eviction("lru")
class Lru(Order):
    """Least recently used first. All unlocked nodes are linked by last use, every child before its parent: what is above a node
    was used no earlier, and a chain comes child first. So the head is a leaf, and a parent that becomes bare is in its place."""

    def __init__(self) -> None:
        self.ring = Ring()

    def touch(self, chain: list[Node]) -> None:
        ring = self.ring
        for node in chain:
            if node.after is not None:
                self.unlink(node)
            last = ring.before  # `link`, written out: the hottest loop of unlock
            last.after = ring.before = node
            node.before, node.after = last, ring

    def lock(self, chain: list[Node]) -> None:
        for node in chain:  # `unlink`, written out: the hottest loop of lock
            node.before.after, node.after.before = node.after, node.before
            node.before = node.after = None

    def split(self, upper: Node, lower: Node) -> None:
        if not lower.locks:
            self.link(upper, before=lower.after)

    remove = Order.unlink

    def victims(self) -> Iterator[Node]:
        while self.ring.after is not self.ring:
            yield self.ring.after

    def check(self, nodes: list[Node]) -> None:
        linked = self.ring.nodes()
        place = {node: i for i, node in enumerate(linked)}
        assert len(place) == len(linked) and set(place) == {node for node in nodes if not node.locks}, "lru has lost or gained nodes"
        for node in linked:
            assert place.get(node.parent, len(linked)) > place[node], f"{node} goes after its parent"
        assert all(a.used <= b.used for a, b in zip(linked, linked[1:])), "the eviction order is not sorted"


class Heap(Order):
    """Smallest `value(leaf)` first. The entry of a leaf that is locked or gets a child is not searched for: the node loses its
    `ticket`, and the void entry is thrown out when it comes up, or with all others when they are more than half of the heap."""

    def __init__(self, value: Callable[[Node], object]) -> None:
        self.value = value
        self.heap: list[tuple[object, int, Node]] = []
        self.tickets = self.valid = 0  # handed out so far; entries that still count

    def push(self, leaf: Node) -> None:
        self.void(leaf)
        self.tickets += 1
        self.valid += 1
        leaf.ticket = self.tickets
        heapq.heappush(self.heap, (self.value(leaf), leaf.ticket, leaf))
        if len(self.heap) > 2 * self.valid + 64:
            self.heap = [entry for entry in self.heap if entry[2].ticket == entry[1]]
            heapq.heapify(self.heap)

    def void(self, node: Node) -> None:
        self.valid -= node.ticket > 0
        node.ticket = 0

    def add(self, leaf: Node) -> None:
        self.void(leaf.parent)

    def touch(self, chain: list[Node]) -> None:
        if not chain[0].kids:
            self.push(chain[0])

    def lock(self, chain: list[Node]) -> None:
        self.void(chain[0])

    def bare(self, node: Node) -> None:
        self.push(node)

    def remove(self, leaf: Node) -> None:
        self.void(leaf)

    def victims(self) -> Iterator[Node]:
        while self.heap:
            _, ticket, node = heapq.heappop(self.heap)
            if node.ticket == ticket:
                yield node

    def check(self, nodes: list[Node]) -> None:
        good = {node: value for value, ticket, node in self.heap if node.ticket == ticket}
        leaves = {node for node in nodes if not node.locks and not node.kids}
        assert set(good) == leaves, "the valid entries of the heap are not the unlocked leaves"
        assert self.valid == len(good), f"the heap counts {self.valid} valid entries and has {len(good)}"
        for node, value in good.items():
            assert value == self.value(node), f"{node}: its value went from {value} to {self.value(node)} while it was evictable"


@eviction("mru")
def mru(leaf: Node) -> int:
    """Most recently used first: right where a set that does not fit is read in a circle."""
    return -leaf.used


@eviction("fifo")
def fifo(leaf: Node) -> int:
    """Oldest first, however much it is used. What hangs above is older still, so it follows at once."""
    return leaf.born


@eviction("filo")
def filo(leaf: Node) -> int:
    """Newest first: what came first stays."""
    return -leaf.born


@eviction("lfu")
def lfu(leaf: Node) -> tuple[int, int]:
    """Fewest requests first, then least recently used."""
    return leaf.hits, leaf.used


@eviction("slru")
def slru(leaf: Node) -> tuple[bool, int]:
    """What one request used goes before what several did: a flood of single prompts cannot wash a shared one out."""
    return leaf.hits >= SLRU_THRESHOLD, leaf.used


@eviction("priority")
def priority(leaf: Node) -> tuple[int, int]:
    """What mattered least to its most important request first; a prompt counts one more than an output."""
    return leaf.priority, leaf.used


class Kind(Ring):
    """Leaves that fare alike, least recently used first; how many they are, and how many of the earlier ones were used again or lost."""

    __slots__ = ("leaves", "used", "lost")

    def __init__(self) -> None:
        super().__init__()
        self.leaves, self.used, self.lost = 0, 0.0, 0.0

    @property
    def chance(self) -> float:
        """That one is used again. Those that wait count as not used: a kind that only ever grows is soon found out."""
        return (self.used + 1) / (self.used + self.lost + self.leaves + 1)

    def count(self, used: bool) -> None:
        """One was used again, or else lost."""
        self.used, self.lost = self.used + used, self.lost + (not used)
        if self.used + self.lost > MEMORY:
            self.used, self.lost = self.used / 2, self.lost / 2


@eviction("cost")
class Cost(Order):
    """Least saved by a slot first: price x (chance of another use / age + requests that wait for it).

    The price of a token grows with its depth, as its attention does. The chance is learned by kind: level (nodes on the path), hits on
    a logarithmic scale, and whether the leaf was laid bare, for then its child has just been found worthless. The age stands for the
    time until the next use. Within a kind the least recently used goes first, so the victim is among the heads of the kinds, a few dozen.
    What is waited for is put aside when it comes to the head, into `wanted`, lest it shield what is behind it. A `ticket` is a level.
    """

    def __init__(self) -> None:
        self.kinds: dict[tuple[int, int, bool], Kind] = {}
        self.kind: dict[Node, Kind] = {}  # of the unlocked leaves
        self.wanted = Ring()
        self.now, self.latest = 0, None   # the tree's clock, and the leaf that was touched last

    def enter(self, leaf: Node, bare: bool) -> None:
        name = (min(leaf.ticket, MAX_LEVEL), leaf.hits.bit_length(), bare)
        kind = self.kinds.get(name)
        if kind is None:
            kind = self.kinds[name] = Kind()
        kind.leaves += 1
        self.kind[leaf] = kind
        self.link(leaf, before=kind)

    def leave(self, node: Node, used: bool) -> None:
        """It is no unlocked leaf any more, if it was one: somebody uses it, or else it is lost."""
        kind = self.kind.pop(node, None)
        if kind is not None:
            self.unlink(node)
            kind.leaves -= 1
            if not (used and node is self.latest):  # a request that locks what it has just inserted is no second one
                kind.count(used)

    def add(self, leaf: Node) -> None:
        leaf.ticket = leaf.parent.ticket + 1
        self.leave(leaf.parent, used=True)

    def touch(self, chain: list[Node]) -> None:
        leaf = chain[0]
        self.now = leaf.used
        if not leaf.kids:
            self.leave(leaf, used=True)
            self.enter(leaf, bare=False)
            self.latest = leaf

    def lock(self, chain: list[Node]) -> None:
        self.leave(chain[0], used=True)

    def split(self, upper: Node, lower: Node) -> None:
        upper.ticket = lower.ticket  # what hangs below keeps its number: one off is near enough
        lower.ticket += 1

    def bare(self, node: Node) -> None:
        self.enter(node, bare=True)

    def remove(self, leaf: Node) -> None:
        self.leave(leaf, used=False)

    def saving(self, leaf: Node) -> float:
        """What keeping one of its slots saves, in tokens at depth 0 a tick of the clock."""
        price = 1 + (leaf.start + leaf.end) / 2 / ATTENTION_PARITY
        return price * (self.kind[leaf].chance / (self.now - leaf.used + 1) + leaf.waiters)

    def victims(self) -> Iterator[Node]:
        while self.kind:
            heads = []
            for _ in range(2):  # by and by all of them: is it still waited for?
                if (leaf := self.wanted.after) is not self.wanted:
                    self.unlink(leaf)
                    self.link(leaf, before=self.wanted if leaf.waiters else self.kind[leaf].after)
            for kind in self.kinds.values():
                while (leaf := kind.after) is not kind and leaf.waiters:
                    self.unlink(leaf)
                    self.link(leaf, before=self.wanted)
                if leaf is not kind:
                    heads.append(leaf)
            if self.wanted.after is not self.wanted:
                heads.append(self.wanted.after)
            yield min(heads, key=self.saving)

    def check(self, nodes: list[Node]) -> None:
        linked = [node for ring in (*self.kinds.values(), self.wanted) for node in ring.nodes()]
        leaves = {node for node in nodes if not node.locks and not node.kids}
        assert len(linked) == len(leaves) and set(linked) == set(self.kind) == leaves, "cost has lost or gained leaves"
        waiting = collections.Counter(self.kind.values())
        for name, kind in self.kinds.items():
            assert kind.leaves == waiting[kind], f"the kind {name} counts {kind.leaves} leaves and has {waiting[kind]}"


def _demo() -> None:
    """Four leaves, and in which order each policy takes them."""

    class Leaf:
        """What a policy may look at."""

        def __init__(self, name: str, end: int, hits: int, priority: int, used: int):
            self.name, self.start, self.end, self.hits, self.priority, self.used = name, 0, end, hits, priority, used
            self.born = self.used - self.hits
            self.parent, self.after, self.kids, self.ticket, self.locks, self.waiters = self, None, 0, 0, 0, 0

    leaves = [Leaf("many's prompt", 900, 9, 1, 11), Leaf("answer", 90, 1, 0, 14), Leaf("prompt", 500, 1, 1, 13), Leaf("wanted", 40, 2, 1, 12)]
    leaves[-1].waiters = 3
    for name, rule in EVICTION.items():
        order = rule() if isinstance(rule, type) else Heap(rule)
        for leaf in sorted(leaves, key=lambda leaf: leaf.used):
            order.touch([leaf])
        gone = []
        for leaf in order.victims():
            gone.append(leaf.name)
            order.remove(leaf)
        print(f"{name:9}", " < ".join(gone))


if __name__ == "__main__":
    _demo()
