"""Seconds of a step's phases on the trainer's side: updates, scoring passes, weight syncs, sleep and wake.

Compute is exact FLOPs (`drmas.core.flops`) over a share of the devices' peak. Communication is bytes over a share of the link
that a group's ranks lie on, as rings do it: (n - 1) / n of the bytes for a gather or a scatter, twice that for an all-reduce.
Tensor-, context- and pipeline-parallel communication waits; that of replicas hides behind the last microbatch where the trainer
overlaps it. The README beside this file has every formula, its source, and what is left out. Called by `plan` and `propose`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from drmas.core.batching import TokenCost
from drmas.core.flops import backward_cost, forward_cost, recompute_cost
from drmas.core.stack import Stack
from drmas.errors import ConfigError
from drmas.planning.job import Job, PolicyJob, element_bytes, stack_of
from drmas.planning.types import Cluster, Workload
from drmas.runtime.memory import Model, adapter_parameters, rank_parameters
from drmas.weights.transport import choose_transport

OPTIMISER_BYTES = 34
"""Read and written per parameter of a shard: 4 for the norm, 30 for AdamW with fp32 state and bf16 weights."""


HOST_FILL_BYTES_PER_SECOND = 4e9
"""At which one rank checks and sums weights in the host's memory, with up to four threads: 0.54 GB in 0.14 s on two cores of an
Intel Xeon (`bench/weight_sync.py`, fill)."""

_COSTS: dict[tuple[object, ...], TokenCost] = {}


class Rows(NamedTuple):
    """What a policy is trained on in one step; means, so no integers."""

    count: float
    tokens: float
    """That go through the layers."""
    pairs: float
    """Query-key pairs of causal attention."""
    responses: float
    """Tokens in the output head."""


@dataclass(frozen=True, slots=True)
class Training:
    """Seconds of one policy's updates in one step, by what they go into."""

    compute: float
    """Forward, backward and what is computed again, at the efficiency's share of the peak."""
    bubble: float
    """Stages of a pipeline that wait."""
    tensor_parallel: float
    context_parallel: float
    pipeline: float
    replicas: float
    """Gradients and parameters between replicas, as far as it isn't hidden."""
    optimiser: float
    overhead: float
    """Of microbatches: launches, packing."""
    reference: float
    critic: float

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, name) for name in self.__slots__)


def step_rows(policy: PolicyJob, workload: Workload, *, share_prefixes: bool) -> Rows:
    """The rows of one step. A row of prompt p and response r computes p + r - 1 tokens.

    Where prefixes are shared, what an engine's cache would have isn't computed again: as much as all rows of a start could
    share, if they came into one microbatch.
    """
    count = tokens = pairs = responses = 0.0
    for agent in workload.of(policy.name):
        if not agent.trained and policy.config.trainable:
            continue
        rows = workload.episodes * agent.calls
        mean, square = agent.response.moment(1), agent.response.moment(2)
        prompt = agent.prompt_tokens - 1
        shared = agent.cached_tokens if share_prefixes else 0.0
        count += rows
        tokens += rows * (prompt - shared + mean)
        length, squared = prompt + mean, prompt**2 + 2 * prompt * mean + square
        pairs += rows * (squared + length - shared**2 - shared) / 2
        responses += rows * mean
    return Rows(count, tokens, pairs, responses)


def training(job: Job, policy: PolicyJob) -> Training:
    """Of the step's updates of a policy that is trainable."""
    cluster, c = job.cluster, policy.config
    stack = stack_of(policy, cluster)
    rows = step_rows(policy, job.workload, share_prefixes=stack.shares_prefixes)
    updates = job.run.train.updates_per_step
    microbatches = microbatches_of(policy, rows, updates)
    compute = _seconds(job, policy, _training_cost(policy), rows, cluster.efficiencies.train)
    again = {"none": 0, "selective": 0, "full": 2}[c.recompute]
    critic = 0.0
    if policy.critic is not None:
        own = policy.critic.architecture.shape
        cost = _sum(forward_cost(own), backward_cost(own), recompute_cost(own, c))._replace(response=0)
        other = replace(policy, model=policy.critic, shape=own)
        critic = _seconds(job, policy, cost, rows, cluster.efficiencies.train) + _tensor_parallel(job, other, rows, 4 + again)
    reference = 0.0
    if policy.reference is not None or _measures_base(job, policy):
        reference = forward(job, policy, rows, policy.reference)
    return Training(
        compute=compute,
        bubble=compute * (c.pipeline_parallel - 1) / microbatches,
        tensor_parallel=_tensor_parallel(job, policy, rows, 4 + again),
        context_parallel=_context_parallel(job, policy, rows, 3 + again // 2),
        pipeline=_pipeline(job, policy, rows, 2),
        replicas=_replicas(job, policy, stack, updates, compute / (updates * microbatches)),
        optimiser=updates * _optimiser(job, policy),
        overhead=updates * microbatches * cluster.efficiencies.microbatch_seconds,
        reference=reference,
        critic=critic,
    )


def scoring(job: Job, policy: PolicyJob) -> float:
    """Seconds of the passes before the updates: old log-probs where there are several updates, values of a critic; of a frozen
    policy, the measurement of its log-probs."""
    rows = step_rows(policy, job.workload, share_prefixes=stack_of(policy, job.cluster).shares_prefixes)
    seconds = forward(job, policy, rows) if job.run.train.updates_per_step > 1 or not policy.config.trainable else 0.0
    return seconds + (forward(job, policy, rows, policy.critic, head=False) if policy.critic is not None else 0.0)


def forward(job: Job, policy: PolicyJob, rows: Rows, beside: Model | None = None, *, head: bool = True) -> float:
    """Seconds of one forward pass over the rows, log-probs included; of the model `beside` the policy's own, without adapters,
    where one is given. A critic has no `head` of a vocabulary's size."""
    c, cluster = policy.config, job.cluster
    cost = forward_cost(policy.shape, c.lora) if beside is None else forward_cost(beside.architecture.shape)
    if beside is not None:
        policy = replace(policy, model=beside, shape=beside.architecture.shape)
    compute = _seconds(job, policy, cost if head else cost._replace(response=0), rows, cluster.efficiencies.score)
    microbatches = microbatches_of(policy, rows, 1)
    return math.fsum(
        (
            compute * (1 + (c.pipeline_parallel - 1) / microbatches),
            _tensor_parallel(job, policy, rows, 2),
            _context_parallel(job, policy, rows, 1),
            _pipeline(job, policy, rows, 1),
            microbatches * cluster.efficiencies.microbatch_seconds,
        )
    )


def microbatches_of(policy: PolicyJob, rows: Rows, updates: int) -> int:
    """Of one replica in one update: as many as its tokens need."""
    per_update = rows.tokens / (policy.data_parallel * updates)
    return max(1, math.ceil(per_update / policy.config.tokens_per_microbatch))


def sync_seconds(job: Job, policy: PolicyJob) -> float:
    """Of one push of a policy's weights into its engines, checksums and votes included.

    broadcast: gathered from the tensor-parallel ranks to one, which sends all of it to all workers. shards: every worker gets
    its part from the ranks that have it, at the rate of the busier side. shared-memory: every worker copies its part; where
    it goes through the host, it is gathered to one rank, which checks and sums all of it there first. in-process: copied in
    memory, without further ado. disk: written once, read by every worker's node.
    """
    cluster, c = job.cluster, policy.config
    size = sync_bytes(policy)
    workers = len(policy.devices)
    part = size / c.engine.tensor_parallel
    bandwidth = sync_bandwidth(job, policy)
    transport = transport_of(job, policy)
    gather = size * (c.tensor_parallel - 1) / c.tensor_parallel / _link(cluster, c.tensor_parallel)
    if transport == "broadcast":
        seconds = size / bandwidth + gather
    elif through_host(job, policy):
        seconds = gather + (size + part) / cluster.host_bytes_per_second + size / HOST_FILL_BYTES_PER_SECOND
        return seconds + cluster.efficiencies.sync_seconds
    elif transport == "shards":
        senders = min(len(policy.ranks), workers)
        seconds = max(part, part * workers / senders) / bandwidth
    elif transport == "shared-memory":
        seconds = part / bandwidth
    elif transport == "in-process":
        return size / _memory_rate(cluster)
    else:
        readers = len({device // cluster.gpus_per_node for device in policy.devices})
        seconds = size * (1 + readers) / cluster.disk_bytes_per_second
    checksum = (size / (c.tensor_parallel * c.pipeline_parallel) + part) / _memory_rate(cluster)
    return seconds + checksum + cluster.efficiencies.sync_seconds


def through_host(job: Job, policy: PolicyJob) -> bool:
    """Whether weights of trainers on GPUs pass through the host's memory, all of them, as `payload_device` decides."""
    direct = policy.devices == (0,) and not policy.config.syncs_adapters
    return job.cluster.gpu and not job.elsewhere and transport_of(job, policy) == "shared-memory" and not direct


def transport_of(job: Job, policy: PolicyJob) -> str:
    """What `policies.NAME.sync.transport` becomes, by the rule that a run goes by. ConfigError: it can't be had."""
    c, cluster = policy.config, job.cluster
    shared = c.engine.gpus == "shared"
    return choose_transport(
        c.sync.transport,
        policy=policy.name,
        gpu=cluster.gpu,
        engines_local=not cluster.gpu or shared or max(policy.devices) < cluster.gpus_per_node,
        shared_gpus=shared,
        shards=c.tensor_parallel * c.pipeline_parallel,
        adapters=c.syncs_adapters,
        in_process=c.engine.backend == "torch",
    )[0]


def sync_bytes(policy: PolicyJob) -> float:
    """What the engines get after an update: all weights, or the adapters alone."""
    c = policy.config
    element = element_bytes(c.engine.dtype)
    if not policy.config.syncs_adapters:
        return float(element * policy.parameters)
    whole = c.model_copy(update={"tensor_parallel": 1, "pipeline_parallel": 1})
    share = type(policy.share(policy.ranks[0]))(whole, policy.ranks[:1], 0)
    return float(element * adapter_parameters(policy.model.architecture, c.lora, share))


def sync_bandwidth(job: Job, policy: PolicyJob) -> float:
    """Bytes per second between the policy's ranks and its engines' workers: of the slower link that is needed."""
    cluster = job.cluster
    nodes = {device // cluster.gpus_per_node for device in (*policy.ranks, *policy.devices)} if cluster.gpu else {0}
    return _link(cluster, 1 if len(nodes) == 1 else cluster.gpus_per_node + 1)


def wake_seconds(job: Job) -> float:
    """Of putting all sleeping engines to sleep and waking them: their weights go to the host and come back."""
    cluster, total = job.cluster, 0.0
    for policy in job.policies.values():
        if policy.config.engine.sleep:
            part = element_bytes(policy.config.engine.dtype) * policy.parameters / policy.config.engine.tensor_parallel
            total += 2 * part / cluster.host_bytes_per_second + cluster.efficiencies.wake_seconds
    return total


def peak_flops(policy: PolicyJob, cluster: Cluster) -> float:
    """FLOP/s of one device for the policy's products. ConfigError: the device has none of that type."""
    product = "fp8" if policy.config.fp8 else policy.config.dtype
    return device_flops(cluster, product, f"policies.{policy.name}.{'fp8' if policy.config.fp8 else 'dtype'}")


def device_flops(cluster: Cluster, product: str, key: str) -> float:
    """FLOP/s for `product`, which `key` asks for."""
    if product not in cluster.device.flops:
        raise ConfigError(
            f"{key} needs products of {product}, which {cluster.device.name} hasn't; its description has "
            f"{', '.join(cluster.device.flops)}"
        )
    return cluster.device.flops[product]


def _training_cost(policy: PolicyJob) -> TokenCost:
    """Of an update, with what is computed again; remembered, since every candidate of a proposal asks for it."""
    c = policy.config
    lora = None if c.lora is None else (c.lora.rank, tuple(c.lora.targets))
    key = (policy.shape, lora, tuple(c.freeze), c.recompute)
    if key not in _COSTS:
        shape = policy.shape
        _COSTS[key] = _sum(forward_cost(shape, c.lora), backward_cost(shape, c.lora, c.freeze), recompute_cost(shape, c))
    return _COSTS[key]


def _seconds(job: Job, policy: PolicyJob, cost: TokenCost, rows: Rows, efficiency: float) -> float:
    """Of FLOPs spread over the policy's ranks; ranks on a host without GPUs share its cores."""
    flops = cost.token * rows.tokens + cost.pair * rows.pairs + cost.response * rows.responses
    ranks = len(policy.ranks) if job.cluster.gpu else len(policy.ranks) / job.world
    return flops / (ranks * peak_flops(policy, job.cluster) * efficiency)


def _tensor_parallel(job: Job, policy: PolicyJob, rows: Rows, reductions: int) -> float:
    """`reductions` all-reduces per layer of every token's hidden state (or a gather and a scatter each, which is as much)."""
    c, shape, tp = policy.config, policy.shape, policy.config.tensor_parallel
    if tp == 1:
        return 0.0
    tokens = rows.tokens / (policy.data_parallel * c.context_parallel)
    layers = shape.layers // c.pipeline_parallel
    size = tokens * shape.hidden * element_bytes(c.dtype)
    calls = reductions * layers * microbatches_of(policy, rows, 1)
    return reductions * layers * 2 * (tp - 1) / tp * size / _link(job.cluster, tp) + calls * job.cluster.latency_seconds


def _context_parallel(job: Job, policy: PolicyJob, rows: Rows, gathers: int) -> float:
    """`gathers` times per layer, all keys and values of a microbatch, or their gradients, pass every rank."""
    c, shape, cp = policy.config, policy.shape, policy.config.context_parallel
    if cp == 1:
        return 0.0
    layers = shape.layers // c.pipeline_parallel
    keys = 2 * max(shape.kv_heads / c.tensor_parallel, 1) * shape.head_dim * element_bytes(c.dtype)
    size = rows.tokens / policy.data_parallel * keys
    return gathers * layers * (cp - 1) / cp * size / _link(job.cluster, cp * c.tensor_parallel)


def _pipeline(job: Job, policy: PolicyJob, rows: Rows, ways: int) -> float:
    """Hidden states to the next stage, and, with two `ways`, gradients back."""
    c, shape = policy.config, policy.shape
    if c.pipeline_parallel == 1:
        return 0.0
    width = shape.hidden / (c.tensor_parallel if c.sequence_parallel else 1)
    size = rows.tokens / (policy.data_parallel * c.context_parallel) * width * element_bytes(c.dtype)
    return ways * size / _link(job.cluster, len(policy.ranks))


def _replicas(job: Job, policy: PolicyJob, stack: Stack, updates: int, microbatch_seconds: float) -> float:
    """Gradients in fp32 to their shards, updated parameters back; of an update, what a microbatch's pass doesn't hide."""
    c = policy.config
    replicas = policy.data_parallel * c.context_parallel
    if replicas == 1:
        return 0.0
    size = _trained_on_rank(policy) * (4 + element_bytes(c.dtype)) * (replicas - 1) / replicas
    seconds = size / _link(job.cluster, replicas * c.tensor_parallel)
    return updates * max(0.0, seconds - microbatch_seconds if stack.overlap else seconds)


def _optimiser(job: Job, policy: PolicyJob) -> float:
    """One step on a rank's shard, at the memory's rate, or the link's to the host that it was offloaded to."""
    c, cluster = policy.config, job.cluster
    size = OPTIMISER_BYTES * _trained_on_rank(policy) / (policy.data_parallel * c.context_parallel)
    return size / (cluster.host_bytes_per_second if c.offload_optimizer and cluster.gpu else _memory_rate(cluster))


def _trained_on_rank(policy: PolicyJob) -> float:
    """Parameters with gradients on the policy's fullest rank."""
    c, architecture = policy.config, policy.model.architecture
    share = policy.share(policy.ranks[0])
    if c.lora is not None:
        return float(adapter_parameters(architecture, c.lora, share))
    return rank_parameters(architecture, share) * (1 - policy.model.frozen_share)


def _measures_base(job: Job, policy: PolicyJob) -> bool:
    """Whether a KL term is measured from the base below the adapters."""
    c = policy.config
    return c.lora is not None and c.trainable and (c.loss.kl or job.run.loss.kl) is not None


def _memory_rate(cluster: Cluster) -> float:
    return cluster.device.memory_bytes_per_second * cluster.efficiencies.decode_bandwidth


def _link(cluster: Cluster, span: int) -> float:
    """Bytes per second that ranks reach which lie within `span` consecutive ones."""
    within = span <= cluster.gpus_per_node or not cluster.gpu
    return (cluster.intra_bytes_per_second if within else cluster.inter_bytes_per_second) * cluster.efficiencies.link


def _sum(*costs: TokenCost) -> TokenCost:
    return TokenCost(*(sum(column) for column in zip(*costs, strict=True)))
