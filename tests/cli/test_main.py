"""The command as a user meets it: exit status, stdout, stderr."""

import json

import pytest
import typer

from drmas.cli import main as cli
from drmas.errors import DataError


def test_a_users_mistake_is_one_line_on_stderr_and_status_2(drmas):
    done = drmas("config", "show", "quickstart", "--train.stpes", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("drmas: train.stpes: unknown key (from --train.stpes); the nearest valid key is train.steps\n")


def test_other_ranks_name_themselves(drmas):
    assert drmas("train", "nowhere", RANK="3").stderr.startswith("drmas: rank 3: nowhere: no such recipe")


def test_config_show_prints_every_value_with_the_overrides_wherever_they_stand(drmas):
    done = drmas("config", "show", "--train.steps", "7", "quickstart", "--team.solver.max-tokens=9")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["train"]["steps"], shown["team"]["solver"]["max_tokens"], shown["loss"]["clip_low"]) == (7, 9, 0.2)


def test_config_show_checks_the_teams_keys_too(drmas):
    done = drmas("config", "show", "quickstart", "--team.solver.max-tokes", "9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("drmas: team.solver.max_tokes: unknown key; the nearest is 'max_tokens'")


def test_inspect_prints_one_json_object(drmas, rows_file):
    path = rows_file(*({"task": "t", "episode": e, "agent": "a", "reward": r} for e, r in (("0", 1), ("1", 0))))
    done = drmas("inspect", "--advantage.preset", "rloo", "--rows", str(path), "--json")
    assert done.returncode == 0, done.stderr
    assert [row["advantage"] for row in json.loads(done.stdout)["rows"]] == [1.0, -1.0]


@pytest.fixture
def call(monkeypatch, capsys):
    """The command in this process: (exit status, stdout, stderr)."""

    def run(*words: str):
        monkeypatch.setattr("sys.argv", ["drmas", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_inspect_wants_rows_or_a_run(call):
    for words in ((), ("--rows", "x.jsonl", "run"), ("run", "other")):
        status, _, err = call("inspect", *words)
        assert (status, err) == (2, "drmas: inspect: expected either --rows FILE.jsonl, or RUN with --step N\n")
    assert call("inspect", "run")[2] == "drmas: inspect: --step is missing; expected which step of run to show\n"
    assert call("inspect", "run", "--step", "3")[2].startswith("drmas: run/config.json: can't be read")


def test_train_wants_one_recipe(call):
    assert call("train")[2] == "drmas: expected one RECIPE, found none; drmas train --list shows the recipes\n"
    assert "found a b" in call("train", "a", "b")[2]


def test_train_list_names_the_recipes(call):
    status, out, _ = call("train", "--list")
    assert status == 0
    assert {"quickstart", "arithmetic-tiny"} <= set(out.splitlines())


def test_train_hands_configuration_and_switches_to_the_run(call, monkeypatch):
    import sys
    from types import ModuleType

    seen = {}
    fake = ModuleType("drmas.runtime.run")
    fake.train = lambda config, **switches: seen.update(switches, steps=config.train.steps, lr=config.policies["main"].lr)
    monkeypatch.setitem(sys.modules, "drmas.runtime.run", fake)
    hosts = ("--gpus-per-host", "4", "--gpu-memory-gib", "79.6")
    status, _, err = call(
        "train", "quickstart", "--train.steps", "3", "--resume", "--policies.main.lr=2e-5", "--dry-run", *hosts
    )
    assert (status, err) == (0, "")
    told = {"gpus_per_host": 4, "gpu_memory_gib": 79.6}
    switches = {"resume": True, "overwrite": False, "auto_resume": False, "dry_run": True} | told
    assert seen == switches | {"steps": 3, "lr": 2e-5}


def test_config_explain(call):
    explained = call("config", "explain", "train.steps")[1]
    assert explained == "train.steps: integer >= 0; default 10. 0: the warm start alone, and its export.\n"
    assert call("config", "explain", "train.stpes")[0] == 2


def test_report_of_no_run_is_a_users_mistake(call, tmp_path):
    status, out, err = call("report", str(tmp_path))
    assert (status, out) == (2, "")
    assert "expected a run folder" in err


def test_ctrl_c_is_130(call, monkeypatch):
    monkeypatch.setattr("drmas.config.load.recipes", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert call("train", "--list")[0] == 130


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("sys.argv", ["drmas", "train", "--list"])
    monkeypatch.setattr("drmas.config.load.recipes", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_the_app_names_every_command():
    names = {command.callback.__name__ for command in cli.app.registered_commands}
    assert names == {
        *("train", "inspect", "report", "doctor", "export", "import_", "eval_", "prepare_data", "serve_retriever"),
        *("reproduce", "serve_engines", "plan", "launch"),
    }
    assert isinstance(cli.config_app, typer.Typer)
    assert issubclass(DataError, cli.UserError)
