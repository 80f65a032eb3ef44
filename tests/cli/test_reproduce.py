"""The command around the runner: what it is given, what it says, and its exit status. The trials themselves are fakes."""

import json
import os

import pytest

from drmas.cli import main as cli
from drmas.cli import reproduce as command
from drmas.reproduce.plan import QUICK, START, Trial


@pytest.fixture
def ran(monkeypatch) -> dict:
    """What the runner was given; statuses by key are what it answers, "ok" unless set in `statuses`."""
    seen: dict = {"statuses": {}, "calls": 0, "problems": []}
    start = Trial("maths", START, 0)
    monkeypatch.setattr(command, "trials", lambda *, quick: [start, Trial("maths", "grpo", 0, (start.key,))])
    monkeypatch.setattr(command, "scale", lambda *, quick: QUICK)

    def write_page(root):
        (root / "results.json").write_text(json.dumps({"problems": seen["problems"]}))
        return root / "report.html"

    monkeypatch.setattr(command, "write_page", write_page)

    def run_units(units, *, lock, say, **given):
        seen.update(given, keys=[unit.key for unit in units], calls=seen["calls"] + 1)
        return {unit.key: seen["statuses"].get(unit.key, "ok") for unit in units}

    monkeypatch.setattr(command, "run_units", run_units)
    return seen


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """drmas reproduce, in this process: (exit status, stdout, stderr)."""

    def run(*words: str):
        monkeypatch.setattr("sys.argv", ["drmas", "reproduce", "--output", str(tmp_path / "out"), *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_everything_runs_on_all_cores_and_the_report_is_named(ran, call, tmp_path):
    assert call("--quick") == (0, f"report  {tmp_path}/out/report.html\n", "")
    assert ran["keys"] == ["bandit", "maths/start/seed-0", "maths/grpo/seed-0"]
    assert (ran["jobs"], ran["retry_crashed"]) == (len(os.sched_getaffinity(0)), False)
    assert ran["limit_seconds"] == 15 * 60
    settings = json.loads((tmp_path / "out/settings.json").read_text())
    assert (settings["quick"], settings["trials"], settings["seeds"]) == (True, 1, QUICK.seeds)


def test_only_some_run_with_what_they_need(ran, call):
    assert call("--only", "grpo", "--jobs", "3", "--retry-crashed")[0] == 0
    assert (ran["keys"], ran["jobs"], ran["retry_crashed"]) == (["maths/start/seed-0", "maths/grpo/seed-0"], 3, True)
    assert ran["limit_seconds"] == 2 * 3600


def test_crashed_trials_are_named_after_the_report_with_status_1(ran, call, tmp_path):
    ran["statuses"] = {"maths/grpo/seed-0": "crashed", "bandit": "diverged"}
    assert call() == (1, f"report  {tmp_path}/out/report.html\n", "drmas: maths/grpo/seed-0 crashed\n")


def test_other_settings_are_refused_until_they_may_overwrite(ran, call, tmp_path):
    assert call("--quick")[0] == 0
    (tmp_path / "out/trials").mkdir()
    status, _, err = call()
    assert (status, ran["calls"]) == (2, 1)
    assert err == (
        f"drmas: {tmp_path}/out holds a quick reproduction, not a whole one; --output FOLDER writes elsewhere, "
        "--overwrite deletes what is there\n"
    )
    assert call("--overwrite")[0] == 0
    assert not (tmp_path / "out/trials").exists()


def test_a_mistyped_trial_touches_no_folder(ran, call, tmp_path):
    status, _, err = call("--only", "grop", "--overwrite")
    assert (status, ran["calls"], list(tmp_path.iterdir())) == (2, 0, [])
    assert err.startswith("drmas: --only grop: no trial's key contains it")


def test_report_only_runs_nothing(ran, call, tmp_path):
    assert call("--report-only") == (
        2,
        "",
        f"drmas: {tmp_path}/out: no such folder; expected that of a reproduction (--output)\n",
    )
    (tmp_path / "out").mkdir()
    assert call("--report-only") == (0, f"report  {tmp_path}/out/report.html\n", "")
    assert call("--report-only", "--overwrite")[0] == 2
    assert ran["calls"] == 0


def test_a_report_of_damaged_files_says_so_at_once(ran, call, tmp_path):
    (tmp_path / "out").mkdir()
    ran["problems"] = ["bandit.json: no such file", "trials/a/b/seed-0/result.json: can't be read"]
    assert call("--report-only") == (
        0,
        f"report  {tmp_path}/out/report.html\n",
        "drmas: 2 line(s) in its section Failures; the first: bandit.json: no such file\n",
    )


def test_a_report_is_made_of_what_other_code_left(ran, call, tmp_path, monkeypatch):
    assert call("--quick")[0] == 0
    monkeypatch.setattr("drmas.reproduce.folder.code_version", lambda: "another")
    assert "holds trials of other code; --output" in call("--quick")[2]
    assert call("--report-only") == (0, f"report  {tmp_path}/out/report.html\n", "")
    assert ran["calls"] == 1


def test_ctrl_c_is_130_and_says_how_to_go_on(ran, call, monkeypatch):
    def interrupted(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_units", interrupted)
    status, _, err = call()
    assert status == 130
    assert err.startswith("drmas: stopped; the same command goes on\n")
