from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from drmas.config.tasks import CurriculumConfig, JsonlData, MixData, ReasoningGymData, SumsData
from drmas.envs.generated import GymTasks
from drmas.envs.source import TaskSource
from drmas.envs.tasks import open_tasks
from drmas.errors import CheckpointError, DataError
from drmas.types import Task

BY_SUCCESS = CurriculumConfig(enabled=True)


@pytest.fixture
def data(tmp_path: Path) -> JsonlData:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"q{i}", "answer": str(i), "id": f"t{i}"}) for i in range(7)))
    return JsonlData(path=str(file))


@pytest.fixture
def mix(data: JsonlData) -> MixData:
    parts = {
        "maths": {"weight": 3, "data": {"type": "sums", "size": 5}},
        "words": {"weight": 1, "data": data.model_dump()},
        "sums": {"weight": 2, "data": {"type": "sums", "size": 50, "terms": 3}},
    }
    return MixData(parts=parts)


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


def test_generated_data_of_both_kinds() -> None:
    gym = TaskSource(ReasoningGymData(size=5), seed=0)
    assert len({task.id for task in gym.take(7)}) == 7
    sums = TaskSource(SumsData(size=5), seed=0).take(1)[0]
    assert sum(map(int, sums.question.split("+"))) == int(sums.truth)
    assert TaskSource(SumsData(size=5), seed=0).state()["tasks"] != TaskSource(SumsData(size=6), seed=0).state()["tasks"]


def test_a_mix_keeps_its_shares_in_every_prefix_whatever_the_step(mix: MixData) -> None:
    whole = [task.source for task in TaskSource(mix, seed=1).take(60)]
    source = TaskSource(mix, seed=1)
    assert [task.source for _ in range(12) for task in source.take(5)] == whole
    for size in range(1, 61):
        counts = Counter(whole[:size])
        for name, share in (("maths", 1 / 2), ("words", 1 / 6), ("sums", 1 / 3)):
            assert abs(counts[name] - size * share) < 1


def test_the_parts_of_a_mix_have_ids_and_epochs_of_their_own(mix: MixData) -> None:
    source = TaskSource(mix, seed=1)
    tasks = source.take(120)
    assert len(source) == 5 + 7 + 50
    assert len({task.id for task in tasks}) == 120
    assert all(task.id.startswith(f"{task.source}/") for task in tasks)
    words = [task for task in tasks if task.source == "words"]
    assert sorted(task.id for task in words[:7]) == [f"words/t{i}" for i in range(7)]
    assert all(task.id.endswith("@1") for task in words[7:14])
    both = [task.id for task in tasks if task.id in ("maths/sums/0", "sums/sums/0")]
    assert sorted(both) == ["maths/sums/0", "sums/sums/0"]


def test_parts_with_the_same_tasks_have_orders_of_their_own() -> None:
    part = {"data": {"type": "sums", "size": 20}}
    tasks = TaskSource(MixData(parts={"a": part, "b": part}), seed=1).take(40)
    a, b = ([task.id.partition("/")[2] for task in tasks if task.source == name] for name in "ab")
    assert sorted(a) == sorted(b)
    assert a != b


def test_all_tasks_of_a_mix_once_in_their_own_order(mix: MixData) -> None:
    tasks = open_tasks(mix)
    assert [task.source for task in tasks] == ["maths"] * 5 + ["words"] * 7 + ["sums"] * 50
    assert [task.id for task in tasks[5:8]] == ["words/t0", "words/t1", "words/t2"]


def play(source: TaskSource, rounds: int) -> list[str]:
    """Take four, report them in their order; how well a task is solved follows from its question."""
    ids = []
    for _ in range(rounds):
        tasks = source.take(4)
        ids += [task.id for task in tasks]
        for task in tasks:
            source.report(task, [] if task.truth == "3" else [float(sum(map(ord, task.question)) % 3 > n) for n in range(2)])
    return ids


@pytest.mark.parametrize("curriculum", [CurriculumConfig(), BY_SUCCESS])
@pytest.mark.parametrize("kind", ["data", "mix"])
def test_I9_a_restored_source_reads_on_where_it_stopped(request, kind: str, curriculum: CurriculumConfig) -> None:
    data = request.getfixturevalue(kind)
    source = TaskSource(data, seed=1, curriculum=curriculum)
    play(source, 9)
    out = source.take(3)  # reported after the resume
    state = json.loads(json.dumps(source.state()))
    resumed = TaskSource(data, seed=1, curriculum=curriculum)
    resumed.restore(state)
    for each in (source, resumed):
        for task in out:
            each.report(task, [1.0, 0.0])
    assert play(resumed, 12) == play(source, 12)
    assert resumed.state() == source.state()


def test_I9_another_source_refuses_to_resume(data: JsonlData, mix: MixData) -> None:
    state = TaskSource(data, seed=1).state()
    for other in (TaskSource(data, seed=2), TaskSource(data, seed=1, curriculum=BY_SUCCESS), TaskSource(mix, seed=1)):
        with pytest.raises(CheckpointError, match="resume with the data"):
            other.restore(state)
    with pytest.raises(CheckpointError, match="has seed 1, this run's has 2"):
        TaskSource(data, seed=2).restore(state)
    changed = BY_SUCCESS.model_copy(update={"target": 0.7})
    with pytest.raises(CheckpointError, match=r"has curriculum \{'target': 0.5.*this run's has \{'target': 0.7"):
        TaskSource(data, seed=1, curriculum=changed).restore(TaskSource(data, seed=1, curriculum=BY_SUCCESS).state())


@pytest.mark.parametrize("change", [("q3", "q3 changed"), ('"answer": "3"', '"answer": ["3", "three"]'), ("t3", "u3")])
def test_I9_other_tasks_of_any_part_refuse_to_resume(data: JsonlData, mix: MixData, change: tuple[str, str]) -> None:
    states = TaskSource(data, seed=1).state(), TaskSource(mix, seed=1).state()
    file = Path(data.path)
    file.write_text(file.read_text().replace(*change))
    for section, state in zip((data, mix), states, strict=True):
        with pytest.raises(CheckpointError, match="resume with the data"):
            TaskSource(section, seed=1).restore(state)


def test_I9_other_shares_refuse_to_resume(mix: MixData) -> None:
    state = TaskSource(mix, seed=1).state()
    parts = {name: part.model_dump() | {"weight": 1} for name, part in mix.parts.items()}
    with pytest.raises(CheckpointError, match="resume with the data"):
        TaskSource(MixData(parts=parts), seed=1).restore(state)


def test_a_curriculum_prefers_what_is_solved_sometimes(data: JsonlData) -> None:
    source = TaskSource(data, seed=3, curriculum=CurriculumConfig(enabled=True, smoothing=1.0))
    counts = Counter()
    for _ in range(700):
        (task,) = source.take(1)
        counts[task.question] += 1
        source.report(task, {"q1": [1.0, 0.0], "q2": [0.25, 0.25]}.get(task.question, [0.0, 0.0]))
    assert [question for question, _ in counts.most_common(2)] == ["q1", "q2"]
    assert min(counts.values()) > 700 * 0.2 / 7 * 0.7  # none is forgotten
    assert len(counts) == 7


def test_a_task_drawn_again_has_an_id_of_its_own(data: JsonlData) -> None:
    source = TaskSource(data, seed=3, curriculum=BY_SUCCESS)
    tasks = source.take(60)
    assert len({task.id for task in tasks}) == 60
    again = [task for task in tasks if task.question == "q4"]
    assert [task.id for task in again] == ["t4", *(f"t4@{n}" for n in range(1, len(again)))]


def test_what_was_not_taken_cannot_be_reported(data: JsonlData) -> None:
    source = TaskSource(data, seed=3, curriculum=BY_SUCCESS)
    (task,) = source.take(1)
    source.report(task, [1.0])
    for stranger in (task, Task("other", "q", "a")):
        with pytest.raises(ValueError, match=f"the task {stranger.id} is reported, and no such task is out"):
            source.report(stranger, [1.0])


def test_success_rates_and_shares_are_those_since_they_were_asked_for(mix: MixData) -> None:
    source = TaskSource(mix, seed=1)
    assert source.stats() == {}
    for task in source.take(12):
        source.report(task, [1.0, 0.0] if task.source == "maths" else [7.0, -1.0, 0.25, 0.75] if task.source == "sums" else [])
    assert source.stats() == {
        "data/maths/success_rate": 0.5,
        "data/maths/share": 0.6,
        "data/sums/success_rate": 0.5,
        "data/sums/share": 0.4,
    }
    assert source.stats() == {}


def test_a_source_without_a_name_and_one_with_a_slash_have_readable_metrics(data: JsonlData) -> None:
    source = TaskSource(data, seed=1)
    (task,) = source.take(1)
    source.report(task, [1.0])
    source.report(Task("x", "q", "a", source="openai/gsm8k"), [0.0])
    assert source.stats() == {
        "data/success_rate": 1.0,
        "data/share": 0.5,
        "data/openai-gsm8k/success_rate": 0.0,
        "data/openai-gsm8k/share": 0.5,
    }


def test_examples_have_the_first_task_of_each_source_of_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "a", "id": f"t{n}", "source": source} for n, source in enumerate("aabcb")]
    (tmp_path / "many.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = JsonlData(path=str(tmp_path / "many.jsonl"))
    assert [task.id for task in TaskSource(data, seed=1).examples()] == ["t0", "t2", "t3"]
    assert [task.id for task in TaskSource(MixData(parts={"one": {"data": data}}), seed=1).examples()] == ["one/t0"]


def test_examples_of_generated_tasks_are_one_and_no_other_is_generated(monkeypatch) -> None:
    source, asked = TaskSource(ReasoningGymData(size=50), seed=1), []
    get = GymTasks.__getitem__
    monkeypatch.setattr(GymTasks, "__getitem__", lambda tasks, index: asked.append(index) or get(tasks, index))
    assert len(source.examples()) == 1
    assert asked == [0]


def test_what_a_source_remembers_of_a_mix_are_its_draws(mix: MixData) -> None:
    source = TaskSource(mix, seed=1)
    source.take(12)
    assert source.state()["draws"] == [6, 2, 4]
    assert "turns" not in source.state()


def test_examples_are_the_first_task_of_each_part_and_take_nothing(mix: MixData) -> None:
    source = TaskSource(mix, seed=1)
    before = source.state()
    assert [task.id for task in source.examples()] == ["maths/sums/0", "words/t0", "sums/sums/0"]
    assert source.state() == before


def test_a_bad_part_is_found_at_once(mix: MixData) -> None:
    parts = {name: part.model_dump() for name, part in mix.parts.items()}
    parts["words"]["data"]["path"] = "nowhere.jsonl"
    with pytest.raises(DataError, match=r"nowhere\.jsonl: No such file"):
        TaskSource(MixData(parts=parts), seed=1)
