"""Critic and reference: values, losses and gradients against plain torch."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel

from drmas.config.schema import LossConfig, LossOverrides, PolicyConfig
from drmas.policy.reference import Reference


class PlainCritic:
    """transformers' backbone, a linear value head and torch's AdamW, row by row."""

    def __init__(self, folder, config):
        self.backbone = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.head = torch.nn.Parameter(torch.zeros(1, self.backbone.config.hidden_size))
        parameters = [*self.backbone.parameters(), self.head]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=config.critic.lr, eps=config.adam_eps)
        self.config = config

    def values(self, row):
        hidden = self.backbone(torch.tensor([[*row.prompt_ids, *row.response_ids]])).last_hidden_state[0]
        return (hidden @ self.head[0])[len(row.prompt_ids) - 1 : -1]

    def update(self, rows, returns, before, weights):
        loss, clip = 0.0, self.config.critic.clip_value
        for row, target, old, weight in zip(rows, returns, before, weights, strict=True):
            value, target, old = self.values(row), torch.tensor(target), torch.tensor(old)
            clipped = torch.minimum(torch.maximum(value, old - clip), old + clip)
            loss = loss + 0.5 * weight * torch.maximum((value - target) ** 2, (clipped - target) ** 2).sum()
        self.adam.zero_grad()
        loss.backward()
        parameters = [p for group in self.adam.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.critic.clip_grad_norm)
        self.adam.step()
        return loss.item(), norm.item()


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_values_and_updates_equal_plain_torch(kit, world, models, name):
    critic = kit.make_critic(models / name, world)
    plain = PlainCritic(models / name, critic.config)
    rows = kit.make_rows()
    generator = torch.Generator().manual_seed(2)
    returns = [torch.randn(len(row.response_ids), generator=generator).tolist() for row in rows]
    weights = [1.0 / sum(len(row.response_ids) for row in rows)] * len(rows)
    before = critic.values(rows)
    assert before == [[0.0] * len(row.response_ids) for row in rows]
    for _ in range(3):
        result = critic.update(rows, returns, before, weights)
        assert (result["loss"], result["grad_norm"]) == pytest.approx(plain.update(rows, returns, before, weights), rel=1e-4)
    for row, found in zip(rows, critic.values(rows), strict=True):
        torch.testing.assert_close(torch.tensor(found), plain.values(row).detach(), atol=1e-5, rtol=1e-4)
    assert max(abs(value) for row in critic.values(rows) for value in row) > 0.3  # so that the clip had a say
    assert critic.version == 3


def test_a_critic_learns_its_returns(kit, world, models):
    critic = kit.make_critic(models / "qwen3-tied", world)
    rows = kit.make_rows()
    returns = [[1.0 if row.agent == "solver" else -1.0] * len(row.response_ids) for row in rows]
    weights = [0.02] * len(rows)
    errors = [critic.update(rows, returns, critic.values(rows), weights)["error"] for _ in range(20)]
    assert errors[0] == pytest.approx(1.0)
    assert errors[-1] < 0.3


def test_I4_rows_of_weight_zero_teach_nothing(kit, world, models):
    critic, other = kit.make_critic(models / "qwen3-tied", world), kit.make_critic(models / "qwen3-tied", world)
    rows = kit.make_rows()
    returns = [[0.5] * len(row.response_ids) for row in rows]
    values = critic.values(rows)
    assert critic.update(rows, returns, values, [0.0] * 6)["skipped"] == 1.0
    assert critic.version == 0
    weights = [0.1] * 5 + [0.0]
    assert critic.update(rows, returns, values, weights) == other.update(rows[:5], returns[:5], values[:5], weights[:5])


def test_a_critic_continues_from_its_checkpoint(kit, world, models, tmp_path):
    rows = kit.make_rows()
    returns = [[0.5] * len(row.response_ids) for row in rows]
    critic, other = kit.make_critic(models / "qwen3-tied", world), kit.make_critic(models / "qwen3-tied", world)
    critic.update(rows, returns, critic.values(rows), [0.1] * 6)
    critic.save(tmp_path / "critic")
    other.load(tmp_path / "critic")
    assert other.version == 1
    for each in (critic, other):
        each.update(rows, returns, each.values(rows), [0.1] * 6)
    assert other.values(rows) == critic.values(rows)


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_a_kl_term_pulls_towards_the_reference(kit, trainer_of, world, models, kl):
    """Loss and gradient of one update against autograd on the estimator's definition."""
    loss = LossConfig(kl=kl, kl_coefficient=0.7)
    reference = Reference("main", PolicyConfig(model="llama"), model_path=models / "llama-tied", layout=world.layout())
    trainer = trainer_of("qwen3-tied", loss=loss, clip_grad_norm=1e9, reference=reference)
    without = trainer_of("qwen3-tied", clip_grad_norm=1e9)
    batch = kit.make_batch()
    own = trainer.logprobs(batch.rows, batch.temperatures)
    frozen = reference.logprobs(batch.rows, batch.temperatures)
    estimator = {
        "k2": lambda d: 0.5 * d**2,
        "k3": lambda d: (-d).exp() - 1 + d,
    }[kl]
    difference = [torch.tensor(a) - torch.tensor(b) for a, b in zip(own, frozen, strict=True)]
    expected = sum(w * estimator(d).sum() for w, d in zip(batch.token_weights, difference, strict=True))
    assert expected.abs() > 1e-2
    plain, result = without.update(batch), trainer.update(batch)
    assert result.metrics["loss"] - plain.metrics["loss"] == pytest.approx(0.7 * float(expected), rel=1e-4, abs=1e-6)
    kl_ref = sum(values["kl_ref"] * values["tokens"] for values in result.agents.values())
    assert kl_ref == pytest.approx(sum(float(estimator(d).sum()) for d in difference), rel=1e-4)
    assert kit.largest_difference(kit.gradients(trainer), kit.gradients(without)) > 1e-3


def test_a_policy_changes_what_it_names_of_the_loss(kit, trainer_of):
    run = LossConfig(clip_low=0.3, entropy_bonus=0.05)
    own = trainer_of("qwen3-tied", loss=run, overrides=LossOverrides(clip_low=0.1))
    same = trainer_of("qwen3-tied", loss=run.model_copy(update={"clip_low": 0.1}))
    batch = kit.make_batch()
    batch = kit.off_policy_batch(batch, own.logprobs(batch.rows, batch.temperatures))
    assert own.update(batch) == same.update(batch)


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "dp2", "pp2", "cp2"])
def test_I5_critic_and_reference_are_equal_on_every_layout(kit, trainer_of, world, models, two_ranks, layout):
    found = two_ranks["critics"][layout]
    critic = kit.make_critic(models / "qwen3-tied", world)
    expected = kit.run_critic(critic)
    assert found["updates"] == [pytest.approx(each, rel=1e-4) for each in expected["updates"]]
    for one, other in zip(found["values"], expected["values"], strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    reference = Reference("main", PolicyConfig(model="llama"), model_path=models / "llama-tied", layout=world.layout())
    loss = LossConfig(kl="k2", kl_coefficient=0.5)
    expected = trainer_of("qwen3-tied", loss=loss, reference=reference).update(kit.make_batch())
    assert found["kl"]["metrics"]["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
    assert found["kl"]["metrics"]["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-5)
    assert found["kl"]["agents"]["solver"]["kl_ref"] == pytest.approx(expected.agents["solver"]["kl_ref"], rel=1e-4)
