"""Speculation in the engine: the texts, logprobs and ends of the plain engine under every drafter, on every kind of device; guesses and memory,
failures, aborts, the last column; the distribution under rejection sampling."""

import collections
import random

import numpy as np
import pytest
import torch

import engines
import tiny
from covering import pairs_of
from engines import MIX, STOPS, make, overlapped, params, prompt, request, run, same
from nano_sgl import LLM, spec
from nano_sgl.spec import CostCurve, DraftTree, Record, no_guesses

DRAFTERS = ("ngram", "radix", "ngram+radix")
FEW = {65: 30.0, 66: 30.0, 67: 30.0}  # texts of three tokens repeat themselves: guesses are right now and then


def flags_of(drafter: str, length: str = "fixed", **more) -> dict:
    return dict(speculative_algorithm=drafter, speculative_draft_length=length) | more


def repeating(seed: int, count: int = 40) -> list[int]:
    """A prompt with a period."""
    rng = random.Random(seed)
    return ([rng.randrange(256) for _ in range(rng.randrange(3, 12))] * count)[:count]


def requests_of(seed: int, few: bool = True) -> list:
    """Prompts that repeat and share, parameters of every kind, every second with a text of few tokens."""
    rng, made = random.Random(seed), []
    for i, mix in enumerate(MIX + STOPS + MIX):
        asked = dict(max_tokens=rng.choice([2, 15, 40])) | mix
        if few and i % 2 and "logit_bias" not in mix:
            asked["logit_bias"] = FEW
        asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
        made.append(request(f"q{i}", repeating(rng.randrange(6), rng.randrange(8, 60)), params(**asked)))
    return made


def guesses(engine) -> Record:
    return engine.speculation.total


# ------------------------------------------------------------------------------------------------------------------- the same answers

@pytest.mark.parametrize("worker, drafter, topk, page", pairs_of([("inline", 0), ("thread", 1), ("late", 1), ("late", 2)], DRAFTERS, [1, 4], [1, 4]))
def test_nothing_changes_but_the_number_of_steps(path, reference, drafter, worker, topk, page):
    """F139, F145: asked twice, for `radix` finds the first answers in the cache; devices behind a fence, books proved after every step."""
    flags, (device, depth) = flags_of(drafter, page_size=page, speculative_eagle_topk=topk), worker
    engine = make(path, **flags) if device == "inline" else overlapped(path, device, depth, **flags)
    for turn in range(2):
        requests = requests_of(5)
        answers = run(engine, requests)
        for r in requests:
            same(answers[r.rid], reference(r))
    assert guesses(engine).accepted > 10
    engine.shutdown()


@pytest.mark.parametrize("flags", [dict(max_total_tokens=260, chunked_prefill_size=24, max_running_requests=6),
                                   dict(max_total_tokens=272, page_size=16, chunked_prefill_size=32, max_running_requests=6),
                                   dict(disable_radix_cache=True, max_total_tokens=260), dict(speculative_num_draft_tokens=63),
                                   dict(speculative_num_draft_tokens=1, chunked_prefill_size=16)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_short_of_memory_and_with_aborts(path, reference, seed, flags):
    rng = random.Random(seed)
    drafter = "ngram" if "disable_radix_cache" in flags else DRAFTERS[seed]
    device, depth = rng.choice([("thread", 1), ("late", 1), ("late", 2)])
    engine = overlapped(path, device, depth, **flags_of(drafter, **flags))
    engine.scheduler.ratio = 0.1
    requests, aborted = requests_of(seed), set()

    def abort_some(step):
        if step % 7 == 3 and engine.streams:
            rid = rng.choice(sorted(engine.streams))
            aborted.add(rid)
            engine.abort(rid)
    for turn in range(2):
        answers = run(engine, requests, abort_some)
        for r in requests:
            if answers[r.rid].reason == "abort":
                assert r.rid in aborted and answers[r.rid].ids == reference(r).ids[:len(answers[r.rid].ids)]
            else:
                same(answers[r.rid], reference(r))
    assert guesses(engine).accepted
    assert engine.flush_cache() and engine.scheduler.slots.available == engine.scheduler.slots.capacity
    engine.shutdown()


def test_samples_of_a_prompt_guess_each_for_itself(path, reference):
    requests = [request(f"n{i}", repeating(3), params(temperature=1, seed=5, n=4, logprobs=1, logit_bias=FEW, max_tokens=60), index=i) for i in range(4)]
    engine = overlapped(path, **flags_of("ngram", page_size=4))
    answers = run(engine, requests)
    for r in requests:
        same(answers[r.rid], reference(r))
    assert guesses(engine).accepted and len({tuple(a.ids) for a in answers.values()}) == 4
    engine.shutdown()


@pytest.mark.parametrize("window", [24, 5])
def test_a_sliding_window_counts_positions_not_columns(tmp_path, window):
    """In a tree that branches, a node stands further from the text than its position says."""
    path = tiny.add_tokenizer(tiny.checkpoint(tmp_path, "mistral", sliding_window=window))
    reference = engines.Reference(path)
    engine = make(path, **flags_of("ngram", speculative_eagle_topk=4, speculative_ngram_min_match_window_size=1))
    requests = [request(f"w{i}", repeating(i), params(max_tokens=50, logit_bias=FEW, temperature=0.7, seed=i)) for i in range(6)]
    answers = run(engine, requests)
    for r in requests:
        same(answers[r.rid], reference(r))
    assert guesses(engine).accepted > 20


@pytest.mark.parametrize("length", ["fixed", "adaptive"])
def test_the_last_column_of_the_context_is_the_last(tmp_path, length):
    """Guesses reach beyond what was asked for, beyond the context and beyond the pool; what is there ends where it would."""
    path = engines.tiny_path(tmp_path, max_position_embeddings=96)
    reference = engines.Reference(path)
    for pool in (96, 90):
        for device in ("inline", "late"):
            flags = flags_of("ngram", length, max_total_tokens=pool, speculative_num_draft_tokens=12)
            engine = make(path, **flags) if device == "inline" else overlapped(path, device, 1, **flags)
            if length == "adaptive":
                engine.speculation.lengths.cost = CostCurve([1, 64], [1.0, 1.2])
            for size in (1, 30, pool - 6, pool - 2, pool - 1):
                for asked in (None, 3):
                    r = request("long", repeating(1, size), params(max_tokens=asked, logit_bias={65: 90.0}))
                    answer = run(engine, [r])["long"]
                    room = min(pool - size, asked or pool)
                    assert (answer.reason, len(answer.ids)) == ("length", room) and answer.ids == reference(r).ids[:room]
            assert guesses(engine).accepted
            engine.shutdown()


def test_a_stop_inside_a_block_of_right_guesses_drops_the_rest(path):
    """F141, F143: text, ids, logprobs and count end with the token that ends them."""
    engine = make(path, **flags_of("ngram", speculative_eagle_topk=1))
    repeat = dict(logit_bias={65: 90.0, 66: 50.0}, frequency_penalty=0.0)
    for stop in (dict(stop="bbbb"), dict(stop_token_ids=[65], min_tokens=11, ignore_eos=False), dict(max_tokens=13), dict(stop_regex="b{7}")):
        answer = run(engine, [request("s", [65] * 20, params(**(dict(max_tokens=30, logprobs=0) | repeat | stop)))])["s"]
        wanted = {"stop": 4, "stop_token_ids": 12, "max_tokens": 13, "stop_regex": 7}[next(iter(stop))]
        assert len(answer.ids) == len(answer.logprobs) == wanted, (stop, answer)
    assert guesses(engine).accepted > 15


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prefix_out_of_the_cache_is_as_good_as_one_that_was_computed(path, reference, drafter):
    """F149: one cold request, then six that share its prefix, and these once more."""
    engine, prefix = make(path, **flags_of(drafter)), repeating(3, 60)
    groups = [[request("cold", prefix, params(max_tokens=20, logit_bias=FEW))]]
    groups += [[request(f"{turn}{i}", prefix + prompt(6, i), params(max_tokens=20, logit_bias=FEW)) for i in range(6)] for turn in "ab"]
    for group in groups:
        answers = run(engine, group)
        for r in group:
            same(answers[r.rid], reference(r))
            assert answers[r.rid].cached >= 60 * (r.rid != "cold") and answers[r.rid].cached >= 66 * (r.rid[0] == "b") - 1
    assert guesses(engine).accepted > 10
    engine.shutdown()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_guess_stems_from_somebody_elses_text(path, drafter):
    """F151: a long text, then a short one in its row and another namespace. Each guess of the second is a token of its own."""
    shortest = {} if drafter == "radix" else dict(speculative_ngram_min_match_window_size=1)
    engine, offered = make(path, max_running_requests=1, **flags_of(drafter, **shortest)), []
    theirs, ours = list(range(200, 230)) * 4, [65, 66, 67, 65, 66]
    for one in engine.speculation.drafters:
        if hasattr(one, "draft"):
            draft = one.draft

            def on_device(tokens, known):
                found = draft(tokens, known)
                offered.extend(found[0].tokens[found[0].inside].tolist())
                return found
            one.draft = on_device
        else:
            propose = one.propose

            def on_host(*args):
                found = propose(*args)
                offered.extend(found[0])
                return found
            one.propose = on_host
    bias = lambda tokens: dict(logit_bias=dict.fromkeys(tokens, 40.0))
    for turn in range(2):
        run(engine, [request("theirs", theirs, params(max_tokens=30, **bias(theirs[:30])), namespace="theirs")])
    assert set(offered) & set(theirs) and guesses(engine).accepted
    sizes = [{name: getattr(value, "nbytes", 0) for name, value in vars(one).items()} for one in engine.speculation.drafters]
    offered.clear()
    for namespace in "aba":  # its own text is in the cache at last
        run(engine, [request("ours", ours, params(max_tokens=30, **bias(ours)), namespace=namespace)])
    assert offered and set(offered) <= set(ours)
    assert sizes == [{name: getattr(value, "nbytes", 0) for name, value in vars(one).items()} for one in engine.speculation.drafters]
    engine.shutdown()


# ---------------------------------------------------------------------------------------------------------------------- when things fail

def test_logits_that_are_no_numbers_end_one_request_and_only_where_they_count(path, reference):
    """NaN at a guess that nobody follows is nothing; NaN on the path ends the request."""
    engine = make(path, **flags_of("ngram", speculative_eagle_topk=1))
    logits, spoil = engine.model.logits, []

    def spoiled(hidden):
        z = logits(hidden)
        if len(z) > 8:
            z[spoil] = torch.nan
        return z
    engine.model.logits = spoiled
    good = request("good", repeating(2), params(max_tokens=30))  # never are eight of its guesses right
    spoil[:] = [-1]
    same(run(engine, [good])["good"], reference(good))
    spoil[:] = [0]
    bad = request("bad", [65] * 20, params(max_tokens=30, logit_bias={65: 90.0}))
    answer = run(engine, [bad])["bad"]
    assert answer.reason == "error" and "not finite" in answer.error
    spoil.clear()
    same(run(engine, [good])["good"], reference(good))


@pytest.mark.parametrize("device, depth", [("inline", 0), ("thread", 1), ("late", 2)])
def test_a_step_that_fails_with_guesses_in_flight(path, reference, device, depth):
    flags = flags_of("ngram+radix")
    engine = make(path, **flags) if device == "inline" else overlapped(path, device, depth, **flags)
    forward, failing = engine.model.forward, []

    def flaky(batch, kv):
        if failing:
            raise RuntimeError(failing.pop())
        return forward(batch, kv)
    engine.model.forward = flaky
    requests = requests_of(9)
    answers = run(engine, requests, lambda step: failing.append("lost") if step % 9 == 4 else None)
    for r in requests:
        if answers[r.rid].reason != "error":
            same(answers[r.rid], reference(r))
    assert sum(a.reason != "error" for a in answers.values()) > len(requests) // 3
    engine.shutdown()


# ------------------------------------------------------------------------------------------------------------------ rejection, adaptive

def test_rejection_sampling_keeps_the_distribution_of_texts(path):
    """Texts of three tokens, of two engines: chi-square of two samples."""
    asked = dict(temperature=1.3, max_tokens=4, logit_bias={65: 20.0, 66: 20.0, 67: 20.0}, top_k=3)
    counts, accepted = [], 0
    for flags in (dict(), flags_of("ngram", speculative_acceptance="rejection")):
        engine = make(path, max_total_tokens=8192, max_running_requests=64, **flags)
        requests = [request(i, [65, 66, 67, 65, 66, 66] * 4, params(**asked, seed=10_000 * bool(flags) + i)) for i in range(3000)]
        answers = run_without_audit(engine, requests)
        counts.append(collections.Counter(tuple(ids) for ids in answers.values()))
        accepted += guesses(engine).accepted if flags else 0
    assert accepted > 500
    cells = [t for t in counts[0] | counts[1] if counts[0][t] + counts[1][t] >= 10]
    rest = [sum(n for t, n in c.items() if t not in cells) for c in counts]
    pairs = [(counts[0][t], counts[1][t]) for t in cells] + ([tuple(rest)] if sum(rest) else [])
    chi = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    assert len(pairs) > 15 and chi < len(pairs) + 4 * (2 * len(pairs)) ** 0.5, (chi, len(pairs))


def run_without_audit(engine, requests) -> dict[str, list[int]]:
    ids = {r.rid: [] for r in requests}
    for r in requests:
        engine.add(r)
    while engine.has_work:
        for chunk in engine.step():
            ids[chunk.rid] += chunk.output_ids
    engine.check()
    return ids


def test_greedy_texts_are_the_same_under_rejection(path, reference):
    engine = overlapped(path, **flags_of("ngram", speculative_acceptance="rejection"))
    requests = [request(i, repeating(i), params(max_tokens=40, logit_bias=FEW, frequency_penalty=0.3 * (i % 2))) for i in range(8)]
    answers = run(engine, requests)
    for r in requests:
        same(answers[r.rid], reference(r))
    assert guesses(engine).accepted
    engine.shutdown()


def test_adaptive_length_drafts_where_guesses_are_right_and_stops_where_they_are_not(path):
    """[65] * n is followed by 65; the seeded text of all tokens repeats nothing, yet its last tokens were seen before."""
    engine = make(path, **flags_of("ngram", "adaptive", speculative_ngram_min_match_window_size=1))
    engine.speculation.lengths.cost = CostCurve([1, 64], [1.0, 4.0])
    right = run(engine, [request("right", [65] * 30, params(max_tokens=60, logit_bias={65: 90.0}))])["right"]
    assert len(right.ids) == 60 and guesses(engine).steps < 12
    engine.speculation.total = Record()
    run(engine, [request("wrong", [i % 40 for i in range(200)], params(max_tokens=60, temperature=3, seed=1))])
    assert guesses(engine).steps > 55 and guesses(engine).proposed < 25


def test_what_is_reported_adds_up(path):
    llm = LLM(str(path), max_total_tokens=1024, **flags_of("ngram"))
    with llm:
        output = llm.generate([65] * 20, params(max_tokens=40, logit_bias={65: 90.0}))
        said = output.speculation
        assert said["spec_num_correct_drafts"] + said["spec_verify_ct"] >= 39 > 3 * said["spec_verify_ct"]
        assert said["spec_accept_length"] == 1 + said["spec_num_correct_drafts"] / said["spec_verify_ct"]
        assert 0 < said["spec_accept_rate"] <= 1 and said["spec_accept_rate_by_depth"][0] > 0.9
        assert said["spec_draft_time"] > 0 and said["spec_verify_time"] > 0
        assert {key: value for key, value in llm.engine.stats().items() if key in said}.keys() == said.keys()


# ------------------------------------------------------------------------------------------------------------- drafters that go wrong

class Raises:
    """A device drafter that always fails."""

    def __init__(self, options):
        self.options = options

    def draft(self, tokens, known):
        raise KeyError("no such n-gram")


class RaisesOnTheHost:
    """A host drafter that always fails."""

    def __init__(self, options):
        self.options = options

    def propose(self, tree, node, rest, count):
        raise KeyError("no such place")


class Branches(Raises):
    """Two guesses at one place, whatever was asked for, and the second's child."""

    def draft(self, tokens, known):
        roots = tokens.gather(1, known[:, None] - 1)[:, 0].long()
        made = no_guesses(roots, self.options.count)
        made.tokens[:, 1:4], made.parents[:, 1:4] = torch.tensor([66, 65, 65]), torch.tensor([0, 0, 2])
        return DraftTree(made.tokens, made.parents, torch.full_like(roots, 4)), torch.ones(made.tokens.shape), torch.ones_like(roots)


class Nonsense(Raises):
    """Tokens that do not exist, parents that are not there or come later, more guesses than there is room for, scores that are no numbers."""

    def draft(self, tokens, known):
        rows, nodes = len(known), self.options.count + 4
        rng = random.Random(int(known.sum()))
        wild = lambda: torch.tensor([[rng.choice([-5, 0, 65, 66, 10**9]) for _ in range(nodes)] for _ in range(rows)])
        return DraftTree(wild(), wild(), torch.full((rows,), nodes)), torch.full((rows, nodes), torch.nan), torch.full((rows,), 99)


class NonsenseOnTheHost(RaisesOnTheHost):
    """The same, one step early."""

    def propose(self, tree, node, rest, count):
        return [65, -1, 10**9, 66] * 40, [-1, 7, -3, 10**9] * 40, [float("nan")] * 160


class Arrays(RaisesOnTheHost):
    """Arrays for lists."""

    def propose(self, tree, node, rest, count):
        return np.array([65, 66]), np.array([-1, 0]), (0.9, 0.8)


class Nothing(RaisesOnTheHost):
    """Not even lists."""

    def propose(self, tree, node, rest, count):
        return None


@pytest.mark.parametrize("made, topk, page", pairs_of(
    [Raises, RaisesOnTheHost, Branches, Nonsense, NonsenseOnTheHost, Arrays, Nothing], [1, 4], [1, 16]))
def test_a_drafter_may_harm_its_guesses_and_never_a_text(path, reference, monkeypatch, made, topk, page):
    monkeypatch.setitem(spec.DRAFTERS, "own", made)
    for algorithm in ("own", "ngram+own"):
        engine = overlapped(path, **flags_of(algorithm, page_size=page, speculative_eagle_topk=topk))
        requests = requests_of(4)[:16]
        answers = run(engine, requests)
        for r in requests:
            same(answers[r.rid], reference(r))
        engine.shutdown()


@pytest.mark.parametrize("flags", [dict(context_length=16), dict(max_total_tokens=8), dict(max_total_tokens=3)], ids=str)
def test_the_cost_of_a_step_is_measured_in_the_smallest_engine(path, flags):
    engine = make(path, **flags_of("ngram", "adaptive", **flags))
    assert run(engine, [request("a", [1], params(max_tokens=2))])["a"].reason == "length"
    assert (engine.speculation.lengths.cost([1, 2, 100]) > 0).all()


def test_guesses_leave_prompts_half_of_the_budget(path):
    """Fifteen rows that draft eight guesses each would be all of 128 tokens a step."""
    engine = make(path, max_total_tokens=4096, max_running_requests=16, chunked_prefill_size=128, **flags_of("ngram"))
    for i in range(15):
        engine.add(request(f"r{i}", [65] * 20, params(max_tokens=200, logit_bias={65: 90.0})))
    for _ in range(4):
        engine.step()
    engine.add(request("long", prompt(400, 3), params(max_tokens=1)))
    steps = 0
    while "long" in engine.streams:
        engine.step()
        engine.check()
        steps += 1
    assert steps < 11


def test_who_begins_again_in_the_pass_that_retracted_it_has_no_guesses(path, reference):
    """A prompt in chunks needs the memory of a row that decodes, which starts again at once, out of the tree."""
    for seed in range(5):
        rng = random.Random(seed)
        engine = make(path, max_total_tokens=140, chunked_prefill_size=24, schedule_policy="priority", **flags_of("ngram"))
        requests = [request(f"p{i}", repeating(i, rng.randrange(20, 90)), params(max_tokens=40, logit_bias=FEW), priority=rng.choice([0, 5, 30]))
                    for i in range(8)]

        def hopeful(step):
            engine.scheduler.ratio = 0.0
        answers = run(engine, requests, hopeful)
        for r in requests:
            same(answers[r.rid], reference(r))
