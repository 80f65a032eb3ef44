from __future__ import annotations

import sys
from pathlib import Path

import pytest

from drmas.config.tasks import McpTool, PythonTool, SearchTool
from drmas.errors import ConfigError
from drmas.runtime.tools import make_tools
from drmas.types import Episode, Task

MCP = Path(__file__).parents[1] / "agents" / "mcp_server.py"


async def test_one_tool_per_section_of_its_type(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def double(x: int) -> int:\n    return 2 * x\n")
    toolbox = make_tools(
        {
            "wiki": SearchTool(topk=1),
            "double": PythonTool(path=f"{file}:double"),
            "server": McpTool(command=[sys.executable, str(MCP)], allow=["echo"]),
        }
    )
    await toolbox.start()
    try:
        names = [spec["function"]["name"] for spec in toolbox.specs(["wiki", "double", "server.echo"])]
        assert names == ["search", "double", "echo"]
        session = toolbox.session(Episode(Task("t", "?", "5"), 0))
        assert (await session.call("double", {"x": 4})).text == "8"
        assert (await session.call("server", {"text": "x"})).text == "x"
        assert (await session.call("wiki", {"query": "tungsten"})).ok
    finally:
        await toolbox.close()


def test_what_a_section_has_wrong_is_found_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools.own.path.*there is no file"):
        make_tools({"own": PythonTool(path=str(tmp_path / "nothing.py:f"))})
    with pytest.raises(ConfigError, match=r"tools.files.command starts with 'nothing-here'"):
        make_tools({"files": McpTool(command=["nothing-here"])})


async def test_a_run_without_tools_has_an_empty_box() -> None:
    toolbox = make_tools({})
    await toolbox.start()
    assert toolbox.specs([]) == []
    await toolbox.close()
