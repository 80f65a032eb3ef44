"""What several operations do with their arguments before they start. Each raises a ValueError that names the argument."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_range(name: str, value: Tensor, size: int) -> None:
    """Every entry is in 0..size-1. Waits for the device."""
    if value.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(value))
    if low < 0 or high >= size:
        raise ValueError(f"{name} runs from {low} to {high}; expected 0 to {size - 1}")


def check_device(name: str, tensor: Tensor | None, like: Tensor, of: str = "the other arguments") -> None:
    """An optional tensor is where `like` is, which the caller knows as `of`."""
    if tensor is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected the device of {of}, {like.device}")


def inverse_temperature(
    temperature: float | Tensor, target: Tensor, check_values: bool, index: Tensor | None = None
) -> Tensor | None:
    """1 / temperature, fp32, for the tokens of `target` or those at `index`; None for the constant 1. It gets no gradient."""
    if not isinstance(temperature, Tensor):
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature is {temperature}; expected a positive number")
        if temperature == 1.0:
            return None
        tokens = target.numel() if index is None else index.shape[0]
        return torch.full((tokens,), 1.0 / temperature, dtype=torch.float32, device=target.device)
    if temperature.shape != target.shape:
        raise ValueError(f"temperature has shape {list(temperature.shape)}; expected a number or {list(target.shape)}")
    check_device("temperature", temperature, target, "target")
    chosen = temperature.detach().reshape(-1)
    chosen = chosen if index is None else chosen[index]
    if check_values and not bool(((chosen > 0) & chosen.isfinite()).all()):
        raise ValueError("temperature holds a value that is not positive and finite")
    return chosen.float().reciprocal()
