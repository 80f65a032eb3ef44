"""Which trials a reproduction has: scenarios x methods x seeds, and the warm starts before them.

A scenario is a team, its tasks and its policies; a method is how advantages are made, and nothing else; `single-agent` is the
same model alone on the same tasks. All methods of a scenario and seed start from the same weights: a trial of method `start`
makes them, once. `scenarios` turns a trial into a configuration, `trial` runs it, `runner` runs all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "grpo",
        "grpo-turns": "grpo-turns",
        "dr-mas": "dr-mas",
        "mean=agent,std=task": "mean=agent,std=task",
        "mean=task,std=agent": "mean=task,std=agent",
        "rloo": "rloo",
        "single-agent": "grpo",
    }
)
"""Method -> `advantage.preset`."""
START = "start"
"""The method of the trials that make the weights which others start from."""
SINGLE = "single-agent"

SCENARIOS: Mapping[str, str] = MappingProxyType(
    {
        "maths-shared": "solver and verifier, one shared policy",
        "maths-separate": "solver and verifier, a policy each",
        "maths-unequal": "solver and verifier, one shared policy; the verifier has its own reward, for its verdicts, up to 5",
        "maths-rescue": "solver, verifier and a fixer who is called when the verifier rejects, a policy each",
        "search-shared": "router, searcher and answerer, one shared policy",
        "search-separate": "router, searcher and answerer, a policy each",
        "search-heterogeneous": "a larger policy for the router, a smaller one for searcher and answerer",
    }
)
"""Scenario -> what it is, in words."""
STARTS: Mapping[str, str] = MappingProxyType({"maths-unequal": "maths-shared"})
"""Scenario -> the one whose start it takes, where that isn't its own."""
ALONE: Mapping[str, str] = MappingProxyType({"maths-shared": "maths-alone", "search-shared": "search-alone"})
"""Scenario -> the start of its single agent; the other scenarios have the same tasks."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a reproduction is. `seed` of the pilot runs by which the settings were found is never among the `seeds`."""

    seeds: int
    steps: int
    """Optimiser updates of every method."""
    moments_every_steps: int
    eval_tasks: int


QUICK = Scale(seeds=3, steps=60, moments_every_steps=10, eval_tasks=32)
WHOLE = Scale(seeds=5, steps=200, moments_every_steps=20, eval_tasks=64)
PILOT_SEED = 100


def scale(*, quick: bool) -> Scale:
    return QUICK if quick else WHOLE


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one method, or the making of its start. `after`: keys of the trials that must be done before.

    Example: Trial("maths-shared", "grpo", 0, after=("maths-shared/start/seed-0",))
    """

    scenario: str
    method: str
    seed: int
    after: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Also its folder below `trials`."""
        return f"{self.scenario}/{self.method}/seed-{self.seed}"


def trials(*, quick: bool) -> list[Trial]:
    """All of them, seed by seed, so that a reproduction that is cut short has whole seeds; starts come before what needs
    them."""
    planned: list[Trial] = []
    for seed in range(scale(quick=quick).seeds):
        starts = [Trial(name, START, seed) for name in [*SCENARIOS, *ALONE.values()] if name not in STARTS]
        planned += starts
        for scenario in SCENARIOS:
            for method in METHODS:
                if method != SINGLE or scenario in ALONE:
                    start = Trial(start_of(scenario, method), START, seed)
                    planned.append(Trial(scenario, method, seed, (start.key,)))
    return planned


def start_of(scenario: str, method: str) -> str:
    """The scenario whose start a trial takes."""
    return ALONE[scenario] if method == SINGLE else STARTS.get(scenario, scenario)
