"""Which GPUs of which host every engine takes: a function of the configuration and of the numbers of GPUs and trainer ranks.

    place_engines(config, world=4, ranks_per_host=4, gpus_per_host=8)
    {"solver": (Seat(None, (4, 5)), Seat(None, (6, 7))), "verifier": (Seat("tcp://10.0.0.7:8200", None),)}

Says nothing of memory (`room`) and looks at no device (`machine`). Called by the run, by dry runs and by evaluations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

from drmas.config.schema import EngineConfig, RunConfig
from drmas.errors import ConfigError


class Seat(NamedTuple):
    """Where one replica runs."""

    host: str | None
    """The URL of an engine host; None: the host of rank 0."""
    gpus: tuple[int, ...] | None
    """Indices into what this process sees. None: there are none (a CPU), or the engine host chooses `tensor_parallel` ones."""


ROUNDING = 1e-9
"""Of a sum of fractions: 0.1 and 0.2 and 0.7 are one."""

Seats = Mapping[str, Sequence[Seat]]
"""Policy -> a seat for each replica."""


def place_engines(config: RunConfig, *, world: int, ranks_per_host: int, gpus_per_host: int) -> dict[str, tuple[Seat, ...]]:
    """A seat for every replica of every policy. Trainer rank r of rank 0's host has its GPU r.

    Replicas take the policy's engine hosts in turn; those of `cluster.engine_hosts` are taken in turn by the replicas of all
    policies that have none of their own. own: the first GPUs that no trainer rank and no engine before has. shared: GPUs of
    trainer ranks, those after the ones that the policy before shares, from the first one on where that leaves too few; so
    engines meet on a GPU only where the ranks run out. An engine of backend torch is on rank 0's device. On an engine
    host there are no trainer ranks, so that `shared` means nothing.

    `world` 0 is an evaluation: no GPU is a trainer's, and `shared` means those that no engine has of its own.
    `gpus_per_host` 0 is a host without GPUs, on which everything fits. ConfigError: there are too few, with the arithmetic.
    """
    hosts = cycle(config.cluster.engine_hosts)
    places = {name: list(_hosts(policy.engine, hosts)) for name, policy in config.policies.items()}
    host = _Host("rank 0's host" if world else "this host", gpus_per_host, min(world, ranks_per_host))
    host.check_trainers()
    seats: dict[str, tuple[Seat, ...]] = {}
    for turn in ("own", "shared"):  # those of their own first: an evaluation shares what these leave
        for name, policy in config.policies.items():
            if policy.engine.gpus == turn:
                seats[name] = tuple(_seats(name, policy.engine, places[name], host))
    return {name: seats[name] for name in config.policies}


def check_fractions(engines: Mapping[str, EngineConfig], seats: Seats) -> None:
    """ConfigError: engines that run at a time, by policy, want more of a GPU of this host than there is."""
    on: dict[int, list[str]] = {}
    for name in (name for name, engine in engines.items() if engine.backend == "vllm"):
        for gpu in (gpu for seat in seats[name] for gpu in seat.gpus or ()):
            on.setdefault(gpu, []).append(name)
    for gpu, names in on.items():
        if (total := sum(engines[name].gpu_memory_fraction for name in names)) > 1 + ROUNDING:
            terms = " + ".join(
                f"policies.{name}.engine.gpu_memory_fraction {engines[name].gpu_memory_fraction:g}" for name in names
            )
            raise ConfigError(f"GPU {gpu} has engines that want {total:g} of it: {terms}; lower them to 1 in sum")


def needs_of_hosts(config: RunConfig, seats: Seats) -> Counter[str]:
    """How many GPUs the engines at each engine host take."""
    needs: Counter[str] = Counter()
    for name, own in seats.items():
        for seat in own:
            if seat.host is not None:
                needs[seat.host] += config.policies[name].engine.tensor_parallel
    return needs


def _hosts(engine: EngineConfig, shared: Iterator[str]) -> Iterator[str | None]:
    """Of each replica. `shared` is what policies without hosts of their own take the next one of."""
    own = shared if engine.hosts is None else cycle(engine.hosts)
    for _ in range(engine.replicas):
        yield None if engine.backend == "torch" else next(own, None)


def _seats(name: str, engine: EngineConfig, places: Sequence[str | None], host: _Host) -> Iterator[Seat]:
    if places[0] is not None:  # there are no trainer ranks whose GPUs it could share
        yield from (Seat(url, None) for url in places)
    elif host.gpus == 0:
        yield from (Seat(None, None) for _ in places)
    elif engine.backend == "torch":
        yield Seat(None, (0,))
    else:
        taken = host.own(name, engine) if engine.gpus == "own" else host.shared(name, engine)
        size = engine.tensor_parallel
        yield from (Seat(None, taken[first : first + size]) for first in range(0, len(taken), size))


@dataclass
class _Host:
    """The GPUs of one host, while they are given away."""

    called: str
    gpus: int
    trainers: int
    """GPUs of trainer ranks: the first ones."""
    taken: dict[str, int] = field(default_factory=dict)
    """Policy -> how many its engines have of their own."""
    next_shared: int = 0

    def check_trainers(self) -> None:
        if 0 < self.gpus < self.trainers:
            raise ConfigError(
                f"{self.called} has {self.gpus} GPU(s) and {self.trainers} trainer ranks, which take one each: start at most "
                f"{self.gpus} per host (launchers/torchrun/single_node.sh)"
            )

    def own(self, name: str, engine: EngineConfig) -> tuple[int, ...]:
        first = self.trainers + sum(self.taken.values())
        need = engine.replicas * engine.tensor_parallel
        if first + need > self.gpus:
            raise ConfigError(
                f"{_needs(name, engine)} of its own; {self.called} has {self.gpus}{self._who()}: {self.gpus - first} are left. "
                f"Lower policies.{name}.engine.replicas or .tensor_parallel, start fewer trainer ranks per host, set "
                f"policies.{name}.engine.gpus to shared, or name hosts that run drmas serve-engines in cluster.engine_hosts"
            )
        self.taken[name] = need
        return tuple(range(first, first + need))

    def shared(self, name: str, engine: EngineConfig) -> tuple[int, ...]:
        pool = range(self.trainers) if self.trainers else range(sum(self.taken.values()), self.gpus)
        need = engine.replicas * engine.tensor_parallel
        if need > len(pool):
            there = f"{self.called} has {self.trainers}" if self.trainers else f"{self.called} has {self.gpus}{self._who()}"
            whose = "of trainer ranks" if self.trainers else "that no engine has of its own"
            raise ConfigError(
                f"{_needs(name, engine)} {whose}; {there}: {len(pool)} are there to share. Lower "
                f"policies.{name}.engine.replicas or .tensor_parallel, or set policies.{name}.engine.gpus to own"
            )
        first = self.next_shared if self.next_shared + need <= len(pool) else 0
        self.next_shared = first + need
        return tuple(pool[first : first + need])

    def _who(self) -> str:
        """Of which the trainer ranks take 4 and engines of a 2."""
        takers = [f"the trainer ranks take {self.trainers}"] if self.trainers else []
        takers += [f"engines of {name} {count}" for name, count in self.taken.items()]
        return f", of which {' and '.join(takers)}" if takers else ""


def _needs(name: str, engine: EngineConfig) -> str:
    count, size = engine.replicas, engine.tensor_parallel
    return (
        f"policies.{name}.engine needs {count} replica{'s' if count > 1 else ''} x tensor_parallel {size} = {count * size} "
        f"GPU{'s' if count * size > 1 else ''}"
    )
