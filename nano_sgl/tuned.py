"""Tuned: how the attention kernel is cut for a GPU: rows of a tile, columns of a block, warps and pipeline stages.

The kernel (attention.py) is one, the best way to cut it is not: it depends on the head's size, on the dtype, on how many query heads share
a kv head, and on the GPU. What has been measured stands in two tables, which `bench/tune.py --write` fills in on a GPU of the kind:

    TILES   (arch, head dim, group)                ->  query rows a program may have, ascending: tokens x heads of a group
    BLOCKS  (arch, padded head dim, itemsize, tile)  ->  columns of a block, warps, stages

A tile's rows are tokens times the heads of a group; which of them a row is only decides its addresses. So the group chooses among tiles, and how a
tile is worked on does not depend on it.

    decode, 4 heads a group    [h h h h . . . . . . . . . . . .]     tile 16: four rows are real, products have 16 at least
    a chunk of a prompt        [16 tokens x 4 heads]                 tile 64: each column that is read serves 64 rows

What is not in the tables takes the defaults below. They were found by compiling ahead of time (`bench/kernels_aot.py`), without a GPU: large enough
to keep tensor cores busy, small enough for shared memory and registers.

Invariant: every entry compiles for its arch, fits its shared memory and spills no registers with the Triton that it was tuned with, with draft trees
and windows too; the result of a kernel is the same to rounding however it is cut. Cost: a look-up a launch. Where it stops: one table for all lengths
of contexts and sizes of batches; a tile of 16 rows is the least that tensor cores take.
Source: Triton's own autotuner does this at the first launch of each process, which would be in the middle of serving.
"""

from __future__ import annotations

import functools

import torch

from .kernels import pow2

# What bench/tune.py --write has found
TILES: dict[tuple[str, int, int], tuple[int, ...]] = {
}
BLOCKS: dict[tuple[str, int, int, int], tuple[int, int, int]] = {
}


@functools.cache
def current_arch() -> str:
    """What this process' GPU is called in the tables: "sm_90", "gfx942"; "" where there is none."""
    if not torch.cuda.is_available():
        return ""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(0))


def attend_config(tile: int, block_d: int, itemsize: int, hip: bool, arch: str | None = None) -> dict:
    """Compile options of _attend_kernel: a block's columns, warps, pipeline stages that fit shared memory and spill no registers.

    tile: query rows of a program; block_d: head dim, padded; itemsize: bytes of an element; arch: this process' GPU by default.
    """
    found = BLOCKS.get((current_arch() if arch is None else arch, block_d, itemsize, tile))
    return dict(zip(("BLOCK_N", "num_warps", "num_stages"), found or _default(tile, block_d, itemsize, hip)))


def _default(tile: int, block_d: int, itemsize: int, hip: bool) -> tuple[int, int, int]:
    """For a GPU that nobody has tuned for."""
    if itemsize == 4:  # products in full fp32 run on the plain cores
        return 32 if tile * block_d <= 64 * 64 else 16, 4 if tile == 16 else 8, 2
    if hip and (tile == 16 or tile == 64 and block_d <= 64):
        return 32 if block_d > 128 else 64, 4, 2
    # On CUDA one more stage than a copy needs: the first is the look-up of slots, which the copies wait for. Decode waits for memory: of five stages
    # two blocks of keys are under way while one is worked on
    if tile == 16:
        return 32, 4, 5
    if tile == 64 and block_d <= 64:
        return 64, 4, 3
    if hip and tile == 64 and block_d == 128:
        return 64, 4, 2
    if hip or block_d > 128:
        return 32, 8, 2 if hip else 3
    return 64, 8, 3


def tiles_for(head_dim: int, group: int, arch: str | None = None) -> tuple[int, ...]:
    """Query rows (tokens x group) that a program of _attend_kernel may have, ascending; at least one token must fit."""
    if found := TILES.get((current_arch() if arch is None else arch, head_dim, group)):
        return found
    sizes = (16, 64, 128) if head_dim <= 64 else (16, 64) if head_dim <= 128 else (16, 32)  # a tile's sums are head_dim registers a row
    tiles = tuple(tile for tile in sizes if tile >= group)
    return tiles or (max(pow2(group), 16),)


def _demo() -> None:
    arch = current_arch()
    print(f"this GPU: {arch or 'none'}; measured: {len(TILES)} rows of tiles, {len(BLOCKS)} of blocks; in bfloat16")
    print(f"{'head dim':>8} {'group':>6} {'tile':>5} {'columns':>8} {'warps':>6} {'stages':>7}")
    for head_dim, group in ((64, 3), (128, 4), (128, 8), (256, 2)):
        for tile in tiles_for(head_dim, group):
            columns, warps, stages = attend_config(tile, max(pow2(head_dim), 16), 2, torch.version.hip is not None).values()
            print(f"{head_dim:8} {group:6} {tile:5} {columns:8} {warps:6} {stages:7}")


if __name__ == "__main__":
    _demo()
