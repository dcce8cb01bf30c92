"""Server: HTTP in front, the engine in a process of its own behind.

    python -m nano_sgl.server --model demo

                HTTP process (parent)                            engine process (child)
      client -> uvicorn -> api.Call   --- list[Command] --->     drain, Engine.add / abort
             <- SSE or JSON, Stream   <--- list[Event]   ---     Engine.step, one frame of chunks a step

Why two processes: the step loop must never wait for JSON, templates or a slow client, and Python runs one thread at a time. The
parent imports no torch; it starts in half a second, answers /health while the model loads, and learns all it must know about the
model from one `Ready`.

The sockets are ZeroMQ over files in a directory that only this user may enter, the frames are msgpack of the structs in
`protocol`: data, never code. A frame of requests is one HTTP call, taken whole or rejected whole; the status line is sent only
after the engine has said which.

  EngineProcess   the parent's end: starts the child, hands its events to Streams, knows whether it lives. Between the processes
                  requests go by wire ids that it makes; a client's own id appears in answers only.
  Stream          the chunks of one call as they arrive. Closing it aborts what has not finished: on disconnect, error and end
                  alike.
  race            runs the work of a call against the client's disconnect, and cancels it when the client goes first.
  run_engine      the child's loop: drain the commands, step, send; asleep while there is no work.

Bodies end at 8 MiB; long ones are read and tokenised in a thread, so that other streams go on meanwhile.

Invariant: each request that was taken ends in the engine exactly once: finished, or aborted when its Stream closes. A parent that
goes, however it goes, takes the child along (the child reads its stdin until the end of it), and a child that goes gives every
open call an error.

Cost: two hops over a local socket a step. Stops holding: one engine, which is not restarted; no authentication, so loopback by
default. Source: the process layout is SGLang's, where a tokenizer and a detokenizer process stand between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import typing
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import fastapi
import msgspec
import uvicorn
import zmq
import zmq.asyncio
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import nano_sgl  # the engine, and torch, come with the first use of nano_sgl.Engine: in the child

from .api import Answer, Call, Reader
from .protocol import Abort, Chunk, Command, Control, Event, Ready, Rejected, Reply, Request, RequestError

log = logging.getLogger("nano_sgl")

MAX_BODY_BYTES = 8 << 20
IN_LINE_BYTES = 16 << 10    # bodies up to this are read and tokenised on the event loop: a few ms
DRAIN_S = 5.0               # what open calls get to finish in after SIGTERM or Ctrl-C
REPLY_TIMEOUT_S = 60.0
ERROR_TYPES = {400: "invalid_request_error", 404: "not_found_error", 413: "invalid_request_error", 503: "service_unavailable"}
CLIENT_GONE = 499           # nginx's number for a client that did not wait; nobody reads it

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_events = msgspec.msgpack.Decoder(list[Event]).decode


@dataclass(frozen=True)
class ServerConfig:
    """Flags of the HTTP side; the engine's are `engine.EngineConfig`."""
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on; 0.0.0.0 lets other machines in"})
    port: int = field(default=30000, metadata={"help": "port to listen on; 0 takes a free one"})
    served_model_name: str | None = field(default=None, metadata={"help": "the name clients use; what --model says by default"})
    chat_template: str | None = field(default=None, metadata={"help": "a file with the chat template to use, not the model's"})
    log_level: str = field(default="info", metadata={"help": "what to print", "choices": ("debug", "info", "warning", "error")})


# -------------------------------------------------------------------------------------------------------------- the parent's end

class EngineProcess:
    """The engine's process, seen from the HTTP process. `state`: starting, ready, stopping or dead; `why` says why not ready.

    command: what starts the child; the directory of the sockets is appended.
    """

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.state, self.why, self.exit_code = "starting", "the engine is still loading the model", 0
        self.info: Ready | None = None
        self.settled = asyncio.Event()  # ready, or dead
        self._streams: dict[str, Stream] = {}  # by wire id
        self._rids: set[str] = set()           # the clients' ids of open calls
        self._replies: dict[int, asyncio.Future] = {}
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        long = len(tempfile.gettempdir()) > 60  # a socket's path ends at about 100 characters
        self._directory = tempfile.mkdtemp(prefix="nano_sgl-", dir="/tmp" if long else None)  # mode 0700
        self._context = zmq.asyncio.Context()
        self._commands = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for sock, name in ((self._commands, "commands"), (self._events, "events")):
            sock.set_hwm(0)
            sock.linger = 0
            sock.bind(f"ipc://{self._directory}/{name}")
        # A session of its own: Ctrl-C in the terminal reaches the parent, which ends the child in order.
        self._process = await asyncio.create_subprocess_exec(*self.command, self._directory, stdin=asyncio.subprocess.PIPE,
                                                             start_new_session=True)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        self._tasks[0].add_done_callback(self._deaf)

    async def stop(self) -> None:
        """End the child and remove what `start` made. Open calls get an error."""
        if self.state == "stopping":
            return
        self.state, self.why = "stopping", "the server is shutting down"
        self.fail_all("the server was shut down")
        self._process.stdin.close()  # the child reads the end of its stdin, and goes
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._commands.close()
        self._events.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def open(self, requests: list[Request]) -> Stream:
        """Hand requests to the engine: all of them are taken, or the stream's first `next` raises why not.

        The engine knows them by wire ids, which are never used twice: a client may reuse its own id at once after it has left,
        while chunks of the aborted request are still on their way.
        """
        self.check_ready()
        for request in requests:
            if request.rid in self._rids:
                raise RequestError(f"the request id {request.rid!r} is in use", "rid")
        stream = Stream(self, {str(next(self._numbers)): r.rid for r in requests})
        self._send([msgspec.structs.replace(r, rid=wire) for wire, r in zip(stream.rids, requests)])
        self._streams.update(dict.fromkeys(stream.rids, stream))
        self._rids.update(stream.rids.values())
        return stream

    async def ask(self, verb: str) -> Any:
        """What the engine answers to one of its own verbs (`protocol.Control`)."""
        self.check_ready()
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._send([Control(number, verb)])
            value = await asyncio.wait_for(reply, REPLY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise RequestError(f"the engine did not answer within {REPLY_TIMEOUT_S:.0f} s", status=503) from None
        finally:
            self._replies.pop(number, None)
        if value is None:
            raise RequestError(f"the engine failed on {verb}; its log says why", status=500)
        return value

    def check_ready(self) -> None:
        """RequestError, status 503, unless the engine takes requests."""
        if self.state != "ready":
            raise RequestError(self.why, status=503)

    def forget(self, stream: Stream) -> None:
        """A stream is closed: nobody waits for its requests any more."""
        for wire, rid in stream.rids.items():
            if self._streams.pop(wire, None) is not None:
                self._rids.discard(rid)
        if stream.open and self.state == "ready":
            self._send([Abort(sorted(stream.open))])

    def fail_all(self, message: str) -> None:
        """Every open call ends with this error."""
        for stream in set(self._streams.values()):
            stream.put(Rejected(rid="", message=message, status=503))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(RequestError(message, status=503))
        self._replies.clear()

    def _send(self, commands: list) -> None:
        with contextlib.suppress(zmq.Again):  # no one at the other end: `_watch` is about to say so
            self._commands.send(encode(commands), zmq.NOBLOCK)

    async def _listen(self) -> None:
        while True:
            for event in decode_events(await self._events.recv()):
                if isinstance(event, Ready):
                    self.info = event
                    self.state = "ready" if self.state == "starting" else self.state
                    self.settled.set()
                elif isinstance(event, Reply):
                    reply = self._replies.pop(event.id, None)
                    if reply is not None and not reply.done():
                        reply.set_result(event.value)
                elif (stream := self._streams.get(event.rid)) is not None:
                    stream.put(event)

    async def _watch(self) -> None:
        """A child that ends, ends its calls. (Starting another belongs here.)"""
        self.exit_code = await self._process.wait()
        how = "did not start" if self.state == "starting" else "has died"
        self._die(f"the engine process {how} (exit code {self.exit_code}); restart the server")

    def _deaf(self, listening: asyncio.Task) -> None:
        """`_listen` has ended. An engine that nobody hears is of no use."""
        if not listening.cancelled():
            self._die(f"the engine's answers cannot be read ({listening.exception()}); restart the server")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _die(self, why: str) -> None:
        if self.state not in ("stopping", "dead"):
            self.state, self.why = "dead", why
            log.error(why)
            self.fail_all(why)
            self.settled.set()


class Stream:
    """The chunks of one call. rids: wire id -> the client's. open: the wire ids of requests that have not ended."""

    def __init__(self, engine: EngineProcess, rids: dict[str, str]):
        self.engine, self.rids, self.open = engine, rids, set(rids)
        self._inbox: list[Chunk | Rejected] = []
        self._news = asyncio.Event()

    def put(self, event: Chunk | Rejected) -> None:
        if isinstance(event, Rejected):
            self.open.clear()  # none of the call was taken
        else:
            if event.finish_reason:
                self.open.discard(event.rid)
            event.rid = self.rids[event.rid]
        self._inbox.append(event)
        self._news.set()

    async def next(self) -> list[Chunk]:
        """What has arrived, at least one chunk; [] when all requests have ended. RequestError where one failed."""
        while not self._inbox and self.open:
            self._news.clear()
            await self._news.wait()
        arrived, self._inbox = self._inbox, []
        for n, event in enumerate(arrived):
            if isinstance(event, Rejected) or event.finish_reason == "error":
                if n > 0:
                    self._inbox = arrived[n:]
                    return arrived[:n]
                if isinstance(event, Rejected):
                    raise RequestError(event.message, event.param, event.status)
                raise RequestError(event.error or "the engine failed on this request", status=500)
        return arrived

    def close(self) -> None:
        """Abort what has not ended. To be called exactly when the call is over, however it ended."""
        self.engine.forget(self)


# ------------------------------------------------------------------------------------------------------------------------- routes

class Service:
    """What the routes share: the flags, the engine's process and, once that is ready, the reader of bodies."""

    def __init__(self, config: ServerConfig, engine: EngineProcess):
        self.config, self.engine = config, engine
        self.reader: Reader | None = None
        self.pool = ThreadPoolExecutor(2, "reader")

    async def prepare(self) -> None:
        """Wait for the engine; build what depends on its model. ValueError, OSError: the flags' chat template is no good."""
        await self.engine.settled.wait()
        if self.engine.state == "ready":
            template = None
            if self.config.chat_template is not None:
                with open(self.config.chat_template, encoding="utf-8") as file:
                    template = file.read()
            info = self.engine.info
            name = self.config.served_model_name or info.model
            self.reader = await asyncio.get_running_loop().run_in_executor(self.pool, Reader, info, name, template)
            self.pool.submit(getattr, self.reader.codec, "literal")  # so that the first user who needs it holds up nobody

    def ready_reader(self) -> Reader:
        self.engine.check_ready()
        if self.reader is None:
            raise RequestError("the server is still starting", status=503)
        return self.reader

    async def serve(self, request: fastapi.Request, read: Callable[[Reader, bytes], Call]) -> Response:
        """One call from its body to its answer."""
        reader = self.ready_reader()
        raw = await read_body(request)
        if len(raw) <= IN_LINE_BYTES:
            call = read(reader, raw)
        else:
            call = await asyncio.get_running_loop().run_in_executor(self.pool, read, reader, raw)
        stream = self.engine.open(call.requests)
        return await race(request.receive, self._stream(call, stream) if call.stream else self._answer(call, stream))

    async def _answer(self, call: Call, stream: Stream) -> Response:
        try:
            while chunks := await stream.next():
                call.answer.add(chunks)
            return to_json(call.answer.body_json())
        finally:
            stream.close()

    async def _stream(self, call: Call, stream: Stream) -> Response:
        """Wait for the engine's first word: what it rejects gets a status, not an event in a stream that began with 200."""
        try:
            chunks = await stream.next()
        except BaseException:
            stream.close()
            raise
        return EventStream(call.answer, stream, chunks)


class EventStream(Response):
    """An answer as server-sent events. The stream is closed when all has been sent, or when the client has gone."""

    def __init__(self, answer: Answer, stream: Stream, chunks: list[Chunk]):
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.answer, self.stream, self.chunks = answer, stream, chunks

    async def __call__(self, scope, receive, send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        try:
            await race(receive, write())
        finally:
            self.stream.close()

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Text of the events. What arrives together is sent together."""
        try:
            while self.chunks:
                if piece := b"".join(map(sse, self.answer.add(self.chunks))):
                    yield piece
                self.chunks = await self.stream.next()
            yield b"".join(map(sse, self.answer.last_events())) + b"data: [DONE]\n\n"
        except RequestError as error:
            yield sse(error_json(error))


def sse(event: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def race(receive: Callable, work: Coroutine) -> Any:
    """The result of `work`, unless the client goes first: then it is cancelled, and the answer is for nobody."""
    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else Response(status_code=CLIENT_GONE)
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def read_body(request: fastapi.Request) -> bytes:
    """The body: JSON by its content type, at most MAX_BODY_BYTES long. A longer one is refused before it has all arrived."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"the content type is {kind or 'missing'}; send JSON with 'Content-Type: application/json'")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(f"the content encoding {request.headers['content-encoding']} is not supported; send the JSON as it is")
    too_large = RequestError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


def to_json(value: Any, status: int = 200) -> Response:
    """A JSON response; numbers that JSON lacks become null."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_json(error: RequestError) -> dict:
    """An error in OpenAI's shape."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "internal_server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


def create_app(service: Service) -> fastapi.FastAPI:
    """The routes. The app starts the engine's process with its lifespan, and ends it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI):
        await service.engine.start()
        yield
        await service.engine.stop()

    app = fastapi.FastAPI(title="nano_sgl", version=nano_sgl.__version__, lifespan=lifespan)
    add_error_handlers(app)
    add_info_routes(app, service)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: fastapi.Request) -> Response:
        return await service.serve(request, Reader.chat)

    @app.post("/v1/completions")
    async def completions(request: fastapi.Request) -> Response:
        return await service.serve(request, Reader.completion)

    @app.post("/generate")
    async def generate(request: fastapi.Request) -> Response:
        return await service.serve(request, Reader.generate)

    @app.get("/flush_cache")
    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        service.ready_reader()
        if not await service.engine.ask("flush_cache"):
            raise RequestError("the cache is in use: requests are running or waiting; try again when the server is idle")
        return to_json({"message": "the cache is empty"})

    return app


def add_info_routes(app: fastapi.FastAPI, service: Service) -> None:
    """What one may ask about the server; all but /health need a loaded model to answer."""
    engine = service.engine

    @app.get("/health")
    async def health() -> Response:
        service.ready_reader()
        return to_json({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return to_json({"object": "list", "data": [service.ready_reader().model_card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        reader = service.ready_reader()
        reader.check_model(name)
        return to_json(reader.model_card())

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info() -> Response:
        reader, info = service.ready_reader(), engine.info
        return to_json({"model_path": info.model, "tokenizer_path": info.path, "served_model_name": reader.model,
                        "is_generation": True, "context_length": info.context_len, "max_total_tokens": info.max_total_tokens,
                        "vocab_size": info.vocab_size, "eos_token_ids": info.end_ids,
                        "default_sampling_params": reader.defaults, "has_chat_template": reader.template is not None})

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> Response:
        service.ready_reader()
        return to_json({"version": nano_sgl.__version__, **engine.info.config, **asdict(service.config),
                        "stats": await engine.ask("stats")})


def add_error_handlers(app: fastapi.FastAPI) -> None:
    """Whatever goes wrong is answered in OpenAI's shape."""

    @app.exception_handler(RequestError)
    async def refused(request: fastapi.Request, error: RequestError) -> Response:
        return to_json(error_json(error), error.status)

    @app.exception_handler(HTTPException)
    async def no_route(request: fastapi.Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        messages = {404: f"there is no {where}", 405: f"{where}: this path takes another method"}
        message = messages.get(error.status_code, str(error.detail))
        response = to_json(error_json(RequestError(message, status=error.status_code)), error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def failed(request: fastapi.Request, error: Exception) -> Response:
        return to_json(error_json(RequestError(f"the server failed on this request: {error}", status=500)), 500)

    @app.exception_handler(ClientDisconnect)
    async def left(request: fastapi.Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)


# ------------------------------------------------------------------------------------------------------------- the engine process

def run_engine(engine: Any, directory: str) -> None:
    """The engine process: serve an Engine over the sockets in `directory`, for as long as the parent lives."""
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for sock, name in ((commands, "commands"), (events, "events")):
        sock.set_hwm(0)
        sock.connect(f"ipc://{directory}/{name}")
    events.send(encode([describe(engine)]))
    alive: set[str] = set()
    meter = Meter(engine)
    while True:
        out: list = []
        if not engine.has_work:
            commands.poll()  # sleep until something comes
            meter.wake()
        while commands.poll(0):
            out += obey(engine, decode_commands(commands.recv()), alive)
        if engine.has_work:
            out += step(engine, alive)
            meter.tick()
        if out:
            events.send(pack(engine, out, alive))


def pack(engine: Any, events: list, alive: set[str]) -> bytes:
    """A frame of events. One that does not fit the wire becomes an error of its request, which is aborted."""
    try:
        return encode(events)
    except Exception:
        return encode([_fitting(engine, event, alive) for event in events])


def _fitting(engine: Any, event: Chunk | Rejected | Reply, alive: set[str]) -> Chunk | Rejected | Reply:
    try:
        encode(event)
        return event
    except Exception as error:
        log.exception("an event does not fit the wire")
        if isinstance(event, Reply):
            return Reply(event.id, None)
        engine.abort(event.rid)
        alive.discard(event.rid)
        return Chunk(rid=event.rid, finish_reason="error", error=f"the engine failed on this request: {error}")


def obey(engine: Any, commands: list, alive: set[str]) -> list:
    """Carry out one frame. Its requests are one call: where one is refused, none stays."""
    out: list = []
    added: list[str] = []
    for command in commands:
        try:
            if isinstance(command, Request):
                engine.add(command)
                added.append(command.rid)
            elif isinstance(command, Abort):
                for rid in command.rids:
                    engine.abort(rid)
                    alive.discard(rid)
            else:
                out.append(Reply(command.id, {"stats": engine.stats, "flush_cache": engine.flush_cache}[command.verb]()))
        except Exception as error:  # whatever it was, it is the sender's affair; the others go on
            if isinstance(command, Request):
                for rid in added:
                    engine.abort(rid)
                if isinstance(error, RequestError):
                    return [Rejected(rid=command.rid, message=error.message, param=error.param, status=error.status)]
                log.exception("a request was not taken")
                return [Rejected(rid=command.rid, message=f"the engine failed on this request: {error}", status=500)]
            log.exception("a command failed")
            if isinstance(command, Control):
                out.append(Reply(command.id, None))
    alive.update(added)
    return out


def step(engine: Any, alive: set[str]) -> list[Chunk]:
    """One step. The engine answers for its own failures; should one get through, its requests get the error, and the books are
    proved: an engine whose books are wrong must not go on."""
    try:
        chunks = engine.step()
    except Exception as error:
        log.exception("a step failed")
        chunks = [Chunk(rid=rid, finish_reason="error", error=f"the engine failed: {error}") for rid in sorted(alive)]
        for rid in alive:
            engine.abort(rid)
        engine.check()
    alive.difference_update(chunk.rid for chunk in chunks if chunk.finish_reason)
    return chunks


def describe(engine: Any) -> Ready:
    """What the HTTP process must know about an engine."""
    tokenizer = engine.tokenizer
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return Ready(model=engine.config.model, path=str(engine.path), vocab_size=engine.vocab_size, context_len=engine.context_len,
                 max_total_tokens=engine.stats()["kv_capacity"], end_ids=list(engine.end_ids), special_tokens=special,
                 tokenizer_json=tokenizer.backend_tokenizer.to_str(), chat_template=tokenizer.chat_template,
                 generation_defaults=engine.generation_defaults, config=asdict(engine.config))


class Meter:
    """One log line a second while there is work; work that ends sooner gets its line at the end."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.said_at = 0.0
        self.wake()

    def wake(self) -> None:
        """Work begins: rates are counted from here."""
        self.since, self.counts = time.monotonic(), self.engine.stats()

    def tick(self) -> None:
        """A step has been made."""
        now = time.monotonic()
        if now - max(self.since, self.said_at) >= 1 or (not self.engine.has_work and now - self.said_at >= 1):
            self._say(now)

    def _say(self, now: float) -> None:
        new, old, seconds = self.engine.stats(), self.counts, now - self.since
        hits, prompts, slots = new["cached_tokens"], new["prompt_tokens"], new["kv_capacity"]
        log.info("running %d, queued %d | %.0f tok/s out, %.0f tok/s computed | prefix hits %.0f%% | "
                 "KV %.0f%% in use, %.0f%% cached",
                 new["running"], new["waiting"], (new["output_tokens"] - old["output_tokens"]) / seconds,
                 (new["computed_tokens"] - old["computed_tokens"]) / seconds, 100 * hits / max(prompts, 1),
                 100 * (slots - new["kv_free"] - new["kv_cached"]) / slots, 100 * new["kv_cached"] / slots)
        self.said_at = self.since = now
        self.counts = new


def go_with_parent(directory: str) -> None:
    """Wait for the end of stdin, which the parent holds open, and end this process with it."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def engine_main(directory: str, make_engine: Callable[[], Any]) -> int:
    """The engine process from its beginning. Returns 1, after a sentence, where the engine cannot be made."""
    threading.Thread(target=go_with_parent, args=(directory,), daemon=True).start()
    try:
        engine = make_engine()
    except Exception as error:
        expected = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("nano_sgl")
        log.error("cannot start: %s", error, exc_info=not expected)
        return 1
    run_engine(engine, directory)
    return 0


# ------------------------------------------------------------------------------------------------------------------- command line

def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for each field of a dataclass: its type, default, and metadata "help" and "choices"."""
    hints = typing.get_type_hints(config)
    group = parser.add_argument_group(config.__name__)
    for f in fields(config):
        name, text = "--" + f.name.replace("_", "-"), f.metadata["help"].replace("%", "%%")
        kinds = [k for k in typing.get_args(hints[f.name]) if k is not types.NoneType] or [hints[f.name]]
        if kinds[0] is bool:
            group.add_argument(name, action="store_true", default=f.default, help=text)
        else:
            text += "" if f.default is None else f" ({f.default})"
            group.add_argument(name, type=kinds[0], choices=f.metadata.get("choices"), default=f.default, help=text,
                               metavar=None if f.metadata.get("choices") else kinds[0].__name__.upper())


def pick(config: type, args: argparse.Namespace) -> Any:
    """The dataclass that `add_flags` made flags of, out of what was parsed."""
    return config(**{f.name: getattr(args, f.name) for f in fields(config)})


def child_main(argv: list[str]) -> int:
    """The engine process. argv: the flags, then the sockets' directory."""
    def make_engine() -> Any:
        args = parse_all_flags(argv[:-1])
        set_up_logging(args.log_level)
        return nano_sgl.Engine(pick(nano_sgl.EngineConfig, args))
    return engine_main(argv[-1], make_engine)


def parse_all_flags(argv: list[str]) -> argparse.Namespace:
    """The flags of both processes. Imports the engine, for its flags and the names that they may take."""
    parser = argparse.ArgumentParser(prog="python -m nano_sgl.server", allow_abbrev=False,
                                     description="An OpenAI-compatible server, and SGLang's /generate.")
    add_flags(parser, nano_sgl.EngineConfig)
    add_flags(parser, ServerConfig)
    return parser.parse_args(argv)


def set_up_logging(level: str) -> None:
    """Our own lines from `level` on, everybody else's warnings."""
    logging.basicConfig(level=logging.WARNING, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    log.setLevel(level.upper())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; SystemExit with a sentence where the address cannot be had."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise SystemExit(f"cannot listen on {host}:{port}: ports are numbers from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # at once, so that a second server cannot bind as well
        return sock
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "another server is running there; stop it, or choose another --port" if taken else error.strerror
        raise SystemExit(f"cannot listen on {host}:{port}: {hint}") from None


class HTTPServer(uvicorn.Server):
    """uvicorn, with our signals: the first lets open calls finish for DRAIN_S and then fails them, the second fails them."""

    def __init__(self, settings: uvicorn.Config, engine: EngineProcess):
        super().__init__(settings)
        self.engine, self.exit_code = engine, 0

    @contextlib.contextmanager
    def capture_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.leave)
        yield

    def leave(self) -> None:
        if self.should_exit:
            self.engine.fail_all("the server was shut down")
        else:
            asyncio.get_running_loop().call_later(DRAIN_S, self.engine.fail_all, "the server was shut down")
        self.should_exit = True


async def serve(config: ServerConfig, sock: socket.socket, command: Sequence[str]) -> int:
    """Serve until a signal comes, or until the engine turns out not to start. Returns the exit code."""
    service = Service(config, EngineProcess(command))
    settings = uvicorn.Config(create_app(service), log_level="warning", access_log=config.log_level == "debug", lifespan="on",
                              timeout_graceful_shutdown=int(DRAIN_S) + 2)
    server = HTTPServer(settings, service.engine)
    host, port = sock.getsockname()[:2]
    starting = asyncio.create_task(announce(service, server, f"http://{f'[{host}]' if ':' in host else host}:{port}"))
    await server.serve(sockets=[sock])
    starting.cancel()
    return server.exit_code


async def announce(service: Service, server: HTTPServer, url: str) -> None:
    """Say when the server can be used, and how; end it where the engine does not start."""
    start = time.monotonic()
    log.info("listening on %s; loading the model", url)
    try:
        await service.prepare()
    except Exception as error:
        log.error("cannot start: %s", error, exc_info=not isinstance(error, (ValueError, OSError)))
        server.exit_code, server.should_exit = 1, True
        return
    if service.reader is None:
        server.exit_code, server.should_exit = service.engine.exit_code or 1, True
        return
    body = f'{{"model": "{service.reader.model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}], "temperature": 0}}'
    log.info("ready after %.1f s: %s, context %d tokens, room for %d tokens of KV. Try:\n\n  curl %s/v1/chat/completions "
             "-H 'Content-Type: application/json' -d '%s'\n", time.monotonic() - start, service.reader.model,
             service.engine.info.context_len, service.engine.info.max_total_tokens, url, body)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--engine-child"]:
        return child_main(argv[1:])
    if {"-h", "--help"} & set(argv):
        parse_all_flags(["--help"])
    parser = argparse.ArgumentParser(prog="python -m nano_sgl.server", allow_abbrev=False, add_help=False)
    add_flags(parser, ServerConfig)
    args, _ = parser.parse_known_args(argv)
    set_up_logging(args.log_level)
    config = pick(ServerConfig, args)
    command = [sys.executable, "-m", "nano_sgl.server", "--engine-child", *argv]
    return asyncio.run(serve(config, listen(config.host, config.port), command))


if __name__ == "__main__":
    sys.exit(main())
