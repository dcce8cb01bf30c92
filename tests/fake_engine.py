"""An engine without a model, for tests of the server alone: it answers "abcdef..." and does what the prompt tells it to.

    python fake_engine.py serve --port 0         the HTTP process, with a child of its own kind
    python fake_engine.py child DIRECTORY        the engine process

Words in a prompt: CRASH (the process dies at the third token), FAIL (the request fails there), RAISE (the step raises), REJECT (`add` refuses),
BROKEN (`add` raises something else), SLOW (20 ms a token), MUTE (never says anything), BAD (`check` finds the books wrong), UNFIT (the
third token's text does not fit the wire), LATE (a time-out ends the request at the third token), WAIT (it waits in the queue while any other
request is there).

In the environment, in seconds: FAKE_HEALTH_TIMEOUT, what /health_generate waits, and FAKE_RESTART_DELAY, before the first restart.
"""

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from nano_sgl import process, server
from nano_sgl.chat import CHATML, byte_tokenizer
from nano_sgl.config import ServerConfig, parse
from nano_sgl.protocol import Chunk, Logprob, Request, RequestError

CONTEXT = 512


@dataclass(frozen=True)
class FakeConfig:
    model: str = "fake"


class Script:
    """One request: the chunks it will get, one a step."""

    def __init__(self, engine: "FakeEngine", request: Request):
        self.request, self.prompt = request, engine.codec.decode(request.prompt_ids, skip_special_tokens=False)
        p = request.params
        room = CONTEXT - len(request.prompt_ids)
        count = room if p.max_tokens is None else min(p.max_tokens, room)
        text = "".join(chr(ord("a") + (i + request.index) % 26) for i in range(count))
        stops = [(text.find(s), s) for s in p.stop_strings() if s in text]
        self.reason, self.matched = "length", None
        if stops:
            at, self.matched = min(stops)
            self.reason, count = "stop", at + len(self.matched)
        ids = engine.codec.encode(text).ids[:count]
        cut = at if stops else count
        self.pieces = [(i, text[n] if n < cut else "") for n, i in enumerate(ids)]
        self.seen = self.sent = 0
        self.cached = len(request.prompt_ids) - 1 if (request.namespace, tuple(request.prompt_ids)) in engine.seen else 0
        engine.seen.add((request.namespace, tuple(request.prompt_ids)))

    def next(self) -> Chunk | None:
        """One more token; a request that is not streamed gets one chunk, at its end."""
        self.seen = min(self.seen + 1, len(self.pieces))
        if not self.request.stream and self.seen < len(self.pieces):
            return None
        p, first, todo = self.request.params, self.sent == 0, self.pieces[self.sent:self.seen]
        self.sent = self.seen
        chunk = Chunk(rid=self.request.rid, text="".join(t for _, t in todo), output_ids=[i for i, _ in todo], cached_tokens=self.cached)
        if p.logprobs is not None:
            chunk.logprobs = [Logprob(i, -0.5, [(i, -0.5), (33, -1.5), (34, -2.5)][:p.logprobs]) for i, _ in todo]
        if p.prompt_logprobs is not None and first:
            chunk.prompt_logprobs = [Logprob(i, None if n == 0 else -1.0, [] if n == 0 else [(i, -1.0), (35, -3.0)][:p.prompt_logprobs])
                                     for n, i in enumerate(self.request.prompt_ids)][p.logprob_start_len:]
        if self.seen == len(self.pieces):
            chunk.finish_reason, chunk.stop_reason = self.reason, self.matched
        return chunk


class FakeEngine:
    def __init__(self):
        self.config, self.path = FakeConfig(), Path("/nowhere")
        self.vocab_size, self.context_len, self.end_ids = 258, CONTEXT, [257]
        self.generation_defaults = {"temperature": 0.5, "top_k": 20, "min_p": 7.0}
        self.codec = byte_tokenizer()
        self.tokenizer = SimpleNamespace(backend_tokenizer=self.codec, chat_template=CHATML, special_tokens_map={"eos_token": "<|im_end|>"})
        self.scripts: dict[str, Script] = {}
        self.seen: set = set()
        self.broken = False
        self.counts = {"prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "computed_tokens": 0, "finished": 0, "aborted": 0,
                       "last_params": None}
        self.outbox: list[Chunk] = []

    def add(self, request: Request) -> None:
        script = Script(self, request)
        if "REJECT" in script.prompt:
            raise RequestError("the fake engine has no room for this prompt", "prompt")
        if "BROKEN" in script.prompt:
            raise KeyError("a bug in add")
        self.scripts[request.rid] = script
        self.counts["last_params"] = {"temperature": request.params.temperature, "top_k": request.params.top_k, "max_tokens": request.params.max_tokens,
                                      "priority": request.priority, "routing_key": request.routing_key, "namespace": request.namespace}
        self.counts["last_hold"] = {"rid": request.rid, "children": request.children, "parent": request.parent}

    def abort(self, rid: str) -> bool:
        script = self.scripts.pop(rid, None)
        self.counts["released"] = self.counts.get("released", []) + [rid] * (script is None)
        if script is not None:
            self.counts["aborted"] += 1
            self.counts["finished"] += 1
            self.outbox.append(Chunk(rid=rid, finish_reason="abort"))
        return script is not None

    @property
    def has_work(self) -> bool:
        return bool(self.scripts or self.outbox)

    @property
    def makes_tokens(self) -> bool:
        return bool(self.scripts)

    def waiting(self) -> list[str]:
        return [rid for rid, s in self.scripts.items() if "WAIT" in s.prompt and len(self.scripts) > 1]

    def step(self) -> list[Chunk]:
        chunks, self.outbox, waiting = self.outbox, [], self.waiting()
        time.sleep(0.02 if any("SLOW" in s.prompt or "MUTE" in s.prompt for s in self.scripts.values()) else 0.001)
        for rid, script in list(self.scripts.items()):
            if rid in waiting:
                continue
            if script.seen == 0:
                self.counts["prompt_tokens"] += len(script.request.prompt_ids)
                self.counts["computed_tokens"] += len(script.request.prompt_ids)
            if script.seen == 3 and "CRASH" in script.prompt:
                os._exit(3)
            if script.seen == 3 and "RAISE" in script.prompt:
                self.broken = "BAD" in script.prompt
                raise RuntimeError("a bug in step")
            if script.seen == 3 and "FAIL" in script.prompt:
                chunks.append(Chunk(rid=rid, finish_reason="error", error="the fake engine failed on this request"))
            elif script.seen == 3 and "LATE" in script.prompt:
                chunks.append(Chunk(rid=rid, text="d", finish_reason="abort", error="the request ran longer than it may", status=504))
            elif "MUTE" not in script.prompt:
                seen, chunk = script.seen, script.next()
                self.counts["output_tokens"] += script.seen - seen
                if chunk is None:
                    continue
                chunks.append(chunk)
                if script.seen == 3 and "UNFIT" in script.prompt:
                    chunk.text = "\ud800"
        for chunk in chunks:
            if chunk.finish_reason and self.scripts.pop(chunk.rid, None) is not None:
                self.counts["finished"] += 1
        return chunks

    def in_force(self) -> dict:
        return {"model": "fake", "context_length": CONTEXT}

    def flush_cache(self) -> bool:
        if not self.scripts:
            self.seen.clear()
        return not self.scripts

    def stats(self) -> dict:
        waiting = len(self.waiting())
        return {"running": len(self.scripts) - waiting, "waiting": waiting, "kv_capacity": 1000, "kv_free": 900, "kv_cached": 50, **self.counts}

    def check(self) -> None:
        assert not self.broken, "the books are wrong"


def main() -> int:
    if sys.argv[1] == "child":
        [config] = parse(sys.argv[2:-1], ServerConfig)
        server.set_up_logging("info")
        return process.engine_main(sys.argv[-1], FakeEngine, config.max_queued_requests)
    [config] = parse(sys.argv[2:], ServerConfig)
    server.set_up_logging(config.log_level)
    server.HEALTH_TIMEOUT_S = float(os.environ.get("FAKE_HEALTH_TIMEOUT", server.HEALTH_TIMEOUT_S))
    process.RESTART_DELAY_S = float(os.environ.get("FAKE_RESTART_DELAY", 0.02))
    command = [sys.executable, __file__, "child", *sys.argv[2:]]
    return asyncio.run(server.serve(config, server.listen(config.host, config.port), command))


if __name__ == "__main__":
    sys.exit(main())
