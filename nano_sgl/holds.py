"""Holds: a prefix stays in memory until those that were announced have come.

A program that forks knows what the cache can only guess: that n requests with this prefix are about to be sent. Between the computing of the
prefix and the last of them nothing runs that locks it, so under pressure it is evicted, and computed again. SGLang's frontend sends the prefix
ahead and hopes. Here the request that goes ahead is a *hold*, and says how many *children* it goes ahead of:

    hold     |== prefix ==|  children=2          it computes, samples nothing, ends; its lock stays
    child 1               |-- names it as its parent --|      started: its own lock has the prefix now    1 to come
    child 2                              |-- ... --|          started                                    0: the hold's lock goes

      open --its request lands--> kept --the last child, release, time, memory--> over
        '---the children are all there before it lands, or it is aborted----------^

A hold is a promise and never a deadlock: a kept one gives its lock up with the first step after HOLD_S, or as soon as a request would have to
wait, or to be retracted, for want of memory, the oldest first. Who comes after that finds what is left in the tree, like anybody.

Names. `children` are those still to come; each counts once, when it starts for the first time, or ends without ever having started. A hold is
*over* once none is to come. Its `node` is the lock, from landing on: before, the request has its own.

Invariant: a kept hold has children to come and exactly one lock, on a node of the tree; one that is over has none, and no name. Only the
scheduler calls this.
Cost: O(1) for each child, beside the lock. Where it stops holding: pages are shared whole, so what fills none is computed by the children.
Source: the hint is SGLang's `fork` and `cache_prefix` (Zheng et al. 2024, section 3); that it is a lock with an end is ours.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from .radix import Node, Tree

HOLD_S = 120.0      # a hold of which no child has come for so long was forgotten by its program


class Hold:
    """One hold. children: how many are still to come; node: what is locked for them, once its request has landed, until `until`."""

    __slots__ = ("rid", "children", "node", "until")

    def __init__(self, rid: str, children: int):
        self.rid, self.children = rid, children
        self.node: Node | None = None
        self.until = 0.0


class Holds:
    """The holds of one tree that are not over, by the ids of their requests. `clock` tells seconds."""

    def __init__(self, tree: Tree, clock: Callable[[], float]):
        self.tree, self.clock = tree, clock
        self._open: dict[str, Hold] = {}
        self._kept: dict[str, Hold] = {}    # the oldest first

    def __len__(self) -> int:
        return len(self._open) + len(self._kept)

    @property
    def tokens(self) -> int:
        """Tokens that holds keep, each counted once. Some of them may be locked by requests too. May be asked in any thread."""
        ends = [end for hold in list(self._kept.values()) if (end := hold.node) is not None]
        return sum(node.end - node.start for node in {node for end in ends for node in end.path()})

    def open(self, rid: str, children: int) -> Hold:
        """The hold of a request that has come, under an id that no other has."""
        self._open[rid] = hold = Hold(rid, children)
        return hold

    def arrive(self, parent: str) -> None:
        """A child is there, or will never come. A parent that is not known, or no longer, is nobody's."""
        hold = self._open.get(parent) or self._kept.get(parent)
        if hold is not None:
            hold.children -= 1
            if not hold.children:
                self._end(hold)
            elif hold.node is not None:     # its program goes on
                hold.until = self.clock() + HOLD_S
                self._kept[hold.rid] = self._kept.pop(hold.rid)

    def land(self, hold: Hold, node: Node) -> None:
        """The request of a hold is done: its lock on `node` is kept for those to come, or given back where the hold is over."""
        if not hold.children or node.is_root:
            self._end(hold)
            self.tree.unlock(node)
            return
        del self._open[hold.rid]
        hold.node, hold.until = node, self.clock() + HOLD_S
        self._kept[hold.rid] = hold

    def drop(self, rid: str) -> bool:
        """End the hold of this id; whether there was one."""
        hold = self._open.get(rid) or self._kept.get(rid)
        if hold is not None:
            self._end(hold)
        return hold is not None

    def drop_oldest(self) -> bool:
        """End the kept hold that landed first; False where none is kept."""
        for hold in self._kept.values():
            self._end(hold)
            return True
        return False

    def expire(self) -> bool:
        """End those whose time is up; whether there were any."""
        if not self._kept:
            return False
        now, before = self.clock(), len(self._kept)
        while self._kept and next(iter(self._kept.values())).until <= now:
            self.drop_oldest()
        return len(self._kept) < before

    def clear(self) -> None:
        """End all that are kept."""
        while self.drop_oldest():
            pass

    def _end(self, hold: Hold) -> None:
        hold.children = 0
        if self._open.get(hold.rid) is hold:
            del self._open[hold.rid]
        if hold.node is not None:
            del self._kept[hold.rid]
            self.tree.unlock(hold.node)
            hold.node = None

    def check(self) -> collections.Counter[Node]:
        """Prove that what is kept is locked, and for somebody; how many locks of each node are holds'."""
        for rid, hold in [*self._open.items(), *self._kept.items()]:
            assert hold.rid == rid and hold.children > 0, f"the hold {rid} is over"
            assert (hold.node is not None) == (rid in self._kept), f"the hold {rid} is open and kept"
        for hold in self._kept.values():
            assert hold.node.parent is not None and hold.node.holds > 0, f"the hold {hold.rid} keeps what is not locked: {hold.node}"
        assert not self._open.keys() & self._kept.keys(), "two holds have one name"
        return collections.Counter(hold.node for hold in self._kept.values())


def _demo() -> None:
    """A prefix of 6 tokens and two children, in a tree that is asked for room again and again."""
    tree, slots = Tree(), range(1, 9)
    holds = Holds(tree, clock=lambda: 0.0)
    hold = holds.open("prefix", 2)
    node = tree.lock(tree.insert([1, 2, 3, 4, 5, 6], slots[:6]).node)
    tree.insert([7, 8], slots[6:])
    for what, action in (("its request lands", lambda: holds.land(hold, node)), ("room for 4 is wanted", lambda: None),
                         ("a child starts", lambda: holds.arrive("prefix")), ("room for 4 is wanted", lambda: None),
                         ("memory is short", holds.drop_oldest), ("room for 4 is wanted", lambda: None)):
        action()
        evicted = len(tree.evict(4)) if "wanted" in what else 0
        print(f"{what:21} {holds.tokens} tokens held for {hold.children} to come" + (f", {evicted} evicted" if "wanted" in what else ""))


if __name__ == "__main__":
    _demo()
