"""A team: its settings, its agents and its procedure, in one class that users write.

    @register_team("pair")
    class Pair(TeamConfig):
        writer: AgentConfig = AgentConfig(prompt="{question}")          # the field's name is the agent's name
        critic: AgentConfig = AgentConfig(prompt="{text} Any mistake?")

        async def run(self, task, agents):
            draft = await agents.writer(question=task.question)
            await agents.critic(text=draft.text)
            return draft.text                                           # the team's answer, which the reward grades

The `team` section of a recipe names the team (`name = "pair"`, or `name = "path/to/file.py:pair"`) and sets its fields; an
agent's keys that a recipe leaves out keep the team's own defaults. `load_team` and `check_policies` are called by the commands
before anything starts; `run` by the collector, once per episode, concurrently.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError, model_validator

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.prompts import placeholders
from drmas.config.section import Section
from drmas.core.names import expected_names
from drmas.errors import ConfigError
from drmas.types import Task

_BUILT_IN = ("drmas.agents.teams.solver_verifier", "drmas.agents.teams.single")

_TEAMS: dict[str, type[TeamConfig]] = {}


class TeamConfig(Section):
    """Base of all teams: fields of type `AgentConfig` are the agents, other fields are the team's settings."""

    values: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Agent, or field that holds a template -> the names that `run` fills it with. A template of these that asks for another
    name is refused when the configuration is read; one that isn't listed fails the episodes that use it."""

    @abstractmethod
    async def run(self, task: Task, agents: Agents) -> str | None:
        """Solve `task` once, calling `agents`; the answer, or None for "no answer" (a reward of 0).

        Runs as one of many coroutines: hold no state on the team, await what takes time. Whatever it raises fails this
        episode alone (I3).
        """

    @property
    def agents(self) -> dict[str, AgentConfig]:
        """The agents by name, in the order of their fields."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in found.items() if isinstance(value, AgentConfig)}

    @model_validator(mode="before")
    @classmethod
    def _keep_agent_defaults(cls, data: Any) -> Any:
        """A recipe that sets one key of an agent leaves its others as the team has them, not as `AgentConfig` has them."""
        if not isinstance(data, dict):
            return data
        merged = dict(data)
        for name, given in data.items():
            field = cls.model_fields.get(name)
            default = field.get_default(call_default_factory=True) if field else None
            if isinstance(default, AgentConfig) and isinstance(given, dict):
                merged[name] = {**default.model_dump(), **given}
        return merged

    @model_validator(mode="after")
    def _known_placeholders(self) -> TeamConfig:
        for name, allowed in self.values.items():
            held = getattr(self, name)
            asked = held.placeholders if isinstance(held, AgentConfig) else placeholders(held or "")
            for unknown in sorted(asked - allowed):
                raise ValueError(
                    f"the template of {name} asks for {{{unknown}}}; {expected_names(unknown, allowed)} "
                    f"({{{{{unknown}}}}} is the text itself)"
                )
        return self


def register_team(name: str) -> Callable[[type[TeamConfig]], type[TeamConfig]]:
    """Class decorator: make the team known under `name`."""

    def register(team: type[TeamConfig]) -> type[TeamConfig]:
        known = _TEAMS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (team.__module__, team.__qualname__):
            raise ConfigError(f"the team name {name!r} is taken by {known.__module__}.{known.__qualname__}; choose another")
        _TEAMS[name] = team
        return team

    return register


def load_team(section: Mapping[str, Any]) -> TeamConfig:
    """The team that a recipe's `team` section describes.

    ConfigError: no such team, agent or key (with the nearest valid one), or a value that doesn't fit.

    Example: load_team({"name": "solver-verifier", "rounds": 3, "solver": {"max_tokens": 64}}).rounds == 3
    """
    settings = dict(section)
    name = settings.pop("name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"team.name is {name!r}; expected the name of a team, or path/to/file.py:name")
    team = _find(name)
    if inspect.isabstract(team):
        raise ConfigError(f"team.name is {name!r}, whose class defines no `async def run(self, task, agents)`")
    try:
        return team.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(fault, team) for fault in error.errors())) from error


def check_policies(team: TeamConfig, policies: Iterable[str]) -> list[str]:
    """The policies that no agent uses. ConfigError if an agent names a policy that isn't there."""
    names = list(policies)
    for agent, config in team.agents.items():
        if config.policy not in names:
            raise ConfigError(f"team.{agent}.policy is {config.policy!r}; {expected_names(config.policy, names)}")
    used = {config.policy for config in team.agents.values()}
    return [name for name in names if name not in used]


def _find(name: str) -> type[TeamConfig]:
    path, colon, inner = name.rpartition(":")
    if name.endswith(".py"):
        path, inner = name, ""
    if colon or name.endswith(".py"):
        return _from_file(Path(path), inner)
    for module in _BUILT_IN:
        importlib.import_module(module)
    if name not in _TEAMS:
        raise ConfigError(f"team.name is {name!r}; {expected_names(name, _TEAMS)}, or path/to/file.py:name")
    return _TEAMS[name]


def _from_file(path: Path, name: str) -> type[TeamConfig]:
    if not path.is_file():
        raise ConfigError(f"team.name is '{path}:{name}'; there is no file {path}; expected path/to/file.py:name")
    # a name of its own: two files called team.py are two modules
    module_name = f"drmas_team_{blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()}"
    if module_name not in sys.modules:
        _run_file(path, module_name)
    found = {key: team for key, team in _TEAMS.items() if team.__module__ == module_name}
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        raise ConfigError(f"team.name is '{path}:{name}'; in {path} {expected_names(name, found)} (set by @register_team)")
    return found[name]


def _run_file(path: Path, module_name: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"team.name: {path} is not a Python file; expected path/to/file.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # pydantic looks annotations up there
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[module_name]
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything; it is named and nothing is hidden
        del sys.modules[module_name]
        raise ConfigError(f"team.name: {path} can't be imported: {type(error).__name__}: {error}") from error


def _line(fault: Any, team: type[TeamConfig]) -> str:
    """One pydantic error as `team.key: what was found; what is expected`."""
    path = [str(part) for part in fault["loc"]]
    key = ".".join(["team", *path])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        below = AgentConfig.model_fields if len(path) > 1 else team.model_fields
        return f"{key}: unknown key; {expected_names(path[-1], below)}"
    if fault["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key}: {fault['input']!r}; {message[0].lower()}{message[1:]}"
