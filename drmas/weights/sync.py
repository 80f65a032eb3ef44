"""Carry a policy's weights into its engine: pause, start, send, finish with the version, resume.

One `WeightSync` per policy, on every trainer rank; only the sender holds the engine. Several replicas of an engine are one
engine here: their client counts all their workers, which form one group with the sender and get one broadcast. On a CPU the
weights travel over the gloo transport of this package, on a GPU over vLLM's own NCCL trainer. The GPU path differs in
`_connect` only; it was written against vLLM's source and has not been run, since it needs a GPU.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from drmas.errors import EngineDied, EngineError, SyncError
from drmas.weights.sender import Client, GlooTrainer, GlooTrainerInit
from drmas.weights.source import CheckedSource, Source
from drmas.weights.wire import LOOPBACK, free_port


class SyncClient(Client, Protocol):
    """An engine's control channel: vLLM's protocol, and what it lacks. One object per engine process (or set of replicas).

    A scripted engine's has no `num_workers`: there are no weights to carry, and it only learns the version. That of an engine
    in this process takes the tensors themselves (`take_weights`), all or none.
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
        adapters: bool = False,
        timeout_seconds: float = 60.0,
        bucket_bytes: int = 64 * 2**20,
    ) -> None:
        """`adapters`: the source gives adapters, for an engine that takes these. They travel over gloo on a GPU, too."""
        self.version = 0
        self._nccl = torch.cuda.is_available() and not adapters
        self._engine = engine if is_sender else None
        self._source = CheckedSource(source)
        self._timeout_seconds, self._bucket_bytes = timeout_seconds, bucket_bytes
        self._trainer: Any = None
        self._client: _VersionedClient | None = None

    def push(self, version: int) -> SyncResult:
        """Make the engine's weights the trainer's, as `version`. Called on every rank; each iterates the source equally often.

        SyncError: the weights were not finite, didn't fit or didn't arrive. The engine then runs on with its old weights; only
        where some layers had changed already, or where it refuses to go back, it stays paused and takes no requests until a
        push succeeds. EngineDied: start the engine again and push again; replicas that live have gone back and are paused until
        then. Only the sender raises; it must tell the other ranks.
        """
        started = time.perf_counter()
        sent = 0
        try:
            if self._engine is not None:
                sent = self._send(self._engine, version)
        finally:
            self._source.settle(2 if self._nccl else 1)
        self.version = version
        return SyncResult(time.perf_counter() - started, sent)

    def close(self) -> None:
        """Leave the engine's group; the next push makes a new one."""
        trainer, self._trainer, self._client = self._trainer, None, None
        if trainer is not None:
            trainer.shutdown()

    def _send(self, engine: SyncedEngine, version: int) -> int:
        """Bytes sent. A connection that turns out to be broken is made anew once, as long as the source wasn't touched.

        Later it can't be: every rank iterates the source once in a push, so nothing could be sent from its start again.
        """
        try:
            return self._attempt(engine, version)
        except _Broken:
            if not self._source.untouched:
                raise
        return self._attempt(engine, version)

    def _attempt(self, engine: SyncedEngine, version: int) -> int:
        try:
            self._update(engine, version)
        except EngineDied:
            self.close()
            with contextlib.suppress(EngineError):  # where there are other replicas, they give up this update as well
                _go_back(engine)
            raise
        except RuntimeError as error:  # EngineError and SyncError too, and what torch raises over a broken group
            self.close()
            kind = SyncError if isinstance(error, SyncError) else _Broken
            obstacle = _go_back(engine)
            raise kind(f"version {version} did not reach the engine: {error}{obstacle}") from error
        except BaseException:  # an interrupt, or a fault of ours: the engine goes on if it can
            self.close()
            with contextlib.suppress(EngineError):
                _go_back(engine)
            raise
        if not _has_weights(engine):
            return 0
        return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in self._source.metadata())

    def _update(self, engine: SyncedEngine, version: int) -> None:
        client = engine.sync_client
        if not _has_weights(engine):
            client.finish_weight_update(str(version))
            return
        engine.pause()
        if hasattr(client, "take_weights"):  # an engine in this process
            client.take_weights(iter(self._source))
            client.finish_weight_update(str(version))
        else:
            self._transfer(client, version)
        engine.resume()

    def _transfer(self, client: SyncClient, version: int) -> None:
        if self._client is None or self._client.client is not client:
            self._connect(client)
        self._client.version = version
        if self._nccl:  # its collectives can't be told to stop, so a tensor that isn't finite must be found beforehand
            for _ in self._source:
                pass
        self._trainer.send_weights()

    def _connect(self, client: SyncClient) -> None:
        """A fresh group with the engine's workers, for the life of its process."""
        self.close()
        versioned = _VersionedClient(client)
        world_size = 1 + client.num_workers
        if self._nccl:
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


class _Broken(SyncError):
    """The weights are not at fault; another attempt over a fresh connection may succeed."""


def _has_weights(engine: SyncedEngine) -> bool:
    return getattr(engine.sync_client, "num_workers", 0) > 0


def _go_back(engine: SyncedEngine) -> str:
    """Let the engine go on after a failure with its old weights: "", or what stands against it. EngineDied: it is gone."""
    obstacle = ""
    try:
        if _has_weights(engine):
            if engine.sync_client.abort_weight_update():
                engine.resume()
            else:
                obstacle = "; some of its layers have changed already, so it stays paused"
    except EngineDied:
        raise
    except EngineError as error:
        obstacle = f"; it can't go back to its old weights either: {error}"
    if not engine.alive:
        raise EngineDied("the engine died during a weight update")
    return obstacle
