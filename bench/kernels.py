"""The kernels beside plain torch, in one run: `python bench/kernels.py [--tokens N] [--vocabulary V] [--repeats N]`.

Every line alternates the two sides and shows the best time of each, their ratio, and the memory each needs beyond its inputs.
Compare ratios, not seconds: other work on the machine moves both sides alike. The head is that of SmolLM2-135M by default.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from drmas_kernels.adamw import adamw_step
from drmas_kernels.backend import choose
from drmas_kernels.grad_norm import squared_norms
from drmas_kernels.linear_logprob import linear_logprob, linear_logprob_reference, linear_policy_loss
from drmas_kernels.numerics import linear_policy_loss_cost
from drmas_kernels.policy_loss import PolicyLossOptions

Step = Callable[[], object]


def heads(args: argparse.Namespace) -> dict[str, tuple[Step, Step]]:
    """Name -> (ours, plain torch) for the output head, on the same inputs."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, dtype=dtype).requires_grad_()
    weight = (torch.randn(args.vocabulary, args.hidden) * 0.05).to(dtype).requires_grad_()
    target = torch.randint(args.vocabulary, (args.tokens,))
    row, one = torch.zeros(args.tokens, dtype=torch.int64), torch.ones(1)
    share = torch.full((args.tokens,), 1.0 / args.tokens)

    def ours(bonus: float = 0.0) -> None:
        hidden.grad = weight.grad = None
        options = PolicyLossOptions(entropy_bonus=bonus)
        loss = linear_policy_loss(hidden, weight, target, None, row, one, share, row[:1], num_agents=1, options=options).loss
        loss.backward()

    def plain(bonus: float = 0.0) -> None:
        hidden.grad = weight.grad = None
        logits = torch.nn.functional.linear(hidden, weight).float()
        logprobs = torch.log_softmax(logits, dim=-1)
        loss = -logprobs.gather(1, target[:, None]).mean()
        if bonus:
            loss = loss + bonus * (logprobs.exp() * logprobs).sum(-1).mean()
        loss.backward()

    def score_plain() -> None:
        with torch.no_grad():
            linear_logprob_reference(hidden, weight, target)

    return {
        "loss and gradients": (ours, plain),
        "with entropy bonus": (lambda: ours(0.01), lambda: plain(0.01)),
        "log-prob, entropy": (lambda: linear_logprob(hidden, weight, target), score_plain),
    }


def optimiser(args: argparse.Namespace) -> dict[str, tuple[Step, Step]]:
    """Name -> (ours, plain torch) for one flat buffer of `--parameters` elements."""
    parameter = torch.nn.Parameter(torch.randn(args.parameters))
    parameter.grad = torch.randn(args.parameters)
    adamw = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    adamw.step()  # makes the moments, which both sides then use: where they lie in memory must not decide
    first, second = (adamw.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))
    step = torch.ones((), dtype=torch.int64)

    def ours(coefficient: float = 1.0) -> None:
        scale = torch.tensor(coefficient)
        adamw_step(parameter.data, parameter.grad, first, second, step, coefficient=scale, lr=1e-6)

    def clipped() -> None:
        parameter.grad.mul_(0.999)  # what torch.nn.utils.clip_grad_norm_ does: a pass of its own over the gradients
        adamw.step()

    norm = (lambda: squared_norms([parameter.grad], [0], 1), lambda: torch.linalg.vector_norm(parameter.grad))
    return {"gradient norm": norm, "AdamW step": (ours, adamw.step), "AdamW step, clipped": (lambda: ours(0.999), clipped)}


def best(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_bytes(name: str, side: int) -> int:
    """Memory that one step of a side adds to a fresh process, by its high-water mark."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", name, str(side)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def high_water() -> int:
    """Bytes; from /proc, since getrusage keeps the mark of the process that started this one."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def measure(step: Step) -> int:
    before = high_water()
    step()
    return high_water() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--parameters", type=int, default=2**24)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = heads(args) | optimiser(args)
    if args.measure:
        name, side = args.measure
        print(measure(cases[name][int(side)]))
        return
    backend = choose("linear_policy_loss")
    print(
        f"tokens {args.tokens}, hidden {args.hidden}, vocabulary {args.vocabulary}, {args.dtype}; {args.parameters} parameters"
    )
    print(f"backend {backend.name} ({backend.reason}); {torch.get_num_threads()} threads; best of {args.repeats}")
    print(f"{'':20}{'ours ms':>10}{'torch ms':>10}{'ratio':>8}{'ours MB':>10}{'torch MB':>10}")
    for name, sides in cases.items():
        times = [[best(step) for step in sides] for _ in range(args.repeats)]
        ours, plain = (1e3 * min(column) for column in zip(*times, strict=True))
        memory = [peak_bytes(name, side) / 1e6 for side in range(2)]
        print(f"{name:20}{ours:10.1f}{plain:10.1f}{ours / plain:8.2f}{memory[0]:10.0f}{memory[1]:10.0f}")
        if name == "loss and gradients":
            flops = linear_policy_loss_cost(args.tokens, args.hidden, args.vocabulary).flops
            print(f"{'':20}{flops / ours / 1e6:10.0f}{flops / plain / 1e6:10.0f}  GFLOP/s over the three products")


if __name__ == "__main__":
    main()
