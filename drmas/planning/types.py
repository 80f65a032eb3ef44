"""The nouns of planning: what a cluster can do, what a team asks for, how a policy is laid out, and what a step takes.

Plain frozen data without behaviour beyond arithmetic on its own fields. `cluster` reads a `Cluster`, `workload` makes a
`Workload`, `engines` and `costs` turn both into `EngineSpeed` and `Phases`, `simulation` turns a `Workload` and `Engines` into
a `Rollout`. Bytes are bytes, rates are per second, times are seconds; a share is between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

_NORMAL = NormalDist()
Dtype = Literal["float32", "bfloat16", "fp8"]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or all cores of a host, at their peak: what a data sheet says."""

    name: str
    flops: Mapping[str, float]
    """FLOP/s of dense products by the type of their factors, a `Dtype`; one that it lacks is missing."""
    memory_bytes: float
    memory_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What is reached of the peaks, and what every step, call and engine step costs beside them. Measured or assumed.

    `cluster.EfficiencySection` says where the defaults come from.
    """

    train: float = 0.42
    """Share of the peak FLOP/s that forward and backward passes reach, what is computed again counted."""
    score: float = 0.42
    """The same of forward passes over whole rows: old log-probs, reference, critic's values."""
    prefill: float = 0.5
    """Share of the peak FLOP/s that an engine reaches on prompts."""
    decode_flops: float = 0.5
    """Share of the peak FLOP/s that a decode step can reach at most."""
    decode_bandwidth: float = 0.7
    """Share of the memory's bytes per second that a decode step reads weights and KV cache with."""
    overlap: float = 1.0
    """Of a decode step's reads and products, how much of the shorter hides behind the longer. On a CPU they add up: 0."""
    link: float = 0.7
    """Share of a link's bytes per second that a collective reaches."""
    engine_step_seconds: float = 1.5e-3
    """Of an engine step beside its products and reads: scheduling, launches."""
    engine_sequence_seconds: float = 1e-5
    """Of every sequence in an engine step: sampling, log-probs, bookkeeping."""
    request_seconds: float = 5e-3
    """Of one call beside the engine's work: rendering, tokenising, parsing. Adds to the latency of the call."""
    wake_seconds: float = 1.0
    """Of putting a sleeping engine to sleep and waking it, beside the bytes that move."""
    step_seconds: float = 1.0
    """Of one training step beside all phases: grading what is left over, planning microbatches, metrics, episodes' files."""
    microbatch_seconds: float = 5e-3
    """Of one microbatch's pass beside its products: launches, packing."""
    sync_seconds: float = 0.1
    """Of one push of weights beside the bytes: pausing, votes, checksums, resuming."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices, and the links between them. `links` are of one device in one direction."""

    name: str
    nodes: int
    gpus_per_node: int
    device: Device
    intra_bytes_per_second: float
    """Between devices of a node: NVLink, PCIe, or the host's memory."""
    inter_bytes_per_second: float
    """Between nodes, per device."""
    latency_seconds: float
    """Of one hop of a collective."""
    host_bytes_per_second: float
    """Between a device and its host's memory: offloaded optimiser, sleeping engines, weights through shared memory."""
    host_memory_bytes: float
    """Of one node."""
    disk_bytes_per_second: float
    """Of the folder that nodes share: weights through disk."""
    efficiencies: Efficiencies = Efficiencies()
    price_per_gpu_hour: float | None = None
    currency: str = "USD"
    gpu: bool = True
    """False: the device is a host's cores, and engine and trainer share its memory."""
    reserved_bytes: float = 0.0
    """Of each device, for what nobody counts: driver context, communication buffers, fragmentation."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long an agent's responses are: log-normal, cut at `cap`.

    With m the mean before the cut and s the spread, ln X is normal with mean ln m - s^2 / 2 and deviation s. The moments of
    min(X, cap) are the usual ones of a log-normal's parts: E[X^k; X < c] = e^(k mu + k^2 s^2 / 2) Phi((ln c - mu) / s - k s).
    """

    mean: float
    """Tokens, before the cut."""
    spread: float = 0.0
    """Standard deviation of the logarithm; 0: all are as long as the mean."""
    cap: int = 2**31
    """`max_tokens` of the agent."""

    @classmethod
    def fitted(cls, mean: float, spread: float, cap: int) -> Lengths:
        """Lengths whose mean after the cut is `mean`, which is below `cap`: what a run shows. By bisection."""
        if spread == 0 or mean >= cap:
            return cls(min(mean, cap), 0.0, cap)
        low, high = mean, mean
        while cls(high, spread, cap).moment(1) < mean:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, spread, cap).moment(1) < mean else (low, middle)
        return cls(high, spread, cap)

    def moment(self, k: int) -> float:
        """E[min(X, cap)^k]: 1 gives the mean length, 2 what attention grows with."""
        if self.spread == 0:
            return min(self.mean, self.cap) ** k
        middle = math.log(self.mean) - self.spread**2 / 2
        place = (math.log(self.cap) - middle) / self.spread
        below = math.exp(k * middle + k**2 * self.spread**2 / 2) * _NORMAL.cdf(place - k * self.spread)
        return below + self.cap**k * (1 - _NORMAL.cdf(place))

    def quantile(self, share: float) -> float:
        """The length that `share` of the responses don't exceed."""
        if self.spread == 0:
            return min(self.mean, self.cap)
        middle = math.log(self.mean) - self.spread**2 / 2
        return min(math.exp(middle + self.spread * _NORMAL.inv_cdf(share)), self.cap)

    def longest(self, count: float) -> float:
        """About the longest of `count` responses: the quantile at count / (count + 1)."""
        return self.quantile(count / (count + 1))


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """What one agent asks of its policy's engines in an episode."""

    name: str
    policy: str
    calls: float
    """Per episode, the mean."""
    prompt_tokens: float
    """Of one call, the mean, what is cached already included."""
    cached_tokens: float
    """Of one call's prompt, how many the engine's prefix cache has on the mean: the group's and the episode's own."""
    response: Lengths
    trained: bool = True
    tool_seconds: float = 0.0
    """Per call, spent outside the engine before the next call of the episode: search, grading, a sandbox."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What one step's rollout is: `tasks` groups of `group_size` episodes, each a chain of calls in the order of `agents`.

    An episode makes round(calls) calls of each agent on the mean, interleaved: first calls of all agents in order, then the
    second ones, and so on (solver, verifier, solver, ...).
    """

    agents: tuple[AgentLoad, ...]
    tasks: int
    group_size: int
    max_concurrent_episodes: int
    source: str = "assumed"
    """Where the numbers come from, in words: assumed ones, or the run that they were measured in."""

    @property
    def episodes(self) -> int:
        return self.tasks * self.group_size

    def of(self, policy: str) -> tuple[AgentLoad, ...]:
        """The agents that speak with `policy`."""
        return tuple(agent for agent in self.agents if agent.policy == policy)


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """How fast one engine replica is. Made by `costs.engine_speed` from peaks, or by `calibration` from measurements.

    A decode step of n sequences with c tokens of context in all of them takes
    max(reads, products) + (1 - overlap) min(reads, products) + overhead_seconds + sequence_seconds n, with
    reads = weight_seconds + kv_token_seconds c and products = token_seconds n + pair_seconds c;
    prefilling t tokens over p query-key pairs takes prefill_token_seconds t + prefill_pair_seconds p.
    """

    weight_seconds: float
    """Reading all weights once."""
    kv_token_seconds: float
    """Reading the keys and values of one token of context."""
    token_seconds: float
    """The products of one sequence's next token, head included."""
    pair_seconds: float
    """The attention of one query-key pair."""
    overhead_seconds: float
    """Of every step: scheduling, launches, the latency of the tensor-parallel ranks' collectives."""
    prefill_token_seconds: float
    slots: int
    """Sequences decoded together at most (max_concurrent)."""
    kv_tokens: int
    """Tokens that the KV cache holds; running sequences don't exceed it."""
    prefill_pair_seconds: float = 0.0
    sequence_seconds: float = 0.0
    """Of every sequence in a step: sampling, and the bytes of the tensor-parallel ranks' collectives."""
    request_seconds: float = 0.0
    """Latency of a call beside the engine's steps."""
    overlap: float = 1.0
    """How much of the shorter of reads and products hides behind the longer."""

    def step_seconds(self, sequences: float, context_tokens: float) -> float:
        """Of one decode step of `sequences` with `context_tokens` tokens of context in all of them together."""
        reads = self.weight_seconds + self.kv_token_seconds * context_tokens
        products = self.token_seconds * sequences + self.pair_seconds * context_tokens
        work = max(reads, products) + (1 - self.overlap) * min(reads, products)
        return work + self.overhead_seconds + self.sequence_seconds * sequences

    def prefill_seconds(self, tokens: float, pairs: float = 0.0) -> float:
        """Of computing `tokens` of prompts that aren't cached, over `pairs` query-key pairs."""
        return self.prefill_token_seconds * tokens + self.prefill_pair_seconds * pairs


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of one policy."""

    speed: EngineSpeed
    replicas: int = 1
    devices: str = ""
    """Which devices they run on, as a name. Engines of several policies with one name share them: their steps take turns.
    Empty: devices of their own."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What rolling one step's episodes out takes. `simulation.simulate` and `engines.bound` both give one."""

    seconds: float
    generated_tokens: float
    prompt_tokens: float
    """That the engines compute: cached ones aren't."""
    longest_episode_seconds: float
    """Of the slowest episode."""
    busy_share: Mapping[str, float]
    """Policy -> share of `seconds` in which its engines have work."""
    method: str
    """In words: bound, or simulated."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one training step by phase; `step` says how they add up."""

    rollout: float
    score: float
    """Old log-probs (with several updates per step) and values of critics."""
    train: float
    """Updates: forward, backward, reference, gradient reduction, optimiser."""
    sync: float
    wake: float
    """Putting engines to sleep and waking them, where they share the trainer's GPUs."""
    other: float
    """What belongs to no phase."""
    ahead: bool = False
    """Rollouts run while the step before is trained (max_staleness > 0)."""

    @property
    def step(self) -> float:
        """One step's seconds: the sum, or, where rollouts run ahead, the longer of rollout and training, then the sync."""
        training = self.score + self.train
        middle = max(self.rollout, training) if self.ahead else self.rollout + training
        return middle + self.sync + self.wake + self.other


@dataclass(frozen=True, slots=True)
class Layout:
    """How one policy lies on the cluster: its trainer's ranks and its engines."""

    ranks: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    engine_tensor_parallel: int
    replicas: int
    gpus: Literal["own", "shared"]
    sleep: bool = False
    sequence_parallel: bool = True

    @property
    def data_parallel(self) -> int:
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def engine_gpus(self) -> int:
        return self.engine_tensor_parallel * self.replicas
