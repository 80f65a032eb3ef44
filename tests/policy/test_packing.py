"""Rows end to end: which token is read where, and which state predicts which token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drmas.policy.packing import pack

CPU = torch.device("cpu")


@pytest.fixture
def rows(kit):
    first, second = kit.make_rows(2)
    return [
        replace(first, prompt_ids=[1, 2, 3], response_ids=[4, 5]),
        replace(second, prompt_ids=[6], response_ids=[7, 8, 9]),
    ]


def test_every_response_token_is_predicted_by_the_state_before_it(rows):
    packed = pack(rows, multiple=1, device=CPU)
    assert packed.ids.tolist() == [[1, 2, 3, 4, 6, 7, 8]]  # the last token of a row predicts nothing that is trained
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed.target.tolist() == [4, 5, 7, 8, 9]
    assert packed.ids[0, packed.source].tolist() == [3, 4, 6, 7, 8]
    assert packed.row.tolist() == [0, 0, 1, 1, 1]
    assert packed.params.cu_seqlens_q.tolist() == [0, 4, 7]
    assert packed.params.cu_seqlens_q.dtype == torch.int32


def test_I4_the_tail_predicts_nothing(rows):
    plain, padded = pack(rows, multiple=1, device=CPU), pack(rows, multiple=4, device=CPU)
    assert padded.ids.shape == (1, 8)
    assert padded.params.cu_seqlens_q.tolist() == [0, 4, 7, 8]
    for name in ("source", "target", "row"):
        assert torch.equal(getattr(plain, name), getattr(padded, name))


@pytest.mark.parametrize(("lengths", "longest"), [((3, 5), 128), ((128,), 256), ((64, 64), 256), ((130, 2), 256)])
def test_the_longest_length_grows_in_steps_and_never_equals_the_token_count(kit, lengths, longest):
    """Equal to it, Megatron would count positions through the pack instead of from each row's start."""
    (row,) = kit.make_rows(1)
    packed = pack([replace(row, prompt_ids=[1] * n, response_ids=[2]) for n in lengths], multiple=1, device=CPU)
    assert packed.params.max_seqlen_q == longest
    assert packed.params.max_seqlen_q != packed.ids.shape[1]
