"""The estimate of activations against what autograd keeps for a backward pass of a Megatron model on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

from drmas.config.schema import LossConfig, PolicyConfig
from drmas.policy.batch import PolicyBatch
from drmas.policy.groups import Groups, destroy, init_distributed
from drmas.policy.trainer import PolicyTrainer
from drmas.runtime.memory import BYTES, Share, activation_bytes
from drmas.runtime.models import write_tiny_qwen3
from drmas.types import Row

LENGTH, ROWS = 160, 6
TOKENS = LENGTH * ROWS


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(layers, **settings): a policy of so many layers after one update, and the bytes that autograd kept for it."""
    init_distributed()

    def made(layers: int, **settings):
        folder = tmp_path_factory.mktemp("model")
        write_tiny_qwen3(folder, seed=0, hidden=64, layers=layers)
        settings |= {"tokens_per_microbatch": TOKENS, "prefix_sharing": False, "engine": {"max_model_tokens": LENGTH}}
        config = PolicyConfig.model_validate({"model": str(folder), "agent_grad_norm_every": 0, **settings})
        layout = Groups().layout(tp=1, pp=1, cp=1, ranks=[0])
        how = {"seed": 0, "total_steps": 1, "agents": ["solver"], "loss": LossConfig()}
        trainer = PolicyTrainer("main", config, model_path=folder, layout=layout, **how)
        kept = Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept.keep, kept.give):
            trainer.update(batch(trainer.architecture.vocab))
        return trainer, kept.bytes

    yield made
    destroy()


class Held:
    """A tensor that autograd saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Kept:
    """What autograd holds when the way back begins; `bytes` counts storages once."""

    def __init__(self) -> None:
        self.bytes = 0
        self.held: WeakSet[Held] = WeakSet()

    def keep(self, tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        self.held.add(held)
        return held

    def give(self, held: Held) -> torch.Tensor:
        if not self.bytes:
            storages = [each.tensor.untyped_storage() for each in self.held]
            self.bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return held.tensor


def batch(vocab: int) -> PolicyBatch:
    draw = torch.Generator().manual_seed(0)
    rows = []
    for i in range(ROWS):
        ids = torch.randint(0, vocab, (LENGTH,), generator=draw).tolist()
        half = LENGTH // 2
        sampled = {"response_ids": ids[half:], "logprobs": [-4.0] * half, "versions": [0] * half}
        rows.append(Row("t", f"t#{i}", "solver", "main", 0, prompt_ids=ids[:half], reward=0.0, **sampled))
    weights = [1 / TOKENS] * ROWS
    return PolicyBatch(rows=rows, advantages=[1.0] * ROWS, token_weights=weights, temperatures=[1.0] * ROWS)


@pytest.mark.parametrize(("recompute", "within"), [("none", 0.3), ("selective", 0.1), ("full", 0.15)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_keeps_what_is_estimated(train, recompute, within, dtype):
    """Per layer, from two depths: what the head and the embedding keep cancels out."""
    few, many = (train(layers, recompute=recompute, dtype=dtype) for layers in (2, 6))
    measured = (many[1] - few[1]) / 4
    estimates = [
        activation_bytes(trainer.architecture, Share(trainer.config, (0,), 0), gpu=False) for trainer, _ in (few, many)
    ]
    estimated = (estimates[1] - estimates[0]) / 4
    assert estimated == pytest.approx(measured, rel=within)


def test_layouts_divide_it_and_a_pipeline_keeps_several_microbatches():
    architecture = SimpleNamespace(layers=8, hidden=64, heads=4, head_dim=16, qkv_rows=128, ffn=96, padded_vocab=lambda tp: 160)

    def bytes_of(place: int = 0, ranks: int = 1, **settings) -> float:
        config = PolicyConfig.model_validate(
            {"model": "", "tokens_per_microbatch": 100, "engine": {"max_model_tokens": 50}, **settings}
        )
        return activation_bytes(architecture, Share(config, tuple(range(ranks)), place), gpu=True)

    wide, inner, attention = 4 * 64, 3 * 96, 128 + 64
    layer, head = wide + inner + attention, 1.5 * 4 * 100 * 160 + 2 * 100 * 64 * BYTES["float32"]
    assert bytes_of() == 100 * 4 * 9 * layer + head
    assert bytes_of(dtype="bfloat16") == 100 * 2 * 9 * layer + 1.5 * 4 * 100 * 160 + 2 * 100 * 64 * 2
    assert bytes_of(engine={"max_model_tokens": 200}) == 2 * bytes_of()  # a row that exceeds the budget gets it all
    assert bytes_of(context_parallel=2, ranks=2) == bytes_of() / 2
    halves = 100 * 4 * 9 * (wide + (inner + attention) / 2)
    assert bytes_of(tensor_parallel=2, ranks=2) == halves + head - 1.5 * 4 * 100 * 80
    sequence = {"tensor_parallel": 2, "sequence_parallel": True, "ranks": 2}
    assert bytes_of(**sequence) == 100 * 4 * 9 * layer / 2 + head - 1.5 * 4 * 100 * 80
    first, last = (bytes_of(pipeline_parallel=2, ranks=2, place=place) for place in (0, 1))
    assert (first, last) == (100 * 4 * (4 * 2 + 1) * layer, 100 * 4 * (4 + 1) * layer + head)
    assert bytes_of(recompute="full") == 100 * 4 * (8 * 2 * 64 + 2 * layer) + head
    assert bytes_of(recompute="selective") == 100 * 4 * (8 * (5 * 64 + attention) + 2 * layer) + head
