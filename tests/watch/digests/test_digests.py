"""Watches of several nodes talk through a real store: digests, clocks, verdicts, and what happens when it dies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from analyzers.finding import Finding
from analyzers.hangs.analyze import silent_nodes
from analyzers.live import LiveState, live_findings
from analyzers.run.calls.snapshot import AttemptView, RankView
from analyzers.run.live.digest import Digest, decode
from analyzers.scope import Scope
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK
from tests.analyzers.judged import checked
from tests.analyzers.memory_store import MemoryStore
from tests.waiting import wait_for
from watch.digests import exchange
from watch.digests.clock_offsets import RoundTrip, best_offset
from watch.digests.exchange import JobWatch
from watch.digests.link import DigestLink, Verdict

SECOND = 1_000_000_000
SECRET = b"of this job"
AHEAD_NS = 600 * SECOND


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    yield f"127.0.0.1:{store.port}"
    del store


def ahead() -> int:
    return time.time_ns() + AHEAD_NS


def digest(node: int, step: int = 1) -> Digest:
    rank = RankView(rank=node, step=step, last_ns=time.time_ns())
    return Digest(node=node, sent_ns=time.time_ns(), view=AttemptView(attempt=0, ranks={node: rank}))


def test_digests_clocks_and_verdicts_go_over_the_store(endpoint: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(DigestLink(endpoint, node=0, num_nodes=3, secret=SECRET))
        one = stack.enter_context(DigestLink(endpoint, node=1, num_nodes=3, secret=SECRET, clock=ahead))
        two = stack.enter_context(DigestLink(endpoint, node=2, num_nodes=3, secret=SECRET))
        for step in (1, 2):
            one.publish(digest(1, step))
            two.publish(digest(2, step))
            wait_for(lambda step=step: [d.view.step for d in leader.received()] == [step, step], "digest of both nodes")
        # The shortest of the newest trips counts: on a busy machine the first one may be long.
        wait_for(
            lambda: leader.clocks.keys() == {1, 2} and all(c.error_ns < SECOND // 4 for c in leader.clocks.values()),
            "clock of both nodes",
        )
        for node, expected_ns in ((1, AHEAD_NS), (2, 0)):
            clock = leader.clocks[node]
            assert abs(clock.offset_ns - expected_ns) <= clock.error_ns

        leader.publish_verdict(Verdict(attempt=3, ranks=(2,), summary="rank 2 hangs"))
        wait_for(lambda: one.verdict and two.verdict, "verdict on both nodes")
        assert two.verdict == Verdict(attempt=3, ranks=(2,), summary="rank 2 hangs")
        assert leader.traffic.received >= 4
        assert not leader.traffic.failures

        events = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=NODE_RANK)
        job = JobWatch(leader, node_rank=0, events=events)
        job.exchange(MemoryStore(), 0, set())
        assert {event["node_rank"] for event in read_events(tmp_path / "events.jsonl")[0]} == {1, 2}
        finding = Finding(analyzer="hang", kind="hang", severity="critical", status="fired", summary="x", ranks=(1,))
        job.publish([finding], 4, hang_is_open=True)
        other = JobWatch(two, node_rank=2, events=events)
        wait_for(lambda: other.verdict(4), "second verdict")
        assert other.verdict(3) is None, "of an attempt that is over"
        job.publish([], 4, hang_is_open=True)
        assert other.verdict(4), "it stands"
        job.publish([], 4, hang_is_open=False)
        wait_for(lambda: other.verdict(4) is None, "word that it is over")


def test_a_silent_node_is_reported_once_and_again_when_its_digests_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    link = DigestLink("127.0.0.1:1", node=0, num_nodes=2)  # never started: what it has received is put there
    job = JobWatch(link, node_rank=0, events=EventWriter(path, attempt=0, rank=NODE_RANK))
    store, state = MemoryStore(), LiveState()
    store.add("ranks", [{"attempt": 0, "rank": 0, "wall_ns": time.time_ns()}])

    def heard(age_s: float, **more: Any) -> list[Finding]:
        found = digest(1)
        received_ns = time.time_ns() - int(age_s * SECOND)
        link._received[1] = Digest(node=1, sent_ns=found.sent_ns, view=found.view, received_ns=received_ns, **more)
        known = len(read_events(path)[0]) if path.exists() else 0
        job.exchange(store, 0, set())
        for event in read_events(path)[0][known:] if path.exists() else []:
            event.pop("attempt"), event.pop("rank")
            store.event(event.pop("kind"), wall_ns=event.pop("wall_ns"), step=event.pop("step"), **event)
        return live_findings(store, state, time.time_ns())

    silent = exchange.SILENT_S + 1
    assert heard(0) == []
    (fired,) = heard(silent)
    assert (fired.kind, fired.ranks, fired.evidence["node_rank"]) == ("node_silent", (1,), 1)
    assert heard(silent) == [], "reported once"
    (over,) = heard(0)
    assert (over.kind, over.status) == ("node_silent", "ok")
    assert heard(silent, closing=True) == [], "a node that closes is not silent"
    (later,) = checked(silent_nodes(store, Scope()))
    assert later.cause == "reports_again", "a post-mortem reports it all the same"


def test_a_node_that_was_cut_off_before_its_first_digest_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    link = DigestLink("127.0.0.1:1", node=0, num_nodes=2)
    now_ns = [time.time_ns()]
    events = EventWriter(path, attempt=0, rank=NODE_RANK)
    job = JobWatch(link, node_rank=0, events=events, clock=lambda: now_ns[0])
    begin_ns = now_ns[0]

    def told(world_size: int, after_s: float) -> list[dict[str, Any]]:
        store = MemoryStore()
        now_ns[0] = begin_ns + int(after_s * SECOND)
        store.event("attempt_started", wall_ns=begin_ns - 500 * SECOND, world_size=world_size, node_rank=0)
        known = len(read_events(path)[0]) if path.exists() else 0
        job.exchange(store, 0, {0})
        return [event for event in read_events(path)[0][known:] if event["kind"].startswith("node")]

    assert told(2, exchange.UNHEARD_S - 1) == [], "its watch may be starting, or this one"
    assert told(1, exchange.UNHEARD_S + 1) == [], "an elastic world without it"
    (event,) = told(2, exchange.UNHEARD_S + 1)
    assert (event["kind"], event["node_rank"], event["ranks"]) == ("node_silent", 1, [1])
    assert told(2, exchange.UNHEARD_S + 2) == [], "reported once"
    store = MemoryStore()
    fields = {name: event[name] for name in ("node_rank", "silent_s", "ranks", "never_heard")}
    store.event(event["kind"], wall_ns=event["wall_ns"], **fields)
    (finding,) = checked(silent_nodes(store, Scope()))
    assert finding.summary.startswith("Node 1 has not reported since the attempt began, 61 s before: ")
    link._received[1] = replace(digest(1), received_ns=now_ns[0])
    (event,) = told(2, exchange.UNHEARD_S + 3)
    assert (event["kind"], event["node_rank"]) == ("node_heard", 1)


@pytest.mark.parametrize(
    ("kind", "detail"),
    [("launcher_lost", {"pid": 7, "ranks": [1]}), ("launcher_lost", {"pid": 7, "ranks": []}), ("stop_requested", {})],
)
def test_the_end_of_a_launcher_is_in_its_node_s_digest_and_no_other_node_s(
    tmp_path: Path, kind: str, detail: dict[str, Any]
) -> None:
    store = MemoryStore()
    store.add("ranks", [{"attempt": 0, "rank": 1, "wall_ns": 1, "world_size": 2}])
    store.event(kind, wall_ns=5, rank=NODE_RANK, node_rank=1, **detail)
    for node, sent in ((1, [kind]), (2, [])):
        link = DigestLink("127.0.0.1:1", node=node, num_nodes=3)  # never started: keeps what it would send
        events = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=NODE_RANK)
        JobWatch(link, node_rank=node, events=events).exchange(store, 0, {node})
        assert [event.kind for event in decode(link._outgoing).events] == sent


def test_a_lost_store_blocks_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(DigestLink, "_connect", lambda self: over.wait(60))
    with DigestLink("127.0.0.1:1", node=1, num_nodes=2) as link:
        link.publish(digest(1))
        assert link.received() == []
        assert link.verdict is None
        over.set()


def test_the_shortest_round_trip_decides_the_offset() -> None:
    quick = RoundTrip(sent_ns=1_000, answered_ns=501_100, received_ns=1_200)
    slow = RoundTrip(sent_ns=2_000, answered_ns=2_100, received_ns=900_000)
    assert best_offset([slow, quick, slow]) == (500_000, 100)
