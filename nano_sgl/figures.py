"""Figures: an automaton over bytes as text, as it is and compressed, and the tokens that do not fit its edges.

Much of a grammar is no choice: a state that one byte alone leads out of, and where the text may not end. Compressed, the bytes of such states are
part of the edge that leads to them, as in Figure 4 of the SGLang paper (Zheng et al. 2024), whose fourteen states become two:

    0 -{-> 1 -"-> 2 -s-> 3 ... 12 - -> 13 -"-> 14             0 -{"summary": "-> 14

Tokens know nothing of that. A token *straddles* a boundary where it holds bytes that are forced and bytes that are chosen:

    into forced text    `",`     the quote that ends a name is a choice, and the comma behind it is not
    out of it           ` "(`    the quote that begins a name is forced, and the bracket is not

Where text is appended in forced pieces (jump.py, retokenize), such tokens are lost to the model, or what has been said must be tokenised anew.

Names. `Machine`: byte edges by state, and where the text may end. A state is *free* if the text may end there, or if more than one byte leads on; of
all others the one byte is *forced*. `Edge`: one byte of a set, then forced bytes, to a free state (the start is drawn, free or not).

Invariant: the compressed machine takes the same texts: an edge is a path of the other, and forced states lie on edges alone. Cost: a step of
the grammar for each byte of each state, some 0.2 to 2 ms a state. Where it stops: after `limit` states, for grammars have as many as their texts ask
for; what lies behind is not drawn, and the drawing says so. A count beside a state (a bounded repeat) is not drawn: its states are one, with the
edges that any count allows, so that a token shown here may be one that the grammar refuses at some counts.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer

from .rules import show_byte
from .vocab import Vocab

MAX_SHOWN = 6           # tokens of one kind, and
MAX_TARGETS = 8         # states in a line, that are shown
TOY = ['{"', '": "', '": ', '", "', '",', '"}', ' "', ' "(', '":', '["', '"]', "name", "age", "true", " true", "12", "ab"]


def find_vocab(tokenizer: str | None = None) -> tuple[Vocab, str]:
    """(a vocabulary, what it is called): of a tokenizer.json, else of the demo model if that is there, else of a toy."""
    cache = Path(os.environ.get("NANO_SGL_CACHE") or "~/.cache/nano_sgl").expanduser()     # as weights.py, which needs torch, has it
    file = Path(tokenizer) if tokenizer else cache / "demo" / "tokenizer.json"
    if not file.is_file() and not tokenizer:
        words = [bytes([byte]) for byte in range(256)] + [word.encode() for word in TOY]
        return Vocab([*words, None], [len(words)]), f"a toy vocabulary ({file} is not there)"
    vocab = Vocab.from_tokenizer(SimpleNamespace(backend_tokenizer=Tokenizer.from_file(str(file)), eos_token_id=None))
    return vocab, f"{file} ({vocab.size:,})"


@dataclass
class Machine:
    """Byte edges by state, in the order in which the states were found, the first is the start; the states where a text may end."""
    edges: dict[int, dict[int, int]] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)
    whole: bool = True      # nothing was left out

    @property
    def start(self) -> int:
        return next(iter(self.edges))

    def forced(self, state: int, start_is_free: bool = False) -> tuple[bytes, int]:
        """(the bytes that are forced from a state on, the free state behind them)."""
        text, met = bytearray(), {state}
        while not (state in self.ends or len(self.edges[state]) != 1 or start_is_free and state == self.start):
            (byte, state), = self.edges[state].items()
            text.append(byte)
            if state in met:        # of a repeat that was not followed to its end
                break
            met.add(state)
        return bytes(text), state


@dataclass(frozen=True)
class Edge:
    """Of a compressed machine: one byte of a mask, and what is forced behind it."""
    first: int
    forced: bytes
    to: int


def explore(start: int, following: Callable[[int], int], step: Callable[[int, int], int], may_end: Callable[[int], bool], name: Callable[[int], int],
            limit: int) -> Machine:
    """The machine of a grammar. following(state): its bytes, as a mask; step(state, byte): the next state; states of one `name` are one state. Visits
    `limit` of the grammar's own states at most, those of new names first."""
    machine, seen, queue = Machine({name(start): {}}), {start}, deque([start])
    while queue and limit:
        state, limit = queue.popleft(), limit - 1
        edges = machine.edges[name(state)]
        if may_end(state):
            machine.ends.add(name(state))
        for byte in bytes_of(following(state)):
            to = step(state, byte)
            is_new = name(to) not in machine.edges
            machine.edges.setdefault(name(to), {})
            edges[byte] = name(to)
            if to not in seen:
                seen.add(to)
                queue.appendleft(to) if is_new else queue.append(to)
    machine.whole = not queue
    return machine


def compress(machine: Machine) -> dict[int, list[Edge]]:
    """Edges by free state."""
    found, work = {}, [machine.start]
    while work:
        state = work.pop()
        if state in found:
            continue
        sets: dict[tuple[bytes, int], int] = {}
        for byte, to in machine.edges[state].items():
            behind = machine.forced(to, start_is_free=True)
            sets[behind] = sets.get(behind, 0) | 1 << byte
        found[state] = [Edge(mask, forced, to) for (forced, to), mask in sets.items()]
        work += [edge.to for edge in reversed(found[state])]
    return {state: found[state] for state in machine.edges if state in found}


def straddling(machine: Machine, tokens: Iterable[bytes | None]) -> dict[tuple[str, bytes], list[bytes]]:
    """("into", forced text) and ("out of", forced text) -> the tokens that hold bytes of it and chosen ones before it, or behind."""
    by_first: dict[int, list[bytes]] = {}
    for token in tokens:
        if token:
            by_first.setdefault(token[0], []).append(token)
    found: dict[tuple[str, bytes], dict[bytes, None]] = {}
    text = {state: machine.forced(state)[0] for state in machine.edges}
    whole = {}          # of each forced state, the whole text that it is in
    for state in sorted(text, key=lambda at: -len(text[at])):
        whole.setdefault(state, text[state])
        for to in machine.edges[state].values():
            if text[state] and text[to] and to not in whole:
                whole[to] = whole[state]
    for state, edges in machine.edges.items():
        for byte in edges:
            for token in by_first.get(byte, ()):
                for kind, at in _crossings(machine, state, token, text):
                    found.setdefault((kind, whole[at]), {})[token] = None
    return {key: list(found[key]) for key in sorted(found, key=lambda key: (key[0], key[1]))}


def _crossings(machine: Machine, state: int, token: bytes, text: dict[int, bytes]) -> Iterator[tuple[str, int]]:
    """Where a token that begins in a state crosses a boundary: ("into", the forced state) or ("out of", the forced state that it leaves)."""
    path = [state]
    for byte in token:
        state = machine.edges[state].get(byte)
        if state is None:
            return
        path.append(state)
    for before, after in zip(path, path[1:-1]):
        if text[after] and not text[before]:
            yield "into", after
        elif text[before] and not text[after]:
            yield "out of", before


# ------------------------------------------------------------------------------------------------------------------------ as text

def bytes_of(mask: int) -> Iterator[int]:
    """The bytes of a mask."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def show_set(mask: int) -> str:
    """A set of bytes, as in a regex."""
    runs: list[list[int]] = []
    for byte in bytes_of(mask):
        if runs and runs[-1][1] == byte - 1:
            runs[-1][1] = byte
        else:
            runs.append([byte, byte])
    return "[" + "".join(show_byte(a) if a == b else show_byte(a) + "-" * (b > a + 1) + show_byte(b) for a, b in runs) + "]"


def quoted(text: bytes) -> str:
    """Bytes as people read them."""
    return f"`{text.decode(errors='backslashreplace')}`".replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


def _label(edge: Edge) -> str:
    if edge.first.bit_count() == 1:
        return quoted(bytes([edge.first.bit_length() - 1]) + edge.forced)
    return show_set(edge.first) + (" " + quoted(edge.forced) if edge.forced else "")


def lines_of(machine: Machine, edges: dict[int, list[Edge]], most: int) -> list[str]:
    """A line for each state and its edges; `most` of them."""
    number = {state: i for i, state in enumerate(machine.edges)}
    made = []
    for state, leading in list(edges.items())[:most]:
        words = [f"{_label(edge)} -> {number[edge.to]}" for edge in leading[:MAX_TARGETS]]
        words += [f"{len(leading) - MAX_TARGETS} more"] * (len(leading) > MAX_TARGETS)
        made.append(f"{number[state]:6}{'*' if state in machine.ends else ' '}  {'   '.join(words)}")
    return made + [f"        ... {len(edges) - most} more states"] * (len(edges) > most)


def draw(machine: Machine, tokens: Iterable[bytes | None] = (), vocabulary: str = "", most: int = 40) -> str:
    """The machine as it is, compressed, and the tokens that straddle boundaries. `most`: states that are drawn."""
    plain = {}
    for state, edges in machine.edges.items():
        sets: dict[int, int] = {}
        for byte, to in edges.items():
            sets[to] = sets.get(to, 0) | 1 << byte
        plain[state] = [Edge(mask, b"", to) for to, mask in sets.items()]
    small = compress(machine)
    at_least = "" if machine.whole else "at least "
    made = [f"{at_least}{len(machine.edges)} states over bytes (*: the text may end)", *lines_of(machine, plain, most), "",
            f"compressed: {at_least}{len(small)} states; behind a choice stands what it forces", *lines_of(machine, small, most)]
    kinds = straddling(machine, tokens)
    if vocabulary:
        made += ["", f"tokens of {vocabulary} that straddle a boundary" + ("" if kinds else ": none")]
    for (kind, forced), found in kinds.items():
        shown = " ".join(quoted(token) for token in sorted(found, key=lambda token: (len(token), token))[:MAX_SHOWN])
        made.append(f"  {kind:6} {quoted(forced)}: {shown}" + (f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""))
    return "\n".join(made)


def _demo() -> None:
    """Figure 4 of the paper, and what comes of it where text that is not forced follows."""
    head, tail = b'{"summary": "', b'", "'
    chain = lambda first, some: {first + i: {byte: first + i + 1} for i, byte in enumerate(some)}  # noqa: E731
    print(draw(Machine({**chain(0, head), 13: {}}, {13})))
    letters = {byte: 13 for byte in b"abc"}
    machine = Machine({**chain(0, head), 13: {**letters, ord('"'): 14}, **chain(14, tail[1:]), 17: {}}, {17})
    print("\n" + draw(machine, [b'{"', b'"ab', b'"', b'a",', b'",', b': "'], "six tokens"))


if __name__ == "__main__":
    _demo()
