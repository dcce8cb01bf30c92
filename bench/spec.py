"""Speculation on a model: tokens a step, speed against none, and what it costs where nothing can be guessed.

    python bench/spec.py [--model demo] [--dtype bfloat16] [--batches 1,4,16] [--repeats 3] [--tokens 96] [--only quote,edit,agent,chat,noise]

Engines take turns on the same prompts, which are in the cache but for their last token, so that what is timed is decoding. Workloads:

quote   a text, and the beginning of a summary in sentences quoted from it; greedy
edit    a function, and the same function with a variable renamed, as far as the first lines; greedy
agent   questions under one system prompt that have been answered before, and are asked again; greedy
chat    the same questions, never asked before; greedy
noise   a beginning, and text sampled at temperature 1.5: nothing predicts it

With a batch of b, b requests run at any time, until 3 b (at least four) are answered. `tokens a step`: beside those without guesses. `speed`: the
time without guesses divided by the time with them, median of the repeats (lowest, highest). `ceiling`: the same if a step cost what the engine's own
curve says, t(tokens), and nothing else did. `equal`: answers that are the same as without; in bfloat16 the shape of a batch decides between
two tokens that are as good as equal. `ngram fixed` drafts eight guesses wherever there are some, `ngram chains` no branches. On a CPU
steps with guesses are planned in line; `ngram overlapped` plans them ahead, `none in line` plans those without like the others.
At the end the size of a tree's mask, ours and as bytes.
"""

import argparse
import ast
import difflib
import dis
import functools
import heapq
import inspect
import json.encoder
import pprint
import random
import shutil
import statistics
import textwrap
import time
import tokenize
import urllib.parse
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import torch

from nano_sgl import LLM, SamplingParams
from nano_sgl.spec import Record

PROMPTS = 48
ENGINES = {"none": {}, "ngram": dict(speculative_algorithm="ngram"), "radix": dict(speculative_algorithm="radix"),
           "ngram+radix": dict(speculative_algorithm="ngram+radix"),
           "ngram fixed": dict(speculative_algorithm="ngram", speculative_draft_length="fixed"),
           "ngram overlapped": dict(speculative_algorithm="ngram", disable_overlap_schedule=False),
           "ngram chains": dict(speculative_algorithm="ngram", speculative_eagle_topk=1),
           "none in line": dict(disable_overlap_schedule=True)}
THINGS = ["a bicycle", "a hash table", "paper", "a tide", "inflation", "a vaccine", "an apple", "a compass", "a glacier", "a piano", "a battery", "a dictionary"]
QUESTIONS = [f"{ask} {thing}?" for ask in ("How would you explain", "What can go wrong with", "Who needs", "What is the history of") for thing in THINGS]
TASKS = "You are an agent that answers with a plan: numbered steps, each with the tool to call (search, read, write) and why."


def texts() -> list[str]:
    """Pieces of prose."""
    return [" ".join(text.split())[:1500] for _, text in sorted(topics.items()) if len(text) > 900][:PROMPTS]


def functions() -> list[str]:
    """Source of functions."""
    modules = (textwrap, inspect, statistics, ast, dis, shutil, tokenize, difflib, pprint, functools, heapq, random, json.encoder, urllib.parse)
    found = [inspect.getsource(f) for m in modules for _, f in sorted(inspect.getmembers(m, inspect.isfunction)) if f.__module__ == m.__name__]
    return [code for code in found if 700 < len(code) < 2000][:PROMPTS]


def quote(llm: LLM) -> list[str]:
    """See above."""
    return [f"Text:\n{text}\n\nSummary of the text, in sentences quoted from it:\n\"{' '.join(text.split()[:6])}" for text in texts()]


def edit(llm: LLM) -> list[str]:
    """See above."""
    example = "def add(a, b):\n    total = a + b\n    return total\n"
    shot = lambda code, new: f"### Before\n{code}\n### After: one variable renamed\n{new}"
    made = []
    for code in functions():
        head = "".join(code.splitlines(keepends=True)[:4])
        made.append(shot(example, example.replace("total", "result")) + "\n" + shot(code, head))
    return made


def chat(llm: LLM) -> list[str]:
    """See above."""
    template = lambda question: llm.tokenizer.apply_chat_template([{"role": "system", "content": TASKS}, {"role": "user", "content": question}],
                                                                  tokenize=False, add_generation_prompt=True)
    return list(map(template, QUESTIONS))


def noise(llm: LLM) -> list[str]:
    """See above."""
    return [" ".join(text.split()[:40]) for text in texts()]


WORKLOADS = {"quote": quote, "edit": edit, "agent": chat, "chat": chat, "noise": noise}


@dataclass
class Runs:
    """What an engine has done on a workload."""
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    steps: int = 0
    computed: int = 0       # tokens of all steps
    sampled: int = 0
    record: Record = field(default_factory=Record)


def play(llm: LLM, name: str, prompts: list[str], batch: int, tokens: int, runs: Runs) -> None:
    """All prompts once, `batch` of them running; adds to `runs`."""
    engine = llm.engine
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, **(dict(temperature=1.5, seed=i) if name == "noise" else dict(temperature=0)))
              for i in range(len(prompts))]
    assert engine.flush_cache()
    before = [SamplingParams(max_tokens=tokens if name == "agent" else 1, temperature=0, ignore_eos=True)] * len(prompts)
    engine.scheduler.max_running = batch
    llm.generate(prompts, before, progress=False)
    if engine.speculation is not None:
        engine.speculation.total = Record()
    counters = dict(vars(engine.scheduler.counters))
    start = time.perf_counter()
    answers = llm.generate(prompts, params, progress=False)
    engine.scheduler.max_running = PROMPTS
    runs.seconds.append(time.perf_counter() - start)
    runs.answers = [answer.output_ids for answer in answers]
    now = vars(engine.scheduler.counters)
    runs.steps, runs.computed, runs.sampled = (now[key] - counters[key] for key in ("steps", "computed_tokens", "output_tokens"))
    if engine.speculation is not None:
        runs.record = engine.speculation.total


def compare(engines: dict[str, LLM], name: str, batch: int, repeats: int, tokens: int) -> None:
    """Prints a row for each engine."""
    prompts = WORKLOADS[name](engines["none"])[:max(4, 3 * batch)]
    found = {label: Runs() for label in engines}
    for turn in range(repeats + 1):
        labels = list(engines)
        for label, llm in [(label, engines[label]) for label in labels[turn % len(labels):] + labels[:turn % len(labels)]]:  # nobody is always first
            play(llm, name, prompts, batch, tokens, found[label])
            if turn == 0:
                found[label].seconds.clear()  # it warms up
    cost = next(llm.engine.speculation.lengths.cost for llm in engines.values() if llm.engine.speculation and llm.engine.speculation.lengths)
    plain = found["none"]
    for label, runs in found.items():
        if label == "none":
            continue
        ratios = sorted(a / b for a, b in zip(plain.seconds, runs.seconds))
        each = runs.sampled / runs.steps / (plain.sampled / plain.steps)
        t = cost([plain.computed / plain.steps, runs.computed / runs.steps])
        equal = sum(a == b for a, b in zip(plain.answers, runs.answers))
        r = runs.record
        depth = " ".join(f"{a / b:.2f}" for a, b in r.by_depth() if b >= 5)
        print(f"| {name} | {batch} | {label} | {each:.2f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | {each * t[0] / t[1]:.2f} "
              f"| {r.accepted / max(r.proposed, 1):.2f} | {depth} | {r.draft_s / sum(runs.seconds[-1:]):.1%} | {equal}/{len(prompts)} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer (96)")
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--engines", default=",".join(list(ENGINES)[1:]))
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.tokens < 2 or not set(args.only.split(",")) <= set(WORKLOADS) or not set(args.engines.split(",")) <= set(ENGINES):
        parser.error(f"--only takes some of {','.join(WORKLOADS)}; --engines of {','.join(ENGINES)}; --repeats is at least 1, --tokens 2")
    made = {name: LLM(args.model, dtype=args.dtype, max_total_tokens=32_768, **ENGINES[name]) for name in ["none", *args.engines.split(",")]}
    cost = next((llm.engine.speculation.lengths.cost for llm in made.values() if llm.engine.speculation and llm.engine.speculation.lengths), None)
    if cost is None:
        parser.error("--engines needs one that adapts: its curve is the ceiling's")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.model}, {args.dtype}; t(tokens) / t(1): "
          + ", ".join(f"{int(size)}: {seconds / cost.seconds[0]:.2f}" for size, seconds in zip(cost.sizes, cost.seconds)) + "\n")
    print("| workload | batch | drafter | tokens a step | speed | ceiling | accept rate | by depth | drafting | equal |\n" + "|---|---:|---|" + "---:|" * 7)
    for name in args.only.split(","):
        for batch in map(int, args.batches.split(",")):
            compare(made, name, batch, args.repeats, args.tokens)
    bits, as_bytes = 256 * 16 * 8, 256 * 32768 * 16 + 256 * 16 * 16
    print(f"\nmask of 256 requests of 32,768 tokens and 16 draft tokens: {bits >> 10} KiB as ancestor bits, {as_bytes >> 20} MiB as bytes ({as_bytes // bits:,} x)")


if __name__ == "__main__":
    main()
