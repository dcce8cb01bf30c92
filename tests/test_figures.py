"""Drawings of automata: figures.py, and `python -m nano_sgl.grammar GRAMMAR`."""

import itertools
import random
import re

import pytest

from nano_sgl import figures
from nano_sgl import grammar as grammars
from nano_sgl.figures import Machine, compress, draw, explore, show_set, straddling
from nano_sgl.grammar import INDEX
from nano_sgl.vocab import Vocab

BYTES = Vocab([bytes([b]) for b in range(256)] + [None], [256])


def machine_of(kind, text, limit=2000, vocab=BYTES):
    made = grammars.compile(kind, text, vocab)
    return explore(made.start, lambda state: made._alive(made._unpack(state)), lambda state, byte: made.step_bytes(state, bytes([byte])),
                   made.is_accepting, lambda state: state & INDEX, limit)


def test_figure_4_of_the_paper():
    """Fourteen states become two."""
    machine = machine_of("regex", r'\{"summary": "')
    small = compress(machine)
    assert len(machine.edges) == 14 and len(small) == 2
    (edge,), () = small.values()
    assert bytes([edge.first.bit_length() - 1]) + edge.forced == b'{"summary": "' and {edge.to} == machine.ends


@pytest.mark.parametrize("pattern, alphabet", [(r"(ab|ac)d{2}(ef)*", "abcdef"), ("a{2,4}b", "ab"), ("(abc){2}|abd", "abcd"),
                                               ("((ab)+c)*", "abc"), ("", "a")])
def test_the_drawing_is_the_automaton_compressed_or_not(pattern, alphabet):
    machine = machine_of("regex", pattern)
    small, rng = compress(machine), random.Random(0)

    def plain(text):
        state = machine.start
        for byte in text:
            state = machine.edges[state].get(byte)
            if state is None:
                return False
        return state in machine.ends

    def compressed(text):
        state = machine.start
        while text:
            ways = [edge for edge in small[state] if edge.first >> text[0] & 1]
            assert len(ways) <= 1
            if not ways or text[1:1 + len(ways[0].forced)] != ways[0].forced:
                return False
            state, text = ways[0].to, text[1 + len(ways[0].forced):]
        return state in machine.ends
    texts = {"".join(rng.choice(alphabet) for _ in range(rng.randint(0, 9))) for _ in range(300)}
    texts |= {"".join(some) for n in range(6) for some in itertools.product(alphabet, repeat=n)} if len(alphabet) < 4 else set()
    for text in texts:
        assert plain(text.encode()) == compressed(text.encode())
        assert plain(text.encode()) == bool(re.fullmatch(pattern, text)), text
    for state, edges in small.items():
        assert state == machine.start or state in machine.ends or len(machine.edges[state]) != 1
        assert all(edge.to in small for edge in edges)


def test_tokens_that_straddle():
    machine = machine_of("regex", r'\{"name": "[ab]{1,9}", "age": [0-9]\}')
    found = straddling(machine, [b'{"', b"a", b'"', b'",', b'a", "', b'": "', b': "b', b'"a', b': 1', b'1}', b"name", None, b'", "age": 7', b"no"])
    assert {key: set(tokens) for key, tokens in found.items()} == {
        ("into", b', "age": '): {b'",', b'a", "', b'", "age": 7'}, ("into", b"}"): {b"1}"},
        ("out of", b', "age": '): {b'", "age": 7', b": 1"}, ("out of", b'{"name": "'): {b': "b', b'"a'}}


def test_what_is_too_large_is_cut_off():
    for pattern in ("(a|b){1,3000}", "a{3000}", "\u00e9{3000}", "(ab){2,}"):
        machine = machine_of("regex", pattern, limit=5)
        assert machine.whole == (pattern == "(ab){2,}") and ("at least" in draw(machine)) == (not machine.whole)
    assert "... 11 more states" in draw(machine_of("regex", r'\{"summary": "'), most=3)


def test_a_count_is_not_drawn():
    """A long repeat is one state, with the edges that any count allows."""
    machine = machine_of("regex", "[ab]{2,300}c")
    state = machine.edges[machine.start][ord("a")]
    assert len(machine.edges) < 300 and machine.whole
    while ord("c") not in machine.edges[state]:
        state = machine.edges[state][ord("a")]
    assert machine.edges[state][ord("a")] == machine.edges[state][ord("b")] == state


def test_sets_of_bytes():
    mask = lambda some: sum(1 << byte for byte in some)  # noqa: E731
    assert show_set(mask(b"abcd")) == "[a-d]" and show_set(mask(b"ab0")) == "[0ab]" and show_set(mask([0xC3, 0x20])) == "[\\20\\C3]"


def test_from_the_command_line(capsys, tmp_path, monkeypatch, demo_path):
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
    grammars._main(["--states", "50", schema])
    printed = capsys.readouterr().out
    assert '`{"ok": `' in printed and "`f`" not in printed.split("compressed")[1].split("tokens of")[0] and "`false}`" in printed
    assert "tokenizer.json (49,152) that straddle" in printed and "` true`" in printed
    monkeypatch.setenv("NANO_SGL_CACHE", str(tmp_path))
    grammars._main([r'\{"name": "[a-z]+"\}'])
    assert re.search(r"regex .*\n(.*\n)*.*toy vocabulary .* is not there.*\n  into   `}`: `\"}`", capsys.readouterr().out)
    grammars._main(['root ::= "a" | "b" root', "--layout", "compact", "--tokenizer", str(demo_path / "tokenizer.json")])
    assert "ebnf" in capsys.readouterr().out
    grammars._main([])
    assert "rows" in capsys.readouterr().out
    for wrong in (["("], ["{}", "--kind", "poem"], ["a", "--layout", "round"]):
        with pytest.raises(SystemExit) as stopped:
            grammars._main(wrong)
        assert stopped.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_an_empty_machine_has_a_start_and_an_end():
    assert draw(Machine({0: {}}, {0})).startswith("1 states") and figures.quoted(b"a\nb\xff") == "`a\\nb\\xff`"
