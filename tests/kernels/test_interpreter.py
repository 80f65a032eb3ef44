"""The faults of Triton's interpreter that `interpreter.mend` mends, and when that can go."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as theirs

from tests.kernels import interpreter

pytestmark = pytest.mark.skipif(interpreter.DEVICE != "cpu", reason="on a GPU nothing is interpreted")

with interpreter.interpreting():

    @triton.jit
    def _product(a, b, out, n: tl.constexpr):
        lane = tl.arange(0, n)
        tile = lane[:, None] * n + lane[None, :]
        tl.store(out + tile, tl.dot(tl.load(a + tile), tl.load(b + tile)))

    @triton.jit
    def _copy(source, target, n: tl.constexpr):
        lane = tl.arange(0, n)
        tl.store(target + lane, tl.load(source + lane))


def product():
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    out = torch.empty(16, 16)
    _product[(1,)](a, b, out, n=16)
    return out, a.float() @ b.float()


def rounding():
    source = torch.cat(
        [torch.randn(4080), torch.tensor([0.0, -0.0, 1e-40, -3e-39, torch.inf, -torch.inf, 3.4e38, torch.nan] * 2)]
    )
    out = torch.empty(4096, dtype=torch.bfloat16)
    _copy[(1,)](source, out, n=4096)
    return out, source.bfloat16()


def test_bfloat16_products_and_rounding_are_those_of_torch():
    torch.testing.assert_close(*product())
    torch.testing.assert_close(*rounding(), rtol=0, atol=0, equal_nan=True)


def test_the_product_of_bfloat16_tiles_still_needs_mending(monkeypatch):
    """Where this fails, Triton has mended it: take the patch out of `interpreter.mend`."""
    monkeypatch.setattr(theirs.InterpreterBuilder, "create_dot", interpreter.ORIGINAL["create_dot"])
    actual, expected = product()
    assert not torch.allclose(actual, expected, atol=1e-3)


def test_the_rounding_to_bfloat16_still_needs_mending(monkeypatch):
    """Where this fails, Triton has mended it: take the patch out of `interpreter.mend`."""
    monkeypatch.setattr(theirs, "_convert_float", interpreter.ORIGINAL["convert_float"])
    actual, expected = rounding()
    assert not torch.equal(actual.nan_to_num(), expected.nan_to_num())
