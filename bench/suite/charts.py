"""A benchmark's table as a picture: bars, drmas' own in colour. Needs matplotlib, which nothing else of this project does.

Called by the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.suite.entries import Chart
from bench.suite.record import Cell, Result, plain

OURS, OTHER = "#1b6ca8", "#a9afb8"


def draw(path: Path, result: Result, chart: Chart) -> None:
    """Write the picture in the format of the path's suffix. ValueError: the table lacks a column that the chart shows."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "bench", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    table = result.tables[chart.table]
    columns = {name: number for number, name in enumerate(table.columns)}
    wanted = (chart.label, *chart.values, *((chart.split,) if chart.split else ()))
    if missing := [name for name in wanted if name not in columns]:
        raise ValueError(f"the chart of {result.benchmark} shows {missing[0]!r}; its table has {', '.join(table.columns)}")
    groups = _groups(table.rows, columns[chart.split] if chart.split else None) or [("", [])]
    heights = [len(rows) + 1.8 for _, rows in groups]
    figure, axes = pyplot.subplots(
        *(len(groups), len(chart.values)),
        figsize=(3.0 + 3.2 * len(chart.values), 0.26 * sum(heights) + 0.7),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle(f"{result.about.machine}, {result.about.date}", fontsize=8)
    for line, (title, rows) in zip(axes, groups, strict=True):
        names = [str(row[columns[chart.label]]) for row in rows]
        for place, (axis, value) in enumerate(zip(line, chart.values, strict=True)):
            _bars(axis, names, [row[columns[value]] for row in rows], f"{title}\n{value}" if place == 0 else f"\n{value}")
            if place:
                axis.set_yticklabels([])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _groups(rows: Sequence[Sequence[Cell]], column: int | None) -> list[tuple[str, list[Sequence[Cell]]]]:
    if column is None:
        return [("", list(rows))]
    titles = dict.fromkeys(str(row[column]) for row in rows)
    return [(title, [row for row in rows if str(row[column]) == title]) for title in titles]


def _bars(axis, names: Sequence[str], values: Sequence[Cell], title: str) -> None:
    numbers = [float(value) if isinstance(value, (int, float)) else 0.0 for value in values]
    places = range(len(names))
    colours = [OURS if name.startswith("drmas") else OTHER for name in names]
    drawn = axis.barh(places, numbers, color=colours, height=0.72)
    axis.bar_label(drawn, labels=[plain(value) or "-" for value in values], padding=3, fontsize=8)
    axis.set_yticks(places, names)
    axis.set_xlim(0, 1.3 * max(numbers, default=0.0) or 1.0)
    axis.set_title(title, fontsize=8.5, loc="left")
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=7)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
