"""What test_optimizer.py and optimizer_ranks.py share: models with gradients that are given, and torch's AdamW on the same.

A tensor is drawn from its name, whole; a rank takes its tensor-parallel part. So the oracle needs no ranks: it steps the whole
tensors, with gradients summed over the replicas, and every rank compares its own part.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from drmas.config.schema import PolicyConfig
from drmas.policy.architecture import read_architecture
from drmas.policy.groups import Groups
from drmas.policy.megatron_config import policy_stack, transformer_config
from drmas.policy.model import build_model
from drmas.policy.optimizer import PolicyOptimizer, StepFlags
from drmas.policy.rng import PolicyRng

Draws = Callable[[int, int], int]
"""(step, replica) -> which gradient."""
SETTINGS = {"lr": 1e-2, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-3, "weight_decay": 0.1, "clip_grad_norm": 20.0}
"""No default, so that none can stand in for another; small models' gradients below have norms around 100."""
TIED_HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def drawn(name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{number}".encode()))
    return torch.randn(shape, generator=generator)


class Trained:
    """A model with weights from `drawn(name, shape, 0)` and its optimiser, in `changes` of the configuration.

    `freeze` and `buckets` are starts of names: of parameters that aren't trained, and of those that get a bucket of their own,
    as Megatron gives it to an embedding that two stages share.
    """

    def __init__(
        self, folder: Path, groups: Groups, *, overlap: bool = False, bucket_size: int | None = None, **changes: Any
    ) -> None:
        arguments = {"total_steps": 10, "freeze": (), "buckets": ()}
        arguments |= {name: changes.pop(name) for name in arguments if name in changes}
        self.config = PolicyConfig(model=str(folder), **(SETTINGS | changes))
        layout = {name: getattr(self.config, f"{name}_parallel") for name in ("tensor", "pipeline", "context")}
        self.groups = groups.layout(tp=layout["tensor"], pp=layout["pipeline"], cp=layout["context"])
        self.architecture = read_architecture(folder)
        stack = policy_stack("main", self.config, replicas=1)
        with self.groups.active(), PolicyRng(0, tp_rank=self.groups.tp.rank()).lent():
            megatron = transformer_config(self.architecture, self.config, self.groups, stack)
            self.model = build_model(self.architecture, megatron, self.groups, stack)
            for name, parameter in self.named():
                parameter.requires_grad_(not name.startswith(arguments["freeze"]))
                if arguments["buckets"] and name.startswith(arguments["buckets"]):
                    parameter.shared_embedding = True
                parameter.data.copy_(self.part(name, parameter, 0))
            self.optimizer = PolicyOptimizer(
                "main",
                self.model,
                self.config,
                self.groups,
                total_steps=arguments["total_steps"],
                overlap=overlap,
                bucket_size=bucket_size,
            )

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters under names that count layers through all pipeline stages; a tied head is called as the embedding."""
        layers = self.model.decoder.layers
        for name, parameter in self.model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(layers[int(parts[2])].layer_number - 1)
            tied = name == TIED_HEAD and self.architecture.tied
            yield EMBEDDING if tied else ".".join(parts), parameter

    def whole_shape(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        shape = list(parameter.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= self.groups.tp.size()
        return tuple(shape)

    def part(self, name: str, parameter: torch.nn.Parameter, number: int) -> torch.Tensor:
        """This rank's part of a drawn tensor."""
        return self.cut(parameter, drawn(name, self.whole_shape(parameter), number))

    def cut(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        if not getattr(parameter, "tensor_model_parallel", False):
            return whole
        return whole.chunk(self.groups.tp.size(), dim=parameter.partition_dim)[self.groups.tp.rank()]

    def backward(self, *numbers: int, spoil: float = 0.0) -> None:
        """A pass whose gradients are the drawn tensors `numbers`, a microbatch each, summed over the ranks as after any pass.

        Both stages' copies of a tied embedding get one; `spoil` is added to one element of this rank's.
        """
        config = self.model.config

        def forward(number: int) -> torch.Tensor:
            total = torch.zeros((), requires_grad=True)  # a stage that is frozen whole has nothing else
            for name, parameter in self.named():
                if parameter.requires_grad:
                    total = total + (parameter * self.part(name, parameter, number).to(parameter.dtype)).sum()
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return total + spoil * trained[0].flatten()[0] if spoil else total

        self.model.forward = forward
        with self.groups.active():
            *first, last = numbers
            with (config.no_sync_func or torch.enable_grad)():
                for number in first:
                    self.optimizer.ddp(number).backward()
            self.optimizer.ddp(last).backward()
            config.finalize_model_grads_func([self.optimizer.ddp], pg_collection=self.groups.collection)
        del self.model.forward

    def update(self, *numbers: int, **options: float) -> StepFlags:
        with self.groups.active():
            self.optimizer.zero_grad()
            self.backward(*numbers, **options)
            return self.finish()

    def finish(self) -> StepFlags:
        """The step alone."""
        with self.groups.active():
            flags = self.optimizer.step()
            self.optimizer.record(float(flags.norm), bool(flags.applied))
            self.optimizer.settle()
        return flags

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's stretches of main parameters and moments, as Megatron sees them; parameter, exp_avg, exp_avg_sq."""
        megatron = self.optimizer.megatron
        mine = [(name, parameter) for name, parameter in self.named() if parameter in megatron.model_param_gbuf_map]
        return {name: megatron._get_main_param_and_optimizer_states(parameter) for name, parameter in mine}

    def snapshot(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: {key: tensor.detach().clone() for key, tensor in each.items()} for name, each in self.state().items()}


class Oracle:
    """torch.optim.AdamW with clip_grad_norm_ over the whole tensors of `trained`'s model."""

    def __init__(
        self, trained: Trained, *, shapes: dict[str, tuple[int, ...]] | None = None, freeze: tuple[str, ...] = ()
    ) -> None:
        config = trained.config
        self._dtype = getattr(torch, config.dtype)
        shapes = shapes or {name: trained.whole_shape(parameter) for name, parameter in trained.named()}
        starts = {name: drawn(name, shape, 0).to(self._dtype).float() for name, shape in shapes.items()}
        self.params = {name: torch.nn.Parameter(start) for name, start in starts.items() if not name.startswith(freeze)}
        decayed = [p for name, p in self.params.items() if self.decays(name, config.no_decay)]
        others = [p for name, p in self.params.items() if not self.decays(name, config.no_decay)]
        self._clip, self._twice = config.clip_grad_norm, trained.architecture.tied and trained.groups.pp.size() > 1
        self._adam = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )

    @staticmethod
    def decays(name: str, no_decay: list[str]) -> bool:
        """By the names as they are here, spelt out."""
        if name == EMBEDDING:
            return "embedding" not in no_decay
        if name.endswith(".bias"):
            return "bias" not in no_decay
        last = name.split(".")[-2]
        return "norm" not in no_decay or last not in (
            "input_layernorm",
            "pre_mlp_layernorm",
            "q_layernorm",
            "k_layernorm",
            "final_layernorm",
        )

    def update(self, *numbers: int, lr: float | None = None) -> float:
        """One step with the sum of the drawn gradients, at the rate `lr` or the configuration's; the norm."""
        for group in self._adam.param_groups:
            group["lr"] = lr or group["lr"]
        for name, parameter in self.params.items():
            times = 2 if self._twice and name == EMBEDDING else 1
            parts = [drawn(name, tuple(parameter.shape), number).to(self._dtype).float() * times for number in numbers]
            parameter.grad = torch.stack(parts).sum(0)
        norm = torch.nn.utils.clip_grad_norm_(list(self.params.values()), self._clip)
        self._adam.step()
        return float(norm)

    def difference(self, trained: Trained) -> float:
        """The largest difference of weights, in this rank's part; of bfloat16 models after rounding the oracle's."""
        worst = 0.0
        for name, parameter in trained.named():
            if parameter.requires_grad:
                whole = trained.cut(parameter, self.params[name].detach()).to(parameter.dtype)
                worst = max(worst, float((parameter.detach().float() - whole.float()).abs().max()))
        return worst

    def main_difference(self, trained: Trained) -> float:
        """The largest difference of fp32 parameters, in the stretches that this rank owns."""
        worst = 0.0
        for name, parameter in trained.named():
            if parameter in trained.optimizer.megatron.model_param_gbuf_map:
                place = trained.optimizer.megatron._get_model_param_range_map(parameter)["param"]
                whole = trained.cut(parameter, self.params[name].detach()).flatten()[place.start : place.end]
                main = trained.optimizer.megatron._get_main_param_and_optimizer_states(parameter)["param"]
                worst = max(worst, float((main.detach() - whole).abs().max()))
        return worst


def largest_state_difference(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name][key] - other[name][key]).detach().abs().max()) for name in one for key in one[name])
