"""The transports of whole tensors, each into a real vLLM engine: what arrives, staged or not, and what each way refuses."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time

import pytest
import torch

from drmas.errors import EngineDied, SyncError
from drmas.weights import buckets
from drmas.weights.broadcast import BroadcastOutbox
from drmas.weights.buckets import BucketTransport
from drmas.weights.disk import DiskOutbox, file_of
from drmas.weights.shared_memory import MemoryOutbox

TOLERANCE = 1e-4
TRANSPORTS = ("broadcast", "shared-memory", "disk")
SPOILT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(params=TRANSPORTS)
def moved(request, tied):
    """The tied trainer with a connection of each transport; afterwards its usual one is made anew."""
    tied.sync = tied.new_sync(request.param, bucket_bytes=100_000)
    tied.edit = lambda tensors: tensors
    tied.transport = request.param
    yield tied
    tied.sync.close()
    tied.edit = lambda tensors: tensors
    tied.sync = tied.new_sync()


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def old_gap(trainer, old) -> float:
    """The gap to other weights than the trainer's."""
    new = weights(trainer)
    trainer.model.load_state_dict(old)
    gap = trainer.gap()
    trainer.model.load_state_dict(new)
    return gap


def spoilt(tensors):
    bad = {name: tensor.clone() for name, tensor in tensors}
    bad[SPOILT][3, 5] = float("nan")
    return list(bad.items())


def narrow(tensors):
    return [(name, tensor[:, 1:].contiguous() if name == SPOILT else tensor) for name, tensor in tensors]


def as_bfloat16(tensors):
    """Every second tensor, of which some have an odd number of elements then."""
    return [(name, tensor.bfloat16() if i % 2 else tensor) for i, (name, tensor) in enumerate(tensors)]


def test_I10_after_a_push_the_engine_computes_with_the_trainers_weights(moved):
    for _ in range(3):
        moved.change()
        assert moved.gap() > 1e-2
        result = moved.push()
        assert moved.gap() < TOLERANCE
    assert result.bytes == sum(parameter.numel() * 4 for parameter in moved.model.parameters())
    assert moved.engine.version == moved.sync.version == moved.version


def test_tensors_of_several_dtypes_arrive(moved):
    moved.change()
    moved.edit = as_bfloat16
    moved.push()
    with torch.no_grad():
        for (_, parameter), (_, sent) in zip(moved.model.named_parameters(), as_bfloat16(moved._tensors()), strict=True):
            parameter.copy_(sent)
    assert moved.gap() < TOLERANCE


def test_staged_weights_count_from_the_push_on(moved):
    for _ in range(2):
        old, version, rounds = weights(moved), moved.version, moved.rounds
        moved.change()
        moved.sync.stage(version + 1)
        assert moved.rounds == rounds + 1
        assert old_gap(moved, old) < TOLERANCE
        assert moved.engine.version == version
        moved.push()
        assert moved.gap() < TOLERANCE
        assert (moved.engine.version, moved.rounds) == (version + 1, rounds + 1)


def test_I9_staged_or_not_the_samples_are_the_same_to_the_last_bit(moved):
    prompts = [[5, 9, 11 + i] for i in range(4)]
    moved.change()
    moved.push()
    plain = moved.generate(prompts)
    moved.sync.stage(moved.version + 1)
    moved.push()
    staged = moved.generate(prompts)
    assert [(each.token_ids, each.logprobs) for each in plain] == [(each.token_ids, each.logprobs) for each in staged]


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize(("edit", "message"), [(spoilt, f"{SPOILT} holds NaN or Inf"), (narrow, f"{SPOILT} .*doesn't fit")])
def test_trap_4_what_fails_leaves_the_old_weights_and_the_next_push_is_exact(moved, edit, message, stages):
    old, version, rounds = weights(moved), moved.engine.version, moved.rounds
    moved.change()
    moved.edit = edit
    if stages:
        moved.sync.stage(moved.version + 1)
    with pytest.raises(SyncError, match=message):
        moved.push()
    assert moved.rounds == rounds + 1
    moved.edit = lambda tensors: tensors
    assert old_gap(moved, old) < TOLERANCE
    assert moved.engine.version == version
    moved.push()
    assert moved.gap() < TOLERANCE


@pytest.mark.parametrize("stages", [False, True])
def test_a_corrupt_bucket_is_noticed_by_name_and_not_loaded(moved, monkeypatch, stages):
    old, fill, counted = weights(moved), BucketTransport._fill, []

    def wrong_third(self, bucket, tensors):
        payload, total = fill(self, bucket, tensors)
        counted.append(bucket.content)
        return payload, total ^ (len(counted) == 3)

    moved.change()
    with monkeypatch.context() as patch:
        patch.setattr(BucketTransport, "_fill", wrong_third)
        if stages:
            moved.sync.stage(moved.version + 1)
        with pytest.raises(SyncError) as caught:
            moved.push()
    assert f"worker 0 of engine 0: {counted[2]} arrived corrupt" in str(caught.value)
    assert old_gap(moved, old) < TOLERANCE
    moved.push()
    assert moved.gap() < TOLERANCE


def test_ends_that_plan_otherwise_are_both_named_and_nobody_hangs(moved, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "digest", lambda *args: 77)
        with pytest.raises(
            SyncError, match=r"trainer rank 0 is about to send by plan 0+4d, but worker 0 of engine 0 [0-9a-f]+"
        ):
            moved.push()
    moved.push()
    assert moved.gap() < TOLERANCE


def test_what_was_staged_in_an_engine_that_died_is_sent_anew(tied):
    tied.change()
    tied.sync.stage(tied.version + 1)
    rounds = tied.rounds
    os.kill(tied.engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="was killed by SIGKILL"):
        tied.push()
    assert tied.rounds == rounds
    tied.engine.start()
    tied.push()
    assert tied.rounds == rounds + 1
    assert tied.gap() < TOLERANCE


def test_what_is_forgotten_is_sent_anew(moved):
    rounds = moved.rounds
    moved.sync.stage(moved.version + 1)
    moved.change()
    moved.sync.unstage()
    moved.push()
    assert moved.rounds == rounds + 2
    assert moved.gap() < TOLERANCE


def test_an_engine_killed_before_the_first_broadcast_is_named_with_what_was_on_its_way(tied, monkeypatch):
    deliver, started = BroadcastOutbox.deliver, time.monotonic()

    def kill_first(self, bucket, payload):
        with contextlib.suppress(ProcessLookupError):
            os.kill(tied.engine.pid, signal.SIGKILL)
        deliver(self, bucket, payload)

    first, second = [name for name, _ in tied._tensors()][:2]
    waited = f"{first} by trainer rank 0|the others' vote on ({first}|{second})"  # gloo may notice when it was already sent
    tied.sync = tied.new_sync(bucket_bytes=1024)
    with monkeypatch.context() as patch:
        patch.setattr(BroadcastOutbox, "deliver", kill_first)
        with pytest.raises(EngineDied, match=f"engine tied .*was killed by SIGKILL, and the trainer waited for ({waited})"):
            tied.push()
    assert time.monotonic() - started < 60
    tied.engine.start()
    tied.sync = tied.new_sync()
    tied.push()
    assert tied.gap() < TOLERANCE


def test_a_worker_that_hangs_is_named_after_the_timeout(tied, monkeypatch):
    deliver, pid = BroadcastOutbox.deliver, tied.engine.pid

    def stop_second(self, bucket, payload):
        if bucket.start:
            os.kill(pid, signal.SIGSTOP)
        deliver(self, bucket, payload)

    sync = tied.new_sync(timeout_seconds=1.5)
    again = threading.Timer(12, os.kill, (pid, signal.SIGCONT))
    again.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(BroadcastOutbox, "deliver", stop_second)
            with pytest.raises(SyncError, match="the transfer broke: no word from worker 0 of engine 0"):
                tied.push(sync)
    finally:
        again.join()
    assert tied.gap() < TOLERANCE
    tied.sync = tied.new_sync()
    tied.push()
    assert tied.gap() < TOLERANCE


def test_memory_that_cannot_be_mapped_is_refused_with_the_key(tied, monkeypatch):
    begin = MemoryOutbox.begin
    monkeypatch.setattr(MemoryOutbox, "begin", lambda *args: begin(*args) | {"descriptor": 99_999})
    with pytest.raises(SyncError, match=r"worker 0 of engine 0: .*/fd/99999 can't be mapped.*see policies\.main\.sync"):
        tied.push(tied.new_sync("shared-memory"))
    assert tied.gap() < TOLERANCE


def test_shared_memory_is_given_back(tied):
    def held() -> int:
        links = (f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd"))
        return sum("memfd:weights" in os.readlink(link) for link in links if os.path.lexists(link))

    sync = tied.new_sync("shared-memory")
    before = held()
    for _ in range(3):
        tied.push(sync)
        assert held() == before + 1
    sync.close()
    assert held() == before


def test_the_files_of_an_update_are_gone_when_it_is_loaded(tied):
    sync = tied.new_sync("disk")
    left_over = tied.folder / "updates" / "update-9" / "x.safetensors"
    left_over.parent.mkdir(parents=True)
    left_over.write_bytes(b"of a process that was killed")
    tied.push(sync)
    assert list((tied.folder / "updates").iterdir()) == []


@pytest.mark.parametrize("stages", [False, True])
def test_a_folder_that_the_engine_does_not_see_is_refused_with_the_key(tied, monkeypatch, stages):
    begin = DiskOutbox.begin
    monkeypatch.setattr(DiskOutbox, "begin", lambda *args: {"folder": begin(*args)["folder"] + "/elsewhere"})
    sync = tied.new_sync("disk")
    if stages:
        sync.stage(tied.version + 1)
    with pytest.raises(SyncError, match=r"worker 0 of engine 0: there is no folder .*elsewhere.*see policies\.main\.sync"):
        tied.push(sync)
    assert tied.gap() < TOLERANCE


def test_a_folder_that_cannot_be_made_is_refused_with_the_key(tied):
    blocked = tied.folder / "updates"
    if blocked.is_dir():
        blocked.rmdir()
    blocked.write_text("a file")
    try:
        with pytest.raises(SyncError, match=r"updates/update-1 can't be made: .*see policies\.main\.sync"):
            tied.push(tied.new_sync("disk"))
    finally:
        blocked.unlink()
    assert tied.gap() < TOLERANCE


def test_a_full_disk_is_a_failed_sync_that_names_the_file(tied, monkeypatch):
    seal = DiskOutbox.seal

    def with_little_room(self, bucket, payload):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        try:
            seal(self, bucket, payload)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(DiskOutbox, "seal", with_little_room)
    with pytest.raises(SyncError, match=r"updates/update-1/\d+\.safetensors can't be written: .*see policies\.main\.sync"):
        tied.push(tied.new_sync("disk"))
    assert tied.gap() < TOLERANCE


def spoil_bytes(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a bit": (spoil_bytes, "arrived corrupt"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-100]), r"\.safetensors can't be read"),
    "gone": (lambda path: path.unlink(), r"\.safetensors can't be read"),
    "another": (lambda path: path.write_bytes(next(iter(sorted(path.parent.glob("*")))).read_bytes()), "expected"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_noticed_and_not_loaded(tied, monkeypatch, damage):
    spoil, message = DAMAGE[damage]
    seal = DiskOutbox.seal

    def spoiling(self, bucket, payload):
        seal(self, bucket, payload)
        if bucket.start:
            spoil(file_of(self._folder, bucket))

    monkeypatch.setattr(DiskOutbox, "seal", spoiling)
    with pytest.raises(SyncError, match=f"worker 0 of engine 0: .*{message}"):
        tied.push(tied.new_sync("disk"))
    assert tied.gap() < TOLERANCE
