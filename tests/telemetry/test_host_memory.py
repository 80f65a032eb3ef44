"""What processes may still take, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drmas.telemetry.host_memory import available_memory

MEMINFO = "MemTotal:  2000 kB\nMemFree:  100 kB\nMemAvailable:  1500 kB\n"


@pytest.fixture
def write(tmp_path):
    """write(path, text, ...): such files under a root of their own, which it returns."""

    def write(*files: str) -> Path:
        for path, text in zip(files[::2], files[1::2], strict=True):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def test_memory_is_what_new_processes_can_take(write):
    assert available_memory(write("proc/meminfo", MEMINFO)) == 1500 * 1024
    assert available_memory(write("proc/meminfo", "MemTotal:  2000 kB\n")) is None


def test_where_no_kernel_tells_nothing_is_known(tmp_path):
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("most", "above", "expected"),
    [
        ("1000000", "max", 1000000 - 400000 + 50000),  # page cache that can go isn't used
        ("max", "max", 1500 * 1024),
        ("1000000", "500000", 500000 - 450000),
        ("9000000", "max", 1500 * 1024),  # more than the machine has left
    ],
)
def test_a_control_group_and_those_above_it_limit_it(write, most, above, expected):
    root = write(
        *("proc/meminfo", MEMINFO, "proc/self/cgroup", "0::/job/task\n"),
        *("sys/fs/cgroup/job/task/memory.max", f"{most}\n", "sys/fs/cgroup/job/task/memory.current", "400000\n"),
        *("sys/fs/cgroup/job/task/memory.stat", "anon 1\ninactive_file 50000\n"),
        *("sys/fs/cgroup/job/memory.max", f"{above}\n", "sys/fs/cgroup/job/memory.current", "450000\n"),
    )
    assert available_memory(root) == expected


def test_the_older_groups_and_a_path_of_the_host_that_a_container_lacks(write):
    root = write(
        *("proc/meminfo", MEMINFO, "proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n"),
        *("sys/fs/cgroup/memory/memory.limit_in_bytes", "700000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes", "200000\n"),
        *("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1000\n"),
    )
    assert available_memory(root) == 501000


def test_this_machine_has_some():
    assert available_memory() > 0
