"""Process groups, the view of them that Megatron's globals give, and random states of a policy's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from drmas.policy.rng import PolicyRng


def test_layouts_share_communicators_by_rank_list(world):
    one, other = world.layout(), world.layout(tp=1)
    assert one.tp is other.dp is dist.group.WORLD
    assert (one.tp.size(), one.dp.size(), one.collection.intra_dist_opt.size()) == (1, 1, 1)


def test_megatron_s_globals_answer_inside_active_only(world):
    layout = world.layout()
    with layout.active():
        assert parallel_state.get_tensor_model_parallel_group() is layout.tp
        assert parallel_state.get_data_parallel_world_size() == 1
    with pytest.raises(AssertionError):
        parallel_state.get_tensor_model_parallel_group()


def test_active_restores_after_an_error(world):
    with pytest.raises(KeyError), world.layout().active():
        raise KeyError("inside")
    with pytest.raises(AssertionError):
        parallel_state.get_data_parallel_group()


def test_an_error_on_the_leader_is_raised_on_every_rank(world, two_ranks):
    assert two_ranks["shared error"] == "no space left"
    assert world.layout().on_leader(lambda: 7) == 7


def draws(rng):
    with rng.lent(), get_cuda_rng_tracker().fork():
        return torch.rand(3).tolist()


def test_I9_random_states_of_policies_and_caller_are_apart(world):
    one, other = PolicyRng(1, tp_rank=0), PolicyRng(2, tp_rank=0)
    torch.manual_seed(5)
    mixed = [draws(one), draws(other), torch.rand(3).tolist(), draws(one)]
    alone = PolicyRng(1, tp_rank=0)
    torch.manual_seed(5)
    assert mixed[2] == torch.rand(3).tolist()
    assert [mixed[0], mixed[3]] == [draws(alone), draws(alone)]
    assert mixed[0] != mixed[1] != mixed[3]
    assert draws(PolicyRng(1, tp_rank=1)) != mixed[0]


def test_one_process_can_have_groups_twice_and_gives_scratch_memory_back():
    script = (
        "import drmas.policy\nfrom megatron.core import parallel_state\n"
        "from drmas.policy.groups import Groups, init_distributed, destroy\n"
        "for _ in range(2):\n"
        "    init_distributed(timeout_seconds=30)\n"
        "    one = Groups(); buffer = parallel_state.get_global_memory_buffer()\n"
        "    other = Groups(); print(buffer is parallel_state.get_global_memory_buffer(), other.layout().tp.size())\n"
        "    destroy(); print(parallel_state._GLOBAL_MEMORY_BUFFER)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "1", "None"] * 2


def test_a_world_of_one_opens_no_port():
    script = (
        "import os; [os.environ.pop(k, None) for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')]\n"
        "from drmas.policy.groups import init_distributed, destroy\n"
        "import torch.distributed as dist\n"
        "init_distributed(timeout_seconds=30); init_distributed(); print(dist.get_world_size()); destroy(); destroy()\n"
        "print(dist.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1", "False"]


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [str(Path(sys.executable).with_name("drmas")), "train", "arithmetic-tiny"]
        done = subprocess.run(command, env={**os.environ, **where}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"drmas: the trainer processes can't meet at 127.0.0.1:{port}")
    assert "Traceback" not in done.stderr
