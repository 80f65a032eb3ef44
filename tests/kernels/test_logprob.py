"""Log-prob and entropy of given logits: float64 autograd, any layout, and no gradient that is wrong without a word."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drmas_kernels import logprob as module
from drmas_kernels import numerics, vocab_statistics
from drmas_kernels.backend import BACKENDS
from drmas_kernels.logprob import logprob, logprob_reference

VOCABULARIES = [1000, 1001, 1280, 2432]


def case(device, shape, dtype=torch.float32, offset=0.0, seed=0):
    """Logits of this shape, targets, and a weight per token for log-prob and entropy."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * 3 + offset).to(dtype)
    target = torch.randint(shape[-1], shape[:-1], generator=generator)
    weights = torch.randn(2, *shape[:-1], generator=generator)
    return logits.to(device), target.to(device), *weights.to(device).unbind(0)


def run(logits, target, g, h, **settings):
    """(log-prob, entropy, gradient of sum(g log-prob + h entropy)) of the implementation."""
    leaf = logits.detach().requires_grad_()
    scored, entropy = logprob(leaf, target, **settings)
    ((g * scored).sum() + (h * entropy).sum()).backward()
    return scored.detach(), entropy.detach(), leaf.grad


def oracle(logits, target, g, h, **settings):
    leaf = logits.detach().double().requires_grad_()
    scored, entropy = logprob_reference(leaf, target, **settings)
    ((g.double() * scored).sum() + (h.double() * entropy).sum()).backward()
    return scored.detach(), entropy.detach(), leaf.grad


def gradient_tolerance(dtype):
    return numerics.DLOGITS if dtype == torch.float32 else numerics.DLOGITS_BF16


@pytest.fixture
def agree(check):
    """agree(logits, target, g, h, **settings): values and gradient are those of float64 autograd."""

    def agree(logits, *rest, **settings):
        scored, entropy, gradient = run(logits, *rest, **settings)
        expected, expected_entropy, expected_gradient = oracle(logits, *rest, **settings)
        assert scored.dtype == entropy.dtype == torch.float32
        assert gradient.dtype == logits.dtype
        check(scored, expected, numerics.LOGPROB)
        check(entropy, expected_entropy, numerics.ENTROPY)
        check(gradient, expected_gradient, gradient_tolerance(logits.dtype))
        assert scored.numel() == 0 or float(scored.max()) <= 1e-6

    return agree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", VOCABULARIES)
@pytest.mark.parametrize("offset", [0.0, 100.0, -200.0])
def test_values_and_gradients_agree_with_float64_autograd(backend, device, agree, dtype, columns, offset):
    agree(*case(device, (5, columns), dtype, offset))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperatures(backend, device, agree, dtype):
    inputs = case(device, (4, 1001), dtype)
    agree(*inputs, temperature=0.5)
    agree(*inputs, temperature=torch.tensor([0.5, 0.7, 1.0, 2.0], device=device))


@pytest.mark.parametrize("shape", [(1000,), (1, 1001), (0, 1000), (2, 3, 1000), (2, 0, 16), (3, 1)])
def test_shapes(backend, device, agree, shape):
    agree(*case(device, shape))
    agree(*case(device, shape), temperature=torch.full(shape[:-1], 0.7, device=device))


def test_layouts(backend, device, check):
    """Transposed, sliced and expanded logits, and tokens in another order than memory."""
    logits, target, g, h = case(device, (4, 1001))
    wide = torch.zeros(4, 1100, device=device)
    wide[:, 33:1034] = logits
    views = {
        "transposed": logits.t().contiguous().t(),
        "sliced": wide[:, 33:1034],
        "every other column": logits.repeat_interleave(2, 1)[:, ::2],
        "batch transposed": logits.view(2, 2, 1001).transpose(0, 1).contiguous().transpose(0, 1),
    }
    expected = oracle(logits, target, g, h)
    for name, view in views.items():
        shape = view.shape[:-1]
        scored, entropy, gradient = run(view, target.view(shape), g.view(shape), h.view(shape))
        assert scored.shape == shape, name
        check(scored.flatten(), expected[0], numerics.LOGPROB)
        check(entropy.flatten(), expected[1], numerics.ENTROPY)
        check(gradient.reshape(4, 1001), expected[2], numerics.DLOGITS)


def test_one_row_for_all_tokens(backend, device, check):
    row, target, g, h = case(device, (1, 1000))[0], *case(device, (5, 1000))[1:]
    leaf = row.requires_grad_()
    scored, entropy = logprob(leaf.expand(5, 1000), target)
    ((g * scored).sum() + (h * entropy).sum()).backward()
    check(leaf.grad, oracle(row.detach().expand(5, 1000), target, g, h)[2].sum(0, keepdim=True), numerics.DLOGITS)


def test_upstream_gradients_that_are_expanded(backend, device, check):
    """`.sum()` hands out one number with stride 0."""
    logits, target, *_ = case(device, (6, 1000))
    one, zero = torch.ones(6, device=device), torch.zeros(6, device=device)
    leaf = logits.requires_grad_()
    for pick, weights in ((0, (one, zero)), (1, (zero, one))):
        leaf.grad = None
        logprob(leaf, target)[pick].sum().backward()
        check(leaf.grad, oracle(logits, target, *weights)[2], numerics.DLOGITS)


def test_logits_that_need_no_gradient(backend, device):
    logits, target, *_ = case(device, (3, 1000))
    assert not logprob(logits, target, inplace_backward=True)[0].requires_grad
    with torch.no_grad():
        assert not logprob(logits.requires_grad_(), target, inplace_backward=True)[1].requires_grad


def test_the_same_inputs_give_the_same_bits(backend, device):
    inputs = case(device, (5, 1001), torch.bfloat16)
    for first, second in zip(run(*inputs), run(*inputs), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_I4_padded_columns_never_enter(backend, device, dtype):
    logits, target, g, h = case(device, (5, 1024), dtype)
    target %= 1001
    expected = run(logits[:, :1001], target, g, h)
    logits[:, 1001], logits[:, 1002], logits[:, 1003:] = torch.inf, -torch.inf, torch.nan
    scored, entropy, gradient = run(logits, target, g, h, vocab_size=1001)
    assert torch.equal(scored, expected[0])
    assert torch.equal(entropy, expected[1])
    assert torch.equal(gradient[:, :1001], expected[2])
    assert torch.equal(gradient[:, 1001:], torch.zeros_like(gradient[:, 1001:]))


@pytest.mark.parametrize("in_place", [False, True])
def test_I4_garbage_in_tokens_without_upstream_gradient_stays_there(backend, device, in_place):
    logits, target, g, h = case(device, (5, 1001))
    expected = run(logits, target, g, h)[2]
    logits[0, 3], logits[1, 4], logits[3] = torch.nan, torch.inf, -torch.inf
    ignored = torch.tensor([True, True, False, True, False], device=device)
    leaf = logits.requires_grad_()
    scored, entropy = logprob(leaf.clone(), target, inplace_backward=in_place)
    (torch.where(ignored, 0.0, g * scored) + torch.where(ignored, 0.0, h * entropy)).sum().backward()
    assert torch.equal(leaf.grad[~ignored], expected[~ignored])
    assert torch.equal(leaf.grad[ignored], torch.zeros_like(leaf.grad[ignored]))
    assert scored[~ignored].isfinite().all()
    assert not scored[ignored].isfinite().any()


def test_columns_of_probability_zero(backend, device, check):
    logits, target, g, h = case(device, (4, 1001))
    logits[:, 100:900] = -torch.inf
    target %= 100
    scored, entropy, gradient = run(logits, target, g, h)
    kept = torch.cat([logits[:, :100], logits[:, 900:]], 1)
    expected = oracle(kept, target, g, h)
    check(scored, expected[0], numerics.LOGPROB)
    check(entropy, expected[1], numerics.ENTROPY)
    check(torch.cat([gradient[:, :100], gradient[:, 900:]], 1), expected[2], numerics.DLOGITS)
    assert torch.equal(gradient[:, 100:900], torch.zeros_like(gradient[:, 100:900]))


def product(device, dtype=torch.float32):
    """(hidden, weight, logits, target, g, h): logits that are the result of an operation."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 16, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(1001, 16, generator=generator).to(device, dtype).requires_grad_()
    return hidden, weight, hidden @ weight.t(), *case(device, (5, 1001))[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1001, 900])
def test_the_gradient_written_over_the_logits(backend, device, dtype, vocab_size):
    grads = []
    for in_place in (False, True):
        hidden, weight, logits, target, g, h = product(device, dtype)
        target %= vocab_size
        seen = []
        logits.register_hook(seen.append)
        before = logits.detach().clone()
        scored, entropy = logprob(logits, target, inplace_backward=in_place, vocab_size=vocab_size)
        ((g * scored).sum() + (h * entropy).sum()).backward()
        assert (seen[0].data_ptr() == logits.data_ptr()) == in_place
        assert torch.equal(logits.detach(), seen[0] if in_place else before)
        grads.append((seen[0], hidden.grad, weight.grad))
    for beside, written in zip(*grads, strict=True):
        assert torch.equal(beside, written)


def test_the_gradient_may_be_written_over_part_of_a_result(backend, device):
    hidden, weight, logits, target, g, _ = product(device)
    target %= 500
    plain = torch.autograd.grad((g * logprob(logits[:, :500], target)[0]).sum(), hidden, retain_graph=True)[0]
    (g * logprob(logits[:, :500], target, inplace_backward=True)[0]).sum().backward()
    assert torch.equal(hidden.grad, plain)
    assert not weight.grad[500:].any()


def test_a_second_backward_over_the_logits_is_an_error(backend, device):
    _, _, logits, target, g, _ = product(device)
    loss = (g * logprob(logits, target, inplace_backward=True)[0]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)


def test_a_second_backward_beside_the_logits_gives_the_same(backend, device):
    logits, target, g, _ = case(device, (4, 1000))
    leaf = logits.requires_grad_()
    loss = (g * logprob(leaf, target)[0]).sum()
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_logits_that_another_backward_needs_are_an_error(backend, device):
    """The exponential keeps its result: written over, its gradient would be wrong without a word."""
    logits, target, g, _ = case(device, (4, 1000))
    leaf = logits.requires_grad_()
    loss = (g * logprob(leaf.exp(), target, inplace_backward=True)[0]).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert leaf.grad is None


def test_logits_changed_between_the_passes_are_an_error(backend, device):
    _, _, logits, target, g, _ = product(device)
    loss = (g * logprob(logits, target)[0]).sum()
    with torch.no_grad():
        logits.div_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_are_refused(backend, device):
    logits, target, *_ = case(device, (2, 1000))
    leaf = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="logprob has no second derivative"):
        torch.autograd.grad(logprob(leaf, target)[1].sum(), leaf, create_graph=True)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (lambda leaf: leaf, "inplace_backward=True for logits that are a leaf"),
        (lambda leaf: leaf[:, :900], "inplace_backward=True for logits that are a leaf"),
        (lambda leaf: leaf.t().contiguous().detach().requires_grad_().t(), "inplace_backward=True for logits that are a leaf"),
        (
            lambda leaf: leaf[:1].mul(2.0).expand(4, 1000),
            r"\[4, 1000\] with strides \(0, 1\); expected rows that don't overlap",
        ),
    ],
)
def test_logits_that_may_not_be_written_over_are_refused(device, logits, message):
    leaf, target, *_ = case(device, (4, 1000))
    with pytest.raises(ValueError, match=message):
        logprob(logits(leaf.requires_grad_()), target, inplace_backward=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.tensor([0, 1, 60])}, "target runs from 0 to 60; expected 0 to 59"),
        ({"target": torch.tensor([0, -100, 5])}, "target runs from -100 to 5"),
        ({"target": torch.tensor([0, 1, 50]), "vocab_size": 50}, "target runs from 0 to 50; expected 0 to 49"),
        ({"target": torch.tensor([0, 1, 2], dtype=torch.int32)}, r"target is torch\.int32 \[3\]; expected int64 \[3\]"),
        ({"target": torch.tensor([0, 1])}, r"target is torch\.int64 \[2\]; expected int64 \[3\]"),
        ({"logits": torch.zeros(3, 60, dtype=torch.float16)}, r"logits is torch\.float16 \[3, 60\]"),
        ({"logits": torch.zeros(3, 0)}, r"logits is \[3, 0\]; expected at least one column"),
        ({"vocab_size": 61}, "vocab_size is 61; expected 1 to 60"),
        ({"vocab_size": 0}, "vocab_size is 0; expected 1 to 60"),
        ({"vocab_start": 60}, "vocab_start is 60 on rank 0 of 1; expected rank times the shard's 60 columns"),
        ({"temperature": 0.0}, r"temperature is 0\.0; expected a positive number"),
        ({"temperature": float("inf")}, "temperature is inf; expected a positive number"),
        ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, "temperature holds a value that is not positive and finite"),
        ({"temperature": torch.ones(2)}, r"temperature has shape \[2\]; expected a number or \[3\]"),
    ],
)
def test_bad_arguments_are_named(backend, device, change, message):
    arguments = {"logits": torch.zeros(3, 60), "target": torch.tensor([0, 1, 2])} | change
    arguments = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        logprob(**arguments)


@pytest.mark.parametrize("name", ["target", "temperature"])
def test_a_vector_on_another_device_is_named(name):
    arguments = {"logits": torch.zeros(3, 60), "target": torch.tensor([0, 1, 2]), "temperature": torch.ones(3)}
    of = {"target": "logits", "temperature": "target"}[name]
    with pytest.raises(ValueError, match=f"{name} is on meta; expected the device of {of}, cpu"):
        logprob(**arguments | {name: arguments[name].to("meta")})


def test_without_checks_a_target_out_of_range_shows(backend, device):
    logits, *_ = case(device, (4, 1001))
    target = torch.tensor([1001, -100, 5, 1000], device=device)
    leaf = logits.requires_grad_()
    scored, entropy = logprob(leaf, target, check_values=False)
    assert scored.isneginf().tolist() == [True, True, False, False]
    assert entropy.isfinite().all()
    scored, _ = logprob(leaf, target.clamp(0), vocab_size=1000, check_values=False)
    assert scored.isneginf().tolist() == [True, False, False, True]


def test_operators_are_registered_as_torch_wants_them(backend, device):
    logits, target, g, h = case(device, (3, 40))
    merged = module._statistics(logits, 30, target, None)
    inverse = torch.full((3,), 2.0, device=device)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(module._statistics, (logits, 30, target, inverse), test_utils=checks)
    torch.library.opcheck(module._gradient, (logits, 30, merged, target, g, None, inverse), test_utils=checks)
    torch.library.opcheck(module._gradient, (logits, 30, merged, target, g, h, None), test_utils=checks)
    torch.library.opcheck(module._gradient_in_place, (logits, 30, merged, target, g, h, None), test_utils=checks)


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        held = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in held:
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_second_buffer_of_the_logits_size_is_made(device, monkeypatch, with_entropy):
    monkeypatch.setattr(vocab_statistics, "_BLOCK_BYTES", {device: 4 * 500 * 10})
    logits, target, g, h = case(device, (100, 500), torch.bfloat16)
    merged = vocab_statistics.statistics(logits, target, None)
    with _Largest() as seen:
        vocab_statistics.statistics(logits, target, None)
        vocab_statistics.to_dlogits(logits, merged, target, g, h if with_entropy else None, None, logits)
    assert seen.numel == 10 * 500


CASES = {
    "even": {"shape": (6, 1280)},
    "padding": {"shape": (6, 1024), "vocab_size": 1001},
    "per-token temperature": {"shape": (6, 1000), "temperature": torch.linspace(0.5, 2.0, 6)},
    "nothing but padding": {"shape": (6, 400), "vocab_size": 200},
    "far": {"shape": (6, 400), "far": -300.0},
    "bfloat16, in place": {"shape": (6, 1000), "dtype": torch.bfloat16, "inplace_backward": True},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(backend, case name) -> (inputs, the results of both ranks)."""
    folder = tmp_path_factory.mktemp("logprob")
    inputs = {}
    for name, setting in CASES.items():
        setting = dict(setting)
        logits, target, g, h = case("cpu", setting.pop("shape"), setting.pop("dtype", torch.float32))
        logits[:, 200:] += setting.pop("far", 0.0)
        target %= setting.get("vocab_size", logits.shape[1])
        inputs[name] = {"logits": logits, "target": target, "g": g, "h": h, "settings": setting}
    torch.save(inputs, folder / "cases.pt")
    root = Path(__file__).parents[2]
    outs = [folder / f"rank{rank}.pt" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                Path(__file__).with_name("logprob_rank.py"),
                str(rank),
                "2",
                folder / "store",
                folder / "cases.pt",
                out,
            ],
            env={"PYTHONPATH": f"{root / 'kernels'}:{root}", "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    results = [torch.load(out) for out in outs]
    return {
        (backend, name): (inputs[name], [result[backend][name] for result in results]) for backend in BACKENDS for name in CASES
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", BACKENDS)
def test_I5_two_ranks_equal_one(ranks, check, implementation, name):
    inputs, (first, second) = ranks[implementation, name]
    settings = {key: value for key, value in inputs["settings"].items() if key != "inplace_backward"}
    scored, entropy, gradient = oracle(inputs["logits"], inputs["target"], inputs["g"], inputs["h"], **settings)
    check(first["logprob"], scored, numerics.LOGPROB)
    check(first["entropy"], entropy, numerics.ENTROPY)
    found = torch.cat([first["gradient"], second["gradient"]], 1)
    check(found, gradient, gradient_tolerance(inputs["logits"].dtype))
    for value in ("logprob", "entropy"):
        assert torch.equal(first[value], second[value]), value
    assert first["refused"] == second["refused"] == ["vocab_start", "target"]
