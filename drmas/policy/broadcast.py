"""What all ranks must know: rank 0's word, what every rank found, or the error that stopped one of them.

Messages are JSON on a gloo group of their own, whose timeout is far beyond any rollout: the other ranks wait here while rank 0
starts engines and drives episodes, and where policies have ranks of their own the quick ones wait for the slow. A rank whose
process ends is noticed at once, because its connections close; one whose host goes away is noticed by `runtime.watch`, which
ends this process, so that the long timeout is nobody's wait for the dead. Not for tensors.
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
_MEETING = timedelta(minutes=10)
"""How long ranks wait for one that never comes to make the group, before anything else watches over them."""
_GRACE = timedelta(seconds=60)
"""How long a rank with an error waits to be heard. Ranks that are in a collective with it can't hear it before it leaves."""

_Message = dict[str, Any]


class Broadcast:
    """Collective over the world: construct it on every rank in the same place.

    Example: share = Broadcast(); share(lambda: read_once()); share.gather(lambda: my_part())
    """

    def __init__(self) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=_MEETING, group_desc="control")
        self._wait_for(_PATIENCE)

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
            self._say(_trouble(error))
            raise
        self._say({"result": result})
        return result

    def gather(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank and give all results, which must survive JSON, in the order of the ranks, on every rank.

        An error on one rank ends it on all, with every failed rank's message: a DrmasError as its own kind, anything else as
        itself where it happened and as a DrmasError elsewhere. Ranks that hold the failed one up in a collective aren't waited
        for longer than a minute; they notice that it left.
        """
        if self._alone:
            return [action()]
        error = None
        try:
            message = {"result": action()}
        except Exception as caught:  # raised below, when the other ranks know
            error, message = caught, _trouble(caught)
            self._wait_for(_GRACE)
        try:
            messages = self._exchanged(message)
        except RuntimeError as broken:
            raise error or DrmasError("another rank of the job is gone; its own output says why") from broken
        self._wait_for(_PATIENCE)  # some errors, such as that of a save, aren't the end
        if error is not None and not isinstance(error, DrmasError):
            raise error
        failed = {rank: each for rank, each in enumerate(messages) if "error" in each}
        if failed:
            raise _joined(failed, len(messages))
        return [each["result"] for each in messages]

    def _wait_for(self, timeout: timedelta) -> None:
        if self._group is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, self._group)

    def _say(self, message: _Message) -> None:
        payload = _encoded(message)
        dist.broadcast(torch.tensor([payload.numel()]), 0, group=self._group)
        dist.broadcast(payload, 0, group=self._group)

    def _heard(self) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, 0, group=self._group)
        message = _decoded(payload)
        if "error" in message:
            raise getattr(drmas.errors, message["error"])(message["message"])
        return message["result"]

    def _exchanged(self, message: _Message) -> list[_Message]:
        payload = _encoded(message)
        sizes = [int(size) for size in self._gathered(torch.tensor([payload.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        parts = self._gathered(padded)
        return [_decoded(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor, group=self._group)
        return parts


def _trouble(error: BaseException) -> _Message:
    kind = type(error).__name__ if isinstance(error, DrmasError) else "DrmasError"
    return {"error": kind, "message": str(error) or type(error).__name__}


def _joined(failed: dict[int, _Message], ranks: int) -> DrmasError:
    """One error of the first failed rank's kind, which names the ranks unless all of them say the same."""
    kind = getattr(drmas.errors, next(iter(failed.values()))["error"])
    said: dict[str, list[str]] = {}
    for rank, message in failed.items():
        said.setdefault(message["message"], []).append(str(rank))
    if len(said) == 1 and len(failed) == ranks:
        return kind(*said)
    return kind("; ".join(f"rank {', '.join(numbers)}: {message}" for message, numbers in said.items()))


def _encoded(message: _Message) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _decoded(payload: torch.Tensor) -> _Message:
    return json.loads(payload.numpy().tobytes())
