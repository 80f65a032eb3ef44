"""The run over HTTP: `/metrics` for Prometheus, `/health` for whoever restarts what has stalled.

`/metrics` has every number of the last step as a gauge (`prometheus_names` has the rule), counters of what this process has
done, and a histogram of step times; every sample has the label `run`. `/health` is JSON, with 200, or 503 where no step has
ended for `telemetry.stall_seconds` (or five times the longest step so far, if that is more), or an engine is dead for good.

Nobody is asked for a password, and nothing but GET is answered. Made by the runtime on rank 0; `MetricsLog` writes to it.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from drmas.errors import ConfigError
from drmas.telemetry.names import Metrics, failures_of, policies_of, seconds_of
from drmas.telemetry.prometheus_names import named

STALL_STEPS = 5
"""Of the longest step so far: a step that takes longer has stalled."""
STEP_BUCKETS = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
REQUEST_SECONDS = 10.0


class EngineState(NamedTuple):
    alive: bool
    restarts: int = 0
    max_restarts: int = 0

    @property
    def lost(self) -> bool:
        """Whether nobody will start it again."""
        return not self.alive and self.restarts >= self.max_restarts


class MetricsServer:
    """Serves from its making until `close`. Port 0 takes a free one, which `url` tells."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        run: str,
        steps: int,
        stall_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ConfigError: the address can't be had."""
        self.run, self.steps, self.stall_seconds = run, steps, stall_seconds
        self._clock, self._lock = clock, threading.Lock()
        self._step: int | None = None
        self._metrics: Metrics = {}
        self._longest, self._last = 0.0, clock()
        self._engines: Callable[[], Mapping[str, EngineState]] = dict
        self._checkpoint: Callable[[], int | None] = lambda: None
        self._registry = CollectorRegistry()
        self._totals = _Totals(self._registry, run)
        self._registry.register(self)
        self._server = _listen(host, port, self._answer)
        self.port: int = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def watch(self, engines: Callable[[], Mapping[str, EngineState]], checkpoint: Callable[[], int | None]) -> None:
        """Where to ask for the engines' states, by policy, and for the step of the newest checkpoint."""
        self._engines, self._checkpoint = engines, checkpoint

    def write(self, step: int, metrics: Metrics) -> None:
        """The step's numbers as they are logged; they stand until the next step's."""
        with self._lock:
            self._step, self._metrics, self._last = step, dict(metrics), self._clock()
            self._longest = max(self._longest, seconds_of(metrics) or 0.0)
        self._totals.add(metrics)

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and the page of `/health`."""
        with self._lock:
            step, age, longest = self._step, self._clock() - self._last, self._longest
        engines, bound = self._engines(), max(self.stall_seconds, STALL_STEPS * longest)
        lost = [name for name, engine in engines.items() if engine.lost]
        status = "running" if step is not None else "starting"
        if step is not None and step >= self.steps:
            status = "ending"
        elif lost:
            status = f"engine of {', '.join(lost)} is dead"
        elif age > bound:
            status = "stalled"
        page = {"status": status, "run": self.run, "step": step, "steps": self.steps, "seconds_since_step": round(age, 1)}
        page |= {"stalled_after_seconds": bound, "checkpoint": self._checkpoint()}
        page["engines"] = {name: engine._asdict() for name, engine in engines.items()}
        return 200 if status in ("running", "starting", "ending") else 503, page

    def collect(self) -> Iterator[Metric]:
        """For the registry: the gauges of the last step and of this moment."""
        with self._lock:
            step, metrics, age = self._step, self._metrics, self._clock() - self._last
        families: dict[str, GaugeMetricFamily] = {}
        own = {"drmas_step": step, "drmas_steps_planned": self.steps, "drmas_step_age_seconds": age}
        own["drmas_checkpoint_step"] = self._checkpoint()
        for name, value in own.items():
            if value is not None:
                self._add(families, name, {}, value, _OWN[name])
        for key, value in metrics.items():
            if key != "step" and value is not None and (sample := named(key)):
                self._add(families, sample.name, sample.labels, value, f"As {key} in metrics.jsonl, of the last step.")
        restarts = CounterMetricFamily("drmas_engine_restarts", _OWN["drmas_engine_restarts"], labels=["run", "policy"])
        for policy, engine in self._engines().items():
            self._add(families, "drmas_engine_alive", {"policy": policy}, engine.alive, _OWN["drmas_engine_alive"])
            restarts.add_metric([self.run, policy], engine.restarts)
        yield from (*families.values(), restarts)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _add(
        self, families: dict[str, GaugeMetricFamily], name: str, labels: Mapping[str, str], value: float, about: str
    ) -> None:
        if name not in families:
            families[name] = GaugeMetricFamily(name, about, labels=["run", *labels])
        families[name].add_metric([self.run, *labels.values()], value)

    def _answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Status, content type and body of the page."""
        if path == "/metrics":
            encode, kind = choose_encoder(accept)
            return 200, kind, encode(self._registry)
        if path == "/health":
            status, page = self.health()
            return status, "application/json", json.dumps(page).encode() + b"\n"
        return 404, "text/plain", b"expected /metrics or /health\n"


_OWN = {
    "drmas_step": "The last step that ended.",
    "drmas_steps_planned": "Steps of the whole run (train.steps).",
    "drmas_step_age_seconds": "Time since a step ended, or since the start.",
    "drmas_checkpoint_step": "The step of the newest checkpoint.",
    "drmas_engine_alive": "Whether the policy's engines run.",
    "drmas_engine_restarts": "How often the policy's engine died and was started again.",
}


class _Totals:
    """What this process has done so far; a resumed run counts from zero, which Prometheus expects of counters."""

    def __init__(self, registry: CollectorRegistry, run: str) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, ["run", *labels], registry=registry)

        self._run = run
        self._steps = counter("drmas_steps", "Steps that ended.").labels(run)
        self._episodes = counter("drmas_episodes", "Episodes, failed ones too.").labels(run)
        self._generated = counter("drmas_generated_tokens", "Tokens that engines generated.").labels(run)
        self._trained = counter("drmas_trained_tokens", "Prompt and response tokens of applied updates.", "policy")
        self._failures = counter("drmas_failures", "Failed episodes by kind.", "kind")
        self._seconds = Histogram(
            "drmas_step_duration_seconds", "Wall time of a step.", ["run"], buckets=STEP_BUCKETS, registry=registry
        ).labels(run)

    def add(self, metrics: Metrics) -> None:
        self._steps.inc()
        self._episodes.inc(metrics.get("rollout/episodes") or 0)
        self._generated.inc(metrics.get("rollout/tokens") or 0)
        for policy in policies_of([metrics]):
            self._trained.labels(self._run, policy).inc(metrics.get(f"train/{policy}/tokens") or 0)
        for kind, count in failures_of(metrics).items():
            self._failures.labels(self._run, kind).inc(count)
        if (seconds := seconds_of(metrics)) is not None:
            self._seconds.observe(seconds)


Answer = Callable[[str, str], tuple[int, str, bytes]]


class _Server(ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6


def _listen(host: str, port: int, answer: Answer) -> _Server:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version, sys_version = "drmas", ""

        def do_GET(self) -> None:
            status, kind, body = answer(self.path.partition("?")[0], self.headers.get("Accept", ""))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            """A scrape every few seconds isn't worth a line."""

    try:
        return (_ServerIPv6 if ":" in host else _Server)((host, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"telemetry.metrics_port is {port} and telemetry.metrics_host is {host}, which can't be served: {error}; take "
            "another port, 0 for a free one, or an address of this machine"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
