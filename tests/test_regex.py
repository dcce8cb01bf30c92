"""Regular expressions against Python's `re`: every character of every class, random patterns on random texts, anchors wherever they stand; what is
refused, and where; what a hostile pattern costs."""

import itertools
import re
import time
import unicodedata

import pytest
from earley import accepts
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_sgl import regex, rules
from nano_sgl.schema import EMPTY, NEVER, Byte, Cat, GrammarError, Or, Repeat, Rules
from nano_sgl.schema import rules as compile_rules

pytestmark = pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # re's, of sets in sets
EVERY_CHAR = "".join(map(chr, range(rules.LAST_CHAR + 1)))


def matches(pattern, text, search=False):
    return accepts(Rules({"root": regex.parse(pattern, search=search)}, "root"), text.encode())


def texts_of(expr):
    """The texts of an expression without repeats."""
    if isinstance(expr, Byte):
        return [bytes([b]) for b in range(256) if expr.mask >> b & 1]
    if isinstance(expr, Or):
        return [text for part in expr.parts for text in texts_of(part)]
    return [b"".join(tails) for tails in itertools.product(*map(texts_of, expr.parts))]


def spells(pattern):
    texts = texts_of(regex.parse(pattern))
    assert len(texts) == len(set(texts)), "a character is spelled twice"
    return {ord(text.decode()) for text in texts}


def begins_apart(expr):
    """Do alternatives begin with different bytes, all the way down?"""
    if isinstance(expr, Or):
        firsts = [(part if isinstance(part, Byte) else part.parts[0]).mask for part in expr.parts]
        if any(a & b for a, b in itertools.combinations(firsts, 2)):
            return False
    return isinstance(expr, Byte) or all(map(begins_apart, expr.parts))


def depth(expr, known):
    """How deep an expression is, down to its bytes."""
    if id(expr) not in known:
        below = [expr.item] if isinstance(expr, Repeat) else getattr(expr, "parts", ())
        known[id(expr)] = 1 + max((depth(part, known) for part in below), default=0)
    return known[id(expr)]


# -- sets of characters: all of Unicode --

CLASSES = [
    r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r".", r"(?s:.)", r"[^\w]", r"[\s\d]", r"[^\W\d_]", r"(?a:\w)", r"(?a:[^\d])", r"(?i:[^k])",
    r"(?i:\w)", r"(?i:\W)", r"(?i:[a-z])", r"(?i:[a-zß-ÿ])", r"(?i:[\u0370-\u03ff])", r"(?i:[^\u0370-\u03ff])", r"(?ai:[a-z])",
    r"(?i:[\U00010400-\U00010427])", r"(?i:[\wé])", r"(?i:[\x00-\uffff])", r"[\x7f-\x80]", r"[\u07ff\u0800]", r"[\ud700-\ue000]",
    r"[\U0000ffff-\U00010000]", r"[\U0010ffff]", "[一-龥]"]


@pytest.mark.parametrize("pattern", CLASSES)
def test_a_class_holds_the_characters_that_it_holds_in_re(pattern):
    found = re.finditer(f"(?:{pattern})+", EVERY_CHAR)
    assert spells(pattern) == {code for match in found for code in range(*match.span()) if not 0xD800 <= code < 0xE000}
    assert begins_apart(regex.parse(pattern))


def test_every_character_has_the_cases_that_it_has_in_re():
    cased = [char for char in EVERY_CHAR if char.lower() != char or char.upper() != char]
    text = "".join({other for char in cased for other in (char, *char.lower(), *char.upper())} | set(EVERY_CHAR[:128]))
    for char in text:
        same = {ord(other) for other in re.findall(re.escape(char), text, re.IGNORECASE)}
        assert {code for first, last in regex.fold(((ord(char), ord(char)),), False) for code in range(first, last + 1)} == same, char


@pytest.mark.parametrize("name, category", [("L", "L"), ("Lu", "Lu"), ("{Nd}", "Nd"), ("{Letter}", "L"), ("{gc=P}", "P"), ("{Cn}", "Cn"),
("{General_Category=Sm}", "Sm")])
def test_properties_are_general_categories(name, category):
    name = name if name[0] == "{" or len(name) == 1 else f"{{{name}}}"
    inside = {code for code, char in enumerate(EVERY_CHAR) if unicodedata.category(char).startswith(category)} - set(range(0xD800, 0xE000))
    assert spells(rf"\p{name}") == inside
    assert spells(rf"[^\P{name}]") == inside


def test_equal_sets_are_one_object_and_a_set_without_characters_is_never():
    assert regex.parse("[a-cx]") is regex.parse("[xcb-ca]") == regex.parse("(a|b|c|x)")
    assert regex.parse(r"\w") is regex.parse(r"[\w]")
    assert regex.parse(r"[\ud800-\udfff]") == regex.parse(r"[^\s\S]") == NEVER


# -- patterns --

CASES = [  # pattern, texts that match, texts that do not
    (r"", [""], ["a"]),
    (r"(a|b|)c{2}?", ["acc", "cc", "bcc"], ["ac", "c", "abcc"]),
    (r"x{,2}y{2,}z{0}", ["yy", "xyyy", "xxyy"], ["xxxyy", "y", "yyz"]),
    (r"a{,}b{}c{d{1e{2,x", ["b{}c{d{1e{2,x", "aab{}c{d{1e{2,x"], ["b"]),
    (r"a}]b", ["a}]b"], ["ab"]),
    (r"[]a][^]b][a-][-b][a\-c][\]]", ["]a-b-]", "axa-a]"], ["]]a-b]", "]aa-b]"]),
    (r"[\w-.][a-\d]", [".a", "-7", "é-"], [" a", "ab"]),
    (r"(?P<one>a)(?<two>b)(?:c)(?#nothing)d", ["abcd"], ["abc"]),
    (r"[\1\12\101]\377(?<é_1>x)\08", ["\1ÿx\x008", "\nÿx\x008", "Aÿx\x008"], ["1ÿx\x008"]),
    (r"\x41\u00e9\U0001F600\101\0\n\t\cA\/\-\ \é", ["Aé😀A\0\n\t\x01/- é"], ["A"]),
    (r"\u{1F600}|\uD83D\uDE01|[\ud83d\ude02-\ud83d\ude04]", ["😀", "😁", "😂", "😃"], ["😅", "\ufffd"]),
    (r"\N{LATIN SMALL LETTER A WITH ACUTE}[\b\a]", ["á\b", "á\a"], ["áb"]),
    (r"(?i)straße|k", ["STRASSE".replace("SS", "ẞ"), "Straße", "ſtraße", "K", "\u212a"], ["strasse"]),
    (r"(?i:a)b|(?-i:c)", ["Ab", "ab", "c"], ["aB", "C"]),
    (r"(?ix) a b # comment" "\n" r"[ ] \ c", ["ab  c", "AB  C"], ["a b  c", "abc"]),
    (r"(?s).(?-s:.)", ["\na"], ["\n\n"]),
    (r"(?a)\d(?u:\d)", ["1٣"], ["٣1"]),
    (r"^(\w+)$", ["ab"], ["", "a b"]),
    (r"\A(^a|b$|c)\Z|\Ad\z", ["a", "b", "c", "d"], ["ab", ""]),
    (r"x*^y", ["y"], ["xy"]),
    (r"(^|,)a(,|$)", ["a", ",a,", ",a"], ["aa", "a$"]),
    (r"(^a|b)*c", ["c", "abc", "bbc"], ["bac", "aac"]),
    (r"(a|b$){2}", ["aa", "ab"], ["bb", "ba", "b"]),
    (r"(^){3}(a?$)(b|$)", ["", "a"], ["b", "ab"]),
]


@pytest.mark.parametrize("pattern, good, bad", CASES)
def test_what_a_pattern_matches(pattern, good, bad):
    for text in good:
        assert matches(pattern, text), text
    for text in bad:
        assert not matches(pattern, text), text


TOKENS = ["a", "b", ".", r"\w", r"\d", "[^a]", "[ab]", "|", "|", "(", "(", ")", ")", "(?:", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{", "}", "^",
    "$", r"\A", r"\Z",
          "(?i:", "(?i)", "[a-b]", "-", "]", "[", "B", "é", "É", "*?", r"\s", "(?s:", r"\n", "(?x)", " ", "#", r"\x61", r"\141", r"\0", "1"]
TEXTS = ["".join(chars) for n in range(4) for chars in itertools.product("abB\n", repeat=n)] + ["é", "É", "aé1", " ", "a ", "1a", "{", "a{", "-",
    "a-]", "#"]
patterns = st.recursive(
    st.sampled_from(["a", "b", "ab", "", ".", "[ab]", "[^a]", r"\w", "é", "(?i:A)", "^", "$", r"\A", r"\Z"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join), st.tuples(inner, inner).map("(%s|%s)".__mod__), inner.map("(?:{})*".format), inner.map("({})+?".format),
        inner.map("({})?".format), st.tuples(inner, st.sampled_from(["{2}", "{1,3}", "{2,}", "{,2}"])).map("(%s)%s".__mod__)), max_leaves=8)


@given(pattern=st.one_of(patterns, st.lists(st.sampled_from(TOKENS), max_size=9).map("".join)),
       texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=20, unique=True))
@settings(max_examples=1000, deadline=None)
def test_random_patterns_agree_with_re(pattern, texts):
    try:
        theirs = re.compile(pattern)
    except (re.error, OverflowError):
        theirs = None
    try:
        ours = [Rules({"root": regex.parse(pattern, search=search)}, "root") for search in (False, True)]
    except GrammarError as refusal:
        assert theirs is None or refusal.construct in ("possessive repeat",), "re takes it"
        return
    if theirs is None:  # the one thing that ECMA has and re has not, here
        assert re.search(r"\[.*(\\[wds]-|-\\[wds])", pattern)
        return
    for text in texts:
        if "\n" not in text or "$" not in pattern:  # the one thing that means something else
            assert accepts(ours[0], text.encode()) == bool(theirs.fullmatch(text)), text
            assert accepts(ours[1], text.encode()) == bool(theirs.search(text)), text


@given(data=st.data(), pattern=st.sampled_from([
    r"(0|[1-9]\d{0,2})(,\d{3})*(\.\d+)?", r"[a-z]{2,5}(-[a-zé]{1,3}){0,3}", r"(?i)(mon|tues)day|[^\W\d]{3}", r"([01]\d|2[0-3]):[0-5]\d",
    r"(\w+\s?){1,3}\.", r"[^\"\\]{1,12}"]))
@settings(max_examples=200, deadline=None)
def test_texts_near_a_match_agree_with_re(data, pattern):
    text = data.draw(st.from_regex(re.compile(pattern), fullmatch=True).filter(lambda text: text.encode(errors="ignore").decode() == text))
    assert matches(pattern, text)
    at = data.draw(st.integers(0, len(text)))
    near = text[:at] + data.draw(st.sampled_from(["", "a", "7", ",", "é", " ", "\n", "-"])) + text[at + data.draw(st.integers(0, 1)):]
    assert matches(pattern, near) == bool(re.fullmatch(pattern, near))


# -- counts --

@given(counts=st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 5))), min_size=2, max_size=3))
@settings(max_examples=300, deadline=None)
def test_repeats_of_repeats_match_as_often_as_they_should(counts):
    expr, lengths = rules.BYTES[97], {1}
    for low, more in counts:
        high = None if more is None else low + more
        expr = rules.repeat(expr, low, high)
        sums = [{0}]
        for _ in range(40 if high is None else high):
            sums.append({a + b for a in sums[-1] for b in lengths if a + b <= 24})
        lengths = set().union(*sums[low:])
    found = {n for n in range(25) if accepts(Rules({"root": expr}, "root"), b"a" * n)}
    assert found == {n for n in lengths if n <= 24}


def test_a_repeat_is_one_node_however_often():
    assert regex.parse("a{1,100000}") == Repeat(rules.BYTES[97], 1, 100_000)
    assert regex.parse("((a{1,1000}){1,1000}){1,1000}") == Repeat(rules.BYTES[97], 1, 10**9)
    assert regex.parse("(?:(?:a*)*)+") == Repeat(rules.BYTES[97], 0, None)
    assert regex.parse("(a|(?:))*") != EMPTY and regex.parse("(?:){5}") == EMPTY
    assert regex.parse("(?:ab{3}){1,100}") == Repeat(Cat((rules.BYTES[97], Repeat(rules.BYTES[98], 3, 3))), 1, 100)


# -- refusals --

@pytest.mark.parametrize("pattern, construct, position", [
    (r"a(?=b)", "lookahead (?=", 1), (r"a(?!b)", "lookahead (?!", 1), (r"(?<=a)b", "lookbehind (?<=", 0), (r"ab(?<!a)", "lookbehind (?<!", 2),
    (r"(a)\1", r"backreference \1", 3),
    (r"(?P<x>a)(?P=x)", "backreference (?P=", 8), (r"(?<x>a)\k<x>", r"backreference \k", 7), (r"(a)?(?(1)b|c)", "conditional (?(", 4),
    (r"(?>a)", "atomic group (?>", 0), (r"(?R)", "recursion (?R", 0),
    (r"a++", "possessive repeat", 1), (r"a{2}+", "possessive repeat", 1), (r"a\bb", r"\b", 1), (r"\B", r"\B", 0), (r"(?m)^a", "^ under (?m)", 4),
    (r"(?m:a$)", "$ under (?m)", 5),
    (r"[[:alpha:]]", "POSIX class", 1), (r"\p{Script=Greek}", r"\p{Script=Greek}", 0), (r"x\p", r"\p{}", 1), (r"a**", "*", 2), (r"*a", "*", 0),
    (r"^*", "*", 1), (r"a|{2}", "{", 2),
    (r"(a", "(", 0), (r"a)", ")", 1), (r"x[a", "[", 1), (r"[b-a]", "b-a", 1), (r"[]", "[", 0), (r"a{3,2}", "{m,n}", 1),
    (r"a{9999999999}", "{m,n}", 1), (r"a{99999999999}", "{m,n}", 1),
    (r"\q", r"\q", 0), (r"\xg", r"\x", 0), (r"\u12", r"\u", 0), (r"\U00110000", r"\U", 0), (r"a\N{NO SUCH}", r"\N", 1), ("a\\", "\\", 1),
    (r"a(?i)", "(?i)", 1), (r"(?L)", "(?L", 0),
    (r"(?au)", "(?au)", 0), (r"(?i-i:a)", "(?i-i:", 0), (r"(?#a", "(?#", 0), (r"(?y)", "(?y", 0), (r"(?P<1>a)", "(?P<1>", 0),
    (r"a(?P", "(?P", 1), (r"(?P<x", "(?P", 0), (r"(?<x", "(?<", 0), (r"(?", "(?", 0), (r"(?i-", "(?i-", 0), (r"(?iy:a)", "(?iy", 0), (r"(?<>a)", "(?<>", 0),
    (r"(?P<x>a)(?<x>b)", "(?<x>", 8), (r"(?P<=x>a)", "(?P<=x>", 0), (r"(?'x'a)", "(?'", 0),
    (r"a\400", r"\400", 1), (r"[a\777]", r"\777", 2), (r"[\8]", r"\8", 1), (r"()\10", r"backreference \1", 2),
    (r"((ab){400}c){400}", "{m,n}", 12), (r"(ab|c){0,1000000}", "{m,n}", 6), (r"(ab){100001,}", "{m,n}", 4),
    ("(" * 100_000, "(", 64), ("(^|a?)" * 1000, "^ and $", 0)])
def test_a_refusal_names_the_construct_and_its_position(pattern, construct, position):
    with pytest.raises(GrammarError) as refusal:
        regex.parse(pattern)
    assert (refusal.value.construct, refusal.value.path) == (construct, f"position {position}")
    assert construct in str(refusal.value) and len(str(refusal.value)) < 200


@pytest.mark.parametrize("pattern, words", [
    ("(?P", "never closed"), ("(?P<x", "never closed"), ("(?im", "never closed"), ("(?P<1>a)", "begins with no digit"), ("(?i-)", "flags are"),
    ("(?P<x>a)(?P<x>b)", "another group has this name"), (r"\400", r"octal escapes go to \377"), ("(ab|c){0,1000000}", "more than one character go to 100000"),
    ("((ab){400}c){400}", "nested counts"), ("((ab){1000}){1000}", "nested counts")])
def test_a_refusal_says_what_is_wrong(pattern, words):
    with pytest.raises(GrammarError, match=re.escape(words)):
        regex.parse(pattern)


def test_what_matches_nothing_or_is_open_has_no_bound_on_its_count():
    assert regex.parse("(){1000000}") == EMPTY
    assert regex.parse("((?:ab)*){1000000}") == regex.parse("(ab)*")


@given(st.one_of(st.text(), st.text("ab()[]{}|*+?^$.\\-,:=!<>iPuxN09#& \n")))
@settings(max_examples=1000, deadline=None)
def test_rubbish_is_refused_or_held(pattern):
    try:
        compile_rules("regex", pattern)
    except GrammarError as refusal:
        assert refusal.construct and refusal.message


LONG = 2**18


HOSTILE = [
    "(" * 64 + "a?^|b)*" * 64, "(a|" * 64, "(" * 64 + "a*|bc?)*" * 64, "(" * LONG, "[a" * (LONG // 2), "[^" + "a" * (LONG - 3) + "]",
    "{1" * (LONG // 2), "(?#)" * (LONG // 4), "a?^" * (LONG // 3), "(?x)" + " #" * (LONG // 2 - 2), "a{1,9}" * (LONG // 6), r"\w" * 50_000,
    "x" * LONG, "(" * 63 + "a{1,1000}b)" * 63, "".join(f"[{chr(0x100 + i)}{chr(0x3000 + i)}]" for i in range(9_000))]


@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda pattern: pattern[:12])
def test_hostile_patterns_are_done_in_bounded_time(pattern):
    began = time.thread_time()
    try:
        assert depth(compile_rules("regex", pattern).rules["root"], {}) < 6 * rules.MAX_DEPTH, "whoever walks it may recurse"
    except GrammarError as refusal:
        assert len(str(refusal)) < 200
    assert time.thread_time() - began < 20, "seconds; a half is usual"
