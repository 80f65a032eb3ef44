"""What a sender lets through, and what it owes the ranks that iterate along."""

from __future__ import annotations

import pytest
import torch

from drmas.errors import SyncError
from drmas.weights.source import CheckedSource, finite, is_finite


class Tensors:
    """A source that counts the tensors it gave out."""

    def __init__(self, tensors, metadata=None):
        self.tensors, self.given = tensors, 0
        self._metadata = metadata or [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]

    def metadata(self):
        return self._metadata

    def __iter__(self):
        for item in self.tensors:
            self.given += 1
            yield item


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_element_is_found(dtype, value):
    tensor = torch.ones(300, dtype=dtype)
    assert is_finite(tensor)
    tensor[123] = value
    assert not is_finite(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sum_that_overflows_is_no_infinity(dtype):
    assert is_finite(torch.full((8,), torch.finfo(dtype).max, dtype=dtype))


def test_infinities_of_both_signs_do_not_cancel():
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


def test_settle_completes_an_iteration_that_was_given_up():
    tensors = Tensors([(name, torch.ones(2)) for name in "abcd"])
    source = CheckedSource(tensors)
    iterator = iter(source)
    next(iterator)
    source.settle(1)
    assert tensors.given == 4
    source.settle(1)
    assert tensors.given == 8


def test_settle_owes_nothing_after_a_whole_iteration():
    tensors = Tensors([(name, torch.ones(2)) for name in "abcd"])
    source = CheckedSource(tensors)
    assert [name for name, _ in source] == list("abcd")
    source.settle(1)
    assert tensors.given == 4


def test_settle_follows_an_iteration_that_a_bad_tensor_ended():
    tensors = Tensors([("a", torch.ones(2)), ("b", torch.tensor([float("nan")])), ("c", torch.ones(2))])
    source = CheckedSource(tensors)
    with pytest.raises(SyncError, match="b holds NaN or Inf"):
        list(finite(source))
    source.settle(1)
    assert tensors.given == 3


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([("a", torch.float32, (3,))], r"gave a torch\.float32 \[2\]"),
        ([("b", torch.float32, (2,))], "gave a"),
        ([("a", torch.bfloat16, (2,))], "gave a"),
        ([("a", torch.float32, (2,)), ("b", torch.float32, (1,))], "ended before b"),
    ],
)
def test_a_source_that_contradicts_its_metadata_is_refused(metadata, message):
    with pytest.raises(SyncError, match=message):
        list(CheckedSource(Tensors([("a", torch.ones(2))], metadata)))
