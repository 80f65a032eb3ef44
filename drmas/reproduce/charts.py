"""The charts of the report. Throughout, orange is grpo and blue the method that a chart's title or legend names: two colours
that everyone can tell apart. A band is the range of seeds.

Called by `drmas.reproduce.page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drmas.reproduce.analysis import BASE, SMOOTHED
from drmas.telemetry.plot import COLOURS, Points, Series, Span, interval_chart, line_chart, scatter_chart

OWN, OTHER = 0, 1
"""Colours of the method in question and of grpo."""
AGENT_CURVES = (
    ("grad_norm", "Gradient norm", "norm", None),
    ("inflation", "Inflation factor", "factor", 1.0),
    ("imbalance", "Row sum", "|sum of advantages| / rows", None),
)


def of_scenario(scenario: Mapping[str, Any]) -> list[str]:
    """Differences to grpo, reward curves of each method beside grpo's, and each agent under dr-mas beside grpo."""
    return [*differences(scenario), *_rewards(scenario["methods"]), *_agents(scenario["methods"]), *_moments(scenario)]


def differences(scenario: Mapping[str, Any]) -> list[str]:
    to_base = [one for one in scenario["differences"] if one["right"] == BASE]
    titles = {
        "final": ("Final reward less grpo's", "difference by seed, 95 %"),
        "avg": ("avg@16 less grpo's", "difference by seed, 95 %"),
    }
    drawn = []
    for key, (title, x_label) in titles.items():
        spans = [Span(one["left"], *(one[key][part] for part in ("value", "low", "high"))) for one in to_base]
        if any(span.value is not None for span in spans):
            drawn.append(interval_chart(spans, title=title, x_label=x_label, reference=0.0))
    return drawn


def _rewards(methods: Mapping[str, Any]) -> list[str]:
    curves = {name: own["curves"]["reward"] for name, own in methods.items() if own["curves"]["reward"]["mean"]}
    cover = [value for curve in curves.values() for part in ("low", "high") for value in curve[part] if value is not None]
    others = [name for name in curves if name != BASE] or list(curves)
    y_label = f"mean of {SMOOTHED} steps"
    return [line_chart(_beside(curves, other), title=f"Reward: {other}", y_label=y_label, cover=cover) for other in others]


def _agents(methods: Mapping[str, Any]) -> list[str]:
    drawn = []
    for key, title, y_label, reference in AGENT_CURVES:
        for agent in sorted({agent for name in (BASE, "dr-mas") for agent in methods.get(name, {}).get("agents", {})}):
            curves = {name: own["curves"][key][agent] for name, own in methods.items() if agent in own["curves"][key]}
            series = _beside(curves, "dr-mas")
            if any(value is not None for one in series for value in one.y):
                drawn.append(line_chart(series, title=f"{title}: {agent}", y_label=y_label, reference=reference))
    return drawn


def _beside(curves: Mapping[str, Any], other: str) -> list[Series]:
    """The curves of grpo and of the other method, where they are there."""
    colours = {other: OWN} if other != BASE else {}
    return [
        Series(name, range(1, len(curve["mean"]) + 1), curve["mean"], curve["low"], curve["high"], colour)
        for name, colour in ({BASE: OTHER} | colours).items()
        if (curve := curves.get(name))
    ]


def _moments(scenario: Mapping[str, Any]) -> list[str]:
    if not scenario["points"]:
        return []
    clouds = [
        Points("pooled", *_columns(scenario["points"], 1), colour=OWN),
        Points("per agent", *_columns(scenario["points"], 2), colour=OTHER, cross=True),
    ]
    bins = scenario["moments"]["bins"]
    for what, colour in (("pooled", OWN), ("per_agent", OTHER)):
        clouds.append(Points("", [one["predicted"] for one in bins], [one[what] for one in bins], colour, large=True))
    return [_scatter(clouds, "Second moment, measured")]


def all_moments(scenarios: Mapping[str, Any]) -> str:
    """Every measured second moment over its prediction: dots under the pooled baseline, crosses under per-agent statistics."""
    clouds = []
    for place, (name, scenario) in enumerate(scenarios.items()):
        if scenario["points"]:
            colour = place % COLOURS
            clouds.append(Points("", *_columns(scenario["points"], 2), colour=colour, cross=True))
            clouds.append(Points(name, *_columns(scenario["points"], 1), colour=colour))
    return _scatter(clouds, "Dots: pooled; crosses: per agent") if clouds else ""


def _columns(points: Sequence[Sequence[float | None]], column: int) -> tuple[list[float | None], list[float | None]]:
    return [point[0] for point in points], [point[column] for point in points]


def _scatter(clouds: Sequence[Points], title: str) -> str:
    return scatter_chart(clouds, title=title, x_label="predicted inflation factor", y_label="measured", reference=1.0)
