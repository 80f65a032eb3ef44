"""How fast a policy's engines are on a cluster, and a quick bound of what a step's rollout takes.

A decode step reads all weights and the keys and values of every running sequence once, or computes the products of every
sequence's next token, whichever takes longer; a prefill is compute. The bound is for ranking many layouts: it takes means,
where `simulation` follows every episode. Called by `plan` and `propose`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from drmas.core.flops import forward_cost
from drmas.planning.costs import device_flops
from drmas.planning.job import Job, PolicyJob, element_bytes
from drmas.planning.memory import kv_bytes, kv_token_bytes
from drmas.planning.types import AgentLoad, Engines, EngineSpeed, Rollout, Workload

_ROUNDS = 12
"""Of the fixed point between how long calls take and how many run at once."""


def engines_of(job: Job) -> dict[str, Engines]:
    """Policy -> its engines. Policies whose engines have a device in common get one name for it."""
    groups: dict[str, str] = {}
    for name, policy in job.policies.items():
        sharers = [other for other, its in job.policies.items() if set(policy.devices) & set(its.devices)]
        groups[name] = min((groups.get(other, other) for other in sharers), default=name) if len(sharers) > 1 else ""
    return {
        name: Engines(engine_speed(policy, job), replicas=policy.config.engine.replicas, devices=groups[name])
        for name, policy in job.policies.items()
    }


def engine_speed(policy: PolicyJob, job: Job) -> EngineSpeed:
    """Of one replica. On a host without GPUs all replicas of a policy share its cores.

    A worker reads every weight but the input embedding's table, of which it looks rows up.
    """
    cluster, shape, engine = job.cluster, policy.shape, policy.config.engine
    e, tp, element = cluster.efficiencies, engine.tensor_parallel, element_bytes(engine.dtype)
    sharers = 1 if cluster.gpu else engine.replicas * tp
    peak = device_flops(cluster, engine.dtype, f"policies.{policy.name}.engine.dtype") / sharers
    read = policy.parameters - (0 if shape.tied else shape.vocab * shape.hidden)
    bandwidth = cluster.device.memory_bytes_per_second / sharers * e.decode_bandwidth
    cost = forward_cost(shape)
    reductions, hidden = 0.0, 0.0
    if tp > 1:
        reductions = 2 * shape.layers * cluster.latency_seconds
        link = cluster.intra_bytes_per_second * e.link
        hidden = 2 * shape.layers * 2 * (tp - 1) / tp * shape.hidden * element / link
    return EngineSpeed(
        weight_seconds=element * read / tp / bandwidth,
        kv_token_seconds=kv_token_bytes(policy) / bandwidth,
        token_seconds=(cost.token + cost.response) / tp / (peak * e.decode_flops),
        pair_seconds=cost.pair / tp / (peak * e.decode_flops),
        overhead_seconds=e.engine_step_seconds + reductions,
        prefill_token_seconds=cost.token / tp / (peak * e.prefill) + hidden,
        prefill_pair_seconds=cost.pair / tp / (peak * e.prefill),
        sequence_seconds=e.engine_sequence_seconds + hidden,
        slots=engine.max_concurrent,
        kv_tokens=max(0, int(kv_bytes(policy, cluster) // kv_token_bytes(policy))),
        request_seconds=e.request_seconds,
        overlap=e.overlap,
    )


def bound(workload: Workload, engines: Mapping[str, Engines]) -> Rollout:
    """At least what the step's rollout takes: the longer of the work that the busiest devices have, at the batch sizes that the
    episodes in flight give them, and the longest episode alone, whose calls each write the longest response.

    A policy without room for a sequence takes infinitely long.
    """
    flying = min(workload.episodes, workload.max_concurrent_episodes)
    steps = _step_seconds(workload, engines, flying)
    busy: dict[str, float] = {}
    for name, own in engines.items():
        place = own.devices or name
        busy[place] = busy.get(place, 0.0) + sum(
            _work(agent, workload.episodes, own, *steps[name]) for agent in workload.of(name)
        )
    longest = _longest_episode(workload, engines, steps)
    seconds = max([longest, *busy.values()])
    return Rollout(
        seconds=seconds,
        generated_tokens=sum(workload.episodes * agent.calls * agent.response.moment(1) for agent in workload.agents),
        prompt_tokens=sum(
            workload.episodes * agent.calls * (agent.prompt_tokens - agent.cached_tokens) for agent in workload.agents
        ),
        longest_episode_seconds=longest,
        busy_share={name: min(1.0, busy.get(own.devices or name, 0.0) / seconds) for name, own in engines.items()},
        method="bound",
    )


def _step_seconds(workload: Workload, engines: Mapping[str, Engines], flying: int) -> dict[str, tuple[float, float]]:
    """Policy -> (sequences that run at once on a replica, seconds of a step of theirs), on the mean.

    Episodes spend their time with the policies in proportion to what a call takes there, which depends on how many are there.
    """
    names = [name for name in engines if workload.of(name)]
    here = dict.fromkeys(names, 1.0 / max(1, len(names)))
    found: dict[str, tuple[float, float]] = {}
    for _ in range(_ROUNDS):
        spent = {}
        for name in names:
            own, agents = engines[name], workload.of(name)
            speed, context = own.speed, _context(agents)
            running = min(speed.slots, speed.kv_tokens / context, flying * here[name] / own.replicas)
            if speed.kv_tokens < context:
                running, step = 0.0, math.inf
            else:
                step = speed.step_seconds(running, running * context)
            found[name] = (running, step)
            waiting = max(1.0, flying * here[name] / own.replicas / running) if running else 1.0
            tokens = sum(agent.calls * agent.response.moment(1) for agent in agents)
            prefills = sum(agent.calls * _prefill(agent, own) for agent in agents) * max(1.0, running)
            spent[name] = tokens * min(step, 1e9) * waiting + prefills
        total = math.fsum(spent.values()) or 1.0
        here = {name: (here[name] + spent[name] / total) / 2 for name in names}
    return found


def _context(agents: tuple[AgentLoad, ...]) -> float:
    """Tokens of context of a running sequence, on the mean over the tokens that are written."""
    written = sum(agent.calls * agent.response.moment(1) for agent in agents) or 1.0
    total = sum(
        agent.calls * (agent.prompt_tokens * agent.response.moment(1) + agent.response.moment(2) / 2) for agent in agents
    )
    return max(1.0, total / written)


def _prefill(agent: AgentLoad, own: Engines) -> float:
    """Seconds of one prompt's uncached part."""
    tokens, cached = agent.prompt_tokens, agent.cached_tokens
    return own.speed.prefill_seconds(tokens - cached, (tokens**2 - cached**2) / 2)


def _work(agent: AgentLoad, episodes: int, own: Engines, running: float, step: float) -> float:
    """Seconds that one replica works for an agent: its share of decode steps and prefills."""
    if not running:
        return math.inf
    calls = episodes * agent.calls / own.replicas
    return calls * (agent.response.moment(1) * step / max(running, 1.0) + _prefill(agent, own))


def _longest_episode(workload: Workload, engines: Mapping[str, Engines], steps: Mapping[str, tuple[float, float]]) -> float:
    """An episode in which one call has the longest response that its agent writes in the step, the others mean ones.

    Beside the longest response a replica holds as many sequences, on the mean over its time, as its tokens are times its
    length: a step's seconds are about linear in them.
    """
    total, extra = 0.0, 0.0
    for agent in workload.agents:
        own = engines.get(agent.policy)
        if own is None:
            total += agent.calls * agent.tool_seconds
            continue
        running, step = steps[agent.policy]
        if not running:
            return math.inf
        calls, mean = workload.episodes * agent.calls, agent.response.moment(1)
        longest = max(mean, agent.response.longest(calls)) if calls else mean
        beside = min(running, max(1.0, calls * mean / own.replicas / longest))
        late = own.speed.step_seconds(beside, beside * _context(workload.of(agent.policy)))
        total += agent.calls * (mean * step + _prefill(agent, own) + own.speed.request_seconds + agent.tool_seconds)
        extra = max(extra, longest * late - mean * step)
    return total + extra
