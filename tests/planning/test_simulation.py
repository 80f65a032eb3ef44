"""The simulated rollout against arithmetic: batches, slots, queues, barriers, shared devices; what holds of any workload."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.schedules import critical_seconds, lockstep_seconds, plan
from drmas.planning.measured import Fixed
from drmas.planning.simulation import Simulation, simulate
from drmas.planning.types import Engines, EngineSpeed, Lengths, Workload
from drmas.planning.workload import Call

ENDLESS = 10**9
PLAIN = EngineSpeed(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, slots=ENDLESS, kv_tokens=ENDLESS)
"""A step takes a second, whatever is in it."""
WORK = Workload((), 1, 1, ENDLESS)


def call(response: int, *, policy: str = "main", after: tuple[int, ...] = (), **more) -> Call:
    return Call("solver", policy, more.pop("prompt", 1), response, after=after, **more)


def chain(*responses: int, **more) -> tuple[Call, ...]:
    return tuple(call(each, after=(index - 1,) if index else (), **more) for index, each in enumerate(responses))


def roll(*scripts, speed: EngineSpeed = PLAIN, replicas: int = 1, engines=None, most: int = ENDLESS, **options):
    """One group of each script."""
    work = replace(WORK, max_concurrent_episodes=most)
    engines = engines or {"main": Engines(speed, replicas)}
    return simulate(work, engines, source=Fixed([[script] for script in scripts]), **options)


both = pytest.mark.parametrize("deterministic", [False, True])


@both
def test_one_sequence_takes_its_steps(deterministic):
    speed = replace(PLAIN, prefill_token_seconds=0.25, prefill_pair_seconds=0.01, request_seconds=3.0)
    rollout = roll(chain(7, prompt=4), speed=speed, deterministic=deterministic)
    assert rollout.seconds == pytest.approx(3 + 4 * 0.25 + 0.01 * 16 / 2 + 7)
    assert (rollout.generated_tokens, rollout.prompt_tokens, rollout.method) == (7, 4, "simulated")
    assert rollout.busy_share["main"] == pytest.approx((rollout.seconds - 3) / rollout.seconds)


@both
def test_equal_sequences_are_one_batch(deterministic):
    speed = replace(PLAIN, weight_seconds=0.5, sequence_seconds=0.1, overhead_seconds=0.2)
    rollout = roll(*[chain(20)] * 5, speed=speed, deterministic=deterministic)
    assert rollout.seconds == pytest.approx(20 * (0.5 + 0.2 + 5 * 0.1))
    assert rollout.longest_episode_seconds == pytest.approx(rollout.seconds)


def test_context_makes_steps_longer_token_by_token():
    speed = replace(PLAIN, kv_token_seconds=0.01)
    by_hand = sum(1 + 0.01 * (3 * 8 + 3 * step) for step in range(30))
    assert roll(*[chain(30, prompt=8)] * 3, speed=speed).seconds == pytest.approx(by_hand)


@pytest.mark.parametrize(("overlap", "step"), [(1.0, 1.0), (0.5, 1.0 + 0.5 * 0.9), (0.0, 1.9)])
def test_products_hide_behind_reads_as_far_as_they_overlap(overlap, step):
    speed = replace(PLAIN, token_seconds=0.3, overlap=overlap)
    assert roll(*[chain(10)] * 3, speed=speed).seconds == pytest.approx(10 * step)
    assert speed.step_seconds(3, 0) == pytest.approx(step)


@both
def test_without_limits_the_longest_episode_is_all(deterministic):
    scripts = [chain(5, 9), chain(3), chain(1, 1, 30), chain(12, 12)]
    assert roll(*scripts, deterministic=deterministic).seconds == pytest.approx(32)


@pytest.mark.parametrize(("jobs", "slots", "replicas"), [(7, 3, 1), (7, 1, 3), (8, 2, 2), (1, 4, 4)])
def test_a_queue_of_equal_jobs_on_servers(jobs, slots, replicas):
    speed = replace(PLAIN, slots=slots)
    rollout = roll(*[chain(10)] * jobs, speed=speed, replicas=replicas)
    assert rollout.seconds == pytest.approx(10 * math.ceil(jobs / (slots * replicas)))


def test_a_kv_cache_bounds_what_runs_together_and_a_shared_start_counts_once():
    speed = replace(PLAIN, kv_tokens=50)
    assert roll(*[chain(10, prompt=10)] * 4, speed=speed).seconds == pytest.approx(20)
    siblings = [[chain(10, prompt=10, shared=9)] * 4]  # 20 + 3 x 11 tokens
    shared = simulate(WORK, {"main": Engines(replace(speed, kv_tokens=53))}, source=Fixed(siblings))
    assert shared.seconds == pytest.approx(10)


def test_a_sequence_without_room_takes_for_ever():
    rollout = roll(chain(10, prompt=41), chain(1), speed=replace(PLAIN, kv_tokens=50))
    assert rollout.seconds == math.inf


def test_siblings_find_a_start_only_where_one_of_them_ran():
    speed = replace(PLAIN, prefill_token_seconds=1.0)
    group = [[chain(1, prompt=10, shared=8)] * 4]
    together = simulate(WORK, {"main": Engines(speed)}, source=Fixed(group))
    apart = simulate(WORK, {"main": Engines(speed, replicas=2)}, source=Fixed(group))
    assert (together.prompt_tokens, apart.prompt_tokens) == (10 + 3 * 2, 2 * (10 + 2))


def test_what_an_episode_read_before_is_cached_once_it_has_come():
    speed = replace(PLAIN, prefill_token_seconds=1.0)
    own = (call(1, prompt=10), call(1, prompt=30, own=20, shared=15, after=(0,)))
    assert roll(own, speed=speed).prompt_tokens == 10 + 10
    apart = {name: Engines(speed) for name in ("main", "other")}
    parted = (call(1, prompt=10), call(1, prompt=30, own=20, policy="other", after=(0,)))
    assert roll(parted, engines=apart).prompt_tokens == 10 + 10  # what all tasks begin with


def test_an_episode_keeps_to_its_replica_and_new_ones_go_to_the_quietest():
    speed = replace(PLAIN, slots=1)
    # replica 0: 9; replica 1: 1 and 1; the third episode goes to the first replica, as both have one
    assert roll(chain(9), chain(1, 1), chain(5), speed=speed, replicas=2).seconds == pytest.approx(14)
    # with a place less, it starts when the second has ended, and finds its replica quiet
    assert roll(chain(9), chain(1, 1), chain(5), speed=speed, replicas=2, most=2).seconds == pytest.approx(9)


@both
def test_only_so_many_episodes_at_a_time(deterministic):
    assert roll(*[chain(4)] * 6, most=2, deterministic=deterministic).seconds == pytest.approx(12)


@both
def test_branches_run_at_once_and_are_waited_for(deterministic):
    script = (call(2), call(10, after=(0,)), call(4, after=(0,)), call(3, after=(1, 2)))
    assert roll(script, deterministic=deterministic).seconds == pytest.approx(2 + 10 + 3)


def test_tools_and_the_driver_take_their_time():
    script = (call(2, tool_seconds=5.0), call(3, after=(0,), tool_seconds=100.0))
    assert roll(script).seconds == pytest.approx(2 + 5 + 3)
    assert roll(*[chain(1)] * 4, call_seconds=0.5).seconds == pytest.approx(2.0 + 1)  # the last one is asked after 2 seconds


def test_a_remote_model_takes_no_engine():
    script = (call(9, policy="judge", tool_seconds=2.0), call(3, after=(0,)))
    assert roll(script).seconds == pytest.approx(5)


def test_deterministic_replicas_wait_for_one_another():
    scripts = [chain(10, 10), chain(25)]
    assert roll(*scripts, replicas=2).seconds == pytest.approx(25)
    assert roll(*scripts, replicas=2, deterministic=True).seconds == pytest.approx(35)


def test_a_deterministic_engine_waits_for_tools():
    scripts = [(call(2, tool_seconds=5.0), call(3, after=(0,))), chain(4)]
    assert roll(*scripts).seconds == pytest.approx(10)
    assert roll(*scripts, deterministic=True).seconds == pytest.approx(10)
    late = [(call(2, tool_seconds=5.0), call(3, after=(0,))), chain(14)]
    assert roll(*late).seconds == pytest.approx(14)
    assert roll(*late, deterministic=True).seconds == pytest.approx(19)


@both
def test_policies_on_the_same_devices_take_turns(deterministic):
    engines = {name: Engines(PLAIN, devices="both") for name in ("main", "other")}
    scripts = [chain(10), chain(10, policy="other")]
    assert roll(*scripts, engines=engines, deterministic=deterministic).seconds == pytest.approx(20)
    alone = [chain(10), chain(4, policy="other")]  # 8 seconds together, then 6 alone
    assert roll(*alone, engines=engines).seconds == pytest.approx(14)
    apart = {name: Engines(PLAIN) for name in engines}
    assert roll(*scripts, engines=apart, deterministic=deterministic).seconds == pytest.approx(10)


def test_a_large_replica_lies_over_small_ones():
    engines = {"main": Engines(PLAIN, replicas=2, devices="all"), "other": Engines(PLAIN, replicas=1, devices="all")}
    # the large one and both small ones: each at half speed until the first small one ends
    rollout = roll(chain(2), chain(10), chain(10, policy="other"), engines=engines)
    assert rollout.seconds == pytest.approx(20)


def test_an_update_takes_turns_with_what_is_in_flight():
    simulation = Simulation({"main": Engines(PLAIN)}, max_concurrent_episodes=9, trainer_shares=True)
    simulation.submit(chain(4), 0, lambda: None)
    simulation.train(10.0)
    assert simulation.now == pytest.approx(14)
    own = Simulation({"main": Engines(PLAIN)}, max_concurrent_episodes=9)
    own.submit(chain(40), 0, lambda: None)
    own.train(10.0)
    assert own.now == pytest.approx(10)
    assert own.run(lambda: False) is False
    assert own.now == pytest.approx(40)


def test_while_weights_arrive_engines_stand_still_and_forget():
    speed = replace(PLAIN, prefill_token_seconds=0.5)
    simulation = Simulation({"main": Engines(speed)}, max_concurrent_episodes=9)
    simulation.submit((call(10, prompt=4), call(1, prompt=20, own=16, after=(0,))), 0, lambda: None)
    simulation.wait(2 + 6)  # the prompt and six tokens
    simulation.hold("main")
    simulation.wait(3.0)
    simulation.release("main")
    simulation.run(lambda: False)
    again = 0.5 * (4 + 6)  # the prompt and the six tokens
    assert simulation.now == pytest.approx(8 + 3 + again + 4 + 0.5 * 20 + 1)
    assert simulation.busy_seconds("main") == pytest.approx(simulation.now - 3)


def test_the_search_teams_step_beside_a_loop_with_barriers():
    """`bench/rollout.py scripted` measured 0.33 of the barriers' time; the calls are the same here."""
    plans = plan([f"t{task}#{sample}" for task in range(16) for sample in range(4)], rounds=4, median=0.15, sigma=1.0, seed=0)
    per_second = 10_000
    scripts = [chain(*(max(1, round(one.seconds * per_second)) for one in calls)) for calls in plans.values()]
    rollout = roll(*scripts, speed=replace(PLAIN, weight_seconds=1 / per_second))
    assert rollout.seconds == pytest.approx(critical_seconds(plans), rel=1e-3)
    assert rollout.seconds / lockstep_seconds(plans) == pytest.approx(0.33, abs=0.01)


lengths = st.integers(1, 40)
scripts_of = st.lists(
    st.lists(lengths, min_size=1, max_size=4).map(lambda each: chain(*each, prompt=3)), min_size=1, max_size=9
)


@settings(max_examples=80, deadline=None)
@given(
    scripts_of,
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([1, 3, 99]),
)
def test_every_token_that_is_asked_for_is_served_once(scripts, replicas, slots, deterministic, sequence, kv, most):
    speed = replace(PLAIN, sequence_seconds=sequence, kv_token_seconds=kv, slots=slots, prefill_token_seconds=0.1)
    rollout = roll(*scripts, speed=speed, replicas=replicas, deterministic=deterministic, most=most)
    tokens = sum(each.response for script in scripts for each in script)
    assert rollout.generated_tokens == tokens
    assert rollout.prompt_tokens == sum(each.prompt for script in scripts for each in script)
    assert rollout.longest_episode_seconds <= rollout.seconds + 1e-9
    assert rollout.seconds >= max(sum(each.response for each in script) for script in scripts) - 1e-6
    assert (
        rollout.seconds
        <= sum(speed.step_seconds(slots, 50 * slots) * each.response + 0.3 for s in scripts for each in s) + 1e-6
    )


@settings(max_examples=60, deadline=None)
@given(scripts_of, st.integers(1, 4), st.sampled_from([0.0, 0.3]))
def test_twice_the_replicas_are_never_slower_where_slots_are_free(scripts, replicas, sequence):
    """Twice as many hold parts of what each held before. With few slots, or replicas that aren't a multiple, another order may
    be slower, as with any list schedule; siblings that are parted prefill their common start more often."""
    speed = replace(PLAIN, sequence_seconds=sequence, prefill_token_seconds=0.1)
    one, two = (roll(*scripts, speed=speed, replicas=count).seconds for count in (replicas, 2 * replicas))
    assert two <= one + 1e-6


@settings(max_examples=60, deadline=None)
@given(scripts_of, st.integers(1, 3))
def test_barriers_are_never_quicker(scripts, replicas):
    free, barred = (roll(*scripts, replicas=replicas, deterministic=det).seconds for det in (False, True))
    assert free <= barred + 1e-6


@settings(max_examples=40, deadline=None)
@given(scripts_of)
def test_one_engine_with_one_slot_is_a_sum(scripts):
    rollout = roll(*scripts, speed=replace(PLAIN, slots=1, prefill_token_seconds=0.25))
    by_hand = sum(Fraction(each.response) + Fraction(each.prompt, 4) for script in scripts for each in script)
    assert rollout.seconds == pytest.approx(float(by_hand))
    assert rollout.busy_share["main"] == pytest.approx(1.0)


def test_a_source_is_drawn_by_its_seed(load):
    work = load.workload(load.agent(response=Lengths(20.0, 0.8, 99)), tasks=8)
    engines = {"main": Engines(PLAIN)}
    assert simulate(work, engines, seed=1) == simulate(work, engines, seed=1) != simulate(work, engines, seed=2)
