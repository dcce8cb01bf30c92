"""JSON documents: a schema as it was sent, and what its parts say together.

A schema refers to itself by pointers, anchors and ids, hides what it says under annotations, and comes in the forms of four drafts. Rules are
made (json_schema.py) for *parts*, a schema and its place, that all hold at once:

    {"$ref": "#/$defs/a", "title": "t", "items": [b], "minimum": 3, "exclusiveMinimum": true}
      clean     {"$ref": "#/$defs/a", "prefixItems": [b], "exclusiveMinimum": 3}      no annotations, the forms of 2020-12, checked
      flatten   [a, {"prefixItems": [b], "exclusiveMinimum": 3}]                      $ref and allOf are more parts
      negate    {"exclusiveMaximum": 4}  ->  [{"type": "number", "minimum": 4}]       one holds where the part does not

Names. NOT, HAS, TAIL and EITHER are keywords of our own, for what no keyword says. A *sight* is what a schema sees of an object and an array, which
is what unevaluatedProperties and unevaluatedItems ask of all schemas that are applied beside them: for each way in which these may hold, the keys
and places are known, and the rest is what additionalProperties and items would say.

Invariants. A part is made once: equal ids mean equal schemas, so a set of parts is known by its ids, and recursion comes back to where it was.
Every keyword that changes validity is held by name in SHAPES, or refused; what no draft names is an annotation.

Cost. A few microseconds a keyword. Only what is reached is checked.

Where it stops. No reference leaves the document. The complement of some keywords is not made: `_negate`. Siblings of $ref hold, but not in
draft-07 and older. Sources: JSON Schema 2020-12, 2019-09, draft-07, draft-04; RFC 6901.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import NamedTuple
from urllib.parse import unquote, urljoin

from .json_text import FORMATS
from .rules import MAX_COUNT, GrammarError, tick

TYPES = ("object", "array", "string", "integer", "fraction", "boolean", "null")  # a number is an integer or a fraction
NAMED_TYPES = {name: {name} for name in TYPES if name != "fraction"} | {"number": {"integer", "fraction"}}


MAX_RIVALS = 20_000    # pairs of branches of one oneOf that are looked at
NOT = 0     # no schema that was sent has it, for keys are strings: what is negated, and its argument
HAS = 1     # some member of an object is so: (schema of its key, schema of its value)
TAIL = 2    # some item of an array is so: (from which place on, its schema)
EITHER = 3  # one of these lists of parts holds


class Part(NamedTuple):
    """A schema that must hold, and its JSON pointer."""
    schema: dict | bool
    path: str


class Sight(NamedTuple):
    """What a schema sees of an object and an array: keys, patterns, all keys? places, all places? and what it finds anywhere."""
    keys: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    all_keys: bool = False
    items: int = 0
    all_items: bool = False
    contains: tuple[dict | bool, ...] = ()


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


def once(pairs: list[tuple[str, object]]) -> dict:
    """An object of a schema's text."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise refusal("schema", "", f"the key {name[:60]!r} comes twice in one object")
    return found


def finite(text: str) -> float:
    """A number of a schema's text."""
    if not math.isfinite(float(text)):
        raise refusal("schema", "", f"{text[:60]} is no number that JSON can hold")
    return float(text)


# -- keywords --

def is_schema(arg: object) -> bool:
    """May it stand where a schema is expected?"""
    return isinstance(arg, (dict, bool))


def is_count(arg: object) -> bool:
    """A count, also 2.0."""
    return is_number(arg) and arg >= 0 and arg == int(arg)


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


COUNTS = {bound + what for bound in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")}
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
    "exclusiveMaximum": (lambda arg: isinstance(arg, (int, float)), "expected a number"),
} | {keyword: (lambda arg: True, "") for keyword in (NOT, HAS, TAIL, EITHER)
} | {keyword: (is_count, "expected a count") for keyword in COUNTS
} | {keyword: (is_number, "expected a number") for keyword in ("minimum", "maximum")
} | {keyword: (is_schema, "expected a schema") for keyword in (
    "not", "if", "then", "else", "contains", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
} | {keyword: (is_schemas, "expected a list of schemas") for keyword in ("anyOf", "oneOf", "allOf", "prefixItems")
} | {keyword: (is_table, "expected schemas by name") for keyword in ("properties", "patternProperties", "dependentSchemas")}
REFUSED = {"extends": "is draft-03", "disallow": "is draft-03", "divisibleBy": "is draft-03"}
MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")  # keywords that hold schemas by name
DATA = ("enum", "const", "default", "examples")                                                        # keywords that hold no schemas
ADDRESSED, REFERENCES = frozenset(("$id", "id", "$anchor", "$dynamicAnchor")), ("$ref", "$dynamicRef")
APPLIED = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"}  # keywords by which other schemas see an object
UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}  # and what says the same where nothing is applied
OWNERS = {"object": ("required", "properties", "patternProperties", "additionalProperties", "propertyNames", "minProperties", "maxProperties",
                     "dependentRequired", "dependentSchemas", "dependencies"),
          "array": ("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"),
          "string": ("minLength", "maxLength", "pattern", "format"),
          "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")}
OWNER = {keyword: kind for kind, keywords in OWNERS.items() for keyword in keywords}
NOT_HELD = ("idn-email", "idn-hostname")
NESTED = frozenset((dict, list))
RARE = COUNTS | {"then", "else", "exclusiveMinimum", "exclusiveMaximum", "additionalItems", "format", "uniqueItems", *UNEVALUATED}


# -- documents --

class Document:
    """A schema as it was sent: its parts, cleaned of annotations and checked, and what references lead to."""

    def __init__(self, root: dict | bool):
        self.root = root
        self.memo: dict[tuple, tuple] = {}         # with the objects whose ids are in the keys: an id stays its own
        self.flats: dict[int, tuple[dict | bool, Parts | None]] = {}  # what `flatten` made of a schema; with it, for the same reason
        self.cleaned: dict[int, tuple[dict, Part]] = {}               # what `clean` made of it
        self.anchors: dict[tuple[str, str], Part] = {}
        self.bases: dict[str, str] = {}
        self.old = isinstance(root, dict) and bool(re.search(r"draft-0[3467]", str(root.get("$schema", ""))))
        self.index()

    def once(self, key: tuple, holder: object, make: Callable):
        """make(), once for each key; holder: the object whose id is in it."""
        if key not in self.memo:
            self.memo[key] = holder, make()
        return self.memo[key][1]

    def index(self) -> None:
        """Finds $id and $anchor: in `bases` the address of each schema that has one, by place; in `anchors` schemas by address and name. References
        are made absolute, so that it does not matter where they stand."""
        self.bases[""] = ""
        todo: list[tuple[dict | list, tuple | None, str, bool]] = [(self.root, None, "", False)]
        while todo:
            node, place, base, by_name = todo.pop()
            if type(node) is dict:
                if not ADDRESSED.isdisjoint(node) or base and any(name in node for name in REFERENCES):
                    base = self.addressed(node, pointer(place), base, by_name)
                for key, item in node.items():
                    if type(item) in NESTED and (by_name or key not in DATA):
                        todo.append((item, (place, key), base, key in MAPS and not by_name))
            elif type(node) is list:
                todo += [(item, (place, str(i)), base, False) for i, item in enumerate(node) if type(item) in NESTED]
        self.anchors.setdefault((self.bases[""], ""), Part(self.root, ""))

    def addressed(self, node: dict, path: str, base: str, by_name: bool) -> str:
        """Notes the addresses of a schema, and makes its references absolute; gives back the address of what is in it."""
        for name in ("$id", "id") if self.old else ("$id",):
            if isinstance(node.get(name), str) and not by_name:
                if node[name].startswith("#"):
                    self.anchors.setdefault((base, node[name][1:]), Part(node, path))
                else:
                    base = self.bases[path] = joined(base, node[name], name, path).partition("#")[0]
                    self.anchors.setdefault((base, ""), Part(node, path))
        for name in REFERENCES:
            if isinstance(node.get(name), str) and base:
                address, mark, fragment = node[name].partition("#")
                node[name] = (joined(base, address, name, path) if address else base) + mark + fragment
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(name), str):
                self.anchors.setdefault((base, node[name]), Part(node, path))
        return base

    def resolve(self, ref: str, path: str) -> Part:
        """What a reference leads to."""
        address, _, fragment = ref.partition("#")
        start = self.anchors.get((address or self.bases[""], "")) or next(
            (part for (name, anchor), part in self.anchors.items() if not anchor and name.endswith(f"/{address}")), None)
        if start is None:
            raise refusal("$ref", path, f"{ref[:60]} is not in this document")
        if fragment and not fragment.startswith("/"):
            if (address, fragment) not in self.anchors:
                raise refusal("$ref", path, f"there is no anchor {fragment[:60]}")
            return self.anchors[address, fragment]
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

    def check(self, part: Part) -> dict:
        """Raises GrammarError for what is not as a draft has it; gives back what is held."""
        held = {}
        for keyword, arg in part.schema.items() if isinstance(part.schema, dict) else ():
            shape = SHAPES.get(keyword)
            if shape:
                if not shape[0](arg):
                    raise refusal(keyword, part.path, shape[1])
                held[keyword] = arg
            elif keyword in REFUSED:
                raise refusal(keyword, part.path, REFUSED[keyword])
        return held

    def clean(self, part: Part) -> Part:
        """The part without annotations, in the forms of 2020-12; checks all that is left."""
        if isinstance(part.schema, bool):
            return part
        found = self.cleaned.get(id(part.schema))
        if found is None:
            made = self._clean(part)
            found = self.cleaned.setdefault(id(made.schema), (made.schema, made))   # what is clean stays the same object
            self.cleaned[id(part.schema)] = part.schema, found[1]
        return found[1]

    def _clean(self, part: Part) -> Part:
        schema, path = part
        if self.old and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                if "$ref" in schema or len(self.bases) > 1:
                    raise refusal(keyword, path, "is not supported beside $ref, and where schemas have an $id of their own")
                schema = {"$ref" if key == keyword else key: arg for key, arg in schema.items()}
        held = self.check(Part(schema, path))
        if not RARE.isdisjoint(held) or isinstance(held.get("items"), list):
            held = self._modern(held, path)
        if not NESTED.isdisjoint(map(type, held.values())):
            return Part(held, path)
        return self.memo.setdefault(("equal", repr(held)), (None, Part(held, path)))[1]     # small schemas come again and again

    def _modern(self, held: dict, path: str) -> dict:
        """The same in the form of 2020-12, where lists of items or some of RARE are in it."""
        held = {keyword: arg for keyword, arg in held.items() if keyword not in ("then", "else") or "if" in held}
        for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):  # as draft-04 has it
            if isinstance(held.get(keyword), bool):
                if held.pop(keyword) and bound in held:
                    held[keyword] = held.pop(bound)
        if isinstance(held.get("items"), list):
            held |= {"prefixItems": held.pop("items")} | ({"items": held["additionalItems"]} if "additionalItems" in held else {})
        held.pop("additionalItems", None)
        for keyword, same in UNEVALUATED.items():
            if keyword in held and (held[keyword] is True or same in held):
                del held[keyword]
        if any(keyword in held and (APPLIED & set(held) or keyword == "unevaluatedItems" and "contains" in held) for keyword in UNEVALUATED):
            return {EITHER: self.evaluated(Part(held, path))}
        for keyword, same in UNEVALUATED.items():
            if keyword in held:
                held[same] = held.pop(keyword)
        if held.get("format") in NOT_HELD:
            raise refusal("format", path, f"{held['format']} is not supported")
        if "format" in held and held["format"] not in (*FORMATS, "regex"):
            del held["format"]
        if held.get("uniqueItems") is False:
            del held["uniqueItems"]
        if "contains" not in held:
            held.pop("minContains", None), held.pop("maxContains", None)
        for keyword in COUNTS & set(held):
            if held[keyword] > MAX_COUNT and keyword.startswith("min"):
                raise refusal(keyword, path, f"counts go to {MAX_COUNT}: nothing is so long")
            if held[keyword] > MAX_COUNT:
                del held[keyword]                                               # nothing is longer, so it says nothing
        return held

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
        found: list[Parts] = []
        for part in parts:
            schema = part[0]
            if schema is False:
                return None
            if schema is not True:
                known = self.flats.get(id(schema))
                if known is None:
                    tick()
                    known = self.flats[id(schema)] = schema, self._flatten(part)
                if known[1] is None:
                    return None
                found.append(known[1])
        tick()
        if len(found) == 1:
            return found[0]
        flat: dict[int, Part] = {}
        for more in found:
            for one in more:
                flat.setdefault(id(one[0]), one)
        return tuple(flat.values())

    def _flatten(self, part: Part) -> Parts | None:
        part = self.clean(part)
        if part.schema and "$ref" not in part.schema and "allOf" not in part.schema:    # as most are
            return part,
        todo, flat, seen = [part], [], set()
        within: set[int] = set()  # the schemas whose references are being followed
        while todo:
            part = todo.pop()
            if isinstance(part, int):
                within.remove(part)
                continue
            part = self.clean(part)
            schema, path = part
            if schema is False:
                return None
            if schema is True or not schema or id(schema) in seen:
                if id(schema) in within:
                    raise refusal("$ref" if "$ref" in schema else "allOf", path, "a schema that holds where it holds itself says nothing")
                continue
            seen.add(id(schema))
            keyword = next((keyword for keyword in ("$ref", "allOf") if keyword in schema), None)
            if not keyword:
                flat.append(part)
                continue
            more = [self.resolve(schema["$ref"], path)] if keyword == "$ref" else [
                Part(one, f"{path}/allOf/{i}") for i, one in enumerate(schema["allOf"])]
            rest = self.without(part, keyword)
            within.add(id(schema))
            todo += [id(schema), *reversed([rest, *more] if self.declares_first(schema, keyword) else [*more, rest])]
            tick()
        return tuple(flat)

    # -- unevaluatedProperties and unevaluatedItems --

    def evaluated(self, part: Part) -> list[list[Part]]:
        """What a schema with unevaluated... says: lists of parts of which one holds. In each it is known which keys and places others see."""
        schema = part.schema
        found = []
        for parts, seen in self.sights(Part({key: arg for key, arg in schema.items() if key not in UNEVALUATED}, part.path), ()):
            rest: dict = {}
            if "unevaluatedProperties" in schema and not seen.all_keys:
                rest |= {"properties": dict.fromkeys(seen.keys, True), "patternProperties": dict.fromkeys(seen.patterns, True),
                         "additionalProperties": schema["unevaluatedProperties"]}
            if "unevaluatedItems" in schema and not seen.all_items:
                rest |= {"prefixItems": [True] * seen.items} if seen.items else {}
                rest["items"] = {"anyOf": [*seen.contains, schema["unevaluatedItems"]]}
            found.append([*parts, Part(rest, part.path)])
        return found

    def sights(self, part: Part, above: tuple[int, ...]) -> list[tuple[list[Part], Sight]]:
        """The ways in which a part may hold, and what is seen then of keys and items. above: the schemas that apply it."""
        self.check(part)
        schema, path = part
        if isinstance(schema, bool):
            return [([], Sight())] if schema else []
        if id(schema) in above:
            raise refusal("$ref", path, "a schema that holds where it holds itself says nothing")
        items, whole = schema.get("items"), set(UNEVALUATED) & set(schema)
        own = {key: arg for key, arg in schema.items() if whole or key not in (*APPLIED, "then", "else")}
        sight = Sight(tuple(schema.get("properties", ())), tuple(schema.get("patternProperties", ())),
                      bool({"additionalProperties", "unevaluatedProperties"} & set(schema)),
                      len(items if isinstance(items, list) else schema.get("prefixItems", ())),
                      bool({"unevaluatedItems", "additionalItems"} & set(schema)) or is_schema(items),
                      (schema["contains"],) if "contains" in schema else ())
        order = [key for key in schema if key in APPLIED]
        before = [key for key in order if key in ("$ref", "allOf") and not self.declares_first(schema, key)]
        found: list[tuple[list[Part], Sight]] = [([], Sight())]
        for keyword in (*before, "", *(key for key in order if key not in before)):
            more = self.applied(part, keyword, schema[keyword], (*above, id(schema))) if keyword else [([Part(own, path)], sight)]
            found = self.both(found, more, path)
        return found

    @staticmethod
    def declares_first(schema: dict, keyword: str) -> bool:
        """Do its own properties come before those of the keyword?"""
        order = list(schema)
        return "properties" in schema and order.index("properties") < order.index(keyword)

    def both(self, ways: list, others: list, path: str) -> list[tuple[list[Part], Sight]]:
        """The ways in which two schemas may hold together."""
        if len(ways) * len(others) > 64:
            raise refusal("unevaluatedProperties", path, "beside more than 64 alternatives is not supported")
        return [(parts + more, Sight(*(max(a, b) if isinstance(a, int) else a + b for a, b in zip(sight, other))))
                for parts, sight in ways for more, other in others]

    def applied(self, part: Part, keyword: str, arg: object, above: tuple[int, ...]) -> list[tuple[list[Part], Sight]]:
        """The ways in which a keyword that applies other schemas may hold."""
        schema, path = part
        if keyword == "$ref":
            return self.sights(self.resolve(arg, path), above)
        if keyword in ("dependentSchemas", "dependencies"):
            found = [([], Sight())]
            for key, more in arg.items():
                some = [([Part({"required": [key, *more]}, path)], Sight())] if isinstance(more, list) else self.both(
                    [([Part({"type": "object", "required": [key]}, path)], Sight())], self.sights(Part(more, f"{path}/{keyword}"), above), path)
                found = self.both(found, [([Part({"properties": {key: False}}, path)], Sight()), *some], path)
            return found
        if keyword == "if":
            held, then, no = (self.sights(Part(schema.get(name, True), f"{path}/{name}"), above) for name in ("if", "then", "else"))
            return self.both(held, then, path) + self.both([([Part({"not": arg}, path)], Sight())], no, path)
        ways = [self.sights(Part(one, f"{path}/{keyword}/{i}"), above) for i, one in enumerate(arg)]
        whole = [([Part({keyword: arg}, path)], Sight())]
        if keyword == "oneOf":
            return self.both(whole, [one for some in ways for one in some], path)
        if all(sight == Sight() for some in ways for _, sight in some):
            return whole
        if keyword == "anyOf" and len(ways) > 6:
            raise refusal("unevaluatedProperties", path, "beside anyOf of more than 6 is not supported: any of them may hold together")
        found = []
        for chosen in itertools.product((True, False), repeat=len(ways)) if keyword == "anyOf" else [(True,) * len(ways)]:
            some = whole
            for is_in, one in zip(chosen, ways):
                some = self.both(some, one, path) if is_in else some
            found += some if any(chosen) else []
        return found

    def negate(self, part: Part) -> list[Part]:
        """Schemas of which one holds where the part does not."""
        part = self.clean(part)
        if isinstance(part.schema, bool):
            return [] if part.schema else [Part(True, part.path)]
        return self.once(("negate", id(part.schema)), part.schema, lambda: self.negated(part))

    def negated(self, part: Part) -> list[Part]:
        """The same of a clean schema, made anew."""
        found = []
        for one in self._negate(part):
            found.append(Part(one, part.path))
            tick()
        return found

    def _negate(self, part: Part) -> Iterator[dict | bool]:
        schema, path = part
        for keyword, arg in schema.items():
            typed = {"type": OWNER.get(keyword, "object")}
            if keyword in ("type", "pattern", "format", "multipleOf"):
                yield {NOT: (keyword, arg)} | (typed if keyword in OWNER else {})
            elif keyword in ("enum", "const"):
                values = arg if keyword == "enum" else [arg]
                nested = [value for value in values if isinstance(value, (dict, list))]
                plain = {NOT: ("enum", [value for value in values if not isinstance(value, (dict, list))])}
                yield {"allOf": [plain, *({"anyOf": list(differs(value))} for value in nested)]} if nested else plain
            elif keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                yield typed | {{"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum",
                                "exclusiveMaximum": "minimum"}[keyword]: arg}
            elif keyword in ("minLength", "minItems", "minProperties"):
                yield typed | {keyword.replace("min", "max"): arg - 1} if arg else False
            elif keyword in ("maxLength", "maxItems", "maxProperties"):
                yield typed | {keyword.replace("max", "min"): arg + 1}
            elif keyword in ("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "dependentRequired",
                             "dependentSchemas", "dependencies"):
                yield from ({"type": "object"} | one for one in self._negate_members(schema, keyword, arg))
            elif keyword in ("items", "prefixItems", "contains"):
                yield from ({"type": "array"} | one for one in self._negate_items(schema, keyword, arg))
            elif keyword in ("minContains", "maxContains", "then", "else"):
                pass                                                            # said by contains, and by if
            elif keyword == "if":
                yield {"allOf": [arg, {"not": schema.get("then", True)}]}
                yield {"allOf": [{"not": arg}, {"not": schema.get("else", True)}]}
            elif keyword == "allOf":
                yield from ({"not": one} for one in arg)
            elif keyword in ("anyOf", "oneOf"):
                yield {"allOf": [{"not": one} for one in arg]}
                yield from ({"allOf": list(pair)} for pair in (itertools.combinations(arg, 2) if keyword == "oneOf" else ()))
            elif keyword == "not":
                yield arg
            elif keyword == "$ref":
                yield {"not": self.resolve(arg, path).schema}
            elif keyword == EITHER:
                yield {"allOf": [{"anyOf": [{"not": one.schema} for one in more]} if more else False for more in arg]}
            else:
                raise refusal("not", path, f"the complement of {keyword} is not supported")

    def _negate_members(self, schema: dict, keyword: str, arg) -> Iterator[dict]:
        if keyword == "required":
            yield from ({"properties": {name: False}} for name in arg)
        elif keyword == "properties":
            yield from ({"required": [name], "properties": {name: {"not": one}}} for name, one in arg.items())
        elif keyword == "patternProperties":
            yield from ({HAS: ({"pattern": pattern}, {"not": one})} for pattern, one in arg.items())
        elif keyword == "propertyNames":
            yield {HAS: ({"not": arg}, True)}
        elif keyword == "additionalProperties":
            known = [{"enum": list(schema.get("properties", ()))}, *({"pattern": pattern} for pattern in schema.get("patternProperties", ()))]
            yield {HAS: ({"allOf": [{"not": one} for one in known]}, {"not": arg})}
        else:
            for key, more in arg.items():
                yield from ({"required": [key], "properties": {name: False}} for name in more) if isinstance(more, list) else [
                    {"required": [key], "not": more}]

    def _negate_items(self, schema: dict, keyword: str, arg) -> Iterator[dict]:
        prefix = schema.get("prefixItems", [])
        if keyword == "prefixItems":
            yield from ({"minItems": i + 1, "prefixItems": [True] * i + [{"not": one}]} for i, one in enumerate(arg))
        elif keyword == "items":
            yield {TAIL: (len(prefix), {"not": arg})}
        else:
            low, high = schema.get("minContains", 1), schema.get("maxContains")
            if low:
                yield {"items": {"not": arg}} if low == 1 else {"contains": arg, "minContains": 0, "maxContains": low - 1}
            if high is not None:
                yield {"contains": arg, "minContains": high + 1}


def differs(value: dict | list) -> Iterator[dict]:
    """Schemas of which one holds for what is not this object or array."""
    if isinstance(value, list):
        yield {"type": [name for name in NAMED_TYPES if name != "array"]}
        yield from ({"type": "array", "maxItems": len(value) - 1},) if value else ()
        yield {"type": "array", "minItems": len(value) + 1}
        yield from ({"type": "array", "minItems": i + 1, "prefixItems": [True] * i + [{"not": {"const": item}}]} for i, item in enumerate(value))
    else:
        yield {"type": [name for name in NAMED_TYPES if name != "object"]}
        yield from ({"type": "object", "properties": {key: False}} for key in value)
        yield from ({"type": "object", "required": [key], "properties": {key: {"not": {"const": item}}}} for key, item in value.items())
        yield {"type": "object", HAS: ({"not": {"enum": list(value)}}, True)}


def rivals(groups: list[list[int]], marks: dict[int, dict[object, set]], path: str) -> list[tuple[int, int]]:
    """The pairs of branches of a oneOf that may both hold. groups: branches by type. marks: of each branch, by place, values of which one is
    there: two that have none in common exclude each other, so a union of a thousand branches with a const of their own has no pairs. Raises
    GrammarError where there are more than MAX_RIVALS."""
    todo, found = [(group, frozenset()) for group in groups], set()
    while todo:
        group, used = todo.pop()
        common = Counter(place for i in group for place in marks[i] if place not in used).most_common(1)
        pairs = itertools.combinations(group, 2)
        if common:
            place, shared = common[0][0], {}
            rest = [i for i in group if place not in marks[i]]
            pairs = itertools.product(rest, [i for i in group if place in marks[i]])
            for i in group:
                for value in marks[i].get(place, ()):
                    shared.setdefault(value, []).append(i)
                    tick()
            todo += [(some, used | {place}) for some in (rest, *shared.values()) if len(some) > 1]
        for i, j in pairs:
            found.add((min(i, j), max(i, j)))
            if len(found) > MAX_RIVALS:
                raise refusal("oneOf", path, f"more than {MAX_RIVALS} pairs of branches may both hold, as far as types and listed values of required "
                                             "properties tell: give each branch a const of its own, or write anyOf")
            tick()
    return sorted(found)


def endless(turns: dict[str, tuple[str, list[str]]]) -> str | None:
    """The path of a rule among those that only refer to others, from which one comes back to it. turns: by rule, its path and the others."""
    done: set[str] = set()
    for start in turns:
        path, todo = set(), [(start, False)]
        while todo:
            name, left = todo.pop()
            if left:
                path.remove(name)
                done.add(name)
            elif name in path:
                return turns[name][0]
            elif name not in done:
                path.add(name)
                todo += [(name, True), *((one, False) for one in turns.get(name, ("", ()))[1])]
    return None


def joined(base: str, address: str, keyword: str, path: str) -> str:
    """An absolute address."""
    try:
        return urljoin(base, address)
    except ValueError as error:
        raise refusal(keyword, path, f"{address[:60]} is no address: {error}") from None


def escape(key: str) -> str:
    """A key in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def pointer(place: tuple | None) -> str:
    """The JSON pointer of a place: that of the one above, and a key; None: the root."""
    keys = []
    while place is not None:
        place, key = place
        keys.append(f"/{escape(key)}")
    return "".join(reversed(keys))


if __name__ == "__main__":
    example = Document({"$schema": "http://json-schema.org/draft-04/schema#", "title": "t", "allOf": [{"$ref": "#/definitions/a"}, {"maximum": 9}],
                        "minimum": 3, "exclusiveMinimum": True, "definitions": {"a": {"type": "integer", "description": "d"}}})
    flat = example.flatten([Part(example.root, "")])
    for part in flat:
        print(f"{part.path or '/':<20} {part.schema!s:<32} or else {[one.schema for one in example.negate(part)]}")
