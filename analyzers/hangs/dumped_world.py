"""Dumps of the flight recorder as the picture that `hang` and `waitfor` judge: the same input as from our tapes.

    world = assemble(dumps)
    world.view             # AttemptView: calls in flight, last numbers by group and rank, members
    world.undumped         # ranks that left no dump
    world.reference_ns     # when the picture was taken

1. Groups are named as ours are (`world:0-3`, `tp:4-5`); two groups of the same members are told apart by torch's name.
2. A call is in flight until its end is recorded. One that is open although a later one of its group is done was never
   asked about: left out, as in `snapshot`.
3. gloo records that a call is over and not whether it failed: the newest call of a rank cannot have succeeded if a
   member that dumped later never entered it, or called something else there. It is taken for one in flight.
4. On devices a call is only enqueued until its kernel starts. Where a dump tells which did (`tells_started`), the
   others are `queued`, as in `recorded_calls`; where it does not, that is unknown (`Call.host_only`).
5. p2p calls have no number that both sides share. They are counted, from the start where neither ring lost any, else
   from the last that is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analyzers.hangs.culprits import TOGETHER
from analyzers.hangs.wait_graph import oldest_calls
from analyzers.run.recorded_calls import Call
from analyzers.run.snapshot import AttemptView, RankView
from probes.collectives.group_label import group_label
from store.readers.flight_recorder import RankDump
from store.readers.recorded_call import GroupKey, Recorded

__all__ = ["DumpedWorld", "assemble"]

MARGIN_NS = 60 * 10**9
MAX_WORLD = 1_000_000
FIRST_WALL_NS = 10**18
"""September 2001: earlier times are none of a wall clock, such as those of a host's uptime."""
LONGEST_SILENCE_NS = 3 * 86_400 * 10**9
"""A file written later than this after its newest record is a copy: no rank is left waiting for longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedWorld:
    """All dumps together. `dropped` counts records that a rank's ring no longer held."""

    view: AttemptView
    reference_ns: int
    clock_is_known: bool
    undumped: tuple[int, ...]
    dropped: Mapping[int, int]
    timed_out: tuple[int, ...]
    """Ranks with a call that a watchdog gave up: proof of a hang by itself."""
    dumped_ns: Mapping[int, int]
    unlisted: frozenset[str]
    """Groups whose members the dumps do not list (gloo): a rank without a dump may belong to them unseen."""
    recorded: frozenset[tuple[str, int]]
    """(group, rank) of which the rank's own dump holds calls: of others only is assumed how far they came."""


def assemble(dumps: Sequence[RankDump]) -> DumpedWorld:
    """Put the dumps of different ranks together. They may be of any number of ranks, but one a rank."""
    ranks = {dump.rank: dump for dump in dumps}
    members, world_size = _members(ranks)
    labels = _labels(members)
    _reopen_failed(ranks, members)
    calls = {rank: _open_calls(dump, labels, members, ranks) for rank, dump in ranks.items()}
    by_records = {(labels[group], rank): seq for rank, dump in ranks.items() for group, seq in dump.last_seq.items()}
    last_seq = by_records | _unseen(ranks, members, labels)
    queued: dict[tuple[str, int], int] = {}
    last_p2p: dict[tuple[int, str, int], int] = {}
    queued_p2p: dict[tuple[int, str, int], int] = {}
    for rank, dump in ranks.items():
        for (group, op, peer), recorded in dump.p2p.items():
            other = _global(members[group], peer)
            if other is not None:
                first = _first_number(dump, ranks.get(other), (group, op, peer))
                key = (rank, op, other)
                last_p2p[key] = max(last_p2p.get(key, -1), first + len(recorded) - 1)
    views = {}
    for rank, dump in ranks.items():
        begun, behind = calls[rank]
        for call in oldest_calls(tuple(behind)):
            if call.is_p2p and call.peer is not None:
                place = (rank, call.op, call.peer)
                queued_p2p[place], last_p2p[place] = last_p2p[place], call.seq - 1
            elif not call.is_p2p:
                queued[call.group, rank], last_seq[call.group, rank] = last_seq[call.group, rank], call.seq - 1
        views[rank] = RankView(
            rank=rank, last_ns=dump.last_ns, step_is_open=True, finished_steps=1, calls=tuple(begun),
            enqueued=tuple(behind),
        )  # fmt: skip
    undumped = tuple(rank for rank in _everybody(members, world_size) if rank not in ranks)
    view = AttemptView(
        attempt=0,
        ranks=views,
        members={labels[group]: ranks_of for group, ranks_of in members.items()},
        last_seq=last_seq,
        last_p2p=last_p2p,
        queued=queued,
        queued_p2p=queued_p2p,
        world_size=len(views),  # who is missing is judged apart: it must not look like a slow start
        elsewhere=frozenset(undumped),
    )
    reference_ns, clock_is_known = _reference(dumps, view)
    return DumpedWorld(
        view=view,
        reference_ns=reference_ns,
        clock_is_known=clock_is_known,
        undumped=undumped,
        dropped={rank: dump.dropped for rank, dump in sorted(ranks.items()) if dump.dropped},
        timed_out=tuple(sorted(rank for rank, dump in ranks.items() if _gave_up(dump))),
        dumped_ns={rank: max(dump.modified_ns, dump.last_ns) for rank, dump in ranks.items()},
        unlisted=frozenset(labels[group] for group in members if not group[2]),
        recorded=frozenset(by_records),
    )


def _members(ranks: Mapping[int, RankDump]) -> tuple[dict[GroupKey, tuple[int, ...]], int]:
    """Members of each group: as configured, else who recorded in it; of the default group everybody."""
    seen: dict[GroupKey, set[int]] = {}
    world_size = max(ranks, default=-1) + 1
    for rank, dump in ranks.items():
        for group in {*dump.groups.values(), *dump.last_seq, *(group for group, *_ in dump.p2p)}:
            seen.setdefault(group, set()).add(rank)
    for group in seen:
        if group[1] == "default_pg":
            world_size = max(world_size, max(group[2], default=-1) + 1)
    world_size = min(world_size, MAX_WORLD)
    everybody = tuple(range(world_size))
    unlisted = {group: everybody if group[1] == "default_pg" else tuple(sorted(seen[group])) for group in seen}
    return {group: group[2] or unlisted[group] for group in seen}, world_size


def _everybody(members: Mapping[GroupKey, tuple[int, ...]], world_size: int) -> list[int]:
    listed = {rank for ranks in members.values() for rank in ranks}
    return sorted(listed | set(range(world_size)))


def _labels(members: Mapping[GroupKey, tuple[int, ...]]) -> dict[GroupKey, str]:
    plain = {group: group_label(group[1], ranks) for group, ranks in members.items()}
    times = Counter(plain.values())
    return {group: label if times[label] == 1 else f"{label}#{group[0]}" for group, label in plain.items()}


def _reopen_failed(ranks: Mapping[int, RankDump], members: Mapping[GroupKey, tuple[int, ...]]) -> None:
    for group, ranks_of in members.items():
        dumps = [ranks[rank] for rank in ranks_of if rank in ranks]
        newest = [dump.calls[group][dump.last_seq[group]] for dump in dumps if group in dump.last_seq]
        for seq in {call.seq for call in newest if call.done}:
            here = [dump.calls[group][seq] for dump in dumps if seq in dump.calls.get(group, ())]
            ops = {call.op for call in here}
            stuck = any(not call.done or not call.has_events for call in here)
            behind = [dump for dump in dumps if dump.last_seq.get(group, -1) < seq and _complete(dump, group)]
            behind_ns = max((max(dump.modified_ns, dump.last_ns) for dump in behind), default=0)
            for call in newest:
                if call.seq != seq or not call.done:
                    continue
                failed = not call.has_events and call.op in TOGETHER and behind_ns >= call.issue_ns and behind
                call.done = not (failed or (len(ops) > 1 and stuck))


def _complete(dump: RankDump, group: GroupKey) -> bool:
    """True if the newest call of a group is known; a ring that lost records may have lost all of it."""
    return not dump.dropped or group in dump.last_seq


def _open_calls(
    dump: RankDump,
    labels: Mapping[GroupKey, str],
    members: Mapping[GroupKey, tuple[int, ...]],
    ranks: Mapping[int, RankDump],
) -> tuple[list[Call], list[Call]]:
    """Calls in flight, and those that were only enqueued."""
    found: list[tuple[Call, bool]] = []
    for group, calls in dump.calls.items():
        last_done = max((call.seq for call in calls.values() if call.done), default=-1)
        found += [
            (_call(dump, labels[group], call, call.seq), _is_behind(dump, call))
            for call in calls.values()
            if not call.done and call.seq > last_done
        ]
    for key, recorded in dump.p2p.items():
        peer = _global(members[key[0]], key[2])
        first = _first_number(dump, ranks.get(peer) if peer is not None else None, key)
        for i in range(_num_done(recorded), len(recorded)):
            call = _call(dump, labels[key[0]], recorded[i], first + i, peer)
            found.append((call, _is_behind(dump, recorded[i])))
    found.sort(key=lambda item: item[0].issue_ns)
    return [call for call, is_behind in found if not is_behind], [call for call, is_behind in found if is_behind]


def _is_behind(dump: RankDump, call: Recorded) -> bool:
    return call.has_events and dump.tells_started and not call.started


def _call(dump: RankDump, label: str, call: Recorded, seq: int, peer: int | None = None) -> Call:
    return Call(
        rank=dump.rank, group=label, seq=seq, op=call.op, issue_ns=call.issue_ns, num_bytes=call.num_bytes,
        dtype=call.dtype, shape=call.shape, caller=call.caller, peer=peer,
        host_only=call.has_events and not dump.tells_started,
    )  # fmt: skip


def _first_number(dump: RankDump, other: RankDump | None, key: tuple[GroupKey, str, int]) -> int:
    """The number of the first kept call of a direction, counted from the start, or such that the first open is 0."""
    if dump.dropped or (other is not None and other.dropped):
        return -_num_done(dump.p2p[key])
    return dump.p2p_before.get(key, 0)


def _num_done(recorded: Sequence[Recorded]) -> int:
    """Number of calls of one direction before the first that is in flight."""
    return max((i + 1 for i, call in enumerate(recorded) if call.done), default=0)


def _global(members: tuple[int, ...], peer: int) -> int | None:
    return members[peer] if peer < len(members) else None


def _unseen(
    ranks: Mapping[int, RankDump], members: Mapping[GroupKey, tuple[int, ...]], labels: Mapping[GroupKey, str]
) -> dict[tuple[str, int], int]:
    """Ranks whose ring lost all that they called in a group: how far they came is not known, so nobody waits for them.

    `pg_status` says it where the rank's own number of the group is known: the default group is number 0.
    """
    found: dict[tuple[str, int], int] = {}
    furthest: dict[GroupKey, int] = {}
    for dump in ranks.values():
        for group, seq in dump.last_seq.items():
            furthest[group] = max(seq, furthest.get(group, -1))
    for group, last in furthest.items():
        for rank in members[group]:
            dump_of = ranks.get(rank)
            if dump_of is None or group in dump_of.last_seq:
                continue
            if group[1] == "default_pg" and 0 in dump_of.enqueued:
                found[(labels[group], rank)] = min(dump_of.enqueued[0], last)
            elif dump_of.dropped or dump_of.only_active:
                found[(labels[group], rank)] = last
    return found


def _gave_up(dump: RankDump) -> bool:
    open_calls = [call for calls in dump.calls.values() for call in calls.values()]
    open_calls += [call for recorded in dump.p2p.values() for call in recorded]
    return any(call.timed_out for call in open_calls)


def _reference(dumps: Sequence[RankDump], view: AttemptView) -> tuple[int, bool]:
    """When the dumps were written, and whether that is believable: the times of files, which a copy may have changed.

    A watchdog dumps when a call's timeout is over, so a time much later than that is a copy's: then, as without times
    in the records, how long the ranks were silent was not measured.
    """
    last_ns = view.last_ns
    if last_ns < FIRST_WALL_NS:
        return last_ns, False
    written_ns = max((dump.modified_ns for dump in dumps), default=0)
    open_calls = [call for dump in dumps for calls in dump.calls.values() for call in calls.values() if not call.done]
    # The first watchdog that gives a call up makes all ranks dump.
    timeout_ns = min((call.timeout_ms for call in open_calls if call.timeout_ms), default=0) * 10**6
    longest_ns = timeout_ns + MARGIN_NS if timeout_ns else LONGEST_SILENCE_NS
    if written_ns > last_ns + longest_ns:
        return last_ns, False
    return max(written_ns, last_ns), written_ns > last_ns
