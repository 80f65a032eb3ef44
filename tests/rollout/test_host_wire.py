"""How rank 0 and an engine host begin to talk: over socket pairs, without an engine."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from drmas.rollout import host_wire
from drmas.rollout.host_wire import HandshakeError


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(10)
    with ours, theirs:
        yield ours, theirs


def outcomes(pair, trainer: str, host: str) -> list[str]:
    """What each side makes of the other: "" or its error."""
    found = ["", ""]

    def side(index: int, secret: str) -> None:
        try:
            host_wire.prove(pair[index], secret, server=bool(index))
        except HandshakeError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=side, args=(index, secret)) for index, secret in enumerate((trainer, host))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_sides_with_the_same_secret_believe_each_other(pair):
    assert outcomes(pair, "s" * 20, "s" * 20) == ["", ""]


def test_neither_side_believes_one_with_another_secret(pair):
    assert outcomes(pair, "s" * 20, "t" * 20) == ["the other side has another secret"] * 2


def test_a_proof_is_worth_nothing_in_the_other_role_or_for_another_challenge(pair):
    """Whoever only mirrors what it gets proves nothing: a role is part of what is signed."""
    mirror = threading.Thread(target=lambda: [pair[0].sendall(pair[0].recv(32)) for _ in range(2)])
    mirror.start()
    with pytest.raises(HandshakeError, match="another secret"):
        host_wire.prove(pair[1], "s" * 20, server=True)
    mirror.join()


def test_nothing_is_read_beyond_a_message(pair):
    ours, theirs = pair
    host_wire.send(ours, {"do": "launch", "name": "ü"})
    ours.sendall(b"what the engine reads")
    assert host_wire.receive(theirs) == {"do": "launch", "name": "ü"}
    assert theirs.recv(100) == b"what the engine reads"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ((2**31).to_bytes(4, "big"), "at most"),
        ((3).to_bytes(4, "big") + b"no!", "no JSON"),
        ((2).to_bytes(4, "big") + b"[]", "no JSON object"),
        (b"\x00", "closed the connection"),
        (b"GET / HTTP/1.1\r\n", "at most"),
    ],
)
def test_what_is_no_message_is_refused(pair, payload, message):
    ours, theirs = pair
    ours.sendall(payload)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(HandshakeError, match=message):
        host_wire.receive(theirs)


def test_keepalive_finds_a_silent_peer_within_the_bound():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        host_wire.set_keepalive(client, 30)
        read = {name: client.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in OPTIONS}
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert read["TCP_KEEPIDLE"] + read["TCP_KEEPINTVL"] * read["TCP_KEEPCNT"] <= 30
        assert read["TCP_USER_TIMEOUT"] == 30_000


OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")


def test_messages_have_the_length_that_they_say(pair):
    ours, theirs = pair
    host_wire.send(ours, {"a": [1, 2]})
    raw = theirs.recv(1000)
    assert int.from_bytes(raw[:4], "big") == len(raw) - 4
    assert json.loads(raw[4:]) == {"a": [1, 2]}
