"""Line, stacked-bar, scatter and interval charts as SVG text, for reports and for plots in documents. No dependency, no script.

A chart is drawn in a viewBox of 460 x 260 with text that stays readable at phone width. Colours come from CSS variables
(`report.css`), light and dark; `standalone` charts carry that part of the style sheet with them. A missing value is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, BOTTOM = 66, 12, 42
COLOURS = 8
CHARACTER_WIDTH = 7.4
"""Mean width of a character of the legend, in viewBox units: text can't be measured without a renderer."""
MARKED_POINTS = 40
"""Up to so many points each gets a visible dot; above, dots would hide the line."""


@dataclass(frozen=True)
class Series:
    """One line. `low` and `high` draw a band around it (several seeds: minimum and maximum). `colour`: 0 to 7, else its place.

    Example: Series("solver", x=[1, 2, 3], y=[0.1, None, 0.3])
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = field(default=())
    high: Sequence[float | None] = field(default=())
    colour: int | None = None


@dataclass(frozen=True)
class Points:
    """A cloud: small dots, crosses, or `large` ones of either that say their values (means of a cloud). `colour`: see `Series`.

    `low` and `high`, of a large cloud, draw an interval at each point. `faint`: a background for what is drawn after it.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int | None = None
    cross: bool = False
    large: bool = False
    low: Sequence[float | None] = field(default=())
    high: Sequence[float | None] = field(default=())
    faint: bool = False


@dataclass(frozen=True)
class Span:
    """A value with its interval, which may be unknown, and `each` of the values that it is the mean of."""

    name: str
    value: float
    low: float | None
    high: float | None
    each: Sequence[float | None] = field(default=())


def band(name: str, runs: Sequence[Sequence[float | None]], x: Sequence[float]) -> Series:
    """The mean of several runs with the band from their minimum to their maximum; a step that a run lacks is left out of it."""
    columns = [[run[i] for run in runs if i < len(run) and run[i] is not None] for i in range(len(x))]
    mean = [math.fsum(column) / len(column) if column else None for column in columns]
    low, high = [min(column, default=None) for column in columns], [max(column, default=None) for column in columns]
    return Series(name, x, mean, low, high)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    y_label: str,
    x_label: str = "step",
    reference: float | None = None,
    marks: Sequence[float] = (),
    cover: Sequence[float] = (),
    standalone: bool = False,
) -> str:
    """An SVG line chart; `reference` draws a dashed horizontal line (1 for an inflation factor), `marks` vertical ones.

    The y axis holds the values of `cover`, too: charts that cover the same can be compared.
    """
    values = [value for one in series for part in (one.y, one.low, one.high) for value in part if _shown(value)]
    if reference is not None and values:
        values.append(reference)
    if values:
        values += [value for value in cover if _shown(value)]
    frame = _Frame.fit([x for one in series for x in one.x], values, legend_rows=_legend_rows([one.name for one in series]))
    body = [frame.axes(x_label, y_label)]
    if reference is not None and values:
        y = frame.y(reference)
        body.append(f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    bottom = HEIGHT - BOTTOM
    body += [f'<path class="mark" d="M{frame.x(mark):.1f} {frame.top:.1f}V{bottom}"/>' for mark in marks]
    colours = _colours(series)
    for colour, one in zip(colours, series, strict=True):
        body.append(_band(frame, one, colour))
        body.append(_line(frame, one, colour))
    return _svg(title, [one.name for one in series], body, standalone, empty=not values, colours=colours)


def scatter_chart(
    clouds: Sequence[Points],
    *,
    title: str,
    x_label: str,
    y_label: str,
    reference: float | None = None,
    y_range: tuple[float, float] | None = None,
    standalone: bool = False,
) -> str:
    """An SVG scatter chart with both axes logarithmic and the diagonal y = x dashed; `reference` is a dashed horizontal line.

    A point with a value that is missing, or not above 0, isn't drawn. A cloud without a name isn't in the legend. With
    `y_range` neither are points outside it, and the chart says how many there are that aren't drawn.
    """
    bottom, top = y_range or (0.0, math.inf)
    there = [[i for i, pair in enumerate(zip(one.x, one.y, strict=True)) if all(map(_shown, pair))] for one in clouds]
    kept = [
        [i for i in places if one.x[i] > 0 and one.y[i] > 0 and bottom <= one.y[i] <= top]
        for one, places in zip(clouds, there, strict=True)
    ]
    outside = sum(map(len, there)) - sum(map(len, kept))
    drawn = [[(one.x[i], one.y[i]) for i in places] for one, places in zip(clouds, kept, strict=True)]
    xs, ys = ([pair[axis] for pairs in drawn for pair in pairs] for axis in (0, 1))
    colours = _colours(clouds)
    legend = [(one.name, colour) for one, colour in zip(clouds, colours, strict=True) if one.name]
    frame = _Frame.logarithmic(xs, ys, _legend_rows([name for name, _ in legend]))
    body = [frame.axes(x_label, y_label)]
    low, high = max(frame.x_min, frame.y_min), min(frame.x_max, frame.y_max)
    lines = [(low, low, high, high)] if low < high else []
    if reference is not None and frame.y_min <= (level := math.log10(reference)) <= frame.y_max:
        lines.append((frame.x_min, level, frame.x_max, level))
    for x1, y1, x2, y2 in lines:
        ends = [f"{frame.x(10**x):.1f} {frame.y(10**y):.1f}" for x, y in ((x1, y1), (x2, y2))]
        body.append(f'<path class="reference" d="M{ends[0]}L{ends[1]}"/>')
    for one, places, pairs, colour in zip(clouds, kept, drawn, colours, strict=True):
        body += [_intervals(frame, one, places, colour), _cloud(frame, one, pairs, colour)]
    if y_range and outside:
        place = f'x="{WIDTH - RIGHT}" y="18" text-anchor="end"'
        body.append(f'<text class="label" {place}>{outside} points outside</text>')
    return _svg(title, [name for name, _ in legend], body, standalone, empty=not xs, colours=[colour for _, colour in legend])


def interval_chart(
    spans: Sequence[Span], *, title: str, x_label: str, reference: float | None = None, standalone: bool = False
) -> str:
    """An SVG chart of one row per span, from the top: a dot with its interval; `reference` is a dashed vertical line."""
    edges = [value for one in spans for value in (one.value, one.low, one.high, *one.each) if _shown(value)]
    frame = _Frame.spans([*edges, reference] if edges and reference is not None else edges, [one.name for one in spans])
    bottom = HEIGHT - BOTTOM
    body = []
    for tick in frame.x_ticks:
        x = frame.x(tick)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top}" y2="{bottom}"/>')
        body.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_tick(tick)}</text>')
    middle = (frame.left + WIDTH - RIGHT) / 2
    body.append(f'<text class="label" x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    if reference is not None and edges:
        x = frame.x(reference)
        body.append(f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top}" y2="{bottom}"/>')
    for row, one in enumerate(spans):
        y = frame.y(row + 0.5)
        body.append(
            f'<text class="tick" x="{frame.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(_short(one.name))}</text>'
        )
        if not _shown(one.value):
            continue
        label = f"{one.name}: {number(one.value)}"
        dots = "".join(f"M{frame.x(value):.1f} {y + 6:.1f}h0" for value in one.each if _shown(value))
        if dots:
            body.append(f'<path class="points s0" d="{dots}"/>')
        if _shown(one.low) and _shown(one.high):
            label += f" [{number(one.low)}, {number(one.high)}]"
            body.append(f'<path class="line s0" d="M{frame.x(one.low):.1f} {y:.1f}H{frame.x(one.high):.1f}"/>')
        place = f'cx="{frame.x(one.value):.1f}" cy="{y:.1f}"'
        body.append(f'<circle class="dot s0" {place} r="4.5"><title>{escape(label)}</title></circle>')
    return _svg(title, [], body, standalone, empty=not edges)


def stacked_chart(series: Sequence[Series], *, title: str, y_label: str, x_label: str = "step") -> str:
    """An SVG chart of stacked bars, one bar per x; missing values add nothing to their bar."""
    positions = sorted({x for one in series for x in one.x})
    table = [dict(zip(one.x, one.y, strict=True)) for one in series]
    heights = [math.fsum(column.get(x) or 0.0 for column in table) for x in positions]
    edges = [positions[0] - 0.5, positions[-1] + 0.5] if positions else []
    rows = _legend_rows([one.name for one in series])
    frame = _Frame.fit(edges, [0.0, *heights] if any(heights) else [], legend_rows=rows)
    body = [frame.axes(x_label, y_label)]
    half = 0.4 if len(positions) <= MARKED_POINTS else 0.5
    for x in positions:
        base = 0.0
        for index, column in enumerate(table):
            value = column.get(x)
            if not _shown(value) or value <= 0:
                continue
            left, right = frame.x(x - half), frame.x(x + half)
            top, bottom = frame.y(base + value), frame.y(base)
            base += value
            label = f"{x_label} {x:g}: {series[index].name} {number(value)}"
            body.append(
                f'<rect class="bar s{index % COLOURS}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                f'height="{bottom - top:.1f}"><title>{escape(label)}</title></rect>'
            )
    return _svg(title, [one.name for one in series], body, standalone=False, empty=not any(heights))


def number(value: float) -> str:
    """A number for people: four significant digits, no exponent between 1e-3 and 1e6."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        text = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        return text
    return f"{value:.2e}"


@dataclass(frozen=True)
class _Frame:
    """Data coordinates to viewBox coordinates, and the ticks."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float
    top: float
    x_ticks: list[float]
    y_ticks: list[float]
    log: bool = False
    """The bounds are decimal logarithms; ticks and the arguments of `x` and `y` are values still."""
    left: float = LEFT

    @classmethod
    def logarithmic(cls, xs: Sequence[float], ys: Sequence[float], legend_rows: int) -> _Frame:
        """Axes that cover at least a factor of 5, so that they have two ticks."""
        bounds = []
        for values in (xs or [1.0], ys or [1.0]):
            low, high = math.log10(min(values)), math.log10(max(values))
            spare = max(0.03, (math.log10(5) - (high - low)) / 2)
            bounds += [low - spare, high + spare]
        x_min, x_max, y_min, y_max = bounds
        top = 34.0 + 16.0 * legend_rows
        return cls(x_min, x_max, y_min, y_max, top, _log_ticks(x_min, x_max), _log_ticks(y_min, y_max), log=True)

    @classmethod
    def spans(cls, xs: Sequence[float], names: Sequence[str]) -> _Frame:
        """Rows from the top, 0 to 1 the first, and room for their names on the left."""
        low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
        spread = (high - low) * 0.03 or abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
        shown = [tick for tick in ticks(low, high, 4) if low <= tick <= high]
        left = min(WIDTH / 2, 20 + CHARACTER_WIDTH * max((len(_short(name)) for name in names), default=0))
        return cls(low, high, float(max(1, len(names))), 0.0, 34.0, shown, [], left=left)

    @classmethod
    def fit(cls, xs: Sequence[float], ys: Sequence[float], legend_rows: int) -> _Frame:
        x_low, x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
        if x_low == x_high:
            x_low, x_high = x_low - 0.5, x_high + 0.5
        y_low, y_high = (min(ys), max(ys)) if ys else (0.0, 1.0)
        if y_low == y_high:
            spread = abs(y_low) * 0.1 or 1.0
            y_low, y_high = y_low - spread, y_high + spread
        if 0 < y_low < 0.4 * y_high:
            y_low = 0.0
        y_ticks = ticks(y_low, y_high, 5)
        return cls(
            x_min=x_low,
            x_max=x_high,
            y_min=min(y_low, y_ticks[0]),
            y_max=max(y_high, y_ticks[-1]),
            top=34.0 + 16.0 * legend_rows,
            x_ticks=[tick for tick in ticks(x_low, x_high, 6, whole=True) if x_low <= tick <= x_high],
            y_ticks=y_ticks,
        )

    def x(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.left + (value - self.x_min) / (self.x_max - self.x_min) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (value - self.y_min) / (self.y_max - self.y_min) * (HEIGHT - BOTTOM - self.top)

    def axes(self, x_label: str, y_label: str) -> str:
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
        for tick in self.x_ticks:
            place = f'x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}"'
            parts.append(f'<text class="tick" {place} text-anchor="middle">{_tick(tick)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
        centre = (self.top + HEIGHT - BOTTOM) / 2
        turn = f'transform="rotate(-90 11 {centre:.1f})" x="11" y="{centre:.1f}"'
        parts.append(f'<text class="label" {turn} text-anchor="middle">{escape(y_label)}</text>')
        return "".join(parts)


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) that cover low..high.

    Example: ticks(0.03, 0.97, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(step * power for step in (1, 2, 5, 10) if step * power >= raw * (1 - 1e-9))
    if whole:
        distance = max(1.0, distance)
    first, last = math.floor(low / distance + 1e-9), math.ceil(high / distance - 1e-9)
    return [float(f"{index * distance:.12g}") for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Values between 10^low and 10^high: 1, 2 and 5 times powers of ten, or up to 7 powers alone where those are many."""
    steps = (1,) if high - low > 2.5 else (1, 2, 5)
    powers = range(math.floor(low), math.ceil(high) + 1, max(1, math.ceil((high - low) / 7)))
    values = [float(f"{step}e{power}") for power in powers for step in steps]
    return [value for value in values if low <= math.log10(value) <= high]


def _colours(drawn: Sequence[Series] | Sequence[Points]) -> list[int]:
    return [index % COLOURS if one.colour is None else one.colour for index, one in enumerate(drawn)]


def _cloud(frame: _Frame, one: Points, pairs: Sequence[tuple[float, float]], colour: int) -> str:
    """One path for all small points, so that thousands of them stay a small file."""
    places = [(frame.x(x), frame.y(y)) for x, y in pairs]
    if one.large:
        labels = [f"{one.name}: {number(x)}, {number(y)}" for x, y in pairs]
        if one.cross:
            return "".join(
                f'<path class="line s{colour}" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8"><title>{escape(label)}</title></path>'
                for (x, y), label in zip(places, labels, strict=True)
            )
        return "".join(
            f'<circle class="dot large s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(label)}</title></circle>'
            for (x, y), label in zip(places, labels, strict=True)
        )
    if one.cross:
        path = "".join(f"M{x - 2.5:.1f} {y - 2.5:.1f}l5 5m0-5l-5 5" for x, y in places)
    else:
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    kind = "crosses" if one.cross else "points"
    faint = ' style="opacity:.16"' if one.faint else ""
    return f'<path class="{kind} s{colour}"{faint} d="{path}"/>' if path else ""


def _intervals(frame: _Frame, one: Points, kept: Sequence[int], colour: int) -> str:
    """A bar per point that has an interval, cut at the frame."""
    if not one.low:
        return ""
    bars = []
    for i in kept:
        if _shown(one.low[i]) and _shown(one.high[i]):
            ends = [math.log10(value) if value > 0 else frame.y_min for value in (one.low[i], one.high[i])]
            low, high = (frame.y(10 ** min(max(end, frame.y_min), frame.y_max)) for end in ends)
            bars.append(f"M{frame.x(one.x[i]):.1f} {low:.1f}V{high:.1f}")
    return f'<path class="line s{colour}" d="{"".join(bars)}"/>' if bars else ""


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        power = min(int(math.log10(abs(value)) // 3), 4)
        return f"{value / 1000**power:g}{('', 'k', 'M', 'G', 'T')[power]}"
    if abs(value) < 1e-3:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:g}"


def _shown(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _runs(one: Series, needed: Sequence[Sequence[float | None]]) -> list[list[int]]:
    """Stretches of consecutive points at which all of `needed` have a value."""
    runs: list[list[int]] = [[]]
    for index in range(len(one.x)):
        if all(_shown(column[index]) for column in needed):
            runs[-1].append(index)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _line(frame: _Frame, one: Series, place: int) -> str:
    colour = f"s{place}"
    parts = []
    runs = _runs(one, [one.y])
    for run in runs:
        points = " ".join(f"{frame.x(one.x[i]):.1f},{frame.y(one.y[i]):.1f}" for i in run)
        if len(run) > 1:
            parts.append(f'<polyline class="line {colour}" points="{points}"/>')
    dotted = sum(map(len, runs)) <= MARKED_POINTS
    for run in runs:
        for i in run:
            lone = len(run) == 1
            visible = "dot" if dotted or lone else "dot hidden"
            label = f"{one.name}, {one.x[i]:g}: {number(one.y[i])}"
            place = f'cx="{frame.x(one.x[i]):.1f}" cy="{frame.y(one.y[i]):.1f}"'
            parts.append(
                f'<circle class="{visible} {colour}" {place} r="{3.4 if lone else 2.4}"><title>{escape(label)}</title></circle>'
            )
    return "".join(parts)


def _band(frame: _Frame, one: Series, colour: int) -> str:
    if not one.low:
        return ""
    parts = []
    for run in _runs(one, [one.low, one.high]):
        there = [f"{frame.x(one.x[i]):.1f},{frame.y(one.high[i]):.1f}" for i in run]
        back = [f"{frame.x(one.x[i]):.1f},{frame.y(one.low[i]):.1f}" for i in reversed(run)]
        parts.append(f'<polygon class="band s{colour}" points="{" ".join(there + back)}"/>')
    return "".join(parts)


def _legend_places(names: Sequence[str]) -> list[tuple[int, float]]:
    """(row, x) of each name; a name that doesn't fit starts a new row."""
    places, row, x = [], 0, float(LEFT)
    for name in names:
        width = 26 + CHARACTER_WIDTH * len(_short(name))
        if x > LEFT and x + width > WIDTH - RIGHT:
            row, x = row + 1, float(LEFT)
        places.append((row, x))
        x += width
    return places


def _legend_rows(names: Sequence[str]) -> int:
    return _legend_places(names)[-1][0] + 1 if names else 0


def _short(name: str) -> str:
    return name if len(name) <= 40 else name[:39] + "…"


def _legend(names: Sequence[str], colours: Sequence[int]) -> str:
    parts = []
    for name, colour, (row, x) in zip(names, colours, _legend_places(names), strict=True):
        y = 36 + 16 * row
        parts.append(f'<rect class="bar s{colour}" x="{x:.1f}" y="{y - 8}" width="10" height="10" rx="2"/>')
        parts.append(f'<text class="legend" x="{x + 14:.1f}" y="{y + 1}">{escape(_short(name))}</text>')
    return "".join(parts)


def _svg(
    title: str, names: Sequence[str], body: list[str], standalone: bool, empty: bool, colours: Sequence[int] | None = None
) -> str:
    note = f'<text class="label" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no values</text>' if empty else ""
    style = ""
    if standalone:
        sheet = (resources.files("drmas.telemetry") / "chart.css").read_text(encoding="utf-8")
        style = f'<style>{sheet}</style><rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    heading = f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>'
    legend = _legend(names, [index % COLOURS for index in range(len(names))] if colours is None else colours)
    return f'{head} aria-label="{escape(title)}">{style}{heading}{legend}{"".join(body)}{note}</svg>'
