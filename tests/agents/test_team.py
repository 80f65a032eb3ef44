from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, check_policies, load_team, register_team
from drmas.errors import ConfigError

TEAM_FILE = """
from __future__ import annotations
from typing import Literal
from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, register_team

@register_team("duo")
class Duo(TeamConfig):
    mode: Literal["a", "b"] = "a"
    writer: AgentConfig = AgentConfig(prompt="{question}", max_tokens=7)

    async def run(self, task, agents):
        return (await agents.writer(question=task.question)).text
"""


def test_defaults_and_agents_in_field_order() -> None:
    team = load_team({"name": "solver-verifier"})
    assert list(team.agents) == ["solver", "verifier"]
    assert team.agents["solver"].parser == "boxed"


def test_setting_one_key_of_an_agent_keeps_the_teams_defaults_for_the_others() -> None:
    standard = load_team({"name": "solver-verifier"})
    team = load_team({"name": "solver-verifier", "rounds": 3, "verifier": {"max_tokens": 9, "policy": "small"}})
    assert (team.rounds, team.agents["verifier"].max_tokens, team.agents["verifier"].policy) == (3, 9, "small")
    assert team.agents["verifier"].prompt == standard.agents["verifier"].prompt
    assert team.agents["verifier"].parser == "verdict:approve,reject"
    assert team.agents["solver"] == standard.agents["solver"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "team.name is None; expected the name of a team"),
        ({"name": "solver-verifer"}, "the nearest is 'solver-verifier'"),
        ({"name": "single", "solvr": {}}, "team.solvr: unknown key; the nearest is 'solver'"),
        ({"name": "single", "solver": {"max_tokns": 3}}, "team.solver.max_tokns: unknown key; the nearest is 'max_tokens'"),
        ({"name": "single", "solver": {"max_tokens": -3}}, "team.solver.max_tokens: -3; input should be greater than 0"),
        ({"name": "single", "solver": {"top_p": 0.9}}, "team.solver: top_p is 0.9"),
        ({"name": "single", "solver": {"parser": "boxd"}}, "team.solver.parser: .*the nearest is 'boxed'"),
        ({"name": "single", "solver": {"prompt": "{qestion}"}}, r"solver asks for \{qestion\}; the nearest is 'question'"),
        ({"name": "single", "solver": "x"}, "team.solver: 'x'; "),
        ({"name": "solver-verifier", "revise": "{kritik}"}, r"the template of revise asks for \{kritik\}"),
        ({"name": "solver-verifier", "rounds": 0}, "team.rounds: 0; input should be greater than 0"),
        ({"name": "solver-verifier", "on_invalid": "open"}, "team.on_invalid: 'open'; .*fail_closed"),
    ],
)
def test_bad_sections_say_what_to_change(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_team(section)


def test_every_fault_of_a_section_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_team({"name": "single", "solver": {"max_tokns": 3, "temperature": -1}})
    assert str(caught.value).count("team.solver.") == 2


def test_a_team_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my team.py"
    file.write_text(TEAM_FILE)
    team = load_team({"name": f"{file}:duo", "mode": "b"})
    assert (team.mode, team.agents["writer"].max_tokens) == ("b", 7)
    assert type(load_team({"name": str(file)})) is type(team)
    with pytest.raises(ConfigError, match="the nearest is 'duo'"):
        load_team({"name": f"{file}:due"})


def test_two_files_may_use_the_same_team_name_only_once(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "team.py").write_text(TEAM_FILE.replace('"duo"', '"trio"'))
    load_team({"name": f"{tmp_path}/a/team.py:trio"})
    with pytest.raises(ConfigError, match="the team name 'trio' is taken"):
        load_team({"name": f"{tmp_path}/b/team.py:trio"})


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*nothing.py"):
        load_team({"name": f"{tmp_path}/nothing.py:duo"})
    (tmp_path / "broken.py").write_text("import does_not_exist_anywhere")
    with pytest.raises(ConfigError, match=r"broken.py can't be imported: ModuleNotFoundError"):
        load_team({"name": f"{tmp_path}/broken.py:duo"})


def test_a_taken_name_is_refused() -> None:
    load_team({"name": "single"})
    with pytest.raises(ConfigError, match=r"the team name 'single' is taken by drmas.agents.teams.single"):

        @register_team("single")
        class Other(TeamConfig):
            solver: AgentConfig = AgentConfig()


def test_policies_are_checked_both_ways() -> None:
    team = load_team({"name": "solver-verifier", "verifier": {"policy": "smal"}})
    with pytest.raises(ConfigError, match=r"team.verifier.policy is 'smal'; the nearest is 'small'"):
        check_policies(team, ["main", "small"])
    assert check_policies(team, {"main": 1, "smal": 2, "idle": 3}) == ["idle"]


def test_a_team_without_a_procedure_is_refused(tmp_path) -> None:
    file = tmp_path / "idle.py"
    head = "from drmas.agents.team import TeamConfig, register_team"
    file.write_text(f"{head}\n\n\n@register_team('idle')\nclass Idle(TeamConfig):\n    rounds: int = 1\n")
    with pytest.raises(ConfigError, match="defines no `async def run"):
        load_team({"name": f"{file}:idle"})
