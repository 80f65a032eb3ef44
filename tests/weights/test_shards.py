"""The shards transport between one trainer rank and engine workers in threads, which keep what they would load.

With real engines and several trainer ranks: test_shard_sync.
"""

from __future__ import annotations

import copy
import json
import threading
from math import prod

import pytest
import torch

from drmas.core.resharding import Parameter, Region, Tensors, TrainerLayout, WorkerLayout, trainer_regions, worker_regions
from drmas.errors import EngineDied, EngineError, SyncError
from drmas.weights import shard_wire, shards
from drmas.weights.meeting import Refused
from drmas.weights.part import Part
from drmas.weights.shard_wire import ShardInit, Terms, content, empty, pack, unpack
from drmas.weights.shard_worker import ShardReceiver
from drmas.weights.shards import ShardTransport
from drmas.weights.wire import LOOPBACK

TENSORS = Tensors(
    (
        Parameter(-1, "rows", (("embed", (70, 6)),)),
        Parameter(0, "copy", (("norm", (6,)),)),
        Parameter(0, "qkv", (("q", (8, 6)), ("k", (4, 6)), ("v", (4, 6)))),
        Parameter(0, "qkv", (("bq", (8,)), ("bk", (4,)), ("bv", (4,)))),
        Parameter(0, "columns", (("o", (6, 8)),)),
        Parameter(0, "gate_up", (("gate", (10, 6)), ("up", (10, 6)))),
    ),
    layers=1,
    kv_heads=2,
    itemsize=4,
)


CPU = torch.device("cpu")


class Source:
    """One rank's shards of random tensors, which are `whole`."""

    dtype, tensors, layout, rank = torch.float32, TENSORS, TrainerLayout(), 0

    def __init__(self) -> None:
        self.settled = 0
        self.draw(0)

    def draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.whole = {
            name: torch.randn(shape, generator=generator) for name, shape in zip(TENSORS.names, TENSORS.shapes, strict=True)
        }

    def settle(self) -> None:
        self.settled += 1

    def shard(self, parameter: int) -> torch.Tensor:
        tensors = [(*shape, 1)[:2] for _, shape in TENSORS.parameters[parameter].tensors]
        shard = torch.zeros(sum(rows for rows, _ in tensors), tensors[0][1])
        for held in trainer_regions(TENSORS, self.layout, 0):
            if held.parameter == parameter:
                values = cut(self.whole[TENSORS.names[held.tensor]], held.region)
                shard[held.row :, held.column :][: values.shape[0], : values.shape[1]] = values
        return shard


class Workers:
    """Engines of two workers each, behind a client of vLLM's control protocol."""

    trainer_address = LOOPBACK

    def __init__(self, engines: int = 1) -> None:
        self.num_workers, self.calls, self.joined = 2 * engines, [], 0
        self.loaded: dict[int, dict[str, torch.Tensor]] = {}
        self.refusal: dict[int, str] = {}
        self._receivers: dict[int, ShardReceiver] = {}

    def init_weight_transfer_engine(self, init_info):
        init = ShardInit(**json.loads(json.dumps(init_info)))
        self.joined += 1

        def join(worker: int) -> None:
            self._receivers[worker] = ShardReceiver(init, init.rank_offset + worker, CPU)

        self._all(join)

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, update_info):
        self.calls.append("update")

        def receive(worker: int) -> None:
            def check(named) -> None:
                named = list(named)
                assert [name for name, _ in named] == TENSORS.names
                assert all(tensor.is_meta for _, tensor in named)
                if worker in self.refusal:
                    raise ValueError(self.refusal[worker])

            self.loaded[worker] = dict(self._receivers[worker].receive(update_info, check))

        self._all(receive)

    def stage_weights(self, update_info):
        self.calls.append("stage")
        for receiver in self._receivers.values():
            receiver.stage(update_info)

    def finish_weight_update(self, weight_version=None):
        self.calls.append(f"finish {weight_version}")

    def get_weight_version(self):
        return self.calls[-1].removeprefix("finish ")

    def _all(self, play) -> None:
        errors: list[str] = []

        def one(worker: int) -> None:
            try:
                play(worker)
            except (Refused, RuntimeError) as error:
                errors.append(f"worker {worker}: {error}")

        threads = [threading.Thread(target=one, args=(worker,)) for worker in range(self.num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise EngineError("; ".join(errors))


def make(source=None, *, bucket_bytes=200, timeout_seconds=20.0) -> ShardTransport:
    return ShardTransport(
        source or Source(), None, trainers=[0], engine_workers=2, bucket_bytes=bucket_bytes, timeout_seconds=timeout_seconds
    )


def cut(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """[rows, columns]"""
    return whole.reshape(len(whole), -1)[region.top : region.bottom, region.left : region.right]


def is_right(workers: Workers, source: Source) -> bool:
    for worker, loaded in workers.loaded.items():
        assert loaded.keys() == source.whole.keys()
        for name, region in zip(TENSORS.names, worker_regions(TENSORS, 2, worker % 2), strict=True):
            tensor = loaded[name]
            whole, found = source.whole[name], tensor.values if isinstance(tensor, Part) else tensor
            if tensor.shape != whole.shape or not torch.equal(found.flatten(), cut(whole, region).flatten()):
                return False
    return (
        all(loaded.keys() == source.whole.keys() for loaded in workers.loaded.values())
        and len(workers.loaded) == workers.num_workers
    )


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_every_worker_gets_its_part_of_every_tensor(engines, bucket_bytes):
    source, workers = Source(), Workers(engines)
    transport = make(source, bucket_bytes=bucket_bytes)
    for version in (1, 2):
        source.draw(version)
        sent = transport.send(workers, version)
        transport.settle()
        assert is_right(workers, source)
    whole = 4 * sum(map(prod, TENSORS.shapes))
    norm = 4 * 6
    assert sent == engines * (whole + norm)  # the norm goes to both workers of an engine, the rest is cut
    assert workers.calls == ["start", "update", "finish 1", "start", "update", "finish 2"]
    assert (workers.joined, source.settled) == (1, 2)
    transport.close()
    transport.close()


def test_another_client_is_met_anew():
    source, first, second = Source(), Workers(), Workers(2)
    transport = make(source)
    transport.send(first, 1)
    transport.send(second, 2)
    assert is_right(first, source)
    assert is_right(second, source)
    transport.close()
    transport.send(second, 3)
    assert second.joined == 2
    transport.close()


def test_weights_that_are_not_finite_are_refused_by_name_before_anything_is_sent(monkeypatch):
    source, workers = Source(), Workers()
    source.whole["up"][7, 3] = torch.inf
    packed = []
    monkeypatch.setattr(shards, "pack", lambda *arguments: packed.append(arguments))
    with pytest.raises(SyncError, match=r"^trainer rank 0: up holds NaN or Inf; the engine keeps the weights it has$"):
        make(source).send(workers, 1)
    assert packed == []
    assert workers.loaded == {}
    assert workers.calls == ["start", "update"]


def test_a_message_that_arrives_corrupt_is_noticed_and_nothing_is_loaded(monkeypatch):
    count = []

    def spoiled(*arguments):
        buffer = pack(*arguments)
        count.append(buffer)
        buffer[-3] ^= len(count) == 4
        return buffer

    monkeypatch.setattr(shards, "pack", spoiled)
    workers, transport = Workers(), make()
    with pytest.raises(SyncError, match=r"^worker \d of engine 0: \w+( to \w+)? from trainer rank 0 arrived corrupt: checksum"):
        transport.send(workers, 1)
    assert workers.loaded == {}
    transport.close()
    transport.send(workers, 2)
    assert len(workers.loaded) == 2


def test_a_tensor_takes_room_from_its_first_piece_until_it_is_complete(monkeypatch):
    """On a GPU a worker has no room for all of its part beside the model."""
    live, most = set(), []
    room, complete = ShardReceiver._room, ShardReceiver._complete

    def counted(self, number, device):
        if device.type != "meta":
            live.add((id(self), number))
            most.append(len(live))
        return room(self, number, device)

    def completed(self, tensors, missing):
        done = [number for number, elements in missing.items() if not elements]
        yield from complete(self, tensors, missing)
        live.difference_update((id(self), number) for number in done)

    monkeypatch.setattr(ShardReceiver, "_room", counted)
    monkeypatch.setattr(ShardReceiver, "_complete", completed)
    workers = Workers()
    make(bucket_bytes=300).send(workers, 1)
    assert len(workers.loaded) == 2
    assert max(most) < 2 * len(TENSORS.names)


def test_a_fault_of_ours_while_packing_stops_all_ends(monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(shards, "pack", fail)
    with pytest.raises(SyncError, match=r"^trainer rank 0: MemoryError: no room$"):
        make().send(Workers(), 1)


def test_a_worker_that_cannot_take_the_weights_says_so_for_all():
    workers = Workers()
    workers.refusal[1] = "q [8, 6] doesn't fit the engine's model"
    with pytest.raises(SyncError, match=r"^worker 1 of engine 0: q \[8, 6\] doesn't fit the engine's model$"):
        make().send(workers, 1)
    assert workers.loaded == {}


def test_a_worker_with_another_plan_is_refused():
    workers, transport = Workers(), make()
    transport.send(workers, 1)
    workers._receivers[0]._digest += 1
    with pytest.raises(SyncError, match=r"trainer rank 0 is about to send by plan .*, but worker 0 of engine 0 .*same drmas"):
        transport.send(workers, 2)


def test_an_engine_that_refuses_the_update_costs_no_transfer(monkeypatch):
    workers, transport = Workers(), make()

    def refuse():
        raise EngineError("not paused")

    monkeypatch.setattr(workers, "start_weight_update", refuse)
    with pytest.raises(EngineError, match="not paused"):
        transport.send(workers, 1)
    monkeypatch.undo()
    transport.send(workers, 1)
    assert len(workers.loaded) == 2


def test_workers_that_do_not_come_are_named_within_the_timeout(monkeypatch):
    workers = Workers()
    monkeypatch.setattr(workers, "init_weight_transfer_engine", lambda _: threading.Event().wait(1))
    with pytest.raises(RuntimeError, match=r"no word from worker 0 of engine 0, worker 1 of engine 0 within 2 s"):
        make(timeout_seconds=2).send(workers, 1)


def test_an_engine_that_dies_while_it_receives_is_a_death(monkeypatch):
    workers = Workers()

    def die(_):
        raise EngineDied("engine main was killed by SIGKILL")

    monkeypatch.setattr(workers, "update_weights", die)
    with pytest.raises(EngineDied, match="SIGKILL"):
        make(timeout_seconds=2).send(workers, 1)


def test_engines_of_another_size_are_refused():
    workers = Workers()
    workers.num_workers = 3
    with pytest.raises(SyncError, match="the engines have 3 workers; expected a multiple of 2"):
        make().send(workers, 1)


def test_weights_are_staged_while_the_engine_goes_on_and_loaded_by_the_push():
    source, workers = Source(), Workers()
    transport = make(source)
    transport.send(workers, 1)
    source.draw(2)
    transport.begin(2, staging=True)
    transport.stage(workers)
    transport.settle()
    staged = copy.deepcopy(source.whole)
    source.draw(3)  # what is sent was taken when it was staged
    transport.begin(2)
    sent = transport.send(workers, 2)
    transport.settle()
    source.whole = staged
    assert is_right(workers, source)
    assert workers.calls == ["start", "update", "finish 1", "stage", "start", "update", "finish 2"]
    assert sent > 0
    transport.begin(3)
    source.draw(3)
    transport.send(workers, 3)
    assert is_right(workers, source)


def test_what_was_staged_is_sent_anew_where_it_was_lost():
    source, workers = Source(), Workers()
    transport = make(source)
    for lose in (transport.close, transport.unstage):
        transport.begin(1, staging=True)
        transport.stage(workers)
        lose()
        source.draw(5)
        transport.begin(1)
        transport.send(workers, 1)
        assert is_right(workers, source)


def test_a_worker_that_cannot_take_what_was_staged_says_so_when_it_is_loaded():
    workers, transport = Workers(), make()
    transport.begin(1, staging=True)
    transport.stage(workers)
    workers.refusal[0] = "no such tensor"
    transport.begin(1)
    with pytest.raises(SyncError, match="worker 0 of engine 0: no such tensor"):
        transport.send(workers, 1)


def test_what_a_worker_is_told_survives_the_control_channel():
    terms = Terms(TENSORS, TrainerLayout(tp=2, dp=3), WorkerLayout(2, 4), (0, 1, 2, 3, 4, 5), torch.bfloat16, 1000)
    again = Terms.from_json(json.loads(json.dumps(terms.to_json())))
    assert again == terms
    assert again.plan().digest == terms.plan().digest


def test_messages_are_packed_and_unpacked_and_one_bit_is_noticed():
    source, terms = Source(), Terms(TENSORS, TrainerLayout(), WorkerLayout(2), (0,), torch.float32, 300)
    for message in (message for messages in terms.plan().rounds for message in messages):
        buffer = pack(message, source.shard, torch.float32, CPU)
        assert buffer.shape == empty(message, torch.float32, CPU).shape
        for piece, found in unpack(message, buffer, torch.float32):
            assert torch.equal(found, cut(source.whole[TENSORS.names[piece.tensor]], piece.region))
        assert content(message, TENSORS).split(" to ")[0] == TENSORS.names[message.pieces[0].tensor]
        for place in (0, shard_wire.HEADER_BYTES, len(buffer) - 1):
            spoiled = buffer.clone()
            spoiled[place] ^= 1
            with pytest.raises(ValueError, match="arrived corrupt: checksum"):
                unpack(message, spoiled, torch.float32)
