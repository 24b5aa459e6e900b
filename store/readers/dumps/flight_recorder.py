"""Read one rank's dump of PyTorch's flight recorder: check each field, and keep what a verdict needs.

    dump = read_dump(Path("dumps/nccl_trace_rank_3"), rank=3)
    dump.calls        # per group, {number: call}: the rank's newest calls
    dump.dropped      # records that the ring buffer had already overwritten

Supported are the watchdog's pickles (`TORCH_FR_DUMP_TEMP_FILE`, before 2.9 `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`;
`_dump_nccl_trace`, `_dump_fr_trace`) and JSON (`_dump_fr_trace_json`) of any backend, format 2.x. The format is defined
in `torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`.

* A backend with device events sets `completed`. gloo has none: there `retired` means that a call is over, successfully
  or not.
* A ring that keeps nothing (`TORCH_FR_BUFFER_SIZE=0`) still has `pg_status`, from which the default group's calls are
  known, but not their operations.
* Calls inside a coalesced group have no events; their state is in the `coalesced` entry that follows them.
* Dumps are untrusted: a field of the wrong type or size is treated as not recorded.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.readers.dumps.newest_entries import Shortened
from store.readers.dumps.recorded_call import (
    MAX_INT,
    NO_EVENTS,
    GroupKey,
    Recorded,
    listed_ranks,
    read_entry,
    short_text,
    unique_ranks,
    whole_number,
)
from store.readers.dumps.safe_pickle import loads
from store.readers.untrusted.external_files import SourceError, modified_ns, read_whole, unpacked
from store.readers.untrusted.json_stream import members

__all__ = ["KEPT_CALLS", "MAX_PICKLE_BYTES", "RankDump", "read_dump"]


MAX_PICKLE_BYTES = 96 << 20
MAX_ENTRIES = 200_000
KEPT_CALLS = 64
"""Newest collectives kept per group. If ranks are further apart, only their sequence numbers are compared."""
KEPT_P2P = 256
_NOT_COLLECTIVE = ("send", "recv", "split", "new_window", "batch_op_issue", "finalize")


@dataclass(slots=True, kw_only=True)
class RankDump:
    """Content of one rank's dump. Times are epoch nanoseconds of its host."""

    rank: int
    path: Path
    version: str
    has_frames: bool = False
    modified_ns: int = 0
    num_entries: int = 0
    damaged_entries: int = 0
    dropped: int = 0
    records_starts: bool = False
    """True if the dump records when devices start calls, so that a call without a start has not been started."""
    only_active: bool = False
    """True if completed calls were not written. Absent calls are then complete, and gaps in the numbers are not lost
    records.
    """
    last_ns: int = 0
    groups: dict[str, GroupKey] = field(default_factory=dict)
    calls: dict[GroupKey, dict[int, Recorded]] = field(default_factory=dict)
    last_seq: dict[GroupKey, int] = field(default_factory=dict)
    p2p: dict[tuple[GroupKey, str, int], list[Recorded]] = field(default_factory=dict)
    """Newest calls by (group, direction, peer in the group); `p2p_before`: number of earlier calls that are not
    kept.
    """
    p2p_before: dict[tuple[GroupKey, str, int], int] = field(default_factory=dict)
    enqueued: dict[int, int] = field(default_factory=dict)
    """`last_enqueued_collective` of `pg_status`, by the rank's local number of the group."""
    is_open_elsewhere: bool = False
    """True if `pg_status` shows a call in flight in a group other than the default one."""


def read_dump(path: Path, rank: int, *, unpickle: Callable[[Path], Any] | None = None) -> RankDump:
    """Read and check one dump; `unpickle` reads a pickle. Raises SourceError with the reason if it is not a dump."""
    top = _load(path, unpickle or _unpickled)
    version = short_text(top.get("version"), 20)
    if not re.fullmatch(r"2(\.\d{1,4})?", version):
        raise SourceError(f"is a flight-recorder dump of version {version or '?'}: only 2.x is supported")
    dump = RankDump(rank=rank, path=path, version=version, modified_ns=modified_ns(path))
    _groups(top.get("pg_config"), dump)
    entries = top.get("entries")
    if entries is not None and not isinstance(entries, list):
        raise SourceError("has entries that are not a list")
    _reduce(entries or [], dump, is_whole=not isinstance(top, Shortened))
    dump.num_entries += top.num_left_out if isinstance(top, Shortened) else 0
    _status(top.get("pg_status"), dump)
    return dump


def _calls_of_status(status: Mapping[str, Any], done: int, dump: RankDump) -> None:
    """Add the default group's calls of a dump without entries, from the numbers of its newest calls. The operations of
    these calls are not recorded.
    """
    group, last = next((key for key in dump.groups.values() if key[1] == "default_pg"), None), dump.enqueued[0]
    if group is None or done > last:
        return
    started = whole_number(status.get("last_started_collective"), default=done) or 0
    for seq in sorted({*range(done, min(last, done + KEPT_CALLS - 1)), last}):
        call = Recorded(group=group, seq=seq, op="collective", done=seq <= done, retired=False, has_events=True,
                        started=seq <= started, issue_ns=0, last_ns=0)  # fmt: skip
        _keep(call, dump)


def _unpickled(path: Path) -> Any:
    return loads(read_whole(path, MAX_PICKLE_BYTES)[0])


def _load(path: Path, unpickle: Callable[[Path], Any]) -> dict[str, Any]:
    first = next(unpacked(path), b"")
    if first.lstrip()[:1] == b"{":
        top: dict[str, Any] = {"entries": []}
        for key, value, is_item in members(unpacked(path), {"entries"}):
            if is_item:
                top["entries"].append(value)
                if len(top["entries"]) > MAX_ENTRIES:
                    raise SourceError(f"holds more than {MAX_ENTRIES:,} entries: no ring is that long")
            else:
                top[key] = value
        return top
    loaded = unpickle(path)
    if isinstance(loaded, list) and loaded and isinstance(loaded[0], dict) and "record_id" in loaded[0]:
        raise SourceError(
            "is a flight-recorder dump of torch 2.2 or older: only format 2.x (torch 2.4 and later) is read"
        )
    if not isinstance(loaded, dict):
        raise SourceError("is a pickle, but no flight-recorder dump")
    return loaded


def _groups(config: Any, dump: RankDump) -> None:
    for name, group in config.items() if isinstance(config, dict) else ():
        if not isinstance(group, dict):
            continue
        ranks = listed_ranks(group.get("ranks"))
        known = short_text(name, 200)
        if known or ranks:
            dump.groups[known] = (known, short_text(group.get("desc"), 200), ranks)


def _status(status: Any, dump: RankDump) -> None:
    for key, group in status.items() if isinstance(status, dict) else ():
        number = whole_number(key)
        last = whole_number(group.get("last_enqueued_collective")) if isinstance(group, dict) else None
        if number is not None and last is not None:
            dump.enqueued[number] = last
            done = whole_number(group.get("last_completed_collective"), default=last) or 0
            dump.is_open_elsewhere |= number != 0 and done < last
            if number == 0 and not dump.num_entries:
                _calls_of_status(group, done, dump)


def _reduce(recorded: list[Any], dump: RankDump, *, is_whole: bool) -> None:
    """Add the newest calls of each group to `dump`; calls of a coalesced launch get the state of its entry."""
    entries = as_torch(recorded)
    batches: dict[GroupKey, list[tuple[int, int, Recorded]]] = {}
    first_id: int | None = None
    if entries and isinstance(entries[0], dict):
        first_id = whole_number(entries[0].get("record_id"))
    for entry in _without_old_entries(entries[:MAX_ENTRIES], dump):
        if not isinstance(entry, dict):
            dump.damaged_entries += 1
            continue
        dump.num_entries += 1
        record_id = whole_number(entry.get("record_id"))
        if first_id is None and record_id is not None:
            first_id = record_id
        call, is_p2p = read_entry(entry, _group(entry.get("process_group"), dump))
        if call is None:
            dump.damaged_entries += 1
            continue
        dump.has_frames |= bool(call.caller)
        dump.records_starts |= call.started and call.has_events
        dump.last_ns = max(dump.last_ns, call.last_ns)
        numbers = (
            whole_number(entry.get("collective_seq_id"), default=-1),
            whole_number(entry.get("p2p_seq_id"), default=-1),
        )
        batch = batches.setdefault(call.group, [])
        if batch and (batch[-1][0], batch[-1][1]) != numbers:
            batch.clear()
        if call.op == "coalesced":
            for *_, inner in batch:
                inner.done, inner.retired, inner.started = call.done, call.retired, call.started
            if batch or is_p2p:
                batch.clear()
                continue
        batch.append((numbers[0] or 0, numbers[1] or 0, call))
        _keep(call, dump)
    dump.only_active = is_whole and bool(first_id) and _holds_only_active(entries)
    dump.dropped = 0 if dump.only_active else first_id or 0


def _holds_only_active(entries: list[Any]) -> bool:
    """Return True if no call is completed and the numbers have gaps, since a complete ring has no gaps among its newest
    records.
    """
    numbers = [entry.get("record_id") for entry in entries if isinstance(entry, dict)]
    known = [number for number in numbers if isinstance(number, int)]
    has_gap = any(b - a > 1 for a, b in itertools.pairwise(known))
    return has_gap and not any(isinstance(e, dict) and e.get("state") == "completed" for e in entries)


def _without_old_entries(entries: list[Any], dump: RankDump) -> list[Any]:
    """Drop entries that are complete, well-formed and not among the newest of their group. Only their count, the last
    sequence number per group and the last end time matter.

    In a ring of 2,000 entries these are nearly all, and checking them in full would be most of the work.
    """
    kept: list[Any] = []
    newer: dict[Any, int] = {}
    last: dict[Any, int] = {}
    last_ns = 0
    for entry in reversed(entries):
        if isinstance(entry, dict):
            op, name, seq = entry.get("profiling_name"), entry.get("process_group"), entry.get("collective_seq_id")
            ended_ns = entry.get("time_discovered_completed_ns")
            if type(op) is str and type(name) is tuple and type(seq) is int and type(ended_ns) is int:
                if "coalesced" in op:
                    return entries  # drop nothing: the coalesced calls of the group get their state from this entry
                if name not in newer and not all(type(part) is str for part in name):
                    return entries
                newer[name] = count = newer.get(name, 0) + 1
                if (
                    count > 2 * KEPT_CALLS
                    and entry.get("state") == "completed"
                    and entry.get("is_p2p") is False
                    and 0 <= seq <= MAX_INT
                    and 0 <= ended_ns <= MAX_INT
                    and 4 < len(op) < 200
                    and not op.startswith(NO_EVENTS)
                ):
                    if seq > last.get(name, -1):
                        last[name] = seq
                    if ended_ns > last_ns:
                        last_ns = ended_ns
                    continue
        kept.append(entry)
    dump.num_entries += len(entries) - len(kept)
    dump.last_ns = max(dump.last_ns, last_ns)
    for name, seq in last.items():
        dump.last_seq[_group(name, dump)] = seq
    kept.reverse()
    return kept


def _group(name: Any, dump: RankDump) -> GroupKey:
    parts = list(name) if isinstance(name, (list, tuple)) else [name]
    label, desc = short_text(parts[0] if parts else None, 200), short_text(parts[1] if len(parts) > 1 else None, 200)
    listed = dump.groups.get(label)
    return (label, desc, listed[2] if listed else unique_ranks(()))


def _keep(call: Recorded, dump: RankDump) -> None:
    if call.peer is not None:
        key = (call.group, call.op, call.peer)
        kept = dump.p2p.setdefault(key, [])
        kept.append(call)
        if len(kept) > KEPT_P2P:
            del kept[0]
            dump.p2p_before[key] = dump.p2p_before.get(key, 0) + 1
        return
    calls = dump.calls.setdefault(call.group, {})
    if call.seq < next(reversed(calls), -1) and (call.seq in calls or call.seq < min(calls)):
        calls.clear()  # the group was destroyed and created again: its new calls are numbered from the start
    same = calls.get(call.seq)
    if same is not None:  # calls that were launched together (coalesced) count as one call with all their bytes
        same.done &= call.done
        same.started |= call.started
        same.num_bytes = None if None in (same.num_bytes, call.num_bytes) else same.num_bytes + call.num_bytes  # type: ignore[operator]
        same.shape = f"{same.shape} + {call.shape}"[:200]
        return
    dump.last_seq[call.group] = max(call.seq, dump.last_seq.get(call.group, -1)) if calls else call.seq
    calls[call.seq] = call
    if len(calls) > KEPT_CALLS:  # drop the oldest call, but keep an incomplete one, because the rank waits in it
        in_order = iter(calls)
        oldest = next(in_order)
        del calls[oldest if calls[oldest].done else next(in_order)]


def as_torch(entries: list[Any]) -> list[Any]:
    """Convert entries of torchcomms' recorder to torch's form. Raises SourceError if the calls cannot be numbered.

    1. torchcomms numbers calls over all communicators. Here they are numbered per group, from the first one in the
       ring.
    2. One-sided calls (send, recv) are listed among the collectives without their peer, so they are left out.
    3. `retired` means that a call is over, even if its device event never completed. In JSON, time 0 means "not yet".

    With several groups the ring must be complete, because otherwise the numbers of two ranks cannot be matched.
    """
    if not entries or not _is_torchcomms(entries[0]):
        return entries
    kept = [entry for entry in entries if isinstance(entry, dict) and _operation(entry) not in _NOT_COLLECTIVE]
    groups = {str(entry.get("process_group")) for entry in kept}
    if entries[0].get("record_id") != 0 and len(groups) > 1:
        raise SourceError(
            "is from torchcomms, with several communicators and lost records: calls cannot be numbered. "
            "Enlarge its ring (max_entries)"
        )
    counted: Counter[str] = Counter()
    found: list[Any] = []
    for entry in kept:
        group = str(entry.get("process_group"))
        changed = dict(entry)
        if entries[0].get("record_id") == 0:
            changed |= {"collective_seq_id": counted[group], "record_id": len(found)}
            counted[group] += 1
        if entry.get("retired") is True:
            changed["state"] = "completed"
        found.append(changed)
    return found


def _operation(entry: dict[str, Any]) -> str:
    return short_text(entry.get("profiling_name"), 200).partition(":")[2]


def _is_torchcomms(entry: Any) -> bool:
    """Return True for an entry of torchcomms. It describes a group by name and backend: `("main", "ncclx")`."""
    if not isinstance(entry, dict):
        return False
    group = entry.get("process_group")
    backend, colon, _ = short_text(entry.get("profiling_name"), 200).partition(":")
    return bool(colon) and isinstance(group, (list, tuple)) and len(group) == 2 and group[1] == backend
