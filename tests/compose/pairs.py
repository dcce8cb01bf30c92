"""One check for every pair of features: the same requests give the same tokens as the plain engine, and nothing leaks.

    workload(features, plain)    requests that share prefixes at several depths, repeat each other, continue each other's answers
        |
    drive(engine, ...)           they arrive over the run; the books are audited after every step, all memory is back at the end
        |
    compare(run, plain)          tokens, texts, reasons, logprobs against the plain engine's: no cache, no overlap, a batch of one, whole
                                 prompts. What is left over is a list of differences; a test wants it empty, a mutation wants it not

Rounding depends on the shape of a batch, so two texts may part where two tokens are as good as equal. Such a *fork* is let pass if the plain
engine's perturbed logits of the two tokens (edited, divided by the temperature, filtered, with the request's own noise) differ by less than
the bound of the dtype, and forks are counted.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

import engines
from features import Feature, cell_name
from nano_sgl import sampling
from nano_sgl.engine import Engine
from nano_sgl.memory import Batch
from nano_sgl.protocol import Request, SamplingParams, derive_seed

FORK_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.1}      # between perturbed logits of the plain engine
LOGPROB_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.1}
NUMBERS = ("dtype", "quantization")                           # flags that make another model: the plain engine has the same
LOSSY = (("jump_forward", "retokenize"),)                     # flags that make other texts: of the plain engine, too
STEPS = 3000


# ---- the engines -----------------------------------------------------------------------------------------------------------------

class Lab:
    """One checkpoint, a plain engine for each model made of it, an engine per set of flags (used again: it has to be as good as new), what came
    out."""

    def __init__(self, path):
        self.path = path
        self.results: dict[str, Result] = {}
        self.mutants = 0                  # wrong engines that were found out
        self._plain: dict[str, Plain] = {}
        self._engines: dict[str, Engine] = {}

    def plain_for(self, features: Sequence[Feature]) -> "Plain":
        flags = {"dtype": "float32"} | {name: value for f in features for name, value in f.flags.items() if name in NUMBERS or (name, value) in LOSSY}
        if str(flags) not in self._plain:
            self._plain[str(flags)] = Plain(self.path, **flags)
        return self._plain[str(flags)]

    def engine(self, features: Sequence[Feature], cached: bool, fresh: bool = False) -> Engine:
        """The engine of a set of features, with or without the radix cache. `fresh`: one that nobody else gets."""
        flags = {"max_running_requests": 8, "disable_radix_cache": not cached}
        for feature in features:
            flags |= feature.flags
        if fresh:
            return engines.make(self.path, **flags)
        if str(flags) not in self._engines:
            self._engines[str(flags)] = engines.make(self.path, **flags)
        return self._engines[str(flags)]

    def record(self, cell: Sequence[Feature], result: "Result") -> None:
        result.dtype = str(self.plain_for(cell).dtype).removeprefix("torch.")
        self.results[cell_name(cell)] = result

    def totals(self) -> dict[str, tuple[int, int]]:
        """dtype -> tokens compared, forks."""
        found = lambda dtype: [r for r in self.results.values() if r.dtype == dtype]
        return {dtype: (sum(r.tokens for r in found(dtype)), sum(r.forks for r in found(dtype))) for dtype in ("float32", "bfloat16")}


@dataclass
class Result:
    """A cell of the table."""
    mark: str                                               # "equal" or "refused"
    tokens: int = 0
    forks: int = 0
    happened: dict[str, int] = field(default_factory=dict)  # feature -> its proof
    dtype: str = ""


# ---- the plain engine ------------------------------------------------------------------------------------------------------------

class Plain:
    """Answers of the plain engine, each computed once; and what its logits say of two tokens."""

    def __init__(self, path, **flags):
        self.engine = engines.plain(path, **flags)
        self.dtype = self.engine.model.dtype
        self._known: dict[tuple, engines.Answer] = {}

    def answer(self, request: Request) -> engines.Answer:
        key = (tuple(request.prompt_ids), repr(request.params), request.index)
        if key not in self._known:
            self._known[key] = self._run(Request(rid="plain", prompt_ids=request.prompt_ids, params=request.params, index=request.index))
        return self._known[key]

    def _run(self, request: Request) -> engines.Answer:
        answer = engines.Answer()
        self.engine.add(request)
        while self.engine.has_work:
            for chunk in self.engine.step():
                answer.take(chunk)
        assert answer.reason in ("stop", "length"), answer
        return answer

    def perturbed(self, request: Request, prefix: list[int]) -> torch.Tensor:
        """[V] fp32: what the request takes the argmax of once it has put out `prefix`. Written out here from the definition."""
        p, ids = request.params, [*request.prompt_ids, *prefix]
        z = self._logits(ids)[None].clone()                       # [1, V]
        counts = torch.bincount(torch.tensor(prefix, dtype=torch.int64), minlength=z.shape[1]).float()
        seen = torch.zeros_like(counts).index_fill_(0, torch.tensor(ids), 1)
        factor = torch.where(z > 0, 1 / p.repetition_penalty, p.repetition_penalty)
        z = torch.where(seen > 0, z * factor, z) - counts * p.frequency_penalty - counts.clamp(max=1) * p.presence_penalty
        for token, value in (p.logit_bias or {}).items():
            z[0, token] += value
        if len(prefix) < p.min_tokens:
            z[0, sorted({*self.engine.end_ids, *(p.stop_token_ids or ())})] = -torch.inf
        if p.grammar is not None:
            machine = self.engine.constraints.compiler.submit(p.grammar.kind, p.grammar.text, **p.grammar.options).result()
            machine, state = engines.state_after(machine, prefix, p.thinking_budget)
            bits = torch.from_numpy(machine.mask(state))[:, None] >> torch.arange(32) & 1
            z[0, bits.flatten()[:z.shape[1]] == 0] = -torch.inf
        if p.greedy:
            return z[0]
        state = sampling.SamplingState(1, z.shape[1], "cpu")
        state.set_row(0, p, 0, [], [])
        z = z / p.temperature
        sampling.filter_(z, state.values, sampling.work_of(p, z.shape[1]), [torch.empty_like(z) for _ in range(3)])
        seed = torch.tensor([derive_seed(p.seed, request.index)], dtype=torch.uint64).view(torch.int64)
        return (z + sampling.noise(seed, torch.tensor([len(ids)]), torch.arange(z.shape[1])))[0]

    def _logits(self, ids: list[int]) -> torch.Tensor:
        """[V] fp32: the raw logits after `ids`."""
        model, seen = self.engine.model, []
        head = model.logits

        def logits(hidden, *tokens):
            seen.append(head(hidden, *tokens).clone())
            return seen[-1].clone()
        model.logits = logits
        self._run(engines.request("logits", ids, SamplingParams(temperature=0, max_tokens=1)))
        model.logits = head
        return seen[-1][-1]


# ---- the workload ----------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Planned:
    """A request and when it comes: at a step, and not before another one has ended."""
    request: Request
    at: int = 0
    after: str | None = None


def workload(features: Sequence[Feature], plain: Plain, seed: int = 0) -> list[Planned]:
    """Requests of fourteen kinds, which ask for what the features want; a request with n > 1 comes as n of them."""
    rng = random.Random(seed)
    new = lambda n: [rng.randrange(256) for _ in range(n)]
    system = new(48)
    red, blue, far = system + new(19), system + new(25), new(90)
    first, third = red + new(9), blue + new(7)
    planned: list[Planned] = []
    whole: dict[str, Callable[[], list[int]]] = {}                # prompt and answer; asked of those alone that somebody continues

    def add(name, ids, max_tokens, at=0, after=None, like=None):
        """`like`: the request whose twin it is; else it is of a kind of its own."""
        kind = len(whole) if like is None else list(whole).index(like)
        params = _params(features, kind, ids, max_tokens, plain)
        request = lambda i: Request(rid=f"{name}.{i}", prompt_ids=ids, params=params, index=i, **_merged(f.fields(kind) for f in features))
        planned.extend(Planned(request(i), at, after and f"{after}.0") for i in range(params.n))
        whole[name] = lambda: ids + plain.answer(request(0)).ids

    add("red", first, 20)
    add("red too", red + new(14), 12)
    add("red twin", first, 20, like="red")
    add("blue", third, 16, at=1)
    add("far", far, 14, at=1)
    add("system", system, 10, at=2)
    add("far twin", far, 14, at=3, like="far")
    add("short", new(3), 24, at=4)
    add("red, turn 2", whole["red"]() + new(6), 14, after="red")
    add("red again", first, 20, after="red", like="red")
    add("blue, turn 2", whole["blue"]() + new(5), 12, after="blue")
    add("far, longer", far + new(8), 10, at=8)
    add("red, turn 3", whole["red, turn 2"]() + new(4), 8, after="red, turn 2")
    add("red, late", red + new(5), 10, at=16)
    return planned


def _params(features, kind, ids, max_tokens, plain) -> SamplingParams:
    asked = dict(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    for feature in features:
        answer = lambda: plain.answer(engines.request("draft", ids, SamplingParams(**asked)))
        asked |= feature.asks(kind, ids, answer)
    return SamplingParams(**asked)


def _merged(dicts) -> dict:
    return {name: value for each in dicts for name, value in each.items()}


# ---- the run ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Run:
    """What happened: the proofs of the features read it."""
    engine: Engine
    plain: Plain
    cached: bool                                       # with the radix cache
    requests: dict[str, Request]
    answers: dict[str, engines.Answer] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    overlapped: int = 0                                # steps launched while another was in flight
    ended: bool = False                                # all have come and nothing is left to do
    before: dict = field(default_factory=dict)         # counters

    def counted(self, name: str) -> int:
        return counts_of(self.engine)[name] - self.before[name]

    def changed_by(self, **neutral) -> int:
        """Answers which would be different if these parameters had their neutral values, and which said so before they ended."""
        count = 0
        for rid, request in self.requests.items():
            params = msgspec.structs.replace(request.params, **neutral)
            other = self.plain.answer(msgspec.structs.replace(request, params=params)).ids
            ids = self.answers[rid].ids
            count += ids != other[:len(ids)]
        return count


def counts_of(engine: Engine) -> dict[str, int]:
    """What has happened on an engine since it was made."""
    guesses = {} if engine.speculation is None else {"guesses": engine.speculation.total.accepted}
    return vars(engine.scheduler.counters) | guesses | {"forced": engine.constraints.forced}


def drive(engine: Engine, planned: list[Planned], features: Sequence[Feature], plain: Plain, *, audit: bool = True,
          each_step: Callable[[int], None] = lambda step: None, enough: Callable[[Run], bool] = lambda run: False) -> Run:
    """Run a workload on an idle engine whose cache is empty, and leave it like that. `audit`: prove the books after every step, and in the
    end that all memory is free. `enough`: asked after every step whether to leave the engine as it is."""
    scheduler, rng = engine.scheduler, random.Random(0)
    run = Run(engine, plain, scheduler.cache, {p.request.rid: p.request for p in planned}, before=counts_of(engine))
    plan_batch = scheduler.next_batch

    def next_batch(*asked):
        in_flight = len(engine.flights)
        batch = plan_batch(*asked)
        if batch is not None:
            run.batches.append(batch)
            run.overlapped += in_flight > 0
        return batch
    scheduler.next_batch = next_batch
    later = list(planned)
    for step in range(STEPS):
        ended = {rid for rid, answer in run.answers.items() if answer.reason}
        for p in [p for p in later if p.at <= step and (p.after is None or p.after in ended)]:
            later.remove(p)
            run.answers[p.request.rid] = engines.Answer()
            engine.add(p.request)
        for feature in features:
            feature.during(engine, step, rng)
        each_step(step)
        for chunk in engine.step():
            if chunk.rid in run.answers:               # or it is of a request that a feature has added
                run.answers[chunk.rid].take(chunk)
        if audit:
            engine.check()
        run.ended = not engine.has_work and not later
        if run.ended or enough(run):
            break
    else:
        raise AssertionError(f"not done after {STEPS} steps")
    scheduler.next_batch = plan_batch
    if audit:
        assert not engine.streams and engine.flush_cache() and scheduler.slots.available == scheduler.slots.capacity, "memory is lost"
        assert scheduler.rows.available == len(scheduler.rows.length) - 1, "rows are lost"
        engine.check()
    return run


# ---- the comparison --------------------------------------------------------------------------------------------------------------

@dataclass
class Verdict:
    differences: list[str] = field(default_factory=list)
    tokens: int = 0                                    # compared
    forks: list[float] = field(default_factory=list)   # gaps between the perturbed logits of the two tokens


def compare(run: Run, plain: Plain) -> Verdict:
    """Every answer of a run against the plain engine's; an aborted one has the beginning of it."""
    verdict = Verdict()
    for rid, request in run.requests.items():
        for text in _differences(request, run.answers[rid], plain.answer(request), plain, verdict):
            verdict.differences.append(f"{rid}: {text}")
    return verdict


def parted(run: Run, plain: Plain) -> bool:
    """Whether some answer, ended or not, has a token by now that `compare` will call a difference."""
    for rid, answer in run.answers.items():
        want = plain.answer(run.requests[rid]).ids[:len(answer.ids)]
        if answer.ids[:len(want)] != want and any(
                _differences(run.requests[rid], engines.Answer(ids=answer.ids, logprobs=answer.logprobs, reason="abort"),
                             engines.Answer(ids=want), plain, Verdict())):
            return True
    return False


def _differences(request: Request, got: engines.Answer, want: engines.Answer, plain: Plain, verdict: Verdict):
    aborted = got.reason == "abort"
    ids = want.ids[:len(got.ids)] if aborted else want.ids
    same = next((i for i, (a, b) in enumerate(zip(got.ids, ids)) if a != b), min(len(got.ids), len(ids)))
    verdict.tokens += same
    if request.params.logprobs is not None and len(got.logprobs) != len(got.ids):
        yield f"{len(got.logprobs)} logprobs for {len(got.ids)} tokens"
    yield from _apart("logprobs", got.logprobs[:same], want.logprobs[:same], plain)
    if (got.prompt_logprobs is None) != (want.prompt_logprobs is None):
        yield "prompt logprobs that nobody asked for" if want.prompt_logprobs is None else "no prompt logprobs"
    elif got.prompt_logprobs is not None:
        if not aborted and len(got.prompt_logprobs) != len(want.prompt_logprobs):
            yield f"{len(got.prompt_logprobs)} prompt logprobs, not {len(want.prompt_logprobs)}"
        yield from _apart("prompt logprobs", got.prompt_logprobs, want.prompt_logprobs, plain)
    if same < min(len(got.ids), len(ids)):
        z = plain.perturbed(request, ids[:same])
        gap = float((z[ids[same]] - z[got.ids[same]]).abs())
        if gap < FORK_BOUND[plain.dtype]:
            verdict.forks.append(gap)
        else:
            yield f"token {same} is {got.ids[same]}, not {ids[same]}; their perturbed logits are {gap:.4g} apart"
    elif len(got.ids) != len(ids):
        yield f"{len(got.ids)} tokens, not {len(ids)}"
    elif not aborted and (got.text, got.reason, got.error) != (want.text, want.reason, want.error):
        yield f"ends as {got.text!r}, {got.reason} {got.error or ''}, not as {want.text!r}, {want.reason}"


def _apart(what: str, got: list, want: list, plain: Plain):
    """The first entry of two lists of logprobs that differs, if one does."""
    for i, (a, b) in enumerate(zip(got, want)):
        values = [(a.logprob, b.logprob), *((x, y) for (_, x), (_, y) in zip(a.top, b.top))]
        if a.token_id != b.token_id or len(a.top) != len(b.top) or any(
                (x is None) != (y is None) or x is not None and not abs(x - y) < LOGPROB_BOUND[plain.dtype] for x, y in values):
            yield f"{what} of token {i}: {a}, not {b}"
            return
