"""From settings to an estimator: presets with changes, estimators of single agents, and what is refused."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from drmas.config.schema import AdvantageConfig
from drmas.core.advantages import AdvantageRule
from drmas.core.estimators import ESTIMATORS, Evidence, Probe, resolve, settings_of
from drmas.core.estimators.base import Segmented, reward_of
from drmas.core.estimators.ppo import Ppo
from drmas.core.estimators.roles import Roles
from drmas.core.estimators.whiten import Whitened
from drmas.errors import CheckpointError, ConfigError

TEAM = ("solver", "verifier", "writer")


def test_a_preset_with_changes():
    assert resolve("dr-mas", std="task") == resolve("mean=agent,std=task")
    assert resolve("grpo", mean=None, eps=None) == Segmented(AdvantageRule("task", "task", "episode"))
    assert resolve("grpo", penalty="inside") == resolve("dapo")
    assert resolve(preset="grpo", weighting="turn") == resolve("grpo-turns")
    assert resolve("dr-mas", singleton="raw", penalty="inside") == resolve("dr-mas-paper")
    assert resolve("ppo", gamma=0.99, gae_lambda=0.95, mean="none") == Ppo(gamma=0.99, gae_lambda=0.95, mean="none")
    assert resolve("rloo", whiten="agent", eps=0.0) == Whitened(resolve("rloo", eps=0.0), "agent", 0.0)
    assert resolve("dr-mas-paper", whiten="pooled").penalty == "inside"
    assert resolve("remax", whiten="pooled", penalty="inside") == Whitened(resolve("remax"), penalty="inside")


@pytest.mark.parametrize("preset", ESTIMATORS)
def test_the_defaults_of_the_configuration_are_no_settings(preset):
    config = AdvantageConfig(preset=preset)
    assert repr(resolve(**config.model_dump(exclude_none=True), team=TEAM)) == repr(resolve(preset, team=TEAM))


def test_every_setting_of_the_configuration_is_of_use_to_a_preset():
    used = {setting for preset in ESTIMATORS for setting in settings_of(preset)} - {"leave_one_out"}
    assert used == set(AdvantageConfig.model_fields) - {"preset", "agents"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "dr.mas"}, r"advantage\.preset is 'dr\.mas'; the nearest is 'dr-mas'"),
        ({"preset": "remaks"}, r"advantage\.preset is 'remaks'; the nearest is 'remax'"),
        (
            {"preset": "ppo", "ddof": 0},
            r"advantage\.ddof is 0 and has no effect with preset 'ppo'; unset it; it is for dr-mas, ",
        ),
        ({"preset": "ppo", "std": "task"}, r"advantage\.std is 'task'; with preset 'ppo' expected agent or none"),
        ({"preset": "rloo", "gamma": 0.9}, r"gamma is 0\.9 and has no effect with preset 'rloo'; unset it; it is for gigpo, "),
        ({"preset": "grpo", "ema_decay": 0.9}, r"advantage\.ema_decay is 0\.9 and has no effect .*; it is for ema$"),
        (
            {"preset": "ema", "counterfactuals": 2},
            r"advantage\.counterfactuals is 2 and has no effect .*; it is for difference$",
        ),
        ({"preset": "remax", "mean": "task"}, r"advantage\.mean is 'task' and has no effect with preset 'remax'"),
        ({"preset": "remax", "penalty": "inside"}, r"penalty is 'inside' and has no effect .* without advantage\.whiten"),
        ({"preset": "reinforce++-baseline", "std": "task"}, r"advantage\.std is 'task' and has no effect"),
        ({"preset": "grpo", "weigthing": "turn"}, r"advantage\.weigthing is not a setting; the nearest is 'weighting'"),
        ({"preset": "grpo", "mean": "global"}, r"advantage\.mean is 'global'; expected one of agent, task, none"),
        ({"preset": "grpo", "ddof": 3}, r"advantage\.ddof is 3; expected one of 0, 1"),
        ({"preset": "grpo", "eps": -1.0}, r"advantage\.eps is -1\.0; expected a finite number of at least 0"),
        ({"preset": "grpo", "whiten": "task"}, r"advantage\.whiten is 'task'; expected one of pooled, agent"),
        ({"preset": "gigpo", "anchor_norm": "std"}, r"advantage\.anchor_norm is 'std'; expected mean or mean_std"),
        ({"preset": "rloo", "mean": "none"}, r"advantage\.mean is 'none' but the rule leaves one out"),
        ({"preset": "difference"}, r"advantage\.preset is 'difference' without a team"),
        ({"preset": "nonsense", "agents": {a: {} for a in TEAM}, "team": TEAM}, r"preset is 'nonsense'; expected one of"),
        (
            {"preset": "nonsense", "agents": {a: {"preset": "grpo"} for a in TEAM}, "team": TEAM},
            r"preset is 'nonsense'; expected",
        ),
        (
            {"preset": "grpo", "agents": {"solvr": {}}, "team": TEAM},
            r"names 'solvr', which isn't in the team; the nearest is 'solver'",
        ),
        (
            {"preset": "grpo", "agents": {"writer": {"agents": {}}}, "team": TEAM},
            r"advantage\.agents\.writer\.agents has no meaning",
        ),
        (
            {"preset": "grpo", "agents": {"writer": {"preset": "rloo", "gamma": 0.5}}, "team": TEAM},
            r"^advantage\.agents\.writer\.gamma is 0\.5 and has no effect with preset 'rloo'",
        ),
        (
            {"preset": "grpo", "agents": {"writer": {"preset": "rlo"}}, "team": TEAM},
            r"^advantage\.agents\.writer\.preset is 'rlo'; the nearest is 'rloo'",
        ),
    ],
)
def test_what_has_no_meaning_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**arguments)


def test_agents_have_estimators_of_their_own_which_see_all_rows(make_step, know):
    rows = make_step(0)
    evidence = know(rows)
    agents = {"verifier": {"preset": "grpo"}, "writer": {"preset": "remax"}}
    found = resolve("dr-mas", agents=agents, team=TEAM)(rows, evidence)
    own = {"solver": resolve("dr-mas"), "verifier": resolve("grpo"), "writer": resolve("remax")}
    alone = {agent: estimator(rows, evidence) for agent, estimator in own.items()}
    assert found.values == [alone[row.agent].values[i] for i, row in enumerate(rows)]
    assert found.tokens is None
    for i, row in enumerate(rows):
        scopes = [(segment.scope, segment.key) for segment in found.segments if i in segment.rows]
        assert scopes == [(segment.scope, segment.key) for segment in alone[row.agent].segments if i in segment.rows]


def test_a_critic_learns_from_the_rows_of_all_agents(make_step, know):
    rows = make_step(0)
    evidence = know(rows)
    found = resolve("grpo", agents={"writer": {"preset": "ppo"}}, team=TEAM)(rows, evidence)
    critic, pooled = resolve("ppo")(rows, evidence), resolve("grpo")(rows)
    for i, row in enumerate(rows):
        whole = pooled.values[i] if pooled.values[i] is None else [pooled.values[i]] * len(row.response_ids)
        assert found.of(i) == (critic.of(i) if row.agent == "writer" else whole)
    assert (found.tokens.returns, found.tokens.before) == (critic.tokens.returns, critic.tokens.before)


def test_an_agent_without_a_preset_changes_the_settings_of_the_run(make_step):
    agents = {"verifier": {"std": "none"}, "writer": {"preset": "rloo"}}
    found = resolve("grpo", ddof=0, agents=agents, team=TEAM)
    assert found.of("solver") == resolve("grpo", ddof=0)
    assert found.of("verifier") == resolve("grpo", ddof=0, std="none")
    assert found.of("writer") == resolve("rloo")  # of another preset the run's settings say nothing
    config = AdvantageConfig(preset="grpo", ddof=0, agents=agents)
    assert AdvantageConfig(**config.model_dump()) == config
    assert resolve(**config.model_dump(exclude_none=True), team=TEAM) == found
    rows = make_step(0)
    centred = [value for value, row in zip(found(rows).values, rows, strict=True) if row.agent == "verifier"]
    alone = resolve("grpo", ddof=0, std="none")(rows).values
    assert centred == [value for value, row in zip(alone, rows, strict=True) if row.agent == "verifier"]


def test_what_agents_need_is_there_for_all():
    mixed = {"solver": {"preset": "remax"}, "writer": {"preset": "difference", "counterfactuals": 3}}
    both = resolve("grpo", agents=mixed, team=TEAM)
    assert both.probes == (Probe("greedy", greedy=True), Probe("without writer", episodes=3, without="writer"))
    assert not both.needs_critic
    assert resolve("grpo", agents={"solver": {"preset": "ppo"}}, team=TEAM).needs_critic
    rest = resolve("difference", agents={"solver": {"preset": "grpo"}}, team=TEAM)
    assert [probe.without for probe in rest.probes] == ["verifier", "writer"]
    nobody = resolve("remax", agents={agent: {"preset": "grpo"} for agent in TEAM}, team=TEAM)
    assert isinstance(nobody, Roles)
    assert nobody.probes == ()
    assert str(both).startswith("mean over task, std over task, weighting by episode; solver: reward above the task's greedy")


def test_probes_of_a_team():
    assert resolve("difference", counterfactuals=2, team=TEAM[:2]).probes == (
        Probe("without solver", episodes=2, without="solver"),
        Probe("without verifier", episodes=2, without="verifier"),
    )
    assert [p.without for p in resolve("difference", team=TEAM, trained=["writer", "else"]).probes] == ["writer"]
    assert resolve("difference", team=TEAM, trained=[]).probes == ()
    own = {"solver": {"counterfactuals": 3}, "writer": {"preset": "difference"}}
    assert resolve("difference", agents=own, team=TEAM, trained=["verifier", "writer"]).probes == (
        Probe("without verifier", without="verifier"),
        Probe("without writer", without="writer"),
    )
    assert resolve("remax").probes == (Probe("greedy", greedy=True),)
    assert resolve("remax", whiten="pooled").probes == (Probe("greedy", greedy=True),)


def test_an_overlong_answer_of_dapo_is_worth_what_it_earned_before_the_comparison(make_step):
    """The paper's length penalty is part of the reward: right and cut, 1 - 1, is as good as wrong."""
    row = replace(make_step(0)[0], task="t", status="ok")
    earned = [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    rows = [replace(row, episode=str(i), reward=reward, penalty=less) for i, (reward, less) in enumerate(earned)]
    assert resolve("dapo")(rows).values == pytest.approx([-0.5, 1.5, -0.5, -0.5], abs=1e-5)
    half = 0.75**0.5  # 0.5 by the deviation of 1, 1, 0, 0
    assert resolve("dapo", penalty="outside")(rows).values == pytest.approx([half - 1, half, -half, -half], abs=1e-5)


TEACHING = ("remax", "difference", "ema", "reinforce++", "ppo")


@pytest.mark.parametrize("preset", ESTIMATORS)
def test_which_presets_learn_from_a_group_of_equal_rewards(preset, make_step, know):
    """Beside a group that differs, with baselines that aren't what the group earned."""
    rows = [replace(row, penalty=0.0) for row in make_step(2) if row.task in ("t", "equal") and row.status == "ok"]
    estimator = resolve(preset, team=TEAM)
    found = estimator(rows, know(rows))
    counts = Counter(row.agent for row in rows if row.task == "equal")
    equal = [found.values[i] for i, row in enumerate(rows) if row.task == "equal" and counts[row.agent] > 1]
    assert equal
    assert any(equal) == estimator.equal_groups_teach == (preset in TEACHING)
    both = resolve("grpo", agents={"solver": {"preset": preset}}, team=TEAM)
    assert both.equal_groups_teach == resolve(preset, whiten="agent", team=TEAM).equal_groups_teach == (preset in TEACHING)


def test_bare_rewards_learn_from_a_group_of_equal_ones():
    for preset in ("dr-mas", "gigpo", "reinforce++-baseline"):
        bare = {"mean": "none"} | ({} if preset.startswith("reinforce") else {"std": "none"})
        assert resolve(preset, **bare).equal_groups_teach


def test_one_pool_of_a_critics_tokens_has_no_place_for_policies_without_one(make_step):
    """The solver's policy has no critic: the verifier's values are those of its rows alone."""
    rows = [replace(row, policy=row.agent) for row in make_step(0)]
    mine = [i for i, row in enumerate(rows) if row.agent == "verifier"]
    evidence = Evidence({"verifier": [[0.1 * k for k, _ in enumerate(rows[i].response_ids)] for i in mine]})
    for whiten in ("pooled", "agent"):
        ppo = {"preset": "ppo", "whiten": whiten}
        found = resolve("grpo", agents={"verifier": ppo}, team=TEAM)(rows, evidence)
        alone = resolve(**ppo)([rows[i] for i in mine], evidence)
        assert [found.of(i) for i in mine] == [alone.of(i) for i in range(len(mine))]
        assert [found.tokens.returns[i] for i in mine] == alone.tokens.returns
        assert {found.tokens.returns[i] is None for i, row in enumerate(rows) if row.agent != "verifier"} == {True}
        pooled = resolve("grpo")(rows)
        assert all(found.values[i] == pytest.approx(pooled.values[i]) for i in set(range(len(rows))) - set(mine))


def test_the_greedy_baseline_of_an_agent_that_is_rewarded_apart_is_its_own(make_step):
    """A game of zero sum in which the greedy episode ended 1 to -1, and the episode itself counts as won."""
    row = replace(make_step(0)[0], task="t", status="ok", penalty=0.0)
    rows = [replace(row, agent=agent, reward=reward) for agent, reward in zip(TEAM, (-1.0, 1.0, 1.0), strict=True)]
    greedy = {"greedy": [1.0], reward_of("greedy", "solver"): [1.0], reward_of("greedy", "verifier"): [-1.0]}
    assert resolve("remax")(rows, Evidence(baselines={"t": greedy})).values == [-2.0, 2.0, 0.0]


def test_what_an_estimator_keeps_is_saved_and_given_back(make_step):
    settings = {"preset": "grpo", "agents": {"solver": {"preset": "ema"}, "writer": {"preset": "ema", "ema_decay": 0.5}}}
    first, second, third = make_step(0), make_step(1), make_step(2)
    straight, resumed = resolve(**settings, team=TEAM), resolve(**settings, team=TEAM)
    assert straight.state() == {"solver": {"baselines": {}}, "writer": {"baselines": {}}}
    straight(first)
    straight(second)
    resumed.restore(straight.state())
    assert set(resumed.state()) == {"solver", "writer"}
    assert resumed(third).values == straight(third).values
    assert resumed.state() == straight.state()


def test_a_state_of_another_estimator_is_refused(make_step):
    saved = resolve("ema")
    saved(make_step(0))
    for other in (resolve("grpo"), resolve("grpo", whiten="pooled"), resolve("ppo")):
        other.restore({})
        with pytest.raises(CheckpointError, match="keeps 'baselines' of an advantage estimator"):
            other.restore(saved.state())
    with pytest.raises(CheckpointError, match=r"keeps advantages of baselines, which advantage\.agents doesn't name"):
        resolve("grpo", agents={"solver": {}}, team=TEAM).restore(saved.state())
    with pytest.raises(CheckpointError, match="'ema' keeps baselines; the checkpoint has 'other'"):
        saved.restore({"other": 1})


def test_the_guide_has_every_preset_and_its_example_works(make_step):
    text = (Path(__file__).parents[3] / "drmas" / "core" / "estimators" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert rows == list(ESTIMATORS)
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    names: dict = {}
    exec(code, names)
    rows = make_step(0)
    found = names["median"](min_std=0.0)(rows)
    assert [value is None for value in found.values] == [row.status != "ok" for row in rows]
    first = next(i for i, row in enumerate(rows) if row.task == "equal" and row.status == "ok")
    assert found.values[first] == -rows[first].penalty
