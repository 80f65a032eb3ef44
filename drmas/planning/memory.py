"""Bytes on every device of a job, by part: what trainers hold, what a microbatch leaves behind, and what engines take.

Weights, gradients, optimiser, reference, critic and activations are `drmas.runtime.memory`'s, which a run's own check of its
placement takes, too. Here they are laid over all devices of a cluster, with the engines, what a push of weights stages, and
host memory. The README beside this file has the formulas and how far measured peaks lie from them. Called by `predict` and
`propose`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from drmas.planning.costs import sync_bytes, through_host
from drmas.planning.job import Job, PolicyJob, element_bytes
from drmas.planning.types import Cluster
from drmas.runtime import memory
from drmas.runtime.room import SLEEPING_BYTES

ENGINE_OVERHEAD = 2 * 2**30
"""Assumption: what a vLLM worker takes beside weights and KV cache: context, CUDA graphs, a prefill's activations."""
_HOST = "in host memory"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one device holds, in bytes by part; `training` and `rollout` never at the same time."""

    where: str
    """"rank 3", "engine GPU 9", or "the host"."""
    capacity: float
    always: Mapping[str, float]
    training: Mapping[str, float] = field(default_factory=dict)
    rollout: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return _sum(self.always) + max(_sum(self.training), _sum(self.rollout))

    @property
    def headroom(self) -> float:
        """What is left; negative where it doesn't fit."""
        return self.capacity - self.total

    @property
    def parts(self) -> dict[str, float]:
        """Of the fuller of both times."""
        fuller = max((self.training, self.rollout), key=_sum)
        return {what: size for what, size in {**self.always, **fuller}.items() if size}


def _sum(parts: Mapping[str, float]) -> float:
    return math.fsum(parts.values())


def staging_bytes(policy: PolicyJob) -> float:
    """What the sender of weights needs: two buckets, and the largest tensor whole where ranks have parts of it."""
    shape, c = policy.shape, policy.config
    element = element_bytes(c.engine.dtype)
    largest = max(shape.vocab * shape.hidden, *(inputs * outputs for inputs, outputs in shape.linears().values()))
    whole = element * largest if c.tensor_parallel > 1 else 0.0
    return 2.0 * max(c.sync.bucket_bytes, whole)


def kv_token_bytes(policy: PolicyJob) -> float:
    """Keys and values of one token on one engine worker; below one head per worker, heads are held several times."""
    shape, engine = policy.shape, policy.config.engine
    heads = max(shape.kv_heads / engine.tensor_parallel, 1)
    return 2.0 * shape.layers * heads * shape.head_dim * element_bytes(engine.dtype)


def engine_weight_bytes(policy: PolicyJob) -> float:
    """Of one engine worker."""
    engine = policy.config.engine
    return element_bytes(engine.dtype) * policy.parameters / engine.tensor_parallel


def kv_bytes(policy: PolicyJob, cluster: Cluster) -> float:
    """The KV cache of one worker. Not positive: the engine has no room for one. Of backend torch: room for all its sequences,
    which it takes from what is free as it needs it.
    """
    engine = policy.config.engine
    if engine.backend == "torch":
        return kv_token_bytes(policy) * engine.max_concurrent * engine.max_model_tokens
    if not cluster.gpu:
        return float(engine.kv_cache_bytes)
    return engine.gpu_memory_fraction * cluster.device.memory_bytes - engine_weight_bytes(policy) - ENGINE_OVERHEAD


def engine_parts(policy: PolicyJob, cluster: Cluster) -> dict[str, float]:
    """What one worker of the policy's engines takes of its device, awake."""
    overhead = ENGINE_OVERHEAD if cluster.gpu and policy.config.engine.backend == "vllm" else 0.0
    return {
        "engine weights": engine_weight_bytes(policy),
        "KV cache": max(0.0, kv_bytes(policy, cluster)),
        "engine overhead": overhead,
    }


def trainer_parts(job: Job, policy: PolicyJob, rank: int) -> tuple[list[memory.Part], dict[str, float]]:
    """(what a policy's trainer holds on a rank at all times, what it needs there while it is updated)."""
    share = policy.share(rank)
    held = list(
        memory.held(policy.name, share, policy.model, policy.reference, policy.critic, apart=policy.apart, gpu=job.cluster.gpu)
    )
    if not policy.config.trainable:
        return held, {}
    kept = memory.activation_bytes(policy.model.architecture, share, gpu=job.cluster.gpu)
    return held, {"activations and head": max(kept, staging_bytes(policy))}


def devices(job: Job) -> list[DeviceMemory]:
    """The devices that differ: the first rank of every stage of every policy, the edges of the engines, and the hosts."""
    found = [_device(job, device) for device in _distinct(job)] if job.cluster.gpu else [_host_without_gpu(job)]
    return [*found, *_hosts(job)]


def fullest(found: Iterable[DeviceMemory]) -> DeviceMemory:
    """The device with the least left, relative to what it has."""
    return min(found, key=lambda device: device.headroom / device.capacity)


def _distinct(job: Job) -> list[int]:
    """Device numbers of which each other device is like one."""
    chosen = {0, job.world - 1}
    for policy in job.policies.values():
        count, stages = len(policy.ranks), policy.config.pipeline_parallel
        chosen |= {policy.ranks[count // stages * stage] for stage in range(stages)}
        edge = max(policy.devices)
        chosen |= {min(policy.devices), edge} | ({edge + 1} if edge + 1 < job.world else set())
    return sorted(chosen)


def _device(job: Job, device: int) -> DeviceMemory:
    always, training, rollout = _trainer(job, device) if device < job.world else ({}, {}, {})
    for policy in job.policies.values():
        if device not in policy.devices:
            continue
        parts = engine_parts(policy, job.cluster)
        if policy.config.engine.sleep:
            _add(rollout, parts)
            _add(training, {"sleeping engines": SLEEPING_BYTES})
        else:
            _add(always, parts)
    _add(always, {"reserved": job.cluster.reserved_bytes})
    where = f"rank {device}" if device < job.world else f"engine GPU {device}"
    return DeviceMemory(where, job.cluster.device.memory_bytes, always, training, rollout)


def _trainer(job: Job, rank: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """A rank's parts: always, while training, and (none of a trainer) during the rollout."""
    held: list[memory.Part] = []
    training: dict[str, float] = {}
    for policy in job.policies.values():
        if rank not in policy.ranks:
            continue
        parts, needed = trainer_parts(job, policy, rank)
        held += parts
        if math.fsum(needed.values()) > _sum(training):  # policies are updated one after the other
            training = needed
    always = {what: size for what, size in memory.by_part(held).items() if _HOST not in what}
    return always, dict(training), {}


def _host_without_gpu(job: Job) -> DeviceMemory:
    """A host whose memory all trainer ranks and engines share."""
    always: dict[str, float] = {}
    training: dict[str, float] = {}
    for rank in range(job.world):
        parts, needed, _ = _trainer(job, rank)
        _add(always, parts)
        _add(training, needed)
    for policy in job.policies.values():
        for _ in policy.devices:
            _add(always, engine_parts(policy, job.cluster))
    _add(always, {"processes": job.cluster.reserved_bytes})
    return DeviceMemory("the host", job.cluster.device.memory_bytes, always, training)


def _hosts(job: Job) -> Iterator[DeviceMemory]:
    """The memory of the first node's host: offloaded optimisers, weights of sleeping engines, and weights that pass through."""
    if not job.cluster.gpu:
        return
    always: dict[str, float] = {}
    for policy in job.policies.values():
        if not policy.config.offload_optimizer:
            continue
        mine = [rank for rank in policy.ranks if rank < job.cluster.gpus_per_node]
        for stage, count in Counter(policy.share(rank).stage for rank in mine).items():
            rank = next(rank for rank in mine if policy.share(rank).stage == stage)
            parts = memory.by_part(trainer_parts(job, policy, rank)[0])
            _add(always, {what.removesuffix(f" {_HOST}"): count * size for what, size in parts.items() if _HOST in what})
    for policy in job.policies.values():
        if through_host(job, policy):
            _add(always, {"weights on their way to engines": sync_bytes(policy)})
        if policy.config.engine.sleep:
            count = sum(device < job.cluster.gpus_per_node for device in policy.devices)
            _add(always, {"weights of sleeping engines": count * engine_weight_bytes(policy)})
    if always:
        yield DeviceMemory("the first node's host memory", job.cluster.host_memory_bytes, always)


def _add(total: dict[str, float], parts: Mapping[str, float]) -> None:
    for what, size in parts.items():
        total[what] = total.get(what, 0.0) + size
