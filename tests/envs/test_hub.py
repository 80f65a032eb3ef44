from __future__ import annotations

import json
from pathlib import Path

import httpx
import httpx2
import huggingface_hub
import pyarrow
import pytest
from huggingface_hub import errors
from pyarrow import parquet

from drmas.config.tasks import HuggingFaceData
from drmas.envs.hub import cache_only, is_here, read_huggingface
from drmas.errors import DataError
from drmas.types import Task

ROWS = [{"question": "1+1?", "answer": "One and one.\n#### 2"}, {"question": "Who?", "answer": "Bach"}]


def put(folder: Path, name: str, rows: list[dict]) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".jsonl"):
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)


@pytest.mark.parametrize(
    "name", ["train.parquet", "data/train-00000-of-00001.parquet", "default/train/0000.parquet", "train.jsonl", "train_1.jsonl"]
)
def test_a_folder_in_any_of_the_hubs_layouts(tmp_path: Path, name: str) -> None:
    put(tmp_path / "gsm", name, ROWS)
    put(tmp_path / "gsm", name.replace("train", "test"), [{"question": "other", "answer": "x"}])
    put(tmp_path / "gsm", "training_notes.jsonl", [{"a": 1}])
    assert read_huggingface(HuggingFaceData(path=f"{tmp_path}/gsm/")) == [
        Task("gsm/train/0", "1+1?", "2", "gsm"),
        Task("gsm/train/1", "Who?", "Bach", "gsm"),
    ]


def test_the_files_of_a_split_are_read_in_order(tmp_path: Path) -> None:
    for shard in (2, 0, 1):
        put(tmp_path / "d", f"data/test-0000{shard}-of-00003.parquet", [{"question": f"q{shard}", "answer": "1"}])
    tasks = read_huggingface(HuggingFaceData(path=str(tmp_path / "d"), split="test"))
    assert [(task.id, task.question) for task in tasks] == [(f"d/test/{i}", f"q{i}") for i in range(3)]


def test_a_configuration_is_chosen_by_name(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        put(tmp_path / "d", f"{name}/train-00000-of-00001.parquet", [{"question": name, "answer": "1"}])
    assert read_huggingface(HuggingFaceData(path=str(tmp_path / "d"), name="socratic"))[0].question == "socratic"
    with pytest.raises(DataError, match=r"has the configurations main, socratic; set data.name to one of them"):
        read_huggingface(HuggingFaceData(path=str(tmp_path / "d")))
    with pytest.raises(DataError, match="no files of the split train of the configuration other; found main/train"):
        read_huggingface(HuggingFaceData(path=str(tmp_path / "d"), name="other"))


def test_other_columns_fields_of_columns_and_lists_of_answers(tmp_path: Path) -> None:
    put(tmp_path / "d", "dev.parquet", [{"context": {"problem": "p", "n": 1}, "answers": {"text": ["a", "b"]}, "x": 1}])
    config = HuggingFaceData(path=str(tmp_path / "d"), split="dev", question="context.problem", answer="answers.text")
    (task,) = read_huggingface(config)
    assert (task.question, task.truth, task.extra) == ("p", "a", {"answers": ["a", "b"]})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "q", "answer": "1"}], "row 0: no value in the column question; found answer; set data.question"),
        ([{"question": "q", "solution": "1"}], "row 0: no value in the column answer; found question; set data.answer"),
        ([{"a": 1}], "has the columns a; expected question, answer"),
        ([*ROWS, {"question": "q", "answer": None}], "row 2: no value in the column answer"),
        ([*ROWS, {"question": " ", "answer": "1"}], "row 2: `question` is empty"),
        ([{"question": "q", "answer": "why\n####  "}], "row 0: `answer` is empty; expected a truth"),
    ],
)
def test_what_a_row_lacks_is_named(tmp_path: Path, rows: list[dict], message: str) -> None:
    put(tmp_path / "d", "train.parquet", rows)
    with pytest.raises(DataError, match=message):
        read_huggingface(HuggingFaceData(path=str(tmp_path / "d")))


def test_folders_without_the_split(tmp_path: Path) -> None:
    put(tmp_path / "d", "train.parquet", ROWS)
    with pytest.raises(DataError, match=r"no files of the split tset; found train.parquet; set data.split"):
        read_huggingface(HuggingFaceData(path=str(tmp_path / "d"), split="tset"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="found no Parquet or JSONL files"):
        read_huggingface(HuggingFaceData(path=str(tmp_path / "empty")))
    with pytest.raises(DataError, match=r"train.parquet: a file; expected a dataset's name on the hub"):
        read_huggingface(HuggingFaceData(path=str(tmp_path / "d" / "train.parquet")))
    with pytest.raises(DataError, match="not there; expected a dataset's name on the hub"):
        read_huggingface(HuggingFaceData(path="./nowhere"))
    put(tmp_path / "none", "train.parquet", ROWS)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS).slice(0, 0), tmp_path / "none" / "train.parquet")
    with pytest.raises(DataError, match="the split train has no rows"):
        read_huggingface(HuggingFaceData(path=str(tmp_path / "none")))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Answers of the hub by revision: a folder's files, or an error."""
    asked: list[dict] = []

    def of(**answers):
        def snapshot_download(path: str, **how) -> str:
            asked.append({"path": path, **how})
            answer = answers.get("converted" if how["revision"] else "main", {})
            if isinstance(answer, Exception):
                raise answer
            folder = tmp_path / f"revision-{how['revision'] or 'main'}".replace("/", "-")
            for name, rows in answer.items():
                put(folder, name, rows)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return of


def answer_of(kind: type[Exception], status: int = 404) -> Exception:
    return kind("said\nmore", response=httpx.Response(status, request=httpx.Request("GET", "https://hub")))


def test_a_dataset_of_the_hub_is_read_from_its_files_of_the_split_alone(hub) -> None:
    asked = hub(main={"data/train-0.parquet": ROWS})
    tasks = read_huggingface(HuggingFaceData(path="openai/gsm8k"))
    assert [task.id for task in tasks] == ["gsm8k/train/0", "gsm8k/train/1"]
    patterns = ["*train*.parquet", "*train*.jsonl"]
    how = {"repo_type": "dataset", "revision": None, "allow_patterns": patterns, "local_files_only": False}
    assert asked == [{"path": "openai/gsm8k", **how}]


@pytest.mark.parametrize("main", [{}, {"test.jsonl": ROWS}, answer_of(errors.RemoteEntryNotFoundError)])
def test_other_formats_come_from_the_hubs_parquet_copy(hub, main) -> None:
    asked = hub(main=main, converted={"default/train/0000.parquet": ROWS})
    assert len(read_huggingface(HuggingFaceData(path="a/b"))) == 2
    assert [each["revision"] for each in asked] == [None, "refs/convert/parquet"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx.ConnectError("no route"), r"a/b: the hub can't be reached \(no route\), and its cache here has no such dataset"),
        (errors.LocalEntryNotFoundError("no snapshot\nat all"), r"a/b: the hub can't be reached \(no snapshot\)"),
        (httpx2.ProxyError("no proxy"), r"a/b: the hub can't be reached \(no proxy\), and its cache here has no such dataset"),
        (TimeoutError(), r"a/b: the hub can't be reached \(TimeoutError\)"),
        (answer_of(errors.RepositoryNotFoundError), "data.path a/b: the hub has no such dataset, or it is private"),
        (
            answer_of(errors.GatedRepoError, 403),
            "data.path a/b: the dataset is gated; accept its terms on the hub and set HF_TOKEN",
        ),
        (errors.HFValidationError("bad"), "data.path a/b: not a dataset's name"),
    ],
)
def test_trouble_with_the_hub_is_one_line_that_says_what_to_do(hub, error: Exception, message: str) -> None:
    hub(main=error, converted=error)
    with pytest.raises(DataError, match=message) as caught:
        read_huggingface(HuggingFaceData(path="a/b"))
    assert "\n" not in str(caught.value)


def test_where_neither_revision_has_the_split_the_first_says_why(hub) -> None:
    hub(main={"test.jsonl": ROWS}, converted=answer_of(errors.RevisionNotFoundError))
    with pytest.raises(DataError, match=r"no files of the split train; found test.jsonl; set data.split"):
        read_huggingface(HuggingFaceData(path="a/b"))


def test_offline_the_reason_is_the_switch(hub, monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors.LocalEntryNotFoundError("nothing cached")
    hub(main=error, converted=error)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(DataError, match="a/b: HF_HUB_OFFLINE is set, and its cache here has no such dataset; where there is"):
        read_huggingface(HuggingFaceData(path="a/b"))


def test_a_cached_copy_is_found_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own cache layout, and its own code, with no network asked."""
    commit, cache = "0" * 40, tmp_path / "cache"
    repository = cache / "datasets--a--b"
    put(repository / "snapshots" / commit, "default/train/0000.parquet", ROWS)
    reference = repository / "refs" / "refs/convert/parquet"
    reference.parent.mkdir(parents=True)
    reference.write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert [task.truth for task in read_huggingface(HuggingFaceData(path="a/b"))] == ["2", "Bach"]


def test_what_the_cache_has_is_here_and_is_read_without_asking(
    hub_cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "made", "0.parquet", ROWS)
    files = {"data/train-0.parquet": (tmp_path / "made" / "0.parquet").read_bytes()}
    hub_cache("datasets--a--b", "1" * 40, files, listed=["data/train-0.parquet", "data/test-0.parquet", "README.md"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def ask(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.repo_info", ask)
    assert is_here(HuggingFaceData(path="a/b"))
    assert not is_here(HuggingFaceData(path="a/b", split="test"))
    assert not is_here(HuggingFaceData(path="a/c"))
    assert is_here(HuggingFaceData(path=str(tmp_path)))
    assert is_here(HuggingFaceData(path="./nowhere"))  # no name: reading it says what is wrong
    with cache_only():
        assert [task.truth for task in read_huggingface(HuggingFaceData(path="a/b"))] == ["2", "Bach"]
    with pytest.raises(AssertionError, match="the hub was asked"):
        read_huggingface(HuggingFaceData(path="a/b"))


@pytest.mark.parametrize("name", ["runs/old--export", "a..b/c", "x/y.git", "x/y-"])
def test_a_name_that_the_hub_could_not_have_is_one_line(name: str) -> None:
    for ask in (is_here, read_huggingface):
        with pytest.raises(DataError, match=f"data.path {name}: not a dataset's name; expected one such as openai/gsm8k"):
            ask(HuggingFaceData(path=name))
