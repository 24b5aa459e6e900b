"""torchcomms' flight recorder: the same entries as torch's, with three differences that are removed here.

    entries = as_torch(entries)       # unchanged where they are torch's own

1. Calls are counted over all communicators: here each group counts its own, from the first that the ring holds.
2. Calls of one side (send, recv) are among the collectives, and name no peer: left out.
3. `retired` says that a call is over, also where its device event was never seen to end; JSON has 0 for "no time yet".

The ring must be whole where there are several groups: otherwise numbers of two ranks cannot be matched.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from store.readers.dumps.recorded_call import short_text
from store.readers.untrusted.external_files import SourceError

__all__ = ["as_torch"]

_NOT_COLLECTIVE = ("send", "recv", "split", "new_window", "batch_op_issue", "finalize")


def as_torch(entries: list[Any]) -> list[Any]:
    """Entries as torch's recorder would have them. Raises SourceError where calls cannot be numbered."""
    if not entries or not _is_torchcomms(entries[0]):
        return entries
    kept = [entry for entry in entries if isinstance(entry, dict) and _operation(entry) not in _NOT_COLLECTIVE]
    groups = {str(entry.get("process_group")) for entry in kept}
    if entries[0].get("record_id") != 0 and len(groups) > 1:
        raise SourceError(
            "is of torchcomms, with several communicators and lost records: calls cannot be numbered. "
            "Enlarge its ring (max_entries)"
        )
    counted: Counter[str] = Counter()
    found: list[Any] = []
    for entry in kept:
        group = str(entry.get("process_group"))
        changed = dict(entry)
        if entries[0].get("record_id") == 0:
            changed |= {"collective_seq_id": counted[group], "record_id": len(found)}
            counted[group] += 1
        if entry.get("retired") is True:
            changed["state"] = "completed"
        found.append(changed)
    return found


def _operation(entry: dict[str, Any]) -> str:
    return short_text(entry.get("profiling_name"), 200).partition(":")[2]


def _is_torchcomms(entry: Any) -> bool:
    """Its groups are described by their backend, which is also the name's first part: `("main", "ncclx")`."""
    if not isinstance(entry, dict):
        return False
    group = entry.get("process_group")
    backend, colon, _ = short_text(entry.get("profiling_name"), 200).partition(":")
    return bool(colon) and isinstance(group, (list, tuple)) and len(group) == 2 and group[1] == backend
