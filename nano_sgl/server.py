"""Server: HTTP in front of the engine's process.

    python -m nano_sgl.server --model demo

      client -> uvicorn -> Service.serve: body -> api.Call -> EngineProcess.open -> Stream -> SSE events, or one JSON body

The server answers /health half a second after it was started, and calls as soon as the engine has loaded the model. What reads a
call and words its answer is `api`; how it reaches the engine, and what happens when that dies, is `process`.

  Service   what the routes share; one call from its body to its answer. The status line is sent only after the engine has said
            whether it takes the call.
  Metrics   what /metrics says: the engine's counts, and latencies as they are seen from here.
  race      runs the work of a call against the client's disconnect, and cancels it when the client goes first.
  errors    have OpenAI's shape: 4xx names what is wrong with the request, a grammar that does not compile included; 503 comes with
            Retry-After and says why not now: the queue is full, a time-out, the engine is loading or being started again.
  signals   the first SIGTERM or Ctrl-C takes no new calls and lets the open ones finish for --drain-timeout, the second fails them.

Bodies end at 8 MiB, and are refused before they have all arrived; long ones are read and tokenised in a thread, so that other
streams go on meanwhile.

Invariant: whatever a client sends, it gets an answer or its stream an event that says what went wrong, and nobody else's answer
changes. A text that was cut short never looks complete: its finish_reason is "abort", or an error stands at its end.

Cost: 0.5 s to start, without torch. Stops holding: no authentication, so loopback by default. Source: the routes are OpenAI's and
SGLang's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import fastapi
import msgspec
import uvicorn
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import nano_sgl  # the engine, and torch, come with the first use of nano_sgl.Engine: in the child

from .api import Answer, Call, Reader
from .bodies import AbortBody, TreeQuery, read_json, read_query
from .chat import compile_template
from .config import EngineConfig, ServerConfig, parse
from .process import EngineProcess, Stream, engine_main
from .protocol import Chunk, RequestError, convert
from .radix import draw_view

log = logging.getLogger("nano_sgl")

MAX_BODY_BYTES = 8 << 20
FLUSH_TRIES, FLUSH_WAIT_S = 10, 0.05    # how often, and how long apart, an engine that seems busy is asked to empty its cache
IN_LINE_BYTES = 16 << 10    # bodies up to this are read and tokenised on the event loop: a few ms
SAY_EVERY_S = 5.0           # how often a server that is shutting down says what it waits for
HEALTH_TIMEOUT_S = 20.0     # within which a healthy engine makes a token
RETRY_AFTER_S = 1           # what a client that gets a 503 should wait; the engine's start takes longer
RETRY_START_AFTER_S = 5
KEEP_ALIVE_S = 75  # longer than clients keep an idle connection (httpx and OpenAI's client 5 s): who closes first must not be the server, or
                   # a request that is just being sent is lost
ERROR_TYPES = {400: "invalid_request_error", 404: "not_found_error", 413: "invalid_request_error", 503: "service_unavailable",
               504: "timeout_error"}
CLIENT_GONE = 499           # nginx's number for a client that did not wait; nobody reads it
LATENCY_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


# ------------------------------------------------------------------------------------------------------------------------ metrics

def used_tokens(stats: dict) -> int:
    """KV slots that running requests and holds keep; what is only cached is free for them."""
    return stats["kv_capacity"] - stats["kv_free"] - stats["kv_cached"]


def hit_rate(stats: dict) -> float:
    """The share of all prompt tokens so far whose KV was in the tree."""
    return stats["cached_tokens"] / max(stats["prompt_tokens"], 1)


# What /metrics makes of the engine's stats. The names behind the prefix are SGLang's; a counter's name gets the ending _total.
PREFIX = "nano_sgl:"
GAUGES: dict[str, tuple[str, Callable[[dict], float | None]]] = {
    "num_running_reqs": ("Requests in the running batch.", lambda stats: stats["running"]),
    "num_queue_reqs": ("Requests that wait for their first step.", lambda stats: stats["waiting"]),
    "num_used_tokens": ("KV slots that running requests and holds keep.", used_tokens),
    "token_usage": ("The same as a share of all KV slots.", lambda stats: used_tokens(stats) / stats["kv_capacity"]),
    "num_cached_tokens": ("KV slots that the tree holds and nobody uses now.", lambda stats: stats["kv_cached"]),
    "num_holds": ("Prefixes that are kept, or will be, for requests to come.", lambda stats: stats.get("holds")),
    "num_held_tokens": ("KV slots that these keep.", lambda stats: stats.get("held_tokens")),
    "max_total_num_tokens": ("All KV slots.", lambda stats: stats["kv_capacity"]),
    "cache_hit_rate": ("Share of all prompt tokens so far whose KV was in the tree.", hit_rate),
    "spec_accept_length": ("Tokens that a request's step of decoding has made so far, on average.", lambda stats: stats.get("spec_accept_length")),
    "spec_accept_rate": ("Share of all judged guesses so far that were right.", lambda stats: stats.get("spec_accept_rate")),
    "num_grammar_queue_reqs": ("Requests whose grammar is being compiled.", lambda stats: stats.get("grammar_queue")),
    "num_grammar_cached": ("Compiled grammars, and refusals, that are kept for requests to come.", lambda stats: stats.get("grammar_cached")),
    "grammar_rows": ("States of grammars that have a row in the tables in use.", lambda stats: stats.get("grammar_rows")),
    "grammar_table_bytes": ("Memory of these tables on the host; the device has a copy.", lambda stats: stats.get("grammar_table_bytes")),
}
COUNTERS = {
    "prompt_tokens": ("Prompt tokens of started requests.", "prompt_tokens"),
    "cached_tokens": ("Those whose KV was in the tree.", "cached_tokens"),
    "computed_tokens": ("Tokens that went through the model.", "computed_tokens"),
    "generation_tokens": ("Tokens made.", "output_tokens"),
    "num_requests": ("Requests that have ended; n samples of a prompt are n.", "finished"),
    "num_retracted_requests": ("Running requests that were sent back into the queue because memory was short.", "retractions"),
    "num_preempted_requests": ("Running requests that were sent back into the queue for one of higher priority.", "preemptions"),
    "evicted_tokens": ("Tokens whose KV was pushed out of the tree.", "evicted_tokens"),
    "spec_verify_calls": ("Steps of decoding, counted for each request; with guesses or without.", "spec_verify_ct"),
    "spec_num_proposed_drafts": ("Guesses judged.", "spec_num_proposed_drafts"),
    "spec_num_correct_drafts": ("Those that were right.", "spec_num_correct_drafts"),
    "spec_draft_seconds": ("Seconds that making guesses took.", "spec_draft_time"),
    "spec_verify_seconds": ("Seconds of the steps that judged some, without that.", "spec_verify_time"),
    "num_grammar_compiled": ("Grammars compiled.", "grammar_compiled"),
    "num_grammar_refused": ("Grammars that do not compile.", "grammar_refused"),
    "num_grammar_cache_hit": ("Requests that found their grammar compiled, or in the making.", "grammar_cache_hits"),
    "grammar_compile_seconds": ("Seconds that compiling took.", "grammar_compile_s"),
    "grammar_build_seconds": ("Seconds that building rows of tables took.", "grammar_build_s"),
    "grammar_tokens": ("Tokens made under a grammar.", "grammar_tokens"),
    "grammar_misses": ("Steps of a request that made no token, because the device did not know its grammar's state yet.", "grammar_misses"),
    "jump_forward_tokens": ("Tokens that grammars forced, and no step of their own made.", "forced_tokens"),
    "grammar_copied_bytes": ("Bytes of grammars' tables that went to the device.", "grammar_bytes"),
}


class Metrics:
    """What /metrics says: the engine's counts, when they are asked for, and latencies as the server sees them."""

    def __init__(self):
        self.registry, self.stats = CollectorRegistry(), {}
        self.registry.register(self)
        made = [Histogram(PREFIX + name, text, buckets=LATENCY_BUCKETS_S, registry=self.registry) for name, text in (
            ("time_to_first_token_seconds", "From a request's way to the engine to its first token, where that was streamed or the only one."),
            ("e2e_request_latency_seconds", "From a request's way to the engine to its end, where that was no error and no abort."))]
        self.histograms = dict(zip(("first token", "end"), made))

    def observe(self, what: str, seconds: float) -> None:
        """A request's first token or its end is there (`process.Stream`)."""
        self.histograms[what].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The engine's counts, for the registry. A name that the stats lack is left out."""
        for name, (text, value) in GAUGES.items():
            if self.stats and (now := value(self.stats)) is not None:
                yield GaugeMetricFamily(PREFIX + name, text, now)
        for name, (text, key) in COUNTERS.items():
            if key in self.stats:
                yield CounterMetricFamily(PREFIX + name, text, self.stats[key])
        by_depth = GaugeMetricFamily(PREFIX + "spec_accept_rate_by_depth", labels=["depth"],
                                     documentation="How often a guess so many tokens ahead was right, where all before it were.")
        for depth, rate in enumerate(self.stats.get("spec_accept_rate_by_depth", ()), 1):
            by_depth.add_metric([str(depth)], rate)
        if by_depth.samples:
            yield by_depth

    def text(self, stats: dict) -> bytes:
        """All of it, in Prometheus' format."""
        self.stats = stats
        return generate_latest(self.registry)


# ------------------------------------------------------------------------------------------------------------------------- routes

class Service:
    """What the routes share: the flags, the engine's process and, once that is ready, the reader of bodies."""

    def __init__(self, config: ServerConfig, engine: EngineProcess):
        self.config, self.engine = config, engine
        self.reader: Reader | None = None
        self.metrics = Metrics()
        engine.observe = self.metrics.observe
        self.pool = ThreadPoolExecutor(2, "reader")
        self._holding: set[asyncio.Task] = set()

    async def prepare(self) -> None:
        """Wait for the engine; build what depends on its model."""
        await self.engine.settled.wait()
        if self.engine.state == "ready":
            template = read_chat_template(self.config.chat_template)
            info = self.engine.info
            name = self.config.served_model_name or info.model
            self.reader = await asyncio.get_running_loop().run_in_executor(
                self.pool, Reader, info, name, template, self.config.reasoning_parser, self.config.tool_call_parser)
            self.pool.submit(getattr, self.reader.codec, "literal")  # so that the first user who needs it holds up nobody

    def ready_reader(self) -> Reader:
        """RequestError, status 503, while there is none, or no engine."""
        self.engine.check_ready()
        if self.reader is None:
            raise RequestError("the server is still starting", status=503)
        return self.reader

    async def serve(self, request: fastapi.Request, read: Callable[[Reader, bytes], Call], in_line_bytes: int = IN_LINE_BYTES) -> Response:
        """One call from its body to its answer. in_line_bytes: longer bodies are read in a thread."""
        call = await self._read(request, read, in_line_bytes)
        stream = self.engine.open(call.requests)
        try:
            return await race(request.receive, self._stream(call, stream) if call.stream else self._answer(call, stream))
        except RequestError as error:
            raise call.answer.blame(error) from error

    async def _read(self, request: fastapi.Request, read: Callable[[Reader, bytes], Call], in_line_bytes: int = IN_LINE_BYTES) -> Call:
        reader = self.ready_reader()
        raw = await read_body(request)
        if len(raw) <= in_line_bytes:
            return read(reader, raw)
        return await asyncio.get_running_loop().run_in_executor(self.pool, read, reader, raw)

    async def hold(self, request: fastapi.Request) -> Response:
        """Start a call whose prefix is kept, and answer with its name; nobody waits for its end, nor hears of an error in it."""
        call = await self._read(request, Reader.hold)
        task = asyncio.create_task(self._answer(call, self.engine.open(call.requests)))
        self._holding.add(task)
        task.add_done_callback(lambda done: (self._holding.discard(done), done.cancelled() or done.exception()))
        return to_json({"hold": call.requests[0].rid, "prompt_tokens": len(call.requests[0].prompt_ids)})

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
            yield sse(error_json(self.answer.blame(error))) + (b"data: [DONE]\n\n" if self.answer.done_after_errors else b"")


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
    add_error_handlers(app, service)
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

    @app.post("/score")
    async def score(request: fastapi.Request) -> Response:
        return await service.serve(request, Reader.score, in_line_bytes=0)  # its text is tokenised with each of many choices

    @app.post("/hold")
    async def hold(request: fastapi.Request) -> Response:
        return await service.hold(request)

    @app.get("/flush_cache")
    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        service.ready_reader()
        for _ in range(FLUSH_TRIES):    # an answer is sent before the engine has put its request away
            if await service.engine.ask("flush_cache"):
                return to_json({"message": "the cache is empty"})
            await asyncio.sleep(FLUSH_WAIT_S)
        raise RequestError("the cache is in use: requests are running or waiting; try again when the server is idle")

    @app.post("/abort_request")
    async def abort_request(request: fastapi.Request) -> Response:
        service.ready_reader()
        wanted = convert(read_json(await read_body(request)), AbortBody)
        if (wanted.rid is None) != wanted.abort_all:
            raise RequestError("give either rid, the id of a request, or abort_all: true", "rid")
        return to_json({"aborted": service.engine.abort(wanted.rid)})

    return app


def add_info_routes(app: fastapi.FastAPI, service: Service) -> None:
    """What one may ask about the server; all but /health need a loaded model to answer."""
    engine = service.engine

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        service.ready_reader()
        return to_json({"status": "ok"})

    @app.get("/health_generate")
    async def health_generate() -> Response:
        service.ready_reader()
        try:
            await engine.ask("probe", HEALTH_TIMEOUT_S)
        except RequestError as error:
            raise RequestError(f"the engine makes no tokens: {error.message}", status=503) from error
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
                        "default_sampling_params": reader.defaults, "has_chat_template": reader.template is not None,
                        "chat_roles": reader.roles})

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> Response:
        reader, stats = service.ready_reader(), await engine.ask("stats")
        return to_json({"version": nano_sgl.__version__, **engine.info.config, **asdict(service.config),
                        "served_model_name": reader.model, "stats": {**stats, "cache_hit_rate": hit_rate(stats)}})

    @app.get("/metrics")
    async def metrics() -> Response:
        service.ready_reader()
        return Response(service.metrics.text(await engine.ask("stats")), media_type=CONTENT_TYPE_LATEST)

    @app.get("/tree")
    async def tree(request: fastapi.Request) -> Response:
        service.ready_reader()
        query = read_query(request.query_params, TreeQuery)
        view = await engine.ask(f"tree_view {query.max_nodes} {query.width}")
        return to_json(view) if query.format == "json" else Response(draw_view(view), media_type="text/plain; charset=utf-8")


def add_error_handlers(app: fastapi.FastAPI, service: Service) -> None:
    """Whatever goes wrong is answered in OpenAI's shape."""

    @app.exception_handler(RequestError)
    async def refused(request: fastapi.Request, error: RequestError) -> Response:
        response = to_json(error_json(error), error.status)
        if error.status == 503:
            response.headers["retry-after"] = str(RETRY_AFTER_S if service.engine.state == "ready" else RETRY_START_AFTER_S)
        return response

    @app.exception_handler(HTTPException)
    async def no_route(request: fastapi.Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path[:200]}"
        messages = {404: f"there is no {where}", 405: f"{where}: this path takes {(error.headers or {}).get('Allow', 'another method')}"}
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


# ------------------------------------------------------------------------------------------------------------------- command line

def child_main(argv: list[str]) -> int:
    """The engine process. argv: the flags, then the sockets' directory."""
    engine_config, config = parse(argv[:-1], EngineConfig, ServerConfig)
    set_up_logging(config.log_level)
    return engine_main(argv[-1], lambda: nano_sgl.Engine(engine_config), config.max_queued_requests)


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
    """uvicorn, with our signals: the first lets open calls finish for `drain_s` and then fails them, the second fails them."""

    def __init__(self, settings: uvicorn.Config, engine: EngineProcess, drain_s: float):
        super().__init__(settings)
        self.engine, self.drain_s, self.exit_code = engine, drain_s, 0

    @contextlib.contextmanager
    def capture_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.leave)
        yield

    def leave(self) -> None:
        if self.should_exit:
            log.info("ending at once; requests that were still running: %d", self.engine.open_requests)
            self.engine.fail_all("the server was shut down")
            # a client that does not read its error holds up nobody
            asyncio.get_running_loop().call_later(0.5, setattr, self, "force_exit", True)
        else:
            self.exit_code = self.exit_code or self.engine.exit_code  # not 0 while the engine is down
            self.drain(self.drain_s)
        self.should_exit = True

    def drain(self, left_s: float) -> None:
        """Say now and then what is waited for; fail it when no time is left."""
        running, wait_s = self.engine.open_requests, min(left_s, SAY_EVERY_S)
        if left_s <= 0:
            log.info("ending; requests that were still running: %d", running)
            return self.engine.fail_all("the server was shut down")
        if running or left_s == self.drain_s:
            wait = f"; they get {left_s:g} s to finish, a second signal ends them at once" if running else ""
            log.info("shutting down; requests still running: %d%s", running, wait)
        asyncio.get_running_loop().call_later(wait_s, self.drain, left_s - wait_s)


async def serve(config: ServerConfig, sock: socket.socket, command: Sequence[str]) -> int:
    """Serve until a signal comes, or until the engine does not start or dies too often. Returns the exit code."""
    host, port = sock.getsockname()[:2]
    config = replace(config, port=port)
    service = Service(config, EngineProcess(command))
    settings = uvicorn.Config(create_app(service), log_level="warning", access_log=config.log_level == "debug", lifespan="on",
                              timeout_graceful_shutdown=int(config.drain_timeout) + 2, timeout_keep_alive=KEEP_ALIVE_S)
    server = HTTPServer(settings, service.engine, config.drain_timeout)
    starting = asyncio.create_task(announce(service, server, f"http://{f'[{host}]' if ':' in host else host}:{port}"))
    await server.serve(sockets=[sock])
    starting.cancel()
    await service.engine.stop()
    return server.exit_code


async def announce(service: Service, server: HTTPServer, url: str) -> None:
    """Say when the server can be used, and how; end it where the engine does not start, or dies for good."""
    start = time.monotonic()
    log.info("listening on %s; loading the model", url)
    try:
        await service.prepare()
        if service.reader is not None:
            say_ready(service, time.monotonic() - start, url)
        await service.engine.dead.wait()
    except Exception as error:
        log.error("cannot start: %s", error, exc_info=not isinstance(error, (ValueError, OSError)))
    server.exit_code, server.should_exit = service.engine.exit_code or 1, True


def say_ready(service: Service, seconds: float, url: str) -> None:
    """The line with the first command to try."""
    info, name = service.engine.info, service.reader.model
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}], "temperature": 0}}'
    log.info("ready after %.1f s: %s, context %d tokens, room for %d tokens of KV. Try:\n\n  curl %s/v1/chat/completions "
             "-H 'Content-Type: application/json' -d '%s'\n", seconds, name, info.context_len, info.max_total_tokens, url, body)


def read_chat_template(file: str | None) -> str | None:
    """The text of --chat-template; SystemExit with a sentence where it is no template."""
    if file is None:
        return None
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read()
        compile_template(text)
        return text
    except (OSError, ValueError) as error:
        raise SystemExit(f"--chat-template {file}: {getattr(error, 'strerror', None) or error}") from None


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--engine-child"]:
        return child_main(argv[1:])
    _, config = parse(argv, EngineConfig, ServerConfig, prog="python -m nano_sgl.server",
                      description="An OpenAI-compatible server, and SGLang's /generate.")
    set_up_logging(config.log_level)
    read_chat_template(config.chat_template)  # what is wrong with it is said before the model is loaded
    command = [sys.executable, "-m", "nano_sgl.server", "--engine-child", *argv]
    return asyncio.run(serve(config, listen(config.host, config.port), command))


if __name__ == "__main__":
    sys.exit(main())
