"""Engine speeds by hand, and what must hold of the bound whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas.planning.engines import bound, engine_speed, engines_of
from drmas.planning.types import AgentLoad, Engines, EngineSpeed, Lengths, Workload

LAYER = 32 * 128 + 64 * 32 + 3 * 32 * 64
COUNT = 4 * (LAYER + 2 * 32 + 2 * 16) + 132 * 32 + 32
SPEED = EngineSpeed(4e-3, 1e-6, 1e-4, 1e-8, 1e-3, 2e-4, slots=8, kv_tokens=10_000, request_seconds=1e-2)


FIXED = Lengths(50.0, 0.0, 400)


def solo(response: Lengths = FIXED, tasks: int = 4) -> Workload:
    """`tasks` x 2 episodes of one call with 20 prompt tokens."""
    return Workload((AgentLoad("solver", "main", 1.0, 20.0, 0.0, response),), tasks, 2, 64)


def test_a_worker_reads_its_weights_and_computes_its_part(toy):
    job = toy(ranks=1)
    speed = engine_speed(job.policies["main"], job)
    assert speed.weight_seconds == pytest.approx(2 * COUNT / (1e10 * 0.5))
    assert speed.kv_token_seconds == pytest.approx(2 * 4 * 2 * 16 * 2 / (1e10 * 0.5))
    assert speed.token_seconds == pytest.approx(2 * (4 * LAYER + 32 * 132) / (1e12 * 0.2))
    assert speed.pair_seconds == pytest.approx(4 * 4 * 4 * 16 / (1e12 * 0.2))
    assert speed.prefill_token_seconds == pytest.approx(2 * 4 * LAYER / (1e12 * 0.5))
    assert (speed.overhead_seconds, speed.sequence_seconds, speed.request_seconds) == (1e-3, 1e-6, 1e-2)
    assert speed.kv_tokens == int((0.6 * 4e9 - 2 * COUNT - 2 * 2**30) // 512)


def test_tensor_parallel_workers_halve_the_work_and_talk(toy):
    one, two = (engine_speed((job := toy(ranks=2, engine={"tensor_parallel": tp})).policies["main"], job) for tp in (1, 2))
    assert two.weight_seconds == pytest.approx(one.weight_seconds / 2)
    assert two.kv_token_seconds == pytest.approx(one.kv_token_seconds / 2)
    assert two.token_seconds == pytest.approx(one.token_seconds / 2)
    hidden = 2 * 4 * 2 * (1 / 2) * 32 * 2 / (1e9 * 0.5)
    assert two.overhead_seconds == pytest.approx(1e-3 + 2 * 4 * 1e-5)
    assert two.sequence_seconds == pytest.approx(1e-6 + hidden)


def test_an_untied_models_embedding_is_not_read(toy, toy_model, tmp_path):
    text = (toy_model / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    job = toy(ranks=1, model=str(tmp_path))
    assert job.policies["main"].parameters == COUNT + 132 * 32
    assert engine_speed(job.policies["main"], job).weight_seconds == pytest.approx(2 * COUNT / (1e10 * 0.5))


def test_engines_with_a_device_in_common_share_a_name(toy):
    two = {"a": {}, "b": {}}
    assert [engines.devices for engines in engines_of(toy(ranks=1, policies=two)).values()] == ["a", "a"]
    assert [engines.devices for engines in engines_of(toy(ranks=2, policies=two)).values()] == ["", ""]


def test_the_bound_of_one_wave_by_hand():
    """8 episodes at once on 8 slots: 50 steps of 8 sequences, then nothing more; prefills of 20 tokens each."""
    found = bound(solo(), {"main": Engines(SPEED)})
    step = max(4e-3 + 1e-6 * 8 * 45, 1e-4 * 8 + 1e-8 * 8 * 45) + 1e-3
    prefill = 20 * 2e-4
    assert found.seconds == pytest.approx(50 * step + 8 * prefill, rel=1e-6)
    assert found.longest_episode_seconds == pytest.approx(50 * step + prefill + 1e-2, rel=1e-6)
    assert (found.generated_tokens, found.prompt_tokens) == (400, 160)
    assert found.busy_share == {"main": 1.0}


def test_a_long_tail_is_the_longest_episode():
    tail = bound(solo(response=Lengths(50.0, 1.5, 4000)), {"main": Engines(SPEED)})
    assert tail.seconds == tail.longest_episode_seconds
    assert tail.seconds > bound(solo(response=Lengths(50.0, 0.0, 4000)), {"main": Engines(SPEED)}).seconds


def test_no_room_for_a_sequence_takes_for_ever():
    assert bound(solo(), {"main": Engines(replace(SPEED, kv_tokens=10))}).seconds == float("inf")


def test_engines_on_the_same_devices_take_turns():
    agents = tuple(AgentLoad(name, name, 1.0, 20.0, 0.0, Lengths(50.0, 0.0, 400)) for name in ("a", "b"))
    work = Workload(agents, 4, 2, 64)
    apart = bound(work, {name: Engines(SPEED) for name in ("a", "b")})
    together = bound(work, {name: Engines(SPEED, devices="gpu") for name in ("a", "b")})
    assert together.seconds > 1.3 * apart.seconds


@settings(max_examples=60, deadline=None)
@given(
    mean=st.floats(1, 300),
    longer=st.floats(1.0, 4.0),
    spread=st.sampled_from([0.0, 0.5, 1.2]),
    tasks=st.integers(1, 40),
    replicas=st.integers(1, 4),
    slots=st.integers(1, 64),
)
def test_longer_answers_are_never_faster_and_more_engines_never_slower(mean, longer, spread, tasks, replicas, slots):
    engines = {"main": Engines(replace(SPEED, slots=slots, kv_tokens=10**6), replicas)}
    short, long = (solo(response=Lengths(size, spread, 10**6), tasks=tasks) for size in (mean, mean * longer))
    assert bound(long, engines).seconds >= bound(short, engines).seconds * (1 - 1e-9)
    more = {"main": Engines(engines["main"].speed, replicas + 1)}
    assert bound(short, more).seconds <= bound(short, engines).seconds * (1 + 1e-6)
