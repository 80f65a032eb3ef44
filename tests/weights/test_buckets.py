"""Both ends of the transports of whole tensors, without engines: votes of several workers, odd tensors, ways of a GPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from drmas.config.cluster import SyncConfig
from drmas.errors import SyncError
from drmas.weights import broadcast, filling, receiver, shared_memory
from drmas.weights.broadcast import BroadcastInbox, BroadcastOutbox, NcclWay
from drmas.weights.buckets import BucketTransport
from drmas.weights.checksum import PIECE_BYTES, checksum
from drmas.weights.choice import open_transport
from drmas.weights.filling import Filler
from drmas.weights.meeting import Meeting
from drmas.weights.shared_memory import CudaInbox, CudaOutbox
from drmas.weights.source import CheckedSource
from drmas.weights.wire import Update, plan_buckets
from tests.weights.ends import CPU, Client, Tensors, push, stage

ODD = [
    ("scalar", torch.tensor(3.5, dtype=torch.float64)),
    ("three", torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16)),
    ("nothing", torch.empty(0, 3)),
    ("transposed", torch.arange(12.0).view(3, 4).t()),
    ("cut", torch.arange(11.0, dtype=torch.float32).bfloat16()[1:]),
    ("large", torch.randn(3 * PIECE_BYTES // 8 + 5, generator=torch.Generator().manual_seed(1))),
    ("last", torch.full((7,), -1.0, dtype=torch.float16)),
]


@pytest.fixture(params=["broadcast", "shared-memory", "disk"])
def pair(request, tmp_path):
    """make(tensors, engines, workers, **settings): a transport and its client."""
    made: list[tuple[Any, Client]] = []

    def make(tensors=ODD, engines: int = 1, workers: int = 1, **settings):
        config = SyncConfig(**{"bucket_bytes": 1024, "timeout_seconds": 20, **settings})
        transport = open_transport(request.param, Tensors(tensors), config, policy="main", folder=tmp_path / "updates")
        made.append((transport, Client(engines, workers)))
        return made[-1]

    yield make
    for transport, client in made:
        transport.close()
        client.close()


def has(worker, tensors) -> bool:
    return list(worker.model) == [name for name, _ in tensors] and all(
        torch.equal(worker.model[name], tensor) and worker.model[name].dtype == tensor.dtype for name, tensor in tensors
    )


@pytest.mark.parametrize("bucket_bytes", [1024, 4 * PIECE_BYTES])
def test_tensors_of_any_shape_dtype_and_place_arrive_as_they_are(pair, bucket_bytes):
    transport, client = pair(bucket_bytes=bucket_bytes)
    assert push(transport, client) == sum(tensor.nbytes for _, tensor in ODD)
    assert has(client.workers[0], ODD)
    assert client.calls == ["init", "start", "update", "finish"]


@pytest.mark.parametrize("staging", [False, True])
def test_all_workers_of_all_engines_have_it_or_none(pair, staging):
    transport, client = pair(engines=2, workers=2)
    client.workers[3].refuses = "three"
    if staging:
        stage(transport, client, 1)
    with pytest.raises(SyncError, match="worker 1 of engine 1: three doesn't fit"):
        push(transport, client)
    assert [worker.seen for worker in client.workers] == [0] * 4
    assert transport._source._source.passes == 1
    client.workers[3].refuses = ""
    transport.close()
    push(transport, client)
    assert all(has(worker, ODD) for worker in client.workers)


def test_staged_is_what_was_there_when_it_was_staged(pair):
    tensors = [(name, tensor.clone()) for name, tensor in ODD]
    transport, client = pair(tensors)
    stage(transport, client, 4)
    assert client.workers[0].model == {}
    for _, tensor in tensors:
        tensor.zero_()
    assert push(transport, client, 4) == sum(tensor.nbytes for _, tensor in ODD)
    assert has(client.workers[0], ODD)
    assert client.version == "4"
    push(transport, client, 5)
    assert has(client.workers[0], tensors)


@pytest.mark.parametrize("bad", ["scalar", "cut", "large", "last"])
def test_a_tensor_that_is_not_finite_is_named_and_nothing_is_loaded(pair, bad):
    tensors = [(name, tensor.clone()) for name, tensor in ODD]
    dict(tensors)[bad].view(-1)[-1] = float("inf")
    transport, client = pair(tensors, bucket_bytes=4 * PIECE_BYTES)
    with pytest.raises(SyncError, match=f"{bad} holds NaN or Inf"):
        push(transport, client)
    assert client.workers[0].seen == 0


@pytest.mark.parametrize("staging", [False, True])
def test_an_error_of_the_source_is_the_trainers_own_and_said_at_once(pair, staging):
    class Breaks(Tensors):
        def __iter__(self):
            yield from self.tensors[:3]
            raise torch.OutOfMemoryError("of the gather")

    transport, client = pair(timeout_seconds=60)
    transport._source = CheckedSource(Breaks(ODD))
    started = time.monotonic()
    with pytest.raises(SyncError, match="OutOfMemoryError: of the gather"):
        stage(transport, client, 1) if staging else push(transport, client)
    assert time.monotonic() - started < 30
    assert client.workers[0].seen == 0


def test_what_fails_in_a_worker_while_it_stages_is_said_and_at_once(pair, monkeypatch, caplog):
    transport, client = pair(workers=2, timeout_seconds=60)
    corruption, started = receiver._corruption, time.monotonic()

    def fail(bucket, *more):
        if "large" in bucket.content and threading.current_thread().name == "staging":
            raise MemoryError("no room for a bucket")
        return corruption(bucket, *more)

    monkeypatch.setattr(receiver, "_corruption", fail)
    with pytest.raises(RuntimeError, match=r"worker \d of engine 0 MemoryError: no room for a bucket"):
        stage(transport, client, 1)
    assert time.monotonic() - started < 30
    assert "staging: MemoryError: no room for a bucket" in caplog.text


def test_a_single_bucket_that_arrives_corrupt_at_one_worker_is_loaded_by_none(nccl, monkeypatch, tmp_path):
    """Over NCCL, where buckets are loaded as they come: the last one only when all ends have all of theirs."""
    client, corruption = Client(workers=2), receiver._corruption
    config = SyncConfig(bucket_bytes=2**24, timeout_seconds=20)
    transport = open_transport("broadcast", Tensors(ODD), config, policy="main", folder=tmp_path)
    once = iter(["arrived corrupt"])
    monkeypatch.setattr(receiver, "_corruption", lambda *each: next(once, "") or corruption(*each))
    with pytest.raises(SyncError, match=r"worker \d of engine 0: arrived corrupt"):
        push(transport, client)
    assert [worker.seen for worker in client.workers] == [0, 0]
    transport.close()
    client.close()


def test_a_source_without_tensors_is_refused(pair):
    transport, client = pair([])
    with pytest.raises(SyncError, match="names no tensors"):
        push(transport, client)


def test_a_bucket_on_its_way_is_not_filled_again():
    metadata = [(str(i), torch.float32, (10,)) for i in range(8)]
    outbox = BroadcastOutbox(CPU)
    rooms = [outbox.room(bucket) for bucket in plan_buckets(Update.of(metadata), 128)]
    assert len(rooms) == 4
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairwise(rooms))


def test_torch_has_its_threads_after_a_bucket_was_filled(monkeypatch):
    inside, before, is_finite = [], torch.get_num_threads(), filling.is_finite
    monkeypatch.setattr(filling, "is_finite", lambda part: inside.append(torch.get_num_threads()) or is_finite(part))
    tensor = torch.zeros(PIECE_BYTES)
    (bucket,) = plan_buckets(Update.of(Tensors([("zeros", tensor)]).metadata()), 2**30)
    filler = Filler(2)
    torch.set_num_threads(3)
    try:
        filler.fill(torch.empty(bucket.num_bytes, dtype=torch.uint8), [(bucket.slots[0], tensor)])
        with ThreadPoolExecutor(1) as new:
            assert new.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
        filler.close()
    assert inside == [1] * 4


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("names", [["three", "large", "last"], ["large"], ["scalar"]])
def test_a_bucket_is_filled_alike_by_any_number_of_threads(threads, names):
    tensors = [(name, tensor) for name, tensor in ODD if name in names]
    (bucket,) = plan_buckets(Update.of(Tensors(tensors).metadata()), 2**30)
    payload = torch.full((bucket.num_bytes,), 255, dtype=torch.uint8)
    filler = Filler(threads)
    total, bad = filler.fill(payload, [(slot, tensor) for slot, (_, tensor) in zip(bucket.slots, tensors, strict=True)])
    filler.close()
    assert (total, bad) == (checksum(payload), None)
    for slot, (_, tensor) in zip(bucket.slots, tensors, strict=True):
        assert torch.equal(slot.view(payload), tensor)
    covered = torch.cat([torch.arange(slot.offset, slot.offset + slot.num_bytes) for slot in bucket.slots])
    gaps = torch.ones(bucket.num_bytes, dtype=torch.bool)
    gaps[covered] = False
    assert not payload[gaps].any()


class FakeNccl:
    """What `dist.ProcessGroupNCCL` is to the transport; its broadcasts go over the meeting."""

    made: ClassVar[list[FakeNccl]] = []
    meetings: ClassVar[dict[int, Meeting]] = {}
    hangs = False

    class Options:
        pass

    def __init__(self, store: dist.Store, number: int, size: int, options: Any) -> None:
        self.store, self.number, self.size, self.options, self.waited, self.aborted = store, number, size, options, [], False
        self.watched, self.connected = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1", []
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """As NCCL's: returns when all ends have come."""
        self.store.add("came", 1)
        limit = time.monotonic() + 10
        while self.store.add("came", 0) < self.size * -(-self.store.add("came", 0) // self.size):
            assert time.monotonic() < limit
            time.sleep(0.01)
        self.connected.append(device)

    def broadcast(self, buffers: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        assert (options.rootRank, options.rootTensor) == (0, 0)
        return FakeWork(self, self.meetings[self.number].broadcast(buffers[0], "by the fake"))

    def abort(self) -> None:
        self.aborted = True


class FakeWork:
    def __init__(self, group: FakeNccl, finish: Callable[[], None]) -> None:
        self.group, self.finish = group, finish

    def wait(self, timeout: timedelta) -> None:
        self.group.waited.append(timeout)
        self.finish()
        if self.group.hangs and self.group.number:
            raise RuntimeError("[/src/NCCL.cpp:1] timed out")


@pytest.fixture
def nccl(monkeypatch):
    """NCCL between ends whose memory is the host's."""
    monkeypatch.setattr(FakeNccl, "made", [])
    monkeypatch.setattr(FakeNccl, "meetings", {})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))

    def way(meeting: Meeting, device: torch.device) -> NcclWay:
        FakeNccl.meetings[meeting.number] = meeting
        return NcclWay(meeting, CPU)

    def inbox(init: dict[str, Any], meeting: Meeting, device: torch.device) -> BroadcastInbox:
        made = BroadcastInbox(meeting, CPU)
        made.staged = False
        return made

    monkeypatch.setattr(broadcast, "way", way)
    monkeypatch.setattr(receiver, "_inbox", inbox)
    return FakeNccl


def test_over_nccl_buckets_are_loaded_as_they_come(nccl, tmp_path):
    client = Client(workers=2)
    config = SyncConfig(bucket_bytes=1024, timeout_seconds=20)
    transport = open_transport("broadcast", Tensors(ODD), config, policy="main", folder=tmp_path)
    for version in (1, 2):
        push(transport, client, version)
        assert all(has(worker, ODD) for worker in client.workers)
    assert sorted((group.number, group.size) for group in nccl.made) == [(0, 3), (1, 3), (2, 3)]  # one for both pushes
    assert [(group.watched, group.connected) for group in nccl.made] == [(False, [CPU])] * 3
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert {group.options._timeout for group in nccl.made} == {timedelta(seconds=20)}
    assert {wait for group in nccl.made for wait in group.waited} == {timedelta(seconds=20)}
    transport.close()
    assert [group.aborted for group in nccl.made if group.number == 0] == [True]
    client.close()


def test_a_communicator_that_never_comes_to_life_is_given_up(nccl, monkeypatch, tmp_path):
    monkeypatch.setattr(nccl, "eager_connect_single_device", lambda self, device: time.sleep(30))
    client, config = Client(), SyncConfig(bucket_bytes=1024, timeout_seconds=2)
    transport = open_transport("broadcast", Tensors(ODD), config, policy="main", folder=tmp_path)
    started = time.monotonic()
    with pytest.raises((SyncError, RuntimeError), match="NCCL made no communicator within 2 s"):
        push(transport, client)
    assert time.monotonic() - started < 25
    assert all(group.aborted for group in nccl.made)
    transport.close()
    client.close()


def test_over_nccl_a_failure_in_the_middle_is_named_and_leaves_what_was_loaded(nccl, monkeypatch, tmp_path):
    client = Client()
    config = SyncConfig(bucket_bytes=1024, timeout_seconds=20)
    transport = open_transport("broadcast", Tensors(ODD), config, policy="main", folder=tmp_path)
    fill, contents = BucketTransport._fill, []

    def hang_at_third(self, bucket, tensors):
        contents.append(bucket.content)
        monkeypatch.setattr(nccl, "hangs", len(contents) == 3)
        return fill(self, bucket, tensors)

    monkeypatch.setattr(BucketTransport, "_fill", hang_at_third)
    with pytest.raises((SyncError, RuntimeError), match=r"waited for .*timed out"):
        push(transport, client)
    assert 0 < client.workers[0].seen < len(ODD)
    transport.close()
    client.close()


def test_between_processes_on_one_gpu_a_bucket_is_copied_before_the_next_is_filled(monkeypatch):
    opened: list[torch.Tensor] = []

    def handle(buffer):
        opened.append(buffer)
        return [len(opened) - 1]

    monkeypatch.setattr(shared_memory, "_gpu", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(shared_memory, "_handle", handle)
    monkeypatch.setattr(shared_memory, "_opened", lambda said, device: opened[said[0]])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(receiver, "_inbox", lambda init, meeting, device: CudaInbox(meeting))
    client, outbox = Client(workers=2), CudaOutbox(torch.device("cpu", 1))
    transport = BucketTransport(Tensors(ODD), outbox, bucket_bytes=64, timeout_seconds=20, key="policies.main.sync")
    for version in (1, 2):
        push(transport, client, version)
        assert all(has(worker, ODD) for worker in client.workers)
    assert len(opened) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    transport.close()
    with pytest.raises(SyncError, match=r"worker \d of engine 0: .*doesn't see the trainer's GPU GPU-1.*policies\.main\.sync"):
        push(transport, client, 3)
    transport.close()
    client.close()


def test_a_folder_of_another_run_is_left_alone(tmp_path):
    folder = Path(tmp_path) / "updates"
    (folder / "mine").mkdir(parents=True)
    client = Client()
    transport = open_transport("disk", Tensors(ODD), policy="main", folder=folder)
    push(transport, client)
    transport.close()
    client.close()
    assert [path.name for path in folder.iterdir()] == ["mine"]
