"""Spec: several tokens a step. A drafter guesses how a text goes on, and one forward pass judges all of its guesses.

A decode step reads every weight to make one token; a few tokens more in the same step cost little. So a row's step computes, behind its last
known token, a tree of guesses, and samples at every node what the model says comes next:

    known ... 3 ","          node   0 ","  1 " 4"  2 " 5"  3 ","  4 " four"      tokens, and `parents`: two flat arrays a row
              |              parent -      0       0       1      0
              +-- 1 " 4" --- 3 ","         columns base + node, positions base + depth; a node sees what is known and its ancestors:
              +-- 2 " 5"                   one int64 of bits each (attention.py), never a mask of bytes
              +-- 4 " four"
    sampled at 0: " 4", so node 1 was right; at 1: ",", so 3 was; at 3: " 5"     -> " 4", ",", " 5": three tokens, one step

Exactness. What is sampled at a node is what would be sampled there without speculation: the same logits, edits and filters (penalties count the
tokens of the branch), and the same noise, which is a function of seed and position. The walk follows the child that equals the sample. So the text
is the text without speculation, at any temperature. `rejection` is the other rule: a guess x, drawn from the drafter's q, is kept with
probability min(1, p(x)/q(x)), else a token of max(p - q, 0) is drawn (Leviathan et al. 2023); right in distribution, but another text, and for
chains alone.

KV. Node i is written at column base + i. The accepted path is a subset of these columns: at page size 1 the row's table is permuted, accepted
slots first; where pages hold several slots, KV is moved among the row's own columns. Nothing is allocated, nothing outside the row changes.

Drafters are registered by name. A *device* drafter looks at the rows after a step and leaves its guesses for the next one on the device: `ngram`.
A *host* drafter speaks one step early, of the last token that the host knows; the device keeps the branch that was really sampled: `radix`. Names
joined by "+" are merged into one tree. Where a grammar forces text (jump.py), that comes first: a chain from the root, at whose end the guesses of
device drafters grow. Guesses stand in order of their score, parents before children, so the best n are the first n.

Length. `Lengths` weighs what a draft is likely to win, by how often the request's last guesses were right, against what its tokens cost on this
machine, t(tokens), measured at the start; it drafts nothing where that does not pay.

Where it stops: 64 nodes a row (the bits of an int64). Padding nodes (guesses that the host hoped for and the drafter did not have) are computed and
thrown away. Source: Leviathan et al. 2023, Chen et al. 2023; trees: Miao et al. 2024 (SpecInfer), Li et al. 2024 (EAGLE-2); prompt lookup: Saxena
2023; sampling coupled by shared noise: Daliri et al. 2025.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import native, sampling
from .radix import TOKEN_BYTES, Node, Tree

log = logging.getLogger("nano_sgl")
MAX_NODES = 64           # of a row's tree, the root included: the bits of an int64
DECAY = 0.9              # by so much a guess is worth less than the one before it
MAX_QUALITY = 15         # of guesses: `Lengths` keeps a record of each
LONGEST, SHORTEST = 8, 2  # tokens that a match of `ngram` may and must have
CHILDREN = 64            # children of a node that `radix` looks at
Req = Any                # the scheduler's


# ---------------------------------------------------------------------------------------------------------------------- the draft tree

@dataclass(frozen=True)
class DraftTree:
    """Guesses of B rows. Node 0 is the root, the last token that is known; parents come before their children, siblings differ.

    tokens [B, N] int64; parents [B, N] int64, of the root 0; sizes [B] int64: nodes of a row with its root, the rest is padding: valid tokens and
    parents that mean nothing. All else is derived where these are: on the device.
    """
    tokens: Tensor
    parents: Tensor
    sizes: Tensor

    @cached_property
    def inside(self) -> Tensor:
        """[B, N] bool: no padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.sizes[:, None]

    @cached_property
    def bits(self) -> Tensor:
        """[B, N] int64: bit i is set where node i is an ancestor, or the node itself. Of padding: the root."""
        nodes = self.tokens.shape[1]
        own = torch.ones((), dtype=torch.int64, device=self.tokens.device) << torch.arange(nodes, device=self.tokens.device)
        bits, jump = torch.where(self.inside, own, 1), torch.where(self.inside, self.parents, 0)
        for _ in range(nodes.bit_length()):  # after k rounds the 2^k nearest ancestors are known
            bits, jump = bits | bits.gather(1, jump), jump.gather(1, jump)
        return bits

    @cached_property
    def members(self) -> Tensor:
        """[B, N, N] bool: `bits`, one by one."""
        return (self.bits[..., None] >> torch.arange(self.tokens.shape[1], device=self.tokens.device) & 1).bool()

    @cached_property
    def depth(self) -> Tensor:
        """[B, N] int64: how far a node lies below the root; its position is the root's and this. Of padding: 0."""
        return self.members.sum(-1) - 1

    def family(self) -> tuple[Tensor, Tensor]:
        """(first child, next sibling), [B, N] int64 each, -1 for none: the tree as EAGLE's kernels take it."""
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        real = self.inside & (nodes > 0)
        is_child = real[:, None, :] & (self.parents[:, None, :] == nodes[:, None])                                       # [B, parent, node]
        later = real[:, None, :] & real[:, :, None] & (self.parents[:, None, :] == self.parents[:, :, None]) & (nodes > nodes[:, None])
        return tuple(torch.where(some.any(-1), some.int().argmax(-1), -1) for some in (is_child, later))

    def chain(self) -> DraftTree:
        """The guesses up to the first that does not follow the one before it."""
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        follows = ((self.parents == nodes - 1) | (nodes == 0)).cumprod(1)
        return DraftTree(self.tokens, self.parents, torch.minimum(self.sizes, follows.sum(1)))

    def first(self, counts: Tensor) -> DraftTree:
        """The best guesses: `counts` [B] of them a row at most."""
        return DraftTree(self.tokens, self.parents, torch.minimum(self.sizes, counts + 1))


def no_guesses(roots: Tensor, count: int) -> DraftTree:
    """Trees of a root alone, with room for `count` guesses. roots: [B] int64."""
    tokens = torch.zeros(len(roots), count + 1, dtype=torch.int64, device=roots.device)
    tokens[:, 0] = roots
    return DraftTree(tokens, torch.zeros_like(tokens), torch.ones_like(roots))


def best(roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, count: int) -> tuple[DraftTree, Tensor]:
    """The `count` candidates of greatest score, best first, among equals the earlier. They are trees because a parent stands before its children
    and scores no less. Returns the trees and their scores [B, 1 + count]; those of roots and padding mean nothing.

    roots [B] int64; of M candidates: tokens, parents (an index, -1: the root) [B, M] int64; scores [B, M] float, -inf: none.
    """
    scores, order = (part[:, :count] for part in scores.sort(dim=1, stable=True, descending=True))                       # [B, n]
    real, above = scores > -math.inf, parents.gather(1, order)
    place = torch.zeros_like(parents)
    place.scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order))                  # [B, M]
    tokens = torch.where(real, tokens.gather(1, order), 0)
    parents = torch.where(real & (above >= 0), place.gather(1, above.clamp(min=0)), 0)
    tokens, parents, scores = (F.pad(part, (1, count - order.shape[1])) for part in (tokens, parents, scores))
    tokens[:, 0] = roots
    return DraftTree(tokens, parents, 1 + real.sum(1)), scores


def expand(roots: Tensor, step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], steps: int, topk: int, count: int) -> tuple[DraftTree, Tensor]:
    """EAGLE-2's tree (Li et al. 2024): at each step the `topk` best leaves get `topk` children each; of all that were made, the `count` best
    stay, and among equals the shallower. Returns the trees and their scores [B, 1 + count], sums of logprobs along the path.

    step(tokens [B, w], beams [B, w] int64) -> (tokens [B, w, topk] int64, logprobs [B, w, topk], none above 0): the likely next tokens of w
    leaves; w is 1 (the root) at first, then topk. `beams` says which of the last step's w * topk candidates each leaf was, so that a drafter can
    follow with its own state. Siblings must differ.
    """
    made: list[tuple[Tensor, Tensor, Tensor]] = []
    leaves, beams = roots[:, None], torch.zeros_like(roots)[:, None]                                                     # [B, w]
    above, base, offset = torch.full_like(leaves, -1), torch.zeros(leaves.shape, device=roots.device), 0
    for _ in range(steps):
        tokens, logprobs = step(leaves, beams)
        scores = (base[..., None] + logprobs).flatten(1)                                                                 # [B, w * topk]
        tokens, parents = tokens.flatten(1), above.repeat_interleave(topk, 1)
        made.append((tokens, parents, scores))
        base, beams = (part[:, :topk] for part in scores.sort(dim=1, stable=True, descending=True))  # `topk` leaves ties to chance
        leaves, above = tokens.gather(1, beams), offset + beams
        offset += tokens.shape[1]
    return best(roots, *(torch.cat(parts, 1) for parts in zip(*made)), count)


def merge(trees: Sequence[tuple[DraftTree, Tensor]], count: int) -> tuple[DraftTree, Tensor]:
    """One tree of several with the same roots, each with scores [B, N] that do not rise along a path: a guess that two have made stands once, with
    the better score. The `count` best stay. Returns the tree and its scores [B, 1 + count]."""
    tokens = torch.cat([tree.tokens[:, 1:] for tree, _ in trees], 1)                                                     # [B, M]: without roots
    scores = torch.cat([torch.where(tree.inside, score, -math.inf)[:, 1:] for tree, score in trees], 1)
    starts = itertools.accumulate((tree.tokens.shape[1] - 1 for tree, _ in trees), initial=0)
    parents = torch.cat([torch.where(tree.parents > 0, tree.parents - 1 + start, -1)[:, 1:] for (tree, _), start in zip(trees, starts)], 1)
    paths = torch.cat([_paths(tree)[:, 1:] for tree, _ in trees], 1)
    same = paths[:, :, None] == paths[:, None, :]                                                                        # [B, M, M]
    stands_for = same.int().argmax(-1)                                                                                   # [B, M]: the first of them
    parents = torch.where(parents >= 0, stands_for.gather(1, parents.clamp(min=0)), -1)
    is_copy = stands_for != torch.arange(tokens.shape[1], device=tokens.device)
    scores = torch.where(same, scores[:, None, :], -math.inf).amax(-1).masked_fill(is_copy, -math.inf)
    return best(trees[0][0].tokens[:, 0], tokens, parents, scores, count)


def _paths(tree: DraftTree) -> Tensor:
    """[B, N] int64: the tokens from the root to a node as one number. Were two equal by chance, a guess would be lost, no more."""
    return (tree.members * ((tree.tokens + 1) * 0x2545F4914F6CDD1D**tree.depth)[:, None, :]).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------- verification

class Verified(NamedTuple):
    """What a step found out of B rows. `order` [B, N] int64: the nodes of the accepted path, root first, then the others; `counts` [B] int64:
    guesses that were right; `tokens` [B, N] int64: what the rows sampled along the path, counts + 1 of them; behind stands anything."""
    order: Tensor
    counts: Tensor
    tokens: Tensor


def verify(tree: DraftTree, targets: Tensor, guesses: Tensor | None = None) -> Verified:
    """Follow, from the root, the child that equals what was sampled at its parent. targets [B, N] int64, one sample a node; guesses [B, N] int64: the
    tree's tokens, or -1 for those that cannot be right. A drafter that breaks the rules (equal siblings, children before parents) harms its guesses,
    not the text."""
    nodes = torch.arange(tree.tokens.shape[1], device=targets.device)
    guesses = tree.tokens if guesses is None else guesses
    right = (guesses == targets.gather(1, tree.parents)) | (nodes == 0)                                              # [B, N]
    taken = (right[:, None, :] | ~tree.members).all(-1)  # padding, as deep as the root, comes after it
    last = torch.where(taken, tree.depth, -1).argmax(1)                                                                  # [B]
    on_path = tree.members[torch.arange(len(last), device=last.device), last]                                            # [B, N]
    order = torch.where(on_path, tree.depth, nodes + len(nodes)).argsort(dim=1)
    return Verified(order, tree.depth.gather(1, last[:, None])[:, 0], targets.gather(1, order))


# ------------------------------------------------------------------------------------------------------------------------- drafters

@dataclass(frozen=True)
class DraftOptions:
    """What a drafter may be told: `count` guesses a row at most, `branches` of a node, and of `ngram` how many tokens a match may and must have."""
    count: int = 8
    branches: int = 4
    longest: int = LONGEST
    shortest: int = SHORTEST


DRAFTERS: dict[str, type] = {}


def drafter(name: str):
    """Class decorator: makes a drafter selectable by name. It is made from DraftOptions and has one of

    draft(tokens [B, C] int, known [B] int64) -> (DraftTree, scores [B, N] float, quality [B] int64)     a device drafter, after each step;
        tokens[:, :known] is the text; quality: 0 for no guess, up to 15: guesses of like quality are right equally often. Waits for nothing.
        None: it is known, without waiting, that no row has a guess.
    propose(tree, node, rest, count) -> (tokens, parents, scores)                                    a host drafter, as each step is planned;
        node: the last of the request's own in the radix tree; rest: int32 bytes of what it knows beyond. Lists of at most `count` guesses, best
        first, parents (an index into them, -1: the last known token) before their children. Reads the tree, writes nothing.

    Scores compare the guesses of all drafters: 0 to 1, and none above its parent's.
    """
    def put(cls: type) -> type:
        if name in DRAFTERS or "+" in name:
            raise ValueError(f"drafter {name!r} is taken, or no name: + joins drafters")
        DRAFTERS[name] = cls
        return cls
    return put


def make_drafters(algorithm: str, options: DraftOptions) -> list:
    """The drafters of a name such as "ngram+radix". ValueError for one that is not known."""
    names = algorithm.split("+")
    for name in names:
        if name not in DRAFTERS or names.count(name) > 1:
            raise ValueError(f"speculative_algorithm is {algorithm!r}, expected one of {', '.join(DRAFTERS)}, or several of them joined by +")
    return [DRAFTERS[name](options) for name in names]


def guess(drafters: Sequence, tokens: Tensor, known: Tensor, count: int) -> tuple[DraftTree, Tensor, Tensor] | None:
    """What device drafters make of a text, merged: as `draft` of one of them. See `drafter`. One that raises has no guesses."""
    parts = []
    for one in drafters:
        try:
            if (part := one.draft(tokens, known)) is not None:
                if part[0].tokens.shape != (len(known), count + 1):
                    raise ValueError(f"trees of shape {list(part[0].tokens.shape)}, expected {[len(known), count + 1]}")
                parts.append(part)
        except Exception:
            _complain(one)
    if len(parts) < 2:
        return parts[0] if parts else None
    return *merge([part[:2] for part in parts], count), torch.stack([part[2] for part in parts]).amax(0)


def _complain(one: object) -> None:
    """A drafter has failed: said aloud once."""
    log.log(logging.DEBUG if getattr(one, "has_failed", False) else logging.ERROR, "the drafter %s failed, and guesses nothing where it does",
            type(one).__name__, exc_info=True)
    one.has_failed = True


@drafter("ngram")
class Ngram:
    """Prompt lookup (Saxena 2023): where the last tokens occurred before, in prompt or output, is how they went on. A device drafter.

    Of all earlier places whose last tokens are ours, `branches` are taken, the longest match first, then the latest. What followed there is
    guessed; a place so near that its continuation runs into the present is a period, and goes on as one. Places that went on alike share a
    branch; a guess scores the sum of its places' votes, each token of a match doubles a vote. Cost: `longest` compares of the text.
    """

    def __init__(self, options: DraftOptions):
        self.options = options

    def draft(self, tokens: Tensor, known: Tensor) -> tuple[DraftTree, Tensor, Tensor]:
        """See `drafter`. quality: the length of the match."""
        if tokens.device.type == "cpu" and native.library() is not None:
            return self._draft_native(tokens.int().contiguous(), known)
        o, last = self.options, (known - 1)[:, None]                                                                     # [B, 1]
        roots = tokens.gather(1, last)[:, 0].long()
        match, end = self._places(tokens, last)                                                                          # [B, T]
        real, width = match >= o.shortest, match.shape[1]
        votes = torch.where(real, torch.exp2(match - match[:, :1]), 0.0)
        votes = votes / votes.sum(1, keepdim=True).clamp(min=1)  # the best has 1
        steps = torch.arange(o.count, device=tokens.device)[:, None]                                                     # [K, 1]
        at = steps % (last - end).clamp(min=1)[:, None] + (end + 1)[:, None]                                             # [B, K, T]
        guesses = tokens.gather(1, torch.minimum(at.flatten(1), last)).long()
        chains = guesses.view(at.shape)
        same = ((chains[..., None] == chains[:, :, None]) & real[:, None, None]).float().cumprod(1)                      # [B, K, T, T]
        leader = same.argmax(-1)                                                                                         # [B, K, T]
        scores = (same * votes[:, None, None]).sum(-1) * DECAY ** (steps + 1)
        scores = torch.where(real[:, None] & (leader == torch.arange(width, device=tokens.device)), scores, -math.inf)
        parents = F.pad((leader + steps * width)[:, :-1], (0, 0, 1, 0), value=-1)
        tree, scores = best(roots, guesses, parents.flatten(1), scores.flatten(1), o.count)
        return tree, scores, torch.where(real[:, 0], match[:, 0], 0).clamp(max=MAX_QUALITY)

    def _draft_native(self, tokens: Tensor, known: Tensor) -> tuple[DraftTree, Tensor, Tensor] | None:
        """`draft` by kernels.cpp, some forty torch operations in one call; None where no row has a guess."""
        o, (rows, columns) = self.options, tokens.shape
        guesses, parents = torch.empty(2, rows, o.count + 1, dtype=torch.int64)
        scores, (sizes, quality) = torch.empty(rows, o.count + 1), torch.empty(2, rows, dtype=torch.int64)
        found = native.library().nano_look_up(tokens.data_ptr(), columns, rows, known.data_ptr(), o.count, o.longest, o.shortest, o.branches, DECAY,
                                              guesses.data_ptr(), parents.data_ptr(), scores.data_ptr(), sizes.data_ptr(), quality.data_ptr())
        return (DraftTree(guesses, parents, sizes), scores, quality.clamp_(max=MAX_QUALITY)) if found else None

    def _places(self, tokens: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The `branches` best places: (how many of a row's last tokens occur there, the column of the last), [B, T] int64."""
        o, columns = self.options, tokens.shape[1]
        suffix = tokens.gather(1, (last - torch.arange(o.longest - 1, -1, -1, device=tokens.device)).clamp(min=0))       # [B, longest]
        windows = F.pad(tokens, (o.longest - 1, 0), value=-1).unfold(1, o.longest, 1)                                    # [B, C, longest]
        match, equal = torch.zeros_like(tokens), torch.empty_like(tokens)  # `equal`: 0 or 1. A bool, or a scalar, makes a CPU convert
        for theirs, ours in zip(windows.unbind(-1), suffix[:, None].unbind(-1)):
            torch.addcmul(torch.eq(theirs, ours, out=equal), match, equal, out=match)  # (match + 1) * equal: how many equal ones in a row
        column = torch.arange(columns, dtype=tokens.dtype, device=tokens.device)
        match *= torch.lt(column, last.to(tokens.dtype), out=equal)
        found = torch.add(column, match, alpha=columns, out=equal).topk(min(o.branches, columns)).values.long()  # longest first, then latest
        return found // columns, found % columns


@drafter("radix")
class Radix:
    """What the cache holds below a request's own place: how the same beginning went on before, in its namespace. A host drafter.

    Where branches part, a request's hits are its votes. Cost: one walk over what the request has added to its node, a heap entry a guess.
    """

    def __init__(self, options: DraftOptions):
        self.options = options

    def propose(self, tree: Tree, node: Node, rest: bytes, count: int) -> tuple[list[int], list[int], list[float]]:
        """See `drafter`."""
        node = tree.root(node.namespace) if node.is_root else node  # a request may hold the root of a namespace that was empty
        tokens, parents, scores, places = [], [], [], _places(tree, node, rest)
        if not places:
            return tokens, parents, scores
        made: dict[tuple[int, int], int] = {}  # (parent, token) -> its number: where a page is cut, several nodes may begin alike
        ticks = itertools.count()
        heap: list[tuple[float, int, int, Node, int]] = []  # (-score of its next token, tick, parent, node, offset into it in bytes)

        def offer(nodes: list[tuple[Node, int]], parent: int, score: float) -> None:
            total = sum(child.hits for child, _ in nodes)
            for child, offset in heapq.nlargest(self.options.branches, nodes, key=lambda at: at[0].hits):
                heapq.heappush(heap, (-score * child.hits / total * DECAY, next(ticks), parent, child, offset))

        offer(places, -1, 1.0)
        while heap and len(tokens) < count:
            score, _, parent, node, offset = heapq.heappop(heap)
            token = int.from_bytes(node.key[offset:offset + TOKEN_BYTES], "little")
            number = made.setdefault((parent, token), len(tokens))
            if number == len(tokens):
                tokens.append(token)
                parents.append(parent)
                scores.append(-score)
            offset += TOKEN_BYTES
            if offset < len(node.key):
                heapq.heappush(heap, (score * DECAY, next(ticks), number, node, offset))
            else:
                offer(_below(node), number, -score)
        return tokens, parents, scores


def _below(node: Node) -> list[tuple[Node, int]]:
    return [(child, 0) for child in itertools.islice(node.children.values(), CHILDREN) if child.slots is not None]


def _places(tree: Tree, node: Node, rest: bytes) -> list[tuple[Node, int]]:
    """Where cached text that begins with `rest` below a node goes on: (node, offset in bytes). A page may be cut by where `rest` ends."""
    page = tree.page_size * TOKEN_BYTES
    while rest:
        if len(rest) < page:
            return [(child, len(rest)) for child, _ in _below(node) if child.key.startswith(rest)]
        child = node.children.get(rest[:page])
        if child is None or child.slots is None:
            return []
        if len(rest) < len(child.key):
            return [(child, len(rest))] if child.key.startswith(rest) else []
        if not rest.startswith(child.key):
            return []
        node, rest = child, rest[len(child.key):]
    return _below(node)


# ---------------------------------------------------------------------------------------------------------------- how many guesses pay

class CostCurve:
    """Seconds of a step by its tokens: measured at some sizes, straight between and beyond them, never falling."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]):
        self.sizes, self.seconds = np.asarray(sizes, float), np.maximum.accumulate(np.asarray(seconds, float))

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """[n] tokens -> [n] seconds."""
        (a, b), (s, t) = (values[[max(len(values) - 2, 0), -1]] for values in (self.sizes, self.seconds))
        return np.interp(tokens, self.sizes, self.seconds) + np.maximum(tokens - b, 0) * (t - s) / max(b - a, 1)


@dataclass(slots=True)
class Record:
    """One request's guesses: what became of them, and what is known of those for its next step."""
    ends: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # (guesses that were judged, in a row, that were right): steps
    right: float = 0.0              # recent guesses that were right, and that were judged: they fade
    judged: float = 0.0
    ready: int = 0                  # guesses of device drafters for the step after the last one that the host knows
    grown: int = 0                  # behind so many tokens of forced text
    found: int = 0                  # and of all drafters
    first: int = -1                 # the best of them
    quality: int = 0
    forced: int = 0                 # tokens of forced text that were guessed right; no other number counts them
    dropped: int = 0                # steps whose tokens were dropped since the output was tokenised anew
    draft_s: float = 0.0            # seconds that making guesses took,
    verify_s: float = 0.0           # and the steps that verified some

    def add(self, drafted: int, deepest: int, right: int) -> tuple[int, int, int]:
        """A step more: so many guesses were judged, so many of them could have been right, and so many were. Returns its entry in `ends`."""
        end = drafted, deepest if deepest <= right else right + 1, right
        self.ends[end] = self.ends.get(end, 0) + 1
        return end

    @property
    def steps(self) -> int:
        """That verified guesses, or could have."""
        return sum(self.ends.values())

    @property
    def proposed(self) -> int:
        return sum(drafted * count for (drafted, _, _), count in self.ends.items())

    @property
    def accepted(self) -> int:
        return sum(right * count for (_, _, right), count in self.ends.items())

    def by_depth(self) -> list[tuple[int, int]]:
        """[d]: steps in which the guess d + 1 tokens ahead was right, and those in which there was one, all before it right."""
        return [tuple(sum(count for end, count in self.ends.items() if end[which] > depth) for which in (2, 1))
                for depth in range(max((judged for _, judged, _ in self.ends), default=0))]

    def summary(self) -> dict:
        """What a client is told, under SGLang's names, and accept rates by depth. Lengths count the token that every step makes."""
        return {"spec_verify_ct": self.steps, "spec_num_proposed_drafts": self.proposed, "spec_num_correct_drafts": self.accepted,
                "spec_accept_length": 1 + self.accepted / max(self.steps, 1), "spec_accept_rate": self.accepted / max(self.proposed, 1),
                "spec_accept_rate_by_depth": [right / judged for right, judged in self.by_depth()],
                "spec_draft_time": self.draft_s, "spec_verify_time": self.verify_s}


class Lengths:
    """How many guesses each request drafts: as many as pay off, down to none.

    A guess behind d - 1 others is right with probability rate^d, where rate is how often the request's recent guesses were right, and at first
    how often those of the same quality were, of all requests. The best guesses of all rows are taken in turn, as long as expected tokens divided
    by t(tokens) rise. A guess that was made and not drafted is judged all the same, by what was sampled in its place, so that a request
    which stopped drafting finds back.
    """

    FADE, PRIOR, WORTH = 0.85, 2.0, 1.06  # what is left of a record after a step; the weight of others' records; the gain that is worth the trouble

    def __init__(self, cost: CostCurve, count: int):
        self.cost, self.count = cost, count
        self.right, self.judged = np.full(MAX_QUALITY + 1, 1.0), np.full(MAX_QUALITY + 1, 2.0)  # by quality

    def choose(self, records: Sequence[Record], found: Sequence[int], forced: Sequence[int] = ()) -> list[int]:
        """Guesses for each row of a step, `forced` text that is drafted anyway left out; `found`: how many it has, or may have."""
        if not any(found):
            return [0] * len(records)
        prior = self.right / self.judged
        rate = np.array([(r.right + self.PRIOR * prior[r.quality]) / (r.judged + self.PRIOR) for r in records])
        steps = np.arange(1, self.count + 1)
        wins = np.where(steps <= np.array(found)[:, None], rate[:, None] ** steps, 0.0).ravel()
        order = np.argsort(-wins, kind="stable")
        anyway = len(records) + sum(forced)
        expected = anyway + np.concatenate(([0.0], np.cumsum(wins[order])))
        speed = expected / self.cost(anyway + np.arange(len(expected)))
        most = int(speed.argmax())
        if speed[most] < self.WORTH * speed[0]:
            return [0] * len(records)
        taken = np.bincount(order[:most] // self.count, minlength=len(records))
        return taken.tolist()

    def learn(self, record: Record, deepest: int, tokens: Sequence[int]) -> None:
        """A step has ended: `tokens` were sampled, all but the last of them guessed right, of `deepest` that could have been."""
        right, wrong = len(tokens) - 1, len(tokens) - 1 < deepest
        if not deepest and record.found:
            right, wrong = int(tokens[0] == record.first), tokens[0] != record.first
        if right or wrong:
            record.right, record.judged = record.right * self.FADE + right, record.judged * self.FADE + right + wrong
            q = record.quality
            self.right[q], self.judged[q] = self.right[q] * 0.998 + right, self.judged[q] * 0.998 + right + wrong


# ------------------------------------------------------------------------------------------------------------------------ in the engine

@dataclass
class Drafts:
    """What a step needs from the host for its guesses: S rows sample, M nodes are judged. `packed`: its arrays, see `Speculation.plan`."""
    packed: list[np.ndarray]        # [n] i64 each
    nodes: int                      # N, of the largest tree


@dataclass(frozen=True)
class Step:
    """The guesses of a step on the device, of S rows that sample. M nodes: their roots and guesses, padding too."""
    tree: DraftTree                 # of S rows
    base: Tensor                    # [S] int64 column of the root
    forced: Tensor                  # [S] int64 guesses of forced text: nodes 1 to there
    at: Tensor                      # [M] int64 of each node: which of the step's tokens it is,
    row: Tensor                     # [M] int64  whose it is, of S,
    node: Tensor                    # [M] int64  and its number in the tree

    def of(self, values: Tensor) -> Tensor:
        """[S, N] -> [M]: values of the nodes."""
        return values[self.row, self.node]

    @property
    def columns(self) -> Tensor:
        """[M] int64. Padding stands where its root does."""
        return self.base[self.row] + self.node * self.of(self.tree.inside)

    @property
    def positions(self) -> Tensor:
        """[M] int64."""
        return self.base[self.row] + self.of(self.tree.depth)

    def branch(self) -> sampling.Branch:
        """The guesses above each node and itself, which penalties count."""
        real = self.tree.members[self.row, self.node].float()
        real[:, 0] = 0  # the root has been counted
        return sampling.Branch(self.tree.tokens[self.row], real)

    def next_of_chain(self) -> sampling.Guesses:
        """The guess behind each node of a chain, for rejection sampling. What our drafters guess, they are certain of."""
        following = F.pad(torch.where(self.tree.inside, self.tree.tokens, -1)[:, 1:], (0, 1), value=-1)
        return sampling.Guesses(self.of(following), None)


@dataclass
class Judged:
    """What a step with guesses leaves for the host, of S rows."""
    order: Tensor                   # [S, N] int64, as in Verified
    counts: Tensor                  # [S] int64, guesses that were right
    drafted: Tensor                 # [S] int64, guesses that were judged
    deepest: Tensor                 # [S] int64, how many of them could have been right
    forced: Tensor                  # [S] int64, how many of those were forced text


@dataclass
class Next:
    """What a step leaves for the host of the guesses for the next one, of S rows."""
    found: Tensor                   # [S] int64, how many there are,
    first: Tensor                   # [S] int64  the best of them,
    quality: Tensor                 # [S] int64  and how good they are; they stand behind
    grown: Tensor                   # [S] int64  so many tokens of forced text


class Speculation:
    """The drafters of an engine, the guesses of its rows on the device, and how many are drafted.

    `lengths`: None drafts `options.count` guesses wherever there are some. `max_rows`: as of the device rows.
    """

    def __init__(self, algorithm: str | None, options: DraftOptions, max_rows: int, vocab_size: int, device: str, lengths: Lengths | None):
        """algorithm: names of drafters, None: forced text alone is guessed."""
        self.options, self.vocab_size, self.lengths = options, vocab_size, lengths
        self.drafters = drafters = [] if algorithm is None else make_drafters(algorithm, options)
        self.ahead = [d for d in drafters if hasattr(d, "draft")]
        self.host = [d for d in drafters if hasattr(d, "propose")]
        self.branching = bool(drafters) and (options.branches > 1 or len(drafters) > 1)
        # Of each row, for its next step. Written in place, so nothing that a tree derives is asked of it
        self.ready = no_guesses(torch.zeros(max_rows, dtype=torch.int64, device=device), options.count)
        self.scores = torch.ones(self.ready.tokens.shape, device=device)
        self.grown = torch.zeros(max_rows, dtype=torch.int64, device=device)     # tokens of forced text before them
        self.total = Record()  # of all requests
        self.proposals: dict[Req, tuple[list[int], list[int], list[float]]] = {}

    # ---- on the host, as a step is planned

    def choose(self, reqs: Sequence[Req], records: Sequence[Record], forced: Sequence[int], tree: Tree, in_flight: bool) -> dict[Req, int]:
        """How many guesses each of the rows may draft in the step to come. forced: tokens that a grammar forces, all of which are drafted; in_flight:
        the host does not know the last step's tokens."""
        self.proposals.clear()
        found, most = [], self.options.count
        for req, record, first in zip(reqs, records, forced):
            count = record.ready if in_flight or record.grown == first else 0    # else it has become known since that more is forced
            if self.host:
                made = self._propose(req, tree, in_flight)
                if made[0]:
                    self.proposals[req] = made
                    count += len(made[0])
                    if not record.ready:
                        record.first, record.quality = made[0][0], 15
            found.append(count if count < most and not in_flight else most if count else 0)
            record.found = count
        chosen = found if self.lengths is None else self.lengths.choose(records, found, forced)
        return {req: min(count + first, MAX_NODES - 1) for req, count, first in zip(reqs, chosen, forced) if count + first}

    def learn(self, made: Iterable[tuple[int, Record, list[int], int, bool]], judged: Judged | None, coming: Next | None, draft_s: float,
              rest_s: float) -> None:
        """A step's results, at least one of the two; seconds of making the guesses for the next, and of all before. made: for rows that sampled their
        numbers, records, the tokens, all but the last of which were guessed right, how many of them a stop or a limit leaves, at least one, and
        whether they are the first of the request, so that no drafter has guessed."""
        spent = draft_s, rest_s if judged is not None else 0.0
        self.total.draft_s, self.total.verify_s = self.total.draft_s + spent[0], self.total.verify_s + spent[1]
        parts = () if judged is None else (judged.drafted, judged.deepest, judged.forced)
        ours = list(zip(*(part.tolist() for part in parts)))
        parts = () if coming is None else (coming.found, coming.first, coming.quality.clamp(0, MAX_QUALITY), coming.grown)
        theirs, ends, all_forced = list(zip(*(part.tolist() for part in parts))), [], 0
        for i, record, tokens, kept, first in made:
            drafted, deepest, forced = ours[i] if ours else (0, 0, 0)
            if kept < len(tokens):
                deepest = kept - 1
            if kept <= forced:          # what was guessed behind forced text had no chance
                forced = kept - 1
            else:
                if self.lengths is not None:
                    self.lengths.learn(record, deepest - forced, tokens[forced:kept])
                if not first:
                    ends.append(record.add(drafted - forced, deepest - forced, kept - 1 - forced))
            record.ready, record.first, record.quality, record.grown = theirs[i] if theirs else (0, -1, 0, 0)
            record.found = record.ready
            record.draft_s += draft_s
            record.verify_s += spent[1]
            record.forced += forced
            all_forced += forced
        self.total.ends.update(ends)
        self.total.forced += all_forced

    def _propose(self, req: Req, tree: Tree, in_flight: bool) -> tuple[list[int], list[int], list[float]]:
        rest = req.key()[TOKEN_BYTES * req.node.end:]
        count = min((2 if in_flight else 1) * (self.options.count + 1), MAX_NODES - 1)
        tokens, parents, scores = [], [], []
        for drafter in self.host:
            try:
                made, begin = list(zip(*drafter.propose(tree, req.node, rest, count), strict=True)), len(tokens)
                for i, (token, parent, score) in enumerate(made):
                    if not (0 <= token < self.vocab_size and -1 <= parent < i and 0 <= score <= 1):
                        raise ValueError(f"guess {i} is token {token} below guess {parent}, with a score of {score}")
            except Exception:
                _complain(drafter)
                continue
            for token, parent, score in made:
                tokens.append(int(token))
                parents.append(int(parent) + begin if parent >= 0 else -1)
                scores.append(float(score))
        return tokens[:MAX_NODES - 1], parents[:MAX_NODES - 1], scores[:MAX_NODES - 1]

    def plan(self, reqs: list[Req], counts: np.ndarray, last: np.ndarray, limits: np.ndarray) -> Drafts:
        """The host's part of a step with guesses. Of the S rows that sample: `counts` of guesses, `last`: which of the step's tokens is the last
        (its nodes are the tokens up to there), `limits`: columns that exist. [S] ints each."""
        sizes = counts + 1
        row = np.repeat(np.arange(len(reqs)), sizes)
        node = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        made = []
        if self.proposals:
            made = [self.proposals.get(req, ([], [], [])) if count else ([], [], []) for req, count in zip(reqs, counts.tolist())]
        wide = max((len(tokens) for tokens, _, _ in made), default=0)
        packed = [np.repeat(last - counts, sizes) + node, row, node, counts, limits]
        if wide:
            padded = lambda part, scale=1: np.array([[int(x * scale) for x in m[part]] + [0] * (wide - len(m[part])) for m in made], np.int64).ravel()
            packed += [padded(0), padded(1), padded(2, 2**20), np.array([len(m[0]) for m in made]), np.array([req.known_len for req in reqs])]
        return Drafts(packed, int(sizes.max()))

    # ---- on the device, in the order of the stream

    def step(self, nodes: int, arrays: Sequence[Tensor], tokens: Tensor, rows: Tensor, known: Tensor, columns: int,
             chains: tuple[Tensor, Tensor] | None = None) -> Step:
        """The guesses of a step. nodes, arrays: `Drafts.nodes`, `.packed`; tokens [R, C]: of all rows; rows [S]; known [S]: tokens of each that are
        there, and guesses at most, less than `columns`; chains: forced text behind those, (tokens [S, K] int64, how many [S] int64)."""
        at, row, node, counts, limits, *host = arrays
        base, most = known - 1 - counts, nodes - 1
        roots = tokens[rows, base].long()
        made: list[tuple[DraftTree, Tensor]] = []
        if self.ahead:
            ready = self.ready.tokens[rows]
            ready[:, 0] = roots
            sizes = self.ready.sizes[rows] if chains is None else torch.where(self.grown[rows] == chains[1], self.ready.sizes[rows], 1)
            made.append((DraftTree(ready, self.ready.parents[rows], sizes), self.scores[rows]))
        if chains is not None:
            made = [graft(roots, *chains, *(made[0] if made else (no_guesses(roots, 0), torch.ones(len(rows), 1, device=rows.device))))]
        if host:
            made.append(reroot(*(part.view(len(rows), -1) for part in host[:3]), *host[3:], tokens[rows, :columns], base))
        tree = made[0][0] if len(made) == 1 else merge(made, most)[0] if made else no_guesses(roots, most)
        wide = lambda part: F.pad(part, (0, max(most + 1 - part.shape[1], 0)))[:, :most + 1]
        room = torch.minimum(counts, limits - 1 - base).clamp(min=0)  # guesses for which there are slots
        before = torch.arange(-1, most, device=rows.device)  # whoever made the tree: its tokens exist, and its parents come first
        tree = DraftTree(wide(tree.tokens).clamp(0, self.vocab_size - 1), torch.minimum(wide(tree.parents), before).clamp(min=0),
                         tree.sizes.clamp(1, most + 1)).first(room)
        tree = tree if self.branching else tree.chain()
        return Step(tree, base, torch.zeros_like(base) if chains is None else torch.minimum(chains[1], tree.sizes - 1), at, row, node)

    def draft(self, rows: Tensor, tokens: Tensor, known: Tensor, chains: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Guess how the rows go on after a step, and keep it for the next. rows [S]; tokens [S, C], which may be written; known [S]: tokens of each
        that are there; chains: forced text behind those, as in `step`. Returns (how many guesses, the best, their quality, tokens of forced text
        before them), [S] int64 each."""
        self.grown[rows] = 0
        if chains is not None:
            at = known[:, None] + torch.arange(chains[0].shape[1], device=rows.device)
            fits = (at < tokens.shape[1]) & (at < (known + chains[1])[:, None])
            at = torch.where(fits, at, known[:, None] - 1)
            tokens.scatter_(1, at, torch.where(fits, chains[0].to(tokens.dtype), tokens.gather(1, at)))
            self.grown[rows] = chains[1]
            known = torch.minimum(known + chains[1], torch.full_like(known, tokens.shape[1]))
        made = guess(self.ahead, tokens, known, self.options.count)
        if made is None:
            self.ready.sizes[rows] = 1
            zero = torch.zeros_like(known)
            return zero, zero - 1, zero, self.grown[rows]
        tree, self.scores[rows], quality = made
        self.ready.tokens[rows], self.ready.parents[rows], self.ready.sizes[rows] = tree.tokens, tree.parents, tree.sizes
        return tree.sizes - 1, torch.where(tree.sizes > 1, tree.tokens[:, 1], -1), quality, self.grown[rows]


def padded(packed: Sequence[np.ndarray], rows: int, places: int, token: int) -> list[np.ndarray]:
    """`Drafts.packed` for S = `rows` and M = `places`: what is added are roots alone, at the step's token `token`, of a row of one token."""
    at, row, node, counts, limits, *host = packed
    real, fill = len(counts), lambda part, size, value: np.concatenate((part, np.full(size - len(part), value, np.int64)))
    arrays = [fill(at, places, token), fill(row, places, min(real, rows - 1)), fill(node, places, 0), fill(counts, rows, 0), fill(limits, rows, 1)]
    if host:
        wide = sampling.pow2(len(host[0]) // real)
        for part in host[:3]:
            grid = np.zeros((rows, wide), np.int64)
            grid[:real, :len(part) // real] = part.reshape(real, -1)
            arrays.append(grid.ravel())
        arrays += [fill(host[3], rows, 0), fill(host[4], rows, 1)]
    return arrays


def graft(roots: Tensor, tokens: Tensor, lens: Tensor, tree: DraftTree, scores: Tensor) -> tuple[DraftTree, Tensor]:
    """Guesses moved to the end of a chain: roots [B]; of the chain tokens [B, K], `lens` [B] of which count; a tree of B rows with scores [B, N]."""
    nodes = torch.arange(tokens.shape[1] + tree.tokens.shape[1], device=roots.device).expand(len(roots), -1)              # [B, K + N]
    behind = (nodes - lens[:, None]).clamp(min=0)                                                                         # number in the tree
    at, in_chain = behind.clamp(max=tree.tokens.shape[1] - 1), behind == 0
    chain = torch.cat([roots[:, None], tokens], 1).gather(1, nodes.clamp(max=tokens.shape[1]))
    made = DraftTree(torch.where(in_chain, chain, tree.tokens.gather(1, at)),
                     torch.where(in_chain, nodes - 1, tree.parents.gather(1, at) + lens[:, None]).clamp(min=0), tree.sizes + lens)
    return made, torch.where(in_chain, 1.0, scores.gather(1, at))


def reroot(guesses: Tensor, parents: Tensor, scores: Tensor, counts: Tensor, known: Tensor, tokens: Tensor, base: Tensor) -> tuple[DraftTree, Tensor]:
    """What is left of guesses that were made when `known` tokens were known, now that the last of them is in column `base`: the part that begins
    with what has come. guesses, parents (-1: the root), scores (times 2^20) [S, H] int64; counts, known, base [S]; tokens [S, C]."""
    old, scores = DraftTree(F.pad(guesses, (1, 0)), F.pad(parents + 1, (1, 0)), counts + 1), F.pad(scores, (1, 0), value=2**20)
    shift = (base + 1 - known)[:, None]                                                                                  # [S, 1]
    actual = tokens.gather(1, (known[:, None] - 1 + old.depth).clamp(max=tokens.shape[1] - 1))
    holds = (old.depth > shift) | (old.tokens == actual) | (old.depth == 0)
    alive = (holds[:, None, :] | ~old.members).all(-1) & old.inside
    kept = alive & (old.depth > shift)
    root = torch.where(alive & (old.depth == shift), scores, 0).amax(1, keepdim=True).clamp(min=1)
    above = torch.where(kept.gather(1, old.parents), old.parents, -1)
    return best(tokens.gather(1, base[:, None])[:, 0].long(), old.tokens, above, torch.where(kept, scores / root, -math.inf), guesses.shape[1])


def _show(tree: DraftTree, row: int, words: Callable[[int], str]) -> list[str]:
    """A tree as text, a node a line, depth first."""
    child, sibling = (links[row].tolist() for links in tree.family())
    lines, stack = [], [0]
    while stack:
        node = stack.pop()
        lines.append(f"{node:4}  {'  ' * int(tree.depth[row, node])}{words(int(tree.tokens[row, node]))}")
        stack += [link for link in (sibling[node], child[node]) if link >= 0]
    return lines


def _demo() -> None:
    text = "the cat sat on the mat and the cat sat on the log and then the cat sat".split()
    vocabulary = sorted(set(text))
    ids = torch.tensor([[vocabulary.index(word) for word in text]])
    tree, scores, quality = Ngram(DraftOptions(count=7, branches=2)).draft(ids, torch.tensor([len(text)]))
    print(f"{' '.join(text)} ...\n\nngram, from a match of {int(quality[0])} tokens:")
    print("\n".join(_show(tree, 0, vocabulary.__getitem__)))
    print("\nnode  parent  depth  sees of the tree")
    for node in range(int(tree.sizes[0])):
        seen = "".join("x" if there else "." for there in tree.members[0, node].tolist())
        print(f"{node:4}  {int(tree.parents[0, node]):6}  {int(tree.depth[0, node]):5}  {seen}  bits {int(tree.bits[0, node]):3}")
    really = "on the mat and".split()
    targets = torch.tensor([[vocabulary.index(really[min(depth, 3)]) for depth in tree.depth[0].tolist()]])  # what is sampled at each node
    found = verify(tree, targets)
    count = int(found.counts[0])
    print(f"\nthe model says {' '.join(really)!r}: {count} guesses were right, path {found.order[0, :count + 1].tolist()}, "
          f"so one step made {count + 1} tokens")


if __name__ == "__main__":
    _demo()
