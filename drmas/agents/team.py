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
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, get_args

from pydantic import ValidationError, model_validator

from drmas.agents.agent import AgentConfig
from drmas.agents.calls import Agents
from drmas.agents.prompts import placeholders
from drmas.agents.user_code import is_file_spec, load_module, split_spec
from drmas.config.section import Section
from drmas.core.names import expected_names
from drmas.errors import ConfigError
from drmas.types import Outcome, Task

_BUILT_IN = tuple(f"drmas.agents.teams.{name}" for name in ("solver_verifier", "single", "search_router", "debate", "lookup"))

_RESERVED = ("agents", "name", "run", "tools", "uses", "values")
"""What no field of a team may be called: the team's own words, `name` in a recipe and `agents.tools`."""

_TEAMS: dict[str, type[TeamConfig]] = {}


class TeamConfig(Section):
    """Base of all teams: fields of type `AgentConfig` are the agents, fields that are teams themselves are sub-teams, other
    fields are the team's settings.

    The agents of a sub-team `inner` are called `inner.solver`, and so on; `await self.inner.run(task, agents.inner)` runs it.
    """

    values: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Agent, or field that holds a template -> the names that `run` fills it with. A template of these that asks for another
    name is refused when the configuration is read; one that isn't listed fails the episodes that use it."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """The `tools` sections that `run` calls by itself; a run without one of them is refused when its configuration is read."""

    @abstractmethod
    async def run(self, task: Task, agents: Agents) -> str | Outcome | None:
        """Solve `task` once, calling `agents`; the answer, or None for "no answer" (a reward of 0).

        An `Outcome` also rewards agents apart. Runs as one of many coroutines: hold no state on the team, await what takes
        time. Whatever it raises fails this episode alone (I3).
        """

    @property
    def agents(self) -> dict[str, AgentConfig]:
        """The agents by name, in the order of their fields; those of sub-teams under dotted names."""
        found: dict[str, AgentConfig] = {}
        for name, value in self._fields():
            if isinstance(value, AgentConfig):
                found[name] = value
            elif isinstance(value, TeamConfig):
                found.update({f"{name}.{inner}": agent for inner, agent in value.agents.items()})
        return found

    @property
    def teams(self) -> list[TeamConfig]:
        """This team and its sub-teams, at every depth."""
        inner = [value.teams for _, value in self._fields() if isinstance(value, TeamConfig)]
        return [self, *(team for teams in inner for team in teams)]

    @property
    def tool_sections(self) -> frozenset[str]:
        """`uses` of this team and of its sub-teams."""
        return frozenset().union(*(team.uses for team in self.teams))

    def _fields(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in type(self).model_fields]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name in (*cls.model_fields, *cls.values):
            if name in _RESERVED:
                raise ConfigError(f"the team {cls.__qualname__} has a field {name!r}, which is taken; call it something else")
            if name not in cls.model_fields:
                raise ConfigError(f"{cls.__qualname__}.values has {name!r}; {expected_names(name, cls.model_fields)}")

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults(cls, data: Any) -> Any:
        """A recipe that sets one key of an agent leaves its others as the team has them, not as `AgentConfig` has them."""
        if not isinstance(data, dict):
            return data
        defaults = {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}
        return {name: _merged(defaults.get(name), given) for name, given in data.items()}

    @model_validator(mode="after")
    def _has_agents(self) -> TeamConfig:
        if not self.agents:
            raise ValueError(f"the team {type(self).__qualname__} has no agents; expected fields of type AgentConfig")
        return self

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


def _merged(default: Any, given: Any) -> Any:
    """What a recipe gives for a field, with what it leaves out of an agent or a sub-team as `default` has it."""
    if not isinstance(default, AgentConfig | TeamConfig) or not isinstance(given, dict):
        return given
    held = {name: getattr(default, name) for name in type(default).model_fields}
    return {**held, **{name: _merged(held.get(name), value) for name, value in given.items()}}


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
    if not inspect.iscoroutinefunction(team.run):
        raise ConfigError(f"team.name is {name!r}, whose `run` is no coroutine; write `async def run(self, task, agents)`")
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


def check_tools(team: TeamConfig, tools: Mapping[str, Any]) -> list[str]:
    """The `tools` sections that neither the team nor an agent uses. `tools` maps the run's sections to their settings.

    ConfigError: the team or an agent names a section that isn't there, or a tool that an MCP section doesn't allow.
    """
    for section in sorted(team.tool_sections - tools.keys()):
        raise ConfigError(f"the team calls the tool {section!r}, and there is no section [tools.{section}]; add it")
    used = set(team.tool_sections)
    for agent, config in team.agents.items():
        for name in config.tools:
            owners = [section for section in tools if f"{name}.".startswith(f"{section}.")]
            if not owners:
                raise ConfigError(f"team.{agent}.tools has {name!r}; {expected_names(name, tools)} (sections of `tools`)")
            section = max(owners, key=len)
            inner, allowed = name.removeprefix(section).removeprefix("."), getattr(tools[section], "allow", [])
            if inner and allowed and inner not in allowed:
                raise ConfigError(f"team.{agent}.tools has {name!r}; of tools.{section}.allow {expected_names(inner, allowed)}")
            used.add(section)
    return [name for name in tools if name not in used]


def _find(name: str) -> type[TeamConfig]:
    if is_file_spec(name):
        return _from_file(*split_spec(name))
    for module in _BUILT_IN:
        importlib.import_module(module)
    if name not in _TEAMS:
        raise ConfigError(f"team.name is {name!r}; {expected_names(name, _TEAMS)}, or path/to/file.py:name")
    return _TEAMS[name]


def _from_file(path: str, name: str) -> type[TeamConfig]:
    module_name = load_module(path, "team.name").__name__
    found = {key: team for key, team in _TEAMS.items() if team.__module__ == module_name}
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        raise ConfigError(f"team.name is '{path}:{name}'; in {path} {expected_names(name, found)} (set by @register_team)")
    return found[name]


def _line(fault: Any, team: type[TeamConfig]) -> str:
    """One pydantic error as `team.key: what was found; what is expected`."""
    path = [str(part) for part in fault["loc"]]
    key = ".".join(["team", *path])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key; {expected_names(path[-1], _section_at(team, path[:-1]).model_fields)}"
    if fault["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key}: {fault['input']!r}; {message[0].lower()}{message[1:]}"


def _section_at(section: type[Section], path: Iterable[str]) -> type[Section]:
    """The section that the keys of `path` lead to, from `section` down."""
    for part in path:
        field = section.model_fields.get(part)
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), section)
    return section
