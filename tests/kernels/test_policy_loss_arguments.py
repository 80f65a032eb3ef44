"""What the loss refuses, and the weights that stand for its aggregation."""

import math

import pytest
import torch

from drmas_kernels.policy_loss import PolicyLossOptions, aggregation_weights, policy_loss

ROW = torch.tensor([0, 0, 1, 2, 2, 2, 3])
EPISODE = torch.tensor([7, 7, -1, 7, 5])
AGENT = torch.tensor([0, 1, 0, 1, 3])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token", [1 / 6, 1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6]),
        ("turn", [1 / 6, 1 / 6, 0, 1 / 9, 1 / 9, 1 / 9, 1 / 3]),
        ("episode", [1 / 6, 1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6]),
        ("agent", [1 / 10, 1 / 10, 0, 1 / 10, 1 / 10, 1 / 10, 1 / 2]),
    ],
)
def test_aggregation_by_hand(how, expected):
    """Row 1 is masked, row 4 has no token: rows 0, 2, 3 are left, episodes 7 (rows 0, 3) and -1, agents 0 (rows 0, 2) and 1."""
    mask = torch.tensor([True, True, False, True, True, True, True])
    weight = aggregation_weights(ROW, EPISODE, AGENT, mask, how)
    assert weight.dtype == torch.float32
    assert weight.tolist() == pytest.approx(expected)
    assert weight.sum().item() == pytest.approx(1.0)


def test_aggregation_without_a_mask_and_without_tokens():
    assert aggregation_weights(ROW, EPISODE, AGENT).tolist() == pytest.approx([1 / 7] * 7)
    assert aggregation_weights(ROW, EPISODE, AGENT, how="turn")[2] == 1 / 4
    assert aggregation_weights(ROW[:0], EPISODE, AGENT, how="agent").shape == (0,)
    assert aggregation_weights(ROW, EPISODE, AGENT, ROW < 0, "episode").tolist() == [0.0] * 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"how": "row"}, "how is 'row'; expected token, turn, episode or agent"),
        ({"row": ROW.float()}, r"row is torch.float32 \[7\]; expected an int64 vector"),
        ({"row": ROW + 3}, "row runs from 3 to 6; expected 0 to 4"),
        ({"episode_of_row": EPISODE[None]}, r"episode_of_row is torch.int64 \[1, 5\]"),
        ({"agent_of_row": AGENT[:3]}, "agent_of_row has 3 rows; expected those of episode_of_row, 5"),
        ({"mask": ROW}, r"mask is torch.int64 \[7\]; expected bool \[7\]"),
        ({"mask": ROW.bool().to("meta")}, "mask is on meta; expected the device of row, cpu"),
        ({"agent_of_row": AGENT.to("meta")}, "agent_of_row is on meta; expected the device of row, cpu"),
    ],
)
def test_bad_aggregations_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        aggregation_weights(**{"row": ROW, "episode_of_row": EPISODE, "agent_of_row": AGENT} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprob": torch.zeros(4, 1)}, r"logprob is torch.float32 \[4, 1\]; expected a floating vector"),
        ({"logprob": torch.zeros(4).long()}, r"logprob is torch.int64 \[4\]"),
        ({"old_logprob": torch.zeros(3)}, r"old_logprob has shape \[3\]; expected \[4\]"),
        ({"ref_logprob": torch.zeros(5)}, r"ref_logprob has shape \[5\]; expected \[4\]"),
        ({"rollout_logprob": torch.zeros(4, dtype=torch.int32)}, "rollout_logprob is torch.int32; expected floating point"),
        ({"entropy": torch.zeros(3)}, r"entropy has shape \[3\]; expected that of logprob, \[4\]"),
        ({"row": torch.zeros(4)}, "row is torch.float32; expected int64"),
        ({"row": torch.tensor([0, 0, 2, 1])}, "row runs from 0 to 2; expected 0 to 1"),
        ({"advantage": torch.zeros(3)}, r"advantage \[3\] and agent \[2\] must be vectors over the same rows"),
        ({"advantage": torch.zeros(2).long()}, "advantage is torch.int64; expected floating point"),
        ({"agent": torch.tensor([0, 2])}, "agent runs from 0 to 2; expected 0 to 1"),
        ({"agent": torch.zeros(2, dtype=torch.int32)}, "agent is torch.int32; expected int64"),
        ({"agent": torch.zeros(2, dtype=torch.int64, device="meta")}, "agent is on meta; expected the device of token_weight"),
        ({"logprob": torch.zeros(4, device="meta")}, "logprob is on meta; expected the device of token_weight, cpu"),
        ({"entropy": torch.zeros(4, device="meta")}, "entropy is on meta; expected the device of token_weight, cpu"),
        ({"token_weight": torch.tensor([0.0, math.inf, 1.0, 1.0])}, "token_weight holds a value that is not finite"),
        ({"token_weight": torch.ones(4).bool()}, "token_weight is torch.bool; expected floating point"),
        ({"num_agents": 0}, "num_agents is 0; expected at least 1"),
        ({"index": torch.zeros(1, 1).long()}, r"index has shape \[1, 1\]; expected a vector"),
        ({"index": torch.zeros(4)}, "index is torch.float32; expected int64"),
        ({"index": torch.tensor([0, 1, 3])}, "index is not where token_weight differs from 0, in ascending order"),
        ({"options": PolicyLossOptions(entropy_bonus=0.1)}, "entropy_bonus is 0.1 but entropy is missing"),
        ({"options": PolicyLossOptions(kl="k2")}, "kl is 'k2' but ref_logprob is missing"),
        ({"options": PolicyLossOptions(mismatch="mask")}, "mismatch is 'mask' but rollout_logprob is missing"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {
        "logprob": torch.zeros(4),
        "old_logprob": torch.zeros(4),
        "row": torch.tensor([0, 0, 1, 1]),
        "advantage": torch.ones(2),
        "token_weight": torch.ones(4),
        "agent": torch.tensor([0, 1]),
        "num_agents": 2,
        "options": PolicyLossOptions(),
    }
    with pytest.raises(ValueError, match=message):
        policy_loss(**good | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"clip_high": math.nan}, "clip_high is nan"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0; expected more than 1, or None for off"),
        ({"entropy_bonus": -1.0}, "entropy_bonus is -1.0"),
        ({"entropy_bonus": math.inf}, "entropy_bonus is inf; expected a finite number"),
        ({"kl": "k1", "kl_coefficient": math.inf}, "kl_coefficient is inf; expected a finite number"),
        ({"kl": "k4"}, "kl is 'k4'; expected one of k1, k2, k3, or None for off"),
        ({"kl": "k1", "kl_coefficient": -1.0}, "kl_coefficient is -1.0"),
        ({"kl_coefficient": 0.1}, "kl_coefficient is 0.1 but kl is None"),
        ({"mismatch": "clip"}, "mismatch is 'clip'; expected one of none, truncate, mask"),
        ({"mismatch_low": -0.5}, "mismatch_low is -0.5"),
        ({"mismatch_high": 0.0}, "mismatch_high is 0.0; expected a positive number"),
        ({"mismatch": "mask", "mismatch_high": 0.4}, "mismatch_low is 0.5; expected at most mismatch_high, 0.4"),
        ({"objective": "grpo"}, "objective is 'grpo'; expected one of ppo, cispo, gspo"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyLossOptions(**options)
