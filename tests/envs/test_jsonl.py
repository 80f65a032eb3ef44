from __future__ import annotations

import json
from pathlib import Path

import pytest

from drmas.envs.jsonl import read_jsonl
from drmas.errors import DataError
from drmas.types import Task


@pytest.fixture
def write(tmp_path: Path):
    def to_file(*lines: object) -> Path:
        file = tmp_path / "train.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
        return file

    return to_file


def test_rows_become_tasks(write) -> None:
    file = write(
        {"prompt": "1+1?", "answer": "2"},
        "",
        {"question": "Was ist {x}? 你好 \u2028", "answer": 3, "id": 17, "source": "mine", "level": 4},
    )
    assert read_jsonl(file) == [
        Task("train/1", "1+1?", "2"),
        Task("17", "Was ist {x}? 你好 \u2028", "3", "mine", {"level": 4}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "answer": ', "not JSON: .* at column"),
        ("[1]", "holds a list; expected an object"),
        ({"prompt": "x", "solution": "2"}, "no truth: expected the key `answer`; found the keys prompt, solution"),
        ({"prompt": "x", "answer": None}, "expected the key `answer`; found the keys prompt, answer"),
        ({"answer": "2", "query": "x"}, "expected the key `prompt` or `question`; found the keys answer, query"),
        ({}, r"found the keys \(none\)"),
        ({"prompt": "x", "answer": " "}, "`answer` is empty; expected a truth"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "`prompt` is a list; expected text"),
        ({"prompt": "x", "answer": True}, "`answer` is a bool; expected text"),
        ({"prompt": "x", "answer": "2", "id": "a@1"}, "the id 'a@1' ends in @ and a number"),
        ('{"prompt": "\\ud800", "answer": "2"}', "half of a surrogate pair"),
        ({"prompt": "y", "answer": "2", "id": "good"}, "the id 'good' is taken by line 1"),
    ],
)
def test_a_bad_line_is_named_with_its_file(write, line, message: str) -> None:
    file = write({"prompt": "x", "answer": "1", "id": "good"}, "", line)
    with pytest.raises(DataError, match=message) as caught:
        read_jsonl(file)
    assert str(caught.value).startswith(f"{file}:3: ")


def test_files_that_hold_no_tasks(tmp_path: Path, write) -> None:
    with pytest.raises(DataError, match=r"nothing.jsonl: No such file"):
        read_jsonl(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="Is a directory"):
        read_jsonl(tmp_path)
    with pytest.raises(DataError, match="has no lines with a task"):
        read_jsonl(write("", "  "))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "é", "answer": "1"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8 at byte 12"):
        read_jsonl(latin)
