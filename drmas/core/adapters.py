"""What trainer, transport and engine all know of adapters: which layers have one, and PEFT's description of them.

Pure names. Used by `drmas.policy` (training, folders), `drmas.weights` and `drmas.rollout` (engines that take adapters).
"""

from __future__ import annotations

from typing import Any

from drmas.config.schema import LoraConfig

PROJECTIONS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "proj": ("self_attn.o_proj",),
    "fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "fc2": ("mlp.down_proj",),
}
"""The Hugging Face layers behind each of `policies.NAME.lora.targets`; where there are several, the trainer fuses them."""


BACKEND = "drmas-adapters"
"""What vLLM calls the workers' side of the weight sync in an engine that takes adapters and no whole weights."""
ADAPTER_ID = 1
"""vLLM's number of the one set of adapters that such an engine holds."""


def adapter_config(config: LoraConfig, base: str) -> dict[str, Any]:
    """The content of PEFT's adapter_config.json; `base` is where the base model is found."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": sorted({each.rpartition(".")[2] for name in config.targets for each in PROJECTIONS[name]}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
