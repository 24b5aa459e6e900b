"""What failed only while the run was live is listed as not judged afterwards."""

from __future__ import annotations

from analyzers.diagnose import diagnose
from store.readers.memory_store import MemoryStore


def test_each_reason_is_one_line() -> None:
    failed = {"analyzer": "plug-in team", "reason": "it ended its process with exit code 7"}
    other = {"analyzer": "straggler", "reason": "ValueError: x"}
    with MemoryStore() as store:
        store.add(
            "events", [{"rank": -1, "kind": "analyzer_failed", "detail": told} for told in (failed, failed, other)]
        )
        told = [
            one.summary for one in diagnose(store, {}).not_judged if one.summary.startswith("While the run was live")
        ]
    assert told == [
        "While the run was live, plug-in team failed: It ended its process with exit code 7.",
        "While the run was live, straggler failed: ValueError: x.",
    ]
