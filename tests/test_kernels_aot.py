"""Every Triton kernel compiles ahead of time for the GPUs we name, without a GPU, and what it needs fits them.

In a process of its own, where nothing has switched Triton to its interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (its absence should fail here, not in the child)

BENCH = Path(__file__).parent.parent / "bench"
TARGETS = ("sm_80", "sm_90", "gfx942")
SHAPES = {64: (1, 3, 4, 7, 8), 128: (1, 2, 4, 5, 6, 7, 8)}  # head dim: groups of the Llama, Mistral, Qwen and SmolLM2 models

CHILD = r"""
import json, sys
import kernels_aot
for job in json.loads(sys.argv[1]):
    for name, compiled in kernels_aot.compiled(**job).items():
        used = kernels_aot.usage(compiled)
        blocks, bound = used.occupancy(kernels_aot.LIMITS[job["target"]])
        print(json.dumps([job, name, used.shared <= kernels_aot.LIMITS[job["target"]].most, used.spill, blocks, bound]), flush=True)
"""


def child(*command: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(
        [str(BENCH), str(BENCH.parent), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)


def compile_in_child(jobs: list[dict]) -> None:
    """jobs: keywords of bench/kernels_aot.py's `compiled`."""
    done = child("-c", CHILD, json.dumps(jobs))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(job in [line[0] for line in lines] for job in jobs)
    for job, name, fits, spill, blocks, bound in lines:
        assert fits and blocks >= 1, (job, name, bound)
        assert spill <= 32, f"{name} of {job} spills {spill} bytes a thread"  # 0 with Triton 3.9, a register or two with 3.6


@pytest.mark.parametrize("target", [pytest.param(name, marks=() if name == "sm_90" else pytest.mark.long) for name in TARGETS])
def test_the_kernels_compile(target):
    of = lambda part, dtype="bf16", **shape: dict(part=part, target=target, dtype=dtype, **shape)
    compile_in_child([
        of("kernels"), of("masks"), of("attention", head_dim=64, group=3, tiles=[16, 128]), of("attention", tree=True, tiles=[64]),
        of("attention", tree=True, window=4096, tiles=[64]), of("attention", "fp32", head_dim=64, group=3, tiles=[16])])


def test_a_few_compile_for_the_other_targets():
    """Half a minute a target is too long to compile all, each time: attention with all that it has, and what is no attention."""
    compile_in_child([dict(part="masks", target=target) for target in TARGETS if target != "sm_90"] + [
        dict(part="attention", target=target, dtype="bf16", head_dim=64, group=3, tree=True, window=32, tiles=[16])
        for target in TARGETS if target != "sm_90"])


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_for_every_shape_of_the_supported_models(target, dtype):
    jobs = [dict(part="kernels", target=target, dtype=dtype)]
    jobs += [dict(part="attention", target=target, dtype=dtype, head_dim=dim, group=group, tree=tree, window=window)
             for dim, groups in SHAPES.items() for group in groups for tree, window in ((False, 0), (True, 0), (True, 4096))]
    compile_in_child(jobs)


def test_the_table_has_every_kernel_and_none_spills():
    done = child(str(BENCH / "kernels_aot.py"), "--targets", "sm_90", "--markdown")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = {cells[1]: cells[2:-1] for cells in ([c.strip() for c in line.split("|")] for line in done.stdout.splitlines()) if len(cells) > 3}
    names = ["attend 16", "attend 64, tree, window", "merge", "rms_norm", "rope", "store_kv", "silu_mul", "linear_int8 16 bias", "mask", "walk 64"]
    assert rows.keys() >= set(names) and "spills: none" in done.stdout
    assert all(int(rows[name][0]) > 0 and rows[name][2] == "0" and " of 64" in rows[name][4] for name in names)


def test_occupancy_by_hand():
    """Figures of the CUDA occupancy calculator; of a compute unit: 512 VGPRs a lane and SIMD, 8 waves a SIMD, 64 KiB of LDS."""
    sys.path.insert(0, str(BENCH))
    from kernels_aot import LIMITS, Usage
    for target, used, fits in (("sm_80", Usage(32, 0, 0, 4), (16, "warps")), ("sm_80", Usage(168, 0, 38912, 4), (3, "registers")),
                               ("sm_90", Usage(32, 0, 100_000, 8), (2, "shared memory")), ("sm_90", Usage(255, 0, 0, 8), (1, "registers")),
                               ("sm_90", Usage(16, 0, 0, 1), (32, "blocks")), ("gfx942", Usage(128, 0, 0, 4), (4, "registers")),
                               ("gfx942", Usage(64, 0, 40_000, 4), (1, "shared memory"))):
        assert used.occupancy(LIMITS[target]) == fits
