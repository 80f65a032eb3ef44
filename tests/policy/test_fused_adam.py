"""The optimiser's kernel against torch's AdamW, and the contract that Megatron's checkpoints need."""

from __future__ import annotations

import pytest
import torch

from drmas.policy.fused_adam import FusedAdam


def test_steps_equal_torch_adamw():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator) for n in (5, 300)]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    adam, reference = FusedAdam(ours, **settings), torch.optim.AdamW(theirs, **settings)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        adam.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)


def test_the_step_is_counted_per_group_and_the_state_holds_moments_only():
    parameter = torch.nn.Parameter(torch.ones(3))
    adam = FusedAdam([{"params": [parameter]}, {"params": []}])
    parameter.grad = torch.ones(3)
    adam.step()
    assert [group["step"] for group in adam.param_groups] == [1, 1]
    assert set(adam.state[parameter]) == {"exp_avg", "exp_avg_sq"}


def test_coupled_weight_decay_is_refused():
    with pytest.raises(ValueError, match="only decoupled weight decay"):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], adam_w_mode=False)
