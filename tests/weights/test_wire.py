"""What the ends of a transfer agree on: buckets that all plan alike, the digest of a plan, and addresses."""

from __future__ import annotations

import pytest
import torch

from drmas.weights.wire import LOOPBACK, PAGE, Store, Update, address_towards, digest, plan_buckets, store_at


def update(*tensors: tuple[str, torch.dtype, tuple[int, ...]]) -> Update:
    return Update.of(tensors)


ODD = update(
    ("a", torch.bfloat16, (3,)), ("b", torch.float32, (4,)), ("big", torch.float32, (50,)), ("c", torch.float32, (2, 2))
)


def test_buckets_keep_order_respect_the_size_and_align_what_they_hold():
    plan = plan_buckets(ODD, bucket_bytes=64)
    assert [[slot.name for slot in bucket.slots] for bucket in plan] == [["a", "b"], ["big"], ["c"]]
    assert [bucket.num_bytes for bucket in plan] == [32, 200, 16]
    assert [bucket.start for bucket in plan] == [0, PAGE, 2 * PAGE]
    assert plan[0].slots[1].offset == 16  # 6 bytes of bfloat16, then room up to the alignment
    assert [bucket.content for bucket in plan] == ["a to b", "big", "c"]


def test_views_return_what_was_written():
    (bucket,) = plan_buckets(update(("a", torch.bfloat16, (3,)), ("b", torch.float32, (2, 2))), bucket_bytes=1024)
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    values = [torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16), torch.tensor([[1.0, 2.0], [3.0, float("-inf")]])]
    for slot, value in zip(bucket.slots, values, strict=True):
        slot.view(buffer).copy_(value)
    for slot, value in zip(bucket.slots, values, strict=True):
        assert torch.equal(slot.view(buffer), value)
        assert (slot.stand_in().dtype, slot.stand_in().shape) == (value.dtype, value.shape)


def test_an_update_with_unequal_lists_is_refused():
    with pytest.raises(ValueError, match="2 names, 1 dtypes and 2 shapes"):
        Update(["a", "b"], ["float32"], [[1], [2]])


def test_the_digest_sees_whatever_the_ends_must_have_in_common():
    renamed = update(("z", torch.bfloat16, (3,)), *zip(ODD.names[1:], [torch.float32] * 3, ODD.shapes[1:], strict=True))
    reordered = Update(ODD.names[::-1], ODD.dtypes[::-1], ODD.shapes[::-1])
    other_dtype = Update(ODD.names, ["float16", *ODD.dtypes[1:]], ODD.shapes)
    other_shape = Update(ODD.names, ODD.dtypes, [*ODD.shapes[:3], [4, 1]])
    seen = {digest("disk", each, plan_buckets(each, 64)) for each in (ODD, renamed, reordered, other_dtype, other_shape)}
    seen |= {digest("broadcast", ODD, plan_buckets(ODD, 64)), digest("disk", ODD, plan_buckets(ODD, 4096))}
    assert len(seen) == 7
    assert all(0 <= each < 2**62 for each in seen)
    assert digest("disk", ODD, plan_buckets(ODD, 64)) == digest("disk", Update(**ODD.to_json()), plan_buckets(ODD, 64))


def test_a_store_is_found_at_the_address_that_others_see():
    address = address_towards(LOOPBACK)
    assert address == LOOPBACK
    store = Store(10, address)
    store_at(address, store.port, 10).set("here", "yes")
    assert store.store.get("here") == b"yes"
