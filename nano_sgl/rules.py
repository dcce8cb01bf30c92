"""Rules: what every grammar is turned into, expressions over bytes, and the means to build them.

A model emits tokens, a token is bytes, and it may end anywhere: inside a word, inside a character. So a grammar is held in bytes, and
a character is only a small expression of them. `é|[あ-ん]`:

      Or --+-- Cat -- Byte{C3} -- Byte{A9}                                           é
           +-- Cat -- Byte{E3} -- Or --+-- Cat -- Byte{81} -- Byte{82..BF}           あ to み
                                       +-- Cat -- Byte{82} -- Byte{80..93}           む to ん

Names. An *expression* is one of six things: `Byte` (a set of bytes, as a mask), `Cat` (one after the other), `Or`, `Repeat` (with its
counts: a{1,100000} is one node, nothing is unrolled), `But` (any text but some words) and `Ref` (a rule, by name). *Rules* are named
expressions and a start. *Ranges* are sets of code points: sorted pairs (first, last), merged. A `Parser` reads a text of the user's from
left to right and builds an expression on a stack of open groups, so that a thousand open brackets are a refusal and not the end of Python's
own stack.

Invariants. `chars` spells a set so that alternatives begin with different bytes, and equal sets get the same object: the automaton
interns what it has seen. Surrogates are no characters, so no expression spells one. `cat`, `alt` and `repeat` keep small: no Cat
directly in a Cat, none of one part, no NEVER but as a whole. x{a,b}{c,d} becomes one repeat wherever that is the same.

Counts. The automaton counts the innermost repeat of a character for free. Any count around that is a part of its states, and where
counted things nest and are ambiguous, a state may hold every combination: so the product of the counts around a character is bounded
by MAX_COUNTERS. Recursion through a `Ref` multiplies without a number; there the automaton's own bound has to do.

Cost. An expression has about as many nodes as its text has characters, apart from its sets, which are shared: whoever walks one remembers
nodes by identity. It is about 3 MAX_DEPTH deep at most. Both parsers take one to four microseconds a character.

Where it stops. There is no complement and no intersection: they belong to automata. UTF-8's ranges follow the scheme that is known
from RE2 (Cox 2010), found here by dividing by 64.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

MAX_DEPTH = 64             # groups in groups: whoever walks an expression may recurse
MAX_COUNT = 2**31 - 1      # of one repeat: the device counts down in an int32
INF = MAX_COUNT                 # in place of a count: without bound
MAX_COUNTERS = 100_000     # combinations of counts that are alive around a character
YIELD_S = 0.002            # between the moments at which a compilation lets go of its lock
LAST_CHAR = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


# -- expressions --

class Byte(NamedTuple):
    """One byte out of a set. mask: bit b is set for byte b; never 0."""
    mask: int


class Tree:
    """An expression with others in it: it remembers its hash, which is that of all below. It never changes, though nothing forbids it: that takes
    time."""
    __slots__ = ("_hash",)

    def hash(self) -> int:
        """As Python's own."""
        found = getattr(self, "_hash", None)
        if found is None:
            found = hash((Repeat, self.item, self.low, self.high) if type(self) is Repeat else (But, self.item, self.words) if type(self) is But else
                         (type(self), self.parts))
            self._hash = found
        return found


@dataclass(slots=True)
class Cat(Tree):
    """All parts, one after the other; without parts the empty text."""
    parts: tuple[Expr, ...]
    __hash__ = Tree.hash


@dataclass(slots=True)
class Or(Tree):
    """One of the parts; without parts nothing at all."""
    parts: tuple[Expr, ...]
    __hash__ = Tree.hash


@dataclass(slots=True)
class Repeat(Tree):
    """`low` to `high` times the item, None: any number."""
    item: Expr
    low: int
    high: int | None
    __hash__ = Tree.hash


@dataclass(slots=True)
class But(Tree):
    """Any number of the item, which needs no stack, but none of the words, ascending: each is spelled in one way, by bytes that are an item
    themselves. Of a thousand words it is one object: what may follow their beginnings is found when a text gets there (nodes.py)."""
    item: Expr
    words: tuple[bytes, ...]
    __hash__ = Tree.hash


class Ref(NamedTuple):
    """A rule of the grammar, by name."""
    name: str


Expr = Byte | Cat | Or | Repeat | But | Ref
EMPTY, NEVER = Cat(()), Or(())
NESTED = frozenset((Cat, Or))  # kinds that `cat` looks into
BYTES = [Byte(1 << b) for b in range(256)]


@dataclass(frozen=True)
class Rules:
    """A grammar: what each name stands for, and where to begin. Every name that is referred to is there.

    Of a model that thinks first (free_text.py): `thinking` names the rule that comes behind its thoughts, and waits on the stack as long as these
    last; `closing` the rule that closes them and goes on with it, for whoever has thought enough."""
    rules: dict[str, Expr]
    start: str
    closing: str | None = None
    thinking: str | None = None


class GrammarError(ValueError):
    """A grammar that is refused: what of it (`construct`: a keyword, a regex construct, a rule), and where (`path`: a JSON pointer, or a place in the
    text)."""

    def __init__(self, message: str, construct: str, path: str = ""):
        super().__init__(message)
        self.message, self.construct, self.path = message, construct, path


class Clock(threading.local):
    """How long this thread may still compile, the event that says that nobody wants it any more, and the lock that it lets go of now and then."""
    deadline, unwanted, lock, yielded = float("inf"), None, None, 0.0


CLOCK, TICKS = Clock(), itertools.count()


class time_limit:  # noqa: N801 (it is used as a function)
    """Within, `tick` raises GrammarError after `deadline` (time.monotonic; None: never) or once `unwanted` is set, and lets others have `lock`, which
    this thread holds once."""

    def __init__(self, deadline: float | None, lock: threading.RLock | None = None, unwanted: threading.Event | None = None):
        self.deadline, self.lock, self.unwanted = float("inf") if deadline is None else deadline, lock, unwanted

    def __enter__(self) -> None:
        self.before = CLOCK.deadline, CLOCK.lock, CLOCK.unwanted
        CLOCK.deadline, CLOCK.lock = min(CLOCK.deadline, self.deadline), self.lock
        CLOCK.unwanted = self.unwanted or CLOCK.unwanted

    def __exit__(self, *error: object) -> None:
        CLOCK.deadline, CLOCK.lock, CLOCK.unwanted = self.before


def tick() -> None:
    """A step of something that may be long. Called where nothing is half done."""
    if not next(TICKS) & 255:
        pause()


def pause() -> None:
    """What `tick` does, now and then."""
    now = time.monotonic()
    if now > CLOCK.deadline:
        raise GrammarError("the grammar takes too long", "grammar")
    if CLOCK.unwanted is not None and CLOCK.unwanted.is_set():
        raise GrammarError("nobody waits for the grammar any more", "grammar")
    if CLOCK.lock is not None and now - CLOCK.yielded > YIELD_S:
        CLOCK.lock.release()
        try:
            time.sleep(1e-6)                        # who waits gets it: a lock that is taken again at once goes to nobody else
        finally:
            CLOCK.lock.acquire()
            CLOCK.yielded = time.monotonic()


def cat(parts: Iterable[Expr]) -> Expr:
    """All parts, one after the other."""
    parts = tuple(parts)
    if not NESTED.isdisjoint(map(type, parts)):
        flat: list[Expr] = []
        for part in parts:
            kind = type(part)
            if kind is Cat:
                flat += part.parts
            elif kind is Or and not part.parts:
                return NEVER
            else:
                flat.append(part)
        parts = tuple(flat)
    return parts[0] if len(parts) == 1 else Cat(parts)


def alt(parts: Iterable[Expr]) -> Expr:
    """One of the parts. Single bytes become one set."""
    mask, others, last = 0, [], None
    for part in parts:
        kind = type(part)
        if kind is Byte:
            mask |= part.mask
            last = part
        elif kind is not Or or part.parts:
            others.append(part)
    if mask:
        others.insert(0, last if last.mask == mask else Byte(mask))
    return others[0] if len(others) == 1 else Or(tuple(others))


def repeat(item: Expr, low: int, high: int | None) -> Expr:
    """`low` to `high` times the item. A repeat of a repeat is one, if its counts leave no gap: (x{a,b}){c,d} = x{ac,bd}. Raises GrammarError for
    counts above MAX_COUNT."""
    if max(low, high or 0) > MAX_COUNT:
        raise GrammarError(f"a count of {max(low, high or 0)}: counts go to {MAX_COUNT}", "count")
    if high == 0 or item == EMPTY or (item == NEVER and low == 0):
        return EMPTY
    if item == NEVER or (low == 1 and high == 1):
        return item
    if isinstance(item, Repeat):
        least = item.low * low
        most = None if high is None or item.high is None else item.high * high
        # From n to n + 1 items nothing is left out if n * item.high + 1 reaches (n + 1) * item.low; if so at the least n, then at all.
        closed = low == high or (item.high is None and low > 0) or low * (item.high or 0) + 1 >= (low + 1) * item.low
        if closed and max(least, most or 0) <= MAX_COUNT:
            return Repeat(item.item, least, most)
    return Repeat(item, low, high)


def literal(text: str) -> Expr:
    """The text itself, in UTF-8."""
    return cat([BYTES[b] for b in text.encode()])


def productive(rules: dict[str, Expr], known: set[str]) -> bool:
    """Does the rule `root` match anything? known: those that do, and are told so."""
    begun, path, missing = {"root"}, ["root"], []

    def ends(expr: Expr) -> bool:
        kind = type(expr)
        if kind is Ref:
            if expr.name not in known:
                missing.append(expr.name)
            return expr.name in known
        if kind is Repeat:
            return expr.low == 0 or ends(expr.item)
        if kind is Or:
            return any(map(ends, expr.parts))
        for part in expr.parts if kind is Cat else ():
            if type(part) is not Byte and not ends(part):
                return False
        return True

    while path:                                     # one way down is enough, if it is found at once
        missing.clear()
        if ends(rules[path[-1]]):
            known.add(path.pop())
        elif missing and missing[-1] not in begun:
            begun.add(missing[-1])
            path.append(missing[-1])
        else:
            break
        tick()
    left = [name for name in reversed(rules) if name not in known]
    while "root" not in known:
        waiting = []
        for name in left:
            missing.clear()
            if ends(rules[name]):
                known.add(name)
            else:
                waiting.append(name)
            tick()
        if len(waiting) == len(left):
            return False
        left = waiting
    return True


# -- characters --

Ranges = tuple[tuple[int, int], ...]
ALL: Ranges = ((0, LAST_CHAR),)


def union(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Any pairs (first, last) of code points as ranges."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All code points that are not in the ranges."""
    gaps, free = [], 0
    for first, last in ranges:
        if free < first:
            gaps.append((free, first - 1))
        free = last + 1
    return tuple(gaps) if free > LAST_CHAR else (*gaps, (free, LAST_CHAR))


def clip(ranges: Ranges, low: int, high: int) -> Ranges:
    """What of the ranges lies within low to high."""
    return tuple((max(first, low), min(last, high)) for first, last in ranges if first <= high and last >= low)


@lru_cache(maxsize=1024)
def chars(ranges: Ranges) -> Expr:
    """One character out of the ranges, in UTF-8. NEVER if they hold none; surrogates are none."""
    valid = clip(ranges, 0, SURROGATES[0] - 1) + clip(ranges, SURROGATES[1] + 1, LAST_CHAR)
    return alt(part for first, last, lead, rest in ((0, 0x7F, 0, 0), (0x80, 0x7FF, 0xC0, 1), (0x800, 0xFFFF, 0xE0, 2), (0x10000, LAST_CHAR, 0xF0, 3))
               for part in spell(clip(valid, first, last), lead, rest))


def spell(ranges: Ranges, lead: int, rest: int) -> list[Expr]:
    """Numbers out of the ranges as one byte, whose upper bits are `lead`'s, and `rest` bytes of six bits. Each part begins with other bytes."""
    return [cat((Byte(sum((2 << last) - (1 << first) for first, last in tops) << lead), follow(tail, rest)))
            for tail, tops in blocks(ranges, 1 << 6 * rest).items()]


def blocks(ranges: Ranges, size: int) -> dict[Ranges, list[tuple[int, int]]]:
    """Numbers in blocks of a size: what there is of a block, counted from where it begins, and the blocks of which there is just that, as ranges."""
    found: dict[Ranges, list[tuple[int, int]]] = {}
    block, inside = 0, []

    def add(inside: list[tuple[int, int]], first: int, last: int) -> None:
        blocks = found.setdefault(tuple(inside), [])
        if blocks and blocks[-1][1] + 1 == first:
            first = blocks.pop()[0]
        blocks.append((first, last))

    for first, last in ranges:
        begin, end = first // size, last // size
        if begin != block and inside:
            add(inside, block, block)
            inside = []
        if begin < end:
            add([*inside, (first - begin * size, size - 1)], begin, begin)
            if begin + 1 < end:
                add([(0, size - 1)], begin + 1, end - 1)
            inside = []
            first = end * size
        inside.append((first - end * size, last - end * size))
        block = end
    if inside:
        add(inside, block, block)
    return found


@lru_cache(maxsize=2048)
def follow(ranges: Ranges, count: int) -> Expr:
    """Numbers out of the ranges as `count` bytes that continue a character."""
    return alt(spell(ranges, 0x80, count - 1)) if count else EMPTY


# -- parsers --

@dataclass
class Group:
    """A bracket that is still open: the alternatives so far, and the parts of the one that is being read.

    Each comes with its *counters*: how many counts are alive inside it, where a repeat does not count its own (it may still merge with
    one around it); 0 of a single character, whose repeat is free."""
    at: int
    flags: frozenset[str] = frozenset()
    parts: list[tuple[Expr, int]] = field(default_factory=list)
    branches: list[tuple[Expr, int]] = field(default_factory=list)


def counters(expr: Expr, inside: int) -> int:
    """The counts that are alive in a part, its own included."""
    if not isinstance(expr, Repeat):
        return inside
    return inside * max(expr.low if expr.high is None else expr.high, 1) if inside else 1


class Parser:
    """Reads a text from left to right. `at` is the position; `groups` the open ones, the outermost first.

    A front end takes what it finds and calls `add`, `bar`, `open`, `close`, `quantify`. Every refusal is `refuse(construct, why)`."""

    COUNT = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
    DIGITS = {"x": re.compile(r"([0-9a-fA-F]{2})"), "u": re.compile(r"([0-9a-fA-F]{4})"), "U": re.compile(r"([0-9a-fA-F]{8})")}
    BRACED, LOW_SURROGATE = re.compile(r"\{([0-9a-fA-F]{1,8})\}"), re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")

    def __init__(self, text: str):
        self.text, self.at, self.groups = text, 0, [Group(0)]

    def where(self, at: int) -> str:
        """The place of a position, for the user."""
        return f"position {at}"

    def refuse(self, construct: str, why: str, at: int | None = None) -> GrammarError:
        """The error to raise; at: where, by default here."""
        place = self.where(self.at if at is None else at)
        construct = construct if len(construct) < 80 else f"{construct[:77]}..."
        return GrammarError(f"{construct} at {place}: {why}", construct, place)

    def peek(self, text: str) -> bool:
        """Is this what comes next?"""
        return self.text.startswith(text, self.at)

    def eat(self, text: str) -> bool:
        """Goes past the text if it comes next."""
        found = self.peek(text)
        self.at += found * len(text)
        return found

    def scan(self, pattern: re.Pattern) -> re.Match | None:
        """Goes past the pattern if it comes next."""
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def add(self, expr: Expr, inside: int = 1) -> None:
        """One more part of what is being read; inside: its counters, 0 for a single character."""
        self.groups[-1].parts.append((expr, inside))
        tick()

    def bar(self) -> None:
        """The parts so far are an alternative; another begins."""
        group = self.groups[-1]
        if len(group.parts) == 1:
            group.branches.append(group.parts[0])
        else:
            group.branches.append((cat(expr for expr, _ in group.parts), max([1, *(counters(*part) for part in group.parts)])))
        group.parts = []
        tick()

    def open(self, at: int, flags: frozenset[str] = frozenset()) -> None:
        """A group begins; at: its bracket."""
        if len(self.groups) > MAX_DEPTH:
            raise self.refuse("(", f"more than {MAX_DEPTH} groups in each other", at)
        self.groups.append(Group(at, flags))

    def close(self) -> tuple[Expr, int]:
        """The innermost group ends: what it is, and its counters."""
        self.bar()
        branches = self.groups.pop().branches
        if len(branches) == 1:
            return branches[0]
        return alt(expr for expr, _ in branches), max(counters(*branch) for branch in branches)

    def quantify(self, low: int, high: int | None, at: int) -> None:
        """Repeats the part that was read last; at: where the quantifier stands."""
        expr, inside = self.groups[-1].parts.pop()
        if max(low, high or 0) > MAX_COUNT:
            raise self.refuse("{m,n}", f"counts go to {MAX_COUNT}", at)
        if high is not None and high < low:
            raise self.refuse("{m,n}", f"from {low} to {high} times is never", at)
        repeated = repeat(expr, low, high)
        merged = isinstance(expr, Repeat) and isinstance(repeated, Repeat) and repeated.item is expr.item
        if isinstance(repeated, Repeat) and not merged:
            inside = counters(expr, inside)
        if counters(repeated, inside) > MAX_COUNTERS:
            if max(low, high or 0) > MAX_COUNTERS:
                raise self.refuse("{m,n}", f"counts of more than one character go to {MAX_COUNTERS}, those of a single one to {MAX_COUNT}", at)
            raise self.refuse("{m,n}", f"nested counts multiply to more than {MAX_COUNTERS}: a state may have to remember every combination", at)
        self.groups[-1].parts.append((repeated, inside))
        tick()

    def counts(self) -> tuple[int, int | None] | None:
        """Goes past `{m}`, `{m,}`, `{,n}`, `{m,n}` if one comes next: low and high."""
        found = self.COUNT.match(self.text, self.at)
        if not found or found[0] == "{}" or not (found[1] or found[2]):
            return None
        if max(len(found[1]), len(found[3])) > 10:  # MAX_COUNT has ten digits, and int() is slow beyond thousands
            raise self.refuse("{m,n}", f"counts go to {MAX_COUNT}")
        self.at = found.end()
        low = int(found[1] or 0)
        return low, (int(found[3]) if found[3] else None) if found[2] else low

    def code(self, letter: str, at: int) -> int | None:
        """The code point of an escape \\xHH, \\uHHHH, \\UHHHHHHHH or \\u{H...} behind its letter; None for other letters. Two surrogates in a row, as
        JavaScript and JSON write them, are one. at: its backslash."""
        if letter not in self.DIGITS:
            return None
        found = self.scan(self.BRACED if letter == "u" and self.peek("{") else self.DIGITS[letter])
        if not found:
            raise self.refuse(f"\\{letter}", f"needs {dict(x=2, u=4, U=8)[letter]} hexadecimal digits", at)
        code = int(found[1], 16)
        if code > LAST_CHAR:
            raise self.refuse(f"\\{letter}", "there is no such character", at)
        low = self.LOW_SURROGATE.match(self.text, self.at) if 0xD800 <= code < 0xDC00 else None
        if low:
            self.at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return code


# -- demo: how sets of characters are spelled --

def show(expr: Expr) -> str:
    """An expression in one line: bytes as ASCII or hexadecimal, `<name>` for a rule, everything else as in a regex."""
    if isinstance(expr, Byte):
        listed = [b for b in range(256) if expr.mask >> b & 1]
        runs = union((b, b) for b in listed)
        text = "".join(show_byte(first) + (f"-{show_byte(last)}" if last > first else "") for first, last in runs)
        return text if len(listed) == 1 else f"[{text}]"
    if isinstance(expr, Ref):
        return f"<{expr.name}>"
    if isinstance(expr, Repeat):
        marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        count = f"{expr.low}" if expr.low == expr.high else f"{expr.low},{'' if expr.high is None else expr.high}"
        item = show(expr.item)
        return (f"({item})" if isinstance(expr.item, (Cat, Repeat)) else item) + marks.get((expr.low, expr.high), f"{{{count}}}")
    if isinstance(expr, But):
        return f"(any {show(expr.item)}, but {' '.join(map(ascii, expr.words))})"
    if isinstance(expr, Cat):
        return "".join(map(show, expr.parts)) or "()"
    return f"({'|'.join(map(show, expr.parts))})" if expr.parts else "(nothing)"


def show_byte(byte: int) -> str:
    """A byte as a character where that is plain, otherwise \\HH."""
    return chr(byte) if 0x20 < byte < 0x7F and chr(byte) not in "\\[]()|*+?{}<>-^" else f"\\{byte:02X}"


if __name__ == "__main__":
    for name, ranges in [("a to z", ((97, 122),)), ("é", ((0xE9, 0xE9),)), ("あ to ん", ((0x3042, 0x3093),)),
                         ("any but newline", complement(((10, 10),))), ("any beyond ASCII", complement(((0, 127),))), ("surrogates", (SURROGATES,))]:
        print(f"{name:>18}  {show(chars(ranges))}")
    many = repeat(repeat(repeat(BYTES[97], 1, 1000), 1, 1000), 1, 1000)
    print(f"\n((a{{1,1000}}){{1,1000}}){{1,1000}} is {show(many)};"
          f" (a{{2,3}})* leaves a gap and stays {show(repeat(repeat(BYTES[97], 2, 3), 0, None))}")
