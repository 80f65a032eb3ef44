"""The trainer's side of the transports that send whole tensors: broadcast, shared-memory and disk.

    source (every rank) ─▶ the sender: fill a bucket · check that it is finite · checksum ─▶ an outbox ─▶ the workers

Rank 0 sends; the other ranks only iterate the source, which is a collective of theirs. All ends vote before every bucket, so
that a fault stops everybody at the same place. What differs between the three is an `Outbox`; a worker's side is `receiver`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from drmas.errors import SyncError
from drmas.weights.carrier import Outbox, Unusable
from drmas.weights.filling import Filler, bytes_of
from drmas.weights.meeting import Ends, Meeting, Refused
from drmas.weights.source import NOT_FINITE, CheckedSource, Source
from drmas.weights.transport import SyncClient, Transport, explained, has_died, in_background, reason
from drmas.weights.wire import Bucket, Store, Update, digest, plan_buckets


class BucketTransport(Transport):
    """On every trainer rank."""

    def __init__(
        self, source: Source, outbox: Outbox, *, bucket_bytes: int, timeout_seconds: float, key: str = "policies.NAME.sync"
    ) -> None:
        """`key`: where the policy's configuration says how to sync."""
        self.can_stage = outbox.device.type == "cpu"
        self._source, self._outbox, self._key = CheckedSource(source), outbox, key
        self._filler = Filler(torch.get_num_threads())
        self._bucket_bytes, self._timeout_seconds = bucket_bytes, timeout_seconds
        self._staged: int | None = None
        self._owed = 1  # passes over the source, of every rank
        self._client: SyncClient | None = None
        self._store: Store | None = None
        self._meeting: Meeting | None = None

    @property
    def untouched(self) -> bool:
        """The source can't be iterated once more than on the other ranks."""
        return self._owed == 1 and self._source.untouched

    @property
    def from_stage(self) -> bool:
        return self._owed == 0

    def begin(self, version: int, *, staging: bool = False) -> None:
        self._owed = 0 if self._staged == version and not staging else 1
        self._staged = version if staging else None

    def stage(self, client: SyncClient | None) -> None:
        if client is None:
            return
        update, buckets, said = self._prepare(client)
        with self._explained(lambda: in_background(client.get_weight_version), is_over=has_died):
            client.stage_weights(said)
            self._transfer(update, buckets)

    def unstage(self) -> None:
        self._staged = None

    def send(self, client: SyncClient | None, version: int) -> int:
        if client is None:
            return 0
        staged = self._owed == 0
        if staged and client is not self._client:
            raise RuntimeError("the engine that the weights were staged in is gone")
        update, buckets, said = self._prepare(client)
        client.start_weight_update()
        receiving = in_background(client.update_weights, {"staged": True} if staged else said)
        with self._explained(lambda: receiving, is_over=Future.done):
            if staged:
                self._meeting.agree(content="what was staged")
            else:
                self._transfer(update, buckets)
        receiving.result()
        client.finish_weight_update(str(version))
        self._outbox.end()
        return sum(slot.num_bytes for bucket in buckets for slot in bucket.slots)

    def settle(self) -> None:
        self._source.settle(self._owed)

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        self._outbox.close()
        self._filler.close()
        self._meeting = self._client = self._store = None

    def _prepare(self, client: SyncClient) -> tuple[Update, list[Bucket], dict[str, Any]]:
        """Connect, and describe what is about to be sent: for us, and for the workers. RuntimeError: there is no connection."""
        joining = self._connect(client) if self._client is not client else None
        update = Update.of([(meta.name, meta.dtype, meta.shape) for meta in self._source.metadata()])
        if not update.names:
            raise SyncError("the source names no tensors")
        buckets = plan_buckets(update, self._bucket_bytes)
        try:
            said = self._outbox.begin(self._meeting, buckets)
        except Unusable as error:
            raise SyncError(f"{error}; see {self._key}") from error
        except RuntimeError as error:
            raise RuntimeError((joining and reason(joining)) or str(error)) from error
        if joining is not None:
            joining.result()  # over NCCL the workers wait for our outbox, and it for them
            self._client = client
        return update, buckets, {"update": update.to_json(), "carrier": said}

    def _connect(self, client: SyncClient) -> Future[Any]:
        """A meeting with the engines' workers, for the life of their processes; the result says that they have joined."""
        self.close()
        engines = len(getattr(client, "clients", [client]))
        ends = Ends((0,), client.num_workers // engines, engines)
        timeout, address = self._timeout_seconds, client.trainer_address
        self._store = Store(timeout, address)
        init = {
            "transport": self._outbox.transport,
            "master_address": address,
            "master_port": self._store.port,
            "rank_offset": ends.worker(0),
            "timeout_seconds": timeout,
            "bucket_bytes": self._bucket_bytes,
            "engine_workers": ends.engine_workers,
            "engines": engines,
            "device": self._outbox.device.type,
            "key": self._key,
        }
        joining = in_background(client.init_weight_transfer_engine, init)
        try:
            self._meeting = Meeting(self._store.store, ends, 0, address=address, timeout_seconds=timeout)
        except RuntimeError as error:
            raise RuntimeError(reason(joining) or str(error)) from error
        return joining

    @contextlib.contextmanager
    def _explained(self, call: Callable[[], Future[Any]], *, is_over: Callable[[Future[Any]], bool]) -> Iterator[None]:
        """As `transport.explained` does, with where this transport is set."""
        try:
            with explained(self._meeting, call, is_over=is_over):
                yield
        except Unusable as error:
            raise SyncError(f"{error}; see {self._key}") from error

    def _transfer(self, update: Update, buckets: list[Bucket]) -> None:
        self._meeting.agree(plan=digest(self._outbox.transport, update, buckets), content=buckets[0].content)
        tensors = iter(self._source)
        for bucket in buckets:
            try:
                payload, checksum = self._fill(bucket, tensors)
                self._outbox.seal(bucket, payload)
            except BaseException as error:
                with contextlib.suppress(Refused, RuntimeError):
                    self._meeting.agree(str(error) or type(error).__name__)
                if isinstance(error, RuntimeError) and not isinstance(error, SyncError):  # ours, and no meeting that broke
                    raise SyncError(f"{type(error).__name__}: {error}") from error
                raise
            self._outbox.wait()
            self._meeting.agree(word=checksum, content=bucket.content)
            self._outbox.deliver(bucket, payload)
        for _ in tensors:  # to its end, as on the other ranks
            pass
        self._outbox.wait()
        self._meeting.agree(content="what was sent")

    def _fill(self, bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, int]:
        """A bucket's bytes [num_bytes] uint8, valid until the next but one, and their checksum. SyncError: one isn't finite."""
        given = [next(tensors)[1].detach() for _ in bucket.slots]
        payload = self._outbox.room(bucket)
        if payload is None:
            payload = bytes_of(given[0].to(self._outbox.device))
        total, bad = self._filler.fill(payload, list(zip(bucket.slots, given, strict=True)))
        if bad is not None:
            raise SyncError(NOT_FINITE.format(name=bad))
        return payload, total
