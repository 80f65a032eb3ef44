"""The transport "shards": every trainer rank sends each engine worker what this one needs of the rank's own shard.

    rank 0: leads         what follows ─▶ the policy's ranks: follow
      │ control channel                       │
      ▼                                       ▼
    engines ─▶ their workers ◀── a meeting of all: votes, and messages from end to end ──▶

Nothing is gathered on the trainer, and nothing reaches a worker that it doesn't keep. Rank 0 has the engines' control channel;
where it isn't one of the policy's ranks it sends nothing and votes only. Followers wait for its word: meet, update, or that the
push is over. The plan is `core.resharding`'s; what the ends do in a round is `meeting`'s; a worker's side is `shard_worker`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from drmas.core.resharding import Message, Tensors, TrainerLayout, WorkerLayout
from drmas.errors import SyncError
from drmas.weights.meeting import Meeting, Parcel, Refused
from drmas.weights.shard_way import shard_way
from drmas.weights.shard_wire import ShardInit, Terms, content, pack, part
from drmas.weights.source import NOT_FINITE, is_finite
from drmas.weights.transport import SyncClient, Transport, explained, has_died, in_background, reason
from drmas.weights.wire import Store, address_towards, store_at

CPU = torch.device("cpu")


class Shards(Protocol):
    """What `policy.shard_source.ShardSource` is: a rank's own part of the policy's weights."""

    dtype: torch.dtype
    tensors: Tensors
    layout: TrainerLayout
    rank: int

    def settle(self) -> None: ...

    def shard(self, parameter: int) -> torch.Tensor: ...


class _Link:
    """A meeting with the workers of the engines behind one client, and what this rank sends there, round by round."""

    def __init__(self, number: int, meeting: Meeting, terms: Terms, rank: int | None, device: torch.device) -> None:
        self.number, self.meeting, self.terms = number, meeting, terms
        self.way = shard_way(meeting, device)
        plan = terms.plan()
        self.digest = plan.digest
        self.rounds = [[message for message in messages if message.source == rank] for messages in plan.rounds]
        self.bytes = 0 if rank is None else plan.sent(rank)

    def close(self) -> None:
        self.way.close()
        self.meeting.close()


class ShardTransport(Transport):
    """On every rank of the policy, and on rank 0 of the job. After an error, `close` it on rank 0; the next push meets anew."""

    def __init__(
        self,
        source: Shards | None,
        tell: dist.ProcessGroup | None,
        *,
        trainers: Sequence[int],
        engine_workers: int,
        bucket_bytes: int,
        timeout_seconds: float,
        device: torch.device = CPU,
    ) -> None:
        """Collective over `tell`: rank 0 and the policy's ranks, in the job's order; None where that is this process alone.

        `source`: this rank's shards; None on a rank 0 that isn't one of `trainers`, the policy's ranks in the job.
        `engine_workers`: how many each engine has. `device`: where messages are packed, this rank's GPU or the host.
        """
        self.can_stage, self._device, self._blamed = device.type == "cpu", device, ""
        self._source, self._tell, self._trainers = source, tell, tuple(trainers)
        self._engine_workers, self._bucket_bytes, self._timeout_seconds = engine_workers, bucket_bytes, timeout_seconds
        described = None if source is None else (source.tensors, source.layout, source.dtype)
        self._model = self._told(described, by=0 if self._trainers[0] == 0 else 1)
        self._client: SyncClient | None = None
        self._store: Store | None = None
        self._link: _Link | None = None
        self._links = 0
        self._staged: int | None = None
        self._is_staged = self._may_follow = False

    def begin(self, version: int, *, staging: bool = False) -> None:
        self._is_staged = self._staged == version and not staging
        self._staged = version if staging else None
        self._may_follow, self._blamed = not self._leads, ""

    def stage(self, client: SyncClient | None) -> None:
        if client is None:
            return
        link = self._linked(client)
        with self._explained(link, lambda: in_background(client.get_weight_version), is_over=has_died):
            client.stage_weights({})
            self._told({"do": "transfer", "link": link.number})
            self._transfer(link)

    def unstage(self) -> None:
        self._staged = None

    def send(self, client: SyncClient | None, version: int) -> int:
        """As the interface says; without a client, follow rank 0, which has it."""
        if client is None:
            return self._follow()
        is_staged = self._is_staged and client is self._client
        link = self._linked(client)
        client.start_weight_update()
        self._told({"do": "agree" if is_staged else "transfer", "link": link.number})
        receiving = in_background(client.update_weights, {"staged": is_staged})
        with self._explained(link, lambda: receiving, is_over=Future.done):
            self._agree(link) if is_staged else self._transfer(link)
        receiving.result()
        client.finish_weight_update(str(version))
        return link.bytes

    def settle(self) -> None:
        """Rank 0 lets the others go on, whatever became of it; until then they follow."""
        if self._leads:
            with contextlib.suppress(RuntimeError):  # one of them is gone, which the next collective says as well
                self._told(None)
        elif self._may_follow:
            self._follow()

    def close(self) -> None:
        """Leave the meeting; the next push makes a new one."""
        if self._link is not None:
            self._link.close()
        self._link = self._client = self._store = None

    @property
    def _leads(self) -> bool:
        return self._tell is None or self._tell.rank() == 0

    def _told(self, word: Any, *, by: int = 0) -> Any:
        """What rank `by` of the group says, on every rank. RuntimeError: a rank is gone."""
        if self._tell is None:
            return word
        words = [word]
        try:
            dist.broadcast_object_list(words, group=self._tell, group_src=by)
        except RuntimeError as error:
            trouble = "a trainer rank is gone; its own output says why"
            raise RuntimeError(f"{trouble} ({self._blamed})" if self._blamed else trouble) from error
        return words[0]

    def _follow(self) -> int:
        """Do what rank 0 says until it says that there is no more. Returns the bytes sent."""
        self._may_follow, sent = False, 0
        while (word := self._told(None)) is not None:
            try:
                sent += self._heed(word)
            except (Refused, RuntimeError):  # rank 0 hears of it, and says it
                self.close()
        return sent

    def _heed(self, word: dict[str, Any]) -> int:
        if word["do"] == "meet":
            self.close()
            terms = self._terms(word["engines"])
            store = store_at(word["address"], word["port"], self._timeout_seconds)
            self._link = self._meet(word["link"], store, terms, own_address=address_towards(word["address"]))
        elif self._link is not None and self._link.number == word["link"]:  # else rank 0 will find one end missing
            self._agree(self._link) if word["do"] == "agree" else self._transfer(self._link)
            return self._link.bytes
        return 0

    @contextlib.contextmanager
    def _explained(
        self, link: _Link, call: Callable[[], Future[Any]], *, is_over: Callable[[Future[Any]], bool]
    ) -> Iterator[None]:
        """As `transport.explained` does; what it says is kept for `_told`."""
        try:
            with explained(link.meeting, call, is_over=is_over):
                yield
        except RuntimeError as error:
            self._blamed = str(error).partition("\n")[0]
            raise

    def _linked(self, client: SyncClient) -> _Link:
        if self._client is not client:
            self._connect(client)
        return self._link

    def _connect(self, client: SyncClient) -> None:
        """A meeting with the engines' workers, for the life of their processes."""
        self.close()
        self._links += 1
        engines, rest = divmod(client.num_workers, self._engine_workers)
        if rest:
            raise SyncError(f"the engines have {client.num_workers} workers; expected a multiple of {self._engine_workers}")
        terms, address = self._terms(engines), client.trainer_address
        self._store = Store(self._timeout_seconds, address)
        self._told({"do": "meet", "link": self._links, "engines": engines, "address": address, "port": self._store.port})
        offset, timeout = terms.ends.worker(0), self._timeout_seconds
        init = ShardInit("shards", address, self._store.port, offset, timeout, terms.to_json(), self._device.type)
        joining = in_background(client.init_weight_transfer_engine, asdict(init))
        try:
            self._link = self._meet(self._links, self._store.store, terms, own_address=address)
        except RuntimeError as error:
            raise RuntimeError(reason(joining) or str(error)) from error
        joining.result()
        self._client = client

    def _terms(self, engines: int) -> Terms:
        tensors, layout, dtype = self._model
        workers = WorkerLayout(self._engine_workers, engines)
        return Terms(tensors, layout, workers, self._trainers, dtype, self._bucket_bytes)

    def _meet(self, link: int, store: dist.Store, terms: Terms, *, own_address: str) -> _Link:
        rank = None if self._source is None else self._source.rank
        number = 0 if rank is None else terms.ends.trainer(rank)
        meeting = Meeting(store, terms.ends, number, address=own_address, timeout_seconds=self._timeout_seconds)
        return _Link(link, meeting, terms, rank, self._device)

    def _transfer(self, link: _Link) -> None:
        """This rank's part of an update, the same on all. While a round is on its way, the next one is packed."""
        link.meeting.agree(self._fault(link), plan=link.digest)
        parcels, fault = self._packed(link.rounds[0], link.terms)
        for following in [*link.rounds[1:], []]:
            link.meeting.agree(fault)
            wait = link.way.exchange(parcels, [])
            packed, fault = self._packed(following, link.terms)
            wait()
            parcels = packed
        link.meeting.agree()

    def _agree(self, link: _Link) -> None:
        """To what the workers have already."""
        link.meeting.agree(content="what was staged")

    def _fault(self, link: _Link) -> str:
        """What is wrong with what this rank is to send; "" if nothing is."""
        pieces = {piece for messages in link.rounds for message in messages for piece in message.pieces}
        try:
            if self._source is not None:
                self._source.settle()
                shard = lru_cache(1)(self._source.shard)
                for piece in sorted(pieces):
                    if not is_finite(part(piece, shard(piece.parameter))):
                        return NOT_FINITE.format(name=link.terms.tensors.names[piece.tensor])
        except Exception as error:  # the others are about to wait for this rank
            return f"{type(error).__name__}: {error}"
        return ""

    def _packed(self, messages: Sequence[Message], terms: Terms) -> tuple[list[Parcel], str]:
        """The messages, and what is wrong with them; "" if nothing is."""
        worker, parcels = terms.ends.worker, []
        try:
            shard = cache(self._source.shard) if messages else None  # adapters are merged anew by every call
            for message in messages:
                buffer = pack(message, shard, terms.dtype, self._device)
                parcels.append(Parcel(worker(message.destination), buffer, content(message, terms.tensors)))
        except Exception as error:  # the others are about to wait for this rank
            return [], f"{type(error).__name__}: {error}"
        return parcels, ""
