"""An engine's process as its connection handles it: end it, learn how it ended, read the end of its log.

`LocalProcess` is a child on this host, made by `vllm_launch`; those of other hosts stand in `host_client`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Protocol

EXIT_GRACE_SECONDS = 3.0
TAIL_BYTES = 3000


class EngineProcess(Protocol):
    """A process that leads a process group of its own."""

    pid: int
    where: str
    """"process 4711", or "process 4711 at tcp://10.0.0.7:8200"."""
    log: str
    """Where what it writes stands."""

    def kill(self) -> None:
        """End the process and its children now; nothing if it is gone. Returns at once."""

    def end(self) -> str:
        """How it ended, such as "was killed by SIGKILL": it gets a moment to end by itself, and its children are killed."""

    def log_tail(self) -> str:
        """The end of what it wrote, and where the rest is; never raises."""

    def peak_memory_bytes(self) -> int:
        """Of the process and its children, the largest resident size so far; 0 where that can't be told."""


class LocalProcess:
    """A child of this process. `log` is the file that it writes to, from where it ends now."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        self.pid, self.where, self.log = process.pid, f"process {process.pid}", str(log)
        self._process, self._log, self._log_start = process, log, log_start

    def kill(self) -> None:
        if self._process.returncode is None:  # it has not been reaped, so the id is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, *, patience: float | None = EXIT_GRACE_SECONDS) -> str:
        """`patience`: how many seconds it gets to end by itself; as long as it takes if None."""
        if self._process.returncode is None:
            descriptor = os.pidfd_open(self.pid)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(None if patience is None else patience * 1000)
            os.close(descriptor)
            self.kill()  # not reaped yet, so the group's id can't be another's
        return describe_status(self._process.wait())

    def log_tail(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, self._log.stat().st_size - TAIL_BYTES))
                tail = file.read().decode(errors="replace").strip()
        except OSError as error:
            return f"--- its log can't be read: {error}"
        return f"--- the end of {self._log}:\n{tail}"

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.pid)


def describe_status(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def peak_memory_bytes(pid: int) -> int:
    """The largest resident size so far of the process `pid`, plus that of its children (tensor-parallel workers)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        total += sum(peak_memory_bytes(int(child)) for child in _read(task / "children").split())
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM:"):
            total += int(line.split()[1]) * 1024
    return total


def _read(file: Path) -> str:
    """What the system says there; "" of a process or thread that has ended."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
