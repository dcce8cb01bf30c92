"""bench/host.py: the script is what its engine answers, under books that are right, and one small run from end to end."""

import sys
from pathlib import Path

import engines
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import host  # noqa: E402


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    return engines.tiny_path(folder / "tiny")


@pytest.mark.parametrize("kind", host.FLAGS)
def test_rows_answer_with_the_script(kind, path, tmp_path):
    run = host.Run(host.tiny_model(tmp_path, path), kind, 2, 24, 1)
    script = run.engine.script.tolist()
    for _ in range(24):
        run.one()
        run.engine.scheduler.check()
    reqs = run.engine.scheduler.running[:2]
    assert len(reqs) == 2 and all(len(req.output_ids) >= 40 for req in reqs)
    for req in reqs:
        assert req.output_ids == [script[i % len(script)] for i in range(len(req.output_ids))]
    made = run.measure(4)
    assert made["tokens"] >= 2 and made["step"] == pytest.approx(sum(made.get(part, 0) for part in (*host.PARTS, "rest")))
    assert 0 < run.text_us(2)
    run.close()


def test_from_end_to_end(path, capsys):
    host.main(["--model", str(path), "--rows", "1,3", "--steps", "4", "--repeats", "2", "--only", "decode,mixed"])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines] == ["decode: rows", "1", "3", "mixed: rows", "1", "3"]
    assert [float(line[1]) for line in lines if line[0] in ("1", "3")] == [1, 3, 1.2, 3.2]


@pytest.mark.parametrize("flags", [["--only", "poems"], ["--rows", "0"], ["--steps", "0"]])
def test_flags_that_make_no_sense(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        host.main(flags)
    assert stopped.value.code == 2
