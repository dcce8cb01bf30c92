"""The check of the pairs has to fail on wrong engines: tiny random checkpoints could hide wrong KV, and these tests prove that ours does not."""

from functools import partial

import pytest

import mutations
from features import CELLS, FEATURES, apart, cell_name
from pairs import compare, drive, parted, workload

NTH = 6  # repoints tried: some a request survives (it is retracted, it is aborted, its neighbour's row leads attention to the run they share)


def caught(lab, cell, mutate, seed=0) -> bool:
    """Whether the comparison reports a difference for a mutated engine. The mutation must strike, else there is nothing to catch; once a
    token is wrong, nothing that follows makes it right."""
    plain, engine = lab.plain_for(cell), lab.engine(cell, cached=True, fresh=True)
    each_step, struck = mutate(engine)
    run = drive(engine, workload(cell, plain, seed), cell, plain, audit=False, each_step=each_step,
                enough=lambda run: bool(struck) and parted(run, plain))
    return bool(struck and (not run.ended or compare(run, plain).differences))


@pytest.mark.parametrize("cell", [cell for cell in CELLS if len(cell) == 2 and not apart(*cell)], ids=cell_name)
def test_a_pair_sees_a_zeroed_slot_and_a_skipped_repoint(lab, cell):
    assert any(caught(lab, cell, mutations.zero_a_slot, seed) for seed in range(3))     # of forced text much stays as it is
    assert any(caught(lab, cell, partial(mutations.skip_a_repoint, nth=n), seed) for seed in range(3) for n in range(NTH))
    lab.mutants += 2


OTHERS = {mutations.shorten_a_row: (), mutations.skip_the_copies: ("page 16", "n"), mutations.keep_an_overrun_token: ("overlap", "stop strings"),
          mutations.noise_by_row: ("seeded sampling",), mutations.forget_counts: ("retraction", "penalties and bias"), mutations.take_a_wrong_guess: ("guesses of ngram",),
          mutations.leave_the_guesses_where_they_are: ("guesses of ngram",), mutations.count_no_guesses: ("guesses of radix", "penalties and bias"), mutations.begin_the_grammar_anew: ("retraction", "grammar"),
          mutations.follow_the_grammar_to_the_root_only: ("guesses of radix", "grammar")}


@pytest.mark.parametrize("mutate", OTHERS, ids=lambda mutate: mutate.__name__)
def test_other_mutations_are_seen(lab, mutate):
    cell = [f for f in FEATURES if f.name in OTHERS[mutate]]
    assert any(caught(lab, cell, mutate, seed) for seed in range(4))  # who is retracted, and when, is a matter of luck
    lab.mutants += 1
