"""What placement hears of this machine, with and without GPUs, and of one that is only planned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from drmas.runtime import machine
from drmas.runtime.machine import Machine

SIZES = [80_000, 79_000, 80_000, 80_000]


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 5_000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def four_gpus(monkeypatch):
    """torch.cuda on a machine with four cards, one of them a little smaller."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(SIZES))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda gpu: SimpleNamespace(total_memory=SIZES[gpu]))


def test_a_machine_without_gpus_has_its_memory_alone(monkeypatch):
    assert not torch.cuda.is_available()
    assert Machine.here(3) == Machine(3, 0, None, 5_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the third rank is on another host
    assert Machine.here(3) == Machine(2, 0, None, 5_000)
    assert Machine.here(0) == Machine(0, 0, None, 5_000)


def test_the_smallest_gpu_counts(four_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Machine.here(16) == Machine(4, 4, 79_000, 5_000)


@pytest.mark.parametrize(
    ("world", "told", "expected"),
    [
        (4, {}, Machine(4, 8, None, assumed=True)),
        (24, {}, Machine(8, 8, None, assumed=True)),
        (4, {"gpus": 6}, Machine(4, 6, None)),
        (4, {"gpu_bytes": 7}, Machine(4, 8, 7, assumed=True)),
        (24, {"gpus": 4, "gpu_bytes": 7}, Machine(4, 4, 7)),
    ],
)
def test_what_a_plan_does_not_say_is_assumed_without_gpus_here(world, told, expected):
    assert Machine.planned(world, **told) == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, Machine(4, 4, 79_000)),
        ({"gpus": 8}, Machine(8, 8, None)),  # other hosts than this one
        ({"gpu_bytes": 7}, Machine(4, 4, 7)),
    ],
)
def test_it_is_this_machines_with_gpus_here(four_gpus, told, expected):
    assert Machine.planned(8, **told) == expected
