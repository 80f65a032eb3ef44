"""Rows laid end to end: one microbatch, in which a start that several rows share stands once.

A row's last response token predicts nothing that is trained, so the model reads the row without it. Nothing here knows weights
or losses. Called by `drmas.policy.passes`.

The whole pack is a list of segments of the rows' prefix tree in preorder (without sharing, one segment per row). A token sees
its own segment up to itself, and the segments above. Padding makes lengths divisible: it stands behind the tokens of a segment
or in a segment of its own at the end, predicts nothing, and no token sees it. Under context parallelism every segment is cut
into 2 * cp chunks, of which rank r holds chunks r and 2 * cp - 1 - r, so that all ranks have about as many pairs to compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from drmas.core.prefixes import PrefixOrder, PrefixTree, Segment
from drmas.policy.host_platform import upload
from drmas.types import Row

_LENGTH_STEP = 128

Range = tuple[int, int]
"""[start, end)"""


class AttentionCall(NamedTuple):
    """Tokens of this rank that are consecutive in the whole pack, and all that they see.

    `query` counts among this rank's tokens, `keys` in the whole pack: ranges in order, of which the last ends with the query's
    own tokens. Query i of n sees all keys but the last n - 1 - i (causal, aligned at the lower right).
    """

    query: Range
    keys: tuple[Range, ...]


@dataclass(eq=False)
class Packing(PackedSeqParams):
    """Who sees whom; Megatron hands it through to the core attention. W tokens in the whole pack, T of them on this rank.

    `calls`: this rank's tokens, each in one call, in order. `subtree_end` [W] int64 says the same: token k is visible to token
    q (places in the whole pack) iff k <= q < subtree_end[k]. Under context parallelism, else None: `order` [W] int64, where
    each token of the whole pack stands in the tokens of all ranks, one rank after the other; `places` [T] int64, where each of
    this rank's tokens stands in the whole pack.

    `prepared` is what the core attention of the first layer made of these, for the layers after it.

    Megatron's own fields: `max_seqlen_q` and `max_seqlen_kv`, at least the longest row; with `qkv_format` "thd" also the rows'
    boundaries in the whole pack, int32, with padding as the end of its row, which causal attention hides from the row's tokens.
    """

    calls: tuple[AttentionCall, ...] = ()
    subtree_end: torch.Tensor | None = None
    order: torch.Tensor | None = None
    places: torch.Tensor | None = None
    prepared: Any = None


@dataclass(frozen=True, slots=True)
class Packed:
    """One microbatch on `device`, as this context-parallel rank holds it. T tokens read, R response tokens predicted here.

    `ids`, `positions` [1, T] int64. All [R] int64: `source`, the place in [0, T) whose hidden state predicts each response
    token (rows that are alike so far have the same); `target`, that token; `row`, its row's number within the microbatch;
    `place`, its number among the response tokens of all rows. R may be 0 under context parallelism; the ranks together hold
    every response token once. `tokens` counts the tokens of the whole pack without padding, `saved` those that sharing left out
    of it.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    params: Packing
    source: torch.Tensor
    target: torch.Tensor
    row: torch.Tensor
    place: torch.Tensor
    tokens: int
    saved: int

    def of_rows(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[R]: of each response token, the value of its row."""
        return upload(torch.tensor(values, dtype=dtype), self.row.device)[self.row]

    def of_tokens(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[R]: of each response token its own value, where `values` has one per response token of every row."""
        flat = torch.tensor([value for row in values for value in row], dtype=dtype)
        return upload(flat, self.place.device)[self.place]


def pack(
    rows: Sequence[Row],
    *,
    device: torch.device,
    multiple: int = 1,
    share_prefixes: bool = False,
    thd: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Packed:
    """Pack `rows`, at least one, each with a prompt and a response; T is divisible by `multiple` (the sequence-parallel size).

    ValueError: no rows, or both `thd` and `share_prefixes` (rows with boundaries can't share).
    """
    if not rows or (thd and share_prefixes):
        raise ValueError(
            f"{len(rows)} rows, thd={thd}, share_prefixes={share_prefixes}; expected a row and not both of the others"
        )
    inputs = [[*row.prompt_ids, *row.response_ids[:-1]] for row in rows]
    given = sum(map(len, inputs))
    tree = (PrefixOrder.of(inputs) if share_prefixes else PrefixOrder.apart([len(ids) for ids in inputs])).tree()
    tokens = sum(segment.length for segment in tree.segments)
    chunks = 2 * cp_size if cp_size > 1 else 1
    spans = _spans(tree.segments, chunks, math.lcm(chunks, multiple * cp_size))
    shares = [_places(spans, chunks, rank) for rank in range(cp_size)]
    places = shares[cp_rank]

    ids, positions = _contents(tree.segments, spans, inputs)
    source, target, row = _predictions(rows, tree, spans)
    local = np.full(len(ids), -1)
    local[places] = np.arange(len(places))
    here = np.flatnonzero(local[source] >= 0)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(values), device)

    longest = max(max(map(len, inputs)), max(end - start for start, end in spans))
    params = Packing(
        **_megatron_fields(spans, longest, device, thd=thd, cp_size=cp_size),
        calls=_calls(tree.segments, spans, chunks, cp_rank),
        subtree_end=tensor(_subtree_end(tree.segments, spans)),
        order=tensor(np.argsort(np.concatenate(shares))) if cp_size > 1 else None,
        places=tensor(places) if cp_size > 1 else None,
    )
    return Packed(
        ids=tensor(ids[places])[None],
        positions=tensor(positions[places])[None],
        params=params,
        source=tensor(local[source[here]]),
        target=tensor(target[here]),
        row=tensor(row[here]),
        place=tensor(here),
        tokens=tokens,
        saved=given - tokens,
    )


def _spans(segments: Sequence[Segment], chunks: int, multiple: int) -> list[Range]:
    """Where each segment stands in the whole pack, its padding to `chunks` included; one more if the total needs a tail."""
    spans, end = [], 0
    for segment in segments:
        start, end = end, end - (-segment.length // chunks) * chunks
        spans.append((start, end))
    if tail := -end % multiple:
        spans.append((end, end + tail))
    return spans


def _chunks(span: Range, chunks: int, rank: int) -> list[Range]:
    """The parts of a segment that this rank holds: all of it, or two chunks, which the last rank finds side by side."""
    start, end = span
    if chunks == 1:
        return [span]
    size = (end - start) // chunks
    early, late = start + rank * size, end - (rank + 1) * size
    return [(early, late + size)] if early + size == late else [(early, early + size), (late, late + size)]


def _places(spans: Sequence[Range], chunks: int, rank: int) -> np.ndarray:
    """[T] int64: the places in the whole pack of this rank's tokens."""
    return np.concatenate([np.arange(*part) for span in spans for part in _chunks(span, chunks, rank)])


def _contents(
    segments: Sequence[Segment], spans: Sequence[Range], inputs: Sequence[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and positions of the whole pack, [W] int64 each; 0 for padding."""
    ids, positions = np.zeros((2, spans[-1][1]), dtype=np.int64)
    for segment, (start, _) in zip(segments, spans, strict=False):
        first, last = segment.position, segment.position + segment.length
        ids[start : start + segment.length] = inputs[segment.row][first:last]
        positions[start : start + segment.length] = np.arange(first, last)
    return ids, positions


def _predictions(rows: Sequence[Row], tree: PrefixTree, spans: Sequence[Range]) -> tuple[np.ndarray, ...]:
    """Source (place in the whole pack), target and row of all response tokens, row by row; [R] int64 each."""
    source = []
    for row, leaf in zip(rows, tree.leaves, strict=True):
        first = len(row.prompt_ids) - 1
        last = first + len(row.response_ids)
        parts = []
        while last > first:
            segment = tree.segments[leaf]
            begin = max(first, segment.position)
            shift = spans[leaf][0] - segment.position
            parts.append(np.arange(begin + shift, last + shift))
            last, leaf = begin, segment.parent
        source += reversed(parts)
    lengths = [len(row.response_ids) for row in rows]
    return (
        np.concatenate(source),
        np.array([token for row in rows for token in row.response_ids], dtype=np.int64),
        np.repeat(np.arange(len(rows)), lengths),
    )


def _calls(segments: Sequence[Segment], spans: Sequence[Range], chunks: int, rank: int) -> tuple[AttentionCall, ...]:
    calls, end = [], 0
    above: list[tuple[Range, ...]] = []  # for each segment, what stands before it in its rows, itself included
    for number, span in enumerate(spans):
        before: tuple[Range, ...] = ()
        if number < len(segments):
            segment = segments[number]
            before = above[segment.parent] if segment.parent >= 0 else ()
            above.append(_append(before, (span[0], span[0] + segment.length)))
        for part in _chunks(span, chunks, rank):
            start, end = end, end + part[1] - part[0]
            calls.append(AttentionCall((start, end), _append(before, (span[0], part[1]))))
    return tuple(calls)


def _append(ranges: tuple[Range, ...], last: Range) -> tuple[Range, ...]:
    """`ranges` and `last`, in one range where they touch."""
    if ranges and ranges[-1][1] == last[0]:
        return *ranges[:-1], (ranges[-1][0], last[1])
    return *ranges, last


def _subtree_end(segments: Sequence[Segment], spans: Sequence[Range]) -> np.ndarray:
    """[W] int64, see `Packing`. A segment's padding is visible to itself, so that no token is without a key."""
    ends = [end for _, end in spans]
    subtree_end = np.repeat(ends, [end - start for start, end in spans])
    for number in reversed(range(len(segments))):
        segment, (start, _) = segments[number], spans[number]
        subtree_end[start : start + segment.length] = ends[number]
        if segment.parent >= 0:
            ends[segment.parent] = max(ends[segment.parent], ends[number])
    return subtree_end


def _megatron_fields(
    spans: Sequence[Range], longest: int, device: torch.device, *, thd: bool, cp_size: int
) -> dict[str, object]:
    # Rotary tables are cached by this number, so it grows in steps; equal to the token count it would mean absolute positions.
    longest = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    longest += _LENGTH_STEP if longest == spans[-1][1] else 0
    fields = {"qkv_format": "thd" if thd else "sbhd", "max_seqlen_q": longest, "max_seqlen_kv": longest}
    if thd:
        ends = upload(torch.tensor([0, *(end for _, end in spans)], dtype=torch.int32), device)
        fields |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        if cp_size > 1:  # TransformerEngine insists on them; equal, they tell it that nothing stands between rows
            fields |= {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    return fields
