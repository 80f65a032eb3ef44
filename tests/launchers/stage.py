"""A folder in which recorders stand in the place of what launchers start: torchrun, srun, kubectl and the rest."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

COMMANDS = ("torchrun", "drmas", "srun", "scontrol", "scancel", "sbatch", "kubectl")


class Stage:
    """Starts a launcher in a folder of its own and reads what was recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.records = folder, folder / "bin", folder / "records"
        self.bin.mkdir()
        self.records.mkdir()
        for name in COMMANDS:
            command = self.bin / name
            command.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("fake_command.py").read_text())
            command.chmod(0o755)
        self.environment = {
            "PATH": f"{self.bin}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "RECORDS": str(self.records),
            "GLOO_SOCKET_IFNAME": "lo",
            "WAIT_SECONDS": "60",
        }
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(self, *command: str, **variables: str) -> SimpleNamespace:
        """`status` and `output` of a command that ends by itself."""
        process = self.start(*command, **variables)
        output, _ = process.communicate(timeout=120)
        return SimpleNamespace(status=process.returncode, output=output)

    def recorded(self, name: str) -> list[dict[str, Any]]:
        """What was called by that name, oldest first."""
        files = sorted(self.records.glob(f"{name}-*.json"), key=lambda file: file.stat().st_mtime_ns)
        return [json.loads(file.read_text()) for file in files]

    def await_record(self, name: str, count: int = 1) -> dict[str, Any]:
        """The first of so many calls by that name."""
        limit = time.monotonic() + 60
        while len(found := self.recorded(name)) < count:
            assert time.monotonic() < limit, f"{name} was called {len(found)} times"
            time.sleep(0.02)
        return found[0]

    def close(self) -> None:
        """Whatever they left behind ends with them."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
