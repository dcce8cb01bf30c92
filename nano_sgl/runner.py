"""Runner: a step's tensors, from the host's numbers to what it leaves on the device.

    host     plan     integers of the batch, and all that follows from them: attention's work list, who samples how, whose grammar, which guesses
                |
             packed   in one buffer, in one copy                      frame: what is left of the plan without its numbers
                v
    device   begin    rows of requests that have just started; grammar tables are brought up to date
             main     ids, positions and slots gathered from the rows -> forward -> logits -> mask, sample, verify -> tokens back into the rows
             guess    how the rows will go on
             finish   copies of KV that was not there before, logprobs of prompts

Everything that `run` does is work in stream order; no value of the device is read, and of the host's only what the plan fixed: a request of the batch
keeps its row until the step has landed, and gets no token before that.

`main` and `guess` see a step's frame and its buffer alone, so that they can be recorded once and replayed (graphs.py). A step that may be is padded:
tokens of row 0, which is nobody's, fill it up to a size that others have. What is counted in a frame:

    T tokens   B rows   S rows that sample   M places at which they do (a row with guesses samples at each of them, too)   N nodes of a draft tree

Invariant: a row's tokens, its KV and its state are a function of its own past, whatever else is in the step, padding too. Cost: on the host some
numpy calls over B and T, 20 us and 0.2 us a row. Where it stops: prompt logprobs, prompts of more than graphs.MAX_TOKENS tokens a step and steps that
sample nothing are launched kernel by kernel. On a CPU all are: launching costs nothing there, and fewer logits are computed where grammars allow few
tokens. Source: SGLang's and vLLM's model runners (2023-2024).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import numpy as np
import torch

from . import attention, sampling, spec
from .constraint import Constraint, Constraints, Group, SortedGroup, Walk, sort_places
from .graphs import MAX_TOKENS, FakeGraph, Graphs, bucket, run
from .jump import MAX_CHAIN
from .masks import DeviceTables
from .memory import Batch, KVPool, Packed, Rows, Writes
from .model import ForwardBatch, Model
from .protocol import SamplingParams
from .results import PromptPiece, Results, to_host

HEAD_ROWS = 256             # prompt logprobs: hidden states per call of the head, so that logits stay small
SLACK = 32                  # columns by which a work list looks ahead
NONE = np.empty(0, np.int64)
BEGUN = 16                  # arrays of a plan that are for `begin` and `finish`: writes (8), late copies (5), grammars (3)


@dataclass(frozen=True)
class Frame:
    """All of a step but its numbers on the device. Steps of equal `key` are the same operations on the same tensors."""
    key: tuple
    lens: list[int]                    # of the buffer's arrays
    attention: attention.Plan
    flat: bool                         # its arrays are in the buffer
    sampling: sampling.Sorted
    groups: list[SortedGroup]
    nodes: int                         # N; 0: no guesses
    columns: int                       # no row has more when the step has run, but for what it samples
    recomputes: bool                   # some token's KV is in the tree already
    may_run_over: bool                 # some row may be longer than what was asked for, since guesses in flight may be right
    padded: bool                       # and may be recorded


@dataclass
class Plan:
    """What a step needs from the host beside its batch: worked out ahead, sent in one copy."""
    packed: Packed                     # BEGUN arrays, then the frame's
    frame: Frame
    samples: tuple[int, int]           # (S, M) without padding


@dataclass
class Left:
    """What `main` leaves for what follows."""
    results: Results
    hidden: torch.Tensor               # [T, E]
    rows: torch.Tensor                 # [S] i64
    known: torch.Tensor                # [S] i64 tokens that they have by now


@dataclass
class Layout:
    """Where the tokens of a step stand, for as long as steps are alike."""
    sizes: tuple[int, int, int] | None
    of: tuple[np.ndarray, ...]         # the batch's rows, q_lens, and which of them sample
    bounds: np.ndarray                 # columns of each row up to which this holds
    shared: list
    rows: np.ndarray                   # [B] i64, and from here on with padding
    q_lens: np.ndarray                 # [B] i64
    of_token: np.ndarray               # [T] i64 row of the batch
    offset: np.ndarray                 # [T] i64 which of its row's tokens
    last: np.ndarray                   # [B] i64 which token is a row's last
    picked: np.ndarray                 # [S] i64 rows that sample
    work: attention.Plan
    flat: list[np.ndarray]             # one array, where the device gets the plan with the step


class Runner:
    """Runs the steps of one device. `plan` belongs to the host's thread, `run` to the worker."""

    def __init__(self, model: Model, kv: KVPool, rows: Rows, backend, sampler: sampling.SamplingState, constraints: Constraints,
                 speculation: spec.Speculation | None, *, device: str, context_len: int, page_size: int, end_ids: Sequence[int], rejects: bool,
                 graphs: Graphs | None):
        """backend: of attention.ATTENTION. rejects: guesses are accepted by rejection sampling."""
        self.model, self.kv, self.rows, self.attention, self.sampler = model, kv, rows, backend, sampler
        self.constraints, self.speculation, self.device, self.context_len, self.end_ids = constraints, speculation, device, context_len, end_ids
        self.page_size, self.rejects, self.graphs = page_size, rejects, graphs
        self._laid: Layout | None = None
        self._kept: Plan | None = None     # the last one, and for how many steps that are the same a token later it serves, too
        self._kept_for = 0
        self._asks: dict[int, sampling.Ask] = {}   # by id, of the requests in `_members`
        self._members: tuple[tuple, sampling.Members] | None = None
        self._sorted: tuple[tuple, tuple[tuple, sampling.Sorted, list[SortedGroup]]] | None = None

    # ---- on the host, while the steps before it run

    def plan(self, batch: Batch, constraints: Sequence[Constraint | None], begun: Sequence[tuple[int, int, int]]) -> Plan:
        """constraints: of the rows that sample. begun: (row, state, leave_at) of the requests with a grammar that start with this step."""
        if batch.again and self._kept_for > 0:
            self._kept_for -= 1
            return self._kept
        picked = batch.samples.nonzero()[0]
        reqs, counts = [batch.reqs[i] for i in picked.tolist()], (batch.draft_lens[picked] + 1).tolist()
        samples = len(reqs), sum(counts)
        padded = self.graphs is not None and 0 < samples[0] and batch.num_tokens < MAX_TOKENS and not (batch.owed_from >= 0).any()
        few, settled = ([], {}) if padded else self._few(reqs, constraints, counts)
        sizes, sort, groups = self._sort(reqs, constraints, counts, settled, batch.num_tokens if padded else 0)
        few = few or [np.arange(sizes[2]), NONE, NONE]
        layout = self._lay(batch, picked, sizes if padded else None)
        nodes, drafts = 0, []
        if max(counts, default=1) > 1:
            made = self.speculation.plan(reqs, batch.draft_lens[picked], layout.last[picked], batch.limits[picked])
            nodes, drafts = made.nodes, made.packed
            if padded:
                nodes, drafts = sampling.pow2(nodes), spec.padded(made.packed, sizes[1], sizes[2], batch.num_tokens)
        columns = int(batch.kv_bounds.max()) + 1
        recomputes, may_run_over = bool((batch.store_from > batch.starts).any()), bool((batch.kv_bounds > batch.limits).any())
        if padded:                                                 # what costs little is always done, so that frames have it in common
            recomputes = may_run_over = True
            columns = min(sampling.pow2(columns), self.rows.columns) if self.speculation is not None and self.speculation.drafters else 0
        rows_n, work = len(layout.rows), layout.work
        arrays = [layout.rows, layout.q_lens, _fill(batch.store_from, rows_n), _fill(batch.limits, rows_n, 1), layout.of_token, layout.offset,
                  layout.last, layout.picked, *few, *layout.flat, *sort.arrays,
                  *(part for _, *parts in groups for part in parts if part is not None), *drafts]
        before = [*batch.writes.arrays(), *batch.writes.late(), *(np.array(begun, np.int64).T if begun else (NONE, NONE, NONE))]
        packed, lens = Packed([*before, *arrays], self.device), [len(part) for part in arrays]
        key = (*lens, len(work.items), len(work.shifts), work.partials, work.block_q, sort.shape, nodes, columns, self.constraints.budgets,
               *(part is None for _, _, part in groups)) if padded else ()
        frame = Frame(key, lens, work, bool(layout.flat), sort, groups, nodes, columns, recomputes, may_run_over, padded)
        self._kept = Plan(packed, frame, samples)
        grows = self.speculation is not None and self.speculation.drafters     # with every step, what they look at
        bounds = layout.bounds if may_run_over else np.minimum(layout.bounds, batch.limits)
        self._kept_for = 0 if grows or any(constraints) else int((bounds - batch.kv_bounds).min())
        return self._kept

    def _lay(self, batch: Batch, picked: np.ndarray, sizes: tuple[int, int, int] | None) -> Layout:
        """Where the step's tokens stand. A batch that decodes differs from that of the step before in its bounds alone; attention clips its items by
        what is there, so they get some SLACK, and the list serves for as many steps. sizes: (T, S, M), padded."""
        kept = self._laid
        if kept is not None and kept.sizes == sizes and kept.shared == batch.shared and np.array_equal(kept.of[0], batch.rows) \
                and np.array_equal(kept.of[1], batch.q_lens) and np.array_equal(kept.of[2], picked) and (batch.kv_bounds <= kept.bounds).all():
            return kept
        rows_n, tokens_n = len(batch.rows), batch.num_tokens
        total, total_rows, total_picked = (sizes[0], sizes[0], sizes[1]) if sizes else (tokens_n, rows_n, len(picked))
        rows = _fill(batch.rows, total_rows)
        bounds = batch.kv_bounds if tokens_n > rows_n + len(picked) * MAX_CHAIN else np.minimum(batch.kv_bounds + SLACK, self.rows.columns)
        q_lens, kv_bounds = (_fill(_fill(part, rows_n + total - tokens_n, 1), total_rows) for part in (batch.q_lens, bounds))
        ends = np.cumsum(q_lens)                                   # (padding: tokens that are each a row of its own, then empty rows)
        of_token = np.repeat(np.arange(total_rows), q_lens)
        offset = np.arange(total) - np.repeat(ends - q_lens, q_lens)
        work = attention.plan(rows, q_lens, kv_bounds, batch.shared, **self.attention.plan_options)
        count, work = len(work.items), work.padded() if sizes else work
        flat = [work.flat(count)] if sizes or self.device != "cpu" else []
        self._laid = Layout(sizes, (batch.rows, batch.q_lens, picked), bounds, batch.shared, rows, q_lens, of_token, offset, ends - 1,
                            _fill(picked, total_picked, rows_n), work, flat)
        return self._laid

    @staticmethod
    def _few(reqs: Sequence, constraints: Sequence[Constraint | None], counts: Sequence[int]) -> tuple[list[np.ndarray], dict[int, int]]:
        """As `sort_places`, of rows whose state is known and whose logits are for nothing else."""
        if not any(constraints) or all(req.in_flight != 1 for req in reqs):
            return [], {}
        return sort_places([one.few(n) if one and req.in_flight == 1 and req.params.logprobs is None and req.params.min_tokens == 0 else ()
                            for one, req, n in zip(constraints, reqs, counts)], counts)

    def _sort(self, reqs: Sequence, constraints: Sequence[Constraint | None], counts: list[int], settled: dict[int, int],
              padded: int) -> tuple[tuple[int, int, int], sampling.Sorted, list[SortedGroup]]:
        """Who samples how, under whose grammar: a batch decodes for many steps before that changes. First (T, S, M); padded: T, to be padded, and so
        are the others. Where not all rows are alike there is padding in each, for lists of some of them to be filled up with."""
        rows, grammars = [req.row for req in reqs], [one and one.grammar for one in constraints]
        key = (reqs, rows, counts, settled, padded, grammars)      # a request id may come back with other parameters
        if self._sorted is not None and self._sorted[0] == key:
            return self._sorted[1]
        if self._members is None or self._members[0] != (reqs, rows):
            self._asks = {id(req): self._asks.get(id(req)) or self.sampler.ask(req.params, req.prompt_len, self.end_ids) for req in reqs}
            self._members = (reqs, rows), self.sampler.members(rows, list(self._asks.values()))
        members, sizes = self._members[1], (padded, len(reqs), sum(counts))
        sort = lambda width: self.sampler.spread(members, counts, settled, width)
        whole = padded == len(reqs) == sum(counts) == bucket(padded) and len({one and one.grammar.tables for one in constraints}) == 1
        made = sort(padded) if whole else None
        if made is None or padded and not made.is_even:
            sizes = tuple(bucket(size + 1) for size in sizes) if padded else sizes
            made, whole = sort(sizes[2] if padded else 0), False
        pads = (len(reqs), sizes[2] - 1) if padded and not whole else None
        self._sorted = key, (sizes, made, self.constraints.sort(list(zip(constraints, counts)), settled, pads))
        return self._sorted[1]

    # ---- on the device

    def mark(self) -> float | torch.cuda.Event:
        """This point of the stream, to measure the time between two."""
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @torch.inference_mode()
    def run(self, batch: Batch, plan: Plan) -> Results:
        """Run a step."""
        frame, marks = plan.frame, [self.mark()]
        buffer = plan.packed.sent()
        if not batch.again:
            before = buffer[:len(buffer) - sum(frame.lens)].split(plan.packed.lens[:BEGUN])
            self.rows.put(*before[:8])
            for req in batch.started:
                self.sampler.set_row(req.row, req.params, req.seed, req.prompt, req.output_ids)
            rows, states, leave_at = before[13:]
            if len(rows):
                self.constraints.states[rows], self.constraints.leave_at[rows] = states, leave_at
        copies = self.constraints.bring(frame.groups)
        stages = [lambda buffer, _: self._main(frame, copies, buffer)]
        if frame.nodes or plan.samples[0] and self.speculation is not None and self.speculation.drafters:
            stages.append(lambda buffer, left: self._guess(frame, copies, buffer, left))
        buffer, between = buffer[len(buffer) - sum(frame.lens):], lambda: marks.append(self.mark())
        if frame.padded:
            key = (*frame.key, len(stages), *(copy.version for copy in copies))
            left = self.graphs.run(key, stages, buffer, between)
            results = _cut(left.results, *plan.samples)
        else:
            left = run(stages, buffer, between)
            results = left.results
        if not batch.again:
            self.kv.copy(*before[8:10])                            # now that what is copied is there, also where this step has computed it
            self.rows.point(*before[10:13])
        results = replace(results, marks=marks[:1] if len(stages) == 1 else marks, prompt=self._prompt_logprobs(batch, left.hidden))
        return results if self.device == "cpu" else to_host(results)

    def _main(self, frame: Frame, copies: list[DeviceTables], buffer: torch.Tensor) -> Left:
        """The stage that extends the rows."""
        rows, arrays = self.rows, iter(buffer.split(frame.lens))
        places, few = list(itertools.islice(arrays, 8)), list(itertools.islice(arrays, 3))
        row_ids, q_lens, _, _, _, _, last, picked = places
        flat = next(arrays).to(torch.int32) if frame.flat else None
        params = frame.sampling.batch(itertools.islice(arrays, len(frame.sampling.arrays)))
        groups = [Group(copy, next(arrays), None if places is None else next(arrays)) for copy, (_, _, places) in zip(copies, frame.groups)]
        start = rows.length[row_ids].long()                        # [B] i64
        step, guesses = self._place(frame, places, flat, list(arrays), groups, start)
        hidden = self.model.forward(step, self.kv)                 # [T, E]
        results = Results(None, [])
        ends = start + q_lens                                      # [B] i64 each row's length after the step
        if len(picked):
            if not frame.padded:                                   # what has become known during the forward pass counts
                self.constraints.bring(frame.groups)
            logits = self.model.some_logits(hidden[last[picked] if guesses is None else guesses.at], *few)  # [S or M, V] f32
            known = ends[picked] if guesses is None else guesses.base + 1
            walk = Walk(self.constraints, groups, row_ids[picked], known, guesses) if groups else None
            if guesses is not None:
                ends[picked] = self.verify(guesses, logits, row_ids[picked], params, walk, results)
            else:
                results.sampled = self.sampler.sample(logits, ends[picked], params, walk and walk.mask())
                rows.tokens[row_ids[picked], ends[picked]] = results.sampled.tokens.to(torch.int32)
                if walk is not None:
                    results.walked = walk.finish(results.sampled.tokens)
                    ends[picked] -= results.walked.missed.long()
        rows.length[row_ids] = ends.to(torch.int32)
        if frame.padded:
            rows.length[:1].zero_()                                # padding's; its tokens are all at column 0
        return Left(results, hidden, row_ids[picked], ends[picked] + 1)

    def _place(self, frame: Frame, places: Sequence[torch.Tensor], flat: torch.Tensor | None, guessed: Sequence[torch.Tensor],
               groups: Sequence[Group], start: torch.Tensor) -> tuple[ForwardBatch, spec.Step | None]:
        """Where the tokens of a step stand, and which they are: in rows that had `start` [B] i64 columns with KV. places, guessed: of the plan."""
        rows = self.rows
        row_ids, q_lens, store_from, limits, of_token, offset, _, picked = places
        cols = start[of_token] + offset                            # [T] i64 column of each token
        token_rows, positions, tree, guesses = row_ids[of_token], cols, (), None  # [T] i64 each
        if frame.nodes:
            guesses = self.speculation.step(frame.nodes, guessed, rows.tokens, row_ids[picked], (start + q_lens)[picked], frame.columns,
                                            self._chains(groups, row_ids[picked]))
            base = guesses.base
            cols = cols.index_copy(0, guesses.at, guesses.columns)
            positions = cols.index_copy(0, guesses.at, guesses.positions)
            tree = (torch.full_like(cols, attention.NO_TREE).index_copy_(0, guesses.at, base[guesses.row]),
                    torch.zeros_like(cols).index_copy_(0, guesses.at, guesses.of(guesses.tree.bits)))
        ids = rows.tokens[token_rows, cols].long()                 # [T] i64
        slots = rows.table[token_rows, cols].long()                # [T] i64
        if frame.may_run_over:                                      # a row that has ended unbeknown to the host runs over what it has
            slots = slots * (cols < limits[of_token])
            positions = positions.clamp(max=self.context_len - 1)
        if guesses is not None:
            ids[guesses.at] = guesses.of(guesses.tree.tokens)
            slots[guesses.at] *= guesses.of(guesses.tree.inside)
        if frame.recomputes:                                        # the tree has their KV, and it may be locked by others
            slots = slots * (cols >= store_from[of_token])
        context = self.attention.prepare(frame.attention, rows.table, cols, *tree, **({} if flat is None else {"flat": flat}))
        return ForwardBatch(ids, positions, slots, (self.attention, context)), guesses

    def verify(self, guesses: spec.Step, logits: torch.Tensor, rows: torch.Tensor, params: sampling.SamplingBatch, walk: Walk | None,
                results: Results) -> torch.Tensor:
        """Sample at every node of a step with guesses, and keep what was right: tokens and KV of the rows ([S] i64). Returns their lengths."""
        tree, table, nodes = guesses.tree, self.rows.table, torch.arange(guesses.tree.tokens.shape[1], device=self.device)
        sampled = self.sampler.sample(logits, guesses.positions + 1, params, walk and walk.mask(),
                                      branch=guesses.branch() if params.penalised else None,
                                      guesses=guesses.next_of_chain() if self.rejects else None)
        targets = torch.zeros_like(tree.tokens)
        targets[guesses.row, guesses.node] = sampled.tokens
        found = spec.verify(tree, targets, walk and walk.guesses())
        taken, lens = nodes <= found.counts[:, None], found.counts + 1  # [S, N] bool, [S] i64
        if walk is not None:
            results.walked = walk.finish(*(part.gather(1, found.counts[:, None])[:, 0] for part in (found.tokens, found.order)))
            taken, lens = taken & ~results.walked.missed[:, None], lens - results.walked.missed.long()
        if params.penalised:
            self.sampler.count(rows[:, None].expand_as(taken), found.tokens, taken.float())
        cols = (guesses.base[:, None] + nodes).clamp(max=table.shape[1] - 2)   # [S, N] i64; beyond what a row knows stands anything
        self.rows.tokens[rows[:, None], cols + 1] = found.tokens.to(torch.int32)
        if self.speculation.branching:
            slots = table[rows[:, None], cols]
            sources = slots.gather(1, found.order)
            if self.page_size == 1:
                table[rows[:, None], cols] = sources
            else:
                moved = taken & (sources != slots)
                waits = self.device == "cpu" and self.graphs is None   # for how many there are: a GPU copies all, padding to padding
                pick = lambda part: part[moved] if waits else torch.where(moved, part, 0).flatten()  # noqa: E731
                self.kv.copy(pick(sources).long(), pick(slots).long())
        results.sampled = sampled
        results.judged = spec.Judged(found.order, found.counts, tree.sizes - 1, tree.depth.amax(1), guesses.forced)
        return guesses.base + lens

    def _chains(self, groups: Sequence[Group], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The text that grammars force behind what rows hold, if any has a grammar."""
        return self.constraints.chains(groups, rows, MAX_CHAIN) if groups and self.constraints.jump else None

    def _guess(self, frame: Frame, copies: list[DeviceTables], buffer: torch.Tensor, left: Left) -> Left:
        """The stage that guesses how rows go on that have sampled."""
        if self.speculation.drafters:
            arrays = itertools.islice(buffer.split(frame.lens), 11 + frame.flat + len(frame.sampling.arrays), None)
            groups = [Group(copy, next(arrays), None if places is None else next(arrays)) for copy, (_, _, places) in zip(copies, frame.groups)]
            chains = self._chains(groups, left.rows)
            room = max(frame.nodes, 1) + (0 if chains is None else MAX_CHAIN)
            left.results.next = spec.Next(*self.speculation.draft(left.rows, self.rows.tokens[left.rows, :frame.columns + room], left.known, chains))
        return left

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> list[PromptPiece]:
        """Logprobs of the prompt tokens that the step's hidden states predict, for the requests that asked for them."""
        found, first_token = [], 0
        for req, start, q_len, owed in zip(batch.reqs, batch.starts.tolist(), batch.q_lens.tolist(), batch.owed_from.tolist()):
            if owed >= 0:
                first = max(start, owed - 1)  # the state at column c predicts the token at c + 1
                last, ids = min(start + q_len, req.scored_len - 1), req.ids()
                k = req.params.prompt_logprobs if owed < req.prompt_len else req.params.logprobs
                for c in range(first, last, HEAD_ROWS):
                    n = min(HEAD_ROWS, last - c)
                    at = first_token + c - start
                    targets, = Packed([ids[c + 1:c + 1 + n]], self.device).send()
                    results = sampling.prompt_logprobs(self.model.logits(hidden[at:at + n]), targets, k)
                    found.append(PromptPiece(req, c + 1, *results))
            first_token += q_len
        return found


def _fill(part: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    return part if len(part) >= size else np.concatenate((part, np.full(size - len(part), value, np.int64)))


def _cut(results: Results, rows: int, places: int) -> Results:
    """What a padded step leaves, of its S rows and M places alone."""
    def first(part, count: int):
        cut = {field.name: value[:count] for field in fields(part) if isinstance(value := getattr(part, field.name), torch.Tensor)}
        return replace(part, **cut)
    return replace(results, sampled=first(results.sampled, places),
                   **{name: first(part, rows) for name in ("judged", "next", "walked") if (part := getattr(results, name)) is not None})


def _demo() -> None:
    """Steps of a few requests: how they are padded, and which of them one graph would serve."""
    runner = Runner(None, None, Rows(8, 64, "cpu"), attention.ATTENTION["torch"](4, 2, 16), sampling.SamplingState(9, 100, "cpu"),
                    SimpleNamespace(budgets=False, sort=Constraints.sort), None, device="cpu", context_len=60, page_size=1, end_ids=[0],
                    rejects=False, graphs=Graphs(FakeGraph))
    reqs = [SimpleNamespace(row=i + 1, params=SamplingParams(temperature=i % 2), prompt_len=4, in_flight=0) for i in range(6)]
    frames: dict[tuple, int] = {}
    for title, q_lens, at in (("3 rows decode", [1, 1, 1], 9), ("a token later", [1, 1, 1], 10), ("4 rows, one a prompt of 9", [1, 1, 1, 9], 11),
                              ("2 of them are done", [1, 1], 20), ("3 rows again, further on", [1, 1, 1], 30), ("1 row, greedy", [1], 12)):
        ints = lambda value, n=len(q_lens): np.full(n, value, np.int32)
        batch = Batch(1, reqs[:len(q_lens)], np.arange(1, len(q_lens) + 1), ints(at), np.array(q_lens), ints(0), ints(0), ints(60), ints(0),
                      ints(1) > 0, ints(1) > 0, ints(-1), [], [], Writes())
        plan = runner.plan(batch, [None] * len(q_lens), [])
        nth, work, width = frames.setdefault(plan.frame.key, len(frames) + 1), plan.frame.attention, len(plan.frame.sampling.rows)
        print(f"{title:25} {sum(q_lens):2} tokens in {work.tokens:2}, {plan.samples[1]} places in {width}: frame {nth}")


if __name__ == "__main__":
    _demo()
