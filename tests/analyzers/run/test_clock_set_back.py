"""A hang is found, and its length is right, where the wall clock was set back while it lasted."""

from __future__ import annotations

import pytest

from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs
from tests.analyzers.standstill import SECOND, World

BOOT_NS = 500 * SECOND
"""By the monotonic clock, when the ranks were started."""


def hung(set_back_s: float, *, another_boot: bool = False, nodes: int = 1) -> World:
    """Rank 1 did not enter; `watch` reports it after 6 s, the launcher is told to end after 20 s."""
    world = World()
    start_ns = world.now_ns - 15 * SECOND

    def event(kind: str, after_s: float, **detail: object) -> None:
        mono_ns = after_s * SECOND if another_boot else BOOT_NS + world.after(after_s) - start_ns
        world.event(kind, after_s - set_back_s, mono_ns=int(mono_ns), **detail)

    for rank in world.ranks:
        world.store.event("rank", rank=rank, wall_ns=start_ns, mono_ns=BOOT_NS, node_rank=rank % nodes)
        if rank != 1:
            world.enter(rank)
    hang = {"finding_kind": "hang", "status": "fired", "severity": "critical", "cause": "not_entered"}
    event("stacks", 6.0, path="stacks", ranks=[0, 1, 2, 3])
    event("finding", 6.1, analyzer="hang", finding_ranks=[1], summary="", **hang)
    for rank in world.ranks:
        event("rank_stopped", 20.0, exit_rank=rank, pid=1, exit_code=-15)
    event("run_ended", 20.1, node_rank=0, reason="interrupted", exit_code=130, message="")
    return world


@pytest.mark.parametrize("set_back_s", [0.0, 30.0, 3600.0])
def test_the_hang_and_its_length_are_known(set_back_s: float) -> None:
    (finding,) = judged_hangs(hung(set_back_s).store, StallPolicy())
    assert (finding.cause, finding.ranks) == ("not_entered", (1,))
    assert finding.evidence["silent_s"] == pytest.approx(20, abs=0.5)


def test_events_after_a_reboot_keep_their_own_time() -> None:
    (finding,) = judged_hangs(hung(0.0, another_boot=True).store, StallPolicy())
    assert finding.evidence["silent_s"] == pytest.approx(20, abs=0.5)


def test_clocks_of_several_nodes_give_no_order() -> None:
    assert judged_hangs(hung(3600.0, nodes=2).store, StallPolicy()) == []
