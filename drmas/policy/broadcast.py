"""Rank 0's word to all ranks: small JSON messages on a gloo group of their own.

The group's timeout is the longest a rollout may take, since the other ranks wait here while rank 0 drives it. JSON, not pickle:
what travels is rows and decisions.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Broadcast:
    """Collective over the world: construct it on every rank in the same place."""

    def __init__(self, timeout: timedelta) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=timeout, group_desc="control")

    def __call__(self, message: Any = None) -> Any:
        """Rank 0 passes the message; every rank returns it. What rank 0 passes must survive JSON."""
        if self._alone:
            return message
        if dist.get_rank() == 0:
            payload = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
            size = torch.tensor([payload.numel()])
        else:
            size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        if dist.get_rank() != 0:
            payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, 0, group=self._group)
        return json.loads(payload.numpy().tobytes())
