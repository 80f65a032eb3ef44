"""Student's quantiles against tables and against an independent integral; intervals against values computed by hand."""

import math

import pytest

from drmas.reproduce.intervals import differences as list_of
from drmas.reproduce.intervals import estimate, paired, t_quantile

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 7: 2.3646, 9: 2.2622, 10: 2.2281, 29: 2.0452, 120: 1.9799}


@pytest.mark.parametrize(("freedom", "expected"), TABLE.items())
def test_quantiles_are_those_of_the_tables(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 6, 11])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_the_density_integrates_to_the_level(freedom, level):
    t, pieces = t_quantile(freedom, level), 20_000
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    step = t / pieces
    inside = [(1 + ((i + 0.5) * step) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(pieces)]
    assert 2 * constant * step * math.fsum(inside) == pytest.approx(level, abs=1e-6)


def test_a_mean_with_its_interval():
    found = estimate([1.0, 2.0, 3.0], of=5)
    half = 4.302653 * 1.0 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), abs=1e-5)
    assert (found.n, found.of) == (3, 5)


def test_what_is_missing_or_not_finite_counts_nowhere():
    assert estimate([1.0, None, 3.0, math.nan, math.inf]) == estimate([1.0, 3.0], of=5)
    assert (estimate([0.5]).low, estimate([0.5]).n) == (None, 1)
    assert (estimate([None]).value, estimate([None]).n) == (None, 0)


def test_huge_values_and_values_that_are_one_number():
    assert estimate([1e200, 2e200, 3e200]).high == pytest.approx(2e200 + 4.302653e200 / math.sqrt(3))
    same = estimate([0.1, 0.1, 0.1])
    assert same.low == same.high == same.value


def test_pairs_are_made_by_seed():
    left, right = {0: 0.5, 1: 0.9, 2: 0.4, 7: 1.0}, {2: 0.1, 1: 0.5, 0: 0.3, 8: 0.0}
    found = paired(left, right)
    differences = [0.2, 0.4, 0.3]
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert found.value == pytest.approx(math.fsum(differences) / 3)
    assert (found.low, found.high) == pytest.approx((0.3 - half, 0.3 + half), abs=1e-5)
    assert list_of(left, right) == pytest.approx([0.2, 0.4, 0.3])
    assert paired({0: None, 1: 0.5}, {0: 0.1, 1: 0.25}).value == 0.25
