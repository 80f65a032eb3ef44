"""bench/README.md's tables, made from result files: between markers, so that nobody writes a measured number by hand.

    <!-- results: NAME -->  ...  <!-- end of results -->

Called by the runner, and by the test that holds the page to the committed results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.suite.entries import BENCHMARKS, Benchmark
from bench.suite.record import Cell, Ratio, Result, Table, plain

END = "<!-- end of results -->"
TARGETS = re.compile(r"<!-- targets -->\n.*?<!-- end of targets -->", re.DOTALL)
ASKED = "is asked for"
"""In a note that holds an absolute number to a target."""
SECTION = re.compile(r"<!-- results: (?P<name>\w+) -->\n(?P<body>.*?)" + re.escape(END), re.DOTALL)


def rendered(page: str, results: Mapping[str, Result], folder: str) -> str:
    """The page with what stands between its markers made anew; `folder` is that of the charts, as the page links to it.

    ValueError: the page has no place for a benchmark, two, or one for a benchmark that isn't known.
    """
    known = {each.name: each for each in BENCHMARKS}
    places = [match["name"] for match in SECTION.finditer(page)]
    if sorted(places) != sorted(known):
        odd = sorted(set(places) ^ set(known)) or [name for name in known if places.count(name) > 1]
        raise ValueError(f"the page's markers should name every benchmark once; look at {odd[0]!r}")

    def section(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- results: {name} -->\n{body(known[name], results.get(name), folder)}\n{END}"

    return SECTION.sub(section, page)


def with_targets(readme: str, results: Mapping[str, Result], link: str) -> str:
    """The README with what is asked of the benchmarks, beside what they measured, between its markers; `link` leads to the page
    that has the rest. ValueError: it has no such markers."""
    if not TARGETS.search(readme):
        raise ValueError("the README has no markers for the targets")
    rows = [
        [benchmark.name, ratio.name, f"{ratio.value:.3g}", _verdict(ratio), results[benchmark.name].about.date]
        for benchmark in BENCHMARKS
        if benchmark.name in results
        for ratio in results[benchmark.name].ratios
        if ratio.target is not None
    ]
    machines = dict.fromkeys(result.about.machine for result in results.values())
    parts = [f"By `python bench/all.py`, on {' and '.join(machines)} ([{link}]({link}) has all of it):"]
    parts.append(markdown(Table(title="", columns=["benchmark", "ratio, of one run", "measured", "target", "date"], rows=rows)))
    notes = [note for benchmark in BENCHMARKS if benchmark.name in results for note in results[benchmark.name].notes]
    parts += ["\n".join(f"- {note}." for note in notes if ASKED in note)]
    made = "\n\n".join(part for part in parts if part)
    return TARGETS.sub(lambda _: f"<!-- targets -->\n\n{made}\n\n<!-- end of targets -->", readme)


def body(benchmark: Benchmark, result: Result | None, folder: str) -> str:
    """What stands between a benchmark's markers."""
    if result is None:
        return f"\nNot measured yet: `python bench/all.py --only {benchmark.name}`.\n"
    here = result.about
    versions = ", ".join(f"{name} {version}" for name, version in here.versions.items())
    tree = f", at {here.commit}" if here.commit else ""
    parts = [f"`{here.command}`{tree}: {here.machine}, {_threads(here.threads)}, {here.date}. {versions}."]
    for number, table in enumerate(result.tables):
        parts.append(f"{table.title}:")
        parts.append(markdown(without(table, benchmark.hidden.get(number, ()))))
    if result.ratios:
        parts.append("What another run is held to (`--check`):")
        parts.append(ratio_table(result.ratios))
    parts += [f"{note}." for note in result.notes]
    if benchmark.chart is not None:
        parts.append(f"![{benchmark.name}]({folder}/{benchmark.name}.svg)")
    return "\n" + "\n\n".join(parts) + "\n"


def without(table: Table, hidden: Sequence[str]) -> Table:
    kept = [number for number, column in enumerate(table.columns) if column not in hidden]
    rows = [[row[number] for number in kept] for row in table.rows]
    return Table(title=table.title, columns=[table.columns[number] for number in kept], rows=rows)


def markdown(table: Table) -> str:
    lines = [_row(table.columns), _row(["---"] * len(table.columns))]
    return "\n".join(lines + [_row([_cell(cell) for cell in row]) for row in table.rows])


def ratio_table(ratios: Sequence[Ratio]) -> str:
    rows: list[list[Cell]] = []
    for ratio in ratios:
        sign = "at least" if ratio.better == "higher" else "at most"
        held = f"{sign} {ratio.limit():.3g} ({100 * ratio.tolerance:.0f} % off: {ratio.why})"
        rows.append([ratio.name, f"{ratio.value:.3g}", _verdict(ratio), held])
    return markdown(Table(title="", columns=["ratio", "measured", "target", "another run"], rows=rows))


def _verdict(ratio: Ratio) -> str:
    sign = "at least" if ratio.better == "higher" else "at most"
    return "" if ratio.target is None else f"{sign} {ratio.target:g}: {'missed' if ratio.missed else 'reached'}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return plain(cell).replace("|", "\\|")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def read_results(folder: Path) -> dict[str, Result]:
    """The results that a folder holds, by benchmark. ValueError: a file that isn't one, or that is another benchmark's."""
    found = {}
    for benchmark in BENCHMARKS:
        path = folder / f"{benchmark.name}.json"
        if path.is_file():
            result = Result.read(path)
            if result.benchmark != benchmark.name:
                raise ValueError(f"{path} is of the benchmark {result.benchmark!r}; expected {benchmark.name!r}")
            found[benchmark.name] = result
    return found
