import pytest
import torch

from drmas_kernels import numerics
from drmas_kernels.adamw import adamw_step
from drmas_kernels.grad_norm import SKIP

SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}


def state(parameter):
    return torch.zeros_like(parameter), torch.zeros_like(parameter), torch.zeros((), dtype=torch.int64)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr("drmas_kernels.adamw._TILE", 100)


def test_steps_agree_with_torch_on_clipped_gradients(check):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(37, 11, generator=generator)
    ours, theirs = start.clone(), torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, foreach=False, fused=False)
    first, second, step = state(ours)
    for coefficient in (1.0, 0.25, 1.0, 0.01, 0.5):
        grad = torch.randn(37, 11, generator=generator)
        theirs.grad = grad.double() * coefficient
        optimizer.step()
        adamw_step(ours, grad, first, second, step, coefficient=torch.tensor(coefficient, dtype=torch.float64), **SETTINGS)
        check(ours, theirs, numerics.ADAMW)
    assert step.item() == 5
    check(first, optimizer.state[theirs]["exp_avg"], numerics.ADAMW)
    check(second, optimizer.state[theirs]["exp_avg_sq"], numerics.ADAMW)


def test_a_skipped_step_changes_no_bit():
    parameter = torch.randn(5)
    first, second, step = torch.rand(5), torch.rand(5), torch.tensor(3)
    copy = parameter.bfloat16()
    tensors = (parameter, first, second, step, copy)
    before = [tensor.clone() for tensor in tensors]
    grad = torch.full((5,), torch.nan)
    adamw_step(parameter, grad, first, second, step, coefficient=torch.tensor(SKIP), copy=copy, **SETTINGS)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)


def test_the_copy_is_the_rounded_parameter_and_the_gradient_stays():
    parameter, grad = torch.randn(50), torch.randn(50)
    kept, copy = grad.clone(), torch.zeros(50, dtype=torch.bfloat16)
    adamw_step(parameter, grad, *state(parameter), coefficient=torch.tensor(0.5), copy=copy, **SETTINGS)
    assert torch.equal(copy, parameter.bfloat16())
    assert torch.equal(grad, kept)


def test_bad_arguments_are_named():
    parameter = torch.zeros(3)
    first, second, step = state(parameter)
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"grad is torch.bfloat16 \[3\]; expected contiguous float32 \[3\]"):
        adamw_step(parameter, torch.zeros(3, dtype=torch.bfloat16), first, second, step, coefficient=one, lr=1.0)
    with pytest.raises(ValueError, match=r"copy has shape \[2\]"):
        adamw_step(parameter, parameter, first, second, step, coefficient=one, lr=1.0, copy=torch.zeros(2))
