import pytest

from drmas.config.tasks import SumsData
from drmas.envs.sums import demonstrate, sums_tasks


def test_tasks_are_sums_with_their_truth() -> None:
    tasks = sums_tasks(SumsData(largest=5, terms=3, size=50, seed=1))
    assert len({task.id for task in tasks}) == 50
    for task in tasks:
        terms = [int(term) for term in task.question.split("+")]
        assert len(terms) == 3
        assert max(terms) <= 5
        assert int(task.truth) == sum(terms)
    assert tasks == sums_tasks(SumsData(largest=5, terms=3, size=50, seed=1))
    assert tasks != sums_tasks(SumsData(largest=5, terms=3, size=50, seed=2))


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("<user>12+7=<agent>", "19"), ("1+2+3=", "6"), ("12+7=19?", "yes"), ("12+7=18?", "no"), ("1+1=?", "no")],
)
def test_a_teacher_without_errors_is_right(prompt: str, answer: str) -> None:
    assert demonstrate(prompt, "key", seed=0, error_rate=0.0) == answer


def test_a_teacher_errs_at_its_rate_and_always_the_same_way() -> None:
    keys = [f"t{i}" for i in range(400)]
    answers = [demonstrate("4+5=", key, seed=0, error_rate=0.3) for key in keys]
    assert answers == [demonstrate("4+5=", key, seed=0, error_rate=0.3) for key in keys]
    wrong = sum(answer != "9" for answer in answers)
    assert 0.2 < wrong / 400 < 0.4
    assert all(demonstrate("0+1=", key, seed=0, error_rate=1.0) not in ("1", "") for key in keys)


def test_a_prompt_without_a_sum_is_named() -> None:
    with pytest.raises(ValueError, match="no sum in the prompt 'hello'"):
        demonstrate("hello", "key", seed=0, error_rate=0.0)
