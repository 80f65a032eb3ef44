"""A tiny model measured for real (engine, updates, a push), and a description of the machine that can be planned with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from drmas.cli.plan import run_plan
from drmas.planning.cluster import load_cluster
from drmas.planning.measuring import BATCHES, UPDATES

SCRIPT = """
import sys
from pathlib import Path
from drmas.planning.calibration import description, fitted
from drmas.planning.measuring import measure
machine = measure("tiny:qwen3", rounds=1)
(run,) = machine.engines
print(len(run.work), sum(one.prompt_tokens for one in run.work), max(one.sequences for one in run.work), sep=",")
print(len(machine.updates), len(machine.scores), machine.sync_bytes, min(one.seconds for one in run.work) > 0, sep=",")
Path(sys.argv[1]).write_text(description(machine, fitted(machine), name="tiny-machine"))
"""


@pytest.mark.timeout(600)
def test_a_machine_is_measured_and_planned_with(tmp_path):
    path = tmp_path / "machine.toml"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, env=environment, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    engine, trainer = done.stdout.splitlines()[-2:]
    pieces, prompts, most = map(int, engine.split(","))
    assert pieces >= 2 * len(BATCHES) - 1  # a piece for the prompts, one more where one sequence ends early
    assert prompts == sum(count * prompt for count, prompt, _ in BATCHES)
    assert most == max(count for count, _, _ in BATCHES)
    assert trainer.split(",")[:2] == [str(len(UPDATES))] * 2
    assert float(trainer.split(",")[2]) > 1e6
    assert trainer.endswith("True")
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.gpu) == ("tiny-machine", False)
    assert 0 < cluster.efficiencies.train <= 1
    assert "plan         arithmetic-tiny on tiny-machine" in run_plan("arithmetic-tiny", [], cluster=str(path))
