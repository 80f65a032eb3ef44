"""What the table of the weight sync's bench is made of, and a small run of it with a real engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.suite.record import Result, printed
from bench.weight_sync import Push, loopback, memory_copy, quickest, summary

ROOT = Path(__file__).parents[2]
PUSHES = [
    Push(total=1.25, fill=0.3, arrive=0.5, load=0.6, finish=0.15, staged=0.75),
    Push(total=9.0, fill=9.0, arrive=9.0, load=9.0, finish=9.0, staged=9.0),
    Push(total=1.5, fill=0.2, arrive=0.7, load=0.5, finish=0.3, staged=0.8),
]


def test_a_result_is_made_of_the_best_of_each_part_and_of_ratios_within_the_run():
    push = quickest(PUSHES)
    assert push == Push(total=1.25, fill=0.2, arrive=0.5, load=0.5, finish=0.15, staged=0.75)
    found = summary({"broadcast": push, "disk": push, "shared-memory": push}, 10**9, model="m", threads=2, copy=8.0, tcp=4.0)
    assert found.tables[0].rows[0][:4] == ["broadcast", 1.25, 0.2, 0.5]
    assert found.tables[0].rows[0][-1] == pytest.approx(0.8)
    assert {ratio.name: ratio.value for ratio in found.ratios} == pytest.approx(
        {
            "shared-memory by a copy": 0.25,
            "broadcast by TCP over loopback": 0.5,
            "broadcast: pause when staged": 0.6,
            "disk: pause when staged": 0.6,
            "shared-memory: pause when staged": 0.6,
        }
    )
    assert [ratio.name for ratio in found.ratios if ratio.missed] == ["shared-memory by a copy"]


def test_the_bandwidths_beside_it_are_positive():
    assert memory_copy(size=2**20) > 0
    assert loopback(size=2**20) > 0


def test_a_small_run_has_every_transport(tmp_path):
    target = tmp_path / "sync.json"
    command = [sys.executable, str(ROOT / "bench" / "weight_sync.py"), "--small", "--threads", "1", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = Result.read(target)
    assert [row[0] for row in found.tables[0].rows] == ["broadcast", "shared-memory", "disk"]
    for _, total, fill, arrive, load, finish, staged, rate in found.tables[0].rows:
        assert 0 < fill < total
        assert arrive + load + finish <= total * (1 + 1e-9)
        assert min(staged, rate) > 0
    assert printed(found).strip() in done.stdout
