import math

import pytest
import torch

from drmas_kernels import numerics
from drmas_kernels.grad_norm import SKIP, clip_coefficient, squared_norms


def test_squared_norms_per_group_agree_with_float64(check):
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 256, 257, 300_001, 0, 77]
    buffers = [torch.randn(size, generator=generator) * 10.0 ** (i - 3) for i, size in enumerate(sizes)]
    groups = [0, 1, 0, 1, 3, 0]
    expected = torch.zeros(4, dtype=torch.float64)
    for buffer, group in zip(buffers, groups, strict=True):
        expected[group] += buffer.double().square().sum()
    result = squared_norms(buffers, groups, 4)
    check(result, expected, numerics.SQUARED_NORM)
    assert torch.equal(squared_norms(buffers, groups, 4), result)
    assert result[2] == result[3] == 0.0


def test_a_rank_without_buffers_counts_zero_on_the_device_of_the_others():
    assert squared_norms([], [], 2).tolist() == [0.0, 0.0]
    assert squared_norms([], [], 1, device="meta").device.type == "meta"


def test_many_small_values_beside_one_large_one_are_not_lost(check):
    """fp32 throughout would drop the tail: 1e-4 squared, 4 million times, beside 1."""
    buffer = torch.full((4_000_000,), 1e-4)
    buffer[0] = 1.0
    check(squared_norms([buffer], [0], 1), buffer.double().square().sum()[None], numerics.SQUARED_NORM)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_shows_and_skips(bad):
    buffer = torch.ones(10_000)
    buffer[9_999] = bad
    squared = squared_norms([buffer, torch.ones(4)], [0, 1], 2)
    assert squared.isfinite().tolist() == [False, True]
    assert clip_coefficient(squared.sqrt(), 4.0).tolist() == [SKIP, 1.0]


def test_clip_coefficient_is_that_of_torch():
    parameter = torch.zeros(3, requires_grad=True)
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    norm = squared_norms([parameter.grad], [0], 1).sqrt()
    scaled = parameter.grad * clip_coefficient(norm, 2.0)
    torch.nn.utils.clip_grad_norm_([parameter], 2.0)
    torch.testing.assert_close(parameter.grad, scaled.float())
    assert clip_coefficient(norm, 100.0).item() == 1.0
    assert clip_coefficient(norm, math.inf).item() == 1.0
    assert clip_coefficient(torch.tensor(0.0), 1.0).item() == 1.0


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"buffer is torch.float32 \[2, 2\]; expected a contiguous float32 vector"):
        squared_norms([torch.ones(2, 2)], [0], 1)
    with pytest.raises(ValueError, match="group is 1; expected 0 to 0"):
        squared_norms([torch.ones(2)], [1], 1)
    with pytest.raises(ValueError, match="2 buffers but 1 groups"):
        squared_norms([torch.ones(2)] * 2, [0], 1)
    with pytest.raises(ValueError, match="max_norm is 0"):
        clip_coefficient(torch.ones(1), 0)
