"""The bandit's numbers as tables and one chart: the theory checked, regimes in which a pooled baseline inflates, learning.

Reads what `drmas.reproduce.bandit.run_bandit` returns, as it stands in bandit.json. Called by `drmas.reproduce.page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drmas.reproduce.words import shown
from drmas.telemetry.eval_report import Table
from drmas.telemetry.plot import Points, scatter_chart

SIZE = "8"
"""Episodes per group of the regimes' table, as in the trials."""
COLOURS = {"dr-mas": 0, "grpo": 1, "grpo-turns": 2}


def tables(bandit: Mapping[str, Any]) -> list[Table]:
    """The check, the factor's growth, the regimes with a row per team and agent; then learning, in one table and by team."""
    parts = (("check", _check), ("growth", _growth), ("regimes", _regimes))
    learning = bandit.get("learning", [])
    found = [make(bandit[name]) for name, make in parts if bandit.get(name)]
    return found + ([_gains(learning)] if learning else []) + [_learning(one) for one in learning]


def descriptions(bandit: Mapping[str, Any]) -> dict[str, str]:
    """Team -> what it is, of the regimes and of those that learn."""
    return {one["name"]: one["words"] for part in ("regimes", "learning") for one in bandit.get(part, [])}


def chart(bandit: Mapping[str, Any]) -> str:
    """Second moments that were sampled over the exact ones, of every regime, agent and size that has both."""
    clouds = []
    for rule, colour in COLOURS.items():
        cells = [
            cell
            for regime in bandit.get("regimes", [])
            for agent in regime["agents"]
            for cell in agent["rules"].get(rule, {}).get("sizes", {}).values()
            if cell.get("exact") and cell.get("sampled") is not None
        ]
        if cells:
            x, y = [cell["exact"]["second"] for cell in cells], [cell["sampled"] for cell in cells]
            clouds.append(Points(rule, x, y, colour, large=True))
    if not clouds:
        return ""
    return scatter_chart(clouds, title="Second moment in groups of N", x_label="exact", y_label="sampled", reference=1.0)


def exact_points(bandit: Mapping[str, Any]) -> Points:
    """Each agent of each regime: the second moment that was sampled in the largest groups, over the exact factor."""
    x, y = [], []
    for regime in bandit.get("regimes", []):
        for agent in regime["agents"]:
            sizes = agent["rules"].get("grpo", {}).get("sizes", {})
            if sizes:
                x.append(agent["inflation"])
                y.append(sizes[max(sizes, key=int)].get("sampled"))
    return Points("bandit, pooled", x, y, 2, cross=True, large=True)


def sentences(bandit: Mapping[str, Any]) -> list[str]:
    """What the bandit says, in a few words: the theory's check, and where dr-mas gains and loses over grpo."""
    lines = []
    if found := bandit.get("check"):
        lines.append(
            f"Closed-form bandit, theory: Lemma 4.2 holds to {found['lemma']:.0e}, and {found['within_2']:.0%} of "
            f"{found['cells']} "
            "sampled second moments are within 2 standard errors of the exact ones."
        )
    cells = [
        (one["name"], variant, variant["rules"]["dr-mas"]["own"]["difference"])
        for one in bandit.get("learning", [])
        for variant in one["variants"]
        if "dr-mas" in variant["rules"]
    ]
    known = [cell for cell in cells if cell[2]["low"] is not None]
    if known:
        gains, losses = sum(own["low"] > 0 for _, _, own in known), sum(own["high"] < 0 for _, _, own in known)
        teams = len({name for name, _, _ in known})
        worst, best = (pick(known, key=lambda cell: cell[2]["value"]) for pick in (min, max))
        lines.append(
            f"Closed-form bandit, learning: dr-mas less grpo, each at its own rate, is above zero in {gains} and below zero in "
            f"{losses} of {len(known)} pairs of a team ({teams}) and an optimiser; the worst is {_told(worst)}, the best "
            f"{_told(best)}."
        )
    return lines


def _told(cell: tuple[str, Mapping[str, Any], Mapping[str, Any]]) -> str:
    name, variant, own = cell
    return f"{shown(own, '+.3f')} ({name}, {_variant(variant)})"


def _variant(variant: Mapping[str, Any]) -> str:
    return variant["optimiser"] + ("" if variant["clip"] is None else f", clipped at {variant['clip']:g}")


def _gains(learning: Sequence[Mapping[str, Any]]) -> Table:
    """Team down, optimiser across: the final result under dr-mas less that under grpo, each at its own learning rate."""
    variants = list(dict.fromkeys(_variant(variant) for one in learning for variant in one["variants"]))
    rows = []
    for one in learning:
        own = {_variant(variant): variant["rules"].get("dr-mas") for variant in one["variants"]}
        cells = [shown(own[name]["own"]["difference"], "+.3f") if own.get(name) else "-" for name in variants]
        rows.append([one["name"], f"{one['size']}", _number(max(one["inflation"].values())), *cells])
    return Table(
        "Learning: dr-mas less grpo, final result, each at its own rate", ["team", "N", "largest factor", *variants], rows
    )


def _check(found: Mapping[str, Any]) -> Table:
    rows = [
        ["largest relative error of Lemma 4.2", f"{found['lemma']:.1e}"],
        ["Proposition 4.3 holds everywhere", "yes" if found["proposition"] else "no"],
        ["sampled second moments with an exact one beside them", f"{found['cells']:,}"],
        ["of them within 2 standard errors", f"{found['within_2']:.1%}"],
        ["of them within 4 standard errors", f"{found['within_4']:.1%}"],
    ]
    for size, one in found["bound"].items():
        rows.append([f"largest A² under grpo in groups of {size}, and its bound", f"{one['largest']:.3f}, {one['bound']:.3f}"])
    return Table("The theory, checked on these teams", ["what", "number"], rows)


def _growth(found: Sequence[Mapping[str, Any]]) -> Table:
    sizes = list(found[0]["finite"])
    rows = []
    for one in found:
        values = [one[key] for key in ("own", "distance", "spread", "second")]
        values += [*(one["finite"][size] for size in sizes), one["own_second"]]
        rows.append([f"{one['success']:g}", *map(_number, values)])
    headers = ["team's success", "the agent's own", "(μₖ - μ)² / σ²", "σₖ² / σ²", "pooled, all episodes"]
    headers += [f"pooled, N = {size}" for size in sizes]
    return Table(
        "Second moment of an agent that is called after failures, pooled over all episodes and in groups of N",
        [*headers, "per agent, all episodes"],
        rows,
    )


def _regimes(regimes: Sequence[Mapping[str, Any]]) -> Table:
    rules = [rule for rule in COLOURS if any(rule in agent["rules"] for one in regimes for agent in one["agents"])]
    rows = []
    for one in regimes:
        for agent in one["agents"]:
            row = [f"{one['name']}: {agent['agent']}", *(f"{agent[key]:.2f}" for key in ("calls", "own_mean", "mean"))]
            row.append(_number(agent["inflation"]))
            for rule in rules:
                cell = agent["rules"].get(rule, {}).get("sizes", {}).get(SIZE, {})
                row.append(_number((cell.get("exact") or {}).get("second")))
                sampled = cell.get("sampled")
                row.append("-" if sampled is None else f"{sampled:.3f} ± {cell['stderr']:.3f}")
            rows.append(row)
    headers = ["team: agent", "calls", "own mean", "mean of all", "factor"]
    for rule in rules:
        headers += [f"{rule}, exact", "sampled"]
    return Table(
        f"Second moments, relative to that of the scores, in groups of {SIZE} (sampled: ± its standard error)", headers, rows
    )


def _learning(one: Mapping[str, Any]) -> Table:
    """The final result less grpo's, rates tuned for each rule apart, under each optimiser and clipping."""
    variants = one["variants"]
    rules = list(dict.fromkeys(rule for variant in variants for rule in variant["rules"]))
    headers, rows = ["rule"], []
    for variant in variants:
        headers += [f"{_variant(variant)}: final", "less grpo, shared rate", "less grpo, own rate", "spikes"]
    for rule in rules:
        row = [rule]
        for variant in variants:
            cell = variant["rules"].get(rule)
            if cell is None:
                row += ["-"] * 4
                continue
            shares = [spike["share"] for spike in cell["spikes"].values() if spike["share"] is not None]
            row.append(shown(cell["own"]["final"]))
            row += ["-", "-"] if rule == "grpo" else [shown(cell[key]["difference"], "+.3f") for key in ("shared", "own")]
            row.append(f"{max(shares):.3f}" if shares else "-")
        rows.append(row)
    return Table(f"Learning: {one['name']}", headers, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
