"""What test_model.py and attention_ranks.py share: a model without a trainer, and its gradients of a loss on given rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from drmas.config.schema import PolicyConfig
from drmas.policy import host_platform, mcore_fixes
from drmas.policy.architecture import read_architecture
from drmas.policy.convert import WeightSource, load_hf
from drmas.policy.groups import Groups
from drmas.policy.head import response_states
from drmas.policy.megatron_config import ddp_config, policy_stack, transformer_config
from drmas.policy.model import build_model
from drmas.policy.optimizer import Replicas, finalize_model_grads
from drmas.policy.packing import pack
from drmas.policy.rng import PolicyRng
from drmas.types import Row

VOCAB = 131


def tree_rows() -> list[Row]:
    """Six rows: two that share 18 + 17 tokens, one that shares the first 18 with them, and three of their own."""
    generator = torch.Generator().manual_seed(3)

    def drawn(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    start, more = drawn(18), drawn(17)
    prompts = [start + more, start + more, start + drawn(3), drawn(9), drawn(9), drawn(4)]
    responses = [drawn(count) for count in (5, 3, 6, 4, 4, 1)]
    return [
        Row(
            task="t",
            episode=f"e{number}",
            agent="solver",
            policy="main",
            turn=0,
            prompt_ids=prompt,
            response_ids=response,
            logprobs=[-1.0] * len(response),
            versions=[0] * len(response),
            reward=1.0,
        )
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


def slopes() -> torch.Tensor:
    """[rows, tokens, vocabulary]: what the loss multiplies each logit with."""
    return torch.randn(6, 6, VOCAB, generator=torch.Generator().manual_seed(4)) / VOCAB


class Built:
    """The model in `folder` under Megatron's DDP, on all ranks; `changes` go into its PolicyConfig."""

    def __init__(self, folder: Path, groups: Groups, **changes) -> None:
        mcore_fixes.apply()
        self.config = PolicyConfig(model=str(folder), **changes)
        layout = {name: getattr(self.config, f"{name}_parallel") for name in ("tensor", "pipeline", "context")}
        self.groups = groups.layout(tp=layout["tensor"], pp=layout["pipeline"], cp=layout["context"])
        self.architecture = read_architecture(folder)
        self.stack = policy_stack("main", self.config, replicas=self.groups.dp_cp.size())
        self.rng = PolicyRng(0, tp_rank=self.groups.tp.rank())
        with self.groups.active(), self.rng.lent():
            settings = transformer_config(self.architecture, self.config, self.groups, self.stack)
            self.model = build_model(self.architecture, settings, self.groups, self.stack)
            load_hf(self.model, self.architecture, folder, groups=self.groups)
            self.model.train()
            # Every rank is to end with the whole gradient; what overlaps asks for a gradient of every parameter.
            whole = {"use_distributed_optimizer": False, "overlap_param_gather": False}
            buffers = replace(ddp_config(self.groups, overlap=True), **whole)
            self.ddp = Replicas(settings, buffers, self.model, pg_collection=self.groups.collection)

    def run(self, rows: Sequence[Row], *, share_prefixes: bool = True, passes: int = 1) -> torch.Tensor:
        """The loss per row [rows], over all ranks; leaves its gradient, `passes` times, in main_grad."""
        tp, cp = self.groups.tp, self.groups.cp
        multiple = tp.size() if self.model.config.sequence_parallel else 1
        packed = pack(
            rows,
            device=host_platform.device(),
            multiple=multiple,
            share_prefixes=share_prefixes,
            cp_size=cp.size(),
            cp_rank=cp.rank(),
        )
        share = self.architecture.padded_vocab(tp.size()) // tp.size()
        token = packed.of_tokens([range(len(row.response_ids)) for row in rows], torch.int64)
        mine = slopes()[packed.row, token][:, tp.rank() * share : (tp.rank() + 1) * share]
        with self.groups.active(), self.rng.lent():
            self.ddp.zero_grad_buffer()
            for number in range(passes):
                with self.ddp.no_sync() if number < passes - 1 else torch.enable_grad():
                    hidden = self.ddp(packed.ids, packed.positions, None, packed_seq_params=packed.params)
                    logits = response_states(hidden, packed, self.model, tp) @ self.model.head_weight.t()
                    loss = (logits[:, : mine.shape[1]].float() * mine).sum(-1)
                    loss.sum().backward()
            finalize_model_grads([self.ddp], None, pg_collection=self.groups.collection)
            per_row = torch.zeros(len(rows)).index_add_(0, packed.row, loss.detach())
            dist.all_reduce(per_row, group=tp)
            dist.all_reduce(per_row, group=cp)
        return per_row

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the last run left, under Hugging Face names."""
        with self.groups.active():
            source = WeightSource(self.model, self.architecture, self.groups, values=lambda parameter: parameter.main_grad)
            return {name: tensor.clone() for name, tensor in source}


def reference(
    folder: Path, rows: Sequence[Row], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """transformers' loss per row, each alone, and the gradient of their sum."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    losses = []
    for number, row in enumerate(rows):
        logits = model(torch.tensor([[*row.prompt_ids, *row.response_ids[:-1]]])).logits[0, len(row.prompt_ids) - 1 :]
        losses.append((logits.float() * slopes()[number, : len(logits)]).sum())
        losses[-1].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.stack(losses).detach(), gradients
