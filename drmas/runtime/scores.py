"""What the episodes of one evaluation say: how often tasks were solved, what each agent did, what a solution costs.

    scores = Scores(episodes, agents=["solver", "verifier"], samples=4, prices={"main": 0.4}, bootstrap=1000, seed=0)
    scores.measures()["pass@2"]["micro"].value      # over all tasks; "macro", and "sources" by name, beside it

An episode is solved where its reward is at least 1. Failed episodes are counted by kind and are in no other number (I3), so
that a task's n is the number of its finished episodes; a task with fewer than k of them has no pass@k and is counted in
`left_out`. Used by `drmas.runtime.evaluate`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from drmas.core.statistics import avg_at_k, mean_interval, pass_at_k
from drmas.types import Episode, Turn

SOLVED_AT = 1.0
"""The reward from which an episode counts as solved."""


class Scores:
    """`samples`: episodes per task. `prices`: policy -> per million tokens, None where there is none. `remote_tokens`: key of a
    request (EPISODE/INDEX/AGENT) to a remote model, which gives text alone -> the tokens that it read and generated."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        *,
        agents: Sequence[str],
        samples: int,
        prices: Mapping[str, float | None],
        bootstrap: int,
        seed: int,
        remote_tokens: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self.episodes, self.agents, self.samples = list(episodes), list(agents), samples
        self.finished = [episode for episode in self.episodes if episode.failure is None]
        self.failed = Counter(episode.status for episode in self.episodes if episode.failure is not None)
        self._prices, self._remote_tokens, self._bootstrap, self._seed = prices, remote_tokens, bootstrap, seed
        self._sources = {episode.task.id: episode.task.source for episode in self.episodes}

    def values(self) -> dict[str, dict[str, float]]:
        """Measure -> task -> its value: reward, avg@n and pass@1 to pass@n, where the task has one."""
        rewards: dict[str, list[float]] = {}
        for episode in self.finished:
            rewards.setdefault(episode.task.id, []).append(episode.reward)
        solved = {task: sum(reward >= SOLVED_AT for reward in of_task) for task, of_task in rewards.items()}
        found = {
            "reward": {task: math.fsum(of_task) / len(of_task) for task, of_task in rewards.items()},
            f"avg@{self.samples}": {task: avg_at_k(len(of_task), solved[task]) for task, of_task in rewards.items()},
        }
        for k in range(1, self.samples + 1):
            found[f"pass@{k}"] = {
                task: pass_at_k(len(of_task), solved[task], k) for task, of_task in rewards.items() if len(of_task) >= k
            }
        return found

    def measures(self) -> dict[str, dict[str, Any]]:
        """The measures over tasks, with bootstrap intervals: micro, macro and by source, and how many tasks were left out."""
        return {name: self._over_tasks(by_task) for name, by_task in self.values().items()}

    def gain(self, other: Scores) -> dict[str, dict[str, Any]]:
        """The measures of this evaluation minus those of `other`, paired: over the tasks that have the measure in both."""
        theirs = other.values()
        return {
            name: self._over_tasks(
                {task: value - theirs[name][task] for task, value in by_task.items() if task in theirs[name]}
            )
            for name, by_task in self.values().items()
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it: episodes, failed (by kind), measures, agents, solved."""
        return {
            "episodes": len(self.episodes),
            "failed": dict(sorted(self.failed.items())),
            "measures": self.measures(),
            "agents": self.per_agent(),
            "solved": self.solved(),
        }

    def per_agent(self) -> dict[str, dict[str, float | None]]:
        """Of each agent, over its turns in finished episodes; shares and means are None for one that never spoke.

        calls, calls_per_episode, tool_calls, read_tokens, generated_tokens, truncated_share, valid_share, seconds_mean (of a
        call), cost.
        """
        spoken: dict[str, list[_Spoken]] = {agent: [] for agent in self.agents}
        for each in self._spoken():
            spoken[each.turn.agent].append(each)
        used = Counter(use.agent for episode in self.finished for use in episode.tool_uses)
        return {agent: self._agent(of_agent, used[agent]) for agent, of_agent in spoken.items()}

    def solved(self) -> dict[str, Any]:
        """What a solution takes.

        episodes and tasks (with a solved episode); tokens and cost of all finished episodes, and those over the solved ones:
        what a solution costs, unsolved attempts included; seconds of the solved episodes. `unpriced` names the policies that
        leave the cost open, without a price or behind a server that doesn't count tokens.
        """
        solved = [episode for episode in self.finished if episode.reward >= SOLVED_AT]
        spoken = self._spoken()
        tokens, cost = sum(each.read + each.generated for each in spoken), self._cost(spoken)
        seconds = [episode.seconds for episode in solved]
        p50, p95 = map(float, np.quantile(seconds, [0.5, 0.95])) if seconds else (None, None)
        return {
            "episodes": len(solved),
            "tasks": len({episode.task.id for episode in solved}),
            "tokens": tokens,
            "tokens_each": _ratio(tokens, len(solved)),
            "cost": cost,
            "cost_each": None if cost is None else _ratio(cost, len(solved)),
            "unpriced": sorted({each.turn.policy for each in spoken if self._price(each) is None}),
            "seconds_mean": _ratio(math.fsum(seconds), len(seconds)),
            "seconds_p50": p50,
            "seconds_p95": p95,
        }

    def _agent(self, spoken: Sequence[_Spoken], tool_calls: int) -> dict[str, float | None]:
        turns = [each.turn for each in spoken]
        return {
            "calls": len(turns),
            "calls_per_episode": _ratio(len(turns), len(self.finished)),
            "tool_calls": tool_calls,
            "read_tokens": sum(each.read for each in spoken),
            "generated_tokens": sum(each.generated for each in spoken),
            "truncated_share": _ratio(sum(turn.finish_reason == "length" for turn in turns), len(turns)),
            "valid_share": _ratio(sum(turn.valid for turn in turns), len(turns)),
            "seconds_mean": _ratio(math.fsum(turn.seconds for turn in turns), len(turns)),
            "cost": self._cost(spoken),
        }

    def _spoken(self) -> list[_Spoken]:
        """The turns of finished episodes with their tokens."""
        found = []
        for episode in self.finished:
            for turn in episode.turns:
                ids = (len(turn.prompt_ids), len(turn.response_ids))
                found.append(_Spoken(turn, *self._remote_tokens.get(f"{episode.id}/{turn.index:03d}/{turn.agent}", ids)))
        return found

    def _over_tasks(self, by_task: Mapping[str, float]) -> dict[str, Any]:
        if not by_task:
            return {"tasks": 0, "left_out": len(self._sources), "micro": None, "macro": None, "sources": {}}
        how = {"resamples": self._bootstrap, "seed": self._seed}
        values, sources = list(by_task.values()), [self._sources[task] for task in by_task]
        return {
            "tasks": len(values),
            "left_out": len(self._sources) - len(values),
            "micro": mean_interval(values, **how),
            "macro": mean_interval(values, sources, **how),
            "sources": {
                source: mean_interval([value for value, of in zip(values, sources, strict=True) if of == source], **how)
                for source in dict.fromkeys(sources)
            },
        }

    def _cost(self, spoken: Sequence[_Spoken]) -> float | None:
        """None where a turn's cost is unknown."""
        prices = [self._price(each) for each in spoken]
        return None if None in prices else math.fsum(prices)

    def _price(self, spoken: _Spoken) -> float | None:
        """What the turn costs. No prompt is empty, so that one without tokens is one that nobody counted."""
        price = self._prices.get(spoken.turn.policy)
        return None if price is None or not spoken.read else price * (spoken.read + spoken.generated) / 1e6


class _Spoken(NamedTuple):
    turn: Turn
    read: int
    generated: int


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
