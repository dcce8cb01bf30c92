"""JSON documents: a schema as it was sent, and what its parts say together.

A schema refers to itself by pointers, anchors and ids, hides what it says under annotations, and comes in the forms of four drafts. Rules are
made (json_schema.py) for *parts*, a schema and its place, that all hold at once:

    {"$ref": "#/$defs/a", "title": "t", "items": [b], "minimum": 3, "exclusiveMinimum": true}
      clean     {"$ref": "#/$defs/a", "prefixItems": [b], "exclusiveMinimum": 3}      no annotations, the forms of 2020-12, checked
      flatten   [a, {"prefixItems": [b], "exclusiveMinimum": 3}]                      $ref and allOf are more parts
      negate    {"exclusiveMaximum": 4}  ->  [{"type": "number", "minimum": 4}]       one holds where the part does not

Names. NOT is a keyword of our own: what is negated, and its argument. No schema that was sent has it, for keys are strings.

Invariants. A part is made once: equal ids mean equal schemas, so a set of parts is known by its ids, and recursion comes back to where it was.
Every keyword that changes validity is held by name in SHAPES, or refused; what no draft names is an annotation.

Cost. A few microseconds a keyword. Only what is reached is checked.

Where it stops. No reference leaves the document, and none is followed from a part with an $id of its own. unevaluated... is held where it says
what additionalProperties and items would say. The complement of some keywords is not made: `_negate`. Siblings of $ref hold, but not in
draft-07 and older. Sources: JSON Schema 2020-12, 2019-09, draft-07, draft-04; RFC 6901.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import NamedTuple
from urllib.parse import unquote

from .json_text import FORMATS
from .rules import GrammarError, tick

TYPES = ("object", "array", "string", "integer", "fraction", "boolean", "null")  # a number is an integer or a fraction
NAMED_TYPES = {name: {name} for name in TYPES if name != "fraction"} | {"number": {"integer", "fraction"}}


NOT = 0  # a keyword of our own: what is negated, and its argument. No schema that was sent has it, for keys are strings


class Part(NamedTuple):
    """A schema that must hold, and its JSON pointer."""
    schema: dict | bool
    path: str


Parts = tuple[Part, ...]


def refusal(keyword: str, path: str, why: str) -> GrammarError:
    """The error to raise."""
    return GrammarError(f"{keyword} at {path or '/'}: {why}", keyword, path)


# -- values --

def canonical(value: object) -> object:
    """Equal for values that JSON schema takes for equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, list):
        return "array", tuple(map(canonical, value))
    if isinstance(value, dict):
        return "object", frozenset((key, canonical(item)) for key, item in value.items())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number", decimal(value)
    return type(value).__name__, value


def decimal(value: int | float) -> Decimal:
    """The number as its text says it."""
    return Decimal(value if isinstance(value, int) else repr(value))


def type_of(value: object) -> str:
    """Its type; a number without fraction is an integer."""
    if isinstance(value, float) and not value.is_integer():
        return "fraction"
    return {dict: "object", list: "array", str: "string", int: "integer", float: "integer", bool: "boolean", type(None): "null"}[type(value)]


# -- keywords --

def is_schema(arg: object) -> bool:
    """May it stand where a schema is expected?"""
    return isinstance(arg, (dict, bool))


def is_count(arg: object) -> bool:
    """A count, also 2.0."""
    return isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg >= 0 and arg == int(arg)


def is_number(arg: object) -> bool:
    """A number."""
    return isinstance(arg, (int, float)) and not isinstance(arg, bool)


def is_names(arg: object) -> bool:
    """A list of strings."""
    return isinstance(arg, list) and all(isinstance(name, str) for name in arg)


def is_schemas(arg: object) -> bool:
    """A list of schemas that is not empty."""
    return isinstance(arg, list) and bool(arg) and all(map(is_schema, arg))


def is_table(arg: object) -> bool:
    """Schemas by name."""
    return isinstance(arg, dict) and all(map(is_schema, arg.values()))


SHAPES: dict[str, tuple[Callable[[object], bool], str]] = {  # keyword -> what its argument must be
    "type": (lambda arg: all(isinstance(name, str) and name in NAMED_TYPES for name in (arg if isinstance(arg, list) else [arg])),
             "expected " + ", ".join(NAMED_TYPES)),
    "enum": (lambda arg: isinstance(arg, list), "expected a list"), "const": (lambda arg: True, ""),
    "items": (lambda arg: is_schema(arg) or is_schemas(arg) or arg == [], "expected a schema"),
    "pattern": (lambda arg: isinstance(arg, str), "expected a string"), "format": (lambda arg: isinstance(arg, str), "expected a string"),
    "$ref": (lambda arg: isinstance(arg, str), "expected a string"), "uniqueItems": (lambda arg: isinstance(arg, bool), "expected true or false"),
    "multipleOf": (lambda arg: is_number(arg) and arg > 0, "expected a number above 0"), "required": (is_names, "expected a list of strings"),
    "dependentRequired": (lambda arg: isinstance(arg, dict) and all(map(is_names, arg.values())), "expected lists of strings by name"),
    "dependencies": (lambda arg: isinstance(arg, dict) and all(is_names(one) or is_schema(one) for one in arg.values()), "expected schemas by name"),
    "exclusiveMinimum": (lambda arg: isinstance(arg, (int, float)), "expected a number"),  # draft-04 has a bool here
    "exclusiveMaximum": (lambda arg: isinstance(arg, (int, float)), "expected a number"), NOT: (lambda arg: True, ""),
} | {keyword: (is_count, "expected a count") for keyword in (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
} | {keyword: (is_number, "expected a number") for keyword in ("minimum", "maximum")
} | {keyword: (is_schema, "expected a schema") for keyword in (
    "not", "if", "then", "else", "contains", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
} | {keyword: (is_schemas, "expected a list of schemas") for keyword in ("anyOf", "oneOf", "allOf", "prefixItems")
} | {keyword: (is_table, "expected schemas by name") for keyword in ("properties", "patternProperties", "dependentSchemas")}
REFUSED = {"$dynamicRef": "is not supported", "$recursiveRef": "is not supported", "extends": "is draft-03", "disallow": "is draft-03",
           "divisibleBy": "is draft-03"}
APPLIED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
OWNERS = {"object": ("required", "properties", "patternProperties", "additionalProperties", "propertyNames", "minProperties", "maxProperties",
                     "dependentRequired", "dependentSchemas", "dependencies"),
          "array": ("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"),
          "string": ("minLength", "maxLength", "pattern", "format"),
          "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")}
OWNER = {keyword: kind for kind, keywords in OWNERS.items() for keyword in keywords}
NOT_HELD = ("idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex")


# -- documents --

class Document:
    """A schema as it was sent: its parts, cleaned of annotations and checked, and what references lead to."""

    def __init__(self, root: dict | bool):
        self.root = root
        self.memo: dict[tuple, tuple] = {}         # with the objects whose ids are in the keys: an id stays its own
        self.anchors: dict[str, Part] = {}
        self.bases: list[str] = []
        self.old = isinstance(root, dict) and bool(re.search(r"draft-0[3467]", str(root.get("$schema", ""))))
        self.index()

    def once(self, key: tuple, holder: object, make: Callable):
        """make(), once for each key; holder: the object whose id is in it."""
        if key not in self.memo:
            self.memo[key] = holder, make()
        return self.memo[key][1]

    def index(self) -> None:
        """Finds $id and $anchor."""
        todo: list[tuple[object, str]] = [(self.root, "")]
        while todo:
            node, path = todo.pop()
            if isinstance(node, dict):
                for name, mark in (("$anchor", "#"), ("$dynamicAnchor", "#"), ("$id", ""), ("id", "")):
                    if isinstance(node.get(name), str) and (name != "id" or self.old):
                        self.anchors.setdefault(mark + node[name].rstrip("#"), Part(node, path))
                        self.bases += [path] * (path != "" and not mark and not node[name].startswith("#"))
                todo += [(item, f"{path}/{escape(key)}") for key, item in node.items() if isinstance(item, (dict, list))]
            elif isinstance(node, list):
                todo += [(item, f"{path}/{i}") for i, item in enumerate(node) if isinstance(item, (dict, list))]

    def resolve(self, ref: str, path: str) -> Part:
        """What a reference leads to."""
        base, _, fragment = ref.partition("#")
        if any(path.startswith(f"{inner}/") or path == inner for inner in self.bases):
            raise refusal("$ref", path, "stands in a schema with an $id of its own")
        start = Part(self.root, "") if not base else self.anchors.get(base) or next(
            (part for name, part in self.anchors.items() if not name.startswith("#") and name.endswith(f"/{base}")), None)
        if start is None:
            raise refusal("$ref", path, f"{ref[:60]} is not in this document")
        if fragment and not fragment.startswith("/"):
            if f"#{fragment}" not in self.anchors:
                raise refusal("$ref", path, f"there is no anchor {fragment[:60]}")
            return self.anchors[f"#{fragment}"]
        node, place = start
        for key in unquote(fragment).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            else:
                raise refusal("$ref", path, f"{ref[:60]} leads nowhere")
            place = f"{place}/{escape(key)}"
        if not is_schema(node):
            raise refusal("$ref", path, f"{ref[:60]} is no schema")
        return Part(node, place)

    def clean(self, part: Part) -> Part:
        """The part without annotations, in the forms of 2020-12; checks all that is left."""
        return part if isinstance(part.schema, bool) else self.once(("clean", id(part.schema)), part.schema, lambda: self._clean(part))

    def _clean(self, part: Part) -> Part:
        schema, path = part
        if self.old and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        for keyword, arg in schema.items():
            if keyword in REFUSED:
                raise refusal(keyword, path, REFUSED[keyword])
            if keyword in SHAPES and not SHAPES[keyword][0](arg):
                raise refusal(keyword, path, SHAPES[keyword][1])
        held = {keyword: arg for keyword, arg in schema.items() if keyword in SHAPES}
        held = {keyword: arg for keyword, arg in held.items() if keyword not in ("then", "else") or "if" in held}
        for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):  # as draft-04 has it
            if isinstance(held.get(keyword), bool):
                if held.pop(keyword) and bound in held:
                    held[keyword] = held.pop(bound)
        if isinstance(held.get("items"), list):
            held |= {"prefixItems": held.pop("items")} | ({"items": held["additionalItems"]} if "additionalItems" in held else {})
        held.pop("additionalItems", None)
        for keyword, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in held:
                seen = [other for other in APPLIED if other in held] + ["contains"] * (same == "items" and "contains" in held)
                if held[keyword] is not True and same not in held and seen:
                    raise refusal(keyword, path, f"beside {seen[0]} is not supported")
                arg = held.pop(keyword)
                held.setdefault(same, arg)
        if held.get("format") in NOT_HELD:
            raise refusal("format", path, f"{held['format']} is not supported")
        if "format" in held and held["format"] not in FORMATS:
            del held["format"]
        if held.get("uniqueItems") is False:
            del held["uniqueItems"]
        if "contains" not in held:
            held.pop("minContains", None), held.pop("maxContains", None)
        if any(isinstance(arg, (dict, list)) for arg in held.values()):
            return Part(held, path)
        return self.once(("equal", *map(repr, held.items())), None, lambda: Part(held, path))  # small schemas come again and again

    def listed(self, schema: dict) -> list[set]:
        """The values of enum, and that of const."""
        return self.once(("values", id(schema)), schema, lambda: [
            set(map(canonical, [schema[keyword]] if keyword == "const" else schema[keyword])) for keyword in ("enum", "const") if keyword in schema])

    def without(self, part: Part, *keywords: str) -> Part:
        """The part without some keywords."""
        return self.once((*keywords, id(part.schema)), part.schema,
                         lambda: Part({keyword: arg for keyword, arg in part.schema.items() if keyword not in keywords}, part.path))

    def flatten(self, parts: Iterable[Part]) -> Parts | None:
        """All that holds with the parts, without $ref and allOf; None: nothing can."""
        todo, flat, seen = list(reversed(list(parts))), [], set()
        while todo:
            part = self.clean(todo.pop())
            schema, path = part
            if schema is False:
                return None
            if schema is True or not schema or id(schema) in seen:
                continue
            seen.add(id(schema))
            keyword = next((keyword for keyword in ("$ref", "allOf") if keyword in schema), None)
            if not keyword:
                flat.append(part)
                continue
            more = [self.resolve(schema["$ref"], path)] if keyword == "$ref" else [
                Part(one, f"{path}/allOf/{i}") for i, one in enumerate(schema["allOf"])]
            rest, order = self.without(part, keyword), list(schema)
            first = "properties" in schema and order.index("properties") < order.index(keyword)
            todo += reversed([rest, *more] if first else [*more, rest])
            tick()
        return tuple(flat)

    def negate(self, part: Part) -> list[Part]:
        """Schemas of which one holds where the part does not."""
        part = self.clean(part)
        if isinstance(part.schema, bool):
            return [] if part.schema else [Part(True, part.path)]
        return self.once(("negate", id(part.schema)), part.schema, lambda: [Part(one, part.path) for one in self._negate(part)])

    def _negate(self, part: Part) -> Iterator[dict | bool]:
        schema, path = part
        for keyword, arg in schema.items():
            typed = {"type": OWNER.get(keyword, "object")}
            if keyword in ("type", "enum", "const", "pattern", "format"):
                yield {NOT: (keyword, arg)} | (typed if keyword in OWNER else {})
            elif keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                yield typed | {{"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum",
                                "exclusiveMaximum": "minimum"}[keyword]: arg}
            elif keyword in ("minLength", "minItems", "minProperties"):
                yield typed | {keyword.replace("min", "max"): arg - 1} if arg else False
            elif keyword in ("maxLength", "maxItems", "maxProperties"):
                yield typed | {keyword.replace("max", "min"): arg + 1}
            elif keyword == "required":
                yield from (typed | {"properties": {name: False}} for name in arg)
            elif keyword == "properties":
                yield from (typed | {"required": [name], keyword: {name: {"not": one}}} for name, one in arg.items())
            elif keyword == "items" and "prefixItems" not in schema:
                yield typed | {"contains": {"not": arg}}
            elif keyword == "contains" and not {"minContains", "maxContains"} & set(schema):
                yield typed | {"items": {"not": arg}}
            elif keyword == "allOf":
                yield from ({"not": one} for one in arg)
            elif keyword == "anyOf":
                yield {"allOf": [{"not": one} for one in arg]}
            elif keyword == "not":
                yield arg
            elif keyword == "$ref":
                yield {"not": self.resolve(arg, path).schema}
            else:
                raise refusal("not", path, f"the complement of {keyword} is not supported")


def escape(key: str) -> str:
    """A key in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


if __name__ == "__main__":
    example = Document({"$schema": "http://json-schema.org/draft-04/schema#", "title": "t", "allOf": [{"$ref": "#/definitions/a"}, {"maximum": 9}],
                        "minimum": 3, "exclusiveMinimum": True, "definitions": {"a": {"type": "integer", "description": "d"}}})
    flat = example.flatten([Part(example.root, "")])
    for part in flat:
        print(f"{part.path or '/':<20} {part.schema!s:<32} or else {[one.schema for one in example.negate(part)]}")
