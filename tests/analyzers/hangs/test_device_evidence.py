"""Readings of a rank's GPU and host during its silence are in the finding of the hang."""

from __future__ import annotations

from typing import Any

from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step
from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs
from tests.analyzers.standstill import SECOND, World

SILENT_S = 30.0
SOUND = {
    "gpu_utilization_ratio": 1.0,
    "temperature_celsius": 60.0,
    "nvlink_errors_total": 3,
    "ecc_uncorrected_total": 0,
}


def standstill(*, readings_until_s: float = SILENT_S, xid: int = 0, **last: Any) -> Finding:
    """Rank 1 never enters; its GPU is read until then, `last` is its newest reading. The host's go on."""
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.span(1, "forward")
    place = {"host": "node-0", "device_uuid": "GPU-1", "world_size": 4, "pp": 0}
    world.store.add("ranks", [{"attempt": 0, "rank": 1, "wall_ns": world.now_ns - 20 * SECOND, **place}])
    rows = []
    for second in range(-30, int(SILENT_S) + 1):
        about = {"attempt": 0, "rank": -1, "sample_ns": world.after(second), "node": "node-0"}
        host = {"load_1m": 6.0, "num_cpus": 4, "memory_used_bytes": 90, "memory_total_bytes": 100}
        rows.append({**about, "device": "host", **dict.fromkeys(SOUND), **host})
        if second <= readings_until_s:
            newest = last if second + 1 > readings_until_s else {}
            rows.append({**about, "device": "GPU-1", **SOUND, **newest, **dict.fromkeys(host)})
    world.store.add("health", rows)
    if xid:
        world.event("xid", -2.0, xid=xid, device="GPU-1", node="node-0", message="")
        world.event("xid", -2.0, xid=31, device="GPU-7", node="node-0", message="")  # of another rank
    (finding,) = judged_hangs(world.store, StallPolicy(), world.after(SILENT_S))
    return finding


def test_an_xid_shortly_before_the_hang_is_evidence() -> None:
    finding = standstill(xid=79)
    assert " The GPU of rank 1 reported XID 79: " in finding.summary
    assert "bus" in finding.summary
    assert finding.evidence["xids"] == [79]


def test_a_gpu_that_stopped_answering_is_evidence() -> None:
    finding = standstill(readings_until_s=-1.0)
    assert finding.summary.endswith(" The GPU of rank 1 has not answered for 31 s.")


def test_a_sound_gpu_is_evidence_and_no_accusation() -> None:
    finding = standstill(nvlink_errors_total=10)
    assert "GPU" not in finding.summary
    known = {"gpu_utilization_ratio": 1.0, "temperature_celsius": 60.0, "nvlink_errors": 7,
             "host_load_per_cpu": 1.5, "host_memory_ratio": 0.9}  # fmt: skip
    assert finding.evidence.items() >= known.items()


def test_without_readings_nothing_changes() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    (finding,) = judged_hangs(world.store, StallPolicy(), world.after(SILENT_S))
    assert "gpu_utilization_ratio" not in finding.evidence
    assert finding.ranks == (1,)


def test_a_stopped_process_is_continued_by_its_id() -> None:
    """On one host; with processes on several, a command would continue only some of them."""

    def stopped(*hosts: str) -> str:
        world, ranks = World(), range(1, 1 + len(hosts))
        for rank in range(4):
            world.enter(rank)
        about = {"attempt": 0, "wall_ns": world.now_ns}
        rows = [{"rank": n, "host": host, "pid": 700 + n} for n, host in zip(ranks, hosts, strict=True)]
        world.store.add("ranks", [about | row for row in rows])
        for rank in ranks:
            world.event("rank_state", 0.5, state_rank=rank, state="stopped", os_state="T")
        (finding,) = judged_hangs(world.store, StallPolicy(), world.after(SILENT_S))
        return next_step(finding)

    assert stopped("vm").startswith("Continue or restart the process of rank 1. `kill -CONT 701` on vm continues it.")
    assert "`kill -CONT 701 702` on vm continues them." in stopped("vm", "vm")
    assert "kill -CONT" not in stopped("vm", "other")
