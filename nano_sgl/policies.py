"""Policies: in which order the waiting requests start.

A pass of the scheduler takes requests one after the other, as long as tokens, rows and memory are left. A policy says which one is next:

    queue        A: doc 1, q 1     B: doc 2, q 1     C: doc 1, q 2     D: doc 2, q 2          pool: one document
    fcfs         A B C D           each document is computed twice, for the other one has pushed it out
    lpm          A C B D           after A, C has the longest match: each is computed once

Two kinds. A *key* is a function of a request, and the smallest goes first: simple to write, and every waiting request is looked at in every pass
that starts one. A *picking* policy finds the next request itself: `lpm` and `dfs-weight` ask the tree, which knows (waiting.py), at any depth
of the queue. Both pass over requests that are better off waiting: a running one will compute what they want.

Invariant: who is yielded waits and is not blocked. Fairness is not a policy's affair: under a `fair` one the scheduler itself starts the oldest
request after OLDEST_AFTER others have passed it. (An age bound would turn into fcfs when the whole queue is old.)

Cost: a pick of lpm and dfs-weight O(log n); of a key O(n) a pass. The seam is `POLICIES`, by the decorators `policy` and `picking`.

Source: SGLang's policies by name (lpm and dfs-weight: Zheng et al. 2024); hrrn is Brinch Hansen's (1971).
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Req = Scheduler = Any  # the scheduler's: it is above


@dataclass(frozen=True)
class Policy:
    """An order of the waiting queue. `pick` yields its requests, best first; it is asked for the next one when the last has been started.
    `fair`: nobody starves, for after OLDEST_AFTER starts of others the oldest request goes first (an age bound would turn into fcfs when the
    whole queue is old). `needs_tree`: refused where the cache is off. `preempts`: who waits may take a running one's place."""
    name: str
    pick: Callable[[Scheduler], Iterator[Req]]
    fair: bool = True
    needs_tree: bool = False
    preempts: bool = False


POLICIES: dict[str, Policy] = {}


def policy(name: str, **traits: bool):
    """Register a policy: a function (request, scheduler) -> sort key, the smallest goes first; of equals the earlier arrival. traits: `Policy`'s."""
    def register(key):
        POLICIES[name] = Policy(name, lambda scheduler: _sorted(scheduler, lambda req: key(req, scheduler)), **traits)
        return key
    return register


def picking(name: str, **traits: bool):
    """Register a policy that finds the next request itself: a generator of the scheduler's waiting requests."""
    def register(pick):
        POLICIES[name] = Policy(name, pick, **traits)
        return pick
    return register


def _sorted(scheduler: Scheduler, key: Callable[[Req], Any]) -> Iterator[Req]:
    """The waiting requests that need not wait for a leader, smallest key first."""
    heap = [(key(req), req.arrival, req) for req in scheduler.waiting]
    heapq.heapify(heap)
    while heap:
        req = heapq.heappop(heap)[2]
        if not scheduler.waits_for_leader(req):
            yield req


@picking("fcfs")
def _fcfs(scheduler: Scheduler) -> Iterator[Req]:
    return (req for req in scheduler.waiting if not scheduler.waits_for_leader(req))


@picking("lpm", needs_tree=True)
def _longest_prefix_match(scheduler: Scheduler) -> Iterator[Req]:
    while waiter := scheduler.tree.longest():
        yield waiter.request


@picking("dfs-weight", needs_tree=True)
def _heaviest_subtree(scheduler: Scheduler) -> Iterator[Req]:
    while waiter := scheduler.tree.heaviest():
        yield waiter.request


@policy("lof")
def _longest_output_first(req: Req, scheduler: Scheduler):
    return -req.max_new


@policy("random", fair=False)
def _random(req: Req, scheduler: Scheduler):
    return scheduler.random.random()


@policy("priority", fair=False, preempts=True)
def _priority(req: Req, scheduler: Scheduler):
    return -req.request.priority


@picking("routing-key")
def _routing_key(scheduler: Scheduler) -> Iterator[Req]:
    """Requests whose routing key is most frequent among the running ones."""
    running = collections.Counter(req.request.routing_key for req in scheduler.running)
    return _sorted(scheduler, lambda req: 0 if req.request.routing_key is None else -running[req.request.routing_key])


@policy("shortest-prefill-first")
def _shortest_prefill_first(req: Req, scheduler: Scheduler):
    return scheduler.uncached(req)


@policy("hrrn", fair=False)
def _highest_response_ratio_next(req: Req, scheduler: Scheduler):
    """Waiting time (in tokens computed meanwhile) over service time (in tokens to compute): a long prompt's turn comes too."""
    return -(scheduler.counters.computed_tokens - req.queued_tokens) / scheduler.uncached(req)


def _demo() -> None:
    class Waiting:
        """As much of a request and its scheduler as the keys look at."""
        waits_for_leader = staticmethod(lambda req: False)
        uncached = staticmethod(lambda req: req.left)

        def __init__(self, arrival: int, left: int, max_new: int):
            self.arrival, self.left, self.max_new, self.waiting = arrival, left, max_new, []

    scheduler = Waiting(0, 0, 0)
    scheduler.waiting = [Waiting(0, 900, 10), Waiting(1, 20, 500), Waiting(2, 400, 50)]
    for name in ("fcfs", "lof", "shortest-prefill-first"):
        order = [f"#{req.arrival} ({req.left} to compute, {req.max_new} out)" for req in POLICIES[name].pick(scheduler)]
        print(f"{name:23}", ", ".join(order))


if __name__ == "__main__":
    _demo()
