"""Scoring: how likely each of several texts is behind a prefix, by the logprobs of its tokens.

A choice among texts is made by the model's own probabilities, and these belong to tokens, not to characters. Where the prefix ends and a choice
begins, a tokenizer may put one token across:

      "Answer: " + "Hello"      Answer  :  \\u0120Hello           one text, three tokens: the blank belongs to Hello
      "Answer: "                Answer  :  \\u0120                the prefix alone: its last token is none of the text's
                                ^^^^^^^^^^ base: what is the same in all of them

Scoring "Hello" behind the ids of the prefix would ask the model for a text it has never seen ("token healing" repairs that afterwards). Here a
choice's ids are those of prefix + choice as *one* text, and all choices are scored from the same position:

  base           the length that the ids of the prefix and of every prefix + choice have in common, short enough that each choice has a token
  tokens         a choice's ids from base on; tokens of the prefix that only some choices merge with are scored in all of them
  unconditional  the same tokens without the prefix, behind what the tokenizer itself begins a text with (BOS); where that is nothing, the first
                 of them has no logprob, as a choice's first has none where base is 0. What a choice gains by the prefix is the difference.

Invariant: all choices of a call are continuations of the same ids[:base], so that their sums compare; "Answer:" with " Hello" and "Answer: "
with "Hello" are the same score.
Cost: a request for each choice, two with unconditional; the radix tree computes ids[:base - 1] once for all of them. One tokenisation of the
whole text a choice. Stops holding: a tokenizer that reads ahead further than a choice (none that is known does).
Source: select of SGLang (Zheng et al. 2024), whose token healing this replaces; unconditional likelihoods are Holtzman et al.'s (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .protocol import Chunk, Request, RequestError, SamplingParams, Score, show

MAX_SCORED = 1024       # choices in one call


class Texts(NamedTuple):
    """What is scored. ids: of each choice behind the prefix; base: where their scores begin; alone: of each without the prefix, or nothing;
    front: the tokens that these have in front."""

    ids: list[list[int]]
    base: int
    alone: list[list[int]]
    front: int


def read_texts(encode: Callable[[str], list[int]], prefix: Any, choices: Any, unconditional: bool) -> Texts:
    """The ids of prefix + choice, for each choice. encode: as the tokenizer frames a text. RequestError names what cannot be scored."""
    if not isinstance(prefix, str):
        raise RequestError(f"the prefix is a text, got {show(prefix)}", "text")
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices or not all(isinstance(text, str) for text in choices):
        raise RequestError(f"choices must be a list of one or more texts; got {show(choices)}", "choices")
    if len(choices) > MAX_SCORED:
        raise RequestError(f"choices must have at most {MAX_SCORED} entries; got {len(choices)}", "choices")
    try:
        before, ids = encode(prefix), [encode(prefix + choice) for choice in choices]
        front = _same(encode(""), ids[0]) if unconditional else 0
    except UnicodeError as error:
        raise RequestError("text and choices must be valid Unicode, without lone surrogates", "choices") from error
    for choice, found in zip(choices, ids):
        if not choice or found == before:
            raise RequestError(f"choices: {show(choice)} adds no token to the prefix, so there is nothing to score", "choices")
    base = min(min(_same(before, found), len(found) - 1) for found in ids)
    alone = [found[:front] + found[max(base, front):] for found in ids] if unconditional else []
    return Texts(ids, base, alone, front)


def _same(a: list[int], b: list[int]) -> int:
    """Ids with which two texts begin alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def score_requests(texts: Texts, rid: str, parent: str = "", **fields: Any) -> list[Request]:
    """The requests of one call, the choices first; the first of them is the child of `parent`. fields: those of Request that all have."""
    def one(n: int, ids: list[int], start: int) -> Request:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=start)
        return Request(rid=f"{rid}-{n}", prompt_ids=ids, params=params, stream=False, parent="" if n else parent, **fields)

    made = [one(n, ids, texts.base) for n, ids in enumerate(texts.ids)]
    return made + [one(len(made) + n, ids, texts.front) for n, ids in enumerate(texts.alone)]


def read_scores(choices: Sequence[str], asked: list[Request], chunks: dict[str, Chunk]) -> list[Score]:
    """What the engine has answered, by rid. RequestError where it failed on one."""
    for request in asked:
        chunk = chunks[request.rid]
        if chunk.finish_reason in ("error", "abort"):
            raise RequestError(chunk.error or "the request was aborted", chunk.param, chunk.status)
    logprobs = [chunks[request.rid].prompt_logprobs for request in asked]
    alone = logprobs[len(choices):] or [None] * len(choices)
    return [Score(text=text, tokens=tokens, unconditional=without, cached_tokens=chunks[request.rid].cached_tokens,
                  prompt_tokens=len(request.prompt_ids))
            for text, tokens, without, request in zip(choices, logprobs, alone, asked)]


def _demo() -> None:
    """Where choices begin, with a tokenizer of words that keep the blank in front of them."""
    words: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        pieces = text.replace(" ", "\0 ").split("\0")
        return [words.setdefault(piece, len(words)) for piece in pieces if piece]

    for prefix, choices in (("Is it? Answer:", [" yes", " no"]), ("Is it? Answer: ", ["yes", "no"]),
                            ("Is it? Ans", ["wer: yes", "wer: no", " is no"])):
        texts = read_texts(encode, prefix, choices, True)
        names = {number: word for word, number in words.items()}
        print(f"{prefix!r}: of {[len(ids) for ids in texts.ids]} tokens the first {texts.base} are common; scored are")
        for choice, ids in zip(choices, texts.ids):
            print(f"    {choice!r:12} as {' | '.join(names[i] for i in ids[texts.base:])}")


if __name__ == "__main__":
    _demo()
