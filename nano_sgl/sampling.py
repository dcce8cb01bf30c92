"""Sampling: logits to tokens, the same token for the same seed, whatever else is in the batch.

The problem: a batch holds rows with different temperatures, filters, penalties and seeds, and a row's answer must not depend on
its neighbours, on how often it was retracted, or on the device. A generator with a state breaks this: who draws first?

Here a row's randomness has no state. The noise of (seed, position, token) is a hash of those three numbers (a counter-based
generator, Salmon et al. 2011), and a token is drawn by the Gumbel-max trick (Gumbel 1954; Maddison, Tarlow, Minka 2014):

    logits --penalties--bias--mask--> / temperature --> filters --> + noise --> argmax
                                                           |           |
            kept: top - z <= gap(top-k, top-p, min-p) -----+           +---- G = -log(-log(u)),  u = hash(seed, position, token)

    P(argmax_i (z_i + G_i) = i) = exp(z_i) / sum_j exp(z_j): no cumulative sum, no sort, and greedy is the case without noise.
    Whoever knows a row's seed can ask which token it *would* draw at a position: speculative drafts use that.

    gap        Every filter is one number a row: how far below the best logit a token may lie. top-k: the gap of the k-th value;
               min-p: -log(min_p); top-p: the least gap whose tokens hold the mass. Tokens of equal logit stay or go together,
               so a kept set never depends on how some sort left its ties (logits of a bf16 model tie all the time).
    edits      What changes logits before the temperature. logit_bias and min_tokens are one list of (row, token, value, until):
               the value is added while the row's position is below `until`, which is compared on the device.
    group      Rows of a batch that need the same work. Groups and index lists are host knowledge (`SamplingBatch`, built when
               membership changes, see `Sorted`); temperatures, seeds and counts are rows on the device. So `sample` never waits for it.

Invariant: a row's token is a function of its own logits, position, parameters and history. Logprobs are the model's: of the raw
logits, before any edit. Rows whose edited logits hold NaN or +inf, or nothing but -inf, are `bad`: their token means nothing.
Cost: a greedy row reads its logits once, a sampled one makes some 20 passes and two logarithms, top-p 90 more (it bisects; a
sort costs eight times that). On a CPU kernels.cpp draws a row in some six passes; without it they run block by block, in the cache.
Where it stops: uniforms are equal bit for bit on every device, logarithms only to rounding; 31 bits of noise cannot tell apart
chances below 2^-32; a GPU kernel that fuses the passes is left to whoever measures that it matters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import native
from .protocol import GREEDY_TEMPERATURE, MAX_LOGPROBS, SamplingParams

CPU_BLOCK = 2**18       # logits a block of rows has per CPU thread: a few buffers of 1 MiB stay in the cache
GPU_BLOCK = 2**22       # on a GPU blocks only bound the memory of scratch
SMALL_K = 64            # up to here top-k reads a sorted list of the least gaps, beyond it bisects. Fixed, so that no row's
                        # arithmetic depends on its neighbour's k
MASS_SLACK = 1e-6       # what a boundary may miss by rounding alone and still count as reached: of the mass beyond top-p, ...
GAP_SLACK = 5e-6        # ... and in logits for min-p
REMOVED = -1e38         # added to what a filter removes: below every logit, and unlike -inf it can be multiplied by 0
NEVER = 2**62           # `until` of a bias that always holds
OTHER_NOISE = 0x3C6EF372FE94F82B  # a seed's other stream: what rejects a guess must not know the noise that it was drawn with

MOST_RUNS = 16          # of rows that lie side by side, and are read in a call each

VALUES = 7              # columns of SamplingState.values
INV_TEMPERATURE, TOP_K, TOP_P, MIN_P_GAP, REPETITION, FREQUENCY, PRESENCE = range(VALUES)

Index = slice | Tensor  # batch rows: a slice where they are consecutive (indexing gives a view), else int64 ids (a copy)
HostIndex = slice | np.ndarray


class Work(NamedTuple):
    """What a row's parameters cost. small_k and large_k exclude each other; a greedy row has none of the others."""

    greedy: bool
    small_k: bool = False
    large_k: bool = False
    top_p: bool = False
    min_p: bool = False


@dataclass(frozen=True)
class Bias:
    """Conditional biases: `value` is added to logits[row, token] while positions[row] < until."""

    rows: Tensor      # [M] int64, batch rows
    tokens: Tensor    # [M] int64
    values: Tensor    # [M] fp32
    until: Tensor     # [M] int64


@dataclass(frozen=True)
class Branch:
    """Guesses that stand between a row's known tokens and the place that is sampled, where rows are nodes of draft trees (spec.py): penalties
    count them."""

    tokens: Tensor    # [N, K] int64
    real: Tensor      # [N, K] fp32, 1 where a guess is an ancestor of the node or the node itself, else 0


@dataclass(frozen=True)
class Guesses:
    """What a drafter has guessed comes at each batch row, for rejection sampling."""

    tokens: Tensor           # [N] int64, -1: nothing
    q: Tensor | None         # [N, V] fp32: what it was drawn from, masked and filtered as p is, by noise other than ours; None: it is certain


@dataclass(frozen=True)
class Mask:
    """What grammars forbid (constraint.py)."""

    forbid: Callable[[Tensor], None]    # puts -inf, in place, where a token may not come: into logits [N, V]
    ready: Tensor                       # [N] fp32: 0 where it is not known yet what may come, and what is drawn counts for nothing; else 1


class Ask(NamedTuple):
    """What one request asks for, whatever a step is like."""

    work: Work
    penalised: bool                  # with any penalty
    repetition: bool                 # with a repetition penalty
    wanted: bool                     # logprobs are
    most: int                        # and so many top entries
    bias: tuple[int, np.ndarray, np.ndarray, np.ndarray] | None     # prompt length, tokens, values, until


@dataclass(frozen=True)
class Members:
    """The n rows of a batch by what they ask for, whatever a step is like: valid while its membership does not change."""

    rows: np.ndarray                 # [n] int64, request rows
    kinds: list[Work]                # all that there are, sorted
    kind: np.ndarray                 # [n] int64 which of them
    penalised: np.ndarray | None     # [n] bool: with any penalty; None: nobody
    repetition: np.ndarray | None    # [n] bool: with a repetition penalty
    wanted: np.ndarray | None        # [n] bool: with logprobs
    most: int                        # top entries that any of them wants
    biased: dict[int, tuple[int, np.ndarray, np.ndarray, np.ndarray]]    # of a row with biases: prompt length, tokens, values, until


@dataclass(frozen=True)
class Sorted:
    """The work of a batch's N rows as the host has sorted it: valid while its membership does not change. Indices are slices or arrays (`HostIndex`);
    `arrays` go to the device, in their order, and all that is not in them is `shape`: batches of equal shape are sampled by the same operations."""

    rows: np.ndarray                              # [N] int64, request rows
    groups: list[tuple[Work, list[HostIndex]]]    # every batch row that is not settled in one block of one group
    penalised: list[HostIndex]                    # blocks of batch rows with any penalty
    repetition: list[HostIndex]                   # blocks of batch rows with a repetition penalty
    bias: tuple[np.ndarray, ...] | None           # as `Bias`, values as bits
    logprobs: HostIndex | None                    # batch rows that want logprobs
    logprobs_k: int                               # the most top entries any of them wants
    settled: tuple[np.ndarray, ...] | None        # batch rows whose token is no question, and their tokens; None: there are none

    @property
    def shape(self) -> tuple:
        size = lambda index: (index.start, index.stop) if isinstance(index, slice) else index if index is None else len(index)
        blocks = [(work, *map(size, blocks)) for work, blocks in self.groups]
        return (len(self.rows), *blocks, *(tuple(map(size, part)) for part in (self.penalised, self.repetition)),
                self.bias and len(self.bias[0]), size(self.logprobs), self.logprobs_k, self.settled and len(self.settled[0]))

    @property
    def is_even(self) -> bool:
        """Whether all rows are treated alike."""
        one = len(self.groups) == 1 and self.bias is self.settled is None
        return one and all(isinstance(index, slice) for index in self._indices() if index is not None)

    def _indices(self) -> list[HostIndex | None]:
        return [*(block for _, blocks in self.groups for block in blocks), *self.penalised, *self.repetition, self.logprobs]

    @property
    def arrays(self) -> list[np.ndarray]:
        """[n] int64 each."""
        return [self.rows, *(index for index in self._indices() if isinstance(index, np.ndarray)), *(self.bias or ()), *(self.settled or ())]

    def batch(self, arrays: Iterable[Tensor]) -> SamplingBatch:
        """The same on the device. arrays: `arrays` there."""
        there = iter(arrays)
        rows, indices = next(there), iter([next(there) if isinstance(index, np.ndarray) else index for index in self._indices()])
        take = lambda blocks: [next(indices) for _ in blocks]
        groups, bias = [(work, take(blocks)) for work, blocks in self.groups], None
        penalised, repetition, logprobs = take(self.penalised), take(self.repetition), next(indices)
        if self.bias is not None:
            at, tokens, bits, until = (next(there) for _ in range(4))
            bias = Bias(at, tokens, bits.to(torch.int32).view(torch.float32), until)
        return SamplingBatch(rows, groups, penalised, repetition, bias, logprobs, self.logprobs_k,
                             None if self.settled is None else (next(there), next(there)))


@dataclass(frozen=True)
class SamplingBatch:
    """`Sorted`, on the device."""

    rows: Tensor                              # [N] int64, request rows
    groups: list[tuple[Work, list[Index]]]
    penalised: list[Index]
    repetition: list[Index]
    bias: Bias | None
    logprobs: Index | None
    logprobs_k: int
    settled: tuple[Tensor, Tensor] | None     # [K] int64 each


@dataclass(frozen=True)
class Sampled:
    """Device tensors, entry i for batch row i. Logprobs of rows that did not ask are NaN, their ids 0."""

    tokens: Tensor                  # [N] int64
    bad: Tensor                     # [N] bool: the logits were not finite, the token means nothing
    logprobs: Tensor | None         # [N] fp32, of the sampled token
    top_ids: Tensor | None          # [N, k] int64, best first
    top_logprobs: Tensor | None     # [N, k] fp32


class SamplingState:
    """Sampling values, seeds and penalty counts, one row a request.

    Owns these device rows. `set_row` and `sample` are called in stream order (on a CPU: by the worker that computes), and a row
    that was left needs no clearing: the next `set_row` overwrites it.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str):
        """Room for `max_rows` requests over `vocab_size` logits."""
        self.max_rows, self.vocab_size, self.device = max_rows, vocab_size, torch.device(device)
        if self.device.type == "cpu":
            native.library()    # compiled now, where nobody has it yet, and not in the first request
        block = CPU_BLOCK * torch.get_num_threads() if self.device.type == "cpu" else GPU_BLOCK
        self.block_rows = min(max_rows, max(1, block // vocab_size))
        self.values = torch.ones(max_rows, VALUES, device=device)                       # [R, VALUES] fp32; rows that nobody has set are padding
        self.seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)            # [R] int64
        self.words = _token_words(torch.arange(vocab_size, device=device))              # [V] int32, the token's part of the hash
        self.counts: Tensor | None = None         # [R, V] fp32, of output tokens; allocated with the first penalty
        self.in_prompt: Tensor | None = None      # [R, V] fp32, 0 or 1; allocated with the first repetition penalty
        self.scratch: list[Tensor] = []           # four of [block_rows, V] fp32; allocated with the first row that is not greedy

    def set_row(self, row: int, params: SamplingParams, seed: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Write request row `row`: verified parameters, the sample's own 64-bit seed, and counts rebuilt from the ids so far."""
        k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        gap = -math.log(params.min_p) if params.min_p > 0 else math.inf
        values = [1 / max(params.temperature, GREEDY_TEMPERATURE), k, params.top_p, gap,
                  params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        self.values[row].copy_(torch.tensor(values), non_blocking=True)
        self.seeds[row] = seed - 2**64 if seed >= 2**63 else seed       # the same 64 bits as a signed number
        if not _penalised(params):
            return
        if self.counts is None:
            self.counts = torch.zeros(self.max_rows, self.vocab_size, device=self.device)
        ids, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
        self.counts[row].zero_().index_copy_(0, self._upload(ids), self._upload(counts.astype(np.float32)))
        if params.repetition_penalty != 1:
            if self.in_prompt is None:
                self.in_prompt = torch.zeros(self.max_rows, self.vocab_size, device=self.device)
            self.in_prompt[row].zero_().index_fill_(0, self._upload(np.unique(np.asarray(prompt_ids, dtype=np.int64))), 1)

    def ask(self, params: SamplingParams, prompt_len: int, end_ids: Sequence[int] = ()) -> Ask:
        """What one request asks for in every step. end_ids: what `min_tokens` holds back."""
        bias = _bias_of(params, end_ids)
        return Ask(work_of(params, self.vocab_size), _penalised(params), params.repetition_penalty != 1, params.logprobs is not None,
                   params.logprobs or 0, None if bias is None else (prompt_len, *bias))

    @staticmethod
    def members(rows: Sequence[int], asks: Sequence[Ask]) -> Members:
        """Request rows with what they ask for."""
        kinds = sorted({ask.work for ask in asks})
        numbers = {work: i for i, work in enumerate(kinds)}
        flag = lambda which: np.array([ask[which] for ask in asks], bool) if any(ask[which] for ask in asks) else None
        return Members(np.array(rows, np.int64), kinds, np.array([numbers[ask.work] for ask in asks], np.int64), flag(1), flag(2), flag(3),
                       max((ask.most for ask in asks), default=0), {i: ask.bias for i, ask in enumerate(asks) if ask.bias is not None})

    def sort(self, members: Sequence[tuple[int, SamplingParams, int]], counts: Sequence[int] | None = None, end_ids: Sequence[int] = (),
             settled: Mapping[int, int] = MappingProxyType({}), width: int = 0) -> Sorted:
        """`spread` of rows (request row, params, prompt length in tokens)."""
        asks = [self.ask(params, prompt_len, end_ids) for _, params, prompt_len in members]
        return self.spread(self.members([row for row, _, _ in members], asks), counts or [1] * len(members), settled, width)

    def spread(self, members: Members, counts: Sequence[int], settled: Mapping[int, int] = MappingProxyType({}), width: int = 0) -> Sorted:
        """Sort out the work of a step in which rows sample, at `counts` batch rows each. Pure host work, in any thread.

        settled: batch rows, none with logprobs, where only one token may come: that one. width: rows up to there are padding; then as many batches as
        can be have the same shape, and there must be such a row but where all rows are one group.
        """
        member = np.repeat(np.arange(len(members.rows)), counts)                        # [N] of each batch row
        kind, total = members.kind[member], len(member)
        if settled:
            kind[list(settled)] = -1
        groups = [(kind == i).nonzero()[0] for i in range(len(members.kinds))]
        if width and len(groups) == 1:
            groups = [np.arange(width)]
        of = lambda flag: np.arange(0) if flag is None else flag[member].nonzero()[0]
        fills = lambda index: width and len(index) not in (0, width)
        pad = lambda index: np.append(index, np.full(pow2(len(index)) - len(index), width - 1)) if fills(index) else index
        biased = [(at, *bias) for i, bias in members.biased.items() for at in (member == i).nonzero()[0].tolist()]
        rows = np.zeros(max(total, width), np.int64)
        rows[:total] = members.rows[member]
        greedy = self._slices if self.device.type == "cpu" and not width else lambda index: [_index(index)] if len(index) else []
        wanted = of(members.wanted)
        return Sorted(
            rows, [(work, (greedy if work.greedy else self._blocks)(pad(index))) for work, index in zip(members.kinds, groups)],
            penalised=self._blocks(pad(of(members.penalised))), repetition=self._blocks(pad(of(members.repetition))),
            bias=_join(biased, width > 0), logprobs=_index(pad(wanted)) if len(wanted) else None, logprobs_k=min(members.most, self.vocab_size),
            settled=tuple(np.array([*part], np.int64) for part in (settled.keys(), settled.values())) if settled else None)

    def batch(self, *args, **kwargs) -> SamplingBatch:
        """`sort`, and the result on the device."""
        made = self.sort(*args, **kwargs)
        return made.batch(map(self._upload, made.arrays))

    def sample(self, logits: Tensor, positions: Tensor, batch: SamplingBatch, mask: Mask | None = None, branch: Branch | None = None,
               guesses: Guesses | None = None) -> Sampled:
        """Draw one token for every batch row. Never waits for the device.

        logits [N, V] fp32, contiguous: MUTATED (edits are made in place); those of settled rows mean nothing. positions [N] int64: the index, in its
        sequence, of the token being drawn. mask: of grammars, None where no row has one. Also counts the drawn tokens of rows with penalties, but not
        where `branch` is given: then they are judged first, see `count`.
        guesses: keep a guess with probability min(1, p / q), else draw of what p has more than q; of rows that are not greedy.
        """
        raw = None if batch.logprobs is None else logits[batch.logprobs]                # [L, V]
        if isinstance(batch.logprobs, slice) and (mask is not None or batch.penalised or batch.bias is not None):
            raw = raw.clone()       # a slice is a view, and the edits below would show through it
        self._penalise(logits, batch, branch)
        if batch.bias is not None:
            add_bias(logits, positions, batch.bias)
        if mask is not None:
            mask.forbid(logits)
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)      # [N] int64: padding is in no group
        best = torch.zeros(len(logits), device=logits.device)                           # [N] fp32
        in_one = logits.device.type == "cpu" and native.library() is not None
        for work, blocks in batch.groups:
            for block in blocks:
                if guesses is not None and not work.greedy:
                    best[block], tokens[block] = self._keep_or_draw(logits, positions, batch, work, block, guesses)
                elif in_one and not work.greedy:
                    best[block], tokens[block] = self._draw(logits, positions, batch, block)
                else:
                    z = logits[block] if work.greedy else self._perturbed(logits, positions, batch, work, block)
                    best[block], tokens[block] = first_max(z)
        if batch.settled is not None:
            at, only = batch.settled
            tokens.index_copy_(0, at, only)
            best.index_fill_(0, at, 0.0)
        if branch is None:
            for block in batch.penalised:
                self.count(batch.rows[block], tokens[block], self.counts.new_ones(()) if mask is None else mask.ready[block])
        return Sampled(tokens, ~torch.isfinite(best), *_spread(raw, tokens, batch))

    def count(self, rows: Tensor, tokens: Tensor, real: Tensor) -> None:
        """Tokens that rows have put out, for their penalties: rows (request rows) and tokens int64, `real` fp32 (1, or 0 for none), of shapes that
        go together. Only once there are rows with penalties (`counts`)."""
        self.counts.index_put_((rows, tokens), real, accumulate=True)

    def _keep_or_draw(self, logits: Tensor, positions: Tensor, batch: SamplingBatch, work: Work, block: Index,
                      guesses: Guesses) -> tuple[Tensor, Tensor]:
        """Rejection sampling of the rows `block` (Leviathan et al. 2023): (a number that is finite if the logits are, the token)."""
        p = self._filtered(logits, batch, work, block).softmax(-1)                      # [n, V]
        guess = guesses.tokens[block]                                                   # [n]
        there, at = (guess >= 0).float(), guess.clamp(min=0)[:, None]
        q = torch.zeros_like(p).scatter_(1, at, there[:, None]) if guesses.q is None else guesses.q[block] * there[:, None]
        seeds = self.seeds[batch.rows[block]]
        keys = _keys(torch.where(guess >= 0, seeds ^ OTHER_NOISE, seeds), positions[block])  # without a guess: the ordinary draw
        spare = [torch.empty_like(p) for _ in range(2)]
        coin = torch.exp(-torch.exp(_log_exponential(keys, _token_words(at.new_full((1,), self.vocab_size)), [x[:, :1] for x in spare])))[:, 0]
        kept = (guess >= 0) & (coin * q.gather(1, at)[:, 0] < p.gather(1, at)[:, 0])
        left = (p - q).clamp_(min=0)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, p).log_()              # rounding may leave nothing of a p that equals q
        left.sub_(_log_exponential(keys, self.words, spare))
        return p.amax(-1), torch.where(kept, guess, left.argmax(-1))

    def _draw(self, logits: Tensor, positions: Tensor, batch: SamplingBatch, block: Index) -> tuple[Tensor, Tensor]:
        """`_perturbed` and `first_max` of the rows `block`, in kernels.cpp: (greatest value, its token)."""
        which = torch.arange(block.start, block.stop) if isinstance(block, slice) else block
        request = batch.rows[which]
        keys = _keys(self.seeds[request], positions[which])
        best, tokens = torch.empty(len(which)), torch.empty_like(which)
        native.library().nano_draw(logits.data_ptr(), self.vocab_size, len(which), which.data_ptr(), request.data_ptr(), self.values.data_ptr(),
                                   keys.data_ptr(), self.words.data_ptr(), GAP_SLACK, MASS_SLACK, tokens.data_ptr(), best.data_ptr(),
                                   torch.get_num_threads())
        return best, tokens

    def _perturbed(self, logits: Tensor, positions: Tensor, batch: SamplingBatch, work: Work, block: Index) -> Tensor:
        """The rows `block` of the edited logits, divided by the temperature, filtered, with noise: [n, V] in scratch."""
        z = self._filtered(logits, batch, work, block)
        keys = _keys(self.seeds[batch.rows[block]], positions[block])
        return z.sub_(_log_exponential(keys, self.words, [buffer[:len(z)] for buffer in self.scratch[1:]]))

    def _filtered(self, logits: Tensor, batch: SamplingBatch, work: Work, block: Index) -> Tensor:
        """The rows `block` of the edited logits, divided by the temperature, filtered: [n, V] in scratch."""
        if not self.scratch:
            self.scratch = [torch.empty(self.block_rows, self.vocab_size, device=self.device) for _ in range(4)]
        rows = batch.rows[block]
        values, n = self.values[rows], len(rows)
        z, *spare = (buffer[:n] for buffer in self.scratch)
        if isinstance(block, slice):
            torch.mul(logits[block], values[:, INV_TEMPERATURE, None], out=z)
        else:
            torch.index_select(logits, 0, block, out=z).mul_(values[:, INV_TEMPERATURE, None])
        if any(work):
            filter_(z, values, work, spare)
        return z

    def _penalise(self, logits: Tensor, batch: SamplingBatch, branch: Branch | None) -> None:
        """Repetition, then frequency and presence, in place on the batch rows that have them."""
        for block in batch.repetition:
            rows = batch.rows[block]
            z, penalty = logits[block], self.values[rows, REPETITION, None]
            seen = torch.maximum(self._counts(batch, block, branch).clamp_(max=1), self.in_prompt[rows])
            # z / penalty above zero, z * penalty below, for seen tokens. As arithmetic: `where` is ten times slower on a CPU.
            factor = torch.gt(z, 0, out=torch.empty_like(z)).mul_(1 / penalty - penalty).add_(penalty - 1)
            logits[block] = z.mul_(factor.mul_(seen).add_(1))
        for block in batch.penalised:
            rows = batch.rows[block]
            counts = self._counts(batch, block, branch)
            z = logits[block].sub_(counts * self.values[rows, FREQUENCY, None])
            logits[block] = z.sub_(counts.clamp_(max=1).mul_(self.values[rows, PRESENCE, None]))

    def _counts(self, batch: SamplingBatch, block: Index, branch: Branch | None) -> Tensor:
        """How often each token stands in the output of the rows `block`, guesses on their branch included: [n, V] fp32, a copy."""
        counts = self.counts[batch.rows[block]]
        return counts if branch is None else counts.scatter_add_(1, branch.tokens[block], branch.real[block])

    def _blocks(self, index: np.ndarray) -> list[HostIndex]:
        whole, size = _index(index) if len(index) else slice(0), self.block_rows
        if isinstance(whole, slice):
            return [slice(i, min(i + size, whole.stop)) for i in range(whole.start or 0, whole.stop, size)]
        return [_index(index[i:i + size]) for i in range(0, len(index), size)]

    def _slices(self, index: np.ndarray) -> list[HostIndex]:
        """Of rows that are only read: none is copied, where they lie in a few runs."""
        if not len(index):
            return []
        cuts = [0, *((index[1:] - index[:-1] != 1).nonzero()[0] + 1).tolist(), len(index)]
        if len(cuts) > MOST_RUNS:
            return [_index(index)]
        return [slice(int(index[a]), int(index[b - 1]) + 1) for a, b in itertools.pairwise(cuts)]

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def pow2(n: int) -> int:
    """The least power of two that is not less than n >= 1."""
    return 1 << (n - 1).bit_length()


def _index(index: np.ndarray) -> HostIndex:
    """Of ascending rows, the last of which may be there several times."""
    if index[-1] - index[0] == len(index) - 1 and (len(index) == 1 or index[-2] != index[-1]):
        return slice(int(index[0]), int(index[-1]) + 1)
    return index.astype(np.int64, copy=False)


def _join(biased: list[tuple[int, int, np.ndarray, np.ndarray, np.ndarray]], padded: bool) -> tuple[np.ndarray, ...] | None:
    """(batch row, prompt length, tokens, values, until) of rows with biases, as one list: see `Sorted`."""
    if not biased:
        return None
    if padded:  # by adding nothing
        total = sum(len(tokens) for _, _, tokens, _, _ in biased)
        spare = np.zeros(pow2(total) - total, np.int64)
        biased = [*biased, (0, 0, spare, spare.astype(np.float32), spare)]
    rows = np.repeat(np.array([i for i, *_ in biased], dtype=np.int64), [len(tokens) for _, _, tokens, _, _ in biased])
    tokens, values = (np.concatenate([entry[part] for entry in biased]) for part in (2, 3))
    until = np.concatenate([until + prompt_len for _, prompt_len, _, _, until in biased])
    return rows, tokens, values.view(np.int32).astype(np.int64), until


def work_of(params: SamplingParams, vocab_size: int) -> Work:
    """The work that a row with these parameters needs."""
    if params.greedy:
        return Work(greedy=True)
    limited = 0 < params.top_k < vocab_size
    return Work(greedy=False, small_k=limited and params.top_k <= SMALL_K, large_k=limited and params.top_k > SMALL_K,
                top_p=params.top_p < 1, min_p=params.min_p > 0)


def first_max(z: Tensor) -> tuple[Tensor, Tensor]:
    """[n, V] fp32 -> (greatest value [n], its lowest index [n] int64). A row that holds a NaN gives NaN and some valid index."""
    width = 128
    if z.device.type != "cpu" or z.shape[-1] % width:
        return z.max(-1)
    # torch's argmax on a CPU is ten times slower than its maximum: find the first tile that holds the maximum, look inside it.
    tiles = z.view(len(z), -1, width)                                   # [n, V / width, width]
    best, tile = tiles.amax(-1).max(-1)
    return best, tile * width + tiles[torch.arange(len(z)), tile].argmax(-1)


# ---- noise ---------------------------------------------------------------------------------------------------------------------

def noise(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise of (seed, position, token): seeds, positions [N] int64; tokens [V] or [N, K] ids -> [N, V] or [N, K] fp32.

    A row samples argmax(filtered logits / temperature + noise).
    """
    keys, words = _keys(seeds, positions), _token_words(tokens)
    spare = [torch.empty(len(keys), words.shape[-1], device=words.device) for _ in range(2)]
    return _log_exponential(keys, words, spare).neg_()


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """[N] int64 twice -> [N, 2] int32: 64 mixed bits of (seed, position), the first word made odd."""
    key = _mix64(_mix64(seeds) + positions * -0x61C8864680B583EB)       # 2^64 / golden ratio, as a signed number
    words = key.view(torch.int32).view(-1, 2)                           # low word, high word: all our devices are little-endian
    words[:, 0].bitwise_or_(1)
    return words


def _mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on int64, a bijection. `>>` copies the sign, hence the masks."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & (2**33 - 1))


def _token_words(tokens: Tensor) -> Tensor:
    """Token ids -> int32 words that look random: lowbias32 (Wellons 2018), a bijection on 32 bits."""
    x = tokens.to(torch.int32) + 0x9E3779B
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


def _uniform_bits(keys: Tensor, words: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """keys [N, 2], words [V] or [N, K] int32 -> x [N, V] or [N, K] int32 in [0, 2^31). x and t are int32 buffers of that shape.

    Murmur3's finaliser (Appleby 2011) with a multiplier of the row's own: times the row's odd word, plus its other word,
    shift-xor, multiply, shift-xor. For a fixed token a bijection of the other word, so exactly uniform over keys. The last shift
    copies the sign on purpose: x ^ (x >> 15) then clears the sign bit, two numbers to one.
    """
    torch.mul(words, keys[:, 0:1], out=x).add_(keys[:, 1:2])
    torch.bitwise_right_shift(x, 16, out=t)
    x.bitwise_xor_(t.bitwise_and_(0xFFFF)).mul_(-0x7A143595)            # 0x85EBCA6B
    torch.bitwise_right_shift(x, 15, out=t)
    return x.bitwise_xor_(t)


def _log_exponential(keys: Tensor, words: Tensor, spare: list[Tensor]) -> Tensor:
    """log(E), E = -log(1 - v), v uniform in (0, 1): minus Gumbel noise, in spare[1]. spare: two or more fp32 buffers.

    The winner of an argmax has a small E, which -log(u) with a float u near 1 would round to steps of 2^-24: hence log1p.
    """
    bits = _uniform_bits(keys, words, spare[0].view(torch.int32), spare[1].view(torch.int32))
    v = spare[1].copy_(bits).clamp_(max=2.0**31 - 128)                  # the last float below 2^31, or v could be 1 and E inf
    v.mul_(-(2.0**-31)).sub_(2.0**-32)                                  # -v; exact product, one rounding: equal on all devices
    return v.log1p_().neg_().log_()


# ---- filters -------------------------------------------------------------------------------------------------------------------

def filter_(z: Tensor, values: Tensor, work: Work, spare: list[Tensor]) -> None:
    """Remove from z [n, V] fp32 (already divided by the temperature), in place, what top-k, top-p and min-p do not keep.

    values [n, VALUES]: the rows of SamplingState.values. spare: three buffers like z. top-p applies to what top-k left,
    renormalised, and keeps the token that crosses the boundary; min-p is relative to the best token.
    """
    gaps, weights, inside = spare
    torch.sub(z.amax(-1, keepdim=True), z, out=gaps)                    # [n, V] fp32, >= 0
    limit = torch.full_like(gaps[:, :1], math.inf)                      # [n, 1] fp32
    if work.small_k:
        limit = _gap_of_list(gaps, values, work.top_p)
    elif work.large_k:
        limit = _least_gap(gaps, None, values[:, TOP_K, None], inside)
    if work.top_p and not work.small_k:
        torch.neg(gaps, out=weights).exp_()                             # 1 for the best token
        if work.large_k:
            weights.mul_(torch.le(gaps, limit, out=inside))
        mass = weights.sum(-1, keepdim=True) * _share(values)
        limit = torch.minimum(limit, _least_gap(gaps, weights, mass, inside))
    if work.min_p:
        limit = torch.minimum(limit, values[:, MIN_P_GAP, None] + GAP_SLACK)
    z.add_(torch.gt(gaps, limit, out=inside), alpha=REMOVED)


def _share(values: Tensor) -> Tensor:
    """The part of the mass [n, 1] that top-p wants, less the slack."""
    top_p = values[:, TOP_P, None]
    return top_p - MASS_SLACK * (1 - top_p)


def _gap_of_list(gaps: Tensor, values: Tensor, top_p: bool) -> Tensor:
    """The limit [n, 1] of a top-k up to SMALL_K, and of a top-p within it, from the sorted list of the least gaps."""
    least = gaps.topk(min(SMALL_K, gaps.shape[-1]), largest=False).values           # [n, SMALL_K] fp32, ascending
    last = values[:, TOP_K, None].long() - 1                                        # [n, 1] int64, index of the k-th
    if top_p:
        inside = torch.arange(least.shape[-1], device=gaps.device) <= last
        mass = torch.exp(-least).mul_(inside).cumsum(-1)
        short = mass < mass[:, -1:] * _share(values)
        last = torch.minimum(short.sum(-1, keepdim=True), last)                     # the first that is not short crosses it
    return least.gather(-1, last)


def _least_gap(gaps: Tensor, weights: Tensor | None, target: Tensor, inside: Tensor) -> Tensor:
    """The least gap g [n, 1] such that the weights (None: ones) of {gaps <= g} sum to at least target [n, 1]. inside: a buffer.

    Floats >= 0 are ordered as their bits are, so the answer is built bit by bit from the top: a bit is set iff what lies strictly
    below the trial is not enough. Past infinity a trial is NaN and nothing lies below it: then all of them do not reach the target,
    and the answer is infinity.
    """
    answer = torch.zeros(len(gaps), 1, dtype=torch.int32, device=gaps.device)
    for bit in range(30, -1, -1):
        trial = answer | (1 << bit)
        torch.lt(gaps, trial.view(torch.float32), out=inside)           # 0.0 or 1.0: four times faster than a bool on a CPU
        mass = (inside if weights is None else inside.mul_(weights)).sum(-1, keepdim=True)
        answer = torch.where(mass < target, trial, answer)
    return answer.view(torch.float32).nan_to_num_(nan=math.inf, posinf=math.inf)


# ---- edits ---------------------------------------------------------------------------------------------------------------------

def add_bias(logits: Tensor, positions: Tensor, bias: Bias) -> None:
    """Add the entries of `bias` that hold at these positions ([N] int64) to logits [N, V] fp32, in place."""
    values = torch.where(positions[bias.rows] < bias.until, bias.values, 0.0)
    logits.index_put_((bias.rows, bias.tokens), values, accumulate=True)


def _penalised(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def _bias_of(params: SamplingParams, end_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(tokens int64, values fp32, until int64 counted from the prompt's end) of logit_bias and min_tokens; None if empty."""
    bias = params.logit_bias or {}
    held = set(end_ids) | set(params.stop_token_ids or ()) if params.min_tokens > 0 and not params.ignore_eos else set()
    if not bias and not held:
        return None
    tokens = np.array([*bias, *sorted(held)], dtype=np.int64)
    values = np.array([*bias.values(), *[-math.inf] * len(held)], dtype=np.float32)
    until = np.array([NEVER] * len(bias) + [params.min_tokens] * len(held), dtype=np.int64)
    return tokens, values, until


# ---- logprobs ------------------------------------------------------------------------------------------------------------------

def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's log-probabilities of given tokens. logits [N, V] fp32 raw, targets [N] int64, k in [0, 20].

    Returns (logprobs [N] fp32, top_ids [N, k] int64, top_logprobs [N, k] fp32), best first; k is cut to V. Mutates nothing, and
    needs no second [N, V]: the caller bounds memory by the size of the pieces it passes.
    """
    size = max(1, (CPU_BLOCK * torch.get_num_threads() if logits.device.type == "cpu" else GPU_BLOCK) // logits.shape[-1])
    parts = [_logprobs(logits[i:i + size], targets[i:i + size], k) for i in range(0, max(1, len(logits)), size)]
    return tuple(torch.cat(part) for part in zip(*parts))


def _logprobs(logits: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    total = logits.logsumexp(-1, keepdim=True)                          # [n, 1]
    chosen = (logits.gather(-1, targets.unsqueeze(-1)) - total).squeeze(-1)
    if k == 0:
        return chosen, targets.new_empty(len(targets), 0), logits.new_empty(len(targets), 0)
    # Always the same width, or a neighbour's k could change which ties are listed; among equals the lower id goes first.
    values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]))
    ids, order = torch.sort(ids)
    values, order = torch.sort(values.gather(-1, order), descending=True, stable=True)
    return chosen, ids.gather(-1, order)[:, :k], (values - total)[:, :k]


def _spread(raw: Tensor | None, tokens: Tensor, batch: SamplingBatch) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Logprobs of the rows that asked (raw [L, V]), laid out over all N rows."""
    if raw is None:
        return None, None, None
    found = prompt_logprobs(raw, tokens[batch.logprobs], batch.logprobs_k)
    if isinstance(batch.logprobs, slice) and len(raw) == len(tokens):
        return found
    logprobs = raw.new_full((len(tokens),), math.nan)
    top_ids = tokens.new_zeros(len(tokens), batch.logprobs_k)
    top_logprobs = raw.new_full((len(tokens), batch.logprobs_k), math.nan)
    for whole, part in zip((logprobs, top_ids, top_logprobs), found):
        whole[batch.logprobs] = part
    return logprobs, top_ids, top_logprobs


if __name__ == "__main__":
    draws = 10_000
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    print(f"argmax of logits + noise is a draw: frequencies at {draws} positions of seed 42, beside what they should be")
    for fields in ({}, {"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.5}, {"temperature": 2.0}, {"temperature": 0.0}):
        params = SamplingParams(**fields)
        state = SamplingState(max_rows=draws, vocab_size=4, device="cpu")
        state.set_row(0, params, 42, prompt_ids=[0], output_ids=[])
        z, values = probabilities.log()[None] * state.values[0, INV_TEMPERATURE], state.values[:1]
        filter_(z, values, work_of(params, 4), [torch.empty(1, 4) for _ in range(3)])
        batch = state.batch([(0, params, 1)] * draws)
        drawn = state.sample(probabilities.log().repeat(draws, 1), torch.arange(draws), batch).tokens
        for title, row in (("drawn", torch.bincount(drawn, minlength=4) / draws), ("exact", z.softmax(-1)[0])):
            print(f"  {str(fields or 'plain') if title == 'drawn' else '':20} {title}", *(f"{x:.3f}" for x in row.tolist()))
