"""Grammars in the engine: texts that a model of `transformers` and the grammar's own masks give, on every kind of device, whatever is missed,
guessed, retracted or aborted; the wait for a grammar; what a client is told."""

import asyncio
import gc
import random
import re
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import engines
import tiny
from covering import pairs_of
from engines import make, overlapped, params, prompt, request, run, same
from nano_sgl import LLM, constraint, grammar, masks
from nano_sgl.protocol import RequestError
from nano_sgl.rules import GrammarError

LIST = 'root ::= "[" (item ("," item)*)? "]"\nitem ::= root | [a-z]{1,3}'
GRAMMARS = [dict(regex="[a-z]{2,9} (the|and|in){1,3}[.!]"), dict(ebnf=LIST), dict(choice=["the", "then", "and so on", "é"]), dict(json_object=True),
            dict(regex=r"(\w|[ ,]){0,40}"), dict(regex="a{3}b*c?"), dict(json_schema={"type": "array", "items": {"type": "integer", "maximum": 120}}),
            dict(json_schema={"type": "object", "properties": {"a": {"enum": ["the", "then", None]}, "b": {"$ref": "#"}}}, json_whitespace="compact",
                 json_strict=True)]
MIXES = [dict(), dict(temperature=1, seed=3), dict(temperature=1.5, top_k=20, seed=4, logprobs=2), dict(temperature=1, top_p=0.8, min_p=0.01, seed=5),
         dict(frequency_penalty=1.5, presence_penalty=0.5), dict(repetition_penalty=1.4, temperature=0.7, seed=7),
         dict(logit_bias={97: 8.0, 98: -100}, temperature=0.9, seed=8, logprobs=0), dict(ignore_eos=False, temperature=1, seed=9),
         dict(logit_bias={97: 30.0, 98: 30.0, 110: 30.0}), dict(logit_bias={97: 30.0, 44: 30.0}, max_tokens=40, temperature=0.5, seed=2)]


def requests_of(seed: int, count: int = 24) -> list:
    """With grammars, two thirds of them, and without."""
    rng, made = random.Random(seed), []
    for i in range(count):
        asked = dict(max_tokens=rng.choice([3, 15, 40])) | MIXES[i % len(MIXES)] | (rng.choice(GRAMMARS) if i % 3 else {})
        made.append(request(f"g{i}", (prompt(12, rng.randrange(6)) * 5)[:rng.randrange(2, 50)], params(**asked)))
    return made


def forced_misses(engine, steps: int = 2):
    """The rows of grammars are there only some calls of `step` after they were asked for."""
    compiler, asked, want = engine.constraints.compiler, {}, engine.constraints.compiler.want

    def late(machine, state):
        key = id(machine.tables), state & grammar.INDEX
        asked[key] = asked.get(key, 0) + 1
        return want(machine, state) if asked[key] > steps else None
    compiler.want = late
    return asked


# ---- right

def test_greedy_texts_are_those_of_transformers_and_the_masks(path):
    """F121: at each place the most likely token of those that the grammar's mask allows."""
    engine, model = make(path), tiny.reference(path)
    vocab = engine.constraints.compiler.submit("regex", "a").result().vocab
    for i, given in enumerate(GRAMMARS):
        asked = request(f"r{i}", prompt(20, i), params(max_tokens=20, ignore_eos=False, **given))
        kind, text, options = asked.params.grammar
        machine = grammar.compile(kind, text, vocab, **options)
        ids, state = list(asked.prompt_ids), machine.start
        while len(ids) < 40 and state is not None:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            mask = torch.from_numpy(machine.mask(state))
            bits = (mask[:, None] >> torch.arange(32) & 1).bool().flatten()[:len(logits)]
            ids.append(int(logits.masked_fill(~bits, -torch.inf).argmax()))
            state = machine.step(state, ids[-1])
        answer = run(engine, [asked])[asked.rid]
        assert answer.ids == ids[20:] and answer.reason == ("stop" if state is None else "length")
    engine.shutdown()


@pytest.mark.parametrize("flags, worker, misses", pairs_of(
    [dict(), dict(page_size=4, chunked_prefill_size=16), dict(disable_radix_cache=True),
     dict(max_total_tokens=260, chunked_prefill_size=24, max_running_requests=6),
     dict(speculative_algorithm="ngram+radix", speculative_draft_length="fixed"),
     dict(speculative_algorithm="ngram", speculative_draft_length="fixed", page_size=4, speculative_eagle_topk=1, max_total_tokens=400)],
    [("inline", 0), ("thread", 1), ("late", 2)], ["few", "late", "many"]), ids=str)
def test_nothing_changes_the_text(path, reference, flags, worker, misses, monkeypatch):
    """Devices behind a fence, books proved after every step; asked twice, so that there are answers to guess from. Rows are missing as they
    happen to, for some steps each, or everywhere now and then: roots and guesses."""
    device, depth = worker
    engine = make(path, **flags) if device == "inline" else overlapped(path, device, depth, **flags)
    if misses == "late":
        forced_misses(engine)
    if misses == "many":
        draw, has_row = torch.Generator().manual_seed(depth), masks.DeviceTables.has_row
        often = lambda self, states: has_row(self, states) & (torch.rand(len(states), generator=draw) > 0.3)
        monkeypatch.setattr(masks.DeviceTables, "has_row", often)
    if "max_running_requests" in flags:
        engine.scheduler.ratio = 0.1
    for turn in range(2):
        requests = requests_of(0)
        answers = run(engine, requests)
        for r in requests:
            same(answers[r.rid], reference(r))
    stats = engine.stats()
    assert stats["grammar_tokens"] > 200 and stats["grammar_misses"] >= {"few": 0, "late": 5, "many": 100}[misses]
    assert not engine.constraints.held and not engine.constraints.waiting
    if "speculative_algorithm" in flags:
        assert engine.speculation.total.accepted > 10
    engine.shutdown()


def test_a_row_is_missed_once_by_each_request_that_comes_to_it(path):
    """One whose row takes long sits out until it is there; those beside it go on."""
    engine = make(path)
    build, seen, machine = grammar.Grammar.row, [], engine.constraints.compiler.submit("regex", "[a-d][e-h][i-l][m-p]x").result()

    def slow(self, state):
        if self is machine and self.tables.rows[state & grammar.INDEX] is None:
            seen.append(state)
            time.sleep(0.1)
        return build(self, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar.Grammar, "row", slow)
        alone = dict(regex="[a-d][e-h][i-l][m-p]x", max_tokens=9, temperature=1, seed=2, ignore_eos=False)
        answers = run(engine, [request("a", [1], params(**alone)), request("b", [1], params(**alone)), request("c", [2], params(max_tokens=200))])
    assert answers["a"].ids == answers["b"].ids and answers["a"].reason == "stop"
    assert len(seen) == 5 and engine.stats()["grammar_misses"] <= 2 * len(seen)
    engine.shutdown()


FLAGS = [dict(), dict(page_size=4, chunked_prefill_size=16), dict(max_total_tokens=260, chunked_prefill_size=24, max_running_requests=6),
         dict(speculative_algorithm="ngram+radix", speculative_draft_length="fixed", page_size=4, max_total_tokens=300, max_running_requests=5),
         dict(speculative_algorithm="ngram", speculative_draft_length="fixed", page_size=16, max_total_tokens=512)]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 400))])
def test_random_runs_in_which_everything_happens(path, reference, seed, monkeypatch, caplog):
    """Steps that fail, rows that are missing or late, little memory, ids that are aborted and come again at once; the books after every step."""
    rng, fails = random.Random(seed), 0
    device, depth = rng.choice([("inline", 0), ("thread", 1), ("late", 1), ("late", 2)])
    flags, missing, failing = rng.choice(FLAGS), rng.choice([0, 0.2, 0.5]), rng.choice([0, 0.05])
    engine = make(path, **flags) if device == "inline" else overlapped(path, device, depth, **flags)
    engine.scheduler.ratio = 0.1
    draw, has_row, forward = torch.Generator().manual_seed(seed), masks.DeviceTables.has_row, engine.model.forward
    often = lambda self, states: has_row(self, states) & (torch.rand(len(states), generator=draw) >= missing)
    monkeypatch.setattr(masks.DeviceTables, "has_row", often)
    if rng.random() < 0.5:
        forced_misses(engine)

    def may_fail(*step):
        if rng.random() < failing:
            raise RuntimeError("by chance")
        return forward(*step)
    engine.model.forward = may_fail
    requests = {r.rid: r for r in requests_of(seed, 12)}
    todo, answers = rng.sample(sorted(requests), len(requests)), {}
    for _ in range(6000):
        if todo and rng.random() < 0.5:
            rid = todo.pop()
            answers[rid] = engines.Answer()
            engine.add(requests[rid])
        if not engine.has_work and not todo:
            break
        for chunk in engine.step():
            answers[chunk.rid].take(chunk)
        engine.check()
        if engine.streams and rng.random() < 0.03:
            rid = rng.choice(sorted(engine.streams))
            assert engine.abort(rid)
            for chunk in engine.step():
                answers[chunk.rid].take(chunk)
            answers[rid] = engines.Answer()
            engine.add(requests[rid])
    pool = engine.scheduler
    assert pool.slots.available + pool.tree.evictable == pool.slots.capacity and not engine.streams and not engine.constraints.held
    for rid, answer in answers.items():
        if answer.reason == "error" and "by chance" in answer.error:
            fails += 1
        else:
            same(answer, reference(requests[rid]))
    assert fails < len(requests) and len(answers) == len(requests)
    engine.shutdown()


@pytest.mark.parametrize("given, pattern", [(GRAMMARS[0], GRAMMARS[0]["regex"]), (GRAMMARS[2], "the|then|and so on|é"), (GRAMMARS[5], "a{3}b*c?"),
                                            (dict(regex=r"\d{3}-[A-F\d]{2,4}"), r"\d{3}-[A-F\d]{2,4}")])
def test_samples_match_the_pattern(path, given, pattern):
    with LLM(str(path), max_total_tokens=2048) as llm:
        outputs = llm.generate([65] * 4, params(temperature=1.5, seed=1, n=30, max_tokens=60, ignore_eos=False, **given))
    ended = [o for o in outputs if o.finish_reason == "stop"]
    assert len(ended) > 15 and all(re.fullmatch(pattern, o.text) for o in ended), [o.text for o in ended]
    assert len({o.text for o in ended}) > 1


def test_the_end_of_a_grammar_is_the_end(path):
    """F121: nothing may follow, whatever ends are ignored."""
    engine = make(path)
    asked = dict(regex="yes|no", max_tokens=50)
    answers = run(engine, [request("a", [1, 2], params(ignore_eos=False, **asked)), request("b", [1, 2], params(ignore_eos=True, **asked)),
                           request("c", [1, 2], params(ignore_eos=False, min_tokens=20, **asked))])
    assert answers["a"].text in ("yes", "no") and answers["a"].reason == answers["b"].reason == "stop" and answers["b"].text == answers["a"].text
    shown = params(ignore_eos=True, skip_special_tokens=False, stop_token_ids=[121], **asked)
    assert run(engine, [request("d", [1, 2], shown)])["d"].text == answers["a"].text  # an end is no text; stop ids are ignored, too
    assert answers["c"].text == answers["a"].text and answers["c"].reason == "stop", "ends are held back while something else may come"
    engine.shutdown()


def test_rows_of_a_batch_keep_their_grammars_when_others_leave(path):
    """F061: grammars of different kinds side by side, some short, some long, beside rows that are free."""
    engine = make(path)
    kinds = [dict(regex=f"[{a}-{b}]{{{n}}}") for a, b, n in (("a", "c", 3), ("d", "f", 30), ("0", "9", 7), ("x", "z", 15))] + [{}]
    requests = [request(i, [70 + i] * 3, params(temperature=1, seed=i, max_tokens=40, ignore_eos=False, **kinds[i % 5])) for i in range(20)]
    for i, answer in run(engine, requests).items():
        if int(i) % 5 < 4:
            assert re.fullmatch(kinds[int(i) % 5]["regex"], answer.text) and answer.reason == "stop"
    engine.shutdown()


# ---- the wait for a grammar

@pytest.fixture
def slow(monkeypatch):
    """Grammars whose compilation ends when the event is set."""
    gate, compile_ = threading.Event(), grammar.compile

    def late(kind, text, vocab, **options):
        if "SLOW" in str(text):
            gate.wait(30)
        return compile_(kind, text, vocab, **options)
    monkeypatch.setattr(grammar, "compile", late)
    yield gate
    gate.set()


def test_nobody_waits_for_a_grammar_but_who_asked_for_it(path, slow):
    engine = make(path)
    engine.add(request("slow", [1, 2, 3], params(regex="SLOW[a-z]{3}", max_tokens=20, ignore_eos=False)))
    answers = run_until(engine, [request("fast", [1, 2, 3], params(max_tokens=10)), request("other", [1], params(regex="b+", max_tokens=10))], 2)
    assert set(answers) == {"fast", "other"} and engine.stats()["grammar_queue"] == 1 and engine.has_work
    assert not engine.flush_cache()
    with pytest.raises(RequestError, match="already in use"):
        engine.add(request("slow", [1], params()))
    slow.set()
    assert run_until(engine, [], 1)["slow"].text.startswith("SLOW") and not engine.has_work
    engine.check()
    engine.shutdown()


def run_until(engine, requests, ended: int) -> dict:
    """Step until so many requests have ended."""
    answers, deadline = {}, time.monotonic() + 60
    for r in requests:
        engine.add(r)
    while sum(a.reason is not None for a in answers.values()) < ended:
        assert time.monotonic() < deadline
        for chunk in engine.step():
            answers.setdefault(chunk.rid, engines.Answer()).take(chunk)
    return answers


def test_who_waits_for_a_grammar_can_leave_and_is_not_kept_for_ever(path, slow):
    engine = make(path, waiting_timeout=0.2)
    engine.add(request("leaves", [1], params(regex="SLOW1")))
    engine.step()
    assert engine.stats()["waiting"] == engine.stats()["grammar_queue"] == 1 and engine.has_work and not engine.makes_tokens
    assert engine.abort("leaves") and not engine.abort("leaves")
    assert [(c.rid, c.finish_reason) for c in engine.step()] == [("leaves", "abort")] and not engine.has_work
    for i in range(2):
        engine.add(request(f"schema{i}", [1], params(json_schema={"const": "SLOW"}, json_whitespace="compact", json_strict=True)))
    assert engine.stats()["grammar_queue"] == 2 and engine.abort("schema0") and engine.abort("schema1")
    assert [(c.rid, c.finish_reason) for c in engine.step()] == [("schema0", "abort"), ("schema1", "abort")] and not engine.has_work
    engine.add(request("late", [1], params(regex="SLOW2")))
    answer = run_until(engine, [], 1)["late"]
    assert answer.reason == "abort" and answer.status == 503 and "waiting_timeout" in answer.error
    engine.shutdown()


def test_a_grammar_that_takes_too_long_is_refused(path, slow):
    engine = make(path, grammar_compile_timeout=0.2)
    engine.add(request("late", [1], params(regex="SLOW")))
    answer = run_until(engine, [], 1)["late"]
    assert answer.reason == "abort" and answer.status == 503 and "the grammar was not ready after 1.2 s" in answer.error
    with LLM(str(path), max_total_tokens=512, grammar_compile_timeout=0.2) as llm, pytest.raises(RequestError, match="not ready after 1.2 s"):
        llm.generate([1], params(regex="SLOW"))
    engine.shutdown()


def test_what_is_refused_is_said_at_once_or_as_the_only_chunk(path):
    engine = make(path)
    bad = request("bad", [1], params(regex="(a)\\1"))
    try:
        engine.add(bad)
        answer = run_until(engine, [], 1)["bad"]
        assert answer.reason == "error" and answer.status == 400 and "regex" in answer.error and not answer.ids
    except RequestError as error:  # compiled by then
        assert "regex" in error.message
    with pytest.raises(RequestError, match="regex.*position") as refused:  # now it is known
        engine.add(bad)
    assert refused.value.param == "regex" and refused.value.status == 400 and not engine.has_work
    with LLM(str(path), max_total_tokens=512) as llm:
        for call in (llm.generate, lambda *a: list(llm.stream(*a))):
            with pytest.raises(RequestError, match="lookahead|look"):
                call([1], params(regex="(?=a)b"))
        assert llm.generate([1], params(regex="ab", ignore_eos=False)).text == "ab"
    engine.shutdown()


def test_a_row_that_cannot_be_built_ends_its_request_alone(path, monkeypatch):
    engine = make(path)
    build, broken = grammar.Grammar.row, []

    def fails(self, state):
        if self in broken and state != self.start:
            raise GrammarError("too ambiguous", "grammar")
        return build(self, state)
    monkeypatch.setattr(grammar.Grammar, "row", fails)
    first = engine.constraints.compiler.submit("regex", "[ab]{5}x").result()
    broken.append(first)
    answers = run(engine, [request("a", [1], params(regex="[ab]{5}x", max_tokens=9)), request("b", [2], params(regex="[ab]+", max_tokens=9))])
    assert answers["a"].reason == "error" and "too ambiguous" in answers["a"].error and answers["a"].status == 400 and len(answers["a"].ids) == 1
    assert answers["b"].reason == "length" and len(answers["b"].ids) == 9
    engine.shutdown()


def test_a_state_without_tokens_ends_its_request_with_an_error(path):
    """F131: no token of the vocabulary has the byte. (Of many tokens: a state of one is settled without a mask.)"""
    engine = make(path)
    vocab = engine.constraints.compiler.submit("regex", "a").result().vocab
    machine = engine.constraints.compiler.submit("regex", "[a-z]{2}").result()
    assert machine.vocab is vocab
    constraint = engine.constraints
    nothing = lambda self, state: torch.zeros((vocab.size + 31) // 32, dtype=torch.int32).numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks.DeviceTables, "mask", lambda self, logits, rows, states: logits.fill_(-torch.inf))
        patch.setattr(grammar.Grammar, "mask", nothing)
        answer = run(engine, [request("a", [1], params(regex="[a-z]{2}"))])["a"]
    assert answer.reason == "error" and "no token of the model's vocabulary can go on" in answer.error and answer.status == 400
    assert len(run(engine, [request("b", [1], params(regex="[a-z]{2}", ignore_eos=False))])["b"].text) == 2 and not constraint.held
    engine.shutdown()


# ---- what it costs

def test_bytes_sent_are_the_tables_and_no_masks(path):
    engine = make(path)
    asked = dict(regex="[a-z ]{0,200}", max_tokens=60, temperature=1)
    requests = lambda turn: [request(f"{turn}{i}", prompt(9, i), params(seed=i, **asked)) for i in range(4)]
    run(engine, requests("a"))
    first = engine.stats()
    run(engine, requests("b"))
    again = engine.stats()
    assert again["grammar_tokens"] == 2 * first["grammar_tokens"] and again["grammar_compiled"] == first["grammar_compiled"] == 1
    assert again["grammar_bytes"] == first["grammar_bytes"] and again["grammar_misses"] == first["grammar_misses"]
    engine.shutdown()


def test_tables_of_a_vocabulary_that_is_full_are_replaced_and_given_back(path, monkeypatch):
    engine = make(path, grammar_cache_size=4)
    run(engine, [request("first", [1], params(regex="[ab]+", max_tokens=3))])
    shared = engine.constraints.compiler.submit("regex", "[ab]+").result().shared
    copy, first = weakref.ref(engine.constraints._copies[shared.tables]), weakref.ref(shared)
    monkeypatch.setattr(type(shared), "full", property(lambda self: self is first()))
    del shared
    rows = [request(i, [1], params(regex=f"[a-f]{{3,{4 + i}}}", max_tokens=9, temperature=1, seed=i, ignore_eos=False)) for i in range(12)]
    for answer in run(engine, rows).values():
        assert re.fullmatch("[a-f]{3,}", answer.text) or answer.reason == "length"
    gc.collect()
    assert first() is None and copy() is None and len(engine.constraints._copies) == 1
    engine.shutdown()


def test_likely_rows_are_made_ahead_where_that_is_asked_for(path, reference):
    """As for a GPU, whose steps are queued before the host knows what they need."""
    engine = overlapped(path, "late", 2)
    engine.constraints.prefetches = 4
    asked = [request(i, prompt(9, i), params(ebnf=LIST, max_tokens=30, temperature=1, seed=i)) for i in range(4)]
    for rid, answer in run(engine, asked).items():
        same(answer, reference(asked[int(rid)]))
    assert engine.stats()["grammar_rows_prefetched"] > 0
    engine.shutdown()


@pytest.mark.parametrize("layout, texts", [("fixed", ['{"a": [1, 2]}']), ("compact", ['{"a":[1,2]}']),
                                           ("flexible", ['{"a": [1, 2]}', '{"a":[1,2]}', '{ "a" :\n[1,\t2] }'])])
def test_the_layout_of_json_is_the_one_that_the_engine_was_given(path, layout, texts):
    engine = make(path, constrained_json_whitespace=layout)
    machine = engine.constraints.compiler.submit("json_object", None).result()
    for text in ('{"a": [1, 2]}', '{"a":[1,2]}', '{ "a" :\n[1,\t2] }'):
        assert (machine.step_bytes(machine.start, text.encode()) is not None) == (text in texts)
    ask = request("a", [65], params(json_object=True, max_tokens=60, temperature=1, seed=4))
    answer = run(engine, [ask])["a"]
    assert machine.step_bytes(machine.start, machine.vocab.decode(answer.ids)) is not None
    engine.shutdown()


def test_an_engine_without_grammars_does_nothing_for_them(path):
    before = threading.active_count()
    engine = make(path)
    run(engine, [request("a", [1], params(max_tokens=4))])
    assert threading.active_count() == before and not any(key.startswith("grammar") for key in engine.stats())
    engine.shutdown()


# ---- in Python

def test_who_asks_for_many_grammars_gets_each_compiled_once(path):
    """More than the cache holds: they are asked for together, and are kept until they are in use."""
    with LLM(str(path), max_total_tokens=2048, grammar_cache_size=2) as llm:
        asked = [params(regex=f"[a-c]{{{n}}}", max_tokens=3) for n in range(1, 9)]
        assert [len(o.text) for o in llm.generate([[65]] * 8, asked)] == [min(n, 3) for n in range(1, 9)]
        assert llm.engine.stats()["grammar_refused"] == 0 and llm.engine.stats()["grammar_compiled"] <= 8 + 2  # and what warms up


def test_an_event_loop_waits_for_no_grammar_of_others(path, slow):
    async def main(llm):
        others = [asyncio.create_task(llm.agenerate([65], params(regex=f"SLOW{i}", max_tokens=3))) for i in range(40)]
        await asyncio.sleep(0.1)
        mine = await asyncio.wait_for(llm.agenerate([65], params(regex="ab", ignore_eos=False)), 20)
        assert mine.text == "ab" and not any(task.done() for task in others)
        for task in others[1:]:
            task.cancel()
        slow.set()
        assert (await others[0]).text == "SLOW0"[:3]
        with pytest.raises(RequestError, match="look"):
            await llm.agenerate([65], params(regex="(?=a)b"))
    with LLM(str(path), max_total_tokens=512, grammar_cache_size=64) as llm:
        assert llm.generate([65], params(regex="ab", ignore_eos=False)).text == "ab"  # before both threads are busy
        asyncio.run(main(llm))


def test_places_that_need_few_logits(monkeypatch):
    one, other = np.array([3, 5]), np.array([5, 9])
    sort = lambda lists, counts: [part.tolist() for part in constraint.sort_places(lists, counts)[0]]  # noqa: E731
    assert sort([[one, None], (), [other]], [3, 1, 2]) == [[1, 2, 3, 5], [0, 4], [3, 5, 9]]
    assert sort([(), ()], [1, 2]) == [[0, 1, 2], [], []]
    monkeypatch.setattr(constraint, "MOST", 2)
    assert constraint.sort_places([[one], [np.array([4])]], [1, 1])[1] == {1: 4}
    assert sort([[one], [other]], [1, 1]) == [[0, 1], [], []], "so many rows of the head are not gathered"
