"""The files of a reproduction as they were left: trials, settings, the bandit's numbers. What can't be read is named.

    ROOT/settings.json                                       what was run, where and by which versions
    ROOT/bandit.json                                         the closed-form example's numbers
    ROOT/trials/<scenario>/<method>/seed-<n>/result.json     one trial

Called by `drmas.reproduce.page`. Times stand elsewhere and are not read, so that a resumed reproduction gives the same page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drmas.errors import DataError
from drmas.reproduce.plan import START
from drmas.reproduce.plan import trials as plan

FILE = "result.json"
MOST_LINES = 8
"""Of trials that were not run yet; more are a number."""

PerStep = list[float | None]
"""One number per finished step; None where the agent had no rows."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class Moment(_Part):
    """Second moments of one agent's gradient at one step, in units of `score`, the mean |z|^2 of the `rows` measured rows.

    predicted: the inflation factor of Lemma 4.2 over these rows; pooled: measured under the task's pooled baseline; per_agent:
    under the agent's own mean and standard deviation; own: under the advantages that the trial trained with; covariance: Delta
    of the lemma, the covariance of A^2 and |z|^2 under the pooled baseline, None where a trial left none.
    """

    step: int
    agent: str
    rows: int
    score: float | None = None
    predicted: float | None = None
    pooled: float | None = None
    per_agent: float | None = None
    own: float | None = None
    covariance: float | None = None


class Scores(_Part):
    """One number per task: the mean reward of its samples, and whether one of them was right (0 or 1)."""

    avg: list[float | None]
    passed: list[float | None] = Field(alias="pass")


class Evaluation(_Part):
    before: Scores | None = None
    after: Scores | None = None


class Trial(_Part):
    """One run: `method` on `scenario` from `seed`. Lists are per finished step, and per agent where they stand in a dict."""

    scenario: str
    method: str
    seed: int
    status: Literal["ok", "crashed", "diverged"]
    error: str | None = None
    steps: int = 0
    reward: PerStep = Field(default_factory=list)
    grad_norm: dict[str, PerStep] = Field(default_factory=dict)
    inflation: dict[str, PerStep] = Field(default_factory=dict)
    row_sum: dict[str, PerStep] = Field(default_factory=dict)
    rows: dict[str, PerStep] = Field(default_factory=dict)
    calls: dict[str, PerStep] = Field(default_factory=dict)
    entropy: dict[str, PerStep] = Field(default_factory=dict)
    valid: dict[str, PerStep] = Field(default_factory=dict)
    """Share of the agent's turns that its parser takes."""
    uncompared: dict[str, PerStep] = Field(default_factory=dict)
    """Share of the agent's rows whose reward is compared with nothing."""
    skipped: int = 0
    logprob_gap_max: float | None = None
    parameters: dict[str, int] = Field(default_factory=dict)
    moments: list[Moment] = Field(default_factory=list)
    eval: Evaluation = Evaluation()
    penalised: list[str] = Field(default_factory=list)
    """Agents whose turns may be penalised, by the trial's configuration: their advantages needn't sum to zero."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.scenario, self.method, self.seed

    @property
    def name(self) -> str:
        return f"{self.scenario}/{self.method}/seed-{self.seed}"


@dataclass(frozen=True)
class Results:
    """Everything that was found: trials in the order of their keys, and one line for each file that is bad or missing.

    `planned`: (scenario, method, seed) of the trials that there are to be, if the settings tell. `config`: the configuration
    of the first trial that left one, {} without.
    """

    trials: list[Trial]
    settings: dict[str, Any]
    bandit: dict[str, Any] | None
    problems: list[str]
    planned: list[tuple[str, str, int]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


def read_results(root: Path) -> Results:
    """Read the folder `root`. DataError: it holds no trial and no bandit, so that there is nothing to report."""
    problems: list[str] = []
    settings = _object(root, root / "settings.json", problems)
    bandit = _object(root, root / "bandit.json", problems)
    if bandit is None and (crash := _object(root, root / "bandit" / FILE, [])) is not None:
        problems[-1] += f"; it {crash.get('status')}: {crash.get('error')}"
    folders = sorted((root / "trials").glob("*/*/seed-*"))
    found = [_trial(root, folder, problems) for folder in folders]
    planned = plan(quick=settings["quick"]) if settings and isinstance(settings.get("quick"), bool) else []
    problems += _missing([one.key for one in planned], {folder.relative_to(root / "trials").as_posix() for folder in folders})
    trials = sorted((_with_penalties(root, trial) for trial in found if trial is not None), key=lambda trial: trial.key)
    if not trials and bandit is None:
        named = "".join(f"\n  {line}" for line in problems)
        raise DataError(f"{root}: nothing to report; expected trials/SCENARIO/METHOD/seed-N/{FILE} or bandit.json in it{named}")
    keys = [(one.scenario, one.method, one.seed) for one in planned]
    return Results(trials, settings or {}, bandit, problems, keys, _config(root, trials))


def _config(root: Path, trials: list[Trial]) -> dict[str, Any]:
    return next(filter(None, (_config_of(root, trial) for trial in trials if trial.method != START)), {})


def _config_of(root: Path, trial: Trial) -> dict[str, Any]:
    return _object(root, root / "trials" / trial.name / "run" / "config.json", []) or {}


def _with_penalties(root: Path, trial: Trial) -> Trial:
    team = _config_of(root, trial).get("team")
    agents = {name: agent for name, agent in team.items() if isinstance(agent, dict)} if isinstance(team, dict) else {}
    penalised = [name for name, agent in agents.items() if agent.get("invalid_penalty") or agent.get("length_buffer")]
    return trial.model_copy(update={"penalised": penalised})


def _missing(planned: list[str], there: set[str]) -> list[str]:
    """A line per scenario and method of whose planned trials some have no folder."""
    lines: dict[str, list[str]] = {}
    for key in planned:
        if key not in there:
            folder, _, seed = key.rpartition("/seed-")
            lines.setdefault(folder, []).append(seed)
    if len(lines) > MOST_LINES:
        return [f"{sum(map(len, lines.values()))} of {len(planned)} trials and starts were not run yet"]
    return [f"trials/{folder}: seed {', '.join(seeds)} not run yet" for folder, seeds in lines.items()]


def _object(root: Path, path: Path, problems: list[str]) -> dict[str, Any] | None:
    """The JSON object of a file; None, and a line in `problems`, where there is none."""
    name = path.relative_to(root).as_posix()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{name}: no such file")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{name}: can't be read: {' '.join(str(error).split())}".replace(f"{root}/", ""))
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{name}: holds a {type(value).__name__}; expected an object")
    return None


def _trial(root: Path, folder: Path, problems: list[str]) -> Trial | None:
    """The trial of a folder `<scenario>/<method>/seed-<n>`; None, and a line in `problems`, where it has none that is right."""
    path = folder / FILE
    values = _object(root, path, problems)
    if values is None:
        return None
    name = path.relative_to(root).as_posix()
    try:
        trial = Trial.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors()
        more = f" (and {len(others)} more)" if others else ""
        problems.append(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}{more}")
        return None
    place = (folder.parent.parent.name, folder.parent.name, folder.name)
    said = (trial.scenario, trial.method, f"seed-{trial.seed}")
    if place != said:
        problems.append(f"{name}: says that it is {'/'.join(said)}; expected {'/'.join(place)}, as its folder is named")
        return None
    if lengths := _wrong_lengths(trial):
        problems.append(f"{name}: {lengths}")
        return None
    return trial


def _wrong_lengths(trial: Trial) -> str:
    """'' where every list has a number for each finished step, and an evaluation both of each task; or what is wrong."""
    lists = {"reward": trial.reward} if trial.status != "crashed" else {}
    for what in ("grad_norm", "inflation", "row_sum", "rows", "calls", "entropy", "valid", "uncompared"):
        lists |= {f"{what}.{agent}": values for agent, values in getattr(trial, what).items()}
    wrong = [f"{name} has {len(values)} numbers" for name, values in lists.items() if len(values) != trial.steps]
    if wrong:
        return f"{wrong[0]}; expected one for each of {trial.steps} steps"
    for name, scores in (("before", trial.eval.before), ("after", trial.eval.after)):
        if scores is not None and len(scores.avg) != len(scores.passed):
            return f"eval.{name} has {len(scores.avg)} tasks in avg and {len(scores.passed)} in pass; expected the same"
    return ""
