"""Where a step's metrics go: `metrics.jsonl` always, TensorBoard and a listener (the endpoint for Prometheus) when asked.

One flat JSON object per line, "step" first, floats exact (they read back equal). A metric that is None or not finite is written
as null; the key `nonfinite` counts the latter, so a NaN can't hide as a gap. Errors of metrics.jsonl are raised, since a run
without its record is worth little; TensorBoard's are reported once and the run goes on.

Called by the controller on rank 0. Metric names are the controller's; nothing here interprets them.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from drmas.errors import DataError
from drmas.jsonl import read_objects

Metrics = dict[str, float | None]

FILE = "metrics.jsonl"


class MetricsLog:
    """The metrics of one run folder, appended step by step.

    Example: `MetricsLog(run_dir, tensorboard=False).write(3, {"reward/mean": 0.5})` appends {"step": 3, "reward/mean": 0.5}
    """

    def __init__(
        self, run_dir: Path, tensorboard: bool, listener: Callable[[int, Mapping[str, float | None]], None] | None = None
    ) -> None:
        self._listener = listener
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / FILE
        self._events = _TensorBoard(run_dir / "tensorboard") if tensorboard else None
        if self.path.exists():
            self._keep(read_metrics(run_dir))
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append one step's line and flush it."""
        clean: dict[str, float | None] = {"step": step}
        nonfinite = 0
        for key, value in metrics.items():
            if value is not None and not math.isfinite(value):
                nonfinite += 1
                value = None
            clean[key] = value
        if nonfinite:
            clean["nonfinite"] = nonfinite
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            self._events.write(step, clean)
        if self._listener is not None:
            self._listener(step, clean)

    def truncate_after(self, step: int) -> None:
        """Forget the lines of steps after `step`, atomically: a resumed run writes them again."""
        self._file.close()
        self._keep([metrics for metrics in read_metrics(self.path.parent) if (metrics["step"] or 0) <= step])
        self._file = self.path.open("a", encoding="utf-8")
        if self._events is not None:
            self._events.purge_after(step)

    def _keep(self, steps: Sequence[Metrics]) -> None:
        replace_text(self.path, "".join(json.dumps(metrics) + "\n" for metrics in steps))

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


class _TensorBoard:
    """Scalars for TensorBoard; imports torch's writer at the first value and gives up, with one warning, at the first error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._purge_step: int | None = None
        self._writer: Any = None
        self._broken = False

    def purge_after(self, step: int) -> None:
        """Steps after `step` that an earlier process wrote are hidden once this one writes."""
        self.close()
        self._purge_step = step + 1

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if self._broken:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
            for key, value in metrics.items():
                if value is not None and key != "step":
                    self._writer.add_scalar(key, value, step)
            self._writer.flush()
        except (OSError, ImportError, RuntimeError, ValueError) as error:
            self._broken = True
            warnings.warn(f"TensorBoard is off for the rest of this run: {error}. {FILE} goes on.", stacklevel=3)

    def close(self) -> None:
        if self._writer is not None and not self._broken:
            self._writer.close()
        self._writer = None


def read_metrics(run_dir: Path) -> list[Metrics]:
    """The steps of a run in order, one dict each; a line half written when the run was killed is left out."""
    path = run_dir / FILE
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a run folder, which holds {FILE}")
    steps = []
    for number, metrics in read_objects(path, 'an object with an integer "step"', killed=True):
        if not isinstance(metrics.get("step"), int):
            raise DataError(f'{path}:{number}: expected an object with an integer "step"')
        steps.append(metrics)
    return steps


def replace_text(path: Path, text: str) -> None:
    """Write a whole file so that a reader, or a kill, sees the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
