import pytest

from drmas_kernels.backend import OPS, choose


def test_every_operation_has_an_implementation_and_a_reason():
    assert {choose(op) for op in OPS} == {("torch", "the Triton kernels are not part of this build")}


def test_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="op is 'softmax'; expected one of segment_advantage, "):
        choose("softmax")
