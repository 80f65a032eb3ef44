"""The episodes of a finished run as work to plan with: its groups, with the lengths and cached prefixes that they had.

    workload, source = read_run(folder, run, team)

Read from `episodes/step_N.jsonl`, which has every prompt and response as ids, so that what an engine's prefix cache would find
is counted, in whole blocks. Which calls waited for which isn't in the files; an episode whose agents spoke in the order of one
of the team's traced shapes has that one's, any other is taken as a chain. Failed episodes count: they took time, too. Those of
probes are left out, and calls of remote models. Called by `drmas plan` and `validation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy

from drmas.agents.team import TeamConfig
from drmas.config.schema import RunConfig
from drmas.errors import DataError
from drmas.planning.traced import Shape, trace
from drmas.planning.types import AgentLoad, Lengths, Workload
from drmas.planning.workload import Call, Group, Script, summary
from drmas.telemetry.episodes import read_episodes, steps_with_episodes

BLOCK_TOKENS = 32
"""Of an engine's prefix cache: of a CPU's. Those of GPUs are smaller, 16."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same groups whatever is asked for."""

    same: Sequence[Group]

    def groups(self, workload: Workload, count: int, random: numpy.random.Generator) -> list[Group]:
        return list(self.same)


@dataclass(frozen=True, slots=True)
class Measured:
    """Groups of a run, drawn with replacement; of a group that has another size, episodes with replacement."""

    measured: Sequence[Group]

    def groups(self, workload: Workload, count: int, random: numpy.random.Generator) -> list[Group]:
        chosen = [self.measured[index] for index in random.integers(len(self.measured), size=count).tolist()]
        size = workload.group_size
        return [
            group if len(group) == size else [group[index] for index in random.integers(len(group), size=size).tolist()]
            for group in chosen
        ]


def read_run(
    folder: Path, run: RunConfig, team: TeamConfig, *, steps: Sequence[int] | None = None
) -> tuple[Workload, Measured]:
    """The work that a run of this team did, all its steps or some. DataError: no episodes, or of another team.

    The workload's `cached_tokens` are those that rows share, to the token; the groups' are what an engine's blocks would hold.
    """
    chosen = steps or steps_with_episodes(folder)
    if not chosen:
        raise DataError(f"{folder}: no episodes/step_N.jsonl; expected a run's folder, of a run with telemetry.episodes = true")
    shapes = {tuple(step.agent for step in shape): shape for shape in trace(team)}
    measured: list[Group] = []
    trained: dict[str, bool] = {}
    shared: dict[str, list[int]] = {name: [] for name in team.agents}
    for step in chosen:
        episodes = [episode for episode in read_episodes(folder, step) if episode.get("probe") is None]
        for turn in (turn for episode in episodes for turn in episode["turns"]):
            if turn["agent"] not in team.agents:
                raise DataError(f"{folder}: step {step} has the agent {turn['agent']!r}; the team has {', '.join(team.agents)}")
            trained[turn["agent"]] = trained.get(turn["agent"], False) or bool(turn.get("trained", True))
        measured += _groups(episodes, shapes)
        for agent, tokens in _shared_starts(episodes):
            shared[agent].append(tokens)
    loads = tuple(
        AgentLoad(
            name=name,
            policy=agent.policy,
            calls=0.0,
            prompt_tokens=1.0,
            cached_tokens=0.0,
            response=_lengths(measured, name, agent.max_tokens),
            trained=trained.get(name, agent.trainable),
        )
        for name, agent in team.agents.items()
    )
    workload = Workload(
        agents=loads,
        tasks=run.rollout.tasks_per_step,
        group_size=run.rollout.group_size,
        max_concurrent_episodes=run.rollout.max_concurrent_episodes,
        source=f"measured in {folder}, {len(chosen)} step(s), {len(measured)} groups",
    )
    found = summary(measured, workload)
    agents = [replace(agent, cached_tokens=float(numpy.mean(shared[agent.name] or [0.0]))) for agent in found.agents]
    return replace(found, agents=tuple(agents)), Measured(measured)


def _shared_starts(episodes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """(agent, tokens at the prompt's start that another row of the agent has, too) of every row but the first with such a
    start: what the trainer computes once. It takes the agents of a policy one after the other, to measure their gradients."""
    rows: dict[str, list[tuple[list[int], int]]] = {}
    for turn in (turn for episode in episodes for turn in episode["turns"]):
        if turn["prompt_ids"] and turn["response_ids"]:
            row = [*turn["prompt_ids"], *turn["response_ids"]]
            rows.setdefault(turn["agent"], []).append((row, len(turn["prompt_ids"])))
    for agent, own in rows.items():
        before: list[int] = []
        for row, prompt in sorted(own):
            yield agent, min(prompt - 1, _leading(a == b for a, b in zip(row, before, strict=False)))
            before = row


def _lengths(groups: Sequence[Group], agent: str, cap: int) -> Lengths:
    """Fitted to what an agent wrote: the mean as it is, the spread of the logarithms."""
    written = numpy.array([call.response for group in groups for script in group for call in script if call.agent == agent])
    if not written.size:
        return Lengths(1.0, 0.0, cap)
    return Lengths.fitted(float(written.mean()), float(numpy.log(written).std()), max(cap, int(written.max())))


def _groups(episodes: Sequence[Mapping[str, Any]], shapes: Mapping[tuple[str, ...], Shape]) -> list[Group]:
    """One step's episodes, by task."""
    asked = [[turn for turn in episode["turns"] if turn["prompt_ids"] and turn["response_ids"]] for episode in episodes]
    readers: dict[tuple[str, int], dict[str, set[str]]] = {}  # (policy, block) -> task -> episodes that read it
    for episode, turns in zip(episodes, asked, strict=True):
        for turn in turns:
            for block in _blocks(turn["prompt_ids"]):
                by_task = readers.setdefault((turn["policy"], block), {})
                by_task.setdefault(episode["task"], set()).add(episode["episode"])
    groups: dict[str, Group] = {}
    for episode, turns in zip(episodes, asked, strict=True):
        left: set[tuple[str, int]] = set()  # by the episode's earlier calls
        calls = []
        for turn in turns:
            blocks = [(turn["policy"], block) for block in _blocks(turn["prompt_ids"])]
            usable = blocks[: (len(turn["prompt_ids"]) - 1) // BLOCK_TOKENS]  # the last token is always computed
            own = _leading(block in left or len(readers[block]) > 1 for block in usable)
            shared = _leading(len(readers[block][episode["task"]]) > 1 for block in usable)
            left.update((turn["policy"], block) for block in _blocks([*turn["prompt_ids"], *turn["response_ids"]]))
            calls.append((turn, BLOCK_TOKENS * own, BLOCK_TOKENS * shared))
        groups.setdefault(episode["task"], []).append(_script(episode, calls, shapes))
    return list(groups.values())


def _script(
    episode: Mapping[str, Any], calls: Sequence[tuple[Mapping[str, Any], int, int]], shapes: Mapping[tuple[str, ...], Shape]
) -> Script:
    shape = shapes.get(tuple(turn["agent"] for turn, _, _ in calls))
    after = [step.after for step in shape] if shape else [(index - 1,) if index else () for index in range(len(calls))]
    waits = _tool_seconds(episode, [turn["turn"] for turn, _, _ in calls], shape)
    return tuple(
        Call(
            agent=turn["agent"],
            policy=turn["policy"],
            prompt=len(turn["prompt_ids"]),
            response=len(turn["response_ids"]),
            own=own,
            shared=shared,
            after=after[index],
            tool_seconds=waits[index],
        )
        for index, (turn, own, shared) in enumerate(calls)
    )


def _tool_seconds(episode: Mapping[str, Any], turns: Sequence[int], shape: Shape | None) -> list[float]:
    """After each call. What the team itself called is spread over the calls that, by the shape, tools follow; else over all but
    the last."""
    waits = [0.0] * len(turns)
    ours = [index for index, step in enumerate(shape or ()) if step.tools] or list(range(len(turns) - 1))
    for use in episode.get("tools", ()):
        if use["turn"] in turns:
            waits[turns.index(use["turn"])] += use["seconds"]
            continue
        for index in ours:
            waits[index] += use["seconds"] / len(ours)
    return waits


def _blocks(ids: Sequence[int]) -> list[int]:
    """A number per whole block, which stands for it and all before it."""
    found, last = [], 0
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = hash((last, tuple(ids[start : start + BLOCK_TOKENS])))
        found.append(last)
    return found


def _leading(known: Iterable[bool]) -> int:
    """How many are true before the first that isn't."""
    return sum(1 for _ in takewhile(bool, known))
