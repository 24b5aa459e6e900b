"""PyTorch's flight recorder: one rank's dump, checked field by field and reduced to what a verdict needs.

    dump = read_dump(Path("dumps/nccl_trace_rank_3"), rank=3)
    dump.calls        # per group, by number: what the rank called last
    dump.dropped      # records that the ring no longer held

Read are pickles as the watchdog writes them (`TORCH_FR_DUMP_TEMP_FILE`, before 2.9 `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`;
`_dump_nccl_trace`, `_dump_fr_trace`) and JSON (`_dump_fr_trace_json`), of any backend, format 2.x. The format is that
of `torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`.

* A backend with device events tells `completed`. gloo has none: there `retired` says that a call is over, well or not.
* Calls inside a coalesced group have no events of their own: the entry `coalesced` that follows speaks for them.
* Nothing in a dump is trusted: a field of the wrong type or size counts as not recorded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from store.readers.external_files import SourceError, modified_ns, read_whole, unpacked
from store.readers.json_stream import members
from store.readers.newest_entries import Shortened
from store.readers.safe_pickle import loads

__all__ = ["KEPT_CALLS", "GroupKey", "RankDump", "Recorded", "read_dump"]


class Ranks(tuple[int, ...]):
    """The members of a group. There are thousands, and they are a part of keys: their hash is worked out once."""

    _hash: int

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._hash = super().__hash__()
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _ranks, (tuple(self),)


@lru_cache(maxsize=4096)
def _ranks(numbers: tuple[int, ...]) -> Ranks:
    """The same object for the same ranks, which makes keys of different dumps equal at a glance."""
    return Ranks(numbers)


GroupKey = tuple[str, str, Ranks]
"""Name, description, ranks (empty where the dump does not tell them). Names alone are not unique."""
MAX_PICKLE_BYTES = 96 << 20
MAX_ENTRIES = 200_000
KEPT_CALLS = 64
"""Newest collectives of a group that are kept: ranks that are further apart are told apart by their numbers alone."""
KEPT_P2P = 256
MAX_RANKS = 200_000
_MAX_INT = 2**62
_P2P = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})$")
_NUMBER = re.compile(r"\d{1,7}")
_NO_EVENTS = ("gloo",)
_OPS = {
    "_all_gather_base": "all_gather", "all_gather_single": "all_gather", "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce", "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
}  # fmt: skip
_DTYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1), "ComplexFloat": ("complex64", 8), "ComplexDouble": ("complex128", 16),
    "Float8_e4m3fn": ("float8_e4m3fn", 1), "Float8_e5m2": ("float8_e5m2", 1),
}  # fmt: skip
_LIBRARY = re.compile(r"/(site|dist)-packages/torch/|/torch/(distributed|nn|autograd|utils)/|^<frozen ")


@dataclass(slots=True, kw_only=True)
class Recorded:
    """One call of one rank. `peer` is a rank within the group, as the recorder has it."""

    group: GroupKey
    seq: int
    op: str
    done: bool
    retired: bool
    has_events: bool
    issue_ns: int
    last_ns: int
    peer: int | None = None
    num_bytes: int | None = None
    dtype: str = ""
    shape: str = ""
    caller: str = ""
    timeout_ms: int = 0

    @property
    def timed_out(self) -> bool:
        """A watchdog gave it up: it is over for torch and was never complete on the device."""
        return self.has_events and self.retired and not self.done


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
    only_active: bool = False
    """Written without completed calls: one that is absent is complete, and gaps in the numbers are no lost records."""
    last_ns: int = 0
    groups: dict[str, GroupKey] = field(default_factory=dict)
    calls: dict[GroupKey, dict[int, Recorded]] = field(default_factory=dict)
    last_seq: dict[GroupKey, int] = field(default_factory=dict)
    p2p: dict[tuple[GroupKey, str, int], list[Recorded]] = field(default_factory=dict)
    """Calls by (group, direction, peer in the group), the newest; `p2p_before` counts those that are not kept."""
    p2p_before: dict[tuple[GroupKey, str, int], int] = field(default_factory=dict)
    enqueued: dict[int, int] = field(default_factory=dict)
    """`last_enqueued_collective` by the rank's own number of the group (`pg_status`)."""


def read_dump(path: Path, rank: int, *, loads: Callable[[Path], Any] | None = None) -> RankDump:
    """Read and check one dump. Raises SourceError with the reason if it is none. `loads` reads a pickle's file."""
    top = _load(path, loads or _loads)
    version = _text(top.get("version"), 20)
    if not re.fullmatch(r"2(\.\d{1,4})?", version):
        raise SourceError(f"is a flight-recorder dump of version {version or '?'}: 2.x is read")
    dump = RankDump(rank=rank, path=path, version=version, modified_ns=modified_ns(path))
    _groups(top.get("pg_config"), dump)
    entries = top.get("entries")
    if entries is not None and not isinstance(entries, list):
        raise SourceError("has entries that are no list")
    _reduce(entries or [], dump, is_whole=not isinstance(top, Shortened))
    dump.num_entries += top.num_left_out if isinstance(top, Shortened) else 0
    _status(top.get("pg_status"), dump)
    return dump


def _loads(path: Path) -> Any:
    return loads(read_whole(path, MAX_PICKLE_BYTES)[0])


def _load(path: Path, unpickled: Callable[[Path], Any]) -> dict[str, Any]:
    first = next(unpacked(path), b"")
    if first.lstrip()[:1] == b"{":
        top: dict[str, Any] = {"entries": []}
        for key, value, is_item in members(unpacked(path), {"entries"}):
            if is_item:
                top["entries"].append(value)
                if len(top["entries"]) > MAX_ENTRIES:
                    raise SourceError(f"holds more than {MAX_ENTRIES:,} entries: no ring is so long")
            else:
                top[key] = value
        return top
    loaded = unpickled(path)
    if not isinstance(loaded, dict):
        raise SourceError("is a pickle, but no flight-recorder dump")
    return loaded


def _groups(config: Any, dump: RankDump) -> None:
    for name, about in config.items() if isinstance(config, dict) else ():
        if not isinstance(about, dict):
            continue
        listed = about.get("ranks")  # text in every version so far: "[0, 1, 2]"
        ranks = _listed(listed) if isinstance(listed, str) else _numbers(listed if isinstance(listed, list) else [])
        known = _text(name, 200)
        if known or ranks:
            dump.groups[known] = (known, _text(about.get("desc"), 200), ranks)


@lru_cache(maxsize=4096)
def _listed(text: str) -> Ranks:
    """All dumps of a job list the same groups."""
    return _numbers(_NUMBER.findall(text))


def _numbers(numbers: list[Any]) -> Ranks:
    return _ranks(tuple(dict.fromkeys(r for n in numbers[:MAX_RANKS] if (r := _int(n, MAX_RANKS)) is not None)))


def _status(status: Any, dump: RankDump) -> None:
    for number, about in status.items() if isinstance(status, dict) else ():
        own, last = _int(number), _int(about.get("last_enqueued_collective")) if isinstance(about, dict) else None
        if own is not None and last is not None:
            dump.enqueued[own] = last


def _reduce(entries: list[Any], dump: RankDump, *, is_whole: bool) -> None:
    batches: dict[GroupKey, list[tuple[int, int, Recorded]]] = {}
    first_id: int | None = None
    if entries and isinstance(entries[0], dict):
        first_id = _int(entries[0].get("record_id"))
    for entry in _skimmed(entries[:MAX_ENTRIES], dump):
        if not isinstance(entry, dict):
            dump.damaged_entries += 1
            continue
        dump.num_entries += 1
        record_id = _int(entry.get("record_id"))
        if first_id is None and record_id is not None:
            first_id = record_id
        call, is_p2p = _recorded(entry, dump)
        if call is None:
            dump.damaged_entries += 1
            continue
        dump.last_ns = max(dump.last_ns, call.last_ns)
        numbers = (_int(entry.get("collective_seq_id"), default=-1), _int(entry.get("p2p_seq_id"), default=-1))
        batch = batches.setdefault(call.group, [])
        if batch and (batch[-1][0], batch[-1][1]) != numbers:
            batch.clear()
        if call.op == "coalesced":
            for *_, inner in batch:
                inner.done, inner.retired = call.done, call.retired
            if batch or is_p2p:
                batch.clear()
                continue
        batch.append((numbers[0] or 0, numbers[1] or 0, call))
        _keep(call, dump)
    dump.only_active = is_whole and bool(first_id) and _holds_only_active(entries)
    dump.dropped = 0 if dump.only_active else first_id or 0


def _holds_only_active(entries: list[Any]) -> bool:
    """Return True without a completed call and with gaps in the numbers: a ring keeps its newest records whole."""
    numbers = [entry.get("record_id") for entry in entries if isinstance(entry, dict)]
    known = [number for number in numbers if isinstance(number, int)]
    has_gap = any(b - a > 1 for a, b in itertools.pairwise(known))
    return has_gap and not any(isinstance(e, dict) and e.get("state") == "completed" for e in entries)


def _skimmed(entries: list[Any], dump: RankDump) -> list[Any]:
    """The entries without those that say nothing beyond their number: complete, well-formed, none of the newest.

    In a ring of 2,000 that is nearly all of them, and looking at them in full is most of the work of a dump.
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
                    return entries  # what it says, it says of others
                if name not in newer and not all(type(part) is str for part in name):
                    return entries
                newer[name] = count = newer.get(name, 0) + 1
                if (
                    count > 2 * KEPT_CALLS
                    and entry.get("state") == "completed"
                    and entry.get("is_p2p") is False
                    and 0 <= seq <= _MAX_INT
                    and 0 <= ended_ns <= _MAX_INT
                    and 4 < len(op) < 200
                    and not op.startswith(_NO_EVENTS)
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
    label, desc = _text(parts[0] if parts else None, 200), _text(parts[1] if len(parts) > 1 else None, 200)
    told = dump.groups.get(label)
    return (label, desc, told[2] if told else _ranks(()))


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
    same = calls.get(call.seq)
    if same is not None:  # several in one coalesced launch: one call of all their bytes
        same.done &= call.done
        same.num_bytes = None if None in (same.num_bytes, call.num_bytes) else same.num_bytes + call.num_bytes  # type: ignore[operator]
        same.shape = f"{same.shape} + {call.shape}"[:200]
        return
    calls[call.seq] = call
    dump.last_seq[call.group] = max(call.seq, dump.last_seq.get(call.group, -1))
    if len(calls) > KEPT_CALLS:  # the oldest that is not done is what the rank waits in: it stays
        in_order = iter(calls)
        oldest = next(in_order)
        del calls[oldest if calls[oldest].done else next(in_order)]


def _recorded(entry: Mapping[str, Any], dump: RankDump) -> tuple[Recorded | None, bool]:
    group = _group(entry.get("process_group"), dump)
    backend, colon, op = _text(entry.get("profiling_name"), 200).partition(":")
    if not colon:
        backend, op = "", backend
    p2p = _P2P.fullmatch(op)
    is_p2p = p2p is not None or entry.get("is_p2p") is True
    seq = _int(entry.get("collective_seq_id", entry.get("seq_id")))
    if not op or (seq is None and not is_p2p):
        return None, is_p2p
    has_events = backend not in _NO_EVENTS
    state, retired = entry.get("state"), entry.get("retired") is True
    done = state == "completed" if has_events else retired or state == "completed"
    issue_ns = _int(entry.get("time_created_ns"), default=0) or 0
    times = [_int(entry.get(f"time_discovered_{what}_ns"), default=0) or 0 for what in ("started", "completed")]
    num_bytes, dtype, shape = _sizes(entry.get("input_sizes"), entry.get("input_dtypes"))
    caller = _caller(entry.get("frames"))
    dump.has_frames |= bool(caller)
    call = Recorded(
        group=group, seq=seq if seq is not None else 0, op=p2p[1] if p2p else _OPS.get(op, op), done=done,
        retired=retired, has_events=has_events, issue_ns=issue_ns, last_ns=max(issue_ns, *times),
        peer=int(p2p[3]) if p2p else None, num_bytes=num_bytes, dtype=dtype, shape=shape, caller=caller,
        timeout_ms=_int(entry.get("timeout_ms"), default=0) or 0,
    )  # fmt: skip
    return (call if p2p or not is_p2p or op == "coalesced" else None), is_p2p


def _sizes(sizes: Any, dtypes: Any) -> tuple[int | None, str, str]:
    """Bytes, element type and shape of the inputs; None and "" where they are not, or wrongly, recorded."""
    names = [_DTYPES.get(n, (n.lower(), 0)) for n in _plain_texts(dtypes)]
    dtype = ", ".join(dict.fromkeys(name for name, _ in names))[:100]
    if not isinstance(sizes, list) or len(sizes) > 10_000:
        return None, dtype, ""
    total, shapes = 0, []
    for i, size in enumerate(sizes):
        dims = [_int(dim) for dim in size[:16]] if isinstance(size, list) else [None]
        if None in dims:
            return None, dtype, ""
        numel = 1
        for dim in dims:
            numel *= dim or 0
        if numel > _MAX_INT:
            return None, dtype, ""
        total += numel * (names[i][1] if i < len(names) else 0)
        shapes.append("x".join(map(str, dims)))
    unsized = any(width == 0 for _, width in names) or len(names) < len(sizes)
    return (None if unsized and sizes else total), dtype, " + ".join(dict.fromkeys(shapes))[:200]


def _caller(frames: Any) -> str:
    """The innermost frame that is not torch's own, as `folder/file.py:120 function`."""
    first = ""
    for frame in _dicts(frames):
        name, filename = _text(frame.get("name"), 100), _text(frame.get("filename"), 500)
        line = _int(frame.get("line"))
        text = f"{'/'.join(filename.split('/')[-2:])}:{line if line is not None else '?'} {name}"
        first = first or text
        if filename and not _LIBRARY.search(filename):
            return text
    return first


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    for item in value[:200] if isinstance(value, list) else ():
        if isinstance(item, dict):
            yield item


def _plain_texts(value: Any) -> list[str]:
    return [_text(item, 40) for item in value[:10_000] if isinstance(item, str)] if isinstance(value, list) else []


def _text(value: Any, limit: int) -> str:
    return value[:limit] if isinstance(value, str) else ""


def _int(value: Any, limit: int = _MAX_INT, default: int | None = None) -> int | None:
    """A number from 0 to `limit`; text of digits is one (JSON dumps write numbers of `pg_status` as text)."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit:
        return value
    return default
