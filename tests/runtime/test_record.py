import math

import pytest

from drmas.core.advantages import advantages, resolve
from drmas.policy.batch import UpdateResult
from drmas.runtime.record import StepRecord
from drmas.types import Episode, Failure, Row, Task, Turn, rows_of
from drmas.weights.sync import SyncResult

AGENT = {"tokens": 10.0, "logprob_gap_mean": 1e-6, "logprob_gap_max": 1e-5, "entropy": 1.0, "ratio_min": 0.9, "ratio_max": 1.1}


def episode(sample: int, reward: float | None, *agents: str) -> Episode:
    turns = [Turn(agent, "main", i, [1], [2, 3], [-1.0, -1.0], [0, 0], "stop", "x") for i, agent in enumerate(agents)]
    failure = None if reward is not None else Failure("timeout", "late")
    return Episode(Task("t", "q", "a"), sample, turns, "a", reward, failure)


def metrics_of(record: StepRecord, *episodes: Episode, agents=("solver", "verifier")):
    values = advantages(rows_of(list(episodes)), resolve("dr-mas"))
    return record.metrics(list(episodes), values, agents=agents, retried=0)


def test_I8_every_agent_has_its_numbers_and_an_idle_one_has_rows_0() -> None:
    record = StepRecord()
    metrics = metrics_of(
        record, episode(0, 1.0, "solver", "verifier"), episode(1, 0.0, "solver"), agents=("solver", "verifier", "idle")
    )
    assert metrics["reward/mean"] == 0.5
    assert (metrics["rollout/solver/reward_mean"], metrics["rollout/verifier/reward_mean"]) == (0.5, 1.0)
    assert [metrics[f"rollout/{agent}/rows"] for agent in ("solver", "verifier", "idle")] == [2, 1, 0]
    assert not [key for key in metrics if key.startswith("rollout/idle/") and not key.endswith("/rows")]
    assert metrics["advantage/solver/inflation_factor"] == pytest.approx(1.0)
    assert metrics["advantage/verifier/inflation_factor"] == pytest.approx(1.0)  # (0 + (1 - 0.5)^2) / 0.25
    assert metrics["advantage/verifier/singleton_share"] == 1.0


def test_I3_failed_episodes_are_counted_by_kind_and_nowhere_else() -> None:
    metrics = metrics_of(StepRecord(), episode(0, 1.0, "solver"), episode(1, None, "solver"))
    assert metrics["rollout/failed/timeout"] == 1
    assert metrics["reward/mean"] == 1.0
    assert metrics["rollout/solver/rows"] == 1


def test_several_updates_merge_by_tokens_and_a_broken_norm_stays_visible() -> None:
    record = StepRecord()
    for tokens, entropy, norm, low in ((10.0, 1.0, math.nan, 0.9), (30.0, 2.0, 1.0, 0.5)):
        agent = {**AGENT, "tokens": tokens, "entropy": entropy, "ratio_min": low}
        step = {"loss": entropy, "grad_norm": norm, "lr": 1e-3, "tokens": tokens, "skipped": 0.0}
        record.update("main", UpdateResult(step, {"solver": agent}))
    record.add_seconds(("train", "main"), 2.0)
    metrics = metrics_of(record, episode(0, 1.0, "solver"))
    assert metrics["train/main/solver/entropy"] == pytest.approx(1.75)
    assert metrics["train/main/solver/ratio_min"] == 0.5
    assert metrics["train/main/solver/tokens"] == 40
    assert metrics["train/main/tokens_per_second"] == 20
    assert math.isnan(metrics["train/main/grad_norm"])
    assert metrics["time/train_seconds"] == 2.0


def test_I11_the_gap_is_that_of_the_weights_that_sampled() -> None:
    """With a pass before the updates, what the updates report about their own gap does not count."""
    record = StepRecord()
    row = Row("t", "t#0", "solver", "main", 0, [1], [2, 3], [-1.0, -2.0], [0, 0], 1.0)
    record.logprob_gap([row], [[-1.0, -2.5]])
    record.update("main", UpdateResult({"tokens": 3.0}, {"solver": {**AGENT, "logprob_gap_max": 9.0}, "verifier": AGENT}))
    metrics = metrics_of(record, episode(0, 1.0, "solver", "verifier"))
    assert metrics["rollout/solver/logprob_gap_mean"] == pytest.approx(0.25)
    assert metrics["rollout/solver/logprob_gap_max"] == pytest.approx(0.5)
    assert metrics["rollout/verifier/logprob_gap_max"] == pytest.approx(1e-5)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx((0.5 + 10 * 1e-6) / 12)


def test_every_push_of_a_step_counts() -> None:
    record = StepRecord()
    record.sync(SyncResult(1.0, 100))
    record.sync(SyncResult(0.5, 100))
    metrics = metrics_of(record, episode(0, 1.0, "solver"))
    assert (metrics["sync/seconds"], metrics["sync/bytes"]) == (1.5, 200)
