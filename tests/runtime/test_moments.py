"""Moments of the gradients in whole scripted runs: when they are measured, of whom, and that nothing else notices."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

POLICIES = '[policies.one]\nmodel = "tiny:qwen3"\nlr = 1e-3\n\n[policies.other]\nmodel = "tiny:qwen3"\nlr = 5e-4\n'
AGENTS = ("--team.solver.policy", "one", "--team.verifier.policy", "other")
TIMED = ("seconds", "per_second", "memory_bytes", "mfu")
NAMES = ["rows", "score", "pooled", "predicted", "per_agent", "own", "covariance"]
ALL_ROWS = ("--telemetry.moments-every-steps", "2", "--telemetry.moments-rows", "1000")


def moments_of(step: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in step.items() if key.startswith("moments/")}


@pytest.fixture(scope="module")
def split(scripted_run, tmp_path_factory) -> dict[str, Path]:
    """Runs of two policies on a rank each, with and without a measurement in the second step, and the same on one rank."""
    start = scripted_run(tmp_path_factory.mktemp("moments"), POLICIES)
    runs = {
        "measured": start(*AGENTS, *ALL_ROWS, "--train.placement", "split", name="measured", ranks=2),
        "plain": start(*AGENTS, "--train.placement", "split", name="plain", ranks=2),
        "one rank": start(*AGENTS, *ALL_ROWS, name="one-rank"),
    }
    for done, _ in runs.values():
        assert done.returncode == 0, done.stderr
    return {name: folder for name, (_, folder) in runs.items()}


def test_they_are_measured_when_due_on_the_rows_that_are_trained_on(split, metrics_of) -> None:
    """With all rows measured, the prediction is the step's inflation factor, and the lemma holds as an identity."""
    first, second = metrics_of(split["measured"])
    assert moments_of(first) == {}
    assert "time/moments_seconds" not in first
    assert second["time/moments_seconds"] > 0
    assert list(moments_of(second)) == [f"moments/{agent}/{name}" for agent in ("solver", "verifier") for name in NAMES]
    for agent in ("solver", "verifier"):
        rows, score, pooled, predicted, per_agent, own, covariance = (second[f"moments/{agent}/{name}"] for name in NAMES)
        assert rows == second[f"rollout/{agent}/rows"] > 0
        assert score > 0
        assert predicted == pytest.approx(second[f"advantage/{agent}/inflation_factor"], rel=1e-12)
        assert pooled == pytest.approx(predicted + covariance, rel=1e-12)
        assert per_agent > 0
        assert own > 0


def test_policies_with_ranks_of_their_own_are_measured_as_on_one_rank(split, metrics_of) -> None:
    found, expected = (moments_of(metrics_of(split[name])[1]) for name in ("measured", "one rank"))
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_measurement_changes_nothing_else(split, metrics_of) -> None:
    for ours, theirs in zip(metrics_of(split["measured"]), metrics_of(split["plain"]), strict=True):
        kept = {key for key in ours if not key.startswith("moments/") and not key.endswith(TIMED)}
        assert {key: ours[key] for key in kept} == {key: value for key, value in theirs.items() if not key.endswith(TIMED)}
    for policy in ("one", "other"):
        ours, theirs = (load_file(split[name] / "export" / policy / "model.safetensors") for name in ("measured", "plain"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_stale_frozen_and_uncounted_rows_are_not_measured(run, metrics_of) -> None:
    """Two updates a step on episodes that ran ahead, a solver that reads old versions and a frozen verifier on one policy."""
    words = ("--telemetry.moments-every-steps", "1", "--telemetry.moments-rows", "5", "--train.steps", "3")
    ahead = ("--rollout.max-staleness", "1", "--train.updates-per-step", "2", "--team.verifier.trainable", "false")
    done, folder = run(*words, *ahead)
    assert done.returncode == 0, done.stderr
    for step in metrics_of(folder):
        assert {key.split("/")[1] for key in moments_of(step)} == {"solver"}
        assert step["moments/solver/rows"] == 5
        assert step["moments/solver/score"] > 0
        assert step["train/main/updates"] == 2


def test_a_frozen_policy_is_not_measured(scripted_run, tmp_path, metrics_of) -> None:
    start = scripted_run(tmp_path, POLICIES + "trainable = false\n")
    done, folder = start(*AGENTS, *ALL_ROWS)
    assert done.returncode == 0, done.stderr
    found = json.dumps(moments_of(metrics_of(folder)[1]))
    assert "moments/solver/pooled" in found
    assert "verifier" not in found
