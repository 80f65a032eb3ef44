"""What the policy loss can be told: clipping, objective, KL to a reference, the correction for the engine's log-probs.

Read by `policy_loss` and, through it, by the output head. The formulas are in the contract of `policy_loss`.
"""

from __future__ import annotations

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
    """`dual_clip` None switches the dual clip off; it must exceed 1. The objective "cispo" has no dual clip.

    `kl` with `kl_coefficient` adds the KL to the reference. `mismatch` says what becomes of the ratio of the trainer's to the
    engine's log-prob: "truncate" at `mismatch_high`, or "mask" tokens where it is outside `mismatch_low`..`mismatch_high`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    entropy_bonus: float = 0.0
    kl: Literal["k1", "k2", "k3"] | None = None
    kl_coefficient: float = 0.0
    mismatch: Literal["none", "truncate", "mask"] = "none"
    mismatch_low: float = 0.5
    mismatch_high: float = 2.0
    objective: Literal["ppo", "cispo", "gspo"] = "ppo"

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "entropy_bonus", "kl_coefficient", "mismatch_low"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number of at least 0")
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
