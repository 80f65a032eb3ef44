from __future__ import annotations

import pytest

from drmas.config.tasks import RewardConfig
from drmas.envs.rewards import make_reward
from drmas.errors import GraderTimeout
from drmas.types import Task

TASK = Task("t", "1/2 as a decimal?", "0.5")


@pytest.fixture(params=["exact", "math"])
def reward(request: pytest.FixtureRequest):
    made = make_reward(RewardConfig(type=request.param, timeout_seconds=30))
    yield made
    made.close()


async def test_no_answer_is_a_legitimate_zero(reward) -> None:
    assert await reward(TASK, None) == 0.0


async def test_right_and_wrong(reward) -> None:
    assert await reward(TASK, " 0.5 ") == 1.0
    assert await reward(TASK, "0.6") == 0.0


async def test_math_knows_equal_values_and_exact_does_not() -> None:
    math, exact = make_reward(RewardConfig(timeout_seconds=30)), make_reward(RewardConfig(type="exact"))
    try:
        assert await math(TASK, r"\boxed{\frac12}") == 1.0
        assert await exact(TASK, r"\boxed{\frac12}") == 0.0
    finally:
        math.close()


async def test_I3_an_answer_that_cannot_be_graded_raises() -> None:
    reward = make_reward(RewardConfig(timeout_seconds=0.5))
    try:
        with pytest.raises(GraderTimeout):
            await reward(TASK, r"\boxed{10^{10^{10}}}")
    finally:
        reward.close()
