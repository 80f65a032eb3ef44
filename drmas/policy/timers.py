"""Megatron's timers as spans of the trace: its schedules call them around each microbatch's forward and backward pass.

Put one into `TransformerConfig.timers`. While nothing is traced a call costs next to nothing. The pipeline's sends and receives
are timed under Megatron's own names, such as "forward-recv": what a stage waits for there is the pipeline's bubble.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from drmas.telemetry import trace

_NAMES = {"forward-compute": "forward", "backward-compute": "backward"}
_LEFT_OUT = ("forward-backward",)
"""It contains all the others."""


class SpanTimer:
    """One of Megatron's timers. A span that an error left open ends at the next start."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: AbstractContextManager[None] | None = None

    def start(self, barrier: bool = False) -> None:
        """`barrier` is Megatron's wish to line the ranks up first, which would change what is measured."""
        self.stop()
        if self._name not in _LEFT_OUT:
            self._open = trace.span(self._name)
            self._open.__enter__()

    def stop(self, barrier: bool = False) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class SpanTimers:
    """Stands in for `megatron.core.timers.Timers`."""

    def __init__(self) -> None:
        self._timers: dict[str, SpanTimer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> SpanTimer:
        return self._timers.setdefault(name, SpanTimer(_NAMES.get(name, name)))
