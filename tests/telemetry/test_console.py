"""What a run prints."""

import io

from drmas.telemetry.console import Console, step_line

METRICS = {
    "reward/mean": 0.5,
    "rollout/solver/reward_mean": 0.55,
    "rollout/verifier/reward_mean": 0.45,
    "rollout/tokens_per_second": 1312.4,
    "train/a/grad_norm": 0.03121,
    "train/a/solver/loss": 1.0,
    "train/a/tokens_per_second": 201.2,
    "time/rollout_seconds": 9.1,
    "time/train_seconds": 4.2,
    "time/sync_seconds": 0.7,
}


def test_a_step_is_one_line_with_reward_per_agent_norm_speeds_and_seconds():
    assert step_line(3, 10, METRICS) == (
        "step  3/10  reward 0.50 (solver 0.55 · verifier 0.45)  |grad| a 0.0312  tok/s rollout 1,312 · train 201  "
        "14.0 s (rollout 9.1 · train 4.2 · sync 0.7)"
    )


def test_failures_and_missing_values_show():
    line = step_line(3, 3, METRICS | {"rollout/failed/engine": 2, "rollout/failed/timeout": 1, "reward/mean": None})
    assert "reward - (" in line
    assert line.endswith("failed 3 (engine 2 · timeout 1)")
    assert "nan" in step_line(1, 1, METRICS | {"train/a/grad_norm": float("nan")})


def test_two_policies_are_told_apart():
    line = step_line(1, 1, METRICS | {"train/b/grad_norm": 2.0, "train/b/tokens_per_second": 50.0})
    assert "|grad| a 0.0312 · b 2" in line
    assert "train a 201 · train b 50" in line


def test_a_step_without_training_still_has_a_line():
    assert step_line(1, 2, {"reward/mean": 0.25, "time/step_seconds": 3.0}) == "step 1/2  reward 0.25  3.0 s"


def test_off_a_terminal_there_are_only_plain_lines():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.start({"team": "solver-verifier", "placement": "1 rank"})
    with console.progress("rollout", 4) as advance:
        advance(2)
    console.step(1, 1, METRICS)
    console.end({"report": "runs/x/report.html"})
    lines = stream.getvalue().splitlines()
    assert lines == [
        "team       solver-verifier",
        "placement  1 rank",
        step_line(1, 1, METRICS),
        "report  runs/x/report.html",
    ]


def test_on_a_terminal_the_bar_counts_and_disappears():
    stream = io.StringIO()
    console = Console(stream=stream, tty=True)
    with console.progress("rollout", 4) as advance:
        advance(3)
    assert "3/4" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")


def test_other_ranks_say_nothing():
    stream = io.StringIO()
    console = Console(quiet=True, tty=True, stream=stream)
    console.start({"team": "x"})
    console.note("trouble")
    console.step(1, 1, METRICS)
    with console.progress("rollout", 4) as advance:
        advance(1)
    assert stream.getvalue() == ""


def test_a_note_is_said_once_and_markup_in_it_is_text():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.note("the engine [bold]died[/bold]")
    console.note("the engine [bold]died[/bold]")
    assert stream.getvalue() == "the engine [bold]died[/bold]\n"
