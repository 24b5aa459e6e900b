"""Questions about the runs of a folder, for agents on call: a server of the Model Context Protocol that only reads.

    make_server(Path("runs")).run("stdio")

Runs are opened by their names in the folder, so no call leads out of it. SQL goes through the console that is locked
down: one reading statement, no files, no network, in a process with limits of memory and time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope import __version__
from rankscope.api import Run
from store.runs_folder import RunsFolder

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

__all__ = ["make_server"]

MAX_RUNS = 50
MAX_ROWS = 200
MAX_STACK = 20_000
LIMIT_S = 20.0
_INSTRUCTIONS = (
    "Records of distributed PyTorch training runs. Start with list_runs, then verdict; finding has the evidence of one "
    "finding and the runbook's section. Times are nanoseconds. Findings name ranks; they never claim more than was "
    "recorded."
)


def make_server(runs_dir: Path) -> MCPServer[Any]:
    """The server over the runs of one folder. Raises ModuleNotFoundError without the extra `mcp`."""
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    server: MCPServer[Any] = MCPServer("rankscope", version=__version__, instructions=_INSTRUCTIONS, log_level="ERROR")
    tools = _Tools(RunsFolder(runs_dir))
    reads = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
    for tool in (
        tools.list_runs, tools.verdict, tools.finding, tools.account, tools.sql, tools.stacks, tools.compare,
        tools.runbook,
    ):  # fmt: skip
        server.tool(annotations=reads)(tool)
    return server


class _Tools:
    """One method a tool; what it raises is the tool's error, one line."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder
        self._opened: dict[str, Run] = {}

    def list_runs(self) -> list[dict[str, Any]]:
        """List the runs, the newest first: name, state, step, number of ranks."""
        found = []
        for name in self._folder.run_ids()[:MAX_RUNS]:
            try:
                run = self._run(name)
                state = run.state
                about = {"state": state.word, "reason": state.reason, "step": state.step}
                found.append({"run": name, **about, "world_size": run.manifest.get("world_size")})
            except ValueError as error:  # a damaged run must not hide the others
                found.append({"run": name, "error": str(error)})
        return found

    def verdict(self, run: str = "latest") -> dict[str, Any]:
        """Say what went wrong in a run, on which rank and why: the verdict, and all findings in one line each."""
        from analyzers.report.wording.explained import next_step, why

        diagnosis = self._run(run).diagnose()
        return {
            "verdict": diagnosis.verdict,
            "findings": [
                {"id": finding.id, "kind": finding.kind, "severity": finding.severity, "status": finding.status,
                 "ranks": list(finding.ranks), "step": finding.first_step, "cause": finding.cause,
                 "summary": finding.summary, "why": why(finding), "next": next_step(finding)}
                for finding in diagnosis.fired
            ],
            "not_judged": [finding.summary for finding in diagnosis.not_judged],
        }  # fmt: skip

    def finding(self, finding_id: str, run: str = "latest") -> dict[str, Any]:
        """Give the whole evidence of one finding, by its id from verdict, with the runbook's section."""
        from analyzers.report.json import plain
        from analyzers.report.runbook_sections import advice_text

        for found in self._run(run).diagnose().findings:
            if found.id == finding_id:
                return {"finding": plain(found.to_json()), "runbook": advice_text(found.advice)}
        raise ValueError(f"run {run} has no finding {finding_id[:100]!r}: see verdict")

    def account(self, run: str = "latest") -> dict[str, Any]:
        """Say where the wall time went: seconds by category (mean over the ranks), and the gain without stragglers."""
        from analyzers.report.json import plain

        diagnosis = self._run(run).diagnose()
        goodput, what_if = diagnosis.goodput, diagnosis.what_if
        return {
            "seconds": None if goodput is None else plain(goodput.known_seconds),
            "wall_s": None if goodput is None else goodput.wall_s,
            "what_if": None if what_if is None else plain(what_if.to_json()),
        }

    def sql(self, statement: str, run: str = "latest") -> dict[str, Any]:
        """Run one SELECT over a run's tables (steps, collectives, spans, gradients, health, events, findings, ...).

        At most 200 rows come back. DESCRIBE and SHOW TABLES work.
        """
        from analyzers.report.json import plain
        from store.sql.process import ask

        answer = ask(self._folder.open(run), statement, max_rows=MAX_ROWS, limit_s=LIMIT_S)
        return {"columns": list(answer.names), "rows": plain([list(row) for row in answer.rows])}

    def stacks(self, run: str = "latest") -> dict[str, str]:
        """Return the Python stacks that were taken when the run hung, by file; empty where none were."""
        return {name: text[:MAX_STACK] for name, text in self._run(run).stacks.items()}

    def compare(self, run_a: str, run_b: str) -> dict[str, Any]:
        """Compare two runs: settings, versions, speed, phases, loss, findings, goodput. B against A."""
        from analyzers.report.json import plain

        found: dict[str, Any] = plain(self._run(run_a).compare(self._run(run_b)).to_json())
        return found

    def runbook(self, anchor: str) -> str:
        """Return a section of the runbook, by the anchor that a finding's `next` names."""
        from analyzers.report.runbook_sections import advice_text

        if not (text := advice_text(anchor)):
            raise ValueError(f"the runbook has no section {anchor[:100]!r}")
        return text

    def _run(self, name: str) -> Run:
        folder = self._folder.open(name)
        return self._opened.setdefault(folder.run_id, Run(folder))
