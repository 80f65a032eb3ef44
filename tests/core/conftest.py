"""Rows of the shape that advantages, diagnostics and batching read."""

import json
from pathlib import Path

import pytest

from drmas.types import Row


@pytest.fixture(scope="session")
def golden():
    return json.loads((Path(__file__).parents[1] / "golden" / "advantage.json").read_text())


def make(task="t", episode="0", agent="a", reward=1.0, *, turn=0, penalty=0.0, status="ok", tokens=2):
    return Row(
        task=task,
        episode=episode,
        agent=agent,
        policy="main",
        turn=turn,
        prompt_ids=[1],
        response_ids=[2] * tokens,
        logprobs=[-0.5] * tokens,
        versions=[0] * tokens,
        reward=reward,
        penalty=penalty,
        status=status,
    )


@pytest.fixture(scope="session")
def make_row():
    return make


@pytest.fixture
def team_rows():
    """A ragged group: solver twice in episode 0, no verifier in episode 1, episode 2 failed, another task of one episode."""
    return [
        make("t", "t#0", "solver", 1.0, tokens=3),
        make("t", "t#0", "verifier", 1.0, turn=1, tokens=1),
        make("t", "t#0", "solver", 1.0, turn=2, tokens=2),
        make("t", "t#1", "solver", 0.0, tokens=5),
        make("t", "t#2", "solver", None, status="engine"),
        make("t", "t#2", "verifier", None, turn=1, status="engine"),
        make("t", "t#3", "solver", 0.0, tokens=4),
        make("t", "t#3", "verifier", 0.0, turn=1, tokens=4),
        make("u", "u#0", "solver", 1.0, tokens=7),
    ]
