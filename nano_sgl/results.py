"""Results: what a step leaves for the host, which looks at it when it is there.

    stream    forward  sample ---- results on the device ---- next step ...
                                        \\ copies, then an event
    host      plan of the next step ...           waits for the event, reads numbers

A GPU runs a step long after it was launched, and a copy into pinned memory is work in its stream like any other. So the copies are asked for with
the step, and the event behind them is what the host waits for: this step, and not the one that is running by then. On a CPU results are where they
belong.

Names. `sampled`, `judged`, `next`, `walked` hold a row for each request that sampled, in the order of the batch; `prompt` holds pieces of prompts,
or of outputs that were tokenised anew (jump.py), whose logprobs are asked for; `marks` are points in time, on a CPU seconds, on a GPU events.

Invariant. Nothing here is read before `copied` has happened. Cost: one copy a tensor, some 30 bytes a row, and a few kilobytes where logprobs are
asked for. Source: the result queue of SGLang's overlap scheduler (2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from . import sampling, spec
from .constraint import Walked
from .memory import Batch
from .protocol import Logprob
from .req import Req


@dataclass
class Results:
    """What a step leaves for the host: on the host once `copied` has happened."""
    sampled: sampling.Sampled | None
    prompt: list[PromptPiece]
    judged: spec.Judged | None = None         # what was right of the step's guesses
    next: spec.Next | None = None             # the guesses for the next
    walked: Walked | None = None              # where grammars stand
    marks: list = field(default_factory=list)  # of time: the step's begin, and where guesses were made begin and end of that
    copied: torch.cuda.Event | None = None    # None on CPU: results are where they belong


@dataclass
class PromptPiece:
    """Logprobs of a request's prompt tokens from `position` on."""
    req: Req
    position: int
    logprobs: torch.Tensor             # [n] f32
    top_ids: torch.Tensor              # [n, k] i64
    top_logprobs: torch.Tensor         # [n, k] f32


def to_host(results: Results) -> Results:
    """Begin the copies of a step's results, into pinned memory: whoever waits for `copied` waits for this step, not for the next."""
    def copies(part):
        tensors = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        return replace(part, **{name: torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
                                for name, value in tensors.items()})
    copied = torch.cuda.Event()
    parts = {name: None if (part := getattr(results, name)) is None else copies(part) for name in ("sampled", "judged", "next", "walked")}
    results = Results(prompt=[copies(piece) for piece in results.prompt], marks=results.marks, copied=copied, **parts)
    copied.record()
    return results


def logprobs_of(ids: list[int], logprobs: torch.Tensor, top_ids: torch.Tensor | None, top_logprobs: torch.Tensor | None) -> list[Logprob]:
    """Of n tokens: logprobs [n] f32, the best ones [n, k] or None."""
    values = logprobs.tolist()
    tops = [[]] * len(ids) if top_ids is None else [list(zip(i, v)) for i, v in zip(top_ids.tolist(), top_logprobs.tolist())]
    return [Logprob(token, value, top) for token, value, top in zip(ids, values, tops)]


def by_row(batch: Batch, results: Results) -> Iterator[tuple[list[int], list[Logprob] | None, bool, list[int]]]:
    """Per sampling row, in order: its tokens, their logprobs, whether the logits behind them were no numbers, and which guesses were right (numbers
    of nodes)."""
    sampled, judged = results.sampled, results.judged
    if sampled is None:
        return iter(())
    tokens, bad, logprobs = sampled.tokens.numpy(), sampled.bad.numpy(), itertools.repeat(None)
    if judged is None and results.walked is None and sampled.logprobs is None and not bad.any():     # most steps: a token each, and nothing else
        return zip([[token] for token in tokens.tolist()], logprobs, itertools.repeat(False), itertools.repeat([]))
    at, lens, paths = np.arange(len(tokens)), np.ones(len(tokens), np.int64), itertools.repeat([])  # the places of each row's tokens, how many
    if judged is not None:
        order, lens, sizes = judged.order.numpy(), judged.counts.numpy() + 1, batch.draft_lens[batch.samples] + 1
        taken = np.arange(order.shape[1]) < lens[:, None]
        at = order[taken] + np.repeat(np.cumsum(sizes) - sizes, lens)
        paths = _split(order[:, 1:][taken[:, 1:]], lens - 1)
    if results.walked is not None and (missed := results.walked.missed.numpy()).any():
        at, lens = at[~np.repeat(missed, lens)], np.where(missed, 0, lens)
    good = lens
    if bad[at].any():
        good = np.array([next((i for i, one in enumerate(row) if one), len(row)) for row in _split(bad[at], lens)])
        at = np.array([place for row, count in zip(_split(at, lens), good) for place in row[:count]], np.int64)
    if sampled.logprobs is not None:
        known = logprobs_of(tokens.tolist(), sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
        logprobs = ([known[place] for place in row] for row in _split(at, good))
    return zip(_split(tokens[at], good), logprobs, itertools.repeat(False) if good is lens else (good < lens).tolist(), paths)


def _split(values: np.ndarray, lens: np.ndarray) -> list[list]:
    """Numbers of all rows, `lens` of each, row by row."""
    flat, ends = values.tolist(), lens.cumsum().tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends)]


def _demo() -> None:
    """Logprobs of two sampled tokens, as the host gets them."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    found = sampling.prompt_logprobs(logits, torch.tensor([2, 1]), 2)
    for one in logprobs_of([2, 1], *found):
        print(f"token {one.token_id}: logprob {one.logprob:.3f}, best {[(token, round(value, 3)) for token, value in one.top]}")


if __name__ == "__main__":
    _demo()
