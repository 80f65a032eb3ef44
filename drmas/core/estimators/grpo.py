"""GRPO: an episode against the other episodes of its task (arXiv 2402.03300), pooled over all agents.

    A = (R - mean of the task) / (std of the task + eps)

`grpo`: statistics over the task's distinct episodes, whose score is the mean over their rows; every row of an episode gets that
episode's advantage. `grpo-turns`: statistics over all rows, so an episode with more turns counts more; it is what is left of
the per-agent rule when only the agent's identity is taken away.

Fails when agents differ in how often they speak or in how the episodes end in which they do. Agent k's second moment is then
inflated by (sigma_k^2 + (mu_k - mu)^2) / sigma^2, and under `grpo` its rows don't sum to zero: who is called more in failing
episodes is pushed down whatever it says. A task whose episodes all earn the same teaches nothing, and one that is nearly solved
has its few failures blown up by 1 / std. Nor is there credit below the episode: a good turn in a failed one is punished.
"""

from __future__ import annotations

from typing import Any

from drmas.core.advantages import AdvantageRule
from drmas.core.estimators.base import Segmented

GRPO = AdvantageRule(mean="task", std="task", weighting="episode")
GRPO_TURNS = AdvantageRule(mean="task", std="task")


def grpo(**changes: Any) -> Segmented:
    return Segmented.of(GRPO, changes)


def grpo_turns(**changes: Any) -> Segmented:
    return Segmented.of(GRPO_TURNS, changes)
