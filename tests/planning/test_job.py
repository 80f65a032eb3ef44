"""Which devices a job takes, what it refuses, and what is assumed of a team's work."""

from __future__ import annotations

import pytest

from drmas.agents.team import load_team
from drmas.config.load import load as load_recipe
from drmas.errors import ConfigError, ModelError
from drmas.planning.assumed import CALLS, assumed
from drmas.planning.cluster import load_cluster
from drmas.planning.job import engine_devices, make_job, parameter_count, trainer_ranks
from drmas.runtime.known_models import KNOWN


def job_of(recipe: str, *words: str, cluster: str = "h100-8", gpus: int | None = None):
    run = load_recipe(recipe, words)
    team = load_team(run.team)
    return make_job(run, team, load_cluster(cluster, gpus=gpus), assumed(run, team))


def test_parameters_are_the_published_ones(toy):
    assert parameter_count(job_of("paper-maths-8b").policies["solver"].shape) == KNOWN["Qwen/Qwen3-8B"].parameters
    assert parameter_count(job_of("paper-search-7b").policies["router"].shape) == KNOWN["Qwen/Qwen2.5-7B"].parameters
    assert toy(ranks=1).policies["main"].parameters == 4 * (32 * 128 + 64 * 32 + 3 * 32 * 64 + 96) + 132 * 32 + 32


def test_unset_ranks_are_what_engines_leave(toy):
    assert toy(engine={"gpus": "own", "replicas": 3}).world == 5
    assert toy().world == 8
    assert toy(cluster={"nodes": 1, "device": {"gpu": False}}, engine={"gpus": "own"}).world == 1


def test_more_ranks_than_gpus_are_refused_with_the_sum(toy):
    with pytest.raises(
        ConfigError, match=r"train.ranks is 9, no engine has its own GPUs: 9 \+ 0 GPUs are more than the 8 of toy"
    ):
        toy(ranks=9)
    with pytest.raises(ConfigError, match=r"train.ranks is 7, engines .* take 2 \(policies.main.engine 2\): 7 \+ 2 GPUs"):
        toy(ranks=7, engine={"gpus": "own", "replicas": 2})
    with pytest.raises(ConfigError, match=r"the trainer needs at least 1, .*: 1 \+ 8 GPUs"):
        toy(engine={"gpus": "own", "replicas": 8})


def test_shared_engines_beyond_the_first_node_are_refused(toy):
    run = toy(ranks=8, engine={"replicas": 6}).run  # built as other systems can
    with pytest.raises(ConfigError, match=r"takes 6 replica\(s\) x 1 shared GPUs; the trainer has 4 on the first node"):
        engine_devices(run, toy(ranks=8).cluster, 8)


def test_engines_that_would_lie_on_two_nodes_need_room_for_the_gap(toy):
    with pytest.raises(
        ConfigError, match=r"2 trainer ranks and the engines behind them take 11 GPUs, since no engine's lie on"
    ):
        toy(ranks=2, engine={"gpus": "own", "tensor_parallel": 3, "replicas": 2})


def test_layouts_that_do_not_divide_are_refused(toy):
    with pytest.raises(ConfigError, match=r"policies.main.engine.tensor_parallel is 3; it must divide the model's 4 attention"):
        toy(ranks=3, engine={"tensor_parallel": 3})
    with pytest.raises(ModelError, match=r"policies.main.pipeline_parallel is 8; it must divide the model's 4 layers"):
        toy(ranks=8, pipeline_parallel=8)
    with pytest.raises(ConfigError, match=r"a node of toy has 2 GPUs"):
        toy(ranks=4, engine={"tensor_parallel": 4}, cluster={"gpus_per_node": 2})


def test_settings_for_gpus_are_no_matter_of_this_machine():
    assert job_of("paper-maths-4b", "--policies.solver.attention", "transformer-engine").world == 4
    assert trainer_ranks(load_recipe("paper-maths-4b"), load_cluster("h100-8")) == 4


def test_a_model_that_nobody_knows_is_refused():
    with pytest.raises(ModelError, match=r"policies.solver.model: model 'nobody/knows'"):
        job_of("paper-maths-4b", "--policies.solver.model", "nobody/knows")


def test_what_is_not_given_is_assumed(load):
    run = load_recipe("paper-maths-4b")
    work = assumed(run, load_team(run.team), calls={"verifier": 2.0}, prompt={"solver": 300}, response={"": 800}, spread=0.5)
    solver, verifier = work.agents
    assert (solver.calls, verifier.calls) == (CALLS["solver"], 2.0)
    assert solver.prompt_tokens == 300
    assert verifier.prompt_tokens > 800  # it reads what the solver wrote
    assert [agent.response.moment(1) for agent in work.agents] == pytest.approx([800, 800])
    assert solver.response.cap == 4096
    assert 0 < solver.cached_tokens < solver.prompt_tokens
    assert (work.tasks, work.group_size, work.episodes) == (32, 8, 256)
    assert work.source == "--calls, --prompt, --response as given, the rest assumed"
    assert assumed(run, load_team(run.team)).source == "assumed from the configuration"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"calls": {"sovler": 1.0}}, r"--calls names 'sovler'; the nearest is 'solver'"),
        ({"calls": {"solver": -1.0}}, r"--calls is -1 for solver; expected 0 to 1000"),
        ({"response": {"": 0.0}}, r"--response is 0; expected 1 to"),
        ({"response": {"solver": 5000}}, r"--response is 5000 for solver, whose team.solver.max_tokens is 4096"),
        ({"prompt": {"": float("inf")}}, r"--prompt is inf"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given, message):
    run = load_recipe("paper-maths-4b")
    with pytest.raises(ConfigError, match=message):
        assumed(run, load_team(run.team), **given)
