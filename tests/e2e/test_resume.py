"""A run that was stopped, killed, or lost its engine is the same run afterwards (I9)."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest


def wait_for(condition, seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the run never got there"
        time.sleep(0.02)


@pytest.fixture
def start(workplace: Path, command, environment):
    """Start a run in the background; whatever is left of it is killed when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def go(*overrides: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*overrides), cwd=workplace, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield go
    for process in started:
        process.kill()
        process.wait()


def engine_of(parent: int) -> int | None:
    """The engine process that `parent` started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"drmas.rollout.vllm_process" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_I9_resume_equals_uninterrupted(workplace, run, uninterrupted, trained_model, read_run) -> None:
    words = ("--name", "resumed", "--policies.main.model", str(trained_model))
    assert run(*words, "--train.steps", "2").returncode == 0
    done = run(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert read_run(workplace / "runs" / "resumed") == read_run(uninterrupted)


def test_I9_a_killed_run_leaves_no_process_and_resumes_from_its_checkpoint(
    workplace, run, start, uninterrupted, trained_model, read_run
) -> None:
    folder = workplace / "runs" / "killed"
    words = ("--name", "killed", "--policies.main.model", str(trained_model), "--checkpoint.every-steps", "1")
    process = start(*words)
    wait_for(lambda: (folder / "checkpoints" / "step_2" / "run.json").exists() or process.poll() is not None)
    engine = engine_of(process.pid)
    assert engine is not None
    process.kill()
    process.wait()
    wait_for(lambda: not Path(f"/proc/{engine}").exists(), seconds=20)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # as a kill in the middle of a line leaves it
    done = run(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert read_run(folder) == read_run(uninterrupted)


def test_an_engine_that_is_killed_is_replaced_and_the_run_goes_on_as_it_would_have(
    workplace, start, uninterrupted, trained_model, read_run
) -> None:
    folder = workplace / "runs" / "engine-killed"
    process = start("--name", "engine-killed", "--policies.main.model", str(trained_model))
    wait_for(lambda: lines(folder) >= 1 or process.poll() is not None)
    os.kill(engine_of(process.pid), signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "starting it again (1 of 2)" in output
    # What the engine took along ran again in a smaller batch, which may move the last bits of its log-probs; no more.
    for ours, theirs in zip(read_run(folder), read_run(uninterrupted), strict=True):
        for step in (ours, theirs):
            step.pop("rollout/retried")
            step.pop("sync/bytes")  # the step that lost its engine sent the weights once more
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_the_first_interrupt_finishes_the_step_and_saves(workplace, start, trained_model) -> None:
    folder = workplace / "runs" / "interrupted"
    process = start("--name", "interrupted", "--policies.main.model", str(trained_model), "--train.steps", "500")
    wait_for(lambda: lines(folder) >= 1 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (folder / "checkpoints" / f"step_{lines(folder)}" / "run.json").exists()


def test_resume_without_a_checkpoint_starts_over(workplace, run, start, uninterrupted, trained_model, read_run) -> None:
    folder = workplace / "runs" / "early"
    words = ("--name", "early", "--policies.main.model", str(trained_model))
    process = start(*words)
    wait_for(lambda: lines(folder) >= 1 or process.poll() is not None)
    process.kill()
    process.wait()
    done = run(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert "no checkpoint yet; starting at step 1" in done.stdout
    assert read_run(folder) == read_run(uninterrupted)


def test_resume_refuses_another_run(workplace, run, uninterrupted) -> None:
    done = run("--name", "straight", "--resume", "--rollout.group-size", "8", "--policies.main.model", "tiny:qwen3")
    assert done.returncode == 2
    assert "drmas: policies.main.model is 'tiny:qwen3' but the run to resume has" in done.stderr
    assert "Traceback" not in done.stderr
