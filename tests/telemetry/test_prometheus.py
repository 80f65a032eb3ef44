"""The endpoint that Prometheus scrapes: what it serves, and what it says of a run's health."""

import json
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from drmas.errors import ConfigError
from drmas.telemetry.prometheus import EngineState, MetricsServer, is_loopback
from drmas.telemetry.sinks import MetricsLog

STEP = {
    "step": 3,
    "reward/mean": 0.5,
    "rollout/episodes": 16,
    "rollout/tokens": 100,
    "rollout/solver/reward_mean": 0.75,
    "rollout/verifier/reward_mean": 0.25,
    "rollout/solver/tool_errors_share": None,
    "rollout/failed/engine": 2,
    "train/main/grad_norm": 1.5,
    "train/main/tokens": 40,
    "train/main/solver/grad_norm": 1.25,
    "time/rollout_seconds": 3.0,
    "time/step_seconds": 4.0,
    "unheard-of": 1.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock):
    server = MetricsServer("127.0.0.1", 0, run="mine", steps=10, stall_seconds=60.0, clock=clock)
    yield server
    server.close()


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type, text."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def scrape(server: MetricsServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels without the run's) -> value."""
    status, kind, text = get(f"{server.url}/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "mine", sample
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def test_the_last_step_is_served_as_gauges_with_labels(server) -> None:
    server.write(2, STEP | {"rollout/solver/reward_mean": 0.1, "rollout/idle/reward_mean": 0.0})
    server.write(3, STEP)
    found = scrape(server)
    assert found["drmas_step", ()] == 3
    assert found["drmas_steps_planned", ()] == 10
    assert found["drmas_reward_mean", ()] == 0.5
    assert found["drmas_rollout_agent_reward_mean", (("agent", "solver"),)] == 0.75
    assert found["drmas_rollout_agent_reward_mean", (("agent", "verifier"),)] == 0.25
    assert ("drmas_rollout_agent_reward_mean", (("agent", "idle"),)) not in found  # it is of an older step
    assert found["drmas_train_agent_grad_norm", (("agent", "solver"), ("policy", "main"))] == 1.25
    assert found["drmas_train_policy_grad_norm", (("policy", "main"),)] == 1.5
    assert found["drmas_time_seconds", (("phase", "rollout"),)] == 3.0
    assert not any("tool_errors" in name for name, _ in found)
    assert not any("unheard" in name for name, _ in found)


def test_counters_and_the_histogram_add_up_over_steps(server) -> None:
    server.write(1, STEP)
    server.write(2, STEP | {"rollout/failed/engine": 1, "rollout/failed/tool": 1, "time/step_seconds": 400.0})
    found = scrape(server)
    assert found["drmas_steps_total", ()] == 2
    assert found["drmas_episodes_total", ()] == 32
    assert found["drmas_generated_tokens_total", ()] == 200
    assert found["drmas_trained_tokens_total", (("policy", "main"),)] == 80
    assert found["drmas_failures_total", (("kind", "engine"),)] == 3
    assert found["drmas_failures_total", (("kind", "tool"),)] == 1
    assert found["drmas_step_duration_seconds_sum", ()] == 404.0
    assert found["drmas_step_duration_seconds_bucket", (("le", "5.0"),)] == 1
    assert found["drmas_step_duration_seconds_bucket", (("le", "600.0"),)] == 2


def test_before_the_first_step_it_answers_too(server) -> None:
    found = scrape(server)
    assert found["drmas_steps_total", ()] == 0
    assert ("drmas_step", ()) not in found
    status, _, text = get(f"{server.url}/health")
    page = json.loads(text)
    assert (status, page["status"], page["step"], page["checkpoint"]) == (200, "starting", None, None)


def test_engines_and_the_newest_checkpoint(server) -> None:
    server.watch(lambda: {"main": EngineState(True, 1, 2), "other": EngineState(False, 0, 2)}, lambda: 7)
    found = scrape(server)
    assert found["drmas_engine_alive", (("policy", "main"),)] == 1
    assert found["drmas_engine_alive", (("policy", "other"),)] == 0
    assert found["drmas_engine_restarts_total", (("policy", "main"),)] == 1
    assert found["drmas_checkpoint_step", ()] == 7
    status, page = server.health()
    assert (status, page["status"], page["checkpoint"]) == (200, "starting", 7)  # it will be started again
    assert page["engines"]["main"] == {"alive": True, "restarts": 1, "max_restarts": 2}


def test_a_dead_engine_that_nobody_starts_again_is_503(server) -> None:
    server.write(1, STEP)
    server.watch(lambda: {"main": EngineState(False, 2, 2)}, lambda: None)
    assert server.health()[0] == 503
    assert server.health()[1]["status"] == "engine of main is dead"


def test_a_run_that_stalls_is_503_until_a_step_ends(server, clock) -> None:
    clock.now += 60.5
    assert get(f"{server.url}/health")[0] == 503  # no first step
    server.write(1, STEP)
    assert server.health() == (
        200,
        {
            "status": "running",
            "run": "mine",
            "step": 1,
            "steps": 10,
            "seconds_since_step": 0.0,
            "stalled_after_seconds": 60.0,
            "checkpoint": None,
            "engines": {},
        },
    )
    clock.now += 59.5
    assert server.health()[0] == 200
    clock.now += 1
    status, page = server.health()
    assert (status, page["status"], page["seconds_since_step"]) == (503, "stalled", 60.5)
    server.write(2, STEP | {"time/step_seconds": 100.0})
    clock.now += 499
    assert server.health()[0] == 200  # five times the longest step
    clock.now += 2
    assert server.health()[0] == 503


def test_a_run_that_has_done_its_steps_has_not_stalled(server, clock) -> None:
    server.write(10, STEP)
    clock.now += 1e6
    server.watch(lambda: {"main": EngineState(False, 2, 2)}, lambda: 10)  # engines close first
    assert server.health()[:1] == (200,)
    assert server.health()[1]["status"] == "ending"


def test_other_pages_and_methods_are_refused(server) -> None:
    assert get(f"{server.url}/metrics?name=x")[0] == 200
    assert get(f"{server.url}/../etc/passwd")[0] == 404
    assert get(f"{server.url}/")[2] == "expected /metrics or /health\n"
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/health", data=b"x", method="POST"), timeout=30)


def test_openmetrics_is_served_to_who_asks_for_it(server) -> None:
    server.write(1, STEP)
    status, kind, text = get(f"{server.url}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_a_port_in_use_is_refused_by_the_name_of_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"telemetry\.metrics_port is {port} .*127\.0\.0\.1.*in use"):
            MetricsServer("127.0.0.1", port, run="mine", steps=1, stall_seconds=1.0)
    with pytest.raises(ConfigError, match=r"telemetry\.metrics_host is 192\.0\.2\.1"):
        MetricsServer("192.0.2.1", 0, run="mine", steps=1, stall_seconds=1.0)


def test_ipv6_and_what_is_loopback() -> None:
    server = MetricsServer("::1", 0, run="mine", steps=1, stall_seconds=1.0)
    assert get(f"{server.url}/health")[0] == 200
    server.close()
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "node5")] == [False] * 4


def test_the_metrics_log_hands_on_what_it_writes(tmp_path) -> None:
    heard = []
    log = MetricsLog(tmp_path, tensorboard=False, listener=lambda step, metrics: heard.append((step, dict(metrics))))
    log.write(4, {"a/b": float("nan"), "c/d": 1.0})
    log.close()
    assert heard == [(4, {"step": 4, "a/b": None, "c/d": 1.0, "nonfinite": 1})]
