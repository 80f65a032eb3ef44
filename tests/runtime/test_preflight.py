"""Ranks with unequal software or settings are refused before anything starts, with both values and where they are."""

from __future__ import annotations

import pytest

from drmas.errors import ConfigError
from drmas.runtime import preflight
from drmas.runtime.preflight import check_engine_host, check_ranks, differences, facts
from drmas.telemetry.environment import shared_settings, software

SAME = {"torch": "2.13.0", "NCCL_P2P_LEVEL": "NVL", "configuration": "1a2b"}
PLACES = ["a, local rank 0", "a, local rank 1", "b, local rank 0", "b, local rank 1"]


def test_equal_ranks_pass():
    check_ranks([SAME] * 4, PLACES)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("torch", "2.14.1", r"torch is 2\.13\.0 on rank 0 \(a, local rank 0\), .* and 2\.14\.1 on rank 2 \(b, local rank 0\)"),
        ("NCCL_P2P_LEVEL", "SYS", r"NCCL_P2P_LEVEL is NVL on .* and SYS on rank 2 \(b, local rank 0\)"),
        ("NCCL_CUMEM_ENABLE", "0", r"NCCL_CUMEM_ENABLE is not set on rank 0 .* and 0 on rank 2"),
        ("configuration", "9f9f", r"configuration is 1a2b on .* and 9f9f on rank 2"),
    ],
)
def test_a_rank_that_differs_is_named_with_both_values(name, value, message):
    found = [SAME, SAME, SAME | {name: value}, SAME]
    with pytest.raises(ConfigError, match=message) as error:
        check_ranks(found, PLACES)
    assert "cluster.preflight" in str(error.value)


def test_all_differences_are_named_at_once_and_long_lists_are_cut():
    found = {f"rank {rank}": {"torch": "1" if rank else "2", "b": str(rank % 2)} for rank in range(9)}
    assert differences(found) == [
        "b is 0 on rank 0, rank 2, rank 4 and 2 more and 1 on rank 1, rank 3, rank 5 and 1 more",
        "torch is 2 on rank 0 and 1 on rank 1, rank 2, rank 3 and 5 more",
    ]


def test_two_ranks_in_one_place_are_refused():
    with pytest.raises(ConfigError, match=r"rank 0 \(a, local rank 0\), rank 1 \(a, local rank 0\) are in one place"):
        check_ranks([SAME, SAME], ["a, local rank 0"] * 2)


def test_settings_of_one_host_are_not_compared(monkeypatch):
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG_FILE", "HOME"):
        monkeypatch.setenv(name, "of this host")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert shared_settings() == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}


def test_facts_tell_the_configuration_from_another_and_hold_no_secret(monkeypatch, quick_config):
    monkeypatch.setenv("DRMAS_ENGINE_TOKEN", "a secret that stays here")
    mine = facts(quick_config)
    assert mine["torch"] == software()["torch"]
    other = facts(quick_config.model_copy(update={"seed": quick_config.seed + 1}))
    assert {name for name in mine if mine[name] != other[name]} == {"configuration"}
    assert not any("secret" in value for value in mine.values())


def test_an_engine_host_must_have_the_trainers_versions_and_settings(monkeypatch):
    theirs = software() | shared_settings()
    check_engine_host("tcp://h:1", theirs)
    check_engine_host("tcp://h:1", theirs | {"python": "3.12.1"})  # weights don't care
    with pytest.raises(ConfigError, match=r"torch is .* on rank 0 and 1\.0 on tcp://h:1"):
        check_engine_host("tcp://h:1", theirs | {"torch": "1.0"})
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE is not set on rank 0 and 1 on tcp://h:1"):
        check_engine_host("tcp://h:1", theirs | {"NCCL_CUMEM_ENABLE": "1"})


@pytest.fixture
def quick_config():
    from drmas.config.load import load

    return load("arithmetic-tiny", [])


def test_a_place_has_host_and_local_rank(monkeypatch):
    monkeypatch.setattr(preflight.socket, "gethostname", lambda: "node7")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert preflight.place() == "node7, local rank 3"
