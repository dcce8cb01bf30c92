"""Grammars beside the loop: sharing, the cache's bounds, rows that are wanted and rows ahead, time-outs, threads that end."""

import contextlib
import gc
import random
import resource
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from nano_sgl import compiler, grammar, waves, weights
from nano_sgl.compiler import Compiler
from nano_sgl.grammar import INDEX, Grammar
from nano_sgl.rules import GrammarError, tick
from nano_sgl.vocab import Vocab

ROOT = Path(__file__).parent.parent
WORDS = [bytes([b]) for b in range(256)] + [b"ab", b"abc", b"the", b" the", b'": "', b"true", None]


def until(holds, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("nano_sgl grammar")}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Every test ends with the threads and settings that it began with."""
    before, settings = ours(), (sys.getswitchinterval(), gc.get_threshold())
    yield
    assert until(lambda: ours() <= before), ours() - before
    assert (sys.getswitchinterval(), gc.get_threshold()) == settings


@pytest.fixture
def vocab():
    return Vocab(WORDS, end_ids=[len(WORDS) - 1])


@pytest.fixture
def make(vocab):
    """make(...): a Compiler over the small vocabulary, which is closed at the end. It does nothing that it is not asked for, unless `warms`."""
    with contextlib.ExitStack() as stack:
        def make(warms=False, **options):
            made = stack.enter_context(Compiler(lambda: vocab, **options))
            made._warmed = not warms
            return made

        yield make


class Gate:
    """In place of `grammar.compile`: texts that begin with "stop" wait in it."""

    def __init__(self, monkeypatch):
        self.entered, self.open, self.calls = threading.Semaphore(0), threading.Event(), []
        real = grammar.compile

        def compile(kind, text, vocab, **options):
            self.calls.append(text)
            if str(text).startswith("stop"):
                self.entered.release()
                assert self.open.wait(30)
            return real(kind, text, vocab, **options)

        monkeypatch.setattr(grammar, "compile", compile)

    def wait(self):
        assert self.entered.acquire(timeout=10)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


# ------------------------------------------------------------------------------------------------------------------------- sharing

def test_a_grammar_comes_with_the_row_of_its_start(make):
    for kind, text in [("regex", "a[bc]{3,5}"), ("choice", ["yes", "no"]), ("ebnf", 'root ::= "(" root ")" | "x"'), ("json_object", None)]:
        made = make().submit(kind, text).result(10)
        assert isinstance(made, Grammar) and made.tables.rows[made.start & INDEX] is not None


def test_equal_requests_share_one_future_before_and_after(make, gate):
    c = make()
    first = c.submit("regex", "stop")
    gate.wait()
    assert c.submit("regex", "stop") is first and not first.done()
    gate.open.set()
    assert first.result(10) and c.submit("regex", "stop") is first
    assert c.submit("choice", ["a", "b"]) is c.submit("choice", ("a", "b")) is not c.submit("choice", ["b", "a"])
    assert c.submit("json_object", None) is c.submit("json_object", None)
    assert c.submit("regex", "x") is not c.submit("ebnf", "x") is not c.submit("choice", "x")
    assert gate.calls.count("stop") == 1 and c.stats()["grammar_cache_hits"] == 4


def test_objects_are_the_same_request_if_they_are_spelled_the_same():
    first, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    key = lambda kind, text, **options: compiler._key(kind, text, options)[0]
    assert key("json_schema", first) == key("json_schema", dict(first)) != key("json_schema", other)
    assert key("json_object", True) != key("json_object", 1)
    options = dict(whitespace="fixed", strict=True)
    assert key("json_schema", "{}", **options) == key("json_schema", "{}", strict=True, whitespace="fixed") != key("json_schema", "{}")
    assert key("json_schema", "{}", whitespace=["fixed"]) is None is key("json_schema", {"a": {1}})


def test_one_text_is_another_grammar_under_other_options(make):
    """A layout, strictness and an order are part of what is asked for; None was given means the server's own."""
    c = make(whitespace="compact")
    schema = '{"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}, "b": {"const": 2}}, "required": ["a", "b"]}'
    asked = {"default": {}, "fixed": dict(whitespace="fixed"), "flexible": dict(whitespace="flexible"), "strict": dict(strict=True),
             "any order": dict(any_order=True)}
    taken_by = {'{"a": [1, 1], "b": 2}': {"fixed", "flexible"}, '{"a":[1,1],"b":2}': {"default", "flexible", "strict", "any order"},
                '{"a":[],"b":2,"c":3}': {"default", "flexible", "any order"}, '{ "a" :[1],\n"b":2}': {"flexible"}, '{"b":2,"a":[]}': {"any order"}}
    made = {name: c.submit("json_schema", schema, **options).result(10) for name, options in asked.items()}
    for text, names in taken_by.items():
        states = {name: one.step_bytes(one.start, text.encode()) for name, one in made.items()}
        assert {name for name, state in states.items() if state is not None and made[name].is_accepting(state)} == names, text
    assert c.submit("json_schema", schema, whitespace="compact").result(10) is made["default"] is c.submit("json_schema", schema).result(10)
    assert len(set(map(id, made.values()))) == 5 == c.stats()["grammar_compiled"] and c.stats()["grammar_cache_hits"] == 2
    assert c.submit("json_schema", schema, whitespace="loose").exception(10).construct == "whitespace"
    assert isinstance(c.submit("json_schema", schema, whitespace=["fixed"]).exception(10), GrammarError), "no key, and no crash"
    assert isinstance(c.submit("regex", "a", strict=True).exception(10), TypeError), "an option that a kind does not have is our error"


def test_refusals_are_cached_and_hold_nothing_of_the_compile(make):
    c = make()
    refused = c.submit("regex", "(a")
    for _ in range(50):
        with pytest.raises(GrammarError, match="never closed") as caught:
            refused.result(10)
    del caught
    assert c.submit("regex", "(a") is refused and refused.exception().__traceback__ is None
    for kind, text in [("no such", "a"), (["regex"], "a"), ("regex", 7), ("choice", [["a"]]), ("choice", [object()]), ("choice", "ab"),
                       ("choice", []), ("json_object", 1), ("regex", {"a": {1}})]:
        assert isinstance(c.submit(kind, text).exception(10), GrammarError), (kind, text)
    assert c.submit("json_object", True).result(10) and c.stats()["grammar_refused"] == 10


def test_an_error_of_ours_is_passed_on_and_not_cached(make, monkeypatch):
    real = grammar.compile
    monkeypatch.setattr(grammar, "compile", lambda *args, **options: 1 / 0)
    c = make()
    failed = c.submit("regex", "a")
    assert isinstance(failed.exception(10), ZeroDivisionError)
    monkeypatch.setattr(grammar, "compile", real)
    assert c.submit("regex", "a").result(10)


def test_a_vocabulary_is_asked_for_once_and_its_refusal_is_everyones():
    calls = []

    def refuse():
        calls.append(1)
        raise GrammarError("no decoder", "decoder")

    with Compiler(refuse) as c:
        assert [c.submit("regex", text).exception(10).construct for text in ("a", "b", "(")] == ["decoder"] * 3
        c.warm()
        assert calls == [1] and c.stats()["grammar_refused"] == 3


def test_nothing_is_started_before_it_is_needed(vocab):
    calls, before = [], ours()
    with Compiler(lambda: calls.append(1) or vocab) as c:
        assert ours() == before and c.stats()["grammar_rows"] == 0
        c.wait(0.01)
        assert not calls
        c.warm()
        assert until(lambda: c.stats()["grammar_rows"] > 1) and calls == [1]
        assert c.stats()["grammar_compiled"] == 0 and len(ours() - before) == 1 + c.threads
    assert until(lambda: ours() == before)


def test_the_first_submit_warms_up_behind_itself(make, gate, monkeypatch):
    monkeypatch.setattr(compiler, "WARM", (("regex", "warm", b"w"),))
    c = make(warms=True, threads=1)
    c.submit("regex", "stop")
    gate.wait()
    later = c.submit("regex", "later")
    gate.open.set()
    assert later.result(10) and until(lambda: "warm" in gate.calls)
    c.submit("regex", "again").result(10)
    assert gate.calls == ["stop", "later", "warm", "again"]


def test_many_threads_may_ask_at_once(make):
    c, found = make(), {}

    def ask(number: int) -> None:
        draw = random.Random(number)
        for _ in range(60):
            text = f"[ab]{{1,{draw.randrange(1, 12)}}}c"
            future = c.submit("regex", text)
            made = future.result(20)
            found.setdefault(text, set()).add(made)
            state = made.step(made.start, ord("a"))
            while made.tables.rows[state & INDEX] is None:
                assert c.want(made, state) is None
                c.wait(0.002)
            c.prefetch(made, state)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stats = c.stats()
    assert len(found) == 11 and all(len(made) == 1 for made in found.values())
    assert (stats["grammar_compiled"], stats["grammar_cache_hits"], stats["grammar_rows_failed"]) == (11, 8 * 60 - 11, 0)


# --------------------------------------------------------------------------------------------------------------------------- bounds

def test_the_least_recently_asked_for_goes_first(make):
    c = make(max_cached=3)
    futures = {}
    for text in "abc":
        futures[text] = c.submit("regex", text)
        futures[text].result(10)
    assert c.submit("regex", "a") is futures["a"]
    c.submit("regex", "d").result(10)
    assert c.stats()["grammar_cached"] == 3
    assert all(c.submit("regex", text) is futures[text] for text in "ac") and c.submit("regex", "b") is not futures["b"]


def test_long_texts_are_fewer(make, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_CACHED_CHARS", 390)
    c = make()
    kept = c.submit("regex", "x" * 40)
    kept.result(10)
    for letter in "abcdefgh":
        c.submit("regex", letter * 45).result(10)
        assert c.submit("regex", "x" * 40) is kept
    assert c.stats()["grammar_cached"] == 8 and c.submit("regex", "a" * 45).result(10) and c.stats()["grammar_compiled"] >= 10
    cached = c.stats()["grammar_cached"]
    c.submit("regex", "v" * 51).result(10)
    assert c.stats()["grammar_cached"] == cached and c.submit("regex", "x" * 40) is kept, "for one that long, many others would have to go"


def test_without_a_cache_what_is_in_flight_or_in_use_is_shared(make, gate):
    c = make(max_cached=0)
    first = c.submit("regex", "stop")
    gate.wait()
    assert c.submit("regex", "stop") is first
    gate.open.set()
    in_use = first.result(10)
    del first
    assert c.submit("regex", "stop").result(10) is in_use and c.stats()["grammar_cached"] == 0
    before, in_use = c.stats()["grammar_compiled"], None
    gc.collect()
    c.submit("regex", "stop").result(10)
    assert c.stats()["grammar_compiled"] == before + 1


def test_what_nobody_wants_any_more_is_not_compiled(make, gate):
    c = make(threads=1)
    running = c.submit("regex", "stop")
    gate.wait()
    queued = c.submit("regex", "ab")
    c.abandon(queued)
    again = c.submit("regex", "ab")
    gate.open.set()
    assert queued.cancelled() and again is not queued and again.result(10).start >= 0 and running.result(10)
    c.abandon(again)
    assert c.stats()["grammar_compiled"] <= 2 + 4 and c.submit("regex", "ab") is again      # and what warms up


def test_what_nobody_wants_any_more_is_stopped(make):
    c, text = make(threads=1), "(" + "|".join(f"a{i}" for i in range(60_000)) + ")"
    futures = [c.submit("regex", text), c.submit("regex", text)]
    assert until(lambda: c.stats()["grammar_runs"] == 1 and not c.stats()["grammar_compiles_queued"])
    c.abandon(futures[0])
    assert c.submit("regex", text) is futures[0], "somebody else still wants it"
    c.abandon(futures[0])
    began = time.monotonic()
    c.abandon(futures[0])
    again = c.submit("regex", text)
    assert again is not futures[0] and isinstance(futures[0].exception(10), GrammarError) and time.monotonic() - began < 5
    c.abandon(again)
    assert c.submit("regex", "ab").result(20).start >= 0 and not c.stats()["grammar_refused"]


def test_long_texts_do_not_hold_up_short_ones(make, monkeypatch):
    monkeypatch.setattr(compiler, "LARGE", 1000)
    c, ended = make(threads=3), []
    texts = ["(" + "|".join(f"{i}x{k}" for i in range(8_000)) + ")" for k in range(5)]
    long = [c.submit("regex", text) for text in texts]
    for future in long:
        future.add_done_callback(ended.append)
    for i in range(6):
        assert c.submit("regex", f"{i}[a-c]").result(30).start >= 0
    assert len(ended) < 5, "they were faster than a short one"
    for future in long:
        c.abandon(future)


def test_tables_that_were_replaced_are_given_back(make, vocab):
    c = make()
    old = [c.submit("regex", text) for text in ("a*b", "(a")]
    shared = weakref.ref(old[0].result(10).shared)
    assert isinstance(old[1].exception(10), GrammarError) and c.submit("regex", "a*b") is old[0]
    c.prefetch(old[0].result(), old[0].result().start)
    assert until(lambda: c.stats()["grammar_rows_ahead"] == c.stats()["grammar_runs"] == 0)
    vocab.shared = grammar.Shared(vocab)
    new = [c.submit("regex", text) for text in ("a*b", "(a")]
    assert new[0] is not old[0] and new[1] is not old[1] and new[0].result(10).shared is vocab.shared is not shared()
    del old
    assert until(lambda: gc.collect() >= 0 and shared() is None)


def test_full_tables_take_no_more_requests(make, vocab, monkeypatch):
    c = make()
    old = c.submit("regex", "a*b")
    tables = old.result(10).tables
    monkeypatch.setattr(grammar.Shared, "full", property(lambda self: self.tables is tables))
    new = c.submit("regex", "a*b")
    made = new.result(10)
    assert new is not old and made.tables is not tables and made.shared is vocab.shared
    state = old.result().step(old.result().start, ord("a"))
    assert c.want(old.result(), state) is None and until(lambda: tables.rows[state & INDEX] is not None), "running requests keep theirs"


# ----------------------------------------------------------------------------------------------------------------------------- rows

def built(monkeypatch) -> list[int]:
    """Indices of rows in the order in which they are built."""
    order, real = [], grammar.Tables.add_row

    def add_row(tables, state, row):
        order.append(state)
        real(tables, state, row)

    monkeypatch.setattr(grammar.Tables, "add_row", add_row)
    return order


def test_a_row_is_built_once_however_often_it_is_wanted(make, monkeypatch):
    c = make()
    made = c.submit("regex", "[ab]c+").result(10)
    order, state = built(monkeypatch), made.step(made.start, ord("a"))
    with made.shared.lock:
        assert [c.want(made, state) for _ in range(100)] == [None] * 100
        assert until(lambda: c.stats()["grammar_rows_queued"] == 0)
        assert c.want(made, state) is None and c.stats()["grammar_rows_queued"] == 0, "not while it is being built, either"
    assert until(lambda: c.stats()["grammar_rows_wanted"] == 1) and order == [state & INDEX]
    assert c.want(made, state) is None and c.want(made, made.start) is None and made.step(state, ord("c")) is not None


def test_why_a_row_cannot_be_had(make, monkeypatch):
    c = make()
    made = c.submit("regex", "[ab](x|yz)+[cd]").result(10)
    state, other = (made.step_bytes(made.start, text) for text in (b"a", b"ay"))
    monkeypatch.setattr(waves, "MAX_FOLLOWED", -1)
    assert c.want(made, state) is None
    assert until(lambda: c.want(made, state) is not None)
    error = c.want(made, state)
    assert isinstance(error, GrammarError) and "too ambiguous" in error.message and error.__traceback__ is None and c.want(made, state) is error
    monkeypatch.setattr(Grammar, "row", lambda *args: 1 / 0)
    assert until(lambda: c.want(made, other) is not None) and "ZeroDivisionError" in c.want(made, other).message
    monkeypatch.undo()
    assert c.want(made, state) is error and c.stats()["grammar_rows_failed"] == 2
    again = c.submit("regex", "[ab](x|yz)+[cd]e").result(10)
    assert c.want(again, again.step_bytes(again.start, b"a")) is None


def test_a_start_without_a_row_is_a_refusal(make, monkeypatch):
    monkeypatch.setattr(waves, "MAX_FOLLOWED", -1)
    assert "too ambiguous" in make().submit("regex", "[ab]c").exception(10).message


def test_wait_ends_when_something_is_finished(make, gate):
    c = make()
    began = time.monotonic()
    c.wait(0.05)
    assert time.monotonic() - began >= 0.04
    future = c.submit("regex", "stop")
    gate.wait()
    threading.Timer(0.05, gate.open.set).start()
    while not future.done():
        c.wait(20)
    made = future.result()
    state = made.step(made.start, ord("s"))
    assert c.want(made, state) is None
    while made.tables.rows[state & INDEX] is None:
        c.wait(20)
    assert time.monotonic() - began < 10


def test_successors_are_built_ahead_and_states_expanded_once(make, monkeypatch):
    c = make()
    made = c.submit("regex", "(a[0-9]{3}|[b-y]z|[A-C]q|Zw)(x|y)").result(10)
    edges, calls = made.edges(made.start), []
    assert len(edges) == 4
    monkeypatch.setattr(Grammar, "edges", lambda self, state: calls.append(state) or edges)
    for _ in range(50):
        c.prefetch(made, made.start, count=2)
    assert until(lambda: c.stats()["grammar_rows_prefetched"] == 2)
    assert [made.tables.rows[to & INDEX] is not None for to, _ in edges] == [True, True, False, False] and calls == [made.start]
    c.prefetch(made, edges[3][0])                   # has no row
    assert c.stats()["grammar_rows_ahead"] == 0 and calls == [made.start]


def test_a_row_that_fails_ahead_is_known_when_it_is_wanted(make, monkeypatch):
    c = make()
    made = c.submit("regex", "[ab]c").result(10)
    monkeypatch.setattr(waves, "MAX_FOLLOWED", -1)
    c.prefetch(made, made.start)
    assert until(lambda: c.stats()["grammar_rows_failed"] == 1)
    assert c.want(made, made.step(made.start, ord("a"))) is not None


def test_what_is_wanted_comes_before_what_is_ahead_and_newest_goes_first(make, monkeypatch):
    c = make()
    made = c.submit("choice", ["ax", "by", "cz", "dw"]).result(10)
    after = {letter: made.step(made.start, ord(letter)) for letter in "abcd"}
    edges = {made.start: [(after["b"], 3), (after["c"], 2), (after["d"], 1)]}
    monkeypatch.setattr(Grammar, "edges", lambda self, state: edges[state])
    order = built(monkeypatch)
    with made.shared.lock:
        c.want(made, after["a"])
        assert until(lambda: c.stats()["grammar_rows_queued"] == 0)
        c.prefetch(made, made.start)
        c.want(made, after["d"])                    # while the builder waits for the first
        c.want(made, after["d"])
    assert until(lambda: c.stats()["grammar_rows_wanted"] + c.stats()["grammar_rows_prefetched"] == 4)
    assert order == [after[letter] & INDEX for letter in "adbc"]
    assert (c.stats()["grammar_rows_wanted"], c.stats()["grammar_rows_prefetched"]) == (2, 2)


def test_what_is_ahead_is_bounded_and_the_oldest_dropped(make, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_AHEAD", 3)
    c = make()
    made = [c.submit("regex", f"{letter}1+2").result(10) for letter in "abcdef"]
    wanted = made[0].step(made[0].start, ord("a"))
    with made[0].shared.lock:
        c.want(made[0], wanted)
        assert until(lambda: c.stats()["grammar_rows_queued"] == 0)
        for each in made:
            c.prefetch(each, each.start)
            c.prefetch(each, each.start)
        assert c.stats()["grammar_rows_ahead"] == 3
    assert until(lambda: c.stats()["grammar_rows_prefetched"] == 3)
    assert [each.tables.rows[each.step(each.start, ord(letter)) & INDEX] is not None for each, letter in zip(made, "abcdef")] \
        == [True, False, False, True, True, True]
    c.prefetch(made[1], made[1].start)              # which was dropped, not done
    assert until(lambda: c.stats()["grammar_rows_prefetched"] == 4)


# ---------------------------------------------------------------------------------------------------------------------- time-outs

def for_ever(*args, **options):
    while True:
        tick()


def test_a_compile_has_its_time_from_when_it_begins_and_others_come_behind_it(make, monkeypatch):
    real = grammar.compile
    monkeypatch.setattr(grammar, "compile", lambda kind, text, *args, **options: (for_ever if text[0] == "s" else real)(kind, text, *args, **options))
    c = make(threads=1, timeout_s=0.3)
    c.submit("regex", "warm").result(10)
    began = time.monotonic()
    slow = [c.submit("regex", text) for text in ("s1", "s2")]
    queued = c.submit("regex", "b")
    for i, each in enumerate(slow, start=1):
        assert "takes too long" in each.exception(10).message and time.monotonic() - began >= 0.3 * i
    assert queued.result(10) and c.submit("regex", "s1") is slow[0], "a refusal like any other"


def test_a_start_has_the_time_of_its_compile(make, monkeypatch):
    c = make(timeout_s=0.2)
    monkeypatch.setattr(grammar.RowBuilder, "build", for_ever)
    began = time.monotonic()
    assert "takes too long" in c.submit("regex", "[ab]c").exception(10).message and time.monotonic() - began >= 0.2
    monkeypatch.undo()
    assert c.submit("regex", "[ab]cd").result(10), "its tables are free again"


def test_a_row_that_takes_too_long_cannot_be_had_and_others_can(make, monkeypatch):
    c = make()
    made = c.submit("regex", "[ab](x|yz)+[cd]").result(10)
    states = [made.step_bytes(made.start, text) for text in (b"a", b"ay")]
    monkeypatch.setattr(grammar, "MAX_ROW_S", 0.1)
    monkeypatch.setattr(grammar.RowBuilder, "build", for_ever)
    assert c.want(made, states[0]) is None and until(lambda: c.want(made, states[0]) is not None)
    monkeypatch.undo()
    error = c.want(made, states[0])
    assert "takes too long" in error.message and c.want(made, states[0]) is error and c.stats()["grammar_rows_failed"] == 1
    assert c.want(made, states[1]) is None and until(lambda: made.tables.rows[states[1] & INDEX] is not None)


# -------------------------------------------------------------------------------------------------------------------------- its end

def test_closing_cancels_what_has_not_begun_and_waits_for_nothing(vocab, gate):
    c = Compiler(lambda: vocab, threads=1)
    running, queued = c.submit("regex", "stop"), c.submit("regex", "a")
    gate.wait()
    began = time.monotonic()
    c.close()
    assert time.monotonic() - began < 5 and queued.cancelled() and not running.done()
    late = c.submit("regex", "b")
    assert late.cancelled()
    with pytest.raises(CancelledError):
        late.result()
    gate.open.set()
    made = running.result(10)
    assert "shut down" in c.want(made, made.step(made.start, ord("s"))).message
    c.prefetch(made, made.start)
    c.warm()
    c.close()
    assert until(lambda: not c.stats()["grammar_runs"]) and c.submit("regex", "stop").cancelled()


def test_a_compiler_that_nobody_holds_ends_its_threads(vocab):
    before = ours()
    c = Compiler(lambda: vocab)
    made = c.submit("regex", "[ab]c").result(10)
    c.want(made, made.step(made.start, ord("a")))
    c.prefetch(made, made.start)
    gone = weakref.ref(c)
    del c
    assert until(lambda: gone() is None) and until(lambda: ours() == before)


@pytest.mark.parametrize("end", ["", "c.close(); c.close()", "del c"])
def test_an_interpreter_ends_while_something_compiles(end):
    code = f"""if True:
        from nano_sgl.compiler import Compiler
        from nano_sgl.vocab import Vocab
        c = Compiler(lambda: Vocab([b"a", b"b", None], [2]))
        futures = [c.submit("ebnf", "root ::= " + '"a"*' * 200_000 + " " * i) for i in range(4)]
        while not any(future.running() for future in futures): pass
        {end}
        print("done")"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "") and time.monotonic() - began < 15


def test_settings_are_lent_and_given_back():
    value = [5]
    held = compiler._Held(lambda: value[0], lambda new: value.__setitem__(0, new), lambda before: min(before, 2))
    with held:
        with held:
            assert value == [2]
        assert value == [2]
    assert value == [5]
    with held:
        value[0] = 7                                # somebody else's wish
    assert value == [7]


# -------------------------------------------------------------------------------------------------------------------------- hostile

HOSTILE = {
    "exponential for a finished automaton": ("regex", "(a|b)*a(a|b){24}"),
    "nested counts": ("regex", "((a{1,100}){1,100}){1,100}"),
    "nested counts of different things": ("regex", "((a{1,100}b?){1,100}c?){1,9}"),
    "catastrophic backtracking": ("regex", "(x+x+)+y"),
    "a literal of 1 MB": ("regex", "ab" * (1 << 19)),
    "100,000 alternatives": ("choice", [f"{i * 7919 % 1000003:06d}" for i in range(100_000)]),
    "10,000 alternatives in a regex": ("regex", "|".join(f"w{i}" for i in range(10_000))),
    "left recursion": ("ebnf", 'root ::= root "a" | root root | "b"'),
    "left recursion through many": ("ebnf", "root ::= r0\n" + "\n".join(
        f'r{i} ::= r{(i + 1) % 60} "a" | r{(i + 7) % 60} "b" | "b"' for i in range(60))),
    "a chain of rules": ("ebnf", "root ::= r0\n" + "".join(f'r{i} ::= "x" r{i + 1} "y"? | "b"\n' for i in range(5000)) + 'r5000 ::= "y"'),
    "deep": ("regex", "(" * 64 + "a" + ")*" * 64),
    "too deep": ("ebnf", "root ::= " + "(" * 100_000),
    "many classes": ("regex", r"\w" * 10_000),
    "many small counts": ("regex", "a{1,9}" * 20_000),
}


@pytest.fixture(scope="module")
def demo(demo_path):
    tokenizer = weights.load_tokenizer(demo_path)
    return Vocab.from_tokenizer(tokenizer, weights.end_ids(demo_path, tokenizer))


@pytest.mark.parametrize("name", HOSTILE)
def test_every_request_is_answered_soon(name, demo):
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Compiler(lambda: demo) as c:
        began = time.monotonic()
        hostile, friendly = c.submit(*HOSTILE[name]), c.submit("regex", "[a-z]+")
        assert friendly.result(10)
        error = hostile.exception(10)
        assert error is None or isinstance(error, GrammarError)
        assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kilobytes < 1 << 20
