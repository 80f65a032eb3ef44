"""Results of benchmarks that write a file of their own: what they say, as a `Result`. Called by the runner."""

from __future__ import annotations

from typing import Any

from bench.suite.record import About, Cell, Ratio, Result, Table

TARGET = 0.15
"""Of the measured step, by which its prediction may be off."""


def plan_validation(raw: Any, about: About) -> Result:
    """Of `bench/plan_validation.py`: measured beside predicted seconds by phase, and by which share each step is off."""
    rows: list[list[Cell]] = []
    ratios = []
    for each in raw["comparisons"]:
        for phase, found in each["phases"].items():
            rows.append([each["name"], phase, found["measured"], found["predicted"], found["error"], found["from_defaults"]])
        step = each["phases"]["step"]
        ratios.append(
            Ratio(
                name=f"{each['name']}: what a step's prediction is off by, of the step",
                value=abs(step["predicted"] / step["measured"] - 1),
                better="lower",
                tolerance=1.0,
                why="what else runs makes a measured step longer, and a prediction where it ran during the calibration",
                target=TARGET,
            )
        )
    columns = ["run", "phase", "measured s", "predicted s", "off by", "from the configuration s"]
    title = f"{raw['steps']} steps of each run, the first left out; predicted from the run's own lengths"
    tables = [Table(title=title, columns=columns, rows=rows)]
    return Result(benchmark="plan_validation", about=about, tables=tables, ratios=ratios)
