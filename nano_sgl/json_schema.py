"""JSON schema: what a JSON value must be like, turned into rules over bytes.

A schema is a conjunction: every keyword says something of its own, of values of its own type, and `allOf` and `$ref` bring more. A grammar is
a disjunction: this text or that one. So a *part* (a schema and its place) never stands alone: rules are made for sets of parts that all hold.

    {"$ref": "#/$defs/a", "type": ["string", "object"], "anyOf": [b, c]}
      flatten   [a, {type, anyOf}]                 $ref and allOf are more parts; annotations are dropped
      split     [a, {type}, b]  |  [a, {type}, c]  anyOf, oneOf, not, if, dependent...: each alternative is a set of parts again
      by type   string | object                    lengths, patterns, bounds, properties of all parts are merged, type by type

Each set is a rule, made once, so recursion ends where a set comes back. What `enum` or `const` lists is checked value by value (`holds`).

Strings and numbers are json_text's: one constraint is an expression, several are a product of automata whose states become rules.

Objects. Declared properties come in the order in which they are declared, those of `required` that nobody declares after them, all others last;
or in any order, where that is asked for and the keys are few (json_members). A declared key cannot come twice. `not`, at last, is a disjunction
as well: some key is missing, or some member is there whose value is not as it should be.

Invariants. What is accepted is valid. A keyword that changes validity and cannot be held exactly raises GrammarError with its name and JSON
pointer; so does a schema that no value satisfies. Left out are spellings, not values: keys and listed values have one spelling, integers are
written without point and exponent, numbers under multipleOf without exponent, half a surrogate pair is no character.

Cost. 0.5 ms for an everyday schema; some 50 microseconds a set. MAX_SETS, MAX_WORDS, json_members' MAX_PAIRS and json_text's MAX_STATES bound
what multiplies.

Where it stops. Keys that nobody declares may repeat among themselves, and count each time. They spell what ASCII can print as it is. Patterns are
those of regex.py. A `format` that no standard names is an annotation, as the standard has it. uniqueItems is for listed values. A schema that
applies itself without going into a value says nothing. What else is refused is what raises `refusal`.
Sources: JSON Schema 2020-12 and draft-07; RFC 8259.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from json.encoder import encode_basestring
from typing import NamedTuple

from .json_document import (EITHER, HAS, NAMED_TYPES, NOT, OWNER, TAIL, TYPES, Document, Part, Parts, canonical, decimal, endless, escape, finite,
                            is_schema, once, refusal, rivals, type_of)
from .json_members import Count, Option, Pair, Writer, avoid, bracketed, in_any_order, in_order, sequence, subsets
from .json_text import (FORMATS, MAX_DIGITS, WHOLE, Bounds, Derived, Letters, Multiple, Several, product, quoted, regex_rules,
                        scientific, shortened, single, span, spelled)
from .rules import ALL, BYTES, NEVER, Byte, Cat, Expr, GrammarError, Or, Ranges, Ref, Repeat, Rules, alt, cat, literal, productive, repeat, show, tick
from .schema import LAYOUTS, MAX_TEXT, grammar, json_rules, strings

MAX_SETS = 12_000      # parts of all sets that have a rule
MAX_WORDS = 40_000     # characters of the keys that others must differ from, in all objects
ALL_TYPES = frozenset(TYPES)
MEMBERS = frozenset(("properties", "patternProperties", "additionalProperties", "propertyNames"))
SAYING = frozenset(("minLength", "maxLength", "pattern", "format", "enum", "const", NOT))     # what says something of a string
BOUNDING = frozenset(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))


class Source(NamedTuple):
    """A pattern that a string must match, or must not: as `Letters.pattern` takes it, and where it stands."""
    pattern: tuple[str, bool]
    positive: bool
    keyword: str
    path: str


class Text(NamedTuple):
    """What a string must be: its length, and patterns."""
    low: int
    high: int | None
    sources: list[Source]
    keyword: str


ANYTHING = Text(0, None, [], "pattern")
ENCODERS = [json.JSONEncoder(ensure_ascii=False, separators=layout) for layout in ((", ", ": "), (",", ":"))]


@lru_cache(maxsize=3)
def json_terminals(whitespace: str) -> dict[str, Expr]:
    """Any JSON, as schema.py has it, but without half a surrogate pair."""
    return json_rules(LAYOUTS[whitespace]) | {"json.string": quoted(repeat(spelled(ALL), 0, None))}


class Compiler:
    """Makes rules for sets of parts. `names`: the sets that have one; `todo`: those whose rule is not made yet."""

    def __init__(self, root: dict | bool, whitespace: str, strict: bool, any_order: bool = False):
        self.document, self.letters = Document(root), Letters()
        self.flat, self.layout = self.document.flatten, LAYOUTS[whitespace]
        self.whitespace, self.strict, self.any_order = whitespace, strict, any_order
        self.chars: dict[tuple, Ref] = {}
        self.rules: dict[str, Expr] = {}
        self.names: dict[tuple[int, ...], Expr] = {}
        self.values: dict[tuple[int, ...], list | None] = {}
        self.kinds: dict[int, tuple[frozenset[str], Part]] = {}
        self.named: dict[tuple[int, str], list[Part]] = {}
        self.todo: list[tuple[str, Parts, list[Parts] | None]] = []
        self.others: dict[frozenset[str], Expr] = {}
        self.parts, self.steps, self.words, self.turns = 0, 0, 0, {}

    def compile(self) -> Rules:
        """All rules. Raises GrammarError where no value is valid."""
        self.rules["root"] = self.value([Part(self.document.root, "")])
        begins = [0]                                # where the rules of a set begin
        while self.todo:
            name, flat, alternatives = self.todo.pop()
            begins.append(len(self.rules))
            self.rules[name] = self.body(name, flat, alternatives)
            tick()
        if (path := endless(self.turns)) is not None:
            raise refusal("$ref", path, "a schema that holds where it holds itself says nothing")
        names = list(self.rules)                    # of each set its own rule comes last: turned round, most refer to later ones
        found = {name: self.rules[name] for begin, end in zip(begins, [*begins[1:], len(names)]) for name in reversed(names[begin:end])}
        if not productive(found, {name for name in found if name.startswith(("json.", "other"))}):  # terminals, and keys that nobody declares
            raise refusal("schema", "", "no value is valid")
        return Rules(found, "root")

    def value(self, parts: Iterable[Part]) -> Expr:
        """A value for which all parts hold."""
        parts = [*parts]
        given = tuple([id(part[0]) for part in parts])
        found = self.names.get(given)
        if found is None:
            flat = self.flat(parts)
            if not flat:
                return NEVER if flat is None else self.json("value")
            key = tuple([id(part[0]) for part in flat])
            if key not in self.names:
                self.settle(key, flat)
            found = self.names[given] = self.names[key]     # the document keeps what was flattened, so ids stay their own
        return found

    def settle(self, key: tuple[int, ...], flat: Parts) -> None:
        """Names a set. Where only one alternative is possible, that is the set."""
        path, keys, found = flat[0].path, [key], None
        while found is None:
            self.steps += 1
            alternatives = self.possible(flat)
            if alternatives == []:
                found = NEVER
            elif alternatives is not None and len(alternatives) == 1:
                flat = alternatives[0]
                key = tuple(id(part.schema) for part in flat)
                if key in keys:
                    raise refusal("$ref", path, "a schema that holds where it holds itself says nothing")
                keys.append(key)
                found = self.names.get(key) if flat else self.json("value")
            else:
                found = Ref(f"s{len(self.names)}")
                self.todo.append((found.name, flat, alternatives))
                self.parts += len(flat)
            if max(self.parts, self.steps) > MAX_SETS:
                raise refusal("schema", path, f"its alternatives multiply to more than {MAX_SETS}")
        self.names |= dict.fromkeys(keys, found)

    def possible(self, flat: Parts) -> list[Parts] | None:
        """The alternatives of a set that may have values; None: it has no alternatives."""
        if self.impossible(flat, 0):
            return []
        split = self.split(flat) if self.finite(flat) is None else None
        return None if split is None else [more for more in map(self.flat, split) if more is not None and not self.impossible(more, 1)]

    def json(self, name: str) -> Ref:
        """Any value, number or string."""
        rule = f"json.{name}"
        if rule not in self.rules:
            known = json_terminals(self.whitespace)
            self.rules |= known if name == "value" else {rule: known[rule]}
        return Ref(rule)

    def char(self, ranges: Ranges, plain: bool = False) -> Ref:
        """One character, as a rule: for sets come again."""
        if (ranges, plain) not in self.chars:
            self.chars[ranges, plain] = Ref(f"char{len(self.chars)}")
            self.rules[self.chars[ranges, plain].name] = spelled(ranges, plain)
        return self.chars[ranges, plain]

    def body(self, name: str, flat: Parts, alternatives: list[Parts] | None) -> Expr:
        """The rule of a set of parts."""
        if alternatives is not None:
            made = [self.value(more) for more in alternatives]
            self.turns[name] = flat[0].path, [one.name for one in made if isinstance(one, Ref)]
            return alt(dict.fromkeys(made))
        if (values := self.finite(flat)) is not None:
            return self.listed(name, values)
        types = self.types(flat)
        if len(types) == 1:                         # as most are
            kind, = types
            return self.WRITERS[kind](self, name, flat, kind)
        both = types & NAMED_TYPES["number"] if NAMED_TYPES["number"] <= types else frozenset()
        numbers = [self.number(name, flat, "number")] if both else []
        return alt(numbers + [self.WRITERS[kind](self, name, flat, kind) for kind in sorted(types - both)])

    # -- alternatives --

    def split(self, flat: Parts) -> list[list[Part]] | None:
        """The sets of parts of which one must hold, by the first keyword that has alternatives; None: there is none."""
        for i, part in enumerate(flat):
            if self.SPLITTING.isdisjoint(part[0]):  # as most are
                continue
            for keyword, split in self.SPLITS.items():
                if keyword in part.schema and (keyword not in OWNER or "object" in self.types(flat)):
                    rest = self.document.without(part, keyword, *(("then", "else") if keyword == "if" else ()))
                    return [[*flat[:i], rest, *more, *flat[i + 1:]] for more in split(self, part, part.schema[keyword])]
        return None

    def alternatives(self, parts: Iterable[Part], keyword: str, path: str) -> list[Parts]:
        """Sets of parts without alternatives, of which one holds where all parts do."""
        todo, found = [self.flat(parts)], []
        while todo:
            flat = todo.pop()
            more = None if flat is None else self.split(flat)
            if more is not None:
                todo += map(self.flat, reversed(more))
            elif flat is not None:
                found.append(flat)
            if len(todo) + len(found) > 64:
                raise refusal(keyword, path, "more than 64 alternatives are not supported")
        return found

    def one_of(self, part: Part, branches: list) -> list[list[Part]]:
        """oneOf: this branch and none of the others, unless they exclude each other anyway."""
        parts = [Part(one, f"{part.path}/oneOf/{i}") for i, one in enumerate(branches)]
        found = [[one] for one in parts]
        for i, j in self.rivals(parts, part.path):
            a, b = parts[i], parts[j]
            if not self.impossible(self.flat([a, b]), 3):
                for k, other in ((i, b), (j, a)):
                    try:
                        none = self.document.negate(other)
                    except GrammarError as error:
                        raise refusal("oneOf", part.path, f"branches {i} and {j} may both hold: {error.message}") from None
                    made = self.document.once(("none", id(other.schema)), other.schema,
                                              lambda: {"anyOf": [one.schema for one in none]} if none else False)
                    found[k].append(Part(made, other.path))
        return found

    def rivals(self, parts: list[Part], path: str) -> list[tuple[int, int]]:
        """The pairs of branches that may both hold, as far as types and listed values tell."""
        flats = {i: flat for i, part in enumerate(parts) if (flat := self.flat([part])) is not None}
        return rivals([[i for i, flat in flats.items() if kind in self.types(flat)] for kind in TYPES],
                      {i: self.marks(flat) for i, flat in flats.items()}, path)

    def marks(self, flat: Parts) -> dict[str | None, set]:
        """What tells a branch from others: the values that are listed for a required key; for None: those for the whole."""
        values = {None: self.finite(flat)}
        if values[None] is None and self.types(flat) == {"object"}:
            for key in {key: None for part in flat for key in part.schema.get("required", ())}:
                more = self.flat(self.member(flat, key))
                values[key] = [] if more is None else self.finite(more)
        return {place: set(map(canonical, some)) for place, some in values.items() if some is not None}

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
        "not": lambda self, part, arg: [[one] for one in self.document.negate(Part(arg, f"{part.path}/not"))],
        EITHER: lambda self, part, arg: arg, "oneOf": one_of, "if": split_if,
        "dependentRequired": split_dependent, "dependentSchemas": split_dependent, "dependencies": split_dependent}
    SPLITTING = frozenset(SPLITS)

    def impossible(self, flat: Parts | None, depth: int) -> bool:
        """Can it be seen that no value fits, in the values that an object must have down to some depth?"""
        tick()
        if flat is None:
            return True
        kinds = self.types(flat)
        if not kinds or self.finite(flat) == []:
            return True
        if kinds <= NAMED_TYPES["number"]:
            return not all(map(BOUNDING.isdisjoint, [part[0] for part in flat])) and self.bounds(flat).empty()
        return kinds == {"object"} and depth > 0 and any(
            self.impossible(self.flat(self.member(flat, key)), depth - 1) for part in flat for key in part.schema.get("required", ()))

    # -- what a set says --

    def types(self, flat: Parts) -> frozenset[str]:
        """The types that are left."""
        found = ALL_TYPES
        for part in flat:
            one = self.kinds.get(id(part[0]))
            if one is None:
                one = self.kinds[id(part[0])] = self.types_of(part), part
            found = one[0] if found is ALL_TYPES else found & one[0]
        return found

    def types_of(self, part: Part) -> frozenset[str]:
        """The types that a part allows."""
        found = ALL_TYPES
        for kind, positive in self.said(part, "type"):
            named = set().union(*map(NAMED_TYPES.get, kind)) if isinstance(kind, list) else NAMED_TYPES[kind]
            found = found & named if positive else found - named
        return found

    def said(self, part: Part, keyword: str) -> list[tuple]:
        """What a part says with a keyword: (argument, False where it is negated)."""
        schema = part[0]
        held = [(schema[keyword], True)] if keyword in schema else []
        if NOT in schema and schema[NOT][0] == keyword:
            held.append((schema[NOT][1], False))
        return held

    def finite(self, flat: Parts) -> list | None:
        """The values, if they are listed."""
        key = tuple([id(part[0]) for part in flat])
        if key in self.values:
            return self.values[key]
        kinds, lists, values = self.types(flat), [part[0] for part in flat if "enum" in part[0] or "const" in part[0]], None
        if lists or kinds and kinds <= {"boolean", "null"}:
            values = lists[0].get("enum", [lists[0].get("const")]) if lists else (True, False, None)
            plain = len(flat) == len(lists) == 1 and lists[0].keys() <= {"enum", "type"}
            if plain or not lists:
                values = [value for value in values if type_of(value) in kinds]
            if not plain:                           # else the type is all that is said of them
                values = [value for value in values if all(self.holds(value, one) for one in flat)]
        self.values[key] = values
        return values

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

    def listed_not(self, part: Part, kind: str) -> set:
        """The same of a part, canonical."""
        return self.document.once(("excluded", kind, id(part.schema)), part.schema, lambda: set(map(canonical, self.excluded([part], kind))))

    def text(self, flat: Iterable[Part], regex: bool = False) -> Text:
        """Of a string: all that is said of it, except which values it must not be. regex: the format of that name is the caller's to hold."""
        low, high, keyword, sources = 0, None, "pattern", []
        for part in flat:
            schema, path = part
            low = max(low, int(schema.get("minLength", 0)))
            if "maxLength" in schema:
                high = int(schema["maxLength"]) if high is None else min(high, int(schema["maxLength"]))
            for keyword, (arg, positive) in [(name, one) for name in ("pattern", "format") for one in self.said(part, name)]:
                if keyword == "format" and arg not in FORMATS:
                    if arg == "regex" and not (positive and regex):
                        raise refusal("format" if positive else "not", path, "format regex is held only for a string of which nothing else is said")
                    continue
                sources.append(Source((FORMATS[arg], False) if keyword == "format" else (arg, True), positive, keyword, path))
        return Text(low, high, sources, keyword)

    def exprs(self, sources: Iterable[Source]) -> list[tuple[Expr, bool]]:
        """Expressions over letters that must match, or must not."""
        return [(self.parse(*source), source.positive) for source in sources]

    def parse(self, pattern: tuple[str, bool], positive: bool, keyword: str, path: str, read: Callable[..., Expr] | None = None) -> Expr:
        """An expression over letters; or what else reads a pattern."""
        tick()
        try:
            return (read or self.letters.pattern)(*pattern)
        except GrammarError as error:
            raise refusal(keyword, path, error.message) from None

    # -- writers --

    def write_text(self, name: str, text: Text, without: Iterable[str], path: str, words: tuple[str, str]) -> Expr:
        """What stands between the quotes. words: the keyword that names those in `without`, and its place."""
        low, high, without = text.low, text.high, set(without)
        if len(text.sources) == 1 and text.sources[0].positive and not low and high is None and not without:
            return self.parse(*text.sources[0], single)
        exprs = self.exprs(text.sources)
        for expr, positive in exprs:
            least, most = span(expr)
            low, high = low if not positive or least < low else 0, high if not positive or most is None or high is None or most > high else None
        if high is not None and low > high:
            return NEVER
        if not exprs and not without:
            return repeat(self.char(ALL), low, high)
        if not exprs and not low and high is None:
            known = frozenset(without)
            if known not in self.others:
                self.words += sum(map(len, without))
                if self.words > MAX_WORDS:
                    raise refusal(*words, f"there are too many strings that others must differ from: more than {MAX_WORDS} characters in all")
                self.others[known] = avoid(without, f"other{len(self.others)}", self.rules)
            return self.others[known]
        if len(exprs) == 1 and exprs[0][1] and not without:
            expr = exprs[0][0]
            if isinstance(expr, Repeat) and isinstance(expr.item, Byte):
                high = min((end for end in (high, expr.high) if end is not None), default=None)
                low = max(low, expr.low)
                return NEVER if high is not None and low > high else repeat(self.letters.write(expr.item, self.char), low, high)

        def made(exprs: list[tuple[Expr, bool]], high: int | None) -> Expr:
            walkers = self.walkers(exprs, without)
            return product(walkers, self.atoms((), walkers), f"{name}.text{len(self.rules)}", self.rules,
                           lambda why: refusal(text.keyword, path, why), low=low, high=high)

        try:
            return made(*(exprs, None) if high is None else self.shorten(text, high))
        except GrammarError as error:
            if high is not None or (error.construct, error.path) != (text.keyword, path):
                raise
            return made(*self.shorten(text, None))

    def shorten(self, text: Text, high: int | None) -> tuple[list[tuple[Expr, bool]], int | None]:
        """Its expressions under a bound on the length, and the bound: formats that have none below it lose what is rare."""
        found = []
        for (expr, positive), ((source, search), *_) in zip(self.exprs(text.sources), text.sources):
            most, sources = span(expr)[1], [source]
            if positive and not search and (most is None or high is None or most > high):
                sources, high = shortened(source, high)
            found += [(self.letters.pattern(one, search), positive) for one in sources]
        return found, high

    def walkers(self, exprs: list[tuple[Expr, bool]], without: set[str]) -> list:
        """Automata of which all must accept."""
        found = [Derived(expr, positive) for expr, positive in exprs]
        return found + [Derived(alt([self.letters.word(word) for word in sorted(without)]), False)] * bool(without)

    def atoms(self, exprs: Iterable[Expr], walkers: list) -> list[tuple[int, Expr]]:
        """The classes of characters that none of them tells apart."""
        return self.letters.atoms([*exprs, *(walker.expr for walker in walkers if isinstance(walker, Derived))], self.char)

    def string(self, name: str, flat: Parts, kind: str) -> Expr:
        """A string."""
        if all(map(SAYING.isdisjoint, [part[0] for part in flat])):     # as most are
            return self.json("string")
        without = self.excluded(flat, "string")
        if any(part.schema.get("format") == "regex" for part in flat) and self.text(flat, True)[:3] == ANYTHING[:3] and not without:
            self.rules |= regex_rules()
            return quoted(Ref("json.regex"))
        text = self.text(flat)
        if text[:3] == ANYTHING[:3] and not without:
            return self.json("string")
        words = next((("enum", part.path) for part in flat if self.excluded([part], kind)), ("not", flat[0].path))
        return quoted(self.write_text(name, text, without, flat[0].path, words))

    def constant(self, name: str, flat: Parts, kind: str) -> Expr:
        """true, false or null."""
        return self.listed(name, [value for value in (True, False, None) if type_of(value) == kind and all(self.holds(value, part) for part in flat)])

    def number(self, name: str, flat: Parts, kind: str) -> Expr:
        """An integer, a fraction, or either."""
        steps = [(decimal(arg), part.path, positive) for part in flat for arg, positive in self.said(part, "multipleOf")]
        between = self.bounds(flat).without(map(decimal, self.excluded(flat, ("integer", "fraction"))))
        if kind == "number" and not steps and between == [Bounds(None, False, None, False)]:
            return self.json("number")
        base = alt(one.write(kind == "integer") for one in between)
        walkers = [] if kind != "fraction" else [Derived(WHOLE, False)]
        powers = [] if kind == "integer" or steps else [one if kind == "number" else one.within(Decimal(-1), Decimal(1)) for one in between]
        for step, path, positive in steps:
            places = max(0, -step.normalize().as_tuple().exponent)
            walkers.append(Multiple(int(step * 10 ** places), places, positive))
        if walkers:
            path = steps[0][1] if steps else flat[0].path
            base = product([Derived(base), *walkers], [(1 << b, BYTES[b]) for b in b"-.0123456789"], f"{name}.{kind}", self.rules,
                           lambda why: refusal("multipleOf", path, why))
        return alt([base, *map(scientific, powers)])

    def listed(self, name: str, values: list) -> Expr:
        """One of the values."""
        plain, nested, encode = [], [], ENCODERS[self.whitespace == "compact"].encode
        for value in values:
            if (self.whitespace == "flexible" or self.any_order) and isinstance(value, (dict, list)) and value:
                nested.append(self.spaced(name, value))
            else:
                plain.append(encode(value))
        return alt([strings(plain) if plain else NEVER, *nested])

    def spaced(self, name: str, value: object) -> Expr:
        """A listed value under the flexible layout, or in any order."""
        if not isinstance(value, (dict, list)) or not value:
            return literal(json.dumps(value, ensure_ascii=False))
        if isinstance(value, list):
            body = [part for item in value for part in (self.layout.comma, self.spaced(name, item))][1:]
            return cat([literal("["), self.layout.pad, *body, self.layout.pad, literal("]")])
        pairs = [Pair(json.dumps(key, ensure_ascii=False).encode(), [(self.spaced(name, item), 0)], True) for key, item in value.items()]
        return self.members(self.writer(name, ""), pairs, [], Count(0, None))

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
        if any("contains" in part.schema or TAIL in part.schema for part in flat):
            return self.containing(name, flat, low, high, prefix)
        comma, rest, first = self.layout.comma, self.value(self.element(flat, None)), max(prefix, 1)
        expr = repeat(cat([comma, rest]), max(low - first, 0), None if high is None else max(high - first, 0))
        for place in range(first - 1, -1, -1):
            if place % 8 == 7:
                self.rules[f"{name}.item{place}"] = expr
                expr = Ref(f"{name}.item{place}")
            item = NEVER if high is not None and place >= high else self.value(self.element(flat, place))
            expr = cat([item, expr]) if not place else repeat(cat([comma, item, expr]), int(place < low), 1)
        return bracketed("[]", expr, not low, self.layout)

    def writer(self, name: str, path: str) -> Writer:
        """Where the rules of a set go."""
        return Writer(name, self.layout, self.rules, lambda keyword, why: refusal(keyword, path, why))

    def distinct(self, name: str, flat: Parts, low: int, high: int | None) -> Expr:
        """An array without equal items, out of a few that are listed: a state is the set of those that were written."""
        path = next(part.path for part in flat if "uniqueItems" in part.schema)
        if any(TAIL in part.schema for part in flat):
            raise refusal("uniqueItems", path, "is not held together with the complement of items")
        prefix = max(len(part.schema.get("prefixItems", ())) for part in flat)
        places = [self.flat(self.element(flat, place)) for place in (*range(prefix), None)]
        listed = [[] if items is None else self.finite(items) for items in places]
        if None in listed:
            raise refusal("uniqueItems", path, "is held for arrays of up to one item, and for items that list their values")
        values = {canonical(value): value for some in listed for value in some}
        texts = {key: self.listed(name, [value]) for key, value in values.items()}
        allowed = [[i for i, key in enumerate(values) if key in known] for known in (set(map(canonical, some)) for some in listed)]
        wanted = [(sum(1 << i for i, value in enumerate(values.values()) if self.holds(value, Part(part.schema["contains"], part.path))),
                   part.schema.get("minContains", 1), part.schema.get("maxContains", len(values))) for part in flat if "contains" in part.schema]
        items = list(texts.values())

        def arcs(chosen: int) -> Iterable[tuple[Expr, int]]:
            count = chosen.bit_count()
            for i in allowed[min(count, prefix)] if high is None or count < high else ():
                if not chosen >> i & 1:
                    yield items[i], chosen | 1 << i

        def ends(chosen: int) -> bool:
            return chosen.bit_count() >= low and all(least <= (chosen & mask).bit_count() <= most for mask, least, most in wanted)

        return cat([literal("["), self.layout.pad, sequence(self.writer(name, path), 0, arcs, ends, "uniqueItems"), literal("]")])

    def containing(self, name: str, flat: Parts, low: int, high: int | None, prefix: int) -> Expr:
        """An array with items of a kind: a state is how many were written, as far as that matters, and how many of each kind."""
        path, kinds = next(part.path for part in flat if "contains" in part.schema or TAIL in part.schema), []
        for part in flat:
            if "contains" in part.schema:
                least, most = int(part.schema.get("minContains", 1)), part.schema.get("maxContains")
                kinds.append((0, Part(part.schema["contains"], f"{part.path}/contains"), least, None if most is None else int(most)))
            if TAIL in part.schema:
                kinds.append((part.schema[TAIL][0], Part(part.schema[TAIL][1], part.path), 1, None))
        cap = max([low, prefix, high or 0, *(first for first, *_ in kinds)])
        if len(kinds) > 4:
            raise refusal("contains", path, "more than 4 at once are not supported")
        no = [None if most is None else self.no(part) for _, part, _, most in kinds]

        def arcs(state: tuple) -> Iterable[tuple[Expr, tuple]]:
            place, *counts = state
            if high is not None and place >= high:
                return
            base = self.element(flat, place if place < prefix else None)
            for chosen in itertools.product((False, True), repeat=len(kinds)):
                parts, after = list(base), []
                for is_in, count, other, (first, part, least, most) in zip(chosen, counts, no, kinds):
                    enough = count >= (least if most is None else most)
                    if is_in and (place < first or enough):
                        break
                    parts += [part] if is_in else [other] if other and place >= first else []
                    after.append(count + is_in)
                else:
                    yield self.value(parts), (min(place + 1, cap), *after)

        def ends(state: tuple) -> bool:
            return state[0] >= low and all(count >= least for count, (_, _, least, _) in zip(state[1:], kinds))

        start = (0,) + (0,) * len(kinds)
        return cat([literal("["), self.layout.pad, sequence(self.writer(name, path), start, arcs, ends, "contains"), literal("]")])

    def no(self, part: Part) -> Part:
        """What holds where the part does not."""
        return Part(self.document.once(("no", id(part.schema)), part.schema, lambda: {"not": part.schema}), part.path)

    def member(self, flat: Parts, key: str) -> list[Part]:
        """What must hold for the value of a key."""
        found = []
        for part in flat:
            if not MEMBERS.isdisjoint(part[0]):
                known = self.named.get((id(part[0]), key))
                if known is None:
                    known = self.named[id(part[0]), key] = self.member_of(part, key)
                found += known
        tick()
        return found

    def member_of(self, part: Part, key: str) -> list[Part]:
        """What a part says of it."""
        (schema, path), named = part, []
        tick()
        if key in schema.get("properties", ()):
            named.append(Part(schema["properties"][key], f"{path}/properties/{escape(key)}"))
        if "patternProperties" in schema:
            named += [Part(one, f"{path}/patternProperties/{escape(pattern)}") for pattern, one in schema["patternProperties"].items()
                      if self.letters.matches(self.parse((pattern, True), True, "patternProperties", path), key)]
        if not named and "additionalProperties" in schema:
            named.append(Part(schema["additionalProperties"], f"{path}/additionalProperties"))
        if "propertyNames" in schema and not self.holds(key, Part(schema["propertyNames"], f"{path}/propertyNames")):
            named.append(Part(False, path))
        return named

    def names_of(self, flat: Parts, wishes: Iterable[Part] = ()) -> list[Parts]:
        """What the keys must be, as alternatives. wishes: more that must hold for one."""
        names = [Part(schema["propertyNames"], f"{path}/propertyNames") for schema, path in flat if "propertyNames" in schema]
        return self.alternatives([*names, *wishes], "propertyNames", flat[0].path) if names or wishes else [()]

    def extras(self, name: str, flat: Parts, declared: Iterable[str], wishes: list[tuple[Part, Part]]) -> list[Option]:
        """Members whose keys nobody declares, by the patterns that match and the wishes that they fulfil."""
        patterns = list(dict.fromkeys([pattern for part in flat for pattern in part[0].get("patternProperties", ())]))
        if not patterns and not wishes and next((schema["additionalProperties"] for schema, _ in flat if "additionalProperties" in schema),
                                                not self.strict) is False and not any("propertyNames" in schema for schema, _ in flat):
            return []                               # as most are: there are none
        found = []
        for bits in range(1 << len(wishes)):
            chosen = [wish for i, wish in enumerate(wishes) if bits >> i & 1]
            values = [value for _, value in chosen]
            for names in self.names_of(flat, [keys for keys, _ in chosen]):
                if self.finite(names) is None and "string" in self.types(names):
                    text, without = self.text(names), {*declared, *self.excluded(names, "string")}
                    found.append((self.extra(f"{name}.{len(self.rules)}", flat, text, without, patterns, values), bits))
        return [(text, bits) for text, bits in found if text != NEVER]

    def extra(self, name: str, flat: Parts, text: Text, without: set[str], patterns: list[str], more: list[Part]) -> Expr:
        """A member whose key is none of those in `without`; more: what else its value must be."""
        path, known = flat[0].path, {}

        def value(matched: frozenset[str]) -> Expr:
            if matched not in known:
                known[matched] = made(matched)
            return known[matched]

        def made(matched: frozenset[str]) -> Expr:
            parts, closed = list(more), self.strict and not matched
            for schema, place in flat:
                own = [Part(one, f"{place}/patternProperties/{escape(pattern)}") for pattern, one in schema["patternProperties"].items()
                       if pattern in matched] if "patternProperties" in schema else []
                if not own and "additionalProperties" in schema:
                    own, closed = [Part(schema["additionalProperties"], f"{place}/additionalProperties")], False
                parts += own
            return NEVER if closed else self.value(parts)

        if not patterns or len(patterns) == 1 and value(frozenset()) == NEVER:
            last = value(frozenset(patterns))
            sources = text.sources + [Source((pattern, True), True, "patternProperties", path) for pattern in patterns]
            if sources:
                self.exprs(sources)                 # which may refuse them
            if last == NEVER:
                return NEVER
            keys = text._replace(sources=sources, keyword="patternProperties" if patterns else text.keyword)
            return cat([quoted(self.write_text(name, keys, without, path, ("additionalProperties", path))), self.layout.colon, last])
        exprs = [self.parse((pattern, True), True, "patternProperties", path) for pattern in patterns]
        others = self.walkers(self.exprs(text.sources), without)

        def end(accepted: list) -> Expr:
            if not all(accepted[1:]):
                return NEVER
            return cat([BYTES[34], self.layout.colon, value(frozenset([patterns[i] for i in accepted[0]]))])

        return cat([BYTES[34], product([Several(exprs, value(frozenset()) == NEVER), *others], self.atoms(exprs, others), f"{name}.key", self.rules,
                                       lambda why: refusal("patternProperties", path, why), end, text.low, text.high)])

    def object(self, name: str, flat: Parts, kind: str) -> Expr:
        """An object."""
        path = flat[0].path
        wishes = [(Part(schema[HAS][0], place), Part(schema[HAS][1], place)) for schema, place in flat if HAS in schema]
        if len(wishes) > 4:
            raise refusal("not", path, "of more than 4 kinds of members is not supported")
        keys, required = {}, {}
        for schema, _ in flat:
            keys |= dict.fromkeys(schema.get("properties", ()))
            required |= dict.fromkeys(schema.get("required", ()))
        for names in [one for wish in [(), *[(keys,) for keys, _ in wishes]] for one in self.names_of(flat, wish) if one]:
            keys |= dict.fromkeys(key for key in self.finite(names) or () if isinstance(key, str))
        keys |= required
        pairs = []
        for key in keys:
            parts = self.member(flat, key)
            fits = sum(1 << i for i, (names, _) in enumerate(wishes) if self.holds(key, names)) if wishes else 0
            more = [(self.value([*parts, *(value for i, (_, value) in enumerate(wishes) if bits >> i & 1)]), bits) for bits in subsets(fits)] \
                if fits else [(self.value(parts), 0)]
            pairs.append(Pair(encode_basestring(key).encode(), more, key in required))
        low = max([int(schema.get("minProperties", 0)) for schema, _ in flat])
        high = min([int(schema["maxProperties"]) for schema, _ in flat if "maxProperties" in schema], default=None)
        extras = self.extras(name, flat, keys, wishes)
        return self.members(self.writer(name, path), pairs, extras, Count(low, high, (1 << len(wishes)) - 1))

    def members(self, writer: Writer, pairs: list[Pair], extras: list[Option], count: Count) -> Expr:
        """An object of these members."""
        return cat([BYTES[123], self.layout.pad, (in_any_order if self.any_order else in_order)(writer, pairs, extras, count), BYTES[125]])

    WRITERS = {"string": string, "integer": number, "fraction": number, "array": array, "object": object,
               "boolean": constant, "null": constant}

    # -- single values --

    def holds(self, value: object, part: Part) -> bool:
        """Is the value valid?"""
        tick()
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
            if kind not in self.types([one]) or NOT in schema and canonical(value) in self.listed_not(one, kind):
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
        number = decimal(value)
        return self.bounds(flat).holds(number) and all((Fraction(number) % Fraction(decimal(arg)) == 0) == positive
                                                       for part in flat for arg, positive in self.said(part, "multipleOf"))

    def check_string(self, value: str, flat: Parts) -> bool:
        """A string against lengths, patterns and formats."""
        text = self.text(flat, True)
        if flat[0].schema.get("format") == "regex" and not is_regex(value):
            return False
        return text.low <= len(value) and (text.high is None or len(value) <= text.high) and all(
            self.letters.matches(expr, value) == positive for expr, positive in self.exprs(text.sources))

    def check_array(self, value: list, flat: Parts) -> bool:
        """An array against its elements' schemas and its length."""
        schema, path = flat[0]
        found = sum(self.holds(item, Part(schema["contains"], path)) for item in value) if "contains" in schema else 0
        return (schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
                and ("contains" not in schema or schema.get("minContains", 1) <= found <= schema.get("maxContains", found))
                and ("uniqueItems" not in schema or len(set(map(canonical, value))) == len(value))
                and (TAIL not in schema or any(self.holds(item, Part(schema[TAIL][1], path)) for item in value[schema[TAIL][0]:]))
                and all(self.holds(item, part) for i, item in enumerate(value) for part in self.element(flat, i)))

    def check_object(self, value: dict, flat: Parts) -> bool:
        """An object against its properties' schemas."""
        schema, path = flat[0]
        return (schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value))
                and set(schema.get("required", ())) <= set(value)
                and (HAS not in schema or any(self.holds(key, Part(schema[HAS][0], path)) and self.holds(item, Part(schema[HAS][1], path))
                                              for key, item in value.items()))
                and all(self.holds(item, part) for key, item in value.items() for part in self.member(flat, key)))

    CHECKS = {"integer": check_number, "fraction": check_number, "string": check_string, "array": check_array, "object": check_object}


def is_regex(text: str) -> bool:
    """Is it a regular expression?"""
    try:
        return re.compile(text) is not None
    except (re.error, RecursionError, OverflowError):
        return False


@grammar("json_schema")
def json_schema_rules(schema: dict | bool | str, *, whitespace: str = "fixed", strict: bool = False, any_order: bool = False) -> Rules:
    """Rules for all values that a schema allows, as one of the layouts writes them. strict: objects have no other properties than those declared,
    unless the schema says so. any_order: declared keys come in any order. Raises GrammarError, with the keyword and its JSON pointer."""
    if whitespace not in list(LAYOUTS):
        raise GrammarError(f"unknown whitespace {whitespace!r}; there are {', '.join(LAYOUTS)}", "whitespace")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        if len(text) > MAX_TEXT:
            raise refusal("schema", "", f"more than {MAX_TEXT} characters")
        root = json.loads(text, object_pairs_hook=once, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise refusal("schema", "", "is nested too deeply") from None
    except (ValueError, TypeError) as error:
        if isinstance(error, GrammarError):
            raise
        raise refusal("schema", "", f"is no JSON: {str(error)[:100]}") from None
    if not is_schema(root):
        raise refusal("schema", "", "expected an object, true or false")
    try:
        return Compiler(root, whitespace, strict, any_order).compile()
    except UnicodeEncodeError:
        raise refusal("schema", "", "half of a surrogate pair is no character") from None
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
