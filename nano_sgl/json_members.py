"""JSON members: what stands between brackets, as states and commas.

An object or an array is items with commas between them, and what may come next depends on what was written. That is an automaton over items, each
of which is a whole text of its own, `"a": 1`. Its states become rules:

    id must come, name and nick may        "id":1 (end | ,"n<tree>)        tree  ame":2 (end | ,"nick"<nick>) | ick"<nick>        nick  :3 end

Names. An *option* is a member's text, or its value's, and the *wishes* that it fulfils, as bits: a wish is that some member is so, which is what
`not` of an object comes down to. A *pair* is a declared key: whether it must come, and its options. An *extra* is an option whose key nobody
declares.

    in_order      uncounted  a state is the next key; keys that may come next are a tree        as many states as keys
                  counted    a state is (next key, members written, wishes fulfilled)           times the count
    in_any_order  a state is (set of keys written, extras, wishes)                              2 ** keys
    sequence      any automaton, from its start, arcs and ends: contains, uniqueItems, any order

Keys that nobody declares are all strings but some (`avoid`): at each letter of a declared key it goes on, or any other letter and any text. That is
one expression, `rules.But`, and nothing is made of its letters before a text comes to them.

Invariants. A comma stands between two items and nowhere else. A declared key comes once at most, one that must come comes. Readings may be
ambiguous (a member that fulfils a wish may also be read as one that does not), verdicts are not.

Cost. Some ten microseconds a state, up to MAX_PAIRS of them. Where it stops: an extra key may come twice, and counts twice: behaviour that JSON
schema leaves undefined. 4,000 keys that may be left out are bearable, 10,000 are refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from .json_text import spelled
from .rules import BYTES, EMPTY, NEVER, But, Byte, Cat, Expr, GrammarError, Or, Ref, Rules, alt, cat, complement, literal, repeat, show, tick, union
from .schema import LAYOUTS, Layout

MAX_PAIRS = 20_000  # states, or arcs, of one object or array
MAX_ORDERS = 6_000  # arcs between sets of keys: 10 keys, and half a second
Option = tuple[Expr, int]


class Pair(NamedTuple):
    """A declared key as JSON writes it, its values in all their options, and whether it must come."""
    key: bytes
    options: list[Option]
    required: bool

    def texts(self, colon: Expr) -> Iterator[Option]:
        """`"key": value`, in all its options."""
        return ((cat([*map(BYTES.__getitem__, self.key), colon, value]), fulfilled) for value, fulfilled in self.options if value != NEVER)


Tree = dict[int, tuple[bytes, "Tree | Expr"]]  # by first byte: what all keys below have in common, and the rest, or what stands behind the key


class Count(NamedTuple):
    """How many members an object has, and all wishes, as bits."""
    low: int
    high: int | None
    wishes: int = 0


class Writer(NamedTuple):
    """Where rules go: the beginning of their names, the layout, the rules, and how to refuse (keyword, why)."""
    name: str
    layout: Layout
    rules: dict[str, Expr]
    refuse: Callable[[str, str], GrammarError]


def bracketed(brackets: str, items: Expr, optional: bool, layout: Layout) -> Expr:
    """One or more items in brackets; optional: or none."""
    return cat([literal(brackets[0]), layout.pad, repeat(cat([items, layout.pad]), int(not optional), 1), literal(brackets[1])])


def sequence(writer: Writer, start: Hashable, arcs: Callable[[Hashable], Iterable[tuple[Expr, Hashable]]], ends: Callable[[Hashable], bool],
             keyword: str, begun: bool = False) -> Expr:
    """The items of an automaton, with commas and what stands behind the last. arcs: (item, state after it); begun: an item stands before them."""
    comma, pad = writer.layout.comma, writer.layout.pad
    names, todo, count = {(start, begun): f"{writer.name}.{len(writer.rules)}"}, [(start, begun)], 0
    writer.rules[names[start, begun]] = NEVER    # the name is taken
    while todo:
        state, after_one = todo.pop()
        parts = [pad if after_one else EMPTY] if ends(state) else []
        for item, after in arcs(state):
            if item == NEVER:
                continue
            if (after, True) not in names:
                names[after, True] = f"{writer.name}.{len(writer.rules)}"
                writer.rules[names[after, True]] = NEVER
                todo.append((after, True))
            parts.append(cat([comma if after_one else EMPTY, item, Ref(names[after, True])]))
            count += 1
            if max(count, len(writer.rules)) > MAX_PAIRS:
                raise writer.refuse(keyword, f"takes more than {MAX_PAIRS} states")
        writer.rules[names[state, after_one]] = alt(parts)
        tick()
    return Ref(names[start, begun])


def in_any_order(writer: Writer, pairs: list[Pair], extras: list[Option], count: Count) -> Expr:
    """The members of an object, in any order, extras among them."""
    if len(pairs) << max(len(pairs) - 1, 0) > MAX_ORDERS:
        raise writer.refuse("any_order", f"{len(pairs)} keys in any order are too many states; in declared order they are not")
    needed = sum(1 << i for i, pair in enumerate(pairs) if pair.required)
    cap = max(count.low, (count.high or -1) + 1)

    texts = [[(named(writer, text), fulfilled) for text, fulfilled in pair.texts(writer.layout.colon)] for pair in pairs]

    def size(state: tuple) -> int:
        return state[0].bit_count() + state[1]

    def arcs(state: tuple) -> Iterable[tuple[Expr, tuple]]:
        done, others, wishes = state
        if count.high is not None and size(state) >= count.high:
            return
        for i, options in enumerate(texts):
            if not done >> i & 1:
                yield from ((text, (done | 1 << i, others, wishes | fulfilled)) for text, fulfilled in options)
        yield from ((text, (done, min(others + 1, cap), wishes | fulfilled)) for text, fulfilled in extras)

    def ends(state: tuple) -> bool:
        return state[0] & needed == needed and size(state) >= count.low and state[2] == count.wishes

    return sequence(writer, (0, 0, 0), arcs, ends, "any_order")


def in_order(writer: Writer, pairs: list[Pair], extras: list[Option], count: Count) -> Expr:
    """The members of an object, declared keys first, as they are declared."""
    low, high, wishes = count
    least = list(itertools.accumulate((pair.required for pair in pairs), initial=0))  # members written before a pair
    low = 0 if low <= least[-1] else low
    return counted(writer, pairs, extras, Count(low, high, wishes), least) if high is not None or low > 1 or wishes else \
        uncounted(writer, pairs, extras, low)


def uncounted(writer: Writer, pairs: list[Pair], extras: list[Option], low: int) -> Expr:
    """Where it does not matter how many members there are. What may come next is the end, or a key out of a tree of those up to the next that must
    come: so a byte leads to one place, however many keys there are. Made from the last key to the first; trees share what they have in common."""
    comma, colon = writer.layout.comma, writer.layout.colon
    end, after = others(writer, extras, Count(low, None), False), others(writer, extras, Count(0, None), True)
    tree: Tree = {}
    made: dict[int, tuple[object, Expr]] = {}
    for i in range(len(pairs) - 1, -1, -1):
        key, options, required = pairs[i]
        value = options[0][0] if len(options) == 1 else alt(value for value, _ in options)
        if value == NEVER and not required:
            continue
        leaf = cat([colon, value, alt([after, cat([comma, written(writer, tree, made)])])])
        if not required or (i and not pairs[i - 1].required) or i % 8 == 7:
            leaf = named(writer, leaf)
        if required:
            tree, end, after = {}, NEVER, NEVER
        tree = grown(tree, key, leaf)
    return alt([end, written(writer, tree, made)])


def grown(tree: Tree, key: bytes, leaf: Expr) -> Tree:
    """The tree with one more key; what does not change is shared. No key begins another, for all end with a quote."""
    if key[0] not in tree:
        return {**tree, key[0]: (key, leaf)}
    label, below = tree[key[0]]
    same = next((i for i, (one, other) in enumerate(zip(label, key)) if one != other), min(len(label), len(key)))
    if same < len(label):
        below = {label[same]: (label[same:], below)}
    return {**tree, key[0]: (label[:same], grown(below, key[same:], leaf))}


def written(writer: Writer, tree: Tree, made: dict[int, tuple[object, Expr]]) -> Expr:
    """What a tree of keys stands for. made: the trees and branches that have a rule, by identity."""
    found = made.get(id(tree))
    if found is None:
        parts = [(made.get(id(one)) or branch(writer, one, made, len(tree) > 1))[1] for one in tree.values()]
        found = made[id(tree)] = tree, named(writer, alt(parts)) if len(parts) > 1 else alt(parts)
        if len(made) > 2 * MAX_PAIRS:
            raise writer.refuse("properties", "more of them that may be left out than can be told apart; those that are required do not count")
        tick()
    return found[1]


def branch(writer: Writer, one: tuple[bytes, Tree | Expr], made: dict[int, tuple[object, Expr]], shared: bool) -> tuple[object, Expr]:
    """Notes what a part of a key stands for, and what stands behind it."""
    label, below = one
    expr = cat([*map(BYTES.__getitem__, label), written(writer, below, made) if isinstance(below, dict) else below])
    found = made[id(one)] = one, named(writer, expr) if shared and len(label) > 12 else expr
    return found


def named(writer: Writer, expr: Expr) -> Expr:
    """The expression as a rule."""
    name = f"{writer.name}.{len(writer.rules)}"
    writer.rules[name] = expr
    return Ref(name)


def counted(writer: Writer, pairs: list[Pair], extras: list[Option], count: Count, least: list[int]) -> Expr:
    """Where it does. least: how many members were written before a pair, at least."""
    low, high, wishes = count
    cap = max(low, 1) if high is None else max(high, 1)
    if (cap + 1) * len(pairs) << wishes.bit_count() > MAX_PAIRS:
        keyword = "minProperties" if high is None else "maxProperties"
        raise writer.refuse(keyword, f"{len(pairs)} properties counted to {cap} are too many states")
    states: dict[tuple[int, int], Expr] = {}
    for n in range(min(cap, least[-1]), min(cap, len(pairs)) + 1):
        for done in subsets(wishes):
            states[n, done] = others(writer, extras, Count(max(low - n, 0), high and high - n, wishes & ~done), n > 0)
    for i in range(len(pairs) - 1, -1, -1):
        pair = pairs[i]
        states = shared(writer, states) if i % 8 == 7 or (len(states) > 1 and not pair.required) else states
        before, texts = {}, list(pair.texts(writer.layout.colon))
        for n, done in [(n, done) for n in range(min(cap, least[i]), min(cap, i) + 1) for done in subsets(wishes)]:
            taken = [cat([writer.layout.comma if n else EMPTY, text, states[min(n + 1, cap), done | fulfilled]])
                     for text, fulfilled in texts if high is None or n < high]
            before[n, done] = alt(taken if pair.required else [*taken, states[n, done]])
        states = before
    return states[0, 0]


def subsets(bits: int) -> Iterable[int]:
    """All numbers whose bits are among these."""
    chosen = bits
    while True:
        yield chosen
        if not chosen:
            return
        chosen = chosen - 1 & bits


def shared(writer: Writer, states: dict[Hashable, Expr]) -> dict[Hashable, Expr]:
    """The states as rules, where they are used more than once."""
    found = {}
    for state, expr in states.items():
        found[state] = expr if isinstance(expr, Ref) or expr in (EMPTY, NEVER) else named(writer, expr)
    return found


def others(writer: Writer, extras: list[Option], left: Count, begun: bool) -> Expr:
    """The end of an object, when so much of it is left to write."""
    low, high, wishes = left
    if high is not None and high < low:
        return NEVER
    if not extras and not wishes and low < 1:
        return writer.layout.pad if begun else EMPTY
    if wishes:
        cap = low if high is None else high

        def arcs(state: tuple) -> Iterable[tuple[Expr, tuple]]:
            written, done = state
            if high is None or written < high:
                yield from ((text, (min(written + 1, cap), done | fulfilled & wishes)) for text, fulfilled in extras)

        return sequence(writer, (0, 0), arcs, lambda state: state[0] >= low and state[1] == wishes, "minProperties", begun)
    comma, pad, extra = writer.layout.comma, writer.layout.pad, alt(text for text, fulfilled in extras if not fulfilled)
    if begun:
        return cat([repeat(cat([comma, extra]), low, high), pad])
    more = cat([extra, repeat(cat([comma, extra]), max(low - 1, 0), high and high - 1), pad])
    return repeat(more, int(low > 0), 0 if high == 0 else 1)


# -- keys that nobody declares --

# What a string spells in one way where it is plain: what ASCII can print, but not / " \\
SIMPLE = Byte(sum(1 << b for b in range(32, 127) if chr(b) not in '/"\\'))
OTHERS = complement(union((b, b) for b in range(128) if SIMPLE.mask >> b & 1))


def is_simple(char: str) -> bool:
    """Is it spelled in one way?"""
    return char < "\x80" and bool(SIMPLE.mask >> ord(char) & 1)


CHAR = alt([SIMPLE, spelled(OTHERS, True)])
REST = repeat(CHAR, 0, None)
SPECIAL = cat([spelled(OTHERS, True), REST])


@functools.lru_cache(maxsize=4096)
def begun_by_others(heads: str) -> tuple[Expr, ...]:
    """All strings that begin with none of the heads, but the empty one."""
    if all(map(is_simple, heads)):
        return SPECIAL, Cat((Byte(SIMPLE.mask & ~sum(1 << ord(head) for head in heads)), REST))
    return cat([spelled(complement(union((ord(head), ord(head)) for head in heads)), True), REST]),


def avoid(words: set[str], name: str, rules: dict[str, Expr]) -> Expr:
    """All strings but the words; plain ones, for then what is not simple is alike everywhere. What is left of words behind their last character that
    is not simple is one object."""
    if all(map(is_simple, set().union(*words))):
        return But(CHAR, tuple(sorted([word.encode() for word in words])))
    simple = {word: max([i for i, char in enumerate(word, 1) if not is_simple(char)], default=0) for word in words}     # from where on

    def below(some: list[str], depth: int) -> Expr:
        if all(simple[word] <= depth for word in some):
            return But(CHAR, tuple([word[depth:].encode() for word in some]))
        if depth % 16 == 0 and depth:
            todo.append((f"{name}.{some[0][:depth]}", some, depth))
            return Ref(todo[-1][0])
        return made(some, depth)

    def made(some: list[str], depth: int) -> Expr:
        heads = {head: list(group) for head, group in itertools.groupby(some[len(some[0]) == depth:], lambda word: word[depth])}
        parts = [Cat((BYTES[ord(head)] if is_simple(head) else spelled(((ord(head), ord(head)),), True), below(group, depth + 1)))
                 for head, group in heads.items()]
        return Or((*([EMPTY] if len(some[0]) > depth else []), *begun_by_others("".join(heads)), *parts))

    todo = [(f"{name}.", sorted(words), 0)]
    while todo:
        key, group, depth = todo.pop()
        rules[key] = made(group, depth)
        tick()
    return Ref(f"{name}.")


if __name__ == "__main__":
    made: dict[str, Expr] = {}
    pairs = [Pair(b'"id"', [(literal("1"), 0)], True), Pair(b'"name"', [(literal("2"), 0)], False), Pair(b'"nick"', [(literal("3"), 0)], False)]
    for title, order, count in (("in order", in_order, Count(0, None)), ("two at most", in_order, Count(0, 2)),
                                ("in any order", in_any_order, Count(0, None))):
        made.clear()
        start = order(Writer("s", LAYOUTS["compact"], made, lambda keyword, why: GrammarError(why, keyword)), pairs, [], count)
        print(f"{title:<16} {show(start)}")
        for name, expr in Rules(made, "").rules.items():
            print(f"    {name:<12} {show(expr)}")
