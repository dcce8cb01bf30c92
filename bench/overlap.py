"""The overlap loop on against off, side by side in one run: tokens a second, and where a step's time goes.

    python bench/overlap.py [--model demo] [--dtype bfloat16] [--batches 1,16] [--tokens 64] [--repeats 5] [--intervals-ms 5] [--threads N]

Two engines of one process, one with overlap and one without, get the same requests in turn (greedy, no end token, decode only: the time
counts from the first token on). `ratio` is tokens a second divided by those of off, the median over repeats of ratios of neighbours in time.
A step, in ms: `step` its wall time; `host` planning and processing; `device` the worker's job; `hidden` host + device - step: what ran side by side,
less what waking two threads a step costs (below zero where that is more).
Stalls: `host stall` is wall time less CPU time of the host's part, `device +` how much longer a job took than with overlap off: a thread that
waits for the interpreter lock (Python lets the other keep it for a switch interval, which the second column states), or for a core.

On a CPU the default should be "on" only where `ratio` is not below 1 at every batch size.
"""

import argparse
import statistics
import sys
import time

import torch

from nano_sgl import Engine, EngineConfig, SamplingParams
from nano_sgl.protocol import Request


class Watch:
    """Times of an engine's steps: `wall` and `cpu` of the host's part, `device` of the jobs, all in seconds since `reset`."""

    def __init__(self, engine):
        self.engine = engine
        self.submit = engine.worker.submit
        engine.worker.submit = self._submit
        self.reset()

    def reset(self):
        self.steps, self.device, self.away, self.away_cpu, self.wall, self.cpu = 0, 0.0, 0.0, 0.0, 0.0, 0.0

    def _submit(self, job):
        def timed():
            start, cpu = time.perf_counter(), time.thread_time()
            result = job()
            spent = time.perf_counter() - start
            self.device += spent
            if not self.engine.depth:  # it ran inside the step
                self.away, self.away_cpu = self.away + spent, self.away_cpu + time.thread_time() - cpu
            return result
        future = self.submit(timed)
        result = future.result

        def waited(timeout=None):
            start, cpu = time.perf_counter(), time.thread_time()
            found = result(timeout)
            self.away, self.away_cpu = self.away + time.perf_counter() - start, self.away_cpu + time.thread_time() - cpu
            return found
        future.result = waited
        return future

    def step(self):
        start, cpu = time.perf_counter(), time.thread_time()
        chunks = self.engine.step()
        self.wall, self.cpu, self.steps = self.wall + time.perf_counter() - start, self.cpu + time.thread_time() - cpu, self.steps + 1
        return chunks


def decode(watch: Watch, batch: int, tokens: int, seed: int) -> float:
    """Seconds of `tokens` decode steps of `batch` requests."""
    engine, made = watch.engine, torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
    for i in range(batch):
        ids = torch.randint(1000, engine.vocab_size - 1000, (32,), generator=made).tolist()
        engine.add(Request(rid=f"{seed}-{i}", prompt_ids=ids, params=params))
    while len({chunk.rid for chunk in engine.step()}) < batch:  # prefill; all have their first token
        pass
    watch.reset()
    start = time.perf_counter()
    while engine.has_work:
        watch.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--intervals-ms", default="5")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    watches = {mode: Watch(Engine(EngineConfig(model=args.model, dtype=args.dtype, threads=args.threads, max_total_tokens=8192,
                                               disable_radix_cache=True, disable_overlap_schedule=mode == "off"))) for mode in ("off", "on")}
    engine = watches["on"].engine
    print(f"{args.model} in {args.dtype} on {engine.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"Python {sys.version.split()[0]}; {args.tokens} tokens a request, medians of {args.repeats}")
    print(f"{'batch':>5} {'overlap':>8} {'switch ms':>10} {'tok/s':>8} {'ratio':>6} {'step':>7} {'host':>7} {'device':>7} {'hidden':>8} "
          f"{'host stall':>11} {'device +':>9}")
    intervals = [float(x) for x in args.intervals_ms.split(",")]
    for batch in map(int, args.batches.split(",")):
        found = {}  # (mode, interval) -> rows of numbers
        for repeat in range(args.repeats + 1):  # the first warms up
            for interval in intervals:
                sys.setswitchinterval(interval / 1000)
                off_seconds = off_device = 0.0
                for mode in ("off", "on"):
                    watch = watches[mode]
                    seconds = decode(watch, batch, args.tokens, repeat)
                    if mode == "off":
                        off_seconds, off_device = seconds, watch.device
                    step, device, host = (x / args.tokens * 1000 for x in (seconds, watch.device, watch.wall - watch.away))
                    stall = (watch.wall - watch.away - watch.cpu + watch.away_cpu) / args.tokens * 1000
                    if repeat:
                        found.setdefault((mode, interval if mode == "on" else 0.0), []).append(
                            (batch * args.tokens / seconds, off_seconds / seconds, step, host, device, host + device - step, stall,
                             (watch.device - off_device) / args.tokens * 1000))
        for (mode, interval), rows in found.items():
            rate, ratio, step, host, device, hidden, stall, longer = (statistics.median(column) for column in zip(*rows))
            print(f"{batch:5} {mode:>8} {interval or '-':>10} {rate:8.1f} {ratio:6.2f} {step:7.2f} {host:7.2f} {device:7.2f} {hidden:8.2f} "
                  f"{stall:11.2f} {longer:9.2f}", flush=True)
    for watch in watches.values():
        watch.engine.shutdown()


if __name__ == "__main__":
    main()
