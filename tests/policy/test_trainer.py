"""Updates against independent ones in plain torch, and what must not change them: layout, order, packing, excluded rows."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from fnmatch import fnmatchcase

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drmas.config.schema import LossConfig
from drmas.core.batching import token_weights
from drmas.errors import ConfigError, DataError
from drmas.policy.batch import PolicyBatch

UPDATED = ("qwen3-tied", "qwen2-untied", "llama-untied", "qwen3-one-kv-head")
LAYOUTS = ("tp2", "tp2-sp", "dp2", "pp2", "cp2")
PRODUCTS = ("tp2-sp x dp2", "tp2-sp x pp2", "pp2 x dp2", "tp2-sp x cp2", "cp2 x pp2")
LOSSES = ("default", "asymmetric, no dual clip, entropy", "asymmetric, tight dual clip")


class Reference:
    """transformers, autograd and torch's AdamW: the loss of the README's formula, row by row, without packing or kernels."""

    def __init__(self, folder, config, loss=None):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        betas = (config.adam_beta1, config.adam_beta2)
        self.adam = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps)
        self.loss = loss or LossConfig()
        self.clip_grad_norm = config.clip_grad_norm

    def distributions(self, row, temperature):
        """[response tokens, vocabulary] log-probs."""
        logits = self.model(torch.tensor([[*row.prompt_ids, *row.response_ids]])).logits[0] / temperature
        return logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)

    def logprobs(self, row, temperature):
        return self.distributions(row, temperature).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]

    def token_losses(self, batch):
        """The loss of each row's tokens, before any weight."""
        low, high = 1 - self.loss.clip_low, 1 + self.loss.clip_high
        for row, advantage, temperature in zip(batch.rows, batch.advantages, batch.temperatures, strict=True):
            distribution = self.distributions(row, temperature)
            logprob = distribution.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
            old = logprob.detach() if batch.on_policy else torch.tensor(row.logprobs)
            ratio = (logprob - old).exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
            if advantage < 0 and self.loss.dual_clip is not None:
                loss = torch.minimum(loss, torch.tensor(-advantage * self.loss.dual_clip))
            yield loss + self.loss.entropy_bonus * (distribution.exp() * distribution).sum(-1)

    def update(self, batch):
        """(loss, gradient norm before clipping)."""
        return self.step(sum(w * loss.sum() for w, loss in zip(batch.token_weights, self.token_losses(batch), strict=True)))

    def step(self, loss):
        self.adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        self.adam.step()
        return loss.item(), norm.item()

    def weights(self, names):
        state = self.model.state_dict()
        return {name: state[name] for name in names}


@pytest.mark.parametrize("name", UPDATED)
@pytest.mark.parametrize("clip", [0.05, 1e9], ids=["clipped", "unclipped"])
def test_updates_equal_plain_torch(kit, trainer_of, models, name, clip):
    trainer = trainer_of(name, clip_grad_norm=clip, weight_decay=0.1)
    reference = Reference(models / name, trainer.config)
    for i in range(3):
        batch = kit.make_batch(kit.make_rows(seed=10 + i))
        result = trainer.update(batch)
        loss, norm = reference.update(batch)
        assert result.metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05
    found = kit.weights(trainer)
    assert kit.largest_difference(found, reference.weights(found)) < 1e-6
    assert trainer.version == 3


def assert_every_clip_is_active(agents, loss):
    shares = {key: max(values[key] for values in agents.values()) for key in ("clip_low_share", "clip_high_share")}
    assert min(shares.values()) > 0.1
    dual = max(values["dual_clip_share"] for values in agents.values())
    assert dual > 0.01 if loss.dual_clip else dual == 0.0
    assert max(values["ratio_max"] for values in agents.values()) > 3.0  # where the usual dual clip would be


@pytest.mark.parametrize("loss", LOSSES)
def test_clipped_updates_equal_plain_torch(kit, trainer_of, models, loss):
    """Behaviour log-probs far from the policy's own, so that each of the loss's settings decides about tokens."""
    config = kit.LOSSES[loss]
    trainer = trainer_of("qwen3-tied", loss=config, clip_grad_norm=0.5)
    reference = Reference(models / "qwen3-tied", trainer.config, config)
    for i in range(3):
        batch = kit.make_batch(kit.make_rows(seed=10 + i))
        batch = kit.off_policy_batch(batch, trainer.logprobs(batch.rows, batch.temperatures), seed=i)
        result = trainer.update(batch)
        assert_every_clip_is_active(result.agents, config)
        assert (result.metrics["loss"], result.metrics["grad_norm"]) == pytest.approx(reference.update(batch), rel=2e-5)
    found = kit.weights(trainer)
    assert kit.largest_difference(found, reference.weights(found)) < 1e-6


@pytest.mark.parametrize("layout", ["tp2-sp", "dp2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_clipped_updates_of_two_ranks_equal_plain_torch(kit, trainer_of, two_ranks, models, loss, layout):
    config, found = kit.LOSSES[loss], two_ranks["losses"][f"{loss}/{layout}"]
    assert_every_clip_is_active(found["agents"], config)
    trainer = trainer_of("qwen3-tied", clip_grad_norm=1e9)
    reference = Reference(models / "qwen3-tied", trainer.config, config)
    expected = reference.update(found["batch"])
    assert (found["metrics"]["loss"], found["metrics"]["grad_norm"]) == pytest.approx(expected, rel=2e-5)
    assert kit.largest_difference(found["weights"], reference.weights(found["weights"])) < 1e-6


AGGREGATIONS = {
    "token": lambda losses: torch.cat([x for turns in losses.values() for x in turns]).mean(),
    "turn": lambda losses: torch.stack([x.mean() for turns in losses.values() for x in turns]).mean(),
    "episode": lambda losses: torch.stack([torch.cat(turns).mean() for turns in losses.values()]).mean(),
}
"""Token losses by episode, one vector per turn -> the loss of an update."""


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_I5_an_aggregation_gives_the_gradient_of_its_mean(kit, trainer_of, models, aggregation):
    """Means of means in plain torch, against the trainer's one weighted sum; episodes of three, two and one turns."""
    rows = [replace(row, episode=f"t0#{name}", task="t0") for row, name in zip(kit.make_rows(), "aaabbc", strict=True)]
    batch = kit.make_batch(rows, token_weights=token_weights(rows, aggregation))
    trainer = trainer_of("qwen3-tied", clip_grad_norm=1e9, tokens_per_microbatch=40)
    reference = Reference(models / "qwen3-tied", trainer.config)
    episodes = {}
    for row, loss in zip(rows, reference.token_losses(batch), strict=True):
        episodes.setdefault(row.episode, []).append(loss)
    expected = {name: combine(episodes).item() for name, combine in AGGREGATIONS.items()}
    assert min(abs(expected[a] - expected[b]) for a in expected for b in expected if a < b) > 1e-3
    loss, norm = reference.step(AGGREGATIONS[aggregation](episodes))
    result = trainer.update(batch)
    assert (result.metrics["loss"], result.metrics["grad_norm"]) == pytest.approx((loss, norm), rel=1e-5)
    found = kit.gradients(trainer)
    gradients = {name: p.grad for name, p in reference.model.named_parameters() if name in found}
    assert kit.largest_difference(found, gradients) < 1e-5 * norm


def test_supervised_updates_equal_plain_torch(kit, trainer_of, models):
    trainer = trainer_of("qwen3-tied")
    reference = Reference(models / "qwen3-tied", trainer.config)
    rows = [replace(row, logprobs=[]) for row in kit.make_rows()]
    batch = kit.make_batch(rows, advantages=[1.0] * 6, on_policy=True)
    before = sum(sum(row) for row in trainer.logprobs(rows, batch.temperatures))
    for _ in range(3):
        assert trainer.update(batch).metrics["grad_norm"] == pytest.approx(reference.update(batch)[1], rel=1e-5)
    found = kit.weights(trainer)
    assert kit.largest_difference(found, reference.weights(found)) < 1e-6
    assert sum(sum(row) for row in trainer.logprobs(rows, batch.temperatures)) > before + 1


def test_I11_logprobs_are_of_the_tempered_distribution_in_row_order(kit, trainer_of, models):
    trainer = trainer_of("llama-untied", tokens_per_microbatch=24)
    rows, temperatures = kit.make_rows(), [1.0, 0.7, 1.3, 1.0, 0.7, 1.0]
    reference = Reference(models / "llama-untied", trainer.config)
    found = trainer.logprobs(rows, temperatures)
    for row, temperature, values in zip(rows, temperatures, found, strict=True):
        torch.testing.assert_close(torch.tensor(values), reference.logprobs(row, temperature), atol=1e-5, rtol=0)
    assert trainer.logprobs([], []) == []


WORK = ("computed_tokens", "tokens_saved", "flops")
"""What depends on the plan: rows that share a start may be in different microbatches."""


def assert_same_update(one, other):
    """Two reports of the same rows by different layouts or packings."""
    for metrics in (one["metrics"], other["metrics"]):
        read = metrics["computed_tokens"] + metrics["tokens_saved"]
        assert 0 < read < metrics["tokens"]
        assert metrics["flops"] > 0
    kept = [{key: value for key, value in each["metrics"].items() if key not in WORK} for each in (one, other)]
    assert kept[1] == pytest.approx(kept[0], rel=1e-5)
    assert other["agents"].keys() == one["agents"].keys()
    for agent, values in one["agents"].items():
        assert other["agents"][agent] == pytest.approx(values, rel=1e-4, abs=1e-6)
    assert one["gaps"].keys() == other["gaps"].keys() == one["agents"].keys()  # all rows are fresh
    for agent, gap in one["gaps"].items():
        found = dict(other["gaps"][agent])
        assert found.pop("worst") == pytest.approx(gap["worst"], rel=1e-4)
        assert found == pytest.approx({name: value for name, value in gap.items() if name != "worst"}, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", UPDATED)
def test_I5_loss_norm_metrics_and_weights_are_equal_on_every_layout(kit, trainer_of, two_ranks, name, layout):
    """Two ranks in microbatches of at most 24 tokens against one rank in one microbatch."""
    trainer = trainer_of(name, clip_grad_norm=1e9)
    expected = kit.run_updates(trainer, 2)
    found = two_ranks["updates"][f"{name}/{layout}"]
    assert found["same"]  # on both ranks
    for one, other in zip(expected, found["reports"], strict=True):
        assert one["agents"].keys() == {"solver", "verifier"}
        assert_same_update(one, other)
    assert kit.largest_difference(found["weights"], kit.weights(trainer)) < 1e-6
    torch.testing.assert_close(found["logprobs"][2], trainer.logprobs(kit.make_rows(), [1.0] * 6)[2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp"])
@pytest.mark.parametrize("name", UPDATED)
def test_I5_gradients_at_two_tensor_parallel_ranks_equal_one(kit, trainer_of, two_ranks, name, layout):
    trainer = trainer_of(name, clip_grad_norm=1e9)
    kit.run_updates(trainer, 1)
    expected = kit.gradients(trainer)
    assert kit.largest_difference(two_ranks["updates"][f"{name}/{layout}"]["gradient"], expected) < 1e-5
    assert min(tensor.abs().max() for tensor in expected.values()) > 1e-4  # every parameter has a gradient to compare


def test_I5_microbatches_and_row_order_change_nothing(kit, trainer_of):
    batch = kit.make_batch()
    order = [4, 0, 5, 2, 1, 3]
    shuffled = replace(
        batch, **{key: [getattr(batch, key)[i] for i in order] for key in ("rows", "advantages", "temperatures")}
    )
    found = {}
    for name, budget, given in (("whole", 4096, batch), ("single rows", 1, batch), ("shuffled", 30, shuffled)):
        trainer = trainer_of("qwen3-tied", tokens_per_microbatch=budget)
        found[name] = (trainer.update(given), kit.weights(trainer))
    expected, weights = found.pop("whole")
    for result, other in found.values():
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
        for agent, values in expected.agents.items():
            assert result.agents[agent] == pytest.approx(values, rel=1e-4, abs=1e-6)
        assert kit.largest_difference(other, weights) < 1e-6


def test_progress_counts_every_row_once(kit, trainer_of):
    heard: list[int] = []
    batch = kit.make_batch()
    trainer_of("qwen3-tied", tokens_per_microbatch=1).update(batch, on_rows=heard.append)
    assert heard == [1] * len(batch.rows)


def test_I3_I4_excluded_rows_change_nothing(kit, trainer_of):
    plain, padded = trainer_of("qwen3-tied"), trainer_of("qwen3-tied")
    batch = kit.make_batch()
    rows = [*batch.rows, replace(batch.rows[0], status="engine", reward=None, logprobs=[9.9], versions=[])]
    extended = kit.make_batch(
        rows,
        advantages=[*batch.advantages, 7.0],
        token_weights=[*batch.token_weights, 0.0],
        temperatures=[*batch.temperatures, 1.0],
    )
    assert padded.update(extended) == plain.update(batch)
    assert kit.largest_difference(kit.weights(plain), kit.weights(padded)) == 0.0


def test_I4_a_rank_without_rows_changes_nothing(kit, trainer_of, two_ranks):
    trainer = trainer_of("qwen3-tied")
    expected = trainer.update(kit.make_batch(kit.make_rows(1)))
    assert two_ranks["idle"]["metrics"] == pytest.approx(expected.metrics, rel=1e-5)
    assert kit.largest_difference(two_ranks["idle"]["weights"], kit.weights(trainer)) < 1e-6
    assert two_ranks["idle"]["logprobs"][0] == pytest.approx(trainer.logprobs(kit.make_rows(1), [1.0])[0], abs=1e-5)


def test_I4_a_batch_without_weights_is_no_step(kit, trainer_of):
    trainer = trainer_of("qwen3-tied")
    before = kit.weights(trainer)
    for batch in (kit.make_batch(token_weights=[0.0] * 6), PolicyBatch([], [], [], [])):
        result = trainer.update(batch)
        work = dict.fromkeys(("tokens", *WORK), 0.0)
        assert result.metrics == {"loss": 0.0, "grad_norm": 0.0, "lr": 1e-3, "skipped": 1.0, **work}
        assert result.agents == {}
    assert trainer.version == 0
    assert kit.largest_difference(kit.weights(trainer), before) == 0.0


def test_I8_an_agent_without_rows_has_no_metrics(kit, trainer_of):
    rows = [row for row in kit.make_rows() if row.agent == "verifier"]
    result = trainer_of("qwen3-tied").update(kit.make_batch(rows))
    assert list(result.agents) == ["verifier"]
    assert result.agents["verifier"]["tokens"] == sum(len(row.response_ids) for row in rows)
    assert result.metrics["loss"] == pytest.approx(result.agents["verifier"]["loss"], rel=1e-6)


def test_rows_of_advantage_zero_push_nowhere(kit, trainer_of):
    trainer = trainer_of("qwen3-tied", weight_decay=0.0)
    before = kit.weights(trainer)
    result = trainer.update(kit.make_batch(advantages=[0.0] * 6))
    assert result.metrics["grad_norm"] == 0.0
    assert result.agents["solver"]["entropy"] > 0
    assert kit.largest_difference(kit.weights(trainer), before) == 0.0


def test_the_logprob_gap_is_measured_per_agent(kit, trainer_of):
    trainer = trainer_of("qwen3-tied")
    rows = kit.make_rows()
    own = trainer.logprobs(rows, [1.0] * 6)
    shifted = [
        replace(row, logprobs=[v + (0.5 if row.agent == "solver" else 0.0) for v in values])
        for row, values in zip(rows, own, strict=True)
    ]
    result = trainer.update(kit.make_batch(shifted, temperatures=[1.0] * 6))
    assert result.agents["solver"]["logprob_gap_mean"] == pytest.approx(0.5, abs=1e-4)
    assert result.agents["solver"]["ratio_max"] == pytest.approx(math.exp(-0.5), abs=1e-4)
    assert result.agents["verifier"]["logprob_gap_max"] < 1e-5


def test_a_gradient_that_is_not_finite_is_skipped(kit, trainer_of):
    trainer, other = trainer_of("qwen3-tied"), trainer_of("qwen3-tied")
    before = kit.weights(trainer)
    result = trainer.update(kit.make_batch(advantages=[math.inf, 1.0, 1.0, 1.0, 1.0, 1.0]))
    assert result.metrics["skipped"] == 1.0
    assert not math.isfinite(result.metrics["grad_norm"])
    assert trainer.version == 0
    assert kit.largest_difference(kit.weights(trainer), before) == 0.0
    assert kit.run_updates(trainer, 2) == kit.run_updates(other, 2)  # as if it had never been


@pytest.mark.parametrize("product", PRODUCTS)
def test_I5_products_of_layouts_update_save_and_export_as_one_rank(kit, trainer_of, four_ranks, product):
    """Four ranks in small microbatches, with clipping; a checkpoint of theirs goes on on one rank."""
    found, number = four_ranks[product], PRODUCTS.index(product)
    assert math.prod(found["sizes"].values()) == 4
    straight = trainer_of("qwen3-tied")
    expected = kit.run_updates(straight, 2)
    for one, other in zip(expected, found["reports"], strict=True):
        assert_same_update(one, other)
    assert kit.largest_difference(found["weights"], kit.weights(straight)) < 1e-6
    exported = load_file(four_ranks["shared"] / f"exported-{number}" / "model.safetensors")
    assert kit.largest_difference(exported, found["weights"]) == 0.0
    resumed = trainer_of("qwen3-tied", seed=99)
    resumed.load(four_ranks["shared"] / f"saved-{number}")
    assert resumed.version == 2
    assert kit.largest_difference(kit.weights(resumed), found["weights"]) == 0.0
    assert_same_update(kit.run_updates(straight, 1, first=2)[0], kit.run_updates(resumed, 1, first=2)[0])
    assert kit.largest_difference(kit.weights(resumed), kit.weights(straight)) < 1e-6


def test_I5_bfloat16_at_two_tensor_parallel_ranks_is_close_to_one(kit, trainer_of, two_ranks):
    """Activations and partial sums are rounded to 8 bits, in another order: 2^-8 is 0.4 %, a few of them per gradient."""
    trainer = trainer_of("qwen3-tied", dtype="bfloat16", clip_grad_norm=1e9)
    expected, found = kit.run_updates(trainer, 2), two_ranks["bfloat16"]
    for one, other in zip(expected, found["reports"], strict=True):
        assert other["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=0.02, abs=2e-3)
        assert other["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=0.02)
    for name, gradient in kit.gradients(trainer).items():
        error = (found["gradient"][name].float() - gradient.float()).norm()
        assert error < 0.05 * gradient.float().norm() + 1e-4, name
    lr, ulp = 1e-3, 2**-8
    for name, weight in kit.weights(trainer).items():
        assert found["weights"][name].dtype == torch.bfloat16
        difference = (found["weights"][name].float() - weight.float()).abs()
        assert (difference <= 2 * 2 * lr + 2 * ulp * weight.float().abs()).all(), name
        assert difference.mean() < 0.2 * lr + ulp * weight.float().abs().mean(), name


def test_the_gradient_norm_is_that_of_all_parameters_in_float64(kit, trainer_of):
    """Ten times closer than fp32 accumulation is asked to be."""
    trainer = trainer_of("llama-untied", clip_grad_norm=1e9)
    norm = trainer.update(kit.make_batch()).metrics["grad_norm"]
    squares = sum(gradient.double().square().sum() for gradient in kit.gradients(trainer).values())
    assert norm == pytest.approx(math.sqrt(squares), rel=2e-7)


def test_an_infinite_gradient_of_one_rank_is_skipped_by_all(kit, trainer_of, two_ranks):
    found = two_ranks["infinite"]
    assert found["facts"] == (1.0, 0, True)
    assert found["same"]
    assert found["after"] == pytest.approx(kit.run_updates(trainer_of("qwen3-tied"), 1)[0]["metrics"], rel=1e-5)


def test_two_policies_of_different_layouts_do_not_disturb_each_other(kit, two_ranks):
    for key, weights in two_ranks["two policies"].items():
        assert kit.largest_difference(weights, two_ranks["updates"][key]["weights"]) == 0.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"lr_schedule": "linear", "total_steps": 4}, [0.8, 0.6, 0.4, 0.2, 0.0]),
        (
            {"lr_schedule": "cosine", "total_steps": 3, "lr_min": 5e-4},
            [0.5 + 0.25 * (1 + math.cos(math.pi * i / 4)) for i in range(1, 5)],
        ),
    ],
    ids=["warmup", "linear", "cosine"],
)
def test_the_learning_rate_follows_its_schedule(kit, trainer_of, settings, expected):
    trainer = trainer_of("llama-tied", **settings)
    rates = [trainer.update(kit.make_batch()).metrics["lr"] for _ in expected]
    assert rates == pytest.approx([1e-3 * share for share in expected], abs=1e-12)


def test_the_rate_before_the_first_step_is_the_one_it_will_have(kit, trainer_of):
    trainer = trainer_of("llama-tied", lr_warmup_steps=4)
    idle = trainer.update(kit.make_batch(token_weights=[0.0] * 6))
    refused = trainer.update(kit.make_batch(advantages=[math.inf] * 6))
    first = trainer.update(kit.make_batch())
    assert idle.metrics["lr"] == refused.metrics["lr"] == first.metrics["lr"] == 0.25e-3
    assert trainer.update(kit.make_batch(token_weights=[0.0] * 6)).metrics["lr"] == 0.25e-3  # of the last step


def test_bfloat16_keeps_float32_main_weights(kit, trainer_of, models):
    """At lr 1e-4, steps vanish in bfloat16's 8 bits; they must add up in the main weights."""
    trainer = trainer_of("qwen3-tied", dtype="bfloat16", lr=1e-4, lr_warmup_steps=0)
    rows = kit.make_rows()
    batch = kit.make_batch(rows, advantages=[1.0] * 6, on_policy=True)
    first = kit.weights(trainer)
    before = sum(map(sum, trainer.logprobs(rows, batch.temperatures)))
    for _ in range(30):
        assert trainer.update(batch).metrics["skipped"] == 0.0
    assert first["model.norm.weight"].dtype == torch.bfloat16
    assert sum(map(sum, trainer.logprobs(rows, batch.temperatures))) > before + 1
    reference = Reference(models / "qwen3-tied", trainer.config.model_copy(update={"dtype": "float32"}))
    for _ in range(30):
        reference.update(batch)
    found = kit.weights(trainer)
    for name, expected in reference.weights(found).items():
        moved = (expected - first[name].float()).norm()
        assert (found[name].float() - expected).norm() < 0.5 * moved + 0.01, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": []}, r"row 0 .*: 0 versions for 4 response tokens; .*unknown version"),
        ({"versions": None}, r"0 versions for 4 response tokens"),
        ({"versions": [0, 0, 0]}, r"3 versions for 4 response tokens"),
        ({"versions": [0, 0, -1, 0]}, r"token of version -1; expected 0 to 0"),
        ({"versions": [0, 0, 1, 0]}, r"token of version 1; expected 0 to 0, the policy's own"),
        ({"versions": [0, None, 0, 0]}, r"token of version None"),
        ({"logprobs": [0.0]}, r"1 log-probs for 4 response tokens"),
        ({"policy": "other"}, r"the row is of policy 'other'; this is 'main'"),
        ({"agent": "critic"}, r"policy 'main' serves solver, verifier"),
        ({"response_ids": [1, 2, 3, 131]}, r"token id 131; expected 0 to 130"),
        ({"prompt_ids": []}, r"0 prompt and 4 response tokens"),
    ],
)
def test_I2_rows_that_cannot_be_trained_on_are_refused(kit, trainer_of, change, message):
    trainer = trainer_of("llama-tied")
    rows = kit.make_rows()
    rows[0] = replace(rows[0], **change)
    with pytest.raises(DataError, match=message):
        trainer.update(kit.make_batch(rows))
    assert trainer.version == 0


def test_lists_of_another_length_are_refused(kit, trainer_of):
    with pytest.raises(DataError, match="5 advantages for 6 rows; expected one per row"):
        trainer_of("llama-tied").update(kit.make_batch(advantages=[1.0] * 5))


def test_a_policy_that_is_not_trainable_has_no_optimiser(kit, trainer_of):
    trainer = trainer_of("qwen3-tied", trainable=False)
    with pytest.raises(ConfigError, match=r"policies.main.trainable is false"):
        trainer.update(kit.make_batch())
    assert trainer.logprobs(kit.make_rows(), [1.0] * 6) == trainer_of("qwen3-tied").logprobs(kit.make_rows(), [1.0] * 6)


def test_a_minimal_rate_above_the_rate_is_refused(trainer_of):
    with pytest.raises(ConfigError, match=r"policies.main.lr_min is 1.0; it must not exceed lr, 0.001"):
        trainer_of("qwen3-tied", lr_min=1.0)


def test_I8_gradient_norms_of_agents_that_share_a_policy_are_exact(kit, trainer_of):
    """Each agent's norm is that of an update with its rows alone at the same weights; the whole is as if none was measured."""
    batch = kit.make_batch()
    measured, unmeasured = trainer_of("qwen3-tied"), trainer_of("qwen3-tied", agent_grad_norm_every=0)
    found, plain = measured.update(batch), unmeasured.update(batch)
    for agent in ("solver", "verifier"):
        weights = [w if row.agent == agent else 0.0 for row, w in zip(batch.rows, batch.token_weights, strict=True)]
        alone = trainer_of("qwen3-tied").update(replace(batch, token_weights=weights))
        assert found.agents[agent]["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-5)
        assert alone.agents[agent]["grad_norm"] == alone.metrics["grad_norm"]
        assert "grad_norm" not in plain.agents[agent]
    assert found.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-6)
    assert kit.largest_difference(kit.weights(measured), kit.weights(unmeasured)) < 1e-7


def test_gradient_norms_per_agent_are_measured_at_their_cadence(kit, trainer_of):
    trainer = trainer_of("qwen3-tied", agent_grad_norm_every=2)
    measured = ["grad_norm" in report["agents"]["solver"] for report in kit.run_updates(trainer, 4)]
    assert measured == [True, False, True, False]


@pytest.mark.parametrize("pattern", ["model.embed_tokens.*", "model.layers.0.*", "*.mlp.*"])
def test_frozen_tensors_stay_and_the_others_learn_as_before(kit, trainer_of, pattern):
    trainer, free = (trainer_of("qwen3-tied", freeze=freeze, clip_grad_norm=1e9) for freeze in ([pattern], []))
    before = kit.weights(trainer)
    frozen, whole = (each.update(kit.make_batch()).metrics["grad_norm"] for each in (trainer, free))
    assert frozen < 0.999 * whole
    after, other = kit.weights(trainer), kit.weights(free)
    for name in before:
        if fnmatchcase(name, pattern):
            assert torch.equal(after[name], before[name]), name
        else:
            torch.testing.assert_close(after[name], other[name], atol=1e-6, rtol=0)
            assert not torch.equal(after[name], before[name]), name


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["model.layers.7.*"], r"freeze has 'model.layers.7.\*', which matches no tensor; names are like 'model.embed_tokens"),
        (["*"], r"freeze matches every tensor; set policies.main.trainable to false"),
        (["*.q_proj.weight"], r"matches a part of .*q_proj.weight, .*k_proj.weight, .*v_proj.weight, which are one parameter"),
    ],
)
def test_freezing_what_cannot_be_frozen_is_refused(trainer_of, patterns, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of("qwen3-tied", freeze=patterns)


def shared_rows(kit):
    """Groups of rows that begin alike: a prompt of 40 tokens, and two responses that part after 20 of theirs."""
    generator = torch.Generator().manual_seed(4)

    def draw(count):
        return torch.randint(0, kit.VOCAB, (count,), generator=generator).tolist()

    rows = []
    for row, prompt in zip(kit.make_rows(6), [draw(40)] * 3 + [draw(24)] * 3, strict=True):
        tail = draw(5)
        response = [*draw(20), *tail] if row.turn else [*prompt[:20], *tail]
        rows.append(replace(row, prompt_ids=prompt, response_ids=response, logprobs=[-4.8] * 25, versions=[0] * 25))
    return rows


def test_I4_shared_prefixes_are_computed_once_and_change_nothing(kit, trainer_of):
    batch = kit.make_batch(shared_rows(kit))
    shared, apart = (trainer_of("qwen3-tied", prefix_sharing=on, agent_grad_norm_every=0) for on in (True, False))
    logprobs = [trainer.logprobs(batch.rows, batch.temperatures) for trainer in (shared, apart)]
    for one, other in zip(*logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    found, plain = shared.update(batch), apart.update(batch)
    assert_same_update(plain_report(plain), plain_report(found))
    tokens = sum(row.num_tokens - 1 for row in batch.rows)
    assert (plain.metrics["computed_tokens"], plain.metrics["tokens_saved"]) == (tokens, 0)
    assert found.metrics["tokens_saved"] >= 2 * 40 + 2 * 24
    assert found.metrics["computed_tokens"] == tokens - found.metrics["tokens_saved"]
    assert found.metrics["flops"] < plain.metrics["flops"]
    assert kit.largest_difference(kit.gradients(shared), kit.gradients(apart)) < 1e-6
    assert kit.largest_difference(kit.weights(shared), kit.weights(apart)) < 1e-6


def plain_report(result):
    return {
        "metrics": result.metrics,
        "agents": result.agents,
        "gaps": {name: asdict(gap) for name, gap in result.gaps.items()},
    }


def test_recomputed_layers_behind_a_frozen_embedding_learn(kit, trainer_of):
    frozen = {"freeze": ["model.embed_tokens.*"], "clip_grad_norm": 1e9}
    plain, recomputed = trainer_of("llama-untied", **frozen), trainer_of("llama-untied", recompute="full", **frozen)
    assert kit.run_updates(plain, 2) == kit.run_updates(recomputed, 2)
    assert kit.largest_difference(kit.weights(plain), kit.weights(recomputed)) == 0.0


def test_a_frozen_tied_embedding_of_a_pipeline_stays_on_both_stages(kit, trainer_of, two_ranks):
    trainer = trainer_of("qwen3-tied", freeze=["model.embed_tokens.*"])
    found = two_ranks["frozen embedding"]
    for one, other in zip(kit.run_updates(trainer, 2), found["reports"], strict=True):
        assert_same_update(one, other)
    assert kit.largest_difference(found["weights"], kit.weights(trainer)) < 1e-6
