"""Collective and p2p calls at the end of an attempt: those in flight, each rank's newest, and which call follows which.

In a group that NCCL's plugin recorded, a call counts as entered when its kernel starts on the device (`device_calls`).

found = recorded_calls(source, attempt=0, since_step=40, cut_ns=now_ns)
found.in_flight[3].calls                # collectives that rank 3 had begun but not finished
found.last_seq[("dp[0,1]", 3)]          # number of the last collective that rank 3 entered in that group
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from analyzers.run.calls.device_calls import device_places, queued_calls
from analyzers.run.records.elsewhere import ranks_with_lost_calls
from analyzers.source import Source, lacking
from analyzers.wording import group_text

__all__ = [
    "MAX_NAME",
    "P2P",
    "Call",
    "CallSite",
    "CallsInFlight",
    "RecordedCalls",
    "call_order",
    "differing_calls",
    "recorded_calls",
]

CallSite = tuple[str, str, str]
"""Operation, caller and size of a collective. The size is needed because one source line may reduce all parameters.

It is the shape if the shape is recorded. Otherwise it is the number of bytes, because NCCL's plugin records neither
shapes nor callers.
"""
P2P = ("send", "recv")
MAX_NAME = 40
"""Maximum number of characters of a group's name in a sentence: some names list all members."""
KEPT_CALLS = 4
"""Maximum number of calls in flight that are kept for each group or peer of a rank."""
_UNNAMED = r"regexp_matches(concat_ws(' ', op, process_group, dtype, shape), '(^| )\?[0-9]+( |$)')"
"""Operation of a call if its name was lost from `names.jsonl`. Such a call cannot be compared with the calls of other
ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective or p2p call that had begun and not ended."""

    rank: int
    group: str
    seq: int
    op: str
    issue_ns: int = 0
    num_bytes: int | None = None
    dtype: str = ""
    shape: str = ""
    phase: str = ""
    caller: str = ""
    peer: int | None = None
    step: int | None = None
    on_device: bool = False
    """True if the recorded start is the start of the call's kernel, so that the device has started the call."""
    host_only: bool = False
    """True if only the host's part of a call on a device is known: it may be queued behind other kernels."""

    @property
    def is_p2p(self) -> bool:
        """True for a call with one partner instead of a group."""
        return self.op in P2P

    @property
    def site(self) -> CallSite:
        """Identity among the calls of its group in a step."""
        size = "" if self.num_bytes is None else str(self.num_bytes)
        return self.op, self.caller, self.shape or size

    @property
    def text(self) -> str:
        """The call as text in a sentence: `all_gather #608 (group world:0-3)`."""
        if self.is_p2p:
            return f"{self.op} #{self.seq} {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        return f"{self.op} #{self.seq} (group {_cut(group_text(self.group))})"


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."


@dataclass(slots=True)
class CallsInFlight:
    """Calls of one rank that have not ended."""

    calls: list[Call] = field(default_factory=list)
    enqueued: list[Call] = field(default_factory=list)
    """For each group or peer, the oldest call that the device has not started."""
    unwaited: list[Call] = field(default_factory=list)
    """Calls that were most likely never waited for (`_in_flight`)."""
    num_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """Calls of the newest steps of all ranks."""

    last_seq: dict[tuple[str, int], int] = field(default_factory=dict)
    """Newest number of a collective by (group, rank)."""
    last_p2p: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """Newest number of a p2p call by (rank, send or recv, peer)."""
    last_ns: dict[int, int] = field(default_factory=dict)
    """Time of the newest start or end of a call by rank, epoch nanoseconds."""
    in_flight: dict[int, CallsInFlight] = field(default_factory=dict)
    """By rank."""
    queued: dict[tuple[str, int], int] = field(default_factory=dict)
    """Newest number of an enqueued collective by (group, rank), for devices that are behind their hosts."""
    queued_p2p: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """Queued p2p calls, by (rank, send or recv, peer)."""
    unnamed: frozenset[int] = frozenset()
    """Ranks that made calls of which the records, or the names in them, were lost."""


def recorded_calls(source: Source, attempt: int, since_step: int | None, cut_ns: int) -> RecordedCalls:
    """Read the calls from `since_step` on, as of `cut_ns` (epoch nanoseconds); empty without a table of collectives.

    If `since_step` is None, all calls are read. That is needed for flight-recorder dumps, because their calls have no
    step.
    """
    found = RecordedCalls()
    if not source.has("collectives"):
        return found
    rows = source.rows(
        f"""
        SELECT rank, process_group, op IN ('send', 'recv'), CASE WHEN op IN ('send', 'recv') THEN op END,
               peer, max(seq), max(seq) FILTER (end_ns <= ?), max(CASE WHEN end_ns <= ? THEN end_ns ELSE issue_ns END)
        FROM collectives WHERE attempt = ? AND {_since(since_step)} AND issue_ns <= ? GROUP BY ALL
        """,
        [cut_ns, cut_ns, attempt, cut_ns],
    )
    done: dict[tuple[Any, ...], int] = {}
    for rank, group, is_p2p, direction, peer, seq, done_seq, last_ns in rows:
        found.last_ns[rank] = max(found.last_ns.get(rank, 0), last_ns or 0)
        if seq is None:
            continue
        if is_p2p:
            found.last_p2p[rank, direction, peer] = max(seq, found.last_p2p.get((rank, direction, peer), -1))
        else:
            found.last_seq[group, rank] = max(seq, found.last_seq.get((group, rank), -1))
        key = (rank, group, direction, peer if is_p2p else None)
        done[key] = max(done.get(key, -1), done_seq if done_seq is not None else -1)
    unnamed = source.rows(
        f"SELECT DISTINCT rank FROM collectives WHERE attempt = ? AND {_since(since_step)} AND {_UNNAMED}", [attempt]
    )
    lost = ranks_with_lost_calls(source, attempt)
    found = replace(found, unnamed=frozenset(int(rank) for (rank,) in unnamed) | lost)
    in_flight = _in_flight(source, attempt, since_step, cut_ns, done)
    found.in_flight.update({rank: calls for rank, calls in in_flight.items() if rank not in found.unnamed})
    _keep_started(source, attempt, cut_ns, found)
    return found


def _since(step: int | None) -> str:
    return "true" if step is None else f"step >= {step}"


def _keep_started(source: Source, attempt: int, cut_ns: int, found: RecordedCalls) -> None:
    """In groups on devices, keep the calls that devices have started; calls that are only enqueued become `queued`."""
    recorded = device_places(source, attempt)
    for rank in _on_cuda(source, attempt) & found.in_flight.keys():
        of_rank = found.in_flight[rank]
        of_rank.calls = [
            call if (rank, call.group) in recorded else replace(call, host_only=True) for call in of_rank.calls
        ]
    if not recorded:
        return
    first_queued = queued_calls(source, attempt, cut_ns)
    for (rank, group, op, peer), seq in first_queued.items():
        if op and peer is not None and (rank, op, peer) in found.last_p2p:
            found.queued_p2p[rank, op, peer] = found.last_p2p[rank, op, peer]
            found.last_p2p[rank, op, peer] = seq - 1
        elif not op and (group, rank) in found.last_seq:
            found.queued[group, rank] = found.last_seq[group, rank]
            found.last_seq[group, rank] = seq - 1
    for rank, of_rank in found.in_flight.items():
        started: list[Call] = []
        oldest_enqueued: dict[Any, Call] = {}
        for call in of_rank.calls:
            key = (rank, call.group, call.op if call.is_p2p else "", call.peer if call.is_p2p else None)
            if (rank, call.group) not in recorded:
                started.append(call)
            elif call.seq < first_queued.get(key, call.seq + 1):
                started.append(replace(call, on_device=True))
            elif key not in oldest_enqueued or call.seq < oldest_enqueued[key].seq:
                oldest_enqueued[key] = call
        of_rank.calls, of_rank.enqueued = started, list(oldest_enqueued.values())


def _on_cuda(source: Source, attempt: int) -> set[int]:
    if lacking(source, ranks=("device",)):
        return set()
    rows = source.rows("SELECT DISTINCT rank FROM ranks WHERE attempt = ? AND device LIKE 'cuda%'", [attempt])
    return {int(rank) for (rank,) in rows}


def _in_flight(
    source: Source, attempt: int, since_step: int | None, cut_ns: int, done: Mapping[tuple[Any, ...], int]
) -> dict[int, CallsInFlight]:
    """Calls in flight by rank: the oldest of each group or peer, and their number. `done`: newest completed number by
    (rank, group, direction, peer).

    Calls queued behind the oldest add nothing, and thousands of ranks may have thousands in flight. If a later call in
    the same group has completed, an open call was never waited for, and is listed separately (`unwaited`). A send
    between hosts is listed there, too, if the peer's receive has completed: the message has arrived, and the program
    has only not waited for the send's handle.
    """
    completed = {key: seq for key, seq in done.items() if seq >= 0}
    on_cuda = _on_cuda(source, attempt) if any(direction == "recv" for _, _, direction, _ in completed) else set()
    rows = source.rows(
        f"""
        SELECT rank, process_group, op IN ('send', 'recv'), CASE WHEN op IN ('send', 'recv') THEN op END,
               CASE WHEN op IN ('send', 'recv') THEN peer END, max(seq), count(*), arg_min(row(
                   seq, op, issue_ns, bytes, dtype, shape, phase, caller, peer, step), seq, {KEPT_CALLS})
        FROM collectives
        WHERE attempt = ? AND {_since(since_step)} AND issue_ns <= ? AND (end_ns IS NULL OR end_ns > ?)
          AND seq IS NOT NULL
        GROUP BY ALL
        """,
        [attempt, cut_ns, cut_ns],
    )
    found: dict[int, CallsInFlight] = {}
    for rank, group, is_p2p, direction, partner, newest, number, oldest in rows:
        done_seq = completed.get((rank, group, direction, partner if is_p2p else None), -1)
        if direction == "send" and rank not in on_cuda:
            done_seq = max(done_seq, completed.get((partner, group, "recv", rank), -1) + 1)
        of_rank = found.setdefault(rank, CallsInFlight())
        of_rank.unwaited += [_call(rank, group, fields) for fields in oldest if fields[0] < done_seq]
        if newest < done_seq:
            continue
        if oldest[0][0] < done_seq:
            params = (attempt, cut_ns, cut_ns, rank, group, done_seq)
            oldest = _oldest_from(source, since_step, params, direction, partner)
        of_rank.calls += [_call(rank, group, fields) for fields in oldest]
        of_rank.num_in_flight += number
    return found


def _call(rank: int, group: str | None, fields: tuple[Any, ...]) -> Call:
    seq, op, issue_ns, num_bytes, dtype, shape, phase, caller, peer, step = fields
    return Call(
        rank=rank, group=group or "", seq=seq, op=op or "", issue_ns=issue_ns or 0, num_bytes=num_bytes,
        dtype=dtype or "", shape=shape or "", phase=phase or "", caller=caller or "", peer=peer, step=step,
    )  # fmt: skip


def _oldest_from(
    source: Source, since_step: int | None, params: tuple[Any, ...], direction: str | None, partner: int | None
) -> list[tuple[Any, ...]]:
    """The oldest open calls of a rank in a group with sequence numbers of at least `number`. `params`: attempt, cut
    (twice), rank, group, number."""
    kind = "op NOT IN ('send', 'recv')" if direction is None else "op = ? AND peer IS NOT DISTINCT FROM ?"
    return source.rows(
        f"""
        SELECT seq, op, issue_ns, bytes, dtype, shape, phase, caller, peer, step FROM collectives
        WHERE attempt = ? AND {_since(since_step)} AND issue_ns <= ? AND (end_ns IS NULL OR end_ns > ?) AND rank = ?
          AND process_group IS NOT DISTINCT FROM ? AND seq >= ? AND {kind} ORDER BY seq LIMIT {KEPT_CALLS}
        """,
        [*params, *([] if direction is None else [direction, partner])],
    )


def differing_calls(
    source: Source, attempt: int, since_step: int | None, cut_ns: int, numbers: Collection[tuple[str, int]]
) -> dict[tuple[str, int], tuple[Call, ...]]:
    """Calls of all ranks, ended or not, by (group, number), for those `numbers` at which the ranks made different
    calls.
    """
    if not numbers:
        return {}
    rows = source.rows(
        f"""
        WITH wanted AS (
            SELECT *, coalesce(process_group, '') AS of_group FROM collectives
            WHERE attempt = ? AND {_since(since_step)} AND issue_ns <= ? AND op NOT IN ('send', 'recv')
              AND NOT {_UNNAMED}
              AND (coalesce(process_group, ''), seq) IN ({", ".join(["(?, ?)"] * len(numbers))})
        ), odd AS (
            SELECT of_group, seq FROM wanted GROUP BY ALL HAVING count(DISTINCT row(op, dtype, bytes, shape)) > 1
        )
        SELECT rank, of_group, row(seq, op, issue_ns, bytes, dtype, shape, phase, caller, peer, step)
        FROM wanted SEMI JOIN odd USING (of_group, seq) ORDER BY rank
        """,
        [attempt, cut_ns, *(part for number in numbers for part in number)],
    )
    found: dict[tuple[str, int], list[Call]] = {}
    for rank, group, fields in rows:
        call = _call(rank, group, fields)
        found.setdefault((call.group, call.seq), []).append(call)
    return {number: tuple(calls) for number, calls in found.items()}


def call_order(
    source: Source, attempt: int, since_step: int | None, cut_ns: int
) -> tuple[dict[tuple[str, CallSite], frozenset[CallSite]], dict[str, CallSite]]:
    """Return ({(group, call): calls that followed it}, {group: newest finished call}), read from each group's first
    member, because all members run the same program."""
    if not source.has("collectives"):
        return {}, {}
    rows = source.rows(
        f"""
        WITH newest AS (
            SELECT rank, process_group, seq,
                   row(op, coalesce(caller, ''), coalesce(nullif(shape, ''), CAST(bytes AS VARCHAR), '')) AS site
            FROM collectives WHERE attempt = ? AND {_since(since_step)} AND end_ns <= ? AND op NOT IN ('send', 'recv')
        ), first_members AS (SELECT process_group, min(rank) AS rank FROM newest GROUP BY ALL)
        SELECT DISTINCT process_group, site, next_site FROM (
            SELECT process_group, site, lead(site) OVER by_seq AS next_site
            FROM newest SEMI JOIN first_members USING (process_group, rank)
            WINDOW by_seq AS (PARTITION BY process_group ORDER BY seq)
        )
        """,
        [attempt, cut_ns],
    )
    following: dict[tuple[str, CallSite], set[CallSite]] = {}
    newest: dict[str, CallSite] = {}
    for group, site, next_site in rows:
        if next_site is None:
            newest[group or ""] = tuple(site)
        else:
            following.setdefault((group or "", tuple(site)), set()).add(tuple(next_site))
    return {call: frozenset(after) for call, after in following.items()}, newest
