"""How much memory processes of this host can still take: what the kernel says, or less where a control group limits them.

Containers and batch systems set such limits, which /proc/meminfo knows nothing of. Linux only; elsewhere nothing is known.
Called by `drmas.runtime.machine` and by `drmas doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that new processes can take, where the kernel tells. `root`: of the file system that has proc and sys."""
    meminfo = root / "proc" / "meminfo"
    if not meminfo.is_file():
        return None
    lines = (line.split() for line in meminfo.read_text().splitlines())
    free = [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]
    return min([*free, *_left_in_groups(root)]) if free else None


def _left_in_groups(root: Path) -> Iterator[int]:
    """Of every limit on this process's control group and on those above it: what is left, with page cache that can go."""
    cgroup = root / "proc" / "self" / "cgroup"
    for line in cgroup.read_text().splitlines() if cgroup.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":
            top, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):  # in a container the path may be the host's: then only the top is there
            if folder.is_relative_to(top) and (most := _number(folder / limit)) is not None:
                yield most - (_number(folder / usage) or 0) + _stat(folder / "memory.stat", cache)


def _number(file: Path) -> int | None:
    """None: no such file, or "max"."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _stat(file: Path, name: str) -> int:
    words = (line.split() for line in file.read_text().splitlines()) if file.is_file() else ()
    return next((int(value) for key, value in words if key == name), 0)
