"""Shared by all tests: one torch thread a process (several run side by side), the demo model, API cases, and cases of other people."""

import gc
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in what the tests start

import pytest  # noqa: E402
import torch  # noqa: E402
import engines  # noqa: E402
from kernel_sets import SETS  # noqa: E402

from nano_sgl import native  # noqa: E402

torch.set_num_threads(1)
CASES = Path(__file__).parent / "cases"


def pytest_collection_modifyitems(config, items):
    """Where other people's cases are not at hand, their tests are not there: pytest would make one of each empty set, to be skipped."""
    empty = [] if "NANO_SGL_CASES" in os.environ else [item for item in items if "NOTSET" in item.name]
    items[:] = [item for item in items if item not in empty]
    if empty:
        config.hook.pytest_deselected(items=empty)


def pytest_collection_finish(session):
    """Half a million objects of what is imported by now stay to the end: no collection need look at them again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    """At exit everything has to be freed, or nanobind calls it leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's directory; prepared once for all runs."""
    from nano_sgl import weights
    return weights.resolve("demo")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A tiny model's directory."""
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(path):
    """What the plain engine answers, of that model: request -> Answer."""
    return engines.Reference(path)


@pytest.fixture(scope="session")
def api_case():
    """api_case("F003"): one case of tests/cases by its id."""
    cases = {case["id"]: case for file in CASES.glob("*.jsonl") for case in map(json.loads, file.read_text().splitlines())}
    return cases.__getitem__


@pytest.fixture(params=SETS, ids="-".join)
def kernel_set(request) -> str:
    """The test runs once per kernel set; the name of its attention backend."""
    before = native.choice
    native.use(request.param[1])
    yield request.param[0]
    native.use(before)
