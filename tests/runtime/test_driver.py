"""Rank 0's side of a step on scripted engines: restarts, retries, and when a run has to end."""

from types import SimpleNamespace

import pytest

from drmas.agents.team import load_team
from drmas.core.advantages import advantages, resolve
from drmas.envs.rewards import make_reward
from drmas.envs.source import TaskSource
from drmas.errors import EngineDied, EngineError, EngineTimeout, SyncError
from drmas.rollout.collector import Collector
from drmas.rollout.scripted import ScriptedEngine
from drmas.runtime.driver import Driver
from drmas.runtime.record import PolicyReport, StepRecord
from drmas.telemetry.alarms import Alarms
from drmas.telemetry.console import Console
from drmas.telemetry.episodes import read_episodes
from drmas.telemetry.sinks import MetricsLog, read_metrics

AT_0 = {"main": 0}
"""The policies' versions before any update."""


class Teacher:
    """Answers sums and checks; dies, or refuses, when a request's count is in the set."""

    def __init__(self, dies_at=(), refuses_at=()):
        self.count, self.dies_at, self.refuses_at, self.asked = 0, set(dies_at), set(refuses_at), []

    def __call__(self, prompt: str, key: str) -> str:
        self.count += 1
        self.asked.append(key)
        if self.count in self.dies_at:
            raise EngineDied("killed by the test")
        if self.count in self.refuses_at:
            raise EngineError("refused by the test")
        question, _, answer = prompt.rstrip("?").partition("=")
        total = str(sum(map(int, question.split("+"))))
        return total if not answer else ("yes" if answer == total else "no")


@pytest.fixture
def make(config, tmp_path, plain_tokenizer, capsys):
    opened = []

    def build(teacher: Teacher, config=config) -> Driver:
        engine = ScriptedEngine(plain_tokenizer, teacher, deterministic=config.rollout.deterministic)
        engines, tokenizers = {"main": engine}, {"main": plain_tokenizer}
        reward, metrics = make_reward(config.reward), MetricsLog(tmp_path, tensorboard=False)
        collector = Collector(load_team(config.team), engines, tokenizers, reward, config.rollout, seed=0)
        opened.extend([collector, reward, metrics])
        return Driver(
            config,
            source=TaskSource(config.data, seed=0),
            collector=collector,
            engines=engines,
            tokenizers=tokenizers,
            run_dir=tmp_path,
            metrics=metrics,
            alarms=Alarms(config.telemetry.alarms),
            console=Console(),
        )

    yield build
    for part in opened:
        part.close()


def test_a_step_without_trouble(make, tmp_path) -> None:
    driver = make(Teacher())
    message = driver.collect(1, AT_0)
    assert (message["fatal"], message["restarted"]) == (None, [])
    assert [row["reward"] for row in message["rows"]] == [1.0] * 8  # four episodes, each solver then verifier
    values = advantages([SimpleNamespace(**row) for row in message["rows"]], resolve("dr-mas"))
    record = StepRecord(policies={"main": PolicyReport(version=4)}, failed_saves=2)
    assert driver.finish(1, values, record, {}) == {"stop": False, "value": 1.0}
    (metrics,) = read_metrics(tmp_path)
    assert metrics["reward/mean"] == 1.0
    assert metrics["rollout/solver/rows"] == metrics["rollout/verifier/rows"] == 4
    assert metrics["sync/main/version"] == 4
    assert metrics["checkpoint/failed"] == 2
    assert metrics["rollout/retried"] == 0
    assert len(read_episodes(tmp_path, 1)) == 4


def test_a_dead_engine_is_started_anew_and_what_it_took_along_runs_again_with_the_same_seeds(make) -> None:
    teacher = Teacher(dies_at={6})
    driver, undisturbed = make(teacher), make(Teacher())
    assert driver.collect(1, AT_0) == {"fatal": None, "restarted": ["main"], "rows": []}
    assert driver.after_push("main", None) == {"fatal": None, "again": False}  # its weights are there
    message = driver.collect(1, AT_0)
    assert message == undisturbed.collect(1, AT_0)
    assert driver.restarts == {"main": 1}
    assert [episode.retried for episode in driver.episodes] == [1] * 4
    # turns that were finished before the death stand: only requests that it took along were put again
    assert {key.rpartition("/")[2] for key in teacher.asked if teacher.asked.count(key) > 1} == {"verifier"}


def test_I2_an_engine_that_is_back_is_not_asked_before_it_has_its_weights(make, config) -> None:
    """Its death was noticed by nobody who waits for it, so that nothing else would keep requests from it."""
    ahead = config.rollout.model_copy(update={"max_staleness": 1, "carry_over": True, "deterministic": False})
    teacher = Teacher()
    driver = make(teacher, config.model_copy(update={"rollout": ahead}))
    engine = driver.engines["main"]
    engine.die()
    assert driver.collect(1, AT_0)["restarted"] == ["main"]
    assert engine.alive
    assert teacher.asked == []
    assert driver.collector.dead == {"main"}
    driver.feed._launch(1, 1)
    assert not driver.collector.wait(lambda: driver.feed.in_flight == 0)
    assert teacher.asked == []
    engine.version = 5  # the push
    driver.after_push("main", None)
    driver.collect(1, {"main": 5})
    assert {version for episode in driver.episodes for turn in episode.turns for version in turn.versions} == {5}


@pytest.mark.parametrize(("deterministic", "pauses"), [(True, 2), (False, 0)])
def test_cached_prefixes_stay_with_the_weights_unless_rollouts_are_deterministic(make, config, deterministic, pauses) -> None:
    driver = make(
        Teacher(), config.model_copy(update={"rollout": config.rollout.model_copy(update={"deterministic": deterministic})})
    )
    paused = []
    driver.engines["main"].pause = lambda: paused.append(1)
    for step in (1, 2):
        driver.collect(step, AT_0)
    assert len(paused) == pauses


def test_an_engine_that_keeps_dying_ends_the_run(make, config, tmp_path) -> None:
    limit = config.policies["main"].engine.max_restarts
    driver = make(Teacher(dies_at=range(100)))
    for _ in range(limit):
        assert driver.collect(1, AT_0)["restarted"] == ["main"]
        driver.after_push("main", None)
    fatal = driver.collect(1, AT_0)["fatal"]
    assert fatal == (
        f"the engine of policy 'main' died {limit + 1} times (killed by the test; see {tmp_path / 'logs'}); "
        f"policies.main.engine.max_restarts is {limit}"
    )
    tasks = [task.id for task in TaskSource(config.data, seed=0).take(2)]  # the lost step's tasks come again on resume
    assert [(group["task"]["id"], group["episodes"]) for group in driver.state()["groups"]] == [(id, None) for id in tasks]


def test_I3_refused_requests_fail_their_episodes_and_are_not_run_again(make) -> None:
    driver = make(Teacher(refuses_at={2}))
    message = driver.collect(1, AT_0)
    assert message["fatal"] is None
    assert [row["status"] for row in message["rows"]].count("ok") == 6
    failed = [episode for episode in driver.episodes if episode.failure]
    assert [episode.retried for episode in driver.episodes] == [0] * 4
    assert [(episode.failure.kind, episode.reward) for episode in failed] == [("engine", None)]


def test_a_step_of_failures_only_ends_the_run_and_leaves_its_episodes(make, tmp_path) -> None:
    driver = make(Teacher(refuses_at=range(100)))
    fatal = driver.collect(1, AT_0)["fatal"]
    assert fatal.startswith("all 4 episodes of step 1 failed; the first with engine:")
    assert len(driver.state()["groups"]) == 2  # they come again on resume
    assert [episode["status"] for episode in read_episodes(tmp_path, 1)] == ["engine"] * 4


def test_after_a_push(make) -> None:
    driver = make(Teacher())
    assert driver.after_push("main", None) == {"fatal": None, "again": False}
    assert driver.after_push("main", SyncError("weight w is not finite"))["fatal"] == (
        "the weights of policy 'main' could not be synced: weight w is not finite"
    )
    assert driver.after_push("main", EngineDied("gone")) == {"fatal": None, "again": True}
    assert driver.restarts == {"main": 1}


def test_a_stalled_request_is_put_once_more(make) -> None:
    teacher = Teacher()
    answer, stalls = teacher.__call__, [1]

    def stalling(prompt: str, key: str) -> str:
        if teacher.count in stalls:
            stalls.clear()
            raise EngineTimeout("no response in time")
        return answer(prompt, key)

    driver = make(stalling)
    message = driver.collect(1, AT_0)
    assert (message["fatal"], message["restarted"]) == (None, [])
    assert [row["status"] for row in message["rows"]] == ["ok"] * 8
    assert sum(episode.retried for episode in driver.episodes) == 1
    hopeless = make(lambda prompt, key: (_ for _ in ()).throw(EngineTimeout("no response in time")))
    assert hopeless.collect(1, AT_0)["fatal"].startswith("all 4 episodes of step 1 failed; the first with engine:")
    assert [episode.retried for episode in hopeless.episodes] == [1] * 4
