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

from collections.abc import Sequence
from typing import Any

Node = Any  # a radix.Node
Req = Any   # has a `node`
Run = tuple[int, int, int, int]


class Layout:
    """Finds order and runs, and keeps the last answer."""

    def __init__(self):
        self._key: tuple = ()
        self._answer: tuple[list[Req], list[Run]] = ([], [])

    def arrange(self, reqs: Sequence[Req]) -> tuple[list[Req], list[Run]]:
        """The requests in depth-first order of the tree, and the runs that ranges of them share."""
        key = tuple((req, req.node) for req in reqs)
        if key != self._key:
            self._key, self._answer = key, arrange(reqs)
        return self._answer


def arrange(reqs: Sequence[Req]) -> tuple[list[Req], list[Run]]:
    """`Layout.arrange`, from the nodes alone."""
    below: dict[Node, list] = {}  # node -> what hangs there: (is a request, it), requests of the batch and nodes on the way to some
    tops: list[Node] = []
    for req in reqs:
        item, node = (True, req), req.node
        while node is not None:
            if node in below:
                below[node].append(item)
                break
            below[node] = [item]
            if node.parent is None:
                tops.append(node)
            item, node = (False, node), node.parent
    order: list[Req] = []
    runs: list[Run] = []
    stack: list = [(False, node, None) for node in reversed(tops)]
    while stack:
        is_request, item, first = stack.pop()
        if is_request:
            order.append(item)
        elif first is None:
            stack.append((False, item, len(order)))
            stack.extend((*child, None) for child in reversed(below[item]))
        elif len(order) - first > 1 and item.end > item.start:
            run = (first, len(order), item.start, item.end)
            if runs and runs[-1][:3] == (first, len(order), item.end):  # same rows further down: one longer run
                run = (*run[:3], runs.pop()[3])
            runs.append(run)
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
