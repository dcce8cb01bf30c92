"""Compiler: grammars and their rows are made beside the loop, which never waits for one.

A step of the engine takes milliseconds. A grammar takes one to compile, but seconds if somebody is unkind; a row takes a tenth, but now and then a
half second; and the tree of a large vocabulary takes more than all of that, once. So the loop asks, goes on, and looks again a step later:

    loop       submit("regex", r"\\d+") -> future        want(grammar, state)          prefetch(grammar, state)
                    |                                        |  first in line               |  when nothing is wanted
    compiles   [\\d+] [json_object] ..                 rows   [17] [42]                 ahead  [newest .. oldest]
                    v                                        v                              v
    threads    compile, row of the start                the builder: a row, or what a state most likely leads to
                    v
    cache      (kind, text, options) -> future          of the tables in use; least recently asked for goes first

*Tables* are those of grammar.py, with their lock: `Shared`. A vocabulary has one in use.

Invariants. Equal requests share one future, while it compiles and as long as it is cached, refusals too. What nobody waits for is not compiled,
and stopped if it has begun, or once a row that is being made is there. However many long texts there are, short ones get through: long ones have
LARGE_THREADS threads and no more. A grammar that comes out of a future has the row of its start. A row is queued once, whoever asks how often; if
it cannot be built, `want` says so from then on. The cache holds nothing of tables that are no longer in use, or are full, so that those are freed
with their last request.

Time. A thread of Python cannot be stopped, but whatever may take long looks at its thread's clock (rules.py) and gives up: a compile after
`timeout_s`, a row after grammar.py's MAX_ROW_S. That is a refusal like any other, and is kept like one.

Cost. `submit` hashes the text; `want` and `prefetch` take a lock that nobody holds for long. What cannot be helped is that Python runs one
thread at a time: the loop asks for its turn after every kernel, and by default waits 5 ms for it. Hence SWITCH_S and the pause of full garbage
collections, both only while something is being made. Where it stops: compiles and rows of one vocabulary take turns at its lock, so several at
once are no sooner done than one by one. Source: the pool is that of any executor; switching more often is against the convoy of Beazley (2010).
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from . import grammar as grammars
from .grammar import INDEX, Grammar, Shared
from .jump import build_chain
from .rules import GrammarError, time_limit
from .vocab import Vocab

log = logging.getLogger("nano_sgl")

MAX_CACHED_CHARS = 4 << 20      # of all cached texts. One of more than an eighth is not kept: many others would have to go
LARGE, LARGE_THREADS = 1 << 16, 2       # characters of a long text; how many are compiled at once
MAX_CACHED_PLACES = 1_000_000   # of all cached grammars, which grow as they are used: 0.5 GB
MAX_AHEAD = 256                 # rows and expansions that nobody waits for
CLOSE_S = 1.0                   # `close` waits so long for threads that are at work
NAP_S = 30.0                    # a thread without work looks up so often: see `_Todo`
# Measured: steps of 60 kernels of 0.2 ms, 16 ms alone, beside a compile of two seconds, on two busy cores; median and longest step:
#     by default 220 to 770 and 1,230 to 1,590 ms; SWITCH_S 0.2 ms 70 and 575; 0.1 ms without full collections 28 to 56 and 68 to 84
# The compile itself takes no longer, and without those collections only half as long.
SWITCH_S = 1e-4
# Tables of characters, 0.1 s; a word; the inside of a JSON string; what schemas are made of
COMMON = [{"type": "string", "format": name} for name in ("date-time", "date", "time", "email", "uri", "uuid")]
COMMON += [{"type": "number"}, {"type": "integer"}, {"type": "boolean"}, {"type": "array", "items": {"type": "string"}}]
WARM = (("regex", r"(?i)\d\w\s\p{L}", b""), ("regex", r"\w+", b""), ("json_object", None, b'{"a'),
        ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": one for i, one in enumerate(COMMON)}}), b'{"'))
CHAIN = -1
COUNTED = ("compiled", "refused", "cache_hits", "compile_s", "rows_wanted", "rows_prefetched", "rows_failed", "build_s")


class Compiler:
    """Compiles grammars and builds rows in the background. `submit`, `want` and `prefetch` return at once, `wait` does not; any thread.

    `vocab` is called once, in the background, when it is first needed. Threads are started at the first request, and end with the Compiler: at
    `close`, at the end of a `with`, or when nobody holds it any more.
    """

    def __init__(self, vocab: Callable[[], Vocab], *, whitespace: str = "fixed", threads: int = 8, max_cached: int = 128, timeout_s: float = 30.0):
        """whitespace: the layout of JSON; threads: that compile, taking turns, so that a few slow grammars do not hold up the others; one more builds
        rows; max_cached: grammars and refusals, 0: none; timeout_s: of one compile, from when it begins."""
        self.whitespace, self.threads, self.max_cached, self.timeout_s = whitespace, threads, max_cached, timeout_s
        self._make_vocab, self._vocab_lock = vocab, threading.Lock()
        self._vocab: Vocab | Exception | None = None
        self._todo = _Todo()
        self._lock = self._todo.lock                # of all that follows
        self._in_flight: dict[Hashable, Future[Grammar]] = {}
        self._jobs: dict[Future[Grammar], _Job] = {}            # of all in flight, also of those that nobody shares
        self._cache: OrderedDict[Hashable, tuple[Future[Grammar], int]] = OrderedDict()     # with the length of the text
        self._cached_of, self._cached_chars = None, 0
        self._alive: weakref.WeakValueDictionary[Hashable, Grammar] = weakref.WeakValueDictionary()     # in use, cached or not
        self._errors: weakref.WeakKeyDictionary[Grammar, dict[int, GrammarError]] = weakref.WeakKeyDictionary()  # by state: why it has no row
        self._expanded: weakref.WeakKeyDictionary[Grammar, set[int]] = weakref.WeakKeyDictionary()      # states whose successors were prefetched
        self._chained: weakref.WeakKeyDictionary[Grammar, set[int]] = weakref.WeakKeyDictionary()       # states whose chains were asked for
        self._threads: list[threading.Thread] = []
        self._warmed, self._counts = False, dict.fromkeys(COUNTED, 0)
        self._shut = weakref.finalize(self, self._todo.close)       # closed, collected or at exit: once

    def submit(self, kind: str, text, **options) -> Future[Grammar]:
        """The grammar to come, or the GrammarError that it is refused with; any other exception is our fault. options: those of its kind, see
        schema.py. Equal requests share it; after `close` it is cancelled. A text that is no str must not change any more."""
        options = {"whitespace": self.whitespace, **options}
        key, chars = _key(kind, text, options)
        with self._lock:
            shared = self._in_use()
            future, _ = self._cache.get(key) or (self._in_flight.get(key), chars)
            if future is None and (alive := self._alive.get(key)) is not None and alive.shared is shared and not shared.full:
                future = Future()
                future.set_result(alive)
            if self._todo.closed:
                future = Future()
                future.cancel()
            elif future is None or future.cancelled():
                future = Future()
                if key is not None:
                    self._in_flight[key] = future
                self._jobs[future] = _Job(kind, text, options, key, chars, future)
                self._todo.compiles.append(self._jobs[future])
                self._wake(self._todo.more_compiles)
            else:
                self._counts["cache_hits"] += 1
                if future in self._jobs:
                    self._jobs[future].wanted += 1
                if key in self._cache:
                    self._cache.move_to_end(key)
                if future.done() and future.exception() is not None:
                    future.exception().__traceback__ = None     # which every `result()` makes longer
            return future

    def abandon(self, future: Future[Grammar]) -> None:
        """One of those who have submitted this does not want it any more. If that was the last one, it is not compiled, or no longer; whoever asks
        again gets another future."""
        with self._lock:
            job = self._jobs.get(future)
            if job is None:
                return
            job.wanted -= 1
            if job.wanted:
                return
            del self._jobs[future]
            if self._in_flight.get(job.key) is future:
                del self._in_flight[job.key]
            job.unwanted.set()
            if future.cancel() and job in self._todo.compiles:
                self._todo.compiles.remove(job)

    @property
    def closed(self) -> bool:
        return self._todo.closed

    def want(self, grammar: Grammar, state: int) -> GrammarError | None:
        """The row of this state is needed now: why it cannot be had, or None, and it is built as soon as possible if it is not there."""
        index = state & INDEX
        if grammar.tables.rows[index] is not None:
            return None
        with self._lock:
            error, row, todo = self._errors.get(grammar, {}).get(index), _Row(grammar, index), self._todo
            if error is None and todo.closed:
                error = GrammarError("grammars are no longer made: the engine was shut down", "grammar")
            if error is None and row != todo.building and row not in todo.wanted:
                todo.ahead.pop(row, None)
                todo.wanted[row] = None
                self._wake(todo.more_rows)
            return error

    def prefetch(self, grammar: Grammar, state: int, count: int = 4) -> None:
        """When no row is wanted, build those of the `count` most likely successors of a state, whose own row exists; once for each state."""
        index = state & INDEX
        if not count or grammar.tables.rows[index] is None or index in self._expanded.get(grammar, ()):
            return
        with self._lock:
            if not self._todo.closed:
                self._expanded.setdefault(grammar, set()).add(index)
                self._put_ahead([_Row(grammar, state, count)])

    def jump(self, grammar: Grammar, state: int) -> None:
        """When no row is wanted, find what is forced behind a state, and build the rows there; once for each state."""
        index, asked = state & INDEX, self._chained.setdefault(grammar, set())
        if index not in asked:
            asked.add(index)
            with self._lock:
                if not self._todo.closed:
                    self._put_ahead([_Row(grammar, index, CHAIN)])

    def wait(self, seconds: float) -> None:
        """Until some future or row is finished, at most so long; not at all if one was since the last `wait`. For one thread, one that has nothing
        else to do."""
        if self._todo.finished.wait(seconds):
            self._todo.finished.clear()

    def warm(self) -> None:
        """Build the vocabulary and what first requests would wait for. The first `submit` does this, behind itself."""
        with self._lock:
            if not self._warmed and not self._todo.closed:
                self._warmed = True
                self._todo.compiles.append(None)
                self._wake(self._todo.more_compiles)

    def stats(self) -> dict[str, float]:
        """All begin with `grammar_`. So many, ever: compiled, refused, cache_hits (shared with a request in flight, too), rows_wanted,
        rows_prefetched, rows_failed; compile_s, build_s: seconds of all of them. At present: cached grammars and refusals; compiles_queued,
        rows_queued, rows_ahead; runs: threads at work; rows, table_bytes of the tables in use."""
        with self._lock:
            todo, shared = self._todo, self._in_use()
            found = self._counts | dict(
                cached=len(self._cache), compiles_queued=len(todo.compiles), rows_queued=len(todo.wanted), rows_ahead=len(todo.ahead),
                runs=todo.runs, rows=len(shared.tables.built) if shared else 0, table_bytes=shared.tables.nbytes if shared else 0)
        return {f"grammar_{name}": value for name, value in found.items()}

    def close(self) -> None:
        """Cancel what has not begun and end the threads. One that is at work ends when it is done: that is not waited for long."""
        end = time.monotonic() + CLOSE_S
        self._shut()
        for thread in {*self._threads} - {threading.current_thread()}:
            thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    # ---- what is to be done

    def _wake(self, line: threading.Condition) -> None:
        """A thread that takes from this line. At first there are none: start them, the builder and those that compile."""
        while len(self._threads) <= self.threads:
            compiles = bool(self._threads)
            name, args = f"nano_sgl grammar {'compile' if compiles else 'row'}", (weakref.ref(self), self._todo, compiles)
            thread = threading.Thread(target=_serve, args=args, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        line.notify()

    def _put_ahead(self, rows: list[_Row]) -> None:
        """The last one is the next to be done."""
        todo = self._todo
        for row in rows:
            if row != todo.building and row not in todo.wanted:
                todo.ahead[row] = None
                todo.ahead.move_to_end(row)
        while len(todo.ahead) > MAX_AHEAD:
            dropped, _ = todo.ahead.popitem(last=False)
            if dropped.successors:
                (self._chained if dropped.successors == CHAIN else self._expanded)[dropped.grammar].discard(dropped.state & INDEX)
        self._wake(todo.more_rows)

    # ---- compile

    def _in_use(self) -> Shared | None:
        """The tables in use. Full ones take no more grammars, but rows until they burst; so what is cached of them, or of others, is dropped."""
        shared = self._vocab.shared if isinstance(self._vocab, Vocab) else None
        if shared is not self._cached_of or shared is not None and shared.full:
            self._cache.clear()
            self._cached_of, self._cached_chars = shared, 0
        return shared

    def _tables(self) -> Shared:
        """Those that the next grammar is for. `compile` would make new ones, too, but each of two threads its own."""
        with self._vocab_lock:
            if self._vocab is None:
                self._vocab = _attempt("the vocabulary", self._make_vocab)
                self._make_vocab = None
            if isinstance(self._vocab, Exception):
                raise self._vocab
            if self._vocab.shared is None or self._vocab.shared.full:
                self._vocab.shared = Shared(self._vocab)
            return self._vocab.shared

    def _make(self, kind: str, text, options: dict, shared: Shared, unwanted: threading.Event | None = None) -> Grammar:
        with time_limit(time.monotonic() + self.timeout_s, unwanted=unwanted):
            made = grammars.compile(kind, text, shared.tables.vocab, **options)
            made.row(made.start)
            if made.closing is not None:
                made.closing.row(made.closing.start)
        return made

    def _compile(self, job: _Job) -> None:
        shared = made = None
        if job.future.set_running_or_notify_cancel():
            shared = made = _attempt("what grammars share", self._tables)
        began = time.thread_time()
        if isinstance(shared, Shared):
            made = _attempt(f"a grammar of kind {job.kind!r}", lambda: self._make(job.kind, job.text, job.options, shared, job.unwanted))
        with self._lock:
            self._jobs.pop(job.future, None)
            self._counts["compile_s"] += time.thread_time() - began
            self._counts["compiled"] += isinstance(made, Grammar)
            self._counts["refused"] += isinstance(made, Exception) and not job.unwanted.is_set()
            if job.key is not None and isinstance(made, Grammar):
                self._alive[job.key] = made
            if self._in_flight.get(job.key) is job.future:
                del self._in_flight[job.key]
                if shared is self._in_use() and isinstance(made, (Grammar, GrammarError)) and job.chars <= MAX_CACHED_CHARS // 8:
                    self._cache[job.key] = job.future, job.chars
                    self._cached_chars += job.chars
                while len(self._cache) > self.max_cached or self._cached_chars > MAX_CACHED_CHARS or self._cached_places() > MAX_CACHED_PLACES:
                    self._cached_chars -= self._cache.popitem(last=False)[1][1]
        if isinstance(made, Exception):
            job.future.set_exception(made)
        elif made is not None:
            job.future.set_result(made)
        self._todo.finished.set()
        self.warm()

    def _cached_places(self) -> int:
        """What the cached grammars hold of memory: see Grammar.places."""
        done = (future for future, _ in self._cache.values() if future.done() and future.exception() is None)
        return sum(future.result().places for future in done)

    def _warm_up(self) -> None:
        for kind, text, begin in WARM:
            made = _attempt("a grammar to warm up with", lambda: self._make(kind, text, {}, self._tables()))
            if isinstance(made, Grammar):
                _attempt("a row to warm up with", lambda: made.row(made.step_bytes(made.start, begin) or made.start))

    # ---- rows

    def _build(self, task: _Row, wanted: bool) -> None:
        (grammar, state, successors), began = task, time.thread_time()
        rows, failed = grammar.tables.rows, self._errors.get(grammar, ())
        if successors == CHAIN:
            if _attempt("the chain of a state", lambda: build_chain(grammar, state, lambda: bool(self._todo.wanted))) is None:
                with self._lock:
                    self._todo.ahead[task] = None       # a row was wanted: that comes first
        elif successors:
            edges = _attempt("what follows a state", lambda: grammar.edges(state))
            ahead = [] if isinstance(edges, Exception) else dict.fromkeys(to & INDEX for to, _ in edges[:successors])
            with self._lock:
                self._put_ahead([_Row(grammar, to) for to in reversed(ahead) if rows[to] is None and to not in failed])
        elif rows[state] is None:
            made = _attempt("a row of a grammar", lambda: grammar.row(state))
            with self._lock:
                self._counts["build_s"] += time.thread_time() - began
                if isinstance(made, Exception):
                    error = made if isinstance(made, GrammarError) else GrammarError(f"it failed with {type(made).__name__}", "grammar")
                    self._errors.setdefault(grammar, {})[state] = error
                self._counts["rows_failed" if isinstance(made, Exception) else "rows_wanted" if wanted else "rows_prefetched"] += 1
            time.sleep(1e-6)    # a compile that waits for the tables gets them now: who takes a lock again at once keeps it
        self._todo.finished.set()


# ------------------------------------------------------------------------------------------------------------------------ the lines

@dataclass(eq=False)
class _Job:
    """A compile. key: of equal requests, None if it cannot be shared; chars: the length of its text; wanted: by so many; unwanted: by nobody."""
    kind: str
    text: object
    options: dict
    key: Hashable
    chars: int
    future: Future
    wanted: int = 1
    unwanted: threading.Event = field(default_factory=threading.Event)


class _Row(NamedTuple):
    """To build the row of a state (its index); or, if `successors` is not 0, to have those of so many successors of the state built ahead; or, if
    it is CHAIN, what is forced behind the state."""
    grammar: Grammar
    state: int
    successors: int = 0


class _Todo:
    """What is to be done, and all that a thread holds while it waits: not the Compiler, which may then be collected.

    The Compiler may be collected in any line of any thread, also in one that holds this lock. So the lock can be taken again, closing changes
    nothing that a thread may be looking at, and as it may come between looking and falling asleep, no sleep is for ever.
    """

    def __init__(self):
        self.lock, self.closed, self.runs, self.large = threading.RLock(), False, 0, 0
        self.more_compiles, self.more_rows = threading.Condition(self.lock), threading.Condition(self.lock)
        self.compiles: list[_Job | None] = []                   # None: warm up
        self.wanted: OrderedDict[_Row, None] = OrderedDict()
        self.ahead: OrderedDict[_Row, None] = OrderedDict()
        self.building: _Row | None = None
        self.finished = threading.Event()

    def next_compile(self) -> int | None:
        """Where in `compiles` the next is: the first, but for long ones while enough of these run."""
        return next((i for i, job in enumerate(self.compiles) if self.large < LARGE_THREADS or not _is_large(job)), None)

    def close(self) -> None:
        """Cancel all that has not begun, and end the threads."""
        with self.lock:
            self.closed = True
            self.more_compiles.notify_all()
            self.more_rows.notify_all()
        for job in filter(None, list(self.compiles)):
            job.future.cancel()
        self.finished.set()


def _serve(compiler: weakref.ref[Compiler], todo: _Todo, compiles: bool) -> None:
    """The life of a thread: one that compiles, or the one that builds rows."""
    while True:
        with todo.lock:
            while not (todo.closed or (todo.next_compile() is not None if compiles else todo.wanted or todo.ahead)):
                (todo.more_compiles if compiles else todo.more_rows).wait(NAP_S)
            here, wanted = compiler(), bool(todo.wanted)
            if todo.closed or here is None:
                return
            if compiles:
                task = todo.compiles.pop(todo.next_compile())
                todo.large += _is_large(task)
            else:
                task = todo.building = (todo.wanted if wanted else todo.ahead).popitem(last=not wanted)[0]
            todo.runs += 1
        with _SWITCHING, _FULL_GC:
            if not compiles:
                here._build(task, wanted)
            elif task is None:
                here._warm_up()
            else:
                here._compile(task)
        with todo.lock:
            todo.runs -= 1
            if not compiles:
                todo.building = None
            elif _is_large(task):
                todo.large -= 1
                todo.more_compiles.notify()
        del here, task


# ------------------------------------------------------------------------------------------------------------------------ its parts

def _is_large(job: _Job | None) -> bool:
    return job is not None and job.chars > LARGE


def _key(kind: object, text: object, options: dict) -> tuple[Hashable, int]:
    """(what equal requests have in common, None if that cannot be said; the length of the text)."""
    try:
        spelled = text if isinstance(text, str) else json.dumps(text)       # objects in the order of their keys, which may mean something
        hash(how := tuple(sorted(options.items())))
    except (TypeError, ValueError, RecursionError):
        return None, 0
    return ((kind, isinstance(text, str), spelled, how) if isinstance(kind, str) else None), len(spelled)


def _attempt(what: str, make: Callable):
    """What it returns, or the exception that it raises. One that is no GrammarError is our own fault."""
    try:
        return make()
    except Exception as error:
        if not isinstance(error, GrammarError):
            log.exception("%s could not be made", what)
        error.__traceback__ = error.__context__ = error.__cause__ = None        # or it would hold all that the compile had in hand
        return error


class _Held:
    """A setting of the whole process that has another value while somebody needs that. If others change it meanwhile, it is theirs."""

    def __init__(self, get: Callable, put: Callable, lowered: Callable):
        self._get, self._put, self._lowered = get, put, lowered
        self._lock, self._users = threading.Lock(), 0
        self._before = self._ours = None

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = self._get()
                self._put(self._lowered(self._before))
                self._ours = self._get()

    def __exit__(self, *error) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._get() == self._ours:
                self._put(self._before)


_SWITCHING = _Held(sys.getswitchinterval, sys.setswitchinterval, lambda before: min(before, SWITCH_S))
# A full collection looks at every object of the process, 0.2 s in which no thread runs; a compile that makes many objects would cause several.
_FULL_GC = _Held(gc.get_threshold, lambda values: gc.set_threshold(*values), lambda before: (*before[:2], 1_000_000))


def _demo() -> None:
    """A loop of steps of 2 ms, three requests, and when each of them has what it needs."""
    vocab = Vocab([bytes([b]) for b in range(256)] + [b"ab", b"abc", b'": "', b"true", b"null", None], end_ids=[261])
    with Compiler(lambda: vocab) as compiler:
        asked = [("regex", "[a-f]{1,9}-(abc)+"), ("json_object", None), ("regex", r"(a)\1"), ("regex", "[a-f]{1,9}-(abc)+")]
        futures, step = [compiler.submit(*each) for each in asked], 0
        print("the last is the first:", futures[3] is futures[0])
        todo = dict(zip(futures, asked))
        while todo:
            time.sleep(0.002)
            step += 1
            for future in [future for future in todo if future.done()]:
                print(f"step {step:3}: {todo.pop(future)!s:35}", future.exception() or f"starts in state {future.result().start}")
        grammar = futures[1].result()
        state = grammar.step(grammar.start, ord("{"))
        while grammar.tables.rows[state & INDEX] is None and compiler.want(grammar, state) is None:
            compiler.wait(0.002)
        print(", ".join(f"{name[8:]} {value:.4g}" for name, value in compiler.stats().items() if value))


if __name__ == "__main__":
    _demo()
