"""Hangs in dumps in which other members completed the call, so a device has stopped and not the network.

    hang = with_stuck_device(hang, world)

1. For every rank with a dump and each of its groups, the oldest open call is examined, provided that no rank can
   complete the operation before all ranks have entered it. This is done only for three results of the hang analyzer: no
   rank stayed away (`all_entered`), only ranks without a dump did (`not_seen`), or the same devices are stuck
   (`device_stuck`, from dumps that record which calls started).
2. A member has completed the call if it has no open call up to that number, and has later calls or a completed call at
   that number. The call's data had then arrived everywhere.
3. The members in which the call is still open therefore have a local problem: a kernel that does not end, a lost GPU, a
   stopped watchdog. Several members may have one, in calls of different groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analyzers.finding import Finding, evidence_of
from analyzers.hangs.files.dumped_world import DumpedWorld
from analyzers.hangs.wait_graph import oldest_calls, waits_of
from analyzers.run.calls.recorded_calls import Call
from analyzers.wording import ranks_text, sentence
from store.readers.dumps.recorded_call import TOGETHER

__all__ = ["with_calls_of_each", "with_stuck_device"]

MAX_CALLS = 4
"""Maximum number of calls named in the finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeftCall:
    """A call that the ranks `completed` have left and the ranks `stuck` have not."""

    call: Call
    stuck: tuple[int, ...]
    completed: tuple[int, ...]

    @property
    def text(self) -> str:
        done = f"{ranks_text(self.completed)} completed"
        return f"{ranks_text(self.stuck)} did not complete {self.call.text}, which {done}"


def with_stuck_device(hang: Finding, world: DumpedWorld) -> Finding:
    """The finding with cause `device_stuck` if other members completed the call; otherwise unchanged."""
    if hang.cause not in ("all_entered", "not_seen", "device_stuck"):
        return hang
    left = _fewest(_left_calls(world), (hang.evidence.get("process_group"), hang.evidence.get("seq")))
    agrees = hang.cause != "device_stuck" or {rank for one in left for rank in one.stuck} == set(hang.ranks)
    return _device_stuck(hang, world, left) if left and agrees else hang


def _left_calls(world: DumpedWorld) -> list[_LeftCall]:
    calls = {
        (call.group, call.seq): call
        for view in world.view.ranks.values()
        for call in oldest_calls(view.calls)
        if call.op in TOGETHER
    }
    found = []
    for call in calls.values():
        members = world.view.members.get(call.group, ())
        completed = tuple(rank for rank in members if _completed(world, call, rank))
        stuck = tuple(rank for rank in members if _is_in(world, call, rank, completed)) if completed else ()
        if stuck:
            found.append(_LeftCall(call=call, stuck=stuck, completed=completed))
    return found


def _fewest(left: Sequence[_LeftCall], named: tuple[object, object]) -> list[_LeftCall]:
    """Calls that together cover all stuck ranks, those with the most ranks first; on a tie the hang's own call."""
    ordered = sorted(left, key=lambda one: (-len(one.stuck), (one.call.group, one.call.seq) != named,
                                            one.call.issue_ns))  # fmt: skip
    chosen: list[_LeftCall] = []
    covered: set[int] = set()
    for one in ordered:
        if not covered.issuperset(one.stuck):
            covered.update(one.stuck)
            chosen.append(one)
    return chosen


def _device_stuck(hang: Finding, world: DumpedWorld, left: Sequence[_LeftCall]) -> Finding:
    stuck = tuple(sorted({rank for one in left for rank in one.stuck}))
    many, call = len(stuck) > 1, left[0].call
    waiting = sorted({wait.call.text for wait in waits_of(world.view) if wait.awaited in stuck})
    next_call = f" The others wait in {waiting[0]}." if waiting else ""
    place = {"op": call.op, "process_group": call.group, "seq": call.seq, "bytes": call.num_bytes,
             "caller": call.caller}  # fmt: skip
    completed = sorted({rank for one in left for rank in one.completed} - set(stuck))
    evidence = {name: value for name, value in hang.evidence.items() if name != "unseen_ranks"} | place
    evidence["waiting_ranks"] = [rank for rank in evidence_of(hang).get("waiting_ranks") or () if rank not in stuck]
    text = "; ".join(one.text for one in left[:MAX_CALLS])
    return replace(
        hang,
        ranks=stuck,
        cause="device_stuck",
        advice="hang-device_stuck",
        summary=f"{sentence(text)[:-1]}: {'their' if many else 'its'} device or watchdog stopped.{next_call}",
        evidence={**evidence, "completed_ranks": completed[:64], "calls_not_reached": waiting[:MAX_CALLS]},
    )


def _completed(world: DumpedWorld, call: Call, rank: int) -> bool:
    """True if a dumped member completed the call: it has reached the call's number, and has no open call up to that
    number."""
    view, seq = world.view.ranks.get(rank), world.view.last_seq.get((call.group, rank), -1)
    if view is None or seq < call.seq:
        return False
    return not any(other.group == call.group and other.seq <= call.seq for other in view.calls)


def _is_in(world: DumpedWorld, call: Call, rank: int, completed: Sequence[int]) -> bool:
    """True if a dumped member has the call open, and its dump is not older than later calls of the others."""
    view = world.view.ranks.get(rank)
    if view is None or not any((other.group, other.seq) == (call.group, call.seq) for other in view.calls):
        return False
    newest_ns = max(world.view.ranks[other].last_ns for other in completed)
    return not world.clock_is_known or world.rows.dumped_ns[rank] >= newest_ns


def with_calls_of_each(hang: Finding, world: DumpedWorld) -> Finding:
    """Add to the finding the call in which the other ranks wait for each culprit, if these calls differ."""
    awaited: dict[int, str] = {}
    for wait in waits_of(world.view):
        if wait.awaited in hang.ranks:
            awaited.setdefault(wait.awaited, wait.call.text)
    if len(set(awaited.values())) < 2:
        return hang
    calls: dict[str, list[int]] = {}
    for rank, call in sorted(awaited.items()):
        calls.setdefault(call, []).append(rank)
    each = ", ".join(f"{ranks_text(ranks)} in {call}" for call, ranks in [*calls.items()][:MAX_CALLS])
    return replace(
        hang, summary=f"{hang.summary} The others wait for {each}.", evidence={**hang.evidence, "awaited": calls}
    )
