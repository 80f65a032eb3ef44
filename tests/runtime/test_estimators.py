"""Whole runs with scripted engines whose estimators need more than rows: probes beside each group, a memory, one per agent."""

import shutil
from pathlib import Path

import pytest

from drmas.telemetry.episodes import read_episodes

REMAX = ("--advantage.preset", "remax")
EMA = ("--advantage.preset", "ema", "--advantage.ema-decay", "0.5")
ROLES = (*REMAX, "--advantage.agents.verifier.preset", "ema", "--advantage.agents.verifier.ema-decay", "0.5")
FOUR_STEPS = ("--train.steps", "4", "--checkpoint.keep", "4")
ONE_STEP_OFF = ("--rollout.max-staleness", "1")
CARRY_OVER = ("--rollout.max-staleness", "2", "--rollout.carry-over", "true", "--rollout.deterministic", "false")
TIMED = ("seconds", "per_second", "memory_bytes", "mfu")


def own(folder: Path, step: int) -> list[dict]:
    return [episode for episode in read_episodes(folder, step) if episode["probe"] is None]


def greedy(folder: Path, step: int) -> dict[str, float]:
    return {episode["task"]: episode["reward"] for episode in read_episodes(folder, step) if episode["probe"] == "greedy"}


def advantages(folder: Path, step: int, agent: str | None = None) -> dict[str, list[float]]:
    """Episode -> the advantages of its turns, of one agent if named."""
    return {
        episode["episode"]: [turn["advantage"] for turn in episode["turns"] if agent in (None, turn["agent"])]
        for episode in own(folder, step)
    }


def above_greedy(folder: Path, step: int, agent: str | None = None) -> dict[str, list[float]]:
    """What ReMax says these advantages are."""
    baseline = greedy(folder, step)
    return {
        episode["episode"]: [
            turn["reward"] - baseline[episode["task"]] for turn in episode["turns"] if agent in (None, turn["agent"])
        ]
        for episode in own(folder, step)
    }


def untimed(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in step.items() if not key.endswith(TIMED)} for step in metrics]


def cut(folder: Path, name: str, step: int) -> str:
    """A copy of the run as a kill after that step's save leaves it."""
    copy = shutil.copytree(folder, folder.parent / name)
    for later in range(step + 1, 5):
        shutil.rmtree(copy / "checkpoints" / f"step_{later}")
    return name


def test_remax_trains_on_the_reward_above_the_greedy_episode_and_a_dead_engine_costs_nothing(run, metrics_of):
    done, folder = run(*REMAX, DIE="9")
    assert done.returncode == 0, done.stderr
    assert "advantage" in done.stdout
    assert "4 tasks x (4 + 1 for baselines) episodes = 20 episodes" in done.stdout
    for step, metrics in enumerate(metrics_of(folder), start=1):
        baseline = greedy(folder, step)
        assert len(baseline) == 4
        assert set(baseline.values()) == {0.0, 1.0}
        assert advantages(folder, step) == above_greedy(folder, step)
        assert metrics["reward/probe/greedy"] == sum(baseline.values()) / 4
        assert (metrics["rollout/episodes"], metrics["rollout/probe_episodes"]) == (16, 4)
        assert metrics["reward/mean"] == sum(episode["reward"] for episode in own(folder, step)) / 16
        assert metrics["rollout/solver/rows"] == sum(len(each) for each in advantages(folder, step, "solver").values())
        assert metrics["train/main/grad_norm"] > 0


def test_I9_one_step_off_with_probes_resumes_to_the_same_run(run, metrics_of):
    done, whole = run(*REMAX, *FOUR_STEPS, *ONE_STEP_OFF)
    assert done.returncode == 0, done.stderr
    resumed, folder = run(*REMAX, *FOUR_STEPS, *ONE_STEP_OFF, "--resume", name=cut(whole, "from_2", 2))
    assert resumed.returncode == 0, resumed.stderr
    assert untimed(metrics_of(folder)) == untimed(metrics_of(whole))
    for step in (1, 2, 3, 4):
        assert advantages(folder, step) == advantages(whole, step) == above_greedy(whole, step)


def test_carried_over_groups_keep_their_probes_over_a_resume(run, metrics_of):
    done, whole = run(*REMAX, *FOUR_STEPS, *CARRY_OVER)
    assert done.returncode == 0, done.stderr
    resumed, folder = run(*REMAX, *FOUR_STEPS, *CARRY_OVER, "--resume", name=cut(whole, "from_2", 2))
    assert resumed.returncode == 0, resumed.stderr
    tasks = [task for step in (1, 2, 3, 4) for task in greedy(folder, step)]
    assert len(tasks) == len(set(tasks)) == 16
    for step in (1, 2, 3, 4):
        assert {episode["task"] for episode in own(folder, step)} == set(greedy(folder, step))
        assert advantages(folder, step) == above_greedy(folder, step)
    assert [metrics["rollout/probe_episodes"] for metrics in metrics_of(folder)] == [4] * 4


def test_I9_a_moving_baseline_is_part_of_the_checkpoint(run, metrics_of):
    done, whole = run(*EMA, *FOUR_STEPS)
    assert done.returncode == 0, done.stderr
    resumed, folder = run(*EMA, *FOUR_STEPS, "--resume", name=cut(whole, "from_2", 2))
    assert resumed.returncode == 0, resumed.stderr
    assert untimed(metrics_of(folder)) == untimed(metrics_of(whole))
    baseline: dict[str, float] = {}
    for step in (1, 2, 3, 4):
        assert advantages(folder, step) == advantages(whole, step)
        turns = [turn for episode in own(whole, step) for turn in episode["turns"]]
        for agent in ("solver", "verifier"):
            rewards = [turn["reward"] for turn in turns if turn["agent"] == agent]
            mean = sum(rewards) / len(rewards)
            baseline[agent] = 0.5 * baseline.get(agent, mean) + 0.5 * mean
        for turn in turns:
            assert turn["advantage"] == pytest.approx(turn["reward"] - baseline[turn["agent"]], abs=1e-12)


def test_agents_of_one_run_may_have_estimators_of_their_own_and_two_ranks_agree(run, metrics_of):
    """Two ranks are interrupted and one is not: a rank whose memory wasn't restored would train on other advantages."""
    one, alone = run(*ROLES, "--train.steps", "3", name="alone")
    assert one.returncode == 0, one.stderr
    for words in ((), ("--train.steps", "3", "--resume")):
        two, pair = run(*ROLES, *words, name="pair", ranks=2)
        assert two.returncode == 0, two.stderr
    baseline = None
    for step in (1, 2, 3):
        assert advantages(alone, step, "solver") == above_greedy(alone, step, "solver")
        rewards = [turn["reward"] for episode in own(alone, step) for turn in episode["turns"] if turn["agent"] == "verifier"]
        mean = sum(rewards) / len(rewards)
        baseline = mean if baseline is None else 0.5 * baseline + 0.5 * mean
        found = [advantage for each in advantages(alone, step, "verifier").values() for advantage in each]
        assert found == pytest.approx([reward - baseline for reward in rewards], abs=1e-12)
        assert advantages(pair, step) == advantages(alone, step)
    for ours, theirs in zip(metrics_of(pair), metrics_of(alone), strict=True):
        for key in ("train/main/loss", "train/main/solver/grad_norm", "train/main/verifier/grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6)


def test_one_agent_may_have_a_critic_and_the_policy_of_the_other_has_none(scripted_run, metrics_of, tmp_path):
    policies = "".join(f'[policies.{name}]\nmodel = "tiny:qwen3"\nlr = 1e-3\n' for name in ("one", "other"))
    agents = ("--team.solver.policy", "one", "--team.verifier.policy", "other")
    done, folder = scripted_run(tmp_path, policies)(*agents, "--advantage.agents.verifier.preset", "ppo")
    assert done.returncode == 0, done.stderr
    for step in metrics_of(folder):
        assert step["train/other/critic_error"] > 0
        assert "train/one/critic_error" not in step
        assert step["advantage/solver/row_sum"] == pytest.approx(0.0, abs=1e-6)  # each task's against each other
        assert step["train/one/grad_norm"] > 0
    saved = {path.name for path in (folder / "checkpoints" / "step_2").iterdir() if path.is_dir()}
    assert saved == {"policy-one", "policy-other", "critic-other"}
