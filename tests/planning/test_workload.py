"""Episodes that are drawn: means as asked for, tails as asked for, chains and shapes, tables and errors."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.agents.team import load_team
from drmas.config.load import load as load_recipe
from drmas.errors import ConfigError
from drmas.planning.traced import trace
from drmas.planning.types import Lengths
from drmas.planning.workload import Chains, Traced, default_workload, draw_lengths, read_table, summary


def generator(seed: int = 0) -> numpy.random.Generator:
    return numpy.random.default_rng(seed)


@settings(max_examples=20, deadline=None)
@given(st.floats(2, 500), st.floats(0, 1.5), st.integers(600, 4000))
def test_lengths_have_the_mean_and_stay_in_their_bounds(mean, spread, cap):
    lengths = Lengths.fitted(mean, spread, cap)
    drawn = draw_lengths(lengths, 40_000, generator())
    assert drawn.min() >= 1
    assert drawn.max() <= cap
    deviation = drawn.std() / 200
    assert drawn.mean() == pytest.approx(lengths.moment(1), abs=5 * deviation + 0.6)


def test_no_spread_is_the_mean_itself():
    assert draw_lengths(Lengths(7.0), 3, generator()).tolist() == [7, 7, 7]


def test_chains_interleave_rounds_and_have_the_calls_asked_for(load):
    work = load.workload(load.agent("solver", calls=1.4), load.agent("verifier", calls=1.0), tasks=1, group=4)
    groups = Chains().groups(work, 500, generator())
    assert [len(group) for group in groups] == [4] * 500
    scripts = [script for group in groups for script in group]
    shapes = {tuple(call.agent for call in script) for script in scripts}
    assert shapes == {("solver", "verifier"), ("solver", "verifier", "solver")}
    assert sum(len(script) for script in scripts) / 2000 == pytest.approx(2.4, abs=0.05)
    assert all(call.after == ((index - 1,) if index else ()) for script in scripts for index, call in enumerate(script))


def test_what_is_cached_on_the_mean_is_what_siblings_share(load):
    work = load.workload(load.agent(prompt_tokens=11.0, cached_tokens=6.0), group=4)
    call = Chains().groups(work, 1, generator())[0][0][0]
    assert (call.prompt, call.shared, call.own) == (11, 8, 0)
    alone = load.workload(load.agent(prompt_tokens=11.0, cached_tokens=6.0), group=1)
    assert Chains().groups(alone, 1, generator())[0][0][0].shared == 0


def test_one_generator_gives_one_workload(load):
    work = load.workload(load.agent(calls=1.5, response=Lengths(20.0, 0.8, 99)))
    assert Chains().groups(work, 5, generator(3)) == Chains().groups(work, 5, generator(3))
    assert Chains().groups(work, 5, generator(3)) != Chains().groups(work, 5, generator(4))


def test_traced_prompts_grow_with_what_was_said_and_are_cut_at_their_room():
    run = load_recipe("quickstart")
    team = load_team({**run.team, "verifier": {"prompt": "{question} {solution}", "parser": "verdict:yes,no"}})
    work, _ = default_workload(run, team)
    shapes = trace(team)
    source = Traced(shapes, {"solver": 10_000, "verifier": 10_000})
    scripts = [script for group in source.groups(work, 50, generator()) for script in group]
    base = {script[1].prompt - script[0].response for script in scripts}
    assert max(base) - min(base) <= 1  # rounding
    assert len({script[1].prompt for script in scripts}) > 5
    cut = Traced(shapes, {"solver": 10_000, "verifier": 33})
    assert {script[1].prompt for group in cut.groups(work, 5, generator()) for script in group} == {33}


def test_the_default_has_the_teams_own_calls():
    run = load_recipe("quickstart")
    debate = load_team({"name": "debate"})
    work, source = default_workload(run, debate)
    assert {agent.name: agent.calls for agent in work.agents} == {"solver": 6.0, "judge": 1.0}
    assert isinstance(source, Traced)
    given_calls, chains = default_workload(run, debate, calls={"solver": 2.0})
    assert (given_calls.agents[0].calls, chains) == (2.0, Chains())


def test_a_summary_has_the_means_of_the_groups(load):
    work = load.workload(load.agent("solver", calls=1.3, tool_seconds=0.5), load.agent("verifier", calls=0.7), group=2)
    groups = Chains().groups(work, 400, generator())
    found = summary(groups, replace(work, agents=tuple(replace(agent, calls=9.0) for agent in work.agents)))
    assert [agent.calls for agent in found.agents] == pytest.approx([1.3, 0.7], abs=0.06)
    assert [agent.prompt_tokens for agent in found.agents] == [11.0, 11.0]
    assert [agent.cached_tokens for agent in found.agents] == pytest.approx([5.0, 5.0])  # 10 shared, by one of two
    assert found.agents[0].tool_seconds == 0.5
    assert summary(groups, load.workload(load.agent("critic"))).agents[0].calls == 0.0


TABLE = """
[workload]
tasks = 5
[workload.agents.solver]
calls = 1.5
prompt = 300
cached = 200
response = 12
variation = 0
[workload.agents.verifier]
prompt = 400
response = 4
tool_seconds = 0.25
"""


def read(tmp_path, text):
    run = load_recipe("quickstart")
    path = tmp_path / "work.toml"
    path.write_text(text)
    return read_table(path, run, load_team(run.team))


def test_a_table_is_the_workload(tmp_path):
    work, source = read(tmp_path, TABLE)
    solver, verifier = work.agents
    assert (work.tasks, work.group_size, source) == (5, 4, Chains())
    assert (solver.calls, solver.prompt_tokens, solver.cached_tokens) == (1.5, 300, 150)
    assert (solver.response, verifier.tool_seconds) == (Lengths(12.0, 0.0, 24), 0.25)
    assert verifier.response.moment(1) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("response = 12", "response = 25"),
            r"workload\.agents\.solver\.response is 25 .*at most team\.solver\.max_tokens, 24",
        ),
        (("cached = 200", "cached = 300"), r"workload\.agents\.solver\.cached is 300 .*less than .*prompt, 300"),
        (("calls = 1.5", "cals = 1.5"), r"workload\.agents\.solver\.cals: unknown key .*the nearest is 'calls'"),
        (("tasks = 5", "tasks = 0"), r"workload\.tasks: 0; .*greater than 0"),
        (("agents.verifier", "agents.verifyer"), r"workload\.agents\.verifyer .*the nearest is 'verifier'"),
        (("prompt = 400\n", ""), r"workload\.agents\.verifier\.prompt: missing"),
    ],
)
def test_a_faulty_table_is_refused_by_key(tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, TABLE.replace(*change))


def test_a_table_needs_every_agent_and_a_file(tmp_path):
    with pytest.raises(ConfigError, match=r"workload\.agents\.verifier: missing"):
        read(tmp_path, TABLE.partition("[workload.agents.verifier]")[0])
    with pytest.raises(ConfigError, match="not valid TOML"):
        read(tmp_path, "[workload")
    with pytest.raises(ConfigError, match=r"expected a table \[workload\]"):
        read(tmp_path, "[work]\n")
    with pytest.raises(ConfigError, match=r"--workload .*none\.toml: No such file"):
        read_table(tmp_path / "none.toml", load_recipe("quickstart"), load_team({"name": "single"}))
