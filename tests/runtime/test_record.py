import json
import math

import pytest

from drmas.core.estimators import resolve
from drmas.core.moments import AgentMoments
from drmas.policy.batch import UpdateResult
from drmas.policy.gaps import Gap
from drmas.runtime.record import PolicyReport, StepRecord
from drmas.types import Episode, Failure, Row, Task, ToolUse, Turn, rows_of
from drmas.weights.sync import SyncResult

UPDATE = {
    **{"loss": 0.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100.0, "computed_tokens": 80.0, "tokens_saved": 20.0},
    **{"flops": 4e9, "skipped": 0.0},
}
AGENT = {"tokens": 10.0, "entropy": 1.0, "ratio_min": 0.9, "ratio_max": 1.1}


def turn(agent: str, index: int, **more) -> Turn:
    given = {"prompt_ids": [1], "response_ids": [2, 3], "logprobs": [-1.0, -1.0], "versions": [0, 0], "finish_reason": "stop"}
    return Turn(agent, index=index, **({"policy": "main", "text": "x"} | given | more))


def episode(sample: int, reward: float | None, *agents: str | Turn, uses: tuple[ToolUse, ...] = ()) -> Episode:
    turns = [turn(agent, i) if isinstance(agent, str) else agent for i, agent in enumerate(agents)]
    failure = None if reward is not None else Failure("timeout", "late")
    return Episode(Task("t", "q", "a"), sample, turns, "a", reward, failure, tool_uses=list(uses))


def metrics_of(record: StepRecord, *episodes: Episode, agents=("solver", "verifier"), **more):
    values = resolve("dr-mas")(rows_of(list(episodes)))
    return record.metrics(list(episodes), values, agents=agents, **more)


def test_I8_every_agent_has_its_numbers_and_an_idle_one_shows_that_it_idled() -> None:
    record = StepRecord()
    metrics = metrics_of(
        record, episode(0, 1.0, "solver", "verifier"), episode(1, 0.0, "solver"), agents=("solver", "verifier", "idle")
    )
    assert metrics["reward/mean"] == 0.5
    assert (metrics["rollout/solver/reward_mean"], metrics["rollout/verifier/reward_mean"]) == (0.5, 1.0)
    assert [metrics[f"rollout/{agent}/rows"] for agent in ("solver", "verifier", "idle")] == [2, 1, 0]
    idle = {key: value for key, value in metrics.items() if "idle/" in key}
    assert idle == {"rollout/idle/rows": 0, "rollout/idle/idle_share": 1.0}
    assert [metrics[f"rollout/{agent}/idle_share"] for agent in ("solver", "verifier")] == [0.0, 0.5]
    assert metrics["advantage/solver/inflation_factor"] == pytest.approx(1.0)
    assert metrics["advantage/verifier/inflation_factor"] == pytest.approx(1.0)  # (0 + (1 - 0.5)^2) / 0.25
    assert metrics["advantage/verifier/singleton_share"] == 1.0


def test_tokens_per_second_counts_the_tokens_of_probes_that_ran_in_these_seconds() -> None:
    record = StepRecord()
    record.add_seconds("rollout", 2.0)
    metrics = metrics_of(record, episode(0, 1.0, "solver", "verifier"), probe_tokens=16)
    assert (metrics["rollout/tokens"], metrics["rollout/tokens_per_second"]) == (4, 10.0)


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


def test_moments_of_gradients_stand_in_steps_that_measured_them() -> None:
    record = StepRecord(moments={"solver": AgentMoments(2, 3.0, 1.5, 1.25, 1.0, None, 0.25)})
    record.add_seconds("moments", 0.5)
    metrics = metrics_of(record, episode(0, 1.0, "solver", "verifier"))
    expected = {"rows": 2, "score": 3.0, "pooled": 1.5, "predicted": 1.25, "per_agent": 1.0, "own": None, "covariance": 0.25}
    found = {key: value for key, value in metrics.items() if "moments" in key}
    assert found == {f"moments/solver/{name}": value for name, value in expected.items()} | {"time/moments_seconds": 0.5}
    assert not any("moments" in key for key in metrics_of(StepRecord(), episode(0, 1.0, "solver")))


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
    gaps = {"solver": Gap(2.0, 18.0, 9.0), "verifier": Gap(10.0, 1e-5, 1e-5, {"t#0/1": 1e-6})}
    report.update(UpdateResult(UPDATE, {"solver": AGENT, "verifier": AGENT}, seconds=1.0, gaps=gaps))
    report.update(UpdateResult(UPDATE, {"solver": AGENT}, seconds=1.0))
    record = StepRecord(policies={"main": report})
    metrics = metrics_of(record, episode(0, 1.0, "solver", "verifier"))
    assert metrics["rollout/solver/logprob_gap_mean"] == pytest.approx(0.25)
    assert metrics["rollout/solver/logprob_gap_max"] == pytest.approx(0.5)
    assert metrics["rollout/verifier/logprob_gap_max"] == pytest.approx(1e-5)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx((0.5 + 10 * 1e-6) / 12)
    assert record.gap_rows() == {"solver": ["t#0/0"], "verifier": ["t#0/1"]}


def test_I11_rows_of_older_versions_are_in_no_gap() -> None:
    """Fresh is what the version before the step's updates sampled, of which the report's own becomes another."""
    report = PolicyReport(version=3)
    rows = [
        Row("t", f"t#{i}", "solver", "main", 0, [1], [2, 3], [-1.0, -2.0], versions, 1.0)
        for i, versions in enumerate([[3, 3], [2, 3], [2, 2]])
    ]
    report.logprob_gap(rows, [[-1.0, -2.5], [-9.0, -2.0], [-9.0, -9.0]])
    report.version = 4
    metrics = metrics_of(StepRecord(policies={"main": report}), episode(0, 1.0, "solver"))
    assert metrics["rollout/solver/logprob_gap_mean"] == pytest.approx(0.25)
    assert metrics["rollout/solver/logprob_gap_max"] == pytest.approx(0.5)
    stale = PolicyReport(version=3)
    stale.logprob_gap(rows[1:], [[-9.0, -2.0], [-9.0, -9.0]])
    metrics = metrics_of(StepRecord(policies={"main": stale}), episode(0, 1.0, "solver"))
    assert "rollout/solver/logprob_gap_mean" not in metrics
    assert metrics["rollout/logprob_gap_mean"] is None


def test_a_gap_names_its_ten_worst_rows_and_keeps_what_is_no_number() -> None:
    gap = Gap()
    for i in range(12):
        gap.add(f"t#{i}/0", tokens=2, total=float(i), largest=float(i))
    assert list(gap.worst) == [f"t#{i}/0" for i in range(11, 1, -1)]
    assert (gap.tokens, gap.mean, gap.largest) == (24, 66 / 24, 11.0)
    gap.add("t#12/0", tokens=1, total=math.nan, largest=math.nan)
    gap.add("t#13/0", tokens=1, total=20.0, largest=20.0)
    assert list(gap.worst)[:3] == ["t#12/0", "t#13/0", "t#11/0"]
    assert math.isnan(gap.mean)
    assert math.isnan(gap.largest)
    assert Gap().mean is None


def test_the_lag_is_counted_in_versions_from_before_the_updates() -> None:
    report = PolicyReport(version=6)
    report.version = 8
    solver = [turn("solver", 0, versions=[6, 6]), turn("solver", 1, versions=[4, 6]), turn("solver", 2, versions=[3, 3])]
    solver[2].stale = True
    failed = episode(1, None, turn("solver", 0, versions=[0, 0]))
    metrics = metrics_of(
        StepRecord(policies={"main": report}), episode(0, 1.0, *solver, turn("verifier", 3, versions=[6, 6])), failed
    )
    assert metrics["rollout/solver/version_lag_mean"] == (0 + 0 + 2 + 0 + 3 + 3) / 6
    assert metrics["rollout/solver/version_lag_max"] == 3
    assert metrics["rollout/solver/mixed_version_share"] == 1 / 3
    assert (metrics["rollout/solver/rows"], metrics["rollout/solver/stale"]) == (2, 1)
    assert metrics["rollout/verifier/version_lag_max"] == metrics["rollout/verifier/stale"] == 0


def test_frozen_rows_count_in_the_statistics_and_are_counted() -> None:
    """An agent that is frozen itself, and one whose policy is."""
    policies = {"main": PolicyReport(version=0), "other": PolicyReport(version=0, trainable=False)}
    turns = [turn("solver", 0), turn("verifier", 1, trained=False), turn("critic", 2, policy="other")]
    metrics = metrics_of(StepRecord(policies=policies), episode(0, 1.0, *turns), episode(1, 0.0, turns[0]), agents=())
    assert [metrics[f"rollout/{agent}/frozen"] for agent in ("solver", "verifier", "critic")] == [0, 1, 1]
    assert [metrics[f"rollout/{agent}/rows"] for agent in ("solver", "verifier", "critic")] == [2, 1, 1]


def test_what_an_agent_did_is_counted_and_what_failed_episodes_cost_too() -> None:
    first = turn("solver", 0, prompt_ids=[1] * 5, response_ids=[2] * 3, logprobs=[-1.0] * 3, versions=[0] * 3, seconds=0.5)
    cut = turn("solver", 1, finish_reason="length", valid=False, seconds=0.25)
    lost = turn("solver", 0, prompt_ids=[1] * 7, seconds=2.0, valid=False)
    metrics = metrics_of(
        StepRecord(), episode(0, 1.0, first, cut, "verifier"), episode(1, 0.0, "solver"), episode(2, None, lost)
    )
    found = {key.removeprefix("rollout/solver/"): value for key, value in metrics.items() if key.startswith("rollout/solver/")}
    assert (found["prompt_tokens"], found["response_tokens"]) == (5 + 1 + 1 + 7, 3 + 2 + 2 + 2)
    assert found["seconds"] == 2.75
    assert (found["truncated_share"], found["valid_share"], found["invalid"]) == (1 / 3, 2 / 3, 1)
    assert (found["idle_share"], metrics["rollout/verifier/idle_share"]) == (0.0, 0.5)
    spoken = sum(metrics[f"rollout/{agent}/response_tokens"] for agent in ("solver", "verifier"))
    assert spoken == metrics["rollout/tokens"]


def test_tool_calls_are_those_of_the_agent_in_finished_episodes() -> None:
    uses = [
        ToolUse("search", "{}", "found", ok=ok, agent=agent)
        for ok, agent in ((True, "solver"), (False, "solver"), (True, None))
    ]
    metrics = metrics_of(
        StepRecord(),
        episode(0, 1.0, "solver", "verifier", uses=tuple(uses)),
        episode(1, 0.0, "solver"),
        episode(2, None, "solver", uses=tuple(uses)),
    )
    assert metrics["rollout/solver/tool_calls_per_episode"] == 1.0
    assert metrics["rollout/solver/tool_errors_share"] == 0.5
    assert metrics["rollout/verifier/tool_calls_per_episode"] == 0.0
    assert "rollout/verifier/tool_errors_share" not in metrics
    assert (metrics["rollout/tool_calls"], metrics["rollout/tool_errors"]) == (3, 1)


def test_an_agent_of_a_remote_model_has_no_rows_to_miss_but_all_that_it_did() -> None:
    remote = {"policy": "far", "prompt_ids": [], "response_ids": [], "logprobs": [], "versions": [], "prompt_text": "q"}
    turns = [turn("solver", 0), turn("judge", 1, valid=False, seconds=1.5, **remote)]
    metrics = metrics_of(StepRecord(), episode(0, 1.0, *turns), agents=("solver", "judge"))
    judge = {key.removeprefix("rollout/judge/"): value for key, value in metrics.items() if "/judge/" in key}
    assert judge == {
        **{"idle_share": 0.0, "prompt_tokens": 0, "response_tokens": 0, "seconds": 1.5},
        **{"truncated_share": 0.0, "valid_share": 0.0, "invalid": 1, "tool_calls_per_episode": 0.0},
    }


def test_what_the_correction_did_is_there_by_agent() -> None:
    report = PolicyReport(version=1)
    for tokens, mean, share in ((10.0, 1.5, 0.1), (30.0, 0.5, 0.5)):
        corrected = AGENT | {"tokens": tokens, "mismatch_mean": mean, "mismatch_truncated_share": share}
        report.update(UpdateResult(UPDATE, {"solver": corrected, "verifier": AGENT}, seconds=1.0))
    metrics = metrics_of(StepRecord(policies={"main": report}), episode(0, 1.0, "solver", "verifier"))
    assert metrics["train/main/solver/mismatch_mean"] == pytest.approx(0.75)
    assert metrics["train/main/solver/mismatch_truncated_share"] == pytest.approx(0.4)
    assert "train/main/verifier/mismatch_mean" not in metrics


def test_a_report_survives_its_way_to_the_other_ranks() -> None:
    report = PolicyReport(version=2, rows=5, peak_memory_bytes=7.0)
    gaps = {"solver": Gap(2.0, 0.5, 0.25, {"t#0/0": 0.25})}
    report.update(UpdateResult(UPDATE | {"grad_norm": math.inf}, {"solver": AGENT}, seconds=0.25, gaps=gaps))
    report.version = 3
    assert PolicyReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_every_push_of_a_step_counts() -> None:
    record = StepRecord()
    record.sync(SyncResult(1.0, 100))
    record.sync(SyncResult(0.5, 100))
    metrics = metrics_of(record, episode(0, 1.0, "solver"))
    assert (metrics["sync/seconds"], metrics["sync/bytes"]) == (1.5, 200)


def test_what_ran_while_a_step_was_trained_is_measured_by_the_step() -> None:
    record = StepRecord(seconds={"rollout": 0.5, "step": 4.0, "train": 3.5, "sync": 0.0})
    played = (episode(0, 1.0, "solver"), episode(1, 0.0, "solver"))
    assert metrics_of(record, *played)["rollout/tokens_per_second"] == 8.0
    assert metrics_of(record, *played, ahead=True)["rollout/tokens_per_second"] == 1.0
