"""From hidden states to log-probs and to the loss: the bridge between the model and the kernels' output head.

Only the states that predict a response token enter the head, and whole logits are never formed. The head's weight is cut by
vocabulary rows over the tensor-parallel ranks, so each rank finds a part of the hidden states' gradient; the two Megatron
regions used here sum those parts on the way back. Called for every microbatch, on the pipeline's last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from drmas.policy.architecture import Architecture
from drmas.policy.groups import PolicyGroups
from drmas.policy.model import PolicyModel
from drmas.policy.packing import Packed
from drmas_kernels.linear_logprob import PolicyLoss, linear_logprob, linear_policy_loss
from drmas_kernels.policy_loss import PolicyLossOptions


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """What the loss needs to know of one microbatch's R response tokens, none of weight 0 but those of a stand-in row.

    `token_weight`, `advantage` [R] float32; `agent` [R] int64; `old_logprob` [R] float32, what the ratio is formed with, or
    None where it is 1; `ref_logprob` [R] float32, or None without a reference; `rollout_logprob` [R] float32, the engine's, or
    None where the loss doesn't correct for it.
    """

    token_weight: torch.Tensor
    advantage: torch.Tensor
    agent: torch.Tensor
    old_logprob: torch.Tensor | None
    ref_logprob: torch.Tensor | None
    rollout_logprob: torch.Tensor | None


def response_states(
    hidden: torch.Tensor, packed: Packed, model: PolicyModel, tp: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """[T (/ tp), 1, hidden] -> [R, hidden], whole on every tensor-parallel rank; backward sums over the ranks."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp)
        return hidden[:, 0].index_select(0, packed.source)
    return copy_to_tensor_model_parallel_region(hidden[:, 0].index_select(0, packed.source), group=tp)


class Head:
    """The output head of one policy's model."""

    def __init__(self, model: PolicyModel, architecture: Architecture, groups: PolicyGroups) -> None:
        self._model = model
        self._tp = groups.tp
        self._vocabulary = {
            "vocab_start": architecture.padded_vocab(groups.tp.size()) // groups.tp.size() * groups.tp.rank(),
            "vocab_size": architecture.vocab,
            "group": groups.tp if groups.tp.size() > 1 else None,
        }

    def logprobs(self, hidden: torch.Tensor, packed: Packed, temperatures: Sequence[float]) -> torch.Tensor:
        """[R] float32: the log-prob of each response token at its row's temperature. No gradient."""
        logprob, _ = linear_logprob(
            response_states(hidden, packed, self._model, self._tp),
            self._model.head_weight,
            packed.target,
            temperature=_per_token(temperatures, packed),
            **self._vocabulary,
        )
        return logprob

    def loss(
        self,
        hidden: torch.Tensor,
        packed: Packed,
        targets: TokenTargets,
        temperatures: Sequence[float],
        *,
        num_agents: int,
        options: PolicyLossOptions,
    ) -> PolicyLoss:
        """The microbatch's part of the loss, with its gradient, and its metrics per agent. Nothing waits for the device.

        Every token is a row of its own to the kernel, since a critic's advantages differ from token to token.
        """
        every = torch.arange(packed.target.numel(), device=packed.target.device)
        return linear_policy_loss(
            response_states(hidden, packed, self._model, self._tp),
            self._model.head_weight,
            packed.target,
            targets.old_logprob,
            every,
            targets.advantage,
            targets.token_weight,
            targets.agent,
            num_agents=num_agents,
            options=options,
            ref_logprob=targets.ref_logprob,
            rollout_logprob=targets.rollout_logprob,
            temperature=_per_token(temperatures, packed),
            index=every,
            check_values=False,  # they are checked on the host, as rows
            **self._vocabulary,
        )


def _per_token(temperatures: Sequence[float], packed: Packed) -> float | torch.Tensor:
    """One number where all rows agree, else one per response token."""
    if len(set(temperatures)) == 1:
        return temperatures[0]
    return packed.of_rows(temperatures)
