"""Engines for tests: made of a tiny random checkpoint, driven step by step, audited after each."""

from dataclasses import dataclass, field

import tiny
from nano_sgl.engine import Engine, EngineConfig
from nano_sgl.protocol import Chunk, Logprob, Request, SamplingParams


def tiny_path(folder, **config):
    """A llama of two layers whose greedy texts do not repeat, with a byte-level tokenizer."""
    return tiny.add_tokenizer(tiny.checkpoint(folder, "llama", **config))


def make(path, **flags) -> Engine:
    return Engine(EngineConfig(model=str(path), **({"max_total_tokens": 2048, "random_seed": 0} | flags)))


def plain(path, **flags) -> Engine:
    """What every other engine is compared with: no cache, one request at a time, prompts in one piece."""
    return make(path, disable_radix_cache=True, max_running_requests=1, chunked_prefill_size=4096, **flags)


@dataclass
class Answer:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    reason: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] | None = None
    cached: int = 0
    error: str | None = None
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
        self.reason, self.cached, self.error = chunk.finish_reason, chunk.cached_tokens, chunk.error


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
