"""Engines that sleep, in a job of two ranks: all of them agree on when memory is given back, and no number changes."""

from __future__ import annotations

TIMED = ("seconds", "per_second", "memory_bytes", "mfu")
SLEEP = ("--policies.main.engine.gpus", "shared", "--policies.main.engine.sleep", "true")


def test_two_ranks_and_a_death_with_sleep_give_what_they_give_without(run, metrics_of) -> None:
    measured = []
    for name, words in (("awake", ()), ("asleep", SLEEP)):
        done, folder = run("--train.steps", "3", *words, name=name, ranks=2, DIE="40")
        assert done.returncode == 0, done.stderr
        assert "starting it again (1 of 2)" in done.stdout
        steps = metrics_of(folder)
        measured.append([{key: value for key, value in step.items() if not key.endswith(TIMED)} for step in steps])
    assert len(measured[0]) == 3
    assert measured[0] == measured[1]
