"""Text and evidence of a memory snapshot, from a run's event or from a file.

evidence |= snapshot_evidence(asdict(state), unused_bytes=...)
site_text({"at": "model/attention.py:88 in forward", "bytes": 12 << 30, "blocks": 64})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.finding import Finding
from analyzers.memory.allocator_message import others_hold_it
from analyzers.wording import counted, is_number, size_text

__all__ = ["is_fragmented", "site_text", "snapshot_evidence", "why_text"]

MAX_SHOWN = 5
NO_STACK = "without a Python stack"


def snapshot_evidence(about: Mapping[str, Any], *, unused_bytes: int | None) -> dict[str, Any]:
    """Evidence of a finding from a snapshot, which may be damaged. What was not recorded is None or absent, never 0."""
    rows: Any = about.get("sites")
    sites = [row for row in rows if isinstance(row, Mapping) and is_number(row.get("bytes"))] if _is_list(rows) else []
    found: dict[str, Any] = {
        name: about[name] if is_number(about.get(name)) else None
        for name in ("reserved_bytes", "allocated_bytes", "requested_bytes", "device_free_bytes")
    }
    found["unused_bytes"] = unused_bytes
    found["asked_at"] = str(about.get("asked_at") or "")[:200] or None
    if about.get("has_stacks") is True:
        found["largest_allocations"] = [site_text(row) for row in sites[:MAX_SHOWN]]
        named = next((row["at"] for row in sites if isinstance(row.get("at"), str) and row["at"]), None)
        found["largest_site"] = named[:200] if named else None
    return found


def site_text(site: Mapping[str, Any]) -> str:
    """Line, bytes and number of blocks."""
    blocks = counted(site.get("blocks"), "block")
    at = str(site.get("at") or "")[:200] or NO_STACK
    return f"{at}: {size_text(site.get('bytes'))}{f' in {blocks}' if blocks else ''}"


def is_fragmented(evidence: Mapping[str, Any]) -> bool:
    """Return True if the cached, unused memory was larger than the request, but no single free block was. False if
    other processes fill the device, which is then the cause.
    """
    unused, requested = evidence.get("unused_bytes"), evidence.get("requested_bytes")
    if others_hold_it(evidence):
        return False
    return is_number(unused) and is_number(requested) and 0 < requested <= unused  # type: ignore[operator]


def why_text(finding: Finding) -> str:
    """What uses the memory: the largest allocation, this and other processes, the cache. "" if nothing is known."""
    facts = finding.evidence
    largest: Any = facts.get("largest_allocations")
    parts = []
    if _is_list(largest) and largest:
        parts.append(f"largest in use: {largest[0]}")
    if is_number(facts.get("others_bytes")) and is_number(facts.get("own_bytes")):
        own, others = size_text(facts["own_bytes"]), size_text(facts["others_bytes"])
        parts.append(f"{own} of the device in use by this process, {others} by others")
    if is_number(facts.get("unused_bytes")):
        parts.append(
            f"{size_text(facts['unused_bytes'])} of {size_text(facts.get('reserved_bytes'))} cached and unused"
        )
    return ", ".join(parts)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
