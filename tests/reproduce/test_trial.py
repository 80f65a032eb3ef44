"""The trials themselves, with real trainers and engines, at a fraction of the size; the report's numbers come from these
fields."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drmas.reproduce import plan, scenarios
from drmas.reproduce import trial as trial_module
from drmas.reproduce.plan import Trial
from drmas.reproduce.results import read_results
from drmas.reproduce.trial import measured, run_trial
from drmas.telemetry.sinks import read_metrics

STEPS = 4


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A root with a start of a few supervised steps and a trial of `STEPS` steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRMAS_CACHE", str(tmp_path_factory.mktemp("cache")))
        size = replace(plan.QUICK, steps=STEPS, moments_every_steps=2, eval_tasks=4)
        patch.setattr(scenarios, "scale", lambda quick: size)
        real = scenarios.load

        def shorter(recipe: str, words: list[str]):
            smaller = ["--rollout.tasks_per_step", "3", "--warm_start.steps", "10", "--warm_start.batch_size", "8"]
            return real(recipe, [*words, *smaller])

        patch.setattr(scenarios, "load", shorter)
        threads = torch.get_num_threads()
        root = tmp_path_factory.mktemp("reproduce")
        start = Trial("maths-separate", "start", 0)
        for trial in (start, *(Trial("maths-separate", method, 0, (start.key,)) for method in ("dr-mas", "grpo"))):
            (root / "trials" / trial.key).mkdir(parents=True)
            run_trial(trial, root, quick=True)
        yield root
        torch.set_num_threads(threads)


def _result(root, method: str) -> dict:
    return json.loads((root / "trials/maths-separate" / method / "seed-0/result.json").read_text())


def test_a_start_has_weights_for_every_policy_and_is_evaluated_once(small) -> None:
    folder = small / "trials/maths-separate/start/seed-0"
    assert {path.name for path in (folder / "run/export").iterdir()} == {"solver", "verifier"}
    before = _result(small, "start")["eval"]["before"]
    assert len(before["avg"]) == len(before["pass"]) == 4
    assert all(0 <= value <= 1 for value in before["avg"])
    assert all((a > 0) == (p == 1.0) for a, p in zip(before["avg"], before["pass"], strict=True))


def test_a_trial_starts_there_and_reports_what_its_run_measured(small) -> None:
    result, folder = _result(small, "dr-mas"), small / "trials/maths-separate/dr-mas/seed-0"
    steps = read_metrics(folder / "run")
    assert result["steps"] == len(steps) == STEPS
    assert result["reward"] == [step["reward/mean"] for step in steps]
    assert result["grad_norm"]["solver"] == [step["train/solver/grad_norm"] for step in steps]  # its policy has one agent
    assert result["eval"]["before"] == _result(small, "start")["eval"]["before"]
    assert {each["step"] for each in result["moments"]} == {2, 4}
    assert {each["agent"] for each in result["moments"]} == {"solver", "verifier"}
    assert all(value is None or abs(value) < 1e-9 for value in result["row_sum"]["solver"])  # dr-mas centres each agent
    assert 0 < result["logprob_gap_max"] < 1e-4  # I11
    assert not (folder / "run/export").exists()
    assert json.loads((folder / "run/config.json").read_text())["policies"]["solver"]["model"].endswith("export/solver")


def test_methods_share_their_first_rollout(small) -> None:
    """Same weights, tasks and seeds: nothing differs before the first update."""
    grpo, dr_mas = _result(small, "grpo"), _result(small, "dr-mas")
    assert grpo["reward"][0] == dr_mas["reward"][0]
    assert grpo["entropy"]["solver"][0] == pytest.approx(dr_mas["entropy"]["solver"][0], abs=1e-6)


def test_I9_a_trial_run_again_gives_the_same_result(small, tmp_path) -> None:
    again = small / "trials/maths-separate/grpo/seed-0"
    before = (again / "result.json").read_bytes()
    run_trial(Trial("maths-separate", "grpo", 0), small, quick=True)
    assert (again / "result.json").read_bytes() == before


def test_a_run_that_was_told_to_stop_is_no_result(small, monkeypatch) -> None:
    """SIGTERM ends a run after its step, in good order; what it leaves is no trial."""
    real = trial_module.train

    def stopped(config, **options):
        return real(config.model_copy(update={"train": config.train.model_copy(update={"steps": 2})}), **options)

    monkeypatch.setattr(trial_module, "train", stopped)
    with pytest.raises(RuntimeError, match="2 of 4 steps"):
        run_trial(Trial("maths-separate", "rloo", 0), small, quick=True)
    folder = small / "trials/maths-separate/rloo"
    assert not (folder / "seed-0/result.json").exists()
    shutil.rmtree(folder)


def test_the_report_reads_what_trials_write(small) -> None:
    results = read_results(small)
    assert results.problems == ["settings.json: no such file", "bandit.json: no such file"]  # the runner's, not a trial's
    sizes = {trial.method: trial.parameters for trial in results.trials if trial.method != "start"}
    assert sizes == {method: {"solver": 153_408, "verifier": 153_408} for method in ("dr-mas", "grpo")}


def _step(reward: float | None, skipped: float = 0.0, valid: float | None = 1.0) -> dict:
    of_run = {"step": 1, "reward/mean": reward, "train/main/skipped": skipped, "rollout/logprob_gap_max": 0.0}
    return of_run | {"rollout/verifier/valid_share": valid}


@pytest.mark.parametrize(
    ("steps", "status", "why"),
    [
        ([_step(0.5)] * 10, "ok", None),
        ([_step(0.8)] * 2 + [_step(0.5)] * 6 + [_step(0.41)] * 2, "ok", None),
        ([_step(0.8)] * 2 + [_step(0.5)] * 6 + [_step(0.39)] * 2, "diverged", "fell from 0.80 to 0.39"),
        ([_step(0.5), _step(None)], "diverged", "step 2"),
        ([_step(0.5)] * 5 + [_step(0.5, valid=0.6)] * 4 + [_step(0.5, valid=None)], "ok", None),
        ([_step(0.5)] * 5 + [_step(0.5, valid=0.4)] * 5, "diverged", "valid turns of verifier fell from 1.00 to 0.40"),
        ([_step(0.5), _step(0.5, skipped=1.0)], "diverged", "1 update(s) with a gradient that is not finite"),
    ],
)
def test_what_counts_as_divergence(steps, status, why) -> None:
    config = scenarios.configure(Trial("maths-shared", "grpo", 0), Path("out"), quick=True)
    found = {"status": "ok", "error": None} | measured(config, steps)
    assert found["status"] == status
    assert (found["error"] is None) if why is None else why in found["error"]
