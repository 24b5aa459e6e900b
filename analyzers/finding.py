"""A finding: what an analyzer says, with the numbers that prove it.

Finding(analyzer="straggler", kind="straggler", severity="warning", status="fired", ranks=(3,), first_step=40,
        last_step=120, cause="compute", summary="rank 3 ...", evidence={"factor": Number(1.42, "1")},
        advice="straggler-compute")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

__all__ = ["SEVERITIES", "Finding", "Severity", "Status"]

Severity = Literal["critical", "warning", "info"]
Status = Literal["fired", "suspect", "advice", "ok", "insufficient_data"]
"""`advice`: nothing is broken, and something could go better. It is never a fault, an alarm or a reason to fail."""
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
"""Most severe first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One statement about a run.

    `kind` is what happened, `cause` why within the kind, `advice` the anchor in docs/runbook.md. `evidence` holds
    plain JSON values whose names carry their units (`excess_ms`, `factor_ratio`, `waiting_ranks`).
    `attempt` is the life of the worker group in which it happened, None if it is about the whole run.
    """

    analyzer: str
    kind: str
    severity: Severity
    status: Status
    summary: str
    ranks: tuple[int, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    cause: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""
    attempt: int | None = None
    cost_s: float | None = None
    """Estimated wall time lost to it, seconds."""

    @property
    def id(self) -> str:
        """The finding's name within its run, the same whenever and by whomever it is said: `straggler-0-60-r3`."""
        ranks = "-".join(f"r{rank}" for rank in self.ranks[:4])
        more = f"-and-{len(self.ranks) - 4}" if len(self.ranks) > 4 else ""
        parts = [self.kind, self.attempt, self.first_step, ranks + more]
        return "-".join(str(part) for part in parts if part not in (None, ""))

    @classmethod
    def insufficient(cls, analyzer: str, kind: str, summary: str, **more: Any) -> Finding:
        """What an analyzer says when the records do not let it judge: never that all is well."""
        return cls(
            analyzer=analyzer,
            kind=kind,
            severity="info",
            status="insufficient_data",
            summary=summary,
            advice="insufficient-data",
            **more,
        )

    @classmethod
    def advise(cls, analyzer: str, kind: str, summary: str, **more: Any) -> Finding:
        """What could go better where nothing is broken."""
        more.setdefault("advice", kind.replace("_", "-"))
        return cls(analyzer=analyzer, kind=kind, severity="info", status="advice", summary=summary, **more)

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Finding | None:
        """The finding that a `finding` event tells of; None if the event does not hold one.

        An event has an attempt even if its finding is about the whole run: the id says which it is.
        """
        try:
            found = cls(
                analyzer=str(event["analyzer"]),
                kind=str(event["finding_kind"]),
                severity=event["severity"],
                status=event["status"],
                summary=str(event["summary"]),
                ranks=tuple(int(rank) for rank in event["finding_ranks"] or ()),
                first_step=_whole_number(event["first_step"]),
                last_step=_whole_number(event["last_step"]),
                cause=str(event["cause"] or ""),
                evidence=dict(event["evidence"] or {}),
                advice=str(event["advice"] or ""),
                attempt=_whole_number(event["attempt"]),
                cost_s=None if event["cost_s"] is None else float(event["cost_s"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        if found.severity not in SEVERITIES or found.status not in get_args(Status):
            return None
        whole = replace(found, attempt=None)
        return next((one for one in (found, whole) if one.id == event.get("id")), None)

    def to_json(self) -> dict[str, Any]:
        """The finding as plain JSON values, in the order in which people read it."""
        return {
            "id": self.id,
            "analyzer": self.analyzer,
            "kind": self.kind,
            "severity": self.severity,
            "status": self.status,
            "ranks": list(self.ranks),
            "first_step": self.first_step,
            "last_step": self.last_step,
            "cause": self.cause,
            "summary": self.summary,
            "evidence": dict(self.evidence),
            "advice": self.advice,
            "attempt": self.attempt,
            "cost_s": self.cost_s,
        }


def _whole_number(value: Any) -> int | None:
    """A number out of an event, None where there is none. Raises TypeError for anything else."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TypeError(f"{type(value).__name__} in place of a whole number")
