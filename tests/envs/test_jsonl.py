from __future__ import annotations

import json
from pathlib import Path

import pytest

from drmas.envs.jsonl import read_jsonl, task_line
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


def test_all_accepted_answers_are_kept_with_the_first_as_the_truth(write) -> None:
    tasks = read_jsonl(
        write(
            {"prompt": "x", "answer": ["Bach", "J. S. Bach", "Bach", 1685]},
            {"prompt": "x", "answer": {"target": ["Bach"]}},
            {"prompt": "x", "answer": "Bach", "answers": ["J. S. Bach", "Bach"]},
        )
    )
    assert [task.truth for task in tasks] == ["Bach"] * 3
    assert [task.extra for task in tasks] == [
        {"answers": ["Bach", "J. S. Bach", "1685"]},
        {},
        {"answers": ["Bach", "J. S. Bach"]},
    ]


def test_a_task_is_written_as_the_line_that_gives_it_back(tmp_path: Path) -> None:
    tasks = [
        Task("a", "Was ist {x}? \u2028 😀\x00\n", "3"),
        Task("b/1", "e\u0301", "é", "mine", {"answers": ["é", "e"], "hops": 2, "support": ["x"]}),
    ]
    file = tmp_path / "written.jsonl"
    file.write_text("".join(map(task_line, tasks)), encoding="utf-8")
    assert read_jsonl(file) == tasks


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    for name in ("one", "two", "with space"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "answer": "1"}))
    both = read_jsonl(f"{tmp_path}/one.jsonl {tmp_path}/two.jsonl")
    assert [(task.id, task.question) for task in both] == [("one/1", "one"), ("two/1", "two")]
    assert read_jsonl(f"{tmp_path}/with space.jsonl")[0].question == "with space"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "one.jsonl").write_text(json.dumps({"prompt": "x", "answer": "1"}))
    with pytest.raises(DataError, match=r"one.jsonl:1: the id 'one/1' is taken by .*one.jsonl:1"):
        read_jsonl(f"{tmp_path}/one.jsonl {tmp_path}/sub/one.jsonl")
    with pytest.raises(DataError, match=r"data.path is empty"):
        read_jsonl("  ")


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
        ({"prompt": "y", "answer": "2", "id": "good"}, r"the id 'good' is taken by .*train\.jsonl:1; expected one task per id"),
        ({"prompt": "x", "answer": float("nan")}, "`answer` is nan; expected text or a finite number"),
        ({"prompt": "x", "answer": []}, "`answer` is an empty list"),
        ({"prompt": "x", "answer": ["2", None]}, r"`answer\[1\]` is null; expected text"),
        ({"prompt": "x", "answer": [["2"]]}, r"`answer\[0\]` is a list; expected text"),
        ({"prompt": "x", "answer": {"value": "2"}}, "`answer` has the keys value; expected text, a list or `target`"),
        ({"prompt": "x", "answer": "2", "answers": "\ud800"}, "`answers` has half of a surrogate pair"),
        ({"prompt": "x", "answer": "2", "id": ["a"]}, "`id` is a list; expected text"),
        ({"prompt": "x", "answer": "2", "source": {}}, "`source` is a dict; expected text"),
        ("[" * 100_000, "can't be read: "),
        ('{"prompt": "x", "answer": ' + "9" * 5000 + "}", "can't be read: "),
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
