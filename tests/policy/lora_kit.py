"""What test_lora.py and lora_ranks.py share: models with adapters, and the same computed by hand on a transformers model.

The adapters are drawn here under PEFT's names, so that names, shapes and arrangement are held against a table of its own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drmas.config.schema import LoraConfig, PolicyConfig
from drmas.policy import host_platform, lora, mcore_fixes, peft
from drmas.policy.architecture import Architecture, read_architecture
from drmas.policy.convert import load_hf
from drmas.policy.groups import Groups
from drmas.policy.megatron_config import policy_stack, transformer_config
from drmas.policy.model import build_model
from drmas.policy.optimizer import PolicyOptimizer
from drmas.policy.packing import pack
from drmas.policy.rng import PolicyRng
from drmas.types import Row

LORA = LoraConfig(rank=4, alpha=6.0)
SCALE = 1.5
LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
}
FUSED = {"q_proj": "q_proj", "k_proj": "q_proj", "v_proj": "q_proj", "gate_proj": "gate_proj", "up_proj": "gate_proj"}
"""Layers that share one A, by the first of them."""
_SAVING = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}


def draw_adapters(shape: Architecture, *, seed: int = 3, layers: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Adapters of every layer, or of those named, with B as large as A, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (width, shape.hidden),
        "self_attn.k_proj": (kv_width, shape.hidden),
        "self_attn.v_proj": (kv_width, shape.hidden),
        "self_attn.o_proj": (shape.hidden, width),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    tensors = {}
    for i in range(shape.layers):
        for module, (outputs, inputs) in sizes.items():
            leaf = module.partition(".")[2]
            name = f"base_model.model.model.layers.{i}.{module}"
            first = f"base_model.model.model.layers.{i}.{module.replace(leaf, FUSED.get(leaf, leaf))}.lora_A.weight"
            a = tensors.get(first, 0.2 * torch.randn(LORA.rank, inputs, generator=generator))
            b = 0.2 * torch.randn(outputs, LORA.rank, generator=generator)
            if not layers or leaf in layers:
                tensors |= {f"{name}.lora_A.weight": a.clone(), f"{name}.lora_B.weight": b}
    return tensors


def write_adapters(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A folder as PEFT leaves it; `changes` go into its adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors if "lora_" in name})
    config = {"peft_type": "LORA", "r": LORA.rank, "lora_alpha": LORA.alpha, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


def by_hand(folder: Path, tensors: dict[str, torch.Tensor], rows: list[Row]) -> dict[str, Any]:
    """Hidden states [T, hidden] of the transformers model with W + 1.5 B A, and autograd's gradients of A and B.

    The loss is that of `Policy.run`. One A that several layers share gets the sum of its gradients, under each name.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.requires_grad_(False)
    leaves, weights = {}, dict(model.named_parameters())
    for name in tensors:
        leaf = name.split(".")[-3]
        first = name.replace(leaf, FUSED.get(leaf, leaf)) if ".lora_A." in name else name
        leaves[name] = leaves.setdefault(first, tensors[first].clone().requires_grad_())
    for name in tensors:
        if ".lora_A." in name:
            base = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[base] = weights[base] + SCALE * leaves[name.replace("lora_A", "lora_B")] @ leaves[name]
    own = {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith("model.")}
    hidden = []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids[:-1]]])
        states = torch.func.functional_call(model.model, own, ids)[0]
        hidden.append(states[0])
    hidden = torch.cat(hidden)
    if leaves:
        (hidden * directions(*hidden.shape)).sum().backward()
    return {"hidden": hidden.detach(), "gradients": {name: leaf.grad for name, leaf in leaves.items()}}


def directions(tokens: int, width: int) -> torch.Tensor:
    """What the test's loss weighs each number of the hidden states with."""
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(13)) / tokens


class Policy:
    """A model with adapters and its groups."""

    def __init__(self, folder: Path, groups: Groups, *, config: LoraConfig | None = LORA, seed: int = 1, **layout: Any) -> None:
        mcore_fixes.apply()
        self.lora = config
        self.options = PolicyConfig(**({"model": str(folder), "lr": 1e-2, "clip_grad_norm": 1e9} | layout))
        self.architecture = read_architecture(folder)
        self.groups = groups.layout(tp=self.options.tensor_parallel, pp=self.options.pipeline_parallel)
        self.rng = PolicyRng(seed, tp_rank=self.groups.tp.rank())
        self.optimizer: PolicyOptimizer | None = None
        with self.active():
            stack = policy_stack("main", self.options, replicas=self.groups.dp.size())
            megatron = transformer_config(self.architecture, self.options, self.groups, stack)
            self.model = build_model(self.architecture, megatron, self.groups, stack)
            load_hf(self.model, self.architecture, folder, groups=self.groups)
            if config is not None:
                lora.add_adapters(self.model, config, self.groups, seed=seed)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with self.groups.active(), self.rng.lent():
            yield

    def read(self, folder: Path) -> None:
        with self.active():
            peft.read_peft_folder(self.model, self.architecture, self.groups, LORA, folder)

    def write(self, folder: Path) -> None:
        with self.active():
            base = Path(self.options.model)
            peft.write_peft_folder(self.model, self.architecture, self.groups, LORA, base=base, folder=folder)

    def adapters(self, **options: Any) -> dict[str, torch.Tensor]:
        with self.active():
            source = peft.adapter_source(self.model, self.architecture, self.groups, self.lora, **options)
            return {name: tensor.clone() for name, tensor in source}

    def train(self) -> None:
        """Give it an optimiser."""
        with self.active():
            self.optimizer = PolicyOptimizer("main", self.model, self.options, self.groups, total_steps=10)

    def run(self, rows: list[Row]) -> torch.Tensor:
        """[T, hidden] on every rank. With an optimiser, also the gradient of the sum of `directions` times it."""
        tp, pp = self.groups.tp, self.groups.pp
        sequence_parallel = self.model.config.sequence_parallel
        packed = pack(rows, multiple=tp.size() if sequence_parallel else 1, device=host_platform.device())
        tokens = sum(row.num_tokens - 1 for row in rows)
        found = torch.zeros(packed.ids.shape[1], self.architecture.hidden)
        weights = torch.zeros_like(found)
        weights[:tokens] = directions(tokens, found.shape[1])
        share = slice(None)
        if sequence_parallel:
            part = len(found) // tp.size()
            share = slice(tp.rank() * part, (tp.rank() + 1) * part)

        def step(_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            hidden = model(packed.ids, packed.positions, None, packed_seq_params=packed.params)

            def loss(hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
                found[share] = hidden[:, 0].detach()
                return (hidden[:, 0] * weights[share]).sum(), torch.zeros((), dtype=torch.int32), {}

            return hidden, loss

        pipeline = {"p2p_communicator": P2PCommunicator(pp_group=pp, config=self.model.config)} if pp.size() > 1 else {}
        with self.active(), torch.set_grad_enabled(self.optimizer is not None):
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            get_forward_backward_func(pp.size(), None)(
                forward_step_func=step,
                data_iterator=iter(()),
                model=[self.model if self.optimizer is None else self.optimizer.ddp],
                num_microbatches=1,
                seq_length=packed.ids.shape[1],
                micro_batch_size=1,
                forward_only=self.optimizer is None,
                collect_non_loss_data=self.optimizer is None,
                pg_collection=self.groups.collection,
                **pipeline,
            )
        if sequence_parallel and pp.rank() == pp.size() - 1:
            dist.all_reduce(found, group=tp)
        if pp.size() > 1:
            dist.broadcast(found, group=pp, group_src=pp.size() - 1)
        return found[:tokens]

    def step(self) -> float:
        """Apply the last gradient; its norm."""
        with self.active():
            return float(self.optimizer.step().norm)

    def save(self, folder: Path) -> None:
        """The adapters alone, through Megatron's sharded checkpoints."""
        folder.mkdir(exist_ok=True)
        with self.active():
            dist_checkpointing.save(self._sharded(), str(folder))

    def load(self, folder: Path) -> None:
        with self.active():
            self.model.load_state_dict(dist_checkpointing.load(self._sharded(), str(folder)), strict=False)

    def _sharded(self) -> dict[str, Any]:
        state = self.model.sharded_state_dict(metadata={**_SAVING, "dp_cp_group": self.groups.collection.dp_cp})
        return {name: value for name, value in state.items() if "lora_" in name}


def base_weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy.model.named_parameters() if not value.requires_grad}


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
