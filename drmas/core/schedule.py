"""The learning rate of each update of a run.

Called by drmas.policy.optimizer; the settings are a policy's `lr`, `lr_schedule`, `lr_warmup_steps`, `lr_min` and
`lr_decay_share`.
"""

from __future__ import annotations

import math
from typing import Literal

Style = Literal["constant", "linear", "cosine", "wsd"]


def learning_rate(
    step: int, *, style: Style, lr: float, lr_min: float, warmup_steps: int, total_steps: int, decay_share: float
) -> float:
    """The rate of update `step`, counted from 1, in a run of `total_steps` updates.

    lr step / warmup_steps up to `warmup_steps`; then, with `start` the last update before the descent and `end` the first
    after the run,
        constant: lr
        linear:   lr_min + (lr - lr_min) (end - step) / (end - start)
        cosine:   lr_min + (lr - lr_min) (1 + cos(pi (step - start) / (end - start))) / 2
        wsd:      as linear over the last `decay_share` of the updates, and lr before them.
    `start` is otherwise the end of the warm-up, and never before it. From `end` on the rate is lr_min.

    Example: learning_rate(5, style="linear", lr=1.0, lr_min=0.0, warmup_steps=0, total_steps=9, decay_share=0.2) == 0.5
    """
    if step < warmup_steps:
        return lr * step / warmup_steps
    if style == "constant":
        return lr
    last = max(total_steps, warmup_steps)
    start = max(warmup_steps, last - round(decay_share * total_steps)) if style == "wsd" else warmup_steps
    progress = min(max((step - start) / (last + 1 - start), 0.0), 1.0)
    remains = (1.0 + math.cos(math.pi * progress)) / 2.0 if style == "cosine" else 1.0 - progress
    return lr_min + (lr - lr_min) * remains
