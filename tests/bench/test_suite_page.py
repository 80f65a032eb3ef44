"""bench/README.md holds what the committed results say and nothing else between its markers; pictures show the same tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.suite import charts, page
from bench.suite.entries import BENCHMARKS, Chart
from bench.suite.record import About, Ratio, Result, Table
from bench.suite.runner import PAGE, README, RESULTS

HERE = About(
    machine="2 cores of a machine", date="2026-12-01", versions={"torch": "2"}, command="python bench/loop.py", threads=2
)
MARKERS = "".join(f"## {each.name}\n<!-- results: {each.name} -->\n<!-- end of results -->\n" for each in BENCHMARKS)


def result(name="loop", rows=None, ratios=(), columns=("part", "tokens/s", "beside it", "its tokens/s", "ratio")):
    rows = [["drmas", 1234.5, "flat | batch", 0.123456, None]] if rows is None else rows
    return Result(
        benchmark=name, about=HERE, tables=[Table(title="32 tasks", columns=list(columns), rows=rows)], ratios=list(ratios)
    )


def ratio(name="speed", value=2.0, better="higher", tolerance=0.25, target=None):
    return Ratio(name=name, value=value, better=better, tolerance=tolerance, why="other work", target=target)


def test_the_page_is_made_of_the_committed_results():
    """If this fails: python bench/all.py --render"""
    text = PAGE.read_text()
    assert page.rendered(text, page.read_results(RESULTS), "results") == text


def test_the_readme_has_the_targets_of_the_committed_results():
    """If this fails: python bench/all.py --render"""
    text = README.read_text()
    assert page.with_targets(text, page.read_results(RESULTS), "bench/README.md") == text


def test_targets_by_hand():
    kept = result(ratios=[ratio(target=3.0), ratio("other")]).model_copy(
        update={"notes": ["It made 0.9 GB/s; at least 1 is asked for: missed", "TRL is not installed"]}
    )
    made = page.with_targets("a\n<!-- targets -->\nold\n<!-- end of targets -->\nb", {"loop": kept}, "x.md")
    assert made == (
        "a\n<!-- targets -->\n\nBy `python bench/all.py`, on 2 cores of a machine ([x.md](x.md) has all of it):\n\n"
        "| benchmark | ratio, of one run | measured | target | date |\n| --- | --- | --- | --- | --- |\n"
        "| loop | speed | 2 | at least 3: missed | 2026-12-01 |\n\n"
        "- It made 0.9 GB/s; at least 1 is asked for: missed.\n\n<!-- end of targets -->\nb"
    )
    with pytest.raises(ValueError, match="no markers"):
        page.with_targets("a", {}, "x.md")


def test_every_committed_result_has_its_picture():
    for benchmark in BENCHMARKS:
        if benchmark.chart is not None and (RESULTS / f"{benchmark.name}.json").is_file():
            assert (RESULTS / f"{benchmark.name}.svg").is_file()


def test_a_section_by_hand():
    made = page.body(
        next(each for each in BENCHMARKS if each.name == "loop"),
        result(ratios=[ratio(target=3.0), ratio("memory", 0.5, "lower", 0.1, 0.8)]),
        "results",
    )
    assert made == (
        "\n`python bench/loop.py`: 2 cores of a machine, 2 threads, 2026-12-01. torch 2.\n\n"
        "32 tasks:\n\n"
        "| part | tokens/s | beside it | its tokens/s | ratio |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| drmas | 1,234 | flat \\| batch | 0.123 |  |\n\n"
        "What another run is held to (`--check`):\n\n"
        "| ratio | measured | target | another run |\n"
        "| --- | --- | --- | --- |\n"
        "| speed | 2 | at least 3: missed | at least 1.6 (25 % off: other work) |\n"
        "| memory | 0.5 | at most 0.8: reached | at most 0.55 (10 % off: other work) |\n\n"
        "![loop](results/loop.svg)\n"
    )


def test_rendering_replaces_what_stands_between_markers_and_nothing_else():
    once = page.rendered(MARKERS, {"loop": result()}, "results")
    assert "| drmas | 1,234 |" in once
    assert "Not measured yet: `python bench/all.py --only rollout`" in once
    assert page.rendered(once.replace("1,234", "9,999"), {"loop": result()}, "results") == once
    assert [line for line in once.splitlines() if line.startswith("## ")] == [f"## {each.name}" for each in BENCHMARKS]


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        (MARKERS.replace("results: loop ", "results: lop "), "loop|lop"),
        (MARKERS + "<!-- results: loop -->\n<!-- end of results -->\n", "loop"),
        ("", "end_to_end"),
    ],
)
def test_a_page_without_a_place_for_each_benchmark_is_refused(text, odd):
    with pytest.raises(ValueError, match=f"look at '({odd})'"):
        page.rendered(text, {}, "results")


def test_hidden_columns_stay_out_of_the_page():
    table = Table(title="t", columns=["a", "b", "c"], rows=[[1, 2, 3]])
    assert page.without(table, ("b",)) == Table(title="t", columns=["a", "c"], rows=[[1, 3]])


def test_a_result_of_another_benchmark_is_refused(tmp_path):
    result("rollout").write(tmp_path / "loop.json")
    with pytest.raises(ValueError, match="is of the benchmark 'rollout'; expected 'loop'"):
        page.read_results(tmp_path)


@pytest.mark.parametrize(("suffix", "split", "rows"), [("svg", None, 2), ("png", "case", 3), ("svg", "case", 0)])
def test_a_picture_of_a_table(tmp_path, suffix, split, rows):
    cells = [[f"case {i // 2}", "drmas" if i % 2 else "TRL", 10.0 * i, None] for i in range(rows)]
    made = result(rows=cells, columns=("case", "side", "tokens/s", "peak GiB"))
    charts.draw(tmp_path / f"a.{suffix}", made, Chart(0, "side", ("tokens/s", "peak GiB"), split=split))
    picture = (tmp_path / f"a.{suffix}").read_bytes()
    assert len(picture) > 1000
    if suffix == "svg" and rows:
        assert all(word in picture.decode() for word in ("drmas", "TRL", "tokens/s", "peak GiB", "2 cores of a machine"))


def test_a_chart_of_a_column_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the chart of loop shows 'tokens'; its table has part, tokens/s"):
        charts.draw(tmp_path / "a.svg", result(), Chart(0, "part", ("tokens",)))


def test_the_scripts_of_all_benchmarks_are_there():
    for benchmark in BENCHMARKS:
        assert (Path(PAGE).parent / benchmark.script).is_file()
