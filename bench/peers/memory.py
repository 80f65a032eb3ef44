"""Memory and CPU time of a process and all its descendants, while they work. Called by `bench/end_to_end.py`.

Memory is PSS, the resident pages with shared ones divided among those that share them, so that a sum over processes counts no
page twice. A peak between two samples is missed; the sum of the processes' own high-water marks bounds it from above. On Linux.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

PERIOD_SECONDS = 0.2


class Tree(NamedTuple):
    """One sample: bytes by process, named after its command."""

    processes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.processes.values())


class PeakMemory:
    """The largest of the samples taken between `start` and `stop`, which may be called in turn any number of times."""

    def __init__(self, root: int) -> None:
        self.root, self.peak, self.samples = root, Tree({}), 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            tree = sampled(self.root)
            self.samples += 1
            if tree.total > self.peak.total:
                self.peak = tree
            if self._stop.wait(PERIOD_SECONDS):
                return


def sampled(root: int) -> Tree:
    """Now. Processes that end meanwhile count nothing."""
    found: dict[str, int] = {}
    for pid in descendants(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ProcessLookupError):
            continue
        size = next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
        found[f"{name} {pid}"] = size
    return Tree(found)


def descendants(root: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, left = [], [root]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def cpu_seconds(root: int) -> float:
    """That the process and all below it have used so far, on all cores. Other work on the machine moves it little."""
    ticks = 0
    for pid in descendants(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def high_water_marks(root: int) -> int:
    """Bytes: the most that each of the processes has held so far, summed. What they share counts for each."""
    total = 0
    for pid in descendants(root):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (OSError, ProcessLookupError):
            continue
        total += next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
    return total
