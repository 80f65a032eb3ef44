"""What `drmas eval` leaves and prints: `eval.json` with every number, `eval.md` and the terminal with the main ones as tables.

Reads nothing but the result's dictionary (`EvalResult.to_dict`), so that an `eval.json` from elsewhere gives the same tables.
An interval is written as `0.412 [0.361, 0.466]`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drmas.telemetry.sinks import replace_text

FILE = "eval.json"


@dataclass(frozen=True)
class Table:
    """`rows` are cells of plain text, the first of a row its name."""

    title: str
    headers: list[str]
    rows: list[list[str]]


def write_eval(folder: Path, result: dict[str, Any]) -> dict[str, Path]:
    """Write `eval.json` and `eval.md`, each whole or not at all; where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {"numbers": folder / FILE, "tables": folder / "eval.md"}
    replace_text(places["numbers"], json.dumps(result, indent=2, allow_nan=False) + "\n")
    replace_text(places["tables"], markdown(result))
    return places


def markdown(result: dict[str, Any]) -> str:
    """The summary and the tables as a document."""
    parts = [f"# Evaluation of {_cell(result['name'])}\n"]
    parts += [f"- {label}: {_cell(value)}\n" for label, value in summary(result).items()]
    for table in tables(result):
        lines = [table.headers, ["---", *["---:"] * (len(table.headers) - 1)], *table.rows]
        parts.append(f"\n## {table.title}\n\n" + "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines))
    return "".join(parts)


def summary(result: dict[str, Any]) -> dict[str, str]:
    """Label -> text: what was evaluated, on what, how it sampled, what failed, what a solution takes."""
    team, solved, data = result["team"], result["team"]["solved"], result["data"]
    lines = {f"model {policy}": origin for policy, origin in result.get("models", {}).items()}
    lines["tasks"] = f"{result['tasks']:,} of {data['type']}, {result['samples']} episodes each, seed {result['seed']}"
    if result["training_data"]:
        lines["tasks"] += "; the data that the team trains on (eval.data is unset)"
    heat = result["temperature"]
    lines["sampling"] = f"temperature {'as the agents have it' if heat is None else f'{heat:g}'}, top_p {result['top_p']:g}"
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in team["failed"].items())
    lines["failed"] = f"{sum(team['failed'].values()):,} of {team['episodes']:,} episodes" + (f" ({kinds})" if kinds else "")
    lines["solved"] = (
        f"{solved['episodes']:,} episodes of {solved['tasks']:,} tasks: a reward of {result['solved_at']:g} or more"
    )
    lines["per solution"] = (
        f"{_number(solved['tokens_each'], ',.0f')} tokens, cost {_number(solved['cost_each'], '.3g')}"
        + (f" (no price or token counts for {', '.join(solved['unpriced'])})" if solved["unpriced"] else "")
        + f", {_number(solved['seconds_mean'], '.2f')} s (median {_number(solved['seconds_p50'], '.2f')}, "
        f"95 % within {_number(solved['seconds_p95'], '.2f')})"
    )
    lines["seconds"] = f"{result['seconds']:.1f}"
    return lines


def tables(result: dict[str, Any]) -> list[Table]:
    """Scores, agents, and one table per measure of what the ablated agents' training is worth."""
    found = [_scores(result), _agents(result)]
    if result["without"]:
        found.append(_gains(result))
    return found


def _scores(result: dict[str, Any]) -> Table:
    measures = {name: each for name, each in result["team"]["measures"].items() if name in _shown(result)}
    sources = list(next(iter(measures.values()))["sources"])
    several = len(sources) > 1
    headers = ["", "all tasks", *(["mean of sources", *(name or "(no source)" for name in sources)] if several else [])]
    left_out = any(each["left_out"] for each in measures.values())
    rows = []
    for name, each in measures.items():
        columns = [each["micro"], *([each["macro"], *(each["sources"].get(source) for source in sources)] if several else [])]
        rows.append([name, *map(_interval, columns), *([f"{each['left_out']:,}"] if left_out else [])])
    return Table("Scores", [*headers, *(["tasks left out"] if left_out else [])], rows)


def _agents(result: dict[str, Any]) -> Table:
    headers = ["", "calls", "per episode", "tools", "read", "generated", "truncated", "valid", "seconds", "cost"]
    rows = [
        [
            agent,
            f"{each['calls']:,}",
            _number(each["calls_per_episode"], ".2f"),
            f"{each['tool_calls']:,}",
            f"{each['read_tokens']:,}",
            f"{each['generated_tokens']:,}",
            _number(each["truncated_share"], ".3f"),
            _number(each["valid_share"], ".3f"),
            _number(each["seconds_mean"], ".3f"),
            _number(each["cost"], ".3g"),
        ]
        for agent, each in result["team"]["agents"].items()
    ]
    return Table("Agents", headers, rows)


def _gains(result: dict[str, Any]) -> Table:
    """Per ablated agent and measure: the score without its training, and what the whole team has more (paired)."""
    shown = [f"avg@{result['samples']}", f"pass@{result['samples']}", "reward"]
    headers = ["", *(title for name in shown for title in (f"{name} without", "gain"))]
    rows = []
    for agent, each in result["without"].items():
        pairs = [(each["measures"][name]["micro"], each["gain"][name]["micro"]) for name in shown]
        rows.append([agent, *(cell for score, gain in pairs for cell in (_interval(score), _interval(gain, sign="+")))])
    return Table("Agents on their base model", headers, rows)


def _shown(result: dict[str, Any]) -> list[str]:
    """reward, avg@n, and pass@k for the powers of two and n."""
    samples = result["samples"]
    ks = sorted({*(2**power for power in range(samples.bit_length())), samples})
    return ["reward", f"avg@{samples}", *(f"pass@{k}" for k in ks)]


def _interval(interval: dict[str, float | None] | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    value = f"{interval['value']:{sign}.3f}"
    return value if interval["low"] is None else f"{value} [{interval['low']:{sign}.3f}, {interval['high']:{sign}.3f}]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _cell(text: Any) -> str:
    """On one line, and without what would end a cell."""
    return " ".join(str(text).split()).replace("|", "\\|")
