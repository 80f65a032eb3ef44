"""The benchmark's results as a table, as CSV, and beside an older CSV. Called by the runner."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.kernel_bench.sides import EAGER, OURS, Case, Measured
from bench.suite.record import Cell, Ratio, Result, Table, about

COLUMNS = (
    *("case", "op", "shape", "dtype", "implementation", "ms", "ratio_to_eager", "peak_mb", "memory_ratio_to_eager"),
    *("flops", "bytes", "floor_ms", "time_over_floor", "note"),
)
TIME_TOLERANCE = 0.30
MEMORY_TOLERANCE = 0.10
MEMORY_SLACK_MB = 8.0
"""Peaks that differ by less are the same: what a process holds moves by a few MB from run to run."""
COMPARABLE_BYTES = 1_000_000
"""A side of torch eager with a smaller peak gives no ratio."""

RATIOS = (
    ("ratio_to_eager", "time by torch eager's", TIME_TOLERANCE, "sides alternate, but short calls are hit by what else runs"),
    ("memory_ratio_to_eager", "peak memory by torch eager's", MEMORY_TOLERANCE, "what a process holds moves by a few MB"),
)
"""Column, what it is, and how far it may be off, with the reason."""

WIDTHS = (9, 7, 9, 8)
"""Of the table's columns: ms, ratio, peak MB, /floor."""

Row = dict[str, str]


def table_line(name: str, cells: Sequence[str], widths: Sequence[int], note: str = "") -> str:
    """Cells at the right of their columns, with two blanks between any two, however long they are."""
    aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join((f"{name:18}", *aligned, note)).rstrip()


def lines(case: Case, measured: Sequence[Measured], device_name: str | None) -> list[str]:
    """The case's part of the table. `device_name` is that of a GPU, for the target; None on the CPU."""
    flops, moved = case.cost
    floor = 1e3 * measured[0].floor_seconds
    made = [
        "",
        case.title,
        f"  {flops / 1e9:.4g} GFLOP, {moved / 1e6:.4g} MB: floor {floor:.4g} ms",
        "  " + table_line("", ("ms", "ratio", "peak MB", "/floor"), WIDTHS),
    ]
    for row in measured:
        if row.reason:
            made.append(f"  {row.implementation:18}  {row.reason}")
            continue
        cells = (_plain(1e3 * row.seconds, 4), _number(row.ratio, 2), _megabytes(row), _plain(row.over_floor, 3))
        made.append("  " + table_line(row.implementation, cells, WIDTHS, row.note))
    ours = next((row for row in measured if row.implementation == OURS and row.seconds is not None), None)
    if device_name is not None and case.target is not None and ours is not None:
        limit = case.target.of(device_name)
        verdict = "reached" if ours.over_floor <= limit else "missed"
        made.append(f"  target: {limit:g} times the floor; measured {ours.over_floor:.3g}: {verdict}")
    return made


def _plain(value: float, digits: int) -> str:
    """So many digits; from a thousand on all before the point."""
    return f"{value:.0f}" if value >= 1000.0 else f"{value:.{digits}g}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _megabytes(row: Measured) -> str:
    return "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}"


def rows(measured: Iterable[Measured]) -> list[Row]:
    """One per side that ran, in the columns of the CSV."""
    measured = [row for row in measured if not row.reason]
    eager = {row.case.title: row.peak_bytes for row in measured if row.implementation == EAGER}
    made = []
    for row in measured:
        case, base = row.case, eager.get(row.case.title)
        memory = None
        if base is not None and base >= COMPARABLE_BYTES and row.peak_bytes is not None:
            memory = row.peak_bytes / base
        values = (
            *(case.name, case.op, case.shape, case.dtype, row.implementation),
            *(f"{1e3 * row.seconds:.4f}", _number(row.ratio, 4), _megabytes(row), _number(memory, 4)),
            *(str(case.cost.flops), str(case.cost.bytes), f"{1e3 * row.floor_seconds:.4f}", f"{row.over_floor:.3f}", row.note),
        )
        made.append(dict(zip(COLUMNS, values, strict=True)))
    return made


def write_csv(path: Path, header: Mapping[str, str], table: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in header.items())
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def read_csv(path: Path) -> tuple[dict[str, str], list[Row]]:
    """(header, rows). ValueError: it isn't a CSV of this benchmark."""
    text = path.read_text().splitlines()
    header = dict(line[2:].split(": ", 1) for line in text if line.startswith("# ") and ": " in line)
    reader = csv.DictReader(line for line in text if not line.startswith("#"))
    table = list(reader)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{path} lacks the column {missing[0]}; expected a file that bench/kernels.py --csv wrote")
    return header, table


def result(header: Mapping[str, str], table: Sequence[Row], threads: int) -> Result:
    """What `--json` writes: the CSV's numbers, and this project's ratios to torch eager, in time and memory."""
    numbers = {"ms", "ratio_to_eager", "peak_mb", "memory_ratio_to_eager", "flops", "bytes", "floor_ms", "time_over_floor"}
    rows: list[list[Cell]] = [
        [row[name] if name not in numbers else float(row[name]) if row[name] else None for name in COLUMNS] for row in table
    ]
    ratios = []
    for row in table:
        if row["implementation"] != OURS:
            continue
        for column, what, tolerance, why in RATIOS:
            if row[column]:
                name = f"{row['case']}, {row['shape']}: {what}"
                ratios.append(Ratio(name=name, value=float(row[column]), better="lower", tolerance=tolerance, why=why))
    title = f"{header['backend'].split(' ')[0]} backend, {header['times']}"
    tables = [Table(title=title, columns=list(COLUMNS), rows=rows)]
    return Result(benchmark="kernels", about=about(threads), tables=tables, ratios=ratios)


class Verdict(NamedTuple):
    text: str
    worse: bool


def compare(baseline: Sequence[Row], table: Sequence[Row], *, memory: bool = True) -> list[Verdict]:
    """The ratios of this project's side to torch eager may exceed the baseline's by 30 % in time and 10 % in memory.

    Seconds aren't compared: they are the machine's. A case that only one of the two has is named and fails nothing, unless no
    case is in both. A number that the baseline has and the run lacks is worse than any; without `memory` none is asked for.
    """
    old, new = ({_key(row): row for row in part if row["implementation"] == OURS} for part in (baseline, table))
    verdicts = []
    for key, row in new.items():
        title = "  ".join(key)
        if key not in old:
            verdicts.append(Verdict(f"{title}: not in the baseline", False))
            continue
        before = old[key]
        verdicts.append(_verdict(f"{title}: time ratio", before["ratio_to_eager"], row["ratio_to_eager"], TIME_TOLERANCE))
        if memory:
            verdicts.append(_memory_verdict(title, before, row))
    if not old.keys() & new.keys():
        verdicts.append(Verdict("no case of this run is in the baseline: WORSE", True))
    verdicts += [Verdict(f"{'  '.join(key)}: not measured now", False) for key in old if key not in new]
    return verdicts


def _key(row: Row) -> tuple[str, str, str]:
    return row["case"], row["shape"], row["dtype"]


def _memory_verdict(title: str, before: Row, now: Row) -> Verdict:
    """By the ratio where there is one, else by the megabytes, which depend on the threads but not on the machine's speed."""
    if before["memory_ratio_to_eager"] and now["memory_ratio_to_eager"]:
        verdict = _verdict(f"{title}: memory ratio", *(r["memory_ratio_to_eager"] for r in (before, now)), MEMORY_TOLERANCE)
        grown = float(now["peak_mb"]) * (1.0 - float(before["memory_ratio_to_eager"]) / float(now["memory_ratio_to_eager"]))
        if not verdict.worse or grown > MEMORY_SLACK_MB:
            return verdict
        return Verdict(f"{verdict.text.removesuffix('WORSE')}within {MEMORY_SLACK_MB:g} MB, fine", False)
    return _verdict(f"{title}: peak MB", before["peak_mb"], now["peak_mb"], MEMORY_TOLERANCE, MEMORY_SLACK_MB)


def _verdict(title: str, before: str, now: str, tolerance: float, slack: float = 0.0) -> Verdict:
    if not before:
        return Verdict(f"{title}: not in the baseline", False)
    if not now:
        return Verdict(f"{title} {before} -> not measured now: WORSE", True)
    limit = float(before) * (1.0 + tolerance) + slack
    worse = float(now) > limit
    return Verdict(f"{title} {before} -> {now} (at most {limit:.4g}): {'WORSE' if worse else 'fine'}", worse)
