"""Saving and continuing: exact at the same layout, possible at another, never from half a checkpoint."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from drmas.errors import CheckpointError
from drmas.policy import folders, optimizer

LAYOUTS = ("tp2", "tp2-sp", "dp2")


def moments(trainer):
    """Adam's first and second moments in one vector each, in the order of the buffers."""
    (sharded,) = trainer.optimizer.megatron.chained_optimizers
    states = sharded.optimizer.state.values()
    return [torch.cat([state[key].flatten() for state in states]) for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"lr_schedule": "cosine", "lr_warmup_steps": 2}], ids=str)
def test_I9_a_resumed_run_repeats_the_uninterrupted_one_bitwise(kit, trainer_of, tmp_path, settings):
    straight = trainer_of("qwen3-tied", **settings)
    expected = kit.run_updates(straight, 5)
    first = trainer_of("qwen3-tied", **settings)
    kit.run_updates(first, 2)
    first.save(tmp_path / "step_2")
    second = trainer_of("qwen3-tied", seed=99, **settings)
    second.load(tmp_path / "step_2")
    assert second.version == 2
    assert kit.run_updates(second, 3, first=2) == expected[2:]
    assert kit.largest_difference(kit.weights(second), kit.weights(straight)) == 0.0
    assert all(torch.equal(*pair) for pair in zip(moments(second), moments(straight), strict=True))
    assert torch.equal(second.rng.state["cpu"], straight.rng.state["cpu"])


def test_saving_does_not_disturb_the_run(kit, trainer_of, tmp_path):
    saved, other = trainer_of("qwen3-tied"), trainer_of("qwen3-tied")
    kit.run_updates(saved, 1)
    saved.save(tmp_path / "one")
    assert kit.run_updates(saved, 1, first=1) == kit.run_updates(other, 2)[1:]


def test_a_policy_can_be_saved_before_its_first_update(kit, trainer_of, tmp_path):
    trainer_of("qwen3-tied").save(tmp_path / "zero")
    resumed = trainer_of("qwen3-tied")
    resumed.load(tmp_path / "zero")
    assert kit.run_updates(resumed, 1) == kit.run_updates(trainer_of("qwen3-tied"), 1)


def test_a_policy_that_is_not_trainable_saves_its_weights(kit, trainer_of, tmp_path):
    trainer = trainer_of("qwen3-tied", trainable=False)
    trainer.save(tmp_path / "frozen")
    other = trainer_of("qwen3-tied", trainable=False)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    other.load(tmp_path / "frozen")
    assert kit.largest_difference(kit.weights(trainer), kit.weights(other)) == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_one_rank_continues_on_two(kit, trainer_of, two_ranks, layout):
    straight = trainer_of("qwen3-tied")
    expected = kit.run_updates(straight, 2)[1]
    found = two_ranks["checkpoints"][f"one to {layout}"]
    assert found["version"] == 1
    assert found["reports"][0]["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert kit.largest_difference(found["weights"], kit.weights(straight)) < 1e-6


@pytest.mark.parametrize("name", ["saved-by-tp2", "saved-by-dp2"])
def test_a_checkpoint_of_two_ranks_continues_on_one(kit, trainer_of, two_ranks, name):
    straight, resumed = trainer_of("qwen3-tied"), trainer_of("qwen3-tied")
    expected = kit.run_updates(straight, 2)[1]
    resumed.load(two_ranks["shared"] / name)
    assert kit.run_updates(resumed, 1, first=1)[0]["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert kit.largest_difference(kit.weights(resumed), kit.weights(straight)) < 1e-6


def test_I9_two_ranks_resume_bitwise(two_ranks):
    assert two_ranks["checkpoints"]["bitwise"]


def test_the_schedule_after_resuming_is_the_configuration_s(kit, trainer_of, tmp_path):
    trainer = trainer_of("qwen3-tied")
    kit.run_updates(trainer, 1)
    trainer.save(tmp_path / "one")
    slower = trainer_of("qwen3-tied", lr=1e-4)
    slower.load(tmp_path / "one")
    assert kit.run_updates(slower, 1, first=1)[0]["metrics"]["lr"] == 1e-4


def test_optimizer_state_survives_padded_buckets(kit, trainer_of, tmp_path, monkeypatch):
    """Several buckets, none of whose sizes fits the padding: what megatron-core 0.16.1 saves wrong by itself."""
    buckets = functools.partial(DistributedDataParallelConfig, overlap_grad_reduce=True, bucket_size=3000)
    monkeypatch.setattr(optimizer, "DistributedDataParallelConfig", buckets)
    trainer = trainer_of("qwen3-tied")
    kit.run_updates(trainer, 2)
    (buffer,) = trainer.optimizer.ddp.buffers
    assert sum(bucket.grad_data.numel() > bucket.numel_unpadded for bucket in buffer.buckets) > 3
    trainer.save(tmp_path / "padded")
    resumed = trainer_of("qwen3-tied")
    resumed.load(tmp_path / "padded")
    assert all(torch.equal(*pair) for pair in zip(moments(resumed), moments(trainer), strict=True))
    assert kit.largest_difference(kit.weights(resumed), kit.weights(trainer)) == 0.0


def test_saving_starts_no_manager_process(trainer_of, tmp_path):
    trainer_of("qwen3-tied").save(tmp_path / "one")
    assert multiprocessing.active_children() == []


def test_a_killed_save_leaves_the_previous_checkpoint(kit, trainer_of, tmp_path, monkeypatch):
    trainer = trainer_of("qwen3-tied")
    kit.run_updates(trainer, 1)
    trainer.save(tmp_path / "latest")
    kept = kit.weights(trainer)
    kit.run_updates(trainer, 1, first=1)
    with monkeypatch.context() as killed:
        killed.setattr(folders, "commit", lambda folder: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            trainer.save(tmp_path / "latest")
    resumed = trainer_of("qwen3-tied")
    resumed.load(tmp_path / "latest")
    assert resumed.version == 1
    assert kit.largest_difference(kit.weights(resumed), kept) == 0.0
    trainer.save(tmp_path / "latest")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_save_killed_between_its_renames_is_recovered(kit, trainer_of, tmp_path):
    trainer = trainer_of("qwen3-tied")
    kit.run_updates(trainer, 1)
    trainer.save(tmp_path / "latest")
    (tmp_path / "latest").rename(tmp_path / ".latest.replaced")
    resumed = trainer_of("qwen3-tied")
    resumed.load(tmp_path / "latest")
    assert resumed.version == 1


def test_a_missing_checkpoint_is_refused(trainer_of, tmp_path):
    with pytest.raises(CheckpointError, match="doesn't exist"):
        trainer_of("qwen3-tied").load(tmp_path / "none")


@pytest.mark.parametrize("name", ["files.json", "metadata.json", "common.pt", ".metadata", "__0_0.distcp"])
def test_an_incomplete_checkpoint_is_refused(kit, trainer_of, tmp_path, name):
    trainer = trainer_of("qwen3-tied")
    trainer.save(tmp_path / "one")
    (tmp_path / "one" / name).unlink()
    with pytest.raises(CheckpointError, match=rf"has no {name}; it is incomplete"):
        trainer.load(tmp_path / "one")


def test_a_truncated_checkpoint_is_refused(trainer_of, tmp_path):
    trainer = trainer_of("qwen3-tied")
    trainer.save(tmp_path / "one")
    (tmp_path / "one" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has 5 bytes; \d+ were saved"):
        trainer.load(tmp_path / "one")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 1e-5}, r"has eps 1e-06; policies.main has 1e-05"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            r"has rope_theta 10000.0; policies.main has 500.0",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
            r"has rope_scaling 'default'; policies.main has '\{\"factor\": 4.0, \"rope_type\": \"linear\"\}'",
        ),
        ({"max_position_embeddings": 128}, r"has max_positions 256; policies.main has 128"),
    ],
    ids=["eps", "theta", "scaling", "positions"],
)
def test_a_checkpoint_is_refused_after_its_model_s_config_changed(kit, world, trainer_of, models, tmp_path, changes, message):
    """The weights would fit, and mean another function."""
    trainer_of("llama-tied").save(tmp_path / "one")
    folder = shutil.copytree(models / "llama-tied", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        kit.make_trainer(folder, world).load(tmp_path / "one")


def test_files_are_on_the_disk_before_they_take_their_place(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def watched(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    partial = folders.begin(tmp_path / "one")
    for name in ("weights", "files.json"):
        (partial / name).write_text(name)
    folders.commit(tmp_path / "one")
    assert sorted(flushed) == sorted(str(path) for path in (partial, partial / "weights", partial / "files.json"))
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["files.json", "weights"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen3-untied", {}, r"has tied True; policies.main has False"),
        ("llama-tied", {}, r"has family 'qwen3'; policies.main has 'llama'"),
        ("qwen3-tied", {"dtype": "bfloat16"}, r"has dtype 'float32'; policies.main has 'bfloat16'"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(trainer_of, tmp_path, name, settings, message):
    trainer_of("qwen3-tied").save(tmp_path / "one")
    with pytest.raises(CheckpointError, match=message):
        trainer_of(name, **settings).load(tmp_path / "one")
