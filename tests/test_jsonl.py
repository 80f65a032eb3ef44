"""The reader that all JSONL files go through."""

from __future__ import annotations

from pathlib import Path

import pytest

from drmas.errors import DataError
from drmas.jsonl import read_objects


@pytest.fixture
def write(tmp_path: Path):
    def to_file(data: bytes) -> Path:
        (tmp_path / "rows.jsonl").write_bytes(data)
        return tmp_path / "rows.jsonl"

    return to_file


def test_objects_come_with_their_line_numbers_and_empty_lines_are_passed_over(write) -> None:
    file = write('\ufeff{"a": "\u2028é"}\r\n\n  \n{"a": 2}'.encode())
    assert list(read_objects(file, "an object with a")) == [(1, {"a": "\u2028é"}), (4, {"a": 2})]
    assert list(read_objects(write(b""), "an object with a")) == []


def test_a_half_last_line_is_passed_over_only_where_a_killed_writer_may_have_left_one(write) -> None:
    file = write(b'{"a": 1}\n{"a": "\xc3')
    assert list(read_objects(file, "an object with a", killed=True)) == [(1, {"a": 1})]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not UTF-8 at byte 7 of the line; expected an object with a per line"):
        list(read_objects(file, "an object with a"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "not JSON: Expecting value at column 1; expected an object with a per line"),
        (b"[1]", "holds a list; expected an object with a"),
        (b"[" * 100_000, "can't be read: "),
        (b'{"a": ' + b"9" * 5000 + b"}", "can't be read: "),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7 of the line"),
    ],
)
def test_a_damaged_line_is_named(write, line: bytes, message: str) -> None:
    file = write(b'{"a": 1}\n\n' + line + b"\n")
    objects = read_objects(file, "an object with a")
    assert next(objects) == (1, {"a": 1})
    with pytest.raises(DataError) as caught:
        next(objects)
    assert str(caught.value).startswith(f"{file}:3: {message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^data\.path .*no\.jsonl: No such file or directory; expected a JSONL file, a task per"
    ):
        next(read_objects(tmp_path / "no.jsonl", "a task", key="data.path"))
    with pytest.raises(DataError, match=rf"^{tmp_path}: Is a directory; expected a JSONL file, a task per line"):
        next(read_objects(tmp_path, "a task"))
