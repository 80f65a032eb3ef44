from __future__ import annotations

import pytest

from drmas.config.tasks import ReasoningGymData
from drmas.envs.generated import GymTasks
from drmas.errors import ConfigError, DataError


def test_a_task_is_a_function_of_settings_and_index() -> None:
    config = ReasoningGymData(name="basic_arithmetic", size=20, seed=3, options={"min_terms": 2, "max_terms": 2})
    once, again = GymTasks(config), GymTasks(config)
    assert once[7] == again[7]
    assert (once[7].id, once[7].source, len(once)) == ("basic_arithmetic/7", "basic_arithmetic", 20)
    assert once[7].truth in once[7].extra["metadata"]["expression"] or once[7].truth.lstrip("-").isdigit()
    assert len({task.question for task in once}) > 10
    assert GymTasks(config.model_copy(update={"seed": 4}))[7] != once[7]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "basic_arithmetik"}, "data.name is 'basic_arithmetik'; the nearest is 'basic_arithmetic'"),
        ({"options": {"min_term": 2}}, "data.options .* don't fit the generator basic_arithmetic: .*min_term"),
        ({"options": {"min_terms": -2}}, "min_terms must be positive"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymTasks(ReasoningGymData(**settings))


def test_a_generator_without_one_answer_is_refused() -> None:
    with pytest.raises(DataError, match="has the answer None; expected text"):
        GymTasks(ReasoningGymData(name="rubiks_cube", size=1))[0]
