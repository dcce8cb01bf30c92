"""Structural tags: every format against brute force over short texts and against `re`, free text against searching, JSON in tags against jsonschema,
what is refused and where, and the automaton over the demo model's tokens."""

import itertools
import json
import random
import re

import pytest
from earley import Recogniser, accepts
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_sgl import free_text, grammar, schema, weights
from nano_sgl.rules import EMPTY, NEVER, GrammarError, Rules, literal
from nano_sgl.structural_tag import FORMATS, Writer, fork, structural_tag_rules
from nano_sgl.vocab import Vocab


def const(text: str) -> dict:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> dict:
    return {"type": "regex", "pattern": pattern}


def tag(begin: str, content: dict, end, **more) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end, **more}


def triggered(triggers: list, *tags: dict, **more) -> dict:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **more}


def separated(separator: str, *tags: dict, **more) -> dict:
    return {"type": "tags_with_separator", "separator": separator, "tags": list(tags), **more}


def sequence(*elements: dict) -> dict:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict) -> dict:
    return {"type": "or", "elements": list(elements)}


ANY = {"type": "any_text"}
ONCE, SOME = {"stop_after_first": True}, {"at_least_one": True}
A, B = tag("<a>", const("x"), ">"), tag("<b>", regex("y?"), ">")
EITHER = r"(<a>x>|<b>y?>)"
FREE = r"(?:[^<]|<(?![ab]))*"

# A format, and the regular expression that says the same.
SAME = [
    (const("a<"), "a<"), (const(""), ""), (regex("[ab]{2}"), "[ab]{2}"), ({"type": "grammar", "grammar": 'root ::= "a" x\nx ::= "b" | root'}, "a+b"),
    (ANY, "(?s).*"), (ANY | {"excludes": ["ab", "<<"]}, r"(?:(?!ab|<<)[^\0])*"), (ANY | {"excludes": ["a"]}, "[^a]*"),
    (sequence(const("a"), regex("b*"), const("<")), "ab*<"), (sequence(const("a")), "a"), (sequence(const("a"), ANY), "a(?s:.)*"),
    (either(const("a"), regex("b+"), const("")), "a|b+|"), (either(const("a"), tag("<", ANY, ">")), "a|<[^>]*>"),
    ({"type": "optional", "content": const("ab")}, "(ab)?"), ({"type": "star", "content": const("ab")}, "(ab)*"),
    ({"type": "plus", "content": either(const("a"), const("b<"))}, "(a|b<)+"),
    ({"type": "repeat", "content": const("a"), "min": 2, "max": 3}, "a{2,3}"), ({"type": "repeat", "content": const("a"), "min": 0, "max": 0}, ""),
    ({"type": "repeat", "content": regex("a|b"), "min": 2, "max": -1}, "[ab]{2,}"),
    (tag("<", const("a"), ">"), "<a>"), (tag("", const("a"), ""), "a"), (tag("<", ANY, ">"), "<[^>]*>"), (tag("<", ANY, ["a", "b"]), "<[^ab]*[ab]"),
    (tag("<", ANY | {"excludes": [">", "a"]}, ">"), "<[^>a]*>"), (tag("<", ANY, "ab"), r"<(?:(?!ab)[^\0])*ab"),
    (tag("<", ANY, "aab"), r"<(?:(?!aab)[^\0])*aab"), (tag("<", tag("", ANY, ""), ">"), "<[^>]*>"),
    (tag("<", {"type": "optional", "content": ANY}, ">"), "<[^>]*>"), (tag("<", sequence(const("a"), ANY), ">"), "<a[^>]*>"),
    (sequence(tag("<", ANY, ">"), tag("<", ANY, "")), "<[^>]*><(?s:.)*"), (tag("<", {"type": "star", "content": const("a")}, ["b", ">"]), "<a*[b>]"),
    (triggered(["<"], A, B), f"[^<]*({EITHER}[^<]*)*"), (triggered(["<a", "<b"], A, B), f"{FREE}({EITHER}{FREE})*"),
    (triggered(["<a>", "<b"], A, B), f"(?:[^<]|<(?!a>|b))*({EITHER}(?:[^<]|<(?!a>|b))*)*"),
    (triggered(["<"], A, B, **ONCE), f"[^<]*({EITHER})?"), (triggered(["<"], A, B, **SOME), f"{EITHER}[^<]*({EITHER}[^<]*)*"),
    (triggered(["<"], A, B, **SOME, **ONCE), EITHER), (triggered(["<"], A, excludes=["b", "xy"]), "(?:(?!xy)[^<b])*(<a>x>(?:(?!xy)[^<b])*)*"),
    (triggered(["b<"], tag("b<", const("a"), ">")), r"(?:(?!b<)[^\0])*(b<a>(?:(?!b<)[^\0])*)*"),
    (triggered(["<"], tag("<", const("a"), ""), tag("<", const("b"), ">")), "[^<]*((<a|<b>)[^<]*)*"),
    (triggered(["<"], A, tag("ab", const("x"), ">"), leading=["ab"]), "(abx>|(?!ab)[^<]*<a>x>)*(?!ab)[^<]*"),
    (triggered(["ab"], tag("ab", const("x"), ">"), tag("aa", const("y"), ">"), leading=["aa"]),
     r"(aay>|(?!aa)(?:(?!ab)[^\0])*abx>)*(?!aa)(?:(?!ab)[^\0])*"),
    (triggered(["<"], A, tag("ab", const("x"), ">"), leading=["ab"], **ONCE), "abx>|(?!ab)[^<]*(<a>x>)?"),
    (tag("(", triggered(["<"], A), ")"), r"\([^<)]*(<a>x>[^<)]*)*\)"), (tag("(", triggered(["<"], A, **ONCE), ")"), r"\([^<)]*(<a>x>)?\)"),
    (tag("(", triggered(["<"], A, **SOME, **ONCE), ""), r"\(<a>x>"), (tag("(", triggered(["<"], A, **ONCE), ["<", ")"]), r"\([^<)]*(<a>x>)?[)<]"),
    (sequence(triggered(["<"], A, **SOME, **ONCE), const("!")), "<a>x>!"),
    (separated("", A, B), f"({EITHER})*"), (separated("/", A, B), f"({EITHER}(/{EITHER})*)?"), (separated("/", A, B, **SOME), f"{EITHER}(/{EITHER})*"),
    (separated("/", A, B, **ONCE), f"({EITHER})?"), (separated("/", A, B, **ONCE, **SOME), EITHER), (tag("(", separated("/", A), ")"), r"\((<a>x>(/<a>x>)*)?\)"),
    (separated("/", tag("<", ANY, ""), **ONCE), "(?:<(?s:.)*)?"),
]


@pytest.mark.parametrize("given, pattern", SAME, ids=[f"{n} {one['type']}" for n, (one, _) in enumerate(SAME)])
def test_a_format_is_the_regular_expression_that_says_the_same(given, pattern):
    """Every text of up to five of its letters, and random longer ones."""
    made, same, rng = structural_tag_rules({"type": "structural_tag", "format": given}), re.compile(pattern), random.Random(0)
    seen = set(re.sub(r"\\0|\\s|[?:!s]", "", json.dumps(given) + pattern)) & set("<>ab()xy/![]")
    letters = sorted(seen & set("<>abxy/()!"))[:7] or ["a"]
    texts = ["".join(text) for n in range(5) for text in itertools.product(letters, repeat=n)][:3000]
    pieces = [*letters, "<a>x>", "<b>y>", "<b>", "<a", "b<a>", "/", "aab", "é", "☃"]
    texts += ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(300)]
    wrong = [text for text in texts if accepts(made, text.encode()) != bool(same.fullmatch(text))]
    assert not wrong, wrong[:5]


def test_every_format_is_tested():
    def kinds(given):
        return {given["type"], *(kind for inner in [given.get("content"), *given.get("elements", ()), *given.get("tags", ())] if inner
                                 for kind in kinds(inner))}
    assert set().union(*(kinds(one) for one, _ in SAME)) | {"json_schema"} == set(FORMATS) == set(Writer.WRITERS)


# ------------------------------------------------------------------------------------------------------------------------ free text

WORDS = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.data())
def test_free_text_is_what_searching_says(stops, data):
    """Random stops of three letters: the first that is complete, and what follows it."""
    after = {stop: data.draw(st.sampled_from([EMPTY, NEVER, literal("!"), literal(f"({n})")])) for n, stop in enumerate(stops)}
    says = {stop: {EMPTY: "", NEVER: None}.get(expr, "!" if expr == literal("!") else f"({n})") for n, (stop, expr) in enumerate(after.items())}
    hidden = [stop for stop in stops if after[stop] != NEVER and any(other in stop[:-1] for other in stops)]
    ends, rules = data.draw(st.booleans()), {}
    if hidden:
        with pytest.raises(GrammarError, match="could never be seen whole"):
            free_text.until(after, ends, "x", rules)
        return
    start = free_text.until(after, ends, "x", rules)
    made = Rules(rules | {"root": start}, "root")
    for _ in range(60):
        text = data.draw(st.text("ab<é", max_size=7)) + data.draw(st.sampled_from(["", "!", "(0)", "(1)", *stops]))
        cut = next((n for n in range(1, len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)), None)
        if cut is None:
            good = ends
        else:
            good = text[cut:] in [says[stop] for stop in stops if text[:cut].endswith(stop)]
        assert accepts(made, text.encode()) == good, (text, says, ends)


def test_free_text_is_characters_and_nothing_half():
    made = structural_tag_rules({"format": triggered(["☃"], tag("☃", const("é"), ""))})
    for text in ("", "\u2602", "☃é", "a☃é☃é😀", "é\u2603é"):
        assert accepts(made, text.encode())
    for data in (b"\xe2", b"\xe2\x98", b"\xff", "☃".encode(), "☃e".encode(), b"\xed\xa0\x80"):
        assert not accepts(made, data)


def test_many_stops_are_as_many_states_as_they_have_characters():
    words = [f"<{a}{b}>" for a in "abcdefgh" for b in "abcdefgh"]
    rules = {}
    free_text.until(dict.fromkeys(words, EMPTY), True, "x", rules)
    assert len(rules) == 1 + 1 + 8 + 64
    long = dict.fromkeys(["".join(map(chr, range(0x4E00, 0x4E00 + 512))), "".join(map(chr, range(0x5E00, 0x5E00 + 512)))], EMPTY)
    moves, numbers = free_text.automaton(long)
    assert len(numbers) == 1023 and sum(map(len, moves.values())) < 4000
    with pytest.raises(GrammarError, match="more than 1024 characters"):
        free_text.until(dict.fromkeys(map(str, range(100_000)), EMPTY), True, "x", {})
    with pytest.raises(GrammarError, match="empty"):
        free_text.until({"": EMPTY}, True, "x", {})


@given(st.lists(st.tuples(st.binary(max_size=4), st.sampled_from(["", "!", "?"])), min_size=1, max_size=8))
def test_words_fork_where_they_differ(words):
    made = Rules({"root": fork([(word, literal(after)) for word, after in words])}, "root")
    meant = {word + after.encode() for word, after in words}
    for text in meant | {text[:-1] for text in meant} | {text + b"!" for text in meant}:
        assert accepts(made, text) == (text in meant)


# ----------------------------------------------------------------------------------------------------------------------------- JSON

WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/n"}}, "required": ["city"],
           "$defs": {"n": {"type": "integer", "minimum": 1}}}
TIME = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "$defs": {"n": {"type": "string"}}}
OLD = {"type": "structural_tag", "triggers": ["<fn="], "structures": [{"begin": "<fn=weather>", "schema": WEATHER, "end": "</fn>"},
                                                                      {"begin": "<fn=time>", "schema": json.dumps(TIME), "end": "</fn>"}]}
NEW = {"type": "structural_tag", "format": triggered(
    ["<fn="], tag("<fn=weather>", {"type": "json_schema", "json_schema": WEATHER}, "</fn>"),
    {"begin": "<fn=time>", "content": {"type": "json_schema", "json_schema": TIME}, "end": "</fn>"})}
GOOD = ["", "Hello.", "<fn", '<fn=weather>{"city": "Rome"}</fn>', 'I see: <fn=weather>{"city": "Rome", "days": 2}</fn>\n<fn=time>{"zone": "utc"}</fn> done <f',
        '<fn=time>{}</fn>', '<<fn=time>{}</fn>']
BAD = ["<fn=", "<fn=weather", '<fn=weather>{"city": "Rome"}', '<fn=weather>{"zone": "utc"}</fn>', '<fn=time>{"zone": "est"}</fn>',
       '<fn=weather>{"city": "Rome", "days": "2"}</fn>', '<fn=weather>{"city":"Rome"}</fn>', '<fn=weather> {"city": "Rome"}</fn>', "a<fn=x"]


@pytest.mark.parametrize("given", [OLD, NEW], ids=["structures", "format"])
def test_schemas_in_tags_do_not_get_in_each_others_way(given):
    for text in (given, json.dumps(given)):
        made = schema.rules("structural_tag", text)
        assert all(accepts(made, one.encode()) for one in GOOD) and not any(accepts(made, one.encode()) for one in BAD)
    compact = schema.rules("structural_tag", given, whitespace="compact")
    assert accepts(compact, b'<fn=weather>{"city":"Rome"}</fn>') and not accepts(compact, b'<fn=weather>{"city": "Rome"}</fn>')


def test_options_are_for_the_schemas_that_do_not_say_otherwise():
    more = b'<fn=time>{"zone": "utc", "x": 1}</fn>'
    assert accepts(schema.rules("structural_tag", OLD), more) and not accepts(schema.rules("structural_tag", OLD, strict=True), more)
    one = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}}

    def holds(text, given, **options):
        return accepts(schema.rules("structural_tag", {"format": given}, **options), text)

    straight, turned, more = b'{"a": 1, "b": 2}', b'{"b": 2, "a": 1}', b'{"a": 1, "b": 2, "c": 3}'
    assert holds(straight, one) and not holds(turned, one) and holds(more, one)
    assert not holds(more, one | {"strict": True}) and holds(more, one | {"strict": False}, strict=True) and not holds(more, one, strict=True)
    assert holds(turned, one | {"any_order": True}) and not holds(turned, one | {"any_order": False}, any_order=True)
    assert holds(turned, one, any_order=True)


def test_equal_schemas_are_made_once():
    many = [{"begin": f"<fn={n}>", "schema": WEATHER, "end": "</fn>"} for n in range(50)]
    one, fifty = (structural_tag_rules({"triggers": ["<fn="], "structures": many[:n]}) for n in (1, 50))
    assert len(fifty.rules) < len(one.rules) + 55
    assert accepts(fifty, b'<fn=49>{"city": "x"}</fn><fn=7>{"city": "y"}</fn>')


# -------------------------------------------------------------------------------------------------------------------------- refusals

REFUSED = [  # what is given, its place, words
    ("{", "", "no JSON"), ([], "", "an object"), ({}, "", "either 'format'"), ({"type": "tag", "format": ANY}, "", "structural_tag"),
    ({"format": ANY, "structures": []}, "", "either 'format'"), ({"format": ANY, "x": 1}, "/x", "format and nothing else"),
    ({"format": "any_text"}, "/format", "a format"), ({"format": {"type": "token", "token": 5}}, "/format/type", "const_string"),
    ({"format": {}}, "/format/type", "got null"), ({"format": {"type": ["any_text"]}}, "/format/type", "any_text"),
    ({"format": ANY | {"max_tokens": 5}}, "/format/max_tokens", "excludes and nothing else"), ({"format": ANY | {"excludes": "a"}}, "/format/excludes", "list"),
    ({"format": ANY | {"excludes": [""]}}, "/format/excludes", "empty"), ({"format": const("a") | {"value": 5}}, "/format/value", "a string"),
    ({"format": {"type": "const_string"}}, "/format", "'value'"), ({"format": sequence()}, "/format/elements", "one or more"),
    ({"format": sequence(const("a"), ANY, const("b"))}, "/format/elements/1", "cannot be looked for"),
    ({"format": {"type": "star", "content": ANY}}, "/format/content", "cannot be looked for"),
    ({"format": sequence(triggered(["<"], A), const("b"))}, "/format/elements/0", "cannot be looked for"),
    ({"format": triggered(["<"], tag("<", ANY, ""))}, "/format/tags/0/content", "cannot be looked for"),
    ({"format": tag("<", const("a"), ["", "b"])}, "/format/end", "none of them empty"), ({"format": tag("<", const("a"), [])}, "/format/end", "a string"),
    ({"format": tag("<", {"type": "any"}, ">")}, "/format/content/type", "got \"any\""),
    ({"format": triggered(["("], A)}, "/format/tags/0/begin", "none of the triggers"), ({"format": triggered([], A)}, "/format/triggers", "list"),
    ({"format": triggered(["<", "("], A)}, "/format/triggers/1", "begins none of the tags"),
    ({"format": triggered(["<", "<a"], A)}, "/format", "'<a' could never be seen whole: '<' is in it"),
    ({"format": triggered(["<a"], A, leading=["b"])}, "/format/leading/0", "begins none of the tags"),
    ({"format": triggered(["<"], A, leading=["<a"])}, "/format", "'<a' at the beginning could never be seen whole: '<' is in it"),
    ({"format": triggered(["<a"], A, excludes=["<"])}, "/format", "'<a' could never be seen whole"),
    ({"format": tag("(", triggered(["<a"], A), "<>)")}, None, None), ({"format": tag("(", triggered(["<"], A), "<>)")}, "/format/content", "'<>)' could"),
    ({"format": triggered(["<"], const("a"))}, "/format/tags/0/type", "\"tag\""), ({"format": triggered(["<"], A, at_least_one=1)}, "/format/at_least_one", "true or"),
    ({"format": triggered(["<"], A | {"ends": "x"})}, "/format/tags/0/ends", "begin, content, end"),
    ({"format": {"type": "repeat", "content": const("a"), "min": 3, "max": 2}}, "/format", "never"),
    ({"format": {"type": "repeat", "content": const("a"), "min": True, "max": 2}}, "/format/min", "a number"),
    ({"format": regex("a(?=b)")}, "/format/pattern", "lookahead"), ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "/format/grammar", "rule x"),
    ({"format": {"type": "json_schema", "json_schema": {"properties": {"a": {"type": "no"}}}}}, "/format/json_schema/properties/a", "type"),
    ({"format": {"type": "json_schema", "json_schema": False}}, "/format/json_schema", "no value is valid"),
    ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "/format/style", "json"),
    ({"structures": OLD["structures"]}, "", "'triggers'"), ({"triggers": ["<"], "structures": []}, "/structures", "one or more"),
    ({"triggers": ["<"], "structures": [{"begin": "<", "end": ">"}]}, "/structures/0", "'schema'"),
    ({"triggers": ["<"], "structures": [{"type": "tag", "begin": "<", "schema": {}, "end": ">"}]}, "/structures/0/type", "begin, schema, end"),
    ({"triggers": ["<"], "structures": [{"begin": "<", "schema": {"type": "no"}, "end": ">"}]}, "/structures/0/schema", "type"),
    ({"format": json.loads('{"type": "sequence", "elements": [' * 200 + '{"type": "any_text"}' + "]}" * 200)}, None, "too deeply"),
    ('{"format": ' + '{"type": "star", "content": ' * 30_000, "", "nested too deeply"), ({"format": const("\ud800")}, "", "surrogate"),
    ({"format": const("x" * 2**20)}, "", "more than 1048576"),
]


@pytest.mark.parametrize("given, place, words", REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_is_not_held_is_refused_with_its_place(given, place, words):
    if words is None:
        schema.rules("structural_tag", given)
        return
    with pytest.raises(GrammarError) as caught:
        schema.rules("structural_tag", given)
    assert words in str(caught.value) and len(str(caught.value)) < 400, str(caught.value)
    assert place in (None, caught.value.path) or words == "surrogate"


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers(-2, 3) | st.text("<>ab", max_size=3) | st.sampled_from(sorted(FORMATS)),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
                        ["type", "content", "elements", "tags", "begin", "end", "value", "triggers", "pattern", "separator", "json_schema", "min", "max"]),
                        inner, max_size=4), max_leaves=12))
def test_whatever_is_given_is_rules_or_a_refusal(given):
    for whole in (given, {"format": given}, {"triggers": ["<"], "structures": given}):
        try:
            assert isinstance(schema.rules("structural_tag", whole), Rules)
        except GrammarError:
            pass


# ------------------------------------------------------------------------------------------------------------------ over real tokens

@pytest.fixture(scope="module")
def vocab(demo_path):
    tokenizer = weights.load_tokenizer(demo_path)
    return Vocab.from_tokenizer(tokenizer, weights.end_ids(demo_path, tokenizer))


def test_long_free_text_has_few_states(vocab):
    made = grammar.compile("structural_tag", NEW, vocab)
    text = ("I think <b>about</b> it, < a / fn=. " * 40 + '<fn=weather>{"city": "Rome"}</fn>') * 2 + " Done."
    state = made.start
    for token in vocab.encode(text):
        state = made.step(state, token)
        assert state is not None
    assert made.is_accepting(state) and len(made.tables.rows) < 150
    for begun, good in (("<fn=", False), ("<fn=time>", False), ("<fn=time>{}", False), ("<fn=time>{}</fn>", True), ("<fn=x", None), ("a <fn=ti<", None)):
        state = made.step_bytes(made.start, begun.encode())
        assert (None if state is None else made.is_accepting(state)) == good


def test_tokens_walk_as_characters_do(vocab):
    """Random walks over the demo model's tokens: what the automaton allows, Earley reads, and the other way round for texts in tokens."""
    rng, made, rules = random.Random(1), grammar.compile("structural_tag", NEW, vocab), schema.rules("structural_tag", NEW)
    tokens = [i for i, token in enumerate(vocab.tokens) if token and len(token) < 6]
    for _ in range(8):
        state, reader = made.start, Recogniser(rules)
        for _ in range(12):
            begun = rng.choice([None, "<fn=", "<fn=time>{", '"zone": "', "</fn>"])
            token = rng.choice(vocab.encode(begun) if begun else tokens)
            after = made.step(state, token)
            copy = Recogniser(rules)
            copy.columns, copy.exprs, copy.numbers, copy.top = list(reader.columns), reader.exprs, reader.numbers, reader.top
            assert all(copy.feed(byte) for byte in vocab.tokens[token]) == (after is not None)
            if after is not None:
                state, reader = after, copy
                assert made.is_accepting(state) == reader.accepted()
