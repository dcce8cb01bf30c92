"""Structural tags: text that is free here and held there.

A model calls a tool in the middle of what it says, and only the call must have a form. So the output is described as a tree of formats, in the
request forms of SGLang and of XGrammar; the older one says the same as a `triggered_tags`:

    {"type": "structural_tag", "format": {...}}
    {"type": "structural_tag", "triggers": ["<fn="], "structures": [{"begin": "<fn=f>", "schema": {...}, "end": "</fn>"}]}

    const_string, regex, grammar, json_schema   a text, a pattern, EBNF, JSON                       `value`, `pattern`, `grammar`, `json_schema`
    any_text                                    anything but `excludes`, up to the end around it
    sequence, or                                `elements`, all of them or one
    optional, star, plus, repeat                `content`, so many times
    tag                                         `begin`, `content`, and `end`, or one of several
    triggered_tags                              free text in which `triggers` may come, each the beginning of some of the `tags`;
                                                those that are `leading` count only where it begins, and behind a tag
    tags_with_separator                         `tags`, one after the other, and nothing but `separator` between them

    free text --trigger "<fn="--> "f>" or "g>", as the tags go on --> content --> end --> free text, unless `stop_after_first`

Names. The *ends* of a format are the strings one of which comes after it: it is written together with them, since free text has no end of its own.
They are ENDS where the output ends, and UNSEEN where something comes that cannot be looked for.

Rules of other front ends get a prefix, "3:json.value": schemas do not get in each other's way. Equal ones are made once.

Invariants. What is not known is refused with its place, a JSON pointer. `at_least_one` begins with a tag, as XGrammar has it. A trigger that begins
no tag is refused, and so is a tag that no trigger begins, or that free text would not let come. Free text next to what cannot be looked for is
refused, but in UNSEEN places only: a JSON value or a regex ends where its own rules say.

Cost: that of its parts. A tag is a rule, written once. Where it stops: formats that speak of tokens (`token`, `max_tokens`), and JSON that is spelled
as XML. Sources: XGrammar's documentation of structural tags (Dong et al. 2024); SGLang's `response_format`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import json_schema, schema  # noqa: F401 (json_schema registers itself)
from .free_text import until
from .rules import BYTES, EMPTY, MAX_COUNT, MAX_DEPTH, NEVER, Cat, Expr, GrammarError, Or, Ref, Repeat, Rules, alt, cat, literal, repeat, show, tick
from .schema import MAX_TEXT, check_text, grammar, strings

ENDS = None     # the output ends here
UNSEEN = ()     # what comes here cannot be looked for
Ends = Sequence[str] | None
NEEDED = object()

# Each format's fields: what they hold, and what they are when they are left out.
FORMATS: dict[str, dict[str, tuple[str, Any]]] = {
    "const_string": {"value": ("text", NEEDED)},
    "any_text": {"excludes": ("texts", ())},
    "json_schema": {"json_schema": ("schema", NEEDED), "style": ("style", "json"), "any_order": ("flag", None), "strict": ("flag", None)},
    "regex": {"pattern": ("text", NEEDED)},
    "grammar": {"grammar": ("text", NEEDED)},
    "sequence": {"elements": ("formats", NEEDED)},
    "or": {"elements": ("formats", NEEDED)},
    "optional": {"content": ("format", NEEDED)},
    "star": {"content": ("format", NEEDED)},
    "plus": {"content": ("format", NEEDED)},
    "repeat": {"content": ("format", NEEDED), "min": ("count", NEEDED), "max": ("count", NEEDED)},
    "tag": {"begin": ("text", NEEDED), "content": ("format", NEEDED), "end": ("end", NEEDED)},
    "triggered_tags": {"triggers": ("some texts", NEEDED), "tags": ("formats", NEEDED), "at_least_one": ("flag", False),
                       "stop_after_first": ("flag", False), "excludes": ("texts", ()), "leading": ("texts", ())},
    "tags_with_separator": {"tags": ("formats", NEEDED), "separator": ("text", NEEDED), "at_least_one": ("flag", False),
                            "stop_after_first": ("flag", False)},
}
LEGACY = {"triggers": ("some texts", NEEDED), "structures": ("formats", NEEDED), "at_least_one": ("flag", False), "stop_after_first": ("flag", False)}
STRUCTURE = {"begin": ("text", NEEDED), "schema": ("schema", NEEDED), "end": ("end", NEEDED)}


class Tag(NamedTuple):
    """A tag to be written. content: what stands in it, together with one of the ends that it is given."""
    begin: str
    content: Callable[[Ends], Expr]
    ends: Sequence[str]
    place: str


def refusal(place: str, why: str, construct: str = "structural_tag") -> GrammarError:
    """The error for what stands at a place, a JSON pointer."""
    return GrammarError(f"{place or 'the whole'}: {why}", construct, place)


def read(given: Any, place: str, spec: dict[str, tuple[str, Any]], what: str, typed: bool = True) -> dict[str, Any]:
    """The fields of an object, beside its type if it has one. Raises GrammarError for one that is unknown, missing, or not what it must be."""
    if not isinstance(given, dict):
        raise refusal(place, f"expected {what}, got {type(given).__name__}")
    for name in given:
        if name not in spec and not (typed and name == "type"):
            raise refusal(f"{place}/{name}", f"{what} has {', '.join(spec)} and nothing else", name)
    found = {}
    for name, (kind, default) in spec.items():
        if given.get(name) is None and default is NEEDED:
            raise refusal(place, f"{what} needs {name!r}", name)
        found[name] = default if given.get(name) is None else given[name]
        if given.get(name) is not None and (expected := CHECKS[kind](found[name])):
            raise refusal(f"{place}/{name}", f"expected {expected}, got {json.dumps(found[name])[:60]}", name)
    return found


def expect(sentence: str, holds: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    """What was expected of a value that does not hold."""
    return lambda value: None if holds(value) else sentence


CHECKS: dict[str, Callable[[Any], str | None]] = {
    "text": expect("a string", lambda value: isinstance(value, str)),
    "texts": expect("a list of strings, none of them empty", lambda value: is_list_of(str, value) and "" not in value),
    "some texts": expect("a list of strings, none of them empty", lambda value: is_list_of(str, value) and value and "" not in value),
    "end": expect("a string, or a list of strings, none of them empty",
                  lambda value: isinstance(value, str) or is_list_of(str, value) and value and "" not in value),
    "flag": expect("true or false", lambda value: isinstance(value, bool)),
    "count": expect(f"a number from 0 to {MAX_COUNT}, or -1 for any", lambda value: type(value) is int and -1 <= value <= MAX_COUNT),
    "format": expect("a format", lambda value: isinstance(value, dict)),
    "formats": expect("a list of one or more formats", lambda value: is_list_of(dict, value) and value),
    "schema": expect("a JSON schema: an object, true, false, or the text of one", lambda value: isinstance(value, (dict, bool, str))),
    "style": expect('"json", the only style that is supported', lambda value: value == "json"),
}


def is_list_of(kind: type, value: Any) -> bool:
    """Is it a list of such things?"""
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def fork(words: Sequence[tuple[bytes, Expr]]) -> Expr:
    """One of several words and what follows it, by common beginnings."""
    branches: dict[int, list[tuple[bytes, Expr]]] = {}
    for word, after in words:
        if word:
            branches.setdefault(word[0], []).append((word[1:], after))
    parts = [after for word, after in words if not word]
    for byte, below in branches.items():
        common = min(len(word) for word, _ in below)
        common = next((i for i in range(common) if len({word[i] for word, _ in below}) > 1), common)
        begin = cat(BYTES[b] for b in bytes([byte]) + below[0][0][:common])
        parts.append(cat([begin, fork([(word[common:], after) for word, after in below])]))
    return alt(parts)


def renamed(expr: Expr, prefix: str, known: dict[int, Expr]) -> Expr:
    """The expression with a prefix before every rule's name. What refers to none stays the same object."""
    if id(expr) not in known:
        new: Expr = expr
        if isinstance(expr, Ref):
            new = Ref(prefix + expr.name)
        elif isinstance(expr, Repeat):
            item = renamed(expr.item, prefix, known)
            new = expr if item is expr.item else Repeat(item, expr.low, expr.high)
        elif isinstance(expr, (Cat, Or)):
            parts = tuple(renamed(part, prefix, known) for part in expr.parts)
            new = expr if all(map(lambda a, b: a is b, parts, expr.parts)) else type(expr)(parts)
        known[id(expr)] = new
    return known[id(expr)]


class Writer:
    """Makes rules for formats. options: of the JSON in them."""

    def __init__(self, whitespace: str, strict: bool, any_order: bool):
        self.whitespace, self.options, self.rules = whitespace, {"strict": strict, "any_order": any_order}, {}
        self.embedded: dict[tuple, Ref] = {}

    def write(self, given: Any, place: str, ends: Ends) -> Expr:
        """A format, and one of its ends. Raises GrammarError."""
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in list(FORMATS):
            raise refusal(f"{place}/type", f"expected one of {', '.join(FORMATS)}, got {json.dumps(kind)[:60]}", "type")
        if place.count("/") > MAX_DEPTH:
            raise refusal(place, "formats are nested too deeply")
        fields = read(given, place, FORMATS[kind], f"a format of type {kind!r}")
        return self.WRITERS[kind](self, fields, place, ends)

    def closed(self, expr: Expr, ends: Ends) -> Expr:
        """What ends by itself, and then one of the ends."""
        return cat([expr, strings(ends)]) if ends else expr

    def embed(self, kind: str, text: Any, place: str, **options) -> Ref:
        """The start of another front end's rules, which are renamed."""
        key = kind, json.dumps(text), *sorted(options.items())
        if key not in self.embedded:
            try:
                made = schema.rules(kind, text, whitespace=self.whitespace, **options)
            except GrammarError as error:
                path = place + error.path if error.path.startswith("/") else place
                raise GrammarError(f"{place}: {error.message}", error.construct, path) from None
            prefix, known = f"{len(self.embedded)}:", {}
            self.rules |= {prefix + name: renamed(expr, prefix, known) for name, expr in made.rules.items()}
            self.embedded[key] = Ref(prefix + made.start)
        return self.embedded[key]

    def free(self, stops: dict[str, Expr], excludes: Sequence[str], place: str, ends: Ends, leading: dict[str, Expr] | None = None) -> Expr:
        """Free text up to a stop, or to one of the ends; neither holds what is excluded. leading: see `until`."""
        if ends is not ENDS and not ends:
            raise refusal(place, "free text comes before something that cannot be looked for: put it last, or into a tag that has an end")
        stops = dict.fromkeys(excludes, NEVER) | stops
        for end in ends or ():
            stops[end] = alt([stops.get(end, NEVER), EMPTY])
        try:
            return until(stops, ends is ENDS, f"text{len(self.rules)}:", self.rules, leading)
        except GrammarError as error:
            raise refusal(place, error.message) from None

    # -- the formats --

    def const_string(self, fields: dict, place: str, ends: Ends) -> Expr:
        """A text."""
        return self.closed(literal(fields["value"]), ends)

    def any_text(self, fields: dict, place: str, ends: Ends) -> Expr:
        """Free text."""
        return self.free({}, fields["excludes"], place, ends)

    def json(self, fields: dict, place: str, ends: Ends) -> Expr:
        """JSON. What it does not say of itself, the options say."""
        options = {name: value if fields[name] is None else fields[name] for name, value in self.options.items()}
        return self.closed(self.embed("json_schema", fields["json_schema"], f"{place}/json_schema", **options), ends)

    def regex(self, fields: dict, place: str, ends: Ends) -> Expr:
        """A regular expression."""
        return self.closed(self.embed("regex", fields["pattern"], f"{place}/pattern"), ends)

    def ebnf(self, fields: dict, place: str, ends: Ends) -> Expr:
        """A grammar in EBNF."""
        return self.closed(self.embed("ebnf", fields["grammar"], f"{place}/grammar"), ends)

    def sequence(self, fields: dict, place: str, ends: Ends) -> Expr:
        """All elements. The ends are the last one's."""
        *first, last = enumerate(fields["elements"])
        parts = [self.write(one, f"{place}/elements/{i}", UNSEEN) for i, one in first]
        return cat([*parts, self.write(last[1], f"{place}/elements/{last[0]}", ends)])

    def either(self, fields: dict, place: str, ends: Ends) -> Expr:
        """One of the elements."""
        return alt(self.write(one, f"{place}/elements/{i}", ends) for i, one in enumerate(fields["elements"]))

    def optional(self, fields: dict, place: str, ends: Ends) -> Expr:
        """The content, or nothing."""
        return alt([self.closed(EMPTY, ends), self.write(fields["content"], f"{place}/content", ends)])

    def repeated(self, fields: dict, place: str, ends: Ends, low: int = 0, high: int | None = None) -> Expr:
        """The content, so many times."""
        return self.closed(repeat(self.write(fields["content"], f"{place}/content", UNSEEN), low, high), ends)

    def counted(self, fields: dict, place: str, ends: Ends) -> Expr:
        """The content, `min` to `max` times."""
        low, high = fields["min"], None if fields["max"] == -1 else fields["max"]
        if low < 0 or high is not None and high < low:
            raise refusal(place, f"from {low} to {high} times is never", "repeat")
        return self.repeated(fields, place, ends, low, high)

    def tag(self, fields: dict, place: str, ends: Ends) -> Expr:
        """A tag."""
        tag = self.as_tag(fields, place)
        return cat([literal(tag.begin), self.inside(tag, ends)])

    def as_tag(self, fields: dict, place: str) -> Tag:
        """The fields of a tag as one."""
        ends = [fields["end"]] if isinstance(fields["end"], str) else fields["end"]
        return Tag(fields["begin"], lambda own: self.write(fields["content"], f"{place}/content", own), ends, place)

    def inside(self, tag: Tag, ends: Ends) -> Expr:
        """What follows the beginning of a tag, up to the ends around it. A tag without an end of its own ends with these."""
        if tag.ends == [""]:
            return tag.content(ends)
        return self.closed(tag.content(tag.ends), ends)

    def all_tags(self, given: list, place: str) -> list[Tag]:
        """The tags of a format. Their type may be left out."""
        found = []
        for i, one in enumerate(given):
            if one.get("type", "tag") != "tag":
                raise refusal(f"{place}/tags/{i}/type", f"expected \"tag\", got {json.dumps(one['type'])[:60]}", "type")
            found.append(self.as_tag(read(one, f"{place}/tags/{i}", FORMATS["tag"], "a tag"), f"{place}/tags/{i}"))
        return found

    def triggered(self, fields: dict, place: str, ends: Ends) -> Expr:
        """Free text with tags in it."""
        return self.dispatch(self.all_tags(fields["tags"], place), fields, place, ends)

    def dispatch(self, tags: list[Tag], fields: dict, place: str, ends: Ends) -> Expr:
        """The same, of tags that were read."""
        triggers, leading, once = fields["triggers"], fields.get("leading", ()), fields["stop_after_first"]
        free = f"free{len(self.rules)}:"
        begun: list[tuple[str, Expr]] = []
        for tag in tags:
            if not any(map(tag.begin.startswith, [*triggers, *leading])):
                raise refusal(f"{tag.place}/begin", f"{tag.begin!r} begins with none of the triggers: it would never be seen", "triggers")
            name = f"tag{len(self.rules)}:"
            self.rules[name] = NEVER    # the name is taken
            self.rules[name] = self.inside(tag, ends) if once else cat([self.inside(tag, UNSEEN), Ref(free)])
            begun.append((tag.begin, Ref(name)))
        stops = {}
        for name, i, trigger in [(name, *one) for name, given in (("triggers", triggers), ("leading", leading)) for one in enumerate(given)]:
            stops[trigger] = fork([(begin[len(trigger):].encode(), expr) for begin, expr in begun if begin.startswith(trigger)])
            if stops[trigger] == NEVER:
                raise refusal(f"{place}/{name}/{i}", f"{trigger!r} begins none of the tags; to forbid a text is for 'excludes'", name)
            tick()
        first = fork([(begin.encode(), expr) for begin, expr in begun])
        if once and fields["at_least_one"]:
            return first
        within = {trigger: stops[trigger] for trigger in triggers}
        self.rules[free] = self.free(within, fields.get("excludes", ()), place, ends, {trigger: stops[trigger] for trigger in leading})
        return first if fields["at_least_one"] else Ref(free)

    def separated(self, fields: dict, place: str, ends: Ends) -> Expr:
        """Tags, and the separator between them."""
        tags, once = self.all_tags(fields["tags"], place), fields["stop_after_first"]
        one = fork([(tag.begin.encode(), self.inside(tag, ends if once else UNSEEN)) for tag in tags])
        if once:
            return one if fields["at_least_one"] else alt([self.closed(EMPTY, ends), one])
        many = cat([one, repeat(cat([literal(fields["separator"]), one]), 0, None)])
        return self.closed(repeat(many, int(fields["at_least_one"]), 1), ends)

    WRITERS = {"const_string": const_string, "any_text": any_text, "json_schema": json, "regex": regex, "grammar": ebnf, "sequence": sequence,
               "or": either, "optional": optional, "star": repeated, "plus": lambda self, *args: self.repeated(*args, 1), "repeat": counted,
               "tag": tag, "triggered_tags": triggered, "tags_with_separator": separated}

    def legacy(self, fields: dict) -> Expr:
        """SGLang's older form."""
        tags = []
        for i, one in enumerate(fields["structures"]):
            place = f"/structures/{i}"
            held = read(one, place, STRUCTURE, "a structure", typed=False)
            ends = [held["end"]] if isinstance(held["end"], str) else held["end"]

            def content(own: Ends, text: Any = held["schema"], place: str = f"{place}/schema") -> Expr:
                return self.closed(self.embed("json_schema", text, place, **self.options), own)

            tags.append(Tag(held["begin"], content, ends, place))
        return self.dispatch(tags, fields, "", ENDS)


@grammar("structural_tag")
def structural_tag_rules(text: str | dict, *, whitespace: str = "fixed", strict: bool = False, any_order: bool = False) -> Rules:
    """The output has the form of a structural tag, as an object or its JSON text. The options are those of the JSON schemas in it, where they do not
    say otherwise. Raises GrammarError, with the place of what is refused."""
    try:
        text = text if isinstance(text, str) else json.dumps(text, allow_nan=False)
        if len(text) > MAX_TEXT:
            raise refusal("", f"more than {MAX_TEXT} characters")
        given = json.loads(text)
        check_text("structural_tag", [json.dumps(given, ensure_ascii=False)])
        if not isinstance(given, dict) or given.get("type", "structural_tag") != "structural_tag":
            raise refusal("", 'expected an object of type "structural_tag"')
        if ("format" in given) == ("structures" in given):
            raise refusal("", "expected either 'format', or 'triggers' and 'structures'")
        writer = Writer(whitespace, strict, any_order)
        if "format" in given:
            root = writer.write(read(given, "", {"format": ("format", NEEDED)}, "a structural tag with a format")["format"], "/format", ENDS)
        else:
            root = writer.legacy(read(given, "", LEGACY, "a structural tag with structures"))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, GrammarError):
            raise
        why = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is no JSON: {str(error)[:100]}"
        raise refusal("", why) from None
    return Rules(writer.rules | {"root": root}, "root")


DEMO = [
    {"triggers": ["<fn="], "structures": [{"begin": "<fn=f>", "schema": {"type": "integer"}, "end": "</fn>"},
                                          {"begin": "<fn=go>", "schema": {"enum": ["left", "right"]}, "end": "</fn>"}]},
    {"format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}, {"type": "regex", "pattern": "yes|no"}]}},
    {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "."}]}},
    {"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [{"begin": "<b>", "content": {"type": "any_text"}, "end": "</b>"}]}},
    {"format": {"type": "any_text", "max_tokens": 5}},
]

if __name__ == "__main__":
    for example in DEMO:
        print(json.dumps(example))
        try:
            for rule, body in structural_tag_rules(example).rules.items():
                if ":json." not in rule and ":char" not in rule:
                    line = show(body)
                    print(f"    {rule:<8} {line if len(line) < 120 else line[:117] + '...'}")
        except GrammarError as error:
            print(f"    refused: {error}")
