"""Tasks from a dataset of the Hugging Face hub, from the hub's cache on this machine, or from a folder of the same shape.

Only data files are read, Parquet and JSONL, and nothing of a dataset's own code is run. What a dataset doesn't have in these
formats comes from the Parquet copy that the hub keeps of public datasets (the revision refs/convert/parquet).

Called by `tasks`, and for its rows by `drmas prepare-data`. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are huggingface_hub's. A dry
run asks `is_here`, and reads under `cache_only`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from drmas.config.tasks import HuggingFaceData
from drmas.envs.fields import TaskTable, accepted_of, text_of, with_answers
from drmas.envs.jsonl import json_rows
from drmas.envs.parquet import parquet_rows
from drmas.envs.snapshots import HubError, cached, snapshot
from drmas.errors import DataError
from drmas.types import Task

_SUFFIXES = (".parquet", ".jsonl")
_REVISIONS = (None, "refs/convert/parquet")
_MARK = "####"
"""GSM8K writes its answer after this mark, below the reasoning."""
_FETCH = ContextVar("fetch", default=True)


@contextmanager
def cache_only() -> Iterator[None]:
    """Within, the network isn't asked for datasets: what the hub's cache has is all there is."""
    token = _FETCH.set(False)
    try:
        yield
    finally:
        _FETCH.reset(token)


def is_here(config: HuggingFaceData) -> bool:
    """Whether the split is a folder's, or in the hub's cache. DataError: `data.path` is neither a folder nor a name."""
    if _is_local(config.path):
        return True
    try:
        folders = [
            cached(config.path, repo_type="dataset", revision=revision, allow=_patterns(config.split))
            for revision in _REVISIONS
        ]
    except HubError as error:
        raise DataError(_not_a_name(config.path)) from error
    return any(
        _is_of(file, list(file.relative_to(folder).parts[:-1]), config.split)
        for folder in folders
        if folder is not None
        for file in _data_files(folder)
    )


def read_huggingface(config: HuggingFaceData) -> list[Task]:
    """The tasks of a split, in its order.

    DataError: no such dataset, configuration, split or column, a row that holds no task, or the hub can't be reached.
    """
    table = TaskTable()
    name = config.path.rstrip("/").rpartition("/")[2]
    columns = {key.partition(".")[0]: () for key in (config.question, config.answer)}
    for row, where, values in hub_rows(config.path, config.split, name=config.name, columns=columns):
        question = text_of(_value(values, config.question, "question", where), where, config.question, "question")
        truth = _value(values, config.answer, "answer", where)
        if isinstance(truth, str) and _MARK in truth:
            truth = truth.rpartition(_MARK)[2].strip()
        accepted = accepted_of(truth, where, config.answer)
        table.add(Task(f"{name}/{config.split}/{row}", question, accepted[0], name, with_answers({}, accepted)), where)
    if not table.tasks:
        raise DataError(f"data.path {config.path}: the split {config.split} has no rows; expected one task per row")
    return table.tasks


def hub_rows(
    path: str, split: str, *, name: str | None = None, columns: dict[str, tuple[str, ...]] | None = None
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The rows of a split of the dataset or folder `path`, with their numbers in the split and how errors name their place.

    `columns` as in `parquet_rows`; all if None.
    """
    number = 0
    for file in _split_files(path, name, split):
        rows = json_rows(file) if file.suffix == ".jsonl" else parquet_rows(file, columns or _all_columns(file))
        for _, where, values in rows:
            yield number, where, values
            number += 1


def _all_columns(file: Path) -> dict[str, tuple[str, ...]]:
    import pyarrow
    from pyarrow import parquet

    try:
        return dict.fromkeys(parquet.read_schema(file).names, ())
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"data.path {file}: {' '.join(str(error).split())}; expected a Parquet file") from error


def _split_files(path: str, name: str | None, split: str) -> list[Path]:
    if Path(path).is_dir():
        return _matching(Path(path), path, name, split)
    if _is_local(path):
        found = "a file" if Path(path).is_file() else "not there"
        raise DataError(f"data.path {path}: {found}; expected a dataset's name on the hub, such as openai/gsm8k, or a folder")
    trouble: DataError | None = None
    for revision in _REVISIONS:
        try:
            return _matching(_download(path, split, revision), path, name, split)
        except DataError as error:
            trouble = trouble or error
    raise trouble


def _is_local(path: str) -> bool:
    return Path(path).exists() or path.startswith((".", "/", "~"))


def _patterns(split: str) -> list[str]:
    return [f"*{split}*{suffix}" for suffix in _SUFFIXES]


def _data_files(folder: Path) -> list[Path]:
    return [file for suffix in _SUFFIXES for file in sorted(folder.rglob(f"*{suffix}"))]


def _not_a_name(path: str) -> str:
    return f"data.path {path}: not a dataset's name; expected one such as openai/gsm8k, or a folder"


def _download(path: str, split: str, revision: str | None) -> Path:
    """The folder with the split's files of a revision, from the hub or its cache."""
    try:
        return snapshot(path, repo_type="dataset", revision=revision, allow=_patterns(split), fetch=_FETCH.get())
    except HubError as error:
        raise DataError(
            {
                "name": _not_a_name(path),
                "gated": f"data.path {path}: the dataset is gated; accept its terms on the hub and set HF_TOKEN, or fetch it "
                "by hand",
                "unknown": f"data.path {path}: the hub has no such dataset, or it is private; expected a public name such as "
                "openai/gsm8k, or HF_TOKEN in the environment",
                "unreachable": f"{path}: {error}, and its cache here has no such dataset; where there is network, drmas "
                "prepare-data or hf download --repo-type dataset fetches it into a folder: copy that here and set data.path to "
                "it",
            }[error.kind]
        ) from error


def _matching(folder: Path, path: str, name: str | None, split: str) -> list[Path]:
    """The data files of `folder` that belong to the split, and to the configuration if one is named.

    A file belongs to the split that its name is or starts with (train.parquet, train-00000-of-00002.parquet), or that a folder
    above it is named after; to the configuration that a folder above it is named after.
    """
    files = _data_files(folder)
    above = {file: list(file.relative_to(folder).parts[:-1]) for file in files}
    found = [file for file in files if _is_of(file, above[file], split) and (name is None or name in above[file])]
    if not found:
        shown = ", ".join(str(file.relative_to(folder)) for file in files[:6]) + (", ..." if len(files) > 6 else "")
        which = f"the split {split}" + (f" of the configuration {name}" if name else "")
        raise DataError(f"data.path {path}: no files of {which}; found {shown or 'no Parquet or JSONL files'}; set data.split")
    if len(configurations := sorted({_configuration(above[file], split) for file in found})) > 1:
        raise DataError(f"data.path {path}: has the configurations {', '.join(configurations)}; set data.name to one of them")
    return found


def _is_of(file: Path, above: list[str], split: str) -> bool:
    return file.stem == split or file.stem.startswith((f"{split}-", f"{split}_", f"{split}.")) or split in above


def _configuration(above: list[str], split: str) -> str:
    return "/".join(part for part in above if part not in (split, "data")) or "default"


def _value(row: dict[str, Any], key: str, setting: str, where: str) -> Any:
    """The column `key`, or the field of a column."""
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or value.get(part) is None:
            found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise DataError(f"{where}: no value in the column {key}; found {found}; set data.{setting}")
        value = value[part]
    return value
