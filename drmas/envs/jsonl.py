"""Tasks from a JSONL file: one object per line with `prompt` or `question`, `answer`, and optionally `id` and `source`.

Called by `source`. The whole file is read and checked before anything starts; a DataError names the file and the line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from drmas.errors import DataError
from drmas.types import Task

_KNOWN = ("prompt", "question", "answer", "id", "source")


def read_jsonl(path: str | Path) -> list[Task]:
    """The tasks of the file, in its order; other keys of a line go into `Task.extra`. Empty lines are passed over.

    A line without `id` gets the file's name and its line number. DataError: no such file, no tasks in it, a line that isn't a
    JSON object, without a question or a truth, or with the id of an earlier one.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"data.path {path}: {error.strerror or error}; expected a JSONL file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data.path {path}: not UTF-8 at byte {error.start}; expected a JSONL file in UTF-8") from error
    tasks: dict[str, Task] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        task = _task(line, f"{path}:{number}", f"{file.stem}/{number}")
        if task.id in tasks:
            raise DataError(
                f"{path}:{number}: the id {task.id!r} is taken by line {line_of[task.id]}; expected one task per id"
            )
        tasks[task.id], line_of[task.id] = task, number
    if not tasks:
        raise DataError(f"data.path {path}: has no lines with a task; expected one JSON object per line")
    return list(tasks.values())


def _task(line: str, where: str, default_id: str) -> Task:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}; expected one object per line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds a {type(row).__name__}; expected an object with prompt and answer")
    question = _text(row, ("prompt", "question"), where, "question")
    truth = _text(row, ("answer",), where, "truth")
    task_id = str(row.get("id", default_id))
    if re.search(r"@\d+$", task_id):
        raise DataError(f"{where}: the id {task_id!r} ends in @ and a number, which marks repeats; choose another id")
    extra = {key: value for key, value in row.items() if key not in _KNOWN}
    return Task(task_id, question, truth, str(row.get("source", "")), extra)


def _text(row: dict[str, Any], keys: tuple[str, ...], where: str, what: str) -> str:
    """The first of `keys` that the row has, as text; numbers are written out."""
    named = " or ".join(f"`{key}`" for key in keys)
    key = next((key for key in keys if row.get(key) is not None), None)
    if key is None:
        raise DataError(f"{where}: no {what}: expected the key {named}; found the keys {', '.join(row) or '(none)'}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: `{key}` is a {type(value).__name__}; expected text")
    text = str(value)
    if not text.strip():
        raise DataError(f"{where}: `{key}` is empty; expected a {what}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise DataError(f"{where}: `{key}` has half of a surrogate pair, which no tokenizer reads; expected valid Unicode")
    return text
