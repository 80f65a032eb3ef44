"""What the GPUs of this host draw and do while steps run: power, memory, utilisation, clocks, temperature, energy.

A thread asks NVML (nvidia-ml-py) a few times per second. Each value becomes a counter of the trace, where one is recorded, and
each step's mean and largest become metrics: `gpu/0/power_watts`, `gpu/0/power_watts_max`, and `gpu/0/energy_joules`, which is
the driver's own count or, where the card has none, power over time. A GPU's number is its place in CUDA_VISIBLE_DEVICES, as
torch counts them; NVML orders by PCI bus, which is CUDA's order where the cards are alike.

Without NVML nothing is imported and nothing runs. An error of NVML ends the measuring, never the run. Called by the runtime,
once per host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

from drmas.telemetry import trace

LIBRARY = "libnvidia-ml.so.1"
_PATIENCE_SECONDS = 2.0
"""How long a step waits for its last sample; a card that fell off the bus can keep NVML from answering at all."""

_QUANTITIES: dict[str, Callable[[Any, Any], float]] = {
    "power_watts": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    "memory_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
    "utilisation_percent": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    "temperature_celsius": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    "energy_joules": lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
}
"""`energy_joules` is a count since the driver was loaded."""


@dataclass(slots=True)
class _Tally:
    """A quantity since the last step."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, value: float) -> None:
        self.largest = value if self.count == 0 else max(self.largest, value)
        self.count, self.total = self.count + 1, self.total + value


@dataclass(slots=True)
class _Card:
    """One GPU and what was measured of it since the last step, of those quantities that it has."""

    number: int
    handle: Any
    tallies: dict[str, _Tally] = field(default_factory=dict)
    joules: float | None = None
    before: tuple[float, dict[str, float]] | None = None
    """Time and values of the sample before."""

    def add(self, now: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name != "energy_joules":
                self.tallies.setdefault(name, _Tally()).add(value)
        if self.before is not None:
            then, earlier = self.before
            if "energy_joules" in values:
                self.joules = (self.joules or 0.0) + values["energy_joules"] - earlier["energy_joules"]
            elif "power_watts" in values:
                self.joules = (self.joules or 0.0) + (values["power_watts"] + earlier["power_watts"]) / 2 * (now - then)
        self.before = now, values

    def take(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, tally in self.tallies.items():
            metrics[f"gpu/{self.number}/{name}"] = tally.total / tally.count
            metrics[f"gpu/{self.number}/{name}_max"] = tally.largest
        if self.joules is not None:
            metrics[f"gpu/{self.number}/energy_joules"] = self.joules
        self.tallies, self.joules = {}, None
        return metrics


class GpuSampler:
    """Measures until it is closed. Made by `gpu_sampler`; a context manager."""

    def __init__(self, nvml: ModuleType, handles: Sequence[tuple[int, Any]], period_seconds: float) -> None:
        self._nvml, self._period = nvml, period_seconds
        self._cards = [_Card(number, handle) for number, handle in handles]
        self._state = threading.Condition()
        self._wanted, self._samples, self._running = 1, 0, True
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()
        self._await_sample()  # so that the energy of the first step counts from here

    def take(self) -> dict[str, float]:
        """The metrics since the last call, a sample of this moment included; empty once NVML has failed."""
        with self._state:
            self._wanted = self._samples + 1
            self._state.notify_all()
        self._await_sample()
        with self._state:
            return {name: value for card in self._cards for name, value in card.take().items()}

    def close(self) -> None:
        with self._state:
            self._running = False
            self._state.notify_all()
        self._thread.join(_PATIENCE_SECONDS)

    def __enter__(self) -> GpuSampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _await_sample(self) -> None:
        with self._state:
            if not self._state.wait_for(lambda: self._samples >= self._wanted or not self._running, _PATIENCE_SECONDS):
                self._running = False
                warnings.warn("GPUs are no longer measured: NVML doesn't answer. The run goes on.", stacklevel=3)

    def _run(self) -> None:
        """All questions to NVML are asked here, so that one that is never answered holds up nothing else."""
        try:
            while self._running:
                self._sample()
                with self._state:
                    self._samples += 1
                    self._state.notify_all()
                    self._state.wait_for(lambda: self._samples < self._wanted or not self._running, self._period)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            warnings.warn(f"GPUs are no longer measured: NVML says {error}. The run goes on.", stacklevel=2)
        finally:
            with self._state:
                self._running = False
                self._state.notify_all()

    def _sample(self) -> None:
        for card in self._cards:
            now, values = time.perf_counter(), {}
            for name, ask in _QUANTITIES.items():
                with contextlib.suppress(self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
                    values[name] = ask(self._nvml, card.handle)
            with self._state:
                card.add(now, values)
            for name, value in values.items():
                if name != "energy_joules":
                    trace.counter(f"gpu/{card.number}/{name}", value)


def gpu_sampler(*, period_seconds: float = 0.5) -> GpuSampler | None:
    """A sampler of the GPUs that this process may see, already running; None where there are none or no NVML."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuids = [pynvml.nvmlDeviceGetUUID(_handle(pynvml, i)) for i in range(pynvml.nvmlDeviceGetCount())]
        places = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        handles = [(number, _handle(pynvml, place)) for number, place in enumerate(places) if place is not None]
        if not handles:
            pynvml.nvmlShutdown()
            return None
    except pynvml.NVMLError as error:
        warnings.warn(f"GPUs are not measured: NVML says {error}.", stacklevel=2)
        return None
    return GpuSampler(pynvml, handles, period_seconds)


def _handle(nvml: ModuleType, place: int) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(place)


def visible(setting: str | None, uuids: Sequence[str]) -> list[int | None]:
    """CUDA_VISIBLE_DEVICES as places among the machine's GPUs, whose UUIDs are `uuids`; None for a MIG slice.

    As CUDA reads it: indices, or the beginnings of UUIDs; all GPUs if it isn't set; nothing from the first word on that names
    no GPU. NVML knows neither power nor utilisation of a slice.
    """
    if setting is None:
        return list(range(len(uuids)))
    places: list[int | None] = []
    for word in (word.strip() for word in setting.split(",")):
        if word.startswith("MIG-"):
            places.append(None)
            continue
        found = [i for i, uuid in enumerate(uuids) if (word.isdecimal() and int(word) == i) or (word and uuid.startswith(word))]
        if len(found) != 1:
            break
        places += found
    return places
