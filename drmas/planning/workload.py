"""What a step's episodes look like, one by one: the calls of each, how long they are, and what each waits for.

    source = Chains()          calls in turn, from the means of a `types.Workload`
             Traced(...)       shapes of the team's own procedure (`traced`), responses from the workload's lengths
             measured.Measured(...)    groups of a finished run, drawn again

    source.groups(workload, count, random) -> groups of scripts -> simulation

Pure and seeded: one generator in, the same groups out. `default_workload` makes workload and source of a configuration,
`read_workload` of a file with a `[workload]` table or a run's folder. Called by `drmas plan`, `simulation` and `growth`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import numpy
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from drmas.agents.team import TeamConfig
from drmas.config.schema import RunConfig
from drmas.config.section import NonNegativeFloat, Section
from drmas.config.tasks import SearchTool
from drmas.core.names import expected_names
from drmas.errors import ConfigError
from drmas.planning.assumed import QUESTION_TOKENS, SPREAD, Given, assumed, prompt_room
from drmas.planning.traced import TOOL_CHARACTERS, Shape, trace
from drmas.planning.types import AgentLoad, Lengths, Workload


class Call(NamedTuple):
    """One turn of an episode, in tokens."""

    agent: str
    policy: str
    prompt: int
    response: int
    """At least 1."""
    own: int = 0
    """Of the prompt, at its start: what the episode's earlier calls left in the cache of their replica."""
    shared: int = 0
    """Of the prompt, at its start: what a call of this agent in another episode of the group leaves in a replica's cache."""
    after: tuple[int, ...] = ()
    """The episode's calls that it waits for, by number; all are lower than its own."""
    tool_seconds: float = 0.0
    """From this call's end until what waits for it can start."""


Script = tuple[Call, ...]
"""An episode."""
Group = list[Script]


class Source(Protocol):
    """Where a step's episodes come from."""

    def groups(self, workload: Workload, count: int, random: numpy.random.Generator) -> list[Group]: ...


def draw_lengths(lengths: Lengths, count: int, random: numpy.random.Generator) -> numpy.ndarray:
    """`count` response lengths, int64, between 1 and the cap."""
    middle = math.log(lengths.mean) - lengths.spread**2 / 2
    drawn = numpy.exp(middle + lengths.spread * random.standard_normal(count))
    return numpy.clip(numpy.rint(numpy.minimum(drawn, lengths.cap)), 1, lengths.cap).astype(numpy.int64)


@dataclass(frozen=True, slots=True)
class Chains:
    """Episodes whose calls follow one another: first calls of all agents in order, then the second ones, and so on.

    An agent with 1.4 calls makes one in six of ten episodes and two in the others; those with more of one agent have more of
    all, as rounds do. What is cached on the mean is what siblings share, all but the first of them.
    """

    def groups(self, workload: Workload, count: int, random: numpy.random.Generator) -> list[Group]:
        size = workload.group_size
        luck = random.random(count * size)
        calls = [numpy.floor(agent.calls + luck).astype(int).tolist() for agent in workload.agents]
        lengths = [iter(draw_lengths(a.response, sum(n), random).tolist()) for a, n in zip(workload.agents, calls, strict=True)]
        scripts = []
        for episode in range(count * size):
            made: list[Call] = []
            rounds = max((own[episode] for own in calls), default=0)
            for turn in range(rounds):
                for agent, own, length in zip(workload.agents, calls, lengths, strict=True):
                    if turn < own[episode]:
                        made.append(_chained(agent, next(length), size, len(made)))
            scripts.append(tuple(made))
        return [scripts[start : start + size] for start in range(0, count * size, size)]


def _chained(agent: AgentLoad, response: int, group_size: int, index: int) -> Call:
    prompt, others = max(1, round(agent.prompt_tokens)), 1 - 1 / group_size
    shared = min(prompt - 1, round(agent.cached_tokens / others)) if others else 0
    after = (index - 1,) if index else ()
    return Call(agent.name, agent.policy, prompt, response, 0, shared, after, agent.tool_seconds)


@dataclass(frozen=True, slots=True)
class Traced:
    """Episodes of the team's own shapes: `shapes` with how often each comes, prompts that grow with what was said.

    `room`: agent -> the longest prompt that it may read; longer ones are cut, as `overlong = "truncate"` does.
    """

    shapes: Mapping[Shape, float]
    room: Mapping[str, int]

    def groups(self, workload: Workload, count: int, random: numpy.random.Generator) -> list[Group]:
        size, loads = workload.group_size, {agent.name: agent for agent in workload.agents}
        shapes = list(self.shapes)
        chosen = random.choice(len(shapes), size=count * size, p=numpy.array(list(self.shapes.values())))
        scripts: list[Script] = [()] * (count * size)
        for index, shape in enumerate(shapes):
            places = numpy.flatnonzero(chosen == index).tolist()
            for place, script in zip(places, self._scripts(shape, len(places), loads, random), strict=True):
                scripts[place] = script
        return [scripts[start : start + size] for start in range(0, count * size, size)]

    def _scripts(
        self, shape: Shape, count: int, loads: Mapping[str, AgentLoad], random: numpy.random.Generator
    ) -> Iterator[Script]:
        """`count` episodes of one shape."""
        responses: list[numpy.ndarray] = []
        columns = []
        for step in shape:
            load, room = loads[step.agent], self.room[step.agent]
            prompts = numpy.clip(numpy.rint(numpy.broadcast_to(step.prompt.length(responses), count)), 1, room).astype(int)
            own, shared = (
                numpy.minimum(prompts - 1, numpy.rint(part).astype(int)) for part in (step.own.length(responses), step.shared)
            )
            responses.append(draw_lengths(load.response, count, random))
            columns.append(
                [
                    Call(load.name, load.policy, *numbers, step.after, step.tools * load.tool_seconds)
                    for numbers in zip(*(part.tolist() for part in (prompts, responses[-1], own, shared)), strict=True)
                ]
            )
        return zip(*columns, strict=True)


def default_workload(
    run: RunConfig,
    team: TeamConfig,
    *,
    calls: Given | None = None,
    prompt: Given | None = None,
    response: Given | None = None,
    spread: float = SPREAD,
) -> tuple[Workload, Source]:
    """The work of one step of `run`, from its configuration: as `assumed` has it, with calls and prompts of the traced team.

    Where calls or prompts are given, these count, and calls follow one another. ConfigError: as `assumed`.
    """
    plain = assumed(run, team, calls=calls, prompt=prompt, response=response, spread=spread)
    if calls or prompt:
        return plain, Chains()
    shapes = trace(team, question_tokens=QUESTION_TOKENS, tool_characters=_tool_characters(run))
    if not shapes:
        return plain, Chains()
    source = Traced(shapes, {name: _room(run, agent.policy, agent.max_tokens) for name, agent in team.agents.items()})
    drawn = source.groups(plain, 256, numpy.random.default_rng(0))
    said = f"{plain.source}; calls and their order: the team's own, with verdicts and choices at random"
    return replace(summary(drawn, plain), source=said), source


def _tool_characters(run: RunConfig) -> int:
    """Of what a search finds; other tools' answers have a length that is assumed."""
    sizes = [tool.topk * tool.max_passage_chars for tool in run.tools.values() if isinstance(tool, SearchTool)]
    return max(sizes, default=TOOL_CHARACTERS)


def _room(run: RunConfig, policy: str, max_tokens: int) -> int:
    return run.policies[policy].engine.max_model_tokens - max_tokens if policy in run.policies else 2**31


def summary(groups: Sequence[Group], like: Workload) -> Workload:
    """`like`, with calls, prompts and cached tokens as the mean of `groups` has them; lengths and latencies stay.

    Cached is what one replica would have cached of all of them.
    """
    episodes = sum(map(len, groups))
    agents = []
    for agent in like.agents:
        calls = [(group, call) for group in groups for script in group for call in script if call.agent == agent.name]
        if not calls:
            agents.append(replace(agent, calls=0.0))
            continue
        prompts = numpy.array([call.prompt for _, call in calls], dtype=float)
        others = 1 - numpy.array([1 / len(group) for group, _ in calls])
        own, shared = (numpy.array([getattr(call, name) for _, call in calls], dtype=float) for name in ("own", "shared"))
        cached = own + numpy.maximum(0.0, shared - own) * others
        tools = float(numpy.mean([call.tool_seconds for _, call in calls]))
        means = {"calls": len(calls) / episodes, "prompt_tokens": float(prompts.mean()), "cached_tokens": float(cached.mean())}
        agents.append(replace(agent, **means, tool_seconds=tools))
    return replace(like, agents=tuple(agents))


class AgentTable(Section):
    """What one agent does in an episode; `[workload.agents.NAME]`."""

    calls: NonNegativeFloat = 1.0
    """Per episode, the mean."""
    prompt: Annotated[float, Field(ge=1)]
    """Tokens, the mean."""
    cached: NonNegativeFloat = 0.0
    """Of them, those at the start that every episode of a group reads."""
    response: PositiveFloat
    """Tokens, the mean, cut ones counted as cut."""
    variation: NonNegativeFloat = 0.66
    """Standard deviation of response lengths before they are cut, over their mean; 0: all are equally long."""
    tool_seconds: NonNegativeFloat = 0.0
    """After each of its calls."""


class WorkloadTable(Section):
    """The `[workload]` table of a file; what it leaves out is the run's."""

    agents: dict[str, AgentTable]
    tasks: PositiveInt | None = None
    group_size: PositiveInt | None = None


def read_table(path: Path, run: RunConfig, team: TeamConfig) -> tuple[Workload, Source]:
    """The work that the `[workload]` table of a TOML file describes. ConfigError: no such file or table, or a fault in it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--workload {path}: {error.strerror}; expected a .toml file or a run's folder") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    if not isinstance(table.get("workload"), dict):
        raise ConfigError(f"{path}: expected a table [workload], with one [workload.agents.NAME] per agent")
    try:
        given = WorkloadTable.model_validate(table["workload"])
    except ValidationError as error:
        raise ConfigError("\n".join(_line(fault, path) for fault in error.errors())) from error
    for name in given.agents:
        if name not in team.agents:
            raise ConfigError(f"workload.agents.{name} (from {path}): {expected_names(name, team.agents)}")
    if missing := [name for name in team.agents if name not in given.agents]:
        raise ConfigError(f"workload.agents.{missing[0]}: missing (from {path}); the team has {', '.join(team.agents)}")
    size = given.group_size or run.rollout.group_size
    return Workload(
        agents=tuple(_load(name, agent, run, team, size, path) for name, agent in given.agents.items()),
        tasks=given.tasks or run.rollout.tasks_per_step,
        group_size=size,
        max_concurrent_episodes=run.rollout.max_concurrent_episodes,
        source=f"as {path} has it",
    ), Chains()


def _load(name: str, given: AgentTable, run: RunConfig, team: TeamConfig, group_size: int, path: Path) -> AgentLoad:
    agent, key = team.agents[name], f"workload.agents.{name}"
    if given.response > agent.max_tokens:
        raise ConfigError(
            f"{key}.response is {given.response:g} (from {path}); expected at most team.{name}.max_tokens, {agent.max_tokens}"
        )
    if given.prompt > (room := prompt_room(run, agent.policy, agent.max_tokens)):
        raise ConfigError(
            f"{key}.prompt is {given.prompt:g} (from {path}); policies.{agent.policy}.engine.max_model_tokens less "
            f"team.{name}.max_tokens leaves {room:g}"
        )
    if given.cached >= given.prompt:
        raise ConfigError(f"{key}.cached is {given.cached:g} (from {path}); expected less than {key}.prompt, {given.prompt:g}")
    spread = math.sqrt(math.log1p(given.variation**2))
    return AgentLoad(
        name=name,
        policy=agent.policy,
        calls=given.calls,
        prompt_tokens=given.prompt,
        cached_tokens=given.cached * (1 - 1 / group_size),
        response=Lengths.fitted(given.response, spread, agent.max_tokens),
        trained=agent.trainable,
        tool_seconds=given.tool_seconds,
    )


def _line(fault: object, path: Path) -> str:
    parts = [str(part) for part in fault["loc"]]
    key, message = ".".join(["workload", *parts]), fault["msg"]
    if fault["type"] == "extra_forbidden":
        section = AgentTable if len(parts) > 1 else WorkloadTable
        return f"{key}: unknown key (from {path}); {expected_names(parts[-1], section.model_fields)}"
    if fault["type"] == "missing":
        return f"{key}: missing (from {path})"
    return f"{key}: {fault['input']!r}; {message[0].lower()}{message[1:]} (from {path})"
