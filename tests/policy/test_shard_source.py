"""Plans followed with plain copies, from shards that policy.convert cut, against vLLM's cut of the whole tensors."""

from __future__ import annotations

from itertools import chain
from math import lcm

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from drmas.core.resharding import Tensors, TrainerLayout, WorkerLayout, plan, worker_regions
from drmas.policy.architecture import Architecture
from drmas.policy.convert import Entry, slots, to_shard
from drmas.policy.shard_source import ShardSource, describe


@st.composite
def cases(draw) -> tuple[Architecture, TrainerLayout, WorkerLayout, int]:
    size = st.sampled_from([1, 2])
    trainer = TrainerLayout(tp=draw(st.sampled_from([1, 2, 3, 4])), cp=draw(size), dp=draw(size), pp=draw(size))
    workers = WorkerLayout(tp=draw(st.sampled_from([1, 2, 4, 8])), replicas=draw(size))
    kv_heads, every = draw(st.sampled_from([1, 2, 3, 4])), lcm(trainer.tp, workers.tp)
    for tp in (trainer.tp, workers.tp):
        assume(max(kv_heads, tp) % min(kv_heads, tp) == 0)
    heads, head_dim = lcm(kv_heads, every) * draw(size), draw(st.sampled_from([2, 6]))
    assume((heads + 2 * kv_heads) * head_dim % trainer.tp == 0)
    architecture = Architecture(
        family=draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        layers=trainer.pp * draw(size),
        hidden=draw(st.sampled_from([3, 8])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=every * draw(size),
        vocab=draw(st.integers(13, 200)),
        eps=1e-6,
        rope_theta=1e4,
        tied=draw(st.booleans()),
        max_positions=64,
    )
    return architecture, trainer, workers, draw(st.sampled_from([64, 1000, 10**6]))


def whole_tensors(architecture: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [tensor for slot in slots(architecture) for tensor in slot.tensors]
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


def cut_for_vllm(name: str, tensor: torch.Tensor, architecture: Architecture, tp: int, rank: int) -> torch.Tensor:
    """What an engine worker has of a whole tensor, without the padding of a vocabulary."""
    kind = name.split(".")[-2]
    if kind in ("embed_tokens", "lm_head"):
        padded = torch.cat([tensor, tensor.new_full((-len(tensor) % 64, tensor.shape[1]), torch.nan)]).chunk(tp)[rank]
        return padded[~padded.isnan().any(1)]
    if kind in ("k_proj", "v_proj") and tp > architecture.kv_heads:
        heads = tensor.unflatten(0, (architecture.kv_heads, -1))
        return heads.repeat_interleave(tp // architecture.kv_heads, dim=0)[rank]
    if kind in ("o_proj", "down_proj"):
        return tensor.chunk(tp, dim=1)[rank]
    return tensor if "norm" in kind else tensor.chunk(tp)[rank]


def shards_of(architecture: Architecture, trainer: TrainerLayout, rank: int) -> list[torch.Tensor]:
    """All parameters' shards at a rank's tensor-parallel place; NaN where its stage doesn't hold one, and in padding."""
    whole, shards = whole_tensors(architecture), []
    tp, stage = trainer.place(rank)
    for slot in slots(architecture):
        entry = Entry(None, slot.arrangement, slot.tensors)
        shard = to_shard(entry, [whole[name] for name, _ in slot.tensors], architecture, tp=trainer.tp, rank=tp).clone()
        layer = slot.layer if slot.layer is not None else (0 if "embed" in slot.place else architecture.layers - 1)
        if layer // (architecture.layers // trainer.pp) != stage:
            shard.fill_(torch.nan)
        elif slot.arrangement == "rows":
            shard[max(0, architecture.vocab - tp * len(shard)) :] = torch.nan
        shards.append(shard.reshape(len(shard), -1))
    return shards


@settings(max_examples=60, deadline=None)
@given(cases())
def test_followed_with_plain_copies_the_plan_gives_every_worker_vllms_cut(case):
    architecture, trainer, workers, bucket_bytes = case
    tensors = describe(architecture, itemsize=4)
    shards = [shards_of(architecture, trainer, rank) for rank in range(trainer.ranks)]
    needed = [worker_regions(tensors, workers.tp, rank) for rank in range(workers.tp)] * workers.replicas
    got = [[torch.full((n.bottom - n.top, n.right - n.left), torch.nan) for n in mine] for mine in needed]
    for source, destination, pieces in chain(*plan(tensors, trainer, workers, bucket_bytes=bucket_bytes).rounds):
        for piece in pieces:
            region, corner = piece.region, needed[destination][piece.tensor]
            rows, columns = region.bottom - region.top, region.right - region.left
            value = shards[source][piece.parameter][piece.row :, piece.column :][:rows, :columns]
            got[destination][piece.tensor][region.top - corner.top :, region.left - corner.left :][:rows, :columns] = value
    for worker, mine in enumerate(got):
        for (name, tensor), found in zip(whole_tensors(architecture).items(), mine, strict=True):
            expected = cut_for_vllm(name, tensor, architecture, workers.tp, worker % workers.tp)
            assert torch.equal(found, expected[:, None] if expected.ndim == 1 else expected), (name, worker)


@pytest.mark.parametrize("layout", [TrainerLayout(tp=2, cp=3, dp=2, pp=2), TrainerLayout(tp=3, dp=4, pp=2)])
def test_ranks_are_numbered_as_megatron_numbers_them(layout):
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "dp", "pp")}
    generator = RankGenerator(ep=1, order="tp-cp-ep-dp-pp", **sizes)
    for replicas in generator.get_ranks("dp-cp"):
        assert sorted(replicas) == layout.holders(*layout.place(replicas[0]))
    for number, ranks in enumerate(generator.get_ranks("tp-cp-dp")):
        assert [layout.place(rank) for rank in ranks] == [(rank % layout.tp, number) for rank in ranks]


@pytest.mark.parametrize("name", ["qwen2-untied", "qwen3-tied"])
def test_a_source_describes_the_model_and_gives_its_shards(trainer_of, name):
    trainer = trainer_of(name)
    whole = trainer.weight_source()
    source = ShardSource(whole)
    tensors: Tensors = source.tensors
    assert list(zip(tensors.names, tensors.shapes, strict=True)) == [(n, shape) for n, _, shape in whole.metadata()]
    assert (source.layout, source.rank, tensors.itemsize, source.dtype) == (TrainerLayout(), 0, 4, torch.float32)
    stages = [parameter.layer for parameter in tensors.parameters]
    assert stages == sorted(stages)
    assert {stages[0], stages[-1]} == {-1, 2}
    values = dict(whole)
    gate, up = (values[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    number = next(
        i for i, parameter in enumerate(tensors.parameters) if parameter.tensors[0][0].endswith("1.mlp.gate_proj.weight")
    )
    assert torch.equal(source.shard(number), torch.cat([gate, up]))
    norm = len(tensors.parameters) - (1 if "tied" in name.split("-") else 2)
    assert torch.equal(source.shard(norm), values["model.norm.weight"].reshape(-1, 1))


def test_a_source_waits_for_parameters_that_arrive_behind_a_step(trainer_of):
    whole, waited = trainer_of("qwen3-tied").weight_source(), []
    object.__setattr__(whole, "before", lambda: waited.append(1))
    ShardSource(whole).settle()
    assert waited == [1]
