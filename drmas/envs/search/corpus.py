r"""Passages that can be searched: packaged ones, or those of a JSONL file.

    passages = read_corpus("wiki-18.jsonl")
    passages[0].contents

A line is an object with `contents`, and optionally `id` and `title`. Files of Search-R1 are read unchanged: their passages have
no `title` key; the first line of `contents` is the title in quotation marks (`"Tungsten"\nTungsten is ...`). Called by `tool`
and by `drmas serve-retriever`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from drmas.errors import DataError
from drmas.jsonl import parse_object


@dataclass(frozen=True, slots=True)
class Passage:
    r"""One piece of text that can be found.

    `title` is empty where the corpus writes titles into `contents`.

    Example: Passage(id="element/74", title="Tungsten", contents="Tungsten is the chemical element with ...")
    """

    id: str
    title: str
    contents: str

    @property
    def text(self) -> str:
        r"""Title and contents as one text, in Search-R1's shape: `"title"\ncontents`."""
        return f'"{" ".join(self.title.split())}"\n{self.contents}' if self.title else self.contents


PACKAGED = ("facts", "lookups")
"""Corpora that are read without a file."""


def read_corpus(spec: str) -> Sequence[Passage]:
    """The passages of `spec`, `facts`, `lookups` or the path of a JSONL file, in their order.

    A file is checked whole; its passages stay on the disk and are read when they are asked for, so that a corpus may be larger
    than memory. DataError: no such file, no passages in it, or a line that isn't one, named as file:line.
    """
    if spec == "facts":
        from drmas.envs.facts.passages import passages

        return passages()
    if spec == "lookups":
        from drmas.envs.lookups import passages

        return passages()
    return JsonlCorpus(Path(spec))


def check_corpus(spec: str) -> None:
    """DataError unless there is such a corpus; its lines aren't looked at."""
    if spec not in PACKAGED and not Path(spec).is_file():
        raise DataError(f"corpus {spec}: no such file; expected a JSONL file of passages, or {' or '.join(PACKAGED)}")


def fingerprint(passages: Sequence[Passage]) -> str:
    """A hash that changes when a passage's text or the order of passages does; 32 hexadecimal digits."""
    digest = blake2b(digest_size=16)
    for passage in passages:
        data = passage.text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


class JsonlCorpus(Sequence[Passage]):
    """The passages of a JSONL file, read from the disk one by one. Empty lines are passed over. Any thread may read."""

    def __init__(self, path: Path) -> None:
        """Check every line of the file. DataError as in `read_corpus`."""
        self._path = path
        starts, lengths, numbers = array("q"), array("q"), array("q")
        try:
            self._file = path.open("rb")
            offset = 0
            for number, line in enumerate(self._file, start=1):
                if line.strip():
                    _passage(line, f"{path}:{number}", "")
                    starts.append(offset)
                    lengths.append(len(line))
                    numbers.append(number)
                offset += len(line)
        except OSError as error:
            raise DataError(f"corpus {path}: {error.strerror or error}; expected a JSONL file of passages, or facts") from error
        if not starts:
            raise DataError(f"corpus {path}: has no lines with a passage; expected one JSON object with contents per line")
        self._starts, self._lengths, self._numbers = starts, lengths, numbers

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Passage:  # type: ignore[override]  # no slices
        position = range(len(self))[index]
        line = os.pread(self._file.fileno(), self._lengths[position], self._starts[position])
        return _passage(line, f"{self._path}:{self._numbers[position]}", str(position))


def _passage(line: bytes, where: str, default_id: str) -> Passage:
    row = parse_object(line, where, "an object with contents")
    contents = _text(row, "contents", where)
    if not contents.strip():
        raise DataError(f"{where}: `contents` is empty or missing; found the keys {', '.join(row) or '(none)'}")
    return Passage(_text(row, "id", where) or default_id, _text(row, "title", where).strip(), contents)


def _text(row: dict[str, Any], key: str, where: str) -> str:
    """The row's `key` as text, empty where it has none; numbers are written out."""
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: `{key}` is a {type(value).__name__}; expected text")
    text = str(value)
    if any("\ud800" <= sign <= "\udfff" for sign in text):
        raise DataError(f"{where}: `{key}` has half of a surrogate pair, which no tokenizer reads; expected valid Unicode")
    return text
