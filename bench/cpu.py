"""The engine on a CPU beside `transformers`, in one run, and both as a share of the machine's floor.

    python bench/cpu.py [--model demo] [--dtype bfloat16] [--repeats 3] [--only one,prefill,shared,apart]

Workloads: `one` a single stream, 49 tokens in and 128 out; `prefill` 2,048 tokens in and 1 out; `shared` 16 prompts of 1,000 common tokens and 50 of
their own, 64 out; `apart` 16 prompts of 500 tokens with nothing in common, 32 out. Both sides get the same ids, greedy, no end token, and run in turn.

Floors: see floor_seconds. That of `shared` counts the common prefix once. "of floor" is floor time / measured time.
"""

import argparse
import statistics
import time

import torch
import transformers

from nano_sgl import LLM, SamplingParams, kernels, weights

WORKLOADS = {"one": (1, 0, 49, 128), "prefill": (1, 0, 2048, 1), "shared": (16, 1000, 50, 64), "apart": (16, 0, 500, 32)}


def read_bandwidth() -> float:
    """Bytes a second of summing 512 MiB."""
    x = torch.ones(512 << 18)
    return x.nbytes / best(lambda: x.sum())


def gemm_rate(dtype: torch.dtype) -> float:
    """FLOP a second of [2048, 576] x [576, 3072], the model's gate-up at a long prompt: torch's or ours, whichever is faster."""
    a, b = torch.randn(2048, 576).to(dtype), torch.randn(3072, 576).to(dtype)
    return 2 * 2048 * 576 * 3072 / min(best(lambda: torch.nn.functional.linear(a, b)), best(lambda: kernels.linear(a, b)))


def best(work, seconds: float = 2.0) -> float:
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def prompts_of(count: int, shared: int, own: int, seed: int, vocab: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(1000, vocab - 1000, (n,), generator=made).tolist()
    head = ids(shared)
    return [head + ids(own) for _ in range(count)]


def floor_seconds(model, tokens: int, pairs: int, steps: int, bandwidth: float, flops: float, itemsize: int | None = None) -> float:
    """The least time that a workload could take on this machine, one kind of work after the other.

    Prefill: the multiplications of `tokens`, two for each weight but the head's, and of `pairs` (of a token and one that it sees) in attention, at
    the measured GEMM rate. Decode: one read of all weights a step, at the measured bandwidth; a step makes a token for each of the streams that may run at
    once, so `steps` is the output tokens, less each answer's first, divided by the concurrency. Not counted: decode's multiplications, reading and
    writing keys and values, sampling, HTTP. (An engine that puts both kinds into one step reads the weights less often than this.)
    """
    c = model.config
    head = c.vocab_size * c.hidden_size
    total = sum(t.numel() for t in model.parameters().values()) + (0 if c.tied else -head)
    prefill = (2 * (total - head) * tokens + 4 * pairs * c.num_layers * c.num_heads * c.head_dim) / flops
    return prefill + steps * total * (itemsize or model.dtype.itemsize) / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    args = parser.parse_args()
    if args.repeats < 1 or not set(args.only.split(",")) <= set(WORKLOADS):
        parser.error(f"--repeats is at least 1, --only takes some of {','.join(WORKLOADS)}")
    dtype = getattr(torch, args.dtype)
    bandwidth, flops = read_bandwidth(), gemm_rate(dtype)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}, {args.model} in {args.dtype}: "
          f"reads {bandwidth / 1e9:.1f} GB/s, GEMM {flops / 1e9:.0f} GFLOP/s")
    llm = LLM(args.model, dtype=args.dtype)
    peer = transformers.AutoModelForCausalLM.from_pretrained(weights.resolve(args.model), dtype=dtype).eval()
    peer.generation_config.eos_token_id = None
    print(f"{'workload':10}{'prompt':>8}{'out':>6}{'ours s':>10}{'transformers s':>16}{'ratio':>8}{'ours of floor':>15}{'theirs':>8}{'same tokens':>13}")
    for name in args.only.split(","):
        count, shared, own, out = WORKLOADS[name]
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        ours, theirs, same = [], [], 0
        for repeat in range(args.repeats + 1):  # the first warms up
            prompts = prompts_of(count, shared, own, repeat, llm.engine.vocab_size)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, progress=False)
            middle = time.perf_counter()
            with torch.inference_mode():
                expected = peer.generate(torch.tensor(prompts), max_new_tokens=out, do_sample=False, pad_token_id=0)[:, shared + own:]
            end = time.perf_counter()
            if repeat:
                ours.append(middle - start)
                theirs.append(end - middle)
                same += sum(o.output_ids == e.tolist() for o, e in zip(outputs, expected))
        a, b = statistics.median(ours), statistics.median(theirs)
        pairs = shared * shared // 2 + count * (own * shared + own * own // 2)
        floor = floor_seconds(llm.engine.model, shared + count * own, pairs, out - 1, bandwidth, flops)
        print(f"{name:10}{count * (shared + own):8}{count * out:6}{a:10.2f}{b:16.2f}{b / a:8.2f}{floor / a:15.2f}{floor / b:8.2f}"
              f"{same:8}/{count * args.repeats}", flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
