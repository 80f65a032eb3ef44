"""Real processes: trials that crash, hang and are killed, and runs that are stopped and go on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drmas.errors import ConfigError, DataError
from drmas.reproduce.plan import START, trials
from drmas.reproduce.runner import run_units, seconds_left, select, status_of, units_of
from drmas.reproduce.worker import Unit

HERE = Path(__file__).parent
OK = [["maths", "start", 0], ["maths", "grpo", 0, ["maths/start/seed-0"]], ["maths", "dr-mas", 0, ["maths/start/seed-0"]]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "reproduce"


@pytest.fixture
def stage(root: Path) -> Path:
    """Where the fakes leave their process ids, and look for `go`."""
    return root.parent / "stage"


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """start(trials, jobs=..., ...): the runner, as a process with a group of its own, as a terminal starts it."""
    started = []

    def begin(trials: list, jobs: int = 2, **options) -> subprocess.Popen[str]:
        words = [sys.executable, str(HERE / "run_fakes.py"), str(root), json.dumps({"trials": trials, "jobs": jobs, **options})]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start: Start) -> Callable[..., tuple[int, str, str]]:
    """The same, to its end: exit status, stdout, stderr."""

    def finish(trials: list, **options) -> tuple[int, str, str]:
        process = start(trials, **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return finish


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pid: int) -> str:
    """One letter, as ps shows it; X of none such."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has waited for yet has."""
    return state(pid) in "XZ"


def pids(stage: Path, *names: str) -> list[int]:
    """The processes that left their ids, once they have."""
    until(lambda: all((stage / name).exists() for name in names))
    return [int((stage / name).read_text()) for name in names]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def results(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.json") if path.name != "timing.json"}


def errors(root: Path) -> dict[str, str | None]:
    """Trial -> the cause of its crash."""
    found = [json.loads(path.read_text()) for path in (root / "trials").rglob("result.json")]
    return {f"{one['method']}-{one['seed']}": one.get("error") for one in found}


def test_each_trial_is_forked_with_everything_imported_and_says_what_it_says_in_its_log(run, root) -> None:
    status, out, err = run(OK)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "2 trials, 1 start, the bandit, 2 at a time: 0 done before, 4 to run"
    assert len(lines) == 5
    assert lines[-1].startswith("4/4  maths/")
    assert "  ok  " in lines[-1]
    assert "  about 0 s left" in lines[3]
    folder = root / "trials/maths/grpo/seed-0"
    assert json.loads((folder / "result.json").read_text())["seen"] == {"quick": True, "threads": "1", "forked": True}
    assert (folder / "log.txt").read_text() == "maths/grpo/seed-0 prints\n"
    assert json.loads((folder / "timing.json").read_text())["seconds"] > 0
    assert json.loads((root / "bandit.json").read_text()) == {"quick": True, "factor": 4.0}
    before = results(root)
    assert run(OK)[1] == "2 trials, 1 start, the bandit, 2 at a time: 4 done before, 0 to run\n"
    assert results(root) == before


def test_as_many_as_asked_for_run_at_a_time_and_the_results_are_those_of_one_by_one(run, root) -> None:
    meeting = [["maths", "meet", seed] for seed in range(4)]
    assert run(meeting, limit_seconds=50)[0] == 0  # one by one, they would wait for each other for ever
    assert set(errors(root).values()) == {None}
    together = results(root)
    for path in root.rglob("result.json"):
        path.unlink()
    assert run(meeting, jobs=1)[0] == 0  # they have met already
    assert results(root) == together


def test_what_crashes_costs_itself_and_what_comes_after_it_and_is_run_again_when_asked(start, run, root, stage) -> None:
    trials = [["maths", method, 0] for method in ("raise", "exit", "silent", "threads", "wait")]
    trials += [["maths", "grpo", 1, ["maths/raise/seed-0"]], ["maths", "grpo", 2, ["maths/grpo/seed-1"]], ["maths", "grpo", 3]]
    first = start(trials)
    os.kill(pids(stage, "0")[0], signal.SIGKILL)
    out, err = first.communicate(timeout=60)
    assert (first.returncode, err) == (0, "")
    assert "maths/wait/seed-0  crashed: killed by signal 9  " in out
    assert errors(root) == {
        "raise-0": "ValueError: the first line and the second",
        "exit-0": "exit code 3",
        "silent-0": "ended without result.json",
        "threads-0": None,
        "wait-0": "killed by signal 9",
        "grpo-1": "its start maths/raise/seed-0 crashed",
        "grpo-2": "its start maths/grpo/seed-1 crashed",
        "grpo-3": None,
    }
    crashed = json.loads((root / "trials/maths/raise/seed-0/result.json").read_text())
    assert crashed == {
        **{"scenario": "maths", "method": "raise", "seed": 0, "status": "crashed"},
        "error": "ValueError: the first line and the second",
    }
    assert "in _raise" in (root / "trials/maths/raise/seed-0/log.txt").read_text()

    before = results(root)
    (stage / "go").touch()
    assert run(trials)[1] == (
        "8 trials, the bandit, 2 at a time: 9 done before, 0 to run; "
        "6 crashed before and stay so; --retry-crashed runs them again\n"
    )
    assert results(root) == before
    assert (
        "8 trials, the bandit, 2 at a time: 3 done before, 6 to run; 6 crashed before and are run again\n"
        in run(trials, retry_crashed=True)[1]
    )
    assert {name for name, error in errors(root).items() if error} == {"silent-0"}


def test_a_trial_that_hangs_is_ended_with_all_that_it_started(run, root, stage) -> None:
    assert run([["maths", "parent", 0]], limit_seconds=1.5)[0] == 0
    assert errors(root) == {"parent-0": "took longer than 1.5 s"}
    assert all(gone(int(path.read_text())) for path in stage.iterdir() if not path.suffix)


def test_a_killed_runner_takes_its_trials_along_and_the_next_one_goes_on(start, run, root, stage) -> None:
    trials = [["maths", "parent", 0], ["maths", "wait", 1], *OK]
    first = start(trials)
    running = pids(stage, "0", "child", "1")
    server = parent_of(running[0])
    assert server != first.pid
    first.kill()
    until(lambda: all(gone(pid) for pid in [*running, server]))
    assert [path.name for path in (root / "trials").rglob("result.json")] == []
    assert (root / "trials/maths/parent/seed-0/half.txt").exists()

    (stage / "go").touch()
    (root / "trials/maths/parent/seed-0/left.txt").touch()
    status, out, err = run(trials)
    assert (status, err) == (0, "")
    assert out.startswith("4 trials, 1 start, the bandit, 2 at a time: 1 done before, 5 to run\n")
    assert not (root / "trials/maths/parent/seed-0/left.txt").exists()
    gone_on = results(root)
    for path in root.rglob("*.json"):
        path.unlink()
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert run(trials, jobs=1)[0] == 0
    assert results(root) == gone_on


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_runner_ends_its_trials_with_status_130_and_the_next_one_goes_on(start, run, root, stage, sent) -> None:
    trials = [["maths", "parent", 0], ["maths", "wait", 1]]
    first = start(trials)
    running = pids(stage, "0", "child", "1")
    os.killpg(first.pid, sent)  # a terminal's Ctrl-C reaches the whole group
    assert first.communicate(timeout=60)[1] == ""
    assert first.returncode == 130
    assert all(gone(pid) for pid in running)
    assert errors(root) == {}
    (stage / "go").touch()
    assert run(trials)[0] == 0
    assert errors(root) == {"parent-0": None, "wait-1": None}


def test_ctrl_c_while_the_trials_code_is_imported_is_quiet_too(start, run, root, stage, monkeypatch) -> None:
    stage.mkdir()
    monkeypatch.setenv("IMPORT_STAGE", str(stage))
    first = start(OK)
    (server,) = pids(stage, "import")
    os.killpg(first.pid, signal.SIGINT)
    assert first.wait(timeout=60) == 130
    (stage / "go").touch()
    until(lambda: gone(server))
    assert first.communicate() == ("2 trials, 1 start, the bandit, 2 at a time: 0 done before, 4 to run\n", "")
    assert not (root / "trials").exists()


def test_two_runners_cant_share_a_folder_nor_can_one_with_a_trial_that_a_killed_one_left(start, run, root, stage) -> None:
    trials = [["maths", "wait", 0]]
    first = start(trials)
    (trial,) = pids(stage, "0")
    refused = (1, "", f"refused: another process writes to {root} (the first one); wait for it, or use another --output\n")

    def second() -> tuple[int, str, str]:
        status, said, error = run(trials, lock_seconds=0)
        return status, said, re.sub(rf"\(process {first.pid} on .*\)", "(the first one)", error)

    assert second() == refused
    os.kill(trial, signal.SIGSTOP)  # as if it were in a call that never looks up
    until(lambda: state(trial) == "T")
    first.kill()
    first.wait()
    assert second() == refused
    os.kill(trial, signal.SIGCONT)
    until(lambda: gone(trial))
    (stage / "go").touch()
    assert run(trials, lock_seconds=60)[0] == 0


def test_trials_end_with_the_server_that_forked_them_and_the_others_get_a_new_one(start, root, stage) -> None:
    first = start([["maths", "wait", 0], ["maths", "parent", 1], ["maths", "grpo", 0]])
    running = pids(stage, "0", "1", "child")
    os.kill(parent_of(running[0]), signal.SIGKILL)
    assert first.wait(timeout=60) == 0
    until(lambda: all(gone(pid) for pid in running))
    assert errors(root) == {"wait-0": "exit code 255", "parent-1": "exit code 255", "grpo-0": None}


def test_code_that_cant_be_imported_is_no_crash_of_trials(run, root) -> None:
    status, _, err = run(OK, entry="fake_trails:run_trial")
    assert status == 1
    assert "ImportError: fake_trails, fake_trials: ModuleNotFoundError: No module named 'fake_trails'" in err
    assert not (root / "trials").exists()


def unit(key: str, *after: str, folder: Path = Path("nowhere")) -> Unit:
    return Unit(key, folder, folder / "result.json", "fake_trials:run_trial", after=after)


def test_only_takes_along_what_must_be_done_before() -> None:
    units = [unit("a/start/seed-0"), unit("a/grpo/seed-0", "a/start/seed-0"), unit("b/grpo/seed-0"), unit("b/grpo/seed-1")]
    assert select(units, []) == units
    assert select(units, ["a/grpo"]) == units[:2]
    assert select(units, ["seed-1", "b/grpo/seed-0"]) == units[2:]
    with pytest.raises(ConfigError, match=r"--only grop: no trial's key contains it; .* such as b/grpo/seed-1"):
        select(units, ["seed-0", "grop"])


def test_the_time_left_is_that_of_units_of_the_same_kind() -> None:
    bandit, *others = units_of(trials(quick=True), Path("nowhere"), quick=True)
    starts = [one for one in others if one.names["method"] == START][:4]
    maths, search = (
        [one for one in others if one.key.startswith(kind) and one not in starts][-2:] for kind in ("maths", "search")
    )
    ended = {"bandit": [500.0], "start": [30.0, 50.0], "maths": [9.0, 11.0], "search": [20.0]}
    assert seconds_left([*starts, *maths], [(search[0], 5.0), (search[1], 70.0)], ended, 2) == (4 * 40 + 2 * 10 + 15 + 0) / 2
    assert seconds_left([], [(search[0], 5.0)], ended, 2) == 15.0  # alone, it can't be shared
    del ended["search"]
    assert seconds_left([*search, bandit], [], ended, 1) == 10.0 + 10.0 + 500.0
    del ended["maths"]
    assert seconds_left(starts, [], ended, 4) == 40.0
    assert seconds_left([*starts, *search], [], ended, 1) is None


def test_a_plan_that_cant_be_kept_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="b is to run after a, which doesn't stand before it"):
        run_units([unit("b", "a"), unit("a")], jobs=1, lock=0)


def test_a_result_that_cant_be_read_is_named(tmp_path) -> None:
    (tmp_path / "result.json").write_text('{"status": "o')
    with pytest.raises(DataError, match=r"result\.json: can't be read: .* delete it, and the trial is run again"):
        status_of(unit("a", folder=tmp_path))
    (tmp_path / "result.json").write_text('{"status": "diverged"}')
    assert status_of(unit("a", folder=tmp_path)) == "diverged"
    assert status_of(unit("a", folder=tmp_path / "none")) is None


def test_the_bandits_crash_is_recorded_beside_its_log_and_not_as_its_numbers(tmp_path) -> None:
    bandit = units_of([], tmp_path, quick=True)[0]
    assert (bandit.result, bandit.folder) == (tmp_path / "bandit.json", tmp_path / "bandit")
    bandit.folder.mkdir()
    (bandit.folder / "result.json").write_text('{"status": "crashed", "error": "exit code 3"}')
    assert status_of(bandit) == "crashed"
    bandit.result.write_text("{}")
    assert status_of(bandit) == "ok"
