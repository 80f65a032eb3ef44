"""The tables of the report, as plain text, for the page and for Markdown. An interval is written as `0.412 [0.361, 0.466]`.

Called by `drmas.reproduce.page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drmas.reproduce.fit import SPLIT
from drmas.reproduce.words import CLAIMS, KINDS, Verdict, shown
from drmas.telemetry.eval_report import Table

CHANGES = {
    "final": "final reward",
    "area": "mean reward",
    "avg": "avg@16",
    "pass": "pass@16",
    "spikes": "spikes",
    "variation": "norm's variation",
    "imbalance": "imbalance",
}
SKIPPED = "updates of the method skipped, not finite"
AGENT_COLUMNS = {
    "calls": ("calls per episode", ".2f"),
    "grad_mean": ("gradient norm", ".3g"),
    "variation": ("its variation", ".2f"),
    "spikes": ("spikes", ".3f"),
    "largest": ("largest / median", ".2f"),
    "imbalance": ("imbalance", ".1e"),
    "inflation_mean": ("inflation", ".2f"),
    "inflation_p95": ("95th percentile", ".2f"),
    "inflation_above_2": ("share above 2", ".3f"),
    "valid_first": ("valid turns, first", ".3f"),
    "valid_last": ("valid turns, last", ".3f"),
    "uncompared": ("rows compared with nothing", ".3f"),
}


KIND_TITLES = {
    "training": "Claims about training",
    "moments": "Claims about second moments",
    "arithmetic": "Arithmetic that must hold",
}


def of_claims(found: Sequence[Verdict]) -> list[Table]:
    """A table per kind: claims down, in how many scenarios each word was said."""
    made = []
    for kind, words in KINDS.items():
        rows = []
        for claim in CLAIMS:
            if claim.kind == kind:
                own = [one for one in found if one.claim == claim.key]
                rows.append([claim.text, *(str(sum(one.word == word for one in own)) for word in words)])
        made.append(Table(f"{KIND_TITLES[kind]}, and the number of scenarios", ["claim", *words], rows))
    return made


def of_verdicts(scenario: str, found: Sequence[Verdict]) -> Table:
    own = {one.claim: one for one in found if one.scenario == scenario}
    rows = [
        [claim.text, own[claim.key].word, own[claim.key].numbers] for kind in KINDS for claim in CLAIMS if claim.kind == kind
    ]
    return Table("Claims here", ["claim", "verdict", "numbers"], rows)


def of_scenario(scenario: Mapping[str, Any]) -> list[Table]:
    """Scores, differences between methods by seed, agents, and second moments where they were measured."""
    methods = scenario["methods"]
    scores = {
        "final": "final reward",
        "area": "mean reward",
        "avg_before": "avg@16 before",
        "avg": "avg@16 after",
        "pass_before": "pass@16 before",
        "pass": "pass@16 after",
    }
    rows = [[name, _seeds(own["final"]), *(_cell(own[key], own["final"]) for key in scores)] for name, own in methods.items()]
    found = [Table("Scores: means over seeds", ["method", "seeds", *scores.values()], rows)]
    rows = [
        [f"{one['left']} less {one['right']}", _seeds(one["final"])]
        + [_cell(one[key], one["final"], "+.1e" if key == "imbalance" else "+.3f") for key in CHANGES]
        for one in scenario["differences"]
    ]
    if rows:
        found.append(Table("Differences by seed", ["methods", "seeds", *CHANGES.values()], rows))
    rows = [
        [
            f"{name}: {agent}",
            *(_cell(numbers[key], own["final"], form) for key, (_, form) in AGENT_COLUMNS.items()),
            f"{own['skipped']:g}",
        ]
        for name, own in methods.items()
        for agent, numbers in own["agents"].items()
    ]
    found.append(Table("Agents", ["method: agent", *(title for title, _ in AGENT_COLUMNS.values()), SKIPPED], rows))
    if scenario["moments"]:
        found.append(_second_moments(scenario["moments"]))
    return found


def _second_moments(moments: Mapping[str, Any]) -> Table:
    kinds = ("predicted", "pooled", "per_agent")
    rows = [[agent, *(shown(own[kind], ".2f") for kind in kinds)] for agent, own in moments["agents"].items()]
    rows.append(["all agents", *(shown(moments[kind], ".2f") for kind in kinds)])
    headers = ["agent", "predicted, pooled baseline", "measured, pooled baseline", "measured, per agent"]
    return Table("Second moment of the gradient, relative to that of the scores", headers, rows)


def of_fit(analysis: Mapping[str, Any]) -> list[Table]:
    """The fit of the lemma by scenario and over all of them, and the means of bins of the prediction."""
    fits = {name: one["moments"] for name, one in analysis["scenarios"].items() if one["moments"]}
    if not fits:
        return []
    if len(fits) > 1:
        fits["all scenarios"] = analysis["moments"]
    rows = [
        [
            name,
            f"{one['count']:,}",
            *(_plain(one[key], ".3f") for key in ("slope", "r2_log", "median_ratio")),
            shown(one["ratio"], ".2f"),
            *(shown(one[key], ".2f") for key in ("ratio_low", "ratio_high", "identity", "predicted", "covariance")),
            *(shown(one[key], ".2f") for key in ("pooled", "per_agent", "excess")),
            str(one["zeros"]),
        ]
        for name, one in fits.items()
    ]
    headers = ["scenario", "points", "slope", "R² (log)", "median ratio", "ratio", f"factors up to {SPLIT:g}"]
    headers += ["larger ones", "measured / (factor + Δ)", "factor", "Δ", "measured, pooled", "measured, per agent"]
    headers += ["pooled less per agent", "zeros"]
    bins = [
        [
            f"{one['low']:.2f} to {one['high']:.2f}",
            f"{one['count']:,}",
            _plain(one["predicted"], ".2f"),
            *(shown(one["over_seeds"][key], ".2f") for key in ("pooled", "per_agent")),
        ]
        for one in analysis["moments"]["bins"]
    ]
    return [
        Table("Fit of the prediction", headers, rows),
        Table(
            "Means in bins of the prediction", ["predicted", "points", "mean", "measured, pooled", "measured, per agent"], bins
        ),
    ]


def of_failures(analysis: Mapping[str, Any]) -> Table | None:
    rows = [[one["trial"], one["status"], one["error"]] for one in analysis["failures"]]
    return Table("Trials that failed", ["trial", "status", "why"], rows) if rows else None


def _seeds(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['n']} of {estimate['of']}"


def _cell(estimate: Mapping[str, Any], row: Mapping[str, Any], form: str = ".3f") -> str:
    """`shown`, and how many seeds it has only where they aren't those of its row."""
    return shown(estimate, form, seeds=estimate["n"] != row["n"])


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
