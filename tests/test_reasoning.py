"""Thinking first: rules behind a closing tag against searching, the parameters that ask for it, and how the text is sorted into fields."""

import itertools
import re

import msgspec
import pytest
from earley import accepts
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_sgl import grammar, reasoning, schema
from nano_sgl.protocol import MAX_TAG_CHARS, RequestError, SamplingParams
from nano_sgl.reasoning import CLOSED, CONTENT, OPENED, REASONING, STYLES, UNKNOWN, Splitter, Style, begins, overlap
from nano_sgl.rules import Cat, GrammarError, Ref
from nano_sgl.vocab import Vocab

KINDS = [("regex", "a+", "a+"), ("ebnf", 'root ::= "<" rest | "a"\nrest ::= "b" root', "(<b)*a"), ("choice", ["a", "<b", ""], "a|<b|"),
         ("json_schema", {"enum": [1, "a"]}, '1|"a"'), ("structural_tag", {"format": {"type": "const_string", "value": "a<"}}, "a<"),
         ("reasoning", None, "(?s).*")]


@pytest.mark.parametrize("kind, text, pattern", KINDS, ids=[kind for kind, _, _ in KINDS])
@pytest.mark.parametrize("tag", ["<a>", "aab", ">"])
def test_a_grammar_begins_behind_the_first_closing_tag(kind, text, pattern, tag):
    made = schema.rules(kind, text, reasoning_end=tag)
    alphabet = [*dict.fromkeys(["<", "a", "b", ">", " ", tag, '"a"', "1", "é"])]
    for pieces in itertools.chain.from_iterable(itertools.product(alphabet, repeat=n) for n in range(4)):
        for blanks in ("", "\n\n") if tag in pieces else ("",):
            said = "".join(pieces).replace(tag, tag + blanks, 1)
            at = said.find(tag)
            rest = said[at + len(tag):]
            good = at >= 0 and any(rest[:n].strip(" \t\r\n") == "" and re.fullmatch(pattern, rest[n:]) for n in range(min(len(rest), 4) + 1))
            assert accepts(made, said.encode()) == good, said
    assert not accepts(made, (tag + " " * 5 + "a").encode()) or kind == "reasoning"


def test_the_engine_finds_its_rules():
    """A reference to what follows lies behind the thoughts, and one rule closes them."""
    made = schema.rules("ebnf", 'root ::= "x" rest closing root\nrest ::= "r"\nclosing ::= "c" | thinking\nthinking ::= ""', reasoning_end="</t>")
    assert made.rules[made.start] == Cat((Ref("thinking:0"), Ref(made.thinking)))
    assert schema.show(made.rules[made.closing]) == f"\\3C/t\\3E<{made.thinking}>"
    assert {"root", "rest", "closing", "thinking"} < made.rules.keys(), "a user may call rules as he likes"
    plain = schema.rules("regex", "a")
    assert plain.closing is plain.thinking is None


def test_thoughts_are_few_states_over_tokens():
    vocab = Vocab([bytes([b]) for b in range(256)] + [b"</", b"think>", b"</think>", b"<<", b">{", b"ab", None], end_ids=[262])
    made = grammar.compile("json_object", None, vocab, reasoning_end="</think>")
    state = made.start
    for token in [ord(c) for c in "let me </thin see <" * 100] + [256, 257]:
        assert not made.is_accepting(state)
        state = made.step(state, token)
    assert len(made.tables.rows) < 40 and made.step_bytes(state, b"x") is None
    state = made.step_bytes(state, b'\n\n{"</think>": 1}')
    assert made.is_accepting(state) and made.step_bytes(state, b"x") is None


def test_what_is_no_closing_tag():
    for wrong in ("", 5, ["</think>"], "\ud800", None):
        if wrong is None:
            assert accepts(schema.rules("regex", "a", reasoning_end=None), b"a")
        else:
            with pytest.raises(GrammarError, match="reasoning_end"):
                schema.rules("regex", "a", reasoning_end=wrong)
    with pytest.raises(GrammarError, match="takes no text"):
        schema.rules("reasoning", "a", reasoning_end="</think>")


# ----------------------------------------------------------------------------------------------------------------------- parameters

def test_parameters():
    def verified(**fields):
        made = SamplingParams.from_dict(fields)
        made.verify(1000, 1000)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made
        return made

    assert verified(reasoning_end="</t>").grammar == ("reasoning", None, {"reasoning_end": "</t>"})
    assert verified(reasoning_end="</t>", thinking_budget=0).grammar == ("reasoning", None, {"reasoning_end": "</t>"}), "the budget is the engine's"
    both = verified(reasoning_end="</t>", json_schema={}, json_strict=True, thinking_budget=9)
    assert both.grammar == ("json_schema", "{}", {"reasoning_end": "</t>", "strict": True})
    assert verified(reasoning_end="</t>", choice=["a"]).grammar.options == {"reasoning_end": "</t>"} and verified().grammar is None
    tag = {"format": {"type": "any_text"}}
    assert verified(structural_tag=tag).grammar == ("structural_tag", '{"format": {"type": "any_text"}}', {})
    assert verified(structural_tag=tag, json_whitespace="compact").grammar.options == {"whitespace": "compact"}
    assert verified(structural_tag="").grammar is None
    for fields, param, words in (
            ({"reasoning_end": ""}, "reasoning_end", "1 to 256"), ({"reasoning_end": "x" * (MAX_TAG_CHARS + 1)}, "reasoning_end", "1 to 256"),
            ({"reasoning_end": "\ud800"}, "reasoning_end", "surrogates"), ({"thinking_budget": 5}, "thinking_budget", "reasoning_end"),
            ({"reasoning_end": "</t>", "thinking_budget": -1}, "thinking_budget", "null or an integer in [0, "),
            ({"reasoning_end": 5}, "reasoning_end", "expected str"), ({"thinking_token_budget": 5}, "thinking_token_budget", "'thinking_budget'"),
            ({"structural_tag": [5]}, "structural_tag", "an object"), ({"structural_tag": tag, "regex": "a"}, "structural_tag", "regex")):
        with pytest.raises(RequestError) as caught:
            verified(**fields)
        assert caught.value.param == param and words in str(caught.value), str(caught.value)
    for wrong in (5, True, b"</t>"):
        with pytest.raises(RequestError, match="reasoning_end must be"):
            SamplingParams(reasoning_end=wrong).verify(1000, 1000)


# --------------------------------------------------------------------------------------------------------------------- text -> fields

def split(text: str, style: Style, opened: bool, cuts=()) -> dict[str, str]:
    splitter, found = Splitter(style, opened), {REASONING: "", CONTENT: ""}
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for first, last in zip(edges, edges[1:]):
        for field, part in splitter.feed(text[first:last]):
            assert part
            found[field] += part
    for field, part in splitter.feed("", ended=True):
        found[field] += part
    return found


@pytest.mark.parametrize("text, opened, thoughts, answer", [
    ("a</think>b", True, "a", "b"), ("a", True, "a", ""), ("", True, "", ""), ("<think>a</think>\n\nb", True, "a", "b"), ("\n<think>a", True, "a", ""),
    ("a</think>b</think>c", True, "a", "b</think>c"), ("a</thin", True, "a</thin", ""), ("<thin", True, "<thin", ""), (" \n", True, " \n", ""),
    ("a<think>b</think>c", True, "a<think>b", "c"), ("</think>b", True, "", "b"),
    ("a</think>b", False, "", "a</think>b"), ("<think>a</think>b", False, "a", "b"), (" <think>\na\n</think>\n<think>", False, "\na\n", "<think>"),
    ("<thin", False, "", "<thin"), ("<thought>", False, "", "<thought>"), (" \n", False, "", " \n"), ("<think>a", False, "a", ""), ("", False, "", "")])
def test_a_text_falls_into_thoughts_and_answer(text, opened, thoughts, answer):
    for cuts in itertools.chain([()], ([n] for n in range(len(text))), [range(len(text))]):
        assert split(text, STYLES["qwen3"], opened, cuts) == {REASONING: thoughts, CONTENT: answer}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<", "<think>", "</think>", "</", "a", " ", "\n", "think>", "◁/think▷"]), max_size=12), st.booleans(), st.lists(st.integers(0, 60)))
def test_cuts_change_nothing_and_only_blanks_are_lost(pieces, opened, cuts):
    text = "".join(pieces)
    found = split(text, STYLES["think"], opened, cuts)
    assert found == split(text, STYLES["think"], opened)
    begun, thinks = text.lstrip().startswith("<think>"), opened or text.lstrip().startswith("<think>")
    body = text.lstrip().removeprefix("<think>") if begun else text
    assert found == ({REASONING: body.partition("</think>")[0], CONTENT: body.partition("</think>")[2].lstrip(" \t\r\n")} if thinks else {REASONING: "", CONTENT: text})


def test_where_an_output_begins():
    r1, qwen = STYLES["deepseek-r1"], STYLES["qwen3"]
    for style in (r1, qwen):
        assert begins(style, "assistant\n<think>\n") == OPENED and begins(style, "<think>\n\n</think>\n\n") == CLOSED
        assert begins(style, "assistant\n<think>\n", enabled=False) == CLOSED
        assert begins(style, "assistant\n<think>so", "<think>so") == OPENED and begins(style, "</think>so", "<think>x</think>so") == CLOSED
        assert begins(style, "x</think>so", "x</think>so") == CLOSED
    assert begins(r1, "assistant\n") == OPENED and begins(qwen, "assistant\n") == UNKNOWN and begins(qwen, "a<think>b", "b") == UNKNOWN
    assert begins(STYLES["kimi"], "◁think▷") == OPENED and begins(STYLES["kimi"], "<think>") == UNKNOWN


def test_overlaps():
    assert [overlap(text, "<a<a>") for text in ("", "x", "<", "<a", "<a<", "<a<a", "<a<a>", "x<a<a", "<a<a<", "<b")] == [0, 0, 1, 2, 3, 4, 0, 4, 3, 0]
    assert reasoning.overlap("aaa", "aaaa") == 3
