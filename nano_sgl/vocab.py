"""Vocab: which bytes every token stands for, and all tokens as one tree of bytes.

A grammar speaks of bytes, a model of tokens. A tokenizer's own spelling of its tokens hides the bytes in three ways, and which one it is
says the *decoder*, since that is what makes the text of a reply:

    byte-level BPE        "Ġthe"  the first byte of each pair of letters was renamed to a printable one (GPT-2's table)    b" the"
    byte fallback         "▁the", "<0xE2>"   a blank is spelled ▁, and bytes without a token of their own are spelled out    b" the", b"\\xe2"
    plain                 "the"   what is written is what it means                                                          b"the"

Special tokens are no text: they mean nothing to a grammar, and only the ids that end a reply are ever allowed. What makes a token special is
the tokenizer's list of added tokens (`special: true`), not the handful that have names. Bytes may lack a token; a grammar finds that out alone.

The tree, over the tokens in lexicographic order. Nodes are numbered by depth, then by text, so that a level and the children of a node are
both one range of numbers; the tokens at and below a node are one range of the order, those at the node itself its beginning:

    order   0 "a"  1 "ab"  2 "abc"  3 "b"          node  byte  child0 kids   first own  end
                                                   0     -     1      2      0     0    4
             0 --a-- 1 --b-- 3 --c-- 4             1     a     3      1      0     1    3
              `--b-- 2                             2     b     -      0      3     1    4

A set of nodes grows into the set of its children by arithmetic on these columns, whole levels at a time: that is how grammar.py reads a
vocabulary, since a Python step for each of 50,000 tokens would take longer than the model.

Cost: 0.3 s for 50,000 tokens, and 60 bytes a node, of which there are two a token. Where it stops: decoders that spell a token by its neighbours
(WordPiece, BPE with end-of-word marks) are refused, and so is none at all, which joins tokens with blanks. A decoder that drops the blank in
front of a reply (Llama 2's Strip) is taken to keep it: a grammar whose text begins with a blank sees one more than the reader.
Source: the tree of Fredkin (1960); GPT-2's table (Radford et al. 2019, encoder.py); ▁ and <0xHH> are SentencePiece's (Kudo and Richardson 2018).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from .rules import GrammarError

SPACE = "\u2581"
MAX_TOKEN = 4096                # bytes
FAR = 2048                      # tokens that begin with a byte


class Vocab:
    """The tokens of a vocabulary as bytes, and their tree.

    `size` V, ids are 0..V-1; `tokens[id]` its bytes, None if it is no text; `end_ids` the ids that may end a text, sorted. `order` int32: the ids of
    the tokens that are text, sorted by their bytes. The tree's columns, int32 [nodes]: `child0`, `kids` the children's range of nodes; `first`,
    `end` the range of `order` at and below the node, `own` how many of them are the node itself; `parent`; `byte` uint8, the last byte.
    `levels`: where each depth's nodes begin; `by_byte` int32 the nodes sorted by byte, those of byte b from `byte_starts[b]`; `node_of` int32 [V] the
    node of each token, the number of nodes for what is no text; `alphabet` the bytes that tokens have, as a mask, and `far` those that many begin
    with. Nothing changes after construction. `lists` (child0, kids, first, end) and `byte_string` are for short walks, which arrays are slow at.
    """

    def __init__(self, tokens: Sequence[bytes | None], end_ids: Iterable[int] = ()):
        """A token without a byte counts as no text (it would never bring one to its end), and so does an absurdly long one; so do ends."""
        self.size, self.end_ids = len(tokens), tuple(sorted({i for i in end_ids if 0 <= i < len(tokens)}))
        ends = set(self.end_ids)
        self.tokens = [token if token and len(token) < MAX_TOKEN and i not in ends else None for i, token in enumerate(tokens)]
        self._build()
        self.shared = None                          # what grammars over this vocabulary have in common: grammar.py's
        self.encode = None                          # text -> ids, as the tokenizer writes it, if there is one
        self.walker = None                          # follows a state down the whole tree, faster than numpy: `native.TrieWalker`, or None

    @classmethod
    def from_tokenizer(cls, tokenizer, end_ids: Iterable[int] | None = None, size: int | None = None) -> Vocab:
        """Of a fast tokenizer of `transformers`. `end_ids` None: its own end of text; `size`: so many ids there are, whatever the tokenizer knows:
        those that it lacks are no text, those beyond (of a model smaller than its tokenizer) are left out.

        Raises GrammarError if its decoder spells tokens by their neighbours."""
        backend = tokenizer.backend_tokenizer
        spell = _speller(json.loads(backend.to_str())["decoder"])
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        ids = backend.get_vocab(with_added_tokens=True)
        tokens: list[bytes | None] = [None] * (max([i + 1 for i in ids.values()], default=0) if size is None else size)
        for token, i in ids.items():
            if i < len(tokens) and i not in special:
                tokens[i] = spell(token)
        if end_ids is None:
            end_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        made = cls(tokens, end_ids)
        made.encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        return made

    def decode(self, ids: Iterable[int]) -> bytes:
        """The text of some tokens; those that are no text are left out."""
        return b"".join(self.tokens[i] or b"" for i in ids)

    def _build(self) -> None:
        """Level by level: the tokens that are longer than `depth`, in order, fall into one new node per (parent, next byte)."""
        order = sorted((i for i, token in enumerate(self.tokens) if token), key=self.tokens.__getitem__)
        texts = [self.tokens[i] for i in order]
        lens = np.array([len(text) for text in texts], np.int64)
        flat = np.frombuffer(b"".join(texts), np.uint8)
        offsets = np.cumsum(lens) - lens
        at, parent = np.arange(len(order)), np.zeros(len(order), np.int64)    # the tokens that go on, and the node that each has reached
        columns = [(np.zeros(1, np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(order)]), np.zeros(1, np.int64))]
        base, depth = 1, 0
        while at.size:
            byte = flat[offsets[at] + depth]
            new = np.ones(at.size, bool)
            new[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            node, starts = np.cumsum(new) - 1, np.flatnonzero(new)
            ends_here = lens[at] == depth + 1
            columns.append((byte[starts], parent[starts], at[starts], at[starts] + np.diff(np.append(starts, at.size)),
                            np.bincount(node[ends_here], minlength=starts.size)))
            at, parent, base, depth = at[~ends_here], (node + base)[~ends_here], base + starts.size, depth + 1
        byte, above, first, end, own = (np.concatenate(column) for column in zip(*columns))
        self.kids = np.bincount(above[1:], minlength=base).astype(np.int32)
        self.child0 = (1 + np.cumsum(self.kids) - self.kids).astype(np.int32)
        self.byte, self.order = byte, np.array(order, np.int32)
        self.parent, self.first, self.end, self.own = (column.astype(np.int32) for column in (above, first, end, own))
        self.lists = [array("i", column.tobytes()) for column in (self.child0, self.kids, self.first, self.end)]
        self.byte_string = self.byte.tobytes()
        self.alphabet = sum(1 << byte for byte in set(self.byte_string[1:]))  # the bytes that tokens have
        self.by_byte = np.argsort(byte, kind="stable").astype(np.int32)
        self.far = sum(1 << int(byte[kid]) for kid in range(1, 1 + int(self.kids[0])) if end[kid] - first[kid] > FAR)
        self.byte_starts = np.searchsorted(byte[self.by_byte], np.arange(257)).tolist()
        self.levels = np.cumsum([0] + [len(column[0]) for column in columns]).tolist()
        self.node_of = np.full(self.size, base, np.int32)
        self.node_of[self.order] = np.repeat(np.arange(base), own)[np.argsort(np.repeat(first, own), kind="stable")]


# ------------------------------------------------------------------------------------------------------------------------ spelling

def byte_level_table() -> dict[str, int]:
    """GPT-2's renaming: printable Latin-1 letters stand for themselves, the other 68 bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _speller(decoder: dict | None):
    """token -> bytes, as the decoder (its JSON form) makes text of tokens."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    unknown = sorted(kinds - {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Fuse", "Strip"})
    if unknown or not steps:
        what = f"decoder {unknown[0]}" if unknown else "tokenizer without a decoder"
        raise GrammarError(f"grammars need tokens whose text does not depend on their neighbours, which a {what} does not promise", what)
    if "ByteLevel" in kinds:
        table = byte_level_table()

        def spell(token: str) -> bytes:
            return bytes(map(table.__getitem__, token)) if all(map(table.__contains__, token)) else token.encode()
        return spell
    swaps = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace" and "String" in step["pattern"]]
    swaps += [(step.get("replacement", SPACE), " ") for step in steps if step["type"] == "Metaspace"]

    def spell_out(token: str) -> bytes:
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        for old, new in swaps:
            token = token.replace(old, new)
        return token.encode()
    return spell_out


def _demo() -> None:
    """A small vocabulary and its tree."""
    vocab = Vocab([b"a", b"ab", b"abc", b"b", b"the", b" the", b"th", None], end_ids=[7])
    print("order  ", " ".join(repr(vocab.tokens[i])[1:] for i in vocab.order))

    def show(node: int, text: bytes) -> None:
        own = vocab.order[vocab.first[node] : vocab.first[node] + vocab.own[node]]
        print(f"node {node:2d}  {'  ' * len(text)}{text.decode()!r:{20 - 2 * len(text)}} tokens {vocab.first[node]}..{vocab.end[node] - 1}"
              f"{' = id ' + str(own[0]) if own.size else ''}")
        for kid in range(vocab.child0[node], vocab.child0[node] + vocab.kids[node]):
            show(kid, text + bytes([vocab.byte[kid]]))

    show(0, b"")


if __name__ == "__main__":
    _demo()
