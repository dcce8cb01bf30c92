"""scheduler.py: admission, chunks, sharing, policies, retraction, abort, failed steps. No model: tests/driver.py answers for it."""

import itertools
import random
import types

import numpy as np
import pytest

from driver import Driver
from nano_sgl.memory import Packed, Rows, SlotAllocator
from nano_sgl.policies import POLICIES, policy
from nano_sgl.protocol import Request, RequestError, SamplingParams
from nano_sgl.radix import Tree
from nano_sgl.scheduler import OLDEST_AFTER, Scheduler
from nano_sgl.waiting import WAIT_FOR_LEADER, Queue


def ids(n, start=0):
    return range(start, start + n)


# ----------------------------------------------------------------------------------------------------------------- the one rule

def test_a_prompt_is_cut_into_chunks_and_samples_when_it_is_whole():
    d = Driver(budget=64)
    req = d.add(ids(150), max_tokens=3)
    lens = [d.step().q_lens.tolist() for _ in range(5)]
    assert lens == [[64], [64], [22], [1], [1]]
    assert req.output_ids == [1, 1, 1] and req.state == "finished"


def test_decodes_and_a_chunk_share_one_budget():
    d = Driver(budget=64, max_running=4)
    for start in (0, 1000, 2000):
        d.add(ids(10, start), max_tokens=50)
    d.step()
    d.add(ids(200, 5000))
    batch = d.step()
    assert sorted(batch.q_lens.tolist()) == [1, 1, 1, 61]


def test_chunks_end_with_a_page():
    d = Driver(budget=60, page=16, pool=1600)
    d.add(ids(150), max_tokens=1)
    assert [d.step().q_lens.tolist() for _ in range(3)] == [[48], [48], [54]]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_full_hit_leaves_a_token_to_compute(page, length):
    d = Driver(page=page, pool=1600)
    d.add(ids(length), max_tokens=1)
    d.run()
    again = d.add(ids(length), max_tokens=1)
    batch = d.step()
    cached = min(length // page * page, length - 1)
    assert again.cached_tokens == cached and batch.q_lens.tolist() == [length - cached]


def test_max_tokens_zero_fills_the_cache_and_samples_nothing():
    d = Driver()
    req = d.add(ids(40), max_tokens=0)
    batch = d.step()
    assert not batch.samples.any() and batch.complete.all() and req.state == "finished" and req.output_ids == []
    assert d.tree.match(np.arange(40, dtype=np.int32)).length == 40


def test_prompt_logprobs_cap_the_hit_but_not_the_memory():
    d = Driver()
    d.add(ids(40), max_tokens=1)
    d.run()
    free = d.slots.available
    req = d.scheduler.add(Request(rid="p", prompt_ids=list(ids(40)), params=SamplingParams(max_tokens=1, prompt_logprobs=0, logprob_start_len=11)))
    batch = d.step()
    assert req.cached_tokens == 10 and batch.q_lens.tolist() == [30] and batch.store_from.tolist() == [40]
    d.run()
    assert d.slots.available == free, "the recomputed tokens took slots of their own"


# ----------------------------------------------------------------------------------------------------------------- sharing in a pass

def test_64_cold_prompts_that_share_30_tokens_are_admitted_in_one_pass():
    d = Driver(pool=8000, budget=4096, max_running=64)
    for i in range(64):
        d.add([*ids(30), *ids(20, 1000 + 100 * i)])
    batch = d.step()
    assert len(batch.reqs) == 64 and batch.num_tokens == 30 + 64 * 20
    assert (0, 64, 0, 30) in batch.shared


def test_identical_prompts_compute_their_prefix_once():
    d = Driver(budget=512)
    first, second = d.add(ids(100)), d.add(ids(100))
    batch = d.step()
    assert sorted(batch.q_lens.tolist()) == [1, 100]
    assert second.cached_tokens == 99 and batch.shared == [(0, 2, 0, 100)]
    d.run()
    assert first.output_ids == second.output_ids


# ----------------------------------------------------------------------------------------------------------------- pages that are begun alike

def step_with_slots(d):
    """A pass, applied to the rows in two parts as a step does: (batch, table while it runs, source slots, slots that become copies of them)."""
    batch = d.scheduler.next_batch()
    source, copy, *late = batch.writes.late()
    sent = Packed([*batch.writes.arrays(), *late], "cpu").send()
    d.rows.put(*sent[:8])
    table = d.rows.table.clone().numpy()
    d.rows.point(*sent[8:])
    d.flights.append(batch)
    d._check_batch(batch)
    return batch, table, source.tolist(), copy.tolist()


@pytest.mark.parametrize("length", [17, 31, 32, 37, 47, 48, 53])
def test_samples_of_a_prompt_compute_one_token_each_at_any_page_size(length):
    """In the step of the first one, with it; and later, while it decodes."""
    d = Driver(page=16, pool=1600, budget=400)
    first, *others = [d.add(ids(length), max_tokens=9) for _ in range(4)]
    batch, table, source, copy = step_with_slots(d)
    rest = (length - 1) % 16 if length % 16 else 0  # a last page that is full is in the tree
    assert batch.q_lens.tolist() == [length, 1, 1, 1] and d.scheduler.counters.copied_tokens == 3 * rest == len(copy) == len(set(copy))
    shared = table[first.row, :length - 1].tolist()
    assert all(table[r.row, :length - 1].tolist() == shared for r in others), "while the step runs they lead to the first one's slots"
    after = d.rows.table.numpy()
    assert source == shared[length - 1 - rest:] * 3
    assert copy == [slot for r in others for slot in after[r.row, length - 1 - rest:length - 1].tolist()]
    d.commit()
    fork = d.add([*ids(length), 1], max_tokens=9)  # the token that has been sampled
    d.step()
    assert fork.computed_len == length + 1 and d.scheduler.counters.computed_tokens == length + 3 + 4 + 1
    d.run()


def test_who_parts_inside_a_page_copies_from_the_tree_and_what_is_copied_is_shared_at_once():
    d = Driver(page=16, pool=1600, budget=400)
    d.add(ids(90), max_tokens=1)
    d.run()
    cached = d.tree.slots(d.tree.match(np.arange(80, dtype=np.int32)).node)
    twins = [d.add([*ids(37), *ids(60, 500)], max_tokens=2) for _ in range(2)]
    batch, table, source, copy = step_with_slots(d)
    assert batch.q_lens.tolist() == [60, 1] and [r.cached_tokens for r in twins] == [32, 96]
    for r in twins:  # the second has adopted the page that the first copies
        assert table[r.row, :37].tolist() == cached[:37].tolist()
        assert d.rows.table[r.row, 32:37].tolist() == copy == d.rows.table[twins[0].row, 32:37].tolist()
    assert source == cached[32:37].tolist() and d.scheduler.counters.copied_tokens == 5
    d.commit()
    assert d.tree.match(np.array([*ids(37), *ids(60, 500)], np.int32)).length == 96
    d.run()


def test_nobody_copies_what_is_not_there_when_the_step_has_run():
    """A leader between chunks; another namespace; tokens that the host does not know yet; prompt logprobs that are owed."""
    d = Driver(page=16, pool=1600, budget=32, depth=1)
    d.add(ids(45), max_tokens=40)
    d.step()
    salted = d.add(ids(45), max_tokens=1, namespace="salt")
    d.step(), d.step()
    assert salted.own_start + len(salted.own) >= 45 and not d.scheduler.counters.copied_tokens
    leader = d.scheduler.running[0]
    while leader.known_len < 47:
        d.step()
    assert leader.computed_len == leader.known_len, "a step is in flight"
    fork = d.add([*leader.ids().tolist(), 1, 1, 1], max_tokens=1)
    d.launch()
    assert fork.computed_len == fork.known_len and d.scheduler.counters.copied_tokens == leader.known_len - 32
    d.run()
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, logprob_start_len=40)
    d.scheduler.add(Request(rid="first", prompt_ids=list(ids(45)), params=SamplingParams(max_tokens=9)))
    scored = d.scheduler.add(Request(rid="scored", prompt_ids=list(ids(45)), params=asked))
    before = d.scheduler.counters.copied_tokens
    batch = d.step()
    assert batch.starts[batch.reqs.index(scored)] == 39 and d.scheduler.counters.copied_tokens == before + 12 + 7  # the first one: from the tree
    d.run()


def test_what_is_copied_from_is_not_written_to_by_the_same_step():
    """The last page that is not locked is the one that a request copies from, and the next candidate of the pass wants its slots."""
    d = Driver(page=16, pool=80, budget=400)
    d.add(ids(32), max_tokens=0)
    d.run()
    fork = d.add(ids(20), max_tokens=1)
    other = d.add(ids(40, 500), max_tokens=1)
    batch, _, source, copy = step_with_slots(d)
    assert batch.reqs == [fork] and len(source) == 3 and other.state == "waiting"
    d.commit(), d.scheduler.check()
    d.run()
    assert other.state == "finished" and d.tree.protected == 0


def test_who_is_copied_from_is_not_retracted_in_that_pass():
    """It has the lowest priority, and would have to give way to the third."""
    d = Driver(page=16, pool=1600, budget=400, max_running=2, policy="priority")
    leader = d.add(ids(20), max_tokens=40)
    d.step()
    fork, third = d.add(ids(20), max_tokens=9, priority=20), d.add(ids(20, 500), max_tokens=1, priority=20)
    batch, _, source, _ = step_with_slots(d)
    assert {*batch.reqs} == {leader, fork} and {*source} < {*leader.own} and len(source) == 3
    d.commit(), d.scheduler.check()
    d.run()
    assert leader.state == fork.state == third.state == "finished"


def test_who_is_retracted_in_the_pass_in_which_it_would_copy_leaves_nothing():
    """Its slots are another's before the pass ends."""
    d = Driver(page=16, pool=1600, budget=32, max_running=1, policy="priority")
    long = d.add(ids(45), max_tokens=9)
    d.step()
    d.tree.insert(np.array([*ids(5, 32), *ids(11, 700)], np.int32), d.slots.alloc(16), below=long.node)
    urgent = d.add(ids(20, 500), max_tokens=1, priority=20)
    copies, copy = [], d.scheduler._copy_begun_page
    d.scheduler._copy_begun_page = lambda *args: (copy(*args), copies.append(d.scheduler._writes.copied))
    batch, *_ = step_with_slots(d)
    assert copies[0] == 5 and batch.reqs == [urgent] and long.retractions == 1 and not batch.writes.copied
    d.commit(), d.scheduler.check()
    d.run()
    assert len(long.output_ids) == 9


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_leaves_nothing_of_its_copies(depth):
    d = Driver(page=16, pool=1600, depth=depth)
    reqs = [d.add(ids(37), max_tokens=3) for _ in range(3)]
    d.launch()
    if depth:
        d.launch()
    assert d.scheduler.fail(d.flights) == []
    d.flights.clear()
    d.scheduler.check()
    assert d.tree.total == 0 and not d.scheduler.unwritten_rows
    d.run()
    assert [r.output_ids for r in reqs] == [[1, 1, 1]] * 3


# ----------------------------------------------------------------------------------------------------------------- leaders

def test_a_follower_waits_for_a_leader_that_will_compute_what_both_need():
    d = Driver(budget=64)
    d.add(ids(200), max_tokens=2)
    follower = d.add(ids(200), max_tokens=2)
    computed = 0
    while follower.state == "waiting":
        computed += d.step().num_tokens
    assert computed <= 202 and follower.cached_tokens >= 192 - WAIT_FOR_LEADER
    d.run()


def test_no_wait_for_less_than_32_tokens():
    d = Driver(budget=64)
    d.add([*ids(64 + WAIT_FOR_LEADER - 1), *ids(60, 500)])
    d.add([*ids(64 + WAIT_FOR_LEADER - 1), *ids(60, 700)])
    d.step()                     # the budget went to the leader's first chunk
    d.add(ids(10, 900))
    batch = d.step()
    assert len(batch.reqs) == 1  # the leader's second chunk takes the whole budget
    d.run()


def test_a_leader_takes_over_what_a_follower_has_computed():
    d = Driver(budget=100)
    leader = d.add([*ids(90), *ids(100, 1000)])
    d.step()
    d.add([*ids(90), *ids(10, 1000), *ids(5, 3000)], max_tokens=50)
    computed = sum(d.step().num_tokens for _ in range(2))
    assert leader.state == "running" and computed <= 90 + 10 + 5 + 3
    d.run()


def test_rows_lie_in_tree_order_and_share_at_every_level():
    d = Driver(pool=8000, budget=4096, max_running=32)
    trunk = [*ids(40)]
    prompts = [[*trunk, *ids(20, 100 * (1 + i)), *ids(5, 10000 + 50 * i + 7 * j)] for i in range(3) for j in range(4)]
    random.Random(1).shuffle(prompts)
    for prompt in prompts:
        d.add(prompt, max_tokens=20)
    batch = d.step()
    d.step()
    batch = d.step()
    assert (0, 12, 0, 40) in batch.shared
    assert sorted(run[:2] for run in batch.shared if run[2] == 40) == [(0, 4), (4, 8), (8, 12)]
    covered = np.zeros((12, 60), int)
    for first, last, start, end in batch.shared:
        covered[first:last, start:end] += 1
    assert (covered == 1).all()


# ----------------------------------------------------------------------------------------------------------------- doors

@pytest.mark.parametrize("pool, page, prompt, max_tokens, fits", [
    (2048, 1, 2000, 500, True), (2048, 16, 2032, 16, True), (2048, 16, 2032, 17, True), (2048, 1, 2048, 0, True),
    (2048, 1, 2048, 1, False), (2048, 1, 2047, 1, True), (2048, 16, 2100, 4, False), (2050, 16, 2048, 1, False)])
def test_what_is_let_in_finishes_and_what_cannot_fit_is_refused_at_once(pool, page, prompt, max_tokens, fits):
    d = Driver(pool=pool, page=page, context=4096, budget=512)
    if not fits:
        with pytest.raises(RequestError, match=f"{prompt} tokens; at most"):
            d.add(ids(prompt), max_tokens=max_tokens)
        return
    req, short = d.add(ids(prompt), max_tokens=max_tokens), d.add([5, 6], max_tokens=2)
    d.run()
    assert req.state == short.state == "finished" and len(req.output_ids) == min(max_tokens, pool // page * page - prompt)


def test_an_empty_prompt_and_an_id_in_use_are_refused():
    d = Driver()
    d.add([1], rid="same")
    with pytest.raises(RequestError, match="in use"):
        d.add([1], rid="same")
    with pytest.raises(RequestError, match="no tokens"):
        d.add([])


def test_unknown_policies_and_useless_settings_are_refused():
    make = lambda **kw: Scheduler(**(dict(tree=Tree(16), slots=SlotAllocator(64, 16), rows=Rows(2, 64, "cpu"), token_budget=64,
                                          max_running=2, context_len=64) | kw))
    for kw, text in ((dict(schedule_policy="best"), "known are"), (dict(schedule_policy="lpm", cache=False), "radix cache"),
                     (dict(token_budget=8), "smaller than a page")):
        with pytest.raises(ValueError, match=text):
            make(**kw)


def test_short_requests_run_as_soon_as_the_last_chunk_of_a_long_one_is_launched():
    """A place that is free is used: no stale 'the batch is full'."""
    d = Driver(budget=128, max_running=3, context=1000)
    d.add(ids(400), max_tokens=200)
    shorts = [d.add(ids(10, 1000 * i), max_tokens=50) for i in (1, 2)]
    while d.scheduler.running == [] or d.scheduler.running[0].computed_len < 400:
        d.step()
    d.step()
    d.step()
    assert all(r.state == "running" for r in shorts)


# ----------------------------------------------------------------------------------------------------------------- policies

def started_order(d):
    order = []
    while d.scheduler.has_work:
        batch = d.step()
        order += [r.rid for r in batch.started]
    return order


def test_fcfs_lof_and_priority_orders():
    sizes = {"a": (3, 1), "b": (9, 5), "c": (5, 9)}
    for name, expected in (("fcfs", "abc"), ("lof", "bca"), ("priority", "cba")):
        d = Driver(policy=name, max_running=1)
        for rid, (max_tokens, priority) in sizes.items():
            d.add(ids(5, ord(rid) * 100), max_tokens=max_tokens, priority=priority, rid=rid)
        assert "".join(started_order(d)) == expected, name


def test_lof_prefers_long_outputs():
    d = Driver(policy="lof", max_running=2)
    for rid, max_tokens in (("a", 1), ("b", 2), ("c", 9), ("d", 5)):
        d.add(ids(5, ord(rid) * 100), max_tokens=max_tokens, rid=rid)
    assert [r.rid for r in d.step().started] == ["c", "d"]


def test_lpm_takes_the_longest_match():
    d = Driver(policy="lpm", max_running=2)
    d.add(ids(60), max_tokens=1)
    d.run()
    for rid, prompt in (("old", ids(9, 900)), ("cold", ids(9, 800)), ("warm", [*ids(20), 7]), ("warmer", [*ids(50), 7])):
        d.add(prompt, rid=rid)
    assert sorted(r.rid for r in d.step().started) == ["warm", "warmer"]


def test_routing_key_prefers_the_key_that_runs_most():
    d = Driver(policy="routing-key", max_running=3)
    for i in range(2):
        d.add(ids(5, 100 * i), max_tokens=9, routing_key="x")
    d.step()
    for rid, key in (("n", None), ("y", "y"), ("x", "x")):
        d.add(ids(5, 1000 + ord(rid)), rid=rid, routing_key=key, max_tokens=9)
    assert [r.rid for r in d.step().started] == ["x"]


def test_dfs_weight_serves_the_heaviest_subtree_to_its_end():
    d = Driver(max_running=1, policy="dfs-weight", budget=400)
    for warm in ([1] * 40, [2] * 40, [2] * 40 + [5] * 10, [1] * 40 + [6] * 10):
        d.add(warm, 1)
    d.run()
    light = [d.add([1] * 40 + [6] * 10 + [n], 1) for n in (70, 71)]
    heavy = [d.add([2] * 40 + tail, 1) for tail in ([80], [5] * 10 + [81], [5] * 10 + [82], [83])]
    order = []
    while d.scheduler.has_work:
        batch = d.step()
        order += batch.started if batch else []
        if len(order) == 2:  # more come for the light subtree: the heavy one is not left for them
            light += [d.add([1] * 40 + [6] * 10 + [n], 1) for n in (72, 73)]
    assert order == [heavy[1], heavy[2], heavy[0], heavy[3], *light]


def test_shortest_prefill_first_counts_what_is_not_cached():
    d = Driver(max_running=1, policy="shortest-prefill-first", budget=400)
    d.add([1] * 100, 1)
    d.run()
    cached, cold, short = d.add([1] * 100 + [2] * 5, 1), d.add([3] * 20, 1), d.add([4] * 10, 1)
    order = [req for _ in range(4) if (batch := d.step()) for req in batch.started]
    assert order == [cached, short, cold]


def test_hrrn_lets_a_long_prompt_have_its_turn():
    d = Driver(max_running=1, policy="hrrn", budget=400, pool=4000)
    long, passes = d.add([1] * 300, 1), 0
    d.add([2] * 10, 1)
    while long.state == "waiting":
        passes += 1
        d.add([3 + passes] * 10, 1)
        d.step()
    assert passes <= 45  # a ratio of 1 once 300 tokens have been computed for others, 10 in two passes... newer ones have less


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_of_much_higher_priority_takes_the_place_of_one_that_runs(depth):
    d = Driver(max_running=2, policy="priority", budget=200, depth=depth)
    low, middle = d.add([1] * 40, 30, priority=0), d.add([2] * 40, 30, priority=5)
    for _ in range(6):
        d.step()
    known = low.known_len
    near, high = d.add([3] * 10, 5, priority=10), d.add([4] * 10, 5, priority=11)
    passes = 0
    while high.state == "waiting":
        d.step()
        passes += 1
    assert passes <= 2 * depth + 2 and low.state == near.state == "waiting" and middle.state == "running"
    assert d.scheduler.counters.preemptions == 1 and low.known_len >= known
    before = d.scheduler.counters.computed_tokens
    d.run()
    assert len(low.output_ids) == 30 and low.retractions == 1
    assert d.scheduler.counters.computed_tokens - before < 40 + 3 * 30, "what it had computed was thrown away"


def test_preemption_frees_memory_and_spares_who_is_near_in_priority():
    d = Driver(pool=100, max_running=8, policy="priority", budget=200)
    d.scheduler.ratio = 0.1
    low = [d.add([n] * 30, 4, priority=n) for n in (1, 2, 3)]
    d.step()
    high = d.add([9] * 40, 2, priority=13)  # above 1 and 2 by more than 10
    d.step()
    d.step()
    assert high.state in ("running", "finished") and [r.retractions for r in low] in ([1, 0, 0], [1, 1, 0])
    d.run()
    assert all(len(r.output_ids) == 4 for r in low)


def test_nobody_is_preempted_in_vain():
    d = Driver(pool=100, max_running=8, policy="priority", budget=200)
    d.scheduler.ratio = 0.1
    low, near = d.add([1] * 10, 20, priority=0), d.add([2] * 70, 10, priority=50)
    d.step()
    d.add([3] * 60, 5, priority=55)
    d.step()
    assert d.scheduler.counters.preemptions == 0 and low.state == near.state == "running"
    d.run()


def test_random_is_a_seeded_shuffle():
    orders = []
    for seed in (1, 1, 2):
        d = Driver(policy="random", max_running=1, seed=seed)
        for rid in "abcdef":
            d.add(ids(5, ord(rid) * 100), rid=rid, max_tokens=1)
        orders.append("".join(started_order(d)))
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("name", ["lpm", "fcfs"])
def test_nobody_starves(name):
    """F029: one cold request, then a warm one a pass for 500 passes: it starts after at most OLDEST_AFTER starts of others."""
    d = Driver(policy=name, max_running=2, pool=4000)
    d.add(ids(100), max_tokens=1)
    d.run()
    d.add([*ids(100), 1], max_tokens=4), d.add([*ids(100), 2], max_tokens=4)
    d.step()
    cold = d.add(ids(30, 5000), rid="cold")
    for passes in range(500):
        if cold.state != "waiting":
            break
        d.add([*ids(100), 10 + passes], max_tokens=4)
        d.step()
    assert passes <= 4 * OLDEST_AFTER / 2 + 4  # two places, four steps each


def test_a_policy_is_a_sort_key_that_anyone_can_add():
    @policy("shortest-prompt", fair=False)
    def shortest(req, scheduler):
        return req.prompt_len

    try:
        d = Driver(policy="shortest-prompt", max_running=1)
        for rid, n in (("a", 30), ("b", 10), ("c", 20)):
            d.add(ids(n, ord(rid) * 100), rid=rid, max_tokens=1)
        assert started_order(d) == ["b", "c", "a"]
    finally:
        del POLICIES["shortest-prompt"]


# ----------------------------------------------------------------------------------------------------------------- memory pressure

@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("depth", [0, 1])
def test_retraction_loses_nothing(page, depth):
    """Outputs far longer than what admission expects, in a pool of a third of what they need."""
    d = Driver(pool=480, page=page, budget=64, max_running=8, depth=depth)
    d.scheduler.ratio = 0.1
    prompts = [[*ids(16, 100 * i)] for i in range(8)]
    reqs = [d.add(p, max_tokens=150) for p in prompts]
    d.run(token=lambda req: 10_000 * req.arrival + len(req.output_ids))
    assert sum(r.retractions for r in reqs) > 0
    for req in reqs:
        assert req.output_ids == [10_000 * req.arrival + i for i in range(150)]
    assert d.slots.available + d.tree.evictable == d.slots.capacity


def test_a_retracted_request_adopts_what_it_had_computed():
    d = Driver(pool=100, max_running=2, budget=128)
    first, second = d.add(ids(40), max_tokens=50), d.add(ids(10, 500), max_tokens=50)
    d.scheduler.ratio = 0.1
    computed = 0
    while d.scheduler.has_work:
        computed += d.step(token=lambda req: 7000 + 100 * req.arrival + len(req.output_ids)).num_tokens
    assert first.retractions + second.retractions > 0
    assert computed < 40 + 10 + 100 + 60, "retraction threw computed KV away"


@pytest.mark.parametrize("length", [63, 64, 65, 80, 81])
def test_retraction_at_page_borders(length):
    d = Driver(pool=480, page=16, budget=512)
    req = d.add(ids(48), max_tokens=60)
    token = lambda r: 9000 + len(r.output_ids)
    while req.known_len < length:
        d.step(token=token)
    d.scheduler._retract(req)
    d.scheduler.check()
    assert req.state == "waiting" and req.row == 0
    d.run(token=token)
    assert req.output_ids == [9000 + i for i in range(60)] and req.retractions == 1


def test_the_cheapest_goes_first():
    d = Driver(pool=90, max_running=3, budget=128)
    d.scheduler.ratio = 0.1
    low = d.add(ids(10), max_tokens=30, priority=0)
    high = [d.add(ids(10, 100 * i), max_tokens=30, priority=5) for i in (1, 2)]
    d.run(token=lambda r: 1000 * r.arrival + len(r.output_ids))
    assert low.retractions > 0 and not any(r.retractions for r in high)


def test_a_half_prefilled_request_keeps_its_beginning():
    """F015: between the chunks of a long prompt others are admitted into a pool that is short."""
    d = Driver(pool=800, budget=128, context=800)
    long = d.add(ids(600), max_tokens=8)
    d.step()
    others = [d.add(ids(200, 1000 * i), max_tokens=20) for i in (1, 2, 3)]
    d.run()
    assert long.retractions == 0 and all(r.state == "finished" for r in others)


def test_equal_requests_that_need_the_last_page_in_one_step_both_finish():
    """F035"""
    for depth, pool in itertools.product((0, 1), (64, 80, 96)):
        d = Driver(pool=pool, page=16, max_running=2, budget=64, depth=depth)
        d.scheduler.ratio = 0.1
        reqs = [d.add(ids(16, 100 * i), max_tokens=40) for i in range(2)]
        d.run()
        assert all(len(r.output_ids) == 40 for r in reqs)


# ----------------------------------------------------------------------------------------------------------------- abort, failed steps

@pytest.mark.parametrize("depth", [0, 1])
def test_abort_in_every_state_releases_once(depth):
    for after in range(9):
        d = Driver(budget=64, depth=depth, max_running=2)
        req, other = d.add(ids(150), max_tokens=5), d.add(ids(20, 500), max_tokens=3)
        for _ in range(after):
            d.step()
        was = req.state
        got = d.scheduler.abort(req.rid)
        assert (got is None) == (was == "finished")
        assert d.scheduler.abort("nobody") is None
        outputs = list(req.output_ids)
        d.run()
        assert req.state == other.state == "finished" and (was == "finished" or req.output_ids == outputs)
        assert d.slots.available + d.tree.evictable == d.slots.capacity and d.rows.available == 2


def test_abort_while_the_last_chunk_is_in_flight():
    """F027"""
    d = Driver(budget=128, context=1000)
    req = d.add(ids(300), max_tokens=5)
    d.step(), d.step()
    d.launch()
    d.scheduler.abort(req.rid)
    d.scheduler.check()
    assert req.row and req.leaving == "done", "the row is held until the step has landed"
    d.commit()
    d.scheduler.check()
    assert req.output_ids == [] and req.state == "finished" and d.slots.available + d.tree.evictable == d.slots.capacity


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_takes_its_nodes_back_and_requeues_leader_and_followers(depth):
    d = Driver(budget=256, depth=depth)
    reqs = [d.add([*ids(50), i], max_tokens=3) for i in (91, 92)]
    d.launch()
    if depth:
        d.launch()
    ended = d.scheduler.fail(d.flights)
    d.flights.clear()
    d.scheduler.check()
    assert ended == [] and d.tree.total == 0 and [r.state for r in reqs] == ["waiting"] * 2
    d.run()
    assert [r.output_ids for r in reqs] == [[1, 1, 1]] * 2


def test_one_that_always_fails_is_ended_alone():
    d = Driver()
    poison, *others = [d.add(ids(50, 100 * i)) for i in range(4)]
    ended = []
    for _ in range(200):
        if not d.scheduler.has_work:
            break
        if d.launch() is not None and poison in d.flights[-1].reqs:
            ended += d.scheduler.fail(d.flights)
            d.flights.clear()
        elif d.flights:
            d.commit()
        d.scheduler.check()
    assert ended == [poison] and poison.output_ids == [] and all(r.output_ids == [1] * 4 for r in others)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_who_passes_where_a_step_failed_shares_steps_again(depth, cache):
    """A step that fails once costs each of its requests one step alone; those that only wait are no suspects."""
    d = Driver(depth=depth, cache=cache, max_running=3)
    reqs = [d.add(ids(20, 100 * i), max_tokens=30) for i in range(3)]
    bystander = d.add(ids(20, 900), max_tokens=30)
    for _ in range(8):
        d.step()
    known = [r.known_len for r in reqs]
    while len(d.flights) <= depth:
        d.launch()
    assert d.scheduler.fail(d.flights) == []
    d.flights.clear()
    assert [r.suspect_until > 0 for r in [*reqs, bystander]] == [True, True, True, False]
    alone = []
    while any(r.suspect_until for r in reqs):
        batch = d.step()
        alone += [] if batch is None else [r.rid for r in batch.reqs]
        assert batch is None or len(batch.reqs) == 1 and len(alone) < 20
    assert list(dict.fromkeys(alone))[:3] == ["r1", "r2", "r3"] and all(r.known_len > k for r, k in zip(reqs, known))
    shared = max(len(batch.reqs) for _ in range(6) if (batch := d.step()) is not None)
    d.run()
    assert shared == 3 and all(r.output_ids == [1] * 30 for r in [*reqs, bystander])


def test_one_that_fails_late_is_found_however_often_it_was_cleared():
    """Its prompt is computed without fault each time; the fault is at one position of the output."""
    d = Driver(budget=16, depth=1)
    poison, *others = [d.add(ids(40, 100 * i), max_tokens=12) for i in range(4)]
    ended, failures = [], 0
    for _ in range(500):
        if not d.scheduler.has_work and not d.flights:
            break
        batch = d.launch()
        if d.flights and poison in d.flights[0].reqs and d.flights[0].kv_bounds[d.flights[0].reqs.index(poison)] == 45:
            ended, failures = ended + d.scheduler.fail(d.flights), failures + 1
            d.flights.clear()
        elif d.flights and (len(d.flights) > 1 or batch is None):
            d.commit()
        d.scheduler.check()
    assert ended == [poison] and failures == 2 and all(r.output_ids == [1] * 12 for r in others)


def test_spoiled_kv_does_not_stay():
    d = Driver()
    d.add(ids(30), max_tokens=1)
    d.run()
    req = d.add([*ids(30), *ids(20, 500)])
    batch = d.launch()
    d.flights.clear()
    d.scheduler.commit(batch, [[]], [True], {req})
    d.scheduler.check()
    assert req.state == "finished" and d.tree.total == 0


def test_writes_of_a_pass_that_launched_nothing_are_not_lost():
    """A prompt between chunks takes over what another has put into the tree, then sits the step out for want of memory."""
    d = Driver(budget=16, pool=100, depth=1)
    long = d.add(ids(60), max_tokens=2)
    d.step(), d.step()
    leader = np.array([*d.slots.alloc(10)], np.int32)
    d.tree.insert(np.arange(long.computed_len, long.computed_len + 10, dtype=np.int32), leader, below=long.node)
    taken = d.slots.alloc(d.slots.available)
    assert d.scheduler.next_batch() is None
    d.slots.free(taken)
    d.run()
    assert long.output_ids == [1, 1]


def test_a_failed_step_takes_back_who_sat_it_out_on_its_nodes():
    """Between chunks a request adopts what a step in flight is about to compute, and gets no memory for more: if that step fails, the
    request is no part of it, yet its path is gone, and so is what the step was to write to its row."""
    d = Driver(budget=16, pool=100, depth=2)
    other, long = d.add(ids(5, 500), max_tokens=9), d.add(ids(60), max_tokens=2)
    d.step(), d.step()
    while d.flights:
        d.commit()
    assert long.computed_len < 60
    start = long.computed_len
    d.tree.insert(np.arange(start, start + 10, dtype=np.int32), d.slots.alloc(10), below=long.node, step=d.scheduler.step + 1)
    d.scheduler._adopt(long)
    plan_chunks, d.scheduler._plan_chunks = d.scheduler._plan_chunks, lambda plan, budget: 0
    batch = d.launch()
    d.scheduler._plan_chunks = plan_chunks
    assert long.own_start == start + 10 and batch.reqs == [other]
    assert d.scheduler.fail(d.flights) == []
    d.flights.clear()
    d.scheduler.check()
    assert (long.state, long.suspect_until > 0, other.suspect_until > 0) == ("waiting", False, True)
    d.run()
    assert (long.output_ids, other.output_ids) == ([1, 1], [1] * 9)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_requests_whose_time_is_up_are_ended_once(depth):
    """The waiting limit counts until the first start, the running limit from there, through retraction too."""
    d = Driver(max_running=1, depth=depth, waiting_timeout=10, running_timeout=20)
    first, second, third = (d.add(ids(20, 100 * i), max_tokens=50) for i in range(3))
    d.step()
    d.now = 10.0
    assert d.scheduler.expire() == []
    d.now = 10.5
    assert d.scheduler.expire() == [second, third] and d.scheduler.expire() == []
    assert second.started_at is None and second.state == third.state == "finished"
    d.scheduler.check()
    d.step()
    d.scheduler._retract(first)
    d.now = 20.0
    d.step()
    assert d.scheduler.expire() == [] and first.state != "finished"
    d.now = 20.5
    assert d.scheduler.expire() == [first] and first.started_at == 0 and d.scheduler.expire() == []
    d.scheduler.check()
    d.run()
    assert first.state == "finished" and d.slots.available + d.tree.evictable == d.slots.capacity and not d.scheduler.reqs


# ----------------------------------------------------------------------------------------------------------------- everything at once

@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 24))])
def test_random_workloads_end_and_leak_nothing(seed):
    rng = random.Random(seed)
    page, depth, name = rng.choice([1, 4, 16]), rng.choice([0, 1, 2]), sorted(set(POLICIES))[seed % len(POLICIES)]
    cache = POLICIES[name].needs_tree or rng.random() < 0.8
    d = Driver(pool=rng.choice([420, 640, 2000]), page=page, budget=rng.choice([32, 64, 512]), max_running=rng.choice([4, 16]),
               policy=name, cache=cache, depth=depth, seed=seed)
    d.scheduler.ratio = 0.1
    reqs, aborted, todo = [], set(), 60
    for _ in range(4000):
        while todo and rng.random() < 0.4:
            head = rng.choice([[7] * 50, [9] * 120, []])
            reqs.append(d.add([*head, *(rng.randrange(3) for _ in range(rng.randrange(1, 60)))], rng.choice([0, 1, 5, 40, 200]),
                              priority=rng.choice([0, 1, 2, 30]), namespace=rng.choice(["", "", "a"])))
            todo -= 1
        if rng.random() < 0.03 and d.scheduler.reqs:
            aborted.add(rid := rng.choice(list(d.scheduler.reqs)))
            d.scheduler.abort(rid)
        if rng.random() < 0.01 and d.flights:
            aborted.update(r.rid for r in d.scheduler.fail(d.flights))
            d.flights.clear()
        if not todo and not d.scheduler.has_work and not d.flights:
            break
        d.step(token=lambda req: rng.randrange(3))
    else:
        raise AssertionError("not done after 4000 passes")
    assert all(r.state == "finished" for r in reqs)
    assert all(len(r.output_ids) == r.max_new for r in reqs if r.rid not in aborted)
    assert d.slots.available + d.tree.evictable == d.slots.capacity and d.tree.protected == 0 and (cache or d.tree.total == 0)


def test_the_queue_keeps_the_order_of_arrival_when_requests_come_back():
    """Against a sorted list: who is taken out from anywhere and comes back stands where it stood."""
    rng, queue, there = random.Random(0), Queue(), []
    away = [types.SimpleNamespace(arrival=arrival, before=None, after=None) for arrival in range(60)]
    for _ in range(600):
        if there and rng.random() < 0.5:
            one = there.pop(rng.randrange(len(there)))
            queue.remove(one)
            away.append(one)
        elif away:
            one = away.pop(rng.randrange(len(away)))
            queue.add(one)
            there.append(one)
        there.sort(key=lambda one: one.arrival)
        assert list(queue) == there and len(queue) == len(there) and (not there or queue.first is there[0])
    taken = []
    for one in queue:  # as a policy does
        queue.remove(one)
        taken.append(one)
    assert taken == there and not queue


@pytest.mark.parametrize("page", [1, 4])
def test_guesses_come_with_the_last_chunk_of_a_prompt(page):
    """As many as there are tokens asked for behind them, budget and memory."""
    def first(n, forced, max_tokens=50, **fields):
        d = Driver(page=page, **fields)
        made = d.scheduler.add(Request(rid="a", prompt_ids=ids(n), params=SamplingParams(max_tokens=max_tokens)), forced=forced)
        counts = []
        while made.rid in d.scheduler.reqs and len(counts) < 9 and not made.output_ids:
            batch = d.step(ends=lambda req: True)
            counts.append(int(batch.draft_lens[0]))
            assert batch.num_tokens <= d.scheduler.token_budget and (not counts[-1] or batch.limits[0] >= n + counts[-1])
        assert made.forced == 0
        return counts
    assert first(10, 6) == [6] and first(10, 6, max_tokens=3) == [2] and first(10, 6, max_tokens=1) == [0]
    assert first(10, 6, budget=12) == [2] and first(12, 6, budget=8) == [0, 4] and first(8, 6, budget=8) == [0]
    assert first(9, 6, budget=8, cache=False) == [0, 0], "a row that decodes guesses what it is told to"
    d = Driver(page=page, pool=44)
    d.scheduler.ratio = 0.0
    d.add(ids(20), max_tokens=12)
    late = d.scheduler.add(Request(rid="b", prompt_ids=ids(13, 500), params=SamplingParams(max_tokens=12)), forced=11)
    assert d.step().draft_lens.tolist() == [0, 0] and late.retractions == 0, "nobody makes room for guesses"
