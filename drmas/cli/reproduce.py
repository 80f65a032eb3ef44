"""`drmas reproduce`: train tiny teams with each method from several seeds, and write one report. Resumes by itself."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from drmas.errors import ConfigError
from drmas.reproduce.folder import ReproduceFolder
from drmas.reproduce.page import write_page
from drmas.reproduce.plan import START, scale, trials
from drmas.reproduce.runner import CRASHED, LIMIT_SECONDS, QUICK_LIMIT_SECONDS, run_units, select, units_of


def run_reproduction(
    output: Path,
    *,
    quick: bool = False,
    jobs: int | None = None,
    only: list[str] | None = None,
    retry_crashed: bool = False,
    overwrite: bool = False,
) -> int:
    """Run what isn't done yet in the folder `output`, then write the report. Exit status: 1 if trials crashed.

    `jobs` at a time: as many as this process may use cores, if unset. ConfigError: see `ReproduceFolder.open` and `select`.
    """
    planned = trials(quick=quick)
    compared = sum(trial.method != START for trial in planned)
    folder = ReproduceFolder(output, quick=quick, scale={"trials": compared, **asdict(scale(quick=quick))})
    units = select(units_of(planned, folder.path, quick=quick), only or [])
    cores = len(os.sched_getaffinity(0))
    lock = folder.open(overwrite=overwrite)
    try:
        statuses = run_units(
            units,
            jobs=jobs or cores,
            lock=lock,
            retry_crashed=retry_crashed,
            limit_seconds=QUICK_LIMIT_SECONDS if quick else LIMIT_SECONDS,
            say=partial(print, flush=True),
        )
        _written(write_page(folder.path))
    except KeyboardInterrupt:
        print("drmas: stopped; the same command goes on", file=sys.stderr)
        raise
    finally:
        folder.close()
    crashed = [key for key, status in statuses.items() if status == CRASHED]
    for key in crashed:
        print(f"drmas: {key} crashed", file=sys.stderr)
    return 1 if crashed else 0


def report_reproduction(output: Path) -> None:
    """Write the report of what is in the folder `output` and print its path. DataError: nothing is there."""
    if not output.is_dir():
        raise ConfigError(f"{output}: no such folder; expected that of a reproduction (--output)")
    _written(write_page(output))


def _written(report: Path) -> None:
    """Where the report is, and whether it lacks something."""
    print(f"report  {report}", flush=True)
    if problems := json.loads((report.parent / "results.json").read_text())["problems"]:
        print(f"drmas: {len(problems)} line(s) in its section Failures; the first: {problems[0]}", file=sys.stderr)
