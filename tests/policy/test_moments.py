"""Norms of single rows' gradients: against transformers in float64, on every layout, and as if they had not been measured."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from drmas.config.schema import LossConfig
from drmas.errors import ConfigError, DataError

TEMPERATURES = [1.0, 0.7, 1.0, 1.3, 1.0, 1.0]
ON_TWO_RANKS = {
    "tp2": {},
    "tp2-sp": {},
    "dp2": {},
    "pp2": {},
    "cp2": {},
    "dp2, overlapped": {},
    "pp2, frozen embedding": {"freeze": ["model.embed_tokens.*"]},
    "tp2-sp, adapters": {"lora": {"rank": 4}},
}
"""What moments_ranks.py measures -> the settings of one rank for the same."""


@pytest.fixture(scope="module")
def two(kit, models, tmp_path_factory):
    return kit.launch("moments_ranks.py", 2, models, tmp_path_factory.mktemp("moments"))


def expected_norms(folder, rows, temperatures):
    """Autograd on the whole logits in float64, row by row; a tied embedding is one parameter."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    norms = []
    for row, temperature in zip(rows, temperatures, strict=True):
        model.zero_grad()
        logits = model(torch.tensor([[*row.prompt_ids, *row.response_ids]])).logits[0, len(row.prompt_ids) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None])
        logprobs.mean().backward()
        norms.append(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
    return norms


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied", "qwen2-tied"])
def test_norms_equal_autograd_in_float64(kit, trainer_of, models, name):
    """Within 1e-5: the trainer computes in float32."""
    found = trainer_of(name).score_norms(kit.make_rows(), TEMPERATURES)
    expected = expected_norms(models / name, kit.make_rows(), TEMPERATURES)
    assert found == pytest.approx(expected, rel=1e-5)
    assert max(expected) > 1.5 * min(expected)


@pytest.mark.parametrize("settings", [{}, {"freeze": ["*.mlp.*"]}, {"lora": {"rank": 4}}], ids=["whole", "frozen", "adapters"])
def test_a_rows_norm_is_that_of_an_update_with_the_row_alone(kit, trainer_of, settings):
    """Over the same parameters as the gradient norm, after an update, at which adapters have a gradient on both sides."""

    def moved():
        trainer = trainer_of("qwen3-tied", **settings)
        kit.run_updates(trainer, 1)
        return trainer

    rows = kit.make_rows(3)
    found = moved().score_norms(rows, TEMPERATURES[:3])
    for row, temperature, square in zip(rows, TEMPERATURES, found, strict=False):
        weight = 1.0 / len(row.response_ids)
        alone = kit.make_batch([row], advantages=[1.0], token_weights=[weight], temperatures=[temperature], on_policy=True)
        assert square == pytest.approx(moved().update(alone).metrics["grad_norm"] ** 2, rel=1e-6)


def test_norms_are_of_the_score_whatever_the_loss(kit, trainer_of):
    loss = LossConfig(entropy_bonus=0.3, clip_low=0.0, clip_high=0.0, mismatch="mask")
    plain, other = trainer_of("qwen3-tied"), trainer_of("qwen3-tied", loss=loss)
    rows = [replace(row, logprobs=[-40.0] * len(row.response_ids), reward=None) for row in kit.make_rows()]
    assert other.score_norms(rows, TEMPERATURES) == plain.score_norms(kit.make_rows(), TEMPERATURES)


@pytest.mark.parametrize("layout", ON_TWO_RANKS)
def test_I5_norms_are_equal_on_every_layout(kit, trainer_of, two, layout):
    trainer, found = trainer_of("qwen3-tied", **ON_TWO_RANKS[layout]), two[layout]
    kit.run_updates(trainer, 1)
    assert found["same"]  # on both ranks
    assert found["norms"] == pytest.approx(trainer.score_norms(kit.make_rows(), [1.0, 0.7, *[1.0] * 4]), rel=1e-4)


@pytest.mark.parametrize("layout", ON_TWO_RANKS)
def test_updates_after_a_measurement_are_those_without_on_two_ranks(kit, two, layout):
    measured, plain = two[layout]["measured"], two[layout]["plain"]
    assert measured["reports"] == plain["reports"]
    assert kit.largest_difference(measured["weights"], plain["weights"]) == 0.0


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"lora": {"rank": 4}}], ids=["float32", "bfloat16", "adapters"]
)
def test_a_measurement_leaves_no_trace(kit, trainer_of, settings):
    """Two updates with a measurement before and between them, bit for bit, with all that the optimiser holds."""
    plain, measured = trainer_of("qwen3-tied", **settings), trainer_of("qwen3-tied", **settings)
    for number in range(2):
        before = kit.weights(measured), torch.get_rng_state(), measured.rng.state["cpu"].clone(), measured.version
        measured.score_norms(kit.make_rows(seed=4), TEMPERATURES)
        assert kit.largest_difference(before[0], kit.weights(measured)) == 0.0
        assert torch.equal(before[1], torch.get_rng_state())
        assert torch.equal(before[2], measured.rng.state["cpu"])
        assert (before[3], number) == (measured.version, measured.optimizer.steps)
        assert kit.run_updates(plain, 1, first=number) == kit.run_updates(measured, 1, first=number)
    assert kit.largest_difference(kit.weights(plain), kit.weights(measured)) == 0.0
    states = [list(trainer.optimizer.megatron.optimizer.state.values()) for trainer in (plain, measured)]
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("exp_avg", "exp_avg_sq"))
    assert any(one["exp_avg"].any() for one in states[0])


def test_norms_of_equal_rows_are_equal_and_of_no_rows_none(kit, trainer_of):
    trainer, row = trainer_of("llama-tied"), kit.make_rows(1)[0]
    first, second, third = trainer.score_norms([row, kit.make_rows(2)[1], row], [1.0] * 3)
    assert first == third != second
    assert trainer.score_norms([], []) == []


def test_what_has_no_gradient_is_refused(kit, trainer_of):
    with pytest.raises(ConfigError, match=r"policies.main.trainable is false; there is no gradient to measure"):
        trainer_of("qwen3-tied", trainable=False).score_norms(kit.make_rows(), TEMPERATURES)
    trainer = trainer_of("qwen3-tied")
    with pytest.raises(DataError, match="2 temperatures for 6 rows; expected one per row"):
        trainer.score_norms(kit.make_rows(), [1.0, 1.0])
    with pytest.raises(DataError, match="0 prompt and 4 response tokens"):
        trainer.score_norms([replace(kit.make_rows(1)[0], prompt_ids=[])], [1.0])
