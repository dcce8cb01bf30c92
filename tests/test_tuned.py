"""The tables of block sizes: who reads them, and bench/tune.py from end to end, which fills them in."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from triton_interpreter import DEVICE
from triton_interpreter import attention as interpreted

from nano_sgl import tuned

BENCH = Path(__file__).parent.parent / "bench"
sys.path.insert(0, str(BENCH))
import tune  # noqa: E402


def test_what_was_measured_goes_before_the_defaults(monkeypatch):
    monkeypatch.setattr(tuned, "current_arch", lambda: "sm_90")
    before = tuned.attend_config(16, 128, 2, False), tuned.tiles_for(128, 4)
    monkeypatch.setitem(tuned.BLOCKS, ("sm_90", 128, 2, 16), (32, 2, 5))
    monkeypatch.setitem(tuned.TILES, ("sm_90", 128, 4), (16, 128))
    assert tuned.attend_config(16, 128, 2, False) == dict(BLOCK_N=32, num_warps=2, num_stages=5) and tuned.tiles_for(128, 4) == (16, 128)
    assert (tuned.attend_config(16, 128, 2, False, "sm_80"), tuned.tiles_for(128, 4, "sm_80")) == before  # another GPU's
    assert tuned.tiles_for(128, 8) == (16, 64) and tuned.attend_config(64, 128, 2, False)["num_warps"] == 8


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 32, 71, 200])
def test_a_token_fits_the_smallest_tile_and_tiles_ascend(head_dim, group):
    tiles = tuned.tiles_for(head_dim, group)
    assert list(tiles) == sorted(set(tiles)) and tiles[0] >= max(group, 16) and all(tile & tile - 1 == 0 for tile in tiles)


def test_entries_are_of_the_form_that_is_looked_up():
    for (arch, head_dim, group), tiles in tuned.TILES.items():
        assert arch.startswith(("sm_", "gfx")) and head_dim > 0 and list(tiles) == sorted(tiles) and tiles[0] >= group
    for (arch, block_d, itemsize, tile), (columns, warps, stages) in tuned.BLOCKS.items():
        assert arch.startswith(("sm_", "gfx")) and itemsize in (2, 4) and all(n & n - 1 == 0 for n in (block_d, tile, columns, warps)) and stages > 0


def test_the_kernel_is_launched_as_the_table_says(monkeypatch):
    """By the interpreted copy of the package, which has tables of its own."""
    module = sys.modules[interpreted.__name__.replace("attention", "tuned")]
    wanted = []
    monkeypatch.setattr(interpreted, "attend_config", lambda *args: wanted.append(args) or module.attend_config(*args))
    backend = tune.Bench(interpreted, DEVICE, 16, 3, "fp32", tiny=True)
    for way in ((16, 4, 2), (128, 4, 2)):
        monkeypatch.setitem(module.BLOCKS, (module.current_arch(), 16, 4, 16), way)
        assert backend.agrees(16) < tune.TOLERANCE["fp32"]
    assert wanted and {args[:3] for args in wanted} == {(16, 16, 4)}


def test_rows_of_a_table_are_replaced_and_added():
    source = tuned.__file__
    text = tune.written(Path(source).read_text(), "BLOCKS", {("sm_90", 64, 2, 16): (16, 2, 2), ("sm_80", 64, 2, 16): (32, 2, 2)})
    text = tune.written(text, "BLOCKS", {("sm_90", 64, 2, 16): (64, 4, 3)})
    space = {"__name__": "nano_sgl.tuned", "__package__": "nano_sgl"}
    exec(compile(ast.parse(text), "tuned", "exec"), space)
    added = {("sm_80", 64, 2, 16): (32, 2, 2), ("sm_90", 64, 2, 16): (64, 4, 3)}
    assert space["BLOCKS"] == tuned.BLOCKS | added and space["TILES"] == tuned.TILES


def test_tuning_from_end_to_end(tmp_path):
    into = Path(shutil.copy(tuned.__file__, tmp_path / "tuned.py"))
    command = "--tiny --shapes 16/3 --dtypes fp16 --tiles 16 --columns 16 --warps 4 --stages 2 --processes 1 --write --into"
    done = subprocess.run([sys.executable, BENCH / "tune.py", *command.split(), into], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(BENCH.parent)})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "2 ways; the default is (32, 4," in done.stdout and "(default)" in done.stdout and "WRONG" not in done.stdout
    assert "('cpu', 16, 3): (16,)," in into.read_text() and "('cpu', 16, 2, 16): (" in into.read_text()


def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, BENCH / "tune.py"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(BENCH.parent), "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and "no GPU here" in done.stderr
