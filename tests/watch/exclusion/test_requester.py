"""Requests to leave ranks out: after how long, once, with a cool-down, and never for what another device shares."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from probes.settings.section import read_config
from probes.settings.sections import RecoverySettings
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.factories import make_run
from watch.exclusion.request import ExclusionRequest, RequestFile, write_request
from watch.exclusion.requester import ExclusionRequester
from watch.exporting.exports import Exports
from watch.live import LiveJudge

DEVICES = {rank: {"device_uuid": f"GPU-{rank}", "node_rank": rank // 2} for rank in range(4)}
RECOVERY = {"enabled": True, "on_straggler": "exclude", "straggler_after_s": 30.0, "exclusion_cooldown_s": 100.0}


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Rank 3 of node 1 takes twice as long, from step 20 on."""
    run = make_run(tmp_path_factory.mktemp("slow"), slow={3: 2.0}, slow_from=20, end="", identities=DEVICES)
    run.node_dir(1).mkdir(parents=True)
    return run


class Asked:
    """A requester over a run, with a judge that has reported what it found, and a clock that a test sets."""

    def __init__(self, run: RunDir, folder: Path, recovery: Mapping[str, Any], *, node_rank: int = 0) -> None:
        self.run, self.now_s = run, 0.0
        self.events = EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)
        self.judge = LiveJudge(run.manifest(), self.events, Exports(None, None, None, None))
        settings = read_config(RecoverySettings, {"recovery": recovery})
        self.requester = ExclusionRequester(
            run, self.judge, self.events, settings, node_rank=node_rank, clock_s=lambda: self.now_s
        )
        self.store = Store.open(run)
        for _ in range(5):  # stragglers are searched for every fifth time
            self.judge.report(self.judge.record_findings(self.store, time.time_ns()))

    def at(self, now_s: float) -> list[dict[str, Any]]:
        """All requests so far, after a poll at this time."""
        self.now_s = now_s
        self.requester.poll(self.store, 0, time.time_ns())
        return self.written("exclusion_requested")

    def written(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.events.path)[0] if event["kind"] == kind]


@pytest.fixture
def asked(slow_run: RunDir, tmp_path: Path) -> Iterator[Asked]:
    made = Asked(slow_run, tmp_path, RECOVERY)
    yield made
    made.store.close()


def test_a_rank_that_stays_slow_is_requested_once_on_its_node(asked: Asked) -> None:
    launchers = [RequestFile(asked.run, node_rank) for node_rank in (0, 1)]
    assert asked.at(0) == []
    assert asked.at(29) == []
    (requested,) = asked.at(31)
    assert (requested["node_rank"], requested["ranks"], requested["cause"]) == (1, [3], "straggler")
    assert asked.at(400) == [requested]
    assert launchers[0].poll(0) is None
    request = launchers[1].poll(0)
    assert request is not None
    assert (request.ranks, request.keeps_size, request.dry_run) == ((3,), False, False)
    assert 0.4 < request.min_size_ratio < 0.9, "a smaller run must be faster than one with the slow rank"
    assert launchers[1].poll(0) is None, "a request is followed once"


def test_after_a_request_there_is_a_pause_also_for_the_next_watch(slow_run: RunDir, tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=NODE_RANK)
    events.write("exclusion_requested", ranks=[0], wall_ns=time.time_ns() - 60 * 10**9)
    events.close()
    asked = Asked(slow_run, tmp_path, RECOVERY)
    assert asked.at(0) == asked.at(35) == asked.written("exclusion_requested")
    assert len(asked.at(45)) == 2, "100 s after the earlier one"
    asked.store.close()


@pytest.mark.parametrize(("is_shared", "expected"), [(True, [1, 0]), (False, [1, 1])])
def test_the_watches_of_two_nodes_do_not_both_ask(
    slow_run: RunDir, tmp_path: Path, is_shared: bool, expected: list[int]
) -> None:
    """Both judge the ranks of node 1; on a disk of its own that node's watch is the only one that sees them."""
    if not is_shared:
        slow_run = RunDir(Path(shutil.copytree(slow_run.path, tmp_path / "node-1" / slow_run.run_id)))
        shutil.rmtree(slow_run.node_dir(0))
    folders = [tmp_path / f"watch-{node_rank}" for node_rank in (0, 1)]
    for folder in folders:
        folder.mkdir()
    watches = [Asked(slow_run, folder, RECOVERY, node_rank=rank) for rank, folder in enumerate(folders)]
    for watch in watches:
        watch.at(0)
    assert [len(watch.at(31)) for watch in watches] == expected
    for watch in watches:
        watch.store.close()


def test_a_cause_that_any_device_would_share_is_kept_with_its_reason(slow_run: RunDir, tmp_path: Path) -> None:
    asked = Asked(slow_run, tmp_path, {**RECOVERY, "straggler_after_s": 0.0, "straggler_speedup": 5.0})
    assert asked.at(0) == asked.at(1) == []
    (withheld,) = asked.written("exclusion_withheld")
    assert withheld["ranks"] == [3]
    assert "below 5x" in withheld["reason"]
    asked.store.close()


@pytest.mark.parametrize(("xid", "ranks"), [(64, [[1]]), (79, [])])
def test_an_xid_after_which_the_device_is_replaced(tmp_path: Path, xid: int, ranks: list[list[int]]) -> None:
    run = make_run(tmp_path, steps=10, end="", identities=DEVICES)
    node = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    node.write("xid", xid=xid, device="GPU-1", node="node-0", message="a row could not be remapped")
    node.close()
    asked = Asked(run, tmp_path, {"enabled": True, "on_xid": "exclude", "exclusion_dry_run": True})
    assert [event["ranks"] for event in asked.at(0)] == ranks
    request = RequestFile(run, 0)
    assert request.poll(0) is None, "of before this launch"
    assert all(event["dry_run"] for event in asked.at(1))
    asked.store.close()


def test_damaged_requests_and_those_of_another_attempt_are_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    launcher = RequestFile(run, 0)
    path = run.node_dir(0) / "exclusion-request.json"
    for damaged in ("", "[1]", '{"attempt": 0}', "[" * 100_000, '{"attempt": "x", "ranks": [1]}'):
        path.write_text(damaged)
        assert launcher.poll(0) is None
    request = ExclusionRequest(attempt=1, ranks=(2,), cause="xid", reason="XID 64.")
    assert write_request(run, 0, request)
    assert launcher.poll(0) is None
    assert RequestFile(run, 0).poll(1) is None, "a launcher does not follow what was asked of the one before"
    assert write_request(run, 0, request)
    assert launcher.poll(1) == request


def test_a_run_that_only_reports_has_no_requester(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=NODE_RANK)
    settings = ({}, {**RECOVERY, "enabled": False}, {"on_straggler": "delete"}, {"on_straggler": "report"}, RECOVERY)
    runs = [
        RunDir.create(tmp_path, name=f"r{number}", manifest={"config": {"recovery": recovery}})
        for number, recovery in enumerate(settings)
    ]
    judges = [LiveJudge(run.manifest(), events, Exports(None, None, None, None)) for run in runs]
    found = [ExclusionRequester.of(run, judge, events, node_rank=0) for run, judge in zip(runs, judges, strict=True)]
    assert [requester is not None for requester in found] == [False, False, False, False, True]
