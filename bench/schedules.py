"""How long the calls of some episodes take by two schedules, from the seconds of each call alone. Used by `bench/rollout.py`.

Lockstep is the batch-synchronous loop of most rollout code: in each round the agents speak one after the other, each with all
episodes that ask it, and the next one waits for the slowest. Without barriers an episode waits for nothing but its own calls.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AGENTS = ("router", "searcher", "answerer")
"""Of the team `search-router`, in the order in which they speak within a round."""


@dataclass(frozen=True, slots=True)
class Call:
    """One agent call of an episode. `key` is its request's, `EPISODE/INDEX/AGENT`."""

    key: str
    round: int
    agent: str
    seconds: float


Plans = Mapping[str, Sequence[Call]]
"""Episode -> its calls, in order."""


def plan(episodes: Sequence[str], *, rounds: int, median: float, sigma: float, seed: int) -> dict[str, list[Call]]:
    """The calls of a router that searches 0 to `rounds` - 1 times, as often as another, with lognormal seconds each."""
    draw = random.Random(seed)
    return {episode: _plan_one(episode, draw.randrange(rounds), rounds, math.log(median), sigma, draw) for episode in episodes}


def _plan_one(episode: str, searches: int, rounds: int, mu: float, sigma: float, draw: random.Random) -> list[Call]:
    agents = [(round_, agent) for round_ in range(searches) for agent in ("router", "searcher")]
    if searches < rounds - 1:  # the last round answers without asking the router
        agents.append((searches, "router"))
    agents.append((searches, "answerer"))
    return [
        Call(f"{episode}/{index:03d}/{agent}", round_, agent, draw.lognormvariate(mu, sigma))
        for index, (round_, agent) in enumerate(agents)
    ]


def barriers(plans: Plans, agents: Sequence[str] = AGENTS) -> list[list[Call]]:
    """The calls that lockstep makes at the same time, one list after the other."""
    calls = [call for calls in plans.values() for call in calls]
    rounds = range(max((call.round for call in calls), default=-1) + 1)
    groups = [[call for call in calls if (call.round, call.agent) == (at, agent)] for at in rounds for agent in agents]
    return [group for group in groups if group]


def lockstep_seconds(plans: Plans, agents: Sequence[str] = AGENTS) -> float:
    """With a barrier after each agent of each round."""
    return sum(max(call.seconds for call in group) for group in barriers(plans, agents))


def critical_seconds(plans: Plans) -> float:
    """Of the episode that takes longest by itself: no schedule is quicker."""
    return max((sum(call.seconds for call in calls) for calls in plans.values()), default=0.0)


async def run_lockstep(plans: Plans, agents: Sequence[str] = AGENTS) -> int:
    """Sleep through the calls with these barriers; how many there were."""
    groups = barriers(plans, agents)
    for group in groups:
        await asyncio.gather(*(asyncio.sleep(call.seconds) for call in group))
    return sum(map(len, groups))
