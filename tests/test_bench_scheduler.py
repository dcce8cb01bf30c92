"""bench/lpm.py, bench/scheduler.py and bench/ablation.py at tiny sizes: what they claim to measure is what they measure."""

import re
import sys
from pathlib import Path
from unittest import mock

import engines
import numpy as np
import pytest

from nano_sgl.protocol import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import ablation  # noqa: E402
import lpm  # noqa: E402
import scheduler  # noqa: E402
import workloads  # noqa: E402


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return engines.tiny_path(tmp_path_factory.mktemp("bench") / "tiny", max_position_embeddings=8192)


def cells(table: str) -> dict[str, list[str]]:
    """First cell -> the others, of a table's lines."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in lines}


# ------------------------------------------------------------------------------------------------------------------------------- lpm.py

@pytest.mark.parametrize("shape", lpm.SHAPES)
def test_the_published_totals(shape):
    budget = lpm.SHAPES[shape][-1]
    prompts = [ids for _, ids in lpm.prompts(shape)]
    assert sum(map(len, prompts)) == lpm.PUBLISHED["fcfs"]
    assert {order: lpm.simulate(shape, order, budget)[0] for order in lpm.PUBLISHED} == lpm.PUBLISHED
    ran = lpm.simulate(shape, "lpm", budget)[1]
    assert [name[0] for name in ran] == sorted(name[0] for name in ran), "one conversation after the other"


def test_lpm_prints_and_draws(capsys, monkeypatch, tmp_path):
    drawn = mock.MagicMock()
    monkeypatch.setattr(lpm, "pyplot", lambda: drawn)
    assert lpm.main(["--step", "1500", "--highest", "5600", "--png", str(tmp_path / "lpm.png")]) == 0
    rows = cells(capsys.readouterr().out)
    assert [rows[shape][4] for shape in lpm.SHAPES] == ["2.68"] * 4
    figure = drawn.figure.return_value
    assert figure.add_subplot.call_count == 4 and figure.savefig.call_args[0][0] == str(tmp_path / "lpm.png")


def test_without_matplotlib_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib, or pass --png ''"):
        lpm.pyplot()


# ------------------------------------------------------------------------------------------------------------------------- scheduler.py

@pytest.mark.parametrize("page", [1, 16])
def test_a_pass_admits_the_same_requests_as_plain_matching(page):
    rows = cells(scheduler.passes([16, 40], 4, page))  # asserts it
    assert all(re.fullmatch(r"[\d.]+/[\d.]+", cell) for n in ("16", "40") for cell in rows[n][:3])


def test_the_backlog_computes_each_token_once():
    rows = cells(scheduler.backlog(12, 12))
    assert rows["lpm"][1] == rows["dfs-weight"][1] == "1.0000"
    assert float(rows["fcfs"][1]) > 1.5 and rows[f"lpm up to {scheduler.CUT_OFF}"][0] != rows["lpm"][0]


def test_nobody_starves():
    waits = {order: scheduler.starve(order, 40) for order in ("fcfs", "lpm", "dfs-weight")}
    assert all(cold is not None and cold <= 10 for cold, _ in waits.values()), {order: cold for order, (cold, _) in waits.items()}
    assert all(len(hot) >= 8 * 37 and max(hot) < 10 for _, hot in waits.values())
    assert "| lpm |" in scheduler.starvation(20)


def test_the_share_of_a_run(tiny_path):
    said = scheduler.share(str(tiny_path), "float32", 0.02)
    tree, whole = (float(found) for found in re.findall(r"([\d.]+)% of the run", said))
    assert 0 < tree < whole < 100 and said.startswith("4 requests")


@pytest.mark.parametrize("flags", [["--only", "pass"], ["--passes", "0"], ["--stream", "9"]])
def test_flags_that_make_no_sense(flags, capsys):
    with pytest.raises(SystemExit):
        scheduler.main(flags)
    assert "error: --only takes some of" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------------------- ablation.py

def test_wholes_are_found_as_wholes_only():
    wholes = ablation.WholePrompts()
    chat = wholes.namespace([1, 2, 3])
    wholes.remember([1, 2, 3], chat)
    other = wholes.namespace([1, 2, 4])
    wholes.remember([1, 2, 4], other)
    wholes.remember([1, 2, 3, 9, 9], chat)
    assert chat != other and wholes.namespace([1, 2, 3, 9, 9, 5]) == wholes.namespace([1, 2, 3, 9]) == chat
    assert wholes.namespace([1, 2]) not in (chat, other)


def test_a_cut_workload_is_closed_and_shuffled():
    for name in "abcdef":
        requests = ablation.cut(name, 1, 2)
        assert 2 <= len(requests) <= 2 * ablation.PER_GROUP and requests != sorted(requests, key=lambda r: r.id)
        assert {need for r in requests for need in r.needs} <= {r.id for r in requests}
    assert ablation.cut("d", 1, 2) != ablation.cut("d", 2, 2)


@pytest.mark.parametrize("variant", ablation.VARIANTS)
def test_every_variant_gives_the_same_texts(tiny_path, variant):
    """Only what is computed differs: three times the same prompt, and twice its beginning, in one step."""
    ids = np.random.default_rng(0).integers(0, 250, 60).tolist()
    prompts = [ids, ids, ids, ids[:50] + [7] * 10, ids[:50] + [8] * 10]
    requests = [engines.request(n, p, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)) for n, p in enumerate(prompts)]
    expected = engines.run(engines.plain(tiny_path), requests)
    made, engine = ablation.VARIANTS[variant], ablation.start(str(tiny_path), "float32")
    ablation.refit(engine, 2048, made.order, made.cache)
    made.patch(engine)
    found = engines.run(engine, requests)
    assert {rid: answer.ids for rid, answer in found.items()} == {rid: answer.ids for rid, answer in expected.items()}
    assert sum(answer.cached for answer in found.values()) == (0 if variant in ("no cache", "no in-batch share") else 2 * 59 + 2 * 50)


def test_ablation_from_end_to_end(tiny_path, capsys, monkeypatch):
    drawn = mock.MagicMock()
    monkeypatch.setattr(ablation, "pyplot", lambda: drawn)
    assert ablation.main(["--model", str(tiny_path), "--dtype", "float32", "--workloads", "a", "--groups", "1", "--requests", "2",
                          "--words", "20", "--png", "x.png"]) == 0
    rows = cells(capsys.readouterr().out)
    assert rows["0%"][0] == "0.0%" and float(rows["100%"][0][:-1]) > 90
    hits = {variant: int(re.search(r"\((\d+)%\)", rows[variant][0])[1]) for variant in ablation.VARIANTS}
    assert rows["full system"][0].startswith("1.00") and hits["no cache"] == 0 < hits["no tree"] <= hits["full system"]
    assert drawn.figure.return_value.savefig.call_args[0][0] == "x.png"


def test_play_keeps_to_its_bound(tiny_path):
    engine = engines.make(tiny_path, max_total_tokens=16_384)
    requests = workloads.build("a", 1, 0.05)
    run = ablation.play(engine, requests, at_once=1)
    assert max(run.rows) == 1 and len(run.latencies) == len(run.first_tokens) == len(requests) == 8 and 0.5 < run.hit_rate < 1
    assert run.output_tokens == 8 * 32


@pytest.mark.parametrize("flags", [["--workloads", "a,x"], ["--only", "all"], ["--pool", "0.5"], ["--groups", "0"]])
def test_ablation_refuses(flags, capsys):
    with pytest.raises(SystemExit):
        ablation.arguments(flags)
    assert "error: --" in capsys.readouterr().err
