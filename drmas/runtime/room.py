"""Whether trainers and engines have room where they are placed, with the arithmetic; a line for every engine.

On GPUs it is checked where engines and trainer ranks share one, at the moments that count: while policies are trained, and,
where engines sleep then, while episodes run. On a CPU all processes share the host's memory. What isn't known, such as the size
of a GPU that a dry run only imagines, is said and not refused. The numbers come from `memory`, the places from `gpus`, the
host's sizes from `machine`. Called by `placement.describe`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drmas.config.schema import EngineConfig, RunConfig
from drmas.errors import ConfigError
from drmas.policy.architecture import Architecture
from drmas.runtime import memory
from drmas.runtime.gpus import ROUNDING, Seat, Seats
from drmas.runtime.machine import Machine

GIB = 2**30
CONTEXT_BYTES = 1 * GIB
"""Allowance for a trainer process: the driver's context, buffers of NCCL, pieces that torch can't use. Not measured."""
SLEEPING_BYTES = 2 * GIB
"""Allowance for what an engine that sleeps keeps on its GPU: context, NCCL, captured graphs, LoRA's buffers. Not measured."""
PROCESS_BYTES = 0.65 * GIB
"""Of an engine's process on a CPU without weights and cache: a tiny model's has 0.65 GiB (`peak_memory_bytes`)."""


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """What each worker of a policy's engine must hold, in bytes."""

    weights: float
    sequence: float
    """Keys and values of the longest sequence: a smaller cache can't serve it."""

    @classmethod
    def of(cls, config: EngineConfig, architecture: Architecture, parameters: int) -> EngineNeed:
        size, heads = memory.BYTES[config.dtype], max(1, architecture.kv_heads // config.tensor_parallel)
        token = 2 * architecture.layers * heads * architecture.head_dim * size
        return cls(size * parameters / config.tensor_parallel, float(token * config.max_model_tokens))


@dataclass(frozen=True, slots=True)
class RankNeed:
    """What a trainer rank holds: its numbers by part, as `memory.by_part`, and the largest policy's activations."""

    parts: Mapping[str, float]
    activations: float

    @property
    def on_device(self) -> float:
        return sum(size for what, size in self.parts.items() if not what.endswith("host memory"))


class _Moment(NamedTuple):
    """What a GPU has to hold at some time: bytes, and a share of its own size."""

    when: str
    bytes: float
    share: float


@dataclass
class _Gpu:
    index: int
    rank: RankNeed | None
    engines: list[tuple[str, EngineConfig]] = field(default_factory=list)
    in_process: float = 0.0
    """Weights of engines that are in the trainer's own process."""

    def moments(self) -> list[_Moment]:
        share = sum(config.gpu_memory_fraction for _, config in self.engines)
        awake = sum(config.gpu_memory_fraction for _, config in self.engines if not config.sleep)
        sleeping = sum(config.sleep for _, config in self.engines)
        if self.rank is None:
            return [_Moment("while episodes run", 0.0, share)]
        resident = self.rank.on_device + self.in_process + CONTEXT_BYTES
        updates = _Moment("while policies are trained", resident + self.rank.activations + sleeping * SLEEPING_BYTES, awake)
        return [_Moment("while episodes run", resident, share), updates] if sleeping else [updates]

    def contents(self, moment: _Moment, card: float | None) -> str:
        """The terms of its sum."""
        terms = []
        if self.rank is not None:
            terms += [f"the trainer's numbers {memory.describe(self.rank.parts)}", f"CUDA and NCCL {_gib(CONTEXT_BYTES)}"]
        trained = moment.when == "while policies are trained"
        terms += [f"activations about {_gib(self.rank.activations)}"] if self.rank is not None and trained else []
        terms += [f"an engine in the trainer's process {_gib(self.in_process)}"] if self.in_process else []
        for name, config in self.engines:
            if trained and config.sleep:
                terms.append(f"engine {name} asleep {_gib(SLEEPING_BYTES)}")
            else:
                size = "" if card is None else f" x {_gib(card)} = {_gib(config.gpu_memory_fraction * card)}"
                terms.append(f"engine {name} {config.gpu_memory_fraction:g}{size or ' of the card'}")
        return ", ".join(terms)


class Room:
    """`needs`: of every policy's engine. `ranks`: trainer rank, of the whole job, -> what it holds."""

    def __init__(
        self,
        config: RunConfig,
        seats: Seats,
        machine: Machine,
        needs: Mapping[str, EngineNeed],
        ranks: Mapping[int, RankNeed],
    ) -> None:
        self.config, self.seats, self.machine, self.needs, self.ranks = config, seats, machine, needs, ranks
        own = {index: ranks.get(index) for index in range(machine.ranks)}  # of the job's ranks, those of this host
        self.gpus: list[_Gpu] = [_Gpu(index, own.get(index)) for index in range(machine.gpus)]
        for name, policy in config.policies.items():
            for gpu in (self.gpus[index] for seat in seats[name] for index in seat.gpus or ()):
                if policy.engine.backend == "torch":
                    gpu.in_process += needs[name].weights
                else:
                    gpu.engines.append((name, policy.engine))

    def check(self) -> None:
        """ConfigError: something doesn't fit, with the sum and the keys that it comes from."""
        if self.machine.gpus == 0:
            self._check_host()
            return
        for name, policy in self.config.policies.items():
            self._check_engine(name, policy.engine)
        for gpu in self.gpus:
            for moment in gpu.moments() if gpu.engines else ():
                self._check_moment(gpu, moment)

    def lines(self) -> dict[str, str]:
        """Label -> line: of every engine, and of the GPU, or the host, that they share with trainer ranks."""
        found = {}
        for name, policy in self.config.policies.items():
            for replica, seat in enumerate(self.seats[name]):
                label = f"engine {name}" if len(self.seats[name]) == 1 else f"engine {name}-{replica}"
                found[label] = self._engine(name, policy.engine, seat)
        shared = [(moment, gpu) for gpu in self.gpus if gpu.engines and gpu.rank is not None for moment in gpu.moments()]
        if shared:
            found["GPU memory"] = self._fullest(shared)
        if self.machine.gpus == 0:
            left = "" if self.machine.free_bytes is None else f" of the {_gib(self.machine.free_bytes)} that are left"
            activations = sum(self.ranks[rank].activations for rank in range(self.machine.ranks))
            found["host memory"] = f"about {_gib(sum(self._on_host().values()))} and {_gib(activations)} of activations{left}"
        return found

    def _check_engine(self, name: str, engine: EngineConfig) -> None:
        """Of its own GPUs or shared ones: vLLM needs weights and cache within its fraction."""
        card, need, fraction = self.machine.gpu_bytes, self.needs[name], engine.gpu_memory_fraction
        if card is None or engine.backend == "torch" or self.seats[name][0].host is not None:
            return
        if need.weights + need.sequence > fraction * card:
            raise ConfigError(
                f"policies.{name}.engine.gpu_memory_fraction is {fraction:g}, of {_gib(card)} a GPU {_gib(fraction * card)}; "
                f"weights take {_gib(need.weights)}, the cache of one sequence of max_model_tokens {engine.max_model_tokens} "
                f"{_gib(need.sequence)}: raise the fraction, or policies.{name}.engine.tensor_parallel"
            )

    def _check_moment(self, gpu: _Gpu, moment: _Moment) -> None:
        card = self.machine.gpu_bytes
        impossible = moment.share > 1 + ROUNDING or (moment.share > 1 - ROUNDING and moment.bytes > 0)
        if not impossible and (card is None or moment.bytes + moment.share * card <= card * (1 + ROUNDING)):
            return
        total = (
            f"{_gib(moment.bytes)} and {moment.share:g} of itself" if card is None else _gib(moment.bytes + moment.share * card)
        )
        names = list(dict.fromkeys(name for name, _ in gpu.engines))
        asleep = moment.when == "while policies are trained"
        counted = [name for name, config in gpu.engines if not (asleep and config.sleep)]
        ways = ["lay the policies out over more ranks"] if gpu.rank is not None else []
        if counted:
            room = "" if card is None else f" to {max(0.0, 1 - moment.bytes / card):.2f}{' in sum' if len(counted) > 1 else ''}"
            keys = " and ".join(f"policies.{name}.engine.gpu_memory_fraction" for name in dict.fromkeys(counted))
            ways.insert(0, f"lower {keys}{room}")
        if gpu.rank is not None and asleep and counted:
            ways.append(f"set policies.{counted[0]}.engine.sleep to true")
        ways += [f"set policies.{names[-1]}.engine.gpus to own"] if gpu.rank is not None else []
        has = "" if card is None else f" has {_gib(card)} and"
        raise ConfigError(
            f"GPU {gpu.index} of {self._host_name()}{has} would need {total} {moment.when}: {gpu.contents(moment, card)}; "
            + ", or ".join(ways)
        )

    def _check_host(self) -> None:
        left, needs = self.machine.free_bytes, self._on_host()
        if left is None or sum(needs.values()) <= left:
            return
        terms = ", ".join(f"{what} {_gib(size)}" for what, size in needs.items())
        names = " and ".join(f"policies.{name}.engine.kv_cache_bytes" for name in self.config.policies)
        raise ConfigError(
            f"trainer and engines need about {_gib(sum(needs.values()))}, activations not counted, and this host has "
            f"{_gib(left)} left: {terms}; lower {names}, take a smaller model, bfloat16 or lora, or a larger machine"
        )

    def _on_host(self) -> dict[str, float]:
        """What -> bytes, of all that runs on this host's CPU."""
        found: dict[str, float] = {}
        for rank in range(self.machine.ranks):
            for what, size in self.ranks[rank].parts.items() if rank in self.ranks else ():
                found[f"trainer's {what}"] = found.get(f"trainer's {what}", 0.0) + size
        for name, policy in self.config.policies.items():
            engine, need = policy.engine, self.needs[name]
            replicas = sum(seat.host is None for seat in self.seats[name])
            if not replicas:
                continue
            found[f"weights of engine {name}"] = replicas * engine.tensor_parallel * need.weights
            if engine.backend != "torch":
                processes = engine.tensor_parallel + (engine.tensor_parallel > 1)
                found[f"cache of engine {name}"] = float(replicas * engine.tensor_parallel * engine.kv_cache_bytes)
                found[f"process of engine {name}"] = replicas * processes * PROCESS_BYTES
        return found

    def _engine(self, name: str, engine: EngineConfig, seat: Seat) -> str:
        weights, fraction = self.needs[name].weights, engine.gpu_memory_fraction
        if engine.backend == "torch":
            where = f"GPU {seat.gpus[0]}" if seat.gpus else "the CPU"
            return f"in the process of rank 0 on {where}, {_gib(weights)} of weights"
        if seat.host is None and self.machine.gpus == 0:
            cache = engine.kv_cache_bytes * engine.tensor_parallel
            whole = weights * engine.tensor_parallel
            return f"the CPU of {self._host_name()}, {_gib(whole)} of weights, {_gib(cache)} of cache, and its process"
        each = "it" if engine.tensor_parallel == 1 else "each"
        known = self.machine.gpu_bytes if seat.host is None else None
        size = "" if known is None else f" ({_gib(fraction * known)})"
        share = f"{fraction:g} of {each}{size}, {_gib(weights)} of it for weights"
        if seat.host is not None:
            return f"{engine.tensor_parallel} GPU(s) of {seat.host}, {share}"
        with_whom = ", shared with trainer ranks" if seat.gpus[0] < self.machine.ranks else ""
        asleep = f"; asleep during updates, {_gib(weights)} a GPU in host memory" if engine.sleep else ""
        return f"{_list(seat.gpus)} of {self._host_name()}{with_whom}, {share}{asleep}"

    def _fullest(self, shared: Sequence[tuple[_Moment, _Gpu]]) -> str:
        card = self.machine.gpu_bytes
        if card is None:
            moment, gpu = max(shared, key=lambda item: (_card(item[0]), -item[1].index))
            total = f"a card of at least {_gib(_card(moment))}"
        else:
            moment, gpu = max(shared, key=lambda item: (item[0].bytes + item[0].share * card, -item[1].index))
            total = f"{_gib(moment.bytes + moment.share * card)} of {_gib(card)}"
        return f"GPU {gpu.index} is the fullest and needs {total} {moment.when}: {gpu.contents(moment, card)}"

    def _host_name(self) -> str:
        return "rank 0's host" if self.machine.ranks else "this host"


def _card(moment: _Moment) -> float:
    """The smallest card that holds it; infinite where its share leaves nothing."""
    return moment.bytes / (1 - moment.share) if moment.share < 1 else float("inf")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _list(gpus: Sequence[int]) -> str:
    """GPU 4, or GPUs 4-7: an engine's are always consecutive."""
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]}-{gpus[-1]}"


def rank_needs(
    held: Mapping[str, Mapping[int, Sequence[memory.Part]]], activations: Mapping[str, Mapping[int, float]]
) -> Iterator[tuple[int, RankNeed]]:
    """Of every rank, from what each policy holds on it. Policies are trained one after the other, so the largest counts."""
    for rank in sorted({rank for own in held.values() for rank in own}):
        parts = [part for own in held.values() for part in own.get(rank, ())]
        yield rank, RankNeed(memory.by_part(parts), max(own.get(rank, 0.0) for own in activations.values()))
