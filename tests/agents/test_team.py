from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, check_policies, check_tools, load_team, register_team
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
        ({"name": "solver-verifier", "on_invalid": "fail_open"}, "team.on_invalid: unknown key; "),
        ({"name": "single", "solver": {"on_invalid": "open"}}, "team.solver.on_invalid: 'open'; .*fail_closed"),
        ({"name": "search-router", "searcher": {"prompt": "{passages}"}}, r"searcher asks for \{passages\}"),
        ({"name": "debate", "solvers": 10}, "team.solvers: 10; input should be less than or equal to 9"),
        ({"name": "debate", "revise": ""}, "team.revise: ''; string should have at least 1 character"),
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


NESTED_FILE = """
from __future__ import annotations
from typing import ClassVar
from drmas.agents.agent import AgentConfig
from drmas.agents.team import TeamConfig, register_team
from drmas.agents.teams.search_router import SearchRouter
from drmas.agents.teams.solver_verifier import SolverVerifier

class Middle(TeamConfig):
    uses: ClassVar = frozenset({"calculator"})
    proofs: SolverVerifier = SolverVerifier(rounds=5, solver=AgentConfig(prompt="{question}!", max_tokens=7, parser="text"))
    look: SearchRouter | None = None

    async def run(self, task, agents):
        return await self.proofs.run(task, agents.proofs)

@register_team("outer")
class Outer(TeamConfig):
    chief: AgentConfig = AgentConfig(max_tokens=3)
    inner: Middle = Middle()

    async def run(self, task, agents):
        return await self.inner.run(task, agents.inner)
"""


@pytest.fixture(scope="module")
def nested(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("teams") / "nested.py"
    file.write_text(NESTED_FILE)
    return f"{file}:outer"


def test_agents_of_sub_teams_have_dotted_names_and_keep_their_defaults(nested: str) -> None:
    team = load_team({"name": nested, "inner": {"proofs": {"solver": {"policy": "small"}, "verify_last": True}}})
    assert list(team.agents) == ["chief", "inner.proofs.solver", "inner.proofs.verifier"]
    solver = team.agents["inner.proofs.solver"]
    assert (solver.policy, solver.prompt, solver.max_tokens, solver.parser) == ("small", "{question}!", 7, "text")
    assert (team.inner.proofs.rounds, team.inner.proofs.verify_last) == (5, True)
    assert load_team({"name": nested}).inner.proofs.verify_last is False


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"prooofs": {}}, "team.inner.prooofs: unknown key; the nearest is 'proofs'"),
        ({"proofs": {"round": 3}}, "team.inner.proofs.round: unknown key; the nearest is 'rounds'"),
        (
            {"proofs": {"solver": {"max_tokns": 3}}},
            "team.inner.proofs.solver.max_tokns: unknown key; the nearest is 'max_tokens'",
        ),
        ({"look": {"answerer": {"promt": "x"}}}, "team.inner.look.answerer.promt: unknown key; the nearest is 'prompt'"),
        ({"proofs": {"solver": {"top_p": 0.5}}}, "team.inner.proofs.solver: top_p is 0.5"),
        ({"proofs": {"solver": {"parser": "boxd"}}}, "team.inner.proofs.solver.parser: .*the nearest is 'boxed'"),
        (
            {"proofs": {"verifier": {"prompt": "{critique}"}}},
            r"team.inner.proofs: the template of verifier asks for \{critique\}",
        ),
        ({"proofs": 3}, "team.inner.proofs: 3; "),
    ],
)
def test_faults_of_sub_teams_are_named_in_full(nested: str, inner: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_team({"name": nested, "inner": inner})


def test_policies_of_sub_teams_are_checked(nested: str) -> None:
    team = load_team({"name": nested, "inner": {"proofs": {"solver": {"policy": "smal"}}}})
    with pytest.raises(ConfigError, match=r"team.inner.proofs.solver.policy is 'smal'; the nearest is 'small'"):
        check_policies(team, ["main", "small"])


def test_tools_are_checked_both_ways(nested: str) -> None:
    sections = {
        "search": SimpleNamespace(type="search"),
        "calculator": SimpleNamespace(type="python"),
        "files": SimpleNamespace(type="mcp", allow=["read", "dir.list"]),
        "files.old": SimpleNamespace(type="mcp", allow=[]),
        "idle": SimpleNamespace(type="python"),
    }
    with pytest.raises(ConfigError, match=r"calls the tool 'calculator', and there is no section \[tools.calculator\]"):
        check_tools(load_team({"name": nested}), {"search": 1})
    looks = {"name": nested, "inner": {"look": {}}}
    with pytest.raises(ConfigError, match=r"calls the tool 'search'"):
        check_tools(load_team(looks), {"calculator": 1})
    assert check_tools(load_team(looks), {"calculator": 1, "search": 2}) == []
    tools = ["search", "files.read", "files.dir.list", "files.old.anything"]
    team = load_team({"name": nested, "chief": {"tools": tools}})
    assert check_tools(team, sections) == ["idle"]
    for name, message in [
        ("serch", "team.chief.tools has 'serch'; the nearest is 'search'"),
        ("file.read", "team.chief.tools has 'file.read'; the nearest is 'files"),
        ("files.raed", r"team.chief.tools has 'files.raed'; of tools.files.allow the nearest is 'read'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_tools(load_team({"name": nested, "chief": {"tools": [name]}}), sections)
    with pytest.raises(ConfigError, match="there are none to choose from"):
        check_tools(load_team({"name": "single", "solver": {"tools": ["search"]}}), {})


@pytest.mark.filterwarnings("ignore:Field name")
@pytest.mark.parametrize("name", ["tools", "name", "agents", "run", "uses", "values"])
def test_a_field_cannot_take_a_word_of_the_team_itself(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(
        "from drmas.agents.agent import AgentConfig\nfrom drmas.agents.team import TeamConfig, register_team\n\n\n"
        f"@register_team('taken')\nclass Taken(TeamConfig):\n    {name}: AgentConfig = AgentConfig()\n"
    )
    with pytest.raises(ConfigError, match=f"the team Taken has a field '{name}', which is taken"):
        load_team({"name": f"{file}:taken"})


def test_a_team_without_agents_is_refused_at_any_depth(tmp_path: Path) -> None:
    body = "\n\n    async def run(self, task, agents):\n        return None\n"
    (tmp_path / "empty.py").write_text(
        "from drmas.agents.agent import AgentConfig\nfrom drmas.agents.team import TeamConfig, register_team\n\n\n"
        f"@register_team('empty')\nclass Empty(TeamConfig):\n    rounds: int = 1{body}\n\n"
        f"@register_team('around')\nclass Around(TeamConfig):\n    solver: AgentConfig = AgentConfig()\n"
        f"    inner: Empty | None = None{body}"
    )
    with pytest.raises(ConfigError, match="team: the team Empty has no agents; expected fields of type AgentConfig"):
        load_team({"name": f"{tmp_path}/empty.py:empty"})
    with pytest.raises(ConfigError, match=r"team.inner: the team Empty has no agents"):
        load_team({"name": f"{tmp_path}/empty.py:around", "inner": {"rounds": 2}})
    assert list(load_team({"name": f"{tmp_path}/empty.py:around"}).agents) == ["solver"]


def test_values_of_something_that_is_no_field_are_a_mistake_of_the_team() -> None:
    with pytest.raises(ConfigError, match=r"Wrong.values has 'solvr'; the nearest is 'solver'"):

        class Wrong(TeamConfig):
            values = {"solvr": frozenset({"question"})}  # noqa: RUF012
            solver: AgentConfig = AgentConfig()


@pytest.mark.parametrize("name", ["single", "solver-verifier", "search-router", "debate"])
def test_the_teams_that_ship_load_with_their_own_settings(name: str) -> None:
    team = load_team({"name": name})
    assert check_policies(team, ["main"]) == []
    assert check_tools(team, {"search": 1}) == ([] if name == "search-router" else ["search"])
    # every template of an agent is checked
    assert set(team.agents) <= set(team.values)


def test_a_run_that_is_no_coroutine_is_refused_when_the_team_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text(
        "from drmas.agents.agent import AgentConfig\nfrom drmas.agents.team import TeamConfig, register_team\n\n\n"
        "@register_team('plain')\nclass Plain(TeamConfig):\n    solver: AgentConfig = AgentConfig()\n\n"
        "    def run(self, task, agents):\n        return 'x'\n"
    )
    with pytest.raises(ConfigError, match=r"whose `run` is no coroutine; write `async def run\(self, task, agents\)`"):
        load_team({"name": f"{file}:plain"})
