"""What every Triton kernel takes of a GPU, found without one: compiled ahead of time, read by the tools that come with Triton's wheel.

    python bench/kernels_aot.py [--targets sm_80,sm_90,gfx942] [--dtype bf16] [--head-dim 128] [--group 4] [--window 4096] [--markdown]
    python bench/kernels_aot.py --roofline          what each kernel's work would take on some cards, on paper (bench/roofline.py)

A row is a kernel as its first launch would compile it: attention's for each size of a query tile, plain, with a draft tree, with a window and with
both; the merge; the elementwise kernels and the int8 product (kernels.py); the grammar masks (masks.py).

registers   of a thread; on gfx942 VGPRs, those of the matrix cores among them
shared      bytes of shared memory a block (LDS a workgroup)
spill       bytes of a thread that went to local memory (scratch) since registers ran out. More than none: exit code 1
occupancy   blocks that fit one multiprocessor (compute unit) at once, their warps (waves) of those that it can hold, and what runs out first

Not told: whether a kernel is fast. A kernel that waits for memory wants many loads in flight, by many warps or by deep pipelines.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

warnings.filterwarnings("ignore", message=".*TRITON_DEFAULT_FP_FUSION")

import triton  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nano_sgl import attention, kernels, masks  # noqa: E402


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor has, from the CUDA programming guide's table of compute capabilities; a compute unit, from the CDNA3 ISA."""

    registers: int      # a lane of all its warps together may have so many: 32-bit registers / 32
    step: int           # registers are given to a warp in multiples of this many a lane
    warps: int
    blocks: int
    shared: int         # bytes
    reserved: int       # bytes of shared memory that each block takes beside its own
    most: int           # bytes of shared memory that a block may have
    groups: int = 4     # its schedulers: a warp's registers come from one of them


LIMITS = {
    "sm_80": Limits(2048, 8, 64, 32, 164 * 1024, 1024, 163 * 1024),
    "sm_90": Limits(2048, 8, 64, 32, 228 * 1024, 1024, 227 * 1024),
    "gfx942": Limits(2048, 8, 32, 32, 64 * 1024, 0, 64 * 1024),
}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes."""

    registers: int      # a thread
    spill: int          # bytes a thread
    shared: int         # bytes a block
    warps: int          # a block

    def occupancy(self, limits: Limits) -> tuple[int, str]:
        """(blocks that fit at once, what bounds them)."""
        lane = -(-max(self.registers, 1) // limits.step) * limits.step
        warps = limits.registers // limits.groups // lane * limits.groups
        shared = self.shared + limits.reserved
        fit = {"warps": limits.warps // self.warps, "blocks": limits.blocks, "registers": warps // self.warps,
               "shared memory": limits.shared // max(shared, 1)}
        what = min(fit, key=fit.get)
        return fit[what], what


def usage(compiled) -> Usage:
    """Of one of Triton's compiled kernels."""
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    if "amdgcn" in compiled.asm:
        find = lambda key: int(re.search(rf"\.{key}:\s+(\d+)", compiled.asm["amdgcn"])[1])
        return Usage(find("vgpr_count"), find("private_segment_fixed_size"), shared, warps)
    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return Usage(int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1]), shared, warps)


def compiled(part: str, target: str, dtype: str = "bf16", head_dim: int = 128, group: int = 4, tree: bool = False, window: int = 0,
             tiles: list[int] | None = None) -> dict:
    """Kernels of a module for a target, by name: part is "attention", "kernels" or "masks"."""
    match part:
        case "attention":
            return attention.compile_all(target, dtype, head_dim, group, tiles, tree, window)
        case "kernels":
            return kernels.compile_all(target, dtype)
        case "masks":
            return masks.compile_all(target)
    raise ValueError(f"part {part!r}: attention, kernels or masks")


def everything(target: str, dtype: str, head_dim: int, group: int, window: int):
    """(name, compiled kernel) of all there are, each once."""
    for tree in (False, True):
        for width in (0, window):
            flags = "".join(f", {name}" for name, there in (("tree", tree), ("window", width)) if there)
            for name, kernel in compiled("attention", target, dtype, head_dim, group, tree, width).items():
                if name != "merge":  # is the same for all
                    yield name + flags, kernel
    yield name, kernel
    for part in ("kernels", "masks"):
        yield from compiled(part, target, dtype).items()


def table(rows: list[list], markdown: bool) -> str:
    """Rows of cells, the first of them heads, as text or as a Markdown table: numbers stand on the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    right = [all(re.fullmatch(r"[-\d.,x]*", row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    if markdown:
        rows.insert(1, ["---:" if r else "---" for r in right])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)).rstrip() for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(LIMITS))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=4, help="query heads per kv head")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--roofline", action="store_true", help="predict times instead; compiles nothing")
    args = parser.parse_args(argv)
    if not set(args.targets.split(",")) <= LIMITS.keys():
        parser.error(f"--targets takes some of {','.join(LIMITS)}")
    if args.roofline:
        import roofline
        print(roofline.report(args.markdown))
        return 0
    spills = []
    print(f"triton {triton.__version__}, {args.dtype}, head dim {args.head_dim}, {args.group} query heads per kv head", flush=True)
    for target in args.targets.split(","):
        limits, amd = LIMITS[target], target.startswith("gfx")
        rows = [["kernel", "VGPRs" if amd else "registers", "LDS" if amd else "shared", "scratch" if amd else "spill", "warps", "occupancy",
                 "bound by"]]
        for name, kernel in everything(target, args.dtype, args.head_dim, args.group, args.window):
            used = usage(kernel)
            blocks, bound = used.occupancy(limits)
            rows.append([name, used.registers, used.shared, used.spill, used.warps, f"{blocks} x {used.warps} of {limits.warps}", bound])
            spills += [f"{name} on {target}: {used.spill} bytes a thread"] * (used.spill > 0)
        print(f"\n{target}\n\n{table(rows, args.markdown)}", flush=True)
    print("\nspills: " + ("; ".join(spills) or "none"))
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
