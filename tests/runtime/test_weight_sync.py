"""Which way a policy's weights take, by its own settings and those of the cluster."""

from __future__ import annotations

import pytest
import torch

from drmas.config.load import load
from drmas.errors import ConfigError
from drmas.policy import host_platform
from drmas.runtime import weight_sync
from drmas.runtime.weight_sync import transport_of

FAR = ("--cluster.engine_hosts", '["tcp://far:8200"]')
SHARED = ("--policies.main.engine.gpus", "shared")
HERE = ("--policies.main.engine.hosts", "[]")


def config(*words: str):
    return load("arithmetic-tiny", [*words])


@pytest.mark.parametrize(
    ("words", "gpu", "transport"),
    [
        ([], False, "shared-memory"),
        ([*FAR], False, "broadcast"),
        ([*FAR, *HERE], False, "shared-memory"),
        (["--policies.main.engine.backend", "torch", *FAR], False, "in-process"),
        ([*SHARED], True, "shared-memory"),
        (["--policies.main.engine.gpus", "own"], True, "broadcast"),
        ([*SHARED, *FAR], True, "broadcast"),
        ([*FAR, "--policies.main.tensor_parallel", "2"], False, "shards"),
        ([*FAR, "--policies.main.sync.transport", "disk"], False, "disk"),
    ],
)
def test_the_way_follows_the_placement(words, gpu, transport):
    assert transport_of(config(*words), "main", gpu=gpu)[0] == transport


def test_shared_memory_does_not_reach_another_host():
    with pytest.raises(ConfigError, match=r"policies\.main\.sync\.transport is shared-memory, and engines run on other hosts"):
        transport_of(config(*FAR, "--policies.main.sync.transport", "shared-memory"), "main", gpu=False)


@pytest.mark.parametrize(
    ("words", "device"),
    [([*SHARED, *FAR], "cuda"), (["--policies.main.engine.gpus", "own"], "cuda"), ([*SHARED, *FAR, *HERE], "cpu")],
)
def test_a_broadcast_goes_from_gpu_to_gpu_unless_engines_share_the_trainers(monkeypatch, words, device):
    """Engines on hosts of their own share nothing, whatever the key says: NCCL reaches them."""
    monkeypatch.setattr(host_platform, "is_host", lambda: False)
    monkeypatch.setattr(host_platform, "device", lambda: torch.device("cuda", 0))
    assert weight_sync._device(config(*words), "main", "broadcast").type == device


SECOND = ("--policies.other.model", "tiny:qwen3", "--policies.other.engine.gpus", "shared", "--team.verifier.policy", "other")
TWO_WORKERS = ("--policies.main.engine.replicas", "2")


@pytest.mark.parametrize(
    ("words", "world", "devices"),
    [
        ([*SHARED], 1, {"main": "cuda"}),
        ([*SHARED], 4, {"main": "cuda"}),
        ([*SHARED, *TWO_WORKERS], 4, {"main": "cpu"}),
        ([*SHARED, *SECOND], 1, {"main": "cuda", "other": "cuda"}),
        ([*SHARED, *SECOND], 2, {"main": "cuda", "other": "cpu"}),  # the second engine is on the second rank's GPU
        (["--policies.main.engine.gpus", "own"], 4, {"main": "cpu"}),
    ],
)
def test_memory_of_a_gpu_is_shared_with_the_one_engine_that_is_on_it(monkeypatch, words, world, devices):
    monkeypatch.setattr(host_platform, "is_host", lambda: False)
    monkeypatch.setattr(host_platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    made = config(*words)
    assert {name: weight_sync._device(made, name, "shared-memory").type for name in devices} == devices


def test_on_a_cpu_more_workers_than_ranks_share_memory():
    made = config(*SHARED, "--policies.main.engine.replicas", "3")
    assert weight_sync._device(made, "main", "shared-memory").type == "cpu"


def test_runs_that_share_a_folder_have_files_of_their_own(tmp_path):
    made = config("--policies.main.sync.transport", "disk", "--policies.main.sync.folder", str(tmp_path))
    one, other = (weight_sync._files(made, folder, "main") for folder in (tmp_path / "a" / "run", tmp_path / "b" / "run"))
    assert one != other
    assert one.parent.parent == other.parent.parent == tmp_path
    assert weight_sync._files(config(), tmp_path / "run", "main") == tmp_path / "run" / "weights" / "main"
