"""Vectors for the tests whose offsets pass 2^32, on machines that couldn't hold them."""

from __future__ import annotations

import mmap

import torch

MAP_NORESERVE = 0x4000


def far_buffer(length: int, device: str) -> torch.Tensor:
    """fp32 zeros. On a CPU pages are there once they are written; a GPU holds them all."""
    if device != "cpu":
        return torch.zeros(length, device=device)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, 4 * length, flags=kind), dtype=torch.float32)
