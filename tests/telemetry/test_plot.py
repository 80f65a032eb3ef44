"""Charts: values land where the axis says, gaps are gaps, and text is escaped."""

import math
import re
from xml.etree import ElementTree

import pytest

from drmas.telemetry.plot import (
    Points,
    Series,
    Span,
    band,
    interval_chart,
    line_chart,
    number,
    scatter_chart,
    stacked_chart,
    ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def elements(svg: str, tag: str, name: str) -> list[ElementTree.Element]:
    return [item for item in parsed(svg).iter(SVG + tag) if name in item.get("class", "").split()]


def axis(svg: str, name: str) -> dict[float, float]:
    """Tick value -> viewBox coordinate along y (text-anchor end) or x (middle)."""
    anchor = {"y": "end", "x": "middle"}[name]
    ticks_ = [item for item in elements(svg, "text", "tick") if item.get("text-anchor") == anchor]
    return {float(item.text): float(item.get(name)) - (4 if name == "y" else 0) for item in ticks_}


def read_off(axis_: dict[float, float], coordinate: float) -> float:
    (low, low_at), *_, (high, high_at) = sorted(axis_.items())
    return low + (coordinate - low_at) / (high_at - low_at) * (high - low)


def test_points_lie_where_the_axes_say():
    x, y = [1, 2, 3, 4], [0.1, 0.9, 0.4, 0.65]
    svg = line_chart([Series("solver", x, y)], title="Reward", y_label="mean reward")
    dots = elements(svg, "circle", "dot")
    assert [read_off(axis(svg, "y"), float(dot.get("cy"))) for dot in dots] == pytest.approx(y, abs=5e-3)
    assert [read_off(axis(svg, "x"), float(dot.get("cx"))) for dot in dots] == pytest.approx(x, abs=5e-3)
    points = elements(svg, "polyline", "line")[0].get("points").split()
    assert points == [f"{dot.get('cx')},{dot.get('cy')}" for dot in dots]


def test_a_missing_value_is_a_gap_and_a_lone_value_keeps_its_dot():
    y = [1.0, 2.0, None, 3.0, float("nan"), 4.0, 5.0]
    svg = line_chart([Series("a", range(7), y)], title="t", y_label="y")
    assert [len(line.get("points").split()) for line in elements(svg, "polyline", "line")] == [2, 2]
    assert len(elements(svg, "circle", "dot")) == 5


def test_long_runs_have_no_visible_dots_but_lone_values_do():
    y = [float(i) for i in range(100)] + [None, 3.0, None]
    svg = line_chart([Series("a", range(103), y)], title="t", y_label="y")
    hidden = elements(svg, "circle", "hidden")
    assert (len(hidden), len(elements(svg, "circle", "dot"))) == (100, 101)


@pytest.mark.parametrize("y", [[], [None, None], [0.5], [2.0, 2.0], [0.0, 0.0], [-1.0, -3.0], [1e-9, 3e-9], [1e12, 2e12]])
def test_any_values_give_a_chart(y):
    svg = line_chart([Series("a", range(len(y)), y)], title="t", y_label="y")
    shown = [value for value in y if value is not None]
    assert len(elements(svg, "circle", "dot")) == len(shown)
    assert ("no values" in svg) == (not shown)
    assert "nan" not in svg
    for dot in elements(svg, "circle", "dot"):
        assert 0 <= float(dot.get("cy")) <= 260


def test_the_reference_line_lies_at_its_value():
    svg = line_chart([Series("a", [1, 2], [2.0, 4.0])], title="t", y_label="y", reference=1.0)
    line = elements(svg, "line", "reference")[0]
    assert read_off(axis(svg, "y"), float(line.get("y1"))) == pytest.approx(1.0, abs=0.02)


def test_several_seeds_are_a_mean_and_a_band_from_minimum_to_maximum():
    series = band("reward", [[0.0, 1.0, None], [0.5, 2.0, None], [1.0, None, None]], [1, 2, 3])
    assert (series.y, series.low, series.high) == ([0.5, 1.5, None], [0.0, 1.0, None], [1.0, 2.0, None])
    svg = line_chart([series], title="t", y_label="y")
    corners = [float(point.split(",")[1]) for point in elements(svg, "polygon", "band")[0].get("points").split()]
    assert [read_off(axis(svg, "y"), y) for y in corners] == pytest.approx([1.0, 2.0, 1.0, 0.0], abs=0.02)


def test_bars_stack_to_the_sum():
    svg = stacked_chart(
        [Series("rollout", [1, 2], [3.0, 1.0]), Series("train", [1, 2], [2.0, None])], title="t", y_label="seconds"
    )
    bars = [bar for bar in elements(svg, "rect", "bar") if bar.find(f"{SVG}title") is not None]
    scale = axis(svg, "y")
    tops = [read_off(scale, float(bar.get("y"))) for bar in bars]
    bottoms = [read_off(scale, float(bar.get("y")) + float(bar.get("height"))) for bar in bars]
    assert tops == pytest.approx([3.0, 5.0, 1.0], abs=0.05)
    assert bottoms == pytest.approx([0.0, 3.0, 0.0], abs=0.05)


def test_names_are_text():
    svg = line_chart([Series("<script>x</script>", [1], [1.0])], title='a & "b" <c>', y_label="<y>")
    assert "<script" not in svg
    assert parsed(svg).get("aria-label") == 'a & "b" <c>'


def test_a_long_legend_wraps_instead_of_leaving_the_picture():
    svg = line_chart([Series(f"a rather long agent name {i}", [1], [1.0]) for i in range(9)], title="t", y_label="y")
    assert max(float(item.get("x")) for item in elements(svg, "text", "legend")) < 460 - 180
    rows = {float(item.get("y")) for item in elements(svg, "text", "legend")}
    assert len(rows) >= 5


def test_a_standalone_chart_brings_its_colours():
    svg = line_chart([Series("a", [1], [1.0])], title="t", y_label="y", standalone=True)
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"(href|src)=", svg)
    parsed(svg)


def test_ticks_are_round_and_cover_the_range():
    assert ticks(0.03, 0.97, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(1, 12, 6, whole=True) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert ticks(1, 2, 6, whole=True) == [1.0, 2.0]


def test_numbers_for_people():
    assert [number(v) for v in (0, 0.12345, 1234.5, 3.2e-6, -2.5e9, 12)] == [
        "0",
        "0.1235",
        "1,234",
        "3.20e-06",
        "-2.50e+09",
        "12",
    ]


def centres(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"M([-\d.]+) ([-\d.]+)", path.get("d"))]


def test_colours_and_what_the_axis_holds_can_be_given():
    series = [Series("a", [1, 2], [0.1, 0.2], colour=5), Series("b", [1, 2], [0.2, 0.3])]
    svg = line_chart(series, title="t", y_label="y", cover=[0.9, None])
    assert [item.get("class") for item in elements(svg, "polyline", "line")] == ["line s5", "line s1"]
    assert [item.get("class") for item in elements(svg, "rect", "bar")] == ["bar s5", "bar s1"]
    assert max(axis(svg, "y")) == 1.0
    dots = elements(svg, "circle", "dot")
    assert [read_off(axis(svg, "y"), float(dot.get("cy"))) for dot in dots] == pytest.approx([0.1, 0.2, 0.2, 0.3], abs=5e-3)


def logarithmic(ticks_: dict[float, float]) -> dict[float, float]:
    return {math.log10(value): place for value, place in ticks_.items()}


def test_scattered_points_lie_where_the_logarithmic_axes_say():
    x, y = [0.6, 1.0, 4.0, 2.0, None, 3.0], [0.5, 3.0, 8.0, 0.0, 1.0, None]
    svg = scatter_chart([Points("pooled", x, y)], title="t", x_label="x", y_label="y", reference=1.0)
    found = centres(elements(svg, "path", "points")[0])
    xs, ys = logarithmic(axis(svg, "x")), logarithmic(axis(svg, "y"))
    assert [10 ** read_off(xs, place) for place, _ in found] == pytest.approx([0.6, 1.0, 4.0], rel=0.01)
    assert [10 ** read_off(ys, place) for _, place in found] == pytest.approx([0.5, 3.0, 8.0], rel=0.01)
    diagonal, level = (re.findall(r"([-\d.]+) ([-\d.]+)", line.get("d")) for line in elements(svg, "path", "reference"))
    for left, top in diagonal:
        assert read_off(xs, float(left)) == pytest.approx(read_off(ys, float(top)), abs=5e-3)
    assert [10 ** read_off(ys, float(top)) for _, top in level] == pytest.approx([1.0, 1.0], rel=0.01)


def test_crosses_and_large_dots_have_the_same_centres_as_points():
    x, y = [1.0, 2.0], [2.0, 3.0]
    clouds = [Points("a", x, y), Points("", x, y, colour=0, cross=True), Points("mean", x, y, colour=3, large=True)]
    svg = scatter_chart(clouds, title="t", x_label="x", y_label="y")
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in elements(svg, "circle", "large")]
    assert centres(elements(svg, "path", "points")[0]) == dots
    crosses = [(left + 2.5, top + 2.5) for left, top in centres(elements(svg, "path", "crosses")[0])]
    assert crosses == [(pytest.approx(left, abs=0.11), pytest.approx(top, abs=0.11)) for left, top in dots]
    assert [item.text for item in elements(svg, "text", "legend")] == ["a", "mean"]
    assert [dot.find(f"{SVG}title").text for dot in elements(svg, "circle", "large")] == ["mean: 1, 2", "mean: 2, 3"]


@pytest.mark.parametrize("y", [[], [0.0], [1.0], [0.99], [1e-3, 1e3]])
def test_any_points_give_a_scatter_chart(y):
    svg = scatter_chart([Points("a", [1.0] * len(y), y)], title="t", x_label="x", y_label="y")
    assert ("no values" in svg) == (not any(y))
    assert "nan" not in svg
    assert len(axis(svg, "y")) >= 2


def test_intervals_lie_where_the_axis_says_in_the_order_of_their_rows():
    spans = [Span("rloo", 0.05, -0.1, 0.2), Span("a long name of a method", -0.3, None, None), Span("dr-mas", 0.4, 0.3, 0.5)]
    svg = interval_chart(spans, title="t", x_label="difference", reference=0.0)
    scale = axis(svg, "x")
    dots = elements(svg, "circle", "dot")
    assert [read_off(scale, float(dot.get("cx"))) for dot in dots] == pytest.approx([0.05, -0.3, 0.4], abs=5e-3)
    heights = [float(dot.get("cy")) for dot in dots]
    assert heights == sorted(heights)
    whiskers = [re.match(r"M([-\d.]+) [-\d.]+H([-\d.]+)", line.get("d")).groups() for line in elements(svg, "path", "line")]
    ends = [read_off(scale, float(end)) for pair in whiskers for end in pair]
    assert ends == pytest.approx([-0.1, 0.2, 0.3, 0.5], abs=5e-3)
    assert read_off(scale, float(elements(svg, "line", "reference")[0].get("x1"))) == pytest.approx(0.0, abs=5e-3)
    names = [item.text for item in elements(svg, "text", "tick") if item.get("text-anchor") == "end"]
    assert names == [span.name for span in spans]
    assert dots[0].find(f"{SVG}title").text == "rloo: 0.05 [-0.1, 0.2]"


def test_each_value_of_a_span_is_a_dot():
    svg = interval_chart([Span("a", 0.5, 0.25, 0.75, each=[0.0, None, 1.0])], title="t", x_label="x", reference=0.5)
    (path,) = re.findall('class="points s0" d="(.*?)"', svg)
    first, second = (float(x) for x in re.findall(r"M(\S+) ", path))
    middle = float(re.search('<circle class="dot s0" cx="(.*?)"', svg).group(1))
    assert middle == pytest.approx((first + second) / 2, abs=0.1)


def test_points_outside_the_range_are_counted_and_intervals_are_cut():
    cloud = Points("a", [1.0, 1.0, 2.0, 3.0], [1.0, 50.0, 0.0, None], large=True, low=[-1.0, 1, 1, 1], high=[2.0, 60, 1, 1])
    faint = Points("", [1.0, 5.0], [0.5, 2.0], faint=True)
    svg = scatter_chart([faint, cloud], title="t", x_label="x", y_label="y", y_range=(0.1, 10.0))
    assert "2 points outside" in svg
    assert svg.count("<circle") == 1
    assert len(re.findall(r'class="line s1" d="M\S+ \S+V\S+"', svg)) == 1
    assert 'class="points s0" style="opacity:.16"' in svg


def test_no_intervals_are_a_chart_without_values():
    assert "no values" in interval_chart([], title="t", x_label="x", reference=0.0)
    svg = interval_chart([Span("a", 0.0, 0.0, 0.0)], title="t", x_label="x", reference=0.0)
    assert len(elements(svg, "circle", "dot")) == 1
