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
from .protocol import Logprob
from .scheduler import Batch, Req


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
    ids, bads, nobody = sampled.tokens.tolist(), sampled.bad.tolist(), itertools.repeat(False)
    logprobs = None if sampled.logprobs is None else logprobs_of(ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    missed = nobody if results.walked is None or not results.walked.missed.any() else results.walked.missed.tolist()
    paths, places = itertools.repeat([]), None  # None: one each, in order
    if judged is not None:
        sizes = batch.draft_lens[batch.samples] + 1
        nodes = [order[:count + 1] for order, count in zip(judged.order.tolist(), judged.counts.tolist())]
        paths = [path[1:] for path in nodes]
        places = [[first + node for node in path] for first, path in zip((np.cumsum(sizes) - sizes).tolist(), nodes)]
    if places is None and (missed is not nobody or logprobs is not None or True in bads):
        places = [[place] for place in range(len(ids))]
    if missed is not nobody:
        places = [[] if none else at for at, none in zip(places, missed)]
    if True in bads:
        good = [list(itertools.takewhile(lambda place: not bads[place], at)) for at in places]
        places, bads = good, [len(a) < len(b) for a, b in zip(good, places)]
    else:
        bads = nobody
    tokens = [[token] for token in ids] if places is None else [[ids[place] for place in at] for at in places]
    return zip(tokens, itertools.repeat(None) if logprobs is None else ([logprobs[k] for k in at] for at in places), bads, paths)


def _demo() -> None:
    """Logprobs of two sampled tokens, as the host gets them."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    found = sampling.prompt_logprobs(logits, torch.tensor([2, 1]), 2)
    for one in logprobs_of([2, 1], *found):
        print(f"token {one.token_id}: logprob {one.logprob:.3f}, best {[(token, round(value, 3)) for token, value in one.top]}")


if __name__ == "__main__":
    _demo()
