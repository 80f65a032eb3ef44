"""One rank of the vocabulary-parallel tests: `vocab_parallel_rank.py RANK WORLD STORE CASES OUT`, started by the test.

It runs with TRITON_INTERPRET=1 and computes every case with both implementations.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from drmas_kernels import backend
from drmas_kernels.linear_logprob import linear_logprob, linear_policy_loss
from drmas_kernels.policy_loss import PolicyLossOptions
from tests.kernels import interpreter

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
    with torch.no_grad():
        scored, entropy = linear_logprob(hidden, shard, case["target"], **common)
    again, shard_again = hidden.detach().requires_grad_(), shard.detach().requires_grad_()
    logprob, _ = linear_logprob(again, shard_again, case["target"], **common)
    (case["token_weight"] * logprob).sum().backward()
    both = result.metrics.all_reduce(dist.group.WORLD)
    return {
        "loss": result.loss.detach(),
        "logprob": result.logprob,
        "scored": scored,
        "entropy": entropy,
        "dhidden": hidden.grad,
        "dweight": shard.grad,
        "recomputed": logprob.detach(),
        "dhidden_recomputed": again.grad,
        "dweight_recomputed": shard_again.grad,
        "metrics": result.metrics,
        "reduced": both,
    }


def main() -> None:
    rank, world, store, cases, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    interpreter.mend()
    results = {}
    for name in backend.BACKENDS:
        with backend.use(name):
            results[name] = [run(case, rank, world) for case in torch.load(cases)]
    torch.save(results, out)
    try:
        linear_logprob(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), vocab_start=1, group=dist.group.WORLD)
    except ValueError as error:
        sys.stdout.write(str(error))
    dist.destroy_process_group()


main()
