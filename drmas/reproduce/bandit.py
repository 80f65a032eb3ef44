"""The theory of the method on teams that can be enumerated: identities, regimes, and what training makes of them.

    python -m drmas.reproduce.bandit [--quick] [--json FILE]

`run_bandit` is what the report draws; it needs no engine and no model. Its parts: `check`, whether Lemma 4.2 and Proposition
4.3 of Dr. MAS (arXiv 2602.08847) hold of the product's own advantages; `growth`, the factor of an agent that speaks after
failures as the team gets better, and what is left of it in finite groups; `regimes` and `learning`, as
`drmas.reproduce.regimes.measure` and `drmas.reproduce.bandit_training.compare` have them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drmas.reproduce.bandit_moments import binary_factor, population
from drmas.reproduce.bandit_training import compare, scenarios
from drmas.reproduce.regimes import RULES, SIZES, at_success, measure, regimes

GROWTH = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 0.999)
"""Success of the team in the table of the factor's growth."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is sampled: by episodes per group, the groups of a regime; seeds and steps of training."""

    groups: dict[int, int]
    seeds: int
    tuning_seeds: int
    steps: int


WHOLE = Effort(groups={4: 800, 8: 800, 64: 60}, seeds=200, tuning_seeds=20, steps=200)
QUICK = Effort(groups={4: 200, 8: 200, 64: 20}, seeds=24, tuning_seeds=6, steps=40)


def run_bandit(quick: bool = False) -> dict[str, Any]:
    """{"quick", "seeds", "steps", "check", "growth", "regimes", "learning"}, JSON-able and the same in every call.

    Some two minutes on one core, with `quick` a quarter of one. Scenarios with groups of 32 have half the seeds.
    """
    effort = QUICK if quick else WHOLE
    tables = [measure(regime, effort.groups, seed=1000 + index) for index, regime in enumerate(regimes())]
    return {
        "quick": quick,
        "seeds": effort.seeds,
        "steps": effort.steps,
        "check": check(tables),
        "growth": growth(),
        "regimes": tables,
        "learning": [
            compare(
                scenario,
                steps=effort.steps,
                seeds=effort.seeds if scenario.size <= 8 else effort.seeds // 2,
                tuning_seeds=effort.tuning_seeds,
            )
            for scenario in scenarios()
        ],
    }


def check(tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the regimes and the tables made of them: how far theory and measurement are apart.

    {"lemma": largest relative error of Lemma 4.2, "proposition": whether E|g|^2 is everywhere between the factor times the
    smallest and the largest |z|^2 of an action, "cells": sampled second moments that have an exact one beside them, "within_2"
    and "within_4": share of those at most 2 and 4 standard errors (the exact ones) from it, "bound": by N, the largest A^2 of
    grpo in groups of N, and (N - 1)^2 / N, which it can't pass}
    """
    errors, holds = [], []
    for regime in regimes():
        squares = {}
        for k, agent in enumerate(regime.team.agents):
            pi = regime.team.episodes.policies(regime.logits)[k, : regime.team.actions[agent]]
            squares[agent] = 1.0 - 2.0 * pi + (pi**2).sum()
        for rule in RULES.values():
            for agent, moments in population(regime.team, regime.logits, rule).items():
                errors.append(abs(moments.second - moments.lemma) / moments.second)
                low, high = squares[agent].min() * moments.factor, squares[agent].max() * moments.factor
                holds.append(low * (1 - 1e-12) <= moments.second <= high * (1 + 1e-12))
    far = [abs(each["sampled"] - each["exact"]["second"]) * math.sqrt(each["groups"]) for each in _compared(tables)]
    found = np.array(far) / [each["exact"]["deviation"] for each in _compared(tables)]
    largest = {
        size: max(
            cell["exact"]["largest"]
            for table in tables
            for agent in table["agents"]
            for number, cell in agent["rules"]["grpo"]["sizes"].items()
            if number == str(size) and cell["exact"]
        )
        for size in SIZES[:2]
    }
    return {
        "lemma": max(errors),
        "proposition": all(holds),
        "cells": len(found),
        "within_2": float((found <= 2).mean()),
        "within_4": float((found <= 4).mean()),
        "bound": {str(size): {"largest": value, "bound": (size - 1) ** 2 / size} for size, value in largest.items()},
    }


def growth() -> list[dict[str, Any]]:
    """The fixer of a rescue loop whose solver gets better; its policy is uniform, so that |z|^2 is constant and Delta is 0.

    [{"success", "own": p_k, "distance": (mu_k - mu)^2 / sigma^2, "spread": sigma_k^2 / sigma^2, "second": E|g|^2 / E|z|^2 under
    grpo, which is their sum exactly, "own_second": under dr-mas, "finite": {N: that of grpo in groups of N}}]
    """
    rows = []
    for success in GROWTH:
        team = at_success(success, (0.4, 0.15, 0.05))
        pooled = population(team, team.logits(), RULES["grpo"])["fixer"]
        alone = population(team, team.logits(), RULES["dr-mas"])["fixer"]
        rows.append(
            {
                "success": success,
                "own": pooled.own_mean,
                "distance": pooled.row_mean**2,
                "spread": pooled.own_std**2 / pooled.std**2,
                "second": pooled.second / pooled.score,
                "own_second": alone.second / alone.score,
                "finite": {str(size): binary_factor(success, pooled.own_mean, size) for size in SIZES},
            }
        )
    return rows


def as_text(results: dict[str, Any]) -> str:
    """The tables of `run_bandit`'s results."""
    return "\n".join(
        [*_check_lines(results["check"]), *_growth_lines(results["growth"]), *_regime_lines(results["regimes"])]
    ) + ("\n" + "\n".join(line for table in results["learning"] for line in _training_lines(table)) + "\n")


def _compared(tables: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for table in tables:
        for agent in table["agents"]:
            for rule in agent["rules"].values():
                yield from (cell for cell in rule["sizes"].values() if cell["exact"] and "sampled" in cell)


def _check_lines(found: dict[str, Any]) -> list[str]:
    bounds = ", ".join(f"{each['largest']:.3f} of {each['bound']:.3f} at N = {size}" for size, each in found["bound"].items())
    verdict = "holds" if found["proposition"] else "FAILS"
    return [
        f"Lemma 4.2: largest relative error {found['lemma']:.1e}; Proposition 4.3 {verdict}",
        f"sampled through the product's advantages: of {found['cells']} second moments {found['within_2']:.1%} are within 2 "
        f"standard errors of the exact one, {found['within_4']:.1%} within 4",
        f"largest A^2 under grpo by its bound (N - 1)^2 / N: {bounds}",
    ]


def _growth_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    header = ["success", "own success", "E|g|^2/E|z|^2", *(f"N = {size}" for size in rows[0]["finite"]), "per agent"]
    cells = [
        [f"{row['success']:g}", *map(_number, [row["own"], row["second"], *row["finite"].values(), row["own_second"]])]
        for row in rows
    ]
    return [
        "",
        "A fixer that speaks after failures, pooled statistics of all episodes and of groups of N",
        *_table(header, cells),
    ]


def _regime_lines(tables: Sequence[dict[str, Any]]) -> list[str]:
    header = [
        "agent",
        "rule",
        "factor",
        "E|g|^2/E|z|^2",
        "N = 8",
        "sampled",
        "+-",
        "row sum",
        "zero rows",
        "groups needed",
        "N = 64",
    ]
    lines = []
    for table in tables:
        cells = []
        for agent in table["agents"]:
            for name, rule in agent["rules"].items():
                eight, many = rule["sizes"]["8"], rule["sizes"]["64"]
                exact = eight["exact"] or {}
                numbers = [rule["factor"], rule["second"], exact.get("second"), eight.get("sampled"), eight.get("stderr")]
                numbers += [exact.get("row_sum"), exact.get("zero_share"), exact.get("groups_needed"), many.get("sampled")]
                cells.append([agent["agent"], name, *map(_number, numbers)])
        factors = ", ".join(f"{agent['agent']} {agent['inflation']:.3f}" for agent in table["agents"])
        lines += ["", f"{table['name']}: {table['words']}", f"factor of Lemma 4.2: {factors}", *_table(header, cells)]
    return lines


def _training_lines(table: dict[str, Any]) -> list[str]:
    factors = ", ".join(f"{agent} {factor:.2f}" for agent, factor in table["inflation"].items())
    lines = ["", f"training, {table['name']}: {table['words']}"]
    lines.append(
        f"expected reward {table['start']:.3f} at the start, {table['best']:.3f} at best; factor at the start: {factors}"
    )
    for variant in table["variants"]:
        loud = max(table["inflation"], key=lambda agent: table["inflation"][agent])
        clip = f"norms clipped at {variant['clip']:g}" if variant["clip"] else "norms not clipped"
        header = [f"{variant['optimiser']}, {clip}", f"at {variant['shared_rate']:g}", "- grpo", "own rate", "final", "- grpo"]
        header += [f"spikes of {loud}", "largest", "largest norm"]
        cells = []
        for name, rule in variant["rules"].items():
            shared, own, spike = rule["shared"], rule["own"], rule["spikes"][loud]
            cells.append([name, _estimate(shared["final"]), _estimate(shared["difference"]), f"{own['rate']:g}"])
            cells[-1] += [
                _estimate(own["final"]),
                _estimate(own["difference"]),
                _share(spike["share"]),
                _number(spike["largest"]),
            ]
            cells[-1].append(_number(spike["norm"]["value"]))
        lines += _table(header, cells)
    return lines


def _estimate(found: dict[str, Any]) -> str:
    return f"{found['value']:.3f} +- {found['high'] - found['value']:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.3f}" if abs(value) < 1000 else f"{value:.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m drmas.reproduce.bandit", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer seeds and samples")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args(arguments)
    results = run_bandit(options.quick)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    sys.stdout.write(as_text(results))


if __name__ == "__main__":
    main()
