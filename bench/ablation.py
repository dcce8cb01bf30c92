"""What the parts are worth, on a real model: the engine at every cache hit rate, and with one part after the other taken away.

    python bench/ablation.py [--model demo] [--only rates,parts] [--workloads a,b,c,d] [--groups 3] [--seeds 1] [--png docs/ablation.png]

After Figure 8 of the SGLang paper (Zheng et al. 2024), with the engine in this process and all clients sending at once.

rates (panels a, b): --requests prompts of --words words, of which a share from 0 to 100 % is common to all and known from before; 16 tokens out.
The KV budget is six requests that share nothing, so a higher hit rate also means a larger batch.

parts (panel c): workloads of workloads.py, cut to --groups groups of at most six requests, in shuffled order (clients are independent of each
other), with a KV budget of --pool times their longest request. A request is sent when what its prompt needs is answered. Each variant is the same
engine with another scheduler:

    full system        lpm, the tree, sharing inside a batch
    no cache           without the radix cache, first come first served: there is no tree to order by
    no tree            a prompt finds earlier prompts and answers as wholes only: each chain of them has a namespace of its own, and the tree holds
                       nothing else there (two continuations of one whole still share what they have in common beyond it)
    fcfs, random       other orders of the queue
    no in-batch share  a request shares what earlier steps have computed, never what its own step computes (see apart_in_a_step)

`of full` is the seconds of the full system divided by the variant's, in the same round; medians over seeds.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from lpm import pyplot
from workloads import PLACEHOLDER, WORKLOADS, Request, Text, build

from nano_sgl import protocol
from nano_sgl.config import EngineConfig
from nano_sgl.engine import Engine
from nano_sgl.memory import Rows, SlotAllocator
from nano_sgl.radix import Match, Node, Tree
from nano_sgl.scheduler import Scheduler

PER_GROUP = 6
ROWS = 16              # of a batch
POOL = 16_384          # KV slots of the engine; a variant gets fewer
RATES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
RATE_OUT, RATE_ROOM = 16, 6  # tokens out a request; requests that fit the KV budget when they share nothing


# ------------------------------------------------------------------------------------------------------------------ serving in process

@dataclass
class Flight:
    """A request that has been sent, and what has come back so far."""
    ids: list[int]
    namespace: str
    sent: float
    text: str = ""
    output_ids: list[int] = field(default_factory=list)


@dataclass
class Run:
    """What serving some requests gave: seconds, tokens, the rows of each step."""
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class WholePrompts:
    """A cache without a tree: it knows earlier prompts, and prompts with their answers, as wholes, and the namespace that each stands in."""

    def __init__(self):
        self.known: dict[bytes, str] = {}
        self.sizes: set[int] = set()  # bytes

    def namespace(self, ids: list[int]) -> str:
        """Where the longest known whole stands that `ids` begin with, else a new one."""
        key = np.array(ids, np.int32).tobytes()
        found = (self.known.get(key[:size]) for size in sorted(self.sizes, reverse=True) if size <= len(key))
        return next(filter(None, found), f"whole {len(self.known)}")

    def remember(self, ids: list[int], namespace: str) -> None:
        """A prompt that is being computed, or one with its answer."""
        key = np.array(ids, np.int32).tobytes()
        self.known.setdefault(key, namespace)
        self.sizes.add(len(key))


def play(engine: Engine, requests: Sequence[Request], at_once: int = 1_000_000, wholes: WholePrompts | None = None) -> Run:
    """Serve requests in their order, each as soon as what it needs is answered, at most `at_once` at a time. RuntimeError where one fails."""
    needs, left = {r.id: set(r.needs) for r in requests}, list(requests)
    answers: dict[str, str] = {}
    flights: dict[str, Flight] = {}
    run, start, look = Run(), time.perf_counter(), True
    while left or engine.has_work:
        ready = [r for r in left if needs[r.id] <= answers.keys()][:max(at_once - len(flights), 0)] if look else []
        for request in ready:
            left.remove(request)
            ids = engine.tokenizer.encode(request.filled(answers))
            flight = Flight(ids, wholes.namespace(ids) if wholes else "", time.perf_counter())
            if wholes:
                wholes.remember(ids, flight.namespace)
            params = protocol.SamplingParams(max_tokens=request.max_tokens, temperature=request.temperature, seed=request.seed, ignore_eos=True)
            engine.add(protocol.Request(rid=request.id, prompt_ids=ids, params=params, namespace=flight.namespace))
            flights[request.id] = flight
        chunks, now = engine.step(), time.perf_counter()
        run.rows.append(len(engine.scheduler.running))
        for chunk in chunks:
            flight = flights[chunk.rid]
            if chunk.error:
                raise RuntimeError(f"request {chunk.rid} failed: {chunk.error}")
            if chunk.output_ids and not flight.output_ids:
                run.first_tokens.append(now - flight.sent)
            flight.text += chunk.text
            flight.output_ids += chunk.output_ids
            if chunk.finish_reason:
                answers[chunk.rid] = flight.text
                run.latencies.append(now - flight.sent)
                run.prompt_tokens += len(flight.ids)
                run.cached_tokens += chunk.cached_tokens
                run.output_tokens += len(flight.output_ids)
                if wholes:
                    wholes.remember(flight.ids + flight.output_ids[:-1], flight.namespace)
                del flights[chunk.rid]
        look = any(chunk.finish_reason for chunk in chunks)
    run.seconds = time.perf_counter() - start
    return run


def refit(engine: Engine, slots: int, order: str = "lpm", cache: bool = True) -> None:
    """Give an idle engine an empty tree, a KV budget of `slots`, and a scheduler of its own."""
    if slots > POOL:
        raise ValueError(f"a KV budget of {slots} slots was asked for, the engine has {POOL}: take a smaller --pool or fewer --words")
    old = engine.scheduler
    engine.rows = engine.runner.rows = Rows(ROWS, min(engine.context_len, slots), engine.device)
    engine.scheduler = Scheduler(tree=Tree(1), slots=SlotAllocator(slots, 1), rows=engine.rows, token_budget=old.token_budget, max_running=ROWS,
                                 context_len=engine.context_len, schedule_policy=order, cache=cache)


def start(model: str, dtype: str) -> Engine:
    """An engine that has served one request, and kept nothing of it."""
    engine = Engine(EngineConfig(model=model, dtype=dtype, max_total_tokens=POOL, max_running_requests=ROWS))
    play(engine, [Request("warm-up", "Once upon a time", 4)])
    engine.flush_cache()
    return engine


# ------------------------------------------------------------------------------------------------------------------ panels a and b

def one_rate(engine: Engine, share: float, count: int, words: int, seed: int) -> Run:
    """`count` requests of which a share is common to all, and in the cache when they come."""
    text = Text(f"rates/{seed}")
    common, own = text(words).split()[:round(share * words)], words - round(share * words)
    prompt = lambda: " ".join(common + (text(own).split() if own else []))
    engine.flush_cache()
    play(engine, [Request("before", prompt(), 0)])
    return play(engine, [Request(str(number), prompt(), RATE_OUT) for number in range(count)])


def hit_rates(engine: Engine, args: argparse.Namespace) -> list[dict]:
    """A row of figures for each share of RATES; seconds."""
    refit(engine, RATE_ROOM * (2 * args.words + RATE_OUT))
    rows = []
    for share in RATES:
        runs = [one_rate(engine, share, args.requests, args.words, seed) for seed in range(1, args.seeds + 1)]
        median = lambda value: statistics.median(map(value, runs))
        rows.append({"share": share, "hit_rate": median(lambda r: r.hit_rate), "batch": median(lambda r: statistics.mean(r.rows)),
                     "req_s": median(lambda r: args.requests / r.seconds), "latency": median(lambda r: statistics.mean(r.latencies)),
                     "first": median(lambda r: statistics.mean(r.first_tokens))})
    return rows


def rates_table(rows: list[dict]) -> str:
    """A line a hit rate."""
    lines = ["| common | hit rate | rows a step | requests/s | latency, s | first token, s |", "|---:|---:|---:|---:|---:|---:|"]
    return "\n".join(lines + [f"| {r['share']:.0%} | {r['hit_rate']:.1%} | {r['batch']:.1f} | {r['req_s']:.2f} | {r['latency']:.2f} | "
                              f"{r['first']:.2f} |" for r in rows])


# ------------------------------------------------------------------------------------------------------------------------- panel c

def apart_in_a_step(engine: Engine) -> None:
    """Take in-batch sharing out of an engine: nobody adopts what the step being planned will compute, or waits for who computes it. A request
    whose prompt the tree got from another in the same step keeps its own copy to its end."""
    scheduler, tree = engine.scheduler, engine.scheduler.tree
    parking, extend, publish = tree.parking, tree.extend, scheduler._publish

    def computed(node: Node) -> Node:
        while node.step == scheduler.step:
            node = node.parent
        return node

    def extend_by_computed(*args) -> Match:
        match = extend(*args)
        node = computed(match.node)
        return match if node is match.node else Match(node, node.end)

    def publish_what_is_new(req, upto: int) -> None:
        if extend(req.node, req.key(), req.own_start).length == req.own_start:
            publish(req, upto)

    tree.parking, tree.extend, scheduler._publish = lambda node: computed(parking(node)), extend_by_computed, publish_what_is_new
    tree.advance = lambda leader: None


@dataclass(frozen=True)
class Variant:
    """An engine that lacks a part: its order, its cache, what is done to it, and whether prompts are found as wholes only."""
    order: str = "lpm"
    cache: bool = True
    patch: Callable[[Engine], None] = lambda engine: None
    wholes: bool = False


VARIANTS = {
    "full system": Variant(),
    "no cache": Variant("fcfs", cache=False),
    "no tree": Variant(wholes=True),
    "fcfs": Variant("fcfs"),
    "random": Variant("random"),
    "no in-batch share": Variant(patch=apart_in_a_step),
}


def cut(name: str, seed: int, groups: int) -> list[Request]:
    """A workload of at most so many groups (chats, subjects, trees, ...) and PER_GROUP requests of each, shuffled."""
    kept: dict[str, list[Request]] = {}
    for request in build(name, seed, 2.0):  # a group's requests need none but earlier ones of the same group
        kept.setdefault(request.id.split(".")[0], []).append(request)
    requests = [request for group in list(kept.values())[:groups] for request in group[:PER_GROUP]]
    random.Random(seed).shuffle(requests)
    return requests


def longest(engine: Engine, requests: Sequence[Request]) -> int:
    """Columns of the longest request, the answers in its prompt at their full length."""
    outs = {r.id: r.max_tokens for r in requests}
    return max(len(engine.tokenizer.encode(PLACEHOLDER.sub("", r.prompt))) + r.max_tokens + sum(outs[n] for n in r.needs) for r in requests)


def serve_variant(engine: Engine, variant: Variant, requests: Sequence[Request], slots: int) -> Run:
    """A workload on a KV budget of `slots`, nothing known from before."""
    refit(engine, slots, variant.order, variant.cache)
    variant.patch(engine)
    return play(engine, requests, wholes=WholePrompts() if variant.wholes else None)


def parts(engine: Engine, args: argparse.Namespace) -> list[dict]:
    """A row a workload and variant: requests a second and hit rate, medians over seeds, and the full system's seconds over the variant's."""
    rows = []
    for name in args.workloads:
        runs: dict[str, list[Run]] = {variant: [] for variant in VARIANTS}
        for seed in range(1, args.seeds + 1):
            requests = cut(name, seed, args.groups)
            slots = round(args.pool * longest(engine, requests))
            for variant in VARIANTS:
                runs[variant].append(serve_variant(engine, VARIANTS[variant], requests, slots))
        full = [run.seconds for run in runs["full system"]]
        for variant, found in runs.items():
            rows.append({"workload": name, "variant": variant, "requests": len(requests), "slots": slots,
                         "req_s": statistics.median(len(requests) / run.seconds for run in found),
                         "hit_rate": statistics.median(run.hit_rate for run in found),
                         "of_full": statistics.median(best / run.seconds for best, run in zip(full, found))})
    return rows


def parts_table(rows: list[dict]) -> str:
    """A line a variant, a column a workload: of full, and hit rate in brackets."""
    columns = {row["workload"]: row for row in rows}
    lines = ["| of full (hit rate) | " + " | ".join(f"{name} {WORKLOADS[name].__name__}: {row['requests']} requests, {row['slots']:,} slots"
                                                    for name, row in columns.items()) + " |", "|---|" + "---:|" * len(columns)]
    for variant in VARIANTS:
        cells = [f"{row['of_full']:.2f} ({row['hit_rate']:.0%})" for row in rows if row["variant"] == variant]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    best = [f"{row['req_s']:.2f}" for row in rows if row["variant"] == "full system"]
    return "\n".join([*lines, f"| full system, requests/s | {' | '.join(best)} |"])


# ------------------------------------------------------------------------------------------------------------------------ the figure

def draw(rates: list[dict], found: list[dict], png: str) -> None:
    """Panels a and b of the rates, panel c of the parts; those that were measured."""
    figure = pyplot().figure(figsize=(13, 3.6), layout="constrained")
    grid = figure.add_gridspec(1, 4)
    percent = [100 * row["hit_rate"] for row in rates]
    panels = [("requests/s", "req_s", "rows a step", "batch"), ("latency, s", "latency", "first token, s", "first")] if rates else []
    for number, (left, left_key, right, right_key) in enumerate(panels):
        axis = figure.add_subplot(grid[number])
        other = axis.twinx()
        axis.plot(percent, [row[left_key] for row in rates], "C0o-")
        other.plot(percent, [row[right_key] for row in rates], "C1s--")
        for side, label, color in ((axis, left, "C0"), (other, right, "C1")):
            side.set_ylabel(label, color=color)
            side.set_ylim(bottom=0)
        axis.set_xlabel("cache hit rate, %")
        axis.set_title("ab"[number], loc="left")
    if found:
        axis = figure.add_subplot(grid[2:])
        names = list(dict.fromkeys(row["workload"] for row in found))
        for number, variant in enumerate(VARIANTS):
            heights = [row["of_full"] for row in found if row["variant"] == variant]
            axis.bar([at + number / (len(VARIANTS) + 1) for at in range(len(names))], heights, 1 / (len(VARIANTS) + 1), label=variant)
        axis.set_xticks([at + 0.36 for at in range(len(names))], [f"{name} {WORKLOADS[name].__name__}" for name in names])
        axis.set_ylabel("throughput, full system = 1")
        axis.set_ylim(0, 1.35 * max(row["of_full"] for row in found))  # room for the legend
        axis.set_title("c", loc="left")
        axis.legend(fontsize=7, ncols=3)
    figure.savefig(png, dpi=110)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The flags; `only` and `workloads` become lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--only", type=words, default=["rates", "parts"], help="rates,parts")
    parser.add_argument("--workloads", type=words, default=list("abcd"), help="letters of workloads.py (a,b,c,d)")
    parser.add_argument("--groups", type=int, default=3, help="chats, subjects, trees, articles of a workload (3)")
    parser.add_argument("--pool", type=float, default=1.5, help="KV budget of the parts, in longest requests (1.5)")
    parser.add_argument("--requests", type=int, default=16, help="prompts a hit rate (16)")
    parser.add_argument("--words", type=int, default=300, help="words of such a prompt (300)")
    parser.add_argument("--seeds", type=int, default=1, help="rounds, each with other text (1)")
    parser.add_argument("--png", default="docs/ablation.png", help="the figure's file; '' for none (docs/ablation.png)")
    args = parser.parse_args(argv)
    if not set(args.only) <= {"rates", "parts"} or not set(args.workloads) <= set(WORKLOADS) - {"s", "p", "g"}:
        parser.error("--only takes some of rates,parts, --workloads some of a,b,c,d,e,f")
    if min(args.groups, args.requests, args.words, args.seeds) < 1 or args.pool < 1:
        parser.error("--groups, --requests, --words, --seeds and --pool are at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    print(f"{args.model} in {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, {args.seeds} seed(s)", flush=True)
    engine = start(args.model, args.dtype)
    rates = hit_rates(engine, args) if "rates" in args.only else []
    if rates:
        print(f"\n{args.requests} requests of {args.words} words\n\n{rates_table(rates)}", flush=True)
    found = parts(engine, args) if "parts" in args.only else []
    engine.shutdown()
    if found:
        print(f"\n{parts_table(found)}", flush=True)
    if args.png:
        draw(rates, found, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
