"""Estimators of advantages, by preset. README.md here has each one's formula, source and weak spot, and how to add one.

    estimator = resolve("dr-mas", std="task")
    estimator(rows).values

Called by the runtime with `config.advantage`, and by `drmas inspect`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any

from drmas.core.advantages import AdvantageRule
from drmas.core.estimators.base import NOTHING, Estimator, Evidence, Probe
from drmas.core.estimators.dapo import dapo
from drmas.core.estimators.difference import Difference
from drmas.core.estimators.dr_mas import dr_mas, dr_mas_paper, mean_agent_std_task, mean_task_std_agent
from drmas.core.estimators.ema import Ema
from drmas.core.estimators.gigpo import gigpo
from drmas.core.estimators.grpo import grpo, grpo_turns
from drmas.core.estimators.ppo import Ppo
from drmas.core.estimators.reinforce_pp import ReinforcePP, reinforce_pp_baseline
from drmas.core.estimators.remax import ReMax
from drmas.core.estimators.rloo import rloo
from drmas.core.estimators.roles import Roles
from drmas.core.estimators.whiten import Whitened
from drmas.core.names import expected_names
from drmas.errors import ConfigError

__all__ = ["ESTIMATORS", "NOTHING", "Estimator", "Evidence", "Probe", "resolve"]

ESTIMATORS: dict[str, Callable[..., Estimator]] = {
    "dr-mas": dr_mas,
    "grpo": grpo,
    "dr-mas-paper": dr_mas_paper,
    "mean=agent,std=task": mean_agent_std_task,
    "mean=task,std=agent": mean_task_std_agent,
    "grpo-turns": grpo_turns,
    "rloo": rloo,
    "dapo": dapo,
    "gigpo": gigpo,
    "reinforce++": ReinforcePP,
    "reinforce++-baseline": reinforce_pp_baseline,
    "remax": ReMax,
    "ema": Ema,
    "difference": Difference,
    "ppo": Ppo,
}
"""Preset -> what makes it. Its parameters are the settings that it has a use for; `**` is those of an `AdvantageRule`."""

_RULE = tuple(each.name for each in fields(AdvantageRule))
_UNSET: dict[str, Any] = {
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "step_weight": 1.0,
    "anchor_norm": "mean_std",
    "ema_decay": 0.95,
    "counterfactuals": 1,
}
"""The configuration always has a value of these; this one says nothing."""
_OF_WHITENING = ("whiten", "eps", "penalty")
_CHOICES = {"whiten": ("pooled", "agent"), "penalty": ("inside", "outside")}


def resolve(
    preset: str,
    *,
    agents: Mapping[str, Mapping[str, Any]] | None = None,
    team: Sequence[str] = (),
    trained: Sequence[str] | None = None,
    **settings: Any,
) -> Estimator:
    """The preset's estimator with the settings that aren't None; `agents` has other settings for some: all of them where a
    preset is among them, else changes to the run's.

    `team`: the names of all agents; `trained`: of those that learn (all if None), which alone are worth episodes of their own.
    ConfigError: an unknown preset, setting or agent, a value out of range, or a setting that the preset has no use for.

    Example: resolve("grpo", agents={"verifier": {"preset": "remax"}}, team=["solver", "verifier"])
    """
    learners = tuple(team) if trained is None else tuple(agent for agent in team if agent in trained)
    if not agents:
        return _resolve(preset, tuple(team), learners, settings)
    for agent in agents:
        if agent not in team:
            raise ConfigError(f"advantage.agents names {agent!r}, which isn't in the team; {expected_names(agent, team)}")
    rest = tuple(agent for agent in team if agent not in agents)
    others = _resolve(preset, rest or tuple(team), tuple(agent for agent in rest if agent in learners), settings)
    own = {agent: _of_agent(agent, agent in learners, of_agent(changes, preset, settings)) for agent, changes in agents.items()}
    return Roles(others if rest else None, own)


def of_agent(changes: Mapping[str, Any], preset: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of an agent that has `changes` in a run of `preset` with `settings`: those of another preset are its own."""
    return dict(changes) if "preset" in changes else {**settings, **changes, "preset": preset}


def _of_agent(agent: str, learns: bool, settings: dict[str, Any]) -> Estimator:
    if "agents" in settings:
        raise ConfigError(f"advantage.agents.{agent}.agents has no meaning; name every agent in advantage.agents")
    try:
        return _resolve(settings.pop("preset"), (agent,), (agent,) if learns else (), settings)
    except ConfigError as error:
        raise ConfigError(str(error).replace("advantage.", f"advantage.agents.{agent}.")) from error


def _resolve(preset: str, team: tuple[str, ...], learners: tuple[str, ...], settings: Mapping[str, Any]) -> Estimator:
    if preset not in ESTIMATORS:
        raise ConfigError(f"advantage.preset is {preset!r}; {expected_names(preset, ESTIMATORS)}")
    given = {name: value for name, value in settings.items() if value is not None and value != _UNSET.get(name)}
    make, used = ESTIMATORS[preset], settings_of(preset)
    afterwards = "whiten" in given and "whiten" not in used
    for name in given:
        if name not in used and not (afterwards and name in _OF_WHITENING):
            raise ConfigError(_useless(preset, name, given[name]))
    for name, choices in _CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            raise ConfigError(f"advantage.{name} is {given[name]!r}; expected one of {', '.join(choices)}")
    if "team" in signature(make).parameters:
        if not team:
            raise ConfigError(f"advantage.preset is {preset!r} without a team; expected the agents that are to be left out")
        given["team"] = learners
    made = make(**{name: value for name, value in given.items() if name in used or name == "team"})
    if not afterwards:
        return made
    return Whitened(made, given["whiten"], given.get("eps", 1e-6), given.get("penalty", made.penalty))


def settings_of(preset: str) -> list[str]:
    """The settings that a preset has a use for without `whiten`."""
    parameters = signature(ESTIMATORS[preset]).parameters.values()
    own = [each.name for each in parameters if each.kind is not Parameter.VAR_KEYWORD and each.name != "team"]
    return own + ([*_RULE] if any(each.kind is Parameter.VAR_KEYWORD for each in parameters) else [])


def _useless(preset: str, name: str, value: Any) -> str:
    owners = [each for each in ESTIMATORS if name in settings_of(each)]
    known = dict.fromkeys([*(setting for each in ESTIMATORS for setting in settings_of(each)), *_OF_WHITENING])
    if name not in known:
        return f"advantage.{name} is not a setting; {expected_names(name, known)}"
    if name in _OF_WHITENING and name != "whiten":
        return f"advantage.{name} is {value!r} and has no effect with preset {preset!r} without advantage.whiten; unset it"
    where = f"; it is for {', '.join(owners)}" if owners else ""
    return f"advantage.{name} is {value!r} and has no effect with preset {preset!r}; unset it{where}"
