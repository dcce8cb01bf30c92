"""Schema: what a user may ask the output to be, turned into rules over bytes.

A user says it in one of several languages; the automaton (grammar.py) knows one, the expressions of rules.py. A front end translates:

    regex        r"\\d{4}-\\d\\d"                                    one rule                          regex.py
    ebnf         root ::= "(" root ")" | ""                         a rule for each name              GBNF, as llama.cpp, XGrammar and SGLang have it
    choice       ["yes", "no", "not sure"]                          one rule: a tree of prefixes      so "n" reads no string twice
    json_object  (nothing)                                          value, object, array, ...         recursion, by name
    reasoning    (nothing)                                          one rule: any text                for what follows a model's thoughts

Names. A *kind* is a front end's name in `GRAMMARS`; a *text* what it is given. A *layout* is how JSON may be spaced: `fixed` is ", " and
": ", as most models write it; `compact` has no blanks; `flexible` allows up to 16 of space, tab, CR and LF between any two tokens. A
layout says nothing about blanks before and after the whole: there are none. Every kind takes `reasoning_end`: its text then begins behind that
closing tag, and before it stands what the model has thought (free_text.py).

Invariants. A front end returns rules whose every reference is defined, or raises GrammarError, which names the construct and its place
(a position in a regex, line and column in EBNF); nothing is accepted and then ignored, and nothing else is raised. Every text means
characters: a class of EBNF or a regex never splits one.

EBNF. A rule reaches to the next `name ::=`, wherever lines end. `"..."`, `[...]`, `.` (any character), groups, `|`, `* + ? {m,n}`,
`#` comments. A repeat applies to a whole string. Left recursion and rules that nobody uses are allowed. A name in front of `(` is a
rule and then a group; if there is no such rule, it is refused as a function (XGrammar's `TagDispatch(...)`, `Token(...)`). Lookahead
`(= ...)`, tokens `<...>` and negation `!` are refused.

Cost. A text of up to MAX_TEXT characters, in a few microseconds each; a grammar of everyday size in less than 0.2 ms.

Where it stops. Whether a grammar matches anything at all (`root ::= root`) is seen by the automaton. `json_object` allows a key twice,
and \\uD800 alone, as JSON's own grammar does. The seam is `GRAMMARS`, by the decorator `grammar`. Sources: RFC 8259; llama.cpp's
grammars/README and XGrammar's (Dong et al. 2024) documentation of EBNF.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from . import regex
from .free_text import ANY, behind
# The expressions are part of this module's face: whoever reads rules finds them here.
from .rules import (ALL, BYTES, EMPTY, MAX_DEPTH, NEVER, Byte, Cat, Expr, GrammarError, Group, Or, Parser, Ranges, Ref, Repeat, Rules,  # noqa: F401
                    alt, cat, chars, complement, literal, repeat, show, tick, union)

MAX_TEXT = 2**20  # characters of a grammar; of a choice, of all its strings
MAX_BLANKS = 16   # in a row, in flexible JSON
MAX_FIGURES = 64  # digits in a row, in a number of JSON: a model that repeats itself comes to an end

GRAMMARS: dict[str, Callable[..., Rules]] = {}


def grammar(kind: str) -> Callable:
    """Registers a front end: a function `(text, *, whitespace, **options) -> Rules` that raises GrammarError for what it cannot hold."""

    def register(front_end):
        GRAMMARS[kind] = front_end
        return front_end

    return register


def rules(kind: str, text: object, *, whitespace: str = "fixed", reasoning_end: str | None = None, **options) -> Rules:
    """What a text of some kind asks for. whitespace: the layout of JSON, "fixed", "compact" or "flexible"; reasoning_end: the closing tag behind
    which the kind's text begins, after any other; options: what this kind has beside. Raises GrammarError."""
    if kind not in list(GRAMMARS):  # a list, for what has no hash is a user's, too
        raise GrammarError(f"unknown kind of grammar {kind!r}; there are {', '.join(GRAMMARS)}", str(kind))
    if whitespace not in list(LAYOUTS):
        raise GrammarError(f"unknown whitespace {whitespace!r}; there are {', '.join(LAYOUTS)}", "whitespace")
    made = GRAMMARS[kind](text, whitespace=whitespace, **options)
    if reasoning_end is None:
        return made
    check_text("reasoning_end", [reasoning_end])
    if not reasoning_end:
        raise GrammarError("reasoning_end: the closing tag of the model's thoughts is empty", "reasoning_end")
    return behind(reasoning_end, made)


def check_text(kind: str, texts: Iterable[object]) -> None:
    """Refuses what is no text, too long, or not to be said in UTF-8."""
    length = 0
    for text in texts:
        tick()
        if not isinstance(text, str):
            raise GrammarError(f"{kind}: expected text, got {type(text).__name__}", kind)
        length += len(text)
        if length > MAX_TEXT:
            raise GrammarError(f"{kind}: more than {MAX_TEXT} characters", kind)
        if not text.isascii() and (lone := re.search("[\ud800-\udfff]", text)):
            raise GrammarError(f"{kind}: half of a surrogate pair at position {lone.start()} is no character", kind, f"position {lone.start()}")


@grammar("reasoning")
def any_rules(text: None = None, *, whitespace: str = "fixed") -> Rules:
    """The output is any text: of a model that thinks first, and may then say what it likes."""
    if text is not None:
        raise GrammarError(f"reasoning: takes no text, got {type(text).__name__}", "reasoning")
    return Rules({"root": ANY}, "root")


@grammar("regex")
def regex_rules(text: str, *, whitespace: str = "fixed") -> Rules:
    """The whole output matches a regular expression."""
    check_text("regex", [text])
    return Rules({"root": regex.parse(text)}, "root")


# -- choice --

@grammar("choice")
def choice_rules(text: Sequence[str], *, whitespace: str = "fixed") -> Rules:
    """The output is one of several strings."""
    if not isinstance(text, (list, tuple)) or not text:
        raise GrammarError("choice: expected a list of one or more strings", "choice")
    check_text("choice", text)
    return Rules({"root": strings(text)}, "root")


def strings(texts: Iterable[str]) -> Expr:
    """One of the texts, by common beginnings: however many there are, a byte leads to one place."""
    return branches(sorted({text.encode() for text in texts}), 0, MAX_DEPTH)


def branches(words: list[bytes], known: int, depth: int) -> Expr:
    """What may follow the first `known` bytes, which all the sorted words share. Below `depth` branchings they are listed one by one."""
    tick()
    if len(words) == 1 or not depth:
        return alt([cat(BYTES[b] for b in word[known:]) for word in words])
    split = known
    while split < len(words[0]) and words[0][split] == words[-1][split]:
        split += 1
    ends = len(words[0]) == split
    below: dict[int, list[bytes]] = {}
    for word in words[ends:]:
        below.setdefault(word[split], []).append(word)
    parts = [EMPTY] * ends + [cat([BYTES[byte], branches(group, split + 1, depth - 1)]) for byte, group in below.items()]
    return cat([*(BYTES[b] for b in words[0][known:split]), alt(parts)])


# -- EBNF --

class Ebnf(Parser):
    """Reads a grammar in GBNF. `uses`: where each rule is referred to first."""

    COUNT = re.compile(r"\{\s*([0-9]*)\s*(,?)\s*([0-9]*)\s*\}", re.ASCII)
    BLANK = re.compile(r"(?:\s++|#[^\n]*+)+", re.ASCII)
    NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*+")
    HEAD = re.compile(rf"({NAME.pattern})\s*+::=", re.ASCII)
    HEADS = re.compile(rf"(?<![A-Za-z0-9_.-]){HEAD.pattern}", re.ASCII)
    DEFINES = re.compile(r":{0,2}=+>?|::?|->|→")  # in place of ::=, in other languages
    OTHER_HEAD = re.compile(rf"{NAME.pattern}\s*+({DEFINES.pattern})", re.ASCII)
    CALLS = {"TagDispatch": "use structural_tag", "TokenTagDispatch": "use structural_tag",  # XGrammar's
             "Token": "a grammar is over text, write that of the token", "ExcludeToken": "a grammar is over text, write what may come"}
    HINTS = {"'": "strings stand in double quotes", ",": "parts stand one after the other, without commas", ";": "a rule ends where the next begins"}
    PLAIN = re.compile(r'[^"\\]+')
    CONTROLS = {"0": 0, "a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27}

    def __init__(self, text: str):
        super().__init__(text.removeprefix("\ufeff"))
        self.uses: dict[str, int] = {}

    def where(self, at: int) -> str:
        """Line and column, from 1."""
        return f"line {self.text.count(chr(10), 0, at) + 1}, column {at - self.text.rfind(chr(10), 0, at)}"

    @cached_property
    def heads(self) -> frozenset[str]:
        """The names of all rules, and whatever looks like one in a string or comment."""
        return frozenset(self.HEADS.findall(self.text))

    def read(self) -> Rules:
        """The whole text."""
        found: dict[str, Expr] = {}
        self.scan(self.BLANK)
        while self.at < len(self.text):
            at, head = self.at, self.scan(self.HEAD)
            if not head:
                if other := self.OTHER_HEAD.match(self.text, at):
                    raise self.refuse(other[1], "::= is meant", other.start(1))
                raise self.refuse(re.split("[ \t\r\n]", self.text[at:at + 40])[0] or self.text[at], "a rule begins with its name and ::=")
            if head[1] in found:
                raise self.refuse(f"rule {head[1]}", "is defined twice", at)
            found[head[1]] = self.body()
        if "root" not in found:
            raise self.refuse("rule root", "is missing: the start of the grammar")
        for name, at in self.uses.items():
            if name not in found:
                raise self.refuse(f"rule {name}", "is used but not defined", at)
        return Rules(found, "root")

    def body(self) -> Expr:
        """What stands behind `::=`, up to the next rule."""
        self.groups = [Group(self.at)]
        self.scan(self.BLANK)
        while self.at < len(self.text) and not self.HEAD.match(self.text, self.at):
            self.element()
            self.scan(self.BLANK)
        if len(self.groups) > 1:
            raise self.refuse("(", "is never closed", self.groups[-1].at)
        return self.close()[0]

    def element(self) -> None:
        """One string, class, name, bracket, bar or quantifier."""
        at, char = self.at, self.text[self.at]
        if found := self.scan(self.NAME):
            name = found[0]
            if (name in self.CALLS or self.peek("(")) and name not in self.heads:
                why = self.CALLS.get(name, "there is no rule of this name, nor are there functions")
                raise self.refuse(f"{name}(...)", f"is not supported: {why}", at)
            self.uses.setdefault(name, at)
            return self.add(Ref(name))
        self.at += 1
        if char == '"':
            text = self.string(at)
            self.add(literal(text), 0 if len(text) == 1 else 1)
        elif char == "[":
            self.add(chars(self.char_class(at)), 0)
        elif char == ".":
            self.add(chars(ALL), 0)
        elif char == "|":
            self.bar()
        elif char == "(":
            self.scan(self.BLANK)
            if self.peek("="):
                raise self.refuse("lookahead (=", "is not supported", at)
            self.open(at)
        elif char == ")":
            if len(self.groups) == 1:
                raise self.refuse(")", "closes no group", at)
            self.add(*self.close())
        elif char in "*+?{":
            self.quantifier(char, at)
        elif char == "<" or (char == "!" and self.peek("<")):
            raise self.refuse(f"token {char.strip('<')}<...>", "is not supported: a grammar is over text, and rules are named without < and >", at)
        elif char == "!":
            raise self.refuse("negation !", "is not supported; of characters it is a class, [^...]", at)
        elif found := self.DEFINES.match(self.text, at):
            raise self.refuse(found[0], "::= is meant" if found[0] != "::=" else "a rule begins with its name and ::=", at)
        else:
            raise self.refuse(char, self.HINTS.get(char, "is not expected here"), at)

    def quantifier(self, char: str, at: int) -> None:
        """Repeats what was read last."""
        self.at = at
        count = self.counts() if char == "{" else {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if count is None:
            raise self.refuse("{", "expected {m}, {m,} or {m,n}", at)
        if not self.groups[-1].parts:
            raise self.refuse(char, "there is nothing to repeat", at)
        self.at += char != "{"
        self.quantify(*count, at)

    def string(self, at: int) -> str:
        """The rest of the string that began at `at`."""
        text = []
        while not self.eat('"'):
            if plain := self.scan(self.PLAIN):
                text.append(plain[0])
            else:
                text.append(chr(self.member('"', at)))
        if lone := re.search("[\ud800-\udfff]", "".join(text)):
            raise self.refuse(f"\\u{ord(lone[0]):04X}", "half of a surrogate pair is no character", at)
        return "".join(text)

    def member(self, opener: str, at: int) -> int:
        """One character of a string or class that began at `at`, or its escape."""
        here = self.at
        tick()
        if here == len(self.text):
            raise self.refuse(opener, "is never closed", at)
        self.at += 1
        if self.text[here] != "\\":
            return ord(self.text[here])
        letter = self.text[self.at:self.at + 1]
        self.at += 1
        code = self.CONTROLS.get(letter, self.code(letter, here))
        if code is None and (not letter or letter.isalnum()):
            raise self.refuse(f"\\{letter}", "is no escape", here)
        return ord(letter) if code is None else code

    def char_class(self, at: int) -> Ranges:
        """The rest of the class that began at `at`."""
        negated, pairs = self.eat("^"), []
        while not self.eat("]"):
            low = high = self.member("[", at)
            if self.peek("-") and not self.text.startswith("]", self.at + 1):
                self.at += 1
                high = self.member("[", at)
                if high < low:
                    raise self.refuse("[", "a range is backwards", at)
            pairs.append((low, high))
        if not pairs and not negated:
            raise self.refuse("[]", "no character is in it", at)
        return complement(union(pairs)) if negated else union(pairs)


@grammar("ebnf")
def ebnf_rules(text: str, *, whitespace: str = "fixed") -> Rules:
    """The output is what rule `root` of a grammar stands for."""
    check_text("ebnf", [text])
    return Ebnf(text).read()


# -- JSON --

@dataclass(frozen=True)
class Layout:
    """How JSON is spaced: what separates elements, and a key from its value; `pad` is what may stand inside of brackets."""
    comma: Expr
    colon: Expr
    pad: Expr


BLANKS = repeat(chars(union((ord(c), ord(c)) for c in " \t\r\n")), 0, MAX_BLANKS)
LAYOUTS = {
    "fixed": Layout(literal(", "), literal(": "), EMPTY),
    "compact": Layout(literal(","), literal(":"), EMPTY),
    "flexible": Layout(cat([BLANKS, literal(","), BLANKS]), cat([BLANKS, literal(":"), BLANKS]), BLANKS),
}


def json_rules(layout: Layout) -> dict[str, Expr]:
    """Any JSON: the rules json.value, json.object, json.array, json.string, json.number."""
    digit = chars(((48, 57),))
    digits, escape = repeat(digit, 1, MAX_FIGURES), union((ord(c), ord(c)) for c in '"\\/bfnrt')
    hexadecimal = chars(((48, 57), (65, 70), (97, 102)))
    plain = chars(complement(((0, 31), (34, 34), (92, 92))))
    escaped = cat([literal("\\"), alt([chars(escape), cat([literal("u"), repeat(hexadecimal, 4, 4)])])])
    whole = alt([literal("0"), cat([chars(((49, 57),)), repeat(digit, 0, MAX_FIGURES - 1)])])
    sign, exponent = chars(((43, 43), (45, 45))), chars(((69, 69), (101, 101)))
    value = Ref("json.value")
    return {
        "json.value": alt([*(Ref(f"json.{name}") for name in ("object", "array", "string", "number")), *map(literal, ("true", "false", "null"))]),
        "json.object": enclosed("{", cat([Ref("json.string"), layout.colon, value]), "}", layout),
        "json.array": enclosed("[", value, "]", layout),
        "json.string": cat([literal('"'), repeat(alt([plain, escaped]), 0, None), literal('"')]),
        "json.number": cat([repeat(literal("-"), 0, 1), whole, repeat(cat([literal("."), digits]), 0, 1),
                            repeat(cat([exponent, repeat(sign, 0, 1), digits]), 0, 1)]),
    }


def enclosed(opener: str, item: Expr, closer: str, layout: Layout) -> Expr:
    """Any number of items in brackets."""
    items = cat([item, repeat(cat([layout.comma, item]), 0, None), layout.pad])
    return cat([literal(opener), layout.pad, repeat(items, 0, 1), literal(closer)])


@grammar("json_object")
def json_object_rules(text: bool | None = None, *, whitespace: str = "fixed") -> Rules:
    """The output is a JSON object. The text says nothing: None or a bool."""
    if text is not None and not isinstance(text, bool):
        raise GrammarError(f"json_object: takes no text, got {type(text).__name__}", "json_object")
    return Rules(json_rules(LAYOUTS[whitespace]), "json.object")


# -- demo --

DEMO = [
    ("regex", r"(0|[1-9]\d{0,2})(\.[0-9]{1,100000})?"),
    ("choice", ["yes", "no", "not sure", "none"]),
    ("ebnf", 'root ::= call ("; " call)*   # statements\ncall ::= name "(" (arg ("," arg)*)? ")"\narg  ::= call | [0-9]+\nname ::= [a-z]{1,8}'),
    ("json_object", None),
    ("regex", r"(\w+) \1"),
    ("ebnf", 'root ::= "a" (b\n'),
    ("ebnf", 'root ::= greeting\n  | "bye" [z-a]\n'),
]

if __name__ == "__main__":
    for kind, text in DEMO:
        print(f"{kind} {text if text is not None else ''}".rstrip())
        try:
            for name, expr in rules(kind, text).rules.items():
                line = show(expr)
                print(f"    {name:<12} {line if len(line) < 120 else line[:117] + '...'}")
        except GrammarError as error:
            print(f"    refused: {error}")
