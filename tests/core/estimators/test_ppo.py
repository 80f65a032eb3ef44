"""Generalised advantage estimation against its defining sum, written out, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drmas.core.estimators import Evidence, resolve
from drmas.core.estimators.ppo import Ppo
from drmas.errors import ConfigError
from drmas.types import Row

RAW = {"mean": "none", "std": "none"}


def row(episode: str, agent: str, turn: int, tokens: int, reward: float | None = 1.0, **changes) -> Row:
    given = Row("t0", episode, agent, "main", turn, [1], [2] * tokens, [0.0] * tokens, [0] * tokens, reward)
    return replace(given, **changes)


def gae(rows, values, rule):
    return rule(rows, Evidence({"main": values})).tokens


def by_definition(values, rewards, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}."""
    n = len(values)
    delta = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.99, 0.95)])
def test_the_sum_runs_across_the_turns_of_one_agent_only(gamma, lam):
    rows = [
        row("a", "solver", 0, 2, penalty=0.25),
        row("a", "verifier", 1, 3),
        row("a", "solver", 2, 1),
        row("b", "solver", 0, 2, reward=-0.5),
    ]
    values = [[0.1, 0.4], [0.9, 0.2, 0.3], [0.7], [-0.2, 0.6]]
    found = gae(rows, values, Ppo(gamma, lam, **RAW))
    solver = by_definition([0.1, 0.4, 0.7], [0.0, 0.0, 1.0], gamma, lam)
    verifier = by_definition([0.9, 0.2, 0.3], [0.0, 0.0, 1.0], gamma, lam)
    other = by_definition([-0.2, 0.6], [0.0, -0.5], gamma, lam)
    expected = [solver[:2], verifier, solver[2:], other]
    for row_, got, each in zip(rows, found.values, expected, strict=True):
        assert got == pytest.approx([advantage - row_.penalty for advantage in each], abs=1e-12)
    for got, advantage, own in zip(found.returns, expected, values, strict=True):
        assert got == pytest.approx([a + v for a, v in zip(advantage, own, strict=True)], abs=1e-12)
    assert found.before == values


def test_without_discount_a_return_is_the_reward():
    rows = [row("a", "solver", 0, 2, penalty=0.25), row("a", "solver", 1, 1, penalty=0.5)]
    found = gae(rows, [[3.0, -1.0], [0.2]], Ppo())
    assert found.returns[0] == pytest.approx([1.0, 1.0])
    assert found.returns[1] == pytest.approx([1.0])


def test_I7_a_penalty_is_taken_off_after_the_whitening():
    """0.01 in equal rewards stays 0.01, and only the turn that earned it pays."""
    rows = [row(f"e{i}", "solver", 0, 2, reward=0.1, penalty=0.01 * (i == 1)) for i in range(3)]
    found = gae(rows, [[0.0, 0.0]] * 3, Ppo(eps=0.0))
    assert found.values == [[0.0, 0.0], [-0.01, -0.01], [0.0, 0.0]]


def test_turns_are_taken_in_their_order_whatever_the_order_of_rows():
    rows = [row("a", "solver", i, 2, reward=1.0) for i in range(3)]
    values = [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]
    straight = gae(rows, values, Ppo(0.9, 0.9, **RAW)).values
    order = [2, 0, 1]
    shuffled = gae([rows[i] for i in order], [values[i] for i in order], Ppo(0.9, 0.9, **RAW)).values
    assert shuffled == [straight[i] for i in order]


def test_advantages_are_whitened_over_each_agents_tokens():
    rows = [row(f"e{i}", agent, i, 3, reward=float(i)) for i in range(4) for agent in ("solver", "verifier")]
    values = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).tolist()
    raw, white = (gae(rows, values, rule).values for rule in (Ppo(1.0, 0.9, **RAW), Ppo(1.0, 0.9, eps=0.0)))
    for agent in ("solver", "verifier"):
        before, after = (
            torch.tensor([v for each, own in zip(rows, table, strict=True) if each.agent == agent for v in own])
            for table in (raw, white)
        )
        torch.testing.assert_close(after, (before - before.mean()) / before.std(), atol=1e-5, rtol=0)


def test_I3_failed_rows_have_no_advantage_and_change_none():
    rows = [row("a", "solver", 0, 2), row("b", "solver", 0, 2, reward=0.0)]
    failed = row("c", "solver", 0, 2, reward=None, status="engine")
    values = [[0.1, 0.2], [0.3, 0.4]]
    alone = gae(rows, values, Ppo())
    found = gae([*rows, failed], [*values, [9.0, 9.0]], Ppo())
    assert found.values == [*alone.values, None]
    assert found.returns == [*alone.returns, None]
    assert found.row_means()[2] is None


def test_I6_equal_advantages_are_zero():
    rows = [row(f"e{i}", "solver", 0, 1, reward=0.1) for i in range(3)]
    for eps in (1e-6, 0.0):
        assert gae(rows, [[0.5]] * 3, Ppo(eps=eps)).values == [[0.0]] * 3
        assert gae(rows[:1], [[0.5]], Ppo(eps=eps)).values == [[0.0]]


def test_a_row_with_another_number_of_values_is_refused():
    with pytest.raises(ValueError, match="row 0 has 1 values for 2 response tokens"):
        gae([row("a", "solver", 0, 2)], [[0.0]], Ppo())


def test_rows_of_a_policy_without_a_critic_have_no_advantage_and_change_none():
    rows = [row("a", "x", 0, 1), row("a", "y", 1, 2, policy="other"), row("b", "x", 0, 1, reward=0.0)]
    for rule in (Ppo(), Ppo(whiten="pooled")):
        assert rule(rows).values == [None] * 3
        found = rule(rows, Evidence({"main": [[0.25], [0.75]]}))
        alone = rule(rows[::2], Evidence({"main": [[0.25], [0.75]]}))
        assert found.values == [alone.values[0], None, alone.values[1]]
        assert found.tokens.returns[1] is None


def test_statistics_that_a_critic_has_no_use_for_are_refused():
    with pytest.raises(ConfigError, match=r"advantage.mean is 'task'; with preset 'ppo' expected agent or none"):
        Ppo(mean="task")


def test_values_come_by_policy_in_the_order_of_its_rows():
    rows = [row("a", "x", 0, 1), row("a", "y", 1, 1, policy="other"), row("b", "x", 0, 1)]
    found = resolve("ppo", mean="none", std="none")(rows, Evidence({"other": [[0.5]], "main": [[0.25], [0.75]]}))
    assert found.values == [0.75, 0.5, 0.25]
    assert found.tokens.before == [[0.25], [0.5], [0.75]]
    assert found.segments == []


def test_one_pool_of_all_agents():
    rows = [row(f"e{i}", agent, i, 2, reward=float(i)) for i in range(3) for agent in ("solver", "verifier")]
    values = torch.randn(6, 2, generator=torch.Generator().manual_seed(2)).tolist()
    raw, white = (gae(rows, values, rule).values for rule in (Ppo(**RAW), Ppo(whiten="pooled", eps=0.0)))
    before, after = torch.tensor(raw), torch.tensor(white)
    torch.testing.assert_close(after, (before - before.mean()) / before.std(), atol=1e-5, rtol=0)
