"""The fit of the lemma against numpy and values computed by hand."""

import math
import random

import numpy as np
import pytest

from drmas.reproduce.fit import fit, of_moments
from drmas.reproduce.results import Trial


def made(seed: int, points, method: str = "grpo") -> Trial:
    names = ("step", "agent", "rows", "predicted", "pooled", "per_agent", "own", "covariance")
    moments = [dict(zip(names, (step, "a", 8, *point), strict=False)) for step, point in enumerate(points)]
    return Trial.model_validate({"scenario": "s", "method": method, "seed": seed, "status": "ok", "moments": moments})


def test_a_perfect_prediction_has_slope_one_and_explains_everything():
    found = fit([0.5, 1.0, 2.0, 4.0], [0.5, 1.0, 2.0, 4.0])
    assert found == {"slope": 1.0, "r2_log": 1.0, "median_ratio": 1.0, "zeros": 0}


def test_slope_and_share_explained_are_those_of_numpy():
    draw = random.Random(1)
    x = [draw.uniform(0.5, 4) for _ in range(50)]
    y = [1.1 * value * math.exp(draw.gauss(0, 0.2)) for value in x]
    found = fit(x, y)
    assert found["slope"] == pytest.approx(np.linalg.lstsq(np.array(x)[:, None], np.array(y), rcond=None)[0][0])
    logs = np.log(y)
    assert found["r2_log"] == pytest.approx(1 - np.mean((logs - np.log(x)) ** 2) / np.var(logs))
    assert found["median_ratio"] == pytest.approx(np.median(np.array(y) / np.array(x)))


def test_a_prediction_that_says_nothing_explains_less_than_the_mean():
    assert fit([0.5, 1.0, 2.0, 4.0], [4.0, 2.0, 1.0, 0.5])["r2_log"] < 0


def test_a_measured_zero_has_no_logarithm_but_counts_in_the_slope():
    assert fit([1.0, 1.0], [1.0, 0.0]) == {"slope": 0.5, "r2_log": None, "median_ratio": 0.5, "zeros": 1}


def test_ratios_are_of_seeds_and_of_both_halves_of_the_predictions():
    seeds = [made(0, [(1.0, 1.1, 1.0, None), (3.0, 2.7, 1.0, None)]), made(1, [(1.0, 0.9, 0.8, None), (3.0, 3.3, 1.0, None)])]
    found = of_moments(seeds, 3)
    assert (found["count"], found["rows"], found["spread"]) == (4, 32, 1.0)
    assert found["excess"]["value"] == pytest.approx(((0.1 + 1.7) / 2 + (0.1 + 2.3) / 2) / 2)
    assert found["identity"]["n"] == found["covariance"]["n"] == 0
    half = 12.7062 * math.sqrt(0.02) / math.sqrt(2)
    low = found["ratio_low"]
    assert (low["value"], low["low"], low["high"]) == pytest.approx((1.0, 1.0 - half, 1.0 + half), abs=1e-4)
    assert (low["n"], low["of"]) == (2, 3)
    assert found["ratio_high"]["value"] == pytest.approx((0.9 + 1.1) / 2)
    assert found["ratio"]["value"] == pytest.approx((3.8 / 4 + 4.2 / 4) / 2)
    assert found["per_agent"]["value"] == pytest.approx((1.0 + 0.9) / 2)
    assert found["agents"]["a"]["pooled"]["value"] == pytest.approx((1.9 + 2.1) / 2)
    assert found["own"]["grpo"]["value"] is None


def test_predictions_are_small_up_to_a_fixed_value():
    found = of_moments([made(0, [(0.8, 0.8, 1.0, 1.0), (1.2, 3.2, 1.0, 1.0), (1.25, 2.5, 1.0, 1.0)])], 1)
    assert (found["ratio_low"]["value"], found["ratio_high"]["value"]) == (2.0, 2.0)
    assert of_moments([made(0, [(1.2, 1.0, 1.0, 1.0)])], 1)["ratio_high"]["n"] == 0


def test_with_the_covariance_the_lemma_is_arithmetic_and_without_it_isnt():
    found = of_moments([made(0, [(1.0, 1.5, 1.0, 1.0, 0.5), (2.0, 1.0, 1.0, 1.0, -1.0), (1.0, 9.0, 1.0, 1.0, None)])], 1)
    assert (found["identity"]["value"], found["covariance"]["value"]) == (1.0, -0.25)
    assert found["ratio"]["value"] == pytest.approx(11.5 / 4)


def test_the_single_agent_is_left_out():
    assert of_moments([made(0, [(1.0, 1.0, 1.0, 1.0)], method="single-agent")], 1) == {}


def test_bins_hold_their_points():
    trial = made(0, [(1.0, 1.2, 0.9, 1.0), (1.4, 1.3, 1.1, 1.0), (1.5, 1.6, 1.0, 1.0), (0.9, 0.8, 1.0, 1.0)])
    bins = of_moments([trial], 1)["bins"]
    assert [(one["count"], one["predicted"], one["pooled"]) for one in bins] == [
        (1, 0.9, 0.8),
        (2, pytest.approx(1.2), pytest.approx(1.25)),
        (1, 1.5, 1.6),
    ]
    assert [one["low"] for one in bins] == pytest.approx([0.5**0.5, 1.0, 2**0.5])
    assert bins[1]["over_seeds"]["pooled"] == {"value": pytest.approx(1.25), "low": None, "high": None, "n": 1, "of": 1}


def test_points_without_both_numbers_are_left_out():
    assert of_moments([made(0, [(None, 1.0, 1.0, 1.0), (1.0, None, 1.0, 1.0), (math.nan, 1.0, 1.0, 1.0)])], 1) == {}
