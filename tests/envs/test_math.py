from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

import pytest

from drmas.envs.math import MathGrader, grade, verdict

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "math_grading.json").read_text())["vectors"]

DIFFERS = {
    r"\boxed{\frac{2}{4}}": "an unreduced fraction is the same number; refusing it taught models a format, not mathematics",
}
"""Golden answers on which our verdict is another one on purpose."""


@pytest.mark.parametrize("case", GOLDEN, ids=[case["response"] for case in GOLDEN])
def test_golden_verdicts(case: dict) -> None:
    expected = 1.0 - case["reward"] if case["response"] in DIFFERS else case["reward"]
    assert verdict(case["response"], case["ground_truth"]) == expected


@pytest.mark.parametrize(
    ("text", "truth", "reward"),
    [
        (r"\boxed{11} no, \boxed{12}", "12", 1.0),
        (r"\boxed{12} no, \boxed{11}", "12", 0.0),
        (r"<think>\boxed{12}</think> I give up", "12", 0.0),
        (r"<think>a</think> \boxed{12} </think> \boxed{13}", "13", 1.0),
        ("The answer is 12.", "12", 1.0),
        ("12 or 13", "12", 0.0),
        ("no idea", "12", 0.0),
        ("", "12", 0.0),
        (r"\boxed{}", "12", 0.0),
        (r"\boxed{-4}", "-4", 1.0),
        (r"\boxed{4}", "-4", 0.0),
        (r"\boxed{12 \text{ cm}}", "12", 1.0),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", 1.0),
        (r"\boxed{x=3}", r"the truth is \boxed{3}", 1.0),
        (r"\boxed{[1,2]}", "(1,2)", 0.0),
        (r"\boxed{\text{North  East}}", "north east", 1.0),
        (r"\boxed{sey}", "yes", 0.0),
        ("yes", "Yes", 1.0),
        ("答案是 \\boxed{5}", "5", 1.0),
    ],
)
def test_verdicts(text: str, truth: str, reward: float) -> None:
    assert verdict(text, truth) == reward


def test_grade_from_another_thread() -> None:
    rewards: list[float] = []
    thread = Thread(target=lambda: rewards.append(grade(r"\boxed{\frac{1}{2}}", "0.5")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


async def test_the_grader_is_awaited() -> None:
    grader = MathGrader(timeout_seconds=30)
    try:
        assert await grader(r"\boxed{7}", "7") == 1.0
        assert await grader(r"\boxed{8}", "7") == 0.0
    finally:
        grader.close()
