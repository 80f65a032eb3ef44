"""The benchmarks that `bench/all.py` runs, in this order, and what bench/README.md shows of each. To add one: an entry here.

An entry's script writes a `Result` with `--json PATH`, or something that `convert` makes one of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.suite.convert import plan_validation
from bench.suite.record import About, Result

TRL_PYTHON = Path("build/trl/bin/python")
"""Where `make bench-peers` puts TRL's environment, from the repository's root."""


@dataclass(frozen=True)
class Chart:
    """Bars of one table: a group of bars for every column of `values`, a bar for every row, named by the column `label`.

    With `split` every value of that column has a row of charts of its own.
    """

    table: int
    label: str
    values: tuple[str, ...]
    split: str | None = None


@dataclass(frozen=True)
class Benchmark:
    name: str
    script: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    """What `--quick` runs it with instead: so little that the numbers mean nothing. Without, it leaves the benchmark out."""
    minutes: float = 1.0
    """About how long it takes on two quiet cores."""
    chart: Chart | None = None
    hidden: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Table -> columns that the page leaves out."""
    convert: Callable[[Any, About], Result] | None = None

    def command(self, *, quick: bool) -> list[str]:
        return [self.script, *(self.quick if quick else self.options)]


KERNEL_COLUMNS = ("op", "flops", "bytes", "floor_ms")

BENCHMARKS = (
    Benchmark(
        "kernels",
        "kernels.py",
        ("--shapes", "smollm2", "--repeats", "3"),
        ("--shapes", "small", "--skip-gate", "--skip-memory", "--repeats", "1", "--implementation", "torch eager"),
        minutes=5,
        chart=Chart(0, "implementation", ("ratio_to_eager", "peak_mb"), split="case"),
        hidden={0: KERNEL_COLUMNS},
    ),
    Benchmark(
        "update_step",
        "update_step.py",
        ("--sides", "drmas", "--sides", "transformers", "--repeats", "2"),
        ("--recipe", "arithmetic-tiny", "--repeats", "1", "--sides", "drmas", "--sides", "transformers"),
        minutes=2.5,
        chart=Chart(0, "side", ("tokens/s", "peak GiB")),
    ),
    Benchmark(
        "loop",
        "loop.py",
        (),
        ("--model", "tiny:qwen3", "--tasks", "4", "--repeats", "1"),
        minutes=2,
        chart=Chart(0, "part", ("tokens/s", "its tokens/s")),
    ),
    Benchmark(
        "rollout",
        "rollout.py",
        (),
        ("scripted", "overhead", "--tasks", "1", "--turns", "20", "--repeats", "1"),
        minutes=3.5,
    ),
    Benchmark(
        "weight_sync",
        "weight_sync.py",
        (),
        ("--small", "shared-memory"),
        minutes=1.5,
        chart=Chart(0, "transport", ("total s", "staged s")),
    ),
    Benchmark(
        "end_to_end",
        "end_to_end.py",
        ("--trl-python", str(TRL_PYTHON)),
        ("--sides", "drmas", "--steps", "1", "--tasks", "1", "--tokens", "4"),
        minutes=4,
        chart=Chart(0, "side", ("tokens/s", "generated/s", "trained/s", "peak GiB")),
    ),
    Benchmark(
        "planning_speed",
        "planning_speed.py",
        (),
        ("turns", "--rows", "500", "--rounds", "1"),
        minutes=1.5,
        chart=Chart(0, "case", ("plan s", "pack a share s")),
    ),
    Benchmark(
        "plan_validation",
        "plan_validation.py",
        (),
        minutes=5,
        convert=plan_validation,
    ),
)


def chosen(only: Sequence[str], *, quick: bool = False) -> list[Benchmark]:
    """Those of these names, or all; in quick runs those that can be. ValueError: a name that none has."""
    known = {each.name: each for each in BENCHMARKS}
    for name in only:
        if name not in known:
            raise ValueError(f"--only is {name!r}; expected one of {', '.join(known)}")
    return [each for each in BENCHMARKS if (not only or each.name in only) and not (quick and not each.quick)]
