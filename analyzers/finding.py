"""A finding: one statement about a run, with the numbers that prove it.

Finding(analyzer="straggler", kind="straggler", severity="warning", status="fired", ranks=(3,), first_step=40,
        last_step=120, cause="compute", summary="rank 3 ...", evidence={"factor_ratio": 1.42},
        advice="straggler-compute")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args

from analyzers.kinds import KINDS
from probes.tape.redaction.printable import escaped

__all__ = ["SEVERITIES", "AdviceFields", "Finding", "FurtherFields", "Severity", "Status", "evidence_of", "typed_value"]

Severity = Literal["critical", "warning", "info"]
Status = Literal["fired", "suspect", "advice", "ok", "insufficient_data"]
"""`advice`: nothing is broken, but something could be improved. Never a fault, an alarm or a reason to fail."""
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
"""Most severe first."""
UNKNOWN_IDENTITY = ("attempt", "first_step", "ranks")
"""Identity for kinds unknown to this version: from a plug-in or a newer version."""
MAX_ID_PART = 64
Plain = TypeVar("Plain", bool, float, int, str)
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9_.]")


class FurtherFields(TypedDict, total=False):
    """Fields of a finding that `insufficient` does not fill in."""

    ranks: tuple[int, ...]
    first_step: int | None
    last_step: int | None
    cause: str
    evidence: Mapping[str, object]
    attempt: int | None
    cost_s: float | None


class AdviceFields(FurtherFields, total=False):
    """Fields of a finding that `advise` does not fill in."""

    advice: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding:
    """One statement about a run.

    `kind` is what happened, `cause` why within the kind, `advice` the anchor in docs/runbook.md. `evidence` holds
    plain JSON values whose names carry their units (`excess_ms`, `factor_ratio`, `waiting_ranks`).
    `value` returns one of them with its type.
    `attempt` is the number of the worker group's launch in which it happened, None for the whole run.
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
    evidence: Mapping[str, object] = field(default_factory=dict)
    advice: str = ""
    attempt: int | None = None
    cost_s: float | None = None
    """Estimated wall time lost to it (seconds)."""

    def value(self, name: str, kind: type[Plain]) -> Plain:
        """The value `name` of the evidence as a bool, float, int or str. Raises ValueError if it is missing or of
        another type."""
        if name not in self.evidence:
            raise ValueError(f"{self.id} has no evidence {name!r}: it has {', '.join(self.evidence) or 'none'}")
        return typed_value(self.evidence[name], kind, name)

    @property
    def identity(self) -> tuple[object, ...]:
        """Key that identifies the finding over time: its kind and the identity fields of its `Kind`."""
        kind = KINDS.get(self.kind)
        return (self.kind, *(self._value_of(name) for name in (kind.identity if kind else UNKNOWN_IDENTITY)))

    @property
    def id(self) -> str:
        """The finding's name within its run, the same live and post-mortem: `straggler-0-r3`."""
        return "-".join(part for part in map(_id_part, self.identity) if part)

    def __str__(self) -> str:
        return f"{self.id} ({self.severity}, {self.status}): {self.summary}"

    def __repr__(self) -> str:
        return f"Finding({self})"

    def _repr_markdown_(self) -> str:
        """Summary and evidence, for a notebook."""
        rows = [f"| {escaped(name)} | {escaped(value)} |" for name, value in self.evidence.items()]
        title = f"**{escaped(self.id)}** ({self.severity}, {self.status}): {escaped(self.summary)}"
        return "\n".join([title, *(["", "| evidence | |", "|---|---|", *rows] if rows else [])])

    def _value_of(self, name: str) -> object:
        in_evidence = name.removeprefix("evidence.")
        value = self.evidence.get(in_evidence) if in_evidence != name else getattr(self, name)
        return value if isinstance(value, (str, int, float, tuple, type(None))) else str(value)

    @classmethod
    def insufficient(cls, analyzer: str, kind: str, summary: str, **more: Unpack[FurtherFields]) -> Finding:
        """Make a finding that says that the records do not suffice for a judgement. It never means that all is well."""
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
    def not_judged(
        cls,
        analyzer: str,
        kind: str,
        what: str,
        why: str,
        evidence: Mapping[str, object] | None = None,
        *,
        attempt: int | None = None,
        in_part: bool = False,
    ) -> Finding:
        """Like `insufficient`, with the summary "<what>: <why>."; analyses preset the first three by `partial`.

        With `in_part` the check was made on the other records. It is then a valid result that nothing was found in
        these.
        """
        more = {"is_partly_checked": True} if in_part else {}
        return cls.insufficient(
            analyzer, kind, f"{what}: {why}.", evidence={**(evidence or {}), **more}, attempt=attempt
        )

    @classmethod
    def advise(cls, analyzer: str, kind: str, summary: str, **more: Unpack[AdviceFields]) -> Finding:
        """Make a piece of advice: nothing is broken, but something could be improved."""
        more.setdefault("advice", kind.replace("_", "-"))
        return cls(analyzer=analyzer, kind=kind, severity="info", status="advice", summary=summary, **more)

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Finding | None:
        """The finding in a `finding` event; None if the event does not hold one.

        An event has an attempt even if its finding is about the whole run (attempt None), so the finding gets the
        attempt with which its id equals the event's. A finding of an unknown kind keeps the event's attempt, because
        this version does not know how its id is formed.
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
        given = event.get("id")
        candidates = (found, replace(found, attempt=None))
        matching = next((one for one in candidates if given == one.id), None)
        return found if matching is None and found.kind not in KINDS else matching

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Finding:
        """The finding from the result of `to_json`."""
        values = {name: fields[name] for name in fields if name != "id"}
        return cls(**{**values, "ranks": tuple(fields["ranks"])})

    def to_json(self) -> dict[str, object]:
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


def typed_value(value: object, kind: type[Plain], name: str) -> Plain:
    """The value as a `kind`; a whole number also passes as a float. Raises ValueError for None or a value
    of another type.
    """
    if kind is float and isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        return kind(value)
    if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    what = "null" if value is None else f"of type {type(value).__name__}"
    raise ValueError(f"{name} is {what}, not {kind.__name__}")


def evidence_of(finding: Finding) -> Mapping[str, Any]:
    """The evidence, for modules that know the types of the values that their analysis wrote."""
    return finding.evidence


def _id_part(value: object) -> str:
    """Format a value of an identity for an id: letters, digits and `_`, joined by `-`."""
    if isinstance(value, tuple):
        ranks = "-".join(f"r{rank}" for rank in value[:4])
        return ranks + (f"-and-{len(value) - 4}" if len(value) > 4 else "")
    return "" if value is None else _NOT_IN_ID.sub("_", str(value))[:MAX_ID_PART]


def _whole_number(value: Any) -> int | None:
    """A number from an event, None if missing. Raises TypeError for anything else."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TypeError(f"{type(value).__name__} instead of a whole number")
