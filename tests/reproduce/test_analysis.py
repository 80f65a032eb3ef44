"""Numbers of trials against values computed by hand, numpy and the alarms' own code."""

import math
import random

import numpy as np
import pytest

from drmas.config.schema import AlarmConfig
from drmas.reproduce.analysis import (
    COMPARED,
    agent_numbers,
    analyse,
    in_order,
    quantile,
    smoothed,
    spike_ratios,
    trial_numbers,
)
from drmas.reproduce.results import Results, Trial
from drmas.telemetry.alarms import Alarms
from tests.reproduce.fabricated import crashed, reproduction, trial


def made(**values) -> Trial:
    return Trial.model_validate({"scenario": "s", "method": "grpo", "seed": 0, "status": "ok", **values})


def analysed(trials: list[dict], planned=()) -> dict:
    return analyse(Results([Trial.model_validate(one) for one in trials], {}, None, [], list(planned)))


def differences(scenario: dict) -> dict:
    return {(one["left"], one["right"]): one for one in scenario["differences"]}


def test_the_numbers_of_a_trial():
    found = trial_numbers(
        made(
            reward=[0.0] * 9 + [0.3, 0.5, 1.0],
            grad_norm={"a": [1.0] * 10, "b": [1.0, 3.0] * 5},
            row_sum={"a": [4.0, -2.0] + [None] * 8, "b": [0.0] * 10},
            rows={"a": [8.0, 8.0] + [0.0] * 8, "b": [8.0] * 10},
            eval={"before": {"avg": [0.0, 0.5], "pass": [0, 1]}, "after": {"avg": [0.25, 1.0], "pass": [1, 1]}},
        )
    )
    assert found["final"] == 0.75
    assert found["area"] == pytest.approx(0.15)
    assert (found["avg_before"], found["pass_before"], found["avg"], found["pass"]) == (0.25, 0.5, 0.625, 1.0)
    assert found["imbalance"] == pytest.approx((0.375 + 0.0) / 2)
    assert found["variation"] == pytest.approx((0.0 + 0.5) / 2)
    assert found["spikes"] == 0.0


def test_the_numbers_of_an_agent():
    norms = [1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0, None, 2.0, 0.0]
    factors = [0.5, 1.0, 2.5, None, 3.0, 1.5, 1.0, 1.0, 1.0, 1.0]
    found = agent_numbers(made(grad_norm={"a": norms}, inflation={"a": factors}, calls={"a": [1.0, 2.0]}), "a")
    there = [value for value in norms if value is not None]
    assert found["grad_mean"] == pytest.approx(np.mean(there))
    assert found["variation"] == pytest.approx(np.std(there) / np.mean(there))
    assert (found["spikes"], found["largest"]) == (0.25, 4.0), "of the four norms with a median of those before"
    known = [value for value in factors if value is not None]
    assert found["inflation_mean"] == pytest.approx(np.mean(known))
    assert found["inflation_p95"] == pytest.approx(np.percentile(known, 95))
    assert (found["inflation_above_2"], found["calls"], found["imbalance"]) == (pytest.approx(2 / 9), 1.5, None)


def test_spikes_are_the_steps_at_which_the_alarm_would_hold():
    draw = random.Random(3)
    norms = [draw.lognormvariate(0, 0.8) * draw.choice([1, 1, 1, 0, 5]) for _ in range(300)]
    norms[50], norms[200] = math.nan, math.inf
    alarms, expected = Alarms(AlarmConfig()), []
    for norm in norms:
        alarms.replay([{"train/main/solver/grad_norm": norm}])
        expected.append(alarms.active == 1)
    ratios = spike_ratios(norms)
    assert [ratio is not None and ratio > AlarmConfig().spike for ratio in ratios] == expected
    assert 10 < sum(expected) < 100
    assert ratios[:5] == [None] * 5


def test_quantiles_are_numpys():
    draw = random.Random(0)
    for size in (1, 2, 7, 40):
        values = [draw.random() for _ in range(size)]
        assert quantile(values, 0.95) == pytest.approx(np.quantile(values, 0.95))
    assert quantile([], 0.95) is None


def test_means_over_seeds_and_paired_differences():
    trials = []
    for seed, (pooled, own) in enumerate([(0.2, 0.5), (0.4, 0.6), (0.3, 0.7)]):
        for method, level in (("grpo", pooled), ("dr-mas", own)):
            one = trial("maths-shared", method, seed, steps=10)
            trials.append({**one, "reward": [level] * 10})
    scenario = analysed(trials)["scenarios"]["maths-shared"]
    assert scenario["methods"]["grpo"]["final"]["value"] == pytest.approx(0.3)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert scenario["methods"]["grpo"]["final"]["high"] == pytest.approx(0.3 + half, abs=1e-6)
    found = differences(scenario)["dr-mas", "grpo"]["final"]
    assert (found["value"], found["low"], found["high"]) == pytest.approx((0.3, 0.3 - half, 0.3 + half), abs=1e-6)
    assert (found["n"], found["of"]) == (3, 3)


def test_crashed_trials_count_nowhere_and_diverged_ones_everywhere():
    trials = [trial("maths-shared", "grpo", seed, steps=10) for seed in range(4)]
    trials += [crashed("maths-shared", "grpo", 4, "it died"), {**trial("maths-shared", "dr-mas", 0, steps=10)}]
    trials[1] |= {"status": "diverged", "error": "the gradient norm isn't finite", "reward": [1.0] * 5 + [0.0] * 5}
    trials[1]["grad_norm"]["solver"][9] = math.nan
    found = analysed(trials)
    pooled = found["scenarios"]["maths-shared"]["methods"]["grpo"]
    assert (pooled["final"]["n"], pooled["final"]["of"], pooled["seeds"]) == (4, 5, [0, 1, 2, 3])
    assert pooled["final"]["value"] == pytest.approx(np.mean([0.0, *(np.mean(trials[i]["reward"][-2:]) for i in (0, 2, 3))]))
    assert pooled["agents"]["solver"]["spikes"]["value"] == pytest.approx(0.2 / 4)
    assert [(one["trial"], one["status"]) for one in found["failures"]] == [
        ("maths-shared/grpo/seed-1", "diverged"),
        ("maths-shared/grpo/seed-4", "crashed"),
    ]
    difference = differences(found["scenarios"]["maths-shared"])["dr-mas", "grpo"]["final"]
    assert (difference["n"], difference["low"]) == (1, None)
    assert differences(found["scenarios"]["maths-shared"])["dr-mas", "grpo"]["crashed"] == [0, 1]


def test_planned_seeds_that_are_missing_are_counted():
    planned = [("maths-shared", "grpo", seed) for seed in range(3)] + [("search-shared", "grpo", 7)]
    found = analysed([trial("maths-shared", "grpo", 0, steps=5)], planned)
    assert found["scenarios"]["maths-shared"]["methods"]["grpo"]["final"]["of"] == 3


def test_a_start_is_no_method_and_is_listed_if_it_failed():
    start = {"scenario": "maths-alone", "method": "start", "status": "ok", "eval": {"before": {"avg": [0.5], "pass": [1.0]}}}
    trials = [{**start, "seed": 0}, crashed("maths-shared", "start", 1, "it died"), trial("maths-shared", "grpo", 0, steps=5)]
    found = analysed(trials)
    assert list(found["scenarios"]) == ["maths-shared"]
    assert list(found["scenarios"]["maths-shared"]["methods"]) == ["grpo"]
    assert [one["trial"] for one in found["failures"]] == ["maths-shared/start/seed-1"]


def test_a_scenario_borrows_the_single_agent_on_its_tasks():
    trials = [trial("maths-shared", "single-agent", seed, gain=0.25, steps=10) for seed in range(3)]
    trials += [trial(name, "dr-mas", seed, steps=10) for name in ("maths-unequal", "search-shared") for seed in range(3)]
    found = analysed(trials)["scenarios"]
    expected = [np.mean(trials[3 + i]["eval"]["after"]["avg"]) - np.mean(trials[i]["eval"]["after"]["avg"]) for i in range(3)]
    assert differences(found["maths-unequal"])["dr-mas", "single-agent"]["avg"]["value"] == pytest.approx(np.mean(expected))
    assert "single-agent" not in found["maths-unequal"]["methods"]
    assert found["search-shared"]["differences"] == []


def test_intervals_are_counted():
    found = analysed(reproduction(seeds=3, scenarios=("maths-shared",), methods=("grpo", "dr-mas", "grpo-turns")))
    assert [(one["left"], one["right"]) for one in found["scenarios"]["maths-shared"]["differences"]] == [
        ("grpo-turns", "grpo"),
        ("dr-mas", "grpo"),
        ("dr-mas", "grpo-turns"),
    ]
    pairs = found["scenarios"]["maths-shared"]["differences"]
    varied = [len(set(one["seeds"][key])) > 1 for one in pairs for key in COMPARED if key != "imbalance"]
    assert found["intervals"] == sum(varied) < len(varied), "spikes, of which there are none, are one number in all seeds"
    assert (found["excluding"] > 0, found["excluding_single"]) == (True, 0)


def test_what_is_full_or_alike_has_no_room():
    def of(before: float, after: float, reward: float) -> list[dict]:
        scores = {"before": {"avg": [before], "pass": [1.0]}, "after": {"avg": [after], "pass": [1.0]}}
        made = [trial("maths-shared", method, seed, steps=10) for method in ("grpo", "dr-mas") for seed in range(3)]
        return [{**one, "eval": scores, "reward": [reward + one["seed"] / 8] * 10} for one in made]

    def room(trials: list[dict]) -> list[str]:
        return differences(analysed(trials)["scenarios"]["maths-shared"])["dr-mas", "grpo"]["no_room"]

    trials = of(0.5, 0.99, 0.5)
    assert room(trials) == ["final", "area", "avg", "pass", "spikes"]
    trials[0]["reward"] = [0.25] * 10
    trials[0]["eval"] = {**trials[0]["eval"], "after": {"avg": [0.9], "pass": [1.0]}}
    assert room(trials) == ["pass", "spikes"], "grpo is at 0.96 in the mean"


def test_the_single_agents_moments_are_no_teams():
    trials = [trial("maths-shared", method, seed, steps=10) for method in ("grpo", "single-agent") for seed in range(2)]
    found = analysed(trials)
    own = found["scenarios"]["maths-shared"]
    assert found["moments"]["count"] == own["moments"]["count"] == len(own["points"]) == 2 * 2
    assert list(own["moments"]["agents"]) == ["solver", "verifier"]


def test_valid_and_uncompared_shares_are_means_of_steps():
    shares = [1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, None, 0.25]
    found = agent_numbers(made(grad_norm={"a": [1.0] * 10}, valid={"a": shares}, uncompared={"a": [0.0, 1.0]}), "a")
    assert (found["valid_first"], found["valid_last"], found["uncompared"]) == (0.75, 0.25, 0.5)
    assert agent_numbers(made(grad_norm={"a": [1.0]}), "a")["uncompared"] is None


def test_a_norm_whose_square_overflows_has_a_mean_and_a_variation():
    found = agent_numbers(made(grad_norm={"a": [1e200, 3e200]}), "a")
    assert (found["grad_mean"], found["variation"]) == (pytest.approx(2e200), pytest.approx(0.5))


def test_curves_are_means_with_the_range_of_seeds():
    trials = [trial("maths-shared", "grpo", seed, steps=3) for seed in range(2)]
    trials[0]["grad_norm"]["solver"], trials[1]["grad_norm"]["solver"] = [0.0, 0.5, None], [1.0, 0.5, 0.75]
    curve = analysed(trials)["scenarios"]["maths-shared"]["methods"]["grpo"]["curves"]["grad_norm"]["solver"]
    assert curve == {"mean": [0.5, 0.5, 0.75], "low": [0.0, 0.5, 0.75], "high": [1.0, 0.5, 0.75]}


def test_reward_curves_are_means_of_five_steps():
    assert smoothed([1.0, 0.0, None, 0.5, 0.5, 0.0, 1.0]) == [1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.5]


def test_names_have_one_order():
    assert in_order({"zeta", "c", "b", "alpha"}, ("b", "a", "c")) == ["b", "c", "alpha", "zeta"]
