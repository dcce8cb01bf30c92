"""Process: the engine in a process of its own, the wire to it, and what happens when it dies.

                parent: serves HTTP, imports no torch                child: `Child` around an Engine
      Stream  <-- EngineProcess   --- list[Command] --->     obey: Engine.add / abort / stats ...
                                  <--- list[Event]   ---     step: Engine.step, one frame of chunks a step

Why two processes: the step loop must never wait for JSON, templates or a slow client, and Python runs one thread at a time. The
parent learns all it must know about the model from the one `Ready` that a child begins with.

The sockets are ZeroMQ over files in a directory that only this user may enter, the frames are msgpack of the structs in
`protocol`: data, never code. A frame of requests is one HTTP call, taken whole or rejected whole. Between the processes requests
go by wire ids, which are never used twice; a client's own id appears in answers only.

  EngineProcess   the parent's end: starts the child, hands its events to Streams, starts another when it dies.
  Stream          the chunks of one call as they arrive. Closing it aborts what has not finished: on disconnect, error and end
                  alike.
  Child           the child's loop: drain the commands, step, send; asleep while there is no work.

A life of the child:    starting --Ready--> ready --it dies--> starting (after 1, 2, 4, ... s) --Ready--> ready ...
                            |  it never was ready, or has died more than MAX_RESTARTS times within RESTART_WINDOW_S
                            '--> dead

Invariant: each request that was taken ends in the engine exactly once: finished, or aborted when its Stream closes. A parent that
goes, however it goes, takes the child along (the child reads its stdin until the end of it), and a child that goes gives every
open call an error. Each child has sockets of its own: nothing that was meant for one reaches the next.

Cost: two hops over a local socket a step. Stops holding: one engine, on this machine. Source: the process layout is SGLang's,
where a tokenizer and a detokenizer process stand between.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from .protocol import INT_MAX, Abort, Chunk, Command, Control, Event, Ready, Rejected, Reply, Request, RequestError, SamplingParams

log = logging.getLogger("nano_sgl")

REPLY_TIMEOUT_S = 60.0
RESTART_DELAY_S = 1.0       # before the first restart; doubled for each death within the window
RESTART_WINDOW_S = 300.0
MAX_RESTARTS = 5            # within the window; the next death is the last
LAST_WORDS_S = 0.05         # what a child sent before it died may still be on its way
VERBS = ("stats", "flush_cache", "tree_view")  # what `EngineProcess.ask` may ask for, beside "probe"
MAX_HOLDS = 4096            # names of holds that are remembered; children of older ones are requests like others
PROBE = "probe"             # the rid of the request that asks whether the engine makes tokens; wire ids are numbers

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_events = msgspec.msgpack.Decoder(list[Event]).decode


# -------------------------------------------------------------------------------------------------------------- the parent's end

class EngineProcess:
    """The engine's process, seen from the parent. `state`: starting, ready, stopping or dead; `why` says why not ready.

    command: what starts the child; the directory of the sockets is appended.
    """

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.state, self.why = "starting", "the engine is still loading the model"
        self.exit_code = 0              # of the child, while it is dead
        self.info: Ready | None = None
        self.settled, self.dead = asyncio.Event(), asyncio.Event()  # settled: was ready once, or is dead
        self.observe: Callable[[str, float], None] = lambda what, seconds: None  # told of each "first token" and each "end", see `Stream`
        self._streams: dict[str, Stream] = {}  # by wire id
        self._rids: set[str] = set()           # the clients' ids of open calls
        self._holds: dict[str, str] = {}       # the client's id of a request with children, which may have ended -> its wire id
        self._replies: dict[int, asyncio.Future] = {}
        self._numbers = itertools.count(1)
        self._deaths: list[float] = []         # when, of those within the window
        self._blame: str | None = None         # why the child is being killed

    @property
    def open_requests(self) -> int:
        """Requests that clients still wait for."""
        return sum(len(stream.open) for stream in set(self._streams.values()))

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        await self._spawn()
        self._watching = asyncio.create_task(self._watch())

    async def _spawn(self) -> None:
        """A child, and sockets for it alone."""
        long = len(tempfile.gettempdir()) > 60  # a socket's path ends at about 100 characters
        self._directory = tempfile.mkdtemp(prefix="nano_sgl-", dir="/tmp" if long else None)  # mode 0700
        self._commands = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for sock, name in ((self._commands, "commands"), (self._events, "events")):
            sock.set_hwm(0)
            sock.linger = 0
            sock.bind(f"ipc://{self._directory}/{name}")
        # A session of its own: Ctrl-C in the terminal reaches the parent, which ends the child in order.
        self._process = await asyncio.create_subprocess_exec(*self.command, self._directory, stdin=asyncio.subprocess.PIPE,
                                                             start_new_session=True)
        self._listening = asyncio.create_task(self._listen())
        self._listening.add_done_callback(self._deaf)

    async def _bury(self) -> None:
        """Remove what `_spawn` made, once the child is gone."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._commands.close()
        self._events.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def stop(self) -> None:
        """End the child and remove what `start` made. Open calls get an error."""
        if self.state == "stopping":
            return
        self.state, self.why = "stopping", "the server is shutting down"
        self.fail_all("the server was shut down")
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._process.stdin.close()  # the child reads the end of its stdin, and goes
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._bury()
        self._context.term()

    def open(self, requests: list[Request]) -> Stream:
        """Hand requests to the engine: all of them are taken, or the stream's first `next` raises why not.

        The engine knows them by wire ids: a client may reuse its own id at once after it has left, while chunks of the aborted
        request are still on their way. A hold's id lives on as the name that its children give as their parent.
        """
        self.check_ready()
        for request in requests:
            if request.rid in self._rids:
                raise RequestError(f"the request id {request.rid!r} is in use", "rid")
        stream = Stream(self, {str(next(self._numbers)): r.rid for r in requests})
        wired = [msgspec.structs.replace(r, rid=wire, parent=self._holds.get(r.parent, "")) for wire, r in zip(stream.rids, requests)]
        replaced = [old for r in requests if r.children and (old := self._holds.pop(r.rid, None))]
        self._holds.update((r.rid, wire) for wire, r in zip(stream.rids, requests) if r.children)
        while len(self._holds) > MAX_HOLDS:
            del self._holds[next(iter(self._holds))]
        self._send(wired)
        if replaced:
            self._send([Abort(replaced)])
        self._streams.update(dict.fromkeys(stream.rids, stream))
        self._rids.update(stream.rids.values())
        return stream

    def abort(self, rid: str | None) -> int:
        """End requests, whose last chunk then says "abort", and holds, whether these have ended as requests or not. rid: a client's id, which
        also names what a call made of it (rid-0, rid-0-1, ...); None: all. Returns how many were named."""
        named = None if rid is None else re.compile(re.escape(rid) + r"(-\d+){0,2}")
        wires = [wire for wire, stream in self._streams.items()
                 if wire in stream.open and (named is None or named.fullmatch(stream.rids[wire]))]
        holds = [name for name in self._holds if named is None or named.fullmatch(name)]
        wires += [wire for name in holds if (wire := self._holds.pop(name)) not in wires]
        if wires and self.state == "ready":
            self._send([Abort(wires)])
        return len(wires)

    async def ask(self, verb: str, timeout_s: float | None = None) -> Any:
        """What the engine answers to one of its own verbs (`protocol.Control`). RequestError where it does not."""
        self.check_ready()
        timeout_s = REPLY_TIMEOUT_S if timeout_s is None else timeout_s
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._send([Control(number, verb)])
            value = await asyncio.wait_for(reply, timeout_s)
        except asyncio.TimeoutError:
            raise RequestError(f"the engine did not answer within {timeout_s:g} s", status=503) from None
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
                    if self.info is not None:
                        log.info("the engine is ready again")
                    self.info, self.exit_code = event, 0
                    if self.state == "starting" and self._process.returncode is None:  # the last word of one that is dead comes late
                        self.state = "ready"
                        self.settled.set()
                elif isinstance(event, Reply):
                    reply = self._replies.pop(event.id, None)
                    if reply is not None and not reply.done():
                        reply.set_result(event.value)
                elif (stream := self._streams.get(event.rid)) is not None:
                    stream.put(event)

    def _deaf(self, listening: asyncio.Task) -> None:
        """`_listen` has ended. An engine that nobody hears is of no use."""
        if not listening.cancelled():
            self._blame = f"its answers cannot be read: {listening.exception()}"
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _watch(self) -> None:
        """A child that ends, ends its calls; another takes its place, unless that is hopeless."""
        while True:
            code = await self._process.wait()
            self.exit_code = code if 0 < code < 256 else 1
            self.state, self.why = "starting", self._obituary(code)
            await asyncio.sleep(LAST_WORDS_S)
            log.error(self.why)
            self.fail_all(self.why)
            self._holds.clear()
            await self._bury()
            if self.info is None or len(self._deaths) > MAX_RESTARTS:
                break
            await asyncio.sleep(RESTART_DELAY_S * 2 ** (len(self._deaths) - 1))
            try:
                await self._spawn()
            except Exception as error:
                self.why = f"the engine process cannot be started again: {error}"
                log.error(self.why)
                break
        self.state = "dead"
        self.settled.set()
        self.dead.set()

    def _obituary(self, code: int) -> str:
        """Count a death, and say what it means."""
        now = time.monotonic()
        self._deaths = [then for then in self._deaths if now - then < RESTART_WINDOW_S] + [now]
        how = self._blame or (f"exit code {code}" if code >= 0 else f"signal {-code}")
        self._blame = None
        if self.info is None:
            return f"the engine process did not start ({how})"
        if len(self._deaths) > MAX_RESTARTS:
            return f"the engine process has died {len(self._deaths)} times within {RESTART_WINDOW_S:g} s ({how}); the server gives up"
        return f"the engine process has died ({how}) and is being started again; send the request once more in some seconds"


class Stream:
    """The chunks of one call. rids: wire id -> the client's. open: the wire ids of requests that have not ended.

    Tells `EngineProcess.observe` how many seconds after it was opened each request had its first token and its regular end. Without
    streaming a request has one chunk, at its end: when its first token was made is then known only if it has no other.
    """

    def __init__(self, engine: EngineProcess, rids: dict[str, str]):
        self.engine, self.rids, self.open = engine, rids, set(rids)
        self.opened_at, self.silent = time.monotonic(), set(rids)  # silent: those without a token yet
        self._inbox: list[Chunk | Rejected] = []
        self._news = asyncio.Event()

    def put(self, event: Chunk | Rejected) -> None:
        if isinstance(event, Rejected):
            self.open.clear()  # none of the call was taken
        else:
            self._observe(event)
            if event.finish_reason:
                self.open.discard(event.rid)
            event.rid = self.rids[event.rid]
        self._inbox.append(event)
        self._news.set()

    def _observe(self, chunk: Chunk) -> None:
        seconds = time.monotonic() - self.opened_at
        if chunk.output_ids and chunk.rid in self.silent:
            self.silent.discard(chunk.rid)
            if not chunk.finish_reason or len(chunk.output_ids) == 1:
                self.engine.observe("first token", seconds)
        if chunk.finish_reason in ("stop", "length"):
            self.engine.observe("end", seconds)

    async def next(self) -> list[Chunk]:
        """What has arrived, at least one chunk; [] when all requests have ended. RequestError where one failed."""
        while not self._inbox and self.open:
            self._news.clear()
            await self._news.wait()
        arrived, self._inbox = self._inbox, []
        for n, event in enumerate(arrived):
            if (error := failure(event)) is not None:
                if n == 0:
                    raise error
                self._inbox = arrived[n:]
                return arrived[:n]
        return arrived

    def close(self) -> None:
        """Abort what has not ended. To be called exactly when the call is over, however it ended."""
        self.engine.forget(self)


def failure(event: Chunk | Rejected) -> RequestError | None:
    """The error that an event ends its call with, if it does."""
    if isinstance(event, Rejected):
        return RequestError(event.message, event.param, event.status)
    if event.finish_reason == "error" or event.error is not None:
        return RequestError(event.error or "the engine failed on this request", event.param, event.status)
    return None


# ------------------------------------------------------------------------------------------------------------- the engine process

class Child:
    """The child's end: an Engine between two sockets.

    max_queued: requests that may wait; a call that would make it more is rejected, status 503. A call that finds nobody waiting is
    always taken.
    """

    def __init__(self, engine: Any, max_queued: int | None = None):
        self.engine, self.max_queued = engine, max_queued
        self.alive: set[str] = set()      # requests that have not ended
        self.meter = Meter(engine)
        self.probes: list[int] = []       # ids of the Controls that wait for the engine to make a token
        self.probed = 0                   # probes that the engine has counted among its requests
        self.tokens_before = 0            # output tokens when the last probe came
        self.added = False                # since the last step

    def run(self, directory: str) -> None:
        """Serve over the sockets in `directory`, for as long as the parent lives."""
        context = zmq.Context()
        commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for sock, name in ((commands, "commands"), (events, "events")):
            sock.set_hwm(0)
            sock.connect(f"ipc://{directory}/{name}")
        events.send(encode([describe(self.engine)]))
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not walk over a million objects of libraries at every turn
        while True:
            out: list = []
            if not self.engine.has_work:
                commands.poll()  # sleep until something comes
                self.meter.wake()
            while commands.poll(0):
                frame = decode_commands(commands.recv())
                if self.added and self.queue_is_full(frame):
                    out += self.step()  # those that have just come may start
                out += self.obey(frame)
            if self.engine.has_work:
                out += self.step()
                self.meter.tick()
            if out:
                events.send(self.pack(out))

    def queue_is_full(self, commands: list) -> bool:
        """Whether a frame holds more requests than may wait now."""
        new = sum(isinstance(command, Request) for command in commands)
        if self.max_queued is None or not new:
            return False
        waiting = self.engine.stats()["waiting"]
        return waiting > 0 and waiting + new > self.max_queued

    def obey(self, commands: list) -> list:
        """Carry out one frame. Its requests are one call: where one is refused, none stays."""
        if self.queue_is_full(commands):
            return [Rejected(rid=commands[0].rid, status=503, message="the queue is full: as many requests wait as "
                             f"--max-queued-requests allows ({self.max_queued}); try again later")]
        out: list = []
        added: list[str] = []
        for command in commands:
            try:
                if isinstance(command, Request):
                    self.engine.add(command)
                    added.append(command.rid)
                elif isinstance(command, Abort):
                    for rid in command.rids:
                        self.engine.abort(rid)
                        self.alive.discard(rid)
                elif command.verb == "probe":
                    self.probe(command.id)
                else:
                    out.append(Reply(command.id, self.answer(*command.verb.split())))
            except Exception as error:  # whatever it was, it is the sender's affair; the others go on
                if isinstance(command, Request):
                    return self._refuse(command, added, error)
                log.exception("a command failed")
                if isinstance(command, Control):
                    out.append(Reply(command.id, None))
        self.alive.update(added)
        self.added = self.added or bool(added)
        return out

    def answer(self, verb: str, *numbers: str) -> Any:
        """What the engine says to one of its own verbs, which may come with numbers: "tree_view 500 60"."""
        if verb not in VERBS:
            raise ValueError(f"the verb {verb!r} is unknown, expected one of {', '.join(VERBS)}")
        return self.stats() if verb == "stats" else getattr(self.engine, verb)(*map(int, numbers))

    def _refuse(self, request: Request, added: list[str], error: Exception) -> list[Rejected]:
        for rid in added:
            self.engine.abort(rid)
        if isinstance(error, RequestError):
            return [Rejected(rid=request.rid, message=error.message, param=error.param, status=error.status)]
        log.exception("a request was not taken", exc_info=error)
        return [Rejected(rid=request.rid, message=f"the engine failed on this request: {error}", status=500)]

    def step(self) -> list[Chunk | Reply]:
        """One step. The engine answers for its own failures; should one get through, its requests get the error, and the books are
        proved: an engine whose books are wrong must not go on."""
        self.added = False
        try:
            chunks = self.engine.step()
        except Exception as error:
            log.exception("a step failed")
            chunks = [Chunk(rid=rid, finish_reason="error", error=f"the engine failed: {error}") for rid in sorted(self.alive)]
            for rid in self.alive:
                self.engine.abort(rid)
            self.engine.check()
        self.alive.difference_update(chunk.rid for chunk in chunks if chunk.finish_reason)
        return self._answer_probes(chunks) if self.probes or any(chunk.rid == PROBE for chunk in chunks) else chunks

    # ---- health

    def probe(self, number: int) -> None:
        """Promise an answer to Control `number` as soon as the engine has made a token: anyone's if it is at work, else one that is
        made for nothing else, from a prompt of one token in a namespace that no client can name."""
        self.probes.append(number)
        self.tokens_before = self.engine.stats()["output_tokens"]
        if not self.engine.makes_tokens:
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            self.engine.add(Request(rid=PROBE, prompt_ids=[0], params=params, namespace="\0\0" + PROBE, priority=INT_MAX))
            self.alive.add(PROBE)

    def _answer_probes(self, chunks: list[Chunk]) -> list[Chunk | Reply]:
        own = [chunk for chunk in chunks if chunk.rid == PROBE and chunk.finish_reason]
        self.probed += len(own)
        healthy = self.engine.stats()["output_tokens"] > self.tokens_before
        out: list[Chunk | Reply] = [chunk for chunk in chunks if chunk.rid != PROBE]
        if healthy or any(chunk.finish_reason == "error" for chunk in own):
            out += [Reply(number, healthy or None) for number in self.probes]
            self.probes = []
        elif self.probes and not self.engine.makes_tokens:
            self.probe(self.probes.pop())  # all that it waited for was aborted
        return out

    def stats(self) -> dict:
        """The engine's, without what it did for probes: a prompt of one token and one token of output each."""
        counts = self.engine.stats()
        for name in ("prompt_tokens", "output_tokens", "computed_tokens", "finished"):
            counts[name] -= self.probed
        return counts

    # ---- frames

    def pack(self, events: list) -> bytes:
        """A frame of events. One that does not fit the wire becomes an error of its request, which is aborted."""
        try:
            return encode(events)
        except Exception:
            return encode([self._fitting(event) for event in events])

    def _fitting(self, event: Chunk | Rejected | Reply) -> Chunk | Rejected | Reply:
        try:
            encode(event)
            return event
        except Exception as error:
            log.exception("an event does not fit the wire")
            if isinstance(event, Reply):
                return Reply(event.id, None)
            self.engine.abort(event.rid)
            self.alive.discard(event.rid)
            return Chunk(rid=event.rid, finish_reason="error", error=f"the engine failed on this request: {error}")


def describe(engine: Any) -> Ready:
    """What the parent must know about an engine."""
    tokenizer = engine.tokenizer
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return Ready(model=engine.config.model, path=str(engine.path), vocab_size=engine.vocab_size, context_len=engine.context_len,
                 max_total_tokens=engine.stats()["kv_capacity"], end_ids=list(engine.end_ids), special_tokens=special,
                 tokenizer_json=tokenizer.backend_tokenizer.to_str(), chat_template=tokenizer.chat_template,
                 generation_defaults=engine.generation_defaults, config=engine.in_force())


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
                 "KV %.0f%% in use, %.0f%% cached%s",
                 new["running"], new["waiting"], (new["output_tokens"] - old["output_tokens"]) / seconds,
                 (new["computed_tokens"] - old["computed_tokens"]) / seconds, 100 * hits / max(prompts, 1),
                 100 * (slots - new["kv_free"] - new["kv_cached"]) / slots, 100 * new["kv_cached"] / slots, accepted(old, new))
        self.said_at = self.since = now
        self.counts = new


def accepted(old: dict, new: dict) -> str:
    """What became of the guesses between two stats, in SGLang's words; empty where no step could have had some."""
    if "spec_verify_ct" not in new:
        return ""
    steps, proposed, correct = (new[f"spec_{name}"] - old[f"spec_{name}"] for name in ("verify_ct", "num_proposed_drafts", "num_correct_drafts"))
    return f" | accept len: {1 + correct / steps:.2f}, accept rate: {correct / max(proposed, 1):.2f}" if steps else ""


def go_with_parent(directory: str) -> None:
    """Wait for the end of stdin, which the parent holds open, and end this process with it."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def engine_main(directory: str, make_engine: Callable[[], Any], max_queued: int | None = None) -> int:
    """The engine process from its beginning. Returns 1, after a sentence, where the engine cannot be made."""
    threading.Thread(target=go_with_parent, args=(directory,), daemon=True).start()
    try:
        engine = make_engine()
    except Exception as error:
        expected = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("nano_sgl")
        log.error("cannot start: %s", error, exc_info=not expected)
        return 1
    Child(engine, max_queued).run(directory)
    return 0


def _demo() -> None:
    """A child that ends before it was ready, as the parent sees it."""
    async def watch() -> None:
        engine = EngineProcess([sys.executable, "-c", "import time; time.sleep(0.3); raise SystemExit(7)"])
        await engine.start()
        print(f"{engine.state}: {engine.why}")
        await engine.dead.wait()
        print(f"{engine.state}: {engine.why}")
        await engine.stop()
    asyncio.run(watch())


if __name__ == "__main__":
    _demo()
