from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from drmas.agents.team import load_team
from drmas.config.load import dump
from drmas.core.estimators import resolve
from drmas.reproduce.plan import METHODS, SCENARIOS, SINGLE, START, Trial
from drmas.reproduce.scenarios import configure


def _config(scenario: str, method: str, seed: int = 0):
    return configure(Trial(scenario, method, seed), Path("out"), quick=True)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_methods_differ_in_the_preset_alone(scenario) -> None:
    teams = [_config(scenario, method) for method in METHODS if method != SINGLE]
    for config, other in pairwise(teams):
        assert config.advantage != other.advantage
        assert config.model_copy(update={"advantage": other.advantage}) == other


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_start_has_the_scenarios_team_and_policies_and_no_step(scenario) -> None:
    start, run = _config(scenario, START), _config(scenario, "grpo")
    assert (start.train.steps, run.train.steps, run.warm_start) == (0, 60, None)
    assert start.warm_start is not None
    assert (start.team, start.policies, start.data, start.seed) == (run.team, run.policies, run.data, run.seed)


def test_who_speaks_with_what() -> None:
    def spoken(scenario: str, method: str = "grpo") -> dict[str, tuple[str, str]]:
        config = _config(scenario, method)
        agents = load_team(config.team).agents
        assert set(config.policies) == {agent.policy for agent in agents.values()}
        return {name: (agent.policy, config.policies[agent.policy].model) for name, agent in agents.items()}

    small, large = "tiny:qwen3-64x2", "tiny:qwen3-96x3"
    assert spoken("maths-shared") == {"solver": ("main", small), "verifier": ("main", small)}
    assert spoken("maths-separate") == {"solver": ("solver", small), "verifier": ("verifier", small)}
    searchers = {"searcher": ("small", small), "answerer": ("small", small)}
    assert spoken("search-heterogeneous") == {"router": ("large", large), **searchers}
    assert spoken("maths-shared", SINGLE) == {"solver": ("main", small)}
    assert spoken("search-shared", SINGLE) == {"solver": ("main", small)}
    assert type(load_team(_config("maths-unequal", "grpo").team)).__name__ == "Unequal"
    assert spoken("maths-rescue") == {name: (name, small) for name in ("solver", "verifier", "fixer")}


def test_a_single_agent_is_trained_with_grpo_on_the_same_tasks_and_budget() -> None:
    alone, team = _config("search-shared", SINGLE), _config("search-shared", "grpo")
    assert alone.team["name"] == "search-alone"
    assert (alone.advantage, alone.data, alone.rollout, alone.train) == (team.advantage, team.data, team.rollout, team.train)


@pytest.mark.parametrize("method", METHODS)
def test_a_trials_configuration_can_be_run_again_by_hand(method, tmp_path) -> None:
    from drmas.config.load import load

    config = _config("maths-shared", method)
    (tmp_path / "config.json").write_text(dump(config))
    assert load(str(tmp_path / "config.json"), []) == config
    resolve(**config.advantage.model_dump(exclude_none=True), team=list(load_team(config.team).agents))


def test_the_weights_of_the_start_are_the_models() -> None:
    trial = Trial("search-separate", "dr-mas", 1)
    models = {name: Path("starts") / name for name in ("router", "searcher", "answerer")}
    config = configure(trial, Path("out"), quick=True, models=models)
    assert {name: policy.model for name, policy in config.policies.items()} == {n: str(p) for n, p in models.items()}
