from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.deaths.analyze import lost_ranks
from analyzers.finding import Finding
from analyzers.scope import Scope
from probes.tape.events import EventWriter
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import RunDir
from store import Store
from tests.factories import RankWriter, empty_run

BLANK_BYTES = 4096


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Attempt 0 of two ranks, whose tapes a power cut left blank."""
    run = empty_run(tmp_path)
    _lose(run, 0)
    return run


def _lose(run: RunDir, attempt: int) -> None:
    for rank in range(2):
        folder = run.rank_dir(attempt, rank)
        folder.mkdir(parents=True)
        for table in ("steps", "collectives"):
            (folder / f"{table}.00000.tape").write_bytes(bytes(BLANK_BYTES))


def _event(run: RunDir, kind: str, attempt: int, **detail: object) -> None:
    folder = run.node_dir(0)
    folder.mkdir(parents=True, exist_ok=True)
    writer = EventWriter(folder / "events.jsonl", attempt=attempt, rank=-1)
    writer.write_any(kind, **detail)
    writer.close()


def _judged(run: RunDir, now_ns: int | None = None) -> list[Finding]:
    with Store.open(run) as store:
        return [found for found in lost_ranks(store, Scope(now_ns=now_ns)) if found.status == "fired"]


def test_an_attempt_without_records_is_reported(run: RunDir) -> None:
    _event(run, "attempt_started", 0, world_size=2, node_rank=0, ranks_left_over=0)
    (finding,) = _judged(run)
    assert (finding.cause, finding.ranks, finding.severity, finding.attempt) == ("killed_all", (), "critical", 0)
    assert finding.summary.startswith(
        "Records incomplete: ranks 0 and 1 began attempt 0, but none of their records survived and nothing recorded how"
    )
    assert len(finding.evidence["lost_files"]) == 4


def test_blank_tapes_suffice_where_the_events_are_lost_too(run: RunDir) -> None:
    assert [finding.attempt for finding in _judged(run)] == [0]


def test_the_newest_attempt_of_a_live_run_may_still_be_starting(run: RunDir) -> None:
    assert _judged(run, now_ns=1) == []
    _lose(run, 1)
    assert [finding.attempt for finding in _judged(run, now_ns=1)] == [0]


def test_a_restarted_attempt_is_only_a_warning(run: RunDir) -> None:
    writer = RankWriter(run, 0, attempt=1)
    writer.append("steps", COMPLETE, step=1, start_ns=writer.now_ns)
    first = next(finding for finding in _judged(run) if finding.attempt == 0)
    assert first.severity == "warning"
    assert first.summary.endswith("Restarted as attempt 1, whose steps count from 1.")


@pytest.mark.parametrize(
    ("reason", "is_reported"), [("failed", False), ("interrupted", False), ("launcher_lost", True)]
)
def test_an_end_that_its_own_launcher_recorded_is_not_reported(run: RunDir, reason: str, is_reported: bool) -> None:
    _event(run, "run_ended", 0, node_rank=0, reason=reason, exit_code=1, message="")
    assert bool(_judged(run)) is is_reported


def test_ranks_whose_ends_were_recorded_are_not_reported(run: RunDir) -> None:
    _event(run, "rank_exit", 0, exit_rank=1, exit_code=-9, signal="SIGKILL", pid=7, message="")
    assert _judged(run) == []
