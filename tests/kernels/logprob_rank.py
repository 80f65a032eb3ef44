"""One rank of the vocabulary-parallel test of `logprob`: `logprob_rank.py RANK WORLD STORE CASES OUT`, started by the test.

It runs with TRITON_INTERPRET=1 and computes every case with both implementations.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from drmas_kernels import backend
from drmas_kernels.logprob import logprob
from tests.kernels import interpreter


def run(case: dict, rank: int, world: int) -> dict:
    leaf = case["logits"].chunk(world, 1)[rank].clone().requires_grad_()
    where = {"vocab_start": rank * leaf.shape[1], "group": dist.group.WORLD}
    scored, entropy = logprob(leaf.clone(), case["target"], **where, **case["settings"])
    ((case["g"] * scored).sum() + (case["h"] * entropy).sum()).backward()
    return {
        "logprob": scored.detach(),
        "entropy": entropy.detach(),
        "gradient": leaf.grad,
        "refused": [
            refused(leaf, case["target"], where | {"vocab_start": 1}),
            refused(leaf, case["target"] + 10**6, where),
        ],
    }


def refused(logits: torch.Tensor, target: torch.Tensor, settings: dict) -> str:
    """The argument that the error names."""
    try:
        logprob(logits, target, **settings)
    except ValueError as error:
        return str(error).split()[0]
    return "nothing"


def main() -> None:
    rank, world, store, cases, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    interpreter.mend()
    results = {}
    for name in backend.BACKENDS:
        with backend.use(name):
            results[name] = {key: run(case, rank, world) for key, case in torch.load(cases).items()}
    torch.save(results, out)
    dist.destroy_process_group()


main()
