"""Nodes: the expressions of a grammar, interned, and cut into pieces that need no stack.

Rules come as trees (rules.py). Equal trees become one number here, a *node*, and so do equal trees of different grammars: what an automaton
learns about a node, it knows the next time. Two steps make them fit to run:

    rules                          A ::= A x | B b          B ::= "" | c          C ::= "(" C ")" | A
    normalize (normal_form.py)     A ::= (b | c b) x*                             C ::= "(" C ")" | (b | c b) x*
    cut                                                                           C ::= «"("» C «")"» | «(b | c b) x*»
                                                                                  pieces in «», the rest for the stack

How it is cut. A piece ends behind every loop over many bytes, so that what follows the loop is no part of its state: the loop of a string's
characters is the same node in every grammar. Repeats of characters with a bound are leaves of their own (*counted*), if the item is a
*prefix code*, whose sequences fall apart in one way; without an upper bound they are counted up to the lower one. Up to UNROLLED of them in front of
a loop are one piece with it.

All texts but some words (*but*) are one node, however many words there are: what is left of them behind a byte is a node once a text gets there.

Cost: a few microseconds a part. Where it stops: counted items that are no prefix code are repeated on the stack. Source: linear forms after
Antimirov (1996), derivatives of Brzozowski (1964).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from .rules import INF, MAX_COUNT, Expr, GrammarError, pause

EMPTY, NEVER = 0, 1             # the nodes of the empty text and of nothing at all
CHUNK = 256                     # parts of one Cat: longer ones become trees, so that no suffix is long. Equal texts in other trees are not equal
NARROW = 24                     # bytes: a loop over no more is cheap, as are few repeats of it
UNROLLED = 8                    # and of a loop over many, in front of another
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
        self.special: set[int] = {EMPTY, NEVER}     # what does not stand in a Cat as it is: these and other Cats
        self._ors: set[int] = set()
        self.letters: set[int] = set()             # what is one byte
        self._compound: set[int] = set()            # what is deeper than 1
        self._looped: set[int] = set()              # what has a repeat in it
        self._linear: dict[int, tuple] = {}
        self._positive: dict[int, int] = {}
        self._shapes: dict[int, int] = {}
        self._cuts: dict[int, int] = {}
        self._wide: dict[int, bool] = {}
        self._lengths: dict[int, int | None] = {}
        self._codes: dict[int, bool] = {}
        self._known: dict[int, tuple[Expr, int]] = {}   # big expressions that were converted, by identity: character classes, formats
        self._cycles: dict[tuple, tuple] = {}       # rules that lead to each other and came before, as those of any JSON do, and what they became
        self.single: dict[int, int] = {}            # the nodes of BYTES, by identity
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
        if kind == "cat" or kind == "or":
            self.items.append(node)
            below = self._compound.intersection(key)
            if below:
                self.depth.append(1 + max(map(self.depth.__getitem__, below)))
                if not self._looped.isdisjoint(below):
                    self._looped.add(node)
            else:
                self.depth.append(2)
            self._compound.add(node)
            if kind == "or":
                self._ors.add(node)
            else:
                self.special.add(node)
        elif kind in ("rep", "text", "counted", "but"):
            self.items.append(key[1] if kind == "rep" else node)
            self.depth.append(1 + self.depth[key[1]])
            self._looped.add(node)
            self._compound.add(node)
        else:
            self.items.append(node)
            self.depth.append(1)
            if kind == "byte":
                self.letters.add(node)
                self._shapes[node] = LIGHT
        if not node & 255:
            pause()
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
        """A leaf: `low` >= 1 to `high` times a prefix code; INF: any number."""
        return self._intern(("counted", item, low, high), False, True)

    def cat(self, parts: Iterable[int]) -> int:
        parts = list(parts)
        if EMPTY in parts:
            parts = [part for part in parts if part != EMPTY]
        if len(parts) < 2:
            return parts[0] if parts else EMPTY
        if NEVER in parts:
            return NEVER
        if not self.special.isdisjoint(parts):
            flat: list[int] = []
            for part in parts:
                if part in self.special:
                    flat += self.keys[part][1:]
                else:
                    flat.append(part)
            parts = flat if len(flat) <= CHUNK else parts
        while len(parts) > CHUNK:
            parts = [self._cat(parts[i : i + CHUNK]) for i in range(0, len(parts), CHUNK)]
        return self._cat(parts)

    def _cat(self, parts: list[int]) -> int:
        if len(parts) == 1:
            return parts[0]
        key = "cat", *parts
        return self._ids.get(key) or self._new(key, all(map(self.nullable.__getitem__, parts)), True in map(self.stacked.__getitem__, parts))

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
        others, keys = set(parts), self.keys
        if not self._ors.isdisjoint(others):
            others = {p for part in others for p in (keys[part][1:] if part in self._ors else (part,))}
        letters = self.letters & others
        if len(letters) > 1:
            mask = 0
            for letter in letters:
                mask |= keys[letter][1]
            others -= letters
            others.add(self.byte(mask))
        others.discard(NEVER)
        if EMPTY in others and sum(map(self.nullable.__getitem__, others)) > 1:
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

    def but(self, item: int, words: tuple[bytes, ...]) -> int:
        """Any number of the item but the words, ascending: as rules.But."""
        return self._intern(("but", item, words), not words or words[0] != b"", self.stacked[item])

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
            elif kind == "but":
                found = self.but(parts[0], (b"", *parts[1]))
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
                        left = len(parts) - i
                        rest = (EMPTY if not left else parts[i]) if left < 2 else self._ids.get(("cat", *parts[i:])) or self._cat(parts[i:])
                        arcs.append((self.keys[part][1], rest))
                        break
                    rest = parts[i] if i + 1 == len(parts) else self.cat(parts[i:])
                    arcs += [(mask, self.then(to, rest)) for mask, to in self.linear(part)]
                    if not self.nullable[part]:
                        break
                found = tuple(arcs)
            else:
                found = self._linear_but(*parts) if kind == "but" else ()
            self._linear[node] = found
        return found

    def _linear_but(self, item: int, words: tuple[bytes, ...]) -> tuple[tuple[int, int], ...]:
        rest, below, singles = self.rep(item, 0, None), {}, self.singles(item)
        for word in words:
            if word and singles >> word[0] & 1:
                below.setdefault(word[0], []).append(word[1:])
        others = singles & ~sum([1 << byte for byte in below])
        arcs = [(mask, self.then(to, rest)) for mask, to in self.linear(item) if to != EMPTY]
        return *arcs, *[(others, rest)] * bool(others), *((1 << byte, self.but(item, tuple(tails))) for byte, tails in below.items())

    def singles(self, node: int) -> int:
        """The bytes that it matches alone."""
        found = 0
        for mask, to in self.linear(node):
            found |= mask if to == EMPTY else 0
        return found

    # ---- shapes

    def is_wide(self, node: int) -> bool:
        """Whether more than NARROW bytes occur."""
        found = self._wide.get(node)
        if found is None:
            mask, todo, seen = 0, [node], {node}
            while todo and mask.bit_count() <= NARROW:
                kind, *parts = self.keys[todo.pop()]
                if kind == "byte":
                    mask |= parts[0]
                for part in parts[:1] if kind in ("rep", "but") else parts if kind in ("cat", "or") else ():
                    if part not in seen:
                        seen.add(part)
                        todo.append(part)
            found = self._wide[node] = mask.bit_count() > NARROW
        return found

    def length(self, node: int) -> int | None:
        """The length of its texts, if all have the same."""
        if node not in self._lengths:
            kind, *parts = self.keys[node]
            found: int | None = 1 if kind == "byte" else None if kind == "but" else 0
            if kind == "rep":
                found = self.length(parts[0]) if parts[1] == parts[2] else None
                found = found and found * parts[1]
            for i, part in enumerate(parts) if kind in ("cat", "or") else ():
                one = self.length(part)
                if one is None or kind == "or" and i and one != found:
                    found = None
                    break
                found = found + one if kind == "cat" else one
            self._lengths[node] = found
        return self._lengths[node]

    def is_prefix_code(self, node: int) -> bool:
        """Whether no text begins another, so that a sequence of them falls apart in one way. Never wrongly true."""
        if self.nullable[node]:
            return False
        found = self._codes.get(node)
        if found is None:
            found = self._codes[node] = self.length(node) is not None or self._is_prefix_code(*self.keys[node], node=node)
        return found

    def _is_prefix_code(self, kind: str, *parts: int, node: int) -> bool:
        if kind == "cat":
            return all(map(self.is_prefix_code, parts))
        if kind != "or" or not all(map(self.is_prefix_code, parts)):
            return False
        begins: dict[int | tuple, int] = {}         # by length: the first bytes of all alternatives of that length
        for i, part in enumerate(parts):
            group = self.length(part)
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
            if found == STACKED or node not in self._looped:
                pass
            elif kind in ("rep", "but"):
                item, low, high = parts if kind == "rep" else (parts[0], 0, None)
                wide = self.is_wide(item)
                if self.shape(item) != LIGHT:
                    found = STACKED
                elif high is None:
                    found = (TAIL if wide else LIGHT) if low <= (2 if wide else UNROLLED) else STACKED
                elif high > (1 if wide else UNROLLED):
                    found = STACKED
            elif kind in ("cat", "or"):
                shapes = self._shapes_of(parts) if kind == "cat" else [self.shape(part) for part in parts]
                found = max(shapes) if kind == "or" or max(shapes[:-1]) == LIGHT else STACKED
            self._shapes[node] = found
        return found

    def _shapes_of(self, parts: list[int]) -> list[int]:
        """Of each part of a Cat. Few repeats in front of a wide loop are one piece with it: counted, they would have many ends to go on from."""
        shapes, left = list(map(self._shapes.get, parts)), 0        # most are bytes
        if None in shapes:
            shapes = list(map(self.shape, parts))
        for i in range(len(parts) - 1, -1, -1) if TAIL in shapes and STACKED in shapes else ():
            if shapes[i] == TAIL:
                left = UNROLLED
            elif shapes[i] == STACKED and left:
                item, _, high = self.bounds(parts[i])
                few = high not in (1, None) and high <= left and self.shape(item) == LIGHT
                left, shapes[i] = (left - high, LIGHT) if few else (0, STACKED)
        return shapes

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
        pieces, begin, shapes = [], 0, self._shapes_of(parts)
        for end in [i for i, shape in enumerate(shapes) if shape != LIGHT]:
            if shapes[end] == STACKED:
                pieces += self.text(self.cat(parts[begin:end])), self.cut(parts[end])
            else:
                pieces.append(self.text(self.cat(parts[begin:end + 1])))
            begin = end + 1
        return [*pieces, self.text(self.cat(parts[begin:]))]

    def _cut_repeat(self, item: int, low: int, high: int | None) -> int:
        if self.shape(item) == LIGHT and high is None and low > 1 and self.is_prefix_code(item):
            return self.counted(item, low, INF)
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
                for one in sorted(same, key=lambda one: (-(bounds := self._bounds(one[0]))[2], bounds[1], one)):
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


def _demo() -> None:
    """The pieces of a string in brackets."""
    nodes = Nodes()
    quote, char = nodes.byte(1 << 34), nodes.byte(((1 << 128) - (1 << 32)) & ~(1 << 34))
    whole = nodes.cat([nodes.byte(1 << 40), quote, nodes.rep(char, 0, None), quote, nodes.byte(1 << 41)])

    def show(node: int) -> str:
        kind, *parts = nodes.keys[node]
        if kind == "byte":
            return chr(parts[0].bit_length() - 1) if parts[0].bit_count() == 1 else "."
        return f"«{show(parts[0])}»" if kind == "text" else f"{show(parts[0])}*" if kind == "rep" else "".join(map(show, parts))

    print(f'{show(whole)} is cut into {show(nodes.cut(whole))}')


if __name__ == "__main__":
    _demo()
