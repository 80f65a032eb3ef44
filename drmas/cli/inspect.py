"""`drmas inspect`: the segments and advantages of a rows file, or of a step of a run.

Reads rows, asks `drmas.core.advantages` for the numbers, and shows them as tables or as one JSON object. It computes nothing
itself, so what it shows is what training uses.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drmas.config.load import load_advantage
from drmas.config.schema import AdvantageConfig
from drmas.core.advantages import AdvantageRule, Advantages, Segment, advantages, resolve
from drmas.core.diagnostics import inflation_factors
from drmas.core.gae import GaeRule
from drmas.errors import ConfigError, DataError
from drmas.jsonl import read_objects
from drmas.telemetry.episodes import read_episodes

WIDTH = 160
"""Columns of the tables; names are never cut to a narrow pipe's width."""


@dataclass(frozen=True)
class InspectRow:
    """What advantages are computed from, and `record`, the object that it was read from.

    Example: InspectRow("sums/17", "sums/17#0", "solver", 0, 1.0, 0.0, "ok", {...})
    """

    task: str
    episode: str
    agent: str
    turn: int
    reward: float | None
    penalty: float
    status: str
    record: dict[str, Any]


def inspect_rows(rows: Sequence[InspectRow], overrides: Sequence[str], *, as_json: bool) -> str:
    """The groups of `rows` under the default rule with `--advantage.*` overrides on top."""
    return _answer(rows, load_advantage(overrides), as_json)


def inspect_run(run_dir: Path, step: int, overrides: Sequence[str], *, as_json: bool) -> str:
    """The answer for a step of a run, under the run's own rule with `overrides` on top."""
    config = load_advantage(overrides, _run_rule(run_dir))
    return _answer(rows_of_run(run_dir, step), config, as_json)


def read_rows(path: Path) -> list[InspectRow]:
    """The rows of a JSONL file: task, episode, agent, reward; turn (0), penalty (0) and status ("ok") may be left out."""
    what = "an object with task, episode, agent and reward"
    rows = [_row(record, f"{path}:{number}") for number, record in read_objects(path, what)]
    if not rows:
        raise DataError(f"{path}: holds no rows; expected one JSON object per line")
    return rows


def doubts(rows: Sequence[InspectRow]) -> list[str]:
    """What rows of a real run would not say: taken as they stand, but worth a word on stderr."""
    turns, rewards, found = set(), {}, []
    for number, row in enumerate(rows, start=1):
        place = (row.task, row.episode, row.agent, row.turn)
        if place in turns:
            found.append(f"row {number}: a second row of {'/'.join(map(str, place))}; under weighting by turn it counts again")
        turns.add(place)
        if row.status == "ok" and rewards.setdefault((row.task, row.episode), row.reward) != row.reward:
            found.append(f"row {number}: another reward than the rows of {row.task}/{row.episode} before it")
        if row.penalty < 0:
            found.append(f"row {number}: penalty {row.penalty:g} raises the advantage")
    return found


def _row(record: dict[str, Any], where: str) -> InspectRow:
    names = {key: _name(record, key, where) for key in ("task", "episode", "agent")}
    status = record.get("status", "ok")
    if not isinstance(status, str) or not status:
        raise DataError(f'{where}: status is {_found(status)}; expected text, "ok" for a row that counts')
    turn = record.get("turn", 0)
    if not isinstance(turn, int) or isinstance(turn, bool) or turn < 0:
        raise DataError(f"{where}: turn is {_found(turn)}; expected an integer from 0")
    reward = _number(record, "reward", where) if status == "ok" else _number_or_none(record.get("reward"))
    penalty = _number({"penalty": 0.0} | record, "penalty", where)
    filled = {**record, "turn": turn, "reward": reward, "penalty": penalty, "status": status}
    return InspectRow(**names, turn=turn, reward=reward, penalty=penalty, status=status, record=filled)


def _name(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise DataError(f"{where}: {key} is missing; expected task, episode, agent and reward in every row")
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: {key} is {_found(value)}; expected text")
    return str(value)


def _number(record: dict[str, Any], key: str, where: str) -> float:
    if key not in record:
        raise DataError(f"{where}: {key} is missing; expected a number in every row with status ok")
    value = _number_or_none(record[key])
    if value is None:
        rule = '; a row without a reward has a status other than "ok"' if key == "reward" else ""
        raise DataError(f"{where}: {key} is {_found(record[key])}; expected a finite number{rule}")
    return value


def _number_or_none(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < 1e100 else None


def _found(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def rows_of_run(run_dir: Path, step: int) -> list[InspectRow]:
    """The rows of a step, as the controller made them: turns with a response."""
    rows = []
    for episode in read_episodes(run_dir, step):
        for turn in episode["turns"]:
            if turn["response_ids"]:
                record = {key: episode[key] for key in ("task", "episode")}
                record |= {key: turn[key] for key in ("agent", "turn", "penalty", "reward", "status")}
                rows.append(InspectRow(**record, record=record))
    return rows


def _run_rule(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))["advantage"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise DataError(f"{path}: can't be read as a run's configuration ({error}); expected a run's folder") from error


def _answer(rows: Sequence[InspectRow], config: AdvantageConfig, as_json: bool) -> str:
    rule = resolve(**config.model_dump(exclude_none=True))
    if isinstance(rule, GaeRule):
        raise ConfigError("advantage.preset is 'ppo', which needs a critic's values; inspect shows the other presets")
    result = advantages(rows, rule)
    if as_json:
        return json.dumps(as_object(rows, rule, result))
    return as_tables(rows, config.preset, rule, result)


def as_object(rows: Sequence[InspectRow], rule: AdvantageRule, result: Advantages) -> dict[str, Any]:
    """{"rule", "segments", "rows"}: the rows are the input's, in order, with "advantage" (null where excluded)."""
    return {
        "rule": asdict(rule),
        "segments": [_segment(segment) for segment in result.segments],
        "rows": [{**row.record, "advantage": value} for row, value in zip(rows, result.values, strict=True)],
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "scope": segment.scope,
        "key": list(segment.key),
        "rows": list(segment.rows),
        "num_episodes": segment.num_episodes,
        "mean": _number_or_none(segment.mean),
        "std": _number_or_none(segment.std),
        "weight": _number_or_none(segment.weight),
        "singleton": segment.singleton,
        "constant": segment.constant,
        "num_excluded": segment.num_excluded,
    }


def as_tables(rows: Sequence[InspectRow], preset: str, rule: AdvantageRule, result: Advantages) -> str:
    """The same as text for a terminal: the rule, a table of segments per scope, the factors per agent, every row."""
    screen = Console(file=io.StringIO(), width=WIDTH, highlight=False, emoji=False)
    settings = "  ".join(f"{name}={value}" for name, value in asdict(rule).items())
    screen.print(Text(f"advantage.preset {preset}:  {settings}\n"))
    titles = {"mean": "segments of the mean (taken off)", "std": "segments of the std (divided by)"}
    if rule.mean == rule.std:
        titles = {"mean": "segments of the mean (taken off) and of the std (divided by)"}
    for scope, title in titles.items():
        segments = [segment for segment in result.segments if segment.scope == scope]
        if segments:
            screen.print(_segment_table(title, segments))
    factors = inflation_factors(rows)
    shown = "  ".join(f"{agent} {_text(factor, 3)}" for agent, factor in factors.items())
    screen.print(Text(f"inflation factor under one baseline per task:  {shown}\n"))
    screen.print(_row_table(rows, result))
    return "\n".join(line.rstrip() for line in screen.file.getvalue().splitlines())


def _table(title: str, left: Sequence[str], right: Sequence[str], last: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in (*left, *right, *last):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _segment_table(title: str, segments: Sequence[Segment]) -> Table:
    table = _table(title, ["segment", "rows"], ["episodes", "mean", "std", "weight", "excluded"], ["flags"])
    for segment in segments:
        flags = [name for name in ("singleton", "constant") if getattr(segment, name)]
        cells = [" / ".join(map(str, segment.key)), " ".join(map(str, segment.rows)), str(segment.num_episodes)]
        cells += [_text(segment.mean), _text(segment.std), _text(segment.weight), str(segment.num_excluded), " ".join(flags)]
        table.add_row(*map(Text, cells))
    return table


def _row_table(rows: Sequence[InspectRow], result: Advantages) -> Table:
    table = _table("rows", ["row", "task", "episode", "agent"], ["turn", "reward", "penalty", "advantage"], ["status"])
    for index, (row, value) in enumerate(zip(rows, result.values, strict=True)):
        numbers = [str(row.turn), _text(row.reward), _text(row.penalty), _text(value, 6)]
        table.add_row(*map(Text, [str(index), row.task, row.episode, row.agent, *numbers, row.status]))
    return table


def _text(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
