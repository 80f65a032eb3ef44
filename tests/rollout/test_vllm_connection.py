"""The connection against a stand-in process: answers find their callers, and a death is told to all who wait."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from drmas.errors import EngineDied, EngineError
from drmas.rollout.engine_process import LocalProcess
from drmas.rollout.vllm_connection import Connection

PROCESS = """
import json, os, socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
def send(**message):
    connection.sendall(json.dumps(message).encode() + b"\\n")
for line in connection.makefile("rb"):
    message = json.loads(line)
    match message["do"]:
        case "echo":
            send(id=message["id"], result=message["arguments"])
        case "refuse":
            send(id=message["id"], error="no such thing")
        case "batch":
            send(answers=[{"id": number, "result": number} for number in [*message["numbers"], message["id"]]])
        case "half":
            connection.sendall(b'{"id": 1, "res')
            os.kill(os.getpid(), 9)
        case "garbage":
            connection.sendall(b"no JSON\\n")
        case "die":
            print("the last words", flush=True)
            sys.exit(3)
        case "shutdown":
            sys.exit(0)
"""


@pytest.fixture
def connection(tmp_path):
    log = tmp_path / "engine.log"
    ours, theirs = socket.socketpair()
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(theirs.fileno())],
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    connection = Connection("fake", LocalProcess(process, log, 0), ours)
    yield connection
    connection.close()


def test_answers_and_errors_reach_their_callers(connection):
    assert connection.call("echo", 1, [2], timeout=10) == [1, [2]]
    with pytest.raises(EngineError, match="engine fake: no such thing") as error:
        connection.call("refuse", timeout=10)
    assert not isinstance(error.value, EngineDied)
    assert connection.waiting == 0


def test_a_batch_resolves_its_requests_before_the_message_that_asked_for_it(connection):
    order = []
    numbers = []
    for name in ("first", "second"):
        number, future = connection.request("held")
        numbers.append(number)
        future.add_done_callback(lambda _, name=name: order.append(name))
    _, batch = connection.request("batch", numbers=numbers)
    batch.add_done_callback(lambda _: order.append("batch"))
    batch.result(10)
    connection.call("echo", timeout=10)
    assert order == ["first", "second", "batch"]


def test_a_death_fails_everything_that_waits_with_status_and_log(connection):
    _, waiting = connection.request("held")
    _, dying = connection.request("die")
    for future in (waiting, dying):
        with pytest.raises(EngineDied, match=r"ended with status 3[\s\S]*engine\.log[\s\S]*the last words"):
            future.result(10)
    assert not connection.alive
    with pytest.raises(EngineDied, match="ended with status 3"):
        connection.request("echo")


def test_a_signal_is_named(connection):
    _, waiting = connection.request("held")
    os.kill(connection.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="was killed by SIGKILL"):
        waiting.result(10)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_does_not_answer_is_killed_and_all_who_wait_are_told_why(connection, stopped):
    _, waiting = connection.request("held")
    if stopped:
        os.kill(connection.process.pid, signal.SIGSTOP)
    late = r"gave no answer to held within 0\.05 s \(engine\.request_timeout_seconds\), so it was killed"
    with pytest.raises(EngineDied, match=late):
        connection.call("held", timeout=0.05)
    assert not connection.alive
    with pytest.raises(EngineDied, match="no answer to held"):
        waiting.result(0)
    with pytest.raises(ProcessLookupError):
        os.kill(connection.process.pid, 0)


def test_a_process_killed_while_it_sends_an_answer_is_dead_like_any_other(connection):
    with pytest.raises(EngineDied, match="was killed by SIGKILL"):
        connection.call("half", timeout=20)
    assert not connection.alive


def test_an_answer_that_can_not_be_read_ends_the_process(connection, monkeypatch):
    monkeypatch.setattr("drmas.rollout.vllm_connection.EXIT_GRACE_SECONDS", 0.1)
    with pytest.raises(EngineDied, match="sent an answer that isn't JSON"):
        connection.call("garbage", timeout=20)
    assert not connection.alive


def test_a_death_is_told_even_when_the_log_folder_is_gone(connection, tmp_path):
    (tmp_path / "engine.log").unlink()
    tmp_path.rmdir()
    with pytest.raises(EngineDied, match=r"ended with status 3[\s\S]*log can't be read.*engine\.log"):
        connection.call("die", timeout=20)
    assert not connection.alive


def test_a_death_is_told_even_when_the_process_can_not_be_reaped(connection, monkeypatch):
    def refuse(pid):
        raise OSError("too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(EngineDied, match="closed its connection"):
        connection.call("die", timeout=20)
    assert not connection.alive


def test_a_request_that_was_given_up_is_forgotten(connection):
    number, future = connection.request("held")
    future.cancel()
    connection.forget(number)
    assert connection.waiting == 0
    assert connection.call("echo", 5, timeout=10) == [5]


@pytest.mark.parametrize("stopped", [False, True])
def test_close_ends_the_process_even_one_that_is_stopped(connection, stopped, monkeypatch):
    monkeypatch.setattr("drmas.rollout.vllm_connection.EXIT_GRACE_SECONDS", 0.5)
    connection.call("echo", timeout=10)
    if stopped:
        os.kill(connection.process.pid, signal.SIGSTOP)
    connection.close()
    with pytest.raises(ProcessLookupError):
        os.kill(connection.process.pid, 0)
    connection.close()
