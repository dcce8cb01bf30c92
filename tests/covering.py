"""Parameters of tests which are a product of several: few combinations that hold each pair of values, in place of all.

    @pytest.mark.parametrize("device, page, drafter", pairs_of(DEVICES, (1, 4), DRAFTERS))

What goes wrong goes wrong by one parameter or by two that meet; a third rarely matters. The others of the product are run with -m long.
"""

import itertools

import pytest


def pairs_of(*factors) -> list:
    """The product of the factors, as parameters of pytest; marked long is what a covering array of its pairs leaves out."""
    product = list(itertools.product(*(range(len(factor)) for factor in factors)))
    pairs = lambda row: set(itertools.combinations(enumerate(row), 2))  # noqa: E731
    missing, chosen = set().union(*map(pairs, product)), set()
    while missing:
        chosen.add(best := max(product, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(best)
    return [pytest.param(*(factor[i] for factor, i in zip(factors, row)), marks=() if row in chosen else pytest.mark.long) for row in product]
