"""The command line of bench/all.py: run benchmarks one after the other, keep their results, make tables and pictures of them.

    python bench/all.py                  every benchmark; results into bench/results, tables into bench/README.md, pictures
    python bench/all.py --only NAME      this one; several times
    python bench/all.py --resume         goes on where the last call ended early
    python bench/all.py --render         tables and pictures alone, from the results that are there
    python bench/all.py --check          into build/bench, and compare: exit status 1 where a ratio got worse or is missing
    python bench/all.py --quick          into build/bench-quick: does everything run? The numbers mean nothing

Run it on a quiet machine. A benchmark that fails doesn't stop the others; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.suite import charts, gate, page
from bench.suite.entries import BENCHMARKS, Benchmark, chosen
from bench.suite.record import Result, about, command_line

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
RESULTS, PAGE, README = BENCH / "results", BENCH / "README.md", ROOT / "README.md"
CHECKED, QUICK = ROOT / "build" / "bench", ROOT / "build" / "bench-quick"
PROGRESS = ".unfinished.json"
"""In the folder of the results while a call is under way, and after one that ended early: what it had done."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/all.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=", ".join(each.name for each in BENCHMARKS))
    parser.add_argument("--resume", action="store_true", help="leave out what an unfinished call has done")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--check", action="store_true", help="compare with --baseline and leave the page alone")
    parser.add_argument("--quick", action="store_true", help="as little as possible, to see that everything runs")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the results")
    parser.add_argument("--baseline", type=Path, default=RESULTS, metavar="FOLDER", help="what --check compares with")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.render and (args.check or args.quick or args.resume or args.only):
        parser.error("--render makes all tables and pictures and measures nothing; please give it alone")
    if args.quick and args.check:
        parser.error("--quick measures nothing that could be compared; please leave out --check or --quick")
    try:
        args.chosen = chosen(args.only, quick=args.quick)
    except ValueError as error:
        parser.error(str(error))
    args.output = args.output or (QUICK if args.quick else CHECKED if args.check else RESULTS)
    return args


def run(benchmark: Benchmark, folder: Path, *, quick: bool) -> str | None:
    """Measure, into FOLDER/NAME.json; what went wrong, or None. A missed target isn't wrong."""
    words, written = benchmark.command(quick=quick), folder / f"{benchmark.name}.json"
    raw = written if benchmark.convert is None else folder / f"{benchmark.name}.raw.json"
    for stale in (raw, written):
        stale.unlink(missing_ok=True)
    command = [sys.executable, str(BENCH / words[0]), *words[1:], "--json", str(raw)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not raw.is_file():
        return f"it ended with status {status} and left no result"
    try:
        if benchmark.convert is not None:
            here = about(len(os.sched_getaffinity(0))).model_copy(update={"command": command_line(words)})
            benchmark.convert(json.loads(raw.read_text()), here).write(written)
            raw.unlink()
        Result.read(written)
    except (ValueError, KeyError, TypeError) as error:
        written.unlink(missing_ok=True)
        return f"its result can't be read: {error}"
    return None


def measure(args: argparse.Namespace) -> dict[str, str]:
    """Run the chosen ones; name -> what went wrong."""
    args.output.mkdir(parents=True, exist_ok=True)
    progress = args.output / PROGRESS
    done = json.loads(progress.read_text()) if args.resume and progress.is_file() else []
    failed = {}
    for benchmark in args.chosen:
        if benchmark.name in done:
            print(f"=== {benchmark.name}: done before", flush=True)
            continue
        print(f"=== {benchmark.name} (about {benchmark.minutes:g} min)", flush=True)
        started = time.monotonic()
        trouble = run(benchmark, args.output, quick=args.quick)
        if trouble:
            failed[benchmark.name] = trouble
        else:
            done.append(benchmark.name)
        progress.write_text(json.dumps(done))
        print(f"=== {benchmark.name}: {trouble or 'done'}, {time.monotonic() - started:.0f} s\n", flush=True)
    if not failed:
        progress.unlink(missing_ok=True)
    return failed


def render(folder: Path, path: Path) -> None:
    """The tables of the page, and of the repository's README with it, and the pictures beside the results. Pictures need
    matplotlib, tables nothing."""
    results = page.read_results(folder)
    for benchmark in BENCHMARKS:
        if benchmark.chart is not None and benchmark.name in results:
            charts.draw(folder / f"{benchmark.name}.svg", results[benchmark.name], benchmark.chart)
    path.write_text(page.rendered(path.read_text(), results, os.path.relpath(folder, path.parent)))
    if path == PAGE:
        README.write_text(page.with_targets(README.read_text(), results, "bench/README.md"))


def check(before: Path, now: Path, names: list[str]) -> bool:
    """Print every comparison; True if nothing is worse."""
    verdicts = gate.compare(page.read_results(before), page.read_results(now), names)
    print(f"beside {before}:", *(f"  {verdict.text}" for verdict in verdicts), sep="\n")
    return not any(verdict.worse for verdict in verdicts)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    known = page.read_results(args.baseline) if args.check else {}
    if missing := [each.name for each in args.chosen if args.check and each.name not in known]:
        print(f"{args.baseline} has no result of {', '.join(missing)} to compare with: measure and commit it, or leave it out")
        return 1
    failed = {} if args.render else measure(args)
    for name, trouble in failed.items():
        print(f"{name}: {trouble}")
    fine = not failed
    if args.check:
        fine &= check(args.baseline, args.output, [benchmark.name for benchmark in args.chosen])
    elif not args.quick:
        render(args.output, args.page)
    return 0 if fine else 1
