"""What a policy's trainer is built from on a machine: layers, attention, fp8, overlap. One rule, with its reasons in words.

Decides from facts that are handed in and imports nothing heavy, so that it can be asked where Megatron or torch is missing.
Called by drmas.policy, whose models are built from its answer, and by the commands, which print it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from drmas.config.schema import PolicyConfig
from drmas.errors import ConfigError

Layers = Literal["Transformer Engine", "torch"]
"""TransformerEngine's fused layers, or Megatron's own with `drmas.policy.layers`."""
Attention = Literal["transformer-engine", "flex", "sdpa"]
"""TransformerEngine's over rows laid end to end, FlexAttention over a tree of rows, scaled_dot_product_attention by ranges."""

PACKAGES = ("transformer_engine", "flash_attn", "triton")
"""The modules whose presence matters here."""
FP8_RECIPES = {"hybrid": "tensorwise", "e4m3": "blockwise"}
"""Format -> scaling. Both scale by the tensor at hand, so there is no history to checkpoint or to agree on between ranks."""
FP8_TOKENS = 128
"""fp8 GEMMs take the tokens of a rank in multiples of a block."""

_CHOICES: tuple[Attention, ...] = ("transformer-engine", "flex", "sdpa")
"""In the order in which "auto" tries them."""


class Reason(NamedTuple):
    taken: str
    why: str


@dataclass(frozen=True, slots=True)
class Stack:
    """A decision. `reasons` says of each part what was taken and why; `str` prints all of it on one line."""

    layers: Layers
    attention: Attention
    fp8: Literal["hybrid", "e4m3"] | None
    overlap: bool
    """Gradients are reduced while the backward pass runs, parameters gathered while the forward pass does."""
    thd: bool
    """Packed rows reach the attention as [T, heads, d] with their boundaries, not with explicit ranges of keys."""
    shares_prefixes: bool
    reasons: Mapping[str, Reason]
    token_multiple: int = 1
    """What the tokens of a rank are padded to a multiple of."""

    def __str__(self) -> str:
        return "; ".join(f"{part} {reason.taken} ({reason.why})" for part, reason in self.reasons.items())


def choose_stack(policy: str, config: PolicyConfig, *, cuda: bool, packages: Mapping[str, bool], replicas: int = 1) -> Stack:
    """The stack of `policies.POLICY` on a machine with or without CUDA, where `packages` (of PACKAGES) are present or absent.

    `replicas` is how many ranks hold the same parameters (data x context parallel). Without a wish in the configuration: on
    CUDA TransformerEngine for bfloat16 and else FlexAttention, on a CPU scaled_dot_product_attention. ConfigError: a wish that
    can't be had here, and what can.

    Example: choose_stack("main", PolicyConfig(model="m"), cuda=False, packages={}).attention == "sdpa"
    """
    obstacles = {each: _obstacle(each, config.dtype, cuda=cuda, packages=packages) for each in _CHOICES}
    possible = [each for each in _CHOICES if obstacles[each] is None]
    wish = config.attention
    if wish != "auto" and wish not in possible:
        raise ConfigError(
            f"policies.{policy}.attention is {wish!r}: {obstacles[wish]}; expected {' or '.join(possible)} here, or auto"
        )
    attention = possible[0] if wish == "auto" else wish
    fused = attention == "transformer-engine"
    if config.fp8 is not None and not fused:
        why = obstacles["transformer-engine"] or f"its layers aren't taken with attention = {wish!r}"
        raise ConfigError(f"policies.{policy}.fp8 is {config.fp8!r}, of TransformerEngine: {why}; unset fp8")
    layers: Layers = "Transformer Engine" if fused else "torch"
    overlap, why_overlap = _overlap(config, cuda=cuda, replicas=replicas)
    sharing, why_sharing = _sharing(config, fused=fused, alternative="sdpa" if obstacles["flex"] else "flex")
    reasons = {
        "layers": Reason(layers, "TransformerEngine's attention comes with them" if fused else "Megatron's own"),
        "attention": Reason(attention, _why(attention, obstacles, packages) if wish == "auto" else "as configured"),
        "prefix sharing": Reason("on" if sharing else "off", why_sharing),
        "overlap": Reason("on" if overlap else "off", why_overlap),
    }
    if config.fp8 is not None:
        reasons["fp8"] = Reason(f"{config.fp8}, {FP8_RECIPES[config.fp8]} scaling", "as configured, in linear layers")
    if config.context_parallel > 1:
        how = "TransformerEngine sends keys and values round a ring" if fused else "each rank gathers all keys and values"
        reasons["context parallel"] = Reason(f"{config.context_parallel} ranks", how)
    return Stack(
        layers=layers,
        attention=attention,
        fp8=config.fp8,
        overlap=overlap,
        thd=fused,
        shares_prefixes=sharing,
        reasons=reasons,
        token_multiple=FP8_TOKENS if config.fp8 else 1,
    )


def _obstacle(attention: Attention, dtype: str, *, cuda: bool, packages: Mapping[str, bool]) -> str | None:
    """Why an attention can't be had for parameters of `dtype`; None where it can."""
    if attention == "sdpa":
        return None
    if not cuda:
        return "it trains on CUDA only, and torch finds no device"
    if attention == "flex":
        return None if packages.get("triton") else "triton, which compiles it, isn't installed"
    if not packages.get("transformer_engine"):
        return "the package transformer-engine isn't installed (pip install '.[gpu]')"
    return None if dtype == "bfloat16" else f"it takes packed rows in bfloat16, not in {dtype}"


def _why(attention: Attention, obstacles: Mapping[Attention, str | None], packages: Mapping[str, bool]) -> str:
    """What speaks against all that "auto" tried before `attention`; what the first choice runs on."""
    if attention == _CHOICES[0]:
        return "on flash-attn or cuDNN" if packages.get("flash_attn") else "on cuDNN; flash-attn isn't installed"
    refused: dict[str, list[str]] = {}
    for each in _CHOICES[: _CHOICES.index(attention)]:
        refused.setdefault(obstacles[each], []).append(each)
    return "; ".join(f"not {' or '.join(names)}: {obstacle}" for obstacle, names in refused.items())


def _overlap(config: PolicyConfig, *, cuda: bool, replicas: int) -> tuple[bool, str]:
    if replicas == 1:
        return False, "one replica has nothing to exchange"
    if config.overlap is not None:
        return config.overlap, "as configured"
    return cuda, f"{replicas} replicas on GPUs" if cuda else "on a CPU it would take cores from the passes"


def _sharing(config: PolicyConfig, *, fused: bool, alternative: Attention) -> tuple[bool, str]:
    if not config.prefix_sharing:
        return False, "as configured"
    if fused:
        return False, f"TransformerEngine's attention keeps rows apart; attention = {alternative!r} shares"
    return True, "a start that rows of a microbatch share is computed once"
