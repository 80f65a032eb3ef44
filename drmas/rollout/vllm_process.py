"""The engine process: `python -m drmas.rollout.vllm_process SOCKET_FD PARENT_PID`, started by `vllm_launch`.

It reads one JSON message per line. The first one describes the engine; after the answer to it, `vllm_loop` serves the rest. A
second thread does nothing but read the socket and end this process group when the parent is gone, even while the engine is
busy. It watches the parent's process and not the parent's thread, as PR_SET_PDEATHSIG would: an engine must survive the thread
that started it.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from drmas.core import adapters
from drmas.rollout.vllm_launch import WEIGHT_BACKEND, WORKER_EXTENSION

Message = dict[str, Any]

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM can make room for."""


class Channel:
    """Our end of the socket: messages in through a queue, messages out directly."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._socket = connection
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._parent = os.pidfd_open(parent)
        threading.Thread(target=self._read, name="socket", daemon=True).start()

    def send(self, message: Message) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
        """The next message; waits for it."""
        return self._inbox.get()

    def waiting(self) -> Iterator[Message]:
        """The messages that are there already."""
        while not self._inbox.empty():
            yield self._inbox.get()

    def hang_up(self) -> None:
        """The parent reads no more from here, whichever child of ours still has the socket open."""
        self._socket.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        """Until the parent or its socket is gone, or sends what is no message: then this process group has no purpose left."""
        try:
            self._receive_all()
        finally:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def _receive_all(self) -> None:
        unread = b""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._parent, select.POLLIN)
        while self._parent not in [descriptor for descriptor, _ in poll.poll()]:
            received = self._socket.recv(1 << 20)  # raises where the parent died with answers unread
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                self._inbox.put(json.loads(line))


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel = Channel(connection, parent)
    request = channel.receive()
    try:
        engine = build_engine(request["arguments"])
    except RefusedArguments as error:  # its message is all there is to know
        channel.send({"id": request["id"], "error": str(error)})
        sys.exit(1)
    except Exception as error:
        channel.send({"id": request["id"], "error": f"{type(error).__name__}: {error}"})
        raise
    channel.send({"id": request["id"], "result": describe(engine)})

    from drmas.rollout.vllm_loop import EngineLoop

    adapter, status = request.get("adapter"), 0
    try:
        EngineLoop(engine, channel, deterministic=request["deterministic"], version=request["version"], adapter=adapter).run()
        engine.engine_core.shutdown()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    channel.hang_up()
    os._exit(status)  # the interpreter would spend seconds on taking vLLM apart, or hang in it, while the trainer waits


class RefusedArguments(Exception):
    """vLLM finds a value wrong before it builds anything."""


def build_engine(arguments: Message) -> Any:
    """The vLLM engine of `arguments` (EngineArgs). RefusedArguments: a value is wrong, by vLLM's own word."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        config = EngineArgs(**arguments).create_engine_config()
    except (ValueError, VLLMClientError) as error:
        raise RefusedArguments(f"vLLM refuses its arguments: {one_line(error)}") from error
    return LLMEngine.from_vllm_config(config, disable_log_stats=True)


def one_line(error: Exception) -> str:
    """The message of `error`; of pydantic's kind, only the names and what is wrong with them."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(
            ": ".join([*map(str, item["loc"]), item["msg"].removeprefix("Value error, ")]) for item in error.errors()
        )
    return " ".join(str(error).split())


def engine_arguments(device: str) -> Message:
    """The arguments that every engine gets, whatever its configuration."""
    common = {
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled, temperature included (I11)
        "enable_prefix_caching": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "trust_remote_code": False,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": WEIGHT_BACKEND},
    }
    if device == "cpu":
        common |= {
            "enforce_eager": True,
            "block_size": 32,  # the smallest block here; only whole blocks are shared
            # After a piece of a prompt vLLM rewinds the request's generator, which can't be done on a CPU ("CPU Generator does
            # not use offset" ends the engine). So prompts are prefilled whole.
            "enable_chunked_prefill": False,
        }
    return common


def adapter_arguments(rank: int) -> Message:
    """What an engine that takes adapters of this rank gets besides; for more than one set of adapters there is no room."""
    room = next((size for size in ADAPTER_RANKS if size >= rank), rank)
    return {
        "enable_lora": True,
        "max_lora_rank": room,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "weight_transfer_config": {"backend": adapters.BACKEND},
    }


def describe(engine: Any) -> Message:
    """What the client needs to know, and the thread settings as they took effect."""
    import torch

    config = engine.vllm_config
    return {
        "vocab_size": config.model_config.get_vocab_size(),
        "num_workers": config.parallel_config.world_size,
        "torch_threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
