"""What probe episodes come to: which rewards are baselines, and their metrics."""

from __future__ import annotations

import pytest

from drmas.core.estimators.base import Probe
from drmas.runtime.probes import baselines, probe_metrics
from drmas.types import Episode, Failure, Task, Turn

PROBES = {
    probe.name: probe
    for probe in (Probe("greedy", greedy=True), Probe("without a b", 2, without="a b"), Probe("without c.d", without="c.d"))
}


def played(task: str, probe: str | None, sample: int, reward: float | None, **agent_rewards: float) -> Episode:
    failure = Failure("tool", "down") if reward is None else None
    return Episode(
        Task(task, "q", "1"), sample, reward=reward, failure=failure, agent_rewards=agent_rewards, probe=probe, answer="1"
    )


@pytest.fixture
def episodes() -> list[Episode]:
    return [
        played("t", None, 0, 0.25),
        played("t", "greedy", -1, 1.0),
        played("t", "without a b", -2, 0.5),
        played("t", "without a b", -3, None),
        played("t", "without c.d", -4, 0.0),
        played("u", None, 0, None),
        played("u", "greedy", -1, None),
        played("u", "without a b", -2, 0.125),
        played("u", "without a b", -3, 0.625),
        played("u", "without c.d", -4, None),
    ]


def test_I3_baselines_are_of_finished_probes_alone(episodes) -> None:
    assert baselines(episodes, PROBES) == {
        "t": {"greedy": [1.0], "without a b": [0.5], "without c.d": [0.0]},
        "u": {"without a b": [0.125, 0.625]},
    }
    assert baselines(episodes[:1], {}) == {}


def test_the_baseline_of_an_agent_that_is_rewarded_apart_is_its_own_reward() -> None:
    found = baselines(
        [
            played("t", "greedy", -1, 0.5, **{"a b": -1.0, "c.d": 1.0}),
            played("t", "without a b", -2, 0.5, **{"a b": -1.0, "c.d": 1.0}),
            played("t", "without c.d", -4, 0.5, **{"a b": -1.0}),
        ],
        PROBES,
    )
    apart = {"greedy, a b": [-1.0], "greedy, c.d": [1.0]}
    assert found == {"t": {"greedy": [0.5], "without a b": [-1.0], "without c.d": [0.5], **apart}}


def test_metrics_have_a_mean_per_probe_and_failures_by_kind(episodes) -> None:
    for episode, size in ((episodes[0], 7), (episodes[1], 3), (episodes[3], 2)):  # of a group, of a probe, of a failed one
        episode.turns = [Turn("a b", "main", 0, [1], [2] * size, [0.0] * size, [0] * size, "stop", "x")]
    assert probe_metrics(episodes, PROBES) == {
        "rollout/probe_episodes": 8,
        "rollout/probe_tokens": 5,
        "reward/probe/greedy": 1.0,
        "reward/probe/without_a_b": pytest.approx((0.5 + 0.125 + 0.625) / 3),
        "reward/probe/without_c.d": 0.0,
        "rollout/probe_failed/tool": 3,
    }
    assert probe_metrics(episodes[:1], {}) == {}
    assert probe_metrics(episodes[6:7], {"greedy": PROBES["greedy"]}) == {
        "rollout/probe_episodes": 1,
        "rollout/probe_tokens": 0,
        "reward/probe/greedy": None,
        "rollout/probe_failed/tool": 1,
    }
