"""One rank of the vocabulary-parallel tests: `vocab_parallel_rank.py RANK WORLD STORE CASES OUT`, started by the test."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from drmas_kernels.linear_logprob import linear_logprob, linear_policy_loss
from drmas_kernels.policy_loss import PolicyLossOptions

NAMES = ("target", "old_logprob", "row", "advantage", "token_weight", "agent")


def run(case: dict, rank: int, world: int) -> dict:
    shard = case["weight"].chunk(world)[rank].clone().requires_grad_()
    hidden = case["hidden"].clone().requires_grad_()
    where = {"vocab_start": rank * shard.shape[0], "vocab_size": case["vocab_size"], "group": dist.group.WORLD}
    common = where | {"temperature": case["temperature"], "chunk": case["chunk"]}
    result = linear_policy_loss(
        hidden, shard, *(case[name] for name in NAMES), num_agents=2, options=PolicyLossOptions(**case["options"]), **common
    )
    result.loss.backward()
    logprob, entropy = linear_logprob(hidden, shard, case["target"], **common)
    both = result.metrics.all_reduce(dist.group.WORLD)
    return {
        "loss": result.loss.detach(),
        "logprob": result.logprob,
        "scored": logprob,
        "entropy": entropy,
        "dhidden": hidden.grad,
        "dweight": shard.grad,
        "metrics": result.metrics,
        "reduced": both,
    }


def main() -> None:
    rank, world, store, cases, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.save([run(case, rank, world) for case in torch.load(cases)], out)
    try:
        linear_logprob(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), vocab_start=1, group=dist.group.WORLD)
    except ValueError as error:
        sys.stdout.write(str(error))
    dist.destroy_process_group()


main()
