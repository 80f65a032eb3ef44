"""The checksum of a bucket: 64 bits over sums of its words, the same on a CPU and on a GPU.

    the bytes as 64-bit words, 1021 in a row, 64 rows in a piece ─▶ the sums of every piece's columns (they wrap) ─▶ of these,
    the sums over all pieces and over all columns ─▶ BLAKE2b of both, of what is left behind the last row, and of the length

A sum is as fast as memory, several times faster than a CRC in Python. A change of one word changes the sums of its piece and of
its column. Words that change places change the sums of their pieces, or of their columns, but for those of one column in one
piece: rows are as long as a prime, so that pages, and rows of matrices of 512 bytes and more, that change places aren't among
them. It guards against faults and not against an adversary. Used by the senders while the bytes are still in the cache, and by
the receivers.
"""

from __future__ import annotations

import hashlib

import torch

COLUMNS = 1021
ROW_BYTES = 8 * COLUMNS
ROWS = 64
PIECE_BYTES = ROWS * ROW_BYTES
"""Half a megabyte: with where it comes from, it stays in a core's second-level cache from one look at it to the next."""


class Checksum:
    """Of `buffer`: [n] uint8, starting at a multiple of 8 bytes of its storage. Its pieces may be added by threads."""

    def __init__(self, buffer: torch.Tensor) -> None:
        whole = buffer.numel() // ROW_BYTES * ROW_BYTES
        self._rest, self._length = buffer[whole:], buffer.numel()
        self._words = buffer[:whole].view(torch.int64).view(-1, COLUMNS)
        self._sums = self._words.new_empty(-(-len(self._words) // ROWS), COLUMNS)

    def add(self, piece: int) -> None:
        """The piece of this number stands now. Each that has a whole row has to be added once; others don't matter."""
        if piece < len(self._sums):
            torch.sum(self._words[piece * ROWS : (piece + 1) * ROWS], 0, out=self._sums[piece])

    def add_all(self) -> None:
        """What `add` does, for all of them at once."""
        whole = len(self._words) // ROWS
        torch.sum(self._words[: whole * ROWS].view(whole, ROWS, COLUMNS), 1, out=self._sums[:whole])
        self.add(whole)

    def value(self) -> int:
        """0 to 2^62 - 1, when all pieces have been added."""
        total = hashlib.blake2b(self._length.to_bytes(8, "big"), digest_size=8)
        sums = self._sums.cpu().numpy()  # so few that threads of torch would only cost time
        for part in (sums.sum(0), sums.sum(1), self._rest.cpu().numpy()):
            total.update(part)
        return int.from_bytes(total.digest(), "big") >> 2


def checksum(buffer: torch.Tensor) -> int:
    """The same number, of a buffer on any device that is filled already."""
    total = Checksum(buffer)
    total.add_all()
    return total.value()
