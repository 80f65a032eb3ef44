"""Carry a policy's weights into its engine: pause, start, send, finish with the version, resume.

One `WeightSync` per policy, on every trainer rank; only the sender holds the engine. On a CPU the weights travel over the gloo
transport of this package, on a GPU over vLLM's own NCCL trainer. The GPU path differs in `_connect` only; it was written
against vLLM's source and has not been run, since it needs a GPU.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from drmas.errors import EngineDied, SyncError
from drmas.weights.sender import Client, GlooTrainer, GlooTrainerInit
from drmas.weights.source import CheckedSource, Source
from drmas.weights.wire import LOOPBACK, free_port


class SyncClient(Client, Protocol):
    """An engine's control channel: vLLM's protocol, and what it lacks. One object per engine process.

    A scripted engine's has no `num_workers`: there are no weights to carry, and it only learns the version.
    """

    num_workers: int

    def get_weight_version(self) -> str: ...

    def abort_weight_update(self) -> bool: ...


class SyncedEngine(Protocol):
    """The part of `drmas.rollout.engine.Engine` that a sync drives."""

    sync_client: SyncClient
    alive: bool

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What one push took; `bytes` is 0 on ranks that don't send."""

    seconds: float
    bytes: int


class WeightSync:
    """Pushes `source` into `engine`. `version` is the last one pushed (0: the weights of the model folder)."""

    def __init__(
        self,
        engine: SyncedEngine | None,
        source: Source,
        *,
        is_sender: bool,
        timeout_seconds: float = 60.0,
        bucket_bytes: int = 64 * 2**20,
    ) -> None:
        self.version = 0
        self._engine = engine if is_sender else None
        self._source = CheckedSource(source)
        self._timeout_seconds, self._bucket_bytes = timeout_seconds, bucket_bytes
        self._trainer: Any = None
        self._client: _VersionedClient | None = None

    def push(self, version: int) -> SyncResult:
        """Make the engine's weights the trainer's, as `version`. Called on every rank; each iterates the source equally often.

        SyncError: the weights were not finite, didn't fit or didn't arrive. The engine then runs on with its old weights; only
        where some layers had changed already it stays paused and refuses requests until a push succeeds. EngineDied: start the
        engine again and push again. Only the sender raises; it must tell the other ranks.
        """
        started = time.perf_counter()
        sent = 0
        try:
            if self._engine is not None:
                sent = self._send(self._engine, version)
        finally:
            self._source.settle(2 if _nccl() else 1)
        self.version = version
        return SyncResult(time.perf_counter() - started, sent)

    def close(self) -> None:
        """Leave the engine's group; the next push makes a new one."""
        trainer, self._trainer, self._client = self._trainer, None, None
        if trainer is not None:
            trainer.shutdown()

    def _send(self, engine: SyncedEngine, version: int) -> int:
        if not getattr(engine.sync_client, "num_workers", 0):
            engine.sync_client.finish_weight_update(str(version))
            return 0
        engine.pause()
        try:
            if self._client is None or self._client.client is not engine.sync_client:
                self._connect(engine.sync_client)
            self._client.version = version
            if _nccl():  # its collectives can't be told to stop, so a tensor that isn't finite must be found beforehand
                for _ in self._source:
                    pass
            self._trainer.send_weights()
        except BaseException as error:
            self.close()
            if engine.alive and engine.sync_client.abort_weight_update():
                engine.resume()
            if isinstance(error, EngineDied | SyncError) or not isinstance(error, RuntimeError):
                raise
            raise SyncError(f"version {version} did not reach the engine: {error}") from error
        engine.resume()
        return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in self._source.metadata())

    def _connect(self, client: SyncClient) -> None:
        """A fresh group with the engine's workers, for the life of its process."""
        self.close()
        versioned = _VersionedClient(client)
        world_size = 1 + client.num_workers
        if _nccl():
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            init = NCCLTrainerInitInfo(LOOPBACK, free_port(), world_size, rank=0)
            self._trainer = WeightTransferTrainerFactory.trainer_init(init, client=versioned, source=self._source)
        else:
            init = GlooTrainerInit(0, world_size, self._bucket_bytes, self._timeout_seconds)
            self._trainer = GlooTrainer.trainer_init(init, client=versioned, source=self._source)
        self._client = versioned


class _VersionedClient:
    """The client with the version of the running push: vLLM's trainer engines finish without naming one."""

    def __init__(self, client: SyncClient) -> None:
        self.client = client
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.client.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.client.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        expected = str(self.version)
        self.client.finish_weight_update(expected)
        found = self.client.get_weight_version()
        if found != expected:
            raise SyncError(f"the engine reports version {found!r} after the update to {expected!r}")


def _nccl() -> bool:
    return torch.cuda.is_available()
