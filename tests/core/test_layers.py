import pytest

from drmas.core.layers import describe_trainer_layers, trainer_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("package", [False, True])
def test_transformer_engine_needs_cuda_the_package_and_bfloat16(dtype, cuda, package):
    taken = trainer_layers(dtype, cuda=cuda, transformer_engine=package)
    assert taken == ("Transformer Engine" if (dtype, cuda, package) == ("bfloat16", True, True) else "torch SDPA")


def test_both_dtypes_are_described_where_they_differ():
    both = describe_trainer_layers(cuda=True, transformer_engine=True)
    assert both == "Transformer Engine for bfloat16, torch SDPA for float32"
    assert describe_trainer_layers(cuda=False, transformer_engine=True) == "torch SDPA over packed rows"
