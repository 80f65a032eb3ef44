"""Charts: values land where the axis says, gaps are gaps, and text is escaped."""

import re
from xml.etree import ElementTree

import pytest

from drmas.telemetry.plot import Series, band, line_chart, number, stacked_chart, ticks

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
