"""`report.html`: one page about one run, with nothing outside it and no script.

Reads the run folder only (config.json, metrics.jsonl, alarms.jsonl, episodes/, environment.json), so it works for a run that
died and for one made elsewhere. Called at the end of a run and by `drmas report RUN`. Curves are `plot`'s, transcripts
`transcripts`'.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from drmas.errors import DataError
from drmas.telemetry.alarms import Alarm, read_alarms
from drmas.telemetry.environment import read_environment
from drmas.telemetry.markup import pairs, table, text
from drmas.telemetry.names import Metrics, agents_of, failures_of, phases_of, policies_of, seconds_of
from drmas.telemetry.plot import Series, line_chart, number, stacked_chart
from drmas.telemetry.sinks import read_metrics, replace_text
from drmas.telemetry.transcripts import transcripts

TABLE_ROWS = 200
"""Steps in the table, the last ones; metrics.jsonl has them all."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. DataError if the folder has no metrics, or a damaged file."""
    config = _config(run_dir)
    steps, alarms = read_metrics(run_dir), read_alarms(run_dir)
    planned = config.get("train", {}).get("steps")
    name = config.get("name") or run_dir.name
    body = [
        f"<header><h1>{text(name)}</h1><p class='soft'>{_subtitle(config, steps, planned)}</p></header>",
        _tiles(steps),
        "" if alarms is None else f"<section><h2>Alarms</h2>{_alarms(alarms)}</section>",
        f'<section><h2>Curves</h2><div class="charts">{"".join(charts(steps, alarms or ()))}</div></section>',
        f"<section><h2>Steps</h2>{_step_table(steps)}</section>",
    ]
    if html := _transcripts(run_dir, config.get("telemetry", {})):
        body.append(f"<section><h2>Transcripts</h2>{html}</section>")
    body.append(_setup(run_dir, config))
    path = run_dir / "report.html"
    replace_text(path, _page(f"{name} · drmas", "".join(body)))
    return path


def _transcripts(run_dir: Path, telemetry: dict[str, Any]) -> str:
    shown = telemetry.get("transcripts", 4)
    if shown and not telemetry.get("episodes", True):
        return '<p class="soft">The run kept no episodes: telemetry.episodes is false.</p>'
    return transcripts(run_dir, shown) if shown else ""


def _config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.json"
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not JSON ({error}); expected the run's configuration") from error


def _page(title: str, body: str) -> str:
    folder = resources.files("drmas.telemetry")
    sheet = "".join((folder / name).read_text(encoding="utf-8") for name in ("chart.css", "report.css"))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{sheet}</style></head><body><main>{body}</main></body></html>\n"
    )


def _subtitle(config: dict[str, Any], steps: Sequence[Metrics], planned: int | None) -> str:
    done = int(steps[-1]["step"] or 0) if steps else 0
    progress = f"{done} of {planned} steps" if planned else f"{done} steps"
    if planned and done < planned:
        progress += " (ended early, or still running)"
    team = config.get("team", {}).get("name")
    models = [f"{name}: {policy.get('model')}" for name, policy in config.get("policies", {}).items()]
    preset = config.get("advantage", {}).get("preset")
    parts = [progress, team and f"team {team}", ", ".join(models), preset and f"advantage {preset}"]
    return text(" · ".join(part for part in parts if part))


def _tiles(steps: Sequence[Metrics]) -> str:
    """The handful of numbers that one wants first."""
    rewards = [value for metrics in steps if (value := metrics.get("reward/mean")) is not None]
    gaps = [value for metrics in steps if (value := metrics.get("rollout/logprob_gap_max")) is not None]
    norms = [
        (value, policy)
        for policy in policies_of(steps)
        for metrics in steps
        if (value := metrics.get(f"train/{policy}/grad_norm")) is not None
    ]
    seconds = [value for metrics in steps if (value := seconds_of(metrics)) is not None]
    failed = sum(sum(failures_of(metrics).values()) for metrics in steps)
    episodes = sum(metrics.get("rollout/episodes") or 0 for metrics in steps)
    trainer, engine = _peak(steps, "train", "/peak_memory_bytes"), _peak(steps, "engine", "/peak_memory_bytes")
    tiles = [
        ("reward, first → last step", f"{rewards[0]:.3f} → {rewards[-1]:.3f}" if rewards else "-"),
        ("best step's reward", f"{max(rewards):.3f}" if rewards else "-"),
        ("episodes (failed)", f"{episodes:,.0f} ({failed:,})"),
        ("largest gradient norm", number(max(norms)[0]) if norms else "-"),
        ("largest log-prob gap", number(max(gaps)) if gaps else "-"),
        ("seconds in steps", f"{sum(seconds):,.0f}" if seconds else "-"),
        ("peak memory: trainer · engine", f"{trainer} · {engine}" if trainer + engine != "--" else "-"),
    ]
    cells = (f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _peak(steps: Sequence[Metrics], first: str, last: str) -> str:
    """The largest of the metrics `first/...last`, bytes shown in GiB."""
    found = [
        value
        for metrics in steps
        for key, value in metrics.items()
        if value is not None and key.startswith(f"{first}/") and key.endswith(last)
    ]
    return f"{max(found) / 2**30:.1f} GiB" if found else "-"


def _alarms(alarms: Sequence[Alarm]) -> str:
    """One row each, the last ones where there are many."""
    if not alarms:
        return "<p class='soft'>None.</p>"
    note = ""
    if len(alarms) > TABLE_ROWS:
        note = f"<p class='soft'>The last {TABLE_ROWS} of {len(alarms)} alarms; alarms.jsonl has them all.</p>"
    rows = [
        [str(alarm.step), *map(text, (alarm.kind, alarm.agent, alarm.message)), text(", ".join(alarm.rows)) or "-"]
        for alarm in alarms[-TABLE_ROWS:]
    ]
    return note + table(["step", "alarm", "agent", "what", "rows behind it"], rows)


def charts(steps: Sequence[Metrics], alarms: Sequence[Alarm] = ()) -> list[str]:
    """The SVG curves for which the run has a value, with a vertical mark where one of its metrics raised an alarm."""
    x = [float(metrics["step"] or 0) for metrics in steps]
    agents, policies = agents_of(steps), policies_of(steps)

    def of_agents(key: str) -> list[tuple[str, str]]:
        return [(agent, f"rollout/{agent}/{key}") for agent in agents]

    def trained(key: str) -> list[tuple[str, str]]:
        return [(agent, f"train/{policy}/{agent}/{key}") for policy in policies for agent in agents]

    def compared(key: str) -> list[tuple[str, str]]:
        return [(agent, f"advantage/{agent}/{key}") for agent in agents]

    speeds = [("rollout", "rollout/tokens_per_second")]
    speeds += [(f"train {name}", f"train/{name}/tokens_per_second") for name in policies]
    gaps = [(kind, f"rollout/logprob_gap_{kind}") for kind in ("mean", "max")]
    lines = [
        ("Reward", "mean reward", [*of_agents("reward_mean"), ("all episodes", "reward/mean")], None),
        ("Inflation factor", "factor", compared("inflation_factor"), 1.0),
        ("Advantage", "root mean square", of_agents("advantage_rms"), None),
        ("Rows without comparison", "share", compared("uncompared_share"), None),
        ("Gradient norm", "norm", [(name, f"train/{name}/grad_norm") for name in policies], None),
        ("Gradient norm by agent", "norm", trained("grad_norm"), None),
        ("Entropy", "nats per token", trained("entropy"), None),
        ("KL to the sampling policy", "nats per token (k3)", trained("kl_k3"), None),
        ("Clipped above", "share of tokens", trained("clip_high_share"), None),
        ("Log-prob gap", "nats", gaps, None),
        ("Log-prob gap by agent", "mean, nats", of_agents("logprob_gap_mean"), None),
        ("Corrected tokens", "share truncated or masked", trained("mismatch_truncated_share"), None),
        ("Version lag", "versions", of_agents("version_lag_mean"), None),
        ("Response length", "tokens", of_agents("response_tokens_mean"), None),
        ("Truncated turns", "share", of_agents("truncated_share"), None),
        ("Valid turns", "share", of_agents("valid_share"), None),
        ("Throughput", "tokens per second", speeds, None),
    ]
    drawn = []
    for title, y_label, candidates, reference in lines:
        drawable = [Series(name, x, [metrics.get(key) for metrics in steps]) for name, key in candidates]
        present = [one for one in drawable if any(value is not None for value in one.y)]
        if present:
            keys = {key for _, key in candidates}
            marks = sorted({float(alarm.step) for alarm in alarms if alarm.metric in keys} & set(x))
            drawn.append(line_chart(present, title=title, y_label=y_label, reference=reference, marks=marks))
    drawn += [chart for agent in agents if (chart := _moments(steps, agent))]
    phases = [Series(name, x, [metrics.get(f"time/{name}_seconds") for metrics in steps]) for name in phases_of(steps)]
    if any(value for one in phases for value in one.y):
        drawn.append(stacked_chart(phases, title="Time by phase", y_label="seconds"))
    return drawn


def _moments(steps: Sequence[Metrics], agent: str) -> str | None:
    """The second moment of the agent's gradient under each comparison, over the steps that measured it."""
    names = {"pooled": "pooled", "predicted": "predicted", "per_agent": "per agent", "own": "as trained"}
    columns = {name: f"moments/{agent}/{key}" for key, name in names.items()}
    measured = [metrics for metrics in steps if any(metrics.get(key) is not None for key in columns.values())]
    x = [float(metrics["step"] or 0) for metrics in measured]
    drawable = [Series(name, x, [metrics.get(key) for metrics in measured]) for name, key in columns.items()]
    present = [one for one in drawable if any(value is not None for value in one.y)]
    if not present:
        return None
    return line_chart(present, title=f"Second moment of {agent}'s gradient", y_label="by that of its score", reference=1.0)


def _step_table(steps: Sequence[Metrics]) -> str:
    agents, policies = agents_of(steps), policies_of(steps)
    columns = [("step", "step"), ("reward", "reward/mean")]
    columns += [(f"reward {name}", f"rollout/{name}/reward_mean") for name in agents]
    columns += [(f"inflation {name}", f"advantage/{name}/inflation_factor") for name in agents]
    columns += [(f"|grad| {name}", f"train/{name}/grad_norm") for name in policies]
    columns += [("gap mean", "rollout/logprob_gap_mean"), ("gap max", "rollout/logprob_gap_max")]
    columns += [("tok/s rollout", "rollout/tokens_per_second")]
    columns += [(f"tok/s train {name}", f"train/{name}/tokens_per_second") for name in policies]
    rows = []
    for metrics in steps[-TABLE_ROWS:]:
        cells = [_cell(metrics.get(key)) for _, key in columns]
        failed = ", ".join(f"{text(kind)} {count}" for kind, count in failures_of(metrics).items())
        rows.append([*cells, _cell(seconds_of(metrics)), failed or "0"])
    note = ""
    if len(steps) > TABLE_ROWS:
        note = f"<p class='soft'>The last {TABLE_ROWS} of {len(steps)} steps; metrics.jsonl has them all.</p>"
    return note + table([*(name for name, _ in columns), "seconds", "failed"], rows)


def _cell(value: float | None) -> str:
    return '<span class="soft">-</span>' if value is None else number(value)


def _setup(run_dir: Path, config: dict[str, Any]) -> str:
    recorded = read_environment(run_dir) or {"environment": "not recorded"}
    settings = (
        f"<details><summary>config.json</summary><pre>{text(json.dumps(config, indent=2))}</pre></details>" if config else ""
    )
    return f"<section><h2>Set-up</h2>{pairs(recorded)}{settings}</section>"
