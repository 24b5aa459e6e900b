"""The present activity of a run's ranks, as `rankscope top` shows it, and `rankscope train` below its progress bar.

    drawn = draw_ranks(folder, name="runs/latest", height=40, now_ns=time.time_ns())
    console.print(drawn.table)
    read_ranks(folder, now_ns=time.time_ns()).to_json()      # the same for programs

For a live run, own work and waiting are medians of the newest 50 steps, and the findings are those that `watch`
reported, open ones first. For a run that has ended, both cover all steps, as in `rankscope analyze`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from analyzers.diagnose import diagnose, reading_order
from analyzers.finding import Finding
from analyzers.hangs.summary import lasting
from analyzers.report.rank_rows import RankRows, rank_rows
from analyzers.report.terminal.rank_table import Heading, heading_height, rank_table
from analyzers.run.findings.open_findings import newest_reports, reported_findings, why_closed
from analyzers.run.findings.past_tense import OVER, over
from analyzers.run.live.folder_state import folder_state
from analyzers.run.live.state import RunState
from analyzers.run.policy import stall_policy
from analyzers.verdict.rank_facts import rank_facts
from analyzers.verdict.verdict import ALREADY_OVER
from analyzers.wording import counted
from probes.settings.described import TrainFacts
from probes.settings.section import read
from probes.tape.rundir import RunDir
from store import Store

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["MAX_FINDINGS", "RankScreen", "RanksNow", "draw_ranks", "read_ranks"]

MAX_FINDINGS = 4
FRAME_LINES = 5
"""Number of the table's lines that show no rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScreen:
    """The drawn table, and whether the run goes on."""

    table: RenderableType
    is_live: bool
    """True if the run may write further records."""
    has_ended: bool
    """It is also False for a run without any record, because such a run may not have begun."""
    newest: tuple[int, bool]
    """Newest attempt, or -1, and whether a step of it is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksNow:
    """The run's state, its findings in reading order, and its ranks.

    `closed`: {id: why it is over}. Closed findings come last, in a live run with the most recently closed one first.
    """

    state: RunState
    planned_steps: int | None
    world_size: int | None
    findings: tuple[Finding, ...]
    ranks: RankRows
    closed: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the ranks worst first."""
        state, ranks = self.state, self.ranks
        return {
            "state": state.word, "reason": state.reason, "is_live": state.is_live, "attempt": ranks.attempt,
            "step": ranks.step, "planned_steps": self.planned_steps, "step_ms": ranks.step_ms,
            "findings": [finding.to_json() | {"closed": self.closed.get(finding.id, "")} for finding in self.findings],
            "ranks": [asdict(row) for row in ranks.rows],
        }  # fmt: skip


def read_ranks(folder: RunDir, *, now_ns: int) -> RanksNow:
    """Read the run. Raises RunError, StoreError."""
    manifest = folder.manifest()
    with Store.open(folder) as store:
        state = folder_state(folder, store, stall_policy(manifest), now_ns=now_ns)
        ended = None if state.is_live else diagnose(store, manifest, stacks_dir=folder.stacks)
        findings, closed = _reported(store, state.attempt) if ended is None else (list(ended.fired), ended.closed)
        world_size = rank_facts(store)["world_size"]
        as_of_ns = state.as_of_ns if state.is_live else (state.last_ns or state.as_of_ns)
        found = rank_rows(store, findings, now_ns=as_of_ns, has_ended=ended is not None, closed=closed)
    # If the run has ended, no rank is still running, even if a killed rank recorded no end. So the numbers are those of
    # the report.
    if ended is not None:
        rows = tuple(replace(row, state="ended") if row.state == "running" else row for row in found.rows)
        took_ms = ended.run.get("step_ms_median")
        found = replace(found, step_ms=took_ms if isinstance(took_ms, float) else None, rows=rows)
    if state.word == "stalled":
        rows = tuple(replace(row, state="stalled") if row.state == "running" else row for row in found.rows)
        found = replace(found, rows=rows)
        silent_s = min((row.doing_s for row in rows if row.doing_s is not None), default=0.0)
        findings = [finding if finding.id in closed else lasting(finding, silent_s) for finding in findings]
    steps = read(TrainFacts, manifest).steps
    return RanksNow(
        state=state, planned_steps=int(steps) if steps else None, world_size=world_size,
        findings=tuple(findings), ranks=found, closed=closed,
    )  # fmt: skip


def draw_ranks(folder: RunDir, *, name: str, height: int, now_ns: int, width: int = 1_000) -> RankScreen:
    """Read the run and draw it in at most `height` lines, but show at least four ranks. Raises RunError, StoreError."""
    now = read_ranks(folder, now_ns=now_ns)
    state, findings = now.state, now.findings
    sentences = [
        ("", f"{ALREADY_OVER}{finding.summary}") if finding.id in now.closed else (finding.severity, finding.summary)
        for finding in findings[:MAX_FINDINGS]
    ]
    if rest := findings[MAX_FINDINGS:]:
        are_over = ", already over" if all(finding.id in now.closed for finding in rest) else ""
        sentences.append(("", f"{counted(len(rest), 'more finding')}{are_over}: rankscope analyze {shlex.quote(name)}"))
    heading = Heading(
        run=name,
        state=state.word,
        reason=state.reason,
        planned_steps=now.planned_steps,
        world_size=now.world_size,
        findings=sentences,
    )
    used = FRAME_LINES + heading_height(now.ranks, heading, width)
    table = rank_table(now.ranks, heading, max_rows=max(4, height - used))
    attempt = -1 if now.ranks.attempt is None else now.ranks.attempt
    return RankScreen(
        table=table,
        is_live=state.is_live,
        has_ended=not state.is_live and state.word != "empty",
        newest=(attempt, now.ranks.step is not None),
    )


def _reported(store: Store, attempt: int | None) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings that `watch` reported, open ones first in reading order, and {id: why it is over}."""
    reports = [one for one in newest_reports(reported_findings(store)) if one.status in ("fired", "suspect", "ok")]
    why = {one.id: "over" if one.status == "ok" else why_closed(one, attempt) for one in reports}
    closed = {name: reason for name, reason in why.items() if reason}
    still_open = sorted((one for one in reports if one.id not in closed), key=reading_order)
    ended = (replace(one, summary=one.summary.removeprefix(OVER)) for one in reports if one.id in closed)
    return [*still_open, *map(over, ended)], closed
