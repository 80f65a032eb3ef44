"""Engines of another host: a real one behind a real daemon on loopback, and the daemon's own rules with stand-in processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drmas.cli.serve_engines import _name, parse_gpus
from drmas.config.cluster import ClusterConfig
from drmas.errors import ConfigError, EngineDied, EngineStartError
from drmas.rollout import host_server, host_wire
from drmas.rollout.engine import Sampling
from drmas.rollout.engine_process import LocalProcess
from drmas.rollout.host_client import RemoteHost
from drmas.rollout.host_server import EngineHost
from drmas.rollout.vllm_engine import VllmEngine

SECRET = "a secret of the tests"
CLUSTER = ClusterConfig(token_env="DRMAS_TEST_TOKEN", connect_timeout_seconds=10)
HASTY = CLUSTER.model_copy(update={"connect_timeout_seconds": 1.0})


@pytest.fixture
def served():
    """The engine hosts of the test, closed at its end."""
    servers: list[EngineHost] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def serve(tmp_path, served):
    """Engine hosts on loopback; keyword arguments as EngineHost has them."""

    def start(port: int = 0, **changes) -> EngineHost:
        server = EngineHost("127.0.0.1", port, **{"secret": SECRET, "gpus": [], "logs": tmp_path / "logs", **changes})
        threading.Thread(target=server.serve, daemon=True).start()
        served.append(server)
        return server

    return start


@pytest.fixture
def reach(monkeypatch):
    """The client's side of a server, with its secret or another."""

    def make(server: EngineHost, secret: str = SECRET) -> RemoteHost:
        monkeypatch.setenv("DRMAS_TEST_TOKEN", secret)
        return RemoteHost(f"tcp://127.0.0.1:{server.address[1]}", CLUSTER)

    return make


@pytest.fixture
def remote_engine(serve, reach, make_engine):
    server = serve()
    engine: VllmEngine = make_engine("far")
    engine._host = reach(server)
    engine.start()
    yield engine
    engine.close()


async def test_an_engine_elsewhere_answers_as_one_here_and_its_end_is_told(remote_engine, engine, generate_all):
    requests = [([5, 9, 30 + seed], Sampling(40), seed) for seed in range(6)]
    here, there = await generate_all(engine, requests), await generate_all(remote_engine, requests)
    assert [each.token_ids for each in there] == [each.token_ids for each in here]
    assert remote_engine.sync_client.trainer_address == "127.0.0.1"
    assert 300e6 < remote_engine.stats()["peak_memory_bytes"] < 3e9

    waiting = asyncio.ensure_future(remote_engine.generate([5, 6], Sampling(250), seed=1, key="k"))
    await asyncio.sleep(0)
    os.kill(remote_engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"at tcp://127\.0\.0\.1:\d+\) was killed by SIGKILL\n--- the end of .*engine-far-"):
        await waiting
    assert not remote_engine.alive
    first = remote_engine.pid
    remote_engine.start()
    assert remote_engine.pid != first
    (again,) = await generate_all(remote_engine, requests[:1])
    assert again.token_ids == here[0].token_ids

    last = remote_engine.pid
    remote_engine.close()
    assert gone(last)


def gone(pid: int) -> bool:
    """Whether the process has ended, or does within 20 seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor):
        return bool(select.select([descriptor], [], [], 20)[0])


# what can be wrong on the way


def test_a_host_that_is_not_there_is_named_with_the_keys_that_lead_to_it(monkeypatch):
    monkeypatch.setenv("DRMAS_TEST_TOKEN", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    host = RemoteHost(f"tcp://127.0.0.1:{port}", HASTY)
    refused = rf"engine a: the engine host tcp://127\.0\.0\.1:{port} can't be reached within 1 s: .*cluster\.engine_hosts"
    with pytest.raises(EngineStartError, match=refused):
        host.launch("a", model=Path("/nowhere"), num_gpus=1, threads=1)


def test_a_host_that_comes_later_is_waited_for(serve, monkeypatch):
    monkeypatch.setenv("DRMAS_TEST_TOKEN", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found: queue.Queue[dict] = queue.Queue()
    thread = threading.Thread(target=lambda: found.put(RemoteHost(f"tcp://127.0.0.1:{port}", CLUSTER).describe()))
    thread.start()
    with pytest.raises(queue.Empty):
        found.get(timeout=0.6)
    serve(port=port)
    assert found.get(timeout=30)["device"] == "cpu"
    thread.join()


def test_another_secret_is_refused_on_both_sides_and_never_shown(serve, reach, capfd):
    with pytest.raises(EngineStartError, match="another secret; DRMAS_TEST_TOKEN must be here as it is there") as error:
        reach(serve(), "something else entirely").describe()
    assert SECRET not in str(error.value)
    assert "something else" not in str(error.value)
    with pytest.raises(EngineStartError, match="DRMAS_TEST_TOKEN is not set here"):
        reach(serve(), "").describe()


def test_a_server_of_another_kind_is_no_engine_host(monkeypatch):
    monkeypatch.setenv("DRMAS_TEST_TOKEN", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 100)

        thread = threading.Thread(target=answer)
        thread.start()
        host = RemoteHost(f"tcp://127.0.0.1:{listener.getsockname()[1]}", CLUSTER)
        with pytest.raises(EngineStartError, match="can't be talked to"):
            host.describe()
        thread.join()


def test_a_model_folder_that_the_other_host_lacks_is_named(serve, reach):
    with pytest.raises(EngineStartError, match=r"engine a: /nowhere is no model folder on .*the same path on every host"):
        reach(serve()).launch("a", model=Path("/nowhere"), num_gpus=1, threads=1)


@pytest.mark.parametrize("message", [{"do": "dance"}, {"do": "launch"}, {"do": "end"}, {"do": "kill", "engine": []}])
def test_a_message_that_makes_no_sense_ends_nothing(serve, reach, message):
    host = reach(serve())
    assert "a bad message" in host.question(message)["error"]
    assert host.describe()["device"] == "cpu"


def test_an_engine_that_the_host_never_had_is_said_to_be_unknown(serve, reach):
    assert "unknown to its host" in reach(serve()).question({"do": "end", "engine": 1})["end"]


def test_a_taken_port_and_an_open_address_without_a_secret_are_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port} can't be served: .*take another --port, or 0"):
            EngineHost("127.0.0.1", port, secret=SECRET, gpus=[], logs=tmp_path)
    for host, secret in (("0.0.0.0", "short"), ("127.0.0.1", "short"), ("::1", "")):
        with pytest.raises(ConfigError, match=f"MY_TOKEN has {len(secret)} characters; .* set it to at least 16 random ones"):
            EngineHost(host, 0, secret=secret, gpus=[], logs=tmp_path, token_env="MY_TOKEN")


def test_a_host_serves_over_ipv6_and_says_its_address_as_the_trainer_takes_it(tmp_path, served, monkeypatch):
    server = EngineHost("::1", 0, secret=SECRET, gpus=[], logs=tmp_path)
    served.append(server)
    threading.Thread(target=server.serve, daemon=True).start()
    monkeypatch.setenv("DRMAS_TEST_TOKEN", SECRET)
    (url,) = ClusterConfig(engine_hosts=[f"tcp://{_name('::1')}:{server.address[1]}"]).engine_hosts
    assert RemoteHost(url, CLUSTER).describe()["device"] == "cpu"


def test_a_connection_that_is_lost_on_the_way_ends_nothing(serve, reach, monkeypatch):
    said: queue.Queue[str] = queue.Queue()
    server = serve(say=said.put)
    accept, failures = server._listener.accept, iter([OSError("too many open files"), RuntimeError("can't start new thread")])

    class Listener:
        def accept(self):
            for failure in failures:
                raise failure
            return accept()

        def shutdown(self, how):
            real.shutdown(how)

        def close(self):
            real.close()

    real, server._listener = server._listener, Listener()
    assert reach(server).describe()["device"] == "cpu"  # the accept that was under way
    assert reach(server).describe()["device"] == "cpu"
    assert [said.get(timeout=5) for _ in range(2)] == [
        "a connection was lost: too many open files",
        "a connection was lost: can't start new thread",
    ]


def test_peers_that_prove_nothing_are_few_and_get_little_time(serve, reach, monkeypatch):
    monkeypatch.setattr(host_server, "MOST_UNPROVEN", 2)
    monkeypatch.setattr(host_server, "HANDSHAKE_SECONDS", 1.0)
    said: queue.Queue[str] = queue.Queue()
    server = serve(say=said.put)
    with socket.create_connection(server.address, 10) as one, socket.create_connection(server.address, 10) as other:
        for connection in (one, other):
            connection.recv(1)  # its challenge: it is being answered
        with socket.create_connection(server.address, 10) as third:
            assert third.recv(1) == b""
        assert said.get(timeout=5).endswith("2 connections have proved nothing yet")
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while one.send(b"x") and time.monotonic() - started < 20:  # one byte at a time doesn't stretch it
                time.sleep(0.3)
                if select.select([one], [], [], 0)[0] and not one.recv(host_wire.CHALLENGE_BYTES + 64):
                    break
        assert time.monotonic() - started < 20
    assert reach(server).describe()["device"] == "cpu"


def test_what_keeps_an_engine_from_starting_is_said_on_both_sides(serve, reach, engine_model, tmp_path):
    said: queue.Queue[str] = queue.Queue()
    (tmp_path / "file").touch()
    host = reach(serve(logs=tmp_path / "file" / "logs", say=said.put))
    with pytest.raises(EngineStartError, match=r"an engine can't be started on .*Not a directory.*\(tcp://127"):
        host.launch("a", model=engine_model, num_gpus=1, threads=1)
    assert said.get(timeout=5).startswith("an engine can't be started: ")


# GPUs, without any


@pytest.fixture
def gpu_host(serve, reach, monkeypatch, engine_model):
    """A host of four GPUs whose engines are `sleep`s; what each sees is recorded by name."""
    seen = {}

    def spawn(environment, log, theirs) -> LocalProcess:
        log.parent.mkdir(exist_ok=True)
        log.touch()
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        seen[log.name.split("-")[1]] = environment["CUDA_VISIBLE_DEVICES"]
        return LocalProcess(process, log, 0)

    monkeypatch.setattr(host_server, "engine_device", lambda: "cuda")
    monkeypatch.setattr(host_server, "spawn", spawn)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    host = reach(serve(gpus=[0, 1, 2, 3]))
    return host, lambda name, count: host.launch(name, model=engine_model, num_gpus=count, threads=None), seen


def test_engines_get_gpus_of_their_own_and_give_them_back(gpu_host):
    host, launch, seen = gpu_host
    first, connection = launch("a", 2)
    connection.close()
    launch("b", 1)
    assert seen == {"a": "4,5", "b": "6"}
    assert host.describe()["free"] == [3]
    with pytest.raises(EngineStartError, match=r"needs 5 GPU\(s\); .* serves 4, of which 1 are free \(a \[0, 1\], b \[2\]\)"):
        launch("c", 5)
    host._patience = host._silence = 0.3
    with pytest.raises(EngineStartError, match=r"needs 2 GPU\(s\); .* serves 4, of which 1 are free \(a \[0, 1\], b \[2\]\)"):
        launch("c", 2)
    first.kill()
    assert first.end() == "was killed by SIGKILL"
    assert host.describe()["free"] == [0, 1, 3]
    launch("c", 3)
    assert seen["c"] == "4,5,7"


def test_gpus_that_are_about_to_be_free_are_waited_for(gpu_host):
    _, launch, seen = gpu_host
    first, connection = launch("a", 4)
    connection.close()
    threading.Timer(1.0, first.kill).start()
    launch("b", 1)
    assert seen["b"] == "4"


def test_engines_of_one_name_have_logs_of_their_own(gpu_host):
    _, launch, _ = gpu_host
    assert len({launch("main", 1)[0].log for _ in range(3)}) == 3


def test_engines_end_with_their_host(gpu_host, served):
    _, launch, _ = gpu_host
    process, _ = launch("a", 1)
    os.kill(process.pid, 0)
    served[0].close()
    assert gone(process.pid)


@pytest.mark.parametrize(("text", "found"), [(None, [0, 1, 2, 3]), ("0-2", [0, 1, 2]), ("3,1", [3, 1]), ("0, 2-3", [0, 2, 3])])
def test_gpus_as_numbers_and_ranges(text, found):
    assert parse_gpus(text, 4) == found


@pytest.mark.parametrize("text", ["", "a", "0-", "4", "0-4", "1,1", "-1", "2-1"])
def test_what_names_no_gpus_is_refused(text):
    with pytest.raises(ConfigError, match="--gpus is"):
        parse_gpus(text, 4)


def test_a_peer_that_says_nothing_holds_nobody_up(serve, reach, monkeypatch):
    server = serve()
    with socket.create_connection(server.address):
        assert reach(server).describe()["gpus"] == []


def test_the_wire_is_what_the_client_speaks(serve):
    """A connection that proves nothing gets no answer, whatever it asks."""
    server = serve()
    with socket.create_connection(server.address, 10) as connection:
        connection.sendall(b"x" * (host_wire.CHALLENGE_BYTES + 32))
        received = b""
        while part := connection.recv(4096):
            received += part
    assert len(received) == host_wire.CHALLENGE_BYTES + 32  # its challenge and its own proof, and no more
