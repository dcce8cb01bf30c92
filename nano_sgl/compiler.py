"""Compiler: grammars and their rows are made beside the loop, which never waits for one.

A step of the engine takes milliseconds. A grammar takes one to compile, but seconds if somebody is unkind; a row takes a tenth, but now and then a
half second; and the tree of a large vocabulary takes more than all of that, once. So the loop asks, goes on, and looks again a step later:

    loop       submit("regex", r"\\d+") -> future        want(grammar, state)          prefetch(grammar, state)
                    |                                        |  first in line               |  when nothing is wanted
    compiles   [\\d+] [json_object] ..                 rows   [17] [42]                 ahead  [newest .. oldest]
                    v                                        v                              v
    threads    compile, row of the start                the builder: a row, or what a state most likely leads to
                    v
    cache      (kind, text) -> future                   of the tables in use; least recently asked for goes first

Names. A *run* is what a thread is busy with. It is *lost* when it has taken longer than `timeout_s`. *Shared* are the tables of grammar.py and their
lock; a vocabulary has one in use.

Invariants. Equal requests share one future, while it compiles and as long as it is cached, refusals too. A grammar that comes out of a
future has the row of its start. A row is queued once, whoever asks how often; if it cannot be built, `want` says so from then on. The cache
holds nothing of tables that are no longer in use, or are full, so that those are freed with their last request.

Lost runs. A thread of Python cannot be stopped, and this one may sit on the lock of its tables. It is left to itself: a new thread takes its
place (while less than MAX_LOST are lost), new grammars begin new tables, and rows of the old ones are refused until it comes back. This is a last
resort, for the grammars at fault share their tables with others; what bounds a compile properly are the limits of rules.py, nodes.py and grammar.py.

Cost. `submit` hashes the text; `want` and `prefetch` take a lock that nobody holds for long. What cannot be helped is that Python runs one
thread at a time: the loop asks for its turn after every kernel, and by default waits 5 ms for it. Hence SWITCH_S and the pause of full garbage
collections, both only while something is being made. Where it stops: compiles and rows of one vocabulary take turns at its lock, so a row may wait
for a whole compile. Source: the pool is that of any executor; switching more often against the convoy of Beazley (2010).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from . import grammar as grammars
from .grammar import INDEX, Grammar, Shared
from .rules import GrammarError
from .vocab import Vocab

log = logging.getLogger("nano_sgl")

MAX_CACHED_CHARS = 4 << 20      # of all cached texts
MAX_AHEAD = 256                 # rows and expansions that nobody waits for
MAX_LOST = 4                    # threads that are given up before no more are started
CLOSE_S = 1.0                   # `close` waits so long for threads that are at work
NAP_S = 30.0                    # a thread without work looks up so often: see `_Lines`
# Measured: steps of 60 kernels of 0.2 ms, 16 ms alone, beside a compile of two seconds, on two busy cores; median and longest step:
#     by default 220 to 770 and 1,230 to 1,590 ms; SWITCH_S 0.2 ms 70 and 575; 0.1 ms without full collections 28 to 56 and 68 to 84
# The compile itself takes no longer, and without those collections only half as long.
SWITCH_S = 1e-4
WARM = (("regex", r"(?i)\d\w\s\p{L}", b""), ("json_object", None, b'{"a'))     # tables of characters, 0.1 s; the inside of a JSON string
COMPILE, BUILD = "compile", "row"
COUNTED = ("compiled", "refused", "cache_hits", "compile_s", "rows_wanted", "rows_prefetched", "rows_failed", "build_s")


# ------------------------------------------------------------------------------------------------------------------------- the loop

class Compiler:
    """Compiles grammars and builds rows in the background. `submit`, `want` and `prefetch` return at once, `wait` does not; any thread.

    `vocab` is called once, in the background, when it is first needed. `timeout_s` is for one compile or row, from when it has begun. Threads are
    started at the first request, and end with the Compiler: at `close`, at the end of a `with`, or when nobody holds it any more.
    """

    def __init__(self, vocab: Callable[[], Vocab], *, whitespace: str = "fixed", threads: int = 2, max_cached: int = 128, timeout_s: float = 30.0):
        """whitespace: the layout of JSON; threads: that compile, one more builds rows; max_cached: grammars and refusals, 0: none."""
        self.whitespace, self.threads, self.max_cached, self.timeout_s = whitespace, threads, max_cached, timeout_s
        self._make_vocab, self._vocab_lock = vocab, threading.Lock()
        self._vocab: Vocab | Exception | None = None
        self._lines = _Lines()
        self._lock = self._lines.lock
        self._in_flight: dict[Hashable, Future[Grammar]] = {}
        self._cache: OrderedDict[Hashable, tuple[Future[Grammar], int]] = OrderedDict()     # with the length of the text
        self._cached_of: Shared | None = None
        self._cached_chars = 0
        self._states: weakref.WeakKeyDictionary[Grammar, _States] = weakref.WeakKeyDictionary()
        self._runs: list[_Run] = []
        self._lost: list[_Run] = []
        self._crew = Counter()                      # threads that take from each line
        self._threads: list[threading.Thread] = []
        self._warmed = False
        self._finished = threading.Event()
        self._counts = Counter()
        self._shut = weakref.finalize(self, _shut, self._lines, self._finished)     # closed, collected or at exit: once

    def submit(self, kind: str, text) -> Future[Grammar]:
        """The grammar to come, or the GrammarError that it is refused with; any other exception is our fault. Equal requests share it, so it is not
        to be cancelled. After `close` it is. A text that is no str must not change any more."""
        key, chars = _key(kind, text)
        self._look_after()
        with self._lock:
            future = None if self._lines.closed else self._known(key)
            if future is not None:
                self._counts["cache_hits"] += 1
                return future
            future = Future()
            if self._lines.closed:
                future.cancel()
                return future
            self._start()
            if not self._crew[COMPILE]:
                self._counts["refused"] += 1
                future.set_exception(_busy())
                return future
            if key is not None:
                self._in_flight[key] = future
            self._lines.add_compile(_Job(kind, text, key, chars, future))
            return future

    def expired(self, future: Future) -> bool:
        """Whether its compile has begun, `timeout_s` ago or more, and is not done: answer its requests with an error. It may still end some day."""
        self._look_after()
        with self._lock:
            return not future.done() and any(run.future is future for run in self._lost)

    def want(self, grammar: Grammar, state: int) -> GrammarError | None:
        """The row of this state is needed now: why it cannot be had, or None, and it is built as soon as possible if it is not there."""
        index = state & INDEX
        if grammar.tables.rows[index] is not None:
            return None
        known = self._states.get(grammar)
        if known is not None and index in known.errors:
            return known.errors[index]
        self._look_after()
        with self._lock:
            if self._lines.closed:
                return GrammarError("grammars are no longer made: the engine was shut down", "grammar")
            self._start()
            if not self._crew[BUILD] or self._is_stuck(grammar):
                return _busy()
            self._lines.add_wanted(_Row(grammar, index))
        return None

    def prefetch(self, grammar: Grammar, state: int, count: int = 4) -> None:
        """When no row is wanted, build those of the `count` most likely successors of a state, whose own row exists; once for each state."""
        index = state & INDEX
        known = self._states.get(grammar)
        if known is not None and index in known.expanded or grammar.tables.rows[index] is None:
            return
        with self._lock:
            if self._lines.closed or self._is_stuck(grammar):
                return
            self._start()
            self._states_of(grammar).expanded.add(index)
            self._ahead([_Expand(grammar, state, count)])

    def wait(self, seconds: float) -> None:
        """Until some future or row is finished, at most so long; not at all if one was since the last `wait`. For one thread, one that has nothing
        else to do."""
        self._look_after()
        if self._finished.wait(seconds):
            self._finished.clear()

    def warm(self) -> None:
        """Build the vocabulary and what first requests would wait for. The first `submit` does this, behind itself."""
        with self._lock:
            if not self._warmed and not self._lines.closed:
                self._warmed = True
                self._start()
                self._lines.add_compile(None)

    def stats(self) -> dict[str, float]:
        """All begin with `grammar_`. So many, ever: compiled, refused, cache_hits (shared with a request in flight, too), rows_wanted,
        rows_prefetched, rows_failed; compile_s, build_s: seconds of all of them. At present: cached grammars and refusals; compiles_queued,
        rows_queued, rows_ahead; runs, lost_runs; rows, table_bytes of the tables in use."""
        with self._lock:
            lines, shared = self._lines, self._vocab.shared if isinstance(self._vocab, Vocab) else None
            found = {name: self._counts[name] for name in COUNTED} | dict(
                cached=len(self._cache), compiles_queued=len(lines.compiles), rows_queued=len(lines.wanted), rows_ahead=len(lines.ahead),
                runs=len(self._runs), lost_runs=len(self._lost),
                rows=len(shared.tables.built) if shared else 0, table_bytes=shared.tables.nbytes if shared else 0)
        return {f"grammar_{name}": value for name, value in found.items()}

    def close(self) -> None:
        """Cancel what has not begun and end the threads. One that is at work ends when it is done: that is not waited for long."""
        end = time.monotonic() + CLOSE_S * self._shut.alive     # what was closed before is not waited for again
        self._shut()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    # ---- the cache

    def _known(self, key: Hashable) -> Future[Grammar] | None:
        """The future of an equal request."""
        if key is None:
            return None
        self._drop_stale()
        future = self._in_flight.get(key)
        if future is None and key in self._cache:
            self._cache.move_to_end(key)
            future = self._cache[key][0]
            if future.done() and not future.cancelled() and future.exception() is not None:
                future.exception().__traceback__ = None     # which every `result()` makes longer
        return None if future is None or future.cancelled() else future

    def _store(self, job: _Job) -> None:
        self._cache[job.key] = job.future, job.chars
        self._cached_chars += job.chars
        while len(self._cache) > self.max_cached or self._cached_chars > MAX_CACHED_CHARS:
            self._cached_chars -= self._cache.popitem(last=False)[1][1]

    def _drop_stale(self) -> None:
        """Full tables take no more grammars, but rows until they burst; so their grammars are compiled anew, which begins new ones."""
        shared = self._vocab.shared if isinstance(self._vocab, Vocab) else None
        if shared is not self._cached_of or shared is not None and shared.full:
            self._cache.clear()
            self._cached_of, self._cached_chars = shared, 0

    # ---- threads

    def _start(self) -> None:
        """As many threads as there should be, while not too many are lost."""
        for line, count, take in ((COMPILE, self.threads, self._lines.take_compile), (BUILD, 1, self._lines.take_row)):
            while self._crew[line] < count and len(self._lost) < MAX_LOST:
                thread = threading.Thread(target=_serve, args=(weakref.ref(self), take), name=f"nano_sgl grammar {line}", daemon=True)
                self._threads = [other for other in self._threads if other.is_alive()] + [thread]
                thread.start()
                self._crew[line] += 1

    def _look_after(self) -> None:
        """Give up runs that take too long."""
        if not self._runs:
            return
        stranded: list[_Job] = []
        with self._lock:
            late = [run for run in self._runs if time.monotonic() - run.began > self.timeout_s]
            for run in late:
                log.warning("a grammar's %s has run for %.0f s and is left to itself", run.line, self.timeout_s)
                self._runs.remove(run)
                self._lost.append(run)
                self._crew[run.line] -= 1
                _FULL_GC.release()
                vocab = run.shared.tables.vocab
                if vocab.shared is run.shared:
                    vocab.shared = None
            if late:
                self._drop_stale()
                self._start()
            if not self._crew[COMPILE]:
                stranded = [job for job in self._lines.compiles if job is not None]
                self._lines.compiles.clear()
                for job in stranded:
                    self._in_flight.pop(job.key, None)
                    self._counts["refused"] += 1
        for job in stranded:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_busy())
                self._finished.set()

    def _is_stuck(self, grammar: Grammar) -> bool:
        """Whether its tables may be locked for good."""
        return any(run.shared is grammar.shared for run in self._lost)

    @contextlib.contextmanager
    def _run(self, line: str, shared: Shared, future: Future | None = None) -> Iterator[_Run]:
        """A compile or a row: bounded in time, and considerate of the loop."""
        run = _Run(line, shared, time.monotonic(), future)
        with self._lock:
            self._runs.append(run)
        _SWITCHING.hold()
        _FULL_GC.hold()
        try:
            yield run
        finally:
            _SWITCHING.release()
            with self._lock:
                if run in self._lost:
                    run.lost = True
                    self._lost.remove(run)
                else:
                    self._runs.remove(run)
                    _FULL_GC.release()

    def _work(self, task: _Job | _Row | _Expand | None) -> bool:
        """What a thread took from its line. False: another thread has taken its place."""
        if isinstance(task, _Row):
            return self._build(task)
        if isinstance(task, _Expand):
            return self._expand(task)
        return self._compile(task) if task else self._do_warm()

    # ---- compile

    def _vocabulary(self) -> Vocab | Exception:
        """It, or what there is instead."""
        with self._vocab_lock:
            if self._vocab is None:
                with _SWITCHING, _FULL_GC:
                    self._vocab = _attempt("the vocabulary", self._make_vocab)
                self._make_vocab = None
            return self._vocab

    def _tables(self, vocab: Vocab) -> Shared:
        """Those in use. `compile` would make new ones, too, but each of two threads its own."""
        with self._vocab_lock:
            if vocab.shared is None or vocab.shared.full:
                vocab.shared = Shared(vocab)
            return vocab.shared

    def _make(self, kind: str, text, vocab: Vocab) -> Grammar:
        made = grammars.compile(kind, text, vocab, whitespace=self.whitespace)
        made.row(made.start)
        return made

    def _compile(self, job: _Job) -> bool:
        stays, shared, vocab = True, None, None
        if not job.future.set_running_or_notify_cancel():
            made = None
        elif isinstance(vocab := self._vocabulary(), Exception):
            made = vocab
        else:
            began, shared = time.perf_counter(), self._tables(vocab)
            with self._run(COMPILE, shared, job.future) as run:
                made = _attempt(f"a grammar of kind {job.kind!r}", lambda: self._make(job.kind, job.text, vocab))
            stays = not run.lost
        with self._lock:
            if self._in_flight.get(job.key) is job.future:
                del self._in_flight[job.key]
            self._drop_stale()
            if shared is not None:
                self._counts["compile_s"] += time.perf_counter() - began
                if job.key is not None and shared is vocab.shared and isinstance(made, (Grammar, GrammarError)):
                    self._store(job)
            self._counts["compiled"] += isinstance(made, Grammar)
            self._counts["refused"] += isinstance(made, Exception)
        if isinstance(made, Exception):
            job.future.set_exception(made)
        elif made is not None:
            job.future.set_result(made)
        self._finished.set()
        self.warm()
        return stays

    def _do_warm(self) -> bool:
        vocab = self._vocabulary()
        if isinstance(vocab, Exception):
            return True

        def make(kind: str, text: str | None, begin: bytes) -> None:
            made = self._make(kind, text, vocab)
            state = made.step_bytes(made.start, begin)
            if state is not None:
                made.row(state)

        with self._run(COMPILE, self._tables(vocab)) as run:
            for each in WARM:
                _attempt("warming up", lambda: make(*each))
        return not run.lost

    # ---- rows

    def _states_of(self, grammar: Grammar) -> _States:
        known = self._states.get(grammar)
        if known is None:
            known = self._states[grammar] = _States()
        return known

    def _ahead(self, tasks: list[_Row | _Expand]) -> None:
        """The last one is the next to be done."""
        for dropped in self._lines.add_ahead(tasks):
            if isinstance(dropped, _Expand):
                self._states_of(dropped.grammar).expanded.discard(dropped.state & INDEX)

    def _build(self, task: _Row) -> bool:
        grammar, index = task
        stays, error, began = True, None, time.perf_counter()
        built = grammar.tables.rows[index] is None and not self._is_stuck(grammar)
        if built:
            with self._run(BUILD, grammar.shared) as run:
                made = _attempt("a row of a grammar", lambda: grammar.row(index))
            if isinstance(made, Exception):
                error = made if isinstance(made, GrammarError) else GrammarError(f"it failed with {type(made).__name__}", "grammar")
            stays = not run.lost
        with self._lock:
            wanted = self._lines.done(task)
            if error is not None:
                self._states_of(grammar).errors[index] = error
            if built:
                self._counts["build_s"] += time.perf_counter() - began
                self._counts["rows_failed" if error else "rows_wanted" if wanted else "rows_prefetched"] += 1
        self._finished.set()
        return stays

    def _expand(self, task: _Expand) -> bool:
        grammar, state, count = task
        with self._run(BUILD, grammar.shared) as run:
            edges = _attempt("what follows a state", lambda: grammar.edges(state))
        if isinstance(edges, list):
            rows = dict.fromkeys(_Row(grammar, to & INDEX) for to, _ in edges[:count])
            with self._lock:
                failed = self._states_of(grammar).errors
                self._ahead([row for row in reversed(rows) if grammar.tables.rows[row.index] is None and row.index not in failed])
        return not run.lost


# ------------------------------------------------------------------------------------------------------------------- lines of tasks

@dataclass(eq=False)
class _Job:
    """A compile. key: of equal requests, None if it cannot be shared; chars: the length of its text."""
    kind: str
    text: object
    key: Hashable
    chars: int
    future: Future


class _Row(NamedTuple):
    """To build the row of a state."""
    grammar: Grammar
    index: int


class _Expand(NamedTuple):
    """To build rows of the `count` most likely successors of a state."""
    grammar: Grammar
    state: int
    count: int


@dataclass(eq=False)
class _Run:
    """What a thread is busy with. lost: its thread has been replaced meanwhile."""
    line: str
    shared: Shared
    began: float
    future: Future | None
    lost: bool = False


@dataclass
class _States:
    """What is known of a grammar's states, by index: rows that cannot be built, and states whose successors were prefetched."""
    errors: dict[int, GrammarError] = field(default_factory=dict)
    expanded: set[int] = field(default_factory=set)


class _Lines:
    """What is to be done, and all that a thread holds while it waits: not the Compiler, which may then be collected.

    The Compiler may be collected in any line of any thread, also in one that holds this lock. So the lock can be taken again, closing changes
    nothing that a thread may be looking at, and as it may come between looking and falling asleep, no sleep is for ever.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.closed = False
        self.compiles: deque[_Job | None] = deque()             # None: warm up
        self.wanted: OrderedDict[_Row, None] = OrderedDict()
        self.ahead: OrderedDict[_Row | _Expand, None] = OrderedDict()
        self.building: dict[_Row, bool] = {}                    # whether it is wanted
        self._compiles, self._rows = threading.Condition(self.lock), threading.Condition(self.lock)

    def add_compile(self, job: _Job | None) -> None:
        with self.lock:
            self.compiles.append(job)
            self._compiles.notify()

    def add_wanted(self, row: _Row) -> None:
        """Nothing, if it is there already."""
        with self.lock:
            if row in self.building:
                self.building[row] = True
            elif row not in self.wanted:
                self.ahead.pop(row, None)
                self.wanted[row] = None
                self._rows.notify()

    def add_ahead(self, tasks: list[_Row | _Expand]) -> list[_Row | _Expand]:
        """The oldest, which had to make room."""
        with self.lock:
            for task in tasks:
                if task not in self.wanted and task not in self.building:
                    self.ahead[task] = None
                    self.ahead.move_to_end(task)
            self._rows.notify()
            return [self.ahead.popitem(last=False)[0] for _ in range(len(self.ahead) - MAX_AHEAD)]

    def take_compile(self) -> list[_Job | None]:
        """The next, alone in a list; empty: closed."""
        with self.lock:
            while not self.closed and not self.compiles:
                self._compiles.wait(NAP_S)
            return [] if self.closed else [self.compiles.popleft()]

    def take_row(self) -> list[_Row | _Expand]:
        """What was wanted first, else what was added last, alone in a list; empty: closed. A row is `building` until it is `done`."""
        with self.lock:
            while not self.closed and not self.wanted and not self.ahead:
                self._rows.wait(NAP_S)
            if self.closed:
                return []
            is_wanted = bool(self.wanted)
            task = self.wanted.popitem(last=False)[0] if is_wanted else self.ahead.popitem()[0]
            if isinstance(task, _Row):
                self.building[task] = is_wanted
            return [task]

    def done(self, row: _Row) -> bool:
        """Whether somebody wanted it."""
        with self.lock:
            return self.building.pop(row)

    def close(self) -> list[_Job]:
        """No more is taken. What was never begun."""
        with self.lock:
            self.closed = True
            self._compiles.notify_all()
            self._rows.notify_all()
            return [job for job in self.compiles if job is not None]


def _serve(compiler: weakref.ref[Compiler], take: Callable[[], list]) -> None:
    """A thread's life."""
    while task := take():
        here = compiler()
        if here is None or not here._work(task.pop()):
            return
        del here, task


def _shut(lines: _Lines, finished: threading.Event) -> None:
    for job in lines.close():
        job.future.cancel()
    finished.set()


# ------------------------------------------------------------------------------------------------------------------------ its parts

def _key(kind: object, text: object) -> tuple[Hashable, int]:
    """(what equal requests have in common, None if that cannot be said; the length of the text)."""
    if not isinstance(kind, str):
        return None, 0
    if text is None or isinstance(text, str):
        return (kind, text), len(text or "")
    if isinstance(text, (list, tuple)) and set(map(type, text)) == {str}:
        return (kind, tuple(text)), sum(map(len, text))
    try:
        spelled = json.dumps(text)                  # in the order of its keys, which may mean something
    except (TypeError, ValueError, RecursionError):
        return None, 0
    return (kind, "json", spelled), len(spelled)


def _attempt(what: str, make: Callable):
    """What it returns, or the exception that it raises. One that is no GrammarError is our own fault."""
    try:
        return make()
    except Exception as error:
        if not isinstance(error, GrammarError):
            log.exception("%s could not be made", what)
        error.__traceback__ = error.__context__ = error.__cause__ = None        # or it would hold all that the compile had in hand
        return error


def _busy() -> GrammarError:
    return GrammarError("grammars that take too long to compile are in the way; try again later", "grammar")


class _Held:
    """A setting of the whole process that has another value while somebody needs that. If others change it meanwhile, it is theirs."""

    def __init__(self, get: Callable, put: Callable, lowered: Callable):
        self._get, self._put, self._lowered = get, put, lowered
        self._lock, self._users = threading.Lock(), 0
        self._before = self._ours = None

    def hold(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = self._get()
                self._put(self._lowered(self._before))
                self._ours = self._get()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._get() == self._ours:
                self._put(self._before)

    def __enter__(self) -> None:
        self.hold()

    def __exit__(self, *error) -> None:
        self.release()


_SWITCHING = _Held(sys.getswitchinterval, sys.setswitchinterval, lambda before: min(before, SWITCH_S))
# A full collection looks at every object of the process, 0.2 s in which no thread runs; a compile that makes many objects would cause several.
_FULL_GC = _Held(gc.get_threshold, lambda values: gc.set_threshold(*values), lambda before: (*before[:2], 1_000_000))


def _demo() -> None:
    """A loop of steps of 2 ms, three requests, and when each of them has what it needs."""
    vocab = Vocab([bytes([b]) for b in range(256)] + [b"ab", b"abc", b'": "', b"true", b"null", None], end_ids=[261])
    with Compiler(lambda: vocab) as compiler:
        asked = [("regex", "[a-f]{1,9}-(abc)+"), ("json_object", None), ("regex", r"(a)\1"), ("regex", "[a-f]{1,9}-(abc)+")]
        futures = [compiler.submit(*each) for each in asked]
        print("the last is the first:", futures[3] is futures[0])
        todo = dict(enumerate(futures[:3]))
        for step in range(1000):
            time.sleep(0.002)
            for i, future in list(todo.items()):
                if future.done():
                    del todo[i]
                    print(f"step {step:3}: {asked[i]!s:35}", future.exception() or f"starts in state {future.result().start}")
            if not todo:
                break
        grammar = futures[1].result()
        compiler.prefetch(grammar, grammar.start)
        state = grammar.step(grammar.start, ord("{"))
        for step in range(1000):
            if grammar.tables.rows[state & INDEX] is not None:
                break
            assert compiler.want(grammar, state) is None
            compiler.wait(0.002)
        print(f"the row behind {{ was there after {step} steps")
        print(", ".join(f"{name[8:]} {value:.4g}" for name, value in compiler.stats().items() if value))


if __name__ == "__main__":
    _demo()
