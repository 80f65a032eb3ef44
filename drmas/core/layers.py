"""Which implementation of the layers and of AdamW a trainer takes: one rule, for the trainer and for `drmas doctor`.

Decides from facts that are handed in and imports nothing, so that it can be asked where Megatron or torch is missing.
Called by drmas.policy.model, and by the command for what it prints.
"""

from __future__ import annotations

from typing import Literal

Layers = Literal["Transformer Engine", "torch SDPA"]
"""TransformerEngine's layers and attention, or Megatron's own with torch's scaled_dot_product_attention over packed rows."""


def trainer_layers(dtype: str, *, cuda: bool, transformer_engine: bool) -> Layers:
    """The layers of a policy whose parameters are of `dtype` ("float32" or "bfloat16").

    TransformerEngine runs on CUDA only, and its attention over packed rows (flash-attn, cuDNN) knows no float32.

    Example: trainer_layers("float32", cuda=True, transformer_engine=True) == "torch SDPA"
    """
    return "Transformer Engine" if cuda and transformer_engine and dtype == "bfloat16" else "torch SDPA"


def describe_trainer_layers(*, cuda: bool, transformer_engine: bool) -> str:
    """`trainer_layers` of every dtype, in words."""
    taken = {
        dtype: trainer_layers(dtype, cuda=cuda, transformer_engine=transformer_engine) for dtype in ("bfloat16", "float32")
    }
    if len(set(taken.values())) == 1:
        return f"{taken['float32']} over packed rows"
    return ", ".join(f"{layers} for {dtype}" for dtype, layers in taken.items())
