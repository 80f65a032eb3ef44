"""Saving and continuing: exact at the same layout, possible at another, never from half a checkpoint."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata

from drmas.agents.team import load_team
from drmas.errors import CheckpointError
from drmas.policy import checkpoint, checkpoint_writer, folders
from drmas.policy.broadcast import Broadcast
from drmas.runtime.resume import Checkpoints

LAYOUTS = ("tp2", "tp2-sp", "dp2")
MOVED = {"qwen3-tied": {}, "qwen2-untied": {"dtype": "bfloat16"}}
CASES = ("tp2", "pp2", "dp2", "cp2", "last rank", "dp4", "dp4, overlapped", "tp2 pp2", "pp2 dp2", "tp2 dp2")
"""Layouts of checkpoint_ranks.py."""


def optimizer_tensors(trainer):
    """Adam's moments and the fp32 parameters in one vector each, in the order of the buffers, and the number of steps."""
    sharded = trainer.optimizer.megatron
    states = [sharded._get_main_param_and_optimizer_states(parameter) for parameter in trainer.model.parameters()]
    vectors = [torch.cat([state[key].flatten() for state in states]) for key in ("param", "exp_avg", "exp_avg_sq")]
    return [*vectors, sharded.steps_taken.clone()]


def scramble(trainer):
    """Other weights and moments without an update, of a policy that has seen seven of them."""
    generator = torch.Generator().manual_seed(11)
    sharded = trainer.optimizer.megatron
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            tensors = sharded._get_main_param_and_optimizer_states(parameter)
            for tensor in tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            parameter.copy_(tensors["param"].view(parameter.shape))
    sharded.steps_taken.fill_(7)
    trainer.optimizer.steps = trainer.version = 7


def of_the_policy(report):
    """The metrics of an update that don't depend on the layout, as those of padding do."""
    return {key: report["metrics"][key] for key in ("loss", "grad_norm", "lr", "tokens", "skipped")}


@pytest.fixture(scope="module")
def moved(kit, world, models, tmp_path_factory):
    """What four ranks made of checkpoints of one: (each rank's findings, the folder, the one-rank policies by model)."""
    shared = tmp_path_factory.mktemp("moved")
    owners = {}
    for name, settings in MOVED.items():
        owners[name] = kit.make_trainer(models / name, world, **settings)
        scramble(owners[name])
        owners[name].save(shared / f"{name} by one")
        save_file(kit.weights(owners[name]), shared / f"{name} by one.safetensors")
    updated = kit.make_trainer(models / "qwen3-tied", world)
    kit.run_updates(updated, 1)
    updated.save(shared / "updated by one")
    return kit.launch("checkpoint_ranks.py", 4, models, shared), shared, owners


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
    assert all(torch.equal(*pair) for pair in zip(optimizer_tensors(second), optimizer_tensors(straight), strict=True))
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
    assert of_the_policy(found["reports"][0]) == pytest.approx(of_the_policy(expected), rel=1e-5)
    assert kit.largest_difference(found["weights"], kit.weights(straight)) < 1e-6


@pytest.mark.parametrize("name", ["saved-by-tp2", "saved-by-dp2"])
def test_a_checkpoint_of_two_ranks_continues_on_one(kit, trainer_of, two_ranks, name):
    straight, resumed = trainer_of("qwen3-tied"), trainer_of("qwen3-tied")
    expected = kit.run_updates(straight, 2)[1]
    resumed.load(two_ranks["shared"] / name)
    assert of_the_policy(kit.run_updates(resumed, 1, first=1)[0]) == pytest.approx(of_the_policy(expected), rel=1e-5)
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


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("case", CASES)
def test_what_another_layout_loads_and_saves_is_bit_by_bit_the_same(kit, world, models, moved, name, case):
    """Weights, moments, fp32 parameters, steps and version; on some ranks of the job, too, and behind padded buckets."""
    ranks, shared, owners = moved
    findings = [found["moved"][f"{name} {case}"] for found in ranks if f"{name} {case}" in found["moved"]]
    assert findings
    assert findings == [(7, 0.0, True)] * len(findings)
    back = kit.make_trainer(models / name, world, **MOVED[name])
    back.load(shared / f"{name} through {case}")
    assert (back.version, back.optimizer.steps) == (7, 7)
    assert kit.largest_difference(kit.weights(back), kit.weights(owners[name])) == 0.0
    assert all(torch.equal(*pair) for pair in zip(optimizer_tensors(back), optimizer_tensors(owners[name]), strict=True))


@pytest.mark.parametrize("case", CASES[5:])
def test_I9_a_layout_of_four_ranks_goes_on_from_one_and_resumes_bitwise(kit, trainer_of, moved, case):
    straight = trainer_of("qwen3-tied")
    expected = kit.run_updates(straight, 2)[1]
    for found in (each["resumed"][case] for each in moved[0]):
        assert found["version"] == 1
        assert found["bitwise"]
        assert of_the_policy(found["report"]) == pytest.approx(of_the_policy(expected), rel=1e-5)
        assert kit.largest_difference(found["weights"], kit.weights(straight)) < 1e-6


def test_a_full_disk_of_any_rank_is_told_to_all_and_costs_nothing(moved):
    ranks, _, _ = moved
    found = ranks[1]["full"]
    assert found == ranks[3]["full"]
    for asynchronous in (False, True):
        assert "rank 1 of the policy: [Errno 28] No space left" in found[f"tensors, asynchronous {asynchronous}"]
        assert "full can't be saved: [Errno 28] No space left" in found[f"list, asynchronous {asynchronous}"]
        assert "bytes are free there" in found[f"list, asynchronous {asynchronous}"]
    assert found["left"] == ["full"]
    assert found["kept"]


def test_a_pipeline_refuses_a_checkpoint_without_its_last_stage(moved):
    ranks, _, _ = moved
    assert ranks[2]["damaged"] == ranks[3]["damaged"]
    assert "has no __1_0.distcp; it is incomplete" in ranks[2]["damaged"]


def test_an_asynchronous_save_keeps_the_moment_it_was_asked_for(kit, trainer_of, tmp_path, monkeypatch):
    """The thread is held up until training has gone on."""
    straight, saved = trainer_of("qwen3-tied"), trainer_of("qwen3-tied")
    for trainer in (straight, saved):
        kit.run_updates(trainer, 1)
    before, kept = optimizer_tensors(saved), kit.weights(saved)
    go, write = threading.Event(), checkpoint_writer._write_item

    def held_up(*arguments):
        assert go.wait(30)
        return write(*arguments)

    monkeypatch.setattr(checkpoint_writer, "_write_item", held_up)
    with saved.active():
        pending = checkpoint.save_async(saved, tmp_path / "one")
    assert kit.run_updates(saved, 1, first=1) == kit.run_updates(straight, 1, first=1)
    assert not pending.done()
    assert not (tmp_path / "one").exists()
    go.set()
    pending.finish()
    assert pending.done()
    resumed = trainer_of("qwen3-tied", seed=99)
    resumed.load(tmp_path / "one")
    assert resumed.version == 1
    assert kit.largest_difference(kit.weights(resumed), kept) == 0.0
    assert all(torch.equal(*pair) for pair in zip(optimizer_tensors(resumed), before, strict=True))
    assert kit.run_updates(resumed, 1, first=1)[0]["metrics"] == kit.run_updates(trainer_of("qwen3-tied"), 2)[1]["metrics"]


def test_saving_starts_no_manager_process(trainer_of, tmp_path):
    trainer_of("qwen3-tied").save(tmp_path / "one")
    assert multiprocessing.active_children() == []


def test_a_save_that_fails_at_its_end_leaves_the_previous_checkpoint(kit, trainer_of, tmp_path, monkeypatch):
    trainer = trainer_of("qwen3-tied")
    kit.run_updates(trainer, 1)
    trainer.save(tmp_path / "latest")
    kept = kit.weights(trainer)
    kit.run_updates(trainer, 1, first=1)
    with monkeypatch.context() as killed:
        killed.setattr(folders, "commit", lambda folder: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(CheckpointError, match="killed"):
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


def test_a_save_killed_at_any_file_operation_leaves_a_whole_checkpoint(kit, world, models, tmp_path):
    """SIGKILL at each of them, one process each; after all of them the next save works and leaves nothing behind."""
    older = kit.make_trainer(models / "qwen3-tied", world)
    older.save(tmp_path / "older")
    shared = tmp_path / "killed"
    subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_saves.py"), models / "qwen3-tied", shared, tmp_path / "older"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=240,
    )
    looked, versions = kit.make_trainer(models / "qwen3-tied", world), []
    for number in range(len(list(shared.iterdir()))):
        folder = shared / str(number) / "latest"
        looked.load(folder)
        versions.append(looked.version)
        shift = {
            name: tensor - older
            for (name, tensor), older in zip(kit.weights(looked).items(), kit.weights(older).values(), strict=True)
        }
        assert all(torch.allclose(each, torch.full_like(each, looked.version)) for each in shift.values()), number
        older.save(folder)
        assert [path.name for path in folder.parent.iterdir()] == ["latest"]
    assert len(versions) > 15
    assert versions == sorted(versions)  # the old one until the renames, the new one after them
    assert set(versions) == {0, 1}


@pytest.mark.parametrize("free", [0, 100_000])
def test_want_of_room_is_told_before_anything_is_written(trainer_of, tmp_path, monkeypatch, free):
    trainer = trainer_of("qwen3-tied")
    trainer.save(tmp_path / "one")
    trainer.version = 1
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    size = sum(file.stat().st_size for file in (tmp_path / "one").iterdir())
    with pytest.raises(
        CheckpointError, match=rf"one can't be saved: not enough room.*; it takes .* bytes; {free:,} bytes"
    ) as refused:
        trainer.save(tmp_path / "one")
    wanted = int(str(refused.value).partition("it takes ")[2].partition(" bytes")[0].replace(",", ""))
    assert size < wanted < size + 2**21
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    trainer.load(tmp_path / "one")
    assert trainer.version == 0


def save(trainer, folder, asynchronous):
    with trainer.active():
        if asynchronous:
            checkpoint.save_async(trainer, folder).finish()
        else:
            checkpoint.save(trainer, folder)


@pytest.mark.parametrize("limit", [100, 5_000, 40_000, 250_000, 340_000])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_fills_while_saving_costs_nothing(trainer_of, tmp_path, monkeypatch, limit, asynchronous):
    """No file may grow beyond `limit`, as where a disk is full; the process isn't told by a signal."""
    trainer = trainer_of("qwen3-tied")
    trainer.save(tmp_path / "one")
    trainer.version = 1
    resource, signal = pytest.importorskip("resource"), pytest.importorskip("signal")
    before, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"one can't be saved: .*File too large.* bytes are free there"):
            save(trainer, tmp_path / "one", asynchronous)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    trainer.load(tmp_path / "one")
    assert trainer.version == 0


def test_weights_can_be_taken_alone_whether_they_were_trained_or_not(kit, trainer_of, tmp_path):
    trained = trainer_of("qwen3-tied")
    scramble(trained)
    trained.save(tmp_path / "one")
    frozen = trainer_of("qwen3-tied", trainable=False)
    with frozen.active():
        checkpoint.load_weights(frozen, tmp_path / "one")
    assert frozen.version == 7
    assert kit.largest_difference(kit.weights(frozen), kit.weights(trained)) == 0.0


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


class Trap:
    """Makes the folder `place` when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def relist(folder, change):
    """`change` the list of tensors, so that the checkpoint is whole by its files and their sizes."""
    listing = pickle.loads((folder / ".metadata").read_bytes())
    change(listing)
    (folder / ".metadata").write_bytes(pickle.dumps(listing))
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.name != "files.json"}
    (folder / "files.json").write_text(json.dumps(sizes))


def replace_entry(folder, key, content):
    """Put `content` in the place of the first entry whose name starts with `key`."""
    with open(folder / "__0_0.distcp", "ab") as stream:
        start = stream.seek(0, os.SEEK_END)
        torch.save(content, stream)
        length = stream.tell() - start

    def change(listing):
        place = next(place for index, place in listing.storage_data.items() if index.fqn.startswith(key))
        place.offset, place.length = start, length

    relist(folder, change)


def plant(folder, where, trap):
    if where == "list":
        relist(folder, lambda listing: setattr(listing, "planner_data", trap))
    elif where == "facts":
        torch.save({"policy": trap}, folder / "common.pt")
        relist(folder, lambda listing: None)
    else:
        replace_entry(folder, where, [trap])


def test_a_list_that_the_first_releases_of_python_3_11_write_is_read(trainer_of, tmp_path, monkeypatch):
    """A member of an enumeration is `getattr` of its class and name there."""
    trainer, folder = trainer_of("qwen3-tied"), tmp_path / "policy-main"

    def as_they_do(member, protocol):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", as_they_do)
    trainer.save(folder)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    trainer.load(folder)


class Attribute:
    """Of torch.Size, which a list may name; its attributes it may not."""

    def __reduce__(self):
        return getattr, (torch.Size, "mro")


def test_an_attribute_of_anything_but_an_enumeration_is_refused(trainer_of, tmp_path):
    trainer, folder = trainer_of("qwen3-tied"), tmp_path / "policy-main"
    trainer.save(folder)
    plant(folder, "list", Attribute())
    with pytest.raises(CheckpointError, match="an attribute of what is no enumeration of a checkpoint"):
        trainer.load(folder)


@pytest.mark.parametrize("where", ["list", "facts", "rng", "decoder", "optimizer"])
def test_nothing_that_a_checkpoint_names_is_run(kit, trainer_of, tmp_path, where):
    """By the policy itself, by a run that is resumed, and where the weights are taken alone, as for an export."""
    trainer, folder = trainer_of("qwen3-tied"), tmp_path / "checkpoints" / "step_1" / "policy-main"
    trainer.save(folder)
    plant(folder, where, Trap(tmp_path / "sprung"))
    with pytest.raises(CheckpointError, match=r"can't be read: it names posix.mkdir, which no checkpoint needs") as refused:
        trainer.load(folder)
    file = {"list": ".metadata", "facts": "common.pt", "rng": "__0_0.distcp"}.get(where, "")
    assert str(folder / file) in str(refused.value)
    team = load_team({"name": "solver-verifier"})
    with pytest.raises(CheckpointError, match=r"posix.mkdir"):
        Checkpoints(tmp_path, team, Broadcast(), keep=1).load(1, {"main": trainer})
    if where in ("list", "facts", "decoder"):  # the others aren't read for it
        with trainer.active(), pytest.raises(CheckpointError, match=r"posix.mkdir"):
            checkpoint.load_weights(trainer, folder)
    assert not (tmp_path / "sprung").exists()


def test_a_tensor_that_the_list_calls_an_object_is_refused(trainer_of, tmp_path):
    trainer = trainer_of("qwen3-tied")
    trainer.save(tmp_path / "one")
    key = "decoder.final_layernorm.weight"
    relist(tmp_path / "one", lambda listing: listing.state_dict_metadata.update({key: BytesStorageMetadata()}))
    with pytest.raises(CheckpointError, match=r"\.metadata can't be read: .*decoder.final_layernorm.weight"):
        trainer.load(tmp_path / "one")


def test_a_checkpoint_reads_no_file_but_its_own(trainer_of, tmp_path):
    trainer = trainer_of("qwen3-tied")
    trainer.save(tmp_path / "one")
    shutil.copy(tmp_path / "one" / "__0_0.distcp", tmp_path / "another")

    def change(listing):
        next(iter(listing.storage_data.values())).relative_path = "../another"

    relist(tmp_path / "one", change)
    with pytest.raises(CheckpointError, match=r"names \.\./another, which is no file of the checkpoint"):
        trainer.load(tmp_path / "one")


def without(key):
    def change(listing):
        del listing.state_dict_metadata[next(name for name in listing.state_dict_metadata if name.startswith(key))]

    return lambda folder: relist(folder, change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("decoder"), r"one' has no decoder\."),
        (without("optimizer.state.exp_avg_sq"), r"one' has no optimizer.state.exp_avg_sq\."),
        (without("rng"), r"one' has no rng/shard_0_1"),
        (lambda folder: replace_entry(folder, "rng", [{"cpu": torch.zeros(3)}]), r"one' has no random states of this policy"),
        (
            lambda folder: (folder / ".metadata").write_bytes(bytes((folder / ".metadata").stat().st_size)),
            r"\.metadata can't be",
        ),
    ],
    ids=["weights", "moments", "no random states", "others", "zeros"],
)
def test_a_checkpoint_is_refused_before_anything_is_changed(kit, trainer_of, tmp_path, damage, message):
    saved, trainer = trainer_of("qwen3-tied"), trainer_of("qwen3-tied", seed=99)
    scramble(saved)
    saved.save(tmp_path / "one")
    damage(tmp_path / "one")
    weights, moments, state = kit.weights(trainer), optimizer_tensors(trainer), trainer.rng.state["cpu"].clone()
    with pytest.raises(CheckpointError, match=message):
        trainer.load(tmp_path / "one")
    assert kit.largest_difference(kit.weights(trainer), weights) == 0.0
    assert all(torch.equal(*pair) for pair in zip(optimizer_tensors(trainer), moments, strict=True))
    assert torch.equal(trainer.rng.state["cpu"], state)
    assert (trainer.version, trainer.optimizer.steps) == (0, 0)


def test_adapters_are_refused_over_another_base(kit, world, models, tmp_path):
    """Of the same shape; the same base in another place and in other files is the same."""
    lora = {"lora": {"rank": 4}}
    kit.make_trainer(models / "qwen3-tied", world, **lora).save(tmp_path / "one")
    same, other = (shutil.copytree(models / "qwen3-tied", tmp_path / name) for name in ("same", "other"))
    tensors = load_file(same / "model.safetensors")
    (same / "model.safetensors").unlink()
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensor for name, tensor in tensors.items() if names[name] == file}, same / file)
    (same / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    kit.make_trainer(same, world, **lora).load(tmp_path / "one")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.01
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"one' has base model '\w{32}'; policies.main has '\w{32}'"):
        kit.make_trainer(other, world, **lora).load(tmp_path / "one")
