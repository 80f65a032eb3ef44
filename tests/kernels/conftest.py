"""Cases and float64 oracles for the kernels' tests, written from the formulas and not from the implementation."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch

from drmas_kernels.backend import use
from drmas_kernels.linear_logprob import linear_logprob, linear_policy_loss
from drmas_kernels.policy_loss import PolicyLossOptions
from drmas_kernels.spec import MODULES
from tests.kernels import interpreter

torch.set_num_threads(1)

if interpreter.DEVICE == "cpu":
    interpreter.mend()
elif interpreter.DEVICE != "cuda" or not torch.cuda.is_available():
    pytest.exit(f"DRMAS_TEST_DEVICE is {interpreter.DEVICE!r}; expected cpu, or cuda where torch sees a GPU", returncode=4)
for module in MODULES:
    interpreter.load(f"drmas_kernels.{module}")


def pytest_collection_modifyitems(items):
    """Marks what a test runs: `triton` Triton kernels, `ranks` a process for each of several ranks."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        parameters = item.callspec.id.split("-") if hasattr(item, "callspec") else ()
        if "triton_backend" in item.fixturenames or "triton" in parameters or item.path.stem == "test_head_kernel":
            item.add_marker("triton")
        if "ranks" in item.fixturenames:
            item.add_marker("ranks")


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    """Runs a test once with each implementation."""
    with use(request.param):
        yield request.param


@pytest.fixture
def triton_backend():
    """Runs a test with the Triton kernels: interpreted, or on the GPU that DRMAS_TEST_DEVICE=cuda asks for."""
    with use("triton"):
        yield


@pytest.fixture(scope="session")
def device():
    return interpreter.DEVICE


@pytest.fixture(scope="session")
def golden():
    return json.loads((Path(__file__).parents[1] / "golden" / "advantage.json").read_text())


def to_device(value):
    """A tensor on the tests' device; anything else as it is."""
    return value.to(interpreter.DEVICE) if isinstance(value, torch.Tensor) else value


@dataclass
class Head:
    """Inputs of `linear_policy_loss`; rows of tokens are laid out one after another."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    old_logprob: torch.Tensor | None
    row: torch.Tensor
    advantage: torch.Tensor
    token_weight: torch.Tensor
    agent: torch.Tensor
    num_agents: int = 2

    @classmethod
    def random(cls, tokens, hidden, vocabulary, *, seed=0, scale=0.3, offset=None, dtype=torch.float32):
        """Old log-probs are near the new ones, some far.

        `offset` is added to every logit, by a constant feature; inputs are then short binary fractions whose products and sums
        fp32 holds exactly, so that only what happens to the logits is tested.
        """
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(tokens, hidden, generator=generator)
        weight = torch.randn(vocabulary, hidden, generator=generator) * scale
        if offset is not None:
            states, weight = (states * 8).round() / 8, (weight * 16).round() / 16
            states[:, 0], weight[:, 0] = 1.0, offset
        states, weight = states.to(dtype), weight.to(dtype)
        target = torch.randint(vocabulary, (tokens,), generator=generator)
        logits = states.double() @ weight.double().t()
        new = logits.log_softmax(-1).gather(1, target[:, None]).squeeze(1)
        old = (new + 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64)).float()
        rows = 5
        row = torch.arange(tokens) * rows // max(tokens, 1)
        advantage = torch.randn(rows, generator=generator) * 1.5
        token_weight = torch.rand(tokens, generator=generator) / max(tokens, 1)
        return cls(states, weight, target, old, row, advantage, token_weight, torch.tensor([0, 1, 0, 1, 1]))

    def but(self, **changes):
        return replace(self, **changes)

    def run(self, options=None, **settings):
        """(result, dH, dW) of the implementation, on the CPU."""
        hidden = self.hidden.detach().clone().to(interpreter.DEVICE).requires_grad_()
        weight = self.weight.detach().clone().to(interpreter.DEVICE).requires_grad_()
        result = linear_policy_loss(
            hidden,
            weight,
            *self.arguments(),
            num_agents=self.num_agents,
            options=options or PolicyLossOptions(),
            **{name: to_device(value) for name, value in settings.items()},
        )
        (result.loss * settings.get("grad_scale", 1.0)).backward()
        metrics = type(result.metrics)(**{f.name: getattr(result.metrics, f.name).cpu() for f in fields(result.metrics)})
        return result._replace(loss=result.loss.cpu(), logprob=result.logprob.cpu(), metrics=metrics), *(
            None if tensor.grad is None else tensor.grad.cpu() for tensor in (hidden, weight)
        )

    def arguments(self):
        """What `linear_policy_loss` takes after hidden and weight, on the tests' device."""
        names = ("target", "old_logprob", "row", "advantage", "token_weight", "agent")
        return [to_device(getattr(self, name)) for name in names]

    def scored(self, **settings):
        """(log-prob, entropy) of the implementation, on the CPU."""
        inputs = (to_device(tensor) for tensor in (self.hidden, self.weight, self.target))
        return [
            result.cpu() for result in linear_logprob(*inputs, **{name: to_device(value) for name, value in settings.items()})
        ]

    def oracle(self, options=None, *, vocab_size=None, temperature=1.0):
        """(loss, logprob, entropy, dH, dW) by float64 autograd, for tokens that all have finite inputs."""
        options = options or PolicyLossOptions()
        hidden = self.hidden.double().requires_grad_()
        weight = self.weight.double().requires_grad_()
        temperature = torch.as_tensor(temperature).double().expand(hidden.shape[0])
        logp = ((hidden @ weight[:vocab_size].t()) / temperature[:, None]).log_softmax(-1)
        chosen = logp.gather(1, self.target[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1)
        old = chosen.detach() if self.old_logprob is None else self.old_logprob.double()
        pg = clipped_loss(chosen, old, self.advantage.double()[self.row], options)
        loss = (self.token_weight.double() * (pg - options.entropy_bonus * entropy)).sum()
        loss.backward()
        return loss.detach(), chosen.detach(), entropy.detach(), hidden.grad, weight.grad


def clipped_loss(logprob, old, advantage, options):
    """The loss per token by the book, differentiable."""
    ratio = (logprob - old).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if options.dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * options.dual_clip), loss)


@pytest.fixture(scope="session")
def head():
    """Makes a random case."""
    return Head.random


@pytest.fixture(scope="session")
def loss_by_the_book():
    return clipped_loss


@pytest.fixture(scope="session")
def check():
    """check(actual, expected, tolerance) fails with the worst element and the tolerance's reason."""

    def check(actual, expected, tolerance):
        mismatch = tolerance.mismatch(actual, expected)
        assert mismatch is None, mismatch

    return check
