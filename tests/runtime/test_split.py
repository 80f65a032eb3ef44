"""Two policies in one job of two ranks: on both ranks (shared), or each on a rank of its own (split). Scripted engines."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SPLIT = ("--train.placement", "split")
TIMED = ("seconds", "per_second", "memory_bytes", "mfu")
POLICIES = """
[policies.one]
model = "tiny:qwen3"
lr = 1e-3
adam_eps = 1e-4

[policies.other]
model = "tiny:qwen3"
lr = 5e-4
adam_eps = 1e-4
"""
AGENTS = ("--team.solver.policy", "one", "--team.verifier.policy", "other")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def run(workplace: Path, scripted_run) -> Run:
    """Run the recipe under a name, on two ranks unless told; capitals are environment variables of the script."""
    start = scripted_run(workplace, POLICIES)
    return lambda name, *words, ranks=2, **more: start(*AGENTS, *words, name=name, ranks=ranks, **more)[0]


@pytest.fixture(scope="module")
def split(workplace: Path, run: Run) -> Path:
    """The folder of a run whose policies have a rank each, traced in its second step."""
    done = run("split", *SPLIT, "--telemetry.profile", "2")
    assert done.returncode == 0, done.stderr
    return workplace / "runs" / "split"


def metrics_of(folder: Path) -> list[dict[str, float]]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in step.items() if not key.endswith(TIMED)} for step in steps]


def weights_of(folder: Path, policy: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / policy / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_I5_split_gives_the_weights_and_the_metrics_of_shared(workplace: Path, run: Run, split: Path) -> None:
    done = run("shared")
    assert done.returncode == 0, done.stderr
    shared = workplace / "runs" / "shared"
    for ours, theirs in zip(metrics_of(split), metrics_of(shared), strict=True):
        for step in (ours, theirs):  # of two ranks each shares the prefixes of its own rows
            for key in [key for key in step if key.endswith(("tokens_saved", "computed_tokens", "flops"))]:
                step.pop(key)
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    for policy in ("one", "other"):
        assert largest_difference(weights_of(split, policy), weights_of(shared, policy)) < 1e-5
    assert largest_difference(weights_of(split, "one"), weights_of(split, "other")) > 1e-3  # and they do learn apart


def test_split_policies_are_updated_on_their_own_ranks_and_both_engines_follow(split: Path) -> None:
    last = metrics_of(split)[-1]
    assert (last["sync/one/version"], last["sync/other/version"]) == (2, 2)
    events = json.loads((split / "profile" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    trained = [(event["pid"], event["args"]["policy"]) for event in spans if event["name"] == "train"]
    assert sorted(trained) == [(0, "one"), (1, "other")]
    for rank, policy in enumerate(("one", "other")):
        own = {event["name"] for event in spans if event["pid"] == rank and event["args"].get("policy") == policy}
        assert own >= {"train", "pack", "forward", "backward", "optimiser", "sync"}
    assert {event["name"] for event in spans if event["pid"] == 0} >= {"step", "rollout", "grade", "advantage"}


def test_I9_a_split_run_that_lost_a_rank_resumes_as_if_it_had_not(workplace: Path, run: Run, split: Path) -> None:
    died = run("killed", *SPLIT, KILL="1:2")  # which ends it, since rank 0 doesn't wait for the group's timeout of days
    assert died.returncode != 0
    folder = workplace / "runs" / "killed"
    assert len(metrics_of(folder)) == 1
    done = run("killed", *SPLIT, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics_of(folder) == metrics_of(split)
    for policy in ("one", "other"):
        assert largest_difference(weights_of(folder, policy), weights_of(split, policy)) == 0


def test_an_error_on_one_policys_rank_ends_the_job_with_its_message_on_all(run: Run) -> None:
    done = run("failed", *SPLIT, FAIL="1:1")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "drmas: " in line]
    expected = "rank 1: update 1 of other was refused by the test"
    assert f"drmas: {expected}" in said
    assert f"drmas: rank 1: {expected}" in said


def test_an_error_while_one_policy_is_built_ends_the_job_with_its_message_on_all(run: Run) -> None:
    done = run("frozen", *SPLIT, "--policies.other.freeze", '["no.such.tensor"]')
    assert done.returncode != 0
    assert "drmas: rank 1: policies.other.freeze has 'no.such.tensor', which matches no tensor" in done.stderr


def test_a_run_whose_last_save_finds_the_disk_full_ends_with_status_2_and_keeps_what_it_had(workplace: Path, run: Run) -> None:
    done = run("full", ranks=1, FULL="step_2")
    assert done.returncode == 2
    assert "a checkpoint was not saved, training goes on" in done.stdout
    assert "drmas: the last save failed, so the run's end is not kept" in done.stderr
    assert "Traceback" not in done.stderr
    folder = workplace / "runs" / "full"
    assert len(metrics_of(folder)) == 2
    assert (folder / "checkpoints" / "step_1" / "run.json").is_file()
    assert not list((folder / "checkpoints").glob("*step_2*"))
    assert (folder / "export" / "other" / "model.safetensors").is_file()  # there was room for that
