"""Grammars as users meet them: the fields of the routes, refusals, and the cases of tests/cases/grammar.jsonl over HTTP.

Two servers for the module: the demo model in float32 for the cases that speak of its tokens, a tiny one for what is only counted. What a body
means is read without either.
"""

import concurrent.futures
import json
import re
import time
from pathlib import Path

import httpx
import jsonschema
import msgspec
import pytest
from test_server import ServedModel, check_refused, children, make_reader, metrics
from test_server_demo import Demo, expand, refused, wait_until

from nano_sgl import api, grammar
from nano_sgl.protocol import MAX_CHOICES, MAX_GRAMMAR_CHARS, RequestError
from nano_sgl.vocab import Vocab

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]
NOWHERE = "\U00040000"      # SmolLM2 has no token that begins with its first byte
SLOW = "root ::= r0\n" + "\n".join(f'r{i} ::= "a{i}" r{(i * 7 + 1) % 12000} | "b" r{(i * 3 + 5) % 12000} | "c"' for i in range(12000))  # seconds


@pytest.fixture(scope="module")
def demo():
    server = Demo()
    try:
        yield server
    finally:
        log = server.close()
    assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    import tiny  # torch and transformers, for these tests alone
    path = tiny.add_tokenizer(tiny.checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))
    with ServedModel("--model", str(path), "--max-total-tokens", "4096", "--constrained-json-whitespace", "compact") as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every test the server it has used is idle."""
    yield
    for name in {"demo", "small"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        assert wait_until(lambda: idle(server), 20), server.stats()


def idle(server: ServedModel | Demo) -> bool:
    """Nothing runs, waits or is compiled, and every slot is free or cached."""
    now = server.stats()
    return now["running"] == now["waiting"] == now.get("grammar_queue", 0) == 0 and now["kv_free"] + now["kv_cached"] == now["kv_capacity"]


@pytest.fixture(scope="module")
def vocab(demo_path):
    from transformers import AutoTokenizer
    return Vocab.from_tokenizer(AutoTokenizer.from_pretrained(demo_path))


def parts(answer: httpx.Response) -> list[tuple[str, str]]:
    """(text, finish reason) of each choice of an OpenAI answer."""
    assert answer.status_code == 200, answer.text
    return [(choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]) for choice in answer.json()["choices"]]


def memory(server: ServedModel | Demo, name: str) -> int:
    """MiB of the engine process, as the system counts them: VmRSS now, VmHWM at most so far."""
    [child] = [pid for pid in children(server.process.pid) if b"--engine-child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(re.search(rf"{name}:\s*(\d+) kB", Path(f"/proc/{child}/status").read_text())[1]) >> 10


def assert_valid(text: str, schema: dict) -> None:
    """The text is JSON that the schema allows, as another implementation sees it."""
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


# ------------------------------------------------------------------------------------------------------------- what a body means

def read(path: str, **body) -> api.Call:
    prompt = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "hi"}, GENERATE: {"text": "hi"}}[path]
    verb = {CHAT: "chat", COMPLETIONS: "completion", GENERATE: "generate"}[path]
    return getattr(make_reader(), verb)(msgspec.json.encode({**prompt, **body}))


def unreadable(param: str, *words: str, path: str = COMPLETIONS, **body) -> None:
    with pytest.raises(RequestError) as caught:
        read(path, **body)
    assert caught.value.param == param and caught.value.status == 400
    for word in (param, *words):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("kind, value", [("regex", "yes|no"), ("ebnf", 'root ::= "a"'), ("choice", ["yes", "no"]), ("json_object", True),
                                         ("json_schema", '{"type": "null"}'), ("json_schema", {"b": 1, "a": [1]}), ("json_schema", False)])
def test_every_route_takes_every_grammar(kind, value):
    text = None if kind == "json_object" else json.dumps(value) if kind == "json_schema" and not isinstance(value, str) else value
    expected = (kind, text, {})
    for path in (CHAT, COMPLETIONS):
        assert [r.params.grammar for r in read(path, **{kind: value}, n=2).requests] == [expected] * 2
    one = {"max_new_tokens": 3, kind: value}
    assert read(GENERATE, sampling_params=one).requests[0].params.grammar == expected
    mixed = read(GENERATE, text=["a", "b", "c"], sampling_params=[one, {}, {"regex": "x"}]).requests
    assert [r.params.grammar for r in mixed] == [expected, None, ("regex", "x", {})]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_response_format(path):
    def made(**body):
        [request] = read(path, **body).requests
        return request.params.grammar

    thing = ("json_object", None, {})
    assert made(response_format={"type": "json_object"}) == thing == made(response_format={"type": "json_object"}, json_object=True)
    assert made(response_format={"type": "json_object"}, json_whitespace="compact").options == {"whitespace": "compact"}
    assert made(response_format={"type": "text"}) is None is made(response_format=None) is made(regex="", response_format={"type": "text"})
    assert made(response_format={"type": "text"}, regex="a") == ("regex", "a", {}) == made(regex="a", ebnf="", response_format=None)
    assert made(response_format={"type": "json_object"}, regex="", ebnf="", choice=None) == thing
    tag = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}
    assert made(response_format=tag) == ("structural_tag", json.dumps(tag), {}) == made(structural_tag=tag) == made(response_format=tag | {"format": None})
    unreadable("response_format", "'structural_tag' has type, format, triggers", "'structural_tag': {}", path=path,
               response_format={"type": "structural_tag", "structural_tag": {}})
    for wrong in ({}, {"type": None}, {"type": "xml"}, {"type": ["json_object"]}, {"type": {}}):
        unreadable("response_format", "'text', 'json_object', 'json_schema'", path=path, response_format=wrong)
    for wrong in ("json_object", [], 5, True):
        unreadable("response_format", "expected object", path=path, response_format=wrong)
    for kind in ("text", "json_schema"):
        unreadable("response_format", "'schema'", path=path, response_format={"type": kind, "schema": {"type": "object"}})
    for other in ({"regex": "a"}, {"ebnf": 'root ::= "a"'}, {"choice": ["a"]}, {"choice": []}, {"json_schema": {}}, {"json_object": 1}):
        unreadable("response_format", *other, "leave one of them out", path=path, response_format={"type": "json_object"}, **other)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_response_format_with_a_schema(path):
    """OpenAI's form, and the schema of a json_object, as llama.cpp has it; the options of JSON beside it."""
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": True}}
    text, asked = json.dumps(schema), lambda **more: {"type": "json_schema", "json_schema": {"name": "t", "schema": schema, **more}}

    def made(format, **body):
        [request] = read(path, response_format=format, **body).requests
        return request.params.grammar

    assert made(asked()) == made(asked(strict=False)) == made(asked(strict=None, description=None)) == ("json_schema", text, {})
    assert made(asked(strict=True, description="d")) == made(asked(), json_strict=True) == ("json_schema", text, {"strict": True})
    assert made({"type": "json_object", "schema": schema}) == ("json_schema", text, {}) == made(asked(schema=text))
    assert made({"type": "json_object", "schema": None}) == ("json_object", None, {}) and made(asked(schema=False)).text == "false"
    options = {"json_whitespace": "flexible", "json_any_order": True}
    assert made(asked(strict=True), **options).options == {"strict": True, "whitespace": "flexible", "any_order": True}
    refused_as = lambda format, *words, **body: unreadable("response_format", *words, path=path, response_format=format, **body)
    for wrong in ({}, {"json_schema": None}, {"json_schema": {}}, {"json_schema": {"name": "t", "schema": None}}, {"json_schema": "{}"},
                  {"json_schema": [schema]}, {"json_schema": {"schema": ""}}):
        refused_as({"type": "json_schema", **wrong}, "needs {'json_schema': {'name': ..., 'schema': {...}}}")
    for more, words in (({"title": "t"}, "'title'"), ({"strict": 1}, "json_schema.strict must be true or false; got 1"),
                        ({"name": 5}, "json_schema.name must be text"), ({"schema": [1]}, "json_schema.schema must be a JSON schema; got [1]")):
        refused_as(asked(**more), words)
    refused_as({"type": "json_object", "schema": 5}, "must be a JSON schema")
    refused_as({"type": "json_object", "schema": schema, "strict": True}, "'strict'")
    refused_as(asked(strict=True), "strict and the field json_strict", json_strict=True)
    for other in ({"json_object": True}, {"json_schema": schema}, {"regex": "a"}, {"choice": ["a"]}):
        refused_as(asked(), *other, "leave one of them out", **other)
    unreadable("json_strict", "no json_schema", path=path, response_format={"type": "json_object"}, json_strict=True)
    unreadable("json_whitespace", "'fixed', 'compact' or 'flexible'", path=path, response_format=asked(), json_whitespace="loose")
    unreadable("json_whitespace", "expected str", path=path, response_format=asked(), json_whitespace=5)
    unreadable("json_any_order", "expected bool", path=path, json_schema=schema, json_any_order="yes")


def test_what_is_not_spelled_as_here_is_refused_with_a_hint():
    for path in (CHAT, COMPLETIONS):
        unreadable("choice", "regex", path=path, regex="a", choice=["a"])
        unreadable("choice", "one or more strings", path=path, choice=[])
        unreadable("structural_tag", "an object, or the text of one", path=path, structural_tag=[{}])
        unreadable("json_schema", "an object, true, false, or the text of one", path=path, json_schema=[{}])
        for name, here in (("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "ebnf"), ("structured_outputs", "regex"),
                           ("guided_json", "json_schema")):
            unreadable(name, "unknown field", f"'{here}'", path=path, **{name: "a"})
    for name in ("regex", "choice", "json_schema", "json_whitespace", "temperature", "max_new_tokens"):
        unreadable(name, "belongs into sampling_params", path=GENERATE, **{name: "a"})
    for where in ({"response_format": {"type": "json_object"}}, {"sampling_params": {"response_format": {"type": "json_object"}}}):
        unreadable("response_format", "'json_object': true", path=GENERATE, **where)
    unreadable("ebnf", path=GENERATE, sampling_params={"regex": "a", "ebnf": "b"})
    unreadable("logprobs", "unknown field", path=GENERATE, logprobs=1)


def test_copies_of_a_long_grammar_are_bounded():
    text = "x" * (MAX_GRAMMAR_CHARS - 1)
    assert len(read(COMPLETIONS, regex=text, n=4).requests) == 4
    unreadable("regex", "counted for each of its 5 samples", "at most 4194304", regex=text, n=5)
    unreadable("choice", "characters", choice=["ab"] * MAX_CHOICES, n=14)
    schema = {"const": "x" * (MAX_GRAMMAR_CHARS - 20)}
    assert len(read(COMPLETIONS, json_schema=schema, n=4).requests) == 4
    unreadable("json_schema", "counted for each of its 5 samples", "at most 4194304", json_schema=schema, n=5)
    unreadable("json_schema", "at most 1048576 characters", json_schema={"const": "x" * MAX_GRAMMAR_CHARS})
    long = {"choice": ["a"] * MAX_CHOICES}
    start = time.process_time()
    unreadable("choice", path=GENERATE, text=["x"] * 1000, sampling_params=long)
    assert time.process_time() - start < 2, "what is one for all prompts is checked once"
    assert len(read(GENERATE, text=["x"] * 20, sampling_params=long).requests) == 20


# ---------------------------------------------------------------------------------------------------------------- the end, and cuts

def test_F121_a_complete_text_ends(demo, api_case):
    """F121"""
    case = api_case("F121")
    [(text, reason)] = parts(demo.case(case))
    assert text in ("yes", "no") and reason == "stop"
    assert parts(demo.case(case, ignore_eos=True)) == parts(demo.case(case, regex="", choice=["yes", "no"])) == [(text, "stop")]
    assert "".join(demo.texts(COMPLETIONS, **expand(case["request"]["body"]))) == text
    assert parts(demo.case(case, min_tokens=20)) == [(text, "stop")]
    assert parts(demo.case(case, min_tokens=2, regex="(yes|no) *\\.", max_tokens=9))[0][1] == "stop"
    demo.alive()


def test_F119_no_end_id_cuts_an_object(demo, api_case):
    """F119: the mask stands behind the bias; a stop that the user asks for wins."""
    case = api_case("F119")
    schema, pattern = case["request"]["body"]["response_format"]["json_schema"]["schema"], {"response_format": None, "regex": case["regex"]}
    [(text, reason)] = parts(demo.case(case))
    assert_valid(text, schema)
    assert reason == "stop"
    [(text, reason)] = parts(demo.case(case, **pattern))
    assert re.fullmatch(case["regex"], text) and json.loads(text).keys() == {"city", "n"} and reason == "stop"
    [(text, reason)] = parts(demo.case(case, logit_bias=None, stop_token_ids=[28], choice=["1,2,3,4,5"], response_format=None))
    assert (text, reason) == ("1", "stop")
    for given in ({}, pattern):
        [(text, reason)] = parts(demo.case(case, logit_bias=None, stop=['", "n"'], **given))
        assert re.fullmatch(r'\{"city": "[^"]{0,12}', text) and reason == "stop"
        [(text, reason)] = parts(demo.case(case, max_tokens=3, **given))
        assert reason == "length" and '{"city": "'.startswith(text[:10])


def test_F129_of_two_choices_the_longer_and_the_shorter_can_both_be_had(demo, api_case):
    """F129"""
    case = api_case("F129")
    for grammar_given in ({}, {"regex": None, "choice": ["10", "100", "1000"]}, {"regex": None, "ebnf": 'root ::= "10" "0"{0,2}'}):
        assert parts(demo.case(case, **grammar_given)) == [("1000", "stop")]
        assert parts(demo.case(case, **grammar_given, logit_bias={"2": 100})) == [("10", "stop")]


def test_F131_a_grammar_that_no_token_can_follow(demo, api_case):
    """F131: refused before a stream begins, or told in it where it has begun."""
    case = api_case("F131")
    start = time.monotonic()
    for stream in (False, True):
        error = refused(demo.case(case, stream=stream))
        assert error["param"] == "regex" and "regex" in error["message"] and error["code"] == 400
    assert time.monotonic() - start < 10
    assert parts(demo.case(case, regex=f"a({NOWHERE}|b)")) == [("ab", "stop")]
    answer = demo.case(case, regex=None, json_schema=case["schema"], max_tokens=30)
    assert answer.status_code == 400 and refused(answer)["param"] == "json_schema" or json.loads(parts(answer)[0][0]) == f"x{NOWHERE}"
    assert parts(demo.case(case, regex=None, json_schema={"enum": [f"x{NOWHERE}", "xy"]}, max_tokens=30))[0][0] in (f'"x{NOWHERE}"', '"xy"')
    for kind, text in (("regex", f"ab{NOWHERE}"), ("choice", [f"ab{NOWHERE}"]), ("ebnf", f'root ::= "ab" "{NOWHERE}"')):
        assert refused(demo.case(case, **{"regex": None, kind: text}))["param"] == kind
        answer = demo.case(case, **{"regex": None, kind: text}, stream=True)
        if answer.status_code != 400:
            last = check_broken(answer)
            assert last["param"] == kind and last["code"] == 400
    demo.alive()


def check_broken(answer: httpx.Response) -> dict:
    """The error at the end of a stream that had begun; nothing in it looks finished."""
    assert answer.status_code == 200 and "[DONE]" not in answer.text and '"finish_reason":"' not in answer.text
    return json.loads(answer.text.rstrip().rpartition("data: ")[2])["error"]


# ------------------------------------------------------------------------------------------------------------------ what comes out

def accepts(vocab: Vocab, kind: str, text: str, output: str) -> bool:
    made = grammar.compile(kind, text, vocab)
    state = made.step_bytes(made.start, output.encode())
    return state is not None and made.is_accepting(state)


@pytest.mark.parametrize("name", ["F123", "F125"])
def test_F123_F125_texts_byte_by_byte(vocab, api_case, name):
    """F123, F125"""
    case = api_case(name)
    pattern = case.get("regex") or case["request"]["body"]["regex"]
    assert all(accepts(vocab, "regex", pattern, text) for text in case["accept"])
    assert not any(accepts(vocab, "regex", pattern, text) for text in case["reject"])


def test_F123_characters_of_several_bytes(demo, api_case):
    """F123"""
    case, seen = api_case("F123"), set()
    for seed in range(6):
        [(text, reason)] = parts(demo.case(case, seed=seed))
        deltas = demo.texts(COMPLETIONS, **{**expand(case["request"]["body"]), "seed": seed})
        assert text == "".join(deltas) in case["accept"] and reason == "stop" and not any("\ufffd" in delta for delta in deltas)
        seen.add(text)
    assert len(seen) > 1


def test_F157_no_delta_has_a_part_of_a_character(demo, api_case):
    """F157"""
    choices = [c for event in demo.events(COMPLETIONS, **expand(api_case("F157")["request"]["body"])) for c in event["choices"]]
    assert "".join(c["text"] for c in choices) == "\U0001f642" * 3 and choices[-1]["finish_reason"] == "stop"
    assert not any("\ufffd" in c["text"] for c in choices)


def test_F125_classes(demo, api_case):
    """F125"""
    body = expand(api_case("F125")["request"]["body"])
    for text, reason in parts(demo.post(COMPLETIONS, **body, n=8, seed=1)):
        assert reason == "length" or re.fullmatch(body["regex"], text), text


def test_F109_any_json(demo, api_case):
    """F109: at temperature 1."""
    ended = 0
    for seed in range(1, 7):
        [(text, reason)] = parts(demo.case(api_case("F109"), seed=seed))
        if reason == "stop":
            ended += 1
            assert isinstance(json.loads(text), dict)
        else:
            assert reason == "length" and text.startswith("{")
    pattern = {"messages": HI, "json_object": True, "temperature": 0, "max_tokens": 300, "logit_bias": {"2": 30}}
    [(text, reason)] = parts(demo.post(CHAT, **pattern))
    assert reason == "stop" and isinstance(json.loads(text), dict)


def test_F135_samples_share_a_grammar_and_no_place_in_it(demo, api_case):
    """F135"""
    before = demo.stats().get("grammar_compiled", 0)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(demo.case, api_case("F135"), seed=seed) for seed in (1, 2)]
    texts = [one for answer in answers for one in parts(answer.result())]
    assert demo.stats()["grammar_compiled"] == before + 1
    texts += parts(demo.case(api_case("F135"), seed=3, response_format=None, regex=api_case("F135")["regex"]))
    assert len(texts) == 9 and all(json.loads(text)["colour"] in ("red", "green", "blue") and reason == "stop" for text, reason in texts)
    assert len(set(texts)) > 1


def test_n_samples_are_streamed_under_one_regex(demo):
    body = {"prompt": "The answer is", "regex": " (yes|no|maybe), (very|not) (sure|sorry)", "max_tokens": 30, "temperature": 1.5, "seed": 3, "n": 3}
    expected = parts(demo.post(COMPLETIONS, **body))
    choices = [c for event in demo.events(COMPLETIONS, **body) for c in event["choices"]]
    for index, (text, reason) in enumerate(expected):
        mine = [c for c in choices if c["index"] == index]
        assert "".join(c["text"] for c in mine) == text and mine[-1]["finish_reason"] == reason == "stop"
        assert re.fullmatch(body["regex"], text)
    assert len(set(expected)) > 1


def test_generate_with_a_grammar_for_each_prompt(demo):
    params = [{"regex": "[0-9]{3}"}, {"choice": ["left", "right"]}, {}, {"ebnf": 'root ::= "<" root ">" | "x"'}, {"json_object": True}]
    body = {"text": ["Go"] * 5, "sampling_params": [{**p, "temperature": 1, "sampling_seed": 1, "max_new_tokens": 6} for p in params]}
    answers = demo.post(GENERATE, **body).json()
    number, side, free, nested, thing = (answer["text"] for answer in answers)
    assert re.fullmatch("[0-9]{3}", number) and side in ("left", "right") and re.match("<*x?>*$", nested) and thing.startswith("{")
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers[:2]] == ["stop"] * 2
    last = {event["index"]: event["text"] for event in demo.events(GENERATE, **body)}
    assert [last[n] for n in range(5)] == [number, side, free, nested, thing]


def test_the_openai_client_would_see_json(demo):
    """Chat, streamed and plain, as OpenAI's JSON mode is used."""
    body = {"messages": [{"role": "user", "content": "Say hello as JSON."}], "response_format": {"type": "json_object"}, "temperature": 0,
            "max_tokens": 40}
    [(text, reason)] = parts(demo.post(CHAT, **body))
    assert text.startswith("{") and "".join(demo.texts(CHAT, **body)) == text
    if reason == "stop":
        json.loads(text)


LINE = {"type": "object", "required": ["name", "n"], "additionalProperties": False,
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}}}
SPELLED = {"fixed": r"\{\S+: \S*, \S+: \[(\d(, \d)?)?\]\}", "compact": r"\S*", "flexible": r"(.|\n)*"}     # without what stands in strings


@pytest.mark.parametrize("layout", [None, *SPELLED])
def test_a_schema_by_every_route_streamed_and_plain(small, layout):
    """Three samples of one schema, in the layout that was asked for; the server's own is compact."""
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "line", "strict": True, "schema": LINE}}}
    body = {"max_tokens": 200, "temperature": 1, "seed": 3, "n": 3, **({"json_whitespace": layout} if layout else {})}
    prompt = {"prompt": "x"}
    for path, asked in ((CHAT, {"messages": HI, **schema}), (COMPLETIONS, prompt | schema), (COMPLETIONS, prompt | {"json_schema": LINE})):
        expected = parts(small.post(path, **asked, **body))
        choices = [c for event in small.events(path, **asked, **body) for c in event["choices"]]
        for index, (text, reason) in enumerate(expected):
            mine = [c for c in choices if c["index"] == index]
            assert "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in mine) == text
            assert mine[-1]["finish_reason"] == reason
            if reason == "stop":
                assert_valid(text, LINE)
                assert re.fullmatch(SPELLED[layout or "compact"], re.sub(r'"([^"\\]|\\.)*"', '""', text)), text
        assert len(set(expected)) > 1 and ("stop" in dict(expected).values() or layout == "flexible")
    params = {"json_schema": json.dumps(LINE), "max_new_tokens": 200, "temperature": 1, "sampling_seed": 3, "json_whitespace": layout}
    answer = small.post(GENERATE, text="x", sampling_params=params).json()
    assert answer["text"] == expected[0][0] and small.events(GENERATE, text="x", sampling_params=params)[-1]["text"] == answer["text"]


# -------------------------------------------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("schema, words", [
    ({"properties": {"a/b": {"minLength": -1}}}, ["minLength at /properties/a~1b"]), ({"items": {"type": "int"}}, ["type at /items", "integer"]),
    ({"$ref": "https://example.com/s.json"}, ["$ref at /", "not in this document"]), ({"$ref": "#/$defs/x"}, ["$ref at /", "leads nowhere"]),
    ({"anyOf": [{}, {"type": "string", "pattern": "(?=a)"}]}, ["pattern at /anyOf/1", "lookahead"]),
    ({"minItems": 2, "maxItems": 1, "type": "array"}, ["no value is valid"]),
    ("{", ["is no JSON"]), ("5", ["expected an object, true or false"])], ids=str)
def test_a_schema_that_cannot_be_held_is_a_400_with_keyword_and_place(small, schema, words):
    for path, asked in ((CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}}),
                        (COMPLETIONS, {"prompt": "x", "json_schema": schema}), (GENERATE, {"text": "x", "sampling_params": {"json_schema": schema}})):
        for stream in (False, True):
            error = check_refused(small.post(path, **asked, stream=stream), param="json_schema")
            assert error["message"].startswith("json_schema: ") and all(word in error["message"] for word in words), error["message"]
    small.alive()


def test_large_schemas_are_held_or_refused_and_nobody_waits(small):
    words = [f"word {i * 7919 % 10007}" for i in range(10_000)]
    body = {"prompt": "x", "max_tokens": 40, "temperature": 1, "seed": 1}
    [(text, reason)] = parts(small.post(COMPLETIONS, **body, json_schema={"enum": words}))
    assert json.loads(text) in words and reason == "stop"
    described = {"description": "d" * (MAX_GRAMMAR_CHARS - 100), "const": 5}
    assert parts(small.post(COMPLETIONS, **body, json_schema=described)) == [("5", "stop")]
    for large in ({"const": "x" * MAX_GRAMMAR_CHARS}, json.dumps({"description": "d" * MAX_GRAMMAR_CHARS})):
        check_refused(small.post(COMPLETIONS, **body, json_schema=large), param="json_schema", names="at most 1048576 characters")
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}, "minProperties": 9000}
    check_refused(small.post(COMPLETIONS, **body, json_schema=wide), param="json_schema")
    for depth in (10, 100, 300, 500, 900, 990, 2000, 100_000):  # some are too deep for who reads the body, others for who writes it down again
        raw = '{"prompt": "x", "max_tokens": 3, "json_schema": ' + '{"items": ' * depth + '{"type": "null"}' + "}" * depth + "}"
        answer = small.client.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400) and (answer.status_code == 200 or answer.json()["error"]["type"] == "invalid_request_error"), depth
    small.alive()


def test_options_without_a_schema_are_a_400(small):
    for options, names in (({"json_strict": True}, "no json_schema"), ({"json_any_order": True, "json_object": True}, "no json_schema"),
                           ({"json_whitespace": "compact", "regex": "a"}, "no json_schema or json_object")):
        check_refused(small.post(COMPLETIONS, prompt="x", **options), param=next(iter(options)), names=names)

def test_F111_what_is_not_supported_is_never_dropped(demo, api_case):
    """F111"""
    for pattern, construct in zip(api_case("F111")["inputs"], ("backreference", "lookahead", "word boundaries")):
        error = refused(demo.case(api_case("F111"), regex=pattern))
        assert error["param"] == "regex" and construct in error["message"] and "position" in error["message"]
        schema = api_case("F111")["schema"] | {"pattern": f"^{pattern}$"}
        for stream in (False, True):
            error = refused(demo.case(api_case("F111"), regex=None, response_format={
                "type": "json_schema", "json_schema": {"name": "t", "strict": True, "schema": schema}}, stream=stream))
            assert error["param"] == "json_schema" and "pattern at" in error["message"] and construct in error["message"]
    demo.alive()


def test_F113_what_is_malformed_is_refused_and_a_running_stream_goes_on(demo, api_case):
    """F113"""
    case, inputs = api_case("F113"), expand(api_case("F113")["inputs"])
    story = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    expected = "".join(demo.texts(COMPLETIONS, **story))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        told = pool.submit(lambda: "".join(demo.texts(COMPLETIONS, **story)))
        assert wait_until(lambda: demo.stats()["running"] == 1 or told.done(), 20) and not told.done(), told.result()
        for kind, texts in inputs.items():
            for text in texts:
                for stream in (False, True):
                    error = refused(demo.case(case, **{"regex": None, kind: text}, stream=stream))
                    assert error["param"] == kind and error["message"].startswith(kind) and len(error["message"]) < 300, error
        assert told.result() == expected
    demo.alive()


@pytest.mark.parametrize("path, body", [(COMPLETIONS, {"prompt": "x"}), (COMPLETIONS, {"prompt": "x", "n": 3}),
                                        (COMPLETIONS, {"prompt": ["x", "y", "z"], "n": 2}), (CHAT, {"messages": HI}),
                                        (CHAT, {"messages": HI, "n": 3})], ids=str)
def test_a_grammar_that_does_not_compile_is_a_400_and_no_stream(small, path, body):
    for kind, text in (("regex", "a(?=b)"), ("ebnf", "root ::= x"), ("choice", []), ("json_schema", {"type": "no type"}), ("json_schema", "{")):
        for stream in (False, True):
            error = check_refused(small.post(path, **body, **{kind: text}, stream=stream, max_tokens=5), param=kind)
            assert error["type"] == "invalid_request_error" and error["code"] == 400
    small.alive()


def test_one_bad_grammar_among_several_prompts_ends_the_call(small):
    body = {"text": ["x", "y"], "sampling_params": [{"regex": "[a-z]{20}"}, {"regex": "(?<!a)b"}]}
    check_refused(small.post(GENERATE, **body), param="regex", names="lookbehind")
    answer = small.post(GENERATE, **body, stream=True)
    if answer.status_code != 400:  # the other prompt was faster
        assert check_broken(answer)["param"] == "regex"
    same = {"text": ["x", "y"], "sampling_params": {"ebnf": "root"}, "stream": True}
    check_refused(small.post(GENERATE, **same), param="ebnf")
    small.alive()


# ----------------------------------------------------------------------------------------------------------------------------- cost

def test_F115_short_patterns_with_huge_automata(demo, api_case):
    """F115"""
    case, before = api_case("F115"), memory(demo, "VmHWM")
    for pattern in case["inputs"]:
        start, slowest = time.monotonic(), 0.0
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(demo.case, case, regex=pattern)
            while not answer.done():
                asked = time.monotonic()
                assert demo.client.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - asked)
                time.sleep(0.02)
        assert answer.result().status_code in (200, 400), answer.result().text
        assert time.monotonic() - start < 10 and slowest < 1, pattern
    assert memory(demo, "VmHWM") - before < 1000
    demo.alive()


def test_F117_grammars_are_not_kept_for_ever(small, api_case):
    """F117"""
    params = api_case("F117")["request"]["body"]["sampling_params"]
    sizes = []
    for first in range(0, 3000, 500):
        each = [{**params, "regex": params["regex"].replace("$I", str(i))} for i in range(first, first + 500)]
        answers = small.post(GENERATE, text=["x"] * 500, sampling_params=each).json()
        assert all(f"k{first + i}: {first + i}".startswith(answer["text"]) for i, answer in enumerate(answers))
        sizes.append(memory(small, "VmRSS"))
    assert sizes[-1] - sizes[1] < 200, sizes
    stats, flags = small.stats(), small.client.get("/get_server_info").json()
    assert stats["grammar_compiled"] >= 3000 and stats["grammar_cached"] <= flags["grammar_cache_size"] == 128


def test_a_client_that_leaves_while_its_grammar_is_compiled(demo):
    """Nobody waits for a compile but who asked for it; who leaves is forgotten at once."""
    for leave in (lambda sock: sock.close(), lambda sock: demo.post("/abort_request", abort_all=True)):
        for stream in (True, False):
            sock = demo.open(COMPLETIONS, prompt="x", ebnf=SLOW.replace("root ::=", f"root ::= \"{time.time()}\" | "), stream=stream)
            assert wait_until(lambda: demo.stats().get("grammar_queue") == 1, 20)
            start = time.monotonic()
            demo.alive()
            assert demo.stats()["grammar_queue"] == 1, f"the grammar is compiled too fast for this test: {time.monotonic() - start:.1f} s"
            leave(sock)
            assert wait_until(lambda: demo.stats()["grammar_queue"] == 0, 1)
            assert wait_until(lambda: idle(demo), 5)
            sock.close()
    demo.alive()


def test_an_aborted_compile_is_an_answer_that_says_so(demo):
    sock = demo.open(COMPLETIONS, prompt="x", ebnf=SLOW + "\n# another")
    assert wait_until(lambda: demo.stats()["grammar_queue"] == 1, 20)
    assert demo.post("/abort_request", abort_all=True).json() == {"aborted": 1}
    answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    sock.close()
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b'"finish_reason":"abort"') == 1, answer


# ------------------------------------------------------------------------------------------------------------------------- what is counted

def test_metrics_of_grammars(tmp_path):
    import tiny
    path = tiny.add_tokenizer(tiny.checkpoint(tmp_path, "llama"))
    with ServedModel("--model", str(path), "--max-total-tokens", "1024") as server:
        server.post(COMPLETIONS, prompt="x", max_tokens=3)
        assert "grammar" not in server.client.get("/metrics").text and not any("grammar" in name for name in server.stats())
        for _ in range(2):
            assert parts(server.post(COMPLETIONS, prompt="x", regex="abc", n=2)) == [("abc", "stop")] * 2
        check_refused(server.post(COMPLETIONS, prompt="x", regex="("), param="regex")
        now, stats = metrics(server), server.stats()
        assert now["num_grammar_queue_reqs"] == stats["grammar_queue"] == 0
        assert now["num_grammar_compiled_total"] == stats["grammar_compiled"] == 1
        assert now["num_grammar_cache_hit_total"] == stats["grammar_cache_hits"] == 3
        assert now["num_grammar_refused_total"] == stats["grammar_refused"] == 1
        assert now["num_grammar_cached"] == stats["grammar_cached"] == 2, "the refusal, too"
        assert now["grammar_tokens_total"] == stats["grammar_tokens"] == 4 * 4, "three tokens and an end each"
        assert now["grammar_compile_seconds_total"] > 0 <= now["grammar_build_seconds_total"], "none where all of the text was forced"
        assert now["grammar_misses_total"] == stats["grammar_misses"] >= 0
        assert now["grammar_rows"] == stats["grammar_rows"] >= 4 and now["grammar_table_bytes"] == stats["grammar_table_bytes"] > 0
        assert now["grammar_copied_bytes_total"] == stats["grammar_bytes"] > 0
