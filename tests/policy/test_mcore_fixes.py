"""What is wrong in megatron-core 0.16.1, shown twice: alone and corrected.

Where the first half of a test fails, Megatron has mended the fault and the correction can go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers, random

from drmas.config.schema import PolicyConfig
from drmas.policy import mcore_fixes
from drmas.policy.architecture import read_architecture
from drmas.policy.megatron_config import policy_stack, transformer_config
from drmas.policy.model import build_model
from drmas.policy.rng import PolicyRng


@pytest.fixture(autouse=True)
def applied():
    mcore_fixes.apply()


def megatron_alone(owner: type, name: str) -> Callable[..., Any]:
    return vars(owner)[name].__wrapped__


def test_applying_twice_is_applying_once():
    before = random.CheckpointWithoutOutput.__init__, layers.ColumnParallelLinear.__init__
    mcore_fixes.apply()
    assert before == (random.CheckpointWithoutOutput.__init__, layers.ColumnParallelLinear.__init__)


def test_a_norm_is_recomputed_without_transformer_engine():
    if random.HAVE_TE:
        pytest.skip("with TransformerEngine its state is there to be asked")

    def gradient(checkpoint: random.CheckpointWithoutOutput) -> torch.Tensor:
        x = torch.arange(1.0, 5.0).requires_grad_()
        squares = checkpoint.checkpoint(lambda x: x * x * x, x)
        result = squares * squares
        checkpoint.discard_output_and_register_recompute(result)
        result.sum().backward()
        return x.grad

    alone = object.__new__(random.CheckpointWithoutOutput)
    megatron_alone(random.CheckpointWithoutOutput, "__init__")(alone)
    with pytest.raises(NameError, match="FP8GlobalStateManager"):
        gradient(alone)
    torch.testing.assert_close(gradient(random.CheckpointWithoutOutput()), 6 * torch.arange(1.0, 5.0) ** 5)


def test_weights_that_are_not_initialised_are_marked_as_tensor_parallel(world, models, monkeypatch):
    config = PolicyConfig(model="")
    groups = world.layout()

    def marks(*, initialised: bool) -> dict[str, tuple[int, int] | None]:
        """Dimension and stride of every weight that is marked."""
        architecture, stack = read_architecture(models / "qwen2-untied"), policy_stack("main", config, replicas=1)
        with groups.active(), PolicyRng(0, tp_rank=0).lent():
            settings = transformer_config(architecture, config, groups, stack)
            settings.perform_initialization = initialised
            model = build_model(architecture, settings, groups, stack)
        marked = {name: p for name, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)}
        return {name: (p.partition_dim, p.partition_stride) for name, p in marked.items()}

    expected = marks(initialised=True)
    assert len([name for name in expected if name.endswith("weight")]) == 2 + 2 * 4
    assert marks(initialised=False) == expected
    for kind in (layers.VocabParallelEmbedding, layers.ColumnParallelLinear, layers.RowParallelLinear):
        monkeypatch.setattr(kind, "__init__", megatron_alone(kind, "__init__"))
    assert all(name.endswith("bias") for name in marks(initialised=False))
