"""`drmas eval` as a user meets it, with scripted engines: which models it takes, what it prints and leaves, what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from drmas.cli import evaluate as command
from drmas.cli import main as cli
from drmas.config.load import dump, load
from drmas.rollout.scripted import ScriptedEngine
from drmas.runtime.models import write_tiny_qwen3

RECIPE = """
name = "toy"
output = "runs"

[policies.main]
model = "start"

[policies.judge]
model = "start"
trainable = false

[team]
name = "solver-verifier"
revise = ""

[team.solver]
prompt = "{question}="
parser = "text"
max_tokens = 4

[team.verifier]
policy = "judge"
prompt = "{question}={answer}?"
parser = "verdict:yes,no"
max_tokens = 4

[data]
type = "jsonl"
path = "tasks.jsonl"

[reward]
type = "exact"

[eval]
samples = 2
bootstrap = 100
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "start"
    write_tiny_qwen3(folder, hidden=32, layers=1)
    return folder


@pytest.fixture
def here(tmp_path, model, monkeypatch) -> Path:
    """The folder in which the commands run: the recipe, two tasks, a model `start`, and engines in the place of vLLM's.

    The engine of a folder `start` answers as a base model does, wrongly; of any other, rightly.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.toml").write_text(RECIPE)
    tasks = [{"prompt": f"{n}+1", "answer": str(n + 1), "id": f"t{n}"} for n in (1, 2)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    shutil.copytree(model, tmp_path / "start")

    def engine(name, config, *, model_path, log_dir, seed, deterministic, **unused) -> ScriptedEngine:
        def answer(prompt: str, key: str) -> str:
            if name == "judge":
                return "yes"
            return str(int(prompt.removeprefix("<user>")[0]) + (Path(model_path).name != "start"))

        return ScriptedEngine(AutoTokenizer.from_pretrained(model_path), answer, deterministic=deterministic)

    monkeypatch.setattr("drmas.runtime.engines.VllmEngine", engine)
    return tmp_path


@pytest.fixture
def call(here, monkeypatch, capsys):
    """The command in this process: (exit status, stdout, stderr)."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*words: str) -> SimpleNamespace:
        monkeypatch.setattr("sys.argv", ["drmas", "eval", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return SimpleNamespace(status=ended.value.code, out=captured.out, err=captured.err)

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def exported(here, model) -> Path:
    """A run's folder with an exported model and a checkpoint from before it."""
    run = here / "runs" / "toy"
    for step in (1, 3):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step_{step}" / "run.json").write_text("{}")
    for name in ("main", "judge"):
        shutil.copytree(model, run / "export" / name)
        os.utime(run / "export" / name / "config.json")
    (run / "config.json").write_text(dump(load("toy.toml")))
    return run


@pytest.fixture
def exports(monkeypatch, model) -> list[int]:
    """The steps whose checkpoint was exported, with a copy of the model in the place of an export."""
    steps: list[int] = []

    def export(run: Path, step: int, scratch: Path) -> None:
        steps.append(step)
        shutil.copytree(model, scratch / "main")

    monkeypatch.setattr(command, "_export", export)
    return steps


def numbers(folder: Path) -> dict:
    return json.loads((folder / "eval.json").read_text())


def score(folder: Path, measure: str = "avg@2") -> float:
    return numbers(folder)["team"]["measures"][measure]["micro"]["value"]


def test_a_recipe_is_evaluated_with_its_models_and_leaves_numbers_and_tables(call, here):
    done = call("toy.toml")
    assert (done.status, done.err) == (0, "")
    place = here / "runs" / "toy-eval"
    assert {path.name for path in place.iterdir()} == {
        *("drmas-eval.json", "eval.json", "eval.md", "episodes", "settings.json", "environment.json")
    }
    assert numbers(place)["models"] == {"main": "start", "judge": "start"}
    assert score(place) == 0.0
    for text in (done.out, (place / "eval.md").read_text()):
        for part in ("2 of jsonl, 2 episodes each", "the data that the team trains on", "0 of 4 episodes", "pass@2", "solver"):
            assert part in text
    assert "runs/toy-eval/eval.json" in done.out
    assert [path.name for path in (here / "runs").iterdir()] == ["toy-eval"]


def test_another_model_of_a_policy_and_what_its_training_is_worth(call, here, model):
    shutil.copytree(model, here / "mine")
    done = call("toy.toml", "--model", "main=mine", "--samples", "3", "--ablate", "solver", "--output", "out", "--json")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    assert found == numbers(here / "out")
    assert found["models"] == {"main": str(here / "mine"), "judge": "start"}
    assert (found["samples"], found["team"]["measures"]["avg@3"]["micro"]["value"]) == (3, 1.0)
    assert found["without"]["solver"]["measures"]["avg@3"]["micro"]["value"] == 0.0
    assert found["without"]["solver"]["gain"]["pass@3"]["micro"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_ablate_all_takes_the_agents_whose_model_was_trained(call, here, model):
    shutil.copytree(model, here / "mine")
    call("toy.toml", "--model=main=mine", "--ablate", "all", "--output", "out", "--eval.max-tasks", "1")
    assert list(numbers(here / "out")["without"]) == ["solver"]
    assert numbers(here / "out")["tasks"] == 1


def test_a_run_is_evaluated_with_its_exported_model_and_frozen_ones_as_they_are(call, exported, exports):
    assert call("runs/toy").status == 0
    place = exported / "eval" / "newest"
    assert numbers(place)["models"] == {"main": "runs/toy/export/main", "judge": "start"}
    assert (score(place), exports) == (1.0, [])


def test_a_run_that_went_on_since_its_export_is_evaluated_at_its_newest_checkpoint(call, exported, exports):
    os.utime(exported / "export" / "main" / "config.json", (1, 1))
    assert call("runs/toy").status == 0
    place = exported / "eval" / "newest"
    assert numbers(place)["models"]["main"] == "runs/toy, checkpoint of step 3"
    assert (score(place), exports) == (1.0, [3])
    assert [path.name for path in (exported / "eval").iterdir()] == ["newest"]  # the exported copy is gone


def test_the_checkpoint_of_a_step(call, exported, exports):
    assert call("runs/toy", "--checkpoint", "1").status == 0
    assert numbers(exported / "eval" / "step_1")["models"]["main"] == "runs/toy, checkpoint of step 1"
    assert exports == [1]


def test_a_given_model_needs_no_export(call, exported, exports, here, model):
    shutil.copytree(model, here / "mine")
    shutil.rmtree(exported / "export")
    assert call("runs/toy", "--model", "main=mine", "--output", "out").status == 0
    assert (numbers(here / "out")["models"]["main"], exports) == (str(here / "mine"), [])


@pytest.mark.parametrize(
    ("exports_at", "checkpoint_at", "newest"),
    [((20, 30), 10, True), ((20, 30), 20, True), ((20, 30), 25, False), ((20, 30), 40, False), ((20, None), 10, False)],
)
def test_exported_models_are_the_newest_if_none_of_them_is_older_than_a_checkpoint(exported, exports_at, checkpoint_at, newest):
    for path in (exported / "checkpoints").rglob("*"):
        os.utime(path, (checkpoint_at, checkpoint_at) if "step_1" in path.parts else (5, 5))
    for name, seconds in zip(("main", "judge"), exports_at, strict=True):
        config = exported / "export" / name / "config.json"
        config.unlink() if seconds is None else os.utime(config, (seconds, seconds))
    assert command._export_is_newest(exported, ["main", "judge"]) is newest
    assert command._export_is_newest(exported, ["judge", "main"]) is newest


def test_a_refused_evaluation_leaves_no_folder_behind(call, here):
    before = {path.name for path in here.iterdir()}
    for words in (("--ablate", "solver"), ("--policies.main.model", "gone"), ("--output", "far/away/it", "--ablate=solver")):
        assert call("toy.toml", *words).status == 2
        assert {path.name for path in here.iterdir()} == before
    (here / "runs").mkdir()
    assert call("toy.toml", "--ablate", "solver").status == 2
    assert list((here / "runs").iterdir()) == []  # a folder that was there stays


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "eval: expected one RECIPE or RUN, found none"),
        (("toy.toml", "runs"), "eval: expected one RECIPE or RUN, found toy.toml runs"),
        (("nowhere",), "nowhere: no such recipe"),
        (("toy.toml", "--model", "start"), "--model start: expected POLICY=FOLDER"),
        (("toy.toml", "--model", "mian=start"), "--model mian=start: the policy is 'mian'; the nearest is 'main'"),
        (
            ("toy.toml", "--model", "main=gone"),
            "--model main=gone: there is no gone/config.json; expected a",
        ),
        (("toy.toml", "--checkpoint", "3"), "--checkpoint 3 is of a run"),
        (("toy.toml", "--samples", "0"), "eval.samples: 0; expected integer > 0"),
        (("toy.toml", "--ablate", "slover"), "eval.ablate names the agent 'slover'; the nearest is 'solver'"),
        (("toy.toml", "--ablate", "solver"), "eval.ablate names solver, whose policy main is at its base start already"),
        (("toy.toml", "--policies.main.model", "gone"), "policies.main.model: model 'gone' is no folder"),
        (("toy.toml", "--eval.stemps", "3"), "eval.stemps: unknown key"),
        (("toy.toml", "--output", "start"), "start is there and holds no evaluation; give another --output"),
        (("toy.toml", "--eval.data", "{type = 'jsonl', path = 'gone.jsonl'}"), "data.path gone.jsonl"),
        (("start",), "start is not the folder of a run, its config.json has no policies; a model is evaluated with a recipe"),
        (("runs/toy", "--checkpoint", "2"), "runs/toy has no checkpoint of step 2; it has steps 1, 3"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(call, exported, words, message):
    done = call(*words)
    assert done.status == 2
    assert done.err.startswith(f"drmas: {message}")
    assert len(done.err.splitlines()) == 1


def test_a_folder_without_a_run_and_a_run_without_models_are_named(call, exported):
    assert "runs is not the folder of a run; it has no config.json" in call("runs").err
    for left in ("export", "checkpoints"):
        shutil.rmtree(exported / left)
    assert call("runs/toy").err == "drmas: runs/toy has no checkpoint; it has none\n"
    (exported / "config.json").write_text("{")
    done = call("runs/toy")
    assert (done.status, len(done.err.splitlines())) == (2, 1)


def test_a_checkpoint_that_cannot_be_exported_is_the_users_to_mend(call, exported):
    """The folder of step 3 is no whole checkpoint: the export's own message, and nothing is left of it."""
    done = call("runs/toy", "--checkpoint", "3")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("drmas: ")
    assert "step_3" in done.err
    assert not (exported / "eval").exists()


def test_only_failures_are_status_2_with_the_first_reason(call, here, monkeypatch):
    monkeypatch.setattr("drmas.cli.evaluate.load", lambda *_: load("toy.toml", ["--team.solver.prompt", "{question}" * 500]))
    done = call("toy.toml")
    assert done.status == 2
    assert "drmas: all 4 episodes (team) failed; the first with overlong: " in done.err


def test_it_is_the_work_of_one_process(call, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call("toy.toml").err == "drmas: eval is the work of one process; start it without torchrun\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_with_nothing_left_behind(here, number):
    """The engine never answers; the command is interrupted once its first request is there."""
    program = """
import signal, sys
from pathlib import Path
from transformers import AutoTokenizer
import drmas.runtime.engines
from drmas.rollout.scripted import ScriptedEngine

signal.signal(signal.SIGINT, signal.default_int_handler)

class Silent(ScriptedEngine):
    def close(self):
        print("closed", flush=True)
        super().close()

def engine(name, config, *, model_path, **unused):
    return Silent(AutoTokenizer.from_pretrained(model_path), lambda prompt, key: Path("asked").touch())

drmas.runtime.engines.VllmEngine = engine
from drmas.cli.main import main
sys.argv = ["drmas", "eval", "toy.toml"]
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        while not (here / "asked").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert out.splitlines().count("closed") == 2
    assert "Traceback" not in err
    assert [path.name for path in (here / "runs").iterdir()] == ["toy-eval"]
