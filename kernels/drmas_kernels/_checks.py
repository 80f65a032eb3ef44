"""Checks of arguments that several operations share. Each raises a ValueError that names the argument."""

from __future__ import annotations

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
