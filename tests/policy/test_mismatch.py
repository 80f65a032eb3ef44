"""The correction for rows that other weights, or another engine, sampled: loss, gradient and metrics against float64 torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from drmas.config.schema import LossConfig, RunConfig
from drmas.errors import DataError
from drmas.policy.trainer import mismatch_rule

LOW, HIGH = 0.6, 1.7
STALE = {"truncate": 3.0, "mask": 1.2}
"""Nats by which the engine's log-probs of the rows stray: omega from e^-6 to e^6, or to e^2.4 so that the mask leaves some."""


def corrected(rule: str, **more) -> LossConfig:
    return LossConfig(mismatch=rule, mismatch_low=LOW, mismatch_high=HIGH, **more)


class Reference:
    """transformers and autograd in float64: the decoupled loss, token by token."""

    def __init__(self, folder, loss: LossConfig) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        self.loss = loss
        self.omegas: dict[str, list[torch.Tensor]] = {}
        self.changed: dict[str, list[torch.Tensor]] = {}

    def logprobs(self, row, temperature: float) -> torch.Tensor:
        logits = self.model(torch.tensor([[*row.prompt_ids, *row.response_ids]])).logits[0] / temperature
        chosen = logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        return chosen.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]

    def weight(self, omega: torch.Tensor, agent: str) -> torch.Tensor:
        """Truncated, or 0 outside the bounds."""
        outside = omega > HIGH if self.loss.mismatch == "truncate" else (omega > HIGH) | (omega < LOW)
        self.omegas.setdefault(agent, []).append(omega)
        self.changed.setdefault(agent, []).append(outside)
        return torch.where(outside, HIGH if self.loss.mismatch == "truncate" else 0.0, omega)

    def gradients(self, batch) -> tuple[float, dict[str, torch.Tensor]]:
        low, high = 1 - self.loss.clip_low, 1 + self.loss.clip_high
        total = torch.zeros((), dtype=torch.float64)
        for i, row in enumerate(batch.rows):
            now, advantage = self.logprobs(row, batch.temperatures[i]), batch.advantages[i]
            before = now.detach() if batch.old_logprobs is None else torch.tensor(batch.old_logprobs[i], dtype=torch.float64)
            ratio = (now - before).exp()
            term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
            if advantage < 0:
                term = torch.minimum(term, torch.tensor(-advantage * self.loss.dual_clip, dtype=torch.float64))
            omega = self.weight((before - torch.tensor(row.logprobs, dtype=torch.float64)).exp(), row.agent)
            total = total + batch.token_weights[i] * (omega * term).sum()
        self.model.zero_grad()
        total.backward()
        return total.item(), {name: p.grad.float() for name, p in self.model.named_parameters()}


def stale_batch(kit, trainer, *, spread: float = 3.0):
    """Rows whose log-probs an engine with quite other weights gave."""
    batch = kit.make_batch()
    return kit.off_policy_batch(batch, trainer.logprobs(batch.rows, batch.temperatures), spread=spread)


def assert_equals_reference(kit, trainer, batch, reference) -> None:
    result = trainer.update(batch)
    loss, gradients = reference.gradients(batch)
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    found = kit.gradients(trainer)
    expected = {name: gradients[name] for name in found}
    norm = sum(gradient.double().square().sum() for gradient in expected.values()).sqrt().item()
    assert norm > 0.05
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert kit.largest_difference(found, expected) < 1e-5 * norm
    for agent, values in result.agents.items():
        omegas, changed = torch.cat(reference.omegas[agent]), torch.cat(reference.changed[agent])
        assert values["mismatch_mean"] == pytest.approx(omegas.mean().item(), rel=1e-4)
        assert values["mismatch_truncated_share"] == pytest.approx(changed.double().mean().item())
        assert 0.2 < values["mismatch_truncated_share"] < 0.9


@pytest.mark.parametrize("rule", ["truncate", "mask"])
@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_the_first_update_of_a_step_equals_float64_torch(kit, trainer_of, models, name, rule):
    loss = corrected(rule)
    trainer = trainer_of(name, loss=loss, clip_grad_norm=1e9, tokens_per_microbatch=40)
    batch = stale_batch(kit, trainer, spread=STALE[rule])
    assert_equals_reference(kit, trainer, batch, Reference(models / name, loss))


@pytest.mark.parametrize("rule", ["truncate", "mask"])
def test_a_later_update_with_the_log_probs_from_before_equals_float64_torch(kit, trainer_of, models, rule):
    """`old_logprobs` around the policy's own, so that the ratio is clipped on both sides, apart from what omega does."""
    loss = corrected(rule, clip_low=0.1, clip_high=0.25, dual_clip=1.5)
    trainer = trainer_of("qwen3-tied", loss=loss, clip_grad_norm=1e9, tokens_per_microbatch=40)
    batch = stale_batch(kit, trainer, spread=STALE[rule])
    generator = torch.Generator().manual_seed(9)
    own = trainer.logprobs(batch.rows, batch.temperatures)
    before = [(torch.tensor(values) + 0.5 * torch.randn(len(values), generator=generator)).tolist() for values in own]
    assert_equals_reference(kit, trainer, replace(batch, old_logprobs=before), Reference(models / "qwen3-tied", loss))


def test_in_the_first_update_the_ratio_is_1_and_the_log_probs_from_before_change_nothing(kit, trainer_of):
    trainer, other = (trainer_of("qwen3-tied", loss=corrected("truncate"), clip_grad_norm=1e9) for _ in range(2))
    batch = stale_batch(kit, trainer)
    own = trainer.logprobs(batch.rows, batch.temperatures)
    first, given = trainer.update(batch), other.update(replace(batch, old_logprobs=own))
    for values in first.agents.values():
        assert (values["ratio_min"], values["ratio_max"]) == (1.0, 1.0)
        assert values["clip_low_share"] == values["clip_high_share"] == values["dual_clip_share"] == 0.0
    assert given.metrics["grad_norm"] == pytest.approx(first.metrics["grad_norm"], rel=1e-5)
    assert kit.largest_difference(kit.weights(trainer), kit.weights(other)) < 1e-6


def test_without_correction_the_ratio_is_against_the_engine_and_nothing_is_weighted(kit, trainer_of):
    plain, unset = trainer_of("qwen3-tied", loss=LossConfig(mismatch="none")), trainer_of("qwen3-tied")
    batch = stale_batch(kit, plain)
    shifted = [[value + 1.0 for value in row.logprobs] for row in batch.rows]
    result = plain.update(replace(batch, old_logprobs=shifted))
    assert result == unset.update(batch)
    assert max(values["ratio_max"] for values in result.agents.values()) > 10
    assert not [key for values in result.agents.values() for key in values if key.startswith("mismatch")]


def test_log_probs_of_the_weights_themselves_need_no_correction(kit, trainer_of):
    """On rows that these very weights sampled the rules agree with the uncorrected loss."""
    found = {}
    for rule in ("none", "truncate", "mask"):
        trainer = trainer_of("qwen3-tied", loss=corrected(rule), clip_grad_norm=1e9)
        found[rule] = trainer.update(stale_batch(kit, trainer, spread=0.0)), kit.gradients(trainer)
    plain, expected = found.pop("none")
    for result, gradients in found.values():
        assert result.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-5)
        assert kit.largest_difference(gradients, expected) < 1e-5 * plain.metrics["grad_norm"]
        assert {values["mismatch_truncated_share"] for values in result.agents.values()} == {0.0}
        assert [values["mismatch_mean"] for values in result.agents.values()] == pytest.approx([1.0, 1.0], abs=1e-4)


def test_supervised_updates_are_never_weighted(kit, trainer_of):
    rows = [replace(row, logprobs=[]) for row in kit.make_rows()]
    batch = kit.make_batch(rows, advantages=[1.0] * 6, on_policy=True)
    masked, plain = trainer_of("qwen3-tied", loss=corrected("mask")), trainer_of("qwen3-tied")
    result = masked.update(batch)
    assert result == plain.update(batch)
    assert result.gaps == {}


def test_the_divergence_is_that_from_the_policy_that_sampled_whatever_the_rule(kit, trainer_of):
    results = {}
    for rule in ("none", "truncate"):
        trainer = trainer_of("qwen3-tied", loss=corrected(rule), tokens_per_microbatch=40)
        results[rule] = trainer.update(stale_batch(kit, trainer, spread=0.5))
    for agent, values in results["none"].agents.items():
        for name in ("kl_k1", "kl_k3"):
            assert results["truncate"].agents[agent][name] == pytest.approx(values[name], rel=1e-4, abs=1e-5)
        assert values["kl_k3"] > 0.05


@pytest.mark.parametrize("rule", ["none", "truncate"])
def test_I11_the_gap_is_measured_on_fresh_rows_only(kit, trainer_of, rule):
    """The solver's log-probs are off by 0.5, of one row by 2; the verifier's rows are stale, wholly or by one token."""
    trainer = trainer_of("qwen3-tied", loss=corrected(rule), tokens_per_microbatch=40)
    trainer.version = 4
    rows = kit.make_rows(versions=4)
    own = trainer.logprobs(rows, [1.0] * 6)
    shifts = [0.5, 9.0, 2.0, 9.0, 0.5, 9.0]
    rows = [
        replace(row, logprobs=[value + shift for value in values]) for row, values, shift in zip(rows, own, shifts, strict=True)
    ]
    rows[1] = replace(rows[1], versions=[3] * len(rows[1].versions))
    rows[3] = replace(rows[3], versions=[3, *rows[3].versions[1:]])
    rows[5] = replace(rows[5], versions=[*rows[5].versions[:-1], 2])
    result = trainer.update(kit.make_batch(rows, temperatures=[1.0] * 6))
    assert list(result.gaps) == ["solver"]
    gap, lengths = result.gaps["solver"], [len(rows[i].response_ids) for i in (0, 2, 4)]
    assert gap.tokens == sum(lengths)
    assert gap.mean == pytest.approx((0.5 * lengths[0] + 2.0 * lengths[1] + 0.5 * lengths[2]) / sum(lengths), abs=1e-4)
    assert gap.largest == pytest.approx(2.0, abs=1e-4)
    assert next(iter(gap.worst)) == f"{rows[2].episode}/{rows[2].turn}"
    assert gap.worst == pytest.approx(
        {f"{rows[i].episode}/{rows[i].turn}": shift for i, shift in ((2, 2.0), (0, 0.5), (4, 0.5))}, abs=1e-4
    )


def test_a_row_of_weight_zero_is_in_no_gap(kit, trainer_of):
    trainer = trainer_of("qwen3-tied")
    rows = kit.make_rows()
    result = trainer.update(kit.make_batch(rows, token_weights=[0.1, 0.1, 0.0, 0.0, 0.0, 0.0]))
    assert {agent: list(gap.worst) for agent, gap in result.gaps.items()} == {
        agent: [f"{row.episode}/{row.turn}"] for agent, row in zip(("solver", "verifier"), rows[:2], strict=True)
    }


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (lambda own: own[:-1], "5 old_logprobs for 6 rows; expected one per row"),
        (lambda own: [own[0][:-1], *own[1:]], "row 0 .*: 3 old log-probs for 4 response tokens"),
    ],
)
def test_log_probs_from_before_that_dont_fit_the_rows_are_refused(kit, trainer_of, old, message):
    trainer = trainer_of("qwen3-tied", loss=corrected("truncate"))
    batch = stale_batch(kit, trainer)
    own = trainer.logprobs(batch.rows, batch.temperatures)
    with pytest.raises(DataError, match=message):
        trainer.update(replace(batch, old_logprobs=old(own)))
    assert trainer.version == 0


@pytest.mark.parametrize(
    ("mismatch", "staleness", "expected"),
    [(None, 0, "none"), (None, 1, "truncate"), ("none", 1, "none"), ("mask", 0, "mask"), ("truncate", 0, "truncate")],
)
def test_an_unset_rule_is_truncate_where_rollouts_may_be_stale(mismatch, staleness, expected):
    config = RunConfig(
        policies={"main": {"model": "tiny:qwen3"}},
        team={"name": "solver-verifier"},
        data={"type": "sums"},
        rollout={"max_staleness": staleness},
        loss={"mismatch": mismatch},
    )
    assert mismatch_rule(config) == expected


def test_bounds_that_mask_every_token_are_refused():
    with pytest.raises(ValidationError, match="mismatch_low is 3 and mismatch_high is 2; that masks every token"):
        LossConfig(mismatch="mask", mismatch_low=3.0)
    assert LossConfig(mismatch="truncate", mismatch_low=3.0).mismatch_low == 3.0  # which it doesn't read
