"""The configurations of models that recipes and plans often name, as published, so that a dry run needs no copy of them.

Facts of each model's config.json on the Hugging Face hub (huggingface.co/NAME), as far as its shape depends on them. The counts
are those that the hub shows for its safetensors files, and a test computes them again from the shapes. (The smallest two store
their tied head twice; their counts here are of the parameters, as their model cards round them.) To add a model: an entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """`config`: keys of config.json. `parameters`: how many numbers the model has."""

    config: dict[str, Any]
    parameters: int


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": ffn,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


_LLAMA31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
_QWEN25_3B = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_LLAMA32_3B = {
    "model_type": "llama",
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}

KNOWN = {
    "Qwen/Qwen3-0.6B": Published(_qwen3(1024, 28, 16, 3072, tied=True), 596_049_920),
    "Qwen/Qwen3-1.7B": Published(_qwen3(2048, 28, 16, 6144, tied=True), 1_720_574_976),
    "Qwen/Qwen3-4B": Published(_qwen3(2560, 36, 32, 9728, tied=True), 4_022_468_096),
    "Qwen/Qwen3-8B": Published(_qwen3(4096, 36, 32, 12288, tied=False), 8_190_735_360),
    "Qwen/Qwen3-14B": Published(_qwen3(5120, 40, 40, 17408, tied=False), 14_768_307_200),
    "Qwen/Qwen3-32B": Published(_qwen3(5120, 64, 64, 25600, tied=False), 32_762_123_264),
    "Qwen/Qwen2.5-3B": Published(_QWEN25_3B, 3_085_938_688),
    "Qwen/Qwen2.5-3B-Instruct": Published(_QWEN25_3B, 3_085_938_688),
    "Qwen/Qwen2.5-7B": Published(_QWEN25_7B, 7_615_616_512),
    "Qwen/Qwen2.5-7B-Instruct": Published(_QWEN25_7B | {"max_position_embeddings": 32768}, 7_615_616_512),
    "meta-llama/Llama-3.1-8B-Instruct": Published(_LLAMA31_8B, 8_030_261_248),
    "meta-llama/Llama-3.2-3B-Instruct": Published(_LLAMA32_3B, 3_212_749_824),
}
