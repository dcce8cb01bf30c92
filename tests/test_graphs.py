"""Steps as graphs: what is recorded, and that a replayed step does what a launched one does. On a CPU, where a graph is its frame, run again."""

from types import SimpleNamespace

import pytest
import torch

import engines
from engines import make, overlapped, params, prompt, request, run, same, workload
from nano_sgl import attention, graphs, runner
from nano_sgl.engine import Engine
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


FLAGS = [dict(), dict(page_size=4, **SPECULATION), dict(SPECULATION, speculative_algorithm="ngram+radix"), dict(max_total_tokens=200),
         dict(SPECULATION, speculative_acceptance="rejection"), dict(attention_backend="torch", chunked_prefill_size=24)]


@pytest.mark.parametrize("device, depth, flags", [("inline", 0, flags) for flags in FLAGS] + [("late", 2, flags) for flags in FLAGS[:2] + FLAGS[4:5]],
                         ids=str)
def test_a_replayed_step_does_what_a_launched_one_does(path, reference, flags, device, depth):
    engine, plain = (make(path, **flags) if device == "inline" else overlapped(path, device, depth, **flags) for _ in range(2))
    with_graphs(engine)
    rejects = "speculative_acceptance" in flags
    for seed in (1, 2) if device == "inline" else (1,):
        made = requests_of(seed)
        if rejects:                                                 # texts of its own, which are the same without graphs
            expected = run(plain, made)
        answers = run(engine, made)
        for one in made:
            same(answers[one.rid], expected[one.rid] if rejects else reference(one))
    seen = engine.runner.graphs
    assert seen.replays > seen.steps // 6, "steps of a workload come in few sizes"
    for one in (engine, plain):
        one.check()
        one.shutdown()


def test_what_a_frame_forgets_shows(path, reference, monkeypatch):
    """A fake graph is of use if it catches what does not belong to a frame: here who samples how."""
    engine = with_graphs(make(path))
    plan = engine.runner.plan

    def wrong(*args):
        made = plan(*args)
        object.__setattr__(made.frame, "key", tuple(part for part in made.frame.key if part != made.frame.sampling.shape))
        return made
    monkeypatch.setattr(engine.runner, "plan", wrong)
    made = [request(f"{i}", prompt(9, i) * 3, params(max_tokens=24, ignore_eos=True, **extra))
            for i, extra in enumerate([dict(temperature=0), dict(temperature=2, seed=1)] * 4)]
    answers = [run(engine, [one])[one.rid].ids == reference(one).ids for one in made]  # batches of one row, greedy or sampled
    assert not all(answers) and engine.runner.graphs.replays
    engine.shutdown()


@pytest.mark.parametrize("device, backend, off, made", [("cuda", "triton", False, True), ("cuda", "triton", True, False), ("cuda", "torch", False, False),
                                                        ("cpu", "cpp", False, False)])
def test_who_records_graphs(device, backend, off, made):
    engine = SimpleNamespace(device=device, attention_backend=backend, config=SimpleNamespace(disable_cuda_graph=off))
    assert (Engine._graphs(engine) is not None) == made


def test_graphs_are_counted(path):
    engine = make(path)
    assert engine.in_force()["disable_cuda_graph"] and "graphs" not in engine.stats()
    with_graphs(engine)
    run(engine, [request("a", prompt(5, 1), params(max_tokens=9, temperature=0, ignore_eos=True))])
    assert engine.stats()["graphs"] == 1 and engine.stats()["graph_replays"] == 7 and not engine.in_force()["disable_cuda_graph"]
    engine.shutdown()


def test_graphs_are_recorded_lazily_and_bounded():
    made, ran = [], []

    class Graph(FakeGraph):
        def __init__(self, stages, buffer):
            made.append(len(buffer))
            if len(buffer) == 3:
                raise RuntimeError("no memory")
            super().__init__(stages, buffer)
    kept = Graphs(Graph, most=2)

    def step(size):
        ticks = []
        left = kept.run(size, [lambda b, left: ran.append(size) or b.sum(), lambda b, left: left * 2], torch.arange(size), lambda: ticks.append(1))
        assert int(left) == size * (size - 1) and len(ticks) == 2
    for size in (1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 1, 1, 2):
        step(size)
    assert made == [1, 2, 3, 4, 1], "at the second time; what failed is not tried again; the one unused for longest goes"
    assert list(kept.made) == [4, 1] and kept.replays == 5 and kept.steps == len(ran) == 13


def test_sizes():
    assert [bucket(n) for n in (1, 3, 9, 17, 65, 512)] == [1, 4, 16, 24, 96, 512]
    assert all(2 * a >= b for a, b in zip(graphs.SIZES, graphs.SIZES[1:])), "padding is at most half of a step"


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_a_padded_plan_attends_like_its_own(backend):
    torch.manual_seed(0)
    made = attention.ATTENTION[backend](4, 2, 16)
    table = torch.arange(1, 401, dtype=torch.int32).view(4, 100)
    table[:3, :40] = table[0, :40].clone()
    q_lens, lengths = [1, 1, 5, 2], [69, 75, 47, 91]
    plan = attention.plan(range(4), q_lens, [a + b for a, b in zip(q_lens, lengths)], [(0, 3, 0, 40)], group=2, item_cost=0, partial_cost=0,
                          min_split=16, programs=8, tiles=(16, 64))
    cols = torch.cat([torch.arange(length, length + n) for length, n in zip(lengths, q_lens)])
    q, caches = torch.randn(len(cols), 4, 16), torch.randn(2, 401, 2, 16)
    wide = plan.padded()
    assert len(wide.items) > len(plan.items) and wide.partials >= plan.partials
    flat = torch.from_numpy(wide.flat(len(plan.items)))
    found = [made.run(q, *caches, context, 0.25) for context in (made.prepare(plan, table, cols), made.prepare(wide, table, cols, flat=flat))]
    torch.testing.assert_close(*found)


class NoSync(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails where a GPU's graph would: at a value that the host asks for, and at one that it brings."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "masked_select", "unique_consecutive", "_unique2"), name
        masks = [one for one in (args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
                 if isinstance(one, torch.Tensor) and one.dtype == torch.bool]
        assert not masks, f"{name} by a mask: its size would have to be known"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flags", FLAGS[:5], ids=str)
def test_no_stage_waits_for_the_device(path, monkeypatch, flags):
    """The route of a GPU, as far as a CPU has it: torch's, and no forward pass."""
    monkeypatch.setattr(runner.sampling.native, "library", lambda: None)
    engine = with_graphs(make(path, attention_backend="torch", **flags))
    width, entered = engine.model.config.hidden_size, []
    monkeypatch.setattr(engine.model, "forward", lambda step, kv: torch.randn(len(step.input_ids), width))
    for name in ("_main", "_guess"):
        def stage(*args, real=getattr(engine.runner, name)):
            if not args[0].padded:
                return real(*args)
            entered.append(1)
            with NoSync():
                return real(*args)
        monkeypatch.setattr(engine.runner, name, stage)
    run(engine, requests_of(3))
    assert len(entered) > 20
    engine.shutdown()
