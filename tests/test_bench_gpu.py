"""bench/gpu.py at the size of a toy, kernels in Triton's interpreter; what it does where something is wrong; the arithmetic of bench/roofline.py."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench"
sys.path.insert(0, str(BENCH))
import gpu  # noqa: E402
import kernels_aot  # noqa: E402
import roofline  # noqa: E402


def run(*flags, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, BENCH / "gpu.py", *flags], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(BENCH.parent)} | env)


def test_all_parts_from_end_to_end(tmp_path):
    done = run("--tiny", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failures"] == [] and found["about"]["tiny"] and {row["part"] for row in found["rows"]} == {"0", *gpu.PARTS}
    told = {row["what"]: row for row in found["rows"]}
    for what in ("13 of 13 kernels and cases agree with float32 twins", "decode attention, 2 x 40", "decode, batch 2: transformers",
                 "decode, batch 2: no graphs, overlap", "decode, batch 2: no graphs, in line", "verify, batch 2: 16.0 guesses judged a row and step",
                 "decode, batch 2: grammar, 0 mask bytes sent in 6 steps", "4 steps of guesses: no GPU to wait for"):
        assert what in told and f"| {what} |" in done.stdout, done.stdout
    assert found["notes"]["e: masks"]["bytes_sent"] == 0 and found["notes"]["d: nested forks"]["predicted"] > 1.5
    ours, theirs = (found["notes"]["c: logprob of the first token"][name] for name in ("ours", "transformers"))
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert all(row["seconds"] > 0 for row in found["rows"] if row["part"] in "bcde" and row["seconds"] is not None)


def test_a_part_that_fails_or_hangs_does_not_keep_others_from_running(tmp_path, capsys):
    made = gpu.Run("cpu", False, tmp_path)
    with made.guarded("x", 5):
        raise ValueError("broken")
    with made.guarded("y", 0.2), made.guarded("y", 60):
        time.sleep(5)
    with made.guarded("z", 5):
        made.row("fine", 1e-5, 0.5, goal=0.4)
        made.row("slow", 2.0, 0.3, "7 tok/s", 0.4)
    assert made.failures == ["x: ValueError: broken", "y: OutOfTime: not done after 0 s"] and [row["what"] for row in made.rows] == ["fine", "slow"]
    assert gpu.cells(made.rows[0]) == ["z", "fine", "10.0 us", "", "0.50", "0.40 met"]
    assert gpu.cells(made.rows[1]) == ["z", "slow", "2000.00 ms", "7 tok/s", "0.30", "0.40 MISSED"] and "broken" in capsys.readouterr().err


def test_what_is_wrong_is_an_error(tmp_path, monkeypatch):
    import gpu_kernels
    made = gpu.Run("cpu", True, tmp_path)
    monkeypatch.setattr(gpu_kernels, "checks", lambda *args: [dict(name="good", error=0.1, most=0.2), dict(name="bad", error=0.3, most=0.2),
                                                              dict(name="worse", error=float("nan"), most=0.2)])
    gpu.part_a(made)
    assert len(made.failures) == 2 and "bad: differs by 0.3" in made.failures[0] and made.rows[0]["what"].startswith("1 of 3")


def test_shares_of_the_ceilings(tmp_path, monkeypatch):
    """A launch that takes the seconds its bytes or FLOPs would take at half of a ceiling's rate has a share of one half."""
    import gpu_kernels
    made, asked = gpu.Run("cpu", True, tmp_path), []
    made.bandwidth, made.flops = 1e9, 1e6
    monkeypatch.setattr(gpu_kernels, "seconds", lambda launch, device, inner=0: asked.append(launch) or 0.5)
    gpu_kernels.attention_rates(made)
    decode, verify, prefill, peer = made.rows
    shape = roofline.Shape(heads=4, kv_heads=2, dim=16)
    work = roofline.attend(shape, roofline.plan(shape, [1, 1], [40, 40], processors=2))
    assert decode["share"] == pytest.approx(work.bytes / 0.5 / 1e9) and "TB/s" in decode["rate"] and len(asked) == 4
    pairs = 4 * 4 * 16 * (20 * 21 // 2)
    assert prefill["share"] == peer["share"] == pytest.approx(pairs / 0.5 / 1e6) and 0 < verify["share"] < 1


@pytest.mark.parametrize("flags, code, words", [(["--parts", "aq", "--tiny"], 2, "--parts takes letters"),
                                                (["--tiny", "--parts", "a", "--seconds", "0"], 1, "left out: 0 s are over")])
def test_flags(flags, code, words):
    done = run(*flags)
    assert done.returncode == code and words in done.stdout + done.stderr


def test_without_a_gpu_it_says_so():
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "no GPU here" in done.stderr


# ---- on paper


def test_weights_and_kv_are_those_of_the_model():
    shape = roofline.LLAMA3_8B
    assert shape.weight_bytes / 2 == pytest.approx(7.50e9, rel=0.001)     # 8.03e9 parameters, less the embedding's 0.525e9
    assert shape.kv_bytes * shape.layers == 131072 and shape.layer_weights == 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336


def test_decode_reads_each_column_once_and_prefill_computes_a_triangle():
    shape = roofline.LLAMA3_8B
    for rows, columns in ((1, 1000), (7, 5000), (300, 17)):
        work = roofline.plan(shape, [1] * rows, [columns] * rows)
        found, merged = roofline.attend(shape, work), roofline.merge(shape, work)
        least = rows * columns * (shape.kv_bytes + 4) + 2 * rows * 4096 * 2
        assert found.flops == 4 * rows * columns * 4096 and found.bytes == least + work.partials * 32 * 129 * 4
        assert bool(merged.bytes) == (work.partials > 0)
    for tokens in (100, 2048):
        found = roofline.attend(shape, roofline.plan(shape, [tokens], [tokens]), distinct=tokens)
        assert found.flops == pytest.approx(4 * 4096 * tokens * (tokens + 1) / 2, rel=0.01)
        assert found.bytes == tokens * (shape.kv_bytes + 4 + 4 * 4096)
    assert roofline.prefill_flops(shape, 1000) == pytest.approx(2 * 32 * shape.layer_weights * 1000 + 2 * 128256 * 4096 + 32 * 2 * 4096 * 1000 * 1001)


def test_forks_share_what_their_rows_have_in_common():
    for nested in (0, 1, 3):
        q_lens, kv_lens, shared = roofline.forks(tails=10, prefix=1024, rows=16, nested=nested)
        assert len(q_lens) == 16 and set(kv_lens) == {1034} and len(shared) == 2 ** (nested + 1) - 1
        for row in range(16):
            mine = sorted(run[2:] for run in shared if run[0] <= row < run[1])
            assert mine[0][0] == 0 and mine[-1][1] == 1024 and all(a[1] == b[0] for a, b in zip(mine, mine[1:]))
    grouped, apart, once = roofline.sharing(roofline.LLAMA3_8B, roofline.forks())
    assert apart.bytes == pytest.approx(64 * (8192 + 256) * 4100, rel=0.02) and 5 < apart.bytes / grouped.bytes < 20
    assert grouped.bytes - once.bytes == 3 * 8192 * 4100     # 64 rows of 4 heads are four tiles


def test_the_report_says_that_it_is_a_prediction():
    text = roofline.report(markdown=True)
    assert text.startswith("PREDICTED, not measured") and all(card.name in text for card in roofline.CARDS)
    for name in ("attend, decode", "attend, prefill", "merge", "add_rms_norm", "rope", "store_kv", "silu_mul", "mask", "sampling, greedy"):
        assert f"| {name} |" in text
    assert kernels_aot.table([["a", "b"], ["x", 1]], False) == "a  b\nx  1"
    assert torch.tensor([roofline.floor(roofline.LLAMA3_8B, 1, 1).seconds(4.8e12, 989e12)]).item() == pytest.approx(15.01e9 / 4.8e12, rel=0.001)
