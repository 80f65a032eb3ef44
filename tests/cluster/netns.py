"""Hosts for tests: network namespaces of this machine, joined by a switch, from which one can vanish.

    with hosts(2) as (first, second):
        process = first.start([sys.executable, "-m", ...], env={...}, log=path)
        second.vanish()          # no packet in or out any more, and nobody is told: as a host that loses power

Each has a name (`drmas-h0`), an address, loopback, and knows the others by name. They share the file system, the clock and the
process numbers. Namespaces are named after the test process, so that runs don't meet, and go when the block ends, with what
still runs in them; what a killed run left behind goes at the next start. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PREFIX = "drmas-test-"
NET = "10.213.7."


class Host:
    """One of them; its only interface beside loopback is `eth0`."""

    def __init__(self, namespace: str, switch: str, number: int) -> None:
        self.name, self.address = f"drmas-h{number}", f"{NET}{number + 1}"
        self._namespace, self._switch, self._port = namespace, switch, f"port{number}"

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as it runs on this host."""
        with_name = 'hostname "$1" && shift && exec "$@"'
        return ["ip", "netns", "exec", self._namespace, "unshare", "--uts", "sh", "-c", with_name, "sh", self.name, *argv]

    def start(self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """In a process group of its own; what it writes goes to `log`."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **(env or {})}
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def vanish(self) -> None:
        """Cut it off. Its processes live on and can't know."""
        _ip("-n", self._switch, "link", "set", self._port, "nomaster")

    def return_(self) -> None:
        """End of `vanish`."""
        _ip("-n", self._switch, "link", "set", self._port, "master", "bridge")

    def kill(self) -> None:
        """Everything that runs on it."""
        _kill_all(self._namespace)

    def processes(self) -> list[int]:
        """What runs on it."""
        return _pids(self._namespace)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """One block at a time in a process. Skips the test where namespaces can't be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts are network namespaces, which need root and iproute2")
    _clear_leftovers()
    base = f"{PREFIX}{os.getpid()}"
    switch, namespaces = f"{base}-switch", [f"{base}-{number}" for number in range(count)]
    try:
        try:
            _ip("netns", "add", switch)
        except RuntimeError as error:  # root of a container that may not
            pytest.skip(f"hosts are network namespaces, which can't be made here: {error}")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        made = [_make(namespace, switch, number) for number, namespace in enumerate(namespaces)]
        names = "".join(f"{host.address} {host.name}\n" for host in made)
        for namespace in namespaces:  # `ip netns exec` shows it as /etc/hosts
            folder = Path("/etc/netns") / namespace
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        yield made
    finally:
        for namespace in (*namespaces, switch):
            _remove(namespace)


def _make(namespace: str, switch: str, number: int) -> Host:
    host = Host(namespace, switch, number)
    _ip("netns", "add", namespace)
    _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
    _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
    _ip("-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _ip("-n", namespace, "link", "set", device, "up")
    return host


def _ip(*argv: str) -> str:
    done = subprocess.run(["ip", *argv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace).split()]


def _kill_all(namespace: str) -> None:
    with suppress(RuntimeError):
        for pid in _pids(namespace):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _remove(namespace: str) -> None:
    _kill_all(namespace)
    with suppress(RuntimeError):
        _ip("netns", "delete", namespace)
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)


def _clear_leftovers() -> None:
    """The namespaces of test processes that are gone."""
    for line in _ip("netns", "list").splitlines():
        namespace = line.split()[0]
        owner = namespace.removeprefix(PREFIX).partition("-")[0]
        if namespace.startswith(PREFIX) and not Path(f"/proc/{owner}").exists():
            _remove(namespace)
