"""The verdict when a run is stopped: findings reported by `watch` that are still open.

for line in open_verdict(run): console.print(line)

Only the nodes' events are read: no store is opened, and no process waited for.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.markup import escape

from analyzers.diagnose import reading_order
from analyzers.finding import Finding
from analyzers.hangs.summary import SO_FAR, lasting
from analyzers.kinds import OUR_KINDS
from analyzers.report.wording.explained import next_step, why
from analyzers.run.findings.open_findings import newest_reports, why_closed
from analyzers.run.findings.past_tense import at_run_end
from probes.tape import event_kinds
from probes.tape.attempts import newest as newest_attempt
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from watch.sharing.pack import TAIL_BYTES

__all__ = ["STOPPING", "VERDICT_INDENT", "last_verdict", "open_critical", "open_verdict", "verdict_lines"]

STOPPING = "[dim]Stopping. Ctrl-C again ends everything at once.[/]"
NOTHING_REPORTED = "No problems were found during the run. Its last records were not judged."
VERDICT_INDENT = 9
"""Column of the text after `Verdict`, `Why` and `Next`."""
_COLOURS = {"critical": "red", "warning": "yellow"}


def open_verdict(run: RunDir) -> list[str]:
    """Markup lines: verdict, evidence and next step of the open critical findings; empty if there are none."""
    found = open_critical(run)
    return verdict_lines(found[0], "\n".join(finding.summary for finding in found)) if found else []


def last_verdict(run: RunDir) -> list[str]:
    """Markup lines for an end that leaves no time to read the last records: the worst open finding, or a line that
    nothing was reported.
    """
    found = [at_run_end(finding) for finding in _open(run)]
    if found:
        return verdict_lines(found[0], "\n".join(finding.summary for finding in found).replace(SO_FAR, ""))[:1]
    return verdict_lines(None, NOTHING_REPORTED)


def open_critical(run: RunDir) -> list[Finding]:
    """Open critical findings of Rankscope, in the order of the verdict. Findings of plug-ins appear only in the later
    verdict, because no plug-in may be started during a stop.
    """
    return [finding for finding in _open(run) if finding.severity == "critical"]


def _open(run: RunDir) -> list[Finding]:
    events = [event for _, folder in run.node_dirs() for event in _findings(folder / "events.jsonl")]
    events.sort(key=lambda event: int(event.get("wall_ns") or 0), reverse=True)
    reports = newest_reports(found for found in map(_as_of_now, events) if found is not None)
    attempt = newest_attempt(run, default=0)
    fired = (f for f in reports if f.kind in OUR_KINDS and f.status == "fired")
    return sorted((f for f in fired if not why_closed(f, attempt)), key=reading_order)


def _as_of_now(event: dict[str, Any]) -> Finding | None:
    """The finding in an event. A hang's duration is extended to now."""
    found, when_ns = Finding.of_event(event), int(event.get("wall_ns") or 0)
    silent_s = found.evidence.get("silent_s") if found is not None else None
    if found is None or not when_ns or not isinstance(silent_s, (int, float)):
        return found
    return lasting(found, silent_s + (time.time_ns() - when_ns) / 1e9)


def verdict_lines(worst: Finding | None, verdict: str, run: object = "") -> list[str]:
    """Markup lines for a terminal. `worst`: None if nothing was found. `run`: the run's folder as the user types it."""
    colour = _COLOURS.get(worst.severity, "cyan") if worst else "green"
    first, *further = verdict.splitlines()
    lines = [f"[bold]Verdict[/]  [{colour}]{escape(first)}[/]", *(f"         {escape(line)}" for line in further)]
    if worst:
        if (reason := why(worst)) != worst.summary:
            lines.append(f"[bold]Why[/]      {escape(reason)}")
        lines.append(f"[bold]Next[/]     {escape(next_step(worst, run))}")
    return lines


def _findings(path: Path) -> list[dict[str, Any]]:
    """Events of findings among the newest lines of a file; an incomplete first line is skipped."""
    try:
        events = read_events(path, max(0, path.stat().st_size - TAIL_BYTES))[0]
    except OSError:
        return []
    return [event for event in events if event["kind"] == event_kinds.FINDING]
