"""Records of launcher and node of a played run: its end, readings of its devices, XIDs.

write_end(run, world, layout, fault, clock)
"""

from __future__ import annotations

from typing import Any

from probes.tape.events import EventWriter
from probes.tape.format.names import NameWriter
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, TapeWriter
from probes.tape.rundir import NODE_RANK, RunDir
from tests.support.played.faults import Fault
from tests.support.played.host_time import PlayedClock
from tests.support.played.programs import Layout
from tests.support.played.streams import World

__all__ = ["write_end"]

S = 10**9
WATCHED_S = 30
HOLD_S = 600
CLOCK_HERTZ = 1.98e9
_DEATHS = {
    "dead_gpu": (
        "CUDA error: GPU is lost. CUDA kernel errors might be asynchronously reported at some other API call.",
        79,
    ),
    "ecc_error": ("CUDA error: uncorrectable ECC error encountered. CUDA kernel errors might be asynchronous.", 48),
}


def write_end(run: RunDir, world: World, layout: Layout, fault: Fault | None, clock: PlayedClock) -> None:
    """Write the node's events and readings."""
    last = _last_ns(world)
    for node in range(layout.num_ranks // layout.ranks_per_node):
        folder = run.node_dir(node)
        folder.mkdir(parents=True, exist_ok=True)
        end = last + (WATCHED_S * S if world.is_stuck and not (fault and fault.is_death) else 0)
        _readings(run, node, layout, fault, clock, _step_ns(world, fault), end)
        if node == 0:
            _events(run, world, layout, fault, clock, last)


def _last_ns(world: World) -> int:
    times = [ns for machine in world.machines for ns, _ in machine.log]
    times += [end for call in world.calls for end in call.end_ns.values()]
    return max(times)


def _step_ns(world: World, fault: Fault | None) -> int:
    """When the fault's step began on its rank."""
    if fault is None:
        return 0
    log = world.machines[fault.rank].log
    return next((ns for ns, op in log if getattr(op, "step", None) == fault.step), log[-1][0])


def _events(run: RunDir, world: World, layout: Layout, fault: Fault | None, clock: PlayedClock, last: int) -> None:
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)

    def write(ns: int, kind: str, **detail: Any) -> None:
        events.write(kind, **{"wall_ns": clock.wall_ns(ns), **detail})

    write(-S, "run_started", nproc_per_node=layout.ranks_per_node, max_restarts=0)
    write(-S // 2, "attempt_started", world_size=layout.num_ranks)
    if fault is not None and fault.is_death:
        _die(run, write, world, layout, fault, clock)
    elif world.is_stuck:
        write(last + WATCHED_S * S, "stacks", path="stacks", ranks=list(range(layout.num_ranks)))
        write(last + HOLD_S * S, "run_ended", reason="interrupted", exit_code=130, message="SIGINT received")
    else:
        write(last + S // 3, "run_ended", reason="finished", exit_code=0, message="")
    events.close()


def _die(run: RunDir, write: Any, world: World, layout: Layout, fault: Fault, clock: PlayedClock) -> None:
    """The rank raises, its launcher sees it; the watchdogs of the others abort their processes after that."""
    message, xid = _DEATHS[fault.kind]
    moment = world.machines[fault.rank].log[-1][0] + 1_000_000
    rank_events = EventWriter(run.rank_dir(0, fault.rank) / "events.jsonl", attempt=0, rank=fault.rank)
    trace = f'Traceback (most recent call last):\n  File "train.py", line 140, in main\nRuntimeError: {message}\n'
    rank_events.write(
        "exception", step=fault.step, type="RuntimeError", message=message, traceback=trace,
        wall_ns=clock.wall_ns(moment),
    )  # fmt: skip
    rank_events.close()
    device = {"device": layout.device(fault.rank), "node": f"node-{fault.rank // 4}"}
    write(moment - 500_000, "xid", xid=xid, message=f"NVRM: Xid (PCI:0000:1b:00): {xid}", **device)
    seen = moment + S // 10
    write(seen, "rank_exit", exit_rank=fault.rank, pid=10_000 + fault.rank, exit_code=1, signal=None, message=message)
    for rank in range(len(world.machines)):
        if rank != fault.rank:
            aborted = {"exit_code": -6, "signal": "SIGABRT", "message": "Watchdog caught collective operation timeout"}
            write(seen + 5 * S + rank, "rank_exit", exit_rank=rank, pid=10_000 + rank, **aborted)
    write(seen + 7 * S, "run_ended", reason="failed", exit_code=1, message=f"rank {fault.rank} ended with exit code 1")


def _readings(
    run: RunDir, node: int, layout: Layout, fault: Fault | None, clock: PlayedClock, since: int, end: int
) -> None:
    """Ten readings a second of the node's devices: played runs are short."""
    folder = run.node_dir(node)
    tape = TapeWriter(folder, TABLES["health"], rank=NODE_RANK, attempt=0)
    names = NameWriter(folder / "names.jsonl")
    columns = [column.name for column in TABLES["health"].columns]
    every = max(S // 10, end // 400)
    for at in range(0, end, every):
        clock.set(at)
        for rank in range(layout.num_ranks):
            if layout.node(rank) != node:
                continue
            is_hit = fault is not None and fault.rank == rank and at >= since
            values = {
                "sample_ns": clock.mono_ns(),
                "node": names(f"node-{node}"),
                "device": names(layout.device(rank)),
                "gpu_utilization_ratio": 0.98,
                "temperature_celsius": 62.0,
                "power_watts": 610.0,
                "sm_clock_hertz": CLOCK_HERTZ
                / (fault.factor if is_hit and fault and fault.kind == "slow_clock" else 1),
                "throttle_reasons": 0,
                "ecc_uncorrected_total": int(is_hit and fault is not None and fault.kind == "ecc_error"),
            }
            row = tape.unset_row()
            for name, value in values.items():
                row[columns.index(name)] = value
            tape.append(COMPLETE, *row)
    tape.close()
    names.close()
