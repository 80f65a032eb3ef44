"""A run's episodes as work: lengths, what a prefix cache would find, what waited for what, tools."""

from __future__ import annotations

import json

import numpy
import pytest

from drmas.agents.team import load_team
from drmas.config.load import load as load_recipe
from drmas.errors import DataError
from drmas.planning.measured import Fixed, Measured, read_run


def turn(agent: str, index: int, prompt: list[int], response: list[int], **more):
    written = {"agent": agent, "policy": "main", "turn": index, "prompt_ids": prompt, "response_ids": response, "trained": True}
    return written | more


def episode(task: str, sample: int, *turns, **more):
    return {
        "task": task,
        "sample": sample,
        "episode": f"{task}#{sample}",
        "probe": None,
        "turns": list(turns),
        "tools": [],
    } | more


def write(folder, *episodes, step: int = 1):
    path = folder / "episodes" / f"step_{step}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in episodes))
    return folder


def read(folder, recipe: str = "quickstart", **options):
    run = load_recipe(recipe)
    return read_run(folder, run, load_team(run.team), **options)


START, OTHER = list(range(1000, 1080)), list(range(2000, 2080))


def test_lengths_calls_and_prompts_are_the_runs(tmp_path):
    write(
        tmp_path,
        episode("a", 0, turn("solver", 0, [1] * 9, [2] * 5), turn("verifier", 1, [3] * 14, [4] * 2)),
        episode("a", 1, turn("solver", 0, [1] * 9, [2] * 20)),
    )
    work, source = read(tmp_path)
    solver, verifier = work.agents
    assert (solver.calls, verifier.calls) == (1.0, 0.5)
    assert (solver.prompt_tokens, verifier.prompt_tokens) == (9.0, 14.0)
    assert solver.response.moment(1) == pytest.approx(12.5)
    assert solver.response.spread == pytest.approx(numpy.log(2))  # of ln 5 and ln 20
    assert verifier.response.moment(1) == pytest.approx(2)
    assert [[len(script) for script in group] for group in source.measured] == [[2, 1]]
    assert "1 step(s), 1 groups" in work.source


def test_siblings_share_whole_blocks_and_the_last_token_is_always_computed(tmp_path):
    write(
        tmp_path,
        episode("a", 0, turn("solver", 0, START[:70], [5])),
        episode("a", 1, turn("solver", 0, [*START[:40], *OTHER[:30]], [5])),
        episode("b", 0, turn("solver", 0, OTHER[:64], [5])),
        episode("b", 1, turn("solver", 0, OTHER[:64], [5])),
    )
    _, source = read(tmp_path)
    ((one,), (two,)), ((three,), (four,)) = source.measured
    assert (one.shared, two.shared) == (32, 32)
    assert (three.shared, four.shared) == (32, 32)
    assert {call.own for call in (one, two, three, four)} == {0}


def test_what_rows_share_is_counted_to_the_token(tmp_path):
    write(
        tmp_path,
        episode("a", 0, turn("solver", 0, [1, 2, 3, 4, 5], [9]), turn("verifier", 1, [1, 2, 3, 7], [9])),
        episode("a", 1, turn("solver", 0, [1, 2, 3, 4, 5], [9]), turn("solver", 2, [1, 2, 3, 4, 5, 9, 8], [9])),
    )
    work, _ = read(tmp_path)
    solver, verifier = work.agents
    assert solver.cached_tokens == pytest.approx((0 + 4 + 6) / 3)  # the last prompt token is always computed
    assert verifier.cached_tokens == 0  # another agent's start


def test_an_episode_finds_its_own_prompts_and_responses_and_what_all_tasks_begin_with(tmp_path):
    write(
        tmp_path,
        episode(
            "a", 0, turn("solver", 0, START[:40], START[40:64]), turn("verifier", 1, START, [5]), turn("solver", 2, OTHER, [5])
        ),
        episode("b", 0, turn("solver", 0, [*OTHER[:32], *START[:32]], [5])),
    )
    _, source = read(tmp_path)
    ((first, second, third),), ((other,),) = source.measured
    assert (first.own, second.own) == (0, 64)
    assert (third.own, other.own) == (32, 32)  # the first block of both tasks
    assert {call.shared for call in (first, second, third, other)} == {0}


def test_calls_wait_as_in_the_teams_own_shape(tmp_path):
    turns = [turn("solver", index, [1] * 4, [2]) for index in range(6)] + [turn("judge", 6, [1] * 4, [2])]
    write(tmp_path, episode("a", 0, *turns), episode("a", 1, *turns[:2]))
    run = load_recipe("quickstart")
    _, source = read_run(tmp_path, run, load_team({"name": "debate", "solvers": 3, "rounds": 2}))
    whole, cut = source.measured[0]
    assert [call.after for call in whole] == [()] * 3 + [(0, 1, 2)] * 3 + [(3, 4, 5)]
    assert [call.after for call in cut] == [(), (0,)]  # no shape has only these


def test_tools_are_waited_for_after_the_call_that_asked(tmp_path):
    names = ["router", "searcher", "router", "answerer"]
    turns = [turn(name, index, [1] * 4, [2]) for index, name in enumerate(names)]
    uses = [{"turn": None, "seconds": 0.5}, {"turn": 2, "seconds": 0.25}]
    write(tmp_path, episode("a", 0, *turns, tools=uses), episode("a", 1, *turns[:3], tools=uses[:1]))
    _, source = read(tmp_path, "search-facts")
    shaped, unknown = source.measured[0]
    assert [call.tool_seconds for call in shaped] == [0, 0.5, 0.25, 0]
    assert [call.tool_seconds for call in unknown] == [0.25, 0.25, 0]


def test_probes_remote_turns_and_empty_responses_are_left_out(tmp_path):
    write(
        tmp_path,
        episode("a", 0, turn("solver", 0, [1] * 4, []), turn("verifier", 1, [], []), turn("solver", 2, [1] * 4, [2])),
        episode("a", -1, turn("solver", 0, [1] * 4, [2]), probe="greedy"),
    )
    _, source = read(tmp_path)
    assert [len(script) for script in source.measured[0]] == [1]
    assert len(source.measured[0]) == 1


def test_steps_are_read_apart_and_groups_drawn_again(tmp_path, load):
    for step in (1, 2):
        write(tmp_path, episode("a", 0, turn("solver", 0, [1] * step, [2] * step)), step=step)
    _, both = read(tmp_path)
    _, second = read(tmp_path, steps=[2])
    assert [group[0][0].response for group in both.measured] == [1, 2]
    assert [group[0][0].response for group in second.measured] == [2]
    drawn = both.groups(load.workload(load.agent(), group=3), 50, numpy.random.default_rng(0))
    assert {len(group) for group in drawn} == {3}
    assert {script[0].response for group in drawn for script in group} == {1, 2}
    same = Measured(both.measured).groups(load.workload(load.agent(), group=1), 2, numpy.random.default_rng(0))
    assert all(group in both.measured for group in same)
    assert Fixed(both.measured).groups(load.workload(load.agent()), 9, numpy.random.default_rng(0)) == both.measured


def test_no_episodes_and_another_teams_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no episodes/step_N\.jsonl; expected a run's folder"):
        read(tmp_path)
    write(tmp_path, episode("a", 0, turn("critic", 0, [1], [2])))
    with pytest.raises(DataError, match="step 1 has the agent 'critic'; the team has solver, verifier"):
        read(tmp_path)
