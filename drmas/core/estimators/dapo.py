"""DAPO: the advantages of GRPO, in a run that samples and clips differently (arXiv 2503.14476).

    A = (R - mean of the task) / (std of the task + eps)

What else makes DAPO are other sections of the configuration. Those that aren't set, the preset sets: dynamic sampling (groups
whose episodes all earn the same are replaced: `rollout.dynamic`), clip-higher (`loss.clip_high` 0.28 over `loss.clip_low` 0.2),
aggregation over tokens (`loss.aggregation = "token"`) and no KL term. Overlong shaping, a penalty that grows towards the limit
of a response, is an agent's: `team.AGENT.length_buffer`.

Fails where GRPO does, but for equal groups, which dynamic sampling pays for with episodes that are thrown away: most of them
where tasks are far too hard or too easy.
"""

from __future__ import annotations

from typing import Any

from drmas.core.estimators.base import Segmented
from drmas.core.estimators.grpo import GRPO


def dapo(**changes: Any) -> Segmented:
    return Segmented.of(GRPO, changes)
