import torch

from drmas_kernels import numerics


def test_a_mismatch_names_the_worst_element_and_the_reason():
    tolerance = numerics.Tolerance(0.1, 0.0, "because")
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert tolerance.mismatch(expected + 0.09, expected) is None
    message = tolerance.mismatch(expected + torch.tensor([[0.2, 0.0], [0.0, 0.5]]), expected)
    assert message.startswith("at (1, 1): 4.5, expected 4.0 (largest error 5.00e-01")
    assert message.endswith("because)")


def test_nan_and_another_shape_never_match():
    tolerance = numerics.Tolerance(1e9, 1e9, "anything")
    nan = torch.tensor([torch.nan])
    assert tolerance.mismatch(nan, torch.ones(1)) is not None
    assert tolerance.mismatch(nan, nan) is not None
    assert tolerance.mismatch(torch.ones(1), torch.ones(2)) == "shape is [1], expected [2]"
    assert tolerance.mismatch(torch.ones(0), torch.ones(0)) is None


def test_costs():
    """An output head of 32768 tokens, 4096 wide, 151936 words: three products at 989 TFLOP/s take 123.7 ms."""
    cost = numerics.linear_policy_loss_cost(32768, 4096, 151936, itemsize=2)
    assert round(cost.floor_seconds(989e12, 3.35e12) * 1e3, 1) == 123.7
    assert numerics.adamw_cost(10, copy=True).bytes == 300
    assert numerics.squared_norm_cost(10).bytes == 40
