"""`drmas export` and `drmas import`: what transformers opens of a checkpoint, what a run goes on from, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from drmas.cli import main as cli
from drmas.cli.weights import export_run, import_model
from drmas.config.load import load
from drmas.errors import CheckpointError, ConfigError, ModelError
from drmas.runtime.folder import RunFolder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder that weights_process.py filled: run, start, other, wider, and exports."""
    place = tmp_path_factory.mktemp("weights")
    subprocess.run(
        [sys.executable, Path(__file__).with_name("weights_process.py"), place],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=240,
    )
    return place


@pytest.fixture(scope="module")
def found(place):
    return torch.load(place / "found.pt", weights_only=False)


@pytest.fixture
def run(place, tmp_path) -> Path:
    """A copy of the run to do things to."""
    return shutil.copytree(place / "run", tmp_path / "run")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_newest_checkpoint_of_every_trained_policy_is_exported(place, found):
    exported = place / "run" / "export" / "step_2"
    assert found["exported"] == {"main": exported / "main", "adapted": exported / "adapted"}
    for name, folder in found["exported"].items():  # of the policy with adapters they are merged in
        assert same(load_file(folder / "model.safetensors"), found[2][name])
    assert not same(found[2]["adapted"], found[2]["judge"])


def test_transformers_opens_an_export_with_its_tokenizer_and_template(place, found):
    folder = place / "chosen"  # a policy that is named goes to the output itself
    opened = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in found[1]["main"].items())
    tokenizer, start = (AutoTokenizer.from_pretrained(each) for each in (folder, place / "start"))
    assert tokenizer.get_vocab() == start.get_vocab()
    assert tokenizer.chat_template == start.chat_template
    assert (folder / "generation_config.json").read_text() == (place / "start" / "generation_config.json").read_text()


def test_adapters_are_saved_and_exported_without_their_base(place):
    tensors = load_file(place / "adapters" / "adapter_model.safetensors")
    assert tensors
    assert all(".lora_A." in name or ".lora_B." in name for name in tensors)
    sizes = [
        sum(file.stat().st_size for file in (place / "run" / "checkpoints" / "step_2" / f"policy-{name}").iterdir())
        for name in ("adapted", "main")
    ]
    assert sizes[0] < 0.8 * sizes[1]


def test_an_imported_model_is_what_the_run_goes_on_from(place, found):
    """With moments of zero, the schedule where it was, and a version that the engine doesn't have."""
    assert found["imported"] == (2, 3)
    assert same(load_file(place / "after" / "main" / "model.safetensors"), load_file(place / "other" / "model.safetensors"))
    assert found["after"] == {"version": 3, "steps": 2, "counted": [0, 0], "moments": 0.0, "facts": 1}
    assert sorted(path.name for path in (place / "run" / "checkpoints").iterdir()) == ["step_1", "step_2"]


def test_imported_adapters_are_those_of_the_folder(place, found):
    assert found["adapters imported"] == (2, 3)
    assert same(load_file(place / "after" / "adapted" / "model.safetensors"), found[1]["adapted"])


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"step": 7}, CheckpointError, r"run has no checkpoint of step 7; it has steps 1, 2"),
        ({"policy": "nobody"}, ConfigError, r"--policy nobody: the run has no such policy; it has main, judge, adapted"),
        ({"policy": "judge"}, ConfigError, r"policies.judge.trainable is false"),
        ({"policy": "main", "adapter": True}, ConfigError, r"policies.main.lora is unset, so it has no adapters"),
    ],
    ids=["step", "policy", "frozen", "adapter"],
)
def test_an_export_of_what_is_not_there_is_refused(run, settings, kind, message):
    with pytest.raises(kind, match=message):
        export_run(run, **settings)


def test_an_export_does_not_replace_other_things(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="out is there and is no exported model"):
        export_run(run, policy="main", output=tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_a_damaged_checkpoint_is_not_exported(run):
    (run / "checkpoints" / "step_2" / "policy-main" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has 5 bytes"):
        export_run(run)


class Trap:
    """Makes the folder `place` when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_checkpoint_runs_nothing_when_it_is_opened(drmas, run, place, tmp_path, name):
    folder = run / "checkpoints" / "step_2" / "policy-main"
    trap = Trap(tmp_path / "sprung")
    if name == ".metadata":
        listing = pickle.loads((folder / name).read_bytes())
        listing.planner_data = trap
        (folder / name).write_bytes(pickle.dumps(listing))
    else:
        torch.save({"policy": trap}, folder / name)
    sizes = json.loads((folder / "files.json").read_text()) | {name: (folder / name).stat().st_size}
    (folder / "files.json").write_text(json.dumps(sizes))
    done = drmas("export", str(run), "--policy", "main", "--output", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"drmas: {folder / name} can't be read: it names posix.mkdir, which no checkpoint needs" in done.stderr
    assert "Traceback" not in done.stderr
    if name == "common.pt":  # of the checkpoint that it replaces an import reads the facts alone
        with pytest.raises(CheckpointError, match=r"posix.mkdir"):
            import_model(run, policy="main", model=place / "other")
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_and_a_run_without_checkpoints_are_refused(run, place, tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        export_run(tmp_path)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint; it has none yet"):
        export_run(run)
    with pytest.raises(CheckpointError, match=r"no checkpoint yet; set policies.main.model to the folder"):
        import_model(run, policy="main", model=place / "other")


def test_an_import_of_another_architecture_or_tokenizer_is_refused(run, place, tmp_path):
    before = (run / "checkpoints" / "step_2" / "policy-main" / "files.json").read_text()
    with pytest.raises(ModelError, match=r"wider has hidden 64; the run's policies.main has 32"):
        import_model(run, policy="main", model=place / "wider")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        import_model(run, policy="main", model=tmp_path)
    strange = shutil.copytree(place / "other", tmp_path / "strange")
    tokenizer = json.loads((strange / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (strange / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="has another tokenizer than"):
        import_model(run, policy="main", model=strange)
    with pytest.raises(ModelError, match=r"policies.adapted.lora is set, and .* has no adapter_config.json"):
        import_model(run, policy="adapted", model=place / "other")
    assert (run / "checkpoints" / "step_2" / "policy-main" / "files.json").read_text() == before


def test_nothing_is_imported_into_a_run_that_another_process_writes(run, place):
    config = load(str(run / "config.json")).model_copy(update={"output": str(run.parent), "name": run.name})
    writer = RunFolder(config)
    writer.open(resume=True, overwrite=False)
    try:
        with pytest.raises(ConfigError, match="another process writes to"):
            import_model(run, policy="main", model=place / "other")
    finally:
        writer.close()


def test_the_commands_print_where_it_is_and_refuse_in_one_line(drmas, run, tmp_path, monkeypatch, capsys):
    done = drmas("export", str(run), "--policy", "main", "--step", "1", "--output", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (0, f"main: {tmp_path / 'out'}\n"), done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
    monkeypatch.setattr("sys.argv", ["drmas", "import", str(run), "--policy", "main", "--model", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert captured.err.startswith("drmas: --model nowhere has no config.json")
