"""Jump: the text that a grammar forces, as tokens that are guessed ahead of the model.

Much of an answer in a given form is no decision. Behind `{` the schema knows what comes, whatever the model thinks:

    state 7  forces  "name": "       as the tokenizer writes it   `"` `name` `":` ` "`     -->  state 19, where the name begins
             chain of state 7        [1, 2311, 1799, 476]         rows of the states between are built

SGLang's jump-forward appended such text to the output. It had to tokenise the text anew, together with what came before, since tokens do not end
where forced text begins; ids that the model had chosen changed, and with them what it would say next. Here the chain is a *guess* (spec.py): one
forward pass judges all of it under the masks of its states, the model samples at each place as it always would, and what it writes otherwise is
written otherwise. So it is exact, at any temperature, and a forced text of n tokens takes one step, not n.

Few tokens. Where `name": "` has to come, only its beginnings may: a handful. So with a chain goes what its states, and the one behind, allow, if
that is at most MAX_FEW tokens; then a step computes the logits of these alone (`Model.some_logits`), and the mask leaves the same as of all.

Where a chain ends. The tokenizer may write the last forced bytes and the first free ones as one token: behind `":` comes ` "` before most texts,
but ` "(` before a bracket; and a blank before a number is a token of its own in some vocabularies and a part of the number in others. So the
text is tokenised once more with each of a few bytes that may follow, and a token stays in the chain if it does so behind most of them.

Invariant. A chain is published in the tables (`chains`: state, start in `chain_tokens`, length; `chain_of` by state) after the rows of all its
states, so who sees one can walk it. It is a property of a state alone: states with a counter, whose forced text depends on the count, have none.
Cost: about 10 us a forced byte, 20 us a call of the tokenizer, ten of them; in the background, once a state. Where it stops: MAX_CHAIN tokens a
step, then the next chain; tokenizers that spell a text by what is far before it.
Source: compressed automata of Zheng et al. (2024), SGLang, section 4 and appendix B; forced tokens as drafts after Leviathan et al. (2023).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from .grammar import COUNT_SHIFT, INDEX, MAX_ROW_S, REGISTER, Grammar, compile
from .rules import time_limit
from .vocab import Vocab

MAX_CHAIN = 16
MAX_FEW = 64                            # tokens: where no more may come, a step has no use for the logits of all
FOLLOWERS = b'aT1 e5o"s{[-}]:,.t(n'    # bytes that may follow forced text: the commonest first
MAX_FOLLOWERS = 8                       # of them are tried
FRAMES = ("", "\n", '"', "a")           # what stands before a text when it is tokenised, if alone it comes out with a blank in front


def spell(vocab: Vocab, text: bytes) -> list[int]:
    """A text as the tokenizer writes it where it goes on from other text; where it cannot, by the longest token at each place; as far as there are
    tokens."""
    if vocab.encode is not None:
        try:
            words = text.decode()
        except UnicodeDecodeError:
            words = ""
        for frame in FRAMES if words else ():
            ids, size = vocab.encode(frame + words), 0
            for begin in range(len(ids), 0, -1):
                token = vocab.tokens[ids[begin - 1]] if ids[begin - 1] < vocab.size else None
                if token is None or (size := size + len(token)) > len(text):
                    break
                if size == len(text) and vocab.decode(ids[begin - 1:]) == text:
                    return ids[begin - 1:]
    return longest(vocab, text)


def longest(vocab: Vocab, text: bytes) -> list[int]:
    """The longest token at each place of a text, as far as there are tokens."""
    child0, kids, first, _ = vocab.lists
    ids, at = [], 0
    while at < len(text):
        node, found, end = 0, None, at
        for i in range(at, len(text)):
            below = vocab.byte_string.find(text[i], child0[node], child0[node] + kids[node])
            if below < 0:
                break
            node = below
            if vocab.own[node]:
                found, end = int(vocab.order[first[node]]), i + 1
        if found is None:
            break
        ids.append(found)
        at = end
    return ids


def canonical(text: bytes, following: int, write: Callable[[bytes], list[int]]) -> list[int]:
    """Tokens of a forced text that will be there whatever comes behind it, most likely. following: the bytes that may, a mask."""
    ids = write(text)
    followers = [byte for byte in FOLLOWERS if following >> byte & 1][:MAX_FOLLOWERS]
    votes = [0] * len(ids)
    for byte in followers:
        for i, (ours, theirs) in enumerate(zip(ids, write(text + bytes([byte])))):
            if ours != theirs:
                break
            votes[i] += 1
    keep = next((i for i, count in enumerate(votes) if 2 * count <= len(followers)), len(ids)) if followers else len(ids)
    return ids[:keep]


def build_chain(grammar: Grammar, state: int, pause: Callable[[], bool] = lambda: False) -> list[int] | None:
    """Find the chain of a state, build the rows of its states and publish it; once. None where it was to pause: then it has not, and goes on where
    it was when it is called again. Raises GrammarError where a row cannot be built."""
    index, tables = state & INDEX, grammar.tables
    if index in tables.chain_of or any(config[3] == REGISTER for config in grammar.readings.configs(index)):
        return []
    with time_limit(time.monotonic() + MAX_ROW_S):
        text, behind = grammar.forced(index)
        with grammar.shared.lock:
            following = grammar._alive(grammar._unpack(behind))
    ids = canonical(text, following, lambda some: spell(grammar.vocab, some)) if text else []
    goes_on, ids, path = len(ids) > MAX_CHAIN, ids[:MAX_CHAIN], [index]
    for token in ids:
        if pause():
            return None
        after = grammar.step(path[-1], token)
        if after is None or after >> 32:
            break
        path.append(after)
    grammar.row(path[-1])
    ids, may_come = ids[:len(path) - 1], [few_allowed(grammar, at) for at in path]
    with grammar.shared.lock:
        start = tables.chain_tokens.append(np.array(ids, np.int32))
        for i, at in enumerate(path[:1] if goes_on or not ids else path[:-1]):      # of one that goes on, the others get longer ones of their own
            if at not in tables.chain_of:
                if any(some is not None for some in may_come[i:]):
                    tables.few[at] = may_come[i:]
                tables.chain_of[at] = ids[i:]
                tables.chains.append(np.array([[at, start + i, len(ids) - i]]))
    return ids


def few_allowed(grammar: Grammar, state: int) -> np.ndarray | None:
    """The tokens that may come in a state, [n] int64, if they are few."""
    row, tables = grammar.row(state), grammar.tables
    of_class, over = tables.allowed(row.vec, state >> COUNT_SHIFT) > 0, tables.allowed(row.over_values, state >> COUNT_SHIFT) > 0
    if max(tables.class_sizes[row.map][of_class].sum(), over.sum()) > MAX_FEW:      # before all of the vocabulary is looked at
        return None
    allowed = np.flatnonzero(of_class[tables.maps[row.map]]) if of_class.any() else np.zeros(0, np.int64)
    ends = grammar.vocab.end_ids if grammar.is_accepting(state) else ()
    allowed = np.unique(np.concatenate([allowed, row.over_tokens[over], np.array(ends, np.int64)]))
    return allowed.astype(np.int64) if 0 < len(allowed) <= MAX_FEW else None


def retokenized(grammar: Grammar, state: int, ids: list[int]) -> tuple[list[int], int] | None:
    """Jump-forward as the paper has it (appendix B): an output and the text that is forced behind it, tokenised as one text, and the state behind
    that. None where nothing is forced, or the tokenizer does not give the text back. The ids may differ from the first on."""
    with time_limit(time.monotonic() + MAX_ROW_S):
        forced, behind = grammar.forced(state)
    if not forced:
        return None
    before = grammar.vocab.decode(ids)
    text = (before + forced).decode(errors="ignore").encode()       # up to the last whole character
    if len(text) <= len(before) or not (before + forced).startswith(text):
        return None
    made = spell(grammar.vocab, text)
    if grammar.vocab.decode(made) != text:
        return None
    return made, behind if len(text) == len(before) + len(forced) else grammar.step_bytes(state, text[len(before):])


def _demo() -> None:
    """The chains of a schema's states, and how an answer is written with them."""
    words = [b'{"', b'": ', b'": "', b'", "', b'"}', b"name", b"colour", b"red", b"green", b"Ada", b"r", b"gr"]
    vocab = Vocab([bytes([b]) for b in range(256)] + words + [None], end_ids=[256 + len(words)])
    schema = '{"type": "object", "properties": {"name": {"type": "string"}, "colour": {"enum": ["red", "green"]}}, "required": ["name", "colour"], ' \
             '"additionalProperties": false}'
    grammar = compile("json_schema", schema, vocab)
    print(schema)
    state, text, steps = grammar.start, b"", 0
    for choice in (b"Ada", b'", "', b"gr", b"<end>"):
        chain = build_chain(grammar, state)
        for token in chain:
            state = grammar.step(state, token)
        words = " ".join(repr(vocab.tokens[t].decode()) for t in chain) or "-"
        print(f"{text.decode()!r:42} forced: {words:40} then the model says {choice.decode()!r}")
        text, steps = text + vocab.decode(chain), steps + 1
        if choice == b"<end>":
            break
        state, text = grammar.step_bytes(state, choice), text + choice
    print(f"{text.decode()}: {steps} steps")
    first = [ord("{"), ord('"')]
    made, _ = retokenized(grammar, grammar.step_bytes(grammar.start, b'{"'), first)
    print(f"retokenize would write {first} and what is forced behind it as {made}")


if __name__ == "__main__":
    _demo()
