"""How many floating-point operations the passes of a model take, exactly, as integers.

Counted are the products of matrices: [m, k] times [k, n] is 2 m n k, a multiplication and an addition each. With t tokens
computed, p query-key pairs (causal: l (l + 1) / 2 of a row of l tokens; those of a shared prefix once) and r response tokens in
the head:

    w = hidden (heads + 2 kv_heads) head_dim + heads head_dim hidden + 2 hidden ffn + ffn hidden    weights of a layer
    a = 2 heads head_dim                                                        scores, and the weighted sum of values
    h = hidden vocab
    forward     2 layers (w t + a p) + 2 h r
    backward    4 layers (w t + a p) + 4 h r        a product for the gradient of either factor
    together    6 layers (w t + a p) + 6 h r        the head's three products: logits, dH, dW

A weight that isn't trained has no gradient, and below the first trained parameter there is no backward pass. An adapter of rank
k beside a layer of m inputs and n outputs adds 2 k (m + n) per token forward and 4 k (m + n) backward.

Not counted: norms, rotary embedding, softmax, SwiGLU, biases, the embedding's look-up, losses, the optimiser, communication;
nor what an implementation does beyond the mathematics: padding of tokens or vocabulary, products repeated on tensor-parallel
ranks, scores that a fused attention computes again in its backward pass. Activations computed again stand apart
(`recompute_cost`): the utilisation of a model (MFU) leaves them out.

Called by the trainer: costs for the plan of microbatches, FLOPs of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from drmas.config.schema import LoraConfig, PolicyConfig
from drmas.core.batching import TokenCost


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a dense decoder with gated feed-forward layers, of the whole model and not of a rank.

    Example: ModelShape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152, tied=True)
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    """Outputs of the head; 1 for a critic's."""
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a layer's linear layers, fused as they are trained, by the names of `lora.targets`."""
        width = self.heads * self.head_dim
        return {
            "qkv": (self.hidden, width + 2 * self.kv_heads * self.head_dim),
            "proj": (width, self.hidden),
            "fc1": (self.hidden, 2 * self.ffn),
            "fc2": (self.ffn, self.hidden),
        }

    def parts(self) -> list[tuple[str, str]]:
        """What a layer computes with, in order: (a linear layer, "attention", or "" for what has no product, its tensor).

        Of tensors that are trained together or not at all, one stands for all. Names are Hugging Face's, within a layer.
        """
        return [
            ("", "input_layernorm.weight"),
            ("qkv", "self_attn.q_proj.weight"),
            *([("", "self_attn.q_proj.bias")] if self.qkv_bias else []),
            *([("", "self_attn.q_norm.weight"), ("", "self_attn.k_norm.weight")] if self.qk_norm else []),
            ("attention", ""),
            ("proj", "self_attn.o_proj.weight"),
            ("", "post_attention_layernorm.weight"),
            ("fc1", "mlp.gate_proj.weight"),
            ("fc2", "mlp.down_proj.weight"),
        ]


def flops(cost: TokenCost, *, tokens: int, pairs: int, responses: int) -> int:
    """What a pass costs that computes `tokens`, attends over `pairs`, and has `responses` tokens in the head."""
    return cost.token * tokens + cost.pair * pairs + cost.response * responses


def forward_cost(shape: ModelShape, lora: LoraConfig | None = None) -> TokenCost:
    """Of a forward pass, the head's log-probs included: all there is without training."""
    layer = sum(2 * inputs * outputs for inputs, outputs in shape.linears().values())
    layer += sum(_adapter(shape, lora, name) for name in shape.linears())
    attention = 2 * shape.layers * _attention(shape)
    return TokenCost(shape.layers * layer, attention, 2 * shape.hidden * shape.vocab)


def backward_cost(shape: ModelShape, lora: LoraConfig | None = None, freeze: Sequence[str] = ()) -> TokenCost:
    """Of a backward pass. `freeze` are patterns of Hugging Face names; under `lora`, where all of the base is frozen, they
    mean nothing, and the embedding's output has a gradient, as in the trainer.
    """
    trained = _trained(lora, freeze)
    flowing = lora is not None or trained("model.embed_tokens.weight")
    linears = shape.linears()
    token = pair = 0
    for layer in range(shape.layers):
        for part, tensor in shape.parts():
            is_trained = bool(tensor) and trained(f"model.layers.{layer}.{tensor}")
            if part in linears:
                inputs, outputs = linears[part]
                token += 2 * inputs * outputs * (flowing + is_trained) + 2 * _adapter(shape, lora, part)
            elif part == "attention" and flowing:
                pair += 4 * _attention(shape)
            flowing = flowing or is_trained
    flowing = flowing or trained("model.norm.weight")
    head = trained("model.embed_tokens.weight" if shape.tied else "lm_head.weight")
    return TokenCost(token, pair, 2 * shape.hidden * shape.vocab * (flowing + head))


def recompute_cost(shape: ModelShape, config: PolicyConfig) -> TokenCost:
    """Of what the backward pass computes again under `config.recompute`: whole layers, or (selective) norms and MLPs."""
    if config.recompute == "none":
        return TokenCost(0, 0, 0)
    if config.recompute == "full":
        return forward_cost(shape, config.lora)._replace(response=0)
    linears = shape.linears()
    mlp = sum(2 * linears[name][0] * linears[name][1] + _adapter(shape, config.lora, name) for name in ("fc1", "fc2"))
    return TokenCost(shape.layers * mlp, 0, 0)


def token_cost(shape: ModelShape) -> TokenCost:
    """Forward and backward of a model that is trained whole; for plans, which need proportions only."""
    return _add(forward_cost(shape), backward_cost(shape))


def training_flops(shape: ModelShape, *, tokens: int, pairs: int, responses: int, config: PolicyConfig) -> int:
    """Of an update of the policy, without what is computed again: what its MFU counts."""
    cost = _add(forward_cost(shape, config.lora), backward_cost(shape, config.lora, config.freeze))
    return flops(cost, tokens=tokens, pairs=pairs, responses=responses)


def causal_pairs(lengths: Sequence[int]) -> int:
    """Query-key pairs of rows of these lengths that share nothing: every token sees itself and what came before it."""
    return sum(length * (length + 1) // 2 for length in lengths)


def _attention(shape: ModelShape) -> int:
    return 2 * shape.heads * shape.head_dim


def _adapter(shape: ModelShape, lora: LoraConfig | None, name: str) -> int:
    """Forward FLOPs per token of an adapter, if this linear layer has one."""
    return 2 * lora.rank * sum(shape.linears()[name]) if lora is not None and name in lora.targets else 0


def _trained(lora: LoraConfig | None, freeze: Sequence[str]) -> Callable[[str], bool]:
    if lora is not None:
        return lambda name: False
    return lambda name: not any(fnmatchcase(name, pattern) for pattern in freeze)


def _add(one: TokenCost, other: TokenCost) -> TokenCost:
    return TokenCost(*(a + b for a, b in zip(one, other, strict=True)))
