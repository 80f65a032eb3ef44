"""Which transport a policy gets, by README.md's table, and that each name makes what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drmas.config.cluster import SyncConfig
from drmas.errors import ConfigError
from drmas.weights.choice import open_transport, payload_device
from drmas.weights.transport import InProcess, choose_transport

PLAIN = {
    "policy": "main",
    "gpu": False,
    "engines_local": True,
    "shared_gpus": False,
    "shards": 1,
    "adapters": False,
    "in_process": False,
}
GPU = torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "shared-memory"),
        ({"shards": 4}, "shared-memory"),
        ({"adapters": True, "gpu": True}, "shared-memory"),
        ({"gpu": True, "shared_gpus": True}, "shared-memory"),
        ({"gpu": True, "shared_gpus": True, "shards": 4}, "shared-memory"),
        ({"gpu": True}, "broadcast"),
        ({"gpu": True, "shards": 8}, "shards"),
        ({"gpu": True, "engines_local": False, "shards": 8}, "shards"),
        ({"gpu": True, "engines_local": False}, "broadcast"),
        ({"engines_local": False}, "broadcast"),
        ({"engines_local": False, "adapters": True, "shards": 2}, "broadcast"),
        ({"engines_local": False, "shards": 2}, "shards"),
        ({"in_process": True, "shards": 2}, "in-process"),
    ],
)
def test_auto_takes_what_fits(given, expected):
    name, reason = choose_transport("auto", **PLAIN | given)
    assert name == expected
    assert reason


@pytest.mark.parametrize("asked", ["broadcast", "shared-memory", "shards", "disk"])
def test_what_is_asked_for_is_taken(asked):
    assert choose_transport(asked, **PLAIN)[0] == asked
    assert choose_transport(asked, **PLAIN)[1] == "policies.main.sync.transport says so"


@pytest.mark.parametrize(
    ("asked", "given", "message"),
    [
        (
            "shared-memory",
            {"engines_local": False},
            r"policies\.main\.sync\.transport is shared-memory, and engines run on other hosts "
            r"\(policies\.main\.engine\.hosts, cluster\.engine_hosts\): set it to broadcast, shards or disk",
        ),
        ("shards", {"adapters": True}, r"sync\.transport is shards, and policies\.main\.lora\.sync is adapter"),
        ("disk", {"in_process": True}, r"sync\.transport is disk, and the backend of its engine is torch"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(asked, given, message):
    with pytest.raises(ConfigError, match=message):
        choose_transport(asked, **PLAIN | given)


@pytest.mark.parametrize(
    ("name", "shared", "beside", "adapters", "expected"),
    [
        ("broadcast", False, False, False, GPU),
        ("broadcast", True, True, False, torch.device("cpu")),  # NCCL refuses two processes on a GPU
        ("broadcast", False, False, True, torch.device("cpu")),
        ("shared-memory", True, True, False, GPU),
        ("shared-memory", True, True, True, torch.device("cpu")),
        ("shared-memory", True, False, False, torch.device("cpu")),  # some worker doesn't see rank 0's GPU
        ("shared-memory", False, False, False, torch.device("cpu")),
        ("disk", True, True, False, torch.device("cpu")),
    ],
)
def test_bytes_pass_through_the_gpu_where_all_ends_reach_it(name, shared, beside, adapters, expected):
    options = {"shared_gpus": shared, "beside": beside, "adapters": adapters}
    assert payload_device(name, gpu=GPU, **options) == expected
    assert payload_device(name, gpu=None, **options) == torch.device("cpu")


class Nothing:
    def metadata(self):
        return []

    def __iter__(self):
        return iter(())


def test_every_name_makes_a_transport():
    made = {
        name: open_transport(name, Nothing(), SyncConfig(), policy="main", folder=Path("nowhere"))
        for name in ("broadcast", "shared-memory", "disk", "in-process")
    }
    assert isinstance(made.pop("in-process"), InProcess)
    assert {name: transport._outbox.transport for name, transport in made.items()} == {name: name for name in made}
    assert all(transport.can_stage for transport in made.values())
    with pytest.raises(ValueError, match="no transport 'pigeon'"):
        open_transport("pigeon", Nothing(), policy="main", folder=Path("nowhere"))
