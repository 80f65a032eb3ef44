"""A part of a tensor in the place of the whole, as loaders take it."""

from __future__ import annotations

import pytest
import torch

from drmas.core.resharding import Region
from drmas.weights.part import Part, part_of

WHOLE = torch.arange(48.0).view(8, 6)


def load_rows(parameter: torch.Tensor, weight: torch.Tensor, start: int) -> None:
    """As vLLM's loaders do."""
    assert weight.shape[1:] == parameter.shape[1:]
    parameter.data.copy_(weight.narrow(0, start, parameter.shape[0]))


def test_a_part_looks_whole_and_gives_the_cut_that_it_is():
    part = part_of("w", (8, 6), Region(2, 5, 0, 6), WHOLE[2:5])
    assert isinstance(part, Part)
    assert (tuple(part.shape), part.dtype, part.dim(), part.size(0)) == ((8, 6), torch.float32, 2, 8)
    parameter = torch.zeros(3, 6)
    load_rows(parameter, part, 2)
    assert torch.equal(parameter, WHOLE[2:5])
    assert torch.equal(torch.narrow(part, 0, start=2, length=3), WHOLE[2:5])
    columns = part_of("w", (8, 6), Region(0, 8, 4, 6), WHOLE[:, 4:])
    assert torch.equal(columns.narrow(1, 4, 2), WHOLE[:, 4:])
    assert torch.equal(columns.narrow(-1, 4, 2), WHOLE[:, 4:])


def test_vectors_and_empty_parts():
    bias = part_of("b", (8,), Region(4, 8, 0, 1), torch.ones(4))
    assert torch.equal(bias.narrow(0, 4, 4), torch.ones(4))
    nothing = part_of("embed", (8, 6), Region(8, 8, 0, 6), torch.empty(0, 6))
    assert nothing.narrow(0, 8, 0).shape == (0, 6)


def test_what_is_whole_is_itself():
    assert part_of("w", (8, 6), Region(0, 8, 0, 6), WHOLE) is WHOLE


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 2, 2), (0, 0, 3), (1, 2, 3), (0, 0, 8)])
def test_another_cut_is_refused_by_name(dim, start, length):
    part = part_of("model.w", (8, 6), Region(2, 5, 0, 6), WHOLE[2:5])
    with pytest.raises(ValueError, match=r"model\.w: the engine takes rows .*, but is sent rows 2 to 5, columns 0 to 6"):
        part.narrow(dim, start, length)


@pytest.mark.parametrize("use", [lambda part: torch.zeros(8, 6).copy_(part), lambda part: torch.zeros(3, 6).copy_(part[2:5])])
def test_any_other_use_fails_since_there_is_no_data(use):
    with pytest.raises(NotImplementedError, match="no data"):
        use(part_of("w", (8, 6), Region(2, 5, 0, 6), WHOLE[2:5]))
