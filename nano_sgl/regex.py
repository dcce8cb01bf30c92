"""Regex: a regular expression, as people write it for Python's `re`, JSON schema or SGLang, turned into rules over bytes.

The whole text must match. What looks simple has three depths: characters are Unicode and the automaton knows bytes; `\\w` is 734
ranges; and an anchor in the middle asks what surrounds it, which an expression over bytes cannot. For `(a|^)b$|c?`:

      read (a stack of groups, no recursion)        fix the anchors: ^ holds where nothing came before, $ where nothing follows
      Or(Cat(Or(a, ^), b, $), c?)            ->     Or(Cat(Or(a, EMPTY), b), c?)

Names. An *anchor* is a `Ref` to "^" or "$" until `fix` has decided it. `start` and `end` say whether nothing lies before, or after,
the expression at hand; under them every anchor is either EMPTY or NEVER. A *set* is the ranges of a class. *Fold*: the characters
that are the same without regard to case.

Anchors, exactly. In a Cat, the first part that is not empty decides: those before it must match nothing, it stands at the start, and
nothing after it does; likewise from the end. So `fix` tries each part that holds an anchor as the first, and as the last, and leaves
out what a weaker choice covers. A repeat is its first turn, the middle ones, its last. `x*^y` becomes y, `x^y` becomes NEVER.

What is meant is what `re.fullmatch` means, on str: `\\d \\w \\s` and case are Unicode's, taken from Python itself, once. Beyond `re`:
`\\p{L}`, `\\cX`, `\\u{H}`, `\\uD83D\\uDE00`, `(?<name>...)` and `[\\w-.]` are what ECMA 262 has, the last one in its Annex B. Lazy marks
change nothing, for a text matches or does not. Refused by name, with the position: lookaround, backreferences, conditionals, atomic
groups and possessive repeats, `\\b`, `^` and `$` under (?m), scripts in `\\p`, POSIX classes. `$` is the end, as in ECMA: `re` would let
a last newline follow.

Cost. A few microseconds a character. The first `\\w` costs 25 ms, the first (?i) 15 ms, the first `\\p` 80 ms; then they are known.
Where it stops: what MAX_DEPTH and MAX_COUNTERS of rules.py bound. Source: Python's library reference, `re`; ECMA 262, section 22.2.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache

from .rules import (ALL, EMPTY, LAST_CHAR, NEVER, Byte, Cat, Expr, GrammarError, Or, Parser, Ranges, Ref, Repeat, alt, cat, chars, clip, complement,
                    repeat, show, tick, union)

START, END = Ref("^"), Ref("$")
ASSIGNED = 0x40000  # beyond are no digits, letters and blanks
CONTROLS = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
CATEGORIES = {"letter": "L", "mark": "M", "number": "N", "punctuation": "P", "symbol": "S", "separator": "Z", "other": "C"}
GROUPS = {"(?=": "lookahead (?=", "(?!": "lookahead (?!", "(?<=": "lookbehind (?<=", "(?<!": "lookbehind (?<!", "(?>": "atomic group (?>",
          "(?(": "conditional (?(", "(?P=": "backreference (?P=", "(?P>": "recursion (?P>", "(?R": "recursion (?R", "(?&": "recursion (?&"}


def parse(text: str, *, search: bool = False) -> Expr:
    """What the whole of a text must be to match; search: what it must be to hold a match somewhere, as JSON schema's `pattern` means it.
    Without a `Ref`. Raises GrammarError."""
    parser = Regex(text)
    expr = parser.read()
    if search:
        anything = repeat(chars(ALL), 0, None)
        expr = cat([anything, expr, anything])
    return Anchors(parser).fix(expr, True, True) if parser.anchored else expr


# -- sets of characters --

@lru_cache(maxsize=1)
def alphabet() -> str:
    """All characters that are asked for their kind."""
    return "".join(map(chr, range(ASSIGNED)))


@lru_cache
def perl_set(letter: str, ascii_only: bool) -> Ranges:
    """`d`, `w` or `s` as Python's `re` has it."""
    kind = re.compile(rf"\{letter}+", re.ASCII if ascii_only else 0)
    return tuple((found.start(), found.end() - 1) for found in kind.finditer(alphabet()))


@lru_cache(maxsize=1)
def categories() -> dict[str, Ranges]:
    """Unicode's general categories: `Lu`, and `L` for all that begin so."""
    found: dict[str, list[tuple[int, int]]] = {}
    first = 0
    for name, run in itertools.groupby(map(unicodedata.category, map(chr, range(LAST_CHAR + 1)))):
        past = first + sum(1 for _ in run)
        for key in (name, name[0]):
            found.setdefault(key, []).append((first, past - 1))
        first = past
    return {name: union(pairs) for name, pairs in found.items()}


@lru_cache(maxsize=1)
def folds() -> list[tuple[int, ...]]:
    """Characters that `re` takes for the same without regard to case, where there are several: lower case is the same, or the upper case of that."""
    same: dict[str, list[int]] = {}
    for block in range(0, ASSIGNED, 256):
        text = alphabet()[block:block + 256]
        if text.lower() != text or text.upper() != text:
            for char in text:
                same.setdefault(char.lower()[0].upper(), []).append(ord(char))
    return [tuple(group) for group in same.values() if len(group) > 1]


@lru_cache(maxsize=128)
def fold(ranges: Ranges, ascii_only: bool) -> Ranges:
    """The ranges and whatever differs from them in case only."""
    if ascii_only:
        upper, lower = clip(ranges, 65, 90), clip(ranges, 97, 122)
        return union([*ranges, *((first + 32, last + 32) for first, last in upper), *((first - 32, last - 32) for first, last in lower)])
    held = {code for group in folds() for code in group}
    inside = {code for first, last in ranges for code in (held if last - first > len(held) else range(first, last + 1)) if first <= code <= last}
    return union([*ranges, *((code, code) for group in folds() if not inside.isdisjoint(group) for code in group)])


# -- reading --

class Regex(Parser):
    """Reads a regular expression. `flags`: those of a, i, m, s, x that are on; `after`: what was read last ("" for nothing that can be repeated);
    `anchored`: an anchor was met."""

    FLAGS = re.compile(r"\(\?([aiLmsux]*)(?:-([imsx]+))?([:)])")
    NAMED, BEGUN = re.compile(r"\(\?(?:P<|<(?![=!]))([^>]*)>"), re.compile(r"\(\?(?:P?(?:<[^>]*)?|[A-Za-z]*-?[A-Za-z]*)\Z")
    KIND = re.compile(r"\(\?(?:[A-Za-z-]+|.?)", re.DOTALL)
    OCTAL, THREE = re.compile(r"[0-7]{1,3}"), re.compile(r"[0-7]{3}")
    PROPERTY = re.compile(r"\{([^{}]*)\}|([A-Z])")
    PLAIN = re.compile(r"[A-Za-z0-9_ :;,/@<>=-]+(?![*+?{])")
    MARKS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    POSIX = re.compile(r"\[:\^?[a-z]+:\]")
    COMMENT = re.compile(r"[ \t\n\r\f\v]|#[^\n]*")
    CONTROL, CHARACTER_NAME = re.compile("[a-zA-Z]"), re.compile(r"\{([^{}]*)\}")

    def __init__(self, text: str):
        super().__init__(text)
        self.flags: frozenset[str] = frozenset()
        self.names: set[str] = set()
        self.after, self.anchored = "", False

    def read(self) -> Expr:
        """The whole text; anchors are still in it."""
        while self.at < len(self.text):
            at, char = self.at, self.text[self.at]
            self.at += 1
            tick()
            if "x" in self.flags and self.COMMENT.match(char):
                self.at = at
                self.scan(self.COMMENT)
            elif (count := self.quantifier(char, at)) is not None:
                self.repeat(*count, at)
            else:
                getattr(self, self.ACTIONS.get(char, "take"))(char, at)
        if len(self.groups) > 1:
            raise self.refuse("(", "is never closed", self.groups[-1].at)
        return self.close()[0]

    ACTIONS = {"\\": "take_escape", "[": "take_set", ".": "take_dot", "(": "take_open", ")": "take_close", "|": "take_bar",
               "^": "take_anchor", "$": "take_anchor"}

    def take(self, char: str, at: int) -> None:
        """A character that stands for itself, and those behind it that do and are not repeated."""
        run = None if self.flags else self.PLAIN.match(self.text, at)
        self.at = run.end() if run else self.at
        for one in run[0] if run else char:
            self.add_set(self.folded([(ord(one), ord(one))]) if "i" in self.flags else ((ord(one), ord(one)),))

    def take_dot(self, char: str, at: int) -> None:
        """`.`: anything but a newline."""
        self.add_set(ALL if "s" in self.flags else complement(((10, 10),)))

    def add_set(self, ranges: Ranges) -> None:
        """One character out of the ranges."""
        self.add(chars(ranges), 0)
        self.after = "character"

    def folded(self, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """Characters that were named, and under (?i) all that differ from them in case only. As in `re`, \\w and the like are not extended so."""
        return fold(union(pairs), "a" in self.flags) if "i" in self.flags else union(pairs)

    def take_bar(self, char: str, at: int) -> None:
        """`|`"""
        self.bar()
        self.after = ""

    def take_anchor(self, char: str, at: int) -> None:
        """`^` and `$`"""
        if "m" in self.flags:
            raise self.refuse(f"{char} under (?m)", "lines within the text are not followed; without the flag it is the text's own begin or end", at)
        self.add(START if char == "^" else END)
        self.after, self.anchored = "", True

    def quantifier(self, char: str, at: int) -> tuple[int, int | None] | None:
        """The counts of a quantifier that begins with a character."""
        if char == "{":
            self.at = at
            count = self.counts()
            self.at = self.at if count else at + 1
            return count
        return self.MARKS.get(char)

    def repeat(self, low: int, high: int | None, at: int) -> None:
        """Repeats what was read last."""
        mark = self.text[at]
        if self.after in ("", "repeat"):
            raise self.refuse(mark, "there is nothing to repeat" if not self.after else "repeats a repeat: put a group around that", at)
        if self.eat("+"):
            raise self.refuse("possessive repeat", "it may refuse what it would match; leave out the last +", at)
        self.eat("?")  # lazy: another order of trying, the same texts
        self.quantify(low, high, at)
        self.after = "repeat"

    # -- groups --

    def take_open(self, char: str, at: int) -> None:
        """`(` and all that may follow it."""
        outer, self.at = self.flags, at
        if not self.peek("(?"):
            self.at += 1
        elif self.peek("(?#"):
            self.at = self.text.find(")", at) + 1
            if not self.at:
                raise self.refuse("(?#", "is never closed", at)
            return
        elif found := self.scan(self.FLAGS):
            self.flags = self.switched(found, at)
            if found[3] == ")":
                return
        elif found := self.scan(self.NAMED):
            if not found[1].isidentifier():
                raise self.refuse(found[0], "the name of a group is letters, digits and _, and begins with no digit", at)
            if found[1] in self.names:
                raise self.refuse(found[0], "another group has this name", at)
            self.names.add(found[1])
        else:
            name = next((GROUPS[text] for length in (4, 3) if (text := self.text[at:at + length]) in GROUPS), None)
            kind = name or self.KIND.match(self.text, at)[0]
            why = "is no kind of group" + "; flags are a, i, m, s, u, x" * kind[2:3].isalpha()
            why = "is not supported" if name else "is never closed" if self.BEGUN.match(self.text, at) else why
            raise self.refuse(kind, why, at)
        self.open(at, outer)
        self.after = ""

    def switched(self, found: re.Match, at: int) -> frozenset[str]:
        """The flags after `(?i)` or within `(?i-s:...)`."""
        on, off, end = found.groups()
        if "L" in on:
            raise self.refuse("(?L", "locales are for bytes", at)
        first = len(self.groups) == 1 and not self.groups[0].parts and not self.groups[0].branches
        if end == ")" and (off or not on or not first):
            raise self.refuse(found[0], "flags for the whole pattern stand at its start; for a part write (?i:...)", at)
        if set(on) & set(off or "") or {"a", "u"} <= set(on):
            raise self.refuse(found[0], "contradicts itself", at)
        flags = self.flags | set(on) - {"u"}
        return frozenset(flags - set(off or "") - ({"a"} if "u" in on else set()))

    def take_close(self, char: str, at: int) -> None:
        """`)`"""
        if len(self.groups) == 1:
            raise self.refuse(")", "closes no group", at)
        self.flags = self.groups[-1].flags
        self.add(*self.close())
        self.after = "group"

    # -- escapes and classes --

    def take_escape(self, char: str, at: int) -> None:
        """`\\` outside of a class."""
        letter = self.text[self.at:self.at + 1]
        if letter in ("A", "Z", "z"):
            self.at += 1
            self.add(START if letter == "A" else END)
            self.after, self.anchored = "", True
        elif letter in ("b", "B"):
            raise self.refuse(f"\\{letter}", "word boundaries are not supported", at)
        elif letter == "k" or (letter in "123456789" and letter and not self.THREE.match(self.text, self.at)):
            raise self.refuse(f"backreference \\{letter}", "is not supported", at)
        else:
            found = self.escape(at)
            self.add_set(self.folded([(found, found)]) if isinstance(found, int) else found)

    def escape(self, at: int) -> int | Ranges:
        """What an escape stands for, in a class or outside: a code point or a set. at: its backslash; goes past it."""
        self.at = at + 1
        if self.at == len(self.text):
            raise self.refuse("\\", "stands at the end", at)
        octal = self.scan(self.OCTAL)
        if octal and int(octal[0], 8) > 255:
            raise self.refuse(f"\\{octal[0]}", "octal escapes go to \\377: write \\u and four hexadecimal digits", at)
        if octal:
            return int(octal[0], 8)
        letter = self.text[self.at]
        self.at += 1
        if letter in CONTROLS:
            return CONTROLS[letter]
        if letter in "dwsDWS":
            ranges = perl_set(letter.lower(), "a" in self.flags)
            return complement(ranges) if letter.isupper() else ranges
        if letter in "pP":
            ranges = self.property(at)
            return complement(ranges) if letter == "P" else ranges
        if letter == "c" and (control := self.scan(self.CONTROL)):
            return ord(control[0]) & 31
        if letter == "N" and (name := self.scan(self.CHARACTER_NAME)):
            try:
                return ord(unicodedata.lookup(name[1]))
            except (KeyError, TypeError):  # a sequence of several characters has a name, too
                raise self.refuse("\\N", f"no character is called {name[1][:40]!r}", at) from None
        code = self.code(letter, at)
        if code is None and letter.isascii() and letter.isalnum():
            raise self.refuse(f"\\{letter}", "is no escape", at)
        return ord(letter) if code is None else code

    def property(self, at: int) -> Ranges:
        """The set of `\\p{...}`: a general category."""
        found = self.scan(self.PROPERTY)
        name = (found[1] or found[2] or "") if found else ""
        special = {"Any": ALL, "ASCII": ((0, 127),)}.get(name)
        value = re.sub(r"^(gc|General_Category)=", "", name)
        ranges = special or categories().get(CATEGORIES.get(value.lower(), value))
        if ranges is None:
            raise self.refuse(f"\\p{{{name}}}", "only general categories are supported, like \\p{L}, \\p{Lu}, \\p{Letter}", at)
        return self.folded(ranges)

    def take_set(self, char: str, at: int) -> None:
        """`[...]`. A hyphen next to a class such as \\w is a hyphen, as in ECMA."""
        negated, first = self.eat("^"), self.at
        pairs: list[tuple[int, int]] = []
        sets: dict[str, Ranges] = {}  # by how they are spelled: a thousand times \w is held once
        while not self.peek("]") or self.at == first:
            begin, low = self.at, self.member(at)
            if not isinstance(low, int):
                sets[self.text[begin:self.at]] = low
            elif not self.peek("-") or self.text.startswith("]", self.at + 1):
                pairs.append((low, low))
            else:
                self.at += 1
                middle, high = self.at, self.member(at)
                if not isinstance(high, int):
                    pairs.extend([(low, low), (45, 45)])
                    sets[self.text[middle:self.at]] = high
                elif high < low:
                    raise self.refuse(self.text[begin:self.at], "the range is backwards", begin)
                else:
                    pairs.append((low, high))
        self.at += 1
        ranges = union(itertools.chain(self.folded(pairs), *sets.values()))
        self.add_set(complement(ranges) if negated else ranges)

    def member(self, at: int) -> int | Ranges:
        """One element of the class that begins at `at`."""
        here = self.at
        tick()
        if here == len(self.text):
            raise self.refuse("[", "is never closed", at)
        if self.POSIX.match(self.text, here):
            raise self.refuse("POSIX class", "write \\d, \\p{L} or a range", here)
        self.at += 1
        if self.text[here] != "\\":
            return ord(self.text[here])
        if self.eat("b"):
            return 8
        return self.escape(here)


# -- anchors --

class Anchors:
    """Decides the anchors of an expression. Holds what is known of its nodes, by identity."""

    def __init__(self, parser: Regex):
        self.parser = parser
        self.held: dict[int, bool] = {}
        self.empties: dict[tuple[int, bool, bool], tuple[Expr, bool]] = {}  # an expression is kept with what is known: its id stays its own
        self.fixed: dict[tuple[int, bool, bool], tuple[Expr, Expr]] = {}

    def holds(self, expr: Expr) -> bool:
        """Is there an anchor in it?"""
        if isinstance(expr, (Byte, Ref)):
            return isinstance(expr, Ref)
        if id(expr) not in self.held:
            self.held[id(expr)] = self.holds(expr.item) if isinstance(expr, Repeat) else any([self.holds(part) for part in expr.parts])
        return self.held[id(expr)]

    def empty(self, expr: Expr, start: bool, end: bool) -> bool:
        """May it match nothing? start, end: is it known that nothing lies before, and after?"""
        if isinstance(expr, (Byte, Ref)):
            return expr == START and start or expr == END and end
        key = id(expr), start, end
        if key not in self.empties:
            if isinstance(expr, Repeat):
                value = expr.low == 0 or self.empty(expr.item, start, end)
            else:
                value = (all if isinstance(expr, Cat) else any)([self.empty(part, start, end) for part in expr.parts])
            self.empties[key] = expr, value
        return self.empties[key][1]

    def fix(self, expr: Expr, start: bool, end: bool) -> Expr:
        """The expression without anchors. Less is known, fewer texts match: so what another branch covers may be left out."""
        if not self.holds(expr):
            return expr
        key = id(expr), start, end
        if key not in self.fixed:
            if isinstance(expr, Ref):
                done = EMPTY if self.empty(expr, start, end) else NEVER
            elif isinstance(expr, Or):
                done = alt([self.fix(part, start, end) for part in expr.parts])
            else:
                branches = list(self.turns(expr, start, end) if isinstance(expr, Repeat) else self.spans(expr, start, end))
                if self.empty(expr, start, end) and not any(self.empty(branch, False, False) for branch in branches):
                    branches.append(EMPTY)
                done = alt(branches)
            self.fixed[key] = expr, done
        return self.fixed[key][1]

    def spans(self, expr: Cat, start: bool, end: bool) -> Iterator[Expr]:
        """A Cat by the first and the last part that are not empty, as far as they make a difference."""
        parts, last = expr.parts, len(expr.parts) - 1
        firsts, lasts = [0], [last]
        for i in range(1, last + 1 if start else 0):
            if not self.empty(parts[i - 1], True, False):
                break
            firsts += [i] * self.holds(parts[i])
        for i in range(last - 1, -1 if end else last, -1):
            if not self.empty(parts[i + 1], False, True):
                break
            lasts += [i] * self.holds(parts[i])
        if len(firsts) * len(lasts) * len(parts) > 100_000:
            raise self.parser.refuse("^ and $", "too many of them stand among parts that may be empty", 0)
        for i in firsts:
            for j in lasts:
                if i <= j:
                    yield cat([self.fix(parts[k], start and k == i, end and k == j) for k in range(i, j + 1)])

    def turns(self, expr: Repeat, start: bool, end: bool) -> Iterator[Expr]:
        """A Repeat by its first turn, those between, and its last. Turns that match nothing fill up the lower count."""
        item = expr.item
        first, middle, last = self.fix(item, start, False), self.fix(item, False, False), self.fix(item, False, end)
        low = 0 if self.empty(item, start, False) or self.empty(item, False, end) else expr.low
        less = [(max(low - n, 0), None if expr.high is None else expr.high - n) for n in range(3)]
        if not start and not end:
            yield repeat(middle, *less[0])
        elif not end:
            yield cat([first, repeat(middle, *less[1])])
        elif not start:
            yield cat([repeat(middle, *less[1]), last])
        else:
            if low <= 1:
                yield self.fix(item, True, True)
            if expr.high is None or expr.high > 1:
                yield cat([first, repeat(middle, *less[2]), last])


if __name__ == "__main__":
    for pattern in (r"(?a:0|[1-9]\d{0,2})(,(?a:\d){3})*", r"^(low|high)$", r"(a|^)b$|c?", r"x*^y", r"x^y", r"(?i)straße?",
                    r"[a-z]{1,8}(-[a-z]{1,8}){0,3}", r"(.*)\1", r"a(?!b)"):
        try:
            print(f"{pattern:>36}  {show(parse(pattern))[:108]}")
        except GrammarError as error:
            print(f"{pattern:>36}  refused: {error}")
