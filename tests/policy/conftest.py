"""Small models, rows and trainers for the tests of drmas.policy, in this process and in those that torchrun starts.

`ranks.py` and `four_ranks.py` import the plain functions; tests reach them through the fixture `kit`, since test modules can't
import each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from drmas.config.schema import CriticConfig, LossConfig, PolicyConfig
from drmas.policy import host_platform
from drmas.policy.batch import PolicyBatch
from drmas.policy.convert import WeightSource
from drmas.policy.critic import Critic
from drmas.policy.groups import Groups, PolicyGroups, destroy, init_distributed
from drmas.policy.packing import pack
from drmas.policy.trainer import PolicyTrainer
from drmas.types import Row

VOCAB = 131
"""Odd, so that two tensor-parallel ranks need a row of padding."""
AGENTS = ("solver", "verifier")
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
MODELS = [(family, tied) for family in FAMILIES for tied in (True, False)]
ONE_KV_HEAD = "qwen3-one-kv-head"
"""Fewer key-value heads than two tensor-parallel ranks."""
LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "dp2": {"tensor_parallel": 1},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
}
"""On two ranks."""
PRODUCTS = {
    "tp2-sp x dp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp2-sp x pp2": {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
    "pp2 x dp2": {"pipeline_parallel": 2},
    "tp2-sp x cp2": {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2},
    "cp2 x pp2": {"context_parallel": 2, "pipeline_parallel": 2},
}
"""On four ranks; what is left is data-parallel."""
LOSSES = {
    "default": LossConfig(),
    "asymmetric, no dual clip, entropy": LossConfig(clip_low=0.1, clip_high=0.45, dual_clip=None, entropy_bonus=0.02),
    "asymmetric, tight dual clip": LossConfig(clip_low=0.35, clip_high=0.15, dual_clip=1.5),
}
"""No two of a loss's numbers are equal, so that none can stand in for another."""


def model_name(family: str, tied: bool) -> str:
    return f"{family}-{'tied' if tied else 'untied'}"


def write_model(folder: Path, family: str, tied: bool, **overrides: Any) -> Path:
    """A random model of 2 layers whose norms and biases aren't the trivial ones."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    }
    if family == "qwen3":
        shape["head_dim"] = 16
    config = FAMILIES[family](**(shape | overrides))
    generator = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.08 * noise)
    model.save_pretrained(folder)
    return folder


def make_rows(count: int = 6, *, seed: int = 1, versions: int = 0) -> list[Row]:
    """Rows of ragged lengths, two agents in turn, with behaviour log-probs that aren't the model's."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        prompt, response = 3 + 2 * i, 4 + (5 * i) % 7
        ids = torch.randint(0, VOCAB, (prompt + response,), generator=generator).tolist()
        logprobs = (-4.9 + 0.2 * torch.randn(response, generator=generator)).tolist()
        rows.append(
            Row(
                task=f"t{i // 2}",
                episode=f"t{i // 2}#{i % 2}",
                agent=AGENTS[i % 2],
                policy="main",
                turn=i % 2,
                prompt_ids=ids[:prompt],
                response_ids=ids[prompt:],
                logprobs=logprobs,
                versions=[versions] * response,
                reward=float(i % 2),
            )
        )
    return rows


def make_batch(rows: list[Row] | None = None, *, advantages: list[float] | None = None, **changes: Any) -> PolicyBatch:
    """Every response token weighs the same; one row has advantage 0, one is sampled at temperature 0.7."""
    rows = make_rows() if rows is None else rows
    tokens = sum(len(row.response_ids) for row in rows)
    given = {
        "rows": rows,
        "advantages": advantages or [(1.0, -0.7, 0.0, 1.3, -1.1, 0.4)[i % 6] for i in range(len(rows))],
        "token_weights": [1.0 / tokens] * len(rows),
        "temperatures": [0.7 if i == 1 else 1.0 for i in range(len(rows))],
    }
    return PolicyBatch(**(given | changes))


def off_policy_batch(batch: PolicyBatch, logprobs: list[list[float]], *, seed: int = 5, spread: float = 0.9) -> PolicyBatch:
    """`batch` with behaviour log-probs around the policy's own: ratios of about e^-2 to e^2, so that every clip is active."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        replace(row, logprobs=(torch.tensor(own) + spread * torch.randn(len(own), generator=generator)).tolist())
        for row, own in zip(batch.rows, logprobs, strict=True)
    ]
    return replace(batch, rows=rows)


def make_trainer(folder: Path, groups: Groups, **changes: Any) -> PolicyTrainer:
    """A trainer for `folder`; `changes` go into its PolicyConfig, `total_steps`, `seed`, `loss` and `reference` into its
    arguments; `overrides` are what the policy changes of the loss.

    Adam's eps is 1e-4: at 1e-8 it amplifies the rounding of gradients that are zero but for it, in every implementation alike.
    """
    defaults = {"total_steps": 10, "seed": 3, "name": "main", "loss": LossConfig(), "reference": None}
    arguments = {name: changes.pop(name, default) for name, default in defaults.items()}
    if overrides := changes.pop("overrides", None):
        changes["loss"] = overrides
    config = PolicyConfig(**({"model": str(folder), "lr": 1e-3, "adam_eps": 1e-4, "clip_grad_norm": 0.1} | changes))
    return PolicyTrainer(config=config, model_path=folder, layout=layout_of(config, groups), agents=AGENTS, **arguments)


def make_critic(folder: Path, groups: Groups, **changes: Any) -> Critic:
    """A critic for `folder`, with a clip that has a say."""
    settings = {"adam_eps": 1e-4, "weight_decay": 0.1, "tokens_per_microbatch": 40}
    config = PolicyConfig(model=str(folder), critic=CriticConfig(lr=1e-2, clip_value=0.3), **(settings | changes))
    return Critic("main", config, model_path=folder, layout=layout_of(config, groups), seed=3, total_steps=10)


def layout_of(config: PolicyConfig, groups: Groups) -> PolicyGroups:
    """`config`'s layout on all ranks."""
    return groups.layout(tp=config.tensor_parallel, pp=config.pipeline_parallel, cp=config.context_parallel)


def whole_logits(trainer: PolicyTrainer, rows: list[Row]) -> torch.Tensor:
    """[T, vocab] logits of the packed rows (each without its last token), gathered over the tensor-parallel ranks."""
    tp = trainer.groups.tp
    sequence_parallel = trainer.model.config.sequence_parallel
    packed = pack(rows, multiple=tp.size() if sequence_parallel else 1, device=host_platform.device())
    with torch.no_grad(), trainer.active():
        hidden = trainer.model(packed.ids, packed.positions, None, packed_seq_params=packed.params)[:, 0]
        if sequence_parallel:
            parts = [torch.empty_like(hidden) for _ in range(tp.size())]
            dist.all_gather(parts, hidden, group=tp)
            hidden = torch.cat(parts)
        logits = hidden @ trainer.model.head_weight.t()
        parts = [torch.empty_like(logits) for _ in range(tp.size())]
        dist.all_gather(parts, logits, group=tp)
    tokens = sum(row.num_tokens - 1 for row in rows)
    return torch.cat(parts, dim=1)[:tokens, : trainer.architecture.vocab]


def reference_logits(folder: Path, rows: list[Row]) -> torch.Tensor:
    """transformers' logits for the rows, each alone and without its last token, one after the other."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        ids = [[*row.prompt_ids, *row.response_ids[:-1]] for row in rows]
        return torch.cat([model(torch.tensor([each])).logits[0] for each in ids])


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weight_source()}


def gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """The last update's gradient under Hugging Face names; clipped in place if it was clipped."""
    source = WeightSource(trainer.model, trainer.architecture, trainer.groups, values=lambda parameter: parameter.main_grad)
    return {name: tensor.clone() for name, tensor in source}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def run_updates(trainer: PolicyTrainer, count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Updates number `first` to `first + count - 1` of a fixed sequence of batches; what each reported."""
    reports = []
    for i in range(first, first + count):
        result = trainer.update(make_batch(make_rows(seed=10 + i, versions=trainer.version)))
        gaps = {agent: asdict(gap) for agent, gap in result.gaps.items()}
        reports.append({"metrics": result.metrics, "agents": result.agents, "gaps": gaps})
    return reports


def run_critic(critic: Critic) -> dict[str, Any]:
    """Three updates towards fixed returns; what each said, and the values after them."""
    rows = make_rows()
    generator = torch.Generator().manual_seed(2)
    returns = [torch.randn(len(row.response_ids), generator=generator).tolist() for row in rows]
    weights = [1.0 / sum(len(row.response_ids) for row in rows)] * len(rows)
    before = critic.values(rows)
    updates = [critic.update(rows, returns, before, weights) for _ in range(3)]
    return {"updates": updates, "values": critic.values(rows)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest resets the warning filters that the package installs for Megatron's own code."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for message in host_platform.NOISE:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """This module."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def world():
    """This process as a world of one."""
    host_platform.set_threads(1)
    init_distributed(timeout_seconds=60)
    yield Groups(timeout_seconds=60)
    destroy()


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with one small model per family and tying, and one with a single key-value head."""
    root = tmp_path_factory.mktemp("models")
    for family, tied in MODELS:
        write_model(root / model_name(family, tied), family, tied)
    write_model(root / ONE_KV_HEAD, "qwen3", True, num_key_value_heads=1)
    return root


@pytest.fixture
def trainer_of(world, models):
    """trainer_of("qwen3-tied", lr=...): a trainer in this process."""
    return lambda name, **changes: make_trainer(models / name, world, **changes)


@pytest.fixture(scope="session")
def two_ranks(world, models, tmp_path_factory) -> dict[str, Any]:
    """What two ranks under torchrun found; one launch for all tests that need it."""
    shared = tmp_path_factory.mktemp("ranks")
    one_rank = make_trainer(models / "qwen3-tied", world)
    run_updates(one_rank, 1)
    one_rank.save(shared / "saved-by-one")
    return launch("ranks.py", 2, models, shared) | {"shared": shared}


@pytest.fixture(scope="session")
def four_ranks(models, tmp_path_factory) -> dict[str, Any]:
    """What four ranks found: two replicas, each of two tensor-parallel ranks."""
    shared = tmp_path_factory.mktemp("four")
    return launch("four_ranks.py", 4, models, shared) | {"shared": shared}


def launch(script: str, ranks: int, models: Path, shared: Path) -> dict[str, Any]:
    """Run a script of this folder under torchrun, one thread per rank, and read what rank 0 left in found.pt."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    result = subprocess.run(
        [*command, Path(__file__).with_name(script), models, shared],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return torch.load(shared / "found.pt", weights_only=False)
