from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.envs.mix import Rota

WEIGHTS = st.lists(st.floats(min_value=0.01, max_value=100, allow_nan=False), min_size=1, max_size=8)


def furthest(weights: list[float], draws: int) -> Fraction:
    """The largest distance of any part from its share, over all prefixes."""
    exact = [Fraction(weight) for weight in weights]
    rota, counts, worst = Rota(weights), [0] * len(weights), Fraction(0)
    for draw in range(1, draws + 1):
        counts[rota.next()] += 1
        worst = max(worst, *(abs(draw * weight / sum(exact) - count) for weight, count in zip(exact, counts, strict=True)))
    assert rota.counts == counts
    return worst


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_every_prefix_has_each_part_within_one_of_its_share(weights: list[float]) -> None:
    assert furthest(weights, 150) <= 1 - Fraction(1, 2 * max(len(weights), 2) - 2)


def test_the_part_that_is_furthest_behind_is_not_always_next() -> None:
    """With these weights the rule that the docstring warns of is off by more than one."""
    weights = [5, 2, 5, 30, 1, 1, 30, 1]
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    counts, worst = [0] * 8, Fraction(0)
    for draw in range(1, 76):
        counts[max(range(8), key=lambda part: draw * shares[part] - counts[part])] += 1
        worst = max(worst, *(abs(draw * share - count) for share, count in zip(shares, counts, strict=True)))
    assert furthest(weights, 75) < 1 < worst


def test_equal_parts_alternate_and_one_part_has_every_draw() -> None:
    rota = Rota([2.0, 2.0])
    assert [rota.next() for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    alone = Rota([0.3])
    assert [alone.next() for _ in range(3)] == [0, 0, 0]


def test_decimal_weights_give_the_draws_of_whole_ones() -> None:
    decimals, whole = Rota([0.1, 0.2, 0.3, 0.4]), Rota([1, 2, 3, 4])
    assert [decimals.next() for _ in range(1000)] == [whole.next() for _ in range(1000)]
    assert decimals.counts == [100, 200, 300, 400]


@pytest.mark.parametrize("stop", [0, 1, 7, 40])
def test_I9_the_counts_are_all_that_there_is_to_remember(stop: int) -> None:
    whole, first = Rota([3, 1, 2.5]), Rota([3, 1, 2.5])
    draws = [whole.next() for _ in range(60)]
    begun = [first.next() for _ in range(stop)]
    resumed = Rota([3, 1, 2.5])
    resumed.counts = list(first.counts)
    assert begun + [resumed.next() for _ in range(60 - stop)] == draws
