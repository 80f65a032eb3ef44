"""`drmas prepare-data`: public data sets and the packaged facts as JSONL files that `data.type jsonl` reads.

What is fetched comes from the Hugging Face hub or its cache; nothing is left half-written: the files are written beside their
folder and moved into it when all of them are whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from drmas.core.names import expected_names
from drmas.errors import ConfigError, DataError
from drmas.types import Task

FACTS = "facts"
FACTS_HOPS = [1, 2, 3]


def describe_sets() -> str:
    """What can be prepared, one a line: what it is, and which files it gives."""
    from drmas.envs.named_sets import BUNDLES, SETS

    lines = [f"{FACTS}: the packaged facts, offline; corpus.jsonl, train.jsonl, test.jsonl"]
    for name, members in BUNDLES.items():
        lines.append(f"{name}: {', '.join(members)}; train.jsonl, test.jsonl, test_sampled.jsonl")
    lines += [f"{named.name}: {named.repository}, split {named.split}; {named.use}.jsonl" for named in SETS.values()]
    return "\n".join(lines)


def prepare(name: str, output: Path | None) -> list[tuple[Path, int]]:
    """Prepare the set or bundle `name` in `output` (data/NAME if None); its files, and how many lines each has.

    ConfigError: no such set. DataError: it can't be had, or `output` can't be written. Either way `output` is as it was.
    """
    folder = output or Path("data") / name
    if name == FACTS:
        return _fill(folder, _write_facts)
    files = _tasks_of(name)
    return _fill(folder, lambda draft: _write_tasks(draft, files))


def _tasks_of(name: str) -> dict[str, list[Task]]:
    """File name -> its tasks."""
    from drmas.envs.named_sets import BUNDLES, SETS, sample

    if name not in BUNDLES and name not in SETS:
        raise ConfigError(f"prepare-data: {name!r} is no data set; {expected_names(name, [FACTS, *BUNDLES, *SETS])}")
    files: dict[str, list[Task]] = {}
    for member in BUNDLES.get(name, (name,)):
        files.setdefault(SETS[member].use, []).extend(SETS[member].fetch())
    if name in BUNDLES:
        files["test_sampled"] = sample(name, files["test"])
    return files


def _write_tasks(folder: Path, files: dict[str, list[Task]]) -> dict[str, int]:
    from drmas.envs.jsonl import task_line

    for name, tasks in files.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(map(task_line, tasks))
    return {f"{name}.jsonl": len(tasks) for name, tasks in files.items()}


def _write_facts(folder: Path) -> dict[str, int]:
    from drmas.config.tasks import FactsData
    from drmas.envs.facts import questions, write_corpus

    corpus = write_corpus(folder)
    with corpus.open(encoding="utf-8") as file:
        passages = sum(1 for _ in file)
    splits = {split: questions(FactsData(split=split, hops=FACTS_HOPS)) for split in ("train", "test")}
    return {corpus.name: passages, **_write_tasks(folder, splits)}


def _fill(folder: Path, write: Callable[[Path], dict[str, int]]) -> list[tuple[Path, int]]:
    """What `write` writes into an empty folder, moved to `folder` when all of it is there; other files there stay."""
    draft = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        written = write(draft)
        folder.mkdir(exist_ok=True)
        for name in written:
            os.replace(draft / name, folder / name)
    except OSError as error:
        raise DataError(f"prepare-data: {folder} can't be written: {error.strerror or error}; set --output") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
    return [(folder / name, count) for name, count in written.items()]
