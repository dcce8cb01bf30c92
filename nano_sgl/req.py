"""Req: a request as the scheduler sees it, from its arrival to its end, and again where it was retracted.

Three lengths say where it stands, and the scheduler's one rule is made of them:

      known    |#############################|         seq_len: tokens whose ids are known, or being sampled (`pending`)
      computed |###############|                       computed_len: those with KV, or in a step that will store it
      shared   |########|                              own_start: those whose slots are the tree's; `own` has the slots from there on
               ^ locked: `node` is the deepest of the path

      waiting --started--> running --committed with its last token--> finished
         ^---retracted-------/                 each of them only once no step holds it (`in_flight`, `leaving`)

While it waits it hangs in the tree by its `place`, and has no row and no slots. While it computes its prompt it leads those who want the same
(waiting.py). What it asked for never changes (`request`, `params`); what was made of it only grows, except where a grammar has its output
tokenised anew.

Invariant: own_start <= computed_len + 1, computed_len <= seq_len, and the row is 0 exactly while it has no memory. Only scheduler.py writes
one; whoever reads one does so between its calls.
Cost: the prompt's ids are converted once, and `key` adds to them what is new. A request of a hundred tokens takes some 3 KB.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .holds import Hold
from .protocol import Request, SamplingParams
from .radix import Node
from .waiting import Waiter


class Req:
    """A request as the scheduler sees it. Three lengths, three names: `seq_len` tokens known (or about to be: `pending`), `computed_len`
    with KV (or in flight), `own_start` in the tree; slots of the columns from `own_start` on are the request's own."""

    __slots__ = ("request", "params", "rid", "seed", "prompt", "output_ids", "prompt_len", "known_len", "max_new", "end_len", "last_column",
                 "arrival", "before", "after", "state", "leaving", "row", "place", "node", "own_start", "store_from", "own", "computed_len",
                 "pending", "guessed", "constrained", "sits_out", "in_flight", "cached_tokens", "prompt_logprobs_from", "scored_len", "counted_len",
                 "retractions", "parent", "hold", "queued_at", "queued_tokens", "started_at", "suspect_until", "spoiled", "forced", "_key")

    def __init__(self, request: Request, max_new: int, arrival: int, seed: int):
        self.request, self.params, self.rid, self.seed = request, request.params, request.rid, seed
        self._key = np.asarray(request.prompt_ids, np.int32).tobytes()
        self.prompt = np.frombuffer(self._key, np.int32)
        self.output_ids: list[int] = []
        self.prompt_len = self.known_len = len(self.prompt)  # the latter counts output_ids too
        self.max_new, self.end_len = max_new, self.prompt_len + (max_new or 1)  # no token is sampled once so many are known, or pending
        self.last_column = self.prompt_len + max(max_new - 1, 0)  # columns it can ever need: the last sampled token needs no KV
        self.arrival = arrival
        self.before = self.after = None   # in the queue
        self.state = "waiting"            # waiting, running, finished; a retracted request waits again
        self.leaving = ""                 # where a request that is still in flight goes once it has landed: "queue" or "done"
        self.row = self.retractions = 0
        self.place: Waiter | None = None  # in the tree, while it waits or computes its prompt
        self.node: Node | None = None     # the deepest tree node of its path; locked while the request runs
        self.own_start = 0
        self.store_from = 0               # columns before this one have their KV from others, maybe in the same step: never stored again
        self.own: Sequence[int] = ()      # slots of columns own_start.., whole pages; int32
        self.computed_len = 0
        self.pending = 0                  # tokens being sampled in steps not yet committed, one a step
        self.guessed = 0                  # and as many more at most, where guesses turn out right, or a grammar's row is there in time
        self.forced = 0                   # guesses for the step that samples first
        self.constrained = self.params.constrained  # its steps may sample nothing: none of them is `pending`
        self.sits_out = False             # no step takes it until its grammar's row is there
        self.in_flight = 0                # steps launched and not yet committed that hold this request
        self.cached_tokens: int | None = None   # prompt tokens found in the tree at first admission
        self.prompt_logprobs_from = None if self.params.prompt_logprobs is None else self.params.logprob_start_len  # the first still owed
        self.scored_len = self.prompt_len               # and where they end
        self.counted_len = 0              # tokens whose nodes have been given this request's hit
        self.parent = request.parent      # the hold that waits for it, until it has been counted
        self.hold: Hold | None = None     # the one that it is
        self.queued_at = 0.0              # seconds on the scheduler's clock
        self.queued_tokens = 0            # tokens that had been computed for others by then
        self.started_at: float | None = None    # when it got its first row
        self.suspect_until = 0            # columns that it must compute alone, since a step failed with it; 0: it may share steps
        self.spoiled = False              # its KV is no good: not numbers, or never computed

    @property
    def seq_len(self) -> int:
        return self.known_len + self.pending

    @property
    def columns(self) -> int:
        """Columns that have a slot."""
        return self.own_start + len(self.own)

    @property
    def launchable(self) -> bool:
        return not self.leaving and not self.sits_out and self.computed_len < self.known_len + self.pending < self.end_len

    @property
    def decodes(self) -> bool:
        """Whether its next step computes the last known token alone, and guesses at what follows."""
        return self.computed_len + 1 == self.known_len + self.pending < self.end_len and self.place is None and not (self.leaving or self.sits_out)

    def ids(self) -> np.ndarray:
        """All known ids. [known_len] int32."""
        return np.concatenate([self.prompt, np.array(self.output_ids, np.int32)]) if self.output_ids else self.prompt

    def key(self) -> bytes:
        """`ids` as the tree takes them; each is converted once."""
        new = self.known_len - len(self._key) // 4
        if new:
            self._key += array.array("i", self.output_ids[-new:]).tobytes()
        return self._key


@dataclass
class Counters:
    """What has happened since the start, for the log line and `stats`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    copied_tokens: int = 0
    evicted_tokens: int = 0
    retractions: int = 0
    preemptions: int = 0
    finished: int = 0
    steps: int = 0


def _demo() -> None:
    """A prompt of 100 tokens, 60 of which were in the tree; the three lengths as it goes on."""
    req = Req(Request(rid="r", prompt_ids=list(range(100)), params=SamplingParams(max_tokens=3)), max_new=3, arrival=0, seed=0)
    req.own_start = req.computed_len = 60
    for what, changes in (("60 tokens adopted", {}), ("the rest is in a step, which samples", {"computed_len": 100, "pending": 1}),
                          ("the token is known", {"output_ids": [7], "known_len": 101, "pending": 0})):
        for name, value in changes.items():
            setattr(req, name, value)
        print(f"{what:37} own_start {req.own_start:3}, computed_len {req.computed_len:3}, seq_len {req.seq_len:3}"
              f"{', decodes' if req.decodes else ''}{', launchable' if req.launchable else ''}")


if __name__ == "__main__":
    _demo()
