"""Sets of readings: what Python and C++ find is the same, under numbers of their own."""

import gc
import random
import threading
import weakref

import pytest

from nano_sgl import grammar, native, nodes, readings, rules
from nano_sgl.rules import GrammarError
from nano_sgl.tables import INF, Tables
from nano_sgl.vocab import Vocab

GRAMMARS = {
    "nested": 'root ::= "[" (root ("," root)*)? "]" | "a"+',
    "palindrome": 'root ::= "a" root "a" | "b" root "b" | "a" | "b" | ""',
    "ambiguous": 'root ::= root root | "a" | "b" [ab]{0,3} | ""',
    "counted": 'root ::= ([ab]{2,5} | [a-c]{0,7} root? | "a" | t{1,3} "c")* "b"{2,9}\nt ::= [a-z]{1,4} "," | root "."',
    "words": 'root ::= ("ab" ("abba" | "abc") | "[" root "]" "," root)* "()()"',
    "repeats": 'root ::= (t{0,7} | t{0,8} | t{2,4})* "."\nt ::= "(" root ")" | "a" | "b"',
}
TEXT = b"aabbcab,.a()[]"


def compiled(name: str):
    vocab = Vocab([bytes([b]) for b in range(256)])
    if (library := native.library()) is not None:
        vocab.walker = native.TrieWalker(vocab, library)
    return grammar.compile("ebnf", GRAMMARS[name], vocab)


@pytest.fixture(params=GRAMMARS)
def both(request):
    """(a grammar, its readings in Python, and in C++ where there is a compiler) over the same automaton."""
    machine = compiled(request.param)
    automaton, lock = machine.shared.automaton, threading.RLock()
    return machine, *(kind(automaton, Tables(machine.vocab), lock, machine.readings._begins) for kind in (readings.Readings, type(machine.readings)))


def first(machine, some) -> int:
    """The set that a text begins in."""
    return some.closure(some.push(machine._nodes.cut(next(iter(machine._rules.values()))), some.stack(frozenset((nodes.DONE,)))))


def after(machine, some, which: int | None, text: bytes) -> int | None:
    """The set after some bytes."""
    machine.readings = some
    for byte in text:
        which = None if which is None else machine._advance(which, byte)
    return which


def allows(machine, some, which: int, texts: list[bytes]) -> list:
    """Which texts a set allows, and behind which the end."""
    ends = [after(machine, some, which, text) for text in texts]
    return [None if end is None else machine._may_end(end) for end in ends]


def line_of(some, one: int, other: int) -> tuple:
    """(lowest count, highest, set) of two values joined, in the tables."""
    (line,) = some.lines_of(some.join([one], [other]))
    low, high, to, _ = some.tables.lines.array[line].tolist()
    ends = bool(some.tables.states.array[to, 4] == 0)
    return low, high, some.set(ends, [config if config[3] >= 0 else (*config[:3], 0) for config in some.configs(to)])


def test_texts_are_read_in_the_same_ways(both):
    """Which of two readings that cover each other is kept, and whose count is beside the state, may differ; what they allow does not."""
    machine, *twins = both
    for seed in range(12):
        draw = random.Random(seed)
        now = [first(machine, some) for some in twins]
        for _ in range(8):
            texts = [bytes(draw.choices(TEXT, k=draw.randrange(1, 5))) for _ in range(20)]
            assert allows(machine, twins[0], now[0], texts) == allows(machine, twins[1], now[1], texts)
            following = [[after(machine, some, which, bytes([byte])) for byte in sorted(set(TEXT))] for some, which in zip(twins, now)]
            alive = [pair for pair in zip(*following) if None not in pair]
            if not alive:
                break
            lines = [(0, INF), (0, 4), (2, 9)]
            a, b, (low, high), (least, most) = draw.choice(alive), draw.choice(alive), draw.choice(lines), draw.choice(lines)
            found = [line_of(some, some.value([(low, high, a[i])]), some.value([(least, most, b[i])])) for i, some in enumerate(twins)]
            assert found[0][:2] == found[1][:2]
            if is_plain(twins[0], found[0][2]):
                assert allows(machine, twins[0], found[0][2], texts) == allows(machine, twins[1], found[1][2], texts)
            now = draw.choice(alive)


def is_plain(some, which: int) -> bool:
    return not any(loop for _, _, loop, _ in some.at(which)[1])


def test_what_is_asked_for_again_is_the_same_number(both):
    machine, *twins = both
    for some in twins:
        which = first(machine, some)
        may_end, configs = some.at(which)
        assert some.set(may_end, tuple(reversed(configs))) == some.set(may_end, configs * 2) == which
        assert some.state(which) == some.state(which) and some.has(some.state(which)[0]) and not some.has(some.state(which)[0] + 1)
        with pytest.raises(KeyError):
            some.configs(some.state(which)[0] + 1)


def test_texts_are_gone_along_as_byte_by_byte(both):
    """Given ones, and those that must follow."""
    machine, _, some = both
    machine.tables = some.tables
    for seed in range(40):
        draw, which = random.Random(seed), first(machine, some)
        for _ in range(10):
            text = bytes(draw.choices(TEXT, k=draw.randrange(1, 5)))
            behind, forced, at = after(machine, some, which, text), b"", which
            while not machine._may_end(at) and (alive := machine._alive(at)).bit_count() == 1:
                forced += bytes([alive.bit_length() - 1])
                at = machine._advance(at, forced[-1])
            if some.native:
                assert some.along(which, text, len(text), 0)[1] == (-1 if behind is None else behind)
                assert some.along(which, None, 64, 4096) == (forced, at)
            state, end = machine.readings.state(which), machine.readings.state(at)
            if not state[2] and not end[2]:
                assert machine.forced(state[0]) == (forced, end[0])
            which = which if behind is None else behind


@pytest.mark.parametrize("bound, text", [("MAX_READINGS", "readings of a text"), ("MAX_PLACES", "places in its rules")])
def test_what_is_too_much_is_refused(bound, text, both, monkeypatch):
    machine, python, _ = both
    monkeypatch.setattr(readings, bound, 0)
    for kind in (readings.Readings, type(machine.readings)):
        some = kind(python.automaton, Tables(machine.vocab), threading.RLock(), machine.readings._begins)
        with pytest.raises(GrammarError, match=text):
            first(machine, some)


@pytest.mark.parametrize("name", ["counted", "repeats"])
def test_states_keep_their_numbers_while_others_make_some(name, monkeypatch):
    """A thread that compiles lets go of the lock now and then, but never between giving a state its number and making it."""
    machine = compiled(name)
    told, lock, tables, came, others = machine.readings._begins, threading.RLock(), Tables(machine.vocab), [], []
    monkeypatch.setattr(rules, "YIELD_S", -1.0)                 # whenever it may

    def add_one():
        with lock:
            came.append(tables.add_states(1, INF))

    def begins(frame):
        others.append(threading.Thread(target=add_one))         # somebody waits for the lock whenever a frame is asked for
        others[-1].start()
        while rules.CLOCK.lock is not None and others[-1].is_alive():
            rules.pause()
        return told(frame)

    some, states = readings.make(machine.shared.automaton, tables, lock, begins), {}
    with lock, rules.time_limit(None, lock):
        work = [first(machine, some)]
        while work and len(states) < 60:
            if (which := work.pop()) not in states:
                states[which] = some.state(which)[0]
                work += [to for byte in sorted(set(TEXT)) if (to := after(machine, some, which, bytes([byte]))) is not None]
    for other in others:
        other.join(20)
    assert len(came) == len(others) > 3 and not set(came) & {*states.values()} and all(map(some.has, states.values())) and not any(map(some.has, came))


def test_a_grammar_goes_with_its_last_reference():
    """Not when the garbage collector comes by: what is in C++ it does not know to be large."""
    for name in GRAMMARS:
        machine = compiled(name)
        machine.row(machine.start)
        held = [weakref.ref(machine), weakref.ref(machine.readings), *([weakref.ref(machine.readings.native)] if machine.readings.native else [])]
        gc.disable()
        try:
            del machine
            assert [one() for one in held] == [None] * len(held)
        finally:
            gc.enable()


def test_time_ends_what_takes_too_long(both):
    """Also what C++ does on its own: here it joins what is known already."""
    machine, *twins = both
    for some in twins:
        which = first(machine, some)
        others = [some.value([(1, i + 3, which)]) for i in range(1500)]
        with rules.time_limit(0.0), pytest.raises(GrammarError, match="takes too long"):
            some.join([some.value([(0, i + 1, which)]) for i in range(1500)], others)
            some.set(False, [config for q in range(30) for config in some.at(which)[1]] * 30)
            for i in range(300):
                some.set(False, [(q, *config[1:]) for q in range(i) for config in some.at(which)[1]])
