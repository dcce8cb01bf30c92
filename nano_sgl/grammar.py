"""Grammar: which tokens may come next, as a row of a table.

What the output may be is a set of rules over bytes (rules.py); a model emits tokens, each of which may begin or end in the middle of a word, a
number or a character. So the rules are run as one automaton over bytes, without a lexer, and a token is allowed if after its bytes *some*
completion exists. A state is the set of ways in which the text so far can be read, each a place in a piece of the rules (automaton.py)
and a stack of what comes after the piece:

    rules    list ::= "[" (list ("," list)*)? "]"           text  [[],[
    state 2  = { at "[", and below it  ("," list)* "]"  ("," list)* "]"     --"["-->  a state with one frame more
                 at "]", and below it  ("," list)* "]" }                    --"]"-->  4, after [[]     --"]]"-->  6, accepting

States are interned: a state is an integer, rolling back is forgetting one, and a request's whole memory of its grammar is that integer. The automaton
is deterministic and lazy: only states that texts reach are made, each when it is first met.

A *row* is what a token leads to, for all tokens. Most of it is a *template*: what becomes of the places in pieces, kept per vocabulary as a map
token -> class. The rest are *overrides*: the few tokens that leave a piece, read on along the stack.

    row of a state    map  (int16 [V], shared)  and  vec (class -> value)     for 49,000 tokens inside a string
                      over (sorted tokens -> value)                           for the 200 with a quote in them
    value             one or more lines (min, max, next state, what becomes of the count)

The count. A bounded repeat of characters, `[^"]{0,4096}`, is one state and not 4,096: the state says where in the repeat, and a number beside it how
many characters were begun. A line of a value holds while min <= count <= max. One repeat of a state uses the number (REGISTER in its
place); others write theirs into the state.

Ambiguity. Readings multiply, so what others cover is left out (readings.py): of x{0,7} and x{0,8} over equal stacks the first, of two places in one
repeat the one that has come further, of two conditions the narrower. A row follows each position once, with one stack for all ways to come there.

Invariants. Every state has a completion over the bytes that tokens have. States, rows, maps and values never change and only grow, in one set of
Tables for all grammars of a vocabulary, so that a batch of different grammars is one gather. What has the same top and was pushed at the same time
is one stack.

Cost: a row that exists one list index; a new one some 0.1 ms, 1 to 2 if a large template is new, too (rows.py); by numpy 0.3, 3; hundreds if words of
any length may be split anywhere, `(\\w{1,20} ?){1,9}`. Where it stops: tables are given back only all at once (`Shared.full`: compile begins new
ones, the old grammars keep theirs); a grammar that can be read in more than MAX_READINGS ways at once, or takes MAX_ROW_S for a row, raises
GrammarError when it gets there; a token's text is taken to be its bytes, whatever stands before it.
Source: Tomita's graph-structured stacks (1985); tables over tokens after Willard and Louf (2023); tokens that need no look at the stack after
XGrammar (Dong et al. 2024).
"""

from __future__ import annotations

import argparse
import hashlib
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from . import figures, json_schema, readings, schema, structural_tag, tables  # noqa: F401 (two of them register themselves)
from .automaton import UNKNOWN, Automaton, Template
from .nodes import DONE, NEVER
from .normal_form import normalize
from .readings import MAX_READINGS, REGISTER
from .rows import RowBuilder
from .rules import Byte, Cat, GrammarError, Ref, Repeat, Rules, tick, time_limit
from .tables import ADD_SHIFT, COUNT_SHIFT, INDEX, KEEP, MORE, Row, Tables, join_maps
from .vocab import Vocab
from .waves import Places

MAX_STEPS = 20_000              # that a grammar remembers
MAX_PATTERNS = 10_000           # of overrides, that are remembered
MAX_FORCED = 1024               # bytes that `forced` looks ahead, and readings that it follows
MAX_ROW_S = 3.0                 # of a row: who waits for one waits with all that share its tables
MAX_BUILD_S, USUAL_ROW_S = 10.0, 0.005  # CPU seconds of all rows of a grammar, beside what rows usually take


class Shared:
    """What the grammars of a vocabulary have in common. One lock guards all that is written; rows that exist are read without it."""

    def __init__(self, vocab: Vocab):
        self.automaton, self.tables, self.lock = Automaton(vocab), Tables(vocab), threading.RLock()
        self._maps: dict[tuple[int, ...], tuple[int, list[tuple[int, ...]]]] = {}
        self._patterns: dict[tuple[int, bytes], list[int]] = {}     # overrides of rows -> [bytes that they have taken, the map instead of them, -1]

    @property
    def full(self) -> bool:
        """Whether it is time to begin anew: `compile` does so for the next grammar; the old ones keep these."""
        automaton = self.automaton
        return self.tables.nbytes > tables.MAX_TABLE_BYTES // 2 or len(automaton.members) > 20_000 or len(automaton.nodes.keys) > 1_000_000

    def map_of(self, templates: list[Template]) -> tuple[int, list[tuple[int, ...]]]:
        """(map, for each of its classes the class in each template, 0: not in it)."""
        key = tuple(t.number for t in templates)
        if key not in self._maps:
            (classes, sizes), split = templates[0].map, [(cls,) for cls in range(len(templates[0].classes) + 1)]
            for template in templates[1:]:
                width = len(template.classes) + 1
                classes, sizes, keys = join_maps(classes, template.map[0], len(split), width, self.tables.vocab.walker)
                split = [(*split[key // width], key % width) for key in keys]
            self._maps[key] = self.tables.add_map(classes, sizes), split
        return self._maps[key]

    def map_with(self, which: int, num_classes: int, tokens: np.ndarray, lines: np.ndarray, at_once: bool) -> tuple[int, np.ndarray] | None:
        """A map with some of its tokens int32 [n], ascending, in classes of their own, behind its own; and of each of these the line. lines: of each
        token. Behind another count of a repeat of words, or another key, a row overrides the same tokens, and has one line for the same ones. None,
        as long as all rows with these overrides have taken less memory than the map would, unless it is wanted at once; or if it has no room."""
        _, first, inverse = np.unique(lines, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int32)
        rank[order := np.argsort(first)] = np.arange(len(first))
        groups = rank[inverse]
        if len(self._patterns) > MAX_PATTERNS:
            self._patterns.clear()
        known = self._patterns.setdefault((which, hashlib.blake2b(tokens.tobytes() + groups.tobytes(), digest_size=16).digest()), [0, -1])
        known[0] += tokens.nbytes + lines.nbytes
        if known[1] < 0:
            if known[0] < 2 * self.tables.vocab.size and not at_once or num_classes + len(first) > tables.MAX_CLASSES:
                return None
            classes = self.tables.maps[which].astype(np.int32)
            classes[tokens] = num_classes + groups
            known[1] = self.tables.add_map(classes)
        return known[1], lines[first[order]]


# ------------------------------------------------------------------------------------------------------------------------- grammars

def compile(kind: str, text, vocab: Vocab, *, whitespace: str = "fixed", deadline: float | None = None, **options) -> Grammar:
    """A grammar of any kind that schema.py knows. Raises GrammarError, which names what is refused and where; so it does for what is not done by
    `deadline` (time.monotonic)."""
    with time_limit(deadline):
        return compile_rules(schema.rules(kind, text, whitespace=whitespace, **options), vocab)


def compile_rules(rules: Rules, vocab: Vocab) -> Grammar:
    """A grammar from rules. No row is built yet. Raises GrammarError: too large, or nothing matches it."""
    shared = vocab.shared
    if shared is None or shared.full:
        shared = vocab.shared = Shared(vocab)
    with shared.lock, time_limit(None, shared.lock):
        return Grammar(shared, rules)


class Beginnings:
    """What the rules of a grammar say of a frame. A rule's number is that of its text, so all grammars of an automaton share what was found."""

    def __init__(self, automaton: Automaton, rules: dict[int, int]):
        self._automaton, self._nodes, self._rules = automaton, automaton.nodes, rules
        self._cut, self._first = automaton.cuts, automaton.firsts               # rule -> its node, cut into pieces; node -> what `_firsts` says
        self._began, self._loop_ids = automaton.begun, automaton.loop_ids       # leaf -> (state at its beginning, loop); loops

    def of(self, frame: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """(state of the automaton, loop, frames that lie below, the lowest first) for each piece that it may begin with."""
        return [(*(self._began.get(leaf) or self._begin(leaf)), pushes) for leaf, pushes in self._first.get(frame) or self._firsts(frame)]

    def _firsts(self, node: int) -> list[tuple[int, tuple[int, ...]]]:
        """(leaf, frames that lie below it, the lowest first) for each leaf that the node may begin with. Without recursion: chains are long."""
        work, first = [(node, self._heads(node))], self._first
        while work:
            tick()
            top, heads = work[-1]
            needs = [] if top in first else [(part, self._heads(part)) for part in heads if part not in first]
            if needs:
                work += needs
            else:
                work.pop()
                if top not in first:
                    first[top] = self._firsts_of(top, heads)
        return first[node]

    def _heads(self, node: int) -> list[int]:
        """The parts whose firsts are the node's."""
        kind, *parts = self._nodes.keys[node]
        if kind == "ref":
            if parts[0] not in self._cut:
                self._cut[parts[0]] = self._nodes.cut(self._rules.get(parts[0], NEVER))
            return [self._cut[parts[0]]]
        if kind == "cat":
            stop = next((i for i, part in enumerate(parts) if not self._nodes.nullable[part]), len(parts))
            return parts[: stop + 1]
        return parts if kind == "or" else parts[:1] if kind == "rep" else []

    def _firsts_of(self, node: int, heads: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        kind, *parts = self._nodes.keys[node]
        if kind in ("text", "counted"):
            return [(node, ())]
        if kind == "ref":
            return self._first[heads[0]]
        found = {}
        for i, part in enumerate(heads):
            rest = ()
            if kind == "cat" and i + 1 < len(parts):
                rest = (self._nodes.cat(parts[i + 1 :]),)
            elif kind == "rep" and parts[2] != 1:
                rest = (self._nodes.rep(part, max(parts[1] - 1, 0), None if parts[2] is None else parts[2] - 1),)
            found |= dict.fromkeys([(leaf, rest + frames) for leaf, frames in self._first[part]] if rest else self._first[part])
        if len(found) > MAX_READINGS:
            raise GrammarError(f"the grammar is too ambiguous: more than {MAX_READINGS} ways to begin", "grammar")
        return list(found)

    def _begin(self, leaf: int) -> tuple[int, int]:
        kind, node, *bounds = self._nodes.keys[leaf]
        if kind == "text":
            found = self._automaton.state((node,)), 0
        else:
            key = self._automaton.state((self._nodes.rep(node, 0, None),)), *bounds
            if key not in self._loop_ids:
                self._loop_ids[key] = len(self._automaton.loops)
                self._automaton.loops.append(key)
            found = key[0], self._loop_ids[key]
        self._began[leaf] = found
        return found


class Grammar:
    """An automaton over tokens. States are integers: index of the row in `tables`, and a count (`split`). `start` is the first.

    Made by `compile`. All methods may be called from any thread. Those that may build rows raise GrammarError if the grammar outgrows its bounds.
    """

    def __init__(self, shared: Shared, rules: Rules, normal: tuple | None = None):
        self.vocab, self.tables, self.shared = shared.tables.vocab, shared.tables, shared
        self._automaton, self._nodes = shared.automaton, shared.automaton.nodes
        self._rules, start, *closing = normal or normalize(self._nodes, rules)
        if start == NEVER:
            why = "a rule that leads only to itself, ^ or $ with text around it, a class of no characters, half of a surrogate pair"
            raise GrammarError(f"the grammar matches nothing that the model's tokens can write ({why})", "grammar", rules.start)
        self.readings = readings.make(shared.automaton, self.tables, shared.lock, Beginnings(shared.automaton, self._rules).of)
        self.places_below, self._build_s = Places(self.readings), 0.0
        self._masks: dict[int, np.ndarray] = {}
        self._steps: dict[tuple[int, int], int | None] = {}         # (state, token) -> state, of those that were asked for
        done = self.readings.stack(frozenset((DONE,)))
        # Of a model that thinks first: what it must write once it has thought enough, and the frame that lies lowest as long as it thinks
        self.closing = Grammar(shared, Rules(rules.rules, rules.closing), (self._rules, *closing)) if closing else None
        self.start = self._pack(self.readings.closure(self.readings.push(self._nodes.cut(start), done)))
        self._lowest: dict[int, frozenset] = {done: frozenset((DONE,))}
        self._thought = self._lowest_frames(self.start & INDEX) if self.closing else frozenset()

    # ---- what a reader came for

    @property
    def places(self) -> int:
        """What it holds of memory beside its tables: some 450 bytes each."""
        return self.readings.places + (self.closing.places if self.closing else 0)

    def has(self, state: int) -> bool:
        """Whether it is one of its own states; `closing` has others."""
        return self.readings.has(state & INDEX)

    @staticmethod
    def split(state: int) -> tuple[int, int]:
        """(index of the row, count)."""
        return state & INDEX, state >> COUNT_SHIFT

    def row(self, state: int) -> Row:
        """The state's row; built if it is not there."""
        index = state & INDEX
        row = self.tables.rows[index]
        if row is None:
            with self.shared.lock:
                row = self.tables.rows[index]
                if row is None:
                    if self._build_s > MAX_BUILD_S:
                        raise GrammarError(f"the grammar is too ambiguous: its states have taken more than {MAX_BUILD_S:g} s", "grammar")
                    began, now = time.thread_time(), time.monotonic()
                    try:
                        with time_limit(now + MAX_ROW_S):
                            row = RowBuilder(self, index).build()
                    finally:
                        if time.monotonic() > now + USUAL_ROW_S:        # else it took no longer; to ask a thread for its time takes long
                            self._build_s += max(time.thread_time() - began - USUAL_ROW_S, 0.0)
                    if self.thinks(index):
                        self.tables.exits.append(np.array([[index, self.closing.start & INDEX]]))
                    self.tables.add_row(index, row)
        return row

    def thinks(self, state: int) -> bool:
        """Whether a model that thinks first still does, and between two characters could close that: with what `closing` begins with."""
        if self.closing is None:
            return False
        with self.shared.lock:
            if self._lowest_frames(state & INDEX) != self._thought:
                return False
            return bool(self._alive(self._unpack(state)) & self.closing._alive(self.closing._unpack(self.closing.start)))

    def mask(self, state: int) -> np.ndarray:
        """int32 [ceil(V / 32)]: bit t % 32 of word t // 32 is set if token t may come next. End ids are allowed where the text may end."""
        mask = self._masks.get(state)
        if mask is None:
            row, count = self.row(state), state >> COUNT_SHIFT
            allowed = np.zeros((self.vocab.size + 31) // 32 * 32, bool)
            allowed[: self.vocab.size] = (self.tables.allowed(row.vec, count) > 0)[self.tables.maps[row.map]]
            allowed[row.over_tokens] |= self.tables.allowed(row.over_values, count) > 0
            if self.is_accepting(state):
                allowed[list(self.vocab.end_ids)] = True
            mask = np.packbits(allowed, bitorder="little").view(np.int32)
            if len(self._masks) >= 512:
                self._masks.clear()
            self._masks[state] = mask
        return mask

    def step(self, state: int, token: int) -> int | None:
        """The state after a token; None if it is not allowed, or is no text (an end id)."""
        key = state, token
        found = self._steps.get(key, UNKNOWN)
        if found == UNKNOWN:
            if len(self._steps) >= MAX_STEPS:
                self._steps.clear()
            found = self._steps[key] = self._step(state, token)
        return found

    def _step(self, state: int, token: int) -> int | None:
        row, count = self.row(state), state >> COUNT_SHIFT
        if not 0 <= token < self.vocab.size:
            return None
        at = row.over_tokens.searchsorted(token)
        if at < len(row.over_tokens) and row.over_tokens[at] == token:
            value = int(row.over_values[at])
        else:
            value = int(row.vec[self.tables.maps[row.map][token]])
        lines = self.tables.lines.whole
        while True:
            low, high, to, op = lines[value].tolist()
            if low <= count <= high:
                return to | ((count if op & KEEP else 0) + (op >> ADD_SHIFT)) << COUNT_SHIFT
            if not op & MORE:
                return None
            value += 1

    def is_accepting(self, state: int) -> bool:
        """Whether the text may end here."""
        return int(self.tables.states.array[state & INDEX, 4]) <= state >> COUNT_SHIFT

    def forced(self, state: int) -> tuple[bytes, int]:
        """(the bytes that must follow, up to a choice or a possible end, state after them); at most MAX_FORCED."""
        with self.shared.lock:
            now, text, readings = self._unpack(state), bytearray(), 0
            if self.readings.native:
                found, now = self.readings.along(now, None, MAX_FORCED, 4 * MAX_FORCED)
                return found, self._pack(now) if found else state
            while len(text) < MAX_FORCED and readings < 4 * MAX_FORCED and not self._may_end(now):
                readings += sum(1 + len(self.readings.frames(stack)) for _, stack, _, _ in self.readings.at(now)[1])
                mask = self._alive(now)
                if mask.bit_count() != 1:
                    break
                text.append(mask.bit_length() - 1)
                now = self._advance(now, text[-1])
            return bytes(text), self._pack(now) if text else state

    def step_bytes(self, state: int, text: bytes) -> int | None:
        """The state after some bytes, None if no completion begins so."""
        with self.shared.lock:
            now = self._unpack(state)
            if self.readings.native:
                _, now = self.readings.along(now, bytes(text), len(text), 0)
                return None if now < 0 else self._pack(now)
            for byte in text:
                now = self._advance(now, byte)
                if now is None:
                    return None
            return self._pack(now)

    def edges(self, state: int) -> list[tuple[int, int]]:
        """(next state, number of tokens that lead there), the most likely first, if all tokens are equally so."""
        row, count, tables = self.row(state), state >> COUNT_SHIFT, self.tables
        sizes = tables.class_sizes[row.map].copy()
        np.subtract.at(sizes, tables.maps[row.map][row.over_tokens], 1)
        found: dict[int, int] = {}
        for values, numbers in ((row.vec, sizes), (row.over_values, np.ones(len(row.over_values), np.int64))):
            for line, number in zip(tables.allowed(values, count).tolist(), numbers.tolist()):
                if line and number:
                    _, _, to, op = tables.lines.array[line].tolist()
                    to |= ((count if op & KEEP else 0) + (op >> ADD_SHIFT)) << COUNT_SHIFT
                    found[to] = found.get(to, 0) + number
        return sorted(found.items(), key=lambda item: -item[1])

    # ---- stacks

    def _lowest_frames(self, index: int) -> frozenset:
        """What comes last before the end, in the readings of a state; DONE, where they are at their last."""
        lowest, stacks = self._lowest, {config[1] for config in self.readings.configs(index)}
        work = list(stacks)
        while work:
            stack = work[-1]
            needs = [below for frame in self.readings.frames(stack) if frame != DONE and (below := frame[1]) not in lowest]
            if needs:
                work += needs
            else:
                work.pop()
                found = (frozenset((frame[0],)) if lowest[frame[1]] == {DONE} else lowest[frame[1]] for frame in self.readings.frames(stack)
                         if frame != DONE)
                lowest.setdefault(stack, frozenset().union(*found, {DONE} if DONE in self.readings.frames(stack) else ()))
        return frozenset().union(*map(lowest.__getitem__, stacks))

    # ---- byte by byte

    def _pack(self, which: int) -> int:
        """The state of a set whose counts are all known."""
        index, _, add = self.readings.state(which)
        return index | add << COUNT_SHIFT

    def _unpack(self, state: int) -> int:
        """A state as a set whose counts are all known."""
        index, count = self.split(state)
        may_end = int(self.tables.states.array[index, 4]) == 0
        return self.readings.set(may_end, [(*c[:3], count if c[3] == REGISTER else c[3]) for c in self.readings.configs(index)])

    def _waiting(self, which: int) -> list[tuple[int, int, int, int]]:
        """The configurations that may read a byte, those behind a counted repeat that may end here included."""
        readings, configs = self.readings, self.readings.at(which)[1]
        waiting = list(configs)
        for q, stack, loop, count in configs:
            if loop and readings.between(q, loop, count):
                waiting += readings.at(readings.closure(stack))[1]
        return [c for c in waiting if not c[2] or not (c[0] == readings.loops[c[2]][0] and c[3] >= readings.loops[c[2]][2])]

    def _may_end(self, which: int) -> bool:
        readings, (may_end, configs) = self.readings, self.readings.at(which)
        return may_end or any(readings.between(q, loop, count) and readings.at(readings.closure(stack))[0] for q, stack, loop, count in configs)

    def _alive(self, which: int) -> int:
        mask = 0
        for config in self._waiting(which):
            self._automaton.expand(config[0])
            mask |= self._automaton.alive[config[0]]
        return mask

    def _advance(self, which: int, byte: int) -> int | None:
        may_end, configs = False, []
        for q, stack, loop, count in self._waiting(which):
            to = self._automaton.moves(q).get(byte)
            if to is None:
                continue
            if loop:
                configs.append((to, stack, loop, count + (q == self.readings.loops[loop][0])))
                continue
            if self._automaton.goes_on[to]:
                configs.append((to, stack, 0, 0))
            if self._automaton.accepts[to]:
                end, more = self.readings.at(self.readings.closure(stack))
                may_end, configs = may_end or end, configs + list(more)
        return self.readings.set(may_end, configs) if configs or may_end else None


def _demo() -> None:
    """The essay's lists: the states that a text meets, and what may follow each."""
    one = lambda text: Byte(1 << ord(text))  # noqa: E731
    item = Cat((Ref("list"), Repeat(Cat((one(","), Ref("list"))), 0, None)))
    rules = Rules({"list": Cat((one("["), Repeat(item, 0, 1), one("]")))}, "list")
    vocab = Vocab([b"[", b"]", b",", b"],", b",[", b"[[", b"]]", b",,", b"],[", None], end_ids=[9])
    grammar = compile_rules(rules, vocab)
    state, text = grammar.start, b""
    print('list ::= "[" (list ("," list)*)? "]"')
    for token in (5, 1, 4, 6, 9):
        mask = grammar.mask(state)
        allowed = [t for t in range(vocab.size) if mask[t // 32] >> t % 32 & 1]
        names = " ".join((vocab.tokens[t] or b"<end>").decode() for t in allowed)
        forced, _ = grammar.forced(state)
        print(f"{text.decode():8s} state {state}: {len(grammar.readings.configs(state))} readings, {names:22s} mask {mask[0]:#06x} "
              f"forced {forced.decode()!r}")
        if token == 9:
            break
        state, text = grammar.step(state, token), text + vocab.tokens[token]
    built = sum(row is not None for row in grammar.tables.rows)
    print(f"{built} rows, {grammar.tables.nbytes} bytes of tables; accepting: {grammar.is_accepting(state)}")


def _main(argv: Sequence[str] | None = None) -> None:
    """Draw a grammar's automaton over bytes; without one, the demo."""
    parser = argparse.ArgumentParser(description=_main.__doc__)
    parser.add_argument("text", nargs="?", help="a JSON schema, rules (with ::=), or a regex; none: a demo")
    parser.add_argument("--kind", choices=("json_schema", "ebnf", "regex"), help="how to read it, if not as it looks")
    parser.add_argument("--layout", default="fixed", choices=("fixed", "compact", "flexible"), help="of JSON")
    parser.add_argument("--tokenizer", help="a tokenizer.json, whose tokens are looked at; by default the demo model's")
    parser.add_argument("--states", type=int, default=40, help="to draw at most (40)")
    args = parser.parse_args(argv)
    if args.text is None:
        return _demo()
    is_object = args.text.lstrip()[:1] == "{" and args.text.lstrip("{ \t\n")[:1] in ('"', "}")
    kind = args.kind or ("json_schema" if is_object else "ebnf" if "::=" in args.text else "regex")
    vocab, name = figures.find_vocab(args.tokenizer)
    try:
        made = compile(kind, args.text, vocab, whitespace=args.layout)
    except GrammarError as error:
        parser.error(f"{kind}: {error}")
    following = lambda state: made._alive(made._unpack(state))  # noqa: E731
    machine = figures.explore(made.start, following, lambda state, byte: made.step_bytes(state, bytes([byte])), made.is_accepting,
                              lambda state: state & INDEX, limit=50 * args.states)
    print(f"{kind} {args.text}\n\n{figures.draw(machine, vocab.tokens, name, args.states)}")
    if any(config[3] == REGISTER for index in machine.edges for config in made.readings.configs(index)):
        print("\nA state that counts the characters of a bounded repeat is drawn as one: its edges, and its end, hold for some counts only.")


if __name__ == "__main__":
    _main()
