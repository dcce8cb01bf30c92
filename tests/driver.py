"""A scheduler without a model: plans steps, applies their writes to real rows, and answers with tokens of the test's choosing."""

import random

import numpy as np

from nano_sgl.memory import Batch, Rows, SlotAllocator
from nano_sgl.protocol import Request, SamplingParams
from nano_sgl.radix import Tree
from nano_sgl.req import Req
from nano_sgl.scheduler import Scheduler


class Driver:
    """`depth`: how many steps may be in flight while the next is planned (0: in line). `now`: the scheduler's clock, in seconds."""

    def __init__(self, *, pool=1000, page=1, budget=64, max_running=8, context=400, policy="fcfs", cache=True, depth=0, seed=0, **timeouts):
        self.slots, self.tree = SlotAllocator(pool, page), Tree(page)
        self.rows = Rows(max_running, -(-context // page) * page, "cpu")
        self.scheduler = Scheduler(tree=self.tree, slots=self.slots, rows=self.rows, token_budget=budget, max_running=max_running,
                                   context_len=context, schedule_policy=policy, cache=cache, seed=seed, clock=lambda: self.now, **timeouts)
        self.now = 0.0
        self.depth, self.flights, self.random, self.made = depth, [], random.Random(seed), 0

    def add(self, ids, max_tokens=4, **fields) -> Req:
        self.made += 1
        fields.setdefault("rid", f"r{self.made}")
        return self.scheduler.add(Request(prompt_ids=list(ids), params=SamplingParams(max_tokens=max_tokens), **fields))

    def launch(self, draft_lens={}) -> Batch | None:
        """draft_lens: guesses of requests, by id."""
        batch = self.scheduler.next_batch({req: draft_lens[req.rid] for req in self.scheduler.running if req.decodes and req.rid in draft_lens})
        if batch is not None:
            self.rows.apply(batch.writes)
            self._check_batch(batch)
            self.flights.append(batch)
        return batch

    def commit(self, token=lambda req: 1, ends=lambda req: False, right=lambda req, guesses: 0) -> Batch:
        """right: how many of a request's guesses were right; -1: nothing was sampled."""
        batch, tokens, finished, paths = self.flights.pop(0), [], [], []
        for req, samples, complete, guesses in zip(batch.reqs, batch.samples, batch.complete, batch.draft_lens.tolist()):
            count = right(req, guesses) + 1 if samples and req.state == "running" and req.leaving != "done" else 0
            new = [token(req)] * min(count, req.max_new - len(req.output_ids))
            tokens.append(new)
            paths.append(list(range(1, count)))
            finished.append(bool(complete and req.max_new == 0) or bool(new) and (len(req.output_ids) + len(new) >= req.max_new or ends(req)))
        self.scheduler.commit(batch, tokens, finished, paths=paths)
        return batch

    def step(self, **answers) -> Batch | None:
        """One pass; the batch that was launched, if any."""
        batch = self.launch()
        if self.flights and (len(self.flights) > self.depth or batch is None):
            self.commit(**answers)
        self.scheduler.check()
        return batch

    def run(self, limit=2000, **answers) -> int:
        """Until nothing is left to do; how many passes that took."""
        for passes in range(limit):
            if not self.scheduler.has_work and not self.flights:
                return passes
            self.step(**answers)
        raise AssertionError(f"not done after {limit} passes: {len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting")

    def _check_batch(self, batch: Batch) -> None:
        """Every row's columns have slots of their own, and rows that are said to share a run have the same slots there."""
        table = self.rows.table.numpy()
        guess = (batch.slack > 0) | (batch.draft_lens > 0)      # where they are right, a row may run over what it has
        for row, bound in zip(batch.rows, np.where(guess, np.minimum(batch.kv_bounds, batch.limits), batch.kv_bounds)):
            slots = table[row, :bound]
            assert (slots > 0).all() and len(np.unique(slots)) == bound
        for first, last, start, end in batch.shared:
            assert last - first >= 2 and end > start
            assert (table[batch.rows[first:last], start:end] == table[batch.rows[first], start:end]).all()
