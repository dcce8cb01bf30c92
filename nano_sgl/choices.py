"""Choices: which of some texts a model finds likeliest, after what stands before them.

`select` scores every choice as a continuation, all in one batch, and a *method* turns the scores into a decision. The obvious sum of
log-probabilities prefers short texts, and the mean over tokens, the default, prefers texts whose later tokens are certain, so there are three:

    token_length_normalized              the mean log-probability of a choice's tokens
    greedy_token_selection               the likeliest first token, then the likeliest second one behind it, ... as greedy decoding among them would
    unconditional_likelihood_normalized  the mean of how much likelier the prompt makes each token than it is by itself: frequent words win nothing

    tokens          log-probabilities     mean     the sum takes " no", one token that is not that unlikely;
    " yes"  2       -3.1  -2.8            -2.95    the mean takes " yes"
    " no"   1       -5.2                  -5.20

Tokens. A choice is never encoded by itself: prefix and choice are one text to the tokenizer, and all choices are scored from the first token at
which any of them, or the prefix alone, differs. So a blank at the prefix's end that becomes the beginning of a choice's first word is scored with it,
and a choice that begins another one (" New", " New York") shares its tokens with it.

Invariant: the decision is the arg-max of the score that is reported; ties go to the choice that was named first. A token without a
log-probability (the very first of a text) counts nothing. Cost: nothing beside the model's. Stops holding: choices of very different lengths compare
badly under any of them. Source: the methods are SGLang's; the third is Brown et al. 2020 (appendix C) by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Token(NamedTuple):
    """A scored token; logprob is None where nothing comes before it."""

    token_id: int
    logprob: float | None


@dataclass
class Score:
    """A choice's tokens behind the prefix, and the same tokens by themselves, where that was asked for."""

    text: str
    tokens: Sequence[Token]
    unconditional: Sequence[Token] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class ChoicesDecision:
    """What was chosen, and why."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChoicesMethod:
    """A way to decide. decide: (choices, scores) -> (value of each choice, more for meta_info)."""

    name: str
    requires_unconditional_logprobs: bool
    decide: Callable[[Sequence[str], Sequence[Score]], tuple[list[float], dict[str, Any]]]

    def __call__(self, choices: Sequence[str], scores: Sequence[Score]) -> ChoicesDecision:
        """The choice of the highest value."""
        values, more = self.decide(choices, scores)
        listed = [[(t.logprob, t.token_id, None) for t in score.tokens] for score in scores]
        return ChoicesDecision(choices[max(range(len(choices)), key=values.__getitem__)],
                               {"normalized_prompt_logprobs": values, "input_token_logprobs": listed, "output_token_logprobs": [[] for _ in scores],
                                "sum_logprobs": [_total(score.tokens) for score in scores], **more})


CHOICES_METHODS: dict[str, ChoicesMethod] = {}


def choices_method(name: str, unconditional: bool = False) -> Callable:
    """Register a way to decide, under a name that `select(choices_method=...)` takes, too."""
    def register(decide: Callable) -> ChoicesMethod:
        CHOICES_METHODS[name] = ChoicesMethod(name, unconditional, decide)
        return CHOICES_METHODS[name]
    return register


def find_method(method: str | ChoicesMethod | None) -> ChoicesMethod:
    """A method by name or itself; None is the default. ValueError for another name."""
    if isinstance(method, ChoicesMethod):
        return method
    if (found := CHOICES_METHODS.get(method or "token_length_normalized")) is None:
        raise ValueError(f"choices_method is one of {', '.join(CHOICES_METHODS)}, got {method!r}")
    return found


def _known(tokens: Sequence[Token]) -> list[float]:
    return [t.logprob for t in tokens if t.logprob is not None]


def _total(tokens: Sequence[Token]) -> float:
    return math.fsum(_known(tokens))


def _mean(tokens: Sequence[Token]) -> float:
    known = _known(tokens)
    return math.fsum(known) / len(known) if known else 0.0


@choices_method("token_length_normalized")
def token_length_normalized(choices: Sequence[str], scores: Sequence[Score]) -> tuple[list[float], dict[str, Any]]:
    """The mean log-probability of a token."""
    return [_mean(score.tokens) for score in scores], {}


@choices_method("greedy_token_selection")
def greedy_token_selection(choices: Sequence[str], scores: Sequence[Score]) -> tuple[list[float], dict[str, Any]]:
    """The likeliest token at each place among the choices that are left; where a choice is over, its mean stands for its next token.

    The value of a choice is the number of places through which it was left."""
    means = [_mean(score.tokens) for score in scores]
    length = max(len(score.tokens) for score in scores)
    matrix = [[mean if t.logprob is None else t.logprob for t in score.tokens] + [mean] * (length - len(score.tokens))
              for score, mean in zip(scores, means)]
    left, places = list(range(len(choices))), [0] * len(choices)
    for place in range(length):
        if any(place < len(scores[i].tokens) and scores[i].tokens[place].logprob is None for i in left):
            continue                                    # nobody knows which is likelier
        best = max(left, key=lambda i: matrix[i][place])
        ids = {i: scores[i].tokens[place].token_id if place < len(scores[i].tokens) else ("over", i) for i in left}
        left = [i for i in left if ids[i] == ids[best]]
        for i in left:
            places[i] += 1
        if len(left) == 1:
            break
    return [float(n) for n in places], {"greedy_logprob_matrix": matrix}


@choices_method("unconditional_likelihood_normalized", unconditional=True)
def unconditional_likelihood_normalized(choices: Sequence[str], scores: Sequence[Score]) -> tuple[list[float], dict[str, Any]]:
    """The mean, over a choice's tokens, of how much the prefix raises the log-probability."""
    alone = [score.unconditional or () for score in scores]
    values = []
    for score, other in zip(scores, alone):
        raised = [t.logprob - (u.logprob or 0.0) for t, u in zip(score.tokens, other) if t.logprob is not None]
        same = len(other) == len(score.tokens)      # or the choice has other tokens by itself: then of the means
        values.append(_mean(score.tokens) - _mean(other) if not same else math.fsum(raised) / len(raised) if raised else 0.0)
    return values, {
        "unconditional_token_logprobs": [[(t.logprob, t.token_id, None) for t in other] for other in alone],
        "normalized_unconditional_prompt_logprobs": [_mean(other) for other in alone]}


def _demo() -> None:
    """Three choices, three methods, three answers: the model likes a frequent word, a sure ending, and what the prompt speaks of."""
    made = {" it is": ([-1.2, -2.6], [-2.0, -2.8]), " Paris": ([-1.9], [-8.0]), " Saint-Denis": ([-4.0, -0.1, -0.1, -0.1], [-9.0, -0.3, -0.1, -0.1])}
    scores = [Score(text, [Token(10 * i + k, p) for k, p in enumerate(given)], [Token(10 * i + k, p) for k, p in enumerate(alone)])
              for i, (text, (given, alone)) in enumerate(made.items())]
    for name, method in CHOICES_METHODS.items():
        decision = method(list(made), scores)
        print(f"{name:36} {decision.decision!r:15} {[round(v, 2) for v in decision.meta_info['normalized_prompt_logprobs']]}")


if __name__ == "__main__":
    _demo()
