"""Which rows are compared with each other, and the advantages that follow: rules as data.

Turns rows into segments and hands them to `drmas_kernels.segment_advantage`, which owns the formula; keeps the segments so
that they can be shown. Called by the estimators, which have the names (`drmas.core.estimators`). It does not pad, weight or
batch: see `drmas.core.batching`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from drmas.errors import ConfigError, DataError
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


class AdvantageRow(Protocol):
    """What this file needs of a row; `drmas.types.Row` has it. Estimators replace fields, so it is a dataclass."""

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

    scope: Literal["mean", "std", "anchor"]
    """The statistic that the rows take from this segment; "anchor": those of equal states (`Advantages.anchors`)."""
    key: Key
    """(task,) or (task, agent), of an anchor with the state's name after it."""
    rows: list[int]
    """Indices of the included rows; where agents have estimators of their own, of those that take the statistic from here."""
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
class TokenAdvantages:
    """One number per response token of each row, in order; None for an excluded row (I3).

    The critic learns `returns`; `before` is what it said. Both are None where no critic was asked.
    """

    values: list[list[float] | None]
    returns: list[list[float] | None] | None = None
    before: list[list[float]] | None = None

    def row_means(self) -> list[float | None]:
        """The mean advantage of each row's tokens."""
        return [None if each is None else sum(each) / len(each) for each in self.values]


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values` in the order of the rows, None where the row is excluded; `segments` in order of first appearance.

    Where tokens of a row differ (a critic, a discount), `values` are means over each row's tokens, and `tokens` has them all.
    `anchors` are further comparisons, whose outcome is added to that of `segments`.
    """

    values: list[float | None]
    segments: list[Segment]
    tokens: TokenAdvantages | None = None
    anchors: list[Segment] = field(default_factory=list)

    def of(self, row: int) -> float | list[float] | None:
        """What row number `row` is trained with."""
        return self.values[row] if self.tokens is None else self.tokens.values[row]


def advantages(rows: Sequence[AdvantageRow], rule: AdvantageRule) -> Advantages:
    """The advantage of every row under the rule; rows whose status isn't "ok" are excluded (I3).

    The values don't depend on the order of rows. DataError: an included row without a finite reward or penalty.
    """
    return compared(rows, rule, mean=_keys(rows, rule.mean), std=_keys(rows, rule.std))


def compared(
    rows: Sequence[AdvantageRow], rule: AdvantageRule, *, mean: Sequence[Key] | None, std: Sequence[Key] | None
) -> Advantages:
    """As `advantages`, with the segment that each row takes either statistic from in place of the rule's; None: not used."""
    check_rows(rows)
    included = [row.status == "ok" for row in rows]
    scopes = {"mean": _Segmentation(mean), "std": _Segmentation(std)}
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


def check_rows(rows: Sequence[AdvantageRow]) -> None:
    """DataError: an included row without a finite reward or penalty."""
    for index, row in enumerate(rows):
        for name in ("reward", "penalty") if row.status == "ok" else ():
            value = getattr(row, name)
            if value is None or not math.isfinite(value):
                raise DataError(
                    f"row {index} (episode {row.episode!r}, agent {row.agent!r}) has {name} {value} and status 'ok'; "
                    "expected a finite number, or another status to exclude the row"
                )


def _keys(rows: Sequence[AdvantageRow], scope: Scope) -> list[Key] | None:
    if scope == "none":
        return None
    return [(row.task, row.agent) if scope == "agent" else (row.task,) for row in rows]


def _number(keys: Any) -> list[int]:
    """Each key's number, counted in order of first appearance."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


class _Segmentation:
    """The segment of every row for one statistic. Keys are tuples, so names that contain a separator can't collide."""

    def __init__(self, keys: Sequence[Key] | None) -> None:
        self.keys: list[Key] = list(dict.fromkeys(keys or ()))
        self.segment: list[int] = _number(keys or ())
        self.used = keys is not None

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
