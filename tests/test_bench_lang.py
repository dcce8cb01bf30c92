"""bench/lang.py: one small run from end to end, on two servers."""

import json
import sys
from pathlib import Path

import engines
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import lang as bench  # noqa: E402

PROGRAMS = ("skeleton_of_thought", "llm_judge")


def tables(out):
    """{heading: {row: {column: cell}}}"""
    found, heading = {}, ""
    for line in out.splitlines():
        if line.startswith("|---"):
            continue
        if not line.startswith("|"):
            heading = line or heading
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if heading not in found:
            names, found[heading] = cells, {}
        else:
            found[heading][cells[0]] = dict(zip(names, cells))
    return found


def test_every_program_has_its_sizes():
    assert all(set(sizes) <= set(bench.TINY) for parts in bench.WORKLOADS.values() for sizes in parts)
    assert {program.__name__ for program in bench.WORKLOADS} | {"common"} == {
        path.stem for path in (Path(__file__).parent.parent / "examples" / "lang").glob("*.py")}


def test_from_end_to_end(tmp_path, capsys):
    path = engines.tiny_path(tmp_path / "tiny", max_position_embeddings=16384)
    assert bench.main(["--tiny", "--model", str(path), "--dtype", "float32", "--programs", ",".join(PROGRAMS), "--no-hints", "--no-parallel",
                       "--choose", "echo", "--json", str(tmp_path / "found")]) == 0
    found = tables(capsys.readouterr().out)
    assert len(found) == 5 and all(set(table) == set(PROGRAMS) for table in list(found.values())[:4])
    for row in found["several at once, tokens computed"].values():
        language, cached, uncached, found_by_cache = (int(row[arm].replace(",", "")) for arm in ("language", "calls, cache", "calls", "no hints"))
        assert language <= found_by_cache + 8 and language <= cached + 8 and uncached > 1.5 * language, row
        assert row["same"] == "2/2", "in float32 texts are the same, however they are asked for"
    requests = found["several at once, requests"]["skeleton_of_thought"]
    assert int(requests["calls"]) == int(requests["no hints"]) == 2 * (2 + 2) and int(requests["language"]) == 2 * (2 + 2) + 2 + 1
    cards = found["API speculative execution, cards of four gens"]
    assert cards["a call a gen"]["calls"] == "8" and all(row["whole cards"].endswith("/2") for row in cards.values())
    lines = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert len(lines) == 2 * 2 * 5 and all(line["seconds"] > 0 and line["computed"] > 0 for line in lines)


@pytest.mark.parametrize("flags", [["--programs", "poem"], ["--rounds", "0"], ["--choose", "dice"]])
def test_flags_that_make_no_sense(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(flags)
    assert stopped.value.code == 2
