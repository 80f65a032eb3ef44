"""What only a GPU can show: syncs, collectives over NCCL, compiled callers, a device that isn't the current one."""

import pytest
import torch
import torch.distributed as dist

from drmas_kernels import numerics
from drmas_kernels.linear_logprob import linear_logprob, linear_policy_loss
from drmas_kernels.policy_loss import PolicyLossOptions
from tests.kernels import interpreter

pytestmark = pytest.mark.skipif(interpreter.DEVICE == "cpu", reason="needs a GPU: DRMAS_TEST_DEVICE=cuda")
BONUS = PolicyLossOptions(entropy_bonus=0.05)


def step(case, device="cuda", **settings):
    """(loss, dH, dW) without value checks."""
    hidden, weight = (tensor.detach().to(device).requires_grad_() for tensor in (case.hidden, case.weight))
    arguments = [argument.to(device) for argument in case.arguments()]
    result = linear_policy_loss(hidden, weight, *arguments, num_agents=2, options=BONUS, check_values=False, **settings)
    result.loss.backward()
    return result.loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_whose_positions_are_known_waits_for_nothing(head, dtype):
    case = head(300, 64, 1001, dtype=dtype)
    index = torch.arange(300, device="cuda")
    inputs = [tensor.cuda() for tensor in (case.hidden, case.weight)]
    arguments = case.arguments()
    settings = {"num_agents": 2, "options": BONUS, "index": index, "check_values": False}
    for waits in ("default", "error"):  # the first round compiles
        torch.cuda.set_sync_debug_mode(waits)
        try:
            hidden, weight = (tensor.detach().requires_grad_() for tensor in inputs)
            linear_policy_loss(hidden, weight, *arguments, **settings).loss.backward()
            with torch.no_grad():
                linear_logprob(hidden, weight, arguments[0], check_values=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_group_over_nccl_changes_no_bit(head, tmp_path):
    case = head(64, 64, 1001, dtype=torch.bfloat16)
    alone = step(case)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        grouped = step(case, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    for ours, theirs in zip(grouped, alone, strict=True):
        assert torch.equal(ours, theirs)


def test_a_compiled_caller_gets_the_same_gradient(head, check):
    case = head(64, 64, 1000)
    hidden = case.hidden.cuda().requires_grad_()
    weight, target = case.weight.cuda(), case.target.cuda()

    def mean(hidden):
        return linear_logprob(hidden * 1.5, weight, target, check_values=False)[0].mean()

    (expected,) = torch.autograd.grad(mean(hidden), hidden)
    (found,) = torch.autograd.grad(torch.compile(mean)(hidden), hidden)
    check(found, expected, numerics.GRADIENT)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(head):
    case = head(64, 64, 1001, dtype=torch.bfloat16)
    first, second = step(case), step(case, "cuda:1")
    for ours, theirs in zip(second, first, strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
