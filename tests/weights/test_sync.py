"""A push into a real vLLM engine: what arrives, what is kept out, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
import torch

from drmas.errors import EngineDied, EngineError, SyncError
from drmas.rollout.engine import Sampling
from drmas.rollout.scripted import ScriptedEngine
from drmas.weights import filling
from drmas.weights.broadcast import BroadcastOutbox
from drmas.weights.buckets import BucketTransport
from drmas.weights.checksum import Checksum
from drmas.weights.sync import StagedLost, WeightSync
from drmas.weights.transport import Idle, Transport

TOLERANCE = 1e-4


def test_I10_after_a_push_the_engine_computes_with_the_trainers_weights(trainer):
    for _ in range(2):
        trainer.change()
        assert trainer.gap() > 1e-2  # the change is one that would be seen
        result = trainer.push()
        assert trainer.gap() < TOLERANCE
        assert trainer.engine.version == trainer.sync.version == trainer.version
    assert result.bytes == sum(parameter.numel() * 4 for parameter in trainer.model.parameters())
    assert 0 < result.seconds < 60


def test_trap_1_tied_head_follows_the_embedding(tied):
    tied.change("embed_tokens")
    assert tied.gap() > 1e-2
    tied.push()
    assert tied.gap() < TOLERANCE


def test_trap_2_weights_cannot_change_under_a_running_engine(trainer):
    async def run():
        calls = [asyncio.ensure_future(trainer.engine.generate([5 + i], Sampling(100), seed=i, key=f"{i}")) for i in range(4)]
        await asyncio.sleep(0)
        advance = asyncio.ensure_future(trainer.engine.advance())
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="start_weight_update on a running engine; pause it first"):
            trainer.engine.sync_client.start_weight_update()
        await advance
        while not all(call.done() for call in calls):
            await trainer.engine.advance()
        return [await call for call in calls]

    completions = asyncio.run(run())
    assert {version for completion in completions for version in completion.versions} == {trainer.version}
    assert trainer.gap() < TOLERANCE


def test_trap_2_an_engine_does_not_resume_in_the_middle_of_an_update(trainer):
    client = trainer.engine.sync_client
    trainer.engine.pause()
    client.start_weight_update()
    with pytest.raises(EngineError, match="resume during a weight update"):
        trainer.engine.resume()
    assert client.abort_weight_update() is True
    trainer.engine.resume()
    assert trainer.gap() < TOLERANCE


def test_trap_3_no_cached_prefix_survives_a_push(trainer):
    def cached() -> float:
        before = trainer.engine.stats()["cached_tokens"]
        assert trainer.gap([list(range(4, 80))]) < TOLERANCE
        return trainer.engine.stats()["cached_tokens"] - before

    cached()
    assert cached() == 64  # two blocks of 32: without a push the prefix is used again
    trainer.change()
    trainer.push()
    assert cached() == 0


def without(name: str):
    return lambda tensors: [(n, t) for n, t in tensors if name not in n]


def with_unknown_name(tensors):
    return [*tensors[:6], ("model.layers.0.bogus.weight", torch.zeros(4)), *tensors[6:]]


def transposed(tensors):
    return [(n, t.t().contiguous() if n == "model.layers.1.mlp.down_proj.weight" else t) for n, t in tensors]


def with_a_shorter_vocabulary(tensors):
    return [(n, t[:50].contiguous() if "embed_tokens" in n else t) for n, t in tensors]


FAULTS = {
    "unknown name": (with_unknown_name, r"model\.layers\.0\.bogus"),
    "wrong shape": (transposed, r"model\.layers\.1\.mlp\.down_proj\.weight.*doesn't fit"),
    "short vocabulary": (with_a_shorter_vocabulary, r"embed_tokens\.weight.*doesn't fit"),
    "missing layer": (without("layers.1."), "incomplete"),
    "part of a fused parameter": (without("layers.0.self_attn.k_proj.weight"), r"layers\.0\.self_attn\.qkv_proj\.weight"),
    "missing norm": (without("model.norm."), r"incomplete: 1 parameters.*model\.norm\.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_trap_4_a_failed_update_leaves_the_old_weights_and_the_next_one_is_exact(trainer, fault):
    edit, message = FAULTS[fault]
    version, old = trainer.engine.version, {n: p.clone() for n, p in trainer.model.state_dict().items()}
    trainer.change()
    new = {n: p.clone() for n, p in trainer.model.state_dict().items()}
    trainer.edit = edit
    with pytest.raises(SyncError, match=message):
        trainer.push()
    trainer.model.load_state_dict(old)
    assert trainer.gap() < TOLERANCE
    assert trainer.engine.version == version

    trainer.model.load_state_dict(new)
    trainer.edit = lambda tensors: tensors
    trainer.push()
    assert trainer.gap() < TOLERANCE


def test_trap_4_missing_biases_are_noticed(untied):
    untied.edit = without("layers.0.self_attn.q_proj.bias")
    with pytest.raises(SyncError, match=r"layers\.0\.self_attn\.qkv_proj\.bias \(64 of 128\)"):
        untied.push()
    assert untied.gap() < TOLERANCE


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(trainer, value):
    def spoiled(tensors):
        bad = {n: t.clone() for n, t in tensors}
        bad["model.layers.1.mlp.down_proj.weight"][3, 5] = value
        return list(bad.items())

    trainer.edit = spoiled
    with pytest.raises(SyncError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds NaN or Inf"):
        trainer.push()
    assert trainer.gap() < TOLERANCE


def test_a_corrupt_bucket_is_noticed_and_not_loaded(trainer, monkeypatch):
    counted = []

    class WrongOnce(Checksum):
        def value(self):
            counted.append(self)
            return super().value() ^ (len(counted) == 2)

    monkeypatch.setattr(filling, "Checksum", WrongOnce)
    with pytest.raises(SyncError, match="arrived corrupt"):
        trainer.push()
    assert trainer.gap() < TOLERANCE
    trainer.push()
    assert trainer.gap() < TOLERANCE


def fail(times: int, call=lambda: None):
    """A stand-in for an engine's method `call` that refuses the first `times` calls; `.calls` counts all of them."""

    def stand_in(*args):
        stand_in.calls += 1
        if stand_in.calls <= times:
            raise EngineError("refused for once")
        return call(*args)

    stand_in.calls = 0
    return stand_in


def open_sockets() -> dict[str, int]:
    """The name (with the inode, which isn't used again soon) of every socket of this process, and its descriptor."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{descriptor}")] = int(descriptor)
    return {name: descriptor for name, descriptor in found.items() if name.startswith("socket:")}


def test_a_broken_connection_is_made_anew_without_iterating_the_source_again(trainer):
    earlier = set(open_sockets())
    sync = trainer.sync = trainer.new_sync()
    trainer.push()
    for name, descriptor in open_sockets().items():
        if name not in earlier:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # OSError: it only listens
                connection.shutdown(socket.SHUT_RDWR)
    before, first = trainer.rounds, sync._transport._meeting
    trainer.change()
    trainer.push()
    assert sync._transport._meeting is not first
    assert trainer.rounds == before + 1
    assert trainer.gap() < TOLERANCE


@pytest.mark.parametrize("times", [1, 2])
def test_an_engine_that_refuses_to_pause_is_asked_once_more(trainer, monkeypatch, times):
    before, version = trainer.rounds, trainer.engine.version
    pause = fail(times, trainer.engine.pause)
    monkeypatch.setattr(trainer.engine, "pause", pause)
    if times == 1:
        trainer.push()
    else:
        with pytest.raises(SyncError, match=f"version {version + 1} did not reach the engine: refused for once"):
            trainer.push()
    assert pause.calls == 2
    assert trainer.rounds == before + 1
    assert trainer.engine.version == version + (times == 1)
    assert trainer.gap() < TOLERANCE


@pytest.mark.parametrize("fault", ["wrong shape", "NaN"])
def test_weights_that_are_at_fault_are_not_sent_again(trainer, monkeypatch, fault):
    start = fail(0, trainer.engine.sync_client.start_weight_update)
    monkeypatch.setattr(trainer.engine.sync_client, "start_weight_update", start)
    trainer.edit = transposed if fault == "wrong shape" else lambda tensors: [(n, t * float("nan")) for n, t in tensors]
    with pytest.raises(SyncError):
        trainer.push()
    assert start.calls == 1
    assert trainer.gap() < TOLERANCE


@pytest.mark.parametrize("refusal", ["abort_weight_update", "resume"])
def test_an_engine_that_refuses_to_go_back_is_a_sync_error_that_names_both(trainer, monkeypatch, refusal):
    owner = trainer.engine if refusal == "resume" else trainer.engine.sync_client
    trainer.edit = lambda tensors: [(n, t * float("nan")) for n, t in tensors]
    with monkeypatch.context() as patch:
        patch.setattr(owner, refusal, fail(1))
        with pytest.raises(SyncError, match=r"holds NaN or Inf.*can't go back to its old weights either: refused for once"):
            trainer.push()
    trainer.edit = lambda tensors: tensors
    if refusal == "abort_weight_update":
        trainer.engine.sync_client.abort_weight_update()
    trainer.push()
    assert trainer.gap() < TOLERANCE


def test_an_interrupt_in_the_middle_passes_and_the_engine_goes_on(trainer, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BucketTransport, "_fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.push()
    assert trainer.gap() < TOLERANCE


def test_every_push_iterates_the_source_exactly_once_also_when_it_fails(trainer):
    before = trainer.rounds
    trainer.push()
    assert trainer.rounds == before + 1
    trainer.edit = lambda tensors: [(n, t * float("nan")) for n, t in tensors]
    with pytest.raises(SyncError):
        trainer.push()
    assert trainer.rounds == before + 2


def test_a_rank_that_does_not_send_iterates_along_and_knows_the_version(tied):
    before, follower = tied.rounds, tied.new_sync()
    follower._engine = None
    result = follower.push(4)
    assert (tied.rounds, follower.version, result.bytes) == (before + 1, 4, 0)


def test_an_engine_without_weights_learns_the_version(tied, byte_tokenizer):
    engine = ScriptedEngine(byte_tokenizer, ["yes"])
    before = tied.rounds
    result = WeightSync(engine, Idle()).push(6)
    assert (engine.version, result.bytes, tied.rounds) == (6, 0, before)


def test_a_trainer_that_vanishes_in_the_middle_leaves_the_old_weights(trainer, monkeypatch):
    deliver = BroadcastOutbox.deliver

    def vanish(self, bucket, payload):
        deliver(self, bucket, payload)
        self._meeting.close()
        raise ConnectionAbortedError("gone")

    trainer.change()
    with monkeypatch.context() as patch:
        patch.setattr(BroadcastOutbox, "deliver", vanish)
        with pytest.raises(ConnectionAbortedError):
            trainer.push()
    assert trainer.gap() > 1e-2  # of the new weights to those that the engine goes on with
    trainer.push()
    assert trainer.gap() < TOLERANCE


def test_a_trainer_that_hangs_is_given_up_after_the_timeout(trainer, monkeypatch):
    sync = trainer.new_sync(timeout_seconds=1.5)
    fill, calls = BucketTransport._fill, []

    def slow_second(self, bucket, tensors):
        calls.append(bucket)
        if len(calls) == 2:
            time.sleep(4)
        return fill(self, bucket, tensors)

    monkeypatch.setattr(BucketTransport, "_fill", slow_second)
    with pytest.raises(SyncError):
        trainer.push(sync)
    assert trainer.gap() < TOLERANCE
    trainer.sync = trainer.new_sync()
    trainer.push()
    assert trainer.gap() < TOLERANCE


def test_half_loaded_weights_refuse_requests_until_a_push_succeeds(trainer):
    client = trainer.engine.sync_client
    client.mixed = True
    with pytest.raises(EngineError, match="half-loaded weights"):
        trainer.generate([[5]])
    trainer.push()
    assert trainer.gap() < TOLERANCE


def test_I2_a_request_in_flight_across_an_update_has_both_versions_and_both_log_probs(trainer):
    old = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    first = trainer.version
    prompts = [[5 + i, 9, 11] for i in range(8)]

    async def run():
        def call(i: int, tokens: int):
            return asyncio.ensure_future(trainer.engine.generate(prompts[i], Sampling(tokens), seed=i, key=f"{i}"))

        calls = [call(0, 5), *(call(i, 100) for i in range(1, 8))]
        await asyncio.sleep(0)
        await trainer.engine.advance()
        trainer.change()
        trainer.push()
        while not all(call.done() for call in calls):
            await trainer.engine.advance()
        return [await call for call in calls]

    completions = asyncio.run(run())
    new = trainer.model.state_dict()
    new = {name: tensor.clone() for name, tensor in new.items()}
    spanning = [i for i, completion in enumerate(completions) if len(set(completion.versions)) == 2]
    assert len(spanning) >= 4
    for i in spanning:
        completion = completions[i]
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) == {first, trainer.version}
        assert len(completion.versions) == len(completion.token_ids)
        turn = completion.versions.index(trainer.version)
        got = torch.tensor(completion.logprobs)
        trainer.model.load_state_dict(old)
        before = trainer.logprobs(prompts[i], completion.token_ids)
        trainer.model.load_state_dict(new)
        after = trainer.logprobs(prompts[i], completion.token_ids)
        torch.testing.assert_close(got[:turn], before[:turn], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(got[turn:], after[turn:], atol=TOLERANCE, rtol=0)
        assert (before - after).abs().max() > 1e-2


def test_an_engine_killed_in_the_middle_of_a_request_comes_back_and_follows(tied):
    engine = tied.engine
    pid = engine.pid

    async def run():
        call = asyncio.ensure_future(engine.generate([5, 6], Sampling(200), seed=1, key="k"))
        await asyncio.sleep(0)
        advance = asyncio.ensure_future(engine.advance())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(call, advance, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, EngineDied)
        assert "was killed by SIGKILL" in str(error)
        assert "engine-tied.log" in str(error)
    assert not engine.alive
    with pytest.raises(EngineDied):
        tied.push()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

    engine.start()
    assert engine.version == 0
    tied.change()
    tied.push()
    assert tied.gap() < TOLERANCE
    assert engine.version == tied.version


def test_an_engine_killed_in_the_middle_of_an_update_is_a_death_and_not_a_failed_sync(tied, monkeypatch):
    fill = BucketTransport._fill

    def kill_first(self, bucket, tensors):
        with contextlib.suppress(ProcessLookupError):
            os.kill(tied.engine.pid, signal.SIGKILL)
        return fill(self, bucket, tensors)

    before = tied.rounds
    with monkeypatch.context() as patch:
        patch.setattr(BucketTransport, "_fill", kill_first)
        with pytest.raises(EngineDied, match="was killed by SIGKILL"):
            tied.push()
    assert tied.rounds == before + 1
    assert not tied.engine.alive
    tied.engine.start()
    tied.push()
    assert tied.gap() < TOLERANCE


def test_close_leaves_no_process_and_is_idempotent(tied):
    pid = tied.engine.pid
    tied.engine.close()
    tied.engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineDied, match="not running"):
        tied.generate([[5]])
    tied.engine.start()


class Staging(Transport):
    """Loses what was staged."""

    can_stage = True

    def __init__(self) -> None:
        self.from_stage, self.sent = False, []

    def begin(self, version, *, staging=False):
        self.from_stage = not staging and version == getattr(self, "staged", None)
        self.staged = version if staging else None

    @property
    def untouched(self):
        return not self.from_stage

    def stage(self, client):
        pass

    def send(self, client, version):
        if self.from_stage:
            raise RuntimeError("no word from worker 0 of engine 0")
        self.sent.append(version)
        client.finish_weight_update(str(version))
        return 7


def test_what_was_staged_and_lost_is_pushed_anew_on_every_rank():
    """The sender alone can't: the others take no part in a push of what was staged."""
    client = SimpleNamespace(num_workers=1, version="0", abort_weight_update=lambda: True)
    client.finish_weight_update = lambda version: setattr(client, "version", version)
    client.get_weight_version = lambda: client.version
    engine = SimpleNamespace(sync_client=client, alive=True, pause=lambda: None, resume=lambda: None)
    sync = WeightSync(engine, transport := Staging())
    sync.stage(3)
    with pytest.raises(StagedLost, match="version 3 did not reach the engine: no word from worker 0"):
        sync.push(3)
    assert (sync.version, transport.sent) == (0, [])
    assert sync.push(3).bytes == 7
    assert (sync.version, transport.sent) == (3, [3])
