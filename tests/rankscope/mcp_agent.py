"""An agent with a scripted policy: it diagnoses a run or a log by the tools of `rankscope mcp` alone.

    agent = Agent(call)                         # `call(name, arguments)` asks the real client
    told = await agent.diagnose("latest")       # {"kind", "ranks", "step", "cause", "next", ...}
    agent.calls, agent.num_chars

The policy is what a prompt would say: list, verdict, the worst finding with its runbook section, and where that names a
hang the stacks, a straggler the account and a query for its steps.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Agent"]


@dataclass(slots=True)
class Agent:
    """Counts what it asks and reads."""

    call: Callable[[str, dict[str, Any]], Awaitable[str]]
    calls: list[str] = field(default_factory=list)
    num_chars: int = 0

    async def ask(self, name: str, **arguments: Any) -> Any:
        """One call; the answer as JSON, or as the text that it is."""
        text = await self.call(name, arguments)
        self.calls.append(name)
        self.num_chars += len(text)
        return json.loads(text) if text[:1] in "[{" else text

    async def diagnose(self, name: str) -> dict[str, Any]:
        """What the tools let it conclude."""
        listed = await self.ask("list_runs")
        assert name in [*(one["run"] for one in listed["runs"]), *listed["files"]]
        verdict = await self.ask("verdict", run=name)
        if not verdict["findings"]:
            return {"kind": "", "verdict": verdict["verdict"]}
        worst = verdict["findings"][0]
        whole = await self.ask("finding", run=name, finding_id=worst["id"])
        told = {**{key: worst[key] for key in ("kind", "ranks", "step", "cause", "next")}, "runbook": whole["runbook"]}
        if worst["kind"] == "hang":
            told["stacks"] = await self.ask("stacks", run=name)
        if worst["kind"] == "straggler":
            told["account"] = await self.ask("account", run=name)
            own = "forward_ns - coalesce(forward_wait_ns, 0) + backward_ns - coalesce(backward_wait_ns, 0)"
            statement = f"SELECT rank, median({own}) / 1e6 AS ms FROM steps GROUP BY rank ORDER BY 2 DESC"
            told["slowest"] = (await self.ask("sql", run=name, statement=statement))["rows"][0][0]
        return told
