"""The last round of a watch: everything is judged, and no more is done than has a reader."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from analyzers.run.policy import stall_policy
from probes.tape.events import EventWriter, read_events
from probes.tape.files.shared_memory import remove_shared, shared_folder
from probes.tape.rundir import NODE_RANK, RunDir
from store import Ingester, Store, StoreError
from tests.factories import make_run, still_training
from tests.forked import ROOT, run_python
from tests.waiting import wait_for
from watch import node_process, standstill_loop
from watch.exporting.exports import Exports
from watch.exporting.prometheus.endpoint import Metrics
from watch.ingest_loop import IngestLoop
from watch.live import LiveJudge
from watch.live_tapes import LiveTapes
from watch.node_process import END_SIGNALS, Heartbeat, _EndRequest, _run_until_needed
from watch.plugins.loop import PluginLoop
from watch.records.tick_pace import MAX_REST_S
from watch.standstill_loop import StandstillLoop


@contextlib.contextmanager
def ingest_loop(run: RunDir, metrics: Metrics) -> Iterator[IngestLoop]:
    exports = Exports(metrics, None, None, None)
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    with contextlib.closing(events), Ingester(run, 0) as ingester:
        tapes = LiveTapes(run)
        tapes.poll()
        yield IngestLoop(run, ingester, tapes, LiveJudge(run.manifest(), events, exports), exports, events)


def close_watch(run: RunDir, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the last round; returns how often it opened the store."""
    opened: list[Store] = []
    with ingest_loop(run, metrics) as ingest:
        real = ingest.open_store

        def open_store() -> Store:
            opened.append(real())
            return opened[-1]

        monkeypatch.setattr(ingest, "open_store", open_store)
        ingest.close()
    return len(opened)


@pytest.mark.parametrize("is_scraped", [True, False])
def test_the_end_of_a_run_is_measured_for_a_node_that_is_scraped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_scraped: bool
) -> None:
    run = make_run(tmp_path, steps=5)
    metrics = Metrics(run, 0, stall_policy(run.manifest()))
    metrics.is_wanted = True
    if is_scraped:
        list(metrics.snapshot.collect())
    close_watch(run, metrics, monkeypatch)
    states = [sample for sample in metrics.samples if sample.name == "rankscope_run_state" and sample.value]
    assert [sample.labels["state"] for sample in states] == (["finished"] if is_scraped else [])


def test_the_store_is_opened_again_only_after_something_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, steps=5)
    num_opened = close_watch(run, Metrics(run, 0, stall_policy(run.manifest())), monkeypatch)
    with Store.open(run) as store:
        ((num_written,),) = store.rows("SELECT count(*) FROM events WHERE kind IN ('finding', 'advice')")
    assert num_opened == 1 + (num_written > 0)


def test_a_finding_of_the_last_round_is_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, steps=60, slow={2: 40.0}, nan={1: 30})
    num_opened = close_watch(run, Metrics(run, 0, stall_policy(run.manifest())), monkeypatch)
    with Store.open(run, catch_up=False) as store:
        kinds = [kind for (kind,) in store.rows("SELECT finding_kind FROM findings")]
    assert "non_finite" in kinds
    assert num_opened > 1


def test_a_round_whose_metrics_fail_reports_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, steps=60, nan={1: 30})
    metrics = Metrics(run, 0, stall_policy(run.manifest()))
    monkeypatch.setattr(metrics, "tick", lambda *_, **__: 1 / 0)
    with ingest_loop(run, metrics) as ingest, pytest.raises(ZeroDivisionError):
        ingest.tick()
    events = read_events(run.node_dir(0) / "events.jsonl")[0]
    assert "non_finite" in [event.get("finding_kind") for event in events]


@pytest.mark.parametrize("is_scraped", [True, False])
def test_a_round_without_news_opens_no_store_unless_its_metrics_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_scraped: bool
) -> None:
    run = still_training(make_run(tmp_path, steps=5, end=""))
    metrics = Metrics(run, 0, stall_policy(run.manifest()))
    if is_scraped:
        list(metrics.snapshot.collect())
    with ingest_loop(run, metrics) as ingest:
        opened: list[bool] = []
        real = ingest._cached_store.opened
        monkeypatch.setattr(ingest._cached_store, "opened", lambda **node: (opened.append(True), real(**node))[1])
        for _ in range(4):
            ingest.tick()
        assert len(opened) == (4 if is_scraped else 1)
        make_run(tmp_path, run=run, attempt=1, steps=3, end="")
        still_training(run)
        for _ in range(4):
            ingest.tick()
        assert len(opened) == (8 if is_scraped else 3), "an attempt that ended is judged in the round after"
        for _ in range(round(MAX_REST_S)):
            ingest.tick()
        assert len(opened) > (15 if is_scraped else 3), "silence itself may be a finding"


@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_a_watch_on_a_run_of_the_past_adds_no_reading_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    gone = {rank: {"pid": 2**22 + rank} for rank in range(2)}  # no process of this machine can have it
    run = make_run(tmp_path, ranks=2, steps=5, kill={1: 5} if ends == "killed" else {}, identities=gone)
    monkeypatch.setattr(standstill_loop, "ORPHAN_GRACE_S", 0.0)
    before = sorted(run.path.rglob("health.*.tape"))
    handlers = {number: signal.getsignal(number) for number in node_process.END_SIGNALS}
    try:
        assert node_process.run_watch([str(run.path)]) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert sorted(run.path.rglob("health.*.tape")) == before
    with Store.open(run, catch_up=False) as store:
        assert store.rows("SELECT DISTINCT rank FROM steps ORDER BY rank") == [(0,), (1,)], "it ingested the run"


@pytest.mark.parametrize("follows", [False, True])
def test_copies_in_memory_are_left_to_a_launch_that_follows_during_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """The last round of a large store on a busy machine takes as long as the next launch needs to start its ranks."""
    run = make_run(tmp_path, ranks=1, steps=5)
    folder = shared_folder(run.path, 0)
    folder.mkdir()
    real = node_process._close

    def close(*arguments: object) -> None:
        if follows:
            with contextlib.closing(EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)) as events:
                events.write("run_started", node_rank=0, launcher_pid=os.getpid())
            make_run(tmp_path, run=run, attempt=1, ranks=1, steps=1, end="", identities={0: {"pid": os.getpid()}})
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(node_process, "_close", close)
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    try:
        assert node_process.run_watch([str(run.path)]) == 0
        assert folder.exists() == follows
    finally:
        remove_shared(run.path, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_second_signal_and_the_last_records_wait_for_the_round_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler repeats SIGTERM: two rounds at once would write into one store."""
    run = make_run(tmp_path, steps=5)
    exports = Exports(None, None, None, None)
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    refused: list[str] = []
    waited: list[bool] = []
    has_begun, has_returned = threading.Event(), threading.Event()
    with contextlib.closing(events), Ingester(run, 0) as ingester:
        tapes = LiveTapes(run)
        judge = LiveJudge(run.manifest(), events, exports)
        loop = StandstillLoop(run, tapes, judge, events)
        ingest = IngestLoop(run, ingester, tapes, judge, exports, events)

        def tick() -> None:
            has_begun.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: ingest._has_left, "the end")
            try:
                ingest.close()
            except StoreError as error:
                refused.append(str(error))
            os.kill(os.getpid(), signal.SIGTERM)
            waited.append(not has_returned.wait(1.0))

        monkeypatch.setattr(ingest, "tick", tick)
        monkeypatch.setattr(loop, "tick", has_begun.set)
        monkeypatch.setattr(loop, "is_needed", lambda: True)
        plugins = PluginLoop(ingest.open_store, tapes, judge)
        try:
            assert _run_until_needed(loop, ingest, plugins, Heartbeat(-1), _EndRequest()) == signal.SIGTERM
            has_returned.set()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        ingest.close()
    assert refused == ["the last round has not ended"]
    assert waited == [True]


START = """
import os, signal, sys
from watch import node_process

class Signalled(node_process.PluginLoop):  # after watch_started, before the loops
    def __init__(self, *arguments):
        super().__init__(*arguments)
        os.kill(os.getpid(), int(sys.argv[2]))

node_process.PluginLoop = Signalled
print(node_process.run_watch([sys.argv[1]]))
"""


@pytest.mark.parametrize("number", END_SIGNALS)
def test_a_signal_between_the_start_and_the_first_round_ends_a_watch_in_order(tmp_path: Path, number: int) -> None:
    run = still_training(make_run(tmp_path, ranks=2, steps=5, end=""))
    done = run_python(["-c", START, str(run.path), str(int(number))], cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"{node_process.SIGNALLED + number}\n"), done.stderr
    with Store.open(run, catch_up=False) as store:
        assert store.rows("SELECT DISTINCT rank FROM steps ORDER BY rank") == [(0,), (1,)], "it ingested the run"
