"""Which groups make up a step: on a collector whose episodes finish when the test says so."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drmas.config.schema import RolloutConfig
from drmas.config.tasks import SumsData
from drmas.envs.source import TaskSource
from drmas.rollout.collector import Rollout
from drmas.runtime.feed import Feed, Group, mark_stale
from drmas.types import Episode, Failure, Task, Turn


class ManualCollector:
    """Keeps what was launched. `wait` finishes what `choose(rollouts in flight)` names, until the condition holds."""

    def __init__(
        self,
        group_size: int,
        reward: Callable[[str, int], float],
        choose=lambda flying: flying[0],
        probes: tuple[str, ...] = (),
    ) -> None:
        self.group_size, self.reward, self.choose, self.probes = group_size, reward, choose, probes
        self.launched: list[Rollout] = []
        self.flying: list[Rollout] = []
        self.dead = False

    def rollout(self, tasks, *, step, on_progress=None) -> Rollout:
        (task,) = tasks
        own = [Episode(task, sample) for sample in range(self.group_size)]
        return Rollout([*own, *(Episode(task, -1 - i, probe=name) for i, name in enumerate(self.probes))], step, on_progress)

    def submit(self, rollouts: list[Rollout]) -> None:
        self.launched += rollouts
        self.flying += rollouts

    def wait(self, until) -> bool:
        while not until():
            if self.dead:
                return False
            self.finish(self.choose(self.flying))
        return True

    def finish(self, rollout: Rollout) -> None:
        self.flying.remove(rollout)
        for episode in rollout.episodes:
            episode.reward = self.reward(episode.task.id, episode.sample)
        rollout.left = 0


def mixed(task: str, sample: int) -> float:
    return float(sample % 2)


def make(collector=None, *, last_step: int = 100, reward=mixed, **config) -> tuple[Feed, ManualCollector]:
    config = RolloutConfig(**{"tasks_per_step": 2, "group_size": 2, **config})
    collector = collector or ManualCollector(config.group_size, reward)
    return Feed(collector, TaskSource(SumsData(size=50), seed=0), config, last_step=last_step), collector


def ids(groups: list[Group]) -> list[str]:
    return [group.task.id for group in groups]


def tasks(count: int) -> list[str]:
    return [task.id for task in TaskSource(SumsData(size=50), seed=0).take(count)]


def test_on_policy_a_step_launches_its_groups_and_takes_all_of_them() -> None:
    feed, collector = make()
    for step in (1, 2):
        taken = feed.take(step)
        assert ids(taken) == tasks(4)[2 * step - 2 : 2 * step]
        assert [rollout.step for rollout in collector.launched[-2:]] == [step, step]
        feed.accept(step, taken)
        assert (feed.ahead, feed.in_flight) == (0, 0)


def test_one_step_ahead_the_next_groups_fly_while_a_step_is_trained_and_settle_before_weights_change() -> None:
    feed, collector = make(max_staleness=1, last_step=3)
    seen = []
    for step in (1, 2, 3):
        taken = feed.take(step)
        seen += ids(taken)
        assert {step - group.step for group in taken} == {min(1, step - 1)}
        feed.accept(step, taken)
        assert feed.in_flight == (2 if step < 3 else 0)
        assert feed.settle()
        assert feed.in_flight == 0
    assert seen == tasks(6)
    assert len(collector.launched) == 6


def test_carry_over_takes_what_is_done_and_waits_only_for_what_would_be_too_stale() -> None:
    slow = tasks(1)[0]

    def choose(flying: list[Rollout]) -> Rollout:
        return next((each for each in flying if each.episodes[0].task.id != slow), flying[0])

    feed, collector = make(ManualCollector(2, mixed, choose), max_staleness=2, carry_over=True, deterministic=False)
    steps = []
    for step in (1, 2, 3):
        taken = feed.take(step)
        steps.append(ids(taken))
        feed.accept(step, taken)
        assert feed.ahead == 4
    assert slow not in steps[0] + steps[1]
    assert slow in steps[2]
    assert [rollout.step for rollout in collector.launched] == [1] * 6 + [2] * 2 + [3] * 2


@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_whatever_finishes_first_every_task_is_taken_once_in_steps_of_equal_size_within_the_bound(data, ahead, size) -> None:
    def choose(flying: list[Rollout]) -> Rollout:
        return data.draw(st.sampled_from(flying))

    config = {"tasks_per_step": size, "max_staleness": ahead, "carry_over": True, "deterministic": False}
    feed, collector = make(ManualCollector(2, mixed, choose), last_step=6, **config)
    seen: list[str] = []
    for step in range(1, 7):
        taken = feed.take(step)
        assert len(taken) == size
        assert all(0 <= step - group.step <= ahead for group in taken)
        assert all(group.done for group in taken)
        seen += ids(taken)
        feed.accept(step, taken)
        assert feed.ahead <= ahead * size
    assert sorted(seen) == sorted(tasks(6 * size)) == sorted(rollout.episodes[0].task.id for rollout in collector.launched)


def test_a_dead_engine_interrupts_a_take_which_goes_on_where_it_was() -> None:
    feed, collector = make()
    collector.dead = True
    assert feed.take(1) is None
    assert feed.take(1) is None
    collector.dead = False
    assert ids(feed.take(1)) == tasks(2)
    assert len(collector.launched) == 2


def teaching(*useful: str) -> Callable[[str, int], float]:
    return lambda task, sample: float(sample) if task in useful else 1.0


def test_dynamic_sampling_replaces_groups_without_signal_by_fresh_tasks() -> None:
    order = tasks(6)
    feed, collector = make(dynamic={"enabled": True, "max_tries": 3}, reward=teaching(order[1], order[3]))
    assert ids(feed.take(1)) == [order[1], order[3]]
    assert len(collector.launched) == 4  # two, then one, then one
    assert feed.dropped == 2


def test_dynamic_sampling_ends_after_its_tries_and_fills_up_with_what_there_is() -> None:
    order = tasks(6)
    feed, collector = make(dynamic={"enabled": True, "max_tries": 3}, reward=teaching(order[1]))
    assert ids(feed.take(1)) == [order[1], order[3]]
    assert len(collector.launched) == 4
    assert feed.dropped == 2
    feed, collector = make(dynamic={"enabled": True, "max_tries": 1}, reward=teaching())
    assert ids(feed.take(1)) == order[:2]
    assert feed.dropped == 0


def test_a_surplus_is_the_next_steps_until_it_is_too_stale() -> None:
    order = tasks(20)
    dynamic = {"enabled": True, "max_tries": 2, "oversample": 2.0}
    feed, collector = make(dynamic=dynamic, max_staleness=1, reward=teaching(*order), last_step=100)
    taken = feed.take(1)
    assert ids(taken) == order[:2]
    assert (len(collector.launched), feed.ahead) == (4, 2)
    feed.accept(1, taken)
    assert len(collector.launched) == 4  # the surplus is enough
    taken = feed.take(2)
    assert ids(taken) == order[2:4]
    feed.accept(2, taken)
    assert len(collector.launched) == 8
    assert feed.dropped == 0
    feed, collector = make(dynamic=dynamic, max_staleness=1, reward=teaching(*order), last_step=100)
    feed.take(1)
    assert feed.ahead == 2
    assert not set(ids(feed.take(3))) & set(order[:4])  # launched two steps before: too stale
    assert feed.dropped == 2


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_dynamic_sampling_with_carry_over_fills_every_step(data, ahead, size) -> None:
    def choose(flying: list[Rollout]) -> Rollout:
        return data.draw(st.sampled_from(flying))

    def reward(task: str, sample: int) -> float:
        return float(sample) if int(task.partition("/")[2].partition("@")[0]) % 3 else 1.0  # a third of the tasks teach nothing

    config = {"tasks_per_step": size, "max_staleness": ahead, "carry_over": True, "deterministic": False}
    dynamic = {"enabled": True, "max_tries": 3}
    feed, _ = make(ManualCollector(2, reward, choose), last_step=5, dynamic=dynamic, **config)
    seen: list[str] = []
    for step in range(1, 6):
        taken = feed.take(step)
        assert len(taken) == size
        assert all(0 <= step - group.step <= ahead for group in taken)
        seen += ids(taken)
        feed.accept(step, taken)
    assert len(set(seen)) == 5 * size


def test_a_groups_rewards_reach_the_source_in_the_order_of_its_launch(monkeypatch) -> None:
    heard: list[tuple[str, list[float]]] = []
    feed, _ = make(ManualCollector(2, mixed, lambda flying: flying[-1]))
    monkeypatch.setattr(TaskSource, "report", lambda self, task, rewards: heard.append((task.id, list(rewards))))
    feed.accept(1, feed.take(1))
    assert heard == [(task, [0.0, 1.0]) for task in tasks(2)]


def test_a_group_teaches_where_two_finished_episodes_were_rewarded_differently() -> None:
    def group(*rewards: float | None, own: tuple[dict, ...] = ()) -> Group:
        task = Task("t", "q", "1")
        episodes = [Episode(task, i, reward=reward) for i, reward in enumerate(rewards)]
        for episode, rewarded in zip(episodes, own, strict=False):
            episode.agent_rewards = rewarded
        for episode in episodes:
            episode.failure = None if episode.reward is not None else Failure("engine", "died")
        return Group(task, 1, Rollout(episodes, 1))

    assert group(0.0, 1.0).teaches()
    assert not group(1.0, 1.0, None).teaches()
    assert not group(1.0, None).teaches()
    assert not group(None, None).teaches()
    assert group(1.0, 1.0, own=({"a": 1.0}, {"a": -1.0})).teaches()


def test_I9_a_state_carries_what_is_on_its_way_and_goes_on_with_it() -> None:
    feed, collector = make(ManualCollector(2, mixed), max_staleness=2, carry_over=True, deterministic=False)
    feed.accept(1, feed.take(1))
    ready = feed._groups[0]
    turn = Turn("solver", "main", 0, [1, 2], [3], [-0.5], [0], "stop", "x", parsed=object())
    if not ready.done:
        collector.finish(ready.rollout)
    ready.episodes[0].turns.append(turn)
    broken = feed._groups[1]
    if not broken.done:
        collector.finish(broken.rollout)
    broken.episodes[1].failure, broken.episodes[1].reward = Failure("overlong", "the prompt is too long"), None
    undone = next(group for group in feed._groups if not group.done)
    state = json.loads(json.dumps(feed.state()))

    resumed, again = make(ManualCollector(2, mixed), max_staleness=2, carry_over=True, deterministic=False)
    resumed.restore(state)
    assert again.launched == []  # nothing starts before engines have their weights
    assert resumed.settle()  # what wasn't launched isn't waited for
    taken = resumed.take(2)
    assert ids(taken)[0] == ready.task.id
    assert taken[0].episodes[0].turns[0].response_ids == [3]
    assert [episode.reward for episode in taken[0].episodes] == [0.0, 1.0]
    restored = next(group for group in [*taken, *resumed._groups] if group.task.id == broken.task.id)
    assert [episode.status for episode in restored.episodes] == ["ok", "overlong"]  # an episode that failed stays so
    launched = {rollout.episodes[0].task.id: rollout.step for rollout in again.launched}
    assert launched[undone.task.id] == 1  # run again, with the seeds that it had
    assert not {ready.task.id, broken.task.id} & set(launched)
    assert not set(launched) & set(tasks(2))  # the first step's tasks were trained with before


def with_probes(**options) -> ManualCollector:
    """Two probes per task, which are rewarded with 5 and 4; the group's episodes alike."""
    return ManualCollector(
        2, lambda task, sample: 6.0 + sample if sample < 0 else 1.0, probes=("greedy", "without a"), **options
    )


def test_a_groups_probes_come_with_it_and_have_no_say_in_what_it_teaches(monkeypatch) -> None:
    heard: list[list[float]] = []
    monkeypatch.setattr(TaskSource, "report", lambda self, task, rewards: heard.append(list(rewards)))
    feed, _ = make(with_probes())
    taken = feed.take(1)
    feed.accept(1, taken)
    for group in taken:
        assert [episode.id.partition("#")[2] for episode in group.rollout.episodes] == ["0", "1", "greedy/0", "without a/1"]
        assert [episode.reward for episode in group.rollout.episodes] == [1.0, 1.0, 5.0, 4.0]
        assert [episode.sample for episode in group.episodes] == [0, 1]
        assert not group.teaches()
    assert heard == [[1.0, 1.0]] * 2
    feed, _ = make(with_probes(), dynamic={"enabled": True, "max_tries": 2})
    feed.take(1)
    assert feed.dropped == 2


def test_I9_probes_that_are_done_are_kept_with_their_group_and_others_run_anew_with_theirs() -> None:
    ahead = {"max_staleness": 2, "carry_over": True, "deterministic": False}
    feed, _ = make(with_probes(), **ahead)
    feed.accept(1, feed.take(1))
    ready, undone = feed._groups[0], feed._groups[-1]
    feed._collector.finish(ready.rollout)
    ready.rollout.episodes[3].failure, ready.rollout.episodes[3].reward = Failure("engine", "died"), None
    assert (ready.done, undone.done) == (True, False)
    resumed, again = make(with_probes(), **ahead)
    resumed.restore(json.loads(json.dumps(feed.state())))
    taken = resumed.take(2)
    assert ids(taken)[0] == ready.task.id
    assert taken[0].rollout.episodes == ready.rollout.episodes
    assert [episode.status for episode in taken[0].rollout.episodes] == ["ok", "ok", "ok", "engine"]
    launched = {rollout.episodes[0].task.id: [episode.id for episode in rollout.episodes] for rollout in again.launched}
    assert ready.task.id not in launched
    assert launched[undone.task.id] == [episode.id for episode in undone.rollout.episodes]


def test_put_back_groups_are_the_next_steps_first_and_run_anew() -> None:
    feed, _ = make()
    taken = feed.take(1)
    feed.put_back(taken)
    assert [(group["task"]["id"], group["episodes"]) for group in feed.state()["groups"]] == [(id, None) for id in ids(taken)]
    assert feed.in_flight == 0


@pytest.mark.parametrize(
    ("bound", "stale"), [(0, [True, True, False, False]), (1, [True, False, False, False]), (2, [False] * 4)]
)
def test_turns_older_than_their_agents_bound_are_stale(bound: int, stale: list[bool]) -> None:
    """With two updates per step a bound of one step is two versions; a turn is as old as its oldest token."""
    spans = [[0, 3], [2, 4], [4, 4], []]
    turns = [
        Turn("solver", "main", i, [1], versions, [0.0] * len(versions), versions, "stop", "")
        for i, versions in enumerate(spans)
    ]
    group = Group(Task("t", "q", "1"), 1, Rollout([Episode(Task("t", "q", "1"), 0, turns=turns)], 1))
    mark_stale([group], {"solver": bound}, {"main": 4}, versions_per_step=2)
    assert [turn.stale for turn in turns] == stale
