"""Sleeping and waking against a real vLLM process on a CPU: what is refused, what waits, what comes back equal.

A CPU gives no memory back, so nothing here measures it; the argument by which a GPU does is checked.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from drmas.errors import EngineDied, EngineError
from drmas.rollout.engine import Sampling

PROMPT = [5, 6, 7, 8, 9, 10, 11] * 6
"""Longer than a block of the cache."""


@pytest.fixture
def awake(engine):
    """The session's engine; it is awake and running afterwards, whatever a test did."""
    yield engine
    engine.wake()
    engine.resume()


async def test_asleep_it_refuses_requests_and_updates_until_it_is_awake_and_answers_as_before(awake, generate_all):
    ask = [(PROMPT, Sampling(20), 3)]
    (before,) = await generate_all(awake, ask)
    cached = awake.stats()["cached_tokens"]
    awake.sleep()
    awake.sleep()  # harmless
    refused = r"engine free is asleep, as during updates \(policies\.free\.engine\.sleep\); wake it first"
    with pytest.raises(EngineError, match=refused) as error:
        await generate_all(awake, ask)
    assert not isinstance(error.value, EngineDied)
    assert awake.alive
    assert awake.idle
    awake.pause()  # as a push begins
    with pytest.raises(EngineError, match="start_weight_update on an engine that sleeps; wake its weights first"):
        awake.sync_client.start_weight_update()
    awake.wake(cache=False)
    awake.wake(cache=False)
    awake.sync_client.start_weight_update()
    with pytest.raises(EngineError, match="sleep during a weight update"):
        awake.sleep()
    assert awake.sync_client.abort_weight_update() is True
    awake.resume()
    with pytest.raises(EngineError, match=refused):
        await generate_all(awake, ask)
    awake.wake()
    (after,) = await generate_all(awake, ask)
    assert (after.token_ids, after.versions) == (before.token_ids, before.versions)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)
    assert awake.stats()["cached_tokens"] == cached  # nothing of the prompt was cached any more


async def test_a_request_in_flight_waits_and_goes_on(awake, generate_all):
    (expected,) = await generate_all(awake, [(PROMPT, Sampling(200), 8)])
    call = asyncio.ensure_future(awake.generate(PROMPT, Sampling(200), seed=8, key="long"))
    await asyncio.sleep(0)  # it was sent before the message below
    await asyncio.to_thread(awake.sleep)
    if not call.done():
        await asyncio.wait([call], timeout=0.5)
        assert not call.done()
    await asyncio.to_thread(awake.wake)
    assert (await call).token_ids == expected.token_ids


def test_one_that_dies_asleep_is_started_again_awake(make_engine, generate_all):
    engine = make_engine("sleeper")
    engine.start()
    try:
        engine.sleep()
        os.killpg(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="was killed by SIGKILL"):
            engine.wake()
        assert not engine.alive
        engine.start()
        (answer,) = asyncio.run(generate_all(engine, [(PROMPT, Sampling(4), 1)]))
        assert answer.token_ids
    finally:
        engine.close()
    with pytest.raises(EngineDied):
        engine.sleep()


@pytest.mark.parametrize(("device", "sleep", "expected"), [("cuda", True, True), ("cuda", False, None), ("cpu", True, None)])
def test_vllm_is_told_on_a_gpu_alone_where_it_can_give_memory_back(make_engine, device, sleep, expected):
    engine = make_engine("told", gpus="shared", sleep=sleep)
    assert engine._arguments(device).get("enable_sleep_mode") is expected
