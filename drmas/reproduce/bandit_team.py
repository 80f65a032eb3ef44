"""A team whose agents are softmax policies over a few actions, so that every episode that can happen is on one list.

The procedure is a generator: it yields the name of the agent it calls and gets an action's number, or yields a `Chance` and
gets whether it came out, and returns an `Outcome`. Who is called may depend on anything, as in a team of language models:

    def loop():
        action = yield "solver"
        if (yield Chance(0.9 if action == 0 else 0.6)):
            return Outcome(1.0)
        return Outcome(float((yield "fixer") == 2))

    team = BanditTeam(loop, {"solver": 2, "fixer": 3})

An action is the one token of a row's response. The score of a row, the gradient of its log-probability by the logits of its
policy, is onehot(action) - pi in closed form. Called by `drmas.reproduce.bandit_moments` and the other bandit files.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from drmas.errors import DataError
from drmas.types import Row


@dataclass(frozen=True, slots=True)
class Chance:
    """Something that comes out with this probability and that no agent decides; the procedure gets True or False.

    DataError: a probability that isn't one.
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise DataError(f"a chance has probability {self.probability}; expected 0 to 1")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The team's reward, and the rewards of agents that have one of their own."""

    reward: float
    own: Mapping[str, float] = field(default_factory=dict)


Procedure = Callable[[], Generator[str | Chance, int, Outcome]]


@dataclass(frozen=True)
class BanditTeam:
    """A procedure, how many actions each of its agents has, and the policies of agents that share one."""

    procedure: Procedure
    actions: Mapping[str, int]
    shared: Mapping[str, str] = field(default_factory=dict)
    """Agent -> policy; an agent that isn't named here has a policy of its own name. DataError: agents that share a policy and
    have different numbers of actions."""

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for agent, number in self.actions.items():
            if sizes.setdefault(self.policy(agent), number) != number:
                raise DataError(
                    f"policy {self.policy(agent)!r} has {sizes[self.policy(agent)]} actions for one agent and {number} for "
                    f"{agent!r}; agents that share a policy need the same number"
                )

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.actions)

    def policy(self, agent: str) -> str:
        return self.shared.get(agent, agent)

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.policy(agent) for agent in self.actions))

    def logits(self, probabilities: Mapping[str, tuple[float, ...]] | None = None) -> np.ndarray:
        """[policies, most actions] float64 of these action probabilities by policy, uniform where not given; -inf as padding.

        DataError: probabilities of another number than the policy's actions.
        """
        table = np.full((len(self.policies), max(self.actions.values())), -np.inf)
        for agent, number in self.actions.items():
            given = (probabilities or {}).get(self.policy(agent), (1.0 / number,) * number)
            if len(given) != number:
                raise DataError(f"policy {self.policy(agent)!r} has {number} actions but {len(given)} probabilities")
            table[self.policies.index(self.policy(agent)), :number] = np.log(given)
        return table

    @cached_property
    def episodes(self) -> Episodes:
        return _enumerate(self)

    def play(self, logits: np.ndarray, *, groups: int, size: int, seed: int) -> list[Row]:
        """The rows of `groups` tasks with `size` episodes each, sampled by running the procedure; the same for the same seed.

        The only tokens of a row are its action and nothing before it.
        """
        draw = random.Random(seed)
        log_pi = log_softmax(logits)
        tables = {}
        for agent, number in self.actions.items():
            own = log_pi[self.policies.index(self.policy(agent)), :number].tolist()
            tables[agent] = (own, list(accumulate(math.exp(value) for value in own))[:-1])
        rows: list[Row] = []
        for task in range(groups):
            for sample in range(size):
                turns, outcome = self._episode(tables, draw)
                rows += [
                    Row(
                        task=str(task),
                        episode=f"{task}#{sample}",
                        agent=agent,
                        policy=self.policy(agent),
                        turn=turn,
                        prompt_ids=[],
                        response_ids=[action],
                        logprobs=[tables[agent][0][action]],
                        versions=[0],
                        reward=outcome.own.get(agent, outcome.reward),
                    )
                    for turn, (agent, action) in enumerate(turns)
                ]
        return rows

    def _episode(
        self, tables: Mapping[str, tuple[list[float], list[float]]], draw: random.Random
    ) -> tuple[list[tuple[str, int]], Outcome]:
        run, answer, turns = self.procedure(), None, []
        try:
            while True:
                asked = run.send(answer)
                if isinstance(asked, Chance):
                    answer = draw.random() < asked.probability
                else:
                    answer = bisect(tables[asked][1], draw.random())
                    turns.append((asked, answer))
        except StopIteration as end:
            return turns, end.value


@dataclass(frozen=True)
class Episodes:
    """Every episode that can happen; those with the same calls and rewards are one. M episodes, K agents, A actions at most."""

    policy_of: np.ndarray
    """[K] int64, the row of the logits that an agent speaks with."""
    weight: np.ndarray
    """[M] float64: the probability of all that no agent decides, summed over the orders in which the actions may come."""
    counts: np.ndarray
    """[M, K, A] float64: how often the agent took the action."""
    rewards: np.ndarray
    """[M, K] float64: the reward of the agent's rows."""
    reward: np.ndarray
    """[M] float64: the team's reward."""

    @cached_property
    def calls(self) -> np.ndarray:
        """[M, K] int64."""
        return self.counts.sum(-1).astype(np.int64)

    def policies(self, logits: np.ndarray) -> np.ndarray:
        """[..., K, A]: the action probabilities of every agent under logits [..., P, A]."""
        return np.exp(log_softmax(logits))[..., self.policy_of, :]

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """[..., M]: the probability of every episode under logits [..., P, A]; they add up to 1."""
        log_pi = log_softmax(logits)[..., self.policy_of, :]
        finite = np.where(np.isfinite(log_pi), log_pi, 0.0)
        flat = finite.reshape(*finite.shape[:-2], -1) @ self.counts.reshape(len(self.weight), -1).T
        return self.weight * np.exp(flat)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _enumerate(team: BanditTeam) -> Episodes:
    """By running the procedure once for every sequence of answers it can get."""
    merged: dict[tuple, float] = {}
    open_ends: list[tuple[tuple[int, ...], float, tuple[tuple[str, int], ...]]] = [((), 1.0, ())]
    while open_ends:
        answers, weight, turns = open_ends.pop()
        asked = _replay(team.procedure, answers)
        if isinstance(asked, Outcome):
            counts = tuple(turns.count((agent, action)) for agent, number in team.actions.items() for action in range(number))
            own = tuple(float(asked.own.get(agent, asked.reward)) for agent in team.agents)
            key = (counts, own, float(asked.reward))
            merged[key] = merged.get(key, 0.0) + weight
        elif isinstance(asked, Chance):
            for comes_out, probability in ((True, asked.probability), (False, 1.0 - asked.probability)):
                if probability > 0:
                    open_ends.append(((*answers, comes_out), weight * probability, turns))
        else:
            open_ends += [((*answers, action), weight, (*turns, (asked, action))) for action in range(team.actions[asked])]
    keys = sorted(merged)
    widest = max(team.actions.values())
    counts = np.zeros((len(keys), len(team.actions), widest))
    for index, (flat, _, _) in enumerate(keys):
        start = 0
        for agent, number in enumerate(team.actions.values()):
            counts[index, agent, :number] = flat[start : start + number]
            start += number
    return Episodes(
        policy_of=np.array([team.policies.index(team.policy(agent)) for agent in team.agents]),
        weight=np.array([merged[key] for key in keys]),
        counts=counts,
        rewards=np.array([own for _, own, _ in keys]),
        reward=np.array([reward for _, _, reward in keys]),
    )


def _replay(procedure: Procedure, answers: tuple[int, ...]) -> str | Chance | Outcome:
    """What the procedure asks after these answers, or what it returns."""
    run = procedure()
    try:
        asked = run.send(None)
        for answer in answers:
            asked = run.send(answer)
    except StopIteration as end:
        return end.value
    return asked
