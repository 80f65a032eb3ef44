"""Tasks from JSONL files: one object per line with `prompt` or `question`, `answer`, and optionally `id` and `source`.

Called by `tasks`, and for its rows by `hub`. A file is read and checked whole before anything starts; a DataError names the
file and the line. `task_line` is the inverse, for `drmas prepare-data`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drmas.envs.fields import TaskTable, accepted_of, paths_of, text_of, with_answers
from drmas.errors import DataError
from drmas.jsonl import read_objects
from drmas.types import Task

_KNOWN = ("prompt", "question", "answer", "answers", "id", "source")


def read_jsonl(path: str | Path) -> list[Task]:
    """The tasks of the files, in their order; other keys of a line go into `Task.extra`. Empty lines are passed over.

    `answer` may be a list: the first is the truth, and all of them are accepted (`extra["answers"]`, also a key of its own).
    A line without `id` gets the file's name and its line number. DataError: no such file, no tasks in it, a line that isn't a
    JSON object, without a question or a truth, or with the id of an earlier one.
    """
    table = TaskTable()
    for file in paths_of(str(path)):
        for number, where, row in json_rows(file):
            table.add(_task(row, where, f"{file.stem}/{number}"), where)
    if not table.tasks:
        raise DataError(f"data.path {path}: has no lines with a task; expected one JSON object per line")
    return table.tasks


def json_rows(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The file's objects with their line numbers (from 1) and how errors name their place."""
    for number, row in read_objects(file, "an object with prompt and answer", key="data.path"):
        yield number, f"{file}:{number}", row


def task_line(task: Task) -> str:
    """`task` as a line that `read_jsonl` reads back as the same task."""
    row = {"id": task.id, "question": task.question, "answer": task.truth}
    return json.dumps(row | ({"source": task.source} if task.source else {}) | task.extra, ensure_ascii=False) + "\n"


def _task(row: dict[str, Any], where: str, default_id: str) -> Task:
    key = _first(row, ("prompt", "question"), where, "question")
    question = text_of(row[key], where, key, "question")
    accepted = accepted_of(row[_first(row, ("answer",), where, "truth")], where, "answer")
    if row.get("answers") is not None:
        accepted = list(dict.fromkeys([*accepted, *accepted_of(row["answers"], where, "answers")]))
    task_id = default_id if row.get("id") is None else text_of(row["id"], where, "id", "name")
    source = "" if row.get("source") in (None, "") else text_of(row["source"], where, "source", "name")
    extra = {name: value for name, value in row.items() if name not in _KNOWN}
    return Task(task_id, question, accepted[0], source, with_answers(extra, accepted))


def _first(row: dict[str, Any], keys: tuple[str, ...], where: str, what: str) -> str:
    """The first of `keys` that the row has."""
    for key in keys:
        if row.get(key) is not None:
            return key
    named = " or ".join(f"`{key}`" for key in keys)
    raise DataError(f"{where}: no {what}: expected the key {named}; found the keys {', '.join(row) or '(none)'}")
