"""LLM: the engine as a Python object, in a thread of its own, for callers in any thread and any event loop.

      generate, stream           agenerate, astream
        | queue.SimpleQueue        | call_soon_threadsafe into an asyncio.Queue
        +---------- a *sink* takes the chunks of one call -----------+
                                                                     |
      Loop.submit --> inbox --> [engine's thread: _take_in, Engine.step, _hand_out] --> sink

The engine wants to be called from one thread, and a batch only forms where calls meet: so there is one loop, and what users call puts requests
into its inbox and waits for chunks. A call is a list of requests (n samples of every prompt) with one sink; a request ends with a chunk that
has a finish_reason, and a call when all its requests have ended. Who stops waiting (a closed iterator, a cancelled task) sends its requests
once more, without a sink: abort.

Invariant: each request of a call that was submitted gets exactly one last chunk, or the call gets the exception that ended the engine. After
the end nothing enters the inbox, and what had entered is told. The thread knows the `Loop` but not the `LLM`: an LLM that is dropped, or still
there when the program ends, ends it as `shutdown` does, between two steps.

Cost: two queue operations a chunk. Stops holding: one process, whose Python threads take turns; a server puts the engine into another.
"""

from __future__ import annotations

import asyncio
import logging
import numbers
import operator
import queue
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

from tqdm import tqdm

from .chat import PLAIN_ROLES, ChatTemplate, Codec, Message, read_messages
from .config import EngineConfig
from .engine import SHUTDOWN_S, Engine
from .protocol import Chunk, Output, Request, RequestError, SamplingParams, Score, convert, show
from .radix import draw
from .scoring import read_scores, read_texts, score_requests

log = logging.getLogger("nano_sgl")

POLL_S = 0.002      # an event loop looks so often whether its grammars are there

Prompt = str | Sequence[int]
Params = SamplingParams | dict | None


class LLM:
    """The engine as a Python object. Every engine flag is a keyword:

        llm = LLM("demo", dtype="float32")
        llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text
        llm.generate("The capital of France in JSON:", SamplingParams(json_schema=City)).text      # City: a pydantic model, or a JSON schema

    The engine runs in a thread of its own, so all methods may be called from any thread or event loop, and requests of different calls share
    batches and cache. `shutdown`, or leaving the context, or dropping the object, ends it.
    """

    def __init__(self, model: str = "demo", *, dtype: str = "auto", **flags):
        known = {f.name for f in fields(EngineConfig)}
        if unknown := sorted(set(flags) - known):
            raise TypeError(f"LLM does not know {', '.join(unknown)}; its keywords are {', '.join(sorted(known))}")
        self.engine = Engine(EngineConfig(model=str(model), dtype=dtype, **flags))
        self.tokenizer = self.engine.tokenizer
        self._template: ChatTemplate | None = None
        self._loop = Loop(self.engine)
        self._end = weakref.finalize(self, self._loop.end)  # called, collected or at exit: once

    # -- what a user calls -----------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] = None, *, cache_salt: str | None = None,
                 priority: int = 0, routing_key: str | None = None, parent: str = "", rid: str = "",
                 progress: bool | None = None) -> Output | list[Output]:
        """Complete prompts (text, or token ids). One prompt gives one Output, a list a list in the same order; `n` samples of a prompt are
        neighbours in the list, told apart by `index`.

        params: for all prompts, or a list of one each. parent: what `hold` returned, where this call is one of those it waits for. rid: a name by
        which another thread may `abort` the call. progress: a bar on stderr (None: for lists, on a terminal).
        RequestError where a request cannot be served; none has been started then.
        """
        single = _is_single(prompts)
        requests = self._requests([prompts] if single else prompts, params, cache_salt, priority, routing_key, parent, rid, stream=False)
        _grammars = self._compile(requests)  # held while they may be needed
        bar = progress if progress is not None else None if len(requests) > 1 else False
        outputs = self._outputs(requests, self._chunks(requests, bar))
        return outputs[0] if single and len(outputs) == 1 else outputs

    def chat(self, messages: Sequence, params: Params | Sequence[Params] = None, **options) -> Output | list[Output]:
        """Answer a conversation (a list of {"role", "content"}), or a list of conversations. As `generate` otherwise."""
        single = not messages or not isinstance(messages[0], (list, tuple))
        prompts = [self.chat_ids(conversation) for conversation in ([messages] if single else messages)]
        return self.generate(prompts[0] if single else prompts, params, **options)

    def stream(self, prompt: Prompt | Sequence[dict], params: Params = None, **options) -> Iterator[Output]:
        """One prompt or conversation, piece by piece: each Output holds what is new (text, output_ids, logprobs); the last of each `index`
        has a finish_reason. Closing the iterator aborts the request. options: as those of `generate`."""
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        requests = self._requests([self._encode(prompt)], params, stream=True, **options)
        _grammars = self._compile(requests)
        self._loop.submit(requests, inbox.put)
        try:
            yield from self._pieces(requests, inbox.get)
        finally:
            self._loop.forget(requests)

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] = None, **options):
        """`generate` for an event loop; cancelling the task aborts its requests."""
        single = _is_single(prompts)
        requests = self._requests([prompts] if single else prompts, params, stream=False, **options)
        _grammars = await self._compile_async(requests)
        outputs = self._outputs(requests, await self._chunks_async(requests))
        return outputs[0] if single and len(outputs) == 1 else outputs

    async def achat(self, messages: Sequence, params: Params | Sequence[Params] = None, **options):
        """`chat` for an event loop."""
        single = not messages or not isinstance(messages[0], (list, tuple))
        prompts = [self.chat_ids(conversation) for conversation in ([messages] if single else messages)]
        return await self.agenerate(prompts[0] if single else prompts, params, **options)

    async def astream(self, prompt: Prompt | Sequence[dict], params: Params = None, **options) -> AsyncIterator[Output]:
        """`stream` for an event loop."""
        requests = self._requests([self._encode(prompt)], params, stream=True, **options)
        _grammars = await self._compile_async(requests)
        inbox, open_requests = self._submit_async(requests), {r.rid: r for r in requests}
        try:
            while open_requests:
                chunk = await self._next(inbox)
                yield _output(open_requests[chunk.rid], chunk)
                if chunk.finish_reason:
                    del open_requests[chunk.rid]
        finally:
            self._loop.forget(requests)

    def hold(self, prefix: Prompt, children: int, *, parent: str = "", cache_salt: str | None = None, priority: int = 0) -> str:
        """Have a prefix computed, without waiting for it, and kept in memory until so many calls have come that name what this returns as their
        `parent`: for a program that is about to fork. It is kept for holds.HOLD_S at most, and while memory is not short.

        Of a text the last token is left out: with what follows it may be another one.
        """
        ids = self._ids(prefix)
        if isinstance(prefix, str) and len(ids) > 1:
            ids = ids[:-1]
        request = Request(rid=secrets.token_hex(8), prompt_ids=ids, params=SamplingParams(max_tokens=0), stream=False, priority=priority,
                          namespace=cache_salt or "", children=children, parent=parent)
        self.engine.validate(request)
        if not children:
            raise RequestError("children must be 1 or more: a hold is for requests to come", "children")
        self._loop.submit([request], lambda chunk: None)
        return request.rid

    def release(self, hold: str) -> None:
        """No more calls will name this hold as their parent. One that is over already, or that nobody knows, is none."""
        self._loop.release(hold)

    def score(self, prefix: str, choices: Sequence[str], *, unconditional: bool = False, parent: str = "", cache_salt: str | None = None,
              priority: int = 0) -> list[Score]:
        """The logprobs of the tokens that each choice adds to a prefix (scoring.py), all from the same position on. unconditional: also of the same
        tokens without the prefix. RequestError where a choice adds none."""
        asked = self._scoring(prefix, choices, unconditional, parent, cache_salt, priority)
        return read_scores(choices, asked, self._chunks(asked, progress=False))

    async def ascore(self, prefix: str, choices: Sequence[str], *, unconditional: bool = False, parent: str = "", cache_salt: str | None = None,
                     priority: int = 0) -> list[Score]:
        """`score` for an event loop."""
        asked = self._scoring(prefix, choices, unconditional, parent, cache_salt, priority)
        return read_scores(choices, asked, await self._chunks_async(asked))

    def chat_roles(self) -> dict[str, tuple[str, str] | str]:
        """What the chat template writes around a message of each role: `ChatTemplate.roles`; PLAIN_ROLES where there is no template."""
        try:
            return self._chat_template().roles()
        except (RequestError, ValueError):
            return PLAIN_ROLES

    def abort(self, rid: str) -> None:
        """End a call that was given this name: whoever waits for it gets what there is, with the finish_reason "abort"."""
        self._loop.ask(lambda engine: [engine.abort(name) for name in [*engine.streams, *engine.constraints.waiting]
                                       if name.rpartition("-")[0] == rid])

    def flush_cache(self) -> bool:
        """Empty the cache; False, and nothing done, while requests run or wait."""
        return self._loop.ask(Engine.flush_cache)

    def get_server_info(self) -> dict[str, Any]:
        """What a server's /get_server_info says of its engine: the configuration, and `stats`, which counts."""
        return self._loop.ask(lambda engine: {**engine.in_force(), "stats": engine.stats()})

    def chat_ids(self, messages: Sequence[dict]) -> list[int]:
        """The prompt that the model's chat template makes of a conversation."""
        template = self._chat_template()
        if not all(isinstance(m, dict) for m in messages):
            raise RequestError(f'messages are a list of {{"role": ..., "content": ...}}, got {show(messages)}', "messages")
        return template.encode(read_messages([convert(m, Message) for m in messages]))

    def shutdown(self) -> None:
        """End the engine's thread; requests still running are lost."""
        self._end()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()

    # -- requests out, chunks in ------------------------------------------------------------------------------------------------------

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            if not self.tokenizer.chat_template:
                raise RequestError("this model has no chat template; use generate with a prompt of your own")
            self._template = ChatTemplate(Codec(self.tokenizer.backend_tokenizer.to_str()), self.tokenizer.chat_template,
                                          self.tokenizer.special_tokens_map)
        return self._template

    def _scoring(self, prefix: str, choices: Sequence[str], unconditional: bool, parent: str, cache_salt: str | None,
                 priority: int) -> list[Request]:
        asked = score_requests(read_texts(self.tokenizer.encode, prefix, choices, unconditional), secrets.token_hex(8), parent,
                         namespace=cache_salt or "", priority=priority)
        for request in asked:
            self.engine.validate(request)
        return asked

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

    def _requests(self, prompts: Sequence[Prompt], params, cache_salt: str | None = None, priority: int = 0, routing_key: str | None = None,
                  parent: str = "", rid: str = "", *, stream: bool) -> list[Request]:
        """The requests of a call, all of them valid; with a `rid`, they are <rid>-0, <rid>-1, ..."""
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts were given with {len(each)} params, expected one for all or one each", "params")
        requests = []
        for prompt, p in zip(prompts, each):
            p = SamplingParams() if p is None else SamplingParams.from_dict(p) if isinstance(p, dict) else p
            ids = self._ids(prompt)
            for index in range(max(p.n, 1)):
                name = f"{rid}-{len(requests)}" if rid else secrets.token_hex(8)
                requests.append(Request(rid=name, prompt_ids=ids, params=p, index=index, stream=stream, priority=priority,
                                        namespace=cache_salt or "", routing_key=routing_key, parent="" if requests else parent))
                if index == 0:
                    self.engine.validate(requests[-1])
        return requests

    def _grammars(self, requests: list[Request]) -> list[tuple[Request, Future]]:
        """Have the grammars of a call compiled, all at once. What holds them keeps them for `add`, whatever the cache does."""
        return [(request, future) for request in requests if request.index == 0 and (future := self.engine.compile(request)) is not None]

    def _compile(self, requests: list[Request]) -> list[tuple[Request, Future]]:
        """Wait for the grammars of a call, so that one which is refused is refused before anything has started; see `_grammars`."""
        grammars = self._grammars(requests)
        try:
            self._check(grammars, self.engine.grammar_patience)
        finally:
            self.engine.abandon(future for _, future in grammars)
        return grammars

    async def _compile_async(self, requests: list[Request]) -> list[tuple[Request, Future]]:
        grammars, end = self._grammars(requests), time.monotonic() + self.engine.grammar_patience
        try:
            while not all(future.done() for _, future in grammars) and time.monotonic() < end:
                await asyncio.sleep(POLL_S)
            self._check(grammars, 0.0)
        finally:
            self.engine.abandon(future for _, future in grammars)
        return grammars

    def _check(self, grammars: list[tuple[Request, Future]], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        for request, future in grammars:
            if (error := self.engine.refused(request, future, max(0.0, end - time.monotonic()))) is not None:
                raise error

    def _submit_async(self, requests: list[Request]) -> asyncio.Queue:
        inbox, loop = asyncio.Queue(), asyncio.get_running_loop()
        self._loop.submit(requests, lambda chunk: loop.call_soon_threadsafe(inbox.put_nowait, chunk))
        return inbox

    async def _chunks_async(self, requests: list[Request]) -> dict[str, Chunk]:
        """The one chunk of each request, by its id."""
        inbox = self._submit_async(requests)
        try:
            return {chunk.rid: chunk for chunk in [await self._next(inbox) for _ in requests]}
        finally:
            self._loop.forget(requests)

    def _chunks(self, requests: list[Request], progress: bool | None) -> dict[str, Chunk]:
        """The same, for callers that may wait."""
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._loop.submit(requests, inbox.put)
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
                self._loop.forget(requests)
        return {chunk.rid: chunk for chunk in chunks}

    @staticmethod
    def _outputs(requests: list[Request], chunks: dict[str, Chunk]) -> list[Output]:
        return [_output(request, chunks[request.rid]) for request in requests]

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


# ------------------------------------------------------------------------------------------------------------- the engine's thread

class Loop:
    """An engine's thread, from beginning to end."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()  # (requests, sink) to start, (ids, None) to abort, (verb, Future) to ask; None: end
        self._sinks: dict[str, Callable] = {}                # request id -> what takes its chunks
        self._crash: BaseException | None = None
        self._closed = False                                 # guarded by the lock: after it no call enters the inbox
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="nano_sgl engine", daemon=True)
        self._thread.start()

    def submit(self, requests: list[Request] | Callable, sink: Callable | Future) -> None:
        """Start requests; `sink` is called, in the engine's thread, with their chunks, or with what ended the engine."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine has ended") from self._crash
            self.inbox.put((requests, sink))

    def forget(self, requests: list[Request]) -> None:
        """Abort what is left of a call that nobody waits for any more."""
        self.inbox.put(([request.rid for request in requests], None))

    def release(self, rid: str) -> None:
        """Abort a request, or end the hold that it has left, whoever waits for it."""
        self.inbox.put(([rid], None))

    def ask(self, verb: Callable[[Engine], Any]) -> Any:
        """What a method of the engine returns, called between two steps."""
        answer: Future = Future()
        self.submit(verb, answer)
        return answer.result()

    def end(self) -> None:
        """End the thread once the step that it is in is done; who still waits is told."""
        with self._lock:
            self._closed = True
        self.inbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(SHUTDOWN_S)

    def _run(self) -> None:
        try:
            while True:
                while not self.engine.has_work or not self.inbox.empty():
                    asked = self.inbox.get()
                    if asked is None:
                        return
                    self._take_in(*asked)
                    del asked  # or it would keep the call alive while the thread sleeps
                for chunk in self.engine.step():
                    self._hand_out(chunk)
        except BaseException as error:
            self._crash = error
            log.exception("the engine has ended")
        finally:
            self.engine.shutdown()
            with self._lock:
                self._closed = True
            while not self.inbox.empty():
                if (asked := self.inbox.get()) is not None and isinstance(asked[1], Future):
                    asked[1].set_exception(RuntimeError("the engine has ended"))
                elif asked is not None and asked[1] is not None:
                    self._sinks.update((request.rid, asked[1]) for request in asked[0])
            for sink in list(self._sinks.values()):
                self._tell(sink, RuntimeError("the engine was shut down") if self._crash is None else self._crash)
            self._sinks.clear()

    def _take_in(self, asked, sink) -> None:
        """Start requests for a sink; where it is None, they are ids of those to abort; where it is a Future, a verb to answer it."""
        if isinstance(sink, Future):
            try:
                sink.set_result(asked(self.engine))
            except Exception as error:
                sink.set_exception(error)
            return
        if sink is None:
            for rid in asked:
                self._sinks.pop(rid, None)
                self.engine.abort(rid)
            return
        for request in asked:
            self._sinks[request.rid] = sink
            try:
                self.engine.add(request)
            except RequestError as error:  # all were valid: a grammar that was compiled again and is refused now
                self._hand_out(Chunk(rid=request.rid, finish_reason="error", error=error.message, status=error.status, param=error.param))

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
                  prompt_logprobs=chunk.prompt_logprobs, index=request.index, error=chunk.error, speculation=chunk.speculation)


def _demo() -> None:
    with LLM("demo", max_total_tokens=4096) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        for prompt in ("1, 2, 3, 4, 5,", "1, 2, 3, 4, 5, 6, 7,"):
            output = llm.generate(prompt, params)
            print(f"{prompt!r} -> {output.text!r}  ({output.cached_tokens} of {len(output.prompt_ids)} prompt tokens came from the tree)")
        print(draw(llm.engine.scheduler.tree, llm.tokenizer.decode))


if __name__ == "__main__":
    _demo()
