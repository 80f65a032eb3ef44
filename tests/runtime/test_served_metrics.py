"""A whole run served to Prometheus: every metric that it writes, its health, and the board that is drawn from it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from drmas.telemetry import nvml
from drmas.telemetry.prometheus import EngineState, MetricsServer
from drmas.telemetry.prometheus_names import named
from tests.runtime.conftest import SCRIPT, TEAM

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
TWO_POLICIES = """
[policies.main]
model = "tiny:qwen3"
lr = 1e-3

[policies.other]
model = "tiny:qwen3"
lr = 1e-3
"""
HARDWARE = {f"gpu/0/{name}{end}": 1.0 for name in nvml._QUANTITIES for end in ("", "_max")} | {"train/main/mfu": 0.4}
"""What a run on GPUs writes besides."""


@pytest.fixture(scope="module")
def steps(scripted_run, tmp_path_factory) -> list[dict]:
    """What a run of two policies wrote, with moments and failed updates none."""
    folder = tmp_path_factory.mktemp("served")
    words = ["--team.verifier.policy", "other", "--telemetry.moments-every-steps", "1", "--loss.mismatch", "truncate"]
    done, run = scripted_run(folder, TWO_POLICIES)(*words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples(text: str) -> dict[str, list[dict[str, str]]]:
    """Name -> the labels of every sample."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


@pytest.fixture(scope="module")
def served(steps) -> dict[str, list[dict[str, str]]]:
    """What the endpoint serves of that run, and of what GPUs add to it."""
    server = MetricsServer("127.0.0.1", 0, run="one", steps=2, stall_seconds=60)
    server.watch(lambda: {"main": EngineState(True), "other": EngineState(True)}, lambda: 2)
    for metrics in steps:
        server.write(metrics["step"], metrics | HARDWARE | {"rollout/failed/engine": 1})
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        found = samples(answer.read().decode())
    server.close()
    return found


def test_every_metric_of_a_run_is_served(steps, served) -> None:
    for metrics in steps:
        for key, value in metrics.items():
            if key == "step":
                continue
            sample = named(key)
            assert sample is not None, f"{key} has no place in prometheus_names"
            words = {"solver", "verifier", "main", "other"} & set(re.split(r"[/_]", key))
            assert not any(word in re.split("_", sample.name) for word in words), f"{key} is served as {sample.name}"
            assert words <= set(sample.labels.values())
            if value is not None:
                assert sample.labels | {"run": "one"} in served[sample.name]


def test_one_name_has_one_set_of_labels(served) -> None:
    for name, labels in served.items():
        assert len({tuple(sorted(each)) for each in labels}) == 1, name
        assert all(each["run"] == "one" for each in labels)


def expressions(tree) -> list[tuple[str, str]]:
    """(PromQL, legend) of every panel and variable of a board."""
    if isinstance(tree, list):
        return [found for each in tree for found in expressions(each)]
    if not isinstance(tree, dict):
        return []
    own = [(tree["expr"], tree.get("legendFormat", ""))] if "expr" in tree else []
    own += [(tree["query"], "")] if tree.get("type") == "query" and isinstance(tree.get("query"), str) else []
    return own + [found for value in tree.values() for found in expressions(value)]


def unknown(expression: str, legend: str, served) -> list[str]:
    """Metrics and labels that an expression asks for and the endpoint doesn't serve."""
    names = re.findall(r"\bdrmas_\w+", expression)
    missing = [name for name in names if name not in served]
    asked = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", expression)) | set(re.findall(r"\{\{(\w+)\}\}", legend))
    asked |= {word.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for word in group.split(",")}
    labels = {label for name in names for each in served.get(name, []) for label in each}
    return missing + sorted(asked - labels)


def test_the_board_draws_only_what_is_served(served) -> None:
    board = json.loads((LAUNCHERS / "grafana" / "drmas.json").read_text(encoding="utf-8"))
    found = expressions(board)
    assert len(found) > 40
    for expression, legend in found:
        assert unknown(expression, legend, served) == [], expression
        assert expression.count("(") == expression.count(")")
        assert expression.startswith("label_values") or expression.count('run="$run"') == expression.count("drmas_")
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for what in ("inflation_factor", "agent_grad_norm", "agent_reward_mean", "time_seconds", "gpu_utilisation", "engine_alive"):
        assert any(what in expression for expression, _ in found), what


def test_the_check_of_the_board_can_fail(served) -> None:
    assert unknown('drmas_reward_meen{run="$run"}', "", served) == ["drmas_reward_meen", "run"]
    assert unknown('drmas_reward_mean{agent="x"}', "{{policy}}", served) == ["agent", "policy"]
    assert unknown("sum by (le, agent) (rate(drmas_step_duration_seconds_bucket[1h]))", "", served) == ["agent"]


def test_the_scrape_example_names_the_pages_and_labels_that_there_are() -> None:
    config = yaml.safe_load((LAUNCHERS / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    static, pods = config["scrape_configs"]
    assert static["static_configs"][0]["targets"] == ["127.0.0.1:9400"]
    assert not any("metrics_path" in job for job in (static, pods))  # /metrics is the default
    names = [label for rule in pods["relabel_configs"] for label in rule["source_labels"]]
    (job,) = yaml.safe_load_all((LAUNCHERS / "kubernetes" / "one_node.yaml").read_text(encoding="utf-8"))
    labels = {re.sub(r"\W", "_", name): value for name, value in job["spec"]["template"]["metadata"]["labels"].items()}
    prefix = "__meta_kubernetes_pod_label_"
    wanted = [name.removeprefix(prefix) for name in names if name.startswith(prefix) and "completion_index" not in name]
    assert ";".join(labels[name] for name in wanted) == pods["relabel_configs"][0]["regex"]


@pytest.fixture
def start(tmp_path):
    """Start a run of scripted engines in the background; it is killed if the test leaves it."""
    started = []

    def go(*words: str, policies: str = TWO_POLICIES) -> subprocess.Popen[str]:
        (tmp_path / "small.toml").write_text(policies + TEAM)
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "train", "small.toml", "--output", str(tmp_path), "--name", "one", *words],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield go
    for process in started:
        process.kill()
        process.wait()


def test_a_run_serves_itself_while_it_runs(start, tmp_path) -> None:
    process = start(
        "--telemetry.metrics-port", "0", "--train.steps", "100000", policies=TWO_POLICIES.partition("[policies.other]")[0]
    )
    url, said = None, []
    while url is None:
        said.append(process.stdout.readline())
        assert said[-1], "".join(said)
        if found := re.match(r"metrics at (http://127\.0\.0\.1:\d+)/metrics, state at", said[-1]):
            url = found[1]
    limit, page = time.monotonic() + 150, {"step": None, "checkpoint": None}
    while page["step"] is None or page["checkpoint"] is None:
        assert time.monotonic() < limit
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            page = json.loads(answer.read())
        time.sleep(0.05)
    assert (page["status"], page["run"], page["steps"]) == ("running", "one", 100000)
    assert page["engines"] == {"main": {"alive": True, "restarts": 0, "max_restarts": 2}}
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        found = samples(answer.read().decode())
    assert {"run": "one", "agent": "solver"} in found["drmas_rollout_agent_reward_mean"]
    assert found["drmas_steps_total"] == [{"run": "one"}]
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "whoever reaches it" not in "".join(said) + output
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=30)


def test_a_port_in_use_ends_the_run_before_anything_starts(scripted_run, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done, folder = scripted_run(tmp_path)("--telemetry.metrics-port", str(port))
    assert done.returncode == 2
    assert f"telemetry.metrics_port is {port} and telemetry.metrics_host is 127.0.0.1, which can't be served" in done.stderr
    assert not folder.exists()


def test_an_address_that_others_reach_is_said(scripted_run, tmp_path) -> None:
    words = ["--telemetry.metrics-port", "0", "--telemetry.metrics-host", "0.0.0.0", "--train.steps", "1"]
    done, _ = scripted_run(tmp_path)(*words)
    assert done.returncode == 0, done.stderr
    assert "telemetry.metrics_host is 0.0.0.0; whoever reaches it reads them, unasked" in done.stdout
