"""Training of bandits: its gradient, its steps, its independence of what is beside it, and what it finds."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from drmas.core.advantages import advantages
from drmas.reproduce import bandit_training
from drmas.reproduce.bandit_moments import finite
from drmas.reproduce.bandit_team import BanditTeam, Outcome
from drmas.reproduce.bandit_training import Run, Scenario, compare, scenarios, spikes, train
from drmas.reproduce.regimes import RULES, always_speaking, rescue_loop
from drmas.types import Row

LOOP = Scenario("loop", "", rescue_loop((0.7, 0.4), (0.5, 0.1)), {"solver": (0.6, 0.4)}, size=4)
SHARED = Scenario("shared", "", rescue_loop((0.7, 0.4), (0.5, 0.1), shared=True), {"both": (0.6, 0.4)}, size=4)


def ascent(seeds, rate=1.0, clip=None, optimiser="ascent"):
    return [Run(seed, rate, optimiser, clip) for seed in seeds]


@pytest.mark.parametrize("name", ["grpo", "dr-mas"])
@pytest.mark.parametrize("scenario", [LOOP, SHARED], ids=["separate", "shared"])
def test_a_step_is_the_gradient_of_the_rows_mean_by_autograd(scenario, name, monkeypatch):
    """The step's episodes are read off the draw, their rows given to the product, and the loss to autograd."""
    chosen = []
    choose = bandit_training._choose
    monkeypatch.setattr(bandit_training, "_choose", lambda likely, draw: chosen.append(choose(likely, draw)) or chosen[-1])
    norms = train(scenario, RULES[name], ascent([3, 4]), 1).norms[0]
    team = scenario.team
    for run in range(2):
        logits = torch.tensor(team.logits(scenario.start), requires_grad=True)
        rows = []
        for i, episode in enumerate(chosen[0][run]):
            for k, agent in enumerate(team.agents):
                actions = np.repeat(np.arange(2), team.episodes.counts[episode, k].astype(int))
                reward = team.episodes.rewards[episode, k]
                rows += [Row("t", str(i), agent, team.policy(agent), 0, [], [int(a)], [0.0], [0], reward) for a in actions]
        values = advantages(rows, RULES[name]).values
        for k, agent in enumerate(team.agents):
            beside = [row for row in rows if row.policy == team.policy(agent)]
            own = [(value, row) for value, row in zip(values, rows, strict=True) if row.agent == agent]
            if not own:
                assert np.isnan(norms[run, k])
                continue
            log_pi = logits[team.policies.index(team.policy(agent))].log_softmax(0)
            loss = sum(value * log_pi[row.response_ids[0]] for value, row in own) / len(beside)
            (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
            assert norms[run, k] == pytest.approx(float(gradient.norm()), rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("name", ["grpo", "dr-mas", "rloo"])
def test_the_mean_step_is_the_exact_gradient_of_a_group(name):
    """Two agents of one call each: a step from 4000 seeds is, on average, E A z over the group's rows, by enumeration."""
    scenario = Scenario("two", "", always_speaking(0.9, 0.5, 0.1, 2), {"writer": (0.7, 0.3)}, size=4)
    trace = train(scenario, RULES[name], ascent(range(4000)), 1)
    exact = finite(scenario.team, scenario.team.logits(scenario.start), RULES[name], 4)
    for k, agent in enumerate(scenario.team.agents):
        power = (trace.norms[0, :, k] ** 2).mean() * 16  # the group's sum, not its mean
        error = (trace.norms[0, :, k] ** 2).std() * 16 / math.sqrt(4000)
        # E|G|^2 = |E G|^2 (1 + groups needed); |E G| by rows: a success of action 0 above the baseline
        signal = _expected_gradient(scenario, RULES[name], agent)
        assert abs(power - signal * (1 + exact[agent].groups_needed)) < 4 * error


def _expected_gradient(scenario, rule, agent):
    """|E sum A z|^2 over every group of four episodes, each with its rows in the product's advantages."""
    episodes, k = scenario.team.episodes, scenario.team.agents.index(agent)
    logits = scenario.team.logits(scenario.start)
    p, pi = episodes.probabilities(logits), episodes.policies(logits)[k]
    total = np.zeros(2)
    for group in product(range(len(p)), repeat=4):
        if list(group) != sorted(group):
            continue
        orders = math.factorial(4) / math.prod(math.factorial(group.count(i)) for i in set(group))
        rows = [
            Row("t", str(i), name, name, 0, [], [], [], [], episodes.reward[e])
            for i, e in enumerate(group)
            for name in scenario.team.agents
        ]
        values = advantages(rows, rule).values[k :: len(scenario.team.agents)]
        scores = [episodes.counts[e, k] - pi for e in group]
        total += orders * math.prod(p[list(group)]) * sum(value * z for value, z in zip(values, scores, strict=True))
    return float(total @ total)


def test_a_run_does_the_same_whatever_is_beside_it():
    many = [
        Run(seed, rate, kind, clip)
        for seed in (1, 2)
        for rate in (0.1, 1.0)
        for kind, clip in (("ascent", None), ("adam", 0.2))
    ]
    together = train(LOOP, RULES["dr-mas"], many, 12)
    for index in (0, 3, 6):
        alone = train(LOOP, RULES["dr-mas"], [many[index]], 12)
        assert alone.final[0] == pytest.approx(together.final[index], rel=1e-12)
        assert np.allclose(alone.norms[:, 0], together.norms[:, index], rtol=1e-9, atol=1e-14, equal_nan=True)


def test_rules_see_the_same_first_episodes():
    first = [train(LOOP, rule, ascent(range(20)), 1).norms[0] for rule in RULES.values()]
    assert all((np.isnan(norms) == np.isnan(first[0])).all() for norms in first)


@pytest.mark.parametrize(("kind", "rate", "clip"), [("adam", 0.1, 0.05), ("adam", 0.1, 1.0), ("ascent", 1.0, 0.05)])
def test_optimisers_and_clipping_are_torchs(kind, rate, clip):
    """One agent whose reward is its action: 30 steps against torch's optimisers on the same gradients, clipped by torch."""

    def play():
        return Outcome(float((yield "a") == 0))

    scenario = Scenario("one", "", BanditTeam(play, {"a": 2}), size=4)
    run = Run(7, rate, kind, clip)
    logits = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    optimiser = (torch.optim.Adam if kind == "adam" else torch.optim.SGD)([logits], lr=rate, maximize=True)
    draw = np.random.default_rng([16180, 7]).random((30, 4))
    for uniform in draw:
        pi = logits.detach().softmax(1)[0].numpy()
        order = scenario.team.episodes.counts[:, 0].argmax(1)  # the list's order decides which uniform number is which action
        likely = np.cumsum([pi[action] for action in order])
        actions = [int(order[min(int(np.searchsorted(likely, u, side="right")), 1)]) for u in uniform]
        reward = np.array([float(action == 0) for action in actions])
        spread = reward.std(ddof=1)
        value = (reward - reward.mean()) / (spread + 1e-6) if spread else np.zeros(4)
        optimiser.zero_grad()
        (sum(v * logits.log_softmax(1)[0, action] for v, action in zip(value, actions, strict=True)) / 4).backward()
        torch.nn.utils.clip_grad_norm_([logits], clip)
        optimiser.step()
    expected = float(logits.detach().softmax(1)[0, 0])
    assert train(scenario, RULES["grpo"], [run], 30).final[0] == pytest.approx(expected, abs=1e-5)


def test_an_agent_that_is_never_called_has_no_norm():
    team = rescue_loop((1.0, 1.0), (0.9, 0.1))
    trace = train(Scenario("idle", "", team, size=3), RULES["dr-mas"], ascent([0], optimiser="adam"), 5)
    assert np.isnan(trace.norms[:, 0, 1]).all()
    assert trace.final[0] == 1


def test_a_policy_without_rows_is_not_stepped_though_adam_has_momentum():
    """Two runs, the same but for a step without rows in between: it moves nothing and isn't counted."""
    step = bandit_training._Stepper(ascent([0, 1], rate=0.1, optimiser="adam"), (2, 1, 2))
    gradient, both = np.full((2, 1, 2), 0.5), np.ones((2, 1), dtype=bool)
    assert step(gradient, both) == pytest.approx(0.1)
    only_first = np.array([[True], [False]])
    moved = step(np.where(only_first[..., None], -0.2, 0.0), only_first)
    assert moved[0].all()
    assert not moved[1].any()
    second = step(np.full((2, 1, 2), -0.2), np.array([[False], [True]]))
    assert second[1] == pytest.approx(moved[0], rel=1e-12)


def test_spikes_by_hand():
    """Norms 1 but for one of 4 after six of them: a ratio of 4 among the steps that have five before them. 0 isn't counted."""
    norms = np.ones((12, 2, 1))
    norms[6, 0, 0], norms[9, 0, 0] = 4.0, 0.0
    norms[:, 1, 0] = np.nan
    (found,) = spikes(norms)
    assert found["share"] == pytest.approx(1 / 6)
    assert (found["largest"], found["middle"]) == (4.0, 4.0)
    assert found["norm"]["value"] == 2.0
    assert spikes(np.zeros((8, 3, 1)))[0]["share"] is None


def test_the_median_of_spikes_is_of_the_last_twenty():
    norms = np.ones((60, 1, 1))
    norms[30:] = 10.0
    (found,) = spikes(norms)
    assert found["share"] == pytest.approx(10 / 55)
    assert found["largest"] == 10.0


def test_a_comparison_has_every_rule_and_pairs_by_seed():
    found = compare(LOOP, steps=30, seeds=30, tuning_seeds=5, rules={name: RULES[name] for name in ("grpo", "dr-mas", "rloo")})
    assert found["inflation"]["solver"] == pytest.approx(1)
    assert found["start"] < found["best"] == pytest.approx(0.7 + 0.3 * 0.75)
    assert [(variant["optimiser"], variant["clip"]) for variant in found["variants"]] == [
        ("ascent", None),
        ("ascent", 0.2),
        ("adam", None),
        ("adam", 0.2),
    ]
    for variant in found["variants"]:
        grpo = variant["rules"]["grpo"]
        assert grpo["shared"] == grpo["own"]
        assert grpo["shared"]["difference"]["value"] == grpo["shared"]["difference"]["high"] == 0
        assert variant["shared_rate"] == variant["rates"][int(np.argmax(grpo["tuning"]))]
        for rule in variant["rules"].values():
            assert rule["shared"]["rate"] == variant["shared_rate"]
            assert rule["own"]["rate"] == variant["rates"][int(np.argmax(rule["tuning"]))]
            gap = rule["own"]["final"]["value"] - grpo["own"]["final"]["value"]
            assert rule["own"]["difference"]["value"] == pytest.approx(gap, abs=1e-12)
            assert rule["shared"]["final"]["n"] == 30
            assert found["start"] < rule["own"]["final"]["value"] < found["best"]


def test_rules_agree_where_every_agent_speaks_once_per_episode():
    """The control: per agent or pooled, the statistics are the same numbers."""
    control = scenarios()[0]
    traces = {name: train(control, RULES[name], ascent(range(5)), 20) for name in ("grpo", "dr-mas", "mean=task,std=agent")}
    assert traces["grpo"].final == pytest.approx(traces["dr-mas"].final, rel=1e-12)
    assert traces["grpo"].final == pytest.approx(traces["mean=task,std=agent"].final, rel=1e-12)
    assert (traces["grpo"].final > traces["grpo"].average).all()


@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.name)
def test_what_a_scenario_is_expected_to_earn_is_what_its_play_earns(scenario):
    team, logits = scenario.team, scenario.team.logits(scenario.start)
    rows = team.play(logits, groups=3000, size=1, seed=1)
    expected = team.episodes.probabilities(logits) @ (team.episodes.rewards[:, 0])
    first = [row.reward for row in rows if row.turn == 0 and row.agent == team.agents[0]]
    assert len(first) == 3000
    assert abs(np.mean(first) - expected) < 4 * np.std(first) / math.sqrt(3000)
