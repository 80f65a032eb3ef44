"""`drmas serve-retriever`: a corpus behind `POST /retrieve`, for one or many runs.

Loads the index, binds the address, prints the URL when requests are answered, and serves until Ctrl-C, which ends it at once.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from drmas.envs.search.corpus import read_corpus
from drmas.envs.search.index import open_index
from drmas.envs.search.server import Limits, RetrieverServer
from drmas.errors import ConfigError

_KEEP_ALIVE_SECONDS = 60
_BACKLOG = 2048


def serve_retriever(
    *,
    corpus: str,
    index: str,
    encoder: str,
    faiss: Path | None,
    folder: Path | None,
    host: str,
    port: int,
    limits: Limits,
) -> None:
    """Serve `corpus` until a signal ends it. UserError: the address is taken, or corpus, encoder or index can't be used."""
    if faiss is not None and (index != "dense" or folder is not None):
        raise ConfigError("serve-retriever: --faiss is a dense index; give --index dense with it, and no --index-folder")
    with _bound(host, port) as listener:
        passages = read_corpus(corpus)
        server = RetrieverServer(open_index(passages, index, encoder=encoder, folder=folder, vectors=faiss), limits)
        if not _is_loopback(host):
            print(f"drmas: {host} is reached from other machines, and this server asks nobody for a password", file=sys.stderr)
        address = listener.getsockname()
        named = f"[{host}]" if ":" in host else host
        running = _Server(server.app, f"{index} index of {len(passages)} passages: http://{named}:{address[1]}/retrieve")
        running.run([listener])
        if running.interrupted:  # asyncio may have swallowed it while the server was ending
            raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """Says when it is ready, and doesn't wait for requests when it is told to end."""

    def __init__(self, app: Starlette, ready: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                log_level="critical",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                backlog=_BACKLOG,
            )
        )
        self._ready = ready
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process began to listen there while the index was made
            assert sockets is not None
            raise _cannot_listen(*sockets[0].getsockname()[:2], error) from error
        print(self._ready, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.force_exit = True
        self.interrupted = sig == signal.SIGINT


def _bound(host: str, port: int) -> socket.socket:
    """A socket at the address, so that a port that is taken is found before the corpus is read; it doesn't listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"serve-retriever: can't listen on {host} port {port}: {error.strerror or error}; give another --host or --port "
        "(--port 0 takes a free one)"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
