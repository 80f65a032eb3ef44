"""Every registered operator says what it returns without computing it, and the public functions pass through torch.compile."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from drmas_kernels.adamw import AdamBuffers, StepState, adamw_slots, adamw_step
from drmas_kernels.backend import use
from drmas_kernels.grad_norm import clip_coefficient, slot_norms, squared_norms
from drmas_kernels.linear_logprob import linear_logprob, linear_policy_loss
from drmas_kernels.logprob import logprob
from drmas_kernels.loss_options import PolicyLossOptions
from drmas_kernels.policy_loss import policy_loss
from drmas_kernels.segment_advantage import segment_advantage
from drmas_kernels.tile_table import Span, TileTable
from tests.kernels.interpreter import DEVICE

T, H, V, ROWS, AGENTS = 6, 16, 40, 3, 2
NAMES = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("drmas::"))
OPTIONS = PolicyLossOptions(entropy_bonus=0.1, kl="k3", kl_coefficient=0.1, mismatch="truncate")


def tokens():
    generator = torch.Generator().manual_seed(0)
    shared = {
        "row": torch.tensor([0, 0, 1, 1, 2, 2]),
        "old_logprob": -torch.rand(T, generator=generator),
        "ref_logprob": -torch.rand(T, generator=generator),
        "rollout_logprob": -torch.rand(T, generator=generator),
        "advantage": torch.tensor([1.0, -1.0, 0.5]),
        "agent": torch.tensor([0, 1, 1]),
        "num_agents": AGENTS,
    }
    return shared, generator


def operator_arguments(name):
    """Of every operator by the names of its schema, on the CPU."""
    shared, generator = tokens()
    options, per_token = dataclasses.asdict(OPTIONS), torch.rand(T, generator=generator)
    statistics = torch.tensor([[1.0, 9.0, 1.5, 0.5]]).repeat(T, 1)
    logits, target = torch.randn(T, V, generator=generator), torch.arange(T)
    head = {
        **{"hidden": torch.randn(T, H, generator=generator), "weight": torch.randn(V, H, generator=generator)},
        **{"target": target, "inverse_temperature": None, "start": 0, "vocab_size": V, "group": "", "chunk": 0},
        **{"merged": statistics, "slope": per_token, "bonus": per_token, "dweight": torch.zeros(V, H), "want_hidden": True},
    }
    from_logits = {"logits": logits, "size": V - 1, "column": target, "inverse_temperature": None}
    from_logits |= {"merged": statistics, "slope": per_token, "bonus": per_token}
    ids, table = torch.tensor([0, 0, 1, 1, 1, 0]), TileTable.build([Span(0, 0, 40, 1), Span(0, 40, 9, 0)], [49], 2)
    tiles = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    tiles["buffer_tiles"] = list(tiles["buffer_tiles"])
    per_slot = {key: torch.ones(2, dtype=torch.float64) for key in ("coefficient", "lr", "weight_decay")}
    flat = {key: [torch.ones(49)] for key in ("param", "grad", "exp_avg", "exp_avg_sq")}
    rule = {"weighting": "turn", "ddof": 1, "eps": 1e-6, "min_std": 0.0, "singleton": "zero"}
    return {
        "policy_loss": shared
        | options
        | {"logprob": -per_token, "entropy": per_token, "index": None, "weight": per_token, "num_agents": AGENTS},
        "linear_logprob": head,
        "linear_logprob_backward": head,
        "linear_policy_loss": head | shared | options | {"token_weight": per_token, "grad_scale": 1.0},
        **dict.fromkeys(("logprob", "logprob_backward", "logprob_backward_"), from_logits),
        "segment_advantage": rule
        | {"reward": per_token, "penalty": per_token, "mean_segment": ids, "std_segment": ids, "episode": torch.arange(T)}
        | {"included": ids < 5, "num_mean": 2, "num_std": 3, "penalty_inside": False, "leave_one_out": False},
        "squared_norms": tiles | {"buffers": [torch.ones(49)]},
        "adamw_step": tiles
        | flat
        | per_slot
        | {"copy": [torch.zeros(49).bfloat16()], "step": torch.zeros(2).long(), "skipped": torch.zeros(2).long()}
        | {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    }[name]


def described(results):
    return [(x.shape, x.stride(), x.dtype, x.device) for x in tree_leaves(results) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_under_fake_tensors_describes_what_it_returns(backend, name):
    operator = getattr(torch.ops.drmas, name.removeprefix("drmas::")).default
    given = operator_arguments(name.removeprefix("drmas::"))
    arguments = [given[argument.name] for argument in operator._schema.arguments]
    arguments = tree_map_only(torch.Tensor, lambda tensor: tensor.clone().to(DEVICE), arguments)
    with FakeTensorMode() as mode:
        described_only = operator(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
    real = operator(*arguments)
    assert len(described(real)) == len(operator._schema.returns)
    assert described(described_only) == described(real)


@pytest.mark.parametrize("name", ["policy_loss", "linear_policy_loss"])
def test_options_are_the_last_arguments_of_an_operator_in_their_order(name):
    schema = getattr(torch.ops.drmas, name).default._schema
    fields = [field.name for field in dataclasses.fields(PolicyLossOptions)]
    assert [argument.name for argument in schema.arguments][-len(fields) :] == fields


def on_device(values):
    return {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def loss_of_logprobs():
    shared, generator = tokens()
    given = on_device(shared | {"token_weight": torch.rand(T, generator=generator), "index": torch.arange(T)})
    leaf = torch.full((T,), -0.7, device=DEVICE, requires_grad=True)

    def call(leaf):
        return policy_loss(leaf * 1.0, entropy=leaf * -1.0, options=OPTIONS, **given, check_values=False)[0]

    return call, [leaf]


def loss_of_the_head():
    shared, generator = tokens()
    given = on_device(shared | {"token_weight": torch.rand(T, generator=generator), "target": torch.arange(T)})
    return lambda hidden, weight: linear_policy_loss(hidden, weight, options=OPTIONS, **given).loss, head_leaves()


def head_leaves():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in ((T, H), (V, H))]


def score_of_the_head():
    target = torch.arange(T, device=DEVICE)
    return lambda hidden, weight: sum(x.sum() for x in linear_logprob(hidden, weight, target)), head_leaves()


def score_of_logits():
    target = torch.arange(T, device=DEVICE)
    leaf = torch.randn(T, V, generator=torch.Generator().manual_seed(2)).to(DEVICE).requires_grad_()
    return lambda logits: sum(x.sum() for x in logprob(logits, target, check_values=False)), [leaf]


def advantages():
    ids = torch.tensor([0, 0, 1, 1, 1, 0], device=DEVICE)
    reward = torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0, 1.0], device=DEVICE)
    both = {"mean_segment": ids, "std_segment": ids, "episode": ids, "included": ids < 5}
    return lambda reward: segment_advantage(reward, reward * 0.0, **both).advantage, [reward]


def norms_of_groups():
    return lambda buffer: squared_norms([buffer[:40], buffer[40:]], [0, 1], 2), [torch.ones(49, device=DEVICE)]


def table():
    return TileTable.build([Span(0, 0, 40, 1), Span(0, 40, 9, 0)], [49], 2, device=DEVICE)


def norms_of_slots():
    spans = table()
    return lambda buffer: slot_norms([buffer], spans).squared, [torch.ones(49, device=DEVICE)]


def coefficients():
    return lambda norm: clip_coefficient(norm, 0.5), [torch.tensor([0.1, 3.0, torch.nan], device=DEVICE)]


def step_of_a_tensor():
    one, lr = torch.ones((), dtype=torch.float64, device=DEVICE), 1e-2

    def call(param, grad):
        first, second, step = torch.zeros_like(param), torch.zeros_like(param), one.long() - 1
        param = param.clone()
        adamw_step(param, grad, first, second, step, coefficient=one, lr=lr)
        return param, first, second, step

    return call, [torch.ones(7, device=DEVICE), torch.arange(7.0, device=DEVICE)]


def step_of_slots():
    spans, factors = table(), torch.tensor([0.5, -1.0], device=DEVICE)

    def call(param, grad):
        buffers = AdamBuffers(*([x.clone()] for x in (param, grad, grad * 0.0, grad * 0.0)))
        state = StepState.zeros(2, param.device)
        adamw_slots(buffers, state, spans, coefficient=factors, lr=1e-2)
        return buffers.param[0], *state

    return call, [torch.ones(49, device=DEVICE), torch.arange(49.0, device=DEVICE)]


WHOLE = (loss_of_logprobs, score_of_logits, norms_of_slots, coefficients, step_of_a_tensor, step_of_slots)
"""These wait for no value, so they are one graph."""
IN_PARTS = (loss_of_the_head, score_of_the_head, advantages, norms_of_groups)


def results(call, leaves):
    """What a use returns and the gradients that its scalar has."""
    made = call(*leaves)
    differentiable = [leaf for leaf in leaves if leaf.requires_grad]
    return tree_leaves((made, torch.autograd.grad(made, differentiable) if differentiable else ()))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.parametrize("use_of", [*WHOLE, *IN_PARTS], ids=lambda use_of: use_of.__name__)
def test_a_public_function_compiles_to_the_same_bits(use_of):
    torch._dynamo.reset()
    call, leaves = use_of()
    with use("torch"):
        compiled = results(torch.compile(call, backend="aot_eager", fullgraph=use_of in WHOLE), leaves)
        for found, expected in zip(compiled, results(call, leaves), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
