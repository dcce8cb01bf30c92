"""The features whose every pair is tested. A new feature is one entry of FEATURES; rows, columns, proofs and the table follow.

An entry says what the feature does to an engine and its requests, and how to prove, afterwards, that it really happened:

    flags     what it sets of the engine's flags
    asks      (kind, ids, answer) -> sampling parameters of a request. `kind` numbers the prompts of the workload, so that a feature can ask
              something of some and nothing of others; `ids` is the prompt, `answer()` what the plain engine says to what the features
              before this one in the list have asked for
    fields    kind -> fields of the Request
    during    (engine, step, random) before each step
    proof     Run -> how often it happened. 0 fails the pair
    counted   what that number counts
    needs_cache   whether it is about the radix cache, and refused or idle without
    apart     names of features it does not work with, which are refused at start (the goal: none)

Features that set the same flag to different values are no pair.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from nano_sgl.attention import TorchAttention, register_attention
from nano_sgl.events import BlockRemoved, BlockStored
from nano_sgl.graphs import FakeGraph, Graphs
from nano_sgl.kernels import QuantizedWeight
from nano_sgl.protocol import Request, SamplingParams
from nano_sgl.spec import CostCurve


@dataclass(frozen=True)
class Feature:
    name: str
    code: str                       # its column in the table
    proof: Callable
    counted: str
    flags: dict = field(default_factory=dict)
    asks: Callable = lambda kind, ids, answer: {}
    fields: Callable = lambda kind: {}
    during: Callable = lambda engine, step, random: None
    needs_cache: bool = False
    apart: tuple[str, ...] = ()


@register_attention("torch-split")
class SplitAttention(TorchAttention):
    """The torch backend under a plan that a tiny workload never gets: whatever rows share is read once, and every run is cut."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int):
        super().__init__(heads, kv_heads, head_dim)
        self.plan_options = dict(group=self.group, tiles=(16, 64), programs=5, min_split=32, item_cost=0, partial_cost=0)
        self.partials = 0

    def prepare(self, plan, *rest, **options):
        self.partials += plan.partials
        return super().prepare(plan, *rest, **options)


# ---- what features ask for -------------------------------------------------------------------------------------------------------

def ask_penalties(kind, ids, answer):
    choices = (dict(frequency_penalty=1.2, presence_penalty=0.5), dict(repetition_penalty=1.4), {},
               dict(logit_bias={65: 4.0, 66: -100.0}, min_tokens=4, repetition_penalty=1.2))
    return choices[kind % 4]


def ask_prompt_logprobs(kind, ids, answer):
    """From the start, from the middle, or not at all: a request that wants them from position p on may adopt up to p from the tree."""
    return (dict(prompt_logprobs=2, logprob_start_len=len(ids) // 2), {}, dict(prompt_logprobs=0))[kind % 3]


def ask_sampling(kind, ids, answer):
    if kind % 4 == 3:
        return {}
    return dict(temperature=(0.8, 1.0, 1.5)[kind % 3], seed=100 + kind) | (dict(top_k=40), {}, dict(top_p=0.9), {}, {})[kind % 5]


def ask_stop(kind, ids, answer):
    """Two characters out of the middle of the text that there would be."""
    text = answer().text
    return {} if kind % 4 == 1 or len(text) < 4 else dict(stop=text[len(text) // 2:][:2])


def ask_grammar(kind, ids, answer):
    """Texts that a regex or an EBNF allows, as long as they like; one that is counted, and ends; or any."""
    return (dict(regex="([a-z]{1,5}[ ,.])*"), {}, dict(ebnf='root ::= ("(" [a-z]+ ")" | [b-d])*'), dict(regex="[ -~]{0,18}"))[kind % 4]


FORCED = {"type": "object", "properties": {"name": {"enum": ["the red one", "the green one"]}, "size": {"type": "integer", "maximum": 99}},
          "required": ["name", "size"], "additionalProperties": False}


def ask_forced_text(kind, ids, answer):
    """Text much of which is forced."""
    return (dict(regex="([a-z]{1,3}: (red|green), and that is that! ){9}"), dict(json_schema=FORCED))[kind // 4 % 2] if kind % 4 == 1 else {}


def ask_thinking(kind, ids, answer):
    """Some may think for a while, and then have to come to the point."""
    return dict(reasoning_end="</t>", thinking_budget=kind) if kind % 3 != 1 else {}


def abort_one(engine, step, random):
    """Every third step somebody leaves: waiting, between chunks or in flight, whoever it is."""
    if step % 3 == 2 and engine.streams:
        assert engine.abort(random.choice(sorted(engine.streams)))


def expect_little(engine, step, random):
    engine.scheduler.ratio = 0.0  # so admission goes on believing that every output is about to end


def ask_few_tokens(kind, ids, answer):
    """Texts of three tokens repeat themselves, so that guesses are right now and then."""
    return dict(logit_bias={65: 30.0, 66: 30.0, 67: 30.0}) if kind % 2 else {}


def guesses_are_cheap(engine, step, random):
    """Whatever this machine is busy with: how many guesses are drafted depends on how good they are."""
    engine.speculation.lengths.cost = CostCurve([1, 64], [1.0, 1.2])


def hold_beginnings(engine, step, random):
    """Every fourth step two thirds of somebody's prompt are held, for two who have named this hold as their parent, or will."""
    engine.steps_held = (step > 0 and getattr(engine, "steps_held", 0)) + (engine.scheduler.holds.tokens > 0)
    rid = f"hold {step // 4 % 3}"
    if step % 4 == 0 and engine.streams and rid not in engine.streams:
        held = engine.streams[random.choice(sorted(engine.streams))].req.request
        engine.add(Request(rid=rid, prompt_ids=held.prompt_ids[:len(held.prompt_ids) * 2 // 3 + 1], params=SamplingParams(max_tokens=0),
                           namespace=held.namespace, children=2))


# ---- what proves them ------------------------------------------------------------------------------------------------------------

def started_before_others(run):
    """Pairs in which a request started before one that had come earlier and has a lower priority."""
    order = list(dict.fromkeys(req for batch in run.batches for req in batch.started))
    return sum(a.arrival > b.arrival and a.request.priority > b.request.priority for i, a in enumerate(order) for b in order[i + 1:])


def overtaken(run):
    """Pairs in which a request started before one that had come earlier."""
    order = list(dict.fromkeys(req for batch in run.batches for req in batch.started))
    return sum(a.arrival > b.arrival for i, a in enumerate(order) for b in order[i + 1:])


def hits_in_namespaces(run):
    """Tokens found within a namespace. The first request of each has found nothing, whatever is cached in the others."""
    first, hits = {}, 0
    for req in dict.fromkeys(req for batch in run.batches for req in batch.started):
        assert first.setdefault(req.request.namespace, req) is not req or not req.cached_tokens, "a prefix matched across namespaces"
        hits += req.cached_tokens if req.request.namespace else 0
    return hits if run.cached else len(first) - 1


def blocks_told(run):
    """Blocks of which the engine has told that they are stored. Each was gone, or never there, and all that are removed are there."""
    live, told = set(), 0
    for batch in run.engine.events.since(0):
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert live.isdisjoint(event.block_hashes) and (event.parent_block_hash is None or event.parent_block_hash in live)
                live.update(event.block_hashes)
                told += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert live.issuperset(event.block_hashes)
                live.difference_update(event.block_hashes)
            else:
                live.clear()
    assert not live, "the cache is empty after a run"
    return told


def whole_pages(run):
    """Prompts cached in whole pages; where there are some, the tokens of a page that is begun alike have been copied too."""
    if not run.cached:
        return len(run.batches)
    return (run.counted("copied_tokens") > 0) * sum(a.cached > 0 == a.cached % 16 for a in run.answers.values())


def steps_in_int8(run):
    """Steps of a model all of whose products are in 8 bits."""
    model = run.engine.model
    weights = [model.head, *(weight for layer in model.layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down))]
    return len(run.batches) * all(isinstance(weight, QuantizedWeight) for weight in weights)


def record_graphs(engine, step, random):
    if engine.runner.graphs is None:
        engine.runner.graphs = Graphs(FakeGraph)


FEATURES = [
    Feature("radix cache", "rc", needs_cache=True, proof=lambda run: run.counted("cached_tokens"), counted="prompt tokens found in the tree"),
    Feature("page 1", "p1", flags=dict(page_size=1), counted="prompts cached to a length that is no multiple of 16",
            proof=lambda run: sum(a.cached % 16 > 0 for a in run.answers.values()) if run.cached else len(run.batches)),
    Feature("page 16", "p16", flags=dict(page_size=16), counted="prompts cached in whole pages of 16",
            proof=whole_pages),
    Feature("chunked prefill", "ch", flags=dict(chunked_prefill_size=24), counted="chunks that did not reach the end of their prompt",
            proof=lambda run: sum(int((~batch.complete).sum()) for batch in run.batches)),
    Feature("overlap", "ov", flags=dict(disable_overlap_schedule=False), counted="steps launched while another was in flight",
            proof=lambda run: run.overlapped),
    Feature("retraction", "re", flags=dict(max_total_tokens=148), during=expect_little, counted="retractions",
            proof=lambda run: run.counted("retractions")),
    Feature("penalties and bias", "pe", asks=ask_penalties, counted="answers that differ from those without",
            proof=lambda run: run.changed_by(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, logit_bias=None)),
    Feature("logprobs", "lp", asks=lambda kind, ids, answer: ({}, dict(logprobs=2), dict(logprobs=0))[(kind + 1) % 3],
            counted="logprobs of sampled tokens compared", proof=lambda run: sum(len(a.logprobs) for a in run.answers.values())),
    Feature("prompt logprobs", "pl", asks=ask_prompt_logprobs, counted="logprobs of prompt tokens compared",
            proof=lambda run: sum(len(a.prompt_logprobs or ()) for a in run.answers.values() if a.cached or not run.cached)),
    Feature("seeded sampling", "se", asks=ask_sampling, counted="answers that differ from the greedy ones",
            proof=lambda run: run.changed_by(temperature=0.0)),
    Feature("n", "n", asks=lambda kind, ids, answer: dict(n=3) if kind % 4 == 0 else {}, counted="samples beyond the first",
            proof=lambda run: sum(r.index > 0 for r in run.requests.values())),
    Feature("namespaces", "ns", fields=lambda kind: dict(namespace=("", "red", "blue")[kind % 3]), proof=hits_in_namespaces,
            counted="prompt tokens found within a namespace that is not the default"),
    Feature("priorities", "pr", flags=dict(schedule_policy="priority", max_running_requests=4), fields=lambda kind: dict(priority=kind % 3),
            counted="times a request overtook another of lower priority", proof=started_before_others),
    Feature("preemption", "pm", flags=dict(schedule_policy="priority", max_running_requests=3), fields=lambda kind: dict(priority=20 * kind),
            counted="times a running request gave way to one of higher priority", proof=lambda run: run.counted("preemptions")),
    Feature("order by subtree weight", "dw", flags=dict(schedule_policy="dfs-weight", max_running_requests=4), needs_cache=True,
            counted="times a request overtook an earlier one", proof=overtaken),
    Feature("cost-aware eviction", "co", flags=dict(radix_eviction_policy="cost", max_total_tokens=148), during=expect_little, needs_cache=True, counted="tokens evicted",
            proof=lambda run: run.counted("evicted_tokens")),
    Feature("holds", "ho", fields=lambda kind: dict(parent=f"hold {kind % 3}"), during=hold_beginnings, needs_cache=True,
            counted="steps between which prefixes were held", proof=lambda run: run.engine.steps_held),
    Feature("KV events", "ev", flags=dict(kv_events=True), needs_cache=True, counted="blocks told of", proof=blocks_told),
    Feature("guesses of ngram", "ng", flags=dict(speculative_algorithm="ngram", speculative_draft_length="fixed"), asks=ask_few_tokens,
            counted="guesses that were right", proof=lambda run: run.counted("guesses")),
    Feature("guesses of radix", "ra", flags=dict(speculative_algorithm="radix", speculative_draft_length="fixed"), needs_cache=True,
            counted="guesses that were right", proof=lambda run: run.counted("guesses")),
    Feature("ngram and radix, merged", "nr", flags=dict(speculative_algorithm="ngram+radix", speculative_draft_length="fixed"), asks=ask_few_tokens,
            needs_cache=True, counted="guesses that were right", proof=lambda run: run.counted("guesses")),
    Feature("adaptive draft length", "ad", flags=dict(speculative_algorithm="ngram", speculative_draft_length="adaptive"), asks=ask_few_tokens,
            during=guesses_are_cheap, counted="guesses that were right", proof=lambda run: run.counted("guesses")),
    Feature("grammar", "gr", asks=ask_grammar, counted="answers that differ from those without",
            proof=lambda run: run.changed_by(regex=None, ebnf=None)),
    Feature("jump-forward", "jf", flags=dict(jump_forward="draft"), asks=ask_forced_text, counted="tokens of forced text",
            proof=lambda run: run.counted("forced")),
    Feature("jump-forward by retokenizing", "jr", flags=dict(jump_forward="retokenize"), asks=ask_forced_text, counted="tokens of forced text",
            proof=lambda run: run.counted("forced")),
    Feature("thinking budget", "th", asks=ask_thinking, counted="answers that differ from those without",
            proof=lambda run: run.changed_by(thinking_budget=None)),
    Feature("bfloat16", "bf", flags=dict(dtype="bfloat16"), counted="steps of a model in bfloat16",
            proof=lambda run: len(run.batches) * (str(run.engine.model.dtype) == "torch.bfloat16")),
    Feature("int8", "i8", flags=dict(quantization="int8"), counted="steps of a model with int8 weights", proof=steps_in_int8),
    Feature("graphs of steps, on a CPU replayed by a fake", "cg", during=record_graphs, counted="steps that were replayed",
            proof=lambda run: run.engine.runner.graphs.replays),
    Feature("another attention plan", "at", flags=dict(attention_backend="torch-split"), proof=lambda run: run.engine.attention.partials,
            counted="partial results merged: shared runs, split runs"),
    Feature("abort", "ab", during=abort_one, counted="requests aborted", proof=lambda run: sum(a.reason == "abort" for a in run.answers.values())),
    Feature("stop strings", "st", asks=ask_stop, counted="answers that a stop string ended",  # the last that asks: it needs the final text
            proof=lambda run: sum(a.reason == "stop" for a in run.answers.values())),
]


def same_flag(a: Feature, b: Feature) -> bool:
    """Whether two features are values of one flag, and so no pair."""
    return any(a.flags[name] != b.flags[name] for name in a.flags.keys() & b.flags.keys())


def apart(*cell: Feature) -> bool:
    """Whether an engine with these features is refused at start."""
    return any(f.name in other.apart for f in cell for other in cell)


def cell_name(cell) -> str:
    return "-".join(f.code for f in cell)


CELLS = [(f,) for f in FEATURES] + [cell for cell in itertools.combinations(FEATURES, 2) if not same_flag(*cell)]
