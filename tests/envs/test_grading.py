from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from drmas.envs.grading import GraderPool
from drmas.errors import GraderError, GraderTimeout

ENDLESS = r"\boxed{10^{10^{10}}}"

POISON = {
    "digits": "9" * 200_000,
    "boxed digits": "\\boxed{" + "9" * 200_000 + "}",
    "nested braces": "\\boxed" + "{" * 5000 + "1" + "}" * 5000,
    "open boxes": "\\boxed{" * 5000,
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 3000 + "2" + "}" * 3000 + "}",
    "root towers": "\\boxed{" + "\\sqrt{2+" * 200 + "2" + "}" * 200 + "}",
    "python power": "\\boxed{10**10**10}",
    "power tower": ENDLESS,
    "factorial": r"\boxed{100000000!}",
}


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture
def pool():
    before = children()
    made = GraderPool(1)
    yield made
    made.close()
    assert children() <= before, "a grader process was left behind"


def test_I3_poison_is_bounded_and_never_costs_its_neighbours(pool: GraderPool) -> None:
    limit = 1.0
    assert pool.grade(r"\boxed{5}", "5", 30) == 1.0
    for name, text in POISON.items():
        started = time.monotonic()
        try:
            # no verdict, or an honest "wrong": never right, and never a hang
            assert pool.grade(text, "12", limit) == 0.0, name
        except GraderTimeout:
            # the deadline, plus far more than a busy machine needs to kill and reap
            assert time.monotonic() - started < limit + 20, name
        assert pool.grade(r"\boxed{5}", "5", 30) == 1.0, name
        assert len(children()) == 1


def test_I3_an_endless_answer_is_a_timeout_and_its_worker_is_replaced(pool: GraderPool) -> None:
    assert pool.grade(r"\boxed{5}", "5", 30) == 1.0
    before = children()
    with pytest.raises(GraderTimeout, match=r"no verdict after 0.5 s; the grader was killed"):
        pool.grade(ENDLESS, "12", 0.5)
    assert not children() & before
    assert pool.grade(r"\boxed{5}", "5", 30) == 1.0
    assert len(children()) == 1


def test_I3_a_killed_worker_is_an_error_once_and_then_replaced(pool: GraderPool) -> None:
    assert pool.grade(r"\boxed{5}", "5", 30) == 1.0
    with ThreadPoolExecutor(1) as threads:
        graded = threads.submit(pool.grade, ENDLESS, "12", 60)
        (worker,) = psutil.Process().children()
        busy_since = worker.cpu_times().user
        while worker.cpu_times().user < busy_since + 0.2:
            time.sleep(0.05)
        worker.kill()
        with pytest.raises(GraderError, match=r"the grader process died \(status -9\)") as caught:
            graded.result()
    assert not isinstance(caught.value, GraderTimeout)
    assert pool.grade(r"\boxed{5}", "5", 30) == 1.0


def test_a_worker_that_died_while_idle_is_replaced_unseen(pool: GraderPool) -> None:
    assert pool.grade(r"\boxed{5}", "5", 30) == 1.0
    (worker,) = psutil.Process().children()
    worker.kill()
    psutil.wait_procs([worker], timeout=10)
    assert pool.grade(r"\boxed{5}", "5", 30) == 1.0


def test_a_worker_that_cannot_start_says_why() -> None:
    pool = GraderPool(1, memory_bytes=30 * 2**20)
    try:
        with pytest.raises(GraderError, match=r"died \(status 1\) and is replaced: \w+Error"):
            pool.grade(r"\boxed{5}", "5", 30)
    finally:
        pool.close()


def test_more_threads_than_workers_take_turns(pool: GraderPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = [str(i % 3) for i in range(24)]
        rewards = list(threads.map(lambda answer: pool.grade(f"\\boxed{{{answer}}}", "1", 30), answers))
    assert rewards == [float(answer == "1") for answer in answers]
    assert len(children()) == 1


def test_async_grading_outlives_event_loops_and_does_not_block_them(pool: GraderPool) -> None:
    async def one(text: str) -> tuple[float, int]:
        ticks, graded = 0, asyncio.ensure_future(pool.grade_async(text, "5", 30))
        while not graded.done():
            ticks += 1
            await asyncio.sleep(0)
        return graded.result(), ticks

    for text, reward in ((r"\boxed{5}", 1.0), (r"\boxed{6}", 0.0)):
        verdict, ticks = asyncio.run(one(text))
        assert verdict == reward
        assert ticks > 1


def test_unicode_and_newlines_cross_the_pipe(pool: GraderPool) -> None:
    assert pool.grade("第一行\n\u2028 \x00 \\boxed{\\text{北京}}", "北京", 30) == 1.0


def test_a_closed_pool_refuses_and_closes_twice() -> None:
    pool = GraderPool(1)
    pool.grade(r"\boxed{5}", "5", 30)
    pool.close()
    pool.close()
    with pytest.raises(GraderError, match="closed"):
        pool.grade(r"\boxed{5}", "5", 30)
