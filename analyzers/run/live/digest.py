"""Digest of a node: the state of its ranks, small enough to be sent every second, and the joined view of the job.

    data = encode(Digest(node=1, sent_ns=now, view=view))          # node 1: about a kilobyte for 8 ranks
    view = joined(own_view, [decode(data)], {1: offset_ns})        # the leader: all ranks, by its own clock

A digest is an `AttemptView` of the node's own ranks: step, open spans, calls in flight, newest number by group and the
state of each process. The analyzers of one node's records (`hang`, `rank_lost`) can thus judge the whole job.

Digests come from other machines, so packed and unpacked size are bounded, and the version and the type of each value
are checked. If a digest would be too large, texts are dropped first, then all calls but the oldest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analyzers.run.calls.recorded_calls import Call
from analyzers.run.calls.snapshot import AttemptView, RankView
from analyzers.run.records.event_log import Event, EventLog
from analyzers.wording import spans_of

__all__ = ["MAX_BYTES", "VERSION", "Digest", "DigestError", "decode", "encode", "joined", "joined_log", "of_ranks"]

VERSION = 6
MAX_BYTES = 64 << 10
"""Maximum size of one digest as sent."""
MAX_PLAIN_BYTES = 4 << 20
MAX_EVENTS = 64
_STATES = ("running", "stopped", "dead")


class DigestError(ValueError):
    """Raised if bytes are not a digest of this version; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """`sent_ns`: epoch nanoseconds by the sender's clock. `closing`: the node's `watch` is ending and will send no
    further digest.
    """

    node: int
    sent_ns: int
    view: AttemptView
    events: tuple[Event, ...] = ()
    """How processes of the attempt ended, and what followed."""
    closing: bool = False
    received_ns: int = 0
    """Time at which it was received, by the receiver's clock (epoch nanoseconds); not sent."""


def of_ranks(view: AttemptView, ranks: Iterable[int]) -> AttemptView:
    """The part of a view that concerns some ranks, without the order of calls."""
    chosen = frozenset(ranks)
    return replace(
        view,
        ranks={rank: found for rank, found in view.ranks.items() if rank in chosen},
        last_seq={key: seq for key, seq in view.last_seq.items() if key[1] in chosen},
        last_p2p={key: seq for key, seq in view.last_p2p.items() if key[0] in chosen},
        queued={key: seq for key, seq in view.queued.items() if key[1] in chosen},
        queued_p2p={key: seq for key, seq in view.queued_p2p.items() if key[0] in chosen},
        next_calls={},
        newest_calls={},
    )


def encode(digest: Digest) -> bytes:
    """Return the digest as at most MAX_BYTES bytes."""
    for texts, calls in ((True, True), (False, True), (False, False)):
        plain = json.dumps(_plain(digest, texts=texts, calls=calls), separators=(",", ":")).encode()
        packed = zlib.compress(plain, 1)
        if len(packed) <= MAX_BYTES and len(plain) <= MAX_PLAIN_BYTES:
            return packed
    # A node with tens of thousands of ranks sends a digest without ranks.
    view = replace(digest.view, ranks={}, last_seq={}, last_p2p={}, queued={}, queued_p2p={}, members={})
    return encode(replace(digest, view=view, events=()))


def decode(data: bytes) -> Digest:
    """Read a digest. Raises DigestError."""
    if len(data) > MAX_BYTES:
        raise DigestError(f"the digest has {len(data)} bytes, more than {MAX_BYTES}")
    try:
        opened = zlib.decompressobj()
        plain = json.loads(opened.decompress(data, MAX_PLAIN_BYTES))
        if plain["v"] != VERSION:
            raise DigestError(f"the digest has version {plain['v']}, this Rankscope reads {VERSION}: update rankscope")
        return _digest(plain)
    except (zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, DigestError):
            raise
        raise DigestError(f"no digest: {type(error).__name__}") from None


def joined(own: AttemptView, digests: Sequence[Digest], offsets_ns: Mapping[int, int]) -> AttemptView:
    """Join `own` with the digests of its attempt: all known ranks, by the reader's clock.

    `offsets_ns`: how far each node's clock is ahead. If two views hold a rank, the newer one is used.
    """
    ranks, members = dict(own.ranks), {group: set(found) for group, found in own.members.items()}
    last_seq, last_p2p = dict(own.last_seq), dict(own.last_p2p)
    queued, queued_p2p = dict(own.queued), dict(own.queued_p2p)
    view = own
    for digest in digests:
        other = digest.view
        if other.attempt != own.attempt:
            continue
        ahead_ns = offsets_ns.get(digest.node, 0)
        for rank, found in other.ranks.items():
            found = _shifted(found, -ahead_ns)
            if rank not in ranks or ranks[rank].last_ns <= found.last_ns:
                ranks[rank] = found
        for group, found_members in other.members.items():
            members.setdefault(group, set()).update(found_members)
        for key, seq in other.last_seq.items():
            last_seq[key] = max(seq, last_seq.get(key, -1))
        for partner, seq in other.last_p2p.items():
            last_p2p[partner] = max(seq, last_p2p.get(partner, -1))
        queued |= other.queued
        queued_p2p |= other.queued_p2p
        view = replace(
            view,
            median_step_ns=max(view.median_step_ns, other.median_step_ns),
            longest_step_ns=max(view.longest_step_ns, other.longest_step_ns),
            world_size=max(view.world_size, other.world_size),
        )
    return replace(
        view,
        ranks=dict(sorted(ranks.items())),
        members={group: tuple(sorted(found)) for group, found in members.items()},
        last_seq=last_seq,
        last_p2p=last_p2p,
        queued=queued,
        queued_p2p=queued_p2p,
    )


def joined_log(log: EventLog, digests: Sequence[Digest], offsets_ns: Mapping[int, int]) -> EventLog:
    """Add the digests' events that the log lacks, by the reader's clock."""
    known = {(event.kind, event.rank, event.wall_ns) for event in log.all()}
    more = [
        replace(event, wall_ns=event.wall_ns - offsets_ns.get(digest.node, 0))
        for digest in digests
        for event in digest.events
        if (event.kind, event.rank, event.wall_ns) not in known
    ]
    return EventLog([*log.all(), *more]) if more else log


def _shifted(view: RankView, by_ns: int) -> RankView:
    if not by_ns:
        return view

    def moved(calls: tuple[Call, ...]) -> tuple[Call, ...]:
        return tuple(replace(call, issue_ns=call.issue_ns + by_ns) for call in calls)

    worked_ns = view.worked_ns + by_ns if view.worked_ns else 0
    return replace(
        view,
        last_ns=view.last_ns + by_ns,
        worked_ns=worked_ns,
        calls=moved(view.calls),
        enqueued=moved(view.enqueued),
        unwaited=moved(view.unwaited),
    )


def _plain(digest: Digest, *, texts: bool, calls: bool) -> dict[str, Any]:
    view = digest.view

    def plain_calls(found: Sequence[Call]) -> list[list[Any]]:
        return [
            [c.group, c.seq, c.op, c.issue_ns, c.num_bytes, c.dtype, c.phase, c.peer, c.step]
            + ([c.shape, c.caller] if texts else ["", ""])
            + [c.on_device, c.host_only]
            for c in found
        ]

    events = [[e.wall_ns, e.rank, e.step, e.kind, _short(e.detail)] for e in digest.events[-MAX_EVENTS:]]
    return {
        "v": VERSION,
        "node": digest.node,
        "sent_ns": digest.sent_ns,
        "closing": digest.closing,
        "attempt": view.attempt,
        "world_size": view.world_size,
        "median_step_ns": view.median_step_ns,
        "longest_step_ns": view.longest_step_ns,
        "ranks": [
            [r.rank, r.last_ns, r.step, r.step_is_open, r.finished_steps, list(r.phases), r.closed, r.state, r.os_state,
             r.num_in_flight, plain_calls(r.calls[: None if calls else 1]), plain_calls(r.unwaited if texts else ()),
             r.worked_ns, plain_calls(r.enqueued[: None if calls else 1]), r.last_phase, r.is_at_work,
             r.has_accelerator]
            for r in view.ranks.values()
        ],
        "seq": [[group, rank, seq] for (group, rank), seq in view.last_seq.items()],
        "p2p": [[*key, seq] for key, seq in view.last_p2p.items()] if calls else [],
        "queued": [[group, rank, seq] for (group, rank), seq in view.queued.items()],
        "queued_p2p": [[*key, seq] for key, seq in view.queued_p2p.items()] if calls else [],
        "members": {group: spans_of(sorted(found)) for group, found in view.members.items()},
        "events": events if texts else [],
    }  # fmt: skip


def _digest(plain: Mapping[str, Any]) -> Digest:
    attempt = _int(plain["attempt"])
    ranks = [_rank(row) for row in plain["ranks"]]
    view = AttemptView(
        attempt=attempt,
        ranks={rank.rank: rank for rank in ranks},
        members={str(group): _members(spans) for group, spans in plain["members"].items()},
        last_seq={(str(group), _int(rank)): _int(seq) for group, rank, seq in plain["seq"]},
        last_p2p={(_int(rank), str(way), _int(peer)): _int(seq) for rank, way, peer, seq in plain["p2p"]},
        queued={(str(group), _int(rank)): _int(seq) for group, rank, seq in plain["queued"]},
        queued_p2p={(_int(rank), str(way), _int(peer)): _int(seq) for rank, way, peer, seq in plain["queued_p2p"]},
        median_step_ns=_int(plain["median_step_ns"]),
        longest_step_ns=_int(plain["longest_step_ns"]),
        world_size=_int(plain["world_size"]),
    )
    events = tuple(
        Event(_int(wall_ns), attempt, _int(rank), _int_or_none(step), str(kind), dict(detail))
        for wall_ns, rank, step, kind, detail in plain["events"][:MAX_EVENTS]
    )
    node, sent_ns, closing = _int(plain["node"]), _int(plain["sent_ns"]), bool(plain["closing"])
    return Digest(node=node, sent_ns=sent_ns, view=view, events=events, closing=closing)


def _rank(row: Sequence[Any]) -> RankView:
    rank, last_ns, step, is_open, finished, phases, closed, state, os_state, in_flight, calls, unwaited, *more = row
    worked_ns, enqueued, last_phase, is_at_work, has_accelerator = more
    if state not in _STATES:
        raise ValueError(state)
    number = _int(rank)
    return RankView(
        rank=number,
        last_ns=_int(last_ns),
        step=_int_or_none(step),
        step_is_open=bool(is_open),
        finished_steps=_int(finished),
        phases=tuple(str(phase) for phase in phases),
        closed=bool(closed),
        state=state,
        os_state=str(os_state),
        num_in_flight=_int(in_flight),
        calls=tuple(_call(number, call) for call in calls),
        enqueued=tuple(_call(number, call) for call in enqueued),
        unwaited=tuple(_call(number, call) for call in unwaited),
        worked_ns=_int(worked_ns),
        is_at_work=bool(is_at_work),
        has_accelerator=bool(has_accelerator),
        last_phase=str(last_phase),
    )


def _call(rank: int, row: Sequence[Any]) -> Call:
    group, seq, op, issue_ns, num_bytes, dtype, phase, peer, step, shape, caller, on_device, host_only = row
    return Call(
        rank=rank, group=str(group), seq=_int(seq), op=str(op), issue_ns=_int(issue_ns),
        num_bytes=_int_or_none(num_bytes), dtype=str(dtype), phase=str(phase), peer=_int_or_none(peer),
        step=_int_or_none(step), shape=str(shape), caller=str(caller), on_device=bool(on_device),
        host_only=bool(host_only),
    )  # fmt: skip


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise ValueError(value)
    return value


def _int_or_none(value: Any) -> int | None:
    return None if value is None else _int(value)


def _short(detail: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten long texts of an event; the whole traceback remains on the node that wrote it."""
    return {key: value[:300] if isinstance(value, str) else value for key, value in detail.items()}


def _members(spans: Sequence[Sequence[int]]) -> tuple[int, ...]:
    found: list[int] = []
    for first, last in spans:
        if not 0 <= _int(first) <= _int(last) < 1 << 20 or len(found) + last - first > 1 << 20:
            raise ValueError(spans)
        found += range(first, last + 1)
    return tuple(found)
