"""Hangs are judged from tapes and a monotonic clock: no wall clock and no store can hide one, or make one up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest

from analyzers.finding import Finding
from probes.tape.events import EventWriter, read_events
from probes.tape.format.writer import COMPLETE, OPEN
from probes.tape.rundir import NODE_RANK, RunDir
from store import Ingester
from store.ingest import transaction
from tests.factories import RankWriter, empty_run, make_run
from tests.stand_ins import take_in
from tests.waiting import wait_for
from watch import node_process
from watch.culprit import OTHERS_S
from watch.digests.link import Verdict
from watch.exporting.exports import Exports
from watch.ingest_loop import IngestLoop
from watch.live import LiveJudge
from watch.live_tapes import LiveTapes
from watch.node_process import Heartbeat, _EndRequest, _run_until_needed, _tick_on
from watch.plugins.loop import PluginLoop
from watch.recent_records import RecentRecords
from watch.standstill_loop import StandstillLoop

HOUR_NS = 3600 * 10**9


class Watched:
    """A run of four ranks with a standstill loop over it, and clocks that a test can set.

    The monotonic clock goes on with sleeps and `advance` alone: a slow machine adds nothing to it.
    """

    def __init__(
        self,
        run: RunDir,
        monkeypatch: pytest.MonkeyPatch,
        *,
        launcher_pid: int = 0,
        ranks: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        take_in(run, ranks)
        self.run, self._monkeypatch = run, monkeypatch
        self._start_ns, self._slept_ns, self._shift_ns, real_sleep = time.monotonic_ns(), 0, 0, time.sleep

        def sleep(seconds: float) -> None:
            real_sleep(seconds)
            self._slept_ns += round(seconds * 1e9)

        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic_ns", self._now_ns)
        monkeypatch.setattr(time, "monotonic", lambda: self._now_ns() / 1e9)
        folder = run.node_dir(0)
        folder.mkdir(parents=True, exist_ok=True)
        self.events = EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)
        self.tapes = LiveTapes(run)
        self.judge = LiveJudge(run.manifest(), self.events, Exports(None, None, None, None))
        self.loop = StandstillLoop(run, self.tapes, self.judge, self.events, launcher_pid=launcher_pid)

    def advance(self, seconds: float) -> None:
        """Let the monotonic clock go on, to so many seconds after the start."""
        self._shift_ns = round(seconds * 1e9)

    def set_wall_clock(self, by_ns: int) -> None:
        real = time.time_ns
        self._monkeypatch.setattr(time, "time_ns", lambda: real() + by_ns)
        self._monkeypatch.setattr(time, "time", lambda: (real() + by_ns) / 1e9)

    def _now_ns(self) -> int:
        return self._start_ns + self._slept_ns + self._shift_ns

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.events.path)[0] if event["kind"] == kind]


@pytest.fixture
def hanging(tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Rank 3 does not enter its collective; its clock is a few milliseconds behind the present."""
    where = {rank: {"pid": process.pid} for rank, process in enumerate(processes)}
    return Watched(make_run(tmp_path, steps=20, hang={3: 20}, identities=where), monkeypatch, ranks=processes)


def test_records_of_ranks_that_record_are_not_judged(hanging: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the newest records into tables costs a tenth of a core, and nothing has ended or is quiet."""
    read: list[bool] = []
    real = hanging.tapes.source
    monkeypatch.setattr(hanging.tapes, "source", lambda **options: (read.append(True), real(**options))[1])
    hanging.loop.tick()
    assert not read
    hanging.advance(5)
    hanging.loop.tick()
    assert read


def test_the_end_of_a_run_whose_ranks_all_closed_is_left_to_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stands still then, and no rank is lost; the last round reads the store anyway."""
    watched = Watched(make_run(tmp_path, ranks=2, steps=5), monkeypatch)
    monkeypatch.setattr(watched.tapes, "source", lambda **options: pytest.fail("read the newest records"))
    watched.loop.tick()
    watched.advance(10)
    watched.loop.tick()
    assert watched.tapes.has_closed_cleanly


@pytest.mark.parametrize("ends", ["killed", "exception", "exit", "one is missing"])
def test_an_unclean_end_is_judged_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    run = empty_run(tmp_path)
    ranks = [RankWriter(run, rank, ranks=3 if ends == "one is missing" else 2) for rank in range(2)]
    if ends == "exception":
        ranks[1].event("exception", type="ValueError", message="", traceback="")
    for rank in ranks:
        rank.close(clean=rank.rank == 0 or ends != "killed")
    watched = Watched(run, monkeypatch)
    if ends == "exit":
        watched.events.write("rank_exit", exit_rank=1, pid=10_001, exit_code=3)
    read: list[bool] = []
    real = watched.tapes.source
    monkeypatch.setattr(watched.tapes, "source", lambda **options: (read.append(True), real(**options))[1])
    watched.loop.tick()
    assert read
    assert not watched.tapes.has_closed_cleanly


def test_a_round_takes_in_the_newest_records_once(hanging: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a rank has made a step, and whether one hangs, is asked of one reading of them."""
    read: list[RecentRecords] = []
    real = RecentRecords.read
    monkeypatch.setattr(RecentRecords, "read", lambda self: (read.append(self), real(self))[1])
    hanging.loop.tick()
    hanging.advance(30)
    hanging.loop.tick()
    assert len(read) == 1
    hanging.advance(60)
    hanging.loop.tick()
    assert len(read) == 2
    assert read[0] is read[1], "what is there is not read anew"


@pytest.mark.parametrize("wall_ns", [0, HOUR_NS, -HOUR_NS])
def test_a_hang_is_found_whatever_the_wall_clock_shows(
    hanging: Watched, processes: list[subprocess.Popen[bytes]], wall_ns: int
) -> None:
    hanging.loop.tick()
    hanging.set_wall_clock(wall_ns)
    hanging.advance(30)
    hanging.loop.tick()
    assert processes[3].wait(100) == -signal.SIGKILL
    assert [process.poll() for process in processes[:3]] == [None] * 3
    (finding,) = [event for event in hanging.said("finding") if event["finding_kind"] == "hang"]
    assert finding["finding_ranks"] == [3]
    assert 20 < finding["evidence"]["silent_s"] < 60


@pytest.mark.parametrize("wall_ns", [HOUR_NS, -HOUR_NS])
def test_a_wall_clock_that_is_set_kills_no_healthy_rank(
    hanging: Watched, processes: list[subprocess.Popen[bytes]], wall_ns: int
) -> None:
    hanging.loop.tick()
    hanging.set_wall_clock(wall_ns)
    for _ in range(3):
        hanging.loop.tick()
    assert not hanging.said("finding")
    assert [process.poll() for process in processes] == [None] * 4


def test_an_open_reader_of_the_store_delays_no_verdict(
    hanging: Watched, processes: list[subprocess.Popen[bytes]]
) -> None:
    with Ingester(hanging.run) as ingester:
        ingester.catch_up()
    reader = duckdb.connect(str(hanging.run.store()), read_only=True)
    try:
        hanging.loop.tick()
        hanging.advance(30)
        hanging.loop.tick()
        assert processes[3].wait(100) == -signal.SIGKILL
    finally:
        reader.close()


def test_nothing_is_judged_while_records_come(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, ranks=1, steps=1, identities={0: {"pid": processes[0].pid}})
    writer = RankWriter(run, 0, attempt=1, identity={"pid": processes[0].pid})
    watched = Watched(run, monkeypatch, ranks=processes)
    for step in range(1, 4):
        watched.advance(step)
        wrote_s = time.monotonic()
        writer.append("steps", COMPLETE, step=step, start_ns=time.monotonic_ns(), duration_ns=10)
        watched.loop.tick()
    assert watched.tapes.quiet_s <= time.monotonic() - wrote_s, "the last record was seen"
    assert (watched.tapes.attempt, dict(watched.tapes.pids)) == (1, {0: processes[0].pid})


def test_what_ranks_record_while_the_watch_is_slow_is_no_silence(
    hanging: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a crowded machine seconds pass between reading the tapes and judging them."""
    hanging.loop.tick()
    real = RecentRecords.read
    monkeypatch.setattr(RecentRecords, "read", lambda self: (real(self), hanging.advance(30))[0])
    hanging.advance(3)
    begin_s = time.monotonic()
    hanging.loop.tick()
    assert time.monotonic() - begin_s > 20, "the round was slow"
    assert not hanging.said("finding")


def test_a_rank_that_goes_on_while_its_records_are_judged_is_not_killed(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = empty_run(tmp_path)
    ranks = [RankWriter(run, rank, ranks=2, identity={"pid": processes[rank].pid}) for rank in range(2)]
    for rank in ranks:
        rank.event("process_group", process_group="dp", members=[0, 1])
        rank.append("steps", OPEN, step=1, start_ns=rank.now_ns)
    ranks[0].append("collectives", OPEN, step=1, process_group="dp", seq=0, op="all_reduce", issue_ns=ranks[0].now_ns)
    watched = Watched(run, monkeypatch, ranks=processes)
    watched.loop.tick()
    report = watched.judge.report

    def go_on(found: Sequence[Finding]) -> bool:
        if found:
            watched.advance(1001)
            ranks[1].append("steps", OPEN, step=2, start_ns=time.monotonic_ns())
        return report(found)

    monkeypatch.setattr(watched.judge, "report", go_on)
    watched.advance(1000)
    watched.loop.tick()
    assert [event["finding_ranks"] for event in watched.said("finding")] == [[1]]
    assert not watched.said("culprit_killed")
    watched.advance(2000)
    watched.loop.tick()
    assert processes[1].wait(100) == -signal.SIGKILL, "the hang goes on"


def test_a_tick_that_fails_halfway_leaves_no_record_twice(hanging: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = transaction.insert, [MemoryError("no room")]

    def insert(connection: Any, batch: Any, table: str) -> None:
        if table == "events" and failures:  # the last: steps are in memory
            raise failures.pop()
        real(connection, batch, table)

    hanging.loop.tick()
    monkeypatch.setattr(transaction, "insert", insert)
    hanging.advance(5)
    with pytest.raises(MemoryError):
        hanging.loop.tick()
    counted = "SELECT count(*), count(DISTINCT (rank, step)) FROM steps"
    ((rows, steps),) = hanging.tapes.source(all_nodes=True).rows(counted)  # as a tick reads them
    assert rows == steps > 0


def test_a_watch_that_cannot_judge_does_not_beat(hanging: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    beaten: list[bool] = []
    outcomes = iter([True, False, True, False, False])

    def tick() -> None:
        beaten.append(_has_beaten(reads))
        if not next(outcomes):
            raise OSError("no file descriptor is left")

    monkeypatch.setattr(hanging.loop, "tick", tick)
    monkeypatch.setattr(hanging.loop, "is_needed", lambda: len(beaten) < 5)
    monkeypatch.setattr(node_process, "TICK_S", 0.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _tick_on(hanging.loop, Heartbeat(writes), _EndRequest())
        beaten.append(_has_beaten(reads))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reads)
        os.close(writes)
    assert beaten == [False, True, False, True, False, False]


def _has_beaten(fd: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(fd, 100))
    return False


class Link:
    """What a led node hears: a verdict, which nobody of ours has sent, or none."""

    def __init__(self, verdict: Verdict | None = None) -> None:
        self._verdict = verdict
        self.digests: list[object] = []
        self.offsets_ns: dict[int, int] = {}
        self.leads, self.is_led = False, True

    def exchange(self, *args: object) -> None: ...

    def publish(self, *args: object, hang_is_open: bool) -> None: ...

    def verdict(self, attempt: int) -> Verdict | None:
        return self._verdict


def test_a_forged_verdict_kills_no_rank_that_records(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, ranks=1, steps=1, identities={0: {"pid": processes[0].pid}})
    writer = RankWriter(run, 0, attempt=1, identity={"pid": processes[0].pid})
    watched = Watched(run, monkeypatch, ranks=processes)
    watched.events.write("run_started", node_rank=0)
    watched.loop._job = Link(Verdict(attempt=1, ranks=(0,), summary="rank 0 hangs"))  # type: ignore[assignment]
    for step in range(1, 4):
        writer.append("steps", COMPLETE, step=step, start_ns=time.monotonic_ns(), duration_ns=10)
        watched.loop.tick()
    assert processes[0].poll() is None
    (refused,) = watched.said("verdict_refused")
    assert refused["ranks"] == [0]
    watched.advance(30)
    watched.loop.tick()
    assert processes[0].wait(100) == -signal.SIGKILL, "a verdict that its own records bear out is acted upon"


def test_a_led_node_names_no_rank_of_which_it_has_no_records(
    hanging: Watched, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Ranks 2 and 3 run on nodes with disks of their own, and their node's watch acts; where it does not, this one."""
    for rank in (2, 3):
        shutil.rmtree(hanging.run.rank_dir(0, rank))
    hanging.loop._job = Link()  # type: ignore[assignment]
    for later_s in (0, 200, 200 + OTHERS_S - 1):
        hanging.advance(later_s)
        hanging.loop.tick()
    (finding,) = [event for event in hanging.said("finding") if event["finding_kind"] == "hang"]
    assert (finding["cause"], finding["finding_ranks"]) == ("not_seen", [])
    assert finding["evidence"]["unseen_ranks"] == [2, 3]
    assert finding["evidence"]["waiting_ranks"] == [0, 1]
    assert [process.poll() for process in processes] == [None] * 4
    hanging.advance(200 + OTHERS_S + 1)
    hanging.loop.tick()
    assert {event["killed_rank"] for event in hanging.said("culprit_killed")} == {0, 1}


@pytest.mark.parametrize("records", [True, False])
def test_a_rank_that_records_is_not_ended_for_a_hang_of_others(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    run = make_run(tmp_path, ranks=1, steps=1, identities={0: {"pid": processes[0].pid}})
    writer = RankWriter(run, 0, attempt=1, identity={"pid": processes[0].pid})
    watched = Watched(run, monkeypatch, ranks=processes)
    watched.events.write("run_started", node_rank=0)
    watched.tapes.poll()
    watched.advance(30)
    elsewhere = Finding(
        analyzer="hang",
        kind="hang",
        severity="critical",
        status="fired",
        ranks=(5,),
        attempt=1,
        summary="Rank 5 hangs.",
    )
    watched.judge._state.reported[elsewhere.identity] = elsewhere
    watched.loop._act([elsewhere], 1)
    watched.advance(30 + OTHERS_S + 1)
    if records:
        writer.append("steps", COMPLETE, step=1, start_ns=time.monotonic_ns(), duration_ns=10)
    watched.tapes.poll()
    watched.loop._act([], 1)
    assert bool(watched.said("culprit_killed")) is not records
    assert (processes[0].poll() is None) is records or processes[0].wait(100) == -signal.SIGKILL


def test_that_ranks_are_watched_no_longer_is_recorded_before_a_slow_round_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of an interrupted job end while its watch still writes the store: that is no silence of theirs."""
    watched = Watched(make_run(tmp_path, steps=5), monkeypatch)
    watched.events.write("run_ended", reason="interrupted", exit_code=143)
    nowhere = Exports(None, None, None, None)
    known: list[int] = []
    judge = LiveJudge(watched.run.manifest(), watched.events, nowhere)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with Ingester(watched.run, 0) as ingester:
        ingest = IngestLoop(watched.run, ingester, watched.tapes, judge, nowhere, watched.events, node_rank=0)

        def slow_round() -> None:
            wait_for(lambda: watched.said("watch_stopped"), "the last word of the watch")
            known.append(len(watched.said("watch_stopped")))

        monkeypatch.setattr(ingest, "tick", slow_round)
        try:
            plugins = PluginLoop(ingest.open_store, watched.tapes, judge)
            _run_until_needed(watched.loop, ingest, plugins, Heartbeat(-1), _EndRequest())
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        ingest.close()
    assert set(known) == {1}
    assert len(watched.said("watch_stopped")) == 1


def test_a_signal_in_the_middle_of_a_query_ends_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB makes an error of its own of what a signal's handler raises."""
    watched = Watched(make_run(tmp_path, steps=5), monkeypatch)
    nowhere = Exports(None, None, None, None)
    judge = LiveJudge(watched.run.manifest(), watched.events, nowhere)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ticks = 0

    def endless_tick() -> None:
        nonlocal ticks
        ticks += 1
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        watched.tapes.source().rows("SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b")

    monkeypatch.setattr(watched.loop, "tick", endless_tick)
    monkeypatch.setattr(watched.loop, "is_needed", lambda: True)
    with Ingester(watched.run, 0) as ingester:
        ingest = IngestLoop(watched.run, ingester, watched.tapes, judge, nowhere, watched.events, node_rank=0)
        try:
            plugins = PluginLoop(ingest.open_store, watched.tapes, judge)
            came = _run_until_needed(watched.loop, ingest, plugins, Heartbeat(-1), _EndRequest())
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        ingest.close()
    assert (ticks, came) == (1, signal.SIGTERM)


def test_a_signal_that_becomes_an_error_of_the_tick_ends_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a handler raises is raised wherever the signal arrives, also where a library catches it."""
    watched = Watched(make_run(tmp_path, steps=5), monkeypatch)
    nowhere = Exports(None, None, None, None)
    judge = LiveJudge(watched.run.manifest(), watched.events, nowhere)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt as error:
            raise ValueError("columns cannot be read") from error

    monkeypatch.setattr(watched.loop, "tick", tick)
    monkeypatch.setattr(watched.loop, "is_needed", lambda: ticks < 3)
    with Ingester(watched.run, 0) as ingester:
        ingest = IngestLoop(watched.run, ingester, watched.tapes, judge, nowhere, watched.events, node_rank=0)
        try:
            plugins = PluginLoop(ingest.open_store, watched.tapes, judge)
            came = _run_until_needed(watched.loop, ingest, plugins, Heartbeat(-1), _EndRequest())
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        ingest.close()
    assert (ticks, came) == (1, signal.SIGTERM)


def test_a_process_that_got_the_pid_of_the_launcher_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a launcher that is not ours; in a container of 32,768 pids a new process has an old one within minutes."""
    monkeypatch.setattr("watch.standstill_loop.ORPHAN_GRACE_S", 0.0)
    watched = Watched(empty_run(tmp_path, launcher_pid=os.getpid()), monkeypatch)
    assert watched.loop.is_needed()
    monkeypatch.setattr("watch.processes.os_state", lambda pid: ("S", "999999999999"))
    assert not watched.loop.is_needed()
