"""Building kernels.cpp: once, whole, by many at a time, and doing without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_sets import SETS

from nano_sgl import kernels, native

ROOT = Path(__file__).parent.parent
LOAD = "import logging; logging.basicConfig(); from nano_sgl import native; print(native.library() is not None)"
HAS_COMPILER = len(SETS) > 1


def start(cache: Path, code: str = LOAD, **env: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"NANO_SGL_CACHE": str(cache), "PYTHONPATH": str(ROOT)} | env)


def test_processes_that_build_at_once_and_one_that_finds_it_built(tmp_path):
    both = [start(tmp_path) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == [str(HAS_COMPILER)] * 2
    made = list((tmp_path / "kernels").iterdir())
    assert len(made) == HAS_COMPILER  # and nothing half-made beside it
    if HAS_COMPILER:
        before = made[0].stat().st_mtime_ns
        out, _ = start(tmp_path).communicate(timeout=120)
        assert out.strip() == "True" and made[0].stat().st_mtime_ns == before


@pytest.mark.parametrize("env, words", [
    (dict(CXX="no-such-compiler"), "no-such-compiler"), (dict(CXX="false"), "not used"), (dict(PATH="/nowhere"), "no C++ compiler was found")])
def test_without_a_compiler_one_line_says_so(tmp_path, env, words):
    code = LOAD + "; native.library(); import torch; from nano_sgl import kernels; print(kernels.silu_mul(torch.ones(1, 4)).shape)"
    out, err = start(tmp_path, code, **env).communicate(timeout=120)
    assert out.splitlines() == ["False", "torch.Size([1, 2])"] and words in err
    assert err.count("the C++ kernels are not used") == 1


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "kernels").write_text("a file where the folder should be")
    out, err = start(tmp_path).communicate(timeout=120)
    assert out.strip() == str(HAS_COMPILER), err


def test_what_the_library_does_not_take_goes_to_torch():
    x = torch.randn(3, 8, dtype=torch.float64)
    assert kernels.route(x) == "torch" and kernels.silu_mul(x).dtype == torch.float64
    turned = torch.randn(8, 3).T  # its rows are not contiguous
    assert kernels.route(turned) == "torch"
    torch.testing.assert_close(kernels.silu_mul(turned), kernels.silu_mul(turned.contiguous()))
