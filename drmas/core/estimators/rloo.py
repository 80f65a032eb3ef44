"""RLOO: an episode against the mean of the task's other episodes (REINFORCE leave-one-out, arXiv 2402.14740).

    A_i = R_i - mean of R_j over j != i = n / (n - 1) (R_i - mean of all n)

The baseline doesn't hold the episode's own reward, so the estimate of the gradient has no bias; nothing is divided by a
deviation, so tasks keep their scale. With mean=agent and weighting=turn a row is left out against all other rows of its agent,
its siblings of the same episode among them, which is no longer without bias.

Fails when rewards have another scale from task to task or from run to run: the learning rate then means something else each
time. With few episodes per task the baseline is as noisy as one reward. Pooled over agents as it is, it has the bias of
frequency that GRPO has.
"""

from __future__ import annotations

from typing import Any

from drmas.core.advantages import AdvantageRule
from drmas.core.estimators.base import Segmented

RLOO = AdvantageRule(mean="task", std="none", weighting="episode", leave_one_out=True)


def rloo(**changes: Any) -> Segmented:
    return Segmented.of(RLOO, changes)
