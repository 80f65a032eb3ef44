"""A policy's critic: the same architecture with one number per token instead of logits, its own optimiser, the same layout.

    loss = sum of w_t 0.5 max((V_t - R_t)^2, (clip(V_t, V_old,t - c, V_old,t + c) - R_t)^2)

as in PPO's reference implementation (arXiv 1707.06347 gives the policy's clip; the value's clip is that of its code). V_t is
read from the hidden state that predicts response token t, in float32. The value head starts at zero, so that the first
advantages are the returns. Every method is collective over the policy's ranks. Called by the controller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from drmas.config.schema import PolicyConfig
from drmas.core.flops import token_cost
from drmas.policy import checkpoint, host_platform, mcore_fixes
from drmas.policy.architecture import read_architecture
from drmas.policy.convert import load_hf
from drmas.policy.groups import PolicyGroups
from drmas.policy.megatron_config import policy_stack, transformer_config
from drmas.policy.model import PolicyModel, build_model
from drmas.policy.optimizer import PolicyOptimizer
from drmas.policy.packing import Packed
from drmas.policy.passes import Passes
from drmas.policy.rng import PolicyRng
from drmas.telemetry.trace import span
from drmas.types import Row


class ValueHead(torch.nn.Module):
    """One number per hidden state, held alike by all tensor-parallel ranks; starts at zero."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype, device=host_platform.device()))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R] float32."""
        return states.float() @ self.weight[0].float()


class Critic:
    """Values of a policy's rows, and their training. `layout` is the policy's.

    Example: Critic("main", config, model_path=folder, layout=Groups().layout(), seed=0, total_steps=10)
    """

    def __init__(
        self, name: str, config: PolicyConfig, *, model_path: Path, layout: PolicyGroups, seed: int, total_steps: int
    ) -> None:
        """ModelError: the folder's model can't be built here or doesn't fit the layout."""
        changes = {"lr": config.critic.lr, "lr_min": min(config.lr_min, config.critic.lr), "lora": None, "freeze": []}
        self.name = f"{name}.critic"
        self.config = config.model_copy(update=changes | {"clip_grad_norm": config.critic.clip_grad_norm})
        self.version = 0
        mcore_fixes.apply()
        self.architecture = read_architecture(Path(model_path))
        self.architecture.check_layout(config, policy=name)
        self.groups, self.rng = layout, PolicyRng(seed, tp_rank=layout.tp.rank())
        self.stack = policy_stack(name, config, replicas=layout.dp_cp.size())
        with self.active():
            self.model = self._load_model(Path(model_path))
            self.optimizer = PolicyOptimizer(
                self.name, self.model, self.config, layout, total_steps=total_steps, overlap=self.stack.overlap
            )
        self._passes = Passes(self.model, layout, self.config, self.stack, token_cost(self.architecture.shape))
        host_platform.trim()

    def _load_model(self, folder: Path) -> PolicyModel:
        """The policy's architecture whose output layer, which isn't loaded, is a value head."""
        untied = replace(self.architecture, tied=False)
        settings = transformer_config(untied, self.config, self.groups, self.stack)
        model = build_model(untied, settings, self.groups, self.stack)
        load_hf(model, replace(self.architecture, tied=True), folder, groups=self.groups)
        if self.groups.is_last_stage:
            model.output_layer = ValueHead(self.architecture.hidden, settings.params_dtype)
        return model

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The policy's groups and the critic's own random states in force."""
        with self.groups.active(), self.rng.lent():
            yield

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """V of the state before each response token of every row, in order; the same on every rank."""
        with self.active():
            return self._passes.per_token(rows, lambda hidden, packed, _: self._values(hidden, packed))

    def update(
        self,
        rows: Sequence[Row],
        returns: Sequence[Sequence[float]],
        values: Sequence[Sequence[float]],
        token_weights: Sequence[float],
    ) -> dict[str, float]:
        """One optimiser step towards `returns`, of the rows that have a weight; `values` are those of before.

        Returns loss (what was minimised), error (its root mean square without the clip), grad_norm, lr, skipped.
        """
        included = [i for i, weight in enumerate(token_weights) if weight != 0.0]
        if not included:
            return {"loss": 0.0, "error": 0.0, "grad_norm": 0.0, "lr": self.optimizer.lr, "skipped": 1.0}
        device = host_platform.device()

        def loss(hidden: torch.Tensor, packed: Packed, share: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            value = self._values(hidden, packed)
            if not share:
                return value.sum() * 0.0, torch.zeros(3, dtype=torch.float64, device=device)
            target, before = (packed.of_tokens([table[i] for i in share]) for table in (returns, values))
            weight = packed.of_rows([token_weights[i] for i in share])
            error = (value - target).square()
            worse = error
            if self.config.critic.clip_value is not None:
                clip = self.config.critic.clip_value
                worse = torch.maximum(error, (value.clamp(before - clip, before + clip) - target).square())
            total = 0.5 * (weight * worse).sum()
            sums = torch.stack([total, error.sum(), torch.ones_like(error).sum()])
            return total, sums.detach().double()

        with self.active():
            self.optimizer.zero_grad()
            sums = torch.zeros(3, dtype=torch.float64, device=device)
            for piece in self._passes.backward(self.optimizer.ddp, rows, included, loss):
                sums += piece
            for group in (self.groups.dp_cp, self.groups.pp):
                dist.all_reduce(sums, group=group)
            with span("optimiser"):
                flags = self.optimizer.step()
                outcome = self.optimizer.record(float(flags.norm), bool(flags.applied))
        self.version += int(outcome.applied)
        total, squares, tokens = sums.tolist()
        return {
            "loss": total,
            "error": (squares / tokens) ** 0.5,
            "grad_norm": outcome.grad_norm,
            "lr": outcome.lr,
            "skipped": float(not outcome.applied),
        }

    def _values(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """[R] float32. All tensor-parallel ranks do the same, so the way back sums over none of them."""
        if self.model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.groups.tp)
        return self.model.output_layer(hidden[:, 0].index_select(0, packed.source))

    def save(self, folder: Path) -> None:
        with self.active():
            checkpoint.save(self, Path(folder))

    def load(self, folder: Path) -> None:
        with self.active():
            checkpoint.load(self, Path(folder))
