"""The files and tables of an evaluation, from a result as `drmas eval` writes it."""

from __future__ import annotations

import json

import pytest

from drmas.telemetry.eval_report import markdown, summary, tables, write_eval


def interval(value: float, low: float | None = None, high: float | None = None) -> dict:
    return {"value": value, "low": low, "high": high}


def measure(value: float, *, left_out: int = 0, sources=("",)) -> dict:
    whole = interval(value, value - 0.1, value + 0.1)
    return {
        "tasks": 5,
        "left_out": left_out,
        "micro": whole,
        "macro": whole,
        "sources": dict.fromkeys(sources, interval(value)),
    }


@pytest.fixture
def result() -> dict:
    names = ("reward", "avg@6", *(f"pass@{k}" for k in range(1, 7)))
    agent = {
        **{"calls": 1200, "calls_per_episode": 1.5, "tool_calls": 3, "read_tokens": 54321, "generated_tokens": 999},
        **{"truncated_share": 0.25, "valid_share": None, "seconds_mean": 0.5, "cost": 0.0125},
    }
    solved = {
        **{"episodes": 20, "tasks": 4, "tokens": 40000, "tokens_each": 2000.0, "cost": None, "cost_each": None},
        **{"unpriced": ["main"], "seconds_mean": 1.5, "seconds_p50": 1.25, "seconds_p95": 2.5},
    }
    team = {
        **{"episodes": 30, "failed": {"engine": 2, "tool": 1}, "agents": {"a|b": agent}, "solved": solved},
        "measures": {name: measure(0.5) for name in names},
    }
    return {
        **{"name": "toy", "seed": 5, "data": {"type": "sums"}, "training_data": False, "tasks": 5, "samples": 6},
        **{"temperature": 0.6, "top_p": 0.95, "solved_at": 1.0, "level": 0.95, "seconds": 61.5},
        **{"models": {"main": "runs/toy/export/main"}, "team": team, "without": {}},
    }


def rows(result: dict, title: str) -> dict[str, list[str]]:
    (table,) = (table for table in tables(result) if table.title == title)
    assert all(len(row) == len(table.headers) for row in table.rows)
    return {"": table.headers} | {row[0]: row[1:] for row in table.rows}


def test_scores_are_shown_at_the_powers_of_two_and_at_n_with_their_intervals(result):
    scores = rows(result, "Scores")
    assert list(scores) == ["", "reward", "avg@6", "pass@1", "pass@2", "pass@4", "pass@6"]
    assert scores["pass@2"] == ["0.500 [0.400, 0.600]"]
    assert scores[""] == ["", "all tasks"]


def test_sources_and_tasks_left_out_have_columns_where_there_are_some(result):
    for name in ("reward", "avg@6", "pass@1", "pass@2", "pass@4"):
        result["team"]["measures"][name] = measure(0.5, sources=("x", ""))
    result["team"]["measures"]["pass@6"] = {"tasks": 0, "left_out": 5, "micro": None, "macro": None, "sources": {}}
    scores = rows(result, "Scores")
    assert scores[""] == ["", "all tasks", "mean of sources", "x", "(no source)", "tasks left out"]
    assert scores["pass@4"] == ["0.500 [0.400, 0.600]", "0.500 [0.400, 0.600]", "0.500", "0.500", "0"]
    assert scores["pass@6"] == ["-", "-", "-", "-", "5"]


def test_agents_and_what_a_solution_takes(result):
    assert rows(result, "Agents")["a|b"] == ["1,200", "1.50", "3", "54,321", "999", "0.250", "-", "0.500", "0.0125"]
    lines = summary(result)
    assert lines["tasks"] == "5 of sums, 6 episodes each, seed 5"
    assert lines["sampling"] == "temperature 0.6, top_p 0.95"
    assert lines["failed"] == "3 of 30 episodes (engine 2, tool 1)"
    assert lines["per solution"] == (
        "2,000 tokens, cost - (no price or token counts for main), 1.50 s (median 1.25, 95 % within 2.50)"
    )
    result["training_data"], result["temperature"] = True, None
    assert summary(result)["tasks"].endswith("; the data that the team trains on (eval.data is unset)")
    assert summary(result)["sampling"].startswith("temperature as the agents have it")


def test_ablations_show_the_score_without_the_agents_training_and_the_gain(result):
    def gain(value: float) -> dict:
        return {"micro": interval(value, value - 0.05, value + 0.05)}

    gains = {"avg@6": gain(0.2), "pass@6": gain(-0.1), "reward": {"micro": None}}
    result["without"] = {"solver": {"measures": {name: measure(0.3) for name in gains}, "gain": gains}}
    found = rows(result, "Agents on their base model")
    assert found[""] == ["", "avg@6 without", "gain", "pass@6 without", "gain", "reward without", "gain"]
    assert found["solver"] == [
        *("0.300 [0.200, 0.400]", "+0.200 [+0.150, +0.250]"),
        *("0.300 [0.200, 0.400]", "-0.100 [-0.150, -0.050]"),
        *("0.300 [0.200, 0.400]", "-"),
    ]


def test_the_files_hold_every_number_and_the_tables(result, tmp_path):
    places = write_eval(tmp_path / "new", result)
    assert json.loads(places["numbers"].read_text()) == result
    text = places["tables"].read_text()
    assert text == markdown(result)
    assert "- model main: runs/toy/export/main\n" in text
    assert "| pass@6 | 0.500 [0.400, 0.600] |\n" in text
    assert "| a\\|b | 1,200 |" in text  # a name can't end its cell
    with pytest.raises(ValueError, match="JSON compliant"):
        write_eval(tmp_path, result | {"seconds": float("nan")})
    assert not (tmp_path / "eval.json").exists()
