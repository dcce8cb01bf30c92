"""The overlap loop: the answers of the plain engine, on a device whose rows nobody else may touch and whose tokens come late; steps that fail,
requests that leave in every state, the end of an engine."""

import gc
import random
import threading
import time
import weakref

import pytest

import engines
from covering import pairs_of
from engines import MIX, STOPS, overlapped, params, prompt, request, run, same, workload
from nano_sgl import LLM
from nano_sgl.engine import Worker

DEVICES = [("thread", 1), ("late", 1), ("late", 2)]
FLAGS = [dict(), dict(max_total_tokens=260, max_running_requests=8, chunked_prefill_size=48), dict(page_size=16, chunked_prefill_size=32),
         dict(max_total_tokens=288, page_size=16, max_running_requests=6, chunked_prefill_size=64, schedule_policy="lpm"),
         dict(disable_radix_cache=True, chunked_prefill_size=40, max_total_tokens=400)]


def workers() -> list[threading.Thread]:
    gc.collect()
    return [t for t in threading.enumerate() if t.name == "nano_sgl worker"]


# ----------------------------------------------------------------------------------------------------------------- the same answers

@pytest.mark.parametrize("device, depth", DEVICES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_nothing_turns_it_off_and_nothing_changes(path, reference, flags, device, depth):
    """Penalties, seeds, logprobs, stops, chunks, retraction: the plain engine's answers, with the device's rows behind a fence and the
    books proved after every step."""
    requests = workload(21, 30, MIX * 2 + STOPS, lengths=(1, 20, 70))
    engine = overlapped(path, device, depth, **flags)
    engine.scheduler.ratio = 0.1
    answers = run(engine, requests)
    for r in requests:
        same(answers[r.rid], reference(r))
    assert flags.get("max_total_tokens", 1000) > 300 or engine.scheduler.counters.retractions
    engine.shutdown()


@pytest.mark.parametrize("device, depth", DEVICES)
def test_samples_of_a_prompt_and_requests_that_do_not_stream(path, reference, device, depth):
    ids = prompt(40, 3)
    requests = [request(f"n{i}", ids, params(temperature=1, seed=5, n=4, logprobs=1), index=i, stream=i % 2 == 0) for i in range(4)]
    answers = run(overlapped(path, device, depth), requests)
    for r in requests:
        same(answers[r.rid], reference(r))
        assert r.stream or len(answers[r.rid].pieces) == 1


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 12))])
def test_a_random_machine(path, reference, seed):
    """Requests come, are aborted and lose steps at random, on a random device: who finishes has the plain answer, who was aborted a part of
    it, everyone exactly one end, and the books hold after every step."""
    rng = random.Random(seed)
    device, depth = rng.choice(DEVICES)
    engine = overlapped(path, device, depth, **FLAGS[seed % len(FLAGS)])
    engine.scheduler.ratio = 0.1
    later, aborted, forward = workload(seed, 30, MIX + STOPS), set(), engine.model.forward
    requests, failing = list(later), []

    def flaky(batch, kv):
        if failing:
            raise RuntimeError(failing.pop())
        return forward(batch, kv)
    engine.model.forward = flaky

    def each_step(n):
        for _ in range(min(rng.randrange(3) + (not engine.has_work), len(later))):
            engine.add(later.pop(0))
        if rng.random() < 0.1 and engine.streams:
            aborted.add(rid := rng.choice(sorted(engine.streams)))
            assert engine.abort(rid) and not engine.abort(rid)
        if n in (7, 25, 26):
            failing[:] = ["lost"]

    answers = run(engine, [], each_step)
    assert not later and len(answers) == 30
    for r in requests:
        got, expected = answers[r.rid], reference(r)
        if r.rid in aborted:
            assert got.reason == "abort" and expected.ids[:len(got.ids)] == got.ids and expected.text.startswith(got.text.rstrip("\ufffd"))
        elif got.reason == "error":  # it was alone in a step twice
            assert "lost" in got.error
        else:
            same(got, expected)
    engine.shutdown()


def test_the_fence_sees_a_host_that_looks(path):
    """The tests above rest on it."""
    for look in (lambda e: int(e.rows.length[1]), lambda e: e.rows.tokens.zero_(), lambda e: e.rows.table[1].tolist(), lambda e: e.kv.k[0].sum()):
        engine = overlapped(path)
        engine.add(request("a", prompt(20, 1), params()))
        engine.step()
        with pytest.raises(AssertionError, match="outside the order"):
            look(engine)


def test_a_zeroed_slot_and_a_lost_write_are_seen(path, reference):
    """The comparison can fail: one shared slot without its KV, one step's row writes not made."""
    requests = [request(f"q{i}", [*prompt(40, 100), i], params()) for i in range(4)]

    def spoiled(spoil):
        engine = overlapped(path, "late")
        seen = run(engine, requests[:1])
        spoil(engine)
        try:
            seen |= run(engine, requests[1:])
        except AssertionError:
            return True
        return any(seen[r.rid].ids != reference(r).ids for r in requests)

    def zero(engine):
        engine.kv.k[0].as_subclass(engines.torch.Tensor)[1:30] = 0

    def lose(engine):
        put, lost = engine.rows.put, []
        engine.rows.put = lambda *writes: put(*writes) if lost else lost.append(1)
    assert not spoiled(lambda engine: None) and spoiled(zero) and spoiled(lose)


# ----------------------------------------------------------------------------------------------------------------- what a step costs

def steps(engine, requests):
    answers = run(engine, requests)
    return engine.scheduler.counters, answers


@pytest.mark.parametrize("device, depth", DEVICES)
def test_an_end_by_length_costs_no_step_and_a_stop_costs_those_in_flight(path, reference, device, depth):
    ids = prompt(20, 1)
    counters, _ = steps(overlapped(path, device, depth), [request("a", ids, params(max_tokens=9)), request("b", ids, params(max_tokens=0))])
    assert (counters.steps, counters.output_tokens, counters.computed_tokens) == (9, 9, 20 + 8 + 1)
    full = reference(request("a", ids, params())).ids
    stop = next(t for t in full[3:] if t not in full[:3])
    engine = overlapped(path, device, depth)
    counters, answers = steps(engine, [request("c", ids, params(ignore_eos=False, stop_token_ids=[stop]))])
    kept = full.index(stop) + 1
    assert answers["c"].ids == full[:kept] and counters.output_tokens == kept and counters.steps == kept + depth
    assert engine.scheduler.tree.total == 20 + kept, "the over-run token's KV was kept, or the last one's was not"


def test_tokens_come_depth_steps_late(path):
    for depth in (0, 1, 2):
        engine = overlapped(path, "late", depth)
        engine.add(request("a", prompt(20, 1), params(max_tokens=5)))
        pieces = [len(engine.step()) for _ in range(5 + depth)]
        assert pieces == [0] * depth + [1] * 5 and not engine.has_work


def test_the_host_plans_while_the_device_runs(path):
    """Step n+1 is planned and launched while step n is held on the device; its tokens come once it is let go."""
    engine, gate, planned = engines.make(path, disable_overlap_schedule=False), threading.Event(), []
    forward, next_batch = engine.model.forward, engine.scheduler.next_batch

    def held(batch, kv):
        assert gate.wait(20)
        return forward(batch, kv)
    engine.model.forward = held
    engine.scheduler.next_batch = lambda guesses: planned.append(next_batch(guesses)) or planned[-1]
    engine.add(request("a", prompt(20, 1), params(max_tokens=5)))
    assert engine.step() == [] and planned[0] is not None
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    chunks = engine.step()
    assert len(planned) == 2 and planned[1].q_lens.tolist() == [1] and len(chunks) == 1 and gate.is_set()
    timer.join()
    while engine.has_work:
        engine.step()
    engine.check()
    engine.shutdown()


# ----------------------------------------------------------------------------------------------------------------- steps that fail

@pytest.mark.parametrize("worker, at, where", pairs_of(DEVICES, [1, 2, 5], ["forward", "plan", "end"]))
def test_a_failed_step_is_taken_back_with_those_behind_it(path, reference, worker, at, where):
    """The first, the second, one in the middle; before, in and after the model. What stood behind it never ran."""
    requests = [request(f"q{i}", [*prompt(30, 1), i], params(max_tokens=12, **(dict(temperature=1, seed=i, presence_penalty=1) if i % 2 else {})))
                for i in range(4)]
    engine, calls = overlapped(path, *worker), []
    owner, name = {"forward": (engine.model, "forward"), "plan": (engine, "_plan"), "end": (engine.rows, "put")}[where]
    real = getattr(owner, name)

    def once(*args):
        calls.append(1)
        if where == "end" and len(calls) != at:
            return real(*args)
        if len(calls) == at:
            raise RuntimeError("lost")
        return real(*args)
    setattr(owner, name, once)
    answers = run(engine, requests, lambda n: None)
    for r in requests:
        same(answers[r.rid], reference(r))
    engine.shutdown()


@pytest.mark.parametrize("device, depth", DEVICES)
def test_who_always_fails_ends_alone_with_others_in_flight(path, reference, device, depth):
    engine = overlapped(path, device, depth, chunked_prefill_size=64)
    requests = [request(i, [*prompt(30, 1), i], params()) for i in range(3)] + [request("long", prompt(150, 8), params())]
    poison = request("poison", [*prompt(10, 2), 255, 254], params())
    forward, ran = engine.model.forward, []

    def flaky(batch, kv):
        ran.append(1)
        if ((batch.input_ids[:-1] == 255) & (batch.input_ids[1:] == 254)).any():
            raise RuntimeError("out of memory")
        return forward(batch, kv)
    engine.model.forward = flaky
    answers = run(engine, requests[:1], lambda n: [engine.add(r) for r in [*requests[1:], poison]] if n == 5 else None)
    assert answers["poison"].reason == "error" and "out of memory" in answers["poison"].error
    for r in requests:
        same(answers[r.rid], reference(r))
    more = request("more", prompt(20, 4), params())
    same(run(engine, [more])["more"], reference(more))
    engine.shutdown()


def test_what_is_behind_a_failed_step_does_not_run(path):
    engine, ran = overlapped(path, "late", 2), []

    def fails(batch, kv):
        ran.append(len(batch.input_ids))
        raise RuntimeError("lost")
    engine.model.forward = fails
    engine.add(request("a", prompt(20, 1), params()))
    engine.step(), engine.step()
    assert ran == [] and len(engine.flights) == 2
    engine.step()
    assert ran == [20] and not engine.flights
    engine.check()
    chunks = [chunk for _ in range(4) for chunk in engine.step()]
    assert [c.finish_reason for c in chunks] == ["error"] and ran == [20, 20] and not engine.has_work
    engine.check()


@pytest.mark.parametrize("device, depth", DEVICES)
def test_what_a_failed_step_had_allocated_is_free_before_the_next(path, reference, device, depth):
    """Or a step that ran out of memory would find as little when it is tried again."""
    engine, held = overlapped(path, device, depth), []
    forward = engine.model.forward

    def fails_once(batch, kv):
        if held:
            assert held[0]() is None, "the failed step's tensors are still there"
            return forward(batch, kv)
        activations = forward(batch, kv)
        held.append(weakref.ref(activations))
        raise RuntimeError("out of memory")
    engine.model.forward = fails_once
    gc.disable()
    try:
        r = request("a", prompt(20, 1), params())
        same(run(engine, [r])["a"], reference(r))
    finally:
        gc.enable()
    engine.shutdown()


def test_an_interrupt_leaves_the_books_right(path, reference):
    """Ctrl-C in a step of an engine that its user drives: it is raised where it was pressed, and the engine can go on."""
    for engine in (overlapped(path, "late", 1), engines.make(path)):
        forward, presses = engine.model.forward, [KeyboardInterrupt]

        def interrupted(batch, kv):
            if presses:
                raise presses.pop()
            return forward(batch, kv)
        engine.model.forward = interrupted
        r = request("a", prompt(20, 1), params())
        engine.add(r)
        with pytest.raises(KeyboardInterrupt):
            while True:
                engine.step()
        engine.check()
        ids = []
        while engine.has_work:
            ids += [token for chunk in engine.step() for token in chunk.output_ids]
        assert ids == reference(r).ids


@pytest.mark.parametrize("device, depth", [("late", 0), *DEVICES])
def test_nan_logits_end_their_request_alone(path, reference, device, depth):
    engine = overlapped(path, device, depth)
    logits = engine.model.logits

    def poisoned(hidden):
        out = logits(hidden)
        if len(out) == 2:
            out[0] = float("nan")
        return out
    engine.model.logits = poisoned
    requests = [request(i, prompt(20, i), params()) for i in range(2)]
    answers = run(engine, requests)
    ended = [a for a in answers.values() if a.reason == "error"]
    assert len(ended) == 1 and "finite" in ended[0].error
    assert [a.ids == reference(r).ids for r, a in zip(requests, answers.values())].count(True) == 1
    engine.model.logits = logits
    assert all(run(engine, [r])[r.rid].ids == reference(r).ids for r in requests), "KV of a spoiled request was kept"
    engine.shutdown()


# ----------------------------------------------------------------------------------------------------------------- requests in every state

@pytest.mark.parametrize("device, depth", [("late", 0), *DEVICES])
@pytest.mark.parametrize("stream", [True, False])
def test_abort_in_every_state_releases_once(path, reference, device, depth, stream):
    """Queued, between chunks, in flight, decoding, retracted, finished: after every number of steps. Everyone gets one end, the books hold,
    and the others' answers do not change."""
    doomed = request("doomed", prompt(100, 5), params(max_tokens=40, temperature=1, seed=1, frequency_penalty=1), stream=stream)
    others = [request(f"o{i}", prompt(30, i), params(max_tokens=40)) for i in range(3)]
    seen = set()
    for after in [0, 1, 2, 3, 4, *range(5, 75, 4 if stream else 15)]:
        engine = overlapped(path, device, depth, chunked_prefill_size=48, max_total_tokens=260, max_running_requests=4)
        engine.scheduler.ratio = 0.1
        result = []

        def each_step(n):
            if n == after:
                req = engine.scheduler.reqs.get("doomed")
                seen.add("finished" if req is None else ("retracted" if req.retractions else "queued") if req.state == "waiting" else
                         "leaving" if req.leaving else "chunks" if req.computed_len < req.prompt_len else "in flight" if req.in_flight else "idle")
                result.append(engine.abort("doomed"))
                assert not engine.abort("doomed") and not engine.abort("nobody")

        answers = run(engine, [*others, doomed], each_step)
        got, expected = answers["doomed"], reference(doomed)
        if not result:  # everyone has finished before
            each_step(after)
        if result[0]:
            assert got.reason == "abort" and got.ids == expected.ids[:len(got.ids)] and expected.text.startswith(got.text.rstrip("\ufffd"))
        else:
            same(got, expected)
        for r in others:
            same(answers[r.rid], reference(r))
        engine.shutdown()
    assert {"queued", "chunks", "retracted", "finished"} <= seen or not stream, seen
    assert depth == 0 or "in flight" in seen


def test_an_abort_before_the_last_chunk_is_taken_does_not_add_another(path):
    engine = overlapped(path)
    engine.add(request("a", prompt(10, 1), params()))
    engine.step(), engine.step()
    assert engine.abort("a") and not engine.abort("a") and engine.has_work
    chunks = []
    while engine.has_work:
        chunks += engine.step()
        engine.check()
    assert [c.finish_reason for c in chunks] == ["abort"]
    engine.add(request("a", prompt(10, 1), params(max_tokens=1)))  # the id is free, also while its last chunk was not taken
    engine.abort("a")
    engine.add(request("a", prompt(10, 1), params(max_tokens=1)))
    ends = []
    while engine.has_work:
        ends += [c.finish_reason for c in engine.step()]
        engine.check()
    assert ends == ["abort", "length"] and not engine.abort("a")


# ----------------------------------------------------------------------------------------------------------------- time-outs

@pytest.mark.parametrize("device, depth", [("late", 0), *DEVICES])
def test_who_waits_too_long_is_refused(path, reference, device, depth):
    engine, now = overlapped(path, device, depth, max_running_requests=1, waiting_timeout=5), [0.0]
    engine.scheduler.clock = lambda: now[0]

    def each_step(n):
        now[0] = n / 2
        if n == 4:
            engine.add(request("patient", prompt(20, 3), params()))
    answers = run(engine, [request("first", prompt(20, 1), params(max_tokens=12)), request("second", prompt(20, 2), params())], each_step)
    assert answers["first"].reason == answers["patient"].reason == "length", "a request that was started in time has no other limit"
    late = answers["second"]
    assert (late.reason, late.ids, late.text, late.status) == ("abort", [], "", 503)
    assert late.error == "the request waited to be started for more than 5 s, the server's waiting_timeout"
    same(answers["first"], reference(request("first", prompt(20, 1), params(max_tokens=12))))


@pytest.mark.parametrize("device, depth", [("late", 0), *DEVICES])
def test_who_runs_too_long_is_ended_with_what_it_has(path, reference, device, depth):
    engine, now = overlapped(path, device, depth, running_timeout=5), [0.0]
    engine.scheduler.clock = lambda: now[0]

    def each_step(n):
        now[0] = float(n)
        if n == 4:
            engine.add(request("short", prompt(20, 2), params(max_tokens=2)))
        if n == 3:
            engine.scheduler._retract(engine.scheduler.running[0])  # it goes on running by the clock
    long = request("long", prompt(20, 1), params())
    answers = run(engine, [long], each_step)
    got = answers["long"]
    assert (got.reason, got.status) == ("abort", 504) and "ran for more than 5 s" in got.error and "running_timeout" in got.error
    assert 0 < len(got.ids) < 24 and got.ids == reference(long).ids[:len(got.ids)]
    assert answers["short"].reason == "length"


@pytest.mark.parametrize("flags", [dict(waiting_timeout=0), dict(running_timeout=-1.0), dict(waiting_timeout="5"),
                                   dict(running_timeout=float("nan"))], ids=str)
def test_flags_that_make_no_sense_are_refused(path, flags):
    with pytest.raises(ValueError, match=next(iter(flags))):
        engines.make(path, **flags)


# ----------------------------------------------------------------------------------------------------------------- the worker, the end

def test_on_and_off(path):
    before = len(workers())
    assert not engines.EngineConfig(model=str(path)).disable_overlap_schedule
    for off, depth, threads in ((False, 1, 1), (True, 0, 0), (None, 0, 0)):  # a CPU chooses the plain loop
        engine = engines.make(path, disable_overlap_schedule=off, device="cpu")
        assert engine.depth == depth and len(workers()) == before + threads
        engine.shutdown()
    assert len(workers()) == before


def test_a_worker_runs_in_order_and_stops_behind_a_job_that_raises():
    for threaded in (True, False):
        worker, ran = Worker(threaded), []
        first = [worker.submit(lambda i=i: ran.append(i) or i) for i in range(5)]
        assert [f.result(5) for f in first] == ran == list(range(5))
        lost = [worker.submit(lambda: 1 / 0), worker.submit(lambda: ran.append("never"))]
        assert all(isinstance(f.exception(5), ZeroDivisionError) for f in lost) and len(ran) == 5
        worker.restart()
        assert worker.submit(lambda: 7).result(5) == 7
        worker.close()
        worker.restart()
        assert "shut down" in str(worker.submit(lambda: 7).exception(5))
        worker.close()


def test_an_engine_that_is_shut_down_or_dropped_takes_its_thread_along(path):
    before = len(workers())
    engine = engines.make(path, disable_overlap_schedule=False)
    engine.add(request("a", prompt(20, 1), params()))
    for _ in range(4):
        engine.step()
    assert engine.flights and len(workers()) == before + 1
    del engine
    deadline = time.monotonic() + 20
    while len(workers()) > before and time.monotonic() < deadline:  # the worker itself lets go of the engine, once the step in flight is done
        time.sleep(0.005)
    assert len(workers()) == before
    engine = engines.make(path, disable_overlap_schedule=False)
    for i in range(2):
        engine.add(request(i, prompt(20, i), params()))
    for _ in range(4):
        engine.step()
    engine.shutdown()
    engine.shutdown()
    ends = []
    while engine.has_work:  # what still runs gets an answer, should anybody ask
        ends += [c for c in engine.step() if c.finish_reason]
        engine.check()
    assert [c.finish_reason for c in ends] == ["error"] * 2 and all("shut down" in c.error for c in ends)
    assert len(workers()) == before


def test_shutdown_in_the_middle_hangs_nobody(path):
    before, results = len(workers()), []

    def ask(llm, i):
        try:
            results.append(llm.generate(prompt(20, i), params(max_tokens=400)).finish_reason)
        except RuntimeError as error:
            results.append(str(error))
    llm = LLM(str(path), max_total_tokens=2048, disable_overlap_schedule=False)
    threads = [threading.Thread(target=ask, args=(llm, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while llm.engine.scheduler.counters.steps < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    llm.shutdown()
    for thread in threads:
        thread.join(20)
    assert len(results) == 4 and all("engine has ended" in r or r == "length" for r in results)
    assert len(workers()) == before
    with pytest.raises(RuntimeError, match="ended"):
        llm.generate("a", params())


def test_llm_gives_the_same_with_overlap(path):
    asked = [prompt(20 + i, i) for i in range(6)]
    with LLM(str(path), max_total_tokens=2048, disable_overlap_schedule=False) as on, LLM(str(path), max_total_tokens=2048, disable_overlap_schedule=True) as off:
        assert [o.output_ids for o in on.generate(asked, params())] == [o.output_ids for o in off.generate(asked, params())]
        pieces = list(on.stream(asked[0], params()))
        assert [t for p in pieces for t in p.output_ids] == off.generate(asked[0], params()).output_ids and pieces[-1].finish_reason == "length"
