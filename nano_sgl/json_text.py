"""JSON text: how strings and numbers are written that satisfy constraints, as expressions over bytes.

A constraint is about what is meant: characters, a value. The text spells it, and one character has up to fifteen spellings:

    A   ->   A | \\u0041            "   ->   \\" | \\u0022            1F600   ->   F0 9F 98 80 | \\ud83d\\ude00 | \\uD83D\\uDE00 | ...

Strings. `spelled` writes a set of characters. Patterns are read into *letters*: a letter is a set of characters, bit i of a Byte is the i-th
set that was named. So one expression serves for writing (`Letters.write`), matching (`Letters.matches`) and for automata. A pattern is read
once a process, into letters of its own, which those of a schema take over.

Products. Several constraints at once are *walkers*: a start, a step, an end. `Derived` walks an expression, or its complement, by partial
derivatives (Antimirov 1996); `Several` walks many and says which match; `Multiple` keeps the rest of a division. `product` runs all of them side by
side over *atoms*, the classes that no walker tells apart, and makes each state it reaches a right-linear rule.

Lengths. A state of `counted` is one of the product's and how many letters were read, as long as that matters: not where what may follow ends in
time anyway, nor where one run of letters is all that follows, for that is a repeat. `^https?://.+` of 2,048 letters has 24 states. Where there are
more than MAX_STATES, a run that stays in its state is counted in units and rounded up:

    ^[a-z]+(-[a-z]+)*$, at most 9,000, unit 8       [a-z]{0,7}(-<1, 8>)? | [a-z]{8}<0, 8>           <state, letters read>

Numbers. Bounds need no product: decimals between two others are alternatives by length and by the first digit that differs.

    0.25 < x <= 2     0.(2(50*[1-9]d*|[6-9]d*)|[3-9]d*) | 1(.d+)? | 2(.0+)?

Invariants. Half a surrogate pair is no character, so none is spelled. A number under a bound has no minus before zero, and where it has an
exponent, one digit before the point.

Cost. `spelled` takes 20 to 500 microseconds, and is remembered; a product some 10 a state and atom, up to MAX_STATES. Bounds nest as deep as
they have digits, at most MAX_DIGITS.

Where it stops. Rounding up leaves out texts near their bound whose runs are many; under one, `shortened` leaves out what is rare of a format. Host
names are held to 3 labels of 63 characters or 7 of 35; a leap second to offsets of whole hours; regular expressions to what ECMA 262 and Python
share, without names, references and lookbehind. Sources: RFC 8259, 3339, 3986, 3987, 4291, 5321, 6570, 6901, 9562; ISO 8601 durations as RFC 3339's
appendix has them.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import NamedTuple

from . import regex
from .rules import (ALL, BYTES, EMPTY, LAST_CHAR, NEVER, SURROGATES, Byte, Cat, Expr, GrammarError, Ranges, Ref, Repeat, alt, blocks, cat, chars,
                    clip, complement, literal, repeat, show, tick, union)

MAX_STATES = 3000  # of one product
MAX_DIGITS = 60    # of a bound
MAX_POWER = 300    # of ten, where a number is bounded: what doubles hold with all their digits


# -- characters of a string --

HEXES = [sum(1 << ord(char) for char in {f"{digit:x}", f"{digit:X}"}) for digit in range(16)]


@functools.lru_cache(maxsize=4096)
def hexes(ranges: Ranges, digits: int) -> Expr:
    """Numbers out of the ranges as so many hexadecimal digits."""
    if not digits:
        return EMPTY
    return alt([cat([Byte(sum(HEXES[top] for first, last in tops for top in range(first, last + 1))), hexes(tail, digits - 1)])
                for tail, tops in blocks(ranges, 16 ** (digits - 1)).items()])


SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


@functools.lru_cache(maxsize=4096)
def spelled(ranges: Ranges, plain: bool = False) -> Expr:
    """One character out of the ranges as a JSON string may spell it: raw, by a short escape, by one \\uHHHH or by two. plain: what ASCII can print is
    not written as \\uHHHH."""
    raw = complement(union([*complement(ranges), (0, 31), (34, 34), (92, 92)]))
    ascii_only = clip(ranges, 0, 127)
    short = [ord(letter) for char, letter in SHORT.items() if clip(ascii_only, ord(char), ord(char))]
    plane = clip(ranges, 0, SURROGATES[0] - 1) + clip(ranges, SURROGATES[1] + 1, 0xFFFF)
    plane = clip(plane, 0, 31) + clip(plane, 127, 0xFFFF) if plain else plane
    pairs = blocks(clip(ranges, 0x10000, LAST_CHAR), 1024)
    escaped = [hexes(plane, 4)] + [cat([hexes(tuple((0xD800 + first - 64, 0xD800 + last - 64) for first, last in highs), 4), literal("\\u"),
                                        hexes(tuple((0xDC00 + first, 0xDC00 + last) for first, last in tail), 4)])
                                   for tail, highs in pairs.items()]
    named = [chars(union((code, code) for code in short))] if short else []
    return alt([chars(raw), cat([literal("\\"), alt([*named, cat([literal("u"), alt(escaped)])])])])


def quoted(content: Expr) -> Expr:
    """A string, from what is in it."""
    return cat([BYTES[34], content, BYTES[34]])


class Letters:
    """The sets of characters that patterns name. In an expression over letters, bit i of a Byte stands for `sets[i]`."""

    def __init__(self):
        self.sets: list[Ranges] = []
        self.index: dict[Ranges, int] = {}
        self.known: dict[tuple[str, bool], Expr] = {}
        self.walkers: dict[Expr, Derived] = {}
        self.held: dict[str, tuple[int, int]] = {}  # by character: the sets that it is in, and how many sets were asked
        self.any = self.of(ALL)

    def of(self, ranges: Ranges) -> Expr:
        """One character out of the ranges."""
        valid = ranges
        if ranges and ranges[-1][1] >= SURROGATES[0]:
            valid = clip(ranges, 0, SURROGATES[0] - 1) + clip(ranges, SURROGATES[1] + 1, LAST_CHAR)
        if not valid:
            return NEVER
        found = self.index.setdefault(valid, len(self.sets))
        if found == len(self.sets):
            self.sets.append(valid)
        return Byte(1 << found)

    def pattern(self, text: str, search: bool = True) -> Expr:
        """A regular expression; search: a string that holds a match."""
        if (text, search) not in self.known:
            expr, sets = read(text, search)
            self.known[text, search] = self.taken(expr, [self.of(ranges).mask for ranges in sets], {})
        return self.known[text, search]

    def taken(self, expr: Expr, bits: list[int], known: dict[int, Expr]) -> Expr:
        """An expression over others' letters. bits: what their sets are here; known: what was taken, by identity."""
        if bits == [1 << i for i in range(len(bits))]:
            return expr
        if id(expr) not in known:
            if isinstance(expr, Byte):
                made = Byte(bits[expr.mask.bit_length() - 1] if expr.mask.bit_count() == 1 else
                            sum(bit for i, bit in enumerate(bits) if expr.mask >> i & 1))
            elif isinstance(expr, Repeat):
                made = Repeat(self.taken(expr.item, bits, known), expr.low, expr.high)
            else:
                made = type(expr)(tuple([self.taken(part, bits, known) for part in expr.parts]))
            known[id(expr)] = made
        return known[id(expr)]

    def word(self, text: str) -> Expr:
        """The text itself."""
        return cat(self.of(((ord(char), ord(char)),)) for char in text)

    def write(self, expr: Expr, spell: Callable[..., Expr] = spelled) -> Expr:
        """From letters to bytes; spell: how a set of characters is written."""
        if isinstance(expr, Byte):
            if expr.mask.bit_count() == 1:
                return spell(self.sets[expr.mask.bit_length() - 1])
            return spell(union(pair for i, pairs in enumerate(self.sets) if expr.mask >> i & 1 for pair in pairs))
        if isinstance(expr, Repeat):
            return repeat(self.write(expr.item, spell), expr.low, expr.high)
        return (cat if isinstance(expr, Cat) else alt)([self.write(part, spell) for part in expr.parts])

    def atoms(self, exprs: Iterable[Expr], spell: Callable[..., Expr] = spelled) -> list[tuple[int, Expr]]:
        """The alphabet, cut up so finely that no expression tells two characters of a piece apart: (sets that hold the piece, how it is written)."""
        used = self.any.mask
        for expr in exprs:
            used |= letters_in(expr)
        edges: dict[int, int] = {}
        for i, ranges in enumerate(self.sets):
            for first, last in ranges if used >> i & 1 else ():
                edges[first] = edges.get(first, 0) ^ 1 << i
                edges[last + 1] = edges.get(last + 1, 0) ^ 1 << i
        pieces: dict[int, list[tuple[int, int]]] = {}
        bits, places = 0, sorted(edges)
        for place, following in zip(places, [*places[1:], LAST_CHAR + 1]):
            bits ^= edges[place]
            if bits and following > place:
                pieces.setdefault(bits, []).append((place, following - 1))
        return [(bits, spell(union(pairs))) for bits, pairs in pieces.items()]

    def matches(self, expr: Expr, text: str) -> bool:
        """Does the expression match the text?"""
        walker = self.walkers.get(expr)
        if walker is None:
            walker = self.walkers[expr] = Derived(expr)
        state = walker.start
        for char in text:
            bits, count = self.held.get(char, (0, 0))
            if count < len(self.sets):
                bits |= sum(1 << i for i in range(count, len(self.sets)) if any(first <= ord(char) <= last for first, last in self.sets[i]))
                self.held[char] = bits, len(self.sets)
            state = walker.step(state, bits)
            if state is None:
                return False
        return walker.accepts(state)


@functools.lru_cache(maxsize=256)
def read(text: str, search: bool) -> tuple[Expr, list[Ranges]]:
    """A regular expression over letters of its own, and these; search: a string that holds a match."""
    letters = Letters()
    parser = Pattern(text, letters)
    expr, anything = parser.read(), repeat(letters.any, 0, None)
    expr = cat([anything, expr, anything]) if search else expr
    return regex.Anchors(parser).fix(expr, True, True) if parser.anchored else expr, letters.sets


class Pattern(regex.Regex):
    """Reads a regular expression into letters."""

    def __init__(self, text: str, letters: Letters):
        super().__init__(text)
        self.letters = letters

    def add_set(self, ranges: Ranges) -> None:
        """One character out of the ranges."""
        self.add(self.letters.of(ranges), 0)
        self.after = "character"


def letters_in(expr: Expr) -> int:
    """All bits of its Bytes."""
    if isinstance(expr, Byte):
        return expr.mask
    found = 0
    for part in [expr.item] if isinstance(expr, Repeat) else expr.parts:
        found |= letters_in(part)
    return found


def span(expr: Expr) -> tuple[int, int | None]:
    """The least and the greatest length of what an expression matches; None: no bound."""
    if isinstance(expr, Byte):
        return 1, 1
    if isinstance(expr, Repeat):
        low, high = span(expr.item)
        return low * expr.low, None if high is None or expr.high is None else high * expr.high
    spans = [span(part) for part in expr.parts] or [(0, 0)]
    lows, highs = [low for low, _ in spans], [high for _, high in spans]
    if isinstance(expr, Cat):
        return sum(lows), None if None in highs else sum(highs)
    return min(lows), None if None in highs else max(highs)


# -- products of automata --

@functools.lru_cache(maxsize=1 << 16)
def nullable(expr: Expr) -> bool:
    """Does it match the empty text?"""
    if isinstance(expr, Repeat):
        return expr.low == 0 or nullable(expr.item)
    return not isinstance(expr, Byte) and (all if isinstance(expr, Cat) else any)(nullable(part) for part in expr.parts)


@functools.lru_cache(maxsize=1 << 16)
def forms(expr: Expr) -> tuple[tuple[int, Expr], ...]:
    """Its linear form: (letters that may come first, what is left then)."""
    if isinstance(expr, Byte):
        return ((expr.mask, EMPTY),)
    if isinstance(expr, Repeat):
        left = repeat(expr.item, max(expr.low - 1, 0), None if expr.high is None else expr.high - 1)
        return tuple((mask, cat([rest, left])) for mask, rest in forms(expr.item))
    if not isinstance(expr, Cat):
        return tuple(dict.fromkeys(form for part in expr.parts for form in forms(part)))
    found: list[tuple[int, Expr]] = []
    for i, part in enumerate(expr.parts):
        found += [(mask, cat([rest, *expr.parts[i + 1:]])) for mask, rest in forms(part)]
        if not nullable(part):
            break
    return tuple(found)


class Residues:
    """What is left of expressions behind letters, by number: a tree is hashed once, and not at every step."""

    def __init__(self):
        self.numbers: dict[Expr, int] = {}
        self.exprs: list[Expr] = []
        self.known: dict[int, list[tuple[int, int]]] = {}
        self.first: dict[int, int] = {}             # the letters with which it may begin

    def number(self, expr: Expr) -> int:
        """The number of an expression."""
        found = self.numbers.setdefault(expr, len(self.exprs))
        if found == len(self.exprs):
            self.exprs.append(expr)
        return found

    def forms(self, number: int) -> list[tuple[int, int]]:
        """Its linear form."""
        found = self.known.get(number)
        if found is None:
            found = self.known[number] = [(mask, self.number(rest)) for mask, rest in forms(self.exprs[number])]
            self.first[number] = functools.reduce(int.__or__, (mask for mask, _ in found), 0)
        return found

    def letters(self, numbers: Iterable[int]) -> int:
        """The letters with which some of them may begin."""
        found = 0
        for number in numbers:
            if number not in self.first:
                self.forms(number)
            found |= self.first[number]
        return found

    def ends(self, number: int) -> bool:
        """Does it match the empty text?"""
        return nullable(self.exprs[number])


class Derived:
    """Matches an expression, or all that it does not match."""

    def __init__(self, expr: Expr, positive: bool = True):
        self.expr, self.positive, self.left = expr, positive, Residues()
        self.start = frozenset([self.left.number(expr)])

    def looks_at(self, state: frozenset) -> int:
        """The letters that make a difference."""
        return self.left.letters(state)

    def step(self, state: frozenset, bits: int) -> frozenset | None:
        """The state after a letter; None: nothing can follow."""
        after = frozenset([rest for number in state for mask, rest in self.left.forms(number) if mask & bits])
        return after if after or not self.positive else None

    def accepts(self, state: frozenset) -> bool:
        """May the text end here?"""
        return any(map(self.left.ends, state)) == self.positive


class Several:
    """Matches several expressions at once. What it accepts is which of them match; one: it ends where none can any more."""

    def __init__(self, exprs: list[Expr], one: bool):
        self.left, self.one = Residues(), one
        self.start = frozenset((i, self.left.number(expr)) for i, expr in enumerate(exprs))

    def looks_at(self, state: frozenset) -> int:
        """The letters that make a difference."""
        return self.left.letters(number for _, number in state)

    def step(self, state: frozenset, bits: int) -> frozenset | None:
        """The state after a letter; None: nothing can follow."""
        after = frozenset([(i, rest) for i, number in state for mask, rest in self.left.forms(number) if mask & bits])
        return after if after or not self.one else None

    def accepts(self, state: frozenset) -> frozenset[int]:
        """Which of them the text matches, if it ends here."""
        return frozenset(i for i, number in state if self.left.ends(number))


class Multiple:
    """Decimals that are a multiple of step / 10**places, or all that are not. A state is the rest, and how many places behind the point were read
    (None: no point yet); (-1, 0): it can be none any more."""
    start = (0, None)

    def __init__(self, step: int, places: int, positive: bool = True):
        self.divisor, self.places, self.positive = step, places, positive
        self.period = step // math.gcd(step, 10)    # rests that differ by it are alike, but 0

    def looks_at(self, state: tuple) -> int:
        """The bytes that make a difference."""
        return -1

    def step(self, state: tuple, bits: int) -> tuple | None:
        """The state after a byte."""
        (rest, place), char = state, chr(bits.bit_length() - 1)
        if char == "-" or rest < 0:
            return state
        if char == ".":
            return rest, 0
        if place is not None and place >= self.places:
            return state if char == "0" else None if self.positive else (-1, 0)
        rest = (rest * 10 + int(char)) % self.divisor
        if rest and not self.places:
            rest = rest % self.period or self.period
        return rest, None if place is None else place + 1

    def accepts(self, state: tuple) -> bool:
        """May the number end here?"""
        return (state[0] >= 0 and state[0] * 10 ** (self.places - (state[1] or 0)) % self.divisor == 0) == self.positive


class State(NamedTuple):
    """Of an automaton: what stands behind a text that ends here (NEVER: none does), and by the state after it the atoms that lead there, as bits."""
    last: Expr
    arcs: dict[int, int]


def product(walkers: list, atoms: list[tuple[int, Expr]], name: str, rules: dict[str, Expr], refuse: Callable[[str], GrammarError],
            end: Callable[[list], Expr] = lambda accepted: EMPTY if all(accepted) else NEVER, low: int = 0, high: int | None = None) -> Expr:
    """What all walkers accept and is `low` to `high` letters long, as rules whose names begin with `name`. end: what stands behind a text, by what
    each says of it."""
    states, spellings = explored(walkers, atoms, refuse, end), [expr for _, expr in atoms]

    @functools.lru_cache(maxsize=None)
    def spell(bits: int) -> Expr:
        return alt(expr for i, expr in enumerate(spellings) if bits >> i & 1)

    if low or high is not None:
        return counted(states, low, high, spell, name, rules, refuse)
    for i, (last, arcs) in enumerate(states):
        rules[f"{name}.{i}"] = alt([last, *(cat([spell(bits), Ref(f"{name}.{after}")]) for after, bits in arcs.items())])
    return Ref(f"{name}.0")


def explored(walkers: list, atoms: list[tuple[int, Expr]], refuse: Callable[[str], GrammarError], end: Callable[[list], Expr]) -> list[State]:
    """The states of a product, from its start."""
    numbers = {tuple(walker.start for walker in walkers): 0}
    todo, found, classes = list(numbers), {}, {}
    while todo:
        states = todo.pop()
        arcs: dict[int, int] = {}
        seen = functools.reduce(int.__or__, (walker.looks_at(state) for walker, state in zip(walkers, states)))
        if seen not in classes:                     # the atoms between which these letters make no difference, as bits
            classes[seen] = alike = {}
            for i, (bits, _) in enumerate(atoms):
                alike[bits & seen] = alike.get(bits & seen, 0) | 1 << i
        for bits, some in classes[seen].items():
            after = tuple([walker.step(state, bits) for walker, state in zip(walkers, states)])
            if None in after:
                continue
            if after not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise refuse(f"together with what else must hold takes more than {MAX_STATES} states")
                numbers[after] = len(numbers)
                todo.append(after)
            arcs[numbers[after]] = arcs.get(numbers[after], 0) | some
        found[numbers[states]] = State(end([walker.accepts(state) for walker, state in zip(walkers, states)]), arcs)
        tick()
    return [found[i] for i in range(len(found))]


def distances(states: list[State]) -> tuple[dict[int, int], dict[int, int]]:
    """How many letters at least lead from a state to an end, and how many at most, where there is a bound; states without an end are in neither."""
    before: dict[int, list[int]] = {}
    for i, (_, arcs) in enumerate(states):
        for after in arcs:
            before.setdefault(after, []).append(i)
    least = {i: 0 for i, state in enumerate(states) if state.last != NEVER}
    todo = collections.deque(least)
    while todo:
        after = todo.popleft()
        for i in before.get(after, ()):
            if i not in least:
                least[i] = least[after] + 1
                todo.append(i)
    waits = {i: sum(after in least for after in states[i].arcs) for i in least}  # arcs whose bound is not known yet
    most, todo = {}, collections.deque(i for i, count in waits.items() if not count)
    while todo:
        i = todo.popleft()
        most[i] = max((most[after] + 1 for after in states[i].arcs if after in least), default=0)
        for one in before.get(i, ()):
            if one in waits:
                waits[one] -= 1
                todo.extend([one] * (not waits[one]))
    return least, most


def merged(states: list[State]) -> list[State]:
    """The automaton with equal states made one (Moore), without those from which there is no end; the start stays the first."""
    least, most = distances(states)

    def sorted_by(signs: dict[int, tuple]) -> dict[int, int]:
        kinds: dict[tuple, int] = {}
        return {i: kinds.setdefault(signs[i], len(kinds)) for i in sorted(signs)}

    def onward(i: int) -> dict[int, int]:
        arcs: dict[int, int] = {}
        for after, bits in states[i].arcs.items():
            if after in least:
                arcs[classes[after]] = arcs.get(classes[after], 0) | bits
        return arcs

    classes, count = sorted_by({i: (states[i].last, least[i], most.get(i)) for i in least}), 0
    while count <= max(classes.values()):
        count = max(classes.values()) + 1
        classes = sorted_by({i: (classes[i], frozenset(onward(i).items())) for i in least})
        tick()
    found = {classes[i]: State(states[i].last, onward(i)) for i in sorted(least, reverse=True)}
    return [found[i] for i in range(len(found))]


def counted(states: list[State], low: int, high: int | None, spell: Callable[[int], Expr], name: str, rules: dict[str, Expr],
            refuse: Callable[[str], GrammarError]) -> Expr:
    """What an automaton accepts in `low` to `high` letters. A state is one of the automaton's and how many letters were read, or None where that
    does not matter any more. Where these are too many, a run of letters that stays in its state is counted in units, rounded up."""
    if 0 not in distances(states)[0]:
        return NEVER
    states = merged(states)
    least, most = distances(states)
    pure = {i for i, (_, arcs) in enumerate(states) if set(arcs) == {i}}

    def enter(i: int, count: int | None) -> tuple[int, int | None] | None:
        if count is None or (high is None or i in most and count + most[i] <= high) and count + least[i] >= low:
            return i, None
        if high is not None and count + least[i] > high:
            return None
        return i, count

    def leave(state: tuple[int, int | None], unit: int) -> list[tuple[int, tuple]]:
        """The letters and the states after them; a run of letters costs as much as its unit."""
        (i, count), arcs = state, states[state[0]].arcs
        if i in pure:
            return []
        taken = count if count is None else count + (run(state, unit) or 1)
        after = [(bits, enter(one, taken)) for one, bits in arcs.items()]
        return [(bits, one) for bits, one in after if one is not None]

    def run(state: tuple[int, int | None], unit: int) -> int:
        """How many letters of a run are counted as one piece; 0: each on its own."""
        i, count = state
        if unit == 1 or count is None or count < low or i not in states[i].arcs or i in pure:
            return 0
        return min(unit - (count - low) % unit, high - count - least[i])

    def reached(unit: int, limit: int) -> dict[tuple, str] | None:
        start = enter(0, 0)
        names, todo = {start: f"{name}.0"}, [start]
        while todo:
            for _, after in leave(todo.pop(), unit):
                if after not in names:
                    names[after] = f"{name}.{len(names)}"
                    todo.append(after)
            if len(names) > limit:
                return None
            tick()
        return names

    unit = 1
    if enter(0, 0) is None:
        return NEVER
    names = reached(unit, MAX_STATES)
    while names is None:
        unit *= 2
        if high is None or unit > high:
            raise refuse(f"together with what else must hold takes more than {MAX_STATES} states")
        names = reached(unit, MAX_STATES // 2)
    for state, own in names.items():
        (i, count), (last, arcs) = state, states[state[0]]
        if i in pure:
            fewest = 0 if count is None else max(low - count, 0)
            rules[own] = cat([repeat(spell(arcs[i]), fewest, None if count is None or high is None else high - count), last])
            continue
        piece, parts = run(state, unit), [last if count is None or count >= low else NEVER]
        onward = []
        for bits, after in leave(state, unit):
            if piece and after[0] == i:
                onward.append(cat([repeat(spell(bits), piece, piece), Ref(names[after])]))
            else:
                parts.append(cat([spell(bits), Ref(names[after])]))
        rules[own] = alt([cat([repeat(spell(arcs[i]), 0, piece - 1), alt(parts)]), *onward]) if piece else alt(parts)
        tick()
    return Ref(f"{name}.0")


# -- numbers --

DIGIT = Byte(sum(1 << b for b in range(48, 58)))
DIGITS = repeat(DIGIT, 0, None)


def digit_range(first: int, last: int) -> Expr:
    """One digit."""
    return Byte(sum(1 << b for b in range(48 + first, 49 + last))) if first <= last else NEVER


def fixed(low: str, high: str) -> Expr:
    """Numbers of as many digits as both bounds have."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(DIGIT, len(low), len(low))
    first, last, size = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return cat([digit_range(first, last), fixed(low[1:], high[1:])])
    return alt([cat([digit_range(first, first), fixed(low[1:], "9" * size)]), cat([digit_range(first + 1, last - 1), repeat(DIGIT, size, size)]),
                cat([digit_range(last, last), fixed("0" * size, high[1:])])])


def whole(low: int, high: int | None) -> Expr:
    """Integers from low >= 0."""
    if high is not None and high < low:
        return NEVER
    least, most = len(str(low)), len(str(high)) if high is not None else None
    if least == most:
        return fixed(str(low), str(high))
    parts = [fixed(str(low), "9" * least)]
    if most is None or most > least + 1:
        parts.append(cat([digit_range(1, 9), repeat(DIGIT, least, None if most is None else most - 2)]))
    return alt(parts if most is None else [*parts, fixed("1" + "0" * (most - 1), str(high))])


def behind(low: str, low_open: bool, high: str | None, high_open: bool) -> Expr:
    """Digits behind the point, also none, whose value is between two others: digits without zeros at the end; high None: no bound."""
    if high is None and not low:
        return cat([repeat(BYTES[48], 0, None), digit_range(1, 9), DIGITS]) if low_open else DIGITS
    if high == "" and (low or low_open or high_open):
        return NEVER
    if high == "":
        return repeat(BYTES[48], 0, None)
    ends = [] if low or low_open else [EMPTY]
    first, last = int(low[:1] or 0), int(high[0]) if high else 10
    if first > last:
        return NEVER
    if first == last:
        return alt([*ends, cat([digit_range(first, first), behind(low[1:], low_open, high[1:], high_open)])])
    parts = [cat([digit_range(first, first), behind(low[1:], low_open, None, False)]), cat([digit_range(first + 1, last - 1), DIGITS])]
    if high is not None:
        parts.append(cat([digit_range(last, last), behind("", False, high[1:], high_open)]))
    return alt([*ends, *parts])


def decimals(low: Decimal, low_open: bool, high: Decimal | None, high_open: bool) -> Expr:
    """Decimals from low >= 0, without exponent."""

    def split(value: Decimal) -> tuple[int, str]:
        text = f"{value:f}".partition(".")
        return int(text[0]), text[2].rstrip("0")

    def joined(front: Expr, digits: Expr) -> Expr:
        some = cat([BYTES[46], alt([cat([Byte(mask), rest]) for mask, rest in forms(digits)])])
        return cat([front, alt([EMPTY, some] if nullable(digits) else [some])])

    a, f = split(low)
    b, g = (None, None) if high is None else split(high)
    if high is not None and (high < low or (high == low and (low_open or high_open))):
        return NEVER
    if a == b:
        return joined(whole(a, a), behind(f, low_open, g, high_open))
    parts = [joined(whole(a, a), behind(f, low_open, None, False)), joined(whole(a + 1, None if b is None else b - 1), DIGITS)]
    return alt(parts if b is None else [*parts, joined(whole(b, b), behind("", False, g, high_open))])


class Bounds(NamedTuple):
    """What a number lies between; None: no bound."""
    low: Decimal | None
    low_open: bool
    high: Decimal | None
    high_open: bool

    def sides(self) -> Iterator[tuple[bool, Decimal, bool, Decimal | None, bool]]:
        """What is above zero, and what is below, mirrored: (with a minus?, bounds from 0)."""
        for minus, low, low_open, high, high_open in ((False, *self), (True, self.high and -self.high, self.high_open,
                                                                      self.low and -self.low, self.low_open)):
            if high is not None and high < 0:
                continue
            if low is None or low < 0:
                low, low_open = Decimal(0), False
            yield minus, low, low_open or (minus and low == 0), high, high_open

    def within(self, low: Decimal, high: Decimal) -> Bounds:
        """What of it lies between two others, both left out."""
        return Bounds(*max((self.low, self.low_open), (low, True), key=lambda end: (end[0] is not None, end[0] or 0, end[1])),
                      *max((self.high, self.high_open), (high, True), key=lambda end: (end[0] is not None, -(end[0] or 0), end[1])))

    def without(self, values: Iterable[Decimal]) -> list[Bounds]:
        """What is left without some values."""
        ends = [(value, True) for value in sorted(set(values)) if self.holds(value)]
        return [Bounds(*low, *high) for low, high in zip([(self.low, self.low_open), *ends], [*ends, (self.high, self.high_open)])]

    def holds(self, value: Decimal) -> bool:
        """Is the value one of them?"""
        above = self.low is None or value > self.low or value == self.low and not self.low_open
        return above and (self.high is None or value < self.high or value == self.high and not self.high_open)

    def empty(self) -> bool:
        """Is there no such number?"""
        return None not in (self.low, self.high) and (self.low > self.high or self.low == self.high and (self.low_open or self.high_open))

    @functools.lru_cache(maxsize=256)
    def write(self, integers: bool) -> Expr:
        """All such numbers, without exponents."""
        made = []
        for minus, low, low_open, high, high_open in self.sides():
            if integers:
                first = int(low) + (low != int(low) or low_open)
                last = None if high is None else int(high) - (high == int(high) and high_open)
                made.append(cat([literal("-" * minus), whole(first, last)]))
            else:
                made.append(cat([literal("-" * minus), decimals(low, low_open, high, high_open)]))
        return alt(made)


def powers(low: int, high: int) -> Expr:
    """e and an exponent between two others, with any sign and zeros that JSON allows."""
    zeros, letter = repeat(BYTES[48], 0, None), Byte(1 << 69 | 1 << 101)
    signs = [(repeat(BYTES[43], 0, 1), low, high), (BYTES[45], -high, -low)]
    return alt(cat([letter, sign, zeros, whole(max(first, 0), last)]) for sign, first, last in signs if last >= 0)


def scientific(bounds: Bounds) -> Expr:
    """Numbers between bounds as one digit that is not 0, perhaps more behind a point, and an exponent: the exponent decides, and where it is a
    bound's, the digits. Exponents are those of doubles."""
    made = []
    for minus, low, low_open, high, high_open in bounds.sides():
        if high is not None and (high <= 0 or high < low):
            continue
        least, most = -MAX_POWER if not low else low.adjusted(), MAX_POWER if high is None else high.adjusted()
        ends = {power for power, bound in ((least, low), (most, high)) if bound}
        for power in sorted(ends):
            digits = decimals(low.scaleb(-power) if low and power == least else Decimal(1), low_open and bool(low) and power == least,
                              high.scaleb(-power) if high and power == most else Decimal(10), high_open if high and power == most else True)
            made.append(cat([literal("-" * minus), digits, powers(power, power)]))
        first, last = least + (least in ends), most - (most in ends)
        if first <= last:
            digits = cat([digit_range(1, 9), repeat(cat([BYTES[46], DIGIT, DIGITS]), 0, 1)])
            made.append(cat([literal("-" * minus), digits, powers(first, last)]))
    return alt(made)


ANY = Bounds(None, False, None, False)
WHOLE = cat([ANY.write(True), repeat(cat([BYTES[46], repeat(BYTES[48], 1, None)]), 0, 1)])  # integers, also with a point


# -- formats --

DAY = (r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
       r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)")
LEAP = "|".join(rf"{hour:02}:59:60(?:\.[0-9]+)?(?:\+{(hour + 1) % 24:02}|-{23 - hour:02}):00" for hour in range(24))
TIME = (r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        rf"|23:59:60(?:\.[0-9]+)?[zZ]|{LEAP})")
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,%d}[A-Za-z0-9])?"
HOST = rf"(?:{LABEL % 61}(?:\.{LABEL % 61}){{0,2}}|{LABEL % 33}(?:\.{LABEL % 33}){{0,6}})"
FREE_HOST = r"[A-Za-z0-9](?:\.?[A-Za-z0-9]|-+[A-Za-z0-9])*"
OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
IPV4 = rf"{OCTET}(?:\.{OCTET}){{3}}"
H16 = "[0-9A-Fa-f]{1,4}"
LS32 = rf"(?:{H16}:{H16}|{IPV4})"
IPV6 = (rf"(?:(?:{H16}:){{6}}{LS32}|::(?:{H16}:){{5}}{LS32}|" + "|".join(
    rf"(?:(?:{H16}:){{0,{n}}}{H16})?::(?:{H16}:){{{4 - n}}}{LS32}" for n in range(5))
    + rf"|(?:(?:{H16}:){{0,5}}{H16})?::{H16}|(?:(?:{H16}:){{0,6}}{H16})?::)")
PCT, UNRESERVED, DELIMS = "%[0-9A-Fa-f]{2}", r"A-Za-z0-9._~\-", "!$&'()*+,;="
PCHAR = rf"(?:[{UNRESERVED}{DELIMS}:@]|{PCT})"
AUTHORITY = (rf"(?:(?:[{UNRESERVED}{DELIMS}:]|{PCT})*@)?"
             rf"(?:\[(?:{IPV6}|v[0-9A-Fa-f]+\.[{UNRESERVED}{DELIMS}:]+)\]|(?:[{UNRESERVED}{DELIMS}]|{PCT})*)(?::[0-9]*)?")
TAIL = rf"(?:\?(?:{PCHAR}|[/?])*)?(?:#(?:{PCHAR}|[/?])*)?"
HIER = rf"(?://{AUTHORITY}(?:/{PCHAR}*)*|/(?:{PCHAR}+(?:/{PCHAR}*)*)?|ROOTLESS(?:/{PCHAR}*)*|)"
URI = rf"[A-Za-z][A-Za-z0-9+.\-]*:{HIER.replace('ROOTLESS', f'{PCHAR}+')}{TAIL}"
POINTER = "(?:/(?:[^~/]|~[01])*)*"
ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+"
PERIODS = r"(?:[0-9]+%s(?:[0-9]+%s(?:[0-9]+%s)?)?|[0-9]+%s(?:[0-9]+%s)?|[0-9]+%s)"
DURATION = rf"P(?:{PERIODS % tuple('YMDMDD')}(?:T{PERIODS % tuple('HMSMSS')})?|T{PERIODS % tuple('HMSMSS')}|[0-9]+W)"
REFERENCE = rf"(?:{URI}|{HIER.replace('ROOTLESS', f'(?:[{UNRESERVED}{DELIMS}@]|{PCT})+')}{TAIL})"
WIDE = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF" + "".join(rf"\U000{n:X}0000-\U000{n:X}FFFD" for n in range(1, 15))  # of an IRI
VARNAME = rf"(?:[A-Za-z0-9_]|{PCT})(?:\.?(?:[A-Za-z0-9_]|{PCT}))*(?:\*|:[1-9][0-9]{{0,3}})?"
FORMATS = {
    "date": DAY, "time": TIME, "date-time": rf"{DAY}[tT]{TIME}", "duration": DURATION, "ipv4": IPV4, "ipv6": IPV6, "hostname": HOST,
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}", "uri": URI,
    "uri-reference": REFERENCE, "iri": URI.replace(UNRESERVED, UNRESERVED + WIDE), "iri-reference": REFERENCE.replace(UNRESERVED, UNRESERVED + WIDE),
    "uri-template": rf"(?:[!#$&(-;=?-\[\]_a-z~{WIDE}]|{PCT}|\{{[+#./;?&=,!@|]?{VARNAME}(?:,{VARNAME})*\}})*",
    "email": rf'(?:{ATEXT}(?:\.{ATEXT})*|"(?:[ !#-\[\]-~]|\\[ -~])*")@(?:{FREE_HOST}|\[(?:{IPV4}|IPv6:{IPV6})\])',  # RFC 5321, 4.1.2: no lengths
    "json-pointer": POINTER, "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{POINTER})",
}

# What is written of a format under a bound on its length, where all of it has too many states: no literal addresses and no user in an authority;
# hosts of 63 characters at most, so that no label is too long; mailboxes of 64 without quotes.
REG_NAME = rf"(?:[{UNRESERVED}{DELIMS}]|{PCT})*(?::[0-9]*)?"


def shortened(text: str, high: int | None) -> tuple[list[str], int | None]:
    """A format's expression as others that must all hold, few of whose states count, and the bound on its length that is left."""
    if text == FORMATS["hostname"]:
        return [FREE_HOST], 63 if high is None else min(high, 63)
    if text == FORMATS["email"]:
        size = 128 if high is None else high
        host = min(63, size * 2 // 3)
        lengths = [f"[^@]{{1,{min(64, size - 1 - host)}}}@[^@]{{1,{host}}}"] if size > 64 else []
        return [rf"{ATEXT}(?:\.{ATEXT})*@{FREE_HOST}", *lengths], high
    wide = UNRESERVED + WIDE
    return [text.replace(AUTHORITY, REG_NAME).replace(AUTHORITY.replace(UNRESERVED, wide), REG_NAME.replace(UNRESERVED, wide))], high


@functools.lru_cache(maxsize=1)
def regex_rules() -> dict[str, Expr]:
    """Regular expressions that ECMA 262 and Python read alike: rule json.regex, as a string's content. No names, references or lookbehind; ranges
    of a class are within ASCII, and counts have one digit, two, or three."""

    def one(text: str) -> Expr:
        return cat(spelled(((ord(char), ord(char)),)) for char in text)

    def any_of(text: str) -> Expr:
        return spelled(union((ord(char), ord(char)) for char in text))

    hexes = spelled(union([(48, 57), (65, 70), (97, 102)]))
    digits = [spelled(((48 + n, 57),)) for n in range(10)]
    escaped = cat([one("\\"), alt([any_of("dDwWsSfnrtv0^$\\.*+?()[]{}|/"), cat([one("x"), hexes, hexes]), cat([one("u"), repeat(hexes, 4, 4)])])])
    plain = spelled(complement(union((ord(char), ord(char)) for char in "^$\\.*+?()[]{}|")))
    inside = "".join(chr(b) for b in range(32, 127) if chr(b) not in "^-[]\\")
    ranges = alt([cat([one(low), one("-"), any_of("".join(high for high in inside if high >= low))]) for low in inside])
    member = alt([spelled(complement(union((ord(char), ord(char)) for char in "^-[]\\"))), ranges, escaped, one("\\-")])
    two, less = cat([digits[1], digits[0]]), cat([digits[0], repeat(digits[0], 0, 1)])
    counts = [cat([one(str(n)), one(","), alt([digits[n], two, cat([digits[1], digits[0], digits[0]])])])
              for n in range(10)]
    counts += [cat([one(f"{tens}{units},{tens}"), digits[units]])
               for tens in range(1, 10) for units in range(10)]
    counts += [cat([one(str(tens)), digits[0], one(","), digits[tens + 1], digits[0]]) for tens in range(1, 9)]
    counts += [cat([less, repeat(one(","), 0, 1)]), cat([two, one(","), digits[1], digits[0], digits[0]])]
    quantifier = cat([alt([any_of("*+?"), cat([one("{"), alt(counts), one("}")])]), repeat(one("?"), 0, 1)])
    group = cat([one("("), repeat(one("?:"), 0, 1), Ref("json.regex"), one(")")])
    atom = alt([plain, one("."), escaped, cat([one("["), repeat(one("^"), 0, 1), repeat(member, 1, None), one("]")]), group])
    ahead = cat([one("(?"), any_of("=!"), Ref("json.regex"), one(")")])
    assertion = alt([any_of("^$"), cat([one("\\"), any_of("bB")]), ahead])
    terms = repeat(alt([assertion, cat([atom, repeat(quantifier, 0, 1)])]), 0, None)
    return {"json.regex": cat([terms, repeat(cat([one("|"), terms]), 0, None)])}


@functools.lru_cache(maxsize=256)
def single(text: str, search: bool) -> Expr:
    """The content of a string for which a pattern is the only constraint."""
    letters = Letters()
    return letters.write(letters.pattern(text, search))


if __name__ == "__main__":
    for name, ranges in [("A", ((65, 65),)), ('"', ((34, 34),)), ("U+1F600", ((0x1F600, 0x1F600),)), ("0 to 9", ((48, 57),))]:
        print(f"{name:>22}  {show(spelled(ranges))}")
    print(f"{'0.25 < x <= 2':>22}  {show(Bounds(Decimal('0.25'), True, Decimal(2), False).write(False))}")
    print(f"{'-5 to 120':>22}  {show(Bounds(Decimal(-5), False, Decimal(120), False).write(True))}")
    made: dict[str, Expr] = {}
    words = Letters()
    both = [Derived(words.pattern("^a|b$")), Derived(words.pattern("c"), False)]
    product(both, words.atoms(words.pattern(one) for one in "abc"), "p", made, ValueError, low=2, high=2)
    print(f"{'^a|b$, 2 long, no c':>22}  {len(made)} states")
