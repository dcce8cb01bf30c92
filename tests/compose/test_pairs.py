"""Every feature with every other: the answers of the plain engine, the feature at work, and all memory back."""

import pytest

import pairs
from features import CELLS, FEATURES, apart, cell_name
from pairs import Result, compare, drive, workload

FORKS_PER_TOKEN = 1e-5


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_the_answers_are_those_of_the_plain_engine(lab, cell):
    """Two features, with the radix cache; or one alone, without it (unless it is about the cache)."""
    if apart(*cell):
        with pytest.raises(ValueError):
            lab.engine(cell, cached=True, fresh=True)
        return lab.record(cell, Result("refused"))
    plain, engine = lab.plain_for(cell), lab.engine(cell, cached=len(cell) == 2 or cell[0].needs_cache)
    run = drive(engine, workload(cell, plain), cell, plain)
    verdict = compare(run, plain)
    assert not verdict.differences
    happened = {feature.name: feature.proof(run) for feature in cell}
    assert all(happened.values()), happened
    lab.record(cell, Result("equal", verdict.tokens, len(verdict.forks), happened))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_feature_with_every_kernel_set(labs, kernel_set, feature):
    """The cells above run on the kernels of this machine; these on each that it can run, against the plain engine on the same ones."""
    lab, cell = labs(), (feature,)
    plain = lab.plain_for(cell)
    run = drive(lab.engine(cell, cached=True), workload(cell, plain), cell, plain)
    assert not compare(run, plain).differences and feature.proof(run)


def test_forks_are_rarer_than_one_in_a_hundred_thousand_tokens(lab):
    """Of all cells above; in bfloat16 nothing is promised but the size of the gap, and the rate is printed."""
    counts = lab.totals()
    tokens, forks = counts["float32"]
    assert forks <= FORKS_PER_TOKEN * tokens
    for dtype, (tokens, forks) in counts.items():
        print(f"{dtype}: {forks} forks in {tokens:,} tokens")


# ---- the check itself ------------------------------------------------------------------------------------------------------------

def test_perturbed_logits_are_those_that_the_engine_takes_the_argmax_of(lab):
    """The judge of forks is written from the definition; here it predicts every token of requests that ask for everything."""
    plain, everything = lab.plain_for(()), [f for f in FEATURES if f.name in ("penalties and bias", "seeded sampling", "n", "stop strings")]
    for planned in workload(everything, plain)[:14]:
        ids = plain.answer(planned.request).ids
        assert [int(plain.perturbed(planned.request, ids[:i]).argmax()) for i in range(len(ids))] == ids


def test_a_wrong_token_is_a_difference_and_a_near_tie_is_a_fork(lab, monkeypatch):
    plain, asked = lab.plain_for(()), []
    run = drive(lab.engine(asked, cached=True), workload(asked, plain), asked, plain)
    run.answers["red.0"].ids[5] ^= 1
    assert len(compare(run, plain).differences) == 1 and not compare(run, plain).forks
    monkeypatch.setitem(pairs.FORK_BOUND, plain.dtype, 1e9)
    verdict = compare(run, plain)
    assert not verdict.differences and len(verdict.forks) == 1
    run.answers["red.0"].ids[5] ^= 1
    run.answers["red.0"].ids.pop()
    run.answers["blue.0"].text += "x"
    assert len(compare(run, plain).differences) == 2
