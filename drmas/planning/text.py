"""A plan as text for a terminal, in the order in which users ask: what, does it fit, memory, seconds, tokens, cost, what else.

Also the list of cluster descriptions and the table of published points. Called by `drmas plan`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drmas.planning.cluster import clusters
from drmas.planning.job import stack_of
from drmas.planning.memory import DeviceMemory
from drmas.planning.plan import Plan
from drmas.planning.predict import Prediction, bottleneck
from drmas.planning.propose import Proposal
from drmas.planning.published import QUANTITIES, Compared, summary

WIDTH = 128
GIB = 2**30


def render(plan: Plan) -> str:
    """The whole page."""
    prediction = plan.prediction
    parts = [
        _lines(_what(plan)),
        _memory_table(prediction.fullest),
        _phases_table(prediction),
        _lines(_numbers(plan)),
        _proposals(plan),
        "\n".join(_wrapped("- ", note) for note in plan.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_clusters() -> str:
    """The packaged descriptions."""
    return "".join(f"{name}\n    {about}\n" for name, about in clusters().items())


def render_published(found: Sequence[Compared]) -> str:
    """Every published number beside its prediction, then how far off they are."""
    table = _table("published", "what", ">measured", ">predicted", ">error")
    for one in found:
        table.add_row(one.name, QUANTITIES[one.quantity], *_pair(one), f"{one.error:+.0%}")
    return f"{_drawn(table)}\n\n{_said(found)}\n"


def published_markdown(found: Sequence[Compared]) -> str:
    """The same as a Markdown table, with what was assumed."""
    rows = ["| setting | what | measured | predicted | error | assumed |", "| --- | --- | --- | --- | --- | --- |"]
    for one in found:
        measured, predicted = _pair(one)
        words = (one.name, QUANTITIES[one.quantity], measured, predicted, f"{one.error:+.0%}", one.assumed)
        rows.append(f"| {' | '.join(words)} |")
    return "\n".join([*rows, "", _said(found)]) + "\n"


def _said(found: Sequence[Compared]) -> str:
    numbers = summary(found)
    return (
        f"{numbers['points']:.0f} numbers: median factor {numbers['median_factor']:.2f}, largest "
        f"{numbers['largest_factor']:.3g}, {numbers['within_1.5']:.0%} within a factor of 1.5"
    )


def _pair(one: Compared) -> tuple[str, str]:
    unit = {"run_hours": " h", "train_tokens_per_second": "/s"}.get(one.quantity, " s")
    return f"{_number(one.published)}{unit}", f"{_number(one.predicted)}{unit}"


def _what(plan: Plan) -> dict[str, str]:
    prediction, job = plan.prediction, plan.prediction.job
    cluster, workload = job.cluster, job.workload
    device, fullest = cluster.device, prediction.fullest
    lines = {
        "plan": f"{job.run.name} on {cluster.name}: {cluster.nodes} x {cluster.gpus_per_node} {device.name}, "
        f"{device.memory_bytes / GIB:.0f} GiB each; the run takes {job.gpus}",
        "step": f"{workload.tasks} tasks x {workload.group_size} episodes; "
        + "; ".join(
            f"{agent.name} {agent.calls:.3g} calls of {agent.prompt_tokens:.0f} + {agent.response.moment(1):.0f} tokens"
            for agent in workload.agents
        ),
    }
    for name, policy in job.policies.items():
        lines[f"policy {name}"] = _policy(job.policies[name].config.model, prediction, name)
        lines[f"policy {name}"] += f"; {stack_of(policy, cluster).attention} attention"
    verdict = "yes" if prediction.fits else "NO"
    lines["fits"] = (
        f"{verdict}: {fullest.where} holds {fullest.total / GIB:.1f} of {fullest.capacity / GIB:.1f} GiB, "
        f"{abs(fullest.headroom) / GIB:.1f} {'left' if fullest.headroom >= 0 else 'too many'}"
    )
    if prediction.cramped:
        lines["fits"] += f"; no room for a whole sequence in the KV cache of {', '.join(prediction.cramped)}"
    return lines


def _policy(model: str, prediction: Prediction, name: str) -> str:
    layout, config = prediction.job.policies[name].layout, prediction.job.policies[name].config
    sizes = {"TP": layout.tensor_parallel, "PP": layout.pipeline_parallel, "CP": layout.context_parallel}
    sizes["DP"] = layout.data_parallel
    how = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1 or key in ("TP", "DP"))
    where = "GPUs of their own" if layout.gpus == "own" else "the trainer's GPUs" + (", asleep meanwhile" * layout.sleep)
    if not prediction.job.cluster.gpu:
        where = "the same cores"
    return (
        f"{model}, trainer {how}, recompute {config.recompute}; {layout.replicas} engine(s) of TP "
        f"{layout.engine_tensor_parallel} on {where}"
    )


def _memory_table(device: DeviceMemory) -> str:
    table = _table(f"memory of {device.where}", ">GiB", ">share", title=None)
    for what, size in sorted(device.parts.items(), key=lambda item: -item[1]):
        table.add_row(what, f"{size / GIB:.2f}", f"{size / device.capacity:.0%}")
    table.add_row("in all", f"{device.total / GIB:.2f}", f"{device.total / device.capacity:.0%}", style="bold")
    return _drawn(table)


def _phases_table(prediction: Prediction) -> str:
    phases = prediction.phases
    table = _table("a step", ">seconds", ">share", "of it")
    for name in ("rollout", "score", "train", "sync", "wake", "other"):
        seconds = getattr(phases, name)
        if seconds:
            share = "" if math.isinf(phases.step) else f"{seconds / phases.step:.0%}"
            table.add_row(name, _number(seconds), share, _inside(prediction, name))
    whole = "rollout and training at the same time" if phases.ahead else ""
    table.add_row("step", _number(phases.step), "100%", whole, style="bold")
    return _drawn(table)


def _inside(prediction: Prediction, phase: str) -> str:
    if phase == "rollout":
        rollout = prediction.rollout
        busy = ", ".join(f"{name} {share:.0%}" for name, share in rollout.busy_share.items())
        return f"{rollout.method}; longest episode {_seconds(rollout.longest_episode_seconds)}; engines busy {busy}"
    if phase == "train":
        parts: dict[str, float] = {}
        for training in prediction.updates.values():
            for name in training.__slots__:
                parts[name] = parts.get(name, 0.0) + getattr(training, name)
        shown = sorted(((size, name) for name, size in parts.items() if size > 0.005 * prediction.phases.train), reverse=True)
        return ", ".join(f"{name.replace('_', ' ')} {_number(size)}" for size, name in shown)
    return ""


def _numbers(plan: Plan) -> dict[str, str]:
    prediction = plan.prediction
    lines = {
        "bottleneck": bottleneck(prediction),
        "throughput": f"{_number(prediction.tokens_per_second_per_gpu)} trained tokens/s/GPU; "
        f"{_number(prediction.generated_per_second)} generated tokens/s",
    }
    if prediction.step_cost is not None:
        currency = prediction.job.cluster.currency
        lines["cost"] = f"{_number(prediction.step_cost)} {currency} a step"
        if plan.run_cost is not None:
            hours = plan.prediction.phases.step * plan.steps / 3600
            lines["cost"] += f"; {_number(plan.run_cost)} {currency} and {_number(hours)} h for {plan.steps} steps"
    return lines


def _proposals(plan: Plan) -> str:
    if not plan.prediction.job.cluster.gpu:
        return ""
    proposals, parts = plan.proposals, []
    if proposals.best:
        priced = plan.prediction.step_cost is not None
        columns = ["", ">step s", ">GPUs", "trainer", "engines", ">tokens/s/GPU", ">GiB left", *([">cost of a step"] * priced)]
        table = _table(*columns, title="layouts, the fastest first")
        for number, one in enumerate(proposals.best, start=1):
            cost = [f"{one.prediction.step_cost:.3g} {one.prediction.job.cluster.currency}"] if priced else []
            table.add_row(str(number), *_row(one), *cost)
        parts += [_drawn(table), _orders(proposals.best[0])]
    else:
        parts.append(f"no layout fits on {plan.prediction.job.cluster.name}")
    if proposals.rejected:
        out = _table(">layouts", "fell out by", "the nearest", title=None)
        for one in sorted(proposals.rejected, key=lambda one: -one.count):
            out.add_row(str(one.count), one.what, one.why)
        parts.append(_drawn(out))
    return "\n\n".join(parts)


def _row(one: Proposal) -> tuple[str, ...]:
    prediction, job = one.prediction, one.prediction.job
    kinds: dict[str, list[str]] = {}
    for name, policy in job.policies.items():
        c = policy.config
        sizes = {"TP": c.tensor_parallel, "PP": c.pipeline_parallel, "CP": c.context_parallel}
        how = " ".join(f"{key}{size}" for key, size in sizes.items() if size > 1) or "TP1"
        how += {"none": "", "selective": ", selective", "full": ", full"}[c.recompute]
        kinds.setdefault(f"{how}{', offload' * c.offload_optimizer}", []).append(name)
    trainer = f"{job.world}: " + "; ".join(
        f"{how} ({', '.join(names)})" if len(kinds) > 1 else how for how, names in kinds.items()
    )
    sizes = {f"{p.config.engine.replicas} x TP{p.config.engine.tensor_parallel}": None for p in job.policies.values()}
    return (
        _number(prediction.phases.step),
        str(job.gpus),
        trainer,
        f"{one.mode}: {', '.join(sizes)}",
        _number(prediction.tokens_per_second_per_gpu),
        f"{prediction.fullest.headroom / GIB:.1f}",
    )


def _orders(one: Proposal) -> str:
    """The first proposal as words for a command line, a few per line."""
    words = [f"{key} {value}" for key, value in zip(one.overrides[::2], one.overrides[1::2], strict=True)]
    if not words:
        return "the first is the run's own layout"
    lines, line = [], ""
    for word in words:
        if len(line) + len(word) > WIDTH - 6:
            lines.append(line)
            line = ""
        line += f"{word} "
    nodes = f", by drmas launch with {' '.join(one.node_options)}" if one.engine_nodes else ""
    loss = "; a step ahead has another loss (loss.mismatch)" if "--rollout.max-staleness" in one.overrides else ""
    return f"the first one{nodes}{loss}:\n" + "\n".join(f"  {line.rstrip()}" for line in [*lines, line])


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table


def _drawn(table: Table) -> str:
    for column in table.columns:
        column._cells = [Text(cell) if isinstance(cell, str) else cell for cell in column._cells]
    screen = Console(file=io.StringIO(), width=WIDTH, highlight=False, emoji=False)
    screen.print(table)
    return "\n".join(line.rstrip() for line in screen.file.getvalue().splitlines())


def _lines(lines: Mapping[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(_wrapped(f"{label:<{width}}  ", text) for label, text in lines.items())


def _wrapped(label: str, text: str) -> str:
    rows, row = [], label
    for word in text.split(" "):
        if len(row) + len(word) > WIDTH and row.strip() != label.strip():
            rows.append(row.rstrip())
            row = " " * len(label)
        row += f"{word} "
    return "\n".join([*rows, row.rstrip()])


def _seconds(value: float) -> str:
    return _number(value) if math.isinf(value) else f"{_number(value)} s"


def _number(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
