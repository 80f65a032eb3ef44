"""A trial's configuration: a packaged recipe, with the scenario's policies and the method's advantages put in.

Within a scenario nothing but `advantage.preset` differs between methods; `single-agent` has another team, too. What the
settings are, and how they were found, is said in `tuning`, which the report prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drmas.config.load import load
from drmas.config.schema import RunConfig
from drmas.reproduce.plan import METHODS, SINGLE, START, Trial, scale

_SOLVER = {"prompt": "{question}=", "parser": "text", "max_tokens": 4}
_ALONE = {"prompt": "{question}{history}:", "parser": "text", "max_tokens": 4}
_LARGE = "tiny:qwen3-96x3"
_BUDGET: Mapping[str, Any] = {
    "train.threads": 1,
    "checkpoint.keep": 1,
    "telemetry.tensorboard": False,
    "telemetry.report": False,
    "telemetry.episodes": False,
}


def configure(trial: Trial, folder: Path, *, quick: bool, models: Mapping[str, Path] | None = None) -> RunConfig:
    """The configuration of a trial that runs in `folder`/run. `models`: policy -> the folder of its start's weights.

    A start has a warm start and no steps; any other trial has steps and no warm start.
    """
    size = scale(quick=quick)
    recipe = "maths-tiny" if trial.scenario.startswith("maths") else "search-tiny"
    settings = load(recipe, []).model_dump(mode="json", exclude_unset=True)
    alone = trial.method == SINGLE or trial.scenario.endswith("-alone")
    settings["team"] = _alone(recipe) if alone else _team(trial.scenario, settings["team"])
    settings["policies"] = _policies(settings["policies"]["main"], settings["team"])
    settings |= {"name": "run", "output": str(folder), "seed": trial.seed}
    settings["eval"]["data"]["size"] = size.eval_tasks
    if trial.method == START:
        settings["train"] = {"steps": 0}
    else:
        del settings["warm_start"]
        settings["train"] = {"steps": size.steps}
        settings["advantage"] = {"preset": METHODS[trial.method]}
        settings["telemetry"] = {"moments_every_steps": size.moments_every_steps, "moments_rows": 16}
        for name in settings["policies"] if models else ():
            settings["policies"][name]["model"] = str(models[name])
    for key, value in _BUDGET.items():
        section, _, name = key.partition(".")
        settings.setdefault(section, {})[name] = value
    return RunConfig.model_validate(settings)


def _alone(recipe: str) -> dict[str, Any]:
    if recipe == "maths-tiny":
        return {"name": "single", "solver": _SOLVER}
    return {"name": "search-alone", "rounds": 4, "solver": _ALONE}


def _team(scenario: str, team: dict[str, Any]) -> dict[str, Any]:
    """The recipe's team, or the scenario's variant of it, its agents on the scenario's policies."""
    kind = scenario.rpartition("-")[2]
    if kind in ("unequal", "rescue"):
        team = team | {"name": f"{Path(__file__).with_name('teams.py')}:{kind}"}
    if kind == "rescue":
        fixer = _SOLVER | {"prompt": "{question}={answer}!"}
        team = {"name": team["name"], "solver": team["solver"], "verifier": team["verifier"], "fixer": fixer}
    agents = [name for name, value in team.items() if isinstance(value, dict)]
    policies = {
        "separate": {agent: agent for agent in agents},
        "rescue": {agent: agent for agent in agents},
        "heterogeneous": {agent: "large" if agent == "router" else "small" for agent in agents},
    }.get(kind, {})
    return team | {agent: team[agent] | {"policy": policy} for agent, policy in policies.items()}


def _policies(main: dict[str, Any], team: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's policy under each name that an agent of the team has; `large` is a larger model."""
    names = dict.fromkeys(value.get("policy", "main") for value in team.values() if isinstance(value, dict))
    return {name: main | ({"model": _LARGE} if name == "large" else {}) for name in names}
