"""Constraint: outputs that follow a grammar, in a loop that waits for nothing.

A grammar's state is an integer (grammar.py), so all that a request needs of its grammar is one number in its device row:

      step n, in stream order          state of the row, or of each node of its draft tree
          forward -> logits   --mask--> sample --token--> next state, into the row          no value crosses to the host for it,
                                ^                  ^                                        and no mask to the device
                         the device's copy of the tables (masks.py): what each state allows, and what follows each token
                                ^
      host, beside the loop     rows of tables, as states are met (compiler.py)

  miss       The row of a state may not be there yet. Then nothing is sampled: the request computes its last token again in its next step. It costs
             that request one step and nobody else anything. The host, which is told the state of each row with its tokens, has the row built at
             once: where a step takes longer than that (on a CPU always), tables are brought up to date after the forward pass, and nothing is lost.
  held       A request that has missed sits out until its row is there.
  drafts     States of a draft tree are a walk from its root. A guess that the grammar forbids, or whose state has no row, ends its branch.
  few        Where a state is known to allow few tokens (jump.py), and to be the row's, the logits of others are not computed. Where it allows
             one, that is the token: no logits, no mask, no draw.
  habits     Forced text is guessed as far as the model writes it as the tokenizer does: learned of each state, from what all requests write.
  the end    End ids are allowed where the text may end. Behind one a row is DEAD: it samples nothing more.

Requests wait for their grammar before they are queued, so that nobody waits for them; equal grammars are one, compiled once.

Invariant: a row's state is a function of its grammar and its tokens, whatever was missed, retracted or guessed. Cost: a gather and a pass over the
logits of each constrained row; per step a look whether there is news. Where it stops: a state from which no token of the vocabulary leads on ends its
request with an error. Source: SGLang's and XGrammar's masks are made on the host for each token; states on the device follow Willard and Louf (2023).
"""

from __future__ import annotations

import itertools
import operator
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import native, sampling
from .compiler import Compiler
from .grammar import INDEX, Grammar
from .masks import DEAD, DeviceTables
from .protocol import Request, RequestError
from .rules import GrammarError
from .spec import Step
from .tables import Tables
from .vocab import Vocab

FOREVER = 2**62
MOST = 4096                # tokens whose logits alone are computed in one step: gathering what they are made of is work, too
FADE, OFTEN = 0.2, 0.3     # how fast a request's habit is forgotten; share of steps from which on it is worth places in each of them
GRACE_S = 1.0              # a compile that began at once ends by itself before its request does
LEARN = 0.4                # how much the last step counts of how far a chain is followed
FOLLOWS, ROWS = 0.65, 10   # how likely a token of a chain must be to be worth its place, in steps of many rows; and of fewer, rows by ROWS


@dataclass
class Constraint:
    """What the host knows of a request's grammar."""
    grammar: Grammar
    state: int                      # behind its last known token
    longest: int = 0                # of the chains that it has met
    often: float = 0.0              # share of its last states that had one
    drafted: int = 0                # guesses of the step in flight
    leave_at: int = FOREVER         # tokens known from which on it thinks no more

    @property
    def has_row(self) -> bool:
        return self.grammar.tables.rows[self.state & INDEX] is not None

    def come_to(self, state: int) -> None:
        """Its tokens lead there, or its time for thinking was over."""
        self.state = state
        if self.grammar.closing is not None and not self.grammar.has(state):
            self.grammar = self.grammar.closing

    def watch(self, tokens: Sequence[int]) -> None:
        """Its next tokens are these: how far they are the chain of its state, which not all models write as the tokenizer does."""
        tables, index = self.grammar.tables, self.state & INDEX
        if chain := tables.chain_of.get(index):
            if index not in tables.habits and chain[:len(tokens)] == tokens[:len(chain)]:
                return                                                      # as ever
            rates = tables.habits.setdefault(index, [1.0] * len(chain))     # of each token where those before it have come
            for i, (guess, token) in enumerate(zip(chain, tokens)):
                rates[i] += ((guess == token) - rates[i]) * LEARN
                if guess != token:
                    break

    @staticmethod
    def _likely(rates: list[float], least: float) -> int:
        """How many tokens of a chain come with a probability of `least`."""
        return sum(chance >= least for chance in itertools.accumulate(rates, operator.mul))

    def forced(self, in_flight: bool, rows: int) -> int:
        """How many tokens are forced behind its state, as far as guessing them pays off in a step of so many rows. in_flight: behind the state
        that it will have after a step that nobody knows yet: what that leaves of them, or as many as ever, where it comes to forced text every few
        steps."""
        tables, index = self.grammar.tables, self.state & INDEX
        here = len(tables.chain_of.get(index, ()))
        if here and index in tables.habits:
            here = self._likely(tables.habits[index], min(rows / ROWS, FOLLOWS))
        if here > self.longest:
            self.longest = here
        if not in_flight:
            return here
        self.often += (bool(here) - self.often) * FADE
        return here - self.drafted - 1 if here > self.drafted else self.longest * (self.often > OFTEN)

    def few(self, count: int) -> list[np.ndarray | None]:
        """Of the first of `count` places at which it samples from its state on: the tokens that may come there, if they are few. (A chain's nodes
        are a draft tree's first, in order: spec.graft.)"""
        return self.grammar.tables.few.get(self.state, [])[:count] if self.leave_at == FOREVER else []


def sort_places(lists: Sequence[Sequence[np.ndarray | None]], counts: Sequence[int]) -> tuple[list[np.ndarray], dict[int, int]]:
    """The places of a step, `counts` of each row; `lists` say of the first of a row what may come there, if that is few. ([Places that need the
    logits of all tokens, of some, the tokens of the latter], int64 each; the places that are settled, with the one token that may come.) More tokens
    than MOST are not worth it: then all that are not settled need all."""
    if not any(lists):
        return [np.arange(sum(counts)), *np.zeros((2, 0), np.int64)], {}
    needs_all, some_of, settled, first = [], {}, {}, 0
    for some, count in zip(lists, counts):
        for place, allowed in itertools.zip_longest(range(first, first + count), some):
            if allowed is None:
                needs_all.append(place)
            elif len(allowed) == 1:
                settled[place] = int(allowed[0])
            else:
                some_of[place] = allowed
        first += count
    union = np.unique(np.concatenate(list(some_of.values()))) if some_of else np.zeros(0, np.int64)
    if len(union) > MOST:
        needs_all, some_of, union = sorted([*needs_all, *some_of]), {}, union[:0]
    return [np.array(needs_all, np.int64), np.array(list(some_of), np.int64), union], settled


class SortedGroup(NamedTuple):
    """`Group`, as the host has sorted it."""
    tables: Tables
    at: np.ndarray
    places: np.ndarray | None


class Group(NamedTuple):
    """The rows of a step whose grammars share tables, of S rows that sample at M places. C of them, at K places."""
    tables: DeviceTables
    at: Tensor                      # [C] int64 of S
    places: Tensor | None           # [K] int64 of M, those that are settled left out; None: all of them, in order


@dataclass
class Walked:
    """What a step leaves for the host, of S rows."""
    states: Tensor                  # [S] int64 behind the step; DEAD: of rows without a grammar, or the text has ended
    missed: Tensor                  # [S] bool: nothing was sampled


class Walk:
    """The states of one step, of S rows and N nodes; without guesses there is one, the root."""

    def __init__(self, constraints: Constraints, groups: Sequence[Group], rows: Tensor, known: Tensor, step: Step | None = None):
        """rows: [S] int64 request rows; known: [S] int64 tokens that are known at their roots."""
        self.constraints, self.groups, self.rows, self.step = constraints, groups, rows, step
        self.states = torch.full((len(rows), step.tree.tokens.shape[1] if step else 1), DEAD, dtype=torch.int64, device=rows.device)  # [S, N]
        self.ready = torch.ones(self.states.shape, dtype=torch.bool, device=rows.device)                                             # [S, N]
        for tables, at, _ in groups:
            states = constraints.states[rows[at]]
            if constraints.budgets:
                depth = torch.zeros_like(known[at, None]) if step is None else step.tree.depth[at]
                over = known[at, None] + depth >= constraints.leave_at[rows[at], None]
                states = tables.leave(states, over[:, 0])
            states = states[:, None] if step is None else tables.walk(states, step.tree.tokens[at], step.tree.parents[at])
            self.states[at] = states
            self.ready[at] = tables.has_row(states.flatten()).view(states.shape)
            if constraints.budgets and step is not None:  # what would be thought beyond is not guessed
                self.ready[at] &= ~(over & tables.thinks(states))

    def mask(self) -> sampling.Mask:
        """For the sampler, of the places that are sampled."""
        ready = self.ready[:, 0] if self.step is None else self.step.of(self.ready)
        return sampling.Mask(self._apply, ready.float())

    def _apply(self, logits: Tensor) -> None:
        states = self.states[:, 0] if self.step is None else self.step.of(self.states)      # [M]
        for tables, _, places in self.groups:
            tables.mask(logits, places, states if places is None else states[places])

    def guesses(self) -> Tensor:
        """[S, N] int64: the guesses, -1 for those that may not come, which equals nothing that is sampled."""
        return torch.where(self.ready & self.ready[:, :1], self.step.tree.tokens, -1)

    def finish(self, tokens: Tensor, nodes: Tensor | None = None) -> Walked:
        """Put into the rows what follows the `tokens` [S] that were sampled at `nodes` [S] (None: the roots)."""
        missed, states = ~self.ready[:, 0], torch.full_like(self.rows, DEAD)
        last = self.states[:, 0] if nodes is None else self.states.gather(1, nodes[:, None])[:, 0]
        for tables, at, _ in self.groups:
            states[at] = torch.where(missed[at], self.states[at, 0], tables.advance(last[at], tokens[at]))
            self.constraints.states[self.rows[at]] = states[at]
        return Walked(states, missed)


class Compiling(NamedTuple):
    """A request that waits for its grammar."""
    request: Request
    seed: int
    grammar: Future
    since: float


class Constraints:
    """The grammars of an engine's requests. `states` [R] int64, one a device row, and the copies of tables belong to whoever runs the steps; all
    else is for the engine's thread, but `compile`, which any may call."""

    def __init__(self, make_vocab: Callable[[], Vocab], max_rows: int, device: str, *, whitespace: str, cache_size: int, timeout_s: float,
                 prefetches: int, jump: bool = False):
        """timeout_s: for a compile, and (a little more) for a request's wait for its grammar, queued or not. prefetches: rows that are built ahead of
        each new state. None pay off where a step lasts longer than building a row. jump: forced text is looked for, to be guessed."""
        self.compiler = Compiler(make_vocab, whitespace=whitespace, max_cached=cache_size, timeout_s=timeout_s)
        self.device, self.prefetches, self.jump = device, prefetches, jump
        self.patience_s = timeout_s + GRACE_S
        self.states = torch.full((max_rows,), DEAD, dtype=torch.int64, device=device)
        self.leave_at = torch.full((max_rows,), FOREVER, dtype=torch.int64, device=device)      # see `Constraint`
        self.budgets = False
        self.waiting: dict[str, Compiling] = {}
        self.held: dict[str, Constraint] = {}
        self.bytes_sent = self.tokens = self.misses = self.forced = 0
        self.used = False
        self._copies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()       # Tables -> DeviceTables

    # ---- before a request is queued

    def compile(self, request: Request) -> Future | None:
        """The request's grammar to come; None if it has none. Its exception is a RequestError or a GrammarError: see `refusal`."""
        if request.params.grammar is None:
            return None
        self.used = True
        kind, text, options = request.params.grammar
        return self.compiler.submit(kind, text, **options)

    def refused(self, request: Request, grammar: Future, timeout_s: float) -> RequestError | None:
        """Why the request's grammar is refused, if it is. Waits for it, `timeout_s` at most."""
        try:
            grammar.exception(timeout_s)        # which, other than `wait`, hears of it if it is cancelled
        except (TimeoutError, CancelledError):
            pass
        found = outcome(request, grammar) if grammar.done() else self._too_slow()
        return found if isinstance(found, RequestError) else None

    def _too_slow(self) -> RequestError:
        return RequestError(f"the grammar was not ready after {self.patience_s:g} s: the server has many others to compile. Try again later",
                            status=503)

    def compiled(self, clock: float, waiting_timeout: float | None) -> list[tuple[Compiling, Grammar | RequestError]]:
        """The requests that need not wait for their grammars any more: it is there, or is refused, or took too long."""
        done, ready = [], {future for future in {one.grammar for one in self.waiting.values()} if future.done()}
        for rid, one in list(self.waiting.items()):
            if one.grammar in ready:
                found = outcome(one.request, one.grammar)
            elif clock - one.since > self.patience_s:
                found = self._too_slow()
            elif waiting_timeout is not None and clock - one.since > waiting_timeout:
                found = RequestError(f"the request waited for its grammar for more than {waiting_timeout:g} s, the server's waiting_timeout",
                                     status=503)
            else:
                continue
            self.leave(rid)
            done.append((one, found))
        return done

    def leave(self, rid: str) -> str | None:
        """The request does not wait any more; returns its `parent`. None if it did not wait."""
        one = self.waiting.pop(rid, None)
        if one is not None:
            self.compiler.abandon(one.grammar)
        return None if one is None else one.request.parent

    # ---- for a step

    @staticmethod
    def sort(members: Sequence[tuple[Constraint | None, int]], settled: Collection[int] = (),
             pads: tuple[int, int] | None = None) -> list[SortedGroup]:
        """The rows that sample, (constraint, places at which it samples) each, sorted by tables. settled: places that need no mask. pads: a row and a
        place of padding, which groups are filled up with to lengths that many have."""
        every = [None if constraint is None else constraint.grammar.tables for constraint, _ in members]
        counts = np.array([count for _, count in members], np.int64)
        of, made = np.array([id(tables) for tables in every], np.int64), []
        for tables in dict.fromkeys(every):
            if tables is None:
                continue
            at = (of == id(tables)).nonzero()[0]
            if len(at) == len(members) and not settled:         # most steps of which any row has a grammar
                made.append((tables, at, None))
                continue
            masked = np.repeat(of == id(tables), counts)
            masked[list(settled)] = False
            made.append((tables, at, None if masked.all() else masked.nonzero()[0]))
        pad = lambda ids, by: np.append(ids, np.full(sampling.pow2(len(ids)) - len(ids), by)) if pads and len(ids) else ids
        return [SortedGroup(tables, pad(at, pads and pads[0]), None if places is None else pad(places, pads and pads[1]))
                for tables, at, places in made]

    def bring(self, groups: Sequence[SortedGroup]) -> list[DeviceTables]:
        """The copies of their tables, up to date: in the order of the stream."""
        copies = [self._copy(tables) for tables, _, _ in groups]
        self.bytes_sent += sum(copy.refresh() for copy in copies)
        return copies

    def _copy(self, tables) -> DeviceTables:
        if tables not in self._copies:
            self._copies[tables] = DeviceTables(tables, self.device)
            self.bytes_sent += self._copies[tables].began_with
        return self._copies[tables]

    def chains(self, groups: Sequence[Group], rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The forced text behind the states of rows [S]: (tokens [S, most] int64, how many of them [S] int64)."""
        tokens, lens = torch.zeros(len(rows), most, dtype=torch.int64, device=rows.device), torch.zeros_like(rows)
        for tables, at, _ in groups:
            tokens[at], lens[at] = tables.chains(self.states[rows[at]], most)
        return tokens, lens

    # ---- after a step

    def begin(self, grammar: Grammar, request: Request) -> Constraint:
        """Of a request that is queued."""
        if self.jump:
            self.compiler.jump(grammar, grammar.start)
        if (budget := request.params.thinking_budget) is None or grammar.closing is None:
            return Constraint(grammar, grammar.start)
        self.budgets = True
        return Constraint(grammar, grammar.start, leave_at=len(request.prompt_ids) + budget)

    def learn(self, rid: str, constraint: Constraint, state: int, missed: bool) -> GrammarError | None:
        """A row's state behind a step is known: have built what it will need. An error if it cannot be."""
        self.misses += missed
        if state == DEAD:
            return None
        is_new = state != constraint.state
        if is_new:
            constraint.come_to(state)
        tables, index = constraint.grammar.tables, state & INDEX
        if is_new and self.jump and index not in tables.chain_of:
            self.compiler.jump(constraint.grammar, state)
        if tables.rows[index] is not None:
            if is_new and self.prefetches:
                self.compiler.prefetch(constraint.grammar, state, self.prefetches)
            return None
        if missed:
            self.held[rid] = constraint
        return self.compiler.want(constraint.grammar, state)

    def release(self) -> list[str]:
        """Who need not be held any more: the row is there, or never will be."""
        free = [rid for rid, one in self.held.items() if one.has_row or self.compiler.want(one.grammar, one.state) is not None]
        for rid in free:
            del self.held[rid]
        return free

    def forget(self, rid: str) -> None:
        """The request has ended."""
        self.held.pop(rid, None)

    @staticmethod
    def stuck(constraint: Constraint | None, request: Request, output_len: int, new: Sequence[int]) -> tuple[str | None, RequestError | None]:
        """(finish reason, error) where no token was left to sample behind `new` ones, the last of the output; (None, None) if the grammar is not to
        blame. Where `min_tokens` holds back the end, and nothing else may come, the text ends."""
        if constraint is None:
            return None, None
        grammar, state = constraint.grammar, constraint.state
        for token in new:
            state = grammar.step(state, token)
        allowed, ends = np.flatnonzero(np.unpackbits(grammar.mask(state).view(np.uint8), bitorder="little")), grammar.vocab.end_ids
        if not allowed.size:
            return "error", refusal(request, GrammarError("no token of the model's vocabulary can go on from here", "grammar"))
        held_back = {*ends, *(request.params.stop_token_ids or ())} if output_len < request.params.min_tokens else set()
        return ("stop" if held_back.issuperset(allowed.tolist()) else None), None

    def stats(self) -> dict:
        """Counts, once there was a request with a grammar."""
        if not self.used:
            return {}
        return {"grammar_queue": len(self.waiting), "grammar_tokens": self.tokens, "grammar_misses": self.misses, "grammar_bytes": self.bytes_sent,
                "forced_tokens": self.forced,
                **self.compiler.stats()}


def make_vocab(tokenizer, end_ids: Sequence[int], size: int, native_walks: bool) -> Vocab:
    """The vocabulary of a model with `size` logits. native_walks: whole trees of tokens by C++, if there is a compiler."""
    vocab = Vocab.from_tokenizer(tokenizer, end_ids, size)
    if native_walks and (loaded := native.library()) is not None:
        vocab.walker = native.TrieWalker(vocab, loaded)
    return vocab


def outcome(request: Request, future: Future) -> Grammar | RequestError:
    """What has come of a grammar that was asked for."""
    if future.cancelled():
        return RequestError("the engine was shut down", status=503)
    error = future.exception()
    return future.result() if error is None else refusal(request, error)


def refusal(request: Request, error: Exception) -> RequestError:
    """What a client is told whose grammar was refused. Errors of other kinds are not theirs, and are passed on as they are."""
    if isinstance(error, RequestError):
        return error
    kind = "reasoning_end" if request.params.grammar.kind == "reasoning" else request.params.grammar.kind
    if isinstance(error, GrammarError):
        text = str(error)
        return RequestError(text if text.startswith(f"{kind}:") else f"{kind}: {text}", kind)
    return RequestError(f"{kind}: the grammar could not be compiled: {error}", kind, status=500)


def _demo() -> None:
    """Two rows with a grammar and one without: what each of them may sample, and does."""
    letters = [bytes([b]) for b in b"abc,"] + [b"ab", b",a", None]
    constraints = Constraints(lambda: Vocab(letters, end_ids=[6]), 4, "cpu", whitespace="fixed", cache_size=8, timeout_s=10, prefetches=0)
    ours = [Constraint(constraints.compiler.submit("regex", text).result(), 0) for text in ("[ab]{2,4}(,c)?", "c+")]
    names = [(token or b"<end>").decode() for token in letters]
    rows, words = torch.tensor([1, 2, 3]), lambda row: " ".join(name for name, z in zip(names, row.tolist()) if z == 0)
    for row, one in enumerate(ours, start=1):
        one.state = one.grammar.start
        constraints.states[row] = one.state
    made = constraints.sort([(ours[0], 1), (ours[1], 1), (None, 1)])
    for tokens in ([4, 2, 0], [1, 2, 1], [1, 6, 1], [3, 0, 2]):
        groups = [Group(tables, torch.from_numpy(at), torch.from_numpy(places)) for tables, (_, at, places) in zip(constraints.bring(made), made)]
        walk, logits = Walk(constraints, groups, rows), torch.zeros(3, len(letters))
        walk.mask().forbid(logits)
        print("  ".join(f"row {row}: {words(z):14}" for row, z in enumerate(logits, start=1)), end="  ")
        walked = walk.finish(torch.tensor(tokens))
        print("sampled", *("-" if missed else names[token] for token, missed in zip(tokens, walked.missed.tolist())))
        for i, one in enumerate(ours):
            constraints.learn(str(i), one, int(walked.states[i]), bool(walked.missed[i]))
            while not one.has_row:
                constraints.compiler.wait(0.01)
    print(f"{constraints.misses} misses, {constraints.bytes_sent} bytes to the device; a fifth row would find its tables there")
    constraints.compiler.close()


if __name__ == "__main__":
    _demo()
