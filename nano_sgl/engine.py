"""Engine: the loop that turns requests into text, and `LLM`, the engine as a Python object.

One step is three calls, and they are the whole story:

      batch  = scheduler.next_batch()      host integers: which rows, how many tokens, where their KV goes
      flight = self._launch(batch)         tensors: row writes -> forward -> sample -> tokens scattered into the device rows
      chunks = self._process(flight)       the step's tokens reach the host: text, stop conditions, scheduler.commit

`_launch` never looks at a value the device has computed: input ids, positions and KV slots are gathered from the device rows by row number, the
sampled tokens are scattered back there. So a second step could be launched before the first one's tokens are known; how many steps may be in
flight is `self.depth` (0: each step is processed before the next is planned), and nothing else depends on it.

      rows     tokens [R, C]  table [R, C]  length [R]           what a row knows, where its KV is, how much of it
      step     position = length[row] + offset;  id = tokens[row, position];  slot = table[row, position]
      after    tokens[row, length + q] = sampled;  length[row] += q

This file alone holds text and tensors together: `text.TextStream` turns each request's ids into text and says when a stop ends it.

A step that fails (out of memory, a bug in a kernel) costs its requests that step: the scheduler takes back what it had given it and runs each
of them alone; one that fails alone ends with the error. The engine goes on.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import numbers
import operator
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from tqdm import tqdm

from . import attention, sampling, weights
from .memory import KVPool, Rows, SlotAllocator
from .chat import ChatTemplate, Codec, Message, read_messages
from .model import ForwardBatch, Model, ModelConfig, load
from .protocol import Chunk, Logprob, Output, Request, RequestError, SamplingParams, convert, derive_seed, show
from .radix import EVICTION, MAX_PAGE_SIZE, Tree
from .scheduler import POLICIES, Batch, Req, Scheduler
from .text import TextStream

log = logging.getLogger("nano_sgl")

HEAD_ROWS = 256             # prompt logprobs: hidden states per call of the head, so that logits stay small
CPU_POOL_TOKENS = 65_536


def flag(default, text: str, choices: Collection[str] | None = None):
    """A field of EngineConfig: its default, its line in `--help`, the values it may take (a registry: also what is registered later)."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """Every flag of the engine: keywords of `LLM`, command-line flags of the server (dashes for underscores)."""
    model: str = flag("demo", "demo, a local directory, a Hugging Face id or a .gguf file")
    dtype: str = flag("auto", "auto is the checkpoint's", ("auto", "float32", "bfloat16", "float16"))
    device: str = flag("auto", "auto is cuda where there is one, else cpu")
    context_length: int | None = flag(None, "tokens of prompt and output together; the model's by default")
    max_running_requests: int | None = flag(None, "rows of a batch; 64 on CPU, 256 on GPU by default")
    max_total_tokens: int | None = flag(None, "KV slots; by default what memory allows (CPU: at most 65536)")
    mem_fraction_static: float = flag(0.88, "share of GPU memory for weights and KV")
    chunked_prefill_size: int | None = flag(None, "tokens a step; 2048 on CPU, 8192 on GPU by default; less makes streams smoother")
    page_size: int = flag(1, "KV slots a page, 1 to 64")
    schedule_policy: str = flag("fcfs", "order of the waiting requests", POLICIES)
    radix_eviction_policy: str = flag("lru", "which cached prefix goes first", EVICTION)
    disable_radix_cache: bool = flag(False, "keep no KV of finished requests and share none")
    attention_backend: str | None = flag(None, "triton on GPU, torch on CPU by default", attention.ATTENTION)
    random_seed: int | None = flag(None, "base of the seeds of requests that name none; random by default")
    threads: int | None = flag(None, "CPU threads; as many as cores by default")

    def __post_init__(self):
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value is not None and value not in choices:
                raise ValueError(f"{f.name} is {value!r}, expected one of {', '.join(choices)}")
        for name, low, high in (("context_length", 1, 2**31), ("max_running_requests", 1, 2**16), ("max_total_tokens", 1, 2**31),
                                ("chunked_prefill_size", 1, 2**31), ("threads", 1, 2**10), ("page_size", 1, MAX_PAGE_SIZE),
                                ("random_seed", 0, 2**63 - 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not low <= value <= high):
                raise ValueError(f"{name} is {value!r}, expected an integer from {low} to {high}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}, expected auto, cpu, cuda or cuda:N")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}, but this torch ({torch.__version__}) finds no GPU")
        if not 0 < self.mem_fraction_static <= 1:
            raise ValueError(f"mem_fraction_static is {self.mem_fraction_static!r}, expected a number above 0 and at most 1")


@dataclass
class Stream:
    """What the engine keeps of a request beside the scheduler's `Req`."""
    req: Req
    text: TextStream
    unsent: Chunk                      # collects what has not been handed out
    prompt_logprobs: list[Logprob] | None = None


@dataclass
class Flight:
    """A launched step and the tensors it will leave."""
    batch: Batch
    sampled: sampling.Sampled | None   # on the host once `done` has happened
    prompt: list[PromptPiece]
    done: torch.cuda.Event | None      # None on CPU: a launched step is a finished step


@dataclass
class PromptPiece:
    """Logprobs of a request's prompt tokens from `position` on."""
    req: Req
    position: int
    logprobs: torch.Tensor             # [n] f32
    top_ids: torch.Tensor              # [n, k] i64
    top_logprobs: torch.Tensor         # [n, k] f32


# ----------------------------------------------------------------------------------------------------------------------- engine

class Engine:
    """Model, memory, scheduler and sampler of one device. `add`, `abort` and `step` must be called from one thread."""

    depth = 0  # steps in flight while the next is planned

    def __init__(self, config: EngineConfig):
        self.config = config
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
        on_cpu = self.device == "cpu"
        self._use_device()
        if on_cpu and config.threads:
            torch.set_num_threads(config.threads)
        self.path = weights.resolve(config.model)
        made_for = ModelConfig.from_dict(weights.load_config(self.path)).context_len
        self.context_len = config.context_length or made_for
        if self.context_len > made_for:
            raise ValueError(f"context_length is {self.context_len}, but the model was made for {made_for} positions")
        self.tokenizer = weights.load_tokenizer(self.path)
        self.model: Model = load(self.path, config.dtype, self.device, context_len=self.context_len)
        model = self.model.config
        self.vocab_size = model.vocab_size
        self.end_ids = weights.end_ids(self.path, self.tokenizer)
        self.generation_defaults = weights.generation_defaults(self.path)
        max_running = config.max_running_requests or (64 if on_cpu else 256)
        num_slots = self._pool_size(config.max_total_tokens)
        slots = SlotAllocator(num_slots, config.page_size)
        columns = -(-min(self.context_len, slots.capacity) // config.page_size) * config.page_size
        self.rows = Rows(max_running, columns, self.device)
        self.kv = KVPool(slots.capacity, config.page_size, model.num_layers, model.num_kv_heads, model.head_dim, self.model.dtype, self.device)
        self.scheduler = Scheduler(
            tree=Tree(config.page_size, config.radix_eviction_policy), slots=slots, rows=self.rows,
            token_budget=config.chunked_prefill_size or (2048 if on_cpu else 8192), max_running=max_running,
            context_len=self.context_len, schedule_policy=config.schedule_policy, cache=not config.disable_radix_cache,
            seed=config.random_seed or 0)
        backend = config.attention_backend or ("torch" if on_cpu else "triton")
        self.attention = attention.ATTENTION[backend](model.num_heads, model.num_kv_heads, model.head_dim)
        self.sampler = sampling.SamplingState(max_running + 1, self.vocab_size, self.device)
        self.streams: dict[str, Stream] = {}
        self.flights: collections.deque[Flight] = collections.deque()
        self._seeds = np.random.default_rng(secrets.randbits(63) if config.random_seed is None else config.random_seed)
        self._sampling_key: tuple = ()
        self._sampling_batch: sampling.SamplingBatch | None = None
        self._outbox: list[Chunk] = []

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
        if num_slots < self.config.page_size or num_slots * per_slot > free:
            raise ValueError(f"a KV pool of {num_slots} tokens needs {num_slots * per_slot >> 20} MiB, {free >> 20} MiB are free; "
                             f"set max_total_tokens to at most {fits}")
        return num_slots

    # -------------------------------------------------------------------------------------------------------------- requests in, out

    def validate(self, request: Request) -> None:
        """RequestError, which says what is wrong, where `add` would refuse. Reads only what never changes: safe in any thread."""
        request.verify(self.vocab_size, self.context_len)
        self.scheduler.validate(request)

    def add(self, request: Request) -> None:
        """Queue a request. RequestError where it cannot be served; nothing has changed then."""
        self.validate(request)
        params, ids = request.params, request.prompt_ids
        req = self.scheduler.add(request, derive_seed(int(self._seeds.integers(2**63)) if params.seed is None else params.seed, request.index))
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [Logprob(ids[0], None)] if params.logprob_start_len == 0 else []
        self.streams[request.rid] = Stream(req, TextStream(self.tokenizer, params, self.end_ids, req.max_new), Chunk(rid=request.rid),
                                           prompt_logprobs)

    def abort(self, rid: str) -> bool:
        """End a request in any state; its last chunk says "abort". False where it is not alive (any more)."""
        if self.scheduler.abort(rid) is None:
            return False
        self._close(self.streams[rid], "abort")
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_work or self.flights or self._outbox)

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """Plan, launch, process: what the step processed adds to each request. Empty where there was nothing to do."""
        self._use_device()
        batch = self.scheduler.next_batch()
        if batch is not None:
            try:
                self.flights.append(self._launch(batch))
            except Exception as error:  # whatever it was: its requests are tried again, or get an answer, and the others go on
                log.exception("a step failed")
                self._fail([flight.batch for flight in self.flights] + [batch], error)
        if self.flights and (len(self.flights) > self.depth or batch is None):
            self._process(self.flights.popleft())
        elif batch is None and self.has_work and not self._outbox:
            raise AssertionError(f"{len(self.scheduler.waiting)} requests wait, {len(self.scheduler.running)} run, and no step can be made")
        chunks, self._outbox = self._outbox, []
        return chunks

    def _fail(self, batches: list[Batch], error: Exception) -> None:
        self.flights.clear()
        self._sampling_key = ()
        for req in self.scheduler.fail(batches):
            self._close(self.streams[req.rid], "error", f"the engine failed on this request: {error}")

    # ------------------------------------------------------------------------------------------------------------------------ launch

    def _launch(self, batch: Batch) -> Flight:
        """Run a batch. Everything here is work in stream order; no value of the device is read."""
        rows = self.rows
        rows.apply(batch.writes)
        for req in batch.started:
            self.sampler.set_row(req.row, req.params, req.seed, req.prompt, req.output_ids, self.end_ids)
        forward, row_ids, last, ends = self._forward_batch(batch)
        hidden = self.model.forward(forward, self.kv)  # [T, E]
        prompt = self._prompt_logprobs(batch, hidden)
        picked = np.flatnonzero(batch.samples)
        sampled = None
        if len(picked):
            index = self._upload(picked)
            logits = self.model.logits(hidden[last[index]])  # [N, V] f32
            sampled = self.sampler.sample(logits, ends[index], self._sampling_params([batch.reqs[i] for i in picked]))
            rows.tokens[row_ids[index], ends[index]] = sampled.tokens.to(torch.int32)
        rows.length[row_ids] = ends.to(torch.int32)
        return self._to_host(Flight(batch, sampled, prompt, None))

    def _to_host(self, flight: Flight) -> Flight:
        """Begin the copies of a step's results; what `_process` waits for is this step, not the next."""
        if self.device == "cpu":
            return flight
        for part in [*flight.prompt, flight.sampled]:
            for name, value in vars(part).items() if part is not None else ():
                if isinstance(value, torch.Tensor):
                    object.__setattr__(part, name, value.to("cpu", non_blocking=True))
        flight.done = torch.cuda.Event()
        flight.done.record()
        return flight

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        """[n] int64 on the device."""
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self.device, non_blocking=True)

    def _forward_batch(self, batch: Batch) -> tuple[ForwardBatch, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The step's tensors; and per batch row: its table row, its last token in the step, its length after the step. [B] int64 each."""
        rows = self.rows
        ends = np.cumsum(batch.q_lens)
        of_token = np.repeat(np.arange(len(batch.rows)), batch.q_lens)
        offset = np.arange(batch.num_tokens) - np.repeat(ends - batch.q_lens, batch.q_lens)
        row_ids, q_lens, of_token_t = self._upload(batch.rows), self._upload(batch.q_lens), self._upload(of_token)
        start = rows.length[row_ids].long()                        # [B] i64
        cols = start[of_token_t] + self._upload(offset)            # [T] i64 column and position of each token
        token_rows = row_ids[of_token_t]                           # [T] i64
        ids = rows.tokens[token_rows, cols].long()                 # [T] i64
        slots = rows.table[token_rows, cols].long()                # [T] i64
        if (batch.store_from > batch.starts).any():                # recomputed tokens: the tree has their KV, and it may be locked by others
            slots = slots * (cols >= self._upload(batch.store_from)[of_token_t])
        plan = attention.plan(batch.rows, batch.q_lens, batch.kv_bounds, batch.shared, **self.attention.plan_options)
        context = self.attention.prepare(plan, rows.table, cols)
        forward = ForwardBatch(input_ids=ids, positions=cols, slots=slots, attention=(self.attention, context))
        return forward, row_ids, self._upload(ends - 1), start + q_lens

    def _sampling_params(self, reqs: list[Req]) -> sampling.SamplingBatch:
        key = tuple((req, req.row) for req in reqs)  # a request id may come back with other parameters
        if key != self._sampling_key:
            self._sampling_key = key
            self._sampling_batch = self.sampler.batch([(req.row, req.params, req.prompt_len) for req in reqs])
        return self._sampling_batch

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> list[PromptPiece]:
        """Logprobs of the prompt tokens that the step's hidden states predict, for the requests that asked for them."""
        found, first_token = [], 0
        for req, start, q_len, owed in zip(batch.reqs, batch.starts.tolist(), batch.q_lens.tolist(), batch.owed_from.tolist()):
            if owed >= 0:
                first = max(start, owed - 1)  # the state at column c predicts the token at c + 1
                last = min(start + q_len, req.prompt_len - 1)
                for c in range(first, last, HEAD_ROWS):
                    n = min(HEAD_ROWS, last - c)
                    at = first_token + c - start
                    targets = self._upload(req.prompt[c + 1:c + 1 + n])
                    results = sampling.prompt_logprobs(self.model.logits(hidden[at:at + n]), targets, req.params.prompt_logprobs)
                    found.append(PromptPiece(req, c + 1, *results))
            first_token += q_len
        return found

    # ----------------------------------------------------------------------------------------------------------------------- process

    def _process(self, flight: Flight) -> None:
        """The results of a step reach the host: text and stop conditions here, memory in the scheduler. What goes wrong with one request ends
        that request alone."""
        if flight.done is not None:
            flight.done.synchronize()
        batch, results = flight.batch, self._results(flight)
        self._take_prompt_logprobs(flight.prompt)
        tokens, finished, spoiled = [], [], []
        for req, samples, complete in zip(batch.reqs, batch.samples.tolist(), batch.complete.tolist()):
            new, logprobs, bad = next(results) if samples else ([], None, False)
            stream = self.streams.get(req.rid)
            kept, reason, error = 0, None, None
            if stream is None or stream.req is not req:
                reason = "gone"  # ended since the launch: what the step sampled for it is dropped
            elif bad:
                reason, error = "error", "the model's logits are not finite numbers (NaN or infinity)"
                spoiled.append(req)
            elif samples:
                kept, reason, error = self._advance(stream, new, logprobs)
            elif complete and req.max_new == 0:
                reason = "length"
            if reason and reason != "gone":
                self._close(stream, reason, error)
            elif kept and req.request.stream:
                self._outbox.append(self._take(stream))
            tokens.append(new[:kept])
            finished.append(reason is not None)
        self.scheduler.commit(batch, tokens, finished, spoiled)

    def _take_prompt_logprobs(self, pieces: list[PromptPiece]) -> None:
        for piece in pieces:
            stream = self.streams.get(piece.req.rid)
            if stream is not None and stream.req is piece.req:
                ids = piece.req.prompt[piece.position:piece.position + len(piece.logprobs)].tolist()
                stream.prompt_logprobs += _logprobs(ids, piece.logprobs, piece.top_ids, piece.top_logprobs)

    @staticmethod
    def _results(flight: Flight) -> Iterator[tuple[list[int], list[Logprob] | None, bool]]:
        """Per sampling row, in order: its tokens, their logprobs, and whether its logits were no numbers."""
        sampled = flight.sampled
        if sampled is not None:
            ids = sampled.tokens.tolist()
            logprobs = None if sampled.logprobs is None else _logprobs(ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
            for i, bad in enumerate(sampled.bad.tolist()):
                yield [ids[i]], logprobs and [logprobs[i]], bad

    @staticmethod
    def _advance(stream: Stream, tokens: list[int], logprobs: list[Logprob] | None) -> tuple[int, str | None, str | None]:
        """Feed a request the tokens of one step, up to the one that ends it: (how many, finish reason, error)."""
        reason, error, kept = None, None, 0
        for token in tokens:
            kept += 1
            try:
                reason = stream.text.push(token)
            except TimeoutError:
                reason, error = "error", "stop_regex took too long to search the output"
            except Exception as fault:
                log.exception("request %s: its text failed", stream.req.rid)
                reason, error = "error", f"the text of the output failed: {fault}"
            if reason:
                break
        stream.unsent.output_ids += tokens[:kept]
        if logprobs is not None and (k := stream.req.params.logprobs) is not None:
            stream.unsent.logprobs = stream.unsent.logprobs or []
            stream.unsent.logprobs += [Logprob(entry.token_id, entry.logprob, entry.top[:k]) for entry in logprobs[:kept]]
        return kept, reason, error

    def _take(self, stream: Stream, final: bool = False) -> Chunk:
        """What can be handed out now."""
        chunk, stream.unsent = stream.unsent, Chunk(rid=stream.unsent.rid)
        chunk.text = stream.text.take(final)
        chunk.cached_tokens = stream.req.cached_tokens or 0
        chunk.prompt_logprobs, stream.prompt_logprobs = stream.prompt_logprobs, None
        return chunk

    def _close(self, stream: Stream, reason: str, error: str | None = None) -> None:
        """The last chunk of a request."""
        chunk = self._take(stream, final=True)
        chunk.finish_reason, chunk.stop_reason, chunk.error = reason, stream.text.stop_reason, error
        self._outbox.append(chunk)
        del self.streams[stream.req.rid]

    # ------------------------------------------------------------------------------------------------------------- housekeeping

    def flush_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while requests run or wait."""
        if self.has_work:
            return False
        self.scheduler.slots.free(self.scheduler.tree.reset())
        return True

    def stats(self) -> dict:
        """Counts for the log line and the info routes. Tokens, requests; rates are the reader's to make."""
        s = self.scheduler
        return {"running": len(s.running), "waiting": len(s.waiting), "kv_capacity": s.slots.capacity,
                "kv_free": s.slots.available, "kv_cached": s.tree.evictable, "kv_locked": s.tree.protected, **vars(s.counters)}

    def check(self) -> None:
        """Prove the books: slots, rows and nodes (`Scheduler.check`), and that the device rows agree. AssertionError says what is wrong."""
        self.scheduler.check()
        assert set(self.streams) <= set(self.scheduler.reqs), "a text stream without a request"
        for req in self.scheduler.running:
            if req.in_flight:
                continue  # its device row is ahead of the host
            row, tree = req.row, self.scheduler.tree
            assert int(self.rows.length[row]) == req.computed_len, f"{req.rid}: device length {int(self.rows.length[row])} != {req.computed_len}"
            path = np.concatenate([tree.slots(req.node), np.array(req.own, np.int32)]) if req.node.end else np.array(req.own, np.int32)
            table = self.rows.table[row, :len(path)].cpu().numpy()
            assert np.array_equal(table[:req.computed_len], path[:req.computed_len]), f"{req.rid}: its table does not lead to its slots"
            known = self.rows.tokens[row, :req.known_len].cpu().numpy()
            assert np.array_equal(known, req.ids()), f"{req.rid}: the device row holds other tokens"


def _available_memory() -> int:
    """Bytes that can be had without swapping, page cache included where the system says how much."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _logprobs(ids: list[int], logprobs: torch.Tensor, top_ids: torch.Tensor | None, top_logprobs: torch.Tensor | None) -> list[Logprob]:
    values = logprobs.tolist()
    tops = [[]] * len(ids) if top_ids is None else [list(zip(i, v)) for i, v in zip(top_ids.tolist(), top_logprobs.tolist())]
    return [Logprob(token, value, top) for token, value, top in zip(ids, values, tops)]


# -------------------------------------------------------------------------------------------------------------------------- LLM

Prompt = str | Sequence[int]
Params = SamplingParams | dict | None


class LLM:
    """The engine as a Python object. Every engine flag is a keyword:

        llm = LLM("demo", dtype="float32")
        llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text

    The engine runs in a thread of its own, so all methods may be called from any thread or event loop, and requests of different calls share
    batches and cache. `shutdown`, or leaving the context, ends it.
    """

    def __init__(self, model: str = "demo", *, dtype: str = "auto", **flags):
        known = {f.name for f in fields(EngineConfig)}
        if unknown := sorted(set(flags) - known):
            raise TypeError(f"LLM does not know {', '.join(unknown)}; its keywords are {', '.join(sorted(known))}")
        self.engine = Engine(EngineConfig(model=str(model), dtype=dtype, **flags))
        self.tokenizer = self.engine.tokenizer
        self._template: ChatTemplate | None = None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # (requests, sink) to start, (requests, None) to abort; None: end
        self._sinks: dict[str, object] = {}                   # request id -> what takes its chunks
        self._crash: BaseException | None = None
        self._closed = False                                  # guarded by the lock: after it nothing enters the inbox
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="nano_sgl engine", daemon=True)
        self._thread.start()

    # -- what a user calls -----------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] = None, *, cache_salt: str | None = None,
                 priority: int = 0, progress: bool | None = None) -> Output | list[Output]:
        """Complete prompts (text, or token ids). One prompt gives one Output, a list a list in the same order; `n` samples of a prompt are
        neighbours in the list, told apart by `index`.

        params: for all prompts, or a list of one each. progress: a bar on stderr (None: for lists, on a terminal).
        RequestError where a request cannot be served; none has been started then.
        """
        single = _is_single(prompts)
        requests = self._requests([prompts] if single else prompts, params, cache_salt, priority, stream=False)
        outputs = self._collect(requests, progress if progress is not None else None if len(requests) > 1 else False)
        return outputs[0] if single and len(outputs) == 1 else outputs

    def chat(self, messages: Sequence, params: Params | Sequence[Params] = None, **options) -> Output | list[Output]:
        """Answer a conversation (a list of {"role", "content"}), or a list of conversations. As `generate` otherwise."""
        single = not messages or not isinstance(messages[0], (list, tuple))
        prompts = [self.chat_ids(conversation) for conversation in ([messages] if single else messages)]
        return self.generate(prompts[0] if single else prompts, params, **options)

    def stream(self, prompt: Prompt | Sequence[dict], params: Params = None, **options) -> Iterator[Output]:
        """One prompt or conversation, piece by piece: each Output holds what is new (text, output_ids, logprobs); the last of each `index`
        has a finish_reason. Closing the iterator aborts the request."""
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        requests = self._requests([self._encode(prompt)], params, stream=True, **options)
        self._submit(requests, inbox.put)
        try:
            yield from self._pieces(requests, inbox.get)
        finally:
            self._forget(requests)

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] = None, **options):
        """`generate` for an event loop; cancelling the task aborts its requests."""
        single = _is_single(prompts)
        requests = self._requests([prompts] if single else prompts, params, stream=False, **options)
        inbox = self._submit_async(requests)
        try:
            chunks = [await self._next(inbox) for _ in requests]
        finally:
            self._forget(requests)
        outputs = self._outputs(requests, chunks)
        return outputs[0] if single and len(outputs) == 1 else outputs

    async def achat(self, messages: Sequence, params: Params | Sequence[Params] = None, **options):
        """`chat` for an event loop."""
        single = not messages or not isinstance(messages[0], (list, tuple))
        prompts = [self.chat_ids(conversation) for conversation in ([messages] if single else messages)]
        return await self.agenerate(prompts[0] if single else prompts, params, **options)

    async def astream(self, prompt: Prompt | Sequence[dict], params: Params = None, **options) -> AsyncIterator[Output]:
        """`stream` for an event loop."""
        requests = self._requests([self._encode(prompt)], params, stream=True, **options)
        inbox, open_requests = self._submit_async(requests), {r.rid: r for r in requests}
        try:
            while open_requests:
                chunk = await self._next(inbox)
                yield _output(open_requests[chunk.rid], chunk)
                if chunk.finish_reason:
                    del open_requests[chunk.rid]
        finally:
            self._forget(requests)

    def chat_ids(self, messages: Sequence[dict]) -> list[int]:
        """The prompt that the model's chat template makes of a conversation."""
        if self._template is None:
            if not self.tokenizer.chat_template:
                raise RequestError("this model has no chat template; use generate with a prompt of your own")
            self._template = ChatTemplate(Codec(self.tokenizer.backend_tokenizer.to_str()), self.tokenizer.chat_template,
                                          self.tokenizer.special_tokens_map)
        if not all(isinstance(m, dict) for m in messages):
            raise RequestError(f'messages are a list of {{"role": ..., "content": ...}}, got {show(messages)}', "messages")
        return self._template.encode(read_messages([convert(m, Message) for m in messages]))

    def shutdown(self) -> None:
        """End the engine's thread; requests still running are lost."""
        with self._lock:
            self._closed = True
        self._inbox.put(None)
        self._thread.join()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()

    # -- requests out, chunks in ------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt | Sequence[dict]) -> Prompt:
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        return self.chat_ids(prompt) if is_chat else prompt

    def _ids(self, prompt: Prompt) -> list[int]:
        try:
            if isinstance(prompt, bytes):
                raise TypeError("bytes are neither")
            return self.tokenizer.encode(prompt) if isinstance(prompt, str) else [operator.index(i) for i in prompt]
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"a prompt is text (valid Unicode) or a list of token ids, got {show(prompt)}", "prompt") from error

    def _requests(self, prompts: Sequence[Prompt], params, cache_salt: str | None = None, priority: int = 0, *, stream: bool) -> list[Request]:
        """The requests of a call, all of them valid."""
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts were given with {len(each)} params, expected one for all or one each", "params")
        requests = []
        for prompt, p in zip(prompts, each):
            p = SamplingParams() if p is None else SamplingParams.from_dict(p) if isinstance(p, dict) else p
            ids = self._ids(prompt)
            for index in range(max(p.n, 1)):
                requests.append(Request(rid=secrets.token_hex(8), prompt_ids=ids, params=p, index=index, stream=stream, priority=priority,
                                        namespace=cache_salt or ""))
                if index == 0:
                    self.engine.validate(requests[-1])
        return requests

    def _submit(self, requests: list[Request], sink) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine has ended") from self._crash
            self._inbox.put((requests, sink))

    def _submit_async(self, requests: list[Request]) -> asyncio.Queue:
        inbox, loop = asyncio.Queue(), asyncio.get_running_loop()
        self._submit(requests, lambda chunk: loop.call_soon_threadsafe(inbox.put_nowait, chunk))
        return inbox

    def _forget(self, requests: list[Request]) -> None:
        """Abort what is left of a call that nobody waits for any more."""
        self._inbox.put((requests, None))

    def _collect(self, requests: list[Request], progress: bool | None) -> list[Output]:
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._submit(requests, inbox.put)
        chunks, tokens, start = [], 0, time.monotonic()
        try:
            with tqdm(total=len(requests), desc="requests", disable=None if progress is None else not progress) as bar:
                for _ in requests:
                    chunks.append(_checked(inbox.get()))
                    tokens += len(chunks[-1].output_ids)
                    bar.set_postfix_str(f"{tokens / (time.monotonic() - start):.0f} tok/s", refresh=False)
                    bar.update()
        finally:
            if len(chunks) < len(requests):
                self._forget(requests)
        return self._outputs(requests, chunks)

    @staticmethod
    def _outputs(requests: list[Request], chunks: list[Chunk]) -> list[Output]:
        by_id = {chunk.rid: chunk for chunk in chunks}
        return [_output(request, by_id[request.rid]) for request in requests]

    @staticmethod
    def _pieces(requests: list[Request], get) -> Iterator[Output]:
        open_requests = {r.rid: r for r in requests}
        while open_requests:
            chunk = _checked(get())
            yield _output(open_requests[chunk.rid], chunk)
            if chunk.finish_reason:
                del open_requests[chunk.rid]

    @staticmethod
    async def _next(inbox: asyncio.Queue) -> Chunk:
        return _checked(await inbox.get())

    # -- the engine's thread -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                while not self.engine.has_work or not self._inbox.empty():
                    asked = self._inbox.get()
                    if asked is None:
                        return
                    self._take_in(*asked)
                for chunk in self.engine.step():
                    self._hand_out(chunk)
        except BaseException as error:
            self._crash = error
            log.exception("the engine has ended")
        finally:
            with self._lock:
                self._closed = True
            while not self._inbox.empty():
                if (asked := self._inbox.get()) is not None and asked[1] is not None:
                    self._sinks.update((request.rid, asked[1]) for request in asked[0])
            for sink in list(self._sinks.values()):
                self._tell(sink, RuntimeError("the engine was shut down") if self._crash is None else self._crash)

    def _take_in(self, requests: list[Request], sink) -> None:
        """Start requests for a sink; abort them where it is None."""
        for request in requests:
            if sink is None:
                if self._sinks.pop(request.rid, None) is not None:
                    self.engine.abort(request.rid)
            else:
                self._sinks[request.rid] = sink
                self.engine.add(request)

    def _hand_out(self, chunk: Chunk) -> None:
        sink = self._sinks.pop(chunk.rid, None) if chunk.finish_reason else self._sinks.get(chunk.rid)
        if sink is not None and not self._tell(sink, chunk):
            self._sinks.pop(chunk.rid, None)
            self.engine.abort(chunk.rid)

    @staticmethod
    def _tell(sink, message: Chunk | BaseException) -> bool:
        """False where nobody listens any more (an event loop that was closed)."""
        try:
            sink(message)
            return True
        except RuntimeError:
            return False


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt (text or ids), not a list of prompts."""
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__"):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], numbers.Number)


def _checked(chunk: Chunk | BaseException) -> Chunk:
    if isinstance(chunk, BaseException):
        raise RuntimeError("the engine has ended") from chunk
    return chunk


def _output(request: Request, chunk: Chunk) -> Output:
    return Output(text=chunk.text, output_ids=chunk.output_ids, prompt_ids=request.prompt_ids, finish_reason=chunk.finish_reason,
                  stop_reason=chunk.stop_reason, cached_tokens=chunk.cached_tokens, logprobs=chunk.logprobs,
                  prompt_logprobs=chunk.prompt_logprobs, index=request.index, error=chunk.error)


def _demo() -> None:
    with LLM("demo", max_total_tokens=4096) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        for prompt in ("1, 2, 3, 4, 5,", "1, 2, 3, 4, 5, 6, 7,"):
            output = llm.generate(prompt, params)
            print(f"{prompt!r} -> {output.text!r}  ({output.cached_tokens} of {len(output.prompt_ids)} prompt tokens came from the tree)")
        print(llm.engine.scheduler.tree.render(llm.tokenizer.decode))


if __name__ == "__main__":
    _demo()
