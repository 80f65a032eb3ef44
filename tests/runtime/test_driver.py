"""Rank 0's side of a step on scripted engines: restarts, retries, and when a run has to end."""

from types import SimpleNamespace

import pytest

from drmas.agents.team import load_team
from drmas.core.advantages import Advantages
from drmas.core.estimators import Probe, resolve
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
from drmas.weights.sync import StagedLost

AT_0 = {"main": 0}
"""The policies' versions before any update."""


class Teacher:
    """Answers sums and checks; dies, or refuses, when a request's count is in the set, or what `refuses` says of its key."""

    def __init__(self, dies_at=(), refuses_at=(), refuses=lambda key: False):
        self.count, self.dies_at, self.refuses_at, self.asked = 0, set(dies_at), set(refuses_at), []
        self.refuses = refuses

    def __call__(self, prompt: str, key: str) -> str:
        self.count += 1
        self.asked.append(key)
        if self.count in self.dies_at:
            raise EngineDied("killed by the test")
        if self.count in self.refuses_at or self.refuses(key):
            raise EngineError("refused by the test")
        question, _, answer = prompt.rstrip("?").partition("=")
        total = str(sum(map(int, question.split("+"))))
        return total if not answer else ("yes" if answer == total else "no")


@pytest.fixture
def make(config, tmp_path, plain_tokenizer, capsys):
    opened = []

    def build(teacher: Teacher, config=config, probes=()) -> Driver:
        engine = ScriptedEngine(plain_tokenizer, teacher, deterministic=config.rollout.deterministic)
        engines, tokenizers = {"main": engine}, {"main": plain_tokenizer}
        reward, metrics = make_reward(config.reward), MetricsLog(tmp_path, tensorboard=False)
        team, rollout = load_team(config.team), config.rollout
        collector = Collector(team, engines, tokenizers, reward, rollout, seed=0, probes=probes)
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
    values = resolve("dr-mas")([SimpleNamespace(**row) for row in message["rows"]])
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
    assert driver.collect(1, AT_0) == {"fatal": None, "restarted": ["main"], "rows": [], "baselines": {}}
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


def test_weights_whose_staging_was_lost_are_pushed_again_and_others_that_fail_end_the_run(make) -> None:
    driver = make(Teacher())
    assert driver.after_push("main", StagedLost("gone")) == {"fatal": None, "again": True}
    assert driver.restarts["main"] == 0
    assert "could not be synced: NaN" in driver.after_push("main", SyncError("NaN"))["fatal"]


def test_the_last_restart_counts_once_it_is_done(make, config) -> None:
    """Until then somebody is about to bring it up."""
    driver, seen = make(Teacher(dies_at={6})), []
    start = driver.engines["main"].start
    driver.engines["main"].start = lambda: (seen.append(driver.restarts["main"]), start())
    driver.collect(1, AT_0)
    assert (seen, driver.restarts["main"]) == ([0], 1)


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


PROBES = (Probe("greedy", greedy=True), Probe("without solver", episodes=2, without="solver"))


def of_probe(name: str, task: str = ""):
    """Whether a request is of that probe, and of that task if named."""
    return lambda key: f"#{name}/" in key and key.startswith(task)


def test_what_probes_earned_reaches_all_ranks_and_nothing_else_of_them_does(make, tmp_path) -> None:
    driver = make(Teacher(), probes=PROBES)
    message = driver.collect(1, AT_0)
    tasks = list(dict.fromkeys(row["task"] for row in message["rows"]))
    # a silent solver gives no answer, which no reward grades as right
    assert message["baselines"] == {task: {"greedy": [1.0], "without solver": [0.0, 0.0]} for task in tasks}
    assert len(driver.episodes) == 2 * (2 + 3)
    values = Advantages([0.0] * len(message["rows"]), [])
    driver.finish(1, values, StepRecord(policies={"main": PolicyReport(version=1)}), {})
    (with_probes,) = read_metrics(tmp_path)
    written = read_episodes(tmp_path, 1)
    assert [episode["probe"] for episode in written[:5]] == [None, None, "greedy", "without solver", "without solver"]
    alone = make(Teacher())
    assert message["rows"] == alone.collect(1, AT_0)["rows"]
    alone.finish(1, values, StepRecord(policies={"main": PolicyReport(version=1)}), {})
    without = read_metrics(tmp_path)[-1]
    tokens = sum(len(turn["response_ids"]) for episode in written if episode["probe"] for turn in episode["turns"])
    assert tokens > 0
    extra = {"reward/probe/greedy": 1.0, "reward/probe/without_solver": 0.0, "rollout/probe_episodes": 6}
    extra["rollout/probe_tokens"] = tokens
    same = [key for key in without if not key.endswith(("seconds", "per_second"))]
    assert {key: with_probes[key] for key in same} == {key: without[key] for key in same}
    assert {key: with_probes[key] for key in with_probes.keys() - without.keys()} == extra


def test_I3_a_probe_that_failed_is_no_baseline_and_no_reason_to_end_the_run(make, tmp_path) -> None:
    driver = make(Teacher(refuses=of_probe("greedy")), probes=PROBES)
    message = driver.collect(1, AT_0)
    tasks = {row["task"] for row in message["rows"]}
    assert message["fatal"] is None
    assert message["baselines"] == {task: {"without solver": [0.0, 0.0]} for task in tasks}
    assert {row["status"] for row in message["rows"]} == {"ok"}
    driver.finish(1, Advantages([None] * len(message["rows"]), []), StepRecord(), {})
    (metrics,) = read_metrics(tmp_path)
    assert (metrics["rollout/probe_episodes"], metrics["rollout/probe_failed/engine"]) == (6, 2)
    assert metrics["reward/probe/greedy"] is None
    assert "rollout/failed/engine" not in metrics


def test_a_step_whose_probes_alone_finished_has_failed(make) -> None:
    driver = make(Teacher(refuses=lambda key: "#greedy/" not in key), probes=PROBES[:1])
    assert driver.collect(1, AT_0)["fatal"].startswith("all 4 episodes of step 1 failed; the first with engine:")


def test_a_run_without_episode_files_writes_none(make, config, tmp_path) -> None:
    quiet = config.model_copy(update={"telemetry": config.telemetry.model_copy(update={"episodes": False})})
    driver = make(Teacher(), quiet)
    rows = driver.collect(1, AT_0)["rows"]
    driver.finish(1, Advantages([0.0] * len(rows), []), StepRecord(), {})
    assert read_metrics(tmp_path)[0]["reward/mean"] == 1.0
    assert make(Teacher(refuses_at=range(100)), quiet).collect(2, AT_0)["fatal"].startswith("all 4 episodes of step 2 failed")
    assert not (tmp_path / "episodes").exists()
