"""Six seeded traces of requests for a prefix cache, from chats to a tree of thought.

A trace is a list of (prompt, output) in order of service, both int32 arrays of token ids. It depends on the seed alone, down to the
last token, so figures that were measured at other times, or on other machines, are about the same requests.

    chat      conversations that come back with their whole history, under a few system prompts; lengths as people write
    fewshot   one long list of examples before every short question
    tot       tree of thought, breadth first: four problems, five thoughts a step, four steps deep, level by level
    totdfs    the same requests, each problem depth first
    random    nothing is shared: what a cache costs where it cannot help
    long      one document of 32k tokens, and questions to it

What can be found again is `distinct_len`: the positions that differ in what precedes them. A pool that holds them all never evicts.

    python bench/traces.py            # sizes, and a hash over the tokens as int64
"""

import hashlib
import math
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nano_sgl.radix import Tree  # noqa: E402

FIRST_ID, END_ID = 1000, 128_000
Trace = list[tuple[np.ndarray, np.ndarray]]


def text(rng: random.Random, count: int) -> np.ndarray:
    """`count` random token ids, int32."""
    draw = rng.randrange
    return np.array([draw(FIRST_ID, END_ID) for _ in range(count)], np.int32)


def length(rng: random.Random, median: int, sigma: float, low: int, high: int) -> int:
    """A log-normal length in tokens, clipped to [low, high]."""
    return int(min(high, max(low, rng.lognormvariate(math.log(median), sigma))))


def chat(seed: int = 0, sessions: int = 1000, turns: int = 8) -> Trace:
    """Sessions begin any time in [0, 1); a turn follows the last after 0.5 / turns on average (exponential)."""
    rng = random.Random(seed)
    systems, arrivals = [text(rng, 128) for _ in range(4)], []
    for session in range(sessions):
        time, history = rng.random(), systems[rng.randrange(4)]
        for turn in range(turns):
            question, answer = text(rng, length(rng, 60, 1.1, 4, 1024)), text(rng, length(rng, 200, 0.9, 8, 1024))
            prompt = np.concatenate([history, question])
            history = np.concatenate([prompt, answer])
            arrivals.append(((time, session, turn), (prompt, answer)))
            time += rng.expovariate(2 * turns)
    arrivals.sort(key=lambda arrival: arrival[0])
    return [request for _, request in arrivals]


def shared_prefix(seed: int, requests: int, prefix_len: int, question: tuple[int, int], answer: tuple[int, int]) -> Trace:
    """Requests that begin with the same text; the lengths of question and answer are uniform."""
    rng = random.Random(seed)
    prefix = text(rng, prefix_len)
    return [(np.concatenate([prefix, text(rng, rng.randint(*question))]), text(rng, rng.randint(*answer))) for _ in range(requests)]


def fewshot(requests: int = 2000) -> Trace:
    """4,096 tokens of examples."""
    return shared_prefix(1, requests, 4096, (20, 120), (1, 32))


def long(requests: int = 500) -> Trace:
    """A document of 32,768 tokens."""
    return shared_prefix(4, requests, 32_768, (64, 448), (16, 112))


def thoughts(depth: int) -> list[list[Trace]]:
    """[problem][level]: a level asks for five thoughts on each path of the level above. The prompt is the path, the output the thought."""
    rng, problems = random.Random(2), []
    for _ in range(4):
        levels, paths = [], [text(rng, 512)]
        for _ in range(depth):
            levels.append([(path, text(rng, rng.randint(60, 140))) for path in paths for _ in range(5)])
            paths = [np.concatenate(request) for request in levels[-1]]
        problems.append(levels)
    return problems


def tot(depth: int = 4) -> Trace:
    """Breadth first: the first request of every problem, the second of every problem, ..., then the next level."""
    return [request for level in zip(*thoughts(depth)) for step in zip(*level) for request in step]


def totdfs(depth: int = 4) -> Trace:
    """Depth first: a thought, then all that follows from it, then its sibling."""

    def walk(levels, parent):
        for i in range(5 * parent, 5 * parent + 5):
            yield levels[0][i]
            if levels[1:]:
                yield from walk(levels[1:], i)

    return [request for levels in thoughts(depth) for request in walk(levels, 0)]


def unshared(requests: int = 2000) -> Trace:
    """Every prompt is new."""
    rng = random.Random(3)
    return [(text(rng, length(rng, 512, 0.8, 32, 4096)), text(rng, length(rng, 128, 0.8, 8, 1024))) for _ in range(requests)]


TRACES = {"chat": chat, "fewshot": fewshot, "tot": tot, "totdfs": totdfs, "random": unshared, "long": long}


def distinct_len(trace: Trace, page_size: int = 1) -> int:
    """The working set in tokens: what a tree holds that never evicts."""
    tree = Tree(page_size)
    slots = np.arange(page_size, page_size + max(len(prompt) + len(output) for prompt, output in trace), dtype=np.int32)
    for request in trace:
        tree.insert(np.concatenate(request), slots[: sum(map(len, request))])
    return tree.total


def main() -> None:
    print(f"{'trace':8}{'requests':>9}{'prompt tokens':>15}{'longest':>9}{'output tokens':>15}{'distinct':>11}  sha256")
    for name in sys.argv[1:] or TRACES:
        trace = TRACES[name]()
        prompts, outputs = [len(prompt) for prompt, _ in trace], [len(output) for _, output in trace]
        digest = hashlib.sha256(b"".join(ids.astype(np.int64).tobytes() for request in trace for ids in request)).hexdigest()
        print(f"{name:8}{len(trace):9}{sum(prompts):15,}{max(prompts):9,}{sum(outputs):15,}{distinct_len(trace):11,}  {digest[:12]}")


if __name__ == "__main__":
    main()
