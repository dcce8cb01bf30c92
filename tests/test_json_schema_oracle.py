"""JSON schemas against the package `jsonschema`: random schemas over all that is held, values that are valid or nearly so, and for each value
whether the grammar accepts one of its spellings, in its order of keys and in any. What differs on purpose is left out of the draw: 1.0 for an
integer, line ends, formats that the package checks in its own way."""

import functools
import itertools
import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_sgl.grammar import compile_rules
from nano_sgl.json_schema import json_schema_rules
from nano_sgl.rules import GrammarError
from nano_sgl.vocab import Vocab

BYTES = Vocab([bytes([b]) for b in range(256)])
KEYS = ["a", "b", "c", "ab", "é/", "x-1"]
PATTERNS = ["^a", "b$", "^[a-c]{1,2}$", "a|é", "^x-", "[0-9]", "^.{2}$", "^(ab)*$"]
TEXTS = ["", "a", "b", "ab", "abc", "abab", "x-1", "é/", 'q"\\', "2024-02-29", "1.2.3.4", "😀", "a b"]
NUMBERS = [0, 1, 2, 3, 4, 7, 10, 12, 100, -1, -3, -10, 0.5, 1.5, 2.25, -0.25, 99.5, 0.001, 1e-7, 2.5e-05, 123456789012345678901]
FORMATS = ["date", "ipv4"]
CHECKER = jsonschema.FormatChecker(FORMATS)
SEPARATORS = {"fixed": (", ", ": "), "compact": (",", ":"), "flexible": (" ,\n", "\t:")}


# -- schemas --

def keywords(rng, depth):
    """A few keywords, with arguments."""
    found = {}
    kinds = rng.sample(["string", "number", "object", "array", "any", "combined"], rng.choice([1, 1, 1, 2]))
    for kind in kinds:
        names = rng.sample(GROUPS[kind], rng.randint(1, min(4, len(GROUPS[kind]))))
        found |= {name: ARGUMENTS[name](rng, depth) for name in names}
    if rng.random() < 0.6:
        found["type"] = ARGUMENTS["type"](rng, depth)
        fits = [{"string": "string", "number": "number", "object": "object", "array": "array"}[kind] for kind in kinds if kind in ("string", "number",
                                                                                                                                 "object", "array")]
        if fits and rng.random() < 0.8:
            found["type"] = fits[0] if rng.random() < 0.6 else [fits[0], "null"]
    if "if" in found:
        found |= {name: schema(rng, depth) for name in ("then", "else") if rng.random() < 0.7}
    if "contains" in found:
        found |= {name: rng.randint(0, 2) for name in ("minContains", "maxContains") if rng.random() < 0.4}
    return found


def schema(rng, depth):
    """A random schema."""
    if depth <= 0 or rng.random() < 0.1:
        return rng.choice([True, {"type": "string"}, {"type": "integer"}, {"const": 1}, {"enum": ["a", 2, None]}, {"type": "null"}, {"minimum": 2},
                           {"maxLength": 1}, {"type": "boolean"}, False])
    return keywords(rng, depth - 1)


def some(rng, depth, low=1, high=3):
    return [schema(rng, depth) for _ in range(rng.randint(low, high))]


def table(rng, depth, names, high=3):
    return {name: schema(rng, depth) for name in rng.sample(names, rng.randint(1, high))}


def value(rng, depth=2):
    """Any JSON value."""
    kind = rng.choice(["text", "number", "number", "word"] + ["list", "dict"] * (depth > 0))
    if kind == "text":
        return rng.choice(TEXTS)
    if kind == "number":
        return rng.choice(NUMBERS)
    if kind == "word":
        return rng.choice([True, False, None])
    if kind == "list":
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {key: value(rng, depth - 1) for key in rng.sample(KEYS, rng.randint(0, 3))}


ARGUMENTS = {
    "type": lambda rng, depth: rng.choice(["string", "integer", "number", "object", "array", "null", "boolean", ["string", "integer"],
                                           ["object", "null"], ["array", "number"]]),
    "enum": lambda rng, depth: [value(rng) for _ in range(rng.randint(1, 4))], "const": lambda rng, depth: value(rng),
    **dict.fromkeys(("minLength", "minItems", "minProperties"), lambda rng, depth: rng.randint(0, 2)),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), lambda rng, depth: rng.randint(0, 4)),
    "pattern": lambda rng, depth: rng.choice(PATTERNS), "format": lambda rng, depth: rng.choice(FORMATS),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), lambda rng, depth: rng.choice(NUMBERS[:-3])),
    "multipleOf": lambda rng, depth: rng.choice([2, 3, 0.5, 0.25]),
    **dict.fromkeys(("properties", "dependentSchemas"), lambda rng, depth: table(rng, depth, KEYS)),
    "patternProperties": lambda rng, depth: table(rng, depth, PATTERNS, 2),
    "required": lambda rng, depth: rng.sample(KEYS, rng.randint(1, 2)),
    "dependentRequired": lambda rng, depth: {key: rng.sample(KEYS, rng.randint(1, 2)) for key in rng.sample(KEYS, 1)},
    "propertyNames": lambda rng, depth: rng.choice([{"pattern": rng.choice(PATTERNS)}, {"maxLength": 1}, {"enum": ["a", "b"]}, {"minLength": 1},
                                                    {"not": {"pattern": rng.choice(PATTERNS)}}, {"anyOf": [{"const": "c"}, {"pattern": "^a"}]}]),
    **dict.fromkeys(("items", "contains", "not", "if"), lambda rng, depth: schema(rng, depth)),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"),
                    lambda rng, depth: False if rng.random() < 0.5 else schema(rng, depth)),
    **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), some), "uniqueItems": lambda rng, depth: True,
    "$ref": lambda rng, depth: rng.choice(["#/$defs/one", "#two", "#"]),
}
GROUPS = {
    "string": ["minLength", "maxLength", "pattern", "format"], "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "object": ["properties", "properties", "patternProperties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties",
               "dependentRequired", "dependentSchemas", "unevaluatedProperties"],
    "array": ["items", "items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems", "unevaluatedItems"], "any": ["enum", "const"],
    "combined": ["allOf", "anyOf", "oneOf", "not", "if", "$ref"],
}


# -- values that may be valid --

def guess(rng, one, root, depth=4):
    """A value that is likely to be valid."""
    if not isinstance(one, dict) or depth <= 0 or rng.random() < 0.08:
        return value(rng, min(depth, 2))
    if "$ref" in one:
        return guess(rng, target(one, root), root, depth - 1)
    if "const" in one or "enum" in one:
        return one["const"] if "const" in one else rng.choice(one["enum"])
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in one and rng.random() < 0.6:
            return guess(rng, functools.reduce(merged, one[keyword], one) if keyword == "allOf" else merged(one, rng.choice(one[keyword])), root,
                         depth - 1)
    if "if" in one and rng.random() < 0.6:
        return guess(rng, merged(one, merged(one["if"], one.get("then", True)) if rng.random() < 0.5 else one.get("else", True)), root, depth - 1)
    kinds = one.get("type", [kind for kind, names in GROUPS.items() if set(names) & set(one)] or ["any"])
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    if kind == "object":
        keys = [*one.get("properties", ()), *one.get("required", ()), *(["a", "b"] if rng.random() < 0.3 else rng.sample(KEYS, 1))]
        keys = [key for key in dict.fromkeys(keys) if key in one.get("required", ()) or rng.random() < 0.6][:4]
        return {key: guess(rng, one.get("properties", {}).get(key, one.get("additionalProperties") or one.get("unevaluatedProperties") or True), root,
                           depth - 1) for key in keys}
    if kind == "array":
        prefix = one.get("prefixItems", [])
        items = [guess(rng, (prefix[i] if i < len(prefix) else one.get("items", True)), root, depth - 1) for i in range(rng.randint(0, 4))]
        if "contains" in one and rng.random() < 0.8:
            items.insert(rng.randint(0, len(items)), guess(rng, one["contains"], root, depth - 1))
        return items
    if kind in ("number", "integer"):
        edges = [one[name] for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if name in one]
        return rng.choice([*NUMBERS, *(edge + step for edge in edges for step in (0, 1, -1, 0.5))])
    return {"string": lambda: rng.choice(TEXTS), "null": lambda: None, "boolean": lambda: rng.random() < 0.5}.get(kind, lambda: value(rng, 1))()


def merged(one, other):
    """Roughly what both say."""
    return {**one, **other} if isinstance(one, dict) and isinstance(other, dict) else one


def applies_itself(root):
    """Does a schema come back to itself without going into a value? The package does not end then."""
    def loops(one, above):
        if not isinstance(one, dict) or id(one) in above:
            return isinstance(one, dict)
        below = [*one.get("allOf", ()), *one.get("anyOf", ()), *one.get("oneOf", ()), *one.get("dependentSchemas", {}).values(),
                 *(one[name] for name in ("not", "if", "then", "else") if name in one), *([target(one, root)] if "$ref" in one else ())]
        return any(loops(other, above | {id(one)}) for other in below)

    def parts(node):
        items = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return [node, *(part for item in items for part in parts(item))]

    return any(loops(part, frozenset()) for part in parts(root) if isinstance(part, dict))


def target(one, root):
    """What a reference leads to."""
    return {"#": root, "#two": root["$defs"]["two"]}.get(one["$ref"], root["$defs"]["one"])


def whole(item):
    """Numbers without a fraction are integers in the draw."""
    if isinstance(item, float) and item.is_integer():
        return int(item)
    if isinstance(item, list):
        return list(map(whole, item))
    return {key: whole(one) for key, one in item.items()} if isinstance(item, dict) else item


def shuffled(rng, item):
    """With its keys in some order."""
    if isinstance(item, list):
        return [shuffled(rng, one) for one in item]
    if isinstance(item, dict):
        return {key: shuffled(rng, item[key]) for key in rng.sample(list(item), len(item))}
    return item


def orders(item):
    """With its keys in all orders."""
    if isinstance(item, list):
        return (list(chosen) for chosen in itertools.product(*map(list, map(orders, item))))
    if isinstance(item, dict):
        return ({key: one for key, one in zip(keys, chosen)} for keys in itertools.permutations(item)
                for chosen in itertools.product(*(list(orders(item[key])) for key in keys)))
    return [item]


def run(grammar, text):
    """Does the automaton accept the text?"""
    state = grammar.step_bytes(grammar.start, text.encode())
    return state is not None and grammar.is_accepting(state)


def check(rng, counts):
    """One schema, and some values."""
    root = schema(rng, rng.choice([1, 2, 2, 3]))
    if isinstance(root, dict) and "$ref" in json.dumps(root):
        root["$defs"] = {"one": schema(rng, 1), "two": {"$anchor": "two", **keywords(rng, 1)}}
    layout = rng.choice(list(SEPARATORS))
    validator = jsonschema.Draft202012Validator(root, format_checker=CHECKER)
    values = [whole(guess(rng, root, root if isinstance(root, dict) else {})) for _ in range(8)]
    found = []
    for any_order in (False, True):
        try:
            found.append(compile_rules(json_schema_rules(root, whitespace=layout, any_order=any_order), BYTES))
        except GrammarError as error:
            counts[error.construct] = counts.get(error.construct, 0) + 1
            assert error.construct and error.path is not None
            if "no value" in str(error) and not applies_itself(root):
                assert not any(map(validator.is_valid, values)), (json.dumps(root), values)
            return
    if applies_itself(root):
        return
    for one in values:
        if "multipleOf" in json.dumps(root) and "e-" in json.dumps(one):     # written without exponents
            continue
        valid = validator.is_valid(one)
        text = json.dumps(shuffled(rng, one), ensure_ascii=False, separators=SEPARATORS[layout])
        counts[valid] = counts.get(valid, 0) + 1
        assert run(found[1], text) == valid, (json.dumps(root), text, "any order")
        if not valid:
            assert not run(found[0], text), (json.dumps(root), text)
        else:
            assert any(run(found[0], json.dumps(other, ensure_ascii=False, separators=SEPARATORS[layout]))
                       for other in itertools.islice(orders(one), 3000)), (json.dumps(root), text)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_grammars_accept_what_is_valid(rng):
    check(rng, {})


def test_most_schemas_are_held():
    counts = {}
    for seed in range(300):
        check(random.Random(seed), counts)
    print(counts)
    assert counts[True] > 300 and counts[False] > 300
    assert sum(count for name, count in counts.items() if name not in (True, False, "schema")) < 60


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_many_more(part):
    for seed in range(part * 1000, part * 1000 + 1000):
        check(random.Random(f"more {seed}"), {})
