"""What an estimator is: rows, and what it may know besides them, in; an advantage for every row out.

An estimator leaves rows out whose status isn't "ok" (I3: their advantage is None), gives the same for any order of rows, and
works for any number of them (I4). One file beside this for each idea; `resolve` in `__init__.py` makes one from a preset's
name. Called by the controller, on every rank with the same rows, and by `drmas inspect`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from drmas.core.advantages import AdvantageRow, AdvantageRule, Advantages, advantages, check_rows
from drmas.core.means import mean_of
from drmas.errors import CheckpointError

Penalty = Literal["inside", "outside"]


@dataclass(frozen=True, slots=True)
class Probe:
    """Episodes beside each group that only a baseline is made of; nobody trains on them.

    Example: Probe("without solver", episodes=2, without="solver")
    """

    name: str
    episodes: int = 1
    greedy: bool = False
    """Every agent samples at temperature 0."""
    without: str | None = None
    """This agent is silent: its calls give an empty text, parsed as such, and no turn."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an estimator may know besides the rows.

    Example: Evidence(baselines={"sums/17": {"greedy": [1.0]}})
    """

    values: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Policy -> the critic's value of every response token of each of its rows, in the order of the rows."""
    baselines: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Task id -> probe's name -> rewards of its finished episodes. Where the team rewards an agent by itself in a probe in
    which all speak, the agent's own stand there too, under `reward_of(probe's name, agent)`."""

    def baseline(self, task: str, probe: str, agent: str) -> float | None:
        """The mean reward that the agent had in a probe's finished episodes of a task; None where there are none."""
        rewards = self.baselines.get(task, {})
        return mean_of(rewards.get(reward_of(probe, agent)) or rewards.get(probe, ()))


def reward_of(probe: str, agent: str) -> str:
    """Under which name `Evidence.baselines` has the rewards of an agent that the team rewards by itself."""
    return f"{probe}, {agent}"


NOTHING = Evidence()


class Estimator(Protocol):
    """Every rank calls it with the same rows and evidence, once a step, so that what it keeps is the same on every rank."""

    @property
    def needs_critic(self) -> bool:
        """Reads `Evidence.values`, and gives `Advantages.tokens.returns` for the critics to learn."""
        ...

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What has to run beside each group, for `Evidence.baselines`."""
        ...

    @property
    def penalty(self) -> Penalty:
        """Penalties are part of what is normalised ("inside"), or taken off afterwards (I7)."""
        ...

    @property
    def equal_groups_teach(self) -> bool:
        """A group whose episodes all earn the same may get advantages other than 0, penalties aside; dynamic sampling, which
        drops such groups, has no place then."""
        ...

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        """An advantage per row. DataError: an included row without a finite reward or penalty.

        Those that look at tokens read `response_ids`, and `prompt_ids`, too, which every `drmas.types.Row` has.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What it keeps from step to step, as JSON; {} of one that never keeps anything."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state()`. CheckpointError: that of another estimator."""
        ...

    def __str__(self) -> str:
        """How it compares rows, in a few words."""
        ...


class Stateless:
    """What most estimators share: no critic, no probes, nothing kept, penalties outside, equal groups without a lesson."""

    needs_critic: ClassVar[bool] = False
    equal_groups_teach: ClassVar[bool] = False

    @property
    def probes(self) -> tuple[Probe, ...]:
        return ()

    @property
    def penalty(self) -> Penalty:
        """Penalties are part of what is normalised, or taken off afterwards (I7)."""
        return "outside"

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            raise CheckpointError(
                f"the checkpoint keeps {', '.join(map(repr, state))} of an advantage estimator, and that of the preset keeps "
                "nothing; expected advantage.preset to be that of the run that was saved"
            )


@dataclass(frozen=True, slots=True)
class Segmented(Stateless):
    """Rows of a segment against each other: A = (R - mean) / (std + eps), by an `AdvantageRule`."""

    rule: AdvantageRule

    @classmethod
    def of(cls, rule: AdvantageRule, changes: Mapping[str, Any]) -> Segmented:
        """ConfigError: a value of `changes` that the rule can't have."""
        return cls(replace(rule, **changes))

    @property
    def penalty(self) -> Penalty:
        return self.rule.penalty

    @property
    def equal_groups_teach(self) -> bool:
        """Only the bare reward; a lone row that keeps its own ("raw") is no lesson about the group."""
        return self.rule.mean == self.rule.std == "none"

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        return advantages(rows, self.rule)

    def __str__(self) -> str:
        return str(self.rule)


def above(rows: Sequence[AdvantageRow], baselines: Sequence[float | None]) -> Advantages:
    """A = R - b - penalty, with one baseline per row; None for excluded rows and where there is no baseline (I3)."""
    check_rows(rows)
    values = [
        None if row.status != "ok" or baseline is None else row.reward - baseline - row.penalty
        for row, baseline in zip(rows, baselines, strict=True)
    ]
    return Advantages(values, [])


def without_penalties(rows: Sequence[AdvantageRow]) -> list[AdvantageRow]:
    """The rows, as if none of their turns had been malformed."""
    return [replace(row, penalty=0.0) if row.penalty else row for row in rows]
