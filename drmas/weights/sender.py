"""The trainer's side of "drmas-gloo": rank 0 sends every tensor to the engine's workers, the other ranks only iterate.

It has the shape of vLLM's trainer engines (`trainer_init`, `send_weights`, `shutdown`) and is registered beside them, so that
NCCL is another name and another init info. It doesn't derive from vLLM's base class: that import costs a trainer seconds and
half a gigabyte for nothing it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch

from drmas.errors import EngineDied, EngineError, SyncError
from drmas.weights.source import CheckedSource
from drmas.weights.wire import BACKEND, LOOPBACK, Bucket, GlooInit, GlooUpdate, Group, Store, checksum, plan_buckets


class Client(Protocol):
    """vLLM's control protocol (`VLLMWeightSyncClient`)."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass
class GlooTrainerInit:
    """`rank` is the trainer's rank (0 sends); `world_size` counts the sender and all workers."""

    backend: ClassVar[str] = BACKEND

    rank: int
    world_size: int
    bucket_bytes: int
    timeout_seconds: float

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class GlooTrainer:
    """One connection to one engine. After an error it is of no further use: shut it down and make a new one."""

    def __init__(self, init_info: GlooTrainerInit, *, client: Client, source: CheckedSource) -> None:
        self._init, self._client, self._source = init_info, client, source
        self._group: Group | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)  # reused by every bucket: fresh memory costs more than the copy

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInit, *, client: Client, source: CheckedSource) -> GlooTrainer:
        """Called on every trainer rank; on the sender it returns when all workers have joined the group."""
        trainer = cls(init_info, client=client, source=source)
        if init_info.is_sender:
            trainer._connect()
        return trainer

    def send_weights(self) -> None:
        """One update: start, every bucket, finish. Called on every trainer rank.

        SyncError: the weights themselves are at fault (a tensor isn't finite, they don't fit the engine's model, they arrived
        corrupt). RuntimeError: the group broke; where that shows before the first tensor, the source wasn't touched. The
        client's errors pass through.
        """
        if not self._init.is_sender:
            for _ in self._source:
                pass
            return
        update = GlooUpdate.of([(meta.name, meta.dtype, meta.shape) for meta in self._source.metadata()])
        self._client.start_weight_update()
        receiving = _in_background(self._client.update_weights, asdict(update))
        try:
            self._agree()
            self._broadcast(plan_buckets(update, self._init.bucket_bytes), iter(self._source))
        except _Refused:
            raise SyncError(_reason(receiving) or "the engine refused the weights and didn't say why") from None
        except SyncError:  # what the sender itself refused to send; the engine's error is only the consequence
            raise
        except RuntimeError as error:
            reason = _reason(receiving)
            raise RuntimeError(f"the transfer broke: {error}" + (f" ({reason})" if reason else "")) from error
        receiving.result()
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _connect(self) -> None:
        timeout = self._init.timeout_seconds
        store = Store(timeout)
        init = GlooInit(LOOPBACK, store.port, 1, self._init.world_size, self._init.bucket_bytes, timeout)
        joining = _in_background(self._client.init_weight_transfer_engine, asdict(init))
        try:
            self._group = Group(store.store, rank=0, world_size=self._init.world_size, timeout_seconds=timeout)
        except RuntimeError as error:
            raise RuntimeError(_reason(joining) or f"no group with the engine's workers: {error}") from error
        joining.result()

    def _broadcast(self, buckets: Iterator[Bucket], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for bucket in buckets:
            try:
                payload = self._fill(bucket, tensors)
            except BaseException:
                self._group.vote(True)
                raise
            self._agree(checksum(payload))
            self._group.broadcast(payload)
        self._agree()

    def _fill(self, bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """The bucket's bytes [num_bytes] uint8, valid until the next call; of a single tensor, that tensor's own memory."""
        if len(bucket.slots) == 1:
            _, tensor = next(tensors)
            return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if self._buffer.numel() < bucket.num_bytes:
            self._buffer = torch.zeros(self._init.bucket_bytes, dtype=torch.uint8)
        payload = self._buffer[: bucket.num_bytes]
        for slot in bucket.slots:
            _, tensor = next(tensors)
            slot.view(payload).copy_(tensor.detach())
        return payload

    def _agree(self, crc: int = 0) -> None:
        going_on, _ = self._group.vote(False, crc)
        if not going_on:
            raise _Refused


class _Refused(Exception):
    """A worker voted against going on; its own error arrives through the control channel."""


def _in_background(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run `call` in a thread that nothing waits for: a broken group may leave it blocked until the client's own timeout."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:  # handed to whoever asks the future
            future.set_exception(error)

    threading.Thread(target=run, name="weight-update", daemon=True).start()
    return future


def _reason(call: Future[Any]) -> str:
    """What the engine says went wrong, if it says so soon: it knows more than a broken group does. EngineDied passes."""
    try:
        call.result(timeout=5.0)
    except EngineDied:
        raise
    except (EngineError, TimeoutError) as error:
        return str(error)
    return ""
