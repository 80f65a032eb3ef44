"""The benchmark's CSV rows as a picture: per case, time over torch eager's and peak memory, one bar per side.

Needs matplotlib, which nothing else of this project does. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.kernel_bench.report import Row
from bench.kernel_bench.sides import EAGER, OURS

COLOURS = {OURS: "#1b6ca8", EAGER: "#8a8f98"}
OTHER = "#c9ced6"


def missing() -> str | None:
    """What to do before a plot can be drawn, or None."""
    return None if find_spec("matplotlib") else "--plot needs matplotlib; please run: pip install matplotlib"


def draw(path: Path, title: str, table: Sequence[Row]) -> None:
    """Write the picture in the format of the path's suffix: svg or png."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "bench", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    cases = list(dict.fromkeys((row["case"], row["shape"], row["dtype"]) for row in table))
    groups = [[row for row in table if (row["case"], row["shape"], row["dtype"]) == case] for case in cases]
    heights = [len(group) + 1.6 for group in groups]
    figure, axes = pyplot.subplots(
        *(len(cases), 2), figsize=(11, 0.24 * sum(heights) + 0.8), height_ratios=heights, squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=9)
    for (left, right), case, group in zip(axes, cases, groups, strict=True):
        times = [(row, row["ratio_to_eager"], f"{_short(row['ratio_to_eager'])}  ({_short(row['ms'])} ms)") for row in group]
        _bars(left, times, f"{'  '.join(case)}\ntime / torch eager's")
        peaks = [(row, row["peak_mb"], f"{_short(row['peak_mb'])} MB") for row in group]
        _bars(right, peaks, "\npeak memory beyond the inputs")
        right.set_yticklabels([])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _short(number: str) -> str:
    return f"{float(number):.3g}" if number else "-"


def _bars(axis, entries: Sequence[tuple[Row, str, str]], title: str) -> None:
    values = [float(value or 0.0) for _, value, _ in entries]
    names = [row["implementation"] for row, _, _ in entries]
    drawn = axis.barh(names, values, color=[COLOURS.get(name, OTHER) for name in names], height=0.72)
    axis.bar_label(drawn, labels=[text for _, _, text in entries], padding=3, fontsize=8)
    axis.set_xlim(0, 1.35 * max(values, default=0.0) or 1.0)
    axis.set_title(title, fontsize=8.5, loc="left")
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=7)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
