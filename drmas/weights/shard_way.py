"""How the messages of a round cross from end to end: by gloo from host to host, by NCCL from GPU to GPU.

The NCCL way is written against torch's source and has not been run: it needs GPUs, and one for every end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from drmas.weights.broadcast import NcclWay, Way
from drmas.weights.meeting import Meeting, Parcel


class ShardWay(Way):
    """Over the meeting's own group."""

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> Callable[[], None]:
        """Begin to send and receive; the result waits until all is there. RuntimeError: an end is gone, or silent too long."""
        return self._meeting.exchange(outgoing, incoming)


class NcclShardWay(NcclWay):
    """Over a communicator of the same ends. A round is one group call, which lets messages pass each other in any order."""

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> Callable[[], None]:
        if not outgoing and not incoming:
            return lambda: None
        content = (outgoing or incoming)[0].content
        with self._meeting.reported(content):
            self._group._start_coalescing()
            for parcel in outgoing:
                self._group.send([parcel.buffer], parcel.peer, 0)
            for parcel in incoming:
                self._group.recv([parcel.buffer], parcel.peer, 0)
            work = self._group._end_coalescing()

        def wait() -> None:
            with self._meeting.reported(content):
                work.wait(timedelta(seconds=self._meeting.timeout_seconds))

        return wait


def shard_way(meeting: Meeting, device: torch.device) -> ShardWay | NcclShardWay:
    """`device`: where messages are filled and read."""
    return ShardWay(meeting) if device.type == "cpu" else NcclShardWay(meeting, device)
