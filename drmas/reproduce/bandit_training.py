"""Bandit teams trained from the same start with the same seeds under each rule: does the comparison matter for learning?

All seeds are trained at once: the groups of a step are tasks of their own in one call of the product's advantages, so nothing
of one seed reaches another, and a seed's episodes are drawn with numbers of its own, the same under every rule. A policy's
gradient is the mean of A z over its rows of the step, followed by ascent or by Adam; a policy without rows isn't stepped. What
is reported is the exact expected reward of the policies, no sample. Called by `drmas.reproduce.bandit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from drmas.config.schema import AlarmConfig
from drmas.core.advantages import AdvantageRule
from drmas.reproduce.bandit_moments import cell_advantages, population
from drmas.reproduce.bandit_team import BanditTeam
from drmas.reproduce.intervals import estimate, paired
from drmas.reproduce.regimes import RULES, always_speaking, own_scales, rescue_loop, routed
from drmas.telemetry.alarms import FEWEST

Optimiser = Literal["ascent", "adam"]
GRIDS: Mapping[Optimiser, tuple[float, ...]] = {"ascent": (0.1, 0.3, 1.0, 3.0, 10.0), "adam": (0.01, 0.03, 0.1, 0.3, 1.0)}
"""The learning rates that are tried, the same for every rule."""
CLIP = 0.2
"""The largest norm of a policy's gradient where norms are clipped."""
VARIANTS: tuple[tuple[Optimiser, float | None], ...] = (("ascent", None), ("ascent", CLIP), ("adam", None), ("adam", CLIP))
WINDOW, SPIKE = AlarmConfig().window, AlarmConfig().spike
"""A spike: a gradient norm above `SPIKE` times the median of the agent's last `WINDOW` norms (at least `FEWEST`), as the run's
alarms have it."""
_NOTHING = 1e-12
"""A gradient norm below this is rounding: where all rows took the same action, A z adds up to 0."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A team that learns from uniform policies, or from those given; per step one task with `size` episodes."""

    name: str
    words: str
    team: BanditTeam
    start: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    size: int = 8


class Run(NamedTuple):
    seed: int
    rate: float
    optimiser: Optimiser
    clip: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    """What B runs did. `final` [B]: exact expected team reward; `average` [B]: its mean over the steps; `norms` [steps, B, K]:
    norm of the agent's part of its policy's gradient before clipping, NaN where it had no rows."""

    final: np.ndarray
    average: np.ndarray
    norms: np.ndarray


def scenarios() -> list[Scenario]:
    """One per way in which agents' rewards can differ from the group's, after one in which they don't."""
    fixer = (0.4, 0.1, 0.1, 0.1, 0.1)
    high = rescue_loop((0.92, 0.9, 0.88), fixer)
    rare, router = routed((0.7, 0.6), (0.98, 0.3, 0.3, 0.3)), {"router": (0.9, 0.1)}
    return [
        Scenario(
            "two agents that always speak",
            "A writer and a checker with five actions each; the factor is 1: a control.",
            always_speaking(0.9, 0.5, 0.15, 5),
        ),
        Scenario(
            "rescue loop",
            "A solver of middling success, then a fixer with up to two calls that has one better action of five.",
            rescue_loop((0.7, 0.6, 0.5), fixer),
        ),
        Scenario(
            "rescue loop, one policy",
            "Solver and fixer speak with the same policy, whose best action is the same for both.",
            rescue_loop((0.7, 0.6, 0.6, 0.5, 0.5), fixer, shared=True),
        ),
        Scenario("rescue loop at high success", "The same fixer behind a solver that succeeds in nine of ten episodes.", high),
        Scenario("rescue loop at high success, groups of 32", "The same with four times the episodes per group.", high, {}, 32),
        Scenario("rare agent", "A router that at first asks the better specialist once in ten episodes.", rare, router),
        Scenario("rare agent, groups of 32", "The same with four times the episodes per group.", rare, router, 32),
        Scenario(
            "unequal reward scales",
            "A solver that earns 0 or 1 and a judge that earns 0 or 10; the result is the mean share of the two.",
            own_scales((0.8, 0.4, 0.3, 0.2), (0.8, 0.4, 0.3, 0.2), 10.0),
        ),
    ]


def train(scenario: Scenario, rule: AdvantageRule, runs: Sequence[Run], steps: int) -> Trace:
    """All runs at once; each does the same whatever is beside it."""
    team, episodes = scenario.team, scenario.team.episodes
    logits = np.repeat(team.logits(scenario.start)[None], len(runs), 0)
    step = _Stepper(runs, logits.shape)
    draws = {seed: np.random.default_rng([16180, seed]).random((steps, scenario.size)) for seed in {run.seed for run in runs}}
    draw = np.stack([draws[run.seed] for run in runs], 1)  # [steps, B, size]
    total, norms = np.zeros(len(runs)), []
    for number in range(steps):
        likely = episodes.probabilities(logits)
        chosen = _choose(likely, draw[number])
        parts, rows = _gradient(episodes.counts[chosen], episodes.rewards[chosen], episodes.policies(logits), rule)
        gradient, rows_of = np.zeros(logits.shape), np.zeros(logits.shape[:2])
        for k, policy in enumerate(episodes.policy_of):
            gradient[:, policy] += parts[:, k]
            rows_of[:, policy] += rows[:, k]
        divisor = np.maximum(rows_of, 1)
        own = np.linalg.norm(parts, axis=-1) / divisor[:, episodes.policy_of]
        norms.append(np.where(rows > 0, own, np.nan))
        logits = logits + step(gradient / divisor[..., None], rows_of > 0)
        total += likely @ episodes.reward
    return Trace(episodes.probabilities(logits) @ episodes.reward, total / steps, np.stack(norms))


def compare(
    scenario: Scenario, *, steps: int, seeds: int, tuning_seeds: int, rules: Mapping[str, AdvantageRule] = RULES
) -> dict[str, Any]:
    """The scenario under every rule, optimiser and clipping; JSON-able. `rules` holds grpo.

    Rates are chosen by the final result on `tuning_seeds` other seeds: in "shared" grpo's best for every rule, in "own" the
    rule's own best of the same grid. {"name", "words", "size", "start", "best", "inflation": {agent: grpo's factor at first},
      "variants": [{"optimiser", "clip", "rates", "shared_rate", "rules": {rule: {"tuning": [..per rate..],
        "shared": {"rate", "final", "average", "difference"}, "own": {..}, "spikes": {agent: {..as `spikes`..}}}}}]}
    final, average and difference (final, rule - grpo, each at the rate of its table, paired by seed) are estimates with 95 %
    intervals over seeds; spikes are at the shared rate; start and best are the expected rewards of the start and of the best.
    """
    tuned = {name: _tuned(scenario, rule, range(seeds, seeds + tuning_seeds), steps) for name, rule in rules.items()}
    rates = {
        name: [GRIDS[kind][int(np.argmax(of))] for (kind, _), of in zip(VARIANTS, tuned[name], strict=True)] for name in rules
    }
    variants = [
        {"optimiser": kind, "clip": clip, "rates": list(GRIDS[kind]), "shared_rate": rates["grpo"][v], "rules": {}}
        for v, (kind, clip) in enumerate(VARIANTS)
    ]
    finals: dict[int, np.ndarray] = {}
    for name in sorted(rules, key=lambda each: each != "grpo"):
        wanted = [(v, rate) for v in range(len(VARIANTS)) for rate in dict.fromkeys([rates["grpo"][v], rates[name][v]])]
        runs = [Run(seed, rate, *VARIANTS[v]) for v, rate in wanted for seed in range(seeds)]
        trace = train(scenario, rules[name], runs, steps)
        of = {each: slice(i * seeds, (i + 1) * seeds) for i, each in enumerate(wanted)}
        for v, variant in enumerate(variants):
            shared, own = of[v, rates["grpo"][v]], of[v, rates[name][v]]
            baseline = finals.setdefault(v, trace.final[shared])
            variant["rules"][name] = {
                "tuning": tuned[name][v],
                "shared": _result(rates["grpo"][v], trace, shared, baseline),
                "own": _result(rates[name][v], trace, own, baseline),
                "spikes": dict(zip(scenario.team.agents, spikes(trace.norms[:, shared]), strict=True)),
            }
    start = scenario.team.logits(scenario.start)
    return {
        "name": scenario.name,
        "words": scenario.words,
        "size": scenario.size,
        "start": float(scenario.team.episodes.probabilities(start) @ scenario.team.episodes.reward),
        "best": _best(scenario.team),
        "inflation": {agent: each.factor for agent, each in population(scenario.team, start, RULES["grpo"]).items()},
        "variants": variants,
    }


def spikes(norms: np.ndarray) -> list[dict[str, Any]]:
    """Per agent, from norms [steps, B, K]; steps without rows or with a gradient of 0 are left out, from the medians too.

    Where an agent's rows all took the same action, its own mean makes the sum of A z exactly 0 and a pooled one leaves a small
    gradient, which counts: so part of a pooled rule's share is low medians, and "norm" is the number without that.

    {"share": of spikes among all runs' norms that have a median, "largest": ratio of a norm to its running median of all runs,
    "middle": the median over runs of a run's largest ratio, "norm": the mean over runs of a run's largest norm, an estimate}
    """
    there = np.nan_to_num(norms) > _NOTHING
    order = np.argsort(~there, axis=0, kind="stable")
    packed = np.take_along_axis(np.where(there, norms, np.nan), order, 0)
    ratios = np.full(norms.shape, np.nan)
    for step in range(FEWEST, len(norms)):
        ratios[step] = packed[step] / np.median(packed[max(0, step - WINDOW) : step], axis=0)
    found = []
    for k in range(norms.shape[2]):
        own = np.nan_to_num(ratios[:, :, k])
        measured, largest = int((own > 0).sum()), own.max(0)
        found.append(
            {
                "share": float((own > SPIKE).sum() / measured) if measured else None,
                "largest": float(largest.max()) if measured else None,
                "middle": float(np.median(largest[largest > 0])) if measured else None,
                "norm": asdict(estimate(np.nan_to_num(norms[:, :, k]).max(0).tolist())),
            }
        )
    return found


def _tuned(scenario: Scenario, rule: AdvantageRule, seeds: range, steps: int) -> list[list[float]]:
    """By variant and rate: the mean final result over seeds that nothing else uses."""
    runs = [Run(seed, rate, kind, clip) for kind, clip in VARIANTS for rate in GRIDS[kind] for seed in seeds]
    final = train(scenario, rule, runs, steps).final
    return final.reshape(len(VARIANTS), -1, len(seeds)).mean(2).tolist()


def _result(rate: float, trace: Trace, runs: slice, baseline: np.ndarray) -> dict[str, Any]:
    left, right = (dict(enumerate(each.tolist())) for each in (trace.final[runs], baseline))
    return {
        "rate": rate,
        "final": asdict(estimate(trace.final[runs].tolist())),
        "average": asdict(estimate(trace.average[runs].tolist())),
        "difference": asdict(paired(left, right)),
    }


def _best(team: BanditTeam) -> float:
    """The largest expected reward of policies that always take the same action."""
    sizes = {team.policy(agent): number for agent, number in team.actions.items()}
    found = []
    for actions in product(*map(range, sizes.values())):
        certain = {policy: np.eye(sizes[policy])[action] for policy, action in zip(sizes, actions, strict=True)}
        logits = team.logits({policy: tuple((each + 1e-300).tolist()) for policy, each in certain.items()})
        found.append(float(team.episodes.probabilities(logits) @ team.episodes.reward))
    return max(found)


def _choose(likely: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Episodes [B, size] drawn with probabilities [B, M] by inversion of uniform numbers [B, size]."""
    until = likely.cumsum(1)
    until = until / until[:, -1:] + np.arange(len(likely))[:, None]
    place = np.searchsorted(until.ravel(), draw + np.arange(len(likely))[:, None], side="right")
    return np.minimum(place - np.arange(len(likely))[:, None] * likely.shape[1], likely.shape[1] - 1)


def _gradient(counts: np.ndarray, rewards: np.ndarray, pi: np.ndarray, rule: AdvantageRule) -> tuple[np.ndarray, np.ndarray]:
    """Every agent's sum of A z over its rows [B, K, A], and the number of its rows [B, K]."""
    calls = counts.sum(-1)
    advantage = cell_advantages(rule, calls.astype(np.int64), rewards)
    taken = (advantage[..., None] * counts).sum(1)
    return taken - (advantage * calls).sum(1)[..., None] * pi, calls.sum(1)


class _Stepper:
    """What is added to the logits [B, P, A]: the rate times the gradient, or Adam's step (betas 0.9, 0.999, epsilon 1e-8)."""

    def __init__(self, runs: Sequence[Run], shape: tuple[int, ...]) -> None:
        def column(values: list[float]) -> np.ndarray:
            return np.array(values)[:, None, None]

        self.rates = column([run.rate for run in runs])
        self.most = column([math.inf if run.clip is None else run.clip for run in runs])
        self.adam = column([run.optimiser == "adam" for run in runs])
        self.first, self.second, self.count = np.zeros(shape), np.zeros(shape), np.zeros((*shape[:2], 1))

    def __call__(self, gradient: np.ndarray, stepped: np.ndarray) -> np.ndarray:
        norm = np.linalg.norm(gradient, axis=-1, keepdims=True)
        gradient = gradient * np.minimum(1.0, self.most / np.maximum(norm, 1e-300))
        on = stepped[..., None]
        self.count = self.count + on
        self.first = np.where(on, 0.9 * self.first + 0.1 * gradient, self.first)
        self.second = np.where(on, 0.999 * self.second + 0.001 * gradient**2, self.second)
        count = np.maximum(self.count, 1)
        adam = self.first / (1 - 0.9**count) / (np.sqrt(self.second / (1 - 0.999**count)) + 1e-8)
        return np.where(on, self.rates * np.where(self.adam, adam, gradient), 0.0)
