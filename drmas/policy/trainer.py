"""One trainable policy: Megatron model, optimiser and version; updates it from rows and answers for its log-probs.

Every method is collective: all ranks of the policy call it with equal arguments, in the same order. Rewards, advantages and row
weights are made above (drmas.core). Called by the controller.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from drmas.config.schema import LossConfig, PolicyConfig, RunConfig
from drmas.core.flops import token_cost, training_flops
from drmas.errors import ConfigError, DataError
from drmas.policy import checkpoint, export, host_platform, lora, mcore_fixes, peft
from drmas.policy.architecture import Architecture, read_architecture
from drmas.policy.batch import PolicyBatch, UpdateResult, check_batch, check_rows
from drmas.policy.convert import EMBEDDING, WeightSource, entries, frozen_names, load_hf
from drmas.policy.critic import Critic
from drmas.policy.gaps import RowGaps
from drmas.policy.groups import PolicyGroups
from drmas.policy.head import Head, TokenTargets
from drmas.policy.megatron_config import policy_stack, transformer_config
from drmas.policy.model import PolicyModel, build_model
from drmas.policy.moments import score_norms
from drmas.policy.optimizer import PolicyOptimizer
from drmas.policy.packing import Packed
from drmas.policy.passes import EMPTY, Passes, Work
from drmas.policy.reference import Reference
from drmas.policy.rng import PolicyRng
from drmas.policy.scorer import Scorer
from drmas.telemetry.trace import span
from drmas.types import Row
from drmas_kernels.policy_loss import AgentMetrics, PolicyLossOptions


class PolicyTrainer:
    """A policy on the ranks of `layout`: tensor-, context- and pipeline-parallel inside, data-parallel over the rest.

    Example: PolicyTrainer("main", config, model_path=folder, layout=Groups().layout(), seed=0, total_steps=10,
                           agents=["solver"], loss=LossConfig())
    """

    def __init__(
        self,
        name: str,
        config: PolicyConfig,
        *,
        model_path: Path,
        layout: PolicyGroups,
        seed: int,
        total_steps: int,
        agents: Sequence[str],
        loss: LossConfig,
        reference: Reference | None = None,
        critic: Critic | None = None,
    ) -> None:
        """Load `model_path` and, if the policy is trainable, make its optimiser for `total_steps` updates.

        `loss` has `mismatch` as `mismatch_rule` resolved it; unset is "none". `reference` is what a KL term measures from;
        under `config.lora` the base stands for it. `critic` learns with every update whose batch has returns. ModelError: the
        folder's model can't be trained here or doesn't fit the layout. ConfigError: settings that don't fit each other or the
        model.
        """
        self.name, self.config, self.model_path, self.agents = name, config, Path(model_path), list(agents)
        self.version = 0
        mcore_fixes.apply()
        self.architecture = read_architecture(self.model_path)
        self.architecture.check_layout(config, policy=name)
        self.groups = layout
        self.stack = policy_stack(name, config, replicas=layout.dp_cp.size())
        self.rng = PolicyRng(seed, tp_rank=layout.tp.rank())
        loss = loss.model_copy(update=config.loss.model_dump(exclude_none=True))
        self._reference, self.critic = reference, critic
        self._options = loss_options(loss)
        with self.active():
            self.model = self._load_model(seed)
            self.optimizer = None
            if config.trainable:
                overlap = self.stack.overlap
                self.optimizer = PolicyOptimizer(name, self.model, config, layout, total_steps=total_steps, overlap=overlap)
        self._passes = Passes(self.model, layout, config, self.stack, token_cost(self.architecture.shape))
        self._head = Head(self.model, self.architecture, layout)
        self._scorer = Scorer(self._passes, self._head)
        host_platform.trim()

    def _load_model(self, seed: int) -> PolicyModel:
        """The model with its weights, and `requires_grad` where it is trained."""
        settings = transformer_config(self.architecture, self.config, self.groups, self.stack)
        model = build_model(self.architecture, settings, self.groups, self.stack)
        load_hf(model, self.architecture, self.model_path, groups=self.groups)
        if not self.config.trainable:
            model.requires_grad_(False)
        elif self.config.lora is not None:
            lora.add_adapters(model, self.config.lora, self.groups, seed=seed)
            lora.share_base(model, key=(self.model_path, self.config.dtype, self.groups.ranks, *self.groups.sizes().items()))
        else:
            freeze(model, self.architecture, self.config.freeze, policy=self.name)
        return model

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
            return UpdateResult.idle(self.optimizer.lr)
        reference = self._reference_logprobs([batch.rows[i] for i in included], [batch.temperatures[i] for i in included])
        baseline = dict(zip(included, reference or [], strict=False))
        gaps = None if batch.on_policy else RowGaps(batch.rows, included, host_platform.device())
        started = time.perf_counter()
        with self.active():
            self.optimizer.zero_grad()
            metrics, work, squared = self._accumulate(batch, included, baseline, gaps, on_rows)
            with span("optimiser"):
                flags = self.optimizer.step()
                # The device is read from here on, once everything is under way.
                outcome = self.optimizer.record(float(flags.norm), bool(flags.applied))
        seconds = time.perf_counter() - started
        fresh = gaps.fresh(self.version) if gaps else {}
        self.version += int(outcome.applied)
        agents = metrics.per_token(self.agents)
        if gaps and self._options.mismatch != "none":  # the kernel's are from the policy that the ratio is formed with
            for name, values in gaps.divergence().items():
                agents[name] |= values
        if len(agents) == 1:
            squared = dict.fromkeys(agents, outcome.grad_norm**2)
        for name, square in squared.items():
            agents[name]["grad_norm"] = float(square) ** 0.5
        return UpdateResult(
            metrics={
                "loss": float(metrics.loss.sum()),
                "grad_norm": outcome.grad_norm,
                "lr": outcome.lr,
                "tokens": float(sum(batch.rows[i].num_tokens for i in included)),
                **self._work_metrics(work),
                "skipped": float(not outcome.applied),
                **self._teach(batch),
            },
            agents=agents,
            seconds=seconds,
            gaps=fresh,
        )

    def _teach(self, batch: PolicyBatch) -> dict[str, float]:
        """The critic's own update; nothing without one."""
        if self.critic is None or batch.returns is None:
            return {}
        with span("critic", self.name):
            learnt = self.critic.update(batch.rows, batch.returns, batch.values, batch.token_weights)
        return {f"critic_{name}": value for name, value in learnt.items()}

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """What the critic says of each response token of every row; 0 without one. The same on every rank."""
        if self.critic is None:
            return [[0.0] * len(row.response_ids) for row in rows]
        with span("critic", self.name):
            return self.critic.values(rows)

    def _accumulate(
        self,
        batch: PolicyBatch,
        included: Sequence[int],
        reference: Mapping[int, Sequence[float]],
        gaps: RowGaps | None,
        on_rows: Callable[[int], None] | None,
    ) -> tuple[AgentMetrics, torch.Tensor, dict[str, torch.Tensor]]:
        """The batch's gradient, ready for the optimiser; metrics, the work of all ranks, and squared gradient norms per agent.
        Fills `gaps`.

        Where norms are measured per agent, the agents' rows run one agent after the other and each gradient is set aside:
        exact, and every row still runs once.
        """
        agents = dict.fromkeys(batch.rows[i].agent for i in included)
        every = self.config.agent_grad_norm_every
        apart = len(agents) > 1 and every > 0 and self.version % every == 0
        parts = {name: [i for i in included if batch.rows[i].agent == name] for name in agents} if apart else {"": included}
        metrics, work, squared = AgentMetrics.zeros(len(self.agents), host_platform.device()), Work(), {}

        def loss(hidden: torch.Tensor, packed: Packed, share: list[int]) -> tuple[torch.Tensor, AgentMetrics]:
            return self._loss(batch, reference, gaps, hidden, packed, share)

        for name, part in parts.items():
            for piece in self._passes.backward(self.optimizer.ddp, batch.rows, part, loss, on_rows):
                metrics = metrics.merge(piece)
            work += self._passes.work
            if apart:
                squared[name] = self.optimizer.set_aside()
        for group in (self.groups.dp_cp, self.groups.pp):  # stages before the last have nothing, which changes nothing
            if group.size() > 1:
                metrics = metrics.all_reduce(group)
                if gaps:
                    gaps.reduce(group)
        return metrics, work.total(self.groups), squared

    def _work_metrics(self, counts: torch.Tensor) -> dict[str, float]:
        """Of the counts that `Work.total` gave."""
        tokens, saved, pairs, responses = counts.tolist()
        flops = training_flops(self.architecture.shape, tokens=tokens, pairs=pairs, responses=responses, config=self.config)
        return {"computed_tokens": float(tokens), "tokens_saved": float(saved), "flops": float(flops)}

    def _loss(
        self,
        batch: PolicyBatch,
        reference: Mapping[int, Sequence[float]],
        gaps: RowGaps | None,
        hidden: torch.Tensor,
        packed: Packed,
        share: list[int],
    ) -> tuple[torch.Tensor, AgentMetrics]:
        """This microbatch's part of the loss, and its metrics, for the rows `share` of the batch."""
        rows = [batch.rows[i] for i in share] or [EMPTY]
        advantages = [batch.advantages[i] for i in share] or [0.0]
        per_token = isinstance(advantages[0], Sequence)
        sampled = None if batch.on_policy else packed.of_tokens([row.logprobs for row in rows])
        old, options = sampled, self._options
        if batch.on_policy:
            options = replace(options, mismatch="none")
        elif options.mismatch != "none":
            before = batch.old_logprobs
            old = None if before is None else packed.of_tokens([before[i] for i in share] or [EMPTY.logprobs])
        targets = TokenTargets(
            token_weight=packed.of_rows([batch.token_weights[i] for i in share] or [0.0]),
            advantage=packed.of_tokens(advantages) if per_token else packed.of_rows(advantages),
            agent=packed.of_rows([self.agents.index(row.agent) for row in rows] if share else [0], torch.int64),
            old_logprob=old,
            ref_logprob=packed.of_tokens([reference[i] for i in share] or [EMPTY.logprobs]) if reference else None,
            rollout_logprob=sampled if options.mismatch != "none" else None,
        )
        temperatures = [batch.temperatures[i] for i in share] or [1.0]
        result = self._head.loss(hidden, packed, targets, temperatures, num_agents=len(self.agents), options=options)
        if gaps:
            gaps.add(result.logprob, sampled, packed, share)
        return result.loss, result.metrics

    def _reference_logprobs(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[list[float]] | None:
        """What a KL term measures from; None without one."""
        if self._options.kl is None:
            return None
        with span("reference", self.name):
            if self.config.lora is None:
                return self._reference.logprobs(rows, temperatures)
            with self.active(), lora.without_adapters(self.model):
                return self._scorer.logprobs(rows, temperatures)

    def logprobs(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[list[float]]:
        """The log-prob of every response token of every row, in order, at the rows' temperatures; the same on every rank."""
        self._check(rows, temperatures)
        with self.active():
            return self._scorer.logprobs(rows, temperatures)

    def score_norms(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[float]:
        """Of every row, the squared L2 norm of its score: of the gradient of the mean log-prob of its response tokens, at its
        temperature, over the trainable parameters. float64 sums; the same on every rank.

        Costs a forward and a backward pass per row, one row at a time. Weights, optimiser, random states and version are as
        before; gradients are not kept between updates, and not here. ConfigError: not trainable. DataError: as in `logprobs`.
        """
        self._check(rows, temperatures)
        if not rows:
            return []
        if self.optimizer is None:
            raise ConfigError(f"policies.{self.name}.trainable is false; there is no gradient to measure")
        before = self.rng.state
        with span("moments", self.name), self.active():
            found = score_norms(rows, temperatures, passes=self._passes, head=self._head, optimizer=self.optimizer)
            self.rng.restore(before)
        return found

    def _check(self, rows: Sequence[Row], temperatures: Sequence[float]) -> None:
        check_rows(rows, policy=self.name, vocab=self.architecture.vocab)
        if len(temperatures) != len(rows):
            raise DataError(
                f"policy {self.name!r}: {len(temperatures)} temperatures for {len(rows)} rows; expected one per row"
            )

    def weight_source(self) -> WeightSource:
        """The current weights under Hugging Face names, adapters merged; iterate it on all ranks."""
        return WeightSource(self.model, self.architecture, self.groups, values=lora.merged(self.model), before=self._settled)

    def sync_source(self) -> WeightSource:
        """What the policy's engine gets after an update: the weights, or the adapters alone where `lora.sync` says so."""
        if not self.config.syncs_adapters:
            return self.weight_source()
        return peft.adapter_source(self.model, self.architecture, self.groups, self.config.lora, before=self._settled)

    def _settled(self) -> None:
        """With overlapped communication the weights of the last step arrive during the next pass, or here."""
        if self.optimizer is not None:
            self.optimizer.settle()

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
        with self.active():
            export.write_hf_folder(self.weight_source(), model_path=self.model_path, folder=Path(folder))


def loss_options(loss: LossConfig) -> PolicyLossOptions:
    """The kernels' options; `loss` as a policy has it, its own overrides applied."""
    return PolicyLossOptions(
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        entropy_bonus=loss.entropy_bonus,
        kl=loss.kl,
        kl_coefficient=loss.kl_coefficient if loss.kl else 0.0,
        mismatch=loss.mismatch or "none",
        mismatch_low=loss.mismatch_low,
        mismatch_high=loss.mismatch_high,
    )


def mismatch_rule(config: RunConfig) -> Literal["none", "truncate", "mask"]:
    """The run's `loss.mismatch`; where that is unset, truncate if rollouts may be stale, else none.

    Example: loss.model_copy(update={"mismatch": mismatch_rule(config)})
    """
    return config.loss.mismatch or ("truncate" if config.rollout.max_staleness > 0 else "none")


def freeze(model: PolicyModel, architecture: Architecture, patterns: Sequence[str], *, policy: str) -> None:
    """No gradient for the parameters whose Hugging Face names match. ConfigError: what `frozen_names` refuses."""
    if not patterns:
        return
    frozen = frozen_names(architecture, patterns, policy=policy)
    for entry in entries(model, architecture):
        if entry.tensors[0][0] in frozen:
            entry.parameter.requires_grad_(False)
    if model.pre_process and not model.embedding.word_embeddings.weight.requires_grad:
        model.embedding.register_forward_hook(lora.ask_for_gradient)
    if architecture.tied and model.post_process and not model.pre_process:  # the last stage's copy of the embedding
        model.output_layer.weight.requires_grad_(EMBEDDING not in frozen)
