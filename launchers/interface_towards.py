"""Print the network interface of this host that leads to HOST:   python launchers/interface_towards.py HOST

HOST may be this host itself; where its own name stands for loopback, which others can't reach, the interface of the default
route is taken. A name that isn't known yet is asked for again, for up to a minute: in Kubernetes names come with their pods.
Needs psutil, which comes with vLLM. Sends nothing. Called by env.sh.
"""

import ipaddress
import socket
import sys
import time

import psutil

PATIENCE_SECONDS = 60
ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that are nobody's (RFC 5737, RFC 3849): the way to them is the default route."""


def own_address(family: int, host: str) -> str:
    """The address of this host that packets to the address `host` would come from. OSError: there is no way to it."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def resolve(host: str, *, patience: float = PATIENCE_SECONDS) -> tuple[int, str]:
    """Address family and address of a name. OSError: nobody knows it."""
    limit = time.monotonic() + patience
    while True:
        try:
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            return found[0][0], found[0][4][0]
        except socket.gaierror:
            if time.monotonic() > limit:
                raise
            time.sleep(1)


def interface_towards(host: str, *, patience: float = PATIENCE_SECONDS) -> str:
    """The interface's name. OSError: nobody knows the host, or there is no way to it but loopback."""
    family, address = resolve(host.strip("[]"), patience=patience)
    mine = own_address(family, address)
    if ipaddress.ip_address(mine).is_loopback:
        mine = own_address(family, ELSEWHERE[family])
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == mine.partition("%")[0] for each in addresses):
            return name
    raise OSError(f"no interface has the address {mine}")


if __name__ == "__main__":
    try:
        print(interface_towards(sys.argv[1]))
    except (OSError, IndexError) as error:
        sys.exit(
            f"no interface towards the rendezvous: {error}; set GLOO_SOCKET_IFNAME to the one that leads to the other hosts"
        )
