"""holds.py: a prefix stays until its children have come, is released, late, or in the way. A scheduler without a model, and engines."""

import random

import numpy as np
import pytest

import engines
from driver import Driver
from engines import params, prompt, request, run, same, workload
from nano_sgl.holds import HOLD_S, Holds
from nano_sgl.policies import POLICIES
from nano_sgl.protocol import RequestError, SamplingParams
from nano_sgl.radix import Tree

PREFIX = range(100)


def hold(d, children=2, ids=PREFIX, **fields):
    """A hold that has landed."""
    req = d.add(ids, max_tokens=0, children=children, rid="hold", **fields)
    while req.state != "finished":
        d.step()
    return req


def child(d, last, parent="hold", **fields):
    return d.add([*PREFIX, last, last], parent=parent, **fields)


def cached(d, ids=PREFIX) -> int:
    return d.tree.match(np.array(list(ids), np.int32)).length


# ----------------------------------------------------------------------------------------------------------------- the life of a hold

@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("page, kept", [(1, 100), (16, 96)])
def test_a_prefix_stays_locked_until_the_last_child_has_started(page, kept, depth):
    d = Driver(page=page, pool=960, budget=48, depth=depth)
    hold(d, children=3)
    assert (len(d.scheduler.holds), d.scheduler.holds.tokens, d.tree.protected) == (1, kept, kept)
    assert len(d.tree.evict(10_000)) == 0, "nothing of it may go"
    for left, last in ((2, 201), (1, 202), (0, 203)):
        child(d, last)
        d.run()
        assert len(d.scheduler.holds) == (left > 0) and d.tree.protected == (kept if left else 0)
    assert cached(d) == kept, "it stays in the tree, as long as there is room"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page, kept", [(1, 100), (16, 96)])
@pytest.mark.parametrize("together", [True, False])
def test_each_distinct_token_is_computed_once(page, kept, depth, together):
    """The hold, and children that come with it or after it, all in one pass: so they copy the page that is begun alike from each other."""
    d = Driver(page=page, pool=3200, budget=256, depth=depth, max_running=16)
    if together:
        d.add(PREFIX, max_tokens=0, children=8, rid="hold")
    else:
        hold(d, children=8)
    for last in range(201, 209):
        child(d, last, max_tokens=1)
    d.run()
    assert d.scheduler.counters.computed_tokens == 100 + 8 * 2 and not len(d.scheduler.holds) and cached(d) == kept


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_children_that_are_there_before_the_hold_has_landed_are_counted(depth):
    d = Driver(budget=32, depth=depth)
    req = d.add(PREFIX, max_tokens=0, children=2, rid="hold")
    d.step()
    first = child(d, 201)
    while req.state != "finished":
        d.step()
    assert first.state in ("waiting", "running") and len(d.scheduler.holds) == 1
    second = child(d, 202)
    d.run()
    assert len(d.scheduler.holds) == 0 and d.tree.protected == 0 and first.cached_tokens > 32 and second.cached_tokens == 100


def test_a_hold_whose_children_all_came_before_it_landed_keeps_nothing():
    d = Driver(budget=16)
    req = d.add(PREFIX, max_tokens=0, children=1, rid="hold")
    d.step()
    d.add([1000], parent="hold", max_tokens=9)  # what it asks, is its own affair
    while req.state != "finished":
        assert len(d.scheduler.holds) == 1
        d.step()
    assert len(d.scheduler.holds) == 0 and d.scheduler.running, "it started in the step that the hold landed with"
    d.run()
    assert d.tree.protected == 0 and cached(d) == 100


def test_a_child_counts_once_though_it_is_retracted_and_starts_again():
    d = Driver()
    hold(d, children=2)
    one = child(d, 201, max_tokens=20)
    d.step()
    for _ in range(3):
        d.scheduler._retract(one)
        d.step(), d.step()
    assert one.retractions == 3 and len(d.scheduler.holds) == 1
    d.run()
    assert len(d.scheduler.holds) == 1
    child(d, 202)
    d.step()
    assert len(d.scheduler.holds) == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_child_that_ends_before_it_started_is_not_waited_for(waits):
    d = Driver(max_running=1)
    hold(d, children=1)
    if waits:
        d.add(range(500, 520), max_tokens=50)
        d.step()
    one = child(d, 201)
    d.scheduler.abort(one.rid)
    d.scheduler.check()
    assert len(d.scheduler.holds) == 0 and d.tree.protected == (d.scheduler.running[0].node.end if waits else 0)


def test_a_child_of_nobody_is_a_request_and_a_child_in_another_namespace_counts():
    d = Driver()
    hold(d, children=1)
    one = child(d, 201, parent="somebody")
    d.run()
    assert len(one.output_ids) == 4 and len(d.scheduler.holds) == 1
    child(d, 202, namespace="salt")
    d.run()
    assert len(d.scheduler.holds) == 0


def test_without_a_cache_and_for_less_than_a_page_nothing_is_kept():
    for fields, ids in ((dict(cache=False), PREFIX), (dict(page=16, pool=640), range(15))):
        d = Driver(**fields)
        req = hold(d, ids=ids)
        assert len(d.scheduler.holds) == 0 and d.tree.protected == 0 and req.computed_len == 0
        one = child(d, 201)
        d.run()
        assert len(one.output_ids) == 4


# ----------------------------------------------------------------------------------------------------------------- its ends

@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_ends_a_hold_in_every_state(depth):
    for after in range(8):
        d = Driver(budget=32, depth=depth, max_running=2)
        req = d.add(PREFIX, max_tokens=0, children=2, rid="hold")
        for _ in range(after):
            d.step()
        was = req.state
        assert (d.scheduler.abort("hold") is None) == (was == "finished")
        d.scheduler.check()
        assert len(d.scheduler.holds) == 0 and d.scheduler.abort("hold") is None
        one = child(d, 201)
        d.run()
        assert len(one.output_ids) == 4 and d.tree.protected == 0


def test_a_hold_ends_when_its_time_is_up():
    d = Driver()
    d.now = 5.0
    hold(d)
    other = d.add(range(500, 520), max_tokens=50)
    d.now = 5.0 + HOLD_S - 1
    d.step()
    assert len(d.scheduler.holds) == 1
    d.now = 5.0 + HOLD_S
    d.step()
    assert len(d.scheduler.holds) == 0 and other.state == "running" and d.tree.protected == other.node.end
    d.run()


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_admission_drops_the_oldest_holds_before_anybody_waits(page, depth):
    d = Driver(page=page, pool=320, depth=depth, budget=512)
    for n in range(3):
        req = d.add(range(1000 * n, 1000 * n + 64), max_tokens=0, children=1, rid=f"h{n}")
        d.run()
    running = d.add(range(5000, 5032), max_tokens=20)
    d.step()
    late = d.add(range(6000, 6096), max_tokens=4)
    d.step()
    assert late.state == "running" and running.retractions == 0
    assert req.rid in d.scheduler.holds._kept and "h0" not in d.scheduler.holds._kept, "the oldest goes first, and no more than must"
    d.run()
    assert d.scheduler.counters.retractions == 0


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_holds_go_before_anybody_is_retracted(page, depth):
    """The guess at how long outputs get is far too low: rows that decode run out of memory."""
    d = Driver(page=page, pool=256, depth=depth, max_running=4)
    hold(d, ids=range(96))
    d.scheduler.ratio = 0.0
    reqs = [d.add(range(1000 * n, 1000 * n + 8), max_tokens=60) for n in range(1, 4)]
    while len(d.scheduler.holds):
        d.step()
    assert d.scheduler.counters.retractions == 0 and d.slots.available + d.tree.evictable < 128
    d.run()
    assert all(len(r.output_ids) == 60 for r in reqs) and d.scheduler.counters.retractions == 0


@pytest.mark.parametrize("page", [1, 16])
def test_a_pool_full_of_holds_refuses_and_stops_nobody(page):
    d = Driver(page=page, pool=480, context=480)
    for n in range(4):
        d.add(range(1000 * n, 1000 * n + 112), max_tokens=0, children=5, rid=f"h{n}")
        d.run()
    assert d.scheduler.holds.tokens == 448
    one = d.add(range(7000, 7400), max_tokens=60)
    d.run()
    assert len(one.output_ids) == 60 and len(d.scheduler.holds) == 0


def test_an_id_that_is_used_again_means_the_new_request():
    d = Driver()
    hold(d, children=1)
    d.add(range(500, 530), max_tokens=0, children=1, rid="hold")
    d.run()
    assert d.scheduler.holds.tokens == 30 and d.tree.protected == 30
    d.add(range(900, 930), max_tokens=1, rid="hold")
    d.run()
    assert len(d.scheduler.holds) == 0 and d.tree.protected == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_failed_step_loses_no_hold(depth):
    """One that has landed is not touched; one whose step failed runs again, and is kept then."""
    d = Driver(depth=depth, budget=64)
    hold(d, children=2)
    more = d.add([*PREFIX, *range(500, 580)], max_tokens=0, children=1, rid="more", parent="hold")
    d.launch()
    d.launch()
    assert d.scheduler.fail(d.flights) == []
    d.flights.clear()
    d.scheduler.check()
    assert more.state == "waiting" and len(d.scheduler.holds) == 2 and cached(d) == 100
    d.run()
    assert d.scheduler.holds.tokens == 180, "counted once, though two hold some of it"
    for parent in ("hold", "more"):
        child(d, 201, parent=parent)
        d.run()
    assert len(d.scheduler.holds) == 0 and d.tree.protected == 0


def test_a_hold_that_fails_alone_is_over():
    d = Driver()
    d.add(PREFIX, max_tokens=0, children=2, rid="hold")
    for _ in range(2):
        while not d.flights:
            d.launch()
        ended = d.scheduler.fail(d.flights)
        d.flights.clear()
        d.scheduler.check()
    assert [r.rid for r in ended] == ["hold"] and len(d.scheduler.holds) == 0 and d.tree.total == 0


def test_books_that_are_wrong_are_found_out():
    d = Driver()
    hold(d)
    node = d.scheduler.holds._kept["hold"].node
    d.tree.lock(node)
    with pytest.raises(AssertionError, match="not by those who run or by holds"):
        d.scheduler.check()
    d.tree.unlock(node)
    d.scheduler.check()
    d.tree.unlock(node)
    with pytest.raises(AssertionError, match="keeps what is not locked"):
        d.scheduler.check()


def test_what_is_refused():
    for fields, message in ((dict(children=-1), "children must be an integer in .0, .*got -1"), (dict(children="2"), "children must be an integer"),
                            (dict(children=2, params=SamplingParams(max_tokens=3)), "children must be 0 where the request makes tokens"),
                            (dict(parent=5), "parent must be a string")):
        with pytest.raises(RequestError, match=message):
            request("r", [1, 2], **({"params": SamplingParams(max_tokens=0)} | fields)).verify(100, 100)
    request("r", [1, 2], SamplingParams(max_tokens=0), children=3, parent="other").verify(100, 100)


# ----------------------------------------------------------------------------------------------------------------- everything at once

def test_holds_against_a_model():
    """Any order of what can happen to holds: which of them there are, and which are kept."""
    for seed in range(40):
        rng, now, tree, next_slot = random.Random(seed), 0.0, Tree(), 1
        holds, open_, kept, made = Holds(tree, lambda: now), {}, {}, []
        for n in range(150):
            what = rng.choice(["open", "open", "land", "arrive", "arrive", "drop", "oldest", "time"])
            name = rng.choice([f"h{rng.randrange(max(n, 1))}", *open_, *kept])
            if what == "open":
                open_[f"h{n}"] = rng.randrange(1, 4)
                made.append((f"h{n}", holds.open(f"h{n}", open_[f"h{n}"])))
            elif what == "land" and made:
                name, one = made.pop(rng.randrange(len(made)))
                node = tree.lock(tree.insert([next_slot, next_slot + 1], [next_slot, next_slot + 1]).node)
                next_slot += 2
                holds.land(one, node)
                if name in open_:
                    kept[name] = [open_.pop(name), now + HOLD_S]
            elif what == "arrive":
                holds.arrive(name)
                if name in open_:
                    open_[name] -= 1
                elif name in kept:                  # its time begins anew, and it is the youngest
                    kept[name] = [kept.pop(name)[0] - 1, now + HOLD_S]
            elif what == "drop":
                assert holds.drop(name) == (name in open_ or name in kept)
                open_.pop(name, None), kept.pop(name, None)
            elif what == "oldest":
                assert holds.drop_oldest() == bool(kept)
                kept = dict(list(kept.items())[1:])
            elif what == "time":
                now += rng.randrange(60)
                late = [name for name, (_, until) in kept.items() if until <= now]
                assert holds.expire() == bool(late)
                kept = {name: one for name, one in kept.items() if name not in late}
            open_ = {name: left for name, left in open_.items() if left}
            kept = {name: one for name, one in kept.items() if one[0]}
            holds.check()
            tree.check()
            assert {name: one.children for name, one in holds._open.items()} == open_
            assert {name: one.children for name, one in holds._kept.items()} == {name: left for name, (left, _) in kept.items()}
            assert holds.tokens == tree.protected == 2 * len(kept) and len(holds) == len(open_) + len(kept)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 20))])
def test_random_programs_end_and_leak_nothing(seed):
    """Forks whose children come soon, late or never, in a pool that is short, with aborts, releases, failed steps and time; audited after each
    step."""
    rng = random.Random(seed)
    page, depth, name = (1, 16)[seed % 2], rng.choice([0, 1, 2]), sorted(set(POLICIES))[seed % len(POLICIES)]
    d = Driver(pool=rng.choice([432, 640, 1600]), page=page, budget=rng.choice([32, 64, 512]), max_running=rng.choice([3, 12]), policy=name,
               depth=depth, seed=seed)
    d.scheduler.ratio = 0.1
    reqs, aborted, parents, todo = [], set(), {}, 60
    for _ in range(5000):
        while todo and rng.random() < 0.4:
            todo -= 1
            parent = rng.choice([*parents, "", "nobody"])
            ids = [*parents.get(parent, []), *(rng.randrange(3) for _ in range(rng.randrange(1, 70)))][:200]
            fields = dict(parent=parent, priority=rng.choice([0, 0, 30]))
            if rng.random() < 0.3:
                reqs.append(d.add(ids, 0, children=rng.randrange(1, 5), **fields))
                parents[reqs[-1].rid] = ids
            else:
                reqs.append(d.add(ids, rng.choice([0, 1, 5, 40, 150]), **fields))
        d.now += rng.choice([0, 0, 0, 1, 30])
        if rng.random() < 0.05 and d.scheduler.reqs:
            aborted.add(rid := rng.choice([*d.scheduler.reqs, *parents]))
            d.scheduler.abort(rid)
        if rng.random() < 0.01 and d.flights:
            aborted.update(r.rid for r in d.scheduler.fail(d.flights))
            d.flights.clear()
        if not todo and not d.scheduler.has_work and not d.flights:
            break
        d.step(token=lambda req: rng.randrange(3))
    else:
        raise AssertionError("not done after 5000 passes")
    assert all(r.state == "finished" for r in reqs)
    assert all(len(r.output_ids) == r.max_new for r in reqs if r.rid not in aborted)
    assert d.tree.protected == d.scheduler.holds.tokens and all(hold.node is not None for hold in d.scheduler.holds._kept.values())
    assert not d.scheduler.holds._open
    d.scheduler.holds.clear()
    d.scheduler.check()
    assert d.slots.available + d.tree.evictable == d.slots.capacity and d.tree.protected == 0


# ----------------------------------------------------------------------------------------------------------------- engines

@pytest.mark.parametrize("flags", [dict(), dict(page_size=16, chunked_prefill_size=48), dict(max_total_tokens=260, max_running_requests=12),
                                   dict(max_total_tokens=288, page_size=16, chunked_prefill_size=64), dict(disable_radix_cache=True)], ids=str)
@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_those_without_holds(path, reference, flags, depth):
    """A hold of every beginning that a workload has, whose children are the workload's requests, and some that never come."""
    for seed in (1, 2):
        requests, rng = workload(seed), random.Random(seed)
        engine = engines.make(path, **flags)
        engine.depth, engine.scheduler.ratio = depth, 0.1
        holds = [request(f"hold{n}", r.prompt_ids[:rng.randrange(1, len(r.prompt_ids) + 1)], params(max_tokens=0), children=rng.randrange(1, 5))
                 for n, r in enumerate(rng.sample(requests, 8))]
        for r in requests:
            r.parent = rng.choice(["", *(h.rid for h in holds)])
        asked = requests + holds
        rng.shuffle(asked)
        start, later, answers = asked[:6], asked[6:], {}

        def each_step(n):
            for r in later[:3] if engine.has_work else later:
                engine.add(later.pop(0))
            if n == 20:
                engine.abort("hold0")
            if not later and not engine.has_work:
                engine.scheduler.holds.clear()
        answers = run(engine, start, each_step)
        for r in requests:
            same(answers[r.rid], reference(r))
        engine.shutdown()


def test_an_engine_knows_its_holds(path):
    """stats, flush_cache, abort of one that has ended."""
    engine = engines.make(path)
    drain = lambda: [engine.step() for _ in iter(lambda: engine.has_work, False)]
    for n in range(2):
        engine.add(request(f"h{n}", prompt(40 + n, n), params(max_tokens=0), children=2))
    assert engine.stats()["holds"] == 2 and engine.stats()["held_tokens"] == 0
    drain()
    engine.check()
    assert (engine.stats()["holds"], engine.stats()["held_tokens"], engine.stats()["kv_locked"]) == (2, 81, 81)
    assert engine.abort("h0") and not engine.abort("h0") and engine.stats()["held_tokens"] == 41
    assert engine.flush_cache() and engine.stats()["kv_free"] == engine.stats()["kv_capacity"] and engine.stats()["holds"] == 0
    engine.check()
    engine.add(request("child", prompt(50, 1), params(max_tokens=3), parent="h1"))
    drain()
    engine.check()
    engine.shutdown()


@pytest.mark.parametrize("page", [1, 16])
def test_a_hold_and_its_children_compute_each_distinct_token_once(path, page):
    engine = engines.make(path, page_size=page)
    prefix = prompt(90, 7)
    forks = [request(f"c{n}", [*prefix, n, *prompt(9, n)], params(max_tokens=1), parent="hold") for n in range(6)]

    def each_step(n):
        if n == 3:
            for r in forks:
                engine.add(r)
    run(engine, [request("hold", prefix, params(max_tokens=0), children=6), request("other", prompt(5, 99), params(max_tokens=8))], each_step)
    assert engine.scheduler.counters.computed_tokens == 90 + 6 * 10 + 5 + 7
    engine.shutdown()
