"""bench/spec.py: its prompts, and one small run from end to end."""

import sys
from pathlib import Path

import engines
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import spec  # noqa: E402


def test_there_are_prompts_enough_and_no_two_are_equal():
    for made in (spec.texts(), spec.functions(), spec.QUESTIONS):
        assert len(set(made)) == len(made) == spec.PROMPTS


def test_from_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(spec, "texts", lambda: [f"{i} one two three four five six " * 2 for i in range(6)])
    monkeypatch.setattr(spec, "functions", lambda: [f"def f{i}(a):\n    b = a\n    c = b\n    d = c\n    return d\n" for i in range(6)])
    monkeypatch.setattr(spec, "QUESTIONS", [f"Why {i}?" for i in range(6)])
    monkeypatch.setattr(spec, "TASKS", "Answer.")
    monkeypatch.setitem(spec.ENGINES, "radix", spec.ENGINES["radix"] | dict(speculative_draft_length="fixed"))  # a tiny step's cost is noise
    path = engines.tiny_path(tmp_path)
    spec.main(["--model", str(path), "--dtype", "float32", "--batches", "1,2", "--repeats", "1", "--tokens", "6", "--engines", "ngram,radix"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "workload" not in line]
    assert len(rows) == 5 * 2 * 2
    for row in rows:
        answers = 4 if row[1] == "1" else 6
        assert row[-1] == f"{answers}/{answers} |", "in float32 the texts are those without guesses"
    assert all(float(row[3]) > 1.5 for row in rows if row[0] == "| agent" and row[2] == "radix"), "what was answered before is guessed"


@pytest.mark.parametrize("flags", [["--only", "poems"], ["--engines", "psychic"], ["--repeats", "0"], ["--tokens", "1"]])
def test_flags_that_make_no_sense(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        spec.main(flags)
    assert stopped.value.code == 2
