"""The engines of an evaluation: those that the team at hand needs, and no others.

Ablations speak with base models besides the policies' own. An engine that the next team doesn't need is closed before one that
it needs is made, so that the models of one team are in memory at a time. Where a team needs a policy and its base at once, the
two share the policy's part of the GPU. Used by `drmas.runtime.evaluate`:

    with Engines(training_engine, voices, plan=[{"main"}, {"main", "base of main"}], ...) as engines:
        engines.take({"main"})     # by name, not started
        engines.start()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drmas.config.schema import EngineConfig, RunConfig
from drmas.errors import RolloutError
from drmas.rollout.engine import Engine
from drmas.runtime.engines import open_engine
from drmas.runtime.gpus import Seat


@dataclass(frozen=True)
class Voice:
    """What an engine serves: a model folder, under the engine settings of the policy it belongs to."""

    policy: str
    config: EngineConfig
    folder: Path
    seats: Sequence[Seat]
    """Of each replica; those of the policy, which its base model has as well."""


EngineFactory = Callable[[str, Voice, RunConfig, Path], Engine]
"""(name, voice, the run's settings, folder of the logs) -> an engine, not started."""


def training_engine(name: str, voice: Voice, config: RunConfig, logs: Path) -> Engine:
    """As training has it."""
    return open_engine(
        name,
        voice.config,
        model_path=voice.folder,
        log_dir=logs,
        seed=config.seed,
        deterministic=config.rollout.deterministic,
        seats=voice.seats,
        cluster=config.cluster,
    )


class Engines:
    """`voices` by engine name. `plan`: the names of every `take` to come, which decides who shares a GPU."""

    def __init__(
        self,
        make: EngineFactory,
        voices: Mapping[str, Voice],
        config: RunConfig,
        logs: Path,
        *,
        plan: Sequence[Collection[str]],
    ) -> None:
        self._make, self._config, self._logs = make, config, logs
        self._voices = {name: _shared(name, voice, voices, plan) for name, voice in voices.items()}
        self._engines: dict[str, Engine] = {}
        self._restarts: Counter[str] = Counter()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._close(list(self._engines))

    def take(self, names: Collection[str]) -> dict[str, Engine]:
        """The engines of these names; those that aren't among them are closed, those that are missing are made."""
        self._close([name for name in self._engines if name not in names])
        for name in sorted(names):
            if name not in self._engines:
                self._engines[name] = self._make(name, self._voices[name], self._config, self._logs)
        return dict(self._engines)

    def start(self) -> None:
        """Start those that aren't alive, and have the others forget their prefixes, so that nothing depends on who was asked
        before (I9). EngineStartError: one doesn't come up."""
        for engine in self._engines.values():
            if engine.alive:
                engine.pause()
                engine.resume()
            else:
                engine.start()

    def restart(self, name: str) -> str:
        """Bring a dead engine up anew; what happened, in words. RolloutError: it died more often than it may."""
        voice = self._voices[name]
        if self._restarts[name] >= voice.config.max_restarts:
            raise RolloutError(
                f"the engine of {name} died {self._restarts[name] + 1} times; policies.{voice.policy}.engine.max_restarts is "
                f"{voice.config.max_restarts}"
            )
        self._restarts[name] += 1
        self._engines[name].start()
        return f"the engine of {name} died and was started again ({self._restarts[name]} of {voice.config.max_restarts})"

    def _close(self, names: Sequence[str]) -> None:
        for name in names:
            self._engines.pop(name).close()


def _shared(name: str, voice: Voice, voices: Mapping[str, Voice], plan: Sequence[Collection[str]]) -> Voice:
    """The voice with its part of the GPU's memory; on an engine host it gets GPUs of its own."""
    if any(seat.host is not None for seat in voice.seats):
        return voice
    together = max(sum(voices[other].policy == voice.policy for other in names) for names in plan if name in names)
    fraction = voice.config.gpu_memory_fraction / together
    return replace(voice, config=voice.config.model_copy(update={"gpu_memory_fraction": fraction}))
