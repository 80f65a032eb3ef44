import json
from pathlib import Path

import pytest

from drmas.errors import ConfigError, DataError
from drmas.reproduce import folder as folders
from drmas.reproduce.folder import ReproduceFolder, code_version, read_settings


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
    with pytest.raises(ConfigError, match="holds trials of another version of their settings; --output"):
        opened(root)
    assert (root / "trials").exists()
    opened(root, overwrite=True)
    assert [path.name for path in root.iterdir()] == ["settings.json"]
    assert read_settings(root)["code"] == "another"


def test_the_code_version_changes_with_each_file_that_says_what_trials_are(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(folders, "_PACKAGE", tmp_path)
    for name in folders.CODE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    versions = [code_version()]
    for name in folders.CODE:
        (tmp_path / name).write_text("after")
        versions.append(code_version())
    assert len(set(versions)) == len(folders.CODE) + 1
    (tmp_path / "reproduce/page.py").touch()
    assert code_version() == versions[-1]


def test_what_is_no_reproduction_is_never_touched(root) -> None:
    root.mkdir()
    (root / "chapter.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is not the folder of a reproduction; use another --output"):
            opened(root, overwrite=overwrite)
    assert (root / "chapter.txt").read_text() == "years of work"


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_settings_that_cant_be_read_are_named(root, text) -> None:
    root.mkdir()
    (root / "settings.json").write_text(text)
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
