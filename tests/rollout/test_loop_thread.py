"""The event loop beside the trainer: what a user's code does to it, and how it ends."""

import asyncio
import contextlib
import sys
import time

import pytest

from drmas.rollout import loop_thread
from drmas.rollout.loop_thread import LoopThread


@pytest.fixture
def loop():
    made = LoopThread("test")
    yield made
    made.close()


async def answer() -> int:
    await asyncio.sleep(0)
    return 7


def test_results_and_errors_come_to_the_caller(loop):
    async def fails() -> None:
        raise ValueError("mine")

    assert loop.run(answer()) == 7
    with pytest.raises(ValueError, match="mine"):
        loop.run(fails())


def test_a_task_that_exits_ends_itself_alone(loop):
    async def exits() -> None:
        sys.exit(3)

    async def start() -> asyncio.Task:
        return asyncio.create_task(exits())

    task = loop.run(start())
    while not task.done():
        time.sleep(0.01)
    assert isinstance(task.exception(), SystemExit)
    assert loop.run(answer()) == 7


def test_closing_cancels_what_runs_and_may_be_repeated(loop):
    ended = []

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(1)

    async def start() -> None:
        asyncio.get_running_loop().kept = asyncio.create_task(endless())

    loop.run(start())
    loop.run(answer())
    loop.close()
    assert ended == [1]
    assert loop.closed
    loop.close()


def test_what_will_not_be_cancelled_does_not_hold_the_end_up(loop, monkeypatch):
    monkeypatch.setattr(loop_thread, "END_SECONDS", 0.1)

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def start() -> None:
        asyncio.get_running_loop().kept = asyncio.create_task(stubborn())

    loop.run(start())
    loop.close()
    assert loop.closed
