"""Whole runs with scripted engines whose rollouts run ahead of training, or are sampled by need."""

import re
import subprocess
from pathlib import Path

import pytest

from drmas.telemetry.episodes import read_episodes

FOUR_STEPS = ("--train.steps", "4", "--checkpoint.keep", "4")
ONE_STEP_OFF = ("--rollout.max-staleness", "1")
CARRY_OVER = ("--rollout.max-staleness", "2", "--rollout.carry-over", "true", "--rollout.deterministic", "false")


@pytest.fixture
def run(scripted_run, tmp_path):
    """Four steps of the small recipe."""
    start = scripted_run(tmp_path)
    return lambda *words, **more: start(*FOUR_STEPS, *words, **more)


def versions_of(folder: Path, step: int) -> set[int]:
    return {version for episode in read_episodes(folder, step) for turn in episode["turns"] for version in turn["versions"]}


def tasks_of(folder: Path, step: int) -> list[str]:
    return list(dict.fromkeys(episode["task"] for episode in read_episodes(folder, step)))


KEYS = ("reward/mean", "train/main/loss", "train/main/grad_norm", "train/main/solver/mismatch_mean")


def test_one_step_off_trains_on_the_weights_from_before_and_a_resumed_run_is_the_same(run, metrics_of):
    done, whole = run(*ONE_STEP_OFF)
    assert done.returncode == 0, done.stderr
    assert [versions_of(whole, step) for step in (1, 2, 3, 4)] == [{0}, {0}, {1}, {2}]
    steps = metrics_of(whole)
    assert [step["rollout/solver/version_lag_max"] for step in steps] == [0, 1, 1, 1]
    assert [step["rollout/groups_ahead"] for step in steps] == [4, 4, 4, 0]
    assert all(step["train/main/solver/mismatch_truncated_share"] >= 0 for step in steps)

    for step in (2, 3):  # as a kill after that step's save leaves it
        folder = whole.parent / f"from_{step}"
        subprocess.run(["cp", "-r", str(whole), str(folder)], check=True)
        for later in range(step + 1, 5):
            subprocess.run(["rm", "-r", str(folder / "checkpoints" / f"step_{later}")], check=True)
        resumed, _ = run(*ONE_STEP_OFF, "--resume", name=f"from_{step}")
        assert resumed.returncode == 0, resumed.stderr
        again = metrics_of(folder)
        assert [[line[key] for key in KEYS] for line in again] == [[line[key] for key in KEYS] for line in steps]
        assert [tasks_of(folder, each) for each in (1, 2, 3, 4)] == [tasks_of(whole, each) for each in (1, 2, 3, 4)]


def test_carried_over_groups_are_taken_once_and_within_the_bound(run, metrics_of):
    done, folder = run(*CARRY_OVER)
    assert done.returncode == 0, done.stderr
    steps = metrics_of(folder)
    assert all(step["rollout/solver/version_lag_max"] <= 2 for step in steps)
    assert all(step["rollout/solver/rows"] >= 16 for step in steps)
    tasks = [task for step in (1, 2, 3, 4) for task in tasks_of(folder, step)]
    assert len(tasks) == len(set(tasks)) == 16
    resumed, folder = run(*CARRY_OVER, "--resume", "--train.steps", "5")
    assert resumed.returncode == 0, resumed.stderr
    assert not set(tasks_of(folder, 5)) & set(tasks)


def test_a_one_step_off_run_that_an_engine_ended_resumes_to_the_same_steps(run):
    """It died with groups in flight, more often than it may."""
    whole, folder = run(*ONE_STEP_OFF, name="whole")
    assert whole.returncode == 0, whole.stderr
    none = ("--policies.main.engine.max-restarts", "0")
    ended, broken = run(*ONE_STEP_OFF, *none, DIE="45")
    assert ended.returncode == 2, ended.stderr
    assert "max_restarts is 0" in ended.stderr
    resumed, _ = run(*ONE_STEP_OFF, *none, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert [tasks_of(broken, step) for step in (1, 2, 3, 4)] == [tasks_of(folder, step) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("words", [(), ONE_STEP_OFF, CARRY_OVER], ids=["on-policy", "one-step-off", "carry-over"])
def test_an_engine_that_dies_in_any_step_costs_no_episode(run, words, metrics_of):
    done, folder = run(*words, DIE="7,60")
    assert done.returncode == 0, done.stderr
    assert re.search(r"the engine of policy 'main' died \(.*see .*logs\)", done.stdout), done.stdout
    assert "starting it again (2 of 2)" in done.stdout
    steps = metrics_of(folder)
    assert [step["rollout/episodes"] for step in steps] == [16] * 4
    assert not [name for step in steps for name in step if name.startswith("rollout/failed/")]
    assert sum(step["rollout/retried"] for step in steps) > 0


def test_an_agent_with_a_bound_of_its_own_is_left_out_where_it_is_older(run, metrics_of):
    done, folder = run(*ONE_STEP_OFF, "--team.verifier.max-staleness", "0")
    assert done.returncode == 0, done.stderr
    first, *later = metrics_of(folder)
    assert first["rollout/verifier/stale"] == 0
    for step in later:
        assert step["rollout/verifier/stale"] > 0
        assert step["rollout/verifier/rows"] == 0
        assert step["rollout/solver/rows"] > 0
        assert "train/main/verifier/loss" not in step


def test_dynamic_sampling_fills_steps_with_groups_that_differ(run, metrics_of):
    done, folder = run("--rollout.dynamic.enabled", "true", "--rollout.group-size", "2", "--rollout.dynamic.max-tries", "20")
    assert done.returncode == 0, done.stderr
    for step, metrics in enumerate(metrics_of(folder), start=1):
        rewards: dict[str, set[float]] = {}
        for episode in read_episodes(folder, step):
            rewards.setdefault(episode["task"], set()).add(episode["reward"])
        assert [len(each) for each in rewards.values()] == [2] * 4
        assert metrics["advantage/solver/constant_share"] == 0
    assert sum(metrics["rollout/dropped_groups"] for metrics in metrics_of(folder)) > 0


def test_a_frozen_agent_is_sampled_and_not_trained(run, metrics_of):
    done, folder = run("--team.verifier.trainable", "false")
    assert done.returncode == 0, done.stderr
    for step in metrics_of(folder):
        assert step["rollout/verifier/rows"] > 0
        assert "train/main/verifier/loss" not in step
        assert step["train/main/solver/loss"] is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rollout.max-staleness", "2"), "max_staleness is 2 and carry_over is false"),
        (("--rollout.carry-over", "true"), "carry_over is true and deterministic is true"),
        (("--rollout.dynamic.enabled", "true", "--rollout.dynamic.oversample", "2"), "set oversample to 1"),
        ((*CARRY_OVER, "--rollout.dynamic.enabled", "true", "--rollout.dynamic.oversample", "2"), "carry_over is true"),
        (("--team.solver.max-staleness", "1"), "team.solver.max_staleness is 1, rollout.max_staleness is 0"),
    ],
)
def test_settings_that_cannot_go_together_are_refused_in_one_line(run, words, message):
    done, _ = run(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
