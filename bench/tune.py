"""Block sizes of the attention kernel, chosen on the GPU at hand: what nano_sgl/tuned.py has in its tables.

    python bench/tune.py [--shapes 128/4,64/3] [--dtypes bf16,fp16] [--seconds 60] [--write]

For each head dim / group and dtype, and each size of a query tile:

1. compile     every way to cut it (columns, warps, stages), in several processes, plain and with trees and windows, for all of `--groups`: ways that
               spill registers or do not fit shared memory are out
2. verify      what is left against attention in torch, over random ragged batches with nested prefixes and draft trees: what differs is out
3. time        what is left, with CUDA events, the best of some replays of a graph of launches, over four workloads:

                 decode   64 rows at 4,096 columns       long     one row at 32,768
                 verify   32 rows of 17 tokens at 4,096  prefill  4,096 tokens

A way's score is the geometric mean of its ratios to the best over the tile's workloads, so that no workload decides alone. The tiles of a group are
those that are the best at some workload. `--write` puts what was found into nano_sgl/tuned.py; else it is printed alone. `--seconds` bounds the
timing of a tile; ways that were not reached are left out, and it says so.

`--tiny` does all of it on a CPU in Triton's interpreter, with sizes of a toy: it shows that the script runs, its choice means nothing.
"""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
TUNED = HERE.parent / "nano_sgl" / "tuned.py"
COLUMNS, WARPS, STAGES, TILES = (16, 32, 64, 128), (2, 4, 8), (2, 3, 5), (16, 32, 64, 128)
TOLERANCE = {"fp32": 2e-4, "fp16": 1e-2, "bf16": 6e-2}
VARIANTS = ((False, 0), (True, 0), (True, 4096), (False, 4096))  # tree, window


def compile_ways(jobs: list[dict]) -> None:
    """In a process of its own: prints for each job whether its kernels compile, fit and spill nothing, and why not."""
    import kernels_aot
    from nano_sgl import attention, tuned
    for job in jobs:
        tile, key = job["tile"], tuple(job["key"])
        tuned.BLOCKS[key] = tuple(job["way"])
        limits, why, bounds = kernels_aot.LIMITS[job["compile_as"]], None, set()
        for group, (tree, window) in itertools.product(job["groups"], VARIANTS):
            if group > tile or why:
                continue
            try:
                made = attention.compile_all(job["compile_as"], job["dtype"], job["head_dim"], group, [tile], tree, window)[f"attend {tile}"]
            except Exception as error:
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:80] if str(error).strip() else ''}"
                break
            used = kernels_aot.usage(made)
            blocks, bound = used.occupancy(limits)
            bounds.add(f"{blocks} x {used.warps} warps by {bound}")
            if used.spill:
                why = f"spills {used.spill} bytes"
            elif used.shared > limits.most or not blocks:
                why = f"{used.shared} bytes of shared memory"
        print(json.dumps([job["way"], why, "; ".join(sorted(bounds))]), flush=True)


def survivors(jobs: list[dict], processes: int, say) -> list[tuple[int, int, int]]:
    """The ways that compile, fit and do not spill: step 1."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}

    def ask(part: list[dict]) -> list:
        done = subprocess.run([sys.executable, __file__, "--compile", json.dumps(part)], env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"a compiling process failed: {done.stderr[-1000:]}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    parts = [part for part in (jobs[i::processes] for i in range(processes)) if part]
    with ThreadPoolExecutor(processes) as pool:
        found = [line for lines in pool.map(ask, parts) for line in lines]
    for way, why, bounds in sorted(found):
        say(f"    {way}: {why or bounds}")
    return sorted(tuple(way) for way, why, _ in found if why is None)


class Bench:
    """Attention of one shape on the device: its check and its clock."""

    def __init__(self, attention, device: str, head_dim: int, group: int, dtype: str, tiny: bool):
        import torch
        self.torch, self.attention, self.device, self.dim, self.group, self.tiny = torch, attention, device, head_dim, group, tiny
        self.name, self.dtype = dtype, {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
        self.kv_heads = 1 if tiny else 8
        self.backend = attention.ATTENTION["triton"](self.kv_heads * group, self.kv_heads, head_dim)
        self.options = self.backend.plan_options
        sizes = [(3, 40, 1), (1, 70, 1), (2, 50, 5), (1, 20, 20)] if tiny else [(64, 4096, 1), (1, 32768, 1), (32, 4096, 17), (1, 4096, 4096)]
        self.workloads = dict(zip(("decode", "long", "verify", "prefill"), sizes))  # rows, columns, new tokens of each
        self.pools = None

    def agrees(self, tile: int) -> float:
        """The largest difference from torch over random batches, of tiles of this size."""
        import numpy as np
        from ragged import attend, ragged
        worst = 0.0
        for case in range(2 if self.tiny else 4):
            batch = ragged(np.random.default_rng([tile, case]), 3 if self.tiny else 12, q_max=12 if self.tiny else 90,
                           kv_max=60 if self.tiny else 900, page=[1, 16][case % 2], trees=case % 2 == 1)
            tensors = batch.tensors(self.kv_heads * self.group, self.kv_heads, self.dim, self.dtype, case)
            options = {**self.options, "tiles": (tile,), "min_split": 64, "item_cost": 0, "partial_cost": 0}
            for window in (0, 33):
                got = attend(self.attention, "triton", batch, *tensors, self.device, options, window=window)
                want = attend(self.attention, "torch", batch, *(x.float() for x in tensors), window=window)
                if len(got):
                    worst = max(worst, (got.float() - want).abs().nan_to_num(math.inf).max().item())
        return worst

    def ready(self, workload: str, tile: int):
        """A launch of a layer over a workload."""
        torch, (rows, columns, new) = self.torch, self.workloads[workload]
        if self.pools is None:
            slots = 1 + max(r * c for r, c, _ in self.workloads.values())
            self.pools = torch.randn(2, slots, self.kv_heads, self.dim, device=self.device).to(self.dtype)
        table = torch.randperm(rows * columns, device=self.device, dtype=torch.int32).view(rows, columns) + 1
        q = torch.randn(rows * new, self.kv_heads * self.group, self.dim, device=self.device).to(self.dtype)
        cols = torch.arange(columns - new, columns, device=self.device).repeat(rows)
        work = self.attention.plan(range(rows), [new] * rows, [columns] * rows, **{**self.options, "tiles": (tile,)})
        context = self.backend.prepare(work, table, cols)
        return lambda: self.backend.run(q, *self.pools, context, self.dim**-0.5)

    def seconds(self, workload: str, tile: int) -> float:
        """Of a launch."""
        from gpu_kernels import seconds
        return seconds(self.ready(workload, tile), self.device, inner=4)


def tune(args, say=print) -> tuple[dict, dict]:
    """What goes into the tables: (tiles, blocks)."""
    import torch
    from nano_sgl import attention, tuned
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arch = tuned.current_arch() or "cpu"
    compile_as = arch if device == "cuda" else "sm_90"
    tiles_found, blocks_found = {}, {}
    for (head_dim, group), dtype in itertools.product(args.shapes, args.dtypes):
        bench = Bench(attention, device, head_dim, group, dtype, args.tiny)
        block_d, itemsize = max(tuned.pow2(head_dim), 16), 4 if dtype == "fp32" else 2
        best_of = {}  # workload -> {tile: seconds}
        for tile in (tile for tile in args.tiles if tile >= group):
            key = (arch, block_d, itemsize, tile)
            default = tuple(tuned._default(tile, block_d, itemsize, arch.startswith("gfx")))
            ways = sorted({default, *itertools.product(args.columns, args.warps, args.stages)})
            say(f"\nhead dim {head_dim}, group {group}, {dtype}, tile {tile}: {len(ways)} ways; the default is {default}")
            jobs = [dict(tile=tile, key=[compile_as, *key[1:]], way=way, groups=args.groups, dtype=dtype, head_dim=head_dim, compile_as=compile_as)
                    for way in ways]
            here = tuned.current_arch()
            left, timed, until = survivors(jobs, args.processes, say), {}, time.monotonic() + args.seconds
            for way in sorted(left, key=lambda way: way != default):  # the default first, so that it is there to compare with
                if time.monotonic() > until:
                    say(f"    out of time: {len(left) - len(timed)} ways were not tried")
                    break
                tuned.BLOCKS[here, block_d, itemsize, tile] = way
                try:
                    error = bench.agrees(tile)
                    if not error < TOLERANCE[dtype]:
                        say(f"    {way} is WRONG: differs from torch by {error:.2g}")
                        continue
                    timed[way] = {name: bench.seconds(name, tile) for name in bench.workloads}
                except Exception as fault:
                    say(f"    {way} failed: {type(fault).__name__}: {str(fault)[:200]}")
            del tuned.BLOCKS[here, block_d, itemsize, tile]
            if not timed:
                say(f"    nothing is left of tile {tile}")
                continue
            # A tile is chosen by length: of one token, the smallest; of a prompt, the largest
            about = [name for name, (_, _, new) in bench.workloads.items() if (new == 1) == (tile == min(args.tiles))]
            least = {name: min(times[name] for times in timed.values()) for name in bench.workloads}
            score = {way: math.prod(times[name] / least[name] for name in about) ** (1 / len(about)) for way, times in timed.items()}
            for way in sorted(score, key=score.get)[:5]:
                say(f"    {way}{' (default)' * (way == default)}: {score[way]:.3f} of the best; "
                    + ", ".join(f"{name} {timed[way][name] * 1e6:.0f} us" for name in bench.workloads))
            way = min(score, key=score.get)
            blocks_found[key] = way
            for name in bench.workloads:
                best_of.setdefault(name, {})[tile] = timed[way][name]
        if best_of and dtype == args.dtypes[0]:
            tiles_found[arch, head_dim, group] = tuple(sorted({min(times, key=times.get) for times in best_of.values()}))
            for name, times in best_of.items():
                say(f"  {name}: " + ", ".join(f"tile {tile} {seconds * 1e6:.0f} us" for tile, seconds in sorted(times.items())))
    return tiles_found, blocks_found


def written(source: str, name: str, rows: dict) -> str:
    """The text of tuned.py with the rows of a table replaced or added."""
    pattern = re.compile(rf"(?ms)^({name}: [^\n]* = \{{\n)(.*?)^\}}$")
    [(_, body)] = pattern.findall(source)
    known = eval("{" + body + "}") | rows
    lines = "".join(f"    {key}: {value},\n" for key, value in sorted(known.items()))
    return pattern.sub(lambda match: match[1] + lines + "}", source)


def main(argv: list[str] | None = None) -> int:
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="128/4", type=lambda text: [tuple(map(int, one.split("/"))) for one in text.split(",")],
                        help="head dim / query heads per kv head")
    parser.add_argument("--dtypes", default="bf16", type=lambda text: text.split(","))
    parser.add_argument("--tiles", default=list(TILES), type=numbers)
    parser.add_argument("--columns", default=list(COLUMNS), type=numbers)
    parser.add_argument("--warps", default=list(WARPS), type=numbers)
    parser.add_argument("--stages", default=list(STAGES), type=numbers)
    parser.add_argument("--groups", default=None, type=numbers, help="that must compile without spills; the shape's by default")
    parser.add_argument("--seconds", type=float, default=60, help="that timing the ways of a tile may take")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help="put the tables into nano_sgl/tuned.py")
    parser.add_argument("--into", type=Path, default=TUNED, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in Triton's interpreter")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]
    if args.compile:
        compile_ways(json.loads(args.compile))
        return 0
    import triton  # noqa: F401  before the interpreter is asked for: its own helpers stay compiled
    if args.tiny:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    import torch
    if not torch.cuda.is_available() and not args.tiny:
        parser.error("there is no GPU here to tune for; --tiny shows what would be done")
    from kernels_aot import LIMITS
    from nano_sgl.tuned import current_arch
    if not args.tiny and current_arch() not in LIMITS:
        parser.error(f"{current_arch()} is none of the GPUs that kernels are compiled ahead for: {', '.join(LIMITS)}")
    args.groups = args.groups or sorted({group for _, group in args.shapes})
    tiles, blocks = tune(args)
    print()
    for name, rows in (("TILES", tiles), ("BLOCKS", blocks)):
        print(f"{name}:", *(f"\n    {key}: {value}," for key, value in sorted(rows.items())))
    if args.write and blocks:
        source = args.into.read_text()
        args.into.write_text(written(written(source, "TILES", tiles), "BLOCKS", blocks))
        print(f"written to {args.into}")
    return 0 if blocks else 1


if __name__ == "__main__":
    sys.exit(main())
