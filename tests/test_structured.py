"""JSON schemas in use: pydantic models in and valid values out, by every way to ask; layouts, strictness and order, each by itself and in one batch;
and everyday schemas sampled from the demo model, against another implementation of the standard.

    tests/cases/schemas.jsonl   id, schema, and `strict` or `any_order` where they are asked for
"""

import asyncio
import datetime
import enum
import itertools
import json
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
from jsonschema.validators import validator_for
from pydantic import BaseModel, Field, TypeAdapter
from test_json_schema import TABLE

from engines import make, params, request, run, same
from nano_sgl import LLM, SamplingParams
from nano_sgl.protocol import JSON_WHITESPACES, RequestError

HERE = Path(__file__).parent
OTHERS = Path(os.environ.get("NANO_SGL_CASES", "nowhere")) / "json.jsonl"
STRING = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)
HI = [{"role": "user", "content": "hi"}]


class Size(enum.Enum):
    SMALL, LARGE = "s", "l"


class Item(BaseModel):
    """One line of an order."""
    name: str = Field(max_length=4)
    count: int = Field(ge=1, le=99, alias="n")


class Order(BaseModel):
    number: int = Field(ge=0, le=999)
    size: Size
    items: list[Item] = Field(max_length=2)
    kind: Literal["a", "b"] | None = None


DIGITS = {"type": "object", "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "abc"}, "required": ["a", "b", "c"]}
LINES = {"type": "array", "items": {"type": "object", "properties": {"k": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["k"]},
         "minItems": 2, "maxItems": 2}


@pytest.fixture(scope="module")
def llm(path):
    with LLM(str(path), max_total_tokens=4096, constrained_json_whitespace="compact") as made:
        yield made


def layouts_of(text: str) -> set[str]:
    """The layouts that a text may have, whole or cut off: by what stands outside of its strings."""
    bare = STRING.sub('""', text)
    found = {"flexible"} if not re.search(r"\s{33}|[^\s,:]\s{17}", bare) else set()  # two runs of blanks, where a comma or a colon is awaited or was
    found |= {"compact"} if not re.search(r"\s", bare) else set()
    return found | ({"fixed"} if not re.search(r"[,:](?!$)|\s", re.sub(r"[,:] ", "", bare)) else set())


def ask(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "temperature": 1, "seed": 1} | fields)


# ------------------------------------------------------------------------------------------------------------------ pydantic, every way

def test_a_pydantic_model_by_every_way_to_ask(llm):
    async def twins():
        pieces = [piece async for piece in llm.astream([65], ask(json_schema=Order))]
        return await llm.agenerate([65], ask(json_schema=Order)), joined(pieces), await llm.achat(HI, ask(json_schema=Order))

    joined = lambda pieces: "".join(piece.text for piece in pieces)
    made, streamed, chatted = asyncio.run(twins())
    assert llm.generate([65], ask(json_schema=Order)).text == joined(llm.stream([65], ask(json_schema=Order))) == made.text == streamed
    assert llm.chat(HI, ask(json_schema=Order)).text == chatted.text == joined(llm.stream(HI, ask(json_schema=Order)))
    for text in (made.text, chatted.text):
        order = Order.model_validate_json(text)
        assert json.loads(text).keys() <= {"number", "size", "items", "kind"} and all(1 <= item.count <= 99 for item in order.items)
    as_dict = {"json_schema": Order.model_json_schema(), "json_strict": True, "max_tokens": 200, "temperature": 1, "seed": 1}
    assert llm.generate([65], as_dict).text == made.text == llm.generate([65], ask(**as_dict)).text


def test_a_type_adapter_and_samples_of_one_schema(llm):
    adapter = TypeAdapter(list[Item] | int)
    llm.generate([65], ask(json_schema=True, max_tokens=1))
    before = llm.engine.stats()["grammar_compiled"]
    outputs = llm.generate([65], ask(json_schema=adapter, n=3, max_tokens=400))
    assert llm.engine.stats()["grammar_compiled"] == before + 1
    assert len(outputs) == 3 and len({o.text for o in outputs}) > 1
    for output in outputs:
        assert output.finish_reason == "stop" and adapter.validate_json(output.text) is not None
    pieces = list(llm.stream([65], ask(json_schema=adapter, n=3, max_tokens=400)))
    assert ["".join(p.text for p in pieces if p.index == i) for i in range(3)] == [o.text for o in outputs]


def test_one_call_with_a_schema_for_each_prompt(llm):
    each = [ask(json_schema=DIGITS, json_strict=True), ask(), ask(json_schema=Item), ask(json_object=True, max_tokens=20),
            ask(json_schema='{"const": "é"}')]
    first, free, item, thing, const = llm.generate([[65]] * 5, each)
    assert list(json.loads(first.text)) == ["a", "b", "c"] and free.text and thing.text.startswith("{") and json.loads(const.text) == "é"
    assert set(json.loads(item.text)) == {"name", "n"}


# -------------------------------------------------------------------------------------------------------- layout, strictness, order

def test_a_request_has_its_own_layout(llm):
    texts = {layout: [llm.generate([65], ask(json_schema=LINES, json_strict=True, json_whitespace=layout, seed=seed)).text for seed in range(4)]
             for layout in (None, *JSON_WHITESPACES)}
    for layout, made in texts.items():
        assert all(layout or "compact" in layouts_of(text) for text in made), (layout, made)
        for text in made:
            jsonschema.validate(json.loads(text), LINES)
    assert texts[None] == texts["compact"] and all("fixed" in layouts_of(text) and ", " in text for text in texts["fixed"])
    assert not all(layouts_of(text) & {"fixed", "compact"} for text in texts["flexible"]), "blanks where there need not be any"
    free = [llm.generate([65], ask(json_object=True, json_whitespace=layout, max_tokens=40, seed=7)).text for layout in (None, "fixed")]
    assert "compact" in layouts_of(free[0]) and "fixed" in layouts_of(free[1])


def test_strict_is_no_other_property(llm):
    keys = lambda **options: [set(json.loads(o.text)) for o in llm.generate([65], ask(json_schema=DIGITS, n=30, max_tokens=400, **options))
                              if o.finish_reason == "stop"]
    assert all(found == {"a", "b", "c"} for found in keys(json_strict=True)) and len(keys(json_strict=True)) == 30
    assert any(found > {"a", "b", "c"} for found in keys())


def test_any_order_is_every_order(llm):
    asked = dict(json_schema=DIGITS, json_strict=True, temperature=5, n=60)
    orders = lambda **options: {tuple(json.loads(o.text)) for o in llm.generate([65], ask(**asked, **options))}
    assert orders() == {("a", "b", "c")}
    found = orders(json_any_order=True)
    assert len(found) > 3 and found <= set(itertools.permutations("abc"))


@pytest.mark.parametrize("flags", [dict(), dict(speculative_algorithm="ngram", speculative_draft_length="fixed"),
                                   dict(speculative_algorithm="ngram+radix", speculative_draft_length="fixed", max_total_tokens=512)], ids=str)
def test_one_schema_in_many_forms_in_one_batch(path, reference, flags):
    """Forms of one schema share nothing that they should not: each text is the one that it is alone."""
    forms = [dict(json_whitespace=layout, json_strict=strict, json_any_order=order)
             for layout in (None, *JSON_WHITESPACES) for strict in (False, True) for order in (False, True)]
    engine = make(path, **flags)
    asked = [request(i, [65, 66, i % 3], params(json_schema=DIGITS, temperature=[0, 1][i % 2], seed=i, max_tokens=60, ignore_eos=False, **form))
             for i, form in enumerate(forms * 2)]
    for turn in range(2):
        answers = run(engine, asked)
        for one in asked:
            same(answers[one.rid], reference(one))
            if answers[one.rid].reason == "stop":
                jsonschema.validate(json.loads(answers[one.rid].text), DIGITS)
                assert (one.params.json_whitespace or "fixed") in layouts_of(answers[one.rid].text)
    assert engine.stats()["grammar_compiled"] == 12, "None is the default's own layout"
    if flags:
        assert engine.speculation.total.accepted > 10
    engine.shutdown()


# --------------------------------------------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("schema, words", [
    ({"properties": {"a/b": {"minLength": -1}}}, ["minLength at /properties/a~1b"]), ({"items": {"type": "int"}}, ["type at /items"]),
    ({"anyOf": [{"pattern": "("}]}, ["pattern at /anyOf/0"]), ({"$ref": "https://example.com/s.json"}, ["$ref at /", "is not in this document"]),
    ({"minimum": 2, "type": "integer", "maximum": 1}, ["no value is valid"]), ("{", ["is no JSON"]), ("[]", ["expected an object, true or false"]),
    (False, ["no value is valid"])], ids=str)
def test_a_schema_that_cannot_be_held_is_refused_before_anything_starts(llm, schema, words):
    calls = [lambda *a: llm.generate(*a), lambda *a: list(llm.stream(*a)), lambda *a: asyncio.run(llm.agenerate(*a))]
    for call in calls:
        with pytest.raises(RequestError) as refused:
            call([65], ask(json_schema=schema))
        assert refused.value.param == "json_schema" and refused.value.status == 400 and str(refused.value).startswith("json_schema: ")
        assert all(word in str(refused.value) for word in words), refused.value
    assert not llm.engine.has_work


def test_a_closing_tag_that_is_a_special_token_is_refused(llm):
    special = next(token.content for token in llm.tokenizer.added_tokens_decoder.values() if token.special)
    with pytest.raises(RequestError, match="special token") as error:
        llm.generate("a", SamplingParams(regex="a", reasoning_end=special))
    assert error.value.param == "reasoning_end"
    assert llm.generate("a", SamplingParams(regex="a", reasoning_end=special + "!", thinking_budget=1, max_tokens=99)).text.endswith("a")


def test_pydantic_says_itself_what_has_no_schema():
    class Callback(BaseModel):
        call: Callable[[], int]

    with pytest.raises(Exception, match="(?i)json ?schema"):
        SamplingParams(json_schema=Callback)


# ---------------------------------------------------------------------------------------------------------------------------- samples

def formats() -> jsonschema.FormatChecker:
    """What Python's own library can check."""
    checker = jsonschema.FormatChecker(["ipv4", "ipv6", "uuid", "email"])
    day = lambda text: datetime.date.fromisoformat(re.sub("^0000", "0004", text))  # the year 0 is one in RFC 3339, and a leap year
    checker.checks("date", ValueError)(lambda value: not isinstance(value, str) or bool(day(value)))
    checker.checks("time")(lambda value: not isinstance(value, str) or bool(re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)", value)))
    checker.checks("date-time", ValueError)(lambda value: not isinstance(value, str) or value[10] in "Tt" and bool(day(value[:10])))
    return checker


def exact(text: str) -> Decimal | int:
    """A number of JSON without rounding, so that steps are counted right."""
    number = Decimal(text)
    return int(number) if number == 0 or number.adjusted() < 400 and number == number.to_integral_value() else number


def load(text: str):
    return json.loads(text, parse_float=exact, parse_int=exact)


def own_schemas() -> list[dict]:
    return [json.loads(line) for line in (HERE / "cases" / "schemas.jsonl").read_text().splitlines()]


def check_samples(llm: LLM, asked: list[dict], **fields) -> dict[str, int]:
    """Sample each of {"id", "schema", "whitespace", ...} once; how the texts ended. A schema that is refused has no text."""
    compiler, made, counts = llm.engine.constraints.compiler, [], {"stop": 0, "length": 0, "refused": 0}
    for n, one in enumerate(asked):
        p = ask(json_schema=one["schema"], json_whitespace=one["whitespace"], json_strict=one.get("strict", False),
                json_any_order=one.get("any_order", False), seed=n, **fields)
        grammar = compiler.submit(p.grammar.kind, p.grammar.text, **p.grammar.options)
        if grammar.exception(30) is None:
            made.append((one, p, grammar.result()))
        else:
            assert "refusable" in one, (one["id"], grammar.exception())
            counts["refused"] += 1
    prompts = [llm.chat_ids([{"role": "user", "content": f"An example of: {one['id']}."}]) for one, _, _ in made]
    for (one, p, grammar), output in zip(made, llm.generate(prompts, [p for _, p, _ in made])):
        counts[output.finish_reason] += 1
        where = one["id"], one["whitespace"], output.text
        assert one["whitespace"] in layouts_of(output.text), where
        ids = output.output_ids[:-1] if output.finish_reason == "stop" else output.output_ids
        state = grammar.step_bytes(grammar.start, grammar.vocab.decode(ids))
        assert state is not None, where
        if output.finish_reason == "stop":
            schema = load(p.json_schema)
            assert grammar.is_accepting(state) and grammar.vocab.decode(ids).decode() == output.text, where
            kind = validator_for(schema, default=jsonschema.Draft202012Validator)
            errors = [error.message for error in kind(schema, format_checker=formats()).iter_errors(load(output.text))]
            assert not errors, (where, errors)
    return counts


@pytest.fixture(scope="module")
def demo(demo_path):
    with LLM("demo", max_total_tokens=32768) as made:
        made.generate([65], ask(json_schema={"const": 1}))
        yield made


@pytest.mark.parametrize("layouts", [1, pytest.param(3, marks=pytest.mark.long)])
def test_samples_of_everyday_schemas_are_valid(demo, layouts):
    schemas = own_schemas()
    assert len(schemas) >= 40 and len({one["id"] for one in schemas}) == len(schemas)
    asked = [one | {"whitespace": JSON_WHITESPACES[(n + turn) % 3]} for n, one in enumerate(schemas) for turn in range(layouts)]
    counts = check_samples(demo, asked, max_tokens=40)
    assert counts["stop"] > 0.5 * len(asked) and not counts["refused"], counts


@pytest.mark.long
def test_samples_of_three_hundred_schemas_are_valid(demo):
    """Our own, the table of test_json_schema, and other people's where they are at hand; each in a layout that chance takes, and again in another."""
    others = [{"id": case["id"], "schema": case["grammar"]} for case in map(json.loads, OTHERS.read_text().splitlines() if OTHERS.exists() else ())]
    table = [{"id": f"number {n} of the table", "schema": schema} for n, (schema, *_) in enumerate(TABLE)]
    asked = [one | {"whitespace": JSON_WHITESPACES[(n + turn) % 3], "refusable": True}
             for turn in range(2) for n, one in enumerate([*own_schemas(), *table, *others])]
    counts = check_samples(demo, asked, max_tokens=120)
    print(len(asked), counts)
    assert counts["stop"] > 0.5 * len(asked) and counts["refused"] < 0.1 * len(asked), counts
