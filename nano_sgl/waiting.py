"""Waiting: requests that wait hang in the tree, and the tree knows which of them should start next.

SGLang matches every waiting request against its cache in every pass, and stops doing so above 128 of them, which is when order matters most.
Here a request is hung in the tree once. What of its prompt has no KV is a path of *ghosts*:

    root --[system: 900 slots]--+--(document A, wanted by 10)--+--(question 1)
                                |                              +--(question 2) ...
                                +--[document B]--(question 7)                          <- the next under `lpm`: the deepest match

All of them, in order of arrival, are a `Queue`: the oldest is known, and one that starts is taken out without a search.

Names. A *waiter* is parked at the last node with KV on its path: its longest match, which is known at any time without matching. The `line`
of a node is a heap of what is parked there: waiters that end at it, and the ghosts below, each with its earliest waiter (`first`). A request
that runs and has not computed all of its prompt *leads*: who would share WAIT_FOR_LEADER or more of the ghosts it will compute is better off
waiting, so such a ghost is *blocked* and stands in no line until the leader has come closer or given up.

What happens to a node (computed, evicted, split, a waiter comes or goes) changes the first of its line, and then that of the ghosts above as
far as it is theirs too. No other waiter is looked at. Heaps are lazy: an entry that no longer stands is thrown out when it comes up.

    longest    the nodes with KV where somebody is parked, a heap for each depth; the deepest first
    heaviest   per node a heap of its children with KV, the one with most waiters at or below first; walked depth first

Invariants: `first`, `waiters` and `leaders` of every node are what counting gives (`_check_waiting`); below a ghost are ghosts; a ghost has a
waiter or a leader at or below it, or it is taken out.

Cost. Coming, going, leading: the nodes of the path, O(log n) each where a first changes. A pick: O(log n). None depends on how many wait.

Stops holding: arrivals must differ, and `blocked` may be late by a chunk where others than the leader compute or evict parts of its path.
Source: the order is SGLang's `lpm` and `dfs-weight` (Zheng et al. 2024); that ghosts carry it is ours.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Any

WAIT_FOR_LEADER = 32  # tokens that a running request will compute, for which waiting is cheaper than computing them twice
Node = Any            # a radix.Node: the tree is above


class Waiter:
    """A waiting request's place: `node` ends where its whole pages end. `request` is the caller's. When it leads, it no longer waits."""

    __slots__ = ("node", "arrival", "request", "waits")

    def __init__(self, node: Node, arrival: int, request: object):
        self.node, self.arrival, self.request, self.waits = node, arrival, request, True


class Queue:
    """Requests in order of arrival, linked by their own `before` and `after`: one comes at the end and goes from anywhere in O(1), at any depth."""

    def __init__(self) -> None:
        self.before = self.after = self  # the last one, and the first
        self._len = 0

    def add(self, request: Any) -> None:
        """At the end; one that comes back goes before those that arrived after it."""
        after = self
        if self.before is not self and self.before.arrival > request.arrival:
            after = self.after
            while after.arrival < request.arrival:  # it is older than most
                after = after.after
        before = after.before
        request.before, request.after = before, after
        before.after = after.before = request
        self._len += 1

    def remove(self, request: Any) -> None:
        request.before.after, request.after.before = request.after, request.before
        request.before = request.after = None
        self._len -= 1

    @property
    def first(self) -> Any:
        """The oldest: there is one."""
        return self.after

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Any]:
        """The oldest first. The one that was yielded last may be taken out meanwhile."""
        following = self.after
        while following is not self:
            request, following = following, following.after
            yield request


class Waiting:
    """The part of a tree that follows those who wait. Of a node it keeps: `waiters` and `leaders` at or below; `line`, a heap of (arrival,
    tick, waiter, the ghost below that it is the first of, or None); `first`, the earliest waiter in it, None where it is `blocked`; and where it
    `weighs`, `heavy`, a heap of (-waiters, tick, child with KV)."""

    roots: dict[str, Node]
    weighs: bool
    _page: int  # bytes

    def __init__(self, forest: Node) -> None:
        self.waiting = 0
        self._ticks = itertools.count()  # no two entries of a heap are equal
        self._offers: dict[int, list[tuple[int, int, Waiter, Node]]] = {}  # depth -> heap (arrival, tick, waiter, node with KV) of the firsts
        self._depths: list[int] = []      # heap of the depths there, negative
        self._offered = 0
        self._forest = self._cursor = forest  # stands above the roots, for `heaviest` alone; where that found the last one

    def leave(self, waiter: Waiter) -> None:
        """A waiter that was not started goes away; ghosts that nobody wants go with it."""
        waiter.waits = False
        self._count(waiter.node, -1, 0)
        self._refresh(waiter.node)
        self._prune(waiter.node)

    def lead(self, waiter: Waiter) -> None:
        """A waiter starts: it waits no more, and will compute the ghosts of its path. `advance` makes others wait for those that are worth it."""
        waiter.waits = False
        self._count(waiter.node, -1, 1)
        self._refresh(waiter.node)

    def advance(self, leader: Waiter) -> None:
        """Some of what a leader computes has been inserted: find out anew who has to wait for the rest."""
        coming, node = [], leader.node
        while node.slots is None:
            coming.append(node)
            node = node.parent
        for ghost in reversed(coming):
            self._block(ghost, ghost.end - node.end >= WAIT_FOR_LEADER)

    def stop_leading(self, leader: Waiter) -> None:
        """A leader has computed its path, or will not."""
        node = leader.node
        while node is not None:
            node.leaders -= 1
            if node.blocked and not node.leaders:
                self._block(node, False)
            node = node.parent
        self._prune(leader.node)

    def parking(self, node: Node) -> Node:
        """The last node with KV on the path to a node: where its waiters' longest match ends, if nobody leads."""
        while node.slots is None:
            node = node.parent
        return node

    def is_blocked(self, waiter: Waiter) -> bool:
        """Whether a running request will compute what the waiter would otherwise compute too."""
        node = waiter.node
        while node.slots is None and not node.blocked:
            node = node.parent
        return node.blocked

    def longest(self) -> Waiter | None:
        """Of those that need not wait for a leader the one with the longest match, of several the earliest."""
        while self._depths:
            heap = self._offers[-self._depths[0]]
            while heap:
                _, _, waiter, node = heap[0]
                if node.first is waiter and node.slots is not None:
                    return waiter
                heapq.heappop(heap)
                self._offered -= 1
            del self._offers[-heapq.heappop(self._depths)]
        return None

    def heaviest(self) -> Waiter | None:
        """The next one depth first: a subtree is served to its end, then the sibling with most waiters; where a node's children are
        done, the earliest parked at it."""
        node = self._cursor
        if node.parent is None and self.roots.get(node.namespace) is not node or node.slots is None:
            node = self._forest
        done: set[Node] = set()
        while True:
            child = self._heaviest_child(node, done)
            if child is not None:
                node = child
            elif node.first is not None:
                self._cursor = node
                return node.first
            elif node is self._forest:
                return None
            else:
                done.add(node)
                node = node.parent or self._forest

    def _heaviest_child(self, node: Node, done: set[Node]) -> Node | None:
        heap, passed, found = node.heavy, [], None
        while heap and found is None:
            weight, _, child = heap[0]
            if child.waiters != -weight or not weight or child.parent is not (None if node is self._forest else node) or child.slots is None:
                heapq.heappop(heap)
            elif child in done:
                passed.append(heapq.heappop(heap))
            else:
                found = child
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _arrive(self, node: Node, waiter: Waiter) -> None:
        """A waiter comes to the node where it ends: it stands in the lines from there up to where it is parked, or comes after another."""
        arrival, ghost = waiter.arrival, None
        while True:
            self._join(node, waiter, ghost)
            if node.blocked or node.first is not None and node.first.arrival < arrival:
                return
            node.first = waiter
            if node.slots is not None:
                return self._park(node)
            ghost, node = node, node.parent

    def _stands(self, node: Node, entry: tuple[int, int, Waiter, Node | None]) -> bool:
        """Whether an entry of a node's line still holds."""
        _, _, waiter, ghost = entry
        return waiter.waits and (ghost is None or ghost.first is waiter and ghost.parent is node and ghost.slots is None)

    def _join(self, node: Node, waiter: Waiter, ghost: Node | None) -> None:
        """Puts a waiter into the line of the node where it ends, or where the ghost hangs whose first it is; throws out all that no longer
        stands when that is most of it."""
        line, entry = node.line, (waiter.arrival, next(self._ticks), waiter, ghost)
        if not line:
            node.line = [entry]
            return
        heapq.heappush(line, entry)
        if len(line) > 4 * node.waiters + 64:
            node.line = list({entry[2:]: entry for entry in node.line if self._stands(node, entry)}.values())
            heapq.heapify(node.line)

    def _refresh(self, node: Node) -> None:
        """The line of a node has changed: find its first, and tell the ghosts above as long as theirs changes too."""
        while True:
            line, first = node.line, None
            while line:
                _, _, first, ghost = line[0]
                if first.waits and (ghost is None or ghost.first is first and ghost.parent is node and ghost.slots is None):  # `_stands`
                    break
                heapq.heappop(line)
                first = None
            if node.blocked:
                first = None
            if first is node.first:
                return
            node.first = first
            if node.slots is not None:
                return self._park(node)
            if first is not None:
                self._join(node.parent, first, node)
            node = node.parent

    def _park_anew(self, node: Node) -> None:
        """A node has got its KV, or lost it: those in its line are parked here now, or above."""
        node.first = None
        self._refresh(node)

    def _park(self, node: Node) -> None:
        """Offers the first of those that are parked at a node to `longest`."""
        if node.first is not None:
            self._offer(node, (node.first.arrival, next(self._ticks), node.first, node))
            if self._offered > 4 * self.waiting + 64:
                entries = {entry[2:]: entry for heap in self._offers.values() for entry in heap}
                self._offers, self._depths, self._offered = {}, [], 0
                for (waiter, node), entry in entries.items():
                    if node.first is waiter and node.slots is not None:
                        self._offer(node, entry)

    def _offer(self, node: Node, entry: tuple[int, int, Waiter, Node]) -> None:
        heap = self._offers.get(node.end)
        if heap is None:
            heap = self._offers[node.end] = []
            heapq.heappush(self._depths, -node.end)
        heapq.heappush(heap, entry)
        self._offered += 1

    def _block(self, ghost: Node, blocked: bool) -> None:
        if ghost.blocked is not blocked:
            ghost.blocked = blocked
            self._refresh(ghost)

    def _count(self, node: Node | None, waiters: int, leaders: int) -> None:
        """One waiter more, or less, at the end of a path, and one leader."""
        self.waiting += waiters
        weighs = self.weighs
        while node is not None:
            node.waiters += waiters
            node.leaders += leaders
            if weighs and node.slots is not None:
                self._weigh(node)
            node = node.parent

    def _weigh(self, node: Node) -> None:
        """Offers a node with slots, or a root, to its parent's `heavy`."""
        if not self.weighs or node.slots is None:
            return
        above, children = (node.parent, node.parent.children) if node.parent is not None else (self._forest, self.roots)
        if not above.heavy:
            above.heavy = []
        heapq.heappush(above.heavy, (-node.waiters, next(self._ticks), node))
        if len(above.heavy) > 2 * len(children) + 64:
            above.heavy = [(-child.waiters, next(self._ticks), child) for child in children.values() if child.waiters and child.slots is not None]
            heapq.heapify(above.heavy)

    def _prune(self, node: Node) -> None:
        """Takes out ghosts that nobody wants any more, and a root without anything below."""
        while node.slots is None and not node.waiters and not node.leaders:
            del node.parent.children[node.key[: self._page]]
            node.parent, node = None, node.parent
        if node.parent is None and not (node.children or node.waiters or node.leaders) and self.roots.get(node.namespace) is node:
            del self.roots[node.namespace]

    def _check_waiting(self, nodes: list[Node]) -> None:
        """Counts those that wait, and finds every `first`, from their places alone."""
        below: dict[Node, list[Waiter]] = {node: [] for node in nodes}
        for node in reversed(nodes):  # children come after their parents
            own = {waiter for _, _, waiter, ghost in node.line if ghost is None and waiter.waits and waiter.node is node}
            below[node] += own
            parked = [*own, *(child.first for child in node.children.values() if child.is_ghost and child.first is not None)]
            first = None if node.blocked else min(parked, default=None, key=lambda waiter: waiter.arrival)
            assert node.first is first, f"{node}: its first is {node.first}, expected {first}"
            assert node.waiters == len(below[node]), f"{node} counts {node.waiters} waiters, there are {len(below[node])}"
            assert not node.blocked or node.is_ghost and node.leaders, f"{node} is blocked, and nobody computes it"
            assert node.leaders >= sum(child.leaders for child in node.children.values()), f"{node} has fewer leaders than its children"
            if node.first is not None and not node.is_ghost:
                assert any(n is node and waiter is node.first for *_, waiter, n in self._offers[node.end]), f"{node} is not offered"
            if self.weighs and node.waiters and not node.is_ghost:
                above = (node.parent or self._forest).heavy
                assert any(n is node and weight == -node.waiters for weight, _, n in above), f"{node} is not weighed"
            if node.parent is not None:
                below[node.parent] += below[node]
        assert self._offered == sum(map(len, self._offers.values())), "offers are miscounted"
        assert self.waiting == sum(root.waiters for root in self.roots.values()), f"{self.waiting} wait, the roots say otherwise"


def _demo() -> None:
    class Spot:
        """As much of a node as is needed here."""

        def __init__(self, name: str, parent: "Spot | None", size: int, computed: bool):
            self.key, self.parent, self.namespace, self.slots = name, parent, "", [0] * size if computed else None
            self.end = size + (parent.end if parent else 0)
            self.waiters = self.leaders = 0
            self.children, self.line, self.heavy, self.first, self.blocked = {}, [], [], None, False
            if parent is not None:
                parent.children[name] = self

    tree, root = Waiting(Spot("", None, 0, True)), Spot("", None, 0, True)
    tree.roots, tree.weighs, tree._page = {"": root}, False, 99
    system = Spot("system", root, 900, True)
    other, cached = Spot("document A", system, 400, False), Spot("document B", system, 400, True)
    for arrival, (above, name) in enumerate([(other, "A: question 1"), (other, "A: question 2"), (cached, "B: question 1"), (root, "a cold prompt")]):
        waiter = Waiter(Spot(name, above, 50, False), arrival, name)
        tree._count(waiter.node, 1, 0)
        tree._arrive(waiter.node, waiter)
    while waiter := tree.longest():
        tree.lead(waiter)
        match = tree.parking(waiter.node).end
        tree.stop_leading(waiter)
        print(f"{match:5} tokens are cached of {waiter.node.end}: {waiter.request}")


if __name__ == "__main__":
    _demo()
