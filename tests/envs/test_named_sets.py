from __future__ import annotations

from collections import Counter

import pytest

from drmas.envs.named_sets import BUNDLES, SETS, sample
from drmas.errors import DataError
from drmas.types import Task

PROBLEM = "Find all $x$ with $x^2=4$."
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

ROWS = {
    "dapo-filter": (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{PROBLEM} {INSTRUCTION}"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
        Task("dapo-filter/0", PROBLEM, "34", "dapo-filter"),
    ),
    "aime24": (
        {"id": 60, "problem": PROBLEM, "solution": "...", "answer": "204", "url": "https://x", "year": "2024"},
        Task("aime24/0", PROBLEM, "204", "aime24"),
    ),
    "aime25": (
        {"problem_idx": 1, "problem": PROBLEM, "answer": 70, "problem_type": ["Number Theory"]},
        Task("aime25/0", PROBLEM, "70", "aime25"),
    ),
    "math-500": (
        {"problem": PROBLEM, "solution": "...", "answer": "\\pi", "subject": "Algebra", "level": 2, "unique_id": "test/1.json"},
        Task("math-500/0", PROBLEM, "\\pi", "math-500"),
    ),
    "amc23": ({"problem": PROBLEM, "answer": 27.0}, Task("amc23/0", PROBLEM, "27.0", "amc23")),
    "minerva": (
        {"problem": PROBLEM, "solution": "...", "answer": "1.6", "type": "astronomy", "idx": 0},
        Task("minerva/0", PROBLEM, "1.6", "minerva"),
    ),
    "olympiad": (
        {"problem": PROBLEM, "answer": ["2", "-2"]},
        Task("olympiad/0", PROBLEM, "2", "olympiad", {"answers": ["2", "-2"]}),
    ),
    "nq-hotpotqa-train": (
        {
            "id": "train_0",
            "question": "total number of death row inmates in the us?",
            "golden_answers": ["2,718"],
            "data_source": "nq",
            "prompt": [{"role": "user", "content": "Answer the given question. Question: total number ..."}],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": ["2,718"]}, "style": "rule"},
            "extra_info": {"index": 0, "split": "train"},
            "metadata": None,
        },
        Task("nq-hotpotqa-train/0", "total number of death row inmates in the us?", "2,718", "nq"),
    ),
    "nq-hotpotqa-test": (
        {"question": "Who?", "golden_answers": ["Bach", "J. S. Bach"], "data_source": "popqa", "reward_model": None},
        Task("nq-hotpotqa-test/0", "Who?", "Bach", "popqa", {"answers": ["Bach", "J. S. Bach"]}),
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_a_row_of_each_set_becomes_its_task(name: str) -> None:
    row, task = ROWS[name]
    read = {column: row[column] for column in SETS[name].columns if column in row}
    assert SETS[name].tasks([(0, "file row 0", read)]) == [task]


@pytest.mark.parametrize("name", SETS)
def test_a_row_without_its_columns_is_named(name: str) -> None:
    with pytest.raises(DataError, match=r"file row 0: "):
        SETS[name].tasks([(0, "file row 0", {"text": "x"})])
    with pytest.raises(DataError, match=f"{SETS[name].repository}: the split {SETS[name].split} has no rows"):
        SETS[name].tasks([])


@pytest.mark.parametrize(
    "below",
    [f"\n\n{INSTRUCTION}", f" {INSTRUCTION}\n", f"\\n\\n{INSTRUCTION}", INSTRUCTION.replace("Let's", "lets").replace(".", "")],
)
def test_the_instruction_below_a_problem_is_taken_off_in_every_spelling(below: str) -> None:
    row = {"prompt": [{"role": "user", "content": PROBLEM + below}], "reward_model": {"ground_truth": "34"}}
    assert SETS["dapo-filter"].tasks([(0, "file row 0", row)])[0].question == PROBLEM


def test_the_instruction_in_the_middle_stays() -> None:
    text = f"{INSTRUCTION} {PROBLEM}"
    row = {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "34"}}
    assert SETS["dapo-filter"].tasks([(0, "file row 0", row)])[0].question == text


@pytest.mark.parametrize("blank", [" ", "\n", "\\n", "let's ", "let's think step by step and "])
def test_a_long_run_of_blanks_is_read_in_time_linear_in_it(blank: str) -> None:
    """A pattern that starts over at each of them would take minutes."""
    run = blank * 100_000
    below, middle = (f"{PROBLEM}{run}{INSTRUCTION}", f"{PROBLEM}{run}{PROBLEM}")
    rows = [{"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "34"}} for text in (below, middle)]
    first, second = SETS["dapo-filter"].tasks((i, "file row", row) for i, row in enumerate(rows))
    assert first.question == (PROBLEM if blank.strip(" \n\\n") == "" else f"{PROBLEM}{run.rstrip()}")
    assert second.question == middle


def test_the_small_test_sets_are_the_first_tasks_of_their_sources() -> None:
    maths = [Task(f"{name}/{i}", "q", "1", name) for name in BUNDLES["math"][1:] for i in range(60)]
    assert Counter(task.source for task in sample("math", maths)) == {"math-500": 50, "aime24": 30, "aime25": 30}
    words = [Task(f"x/{i}", "q", "1", ("nq", "popqa", "bamboogle")[i % 3]) for i in range(100)]
    assert [task.id for task in sample("search", words)] == [f"x/{i}" for i in range(90)]


def test_bundles_name_sets_and_each_has_what_it_needs() -> None:
    assert {name for members in BUNDLES.values() for name in members} == set(SETS)
    for members in BUNDLES.values():
        assert {SETS[name].use for name in members} == {"train", "test"}
