"""The end of a node that leaves an elastic run is not the end of the run."""

from __future__ import annotations

from analyzers.run.ends.run_ends import run_ends
from analyzers.run.records.event_log import EventLog
from probes.tape import event_kinds
from tests.analyzers.standstill import World


def _reasons(world: World, last_s: float) -> list[str]:
    log = EventLog.load(world.store, (event_kinds.RUN_STARTED, event_kinds.RUN_ENDED))
    return [event.text("reason") for event in run_ends(log, last_ns=world.after(last_s))]


def test_a_node_left_and_the_others_went_on() -> None:
    world = World()
    world.event("run_ended", 3.0, node_rank=1, reason="launcher_lost", exit_code=None, message="")
    assert _reasons(world, last_s=60.0) == []
    world.event("run_ended", 61.0, node_rank=0, reason="finished", exit_code=0, message="")
    assert _reasons(world, last_s=60.0) == ["finished"]


def test_it_ends_with_the_node_that_ends_last() -> None:
    world = World()
    world.event("run_ended", 3.0, node_rank=1, reason="failed", exit_code=1, message="")
    assert _reasons(world, last_s=2.5) == ["failed"]
