"""Engine: the loop that turns requests into text, and that does not wait for the device.

      host      | plan n+1 |  wait  | process n | plan n+2 |  wait  | process n+1 | plan n+3 |        rows, bounds, text
                           v submit ^ tokens of n          v        ^ of n+1                 v
      worker    -- run n -----------][------ run n+1 ---------------][------ run n+2 -----------      values

  plan       scheduler.next_batch: host integers: which rows, how many tokens, where their KV goes; and what can be worked out of them
             (attention's work list). No token is needed for it: an upper bound of the lengths is enough.
  run        tensors, in the order of the steps: row writes -> forward -> sample -> tokens scattered into the device rows. It never looks
             at a value of the host's that came later than its plan; the host never looks at a device row. Ids, positions and slots are
             gathered from the rows by row number, so step n+1 finds what step n has sampled although no one else knows it yet:
                 rows     tokens [R, C]  table [R, C]  length [R]           what a row knows, where its KV is, how much of it
                 step     position = length[row] + offset;  id = tokens[row, position];  slot = table[row, position]
                 after    tokens[row, length + q] = sampled;  length[row] += q
  process    a step's tokens reach the host: text, stop conditions, scheduler.commit.

`Engine.depth` steps are in flight while the next is planned; nothing else depends on it. 0 is the plain loop, in line: run it, then process it.
With 1, a request that ends by a stop is found one step late, and what the step in flight samples for it is dropped; one that ends by its length
is known ahead and costs nothing. The worker is a GPU's stream, or on a CPU a thread (worker.py).

A step that fails (out of memory, a bug in a kernel) costs its requests that step: those behind it are not run, the scheduler takes all of them
back and runs each request of the one that failed alone, until it is past the point where that was; one that fails alone ends with the error. The
engine goes on. Only a GPU that is lost ends it.

This file alone holds text and tensors together. Cost: the longer of host and device a step, where in line it is their sum. Where it stops: on a
CPU both want the interpreter lock and the same cores, so the host's own time at most could be won, and where all cores compute less is
(`bench/overlap.py`): there the default is the plain loop. Source: SGLang's overlap scheduler (2024).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import os
import secrets
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NoReturn

import msgspec
import numpy as np
import torch

from . import attention, sampling, spec, weights
from .config import EngineConfig
from .constraint import Compiling, Constraint, Constraints, make_vocab, outcome, refusal
from .eviction import EVICTION
from .events import KVEvents
from .grammar import Grammar
from .graphs import CudaGraph, Graphs
from .jump import retokenized
from .masks import DEAD
from .memory import KVPool, Rows, SlotAllocator
from .model import ForwardBatch, Model, ModelConfig, load
from .protocol import Chunk, Logprob, Request, RequestError, SamplingParams, derive_seed
from .radix import Tree, draw, view
from .policies import POLICIES
from .req import Req
from .results import PromptPiece, Results, by_row, logprobs_of
from .rules import GrammarError
from .runner import Plan, Runner
from .scheduler import Batch, Scheduler
from .text import TextStream
from .worker import SHUTDOWN_S, Worker  # noqa: F401 (SHUTDOWN_S is for llm.py)

log = logging.getLogger("nano_sgl")

CPU_POOL_TOKENS = 65_536
NOT_FINITE = "the model's logits are not finite numbers (NaN or infinity)"
SLOW_PATTERN = "stop_regex took too long to search the output"
NOTHING = ([], None, False, []), (DEAD, False), 0        # of a row that samples nothing
PREFETCHES = 4              # grammar rows that are built ahead of each new state, for a GPU
IDLE_S = 0.005              # a step waits so long for grammars where there is nothing else to do


@dataclass(slots=True)
class Stream:
    """What the engine keeps of a request beside the scheduler's `Req`."""
    req: Req
    text: TextStream
    unsent: Chunk                      # collects what has not been handed out
    prompt_logprobs: list[Logprob] | None = None
    record: spec.Record = field(default_factory=spec.Record)  # of the guesses at its text
    constraint: Constraint | None = None      # where its grammar stands
    passes: bool = False                      # what a step adds goes out at once, as it is: it is streamed, and there are no logprobs
    rewrites: bool = False                    # ids may change until the end: jump_forward retokenize
    rewritten: list[int] | None = None        # what they are then; the scheduler is told so once no step holds the request
    since: int = 0                            # results of earlier steps are about other ids
    ending: str | None = None                 # the finish reason, once the logprobs of what is forced are there


@dataclass
class Flight:
    """A launched step, and its results to come."""
    batch: Batch
    results: Future                    # of Results, or of the exception that the step failed with


# ----------------------------------------------------------------------------------------------------------------------- engine

class Engine:
    """Model, memory, scheduler and sampler of one device. `add`, `abort` and `step` must be called from one thread."""

    def __init__(self, config: EngineConfig):
        for name, registry in (("schedule_policy", POLICIES), ("radix_eviction_policy", EVICTION), ("attention_backend", attention.ATTENTION)):
            if (value := getattr(config, name)) is not None and value not in registry:
                raise ValueError(f"{name} is {value!r}, expected one of {', '.join(registry)}")
        if config.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device is {config.device!r}, but this torch ({torch.__version__}) finds no GPU")
        if config.speculative_algorithm is not None:
            spec.make_drafters(config.speculative_algorithm, self._draft_options(config))  # refused before a model is loaded
        self.config = config
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
        on_cpu = self.device == "cpu"
        if config.attention_backend == ("triton" if on_cpu else "cpp"):
            raise ValueError(f"attention_backend is {config.attention_backend!r}, which does not run on the device {self.device}")
        self._use_device()
        if on_cpu and config.threads:
            torch.set_num_threads(config.threads)
        self.path = weights.resolve(config.model, config.load_format != "dummy")
        made_for = ModelConfig.from_dict(weights.load_config(self.path)).context_len
        self.context_len = config.context_length or made_for
        if self.context_len > made_for:
            raise ValueError(f"context_length is {self.context_len}, but the model was made for {made_for} positions")
        self.tokenizer = weights.load_tokenizer(self.path)
        self.model: Model = load(self.path, config.dtype, self.device, context_len=self.context_len, quantization=config.quantization,
                                 load_format=config.load_format)
        model = self.model.config
        self.vocab_size = model.vocab_size
        self.end_ids = weights.end_ids(self.path, self.tokenizer)
        self.generation_defaults = weights.generation_defaults(self.path)
        max_running = config.max_running_requests or (64 if on_cpu else 256)
        num_slots = self._pool_size(config.max_total_tokens)
        slots = SlotAllocator(num_slots, config.page_size)
        columns = -(-min(self.context_len, slots.capacity) // config.page_size) * config.page_size
        # Where a step makes several tokens, or maybe none, a request's end is known late: it runs over by a column for each step in flight, two at
        # most; one more for what it samples then, and one for guesses that reach beyond (`_verify`)
        self.rows = Rows(max_running, columns + 4, self.device)
        self.kv = KVPool(slots.capacity, config.page_size, model.num_layers, model.num_kv_heads, model.head_dim, self.model.dtype, self.device)
        self.events: KVEvents | None = None  # what the tree stores and removes; to be read in any thread
        if config.kv_events or config.kv_events_endpoint:
            self.events = KVEvents(config.page_size, "CPU" if on_cpu else "GPU", endpoint=config.kv_events_endpoint,
                                   replay_endpoint=config.kv_events_replay_endpoint, topic=config.kv_events_topic)
        self.scheduler = Scheduler(
            tree=Tree(config.page_size, config.radix_eviction_policy, self.events), slots=slots, rows=self.rows,
            token_budget=config.chunked_prefill_size or (2048 if on_cpu else 8192), max_running=max_running,
            context_len=self.context_len, schedule_policy=config.schedule_policy, cache=not config.disable_radix_cache,
            preempt_above=config.priority_scheduling_preemption_threshold, seed=config.random_seed or 0,
            waiting_timeout=config.waiting_timeout, running_timeout=config.running_timeout)
        self.attention_backend = config.attention_backend or attention.default_backend(self.device)
        self.attention = attention.ATTENTION[self.attention_backend](model.num_heads, model.num_kv_heads, model.head_dim)
        self.sampler = sampling.SamplingState(max_running + 1, self.vocab_size, self.device)
        self.streams: dict[str, Stream] = {}
        self.flights: collections.deque[Flight] = collections.deque()
        self.speculation = self._speculation(max_running)
        self.constraints = Constraints(partial(make_vocab, self.tokenizer, self.end_ids, self.vocab_size, on_cpu), max_running + 1, self.device,
                                       whitespace=config.constrained_json_whitespace, cache_size=config.grammar_cache_size,
                                       timeout_s=config.grammar_compile_timeout, prefetches=0 if on_cpu else PREFETCHES,
                                       jump=config.jump_forward == "draft")
        self._seeds = np.random.default_rng(secrets.randbits(63) if config.random_seed is None else config.random_seed)
        self.runner = Runner(self.model, self.kv, self.rows, self.attention, self.sampler, self.constraints, self.speculation, device=self.device,
                             context_len=self.context_len, page_size=config.page_size, end_ids=self.end_ids,
                             rejects=config.speculative_acceptance == "rejection", graphs=self._graphs())
        self._outbox: list[Chunk] = []
        self._planned: tuple[list[Req], list[Constraint | None]] = [], []   # a step's requests and their grammars; most steps have those of the last
        self._rewriting: list[Stream] = []
        overlap = not (on_cpu if config.disable_overlap_schedule is None else config.disable_overlap_schedule)
        self.depth = int(overlap)  # steps in flight while the next is planned; at most `scheduler.reserve`
        self.worker = Worker(threaded=overlap and on_cpu)
        ends = contextlib.ExitStack()
        if self.events is not None:
            ends.callback(self.events.close)
        ends.callback(self.constraints.compiler.close)
        ends.callback(self.worker.close)
        self.shutdown = weakref.finalize(self, ends.close)  # called, collected or at exit: once

    @staticmethod
    def _draft_options(config: EngineConfig) -> spec.DraftOptions:
        branches = config.speculative_eagle_topk or (4 if config.speculative_acceptance == "target" else 1)
        return spec.DraftOptions(config.speculative_num_draft_tokens, branches, config.speculative_ngram_max_match_window_size,
                                 config.speculative_ngram_min_match_window_size)

    def _speculation(self, max_running: int) -> spec.Speculation | None:
        """The drafters that were asked for, and the text that grammars force."""
        c = self.config
        if c.speculative_algorithm is None and c.jump_forward != "draft":
            return None
        options = self._draft_options(c)
        adaptive = c.speculative_algorithm is not None and c.speculative_draft_length == "adaptive"
        lengths = spec.Lengths(self._cost_curve(), options.count) if adaptive else None
        return spec.Speculation(c.speculative_algorithm, options, max_running + 1, self.vocab_size, self.device, lengths)

    @torch.inference_mode()
    def _cost_curve(self) -> spec.CostCurve:
        """Seconds of a step of so many tokens on this machine, the best of a few. The padding slot takes its KV."""
        sizes = [size for size in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if size <= min(self.rows.table.shape[1], self.context_len)]
        steps = []
        for size in sizes:
            cols = torch.arange(size, device=self.device)
            work = attention.plan([0], [size], [size], **self.attention.plan_options)
            steps.append(ForwardBatch(cols * 0, cols, cols * 0, (self.attention, self.attention.prepare(work, self.rows.table, cols))))
        taken = [math.inf] * len(sizes)
        for _ in range(5):  # in turn, so that what else the machine does falls on all sizes alike
            for i, step in enumerate(steps):
                start = time.perf_counter()
                sampling.first_max(self.model.logits(self.model.forward(step, self.kv)))
                if self.device != "cpu":
                    torch.cuda.synchronize(self.device)
                taken[i] = min(taken[i], time.perf_counter() - start)
        return spec.CostCurve(sizes, taken)

    def _graphs(self) -> Graphs | None:
        """Steps as graphs, where there are any and nobody minds. Only Triton's attention reads its work list on the device."""
        wanted = self.device != "cpu" and self.attention_backend == "triton" and not self.config.disable_cuda_graph
        return Graphs(CudaGraph) if wanted else None

    def _use_device(self) -> None:
        """Kernels go to the current device, which each thread has its own of."""
        if self.device != "cpu":
            torch.cuda.set_device(self.device)

    def _pool_size(self, wanted: int | None) -> int:
        """KV slots: what was asked for, or what memory allows."""
        model = self.model.config
        per_slot = KVPool.bytes_per_slot(model.num_layers, model.num_kv_heads, model.head_dim, self.model.dtype)
        if self.device == "cpu":
            free = _available_memory()
            fits = min(CPU_POOL_TOKENS, free // 4 // per_slot)
        else:
            free, total = torch.cuda.mem_get_info(self.device)
            fits = (free - int(total * (1 - self.config.mem_fraction_static))) // per_slot
        num_slots = fits if wanted is None else wanted
        if wanted is not None and wanted < self.config.page_size:
            raise ValueError(f"max_total_tokens is {wanted}, less than a page of {self.config.page_size} tokens")
        if num_slots < self.config.page_size or num_slots * per_slot > free:
            raise ValueError(f"a KV pool of {num_slots} tokens needs {num_slots * per_slot >> 20} MiB, {free >> 20} MiB are free; "
                             f"set max_total_tokens to at most {fits}")
        return num_slots

    # -------------------------------------------------------------------------------------------------------------- requests in, out

    def validate(self, request: Request) -> None:
        """RequestError, which says what is wrong, where `add` would refuse. Reads only what never changes: safe in any thread."""
        request.verify(self.vocab_size, self.context_len)
        tag = request.params.reasoning_end
        if tag is not None and any(token.special and token.content == tag for token in self.tokenizer.added_tokens_decoder.values()):
            raise RequestError(f"reasoning_end {tag!r} is a special token of this model's tokenizer, which is no text that a grammar could see: "
                               "give a closing tag that is", "reasoning_end")
        self.scheduler.validate(request)

    def compile(self, request: Request) -> Future | None:
        """Have the request's grammar compiled, in the background; None if it has none. In any thread."""
        return self.constraints.compile(request)

    def refused(self, request: Request, grammar: Future, timeout_s: float) -> RequestError | None:
        """Why the request's grammar is refused, if it is. Waits for it, `timeout_s` at most, and then refuses it. In any thread but the one that
        steps."""
        return self.constraints.refused(request, grammar, timeout_s)

    @property
    def grammar_patience(self) -> float:
        """Seconds that a request waits for its grammar."""
        return self.constraints.patience_s

    def abandon(self, grammars: Iterable[Future]) -> None:
        """Each was asked for with `compile`, and is waited for no more."""
        for grammar in grammars:
            self.constraints.compiler.abandon(grammar)

    def add(self, request: Request) -> None:
        """Queue a request. RequestError where it cannot be served; nothing has changed then. One whose grammar is not there yet waits for it first,
        and if that is refused its only chunk says so."""
        self.validate(request)
        if request.children and not self.scheduler.cache:       # there is nothing to keep it in
            self._outbox.append(Chunk(rid=request.rid, finish_reason="length"))
            return
        if request.rid in self.constraints.waiting or request.rid in self.scheduler.reqs:
            raise RequestError(f"request id {request.rid!r} is already in use", "rid")
        compiled, params = self.constraints.compile(request), request.params
        grammar = outcome(request, compiled) if compiled is not None and compiled.done() else None
        if isinstance(grammar, RequestError):
            raise grammar
        seed = derive_seed(int(self._seeds.integers(2**63)) if params.seed is None else params.seed, request.index)
        if compiled is None or grammar is not None:
            self._queue(request, seed, grammar)
        else:
            self.constraints.waiting[request.rid] = Compiling(request, seed, compiled, self.scheduler.clock())

    def _queue(self, request: Request, seed: int, grammar: Grammar | None, since: float | None = None) -> None:
        params, ids = request.params, request.prompt_ids
        constraint = grammar and self.constraints.begin(grammar, request)
        req = self.scheduler.add(request, seed, since, constraint.forced(False, len(self.streams) + 1) if constraint and self.constraints.jump else 0)
        prompt_logprobs = None
        if grammar is not None and params.ignore_eos:  # the end of a grammar is an end all the same
            params = msgspec.structs.replace(params, ignore_eos=False, stop_token_ids=None)
        if params.prompt_logprobs is not None:
            prompt_logprobs = [Logprob(ids[0], None)] if params.logprob_start_len == 0 else []
        rewrites = grammar is not None and self.config.jump_forward == "retokenize"
        passes = request.stream and not rewrites and params.logprobs is None and prompt_logprobs is None
        self.streams[request.rid] = Stream(req, TextStream(self.tokenizer, params, self.end_ids, req.max_new), Chunk(rid=request.rid),
                                           prompt_logprobs, constraint=constraint, passes=passes, rewrites=rewrites)

    def _queue_compiled(self) -> None:
        """Requests whose grammars are there join the queue; who has waited in vain is told."""
        for one, found in self.constraints.compiled(self.scheduler.clock(), self.config.waiting_timeout):
            if isinstance(found, RequestError):
                self.scheduler.holds.arrive(one.request.parent)
                reason = "abort" if found.status == 503 else "error"
                self._outbox.append(Chunk(rid=one.request.rid, finish_reason=reason, error=found.message, status=found.status, param=found.param))
            else:
                self._queue(one.request, one.seed, found, one.since)

    def abort(self, rid: str) -> bool:
        """End a request in any state; its last chunk says "abort". A hold that has ended gives up what it keeps. False where there was neither."""
        if (parent := self.constraints.leave(rid)) is not None:
            self.scheduler.holds.arrive(parent)         # or it would be waited for
            self._outbox.append(Chunk(rid=rid, finish_reason="abort"))
            return True
        holds = len(self.scheduler.holds)
        if self.scheduler.abort(rid) is None:
            return len(self.scheduler.holds) < holds
        self._close(self.streams[rid], "abort")
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_work or self.flights or self._outbox or self.constraints.waiting)

    @property
    def makes_tokens(self) -> bool:
        """Whether there are requests beside those that wait for a grammar."""
        return bool(self.scheduler.has_work or self.flights)

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """Plan a step and hand it to the worker, process the oldest in flight if `depth` are: what that adds to each request. Empty where there
        was nothing to do, or nothing is known yet."""
        self._use_device()
        self._end_late_requests()
        self._queue_compiled()
        for rid in self.constraints.release():
            self.scheduler.sit_out(rid, False)
        if self._rewriting:
            self._rewrite()
        batch = self.scheduler.next_batch(self._draft_lens())
        if batch is not None:
            self.flights.append(Flight(batch, self.worker.submit(self._job(batch))))
        if self.flights and (len(self.flights) > self.depth or batch is None):
            self._land()
        elif batch is None and (self.constraints.waiting or self.constraints.held) and not self._outbox:
            self.constraints.compiler.wait(IDLE_S)
        elif batch is None and self.has_work and not self._outbox:
            raise AssertionError(f"{len(self.scheduler.waiting)} requests wait, {len(self.scheduler.running)} run, and no step can be made")
        if self.events is not None:
            self.events.flush()
        chunks, self._outbox = self._outbox, []
        return chunks

    def _draft_lens(self) -> dict[Req, int]:
        """How many guesses the running requests draft in the step to come."""
        if self.speculation is None or not self.speculation.drafters and not self.constraints.used:
            return {}
        reqs, in_flight = [req for req in self.scheduler.running if req.decodes], bool(self.flights)
        streams, forced, count = [self.streams[req.rid] for req in reqs], [0] * len(reqs), len(reqs)
        if self.constraints.used and self.constraints.jump:
            forced = [one.constraint.forced(req.in_flight > 0, count) if one.constraint is not None else 0 for req, one in zip(reqs, streams)]
        return self.speculation.choose(reqs, [one.record for one in streams], forced, self.scheduler.tree, in_flight)

    def _end_late_requests(self) -> None:
        for req in self.scheduler.expire():
            limit, did = (self.config.waiting_timeout, "waited to be started") if req.started_at is None else (self.config.running_timeout, "ran")
            name = "waiting_timeout" if req.started_at is None else "running_timeout"
            self._close(self.streams[req.rid], "abort", f"the request {did} for more than {limit:g} s, the server's {name}",
                        status=503 if req.started_at is None else 504)

    # ------------------------------------------------------------------------------------------------------------------------ launch

    def _job(self, batch: Batch) -> Callable[[], Results]:
        """A step as the worker will run it. Whatever goes wrong with it, goes wrong there: in its turn."""
        try:
            return partial(self.runner.run, batch, self._plan(batch))
        except Exception as error:
            return partial(_raise, error)

    def _plan(self, batch: Batch) -> Plan:
        """The host's part of a step, while the steps before it run: integers of the batch, no value of the device."""
        if batch.again:     # nobody has a grammar, or begins
            return self.runner.plan(batch, [None] * len(batch.reqs), [])
        if batch.reqs is not self._planned[0]:
            self._planned = batch.reqs, [self.streams[req.rid].constraint for req in batch.reqs]
        picked, constraints = None, self._planned[1]
        if not batch.samples.all():
            picked = batch.samples.nonzero()[0]
            constraints = [constraints[i] for i in picked.tolist()]
        begun = [(req.row, one.state, one.leave_at) for req in batch.started if (one := self.streams[req.rid].constraint)]
        plan = self.runner.plan(batch, constraints, begun)
        if self.constraints.used:
            for one, count in zip(constraints, (batch.draft_lens if picked is None else batch.draft_lens[picked]).tolist()):
                if one is not None:
                    one.drafted = count
        return plan

    # ----------------------------------------------------------------------------------------------------------------------- process

    def _land(self) -> None:
        """Wait for the oldest step in flight and process it; where it failed, its requests are tried again, or get an answer, and the others
        go on."""
        flight = self.flights[0]
        try:
            results = flight.results.result()
            if results.copied is not None:
                results.copied.synchronize()
        except BaseException as error:
            log.exception("a step failed")
            self._fail(error)
            if not isinstance(error, Exception):  # Ctrl-C: the books are right, and whoever pressed it decides
                raise
        else:
            self.flights.popleft()
            self._process(flight.batch, results)

    def _fail(self, error: BaseException) -> None:
        """Take back the steps in flight: the oldest has failed, and the others were built on it."""
        self.synchronize()  # on a CPU they have not run, on a GPU nobody will look at what they left; a GPU that is lost raises here
        batches = [flight.batch for flight in self.flights]
        self.flights.clear()
        self.worker.restart()
        traceback.clear_frames(error.__traceback__)  # or what the step had allocated would be in the way of the next
        for req in self.scheduler.fail(batches):
            self._close(self.streams[req.rid], "error", f"the engine failed on this request: {error}")

    def _process(self, batch: Batch, results: Results) -> None:
        """The results of a step reach the host: text and stop conditions here, memory in the scheduler. What goes wrong with one request ends
        that request alone."""
        walked = itertools.repeat((DEAD, False)) if results.walked is None else zip(results.walked.states.tolist(), results.walked.missed.tolist())
        of_rows = of_sampling = zip(by_row(batch, results), walked, itertools.count())
        if not batch.samples.all():
            of_rows = (next(of_sampling) if samples else NOTHING for samples in batch.samples.tolist())
        self._take_prompt_logprobs(results.prompt)
        tokens, finished, spoiled, paths, made, ended = [], [], [], [], [], []
        for req, samples, complete, of_row in zip(batch.reqs, batch.samples.tolist(), batch.complete.tolist(), of_rows):
            (new, logprobs, bad, path), (state, missed), nth = of_row
            stream = self.streams.get(req.rid)
            kept, reason, error, chunk = 0, None, None, None
            if stream is None or stream.req is not req:
                reason = "gone"  # ended since the launch: what the step sampled for it is dropped
            elif batch.step < stream.since:
                new = path = []
                stream.record.dropped += 1
            elif samples and stream.ending and not missed:
                reason = stream.ending
            elif samples:
                if stream.passes and new and not bad and (text := stream.text.pass_on(new)) is not None:
                    chunk, kept = Chunk(rid=req.rid, text=text, output_ids=new, cached_tokens=req.cached_tokens or 0), len(new)
                else:
                    kept, reason, error = self._advance(stream, new, logprobs)
                if stream.constraint is not None:
                    self.constraints.tokens += kept
                    stream.constraint.watch(new if kept == len(new) else new[:kept])
                if kept:
                    made.append((nth, stream.record, new, kept, not req.output_ids))
                if bad and not reason:
                    reason, error = self.constraints.stuck(stream.constraint, req.request, stream.text.count, new)
                    if reason is None:
                        reason, error = "error", NOT_FINITE
                        spoiled.append(req)
                elif stream.constraint is not None and not reason:
                    reason, error = self._follow(stream, state, missed)
                    if stream.rewrites and kept and not reason:
                        reason, error = self._jump(stream)
            elif complete and req.max_new == 0:
                reason = "length"
            if chunk is not None:
                self._outbox.append(chunk)
            if reason:
                if reason != "gone":
                    ended.append((stream, reason, error))
            elif kept and chunk is None and req.request.stream:
                self._outbox.append(self._take(stream))
            tokens.append(new if kept == len(new) else new[:kept])
            finished.append(reason is not None)
            paths.append(path)
        if len(results.marks) > 1:
            self._learn(results, made)
        for stream, reason, error in ended:
            self._close(stream, reason, error)
        self.scheduler.commit(batch, tokens, finished, spoiled, paths)

    def _take_prompt_logprobs(self, pieces: list[PromptPiece]) -> None:
        for piece in pieces:
            stream = self.streams.get(piece.req.rid)
            if stream is not None and stream.req is piece.req:
                ids = piece.req.ids()[piece.position:piece.position + len(piece.logprobs)].tolist()
                into = stream.prompt_logprobs if piece.position < piece.req.prompt_len else stream.unsent.logprobs
                into += logprobs_of(ids, piece.logprobs, piece.top_ids, piece.top_logprobs)

    def _learn(self, results: Results, made: list[tuple[int, spec.Record, list[int], int, bool]]) -> None:
        """What became of a step's guesses, and which there are for the next. made: see `Speculation.learn`."""
        began, drafting, drafted = results.marks
        seconds = (lambda a, b: b - a) if self.device == "cpu" else (lambda a, b: a.elapsed_time(b) / 1000)
        self.speculation.learn(made, results.judged, results.next, seconds(drafting, drafted), seconds(began, drafting))

    def _follow(self, stream: Stream, state: int, missed: bool) -> tuple[str | None, RequestError | None]:
        """A request with a grammar has got new tokens, or none because a row was missing: (finish reason, error)."""
        req = stream.req
        error = self.constraints.learn(req.rid, stream.constraint, state, missed)
        if missed or req.sits_out:
            self.scheduler.sit_out(req.rid, req.rid in self.constraints.held)
        return (None, None) if error is None else ("error", refusal(req.request, error))

    def _jump(self, stream: Stream) -> tuple[str | None, RequestError | None]:
        """Append the text that a grammar forces behind a request's output: (finish reason, error)."""
        try:
            return self._retokenize(stream), None
        except TimeoutError:
            return "error", RequestError(SLOW_PATTERN, "stop_regex")
        except Exception as fault:
            if not isinstance(fault, GrammarError):
                log.exception("request %s: its forced text failed", stream.req.rid)
            return "error", refusal(stream.req.request, fault)

    def _retokenize(self, stream: Stream) -> str | None:
        """The output and what is forced, tokenised anew: a reason, where it is the end. One more token is left to be sampled. Tokens of the steps in
        flight are dropped."""
        old, constraint, req = stream.unsent.output_ids, stream.constraint, stream.req
        if (made := retokenized(constraint.grammar, constraint.state, old)) is None:
            return None
        ids, state, vocab = made[0][:max(req.max_new - 1, len(old))], made[1], constraint.grammar.vocab
        text = TextStream(self.tokenizer, stream.text.params, self.end_ids, req.max_new)
        text.skip(stream.text)
        reason = next((why for token in ids if (why := text.push(token))), None)
        ids = ids[:text.count]
        if len(ids) < len(made[0]):
            before, after = vocab.decode(old), vocab.decode(ids)
            if not after.startswith(before) or after == before:
                return None
            state = constraint.grammar.step_bytes(constraint.state, after[len(before):])
        same = next((i for i, (a, b) in enumerate(zip(old, ids)) if a != b), min(len(old), len(ids)))
        stream.record.forced += max(len(ids) - len(old), 0)
        stream.text, stream.unsent.output_ids, stream.rewritten, stream.since = text, ids, list(ids), self.scheduler.step + 1
        if stream.unsent.logprobs is not None:
            del stream.unsent.logprobs[same:]
        elif reason:
            return reason
        stream.ending = reason
        self.constraints.learn(req.rid, constraint, state, False)
        self.scheduler.sit_out(req.rid, True)
        self._rewriting.append(stream)
        return None

    def _rewrite(self) -> None:
        """The scheduler gets outputs that were tokenised anew, once no step holds the requests."""
        late = [stream for stream in self._rewriting if stream.req.in_flight and self.streams.get(stream.req.rid) is stream]
        for stream in late:
            self.scheduler.sit_out(stream.req.rid, True)
        for stream in self._rewriting:
            if stream not in late and self.streams.get(stream.req.rid) is stream:
                self.scheduler.rewrite(stream.req, stream.rewritten, stream.req.params.logprobs is not None)
                self.scheduler.sit_out(stream.req.rid, False)
        self._rewriting = late

    @staticmethod
    def _advance(stream: Stream, tokens: list[int], logprobs: list[Logprob] | None) -> tuple[int, str | None, RequestError | str | None]:
        """Feed a request the tokens of one step, up to the one that ends it: (how many, finish reason, error)."""
        reason, error, kept = None, None, 0
        whole = stream.text.push_whole(tokens) is not None
        if whole:
            kept = len(tokens)
        for token in () if whole else tokens:
            kept += 1
            try:
                reason = stream.text.push(token)
            except TimeoutError:
                reason, error = "error", RequestError(SLOW_PATTERN, "stop_regex")
            except Exception as fault:
                log.exception("request %s: its text failed", stream.req.rid)
                reason, error = "error", f"the text of the output failed: {fault}"
            if reason:
                break
        stream.unsent.output_ids += tokens if kept == len(tokens) else tokens[:kept]
        if logprobs is not None and (k := stream.req.params.logprobs) is not None:
            stream.unsent.logprobs = stream.unsent.logprobs or []
            stream.unsent.logprobs += [Logprob(entry.token_id, entry.logprob, entry.top[:k]) for entry in logprobs[:kept]]
        return kept, reason, error

    def _take(self, stream: Stream, final: bool = False) -> Chunk:
        """What can be handed out now."""
        chunk, stream.unsent = stream.unsent, Chunk(rid=stream.unsent.rid)
        if stream.rewrites and not final:
            stream.unsent.output_ids, stream.unsent.logprobs, chunk.output_ids, chunk.logprobs = chunk.output_ids, chunk.logprobs, [], None
        chunk.text = stream.text.take(final)
        chunk.cached_tokens = stream.req.cached_tokens or 0
        chunk.prompt_logprobs, stream.prompt_logprobs = stream.prompt_logprobs, None
        return chunk

    def _close(self, stream: Stream, reason: str, error: RequestError | str | None = None, status: int = 500) -> None:
        """The last chunk of a request. error: why, a RequestError where the client is to blame."""
        chunk = self._take(stream, final=True)
        chunk.finish_reason, chunk.stop_reason, chunk.error, chunk.status = reason, stream.text.stop_reason, error, status
        if isinstance(error, RequestError):
            chunk.error, chunk.status, chunk.param = error.message, error.status, error.param
        shown = stream.record.summary() if self.speculation is not None and self.speculation.drafters else {}
        if stream.constraint is not None:
            self.constraints.forced += stream.record.forced
            saved = max(stream.record.forced - stream.record.dropped, 0)
            shown |= {"forced_tokens": stream.record.forced, "jump_forward_steps_saved": saved}
        chunk.speculation = shown or None
        self._outbox.append(chunk)
        self.constraints.forget(stream.req.rid)
        del self.streams[stream.req.rid]

    # ------------------------------------------------------------------------------------------------------------- housekeeping

    def flush_cache(self) -> bool:
        """Forget every cached prefix, those that are held for requests to come too; False, and nothing done, while requests run or wait."""
        if self.has_work:
            return False
        self.scheduler.holds.clear()
        self.scheduler.slots.free(self.scheduler.tree.reset())
        if self.events is not None:
            self.events.flush()
        return True

    def in_force(self) -> dict:
        """The config, with what the engine chose where it was left the choice."""
        s = self.scheduler
        chosen = {"dtype": str(self.model.dtype).removeprefix("torch."), "device": self.device, "context_length": self.context_len,
                  "max_running_requests": s.max_running, "max_total_tokens": s.slots.capacity, "chunked_prefill_size": s.token_budget,
                  "disable_overlap_schedule": not self.depth, "attention_backend": self.attention_backend, "threads": torch.get_num_threads(),
                  "schedule_policy": s.policy.name, "disable_cuda_graph": self.runner.graphs is None}
        if self.config.speculative_algorithm is not None:
            chosen["speculative_eagle_topk"] = self.speculation.options.branches
        return {**asdict(self.config), **chosen}

    def stats(self) -> dict:
        """Counts for the log line and the info routes. Tokens, requests; rates are the reader's to make."""
        s = self.scheduler
        guesses = {} if self.speculation is None or not self.speculation.drafters else self.speculation.total.summary()
        waiting, graphs = len(s.waiting) + len(self.constraints.waiting), self.runner.graphs
        recorded = {} if graphs is None else {"graphs": len(graphs.made), "graph_replays": graphs.replays}
        return {"running": len(s.running), "waiting": waiting, "kv_capacity": s.slots.capacity, "kv_free": s.slots.available,
                "kv_cached": s.tree.evictable, "kv_locked": s.tree.protected, "holds": len(s.holds), "held_tokens": s.holds.tokens,
                **vars(s.counters), **guesses, **recorded, **self.constraints.stats()}

    def tree_view(self, max_nodes: int = 500, width: int = 60) -> dict:
        """The cache as plain data: `radix.view`."""
        return view(self.scheduler.tree, self.tokenizer.decode, max_nodes, width)

    def synchronize(self) -> None:
        """Wait until every launched step has run. What it left is processed by the next calls of `step`."""
        for flight in self.flights:
            flight.results.exception()
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def check(self) -> None:
        """Prove the books: slots, rows and nodes (`Scheduler.check`), and that the device rows agree. AssertionError says what is wrong.
        Waits for the device; tokens that the host does not know yet are not looked at."""
        self.synchronize()
        self.scheduler.check()
        assert set(self.streams) == set(self.scheduler.reqs), "a text stream without a request, or a request without a stream"
        if any(flight.results.exception() for flight in self.flights):
            return  # the rows are behind the host, which is about to find out
        assert int(self.rows.length[0]) == 0, "the row of padding has got tokens"
        for req in self.scheduler.running:
            if req.row in self.scheduler.unwritten_rows or self.streams.get(req.rid) in self._rewriting:
                continue
            row, tree = req.row, self.scheduler.tree
            length = int(self.rows.length[row])
            fits = 0 <= length - req.computed_len <= req.guessed or req.leaving == "done"  # what that one still makes is not looked at
            assert fits, f"{req.rid}: device length {length}, expected {req.computed_len} (+ {req.guessed})"
            path = np.concatenate([tree.slots(req.node), np.array(req.own, np.int32)]) if req.node.end else np.array(req.own, np.int32)
            table = self.rows.table[row, :len(path)].cpu().numpy()
            sure = min(req.computed_len, req.known_len)  # behind, guesses in flight may have changed places
            assert np.array_equal(table[:sure], path[:sure]), f"{req.rid}: its table does not lead to its slots"
            known = self.rows.tokens[row, :req.known_len].cpu().numpy()
            assert np.array_equal(known, req.ids()), f"{req.rid}: the device row holds other tokens"


def _raise(error: Exception) -> NoReturn:
    raise error


def _available_memory() -> int:
    """Bytes that can be had without swapping, page cache included where the system says how much."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _demo() -> None:
    engine = Engine(EngineConfig("demo", max_total_tokens=4096))
    params = SamplingParams(max_tokens=12, temperature=0)
    for rid, prompt in (("a", "1, 2, 3, 4, 5,"), ("b", "1, 2, 3, 4, 5, 6, 7,")):
        engine.add(Request(rid=rid, prompt_ids=engine.tokenizer.encode(prompt), params=params))
    while engine.has_work:
        print(" | ".join(f"{chunk.rid}: {chunk.text!r}" for chunk in engine.step()))
        engine.check()
    print(draw(engine.scheduler.tree, engine.tokenizer.decode))


if __name__ == "__main__":
    _demo()
