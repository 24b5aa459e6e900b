"""Combine the lines of NCCL's watchdogs: which ranks wait in which call, and which are missing from it.

1. In one group, different operations or sizes under the same number are a proven mismatch, even if other ranks are
   ahead. It is also proof if a rank's own line says that it enqueued fewer calls than the others wait for.
2. If a rank waits at a lower number than the other ranks, these completed the call in which it waits. Its device or its
   process stopped, or it made fewer calls: a suspicion.
3. If all wait in the same call, a rank of the group that prints no timeout is suspected; if all print one, the network
   or a device is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from analyzers.causes import COLLECT
from analyzers.hangs.mismatches import Mismatch, compare_calls, is_sized
from analyzers.logs.candidate import Candidate, from_lines, who
from analyzers.logs.exceptions import relevance
from analyzers.logs.log_events import LogBook, LogLine
from analyzers.run.calls.recorded_calls import Call
from analyzers.wording import counted, ranks_text

__all__ = ["watchdog_candidates"]

ONE_SIDED = ("BROADCAST", "REDUCE", "SEND", "RECV", "SCATTER", "GATHER", "COALESCED", "UNKNOWN")
"""Operations that a member may complete before another enters."""
MAX_AHEAD = 1024
"""Maximum number of calls by which a rank of a group may be ahead of another: a CUDA stream queues about as many
kernels."""
SHORT_LIMIT_S = 10.0
"""A group's timeout that is shorter may expire in a healthy job: the first call sets up connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The first call of a rank that its watchdog reported as timed out."""

    rank: int
    seq: int
    op: str
    num_elements: int | None
    ran_s: float
    limit_s: float | None
    enqueued: int | None
    completed: int | None
    group: str
    entry: LogLine

    @property
    def call(self) -> str:
        """`ALLREDUCE #1580 of 466 elements`"""
        elements = counted(self.num_elements, "element")
        return f"{self.op or 'call'} #{self.seq}{f' of {elements}' if elements else ''}"

    @property
    def as_call(self) -> Call:
        """The call for `compare_calls`."""
        shape = "" if self.num_elements is None else str(self.num_elements)
        return Call(rank=self.rank, group=self.group, seq=self.seq, op=self.op, shape=shape)


def _waits(book: LogBook) -> dict[int, Wait]:
    """The first call that timed out in each rank's watchdog, with the numbers that the rank prints for its group."""
    states: dict[int, list[LogLine]] = {}
    for entry in book.of("watchdog_state"):
        rank = entry.rank if entry.rank is not None else entry.number("group_rank")
        if rank is not None:
            states.setdefault(rank, []).append(entry)
    waits: dict[int, Wait] = {}
    is_over = any(book.of_role("death", "victim"))
    for entry in book.of("watchdog_timeout"):
        rank, seq = entry.rank, entry.number("seq")
        if rank is None or rank in waits or seq is None or (not is_over and relevance(entry, book) == "survived"):
            continue
        state = next((state for state in states.get(rank, ()) if state.number("seq") == seq), None)
        waits[rank] = Wait(
            rank=rank, seq=seq, op=entry.text("op"), num_elements=entry.number("numel_in"),
            ran_s=(entry.number("ran_ms") or entry.number("timeout_ms") or 0) / 1e3, entry=entry,
            limit_s=limit_ms / 1e3 if (limit_ms := entry.number("timeout_ms")) else None,
            group=_group(state) if state else "",
            enqueued=state.number("enqueued") if state else None,
            completed=state.number("completed") if state else None,
        )  # fmt: skip
    for rank, found in states.items():
        if rank not in waits and found[0].number("seq") not in (None, -1):
            state = found[0]
            waits[rank] = Wait(
                rank=rank, seq=state.number("seq") or 0, op="", num_elements=None, ran_s=0.0, limit_s=None,
                group=_group(state), enqueued=state.number("enqueued"), completed=state.number("completed"),
                entry=state,
            )  # fmt: skip
    return waits


def _group(state: LogLine) -> str:
    """Name of a group that is equal on all ranks: torch's GUID, else the group's number."""
    return state.text("guid") or state.text("pg")


def watchdog_candidates(book: LogBook) -> Iterator[Candidate]:
    """At most one candidate, from the group in which most ranks wait."""
    waits = _waits(book)
    named = {wait.group for wait in waits.values() if wait.group}
    only = next(iter(named)) if len(named) == 1 else ""  # if one group is named, lines without a group count for it
    groups: dict[str, dict[int, Wait]] = {}
    for rank, wait in waits.items():
        groups.setdefault(wait.group or only, {})[rank] = wait
    for place, part in enumerate(_by_number(groups.pop("", {}))):
        groups[f"#{place}"] = part
    if not groups:
        return
    # If ranks wait in several groups, judge the group with the most waiting ranks first; the others are consequences.
    members = max(groups.values(), key=lambda found: (len(found), -min(wait.seq for wait in found.values())))
    elsewhere = {rank: wait for rank, wait in waits.items() if rank not in members}
    yield _with_short_limit(_judged(book, members, elsewhere), members)


def _by_number(waits: Mapping[int, Wait]) -> list[dict[int, Wait]]:
    """Split ranks into groups if no line names their group: within one group, sequence numbers differ by at most
    `MAX_AHEAD`."""
    seqs = sorted(wait.seq for wait in waits.values())
    part_ends = [seq for seq, after in pairwise(seqs) if after - seq > MAX_AHEAD]
    parts: list[dict[int, Wait]] = [{} for _ in (*part_ends, None)] if waits else []
    for rank, wait in waits.items():
        parts[bisect_left(part_ends, wait.seq)][rank] = wait
    return parts


def _with_short_limit(found: Candidate, members: Mapping[int, Wait]) -> Candidate:
    """Advise a longer timeout if the present one is so short that a healthy call may exceed it."""
    limit_s = min((wait.limit_s for wait in members.values() if wait.limit_s), default=SHORT_LIMIT_S)
    if found.is_proven or limit_s >= SHORT_LIMIT_S:
        return found
    do = (
        f"Raise the timeout of the process group, which is {_time(limit_s)}: a first call, or a wait for a slower "
        "rank, takes longer (init_process_group(timeout=...))."
    )
    return replace(found, evidence={**found.evidence, "timeout_s": limit_s, "do": do})


def _judged(book: LogBook, members: Mapping[int, Wait], elsewhere: Mapping[int, Wait]) -> Candidate:
    seqs = {rank: wait.seq for rank, wait in members.items()}
    least = min(seqs.values())
    for seq in sorted(set(seqs.values())):
        mismatch = _mismatched({rank: wait for rank, wait in members.items() if wait.seq == seq}, members)
        if mismatch is not None:
            return mismatch
    if len(set(seqs.values())) > 1:
        return _different_calls(book, members, least)
    behind = {rank: wait for rank, wait in _enqueued(book).items() if rank not in members and wait < least}
    first = next(iter(members.values()))
    if behind and not elsewhere:
        ranks = tuple(sorted(behind))
        return _candidate(
            "not_entered", ranks, members, is_proven=True,
            what=f"{who(ranks)} did not reach {first.call}, in which "
            f"{ranks_text(sorted(members))} wait{'s' * (len(members) == 1)}",
            why=f"its own line reports that it had enqueued {min(behind.values())} calls, the others {least}",
        )  # fmt: skip
    missing = _missing(book, members)
    if missing:
        return _candidate(
            "not_entered", missing, members, is_proven=False,
            what=f"{who(missing)} reported no timeout while {ranks_text(sorted(members))} waited "
            f"in {first.call}{_for(first)}",
            why=f"a rank that waits in the call usually reports a timeout, and {ranks_text(missing)} reported none",
        )  # fmt: skip
    whole = book.world_size is not None and len(members) >= book.world_size
    everybody = f"All {len(members)} ranks" if whole else who(tuple(members))
    unseen = _unseen(book, members)
    others = f"; {who(unseen).lower()} printed nothing in these files" if unseen else ""
    others = _in_other_groups(elsewhere) + _blocked(book, members) + others
    same = "the same " if len(members) > 1 else ""
    found = _candidate(
        "all_entered", (), members, is_proven=False,
        what=f"{everybody} waited in {same}{first.call}{_for(first)}, and it did not complete{others}",
        why="no line says that a rank was missing" if whole else "these files do not show how many ranks the job has",
    )  # fmt: skip
    if whole:
        return found
    do = "Add the logs of all other ranks: one may have missed the call or failed earlier. Otherwise look at the "
    return replace(found, evidence={**found.evidence, "do": f"{do}devices and links of these ranks (`dmesg -T`)."})


def _in_other_groups(elsewhere: Mapping[int, Wait]) -> str:
    """Second part of a sentence: the ranks that wait in calls of other groups."""
    calls: dict[str, list[int]] = {}
    for rank, wait in sorted(elsewhere.items()):
        calls.setdefault(f"{wait.op or 'call'} #{wait.seq}", []).append(rank)
    shown = [f"{ranks_text(ranks)} in {call}" for call, ranks in [*calls.items()][:4]]
    groups = "another group" if len(shown) == 1 else "other groups"
    return f"; in {groups}, {' and '.join(shown)} waited as well" if shown else ""


def _blocked(book: LogBook, members: Mapping[int, Wait]) -> str:
    """Second part of a sentence: ranks that reported no timeout because their watchdog itself was blocked."""
    ranks = sorted({entry.rank for entry in book.of("watchdog_stuck") if entry.rank is not None} - members.keys())
    what = "their watchdogs were" if len(ranks) > 1 else "its watchdog was"
    where = f"{what} blocked in a CUDA call or by Python's GIL"
    return f"; {ranks_text(ranks)} may wait in it too: {where}" if ranks else ""


def _mismatched(at: Mapping[int, Wait], members: Mapping[int, Wait]) -> Candidate | None:
    """Compare the calls of ranks that wait at the same number. If other ranks wait at other numbers and no line names
    the group, ranks of two groups may have the same number by chance: only a majority at that number counts as one
    group.
    """
    if len(at) < len(members) and not all(wait.group for wait in at.values()):
        calls = Counter((wait.op, wait.num_elements) for wait in at.values())
        if max(calls.values()) < 2 or max(calls.values()) <= len(at) / 2:
            return None
    calls_at = [wait.as_call for _, wait in sorted(at.items())]
    found = compare_calls(calls_at, sized=all(map(is_sized, {c.op for c in calls_at if c.op})) or _are_gathers(at))
    return _differing(at, members, found) if found else None


def _for(wait: Wait) -> str:
    return f" for {_time(wait.ran_s)}" if wait.ran_s else ""


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _are_gathers(members: Mapping[int, Wait]) -> bool:
    """Return True if coalesced calls are gathers or scatters of equal parts: input and output differ by one factor."""
    sizes = {tuple(sorted((wait.num_elements or 0, wait.entry.number("numel_out") or 0))) for wait in members.values()}
    factors = {large // small if small and large % small == 0 else 0 for small, large in sizes}
    return len(factors) == 1 and min(factors) > 1


def _different_calls(book: LogBook, members: Mapping[int, Wait], least: int) -> Candidate:
    low = tuple(sorted(rank for rank, wait in members.items() if wait.seq == least))
    high = {rank: wait for rank, wait in members.items() if wait.seq > least}
    first, other = members[low[0]], min(high.values(), key=lambda wait: wait.seq)
    ahead = [wait.completed for wait in high.values() if wait.completed is not None]
    passed = bool(ahead) and min(ahead) >= least and first.op not in ONE_SIDED
    ran_ahead = first.enqueued is not None and first.enqueued >= other.seq
    if passed and ran_ahead and len(low) <= len(high):
        return _candidate(
            "device_stuck", low, members, is_proven=False,
            what=f"{who(low)} did not complete {first.call}, which {ranks_text(sorted(high))} "
            f"completed: {'their' if len(low) > 1 else 'its'} device stopped",
            why=f"it had enqueued {first.enqueued} calls, and the others completed {min(ahead)}",
        )  # fmt: skip
    fewer = low if len(low) < len(high) else tuple(sorted(high)) if len(high) < len(low) else ()
    most = max(Counter(wait.seq for wait in members.values()).values())
    if most <= len(members) / 2:  # no call in which most ranks wait
        fewer = ()
    silent = _unseen(book, members)
    others = ""
    if len(silent) >= len(members):  # so many ranks may have left before or have stopped, so suspect none of them
        fewer, others = (), f"; {who(silent).lower()} printed nothing in these files"
    calls = {wait.call: [rank for rank in sorted(members) if members[rank].call == wait.call]
             for wait in sorted(members.values(), key=lambda wait: wait.seq)}  # fmt: skip
    shown = ", ".join(f"{ranks_text(ranks)} in {call}" for call, ranks in [*calls.items()][:4])
    more = f" and {len(calls) - 4} other calls" if len(calls) > 4 else ""
    are_groups_known = all(wait.group for wait in members.values())
    return _candidate(
        "desync", fewer, members, is_proven=False,
        what=f"Ranks wait in different calls{' of one group' if are_groups_known else ''}: {shown}{more}{others}",
        why="the ranks did not make the same calls, or one of them stopped in an earlier one"
        + ("" if are_groups_known else "; not every line names its group, so these may be calls of several groups"),
    )  # fmt: skip


def _differing(at: Mapping[int, Wait], members: Mapping[int, Wait], found: Mismatch) -> Candidate:
    ranks = sorted(rank for side in found.differs.values() for rank in side)
    shown = dict.fromkeys((*found.ranks, *ranks))
    calls = "; ".join(f"rank {rank}: {at[rank].call}" for rank in sorted(list(shown)[:4]))
    if len(found.ranks) == len(ranks):
        calls += "; there is no majority among the ranks in these files, so the odd one is unknown"
    first = members[found.ranks[0]]
    what = "operations" if found.cause == "mismatch_operation" else "sizes"
    return _candidate(
        found.cause, found.ranks, members, is_proven=True,
        what=f"Ranks made calls of different {what} at the same place: {calls}",
        why=f"{first.entry.place}: number {first.seq} on each of them",
    )  # fmt: skip


def _candidate(
    cause: str, ranks: Sequence[int], members: Mapping[int, Wait], *, is_proven: bool, what: str, why: str
) -> Candidate:
    waiting = [rank for rank in sorted(members) if rank not in ranks]
    first = min(members.values(), key=lambda wait: wait.rank)
    calls: dict[str, list[int]] = {}
    for rank, wait in sorted(members.items()):
        calls.setdefault(wait.call, []).append(rank)
    return from_lines(
        cause, tuple(wait.entry for wait in members.values()),
        rank_class="mismatch" if cause.startswith("mismatch") else "hang",
        ranks=tuple(ranks),
        what=what,
        why=why if ":" in why else f"{first.entry.place}: {why}",
        is_proven=is_proven,
        collect=COLLECT["timeout"],
        evidence={
            "op": first.op, "seq": first.seq, "waiting_ranks": waiting, "silent_s": round(first.ran_s, 1),
            "sequence_numbers": {str(rank): wait.seq for rank, wait in sorted(members.items())[:32]},
            "waiting_calls": {call: each[:64] for call, each in [*calls.items()][:8]} if len(calls) > 1 else None,
        },
    )  # fmt: skip


def _enqueued(book: LogBook) -> dict[int, int]:
    """Calls of the default group that each rank enqueued, by its newest line."""
    found: dict[int, int] = {}
    for entry in book.of("watchdog_state"):
        rank, enqueued = entry.rank, entry.number("enqueued")
        if rank is not None and enqueued is not None:
            found[rank] = enqueued
    return found


def _missing(book: LogBook, members: Mapping[int, Wait]) -> tuple[int, ...]:
    """Ranks that must exist (below the world size, or between waiting ones) but waited in no call."""
    size = book.world_size or max(members) + 1
    is_cut = any(entry.number("is_cut") for entry in book.of("watchdog_timeout", "watchdog_state"))
    if size > 4096 or len(members) < 2 or is_cut:  # reports of other ranks may be in the part that was cut off
        return ()
    with_errors = book.ranks_with_errors
    known = {entry.rank for entry in book.of("watchdog_stuck")} | with_errors | members.keys()
    missing = _with_log([rank for rank in range(size) if rank not in known], book)
    # If another rank reports an error, the launcher may have ended the silent ranks because of it.
    return missing if len(missing) < len(members) and not with_errors - members.keys() else ()


def _unseen(book: LogBook, members: Mapping[int, Wait]) -> tuple[int, ...]:
    """Ranks that must exist but have no line in any file."""
    size = book.world_size or max(members) + 1
    known = {*book.seen, *members}
    return tuple(rank for rank in range(size) if rank not in known) if size <= 4096 else ()


def _with_log(ranks: Sequence[int], book: LogBook) -> tuple[int, ...]:
    """If each file has the ranks of one node, drop the ranks of nodes that have no file."""
    nodes: dict[str, set[int]] = {}
    for entry in book.lines:
        if entry.rank is not None:
            nodes.setdefault(entry.source, set()).add(entry.rank)
    size = max((max(found) - min(found) + 1 for found in nodes.values()), default=0)
    if len(nodes) < 2 or size < 2:
        return tuple(ranks)  # there is one file for all ranks, or one for each rank, so nodes are unknown
    with_log = {rank // size for found in nodes.values() for rank in found}
    return tuple(rank for rank in ranks if rank // size in with_log)
