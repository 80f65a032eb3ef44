"""Tasks from Parquet files in the row schema of verl and of the method's first implementation, read as they are.

| column | what becomes of it |
|---|---|
| `prompt` | chat messages: the user message is the question, a system message goes to `Task.extra["system"]` |
| `env_kwargs` | `question` goes before the prompt; `ground_truth` and `data_source` stand in where the columns lack them |
| `reward_model` | `ground_truth`: text, number, list of accepted answers, or {"target": one of these} |
| `data_source` | `Task.source` |
| `extra_info` | `id`, else source, `split` and `index`, name the task; else the file and the row do |

Teams that want a system message read it there themselves. Called by `tasks`, and for its rows by `hub`. Rows count from 0. A
DataError names the file, the row and the column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drmas.envs.fields import TaskTable, accepted_of, paths_of, text_of, with_answers
from drmas.errors import DataError
from drmas.types import Task

_COLUMNS = {
    "data_source": (),
    "prompt": (),
    "reward_model": ("ground_truth",),
    "extra_info": ("id", "index", "split"),
    "env_kwargs": ("question", "ground_truth", "data_source"),
}
"""What is read: a column, or these fields of it."""
_BATCH_ROWS = 1024


def read_parquet(path: str | Path) -> list[Task]:
    """The tasks of the files, in their order.

    DataError: no such file, not Parquet, damaged, no rows, a row that holds no task, or two rows with one id.
    """
    table = TaskTable()
    for file in paths_of(str(path)):
        for row, where, values in parquet_rows(file, _COLUMNS):
            table.add(task_of_row(values, where, f"{file.stem}/{row}"), where)
    if not table.tasks:
        raise DataError(f"data.path {path}: has no rows; expected one task per row")
    return table.tasks


def parquet_rows(file: Path, columns: dict[str, Sequence[str]]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The file's rows with their numbers and how errors name their place, as plain Python values, a batch at a time.

    `columns`: name -> the fields of it that are wanted, all if none. What the file doesn't have is left out.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            schema = opened.schema_arrow
            wanted = [leaf for name in columns if name in schema.names for leaf in _leaves(schema.field(name), columns[name])]
            if not wanted:
                found = ", ".join(schema.names) or "(none)"
                raise DataError(f"{file}: has the columns {found}; expected {', '.join(columns)}")
            row = 0
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
                for values in batch.to_pylist():
                    yield row, f"{file} row {row}", values
                    row += 1
    except (OSError, pyarrow.ArrowException) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"data.path {file}: {said}; expected a Parquet file") from error


def _leaves(column: Any, fields: Sequence[str]) -> list[str]:
    """`column` whole, or those of its fields that are wanted; whole as well where it is no struct, for the error about it."""
    if not fields or not hasattr(column.type, "fields"):
        return [column.name]
    return [f"{column.name}.{inner.name}" for inner in column.type.fields if inner.name in fields]


def task_of_row(row: dict[str, Any], where: str, default_id: str) -> Task:
    """The task that one row holds, by the table above. DataError: it holds none."""
    structs = {name: row.get(name) for name in ("reward_model", "extra_info", "env_kwargs")}
    for name, value in structs.items():
        if value is not None and not isinstance(value, dict):
            raise DataError(f"{where}: `{name}` is a {type(value).__name__}; expected fields such as {_COLUMNS[name][0]}")
    reward_model, extra_info, env = (value or {} for value in structs.values())
    question, system = _question(row.get("prompt"), env.get("question"), where)
    if reward_model.get("ground_truth") is not None:
        accepted = accepted_of(reward_model["ground_truth"], where, "reward_model.ground_truth")
    elif env.get("ground_truth") is not None:
        accepted = accepted_of(env["ground_truth"], where, "env_kwargs.ground_truth")
    else:
        raise DataError(f"{where}: no truth: expected reward_model.ground_truth or env_kwargs.ground_truth")
    source = row.get("data_source") if row.get("data_source") is not None else env.get("data_source")
    source = "" if source in (None, "") else text_of(source, where, "data_source", "name")
    extra = {"system": system} if system else {}
    return Task(_id(extra_info, source, where) or default_id, question, accepted[0], source, with_answers(extra, accepted))


def _id(extra_info: dict[str, Any], source: str, where: str) -> str | None:
    if extra_info.get("id") is not None:
        return text_of(extra_info["id"], where, "extra_info.id", "name")
    if extra_info.get("index") is None:
        return None
    parts = [source, extra_info.get("split"), text_of(extra_info["index"], where, "extra_info.index", "name")]
    return "/".join(str(part) for part in parts if part not in (None, ""))


def _question(prompt: Any, plain: Any, where: str) -> tuple[str, str]:
    """The question, and the system message or "". `plain` is the question without what a data set writes around it."""
    if isinstance(prompt, str) or (prompt is None and plain is not None):
        return text_of(prompt if plain is None else plain, where, "prompt", "question"), ""
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        kind = "null" if prompt is None else "a list with other things" if isinstance(prompt, list) else type(prompt).__name__
        raise DataError(f"{where}: `prompt` is {kind}; expected chat messages or text")
    said = {role: [m.get("content") for m in prompt if m.get("role") == role] for role in ("system", "user")}
    system = "".join(text_of(text, where, "prompt.content", "system message") for text in said["system"][:1])
    if plain is not None:
        return text_of(plain, where, "env_kwargs.question", "question"), system
    if len(said["user"]) != 1:
        raise DataError(f"{where}: `prompt` has {len(said['user'])} user messages; expected one, or env_kwargs.question")
    return text_of(said["user"][0], where, "prompt.content", "question"), system
