"""int8 weights beside bfloat16: how much faster, and what they cost in perplexity.

    python bench/int8.py [--model demo] [--repeats 5] [--tokens 6000]

Two engines take turns on the same ids, greedy, no end token: `decode` one stream (49 tokens in, then the time of 128 tokens out), `batch` 16 streams of
the same shape, `prefill` one prompt of 2,048 tokens. `ratio`: bfloat16's time divided by int8's, median of the pairs (lowest, highest). In brackets each
time's share of its floor (cpu.floor_seconds): the weights, of two bytes or of one, read once a step, or a prompt's multiplications in bfloat16. Perplexity is over prose of Python's own documentation (pydoc_data.topics), in windows of 1,000 tokens.
"""

import argparse
import math
import statistics
import time
from pydoc_data.topics import topics

import torch
from cpu import floor_seconds, gemm_rate, prompts_of, read_bandwidth

from nano_sgl import LLM, SamplingParams

WORKLOADS = {"decode": (1, 49, 129), "batch": (16, 49, 129), "prefill": (1, 2048, 1)}  # prompts, tokens in, out


def seconds(llm: LLM, name: str, seed: int) -> float:
    """Of the decoding alone where there is any: the prompts are in the cache by then."""
    count, size, out = WORKLOADS[name]
    prompts = prompts_of(count, 0, size, seed, llm.engine.vocab_size)
    ask = lambda n: llm.generate(prompts, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), progress=False)
    if out > 1:
        ask(1)
    start = time.perf_counter()
    ask(out)
    return time.perf_counter() - start


def floor(llm: LLM, name: str, itemsize: int, bandwidth: float, flops: float) -> float:
    """Seconds that a workload takes at least."""
    _, size, out = WORKLOADS[name]
    tokens, steps = (size, 0) if out == 1 else (0, out)
    return floor_seconds(llm.engine.model, tokens, tokens * tokens // 2, steps, bandwidth, flops, itemsize)


def perplexity(llm: LLM, ids: list[int], window: int = 1000) -> float:
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([ids[at:at + window] for at in range(0, len(ids), window)], params, progress=False)
    logprobs = [entry.logprob for output in outputs for entry in output.prompt_logprobs if entry.logprob is not None]
    return math.exp(-statistics.fmean(logprobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=6000)
    args = parser.parse_args()
    if min(args.repeats, args.tokens - 1) < 1:
        parser.error("--repeats is at least 1, --tokens at least 2")
    engines = {name: LLM(args.model, dtype="bfloat16", quantization=name) for name in (None, "int8")}
    speed = bandwidth, flops = read_bandwidth(), gemm_rate(torch.bfloat16)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.model}: reads {bandwidth / 1e9:.1f} GB/s, GEMM {flops / 1e9:.0f} GFLOP/s")
    for name in WORKLOADS:
        pairs = [[seconds(llm, name, seed) for llm in engines.values()] for seed in range(args.repeats + 1)][1:]  # the first warms up
        ratios = sorted(a / b for a, b in pairs)
        said = []
        for label, itemsize, times in zip(("bfloat16", "int8"), (2, 1), zip(*pairs)):
            taken = statistics.median(times)
            said.append(f"{label} {taken:7.3f} s ({floor(engines[None], name, itemsize, *speed) / taken:.2f} of the floor)")
        print(f"{name:8} {', '.join(said)}, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})", flush=True)
    ids = engines[None].tokenizer.backend_tokenizer.encode("\n\n".join(topics[key] for key in sorted(topics))).ids[:args.tokens]
    plain, small = (perplexity(llm, ids) for llm in engines.values())
    print(f"perplexity over {len(ids)} tokens: bfloat16 {plain:.3f}, int8 {small:.3f}, ratio {small / plain:.4f}")
    for llm in engines.values():
        llm.shutdown()


if __name__ == "__main__":
    main()
