"""What a Hugging Face folder's model is, in the words that Megatron needs, or why it can't be trained here.

Dense decoders of the Llama, Qwen2 (2.5) and Qwen3 families. Everything else is refused by name, because a model that is built
almost right trains on wrong log-probs. Reads config.json only. Called by the trainer, and by the runtime before it starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drmas.config.schema import PolicyConfig
from drmas.core.flops import ModelShape
from drmas.errors import ModelError

FAMILIES = ("llama", "qwen2", "qwen3")
FP8_SIDE = 16
"""What both sides of a weight must be a multiple of in an fp8 GEMM."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a dense decoder. Sizes are of the whole model, not of a rank.

    `inverse_frequencies` [head_dim / 2] float32 are the rotary ones where scaling changes them, else None.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope_theta: float
    tied: bool
    max_positions: int
    inverse_frequencies: torch.Tensor | None = None
    rope_scaling: str = "default"
    """What `inverse_frequencies` were computed from, as JSON, or "default" for plain ones."""

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def shape(self) -> ModelShape:
        """What arithmetic is counted from."""
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            vocab=self.vocab,
            tied=self.tied,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
        )

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab // tp) * tp

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to fit: every field, so that the weights mean the same function.

        The rotary frequencies are in it by what they were computed from, which is readable and free of rounding.
        """
        names = (field.name for field in fields(self) if field.name != "inverse_frequencies")
        return {name: getattr(self, name) for name in names}

    def check_layout(self, config: PolicyConfig, *, policy: str) -> None:
        """ModelError if the model doesn't divide into the parts that the policy's layout has. Needs no process group."""
        self._check_tensor_parallel(config.tensor_parallel, key=f"policies.{policy}.tensor_parallel")
        stages = config.pipeline_parallel
        if self.layers % stages:
            raise ModelError(
                f"policies.{policy}.pipeline_parallel is {stages}; it must divide the model's {self.layers} layers, of which "
                "every stage holds as many"
            )
        if config.fp8 is not None:
            self._check_fp8(config.tensor_parallel, key=f"policies.{policy}.fp8 is {config.fp8!r}")

    def _check_tensor_parallel(self, tp: int, *, key: str) -> None:
        """ModelError if `tp` ranks can't share the heads or the feed-forward layer evenly, or one has no vocabulary."""
        for what, size in (("attention heads", self.heads), ("feed-forward units", self.ffn)):
            if size % tp:
                raise ModelError(f"{key} is {tp}; it must divide the model's {size} {what}")
        if max(self.kv_heads, tp) % min(self.kv_heads, tp):
            raise ModelError(
                f"{key} is {tp}; it must divide the model's {self.kv_heads} key-value heads or be a multiple of them"
            )
        if self.qkv_rows % tp:
            raise ModelError(
                f"{key} is {tp}; it must divide the {self.qkv_rows} rows of the model's query, key and value weights, "
                f"({self.heads} + 2 x {self.kv_heads}) heads x {self.head_dim}"
            )
        share = self.padded_vocab(tp) // tp  # padding makes it even, and must not be all that a rank has
        if (tp - 1) * share >= self.vocab:
            raise ModelError(
                f"{key} is {tp}; with {share} of the model's {self.vocab} vocabulary rows per rank the last rank has none"
            )

    def _check_fp8(self, tp: int, *, key: str) -> None:
        """ModelError if a rank's part of a linear layer has a side that TransformerEngine's fp8 GEMMs can't take."""
        sides = {
            "hidden size": self.hidden,
            "query, key and value rows": self.qkv_rows // tp,
            "attention outputs": self.heads * self.head_dim // tp,
            "feed-forward units": self.ffn // tp,
        }
        for what, size in sides.items():
            if size % FP8_SIDE:
                raise ModelError(f"{key}; a rank has {size} {what}, and fp8 takes multiples of {FP8_SIDE}; unset it")


def read_architecture(folder: Path) -> Architecture:
    """The architecture of the model in `folder`.

    ModelError: no folder or no config.json, another family, or a feature that isn't supported; names which.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"model folder {str(folder)!r} has no config.json; set policies.NAME.model to a Hugging Face folder")
    family = json.loads(file.read_text()).get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{file}: model_type is {family!r}; supported are {', '.join(FAMILIES)} (dense)")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _refuse_unsupported(config, file)
    rope = _rope(config)
    return Architecture(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        tied=bool(config.tie_word_embeddings),
        max_positions=config.max_position_embeddings,
        inverse_frequencies=_inverse_frequencies(config, rope, file),
        rope_scaling=_scaling(rope),
    )


def _refuse_unsupported(config: PretrainedConfig, file: Path) -> None:
    expected = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "quantization_config": None,
    }
    for key, value in expected.items():
        found = getattr(config, key, value)
        if found != value:
            raise ModelError(f"{file}: {key} is {found!r}; only {value!r} is supported")
    windows = {kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"}
    if windows:
        raise ModelError(f"{file}: layer_types has {', '.join(sorted(windows))}; only full_attention is supported")


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """Rotary settings under transformers 5's names, from its spelling or version 4's."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    return rope


def _scaling(rope: dict[str, Any]) -> str:
    if rope["rope_type"] == "default":
        return "default"
    return json.dumps({key: value for key, value in rope.items() if key not in ("rope_theta", "type")}, sort_keys=True)


def _inverse_frequencies(config: PretrainedConfig, rope: dict[str, Any], file: Path) -> torch.Tensor | None:
    """Scaled rotary frequencies, computed by transformers itself; None for plain ones, which Megatron computes."""
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{file}: partial_rotary_factor is {rope['partial_rotary_factor']}; only 1.0 is supported")
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] not in ("linear", "llama3"):
        raise ModelError(f"{file}: rope_type is {rope['rope_type']!r}; supported are default, linear and llama3")
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies
