"""Every program in examples/ runs with the demo model, and prints what it is there to show."""

import ast
import contextlib
import re
import runpy
from pathlib import Path

import pytest

import nano_sgl

EXAMPLES = Path(__file__).parent.parent / "examples"
SHOWS = {  # example -> patterns that its output must have
    "shared_prefix": [r"\(0 of \d+ prompt tokens were cached\)", r"(\(7\d of 9\d prompt tokens were cached\)(.|\n)*){3}"],
    "streaming_chat": [r"The capital of France is Paris\.", r"(\[[1-9]\d+ of \d+ prompt(.|\n)*){2}"],
    "samples": [r"0: Once upon", r"3: Once upon", "the same again: True", "four different: True"],
    "event_loop": ["Rome: ", "Cairo: ", "Lima: ", r"\n.{31,80}\n$"],
    "structured": [r"fell: '\d{4}'  \(regex, stop\)", r"Answer: '(yes|no)'  \(choice", r"'\d\d:\d\d'", r"'\[\d+, \d+, \d+, \d+\]'  \(ebnf",
                   r"\{.*\}'  \(json_object, stop\)", r"City\(name='Paris', country='[^']*', has_a_river=(True|False)\)  \(json_schema, stop\)"],
    "choices": [r"France is \.\.\. Paris ", r"degrees \.\.\. Celsius ", r"triangle has \.\.\. three sides "],
}


def test_every_example_is_tested_and_fits_a_screen():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWS)
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text()
        assert len(source.splitlines()) < 40 and f"python examples/{path.name}" in ast.get_docstring(ast.parse(source)), path


@pytest.fixture(scope="module")
def shared(demo_path):
    """Of all examples: each finds it without a cache. float32, since bfloat16's rounding differs between machines."""
    with nano_sgl.LLM("demo", dtype="float32", max_total_tokens=4096) as made:
        yield made


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_an_example_shows_what_it_says(shared, capsys, monkeypatch, name):
    def llm(model, dtype="float32", max_total_tokens=4096):
        assert (model, dtype, max_total_tokens) == ("demo", "float32", 4096)
        return contextlib.nullcontext(shared)

    shared.flush_cache()
    monkeypatch.setattr(nano_sgl, "LLM", llm, raising=False)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert all(re.search(pattern, out) for pattern in SHOWS[name]), out
