"""What a row of a data file may hold as question, truth and id, as plain text; and tasks under ids that are taken once.

Called by the readers of files (`jsonl`, `parquet`, `hub`). Errors are DataErrors that name the file, row and field.

    accepted_of({"target": ["Bach", "J. S. Bach"]}, "test.parquet row 3", "ground_truth") == ["Bach", "J. S. Bach"]
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from drmas.errors import DataError
from drmas.types import Task


def text_of(value: Any, where: str, field: str, what: str) -> str:
    """`value` as text, numbers written out. DataError: another type, nothing in it, or no valid Unicode."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise DataError(f"{where}: `{field}` is {kind}; expected text")
    if not isinstance(value, str) and not math.isfinite(value):
        raise DataError(f"{where}: `{field}` is {value}; expected text or a finite number")
    text = str(value)
    if not text.strip():
        raise DataError(f"{where}: `{field}` is empty; expected a {what}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise DataError(f"{where}: `{field}` has half of a surrogate pair, which no tokenizer reads; expected valid Unicode")
    return text


def accepted_of(value: Any, where: str, field: str) -> list[str]:
    """The accepted answers, each once: of a text, a number, a list of these, or an object {"target": one of these}."""
    if isinstance(value, dict):
        if "target" not in value:
            raise DataError(
                f"{where}: `{field}` has the keys {', '.join(value) or '(none)'}; expected text, a list or `target`"
            )
        return accepted_of(value["target"], where, f"{field}.target")
    if not isinstance(value, list | tuple):
        return [text_of(value, where, field, "truth")]
    if not value:
        raise DataError(f"{where}: `{field}` is an empty list; expected at least one accepted answer")
    return list(dict.fromkeys(text_of(item, where, f"{field}[{i}]", "truth") for i, item in enumerate(value)))


def with_answers(extra: dict[str, Any], accepted: Sequence[str]) -> dict[str, Any]:
    """`extra` with the accepted answers, where there are several."""
    return {**extra, "answers": list(accepted)} if len(accepted) > 1 else extra


def paths_of(text: str) -> list[Path]:
    """The files of a `path` key: one, or several separated by spaces. DataError: none of them, or a folder among them."""
    files = [Path(text)] if Path(text).exists() else [Path(part) for part in text.split()]
    if not files:
        raise DataError("data.path is empty; expected a file")
    for file in files:
        if file.is_dir():
            raise DataError(f"data.path {file}: Is a directory; expected a file, or several separated by spaces")
    return files


class TaskTable:
    """Tasks in order, each under an id of its own."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._places: dict[str, str] = {}

    def add(self, task: Task, where: str) -> None:
        """DataError: the id is taken by another row, or it looks like a repeat's."""
        if re.search(r"@\d+$", task.id):
            raise DataError(f"{where}: the id {task.id!r} ends in @ and a number, which marks repeats; choose another id")
        if (taken := self._places.setdefault(task.id, where)) != where:
            raise DataError(f"{where}: the id {task.id!r} is taken by {taken}; expected one task per id")
        self.tasks.append(task)
