"""A drafter of your own, in twenty lines: what followed a token before. How does it do beside prompt lookup?

    python experiments/bigram_drafter.py [--bytes 800] [--topic compound]

`ngram` copies what followed the longest match, and has nothing to say where two tokens never stood together. `bigram` knows of every token what
followed it so far in the row's own text, and how often; it takes the frequencies for probabilities and lets `spec.expand` grow them to a tree, as
EAGLE does with a head's. `@drafter` gives it a name, which "+" joins to others: the best guesses of both, in one tree.

No model here: a text from Python's manual plays the target, a byte a token. A step is one call of the drafter; what it guessed right, and one token
more, is won. So 1.00 token a step is decoding without guesses. In an engine this is `LLM(..., speculative_algorithm="ngram+bigram")` after an
import of this file, with the model's VOCABULARY; a device drafter must not wait for its device, so it does not ask for the greatest token.

What there is to see: a match is right early, frequencies need room for several guesses; joined they win more than either.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor

from nano_sgl.spec import DraftOptions, DraftTree, drafter, expand, guess, make_drafters, no_guesses, verify

VOCABULARY = 256
STEPS = 4  # how deep a tree of bigrams goes


@drafter("bigram")
class Bigram:
    """What followed a token before in the row's own text, as often as it did. A device drafter."""

    def __init__(self, options: DraftOptions):
        self.options = options

    def draft(self, tokens: Tensor, known: Tensor) -> tuple[DraftTree, Tensor, Tensor]:
        """See `spec.drafter`. quality: how often the last token stood there before."""
        there = torch.arange(1, tokens.shape[1], device=tokens.device) < known[:, None, None]                            # [B, 1, C - 1]
        before, after = tokens[:, None, :-1], torch.where(there, tokens[:, None, 1:], 0).long()

        def followers(leaves: Tensor) -> Tensor:
            follows = ((before == leaves[..., None]) & there).float()                                                    # [B, w, C - 1]
            return follows.new_zeros(*leaves.shape, VOCABULARY).scatter_add_(2, after.expand_as(follows), follows)

        def step(leaves: Tensor, beams: Tensor) -> tuple[Tensor, Tensor]:
            counts = followers(leaves)
            often, likely = counts.topk(self.options.branches)
            return likely, (often / counts.sum(-1, keepdim=True).clamp(min=1)).log()  # of what never followed: -inf, no guess

        roots = tokens.gather(1, known[:, None] - 1)[:, 0].long()
        tree, scores = expand(roots, step, STEPS, self.options.branches, self.options.count)
        return tree, scores.exp(), followers(roots[:, None]).sum((1, 2)).clamp(max=15).long()


def tokens_a_step(algorithm: str, count: int, text: Tensor, start: int) -> float:
    """Replays text [1, C] behind its first `start` tokens."""
    drafters = make_drafters(algorithm, DraftOptions(count=count))
    at, steps = start, 0
    while at < text.shape[1]:
        made = guess(drafters, text[:, :at], torch.tensor([at]), count)
        tree = made[0] if made else no_guesses(text[:, at - 1].long(), count)
        targets = text.gather(1, (at + tree.depth).clamp(max=text.shape[1] - 1))  # whatever the branch, the text goes on as it does
        at, steps = at + int(verify(tree, targets).counts) + 1, steps + 1
    return (min(at, text.shape[1]) - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=800)
    parser.add_argument("--topic", default="compound", choices=sorted(topics), metavar="TOPIC", help="a topic of pydoc")
    args = parser.parse_args()
    text = torch.tensor([list(topics[args.topic].encode()[:args.bytes])], dtype=torch.int32)
    counts = (2, 4, 8, 16)
    print(f"tokens a step on {text.shape[1]} bytes of pydoc's {args.topic!r}\n\nguesses       " + "".join(f"{count:8}" for count in counts))
    for algorithm in ("ngram", "bigram", "ngram+bigram"):
        print(f"{algorithm:14}" + "".join(f"{tokens_a_step(algorithm, count, text, start=32):8.2f}" for count in counts))


if __name__ == "__main__":
    main()
