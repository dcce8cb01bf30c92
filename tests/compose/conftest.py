"""One laboratory for all tests of pairs; what they found is written down where NANO_SGL_PAIRS names a file."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

import engines
import pairs
from nano_sgl import native


@pytest.fixture(scope="session")
def labs(tmp_path_factory):
    """() -> the laboratory of the kernel set in use."""
    made, path = {}, engines.tiny_path(tmp_path_factory.mktemp("kernel_sets"))
    def of_this_set() -> pairs.Lab:
        if native.choice not in made:
            made[native.choice] = pairs.Lab(path)
        return made[native.choice]
    return of_this_set


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    lab = pairs.Lab(engines.tiny_path(tmp_path_factory.mktemp("pairs")))
    yield lab
    if path := os.environ.get("NANO_SGL_PAIRS"):
        Path(path).write_text(json.dumps({"cells": {cell: asdict(result) for cell, result in lab.results.items()},
                                         "totals": lab.totals(), "mutants": lab.mutants}))
