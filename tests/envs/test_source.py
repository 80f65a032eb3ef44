from __future__ import annotations

import json
from pathlib import Path

import pytest

from drmas.config.tasks import JsonlData, ReasoningGymData, SumsData
from drmas.envs.source import TaskSource
from drmas.errors import CheckpointError


@pytest.fixture
def data(tmp_path: Path) -> JsonlData:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"q{i}", "answer": str(i), "id": f"t{i}"}) for i in range(7)))
    return JsonlData(path=str(file))


def test_every_epoch_has_every_task_once_in_an_order_of_its_own(data: JsonlData) -> None:
    source = TaskSource(data, seed=1)
    first, second = source.take(7), source.take(7)
    assert sorted(task.id for task in first) == [f"t{i}" for i in range(7)]
    assert sorted(task.id for task in second) == [f"t{i}@1" for i in range(7)]
    assert [task.question for task in first] != [task.question for task in second]
    assert {(task.question, task.truth) for task in first} == {(task.question, task.truth) for task in second}


def test_a_step_over_many_epochs_has_distinct_ids(data: JsonlData) -> None:
    tasks = TaskSource(data, seed=1).take(40)
    assert len({task.id for task in tasks}) == 40


def test_I9_the_order_is_a_function_of_the_seed(data: JsonlData) -> None:
    ids = [[task.id for task in TaskSource(data, seed=seed).take(20)] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


def test_I9_a_restored_source_reads_on_where_it_stopped(data: JsonlData) -> None:
    source = TaskSource(data, seed=1)
    source.take(10)
    state = json.loads(json.dumps(source.state()))
    resumed = TaskSource(data, seed=1)
    resumed.restore(state)
    assert resumed.take(9) == source.take(9)


def test_I9_a_source_of_other_tasks_or_another_seed_refuses_to_resume(data: JsonlData) -> None:
    state = TaskSource(data, seed=1).state()
    with pytest.raises(CheckpointError, match="has seed 1, this run's has 2"):
        TaskSource(data, seed=2).restore(state)
    file = Path(data.path)
    file.write_text(file.read_text().replace("q3", "q3 changed"))
    with pytest.raises(CheckpointError, match="resume with the data"):
        TaskSource(data, seed=1).restore(state)


def test_generated_data_of_both_kinds() -> None:
    gym = TaskSource(ReasoningGymData(size=5), seed=0)
    assert len({task.id for task in gym.take(7)}) == 7
    sums = TaskSource(SumsData(size=5), seed=0).take(1)[0]
    assert sum(map(int, sums.question.split("+"))) == int(sums.truth)
    assert TaskSource(SumsData(size=5), seed=0).state()["tasks"] != TaskSource(SumsData(size=6), seed=0).state()["tasks"]
