"""XID errors of the NVIDIA driver, and their meanings (`xids.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from analyzers.finding import Finding, Severity
from analyzers.run.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["asks_for_another_device", "xid_findings", "xid_table"]


@cache
def xid_table() -> Mapping[str, Any]:
    """`xids.toml`: keys `xid` (code -> class, severity, action, meaning), `action` (name -> in words), `source`."""
    return tomllib.loads((Path(__file__).parent / "xids.toml").read_text(encoding="utf-8"))


def xid_findings(source: Source, ranks: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    """Findings of kind `xid`, one a code and device. `ranks`: by UUID of a device."""
    table = xid_table()
    seen: dict[tuple[int, str], list[Any]] = {}
    for event in EventLog.load(source, (event_kinds.XID,)).of(event_kinds.XID):
        seen.setdefault((event.integer("xid"), event.text("device")), []).append(event)
    findings = []
    for (code, device), events in seen.items():
        known = table["xid"].get(str(code))
        about = known or {
            "class": "unknown",
            "severity": "warning",
            "action": "watch",
            "meaning": "not in the table",
        }
        severity: Severity = about["severity"]
        who = ranks.get(device, ())
        of_rank = f" (rank {', '.join(map(str, who))})" if who else ""
        times = f", {len(events)} times" if len(events) > 1 else ""
        meaning = about["meaning"].replace(";", ",").rstrip(".")
        steps = [event.step for event in events if event.step is not None]
        findings.append(
            Finding(
                analyzer="health",
                kind="xid",
                severity=severity,
                status="fired",
                ranks=who,
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
                cause=about["class"],
                summary=f"XID {code} on {device or 'a device'}{of_rank}{times}: {meaning}.",
                evidence={
                    "xid": code,
                    "device": device,
                    "node": events[0].text("node"),
                    "count": len(events),
                    "first_wall_ns": events[0].wall_ns,
                    "message": events[0].text("message")[:2000],
                    "action": table["action"][about["action"]],
                    "source": table["source"],
                },
                advice=f"xid-{about['class']}",
                attempt=events[0].attempt if events[0].attempt >= 0 else None,
            )
        )
    return findings


def asks_for_another_device(finding: Finding) -> bool:
    """Return True for an XID after which NVIDIA's catalogue asks to replace the device."""
    known = xid_table()["xid"].get(str(finding.evidence.get("xid")), {})
    return finding.kind == "xid" and known.get("action") == "replace"
