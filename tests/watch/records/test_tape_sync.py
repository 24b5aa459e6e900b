"""Syncing tapes where something fails: the thread lives on, the round is finished, an event says why."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.files.safe_open import sync_file
from probes.tape.rundir import RunDir
from store.ingest.rank_folders import Folder, NodeFolders
from tests.factories import make_run
from tests.waiting import wait_for
from watch.records import tape_sync
from watch.records.tape_sync import TapeSync


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path, ranks=2, steps=5)
    run.node_dir(0).mkdir(parents=True, exist_ok=True)
    return run


def reasons(run: RunDir) -> list[str]:
    events, _, _ = read_events(run.node_dir(0) / "events.jsonl")
    return [event["reason"] for event in events if event["kind"] == event_kinds.HEALTH_FAILED]


def test_the_thread_survives_any_error_and_reports_each_kind_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    def failing(self: TapeSync, *, last: bool) -> None:
        rounds.append(len(rounds))
        raise (OverflowError("too large") if len(rounds) % 2 else OSError(errno.EIO, f"error {len(rounds)}"))

    monkeypatch.setattr(TapeSync, "_sync", failing)
    with TapeSync(run, every_s=0.01).running():
        wait_for(lambda: len(rounds) > 5, "six rounds")
    assert sorted(reasons(run)) == [
        "tapes of node 0 cannot be synced: OSError: [Errno 5] error 2",
        "tapes of node 0 cannot be synced: OverflowError: too large",
    ]


def test_a_file_that_cannot_be_synced_holds_up_no_other(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    link = run.rank_dir(0, 0) / "a.jsonl"
    link.symlink_to("/etc/passwd")
    dead = "tapes/attempt-0/rank-00000/steps.00000.tape"
    synced: list[str] = []

    def sync(path: Path) -> None:
        name = path.relative_to(run.path).as_posix()
        if name == dead:
            raise OSError(errno.EIO, "Input/output error")
        sync_file(path)
        synced.append(name)

    monkeypatch.setattr(tape_sync, "sync_file", sync)
    syncing = TapeSync(run)
    for _ in range(2):
        syncing.sync(last=True)
    files = {path.relative_to(run.path).as_posix() for _, _, folder in run.rank_dirs() for path in folder.iterdir()}
    expected = files - {dead, link.relative_to(run.path).as_posix()}
    assert expected <= set(synced)
    index = run.node_dir(0) / "segments.jsonl"
    assert all(name in index.read_text() for name in expected), "and noted"
    told = sorted(reasons(run))
    assert len(told) == 2, "each kind once"
    assert "a.jsonl cannot be synced: OSError: [Errno 40] is a link: not followed" in told[0]
    assert told[1] == f"{dead} cannot be synced: OSError: [Errno 5] Input/output error"


def test_a_segment_that_could_not_be_synced_is_tried_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 5):
        (run.rank_dir(0, 0) / f"steps.{number:05}.tape").touch()
    errors = [OSError(errno.EIO, "Input/output error")]
    tried: list[str] = []

    def sync(path: Path) -> None:
        tried.append(path.name)
        if path.name == "steps.00000.tape" and errors:
            raise errors.pop()

    monkeypatch.setattr(tape_sync, "sync_file", sync)
    syncing = TapeSync(run)
    for _ in range(3):
        syncing.sync(last=True)
    rank1 = 3
    assert tried.count("steps.00000.tape") == rank1 + 2, "rank 1 writes into its own still"
    assert tried.count("steps.00001.tape") == 1


def test_a_folder_that_cannot_be_listed_holds_up_no_other(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = NodeFolders.segments

    def listed(self: NodeFolders, folder: Folder) -> list[tuple[str, int, str]]:
        if folder.rank == 0:
            raise PermissionError(errno.EACCES, "Permission denied")
        return segments(self, folder)

    monkeypatch.setattr(NodeFolders, "segments", listed)
    TapeSync(run).sync(last=True)
    assert "rank-00001/steps.00000.tape" in (run.node_dir(0) / "segments.jsonl").read_text()
    assert [reason.partition(":")[0] for reason in reasons(run)] == ["tapes/attempt-0/rank-00000 cannot be synced"]


def test_the_first_round_notes_the_checksums(run: RunDir) -> None:
    """A watch may be killed within its first half minute, and a run without an index would seem to have lost it."""
    TapeSync(run).sync()
    assert "steps.00000.tape" in (run.node_dir(0) / "segments.jsonl").read_text()


def test_a_rank_that_starts_is_synced_at_once_and_its_events_first(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tapes are not judged without its identity, which a power cut would take."""
    synced: list[str] = []
    started = [(0, 1)]

    def sync(path: Path) -> None:
        synced.append(path.name)
        sync_file(path)

    monkeypatch.setattr(tape_sync, "sync_file", sync)
    with TapeSync(run, every_s=3600.0, started=lambda: started[0]).running():
        wait_for(lambda: (run.node_dir(0) / "segments.jsonl").exists(), "the end of the first round")
        synced.clear()
        started[0] = (0, 2)
        wait_for(lambda: "steps.00000.tape" in synced, "the second rank's")
        assert "events.jsonl" in synced[: synced.index("steps.00000.tape")]
