"""A recipe's floor against the same counts by hand."""

from __future__ import annotations

import pytest

from bench.recipe_floor import CALLS, floor
from drmas.config.load import load

GPU = "NVIDIA H100 80GB HBM3"


def test_training_costs_thrice_what_generating_does_and_both_about_six_and_two_per_parameter():
    config = load("paper-maths-4b")
    found = floor(config, prompt=100, response=300, calls={"solver": 1.5, "verifier": 1}, gpu=GPU)
    rows = 256 * 1.5 + 256
    layers = 4_022_468_096 - 151936 * 2560  # the embedding is looked up; the head, tied to it, sees response tokens only
    products = 2 * rows * (layers * 400 + 151936 * 2560 * 300)
    attention = rows * 36 * 4 * 32 * 128 * 400 * 401 // 2
    assert found.rollout_flops == pytest.approx(products + attention, rel=1e-3)  # norms are in the parameters, not in the FLOPs
    assert found.train_flops == 3 * found.rollout_flops
    assert found.seconds == pytest.approx((found.rollout_flops + found.train_flops) / (4 * 989e12))


def test_every_agent_counts_with_its_own_model():
    config = load("paper-search-heterogeneous")
    one = {
        name: floor(config, prompt=600, response=100, calls=dict.fromkeys(CALLS, 0) | {name: 1}, gpu=GPU)
        for name in config.policies
    }
    every = floor(config, prompt=600, response=100, calls=dict.fromkeys(CALLS, 1), gpu=GPU)
    assert sum(each.train_flops for each in one.values()) == every.train_flops
    assert one["searcher"] == one["answerer"]
    assert 2 < one["router"].train_flops / one["searcher"].train_flops < 2.6
