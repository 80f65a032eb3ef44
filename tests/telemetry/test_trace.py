"""Spans per rank, and the one file they are merged into: well-formed also when a rank died."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from drmas.errors import ConfigError
from drmas.telemetry import perfetto, trace
from drmas.telemetry.perfetto import Span, time_shares
from drmas.telemetry.trace import Profile, Steps, Tracer


def parsed(path) -> dict[str, list[dict]]:
    """The events of a trace by kind, checked against Chrome's format: names, known pids and tids, times, nesting."""
    whole = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} isn't JSON"))
    events = {kind: [event for event in whole["traceEvents"] if event["ph"] == kind] for kind in "XCM"}
    assert sum(map(len, events.values())) == len(whole["traceEvents"])
    processes = {event["pid"] for event in events["M"] if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events["M"] if event["name"] == "thread_name"}
    by_thread: dict[tuple[int, int], list[dict]] = {}
    for event in events["X"] + events["C"]:
        assert isinstance(event["name"], str)
        assert event["pid"] in processes
        assert event["ts"] >= 0
    for event in events["X"]:
        assert (event["pid"], event["tid"]) in threads
        assert event["dur"] >= 0
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for spans in by_thread.values():
        around: list[float] = []
        for one, other in pairwise(spans):
            assert one["ts"] <= other["ts"]
        for span in spans:
            start, end = round(span["ts"] * 1000), round((span["ts"] + span["dur"]) * 1000)
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1], f"{span} ends after what is around it"
            around.append(end)
    return events


def thread_names(events) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"}


def shown(events) -> list[tuple[int, str, str]]:
    """(rank, thread, name) of every span."""
    names = thread_names(events)
    return [(event["pid"], names[event["pid"], event["tid"]], event["name"]) for event in events["X"]]


@pytest.mark.parametrize(("text", "first", "last"), [("steps=3-5", 3, 5), ("4", 4, 4), ("steps=12", 12, 12), ("2-2", 2, 2)])
def test_steps_are_parsed(text, first, last):
    steps = Steps.parse(text)
    assert steps == Steps(first, last)
    assert [step for step in range(20) if step in steps] == list(range(first, last + 1))


@pytest.mark.parametrize("text", ["", "5-3", "0", "steps=0-2", "three", "steps=", "3-", "-3", "3,5", "step=3", "1-2-3"])
def test_other_steps_are_refused(text):
    with pytest.raises(ConfigError, match=r"telemetry\.profile is .*expected"):
        Steps.parse(text)


def test_nothing_happens_while_no_step_is_traced(tmp_path):
    assert trace.span("forward", policy="main", step=3) is trace.span("backward")
    with trace.span("forward"):
        trace.counter("gpu/0/power_watts", 1.0)
    profile = Profile(Steps(2, 2), tmp_path / "profile", rank=0, num_ranks=1)
    with profile.step(1):
        assert trace.span("forward") is trace.span("backward")
    profile.close()
    assert list(tmp_path.iterdir()) == []


def test_one_rank(tmp_path):
    profile = Profile(Steps(2, 3), tmp_path, rank=0, num_ranks=1)
    for step in (1, 2, 3, 4, 5):
        assert (tmp_path / "trace.json").exists() == (step == 5)
        with profile.step(step), trace.span("rollout"):
            trace.counter("gpu/0/power_watts", 100.0 + step)
            with trace.span("train", policy="main", rows=7):
                with trace.span("pack"):
                    time.sleep(0.002)
                with trace.span("forward"):
                    pass
    events = parsed(tmp_path / "trace.json")
    once = [(0, "step", "step"), (0, "rollout", "rollout"), *((0, "main", name) for name in ("train", "pack", "forward"))]
    assert shown(events) == once * 2
    assert [event["args"] for event in events["X"] if event["name"] == "step"] == [{"step": 2}, {"step": 3}]
    assert {str(event["args"]) for event in events["X"] if event["name"] == "train"} == {"{'policy': 'main', 'rows': 7}"}
    assert all(2000 <= event["dur"] < 1e6 for event in events["X"] if event["name"] == "pack")
    assert [(event["name"], event["args"]["value"]) for event in events["C"]] == [
        ("gpu/0/power_watts", 102.0),
        ("gpu/0/power_watts", 103.0),
    ]


def test_concurrent_episodes_get_lanes(tmp_path):
    async def grade(seconds: float) -> None:
        with trace.span("grade"):
            await asyncio.sleep(seconds)

    async def rollout() -> None:
        with trace.span("rollout"):
            await asyncio.gather(*map(grade, (0.01, 0.02, 0.015)))
            await grade(0.001)

    profile = Profile(Steps(1, 1), tmp_path, rank=0, num_ranks=1)
    with profile.step(1):
        asyncio.run(rollout())
    profile.close()
    grades = [thread for _, thread, name in shown(parsed(tmp_path / "trace.json")) if name == "grade"]
    assert grades == ["grade", "grade (2)", "grade (3)", "grade"]


DIES = """
import os, signal, sys
from pathlib import Path
from drmas.telemetry import trace
tracer = trace.Tracer(Path(sys.argv[1]), 1)
with trace.recording(tracer), trace.span("step", step=4):
    with trace.span("train", policy="main"):
        with trace.span("forward"):
            pass
        with trace.span("backward"):
            tracer._file.write('{"begin": 9, "na')
            tracer._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_leaves_what_it_did(tmp_path):
    tracer = Tracer(tmp_path, 0)
    with trace.recording(tracer), trace.span("step", step=4):
        done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], timeout=60, check=False)
        with pytest.raises(KeyError), trace.span("train", policy="main"):
            raise KeyError
    assert done.returncode == -signal.SIGKILL
    events = parsed(perfetto.merge(tmp_path, 2))
    assert {(e["pid"], e["args"]["name"].split(" (")[0]) for e in events["M"] if e["name"] == "process_name"} == {
        (0, "rank 0"),
        (1, "rank 1"),
    }
    found = {(event["pid"], event["name"]): event for event in events["X"]}
    assert sorted(found) == sorted([(0, "step"), (0, "train"), *((1, n) for n in ("step", "train", "forward", "backward"))])
    unfinished = {key for key, event in found.items() if event["args"].get("unfinished")}
    assert unfinished == {(1, "step"), (1, "train"), (1, "backward")}
    assert found[0, "train"]["args"]["error"] == "KeyError"
    # Clocks agree: the other process ran within this rank's step and before its next span.
    ours, theirs = found[0, "step"], found[1, "step"]
    assert ours["ts"] < theirs["ts"] < theirs["ts"] + theirs["dur"] < found[0, "train"]["ts"]


def test_only_the_ranks_of_this_run_are_merged_and_only_by_the_first(tmp_path):
    for rank in (0, 1, 2):
        profile = Profile(Steps(1, 1), tmp_path, rank=rank, num_ranks=2)
        with profile.step(1), trace.span("sync", policy="a"):
            pass
        if rank:
            before = (tmp_path / "trace.json").stat().st_mtime_ns
            profile.close()
            assert (tmp_path / "trace.json").stat().st_mtime_ns == before
        profile.close()
    assert {rank for rank, *_ in shown(parsed(perfetto.merge(tmp_path, 2)))} == {0, 1}
    assert {rank for rank, *_ in shown(parsed(perfetto.merge(tmp_path)))} == {0, 1, 2}


class Nvtx:
    def __init__(self, log: list) -> None:
        self.log = log

    def range_start(self, name: str) -> int:
        self.log.append(name)
        return len(self.log)

    def range_end(self, range_id: int) -> None:
        self.log.append(range_id)


def test_ranges_have_the_same_names_and_the_device_is_waited_for(tmp_path):
    log: list = []
    tracer = Tracer(tmp_path, 0, nvtx=Nvtx(log), wait=lambda: log.append("wait"))
    with trace.recording(tracer):
        with trace.span("train", policy="main"), trace.span("forward"):
            pass
        assert log == ["train main", "wait", "forward main", "wait", "wait", 3, "wait", 1]
        log.clear()
        with pytest.raises(ZeroDivisionError), trace.span("sync"):
            _ = 1 / 0
        assert log == ["sync", "wait", 1]


def steps(profile: Profile) -> None:
    for step in (1, 2, 3):
        with profile.step(step), trace.span("forward"), trace.span("pack"):
            pass


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path):
    (tmp_path / "rank_0.jsonl").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="trace ends here.*No space left") as warned:
        steps(Profile(Steps(1, 3), tmp_path, rank=0, num_ranks=1))  # nothing merges, which would read that file without end
    assert len(warned) == 1


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "profile").write_text("a file")
    profile = Profile(Steps(1, 2), tmp_path / "profile", rank=0, num_ranks=1)
    with pytest.warns(UserWarning, match="trace ends here") as warned:
        steps(profile)
    assert len(warned) == 1


def test_time_shares_by_hand():
    def span(rank: int, name: str, policy: str | None, start: int, end: int) -> Span:
        return Span(rank, 0, name, policy, None, start, end)

    spans = [
        span(0, "step", None, 0, 100),
        span(0, "rollout", None, 0, 60),
        span(0, "grade", None, 10, 30),
        span(0, "grade", None, 20, 40),  # overlaps the one before: 10 to 40 in all
        span(0, "grade", None, 22, 25),
        span(0, "forward", "a", 60, 70),
        span(0, "forward", "a", 80, 85),
        span(0, "forward", "b", 70, 80),
        span(1, "step", None, 1000, 1100),
        span(1, "rollout", None, 1000, 1060),
        span(1, "forward", "a", 1060, 1065),
    ]
    assert time_shares(spans) == {
        "": {"step": 1.0, "rollout": 0.6, "grade": 0.15},
        "a": {"forward": 0.1},
        "b": {"forward": 0.05},
    }
    assert time_shares([]) == {}


def test_the_shares_of_a_recording_come_from_its_files(tmp_path):
    tracer = Tracer(tmp_path, 0)
    with trace.recording(tracer), trace.span("step"):
        with trace.span("forward", policy="main"):
            time.sleep(0.03)
        time.sleep(0.03)
    shares = time_shares(perfetto.read(tmp_path).spans)
    assert shares[""] == {"step": 1.0}
    assert 0.3 < shares["main"]["forward"] < 0.7
