"""protocol.py: aliases, ranges, refusals that name the field, grammars and their options, and the wire in both directions."""

from __future__ import annotations

import itertools
import json
import re
import math
import subprocess
import sys

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_sgl import schema
from nano_sgl.protocol import (
    ALIASES,
    ELSEWHERE,
    GRAMMAR_FIELDS,
    JSON_OPTIONS,
    JSON_WHITESPACES,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    RANGES,
    Chunk,
    Logprob,
    Request,
    RequestError,
    SamplingParams,
    convert,
    derive_seed,
)

VOCAB, CONTEXT = 49152, 8192


def verify(**fields) -> SamplingParams:
    params = SamplingParams(**fields)
    params.verify(VOCAB, CONTEXT)
    return params


def refused(fields: dict, param: str, *words: str) -> RequestError:
    """Both roads (constructor, JSON object) must refuse `fields`, naming `param`."""
    found = None
    for make in (lambda: SamplingParams(**fields), lambda: SamplingParams.from_dict(fields)):
        with pytest.raises(RequestError) as caught:
            make().verify(VOCAB, CONTEXT)
        found = caught.value
        assert found.param == param and found.status == 400
        assert param in str(found)
        for word in words:
            assert word in str(found), str(found)
    return found


def test_defaults():
    params = verify()
    assert (params.max_tokens, params.min_tokens, params.temperature) == (128, 0, 1)
    assert (params.top_p, params.top_k, params.min_p) == (1, -1, 0)
    assert params.n == 1 and params.seed is None and params.logprobs is None and params.skip_special_tokens
    assert params.stop_strings() == [] and params.stop_patterns() == []
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize("alias, name, value", [("max_new_tokens", "max_tokens", 7), ("max_new_tokens", "max_tokens", 0),
                                                ("max_new_tokens", "max_tokens", None), ("min_new_tokens", "min_tokens", 3),
                                                ("sampling_seed", "seed", 5)])
def test_aliases(alias, name, value):
    for params in (SamplingParams(**{alias: value}), SamplingParams.from_dict({alias: value}),
                   SamplingParams(**{alias: value, name: value}),
                   msgspec.json.decode(json.dumps({alias: value}), type=SamplingParams)):
        assert getattr(params, name) == value
        assert params == SamplingParams(**{name: value})
        assert alias not in msgspec.to_builtins(params)


@pytest.mark.parametrize("fields", [{"max_tokens": 5, "max_new_tokens": 6}, {"max_tokens": 128, "max_new_tokens": 6},
                                    {"max_tokens": None, "max_new_tokens": 6}, {"min_tokens": 1, "min_new_tokens": 2},
                                    {"seed": 1, "sampling_seed": 2}])
def test_two_names_that_disagree(fields):
    name, alias = fields
    refused(fields, name, alias, "two names")


def test_two_spellings_of_one_seed_agree():
    assert SamplingParams(seed=-1, sampling_seed=2**64 - 1).seed == 2**64 - 1
    assert SamplingParams(seed=2**64 + 7, sampling_seed=7).seed == 7
    assert SamplingParams(seed=None, sampling_seed=7).seed == 7


@pytest.mark.parametrize("seed, folded", [(0, 0), (42, 42), (-1, 2**64 - 1), (2**63, 2**63), (2**64, 0), (2**200, 0),
                                          (2**200 + 3, 3), (-(2**63), 2**63)])
def test_every_integer_is_a_seed(seed, folded):
    """F207: seeds beyond 64 bits."""
    for params in (verify(seed=seed), SamplingParams.from_dict({"seed": seed}),
                   SamplingParams.from_dict(json.loads(json.dumps({"seed": seed})))):
        assert params.seed == folded
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("seed", [1.5, "1", True, [1]])
def test_seeds_of_another_type(seed):
    refused({"seed": seed}, "seed")


def test_derive_seed():
    assert derive_seed(42, 0) == 42 and derive_seed(-1, 0) == 2**64 - 1
    seeds = [derive_seed(seed, index) for seed in range(200) for index in range(128)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**64 for seed in seeds)
    bits = sum(bin(derive_seed(seed, 1) ^ derive_seed(seed + 1, 1)).count("1") for seed in range(1000)) / 1000
    assert 31 < bits < 33           # neighbours differ in half of the bits


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("name", NUMBERS + ["top_k", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", [1], 10**400])
def test_what_is_no_number(name, value):
    """F067: NaN, infinities, bools, and what a client might send instead of a number."""
    refused({name: value}, name)


def test_not_a_number_in_a_body(api_case):
    """F067: Python's JSON reader lets NaN in, so the check is ours."""
    fields = json.loads(api_case("F067")["request"]["raw_body"])
    assert math.isnan(fields["temperature"])
    for name in NUMBERS:
        refused({name: fields["temperature"]}, name, "nan")


@pytest.mark.parametrize("name, good, bad", [
    ("temperature", [0, 0.0, 1e-7, 0.8, 2, 100.0], [-0.1, -1e-9, 1e7]),
    ("top_p", [0, 0.0, 1e-9, 0.5, 1, 1.0], [-0.1, 1.0001, 2]),
    ("top_k", [-1, 0, 1, 40, 10**6], [-2, -100, 2.0, 2**31]),
    ("min_p", [0, 0.5, 1], [-0.1, 1.1]),
    ("n", [1, 128], [0, -1, 129, 1_000_000, 1.0]),
    ("frequency_penalty", [-2, 2, 0.5], [-2.01, 2.01]),
    ("presence_penalty", [-2, 2, 0.5], [-2.01, 2.01]),
    ("repetition_penalty", [0.01, 1, 2], [0, 0.0, -1, 2.01]),
    ("max_tokens", [0, 1, None, 2**31 - 1], [-1, -3, 1.5, 2**31]),
    ("min_tokens", [0, 128], [-1, None]),
    ("logprobs", [None, 0, 20], [-1, 21]),
    ("prompt_logprobs", [None, 0, 20], [-1, 21]),
    ("logprob_start_len", [0, 8192], [-1, 8193]),
    ("ignore_eos", [True, False], [1, 0, "true", None]),
    ("no_stop_trim", [True, False], [1, None]),
    ("skip_special_tokens", [True, False], [1, None]),
    ("regex", [None, "", "yes|no", "(", "\U00040000", "a" * MAX_GRAMMAR_CHARS], [5, True, ["a"], "\ud8c0", "a" * (MAX_GRAMMAR_CHARS + 1)]),
    ("ebnf", [None, "", 'root ::= "a"', "no grammar"], [5, False, {"root": "a"}, "x\udc00", "é" * (MAX_GRAMMAR_CHARS + 1)]),
    ("choice", [None, ["a"], ["a", "ab", "", "日本"], ["a"] * MAX_CHOICES, ["a" * 1024] * 1024],
     [[], "", "abc", {}, 5, [5], [None], ["a", 5], [["a"]], ["a", "\ud800"], [""] * (MAX_CHOICES + 1), ["a" * 1024] * 1025, ["\ud8c0", "\udc00"]]),
    ("json_object", [True, False], [1, 0, "true", None, {}]),
    ("json_schema", [None, "", {}, {"type": "object"}, True, False, "{}", "no JSON", '"' + "a" * (MAX_GRAMMAR_CHARS - 1)],
     [5, 1.5, [], [{}], "\ud800", "a" * (MAX_GRAMMAR_CHARS + 1), {"const": "a" * MAX_GRAMMAR_CHARS}, {"const": math.nan}]),
    ("json_whitespace", [None], ["fixed", "loose", "", 5, True, ["fixed"]]),     # without a schema, a layout is one of nothing
    ("json_strict", [False], [True, 1, 0, "true", None]),
    ("json_any_order", [False], [True, 1, 0, "true", None]),
    ("stop", [None, "a", [], ["a", "b"], ["x"] * 32, "y" * 4096], ["", [""], ["a", ""], ["x"] * 33, 5, [5], [None], "y" * 4097]),
    ("stop_regex", [None, "a+", ["[0-9]{3}", r"\n\n"], r"\w{8}(-\w{4}){3}-\w{12}"],
     ["", "(", "*", "x" * 257, ["a"] * 33, 5, [5], "a*", "$", "(a{1000}){1000}", "a{99999999}", "(?:a{9}b){9} {9}{9}{9}",
      "(?R)b", r"(a)\\(?1)"]),
    ("stop_token_ids", [None, [], [0, 49151]], [[-1], [49152], [1.0], [True], 5, ["1"]]),
    ("logit_bias", [None, {}, {0: -100, 49151: 100.0}, {"5": 1}], [{49152: 1}, {-1: 1}, {5: 101}, {5: -100.1}, {5: math.nan},
                                                                   {5: math.inf}, {5: True}, {5: "1"}, {"x": 1}, [5], 5]),
])
def test_ranges(name, good, bad):
    for value in good:
        SamplingParams.from_dict({name: value}).verify(VOCAB, CONTEXT)
        if not (name == "logit_bias" and value == {"5": 1}):
            verify(**{name: value})
    for value in bad:
        refused({name: value}, name)


def test_messages_say_what_was_given_and_expected():
    assert str(refused({"top_p": 1.5}, "top_p")) == "top_p must be a number in [0, 1]; got 1.5"
    assert "integer in [1, 128]; got 1000000" in str(refused({"n": 1_000_000}, "n"))
    assert str(RANGES["priority"]) == "an integer in [-2147483647, 2147483647]", "no rounded bounds"
    assert "(0, 2]; got 0" in str(refused({"repetition_penalty": 0}, "repetition_penalty"))
    assert "max_new_tokens" in str(refused({"max_tokens": -3}, "max_tokens", "-3"))
    with pytest.raises(RequestError, match="logit_bias.*got 49152"):
        SamplingParams.from_dict({"logit_bias": {"49152": 1}}).verify(VOCAB, CONTEXT)
    with pytest.raises(RequestError, match="temperature: expected float, got str"):
        SamplingParams.from_dict({"temperature": "hot"})
    huge = refused({"stop": "\ud800" * 100}, "stop")
    str(huge).encode()              # printable anywhere
    assert len(str(refused({"stop": ["a" * 5000]}, "stop"))) < 300
    assert len(str(refused({"max_tokens": 10**5000}, "max_tokens"))) < 300


def test_min_tokens_within_max_tokens():
    verify(min_tokens=5, max_tokens=5)
    verify(min_tokens=500, max_tokens=None)
    refused({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "max_tokens", "5")
    refused({"min_tokens": CONTEXT + 1, "max_tokens": None}, "min_tokens", str(CONTEXT))


GRAMMARS = {"regex": "yes|no", "ebnf": 'root ::= "a"', "choice": ["yes", "no"], "json_schema": '{"type": "null"}', "json_object": True,
            "structural_tag": '{"format": {"type": "any_text"}}'}


def test_a_grammar_is_its_kind_and_its_text():
    assert GRAMMARS.keys() == set(GRAMMAR_FIELDS)
    for kind, value in GRAMMARS.items():
        given = verify(**{kind: value})
        assert given.grammar == (kind, None if kind == "json_object" else value, {})
        for wire in (msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SamplingParams), SamplingParams.from_dict({kind: value})):
            assert wire == given and wire.grammar == given.grammar
        assert given.grammar[0] in schema.GRAMMARS, "the same names on both sides"
    assert verify(choice=("yes", "no")).grammar == ("choice", ["yes", "no"], {})
    for fields in ({}, {"regex": ""}, {"ebnf": "", "regex": ""}, {"json_object": False}, {"regex": None, "choice": None}, {"json_schema": ""}):
        assert verify(**fields).grammar is None
    assert verify(regex="", choice=["a"], ebnf="", json_object=False, json_schema="").grammar == ("choice", ["a"], {})


@pytest.mark.parametrize("one, other", itertools.combinations(GRAMMAR_FIELDS, 2))
def test_two_grammars_are_refused_and_both_named(one, other):
    refused({one: GRAMMARS[one], other: GRAMMARS[other]}, other, one, "leave one of them out")


def test_sizes_of_grammars_are_those_of_the_compiler():
    """What is taken here is not refused for its size there."""
    assert MAX_GRAMMAR_CHARS == schema.MAX_TEXT
    assert "1048576 characters" in str(refused({"regex": "x" * (MAX_GRAMMAR_CHARS + 1)}, "regex"))
    message = str(refused({"choice": ["x" * MAX_GRAMMAR_CHARS, "y"]}, "choice", "100000 strings", "1048576 characters", "got 2 with 1048577"))
    assert len(message) < 300
    schema.rules("choice", ["x" * (MAX_GRAMMAR_CHARS - 1), "y"])


class Person(pydantic.BaseModel):
    """The second field has a default, and the first another name in JSON."""
    name: str = pydantic.Field(alias="Name", max_length=9)
    age: int = 7


def test_a_schema_becomes_its_text_whatever_it_is_given_as():
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": "\ud800é"}}}
    text = '{"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": "\\ud800\\u00e9"}}}'
    for given_as in (schema, text, json.dumps(schema)):
        for params in (verify(json_schema=given_as), SamplingParams.from_dict({"json_schema": given_as})):
            assert params.json_schema == text and params.json_strict is False and params.grammar == ("json_schema", text, {})
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert verify(json_schema={"b": 1, "a": 2}) != verify(json_schema={"a": 2, "b": 1}), "the order of keys is that of the answer"
    assert verify(json_schema=True).grammar.text == "true" and verify(json_schema=False).grammar.text == "false"
    deep = ring = {}
    for _ in range(100_000):
        deep = {"not": deep}
    ring["not"] = ring
    for wrong in (deep, ring, {"const": {1, 2}}, {(1, 2): 3}, object(), type, Person(Name="a")):
        with pytest.raises(RequestError, match="json_schema must be a JSON schema") as caught:
            verify(json_schema=wrong)
        assert caught.value.param == "json_schema" and len(str(caught.value)) < 300


def test_a_pydantic_model_is_a_strict_schema():
    """Its own schema, by the names that its JSON has; what the model would drop is not written."""
    for model, made in ((Person, Person.model_json_schema()), (pydantic.TypeAdapter(list[Person]), pydantic.TypeAdapter(list[Person]).json_schema()),
                        (pydantic.TypeAdapter(int | None), {"anyOf": [{"type": "integer"}, {"type": "null"}]})):
        params = verify(json_schema=model)
        assert json.loads(params.json_schema) == made and params.grammar == ("json_schema", params.json_schema, {"strict": True})
        for wire in (msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams), msgspec.structs.replace(params, n=3, seed=None),
                     SamplingParams.from_dict(msgspec.to_builtins(params))):
            assert wire.grammar == params.grammar
        loose = verify(json_schema=model, json_strict=False)
        assert loose.grammar.options == {} == msgspec.msgpack.decode(msgspec.msgpack.encode(loose), type=SamplingParams).grammar.options
    assert "Name" in verify(json_schema=Person).json_schema


def test_options_belong_to_their_grammars():
    given, every = {"type": "object"}, {"json_whitespace": "compact", "json_strict": True, "json_any_order": True}
    assert verify(json_schema=given, **every).grammar.options == {"whitespace": "compact", "strict": True, "any_order": True}
    assert verify(json_object=True, json_whitespace="flexible").grammar == ("json_object", None, {"whitespace": "flexible"})
    assert verify(json_schema=given, json_whitespace=None, json_strict=False, json_any_order=False).grammar.options == {}
    assert every.keys() == JSON_OPTIONS.keys() and set(JSON_WHITESPACES) == set(schema.LAYOUTS)
    for name, value in every.items():
        for grammar in ({}, {"regex": "a"}, {"choice": ["a"]}, {"json_schema": ""}, {"json_object": False}):
            refused({**grammar, name: value}, name, f"{name} is given, but no json_schema")
    for name in ("json_strict", "json_any_order"):
        refused({"json_object": True, name: True}, name, "no json_schema or structural_tag that it could be for")
    refused({"json_schema": given, "json_whitespace": "loose"}, "json_whitespace", "'fixed', 'compact' or 'flexible'", "got 'loose'")
    with pytest.raises(RequestError, match="json_whitespace must be null or one of 'fixed', 'compact' or 'flexible'; got 5"):
        verify(json_schema=given, json_whitespace=5)


def test_what_does_not_compile_is_left_to_the_engine():
    """A compile can take seconds; verify takes none."""
    for kind, text in (("regex", "(" * 1000), ("regex", "(?=a)"), ("ebnf", "root ::= root"), ("ebnf", "nothing"), ("regex", "(a{99}){99}"),
                       ("json_schema", "no JSON"), ("json_schema", {"type": "no type"}), ("json_schema", False), ("json_schema", {"$ref": "#/nowhere"})):
        verify(**{kind: text})


@pytest.mark.parametrize("name, here", [("guided_regex", "'regex'"), ("guided_choice", "'choice'"), ("guided_grammar", "'ebnf'"),
                                        ("guided_json", "'json_schema'"), ("structured_outputs", "'json_schema' for its json"),
                                        ("guided_whitespace_pattern", "'json_whitespace' is one of"), ("grammar", "'ebnf'"),
                                        ("response_format", "'json_object': true")])
def test_other_servers_names_are_refused_with_ours(name, here):
    with pytest.raises(RequestError, match=f"unknown field '{name}', got .*; here .*{re.escape(here)}") as caught:
        SamplingParams.from_dict({name: {"regex": "a"}})
    assert caught.value.param == name and not set(ELSEWHERE) & set(SamplingParams.__struct_fields__) - set(ALIASES)


def test_unknown_fields_are_refused_by_name():
    with pytest.raises(RequestError, match="unknown field 'max_token'.*did you mean 'max_tokens'"):
        SamplingParams.from_dict({"max_token": 5})
    with pytest.raises(RequestError, match="beam_width.*got 4") as caught:
        SamplingParams.from_dict({"beam_width": 4})
    assert caught.value.param == "beam_width"
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)
    for fields in ([], "x", None, 5):
        with pytest.raises(RequestError, match="expected an object"):
            SamplingParams.from_dict(fields)
    with pytest.raises(RequestError):
        SamplingParams.from_dict({5: 1})


def test_every_number_has_a_range():
    """A number that somebody adds to SamplingParams and forgets to bound fails here."""
    elsewhere = {"seed", "stop_token_ids", "logit_bias", *ALIASES}
    for field in msgspec.structs.fields(SamplingParams):
        if any(kind in str(field.type) for kind in ("int", "float")):
            assert field.name in RANGES or field.name in elsewhere, field.name


def test_frozen():
    params = SamplingParams(n=4, seed=3)
    with pytest.raises(AttributeError):
        params.n = 1
    assert msgspec.structs.replace(params, n=1) == SamplingParams(n=1, seed=3)


@pytest.mark.parametrize("fields, greedy", [({}, False), ({"temperature": 0}, True), ({"temperature": 1e-7}, True),
                                            ({"top_k": 1}, True), ({"top_p": 0}, True), ({"temperature": 1e-5}, False),
                                            ({"top_k": 0}, False)])
def test_greedy(fields, greedy):
    assert verify(**fields).greedy is greedy


def test_stops():
    params = verify(stop="a", stop_regex=["b+", "[0-9]{2}"])
    assert params.stop_strings() == ["a"]
    assert [pattern.search("x42 bb").group() for pattern in params.stop_patterns()] == ["bb", "42"]
    assert params.stop_patterns()[1].search("x4", partial=True).partial
    assert params.stop_patterns()[0] is verify(stop_regex="b+").stop_patterns()[0]       # compiled once


def test_lists_of_stops_are_bounded():
    for name, entry, most in (("stop", "a", 32), ("stop_regex", "a", 32), ("stop_token_ids", 5, 4096)):
        verify(**{name: [entry] * most})
        with pytest.raises(RequestError, match=f"{name} must have at most {most} entries; got 10000") as caught:
            verify(**{name: [entry] * 10_000})
        assert caught.value.param == name


@pytest.mark.parametrize("fields, param, words", [
    ({"logprobs": [{"token_id": "x"}]}, "logprobs", "logprobs[0]: expected array, got object"),
    ({"logprobs": [[1, 0.5, [[1, "x"]]]]}, "logprobs", "logprobs[0][2][0][1]: expected float, got str ('x')"),
    ({"text": 5}, "text", "text: expected str, got int (5)"), ({"x": 1}, "x", "unknown field 'x'")])
def test_a_wrong_type_is_named_with_its_place(fields, param, words):
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        convert({"rid": "r", **fields}, Chunk)
    assert caught.value.param == param


def test_a_missing_field_is_named():
    with pytest.raises(RequestError, match="the body: it lacks the field rid"):
        convert({}, Chunk)


def test_a_request_checks_its_prompt():
    def request(ids, **fields):
        Request(rid="r", prompt_ids=ids, params=SamplingParams(**fields)).verify(vocab_size=10, context_len=4)

    request([0, 9], max_tokens=1)
    request([1] * 3, max_tokens=1)
    request([1] * 4, max_tokens=0)          # fills the cache and samples nothing
    for ids in ([], [-1], [10], [1, 2.5], ["a", 1], [True], [[1]], None, [1] * 4, [1] * 100):
        with pytest.raises(RequestError, match="prompt") as caught:
            request(ids, max_tokens=1)
        assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="logprob_start_len"):
        request([1, 2], logprob_start_len=3)
    with pytest.raises(RequestError, match="temperature"):
        request([1, 2], temperature=-1.0)
    for fields in ({"rid": 5}, {"rid": "\ud800"}, {"namespace": None}, {"namespace": 5}, {"routing_key": 5}, {"priority": 2**40},
                   {"priority": True}, {"index": 128}):
        with pytest.raises(RequestError) as caught:
            Request(**{"rid": "r", "prompt_ids": [1], "params": SamplingParams(), **fields}).verify(10, 4)
        assert caught.value.param in fields


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
PARAMS = st.fixed_dictionaries({}, optional={
    "max_tokens": st.none() | st.integers(100, 2**31 - 1), "temperature": st.floats(0, 1e6), "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2**31 - 1), "min_p": st.floats(0, 1), "n": st.integers(1, 128), "seed": st.none() | st.integers(),
    "stop": st.none() | TEXT | st.lists(TEXT, max_size=4),
    "stop_token_ids": st.none() | st.lists(st.integers(0, VOCAB - 1), max_size=4),
    "min_tokens": st.integers(0, 100), "ignore_eos": st.booleans(), "no_stop_trim": st.booleans(),
    "frequency_penalty": st.floats(-2, 2), "presence_penalty": st.integers(-2, 2), "repetition_penalty": st.floats(0.1, 2),
    "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
    "logprobs": st.none() | st.integers(0, 20), "prompt_logprobs": st.none() | st.integers(0, 20),
    "logprob_start_len": st.integers(0, CONTEXT), "skip_special_tokens": st.booleans(), "choice": st.none() | st.lists(TEXT, min_size=1, max_size=4),
})
SCHEMA = st.dictionaries(TEXT, TEXT) | st.booleans() | st.sampled_from(['{"b": 1, "a": [2]}', "no JSON"])
SCHEMAS = st.fixed_dictionaries({"json_schema": SCHEMA}, optional={
    "json_whitespace": st.sampled_from([None, *JSON_WHITESPACES]), "json_strict": st.booleans(), "json_any_order": st.booleans()})


@settings(deadline=None, max_examples=200)
@given(PARAMS | SCHEMAS)
def test_round_trips(fields):
    params = verify(**fields)
    request = Request(rid="r1", prompt_ids=[1, 2, 3], params=params, index=2, namespace="salt", priority=-1, routing_key="k")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request | Chunk) == request
    assert msgspec.json.decode(msgspec.json.encode(request), type=Request | Chunk) == request
    assert msgspec.structs.replace(params, n=2).grammar == params.grammar == verify(**msgspec.to_builtins(params)).grammar
    assert SamplingParams.from_dict(json.loads(msgspec.json.encode(params))) == params
    assert SamplingParams.from_dict(msgspec.to_builtins(params)) == params


def test_chunks_cross_the_wire():
    chunk = Chunk(rid="r1", text="hi", output_ids=[5], finish_reason="stop", stop_reason=2, cached_tokens=7,
                  logprobs=[Logprob(5, -0.25, [(5, -0.25), (7, -1.5)])], prompt_logprobs=[Logprob(1, None)],
                  speculation={"spec_verify_ct": 3, "spec_accept_length": 1.5, "spec_accept_rate_by_depth": [0.5, 1.0]})
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(chunk), type=Request | Chunk) == chunk
    assert Chunk(rid="a").output_ids is not Chunk(rid="b").output_ids
    assert convert({"rid": "r", "text": "x"}, Chunk) == Chunk(rid="r", text="x")


def test_a_thousand_refusals_are_cheap():
    """F177: the answer to n = 1,000,000 does not depend on n."""
    for _ in range(1000):
        with pytest.raises(RequestError):
            SamplingParams(n=1_000_000).verify(VOCAB, CONTEXT)


def test_imports_without_torch_or_pydantic():
    code = ("import sys; sys.modules['torch'] = sys.modules['pydantic'] = None; import nano_sgl.protocol as p; "
            "p.SamplingParams(json_schema={}).verify(10, 10)")
    subprocess.run([sys.executable, "-c", code], check=True)
