"""Our layers against the formulas they stand for: values, gradients, where gradients go, and which memory is kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drmas.policy.layers import ColumnLinear, RMSNorm, RowLinear, SwiGLU, TokenEmbedding

TOKENS, HIDDEN = 7, 12


@pytest.fixture
def layout(world):
    groups = world.layout()
    with groups.active():
        yield groups


def settings(dtype: torch.dtype = torch.float32) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, params_dtype=dtype, perform_initialization=False
    )


def linear(kind: type, layout, inputs: int, outputs: int, *, bias: bool = False):
    cut = {"input_is_parallel": True} if kind is RowLinear else {"gather_output": False}
    made = kind(
        inputs,
        outputs,
        config=settings(),
        init_method=None,
        bias=bias,
        skip_bias_add=kind is RowLinear,
        tp_group=layout.tp,
        **cut,
    )
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number + 50))
    return made


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the inputs for an upstream gradient that is the same for all."""
    inputs = [each.detach().requires_grad_() for each in inputs]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, drawn(*output.shape, seed=9, dtype=output.dtype))]


def norm(dtype: torch.dtype = torch.float32) -> RMSNorm:
    made = RMSNorm(settings(dtype), HIDDEN, eps=1e-3)
    with torch.no_grad():
        made.weight.copy_(1 + 0.2 * drawn(HIDDEN, seed=3))
    return made


def test_norm_and_its_gradients_equal_the_formula():
    ours, x = norm(), drawn(TOKENS, 1, HIDDEN)

    def formula(x, weight):
        x, weight = x.double(), weight.double()
        return (x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight).float()

    def layer(x, weight):
        ours.weight = torch.nn.Parameter(weight)
        return torch.func.functional_call(ours, {"weight": weight}, x)

    expected = with_gradients(formula, x, ours.weight)
    for found, wanted in zip(with_gradients(layer, x, ours.weight), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


def test_norm_rounds_bfloat16_where_transformers_does():
    ours, x = norm(torch.bfloat16), drawn(TOKENS, 1, HIDDEN, dtype=torch.bfloat16)
    theirs = LlamaRMSNorm(HIDDEN, eps=1e-3).bfloat16()
    theirs.weight.data.copy_(ours.weight)
    assert torch.equal(ours(x), theirs(x))


def test_norm_keeps_no_more_than_it_was_given():
    """A head's norm gets a view of the whole projection."""
    projection = drawn(TOKENS, 1, 5 * HIDDEN)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        norm()(projection[..., HIDDEN : 2 * HIDDEN].requires_grad_())
    assert max(tensor.untyped_storage().nbytes() for tensor in kept) == 4 * TOKENS * HIDDEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_and_its_gradient_equal_the_formula(dtype):
    x = drawn(TOKENS, 1, 2 * HIDDEN, dtype=dtype)
    expected = with_gradients(lambda x: F.silu(x[..., :HIDDEN]) * x[..., HIDDEN:], x)
    for found, wanted in zip(with_gradients(SwiGLU(settings()), x), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_linear_layers_and_their_gradients_equal_torchs(layout, kind, bias):
    layer, x = linear(kind, layout, HIDDEN, 5, bias=bias), drawn(TOKENS, 1, HIDDEN).requires_grad_()
    leaves = [x, layer.weight] + ([layer.bias] if bias and kind is ColumnLinear else [])  # the other hands its bias on
    expected = with_gradients(F.linear, *leaves)
    output, _ = layer(x)
    output.backward(drawn(*output.shape, seed=9))
    for found, wanted in zip([output, *(leaf.grad for leaf in leaves)], expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_weight_gradients_add_up_in_main_grad(layout, kind):
    layer = linear(kind, layout, HIDDEN, 5)
    layer.weight.main_grad = torch.ones(5, HIDDEN)
    expected = torch.ones(5, HIDDEN)
    for seed in (1, 2):
        x, upstream = drawn(TOKENS, 1, HIDDEN, seed=seed), drawn(TOKENS, 1, 5, seed=seed + 10)
        layer(x)[0].backward(upstream)
        expected += upstream[:, 0].t() @ x[:, 0]
        assert layer.weight.grad_added_to_main_grad
        assert layer.weight.grad.shape == layer.weight.shape  # Megatron's hooks insist on one and don't read it
        layer.weight.grad = None
    torch.testing.assert_close(layer.weight.main_grad, expected, atol=1e-5, rtol=0)


def test_bfloat16_gradients_add_up_in_float32(layout):
    layer = linear(ColumnLinear, layout, HIDDEN, 5).bfloat16()
    layer.weight.main_grad = torch.full((5, HIDDEN), 4096.0)  # bfloat16 would lose what is added
    x, upstream = drawn(TOKENS, 1, HIDDEN, dtype=torch.bfloat16), drawn(TOKENS, 1, 5, seed=1, dtype=torch.bfloat16)
    layer(x)[0].backward(upstream)
    expected = upstream[:, 0].t().float() @ x[:, 0].float()
    torch.testing.assert_close(layer.weight.main_grad - 4096.0, expected, atol=5e-2, rtol=1e-2)


def stack(layout, *, frozen: bool = False):
    """norm -> gate and up -> SwiGLU -> down, and what is read by each linear layer."""
    before, up, gate, down = (
        norm(),
        linear(ColumnLinear, layout, HIDDEN, 2 * 8),
        SwiGLU(settings()),
        linear(RowLinear, layout, 8, 5),
    )
    if frozen:
        up.weight.requires_grad_(False)
        down.weight.requires_grad_(False)

    def run(x):
        normed = before(x)
        hidden = gate(up(normed)[0])
        return down(hidden)[0], (normed, hidden)

    return run, [before.weight, up.weight, down.weight]


def bytes_of(tensors) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_what_a_linear_layer_read_is_freed_and_made_again_for_the_backward_pass(layout):
    run, parameters = stack(layout)
    x = drawn(TOKENS, 1, HIDDEN).requires_grad_()
    output, inner = run(x)
    assert bytes_of(inner) == [0, 0]
    upstream = drawn(*output.shape, seed=9)
    found = torch.autograd.grad(output, [x, *parameters], upstream)
    normed, hidden = inner
    with torch.no_grad():
        _, (whole, gated) = run(x)
    assert torch.equal(normed, whole)
    assert torch.equal(hidden, gated)

    def formula(x, scale, up, down):
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * scale
        gate, value = F.linear(normed, up).chunk(2, -1)
        return F.linear(F.silu(gate) * value, down)

    expected = with_gradients(formula, x, *parameters)[1:]
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, atol=2e-5, rtol=0)


def test_freed_memory_is_given_back_again_behind_the_backward_pass(layout):
    """The graph lives as long as the loss does; what was made again must not."""
    run, _ = stack(layout)
    output, inner = run(drawn(TOKENS, 1, HIDDEN).requires_grad_())
    alive = [torch._C._WeakTensorRef(tensor) for tensor in inner]
    del inner
    output.sum().backward()
    assert all(reference.expired() for reference in alive)
    assert output.grad_fn is not None


@pytest.mark.parametrize("graph", [True, False], ids=["frozen", "no gradient"])
def test_nothing_is_freed_that_nobody_would_make_again(layout, graph):
    run, _ = stack(layout, frozen=graph)
    with torch.set_grad_enabled(graph):
        output, inner = run(drawn(TOKENS, 1, HIDDEN).requires_grad_())
    assert all(bytes_of(inner))
    if graph:
        output.sum().backward()  # through frozen weights, to the norm before them


def embedding(layout) -> TokenEmbedding:
    made = TokenEmbedding(11, HIDDEN, init_method=None, config=settings(), tp_group=layout.tp)
    with torch.no_grad():
        made.weight.copy_(drawn(11, HIDDEN, seed=4))
    return made


@pytest.mark.parametrize("main", [True, False], ids=["main_grad", "grad"])
def test_embedding_and_its_gradient_equal_torchs(layout, main):
    ours, ids = embedding(layout), torch.tensor([[3, 0, 3, 10, 3, 1, 0]])
    if main:
        ours.weight.main_grad = torch.ones(11, HIDDEN)
    output, wanted = with_gradients(lambda weight: F.embedding(ids, weight), ours.weight)
    found = ours(ids)
    found.backward(drawn(*output.shape, seed=9))
    assert torch.equal(found, output)
    torch.testing.assert_close(ours.weight.main_grad - 1 if main else ours.weight.grad, wanted, atol=2e-6, rtol=0)


def test_a_tied_embedding_leaves_the_stand_in_to_the_head(layout):
    ours = embedding(layout)
    ours.weight.main_grad = torch.zeros(11, HIDDEN)
    ours.weight.head_stands_in = True
    ours(torch.tensor([[1, 2]])).sum().backward()
    assert ours.weight.grad is None
    assert ours.weight.main_grad[1].sum() == HIDDEN
