"""The checksum: what it must see, and that pieces may come in any order."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from drmas.weights.checksum import PIECE_BYTES, ROW_BYTES, Checksum, checksum

SIZES = [0, 1, 7, 8, 4096, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 3, PIECE_BYTES, PIECE_BYTES + ROW_BYTES, 2 * PIECE_BYTES + 999]


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


BUFFER = noise(2 * PIECE_BYTES + 999)
RIGHT = checksum(BUFFER)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_hash_of_the_sums_of_columns_and_pieces(size):
    buffer = noise(size)
    whole = size // ROW_BYTES * ROW_BYTES
    words = buffer[:whole].view(torch.int64)
    columns = words.view(-1, 1021).sum(0).numpy().tobytes()
    pieces = b"".join(piece.sum().numpy().tobytes() for piece in words.split(64 * 1021) if len(piece))
    expected = hashlib.blake2b(size.to_bytes(8, "big") + columns + pieces + buffer[whole:].numpy().tobytes(), digest_size=8)
    assert checksum(buffer) == int.from_bytes(expected.digest(), "big") >> 2


@pytest.mark.parametrize("size", SIZES)
def test_pieces_may_be_added_in_any_order(size):
    buffer, total = noise(size), None
    pieces = range(-(-size // PIECE_BYTES))
    for numbers in (pieces, reversed(pieces)):
        total = Checksum(buffer)
        for number in numbers:
            total.add(number)
        assert total.value() == checksum(buffer)


@given(place=st.integers(0, len(BUFFER) - 1), bit=st.integers(0, 7))
def test_one_bit_is_seen(place, bit):
    other = BUFFER.clone()
    other[place] ^= 1 << bit
    assert checksum(other) != RIGHT


@given(data=st.data(), size=st.sampled_from([512, 576 * 4, 4096, 64 * 1024]))
def test_two_parts_that_change_places_are_seen(data, size):
    places = len(BUFFER) // size
    first, second = data.draw(st.tuples(st.integers(0, places - 1), st.integers(0, places - 1)))
    one, two = slice(first * size, (first + 1) * size), slice(second * size, (second + 1) * size)
    other = BUFFER.clone()
    other[one], other[two] = BUFFER[two], BUFFER[one]
    assert (checksum(other) == RIGHT) == torch.equal(other, BUFFER)


@given(places=st.tuples(st.integers(0, 2 * 64 * 1021 - 1), st.integers(0, 2 * 64 * 1021 - 1)), top=st.booleans())
@example(places=(5, 5 + 1021), top=False)
@example(places=(5, 5 + 64 * 1021), top=True)
def test_words_that_change_places_are_seen_but_in_one_column_of_one_piece(places, top):
    one, other = (torch.zeros(2 * 64 * 1021, dtype=torch.int64) for _ in range(2))
    one[places[0]] = other[places[1]] = -(2**63) if top else 1
    same = checksum(one.view(torch.uint8)) == checksum(other.view(torch.uint8))
    column, piece = (places[0] % 1021 == places[1] % 1021), (places[0] // (64 * 1021) == places[1] // (64 * 1021))
    assert same == (column and piece)


@given(kept=st.integers(0, len(BUFFER) - 1))
def test_a_cut_tail_is_seen_also_where_it_is_zeros(kept):
    assert checksum(BUFFER[:kept].clone()) != RIGHT
    zeros = torch.zeros(len(BUFFER), dtype=torch.uint8)
    assert checksum(zeros[:kept]) != checksum(zeros)


def test_stale_zeros_in_the_middle_are_seen():
    other = BUFFER.clone()
    other[PIECE_BYTES : PIECE_BYTES + 4096] = 0
    assert checksum(other) != RIGHT
    assert 0 <= RIGHT < 2**62
