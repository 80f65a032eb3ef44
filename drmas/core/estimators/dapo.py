"""DAPO: the advantages of GRPO, in a run that samples and clips differently (arXiv 2503.14476).

    A = (R - penalty - mean of the task) / (std of the task + eps), mean and std of R - penalty

Penalties are part of what is normalised, as the paper adds that for length to the reward; `penalty = "outside"` takes them off
afterwards.
What else makes DAPO are other sections of the configuration. Those that aren't set, the preset sets: dynamic sampling (groups
whose episodes all earn the same are replaced: `rollout.dynamic`), clip-higher (`loss.clip_high` 0.28 over `loss.clip_low` 0.2),
aggregation over tokens (`loss.aggregation = "token"`) and no KL term. Overlong shaping, a penalty that grows towards the limit
of a response, is an agent's: `team.AGENT.length_buffer`. A start and `--dry-run` say which of these the run has otherwise. Not
the paper's: the bound of the loss at negative advantages (`loss.dual_clip`) stays on; null switches it off.

Fails where GRPO does, but for equal groups, which dynamic sampling pays for with episodes that are thrown away: most of them
where tasks are far too hard or too easy. In an equal group that fills a step after the last round, penalties are blown up to
full size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drmas.core.estimators.base import Segmented
from drmas.core.estimators.grpo import GRPO

DAPO = replace(GRPO, penalty="inside")


def dapo(**changes: Any) -> Segmented:
    return Segmented.of(DAPO, changes)
