"""A user's mistakes on the command line: one clear error, status 2, no traceback, no process left."""

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--train.stepz", "3"), "train.stepz"),
        (("--policies.main.model", "no/such/folder"), "no/such/folder"),
        (("--policies.main.tensor-parallel", "2"), "it must divide the policy's 1 trainer rank(s)"),
        (("--team.solver.policy", "other"), "team.solver.policy is 'other'"),
        (("--data", "{type = 'jsonl', path = 'missing.jsonl'}"), "missing.jsonl"),
        (("--data", "{type = 'jsonl', path = 'bad.jsonl'}"), "bad.jsonl:2"),
        (("--data", "{type = 'jsonl', path = 'no_truth.jsonl'}"), "no_truth.jsonl:1"),
        (("--policies.main.engine.options", "{no_such_option = 1}"), "no_such_option"),
        (("--team.solver.max-tokens", "64"), "policies.main.engine.max_model_tokens is 64"),
        (("--policies", "{'../x' = {model = 'tiny:qwen3'}}"), "policies"),
        (("--name", ".."), "name"),
    ],
)
def test_one_error_and_status_2(workplace: Path, run, trained_model, words: tuple[str, ...], expected: str) -> None:
    (workplace / "bad.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2"\n')
    (workplace / "no_truth.jsonl").write_text('{"prompt": "1+1"}\n')
    model = () if "--policies.main.model" in words else ("--policies.main.model", str(trained_model))
    done = run("--name", "mistake", *model, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("drmas: ")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert left_of(workplace) == []


def left_of(workplace: Path) -> list[str]:
    """Processes that a run in `workplace` started and left behind: they all inherit its cache folder's name."""
    mark, left = f"DRMAS_CACHE={workplace / 'cache'}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                left.append((folder / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return left


def test_overwrite_keeps_the_old_run_until_the_new_one_stands(run, uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    done = run("--name", "straight", "--overwrite", "--data", "{type = 'jsonl', path = 'missing.jsonl'}")
    assert done.returncode == 2
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def test_overwrite_deletes_no_folder_that_is_not_a_run(workplace: Path, run) -> None:
    folder = workplace / "runs" / "thesis"
    folder.mkdir(parents=True)
    (folder / "chapter.txt").write_text("years of work")
    done = run("--name", "thesis", "--overwrite")
    assert done.returncode == 2
    assert "is not the folder of a run" in done.stderr
    assert (folder / "chapter.txt").read_text() == "years of work"


def test_a_second_run_does_not_overwrite_the_first(run, uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    done = run("--name", "straight")
    assert done.returncode == 2
    assert "--resume continues it" in done.stderr
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def test_an_unsupported_family_is_named(workplace: Path, run, trained_model: Path) -> None:
    folder = workplace / "gpt2"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    done = run("--name", "family", "--policies.main.model", str(folder))
    assert done.returncode == 2
    assert "gpt2" in done.stderr
    assert "Traceback" not in done.stderr
