"""The automaton over tokens, against Earley, `re` and brute force; and what it holds of memory and time."""

import contextlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from earley import Recogniser
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_sgl import automaton, grammar, native, nodes, readings, tables, waves, weights
from nano_sgl.grammar import INDEX, Grammar
from nano_sgl.rules import EMPTY, NEVER, But, Byte, Cat, Expr, GrammarError, Or, Ref, Repeat, Rules
from nano_sgl.tables import MORE
from nano_sgl.vocab import Vocab

CASES = Path(os.environ.get("NANO_SGL_CASES", "nowhere"))
OTHERS = [json.loads(line) | {"kind": kind} for kind in ("regex", "ebnf") for file in [CASES / f"{kind}.jsonl"] if file.exists()
          for line in file.read_text().splitlines()]


def byte(letters: str) -> Byte:
    return Byte(sum(1 << ord(letter) for letter in letters))


def word(text: bytes) -> Cat:
    return Cat(tuple(Byte(1 << b) for b in text))


CHAR = Or((byte("ab"), Cat((byte("c"), byte("ab")))))      # a prefix code, as UTF-8 is one
THRESHOLDS = {
    (nodes, "NARROW"): (0, 24), (nodes, "UNROLLED"): (1, 8), (nodes, "CHUNK"): (2, 32), (automaton, "SMALL"): (0, 1, 8), (automaton, "FEW"): (0, 100),
    (automaton, "LOOPS"): (0, 1, 80), (automaton, "MANY"): (0, 1 / 5, 2), (automaton, "FEW_MERGED"): (0, 2048), (automaton, "MANY_LEVELS"): (2, 3, 16),
    (waves, "DENSE"): (0, 2, 768), (waves, "MAX_OVERRIDES"): (2, 4096), (waves, "MANY_OVERRIDES"): (0, 256), (native.TrieWalker, "NARROW"): (0, 3, 4096),
    (native.TrieWalker, "READINGS"): (6, 60, 1 << 12), (native.TrieWalker, "BELOW"): (0, 2, 10, 2048)}


def with_walker(vocab: Vocab, native_walks: bool) -> Vocab:
    """By C++, where there is a compiler, or by numpy."""
    if native_walks and native.library() is not None:
        vocab.walker = native.TrieWalker(vocab, native.library())
    return vocab


@pytest.fixture(scope="module", params=["numpy", "native"])
def demo(demo_path, request):
    tokenizer = weights.load_tokenizer(demo_path)
    return tokenizer, with_walker(Vocab.from_tokenizer(tokenizer, weights.end_ids(demo_path, tokenizer)), request.param == "native")


def allowed(machine: Grammar, state: int) -> set[int]:
    mask = machine.mask(state)
    assert mask.dtype == np.int32 and len(mask) == (machine.vocab.size + 31) // 32
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def run(machine: Grammar, tokens) -> int | None:
    state = machine.start
    for token in tokens:
        state = machine.step(state, token)
        if state is None:
            return None
    return state


# ---- the oracle

def productive(rules: Rules) -> tuple[Rules, bool]:
    """The rules without what never ends (so that an Earley item always has a completion), and whether anything is left."""
    useful: set[str] = set()

    def ends(expr: Expr) -> bool:
        if isinstance(expr, Repeat):
            return expr.low == 0 or ends(expr.item)
        if isinstance(expr, (Byte, But, Ref)):
            return not isinstance(expr, Ref) or expr.name in useful
        return (all if isinstance(expr, Cat) else any)(map(ends, expr.parts))

    def cut(expr: Expr) -> Expr:
        if not ends(expr):
            return NEVER
        if isinstance(expr, Repeat):
            return Repeat(cut(expr.item), expr.low, expr.high) if ends(expr.item) else EMPTY
        return type(expr)(tuple(cut(p) for p in expr.parts if ends(p))) if isinstance(expr, (Cat, Or)) else expr

    while more := {name for name, expr in rules.rules.items() if name not in useful and ends(expr)}:
        useful |= more
    return Rules({name: cut(expr) for name, expr in rules.rules.items()}, rules.start), rules.start in useful


def continues(rules: Rules, text: bytes) -> Recogniser | None:
    """An Earley recogniser that has read the text, None if no text of the rules begins so."""
    recogniser = Recogniser(rules)
    return recogniser if all(map(recogniser.feed, text)) else None


def draw_expr(draw: random.Random, names: list[str], depth: int) -> Expr:
    kind = draw.random()
    if depth == 0 or kind < 0.25:
        return draw.choice([byte("a"), byte("b"), byte("ab"), byte("c"), EMPTY if draw.random() < 0.4 else byte("abc"), CHAR, *map(Ref, names)])
    if kind < 0.8:
        return (Cat if kind < 0.55 else Or)(tuple(draw_expr(draw, names, depth - 1) for _ in range(draw.choice([0, 1, 2, 2, 2, 3]))))
    low = draw.choice([0, 0, 0, 1, 1, 2, 3])
    return Repeat(draw_expr(draw, names, depth - 1), low, draw.choice([None, None, low, low + 1, low + 2, low + 5]))


def draw_vocab(draw: random.Random) -> Vocab:
    tokens = [bytes(t) for n in (1, 2, 3) for t in itertools.product(b"abc", repeat=n)]
    tokens = [t for t in tokens if draw.random() < 0.6 or len(t) == 1] + [b"abcabc", b"aaaaaa", b"ab", b"d", None, b""]
    draw.shuffle(tokens)
    return with_walker(Vocab(tokens, [tokens.index(None)]), draw.random() < 0.5)


def check_against_earley(rules: Rules, vocab: Vocab, draw: random.Random, walks: int = 2, steps: int = 6) -> None:
    oracle, exists = productive(rules)
    try:
        machine = grammar.compile_rules(rules, vocab)
    except GrammarError:
        assert not exists
        return
    assert exists
    for _ in range(walks):
        state, text = machine.start, b""
        for _ in range(steps):
            want = {i for i, token in enumerate(vocab.tokens) if token and continues(oracle, text + token)}
            ends = continues(oracle, text).accepted()
            assert machine.is_accepting(state) == ends
            assert allowed(machine, state) == want | (set(vocab.end_ids) if ends else set()), (rules, text)
            forced, _ = machine.forced(state)
            assert not forced or not ends and {vocab.tokens[t][:1] for t in want} <= {forced[:1]}
            assert sum(number for _, number in machine.edges(state)) == len(want)
            assert {machine.step(state, t) is None for t in set(range(vocab.size)) - want} <= {True}
            for token in want:
                after, by_bytes = machine.step(state, token), machine.step_bytes(state, vocab.tokens[token])
                assert machine.is_accepting(after) == machine.is_accepting(by_bytes)
                assert after in dict(machine.edges(state))
            if not want:
                break
            token = draw.choice(sorted(want))
            state, text = machine.step(state, token), text + vocab.tokens[token]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_masks_are_those_of_brute_force(seed):
    """Random rules with left recursion, empty parts and nested repeats, whatever the thresholds that choose between equal ways."""
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), values in THRESHOLDS.items():
            patch.setattr(module, name, draw.choice(values))
        names = [f"r{i}" for i in range(draw.choice([1, 1, 2, 3]))]
        rules = Rules({name: draw_expr(draw, names, draw.choice([1, 2, 3])) for name in names}, "r0")
        try:
            check_against_earley(rules, draw_vocab(draw), draw)
        except GrammarError as error:               # at some text: a refusal, which is rare, and no wrong mask ("too long": a busy machine)
            assert re.search("too (ambiguous|long)", error.message)


a, b, c, S, T, U = byte("a"), byte("b"), byte("c"), Ref("S"), Ref("T"), Ref("U")
HARD = {
    "left": {"S": Or((Cat((S, a)), b))},
    "left, indirect": {"S": Or((Cat((T, a)), b)), "T": Or((Cat((U, b)), c)), "U": Or((Cat((S, c)), Cat((T, a))))},
    "left, hidden behind what may be empty": {"S": Or((Cat((T, S, a)), b)), "T": Or((EMPTY, Cat((T, c))))},
    "left and right": {"S": Or((Cat((S, b, S)), a))},
    "itself": {"S": Or((S, a, Cat((T, b)))), "T": Or((S, T))},
    "loops of nothing": {"S": Cat((Repeat(Repeat(Or((EMPTY, a)), 0, None), 2, None), Repeat(T, 1, 3))), "T": Or((EMPTY, Cat((T, T)), b))},
    "palindromes": {"S": Or((EMPTY, a, b, Cat((a, S, a)), Cat((b, S, b))))},
    "ambiguous": {"S": Or((Cat((S, S, S)), Cat((S, S)), a))},
    "never ends": {"S": Or((a, Cat((a, T)))), "T": Cat((b, T))},
    "counts in counts": {"S": Repeat(Cat((Repeat(CHAR, 2, 4), c)), 2, 3)},
    "a count beside its own character": {"S": Cat((Repeat(CHAR, 3, 9), Repeat(byte("ab"), 0, 2), c))},
    "two counts at once": {"S": Or((Cat((Repeat(CHAR, 1, 9), c)), Cat((Repeat(byte("ab"), 2, 12), b))))},
    "words of words": {"S": Repeat(Cat((Repeat(CHAR, 1, 4), Repeat(c, 0, 1))), 1, 3)},
    "words of words, at least two": {"S": Cat((Repeat(Cat((Repeat(byte("ab"), 2, 4), Repeat(c, 0, 1))), 2, 4), Repeat(Ref("S"), 0, 1)))},
    "many in a row": {"S": Cat((*[Repeat(a, 0, 1)] * 4, *[byte("ab")] * 9, *[Repeat(CHAR, 1, None)] * 2, Repeat(c, 1, 2), Repeat(c, 0, None)))},
    "open counts": {"S": Cat((Repeat(CHAR, 3, None), c, Repeat(byte("ab"), 4, None)))},
    "two open counts at once": {"S": Or((Cat((Repeat(CHAR, 3, None), c)), Cat((Repeat(byte("ab"), 5, None), b)), Repeat(CHAR, 0, 2)))},
    "open counts in counts": {"S": Repeat(Cat((Repeat(CHAR, 3, None), Repeat(c, 0, 1))), 2, None)},
    "any text but words": {"S": Cat((a, But(Or((byte("ab"), Cat((c, Repeat(b, 0, 1), a)))), (b"", b"a", b"abba", b"abbb", b"b")), c, Ref("T"))),
                           "T": Or((But(byte("abc"), (b"ab", b"abc")), Cat((c, But(CHAR, (b"ab", b"b"))))))},
    "few in front of many": {"S": Cat((Repeat(CHAR, 2, 5), Repeat(byte("ab"), 3, 3), Repeat(CHAR, 0, None), c))},
    "behind a count": {"S": Or((c, Cat((Repeat(byte("ab"), 2, 10), S, c))))},
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("narrow", [0, 24])
@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=pytest.mark.long)])
def test_hard_rules(name, narrow, seeds, monkeypatch):
    monkeypatch.setattr(nodes, "NARROW", narrow)
    monkeypatch.setattr(nodes, "UNROLLED", 1 if narrow == 0 else 8)
    for seed in range(seeds):
        draw = random.Random(seed)
        check_against_earley(Rules(HARD[name], "S"), draw_vocab(draw), draw, walks=3, steps=8)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_tokenisation_of_an_accepted_text_is_accepted(seed):
    draw = random.Random(seed)
    vocab = draw_vocab(draw)
    machine = grammar.compile_rules(Rules(HARD[draw.choice([n for n in HARD if n != "itself"])], "S"), vocab)
    state, text = machine.start, b""
    while not (machine.is_accepting(state) and (len(text) > 4 or not allowed(machine, state) - set(vocab.end_ids))) and len(text) < 12:
        token = draw.choice(sorted(allowed(machine, state) - set(vocab.end_ids)))
        state, text = machine.step(state, token), text + vocab.tokens[token]
    accepted = machine.is_accepting(state)
    ways = [[]]
    for _ in range(40):
        at, way = 0, []
        while at < len(text):
            token = draw.choice([i for i, t in enumerate(vocab.tokens) if t and text.startswith(t, at)])
            way.append(token)
            at += len(vocab.tokens[token])
        ways.append(way)
    for way in ways[1:]:
        end = run(machine, way)
        assert end is not None and machine.is_accepting(end) == accepted


# ---- regexes and grammars

REGEXES = [r"[a-c]+(-[a-c]+)*", r"\d{4}-\d\d?", r"(a|b)*abb", r"[^\n]{0,20}x?", r"(ab){2,5}c{1,9}", r"é+|ö{2}|日本?", r".{3}", r"(a?b){0,3}(cc|c)*",
           r"[a-z ]{2,5}[ -~]"]


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_accepts_what_re_accepts(pattern):
    draw, pieces = random.Random(0), ["a", "b", "c", "-", "1", "20", "é", "ö", "日", "本", "x", "\n", " ", "z", "日本", "abb", "c-", "cc", "~"]
    vocab = Vocab([*(p.encode() for p in pieces), b"\xe6", b"\x97", b"\xa5", b"\xc3", b"\xa9", b"\xb6"])
    machine = grammar.compile("regex", pattern, vocab)
    for _ in range(300):
        way = [draw.randrange(len(pieces)) for _ in range(draw.randint(0, 8))]
        state = run(machine, way)
        assert (state is not None and machine.is_accepting(state)) == bool(re.fullmatch(pattern, "".join(pieces[i] for i in way)))


@pytest.mark.parametrize("case", OTHERS, ids=[case["id"] for case in OTHERS])
def test_other_peoples_cases(case, demo):
    """Tokenised by the demo tokenizer: each token and the end of an accepted text are allowed, and a text that is refused is refused somewhere."""
    tokenizer, vocab = demo
    machine = grammar.compile(case["kind"], case["grammar"], vocab)
    for text in case["accept"] + case["reject"]:
        state, ids = machine.start, tokenizer.encode(text, add_special_tokens=False)
        for token in ids:
            assert (token in allowed(machine, state)) == (machine.step(state, token) is not None)
            state = machine.step(state, token)
            if state is None:
                break
        good = state is not None and machine.is_accepting(state)
        assert good == (text in case["accept"]), text
        assert not good or set(vocab.end_ids) <= allowed(machine, state)


@pytest.mark.parametrize("kind, text", [
    ("regex", r'\{"name": "[^"\\\n]{1,40}", "n": -?\d+\}'), ("json_object", True), ("choice", ["yes", "no", "not sure"])])
def test_rows_of_the_demo_vocabulary_are_those_of_byte_steps(kind, text, demo):
    tokenizer, vocab = demo
    machine, draw = grammar.compile(kind, text, vocab), random.Random(1)
    texts = [i for i, token in enumerate(vocab.tokens) if token]
    for _ in range(6):
        state = machine.start
        for _ in range(12):
            inside = allowed(machine, state) - set(vocab.end_ids)
            for token in draw.sample(texts, 150) + draw.sample(sorted(inside), min(len(inside), 100)):
                assert (machine.step_bytes(state, vocab.tokens[token]) is not None) == (machine.step(state, token) is not None) == (token in inside)
            if not inside:
                break
            state = machine.step(state, draw.choice(sorted(inside)))


# ---- counts, bounds, memory

def test_a_long_free_string_builds_few_rows(demo):
    tokenizer, vocab = demo
    vocab.shared = None
    machine = grammar.compile("regex", r'"([^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}){0,4096}"', vocab)
    state, text = machine.start, '"' + 'The "quick" brown fox: \\ 日本語 🙂 caf\u00e9\t' * 200
    ids = tokenizer.encode('"' + json.dumps(text, ensure_ascii=False)[1:-1][2:4000] + '"', add_special_tokens=False)
    for token in ids:
        state = machine.step(state, token)
        assert state is not None
    assert machine.is_accepting(state)
    assert sum(row is not None for row in machine.tables.rows) <= 20


def test_an_open_repeat_counts_up_to_its_lower_bound(demo):
    tokenizer, vocab = demo
    vocab.shared = None
    machine = grammar.compile("regex", r'"[^"\n]{5,}"', vocab)
    state, counts = machine.start, []
    for token in tokenizer.encode('"' + "The brown fox jumps. " * 20 + '"', add_special_tokens=False):
        assert (state := machine.step(state, token)) is not None
        counts.append(machine.split(state)[1])
    assert machine.is_accepting(state) and max(counts) == 5 and len(set(counts)) > 2
    assert sum(row is not None for row in machine.tables.rows) <= 3


@pytest.mark.parametrize("low, high", [(0, 7), (1, 100_000), (50, 50), (3, 60), (99_999, 100_000)])
def test_a_count_is_exact_at_both_ends(low, high):
    vocab = Vocab([b"x", b"xx", b"x" * 16, b"y", b"xy", b"xxy", b"\xc3\xa9", b"\xc3", b"\xa9", None], end_ids=[9])
    machine = grammar.compile("regex", "(?:[a-z]|é){%d,%d}y?" % (low, high), vocab)
    state, count, draw = machine.start, 0, random.Random(0)
    while count + 40 < low:
        state, count = machine.step(state, 2), count + 16
    for _ in range(60):
        for token, chars in ((0, 1), (1, 2), (2, 16), (6, 1)):
            assert (machine.step(state, token) is not None) == (count + chars <= high)
        assert (machine.step(state, 5) is not None) == (count + 3 <= high or low <= count + 2 <= high)
        assert machine.is_accepting(state) == (low <= count <= high)
        token, chars = draw.choice([(0, 1), (1, 2), (6, 1)])
        if (after := machine.step(state, token)) is None:
            break
        state, count = after, count + chars
    assert sum(row is not None for row in machine.tables.rows) <= 20


def test_rolling_back_is_forgetting_an_integer():
    vocab = Vocab([b"(", b")", b"()", b"(("])
    machine = grammar.compile("ebnf", 'root ::= "(" root* ")"', vocab)
    first = machine.step(machine.start, 0)
    deep = run(machine, [3, 3, 3])
    assert machine.step(machine.start, 0) == first and allowed(machine, first) == {0, 1, 2, 3}
    assert machine.step(deep, 1) == run(machine, [3, 3, 0])     # the state says all there is to know, not how it was reached


def test_grammars_share_what_they_have_in_common(demo):
    _, vocab = demo
    vocab.shared = None
    for name in ("alpha", "beta", "gamma"):
        machine = grammar.compile("regex", '"%s": "[^"]*", "next": \\d+' % name, vocab)
        state = machine.step_bytes(machine.start, f'"{name}": "some'.encode())
        machine.row(state)
    assert len(machine.tables.maps) == 2            # nothing, and the inside of a string: one for the three of them


def test_rows_that_differ_in_where_they_lead_alone_share_a_map(demo):
    """Each count of a repeat of words has rows of its own, and what goes on in the next word is a good part of the vocabulary."""
    tokenizer, vocab = demo
    vocab.shared = None
    machine, used = grammar.compile("regex", r"([A-Z][a-z]{1,12}[ ,.;]|[0-9]{1,4}[ ,.;]){60,90}", vocab), []
    tables, state = machine.tables, machine.start
    for token in tokenizer.encode("The Pride And The Prejudice Of The Other 7 Sisters Was Great,And More. " * 2, add_special_tokens=False):
        state = machine.step(state, token)
        if state is None:
            break
        used.append(tables.nbytes)
    assert len(used) > 12 and len(tables.maps) <= 8
    rows = [row for row in tables.rows if row is not None]
    assert np.mean([row.vec.nbytes + row.over_tokens.nbytes + row.over_values.nbytes for row in rows]) < 6000
    assert sum(tables.class_sizes[row.map].sum() == vocab.size for row in rows) == len(rows)


def test_much_behind_the_beginning_of_tokens_is_read_as_by_numpy():
    """What begins at an inner node comes from a template there, whose ends a walk lists in its own order."""
    draw, words = random.Random(1), {bytes([byte]) for byte in range(256)}
    while len(words) < 14_000:
        word = "".join(draw.choice("bcdfghklmnprst") + draw.choice("aeiou") + draw.choice(["", "", "n", "r", "s"])
                       for _ in range(draw.choice([1, 1, 2, 2, 3, 4])))
        words.add((draw.choice(["", "", " ", "  ", ' "']) + word + draw.choice(["", "", "", ",", '"', ". "])).encode())
    tokens = sorted(words)
    draw.shuffle(tokens)
    native_one, numpy_one = (grammar.compile("regex", r'(?:[b-f]?(?:[^"]|[a-e]n)){2,9}[a-z ]{3,9}', with_walker(Vocab(tokens), walks))
                             for walks in (True, False))
    assert native_one.mask(native_one.start).tobytes() == numpy_one.mask(numpy_one.start).tobytes()


def test_templates_that_were_thrown_out_are_made_again(demo, monkeypatch):
    tokenizer, vocab = demo
    found = []
    for bound in (waves.MAX_TEMPLATE_BYTES, 0):
        monkeypatch.setattr(waves, "MAX_TEMPLATE_BYTES", bound)
        vocab.shared = None
        for text in (r'\{"name": "[^"\n]{2,40}", "s": "[^"]*", "k": "(ab[a-z]*|[^"]{3,})"\}', r"[a-z ]{3,}\d+(, [^,]{2,9})*"):
            machine = grammar.compile("regex", text, vocab)
            for begin in (b"", b'{"name": "a', b'{"name": "ab", "s": "', b'{"name": "ab", "s": "x", "k": "abc', b"abc ", b"abc 1, x", b"abc 1, xyz"):
                state = machine.step_bytes(machine.start, begin)
                found.append(None if state is None else machine.mask(state).tobytes())
    assert found[: len(found) // 2] == found[len(found) // 2 :] and found.count(None) < len(found) // 2 + 1


def test_tables_only_grow_and_never_change(demo):
    _, vocab = demo
    machine, draw = grammar.compile("ebnf", 'root ::= "[" (root | [a-z]{1,30}) ("," root)* "]" | "x" root?', vocab), random.Random(0)
    tables = machine.tables
    pools = (tables.vec, tables.over_token, tables.over_value, tables.lines)
    state = machine.start
    for _ in range(30):
        before, states = [pool.array.copy() for pool in pools], tables.states.array.copy()
        built = states[:, 0] >= 0
        inside = sorted(allowed(machine, state) - set(vocab.end_ids))
        state = machine.step(state, draw.choice(inside)) if inside else machine.start
        for old, pool in zip(before, pools):
            assert (pool.array[: len(old)] == old).all()
        assert (tables.states.array[: len(states)][built] == states[built]).all()


def device_step(tables, state: np.ndarray, count: np.ndarray, token: np.ndarray):
    """What sampling does on a device: gathers and comparisons alone, for a batch of any grammars. (next state or -1, next count)"""
    which, vec, over, end, _ = tables.states.array[state].T
    lo, hi = over.copy(), end.copy()
    for _ in range(13):                             # MAX_OVERRIDES = 2**12: lower bound
        mid = (lo + hi) // 2
        less = (lo < hi) & (tables.over_token.array[np.minimum(mid, tables.over_token.size - 1)] < token)
        lo, hi = np.where(less, mid + 1, lo), np.where(less | (lo >= hi), hi, mid)
    at = np.minimum(lo, tables.over_token.size - 1)
    found = (lo < end) & (tables.over_token.array[at] == token)
    maps = np.stack(tables.maps)
    value = np.where(found, tables.over_value.array[at], tables.vec.array[vec + maps[which, token]])
    line = tables.allowed(value, count)
    _, _, to, op = tables.lines.array[line].T
    return np.where(line > 0, to, -1), np.where(op & grammar.KEEP, count, 0) + (op >> grammar.ADD_SHIFT)


def test_the_tables_say_what_the_grammar_says(demo):
    """A batch of states of different grammars steps by the tables alone."""
    _, vocab = demo
    vocab.shared = None
    machines = [grammar.compile("regex", p, vocab) for p in (r'"[^"]{2,30}"(, "\w+")*', r"\d+(\.\d{1,3})?", r"(yes|no|[a-z]{3,12}) .*")]
    draw, batch = random.Random(0), []
    for machine in machines:
        state = machine.start
        for _ in range(8):
            inside = sorted(allowed(machine, state) - set(vocab.end_ids))
            if not inside:
                break
            for token in [draw.choice(inside), draw.choice(inside), draw.randrange(17, vocab.size)]:
                batch.append((machine, state, token))
            state = machine.step(state, draw.choice(inside))
    state, count, token = (np.array(column) for column in zip(*((s & INDEX, s >> grammar.COUNT_SHIFT, t) for _, s, t in batch)))
    to, after = device_step(machines[0].tables, state, count, token)
    for (machine, s, t), index, n in zip(batch, to.tolist(), after.tolist()):
        want = machine.step(s, t)
        assert (index == -1 and want is None) or want == index | n << grammar.COUNT_SHIFT


def test_what_no_token_can_write_is_no_part_of_a_grammar():
    vocab = Vocab([b"a", None], end_ids=[1])
    with pytest.raises(GrammarError, match="matches nothing that"):
        grammar.compile("regex", "a~", vocab)
    machine = grammar.compile("regex", "a~|aa|b", vocab)
    assert allowed(machine, machine.start) == {0} and allowed(machine, run(machine, [0])) == {0} and allowed(machine, run(machine, [0, 0])) == {1}


def test_forced_text_goes_up_to_a_choice():
    vocab = Vocab([bytes([i]) for i in range(256)])
    machine = grammar.compile("regex", '\\{"name": "(x|y)", "ok": true\\}', vocab)
    text, state = machine.forced(machine.start)
    assert text == b'{"name": "'
    text, state = machine.forced(machine.step(state, ord("x")))
    assert text == b'", "ok": true}' and machine.is_accepting(state) and machine.forced(state) == (b"", state)


@pytest.mark.parametrize("rules, construct", [
    (Rules({"S": Cat((S, a))}, "S"), "grammar"), (Rules({"S": NEVER}, "S"), "grammar"), (Rules({"S": Ref("nobody")}, "S"), "nobody"),
    (Rules({"S": Repeat(a, 3, 2)}, "S"), "repeat")])
def test_rules_that_cannot_be_held_are_refused(rules, construct):
    with pytest.raises(GrammarError) as error:
        grammar.compile_rules(rules, Vocab([b"a"]))
    assert error.value.construct == construct


FUZZ = {
    "nested quantifiers": lambda: Repeat(Repeat(Repeat(Or((EMPTY, Repeat(byte("ab"), 0, 100))), 0, 100), 0, 100), 0, None),
    "repeats of an ambiguous pair": lambda: Repeat(Or((Repeat(a, 1, 50), Repeat(byte("ab"), 2, 60))), 0, 1000),
    "exponential for a finished automaton": lambda: Cat((Repeat(byte("ab"), 0, None), a, Repeat(byte("ab"), 40, 40))),
    "a long text": lambda: word(b"ab" * 100_000),
    "many texts": lambda: Or(tuple(word(f"a{i:06d}b".encode()) for i in range(20_000))),
    "a chain of rules": lambda: {f"r{i}": Or((Cat((byte("ab"), Ref(f"r{i + 1}"))), Ref(f"r{i + 1}"))) for i in range(2000)} | {"r2000": a},
    "left recursion through many": lambda: {
        f"r{i}": Or((Cat((Ref(f"r{(i + 1) % 40}"), a)), Cat((Ref(f"r{(i + 7) % 40}"), b)), b)) for i in range(40)},
    "recursion in counts": lambda: {"r0": Repeat(Or((Repeat(Ref("r0"), 0, 2), byte("ab"))), 3, None)},
    "rules in rules": lambda: {f"r{i}": Or((Cat((a, Ref(f"r{i + 1}"), Repeat(b, 0, 3))), byte("b"))) for i in range(3000)} | {"r3000": a},
    "deep": lambda: {"r0": Or((b, Cat((a, Ref("r0"), b))))},
}


def test_rows_of_several_grammars_in_turns(demo, monkeypatch):
    """What is known of one grammar's leaves is not another's, whichever was looked at last, and one that gave up forgets what it had begun."""
    _, shared = demo
    alone = with_walker(Vocab(shared.tokens, shared.end_ids), False)
    asked = [r'"[^"]*"', r'(\w+ ?)*', r'(name|number|[a-z]{3,9})(, (ten|twenty|[0-9]+)){0,6}', r'.*', r'([a-f]+|[g-z]+ )*\.']
    texts = ['"so it goes', "one two three", "number, twenty, 12, ten", "any text at all", "abcxyz abc."]
    made = [[grammar.compile("regex", text, words) for text in asked] for words in (shared, alone)]
    states = [[each.start for each in some] for some in made]
    for i in range(max(map(len, texts))):
        for k, text in enumerate(texts):
            if i < len(text) and i % len(texts) != k:
                ours, plain = made[0][k], made[1][k]
                if i == 7:
                    monkeypatch.setattr(readings, "MAX_GRAMMAR_STATES", 0)
                    with contextlib.suppress(GrammarError):
                        ours.row(states[0][k])
                    monkeypatch.undo()
                assert (ours.mask(states[0][k]) == plain.mask(states[1][k])).all(), text[:i]
                row, lines = ours.row(states[0][k]), shared.shared.tables.lines.array
                for value in {*row.vec.tolist(), *row.over_values.tolist()} - {0}:
                    while True:
                        assert ours.has(int(lines[value, 2])), "a state of another grammar"
                        if not lines[value, 3] & MORE:
                            break
                        value += 1
            if i < len(text):
                states[0][k], states[1][k] = (each[k].step_bytes(at[k], text[i].encode()) for each, at in zip(made, states))


@pytest.mark.parametrize("native_walks", [True, False])
def test_many_readings_of_a_token_are_joined_at_once(native_walks):
    """Their sums on the way would be states, too."""
    letters = [bytes([b]) for b in range(97, 123)]
    tokens = [*letters, *(a + b for a in letters for b in letters[:5]), *(b"x%d" % i for i in range(40)), *(b"%d" % i for i in range(10)), None]
    vocab = with_walker(Vocab(tokens, [len(tokens) - 1]), native_walks)
    ways = " | ".join(f'"a" [a-z]{{1,{50 + i}}} t{i}' for i in range(40))
    rules = "\n".join(f't{i} ::= "x{i}" t{i}?' for i in range(40))
    machine = grammar.compile("ebnf", f"root ::= {ways}\n{rules}", vocab)
    state = machine.step_bytes(machine.start, b"abc")
    for _ in range(4):
        assert allowed(machine, state) >= set(range(26))
        state = machine.step(state, 3)
    assert len(machine.tables.rows) < 400 and machine.places < 40_000


@pytest.mark.parametrize("name", FUZZ)
def test_it_neither_hangs_nor_fills_the_memory(name):
    made = FUZZ[name]()
    rules = Rules(made if isinstance(made, dict) else {"r0": made}, "r0")
    vocab = Vocab([b"a", b"b", b"ab", b"aaaaaaaa", b"abababababab", b"ba", b"0", b"000", None], end_ids=[8])
    began, draw = time.thread_time(), random.Random(0)
    try:
        machine = grammar.compile_rules(rules, vocab)
        state = machine.start
        for _ in range(60):
            inside = sorted(allowed(machine, state) - {8})
            if not inside or time.thread_time() - began > 5:
                break
            state = machine.step(state, draw.choice(inside[:3]))
        assert machine.tables.nbytes < 50 << 20
    except GrammarError as error:
        assert re.search("too (ambiguous|large|much|long)", error.message)
    assert time.thread_time() - began < 15


HOSTILE = {
    "words of words": ("regex", r"((\w{1,20} ?){1,9}\n?){1,9}"), "stars in stars": ("regex", "(" * 60 + "a?" + "b)*" * 60),
    "alternatives in stars": ("regex", "(a|" * 60 + "a?" + "b)*" * 60), "many optional": ("regex", r"\w?" * 300 + r"\w" * 300),
    "doubled and optional": ("ebnf", "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(30)) + '\nr30 ::= "z"? "y"?'),
    "one position each": ("regex", ".*a.{500}"), "the same in a row": ("regex", r"\w+" * 100_000), "counts in counts": ("regex", "((a{1,99}){1,99}){1,9}"),
    "a chain of halves": (
        "ebnf", "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}{{0,9}} r{i + 1}{{0,9}}" for i in range(40)) + '\nr40 ::= "z"'),
    "alternatives in counts": ("regex", "|".join(f"[a-{chr(98 + i % 24)}]{{1,{50 + i}}}x{i}" for i in range(100))),
    "all ways": ("ebnf", 'root ::= root " "? root | [a-z]+ | "(" root ")"')}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_costs_little_or_is_refused(name, demo):
    """CPU time of this thread; far beyond what it takes, for machines that are busy."""
    _, vocab = demo
    vocab.shared, began = None, time.thread_time()
    machine = grammar.compile(*HOSTILE[name], vocab, deadline=time.monotonic() + 30)
    assert time.thread_time() - began < 12
    state, draw = machine.start, random.Random(0)
    for _ in range(6):
        began = time.thread_time()
        inside = sorted(allowed(machine, state) - set(vocab.end_ids))
        assert time.thread_time() - began < 5
        state = machine.step(state, draw.choice(inside)) if inside else machine.start
    vocab.shared = None


@pytest.mark.parametrize("kind, text", [
    ("regex", "a" * 300_000), ("ebnf", "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} | [0-9] a{i}" for i in range(9000)) + "\na9000 ::= []"),
    ("ebnf", "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} | "{i}"' for i in range(9000)) + '\nr9000 ::= "z"')], ids=["regex", "ebnf", "rules"])
def test_a_deadline_ends_a_compilation(kind, text):
    began = time.thread_time()
    with pytest.raises(GrammarError, match="too long"):
        grammar.compile(kind, text.replace("[]", '"b"'), Vocab([b"a", b"0"]), deadline=time.monotonic() + 0.05)
    assert time.thread_time() - began < 3


ROUND = {  # long texts of which a parser makes little
    "bars": ("regex", "|" * 2**20), "class": ("regex", "[" + "ab" * 500_000 + "]"), "class without case": ("regex", "(?i)[" + "ab" * 500_000 + "]"),
    "sets": ("regex", "[" + r"\w\d-" * 200_000 + "]"), "comments": ("regex", "(?#)" * 2**18), "blanks": ("regex", "(?x)" + " " * 1_000_000),
    "flags": ("regex", "(?i)" * 2**18), "anchors": ("regex", "(^)|" * 2**18), "ebnf bars": ("ebnf", "root ::= " + "|" * 1_000_000),
    "ebnf class": ("ebnf", "root ::= [" + "ab" * 500_000 + "]"), "ebnf escapes": ("ebnf", 'root ::= "' + "\\n" * 500_000), "ebnf counts": ("ebnf", 'root ::= "a"' + "*" * 1_000_000),
    "ebnf rules": ("ebnf", "".join(f"a{i}::=" for i in range(100_000))), "empty texts": ("choice", [""] * 5_000_000), "texts": ("choice", [f"{i}" for i in range(150_000)])}


@pytest.mark.parametrize("name", ROUND)
def test_a_deadline_ends_whatever_goes_round(name):
    began = time.thread_time()
    with pytest.raises(GrammarError, match="too long"):
        grammar.compile(*ROUND[name], Vocab([b"a", b"0"]), deadline=time.monotonic() + 0.05)
    assert time.thread_time() - began < 1, "a few hundredths are usual"


def test_a_compilation_lets_others_have_the_lock():
    vocab = Vocab([bytes([i]) for i in range(256)])
    quick = grammar.compile("regex", "[a-z]+x", vocab)
    text = "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} | "{i}"' for i in range(3000)) + '\nr3000 ::= "z"'
    slow = threading.Thread(target=lambda: grammar.compile("ebnf", text, vocab))
    slow.start()
    longest = turns = 0
    while slow.is_alive():
        began = time.monotonic()
        quick.step_bytes(quick.start, b"abx")
        longest, turns = max(longest, time.monotonic() - began), turns + 1
        time.sleep(0.005)
    assert turns > 5 and longest < 1.0


def test_a_full_library_is_left_to_its_grammars(monkeypatch):
    vocab = Vocab([b"a", b"b"])
    old = grammar.compile("regex", "a*b", vocab)
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 2 * old.tables.nbytes - 2)
    new = grammar.compile("regex", "a*b", vocab)
    monkeypatch.undo()
    assert old.tables is not new.tables and allowed(old, old.start) == allowed(new, new.start) == {0, 1}


def test_threads_may_build_rows_of_one_vocabulary(demo):
    _, vocab = demo
    vocab.shared, found, failures = None, {}, []

    def work(number: int) -> None:
        try:
            machine = grammar.compile("regex", r'("[^"]{1,50}"|\w+ ?){1,9}', vocab)
            state, seen = machine.start, []
            for text in (b'"a', b' "', b"hello ", b"world"):
                seen.append(frozenset(allowed(machine, state)))
                state = machine.step_bytes(state, text) or machine.start
            found[number] = seen
        except Exception as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len({tuple(seen) for seen in found.values()}) == 1


def test_it_needs_numpy_and_nothing_larger():
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import nano_sgl.grammar"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
