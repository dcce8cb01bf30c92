"""The front ends: other people's cases where they are at hand and our own, EBNF's dialect and its refusals, choices, any JSON in every layout,
the seam."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from earley import Recogniser, accepts
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_sgl import schema
from nano_sgl.schema import BYTES, EMPTY, GRAMMARS, Cat, GrammarError, Or, Ref, Repeat, Rules, rules

FOREIGN = Path(os.environ.get("NANO_SGL_CASES", "nowhere"))
MEGA = 2**20

OWN = [  # kind, text, accepted, refused
    ("ebnf", 'root ::= "a" root "b" | ""', ["", "ab", "aabb"], ["a", "ba", "aab"]),
    ("ebnf", 'root ::= root "+" root | [0-9]+ | "(" root ")"', ["1", "1+2+33", "(1+(2))"], ["", "+1", "1+", "(1"]),
    ("ebnf", 'root ::= a? b\na ::= b | a "x"\nb ::= | "y" | root', ["", "y", "yx", "yxxy", "xy"], ["z"]),
    ("ebnf", '# first\nroot ::=   # the start\n  "x" |\n\n  y-1.b_2   # or this\ny-1.b_2::="y"{2}|("z" "w")+\nunused ::= root',
     ["x", "yy", "zwzw"], ["y", "zw ", "z"]),
    ("ebnf", r'root ::= "\x41\u00e9\U0001F600\n\t\\\"\uD83D\uDE01\x85"', ["Aé😀\n\t\\\"😁\x85"], ["A"]),
    ("ebnf", r'root ::= [a-c\-\]\\\x30-\x32"] [^a-z\n] [-x] [x-] [^]', ["a1-xz", "]é--\n", "\\ x-😀", "0Axx0", '"0xx\n'],
     ["d1-xz", "aa-xz", "a1y-z", "a\n-xz"]),
    ("ebnf", 'root ::= .{2} "é"{ 1 , 2 } "end"{,1} [あ-ん]{1,}', ["\n😀éあ", "abééendんん"], ["aéあ", "abéééあ", "abé"]),
    ("ebnf", 'root ::= ("a" | ) () "b"*?+', ["", "a", "abb", "b"], ["aa", "ba"]),
    ("ebnf", 'root ::= "ab"{2} ("c" {2,3}){2}', ["ababcccc", "ababcccccc"], ["abbcccc", "ababccc", "ababccccccc"]),
    ("ebnf", 'root ::= item{0,100000}\nitem ::= [a-z]{1,100000} ","', ["", "a,bc,"], ["a", ","]),
    ("ebnf", '\ufeffroot ::= Token("," Token)* "\ufeff"\nToken ::= "x"', ["x\ufeff", "x,x\ufeff"], ["x", "\ufeffx\ufeff"]),
    ("choice", ["yes", "no", "nobody", "", "né", "yes"], ["yes", "no", "nobody", "", "né"], ["n", "nob", "y", "yesno"]),
    ("regex", r"\d{4}-(0\d|1[0-2])", ["2024-12", "0000-00"], ["2024-13", "2024-1"]),
    ("json_object", None, ['{}', '{"a": 1, "b": [true, null, {}]}', '{"\\u00e9\\/😀": -0.5e+10}'],
     ['[]', '{"a":1}', '{ }', '{"a": 01}', '{"a": 1,}', '{"\n": 1}', '{"a": 1} ']),
]
CASES = OWN + [(case["kind"], case["grammar"], case["accept"], case["reject"])
               for file in ("regex.jsonl", "ebnf.jsonl") if (FOREIGN / file).exists()
               for case in map(json.loads, (FOREIGN / file).read_text().splitlines())]


@pytest.mark.parametrize("kind, text, good, bad", CASES, ids=[str(text)[:30].strip() for _, text, _, _ in CASES])
def test_what_a_grammar_accepts(kind, text, good, bad):
    found = rules(kind, text)
    for output in good:
        assert accepts(found, output.encode()), output
    for output in bad:
        assert not accepts(found, output.encode()), output


def references(expr):
    if isinstance(expr, Ref):
        return {expr.name}
    return set().union(*map(references, [expr.item] if isinstance(expr, Repeat) else getattr(expr, "parts", ())))


@pytest.mark.parametrize("kind, text, good, bad", OWN, ids=[str(text)[:30].strip() for _, text, _, _ in OWN])
def test_every_name_is_defined(kind, text, good, bad):
    found = rules(kind, text)
    assert found.start in found.rules and set().union(*map(references, found.rules.values())) <= set(found.rules)


def test_no_character_is_split():
    recogniser = Recogniser(rules("ebnf", "root ::= [^a]*"))
    for byte, fits in [(0xC3, True), (0x61, False)]:
        assert recogniser.feed(byte) == fits and not recogniser.accepted()
    assert not accepts(rules("ebnf", "root ::= ."), b"\xed\xa0\x80"), "a surrogate"
    assert not accepts(rules("ebnf", "root ::= ."), b"\xc1\x81"), "an overlong a"


# -- EBNF: what is refused --

@pytest.mark.parametrize("text, construct, place", [
    ("", "rule root", "line 1, column 1"), ("start ::= root", "rule root", "line 1, column 15"),
    ('root ::= "a"\nroot ::= "b"', "rule root", "line 2, column 1"),
    ('root ::= "a" |\n  b-c\n', "rule b-c", "line 2, column 3"), ('root ::= "a" (= "b")', "lookahead (=", "line 1, column 14"),
    ("root ::= <think>", "token <...>", "line 1, column 10"), ("root ::= .* !<[5]>", "token !<...>", "line 1, column 13"),
    ('root ::= !"a"', "negation !", "line 1, column 10"), ('root ::= TagDispatch (("<a>", r))\nr ::= "x"', "TagDispatch(...)", "line 1, column 10"),
    ('root ::= "a" Token(5)', "Token(...)", "line 1, column 14"), ("root ::= ExcludeToken(5, 6)*", "ExcludeToken(...)", "line 1, column 10"),
    ("root ::= TokenTagDispatch((5, root))", "TokenTagDispatch(...)", "line 1, column 10"), ("root ::= f(1)", "f(...)", "line 1, column 10"),
    ('\ufeffroot = "a"', "=", "line 1, column 6"), ('root\n:= "a"', ":=", "line 2, column 1"), ('root: "a"', ":", "line 1, column 5"),
    ('root ::= a\na = "b"', "=", "line 2, column 3"), ('root ::= ::= "a"', "::=", "line 1, column 10"), ('root -> "a"', "->", "line 1, column 6"),
    ('root ::= "a", "b"', ",", "line 1, column 13"), ('root ::= "a";', ";", "line 1, column 13"),
    ('x "a"', "x", "line 1, column 1"), ('root ::= ("a" "b"', "(", "line 1, column 10"), ('root ::= "a")', ")", "line 1, column 13"),
    ('root ::= ("a"\nb ::= "c")', "(", "line 1, column 10"),
    ('root ::= "a\\q"', "\\q", "line 1, column 12"), ('root ::= "a', '"', "line 1, column 10"), ("root ::= [a", "[", "line 1, column 10"),
    ("root ::= [z-a]", "[", "line 1, column 10"),
    ("root ::= []", "[]", "line 1, column 10"), ("root ::= * ", "*", "line 1, column 10"), ('root ::= "a" | {2}', "{", "line 1, column 16"),
    ('root ::= "a"{x}', "{", "line 1, column 13"),
    ('root ::= "a"{3,2}', "{m,n}", "line 1, column 13"), ('root ::= "a"{9999999999}', "{m,n}", "line 1, column 13"),
    (r'root ::= "\ud83d"', r"\uD83D", "line 1, column 10"),
    ('root ::= (("a" "b"){400} "c"){400}', "{m,n}", "line 1, column 30"), ("root ::= 'a'", "'", "line 1, column 10"),
    (r'root ::= "\xZZ"', r"\x", "line 1, column 11"),
    ('root ::= "\\', "\\", "line 1, column 11"), ("root ::= é", "é", "line 1, column 10"), ("root ::= " + "(" * 100_000, "(", "line 1, column 74")])
def test_a_refusal_names_line_and_column(text, construct, place):
    with pytest.raises(GrammarError) as refusal:
        rules("ebnf", text)
    assert (refusal.value.construct, refusal.value.path) == (construct, place)
    assert place in str(refusal.value) and len(str(refusal.value)) < 200


@pytest.mark.parametrize("text, words", [
    ('root ::= TagDispatch(("<a>", r))', "is not supported: use structural_tag"), ('root = "a"', "::= is meant"), ('root ::= a\na := "b"', "::= is meant"),
    ('root ::= !"a"', "it is a class, [^...]"), ("root ::= 'a'", "double quotes"), ("root ::= item{200000}", "more than one character go to 100000")])
def test_a_refusal_says_what_to_do(text, words):
    with pytest.raises(GrammarError) as refusal:
        rules("ebnf", text)
    assert words in str(refusal.value)


PIECES = ["root", "a", " ::= ", "\n", " ", '"', '"x"', "[", "]", "[a-z]", "^", "(", ")", "|", "*", "+", "?", "{1,2}", "{", "}", ".", "#", "\\", "\\n",
          "\\u00e9", "<", "="]


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join).map("root ::= ".__add__)))
@settings(max_examples=1000, deadline=None)
def test_rubbish_is_refused_or_held(text):
    try:
        accepts(rules("ebnf", text), b"ax")
    except GrammarError as refusal:
        assert refusal.construct and refusal.message


# -- choice --

@given(st.lists(st.text("abé", max_size=4), min_size=1, max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_choice_is_its_strings(texts):
    found = rules("choice", texts)
    for output in ["".join(chars) for n in range(4) for chars in itertools.product("abé", repeat=n)]:
        assert accepts(found, output.encode()) == (output in texts)


def depth(expr):
    return 1 + max(map(depth, getattr(expr, "parts", ())), default=0)


def test_a_choice_of_ten_thousand_is_a_tree_and_not_deep():
    many = [f"{n * 7919 % 10_007:05} item {n % 7}" for n in range(10_000)]
    root = rules("choice", many).rules["root"]
    assert depth(root) < 3 * schema.MAX_DEPTH
    while isinstance(root, Cat):
        root = next(part for part in root.parts if isinstance(part, Or))
    assert len(root.parts) <= 10, "one way for each next byte"
    ladder = rules("choice", ["a" * n for n in range(1, 1400)])
    assert depth(ladder.rules["root"]) < 3 * schema.MAX_DEPTH and accepts(ladder, b"a" * 300) and not accepts(ladder, b"a" * 300 + b"b")


# -- any JSON --

json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=8)
SEPARATORS = {"fixed": (", ", ": "), "compact": (",", ":"), "flexible": (" ,\t", "\r\n: ")}


@given(value=st.dictionaries(st.text(max_size=5), json_values, max_size=3), layout=st.sampled_from(list(SEPARATORS)), ascii_only=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_object_is_json_in_its_layout(value, layout, ascii_only):
    text = json.dumps(value, separators=SEPARATORS[layout], ensure_ascii=ascii_only)
    assert accepts(rules("json_object", None, whitespace=layout), text.encode())
    indented = json.dumps(value, indent=2).encode()
    assert accepts(rules("json_object", True, whitespace="flexible"), indented)
    if layout != "flexible" and any(value.values()):
        assert not accepts(rules("json_object", None, whitespace=layout), indented)


@given(value=st.dictionaries(st.text(max_size=5), json_values, max_size=3), at=st.floats(0, 1),
       new=st.sampled_from(list('"\\{}[],:0-.eEtn \n\x01é') + [""]), cut=st.integers(0, 1))
@settings(max_examples=300, deadline=None)
def test_near_json_is_accepted_only_where_it_is_json(value, at, new, cut):
    text = json.dumps(value)
    i = int(at * (len(text) - 1))
    near = text[:i] + new + text[i + cut:]
    try:
        is_json = isinstance(json.loads(near, parse_constant=lambda name: json.loads("none")), dict) and near == near.strip(" \t\r\n")
    except ValueError:
        is_json = False
    assert accepts(rules("json_object", None, whitespace="flexible"), near.encode()) == is_json


def test_sixteen_blanks_in_a_row_and_no_more():
    found = rules("json_object", None, whitespace="flexible")
    for n in (0, 1, 16, 17):
        gap = (" \n\t\r" * 5)[:n]
        for text in ("{%s}", '{%s"a":1}', '{"a"%s:1}', '{"a":%s1}', '{"a":1%s}', '{"a":1%s,"b":2}', '{"a":[%s]}', '{"a":[1,%s2]}'):
            assert accepts(found, (text % gap).encode()) == (n <= 16), text


# -- the seam and its bounds --

@pytest.mark.parametrize("kind, text, whitespace, construct", [
    ("xml", "a", "fixed", "xml"), ([], "a", "fixed", "[]"), ("regex", "a", "wide", "whitespace"), ("regex", "a", [], "whitespace"),
    ("regex", 5, "fixed", "regex"), ("ebnf", None, "fixed", "ebnf"),
    ("choice", "yes", "fixed", "choice"), ("choice", [], "fixed", "choice"), ("choice", ["a", 1], "fixed", "choice"),
    ("choice", ["a", "\ud800"], "fixed", "choice"),
    ("regex", "a\ud800", "fixed", "regex"), ("json_object", "{}", "fixed", "json_object"), ("regex", "a" * (MEGA + 1), "fixed", "regex"),
    ("choice", ["a" * MEGA, "b"], "fixed", "choice")])
def test_what_is_no_text_is_refused_by_name(kind, text, whitespace, construct):
    with pytest.raises(GrammarError) as refusal:
        rules(kind, text, whitespace=whitespace)
    assert refusal.value.construct == construct


LARGE = [
    ("ebnf", "root ::= " + '"a" ' * 200_000),
    ("ebnf", "root ::= " + "a" * 1_000_000),
    ("ebnf", "root ::= r0\n" + "".join(f'r{n} ::= "x" r{n + 1}\n' for n in range(40_000)) + "r40000 ::= root"),
    ("ebnf", "root ::= " + ("a" * 500 + " " * 500) * 1000),
    ("ebnf", "#\n" * 500_000),
    ("ebnf", "root ::= " + '"a"*' * 200_000),
    ("ebnf", 'root ::= "' + "\\n" * 500_000),
    ("choice", [str(n) for n in range(100_000)]),
    ("choice", ["a" * n for n in range(1400)]),
    ("choice", [""] * 1_000_000),
]


@pytest.mark.parametrize("kind, text", LARGE, ids=lambda it: str(it[:14]))
def test_a_large_text_is_done_in_bounded_time(kind, text):
    began = time.thread_time()
    try:
        rules(kind, text)
    except GrammarError as refusal:
        assert len(str(refusal)) < 200
    assert time.thread_time() - began < 20, "seconds; one is usual"


def test_a_front_end_of_ones_own(monkeypatch):
    monkeypatch.setattr(schema, "GRAMMARS", dict(GRAMMARS))

    @schema.grammar("times")
    def times(text, *, whitespace="fixed"):
        return Rules({"root": schema.repeat(BYTES[ord("x")], text, text)}, "root")

    assert accepts(rules("times", 3), b"xxx") and rules("times", 0).rules["root"] == EMPTY


@pytest.mark.parametrize("module", ["rules", "regex", "schema"])
def test_the_demo_prints_rules_and_needs_no_numpy(module):
    code = f"import runpy, sys; sys.modules.update(torch=None, numpy=None); runpy.run_module('nano_sgl.{module}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 5, done.stderr
