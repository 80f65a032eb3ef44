"""The checksum: what it must see, that pieces may come in any order, and that it is the same on whatever it is taken."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drmas.weights.checksum import PIECE_BYTES, ROW_BYTES, Checksum, checksum

SIZES = [0, 1, 7, 8, 4096, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 3, PIECE_BYTES, PIECE_BYTES + ROW_BYTES, 2 * PIECE_BYTES + 999]


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


BUFFER = noise(2 * PIECE_BYTES + 999)
RIGHT = checksum(BUFFER)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_hash_of_the_sums_of_rows_and_columns(size):
    buffer = noise(size)
    whole = size // ROW_BYTES * ROW_BYTES
    words = buffer[:whole].view(torch.int64).view(-1, 1024)
    columns, rows = (words.sum(dim).numpy().tobytes() for dim in (0, 1))
    expected = hashlib.blake2b(size.to_bytes(8, "big") + columns + rows + buffer[whole:].numpy().tobytes(), digest_size=8)
    assert checksum(buffer) == int.from_bytes(expected.digest(), "big") >> 2


@pytest.mark.parametrize("size", SIZES)
def test_pieces_may_be_added_in_any_order(size):
    buffer, total = noise(size), None
    for starts in (range(0, size, PIECE_BYTES), reversed(range(0, size, PIECE_BYTES))):
        total = Checksum(buffer)
        for start in starts:
            total.add(start)
        assert total.value() == checksum(buffer)


@given(place=st.integers(0, len(BUFFER) - 1), bit=st.integers(0, 7))
def test_one_bit_is_seen(place, bit):
    other = BUFFER.clone()
    other[place] ^= 1 << bit
    assert checksum(other) != RIGHT


@given(data=st.data(), size=st.sampled_from([1, 2, 4, 8, 16, 4096, ROW_BYTES, 64 * 1024]))
def test_two_parts_that_change_places_are_seen(data, size):
    places = len(BUFFER) // size
    first, second = data.draw(st.tuples(st.integers(0, places - 1), st.integers(0, places - 1)))
    one, two = slice(first * size, (first + 1) * size), slice(second * size, (second + 1) * size)
    other = BUFFER.clone()
    other[one], other[two] = BUFFER[two], BUFFER[one]
    assert (checksum(other) == RIGHT) == torch.equal(other, BUFFER)


@given(column=st.integers(0, 1023), rows=st.tuples(st.integers(0, 30), st.integers(0, 30)), sign=st.booleans())
def test_words_of_one_column_that_change_places_are_seen_also_where_only_their_top_bits_differ(column, rows, sign):
    words = torch.zeros(31, 1024, dtype=torch.int64)
    words[rows[0], column] = -(2**63) if sign else 1
    other = torch.zeros(31, 1024, dtype=torch.int64)
    other[rows[1], column] = words[rows[0], column]
    same = checksum(words.view(-1).view(torch.uint8)) == checksum(other.view(-1).view(torch.uint8))
    assert same == (rows[0] == rows[1])


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


def test_the_way_for_other_devices_gives_the_same_number():
    class Elsewhere(torch.Tensor):
        """On the CPU, but says that it isn't."""

        device = torch.device("cuda")

    for size in SIZES:
        assert checksum(noise(size).as_subclass(Elsewhere)) == checksum(noise(size))
