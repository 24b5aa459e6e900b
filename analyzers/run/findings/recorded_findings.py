"""Findings that plug-ins recorded while the run lived, of kinds that are not known here: shown as they were recorded.

    for finding in recorded_findings(store): ...    # "The loss is flat (recorded live by plug-in plateau, which ...)."

A run is read elsewhere, too, where other plug-ins are installed: what those of the run found must not vanish.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analyzers.finding import Finding
from analyzers.kinds import KINDS
from analyzers.plugin_calls.named import plugin_name, with_note
from analyzers.run.records.event_log import parsed_detail
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["recorded_findings"]

MAX_EVENTS = 2_000


def recorded_findings(source: Source) -> list[Finding]:
    """The newest report of each; one that was over when the run ended has `ongoing` = False in its evidence."""
    if not source.has("events"):
        return []
    rows = source.rows(
        "SELECT detail FROM events WHERE kind = ? ORDER BY wall_ns DESC LIMIT ?", [event_kinds.FINDING, MAX_EVENTS]
    )
    found: dict[str, Finding] = {}
    over: set[str] = set()
    for event in (parsed_detail(detail) for (detail,) in rows):
        name, kind = str(event.get("id")), str(event.get("finding_kind"))
        if name in found or kind in KINDS:
            continue
        finding = Finding.of_event(event)
        if finding is None:
            continue
        if finding.status == "ok":
            over.add(name)
        elif finding.status in ("fired", "suspect"):
            found[name] = _marked(finding, is_over=name in over)
    return list(found.values())


def _marked(finding: Finding, *, is_over: bool) -> Finding:
    plugin = plugin_name(finding)
    by = (
        f"plug-in {plugin}, which is not installed here"
        if plugin
        else "plug-in or version of Rankscope that is not installed here"
    )
    evidence: dict[str, Any] = {**finding.evidence, **({"ongoing": False} if is_over else {})}
    return replace(
        finding,
        summary=with_note(finding.summary, f"recorded live by {by}" if plugin else f"recorded live by a {by}"),
        evidence=evidence,
    )
