from __future__ import annotations

from pathlib import Path

import pytest

from drmas.agents.user_code import is_file_spec, load_module, load_object, split_spec
from drmas.errors import ConfigError


def test_what_means_a_file() -> None:
    assert [is_file_spec(spec) for spec in ("a/b.py", "a.py:f", "C:/a.py:f", "single", "verdict:yes,no", "a.pyx:f", "")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
    assert split_spec("C:/my team.py:f") == ("C:/my team.py", "f")
    assert split_spec("a.py") == ("a.py", "")


def test_a_file_is_run_once_and_files_of_one_name_are_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text(f"runs = []\nruns.append('{folder}')\n")
    first = load_object(f"{tmp_path}/a/code.py:runs", "key")
    assert first is load_object(f"{tmp_path}/a/../a/code.py:runs", "key")
    assert (first, load_object(f"{tmp_path}/b/code.py:runs", "key")) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("x = 1", "y", r"tools.t.path is '.*code.py:y'; in .*code.py .*expected one of x"),
        ("def look(): ...\n", "lok", "the nearest is 'look'"),
        ("x = ", "x", r"tools.t.path: .*code.py can't be imported: SyntaxError"),
        ("import nothing_of_this_name", "x", "can't be imported: ModuleNotFoundError"),
        ("raise SystemExit(3)", "x", "can't be imported: SystemExit: 3"),
        ("\n\nraise ValueError('boom')", "x", r"can't be imported: ValueError: boom \(line 3\)"),
        (
            "from drmas.agents.agent import AgentConfig\nAgentConfig(promt='x')",
            "x",
            r"can't be imported: AgentConfig: promt: Extra inputs are not permitted \(line 2\)$",
        ),
        ("from drmas.errors import ConfigError\nraise ConfigError('of its own')", "x", "^of its own$"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, code: str, name: str, message: str) -> None:
    (tmp_path / "code.py").write_text(code)
    for _ in range(2):  # a file that failed isn't taken for loaded
        with pytest.raises(ConfigError, match=message):
            load_object(f"{tmp_path}/code.py:{name}", "tools.t.path")


@pytest.mark.parametrize("spec", ["", "code.py", "code.py:", "code:f", ":f", "code.txt:f"])
def test_other_forms_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"key is .*; expected path/to/file.py:name"):
        load_object(spec, "key")


def test_a_folder_or_a_binary_file_is_no_file_of_python(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match="there is no file"):
        load_module(tmp_path / "folder.py", "key")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\0\0")
    with pytest.raises(ConfigError, match="can't be imported"):
        load_module(tmp_path / "bytes.py", "key")
