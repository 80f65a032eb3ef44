"""`drmas serve-engines`: this machine as an engine host, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

from drmas.errors import ConfigError
from drmas.rollout.host_server import EngineHost


def serve_engines(*, host: str, port: int, gpus: str | None, logs: Path, token_env: str) -> None:
    """Serve until interrupted. ConfigError: the address can't be served, or the secret is missing."""
    secret, usable = os.environ.get(token_env, ""), parse_gpus(gpus, count_gpus())
    server = EngineHost(host, port, secret=secret, gpus=usable, logs=logs, say=_say, token_env=token_env)

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    what = f"{len(server.gpus)} GPU(s)" if server.device == "cuda" else "the CPU"
    print(f"engine host of {what}, logs in {logs}: tcp://{_name(host)}:{server.address[1]}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        print("ending", flush=True)
    finally:
        server.close()


def parse_gpus(text: str | None, count: int) -> list[int]:
    """ "0-3,6" as indices below `count`; all if None. ConfigError: it isn't that.

    Example: parse_gpus("0-2,5", 8) == [0, 1, 2, 5]
    """
    if text is None:
        return list(range(count))
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or ("-" in part and not last.strip().isdigit()):
            raise ConfigError(f"--gpus is {text!r}; expected numbers and ranges such as 0-3,6")
        found += range(int(first), int(last or first) + 1)
    if not found or len(set(found)) != len(found) or max(found) >= count:
        raise ConfigError(f"--gpus is {text!r}; expected different ones of the {count} that are visible here")
    return found


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _say(text: str) -> None:
    print(text, flush=True)


def _name(host: str) -> str:
    """What others call this machine, in a URL: its name where it listens on every address."""
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
