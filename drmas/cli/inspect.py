"""`drmas inspect`: the segments and advantages of a rows file, or of a step of a run.

Reads rows, asks `drmas.core.estimators` for the numbers, and shows them as tables or as one JSON object. It computes nothing
itself, so what it shows is what training uses.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drmas.config.load import load_advantage
from drmas.config.schema import AdvantageConfig
from drmas.core.advantages import AdvantageRule, Advantages, Segment
from drmas.core.diagnostics import inflation_factors
from drmas.core.estimators import Estimator, Evidence, resolve
from drmas.errors import ConfigError, DataError
from drmas.jsonl import read_objects
from drmas.runtime.probes import baselines
from drmas.telemetry.episodes import read_episodes
from drmas.types import Episode, Failure, Task

WIDTH = 160
"""Columns of the tables; names are never cut to a narrow pipe's width."""


@dataclass(frozen=True)
class InspectRow:
    """What advantages are computed from, and `record`, the object that it was read from; `ids` has what there is of token ids.

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
    ids: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def prompt_ids(self) -> list[int]:
        return self._ids("prompt_ids")

    @property
    def response_ids(self) -> list[int]:
        return self._ids("response_ids")

    def _ids(self, name: str) -> list[int]:
        """Only some estimators ask for them, so that other rows may come without."""
        if name not in self.ids:
            place = "/".join(map(str, (self.task, self.episode, self.agent, self.turn)))
            raise DataError(f"the row {place} has no {name}, which this estimator reads; expected a list of token ids")
        return self.ids[name]


def inspect_rows(rows: Sequence[InspectRow], overrides: Sequence[str], *, as_json: bool) -> str:
    """The groups of `rows` under the default rule with `--advantage.*` overrides on top."""
    return _answer(rows, load_advantage(overrides), as_json, team=[row.agent for row in rows])


def inspect_run(run_dir: Path, step: int, overrides: Sequence[str], *, as_json: bool) -> str:
    """The answer for a step of a run, under the run's own rule with `overrides` on top."""
    base, rows = _run_rule(run_dir), rows_of_run(run_dir, step)
    team = [*(row.agent for row in rows), *base.get("agents", ())]  # an agent of the run may have no rows in the step
    return _answer(rows, load_advantage(overrides, base), as_json, team=team, played=probes_of_run(run_dir, step))


def read_rows(path: Path) -> list[InspectRow]:
    """The rows of a JSONL file: task, episode, agent, reward; turn (0), penalty (0) and status ("ok") may be left out, and
    prompt_ids and response_ids where the estimator doesn't read them."""
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
    for key in ("prompt_ids", "response_ids"):
        ids = record.get(key, [0])
        if not isinstance(ids, list) or not ids or any(type(each) is not int for each in ids):
            raise DataError(f"{where}: {key} is {_found(ids)}; expected a list of token ids")
    filled = {**record, "turn": turn, "reward": reward, "penalty": penalty, "status": status}
    return InspectRow(**names, turn=turn, reward=reward, penalty=penalty, status=status, record=filled, ids=filled)


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
    """The rows of a step, as the controller made them: turns with a response, without the probes'."""
    rows = []
    for episode in read_episodes(run_dir, step):
        for turn in episode["turns"] if episode.get("probe") is None else ():
            if turn["response_ids"]:
                record = {key: episode[key] for key in ("task", "episode")}
                record |= {key: turn[key] for key in ("agent", "turn", "penalty", "reward", "status")}
                ids = {key: turn[key] for key in ("prompt_ids", "response_ids")}
                rows.append(InspectRow(**record, record=record, ids=ids))
    return rows


def probes_of_run(run_dir: Path, step: int) -> list[Episode]:
    """What ran beside the step's groups, with what a baseline needs of it."""
    return [
        Episode(
            Task(each["task"], each["question"], each["truth"]),
            each["sample"],
            reward=each["reward"],
            failure=None if each["status"] == "ok" else Failure(each["status"], each["message"]),
            agent_rewards=each.get("agent_rewards", {}),
            probe=each["probe"],
        )
        for each in read_episodes(run_dir, step)
        if each.get("probe") is not None
    ]


def _run_rule(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))["advantage"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise DataError(f"{path}: can't be read as a run's configuration ({error}); expected a run's folder") from error


def _answer(
    rows: Sequence[InspectRow],
    config: AdvantageConfig,
    as_json: bool,
    *,
    team: Sequence[str],
    played: Sequence[Episode] = (),
) -> str:
    estimator = resolve(**config.model_dump(exclude_none=True), team=list(dict.fromkeys(team)))
    if estimator.needs_critic:
        raise ConfigError(f"{_named(config)} needs a critic's values; inspect shows the presets that rows are enough for")
    probes = {probe.name: probe for probe in estimator.probes}
    mine = [episode for episode in played if episode.probe in probes]
    if probes and not mine:
        names = ", ".join(map(repr, probes))
        raise ConfigError(
            f"{_named(config)} needs episodes beside each group ({names}), and there are none here; inspect shows the presets "
            "that rows are enough for, and of a run those whose episodes it played"
        )
    result = estimator(rows, Evidence(baselines=baselines(mine, probes)))
    notes = [f"{_named(config)} starts from these rows here, in a run from the steps before"] if estimator.state() else []
    if result.tokens is not None:
        notes.append("the advantage of a row is the mean over its tokens")
    if as_json:
        return json.dumps(as_object(rows, estimator, result) | ({"notes": notes} if notes else {}))
    return as_tables(rows, config.preset, estimator, result, notes)


def _named(config: AdvantageConfig) -> str:
    """The preset, and those of agents that have their own."""
    own = [f"advantage.agents.{agent}.preset {each.preset!r}" for agent, each in config.agents.items()]
    return " or ".join([f"advantage.preset {config.preset!r}", *own])


def settings(estimator: Estimator) -> dict[str, Any]:
    """Its settings by the names of the configuration; under "agents" those of agents with an estimator of their own."""
    found: dict[str, Any] = {}
    for each in fields(estimator):
        value = getattr(estimator, each.name)
        if isinstance(value, AdvantageRule):
            found |= asdict(value)
        elif each.name == "agents":
            found["agents"] = {agent: settings(own) for agent, own in value.items()}
        elif each.name in ("inner", "others"):
            found |= {} if value is None else settings(value)
        elif each.init:
            found[each.name] = value
    return found


def as_object(rows: Sequence[InspectRow], estimator: Estimator, result: Advantages) -> dict[str, Any]:
    """{"rule", "segments", "rows"}: the rows are the input's, in order, with "advantage" (null where excluded).

    Equal states that are compared beside the segments are among these, with scope "anchor".
    """
    return {
        "rule": settings(estimator),
        "segments": [_segment(segment) for segment in [*result.segments, *result.anchors]],
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


def as_tables(
    rows: Sequence[InspectRow], preset: str, estimator: Estimator, result: Advantages, notes: Sequence[str] = ()
) -> str:
    """The same as text for a terminal: the rule, a table of segments per scope, the factors per agent, every row."""
    screen = Console(file=io.StringIO(), width=WIDTH, highlight=False, emoji=False)
    rule = settings(estimator)
    agents = rule.pop("agents", {})
    for name, own in {f"preset {preset}": rule, **{f"agents.{agent}": own for agent, own in agents.items()}}.items():
        screen.print(Text(f"advantage.{name}:  " + "  ".join(f"{key}={value}" for key, value in own.items())))
    for note in notes:
        screen.print(Text(note))
    screen.print()
    mean, std = ([each for each in result.segments if each.scope == scope] for scope in ("mean", "std"))
    titles = ("segments of the mean (taken off)", "segments of the std (divided by)")
    tables = list(zip(titles, (mean, std), strict=True))
    if [(each.key, each.rows) for each in mean] == [(each.key, each.rows) for each in std]:
        tables = [("segments of the mean (taken off) and of the std (divided by)", mean)]
    for title, segments in [*tables, ("equal states (compared beside that, by discounted reward)", result.anchors)]:
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
