import ast
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from drmas.errors import ConfigError, DataError
from drmas.reproduce import folder as folders
from drmas.reproduce.folder import HARMLESS, VERSIONS, ReproduceFolder, code_version, read_settings, versions


def opened(path: Path, *, quick: bool = True, overwrite: bool = False) -> None:
    folder = ReproduceFolder(path, quick=quick, scale={"seeds": 3})
    try:
        folder.open(overwrite=overwrite)
    finally:
        folder.close()


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.0)
    return tmp_path / "reproduce"


def test_what_it_was_begun_with_is_kept_and_the_same_goes_on(root) -> None:
    opened(root)
    begun = (root / "settings.json").read_bytes()
    settings = read_settings(root)
    assert (settings["quick"], settings["seeds"], settings["code"]) == (True, 3, code_version())
    assert settings["environment"]["drmas"]
    assert settings["versions"] == versions()
    assert set(versions()) == {"torch", "transformers", "megatron-core", "numpy"}
    (root / "trials").mkdir()
    opened(root)
    assert (root / "trials").exists()
    assert (root / "settings.json").read_bytes() == begun


def test_another_reproduction_is_refused_or_deleted(root, monkeypatch) -> None:
    opened(root)
    (root / "trials").mkdir()
    with pytest.raises(ConfigError, match=r"holds a quick reproduction, not a whole one; --output .* --overwrite deletes"):
        opened(root, quick=False)
    monkeypatch.setattr(folders, "code_version", lambda: "another")
    with pytest.raises(ConfigError, match="holds trials of other code; --output"):
        opened(root)
    assert (root / "trials").exists()
    opened(root, overwrite=True)
    assert [path.name for path in root.iterdir()] == ["settings.json"]
    assert read_settings(root)["code"] == "another"


def test_what_differs_is_named(root, monkeypatch) -> None:
    monkeypatch.setattr(folders, "versions", lambda: dict.fromkeys(VERSIONS, "1.0"))
    opened(root)
    monkeypatch.setattr(folders, "versions", lambda: dict.fromkeys(VERSIONS, "1.0") | {"torch": "1.1", "numpy": None})
    with pytest.raises(ConfigError, match=r"holds trials of torch 1\.0, not 1\.1 and of numpy 1\.0, not None; --output"):
        opened(root)
    monkeypatch.setattr(folders, "code_version", lambda: "another")
    with pytest.raises(ConfigError, match=r"holds trials of other code and of torch 1\.0, not 1\.1 and of numpy"):
        opened(root)


def test_the_code_version_changes_with_whatever_can_change_a_result_and_with_nothing_else(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(folders, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / name / "__init__.py")))
    counted = [
        *("drmas/__init__.py", "drmas/core/estimators/ppo.py", "drmas/policy/moments.py", "drmas/rollout/torch_engine.py"),
        *("drmas/rollout/collector.py", "drmas/policy/trainer.py", "drmas/envs/lookups.py", "drmas/reproduce/teams.py"),
        *("drmas/runtime/evaluate.py", "drmas/runtime/warm_start.py", "drmas/reproduce/bandit.py", "drmas/telemetry/alarms.py"),
        *("drmas/reproduce/bandit_team.py", "drmas/reproduce/plan.py", "drmas/recipes/maths-tiny.toml"),
        *("drmas/reproduce/intervals.py", "drmas_kernels/policy_loss.py"),
    ]
    for name in counted:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    seen = [code_version()]
    for name in counted:
        (tmp_path / name).write_text("after")
        seen.append(code_version())
    (tmp_path / "drmas/core/new.py").touch()
    seen.append(code_version())
    assert len(set(seen)) == len(counted) + 2

    (tmp_path / "drmas/cli").mkdir()
    (tmp_path / "drmas/cli/doctor.py").touch()
    harmless = [name for name in HARMLESS if name.endswith(".py")]
    for name in [*harmless, "drmas/reproduce/README.md", "drmas/recipes/paper-maths-8b.toml"]:
        (tmp_path / name).touch()
    assert code_version() == seen[-1]


def test_no_trial_and_no_bandit_uses_a_file_that_the_code_version_leaves_out() -> None:
    package = Path(folders.__file__).parents[1]
    harmless = {name.removesuffix(".py").replace("/", ".") for name in HARMLESS if "/reproduce/" in name}
    assert all((package.parent / name).exists() for name in HARMLESS)
    for path in package.glob("reproduce/*.py"):
        if f"drmas/reproduce/{path.name}" in HARMLESS:
            continue
        used = [node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not harmless & set(used), path.name


def test_what_is_no_reproduction_is_never_touched(root) -> None:
    root.mkdir()
    (root / "chapter.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is not the folder of a reproduction; use another --output"):
            opened(root, overwrite=overwrite)
    assert (root / "chapter.txt").read_text() == "years of work"


@pytest.mark.parametrize("text", ["{}", "[1]", '{"editor.tabSize": 4}', '{"quick": true}'])
def test_another_programs_settings_are_no_reproductions(root, text) -> None:
    root.mkdir()
    (root / "settings.json").write_text(text)
    (root / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is not the folder of a reproduction; use another --output"):
            opened(root, overwrite=overwrite)
    assert (root / "settings.json").read_text() == text
    assert (root / "thesis.tex").read_text() == "years of work"


def test_overwriting_deletes_what_a_reproduction_wrote_and_nothing_else(root) -> None:
    opened(root)
    (root / "notes.md").write_text("mine")
    (root / "trials").mkdir()
    (root / "results.md").write_text("old")
    opened(root, quick=False, overwrite=True)
    assert sorted(path.name for path in root.iterdir()) == ["notes.md", "settings.json"]


def test_a_file_is_no_folder(root) -> None:
    root.write_text("")
    with pytest.raises(ConfigError, match="is a file; expected a folder"):
        opened(root)


def test_settings_that_cant_be_read_are_named(root) -> None:
    root.mkdir()
    (root / "settings.json").write_text("{")
    with pytest.raises(DataError, match=r"settings\.json: .*; expected the settings of a reproduction"):
        opened(root)


def test_a_refused_process_changes_nothing_and_the_lock_goes_with_its_holder(root) -> None:
    first = ReproduceFolder(root, quick=True, scale={"seeds": 3})
    first.open(overwrite=False)
    before = json.loads((root / "settings.json").read_text())
    with pytest.raises(ConfigError, match=r"another process writes to .*; wait for it, or use another --output"):
        opened(root, quick=False, overwrite=True)
    assert read_settings(root) == before
    first.close()
    opened(root, quick=False, overwrite=True)
    assert read_settings(root)["quick"] is False
