"""Scheduler: which requests run in the next step, how many tokens each, and in whose memory.

There is no prefill phase and no decode phase. One rule runs everything: *a request knows `seq_len` tokens and has KV for `computed_len` of
them; a step extends it, and leaves at least one token to compute, or there are no logits.*

      known    |#############################|        seq_len
      computed |###############|                      computed_len          decode:  the gap is 1
                ^ adopted       ^ next chunk ^        a long prompt: the gap shrinks chunk by chunk, then a token is sampled

A pass (`next_batch`) spends one token budget: running requests first (decode rows, then the prompt that is being cut into chunks), then
waiting ones in the order of the policy, as budget, rows and memory allow. Waiting requests hang in the tree (radix.py), so the longest match
or the heaviest subtree is known without a look at the queue. A prompt's tokens enter the tree *when their step is launched*, so the next
candidate of the same pass already matches them: 64 cold prompts that share 30 tokens are admitted in one pass, and the shared tokens are
computed once. A candidate waits only where a leader will compute at least 32 more tokens that both need. The tree shares whole pages; of the page
in which two requests part, the second copies what the first has, or computes in the same step (`_copy_begun_page`), so samples and forks of a
prompt compute one token each at any page size.

Memory never deadlocks: a request is refused at `add` if it could not run alone, is admitted only where its prompt and its likely output fit
beside what the running ones still need, and when the guess was wrong the cheapest running request is *retracted*: its KV stays in the tree,
its tokens stay known, it queues again and adopts what is left. Nothing is recomputed but what was evicted meanwhile. Before anybody waits or
goes for want of memory, what is only kept for requests to come (holds.py) is given up.

Only this file writes a `Req`, calls the tree's mutators and moves slots. A request's row and lock are given up after the last step that holds
them has committed, never before; that is what `in_flight` counts.

Source: continuous batching is Orca (Yu et al. 2022); chunked prefill is Sarathi (Agrawal et al. 2023); the one rule is vLLM v1's; cache-aware
order, in-batch sharing and the admission estimate are SGLang's (Zheng et al. 2024). Cost of a pass: O(rows), and per started request the nodes of
its path, whatever the length of the queue; policies that are a sort key look at every waiting request.
"""

from __future__ import annotations

import array
import bisect
import collections
import itertools
import operator
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from .holds import Holds
from .layout import Layout
from .memory import Batch, Rows, SlotAllocator, Writes
from .policies import POLICIES
from .protocol import Request, RequestError, SamplingParams
from .radix import Match, Node, Tree, common_len
from .req import Counters, Req
from .steady import Steady
from .waiting import Queue

OLDEST_AFTER = 8         # starts that may pass the oldest waiting request over; then it goes first (once a pass would be fcfs where one starts)
OUTPUT_ESTIMATE = 4096   # an output is never expected to be longer than this
RATIO_START, RATIO_MIN, RATIO_DECAY, RATIO_RAISE = 0.7, 0.1, 0.995, 0.3  # share of max_tokens that requests are expected to use
GROWTH, PLENTY = 32, 64  # slots that a row which decodes gets ahead, where as many as the latter could be had for each of them
DONORS = 8               # running requests and nodes that are looked at for the beginning of a page
RETRY_ADMISSION = 16     # steps after which a full pool is looked at again although nothing was given back


ARRIVAL = operator.attrgetter("arrival")


def _growing(slots: np.ndarray | array.array) -> array.array:
    """Slots in an array that is cheap to extend, and one's own."""
    return slots if isinstance(slots, array.array) else array.array("i", slots.tobytes())


def _dearest_first(req: Req) -> tuple:
    """Sort key: high priority, long output, early arrival first. The last one costs least to retract."""
    return -req.request.priority, -len(req.output_ids), req.arrival


# ------------------------------------------------------------------------------------------------------------------------ scheduler

class Scheduler:
    """Owns the queue, the tree, the free list and the host side of the rows.

    token_budget: tokens a step (`--chunked-prefill-size`). schedule_policy: None is lpm, or fcfs without a cache. preempt_above: by how much a
    waiting request's priority must exceed a running one's to take its place, under the policy `priority`. reserve: columns beyond the known
    length that a running row keeps, so that a step can be launched before the last one's tokens are known. waiting_timeout, running_timeout:
    seconds on `clock`, see `expire`.
    """

    def __init__(self, *, tree: Tree, slots: SlotAllocator, rows: Rows, token_budget: int, max_running: int, context_len: int,
                 schedule_policy: str | None = None, cache: bool = True, preempt_above: int = 10, reserve: int = 2, seed: int = 0,
                 waiting_timeout: float | None = None, running_timeout: float | None = None, clock: Callable[[], float] = time.monotonic):
        schedule_policy = schedule_policy or ("lpm" if cache else "fcfs")
        if schedule_policy not in POLICIES:
            raise ValueError(f"schedule policy {schedule_policy!r} is unknown; known are {', '.join(POLICIES)}")
        if POLICIES[schedule_policy].needs_tree and not cache:
            raise ValueError(f"schedule policy {schedule_policy!r} orders by the radix cache, which is disabled; use fcfs")
        if token_budget < slots.page_size:
            raise ValueError(f"a chunked-prefill size of {token_budget} tokens is smaller than a page of {slots.page_size}")
        self.tree, self.slots, self.rows = tree, slots, rows
        self.token_budget, self.max_running, self.reserve, self.cache = token_budget, max_running, reserve, cache
        self.page = slots.page_size
        self.max_total_len = min(context_len, slots.capacity)
        self.policy, self.preempt_above = POLICIES[schedule_policy], preempt_above
        tree.weighs = schedule_policy == "dfs-weight"
        self.timeouts, self.clock = (waiting_timeout, running_timeout), clock
        self.random = random.Random(seed)
        self.waiting = Queue()            # both in order of arrival
        self.running: list[Req] = []      # those that are leaving included
        self.reqs: dict[str, Req] = {}    # every request that has not ended
        self.counters = Counters()
        self.holds = Holds(tree, clock)
        self.step = 0
        self.ratio = RATIO_START
        self._arrivals = self._passed_over = 0
        self._writes = Writes()           # for the next step that is launched
        self._suspects: set[Req] = set()
        self._published: set[Req] = set()  # this pass; others count on what they compute or have, so they are nobody's victims
        self._copied: list[Node] = []     # this pass; nodes that are copied from, so locked
        self._full_until = (0, -1)        # admission found no place: look again at this step, or when `_events` has moved on
        self._events = 0
        self._layout = Layout()
        self._steady: Steady | None = None  # steps to come, where they are the last one further on, while nothing happens

    # ---------------------------------------------------------------------------------------------------------------- requests in, out

    def validate(self, request: Request) -> None:
        """RequestError where the request could not run even alone."""
        n, wanted, limit = len(request.prompt_ids), request.params.max_tokens, self.max_total_len
        if n == 0:
            raise RequestError("the prompt has no tokens", "prompt")
        if n + (wanted != 0) > limit:
            raise RequestError(f"the prompt has {n} tokens; at most {limit - (wanted != 0)} fit "
                               f"(context and KV pool hold {limit} tokens, prompt and output together)", "prompt")

    def add(self, request: Request, seed: int = 0, since: float | None = None, forced: int = 0) -> Req:
        """Queue a request with the seed of its noise, which has waited since `since` (now); its max_tokens is cut to what fits behind the prompt.
        forced: guesses for the step that samples first. RequestError as `validate`, or where the id is in use."""
        self.validate(request)
        if request.rid in self.reqs:
            raise RequestError(f"request id {request.rid!r} is already in use", "rid")
        room, wanted = self.max_total_len - len(request.prompt_ids), request.params.max_tokens
        whole = len(request.prompt_ids) // self.page * self.page
        holds = self.cache and request.children > 0
        if holds and whole and request.params.prompt_logprobs is None:  # what fills no page nobody could adopt
            request = msgspec.structs.replace(request, prompt_ids=request.prompt_ids[:whole])
        req = Req(request, room if wanted is None else min(wanted, room), self._arrivals, seed)
        self.holds.drop(req.rid)  # one that has ended, and whose id means this request from now on
        req.hold = self.holds.open(req.rid, request.children) if holds else None
        req.forced = max(min(forced, req.max_new - 1), 0)
        req.queued_at, req.queued_tokens = self.clock() if since is None else since, self.counters.computed_tokens
        self._arrivals += 1
        self._events += 1
        self._enqueue(req)
        self.reqs[req.rid] = req
        return req

    def _enqueue(self, req: Req) -> None:
        self.waiting.add(req)
        if self.cache:
            req.place = self.tree.wait(req.key(), req.request.namespace, req.arrival, req)

    def abort(self, rid: str) -> Req | None:
        """End a request in any state, and what a hold of this id keeps; None where no such request is alive. Its row is released after the last
        step that holds it."""
        req = self.reqs.get(rid)
        self._events += self.holds.drop(rid)
        if req is not None:
            self._end(req)
            if not req.in_flight:
                self._land(req)
        return req

    def sit_out(self, rid: str, sits_out: bool) -> None:
        """Whether a request that runs is to sit out, without giving anything up."""
        self.reqs[rid].sits_out = sits_out
        self._events += 1

    def expire(self) -> list[Req]:
        """End, as `abort` does, the requests whose time is up: `waiting_timeout` without a first row, `running_timeout` since they got it (a
        retracted request that waits again runs on). Returns them."""
        if self.timeouts == (None, None):
            return []
        (waiting_timeout, running_timeout), now, late = self.timeouts, self.clock(), []
        for req in self.reqs.values():
            since, limit = (req.queued_at, waiting_timeout) if req.started_at is None else (req.started_at, running_timeout)
            if limit is not None and now - since > limit:
                late.append(req)
        for req in late:
            self.abort(req.rid)
        return late

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # ------------------------------------------------------------------------------------------------------------------------ the pass

    def next_batch(self, draft_lens: Mapping[Req, int] = {}) -> Batch | None:
        """Plan one step: None where nothing can run now. Locks, slots, rows and tree nodes of the step are taken here. draft_lens: guesses that a
        request that decodes may have verified; fewer where memory is short, or as many tokens are not asked for."""
        self.step += 1
        self._events += self.holds.expire()
        if self._steady is not None and (batch := self._again(draft_lens)) is not None:
            return batch
        self._published.clear()
        plan: dict[Req, int] = {}  # request -> tokens
        draft_lens = self._plan_decodes(plan, draft_lens)
        budget = max(self.token_budget - len(plan) - sum(draft_lens.values()), self.page)  # prompts go on, however many rows decode
        budget = self._plan_chunks(plan, budget)
        started = self._admit(plan, budget)
        while self._copied:
            self.tree.unlock(self._copied.pop())
        plan = {req: n for req, n in plan.items() if req.state == "running" and not req.leaving}
        if not plan:
            self.step -= 1
            return None
        for req in started:
            draft_lens.pop(req, None)  # it decoded, was retracted, and begins again
        return self._launch(plan, draft_lens, [req for req in started if req in plan])

    def _plan_decodes(self, plan: dict[Req, int], draft_lens: Mapping[Req, int]) -> dict[Req, int]:
        """Plan a token for each row that decodes; returns the guesses that there is room for."""
        rows = [r for r in self.running if r.decodes]
        if not rows:
            return {}
        if draft_lens:
            draft_lens = self._shorten({r: min(draft_lens[r], r.end_len - r.seq_len - 1) for r in rows if r in draft_lens}, len(rows))
        lacking = self._lacking(rows, draft_lens)
        if draft_lens and sum(lacking.values()) > self._free_slots:
            draft_lens, lacking = {}, self._lacking(rows, {})
        slots, taken = self._alloc(sum(lacking.values())), 0
        if slots is not None:  # all at once, the common case
            for req, n in lacking.items():
                self._own(req, slots[taken:taken + n])
                taken += n
            for req in rows:
                plan[req], req.forced = 1, 0  # what it guesses is in draft_lens
            return draft_lens
        for req in sorted(rows, key=_dearest_first):  # who is served last is cheap to retract
            missing = lacking.get(req, 0)
            if req.state == "running" and not req.leaving and self._make_room(req, missing):
                self._own(req, self._alloc(missing))
                plan[req], req.forced = 1, 0
        return draft_lens

    def _lacking(self, rows: list[Req], draft_lens: Mapping[Req, int]) -> dict[Req, int]:
        """Slots that rows which decode lack, of those who do. Where there are plenty: GROWTH more for all, and then none for as many steps."""
        needed, lacking = {}, []
        for req in rows:
            columns = req.known_len + self.reserve + req.guessed + draft_lens.get(req, 0)
            if columns > req.last_column:
                columns = min(columns, max(req.last_column, req.known_len))
            needed[req] = columns
            if columns > req.own_start + len(req.own):
                lacking.append(req)
        more = GROWTH if lacking and self._free_slots >= PLENTY * len(rows) else 0
        return {req: missing for req in (rows if more else lacking) if (missing := self._missing(req, needed[req] + more))}

    def _shorten(self, draft_lens: dict[Req, int], rows: int) -> dict[Req, int]:
        """Guesses take what the rows that decode leave of the budget, and half of it where prompts wait for the rest."""
        room = max(self.token_budget - rows, 0)
        if self.waiting or len(self.running) > rows:
            room //= 2
        asked = sum(draft_lens.values())
        return draft_lens if asked <= room else {req: n * room // asked for req, n in draft_lens.items()}

    def _plan_chunks(self, plan: dict[Req, int], budget: int) -> int:
        for req in [r for r in self.running if r not in plan and r.launchable and (r.seq_len - r.computed_len > 1 or r.place is not None)]:
            if budget < self.page:
                break
            if req.state == "running":
                if self.cache:
                    self._adopt(req)
                budget -= self._plan_prefill(req, budget, plan)
        return budget

    def _plan_prefill(self, req: Req, budget: int, plan: dict[Req, int]) -> int:
        """Extend a request whose next tokens are all known, and which has adopted what there is, by up to `budget`, guesses too; returns how many."""
        while True:
            retractions, seq_len = self.counters.retractions, req.seq_len
            upto = min(req.computed_len + budget, seq_len)
            if upto < seq_len:
                upto -= upto % self.page  # a chunk ends with a page, so that all of it can enter the tree
            guesses = min(req.forced, req.computed_len + budget - seq_len) if upto == seq_len else 0
            missing = self._missing(req, seq_len - req.pending + self.reserve + guesses if upto == seq_len else upto)
            if guesses and missing > self._free_slots:
                req.forced = 0
                continue
            if upto <= req.computed_len or missing > self._free_slots and not self._make_room(req, missing):
                return 0
            if retractions == self.counters.retractions:
                break
            if self.cache:
                self._adopt(req)  # who was retracted may have left in the tree what comes next here
        begins = not len(req.own)
        if missing:
            self._own(req, self._alloc(missing))
        if self.cache:
            if begins and self.page > 1:
                self._copy_begun_page(req, upto, plan)
            self._publish(req, upto)
            self._lead(req)
        plan[req], req.forced = upto - req.computed_len, guesses if upto == seq_len else req.forced
        return plan[req] + guesses

    def _adopt(self, req: Req) -> None:
        """Take over what others have put into the tree beyond the request's own node."""
        match = self.tree.extend(req.node, req.key(), req.own_start)
        if match.length > req.own_start and not len(req.own):
            old, node = req.node, self._lock(req, match)
            self._take_path(req, node)
            self.tree.unlock(old)

    def _lock(self, req: Req, at: Match | Node) -> Node:
        """Lock a match or node for a request; a node gets one hit from it, however often it is locked."""
        node = self.tree.lock(at, counted_len=req.counted_len, priority=req.request.priority)
        req.counted_len = max(req.counted_len, node.end)
        return node

    def _take_path(self, req: Req, node: Node) -> None:
        """Point the row at the slots of the locked path that ends in `node`, and skip what need not be computed again."""
        above = node
        while above.end > req.own_start:
            self._writes.slots(req.row, above.start, above.slots)
            above = above.parent
        req.node, req.own_start, req.store_from = node, node.end, node.end
        most = min(node.end, req.seq_len - 1)
        if req.prompt_logprobs_from is not None:
            most = min(most, max(req.prompt_logprobs_from - 1, 0))  # logits are not cached: these have to be computed again
        req.computed_len = max(req.computed_len, most)
        self._writes.length(req.row, req.computed_len)

    def _copy_begun_page(self, req: Req, upto: int, plan: dict[Req, int]) -> None:
        """Copy the KV of the next tokens from where most of them are, rather than compute it; at least one before `upto` is left to compute."""
        last = upto - 1 if req.prompt_logprobs_from is None else min(upto, req.prompt_logprobs_from) - 1
        if last <= req.computed_len or req.computed_len < req.own_start:
            return
        wanted, best, slots, donor = req.key()[4 * req.own_start:4 * last], 0, [], None
        for other, key, there in itertools.islice(self._donors(req, plan), DONORS):
            if (common := common_len(wanted, key)) > best:
                best, slots, donor = common, there[:common], other
            if 4 * best == len(wanted):
                break
        if donor is None:
            return
        if isinstance(donor, Req):
            self._published.add(donor)
        else:
            self._copied.append(self.tree.lock(donor, counted_len=donor.end))
        self._writes.copy(req.row, np.array(slots), np.array(req.own[:best]))
        req.computed_len += best
        self._writes.length(req.row, req.computed_len)

    def _donors(self, req: Req, plan: dict[Req, int]) -> Iterator[tuple[Req | Node, bytes, Sequence[int]]]:
        """Who may have KV of what comes next for a request: (request or node, key, slots) from `own_start` on, as far as it is there when the
        step that is being planned has stored its own."""
        for other in reversed(self.running):
            here = other.node is req.node or other.own_start == req.own_start == 0 and other.node.namespace == req.node.namespace
            if here and other is not req and not other.spoiled:
                there = min(other.computed_len + plan.get(other, 0), other.known_len)
                yield other, other.key()[4 * other.own_start:4 * there], other.own
        for node in itertools.islice(reversed(req.node.children.values()), 4 * DONORS):
            if node.slots is not None:
                yield node, node.key, node.slots

    def _publish(self, req: Req, upto: int) -> None:
        """Hang the whole pages of the first `upto` tokens in the tree, with the request's own slots. The step to come computes them."""
        end = upto - upto % self.page
        count = end - req.own_start
        if count <= 0:
            return
        own, req.own = (req.own, ()) if count == len(req.own) else (req.own[:count], req.own[count:])
        if req.place is not None and req.place.node.end == end and not req.output_ids:  # all of the prompt: the common case
            req.node, req.place = self.tree.compute(req.place, req.node, own, step=self.step, priority=req.request.priority), None
        else:
            node, present = self.tree.insert(req.key()[4 * req.own_start:4 * end], own, below=req.node,
                                             step=self.step, prompt_len=req.prompt_len, priority=req.request.priority)
            assert present == 0, "adopted a moment ago, yet the tree has more"
            req.node = self.tree.move_lock(req.node, node)
        req.own_start = end
        req.counted_len = max(req.counted_len, end)
        self._published.add(req)

    def _lead(self, req: Req) -> None:
        """Whoever wants what a request will compute beyond this step waits for it; nobody does any more when all of its prompt is launched."""
        if req.place is not None and req.place.node.slots is None:
            self.tree.advance(req.place)
        elif req.place is not None:
            self.tree.stop_leading(req.place)
            req.place = None

    def _launch(self, plan: dict[Req, int], draft_lens: dict[Req, int], started: list[Req]) -> Batch:
        order, shared = self._layout.arrange(plan)
        columns = []  # what the batch says of a row, row after row
        for req in order:
            n, start, owed_from = plan[req], req.computed_len, req.prompt_logprobs_from
            complete = start + n == req.known_len + req.pending
            draft_len = draft_lens.get(req, req.forced if (samples := complete and req.max_new > 0) else 0)
            columns += (req.row, start, n + draft_len, draft_len, req.guessed, req.own_start + len(req.own), req.store_from,
                        -1 if owed_from is None else owed_from, complete, samples)
            req.in_flight += 1
            req.computed_len = start + n
            req.guessed += draft_len
            req.forced *= not samples
            if samples and not req.constrained:
                req.pending += 1
            elif samples:  # or not: its last token may be computed again, and the tree has it
                req.computed_len -= 1
                req.guessed += 1
                req.store_from = max(req.store_from, req.own_start)
        *columns, owed_from, complete, samples = np.array(array.array("i", columns)).reshape(len(order), -1).T.copy()
        batch = Batch(self.step, order, *columns, complete.astype(bool), samples.astype(bool), owed_from, started, shared, self._writes)
        self._writes = Writes()
        self._foresee(batch)
        return self._count(batch)

    def _foresee(self, batch: Batch) -> None:
        """Note whether the steps to come are this one further on, unless something happens: all rows decode, and nobody waits."""
        alike = len(batch.reqs) == len(self.running) and not (self.waiting or batch.started) and batch.samples.all()
        if alike and (batch.q_lens == batch.draft_lens + 1).all() and batch.owed_from.max() < 0 and not any(r.suspect_until for r in batch.reqs):
            self._steady = Steady(batch, self._events, self.reserve)

    def _again(self, draft_lens: Mapping[Req, int]) -> Batch | None:
        """The last step once more, further on, where a whole pass would find nothing else."""
        steady, batch = self._steady, None
        if steady.events == self._events:
            batch = steady.further(self.step, draft_lens, max(self.token_budget - len(self.running), 0))
        if batch is None:
            self._steady = None
            return None
        for req, draft_len in zip(batch.reqs, batch.draft_lens.tolist() if draft_lens else itertools.repeat(0)):
            req.in_flight += 1
            if req.constrained:
                req.guessed += draft_len + 1
            else:
                req.guessed += draft_len
                req.computed_len += 1
                req.pending += 1
        return self._count(batch)

    def _count(self, batch: Batch) -> Batch:
        self.slots.launch(self.step)
        self.rows.launch(self.step)
        self.counters.steps += 1
        self.counters.computed_tokens += batch.num_tokens
        self.counters.copied_tokens += batch.writes.copied
        self.ratio = max(RATIO_MIN, self.ratio * RATIO_DECAY)
        return batch

    # ----------------------------------------------------------------------------------------------------------------------- admission

    def uncached(self, req: Req) -> int:
        """Tokens of a waiting request that would have to be computed if it started now."""
        cached = self.tree.parking(req.place.node).end if self.cache else 0
        return max(req.known_len - cached, 1)

    def waits_for_leader(self, req: Req) -> bool:
        """Whether a running request will compute, after this step, what a waiting one would otherwise compute too."""
        return self.cache and self.tree.is_blocked(req.place)

    def _candidates(self) -> Iterator[Req]:
        """Waiting requests in the order in which they should start."""
        suspects = [r for r in self.waiting if r.suspect_until] if self._suspects else []
        if suspects:
            yield suspects[0]  # each alone
            return
        oldest = self.waiting.first
        if self.policy.fair and self._passed_over >= OLDEST_AFTER and not self.waits_for_leader(oldest):
            yield oldest
        yield from self.policy.pick(self)

    @property
    def _free_slots(self) -> int:
        """Slots that nobody holds, or that can be made free at once."""
        return self.slots.available + self.tree.evictable

    def _has_place(self, needed: int) -> bool:
        """Whether one more may start, that needs so many slots together with what the running ones still need; alone it always may."""
        return not self._rows_are_full and (needed <= self._free_slots or not self.running)

    @property
    def _rows_are_full(self) -> bool:
        return not self.rows.available or len(self.running) >= self.max_running

    @property
    def _memory_is_coming(self) -> bool:
        """Whether somebody is on his way out: slots and rows follow when the steps that hold them have landed."""
        return self.slots.in_limbo or self.rows.in_limbo or any(r.leaving for r in self.running)

    def _admit(self, plan: dict[Req, int], budget: int) -> list[Req]:
        """Start waiting requests; returns those that got a row."""
        started: list[Req] = []
        nothing_new = self.step < self._full_until[0] and self._events == self._full_until[1]
        if not self.waiting or nothing_new or budget < self.page or self._rows_are_full and not self.policy.preempts:
            return started
        promised = sum(self._still_needed(r) for r in self.running)
        for req in self._candidates():
            if self._suspects and any(r.suspect_until or req.suspect_until for r in self.running):
                break
            node = self._lock(req, self.tree.parking(req.place.node)) if self.cache else self.tree.root(req.request.namespace)
            needed = self._expected_columns(req)
            if not self._has_place(needed - node.end + promised):
                if not (self._rows_are_full or self._memory_is_coming):
                    self._drop_holds(needed - node.end + promised)
                if self.policy.preempts and not self._memory_is_coming:
                    self._preempt(req, needed - node.end + promised - self._free_slots)
                    promised = sum(self._still_needed(r) for r in self.running)
                if not self._has_place(needed - node.end + promised):
                    if self.cache:
                        self.tree.unlock(node)
                    if not self._memory_is_coming:
                        self._full_until = (self.step + RETRY_ADMISSION, self._events)
                    break
            self._start(req, node)
            used = self._plan_prefill(req, budget, plan)
            if not used:  # what it would need waits in limbo: not now
                if req.state == "running":
                    self._leave(req, "queue")
                break
            started.append(req)
            self._count_child(req)
            budget -= used
            promised += max(needed - req.columns, 0)
            if budget < self.page or self._rows_are_full and not self.policy.preempts:
                break  # before another one is looked for
        return started

    def _preempt(self, req: Req, lacking: int) -> None:
        """Retract running requests for one that waits and has a clearly higher priority, the least of them first, if that gives it a row and the
        slots it lacks. Their KV stays in the tree."""
        victims: list[Req] = []
        unlocked: collections.Counter = collections.Counter()  # node -> victims below
        for victim in sorted(self.running, key=_dearest_first, reverse=True):
            if req.request.priority - victim.request.priority <= self.preempt_above:
                break
            if victim in self._published:
                continue
            victims.append(victim)
            lacking -= len(victim.own) + self._still_needed(victim)
            node = victim.node
            while node.parent is not None:
                unlocked[node] += 1
                lacking -= (node.end - node.start) * (unlocked[node] == node.locks)
                node = node.parent
            if lacking <= 0:
                for victim in victims:
                    victim.retractions += 1
                    self.counters.preemptions += 1
                    self._leave(victim, "queue")
                return

    def _start(self, req: Req, node: Node) -> None:
        """A waiting request becomes a row. Its path is locked by now."""
        self._passed_over = 0 if req is self.waiting.first else self._passed_over + 1
        self.waiting.remove(req)
        if self.cache:
            self.tree.lead(req.place)
        bisect.insort(self.running, req, key=ARRIVAL)
        req.state, req.node, req.row = "running", node, self.rows.alloc()
        if req.started_at is None:
            req.started_at = self.clock()
        self._writes.tokens(req.row, 0, req.ids())
        self._take_path(req, node)
        if req.cached_tokens is None:
            req.cached_tokens = req.computed_len
            self.counters.prompt_tokens += req.prompt_len
            self.counters.cached_tokens += req.computed_len

    def _expected_columns(self, req: Req) -> int:
        """Columns a request will probably need in the end, in whole pages."""
        made = len(req.output_ids)
        likely = int(self.ratio * min(req.max_new - made, OUTPUT_ESTIMATE))
        columns = min(req.last_column, req.prompt_len + made + self.reserve + likely) + self.page - 1
        return columns - columns % self.page

    def _still_needed(self, req: Req) -> int:
        return 0 if req.leaving else max(self._expected_columns(req) - req.columns, 0)

    # -------------------------------------------------------------------------------------------------------------- memory under pressure

    def _alloc(self, num_slots: int) -> np.ndarray | None:
        missing = num_slots - self.slots.available
        if missing > 0 and self.tree.evictable:
            evicted = self.tree.evict(missing)
            self.counters.evicted_tokens += len(evicted)
            self.slots.free(evicted, held_by_step=False)
        return self.slots.alloc(num_slots)

    def _missing(self, req: Req, columns: int) -> int:
        """Slots, in whole pages, that a row lacks for its first `columns` columns."""
        missing = (columns if columns <= req.last_column else min(columns, max(req.last_column, req.known_len))) - req.own_start - len(req.own)
        return -(-missing // self.page) * self.page if missing > 0 else 0

    def _own(self, req: Req, slots: np.ndarray) -> None:
        self._writes.slots(req.row, req.columns, slots)
        if not len(req.own):
            req.own = slots  # most of them go to the tree at once
        elif len(slots):
            req.own = _growing(req.own)
            req.own.frombytes(slots.tobytes())

    def _make_room(self, req: Req, missing: int) -> bool:
        """Retract others until there are the slots that a row is missing. False where it has to sit this step out, or was itself retracted."""
        while missing > self._free_slots:
            if self.slots.in_limbo or any(r.leaving for r in self.running):
                return False  # memory is on its way: it comes with the step that holds it
            if self._drop_holds(missing):
                break
            victims = [r for r in self.running if r not in self._published]
            if not victims:
                return False
            victim = max(victims, key=_dearest_first)
            if victim is req and len(self.running) == 1 and not req.in_flight:
                raise AssertionError(f"{req.rid}: {missing} more slots are not in an otherwise empty pool of {self.slots.capacity}")
            self._retract(victim)
            if victim is req:
                return False
        return True

    def _drop_holds(self, wanted: int) -> bool:
        """Give up what holds keep, until so many slots can be had; whether they can. None is given up where all together would not do."""
        while self._free_slots < wanted <= self._free_slots + self.holds.tokens and self.holds.drop_oldest():
            pass
        return wanted <= self._free_slots

    def _count_child(self, req: Req) -> None:
        """A request has its own lock on what a hold kept for it, or needs none any more."""
        if req.parent:
            self.holds.arrive(req.parent)
            req.parent = ""

    def _retract(self, req: Req) -> None:
        req.retractions += 1
        self.counters.retractions += 1
        self.ratio = min(1.0, self.ratio + RATIO_RAISE)
        self._leave(req, "queue")

    def _end(self, req: Req) -> None:
        """The request is over: its id is free again, its memory follows once no step holds it."""
        req.leaving = "done"
        self._events += 1
        self._count_child(req)
        del self.reqs[req.rid]
        self.counters.finished += 1

    def _leave(self, req: Req, to: str) -> None:
        """Send a request back to the queue or away, now or as soon as no step holds it."""
        req.leaving = to
        self._events += 1
        if not req.in_flight:
            self._land(req)

    def _land(self, req: Req) -> None:
        if req.row:
            self._release(req)
        if req.state == "waiting":
            self.waiting.remove(req)
            if self.cache:
                self.tree.leave(req.place)
        if req.leaving == "queue":
            req.state = "waiting"
            self._enqueue(req)
        else:
            req.state, req.place = "finished", None
            self._suspects.discard(req)
        req.leaving = ""
        self._events += 1
        if not self.reqs:
            self.ratio = RATIO_START

    def _release(self, req: Req) -> None:
        """Give up row, slots and lock. What was computed enters the tree, up to the last known token, unless the request was spoiled."""
        if len(req.own):
            own = np.asarray(req.own, np.int32)
            upto = min(req.computed_len, req.known_len, req.columns)  # a step may have run over what was asked for
            count = upto - upto % self.page - req.own_start
            if count > 0 and self.cache and not req.spoiled:
                key = req.key()[4 * req.own_start:4 * (req.own_start + count)]
                _, present = self.tree.insert(key, own[:count], below=req.node, prompt_len=req.prompt_len, priority=req.request.priority,
                                              counted_len=req.counted_len)
                own = np.concatenate([own[:present], own[count:]])  # duplicates of what the tree has, and what it does not take
            self.slots.free(own)
        if self.cache:
            if req.place is not None:
                self.tree.stop_leading(req.place)
                req.place = None
            if req.hold is not None and req.leaving == "done":
                self.holds.land(req.hold, req.node)
            else:
                self.tree.unlock(req.node)
            if req.spoiled:
                self.slots.free(self.tree.drop(req.node))
        self._writes.forget(req.row)
        self.rows.free(req.row)
        self.running.remove(req)
        req.node, req.own, req.row, req.spoiled = None, (), 0, False
        req.own_start = req.store_from = req.computed_len = req.pending = req.guessed = 0

    def rewrite(self, req: Req, output_ids: list[int], scored: bool) -> None:
        """Give a request that no step holds another output. It waits again, and finds what is computed of the common beginning in the
        tree. scored: the logprobs of what is new are owed, as those of a prompt."""
        same = next((i for i, (a, b) in enumerate(zip(req.output_ids, output_ids)) if a != b), min(len(req.output_ids), len(output_ids)))
        req.key()
        if req.row:
            self._release(req)
        req._key, req.output_ids, req.known_len = req._key[:4 * (req.prompt_len + same)], output_ids, req.prompt_len + len(output_ids)
        if scored and same < len(output_ids):
            req.prompt_logprobs_from, req.scored_len = req.prompt_len + same, req.known_len
        req.leaving = "queue"
        self._land(req)

    # --------------------------------------------------------------------------------------------------------------------- results back

    def commit(self, batch: Batch, tokens: list[list[int]], finished: Iterable[bool], spoiled: Collection[Req] = (),
               paths: Iterable[Sequence[int]] | None = None) -> None:
        """Take a step's results: per batch row the tokens it sampled, and whether the request ends with them. The KV of `spoiled` requests
        does not stay in the tree. paths: of a row's guesses those that were right, in order; guess i stood i columns behind the last known token."""
        self.slots.commit(batch.step)
        self.rows.commit(batch.step)
        made = 0
        columns = [batch.samples, batch.draft_lens, batch.starts + batch.q_lens]
        for req, new, done, path, samples, draft_len, end in zip(batch.reqs, tokens, finished, paths or itertools.repeat(()),
                                                                 *(column.tolist() for column in columns)):
            req.in_flight -= 1
            req.guessed -= draft_len
            if samples and not req.constrained:
                req.pending -= 1
            elif samples:
                req.guessed -= 1
                req.computed_len += bool(new)
            if path and req.leaving != "done":
                self._accept(req, path, draft_len)
            if req.prompt_logprobs_from is not None:
                owed = max(end + 1, req.prompt_logprobs_from)
                req.prompt_logprobs_from = owed if owed < req.scored_len else None
            if req.leaving != "done":
                req.output_ids += new
                req.known_len += len(new)
                made += len(new)
                if spoiled:
                    req.spoiled = req in spoiled
                if done:
                    self._end(req)
                elif req.suspect_until and end - draft_len + len(path) >= req.suspect_until:
                    self._suspects.discard(req)
                    req.suspect_until, req.leaving = 0, "queue"  # it is cleared; the next one takes its turn
            if req.leaving and not req.in_flight:
                self._land(req)
        self.counters.output_tokens += made

    def _accept(self, req: Req, path: Sequence[int], draft_len: int) -> None:
        """The device has put the KV of the right guesses behind that of the last known token: by their slots, where pages are single slots."""
        req.computed_len += len(path)
        if self.page == 1 and path[-1] != len(path):
            req.own, first = _growing(req.own), req.known_len - req.own_start   # of the guesses' columns
            order = [*path, *[node for node in range(1, min(draft_len, len(req.own) - first) + 1) if node not in path]]
            here = req.own[first:first + len(order)]
            req.own[first:first + len(order)] = array.array("i", [here[node - 1] for node in order])

    def fail(self, batches: list[Batch]) -> list[Req]:
        """The steps in flight, all of them: the first has failed, the others did not run. Take their nodes back and queue their requests again.

        Those of the first are suspects: they run one after the other, each alone, until they are past the point where it failed, so that one
        that always fails takes no other with it. Returns the request that has failed alone as a suspect: it is ended now.
        Rows that sat these steps out are queued again too: they may have adopted nodes of these steps, and what these steps were to write
        to their rows is lost.
        """
        for batch in batches:
            self.slots.commit(batch.step)
            self.rows.commit(batch.step)
        failed = batches[0]
        alone = [req for req in failed.reqs if req.suspect_until and len(failed.reqs) == 1 and req.leaving != "done"]
        for req, end in zip(failed.reqs, failed.kv_bounds.tolist()):
            req.suspect_until = end
            self._suspects.add(req)
        taken = list(self.running)
        for req in taken:
            req.in_flight = 0
            if req in alone:
                self.holds.drop(req.rid)
                self._end(req)
            elif req.leaving != "done":
                req.leaving = "queue"
            req.computed_len = 0  # nothing of these steps enters the tree
            self._release(req)
        for batch in batches:
            self.slots.free(self.tree.remove_step(batch.step))
        for req in taken:
            self._land(req)
        return alone

    # ------------------------------------------------------------------------------------------------------------------ audit

    @property
    def unwritten_rows(self) -> set[int]:
        """For the audit: rows whose changes wait for the next step that is launched."""
        return self._writes.rows

    def check(self) -> None:
        """Prove that free list, tree, rows and limbo partition the pool, and that every row's slots are the tree's and its own."""
        self.tree.check()
        free, limbo = self.slots.free_pages(), self.slots.limbo_pages()
        in_use = [np.empty(0, np.int32), *(node.slots for node in self.tree.walk()), *(np.array(req.own, np.int32) for req in self.running)]
        pages = np.concatenate([free, limbo, np.concatenate(in_use)[::self.page] // self.page])
        assert np.array_equal(np.sort(pages), np.arange(1, self.slots.num_pages + 1)), (
            f"pages are lost or owned twice: free {len(free)}, limbo {len(limbo)}, in use {len(pages) - len(free) - len(limbo)}")
        rows = sorted([req.row for req in self.running] + list(self.rows.idle_rows()))
        assert rows == list(range(1, len(self.rows.length))), f"rows are lost or owned twice: {rows}"
        for req in self.running:
            assert req.own_start == req.node.end and req.columns >= min(req.computed_len, req.last_column), f"{req.rid}: KV without a slot"
            assert req.node.locks > 0 or req.node.parent is None, f"{req.rid}: its path is not locked"
        assert all(req.row == 0 and not len(req.own) for req in self.waiting), "a waiting request holds memory"
        assert not self.cache or self.tree.waiting == len(self.waiting) and all(r.place.waits and r.place.request is r for r in self.waiting), \
            "the tree does not know who waits"
        leaders = sum(req.place is not None for req in self.running)
        assert leaders == sum(root.leaders for root in self.tree.roots.values()), "the tree does not know who computes a prompt"
        alive = sum(req.leaving != "done" for req in [*self.waiting, *self.running])
        assert len(self.reqs) == alive, "a request is neither waiting nor running"
        locks = self.holds.check()
        locks.update(req.node for req in self.running if req.node.parent is not None)
        held = {node: node.holds for node in self.tree.walk() if node.holds}
        assert held == locks, f"{self.tree.protected} tokens are locked, and not by those who run or by holds: {held}, {locks}"


def _demo() -> None:
    """Three conversations of four turns, interleaved, in a pool too small for all three prefixes: what the order of the queue is worth."""
    for name in ("fcfs", "lpm"):
        slots, rows = SlotAllocator(2048, 1), Rows(1, 2048, "cpu")
        scheduler = Scheduler(tree=Tree(1), slots=slots, rows=rows, token_budget=2048, max_running=1, context_len=2048, schedule_policy=name)
        for turn in range(4):
            for chat in range(3):
                prompt = [chat] * 1024 + [1000 + 10 * chat + turn] * 200
                scheduler.add(Request(rid=f"{'ABC'[chat]}{turn + 1}", prompt_ids=prompt, params=SamplingParams(max_tokens=0)))
        order = []
        while (batch := scheduler.next_batch()) is not None:
            order.append(f"{batch.reqs[0].rid}:{batch.num_tokens}")
            scheduler.commit(batch, [[]], [True])
        print(f"{name:5} {' '.join(order)}   {scheduler.counters.computed_tokens:,} tokens prefilled")


if __name__ == "__main__":
    _demo()
