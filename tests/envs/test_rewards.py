from __future__ import annotations

from dataclasses import replace

import pytest

from drmas.config.tasks import ReasoningGymData, RewardConfig
from drmas.envs.generated import GymTasks
from drmas.envs.rewards import check_reward, make_reward
from drmas.errors import ConfigError, GraderError, GraderTimeout
from drmas.types import Task

TASK = Task("t", "1/2 as a decimal?", "0.5")
BACH = Task("b", "Who wrote it?", "Johann Sebastian Bach", "nq", {"answers": ["Johann Sebastian Bach", "J.S. Bach"]})
ENDLESS = r"\boxed{10^{10^{10}}}"


@pytest.fixture
def make():
    made = []

    def of(**settings):
        made.append(make_reward(RewardConfig(**{"timeout_seconds": 30, **settings})))
        return made[-1]

    yield of
    for reward in made:
        reward.close()
        reward.close()


@pytest.mark.parametrize("kind", ["exact", "math", "em", "f1"])
async def test_right_wrong_and_no_answer_which_is_a_legitimate_zero(make, kind: str) -> None:
    reward = make(type=kind)
    assert await reward(TASK, " 0.5 ") == 1.0
    assert await reward(TASK, "0.6") == 0.0
    assert await reward(TASK, None) == 0.0


async def test_math_knows_equal_values_and_exact_does_not(make) -> None:
    assert await make(type="math")(TASK, r"\boxed{\frac12}") == 1.0
    assert await make(type="exact")(TASK, r"\boxed{\frac12}") == 0.0


async def test_I3_an_answer_that_cannot_be_graded_raises(make) -> None:
    with pytest.raises(GraderTimeout):
        await make(type="math", timeout_seconds=0.5)(TASK, ENDLESS)


async def test_the_best_of_the_accepted_answers_counts(make) -> None:
    exact, em, f1 = make(type="exact"), make(type="em"), make(type="f1")
    assert [await exact(BACH, text) for text in ("J.S. Bach", "Johann Sebastian Bach", "Bach")] == [1.0, 1.0, 0.0]
    assert await em(BACH, "<answer>The johann sebastian BACH!</answer>") == 1.0
    assert await em(BACH, "Bach") == 0.0
    assert await f1(BACH, "Bach") == pytest.approx(2 / 3)  # of "js bach", not the 1/2 of the longer name
    pair = Task("m", "?", "12", extra={"answers": ["3/4", "12"]})
    assert await make(type="math")(pair, r"\boxed{0.75}") == 1.0
    assert await make(type="math")(pair, r"\boxed{13}") == 0.0


async def test_I3_one_truth_that_cannot_be_compared_with_does_not_hide_another(make, monkeypatch) -> None:
    async def grader(answer: str, truth: str) -> float:
        if truth == "tower":
            raise GraderTimeout("no verdict")
        return float(answer == truth)

    reward = make(type="math")
    monkeypatch.setattr(reward, "_grader", grader)
    task = Task("m", "?", "tower", extra={"answers": ["7"]})
    assert await reward(task, "7") == 1.0
    with pytest.raises(GraderTimeout):
        await reward(task, "8")  # it may have equalled the tower
    monkeypatch.undo()


async def test_each_source_has_its_own_reward_and_others_the_default(make) -> None:
    reward = make(type="exact", by_source={"nq": "em", "maths": "math"})
    half = Task("h", "?", "0.5", "maths")
    assert await reward(BACH, "johann sebastian bach") == 1.0
    assert await reward(half, "1/2") == 1.0
    assert await reward(Task("h", "?", "0.5", "other"), "1/2") == 0.0
    assert await reward(TASK, "0.5") == 1.0


async def test_a_name_before_the_slash_of_a_source_names_its_reward_and_the_whole_source_goes_before(make) -> None:
    reward = make(type="exact", by_source={"facts": "em", "facts/2": "math"})
    said, half = "The johann sebastian BACH!", r"\boxed{\frac12}"
    assert await reward(replace(BACH, source="facts/1"), said) == 1.0
    assert await reward(replace(BACH, source="factsheet/1"), said) == 0.0
    assert await reward(Task("h", "?", "0.5", "facts/2"), half) == 1.0
    assert await reward(Task("h", "?", "0.5", "facts/1"), half) == 0.0


@pytest.mark.parametrize("kind", ["exact", "math", "em", "f1"])
async def test_I3_a_task_without_a_truth_is_not_graded(make, kind: str) -> None:
    with pytest.raises(GraderError, match="the task t has no truth to compare with"):
        await make(type=kind)(Task("t", "?", ""), "5")


async def test_gym_asks_the_generator_in_a_worker(make) -> None:
    reward = make(type="gym")
    task = GymTasks(ReasoningGymData(name="countdown", size=3, seed=2))[1]
    numbers, target = task.extra["metadata"]["numbers"], task.extra["metadata"]["target"]
    assert await reward(task, task.truth) == 1.0
    assert 0 <= await reward(task, str(numbers[0])) < 0.1
    assert await reward(task, str(target)) < 0.1  # right, and not made of the numbers
    assert await reward(task, None) == 0.0
    with pytest.raises(GraderError, match="the task t wasn't made by a reasoning-gym generator"):
        await reward(TASK, "0.5")


async def test_I3_a_worker_that_cannot_find_its_task_again_is_trouble(make) -> None:
    task = GymTasks(ReasoningGymData(size=3))[1]
    other = Task(task.id, "another question", task.truth, task.source, task.extra)
    with pytest.raises(GraderError, match="is another one when it is generated anew"):
        await make(type="gym")(other, "5")


def test_a_reward_that_does_not_fit_the_tasks_is_found_at_start() -> None:
    ruled = GymTasks(ReasoningGymData(name="rubiks_cube", size=1))[0]
    with pytest.raises(ConfigError, match=r"reward.type is math, and the task rubiks_cube/0 has no one right answer"):
        check_reward(RewardConfig(), [TASK, ruled])
    with pytest.raises(ConfigError, match=r"reward.type is gym, and the task t isn't made by a reasoning-gym generator"):
        check_reward(RewardConfig(type="gym"), [ruled, TASK])
    with pytest.raises(ConfigError, match=r"reward.by_source.nq is gym, and the task b"):
        check_reward(RewardConfig(by_source={"nq": "gym"}), [TASK, BACH])
    check_reward(RewardConfig(by_source={"rubiks_cube": "gym"}), [TASK, ruled, BACH])
    check_reward(RewardConfig(type="gym", by_source={"nq": "em", "": "math"}), [TASK, ruled, BACH])
    with pytest.raises(ConfigError, match=r"reward.by_source.facts is gym, and the task b"):
        check_reward(RewardConfig(by_source={"facts": "gym"}), [replace(BACH, source="facts/1")])


def test_a_source_that_no_task_has_is_refused_with_the_nearest_name() -> None:
    deep = replace(BACH, source="facts/1")
    check_reward(RewardConfig(by_source={"nq": "em", "facts": "em"}), [TASK, BACH, deep])
    check_reward(RewardConfig(by_source={"facts/1": "em"}), [deep])
    with pytest.raises(ConfigError, match=r"by_source names 'ng', and no task has that source; the nearest is 'nq'; expected"):
        check_reward(RewardConfig(by_source={"nq": "em", "ng": "em"}), [TASK, BACH])
    for key in ("fact", "facts/2", "1"):
        with pytest.raises(ConfigError, match=f"by_source names '{key}', and no task has that source"):
            check_reward(RewardConfig(by_source={key: "em"}), [deep])
    with pytest.raises(ConfigError, match=r"by_source names 'nq', and no task has that source; there are none to choose from"):
        check_reward(RewardConfig(by_source={"nq": "em"}), [TASK])


def test_sources_of_the_runs_other_data_are_looked_at_where_a_name_is_none_of_these() -> None:
    config = RewardConfig(by_source={"nq": "em"})
    check_reward(config, [BACH], lambda: pytest.fail("nothing was unknown"))
    check_reward(config, [TASK], lambda: [BACH])
    check_reward(config, [TASK], lambda: None)  # they can't be looked at
    with pytest.raises(ConfigError, match=r"by_source names 'nq', and no task has that source; the nearest is 'n'"):
        check_reward(config, [TASK], lambda: [replace(BACH, source="n")])
