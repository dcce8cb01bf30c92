"""Steps as graphs: what is recorded, and that a replayed step does what a launched one does. On a CPU, where a graph is its frame, run again."""

import pytest
import torch

import engines
from engines import make, overlapped, params, prompt, request, run, same, workload
from nano_sgl import attention, graphs, runner
from nano_sgl.graphs import FakeGraph, Graphs, bucket

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "colour": {"enum": ["red", "green"]}},
          "required": ["name", "colour"], "additionalProperties": False}
SPECULATION = dict(speculative_algorithm="ngram", speculative_draft_length="fixed", speculative_num_draft_tokens=5)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return engines.tiny_path(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def reference(path):
    return engines.Reference(path)


def with_graphs(engine, most=graphs.MAX_GRAPHS):
    engine.runner.graphs = Graphs(FakeGraph, most)
    return engine


def requests_of(seed):
    """Of all kinds: greedy and sampled rows, filters, penalties, biases, logprobs, grammars, stops."""
    made = workload(seed, count=20)
    forms = [dict(), dict(json_schema=PERSON), dict(regex="name: (red|green), (tag ){3}end"), dict(), dict(choice=["the red one", "the green one"])]
    extra = [dict(temperature=1, seed=3, top_k=5), dict(temperature=0), dict(logprobs=2, temperature=0.7, seed=4), dict(frequency_penalty=1.5),
             dict(min_tokens=5, temperature=0), dict(logit_bias={65: 5.0}), dict(top_p=0.7, temperature=1, seed=5), dict(repetition_penalty=1.3)]
    return made + [request(f"g{i}", prompt(3 + i, i), params(**forms[i % 5], **extra[i % 8], max_tokens=12 + i)) for i in range(16)]
