import json
import math

import pytest

from drmas.core.advantages import advantages, resolve
from drmas.policy.batch import UpdateResult
from drmas.runtime.record import PolicyReport, StepRecord
from drmas.types import Episode, Failure, Row, Task, Turn, rows_of
from drmas.weights.sync import SyncResult

UPDATE = {
    **{"loss": 0.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100.0, "computed_tokens": 80.0, "tokens_saved": 20.0},
    **{"flops": 4e9, "skipped": 0.0},
}
AGENT = {"tokens": 10.0, "logprob_gap_mean": 1e-6, "logprob_gap_max": 1e-5, "entropy": 1.0, "ratio_min": 0.9, "ratio_max": 1.1}


def episode(sample: int, reward: float | None, *agents: str) -> Episode:
    turns = [Turn(agent, "main", i, [1], [2, 3], [-1.0, -1.0], [0, 0], "stop", "x") for i, agent in enumerate(agents)]
    failure = None if reward is not None else Failure("timeout", "late")
    return Episode(Task("t", "q", "a"), sample, turns, "a", reward, failure)


def metrics_of(record: StepRecord, *episodes: Episode, agents=("solver", "verifier"), **more):
    values = advantages(rows_of(list(episodes)), resolve("dr-mas"))
    return record.metrics(list(episodes), values, agents=agents, retried=0, **more)


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
    report = PolicyReport(version=1)
    for tokens, entropy, norm, low in ((10.0, 1.0, math.nan, 0.9), (30.0, 2.0, 1.0, 0.5)):
        agent = {**AGENT, "tokens": tokens, "entropy": entropy, "ratio_min": low}
        step = UPDATE | {"loss": entropy, "grad_norm": norm, "tokens": tokens, "skipped": float(math.isnan(norm))}
        report.update(UpdateResult(step, {"solver": agent}, seconds=1.0))
    record = StepRecord(policies={"main": report})
    record.add_seconds("train", 2.5)
    metrics = metrics_of(record, episode(0, 1.0, "solver"), peaks={"main": 16e9})
    assert metrics["train/main/solver/entropy"] == pytest.approx(1.75)
    assert metrics["train/main/solver/ratio_min"] == 0.5
    assert metrics["train/main/solver/tokens"] == 40
    assert metrics["train/main/tokens_per_second"] == 20
    assert metrics["train/main/flops"] == 8e9
    assert metrics["train/main/flops_per_second"] == 4e9
    assert metrics["train/main/mfu"] == 0.25
    assert (metrics["train/main/computed_tokens"], metrics["train/main/tokens_saved"]) == (160, 40)
    assert (metrics["train/main/updates"], metrics["train/main/skipped"]) == (1, 1)
    assert math.isnan(metrics["train/main/grad_norm"])
    assert metrics["time/train_seconds"] == 2.5
    assert report.skipped() == [0]


def test_an_agents_gradient_norm_is_the_largest_of_the_updates_that_measured_it() -> None:
    report = PolicyReport(version=3)
    for norm in ({"grad_norm": 2.0}, {}, {"grad_norm": 1.0}):
        report.update(UpdateResult(UPDATE, {"solver": AGENT | norm, "verifier": AGENT}, seconds=1.0))
    metrics = metrics_of(StepRecord(policies={"main": report}), episode(0, 1.0, "solver", "verifier"))
    assert metrics["train/main/solver/grad_norm"] == 2.0
    assert "train/main/verifier/grad_norm" not in metrics


def test_the_teams_saved_tokens_and_memory_are_those_of_all_policies() -> None:
    reports = {name: PolicyReport(version=1, peak_memory_bytes=peak) for name, peak in (("one", 5.0), ("other", 9.0))}
    reports["one"].update(UpdateResult(UPDATE, {}, seconds=1.0))
    for _ in range(2):
        reports["other"].update(UpdateResult(UPDATE | {"tokens_saved": 7.0}, {}, seconds=1.0))
    metrics = metrics_of(StepRecord(policies=reports), episode(0, 1.0, "solver"))
    assert metrics["train/tokens_saved"] == 34
    assert metrics["train/peak_memory_bytes"] == 9


def test_a_policy_without_rows_shows_that_it_idled_and_a_frozen_one_nothing() -> None:
    frozen = PolicyReport(version=0, trainable=False, rows=3)
    metrics = metrics_of(StepRecord(policies={"idle": PolicyReport(version=4), "frozen": frozen}), episode(0, 1.0, "solver"))
    of_policies = {key: value for key, value in metrics.items() if key.startswith(("train/idle", "train/frozen"))}
    assert of_policies == {"train/idle/rows": 0, "train/idle/updates": 0, "train/idle/skipped": 0}
    assert metrics["sync/idle/version"] == 4


def test_I11_the_gap_is_that_of_the_weights_that_sampled() -> None:
    """With a pass before the updates, what the updates report about their own gap does not count."""
    report = PolicyReport(version=0)
    row = Row("t", "t#0", "solver", "main", 0, [1], [2, 3], [-1.0, -2.0], [0, 0], 1.0)
    report.logprob_gap([row], [[-1.0, -2.5]])
    report.update(UpdateResult(UPDATE, {"solver": {**AGENT, "logprob_gap_max": 9.0}, "verifier": AGENT}, seconds=1.0))
    metrics = metrics_of(StepRecord(policies={"main": report}), episode(0, 1.0, "solver", "verifier"))
    assert metrics["rollout/solver/logprob_gap_mean"] == pytest.approx(0.25)
    assert metrics["rollout/solver/logprob_gap_max"] == pytest.approx(0.5)
    assert metrics["rollout/verifier/logprob_gap_max"] == pytest.approx(1e-5)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx((0.5 + 10 * 1e-6) / 12)


def test_a_report_survives_its_way_to_the_other_ranks() -> None:
    report = PolicyReport(version=2, rows=5, peak_memory_bytes=7.0)
    report.update(UpdateResult(UPDATE | {"grad_norm": math.inf}, {"solver": AGENT}, seconds=0.25))
    assert PolicyReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_every_push_of_a_step_counts() -> None:
    record = StepRecord()
    record.sync(SyncResult(1.0, 100))
    record.sync(SyncResult(0.5, 100))
    metrics = metrics_of(record, episode(0, 1.0, "solver"))
    assert (metrics["sync/seconds"], metrics["sync/bytes"]) == (1.5, 200)
