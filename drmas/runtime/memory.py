"""How much memory the trainers' numbers take on each rank, by part: an estimate from shapes, before anything is made.

Activations are apart, since they depend on the rows: `activation_bytes` is those of a full microbatch. Called by
`drmas.runtime.placement`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drmas.config.schema import LoraConfig, PolicyConfig
from drmas.policy.architecture import Architecture
from drmas_kernels._head_chunks import CHUNK_BYTES

BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""
MOMENT_BYTES = 8
"""AdamW's two, in fp32."""


class Part(NamedTuple):
    """Something a rank holds. Parts with equal keys are one and the same on a rank, whoever asks for it."""

    what: str
    bytes: float
    key: Hashable


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a policy's ranks hold: its own, its reference, or its critic."""

    name: str
    """Names the weights: equal names are equal weights."""
    architecture: Architecture
    frozen_share: float = 0.0
    """The share of the parameters that isn't trained."""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's place in a policy's layout."""

    config: PolicyConfig
    ranks: tuple[int, ...]
    place: int
    """0 to the number of `ranks`; tensor-parallel ranks lie next to each other, stages furthest apart."""

    @property
    def replicas(self) -> int:
        """Ranks with the same parameters."""
        return len(self.ranks) // (self.config.tensor_parallel * self.config.pipeline_parallel)

    @property
    def stage(self) -> int:
        return self.place * self.config.pipeline_parallel // len(self.ranks)

    @property
    def layout(self) -> Hashable:
        return (self.ranks, self.config.tensor_parallel, self.config.pipeline_parallel, self.config.context_parallel)


def rank_parameters(architecture: Architecture, share: Share, *, head: bool = True) -> int:
    """How many parameters a rank has of a model; without `head`, of one whose output layer was taken off."""
    a, tp, stages = architecture, share.config.tensor_parallel, share.config.pipeline_parallel
    linear = sum(inputs * outputs for inputs, outputs in a.shape.linears().values()) + a.qkv_bias * a.qkv_rows
    norms = 2 * a.hidden + 2 * a.head_dim * a.qk_norm
    table = a.padded_vocab(tp) // tp * a.hidden
    count = a.layers // stages * (linear // tp + norms)
    if share.stage == 0:
        count += table
    if share.stage == stages - 1:
        count += a.hidden  # the last norm
        count += table if head and (stages > 1 or not a.tied) else 0  # tied: another copy, on a stage of its own only
    return count


def adapter_parameters(architecture: Architecture, lora: LoraConfig, share: Share) -> int:
    """How many parameters a rank has of a policy's adapters. A factor that tensor parallelism doesn't cut is whole on each."""
    tp, width = share.config.tensor_parallel, 0
    linears = architecture.shape.linears()
    for name in dict.fromkeys(lora.targets):
        inputs, outputs = linears[name]
        width += inputs + outputs // tp if name in ("qkv", "fc1") else inputs // tp + outputs  # cut by rows, by columns
    return architecture.layers // share.config.pipeline_parallel * lora.rank * width


def held(
    policy: str, share: Share, model: Model, reference: Model | None, critic: Model | None, *, apart: bool, gpu: bool
) -> Iterator[Part]:
    """What a policy has on a rank. `apart`: gradients are measured per agent; `gpu`: the optimiser may go to host memory."""
    config = share.config
    size = BYTES[config.dtype]
    count = rank_parameters(model.architecture, share)
    if config.lora is not None and config.trainable:
        yield Part("base", size * count, ("frozen", model.name, config.dtype, share.layout))
        yield from _trained(policy, share, adapter_parameters(model.architecture, config.lora, share), apart=apart, gpu=gpu)
    elif config.trainable:
        frozen = count * model.frozen_share
        yield Part("weights", size * frozen, (policy, "frozen weights"))
        yield from _trained(policy, share, count - frozen, apart=apart, gpu=gpu)
    else:
        yield Part("weights", size * count, (policy, "frozen weights"))
    if reference is not None:
        frozen = size * rank_parameters(reference.architecture, share)
        yield Part("reference", frozen, ("frozen", reference.name, config.dtype, share.layout))
    if critic is not None:
        count = rank_parameters(critic.architecture, share, head=False)
        parts = list(_trained(policy, share, count, apart=False, gpu=gpu))
        away = sum(part.bytes for part in parts if "host" in part.what)
        yield Part("critic", sum(part.bytes for part in parts) - away, (policy, "critic"))
        if away:
            yield Part("critic's optimiser in host memory", away, (policy, "critic's optimiser"))


def _trained(policy: str, share: Share, count: float, *, apart: bool, gpu: bool) -> Iterator[Part]:
    """`count` parameters with gradients and state; the state is divided over the replicas."""
    config = share.config
    master = 4 if config.dtype != "float32" else 0
    away = " in host memory" if config.offload_optimizer and gpu else ""
    yield Part("weights", BYTES[config.dtype] * count, (policy, "weights"))
    yield Part("gradients", GRADIENT_BYTES * count * (1 + apart / share.replicas), (policy, "gradients"))
    yield Part(f"optimiser{away}", (MOMENT_BYTES + master) * count / share.replicas, (policy, "optimiser"))


def activation_bytes(architecture: Architecture, share: Share, *, gpu: bool) -> float:
    """What a rank has of a full microbatch at most while it goes back through it: an estimate, the head's buffers included.

    A layer saves, per token: inputs and outputs of its two norms (4 h, divided by TP under sequence parallelism), queries, keys
    and values, what attention gives, and three times the width of its gated MLP (each divided by TP). Selective recompute saves
    none of the MLP's, full recompute 2 h in all, and each one whole layer at a time besides; so do a layer's gradients. The
    first stage of a pipeline keeps as many microbatches as there are stages (1F1B). The count follows arXiv 2205.05198,
    section 4, for a gated MLP and an attention that saves no scores. tests/runtime/test_activations.py holds it against what
    autograd keeps on a CPU: per layer it is 0.9 to 1.3 times that.
    """
    config, a, size = share.config, architecture, BYTES[share.config.dtype]
    tp, stages = config.tensor_parallel, config.pipeline_parallel
    tokens = max(config.tokens_per_microbatch, config.engine.max_model_tokens) / config.context_parallel
    wide = a.hidden / (tp if config.sequence_parallel else 1)
    attention = (a.qkv_rows + a.heads * a.head_dim) / tp
    layer = 4 * wide + attention + 3 * a.ffn / tp
    kept = {"none": layer, "selective": 5 * wide + attention, "full": 2 * wide}[config.recompute]
    again = 0.0 if config.recompute == "none" else layer
    microbatches = stages - share.stage
    layers = tokens * size * (a.layers / stages * kept * microbatches + again + layer)
    if share.stage < stages - 1:
        return layers
    logits = min(4 * tokens * a.padded_vocab(tp) / tp, CHUNK_BYTES["cuda" if gpu else "cpu"])
    return layers + 1.5 * logits + 2 * tokens * a.hidden * size


def by_part(parts: Iterable[Part]) -> dict[str, float]:
    """Bytes by what they are for; parts with equal keys count once."""
    total: dict[str, float] = {}
    for part in {part.key: part for part in parts}.values():
        total[part.what] = total.get(part.what, 0.0) + part.bytes
    return total


def describe(parts: Mapping[str, float]) -> str:
    """The sum, then its parts, in GiB."""
    device = sum(size for what, size in parts.items() if not what.endswith("host memory"))
    detail = ", ".join(f"{what} {size / 2**30:.2f}" for what, size in parts.items() if size)
    return f"{device / 2**30:.2f} GiB ({detail})"


def fullest(parts: Mapping[int, Sequence[Part]]) -> int:
    """The rank that holds the most; the first of several."""
    return max(parts, key=lambda rank: (sum(by_part(parts[rank]).values()), -rank))
