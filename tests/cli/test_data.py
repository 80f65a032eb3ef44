"""`drmas prepare-data`: what it writes, and that it leaves nothing half-written."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from drmas.cli.data import prepare
from drmas.envs.jsonl import read_jsonl
from drmas.envs.named_sets import BUNDLES, SETS
from drmas.errors import ConfigError, DataError


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose sets have the given number of rows; those that aren't named can't be reached."""

    def of(**counts: int):
        def snapshot_download(path: str, **how) -> str:
            (named,) = (each for each in SETS.values() if each.repository == path and f"*{each.split}*" in str(how))
            if named.name not in counts:
                raise errors.LocalEntryNotFoundError("no network")
            folder = tmp_path / "hub" / named.name
            folder.mkdir(parents=True, exist_ok=True)
            rows = [ROW[named.convert.__name__](i) for i in range(counts[named.name])]
            (folder / f"{named.split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    return of


ROW = {
    "problem_task": lambda i: {"problem": f"problem {i}?", "answer": i},
    "instructed_task": lambda i: {
        "prompt": [{"role": "user", "content": f"p{i}"}],
        "reward_model": {"ground_truth": str(i)},
    },
    "question_task": lambda i: {
        "question": f"q{i}",
        "golden_answers": [f"a{i}", "b"],
        "data_source": ("nq", "popqa")[i % 2],
        "reward_model": None,
    },
}


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_one_set_is_a_file_that_the_data_section_reads(hub, tmp_path):
    hub(aime25=3)
    assert prepare("aime25", tmp_path / "out") == [(tmp_path / "out" / "test.jsonl", 3)]
    tasks = read_jsonl(tmp_path / "out" / "test.jsonl")
    assert [(task.id, task.truth, task.source) for task in tasks] == [(f"aime25/{i}", str(i), "aime25") for i in range(3)]


def test_a_bundle_is_training_test_and_a_small_test_set(hub, tmp_path):
    hub(**dict.fromkeys(BUNDLES["math"], 60))
    written = {path.name: count for path, count in prepare("math", tmp_path / "math")}
    assert written == {"train.jsonl": 60, "test.jsonl": 360, "test_sampled.jsonl": 110}
    assert files_of(tmp_path / "math") == set(written)
    hub(**{"nq-hotpotqa-train": 4, "nq-hotpotqa-test": 100})
    assert {path.name: count for path, count in prepare("search", tmp_path / "search")} == {
        "train.jsonl": 4,
        "test.jsonl": 100,
        "test_sampled.jsonl": 60,
    }
    assert read_jsonl(tmp_path / "search" / "train.jsonl")[0].extra == {"answers": ["a0", "b"]}


def test_facts_need_no_network(tmp_path):
    written = {path.name: count for path, count in prepare("facts", tmp_path / "facts")}
    assert set(written) == {"corpus.jsonl", "train.jsonl", "test.jsonl"}
    train, test = (read_jsonl(tmp_path / "facts" / f"{split}.jsonl") for split in ("train", "test"))
    assert (len(train), len(test)) == (written["train.jsonl"], written["test.jsonl"])
    assert not {task.question for task in train} & {task.question for task in test}
    assert {task.extra["hops"] for task in train} == {1, 2, 3}
    passages = [json.loads(line) for line in (tmp_path / "facts" / "corpus.jsonl").read_text().splitlines()]
    assert len(passages) == written["corpus.jsonl"] > 1000
    known = {passage["id"] for passage in passages}
    assert all(set(task.extra["support"]) <= known for task in train + test)


def test_a_bundle_of_which_one_set_is_missing_leaves_the_folder_as_it_was(hub, tmp_path):
    folder = tmp_path / "math"
    folder.mkdir()
    (folder / "train.jsonl").write_text("before")
    hub(**{name: 60 for name in BUNDLES["math"] if name != "olympiad"})
    with pytest.raises(DataError, match="realtreetune/olympiadbench: the hub can't be reached"):
        prepare("math", folder)
    assert (folder / "train.jsonl").read_text() == "before"
    assert files_of(folder) == {"train.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == {"math", "hub"}


def test_a_failed_write_leaves_nothing(hub, tmp_path, monkeypatch):
    hub(aime24=3)

    def full(task):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drmas.envs.jsonl.task_line", full)
    with pytest.raises(DataError, match="out can't be written: No space left on device; set --output"):
        prepare("aime24", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"hub"}


def test_files_are_replaced_and_others_stay(hub, tmp_path):
    hub(aime24=3)
    prepare("aime24", tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("mine")
    hub(aime24=2)
    prepare("aime24", tmp_path / "out")
    assert files_of(tmp_path / "out") == {"test.jsonl", "mine.txt"}
    assert len(read_jsonl(tmp_path / "out" / "test.jsonl")) == 2


def test_an_output_that_is_a_file_is_named(hub, tmp_path):
    hub(aime24=3)
    (tmp_path / "out").write_text("")
    with pytest.raises(DataError, match="out can't be written: File exists; set --output"):
        prepare("aime24", tmp_path / "out")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="'aime2024' is no data set; the nearest is 'aime24'"):
        prepare("aime2024", None)


def test_offline_the_command_is_one_line_and_status_2(drmas, tmp_path):
    done = drmas("prepare-data", "math", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("drmas: aaabiao/dapo_filter: HF_HUB_OFFLINE is set, and its cache here has no such dataset")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_the_command_writes_into_data_and_lists_what_it_can(drmas, tmp_path):
    done = drmas("prepare-data", "facts")
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "data" / "facts") == {"corpus.jsonl", "train.jsonl", "test.jsonl"}
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        f"data/facts/{name}.jsonl" for name in ("corpus", "train", "test")
    ]
    listed = drmas("prepare-data", "--list").stdout
    assert [line.partition(":")[0] for line in listed.splitlines()] == ["facts", *BUNDLES, *SETS]
    nothing = drmas("prepare-data")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (2, 1)
    assert "drmas prepare-data --list shows them" in nothing.stderr
