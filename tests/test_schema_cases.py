"""Schemas that other engines got wrong, without a model: the cases of tests/cases/grammar.jsonl that have one.

Each text is read byte by byte and token by token, the demo model's tokens in several splits. What is accepted is so with flexible blanks, and as
Python writes the value in the two other layouts; what is refused is so in all three.
"""

import json
import random
import time

import pytest
from test_server_demo import expand

from nano_sgl import grammar
from nano_sgl.grammar import Grammar
from nano_sgl.rules import GrammarError
from nano_sgl.vocab import Vocab

SEPARATORS = {"fixed": (", ", ": "), "compact": (",", ":")}
LAYOUTS = ("flexible", *SEPARATORS)
MATCHED = ["F079", "F081", "F083", "F085", "F087", "F089", "F091", "F093", "F095", "F097", "F099", "F101", "F103", "F105", "F107", "F109", "F127"]
MAY_BE_REFUSED = {"F105": "uniqueItems"}     # by the name of this keyword


@pytest.fixture(scope="module")
def vocab(demo_path):
    from transformers import AutoTokenizer
    made = Vocab.from_tokenizer(AutoTokenizer.from_pretrained(demo_path))
    made.ids = {token: i for i, token in reversed([*enumerate(made.tokens)]) if token}
    return made


def compiled(schema, vocab: Vocab, whitespace: str = "fixed", **options) -> Grammar:
    return grammar.compile("json_schema", json.dumps(schema), vocab, whitespace=whitespace, **options)


def splits(text: bytes, ids: dict[bytes, int]) -> list[list[int]]:
    """Tokens that make up the text: the longest each time, the shortest, and two that chance takes. No split is left out but where a byte has no
    token of its own."""
    rng, found = random.Random(len(text)), []
    for take in (max, min, rng.choice, rng.choice):
        at, made = 0, []
        while at < len(text) and (ends := [end for end in range(at + 1, min(at + 16, len(text)) + 1) if text[at:end] in ids]):
            end = take(ends)
            made.append(ids[text[at:end]])
            at = end
        found += [made] if at == len(text) else []
    return found


def allows(made: Grammar, state: int, token: int) -> bool:
    return bool(made.mask(state)[token >> 5] >> (token & 31) & 1)


def accepts(made: Grammar, text: str) -> bool:
    """Is this all of an output? However it is read, the answer is the same."""
    state = made.start
    for byte in text.encode():
        state = None if state is None else made.step_bytes(state, bytes([byte]))
    answer = state is not None and made.is_accepting(state)
    for tokens in splits(text.encode(), made.vocab.ids):
        state = made.start
        for token in tokens:
            after = made.step(state, token)
            assert allows(made, state, token) == (after is not None)
            if (state := after) is None:
                break
        assert answer == (state is not None and all(allows(made, state, end) for end in made.vocab.end_ids)), (text, tokens)
    return answer


@pytest.mark.parametrize("name", MATCHED)
def test_texts_of_a_schema(vocab, api_case, name):
    """F079 to F109, F127: what is accepted, and what is not."""
    case = api_case(name)
    for whitespace in LAYOUTS:
        start = time.process_time()
        try:
            made = compiled(case["schema"], vocab, whitespace)
        except GrammarError as error:
            assert error.construct == MAY_BE_REFUSED[name] and str(error).startswith(error.construct), error
            continue
        assert time.process_time() - start < 5
        for text in case["accept"]:
            value = json.loads(text)
            assert accepts(made, text) or whitespace != "flexible", text
            if whitespace in SEPARATORS:
                assert accepts(made, json.dumps(value, separators=SEPARATORS[whitespace], ensure_ascii=False)), (whitespace, text)
        for text in [*case["reject"], *map(expand, case.get("policy_reject", ()))]:
            assert not accepts(made, text), (whitespace, text)


def test_F089_bounds_that_leave_nothing_are_refused(vocab, api_case):
    """F089"""
    with pytest.raises(GrammarError, match="no value is valid"):
        compiled(api_case("F089")["schema"] | {"minItems": 5, "maxItems": 2}, vocab)


def test_F097_references_that_lead_nowhere_are_refused(vocab):
    """F097: each is nothing but another, without end."""
    for schema in ({"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
                   {"anyOf": [{"$ref": "#"}]}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}):
        with pytest.raises(GrammarError) as refused:
            compiled(schema, vocab)
        assert refused.value.construct in ("$ref", "schema")


def test_F105_a_keyword_is_held_or_refused_by_its_name(vocab, api_case):
    """F105: never passed over."""
    held = {}
    for keyword, schema, text in api_case("F105")["held"]:
        try:
            made = compiled(schema, vocab, "compact")
        except GrammarError as error:
            assert error.construct == keyword and str(error).startswith(f"{keyword} at "), (schema, error)
            held.setdefault(keyword, False)
            continue
        assert not accepts(made, text), (schema, text)
        held[keyword] = True
    assert sum(held.values()) >= 8, held
