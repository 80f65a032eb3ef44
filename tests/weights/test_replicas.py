"""Two real vLLM engines of one policy, and one of two workers: one push feeds all workers, or none."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from drmas.errors import EngineDied, SyncError
from drmas.weights.buckets import BucketTransport

TOLERANCE = 1e-4
TRANSPORTS = ("broadcast", "shared-memory", "disk")
PROMPTS = [[4 + i, 9, 11, 5 + 2 * i] for i in range(6)]


def test_I10_one_broadcast_gives_both_replicas_the_trainers_weights(pair):
    rounds = pair.rounds
    pair.change()
    assert all(pair.with_engine(engine).gap() > 1e-2 for engine in pair.engine.engines)
    result = pair.push()
    assert pair.rounds == rounds + 1
    assert result.bytes == sum(parameter.numel() * 4 for parameter in pair.model.parameters())
    assert [pair.with_engine(engine).gap() < TOLERANCE for engine in pair.engine.engines] == [True, True]
    assert [engine.version for engine in pair.engine.engines] == [pair.version, pair.version]
    assert pair.engine.sync_client.get_weight_version() == str(pair.version)
    assert pair.engine.sync_client.num_workers == 2


def test_I9_two_replicas_sample_the_tokens_of_one(pair):
    together = pair.generate(PROMPTS, max_tokens=60)
    alone = pair.with_engine(pair.engine.engines[0]).generate(PROMPTS, max_tokens=60)
    shares = [engine.stats()["generated_tokens"] for engine in pair.engine.engines]
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]
    assert [completion.versions for completion in together] == [completion.versions for completion in alone]
    assert min(shares) > 0


def test_weights_that_do_not_fit_change_neither_replica(pair):
    old = {name: tensor.clone() for name, tensor in pair.model.state_dict().items()}
    version = pair.version
    pair.change()
    pair.edit = lambda tensors: [(name, tensor) for name, tensor in tensors if "layers.1." not in name]
    with pytest.raises(SyncError, match=r"worker 0 of engine 0: the update is incomplete"):
        pair.push()
    pair.model.load_state_dict(old)
    pair.edit = lambda tensors: tensors
    assert [pair.with_engine(engine).gap() < TOLERANCE for engine in pair.engine.engines] == [True, True]
    assert [engine.version for engine in pair.engine.engines] == [version, version]
    pair.push()
    assert pair.gap() < TOLERANCE


def test_a_replica_killed_during_a_push_comes_back_alone_and_the_other_kept_its_weights(pair, monkeypatch):
    first, second = pair.engine.engines
    old = {name: tensor.clone() for name, tensor in pair.model.state_dict().items()}
    version, pid = pair.version, first.pid
    fill = BucketTransport._fill

    def kill_second(self, bucket, tensors):
        with contextlib.suppress(ProcessLookupError):
            os.kill(second.pid, signal.SIGKILL)
        return fill(self, bucket, tensors)

    rounds = pair.rounds
    pair.change()
    with monkeypatch.context() as patch:
        patch.setattr(BucketTransport, "_fill", kill_second)
        with pytest.raises(EngineDied, match=r"engine pair-1 .*was killed by SIGKILL"):
            pair.push()
    assert pair.rounds == rounds + 1
    assert (first.alive, second.alive, pair.engine.alive) == (True, False, False)

    new = {name: tensor.clone() for name, tensor in pair.model.state_dict().items()}
    pair.model.load_state_dict(old)
    first.resume()
    assert pair.with_engine(first).gap() < TOLERANCE
    assert first.version == version

    pair.engine.start()
    assert first.pid == pid
    assert (second.version, pair.engine.version) == (0, 0)
    pair.model.load_state_dict(new)
    pair.push()
    assert [pair.with_engine(engine).gap() < TOLERANCE for engine in pair.engine.engines] == [True, True]
    assert pair.engine.version == pair.version


def test_the_logs_are_those_of_the_replicas(pair):
    logs = sorted(path.name for path in pair.engine.engines[0]._log.parent.glob("*.log"))
    assert logs == ["engine-pair-0.log", "engine-pair-1.log"]


def test_I10_both_workers_of_an_engine_have_the_trainers_weights_or_neither_does(parallel):
    assert parallel.engine.sync_client.num_workers == 2
    for transport in TRANSPORTS:
        parallel.sync.close()
        parallel.sync = parallel.new_sync(transport)
        for stages in (False, True):
            parallel.change()
            assert parallel.gap() > 1e-2
            if stages:
                parallel.sync.stage(parallel.version + 1)
            parallel.push()
            assert parallel.gap() < TOLERANCE
        parallel.edit = lambda tensors: [(name, tensor) for name, tensor in tensors if "layers.1." not in name]
        with pytest.raises(SyncError, match="worker 0 of engine 0: the update is incomplete"):
            parallel.push()
        parallel.edit = lambda tensors: tensors
        assert parallel.gap() < TOLERANCE
