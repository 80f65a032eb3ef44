"""Proposals: that they can be run as they are said, fit, are sorted, and that what fell out says why."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from drmas.agents.team import load_team
from drmas.config.load import load
from drmas.planning.assumed import assumed
from drmas.planning.cluster import load_cluster
from drmas.planning.job import make_job
from drmas.planning.predict import predict
from drmas.planning.propose import EQUAL, Proposals, propose
from drmas.runtime.gpus import place_engines
from drmas.runtime.placement import check


@pytest.fixture(scope="module")
def proposed():
    """Recipe, GPUs -> (recipe's words, cluster, proposals)."""
    found: dict[tuple[str, int], Proposals] = {}

    def ask(recipe: str, gpus: int) -> Proposals:
        if (recipe, gpus) not in found:
            run = load(recipe)
            team, cluster = load_team(run.team), load_cluster("h100-8", gpus=gpus)
            found[recipe, gpus] = propose(make_job(run, team, cluster, assumed(run, team)))
        return found[recipe, gpus]

    return ask


@pytest.mark.parametrize(
    ("recipe", "gpus"), [("paper-maths-4b", 8), ("paper-search-7b", 8), ("paper-search-heterogeneous", 32)]
)
def test_every_proposal_can_be_run_as_its_words_say(proposed, recipe, gpus):
    proposals = proposed(recipe, gpus)
    assert proposals.best
    for one in proposals.best:
        prediction = one.prediction
        run = load(recipe, list(one.overrides))
        team, cluster = load_team(run.team), load_cluster("h100-8", gpus=gpus)
        job = make_job(run, team, cluster, assumed(run, team))  # divides, and has the GPUs
        again = predict(job)
        assert again.phases == prediction.phases
        hosts = {"engine_hosts": [f"tcp://node{node}:8200" for node in range(one.engine_nodes)]}
        placed = run.model_copy(update={"cluster": run.cluster.model_copy(update=hosts)})
        seats = place_engines(placed, world=job.world, ranks_per_host=min(8, job.world), gpus_per_host=8)
        need: Counter[str] = Counter()
        for name, own in seats.items():
            need.update({seat.host: 0 for seat in own if seat.host})
            for seat in own:
                need[seat.host or ""] += run.policies[name].engine.tensor_parallel if seat.host else 0
        assert max(need.values(), default=0) <= 8
        check(run, team, world=job.world, here=False)
        assert again.fits
        assert job.gpus <= gpus
        for policy in job.policies.values():
            c, shape = policy.config, policy.shape
            assert shape.heads % c.tensor_parallel == 0
            assert shape.layers % c.pipeline_parallel == 0
            assert c.tensor_parallel <= 8
            assert len(policy.ranks) % (c.tensor_parallel * c.pipeline_parallel * c.context_parallel) == 0
            assert shape.heads % c.engine.tensor_parallel == 0
            assert c.tokens_per_microbatch >= min(
                c.engine.max_model_tokens, load(recipe).policies[policy.name].tokens_per_microbatch
            )
            for replica in range(c.engine.replicas):
                its = policy.devices[replica * c.engine.tensor_parallel : (replica + 1) * c.engine.tensor_parallel]
                assert len({device // 8 for device in its}) == 1
            assert c.lr == load(recipe).policies[policy.name].lr


@pytest.mark.parametrize(("recipe", "gpus"), [("paper-maths-4b", 8), ("paper-search-heterogeneous", 32)])
def test_the_fastest_goes_first_and_fewer_gpus_where_steps_are_equal(proposed, recipe, gpus):
    best = proposed(recipe, gpus).best
    steps = [one.prediction.phases.step for one in best]
    assert all(later > earlier / (1 + EQUAL) ** 2 for earlier, later in pairwise(steps))
    assert len({(one.mode, one.prediction.job.world) for one in best}) == len(best)


def test_more_gpus_are_not_slower(proposed):
    steps = [proposed("paper-maths-4b", gpus).best[0].prediction.phases.step for gpus in (4, 8, 16)]
    assert steps[0] > steps[1] > steps[2]


def test_only_engines_of_the_first_node_share_gpus(proposed):
    for one in proposed("paper-search-heterogeneous", 32).best:
        if one.mode.gpus == "shared":
            assert all(max(policy.devices) < 8 for policy in one.prediction.job.policies.values())
        assert one.mode.ahead <= 1


def test_what_fell_out_says_why_with_numbers(proposed):
    rejected = {one.what: one for one in proposed("paper-maths-4b", 8).rejected}
    memory = rejected["memory of the trainer"]
    assert memory.count > 10
    assert "of 80 GiB" in memory.why
    assert "optimiser" in memory.why
    assert "must divide the model's 36 layers" in rejected["the model doesn't divide"].why


def test_a_model_that_fits_nowhere_has_no_proposal_and_the_arithmetic():
    run = load("paper-maths-8b", ["--policies.solver.offload-optimizer", "false"])
    team, cluster = load_team(run.team), load_cluster("l40s-8", gpus=1)
    shared = load(
        "paper-maths-8b",
        ["--train.ranks", "1", "--policies.solver.tensor-parallel", "1", "--policies.solver.engine.tensor-parallel", "1"],
    )
    proposals = propose(make_job(shared, team, cluster, assumed(run, team)))
    assert proposals.best == ()
    (memory,) = [one for one in proposals.rejected if one.what == "memory of the trainer"]
    assert "of 45 GiB" in memory.why


def test_a_host_without_gpus_has_one_layout():
    run = load("quickstart")
    team = load_team(run.team)
    assert propose(make_job(run, team, load_cluster("laptop-cpu"), assumed(run, team))) == Proposals((), (), 0)


def test_policies_on_ranks_of_their_own_are_proposed_together_and_the_words_say_so():
    words = ["--train.placement", "split"]
    run = load("paper-maths-4b", [*words, "--policies.solver.tensor-parallel", "2"])
    team = load_team(run.team)
    best = propose(make_job(run, team, load_cluster("h100-8"), assumed(run, team))).best[0]
    assert best.overrides[best.overrides.index("--train.placement") + 1] == "shared"
    assert load("paper-maths-4b", [*words, *best.overrides]).train.placement == "shared"


def test_staleness_beyond_one_step_is_kept():
    words = ["--rollout.max-staleness", "3", "--rollout.carry-over", "true", "--loss.mismatch", "truncate"]
    run = load("paper-maths-4b", words)
    team = load_team(run.team)
    proposals = propose(make_job(run, team, load_cluster("h100-8"), assumed(run, team)))
    assert proposals.best
    assert {one.mode.ahead for one in proposals.best} == {3}


@pytest.mark.parametrize("words", [("--rollout.dynamic.enabled", "true", "--rollout.dynamic.oversample", "1.5"), ()])
def test_a_run_that_goes_ahead_stays_so_whatever_else_rests_on_it(words):
    ahead = ("--rollout.max-staleness", "1", "--policies.solver.engine.gpus", "own", "--policies.solver.engine.sleep", "false")
    run = load("paper-maths-4b", [*ahead, *words])
    team = load_team(run.team)
    proposals = propose(make_job(run, team, load_cluster("h100-4x8"), assumed(run, team)))
    assert {one.mode.ahead for one in proposals.best} == {1}
    assert all("--rollout.max-staleness" not in one.overrides for one in proposals.best)
    for one in proposals.best:
        load("paper-maths-4b", [*ahead, *words, *one.overrides])


def test_engines_on_other_nodes_are_said_and_never_beside_others_on_the_trainers():
    run = load("paper-maths-4b", ["--rollout.tasks-per-step", "256"])
    team = load_team(run.team)
    proposals = propose(make_job(run, team, load_cluster("h100-4x8"), assumed(run, team)), most=50)
    own = [one for one in proposals.best if one.mode.gpus == "own"]
    assert any(one.engine_nodes for one in own)
    for one in own:
        job = one.prediction.job
        devices = {device for policy in job.policies.values() for device in policy.devices}
        assert (one.engine_nodes == 0) == (max(devices) < 8)
        assert one.engine_nodes == 0 or (job.world % 8 == 0 and one.engine_nodes == len({device // 8 for device in devices}))
