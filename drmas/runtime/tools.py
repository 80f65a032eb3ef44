"""The `tools` section of a run becomes the toolbox that its agents use.

    toolbox = make_tools(config.tools)          # checks paths, commands and files; starts nothing
    await toolbox.start()                       # in the event loop of the episodes

Called by `run` before anything starts. Each kind of tool imports what it needs only where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from drmas.agents.tools import Tool, Toolbox
from drmas.config.tasks import McpTool, PythonTool, ToolConfig


def make_tools(config: Mapping[str, ToolConfig]) -> Toolbox:
    """One tool per section. ConfigError kinds: what a section has wrong (no such command, file, function, corpus)."""
    return Toolbox({section: _tool(section, settings) for section, settings in config.items()})


def _tool(section: str, settings: ToolConfig) -> Tool:
    if isinstance(settings, McpTool):
        from drmas.agents.mcp_tools import McpServer

        return McpServer(section, settings)
    if isinstance(settings, PythonTool):
        from drmas.agents.python_tools import PythonFunction

        return PythonFunction(section, settings)
    from drmas.envs.search.tool import Search

    return Search(settings, section)
