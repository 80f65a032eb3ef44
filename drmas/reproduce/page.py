"""The report of a reproduction: `report.html`, `results.json` with every number of it, `results.md` with its tables.

One page with nothing outside it and no script, light and dark. It is a function of what the trials left: it holds no time, so a
reproduction that was resumed gives the same bytes, and it works while trials are missing. Called by `drmas reproduce`.

    results.read_results -> analysis.analyse -> words.verdicts -> tables, charts -> here
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

from drmas.reproduce import bandit_tables, charts, tables
from drmas.reproduce.analysis import analyse
from drmas.reproduce.headlines import headlines
from drmas.reproduce.method import paragraphs
from drmas.reproduce.plan import SCENARIOS
from drmas.reproduce.results import Results, read_results
from drmas.reproduce.words import (
    CLAIMS,
    CONFIRMED,
    CONTRADICTED,
    FAILS,
    KINDS,
    TRAINING,
    Verdict,
    comparisons,
    limits,
    of_kind,
    silence,
    summary,
    verdicts,
)
from drmas.telemetry.eval_report import Table
from drmas.telemetry.markup import pairs, table, text
from drmas.telemetry.sinks import replace_text

REPORT = "report.html"
BANDIT = ("check", "growth", "regimes", "learning")
"""What bandit.json must have something of."""
TITLE = "Dr. MAS, reproduced small"
UNUSABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a bandit.json of another form makes of the code that shows it."""


def write_page(root: Path) -> Path:
    """Write the report of the folder `root`; its path. DataError: there is nothing to report."""
    analysis = analyse(_usable(read_results(root)))
    found = verdicts(analysis)
    said = [*headlines(analysis, found), *summary(found), comparisons(analysis, found), *limits(analysis)]
    numbers = {
        **{key: value for key, value in analysis.items() if key != "config"},
        "verdicts": [asdict(one) for one in found],
        "words": said,
    }
    replace_text(root / "results.json", json.dumps(_finite(numbers), indent=1, allow_nan=False) + "\n")
    replace_text(root / "results.md", _markdown(analysis, found))
    replace_text(root / REPORT, _document(_body(analysis, found)))
    return root / REPORT


def _usable(results: Results) -> Results:
    """The same without a bandit that can't be shown, and a line on that."""
    try:
        if lacking := [name for name in BANDIT if results.bandit is not None and not results.bandit.get(name)]:
            raise KeyError(f"no {', '.join(lacking)}")
        _bandit(results.bandit or {})
    except UNUSABLE as error:
        line = f"bandit.json: can't be used: {type(error).__name__}: {error}; expected what `drmas reproduce` writes there"
        return replace(results, bandit=None, problems=[*results.problems, line])
    return results


def _bandit(bandit: Mapping[str, Any]) -> str:
    said = "".join(f"<p>{text(line)}</p>" for line in bandit_tables.sentences(bandit))
    drawn = f'<div class="wide">{bandit_tables.chart(bandit)}</div>' + "".join(map(_table, bandit_tables.tables(bandit)))
    charts.all_moments({"scenarios": {}, "moments": {}}, [bandit_tables.exact_points(bandit)])
    return f"{said}{drawn}<h3>The teams</h3>{pairs(bandit_tables.descriptions(bandit))}"


def _prediction(analysis: Mapping[str, Any]) -> str:
    """The one chart of factors and second moments, the arithmetic's, and the fit."""
    drawn = charts.all_moments(analysis, [bandit_tables.exact_points(analysis["bandit"] or {})])
    drawn = f'<div class="wide pair">{drawn}{charts.identity(analysis)}</div>'
    said = (
        "Faint: single measurements, dots pooled and crosses per agent. Large: means of bins of the factor, "
        "with intervals over "
        "seeds. Large crosses: agents of the bandit's regimes, sampled in the largest groups over the exact factor. Dashed: "
        "y = factor, and 1."
    )
    return f'{drawn}<p class="soft">{said}</p>' + "".join(map(_table, tables.of_fit(analysis)))


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
        _section("claims", "What became of each claim", _short(analysis, found) + _claims(analysis, found)),
    ]
    if analysis["moments"]:
        parts.append(_section("prediction", "Predicted and measured second moments", _prediction(analysis)))
    for name, scenario in scenarios.items():
        drawn = f'<p class="soft">{text(SCENARIOS.get(name, ""))}</p>'
        drawn += "".join(f"<p>{text(line)}</p>" for line in silence(scenario))
        drawn += f'<div class="charts">{"".join(charts.of_scenario(scenario))}</div>'
        parts.append(_section(name, name, drawn + "".join(map(_table, tables.of_scenario(scenario)))))
    if analysis["bandit"]:
        parts.append(_section("bandit", "In closed form: teams of softmax bandits", _bandit(analysis["bandit"])))
    method = "".join(f"<p>{text(line)}</p>" for line in paragraphs(analysis["config"], scenarios))
    parts.append(_section("method", "How it was done", method + _settings(analysis["settings"])))
    parts.append(_section("failures", "Failures", _failures(analysis)))
    return "".join(parts)


def _subtitle(analysis: Mapping[str, Any]) -> str:
    settings, scenarios = analysis["settings"], analysis["scenarios"]
    kind = {True: "quick", False: "whole"}.get(settings.get("quick"), "of unknown extent")
    trials = sum(len(own["seeds"]) for one in scenarios.values() for own in one["methods"].values())
    planned = f" of {settings['trials']}" if isinstance(settings.get("trials"), int) else ""
    ended = [one["status"] for one in analysis["failures"]]
    failed = f"{ended.count('crashed')} crashed · {ended.count('diverged')} diverged"
    lost = f" · {len(analysis['problems'])} line(s) on files that are missing or can't be read" if analysis["problems"] else ""
    return f"{kind} · {trials}{planned} trials with a result · {len(scenarios)} scenarios · {failed}{lost}"


def _short(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    """The headlines, and tiles that count claims about training."""
    own = of_kind(found, TRAINING)
    lines = "".join(f"<li>{text(line)}</li>" for line in headlines(analysis, found))
    tiles = "".join(
        f'<div class="tile"><b>{sum(one.word == word for one in own)}</b><span>{word}</span></div>' for word in KINDS[TRAINING]
    )
    note = f'<p class="soft">of {len(own)} claims about training, each in one scenario</p>'
    return f'<ul class="short">{lines}</ul><div class="tiles">{tiles}</div>{note}'


def _claims(analysis: Mapping[str, Any], found: Sequence[Verdict]) -> str:
    """A table per kind, claims down and scenarios across; how many intervals there were, and what they don't say."""
    scenarios = list(analysis["scenarios"])
    cells = {(one.claim, one.scenario): _verdict(one) for one in found}
    html = ""
    for kind, title in tables.KIND_TITLES.items():
        rows = [[text(claim.text), *(cells[claim.key, name] for name in scenarios)] for claim in CLAIMS if claim.kind == kind]
        html += f'<h3>{title}</h3><div class="claims">{table(["claim", *scenarios], rows)}</div>'
    html = html if scenarios else "<p>No trial has a result.</p>"
    return html + "".join(f"<p>{text(line)}</p>" for line in (comparisons(analysis, found), *limits(analysis)))


def _verdict(one: Verdict) -> str:
    kind = {CONFIRMED: "good", CONTRADICTED: "bad", FAILS: "bad"}.get(one.word, "soft")
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
    parts = [f"# {TITLE}\n\n{_subtitle(analysis)}.\n", *(f"\n- {_cell(line)}" for line in headlines(analysis, found)), "\n"]
    parts += [_marked(one, 2) for one in tables.of_claims(found)]
    parts += [f"\n- {_cell(line)}" for line in summary(found)]
    parts += [f"\n\n{line}" for line in (comparisons(analysis, found), *limits(analysis))]
    parts.append("\n")
    parts += [_marked(one, 2) for one in tables.of_fit(analysis)]
    for name, scenario in analysis["scenarios"].items():
        parts.append(f"\n## {_cell(name)}\n")
        parts += [f"\n- {_cell(line)}" for line in silence(scenario)] + ["\n"]
        parts += [_marked(one, 3) for one in (tables.of_verdicts(name, found), *tables.of_scenario(scenario))]
    if analysis["bandit"]:
        parts.append("\n## Teams of softmax bandits\n")
        parts += [_marked(one, 3) for one in bandit_tables.tables(analysis["bandit"])]
    failed = tables.of_failures(analysis)
    parts.append(_marked(failed, 2) if failed else "\nNo trial crashed or diverged.\n")
    parts += [f"\n- {_cell(line)}" for line in analysis["problems"]]
    return "".join(parts).rstrip("\n") + "\n"


def _marked(one: Table, level: int) -> str:
    lines = [one.headers, ["---"] * len(one.headers), *one.rows]
    return f"\n{'#' * level} {one.title}\n\n" + "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: str) -> str:
    """On one line, and without what would end a cell or begin a tag."""
    return " ".join(value.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON can't hold."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
