"""Norms of whole buffers and of slots, with both implementations, and the table that the kernels run over."""

import math
import random

import pytest
import torch

from drmas_kernels import grad_norm, numerics
from drmas_kernels.grad_norm import SKIP, clip_coefficient, slot_norms, squared_norms
from drmas_kernels.tile_table import ALIGNMENT, TILE, Span, TileTable
from tests.kernels.memory import far_buffer


def by_slot(buffers, spans, num_slots):
    expected = torch.zeros(num_slots, dtype=torch.float64)
    for span in spans:
        expected[span.slot] += buffers[span.buffer][span.start :][: span.length].double().square().sum().cpu()
    return expected


def random_buffers(*sizes, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


def test_squared_norms_per_group_agree_with_float64(check, backend, device):
    sizes = [1, 256, 257, 300_001, 0, 77]
    buffers = [buffer * 10.0 ** (i - 3) for i, buffer in enumerate(random_buffers(*sizes, device=device))]
    groups = [0, 1, 0, 1, 3, 0]
    result = squared_norms(buffers, groups, 4)
    check(result.cpu(), by_slot(buffers, [Span(i, 0, n, groups[i]) for i, n in enumerate(sizes)], 4), numerics.SQUARED_NORM)
    assert torch.equal(squared_norms(buffers, groups, 4), result)
    assert result[2] == result[3] == 0.0


def test_parts_of_one_flat_buffer_count_each_by_itself(check, backend, device):
    """As Megatron hands them over: views of one storage, in any order of address, and here one of them twice."""
    (flat,) = random_buffers(20_000, device=device)
    places = [(9_001, 10_000), (0, 5), (5, 8_000), (5, 8_000), (19_001, 0)]
    parts = [flat[start : start + length] for start, length in places]
    spans = [Span(0, *place, slot=i % 2) for i, place in enumerate(places)]
    check(squared_norms(parts, [0, 1, 0, 1, 0], 2).cpu(), by_slot([flat], spans, 2), numerics.SQUARED_NORM)


def test_parts_of_one_flat_buffer_are_one_launch(triton_backend, device):
    flat, other = random_buffers(20_000, 100, device=device)
    buffers, places = grad_norm._whole_storages([flat[100:200], other, flat[:100], flat[:0]])
    assert [buffer.shape[0] for buffer in buffers] == [20_000, 100]
    assert places == ((0, 100, 100), (1, 0, 100), (0, 0, 100), (0, 0, 0))


def test_a_rank_without_buffers_counts_zero_on_the_device_of_the_others(backend):
    assert squared_norms([], [], 2).tolist() == [0.0, 0.0]
    assert squared_norms([], [], 1, device="meta").device.type == "meta"


@pytest.mark.parametrize("first", [1.0, 1e-4])
def test_many_small_values_are_not_lost(first, check, backend, device):
    """fp32 throughout would drop the tail beside 1: 1e-4 squared, 4 million times. Equal values round all the same way."""
    buffer = torch.full((4_000_000,), 1e-4, device=device)
    buffer[0] = first
    check(squared_norms([buffer], [0], 1), buffer.double().square().sum()[None], numerics.SQUARED_NORM)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e20, 1e30])
@pytest.mark.parametrize("place", [0, 9_999])
def test_what_is_not_finite_shows_and_skips(bad, place, backend, device):
    buffer = torch.ones(10_000, device=device)
    buffer[place] = bad
    buffers = [buffer, torch.ones(4, device=device)]
    table = TileTable.build([Span(0, 0, 10_000, 0), Span(1, 0, 4, 1)], [10_000, 4], 2, device=device)
    squared, finite = slot_norms(buffers, table)
    assert finite.tolist() == squared.isfinite().tolist() == [False, True]
    assert torch.equal(squared_norms(buffers, [0, 1], 2).isfinite(), finite)
    assert clip_coefficient(squared.sqrt(), 4.0).tolist() == [SKIP, 1.0]


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_magnitudes_that_have_an_fp32_square_count(size, check, backend, device):
    (buffer,) = random_buffers(10_000, device=device)
    buffer *= size
    check(squared_norms([buffer], [0], 1), buffer.double().square().sum()[None], numerics.SQUARED_NORM)


def test_smaller_ones_count_nothing(backend, device):
    squared = squared_norms([torch.full((10_000,), 1e-30, device=device)], [0], 1)
    assert squared.tolist() == [0.0]
    assert clip_coefficient(squared.sqrt(), 1.0).tolist() == [1.0]


SPANS = [
    Span(0, 3, 9_000, 2),
    Span(0, 9_003, 1, 0),
    Span(0, 9_016, 8_200, 0, replicated=True),
    Span(1, 0, 33, 2),
    Span(1, 33, 0, 1),
    Span(2, 16, 70_001, 4),
]
LENGTHS = [17_300, 40, 70_020]


@pytest.mark.parametrize("tile", [1024, 16_384, TILE])
def test_slots_agree_with_float64_wherever_their_spans_lie(tile, check, backend, device):
    """What lies in no span is NaN."""
    buffers = random_buffers(*LENGTHS, device=device)
    covered = [torch.zeros(length, dtype=torch.bool) for length in LENGTHS]
    for span in SPANS:
        covered[span.buffer][span.start :][: span.length] = True
    for buffer, mask in zip(buffers, covered, strict=True):
        buffer[~mask.to(device)] = torch.nan
    table = TileTable.build(SPANS, LENGTHS, 6, tile=tile, device=device)
    squared, finite = slot_norms(buffers, table)
    check(squared.cpu(), by_slot(buffers, SPANS, 6), numerics.SQUARED_NORM)
    assert finite.all()
    assert squared[1] == squared[3] == squared[5] == 0.0
    assert torch.equal(slot_norms(buffers, table).squared, squared)


def test_tiles_are_added_in_float64(backend, device):
    """Every tile holds one element whose square fp32 holds; their total needs 31 bits."""
    buffer = torch.zeros(16 * 1024, device=device)
    buffer[::1024] = 1.0
    buffer[0] = 2.0**15
    spans = [Span(0, 0, buffer.numel(), 0)]
    squared, _ = slot_norms([buffer], TileTable.build(spans, [buffer.numel()], 1, tile=1024, device=device))
    assert squared.tolist() == [2.0**30 + 15]


def test_the_order_of_the_spans_changes_no_bit(backend, device):
    buffers = random_buffers(*LENGTHS, device=device)
    expected = slot_norms(buffers, TileTable.build(SPANS, LENGTHS, 5, tile=4096, device=device)).squared
    for seed in range(3):
        shuffled = random.Random(seed).sample(SPANS, len(SPANS))
        table = TileTable.build(shuffled, LENGTHS, 5, tile=4096, device=device)
        assert torch.equal(slot_norms(buffers, table).squared, expected)


def test_ranks_add_up_to_the_norm_of_the_unsharded_gradient(check, backend, device):
    """A matrix by columns over two tensor-parallel ranks; a vector that both hold counts once."""
    matrix, vector = random_buffers(2 * 9_001, 77, device=device)
    spans = [Span(0, 0, 9_001, 0), Span(0, 9_001, 77, 1, replicated=True)]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for rank, shard in enumerate(matrix.chunk(2)):
        table = TileTable.build(spans, [9_078], 2, tp_rank=rank, device=device)
        total += slot_norms([torch.cat([shard, vector])], table).squared
    expected = torch.stack([x.double().square().sum() for x in (matrix, vector)])
    check(total, expected, numerics.SQUARED_NORM)


@pytest.mark.parametrize("shift", [1, 3])
def test_a_buffer_anywhere_in_memory_is_read_right(shift, check, backend, device):
    flat = random_buffers(20_003, device=device)[0][shift:]
    table = TileTable.build([Span(0, 5, 19_000, 0)], [flat.shape[0]], 1, device=device)
    expected = flat[5:19_005].double().square().sum()[None]
    check(slot_norms([flat], table).squared, expected, numerics.SQUARED_NORM)


def test_offsets_beyond_32_bits_reach_their_elements(check, backend, device):
    spans = [Span(0, place, 9_000, slot) for slot, place in enumerate((2**31 - 100, 2**32 - 100, 2**32 + 2**31 + 7))]
    buffer = far_buffer(2**32 + 2**31 + 10_000, device)
    for span, values in zip(spans, random_buffers(9_000, 9_000, 9_000, device=device), strict=True):
        buffer[span.start :][:9_000] = values
    table = TileTable.build(spans, [buffer.shape[0]], 3, tile=16_384, device=device)
    check(slot_norms([buffer], table).squared.cpu(), by_slot([buffer], spans, 3), numerics.SQUARED_NORM)


def test_the_table_of_a_buffer_of_8_billion_elements():
    total, cut = 8_200_000_000, 4_294_967_301
    table = TileTable.build([Span(0, cut, total - cut, 1), Span(0, 0, cut, 0)], [total], 2)
    offset, length = table.offset, table.length.long()
    assert (table.offset.dtype, table.length.dtype) == (torch.int64, torch.int32)
    assert offset[0] == 0
    assert torch.equal(offset[1:], (offset + length)[:-1])
    assert int(offset[-1] + length[-1]) == total
    assert (offset[length >= ALIGNMENT] % ALIGNMENT == 0).all()
    assert table.slot.tolist() == [0 if place < cut else 1 for place in offset.tolist()]
    assert table.slot_tiles.tolist() == [0, cut // TILE + 1, len(offset)]
    assert torch.equal(table.row.long(), torch.arange(len(offset)))


def test_tiles_of_a_slot_are_neighbours_among_the_counted_ones():
    spans = [Span(0, 0, 40, 1), Span(0, 40, 8, 0), Span(1, 2, 20, 1), Span(1, 30, 4, 0, replicated=True)]
    table = TileTable.build(spans, [48, 40], 3, tile=16, tp_rank=1)
    assert table.buffer_tiles == (0, 4, 8)
    assert table.offset.tolist() == [0, 16, 32, 40, 2, 16, 30, 32]
    assert table.length.tolist() == [16, 16, 8, 8, 14, 6, 2, 2]
    assert table.slot.tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert table.row.tolist() == [1, 2, 3, 0, 4, 5, -1, -1]
    assert table.slot_tiles.tolist() == [0, 1, 6, 6]


def test_clip_coefficient_is_that_of_torch():
    parameter = torch.zeros(3, requires_grad=True)
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    norm = squared_norms([parameter.grad], [0], 1).sqrt()
    scaled = parameter.grad * clip_coefficient(norm, 2.0)
    torch.nn.utils.clip_grad_norm_([parameter], 2.0)
    torch.testing.assert_close(parameter.grad, scaled.float())
    assert clip_coefficient(norm, 100.0).item() == 1.0
    assert clip_coefficient(norm, math.inf).item() == 1.0
    assert clip_coefficient(torch.tensor(0.0), 1.0).item() == 1.0
    per_slot = clip_coefficient(torch.tensor([0.5, 8.0, torch.nan]), 4.0)
    torch.testing.assert_close(per_slot, torch.tensor([1.0, 0.5, SKIP]))


def refuse(*_):
    raise AssertionError("a number was read on the host")


def test_the_host_waits_for_nothing(backend, device, monkeypatch):
    """From the norms of slots to their coefficients; the spans, which torch reads, lie on the CPU."""
    buffers = random_buffers(*LENGTHS, device=device)
    table = TileTable.build(SPANS, LENGTHS, 5, device=device)
    for name in ("item", "__bool__", "__float__", "__int__", "cpu", *(("tolist",) if backend == "triton" else ())):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    squared, finite = slot_norms(buffers, table)
    coefficient = clip_coefficient(squared.sqrt(), 1.0)
    monkeypatch.undo()
    assert finite.all()
    assert coefficient.tolist() == pytest.approx((1.0 / squared.sqrt()).clamp(max=1.0).tolist(), rel=1e-5)


def test_norms_and_coefficients_have_shapes_before_values():
    """On the meta device whatever asks for a value fails."""
    table = TileTable.build(SPANS, LENGTHS, 5, device="meta")
    squared, finite = slot_norms([torch.empty(length, device="meta") for length in LENGTHS], table)
    coefficient = clip_coefficient(squared.sqrt(), 1.0)
    assert [(x.device.type, x.shape, x.dtype) for x in (squared, finite, coefficient)] == [
        ("meta", (5,), torch.float64),
        ("meta", (5,), torch.bool),
        ("meta", (5,), torch.float64),
    ]


def test_the_operation_is_registered_as_torch_wants_it(backend, device):
    buffers = random_buffers(100, 50, device=device)
    table = TileTable.build([Span(0, 0, 100, 1), Span(1, 5, 40, 0)], [100, 50], 3, device=device)
    tiles = (table.offset, table.length, table.row, table.slot_tiles)
    torch.library.opcheck(grad_norm._op, (buffers, table.spans, list(table.buffer_tiles), *tiles))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"buffer is torch.float32 \[2, 2\]; expected a contiguous float32 vector"):
        squared_norms([torch.ones(2, 2)], [0], 1)
    with pytest.raises(ValueError, match="group is 1; expected 0 to 0"):
        squared_norms([torch.ones(2)], [1], 1)
    with pytest.raises(ValueError, match="2 buffers but 1 groups"):
        squared_norms([torch.ones(2)] * 2, [0], 1)
    with pytest.raises(ValueError, match="buffer is on meta; expected the device of the first one, cpu"):
        squared_norms([torch.ones(2), torch.ones(2, device="meta")], [0, 0], 1)
    with pytest.raises(ValueError, match="max_norm is 0"):
        clip_coefficient(torch.ones(1), 0)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([torch.ones(9)], r"buffers has 1 buffers; the table is for 2"),
        ([torch.ones(9), torch.ones(4)], r"buffers\[1\] is torch.float32 \[4\] .*expected a contiguous torch.float32 \[5\]"),
        ([torch.ones(9).double(), torch.ones(5)], r"buffers\[0\] is torch.float64 \[9\]"),
        ([torch.ones(18)[::2], torch.ones(5)], r"buffers\[0\] is .* of stride \[2\]; expected a contiguous"),
        ([torch.ones(9), torch.ones(5, device="meta")], r"buffers\[1\] is on meta; expected the device of the table, cpu"),
    ],
)
def test_buffers_that_are_not_the_tables_are_named(buffers, message):
    table = TileTable.build([Span(0, 0, 9, 0)], [9, 5], 1)
    with pytest.raises(ValueError, match=message):
        slot_norms(buffers, table)


@pytest.mark.parametrize(
    ("spans", "settings", "message"),
    [
        ([Span(1, 0, 1, 0)], {}, "buffer is 1; expected 0 to 0"),
        ([Span(0, 5, 6, 0)], {}, "Span.*start=5, length=6.* leaves its buffer; expected .* <= 10"),
        ([Span(0, -1, 6, 0)], {}, "leaves its buffer"),
        ([Span(0, 1, -1, 0)], {}, "leaves its buffer"),
        ([Span(0, 0, 6, 2)], {}, "slot is 2; expected 0 to 1"),
        ([Span(0, 4, 6, 0), Span(0, 0, 5, 1)], {}, "Span.*start=4.* overlaps Span.*start=0"),
        ([], {"tile": 100}, "tile is 100; expected a positive multiple of 16"),
        ([], {"tp_rank": -1}, "tp_rank is -1"),
    ],
)
def test_bad_spans_are_named(spans, settings, message):
    with pytest.raises(ValueError, match=message):
        TileTable.build(spans, [10], 2, **settings)
