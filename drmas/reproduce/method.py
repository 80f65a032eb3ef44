"""How a reproduction was done and what its numbers mean, in words; the settings in them are those of a trial's configuration.

Called by `drmas.reproduce.page`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drmas.reproduce.tuning import TUNING

_COMPARISON = (
    "Within a scenario and a seed every method starts from the same weights, sees the same tasks in the same order, and has"
    " the same code, steps, episodes, sampling seeds and evaluation tasks; what differs is what a row's reward is compared "
    "with. An interval is a 95 % t-interval over seeds; a difference is between trials of the same seed. Evaluation tasks "
    "come from the few dozen that training draws from: they are training tasks, sampled anew."
)
_CONFOUNDS = (
    "single-agent is another system, not another method: its start is its own, it has no other agents' calls (one call in "
    "maths, up to 4 in search) and, where the team has a policy per agent, fewer parameters. A scenario without one is "
    "compared with that of another on the same tasks. In maths-unequal grpo-turns makes one mean of rewards of 0 to 1 and "
    "of rewards of 0 to 5; to beat it there says only that this is a bad mean."
)
_DEFINITIONS = (
    "final reward: mean reward of the last fifth of the steps. mean reward: of all steps, the area under the curve. avg@16,"
    " pass@16: of 16 samples per evaluated task, their mean reward, and whether one was right. spikes: share of an agent's "
    "steps whose gradient norm is above 3 times the median of the up to 20 steps before, or isn't finite, of the steps that"
    " have such a median. variation: the norm's standard deviation over its mean, trend included. imbalance: mean over "
    "steps of |sum of an agent's advantages| / rows. inflation: the factor (σₖ² + (μₖ - μ)²) / σ² of a step, averaged over "
    "its tasks. valid turns: share that the agent's parser takes, in the first and in the last fifth of the steps. Rows "
    "compared with nothing: alone in their group, or of equal rewards in it; their advantage is 0.",
    "A measured second moment is the mean of A²|z|² over rows, divided by the mean of |z|²; z is the gradient of the row's "
    "mean log-prob. Δ is the covariance of A² and |z|² in the same unit. Factor + Δ is the measured moment by arithmetic, "
    "but for the chance of which rows are measured; what the theory adds is that the factor is what matters. Per-agent "
    "statistics have a Δ too, so that pooling is judged by the difference of both on the same rows. Rows that per-agent "
    "statistics compare with nothing have A = 0 and count, which takes the moment below 1 and is part of that difference. "
    "slope: of measured on predicted through the origin. R²: of the prediction itself, with no free parameter, in "
    "logarithms. The single agent's moments are in none of this.",
    "Verdicts: confirmed if all of an interval is on the side that is claimed, contradicted if all of it is on the other "
    "side, not confirmed if it holds zero or all seeds give one number, not tested below 3 seeds or where more trials of "
    "one side crashed. no room: each seed's difference is exactly 0, or both methods have 0.98 or more before training or "
    "after it. no inflation: the mean factor is 0.95 to 1.05. A ratio is close to 1 if its interval lies in 0.8 to 1.25, "
    "and contradicts if it lies outside. Most of the gain comes from the std only where there is a gain. A row sum is zero "
    "if it is at most 1e-5 per row.",
    "A trial has crashed if its process died or raised: it is in no mean. It has diverged if a gradient norm or reward "
    "wasn't finite, or its reward, or an agent's share of valid turns, fell to below half of what it began with: it is in "
    "every mean.",
)


def paragraphs(config: Mapping[str, Any], scenarios: Mapping[str, Any]) -> list[str]:
    """All of it; `config` is a trial's configuration, {} where none was found."""
    return [_COMPARISON, *_settings(config, scenarios), TUNING, _CONFOUNDS, *_DEFINITIONS]


def _settings(config: Mapping[str, Any], scenarios: Mapping[str, Any]) -> list[str]:
    try:
        policy, rollout = next(iter(config["policies"].values())), config["rollout"]
        clip, updates = policy["clip_grad_norm"], config["train"]["updates_per_step"]
        heat = {agent.get("temperature", 1.0) for agent in config["team"].values() if isinstance(agent, dict)}
        cool = config["eval"]["temperature"]
        steps = ", ".join(f"{number}" for number in sorted({one["steps"] for one in scenarios.values()}))
        warm = f" after {steps_up} steps of warm-up" if (steps_up := policy.get("lr_warmup_steps")) else ""
        text = (
            f"Settings of all methods: Adam (β {policy['adam_beta1']:g}, {policy['adam_beta2']:g}), learning rate "
            f"{policy['lr']:g}, {policy['lr_schedule']}{warm}; {rollout['tasks_per_step']} tasks × "
            f"{rollout['group_size']} episodes and {updates} update(s) per step, {steps} steps; sampled at temperature "
            f"{', '.join(f'{one:g}' for one in sorted(heat))}, evaluated at {'the same' if cool is None else f'{cool:g}'}."
        )
        if clip:
            text += (
                f" The gradient's norm is clipped at {clip:g}. Together with Adam, which divides by the size of past "
                "gradients, this takes away most of what an inflated norm could do to the weights: the paper's mechanism has "
                "little room here."
            )
        if updates == 1:
            text += " With one update per step the ratio of policies is 1: what clipping does to off-policy rows isn't tried."
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return []
    return [text]
