"""engine.py: equivalence with the plain engine, logprobs, limits, failures. On tiny random checkpoints."""

import random

import pytest
import torch

import engines
from engines import close, params, plain, prompt, request, run, same, workload
from nano_sgl.engine import EngineConfig
from nano_sgl.protocol import RequestError, SamplingParams


# ----------------------------------------------------------------------------------------------------------------- equivalence

@pytest.mark.parametrize("flags", [
    dict(),
    dict(page_size=16),
    dict(chunked_prefill_size=24, page_size=4),
    dict(chunked_prefill_size=16, max_running_requests=5, schedule_policy="lpm"),
    dict(max_total_tokens=260, max_running_requests=12, schedule_policy="lof"),
    dict(max_total_tokens=288, page_size=16, chunked_prefill_size=64, radix_eviction_policy="lfu"),
    dict(disable_radix_cache=True, chunked_prefill_size=50, schedule_policy="random"),
], ids=str)
def test_any_engine_gives_the_answers_of_the_plain_one(path, reference, flags):
    """The same requests, whatever shares their batch, cache, chunks and pool: the same tokens, texts, reasons and logprobs."""
    for seed in (1, 2):
        requests = workload(seed)
        engine = engines.make(path, **flags)
        engine.scheduler.ratio = 0.1
        answers = run(engine, requests)
        for r in requests:
            same(answers[r.rid], reference(r))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("flags", [dict(), dict(max_total_tokens=288, page_size=16, chunked_prefill_size=64)], ids=str)
def test_steps_may_be_launched_before_the_last_ones_tokens_are_known(path, reference, flags, depth):
    """Nothing but `depth` decides how late the host learns the tokens: the answers are the same, the over-run token is dropped."""
    requests = workload(6)
    engine = engines.make(path, **flags)
    engine.depth, engine.scheduler.ratio = depth, 0.1
    answers = run(engine, requests)
    assert all((answers[r.rid].ids, answers[r.rid].text) == (reference(r).ids, reference(r).text) for r in requests)


def parting(seed: int, n: int) -> list:
    """Requests that part from each other at random places, most inside a page, each with `n` samples; some ask for prompt logprobs."""
    rng, known, requests = random.Random(seed), [prompt(59, seed)], []
    for i in range(14):
        stem = rng.choice(known)
        known.append([*stem[:rng.randrange(len(stem) + 1)], *prompt(rng.randrange(1, 30), rng.randrange(9))])
        mix = rng.choice([dict(), dict(temperature=1, seed=i), dict(prompt_logprobs=0, logprob_start_len=rng.randrange(len(known[-1])))])
        p = params(max_tokens=rng.choice([1, 8, 20]), n=n, **mix)
        requests += [request(f"{i}.{k}", known[-1], p, index=k) for k in range(n)]
    return requests


@pytest.mark.parametrize("device", [None, "thread", "late"])
@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=pytest.mark.long)])
def test_what_is_copied_of_a_page_gives_the_answers_of_the_plain_engine(path, reference, seeds, page, device):
    """Arrivals over the run, forks of requests that are running, aborts, chunks, a pool that is short."""
    for seed in range(seeds):
        rng, flags = random.Random(seed), dict(page_size=page, max_total_tokens=(352, 2048)[seed % 2], max_running_requests=7, chunked_prefill_size=48)
        engine = engines.overlapped(path, device, **flags) if device else engines.make(path, **flags)
        engine.scheduler.ratio = 0.1
        requests, aborted = parting(seed, n=4), set()
        later = list(requests)

        def each_step(n):
            for _ in range(min(rng.randrange(5) or not engine.has_work, len(later))):
                engine.add(later.pop(0))
            if rng.random() < 0.1 and engine.streams:
                aborted.add(rid := rng.choice(sorted(engine.streams)))
                engine.abort(rid)
            running = [r for r in engine.scheduler.running if r.output_ids and not r.leaving]
            if n % 5 == 0 and n < 200 and running:
                requests.append(request(f"fork {n}", [*rng.choice(running).ids().tolist(), *prompt(n % 2, n)], params(max_tokens=9)))
                engine.add(requests[-1])

        answers = run(engine, [], each_step)
        assert engine.scheduler.counters.copied_tokens > 20 and len(answers) == len(requests)
        for r in requests:
            if r.rid in aborted:
                assert reference(r).ids[:len(answers[r.rid].ids)] == answers[r.rid].ids
            else:
                same(answers[r.rid], reference(r))


def test_a_copy_of_the_wrong_kv_is_seen(path, reference):
    """What the test above is worth."""
    for copy in (lambda source, target: None, lambda source, target: right(source.flip(0), target)):
        engine = engines.make(path, page_size=16)
        right, engine.kv.copy = engine.kv.copy, copy
        requests = parting(1, n=4)
        answers = run(engine, requests)
        assert sum(answers[r.rid].ids != reference(r).ids for r in requests) > 3


def test_a_request_id_may_come_back_with_other_parameters(path, reference):
    engine, ids = engines.make(path), prompt(20, 1)
    for p in (params(), params(temperature=1.5, seed=3, logprobs=2), params(top_k=5, temperature=1, seed=4)):
        answer = run(engine, [request("same", ids, p)])["same"]
        expected = reference(request("same", ids, p))
        assert answer.ids == expected.ids and len(answer.logprobs) == len(expected.logprobs)


def test_a_fault_in_one_text_ends_that_request_alone(path, reference):
    engine = engines.make(path)
    requests = [request(i, prompt(20, i), params()) for i in range(3)]
    for r in requests:
        engine.add(r)
    engine.streams["1"].text.push = lambda token: 1 / 0
    answers = {r.rid: engines.Answer() for r in requests}
    while engine.has_work:
        for chunk in engine.step():
            answers[chunk.rid].take(chunk)
        engine.check()
    assert answers["1"].reason == "error" and [answers[i].ids == reference(r).ids for i, r in zip("02", requests[::2])] == [True, True]


def test_late_requests_abort_and_small_pools(path, reference):
    """Requests arrive while others run, some are aborted: those that finish have the plain engine's answer, nothing leaks."""
    for seed, flags in ((3, dict(max_total_tokens=260)), (4, dict(max_total_tokens=320, page_size=16)), (5, dict(chunked_prefill_size=32))):
        rng, requests = random.Random(seed), workload(seed, 40)
        engine = engines.make(path, max_running_requests=6, **flags)
        engine.scheduler.ratio = 0.1
        later, aborted = requests[10:], set()

        def each_step(n):
            for _ in range(min(rng.randrange(3), len(later))):
                engine.add(later.pop(0))
            if rng.random() < 0.08 and engine.streams:
                aborted.add(rid := rng.choice(sorted(engine.streams)))
                assert engine.abort(rid)

        answers = run(engine, requests[:10], each_step)
        assert len(answers) == 40
        for r in requests:
            if r.rid in aborted:
                assert answers[r.rid].reason == "abort"
                assert reference(r).ids[:len(answers[r.rid].ids)] == answers[r.rid].ids
            else:
                assert answers[r.rid].ids == reference(r).ids


def test_one_chunk_for_who_does_not_stream(path, reference):
    r = request("a", prompt(20, 1), params(logprobs=1), stream=False)
    engine = engines.make(path)
    answer = run(engine, [r])["a"]
    assert len(answer.pieces) == 1 and answer.ids == reference(r).ids and len(answer.logprobs) == 24


def test_n_samples_share_the_prompt_and_differ(path):
    engine = engines.make(path)
    ids = prompt(50, 1)
    answers = run(engine, [request(i, ids, params(temperature=1, seed=11, n=3), index=i) for i in range(3)])
    assert len({tuple(a.ids) for a in answers.values()}) == 3
    assert [answers[str(i)].cached for i in range(3)] == [0, 49, 49]
    alone = run(engines.make(path), [request("x", ids, params(temperature=1, seed=11, n=3), index=2)])["x"]
    assert alone.ids == answers["2"].ids


def test_seeds_differ_where_none_is_given_and_follow_the_engines_seed(path):
    texts = [[a.ids for a in run(engines.make(path, random_seed=seed), [request(i, [5, 6], params(temperature=1)) for i in range(2)]).values()]
             for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]


def test_the_prompt_is_in_the_tree_with_its_answer(path):
    """F007, F009: the next turn hits prompt and answer; another namespace hits nothing."""
    for page, expected in ((1, 149), (16, 144)):
        engine = engines.make(path, page_size=page)
        first = prompt(100, 1)
        answer = run(engine, [request("a", first, params(max_tokens=50))])["a"]
        turn = [*first, *answer.ids, *prompt(50, 2)]
        second = run(engine, [request("b", turn, params())])["b"]
        assert second.cached == expected
        assert second.ids == run(plain(path), [request("b", turn, params())])["b"].ids
        salted = [run(engine, [request("s", turn, params(), namespace=salt)])["s"] for salt in ("x", "y", "x")]
        assert [a.cached for a in salted] == [0, 0, (len(turn) - 1) // page * page] and all(a.ids == second.ids for a in salted)


def test_a_request_whose_prefix_turns_up_in_the_tree(path):
    """F001: two equal requests, then others into a pool that is short; the audit after every step is in `run`."""
    ids = prompt(40, 1)
    engine = engines.make(path, max_total_tokens=600)
    later = [request(f"b{i}", prompt(40, 50 + i), params(max_tokens=20)) for i in range(8)]
    answers = run(engine, [request("a1", ids, params(max_tokens=64)), request("a2", ids, params(max_tokens=64))],
                  lambda n: [engine.add(later.pop(0)) for _ in range(len(later) if n == 2 else 0)])
    assert answers["a1"].ids == answers["a2"].ids == run(plain(path), [request("a", ids, params(max_tokens=64))])["a"].ids


# ----------------------------------------------------------------------------------------------------------------- logprobs, limits

def test_logprobs_are_the_models_on_every_route(path, reference):
    """Temperature, penalties and bias change the token, not the logprob that is reported for it."""
    ids = prompt(30, 3)
    plain_top = reference(request("p", ids, params(max_tokens=1, logprobs=5))).logprobs[0].top
    for i, extra in enumerate((dict(temperature=0.5, seed=1), dict(temperature=2, seed=1, top_p=0.1), dict(presence_penalty=2), dict(logit_bias={3: 50}))):
        top = reference(request(f"p{i}", ids, params(max_tokens=1, logprobs=5, **extra))).logprobs[0].top
        assert [t for t, _ in top] == [t for t, _ in plain_top] and all(abs(a - b) < 1e-5 for (_, a), (_, b) in zip(top, plain_top))


def test_prompt_logprobs_with_a_cache_hit(path):
    """F011: the same array cold, warm and with a part cached; the first entry is None."""
    engine, ids = engines.make(path, chunked_prefill_size=32), prompt(90, 4)
    ask = lambda rid, n, start=0: run(engine, [request(rid, ids[:n], params(max_tokens=1, prompt_logprobs=1, logprob_start_len=start))])[rid]
    cold, warm, half, again, tail = ask("a", 90), ask("b", 90), ask("c", 45), ask("d", 90), ask("e", 90, 70)
    assert cold.prompt_logprobs[0].logprob is None and len(cold.prompt_logprobs) == 90
    for other, n in ((warm, 90), (half, 45), (again, 90)):
        close(other.prompt_logprobs, cold.prompt_logprobs[:n])
    close(tail.prompt_logprobs, cold.prompt_logprobs[70:])
    assert warm.cached == 0 and tail.cached == 69


def test_max_tokens_is_cut_to_the_context_and_a_prompt_that_cannot_fit_is_refused(path):
    engine = engines.make(path, context_length=64)
    answer = run(engine, [request("a", prompt(60, 1), params(max_tokens=None))])["a"]
    assert (len(answer.ids), answer.reason) == (4, "length")
    with pytest.raises(RequestError, match="64"):
        engine.add(request("b", prompt(64, 1), params()))
    assert run(engine, [request("c", prompt(64, 1), params(max_tokens=0))])["c"].reason == "length"


@pytest.mark.parametrize("ids, kw, name", [([-1], {}, "prompt"), ([320], {}, "prompt"), ([], {}, "prompt"), ([1], dict(logit_bias={320: 1}), "logit_bias"),
                                           ([1], dict(stop_token_ids=[-1]), "stop_token_ids"), ([1, 2], dict(logprob_start_len=3), "logprob_start_len")])
def test_bad_requests_are_refused_by_name_and_change_nothing(path, ids, kw, name):
    engine = engines.make(path)
    with pytest.raises(RequestError) as caught:
        engine.add(request("a", ids, params(**kw)))
    assert caught.value.param == name and not engine.has_work and not engine.streams


@pytest.mark.parametrize("flags, text", [
    (dict(context_length=513), "512 positions"), (dict(page_size=65), "page_size"), (dict(schedule_policy="best"), "schedule_policy"),
    (dict(max_running_requests=0), "max_running_requests"), (dict(page_size="4"), "page_size"), (dict(random_seed=-1), "random_seed"), (dict(max_total_tokens=10**9), "MiB are free"), (dict(dtype="int8"), "dtype"),
    (dict(max_total_tokens=63, page_size=64), "max_total_tokens is 63, less than a page of 64"), (dict(device="cpu", attention_backend="triton"), "does not run on the device cpu"),
    (dict(schedule_policy="lpm", disable_radix_cache=True), "disabled"), (dict(mem_fraction_static=0), "mem_fraction"), (dict(attention_backend="x"), "attention_backend"), (dict(device="gpu"), "cuda:N"), (dict(device="cuda:9"), "no GPU")])
def test_bad_flags_are_refused_at_start(path, flags, text):
    with pytest.raises(ValueError, match=text):
        engines.make(path, **flags)


def test_stop_tokens_from_the_request_and_the_model(path, reference):
    ids = prompt(20, 1)
    full = reference(request("a", ids, params())).ids
    stop = next(t for t in full[3:] if t not in full[:3])
    answer = run(engines.make(path), [request("b", ids, params(ignore_eos=False, stop_token_ids=[stop]))])["b"]
    assert answer.ids == full[:full.index(stop) + 1] and answer.reason == "stop"
    assert answer.text == reference(request("c", ids, params(max_tokens=full.index(stop)))).text, "a stop token's text is not part of the answer"


# ----------------------------------------------------------------------------------------------------------------- failures

def test_a_failed_step_is_tried_again_and_a_request_that_always_fails_ends_alone(path, reference):
    engine = engines.make(path)
    requests = [request(i, [*prompt(30, 1), i], params()) for i in range(3)]
    poison = request("poison", [*prompt(10, 2), 255], params())
    forward = engine.model.forward

    def flaky(batch, kv):
        if 255 in batch.input_ids:
            raise RuntimeError("out of memory")
        return forward(batch, kv)
    engine.model.forward = flaky
    answers = run(engine, requests[:1], lambda n: [engine.add(r) for r in [*requests[1:], poison]] if n == 5 else None)
    assert answers["poison"].reason == "error" and "out of memory" in answers["poison"].error
    assert all(answers[r.rid].ids == reference(r).ids for r in requests)


def test_flush_waits_for_idle(path):
    engine = engines.make(path)
    engine.add(request("a", prompt(20, 1), params()))
    assert not engine.flush_cache()
    while engine.has_work:
        engine.step()
    assert engine.flush_cache() and engine.scheduler.tree.total == 0
    engine.check()


def test_the_audit_sees_a_wrong_table(path):
    engine = engines.make(path)
    engine.add(request("a", prompt(20, 1), params()))
    engine.step()
    engine.check()
    engine.rows.table[engine.scheduler.running[0].row, 3] += 1
    with pytest.raises(AssertionError, match="table"):
        engine.check()


def test_flags_have_help_and_a_type():
    from dataclasses import fields
    assert all(f.metadata["help"] for f in fields(EngineConfig)) and torch.get_num_threads() == 1


@pytest.mark.parametrize("count", [150, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("page", [1, 16])
def test_a_long_run_with_aborts_in_a_small_pool(path, reference, page, count):
    """F013: requests over 8 prefixes, 6 at a time, 15 % aborted after 1 to 10 tokens; then probes. Every answer is the plain engine's."""
    rng = random.Random(page)
    prefixes = [prompt(rng.randrange(10, 120), 200 + i) for i in range(8)]
    requests = [request(f"s{i}", [*rng.choice(prefixes), *prompt(rng.randrange(1, 20), rng.randrange(20))], params(max_tokens=rng.randrange(1, 16)))
                for i in range(count)]
    engine = engines.make(path, max_total_tokens=608, page_size=page, max_running_requests=6)
    engine.scheduler.ratio = 0.1
    doomed = {r.rid: rng.randrange(1, 11) for r in requests if rng.random() < 0.15}
    later = list(requests)

    def each_step(n):
        while later and len(engine.streams) < 6:
            engine.add(later.pop(0))
        for rid, after in doomed.items():
            if rid in engine.streams and len(engine.streams[rid].req.output_ids) >= after:
                engine.abort(rid)

    answers = run(engine, [], each_step, limit=20_000)
    assert len(answers) == count
    for r in requests:
        expected = reference(r).ids
        assert answers[r.rid].ids == (expected if answers[r.rid].reason == "length" else expected[:len(answers[r.rid].ids)])
    probes = [request(f"p{i}", [*p, 1, 2, 3], params()) for i, p in enumerate(prefixes)]
    assert all(run(engine, [p])[p.rid].ids == reference(p).ids for p in probes)
