"""FLOPs of a pass: against a count by hand for real models, and against what torch counts while a model runs."""

import functools
from fnmatch import fnmatchcase

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from drmas.config.schema import LoraConfig, PolicyConfig
from drmas.core.batching import TokenCost
from drmas.core.flops import (
    ModelShape,
    backward_cost,
    causal_pairs,
    flops,
    forward_cost,
    recompute_cost,
    token_cost,
    training_flops,
)

SMOLLM2_135M = ModelShape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152, tied=True)
QWEN3_4B = ModelShape(
    layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, ffn=9728, vocab=151936, tied=True, qk_norm=True
)


def test_smollm2_135m_by_hand():
    # Multiplications per token of one layer:
    #   queries 576 x 576 = 331,776; keys and values 576 x 192 twice = 221,184; output 576 x 576 = 331,776
    #   gate and up 576 x 1536 twice = 1,769,472; down 1536 x 576 = 884,736                        sum 3,538,944
    # Per pair of one layer: 9 heads x 64, for the score and again for the value = 1,152
    # Per response token: 576 x 49152 = 28,311,552
    assert forward_cost(SMOLLM2_135M) == TokenCost(2 * 30 * 3_538_944, 2 * 30 * 1_152, 2 * 28_311_552)
    assert token_cost(SMOLLM2_135M) == TokenCost(6 * 30 * 3_538_944, 6 * 30 * 1_152, 6 * 28_311_552)
    # Rows of 100 and 60 tokens, 40 and 20 of them responses: 100 x 101 / 2 + 60 x 61 / 2 = 5,050 + 1,830 = 6,880 pairs
    #   layers 160 x 637,009,920 = 101,921,587,200; pairs 6,880 x 207,360 = 1,426,636,800
    #   head 60 x 169,869,312 = 10,192,158,720
    count = training_flops(SMOLLM2_135M, tokens=160, pairs=causal_pairs([100, 60]), responses=60, config=policy())
    assert count == 113_540_382_720


def test_qwen3_4b_by_hand():
    # Its 32 heads of 128 are wider than the hidden size. Multiplications per token of one layer:
    #   queries 2560 x 4096 = 10,485,760; keys and values 2560 x 1024 twice = 5,242,880; output 4096 x 2560 = 10,485,760
    #   gate and up 2560 x 9728 twice = 49,807,360; down 9728 x 2560 = 24,903,680                  sum 100,925,440
    # Per pair of one layer: 2 x 32 x 128 = 8,192. Per response token: 2560 x 151936 = 388,956,160
    assert token_cost(QWEN3_4B) == TokenCost(6 * 36 * 100_925_440, 6 * 36 * 8_192, 6 * 388_956_160)
    # One row of 4,096 tokens with 1,024 responses: 4096 x 4097 / 2 = 8,390,656 pairs
    #   layers 4,096 x 21,799,895,040 = 89,292,370,083,840; pairs 8,390,656 x 1,769,472 = 14,847,030,853,632
    #   head 1,024 x 2,333,736,960 = 2,389,746,647,040
    count = training_flops(QWEN3_4B, tokens=4096, pairs=causal_pairs([4096]), responses=1024, config=policy())
    assert count == 106_529_147_584_512


def test_a_pass_without_gradients_and_a_critic():
    cost = forward_cost(SMOLLM2_135M)
    assert flops(cost, tokens=160, pairs=6_880, responses=60) * 3 == 113_540_382_720
    critic = ModelShape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=1)
    assert forward_cost(critic) == cost._replace(response=2 * 576)


def test_a_shared_prefix_is_counted_once():
    """Two rows of 50 tokens that share 30: 70 tokens are computed, and each row's own 20 see the shared 30."""
    pairs = causal_pairs([30]) + 2 * (causal_pairs([50]) - causal_pairs([30]))
    assert pairs == 465 + 2 * 810
    shared = training_flops(SMOLLM2_135M, tokens=70, pairs=pairs, responses=40, config=policy())
    apart = training_flops(SMOLLM2_135M, tokens=100, pairs=causal_pairs([50, 50]), responses=40, config=policy())
    assert apart - shared == 30 * 637_009_920 + 465 * 207_360


LENGTH = 12
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 50,
    "attn_implementation": "eager",
}
SHAPE = {"layers": 3, "hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 40, "vocab": 50}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, ModelShape(**SHAPE)),
    "llama tied": (LlamaForCausalLM, LlamaConfig, ModelShape(**SHAPE, tied=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, ModelShape(**(SHAPE | {"head_dim": 6}), qkv_bias=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, ModelShape(**SHAPE, qk_norm=True)),
}


def policy(**settings) -> PolicyConfig:
    return PolicyConfig(model="x", **settings)


def build(family: str) -> tuple[torch.nn.Module, ModelShape]:
    model, config, shape = FAMILIES[family]
    sizes = SIZES | {"head_dim": shape.head_dim, "tie_word_embeddings": shape.tied}
    if shape.head_dim == 6:
        del sizes["head_dim"]
    torch.manual_seed(0)
    return model(config(**sizes)).train(), shape


def counted(model: torch.nn.Module, *, backward: bool = True) -> int:
    """What torch counts. Eager attention multiplies whole squares: LENGTH^2 pairs; every token goes through the head."""
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.arange(LENGTH)[None], use_cache=False).logits
        if backward:
            logits.square().sum().backward()
    return counter.get_total_flops()


def computed(*costs: TokenCost) -> int:
    return sum(flops(cost, tokens=LENGTH, pairs=LENGTH**2, responses=LENGTH) for cost in costs)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_are_what_torch_counts(family):
    model, shape = build(family)
    assert counted(model, backward=False) == computed(forward_cost(shape))
    assert counted(model) == computed(token_cost(shape))


FREEZES = {
    "the embedding alone": ["model.embed_tokens.*"],
    "the embedding and the head": ["model.embed_tokens.*", "lm_head.*"],
    "the first layers, from the embedding on": ["model.embed_tokens.*", "model.layers.[01].*"],
    "the last layer": ["model.layers.2.*"],
    "all linear layers": ["*_proj.weight", "model.embed_tokens.*"],
    "attention everywhere": ["*self_attn*", "*input_layernorm*", "model.embed_tokens.*"],
    "all but the embedding and the head": ["model.layers.*", "model.norm.*"],
    "all but the last norm and MLP": ["model.embed_tokens.*", "*.self_attn.*", "*layernorm*", "*.[01].mlp.*", "lm_head.*"],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("freeze", FREEZES.values(), ids=FREEZES)
def test_what_is_frozen_has_no_gradient(family, freeze):
    model, shape = build(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in freeze))
    assert counted(model) == computed(forward_cost(shape), backward_cost(shape, freeze=freeze))


class Low:
    """A x of the linear layers that are one when they are trained; computed once for them."""

    def __init__(self, rank: int, inputs: int) -> None:
        self.a, self.of = torch.nn.Parameter(torch.randn(rank, inputs)), None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.of is not x:
            self.of, self.value = x, x @ self.a.t()
        return self.value


class Adapted(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear, low: Low) -> None:
        super().__init__()
        self.base, self.low, self.a = base, low, low.a
        self.b = torch.nn.Parameter(torch.randn(base.out_features, low.a.shape[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.low(x) @ self.b.t()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [["qkv", "proj", "fc1", "fc2"], ["fc2"], ["qkv", "fc1"]], ids="+".join)
def test_adapters_train_on_a_frozen_base(family, targets):
    model, shape = build(family)
    lora = LoraConfig(rank=3, targets=targets)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    modules = {
        "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
        "proj": ("self_attn", ("o_proj",)),
        "fc1": ("mlp", ("gate_proj", "up_proj")),
        "fc2": ("mlp", ("down_proj",)),
    }
    for layer in model.model.layers:
        for owner, names in (modules[target] for target in targets):
            block = getattr(layer, owner)
            low = Low(lora.rank, getattr(block, names[0]).in_features)
            for name in names:
                setattr(block, name, Adapted(getattr(block, name), low))
    expected = computed(forward_cost(shape, lora), backward_cost(shape, lora))
    assert counted(model) == expected
    config = policy(lora=lora)
    assert training_flops(shape, tokens=LENGTH, pairs=LENGTH**2, responses=LENGTH, config=config) == expected


def test_full_recompute_runs_the_layers_again_and_selective_their_mlps():
    model, shape = build("qwen3")

    def again(forward, hidden, **settings):
        """The layer whole, as Megatron does; torch's other way stops before its last product."""
        return checkpoint(functools.partial(forward, **settings), hidden, use_reentrant=True)

    for layer in model.model.layers:
        layer.forward = functools.partial(again, layer.forward)
    full = recompute_cost(shape, policy(recompute="full"))
    assert counted(model) == computed(token_cost(shape), full)
    # gate, up and down: 24 x 40 three times, in 3 layers
    assert recompute_cost(shape, policy(recompute="selective")) == TokenCost(2 * 3 * 3 * 24 * 40, 0, 0)
    assert recompute_cost(shape, policy()) == TokenCost(0, 0, 0)
    adapted = policy(recompute="selective", lora=LoraConfig(rank=2, targets=["qkv", "fc2"]))
    assert recompute_cost(shape, adapted).token == 2 * 3 * (3 * 24 * 40 + 2 * (40 + 24))
