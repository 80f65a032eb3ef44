"""pass@k against all subsets, intervals against binomial quantiles, and both by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drmas.core.statistics import Interval, avg_at_k, mean_interval, pass_at_k
from drmas.errors import DataError


@st.composite
def tries(draw, most: int = 64) -> tuple[int, int]:
    n = draw(st.integers(1, most))
    return n, draw(st.integers(0, n))


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 4, 1.0),  # drawing with replacement would say 1 - (3/4)^4 = 0.68
        (10, 3, 5, 11 / 12),
        (16, 2, 8, 23 / 30),
        (4, 1, 2, 0.5),
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@given(tries(most=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(pair, data) -> None:
    n, c = pair
    k = data.draw(st.integers(1, n))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@given(tries(), st.data())
def test_pass_at_k_is_a_probability_that_grows_with_successes_and_with_k(pair, data) -> None:
    n, c = pair
    k = data.draw(st.integers(1, n))
    here = pass_at_k(n, c, k)
    assert 0.0 <= here <= 1.0
    assert (here == 0.0) == (c == 0)
    assert (here == 1.0) == (n - c < k)
    assert k == n or pass_at_k(n, c, k + 1) >= here
    assert c == n or pass_at_k(n, c + 1, k) >= here
    assert pass_at_k(n, c, 1) == avg_at_k(n, c) <= here


@given(st.floats(0.05, 0.95), st.integers(1, 4))
def test_pass_at_k_has_no_bias(p: float, k: int) -> None:
    """Its mean over the successes of 6 tries at rate p is the chance of a success in k tries."""
    chances = [math.comb(6, c) * p**c * (1 - p) ** (6 - c) for c in range(7)]
    mean = math.fsum(chance * pass_at_k(6, c, k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_of_many_tries_is_exact() -> None:
    """1 - prod (n - c - i) / (n - i), where the binomials themselves are past the largest float."""
    n, c, k = 4000, 3, 1000
    product = math.exp(math.fsum(math.log1p(-c / (n - i)) for i in range(k)))
    assert pass_at_k(n, c, k) == pytest.approx(1 - product, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 1, -1), (4, 5, 1), (4, -1, 1), (0, 0, 1), (-2, 0, 1)])
def test_counts_that_cannot_be_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(DataError, match="tries"):
        pass_at_k(n, c, k)
    if 0 <= c <= n and n > 0:
        assert avg_at_k(n, c) == c / n
    else:
        with pytest.raises(DataError, match=f"{c} successes in {n} tries"):
            avg_at_k(n, c)


HALF = [0.0, 1.0] * 5


def test_the_micro_mean_and_its_interval_by_the_binomial_quantiles() -> None:
    """The resampled mean of ten tasks, half of them solved, is Binomial(10, 1/2) / 10: P(X <= 1) = 0.011, P(X <= 2) = 0.055."""
    assert mean_interval(HALF, resamples=4000, seed=1) == Interval(0.5, 0.2, 0.8)
    # P(X <= 3) = 0.172, P(X <= 4) = 0.377
    assert mean_interval(HALF, resamples=4000, seed=1, level=0.5) == Interval(0.5, 0.4, 0.6)


def test_the_macro_mean_weighs_sources_equally_and_resamples_within_them() -> None:
    values, sources = [*HALF, *[1.0] * 4], ["a"] * 10 + ["b"] * 4
    assert mean_interval(values, sources, resamples=4000, seed=1) == Interval(0.75, 0.6, 0.9)
    assert mean_interval(values, resamples=100, seed=1).value == pytest.approx(9 / 14)
    shuffled = [*values[10:], *values[:10]], [*sources[10:], *sources[:10]]
    assert mean_interval(*shuffled, resamples=4000, seed=1) == Interval(0.75, 0.6, 0.9)


def test_the_interval_of_paired_differences_is_narrower_than_that_of_independent_ones() -> None:
    """Two evaluations that differ by 0.1 on every task differ by 0.1, whatever the spread of the tasks."""
    team, other = [value + 0.1 for value in HALF], HALF
    paired = mean_interval([a - b for a, b in zip(team, other, strict=True)], resamples=1000, seed=0)
    assert paired.low == pytest.approx(0.1)
    assert paired.high == pytest.approx(0.1)
    assert mean_interval(team, resamples=1000, seed=0).low < 0.4


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20), st.integers(0, 5))
def test_an_interval_lies_between_the_smallest_and_the_largest_value_and_follows_its_seed(values, seed: int) -> None:
    found = mean_interval(values, resamples=50, seed=seed)
    assert min(values) - 1e-12 <= found.low <= found.high <= max(values) + 1e-12
    assert found.value == pytest.approx(math.fsum(values) / len(values))
    assert found == mean_interval(values, resamples=50, seed=seed)


def test_blocks_of_draws_give_what_one_block_gives(monkeypatch) -> None:
    whole = mean_interval(HALF, resamples=1000, seed=3)
    monkeypatch.setattr("drmas.core.statistics._BLOCK", 32)
    assert mean_interval(HALF, resamples=1000, seed=3) == whole


def test_one_task_has_a_mean_and_no_interval() -> None:
    assert mean_interval([0.25], resamples=100, seed=0) == Interval(0.25, None, None)
    assert mean_interval([0.25, 0.5, 1.0], ["a", "a", "b"], resamples=100, seed=0) == Interval(0.6875, None, None)


def test_no_tasks_have_no_mean() -> None:
    with pytest.raises(DataError, match="no tasks"):
        mean_interval([], resamples=100, seed=0)
