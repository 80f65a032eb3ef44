"""Made-up results of a reproduction, by a seed: what the report is to say of them is known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

METHODS = ("grpo", "grpo-turns", "dr-mas", "mean=agent,std=task", "mean=task,std=agent", "rloo", "single-agent")
SCENARIOS = {"maths-shared": ("solver", "verifier"), "search-separate": ("router", "searcher", "answerer")}
STEPS = 60


def trial(
    scenario: str,
    method: str,
    seed: int,
    *,
    gain: float = 0.0,
    spikes: bool = False,
    factor: float = 1.6,
    per_agent: float = 1.0,
    pushed: bool | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """A result whose reward ends near 0.5 + `gain`, with a gradient spike every tenth step if asked, but for
    the last step of odd seeds.

    `factor`: the mean predicted second moment; the measured one is equal but for a few percent. `per_agent`: that under the
    agent's own statistics. `pushed`: whether an agent's advantages don't sum to zero (by default where the method is pooled).
    """
    draw = random.Random(f"{scenario} {method} {seed}")
    base = random.Random(f"{scenario} {seed}").uniform(-0.03, 0.03)
    agents = ("solo",) if method == "single-agent" else SCENARIOS.get(scenario, ("solver", "verifier"))
    pushed = method in ("grpo", "rloo", "mean=task,std=agent") if pushed is None else pushed
    end = 0.5 + gain + base
    reward = [0.2 + (end - 0.2) * min(1.0, step / (0.8 * steps)) + draw.gauss(0, 0.005) for step in range(steps)]
    norms = {agent: [draw.uniform(0.9, 1.1) for _ in range(steps)] for agent in agents}
    if spikes:
        for agent in agents:
            for step in range(9, steps - seed % 2, 10):
                norms[agent][step] *= draw.uniform(4, 7)
    moments = []
    for step in range(0, steps, 10):
        for agent in agents:
            predicted = math.exp(draw.gauss(math.log(factor), 0.3))
            measured = predicted * math.exp(draw.gauss(0, 0.05))
            own = per_agent * math.exp(draw.gauss(0, 0.02))
            one = {"step": step, "agent": agent, "rows": 32, "score": draw.uniform(1, 2), "predicted": predicted}
            one |= {"pooled": measured, "per_agent": own, "own": own if method == "dr-mas" else measured}
            one["covariance"] = measured - predicted
            moments.append(one)

    def scores(level: float) -> dict[str, list[float]]:
        avg = [min(1.0, max(0.0, level + draw.gauss(0, 0.01))) for _ in range(20)]
        return {"avg": avg, "pass": [float(value > 0.045 * place) for place, value in enumerate(avg)]}

    return {
        "scenario": scenario,
        "method": method,
        "seed": seed,
        "status": "ok",
        "error": None,
        "steps": steps,
        "reward": reward,
        "grad_norm": norms,
        "inflation": {agent: [draw.uniform(0.8, 2.4) for _ in range(steps)] for agent in agents},
        "row_sum": {agent: [draw.gauss(3, 1) if pushed else 1e-6 for _ in range(steps)] for agent in agents},
        "rows": {agent: [64.0] * steps for agent in agents},
        "calls": {agent: [1.5] * steps for agent in agents},
        "entropy": {agent: [0.7] * steps for agent in agents},
        "valid": {agent: [0.95] * steps for agent in agents},
        "uncompared": {agent: [0.125] * steps for agent in agents},
        "skipped": 0,
        "logprob_gap_max": 1e-6,
        "moments": moments,
        "eval": {"before": scores(0.2), "after": scores(end)},
    }


def crashed(scenario: str, method: str, seed: int, error: str) -> dict[str, Any]:
    return {"scenario": scenario, "method": method, "seed": seed, "status": "crashed", "error": error}


def reproduction(winner: str = "dr-mas", seeds: int = 5, scenarios=tuple(SCENARIOS), methods=METHODS) -> list[dict[str, Any]]:
    """Trials in which `winner`, "dr-mas" or "grpo", is better by 0.1 and the other one spikes."""
    gains = {winner: 0.1, "mean=task,std=agent": 0.08, "mean=agent,std=task": 0.02, "single-agent": -0.1}
    loser = {"dr-mas": "grpo", "grpo": "dr-mas"}.get(winner)
    return [
        trial(scenario, method, seed, gain=gains.get(method, 0.0), spikes=method == loser)
        for scenario in scenarios
        for method in methods
        for seed in range(seeds)
    ]


def write(root: Path, trials: list[dict[str, Any]], settings: dict[str, Any] | None = None, bandit: Any = None) -> Path:
    """The folder as a reproduction leaves it."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "settings.json").write_text(json.dumps(settings or {"code": "0123"}))
    if bandit is not None:
        (root / "bandit.json").write_text(json.dumps(bandit))
    for one in trials:
        folder = root / "trials" / one["scenario"] / one["method"] / f"seed-{one['seed']}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(one))
    return root
