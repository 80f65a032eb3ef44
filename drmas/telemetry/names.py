"""Finding one's way in a step's flat metrics: which agents, policies, phases and failures the names speak of.

The names themselves are written by `drmas.runtime.record`; console and report read them through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Metrics = Mapping[str, float | None]


def agents_of(steps: Iterable[Metrics]) -> list[str]:
    """Agents in the order of their first row: NAME of rollout/NAME/reward_mean."""
    return _middles(steps, "rollout", "reward_mean")


def policies_of(steps: Iterable[Metrics]) -> list[str]:
    """Policies that were trained: NAME of train/NAME/grad_norm."""
    return _middles(steps, "train", "grad_norm")


def phases_of(steps: Iterable[Metrics]) -> list[str]:
    """Phases of a step: NAME of time/NAME_seconds, without the whole step."""
    names = (
        key.removeprefix("time/").removesuffix("_seconds") for metrics in steps for key in metrics if key.startswith("time/")
    )
    return [name for name in dict.fromkeys(names) if name != "step"]


def failures_of(metrics: Metrics) -> dict[str, int]:
    """Failed episodes of a step by kind."""
    prefix = "rollout/failed/"
    return {key.removeprefix(prefix): int(value) for key, value in metrics.items() if key.startswith(prefix) and value}


def seconds_of(metrics: Metrics) -> float | None:
    """The whole step's seconds: as recorded, else the sum of its phases."""
    if (whole := metrics.get("time/step_seconds")) is not None:
        return whole
    parts = [value for name in phases_of([metrics]) if (value := metrics.get(f"time/{name}_seconds")) is not None]
    return sum(parts) if parts else None


def _middles(steps: Iterable[Metrics], first: str, last: str) -> list[str]:
    parts = (key.split("/") for metrics in steps for key in metrics)
    return list(dict.fromkeys(part[1] for part in parts if len(part) == 3 and part[0] == first and part[2] == last))
