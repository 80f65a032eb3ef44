"""Steps in virtual time: what an on-policy step adds up to, what running ahead saves, and how stale rollouts become."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.config.schema import RolloutConfig
from drmas.errors import ConfigError
from drmas.planning.measured import Fixed
from drmas.planning.pipeline import Beside, simulate_steps, steady
from drmas.planning.simulation import simulate
from drmas.planning.types import AgentLoad, Engines, EngineSpeed, Lengths, Workload
from drmas.planning.workload import Chains

PLAIN = EngineSpeed(0.1, 0.0, 0.0, 0.0, 0.0, 0.0, slots=64, kv_tokens=10**6)
ON_POLICY = RolloutConfig(deterministic=False)
AHEAD = RolloutConfig(deterministic=False, max_staleness=1)
CARRIED = RolloutConfig(deterministic=False, max_staleness=1, carry_over=True)
FAR = RolloutConfig(deterministic=False, max_staleness=3, carry_over=True)


def work(spread: float = 0.0, *, tasks: int = 8, cap: int = 400) -> Workload:
    agents = (AgentLoad("solver", "main", 1.0, 20.0, 0.0, Lengths.fitted(50.0, spread, cap)),)
    return Workload(agents, tasks, 4, 10**6)


def run(config, load: Workload, *, train: float = 5.0, sync: float = 0.5, other: float = 0.25, speed=PLAIN, steps=8, **options):
    return simulate_steps(load, {"main": Engines(speed)}, Beside(train, {"main": sync}, other), config, steps=steps, **options)


def test_an_on_policy_step_is_the_sum_of_its_parts():
    for step in run(ON_POLICY, work()):
        assert (step.rollout, step.train) == (pytest.approx(5.0), pytest.approx(5.0))
        assert step.seconds == pytest.approx(5 + 5 + 0.5 + 0.25)
        assert (step.lag_mean, step.lag_max, step.tokens) == (0.0, 0, 32 * 70)
        assert step.busy["main"] == pytest.approx(5.0)


def test_its_rollout_is_the_simulated_one():
    load = work(0.8)
    groups = Chains().groups(load, 256, numpy.random.default_rng(5))
    alone = simulate(load, {"main": Engines(PLAIN)}, source=Fixed(groups[:8]))
    first, second, *_ = run(ON_POLICY, load, seed=5)
    assert first.rollout == pytest.approx(alone.seconds)
    assert first.rollout != pytest.approx(second.rollout)


def test_a_step_with_more_tokens_trains_for_longer():
    load = work(0.8)
    steps = run(ON_POLICY, load)
    assert len({step.tokens for step in steps}) > 4
    for step in steps:
        assert step.train == pytest.approx(5.0 * step.tokens / (32 * 70), rel=1e-6)


@pytest.mark.parametrize(("train", "step"), [(5.0, 5.0), (8.0, 8.0), (3.0, 5.0)])
def test_a_step_ahead_takes_the_longer_of_both(train, step):
    found = steady(run(AHEAD, work(), train=train, sync=0.0, other=0.0))
    assert found.seconds == pytest.approx(step)
    assert found.lag_mean == 1.0
    assert found.trainer_idle == pytest.approx(1 - train / step)
    assert found.engine_idle["main"] == pytest.approx(1 - 5 / step)
    assert found.bottleneck == "train"


@settings(max_examples=12, deadline=None)
@given(st.floats(0.5, 20), st.floats(0, 1.2), st.sampled_from([AHEAD, CARRIED, FAR]), st.integers(0, 9))
def test_running_ahead_lies_between_the_longer_part_and_the_sum(train, spread, config, seed):
    load = work(spread)
    alone = steady(run(ON_POLICY, load, train=train, seed=seed, steps=30), skip=0)
    ahead = steady(run(config, load, train=train, seed=seed, steps=30), skip=6)
    busy = ahead.seconds * (1 - ahead.engine_idle["main"])
    assert ahead.seconds >= ahead.train + 0.75 - 1e-6
    assert ahead.seconds >= busy - 1e-6
    assert ahead.seconds <= 1.15 * alone.seconds  # steps are drawn in another order
    if config is AHEAD:
        assert ahead.seconds >= 0.85 * max(alone.rollout, alone.train)


def test_carried_over_episodes_don_t_wait_for_the_longest():
    load = work(1.2, cap=4000)
    options = {"train": 1.0, "steps": 24}
    behind, ahead, carried, far = (steady(run(config, load, **options)) for config in (ON_POLICY, AHEAD, CARRIED, FAR))
    assert behind.seconds > ahead.seconds > carried.seconds > far.seconds
    assert (ahead.lag_max, carried.lag_max) == (1, 1)
    assert 1 < far.lag_mean <= far.lag_max <= 3


def test_a_step_ahead_ends_with_nothing_in_flight():
    """Weights never arrive under a request, so nothing is prefilled again."""
    speed = replace(PLAIN, prefill_token_seconds=0.01)
    found = steady(run(AHEAD, work(), train=1.0, speed=speed))
    assert found.seconds == pytest.approx(32 * 20 * 0.01 + 50 * 0.1 + 0.5 + 0.25)
    carried = steady(run(CARRIED, work(), train=1.0, speed=speed))
    assert carried.seconds > found.seconds


def test_a_trainer_on_the_engines_devices_gains_nothing():
    alone = steady(run(ON_POLICY, work(), sync=0.0, other=0.0))
    shared = steady(run(AHEAD, work(), sync=0.0, other=0.0, trainer_shares=True))
    assert shared.seconds == pytest.approx(alone.seconds)


def test_policies_are_synced_one_after_the_other_and_what_is_in_flight_stands():
    agents = tuple(AgentLoad(name, name, 1.0, 20.0, 0.0, Lengths(50.0)) for name in ("a", "b"))
    load = Workload(agents, 4, 2, 10**6)
    beside = Beside(1.0, {"a": 2.0, "b": 3.0})
    steps = simulate_steps(load, {name: Engines(PLAIN) for name in ("a", "b")}, beside, FAR, steps=6)
    assert {step.sync for step in steps} == {5.0}


def test_deterministic_replicas_take_twice_as_long_where_tails_are_long_and_one_engine_as_long():
    agents = (
        AgentLoad("solver", "main", 1.0, 10.0, 0.0, Lengths.fitted(200, 1.0, 2000)),
        AgentLoad("verifier", "main", 1.5, 10.0, 0.0, Lengths.fitted(50, 0.5, 1000)),
    )
    load, speed = Workload(agents, 32, 8, 10**6), replace(PLAIN, sequence_seconds=1e-4)
    ratios = []
    for replicas in (4, 1):
        engines = {"main": Engines(speed, replicas=replicas)}
        free, barred = (
            steady(simulate_steps(load, engines, Beside(1.0, {}), config, steps=4), skip=0)
            for config in (ON_POLICY, RolloutConfig())
        )
        ratios.append(barred.rollout / free.rollout)
    assert 1.7 < ratios[0] < 2.8
    assert ratios[1] == pytest.approx(1.0, abs=0.02)


def test_a_sequence_without_room_is_refused():
    with pytest.raises(ConfigError, match=r"engine of main has room for 60 tokens, solver a sequence of 70; .*policies\.main"):
        run(ON_POLICY, work(), speed=replace(PLAIN, kv_tokens=60))
