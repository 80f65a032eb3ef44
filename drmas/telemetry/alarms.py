"""Alarms about single agents: what is wrong in a step's metrics, since when, and which rows are behind it.

    spike       the agent's gradient norm is a multiple of its running median, or isn't finite
    collapse    its entropy, or its mean response length, is a small share of its running median
    idle        it had no rows for some steps in a row
    baseline    none of its rows has an advantage, because what they are compared with failed or isn't there
    constant    next to none of its rows were compared with others, for some steps in a row
    truncation  many of its turns were cut at the length limit
    mismatch    on fresh rows the engine's log-probs are far from the trainer's

A cause raises one alarm when it begins, and another when it returns after it was gone; what a step doesn't measure goes on as
it was. Medians need a few steps first; the other limits hold from the first step. The driver of a run calls `check` after every
step and appends what it says to `alarms.jsonl`; a resumed run replays its metrics, so that it goes on as if it had never ended.

Example: alarms = Alarms(config.telemetry.alarms); append_alarms(run_dir, alarms.check(step, metrics, episodes, advantages))
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal, Protocol

from drmas.errors import DataError
from drmas.jsonl import read_objects
from drmas.telemetry.names import Metrics
from drmas.telemetry.sinks import replace_text
from drmas.types import Episode, Row, rows_of

FILE = "alarms.jsonl"
ROWS = 10
"""Rows that an alarm names at most."""
FEWEST = 5
"""Steps that a median needs, where the window isn't shorter."""

Kind = Literal["spike", "collapse", "idle", "baseline", "constant", "truncation", "mismatch"]


class Limits(Protocol):
    """What this file needs of `drmas.config.schema.AlarmConfig`, which says what each is."""

    @property
    def window(self) -> int: ...
    @property
    def spike(self) -> float: ...
    @property
    def collapse(self) -> float: ...
    @property
    def idle_steps(self) -> int: ...
    @property
    def constant_share(self) -> float: ...
    @property
    def truncated_share(self) -> float: ...
    @property
    def logprob_gap(self) -> float: ...


class Advantages(Protocol):
    """What this file needs of `drmas.core.advantages.Advantages`: values over `rows_of(episodes)`."""

    @property
    def values(self) -> Sequence[float | None]: ...


@dataclass(frozen=True, slots=True)
class Alarm:
    """`metric` passed `limit` with `value`, which is None where it isn't finite. `rows`: those behind it, as TASK#SAMPLE/TURN,
    first the one that did most, at most `ROWS`."""

    step: int
    kind: Kind
    agent: str
    metric: str
    message: str
    value: float | None
    limit: float | None
    rows: list[str]


@dataclass(frozen=True, slots=True)
class _Cause:
    """What holds in a step."""

    kind: Kind
    agent: str
    metric: str
    message: str
    value: float | None
    limit: float | None


class Alarms:
    """Looks at every step of a run, in order. `active`: how many causes hold in the last step, new and old ones."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.active = 0
        self._known: set[tuple[Kind, str]] = set()
        self._history: dict[str, deque[float]] = {}
        self._runs: dict[str, int] = {}

    def replay(self, history: Iterable[Metrics]) -> None:
        """Take in the steps before the one that comes next, as `drmas.telemetry.sinks.read_metrics` gives them."""
        for metrics in history:
            self._take(metrics)

    def check(
        self,
        step: int,
        metrics: Metrics,
        episodes: Sequence[Episode],
        advantages: Advantages,
        *,
        gap_rows: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> list[Alarm]:
        """The alarms that this step raises. `gap_rows`: agent -> its fresh rows with the largest gap, first the largest."""
        raised = self._take(metrics)
        if not raised:
            return []
        rows = list(zip(rows_of(list(episodes)), advantages.values, strict=True))
        return [
            Alarm(**asdict(cause), step=step, rows=_rows_behind(cause, episodes, rows, gap_rows)[:ROWS]) for cause in raised
        ]

    def _take(self, metrics: Metrics) -> list[_Cause]:
        """Remember a step; the causes that it begins with."""
        causes = {(cause.kind, cause.metric): cause for cause in self._causes(metrics)}
        raised = [cause for key, cause in causes.items() if key not in self._known]
        measured = {name for name, value in metrics.items() if value is not None and math.isfinite(value)}
        self._known = {key for key in self._known if key[1] not in measured} | causes.keys()
        self.active = len(causes)
        return raised

    def _causes(self, metrics: Metrics) -> list[_Cause]:
        found = []
        for key, value in metrics.items():
            match key.split("/"):
                case ["train", _, agent, "grad_norm"]:
                    found.append(self._spike(agent, key, value))
                case ["train", _, agent, "entropy"]:
                    found.append(self._collapse(agent, key, value, "entropy", "nats per token"))
                case ["rollout", agent, "response_tokens_mean"]:
                    found.append(self._collapse(agent, key, value, "response length", "tokens"))
                case ["rollout", agent, "rows"]:
                    found.append(self._idle(agent, key, value))
                case ["advantage", agent, "without_baseline"]:
                    found.append(self._baseline(agent, key, value, metrics))
                case ["advantage", agent, "uncompared_share"]:
                    found.append(self._constant(agent, key, value))
                case ["rollout", agent, "truncated_share"]:
                    found.append(self._truncation(agent, key, value))
                case ["rollout", agent, "logprob_gap_mean"]:
                    found.append(self._mismatch(agent, key, value))
        return [cause for cause in found if cause is not None]

    def _spike(self, agent: str, key: str, value: float | None) -> _Cause | None:
        """Steps whose norm is 0, without any signal, are no part of the median: what follows them would always be a spike."""
        if value is None or not math.isfinite(value):
            return _Cause("spike", agent, key, "the gradient norm isn't finite", None, None)
        usual = self._usual(key, value if value > 0 else None)
        if usual is None or value <= (limit := self.limits.spike * usual):
            return None
        message = f"gradient norm {value:.4g}, {value / usual:.1f} times its median of {usual:.4g}"
        return _Cause("spike", agent, key, message, value, limit)

    def _collapse(self, agent: str, key: str, value: float | None, what: str, unit: str) -> _Cause | None:
        if value is None or not math.isfinite(value):
            return None
        usual = self._usual(key, value)
        if usual is None or value >= (limit := self.limits.collapse * usual):
            return None
        message = f"{what} {value:.4g} {unit}, {value / usual:.0%} of its median of {usual:.4g}"
        return _Cause("collapse", agent, key, message, value, limit)

    def _idle(self, agent: str, key: str, value: float | None) -> _Cause | None:
        steps = self._in_a_row(key, value == 0)
        if steps < self.limits.idle_steps:
            return None
        return _Cause("idle", agent, key, f"no rows for {steps} steps", float(steps), float(self.limits.idle_steps))

    def _baseline(self, agent: str, key: str, value: float | None, metrics: Metrics) -> _Cause | None:
        """A frozen agent's rows need no advantage."""
        if not value or value != metrics.get(f"rollout/{agent}/rows") or metrics.get(f"rollout/{agent}/frozen"):
            return None
        failed = [name for name, count in metrics.items() if name.startswith("rollout/probe_failed/") and count]
        why = f"their baseline episodes failed ({', '.join(failed)})" if failed else "no baseline covers them"
        return _Cause("baseline", agent, key, f"none of {value:g} rows has an advantage: {why}", value, None)

    def _constant(self, agent: str, key: str, value: float | None) -> _Cause | None:
        limit = self.limits.constant_share
        if value is None or (steps := self._in_a_row(key, value >= limit)) < self.limits.idle_steps:
            return None
        message = f"{value:.0%} of rows without comparison, because rewards are equal or rows alone, for {steps} steps"
        return _Cause("constant", agent, key, message, value, limit)

    def _truncation(self, agent: str, key: str, value: float | None) -> _Cause | None:
        limit = self.limits.truncated_share
        if value is None or value < limit:
            return None
        return _Cause("truncation", agent, key, f"{value:.0%} of turns cut at the length limit", value, limit)

    def _mismatch(self, agent: str, key: str, value: float | None) -> _Cause | None:
        """Also where it isn't a number, which is written as null: the metric is there only where there are fresh rows."""
        limit = self.limits.logprob_gap
        if value is None or not math.isfinite(value):
            return _Cause("mismatch", agent, key, "the log-prob gap to the engine isn't finite", None, limit)
        if value <= limit:
            return None
        message = f"trainer's and engine's log-probs differ by {value:.4g} nats on average on fresh rows, more than {limit:g}"
        return _Cause("mismatch", agent, key, message, value, limit)

    def _usual(self, key: str, value: float | None) -> float | None:
        """The median of the metric's steps before this one, None where they are too few; `value` is remembered."""
        past = self._history.setdefault(key, deque(maxlen=self.limits.window))
        usual = median(past) if len(past) >= min(self.limits.window, FEWEST) else None
        if value is not None:
            past.append(value)
        return usual

    def _in_a_row(self, key: str, holds: bool) -> int:
        """For how many of the steps that measured it, this one the last."""
        self._runs[key] = self._runs.get(key, 0) + 1 if holds else 0
        return self._runs[key]


def _rows_behind(
    cause: _Cause,
    episodes: Sequence[Episode],
    rows: Sequence[tuple[Row, float | None]],
    gap_rows: Mapping[str, Sequence[str]],
) -> list[str]:
    """Rows of the agent, first the one that did most; of one that idles, those that don't count: stale ones, failed ones."""
    if cause.kind == "mismatch":
        return list(gap_rows.get(cause.agent, []))
    if cause.kind == "truncation":
        turns = [(episode, turn) for episode in episodes if not episode.failure for turn in episode.turns]
        cut = [pair for pair in turns if pair[1].agent == cause.agent and pair[1].finish_reason == "length"]
        return [f"{episode.id}/{turn.index}" for episode, turn in cut]
    mine = [(row, value) for row, value in rows if row.agent == cause.agent]
    if cause.kind == "baseline":
        mine = [(row, value) for row, value in mine if row.status == "ok"]
    elif cause.kind != "idle":
        mine = [(row, value) for row, value in mine if value is not None and (row.trained or cause.kind != "spike")]
    if cause.kind == "spike":
        mine.sort(key=lambda pair: -abs(pair[1]) * len(pair[0].response_ids))
    elif cause.kind == "constant":
        mine.sort(key=lambda pair: abs(pair[1]))
    elif cause.kind == "collapse" and cause.metric.endswith("/entropy"):
        mine.sort(key=lambda pair: -math.fsum(pair[0].logprobs) / len(pair[0].logprobs))
    elif cause.kind == "collapse":
        mine.sort(key=lambda pair: len(pair[0].response_ids))
    return [f"{row.episode}/{row.turn}" for row, _ in mine]


def append_alarms(run_dir: Path, alarms: Sequence[Alarm]) -> None:
    """Add to the run's alarms.jsonl, one line each."""
    if alarms:
        with (run_dir / FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(alarm), allow_nan=False) + "\n" for alarm in alarms)


def keep_alarms_until(run_dir: Path, step: int) -> None:
    """Forget the alarms of steps after `step`, atomically: a resumed run raises them again. There is a file afterwards."""
    kept = [alarm for alarm in read_alarms(run_dir) or [] if alarm.step <= step]
    replace_text(run_dir / FILE, "".join(json.dumps(asdict(alarm)) + "\n" for alarm in kept))


def _alarm(values: dict[str, Any]) -> Alarm:
    """TypeError: `values` aren't an alarm's, or not of its types."""
    alarm = Alarm(**values)
    texts = [alarm.kind, alarm.agent, alarm.metric, alarm.message, *alarm.rows]
    if not isinstance(alarm.step, int) or not isinstance(alarm.rows, list) or not all(isinstance(one, str) for one in texts):
        raise TypeError("its step isn't an integer, or another value not text")
    return alarm


def read_alarms(run_dir: Path) -> list[Alarm] | None:
    """A run's alarms in order; a line half written when the run was killed is left out. None: the run didn't watch for any."""
    path = run_dir / FILE
    if not path.is_file():
        return None
    alarms = []
    for number, values in read_objects(path, "an alarm", killed=True):
        try:
            alarms.append(_alarm(values))
        except TypeError as error:
            raise DataError(f"{path}:{number}: not an alarm ({error}); expected one object per line") from error
    return alarms
