"""The scheduler without a model: what a pass costs at any depth of the queue, what the order saves, who starves, and its share of a real run.

    python bench/scheduler.py [--only passes,backlog,starvation,share] [--waiting 16,128,1000,10000] [--passes 300] [--page-size 1]

passes      A pass in a steady state: 16 requests arrive, 16 are admitted and end (max_tokens 0). Prompts have 480 to 1,440 random tokens; of half of
            them all but 32 tokens are in the cache. `plain` is the same scheduler over a tree without ghosts: at every pass it matches each waiting
            request, sorts, and admits the first 16, which is checked to be the same 16 as under lpm. The three take turns of 10 passes, so that
            what plain reads of a long queue does not empty the processor's caches before every pass of the others. CPU time of this thread; what
            the bench does in place of the model is left out. `order`: of it what finding out who is next costs, the median of further passes:
            the tree's methods that follow those who wait, or plain's matching and sorting; SGLang's published times of its scheduler are of that
            step alone, so this is the column to hold beside them. Prompts come as arrays: turning a list of ids into one costs all the same, once
            a request.
backlog     300 documents of 1,000 to 5,000 tokens, 10 questions of 16 to 160 on each, shuffled; a KV pool of 30 % of the distinct tokens; a step has
            8,192 tokens and at most 64 rows, and a request stays 4 steps. All requests wait from the start, or 16 come each pass. Prompt tokens
            computed, divided by the distinct ones: no order can do with less than 1. `lpm up to 128` is fcfs while more than 128 wait.
starvation  8 requests a pass that share 4,096 tokens and have 64 of their own, 8 rows and 4,096 tokens a pass; at pass 10 comes one cold request of
            2,048 tokens. In the how-manieth pass, counted from its arrival, a request is done.
share       Workload a of workloads.py (chats) on the model, 16 requests at once: CPU time within the tree's methods, and within the scheduler's (the
            tree's among it), divided by the wall time of the run.
"""

import argparse
import dataclasses
import functools
import gc
import inspect
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence

import ablation
import numpy as np
import workloads

from nano_sgl.memory import Batch, Rows, SlotAllocator
from nano_sgl.policies import POLICIES, Policy
from nano_sgl.protocol import Request, SamplingParams
from nano_sgl.radix import Match, Tree
from nano_sgl.req import Req
from nano_sgl.scheduler import Scheduler
from nano_sgl.waiting import Waiter

VOCAB = 128_000
PASS = 16       # requests that come and go in a pass
TURN = 10       # passes
CUT_OFF = 128
ORDERING = ("wait", "leave", "lead", "advance", "stop_leading", "parking", "is_blocked", "longest", "heaviest")  # of the tree's methods
NAMES = map(str, itertools.count())


def make(order: str = "lpm", kind: type[Scheduler] = Scheduler, *, pool: int, columns: int, rows: int, budget: int, page: int = 1) -> Scheduler:
    """A scheduler with a tree, a pool and rows of its own, which no model reads."""
    columns = -(-columns // page) * page
    return kind(tree=Tree(page), slots=SlotAllocator(pool, page), rows=Rows(rows, columns, "cpu"), token_budget=budget, max_running=rows,
                context_len=columns, schedule_policy=order)


def request(ids: np.ndarray, max_tokens: int = 0) -> Request:
    """A prompt, as the server hands it over."""
    return Request(rid=next(NAMES), prompt_ids=ids, params=SamplingParams(max_tokens=max_tokens))


def ask(scheduler: Scheduler, ids: np.ndarray, max_tokens: int = 0) -> Req:
    """Queue a prompt."""
    return scheduler.add(request(ids, max_tokens))


def answer(batch: Batch) -> tuple[list[list[int]], list[bool]]:
    """What the model makes of a step: a token for each row that samples; who is as long as asked for ends."""
    tokens, complete = [[1] if samples else [] for samples in batch.samples.tolist()], batch.complete.tolist()
    return tokens, [whole and len(req.output_ids) + len(new) >= req.max_new for req, new, whole in zip(batch.reqs, tokens, complete)]


def commit(scheduler: Scheduler, batch: Batch) -> list[Req]:
    """Answer a step; returns the requests that end."""
    tokens, finished = answer(batch)
    scheduler.commit(batch, tokens, finished)
    return list(itertools.compress(batch.reqs, finished))


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """[count] int32."""
    return rng.integers(0, VOCAB, count, dtype=np.int32)


# ------------------------------------------------------------------------------------------------------------------- the cost of a pass

class Asked:
    """In place of a waiting request's node in the tree: its key alone. It ends nowhere, so what is computed is inserted by the key."""
    is_ghost, blocked, slots, end = False, False, (), -1

    def __init__(self, key: bytes, namespace: str):
        self.key, self.namespace = key, namespace


class PlainTree(Tree):
    """A tree in which nobody waits: what is cached of a prompt is found by matching it when one wants to know."""

    def wait(self, key: bytes, namespace: str, arrival: int, request: Req) -> Waiter:
        return Waiter(Asked(key, namespace), arrival, request)

    def parking(self, asked: Asked) -> Match:
        return self.match(asked.key, asked.namespace)

    def lead(self, waiter: Waiter) -> None:
        pass

    leave = stop_leading = lead


class Plain(Scheduler):
    """lpm as a queue without ghosts does it: match all, sort, take the first."""

    def __init__(self, *, tree: Tree, **options):
        super().__init__(tree=PlainTree(tree.page_size), **options)
        self.policy = Policy("plain", Plain.pick, needs_tree=True)

    def pick(self) -> Iterator[Req]:
        found = [(-self.tree.match(req.key(), req.request.namespace).length, req.arrival, req) for req in self.waiting]
        found.sort()
        return (req for _, _, req in found)


class Steady:
    """A scheduler with so many requests before it, pass after pass. `spent`: ns of add, next_batch and commit, a row a pass."""

    def __init__(self, order: str, kind: type[Scheduler], prompts: Sequence[tuple[np.ndarray, int]], waiting: int, page: int):
        pool = sum(len(ids) + page for ids, _ in prompts)
        self.scheduler = make(order, kind, pool=pool + PASS * 1500, columns=1500, rows=PASS, budget=PASS * 1500, page=page)
        for ids, warm in prompts:
            whole = warm - warm % page
            self.scheduler.tree.insert(ids[:whole], self.scheduler.slots.alloc(whole))
        for ids, _ in prompts[:waiting]:
            ask(self.scheduler, ids)
        self.coming = iter(prompts[waiting:])
        self.spent: list[tuple[int, int, int]] = []
        self.started: list[list[int]] = []  # arrivals

    def one(self) -> None:
        """A pass."""
        new = [request(ids) for ids, _ in itertools.islice(self.coming, PASS)]
        start = time.thread_time_ns()
        for each in new:
            self.scheduler.add(each)
        added = time.thread_time_ns()
        batch = self.scheduler.next_batch()
        planned = time.thread_time_ns() - added
        tokens, finished = answer(batch)
        answered = time.thread_time_ns()
        self.scheduler.commit(batch, tokens, finished)
        self.spent.append((added - start, planned, time.thread_time_ns() - answered))
        self.started.append([req.arrival for req in batch.started])
        assert len(batch.started) == PASS, f"{len(batch.started)} requests were admitted, not {PASS}"

    def order_ms(self, count: int) -> float:
        """Of so many more passes, what the order takes in one."""
        clock = Clock(self.scheduler.tree, ORDERING)
        policy = self.scheduler.policy
        self.scheduler.policy = dataclasses.replace(policy, pick=functools.partial(clock.timed, policy.pick))
        spent = [0.0]
        for _ in range(count):
            self.one()
            spent.append(clock.seconds)
        return 1000 * float(np.median(np.diff(spent)))

    def ms(self, share: float, part: int | None = None) -> float:
        """A percentile of a part of a pass, or of all of it."""
        return float(np.percentile([sum(ns) if part is None else ns[part] for ns in self.spent], 100 * share)) / 1e6


def prompts_of(count: int, seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """(ids, how many of them are cached) of so many requests."""
    rng = np.random.default_rng(seed)
    made = [(random_ids(rng, rng.integers(480, 1440)), warm) for warm in rng.random(count) < 0.5]
    for number, (ids, _) in enumerate(made):
        ids[0] = number  # no two begin alike
    return [(ids, (len(ids) - 32) * int(warm)) for ids, warm in made]


def passes(depths: Sequence[int], count: int, page: int) -> str:
    """The table of what a pass costs."""
    titles = ("waiting", "plain, ms p50/p99", "lpm", "dfs-weight", "plain / lpm", "order, ms p50: plain", "lpm", "dfs-weight",
              "lpm p50: add", "next_batch", "commit")
    lines, more = [f"| {' | '.join(titles)} |", "|" + "---:|" * len(titles)], -(-count // 4)
    for waiting in depths:
        prompts = prompts_of(waiting + PASS * (count + more))
        made = plain, lpm, dfs = [Steady(order, kind, prompts, waiting, page)
                                  for order, kind in (("lpm", Plain), ("lpm", Scheduler), ("dfs-weight", Scheduler))]
        gc.collect()
        gc.freeze()  # as the server does
        for turn, first in enumerate(range(0, count, TURN)):
            for steady in made[turn % 3:] + made[:turn % 3]:  # the first to read a prompt has it cold
                for _ in range(first, min(first + TURN, count)):
                    steady.one()
        gc.unfreeze()
        assert plain.started == lpm.started, "plain and lpm admitted other requests"
        cells = [f"{s.ms(0.5):.3f}/{s.ms(0.99):.3f}" for s in made] + [f"{plain.ms(0.5) / lpm.ms(0.5):.2f}"]
        of_lpm = [f"{lpm.ms(0.5, part):.3f}" for part in range(3)]
        cells += [f"{s.order_ms(more):.3f}" for s in made]  # more passes, which count no more
        lines.append(f"| {waiting:,} | {' | '.join(cells + of_lpm)} |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------- the worth of an order

class CutOff(Scheduler):
    """lpm that gives up above CUT_OFF waiting requests, as where every one of them has to be matched at each pass."""

    def next_batch(self) -> Batch | None:
        self.policy = POLICIES["fcfs" if len(self.waiting) > CUT_OFF else "lpm"]
        return super().next_batch()


def documents(count: int, questions: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts, shuffled: each a document and a question."""
    rng, prompts = np.random.default_rng(seed), []
    for _ in range(count):
        document = random_ids(rng, rng.integers(1000, 5001))
        prompts += [np.concatenate([document, random_ids(rng, rng.integers(16, 161))]) for _ in range(questions)]
    random.Random(seed).shuffle(prompts)
    return prompts


def prefilled(order: str, kind: type[Scheduler], prompts: list[np.ndarray], pool: int, arriving: int | None = None) -> tuple[int, float]:
    """(prompt tokens computed, CPU seconds of the scheduler) until all are served; `arriving` a pass, or all at the start."""
    scheduler = make(order, kind, pool=pool, columns=max(map(len, prompts)) + 8, rows=64, budget=8192)
    gc.collect()  # what others left is not this one's work
    coming, computed, spent = iter(prompts), 0, 0
    while True:
        start = time.thread_time_ns()
        for ids in itertools.islice(coming, arriving):
            ask(scheduler, ids, max_tokens=4)
        batch = scheduler.next_batch()
        if batch is None:
            return computed, spent / 1e9
        computed += sum(min(int(end), req.prompt_len) - min(int(first), req.prompt_len)
                        for req, first, end in zip(batch.reqs, batch.starts, batch.kv_bounds))
        commit(scheduler, batch)
        spent += time.thread_time_ns() - start


def backlog(count: int, questions: int) -> str:
    """The table of what orders compute."""
    prompts, everything = documents(count, questions), Tree(1)
    for ids in prompts:
        everything.insert(ids, np.zeros(len(ids), np.int32))
    distinct = everything.total
    pool = max(int(0.3 * distinct), 2 * max(map(len, prompts)))
    lines = [f"{len(prompts):,} requests, {sum(map(len, prompts)):,} prompt tokens, {distinct:,} distinct, a pool of {pool:,}\n",
             "| order | all at once: computed | x distinct | CPU s | 16 a pass: computed | x distinct | CPU s |", "|---|" + "---:|" * 6]
    for name, order, kind in (("lpm", "lpm", Scheduler), ("dfs-weight", "dfs-weight", Scheduler), ("fcfs", "fcfs", Scheduler),
                              (f"lpm up to {CUT_OFF}", "lpm", CutOff)):
        found = [prefilled(order, kind, prompts, pool, arriving) for arriving in (None, PASS)]
        lines.append(f"| {name} | " + " | ".join(f"{tokens:,} | {tokens / distinct:.4f} | {seconds:.2f}" for tokens, seconds in found) + " |")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------------------- who starves

def starve(order: str, stream: int = 1000, arrives: int = 10) -> tuple[int | None, list[int]]:
    """(in which pass after its arrival the cold request is done, None: never; the same of the hot ones) within so many passes."""
    rng = np.random.default_rng(0)
    prefix, since, waits, cold_wait = random_ids(rng, 4096), {}, [], None
    scheduler = make(order, pool=65_536, columns=4400, rows=8, budget=4096)
    hot = lambda: ask(scheduler, np.concatenate([prefix, random_ids(rng, 64)]))
    hot()
    while (batch := scheduler.next_batch()) is not None:  # the prefix is cached
        commit(scheduler, batch)
    since = {hot(): 1 for _ in range(8)}
    cold = None
    for number in range(1, stream + 1):
        since |= {hot(): number for _ in range(8)}
        if number == arrives:
            cold = ask(scheduler, random_ids(rng, 2048))
            since[cold] = number
        for req in commit(scheduler, scheduler.next_batch()):
            wait = number - since.pop(req) + 1
            if req is cold:
                cold_wait = wait
            else:
                waits.append(wait)
    return cold_wait, waits


def starvation(stream: int) -> str:
    """The table of who waits how long."""
    lines = ["| order | cold request, passes | hot requests, mean / max |", "|---|---:|---:|"]
    for order in ("fcfs", "lpm", "dfs-weight", "shortest-prefill-first", "hrrn"):
        cold, hot = starve(order, stream)
        lines.append(f"| {order} | {cold or f'not in {stream - 9}'} | {np.mean(hot):.2f} / {max(hot)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------------- its share of a run

class Clock:
    """CPU time of this thread within some methods of an object, or all public ones. Calls among themselves count once, reading the clock never."""

    def __init__(self, target: object, names: Sequence[str] | None = None):
        self.total, self.calls, self.inside = 0.0, 0, False
        self.reading = float(np.median(np.diff([time.thread_time() for _ in range(1001)])))
        for name, method in inspect.getmembers(type(target), inspect.isfunction):
            if name in names if names else not name.startswith("_"):
                setattr(target, name, functools.partial(self.timed, getattr(target, name)))

    def timed(self, method, *args, **options):
        """What a method returns; its time is counted."""
        if self.inside:
            return method(*args, **options)
        self.inside, self.calls = True, self.calls + 1
        start = time.thread_time()
        try:
            return method(*args, **options)
        finally:
            self.total += time.thread_time() - start
            self.inside = False

    @property
    def seconds(self) -> float:
        return self.total - self.calls * self.reading


def share(model: str, dtype: str, scale: float) -> str:
    """The shares, in words."""
    engine = ablation.start(model, dtype)
    tree, whole = Clock(engine.scheduler.tree), Clock(engine.scheduler)
    run = ablation.play(engine, workloads.build("a", 1, scale), at_once=PASS)
    engine.shutdown()
    return (f"{len(run.latencies)} requests, {run.prompt_tokens:,} prompt tokens, {run.hit_rate:.1%} cached, {run.output_tokens:,} tokens out, "
            f"{len(run.rows):,} steps in {run.seconds:.1f} s\n"
            f"tree: {tree.seconds:.3f} s in {tree.calls:,} calls, {tree.seconds / run.seconds:.3%} of the run\n"
            f"scheduler with the tree: {whole.seconds:.3f} s in {whole.calls:,} calls, {whole.seconds / run.seconds:.3%} of the run")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("passes", "backlog", "starvation", "share")
    parser.add_argument("--only", default=",".join(sections))
    parser.add_argument("--waiting", default="16,128,1000,10000", help="depths of the queue (16,128,1000,10000)")
    parser.add_argument("--passes", type=int, default=300, help="passes at each depth (300)")
    parser.add_argument("--page-size", type=int, default=1, help="tokens a page, for `passes` (1)")
    parser.add_argument("--documents", type=int, default=300, help="of the backlog (300)")
    parser.add_argument("--questions", type=int, default=10, help="on each document (10)")
    parser.add_argument("--stream", type=int, default=1000, help="passes of the hot stream (1000)")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--scale", type=float, default=0.25, help="of workload a, for `share` (0.25: 12 chats)")
    args = parser.parse_args(argv)
    only = args.only.split(",")
    if not set(only) <= set(sections) or min(args.passes, args.documents, args.questions) < 1 or args.stream < 10:
        parser.error(f"--only takes some of {','.join(sections)}; --passes, --documents, --questions are at least 1, --stream at least 10")
    made = {"passes": lambda: passes([int(n) for n in args.waiting.split(",")], args.passes, args.page_size),
            "backlog": lambda: backlog(args.documents, args.questions), "starvation": lambda: starvation(args.stream),
            "share": lambda: share(args.model, args.dtype, args.scale)}
    for name in only:
        print(f"{name}\n\n{made[name]()}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
