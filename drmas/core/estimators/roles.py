"""Another estimator for some agents: `advantage.agents.NAME` has the settings of one.

Each estimator sees all rows, so that statistics which are pooled over agents stay those of the whole team; the rows of an agent
then take their advantages from its own. What one of them needs (critic, probes) is there for all.

Fails when agents share a policy and their estimators another scale: the one with the larger advantages owns the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drmas.core.advantages import AdvantageRow, Advantages, Segment, TokenAdvantages
from drmas.core.estimators.base import NOTHING, Estimator, Evidence, Penalty, Probe
from drmas.errors import CheckpointError

_DEFAULT = ""
"""Where the state of the others' estimator stands; no agent has this name."""


@dataclass(frozen=True, slots=True)
class Roles:
    """`others` is for the agents that `agents` doesn't name; None if there are none."""

    others: Estimator | None
    agents: Mapping[str, Estimator]

    @property
    def _all(self) -> dict[str, Estimator]:
        return ({} if self.others is None else {_DEFAULT: self.others}) | dict(self.agents)

    @property
    def needs_critic(self) -> bool:
        return any(each.needs_critic for each in self._all.values())

    @property
    def probes(self) -> tuple[Probe, ...]:
        """All of them; of two with the same name the one with more episodes."""
        found: dict[str, Probe] = {}
        for probe in (probe for each in self._all.values() for probe in each.probes):
            if probe.name not in found or found[probe.name].episodes < probe.episodes:
                found[probe.name] = probe
        return tuple(found.values())

    @property
    def penalty(self) -> Penalty:
        """Inside where one of them has it so; each deals with penalties in its own way."""
        return "inside" if any(each.penalty == "inside" for each in self._all.values()) else "outside"

    @property
    def equal_groups_teach(self) -> bool:
        return any(each.equal_groups_teach for each in self._all.values())

    def of(self, agent: str) -> Estimator:
        """Whose advantages the agent's rows take. KeyError: nobody's."""
        return self._all[agent if agent in self.agents else _DEFAULT]

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        """A critic learns from all rows of its policy: a row whose own estimator gives no returns takes those of another."""
        found = {name: each(rows, evidence) for name, each in self._all.items()}
        own = [found[row.agent if row.agent in self.agents else _DEFAULT] for row in rows]
        values = [each.values[i] for i, each in enumerate(own)]
        segments, anchors = [], []
        for each in found.values():
            mine = {i for i, source in enumerate(own) if source is each}
            segments += _of(each.segments, mine)
            anchors += _of(each.anchors, mine)
        if all(each.tokens is None for each in found.values()):
            return Advantages(values, segments, anchors=anchors)
        spread = [each.of(i) for i, each in enumerate(own)]
        tokens = [
            value if value is None or isinstance(value, list) else [value] * len(row.response_ids)
            for row, value in zip(rows, spread, strict=True)
        ]
        critics = [each.tokens for each in found.values() if _learns(each)]
        if not critics:
            return Advantages(values, segments, TokenAdvantages(tokens), anchors)
        returns = [(each.tokens if _learns(each) else critics[0]).returns[i] for i, each in enumerate(own)]
        return Advantages(values, segments, TokenAdvantages(tokens, returns, critics[0].before), anchors)

    def state(self) -> dict[str, Any]:
        return {name: state for name, each in self._all.items() if (state := each.state())}

    def restore(self, state: dict[str, Any]) -> None:
        if unknown := state.keys() - self._all.keys():
            raise CheckpointError(
                f"the checkpoint keeps advantages of {', '.join(sorted(unknown))}, which advantage.agents doesn't name; "
                "expected the settings of the run that was saved"
            )
        for name, each in self._all.items():
            each.restore(state.get(name, {}))

    def __str__(self) -> str:
        return "; ".join(f"{name}: {each}" if name else str(each) for name, each in self._all.items())


def _learns(found: Advantages) -> bool:
    return found.tokens is not None and found.tokens.returns is not None


def _of(segments: Sequence[Segment], mine: set[int]) -> list[Segment]:
    """Those that rows of `mine` take a statistic from, with these rows alone; means, deviations and counts are still of all."""
    return [replace(each, rows=rows) for each in segments if (rows := [i for i in each.rows if i in mine])]
