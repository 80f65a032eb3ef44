"""Rows end to end: which token sees which, where it stands, and which state predicts which token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.policy.packing import pack
from drmas.types import Row

CPU = torch.device("cpu")
PROPERTY = settings(derandomize=True, deadline=None, max_examples=40)
PIECE = st.tuples(st.integers(0, 2), st.sampled_from([1, 5, 16, 17, 40])).map(lambda cell: [cell[0]] * cell[1])
IDS = st.lists(PIECE, min_size=1, max_size=4).map(lambda pieces: [token for piece in pieces for token in piece] + [1])
LAYOUTS = {
    "one rank": {},
    "multiple": {"multiple": 8},
    "shared": {"share_prefixes": True},
    "shared, multiple": {"share_prefixes": True, "multiple": 5},
    "shared, cp 2": {"share_prefixes": True, "cp_size": 2},
    "shared, cp 2, multiple": {"share_prefixes": True, "cp_size": 2, "multiple": 3},
    "shared, cp 4": {"share_prefixes": True, "cp_size": 4},
    "apart, cp 4, multiple": {"cp_size": 4, "multiple": 4},
    "thd": {"thd": True},
    "thd, multiple": {"thd": True, "multiple": 8},
    "thd, cp 2": {"thd": True, "cp_size": 2},
    "thd, cp 4, multiple": {"thd": True, "cp_size": 4, "multiple": 4},
}


def make(prompt: list[int], response: list[int]) -> Row:
    return Row(
        task="t",
        episode="t#0",
        agent="a",
        policy="main",
        turn=0,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[0.0] * len(response),
        versions=[0] * len(response),
        reward=1.0,
    )


@st.composite
def rows_that_start_alike(draw: st.DrawFn) -> list[Row]:
    """Some equal, some the start of others, some of one token; the prompt may end anywhere."""
    rows = []
    for ids in draw(st.lists(IDS, min_size=1, max_size=8)):
        prompt = draw(st.integers(1, len(ids) - 1))
        rows.append(make(ids[:prompt], ids[prompt:]))
    return rows


def whole(rows: list[Row], **layout):
    """Packs of all context-parallel ranks; ids, positions and who sees whom [query, key] of the whole pack, put together."""
    ranks = layout.get("cp_size", 1)
    packs = [pack(rows, device=CPU, cp_rank=rank, **layout) for rank in range(ranks)]
    width = sum(packed.ids.shape[1] for packed in packs)
    ids, positions = torch.full((2, width), -1)
    sees = torch.zeros(width, width, dtype=torch.bool)
    for packed in packs:
        places = _places(packed)
        ids[places], positions[places] = packed.ids[0], packed.positions[0]
        for (start, end), keys in packed.params.calls:
            seen = torch.cat([torch.arange(*span) for span in keys])
            assert seen[start - end :].tolist() == places[start:end].tolist()  # the last keys are the queries themselves
            for i in range(end - start):
                sees[places[start + i], seen[: len(seen) - (end - start - 1 - i)]] = True
    assert (ids >= 0).all()
    return packs, ids, positions, sees


def _places(packed):
    return packed.params.places if packed.params.places is not None else torch.arange(packed.ids.shape[1])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(rows=rows_that_start_alike())
@PROPERTY
def test_every_token_sees_its_own_row_up_to_itself_and_nothing_else(layout, rows):
    packs, ids, positions, sees = whole(rows, **layout)
    found = set()
    for packed in packs:
        places = _places(packed)
        columns = (packed.source, packed.target, packed.row, packed.place)
        for source, target, row, place in zip(*(column.tolist() for column in columns), strict=True):
            token = place - sum(len(each.response_ids) for each in rows[:row])
            assert target == rows[row].response_ids[token]
            before = (rows[row].prompt_ids + rows[row].response_ids)[: len(rows[row].prompt_ids) + token]
            seen = sees[places[source]]
            assert ids[seen].tolist() == before  # so no padding, and nothing twice
            assert positions[seen].tolist() == list(range(len(before)))
            found.add((row, token))
    assert sum(packed.source.numel() for packed in packs) == len(found) == sum(len(row.response_ids) for row in rows)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(rows=rows_that_start_alike())
@PROPERTY
def test_calls_and_subtree_ends_say_the_same(layout, rows):
    packs, _, _, sees = whole(rows, **layout)
    place = torch.arange(len(sees))
    for packed in packs:
        visible = (place <= place[:, None]) & (place[:, None] < packed.params.subtree_end)
        assert torch.equal(visible, sees)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(rows=rows_that_start_alike())
@PROPERTY
def test_ranks_hold_the_whole_pack_in_equal_parts(layout, rows):
    packs, ids, *_ = whole(rows, **layout)
    given = sum(row.num_tokens - 1 for row in rows)
    for packed in packs:
        assert packed.ids.shape[1] == packs[0].ids.shape[1]
        assert packed.ids.shape[1] % layout.get("multiple", 1) == 0
        assert packed.tokens + packed.saved == given
        assert packed.saved == 0 or layout["share_prefixes"]
        queries = [query for query, _ in packed.params.calls]
        assert [start for start, _ in queries] == [0, *(end for _, end in queries[:-1])]
        assert queries[-1][1] == packed.ids.shape[1]
    if len(packs) > 1:
        gathered = torch.cat([packed.ids[0] for packed in packs])
        assert all(torch.equal(gathered[packed.params.order], ids) for packed in packs)


def test_every_response_token_is_predicted_by_the_state_before_it():
    packed = pack([make([1, 2, 3], [4, 5]), make([6], [7, 8, 9])], device=CPU, thd=True)
    assert packed.ids.tolist() == [[1, 2, 3, 4, 6, 7, 8]]  # the last token of a row predicts nothing that is trained
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed.target.tolist() == [4, 5, 7, 8, 9]
    assert packed.ids[0, packed.source].tolist() == [3, 4, 6, 7, 8]
    assert packed.row.tolist() == [0, 0, 1, 1, 1]
    assert packed.of_rows([0.5, 0.25]).tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]
    assert packed.of_tokens([[1, 2], [3, 4, 5]], torch.int64).tolist() == [1, 2, 3, 4, 5]
    assert packed.params.qkv_format == "thd"
    assert packed.params.cu_seqlens_q.tolist() == packed.params.cu_seqlens_kv.tolist() == [0, 4, 7]
    assert packed.params.cu_seqlens_q.dtype == torch.int32
    assert packed.params.cu_seqlens_q_padded is None


def test_a_shared_prompt_stands_once():
    prompt = list(range(20))
    rows = [make(prompt, [31, 32, 33]), make(prompt, [41, 42]), make([5], [6])]
    packed = pack(rows, device=CPU, share_prefixes=True)
    assert packed.ids.tolist() == [[*prompt, 31, 32, 41, 5]]
    assert packed.positions.tolist() == [[*range(20), 20, 21, 20, 0]]
    assert packed.source.tolist() == [19, 20, 21, 19, 22, 23]  # both responses start after the prompt's last token
    assert packed.target.tolist() == [31, 32, 33, 41, 42, 6]
    assert (packed.tokens, packed.saved) == (24, 20)
    assert packed.params.calls == (
        ((0, 20), ((0, 20),)),
        ((20, 22), ((0, 22),)),  # it stands right behind the prompt: one range
        ((22, 23), ((0, 20), (22, 23))),
        ((23, 24), ((23, 24),)),
    )
    assert packed.params.subtree_end.tolist() == [23] * 20 + [22] * 2 + [23, 24]
    assert packed.params.cu_seqlens_q is None


@pytest.mark.parametrize("layout", [{"thd": True}, {}, {"share_prefixes": True}])
def test_I4_the_tail_predicts_nothing(layout):
    rows = [make([1, 2, 3], [4, 5]), make([6], [7, 8, 9])]
    plain, padded = pack(rows, device=CPU, **layout), pack(rows, device=CPU, multiple=4, **layout)
    assert padded.ids.shape == (1, 8)
    assert padded.tokens == plain.tokens == 7
    for name in ("source", "target", "row", "place"):
        assert torch.equal(getattr(plain, name), getattr(padded, name))
    if "thd" in layout:
        assert padded.params.cu_seqlens_q.tolist() == [0, 4, 7, 8]


def test_context_parallel_ranks_hold_an_early_and_a_late_chunk_of_each_row():
    rows = [make(list(range(10, 17)), [17, 18]), make([20, 21], [22])]
    first, second = (pack(rows, device=CPU, thd=True, cp_size=2, cp_rank=rank) for rank in range(2))
    assert first.ids.tolist() == [[10, 11, 16, 17, 20, 0]]
    assert second.ids.tolist() == [[12, 13, 14, 15, 21, 0]]
    assert first.params.cu_seqlens_q.tolist() == first.params.cu_seqlens_q_padded.tolist() == [0, 8, 12]
    assert first.target.tolist() == [17, 18]
    assert second.target.tolist() == [22]


def test_a_context_parallel_rank_may_predict_nothing():
    first, second = (pack([make([1, 2, 3, 4], [5])], device=CPU, cp_size=2, cp_rank=rank) for rank in range(2))
    assert (first.source.tolist(), second.source.tolist()) == ([1], [])
    assert second.target.shape == second.row.shape == second.place.shape == (0,)


@pytest.mark.parametrize(("lengths", "longest"), [((3, 5), 128), ((128,), 256), ((64, 64), 256), ((130, 2), 256)])
@pytest.mark.parametrize("thd", [True, False])
def test_the_longest_length_grows_in_steps_and_never_equals_the_token_count(lengths, longest, thd):
    """Equal to it, Megatron would count positions through the pack instead of from each row's start."""
    packed = pack([make([1] * n, [2]) for n in lengths], device=CPU, thd=thd)
    assert packed.params.max_seqlen_q == packed.params.max_seqlen_kv == longest
    assert packed.params.max_seqlen_q != packed.ids.shape[1]


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="0 rows"):
        pack([], device=CPU)
    with pytest.raises(ValueError, match="thd=True, share_prefixes=True"):
        pack([make([1], [2])], device=CPU, thd=True, share_prefixes=True)
