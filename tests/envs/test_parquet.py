from __future__ import annotations

import datetime
import decimal
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from drmas.envs.parquet import read_parquet
from drmas.errors import DataError
from drmas.types import Task


def maths(index: int, **changes) -> dict:
    """A row as the method's first implementation writes it for maths."""
    question, truth = f"What is {index}+1?", str(index + 1)
    row = {
        "data_source": "aime24",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "test", "index": index, "answer": truth, "question": question},
        "env_kwargs": {"ground_truth": truth, "question": question, "data_source": "aime24"},
    }
    return {name: value for name, value in (row | changes).items() if value != "drop"}


def search(index: int, **changes) -> dict:
    """A row as it writes it for search: a system message, and a list of accepted answers in a dict."""
    target = {"target": ["Bach", "J. S. Bach"]}
    row = {
        "data_source": "nq",
        "prompt": [{"role": "system", "content": "Be helpful."}, {"role": "user", "content": "Prefix. Who wrote it"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": target, "style": "rule"},
        "extra_info": {"index": index, "need_tools_kwargs": True, "question": "Who wrote it", "split": "train"},
        "metadata": None,
        "env_kwargs": {"ground_truth": target, "question": "Who wrote it", "data_source": "nq"},
    }
    return row | changes


@pytest.fixture
def write(tmp_path: Path):
    def to_file(rows: list[dict] | pyarrow.Table, name: str = "train.parquet", **settings) -> Path:
        table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / name, **settings)
        return tmp_path / name

    return to_file


def test_rows_of_both_kinds_become_tasks_unchanged(write) -> None:
    assert read_parquet(write([maths(0), maths(1)])) == [
        Task("aime24/test/0", "What is 0+1?", "1", "aime24"),
        Task("aime24/test/1", "What is 1+1?", "2", "aime24"),
    ]
    accepted = ["Bach", "J. S. Bach"]
    assert read_parquet(write([search(5)])) == [
        Task("nq/train/5", "Who wrote it", "Bach", "nq", {"system": "Be helpful.", "answers": accepted})
    ]


def test_without_env_kwargs_the_user_message_is_the_question(write) -> None:
    (task,) = read_parquet(write([search(0, env_kwargs="drop") | {"env_kwargs": None}]))
    assert task.question == "Prefix. Who wrote it"
    (plain,) = read_parquet(write([maths(3, prompt="Plain text", env_kwargs="drop")]))
    assert (plain.question, plain.extra) == ("Plain text", {})


@pytest.mark.parametrize(
    ("truth", "accepted"),
    [
        (7, ["7"]),
        (0.5, ["0.5"]),
        (decimal.Decimal("1.50"), ["1.50"]),
        ("\\frac12", ["\\frac12"]),
        (["a", "b", "a"], ["a", "b"]),
        ({"target": "a"}, ["a"]),
        ({"target": [3, 4]}, ["3", "4"]),
        ("北京 e\u0301 😀 \u2028", ["北京 e\u0301 😀 \u2028"]),
    ],
)
def test_every_shape_of_a_truth(write, truth, accepted: list[str]) -> None:
    (task,) = read_parquet(write([maths(0, reward_model={"ground_truth": truth})]))
    assert task.truth == accepted[0]
    assert task.extra.get("answers", accepted) == accepted


def test_env_kwargs_stand_in_for_a_missing_truth_and_source(write) -> None:
    (task,) = read_parquet(write([search(0, reward_model=None, data_source=None)]))
    assert (task.truth, task.source, task.id) == ("Bach", "nq", "nq/train/0")


@pytest.mark.parametrize(
    ("extra_info", "task_id"),
    [
        ({"id": "x-1", "index": 3}, "x-1"),
        ({"index": 3}, "aime24/3"),
        ({"index": "b7f0", "split": ""}, "aime24/b7f0"),
        ({"index": None, "split": "test"}, "train/0"),
        (None, "train/0"),
        ("drop", "train/0"),
    ],
)
def test_where_the_id_comes_from(write, extra_info, task_id: str) -> None:
    assert read_parquet(write([maths(0, extra_info=extra_info)]))[0].id == task_id


def test_rows_made_of_numpy_arrays_give_plain_values(write) -> None:
    import numpy as np

    rows = [search(i, extra_info={"index": np.int64(i), "split": "train"}) for i in range(3)]
    for row in rows:
        row["prompt"] = np.array(row["prompt"], dtype=object)
        row["reward_model"] = {"ground_truth": {"target": np.array([1.5, np.float32(2)])}}
    tasks = read_parquet(write(rows))
    assert [task.id for task in tasks] == ["nq/train/0", "nq/train/1", "nq/train/2"]
    assert [task.extra["answers"] for task in tasks] == [["1.5", "2.0"]] * 3
    assert all(type(answer) is str for task in tasks for answer in (task.id, *task.extra["answers"]))


def test_dictionary_encoded_and_large_types_and_many_row_groups(write) -> None:
    table = pyarrow.Table.from_pylist([maths(i) for i in range(3000)])
    place = table.schema.get_field_index("data_source")
    coded = table.set_column(place, "data_source", table["data_source"].dictionary_encode())
    tasks = read_parquet(write(coded, row_group_size=700))
    assert [task.truth for task in tasks] == [str(i + 1) for i in range(3000)]
    assert {task.source for task in tasks} == {"aime24"}


def test_several_files_one_after_the_other(write) -> None:
    first, second = write([maths(0)], "a.parquet"), write([search(0)], "b.parquet")
    assert [task.source for task in read_parquet(f"{first} {second}")] == ["aime24", "nq"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (maths(1, prompt=None, env_kwargs=None), "`prompt` is null; expected chat messages or text"),
        (maths(1, prompt=[], env_kwargs=None), "`prompt` has 0 user messages; expected one, or env_kwargs.question"),
        (maths(1, prompt=[{"role": "user", "content": "a"}] * 2, env_kwargs=None), "`prompt` has 2 user messages"),
        (maths(1, prompt=[{"role": "user", "content": None}], env_kwargs=None), "`prompt.content` is null"),
        (maths(1, prompt=[{"role": "user", "content": " "}], env_kwargs=None), "`prompt.content` is empty"),
        (maths(1, reward_model=None, env_kwargs=None), "no truth: expected reward_model.ground_truth or env_kwargs"),
        (maths(1, reward_model={"ground_truth": ""}), "`reward_model.ground_truth` is empty; expected a truth"),
        (maths(1, extra_info={"index": 1, "split": "test", "id": "a@3"}), "the id 'a@3' ends in @ and a number"),
        (maths(1, extra_info={"index": 0, "split": "test"}), r"the id 'aime24/test/0' is taken by .*train.parquet row 0"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_column(write, row: dict, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_parquet(write([maths(0), row]))
    assert "train.parquet row 1: " in str(caught.value)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ({"target": None}, "`reward_model.ground_truth.target` is null"),
        ({"target": []}, "`reward_model.ground_truth.target` is an empty list"),
        ({"target": ["a", None]}, r"`reward_model.ground_truth.target\[1\]` is null"),
        ({"target": [["a"]]}, r"`reward_model.ground_truth.target\[0\]` is a list"),
        ({"value": "a"}, "`reward_model.ground_truth` has the keys value"),
        (True, "`reward_model.ground_truth` is a bool"),
        (b"7", "`reward_model.ground_truth` is a bytes"),
        (datetime.date(2024, 1, 1), "`reward_model.ground_truth` is a date"),
        (float("nan"), "`reward_model.ground_truth` is nan; expected text or a finite number"),
    ],
)
def test_a_bad_truth_is_named_down_to_its_place(write, truth, message: str) -> None:
    with pytest.raises(DataError, match=rf"train\.parquet row 0: {message}"):
        read_parquet(write([maths(0, reward_model={"ground_truth": truth})]))


@pytest.mark.parametrize("column", ["reward_model", "extra_info", "env_kwargs"])
def test_a_column_of_another_type_is_named(write, column: str) -> None:
    with pytest.raises(DataError, match=f"row 0: `{column}` is a str; expected fields such as"):
        read_parquet(write([maths(0, **{column: "text"})]))


def test_files_that_hold_no_tasks(tmp_path: Path, write) -> None:
    with pytest.raises(DataError, match=r"nothing.parquet: .*[Nn]o such file.*; expected a Parquet file"):
        read_parquet(tmp_path / "nothing.parquet")
    with pytest.raises(DataError, match="Is a directory"):
        read_parquet(tmp_path)
    with pytest.raises(DataError, match="has the columns a; expected data_source, prompt, reward_model"):
        read_parquet(write([{"a": 1}]))
    with pytest.raises(DataError, match="has no rows; expected one task per row"):
        read_parquet(write(pyarrow.Table.from_pylist([maths(0)]).slice(0, 0)))
    for damaged in (b"", b"PAR1", b'{"prompt": "x"}\n' * 20):
        (tmp_path / "bad.parquet").write_bytes(damaged)
        with pytest.raises(DataError, match=r"data.path .*bad.parquet: .*; expected a Parquet file") as caught:
            read_parquet(tmp_path / "bad.parquet")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", ["end", "middle"])
def test_a_truncated_or_damaged_file_is_an_error_and_never_fewer_tasks(write, cut: str) -> None:
    file = write([maths(i) for i in range(2000)], row_group_size=500, compression="gzip")
    whole = file.read_bytes()
    file.write_bytes(whole[:-200] if cut == "end" else whole[:4000] + b"\0" * 3000 + whole[7000:])
    with pytest.raises(DataError, match="expected a Parquet file"):
        read_parquet(file)
