"""Files of a reproduction: what is right is read in one order, and what isn't is named."""

import json
import math

import pytest

from drmas.errors import DataError
from drmas.reproduce.analysis import trial_numbers
from drmas.reproduce.plan import trials as plan
from drmas.reproduce.results import read_results
from tests.reproduce.fabricated import crashed, reproduction, trial, write


def one() -> dict:
    return trial("maths-shared", "grpo", 0, steps=10)


def problems_of(tmp_path, **changed) -> list[str]:
    write(tmp_path, [{**one(), **changed}], bandit={})
    folder = tmp_path / "trials" / "maths-shared" / "grpo"
    if (folder / "seed-0").is_dir() is False:
        (folder / f"seed-{changed['seed']}").rename(folder / "seed-0")
    results = read_results(tmp_path)
    assert results.trials == []
    return results.problems


def test_everything_is_read_in_the_order_of_keys_whoever_wrote_first(tmp_path):
    trials = reproduction(seeds=2)
    first = read_results(write(tmp_path / "a", trials, bandit={"regimes": []}))
    second = read_results(write(tmp_path / "b", trials[::-1], bandit={"regimes": []}))
    assert first == second
    assert [one.key for one in first.trials] == sorted((t["scenario"], t["method"], t["seed"]) for t in trials)
    assert (first.problems, first.bandit, first.settings) == ([], {"regimes": []}, {"code": "0123"})


def test_planned_trials_without_a_folder_are_named(tmp_path):
    planned = [one for one in plan(quick=True) if one.key not in ("maths-shared/rloo/seed-0", "maths-shared/rloo/seed-2")]
    trials = [trial(one.scenario, one.method, one.seed, steps=5) for one in planned]
    results = read_results(write(tmp_path, trials, {"quick": True}, bandit={}))
    assert results.problems == ["trials/maths-shared/rloo: seed 0, 2 not run yet"]
    assert len(results.planned) == len(planned) + 2


def test_values_stay_what_they_were(tmp_path):
    written = one()
    written["grad_norm"]["solver"][3] = None
    (read,) = read_results(write(tmp_path, [written])).trials
    assert read.grad_norm == written["grad_norm"]
    assert (read.reward, read.valid, read.uncompared) == tuple(written[key] for key in ("reward", "valid", "uncompared"))
    assert read.moments[1].model_dump() == written["moments"][1]
    assert (read.eval.after.avg, read.eval.after.passed) == (written["eval"]["after"]["avg"], written["eval"]["after"]["pass"])


def test_older_results_lack_what_is_new(tmp_path):
    written = {key: value for key, value in one().items() if key not in ("valid", "uncompared")}
    for moment in written["moments"]:
        del moment["covariance"]
    (read,) = read_results(write(tmp_path, [written])).trials
    assert (read.valid, read.uncompared, read.moments[0].covariance) == ({}, {}, None)


def test_a_crashed_trial_needs_only_its_cause(tmp_path):
    (read,) = read_results(write(tmp_path, [crashed("maths-shared", "grpo", 0, "killed by signal 9")])).trials
    assert (read.status, read.error, read.reward) == ("crashed", "killed by signal 9", [])


def test_norms_that_are_not_finite_are_kept(tmp_path):
    written = one()
    written["grad_norm"]["solver"][3:5] = [math.nan, math.inf]
    (read,) = read_results(write(tmp_path, [{**written, "status": "diverged"}])).trials
    assert math.isnan(read.grad_norm["solver"][3])
    assert read.grad_norm["solver"][4] == math.inf


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reward": "high"}, "reward: Input should be a valid list"),
        ({"status": "fine"}, "status: Input should be 'ok', 'crashed' or 'diverged'"),
        ({"reward": [0.1] * 9}, "reward has 9 numbers; expected one for each of 10 steps"),
        ({"valid": {"solver": [0.0]}}, "valid.solver has 1 numbers; expected one for each of 10 steps"),
        ({"row_sum": {"solver": [0.0]}}, "row_sum.solver has 1 numbers; expected one for each of 10 steps"),
        ({"eval": {"after": {"avg": [0.5], "pass": []}}}, "eval.after has 1 tasks in avg and 0 in pass; expected the same"),
        ({"seed": 3}, "says that it is maths-shared/grpo/seed-3; expected maths-shared/grpo/seed-0, as its folder is named"),
    ],
)
def test_a_result_that_is_wrong_is_named(tmp_path, changed, said):
    (line,) = problems_of(tmp_path, **changed)
    assert line.startswith(f"trials/maths-shared/grpo/seed-0/result.json: {said}")


def test_a_file_that_is_missing_or_broken_is_named(tmp_path):
    write(tmp_path, [one()])
    (tmp_path / "settings.json").unlink()
    for name, text in (("seed-1", None), ("seed-2", "{"), ("seed-3", "[]")):
        folder = tmp_path / "trials" / "maths-shared" / "grpo" / name
        folder.mkdir()
        if text:
            (folder / "result.json").write_text(text)
    results = read_results(tmp_path)
    assert [trial.seed for trial in results.trials] == [0]
    assert [line.partition(": ")[0] for line in results.problems] == [
        "settings.json",
        "bandit.json",
        *(f"trials/maths-shared/grpo/seed-{seed}/result.json" for seed in (1, 2, 3)),
    ]
    assert results.problems[1] == "bandit.json: no such file"
    assert "can't be read: Expecting property name" in results.problems[3]
    assert results.problems[4].endswith("holds a list; expected an object")
    assert str(tmp_path) not in "".join(results.problems)


def test_a_bandit_that_crashed_says_why(tmp_path):
    write(tmp_path, [one()])
    (tmp_path / "bandit").mkdir()
    (tmp_path / "bandit" / "result.json").write_text(json.dumps({"status": "crashed", "error": "MemoryError"}))
    assert read_results(tmp_path).problems == ["bandit.json: no such file; it crashed: MemoryError"]


def test_a_folder_with_nothing_to_report_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing to report.*\n  settings.json: no such file\n  bandit.json: no such file"):
        read_results(tmp_path)


def test_agents_that_may_be_penalised_are_known_from_the_trials_configuration(tmp_path):
    """Their advantages needn't sum to zero, so that the row sums of a trial are those of the others."""
    one = trial("maths-shared", "dr-mas", 0)
    one["row_sum"] = {"solver": [0.0] * 60, "verifier": [-8.0] * 60}
    one["rows"] = {"solver": [16.0] * 60, "verifier": [16.0] * 60}
    write(tmp_path, [one])
    (found,) = read_results(tmp_path).trials
    assert found.penalised == []
    assert trial_numbers(found)["imbalance"] == pytest.approx(0.25)
    run = tmp_path / "trials/maths-shared/dr-mas/seed-0/run"
    run.mkdir()
    agents = {"solver": {"invalid_penalty": 0.0}, "verifier": {"invalid_penalty": 0.1}}
    (run / "config.json").write_text(json.dumps({"team": {"name": "solver-verifier", **agents}}))
    (found,) = read_results(tmp_path).trials
    assert found.penalised == ["verifier"]
    assert trial_numbers(found)["imbalance"] == 0.0
