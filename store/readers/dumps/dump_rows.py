"""Convert flight-recorder dumps to rows of a run's tables: `collectives`, groups, ranks, device states.

    dumped = rows_of_dumps(dumps)
    store.add("collectives", dumped.tables["collectives"])
    dumped.undumped        # ranks without a dump
    dumped.assumed         # progress assumed for ranks whose ring lost all calls of a group

1. Groups are named as in recorded runs (`world:0-3`, `tp:4-5`); torch's name distinguishes two groups of the same
   members.
2. gloo records that a call is over, but not whether it failed. A rank's newest call cannot have succeeded if another
   member, which wrote its dump later, never entered the call or made another call in its place. Its row has no end.
3. On devices, a call is only enqueued until its kernel starts. If a dump records when calls start (`records_starts`),
   its open calls also become rows of `nccl_calls`, in the form of NCCL's plugin. In other dumps the starts are unknown.
4. p2p calls have no sequence number that both sides share. They are counted from the start if neither ring lost any,
   and otherwise from the last completed call.
5. Only a group's newest calls become rows: all calls of its first member, and of the others the calls in which any
   member may be waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probes.collectives.groups.group_label import group_label
from store.readers.dumps.flight_recorder import RankDump
from store.readers.dumps.recorded_call import TOGETHER, GroupKey, Recorded

__all__ = ["DumpRows", "rows_of_dumps"]

MAX_WORLD = 1_000_000
ENDED_CALLS = 4
"""Completed calls kept for all members before a group's first open call."""
Members = Mapping[GroupKey, tuple[int, ...]]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRows:
    """Rows of all dumps. `dropped`: number of records that each rank's ring had overwritten."""

    tables: Mapping[str, list[Row]]
    undumped: tuple[int, ...]
    dropped: Mapping[int, int]
    timed_out: tuple[int, ...]
    """Ranks with a call that a watchdog timed out, which alone proves a hang."""
    dumped_ns: Mapping[int, int]
    unlisted: frozenset[str]
    """Groups of which the dumps do not list the members (gloo). Ranks without a dump may belong to them, too."""
    assumed: Mapping[tuple[str, int], int]
    """{(group, rank): number of the call that the rank may have reached}, for ranks with a ring that lost all calls of
    the group.
    """


def rows_of_dumps(dumps: Sequence[RankDump]) -> DumpRows:
    """Convert the dumps of any number of ranks, one dump per rank."""
    ranks = {dump.rank: dump for dump in dumps}
    members, world_size = _members(ranks)
    labels = _labels(members)
    _reopen_failed(ranks, members)
    collectives: list[Row] = []
    nccl_calls: list[Row] = []
    nccl_groups: list[Row] = []
    numbers = {group: number for number, group in enumerate(members)}
    since = _first_row_numbers(ranks)
    for rank, dump in ranks.items():
        on_device: dict[GroupKey, bool] = {}
        for group, call, seq, peer, is_open in _calls(dump, members, ranks):
            on_device[group] = on_device.get(group, False) or call.has_events
            is_first = rank == members[group][0]
            if is_open and call.has_events and dump.records_starts:
                nccl_calls.append(_device_state(rank, numbers[group], call, seq))
            if is_open or is_first or call.peer is not None or seq >= since.get(group, 0):
                collectives.append(_row(rank, labels[group], call, seq, peer))
        if dump.records_starts:
            nccl_groups += [
                {"rank": rank, "communicator": numbers[group], "process_group": labels[group],
                 "members": list(members[group]), "is_alive": True}
                for group, is_on in on_device.items() if is_on
            ]  # fmt: skip
    by_rank: list[Row] = [
        {"rank": rank, "wall_ns": dump.last_ns, "device": "cuda" if _has_events(dump) else None}
        for rank, dump in ranks.items()
    ]
    groups: list[Row] = [
        {"rank": listed[0], "process_group": labels[group], "description": group[1], "group_name": group[0],
         "recorded_by": "flight_recorder", "members": list(listed)}
        for group, listed in members.items() if listed
    ]  # fmt: skip
    tables: dict[str, list[Row]] = {
        "ranks": by_rank, "process_groups": groups, "collectives": collectives, "nccl_groups": nccl_groups,
        "nccl_calls": nccl_calls,
    }  # fmt: skip
    return DumpRows(
        tables={name: rows for name, rows in tables.items() if rows or name == "collectives"},
        undumped=tuple(rank for rank in _all_ranks(members, world_size) if rank not in ranks),
        dropped={rank: dump.dropped for rank, dump in sorted(ranks.items()) if dump.dropped},
        timed_out=tuple(sorted(rank for rank, dump in ranks.items() if _has_timed_out(dump))),
        dumped_ns={rank: max(dump.modified_ns, dump.last_ns) for rank, dump in ranks.items()},
        unlisted=frozenset(labels[group] for group in members if not group[2]),
        assumed=_assumed(ranks, members, labels),
    )


def _members(ranks: Mapping[int, RankDump]) -> tuple[dict[GroupKey, tuple[int, ...]], int]:
    """Members of each group, as configured. If this was not recorded, the ranks that recorded calls in the group. The
    default group has all ranks.
    """
    seen: dict[GroupKey, set[int]] = {}
    world_size = max(ranks, default=-1) + 1
    for rank, dump in ranks.items():
        for group in {*dump.groups.values(), *dump.last_seq, *(group for group, *_ in dump.p2p)}:
            seen.setdefault(group, set()).add(rank)
    for group in seen:
        if group[1] == "default_pg":
            world_size = max(world_size, max(group[2], default=-1) + 1)
    world_size = min(world_size, MAX_WORLD)
    all_ranks = tuple(range(world_size))
    unlisted = {group: all_ranks if group[1] == "default_pg" else tuple(sorted(seen[group])) for group in seen}
    return {group: group[2] or unlisted[group] for group in seen}, world_size


def _all_ranks(members: Members, world_size: int) -> list[int]:
    listed = {rank for ranks in members.values() for rank in ranks}
    return sorted(listed | set(range(world_size)))


def _labels(members: Members) -> dict[GroupKey, str]:
    plain = {group: group_label(group[1], ranks) for group, ranks in members.items()}
    times = Counter(plain.values())
    return {group: label if times[label] == 1 else f"{label}#{group[0]}" for group, label in plain.items()}


def _reopen_failed(ranks: Mapping[int, RankDump], members: Members) -> None:
    """Clear `done` of newest calls that cannot have succeeded:

    1. gloo's calls that a member has not entered although it dumped later;
    2. calls under a sequence number that stands for different operations on different members, if one of these may be
       stuck.
    """
    for group, ranks_of in members.items():
        dumps = [ranks[rank] for rank in ranks_of if rank in ranks]
        kept = [dump.calls[group].get(dump.last_seq[group]) for dump in dumps if group in dump.calls]
        newest = [call for call in kept if call is not None]
        for seq in {call.seq for call in newest if call.done}:
            same_seq = [dump.calls[group][seq] for dump in dumps if seq in dump.calls.get(group, ())]
            ops = {call.op for call in same_seq}
            stuck = any(not call.done or not call.has_events for call in same_seq)
            behind = [dump for dump in dumps if dump.last_seq.get(group, -1) < seq and _complete(dump, group)]
            behind_ns = max((max(dump.modified_ns, dump.last_ns) for dump in behind), default=0)
            for call in newest:
                if call.seq != seq or not call.done:
                    continue
                failed = not call.has_events and call.op in TOGETHER and behind_ns >= call.issue_ns and behind
                call.done = not (failed or (len(ops) > 1 and stuck))


def _complete(dump: RankDump, group: GroupKey) -> bool:
    """True if the newest call of a group is known. A ring that lost records may have lost all calls of the group."""
    return not dump.dropped or group in dump.last_seq


def _first_row_numbers(ranks: Mapping[int, RankDump]) -> dict[GroupKey, int]:
    """For each group, a sequence number: this call and all later ones become rows, for all members."""
    first: dict[GroupKey, int] = {}
    for dump in ranks.values():
        for group, calls in dump.calls.items():
            last_done = max((call.seq for call in calls.values() if call.done), default=-1)
            number = min((seq for seq, call in calls.items() if not call.done and seq > last_done), default=last_done)
            first[group] = min(number - ENDED_CALLS, first.get(group, number))
    return first


def _calls(
    dump: RankDump, members: Members, ranks: Mapping[int, RankDump]
) -> Iterator[tuple[GroupKey, Recorded, int, int | None, bool]]:
    """Yield group, call, number, global rank of the peer, and whether the call is in flight: neither the call nor a
    later one of the group is done.
    """
    for group, calls in dump.calls.items():
        last_done = max((call.seq for call in calls.values() if call.done), default=-1)
        for call in calls.values():
            yield group, call, call.seq, None, not call.done and call.seq > last_done
    for key, recorded in dump.p2p.items():
        peer = _global(members[key[0]], key[2])
        first = _first_number(dump, ranks.get(peer) if peer is not None else None, key)
        num_done = _num_done(recorded)
        for i, call in enumerate(recorded):
            yield key[0], call, first + i, peer, i >= num_done


def _row(rank: int, group: str, call: Recorded, seq: int, peer: int | None) -> Row:
    return {
        "rank": rank, "process_group": group, "seq": seq, "op": call.op, "issue_ns": call.issue_ns,
        "end_ns": max(call.issue_ns, call.last_ns) if call.done else None, "bytes": call.num_bytes,
        "dtype": call.dtype, "shape": call.shape, "caller": call.caller, "peer": peer,
    }  # fmt: skip


def _device_state(rank: int, communicator: int, call: Recorded, seq: int) -> Row:
    """Row of `nccl_calls` for a call, if the call's record tells whether its kernel has started."""
    return {
        "rank": rank, "communicator": communicator, "seq": seq, "peer": call.peer, "enqueue_ns": call.issue_ns,
        "function": call.op.capitalize(), "channels_started": int(call.started),
        "kernel_start_ns": max(call.issue_ns, call.last_ns) if call.started else None,
    }  # fmt: skip


def _has_events(dump: RankDump) -> bool:
    """Return True if the rank's calls ran on a device and therefore have events."""
    calls = [call for by_seq in dump.calls.values() for call in by_seq.values()]
    return any(call.has_events for call in calls + [call for recorded in dump.p2p.values() for call in recorded])


def _first_number(dump: RankDump, other: RankDump | None, key: tuple[GroupKey, str, int]) -> int:
    """Number of the first kept call of one direction. The number is counted from the start. If a ring buffer lost
    calls, it is chosen such that the first open call is number 0.
    """
    if dump.dropped or (other is not None and other.dropped):
        return -_num_done(dump.p2p[key])
    return dump.p2p_before.get(key, 0)


def _num_done(recorded: Sequence[Recorded]) -> int:
    """Number of calls of one direction before the first that is in flight."""
    return max((i + 1 for i, call in enumerate(recorded) if call.done), default=0)


def _global(members: tuple[int, ...], peer: int) -> int | None:
    return members[peer] if peer < len(members) else None


def _assumed(
    ranks: Mapping[int, RankDump], members: Members, labels: Mapping[GroupKey, str]
) -> dict[tuple[str, int], int]:
    """Assumed progress of ranks with a ring that lost all calls of a group. The real progress of these ranks is
    unknown, so no finding claims that a rank waits for them.

    `pg_status` has the progress under the number that the rank itself gave the group. This number is known only for the
    default group (0).
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


def _has_timed_out(dump: RankDump) -> bool:
    open_calls = [call for calls in dump.calls.values() for call in calls.values()]
    open_calls += [call for recorded in dump.p2p.values() for call in recorded]
    return any(call.timed_out for call in open_calls)
