"""The bandit team: its list of episodes and its play."""

from collections import Counter

import numpy as np
import pytest

from drmas.errors import DataError
from drmas.reproduce.bandit_team import BanditTeam, Chance, Outcome


def rescue():
    """Solver action 0 succeeds; after action 1 the fixer is called, and its action 0 succeeds."""
    if (yield "solver") == 0:
        return Outcome(1.0)
    return Outcome(float((yield "fixer") == 0))


RESCUE = BanditTeam(rescue, {"solver": 2, "fixer": 2})
RESCUE_POLICIES = {"solver": (0.75, 0.25)}


def test_every_episode_of_the_rescue_by_hand():
    episodes = RESCUE.episodes
    found = {tuple(counts.ravel()): reward for counts, reward in zip(episodes.counts, episodes.reward, strict=True)}
    assert found == {(1, 0, 0, 0): 1.0, (0, 1, 1, 0): 1.0, (0, 1, 0, 1): 0.0}
    likely = dict(
        zip(map(tuple, episodes.counts.reshape(3, 4)), episodes.probabilities(RESCUE.logits(RESCUE_POLICIES)), strict=True)
    )
    assert likely == pytest.approx({(1, 0, 0, 0): 0.75, (0, 1, 1, 0): 0.125, (0, 1, 0, 1): 0.125}, abs=1e-15)


def test_orders_of_the_same_actions_are_one_episode_with_their_chances_added():
    """Three calls of one agent: 8 sequences, 4 episodes of weights 1, 3, 3, 1 times the chance of the outcome."""

    def play():
        total = 0
        for _ in range(3):
            total += yield "a"
        return Outcome(float((yield Chance(0.25))), {"a": float(total)})

    episodes = BanditTeam(play, {"a": 2}).episodes
    assert len(episodes.weight) == 8
    by_ones = Counter()
    for counts, weight, reward in zip(episodes.counts[:, 0], episodes.weight, episodes.reward, strict=True):
        by_ones[counts[1], reward] += weight
    binomial = {0: 1, 1: 3, 2: 3, 3: 1}
    assert by_ones == {(n, r): binomial[n] * (0.25 if r else 0.75) for n in binomial for r in (0.0, 1.0)}
    assert episodes.probabilities(np.array([[0.3, -1.0]])).sum() == pytest.approx(1, abs=1e-15)


def test_agents_of_one_policy_share_its_logits():
    team = BanditTeam(rescue, {"solver": 2, "fixer": 2}, {"solver": "both", "fixer": "both"})
    assert team.policies == ("both",)
    assert team.logits({"both": (0.9, 0.1)}).shape == (1, 2)
    assert team.episodes.policies(team.logits({"both": (0.9, 0.1)})) == pytest.approx(np.array([[0.9, 0.1]] * 2))


def test_agents_with_fewer_actions_are_padded_and_never_take_the_padding():
    team = BanditTeam(rescue, {"solver": 2, "fixer": 4})
    pi = team.episodes.policies(team.logits())
    assert pi == pytest.approx(np.array([[0.5, 0.5, 0, 0], [0.25] * 4]))
    assert team.episodes.probabilities(team.logits()).sum() == pytest.approx(1, abs=1e-15)


def test_play_gives_the_rows_of_the_procedure_with_their_log_probabilities():
    rows = RESCUE.play(RESCUE.logits(RESCUE_POLICIES), groups=300, size=4, seed=5)
    by_episode: dict[str, list] = {}
    for row in rows:
        by_episode.setdefault(row.episode, []).append(row)
    assert len(by_episode) == 1200
    for turns in by_episode.values():
        actions = [(row.agent, row.response_ids[0]) for row in turns]
        assert actions in ([("solver", 0)], [("solver", 1), ("fixer", 0)], [("solver", 1), ("fixer", 1)])
        assert {row.reward for row in turns} == {0.0 if actions[-1] == ("fixer", 1) else 1.0}
        assert turns[0].logprobs[0] == pytest.approx(np.log(0.75 if actions[0][1] == 0 else 0.25))
    share = sum(len(turns) == 2 for turns in by_episode.values()) / 1200
    assert abs(share - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 1200)
    assert rows == RESCUE.play(RESCUE.logits(RESCUE_POLICIES), groups=300, size=4, seed=5)


def test_play_and_the_list_agree_on_how_likely_every_episode_is():
    """A loop with chances, shared parameters and own rewards: counts of 20,000 played episodes against the list's."""

    def play():
        for turn in range(3):
            if (yield Chance((0.2, 0.5, 0.9)[(yield "a")])):
                return Outcome(1.0, {"b": 5.0 - turn})
            yield "b"
        return Outcome(0.0)

    team = BanditTeam(play, {"a": 3, "b": 3}, {"a": "p", "b": "p"})
    logits = team.logits({"p": (0.5, 0.3, 0.2)})
    seen: Counter = Counter()
    episodes: dict[str, list] = {}
    for row in team.play(logits, groups=20_000, size=1, seed=3):
        episodes.setdefault(row.episode, []).append(row)
    for turns in episodes.values():
        actions = Counter((row.agent, row.response_ids[0]) for row in turns)
        own = {row.agent: row.reward for row in turns}
        seen[tuple(actions[a, i] for a in "ab" for i in range(3)), own["a"], own.get("b")] += 1
    total = 0.0
    listed = zip(team.episodes.counts, team.episodes.rewards, team.episodes.probabilities(logits), strict=True)
    for counts, rewards, p in listed:
        key = (tuple(counts.ravel()), rewards[0], rewards[1] if counts[1].sum() else None)
        assert abs(seen[key] / 20_000 - p) <= 5 * np.sqrt(p * (1 - p) / 20_000) + 1e-4, key
        total += seen[key]
    assert total == 20_000


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_what_is_no_probability_is_refused(value):
    with pytest.raises(DataError, match=f"probability {value}"):
        Chance(value)


def test_agents_of_one_policy_need_the_same_number_of_actions():
    with pytest.raises(DataError, match="2 actions for one agent and 3 for 'fixer'"):
        BanditTeam(rescue, {"solver": 2, "fixer": 3}, {"solver": "both", "fixer": "both"})


def test_probabilities_of_another_number_are_refused():
    with pytest.raises(DataError, match="'fixer' has 2 actions but 3 probabilities"):
        RESCUE.logits({"fixer": (0.2, 0.3, 0.5)})
