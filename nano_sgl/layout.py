"""Layout: in which order the rows of a batch lie, and which of their KV they have in common.

Rows that share a prefix share the slots of its KV. Attention can read a slot once for all of them, if they are neighbours. So the rows of a batch
lie in depth-first order of the tree, and the rows at or below any node are one range, at every level at once:

    root --system--+--document A--+-- row 0              runs    (rows 0-3, columns of `system`)
                   |              +-- row 1                      (rows 0-1, columns of `document A`)
                   +--document B----- row 2
                   +----------------- row 3

Names: a *run* (first, last, start, end) says that rows first..last-1 have columns start..end-1 in the same slots. Runs nest; a chain of nodes
with the same rows is one run. Which of them are worth an item of their own is attention's to decide (attention.plan).

Invariant: a row's run ends where its request's own slots begin, or before. Splits of locked nodes change no run, so the layout of a decode step is
that of the step before, and is kept.

Cost: the nodes of the paths, once each; nothing where the members and their nodes are the same as last time. Where it stops: rows that part inside
a node share its upper half only once it has been split, which a lock does.

Source: depth-first order is SGLang's (Zheng et al. 2024); runs at every level are what Hydragen (Juravsky et al. 2024) reads once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

Node = Any  # a radix.Node
Req = Any   # has a `node`
Run = tuple[int, int, int, int]


class Layout:
    """Finds order and runs, and keeps the last answer."""

    def __init__(self):
        self._reqs: list[Req] = []
        self._nodes: list[Node] = []  # the requests' nodes
        self._answer: tuple[list[Req], list[Run]] = ([], [])

    def arrange(self, reqs: Collection[Req]) -> tuple[list[Req], list[Run]]:
        """The requests in depth-first order of the tree, and the runs that ranges of them share."""
        reqs, nodes = list(reqs), [req.node for req in reqs]
        if nodes != self._nodes or reqs != self._reqs:
            self._reqs, self._nodes, self._answer = reqs, nodes, arrange(reqs)
        return self._answer


def arrange(reqs: Sequence[Req]) -> tuple[list[Req], list[Run]]:
    """`Layout.arrange`, from the nodes alone."""
    below: dict[Node, list[Req | Node]] = {}  # node -> what hangs there: requests of the batch, and nodes on the way to some
    tops: list[Node] = []
    for req in reqs:
        item, node = req, req.node
        while node is not None:
            here = below.get(node)
            if here is not None:
                here.append(item)
                break
            below[node] = [item]
            item, node = node, node.parent
        else:
            tops.append(item)
    order: list[Req] = []
    runs: list[Run] = []
    stack: list = tops[::-1]  # requests, nodes, and of a run that its rows will end: (its first row, start, end)
    while stack:
        top = item = stack.pop()
        if type(item) is tuple:
            first, start, end = item
            runs.append((first, len(order), start, end))
            continue
        here = below.get(item)
        while here is not None and len(here) == 1:  # a chain: the same rows further down
            item = here[0]
            here = below.get(item)
        if here is None:
            order.append(item)
            continue
        if item.end > top.start:
            stack.append((len(order), top.start, item.end))
        stack += here[::-1]
    return order, runs


def _demo() -> None:
    class Spot:
        """As much of a node, or of a request, as is needed here."""

        def __init__(self, name: str, parent: Spot | None, size: int, node: Spot | None = None):
            self.name, self.parent, self.node = name, parent, node
            self.start = parent.end if parent else 0
            self.end = self.start + size

    root = Spot("root", None, 0)
    system = Spot("system", root, 40)
    first, second = Spot("document A", system, 20), Spot("document B", system, 30)
    reqs = [Spot(f"question {i}", None, 0, node) for i, node in enumerate((first, second, system, first), start=1)]
    order, runs = arrange(reqs)
    print("arrived:", ", ".join(req.name for req in reqs), "\nrows:   ", ", ".join(f"{row} {req.name}" for row, req in enumerate(order)))
    for first, last, start, end in runs:
        print(f"rows {first}-{last - 1} share columns {start}-{end - 1}")


if __name__ == "__main__":
    _demo()
