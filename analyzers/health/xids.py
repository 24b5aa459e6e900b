"""XID errors of the NVIDIA driver, and their meanings (`xids.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from analyzers.finding import Finding, Severity
from analyzers.health.program_faults import ENDS, failed_with
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["asks_for_replacement", "is_of_program", "xid_findings", "xid_table"]


@cache
def xid_table() -> Mapping[str, Any]:
    """Read `xids.toml`: keys `xid` (code -> class, severity, action, meaning), `action` (name -> text), `source`."""
    return tomllib.loads((Path(__file__).parent / "xids.toml").read_text(encoding="utf-8"))


def xid_findings(source: Source, ranks: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    """Findings of kind `xid`, one per code and device. `ranks`: {UUID of a device: ranks}.

    An XID that a program caused, and that ended one of its ranks, is evidence of `rank_lost` and not reported here.
    """
    seen: dict[tuple[int, str], list[Any]] = {}
    log = EventLog.load(source, (event_kinds.XID, *ENDS))
    for event in log.of(event_kinds.XID):
        if is_of_program(event.integer("xid")) and failed_with(event, log, ranks.get(event.text("device"), ())):
            continue
        seen.setdefault((event.integer("xid"), event.text("device")), []).append(event)
    findings, table = [], xid_table() if seen else {}
    for (code, device), events in seen.items():
        known = table["xid"].get(str(code))
        about = known or {
            "class": "unknown",
            "severity": "warning",
            "action": "watch",
            "meaning": "an unknown code",
        }
        severity: Severity = about["severity"]
        who = ranks.get(device, ())
        of_rank = f" (rank {', '.join(map(str, who))})" if who else ""
        times = f", {len(events)} times" if len(events) > 1 else ""
        meaning = about["meaning"].replace(";", ",").rstrip(".")
        steps = [event.step for event in events if event.step is not None]
        if is_of_program(code) and len(who) != 1:
            findings.append(_of_any_process(code, device, events, f"{meaning}{times}", is_shared=bool(who)))
            continue
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
                evidence=_evidence(code, device, events, action=table["action"][about["action"]]),
                advice=f"xid-{about['class']}",
                attempt=events[0].attempt if events[0].attempt >= 0 else None,
            )
        )
    return findings


def _evidence(code: int, device: str, events: Sequence[Any], *, action: str) -> dict[str, Any]:
    """Evidence of one XID of one device; the first event stands for all."""
    return {
        "xid": code,
        "device": device,
        "node": events[0].text("node"),
        "count": len(events),
        "first_wall_ns": events[0].wall_ns,
        "message": events[0].text("message")[:2000],
        "action": action,
        "source": xid_table()["source"],
    }


def is_of_program(code: int) -> bool:
    """Return True for an XID that the catalogue attributes to the program on the device."""
    return bool(xid_table()["xid"].get(str(code), {}).get("class") == "application")


def _of_any_process(code: int, device: str, events: Sequence[Any], meaning: str, *, is_shared: bool) -> Finding:
    """An XID caused by an unknown program: the device has several processes, or none of this run."""
    users = "several ranks use it, and none ended with a CUDA error" if is_shared else "no rank of this run uses it"
    return Finding.advise(
        "health",
        "xid",
        f"XID {code} on {device or 'a device'}: {meaning}. Any process on the device may have caused it: {users} at "
        "that time.",
        cause="application",
        evidence=_evidence(
            code,
            device,
            events,
            action="look for the process in the kernel's log (`dmesg -T | grep -i xid` has its pid)",
        ),
        attempt=events[0].attempt if events[0].attempt >= 0 else None,
    )


def asks_for_replacement(finding: Finding) -> bool:
    """Return True for an XID after which NVIDIA's catalogue asks to replace the device."""
    known = xid_table()["xid"].get(str(finding.evidence.get("xid")), {})
    return finding.kind == "xid" and known.get("action") == "replace"
