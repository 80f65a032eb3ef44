"""How rank 0 and an engine host begin to talk: keepalive, proof that both know the secret, messages of known length.

After that the connection becomes an engine's, which speaks the protocol of `vllm_process`; so nothing may be read here beyond
a message's end. The secret itself never travels: each side answers the other's random challenge (HMAC-SHA256, over both
challenges and its own role). What travels afterwards is neither encrypted nor signed: this is for a private network. Used by
`host_client` and `host_server`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

Message = dict[str, Any]

CHALLENGE_BYTES = 32
MOST_MESSAGE_BYTES = 1 << 20
KILL_SECONDS = 10.0
"""How long an engine that was killed may take to be gone: a GPU's context and pinned memory are taken down first."""


class HandshakeError(Exception):
    """The other side isn't what it should be: another secret, or no engine host at all."""


class PeerLeft(HandshakeError):
    """The other side closed the connection."""


def set_keepalive(connection: socket.socket, seconds: float) -> None:
    """Let a silent peer be found dead after about `seconds`, whether or not anything is on its way to it."""
    probes = 3
    interval = max(1, int(seconds / (probes + 1)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def prove(connection: socket.socket, secret: str, *, server: bool) -> None:
    """Both sides call it first. HandshakeError: the other one doesn't know `secret`. OSError: it went away, or is too slow."""
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    connection.sendall(mine)
    theirs = _exactly(connection, CHALLENGE_BYTES)
    challenges = mine + theirs if server else theirs + mine
    connection.sendall(_proof(secret, challenges, server=server))
    found = _exactly(connection, hashlib.sha256().digest_size)
    if not hmac.compare_digest(found, _proof(secret, challenges, server=not server)):
        raise HandshakeError("the other side has another secret")


def send(connection: socket.socket, message: Message) -> None:
    payload = json.dumps(message).encode()
    connection.sendall(len(payload).to_bytes(4, "big") + payload)


def receive(connection: socket.socket) -> Message:
    """HandshakeError: what came is no message."""
    size = int.from_bytes(_exactly(connection, 4), "big")
    if size > MOST_MESSAGE_BYTES:
        raise HandshakeError(f"a message of {size} bytes; at most {MOST_MESSAGE_BYTES} are expected")
    try:
        message = json.loads(_exactly(connection, size))
    except ValueError as error:
        raise HandshakeError(f"what came is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise HandshakeError("what came is no JSON object")
    return message


def _proof(secret: str, challenges: bytes, *, server: bool) -> bytes:
    role = b"engine host" if server else b"trainer"
    return hmac.digest(secret.encode(), role + challenges, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    """`count` bytes and not one more, all of them within the connection's timeout."""
    received, limit = b"", connection.gettimeout()
    deadline = None if limit is None else time.monotonic() + limit
    try:
        while len(received) < count:
            if deadline is not None:
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = connection.recv(count - len(received))
            if not part:
                raise PeerLeft("the other side closed the connection")
            received += part
    finally:
        if limit is not None:  # else another thread may have set one meanwhile
            connection.settimeout(limit)
    return received
