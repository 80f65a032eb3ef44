"""From one bad row to its alarm: real updates of one policy that two agents share."""

from __future__ import annotations

from drmas.config.schema import AlarmConfig
from drmas.core.advantages import Advantages
from drmas.runtime.record import PolicyReport, StepRecord
from drmas.telemetry.alarms import Alarms
from drmas.types import Episode, Row, Task, Turn

STEPS, BAD = 9, 7


def episode_of(row: Row) -> Episode:
    """The one turn that gave the row."""
    same = {name: getattr(row, name) for name in ("agent", "policy", "prompt_ids", "response_ids", "logprobs", "versions")}
    turn = Turn(index=row.turn, finish_reason="stop", text="", **same)
    return Episode(Task(row.task, "", ""), int(row.episode.split("#")[1]), [turn], "", row.reward)


def test_an_injected_row_of_advantage_ten_thousand_is_found_by_agent_step_and_row(kit, trainer_of):
    """One of the verifier's rows, whose norm spikes; the solver's, in the same update, stays what it was."""
    trainer, alarms, raised = trainer_of("qwen3-tied"), Alarms(AlarmConfig(logprob_gap=10.0)), {}
    for step in range(1, STEPS + 1):
        rows = kit.make_rows(seed=step, versions=trainer.version)
        advantages = [1.0, -0.7, 0.5, 1.3, -1.1, 0.4]
        if step == BAD:
            advantages[3] = 1e4
        report = PolicyReport(trainer.version, rows=len(rows))
        report.update(trainer.update(kit.make_batch(rows, advantages=advantages)))
        episodes, record = [episode_of(row) for row in rows], StepRecord(policies={"main": report})
        values = Advantages(advantages, [])
        metrics = record.metrics(episodes, values, agents=kit.AGENTS)
        raised[step] = alarms.check(step, metrics, episodes, values, gap_rows=record.gap_rows())
    assert [step for step, found in raised.items() if found] == [BAD]
    (alarm,) = raised[BAD]
    assert (alarm.kind, alarm.agent, alarm.metric) == ("spike", "verifier", "train/main/verifier/grad_norm")
    assert alarm.value > 1000 * alarm.limit
    assert alarm.rows[0] == "t1#1/1"
    assert set(alarm.rows) == {"t0#1/1", "t1#1/1", "t2#1/1"}
