"""The findings of a run as the pages list them: the diagnosis, and what `watch` has said since it was made.

    known = known_findings(diagnosis, queries.findings_said(store))
    found = pick(known, "straggler-0-60-r3")

A diagnosis of a live run is some seconds old; `watch` speaks within one. So what it said and the diagnosis does not
have (same kind, attempt and ranks or step) is added, and nothing is judged here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.diagnose import Diagnosis
from analyzers.finding import SEVERITIES, Finding

__all__ = ["known_findings", "pick"]


def known_findings(diagnosis: Diagnosis | None, said: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Fired and suspected findings, the worst first."""
    found = list(diagnosis.fired) if diagnosis is not None else []
    newest: dict[tuple[object, ...], Finding] = {}
    for row in said:  # the newest word comes first
        finding = _from_row(row)
        newest.setdefault((finding.kind, finding.attempt, finding.ranks, finding.first_step), finding)
    for finding in newest.values():
        if finding.status in ("fired", "suspect") and not any(_same(finding, other) for other in found):
            found.append(finding)
    if diagnosis is None:
        found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return found


def pick(findings: Sequence[Finding], finding_id: str) -> Finding | None:
    """The finding of that id, else the one that it has become: a live straggler's first step may move."""
    exact = [finding for finding in findings if finding.id == finding_id]
    if exact:
        return exact[0]
    kind = finding_id.split("-")[0]
    ranks = [part for part in finding_id.split("-") if part[:1] == "r" and part[1:].isdigit()]
    alike = [f for f in findings if f.kind == kind and [f"r{rank}" for rank in f.ranks[:4]] == ranks]
    return alike[0] if alike else None


def _same(a: Finding, b: Finding) -> bool:
    if a.kind != b.kind or (a.attempt is not None and b.attempt is not None and a.attempt != b.attempt):
        return False
    if a.ranks and a.ranks == b.ranks:
        return True
    return a.first_step is not None and a.first_step == b.first_step


def _from_row(row: Mapping[str, Any]) -> Finding:
    severity, status = str(row["severity"]), str(row["status"])
    return Finding(
        analyzer=str(row["analyzer"] or ""),
        kind=str(row["finding_kind"] or "finding"),
        severity=severity if severity in SEVERITIES else "info",  # type: ignore[arg-type]
        status=status if status in ("fired", "suspect", "ok") else "insufficient_data",  # type: ignore[arg-type]
        summary=str(row["summary"] or ""),
        ranks=tuple(int(rank) for rank in row["finding_ranks"] or ()),
        first_step=row["first_step"],
        last_step=row["last_step"],
        cause=str(row["cause"] or ""),
        evidence=_evidence(row["evidence"]),
        advice=str(row["advice"] or ""),
        attempt=row["attempt"],
    )


def _evidence(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}
