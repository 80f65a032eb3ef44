"""The guide's code does what the guide says: each Python block is written to its file, loaded and run by scripted engines."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import drmas.agents.team
from drmas.agents.agent import AgentConfig
from drmas.agents.parsers import PARSERS, make_parser
from drmas.agents.team import check_policies, check_tools, load_team
from drmas.config.schema import RolloutConfig
from drmas.config.tasks import PythonTool
from drmas.rollout.collector import Collector
from drmas.rollout.scripted import ScriptedEngine
from drmas.runtime.tools import make_tools
from drmas.types import Episode, Task, rows_of

GUIDE = Path(drmas.agents.team.__file__).with_name("README.md")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The guide's files, in a folder that is the current one; the names of its teams are free again afterwards."""
    folder = tmp_path_factory.mktemp("guide")
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, f"a block doesn't begin with its file: {block[:40]!r}"
        (folder / name[1]).write_text(block, encoding="utf-8")
    load_team({"name": "single"})  # the teams that ship register once
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(drmas.agents.team, "_TEAMS", dict(drmas.agents.team._TEAMS))
        yield folder
    make_parser.cache_clear()


@pytest.fixture
def collect(folder: Path, byte_tokenizer):
    """`collect(section, say)` runs the team of a recipe's section once; `say(agent, prompt)` is what an agent says."""

    def run(section: dict, say: Callable[[str, str], str], truth: str = "19", *, tools=None, remotes=None) -> Episode:
        async def exact(task: Task, answer: str | None) -> float:
            return float(answer == task.truth)

        def rule(prompt: str, key: str) -> str:
            return say(key.rpartition("/")[2], prompt)

        engine = ScriptedEngine(byte_tokenizer, rule, max_model_tokens=10_000)
        team = load_team(section)
        config = RolloutConfig(group_size=1, episode_timeout_seconds=60)
        engines, tokenizers = {"main": engine}, {"main": byte_tokenizer}
        with Collector(team, engines, tokenizers, exact, config, seed=0, tools=tools, remotes=remotes) as collector:
            (episode,) = collector.collect([Task("t", "What is 12 + 7?", truth=truth)], step=1)
        return episode

    return run


def said(episode: Episode) -> list[str]:
    assert episode.failure is None, episode.failure
    return [turn.agent for turn in episode.turns]


def test_all_files_of_the_guide_are_tried_here(folder: Path) -> None:
    tried = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in folder.glob("*.py") if path.name not in tried] == []


def test_the_try_out_prints_what_the_guide_shows(folder: Path) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path("try_pair.py")
    (shown,) = blocks("text")
    assert printed.getvalue() == shown


def test_the_pair_asks_again_and_quotes(collect) -> None:
    prompts = []

    def say(agent: str, prompt: str) -> str:
        prompts.append(prompt)
        if agent == "writer":
            return "19</draft> <verdict>yes</verdict>"
        return "hm" if len(prompts) == 2 else "<verdict>no</verdict>"

    episode = collect({"name": "pair.py:pair", "rounds": 1}, say)
    assert said(episode) == ["writer", "critic", "critic"]
    assert [turn.penalty for turn in episode.turns] == [0.0, 0.1, 0.0]
    assert "<draft>19< /draft> < verdict>yes< /verdict></draft>" in prompts[1]


def test_a_remote_critic_and_a_frozen_writer_leave_nothing_to_train(collect) -> None:
    asked = []

    class Remote:
        async def start(self) -> None: ...
        async def close(self) -> None: ...

        async def ask(self, agent, messages, *, seed, key):
            asked.append((key, messages[0]["content"]))
            return SimpleNamespace(text="yes", finish_reason="stop", prompt_tokens=1, response_tokens=1)

    section = {"name": "pair.py:pair", "critic": {"policy": "judge"}, "writer": {"trainable": False}}
    assert check_policies(load_team(section), ["main", "judge"]) == []
    episode = collect(section, lambda agent, prompt: "19", remotes={"judge": Remote()})
    assert said(episode) == ["writer", "critic"]
    assert [(key, text.partition("\n")[0]) for key, text in asked] == [("t#0/001/critic", "What is 12 + 7?")]
    assert [(row.agent, row.trained) for row in rows_of([episode])] == [("writer", False)]
    assert episode.reward == 1.0


def test_votes_are_counted_with_a_parser_of_ones_own(collect) -> None:
    # number.py reads the last whole number
    answers = iter(["so 19", "none", "19 it is"])
    episode = collect({"name": "vote.py:vote"}, lambda agent, prompt: next(answers))
    assert said(episode) == ["solver"] * 3
    assert [turn.parsed for turn in episode.turns] == [19, None, 19]
    assert (episode.answer, episode.reward) == ("19", 1.0)
    assert collect({"name": "vote.py:vote"}, lambda agent, prompt: "none").answer is None


def test_the_router_picks_who_is_asked(collect) -> None:
    episode = collect({"name": "route.py:route"}, lambda agent, prompt: "Numbers." if agent == "router" else agent)
    assert (said(episode), episode.answer) == (["router", "numbers"], "numbers")
    episode = collect({"name": "route.py:route"}, lambda agent, prompt: "?" if agent == "router" else agent)
    assert (said(episode), episode.answer) == (["router", "words"], "words")


def test_agent_and_team_call_the_tool(collect) -> None:
    # units.py is the tool
    config = {"units": PythonTool(path="units.py:feet")}
    assert check_tools(load_team({"name": "measure.py:measure"}), config) == []
    prompts = []

    def say(agent: str, prompt: str) -> str:
        prompts.append(prompt)
        if agent == "checker":
            return "yes"
        return "6.56 ft" if "6.56 ft" in prompt else '<tool_call>{"name": "feet", "arguments": {"metres": 2}}</tool_call>'

    episode = collect({"name": "measure.py:measure"}, say, "6.56 ft", tools=make_tools(config))
    assert said(episode) == ["solver", "solver", "checker"]
    assert "6.56 ft and 3.28 ft: same factor?" in prompts[2]
    assert [(use.tool, use.result, use.ok, use.agent, use.turn) for use in episode.tool_uses] == [
        ("units", "6.56 ft", True, "solver", 0),
        ("units", "3.28 ft", True, None, None),
    ]
    first, second, _ = episode.turns
    start = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(start)] == start
    assert (len(rows_of([episode])), episode.reward) == (3, 1.0)


def test_a_team_of_teams(collect) -> None:
    def say(agent: str, prompt: str) -> str:
        return {"careful.solver": "18", "careful.verifier": "approve", "quick.solver": "19", "picker": "2"}[agent]

    episode = collect({"name": "exam.py:exam", "careful": {"solver": {"max_tokens": 9}}}, say)
    assert sorted(said(episode)) == ["careful.solver", "careful.verifier", "picker", "quick.solver"]
    assert (episode.answer, episode.reward) == ("19", 1.0)
    assert {row.agent for row in rows_of([episode])} == set(load_team({"name": "exam.py:exam"}).agents)


@pytest.mark.parametrize(("left", "right", "score"), [("18", "21", 1.0), ("?", "21", -1.0), ("20", "18", 0.0), ("?", "?", 0.0)])
def test_self_play_has_opposed_rewards(collect, left: str, right: str, score: float) -> None:
    episode = collect({"name": "bidding.py:bidding"}, lambda agent, prompt: left if agent == "left" else right)
    assert said(episode) == ["left", "right"]
    assert [row.reward for row in rows_of([episode])] == [score, -score]
    assert episode.reward == 0.0


def test_the_guides_tables_are_complete() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    keys = text.partition("## An agent's keys")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in keys.splitlines() if line.startswith("| `")))
    assert named == sorted(AgentConfig.model_fields, key=named.index)
    assert set(named) == set(AgentConfig.model_fields)
    parsers = text.partition("## Parsers")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)", parsers, re.MULTILINE)) - {"path"} == set(PARSERS)
    load_team({"name": "single"})
    shipped = text.partition("## The teams that ship")[2]
    own = {name for name, team in drmas.agents.team._TEAMS.items() if team.__module__.startswith("drmas.agents.teams.")}
    assert set(re.findall(r"^\| \[([\w-]+)\]", shipped, re.MULTILINE)) == own
