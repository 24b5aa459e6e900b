"""Requests to profile a suspect and a peer: whom, which steps, how often; and the traces that are read for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzers.finding import Finding
from probes.profiling.request import RequestFile
from probes.settings.sections import ProfilerSettings
from probes.tape.events import EventWriter, read_events
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.factories import RankWriter, empty_run, make_run
from tests.waiting import wait_for
from watch.profiling.next_steps import next_step, peer_of
from watch.profiling.requester import CaptureRequester
from watch.profiling.trace_reader import TraceReader

PLACES = {rank: {"node_rank": rank // 2, "pp": rank % 2} for rank in range(4)}
ON = ProfilerSettings(on_anomaly=True, anomaly_steps=4, cooldown_s=100.0, max_captures=2)


def straggler(rank: int = 3, **changed: Any) -> Finding:
    found = Finding(analyzer="straggler", kind="straggler", severity="warning", status="fired", ranks=(rank,),
                    attempt=0, cause="compute", summary=f"Rank {rank} is slow.")  # fmt: skip
    return replace(found, **changed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    made = make_run(tmp_path_factory.mktemp("run"), steps=30, end="", identities=PLACES)
    made.node_dir(1).mkdir(parents=True)
    return made


class Asked:
    """A requester over a run, with a clock that a test sets."""

    def __init__(self, run: RunDir, folder: Path, policy: ProfilerSettings = ON, *, node_rank: int = 0) -> None:
        self.now_s = 0.0
        self.events = EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)
        self.requester = CaptureRequester(run, self.events, policy, node_rank=node_rank, clock_s=lambda: self.now_s)
        self.store = Store.open(run)

    def at(self, now_s: float, *findings: Finding, waits: bool = False) -> list[dict[str, Any]]:
        """All requests so far, after a poll at this time."""
        self.now_s = now_s
        self.requester.poll(findings, self.store, 0, time.time_ns(), is_paused=waits)
        return [event for event in read_events(self.events.path)[0] if event["kind"] == "profile_requested"]


@pytest.fixture
def asked(run: RunDir, tmp_path: Path) -> Iterator[Asked]:
    made = Asked(run, tmp_path)
    yield made
    made.store.close()


def test_the_suspect_and_a_peer_of_its_stage_are_asked_for_the_same_steps(asked: Asked, run: RunDir) -> None:
    files = {rank: RequestFile(run, node_rank=rank // 2, attempt=0, rank=rank) for rank in range(4)}
    (requested,) = asked.at(0, straggler())
    assert (requested["ranks"], requested["num_steps"], requested["finding_kind"]) == ([3, 1], 4, "straggler")
    assert requested["first_step"] > 30
    requests = {rank: file.poll() for rank, file in files.items()}
    assert requests[0] is requests[2] is None
    assert requests[3] == requests[1] is not None
    assert requests[3].first_step == requested["first_step"]


def test_a_finding_is_asked_for_once_and_others_wait_for_the_cool_down(asked: Asked) -> None:
    first = asked.at(0, straggler(3), straggler(2))
    assert [one["ranks"][0] for one in first] == [3]
    assert asked.at(50, straggler(3)) == first
    assert [one["ranks"][0] for one in asked.at(100)] == [3, 2]
    assert len(asked.at(900, straggler(1))) == 2, "profiler.max_captures of a run"


def test_a_request_that_cannot_be_placed_is_no_request(tmp_path: Path) -> None:
    made = make_run(tmp_path, steps=30, end="", identities=PLACES)  # node 1 has no folder
    asked = Asked(made, tmp_path)
    assert asked.at(0, straggler(3)) == []
    (requested,) = asked.at(1, straggler(1))
    assert requested["ranks"] == [1], "its peer is on that node"
    asked.store.close()


def test_a_finding_that_is_over_is_not_asked_for(asked: Asked) -> None:
    asked.at(0, straggler(3), straggler(2))
    assert len(asked.at(100, straggler(2, status="ok"))) == 1


def test_a_request_waits_while_stacks_are_sampled_and_is_not_forgotten(asked: Asked) -> None:
    assert asked.at(0, straggler(), waits=True) == []
    assert len(asked.at(1)) == 1


def test_other_kinds_and_other_attempts_are_left_alone(asked: Asked) -> None:
    others = [straggler(kind="hang"), straggler(attempt=1), straggler(status="insufficient_data")]
    assert asked.at(0, *others) == []


def test_a_finding_without_a_rank_profiles_the_first_and_a_peer(asked: Asked) -> None:
    (requested,) = asked.at(0, straggler(kind="throughput", ranks=()))
    assert requested["ranks"] == [0, 2]


def test_a_watch_that_was_started_again_knows_what_was_asked_before(run: RunDir, tmp_path: Path) -> None:
    before = Asked(run, tmp_path)
    before.at(0, straggler())
    before.store.close()
    after = Asked(run, tmp_path)
    assert len(after.at(1, straggler(2))) == 1, "cooling down"
    assert len(after.at(120, straggler(2))) == 2
    assert len(after.at(900, straggler(1))) == 2
    after.store.close()


def test_another_nodes_watch_leaves_it_to_node_0(run: RunDir, tmp_path: Path) -> None:
    asked = Asked(run, tmp_path, node_rank=1)
    assert asked.at(0, straggler()) == []
    asked.store.close()


def test_the_first_step_lies_as_far_ahead_as_a_request_needs(run: RunDir) -> None:
    with Store.open(run) as store:
        ((newest, begun_ns, step_ns),) = store.rows("SELECT max(step), max(start_ns), median(duration_ns) FROM steps")

        def ahead_s(lag_s: float) -> float:
            """Seconds of steps from the newest recorded one on."""
            first = next_step(store, 0, begun_ns + int(lag_s * 1e9))
            return float((first - newest - 1) * step_ns / 1e9)

        assert 2.0 <= ahead_s(0) <= 4.0
        assert ahead_s(3) - ahead_s(0) == pytest.approx(3, abs=0.2), "records lie behind the ranks"
        assert ahead_s(3600) == pytest.approx(ahead_s(10)), "a run that stood still, or another clock"
        assert ahead_s(-5) == ahead_s(0)
        assert next_step(store, 5, begun_ns) == 0, "an attempt without steps"
        assert [peer_of(store, 0, rank) for rank in range(5)] == [2, 3, 0, 1, None]


def test_after_a_rollback_the_first_step_lies_ahead_of_where_the_run_is(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer, now_ns = RankWriter(run, 0, ranks=1), time.monotonic_ns()
    for step in (*range(1, 101), *range(50, 61)):
        writer.append("steps", COMPLETE, step=step, start_ns=now_ns, duration_ns=10**9)
        now_ns += 10**9
    writer.close()
    with Store.open(run) as store:
        ((begun_ns,),) = store.rows("SELECT max(start_ns) FROM steps")
        assert next_step(store, 0, begun_ns) == 64


def test_a_run_asks_only_where_its_settings_say_so(tmp_path: Path) -> None:
    given = {"on_anomaly": True, "max_captures": 1}
    events = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=NODE_RANK)
    for number, (settings, asks) in enumerate(
        [(given, True), ({}, False), (given | {"on_request": False}, False), (given | {"max_captures": 0}, False)]
    ):
        run = RunDir.create(tmp_path, name=f"r{number}", manifest={"config": {"profiler": settings}})
        assert (CaptureRequester.of(run, events, node_rank=0) is not None) == asks


def test_each_trace_is_read_once_and_what_cannot_be_read_is_listed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", name="read", manifest={})
    ranks = [RankWriter(run, rank, ranks=2) for rank in range(2)]
    (run.path / "traces").mkdir()
    (run.path / "traces" / "a.json").write_text(
        '{"distributedInfo": {"rank": 0}, "traceEvents": ['
        '{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "ts": 0, "dur": 9000, "tid": 1},'
        '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1000, "dur": 6000, "tid": 1}]}'
    )
    for path in ("traces/a.json", "traces/gone.json", "../secret", "traces/../../secret"):
        ranks[0].event(
            "profile_captured", path=path, first_step=5, last_step=5, request=None, bytes=1, reason="schedule"
        )
    ranks[1].event("profile_captured", path="traces/of-another-node.json", first_step=5, last_step=5)
    folder = run.node_dir(0)
    folder.mkdir(parents=True)
    events = EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)

    def written() -> list[dict[str, Any]]:
        return [event for event in read_events(events.path)[0] if event["kind"] == "profile_summary"]

    reader = TraceReader(run, events)
    with Store.open(run) as store:
        reader.poll(store, {0})
        reader.poll(store, {0})
        assert reader.finish(store, {0})
        wait_for(lambda: len(written()) == 4, "summaries of four traces")
    good, *bad = written()
    assert (good["capture_rank"], good["path"], good["problem"]) == (0, "traces/a.json", None)
    assert good["parts_ms"]["step"] == 9.0
    assert good["operators"][0] | {"calls": 1.0} == {
        "name": "aten::mm", "phase": "", "device": False, "self_ms": 6.0, "calls": 1.0,
    }  # fmt: skip
    assert [one["problem"] for one in bad] == [
        "was removed before it was read", "is not a trace of this run", "is not a trace of this run",
    ]  # fmt: skip
    with Store.open(run) as store:
        again = TraceReader(run, events)
        assert not again.finish(store, {0}), "a watch that was started again reads none twice"
