"""`drmas plan`: from the command's words to a plan, as text, as JSON, or as a page with plan.json beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from drmas.agents.team import TeamConfig, check_policies, load_team
from drmas.config.load import load
from drmas.config.schema import RunConfig
from drmas.errors import ConfigError
from drmas.planning.assumed import SPREAD
from drmas.planning.cluster import load_cluster
from drmas.planning.growth import CALL_SECONDS, simulate_growth, table
from drmas.planning.measured import read_run
from drmas.planning.page import write_plan
from drmas.planning.plan import make_plan, to_dict
from drmas.planning.published import compare
from drmas.planning.simulation import simulate
from drmas.planning.text import render, render_clusters, render_published
from drmas.planning.types import Workload
from drmas.planning.workload import Source, default_workload, read_table

__all__ = ["render_clusters", "run_plan", "run_published"]

MOST_SPREAD, MOST_PRICE = 5.0, 1e6


def run_plan(
    recipe: str,
    overrides: Sequence[str],
    *,
    cluster: str = "h100-8",
    gpus: int | None = None,
    price: float | None = None,
    calls: str = "",
    prompt: str = "",
    response: str = "",
    spread: float | None = None,
    work: Path | None = None,
    growth: int | None = None,
    output: Path | None = None,
    as_json: bool = False,
) -> str:
    """What the command prints. UserError kinds for what the user can mend.

    `work`: a file with a [workload] table, or a run's folder, in the place of `calls` to `spread`. `growth`: not a plan, but
    what a step takes on 1, 2, 4, ... up to so many GPUs.
    """
    run = load(recipe, overrides)
    team = load_team(run.team)
    check_policies(team, [*run.policies, *run.remotes])
    if price is not None and not 0 <= price <= MOST_PRICE:
        raise ConfigError(f"--price is {price:g}; expected 0 to {MOST_PRICE:g} per device and hour")
    if growth is not None and (output is not None or as_json):
        raise ConfigError("--growth prints its table alone; leave --output and --json out")
    place = load_cluster(cluster, gpus=gpus, price=price)
    words = {"calls": calls, "prompt": prompt, "response": response}
    workload, source = _workload(run, team, work, {name: numbers(f"--{name}", each) for name, each in words.items()}, spread)
    if growth is not None:
        sizes = [2**power for power in range(max(growth, 1).bit_length()) if 2**power <= growth]
        if not sizes:
            raise ConfigError(f"--growth is {growth}; expected the largest number of GPUs, at least 1")
        return table(simulate_growth(run, team, place, workload, source, sizes=sizes))
    roll = partial(simulate, source=source, deterministic=run.rollout.deterministic, call_seconds=CALL_SECONDS)
    plan = make_plan(run, team, place, workload, roll=roll)
    try:
        written = write_plan(plan, output) if output is not None else []
    except OSError as error:
        raise ConfigError(f"--output {output} can't be written: {error}") from error
    if as_json:
        return json.dumps(to_dict(plan), indent=2, allow_nan=False) + "\n"
    return render(plan) + "".join(f"written: {path}\n" for path in written)


def _workload(
    run: RunConfig, team: TeamConfig, work: Path | None, given: Mapping[str, Mapping[str, float]], spread: float | None
) -> tuple[Workload, Source]:
    """What a step's episodes are: of a run, of a file, or from the configuration and what is `given` of it."""
    said = [f"--{name}" for name, values in given.items() if values] + ["--spread"] * (spread is not None)
    if work is not None:
        if said:
            raise ConfigError(f"--workload {work} says it all; leave {', '.join(said)} out")
        return read_run(work, run, team) if work.is_dir() else read_table(work, run, team)
    if spread is not None and not 0 <= spread <= MOST_SPREAD:
        raise ConfigError(f"--spread is {spread:g}; expected 0 to {MOST_SPREAD:g}, the standard deviation of a logarithm")
    return default_workload(run, team, **given, spread=SPREAD if spread is None else spread)


def run_published(*, as_json: bool = False) -> str:
    """The table of published points."""
    found = compare()
    if as_json:
        keys = ("name", "quantity", "published", "predicted", "error", "assumed", "source")
        return json.dumps([{key: getattr(one, key) for key in keys} for one in found], indent=2) + "\n"
    return render_published(found)


def numbers(option: str, words: str) -> dict[str, float]:
    """`400`, for all agents, or `solver=400,verifier=900`; both together where an agent isn't named.

    Example: numbers("--calls", "2,solver=1.5") == {"": 2.0, "solver": 1.5}
    """
    found: dict[str, float] = {}
    for word in filter(None, words.split(",")):
        name, equals, value = word.rpartition("=")
        try:
            found[name.strip() if equals else ""] = float(value)
        except ValueError:
            raise ConfigError(f"{option} {words}: {value!r} is no number; expected N, or AGENT=N,AGENT=N") from None
    return found
