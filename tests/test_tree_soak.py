"""The engine under a long queue in a pool of a fifth of what its prompts need: audits after every step, texts of a sample, all memory back."""

import random

import pytest

import engines
from nano_sgl.policies import POLICIES


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Questions on documents, turns of chats, and prompts that share nothing."""
    documents = [engines.prompt(rng.randrange(40, 120), 1000 + i) for i in range(12)]
    made: list[list[int]] = []
    for i in range(count):
        kind = rng.randrange(4)
        head = rng.choice(documents) if kind < 2 else rng.choice(made)[:150] if kind == 2 and made else []
        made.append(head + engines.prompt(rng.randrange(3, 30), i))
    return made


def soak(path, count: int, seed: int, **flags) -> None:
    """`count` requests: they come in waves, up to some 300 wait, some are aborted, some outrank others."""
    rng = random.Random(seed)
    engine = engines.make(path, max_total_tokens=256, max_running_requests=8, chunked_prefill_size=96, disable_overlap_schedule=seed % 2 == 0, **flags)
    reference, sample = engines.Reference(path), {}
    todo, answers, aborted = list(enumerate(prompts(rng, count))), {}, set()
    while todo or engine.has_work:
        for number, ids in [todo.pop() for _ in range(min(len(todo), rng.choice([0, 0, 0, 1, 3, 40]) * (len(engine.scheduler.waiting) < 300)))]:
            request = engines.request(number, ids, engines.params(max_tokens=rng.choice([1, 4, 30]), temperature=0), priority=rng.choice([0, 5, 20]),
                                      namespace=rng.choice(["", "", "", "x"]))
            answers[request.rid] = engines.Answer()
            engine.add(request)
            if rng.random() < 100 / count:
                sample[request.rid] = request
        if rng.random() < 0.05 and engine.streams:
            aborted.add(rid := rng.choice(list(engine.streams)))
            engine.abort(rid)
        engine.scheduler.ratio = 0.0  # it goes on believing that every output is about to end
        for chunk in engine.step():
            answers[chunk.rid].take(chunk)
        engine.check()
    assert {rid for rid, answer in answers.items() if answer.reason == "abort"} <= aborted
    assert all(answer.reason in ("length", "stop", "abort") for answer in answers.values())
    for rid, request in sample.items():
        if answers[rid].reason != "abort":
            engines.same(answers[rid], reference(request))
    assert engine.scheduler.counters.retractions and engine.scheduler.counters.evicted_tokens
    assert engine.flush_cache() and engine.scheduler.slots.available == engine.scheduler.slots.capacity
    assert not engine.scheduler.tree.roots and not engine.scheduler.tree.waiting


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("count", [60, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_many_requests_under_every_policy(path, name, count):
    soak(path, count, len(name), schedule_policy=name)


@pytest.mark.long
@pytest.mark.parametrize("name, page, eviction", [("lpm", 1, "lru"), ("dfs-weight", 16, "cost"), ("priority", 4, "slru")])
def test_ten_thousand_requests(path, name, page, eviction):
    soak(path, 10_000, page, schedule_policy=name, page_size=page, radix_eviction_policy=eviction)
