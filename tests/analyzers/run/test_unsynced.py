"""Records that could not be synced to the disk are named in the report, once; a link among them is none."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from analyzers.diagnose import diagnose
from analyzers.run.analyze import unsynced_records
from analyzers.verdict.verdict import LISTED_BELOW
from probes.tape import event_kinds
from probes.tape.files.safe_open import LINK
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.factories import make_run
from tests.sentences import assert_plain
from watch.records import tape_sync
from watch.records.tape_sync import TapeSync

EIO = OSError(errno.EIO, "Input/output error")


def summaries(*reasons: str) -> list[str]:
    store = MemoryStore()
    for reason in reasons:
        store.event(event_kinds.HEALTH_FAILED, source="tape", reason=reason)
    store.event(event_kinds.HEALTH_FAILED, source="NVML", reason="no driver")
    found = [finding.summary for finding in unsynced_records(store)]
    for summary in found:
        assert_plain(summary)
    return found


def test_a_tape_that_cannot_be_synced_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ranks=4, steps=10)

    def failing(path: Path) -> None:
        if "rank-00003" in path.parts:
            raise EIO

    monkeypatch.setattr(tape_sync, "sync_file", failing)
    TapeSync(run).sync(last=True)
    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest())
    (told,) = (finding for finding in diagnosis.not_judged if "sync" in finding.summary)
    assert_plain(told.summary)
    assert told.summary.startswith(
        "Watch could not sync records to the disk, including those of rank 3, so a power cut may lose them: "
    )
    assert "Input/output error" in told.evidence["reasons"][0]
    assert LISTED_BELOW in diagnosis.verdict


def test_one_sentence_names_ranks_and_nodes() -> None:
    (summary,) = summaries(
        f"tapes/attempt-0/rank-00001/steps.00000.tape cannot be synced: OSError: {EIO}",
        f"tapes/attempt-1/rank-00002 cannot be synced: OSError: {EIO}",
        "tapes of node 1 cannot be synced: OSError: [Errno 28] No space left on device",
        "tapes/node-00000/health.00000.tape cannot be synced: OverflowError: too large",
    )
    assert "including those of ranks 1 and 2, node 0, node 1" in summary


def test_a_reason_of_any_content_is_no_part_of_the_sentence() -> None:
    for reason in ("", "tapes cannot be synced: x", "tapes/attempt-0/rank-x; (a (b", "tapes/node-" + "9" * 99):
        assert summaries(reason) == summaries("?")


def test_links_and_other_sources_are_no_records() -> None:
    assert summaries() == []
    assert summaries(f"tapes/attempt-0/rank-00000/a.jsonl cannot be synced: OSError: [Errno 40] {LINK}: 'a'") == []
    assert unsynced_records(MemoryStore()) == []
