"""The numbers of an evaluation, against sums done by hand."""

from __future__ import annotations

import pytest

from drmas.runtime.scores import Scores
from drmas.types import Episode, Failure, Task, ToolUse, Turn

SOLVED = {"a/1": [1, 1, 1, 1], "a/2": [1, 0, 0, 0], "b/1": [0, 0, 0, 0], "b/2": [0, 1, 0, 1], "b/3": [0, 0, 0, 0]}


def turn(agent: str = "solver", index: int = 0, *, read: int = 10, generated: int = 5, **changes) -> Turn:
    given = {"policy": "main", "finish_reason": "stop", "text": "", "seconds": 0.5} | changes
    return Turn(
        agent=agent, index=index, prompt_ids=[1] * read, response_ids=[2] * generated, logprobs=[], versions=[], **given
    )


def episode(task: str, sample: int, reward: float | None, *turns: Turn, seconds: float = 1.0, kind: str = "engine") -> Episode:
    failure = Failure(kind, "it broke") if reward is None else None
    of = Task(task, "?", "!", source=task[0])
    return Episode(of, sample, list(turns), reward=reward, failure=failure, seconds=seconds)


def scores(episodes, *, samples: int = 4, prices=None, **more) -> Scores:
    given = {"agents": ["solver", "verifier"], "samples": samples, "prices": prices or {}, "bootstrap": 200, "seed": 0}
    return Scores(episodes, **given, **more)


def whole(solved=SOLVED) -> list[Episode]:
    return [episode(task, k, reward) for task, rewards in solved.items() for k, reward in enumerate(rewards)]


def test_avg_and_pass_at_every_k_micro_macro_and_by_source():
    found = scores(whole()).measures()
    assert list(found) == ["reward", "avg@4", "pass@1", "pass@2", "pass@3", "pass@4"]
    # per task: avg 1, 1/4, 0, 1/2, 0; pass@2 1, 1/2, 0, 5/6, 0; pass@3 1, 3/4, 0, 1, 0; pass@4 1, 1, 0, 1, 0
    micro = {"avg@4": 1.75 / 5, "pass@1": 1.75 / 5, "pass@2": (1 + 1 / 2 + 5 / 6) / 5, "pass@3": 2.75 / 5, "pass@4": 3 / 5}
    macro = {"avg@4": (1.25 / 2 + 0.5 / 3) / 2, "pass@2": (1.5 / 2 + 5 / 6 / 3) / 2, "pass@4": (1 + 1 / 3) / 2}
    assert {name: found[name]["micro"].value for name in micro} == pytest.approx(micro)
    assert {name: found[name]["macro"].value for name in macro} == pytest.approx(macro)
    assert {source: each.value for source, each in found["pass@4"]["sources"].items()} == pytest.approx({"a": 1, "b": 1 / 3})
    assert all((each["tasks"], each["left_out"]) == (5, 0) for each in found.values())
    assert 0 <= found["avg@4"]["micro"].low < 0.35 < found["avg@4"]["micro"].high <= 1


def test_a_reward_of_one_is_solved_and_the_mean_reward_stands_beside_it():
    found = scores([episode("a/1", k, reward) for k, reward in enumerate((0.5, 0.99, 1.0, 1.5))]).measures()
    assert found["reward"]["micro"].value == pytest.approx(3.99 / 4)
    assert found["avg@4"]["micro"].value == 0.5


def test_I3_failed_episodes_are_counted_by_kind_and_are_no_tries():
    """A task's n is the number of its finished episodes; where that is below k, the task has no pass@k."""
    episodes = whole({"a/1": [1, None, None, 0], "a/2": [0, 0, 0, 0], "b/1": [None] * 4})
    episodes[1].failure = Failure("tool", "it broke")
    found = scores(episodes)
    assert found.failed == {"engine": 5, "tool": 1}
    measures = found.measures()
    assert measures["avg@4"]["micro"].value == pytest.approx((1 / 2 + 0) / 2)
    assert measures["pass@2"]["micro"].value == pytest.approx((1 + 0) / 2)
    assert measures["pass@4"]["micro"].value == 0.0
    assert [measures[name]["left_out"] for name in ("avg@4", "pass@2", "pass@3", "pass@4")] == [1, 1, 2, 2]
    assert list(measures["pass@1"]["sources"]) == ["a"]


def test_a_k_that_no_task_has_enough_episodes_for_has_no_value():
    found = scores([episode("a/1", 0, 1.0), episode("a/1", 1, None)], samples=2).measures()
    assert found["pass@2"] == {"tasks": 0, "left_out": 1, "micro": None, "macro": None, "sources": {}}
    assert found["pass@1"]["micro"].value == 1.0


def test_the_gain_is_paired_task_by_task():
    """Each task is solved once less: its spread over tasks is that of the differences, not that of the tasks."""
    less = {task: [0, *rewards[1:]] if rewards[0] else rewards for task, rewards in SOLVED.items()}
    gain = scores(whole()).gain(scores(whole(less)))
    assert gain["avg@4"]["micro"].value == pytest.approx(2 * 0.25 / 5)
    assert gain["avg@4"]["sources"]["a"].low == gain["avg@4"]["sources"]["a"].high == pytest.approx(0.25)
    assert scores(whole()).gain(scores(whole()))["pass@4"]["micro"].high == 0.0
    partly = scores(whole({"a/1": [0, 0, 0, None]}))
    assert scores(whole()).gain(partly)["pass@3"]["micro"].value == 1.0
    assert (scores(whole()).gain(partly)["pass@4"]["tasks"], scores(whole()).gain(partly)["pass@3"]["left_out"]) == (0, 4)


def test_what_each_agent_did_in_finished_episodes():
    episodes = [
        episode("a/1", 0, 1.0, turn(read=10, generated=5), turn("verifier", 1, read=20, generated=1, finish_reason="length")),
        episode("a/1", 1, 0.0, turn(read=12, generated=7, valid=False, seconds=1.5)),
        episode("a/1", 2, None, turn(read=1000, generated=1000)),
    ]
    episodes[0].tool_uses = [ToolUse("search", "{}", "found", agent="solver", turn=0), ToolUse("search", "{}", "found")]
    episodes[2].tool_uses = [ToolUse("search", "{}", "found", agent="solver", turn=0)] * 3  # of a failed episode
    found = scores(episodes, prices={"main": 2.0}).per_agent()
    assert found["solver"] == {
        "calls": 2,
        "calls_per_episode": 1.0,
        "tool_calls": 1,
        "read_tokens": 22,
        "generated_tokens": 12,
        "truncated_share": 0.0,
        "valid_share": 0.5,
        "seconds_mean": 1.0,
        "cost": pytest.approx(34 * 2e-6),
    }
    assert (found["verifier"]["calls_per_episode"], found["verifier"]["truncated_share"]) == (0.5, 1.0)
    silent = scores(episodes[1:2]).per_agent()["verifier"]
    assert (silent["calls"], silent["cost"]) == (0, 0.0)
    assert silent["valid_share"] is silent["truncated_share"] is silent["seconds_mean"] is None


def test_what_a_solution_takes():
    """Tokens of all attempts over the solved ones; seconds of the solved ones, 1 to 5: the 95 % quantile is 4.8."""
    episodes = [episode("a/1", k, 1.0, turn(), seconds=float(k + 1)) for k in range(5)]
    episodes += [
        episode("a/2", 0, 0.0, turn(read=20, generated=5), seconds=99.0),
        episode("a/2", 1, None, turn(), seconds=99.0),
    ]
    found = scores(episodes, prices={"main": 4.0}).solved()
    assert (found["episodes"], found["tasks"], found["tokens"], found["tokens_each"]) == (5, 1, 100, 20.0)
    assert (found["cost"], found["cost_each"]) == (pytest.approx(4e-4), pytest.approx(8e-5))
    assert (found["seconds_mean"], found["seconds_p50"], found["seconds_p95"]) == (3.0, 3.0, pytest.approx(4.8))
    assert found["unpriced"] == []


def test_what_a_solution_takes_counts_rewards_of_one_and_more_as_solved():
    rewards = (0.5, 0.99, 1.0, 1.5)
    episodes = [episode(f"a/{k}", 0, reward, turn(), seconds=reward) for k, reward in enumerate(rewards)]
    found = scores(episodes).solved()
    assert (found["episodes"], found["tasks"], found["tokens_each"], found["seconds_mean"]) == (2, 2, 30.0, 1.25)


def test_without_a_price_or_a_solution_there_is_no_cost_each():
    priced = [episode("a/1", 0, 1.0, turn(), turn("verifier", 1, policy="judge"))]
    found = scores(priced, prices={"main": 1.0, "judge": None})
    assert (found.solved()["cost"], found.solved()["cost_each"], found.solved()["unpriced"]) == (None, None, ["judge"])
    assert found.per_agent()["solver"]["cost"] == pytest.approx(15e-6)
    assert found.per_agent()["verifier"]["cost"] is None
    never = scores([episode("a/1", 0, 0.0, turn())], prices={"main": 1.0}).solved()
    assert (never["cost"], never["cost_each"], never["tokens_each"]) == (pytest.approx(15e-6), None, None)
    assert never["seconds_mean"] is never["seconds_p50"] is never["seconds_p95"] is None


def test_tokens_of_remote_models_are_those_that_their_servers_counted():
    spoken = episode("a/1", 0, 1.0, turn(), turn("verifier", 1, policy="judge", read=0, generated=0))
    found = scores([spoken], prices={"main": 1.0, "judge": 10.0}, remote_tokens={"a/1#0/001/verifier": (300, 40)})
    assert [found.per_agent()["verifier"][key] for key in ("read_tokens", "generated_tokens")] == [300, 40]
    assert found.solved()["tokens"] == 355
    assert found.solved()["cost"] == pytest.approx(15e-6 + 3400e-6)
    uncounted = scores([spoken], prices={"main": 1.0, "judge": 10.0}).solved()
    assert (uncounted["cost"], uncounted["unpriced"]) == (None, ["judge"])
