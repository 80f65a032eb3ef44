"""What a run says while it runs: a summary, progress bars on a terminal, one line per step, where the results are.

Only rank 0 prints. On a terminal progress bars come and go; elsewhere (a log file, a pipe) there are only the lines, without
colour or control characters. `step_line` is the pure part. Called by the controller's driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from drmas.telemetry.alarms import Alarm
from drmas.telemetry.names import Metrics, agents_of, failures_of, phases_of, policies_of, seconds_of

ALARM_ROWS = 3
"""Of the rows behind an alarm, how many its line names; alarms.jsonl has more."""


class Console:
    """`quiet` is for the other ranks. `tty` is found out from the stream unless given; `stream` is stdout unless given."""

    def __init__(self, *, quiet: bool = False, tty: bool | None = None, stream: IO[str] | None = None) -> None:
        self._rich = RichConsole(file=stream, quiet=quiet, force_terminal=tty, highlight=False, soft_wrap=True, emoji=False)
        self._said: set[str] = set()

    @property
    def live(self) -> bool:
        """Whether progress bars are drawn."""
        return self._rich.is_terminal and not self._rich.quiet

    def start(self, lines: Mapping[str, Any]) -> None:
        """The summary before the first step, label -> text: team, batch arithmetic, placement, backends."""
        self._block(lines)

    def end(self, places: Mapping[str, Any]) -> None:
        """The last words: where the report, the metrics and the models are."""
        self._block(places)

    @contextmanager
    def progress(self, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar over `total` units of work; yields `advance(units)`. Does nothing off a terminal."""
        if not self.live:
            yield lambda units: None
            return
        columns = (TextColumn("  {task.description}"), BarColumn(bar_width=30), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._rich, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda units: bar.advance(task, units)

    def step(self, step: int, steps: int, metrics: Metrics) -> None:
        """The step's one line."""
        text = Text()
        for style, part in step_parts(step, steps, metrics):
            text.append("  " if text else "").append(part, style=style)
        self._rich.print(text)

    def note(self, message: str) -> None:
        """A warning or remark, once per cause."""
        if message not in self._said:
            self._said.add(message)
            self._rich.print(Text(message, style="yellow"))

    def alarm(self, alarm: Alarm) -> None:
        """An alarm, with the first of the rows behind it."""
        self._rich.print(Text(alarm_line(alarm), style="red"))

    def _block(self, lines: Mapping[str, Any]) -> None:
        width = max(map(len, lines), default=0)
        for label, value in lines.items():
            self._rich.print(Text.assemble((f"{label:<{width}}  ", "bold"), str(value)))


def alarm_line(alarm: Alarm) -> str:
    """One alarm as plain text.

    Example, in one line: "step 12  ALARM spike of solver: gradient norm 31.2, 9.8 times its median of 3.184  (rows
    sums/17#0/1, sums/17#2/0, sums/4#1/0 and 7 more)"
    """
    line = f"step {alarm.step}  ALARM {alarm.kind} of {alarm.agent}: {alarm.message}"
    if not alarm.rows:
        return line
    more = f" and {len(alarm.rows) - ALARM_ROWS} more" if len(alarm.rows) > ALARM_ROWS else ""
    return f"{line}  (rows {', '.join(alarm.rows[:ALARM_ROWS])}{more})"


def step_line(step: int, steps: int, metrics: Metrics) -> str:
    """One step as plain text.

    Example, in one line: "step  3/10  reward 0.50 (solver 0.50 · verifier 0.50)  |grad| main 0.0312  tok/s rollout 312
    · train 201  14.0 s (rollout 9.1 · train 4.2 · sync 0.7)  failed 2 (engine 2)"
    """
    return "  ".join(part for _, part in step_parts(step, steps, metrics))


def step_parts(step: int, steps: int, metrics: Metrics) -> list[tuple[str, str]]:
    """(style, text) of each piece of the line. A value that is missing shows as "-", a part without values is left out."""
    parts = [("bold", f"step {step:>{len(str(steps))}}/{steps}")]
    agents = [f"{name} {_number(metrics.get(f'rollout/{name}/reward_mean'), 2)}" for name in agents_of([metrics])]
    rewards = f" ({' · '.join(agents)})" if agents else ""
    parts.append(("green", f"reward {_number(metrics.get('reward/mean'), 2)}{rewards}"))
    norms = [f"{name} {_significant(metrics.get(f'train/{name}/grad_norm'))}" for name in policies_of([metrics])]
    if norms:
        parts.append(("", f"|grad| {' · '.join(norms)}"))
    speeds = [_speed(metrics.get("rollout/tokens_per_second"), "rollout")] + [
        _speed(metrics.get(f"train/{name}/tokens_per_second"), "train" if len(norms) == 1 else f"train {name}")
        for name in policies_of([metrics])
    ]
    if any(speeds):
        parts.append(("cyan", f"tok/s {' · '.join(filter(None, speeds))}"))
    phases = [(name, metrics.get(f"time/{name}_seconds")) for name in phases_of([metrics])]
    spent = " · ".join(f"{name} {value:.1f}" for name, value in phases if value)
    if (whole := seconds_of(metrics)) is not None:
        parts.append(("dim", f"{whole:.1f} s" + (f" ({spent})" if spent else "")))
    if failed := failures_of(metrics):
        kinds = " · ".join(f"{kind} {count}" for kind, count in failed.items())
        parts.append(("red", f"failed {sum(failed.values())} ({kinds})"))
    return parts


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _significant(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _speed(value: float | None, name: str) -> str:
    return "" if value is None else f"{name} {value:,.0f}"
