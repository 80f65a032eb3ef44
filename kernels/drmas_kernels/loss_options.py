"""What the policy loss can be told: clipping, objective, KL to a reference, the correction for the engine's log-probs.

Read by `policy_loss` and, through it, by the output head. The formulas are in the contract of `policy_loss`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LOG_RATIO_LIMIT = 20.0
"""e^20 is 5e8: far beyond any clip, far below overflow."""
KL_LIMIT = 10.0
"""Bound of the k3 estimate of the KL to the reference."""

OBJECTIVES = ("ppo", "cispo", "gspo")
KL_ESTIMATORS = ("k1", "k2", "k3")
MISMATCH_RULES = ("none", "truncate", "mask")


@dataclass(frozen=True, slots=True)
class PolicyLossOptions:
    """Ten scalars. So they pass through a custom operator, as its last arguments, of these names and in this order:
    `dataclasses.astuple(options)` goes in, `PolicyLossOptions(*scalars)` comes out.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    """More than 1, or None for off. The objective "cispo" has no dual clip: there it changes nothing."""
    entropy_bonus: float = 0.0
    kl: Literal["k1", "k2", "k3"] | None = None
    """The estimator of the KL to the reference, which is added times `kl_coefficient`."""
    kl_coefficient: float = 0.0
    mismatch: Literal["none", "truncate", "mask"] = "none"
    """What becomes of the ratio of the trainer's to the engine's probability: "truncate" it at `mismatch_high` (truncated
    importance sampling, TIS), or "mask" tokens where it is outside `mismatch_low`..`mismatch_high` (IcePop)."""
    mismatch_low: float = 0.5
    mismatch_high: float = 2.0
    objective: Literal["ppo", "cispo", "gspo"] = "ppo"

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "entropy_bonus", "kl_coefficient", "mismatch_low"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number of at least 0")
        for name in ("entropy_bonus", "kl_coefficient"):
            if math.isinf(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; expected a finite number")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; expected more than 1, or None for off")
        if self.kl is not None and self.kl not in KL_ESTIMATORS:
            raise ValueError(f"kl is {self.kl!r}; expected one of {', '.join(KL_ESTIMATORS)}, or None for off")
        if self.kl is None and self.kl_coefficient:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient} but kl is None; name the estimator, or leave it 0")
        for name, known in (("mismatch", MISMATCH_RULES), ("objective", OBJECTIVES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        if not self.mismatch_high > 0.0:
            raise ValueError(f"mismatch_high is {self.mismatch_high}; expected a positive number")
        if self.mismatch == "mask" and self.mismatch_low > self.mismatch_high:
            raise ValueError(f"mismatch_low is {self.mismatch_low}; expected at most mismatch_high, {self.mismatch_high}")
