"""Predicted beside measured for a run's folder: what is compared, which steps count, and what the table says."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from drmas.agents.team import load_team
from drmas.config.load import dump
from drmas.config.load import load as load_recipe
from drmas.errors import DataError
from drmas.planning.cluster import load_cluster
from drmas.planning.growth import CALL_SECONDS
from drmas.planning.job import make_job
from drmas.planning.measured import Fixed, read_run
from drmas.planning.predict import predict
from drmas.planning.simulation import simulate
from drmas.planning.validation import PHASES, compare, table, to_dict

RUN = ["--rollout.tasks_per_step", "2", "--rollout.group_size", "2"]


def turn(agent: str, index: int, prompt: int, response: int):
    ids = {"prompt_ids": list(range(prompt)), "response_ids": [7] * response}
    return {"agent": agent, "policy": "main", "turn": index, "trained": True, **ids}


@pytest.fixture
def folder(tmp_path):
    """Three steps whose solvers write 4, 8 and 12 tokens."""
    (tmp_path / "config.json").write_text(dump(load_recipe("quickstart", RUN)))
    (tmp_path / "episodes").mkdir()
    lines = []
    for step in (1, 2, 3):
        episodes = [
            {
                "task": task,
                "sample": sample,
                "episode": f"{task}#{sample}",
                "probe": None,
                "tools": [],
                "turns": [turn("solver", 0, 40, 4 * step), turn("verifier", 1, 60, 2)],
            }
            for task in "ab"
            for sample in (0, 1)
        ]
        (tmp_path / "episodes" / f"step_{step}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in episodes))
        times = {"rollout": 1.0 * step, "train": 2.0 * step, "sync": 0.5, "step": 3.0 * step + 0.5}
        lines.append({"step": step, **{f"time/{phase}_seconds": seconds for phase, seconds in times.items()}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_steps_but_the_first_are_predicted_with_their_own_lengths(folder):
    cluster = load_cluster("laptop-cpu")
    found = compare(cluster, folder)
    assert [step.step for step in found.steps] == [2, 3]
    run = load_recipe(str(folder / "config.json"))
    team = load_team(run.team)
    work, source = read_run(folder, run, team, steps=[3])
    roll = partial(simulate, source=Fixed(source.measured), deterministic=True, call_seconds=CALL_SECONDS)
    phases = predict(make_job(run, team, cluster, work), roll).phases
    assert found.steps[1].predicted["rollout"] == pytest.approx(phases.rollout)
    assert found.steps[1].predicted["step"] == pytest.approx(phases.step)
    assert found.steps[1].predicted["rollout"] > found.steps[0].predicted["rollout"]
    assert found.mean("rollout", predicted=False) == pytest.approx(2.5)
    assert found.error("train") == pytest.approx(found.mean("train", predicted=True) / 5.0 - 1)
    assert found.defaults["step"] != pytest.approx(found.mean("step", predicted=True))
    assert found.defaults_error == pytest.approx(found.defaults["step"] / 8.0 - 1)


def test_a_run_of_one_step_has_that_one(folder):
    (folder / "episodes" / "step_2.jsonl").unlink()
    (folder / "episodes" / "step_3.jsonl").unlink()
    assert [step.step for step in compare(load_cluster("laptop-cpu"), folder).steps] == [1]


def test_a_faster_machine_is_predicted_to_be_faster(folder):
    slow = load_cluster("laptop-cpu")
    device = replace(slow.device, flops={"float32": 4 * slow.device.flops["float32"]})
    quick = replace(slow, device=device)
    one, other = (compare(cluster, folder) for cluster in (slow, quick))
    assert other.mean("train", predicted=True) < one.mean("train", predicted=True)
    assert other.mean("train", predicted=False) == one.mean("train", predicted=False)


def test_the_table_and_its_json_have_a_line_per_phase(folder):
    found = compare(load_cluster("laptop-cpu"), folder)
    lines = table([found]).splitlines()
    assert len(lines) == 2 + len(PHASES)
    assert lines[-1].startswith("| quickstart | step | 8.00 s | ")
    written = to_dict(found)
    assert list(written["phases"]) == list(PHASES)
    assert written["phases"]["step"]["error"] == pytest.approx(found.error("step"))
    assert json.loads(json.dumps(written))["steps"][0]["step"] == 2


def test_a_folder_without_steps_is_refused(folder):
    for step in (1, 2, 3):
        (folder / "episodes" / f"step_{step}.jsonl").unlink()
    with pytest.raises(DataError, match="no step with metrics and episodes"):
        compare(load_cluster("laptop-cpu"), folder)
