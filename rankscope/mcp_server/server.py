"""The server: each tool's answer is one compact, bounded JSON text, and each mistake one line that says its reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.tape.printable import visible
from rankscope import __version__
from rankscope.mcp_server.answers import compact
from rankscope.mcp_server.tools import Tools
from store.runs_folder import RunsFolder

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.tools import Tool

__all__ = ["make_server"]

MAX_ERROR_CHARS = 1_000
_INSTRUCTIONS = (
    "Records of distributed PyTorch training runs, and files of jobs that were not recorded. Start with list_runs, "
    "then verdict; finding has the evidence of one finding and the runbook's section. Columns that end in _ns are "
    "nanoseconds. Findings name ranks; they never claim more than was recorded. An answer that is cut says so in `cut`."
)


def make_server(runs_dir: Path) -> MCPServer[Any]:
    """The server over the runs of one folder. Raises ModuleNotFoundError without the extra `mcp`."""
    from mcp.server.mcpserver import MCPServer

    tools = Tools(RunsFolder(runs_dir))
    return MCPServer(
        "rankscope", version=__version__, instructions=_INSTRUCTIONS, log_level="CRITICAL",
        tools=[_tool(one) for one in tools.all()],
    )  # fmt: skip


def _tool(method: Callable[..., Any]) -> Tool:
    """A tool that refuses arguments that it does not have, in one line that names those it has."""
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.tools import Tool
    from mcp.types import ToolAnnotations
    from pydantic import ValidationError

    class Answered(Tool):
        async def run(self, arguments: dict[str, Any], context: Any, convert_result: bool = False) -> Any:
            try:
                return await super().run(arguments, context, convert_result)
            except ToolError as error:
                if isinstance(error.__cause__, ValidationError):
                    raise ToolError(_mistake(self, error.__cause__.errors())) from None
                raise

    reads = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
    tool = Answered.from_function(_answering(method), annotations=reads, structured_output=False)
    arguments = tool.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    tool.parameters["additionalProperties"] = False
    return tool


def _mistake(tool: Tool, problems: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with the arguments of a call, and which there are, in one line."""
    said = []
    for one in problems[:3]:
        name = visible(".".join(map(str, one["loc"])))[:100]
        if one["type"] == "extra_forbidden":
            said.append(f"there is no argument {name}")
        elif one["type"] == "missing":
            said.append(f"{name} is missing")
        else:
            said.append(f"{name}: {one['msg'][:1].lower()}{visible(one['msg'][1:])}")
    needed = tool.parameters.get("required", ())
    known = [name if name in needed else f"{name} (optional)" for name in tool.parameters.get("properties", {})]
    return f"{'; '.join(said)}; arguments of {tool.name}: {', '.join(known) or 'none'}"


def _answering(method: Callable[..., Any]) -> Callable[..., str]:
    """The method with its answer as text, and whatever it raises as a ToolError with the reason."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(method)
    def answer(**arguments: Any) -> str:
        try:
            return compact(method(**arguments))
        except ValueError as error:  # of the caller, or of the run's records
            reason = str(error)
        except Exception as error:  # a bug: the agent still needs to know what failed
            reason = f"{type(error).__name__}: {error} (a fault of Rankscope)"
        raise ToolError(visible(" ".join(reason.split()))[:MAX_ERROR_CHARS])

    return answer
