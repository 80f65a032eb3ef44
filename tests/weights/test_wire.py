"""The gloo wire: buckets that both ends plan alike, votes, and broadcasts."""

from __future__ import annotations

import threading

import pytest
import torch

from drmas.weights.wire import LOOPBACK, GlooInit, GlooUpdate, Group, Store, checksum, plan_buckets


def update(*tensors: tuple[str, torch.dtype, tuple[int, ...]]) -> GlooUpdate:
    return GlooUpdate.of(tensors)


def test_buckets_keep_order_respect_the_size_and_align_what_they_hold():
    plan = list(
        plan_buckets(
            update(
                ("a", torch.bfloat16, (3,)),
                ("b", torch.float32, (4,)),
                ("big", torch.float32, (50,)),
                ("c", torch.float32, (2, 2)),
            ),
            bucket_bytes=64,
        )
    )
    assert [[slot.name for slot in bucket.slots] for bucket in plan] == [["a", "b"], ["big"], ["c"]]
    assert [bucket.num_bytes for bucket in plan] == [32, 200, 16]
    assert plan[0].slots[1].offset == 16  # 6 bytes of bfloat16, then room up to the alignment


def test_views_return_what_was_written():
    (bucket,) = plan_buckets(update(("a", torch.bfloat16, (3,)), ("b", torch.float32, (2, 2))), bucket_bytes=1024)
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    values = [torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16), torch.tensor([[1.0, 2.0], [3.0, float("-inf")]])]
    for slot, value in zip(bucket.slots, values, strict=True):
        slot.view(buffer).copy_(value)
    for slot, value in zip(bucket.slots, values, strict=True):
        assert torch.equal(slot.view(buffer), value)


def test_an_update_with_unequal_lists_is_refused():
    with pytest.raises(ValueError, match="2 names, 1 dtypes and 2 shapes"):
        GlooUpdate(["a", "b"], ["float32"], [[1], [2]])


def test_the_checksum_sees_one_bit_and_the_order():
    buffer = torch.arange(256, dtype=torch.uint8)
    other = buffer.clone()
    other[17] ^= 1
    swapped = buffer.clone()
    swapped[[3, 4]] = buffer[[4, 3]]
    assert len({checksum(buffer), checksum(other), checksum(swapped)}) == 3
    assert checksum(buffer) == checksum(buffer.clone())


def in_group_of_three(play):
    """Run `play(rank, group)` on three ranks in three threads; the results by rank."""
    store = Store(20)
    results: dict[int, object] = {}

    def member(rank: int) -> None:
        if rank == 0:
            group = Group(store.store, rank=0, world_size=3, timeout_seconds=20)
        else:
            group = Group.join(GlooInit(LOOPBACK, store.port, 1, 3, 64, 20), rank)
        results[rank] = play(rank, group)
        group.close()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_one_vote_against_stops_everybody_at_the_same_place():
    def play(rank, group):
        first = group.vote(False, 4_000_000_000 if rank == 0 else 0)
        return [first, group.vote(rank == 2), group.vote(False)]

    results = in_group_of_three(play)
    assert results == {rank: [(True, 4_000_000_000), (False, 0), (True, 0)] for rank in range(3)}


def test_a_broadcast_carries_the_senders_bytes():
    def play(rank, group):
        buffer = torch.arange(100, dtype=torch.uint8) if rank == 0 else torch.zeros(100, dtype=torch.uint8)
        group.broadcast(buffer)
        return buffer.tolist()

    assert in_group_of_three(play) == {rank: list(range(100)) for rank in range(3)}
