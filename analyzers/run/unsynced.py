"""Records that `watch` could not put on the disk: they are read here, and a power cut may lose them.

`watch` writes an event for the first file that each kind of error concerns, so more ranks than the named may be
concerned. Links and the like are left out: they are not records.
"""

from __future__ import annotations

import re

from analyzers.finding import Finding
from analyzers.run.event_log import EventLog
from analyzers.source import Source
from analyzers.wording import ranks_text
from probes.tape import event_kinds
from probes.tape.safe_open import LINK, NOT_PLAIN

__all__ = ["unsynced_records"]

_RANK = re.compile(r"^tapes/attempt-\d{1,9}/rank-(\d{1,9})\b")
_NODE = re.compile(r"^tapes(?:/node-| of node )(\d{1,9})\b")


def unsynced_records(source: Source) -> list[Finding]:
    """At most one finding of kind `records`."""
    events = EventLog.load(source, (event_kinds.HEALTH_FAILED,)).all()
    reasons = [event.text("reason") for event in events if event.text("source") == "tape"]
    reasons = [reason for reason in reasons if LINK not in reason and NOT_PLAIN not in reason]
    if not reasons:
        return []
    ranks = sorted({int(found[1]) for reason in reasons if (found := _RANK.match(reason))})
    nodes = sorted({int(found[1]) for reason in reasons if (found := _NODE.match(reason))})
    named = [*([ranks_text(ranks)] if ranks else []), *(f"node {node}" for node in nodes[:3])]
    which = f", those of {', '.join(named)} among them" if named else ""
    return [
        Finding.insufficient(
            "coverage",
            "records",
            f"Watch could not sync records to the disk{which}, so a power cut may lose them: look for disk "
            "errors with `dmesg`, and copy the run's folder to another one.",
            evidence={"reasons": reasons[:10]},
        )
    ]
