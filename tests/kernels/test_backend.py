import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drmas_kernels import backend
from drmas_kernels.backend import OPS, choose, use


def test_on_the_cpu_every_operation_is_torch_and_says_why():
    assert {choose(op) for op in OPS} == {("torch", "Triton compiles for NVIDIA GPUs and the tensors are on cpu")}


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), ("triton", "compiled for sm_90")),
        ((7, 5), ("torch", "the tile tables begin with sm_80, the device is sm_75")),
    ],
)
def test_on_a_gpu_the_compute_capability_decides(monkeypatch, capability, expected):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.version.hip", None)
    assert choose("policy_loss", "cuda") == expected
    monkeypatch.setattr(backend, "_installed", lambda: False)
    assert choose("policy_loss", "cuda") == ("torch", "the package triton is not installed")


def test_an_override_is_the_reason(monkeypatch):
    monkeypatch.setenv("DRMAS_KERNELS", "triton")
    assert choose("policy_loss") == ("triton", "asked for by DRMAS_KERNELS")
    with use("torch"):
        assert choose("policy_loss") == ("torch", "asked for by drmas_kernels.backend.use")
    monkeypatch.setenv("DRMAS_KERNELS", "cuda")
    with pytest.raises(ValueError, match="DRMAS_KERNELS is 'cuda'; expected one of torch, triton"):
        choose("policy_loss")


def test_an_override_holds_in_other_threads_and_ends():
    """A backward pass on a GPU runs in threads of torch's own."""
    with use("triton"), ThreadPoolExecutor(1) as other:
        assert other.submit(choose, "logprob").result().name == "triton"
        with use("torch"):
            assert other.submit(choose, "logprob").result().name == "torch"
        assert choose("logprob").name == "triton"
    assert choose("logprob").reason.startswith("Triton compiles for NVIDIA GPUs")


def test_what_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="op is 'softmax'; expected one of segment_advantage, "):
        choose("softmax")
    with pytest.raises(ValueError, match="the backend is 'cpu'"), use("cpu"):
        pass
    monkeypatch.setattr(backend, "_installed", lambda: False)
    with pytest.raises(ValueError, match="the backend is 'triton', but the package triton is not installed"), use("triton"):
        pass


def test_kernels_that_are_not_interpreted_refuse_tensors_on_a_cpu():
    code = (
        "import torch; from drmas_kernels.linear_logprob import linear_logprob; "
        "linear_logprob(torch.ones(1, 8), torch.ones(3, 8), torch.tensor([0]))"
    )
    environment = os.environ | {"DRMAS_KERNELS": "triton", "PYTHONPATH": str(Path(__file__).parents[2] / "kernels")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DRMAS_KERNELS asks for triton, but tensors are on cpu, where it only interprets (TRITON_INTERPRET=1)" in done.stderr
