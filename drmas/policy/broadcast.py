"""Rank 0's word to all ranks: what it found or decided, or the error that stopped it.

Messages are JSON on a gloo group of their own, whose timeout is far beyond any rollout: the other ranks wait here while rank 0
starts engines and drives episodes, and torchrun ends them if rank 0 dies. Not for tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import drmas.errors
from drmas.errors import DrmasError

_PATIENCE = timedelta(days=7)


class Broadcast:
    """Collective over the world: construct it on every rank in the same place."""

    def __init__(self) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=_PATIENCE, group_desc="control")

    def __call__(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 and give its result, which must survive JSON, on every rank.

        A DrmasError that it raises is raised on every rank, as its own kind; any other exception as a DrmasError elsewhere.
        """
        if self._alone:
            return action()
        if dist.get_rank() != 0:
            return self._heard()
        try:
            result = action()
        except BaseException as error:
            kind = type(error).__name__ if isinstance(error, DrmasError) else "DrmasError"
            self._say({"error": kind, "message": str(error) or type(error).__name__})
            raise
        self._say({"result": result})
        return result

    def _say(self, message: dict[str, Any]) -> None:
        payload = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([payload.numel()]), 0, group=self._group)
        dist.broadcast(payload, 0, group=self._group)

    def _heard(self) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, 0, group=self._group)
        message = json.loads(payload.numpy().tobytes())
        if "error" in message:
            raise getattr(drmas.errors, message["error"])(message["message"])
        return message["result"]
