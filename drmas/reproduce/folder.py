"""The folder of a reproduction: who may write there, and what was run there by which code.

    ROOT/settings.json    quick or whole, how large that is, the digest of the code, versions, and where it was begun
    ROOT/trials/, ROOT/bandit.json, ...    what the units of `runner` leave

Called by `drmas.cli.reproduce`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from drmas.errors import ConfigError, DataError
from drmas.runtime.folder import lock_folder
from drmas.telemetry.environment import environment, version_of
from drmas.telemetry.sinks import replace_text

FILE = "settings.json"
MARK = {"folder of": "drmas reproduce"}
"""What the file says first, by which a folder is known as a reproduction's."""
WRITTEN = (FILE, "trials", "bandit", "bandit.json", "report.html", "results.json", "results.md")
"""What a reproduction leaves there; nothing else is ever deleted."""
LOCK_SECONDS = 3.0
"""How long the lock is waited for: processes of a run that was killed a moment ago may hold it still."""
PACKAGES = ("drmas", "drmas_kernels")
"""Those whose sources can change a result. Trials of different ones aren't put into one table."""
SOURCES = ("**/*.py", "recipes/*tiny*.toml")
HARMLESS = (
    *(f"drmas/reproduce/{name}.py" for name in ("runner", "folder", "worker")),
    *(f"drmas/reproduce/{name}.py" for name in ("results", "analysis", "fit", "tables", "charts", "page", "tuning")),
    *(f"drmas/reproduce/{name}.py" for name in ("words", "headlines", "method")),
    "drmas/reproduce/bandit_tables.py",
    *(f"drmas/telemetry/{name}.py" for name in ("report", "plot", "markup", "eval_report", "perfetto", "console")),
    "drmas/cli/",
)
"""Files, and folders that end in "/", that no result depends on: who runs the trials, and what is said of them afterwards."""
VERSIONS = ("torch", "transformers", "megatron-core", "numpy")
"""Distributions that results depend on."""


class ReproduceFolder:
    """`path`, locked from `open` to `close`. `scale`: how large it is; numbers that are kept for the report."""

    def __init__(self, path: Path, *, quick: bool, scale: Mapping[str, int]) -> None:
        self.path = path.resolve()
        self.settings: dict[str, Any] = {"quick": quick, "code": code_version(), "versions": versions(), **scale}
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
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; expected a folder for --output")
        before = read_settings(self.path)
        if before is None and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not the folder of a reproduction; use another --output")
        if before is not None and not overwrite:
            self._check(before)
            return
        for name in WRITTEN if before is not None else ():
            left = self.path / name
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        self.path.mkdir(exist_ok=True)
        here = {**MARK, **self.settings, "processor": processor(), "environment": environment()}
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
        elif differing := self._differing(before):
            what = f"trials of {' and of '.join(differing)}"
        else:
            return
        raise ConfigError(f"{self.path} holds {what}; --output FOLDER writes elsewhere, --overwrite deletes what is there")

    def _differing(self, before: dict[str, Any]) -> list[str]:
        """What results depend on and is another one now."""
        found = [] if before.get("code") == self.settings["code"] else ["other code"]
        then = before.get("versions", {})
        now = self.settings["versions"]
        return found + [f"{name} {then.get(name)}, not {now[name]}" for name in now if then.get(name) != now[name]]


def read_settings(root: Path) -> dict[str, Any] | None:
    """What `root` was begun with; None where no reproduction was, whatever else has a file of that name. DataError: it can't be
    read."""
    path = root / FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: can't be read: {error}; expected the settings of a reproduction") from error
    return settings if isinstance(settings, dict) and MARK.items() <= settings.items() else None


def code_version() -> str:
    """A digest of `SOURCES` in `PACKAGES`, without the `HARMLESS`."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        folder = Path(str(spec.origin)).parent
        for path in sorted({path for pattern in SOURCES for path in folder.glob(pattern)}):
            name = f"{package}/{path.relative_to(folder).as_posix()}"
            if not name.startswith(HARMLESS):
                content = path.read_bytes()
                digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def versions() -> dict[str, str | None]:
    """Those of `VERSIONS` here; None: not installed."""
    return {name: version_of(name) for name in VERSIONS}


def processor() -> str | None:
    """The processor's name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
