"""Nodes: the expressions of a grammar, interned, in a normal form, and cut into pieces that need no stack.

Rules come as trees (rules.py). Equal trees become one number here, a *node*, and so do equal trees of different grammars: what an automaton
learns about a node, it knows the next time. Two steps make them fit to run:

    rules       A ::= A x | B b          B ::= "" | c          C ::= "(" C ")" | A
    normalize   A ::= (b | B b) x*       B ::= c               C ::= "(" C ")" | (b | c b) x*      A and B are put where they are used
    cut                                                        C ::= «"("» C «")"» | «(b | c b) x*» pieces in «», the rest for the stack

Normal form, on which everything else rests. No rule and no repeated item matches the empty text: what is optional says so with an explicit empty
alternative, so loops of nothing are gone. No rule begins with itself, directly or through others: rules that do are a left-linear system,

    A1 = A2 x | b1       whose solution is A_i = OR_j b_j path(j, i): begin with some b, then a sequence
    A2 = A1 y | b2       of x, y ... that leads from j to i. No path begins with one of the A.

Every rule matches something: what never ends is left out. Rules without references are put where they are used; those that come back to themselves
only at their end are loops.

How it is cut. A piece ends behind every loop over many bytes, so that what follows the loop is no part of its state: the loop of a string's
characters is the same node in every grammar. Repeats of characters with a bound are leaves of their own (*counted*), if the item is a
*prefix code*, whose sequences fall apart in one way.

Cost: a few microseconds a part. Where it stops: left recursion through n rules makes up to n^2 new ones, at most MAX_PATHS; counted items that are
no prefix code are repeated on the stack. Source: linear forms after Antimirov (1996), derivatives of Brzozowski (1964); left recursion
after Rosenkrantz (1967); Tarjan (1972).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable

from .rules import MAX_COUNT, Byte, Cat, Expr, GrammarError, Or, Ref, Repeat, Rules, tick

EMPTY, NEVER = 0, 1             # the nodes of the empty text and of nothing at all
MAX_DEPTH = 220                 # nesting of an expression: three times that of rules.py, and some
MAX_INLINE = 60                 # nesting of a rule that is put where it is used
MAX_PARTS = 400_000             # of a grammar
MAX_KNOWN = 1000                # big expressions that a vocabulary's nodes are remembered of
MAX_PATHS = 5000                # rules that left recursion may turn into
CHUNK = 256                     # parts of one Cat: longer ones become trees, so that no suffix is long. Equal texts in other trees are not equal
RUN = 8                         # equal parts in a row from which they become a repeat
NARROW = 24                     # bytes: a loop over no more is cheap, as are few repeats of it
UNROLLED = 8
MAX_FRAMES = 1000               # of one stack
COMPARED = 32                   # readings that are compared with each other, to leave out what others cover
DONE = (-1, -1)                 # in place of a frame: the stack is empty
LIGHT, TAIL, STACKED = 0, 1, 2  # shapes: no wide loop; one, at the end; more than one piece


# --------------------------------------------------------------------------------------------------------------------------- nodes

class Nodes:
    """Interned expressions. `keys[node]` is its kind and parts; a Ref counts as not nullable, as it is in normal form. Bytes outside of `alphabet`
    (256 bits) match nothing."""

    def __init__(self, alphabet: int = (1 << 256) - 1):
        self.alphabet = alphabet
        self.keys: list[tuple] = []
        self.nullable: list[bool] = []
        self.stacked: list[bool] = []               # has a Ref in it, or a leaf of grammar.py
        self.depth: list[int] = []
        self.items: list[int] = []                  # what a repeat repeats; of other nodes, themselves
        self._ids: dict[tuple, int] = {}
        self._bytes: dict[int, int] = {}
        self._cats: set[int] = set()
        self._linear: dict[int, tuple] = {}
        self._positive: dict[int, int] = {}
        self._shapes: dict[int, int] = {}
        self._cuts: dict[int, int] = {}
        self._extents: dict[int, tuple[int, int | None]] = {}
        self._codes: dict[int, bool] = {}
        self._known: dict[int, tuple[Expr, int]] = {}   # big expressions that were converted, by identity: character classes, formats
        self.new_rule = itertools.count().__next__
        self._intern(("empty",), True)
        self._intern(("never",), False)

    def _intern(self, key: tuple, nullable: bool, stacked: bool = False) -> int:
        node = self._ids.get(key)
        return self._new(key, nullable, stacked) if node is None else node

    def _new(self, key: tuple, nullable: bool, stacked: bool) -> int:
        node = self._ids[key] = len(self.keys)
        kind = key[0]
        self.keys.append(key)
        self.nullable.append(nullable)
        self.stacked.append(stacked)
        self.items.append(key[1] if kind == "rep" else node)
        below = key[1:] if kind in ("cat", "or") else key[1:2] if kind in ("rep", "text", "counted") else ()
        self.depth.append(1 + max(map(self.depth.__getitem__, below), default=0))
        if kind == "cat":
            self._cats.add(node)
        tick()
        return node

    def byte(self, mask: int) -> int:
        found = self._bytes.get(mask)
        if found is None:
            found = self._bytes[mask] = self._intern(("byte", mask & self.alphabet), False) if mask & self.alphabet else NEVER
        return found

    def ref(self, rule: int) -> int:
        return self._intern(("ref", rule), False, True)

    def text(self, node: int) -> int:
        """A leaf: a piece without a stack."""
        return node if node in (EMPTY, NEVER) else self._intern(("text", node), self.nullable[node], True)

    def counted(self, item: int, low: int, high: int) -> int:
        """A leaf: `low` >= 1 to `high` times a prefix code."""
        return self._intern(("counted", item, low, high), False, True)

    def cat(self, parts: Iterable[int]) -> int:
        parts = list(parts)
        if EMPTY in parts:
            parts = [part for part in parts if part != EMPTY]
        if len(parts) < 2:
            return parts[0] if parts else EMPTY
        if NEVER in parts:
            return NEVER
        if not self._cats.isdisjoint(parts):
            flat = [p for part in parts for p in (self.keys[part][1:] if part in self._cats else (part,))]
            parts = flat if len(flat) <= CHUNK else parts
        while len(parts) > CHUNK:
            parts = [self._cat(parts[i : i + CHUNK]) for i in range(0, len(parts), CHUNK)]
        return self._cat(parts)

    def _cat(self, parts: list[int]) -> int:
        if len(parts) == 1:
            return parts[0]
        key = "cat", *parts
        return self._ids.get(key) or self._new(key, all(map(self.nullable.__getitem__, parts)), any(map(self.stacked.__getitem__, parts)))

    def then(self, node: int, rest: int) -> int:
        """The cat of two."""
        if node == EMPTY or rest == EMPTY:
            return node or rest
        one, other = self.keys[node], self.keys[rest]
        key = "cat", *(one[1:] if one[0] == "cat" else (node,)), *(other[1:] if other[0] == "cat" else (rest,))
        if len(key) > CHUNK or NEVER in (node, rest):
            return self.cat((node, rest))
        return self._ids.get(key) or self._intern(key, self.nullable[node] and self.nullable[rest], self.stacked[node] or self.stacked[rest])

    def alt(self, parts: Iterable[int]) -> int:
        mask, others, keys = 0, set(), self.keys
        for part in parts:
            key = keys[part]
            for p in key[1:] if key[0] == "or" else (part,):
                if keys[p][0] == "byte":
                    mask |= keys[p][1]
                else:
                    others.add(p)
        others.discard(NEVER)
        if mask:
            others.add(self.byte(mask))
        if EMPTY in others and any(self.nullable[p] for p in others if p != EMPTY):
            others.remove(EMPTY)
        if len(others) < 2:
            return others.pop() if others else NEVER
        key = "or", *sorted(others)
        return self._ids.get(key) or self._new(key, any(map(self.nullable.__getitem__, others)), any(map(self.stacked.__getitem__, others)))

    def rep(self, item: int, low: int, high: int | None) -> int:
        """Repeats of a repeat become one where no number of times is left out."""
        if self.nullable[item]:
            item, low = self.positive(item), 0
        if high == 0 or item == NEVER:
            return EMPTY if low == 0 else NEVER
        if low == high == 1:
            return item
        if self.keys[item][0] == "rep":
            _, inner, least, most = self.keys[item]
            fits = max(least * low, (most or 0) * (high or 0)) <= MAX_COUNT
            if fits and (low == high or (low > 0 or least <= 1 if most is None else least * (low + 1) <= most * low + 1)):
                return self.rep(inner, least * low, None if most is None or high is None else most * high)
        return self._intern(("rep", item, low, high), low == 0, self.stacked[item])

    def bounds(self, node: int) -> tuple[int, int, int | None]:
        """A node as a repeat: (item, low, high)."""
        kind, *parts = self.keys[node]
        return tuple(parts) if kind == "rep" else (node, 1, 1)

    def positive(self, node: int) -> int:
        """The node without the empty text."""
        if not self.nullable[node]:
            return node
        found = self._positive.get(node)
        if found is None:
            kind, *parts = self.keys[node]
            if kind == "cat":                       # the first part that is not empty is the i-th
                found = self.alt(self.cat([self.positive(part), *parts[i + 1 :]]) for i, part in enumerate(parts))
            elif kind == "or":
                found = self.alt(self.positive(part) for part in parts)
            elif kind == "rep":
                found = self.rep(parts[0], 1, parts[2])
            else:
                found = NEVER
            self._positive[node] = found
        return found

    def linear(self, node: int) -> tuple[tuple[int, int], ...]:
        """(mask of bytes, what follows them) for each way in which the node begins."""
        found = self._linear.get(node)
        if found is None:
            kind, *parts = self.keys[node]
            if kind == "byte":
                found = ((parts[0], EMPTY),)
            elif kind == "or":
                found = tuple(arc for part in parts for arc in self.linear(part))
            elif kind == "rep":
                item, low, high = parts
                rest = self.rep(item, max(low - 1, 0), None if high is None else high - 1)
                found = tuple([(mask, self.then(to, rest)) for mask, to in self.linear(item)])
            elif kind == "cat":
                arcs: list[tuple[int, int]] = []
                for i, part in enumerate(parts, start=1):
                    if self.keys[part][0] == "byte":            # as most do
                        arcs.append((self.keys[part][1], parts[i] if i + 1 == len(parts) else self.cat(parts[i:])))
                        break
                    rest = parts[i] if i + 1 == len(parts) else self.cat(parts[i:])
                    arcs += [(mask, self.then(to, rest)) for mask, to in self.linear(part)]
                    if not self.nullable[part]:
                        break
                found = tuple(arcs)
            else:
                found = ()
            self._linear[node] = found
        return found

    # ---- shapes

    def extent(self, node: int) -> tuple[int, int | None]:
        """(all bytes that occur, as a mask; the length of its texts, if all have the same)."""
        found = self._extents.get(node)
        if found is None:
            kind, *parts = self.keys[node]
            mask, length = 0, 0
            if kind == "byte":
                mask, length = parts[0], 1
            elif kind == "rep":
                mask, length = self.extent(parts[0])
                length = length * parts[1] if length is not None and parts[1] == parts[2] else None
            elif kind in ("cat", "or"):
                masks, lengths = zip(*map(self.extent, parts))
                mask = functools.reduce(int.__or__, masks)
                length = None if None in lengths or kind == "or" and len(set(lengths)) > 1 else sum(lengths) if kind == "cat" else lengths[0]
            found = self._extents[node] = mask, length
        return found

    def is_prefix_code(self, node: int) -> bool:
        """Whether no text begins another, so that a sequence of them falls apart in one way. Never wrongly true."""
        if self.nullable[node]:
            return False
        found = self._codes.get(node)
        if found is None:
            found = self._codes[node] = self.extent(node)[1] is not None or self._is_prefix_code(*self.keys[node], node=node)
        return found

    def _is_prefix_code(self, kind: str, *parts: int, node: int) -> bool:
        if kind == "cat":
            return all(map(self.is_prefix_code, parts))
        if kind != "or" or not all(map(self.is_prefix_code, parts)):
            return False
        begins: dict[int | tuple, int] = {}         # by length: the first bytes of all alternatives of that length
        for i, part in enumerate(parts):
            group = self.extent(part)[1]
            group = (i,) if group is None else group
            for mask, _ in self.linear(part):
                begins[group] = begins.get(group, 0) | mask
        clash = [a for (i, a), (j, b) in itertools.combinations(begins.items(), 2) if a & b]
        return not clash or self._explore(node)

    def _explore(self, node: int) -> bool:
        """The same by trying, for small ones such as the escapes of a JSON string."""
        todo, seen = [frozenset((node,))], set()
        while todo and len(seen) < 64:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            if EMPTY in state and len(state) > 1:
                return False
            todo += [frozenset(conts) for _, conts in split_bytes(arc for n in state for arc in self.linear(n))]
            if any(self.nullable[n] and n != EMPTY for n in state):
                return False
        return not todo

    def shape(self, node: int) -> int:
        """LIGHT, TAIL or STACKED: see `cut`."""
        found = self._shapes.get(node)
        if found is None:
            kind, *parts = self.keys[node]
            found = STACKED if self.stacked[node] else LIGHT
            if found == STACKED:
                pass
            elif kind == "rep":
                item, low, high = parts
                wide = self.extent(item)[0].bit_count() > NARROW
                if self.shape(item) != LIGHT:
                    found = STACKED
                elif high is None:
                    found = (TAIL if wide else LIGHT) if low <= (2 if wide else UNROLLED) else STACKED
                elif high > (1 if wide else UNROLLED):
                    found = STACKED
            elif kind in ("cat", "or"):
                shapes = [self.shape(part) for part in parts]
                found = max(shapes) if kind == "or" or max(shapes[:-1]) == LIGHT else STACKED
            self._shapes[node] = found
        return found

    def cut(self, node: int) -> int:
        """The node with its pieces as leaves `text` and `counted`; what is left between them is for the stack."""
        found = self._cuts.get(node)
        if found is None:
            kind, *parts = self.keys[node]
            if kind == "ref" or node in (EMPTY, NEVER):
                found = node
            elif self.shape(node) != STACKED:
                found = self.text(node)
            elif kind == "or":
                light = [part for part in parts if self.shape(part) != STACKED]
                found = self.alt([self.text(self.alt(light)), *(self.cut(p) for p in parts if self.shape(p) == STACKED)])
            elif kind == "cat":
                found = self.cat(self._pieces(parts))
            else:
                found = self._cut_repeat(*parts)
            self._cuts[node] = found
        return found

    def _pieces(self, parts: list[int]) -> list[int]:
        pieces, group = [], []
        for part in parts:
            shape = self.shape(part)
            if shape != STACKED:
                group.append(part)
            if shape != LIGHT:
                pieces.append(self.text(self.cat(group)))
                group = []
            if shape == STACKED:
                pieces.append(self.cut(part))
        return [*pieces, self.text(self.cat(group))]

    def _cut_repeat(self, item: int, low: int, high: int | None) -> int:
        if self.shape(item) == LIGHT and high is None and low:
            return self.cat([self.cut(self.rep(item, low, low)), self.cut(self.rep(item, 0, None))])
        if self.shape(item) == LIGHT and high is not None and self.is_prefix_code(item):
            leaf = self.counted(item, max(low, 1), high)
            return leaf if low else self.alt([EMPTY, leaf])
        if self.keys[item][0] == "or" and high is None and low < 2:     # (x|Y)* with a light x is x*(Y x*)*: then x* is a piece
            light = self.alt(part for part in self.keys[item][1:] if self.shape(part) == LIGHT)
            if light != NEVER:
                loop = self.rep(light, 0, None)
                heavy = self.cat([self.alt(part for part in self.keys[item][1:] if self.shape(part) != LIGHT), loop])
                first = self.cat([self.rep(light, low, None), self.rep(heavy, 0, None)])
                return self.cut(self.alt([first, self.rep(heavy, 1, None)]) if low else first)
        return self.rep(self.cut(item), low, high)


class Stacks:
    """Interned stacks of one grammar: `frames[stack]` is a set of (frame, stack below), several where a text can be read in several ways. A frame is
    a node that is still to come. What others cover is left out: what x{0,7} matches, x{0,8} matches, too."""

    def __init__(self, nodes: Nodes):
        self.nodes = nodes
        self.frames: list[frozenset[tuple[int, int]]] = []
        self.places = 0                             # in memory: stacks, and the frames in them
        self._ids: dict[frozenset, int] = {}
        self._covered: dict[tuple[int, int, int], bool] = {}

    def of(self, frames: frozenset) -> int:
        """The stack that allows what any of the frames does. Raises GrammarError."""
        found = self._ids.get(frames)
        if found is None:
            needed = self._needed(frames) if len(frames) > 1 else frames
            if len(needed) > MAX_FRAMES:
                raise GrammarError(f"the grammar is too ambiguous: more than {MAX_FRAMES} ways to go on", "grammar")
            found = self._ids.get(needed)
            if found is None:
                found = self._ids[needed] = len(self.frames)
                self.frames.append(needed)
                self.places += len(needed) + 1
            self._ids[frames] = found
        return found

    def push(self, frame: int, stack: int) -> int:
        """The stack with one frame more."""
        return self.of(frozenset(((frame, stack),)))

    def covers(self, one: int, other: int, depth: int = 4) -> bool:
        """Whether a stack allows all that another does; never wrongly true. So many frames deep they may differ."""
        if one == other:
            return True
        ours, theirs = self.frames[one], self.frames[other]
        if not depth or len(ours) * len(theirs) > COMPARED:
            return False
        key = one, other, depth
        found = self._covered.get(key)
        if found is None:
            found = self._covered[key] = all(any(self._frame_covers(mine, frame, depth) for mine in ours) for frame in theirs)
        return found

    def _frame_covers(self, one: tuple[int, int], other: tuple[int, int], depth: int) -> bool:
        if one[0] != other[0]:
            (item, low, high), (item_2, low_2, high_2) = self._bounds(one[0]), self._bounds(other[0])
            if item != item_2 or low > low_2 or high < high_2:
                return False
        return self.covers(one[1], other[1], depth - 1)

    def _bounds(self, frame: int) -> tuple[int, int, float]:
        item, low, high = self.nodes.bounds(frame) if frame != DONE[0] else (*DONE, None)
        return item, low, float("inf") if high is None else high

    def _needed(self, frames: frozenset) -> frozenset:
        by_item: dict[int, list[tuple[int, int]]] = {}
        for one in frames:
            by_item.setdefault(self._bounds(one[0])[0], []).append(one)
        needed = []
        for same in by_item.values():
            if 1 < len(same) <= COMPARED:
                kept: list[tuple[int, int]] = []
                for one in sorted(same, key=lambda one: -self._bounds(one[0])[2]):
                    if not any(self._frame_covers(other, one, 4) for other in kept):
                        kept.append(one)
                same = kept
            needed += same
        return frozenset(needed) if len(needed) < len(frames) else frames


def split_bytes(arcs: Iterable[tuple[int, int]]) -> list[tuple[int, set[int]]]:
    """Arcs (mask, node) -> disjoint masks, each with all nodes that its bytes lead to."""
    by_mask: dict[int, set[int]] = {}
    seen = total = 0
    for mask, node in arcs:
        by_mask.setdefault(mask, set()).add(node)
        seen, total = seen | mask, total + mask
    if seen == total:                               # no bit twice
        return list(by_mask.items())
    parts: list[tuple[int, set[int]]] = []
    seen = 0
    for mask, nodes in by_mask.items():
        if not mask & seen:
            parts.append((mask, nodes))
            seen |= mask
            continue
        seen |= mask
        divided = []
        for other, members in parts:
            common = other & mask
            if common:
                divided.append((common, members | nodes))
                mask &= ~common
            if other != common:
                divided.append((other & ~common, members))
        parts = [*divided, (mask, nodes)] if mask else divided
    return parts


# --------------------------------------------------------------------------------------------------------------------- normal form

class _Normalizer:
    """Rules -> nodes by rule number, in normal form (above)."""

    def __init__(self, nodes: Nodes, rules: Rules):
        self.nodes, self.count, self.met = nodes, 0, 0
        self.ids = {name: nodes.new_rule() for name in rules.rules}
        self._put: dict[str, int] = {}              # rules without references: put where they are used
        self._made: dict[int, tuple[int, bool]] = {}    # by identity: expressions in which no reference is left, and whether they had some
        self._refs: dict[int, frozenset[int]] = {}
        self.raw: dict[int, int] = {}
        for component in components({name: self._names(expr) for name, expr in rules.rules.items()}):
            for name in component:
                self.count += 1
                node, rule = self._convert(rules.rules[name], name, 0), self.ids[name]
                node = self._loop(rule, node) if rule in self.refs(node) else node
                if not nodes.stacked[node] and nodes.depth[node] < MAX_INLINE:          # whoever walks it recurses
                    self._put[name] = node
                if name not in self._put or len(component) > 1 or name == rules.start:
                    self.raw[rule] = node
        self.optional = self._least(self.raw, lambda node, found: self._matches(node, found, empty=True))
        self._normal: dict[int, int] = {}
        self.rules = {rule: nodes.positive(self._normalize(node)) for rule, node in self.raw.items()}
        if rules.start not in self.ids:
            raise GrammarError(f"rule {rules.start} is not defined", rules.start, rules.start)
        self.start = self._normalize(nodes.ref(self.ids[rules.start]))

    def _names(self, expr: Expr) -> set[str]:
        """The rules that an expression refers to."""
        found, todo, known, seen = set(), [expr], self.nodes._known, set()
        while todo:
            one = todo.pop()
            kind = type(one)
            if kind is Ref:
                if one.name in self.ids:
                    found.add(one.name)
            elif kind is Repeat:
                todo.append(one.item)
            elif kind is not Byte and id(one) not in known and id(one) not in seen:
                seen.add(id(one))
                todo += one.parts
                tick()
        return found

    def _convert(self, expr: Expr, rule: str, depth: int) -> int:
        nodes, kind = self.nodes, type(expr)
        if kind is Byte:
            return nodes.byte(expr.mask)
        if kind is Ref:
            self.met += 1
            found = self._put.get(expr.name)
            if found is None:
                if expr.name not in self.ids:
                    raise GrammarError(f"rule {expr.name} is not defined", expr.name, rule)
                found = nodes.ref(self.ids[expr.name])
            return found
        found = self._made.get(id(expr))
        if found is not None:
            self.met += found[1]
            return found[0]
        known = nodes._known.get(id(expr))
        if known is not None and known[0] is expr:
            return known[1]
        before = self.count, self.met
        self.count += 1 if kind is Repeat else len(expr.parts)
        tick()
        if depth > MAX_DEPTH or self.count > MAX_PARTS:
            what = f"nested deeper than {MAX_DEPTH}" if depth > MAX_DEPTH else f"more than {MAX_PARTS} parts"
            raise GrammarError(f"the grammar is too large: {what}, in rule {rule}", "grammar", rule)
        if kind is Repeat:
            if expr.low < 0 or (expr.high is not None and expr.high < expr.low):
                raise GrammarError(f"a repeat of {expr.low} to {expr.high} times, in rule {rule}", "repeat", rule)
            node = nodes.rep(self._convert(expr.item, rule, depth + 1), expr.low, expr.high)
        else:
            bytes_, convert = nodes._bytes, self._convert
            parts = [bytes_.get(part.mask) or convert(part, rule, depth + 1) if type(part) is Byte else convert(part, rule, depth + 1)
                     for part in expr.parts]
            node = nodes.cat(self._runs(parts)) if kind is Cat else nodes.alt(parts)
        if not nodes.stacked[node]:
            self._made[id(expr)] = node, self.met > before[1]
            if self.count - before[0] > 16 and self.met == before[1] and len(nodes._known) < MAX_KNOWN:
                nodes._known[id(expr)] = expr, node     # holding `expr` keeps its id from being used again
        return node

    def _runs(self, parts: list[int]) -> list[int]:
        """Parts of a Cat, many equal ones as a repeat: x{a,b} x{c,d} is x{a+c,b+d}."""
        items, keys = list(map(self.nodes.items.__getitem__, parts)), self.nodes.keys
        if not any(map(operator.eq, items, items[1:])):
            return parts
        if len(set(items)) > len(items) - RUN + 1 and all(one != other or keys[parts[i]][0] == keys[parts[i + 1]][0] == "byte"
                                                          for i, (one, other) in enumerate(zip(items, items[1:]))):
            return parts                            # as words with a double letter
        found: list[int] = []
        for item, run in itertools.groupby(map(self.nodes.bounds, parts), key=lambda bounds: bounds[0]):
            _, lows, highs = zip(*run)
            low, high = sum(lows), None if None in highs else sum(highs)
            many = len(lows) >= RUN or len(lows) > 1 and (high is None or self.nodes.nullable[item] or not low)
            if many and max(low, high or 0) <= MAX_COUNT:
                found.append(self.nodes.rep(item, low, high))
            else:
                found += [self.nodes.rep(item, low, high) for low, high in zip(lows, highs)]
        return found

    def _inline(self, rules: dict[int, int]) -> None:
        """Rules without references are put where they are used: pieces can then be longer than a rule."""
        known: dict[int, int] = {}
        for component in components({rule: self.refs(node) for rule, node in rules.items()}):
            for rule in component:
                node = self._replace(rules[rule], known)
                rules[rule] = node = self._loop(rule, node) if rule in self.refs(node) else node
                if not self.nodes.stacked[node] and self.nodes.depth[node] < MAX_INLINE:     # whoever walks it recurses
                    known[self.nodes.ref(rule)] = node

    def _loop(self, rule: int, node: int) -> int:
        """A rule that comes back to itself at its ends alone, X = x X | b, as the loop x* b."""
        nodes, parts = self.nodes, self._tail(node, rule)
        if parts is None:
            return node
        ends, turns = (nodes.alt(part) for part in parts)
        return nodes.rep(turns, 1, None) if ends == turns else nodes.cat([nodes.rep(turns, 0, None), ends])

    def _tail(self, node: int, rule: int) -> tuple[list[int], list[int]] | None:
        """(what does not end in the rule, what precedes it in what does); None if it is anywhere else."""
        kind, *parts = self.nodes.keys[node]
        if rule not in self.refs(node):
            return [node], []
        if kind == "ref":
            return [], [EMPTY]
        if kind == "rep" or kind == "cat" and any(rule in self.refs(part) for part in parts[:-1]):
            return None
        ends, turns = [], []
        before = parts[:-1] if kind == "cat" else []
        for part in parts[len(before):]:
            found = self._tail(part, rule)
            if found is None:
                return None
            ends += [self.nodes.cat([*before, x]) for x in found[0]]
            turns += [self.nodes.cat([*before, x]) for x in found[1]]
        return ends, turns

    def _replace(self, node: int, known: dict[int, int]) -> int:
        """The node with some of its references replaced; `known` begins with these, and remembers what was done."""
        if not self.nodes.stacked[node] or node in known:
            return known.get(node, node)
        kind, *parts = self.nodes.keys[node]
        if kind == "ref":
            return node
        if kind == "rep":
            known[node] = self.nodes.rep(self._replace(parts[0], known), *parts[1:])
        else:
            parts = [self._replace(part, known) for part in parts]
            known[node] = self.nodes.cat(self._runs(parts)) if kind == "cat" else self.nodes.alt(parts)
        return known[node]

    def _matches(self, node: int, found: set[int], empty: bool) -> bool:
        """Whether the node matches anything (`empty`: the empty text), if the rules in `found` do."""
        kind, *parts = self.nodes.keys[node]
        if not self.nodes.stacked[node]:
            return self.nodes.nullable[node] if empty else node != NEVER
        if kind == "ref":
            return parts[0] in found
        if kind == "rep":
            return parts[1] == 0 or self._matches(parts[0], found, empty)
        return (all if kind == "cat" else any)(self._matches(part, found, empty) for part in parts)

    def _least(self, rules: dict[int, int], holds: Callable[[int, set[int]], bool]) -> set[int]:
        """The least set of rules that holds."""
        users: dict[int, list[int]] = {}
        for rule, node in rules.items():
            for ref in self.refs(node):
                users.setdefault(ref, []).append(rule)
        found: set[int] = set()
        todo = list(rules)
        while todo:
            rule = todo.pop()
            tick()
            if rule not in found and holds(rules[rule], found):
                found.add(rule)
                todo += users.get(rule, ())
        return found

    def refs(self, node: int) -> frozenset[int]:
        """The rules in a node."""
        if not self.nodes.stacked[node]:
            return frozenset()
        found = self._refs.get(node)
        if found is None:
            kind, *parts = self.nodes.keys[node]
            parts = parts[:1] if kind == "rep" else parts
            found = self._refs[node] = frozenset(parts) if kind == "ref" else frozenset().union(*map(self.refs, parts))
        return found

    def _normalize(self, node: int) -> int:
        nodes = self.nodes
        if not nodes.stacked[node]:
            return node
        found = self._normal.get(node)
        if found is None:
            kind, *parts = nodes.keys[node]
            if kind == "ref":
                found = nodes.alt([EMPTY, node]) if parts[0] in self.optional else node
            elif kind == "rep":
                found = nodes.rep(self._normalize(parts[0]), *parts[1:])
            else:
                found = (nodes.cat if kind == "cat" else nodes.alt)(map(self._normalize, parts))
            self._normal[node] = found
        return found

    # ---- left recursion

    def leading(self, node: int) -> set[int]:
        """The rules that the node may begin with."""
        kind, *parts = self.nodes.keys[node]
        if kind == "ref":
            return set(parts)
        found: set[int] = set()
        if self.nodes.stacked[node]:
            for part in parts[:1] if kind == "rep" else parts:
                found |= self.leading(part)
                if kind == "cat" and not self.nodes.nullable[part]:
                    break
        return found

    def remove_left_recursion(self) -> None:
        graph = {rule: self.leading(node) for rule, node in self.rules.items()}
        for component in components(graph):
            if len(component) > 1 or component[0] in graph[component[0]]:
                self._unroll(component)
        self._inline(self.rules)

    def _unroll(self, component: list[int]) -> None:
        """A_m = A_j x | ... | b_m: every A_i becomes OR_j b_j path(j, i)."""
        nodes, members = self.nodes, set(component)
        begins, steps, units = {}, {j: {} for j in component}, {j: {j} for j in component}
        for m in component:
            begins[m], heads = self._split(self.rules[m], members)
            for j, rests in heads.items():
                steps[j][m] = nodes.alt(nodes.positive(rest) for rest in rests)
                if any(nodes.nullable[rest] for rest in rests):
                    units[j].add(m)
        if len(component) == 1:
            self.rules[m] = nodes.cat([begins[m], nodes.rep(steps[m].get(m, NEVER), 0, None)])
            return
        reach = {j: _reach(units, j) for j in component}
        names: dict[tuple[int, int], int] = {}
        todo: list[tuple[int, int]] = []

        def after(j: int, i: int) -> int:           # what may follow A_j, to make it an A_i
            if (j, i) not in names:
                names[j, i] = nodes.new_rule()
                todo.append((j, i))
            return nodes.alt([EMPTY, nodes.ref(names[j, i])] if i in reach[j] else [nodes.ref(names[j, i])])

        for i in component:
            self.rules[i] = nodes.alt(nodes.cat([begins[j], after(j, i)]) for j in component if begins[j] != NEVER)
            while todo:
                j, to = todo.pop()
                self.rules[names[j, to]] = nodes.alt(
                    nodes.cat([step, after(m, to)]) for k in reach[j] for m, step in steps[k].items() if step != NEVER)
                if len(names) > MAX_PATHS:
                    raise GrammarError(f"left recursion through {len(component)} rules is too much", "left recursion")

    def _split(self, node: int, members: set[int]) -> tuple[int, dict[int, list[int]]]:
        """Without the empty text: what does not begin with one of the rules, and what follows the rule in what does."""
        nodes = self.nodes
        if not self.leading(node) & members:
            return nodes.positive(node), {}
        kind, *parts = nodes.keys[node]
        if kind == "ref":
            return NEVER, {parts[0]: [EMPTY]}
        if kind == "rep":
            item, low, high = parts
            parts = [item, nodes.rep(item, max(low - 1, 0), None if high is None else high - 1)]
        begins, heads = [], {}
        for i, part in enumerate(parts):
            begin, below = self._split(part, members)
            rest = EMPTY if kind == "or" else nodes.cat(parts[i + 1 :])
            begins.append(nodes.cat([begin, rest]))
            for rule, rests in below.items():
                heads.setdefault(rule, []).extend(nodes.cat([x, rest]) for x in rests)
            if kind != "or" and not nodes.nullable[part]:
                break
        return nodes.alt(begins), heads

    def prune(self) -> None:
        """Leave out what never ends."""
        useful = self._least(self.rules, lambda node, found: self._matches(node, found, empty=False))
        if len(useful) == len(self.rules):
            return
        known = {self.nodes.ref(rule): NEVER for rule in self.rules if rule not in useful}
        self.rules = {rule: self._replace(self.rules[rule], known) for rule in useful}
        self.start = self._replace(self.start, known)


def normalize(nodes: Nodes, rules: Rules) -> tuple[dict[int, int], int]:
    """(rule number -> node, start node) in normal form. Raises GrammarError."""
    normal = _Normalizer(nodes, rules)
    normal.remove_left_recursion()
    normal.prune()
    return normal.rules, normal.start


def _reach(graph: dict[int, set[int]], start: int) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        for to in graph[todo.pop()] - seen:
            seen.add(to)
            todo.append(to)
    return seen


def components(graph: dict[int, set[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan 1972), without recursion; those that others lead to come first."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    place: dict[int, int] = {}
    stack, found = [], []
    for root in graph:
        work = [] if root in index else [(root, iter(graph[root]))]
        while work:
            node, edges = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                place[node] = len(stack)
                stack.append(node)
            for to in edges:
                if to not in index:
                    work.append((to, iter(graph[to])))
                    break
                low[node] = min(low[node], low[to])     # a finished component has low = infinity
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = place[node]
                    found.append(stack[at:])
                    for member in stack[at:]:
                        low[member] = len(graph) + 1
                    del stack[at:]
    return found


def _demo() -> None:
    """The essay's rules, and what becomes of them."""
    one = lambda text: Byte(1 << ord(text))  # noqa: E731
    rules = Rules({"A": Or((Cat((Ref("A"), one("x"))), Cat((Ref("B"), one("b"))))), "B": Or((Cat(()), Cat((Ref("B"), one("c")))))}, "A")
    nodes = Nodes()
    normal, start = normalize(nodes, rules)

    def show(node: int) -> str:
        kind, *parts = nodes.keys[node]
        if kind == "byte":
            return "".join(chr(b) for b in range(128) if parts[0] >> b & 1)
        if kind in ("ref", "text", "counted"):
            return f"<{parts[0]}>" if kind == "ref" else f"«{show(parts[0])}»" + (f"{{{parts[1]},{parts[2]}}}" if kind == "counted" else "")
        if kind == "rep":
            return f"({show(parts[0])}){{{parts[1]},{'' if parts[2] is None else parts[2]}}}"
        return "(" + (" " if kind == "cat" else " | ").join(map(show, parts)) + ")" if parts else '""'

    print('A ::= A x | B b      B ::= "" | B c')
    print("start:", show(start))
    for rule, node in normal.items():
        print(f"<{rule}> ::= {show(node):40s} cut: {show(nodes.cut(node))}")


if __name__ == "__main__":
    _demo()
