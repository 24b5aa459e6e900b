"""The questions that an agent can ask about the runs of a folder, one method per tool.

    Tools(RunsFolder(Path("runs"))).verdict("latest")

Runs and files are opened by their names in the folder, so no call can reach outside it. SQL is restricted to one
read-only statement without file or network access, in a process with limits on memory and time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rankscope.api import Evidence, Run
from rankscope.query_result import distinct_names
from store.runs_folder import RunsFolder
from watch.exporting.prometheus.endpoint import TARGETS_FILE

__all__ = ["Tools"]

MAX_RUNS = 50
MAX_FILES = 50
MAX_ROWS = 200
MAX_STACK_CHARS = 4_000
LIMIT_S = 20.0


class Tools:
    """One method per tool. An exception is the tool's error, one line."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder
        self._opened: dict[str, Run] = {}

    def all(self) -> tuple[Callable[..., Any], ...]:
        """The tools, in the order in which they are listed to an agent."""
        return (
            self.list_runs, self.verdict, self.finding, self.account, self.sql, self.stacks, self.compare, self.runbook,
        )  # fmt: skip

    def list_runs(self) -> dict[str, Any]:
        """List the runs, newest first (name, state, step, number of ranks), and files of jobs that Rankscope did not
        record (logs, dumps, traces). verdict and finding accept both kinds of name."""
        found, names = [], self._folder.run_ids()
        for name in names[:MAX_RUNS]:
            try:
                run = self._run(name)
                state = run.state
                about = {"state": state.word, "reason": state.reason, "step": state.step}
                found.append({"run": name, **about, "world_size": run.manifest.get("world_size")})
            except ValueError as error:  # this run is damaged; list the others all the same
                found.append({"run": name, "error": str(error)})
        files = self._files()
        answer: dict[str, Any] = {"runs": found, "files": files[:MAX_FILES]}
        if len(names) > MAX_RUNS or len(files) > MAX_FILES:
            answer["cut"] = [
                f"{len(found)} of {len(names)} runs and {len(files[:MAX_FILES])} of {len(files)} files shown"
            ]
        return answer

    def verdict(self, run: str = "latest") -> dict[str, Any]:
        """Return what went wrong in a run, on which rank and why: the verdict, and each finding in one line. `run` is a
        name from list_runs: a run, a file or a folder of files.
        """
        from analyzers.report.wording.explained import next_step, why

        diagnosis = self._opened_by_name(run).diagnose()
        return {
            "verdict": diagnosis.verdict,
            "findings": [
                {"id": finding.id, "kind": finding.kind, "severity": finding.severity, "status": finding.status,
                 "ranks": list(finding.ranks), "first_step": finding.first_step, "cause": finding.cause,
                 "summary": finding.summary, "why": why(finding), "next": next_step(finding, run)}
                for finding in diagnosis.cards
            ],
            "not_judged": [finding.summary for finding in diagnosis.not_judged],
        }  # fmt: skip

    def finding(self, finding_id: str, run: str = "latest") -> dict[str, Any]:
        """Return all evidence of one finding (its id comes from verdict) and its runbook section."""
        from analyzers.report.runbook_sections import advice_text

        wanted = finding_id.rpartition("finding=")[2].strip()  # also accept the link to the finding's page
        findings = self._opened_by_name(run).diagnose().findings
        for found in findings:
            if found.id == wanted:
                return {"finding": found.to_json(), "runbook": advice_text(found.advice)}
        known = ", ".join(found.id for found in findings if found.status in ("fired", "suspect"))[:500]
        raise ValueError(f"{run[:100]} has no finding {wanted[:100]!r}; it has {known or 'none'}")

    def account(self, run: str = "latest") -> dict[str, Any]:
        """Return where the wall time went: mean seconds by category over the ranks, and the gain without stragglers."""
        from analyzers.report.wording.account_lines import what_if_line

        diagnosis = self._run(run).diagnose()
        goodput, what_if = diagnosis.goodput, diagnosis.what_if
        return {
            "seconds": None if goodput is None else goodput.known_seconds,
            "wall_s": None if goodput is None else goodput.wall_s,
            "what_if": None if what_if is None else what_if.to_json(),
            "what_if_says": None if what_if is None else what_if_line(what_if, diagnosis.findings),
        }

    def sql(self, statement: str, run: str = "latest") -> dict[str, Any]:
        """Run one SELECT over a run's tables (steps, collectives, spans, gradients, health, events, findings, ...).

        Returns at most 200 rows; `cut` is set if there are more. DESCRIBE and SHOW TABLES work.
        """
        from store.sql.process import ask

        self._run(run)  # raises an error if there is no such run
        answer = ask(self._folder.open(run), statement, max_rows=MAX_ROWS, limit_s=LIMIT_S)
        found: dict[str, Any] = {
            "columns": list(distinct_names(answer.names)),
            "rows": [list(row) for row in answer.rows],
        }
        if answer.is_cut:
            found["cut"] = [f"only the first {MAX_ROWS} rows: aggregate, or use LIMIT and OFFSET"]
        return found

    def stacks(self, run: str = "latest", file: str = "") -> dict[str, Any]:
        """Return the Python stacks that were taken when the run hung, by file; empty if none were taken. `file`: return
        more of this file's text, and no other file.
        """
        found = self._run(run).stacks
        if file and file not in found:
            raise ValueError(f"run {run[:100]} has no stacks {file[:100]!r}; it has {', '.join(found)[:500] or 'none'}")
        if file:
            return {file: found[file]}
        long = [name for name, text in found.items() if len(text) > MAX_STACK_CHARS]
        answer: dict[str, Any] = {name: text[:MAX_STACK_CHARS] for name, text in found.items()}
        if long:
            answer["cut"] = [f"{len(long)} files cut to {MAX_STACK_CHARS} characters; pass `file` to get more of one"]
        return answer

    def compare(self, run_a: str, run_b: str) -> dict[str, object]:
        """Compare two runs: settings, versions, speed, phases, loss, findings, goodput; B relative to A."""
        a, b = self._run(run_a), self._run(run_b)
        if a.path.resolve() == b.path.resolve():
            raise ValueError(f"{run_a} and {run_b} are the same run: name different runs")
        found: dict[str, object] = a.compare(b).to_json()
        return found

    def runbook(self, anchor: str) -> str:
        """Return a section of the runbook, by the anchor (or command) in a finding's `next`."""
        from analyzers.report.runbook_sections import advice_text, anchor_of, nearest

        wanted = anchor_of(anchor)
        if text := advice_text(wanted):
            return text
        near = ", ".join(nearest(wanted))
        raise ValueError(f"the runbook has no section {anchor[:100]!r}{f'; similar: {near}' if near else ''}")

    def _opened_by_name(self, name: str) -> Run | Evidence:
        """Open a run, or files. Raises RunError or SourceError."""
        if self._folder.resolved(name) is None and name in self._files():
            return Evidence([self._folder.path / name])
        return self._run(name)

    def _files(self) -> list[str]:
        """Names of files and folders next to the runs, without links, which may point outside the folder."""
        runs = set(self._folder.run_ids())
        try:
            with os.scandir(self._folder.path) as entries:
                return sorted(
                    entry.name
                    for entry in entries
                    if entry.name not in (*runs, TARGETS_FILE)
                    and not entry.is_symlink()
                    and not entry.name.startswith(".")
                )
        except OSError:
            return []

    def _run(self, name: str) -> Run:
        if self._folder.resolved(name) is None and name in self._files():
            raise ValueError(f"{name[:100]} is not a recorded run but files; only verdict and finding read files")
        folder = self._folder.open(name)
        return self._opened.setdefault(folder.run_id, Run(folder))
