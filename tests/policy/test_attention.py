"""Attention over packs with shared starts against a dense softmax, and the rotary embedding against transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import flex_attention as torch_flex
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from drmas.policy.architecture import read_architecture
from drmas.policy.attention import SdpaAttention
from drmas.policy.flex import FlexAttention
from drmas.policy.packing import Packed, pack
from drmas.policy.rotary import Rotary, rotate
from drmas.types import Row

HEADS, DIM = 4, 8
CPU = torch.device("cpu")


def row(*ids: int) -> Row:
    """A row whose input is `ids`; the last token predicts one more."""
    return Row(
        task="t",
        episode="e",
        agent="a",
        policy="p",
        turn=0,
        prompt_ids=list(ids),
        response_ids=[0],
        logprobs=[0.0],
        versions=[0],
        reward=1.0,
    )


def rows_of_a_tree() -> list[Row]:
    """Three levels: a start of 20 tokens, in two of five rows one of 17 more behind it, and two rows of their own."""
    start, more = range(100, 120), range(200, 217)
    return [
        row(*start, *more, 1, 2, 3),
        row(*start, *more, 4, 5, 6),
        row(*start, 7, 8, 9, 10, 11),
        row(*start, 12, 13),
        row(*start, 14, 15, 16, 17, 18),
        row(20, 21, 22, 23),
        row(30, 31, 32, 33),
    ]


def core(kind: type, cp: int = 1):
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, kv_channels=DIM)
    groups = SimpleNamespace(tp=None, cp=SimpleNamespace(size=lambda: cp))
    return kind(config=config, pg_collection=groups, layer_number=1)


def states(packed: Packed, kv_heads: int, *, seed: int = 0) -> list[torch.Tensor]:
    """Query, key and value [T, heads, d]: of a token by its id and position, so that every pack of a row has the same."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(300, 64, (HEADS + 2 * kv_heads) * DIM, generator=generator)
    found = table[packed.ids[0], packed.positions[0]].view(-1, HEADS + 2 * kv_heads, DIM)
    return [each.contiguous() for each in found.split([HEADS, kv_heads, kv_heads], dim=1)]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, subtree_end: torch.Tensor) -> torch.Tensor:
    """Softmax over all pairs, with the pairs that may not be set to minus infinity."""
    place = torch.arange(key.shape[0])
    sees = (place <= place[:, None]) & (place[:, None] < subtree_end)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), value)
    return out.flatten(1).unsqueeze(1)


def differentiated(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    inputs = [each.detach().requires_grad_() for each in inputs]
    output = function(*inputs)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, other, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("sharing", [True, False])
def test_calls_equal_a_dense_softmax(sharing, kv_heads):
    packed = pack(rows_of_a_tree(), device=CPU, share_prefixes=sharing, multiple=4)
    depth = max(len(keys) for _, keys in packed.params.calls)
    assert depth == (3 if sharing else 1)
    inputs = states(packed, kv_heads)
    found = differentiated(lambda *x: core(SdpaAttention).attend(*x, packed.params), *inputs)
    close(found, differentiated(lambda *x: dense(*x, packed.params.subtree_end), *inputs))


def test_shared_starts_change_nothing_for_a_row():
    """Each row's last token, alone and in the pack with all others."""
    rows = rows_of_a_tree()
    packed = pack(rows, device=CPU, share_prefixes=True)
    assert packed.saved == 4 * 20 + 17
    together = core(SdpaAttention).attend(*states(packed, 2), packed.params)[packed.source]
    for each, found in zip(rows, together, strict=True):
        alone = pack([each], device=CPU)
        torch.testing.assert_close(found, core(SdpaAttention).attend(*states(alone, 2), alone.params)[-1], atol=3e-6, rtol=0)


def test_calls_of_one_shape_are_one_call(monkeypatch):
    shapes, attend = [], F.scaled_dot_product_attention

    def counted(query, key, *arguments, **options):
        shapes.append((query.shape[0], query.shape[2], key.shape[2], options["is_causal"]))
        return attend(query, key, *arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    packed = pack(rows_of_a_tree(), device=CPU, share_prefixes=True)
    core(SdpaAttention).attend(*states(packed, 2), packed.params)
    assert sorted(shapes) == [
        (1, 2, 22, False),
        (1, 17, 37, False),
        (1, 20, 20, True),
        (2, 3, 40, False),  # behind both starts
        (2, 4, 4, True),  # the rows of their own
        (2, 5, 25, False),  # not neighbours
    ]


def test_the_plan_is_made_once_per_pack():
    packed = pack(rows_of_a_tree(), device=CPU, share_prefixes=True)
    inputs = states(packed, 2)
    first = core(SdpaAttention).attend(*inputs, packed.params)
    plan = packed.params.prepared
    assert plan is not None
    assert torch.equal(core(SdpaAttention).attend(*inputs, packed.params), first)
    assert packed.params.prepared is plan


@pytest.mark.parametrize("kind", [SdpaAttention, FlexAttention])
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("cp", [2, 3])
def test_context_parallel_ranks_together_equal_one(cp, sharing, kind):
    rows = rows_of_a_tree()
    shares = [pack(rows, device=CPU, share_prefixes=sharing, cp_size=cp, cp_rank=rank) for rank in range(cp)]
    order = shares[0].params.order
    gathered = [torch.cat(each) for each in zip(*(states(share, 2) for share in shares), strict=True)]
    query, key, value = (each[order] for each in gathered)
    expected = dense(query, key, value, shares[0].params.subtree_end)
    for share in shares:
        found = core(kind, cp).attend(states(share, 2)[0], key, value, share.params)
        torch.testing.assert_close(found, expected[share.params.places], atol=3e-6, rtol=0)


@pytest.mark.parametrize("sharing", [True, False])
def test_flex_attention_equals_calls_with_its_gradients(monkeypatch, sharing):
    """torch refuses a gradient of flex attention on a CPU, for want of a kernel; as plain tensor operations it has one."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    packed = pack(rows_of_a_tree(), device=CPU, share_prefixes=sharing)
    inputs = states(packed, 2)
    wanted = differentiated(lambda *x: core(SdpaAttention).attend(*x, packed.params), *inputs)
    packed.params.prepared = None
    close(differentiated(lambda *x: core(FlexAttention).attend(*x, packed.params), *inputs), wanted)
    assert packed.params.prepared.shape == (1, 1, len(packed.ids[0]), len(packed.ids[0]))


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-tied"])
def test_rotation_equals_transformers_with_its_gradient(models, name):
    architecture = read_architecture(models / name)
    positions = torch.tensor([[5, 0, 77, 77, 3]])
    x = torch.randn(5, 1, 3, architecture.head_dim, generator=torch.Generator().manual_seed(0))
    cos_sin = Rotary(architecture, torch.float32)(positions)
    half = cos_sin[:, :, 0, 0].repeat(1, 1, 2)

    def theirs(x):
        return apply_rotary_pos_emb(x.transpose(0, 2), x.transpose(0, 2), *half[:, None])[0].transpose(0, 2)

    close(differentiated(lambda x: rotate(x, cos_sin), x), differentiated(theirs, x))
    angles = positions[0, :, None].double() * architecture.rope_theta ** -(
        torch.arange(0, architecture.head_dim, 2).double() / architecture.head_dim
    )
    torch.testing.assert_close(cos_sin[:, :, 0, 0].double(), torch.stack((angles.cos(), angles.sin())), atol=1e-5, rtol=0)
