"""Which rows are compared with each other, and the advantages that follow: rules as data, presets by name.

Turns rows into segments and hands them to `drmas_kernels.segment_advantage`, which owns the formula; keeps the segments so
that they can be shown. Called by the controller (every rank computes the same from the same rows) and by `drmas inspect`. It
does not pad, weight or batch: see `drmas.core.batching`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

import torch

from drmas.core.gae import GaeRule, TokenAdvantages, gae
from drmas.core.names import expected_names
from drmas.errors import ConfigError, DataError
from drmas.types import Row
from drmas_kernels.segment_advantage import SegmentStats, segment_advantage

Scope = Literal["agent", "task", "none"]
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """A = (value - mean) / (std + eps), with each statistic over the rows of (task, agent), of the task, or not used.

    Example: AdvantageRule(mean="task", std="none", weighting="episode", leave_one_out=True) is RLOO.
    """

    mean: Scope = "agent"
    std: Scope = "agent"
    weighting: Literal["turn", "episode"] = "turn"
    """Statistics over turns (an episode that calls an agent four times counts four times) or over distinct episodes."""
    ddof: int = 1
    eps: float = 1e-6
    min_std: float = 0.0
    """A segment of smaller std counts as constant."""
    singleton: Literal["zero", "raw"] = "zero"
    penalty: Literal["inside", "outside"] = "outside"
    """Penalties are part of what is normalised, or taken off afterwards (I7)."""
    leave_one_out: bool = False

    def __str__(self) -> str:
        return f"mean over {self.mean}, std over {self.std}, weighting by {self.weighting}"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                expected = ", ".join(str(choice) for choice in choices)
                raise ConfigError(f"advantage.{name} is {getattr(self, name)!r}; expected one of {expected}")
        for name in ("eps", "min_std"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"advantage.{name} is {getattr(self, name)}; expected a finite number of at least 0")
        if self.leave_one_out and self.mean == "none":
            raise ConfigError("advantage.mean is 'none' but the rule leaves one out of the mean; expected agent or task")


_CHOICES: dict[str, tuple[Any, ...]] = {
    "mean": ("agent", "task", "none"),
    "std": ("agent", "task", "none"),
    "weighting": ("turn", "episode"),
    "ddof": (0, 1),
    "singleton": ("zero", "raw"),
    "penalty": ("inside", "outside"),
}

PRESETS: dict[str, AdvantageRule] = {
    "dr-mas": AdvantageRule(),
    "grpo": AdvantageRule(mean="task", std="task", weighting="episode"),
    # The numbers of the method's first implementation, its singleton rule and its inside penalties included.
    "dr-mas-paper": AdvantageRule(singleton="raw", penalty="inside"),
    # The paper's mixed ablations; with dr-mas and grpo-turns only the source of one statistic changes from one to the next.
    "mean=agent,std=task": AdvantageRule(mean="agent", std="task"),
    "mean=task,std=agent": AdvantageRule(mean="task", std="agent"),
    # Pooled statistics over turns: what is left of the per-agent rule when only the agent's identity is taken away.
    "grpo-turns": AdvantageRule(mean="task", std="task"),
    "rloo": AdvantageRule(mean="task", std="none", weighting="episode", leave_one_out=True),
}


PPO = "ppo"
"""The preset whose advantages come from a critic."""


def resolve(preset: str, *, gamma: float = 1.0, gae_lambda: float = 1.0, **overrides: Any) -> AdvantageRule | GaeRule:
    """The preset's rule with the overrides that are not None; a `GaeRule` for "ppo".

    ConfigError: an unknown preset or field, a value out of range, or a setting that the preset has no use for.

    Example: resolve("dr-mas", std="task") == PRESETS["mean=agent,std=task"]
    """
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if preset == PPO:
        if unused := [name for name in overrides if name not in ("mean", "std", "eps")]:
            raise ConfigError(
                f"advantage.{unused[0]} has no effect with preset 'ppo', where a critic gives advantages; unset it"
            )
        return GaeRule(gamma=gamma, lam=gae_lambda, **overrides)
    if preset not in PRESETS:
        raise ConfigError(f"advantage.preset is {preset!r}; {expected_names(preset, [*PRESETS, PPO])}")
    for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if value != 1.0:
            raise ConfigError(f"advantage.{name} is {value}; only preset 'ppo' discounts, and the preset is {preset!r}")
    names = [f.name for f in fields(AdvantageRule)]
    for name in overrides:
        if name not in names:
            raise ConfigError(f"advantage.{name} is not a setting; {expected_names(name, names)}")
    return replace(PRESETS[preset], **overrides)


class AdvantageRow(Protocol):
    """What this file needs of a row; `drmas.types.Row` has it."""

    task: str
    episode: str
    agent: str
    turn: int
    reward: float | None
    penalty: float
    status: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that are compared with each other, and what came out; `mean` and `std` are None where all rows are excluded.

    Example: Segment(scope="mean", key=("sums/17", "solver"), rows=[0, 2], num_episodes=2, mean=0.5, std=0.7071, weight=2.0,
                     singleton=False, constant=False, num_excluded=0)
    """

    scope: Literal["mean", "std"]
    """The statistic that the rows take from this segment."""
    key: Key
    """(task,) or (task, agent)."""
    rows: list[int]
    """Indices of the included rows."""
    num_episodes: int
    mean: float | None
    std: float | None
    weight: float
    """Units in the statistics: turns or episodes, by the rule's weighting."""
    singleton: bool
    constant: bool
    """More than one unit and no spread beyond rounding, so that its rows get exactly 0 (I6)."""
    num_excluded: int
    """Rows of failed episodes (I3)."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values` in the order of the rows, None where the row is excluded; `segments` in order of first appearance.

    From a critic: `values` are means over each row's tokens, `tokens` has them all, and there are no segments.
    """

    values: list[float | None]
    segments: list[Segment]
    tokens: TokenAdvantages | None = None

    def of(self, row: int) -> float | list[float] | None:
        """What row number `row` is trained with."""
        return self.values[row] if self.tokens is None else self.tokens.values[row]


def advantages(rows: Sequence[AdvantageRow], rule: AdvantageRule) -> Advantages:
    """The advantage of every row under the rule; rows whose status isn't "ok" are excluded (I3).

    The values don't depend on the order of rows. DataError: an included row without a finite reward or penalty.
    """
    included = [row.status == "ok" for row in rows]
    for index, row in enumerate(rows):
        if included[index]:
            _check(index, row)
    scopes = {"mean": _Segmentation(rows, rule.mean), "std": _Segmentation(rows, rule.std)}
    episodes = _number(row.episode for row in rows)
    result = segment_advantage(
        torch.tensor([row.reward if ok else 0.0 for row, ok in zip(rows, included, strict=True)], dtype=torch.float64),
        torch.tensor([row.penalty if ok else 0.0 for row, ok in zip(rows, included, strict=True)], dtype=torch.float64),
        mean_segment=scopes["mean"].ids(),
        std_segment=scopes["std"].ids(),
        episode=torch.tensor(episodes, dtype=torch.int64),
        included=torch.tensor(included, dtype=torch.bool),
        weighting=rule.weighting,
        ddof=rule.ddof,
        eps=rule.eps,
        min_std=rule.min_std,
        singleton=rule.singleton,
        penalty_inside=rule.penalty == "inside",
        leave_one_out=rule.leave_one_out,
    )
    values = [value if ok else None for value, ok in zip(result.advantage.tolist(), included, strict=True)]
    segments: list[Segment] = []
    for scope, stats in (("mean", result.mean_stats), ("std", result.std_stats)):
        if stats is not None:
            segments += _segments(scope, scopes[scope], stats, included, episodes, rule.min_std)
    return Advantages(values, segments)


def critic_advantages(rows: Sequence[Row], values: Mapping[str, Sequence[Sequence[float]]], rule: GaeRule) -> Advantages:
    """From the critics' values of every response token: by policy, for that policy's rows in their order.

    DataError: an included row without a finite reward or penalty.
    """
    for index, row in enumerate(rows):
        if row.status == "ok":
            _check(index, row)
    queues = {policy: iter(own) for policy, own in values.items()}
    tokens = gae(rows, [next(queues[row.policy]) for row in rows], rule)
    return Advantages(tokens.row_means(), [], tokens)


def _check(index: int, row: AdvantageRow) -> None:
    for name in ("reward", "penalty"):
        value = getattr(row, name)
        if value is None or not math.isfinite(value):
            raise DataError(
                f"row {index} (episode {row.episode!r}, agent {row.agent!r}) has {name} {value} and status 'ok'; "
                "expected a finite number, or another status to exclude the row"
            )


def _number(keys: Any) -> list[int]:
    """Each key's number, counted in order of first appearance."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


class _Segmentation:
    """The segment of every row for one statistic. Keys are tuples, so names that contain a separator can't collide."""

    def __init__(self, rows: Sequence[AdvantageRow], scope: Scope) -> None:
        self.keys: list[Key] = []
        self.segment: list[int] = []
        if scope != "none":
            per_row = [(row.task, row.agent) if scope == "agent" else (row.task,) for row in rows]
            self.keys, self.segment = list(dict.fromkeys(per_row)), _number(per_row)
        self.used = scope != "none"

    def ids(self) -> torch.Tensor | None:
        return torch.tensor(self.segment, dtype=torch.int64) if self.used else None


def _segments(
    scope: Literal["mean", "std"],
    segmentation: _Segmentation,
    stats: SegmentStats,
    included: list[bool],
    episodes: list[int],
    min_std: float,
) -> list[Segment]:
    members: list[list[int]] = [[] for _ in segmentation.keys]
    excluded = [0] * len(segmentation.keys)
    for row, segment in enumerate(segmentation.segment):
        if included[row]:
            members[segment].append(row)
        else:
            excluded[segment] += 1
    constant = stats.constant(min_std).tolist()
    return [
        Segment(
            scope=scope,
            key=key,
            rows=members[i],
            num_episodes=len({episodes[row] for row in members[i]}),
            mean=float(stats.mean[i]) if members[i] else None,
            std=float(stats.std[i]) if members[i] else None,
            weight=float(stats.weight[i]),
            singleton=float(stats.weight[i]) == 1.0,
            constant=constant[i],
            num_excluded=excluded[i],
        )
        for i, key in enumerate(segmentation.keys)
    ]
