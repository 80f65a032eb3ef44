"""Lengths against sampled ones, and a step's sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drmas.planning.types import EngineSpeed, Layout, Lengths, Phases


@pytest.mark.parametrize(("mean", "spread", "cap"), [(800.0, 0.8, 2000), (30.0, 0.3, 24), (7.0, 1.5, 10**6)])
def test_moments_and_quantiles_are_those_of_samples(mean, spread, cap):
    lengths = Lengths(mean, spread, cap)
    normal = np.random.default_rng(0).normal(np.log(mean) - spread**2 / 2, spread, 2 * 10**6)
    samples = np.minimum(np.exp(normal), cap)
    assert lengths.moment(1) == pytest.approx(samples.mean(), rel=0.01)
    assert lengths.moment(2) == pytest.approx((samples**2).mean(), rel=0.05)
    assert lengths.quantile(0.9) == pytest.approx(np.quantile(samples, 0.9), rel=0.01)
    assert lengths.longest(3) == lengths.quantile(0.75)


def test_without_spread_all_are_equal():
    assert [Lengths(5.0, 0.0, 32).moment(k) for k in (1, 2)] == [5.0, 25.0]
    assert Lengths(50.0, 0.0, 40).moment(2) == 1600.0
    assert Lengths(50.0, 0.0, 40).longest(1000) == 40


@given(st.floats(1, 900), st.floats(0.05, 2.0))
def test_fitted_lengths_have_the_mean_that_a_run_shows(mean, spread):
    fitted = Lengths.fitted(mean, spread, 1000)
    assert fitted.moment(1) == pytest.approx(mean, rel=1e-6)
    assert fitted.mean >= mean
    assert fitted.longest(64) <= 1000


def test_a_mean_at_the_cap_leaves_no_spread():
    assert Lengths.fitted(40.0, 0.6, 40) == Lengths(40.0, 0.0, 40)


def test_a_step_adds_its_phases_up_and_hides_the_shorter_one_when_rollouts_run_ahead():
    apart = Phases(rollout=10, score=1, train=5, sync=0.5, wake=2, other=0.25)
    assert apart.step == 18.75
    assert Phases(rollout=10, score=1, train=5, sync=0.5, wake=0, other=0.25, ahead=True).step == 10.75
    assert Phases(rollout=4, score=1, train=5, sync=0.5, wake=0, other=0.25, ahead=True).step == 6.75


def test_a_decode_step_takes_the_longer_of_reads_and_products():
    speed = EngineSpeed(4e-3, 1e-6, 1e-4, 1e-8, 1e-3, 2e-4, slots=8, kv_tokens=100, sequence_seconds=1e-5)
    assert speed.step_seconds(1, 1000) == pytest.approx(4e-3 + 1e-3 + 1e-3 + 1e-5)  # reads
    assert speed.step_seconds(100, 1000) == pytest.approx(1e-2 + 1e-5 + 1e-3 + 1e-3)  # products
    assert speed.prefill_seconds(100, 5000) == pytest.approx(2e-2)


def test_a_layout_counts_replicas_and_engine_devices():
    layout = Layout(16, 2, 2, 2, engine_tensor_parallel=4, replicas=3, gpus="own")
    assert (layout.data_parallel, layout.engine_gpus) == (2, 12)
