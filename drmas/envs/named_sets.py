r"""The public data sets that the method was measured on: where they are, and how a row of each becomes a task.

| name | repository, split | question | truth |
|---|---|---|---|
| dapo-filter | aaabiao/dapo_filter, train | `prompt[0].content` without its last instruction | `reward_model.ground_truth` |
| aime24 | HuggingFaceH4/aime_2024, train | `problem` | `answer` |
| aime25 | MathArena/aime_2025, train | `problem` | `answer` (a number) |
| math-500 | HuggingFaceH4/MATH-500, test | `problem` | `answer` |
| amc23 | knoveleng/AMC-23, train | `problem` | `answer` |
| minerva | zwhe99/simplerl-minerva-math, test | `problem` | `answer` |
| olympiad | realtreetune/olympiadbench, test | `problem` | `answer` |
| nq-hotpotqa-train | PeterJinGo/nq_hotpotqa_train, train | `question` | `reward_model.ground_truth`, else `golden_answers` |
| nq-hotpotqa-test | PeterJinGo/nq_hotpotqa_train, test | the same | the same |

A task's source is the set's name; of nq-hotpotqa, the row's `data_source`. Called by `drmas prepare-data`. To add a set: a line
in `SETS`, and its name in `BUNDLES` where it belongs to one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from drmas.envs.fields import TaskTable, accepted_of, text_of, with_answers
from drmas.envs.hub import hub_rows
from drmas.envs.parquet import task_of_row
from drmas.errors import DataError
from drmas.types import Task

Row = dict[str, Any]

_INSTRUCTION = re.compile(
    r"let['’]?s\s+think\s+step\s+by\s+step\s+and\s+output\s+the\s+final\s+answer\s+(?:with)?in\s*\\boxed\{\}\.?\s*\Z",
    re.IGNORECASE,
)
"""What DAPO-filter writes below each problem; agents have instructions of their own."""


@dataclass(frozen=True)
class NamedSet:
    """A split of a public data set. `convert(row, where, id)` gives a row's task; it reads `columns`.

    Example: NamedSet("aime24", "HuggingFaceH4/aime_2024", "train", "test", problem_task, ("problem", "answer"))
    """

    name: str
    repository: str
    split: str
    use: str
    """train or test: what its tasks are for, whatever the split is called."""
    convert: Callable[[Row, str, str], Task]
    columns: tuple[str, ...]

    def fetch(self) -> list[Task]:
        """The tasks, from the hub or its cache. DataError: they can't be had, or a row holds none."""
        return self.tasks(hub_rows(self.repository, self.split, columns=dict.fromkeys(self.columns, ())))

    def tasks(self, rows: Iterable[tuple[int, str, Row]]) -> list[Task]:
        table = TaskTable()
        for number, where, row in rows:
            task = self.convert(row, where, f"{self.name}/{number}")
            table.add(task if task.source else replace(task, source=self.name), where)
        if not table.tasks:
            raise DataError(f"{self.repository}: the split {self.split} has no rows")
        return table.tasks


def problem_task(row: Row, where: str, task_id: str) -> Task:
    """Of a row with `problem` and `answer`, as the test sets have it."""
    accepted = accepted_of(row.get("answer"), where, "answer")
    return Task(task_id, text_of(row.get("problem"), where, "problem", "question"), accepted[0], "", with_answers({}, accepted))


def instructed_task(row: Row, where: str, task_id: str) -> Task:
    """Of a row of DAPO-filter: verl's schema, with an instruction below the problem."""
    task = task_of_row({"prompt": row.get("prompt"), "reward_model": row.get("reward_model")}, where, task_id)
    question = text_of(_without_instruction(task.question), where, "prompt.content", "question")
    return replace(task, question=question)


def _without_instruction(question: str) -> str:
    """In time linear in its length: the blanks before the instruction, and "\\n" written out, are matched backwards."""
    found = _INSTRUCTION.search(question)
    if found is None:
        return question
    backwards = question[: found.start()][::-1]
    return backwards[re.match(r"(?:\s|n\\)*", backwards).end() :][::-1]


def question_task(row: Row, where: str, task_id: str) -> Task:
    """Of a row of nq-hotpotqa: verl's schema, with the plain question and its accepted answers in columns of their own."""
    plain = {"question": row.get("question"), "ground_truth": row.get("golden_answers")}
    kept = {name: row.get(name) for name in ("prompt", "reward_model", "data_source")}
    return task_of_row(kept | {"env_kwargs": plain}, where, task_id)


def _problems(name: str, repository: str, split: str) -> NamedSet:
    return NamedSet(name, repository, split, "test", problem_task, ("problem", "answer"))


def _questions(split: str) -> NamedSet:
    columns = ("question", "golden_answers", "data_source", "reward_model", "prompt")
    return NamedSet(f"nq-hotpotqa-{split}", "PeterJinGo/nq_hotpotqa_train", split, split, question_task, columns)


SETS = {
    found.name: found
    for found in (
        NamedSet("dapo-filter", "aaabiao/dapo_filter", "train", "train", instructed_task, ("prompt", "reward_model")),
        _problems("aime24", "HuggingFaceH4/aime_2024", "train"),
        _problems("aime25", "MathArena/aime_2025", "train"),
        _problems("math-500", "HuggingFaceH4/MATH-500", "test"),
        _problems("amc23", "knoveleng/AMC-23", "train"),
        _problems("minerva", "zwhe99/simplerl-minerva-math", "test"),
        _problems("olympiad", "realtreetune/olympiadbench", "test"),
        _questions("train"),
        _questions("test"),
    )
}

BUNDLES = {
    "math": ("dapo-filter", "aime24", "aime25", "math-500", "amc23", "minerva", "olympiad"),
    "search": ("nq-hotpotqa-train", "nq-hotpotqa-test"),
}
"""Sets that are prepared together: name -> sets."""

SAMPLED = {"math": {"math-500": 50, "aime24": 30, "aime25": 30}, "search": {"": 30}}
"""The small test set of a bundle: source -> how many of its first tasks; "" stands for every source."""


def sample(bundle: str, tasks: Iterable[Task]) -> list[Task]:
    """The small test set among a bundle's test tasks, for evaluation between steps."""
    limits, seen, kept = SAMPLED[bundle], Counter[str](), []
    for task in tasks:
        seen[task.source] += 1
        if seen[task.source] <= limits.get(task.source, limits.get("", 0)):
            kept.append(task)
    return kept
