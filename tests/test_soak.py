"""bench/soak.py for 20 seconds; and that its verdicts find what they are there for."""

import collections
import sys
from pathlib import Path

import pytest

import engines

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import soak  # noqa: E402


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    args, flags = soak.arguments(["--seconds", "20", "--clients", "16", "--prompts", "60", "--compare", "25", "--page-size", "4",
                                  "--max-running-requests", "12"])
    load, table = soak.soak(args, flags, folder)
    return load, table, folder / "tiny"


def test_nothing_leaks_and_nothing_is_wrong(soaked):
    load, table, _ = soaked
    assert not load.violations, table
    assert "violations     none" in table and "engine process" in table


def test_everything_was_done(soaked):
    load, table, _ = soaked
    assert all(load.did[act.__name__] >= 4 for act in soak.ACTS), table
    assert {200, 400} <= set(load.statuses) and sum(map(len, load.texts.values())) > 25 and len(load.seconds["whole answer"]) > 25, table
    assert all(len(texts) == 1 for texts in load.texts.values()), "one prompt, one text"


@pytest.fixture
def seen(soaked):
    """What was seen, with room for new violations."""
    load, _, model = soaked
    return soak.Load(load.server, load.http, load.prompts, False, texts=load.texts, samples=list(load.samples)), str(model)


def test_a_wrong_text_is_found(seen):
    load, model = seen
    number, texts = next((n, t) for n, t in sorted(load.texts.items()) if len(next(iter(t))) > 20)
    [text] = texts
    load.texts = {number: collections.Counter({text[:12] + "~" + text[13:]: 2, text: 1})}
    assert soak.judge_texts(load, [number], model) == (3, 0)
    assert len(load.violations) == 1 and "2 answers" in load.violations[0]


def test_other_weights_are_found(seen, tmp_path):
    load, _ = seen
    other = engines.tiny_path(tmp_path, seed=1)
    number = next(n for n, t in sorted(load.texts.items()) if load.prompts[n].ids)
    soak.judge_texts(load, [number], str(other))
    assert load.violations


def test_memory_that_grows_is_found(seen):
    load, _ = seen
    soak.judge_memory(load)
    assert not load.violations
    load.samples = [(at, {name: (values[0] + 100 * at, *values[1:]) for name, values in measured.items()}) for at, measured in load.samples]
    assert [name for name, warm, last in soak.judge_memory(load) if last > warm + 40] == ["HTTP", "engine"] and len(load.violations) == 2
