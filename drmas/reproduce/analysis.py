"""From trials to numbers: per scenario and method over seeds, differences to other methods by seed, and the fit of Lemma 4.2.

Definitions, for one trial of S finished steps (a value that is missing or not finite is left out):

    final       mean reward of the last fifth of the steps (at least one)
    area        mean reward of all steps: the area under the reward curve over its length
    avg, pass   mean over evaluation tasks of the mean reward of a task's samples, and of whether one of them was right
    spikes      share of an agent's steps whose gradient norm is more than 3 times its running median (the alarm's definition:
                the 20 steps before, once there are 5, steps of norm 0 not among them), or isn't finite; steps before there
                is a median are not counted
    largest     the largest ratio of a gradient norm to that median
    variation   standard deviation of the gradient norm over its mean; a trend counts, too
    imbalance   mean over steps of |sum of the agent's advantages| / rows
    inflation   mean, 95th percentile and share above 2 over steps of the factor (sigma_k^2 + (mu_k - mu)^2) / sigma^2
    valid       share of an agent's turns that its parser takes, mean of the first and of the last fifth of the steps
    uncompared  mean over steps of the share of an agent's rows that are compared with nothing

A difference has `no_room` for a measure that couldn't differ: every seed's difference is exactly 0, or, for avg and pass, both
methods are at `CEILING` or above, before training or after it.

Without an agent's name spikes, variation and imbalance are means over agents, the last over those that no penalty moves.
Crashed trials count nowhere; diverged ones do. Everything here is a dict that JSON can hold, `Estimate`s as dicts of their
fields. Pure; called by `drmas.reproduce.page`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from drmas.config.schema import AlarmConfig
from drmas.reproduce.fit import moment_points, of_moments
from drmas.reproduce.intervals import deviation, differences, estimate, finite, mean
from drmas.reproduce.plan import METHODS, SCENARIOS, SINGLE, START
from drmas.reproduce.results import PerStep, Results, Trial
from drmas.telemetry.alarms import FEWEST
from drmas.telemetry.plot import band

BASE = "grpo"
CONTRASTS = (
    ("dr-mas", "grpo-turns"),
    ("dr-mas", SINGLE),
    ("mean=task,std=agent", "mean=agent,std=task"),
)
"""Differences that claims need beside those to `BASE`."""
COMPARED = ("final", "area", "avg", "pass", "spikes", "variation", "imbalance")
"""What is compared between methods."""
AGENT_MEASURES = (
    "grad_mean",
    "spikes",
    "largest",
    "variation",
    "imbalance",
    "inflation_mean",
    "inflation_p95",
    "inflation_above_2",
    "calls",
    "valid_first",
    "valid_last",
    "uncompared",
)
BY_CONSTRUCTION = "imbalance"
"""Row sums differ between methods by what the methods are: nothing that an experiment tells."""
CEILING = 0.98
INFLATED = 2.0
SMOOTHED = 5
"""Steps that a point of a reward curve is the mean of: its own and those before."""


def analyse(results: Results) -> dict[str, Any]:
    """Every number of the report; see the module for the definitions. Trials that make starts only are listed if they fail."""
    by_scenario: dict[str, list[Trial]] = {}
    for trial in sorted(results.trials, key=lambda trial: trial.key):
        if trial.method != START:
            by_scenario.setdefault(trial.scenario, []).append(trial)
    names = in_order(set(by_scenario), list(SCENARIOS))
    scenarios = {name: _scenario(by_scenario[name], _planned(results, name), _single(by_scenario, name)) for name in names}
    return {
        "settings": results.settings,
        "scenarios": scenarios,
        "moments": of_moments(results.trials, None),
        "config": results.config,
        **count_intervals(scenarios),
        "failures": failures(results.trials),
        "problems": list(results.problems),
        "bandit": results.bandit,
    }


def _planned(results: Results, scenario: str) -> set[int]:
    return {seed for name, method, seed in results.planned if name == scenario and method != START}


def _single(by_scenario: Mapping[str, Sequence[Trial]], scenario: str) -> list[Trial]:
    """The single agent on the same tasks: the scenario's own, or that of the first one of the same kind that has one."""
    kind = scenario.partition("-")[0]
    for name in (scenario, *in_order({name for name in by_scenario if name.partition("-")[0] == kind}, list(SCENARIOS))):
        if found := [trial for trial in by_scenario.get(name, []) if trial.method == SINGLE]:
            return found
    return []


def _scenario(trials: Sequence[Trial], planned: set[int], single: Sequence[Trial]) -> dict[str, Any]:
    of = len({trial.seed for trial in trials} | planned)
    methods = in_order({trial.method for trial in trials}, list(METHODS))
    used = {method: {t.seed: t for t in trials if t.method == method and t.status != "crashed"} for method in methods}
    numbers = {method: {seed: trial_numbers(trial) for seed, trial in own.items()} for method, own in used.items()}
    wanted = [(method, BASE) for method in methods if method != BASE]
    lost = {method: sum(t.method == method and t.status == "crashed" for t in trials) for method in methods}
    if single and SINGLE not in numbers:
        lost[SINGLE] = sum(trial.status == "crashed" for trial in single)
        numbers[SINGLE] = {trial.seed: trial_numbers(trial) for trial in single if trial.status != "crashed"}
    return {
        "of": of,
        "steps": max((trial.steps for trial in trials), default=0),
        "tasks": max((len(t.eval.after.avg) for t in trials if t.eval.after), default=0),
        "parameters": {name: number for t in trials if t.method != SINGLE for name, number in sorted(t.parameters.items())},
        "methods": {method: _method(list(used[method].values()), numbers[method], of) for method in methods},
        "differences": [
            _difference(numbers, left, right, of) | {"crashed": [lost[left], lost[right]]}
            for left, right in [*wanted, *CONTRASTS]
            if left in numbers and right in numbers
        ],
        "moments": of_moments(trials, of),
        "points": moment_points(trials),
    }


def in_order(names: set[str], known: Sequence[str]) -> list[str]:
    """Known ones first, as they stand there."""
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def _method(trials: Sequence[Trial], numbers: Mapping[int, dict[str, float | None]], of: int) -> dict[str, Any]:
    keys = ("final", "area", "avg_before", "pass_before", "avg", "pass", "spikes", "variation", "imbalance")
    agents = sorted({agent for trial in trials for agent in trial.grad_norm})
    per_agent = {agent: [agent_numbers(trial, agent) for trial in trials if agent in trial.grad_norm] for agent in agents}
    steps = max((trial.steps for trial in trials), default=0)
    gaps = [trial.logprob_gap_max for trial in trials if finite(trial.logprob_gap_max)]
    return {
        "seeds": [trial.seed for trial in trials],
        "skipped": sum(trial.skipped for trial in trials),
        "logprob_gap_max": max(gaps, default=None),
        **{key: asdict(estimate([own[key] for own in numbers.values()], of)) for key in keys},
        "agents": {
            agent: {key: asdict(estimate([own[key] for own in found], of)) for key in AGENT_MEASURES}
            for agent, found in per_agent.items()
        },
        "curves": {
            "reward": _curve([smoothed(trial.reward) for trial in trials], steps),
            **{
                what: {agent: _curve([getattr(trial, what).get(agent, []) for trial in trials], steps) for agent in agents}
                for what in ("grad_norm", "inflation")
            },
            "imbalance": {agent: _curve([imbalances(trial, agent) for trial in trials], steps) for agent in agents},
        },
    }


def _curve(runs: Sequence[PerStep], steps: int) -> dict[str, list[float | None]]:
    """Per step the mean, the minimum and the maximum over seeds."""
    clean = [[value if finite(value) else None for value in run] for run in runs]
    drawn = band("", clean, range(1, steps + 1))
    return {"mean": list(drawn.y), "low": list(drawn.low), "high": list(drawn.high)}


def smoothed(values: PerStep) -> list[float | None]:
    """Means of each step and the 4 before it, of what is there."""
    return [mean(values[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(values))]


def _difference(numbers: Mapping[str, Mapping[int, dict[str, float | None]]], left: str, right: str, of: int) -> dict[str, Any]:
    def of_seeds(method: str, key: str) -> dict[int, float | None]:
        return {seed: own[key] for seed, own in numbers[method].items()}

    each = {key: differences(of_seeds(left, key), of_seeds(right, key)) for key in COMPARED}
    full = {key for key in ("avg", "pass") if _full(numbers, (left, right), key)}
    same = {key for key, values in each.items() if values and all(value == 0 for value in values)}
    return {
        "left": left,
        "right": right,
        **{key: asdict(estimate(values, of)) for key, values in each.items()},
        "seeds": each,
        "no_room": [key for key in COMPARED if key in full | same],
    }


def _full(numbers: Mapping[str, Mapping[int, dict[str, float | None]]], methods: Sequence[str], key: str) -> bool:
    """Whether all of `methods` have next to all that there is to be had, at the start or at the end."""
    for when in ("_before", ""):
        levels = [mean([own[key + when] for own in numbers[method].values()]) for method in methods]
        if all(level is not None and level >= CEILING for level in levels):
            return True
    return False


def trial_numbers(trial: Trial) -> dict[str, float | None]:
    """The numbers of one trial that don't belong to an agent."""
    fifth = max(1, len(trial.reward) // 5)
    agents = [agent_numbers(trial, agent) for agent in sorted(trial.grad_norm)]
    found = {"final": mean(trial.reward[-fifth:]), "area": mean(trial.reward)}
    for suffix, scores in (("_before", trial.eval.before), ("", trial.eval.after)):
        found[f"avg{suffix}"] = mean(scores.avg) if scores else None
        found[f"pass{suffix}"] = mean(scores.passed) if scores else None
    centred = [agent_numbers(trial, agent)["imbalance"] for agent in sorted(trial.grad_norm) if agent not in trial.penalised]
    return found | {key: mean([own[key] for own in agents]) for key in ("spikes", "variation")} | {"imbalance": mean(centred)}


def agent_numbers(trial: Trial, agent: str) -> dict[str, float | None]:
    """The numbers of one agent in one trial."""
    norms = [value for value in trial.grad_norm.get(agent, []) if value is not None]
    ratios = spike_ratios(norms)
    limit = AlarmConfig().spike
    usual = mean(norms)
    factors = [value for value in trial.inflation.get(agent, []) if finite(value)]
    valid = trial.valid.get(agent, [])
    fifth = max(1, len(valid) // 5)
    return {
        "grad_mean": usual,
        "spikes": mean([float(ratio > limit) for ratio in ratios if ratio is not None]),
        "largest": max((ratio for ratio in ratios if finite(ratio)), default=None),
        "variation": _deviation(norms) / usual if usual else None,
        "imbalance": mean(imbalances(trial, agent)),
        "inflation_mean": mean(factors),
        "inflation_p95": quantile(factors, 0.95),
        "inflation_above_2": mean([float(factor > INFLATED) for factor in factors]),
        "calls": mean(trial.calls.get(agent, [])),
        "valid_first": mean(valid[:fifth]),
        "valid_last": mean(valid[-fifth:]),
        "uncompared": mean(trial.uncompared.get(agent, [])),
    }


def spike_ratios(norms: Sequence[float]) -> list[float | None]:
    """Each norm over the median of those before it, as `drmas.telemetry.alarms` has it: up to 20 that are above 0 and finite.

    None while there are fewer than 5; infinite for a norm that isn't finite.
    """
    past: deque[float] = deque(maxlen=AlarmConfig().window)
    ratios: list[float | None] = []
    for norm in norms:
        if not math.isfinite(norm):
            ratios.append(math.inf)
            continue
        ratios.append(norm / median(past) if len(past) >= FEWEST else None)
        if norm > 0:
            past.append(norm)
    return ratios


def imbalances(trial: Trial, agent: str) -> list[float | None]:
    """Per step |sum of the agent's advantages| / rows."""
    sums, rows = trial.row_sum.get(agent, []), trial.rows.get(agent, [])
    return [abs(total) / count if finite(total) and count else None for total, count in zip(sums, rows, strict=False)]


def count_intervals(scenarios: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Of differences between two methods in what is no construction and has a spread.

    {"intervals": all of them, "excluding": those without 0, "excluding_single": of these, those to the single agent}
    """
    pairs = [one for scenario in scenarios.values() for one in scenario["differences"]]
    found = [(SINGLE in (one["left"], one["right"]), one[key]) for one in pairs for key in COMPARED if key != BY_CONSTRUCTION]
    spread = [(single, one) for single, one in found if one["low"] is not None and one["low"] < one["high"]]
    without = [single for single, one in spread if one["low"] > 0 or one["high"] < 0]
    return {"intervals": len(spread), "excluding": len(without), "excluding_single": sum(without)}


def failures(trials: Sequence[Trial]) -> list[dict[str, str]]:
    """Trials that crashed or diverged, and why."""
    bad = [trial for trial in trials if trial.status != "ok"]
    return [{"trial": trial.name, "status": trial.status, "error": trial.error or ""} for trial in bad]


def quantile(values: Sequence[float], share: float) -> float | None:
    """By linear interpolation between order statistics, as numpy's default."""
    if not values:
        return None
    order = sorted(values)
    place = share * (len(order) - 1)
    low = math.floor(place)
    high = min(low + 1, len(order) - 1)
    return order[low] + (place - low) * (order[high] - order[low])


def _deviation(values: Sequence[float]) -> float:
    """The population's standard deviation of the finite values."""
    there = [value for value in values if math.isfinite(value)]
    return deviation(there, mean(there), freedom=len(there)) if there else 0.0
