"""A user's mistakes on the command line: one clear error, status 2, no traceback, no process left."""

import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--train.stepz", "3"), "train.stepz"),
        (("--policies.main.model", "no/such/folder"), "no/such/folder"),
        (("--policies.main.tensor-parallel", "2"), "policies.main.tensor_parallel is 2, but the job has 1 rank(s)"),
        (("--team.solver.policy", "other"), "team.solver.policy is 'other'"),
        (("--data", "{type = 'jsonl', path = 'missing.jsonl'}"), "missing.jsonl"),
        (("--data", "{type = 'jsonl', path = 'bad.jsonl'}"), "bad.jsonl:2"),
        (("--data", "{type = 'jsonl', path = 'no_truth.jsonl'}"), "no_truth.jsonl:1"),
        (("--policies.main.engine.options", "{no_such_option = 1}"), "no_such_option"),
    ],
)
def test_one_error_and_status_2(workplace: Path, run, trained_model, words: tuple[str, ...], expected: str) -> None:
    (workplace / "bad.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2"\n')
    (workplace / "no_truth.jsonl").write_text('{"prompt": "1+1"}\n')
    model = () if "--policies.main.model" in words else ("--policies.main.model", str(trained_model))
    done = run("--name", "mistake", "--overwrite", *model, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("drmas: ")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr.splitlines()[0]
    assert subprocess.run(["pgrep", "-f", str(workplace / "runs")], capture_output=True, check=False).stdout == b""


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
    done = run("--name", "family", "--overwrite", "--policies.main.model", str(folder))
    assert done.returncode == 2
    assert "gpt2" in done.stderr
    assert "Traceback" not in done.stderr
