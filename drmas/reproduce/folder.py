"""The folder of a reproduction: who may write there, and what was run there by which settings.

    ROOT/settings.json    quick or whole, how large that is, the version of the trials' settings, and where it was begun
    ROOT/trials/, ROOT/bandit.json, ...    what the units of `runner` leave

Called by `drmas.cli.reproduce`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from drmas.errors import ConfigError, DataError
from drmas.runtime.folder import lock_folder
from drmas.telemetry.environment import environment
from drmas.telemetry.sinks import replace_text

FILE = "settings.json"
LOCK_SECONDS = 3.0
"""How long the lock is waited for: processes of a run that was killed a moment ago may hold it still."""
CODE = (
    *("reproduce/plan.py", "reproduce/scenarios.py", "reproduce/trial.py", "reproduce/teams.py"),
    *("recipes/maths-tiny.toml", "recipes/search-tiny.toml"),
)
"""What says what the trials are. Trials under different ones aren't put into one table."""
_PACKAGE = Path(__file__).parents[1]


class ReproduceFolder:
    """`path`, locked from `open` to `close`. `scale`: how large it is; numbers that are kept for the report."""

    def __init__(self, path: Path, *, quick: bool, scale: Mapping[str, int]) -> None:
        self.path = path.resolve()
        self.settings: dict[str, Any] = {"quick": quick, "code": code_version(), **scale}
        self._lock: IO[str] | None = None

    def open(self, *, overwrite: bool) -> int:
        """Take the folder; the descriptor of its lock. What is there stays unless `overwrite`.

        ConfigError: it was begun with other settings and not `overwrite`, is something else, or another process writes there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._wait_for_lock()
        try:
            self._prepare(overwrite=overwrite)
        except BaseException:
            self.close()
            raise
        return self._lock.fileno()

    def close(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _prepare(self, *, overwrite: bool) -> None:
        before = read_settings(self.path)
        if before is None and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not the folder of a reproduction; use another --output")
        if before is not None and not overwrite:
            self._check(before)
            return
        if before is not None:
            shutil.rmtree(self.path)
        self.path.mkdir(exist_ok=True)
        here = {**self.settings, "processor": processor(), "environment": environment()}
        replace_text(self.path / FILE, json.dumps(here, indent=2) + "\n")

    def _wait_for_lock(self) -> IO[str]:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return lock_folder(self.path, "--output")
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _check(self, before: dict[str, Any]) -> None:
        if before.get("quick") != self.settings["quick"]:
            there, asked = ("a quick", "a whole") if before.get("quick") else ("a whole", "a quick")
            what = f"{there} reproduction, not {asked} one"
        elif before.get("code") != self.settings["code"]:
            what = "trials of another version of their settings"
        else:
            return
        raise ConfigError(f"{self.path} holds {what}; --output FOLDER writes elsewhere, --overwrite deletes what is there")


def read_settings(root: Path) -> dict[str, Any] | None:
    """What `root` was begun with; None where no reproduction was. DataError: it can't be read."""
    path = root / FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: can't be read: {error}; expected the settings of a reproduction") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path}: holds a {type(settings).__name__}; expected the settings of a reproduction")
    return settings


def code_version() -> str:
    """A digest of the files in `CODE`."""
    digest = hashlib.sha256()
    for name in CODE:
        text = (_PACKAGE / name).read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


def processor() -> str | None:
    """The processor's name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
