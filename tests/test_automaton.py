"""The walks of a vocabulary's tree: C++ against numpy, and against reading each token byte by byte."""

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest

from nano_sgl import automaton, grammar, native, rows, tables
from nano_sgl.automaton import Automaton, NodeSet, distinct, union
from nano_sgl.normal_form import normalize
from nano_sgl.rules import Byte, Cat, Or, Repeat, Rules
from nano_sgl.tables import join_maps
from nano_sgl.vocab import Vocab

pytestmark = pytest.mark.filterwarnings("error")


def one_of(letters: str) -> Byte:
    return Byte(sum(1 << ord(letter) for letter in letters))


CHAR = Or((one_of("ab"), Cat((one_of("c"), one_of("ab")))))     # a prefix code, as UTF-8 is one
EXPRS = {"a loop": Repeat(one_of("ab"), 0, None), "characters": Repeat(CHAR, 0, None), "a word": Cat(tuple(map(one_of, "abac"))),
         "choices": Repeat(Or((one_of("a"), Cat((one_of("b"), Repeat(one_of("c"), 0, 2), one_of("ad"))))), 1, None)}


def some_vocab(draw: random.Random) -> Vocab:
    tokens = [bytes(t) for n in (1, 2, 3, 4) for t in itertools.product(b"abcd", repeat=n) if draw.random() < 0.7]
    tokens += draw.sample(tokens, 20) + [None, b"abababababab", b"cacacacaca"]      # several with the same bytes
    draw.shuffle(tokens)
    return Vocab(tokens)


def read(machine: Automaton, q: int, starts: NodeSet, loop: int, marks) -> tuple[set, set]:
    """(token, state, count, mark) and (node, state accepts there, count, mark), byte by byte."""
    vocab, tokens, exits = machine.vocab, set(), set()
    work = [(node, q, 0, None if marks is None else int(marks[i])) for i, node in enumerate(starts.nodes.tolist())]
    while work:
        node, state, count, mark = work.pop()
        for kid in range(vocab.child0[node], vocab.child0[node] + vocab.kids[node]):
            to = machine.moves(state).get(int(vocab.byte[kid]))
            if to is not None:
                begun = count + (state == loop)
                work.append((kid, to, begun, mark))
                tokens |= {(int(vocab.order[at]), to, begun, mark) for at in range(vocab.first[kid], vocab.first[kid] + vocab.own[kid])}
                if machine.accepts[to] and vocab.kids[kid]:
                    exits.add((kid, begun, mark))
    return tokens, exits


def said(template, counted: bool, marks) -> tuple[set, set]:
    """The same of a template."""
    mark_of = lambda source: itertools.repeat(None) if marks is None else marks[np.zeros(1, int) if source is None else source].tolist()  # noqa: E731
    marks_of_tokens = mark_of(template.source) if template.source is not None or marks is None else itertools.repeat(int(marks[0]))
    tokens = {(token, *template.classes[cls], mark) for token, cls, mark in zip(template.tokens.tolist(), template.cls.tolist(), marks_of_tokens)}
    if template.exits is None:
        return tokens, set()
    found = template.exits
    counts = found.count.tolist() if counted else [0] * found.size
    return tokens, set(zip(found.nodes.tolist(), counts, mark_of(found.source)))


@pytest.mark.parametrize("many", [0, 1 / 5, 2])
@pytest.mark.parametrize("walks", ["native", "numpy"])
@pytest.mark.parametrize("name", EXPRS)
def test_a_template_is_what_reading_byte_by_byte_says(name, walks, many, monkeypatch):
    """From the root, from the exits of that, and from positions below each other, some of them twice, with and without marks."""
    monkeypatch.setattr(automaton, "MANY", many)
    monkeypatch.setattr(automaton, "SPREAD", many)
    counted = name == "characters"
    for seed in range(4):
        draw = random.Random(seed)
        vocab = some_vocab(draw)
        if walks == "native" and native.library() is not None:
            vocab.walker = native.TrieWalker(vocab, native.library())
        machine = Automaton(vocab)
        (node,) = normalize(machine.nodes, Rules({"root": EXPRS[name]}, "root"))[0].values() if name != "a loop" else (None,)
        node = machine.nodes.rep(machine.nodes.byte(EXPRS[name].item.mask), 0, None) if node is None else node
        node = machine.nodes.alt([0, node]) if counted else node
        q = machine.state([node])
        first = machine.template(q, machine.root, counted)
        sets = [machine.root, *([first.exits] if first.exits else [])]
        sets.append(NodeSet(np.array([draw.randrange(vocab.byte.size) for _ in range(40)], np.int32)))
        sets.append(NodeSet(np.array(sorted(draw.sample(range(vocab.byte.size), 30)), np.int32), ascending=True))
        for starts in sets:
            loop = (q if machine.accepts[q] else machine._loop(q)) if counted else automaton.DEAD
            for marks in (None, np.array([draw.randrange(3) for _ in range(starts.size)], np.int32)):
                assert said(machine.template(q, starts, counted, marks), counted, marks) == read(machine, q, starts, loop, marks)
                template = machine.template(q, starts, counted, marks)
                if template.unique:
                    classes, sizes = template.map
                    assert (np.flatnonzero(classes) == np.sort(template.tokens)).all() and (np.bincount(classes, minlength=len(sizes)) == sizes).all()


CHARACTERS = [*"ab7\" ", "é", "я", "ا", "中", "丁", "龙", "가", "😀"]
ODD = [b"\xe4", b"\xe4\xb8", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xc3", b"\xb8\xad", b"\xff", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\x00", b"\n"]


@pytest.mark.parametrize("many", [0, 2])
@pytest.mark.parametrize("pattern", [r"[a-z]*", r'[^"]*', r'[^"]{1,50}', r"\w+", r"\w{2,9}", r"[一-龥]*", r"([^中]|中a)*", r"[a-zé-я ]{0,40}",
                                     r"(\w|.\d)*", r"\D*"])
def test_ranges_that_a_state_loops_on(pattern, many, monkeypatch):
    """Texts of several bytes a character, whole and in part, and what is no UTF-8: each token as it is byte by byte, wherever the walk begins."""
    monkeypatch.setattr(automaton, "SPREAD", many)
    for seed in range(3):
        draw = random.Random(seed)
        texts = ["".join(draw.choices(CHARACTERS, k=draw.randrange(1, 5))).encode() for _ in range(400)]
        texts += [text + draw.choice(ODD) for text in draw.sample(texts, 60)] + [odd + text for odd, text in zip(ODD * 3, draw.sample(texts, 33))]
        texts += [text[:-1] for text in draw.sample(texts, 60)] + draw.sample(texts, 20) + [char.encode() for char in CHARACTERS] + ODD
        vocab = Vocab([*texts, None, "中a".encode() * 60, b"ab " * 100], [len(texts)])
        vocab.walker = native.TrieWalker(vocab, native.library()) if native.library() is not None else None
        made = grammar.compile("regex", pattern, vocab)
        machine = made._automaton
        for q, counted in {(config[0], config[2] > 0) for config in made.readings.configs(made.start)}:
            for q in {q, *machine.moves(q).values()}:
                loop = (q if machine.accepts[q] else machine._loop(q)) if counted else automaton.DEAD
                for starts in (machine.root, *(machine.at(draw.randrange(vocab.byte.size)) for _ in range(6))):
                    template = machine.template(q, starts, counted)
                    assert said(template, counted, None) == read(machine, q, starts, loop, None)
                    classes, sizes = template.map
                    assert (np.bincount(classes, minlength=len(sizes)) == sizes).all()
                    if template.exits is not None and counted:
                        assert template.exits.most >= template.exits.count.max()


def test_a_walk_needs_more_room_than_there_is():
    """Many positions twice and more: the walker grows, and begins anew."""
    vocab = some_vocab(random.Random(0))
    plain, quick = Automaton(vocab), Automaton(vocab)
    starts = np.arange(vocab.byte.size, dtype=np.int32)
    marks = np.arange(vocab.byte.size, dtype=np.int32)
    found = []
    for machine in (plain, quick):
        if machine is quick and native.library() is not None:
            vocab.walker = native.TrieWalker(vocab, native.library())
            vocab.walker._make_room(300)
        q = machine.state([machine.nodes.rep(machine.nodes.byte((1 << 256) - 1), 0, None)])
        found.append(said(machine.template(q, NodeSet(starts), False, marks), False, marks))
    assert found[0] == found[1]


def test_maps_are_joined_and_keys_numbered():
    draw = np.random.default_rng(0)
    vocab = some_vocab(random.Random(1))
    walker = native.TrieWalker(vocab, native.library()) if native.library() is not None else None
    for high in (2, 7, 5000):
        a, b = (draw.integers(0, high, 3000).astype(np.int16) for _ in range(2))
        by_numpy, by_walker = join_maps(a, b, high, high), join_maps(a, b, high, high, walker)
        for classes, sizes, keys in (by_numpy, by_walker):
            assert keys[0] == 0 and len(set(keys)) == len(keys) and (np.array(keys)[classes] == a.astype(int) * high + b).all()
            assert (np.bincount(classes, minlength=len(keys)) == sizes).all()
    for size, span in ((0, 1), (1, 1 << 40), (5000, 100), (5000, 1 << 40), (50, 10)):
        keys = draw.integers(-span, span, size)
        values, at = distinct(keys)
        assert values == sorted(set(keys.tolist())) or not size
        assert (np.array(values)[at] == keys).all() if size else at.size == 0
    nodes = [draw.integers(0, vocab.byte.size, n).astype(np.int32) for n in (3, 50)]
    assert union(vocab, nodes).tolist() == union(vocab, nodes * 100).tolist() == sorted({*nodes[0].tolist(), *nodes[1].tolist()})


def test_constants_that_python_and_cpp_share():
    row, trie, sets = ((Path(native.__file__).parent / "cpu" / name).read_text() for name in ("row.h", "trie.h", "sets.h"))
    assert f"SOLE = {rows.SOLE}, " in row and "LEFT = 64;" in row
    values = {name: i for names in re.findall(r"^enum \{ ([\w, ]+) \};", row + trie, re.M) for i, name in enumerate(names.split(", "))}
    ours = ("BEGIN", "SPREAD", "EXPAND", "NO_ROOM", "TOO_MANY", "EXPAND_STATE", "TOO_LONG", "LEFT_OUT")
    assert {name: getattr(native.TrieWalker, name) for name in ours} == {name: values[name] for name in ours}
    (stops,) = re.findall(r"^enum \{ (ASKS_FRAME[\w, =-]+) \};", sets, re.M)
    assert {name: getattr(native.Sets, name) for name, _ in (stop.split(" = ") for stop in stops.split(", "))} == {
        name: int(value) for name, value in (stop.split(" = ") for stop in stops.split(", "))}
    assert "LINE_MORE = 1, LINE_KEEP = 2, LINE_ADD = 4" in sets and (tables.MORE, tables.KEEP, 1 << tables.ADD_SHIFT) == (1, 2, 4)
