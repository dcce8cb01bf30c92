"""Every Triton kernel compiles ahead of time for the GPUs we name, without a GPU, and what it needs fits them.

In a process of its own, where nothing has switched Triton to its interpreter.
"""

import json
import os
import subprocess
import sys

import pytest
import torch  # noqa: F401  (its absence should fail here, not in the child)

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
SHAPES = {64: (1, 3, 4, 7, 8), 128: (1, 2, 4, 5, 6, 7, 8)}  # head dim: groups of the Llama, Mistral, Qwen and SmolLM2 models

CHILD = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from nano_sgl import attention, kernels, masks

def stack_bytes(compiled):
    "Local memory a thread spills to."
    if "amdgcn" in compiled.asm:
        return int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", compiled.asm["amdgcn"])[1])
    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])

for target, dtype, dim, group, tree, window, tiles in json.loads(sys.argv[1]):
    if dim < 0:
        done = masks.compile_all(target)
    elif dim:
        done = attention.compile_all(target, dtype, dim, group, tiles, tree, window)
    else:
        done = kernels.compile_all(target, dtype)
    for name, compiled in done.items():
        print(json.dumps([target, dtype, dim, group, name, compiled.metadata.shared, stack_bytes(compiled)]), flush=True)
"""


def compile_in_child(jobs: list) -> None:
    """jobs: (target, dtype, head dim or 0 for the elementwise kernels, -1 for those of masks.py, group, tree, window, tiles or None)."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(jobs)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(target, dtype, dim) for target, dtype, dim, *_ in jobs} == {(target, dtype, dim) for target, dtype, dim, *_ in lines}
    for target, *what, shared, stack in lines:
        assert shared <= SHARED_BYTES[target], (target, what)
        assert stack <= 32, f"{what} spills {stack} bytes a thread on {target}"  # 0 with Triton 3.9, a register or two with 3.6


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_the_kernels_compile(target):
    compile_in_child(
        [
            (target, "bf16", 0, 0, False, 0, None),
            (target, "fp32", -1, 0, False, 0, None),
            (target, "bf16", 64, 3, False, 0, [16, 128]),
            (target, "bf16", 128, 4, True, 0, [64]),
            (target, "bf16", 128, 4, True, 32, [64]),
            (target, "fp32", 64, 3, False, 0, [16]),
        ]
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", SHARED_BYTES)
def test_the_kernels_compile_for_every_shape_of_the_supported_models(target, dtype):
    jobs = [(target, dtype, 0, 0, False, 0, None)]
    jobs += [
        (target, dtype, dim, group, tree, window, None)
        for dim, groups in SHAPES.items()
        for group in groups
        for tree, window in ((False, 0), (True, 0), (True, 4096))
    ]
    compile_in_child(jobs)
