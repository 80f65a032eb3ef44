"""One job's step: memory of its devices, seconds of its phases, what bounds them, throughput and cost.

Arithmetic over `memory`, `costs`, `engines` and a rollout, which `simulation` follows event by event and `engines.bound`
bounds. Called by `plan`, `propose` and `published`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from drmas.planning import costs, memory
from drmas.planning.engines import bound, engines_of
from drmas.planning.job import Job
from drmas.planning.types import Engines, Phases, Rollout, Workload

Roll = Callable[[Workload, Mapping[str, Engines]], Rollout]
"""`engines.bound` or `simulation.simulate`."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step of `job` takes."""

    job: Job
    devices: tuple[memory.DeviceMemory, ...]
    engines: Mapping[str, Engines]
    rollout: Rollout
    training: Mapping[str, costs.Training]
    """Of the policies that are trained."""
    phases: Phases

    @property
    def updates(self) -> dict[str, costs.Training]:
        """Of the policies whose updates the step waits for: of all, or, where they run at the same time, of the slowest."""
        if not self.job.split:
            return dict(self.training)
        return dict(sorted(self.training.items(), key=lambda item: -item[1].total)[:1])

    @property
    def fullest(self) -> memory.DeviceMemory:
        return memory.fullest(self.devices)

    @property
    def fits(self) -> bool:
        """Whether everything fits, and every engine has room for the longest sequence."""
        return self.fullest.headroom >= 0 and not self.cramped

    @property
    def cramped(self) -> list[str]:
        """Policies whose engines' KV cache holds not even one sequence of `max_model_tokens`."""
        return [
            name
            for name, engines in self.engines.items()
            if engines.speed.kv_tokens < self.job.policies[name].config.engine.max_model_tokens
        ]

    @property
    def trained_tokens(self) -> float:
        """Prompt and response tokens of a step's rows, those of frozen agents too."""
        return sum(
            costs.step_rows(policy, self.job.workload, share_prefixes=False).tokens for policy in self.job.policies.values()
        )

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of rows over the step's seconds and the job's GPUs: what NeMo-RL calls tokens/sec/GPU."""
        return self.trained_tokens / self.phases.step / self.job.gpus

    @property
    def generated_per_second(self) -> float:
        """Of the whole job, over the whole step."""
        return self.rollout.generated_tokens / self.phases.step

    @property
    def step_cost(self) -> float | None:
        """Of the GPUs that the job takes; None where no price is known."""
        price = self.job.cluster.price_per_gpu_hour
        return None if price is None else self.job.gpus * price * self.phases.step / 3600


def predict(job: Job, roll: Roll = bound) -> Prediction:
    """The prediction for one step. ConfigError: the device has no products of a type that is asked for."""
    engines = engines_of(job)
    rollout = roll(job.workload, engines)
    training = {name: costs.training(job, policy) for name, policy in job.policies.items() if policy.config.trainable}
    scores = {name: costs.scoring(job, policy) for name, policy in job.policies.items()}
    trains = {name: training[name].total if name in training else 0.0 for name in job.policies}
    if job.split:  # at the same time: the slowest policy's
        slowest = max(job.policies, key=lambda name: scores[name] + trains[name])
        score, train = scores[slowest], trains[slowest]
    else:
        score, train = sum(scores.values()), sum(trains.values())
    phases = Phases(
        rollout=rollout.seconds,
        score=score,
        train=train,
        sync=sum(costs.sync_seconds(job, job.policies[name]) for name in training),
        wake=costs.wake_seconds(job),
        other=job.cluster.efficiencies.step_seconds,
        ahead=job.run.rollout.max_staleness > 0,
    )
    return Prediction(job, tuple(memory.devices(job)), engines, rollout, training, phases)


def bottleneck(prediction: Prediction) -> str:
    """What most of a step's seconds go into, in words: the phase, and what of it."""
    phases = prediction.phases
    if math.isinf(phases.step):
        return f"no step ends: the engines have no room for a sequence of {' or '.join(prediction.cramped) or 'some policy'}"
    seconds = {"rollout": phases.rollout, "train": phases.train + phases.score, "sync": phases.sync, "wake": phases.wake}
    phase = max(seconds, key=seconds.__getitem__)
    if phases.other > seconds[phase]:
        return f"what every step costs beside its phases, {phases.other / phases.step:.0%} of the step"
    share = seconds[phase] / phases.step
    said = f"{phase}, {share:.0%} of the step"
    if phase == "rollout":
        return f"{said}: {_rollout_limit(prediction)}"
    if phase == "train":
        parts = {
            name: sum(getattr(training, name) for training in prediction.updates.values()) for name in costs.Training.__slots__
        }
        parts["old log-probs"] = phases.score
        largest = max(parts, key=parts.__getitem__)
        return f"{said}: {largest.replace('_', ' ')} {parts[largest] / seconds[phase]:.0%} of that"
    return said


def _rollout_limit(prediction: Prediction) -> str:
    rollout = bound(prediction.job.workload, prediction.engines)
    if rollout.longest_episode_seconds > 0.95 * rollout.seconds:
        ahead = "" if prediction.phases.ahead else " or rollouts one step ahead"
        return f"the longest episode; more engines don't help, shorter answers{ahead} do"
    name = max(rollout.busy_share, key=rollout.busy_share.__getitem__)
    speed = prediction.engines[name].speed
    agents = prediction.job.workload.of(name)
    context = max(1.0, sum(a.prompt_tokens + a.response.moment(1) / 2 for a in agents) / max(1, len(agents)))
    full = min(speed.slots, speed.kv_tokens / context)
    parts = {
        "reading the weights": speed.weight_seconds,
        "reading the KV cache": speed.kv_token_seconds * full * context,
        "products": speed.token_seconds * full + speed.pair_seconds * full * context,
        "overhead of engine steps": speed.overhead_seconds + speed.sequence_seconds * full,
    }
    room = "slots (engine.max_concurrent)" if speed.slots <= speed.kv_tokens / context else "KV cache"
    return f"the engines of {name}, {max(parts, key=parts.__getitem__)} when full; {full:.0f} sequences fit, by {room}"


def grown(job: Job, factors: Sequence[float], roll: Roll = bound) -> list[tuple[float, Prediction]]:
    """(mean response of all calls, prediction) where responses are `factors` times as long, up to the agents' `max_tokens`."""
    found = []
    for factor in factors:
        agents = tuple(
            replace(agent, response=replace(agent.response, mean=agent.response.mean * factor)) for agent in job.workload.agents
        )
        work = replace(job.workload, agents=agents)
        calls = sum(agent.calls for agent in agents) or 1.0
        mean = sum(agent.calls * agent.response.moment(1) for agent in agents) / calls
        found.append((mean, predict(replace(job, workload=work), roll)))
    return found
