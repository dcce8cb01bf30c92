"""Steady: steps that are the step before once more, further on, so that a whole pass would find nothing else.

Once prompts are computed, rows decode for hundreds of steps. The same rows, in the same order, share the same runs of KV; nobody waits, and for some
steps none of them lacks a slot or reaches its end. What a pass finds out then row by row is five columns of numbers:

      row   starts   guesses   slack   slots up to   end          next step
       1      130        4        5       168         400         131 .. 135, or up to 5 further where guesses in flight are right
       2       77        -        1       110          90         its last token again, and what its grammar allows behind it

Two ways on. *A token later*: no row guesses, so the next step is the last one plus one; how many of those there will be is known ahead (`left`).
*Further on*: rows guess, or have a grammar; how far each has come is read off the requests.

Invariant. `further` gives the batch that Scheduler.next_batch would have planned, or None where that might give slots to a row, start or retract
one, or leave one out. Whatever else happens to any request is an event; who owns this forgets it then. Reads requests, writes none.
Cost: a token later 10 us, further on some 30 numpy calls, 40 us and 0.4 us a row; a pass takes 3 us a row. Where it stops: a prompt in the step.
Source: vLLM v1 and SGLang keep a batch of rows that decode, and change what has come and gone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .memory import Batch, Writes
from .protocol import Request, SamplingParams
from .req import Req


class Steady:
    """The steps behind one that all running requests were in, each with its last known token. `events`: the scheduler's count of them."""

    def __init__(self, batch: Batch, events: int, reserve: int):
        """reserve: columns beyond what is known and guessed that a row keeps."""
        self.batch, self.events, self.reserve = batch, events, reserve
        self.constrained = any(req.constrained for req in batch.reqs)
        self._of_rows: tuple[np.ndarray, ...] | None = None
        self.left = 0
        if not (self.constrained or batch.slack.any() or batch.draft_lens.any()):
            self.left = min(min(req.own_start + len(req.own) - req.known_len - reserve, req.end_len - req.known_len - req.pending)
                            for req in batch.reqs)

    def further(self, step: int, draft_lens: Mapping[Req, int], room: int) -> Batch | None:
        """The next step; None: it takes a whole pass. draft_lens: guesses that a request may have verified; room: for how many there is."""
        last = self.batch
        if self.left > 0 and not draft_lens:
            self.left -= 1
            self.batch = Batch(step, last.reqs, last.rows, last.starts + 1, last.q_lens, last.draft_lens, last.slack, last.limits,
                               last.store_from, last.complete, last.samples, last.owed_from, [], last.shared, Writes(), again=True)
            return self.batch
        reqs = last.reqs
        if self._of_rows is None:
            self._of_rows = _column([req.end_len for req in reqs]), _column([req.last_column for req in reqs]), \
                _column([req.store_from for req in reqs])
        ends, last_columns, store_from = self._of_rows
        starts, known, guessed = (_column(part) for part in zip(*[(req.computed_len, req.known_len, req.guessed) for req in reqs]))
        if not (draft_lens or self.constrained or guessed.any()):
            return None                 # a token later from now on: a pass says for how many steps
        drafts = np.minimum(_column([draft_lens.get(req, 0) for req in reqs]) if draft_lens else 0, ends - starts - 2)
        columns = known + guessed + drafts + self.reserve
        if drafts.min() < 0 or drafts.sum() > room or (np.minimum(columns, np.maximum(last_columns, known)) > last.limits).any():
            return None
        self.batch = Batch(step, reqs, last.rows, starts, drafts + np.int32(1), drafts, guessed, last.limits, store_from, last.complete, last.samples,
                           last.owed_from, [], last.shared, Writes())
        self.left = 0
        return self.batch


def _column(numbers: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(numbers, np.int32)


def _demo() -> None:
    """Two rows, one of which has two guesses in each step, half of which are right: what is planned for them until one lacks a slot."""
    reqs = [Req(Request(rid="", prompt_ids=[1] * length, params=SamplingParams()), 20, 0, 0) for length in (20, 12)]
    for req in reqs:
        req.computed_len, req.own = req.known_len - 1, range(req.known_len + 9)
    zero, yes = np.zeros(2, np.int32), np.ones(2, bool)
    batch = Batch(1, reqs, zero, _column([19, 11]), zero + 1, zero, zero, _column([29, 21]), zero, yes, yes, zero - 1, [], [], Writes())
    steady, step = Steady(batch, 0, reserve=2), 1
    while batch is not None:
        print(f"step {step}: columns {batch.starts.tolist()} to {batch.kv_bounds.tolist()} at most, slots up to {batch.limits.tolist()}, "
              f"{batch.draft_lens.tolist()} guesses{', a token later' if batch.again else ''}")
        for req, drafted in zip(reqs, batch.draft_lens.tolist()):
            req.known_len, req.computed_len = req.known_len + 1 + drafted // 2, req.computed_len + 1 + drafted // 2
        step += 1
        batch = steady.further(step, {reqs[0]: 2} if step > 2 else {}, room=100)
    print(f"step {step}: a row lacks a slot")


if __name__ == "__main__":
    _demo()
