"""Sets of readings: what Python and C++ find is the same, under numbers of their own."""

import itertools
import random
import re
import threading

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


@pytest.fixture(params=GRAMMARS)
def both(request):
    """(a grammar, its readings in Python, and in C++ where there is a compiler) over the same automaton."""
    vocab = Vocab([bytes([b]) for b in range(256)])
    if (library := native.library()) is not None:
        vocab.walker = native.TrieWalker(vocab, library)
    machine = grammar.compile("ebnf", GRAMMARS[request.param], vocab)
    automaton, lock = machine.shared.automaton, threading.RLock()
    return machine, *(kind(automaton, Tables(vocab), lock, machine._begins) for kind in (readings.Readings, type(machine.readings)))


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
        some = kind(python.automaton, Tables(machine.vocab), threading.RLock(), machine._begins)
        with pytest.raises(GrammarError, match=text):
            first(machine, some)


def test_states_keep_their_numbers_while_others_compile(monkeypatch):
    """A thread that compiles lets go of the lock now and then, but never between giving a state its number and making it."""
    vocab = Vocab([bytes([b]) for b in range(97, 123)])
    if (library := native.library()) is not None:
        vocab.walker = native.TrieWalker(vocab, library)
    texts = [f"[a-z]{{0,{4 + i}}}({'|'.join('abc'[k % 3] * (k % 4 + 1) for k in range(i + 2))})+x" for i in range(12)]
    monkeypatch.setattr(rules, "YIELD_S", -1.0)                 # whenever it may
    monkeypatch.setattr(rules, "TICKS", itertools.repeat(0))
    made = {}
    threads = [threading.Thread(target=lambda part=part: made.update({t: grammar.compile("regex", t, vocab) for t in texts[part::3]}))
               for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == len(texts)
    for text, machine in made.items():
        for word in ("x", "ax", "abcax", "ccabx", "zzbx", "a" * 21 + "x"):
            state = machine.start
            for byte in word.encode():
                state = None if state is None else machine.step(state, byte - 97)
            assert (state is not None and machine.is_accepting(state)) == bool(re.fullmatch(text, word)), (text, word)
