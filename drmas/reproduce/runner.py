"""Runs the trials of a reproduction, some at a time, each in a process of its own, and goes on where an earlier run ended.

A unit whose result is there isn't run again; one without is started from nothing. One whose process dies, raises or takes too
long is *crashed*: that is recorded, with the cause, and it is run again only when asked for. No result depends on when a unit
ran or beside which others, so neither does any table. Called by `drmas.cli.reproduce`.

    units in order ──> those whose `after` are done ──> a Worker each, `jobs` at a time ──> result.json, timing.json
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

from drmas.errors import ConfigError, DataError
from drmas.reproduce.plan import START, Trial
from drmas.reproduce.worker import Unit, Worker, signals_wait, start_server
from drmas.telemetry.sinks import replace_text

RESULT = "result.json"
TIMING = "timing.json"
QUICK_LIMIT_SECONDS = 15 * 60.0
LIMIT_SECONDS = 2 * 3600.0
"""Of one unit. A trial takes minutes, a quick one less than one; one that hangs must end all the same."""
CRASHED = "crashed"
BANDIT = "bandit"


def units_of(
    trials: Sequence[Trial],
    root: Path,
    *,
    quick: bool,
    trial: str = "drmas.reproduce.trial:run_trial",
    bandit: str = "drmas.reproduce.bandit:run_bandit",
) -> list[Unit]:
    """The units of work in the folder `root`: the bandit's numbers, then the trials. `trial`, `bandit`: "module:function"."""
    units = [Unit(BANDIT, root / "bandit", root / "bandit.json", bandit, options={"quick": quick})]
    for one in trials:
        folder = root / "trials" / one.key
        names = {"scenario": one.scenario, "method": one.method, "seed": one.seed}
        options = {"quick": quick}
        units.append(Unit(one.key, folder, folder / RESULT, trial, (one, root), options, tuple(one.after), names))
    return units


def select(units: Sequence[Unit], only: Sequence[str]) -> list[Unit]:
    """The units whose key contains one of `only` (all, if there are none), and what must be done before them.

    ConfigError: a text that is in no key.
    """
    for text in only:
        if not any(text in unit.key for unit in units):
            raise ConfigError(f"--only {text}: no trial's key contains it; expected a part of a key such as {units[-1].key}")
    wanted = {unit.key for unit in units if not only or any(text in unit.key for text in only)}
    for unit in reversed(units):
        if unit.key in wanted:
            wanted.update(unit.after)
    return [unit for unit in units if unit.key in wanted]


def run_units(
    units: Sequence[Unit],
    *,
    jobs: int,
    lock: int,
    retry_crashed: bool = False,
    limit_seconds: float = LIMIT_SECONDS,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Run what isn't done yet, at most `jobs` at a time; key -> status, where "crashed" says that there is no result.

    `lock`: a descriptor that every process keeps open. `say` is given a line at the start and for each unit that ended.
    ImportError: the units' code can't be imported. DataError: a result can't be read. KeyboardInterrupt: Ctrl-C or SIGTERM;
    as with any other error, all processes are gone then, and a second call goes on.
    """
    _check_order(units)
    statuses = {unit.key: found for unit in units if (found := status_of(unit)) is not None}
    before = list(statuses.values())
    if retry_crashed:
        statuses = {key: status for key, status in statuses.items() if status != CRASHED}
    left = [unit for unit in units if unit.key not in statuses]
    line = f"{_counted(units)}, {jobs} at a time: {len(units) - len(left)} done before, {len(left)} to run"
    if crashed := before.count(CRASHED):
        again = "are run again" if retry_crashed else "stay so; --retry-crashed runs them again"
        line += f"; {crashed} crashed before and {again}"
    say(line)
    if left:
        with _terminated_is_interrupted():
            start_server(sorted({unit.entry.partition(":")[0] for unit in left}))
            _Run(len(units), left, statuses, jobs, lock, limit_seconds, say).run()
    return {unit.key: statuses[unit.key] for unit in units}


def status_of(unit: Unit) -> str | None:
    """ "ok", "diverged" or "crashed"; None if it is yet to be run. DataError: its result can't be read."""
    for path in (unit.result, unit.folder / RESULT):
        try:
            return json.loads(path.read_text(encoding="utf-8")).get("status", "ok")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: can't be read: {error}; delete it, and the trial is run again") from error
    return None


def kind_of(unit: Unit) -> str:
    """Units of one kind take about as long: the bandit, all starts, and the trials of scenarios such as "maths-"."""
    if unit.names.get("method") == START:
        return START
    return unit.key.partition("/")[0].partition("-")[0]


def seconds_left(
    waiting: Iterable[Unit], running: Iterable[tuple[Unit, float]], ended: Mapping[str, Sequence[float]], jobs: int
) -> float | None:
    """How long `jobs` at a time will take. `running`: with the seconds of each so far; `ended`: kind -> seconds of those.

    A kind of which none has ended is taken to last as long as the trials that have. None: there is none of those either.
    """
    means = {kind: sum(seconds) / len(seconds) for kind, seconds in ended.items()}
    of_trials = [each for kind, seconds in ended.items() if kind not in (BANDIT, START) for each in seconds]
    left = []
    for unit, spent in [*((unit, 0.0) for unit in waiting), *running]:
        if (kind := kind_of(unit)) not in means and not of_trials:
            return None
        mean = means[kind] if kind in means else sum(of_trials) / len(of_trials)
        left.append(max(mean - spent, 0.0))
    return max(sum(left) / jobs, max(left, default=0.0))


def _counted(units: Sequence[Unit]) -> str:
    kinds = Counter(kind_of(unit) for unit in units)
    bandit, starts = kinds.pop(BANDIT, 0), kinds.pop(START, 0)
    trials = kinds.total()
    parts = [f"{number} {word}{'s' * (number != 1)}" for number, word in ((trials, "trial"), (starts, "start")) if number]
    return ", ".join([*parts, *["the bandit"] * bandit])


def _check_order(units: Sequence[Unit]) -> None:
    earlier: set[str] = set()
    for unit in units:
        if missing := [key for key in unit.after if key not in earlier]:
            raise ValueError(f"{unit.key} is to run after {missing[0]}, which doesn't stand before it")
        earlier.add(unit.key)


@dataclass
class _Run:
    """One call of `run_units`: `left` shrinks, `statuses` grows."""

    total: int
    left: list[Unit]
    statuses: dict[str, str]
    jobs: int
    lock: int
    limit_seconds: float
    say: Callable[[str], None]
    workers: list[Worker] = field(default_factory=list)
    ended: dict[str, list[float]] = field(default_factory=dict)
    """Kind -> the seconds of each worker that ended."""

    def run(self) -> None:
        try:
            while self.left or self.workers:
                self._start()
                self._wait()
        finally:
            with signals_wait():
                for worker in self.workers:
                    worker.end()

    def _start(self) -> None:
        """Start what can be; a unit after a crashed one is crashed too."""
        for unit in list(self.left):
            if broken := [key for key in unit.after if self.statuses.get(key) == CRASHED]:
                self.left.remove(unit)
                unit.folder.mkdir(parents=True, exist_ok=True)
                self._crashed(unit, f"its start {broken[0]} crashed", 0.0)
            elif len(self.workers) < self.jobs and all(key in self.statuses for key in unit.after):
                with signals_wait():
                    self.workers.append(Worker(unit, self.lock))
                    self.left.remove(unit)

    def _wait(self) -> None:
        """Wait until a worker ends or has had its time, and take the results of those that did."""
        if not self.workers:
            return
        until_limit = self.limit_seconds - max(worker.seconds for worker in self.workers)
        ended = connection.wait([worker.sentinel for worker in self.workers], max(until_limit, 0.0))
        for worker in list(self.workers):
            if worker.sentinel in ended or worker.seconds > self.limit_seconds:
                with signals_wait():
                    self.workers.remove(worker)
                    self._take(worker, ended=worker.sentinel in ended)

    def _take(self, worker: Worker, *, ended: bool) -> None:
        unit, seconds = worker.unit, worker.seconds
        if ended:
            cause = worker.reap() or f"ended without {unit.result.name}"
        else:
            worker.end()
            cause = f"took longer than {self.limit_seconds:g} s"
        self.ended.setdefault(kind_of(unit), []).append(seconds)
        replace_text(unit.folder / TIMING, json.dumps({"seconds": round(seconds, 3)}) + "\n")
        if (status := status_of(unit)) is None:
            self._crashed(unit, cause, seconds)
        else:
            self._done(unit, status, status, seconds)

    def _crashed(self, unit: Unit, cause: str, seconds: float) -> None:
        record = {**unit.names, "status": CRASHED, "error": cause}
        replace_text(unit.folder / RESULT, json.dumps(record) + "\n")
        self._done(unit, CRASHED, f"{CRASHED}: {cause}", seconds)

    def _done(self, unit: Unit, status: str, words: str, seconds: float) -> None:
        self.statuses[unit.key] = status
        line = f"{len(self.statuses):>{len(str(self.total))}}/{self.total}  {unit.key}  {words}  {seconds:.1f} s"
        running = [(worker.unit, worker.seconds) for worker in self.workers]
        if (self.left or running) and (left := seconds_left(self.left, running, self.ended, self.jobs)) is not None:
            line += f"  about {_spoken(left)} left"
        self.say(line)


@contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
