"""Unequal ranks are refused before anything starts, with both values and where they are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from drmas.config.load import load
from drmas.errors import ConfigError
from drmas.runtime import preflight as module
from drmas.runtime.gpus import Seat
from drmas.runtime.preflight import ask_engine_hosts, check_engine_host, check_ranks, differences, facts, preflight
from drmas.telemetry import environment
from drmas.telemetry.environment import code_version, shared_settings, software
from tests.runtime.rank_threads import RankThreads

SAME = {"torch": "2.13.0", "NCCL_P2P_LEVEL": "NVL"}
NAMES = ["rank 0 (a, local rank 0)", "rank 1 (a, local rank 1)", "rank 2 (b, local rank 0)", "rank 3 (b, local rank 1)"]


def four(*, facts=(SAME,) * 4, gpus=(None,) * 4, codes=("0.1, code 1", None, "0.1, code 1", None)) -> dict:
    told = zip(NAMES, facts, gpus, codes, strict=True)
    return {name: {"facts": fact, "gpu": gpu, "code": code} for name, fact, gpu, code in told}


def test_equal_ranks_pass():
    check_ranks(four())
    check_ranks(four(gpus=("GPU-1", "GPU-2", "GPU-3", "GPU-4")))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("torch", "2.14.1", r"torch is 2\.13\.0 on rank 0 \(a, local rank 0\), .* and 2\.14\.1 on rank 2 \(b, local rank 0\)"),
        ("NCCL_P2P_LEVEL", "SYS", r"NCCL_P2P_LEVEL is NVL on .* and SYS on rank 2 \(b, local rank 0\)"),
        ("NCCL_CUMEM_ENABLE", "0", r"NCCL_CUMEM_ENABLE is not set on rank 0 .* and 0 on rank 2"),
    ],
)
def test_a_rank_that_differs_is_named_with_both_values(name, value, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_ranks(four(facts=(SAME, SAME, SAME | {name: value}, SAME)))
    assert "cluster.preflight" in str(error.value)


def test_hosts_with_unequal_code_are_refused():
    message = r"drmas is 0\.1, code 1 on rank 0 \(a, local rank 0\) and 0\.1, code 2 on rank 2 \(b, local rank 0\)"
    with pytest.raises(ConfigError, match=message):
        check_ranks(four(codes=("0.1, code 1", None, "0.1, code 2", None)))


def test_all_differences_are_named_at_once_and_long_lists_are_cut():
    found = {f"rank {rank}": {"torch": "1" if rank else "2", "b": str(rank % 2)} for rank in range(9)}
    assert differences(found) == [
        "b is 0 on rank 0, rank 2, rank 4 and 2 more and 1 on rank 1, rank 3, rank 5 and 1 more",
        "torch is 2 on rank 0 and 1 on rank 1, rank 2, rank 3 and 5 more",
    ]


def test_two_ranks_on_one_gpu_are_refused():
    message = r"rank 1 \(a, local rank 1\), rank 2 \(b, local rank 0\) are on one GPU, GPU-2"
    with pytest.raises(ConfigError, match=message):
        check_ranks(four(gpus=("GPU-1", "GPU-2", "GPU-2", "GPU-4")))


@pytest.fixture
def pair(monkeypatch) -> RankThreads:
    """Two ranks on two hosts."""
    job = RankThreads(2)
    monkeypatch.setattr(module, "place", lambda: f"{'ab'[job.rank]}, local rank 0")
    return job


@pytest.mark.parametrize("checked", [True, False])
def test_unequal_configurations_are_always_refused_by_key(pair, checked):
    words = ["--cluster.preflight", str(checked).lower()]
    configs = load("arithmetic-tiny", words), load("arithmetic-tiny", [*words, "--seed", "7", "--train.steps", "9"])
    said = [str(error) for error in pair.run(lambda rank: preflight(pair, configs[rank]))]
    assert said[0] == said[1]
    assert said[0] == (
        "the ranks of the job have unequal configurations: "
        f"seed is {configs[0].seed} on rank 0 (a, local rank 0) and 7 on rank 1 (b, local rank 0); "
        f"train.steps is {configs[0].train.steps} on rank 0 (a, local rank 0) and 9 on rank 1 (b, local rank 0). "
        "Start all of them with one recipe and the same options"
    )


def test_ranks_that_disagree_on_the_preflight_itself_are_refused(pair):
    configs = load("arithmetic-tiny"), load("arithmetic-tiny", ["--cluster.preflight", "false"])
    said = pair.run(lambda rank: preflight(pair, configs[rank]))
    assert all("cluster.preflight is True on rank 0 (a, local rank 0) and False on rank 1" in str(error) for error in said)


def test_without_preflight_only_configurations_are_compared(pair, monkeypatch):
    monkeypatch.setattr(module, "facts", lambda: {"torch": str(pair.rank)})
    config = load("arithmetic-tiny", ["--cluster.preflight", "false"])
    assert pair.run(lambda rank: preflight(pair, config)) == [None, None]
    said = pair.run(lambda rank: preflight(pair, load("arithmetic-tiny")))
    assert all("torch is 0 on rank 0 (a, local rank 0) and 1 on rank 1 (b, local rank 0)" in str(error) for error in said)


def test_a_job_as_it_is_here_passes(pair):
    assert pair.run(lambda rank: preflight(pair, load("arithmetic-tiny"))) == [None, None]


def test_settings_of_one_host_are_not_compared(monkeypatch):
    for name in list(shared_settings()):
        monkeypatch.delenv(name)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG_FILE", "NCCL_DEBUG", "HOME"):
        monkeypatch.setenv(name, "of this host")
    for name in ("OMP_NUM_THREADS", "DRMAS_CACHE", "DRMAS_ENGINE_TOKEN"):
        monkeypatch.setenv(name, "of this host")
    told = {
        "NCCL_ALGO": "Ring",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_FLASH_ATTN": "0",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    }
    told["DRMAS_KERNELS"] = "torch"
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert shared_settings() == told


def test_facts_hold_no_secret(monkeypatch):
    monkeypatch.setenv("DRMAS_ENGINE_TOKEN", "a secret that stays here")
    mine = facts()
    assert mine["torch"] == software()["torch"]
    assert not any("secret" in value for value in mine.values())


def test_the_driver_is_a_fact_where_there_is_one(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("580.65.06\n")
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "version")
    assert software()["driver"] == "580.65.06"
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "none")
    assert "driver" not in software()


def test_code_is_told_apart_by_every_edit_and_names_its_commit(monkeypatch, tmp_path):
    package = tmp_path / "drmas"
    shutil.copytree(Path(environment.__file__).parent, package / "telemetry", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment, "__file__", str(package / "telemetry" / "environment.py"))
    first = code_version()
    assert first == code_version()
    assert "commit" not in first
    (package / "telemetry" / "names.py").rename(package / "telemetry" / "other.py")
    renamed = code_version()
    with (package / "telemetry" / "other.py").open("a") as file:
        file.write("\n")
    assert len({first, renamed, code_version()}) == 3
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "x"], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert code_version().endswith(f", commit {head}")


def test_an_engine_host_must_have_the_trainers_versions_and_nccl_settings(monkeypatch):
    theirs = software() | {"drmas": code_version()} | shared_settings()
    check_engine_host("tcp://h:1", theirs)
    check_engine_host("tcp://h:1", theirs | {"python": "3.12.1", "NVTE_FLASH_ATTN": "0"})  # weights don't care
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # torchrun sets it for its ranks
    check_engine_host("tcp://h:1", theirs)
    with pytest.raises(ConfigError, match=r"torch is .* on rank 0 and 1\.0 on tcp://h:1"):
        check_engine_host("tcp://h:1", theirs | {"torch": "1.0"})
    with pytest.raises(ConfigError, match=r"drmas is .* code .* on rank 0 and 0\.1\.0, code 0 on tcp://h:1"):
        check_engine_host("tcp://h:1", theirs | {"drmas": "0.1.0, code 0"})
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE is not set on rank 0 and 1 on tcp://h:1"):
        check_engine_host("tcp://h:1", theirs | {"NCCL_CUMEM_ENABLE": "1"})


def test_engine_hosts_are_asked_once_each_for_what_all_engines_need_there(monkeypatch):
    asked = []

    class Host:
        def __init__(self, url, cluster):
            self.url = url

        def describe(self):
            asked.append(self.url)
            facts = software() | {"drmas": code_version()} | shared_settings()
            return {"device": "cpu" if self.url == "tcp://c:1" else "cuda", "gpus": [0, 1, 2, 3], "facts": facts}

    monkeypatch.setattr(module, "RemoteHost", Host)
    config = load("arithmetic-tiny", ["--policies.main.engine.tensor_parallel", "2"])
    far, near = Seat("tcp://a:1", None), Seat(None, (0, 1))
    ask_engine_hosts(config, {"main": (far, far, near, Seat("tcp://b:1", None), *[Seat("tcp://c:1", None)] * 9)})
    assert asked == ["tcp://a:1", "tcp://b:1", "tcp://c:1"]
    message = "the engines at tcp://a:1 need 6 GPUs (3 of main x tensor_parallel 2); it serves 4: name more hosts"
    with pytest.raises(ConfigError, match=re.escape(message)):
        ask_engine_hosts(config, {"main": (far, far, far)})


def test_a_place_has_host_and_local_rank(monkeypatch):
    monkeypatch.setattr(module.socket, "gethostname", lambda: "node7")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert module.place() == "node7, local rank 3"
