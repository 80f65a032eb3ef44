import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.core import prefixes
from drmas.core.prefixes import LEAST_SHARED, PrefixOrder, Segment
from tests.core.plain_plan import Order

PROPERTY = settings(derandomize=True, deadline=None, max_examples=200)
PIECES = st.lists(st.tuples(st.sampled_from([0, 1, 257]), st.sampled_from([1, 5, 15, 16, 17, 40])), min_size=1, max_size=5)
ROWS = st.lists(PIECES.map(lambda pieces: [token for token, times in pieces for _ in range(times)]), max_size=14)


def in_common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def tokens_of(tree, rows, leaf):
    """The ids on the path from the root to a segment."""
    segment = tree.segments[leaf]
    before = tokens_of(tree, rows, segment.parent) if segment.parent >= 0 else []
    assert segment.position == len(before)
    return before + rows[segment.row][segment.position : segment.position + segment.length]


@given(ROWS)
@PROPERTY
def test_every_row_is_a_path_of_the_tree(rows):
    order = PrefixOrder.of(rows)
    tree = order.tree()
    assert [tokens_of(tree, rows, leaf) for leaf in tree.leaves] == rows
    assert sum(segment.length for segment in tree.segments) == order.computed
    assert all(segment.length > 0 for segment in tree.segments)


@given(ROWS)
@PROPERTY
def test_the_tree_is_in_preorder(rows):
    path = []
    for number, segment in enumerate(PrefixOrder.of(rows).tree().segments):
        while path and path[-1] != segment.parent:
            path.pop()
        assert bool(path) == (segment.parent >= 0)  # a parent is on the path to the segment before
        path.append(number)


@given(ROWS)
@PROPERTY
def test_what_rows_have_in_common_is_known_for_any_two(rows):
    order = PrefixOrder.of(rows)
    for i in range(len(rows)):
        for j in range(i + 1, len(rows)):
            assert order.common[i + 1 : j + 1].min() == in_common(rows[order.rows[i]], rows[order.rows[j]])


@given(ROWS, st.data())
@PROPERTY
def test_some_of_the_rows_are_ordered_as_if_they_were_alone(rows, data):
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(rows)))))) if rows else []
    taken = PrefixOrder.of(rows).take(chosen)
    alone = PrefixOrder.of([rows[row] for row in taken.rows])
    assert np.array_equal(taken.lengths, alone.lengths)
    assert np.array_equal(taken.common, alone.common)


@given(ROWS, st.data())
@PROPERTY
def test_blocks_share_nothing_with_each_other(rows, data):
    order = PrefixOrder.of(rows)
    places = st.sets(st.sampled_from(range(len(rows))), min_size=1).map(sorted) if rows else st.just([])
    blocks = data.draw(st.lists(places, min_size=1, max_size=4)) if rows else [[]]
    starts = np.cumsum([0, *map(len, blocks[:-1])])
    taken, alone = order.take([place for block in blocks for place in block], starts), [order.take(block) for block in blocks]
    for name in ("rows", "lengths", "common", "shared"):
        assert np.array_equal(getattr(taken, name), np.concatenate([getattr(each, name) for each in alone]))


@pytest.mark.parametrize("chunk", [1, 3, 16, 128])
@given(ROWS, st.data())
@PROPERTY
def test_rows_are_read_as_far_as_it_takes(chunk, rows, data):
    """As sorted and compared by all of their ids, wherever prompts end and however many are read at first."""
    ends = [data.draw(st.integers(0, len(row))) for row in rows]
    prompts = [row[:end] for row, end in zip(rows, ends, strict=True)]
    responses = [[*row[end:], 7] for row, end in zip(rows, ends, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_CHUNK", chunk)
        found, expected = PrefixOrder.of_turns(prompts, responses), Order.of(rows)
    for name in ("rows", "lengths", "common", "shared"):
        assert getattr(found, name).tolist() == getattr(expected, name)


def test_ids_of_four_bytes_are_ordered_by_their_bytes():
    rows = [[2**32 - 1, 1], [256, 1], [1, 2], [256], []]
    assert PrefixOrder.of(rows).rows.tolist() == [4, 3, 1, 2, 0]  # 256 has its lowest byte first: 0


@given(ROWS)
@PROPERTY
def test_nothing_longer_is_left_unshared_and_nothing_shorter_split_off(rows):
    """A segment with children is at least LEAST_SHARED long; two rows compute fewer tokens twice that they have in common."""
    tree = PrefixOrder.of(rows).tree()
    for number, segment in enumerate(tree.segments):
        if any(other.parent == number for other in tree.segments):
            assert segment.length >= LEAST_SHARED

    def path(row):
        leaf = tree.leaves[row]
        while leaf >= 0:
            yield leaf
            leaf = tree.segments[leaf].parent

    for i, one in enumerate(rows):
        for j, other in enumerate(rows[:i]):
            both = set(path(i)) & set(path(j))
            shared = sum(tree.segments[number].length for number in both)
            common = in_common(one, other)
            assert shared <= common < shared + LEAST_SHARED
            assert one != other or shared == len(one)


def test_a_tree_by_hand():
    prompt, more = list(range(100, 120)), list(range(200, 216))
    rows = [
        [*prompt, 1, 2, 3],
        [*prompt, 1, 2, 4],  # two tokens more in common with the row before: too few
        [*prompt, *more],
        [*prompt, *more, 5],  # goes on where the row before ends
        [*prompt, *more],
        [7],
        [7],
        [7, 8],  # one token in common: too few
    ]
    tree = PrefixOrder.of(rows).tree()
    assert tree.segments == [
        Segment(row=5, position=0, length=1, parent=-1),
        Segment(row=7, position=0, length=2, parent=-1),
        Segment(row=0, position=0, length=20, parent=-1),
        Segment(row=0, position=20, length=3, parent=2),
        Segment(row=1, position=20, length=3, parent=2),
        Segment(row=2, position=20, length=16, parent=2),
        Segment(row=3, position=36, length=1, parent=5),
    ]
    assert tree.leaves == [3, 4, 5, 6, 5, 0, 0, 1]


def test_rows_apart_share_nothing():
    order = PrefixOrder.apart([3, 3, 5])
    assert order.tree().segments == [Segment(0, 0, 3, -1), Segment(1, 0, 3, -1), Segment(2, 0, 5, -1)]
    assert order.tree().leaves == [0, 1, 2]
