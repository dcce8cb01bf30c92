"""Steps that are the same a token later: what the short ways leave out, the long ones would not have found either."""

import random

import numpy as np
import pytest

import engines
from driver import Driver
from nano_sgl import SamplingParams, weights
from nano_sgl.text import TextStream

COLUMNS = ("rows", "starts", "q_lens", "draft_lens", "slack", "limits", "store_from", "complete", "samples", "owed_from")


@pytest.mark.parametrize("page, pool", [(1, 1000), (1, 180), (4, 400), (16, 1024)])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("guesses", [0, 4])
def test_a_pass_that_is_left_out_would_have_planned_the_same(page, pool, depth, guesses):
    """Two schedulers live through the same; one of them never takes the short way. guesses: of each row at most; then some have a grammar, too."""
    shortcuts = further = 0
    for seed in range(6):
        rng = random.Random(f"{seed} {page} {depth}{guesses or ''}")
        short, long = (Driver(pool=pool, page=page, depth=depth, budget=64, max_running=6, context=128, policy="lpm", running_timeout=250.0)
                       for _ in range(2))
        pair, made = (short, long), 0
        for _ in range(250):
            for driver in pair:
                driver.now += 1
            if rng.random() < 0.06:
                ids = [rng.randrange(3)] * rng.randrange(1, 30) + [rng.randrange(50) for _ in range(rng.randrange(1, 10))]
                hold, parent, length = rng.random() < 0.2, f"r{rng.randrange(made + 1)}", rng.randrange(1, 90)
                for driver in pair:
                    req = driver.add(ids, 0 if hold else length, children=2 * hold, parent=parent)
                    req.constrained = guesses > 0 and made % 3 == 0
                made += 1
            if rng.random() < 0.02 and short.scheduler.reqs:
                rid = rng.choice(sorted(short.scheduler.reqs))
                for driver in pair:
                    driver.scheduler.abort(rid)
            if rng.random() < 0.02 and short.flights:
                for driver in pair:
                    driver.scheduler.fail(driver.flights)
                    driver.flights.clear()
            assert len({tuple(req.rid for req in driver.scheduler.expire()) for driver in pair}) == 1
            long.scheduler._steady = None
            drafts = {rid: rng.randrange(guesses + 1) for rid in short.scheduler.reqs} if guesses and rng.random() < 0.8 else {}
            whole, launch = [], short.scheduler._launch
            short.scheduler._launch = lambda *args: whole.append(1) or launch(*args)
            one, other = short.launch(drafts), long.launch(drafts)
            short.scheduler._launch = launch
            assert (one is None) == (other is None)
            if one is not None:
                shortcuts += one.again
                further += not whole
                assert [req.rid for req in one.reqs] == [req.rid for req in other.reqs] and one.shared == other.shared
                assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)
                assert not one.again or not any(map(len, other.writes.arrays()))
            if short.flights and (len(short.flights) > depth or one is None):
                ends = rng.random()
                for driver in pair:
                    chance = lambda req: hash((req.rid, len(req.output_ids), ends))  # noqa: E731
                    driver.commit(ends=lambda req: chance(req) % 97 == 0,
                                  right=lambda req, drafted: -1 if req.constrained and chance(req) % 7 == 0 else chance(req) % (drafted + 1))
            for driver in pair:
                driver.scheduler.check()
    assert further > 100 and (guesses or shortcuts > 100)


@pytest.mark.parametrize("flags", [{}, dict(page_size=16), dict(disable_overlap_schedule=False),
                                   dict(disable_overlap_schedule=False, page_size=4)], ids=str)
def test_texts_are_those_of_plans_made_anew(tmp_path, flags):
    """Rows of all kinds come and go while others decode; some stream, some do not."""
    path = engines.tiny_path(tmp_path)

    def answers(steady):
        engine, rng = engines.make(path, **flags), random.Random(5)
        plan, kept = engine.runner.plan, []

        def planned(batch, *rest):
            engine.runner._kept_for *= steady
            before, made = engine.runner._kept, plan(batch, *rest)
            kept.append(made is before)
            return made
        engine.runner.plan = planned
        asked = [engines.request(i, [rng.randrange(256) for _ in range(rng.randrange(1, 40))],
                                 SamplingParams(temperature=i % 2, seed=i, ignore_eos=True, max_tokens=rng.randrange(20, 70),
                                                stop=["qz"] if i % 5 == 0 else None, logprobs=2 if i % 7 == 0 else None), stream=i % 3 > 0)
                 for i in range(12)]

        def each_step(step):
            if not steady:
                engine.scheduler._steady = None
            if step == 60:
                engine.abort("3")
        found = engines.run(engine, asked, each_step)
        engine.shutdown()
        return {rid: (a.ids, a.text, a.reason) for rid, a in found.items()}, sum(kept)
    (short, used), (long, _) = answers(True), answers(False)
    assert short == long and used > 20


@pytest.mark.parametrize("asks", [{}, dict(ignore_eos=True), dict(stop=["the"]), dict(skip_special_tokens=False),
                                  dict(min_tokens=9, ignore_eos=True)], ids=str)
def test_passing_on_is_pushing_and_taking(asks, demo_path):
    tokenizer, rng = weights.load_tokenizer(demo_path), random.Random(3)
    texts, ids = "ünïcode 🙂🙂 and plain words, the end", list(range(20))
    ids += tokenizer.encode(texts * 3) + [rng.randrange(len(tokenizer)) for _ in range(300)] + [tokenizer.eos_token_id]
    passed = 0
    for _ in range(20):
        rng.shuffle(ids)
        made = [TextStream(tokenizer, SamplingParams(**asks), [tokenizer.eos_token_id], 250) for _ in range(3)]
        left, reason = list(ids), None
        while left and not reason:
            tokens = [left.pop() for _ in range(min(rng.choice((1, 1, 2, 5)), len(left)))]
            text, whole = made[0].pass_on(tokens), made[2].push_whole(tokens)
            assert (text is None) == (whole is None)
            passed += text is not None
            if text is None:
                for i, token in enumerate(tokens):
                    reason = made[0].push(token)
                    assert made[2].push(token) == reason
                    if reason:
                        del tokens[i + 1:]
                        break
                text = made[0].take(reason is not None)
            why = [made[1].push(token) for token in tokens][-1]
            assert (reason, text) == (why, made[1].take(why is not None))
            assert made[0].text == made[1].text == made[2].text and made[0].count == made[1].count == made[2].count
    assert passed > 100 or "stop" in asks
