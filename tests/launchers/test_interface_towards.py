"""Which interface leads to the rendezvous, on a machine with made-up ones."""

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launchers" / "interface_towards.py"
OWN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fe80::5%eth0", "10.0.0.6"], "ib0": ["192.168.7.5"]}
ROUTES = {"10.0.0.9": "10.0.0.6", "192.168.7.9": "192.168.7.5", "192.168.7.5": "192.168.7.5", "127.0.1.1": "127.0.0.1"}


@pytest.fixture
def script(monkeypatch):
    """The script as a module, on a host with the interfaces and routes above, whose own name is node1."""
    spec = importlib.util.spec_from_file_location("interface_towards", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {"node9": "10.0.0.9", "node9-ib": "192.168.7.9", "node1": "127.0.1.1", "node1-ib": "192.168.7.5"}

    def getaddrinfo(host, port, **unused):
        if host not in names:
            raise socket.gaierror(f"{host} is unknown")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (names[host], port))]

    def own_address(family, host):
        return ROUTES[host]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(module, "own_address", own_address)
    interfaces = {name: [SimpleNamespace(address=address) for address in own] for name, own in OWN.items()}
    monkeypatch.setattr(module.psutil, "net_if_addrs", lambda: interfaces)
    return module


@pytest.mark.parametrize(("host", "interface"), [("node9", "eth0"), ("node9-ib", "ib0"), ("node1-ib", "ib0")])
def test_the_interface_is_that_of_the_address_that_packets_come_from(script, host, interface) -> None:
    assert script.interface_towards(host) == interface


def test_on_the_rendezvous_itself_where_its_name_is_loopback_the_default_route_counts(script, monkeypatch) -> None:
    monkeypatch.setitem(ROUTES, "192.0.2.1", "10.0.0.5")
    assert script.interface_towards("node1") == "eth0"


def test_no_way_and_no_name_are_errors(script, monkeypatch) -> None:
    with pytest.raises(OSError, match="nowhere is unknown"):
        script.interface_towards("nowhere", patience=0)
    monkeypatch.setitem(ROUTES, "10.0.0.9", "172.16.0.1")
    with pytest.raises(OSError, match=r"no interface has the address 172\.16\.0\.1"):
        script.interface_towards("node9")


def test_a_name_that_comes_late_is_waited_for(script, monkeypatch) -> None:
    known, answer = [], socket.getaddrinfo

    def late(host, port, **more):
        known.append(host)
        return answer(host if len(known) > 1 else "not yet", port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(script.time, "sleep", lambda seconds: None)
    assert script.interface_towards("node9") == "eth0"
    assert known == ["node9", "node9"]


def test_addresses_of_this_machine_as_they_are() -> None:
    """An address of an interface leads to that interface, whatever this machine has."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                done = subprocess.run(
                    [sys.executable, str(SCRIPT), address.address], capture_output=True, text=True, timeout=60, check=False
                )
                assert (done.stdout, done.stderr) == (f"{name}\n", "")


def test_a_mistake_names_the_variable_to_set() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "set GLOO_SOCKET_IFNAME" in done.stderr
