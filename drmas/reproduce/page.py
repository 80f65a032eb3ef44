"""The report of a reproduction: `report.html`, `results.json` with every number of it, `results.md` with its tables.

One page with nothing outside it and no script, light and dark. It is a function of what the trials left: it holds no time, so a
reproduction that was resumed gives the same bytes, and it works while trials are missing. Called by `drmas reproduce`.

    results.read_results -> analysis.analyse -> words.verdicts -> tables, charts -> here
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from drmas.reproduce import bandit_tables, charts, tables
from drmas.reproduce.analysis import analyse
from drmas.reproduce.plan import SCENARIOS
from drmas.reproduce.results import read_results
from drmas.reproduce.scenarios import TUNING
from drmas.reproduce.words import CLAIMS, CONFIRMED, CONTRADICTED, WORDS, Verdict, comparisons, limits, summary, verdicts
from drmas.telemetry.eval_report import Table
from drmas.telemetry.markup import pairs, table, text
from drmas.telemetry.sinks import replace_text

REPORT = "report.html"
TITLE = "Dr. MAS, reproduced small"
METHOD = (
    "Within a scenario and a seed every method starts from the same weights, sees the same tasks in the same order, and has "
    "the same code, steps, episodes, sampling seeds and held-out tasks; what differs is what a row's reward is compared "
    "with. single-agent has a team of its own: one call instead of several; a scenario without one is compared with that of "
    "another on the same tasks. An interval is a 95 % t-interval over seeds; a difference is between trials of the same "
    "seed.",
    "final reward: mean reward of the last fifth of the steps. mean reward: of all steps, the area under the curve. avg@16, "
    "pass@16: of 16 samples per held-out task, their mean reward, and whether one was right. spikes: share of an agent's "
    "steps whose gradient norm is above 3 times the median of the 20 steps before, or isn't finite. variation: the norm's "
    "standard deviation over its mean, trend included. imbalance: mean over steps of |sum of an agent's advantages| / rows. "
    "inflation: the factor (σₖ² + (μₖ - μ)²) / σ² of a step, averaged over its tasks.",
    "A measured second moment is the mean of A²|z|² over rows, divided by the mean of |z|²; z is the gradient of the row's "
    "mean log-prob. Rows that per-agent statistics compare with nothing have A = 0 and count, which takes the moment below "
    "1. slope: of measured on predicted through the origin. R²: of the prediction itself, with no free parameter, in "
    "logarithms.",
    "Verdicts: confirmed if all of an interval is on the side that is claimed, contradicted if all of it is on the other "
    "side, not confirmed if it holds zero, not tested below 3 seeds. A ratio is close to 1 if its interval lies in 0.8 to "
    "1.25, and contradicts if it lies outside. Most of the gain comes from the std only where there is a gain. A row sum is "
    "zero if it is at most 1e-5 per row.",
    "A trial has crashed if its process died or raised: it is in no mean. It has diverged if a gradient norm or reward "
    "wasn't finite, or its reward fell to below half of what it began with: it is in every mean.",
)


def write_page(root: Path) -> Path:
    """Write the report of the folder `root`; its path. DataError: there is nothing to report."""
    analysis = analyse(read_results(root))
    found = verdicts(analysis)
    said = [*summary(found), comparisons(analysis, found), *limits(analysis)]
    numbers = {**analysis, "verdicts": [asdict(one) for one in found], "words": said}
    replace_text(root / "results.json", json.dumps(_finite(numbers), indent=1, allow_nan=False) + "\n")
    replace_text(root / "results.md", _markdown(analysis, found))
    replace_text(root / REPORT, _document(_body(analysis, found)))
    return root / REPORT


def _body(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    scenarios = analysis["scenarios"]
    names = [
        "claims",
        *(["prediction"] if analysis["moments"] else []),
        *scenarios,
        *(["bandit"] if analysis["bandit"] else []),
    ]
    links = "".join(f'<a href="#{text(name)}">{text(name)}</a>' for name in [*names, "method", "failures"])
    parts = [
        f"<header><h1>{TITLE}</h1><p class='soft'>{text(_subtitle(analysis))}</p><nav>{links}</nav></header>",
        _section("claims", "What became of each claim", _claims(analysis, found)),
    ]
    if analysis["moments"]:
        html = f'<div class="wide">{charts.all_moments(scenarios)}</div>' + "".join(map(_table, tables.of_fit(analysis)))
        parts.append(_section("prediction", "Predicted and measured second moments", html))
    for name, scenario in scenarios.items():
        drawn = f'<p class="soft">{text(SCENARIOS.get(name, ""))}</p>'
        drawn += f'<div class="charts">{"".join(charts.of_scenario(scenario))}</div>'
        parts.append(_section(name, name, drawn + "".join(map(_table, tables.of_scenario(scenario)))))
    if analysis["bandit"]:
        html = f'<div class="wide">{bandit_tables.chart(analysis["bandit"])}</div>'
        html += "".join(map(_table, bandit_tables.tables(analysis["bandit"])))
        html += f"<h3>The teams</h3>{pairs(bandit_tables.descriptions(analysis['bandit']))}"
        parts.append(_section("bandit", "In closed form: teams of softmax bandits", html))
    method = "".join(f"<p>{text(line)}</p>" for line in (METHOD[0], TUNING, *METHOD[1:]))
    parts.append(_section("method", "How it was done", method + _settings(analysis["settings"])))
    parts.append(_section("failures", "Failures", _failures(analysis)))
    return "".join(parts)


def _subtitle(analysis: Mapping[str, Any]) -> str:
    settings, scenarios = analysis["settings"], analysis["scenarios"]
    kind = {True: "quick", False: "whole"}.get(settings.get("quick"), "of unknown extent")
    trials = sum(len(own["seeds"]) for one in scenarios.values() for own in one["methods"].values())
    planned = f" of {settings['trials']}" if isinstance(settings.get("trials"), int) else ""
    return f"{kind} · {trials}{planned} trials with a result · {len(scenarios)} scenarios · {len(analysis['failures'])} failed"


def _claims(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    """Claims down, scenarios across, and what they mean."""
    scenarios = list(analysis["scenarios"])
    cells = {(one.claim, one.scenario): _verdict(one) for one in found}
    rows = [[text(claim.text), *(cells[claim.key, name] for name in scenarios)] for claim in CLAIMS]
    html = f'<div class="claims">{table(["claim", *scenarios], rows)}</div>' if scenarios else "<p>No trial has a result.</p>"
    tiles = "".join(
        f'<div class="tile"><b>{sum(one.word == word for one in found)}</b><span>{word}</span></div>' for word in WORDS
    )
    lines = "".join(f"<p>{text(line)}</p>" for line in (comparisons(analysis, found), *limits(analysis)))
    return f'<div class="tiles">{tiles}</div><p class="soft">of {len(found)} claims, each in one scenario</p>{html}{lines}'


def _verdict(one: Verdict) -> str:
    kind = {CONFIRMED: "good", CONTRADICTED: "bad"}.get(one.word, "soft")
    return f'<b class="{kind}">{one.word}</b><small>{text(one.numbers)}</small>'


def _settings(settings: Mapping[str, Any]) -> str:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return f"<h3>Settings</h3>{pairs(flat)}" if flat else ""


def _failures(analysis: Mapping[str, Any]) -> str:
    failed = tables.of_failures(analysis)
    html = _table(failed) if failed else "<p>No trial crashed or diverged.</p>"
    if analysis["problems"]:
        html += "<h3>Files that are missing or can't be used</h3><ul>"
        html += "".join(f"<li>{text(line)}</li>" for line in analysis["problems"]) + "</ul>"
    return html


def _section(anchor: str, title: str, html: str) -> str:
    return f'<section id="{text(anchor)}"><h2>{text(title)}</h2>{html}</section>'


def _table(one: Table) -> str:
    return f"<h3>{text(one.title)}</h3>{table(one.headers, [[text(cell) for cell in row] for row in one.rows])}"


def _document(body: str) -> str:
    telemetry, here = resources.files("drmas.telemetry"), resources.files("drmas.reproduce")
    sheets = (telemetry / "chart.css", telemetry / "report.css", here / "page.css")
    sheet = "".join(path.read_text(encoding="utf-8") for path in sheets)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE} · drmas</title><style>{sheet}</style></head><body><main>{body}</main></body></html>\n"
    )


def _markdown(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    """The words and the tables, scenario by scenario."""
    parts = [f"# {TITLE}\n\n{_subtitle(analysis)}.\n", _marked(tables.of_claims(found), 2)]
    parts += [f"\n- {line}" for line in summary(found)]
    parts += [f"\n\n{line}" for line in (comparisons(analysis, found), *limits(analysis))]
    parts.append("\n")
    parts += [_marked(one, 2) for one in tables.of_fit(analysis)]
    for name, scenario in analysis["scenarios"].items():
        parts.append(f"\n## {_cell(name)}\n")
        parts += [_marked(one, 3) for one in (tables.of_verdicts(name, found), *tables.of_scenario(scenario))]
    if analysis["bandit"]:
        parts.append("\n## Teams of softmax bandits\n")
        parts += [_marked(one, 3) for one in bandit_tables.tables(analysis["bandit"])]
    failed = tables.of_failures(analysis)
    parts.append(_marked(failed, 2) if failed else "\nNo trial crashed or diverged.\n")
    parts += [f"\n- {line}" for line in analysis["problems"]]
    return "".join(parts).rstrip("\n") + "\n"


def _marked(one: Table, level: int) -> str:
    lines = [one.headers, ["---"] * len(one.headers), *one.rows]
    return f"\n{'#' * level} {one.title}\n\n" + "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: str) -> str:
    """On one line, and without what would end a cell."""
    return " ".join(value.split()).replace("|", "\\|")


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON can't hold."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
