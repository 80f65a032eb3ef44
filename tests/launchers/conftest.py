"""The launchers with recorders in the place of what they start."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launchers.stage import Stage


@pytest.fixture(scope="session")
def launchers() -> Path:
    return Path(__file__).resolve().parents[2] / "launchers"


@pytest.fixture(scope="session")
def free_port() -> Callable[..., int]:
    """A port that nobody listens at, of those that launchers choose from."""

    def find() -> int:
        for port in range(20000 + os.getpid() % 9000, 30000):
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue
            return port
        raise AssertionError("no free port")

    return find


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    stage.close()
