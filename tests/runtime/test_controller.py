"""The loop on scripted engines and policies that only count: what idles, what is skipped, what is saved, and when it ends."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, load_team, register_team
from drmas.config.schema import PolicyConfig, RunConfig
from drmas.core.estimators import Estimator, resolve
from drmas.envs.rewards import make_reward
from drmas.envs.source import TaskSource
from drmas.errors import CheckpointError, EngineError, RolloutError
from drmas.policy.batch import PolicyBatch, UpdateResult
from drmas.policy.broadcast import Broadcast
from drmas.rollout.collector import Collector
from drmas.rollout.scripted import ScriptedEngine
from drmas.runtime.controller import Controller
from drmas.runtime.driver import Driver
from drmas.telemetry.alarms import Alarms, read_alarms
from drmas.telemetry.console import Console
from drmas.telemetry.sinks import MetricsLog, read_metrics
from drmas.telemetry.trace import Profile
from drmas.weights.sync import WeightSync
from drmas.weights.transport import Idle

GAP = {"logprob_gap_mean": 0.0, "logprob_gap_max": 0.0}


@register_team("writer-critic")
class WriterCritic(TeamConfig):
    """The critic, on a policy of its own, sees every second sample of a task."""

    writer: AgentConfig = AgentConfig(policy="main", prompt="{question}=", parser="text", max_tokens=8)
    critic: AgentConfig = AgentConfig(policy="other", prompt="{question}={draft}?", parser="text", max_tokens=8)

    async def run(self, task, agents):
        draft = await agents.writer(question=task.question)
        if int(draft.text) % 2:
            await agents.critic(question=task.question, draft=draft.text)
        return draft.text


@register_team("drafter-fixer")
class DrafterFixer(TeamConfig):
    """The fixer's word counts, and the drafter's where the fixer says nothing. Each speaks with a policy of its own."""

    drafter: AgentConfig = AgentConfig(policy="main", prompt="{question}=", parser="text", max_tokens=8)
    fixer: AgentConfig = AgentConfig(policy="other", prompt="{question}={draft}?", parser="text", max_tokens=8)

    async def run(self, task, agents):
        draft = await agents.drafter(question=task.question)
        fixed = await agents.fixer(question=task.question, draft=draft.text)
        return fixed.parsed or draft.parsed


class CountingPolicy:
    """Keeps the batches of its updates. An update whose number is in `not_finite` is skipped."""

    def __init__(self, name: str, config: PolicyConfig, not_finite=()) -> None:
        self.name, self.config, self.version, self.not_finite = name, config, 0, set(not_finite)
        self.batches: list[PolicyBatch] = []
        self.scored = 0

    def update(self, batch: PolicyBatch, *, on_rows: Callable[[int], None]) -> UpdateResult:
        self.batches.append(batch)
        skipped = len(self.batches) in self.not_finite
        self.version += not skipped
        norm = math.nan if skipped else 1.0
        counts = dict.fromkeys(("loss", "lr", "computed_tokens", "tokens_saved", "flops"), 1.0)
        agents = {row.agent: {"tokens": 2.0, **GAP} for row in batch.rows}
        return UpdateResult({**counts, "grad_norm": norm, "tokens": 10.0, "skipped": float(skipped)}, agents)

    def logprobs(self, rows, temperatures):
        self.scored += len(rows)
        return [row.logprobs for row in rows]


class KeptCheckpoints:
    """What the loop asked of its checkpoints. `fail` has those steps' saves come to nothing."""

    def __init__(self, fail=()) -> None:
        self.saved, self.polls, self.failed, self.fail = [], 0, 0, set(fail)

    def save(self, step, policies, driver_state, *, value=None) -> None:
        self.failed += step in self.fail
        self.saved.append((step, sorted(policies), driver_state(), value))

    def poll(self) -> None:
        self.polls += 1

    def finish(self) -> None:
        if self.saved and self.saved[-1][0] in self.fail:
            raise CheckpointError("the last save failed")


class Loop:
    """A controller of one rank with everything it needs; `writer` and `critic` answer by (prompt, key)."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        tokenizer,
        writer,
        critic,
        *,
        not_finite=(),
        fail=(),
        team: str = "writer-critic",
        estimator: Estimator | None = None,
        other_trains: bool = True,
    ) -> None:
        other = config.policies["main"].model_copy(update={"trainable": other_trains})
        policies = {"main": config.policies["main"], "other": other}
        team, estimator = {"name": team}, estimator or resolve("dr-mas")
        self.config = config.model_copy(update={"policies": policies, "team": team, "warm_start": None})
        self.policies = {name: CountingPolicy(name, policy, not_finite) for name, policy in policies.items()}
        self.engines = {"main": ScriptedEngine(tokenizer, writer), "other": ScriptedEngine(tokenizer, critic)}
        self.said = io.StringIO()
        self.checkpoints = KeptCheckpoints(fail)
        console, tokenizers = Console(tty=False, stream=self.said), dict.fromkeys(policies, tokenizer)
        self.reward, self.metrics = make_reward(config.reward), MetricsLog(folder, tensorboard=False)
        loaded = load_team(team)
        self.collector = Collector(
            loaded, self.engines, tokenizers, self.reward, config.rollout, seed=0, probes=estimator.probes
        )
        driver = Driver(
            self.config,
            source=TaskSource(config.data, seed=0),
            collector=self.collector,
            engines=self.engines,
            tokenizers=tokenizers,
            run_dir=folder,
            metrics=self.metrics,
            alarms=Alarms(config.telemetry.alarms),
            console=console,
        )
        self.controller = Controller(
            self.config,
            estimator=estimator,
            policies=self.policies,
            temperatures={name: agent.temperature for name, agent in loaded.agents.items()},
            syncs={name: WeightSync(engine, Idle()) for name, engine in self.engines.items()},
            driver=driver,
            share=Broadcast(),
            checkpoints=self.checkpoints,
            console=console,
            profile=Profile(None, folder / "profile", rank=0, num_ranks=1),
        )

    def close(self) -> None:
        self.collector.close()
        self.reward.close()
        self.metrics.close()


@pytest.fixture
def loop(config: RunConfig, tmp_path: Path, plain_tokenizer):
    """loop(writer, critic, steps=..., ...): a loop over two tasks of two samples each in a folder of its own."""
    opened = []

    def build(writer, critic, *, steps: int, checkpoint=(), sleep: bool = False, **more) -> Loop:
        train = config.train.model_copy(update={"steps": steps, "updates_per_step": more.pop("updates_per_step", 1)})
        changes = {"train": train, "checkpoint": config.checkpoint.model_copy(update=dict(checkpoint))}
        changes["rollout"] = config.rollout.model_copy(update=more.pop("rollout", {}))
        main = config.policies["main"]
        engine = main.engine.model_copy(update={"gpus": "shared", "sleep": sleep})
        changes["policies"] = {"main": main.model_copy(update={"engine": engine})}
        opened.append(Loop(config.model_copy(update=changes), tmp_path, plain_tokenizer, writer, critic, **more))
        return opened[-1]

    yield build
    for each in opened:
        each.close()


def total_or_more(prompt: str, key: str) -> str:
    """The right sum in the first sample of a task, an even number that is wrong in the second."""
    right = sum(map(int, prompt.removesuffix("=").split("+")))
    return str(right) if "#0" in key else str(2 * right + 2)


def odd(prompt: str, key: str) -> str:
    return "1"


def even_by_sample(prompt: str, key: str) -> str:
    return "2" if "#0" in key else "4"


def refuses(prompt: str, key: str) -> str:
    raise EngineError("refused by the test")


def test_I4_a_policy_without_rows_for_many_steps_does_nothing_and_shows_it(loop, tmp_path: Path) -> None:
    made = loop(even_by_sample, refuses, steps=5)
    made.controller.run(1)
    assert made.policies["other"].batches == []
    assert made.policies["other"].version == made.engines["other"].version == 0
    assert made.engines["other"].keys == []  # no request ever reached it
    assert made.engines["main"].version == 5
    for metrics in read_metrics(tmp_path):
        assert (metrics["train/other/rows"], metrics["train/other/updates"], metrics["train/other/skipped"]) == (0, 0, 0)
        assert "train/other/loss" not in metrics
        assert metrics["rollout/critic/rows"] == 0
        assert (metrics["train/main/rows"], metrics["train/main/updates"]) == (4, 1)


def test_I3_a_policy_whose_episodes_all_failed_idles_and_they_are_counted(loop, tmp_path: Path) -> None:
    made = loop(lambda prompt, key: "1" if "#0" in key else "2", refuses, steps=2)
    made.controller.run(1)
    assert made.policies["other"].batches == []
    assert [len(batch.rows) for batch in made.policies["main"].batches] == [2, 2]
    for metrics in read_metrics(tmp_path):
        assert metrics["rollout/failed/engine"] == 2
        assert metrics["train/other/rows"] == 0
        assert metrics["train/main/rows"] == 2


def test_a_step_of_failed_episodes_only_ends_the_run_and_keeps_the_step_before(loop) -> None:
    seen: set[str] = set()

    def refuses_later(prompt: str, key: str) -> str:
        seen.add(key)
        if len(seen) > 4:
            raise EngineError("refused by the test")
        return "2"

    made = loop(refuses_later, odd, steps=3)
    with pytest.raises(RolloutError, match="all 4 episodes of step 2 failed; the first with engine: refused by the test"):
        made.controller.run(1)
    assert [(step, policies) for step, policies, *_ in made.checkpoints.saved] == [(1, ["main", "other"])]
    assert len(made.policies["main"].batches) == 1


def test_the_rows_behind_a_skipped_update_are_kept(loop, tmp_path: Path) -> None:
    made = loop(total_or_more, odd, steps=2, not_finite={2})
    made.controller.run(1)
    first, second = read_metrics(tmp_path)
    assert (first["train/main/updates"], first["train/main/skipped"]) == (1, 0)
    assert (second["train/main/updates"], second["train/main/skipped"]) == (0, 1)
    assert made.engines["main"].version == 1  # the skipped update is not synced
    batch = made.policies["main"].batches[1]
    rows = [json.loads(line) for line in (tmp_path / "skipped" / "step_2-main.jsonl").read_text().splitlines()]
    assert len(rows) == len(batch.rows) == 4
    for written, row, advantage, weight in zip(rows, batch.rows, batch.advantages, batch.token_weights, strict=True):
        for key in ("episode", "agent", "turn", "prompt_ids", "response_ids", "logprobs", "versions"):
            assert written[key] == getattr(row, key)
        assert (written["advantage"], written["token_weight"], written["update"]) == (advantage, weight, 0)
    assert any(row["advantage"] for row in rows)
    assert not (tmp_path / "skipped" / "step_1-main.jsonl").exists()
    assert "step 2: 1 update(s) of policy 'main' skipped, the gradient norm is nan" in made.said.getvalue()


def test_only_the_skipped_one_of_several_updates_is_kept(loop, tmp_path: Path) -> None:
    made = loop(total_or_more, odd, steps=1, updates_per_step=2, not_finite={2})
    made.controller.run(1)
    kept = [json.loads(line) for line in (tmp_path / "skipped" / "step_1-main.jsonl").read_text().splitlines()]
    first, second = made.policies["main"].batches
    assert [row["episode"] for row in kept] == [row.episode for row in second.rows]
    assert {row.task for row in first.rows}.isdisjoint(row.task for row in second.rows)
    assert {row["update"] for row in kept} == {1}
    assert made.policies["main"].scored == 4  # with several updates the gap is measured before the first


def test_I9_a_step_that_changed_no_policy_ends_with_nothing_in_flight_as_well(loop) -> None:
    """Else what a checkpoint holds of the next step would depend on timing."""
    running = loop(total_or_more, odd, steps=3, not_finite={1, 2}, rollout={"max_staleness": 1}, checkpoint={"every_steps": 1})
    feed, seen = running.controller.driver.feed, []
    save = running.checkpoints.save

    def watched(*args, **more) -> None:
        seen.append((feed.in_flight, feed.ahead))
        save(*args, **more)

    running.checkpoints.save = watched
    running.controller.run(1)
    assert seen == [(0, 2), (0, 2), (0, 0)]


class Recording(Idle):
    """A transport that can stage, and writes down what it is asked."""

    can_stage = True

    def __init__(self, policy: str, events: list[str]) -> None:
        self.policy, self.events = policy, events

    def stage(self, client) -> None:
        self.events.append(f"stage {self.policy}")

    def unstage(self) -> None:
        self.events.append(f"unstage {self.policy}")

    def begin(self, version: int, *, staging: bool = False) -> None:
        if not staging:
            self.events.append(f"push {self.policy} {version}")


@pytest.mark.parametrize("ahead", [0, 1])
def test_weights_travel_beside_rollouts_that_run_ahead_and_count_when_these_are_done(loop, ahead) -> None:
    running, events = loop(total_or_more, odd, steps=1, rollout={"max_staleness": ahead}), []
    controller, settle = running.controller, running.controller.driver.settle
    controller.syncs = {name: WeightSync(engine, Recording(name, events)) for name, engine in running.engines.items()}
    controller.driver.settle = lambda: events.append("settle") or settle()
    controller.run(1)
    beside = ["settle", "stage main", "stage other", "settle"] if ahead else []  # before the first step nothing is outdated
    assert events == [*beside, "push main 1", "push other 1"]


def test_what_was_staged_in_an_engine_that_was_started_anew_is_pushed_from_the_start(loop) -> None:
    running, events = loop(total_or_more, odd, steps=1, rollout={"max_staleness": 1}), []
    controller, settle = running.controller, running.controller.driver.settle
    controller.syncs = {name: WeightSync(engine, Recording(name, events)) for name, engine in running.engines.items()}

    def killing() -> dict:
        if "stage main" in events and "killed" not in events:
            events.append("killed")
            running.engines["main"].die()
        return settle() if running.engines["main"].alive else controller.driver._restarted(["main"])

    controller.driver.settle = killing
    controller.run(1)
    assert events == ["stage main", "stage other", "killed", "unstage main", "push main 1", "push other 1"]
    assert running.engines["main"].version == 1


def test_a_failed_save_is_counted_in_the_next_step_and_the_run_goes_on(loop, tmp_path: Path) -> None:
    made = loop(total_or_more, odd, steps=3, fail={1}, checkpoint={"every_steps": 1, "best_metric": "train/main/rows"})
    made.controller.run(1)
    assert [metrics["checkpoint/failed"] for metrics in read_metrics(tmp_path)] == [0, 1, 1]
    assert [(step, value) for step, *_, value in made.checkpoints.saved] == [(1, 4), (2, 4), (3, 4)]
    assert made.checkpoints.polls == 3


def test_what_ends_a_run_says_too_that_its_last_save_failed(loop) -> None:
    seen: set[str] = set()

    def refuses_later(prompt: str, key: str) -> str:
        seen.add(key)
        if len(seen) > 4:
            raise EngineError("refused by the test")
        return "2"

    made = loop(refuses_later, odd, steps=3, fail={1})
    with pytest.raises(RolloutError, match=r"all 4 episodes of step 2 failed.*; and the last save failed"):
        made.controller.run(1)


def right(prompt: str) -> str:
    return str(sum(map(int, prompt.partition("=")[0].split("+"))))


def by_case(*cases: str):
    """Right where the request is of one of these episodes, which are named as after the task; else wrong."""
    return lambda prompt, key: right(prompt) if any(f"#{case}/" in key for case in cases) else "0"


def test_difference_rewards_are_what_the_team_earns_with_and_without_an_agent(loop, tmp_path: Path) -> None:
    """The fixer alone is always right: the drafter's baseline is 1. The drafter alone is right every other time: 1/2."""
    drafter, fixer = by_case("0", "without fixer/2"), by_case("0", "without drafter/0", "without drafter/1")
    estimator = resolve("difference", counterfactuals=2, team=["drafter", "fixer"])
    made = loop(drafter, fixer, steps=1, team="drafter-fixer", estimator=estimator)
    made.controller.run(1)
    for policy, advantages in (("main", [0.0, -1.0]), ("other", [0.5, -0.5])):
        (batch,) = made.policies[policy].batches
        assert [row.reward for row in batch.rows] == [1.0, 0.0] * 2
        assert list(batch.advantages) == advantages * 2
    keys = [key for engine in made.engines.values() for admitted in engine.keys for key in admitted]
    asked = {(key.rpartition("/")[2], key.partition("#")[2].partition("/")[0]) for key in keys}
    assert ("drafter", "without drafter") not in asked  # a silent agent asks nobody
    assert ("fixer", "without fixer") not in asked
    assert asked >= {("drafter", "without fixer"), ("fixer", "without drafter")}
    (metrics,) = read_metrics(tmp_path)
    assert (metrics["reward/mean"], metrics["rollout/drafter/rows"], metrics["rollout/fixer/idle_share"]) == (0.5, 4, 0.0)
    assert (metrics["reward/probe/without_drafter"], metrics["reward/probe/without_fixer"]) == (1.0, 0.5)
    assert (metrics["rollout/episodes"], metrics["rollout/probe_episodes"]) == (4, 8)


def test_I3_a_probe_that_failed_takes_its_tasks_rows_out_of_the_loss_and_nothing_else(loop, config, tmp_path: Path) -> None:
    first, second = [task.id for task in TaskSource(config.data, seed=0).take(2)]

    def drafter(prompt: str, key: str) -> str:
        if key.startswith(f"{first}#greedy/"):
            raise EngineError("refused by the test")
        return by_case("1")(prompt, key)

    made = loop(drafter, by_case("1"), steps=1, team="drafter-fixer", estimator=resolve("remax"))
    made.controller.run(1)
    for policy in made.policies.values():
        (batch,) = policy.batches
        assert [(row.task, row.reward) for row in batch.rows] == [(second, 0.0), (second, 1.0)]
        assert list(batch.advantages) == [0.0, 1.0]  # the second task's greedy episode was wrong
    (metrics,) = read_metrics(tmp_path)
    assert (metrics["reward/mean"], metrics["rollout/drafter/rows"], metrics["train/main/rows"]) == (0.5, 4, 2)
    assert (metrics["rollout/probe_episodes"], metrics["rollout/probe_failed/engine"]) == (2, 1)
    conduct = [metrics[f"rollout/drafter/{name}"] for name in ("calls_per_episode", "reward_mean", "advantage_mean")]
    assert conduct == [1.0, 0.5, 0.5]  # of all finished episodes; of those with a baseline
    assert metrics["advantage/drafter/without_baseline"] == 2
    assert metrics["reward/probe/greedy"] == 0.0
    assert "rollout/failed/engine" not in metrics


def test_a_step_without_any_baseline_raises_an_alarm_that_says_why(loop, tmp_path: Path) -> None:
    def drafter(prompt: str, key: str) -> str:
        if "#greedy/" in key:
            raise EngineError("refused by the test")
        return by_case("1")(prompt, key)

    loop(drafter, by_case("1"), steps=1, team="drafter-fixer", estimator=resolve("remax")).controller.run(1)
    (metrics,) = read_metrics(tmp_path)
    assert (metrics["rollout/drafter/rows"], metrics["advantage/drafter/without_baseline"]) == (4, 4)
    assert (metrics["rollout/drafter/reward_mean"], metrics["rollout/drafter/advantage_mean"]) == (0.5, None)
    alarms = [alarm for alarm in read_alarms(tmp_path) if alarm.agent == "drafter"]
    assert [(alarm.kind, len(alarm.rows)) for alarm in alarms] == [("baseline", 4)]
    failed = "their baseline episodes failed (rollout/probe_failed/engine)"
    assert alarms[0].message == f"none of 4 rows has an advantage: {failed}"


def test_I11_a_frozen_policy_is_measured_also_where_its_rows_have_no_advantage(loop, tmp_path: Path) -> None:
    estimator = resolve("difference", team=["drafter", "fixer"], trained=["drafter"])
    made = loop(by_case("1"), by_case("1"), steps=1, team="drafter-fixer", estimator=estimator, other_trains=False)
    made.controller.run(1)
    (metrics,) = read_metrics(tmp_path)
    assert made.policies["other"].scored == 4
    assert (metrics["rollout/fixer/logprob_gap_mean"], metrics["rollout/fixer/frozen"]) == (0.0, 4)
    assert (metrics["advantage/fixer/without_baseline"], metrics["rollout/probe_episodes"]) == (4, 2)
    assert metrics["alarms/count"] == 0


def record_calls(made: Loop, monkeypatch) -> list[str]:
    """What happens to the engine of policy main, and around it, in order."""
    calls: list[str] = []
    engine, policy, sync = made.engines["main"], made.policies["main"], made.controller.syncs["main"]

    def noted(owner, name: str, said: str) -> None:
        original = getattr(owner, name)

        def call(*args, **kwargs):
            calls.append(said + ("" if kwargs.get("cache", True) else " weights"))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("sleep", "wake", "start"):
        noted(engine, name, name)
    noted(policy, "update", "update")
    noted(sync, "push", "push")
    noted(made.checkpoints, "save", "save")
    monkeypatch.setattr("drmas.runtime.controller.trim", lambda: calls.append("trim"))
    rule = engine._rule
    engine._rule = lambda prompt, key: calls.append("answer") or rule(prompt, key)
    return calls


def once(calls: list[str]) -> list[str]:
    """Without repetitions next to each other."""
    return [call for i, call in enumerate(calls) if call != calls[i - 1] or i == 0]


def test_an_engine_sleeps_from_the_last_episode_to_the_sync_and_its_cache_to_the_next_step(loop, monkeypatch) -> None:
    made = loop(total_or_more, odd, steps=2, sleep=True, checkpoint={"every_steps": 1})
    calls = record_calls(made, monkeypatch)
    made.controller.run(1)
    step = ["trim", "wake", "answer", "sleep", "update", "trim", "wake weights", "push", "save"]
    assert once(calls) == step * 2
    assert made.engines["main"].asleep == {"cache"}  # nobody asks it any more
    assert made.engines["main"].version == 2


def test_an_update_that_changed_nothing_wakes_the_engine_all_the_same(loop, monkeypatch) -> None:
    made = loop(total_or_more, odd, steps=3, sleep=True, not_finite={1, 2, 3})
    calls = record_calls(made, monkeypatch)
    made.controller.run(1)
    assert once(calls) == ["trim", "wake", "answer", "sleep", "update", "trim", "wake weights"] * 2 + [
        *("trim", "wake", "answer", "sleep", "update", "trim", "wake weights", "save")
    ]  # fmt: skip
    assert made.engines["main"].version == 0


def test_without_sleep_nobody_is_told_to(loop, monkeypatch) -> None:
    made = loop(total_or_more, odd, steps=2)
    calls = record_calls(made, monkeypatch)
    made.controller.run(1)
    assert not {"trim", "sleep", "wake", "wake weights"} & set(calls)


def test_sleep_changes_no_row(loop, tmp_path: Path) -> None:
    rows = []
    for sleep in (False, True):
        made = loop(total_or_more, odd, steps=3, sleep=sleep)
        made.controller.run(1)
        rows.append(
            [(row.task, row.response_ids, row.versions) for batch in made.policies["main"].batches for row in batch.rows]
        )
    assert rows[0] == rows[1]


@pytest.mark.parametrize("when", ["update", "wake"])
def test_one_that_dies_asleep_is_started_again_and_gets_its_weights(loop, monkeypatch, when) -> None:
    made = loop(total_or_more, odd, steps=3, sleep=True)
    engine, calls = made.engines["main"], record_calls(made, monkeypatch)
    original, done = {"update": made.policies["main"].update, "wake": engine.wake}[when], []

    def die_once(*args, **kwargs):
        if len(calls) > 10 and not done:
            done.append(engine.die())
        return original(*args, **kwargs)

    monkeypatch.setattr(made.policies["main"] if when == "update" else engine, when, die_once)
    made.controller.run(1)
    assert done
    assert calls.count("start") == 1
    assert engine.version == 3
    after = calls[calls.index("start") :]
    assert after[:2] == ["start", "push"]
    assert len(made.policies["main"].batches) == 3


def test_one_that_can_not_be_woken_ends_the_run_and_what_was_trained_is_kept(loop, monkeypatch) -> None:
    made = loop(total_or_more, odd, steps=3, sleep=True)

    def out_of_memory(*, cache: bool = True) -> None:
        if not cache:
            raise EngineError("engine main: RuntimeError: CUDA Error: out of memory")

    monkeypatch.setattr(made.engines["main"], "wake", out_of_memory)
    with pytest.raises(RolloutError, match="the engine of policy 'main' can't wake: engine main: RuntimeError: CUDA Error"):
        made.controller.run(1)
    assert [(step, policies) for step, policies, *_ in made.checkpoints.saved] == [(1, ["main", "other"])]


def test_one_that_can_not_sleep_ends_the_run_with_the_step_before(loop, monkeypatch) -> None:
    made = loop(total_or_more, odd, steps=3, sleep=True)
    original, slept = made.engines["main"].sleep, []

    def sleep() -> None:
        slept.append(1)
        if len(slept) == 2:
            raise EngineError("Memory usage increased after sleeping.")
        original()

    monkeypatch.setattr(made.engines["main"], "sleep", sleep)
    with pytest.raises(RolloutError, match="the engine of policy 'main' can't sleep: Memory usage increased"):
        made.controller.run(1)
    assert [step for step, *_ in made.checkpoints.saved] == [1]
