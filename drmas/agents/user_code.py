"""Python files of the user's: teams, parsers and tools named as `path/to/file.py:name`.

    judge = load_object("my/judge.py:read", "team.judge.parser")

A file is run once per process, under a module name of its own, so that two files called team.py are two modules. Called by
`team`, `parsers` and the Python tools while a configuration is read.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from drmas.core.names import expected_names
from drmas.errors import ConfigError


def is_file_spec(spec: str) -> bool:
    """Whether `spec` means a Python file: path/to/file.py or path/to/file.py:name.

    Example: is_file_spec("my/team.py:pair") and not is_file_spec("verdict:yes,no")
    """
    return split_spec(spec)[0].endswith(".py")


def split_spec(spec: str) -> tuple[str, str]:
    """Path and name; the name is empty where `spec` is a path alone.

    Example: split_spec("my/team.py:pair") == ("my/team.py", "pair")
    """
    if spec.endswith(".py"):
        return spec, ""
    path, _, name = spec.rpartition(":")
    return path, name


def load_object(path_spec: str, what: str) -> Any:
    """What `path/to/file.py:name` names. `what` is the key that errors tell the user to change.

    ConfigError: another form, no such file, a file that can't be imported, no such name in it (with the nearest).
    """
    path, name = split_spec(path_spec)
    if not path.endswith(".py") or not name:
        raise ConfigError(f"{what} is {path_spec!r}; expected path/to/file.py:name")
    module = load_module(path, what)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{what} is {path_spec!r}; in {path} {expected_names(name, public)}")
    return getattr(module, name)


def load_module(path: str | Path, what: str) -> ModuleType:
    """The Python file `path` as a module, run when it is first asked for. ConfigError as for `load_object`."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{what}: there is no file {path}; expected path/to/file.py:name")
    module_name = f"drmas_user_{blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {path} is not a Python file; expected path/to/file.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # pydantic looks annotations up there
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[module_name]
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything; it is named and nothing is hidden
        del sys.modules[module_name]
        raise ConfigError(f"{what}: {path} can't be imported: {_said(error, file)}") from error
    return module


def _said(error: BaseException, file: Path) -> str:
    """The error and the line of the user's file that it came through; of pydantic's errors, the keys and what is wrong."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f" (line {lines[-1]})" if lines else ""
    if isinstance(error, ValidationError):
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        return f"{error.title}: {faults}{where}"
    return f"{type(error).__name__}: {error}{where}"
