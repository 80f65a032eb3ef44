"""A whole plan: its sums, its words, its JSON, its page, and the published points."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import pytest

from drmas.agents.team import load_team
from drmas.config.load import load as load_recipe
from drmas.planning import costs
from drmas.planning.assumed import assumed
from drmas.planning.cluster import load_cluster
from drmas.planning.page import document, write_plan
from drmas.planning.plan import SCHEMA, make_plan, to_dict
from drmas.planning.predict import bottleneck, grown, predict
from drmas.planning.published import QUANTITIES, compare, summary
from drmas.planning.text import published_markdown, render
from drmas.planning.types import Lengths

PREDICTED = {
    *("ranks", "gpus", "fits", "layouts", "memory", "fullest", "phases", "bottleneck", "training", "engines", "rollout"),
    *("trained_tokens", "tokens_per_second_per_gpu", "generated_tokens_per_second", "step_cost", "currency"),
}
TOP = PREDICTED | {
    *("schema", "name", "cluster", "efficiencies", "workload", "steps", "run_cost", "proposals", "rejected", "tried"),
    *("growth", "notes"),
}


NO_ROOM = ("--policies.solver.engine.gpu-memory-fraction", "0.03", "--policies.verifier.engine.gpu-memory-fraction", "0.03")


def plan_of(recipe: str, *words: str, cluster: str = "h100-8", price: float | None = None):
    run = load_recipe(recipe, words)
    team = load_team(run.team)
    return make_plan(run, team, load_cluster(cluster, price=price), assumed(run, team))


@pytest.fixture(scope="module")
def maths():
    return plan_of("paper-maths-4b", "--train.steps", "100", price=2.0)


def test_phases_are_the_sums_of_their_parts(toy):
    two = {"a": {}, "b": {"engine": {"sleep": True}}}
    job = toy(ranks=2, policies=two, run={"train": {"updates_per_step": 2}})
    found = predict(job)
    a, b = job.policies.values()
    assert found.phases.train == pytest.approx(costs.training(job, a).total + costs.training(job, b).total)
    assert found.phases.score == pytest.approx(costs.scoring(job, a) + costs.scoring(job, b))
    assert found.phases.sync == pytest.approx(costs.sync_seconds(job, a) + costs.sync_seconds(job, b))
    assert found.phases.wake == pytest.approx(costs.wake_seconds(job))
    assert found.phases.other == 2.0
    apart = predict(toy(ranks=2, policies=two, run={"train": {"updates_per_step": 2, "placement": "split"}}))
    (slowest,) = apart.updates.values()
    assert apart.phases.train == pytest.approx(slowest.total)
    assert apart.phases.train == pytest.approx(max(training.total for training in apart.training.values()))


def test_tokens_and_cost(toy):
    job = toy(ranks=2, cluster={"price": {"per_gpu_hour": 36.0}})
    found = predict(job)
    assert found.trained_tokens == 12 * 15
    assert found.tokens_per_second_per_gpu == pytest.approx(180 / found.phases.step / 2)
    assert found.step_cost == pytest.approx(2 * 36.0 / 3600 * found.phases.step)
    assert predict(toy(ranks=2)).step_cost is None


def test_a_cache_without_room_for_a_sequence_does_not_fit(toy):
    cramped = predict(toy(ranks=1, engine={"gpu_memory_fraction": (2 * 2**30 + 1.2e5) / 4e9, "max_model_tokens": 64}))
    assert cramped.cramped == ["main"]
    assert not cramped.fits
    assert cramped.fullest.headroom > 0


def test_a_step_that_never_ends_is_said(toy):
    found = predict(toy(ranks=1, engine={"gpu_memory_fraction": 0.5}))
    assert found.phases.step == float("inf")
    assert bottleneck(found) == "no step ends: the engines have no room for a sequence of main"
    plan = plan_of("paper-maths-8b", *NO_ROOM)
    page = render(plan)
    assert "step       never" in page
    assert "nan" not in page
    assert json.loads(json.dumps(to_dict(plan), allow_nan=False))["phases"]["step"] is None
    assert "Plan of" in document(plan)


def test_longer_answers_take_longer(toy, load):
    work = load.workload(load.agent(response=Lengths.fitted(8.0, 0.5, 64), calls=1.0))
    curve = grown(toy(ranks=1, work=work, engine={"max_model_tokens": 128}), (0.5, 1.0, 2.0, 4.0))
    means, steps = [mean for mean, _ in curve], [one.phases.step for _, one in curve]
    assert means == sorted(means)
    assert means[1] == pytest.approx(8.0)
    assert steps == sorted(steps)


def test_the_bottleneck_is_named(toy, load):
    job = toy(ranks=1, work=load.workload(load.agent(), tasks=100), engine={"max_concurrent": 4})
    bare = replace(job.cluster.efficiencies, step_seconds=0, sync_seconds=0, microbatch_seconds=0)

    def named(**changes: float) -> str:
        return bottleneck(predict(replace(job, cluster=replace(job.cluster, efficiencies=replace(bare, **changes)))))

    assert named().startswith("rollout, ")
    assert "products when full" in named(decode_flops=1e-6)
    assert "overhead of engine steps when full" in named(engine_step_seconds=1.0)
    assert "train, 100% of the step: compute 100% of that" in named(train=1e-6)
    assert named(sync_seconds=999.0) == "sync, 100% of the step"


def test_the_json_has_the_keys_of_its_schema(maths):
    found = json.loads(json.dumps(to_dict(maths), allow_nan=False))
    assert found["schema"] == SCHEMA == 1
    assert found.keys() == TOP
    assert found["proposals"]
    for one in found["proposals"]:
        assert one.keys() == PREDICTED | {"mode", "overrides"}
    assert found["phases"].keys() == {"rollout", "score", "train", "sync", "wake", "other", "ahead", "step"}
    assert found["memory"][0].keys() == {"where", "capacity_bytes", "total_bytes", "headroom_bytes", "parts"}
    assert found["rejected"][0].keys() == {"what", "count", "why"}
    assert found["growth"][0].keys() == {"mean_response_tokens", "phases", "fits"}
    assert found["run_cost"] == pytest.approx(100 * found["step_cost"])
    assert found["step_cost"] == pytest.approx(4 * 2.0 * found["phases"]["step"] / 3600)


def test_the_text_answers_in_order(maths):
    page = render(maths)
    order = ["plan  ", "fits  ", "memory of rank 0", "a step", "bottleneck", "throughput", "cost", "layouts, the fastest first"]
    places = [page.index(word) for word in order]
    assert places == sorted(places)
    assert "for 100 steps" in page
    assert "efficiencies: the defaults, which are assumptions" in page
    assert max(map(len, page.splitlines())) <= 128


def test_without_price_or_steps_the_text_says_so():
    page = render(plan_of("paper-maths-4b"))
    assert "h100-8 has no price: no cost" in page
    assert "\ncost" not in page
    assert "train.epochs is 2" in render(plan_of("paper-maths-4b", price=1.0))


def test_what_does_not_fit_is_said():
    plan = plan_of("paper-maths-8b", "--policies.solver.recompute", "none", "--policies.verifier.recompute", "none")
    page = render(plan)
    assert not plan.prediction.fits
    assert "fits             NO: " in page
    assert "too many" in page


class _Page(HTMLParser):
    """Collects tags; raises where one is closed that isn't open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "br", "rect", "line", "path", "circle", "polyline", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_page_holds_everything_and_no_script(maths, tmp_path):
    paths = write_plan(maths, tmp_path / "out")
    assert [path.name for path in paths] == ["plan.json", "plan.html"]
    assert json.loads(paths[0].read_text())["name"] == "paper-maths-4b"
    page = _Page()
    page.feed(document(maths))
    assert page.open == []
    assert page.seen.count("svg") == 2
    assert "script" not in page.seen
    assert "http" not in document(maths).replace("http://www.w3.org/2000/svg", "")


@pytest.fixture(scope="module")
def published():
    return compare()


def test_every_published_number_has_a_prediction(published):
    assert len(published) >= 25
    assert {one.quantity for one in published} == set(QUANTITIES)
    assert all(one.predicted > 0 and one.source and one.assumed for one in published)
    assert summary(published)["points"] == len(published)


def test_steps_of_dense_models_are_predicted_within_a_factor_of_one_and_a_half(published):
    dense = [one for one in published if one.quantity == "step_seconds" and "A3B" not in one.name]
    assert len(dense) >= 7
    assert all(1 / 1.5 < one.predicted / one.published < 1.5 for one in dense), [(one.name, one.error) for one in dense]


def test_the_readmes_table_is_what_the_command_prints(published):
    """Words to the letter, predictions within 3 %: other versions of numpy may draw other lengths."""
    readme = (resources.files("drmas.planning") / "README.md").read_text(encoding="utf-8")
    start = readme.index("| setting | what | measured | predicted |")
    written, printed = (
        [line.split(" | ") for line in text.splitlines()[2:]] for text in (readme[start:], published_markdown(published))
    )
    for old, new in zip(written, printed[: len(published)], strict=False):
        assert (old[:3], old[5:]) == (new[:3], new[5:])
        before, after = (float(cells[3].split()[0].replace(",", "").removesuffix("/s")) for cells in (old, new))
        assert after == pytest.approx(before, rel=0.03)
