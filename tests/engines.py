"""Engines for tests: made of a tiny random checkpoint, driven step by step, audited after each."""

import collections
import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

import tiny
from nano_sgl.engine import Engine, EngineConfig, Worker
from nano_sgl.protocol import Chunk, Logprob, Request, SamplingParams
from nano_sgl.spec import DraftTree


def tiny_path(folder, **config):
    """A llama of two layers whose greedy texts do not repeat, with a byte-level tokenizer."""
    return tiny.add_tokenizer(tiny.checkpoint(folder, "llama", **config))


def make(path, **flags) -> Engine:
    return Engine(EngineConfig(model=str(path), **({"max_total_tokens": 2048, "random_seed": 0, "disable_overlap_schedule": True} | flags)))


def plain(path, **flags) -> Engine:
    """What every other engine is compared with: no cache, one request at a time, prompts in one piece, every token sampled."""
    return make(path, **({"disable_radix_cache": True, "max_running_requests": 1, "chunked_prefill_size": 4096, "jump_forward": "off"} | flags))


@dataclass
class Answer:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    reason: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] | None = None
    cached: int = 0
    error: str | None = None
    status: int = 500
    pieces: list[str] = field(default_factory=list)

    def take(self, chunk: Chunk) -> None:
        assert self.reason is None, "a chunk after the last one"
        self.text += chunk.text
        self.pieces.append(chunk.text)
        self.ids += chunk.output_ids
        self.logprobs += chunk.logprobs or []
        if chunk.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = chunk.prompt_logprobs
        self.reason, self.cached, self.error, self.status = chunk.finish_reason, chunk.cached_tokens, chunk.error, chunk.status


def request(rid, ids, params: SamplingParams | None = None, **fields) -> Request:
    return Request(rid=str(rid), prompt_ids=list(ids), params=params or SamplingParams(temperature=0), **fields)


def run(engine: Engine, requests, each_step=lambda step: None, limit=5000) -> dict[str, Answer]:
    """Add all, step until done with an audit after every step. `each_step(n)` runs before step n."""
    answers = {r.rid: Answer() for r in requests}
    for r in requests:
        engine.add(r)
    for n in range(limit):
        each_step(n)
        if not engine.has_work:
            break
        for chunk in engine.step():
            answers.setdefault(chunk.rid, Answer()).take(chunk)
        engine.check()
    else:
        raise AssertionError(f"not done after {limit} steps")
    pool = engine.scheduler
    assert pool.slots.available + pool.tree.evictable == pool.slots.capacity and pool.tree.protected == 0
    assert not engine.streams
    return answers


# ----------------------------------------------------------------------------------------------------------------- workloads, references

class Reference:
    """Answers of the plain engine, one request at a time; each kind of request is asked once."""

    def __init__(self, path):
        self.engine, self.known = plain(path), {}

    def __call__(self, r: Request) -> Answer:
        key = (tuple(r.prompt_ids), repr(r.params), r.index)
        if key not in self.known:
            self.known[key] = run(self.engine, [request(r.rid, r.prompt_ids, r.params, index=r.index)])[r.rid]
        return self.known[key]


def state_after(grammar, tokens, budget=None):
    """(grammar, state) after an output whose model may think for `budget` tokens: then it has to close its thoughts."""
    return states_of(grammar, tokens, budget)[-1]


def states_of(grammar, tokens, budget=None) -> list[tuple]:
    """`state_after` each beginning of an output, the empty one first."""
    state, states = grammar.start, []
    for count in range(len(tokens) + 1):
        if budget is not None and count >= budget and grammar.thinks(state):
            grammar = grammar.closing
            state = grammar.start
        states.append((grammar, state))
        if count < len(tokens):
            state = grammar.step(state, tokens[count])
    return states


def params(**kw) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 24, "ignore_eos": True} | kw))


def prompt(n, seed) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


MIX = [dict(), dict(temperature=0.8, seed=3), dict(temperature=1.5, top_k=20, seed=4), dict(temperature=1, top_p=0.8, seed=5),
       dict(temperature=1, min_p=0.1, seed=6), dict(frequency_penalty=1.5, presence_penalty=0.5),
       dict(repetition_penalty=1.4, temperature=0.7, seed=7),
       dict(logit_bias={65: 4.0, 66: -100}, temperature=0.9, seed=8), dict(min_tokens=10, ignore_eos=False, temperature=1.3, seed=9),
       dict(max_tokens=1), dict(logprobs=3), dict(prompt_logprobs=2, logprobs=0, temperature=1, seed=10)]
STOPS = [dict(stop=[chr(c) for c in range(97, 123)]), dict(stop_regex="[A-H]", temperature=1, seed=11),
         dict(stop_token_ids=list(range(0, 250, 9)), ignore_eos=False),
         dict(stop=[chr(c) for c in range(48, 74)], temperature=1, seed=12, min_tokens=4)]


def workload(seed, count=28, mixes=MIX, lengths=(1, 8, 30)) -> list[Request]:
    rng = random.Random(seed)
    heads = [prompt(rng.choice([5, 40, 90]), 100 + i) for i in range(4)] + [[]]
    requests = []
    for i in range(count):
        ids = [*rng.choice(heads), *prompt(rng.randrange(1, 40), rng.randrange(12))]
        mix = dict(max_tokens=rng.choice(lengths)) | rng.choice(mixes)
        mix["min_tokens"] = min(mix.get("min_tokens", 0), mix["max_tokens"])
        scoring = dict(max_tokens=0, prompt_logprobs=rng.choice([None, 0]))
        requests.append(request(f"q{i}", ids, params(**(mix if rng.random() < 0.8 else scoring))))
    return requests


def close(a, b) -> None:
    """Two lists of logprobs are the same to rounding."""
    assert [x.token_id for x in a] == [x.token_id for x in b]
    for x, y in zip(a, b):
        assert (x.logprob is None) == (y.logprob is None) and (x.logprob is None or abs(x.logprob - y.logprob) < 1e-4)
        assert [t for t, _ in x.top] == [t for t, _ in y.top]


def same(got: Answer, expected: Answer) -> None:
    """Two answers are the same: tokens, text, reason, logprobs."""
    assert (got.ids, got.text, got.reason, got.error) == (expected.ids, expected.text, expected.reason, expected.error)
    close(got.logprobs, expected.logprobs)
    assert (got.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    close(got.prompt_logprobs or [], expected.prompt_logprobs or [])


# ----------------------------------------------------------------------------------------------------------------- a device of its own

class LateWorker(Worker):
    """The slowest device there can be: a job runs when its result is asked for. What the host changed meanwhile must make no difference."""

    def __init__(self):
        super().__init__(threaded=False)
        self.queue = collections.deque()

    def submit(self, job) -> Future:
        future = LateFuture()
        future.worker = self
        self.queue.append((job, future))
        return future

    def run_upto(self, future: Future) -> None:
        while not future.done():
            self._run(*self.queue.popleft())


class LateFuture(Future):
    def result(self, timeout=None):
        self.worker.run_upto(self)
        return super().result()

    def exception(self, timeout=None):
        self.worker.run_upto(self)
        return super().exception()


class DeviceTensor(torch.Tensor):
    """A tensor that raises where it is touched by anyone but a job of its device's worker, or an audit."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for tensor in args:
            if type(tensor) is DeviceTensor:
                assert tensor.fence.inside == threading.get_ident(), f"{tensor.label} was touched outside the order of the stream ({func.__name__})"
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Fence:
    """Puts an engine's device rows, sampling rows and KV behind its worker: whoever else reads or writes them fails the test."""

    def __init__(self, engine: Engine):
        self.inside = None
        for label, owner, name in (("tokens", engine.rows, "tokens"), ("table", engine.rows, "table"), ("length", engine.rows, "length"),
                                   ("sampling values", engine.sampler, "values"), ("seeds", engine.sampler, "seeds"),
                                   ("grammar states", engine.constraints, "states")):
            setattr(owner, name, self._tensor(getattr(owner, name), label))
        engine.kv.k, engine.kv.v = ([self._tensor(t, "KV") for t in tensors] for tensors in (engine.kv.k, engine.kv.v))
        if engine.speculation is not None:
            ready = engine.speculation.ready
            engine.speculation.ready = DraftTree(*(self._tensor(part, "guesses") for part in (ready.tokens, ready.parents, ready.sizes)))
        submit, check = engine.worker.submit, engine.check
        engine.worker.submit = lambda job: submit(lambda: self._enter(job))
        engine.check = lambda: (engine.synchronize(), self._enter(check))

    def _tensor(self, tensor: torch.Tensor, label: str) -> DeviceTensor:
        made = tensor.as_subclass(DeviceTensor)
        made.fence, made.label = self, label
        return made

    def _enter(self, work):
        assert self.inside is None, "two at once"
        self.inside = threading.get_ident()
        try:
            return work()
        finally:
            self.inside = None


def overlapped(path, device="thread", depth=1, **flags) -> Engine:
    """An engine with `depth` steps in flight on a fenced device: "thread" (the worker's), "late" (see LateWorker)."""
    engine = make(path, disable_overlap_schedule=False, **flags)
    if device == "late":
        engine.worker.close()
        engine.worker = LateWorker()
    engine.depth = depth
    Fence(engine)
    return engine
