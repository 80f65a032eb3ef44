"""`drmas train --auto-resume`: one command for the first start and for every one after."""

TIMED = ("seconds", "per_second", "memory_bytes", "mfu")


def untimed(steps: list[dict]) -> list[dict]:
    return [{key: value for key, value in step.items() if not key.endswith(TIMED)} for step in steps]


def test_I9_the_same_command_starts_goes_on_and_ends(run, metrics_of) -> None:
    straight, whole = run("--train.steps", "2", name="straight")
    assert straight.returncode == 0, straight.stderr
    first, folder = run("--auto-resume", "--train.steps", "1")
    assert first.returncode == 0, first.stderr
    second, _ = run("--auto-resume", "--train.steps", "2")
    assert second.returncode == 0, second.stderr
    assert untimed(metrics_of(folder)) == untimed(metrics_of(whole))
    third, _ = run("--auto-resume", "--train.steps", "2")
    assert third.returncode == 0, third.stderr
    assert "the run is at step 2 already" in third.stdout
    assert len(metrics_of(folder)) == 2


def test_it_contradicts_the_other_two(run) -> None:
    for other in ("--resume", "--overwrite"):
        done, folder = run("--auto-resume", other)
        assert done.returncode == 2
        assert f"{other} and --auto-resume are given" in done.stderr
        assert not folder.exists()
