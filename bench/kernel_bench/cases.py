"""The cases of the kernels' benchmark: every operation at the shapes of a preset, with its inputs and the sides that run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from bench.advantage_loops import per_row_loops
from bench.kernel_bench import peers, plain
from bench.kernel_bench.sides import COMPILED, EAGER, OURS, PRESETS, Case, Head, Side, Step, Target, clear
from drmas_kernels import numerics
from drmas_kernels.adamw import adamw_step
from drmas_kernels.grad_norm import clip_coefficient, squared_norms
from drmas_kernels.linear_logprob import linear_logprob, linear_policy_loss
from drmas_kernels.logprob import logprob
from drmas_kernels.policy_loss import PolicyLossOptions, policy_loss
from drmas_kernels.segment_advantage import segment_advantage

AGENTS = 4
VIEWS = 128
"""Parameters that a flat buffer is cut into, for those who take one tensor per parameter."""
ENTROPY_BONUS = 0.01
LR = 1e-6


def cases(preset: str, device: str, dtype: str, tokens_factor: int = 1) -> list[Case]:
    """Every case of the preset, the head's with so many times its tokens; nothing is allocated yet."""
    sizes, kind = PRESETS[preset], getattr(torch, dtype)
    heads = [replace(head, tokens=head.tokens * tokens_factor) for head in sizes.heads]
    made = [case for head in heads for case in _head_cases(head, device, dtype, kind)]
    if sizes.memory_only:
        return made
    sliced = {(head.tokens, head.columns): head for head in heads}  # heads that differ in H have the same logits
    made += [case for head in sliced.values() for case in _logits_cases(head, device, dtype, kind)]
    elements = sizes.elements[device]
    return [_segment_case(sizes.rows, device), *made, _loss_case(sizes.loss_tokens, device), *_update_cases(elements, device)]


def _pair(step: Callable[..., Any], finish: Callable[[SimpleNamespace, Callable[..., Any]], Step]) -> tuple[Side, Side]:
    """The eager and the compiled side of a plain function; `finish` makes a step of either."""
    return (
        Side(EAGER, lambda i: finish(i, step)),
        Side(COMPILED, lambda i: finish(i, torch.compile(step, dynamic=False))),
    )


def _generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _token_inputs(tokens: int, device: str, made: torch.Generator) -> dict[str, torch.Tensor]:
    """Rows of equal length. Advantages of mean 1, so that the loss is no difference of large sums."""
    rows = max(4, tokens // 512)
    advantage = torch.randn(rows, generator=made, device=device) + 1.0
    return {
        "row": torch.arange(tokens, device=device) * rows // tokens,
        "advantage": advantage,
        "token_weight": torch.full((tokens,), 1.0 / tokens, device=device),
        "agent": torch.arange(rows, device=device) % AGENTS,
    }


def _head_inputs(head: Head, device: str, kind: torch.dtype) -> SimpleNamespace:
    """Hidden states and a weight whose logits are of order 1, old log-probs near the new ones."""
    made = _generator(device)
    hidden = torch.randn(head.tokens, head.hidden, generator=made, device=device).to(kind)
    weight = (torch.randn(head.columns, head.hidden, generator=made, device=device) * head.hidden**-0.5).to(kind)
    target = torch.randint(head.columns, (head.tokens,), generator=made, device=device)
    old = linear_logprob(hidden, weight, target)[0] + 0.1 * torch.randn(head.tokens, generator=made, device=device)
    hidden.requires_grad_(), weight.requires_grad_()
    rest = _token_inputs(head.tokens, device, made)
    return SimpleNamespace(hidden=hidden, weight=weight, target=target, old=old, leaves=[hidden, weight], **rest)


def _our_head_loss(bonus: float) -> Callable[[SimpleNamespace], Step]:
    settings = {"num_agents": AGENTS, "options": PolicyLossOptions(entropy_bonus=bonus), "check_values": False}

    def make(i: SimpleNamespace) -> Step:
        def step() -> torch.Tensor:
            clear(i)
            tokens = (i.old, i.row, i.advantage, i.token_weight, i.agent)
            loss = linear_policy_loss(i.hidden, i.weight, i.target, *tokens, **settings).loss
            loss.backward()
            return loss.detach()

        return step

    return make


def _plain_head_loss(i: SimpleNamespace, function: Callable[..., Any]) -> Step:
    def step() -> torch.Tensor:
        clear(i)
        loss = function(i.hidden, i.weight, i.target, i.old, i.row, i.advantage, i.token_weight)
        loss.backward()
        return loss.detach()

    return step


def _forward(*names: str) -> Callable[[SimpleNamespace, Callable[..., Any]], Step]:
    """A step of a function of the named inputs that gives (log-prob, entropy), without gradients."""

    def finish(i: SimpleNamespace, function: Callable[..., Any]) -> Step:
        @torch.no_grad()
        def step() -> torch.Tensor:
            return function(*(getattr(i, name) for name in names))[0].mean()

        return step

    return finish


def _head_cases(head: Head, device: str, dtype: str, kind: torch.dtype) -> list[Case]:
    sizes = (head.tokens, head.hidden, head.columns, kind.itemsize)
    loss_cost, forward_cost = numerics.linear_policy_loss_cost(*sizes), numerics.linear_logprob_cost(*sizes)
    finish = _forward("hidden", "weight", "target")
    ours = Side(OURS, lambda i: finish(i, partial(linear_logprob, check_values=False)))

    def inputs() -> SimpleNamespace:
        return _head_inputs(head, device, kind)

    def case(name: str, op: str, cost: numerics.Cost, sides: tuple[Side, ...], target: float) -> Case:
        return Case(name, op, head.text, dtype, cost, inputs, sides, Target({"": target}))

    plain_sides = _pair(plain.head_loss, _plain_head_loss)
    less = tuple(Side(side.implementation, side.make, peers.NO_METRICS) for side in plain_sides)
    bonus = (Side(OURS, _our_head_loss(ENTROPY_BONUS)), *_pair(plain.head_loss_entropy, _plain_head_loss))
    return [
        case("linear_logprob", "linear_logprob", forward_cost,
             (ours, *_pair(plain.head_logprob, finish), *peers.head_logprob_sides(device)), 1.65),
        case("linear_policy_loss", "linear_policy_loss", loss_cost,
             (Side(OURS, _our_head_loss(0.0)), *less, *peers.head_loss_sides(device)), 1.45),
        case("linear_policy_loss, entropy bonus", "linear_policy_loss", loss_cost, bonus, 1.45),
    ]  # fmt: skip


def _logits_inputs(head: Head, device: str, kind: torch.dtype, backward: bool) -> SimpleNamespace:
    made = _generator(device)
    logits = torch.empty(head.tokens, head.columns, dtype=kind, device=device).normal_(generator=made).requires_grad_(backward)
    target = torch.randint(head.columns, (head.tokens,), generator=made, device=device)
    return SimpleNamespace(logits=logits, target=target, leaves=[logits])


def _logits_gradient(i: SimpleNamespace, function: Callable[..., Any]) -> Step:
    """The gradient of the mean of log-prob and a little entropy: what an entropy bonus asks for."""

    def step() -> torch.Tensor:
        clear(i)
        chosen, entropy = function(i.logits, i.target)
        value = chosen.mean() + ENTROPY_BONUS * entropy.mean()
        value.backward()
        return value.detach()

    return step


class _Produced(torch.autograd.Function):
    """Gives the memory of the logits out as the result of an operation: a gradient may take its place, as after a product."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(logits[:0]).set_(logits)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[None, None]:
        return None, None


def _in_place(i: SimpleNamespace) -> Step:
    logits, leaf = i.logits.detach().clone(), torch.zeros((), requires_grad=True)

    def step() -> torch.Tensor:
        chosen, entropy = logprob(_Produced.apply(leaf, logits), i.target, inplace_backward=True, check_values=False)
        value = chosen.mean() + ENTROPY_BONUS * entropy.mean()
        value.backward()
        return value.detach()

    return step


def _logits_cases(head: Head, device: str, dtype: str, kind: torch.dtype) -> list[Case]:
    target = Target({"H100": 1.15, "": 1.2})
    shape = head.text.replace(f" H={head.hidden}", "")
    made = []
    for backward, finish in ((False, _forward("logits", "target")), (True, _logits_gradient)):
        sides = (
            Side(OURS, lambda i, finish=finish: finish(i, partial(logprob, check_values=False))),
            *((Side(f"{OURS} in place", _in_place, "overwrites the logits"),) if backward else ()),
            *_pair(plain.logprob, finish),
            *peers.logits_sides(device, backward),
        )
        made.append(
            Case(
                "logprob, gradient" if backward else "logprob",
                *("logprob", shape, dtype),
                numerics.logprob_cost(head.tokens, head.columns, kind.itemsize, backward),
                lambda backward=backward: _logits_inputs(head, device, kind, backward),
                sides,
                target,
            )
        )
    return made


def _loss_inputs(tokens: int, device: str) -> SimpleNamespace:
    made = _generator(device)
    new = torch.randn(tokens, generator=made, device=device) - 2.0
    old = new + 0.2 * torch.randn(tokens, generator=made, device=device)
    new.requires_grad_()
    rest = _token_inputs(tokens, device, made)
    index = torch.arange(tokens, device=device) if device == "cuda" else None  # given one, nothing waits for the GPU
    return SimpleNamespace(logprob=new, old=old, index=index, leaves=[new], **rest)


def _loss_case(tokens: int, device: str) -> Case:
    def finish(i: SimpleNamespace, function: Callable[..., Any]) -> Step:
        def step() -> torch.Tensor:
            clear(i)
            loss = function(i.logprob, i.old, i.row, i.advantage, i.token_weight, i.agent)
            loss.backward()
            return loss.detach()

        return step

    def ours(i: SimpleNamespace) -> Step:
        settings = {"num_agents": AGENTS, "options": PolicyLossOptions(), "index": i.index, "check_values": False}
        return finish(i, lambda *tensors: policy_loss(*tensors, **settings)[0])

    def eager(*tensors: torch.Tensor) -> torch.Tensor:
        return plain.loss_and_metrics(*tensors, AGENTS)[0]

    sides = (Side(OURS, ours), *_pair(eager, finish))
    cost = numerics.policy_loss_cost(tokens)
    return Case("policy_loss", "policy_loss", f"T={tokens}", "float32", cost, lambda: _loss_inputs(tokens, device), sides)


def _segment_inputs(rows: int, device: str) -> SimpleNamespace:
    """Tasks of 8 episodes of 4 agents with 2 turns each; a row in ten is left out."""
    made = _generator(device)
    number = torch.arange(rows, device=device)
    reward = torch.randint(2, (rows,), generator=made, device=device).float()
    included = torch.rand(rows, generator=made, device=device) < 0.9
    segment = number // 64 * AGENTS + number % AGENTS
    penalty = torch.zeros(rows, device=device)
    return SimpleNamespace(
        reward=reward,
        penalty=penalty,
        segment=segment,
        episode=number // 8,
        included=included,
        segments=rows // 64 * AGENTS,
        leaves=[],
    )


def _segment_case(rows: int, device: str) -> Case:
    def ours(i: SimpleNamespace) -> Step:
        both = {"mean_segment": i.segment, "std_segment": i.segment}
        both |= dict.fromkeys(("num_mean_segments", "num_std_segments"), i.segments)

        def step() -> torch.Tensor:
            made = segment_advantage(i.reward, i.penalty, **both, episode=i.episode, included=i.included)
            return made.advantage.abs().sum()

        return step

    def finish(i: SimpleNamespace, function: Callable[..., Any]) -> Step:
        return lambda: function(i.reward, i.penalty, i.segment, i.included, i.segments).abs().sum()

    def loops(i: SimpleNamespace) -> Step:
        score = (i.reward - i.penalty)[i.included].cpu()
        segment = i.segment[i.included].tolist()
        task, agent = [f"task-{s // AGENTS}" for s in segment], [f"agent-{s % AGENTS}" for s in segment]
        return lambda: per_row_loops(score, task, agent).abs().sum()

    less = "one rule only; no statistics, no checks"
    pair = tuple(Side(side.implementation, side.make, less) for side in _pair(plain.segment_advantage, finish))
    sides = (Side(OURS, ours), *pair, Side("Python loops", loops, "as in the first Dr. MAS code, on the CPU"))
    cost = numerics.segment_advantage_cost(rows)
    return Case(
        "segment_advantage", "segment_advantage", f"N={rows}", "float32", cost, lambda: _segment_inputs(rows, device), sides
    )  # fmt: skip


def _update_inputs(elements: int, device: str) -> SimpleNamespace:
    """One set of buffers for all sides: where they lie in memory must not decide."""
    made = _generator(device)
    param, grad = (torch.empty(elements, device=device).normal_(generator=made) for _ in range(2))
    first, second = torch.zeros_like(param), torch.full_like(param, 1e-2)
    size = -(-elements // VIEWS // 64) * 64
    i = SimpleNamespace(param=param, grad=grad, first=first, second=second, gradients=list(grad.split(size)), lr=LR, leaves=[])
    i.copy = torch.empty_like(param, dtype=torch.bfloat16)
    i.step = torch.ones((), dtype=torch.int64, device=device)
    i.coefficient = torch.tensor(0.999, device=device)

    def adamw_of(size: int) -> torch.optim.AdamW:
        """torch's fused AdamW over pieces of the flat buffers."""
        pieces = [tensor.split(size) for tensor in (param, grad, first, second)]
        parameters = []
        for piece, gradient in zip(*pieces[:2], strict=True):
            parameters.append(torch.nn.Parameter(piece))
            parameters[-1].grad = gradient
        optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
        for parameter, m, v in zip(parameters, *pieces[2:], strict=True):
            optimizer.state[parameter] = {"step": torch.ones((), device=device), "exp_avg": m, "exp_avg_sq": v}
        return optimizer

    i.adamw_of_views, i.adamw_of_all = lambda: adamw_of(size), lambda: adamw_of(elements)
    return i


def _clip_then_adamw(i: SimpleNamespace) -> Step:
    optimizer = i.adamw_of_all()

    def step() -> None:
        i.grad.mul_(i.coefficient)
        optimizer.step()

    return step


def _our_clipped_step(i: SimpleNamespace) -> Step:
    def step() -> None:
        norm = squared_norms([i.grad], [0], 1)[0].sqrt()
        coefficient = clip_coefficient(norm, 1.0)
        adamw_step(i.param, i.grad, i.first, i.second, i.step, coefficient=coefficient, lr=i.lr, copy=i.copy)

    return step


def _plain_clipped_step(i: SimpleNamespace) -> Step:
    optimizer = i.adamw_of_views()
    parameters = optimizer.param_groups[0]["params"]

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        i.copy.copy_(i.param)

    return step


def _update_cases(elements: int, device: str) -> list[Case]:
    def norm(i: SimpleNamespace, function: Callable[..., Any]) -> Step:
        return lambda: function(i.grad)

    def ours(i: SimpleNamespace) -> Step:
        buffers = (i.param, i.grad, i.first, i.second, i.step)
        return lambda: adamw_step(*buffers, coefficient=i.coefficient, lr=i.lr)

    def compiled(i: SimpleNamespace) -> Step:
        function = torch.compile(plain.adamw, dynamic=False)
        return lambda: function(i.param, i.grad, i.first, i.second, i.step, i.coefficient, i.lr)

    def case(name: str, op: str, cost: numerics.Cost, sides: tuple[Side, ...], target: float | None = None) -> Case:
        aim = None if target is None else Target({"": target})
        return Case(name, op, f"n={elements}", "float32", cost, lambda: _update_inputs(elements, device), sides, aim)

    squares, update = numerics.squared_norm_cost(elements), numerics.adamw_cost(elements, copy=True)
    together = numerics.Cost(squares.flops + update.flops, squares.bytes + update.bytes)
    norms = (Side(OURS, lambda i: lambda: squared_norms([i.grad], [0], 1)[0]), *_pair(plain.squared_norm, norm))
    steps = (
        Side(OURS, ours),
        Side(EAGER, _clip_then_adamw, "a clip pass over the gradients, then torch's fused AdamW"),
        Side(COMPILED, compiled, "the formula, compiled"),
    )
    whole = (
        Side(OURS, _our_clipped_step),
        Side(EAGER, _plain_clipped_step, f"clip_grad_norm_ and fused AdamW over {VIEWS} tensors, then the bf16 copy"),
    )
    return [
        case("squared_norms", "squared_norms", squares, (*norms, *peers.norm_sides(device))),
        case("adamw_step, clipped", "adamw_step", numerics.adamw_cost(elements), steps),
        case("norm, clip, AdamW, bf16 copy", "adamw_step", together, (*whole, *peers.clipped_step_sides(device)), 1.1),
    ]
