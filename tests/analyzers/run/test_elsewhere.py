"""Ranks of nodes whose records are not in the folder: they are not named as if they had been seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from analyzers.account.goodput import measure
from analyzers.account.wait_split import split_waits
from analyzers.communication.analyze import communication
from analyzers.report.wording.account_lines import goodput_line
from analyzers.report.wording.explained import next_step
from analyzers.run.analyze import record_coverage
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, take_snapshot
from analyzers.run.policy import StallPolicy
from analyzers.run.records.elsewhere import ranks_not_here
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from tests.analyzers.judged import checked, judged_hangs, judged_losses
from tests.analyzers.standstill import START_NS, World

ALL = {"dp[0,1,2,3]": (0, 1, 2, 3)}


def one_node(*, nproc: int | None = 2, node: int = 0, first: int = 0) -> World:
    """What a node of two writes to its own disk: two ranks of a world of four, and its launcher's word."""
    world = World(ranks=2, groups=ALL)
    for table in ("ranks", "steps", "collectives", "process_groups"):
        world.store.connection.execute(f"UPDATE {table} SET rank = rank + {first}")
    world.store.connection.execute(f"UPDATE ranks SET world_size = 4, node_rank = {node}, local_rank = rank - {first}")
    world.store.event("run_started", wall_ns=START_NS - 1, node_rank=node, nproc_per_node=nproc)
    return world


def elsewhere(world: World, attempt: int = 0) -> set[int]:
    return set(take_snapshot(world.store, attempt, EventLog.load(world.store, SNAPSHOT_EVENTS)).elsewhere)


def test_a_hang_names_no_rank_of_another_nodes_disk() -> None:
    world = one_node()
    for rank in (0, 1):
        world.enter(rank)
    world.event("stacks", 6.0, path="stacks", ranks=[0, 1])
    (finding,) = judged_hangs(world.store, StallPolicy())
    assert (finding.cause, finding.ranks) == ("not_seen", ())
    assert finding.evidence["unseen_ranks"] == [2, 3]
    assert "waits for ranks 2 and 3, of which there are no records here" in finding.summary.lower()
    assert "the folders of all nodes together" in next_step(finding)


def test_a_rank_that_records_here_and_does_not_enter_is_named() -> None:
    world = one_node()
    world.enter(0)
    world.event("stacks", 6.0, path="stacks", ranks=[0, 1])
    (finding,) = judged_hangs(world.store, StallPolicy())
    assert (finding.cause, finding.ranks) == ("not_entered", (1,))


def test_coverage_says_where_the_records_of_the_others_are() -> None:
    world = one_node()
    world.store.add("ranks", [{"attempt": 0, "rank": 1, "wall_ns": 2, "world_size": 4}])
    (finding,) = checked([found for found in record_coverage(world.store, Scope()) if found.ranks])
    assert finding.ranks == (2, 3)
    assert "no records of ranks 2 and 3 in this folder" in finding.summary
    assert "the published address" in finding.summary


def test_the_launcher_of_one_node_is_not_that_of_the_run() -> None:
    world = one_node()
    world.event("launcher_lost", 2.0, node_rank=0, pid=4711, ranks=[0, 1])
    (finding,) = judged_losses(world.store, StallPolicy())
    assert finding.summary.startswith("The launcher of node 0 ended")


@pytest.mark.parametrize(
    ("nproc", "node", "first", "unseen"),
    [(2, 0, 0, {2, 3}), (2, 1, 2, {0, 1}), (4, 0, 0, set()), (None, 0, 0, set()), (None, 1, 2, {0, 1}), (3, 0, 0, {3})],
    ids=["first-node", "second-node", "one-node", "unknown", "unknown-second", "a-rank-never-started"],
)
def test_ranks_that_a_recorded_launcher_starts_are_not_elsewhere(
    nproc: int | None, node: int, first: int, unseen: set[int]
) -> None:
    assert elsewhere(one_node(nproc=nproc, node=node, first=first)) == unseen


def test_ranks_of_a_launcher_that_is_recorded_here_never_started() -> None:
    world = one_node()
    world.store.event("run_started", wall_ns=START_NS - 1, node_rank=1, nproc_per_node=2)
    assert elsewhere(world) == set()


def test_a_device_that_was_left_out_before_is_no_rank_of_the_node() -> None:
    world = one_node()
    world.store.connection.execute("DELETE FROM ranks WHERE rank = 1; DELETE FROM steps WHERE rank = 1")
    world.store.connection.execute("DELETE FROM collectives WHERE rank = 1")
    world.store.event("excluded", attempt=-1, wall_ns=START_NS - 1, node_rank=0, device="cuda:1")
    assert elsewhere(world) == {1, 2, 3}


@pytest.mark.parametrize("nproc", [2, 4])
def test_waits_for_ranks_without_records_are_not_called_transfers(nproc: int) -> None:
    """The late rank may be one of the two that are on another node, or that were started here but recorded no step."""
    world = one_node(nproc=nproc)
    for change in (
        "collectives SET wait_ns = end_ns - issue_ns",
        "steps SET collective_wait_ns = 3000000, forward_ns = 10000000 WHERE duration_ns IS NOT NULL",
    ):
        world.store.connection.execute(f"UPDATE {change}")
    split = split_waits(world.store)
    account = measure(world.store)
    assert account is not None
    (finding,) = communication(world.store, Scope())
    assert (split.basis, split.late_ratio) == ("", {})
    assert finding.status == "insufficient_data"
    assert "no records of ranks 2 and 3, so waiting for them would count as transfer time" in finding.summary
    assert "communication or waiting for others" in goodput_line(account)


@pytest.mark.parametrize(("world", "away"), [(one_node, {2, 3}), (lambda: World(ranks=2, groups=ALL), set())])
def test_before_the_first_step_has_ended_the_nodes_are_told_apart(world: Callable[[], World], away: set[int]) -> None:
    store = world().store
    store.connection.execute("DELETE FROM steps")
    assert ranks_not_here(store, attempt=0) == away
    assert not split_waits(store).late_ratio
