"""When does one pooled baseline inflate an agent's gradient? Teams in which it does and doesn't, each with its exact numbers.

A regime is a bandit team at fixed policies. `measure` puts beside each other, for every agent and rule: the second moment of
its gradient with statistics of the whole population (Lemma 4.2), the exact one in groups of N episodes, and a sampled one with
its standard error, from rows of the team at play and `drmas.core.advantages`. Second moments are relative to E|z|^2, that of
the scores alone: 1 is an advantage that leaves it as it is. Called by `drmas.reproduce.bandit`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drmas.core.advantages import AdvantageRule, advantages
from drmas.core.diagnostics import inflation_factors
from drmas.core.estimators import resolve
from drmas.reproduce.bandit_moments import FiniteMoments, Moments, finite, population
from drmas.reproduce.bandit_team import BanditTeam, Chance, Outcome
from drmas.types import Row

RULES: dict[str, AdvantageRule] = {
    name: resolve(name).rule for name in ("grpo", "grpo-turns", "dr-mas", "mean=agent,std=task", "mean=task,std=agent", "rloo")
}
SIZES = (4, 8, 64)
"""Episodes per group."""


@dataclass(frozen=True, slots=True)
class Regime:
    """A team at fixed policies, with what it stands for in plain words."""

    name: str
    words: str
    team: BanditTeam
    probabilities: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of the actions, by policy; uniform where not given."""

    @property
    def logits(self) -> np.ndarray:
        return self.team.logits(self.probabilities)


def always_speaking(both: float, one: float, none: float, actions: int) -> BanditTeam:
    """A writer and a checker, each called once; the reward is likelier the more of them take action 0."""

    def play():
        right = int((yield "writer") == 0) + int((yield "checker") == 0)
        return Outcome(float((yield Chance((none, one, both)[right]))))

    return BanditTeam(play, {"writer": actions, "checker": actions})


def rescue_loop(solver: Sequence[float], fixer: Sequence[float], tries: int = 2, shared: bool = False) -> BanditTeam:
    """A solver, then after its failure up to `tries` calls of a fixer; each action succeeds with the probability given."""

    def play():
        if (yield Chance(solver[(yield "solver")])):
            return Outcome(1.0)
        for _ in range(tries):
            if (yield Chance(fixer[(yield "fixer")])):
                return Outcome(1.0)
        return Outcome(0.0)

    actions = {"solver": len(solver), "fixer": len(fixer)}
    return BanditTeam(play, actions, {"solver": "both", "fixer": "both"} if shared else {})


def routed(answerer: Sequence[float], specialist: Sequence[float]) -> BanditTeam:
    """A router whose action 1 sends the task to a specialist, and action 0 to the answerer."""

    def play():
        name, success = ("specialist", specialist) if (yield "router") else ("answerer", answerer)
        return Outcome(float((yield Chance(success[(yield name)]))))

    return BanditTeam(play, {"router": 2, "answerer": len(answerer), "specialist": len(specialist)})


def own_scales(solver: Sequence[float], judge: Sequence[float], scale: float) -> BanditTeam:
    """A solver that earns 0 or 1, a judge that earns 0 or `scale`, each for its own success; the team's is their mean share."""

    def play():
        solved = yield Chance(solver[(yield "solver")])
        judged = yield Chance(judge[(yield "judge")])
        return Outcome((solved + judged) / 2, {"solver": float(solved), "judge": scale * judged})

    return BanditTeam(play, {"solver": len(solver), "judge": len(judge)})


def shaped(success: Sequence[float], bonus: float, cost: float) -> BanditTeam:
    """Team reward 0 or 1; the solver's action 1 adds `bonus` to its own reward, the checker pays `cost` for each call."""

    def play():
        action = yield "solver"
        calls, solved = 0, 0
        while calls < 2 and not solved:
            thorough = (yield "checker") == 0
            calls += 1
            solved = yield Chance(success[action] * (1.0 if thorough else 0.6))
        return Outcome(float(solved), {"solver": solved + bonus * action, "checker": solved - cost * calls})

    return BanditTeam(play, {"solver": 2, "checker": 2})


def regimes() -> list[Regime]:
    """The grid, from where the factor is 1 to where it is largest."""
    fix, fix_words = (0.4, 0.15, 0.05), "which succeeds once in five tries"
    return [
        Regime(
            "two agents that always speak",
            "Every episode calls each agent once: the agent's rewards are the group's, and the factor is 1.",
            always_speaking(0.9, 0.6, 0.2, 3),
            {"writer": (0.5, 0.3, 0.2), "checker": (0.6, 0.2, 0.2)},
        ),
        Regime(
            "success one half",
            "A fixer that is called after failures and nearly always fails too; yet half of the episodes succeed, and 0 and 1 "
            "are equally far from the mean: the factor is 1 whatever the agent's own rewards are.",
            at_success(0.5, (0.1, 0.04, 0.01)),
        ),
        *(
            Regime(
                f"verifier loop at success {p:g}",
                f"A fixer, {fix_words}, speaks only after the solver's failure. The better the team, the further the fixer's "
                "rewards are from the group's mean: the factor grows like (1 - p_k) p / (1 - p).",
                at_success(p, fix),
            )
            for p in (0.7, 0.9, 0.97)
        ),
        Regime(
            "rare agent",
            "A router asks a specialist once in twenty episodes, for what is hard: most groups hold none or one of its rows.",
            routed((0.9, 0.8), (0.5, 0.1, 0.1)),
            {"router": (0.95, 0.05), "answerer": (0.5, 0.5), "specialist": (0.25, 0.5, 0.25)},
        ),
        Regime(
            "unequal reward scales",
            "Two agents with rewards of their own, 0 or 1 and 0 or 10. Grpo compares their mean, mostly the large scale: its "
            "factor is 1, and says nothing of what the agent of the small scale can still learn.",
            own_scales((0.7, 0.4), (0.6, 0.2), 10.0),
            {"solver": (0.6, 0.4), "judge": (0.5, 0.5)},
        ),
        Regime(
            "shaped rewards per agent",
            "The team's reward plus a bonus for the solver's style and a price for each of the checker's calls.",
            shaped((0.7, 0.5), 0.3, 0.2),
            {"solver": (0.6, 0.4), "checker": (0.7, 0.3)},
        ),
    ]


def at_success(p: float, fixer: tuple[float, ...]) -> BanditTeam:
    """The loop that has success `p` with uniform policies, by its solver, whose two actions differ by 0.08 where they can."""
    rescued = 1 - (1 - sum(fixer) / len(fixer)) ** 2
    alone = (p - rescued) / (1 - rescued)
    apart = min(0.04, 1 - alone)
    return rescue_loop((alone + apart, alone - apart), fixer)


def measure(regime: Regime, groups: Mapping[int, int], seed: int, rules: Mapping[str, AdvantageRule] = RULES) -> dict[str, Any]:
    """The regime's table, JSON-able. `groups`: by episodes per group, how many groups are sampled.

    {"name", "words", "agents": [{"agent", "calls", "mean", "std", "own_mean", "own_std", "inflation", "score",
      "rules": {rule: {"factor", "covariance", "second", "row_mean", "rows_needed",
        "sizes": {N: {"exact": {..FiniteMoments..} | null, "sampled", "stderr", "groups", "rows", "inflation_factor"}}}}}]}

    mean, std and inflation are the pooled statistics of grpo and its factor in Lemma 4.2, own_mean and own_std are those of the
    agent's own rewards. covariance, every second, deviation, sampled and stderr (of the sample itself) are relative to score.
    """
    team, logits = regime.team, regime.logits
    exact = {name: population(team, logits, rule) for name, rule in rules.items()}
    pooled = population(team, logits, RULES["grpo"])
    own = population(team, logits, RULES["dr-mas"])
    cells: dict[str, dict[str, dict[str, Any]]] = {agent: {name: {} for name in rules} for agent in own}
    for size, number in groups.items():
        rows = team.play(logits, groups=number, size=size, seed=seed)
        reported = inflation_factors(rows)
        for name, rule in rules.items():
            enumerated = finite(team, logits, rule, size)
            sampled = sample(team, logits, rows, rule)
            for agent, moments in own.items():
                cell = {"exact": _relative(enumerated[agent], moments.score) if enumerated else None}
                if agent in sampled:
                    second, stderr, count = sampled[agent]
                    cell |= {"sampled": second / moments.score, "stderr": stderr / moments.score, "rows": count}
                    cell |= {"groups": number, "inflation_factor": reported[agent]}
                cells[agent][name][str(size)] = cell
    return {
        "name": regime.name,
        "words": regime.words,
        "agents": [
            {
                "agent": agent,
                "calls": moments.calls,
                "mean": pooled[agent].mean,
                "std": pooled[agent].std,
                "own_mean": moments.own_mean,
                "own_std": moments.own_std,
                "inflation": pooled[agent].factor,
                "score": moments.score,
                "rules": {name: _population_cell(exact[name][agent]) | {"sizes": cells[agent][name]} for name in rules},
            }
            for agent, moments in own.items()
        ],
    }


def sample(
    team: BanditTeam, logits: np.ndarray, rows: Sequence[Row], rule: AdvantageRule
) -> dict[str, tuple[float, float, int]]:
    """By agent that has rows: the mean of A^2 |z|^2 over its rows, the standard error of that mean, and the number of rows.

    Groups are independent of each other and their rows aren't, so the error is that of a ratio of sums over groups
    (Cochran, Sampling Techniques, 6.3).
    """
    pi = team.episodes.policies(logits)
    squares = {agent: (1.0 - 2.0 * pi[k] + (pi[k] ** 2).sum()).tolist() for k, agent in enumerate(team.agents)}
    sums: dict[str, dict[str, list[float]]] = {agent: defaultdict(lambda: [0.0, 0.0]) for agent in team.agents}
    for row, value in zip(rows, advantages(rows, rule).values, strict=True):
        own = sums[row.agent][row.task]
        own[0] += value**2 * squares[row.agent][row.response_ids[0]]
        own[1] += 1
    groups = len({row.task for row in rows})
    found = {}
    for agent, by_task in sums.items():
        if not by_task:
            continue
        total, count = np.array(list(by_task.values())).T
        mean = total.sum() / count.sum()
        deviation = math.sqrt(((total - mean * count) ** 2).sum() * groups / max(groups - 1, 1))
        found[agent] = (float(mean), deviation / count.sum(), int(count.sum()))
    return found


def _population_cell(moments: Moments) -> dict[str, Any]:
    return {
        "factor": moments.factor,
        "covariance": moments.covariance / moments.score,
        "second": moments.second / moments.score,
        "row_mean": moments.row_mean,
        "rows_needed": moments.rows_needed,
    }


def _relative(moments: FiniteMoments, score: float) -> dict[str, Any]:
    return {
        "second": moments.second / score,
        "deviation": moments.deviation / score,
        "row_sum": moments.row_sum,
        "zero_share": moments.zero_share,
        "largest": moments.largest,
        "groups_needed": moments.groups_needed,
    }
