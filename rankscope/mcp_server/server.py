"""The server: each tool answers with one compact JSON text of bounded length, and each error with a one-line reason."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzers.report.json import plain
from probes.settings.plain_errors import in_words
from probes.tape.redaction.printable import visible
from rankscope import __version__
from rankscope.mcp_server.tools import Tools
from store.runs_folder import RunsFolder

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.tools import Tool

__all__ = ["MAX_ANSWER_CHARS", "compact", "make_server"]

MAX_ANSWER_CHARS = 16_000
"""Maximum length of one answer: about four thousand tokens."""
DIGITS = 6
"""Significant digits of a number that is not whole."""

MAX_ERROR_CHARS = 1_000
_INSTRUCTIONS = (
    "Records of distributed PyTorch training runs, and files of jobs that were not recorded. Start with list_runs, "
    "then verdict; finding has the evidence of one finding and the runbook's section. Columns that end in _ns are "
    "nanoseconds. Findings name ranks; they never claim more than was recorded. If an answer is shortened, "
    "`cut` says what is missing."
)


def make_server(runs_dir: Path) -> MCPServer[Any]:
    """Create the server over the runs of one folder. Raises ModuleNotFoundError without the extra `mcp`."""
    from mcp.server.mcpserver import MCPServer

    tools = Tools(RunsFolder(runs_dir))
    return MCPServer(
        "rankscope", version=__version__, instructions=_INSTRUCTIONS, log_level="CRITICAL",
        tools=[_tool(one) for one in tools.all()],
    )  # fmt: skip


def _tool(method: Callable[..., Any]) -> Tool:
    """Create a tool that refuses unknown arguments, with one line that lists the valid ones."""
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
    """One line about invalid arguments of a call, with the arguments that the tool takes."""
    mistakes = []
    for one in problems[:3]:
        name = visible(".".join(map(str, one["loc"])))[:100]
        if one["type"] == "extra_forbidden":
            mistakes.append(f"there is no argument {name}")
        elif one["type"] == "missing":
            mistakes.append(f"{name} is missing")
        else:
            message = in_words(one["msg"])
            mistakes.append(f"{name}: {message[:1].lower()}{visible(message[1:])}")
    needed = tool.parameters.get("required", ())
    known = [name if name in needed else f"{name} (optional)" for name in tool.parameters.get("properties", {})]
    return f"{'; '.join(mistakes)}; arguments of {tool.name}: {', '.join(known) or 'none'}"


def _answering(method: Callable[..., Any]) -> Callable[..., str]:
    """Wrap a method: its answer becomes text, and any exception a ToolError with the reason."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(method)
    def answer(**arguments: Any) -> str:
        try:
            return compact(method(**arguments))
        except ValueError as error:  # an error of the caller, or in the run's records
            reason = str(error)
        except Exception as error:  # a bug: the agent still needs to know what failed
            reason = f"{type(error).__name__}: {error} (a fault of Rankscope)"
        raise ToolError(visible(" ".join(reason.split()))[:MAX_ERROR_CHARS])

    return answer


def compact(answer: Any) -> str:
    """Convert an answer to JSON of at most `MAX_ANSWER_CHARS`; a text is unchanged."""
    if isinstance(answer, str):
        return answer if len(answer) <= MAX_ANSWER_CHARS else f"{answer[:MAX_ANSWER_CHARS]}\n(cut)"
    found = {"answer": _rounded(plain(answer))}
    sizes: dict[str, int] = {}
    while len(text := _text(found["answer"], sizes, found)) > MAX_ANSWER_CHARS:
        path, holder, key = max(_parts(found), key=lambda part: _length(part[1][part[2]]))
        value = holder[key]
        sizes.setdefault(path, len(value))
        keep = max(1, min(len(value) - 1, int(len(value) * 0.9 * MAX_ANSWER_CHARS / len(text))))
        if isinstance(value, dict):
            holder[key] = dict(list(value.items())[:keep])
        else:
            holder[key] = value[:keep]
    return text


def _text(answer: Any, sizes: dict[str, int], found: dict[str, Any]) -> str:
    if sizes and isinstance(answer, dict):
        kept = {path: holder[key] for path, holder, key in _parts(found, least=1)}
        cut = [f"{path}: {len(kept[path])} of {size} shown" for path, size in sizes.items() if path in kept]
        answer = answer | {"cut": [*answer.get("cut", []), *cut]}
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False)


def _parts(value: Any, path: str = "", *, least: int = 2) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, holder, key) for each text, list and mapping with at least `least` items in the answer."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        where = "" if not path and key == "answer" else f"{path}.{key}" if path else str(key)
        if where and key != "cut" and isinstance(item, (str, list, dict)) and len(item) >= least:
            yield where, value, key
        yield from _parts(item, where, least=least)


def _length(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
