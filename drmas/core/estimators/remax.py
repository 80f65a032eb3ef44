"""ReMax: an episode against what the team earns on the same task when no agent samples (arXiv 2310.10505).

    A = R - R_greedy

R_greedy is the reward of one more episode of the task in which every agent takes its most likely token; nobody trains on it.
The baseline doesn't depend on what was sampled, so the estimate has no bias, with one episode per task, too.

Fails when the greedy episode says little of the sampled ones: a reward of 0 or 1 leaves a baseline of 0 or 1, as noisy as a
leave-one-out baseline of one; a long episode of many turns that goes astray once is far from the mean. It costs an episode per
task, and tasks whose greedy episode failed teach nothing. Where the team rewards agents by themselves, an agent's baseline is
what it earned in the greedy episode; else all agents of a task share the baseline, and its bias of frequency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from drmas.core.advantages import AdvantageRow, Advantages
from drmas.core.estimators.base import NOTHING, Evidence, Probe, Stateless, above

GREEDY = Probe("greedy", greedy=True)


@dataclass(frozen=True, slots=True)
class ReMax(Stateless):
    equal_groups_teach: ClassVar[bool] = True

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (GREEDY,)

    def __call__(self, rows: Sequence[AdvantageRow], evidence: Evidence = NOTHING) -> Advantages:
        return above(rows, [evidence.baseline(row.task, GREEDY.name, row.agent) for row in rows])

    def __str__(self) -> str:
        return "reward above the task's greedy episode"
