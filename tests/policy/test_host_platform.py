"""The host layer changes what megatron modules see, and nothing that others see."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from megatron.core import parallel_state

from drmas.policy import host_platform

host_only = pytest.mark.skipif(not host_platform.is_host(), reason="with CUDA the layer does nothing")


@host_only
def test_only_megatron_sees_the_host_s_torch():
    assert parallel_state.torch is not torch
    assert parallel_state.torch.zeros(2, device="cuda:1").device == torch.device("cpu")
    assert parallel_state.torch.cuda.current_device() == torch.device("cpu")
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"


@host_only
def test_tensor_methods_that_need_cuda_answer_for_the_host():
    x = torch.ones(2)
    assert x.cuda() is x
    assert x.pin_memory() is x
    assert x.to("cuda").device == torch.device("cpu")
    assert x.to(torch.float64).dtype == torch.float64
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.type() == "torch.FloatTensor"
    assert x.type() != "torch.cuda.DoubleTensor"
    assert x.type(torch.int64).dtype == torch.int64


@host_only
def test_random_states_of_the_accelerator_are_the_host_s():
    cuda = parallel_state.torch.cuda
    cuda.manual_seed(11)
    state = cuda.get_rng_state()
    first = torch.rand(2)
    cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(2))


@host_only
def test_importing_megatron_first_is_refused():
    script = "import megatron.core, drmas.policy"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert "megatron was imported before drmas.policy" in done.stderr


def test_memory_and_threads_are_reported():
    assert host_platform.peak_memory_bytes() > 10 * 2**20
    before = torch.get_num_threads()
    host_platform.set_threads(2)
    assert torch.get_num_threads() == 2
    host_platform.set_threads(before)
