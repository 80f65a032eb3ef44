"""The plan's promises, for drawn models and layouts. That the bytes are the right ones is tested beside policy.convert."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import lcm

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drmas.core.resharding import (
    Parameter,
    Region,
    Tensors,
    TrainerLayout,
    WorkerLayout,
    plan,
    trainer_regions,
    worker_regions,
)
from drmas.errors import ConfigError


def model(layers=2, hidden=6, heads=4, kv_heads=2, head_dim=3, ffn=8, vocab=67, tied=False, itemsize=4) -> Tensors:
    """A decoder with biases on query, key and value, and norms of the heads."""
    names = (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim))
    parameters = [Parameter(-1, "rows", (("embed", (vocab, hidden)),))]
    for layer in range(layers):
        parts = {
            "norm": ("copy", (("", (hidden,)),)),
            "qkv": ("qkv", tuple((name, (rows, hidden)) for name, rows in names)),
            "bias": ("qkv", tuple((name, (rows,)) for name, rows in names)),
            "q_norm": ("copy", (("", (head_dim,)),)),
            "o": ("columns", (("", (hidden, heads * head_dim)),)),
            "mlp": ("gate_up", (("gate", (ffn, hidden)), ("up", (ffn, hidden)))),
            "down": ("columns", (("", (hidden, ffn)),)),
        }
        for place, (arrangement, tensors) in parts.items():
            held = tuple((f"{layer}.{place}.{name}", shape) for name, shape in tensors)
            parameters.append(Parameter(layer, arrangement, held))
    parameters.append(Parameter(layers, "copy", (("norm", (hidden,)),)))
    if not tied:
        parameters.append(Parameter(layers, "rows", (("head", (vocab, hidden)),)))
    return Tensors(tuple(parameters), layers, kv_heads, itemsize)


@st.composite
def cases(draw) -> tuple[Tensors, TrainerLayout, WorkerLayout, int]:
    trainer = TrainerLayout(
        tp=draw(st.sampled_from([1, 2, 3, 4])),
        cp=draw(st.sampled_from([1, 2])),
        dp=draw(st.sampled_from([1, 2, 3])),
        pp=draw(st.sampled_from([1, 2, 3])),
    )
    workers = WorkerLayout(tp=draw(st.sampled_from([1, 2, 4, 8])), replicas=draw(st.sampled_from([1, 2, 3])))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    for tp in (trainer.tp, workers.tp):
        assume(max(kv_heads, tp) % min(kv_heads, tp) == 0)
    every = lcm(trainer.tp, workers.tp)
    heads, head_dim = lcm(kv_heads, every) * draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3, 6]))
    assume((heads + 2 * kv_heads) * head_dim % trainer.tp == 0)
    tensors = model(
        layers=trainer.pp * draw(st.sampled_from([1, 2])),
        hidden=draw(st.sampled_from([1, 3, 8])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=every * draw(st.sampled_from([1, 3])),
        vocab=draw(st.integers(trainer.tp, 200)),
        tied=draw(st.booleans()),
        itemsize=draw(st.sampled_from([2, 4])),
    )
    return tensors, trainer, workers, draw(st.sampled_from([1, 16, 100, 10**6]))


def is_sent_by(piece, held) -> bool:
    """`held` has the piece where the piece says."""
    inside = held.region.overlap(piece.region) == piece.region
    corner = (held.row + piece.region.top - held.region.top, held.column + piece.region.left - held.region.left)
    same = (held.parameter, held.tensor) == (piece.parameter, piece.tensor)
    return same and inside and corner == (piece.row, piece.column)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_worker_gets_all_it_needs_once_and_nothing_else_from_ranks_that_hold_it(case):
    tensors, trainer, workers, bucket_bytes = case
    made = plan(tensors, trainer, workers, bucket_bytes=bucket_bytes)
    held = [trainer_regions(tensors, trainer, rank) for rank in range(trainer.ranks)]
    counts = [[np.zeros((*shape, 1)[:2], dtype=int) for shape in tensors.shapes] for _ in range(workers.workers)]
    for source, destination, pieces in chain(*made.rounds):
        for piece in pieces:
            assert sum(is_sent_by(piece, each) for each in held[source]) == 1
            top, bottom, left, right = piece.region
            rows, columns = (*tensors.shapes[piece.tensor], 1)[:2]
            assert 0 <= top < bottom <= rows  # padding isn't part of a tensor
            assert 0 <= left < right <= columns
            counts[destination][piece.tensor][top:bottom, left:right] += 1
    for worker, mine in enumerate(counts):
        for count, (top, bottom, left, right) in zip(
            mine, worker_regions(tensors, workers.tp, worker % workers.tp), strict=True
        ):
            expected = np.zeros_like(count)
            expected[top:bottom, left:right] = 1
            np.testing.assert_array_equal(count, expected)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_replicas_send_alike_and_rounds_keep_to_the_bucket(case):
    tensors, trainer, workers, bucket_bytes = case
    made = plan(tensors, trainer, workers, bucket_bytes=bucket_bytes)
    largest = max(piece.region.size for message in chain(*made.rounds) for piece in message.pieces) * tensors.itemsize
    for stage in range(trainer.pp):
        for tp in range(trainer.tp):
            sent = [made.sent(rank) for rank in trainer.holders(tp, stage)]
            assert max(sent) - min(sent) <= largest
    total = tensors.itemsize * sum(
        region.size for rank in range(workers.tp) for region in worker_regions(tensors, workers.tp, rank)
    )
    assert sum(made.sent(rank) for rank in range(trainer.ranks)) == total * workers.replicas
    for messages in made.rounds:
        assert messages
        assert len({message[:2] for message in messages}) == len(messages)  # one message between two ends
        for end in (0, 1):
            load = Counter()
            for message in messages:
                load[message[end]] += message.elements * tensors.itemsize
                rows = [piece.region for piece in message.pieces]
                if load[message[end]] > bucket_bytes:  # a single row that is larger travels alone
                    assert [row.bottom - row.top for row in rows] == [1]
                    assert load[message[end]] == message.elements * tensors.itemsize


def test_a_larger_job_is_planned_in_few_rounds_that_every_stage_works_in():
    tensors = model(layers=8, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=128, vocab=1000, itemsize=2)
    trainer, workers = TrainerLayout(tp=4, pp=4), WorkerLayout(tp=4, replicas=4)
    bucket = 4096
    made = plan(tensors, trainer, workers, bucket_bytes=bucket)
    received = 2 * sum(region.size for region in worker_regions(tensors, 4, 0))
    most = max(received, *(made.sent(rank) for rank in range(16)))
    assert len(made.rounds) <= 1.6 * most / bucket
    first = {trainer.place(message.source)[1] for message in made.rounds[0]}
    assert first == {0, 1, 2, 3}  # each replica of the engine begins with another stage


def test_ranks_are_numbered_as_megatron_does_and_layers_are_cut_evenly():
    layout = TrainerLayout(tp=2, cp=2, dp=3, pp=2)
    assert layout.ranks == 24
    assert [layout.place(rank) for rank in (0, 1, 2, 11, 12, 13)] == [(0, 0), (1, 0), (0, 0), (1, 0), (0, 1), (1, 1)]
    assert layout.holders(1, 1) == [13, 15, 17, 19, 21, 23]
    tensors = model(layers=4)
    names = tensors.names
    stages = [{names[held.tensor] for held in trainer_regions(tensors, layout, rank)} for rank in (0, 12)]
    assert [{"embed", "norm", "head"} & stage for stage in stages] == [{"embed"}, {"norm", "head"}]
    layers = [{int(name[0]) for name in stage if name[0].isdigit()} for stage in stages]
    assert layers == [{0, 1}, {2, 3}]


def test_the_second_copy_of_a_tied_embedding_is_not_a_source():
    tensors = model(tied=True)
    made = plan(tensors, TrainerLayout(pp=2), WorkerLayout(), bucket_bytes=10**6)
    sources = {m.source for m in chain(*made.rounds) for piece in m.pieces if tensors.names[piece.tensor] == "embed"}
    assert sources == {0}


def test_a_qkv_parameter_is_interleaved_by_head_also_where_a_rank_has_half_a_head():
    """Three rows per head of two heads, 4 query heads: whole rows are q0 q0 q0 q1 q1 q1 k0 k0 k0 v0 v0 v0 q2 ..."""
    tensors = Tensors((Parameter(0, "qkv", (("q", (12, 5)), ("k", (6, 5)), ("v", (6, 5)))),), 1, 2, 4)
    found = {rank: trainer_regions(tensors, TrainerLayout(tp=4), rank) for rank in range(4)}
    q, k, v = range(3)
    assert [(h.tensor, h.region, h.row) for h in found[2]] == [(q, Region(6, 12, 0, 5), 0)]
    assert [(h.tensor, h.region, h.row) for h in found[1]] == [(k, Region(0, 3, 0, 5), 0), (v, Region(0, 3, 0, 5), 3)]
    halves = trainer_regions(tensors, TrainerLayout(tp=8), 3)
    assert [(h.tensor, h.region, h.row) for h in halves] == [(v, Region(0, 3, 0, 5), 0)]


def test_workers_share_key_value_heads_and_pad_the_vocabulary():
    tensors = model(heads=8, kv_heads=2, head_dim=3, hidden=4, vocab=70)
    number = {name: index for index, name in enumerate(tensors.names)}
    needed = [worker_regions(tensors, 4, rank) for rank in range(4)]
    assert [each[number["0.qkv.q"]] for each in needed] == [Region(6 * rank, 6 * rank + 6, 0, 4) for rank in range(4)]
    assert [each[number["0.qkv.k"]][:2] for each in needed] == [(0, 3), (0, 3), (3, 6), (3, 6)]
    assert [each[number["0.bias.v"]] for each in needed] == [Region(0, 3, 0, 1)] * 2 + [Region(3, 6, 0, 1)] * 2
    assert [each[number["embed"]][:2] for each in needed] == [(0, 32), (32, 64), (64, 70), (70, 70)]  # 128 by 4


@pytest.mark.parametrize(
    ("trainer", "workers", "message"),
    [
        ({"pp": 3}, {}, "2 layers don't divide into 3 pipeline stages"),
        ({"tp": 5}, {}, r"0\.qkv\.q can't be cut evenly: 24 into 5"),
        ({}, {"tp": 8}, r"0\.qkv\.q can't be cut evenly: 4 into 8"),  # heads, not rows
        ({}, {"tp": 3}, r"embed can't be cut evenly: 128 into 3"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(trainer, workers, message):
    with pytest.raises(ConfigError, match=message):
        plan(model(), TrainerLayout(**trainer), WorkerLayout(**workers), bucket_bytes=1000)


def test_the_digest_is_of_everything_the_ends_must_agree_on():
    def digest(tensors=None, trainer=None, workers=None, bucket_bytes=1000) -> int:
        return plan(tensors or model(), trainer or TrainerLayout(), workers or WorkerLayout(), bucket_bytes=bucket_bytes).digest

    same = digest()
    others = [
        digest(model(vocab=68)),
        digest(model(itemsize=2)),
        digest(trainer=TrainerLayout(dp=2)),
        digest(workers=WorkerLayout(replicas=2)),
        digest(bucket_bytes=900),
    ]
    assert same == digest()
    assert len({same, *others}) == 6
    assert 0 <= same < 2**62
