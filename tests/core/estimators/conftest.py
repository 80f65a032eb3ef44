"""Ragged steps, and what estimators may know of them."""

import random

import pytest

from drmas.core.estimators import ESTIMATORS, Evidence, resolve
from drmas.types import Row

TEAM = ("solver", "verifier", "writer")
CASES = {
    **{preset: {"preset": preset} for preset in ESTIMATORS},
    "gigpo, discounted": {"preset": "gigpo", "gamma": 0.9, "anchor_norm": "mean", "step_weight": 0.5},
    "gigpo, alike": {"preset": "gigpo", "gamma": 0.9, "anchor_similarity": 0.6, "mean": "task"},
    "reinforce++, discounted": {"preset": "reinforce++", "gamma": 0.8, "whiten": "agent"},
    "grpo, whitened": {"preset": "grpo", "whiten": "pooled"},
    "dr-mas, whitened": {"preset": "dr-mas", "whiten": "agent"},
    "remax, whitened": {"preset": "remax", "whiten": "pooled"},
    "ppo, pooled": {"preset": "ppo", "gae_lambda": 0.9, "whiten": "pooled"},
    "agents": {"preset": "grpo", "agents": {"verifier": {"preset": "ppo"}, "writer": {"preset": "gigpo"}}},
}
"""Every preset, and what else makes another path through the code."""


def step(seed: int, penalties: bool = True) -> list[Row]:
    """About 40 rows of four tasks: unequal numbers of turns, failed and stale rows, an equal group, a lone episode."""
    rng = random.Random(seed)
    rows = []
    for task, episodes in (("t", 5), ("u", 4), ("equal", 3), ("lone", 1)):
        for number in range(episodes):
            reward = 0.1 if task == "equal" else rng.choice([0.0, 0.3, 1.0])
            failed = task in "tu" and number == 1
            for turn in range(rng.randint(1, 6)):
                tokens = rng.randint(1, 5)
                status = "engine" if failed else "stale" if rng.random() < 0.05 else "ok"
                rows.append(
                    Row(
                        task=task,
                        episode=f"{task}#{number}",
                        agent=rng.choice(TEAM),
                        policy="main",
                        turn=turn,
                        prompt_ids=[1, 2, 3, rng.randint(4, 6), rng.randint(4, 6)][: rng.randint(4, 5)],
                        response_ids=[7] * tokens,
                        logprobs=[-0.5] * tokens,
                        versions=[0] * tokens,
                        reward=None if failed else reward,
                        penalty=rng.choice([0.0, 0.0, 0.01, 0.25]) if penalties else 0.0,
                        status=status,
                    )
                )
    return rows


def evidence(rows: list[Row], values: list[list[float]] | None = None) -> Evidence:
    """Baselines of every probe that there is, but none of the lone task without the writer; a value per token."""
    probes = ["greedy", *(f"without {agent}" for agent in TEAM)]
    baselines = {
        task: {name: [0.25 * index, 0.5] for index, name in enumerate(probes) if (task, name) != ("lone", "without writer")}
        for task in {row.task for row in rows}
    }
    return Evidence({"main": values or [token_values(row) for row in rows]}, baselines)


def token_values(row: Row) -> list[float]:
    rng = random.Random(f"{row.task} {row.episode} {row.turn}")
    return [rng.random() for _ in row.response_ids]


def tokens_of(found, row: int) -> list[float] | None:
    """The advantages of the row's tokens, each one's own or the row's."""
    value = found.of(row)
    return value if value is None or isinstance(value, list) else [value]


@pytest.fixture(scope="session")
def make_step():
    return step


@pytest.fixture(scope="session")
def know():
    return evidence


@pytest.fixture(params=CASES)
def estimator(request):
    return resolve(**CASES[request.param], team=TEAM)
