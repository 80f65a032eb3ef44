"""Workers of engines without engines: receivers in threads of this process, behind a client as the transports drive it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from drmas.errors import EngineError
from drmas.weights.receiver import BucketReceiver
from drmas.weights.wire import LOOPBACK, Named

CPU = torch.device("cpu")


class Tensors:
    """A source of these tensors, that counts its passes."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        self.tensors, self.passes = list(tensors), 0

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors]

    def __iter__(self) -> Iterator[Named]:
        yield from self.tensors
        self.passes += 1


class Worker:
    """`model` is what was loaded last, whole or not; `seen` counts the tensors of the update that runs."""

    def __init__(self) -> None:
        self.receiver: BucketReceiver | None = None
        self.model: dict[str, torch.Tensor] = {}
        self.seen = 0
        self.refuses = ""

    def check(self, tensors: Iterable[Named]) -> None:
        if self.refuses in {name for name, _ in tensors}:
            raise ValueError(f"{self.refuses} doesn't fit")

    def update(self, said: dict[str, Any]) -> None:
        self.seen = 0
        try:
            for name, tensor in self.receiver.receive(said, self.check):
                self.model[name] = tensor.clone()
                self.seen += 1
        except Exception:
            self.receiver.close()
            raise


class Client:
    """`engines` of `workers` each, as one client."""

    trainer_address = LOOPBACK

    def __init__(self, engines: int = 1, workers: int = 1) -> None:
        self.clients = [None] * engines
        self.workers = [Worker() for _ in range(engines * workers)]
        self.num_workers = len(self.workers)
        self.version = "0"
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        def join(place: int, worker: Worker) -> None:
            worker.receiver = BucketReceiver(info, info["rank_offset"] + place, CPU)

        self._each("init", join)

    def stage_weights(self, said: dict[str, Any]) -> None:
        self._each("stage", lambda _, worker: worker.receiver.stage(said))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, said: dict[str, Any]) -> None:
        self._each("update", lambda _, worker: worker.update(said))

    def finish_weight_update(self, version: str) -> None:
        self.calls.append("finish")
        self.version = version

    def get_weight_version(self) -> str:
        return self.version

    def close(self) -> None:
        for worker in self.workers:
            if worker.receiver is not None:
                worker.receiver.close()

    def _each(self, name: str, action: Callable[[int, Worker], None]) -> None:
        def act(place: int, worker: Worker) -> str:
            try:
                action(place, worker)
            except Exception as error:  # only its words leave, as from a process: its traceback would keep connections open
                return f"{type(error).__name__}: {error}"
            return ""

        self.calls.append(name)
        with ThreadPoolExecutor(len(self.workers)) as pool:
            if errors := list(filter(None, pool.map(act, range(len(self.workers)), self.workers))):
                raise EngineError("; ".join(errors))


def push(transport: Any, client: Client, version: int = 1) -> int:
    """As `WeightSync` does it on the only rank."""
    transport.begin(version)
    try:
        return transport.send(client, version)
    finally:
        transport.settle()


def stage(transport: Any, client: Client, version: int) -> None:
    transport.begin(version, staging=True)
    try:
        transport.stage(client)
    finally:
        transport.settle()


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]
