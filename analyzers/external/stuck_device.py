"""A hang of dumps whose call others completed: the device of those who did not has stopped, and it is no network.

    hang = with_stuck_device(hang, world, dumps)

1. The hang analyzer names ranks that are in a call which everybody entered (`all_entered`). Those of them that are no
   members of its group are left out: they wait in calls of other groups.
2. A member that has no open call up to that number, and later ones or a completed one at it, has completed it. In an
   operation that nobody leaves before all have entered, the call's data had arrived everywhere.
3. So what keeps the named ranks is their own: a kernel that does not end, a GPU that is gone, a watchdog that stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzers.external.dumped_world import DumpedWorld
from analyzers.finding import Finding
from analyzers.hangs.culprits import TOGETHER
from analyzers.hangs.wait_graph import oldest_calls, waits_of
from analyzers.run.recorded_calls import Call
from analyzers.wording import listed

__all__ = ["with_calls_of_each", "with_stuck_device"]


def with_stuck_device(hang: Finding, world: DumpedWorld) -> Finding:
    """The finding with cause `device_stuck` where other members completed the call; unchanged otherwise."""
    if hang.cause != "all_entered":
        return hang
    for call in _calls_of_named(hang, world):
        members = world.view.members.get(call.group, ())
        completed = [rank for rank in members if _completed(world, call.group, call.seq, rank)]
        stuck = tuple(rank for rank in hang.ranks if rank in members and rank not in completed)
        if completed and stuck:
            return _with(hang, world, call, stuck, completed)
    return hang


def _calls_of_named(hang: Finding, world: DumpedWorld) -> list[Call]:
    """The oldest open collectives of the named ranks that no rank leaves before all have entered; `hang`'s first."""
    named = (hang.evidence.get("process_group"), hang.evidence.get("seq"))
    views = [world.view.ranks[rank] for rank in hang.ranks if rank in world.view.ranks]
    calls = {(c.group, c.seq): c for view in views for c in oldest_calls(view.calls) if c.op in TOGETHER}
    return sorted(calls.values(), key=lambda call: ((call.group, call.seq) != named, call.issue_ns))


def _with(hang: Finding, world: DumpedWorld, call: Call, stuck: tuple[int, ...], completed: Sequence[int]) -> Finding:
    many, group, seq, op = len(stuck) > 1, call.group, call.seq, call.op
    waiting = sorted({wait.call.text for wait in waits_of(world.view) if wait.awaited in stuck})
    next_call = f" The others wait in {waiting[0]}." if waiting else ""
    place = {"op": op, "process_group": group, "seq": seq, "bytes": call.num_bytes, "caller": call.caller}
    of_call = {**hang.evidence, **place}
    return replace(
        hang,
        ranks=stuck,
        cause="device_stuck",
        advice="hang-device_stuck",
        summary=f"Rank{'s' * many} {listed(stuck)} did not complete {op} #{seq} (group {group}), which rank"
        f"{'s' * (len(completed) > 1)} {listed(completed)} completed: {'their' if many else 'its'} device or watchdog "
        f"stopped.{next_call}",
        evidence={**of_call, "completed_ranks": list(completed)[:64], "never_reached": waiting[:4]},
    )


def _completed(world: DumpedWorld, group: str, seq: int, rank: int) -> bool:
    """True if a dumped member completed the call: it reached it, and no call up to it is open."""
    view = world.view.ranks.get(rank)
    if view is None or (group, rank) not in world.recorded or world.view.last_seq[group, rank] < seq:
        return False
    return not any(call.group == group and call.seq <= seq for call in view.calls)


def with_calls_of_each(hang: Finding, world: DumpedWorld) -> Finding:
    """The finding with the call that is awaited from each culprit, where they are awaited in different ones."""
    awaited: dict[int, str] = {}
    for wait in waits_of(world.view):
        if wait.awaited in hang.ranks:
            awaited.setdefault(wait.awaited, wait.call.text)
    if len(set(awaited.values())) < 2:
        return hang
    calls: dict[str, list[int]] = {}
    for rank, call in sorted(awaited.items()):
        calls.setdefault(call, []).append(rank)
    each = ", ".join(f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} in {call}" for call, ranks in _first(calls))
    return replace(
        hang, summary=f"{hang.summary} The others wait for {each}.", evidence={**hang.evidence, "awaited": calls}
    )


def _first(calls: dict[str, list[int]], number: int = 4) -> Sequence[tuple[str, list[int]]]:
    return list(calls.items())[:number]
