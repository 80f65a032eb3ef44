"""What the README of the environments shows, run."""

from __future__ import annotations

import re
from pathlib import Path

import drmas.envs
from drmas.agents.team import load_team
from drmas.config.schema import RolloutConfig
from drmas.envs.parquet import task_of_row
from drmas.rollout.collector import Collector
from drmas.rollout.scripted import ScriptedEngine

README = Path(drmas.envs.__file__).with_name("README.md")
HEAD = """
from typing import ClassVar

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, register_team


@register_team("told")
"""


def test_its_team_tells_its_agent_a_rows_system_message(tmp_path: Path, byte_tokenizer) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "told.py").write_text(HEAD + block)
    prompts = []

    def say(prompt: str, key: str) -> str:
        prompts.append(prompt)
        return "4"

    async def exact(task, answer) -> float:
        return float(answer == task.truth)

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    task = task_of_row({"prompt": messages, "reward_model": {"ground_truth": "4"}}, "row 0", "t")
    engine, rollout = ScriptedEngine(byte_tokenizer, say), RolloutConfig(group_size=1)
    team = load_team({"name": f"{tmp_path / 'told.py'}:told"})
    with Collector(team, {"main": engine}, {"main": byte_tokenizer}, exact, rollout, seed=0) as collector:
        (episode,) = collector.collect([task], step=1)
    assert (episode.failure, episode.reward) == (None, 1.0)
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>" in prompts[0]
