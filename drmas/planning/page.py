"""A plan as one HTML page with nothing outside it and no script: tables, the phases as bars, and what longer answers do.

Called by `drmas plan --output`, which writes plan.json beside it.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path

from drmas.planning.plan import Plan, to_dict
from drmas.planning.predict import bottleneck
from drmas.planning.propose import Proposal
from drmas.planning.text import GIB
from drmas.telemetry.markup import pairs, table, text
from drmas.telemetry.plot import Series, line_chart, number, stacked_chart
from drmas.telemetry.sinks import replace_text

PHASES = ("rollout", "score", "train", "sync", "wake", "other")


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """Write plan.json and plan.html into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "plan.json", json.dumps(to_dict(plan), indent=1, allow_nan=False) + "\n")
    replace_text(folder / "plan.html", document(plan))
    return [folder / "plan.json", folder / "plan.html"]


def document(plan: Plan) -> str:
    """The whole page."""
    name = text(plan.prediction.job.run.name)
    sheets = [resources.files("drmas.telemetry") / sheet for sheet in ("report.css", "chart.css")]
    sheets.append(resources.files("drmas.planning") / "page.css")
    styles = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Plan of {name}</title>'
    body = "".join(f"<section>{part}</section>" for part in _sections(plan))
    return f'<!doctype html><html lang="en"><head>{head}<style>{styles}</style></head><body><main>{body}</main></body></html>\n'


def _sections(plan: Plan) -> list[str]:
    prediction, job = plan.prediction, plan.prediction.job
    fullest = prediction.fullest
    summary = {
        "cluster": f"{job.cluster.name}: {job.cluster.nodes} x {job.cluster.gpus_per_node} {job.cluster.device.name}",
        "GPUs": job.gpus,
        "fits": "yes" if prediction.fits else "no",
        "step": f"{number(prediction.phases.step)} s" if math.isfinite(prediction.phases.step) else "never ends",
        "bottleneck": bottleneck(prediction),
        "trained tokens/s/GPU": number(prediction.tokens_per_second_per_gpu),
    }
    if prediction.step_cost is not None:
        summary["cost of a step"] = f"{number(prediction.step_cost)} {job.cluster.currency}"
    memory = [[text(what), f"{size / GIB:.2f}", f"{size / fullest.capacity:.0%}"] for what, size in fullest.parts.items()]
    memory.append(["in all", f"{fullest.total / GIB:.2f}", f"{fullest.total / fullest.capacity:.0%}"])
    return [
        f"<h1>Plan of {text(job.run.name)}</h1>{pairs(summary)}",
        f"<h2>Memory of {text(fullest.where)}</h2>{table(['part', 'GiB', 'share'], memory)}",
        f"<h2>A step</h2>{_bars(plan)}",
        f"<h2>Longer answers</h2>{_growth(plan)}<p>By the quick bound, which is below what a simulation gives.</p>",
        f"<h2>Layouts</h2>{_proposals(plan)}",
        f"<h2>What was assumed</h2><ul>{''.join(f'<li>{text(note)}</li>' for note in plan.notes)}</ul>",
    ]


def _drawn(seconds: float) -> float | None:
    """A bar or a point; none for what never ends."""
    return seconds if math.isfinite(seconds) else None


def _bars(plan: Plan) -> str:
    """The run's own layout as bar 0, the proposals behind it."""
    every = [plan.prediction, *(one.prediction for one in plan.proposals.best)]
    places = list(range(len(every)))
    series = [Series(phase, places, [_drawn(getattr(one.phases, phase)) for one in every]) for phase in PHASES]
    chart = stacked_chart(series, title="Seconds by phase", y_label="seconds", x_label="layout (0: the run's own)")
    if any(one.phases.ahead for one in every):
        chart += "<p>One step ahead, rollout and training run at the same time: the step is shorter than its bar.</p>"
    return chart


def _growth(plan: Plan) -> str:
    means = [mean for mean, _ in plan.growth]
    series = [
        Series(name, means, [_drawn(getattr(one.phases, name)) for _, one in plan.growth])
        for name in ("rollout", "train", "step")
    ]
    return line_chart(series, title="Seconds by mean response", y_label="seconds", x_label="mean response, tokens")


def _launched(one: Proposal) -> list[str]:
    return [text(f"drmas launch {' '.join(one.node_options)}")] if one.engine_nodes else []


def _proposals(plan: Plan) -> str:
    rows = []
    for place, one in enumerate(plan.proposals.best, start=1):
        words = zip(one.overrides[::2], one.overrides[1::2], strict=True)
        rows.append(
            [
                str(place),
                number(one.prediction.phases.step),
                str(one.prediction.job.gpus),
                text(one.mode),
                f"{one.prediction.fullest.headroom / GIB:.1f}",
                _folded([*(text(f"{key} {value}") for key, value in words), *_launched(one)]),
            ]
        )
    out = [[str(one.count), text(one.what), text(one.why)] for one in plan.proposals.rejected]
    found = "<p>No layout fits.</p>"
    if rows:
        found = f'<div class="layouts">{table(["", "step s", "GPUs", "engines", "GiB left", "settings"], rows)}</div>'
    return found + (f'<div class="fallen">{table(["layouts", "fell out by", "the nearest"], out)}</div>' if out else "")


def _folded(lines: list[str]) -> str:
    """Lines of HTML that a reader may unfold."""
    if not lines:
        return "the run's own"
    return f"<details><summary>{len(lines)} options</summary>{'<br>'.join(lines)}</details>"
