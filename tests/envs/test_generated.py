from __future__ import annotations

import json
import sys

import pytest

from drmas.config.tasks import ReasoningGymData
from drmas.envs.generated import GymTasks, gym_truth, gym_verdict
from drmas.errors import ConfigError, DataError


def test_a_task_is_a_function_of_settings_and_index() -> None:
    config = ReasoningGymData(name="basic_arithmetic", size=20, seed=3, options={"min_terms": 2, "max_terms": 2})
    once, again = GymTasks(config), GymTasks(config)
    assert once[7] == again[7]
    assert (once[7].id, once[7].source, len(once)) == ("basic_arithmetic/7", "basic_arithmetic", 20)
    assert once[7].truth in once[7].extra["metadata"]["expression"] or once[7].truth.lstrip("-").isdigit()
    assert len({task.question for task in once}) > 10
    assert GymTasks(config.model_copy(update={"seed": 4}))[7] != once[7]


def terms(config: ReasoningGymData) -> set[int]:
    return {task.question.count("+") + task.question.count(" - ") + 1 for task in GymTasks(config)}


def test_a_difficulty_is_a_level_of_the_generators_curriculum_and_options_go_before_it() -> None:
    low, high = (ReasoningGymData(name="chain_sum", size=60, difficulty=level) for level in (0, 5))
    assert max(terms(low)) < max(terms(high))
    assert GymTasks(low)[3] != GymTasks(low.model_copy(update={"difficulty": None}))[3]
    fixed = high.model_copy(update={"options": {"min_terms": 2, "max_terms": 2}})
    assert terms(fixed) == {2}


def test_every_level_up_to_the_highest_of_any_setting_is_taken() -> None:
    """chain_sum has 11 levels of terms and 10 of digits."""
    assert len(GymTasks(ReasoningGymData(name="chain_sum", size=2, difficulty=10))) == 2
    with pytest.raises(ConfigError, match=r"data.difficulty is 11; the generator chain_sum has the levels 0 to 10"):
        GymTasks(ReasoningGymData(name="chain_sum", size=2, difficulty=11))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "basic_arithmetik"}, "data.name is 'basic_arithmetik'; the nearest is 'basic_arithmetic'"),
        ({"options": {"min_term": 2}}, "data.options .* don't fit the generator basic_arithmetic: .*min_term"),
        ({"options": {"min_terms": -2}}, "min_terms must be positive"),
        ({"difficulty": 0, "options": {"min_term": 2}}, "basic_arithmetic at data.difficulty 0: .*min_term"),
        ({"name": "acre", "difficulty": 0}, "data.difficulty is 0, and the generator acre has no curriculum"),
        ({"name": "rubiks_cube", "difficulty": 4}, "rubiks_cube at data.difficulty 4: cube_size must be less than 7"),
        ({"name": "composite"}, "don't fit the generator composite"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymTasks(ReasoningGymData(**settings))


def test_I9_a_generator_that_depends_on_the_hash_seed_wants_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ReasoningGymData(name="ransom_note", size=2)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="set PYTHONHASHSEED=0 in the environment"):
        GymTasks(config)
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        GymTasks(config)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert GymTasks(config)[1].source == "ransom_note"


def test_a_generator_that_fails_on_a_task_is_named() -> None:
    tasks = GymTasks(ReasoningGymData(size=3))
    tasks._dataset = {}
    with pytest.raises(DataError, match="basic_arithmetic: the generator failed on task 1 of seed 0: KeyError"):
        tasks[1]


def verdict_on(answer: str, index: int = 0, **settings) -> float:
    task = GymTasks(ReasoningGymData(size=3, **settings))[index]
    return gym_verdict(answer, gym_truth(task))


def test_a_generator_without_one_answer_scores_by_its_own_rule() -> None:
    tasks = GymTasks(ReasoningGymData(name="graph_color", size=3, seed=5))
    assert [task.truth for task in tasks] == ["", "", ""]
    puzzle = tasks[1].extra["metadata"]["puzzle"]
    colours = puzzle["color_options"]
    right = colour(puzzle["vertices"], [tuple(edge) for edge in puzzle["edges"]], colours)
    wrong = dict.fromkeys(right, colours[0])
    assert verdict_on(json.dumps(right), 1, name="graph_color", seed=5) == 1.0
    assert verdict_on("<think>so</think> " + json.dumps(right), 1, name="graph_color", seed=5) == 1.0
    assert verdict_on(json.dumps(wrong), 1, name="graph_color", seed=5) < 0.1


def colour(vertices: list, edges: list, colours: list) -> dict[str, int]:
    """A colouring in which no edge has one colour, by trying."""

    def extend(done: dict) -> dict | None:
        if len(done) == len(vertices):
            return done
        vertex = vertices[len(done)]
        near = {done.get(b if a == vertex else a) for a, b in edges if vertex in (a, b)}
        tries = (extend({**done, vertex: shade}) for shade in colours if shade not in near)
        return next((found for found in tries if found), None)

    return {str(vertex): shade for vertex, shade in extend({}).items()}


def test_a_box_or_the_text_after_the_thinking_is_what_is_scored() -> None:
    task = GymTasks(ReasoningGymData(name="chain_sum", size=3))[2]
    truth = gym_truth(task)
    for text in (task.truth, f" {task.truth}\n", f"<think>7</think>{task.truth}", f"it is \\boxed{{{task.truth}}}."):
        assert gym_verdict(text, truth) == 1.0
    assert gym_verdict("7", truth) == 0.0


def test_an_answer_that_the_rule_cannot_read_is_wrong() -> None:
    assert verdict_on("two times three", name="prime_factorization") == 0.0


def test_I3_a_rule_that_fails_on_every_answer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = GymTasks(ReasoningGymData(size=3))

    def broken(answer: str, entry: dict) -> float:
        raise KeyError("gone")

    monkeypatch.setattr(tasks._dataset, "score_answer", broken)
    with pytest.raises(KeyError, match="gone"):
        tasks.score("5", 0)
    for number in (float("nan"), 1.5, -0.1):
        monkeypatch.setattr(tasks._dataset, "score_answer", lambda answer, entry, number=number: number)
        with pytest.raises(ValueError, match=r"scored task 0 with .*; expected 0 to 1"):
            tasks.score("5", 0)


def test_I3_a_task_that_is_generated_as_another_one_is_not_scored() -> None:
    task = GymTasks(ReasoningGymData(size=3))[0]
    truth = json.loads(gym_truth(task)) | {"question": "another"}
    with pytest.raises(ValueError, match="task 0 of basic_arithmetic is another one when it is generated anew"):
        gym_verdict(task.truth, json.dumps(truth))


def test_a_package_that_cannot_be_imported_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_):
            if name.startswith("reasoning_gym"):
                raise ModuleNotFoundError("No module named 'pkg_resources'", name="pkg_resources")

    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"can't be imported here: No module named 'pkg_resources'; its fonts need pyfiglet"):
        GymTasks(ReasoningGymData(size=1))
