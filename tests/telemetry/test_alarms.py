"""Alarms on sequences of steps with one thing wrong, and on healthy ones."""

import io
import json
import math
import random
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.config.schema import AlarmConfig
from drmas.errors import DataError
from drmas.telemetry.alarms import Alarm, Alarms, append_alarms, keep_alarms_until, read_alarms
from drmas.telemetry.console import Console, alarm_line
from drmas.telemetry.sinks import MetricsLog, read_metrics
from drmas.types import Episode, Failure, Task, Turn

LIMITS = AlarmConfig(window=8, idle_steps=3)
AGENTS = ("solver", "verifier")


class Values(list):
    """Advantages over the rows of a step."""

    @property
    def values(self):
        return list(self)


def turn(agent: str, index: int, length: int = 4, **more) -> Turn:
    size = [0] * length
    given = {"logprobs": [-1.0] * length, "versions": size, "finish_reason": "stop", "text": "x"}
    return Turn(agent, "main", index, [1, 2], [3] * length, **(given | more))


def team(*, samples: int = 4, length: int = 4) -> list[Episode]:
    """Four episodes of one task, each a turn of the solver, then one of the verifier."""
    return [
        Episode(Task("t", "q", "a"), i, [turn(agent, j, length) for j, agent in enumerate(AGENTS)], "a", 1.0)
        for i in range(samples)
    ]


def healthy(noise: random.Random) -> dict[str, float]:
    """A step in which nothing is wrong, with some noise."""
    metrics = {}
    for agent in AGENTS:
        metrics |= {
            f"rollout/{agent}/rows": 4.0,
            f"rollout/{agent}/response_tokens_mean": noise.uniform(10.0, 20.0),
            f"rollout/{agent}/truncated_share": noise.uniform(0.0, 0.2),
            f"rollout/{agent}/logprob_gap_mean": noise.uniform(0.0, 1e-3),
            f"advantage/{agent}/uncompared_share": noise.choice([0.0, 0.5, 0.9]),
            f"train/main/{agent}/grad_norm": noise.uniform(0.5, 1.4),
            f"train/main/{agent}/entropy": noise.uniform(0.5, 1.5),
        }
    return metrics | {"reward/mean": 0.5, "train/main/grad_norm": 1.0}


def replace_limits(**changes) -> AlarmConfig:
    return LIMITS.model_copy(update=changes)


def run(changes, *, steps: int = 12, episodes=None, advantages=None, gap_rows=None, limits=LIMITS):
    """The alarms of a run whose step `n` has `changes.get(n)` on top of a healthy step; whoever is in it is the team's."""
    alarms, noise, raised = Alarms(limits), random.Random(7), []
    for step in range(1, steps + 1):
        metrics = healthy(noise) | changes.get(step, {})
        mine = team() if episodes is None else episodes
        values = Values([0.5] * 8) if advantages is None else Values(advantages)
        raised += alarms.check(step, metrics, mine, values, gap_rows=gap_rows or {})
    return raised, alarms


def said(raised) -> list[tuple]:
    return [(alarm.step, alarm.kind, alarm.agent) for alarm in raised]


def test_a_healthy_run_raises_nothing():
    raised, alarms = run({}, steps=40)
    assert raised == []
    assert alarms.active == 0


def test_one_row_of_advantage_ten_thousand_is_a_spike_of_its_agent_and_named_first():
    """Rows are ordered by what they weigh in the gradient: |advantage| times tokens."""
    episodes = team()
    episodes[2].turns[0] = turn("solver", 0, length=2)
    advantages = [0.5, 9.0, -0.5, 9.0, 1e4, 9.0, -0.7, 9.0]
    raised, alarms = run({9: {"train/main/solver/grad_norm": 5e3}}, episodes=episodes, advantages=advantages)
    assert said(raised) == [(9, "spike", "solver")]
    (alarm,) = raised
    assert alarm.rows == ["t#2/0", "t#3/0", "t#0/0", "t#1/0"]
    assert alarm.metric == "train/main/solver/grad_norm"
    assert alarm.value == 5e3
    assert 3 * 0.5 <= alarm.limit <= 3 * 1.4
    assert alarm.message.startswith("gradient norm 5000, ")
    assert alarms.active == 0  # by the last step it is over


def test_a_spike_names_ten_rows_and_none_that_is_not_trained_or_has_no_advantage():
    episodes = team(samples=14)
    episodes[0].turns[0].trained = False
    episodes[1].failure, episodes[1].reward = Failure("tool", "gone"), None
    advantages = [value for i in range(14) for value in (100.0 - i, 1.0)]
    advantages[2] = advantages[3] = None
    raised, _ = run({9: {"train/main/solver/grad_norm": 50.0}}, episodes=episodes, advantages=advantages)
    assert raised[0].rows == [f"t#{i}/0" for i in range(2, 12)]


def test_an_agent_none_of_whose_rows_has_a_baseline_is_named_with_why_and_a_frozen_one_is_not():
    none = {"advantage/solver/without_baseline": 4.0}
    some = {"advantage/solver/without_baseline": 3.0}
    failed = none | {"rollout/probe_failed/tool": 2.0}
    raised, _ = run({2: some, 3: none, 4: some, 5: failed}, steps=6, advantages=[None, 0.5] * 4)
    assert said(raised) == [(3, "baseline", "solver"), (5, "baseline", "solver")]
    assert [alarm.message for alarm in raised] == [
        "none of 4 rows has an advantage: no baseline covers them",
        "none of 4 rows has an advantage: their baseline episodes failed (rollout/probe_failed/tool)",
    ]
    assert raised[0].rows == ["t#0/0", "t#1/0", "t#2/0", "t#3/0"]
    assert run({3: none | {"rollout/solver/frozen": 4.0}})[0] == []


@pytest.mark.parametrize("norm", [math.nan, math.inf, None])
def test_a_norm_that_is_not_finite_is_a_spike_from_the_first_step_on(norm):
    raised, _ = run({1: {"train/main/verifier/grad_norm": norm}}, steps=2)
    assert said(raised) == [(1, "spike", "verifier")]
    assert raised[0].value is None
    assert raised[0].message == "the gradient norm isn't finite"


def test_steps_without_signal_are_no_part_of_the_median():
    """Norms of 0 while all rewards are equal; the first signal is no spike, and a spike later still is one."""
    nothing = {step: {"train/main/solver/grad_norm": 0.0} for step in range(1, 9)}
    assert run(nothing, steps=20)[0] == []
    raised, _ = run(nothing | {16: {"train/main/solver/grad_norm": 9.0}}, steps=20)
    assert said(raised) == [(16, "spike", "solver")]


@pytest.mark.parametrize(("window", "first"), [(8, 6), (3, 4)])
def test_medians_need_five_steps_or_the_window(window, first):
    limits = replace_limits(window=window)
    for step in range(2, first):
        assert run({step: {"train/main/solver/grad_norm": 50.0}}, limits=limits, steps=step)[0] == []
    assert said(run({first: {"train/main/solver/grad_norm": 50.0}}, limits=limits, steps=first)[0]) == [
        (first, "spike", "solver")
    ]


def test_a_norm_that_stays_high_is_the_new_median_after_half_a_window():
    raised, alarms = run({step: {"train/main/solver/grad_norm": 20.0} for step in range(9, 30)}, steps=29)
    assert said(raised) == [(9, "spike", "solver")]
    assert alarms.active == 0


@pytest.mark.parametrize(
    ("metric", "message", "rows"),
    [
        ("train/main/solver/entropy", "entropy 0.05 nats per token, ", ["t#1/0", "t#0/0", "t#2/0", "t#3/0"]),
        ("rollout/solver/response_tokens_mean", "response length 0.05 tokens, ", ["t#3/0", "t#0/0", "t#1/0", "t#2/0"]),
    ],
)
def test_a_collapse_names_the_surest_or_the_shortest_rows(metric, message, rows):
    episodes = team()
    episodes[1].turns[0] = turn("solver", 0, logprobs=[-0.1] * 4)
    episodes[3].turns[0] = turn("solver", 0, length=1, logprobs=[-3.0])
    raised, _ = run({10: {metric: 0.05}}, episodes=episodes)
    assert said(raised) == [(10, "collapse", "solver")]
    assert raised[0].message.startswith(message)
    assert raised[0].rows == rows


def test_an_agent_without_rows_for_three_steps_is_idle():
    """It names what rows there are: the stale ones, which don't count."""
    episodes = team(samples=2)
    for episode in episodes:
        episode.turns[1].stale = True
    idle = {step: {"rollout/verifier/rows": 0.0} for step in (2, 3, 5, 6, 7, 8)}
    raised, _ = run(idle, episodes=episodes, advantages=[0.5, None, 0.5, None])
    assert said(raised) == [(7, "idle", "verifier")]
    assert raised[0].message == "no rows for 3 steps"
    assert raised[0].rows == ["t#0/1", "t#1/1"]


def test_equal_rewards_for_three_steps_are_named_and_equal_ones_for_two_are_not():
    constant = {step: {"advantage/solver/uncompared_share": 0.96} for step in (1, 2, 4, 5, 6)}
    advantages = [0.1, 1.0, 0.0, 1.0, -0.2, 1.0, 0.0, 1.0]
    raised, _ = run(constant, advantages=advantages)
    assert said(raised) == [(6, "constant", "solver")]
    assert raised[0].rows == ["t#1/0", "t#3/0", "t#0/0", "t#2/0"]


def test_truncation_names_the_turns_that_were_cut():
    episodes = team()
    for i in (1, 2):
        episodes[i].turns[0].finish_reason = "length"
    episodes[3].turns[1].finish_reason = "length"
    raised, _ = run({1: {"rollout/solver/truncated_share": 0.5}}, episodes=episodes)
    assert said(raised) == [(1, "truncation", "solver")]
    assert raised[0].rows == ["t#1/0", "t#2/0"]
    assert (raised[0].value, raised[0].limit) == (0.5, 0.5)


def test_a_log_prob_gap_names_the_rows_that_the_record_found():
    worst = {"solver": ["t#3/0", "t#0/0"], "verifier": ["t#0/1"]}
    raised, _ = run({4: {"rollout/solver/logprob_gap_mean": 0.051}}, gap_rows=worst)
    assert said(raised) == [(4, "mismatch", "solver")]
    assert raised[0].rows == ["t#3/0", "t#0/0"]
    assert run({4: {"rollout/solver/logprob_gap_mean": 0.05}})[0] == []
    assert said(run({4: {"rollout/solver/logprob_gap_mean": math.nan}})[0]) == [(4, "mismatch", "solver")]


def test_a_cause_is_said_once_and_again_when_it_returns():
    cut = {step: {"rollout/solver/truncated_share": 0.8} for step in (2, 3, 4, 7, 8)}
    raised, alarms = run(cut, steps=8)
    assert said(raised) == [(2, "truncation", "solver"), (7, "truncation", "solver")]
    assert alarms.active == 1


def test_what_a_step_does_not_measure_goes_on_as_it_was():
    """An agent that is called in every second step, always with equal rewards and cut turns."""
    alarms, raised = Alarms(LIMITS), []
    for step in range(1, 11):
        metrics = {"reward/mean": 1.0, "rollout/solver/truncated_share": None}
        if step % 2:
            metrics = {"rollout/solver/truncated_share": 0.9, "advantage/solver/uncompared_share": 1.0}
        raised += alarms.check(step, metrics, team(), Values([0.0] * 8))
    assert said(raised) == [(1, "truncation", "solver"), (5, "constant", "solver")]


def test_two_policies_and_two_agents_are_told_apart():
    both = {9: {f"train/main/{agent}/grad_norm": 40.0 for agent in AGENTS} | {"train/other/critic/entropy": 1.0}}
    assert said(run(both)[0]) == [(9, "spike", "solver"), (9, "spike", "verifier")]


values = st.floats(1.0, 2.0)
step_of_health = st.fixed_dictionaries(
    {
        "rollout/solver/rows": st.integers(0, 3).map(float),
        "rollout/solver/response_tokens_mean": values,
        "rollout/solver/truncated_share": st.floats(0.0, 0.49),
        "rollout/solver/logprob_gap_mean": st.floats(0.0, 0.05),
        "advantage/solver/uncompared_share": st.floats(0.0, 1.0),
        "train/main/solver/grad_norm": st.one_of(values, st.just(0.0)),
        "train/main/solver/entropy": values,
    }
)


@given(st.lists(step_of_health, max_size=40))
@settings(deadline=None)
def test_no_healthy_sequence_raises_anything(steps):
    """Norms and entropies within a factor of two, rows and comparisons in every third step, shares below their limits."""
    alarms = Alarms(LIMITS)
    for step, metrics in enumerate(steps, start=1):
        if step % 3 == 0:
            metrics |= {"rollout/solver/rows": 2.0, "advantage/solver/uncompared_share": 0.5}
        assert alarms.check(step, metrics, team(), Values([0.0] * 8)) == []
    assert alarms.active == 0


def test_a_resumed_run_goes_on_as_if_it_had_never_ended(tmp_path):
    """Metrics go through the file, where what isn't finite is null; wherever the run is cut, later steps raise the same."""
    noise = random.Random(3)
    steps = {step: healthy(noise) for step in range(1, 21)}
    for step in (4, 5, 6, 7):
        steps[step] |= {"rollout/verifier/rows": 0.0, "rollout/solver/truncated_share": 0.9}
    for step in (9, 10, 15):
        steps[step]["train/main/solver/grad_norm"] = math.nan if step < 15 else 60.0
    steps[18]["train/main/verifier/entropy"] = 0.01
    log, whole, straight = MetricsLog(tmp_path, tensorboard=False), Alarms(LIMITS), []
    for step, metrics in steps.items():
        straight += whole.check(step, metrics, team(), Values([0.5] * 8))
        log.write(step, metrics)
    log.close()
    kinds = [(4, "truncation"), (6, "idle"), (9, "spike"), (15, "spike"), (18, "collapse")]
    assert [(alarm.step, alarm.kind) for alarm in straight] == kinds
    for cut in range(20):
        resumed = Alarms(LIMITS)
        resumed.replay(read_metrics(tmp_path)[:cut])
        again = [alarm for step in range(cut + 1, 21) for alarm in resumed.check(step, steps[step], team(), Values([0.5] * 8))]
        assert again == [alarm for alarm in straight if alarm.step > cut]


ALARM = Alarm(12, "spike", "solver", "train/main/solver/grad_norm", "gradient norm 31", 31.0, 9.0, ["t#0/0", "t#1/0"])


def test_the_file_reads_back_what_was_written_and_forgets_what_a_resumed_run_raises_again(tmp_path):
    assert read_alarms(tmp_path) is None
    keep_alarms_until(tmp_path, 0)
    assert read_alarms(tmp_path) == []
    later = replace(ALARM, step=13, value=None, rows=[])
    append_alarms(tmp_path, [ALARM])
    append_alarms(tmp_path, [])
    append_alarms(tmp_path, [later])
    assert read_alarms(tmp_path) == [ALARM, later]
    with (tmp_path / "alarms.jsonl").open("a") as file:
        file.write('{"step": 14, "kind')  # killed while it wrote
    assert read_alarms(tmp_path) == [ALARM, later]
    keep_alarms_until(tmp_path, 12)
    assert [json.loads(line)["step"] for line in (tmp_path / "alarms.jsonl").read_text().splitlines()] == [12]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "not JSON: .*; expected an alarm per line"),
        (b"[]", "holds a list; expected an alarm"),
        (b'{"step": 1}', "not an alarm"),
        (json.dumps(asdict(ALARM) | {"step": "x"}).encode(), "not an alarm"),
        (json.dumps(asdict(ALARM) | {"rows": [1]}).encode(), "not an alarm"),
        (json.dumps(asdict(ALARM) | {"rows": None}).encode(), "not an alarm"),
        (b'{"step": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "can't be read"),
        (b'{"step": ' + b"9" * 5000 + b"}", "can't be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, line, message):
    append_alarms(tmp_path, [ALARM])
    with (tmp_path / "alarms.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(DataError, match=rf"alarms\.jsonl:2: {message}"):
        read_alarms(tmp_path)


def test_the_console_says_agent_step_cause_and_the_first_rows():
    assert alarm_line(ALARM) == "step 12  ALARM spike of solver: gradient norm 31  (rows t#0/0, t#1/0)"
    many = replace(ALARM, rows=[f"t#{i}/0" for i in range(10)])
    assert alarm_line(many).endswith("(rows t#0/0, t#1/0, t#2/0 and 7 more)")
    assert alarm_line(replace(ALARM, rows=[])).endswith("gradient norm 31")
    stream = io.StringIO()
    Console(stream=stream).alarm(replace(ALARM, message="[bold]x[/bold]"))
    assert stream.getvalue() == "step 12  ALARM spike of solver: [bold]x[/bold]  (rows t#0/0, t#1/0)\n"
