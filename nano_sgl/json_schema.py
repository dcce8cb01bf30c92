"""JSON schema: what a JSON value must be like, turned into rules over bytes.

A schema is a conjunction: every keyword says something of its own, of values of its own type, and `allOf` and `$ref` bring more. A grammar is
a disjunction: this text or that one. So a *part* (a schema and its place) never stands alone: rules are made for sets of parts that all hold.

    {"$ref": "#/$defs/a", "type": ["string", "object"], "anyOf": [b, c]}
      flatten   [a, {type, anyOf}]                 $ref and allOf are more parts; annotations are dropped
      split     [a, {type}, b]  |  [a, {type}, c]  anyOf, oneOf, not, if, dependent...: each alternative is a set of parts again
      by type   string | object                    lengths, patterns, bounds, properties of all parts are merged, type by type

Each set is a rule, made once, so recursion ends where a set comes back. What `enum` or `const` lists is checked value by value (`holds`).

Strings and numbers are json_text's: one constraint is an expression, several are a product of automata whose states become rules.

Objects. Declared properties come in the order in which they are declared, those of `required` that nobody declares after them, all others last. A
state is (which property is next, how many were written), so commas and minProperties need no more. A declared key cannot come twice.

Invariants. What is accepted is valid. A keyword that changes validity and cannot be held exactly raises GrammarError with its name and JSON
pointer; so does a schema that no value satisfies. Left out are spellings, not values: keys and listed values have one spelling, integers are
written without point and exponent, numbers under a constraint without exponent, half a surrogate pair is no character.

Cost. 1 ms for an everyday schema; some 100 microseconds a set, and for objects that allow other keys as much for each declared one. MAX_SETS,
MAX_WORDS, MAX_PAIRS and json_text's MAX_STATES bound what multiplies.

Where it stops. No reference leaves the document. Extra keys may repeat among themselves, so minProperties is held only as far as declared ones
reach. Extra keys spell what ASCII can print as it is. Patterns are those of regex.py. A `format` that no standard names is an annotation, as
the standard has it. contains stands alone, uniqueItems is for a few listed values. What else is refused is what raises `refusal`.
Sources: JSON Schema 2020-12 and draft-07; RFC 8259.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple

from .json_document import NAMED_TYPES, NOT, TYPES, Document, Part, Parts, canonical, decimal, escape, is_schema, refusal, type_of
from .json_text import (FORMATS, MAX_DIGITS, Bounds, Counted, Derived, Letters, Multiple, avoid, decimals_of, product, quoted, single, span,
                        spelled)
from .rules import ALL, BYTES, EMPTY, NEVER, Byte, Cat, Expr, GrammarError, Ranges, Ref, Repeat, Rules, alt, cat, literal, repeat, show, tick
from .schema import LAYOUTS, MAX_TEXT, json_rules, strings

MAX_SETS = 12_000      # parts of all sets that have a rule
MAX_WORDS = 20_000     # characters of the keys that others must differ from
MAX_PAIRS = 20_000     # states of one object
MAX_MULTIPLE = 1000    # of multipleOf, in its last digit
MAX_DISTINCT = 8       # values of which each may come once


class Text(NamedTuple):
    """What a string must be: its length, and expressions over letters that it must match, or must not."""
    low: int
    high: int | None
    exprs: list[tuple[Expr, bool]]
    keyword: str
    sources: list[tuple[str, bool]]  # of the expressions that are patterns


class Compiler:
    """Makes rules for sets of parts. `names`: the sets that have one; `todo`: those whose rule is not made yet."""

    def __init__(self, root: dict | bool, whitespace: str, strict: bool):
        self.document, self.letters = Document(root), Letters()
        self.flat, self.layout, self.whitespace, self.strict = self.document.flatten, LAYOUTS[whitespace], whitespace, strict
        self.chars: dict[tuple, Ref] = {}
        self.rules = json_rules(self.layout)
        self.rules["json.string"] = quoted(repeat(self.char(ALL), 0, None))
        self.names: dict[tuple[int, ...], tuple[str, Parts]] = {}
        self.todo: list[tuple[str, Parts]] = []
        self.parts = 0

    def compile(self) -> Rules:
        """All rules. Raises GrammarError where no value is valid."""
        self.rules["root"] = self.value([Part(self.document.root, "")])
        while self.todo:
            name, parts = self.todo.pop()
            self.rules[name] = self.body(name, parts)
            tick()
        if not productive(self.rules):
            raise refusal("schema", "", "no value is valid")
        return Rules(self.rules, "root")

    def value(self, parts: Iterable[Part]) -> Expr:
        """A value for which all parts hold."""
        flat = self.flat(parts)
        if not flat:
            return NEVER if flat is None else Ref("json.value")
        key = tuple(id(part.schema) for part in flat)
        if key not in self.names:
            self.parts += len(flat)
            if self.parts > MAX_SETS:
                raise refusal("schema", flat[0].path, f"its alternatives multiply to more than {MAX_SETS}")
            self.names[key] = f"s{len(self.names)}", flat
            self.todo.append(self.names[key])
        return Ref(self.names[key][0])

    def char(self, ranges: Ranges, plain: bool = False) -> Ref:
        """One character, as a rule: for sets come again."""
        if (ranges, plain) not in self.chars:
            self.chars[ranges, plain] = Ref(f"char{len(self.chars)}")
            self.rules[self.chars[ranges, plain].name] = spelled(ranges, plain)
        return self.chars[ranges, plain]

    def body(self, name: str, flat: Parts) -> Expr:
        """The rule of a set of parts."""
        if (values := self.finite(flat)) is not None:
            return self.listed(values)
        for i, part in enumerate(flat):
            for keyword, split in self.SPLITS.items():
                if keyword in part.schema:
                    rest = self.document.without(part, keyword, *(("then", "else") if keyword == "if" else ()))
                    return alt([self.value([*flat[:i], rest, *more, *flat[i + 1:]]) for more in split(self, part, part.schema[keyword])])
        types = self.types(flat)
        if {"integer", "fraction"} <= types:
            types -= {"fraction", "integer"}
            return alt([self.number(name, flat, "number"), *(self.WRITERS[kind](self, name, flat, kind) for kind in sorted(types))])
        return alt([self.WRITERS[kind](self, name, flat, kind) for kind in sorted(types)])

    # -- alternatives --

    def one_of(self, part: Part, branches: list) -> list[list[Part]]:
        """oneOf: this branch and none of the others, unless they exclude each other anyway."""
        parts = [Part(one, f"{part.path}/oneOf/{i}") for i, one in enumerate(branches)]
        found = [[one] for one in parts]
        for (i, a), (j, b) in itertools.combinations(enumerate(parts), 2):
            if not self.disjoint([a], [b]):
                for k, other in ((i, b), (j, a)):
                    try:
                        none = self.document.negate(other)
                    except GrammarError as error:
                        raise refusal("oneOf", part.path, f"branches {i} and {j} may both hold: {error.message}") from None
                    made = self.document.once(("none", id(other.schema)), other.schema,
                                              lambda: {"anyOf": [one.schema for one in none]} if none else False)
                    found[k].append(Part(made, other.path))
        return found

    def split_if(self, part: Part, condition: dict | bool) -> list[list[Part]]:
        """if: it holds and so does then, or it does not and else does."""
        sides = [Part(part.schema.get(name, True), f"{part.path}/{name}") for name in ("then", "else")]
        holds = Part(condition, f"{part.path}/if")
        return [[holds, sides[0]], *([one, sides[1]] for one in self.document.negate(holds))]

    def split_dependent(self, part: Part, table: dict) -> list[list[Part]]:
        """dependentRequired and its relatives: for each key, it is missing, or more must hold."""
        options = []
        for key, more in table.items():
            made = self.document.once(("dependent", id(table), key), table, lambda: (
                {"type": "object", "properties": {key: False}}, {"not": {"type": "object", "required": [key]}},
                {"type": "object", "required": [key, *more]} if isinstance(more, list) else {"allOf": [{"type": "object", "required": [key]}, more]}))
            options.append([Part(made[1], part.path), Part(made[2], part.path)])
        if len(options) > 10:
            raise refusal("dependentRequired", part.path, "too many keys")
        return [list(choice) for choice in itertools.product(*options)]

    SPLITS: dict[str, Callable] = {
        "anyOf": lambda self, part, arg: [[Part(one, f"{part.path}/anyOf/{i}")] for i, one in enumerate(arg)],
        "oneOf": one_of, "not": lambda self, part, arg: [[one] for one in self.document.negate(Part(arg, f"{part.path}/not"))], "if": split_if,
        "dependentRequired": split_dependent, "dependentSchemas": split_dependent, "dependencies": split_dependent}

    def disjoint(self, a: Iterable[Part], b: Iterable[Part], depth: int = 3) -> bool:
        """Can it be seen that no value is in both?"""
        a, b = self.flat(a), self.flat(b)
        if a is None or b is None:
            return True
        common, finite = self.types(a) & self.types(b), [self.finite(a), self.finite(b)]
        if not common:
            return True
        for values, others in zip(finite, (b, a)):
            if values is not None:
                return not any(all(self.holds(value, part) for part in others) for value in values)
        if common <= {"integer", "fraction"}:
            bounds = self.bounds([*a, *b])
            return None not in (bounds.low, bounds.high) and (bounds.low > bounds.high or (
                bounds.low == bounds.high and (bounds.low_open or bounds.high_open)))
        if common != {"object"} or not depth:
            return False
        keys = {key for part in (*a, *b) for key in part.schema.get("required", ())}
        return any(self.disjoint(self.member(a, key), self.member(b, key), depth - 1) for key in keys)

    # -- what a set says --

    def types(self, flat: Parts) -> set[str]:
        """The types that are left."""
        found = set(TYPES)
        for part in flat:
            for kind, positive in self.said(part, "type"):
                named = set().union(*(NAMED_TYPES[one] for one in (kind if isinstance(kind, list) else [kind])))
                found &= named if positive else set(TYPES) - named
        return found

    def said(self, part: Part, keyword: str) -> list[tuple]:
        """What a part says with a keyword: (argument, False where it is negated)."""
        negated, arg = part.schema.get(NOT, (None, None))
        held = [(part.schema[keyword], True)] if keyword in part.schema else []
        return held + [(arg, False)] if negated == keyword else held

    def finite(self, flat: Parts) -> list | None:
        """The values, if they are listed."""
        for part in flat:
            if "enum" in part.schema or "const" in part.schema:
                values = part.schema["enum"] if "enum" in part.schema else [part.schema["const"]]
                return [value for value in values if all(self.holds(value, one) for one in flat)]
        kinds = self.types(flat)
        if kinds <= {"boolean", "null"} and kinds:
            values = [value for value in (True, False, None) if type_of(value) in kinds]
            return [value for value in values if all(self.holds(value, one) for one in flat)]
        return None

    def bounds(self, flat: Iterable[Part]) -> Bounds:
        """Of a number."""
        low, high = [], []
        for schema, path in flat:
            for keyword, into, is_open in (("minimum", low, False), ("exclusiveMinimum", low, True),
                                           ("maximum", high, False), ("exclusiveMaximum", high, True)):
                if keyword in schema:
                    into.append((decimal(schema[keyword]), is_open))
                    if len(f"{into[-1][0]:f}") > MAX_DIGITS:
                        raise refusal(keyword, path, "has too many digits")
        least, most = max(low, default=(None, False)), min(high, key=lambda one: (one[0], not one[1]), default=(None, False))
        return Bounds(*least, *most)

    def excluded(self, flat: Parts, kind: str) -> list:
        """Values of a type that a set must not be."""
        return [value for part in flat for keyword in ("enum", "const") for arg, positive in self.said(part, keyword) if not positive
                for value in (arg if keyword == "enum" else [arg]) if type_of(value) in kind]

    def text(self, flat: Iterable[Part]) -> Text:
        """Of a string: all that is said of it, except which values it must not be."""
        low, high, exprs, keyword, sources = 0, None, [], "pattern", []
        for part in flat:
            schema, path = part
            low = max(low, int(schema.get("minLength", 0)))
            if "maxLength" in schema:
                high = int(schema["maxLength"]) if high is None else min(high, int(schema["maxLength"]))
            for keyword, (arg, positive) in [(name, one) for name in ("pattern", "format") for one in self.said(part, name)]:
                if keyword == "format" and arg not in FORMATS:
                    continue
                source = (FORMATS[arg], False) if keyword == "format" else (arg, True)
                exprs.append((self.parse(source, keyword, path), positive))
                sources.append(source)
        return Text(low, high, exprs, keyword, sources)

    def parse(self, source: tuple[str, bool], keyword: str, path: str) -> Expr:
        """An expression over letters."""
        try:
            return self.letters.pattern(*source)
        except GrammarError as error:
            raise refusal(keyword, path, error.message) from None

    # -- writers --

    def write_text(self, name: str, text: Text, without: Iterable[str], path: str) -> Expr:
        """What stands between the quotes."""
        low, high, exprs, without = text.low, text.high, list(text.exprs), set(without)
        for expr, positive in exprs:
            least, most = span(expr)
            low, high = low if not positive or least < low else 0, high if not positive or most is None or high is None or most > high else None
        if high is not None and low > high:
            return NEVER
        if not exprs and not without:
            return repeat(self.char(ALL), low, high)
        if not exprs and not low and high is None:
            if sum(map(len, without)) > MAX_WORDS:
                raise refusal("additionalProperties", path, "there are too many keys that others must differ from")
            return avoid(without, f"{name}.other", self.rules, self.char)
        if len(exprs) == 1 and exprs[0][1] and not without:
            expr = exprs[0][0]
            if not low and high is None:
                return single(*text.sources[0])
            if isinstance(expr, Repeat) and isinstance(expr.item, Byte):
                high = min((end for end in (high, expr.high) if end is not None), default=None)
                low = max(low, expr.low)
                return NEVER if high is not None and low > high else repeat(self.letters.write(expr.item, self.char), low, high)
        walkers = [Derived(expr, positive) for expr, positive in exprs] + [Counted(low, high)] * (low > 0 or high is not None)
        if without:
            walkers.append(Derived(alt([self.letters.word(word) for word in sorted(without)]), False))
        atoms = self.letters.atoms([expr for walker in walkers if isinstance(walker, Derived) for expr in walker.start], self.char)
        return product(walkers, atoms, f"{name}.text{len(self.rules)}", self.rules, lambda why: refusal(text.keyword, path, why))

    def string(self, name: str, flat: Parts, kind: str) -> Expr:
        """A string."""
        return quoted(self.write_text(name, self.text(flat), self.excluded(flat, "string"), flat[0].path))

    def constant(self, name: str, flat: Parts, kind: str) -> Expr:
        """true, false or null."""
        return self.listed([value for value in (True, False, None) if type_of(value) == kind and all(self.holds(value, part) for part in flat)])

    def number(self, name: str, flat: Parts, kind: str) -> Expr:
        """An integer, a fraction, or either."""
        bounds, wrong = self.bounds(flat), self.excluded(flat, ("integer", "fraction"))
        steps = [(decimal(part.schema["multipleOf"]), part.path) for part in flat if "multipleOf" in part.schema]
        if bounds == Bounds(None, False, None, False) and not steps and not wrong and kind == "number":
            return Ref("json.number")
        base = bounds.write(kind == "integer")
        walkers = [Derived(decimals_of(decimal(value)), False) for value in wrong]
        if kind == "fraction":
            walkers.append(Derived(alt([Bounds(None, False, None, False).write(True), cat([Bounds(None, False, None, False).write(True), BYTES[46],
                                                                                         repeat(BYTES[48], 1, None)])]), False))
        for step, path in steps:
            places = max(0, -step.normalize().as_tuple().exponent)
            digits = int(step * 10 ** places)
            if digits > MAX_MULTIPLE or places > 20:
                raise refusal("multipleOf", path, f"{step} has too many states")
            walkers.append(Multiple(digits, places))
        if not walkers:
            return base
        atoms = [(1 << b, BYTES[b]) for b in b"-.0123456789"]
        return product([Derived(base), *walkers], atoms, f"{name}.{kind}", self.rules, lambda why: refusal("multipleOf", flat[0].path, why))

    def listed(self, values: list) -> Expr:
        """One of the values."""
        plain, layout = [], {"compact": (",", ":")}.get(self.whitespace, (", ", ": "))
        nested = []
        for value in values:
            if self.whitespace == "flexible" and isinstance(value, (dict, list)) and value:
                nested.append(self.spaced(value))
            else:
                plain.append(json.dumps(value, ensure_ascii=False, separators=layout))
        return alt([strings(plain) if plain else NEVER, *nested])

    def spaced(self, value: object) -> Expr:
        """A listed value under the flexible layout."""
        if not isinstance(value, (dict, list)) or not value:
            return literal(json.dumps(value, ensure_ascii=False))
        items = [self.spaced(item) for item in value] if isinstance(value, list) else [
            cat([self.spaced(key), self.layout.colon, self.spaced(item)]) for key, item in value.items()]
        body = [part for item in items for part in (self.layout.comma, item)][1:]
        opener, closer = "[]" if isinstance(value, list) else "{}"
        return cat([literal(opener), self.layout.pad, *body, self.layout.pad, literal(closer)])

    def element(self, flat: Parts, place: int | None) -> list[Part]:
        """What must hold for an element of an array; None: one behind all prefixes."""
        found = []
        for schema, path in flat:
            prefix = schema.get("prefixItems", ())
            if place is not None and place < len(prefix):
                found.append(Part(prefix[place], f"{path}/prefixItems/{place}"))
            elif "items" in schema:
                found.append(Part(schema["items"], f"{path}/items"))
        return found

    def array(self, name: str, flat: Parts, kind: str) -> Expr:
        """An array: what is left behind each element is a rule of its own."""
        low = max(int(part.schema.get("minItems", 0)) for part in flat)
        high = min((int(part.schema["maxItems"]) for part in flat if "maxItems" in part.schema), default=None)
        prefix = max(len(part.schema.get("prefixItems", ())) for part in flat)
        if self.excluded(flat, "array"):
            raise refusal("not", flat[0].path, "lists of arrays are not supported")
        if high is not None and high < low:
            return NEVER
        if any("uniqueItems" in part.schema for part in flat) and (high is None or high > 1):
            return self.distinct(name, flat, low, high)
        comma, rest = self.layout.comma, self.value(self.element(flat, None))
        if any("contains" in part.schema for part in flat):
            return self.containing(flat, rest, low, high, prefix)
        first = max(prefix, 1)
        expr = repeat(cat([comma, rest]), max(low - first, 0), None if high is None else max(high - first, 0))
        for place in range(first - 1, -1, -1):
            if place % 8 == 7:
                self.rules[f"{name}.item{place}"] = expr
                expr = Ref(f"{name}.item{place}")
            item = NEVER if high is not None and place >= high else self.value(self.element(flat, place))
            expr = cat([item, expr]) if not place else repeat(cat([comma, item, expr]), int(place < low), 1)
        return self.bracketed("[", expr, "]", not low)

    def bracketed(self, opener: str, items: Expr, closer: str, optional: bool) -> Expr:
        """One or more items in brackets; optional: or none."""
        pad = self.layout.pad
        return cat([literal(opener), pad, repeat(cat([items, pad]), int(not optional), 1), literal(closer)])

    def distinct(self, name: str, flat: Parts, low: int, high: int | None) -> Expr:
        """An array without equal items, out of a few that are listed: a state is the set of those that were written."""
        path = next(part.path for part in flat if "uniqueItems" in part.schema)
        items = self.flat(self.element(flat, None))
        values = [] if items is None else self.finite(items)
        if values is None or len(values) > MAX_DISTINCT or any({"prefixItems", "contains"} & set(part.schema) for part in flat):
            raise refusal("uniqueItems", path, f"is held for up to one item, and for items that list up to {MAX_DISTINCT} values")
        texts = [self.listed([value]) for value in {canonical(value): value for value in values}.values()]
        for chosen in range(1 << len(texts)):
            count = chosen.bit_count()
            ends = [self.layout.pad if count else EMPTY] * (count >= low)
            self.rules[f"{name}.set{chosen}"] = alt(ends + [
                cat([self.layout.comma if count else EMPTY, text, Ref(f"{name}.set{chosen | 1 << i}")])
                for i, text in enumerate(texts) if not chosen >> i & 1 and (high is None or count < high)])
        return cat([literal("["), self.layout.pad, Ref(f"{name}.set0"), literal("]")])

    def containing(self, flat: Parts, rest: Expr, low: int, high: int | None, prefix: int) -> Expr:
        """An array that must contain something."""
        part = next(part for part in flat if "contains" in part.schema)
        count = int(part.schema.get("minContains", 1))
        others = sum("contains" in one.schema for one in flat) > 1
        if others or prefix or high is not None or low > count or "maxContains" in part.schema:
            raise refusal("contains", part.path, "is not held together with other contains, maxContains, prefixItems, or bounds on the length")
        comma = self.layout.comma
        wanted = self.value([*self.element(flat, None), Part(part.schema["contains"], f"{part.path}/contains")])
        before, after = repeat(cat([rest, comma]), 0, None), repeat(cat([comma, rest]), 0, None)
        more = repeat(cat([comma, before, wanted]), max(count - 1, 0), max(count - 1, 0))
        items = cat([before, wanted, more, after]) if count else cat([rest, after])
        return self.bracketed("[", items, "]", not count)

    def member(self, flat: Parts, key: str) -> list[Part]:
        """What must hold for the value of a key."""
        found = []
        for schema, path in flat:
            named = [Part(schema["properties"][key], f"{path}/properties/{escape(key)}")] if key in schema.get("properties", ()) else []
            named += [Part(one, f"{path}/patternProperties/{escape(pattern)}") for pattern, one in schema.get("patternProperties", {}).items()
                      if self.letters.matches(self.parse((pattern, True), "patternProperties", path), key)]
            if not named and "additionalProperties" in schema:
                named.append(Part(schema["additionalProperties"], f"{path}/additionalProperties"))
            if "propertyNames" in schema and not self.holds(key, Part(schema["propertyNames"], f"{path}/propertyNames")):
                named.append(Part(False, path))
            found += named
        return found

    def extras(self, name: str, flat: Parts, declared: Iterable[str]) -> list[Expr]:
        """The keys that nobody declares, and their values, by the patterns that match."""
        names = self.flat([Part(part.schema["propertyNames"], f"{part.path}/propertyNames") for part in flat if "propertyNames" in part.schema])
        if names is None or (names and (self.finite(names) is not None or "string" not in self.types(names))):
            return []
        if any(keyword in part.schema for part in names for keyword in self.SPLITS):
            raise refusal("propertyNames", names[0].path, "with alternatives is not supported")
        text, without = self.text(names), {*declared, *self.excluded(names, "string")}
        patterns = list(dict.fromkeys(pattern for part in flat for pattern in part.schema.get("patternProperties", ())))
        if len(patterns) > 6:
            raise refusal("patternProperties", flat[0].path, "more than 6 patterns may match one key in too many ways")
        found = []
        for chosen in itertools.product((True, False), repeat=len(patterns)):
            matched = {pattern for pattern, is_in in zip(patterns, chosen) if is_in}
            parts, closed = [], self.strict and not matched
            for schema, path in flat:
                own = [Part(one, f"{path}/patternProperties/{escape(pattern)}") for pattern, one in schema.get("patternProperties", {}).items()
                       if pattern in matched]
                if not own and "additionalProperties" in schema:
                    own, closed = [Part(schema["additionalProperties"], f"{path}/additionalProperties")], False
                parts += own
            value = NEVER if closed else self.value(parts)
            if value != NEVER:
                sources = [(pattern, True) for pattern in patterns]
                exprs = [(self.parse(source, "patternProperties", flat[0].path), is_in) for source, is_in in zip(sources, chosen)]
                keys = text._replace(exprs=text.exprs + exprs, sources=text.sources + sources, keyword="patternProperties" if exprs else text.keyword)
                found.append(cat([quoted(self.write_text(f"{name}.{len(found)}", keys, without, flat[0].path)), self.layout.colon, value]))
        return found

    def object(self, name: str, flat: Parts, kind: str) -> Expr:
        """An object. A state is (which property is next, how many were written, as far as that matters)."""
        if self.excluded(flat, "object"):
            raise refusal("not", flat[0].path, "lists of objects are not supported")
        keys = dict.fromkeys(key for part in flat for key in part.schema.get("properties", ()))
        required = dict.fromkeys(key for part in flat for key in part.schema.get("required", ()))
        for part in flat:
            if (named := self.finite(self.flat([Part(part.schema.get("propertyNames", True), part.path)]) or ())) is not None:
                keys |= dict.fromkeys(key for key in named if isinstance(key, str))
        keys |= required
        pairs = [(key in required, cat([literal(json.dumps(key, ensure_ascii=False)), self.layout.colon, self.value(self.member(flat, key))]))
                 for key in keys]
        extra = alt(self.extras(name, flat, keys))
        low = max(int(part.schema.get("minProperties", 0)) for part in flat)
        high = min((int(part.schema["maxProperties"]) for part in flat if "maxProperties" in part.schema), default=None)
        if extra != NEVER and low > len(required) + 1:
            raise refusal("minProperties", flat[0].path, "counts keys that are not declared, which may repeat")
        low = 0 if low <= len(required) else low
        cap = max(low, 1) if high is None else max(high, 1)
        if (cap + 1) * len(pairs) > MAX_PAIRS:
            raise refusal("minProperties", flat[0].path, f"{len(pairs)} properties counted to {cap} are too many states")
        states = {count: self.others(extra, count, low, high) for count in range(min(cap, len(pairs)) + 1)}
        for i in range(len(pairs) - 1, -1, -1):
            states = self.shared(f"{name}.{i}", states) if i % 8 == 0 or 0 in states and not pairs[i][0] else states
            before = {}
            for count in range(min(cap, i) + 1):
                after, pair = min(count + 1, cap), cat([self.layout.comma if count else EMPTY, pairs[i][1]])
                if after == count and high is None and not pairs[i][0]:
                    before[count] = cat([repeat(pair, 0, 1), states[count]])
                else:
                    taken = NEVER if high is not None and count >= high else cat([pair, states[after]])
                    before[count] = taken if pairs[i][0] else alt([taken, states[count]])
            states = before
        return cat([literal("{"), self.layout.pad, states[0], literal("}")])

    def shared(self, name: str, states: dict[int, Expr]) -> dict[int, Expr]:
        """The states as rules, for they are used more than once."""
        self.rules |= {f"{name}.{count}": expr for count, expr in states.items()}
        return {count: Ref(f"{name}.{count}") for count in states}

    def others(self, extra: Expr, count: int, low: int, high: int | None) -> Expr:
        """The end of an object, when so many properties were written."""
        least, most = max(low - count, 0), None if high is None else high - count
        if most is not None and most < least:
            return NEVER
        if count:
            return cat([repeat(cat([self.layout.comma, extra]), least, most), self.layout.pad])
        more = cat([extra, repeat(cat([self.layout.comma, extra]), max(least - 1, 0), most and most - 1), self.layout.pad])
        return repeat(more, int(least > 0), 0 if most == 0 else 1)

    WRITERS = {"string": string, "integer": number, "fraction": number, "array": array, "object": object,
               "boolean": constant, "null": constant}

    # -- single values --

    def holds(self, value: object, part: Part) -> bool:
        """Is the value valid?"""
        flat = self.flat([part])
        if flat is None:
            return False
        kind = type_of(value)
        for one in flat:
            schema = one.schema
            if {"enum", "const"} & set(schema) and not all(canonical(value) in values for values in self.document.listed(schema)):
                return False
            for keyword, split in self.SPLITS.items():
                if keyword in schema and not self.some(value, keyword, split, one):
                    return False
            if kind not in self.types([one]) or canonical(value) in map(canonical, self.excluded([one], kind)):
                return False
            if kind in self.CHECKS and not self.CHECKS[kind](self, value, (one,)):
                return False
        return True

    def some(self, value: object, keyword: str, split: Callable, part: Part) -> bool:
        """Does one of the alternatives hold?"""
        arg, path = part.schema[keyword], part.path
        if keyword == "not":
            return not self.holds(value, Part(arg, path))
        if keyword == "oneOf":
            return sum(self.holds(value, Part(one, path)) for one in arg) == 1
        if keyword == "if":
            return self.holds(value, Part(part.schema.get("then" if self.holds(value, Part(arg, path)) else "else", True), path))
        return any(all(self.holds(value, one) for one in more) for more in split(self, part, arg))

    def check_number(self, value: int | float, flat: Parts) -> bool:
        """A number against bounds and steps."""
        number, (low, low_open, high, high_open) = decimal(value), self.bounds(flat)
        steps = [decimal(part.schema["multipleOf"]) for part in flat if "multipleOf" in part.schema]
        above = low is None or number > low or number == low and not low_open
        below = high is None or number < high or number == high and not high_open
        return above and below and all(Fraction(number) % Fraction(step) == 0 for step in steps)

    def check_string(self, value: str, flat: Parts) -> bool:
        """A string against lengths, patterns and formats."""
        text = self.text(flat)
        return text.low <= len(value) and (text.high is None or len(value) <= text.high) and all(
            self.letters.matches(expr, value) == positive for expr, positive in text.exprs)

    def check_array(self, value: list, flat: Parts) -> bool:
        """An array against its elements' schemas and its length."""
        schema, path = flat[0]
        found = sum(self.holds(item, Part(schema["contains"], path)) for item in value) if "contains" in schema else 0
        return (schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
                and ("contains" not in schema or schema.get("minContains", 1) <= found <= schema.get("maxContains", found))
                and ("uniqueItems" not in schema or len(set(map(canonical, value))) == len(value))
                and all(self.holds(item, part) for i, item in enumerate(value) for part in self.element(flat, i)))

    def check_object(self, value: dict, flat: Parts) -> bool:
        """An object against its properties' schemas."""
        schema = flat[0].schema
        return (schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value))
                and set(schema.get("required", ())) <= set(value)
                and all(self.holds(item, part) for key, item in value.items() for part in self.member(flat, key)))

    CHECKS = {"integer": check_number, "fraction": check_number, "string": check_string, "array": check_array, "object": check_object}


def productive(rules: dict[str, Expr]) -> bool:
    """Does the rule `root` match anything?"""
    known: set[str] = set()

    def ends(expr: Expr) -> bool:
        if isinstance(expr, Ref):
            return expr.name in known
        if isinstance(expr, Repeat):
            return expr.low == 0 or ends(expr.item)
        return isinstance(expr, Byte) or (all if isinstance(expr, Cat) else any)(map(ends, expr.parts))

    left = list(rules)
    while True:
        waiting = []
        for name in reversed(left):
            known |= {name} if ends(rules[name]) else set()
            waiting += [] if name in known else [name]
            tick()
        if "root" in known or len(waiting) == len(left):
            return "root" in known
        left = waiting


def json_schema_rules(schema: dict | bool | str, *, whitespace: str = "fixed", strict: bool = False) -> Rules:
    """Rules for all values that a schema allows, as one of the layouts writes them. strict: objects have no other properties than those declared,
    unless the schema says so. Raises GrammarError, with the keyword and its JSON pointer."""
    if whitespace not in list(LAYOUTS):
        raise GrammarError(f"unknown whitespace {whitespace!r}; there are {', '.join(LAYOUTS)}", "whitespace")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        if len(text) > MAX_TEXT:
            raise refusal("schema", "", f"more than {MAX_TEXT} characters")
        root = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, GrammarError):
            raise
        raise refusal("schema", "", f"is no JSON: {str(error)[:100]}") from None
    if not is_schema(root):
        raise refusal("schema", "", "expected an object, true or false")
    try:
        return Compiler(root, whitespace, strict).compile()
    except RecursionError:
        raise refusal("schema", "", "is nested too deeply") from None


DEMO = [
    {"type": "object", "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 120}, "tag": {"enum": ["low", "high"]}}, "required": ["id"],
     "additionalProperties": False},
    {"type": ["string", "null"], "maxLength": 8}, {"type": "number", "exclusiveMinimum": 0.25, "maximum": 2},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
    {"type": "array", "uniqueItems": True}, {"allOf": [{"minimum": 3}, {"type": "integer", "maximum": 2}]},
]

if __name__ == "__main__":
    for example in DEMO:
        print(json.dumps(example))
        try:
            for rule, body in json_schema_rules(example).rules.items():
                if not rule.startswith("json."):
                    line = show(body)
                    print(f"    {rule:<8} {line if len(line) < 120 else line[:117] + '...'}")
        except GrammarError as error:
            print(f"    refused: {error}")
