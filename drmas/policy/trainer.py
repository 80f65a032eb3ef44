"""One trainable policy: Megatron model, optimiser and version; updates it from rows and answers for its log-probs.

Every rank holds the same list of rows and works out the same plan, so ranks can't disagree about who trains what; each then
packs its own data-parallel share. Every method is collective: all ranks call it with equal arguments, in the same order.
Rewards, advantages and row weights are made above (drmas.core). Called by the controller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from drmas.config.schema import LossConfig, PolicyConfig
from drmas.core.batching import plan_microbatches
from drmas.errors import ConfigError, DataError
from drmas.policy import checkpoint, export, host_platform, mcore_fixes
from drmas.policy.architecture import read_architecture
from drmas.policy.batch import PolicyBatch, UpdateResult, check_batch, check_rows
from drmas.policy.convert import WeightSource, load_hf
from drmas.policy.groups import Groups
from drmas.policy.head import Head, TokenTargets
from drmas.policy.model import build_model, transformer_config
from drmas.policy.optimizer import PolicyOptimizer
from drmas.policy.packing import Packed, pack
from drmas.policy.rng import PolicyRng
from drmas.types import Row
from drmas_kernels.policy_loss import AgentMetrics, PolicyLossOptions

_EMPTY = Row(
    task="",
    episode="",
    agent="",
    policy="",
    turn=0,
    prompt_ids=[0],
    response_ids=[0],
    logprobs=[0.0],
    versions=[0],
    reward=None,
)
"""Stands in where a rank has no rows for a microbatch that other ranks have; its weight is 0 (I4)."""


class PolicyTrainer:
    """A policy on all ranks of the world, tensor-parallel inside, data-parallel over the rest.

    Example: PolicyTrainer("main", config, model_path=folder, groups=Groups(), seed=0, total_steps=10, agents=["solver"],
                           loss=LossConfig())
    """

    def __init__(
        self,
        name: str,
        config: PolicyConfig,
        *,
        model_path: Path,
        groups: Groups,
        seed: int,
        total_steps: int,
        agents: Sequence[str],
        loss: LossConfig,
    ) -> None:
        """Load `model_path` and, if the policy is trainable, make its optimiser for `total_steps` updates.

        ModelError: the folder's model can't be trained here or doesn't fit the layout. ConfigError: the layout doesn't fit the
        number of processes.
        """
        self.name, self.config, self.model_path, self.agents = name, config, Path(model_path), list(agents)
        self.version = 0
        mcore_fixes.apply()
        self.architecture = read_architecture(self.model_path)
        self.architecture.check_tensor_parallel(config.tensor_parallel, policy=name)
        self.groups = groups.layout(tp=config.tensor_parallel)
        self.rng = PolicyRng(seed, tp_rank=self.groups.tp.rank())
        self._options = PolicyLossOptions(
            clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip, entropy_bonus=loss.entropy_bonus
        )
        with self.active():
            megatron_config = transformer_config(self.architecture, config, tp=config.tensor_parallel)
            self.model = build_model(self.architecture, megatron_config, self.groups)
            load_hf(self.model, self.architecture, self.model_path, tp_group=self.groups.tp)
            self.optimizer = None
            if config.trainable:
                self.optimizer = PolicyOptimizer(name, self.model, config, self.groups, total_steps=total_steps)
            else:
                self.model.requires_grad_(False)
        self._head = Head(self.model, self.architecture, self.groups)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """This policy's groups and random states in force; whoever runs `model` by hand needs it."""
        with self.groups.active(), self.rng.lent():
            yield

    def update(self, batch: PolicyBatch, *, on_rows: Callable[[int], None] | None = None) -> UpdateResult:
        """One optimiser step on the exact weighted sum over the batch's rows (I5); `version` grows by one if it was applied.

        `on_rows` hears of this rank's rows as they go through, microbatch by microbatch.

        DataError: a row that can't be trained on, such as one with a token of unknown version (I2). ConfigError: not trainable.
        """
        if self.optimizer is None:
            raise ConfigError(f"policies.{self.name}.trainable is false; this policy can't be updated")
        vocab = self.architecture.vocab
        check_batch(batch, policy=self.name, version=self.version, agents=self.agents, vocab=vocab)
        included = batch.included()
        if not included:
            idle = {"loss": 0.0, "grad_norm": 0.0, "lr": self.optimizer.lr, "tokens": 0.0, "skipped": 1.0}
            return UpdateResult(idle)

        def after(hidden: torch.Tensor, packed: Packed, share: list[int]) -> tuple[torch.Tensor, torch.Tensor, AgentMetrics]:
            if on_rows is not None:
                on_rows(len(share))
            return self._loss(batch, hidden, packed, share)

        with self.active():
            self.optimizer.zero_grad()
            pieces = self._run(self.optimizer.ddp, batch.rows, included, after)
            outcome = self.optimizer.step()
        self.version += int(outcome.applied)
        metrics = AgentMetrics.zeros(len(self.agents), host_platform.device())
        for piece in pieces:
            metrics = metrics.merge(piece)
        metrics = metrics.all_reduce(self.groups.dp)
        return UpdateResult(
            metrics={
                "loss": float(metrics.loss.sum()),
                "grad_norm": outcome.grad_norm,
                "lr": outcome.lr,
                "tokens": float(sum(batch.rows[i].num_tokens for i in included)),
                "skipped": float(not outcome.applied),
            },
            agents=metrics.per_token(self.agents),
        )

    def _loss(
        self, batch: PolicyBatch, hidden: torch.Tensor, packed: Packed, share: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, AgentMetrics]:
        """Megatron's loss triple for the rows `share` of the batch: loss, a token count that divides nothing, metrics."""
        device = host_platform.device()
        rows = [batch.rows[i] for i in share]
        old = None if batch.on_policy else [value for row in rows for value in row.logprobs]
        advantages = [batch.advantages[i] for i in share] or [0.0]
        weights = [batch.token_weights[i] for i in share] or [0.0]
        agents = [self.agents.index(row.agent) for row in rows] or [0]
        if old is not None:
            old = torch.tensor(old or _EMPTY.logprobs, dtype=torch.float32, device=device)
        targets = TokenTargets(
            old_logprob=old,
            token_weight=torch.tensor(weights, dtype=torch.float32, device=device)[packed.row],
            advantage=torch.tensor(advantages, dtype=torch.float32, device=device),
            agent=torch.tensor(agents, dtype=torch.int64, device=device),
        )
        temperatures = [batch.temperatures[i] for i in share] or [1.0]
        result = self._head.loss(hidden, packed, targets, temperatures, num_agents=len(self.agents), options=self._options)
        return result.loss, torch.zeros((), dtype=torch.int32, device=device), result.metrics

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[list[float]]:
        """The log-prob of every response token of every row, in order, at the rows' temperatures; the same on every rank."""
        check_rows(rows, policy=self.name, vocab=self.architecture.vocab)
        if len(temperatures) != len(rows):
            raise DataError(
                f"policy {self.name!r}: {len(temperatures)} temperatures for {len(rows)} rows; expected one per row"
            )
        if not rows:
            return []
        ends = torch.tensor([len(row.response_ids) for row in rows]).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        device = host_platform.device()
        found = torch.zeros(ends[-1], dtype=torch.float32, device=device)

        def collect(hidden: torch.Tensor, packed: Packed, share: list[int]) -> None:
            values = self._head.logprobs(hidden, packed, [temperatures[i] for i in share] or [1.0])
            if share:
                places = torch.cat([torch.arange(starts[i], ends[i], device=device) for i in share])
                found[places] = values

        with self.active():
            self._run(self.model, rows, range(len(rows)), collect)
            dist.all_reduce(found, group=self.groups.dp)
        values = found.tolist()
        return [values[start:end] for start, end in zip(starts, ends, strict=True)]

    def _run(
        self,
        model: torch.nn.Module,
        rows: Sequence[Row],
        chosen: Sequence[int],
        after: Callable[[torch.Tensor, Packed, list[int]], Any],
    ) -> list[Any]:
        """Send this rank's share of the `chosen` rows through the model; with `_loss` as `after`, gradients too.

        `after(hidden, packed, share)` runs once per microbatch; what it returns (its last part, for a loss) is listed.
        """
        lengths = [rows[i].num_tokens for i in chosen]
        plan = plan_microbatches(lengths, budget=self.config.tokens_per_microbatch, num_ranks=self.groups.dp.size())
        shares = [[chosen[j] for j in microbatch] for microbatch in plan[self.groups.dp.rank()]]
        multiple = self.groups.tp.size() if self.model.config.sequence_parallel else 1

        def forward(iterator: Iterator[list[int]], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            share = next(iterator)
            packed = pack([rows[i] for i in share] or [_EMPTY], multiple=multiple, device=host_platform.device())
            hidden = model(
                input_ids=packed.ids, position_ids=packed.positions, attention_mask=None, packed_seq_params=packed.params
            )
            return hidden, lambda hidden, non_loss_data=False: after(hidden, packed, share)

        return get_forward_backward_func(self.groups.pp.size(), None)(
            forward_step_func=forward,
            data_iterator=iter(shares),
            model=[model],
            num_microbatches=len(shares),
            seq_length=self.config.tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=not torch.is_grad_enabled(),
            collect_non_loss_data=not torch.is_grad_enabled(),
            pg_collection=self.groups.collection,
        )

    def weight_source(self) -> WeightSource:
        """The current weights under Hugging Face names; iterate it on all ranks."""
        return WeightSource(self.model, self.architecture, self.groups.tp)

    def save(self, folder: Path) -> None:
        """Write a checkpoint that a killed process leaves whole or not at all; replaces an older one of that name."""
        with self.active():
            checkpoint.save(self, Path(folder))

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, of another layout too. CheckpointError: missing, incomplete, or of another model."""
        with self.active():
            checkpoint.load(self, Path(folder))

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder that transformers and vLLM open; a killed process leaves it whole or not at all."""
        export.write_hf_folder(self.weight_source(), model_path=self.model_path, folder=Path(folder))
