"""State of torch's CUDA allocator in a snapshot: allocations with their lines of code, and the request that failed.

    state = summarise(torch.cuda.memory._snapshot())
    state.reserved_bytes - state.allocated_bytes    # cached, but not in use by tensors
    state.sites[0]                                  # Site(at="model/attention.py:88 in forward", bytes=..., blocks=64)

A rank takes its snapshot after the exception has left the training loop, when unwinding has already freed blocks. The
snapshot's trace lists these frees, so they are undone back to the failed allocation (`is_at_failure`). A snapshot is
used as it is if its trace lacks the failed allocation, for instance because no history was recorded.

The format is the one of `torch.cuda.memory._snapshot`. Such a file may come from an untrusted source: values of a wrong
type are left out, and only ValueError is raised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FORMAT", "MemoryState", "Site", "summarise"]

FORMAT = "rankscope.memory_snapshot"
"""Value of the first key, `format`, in our files."""
MAX_SITES = 20
MAX_TEXT = 200
_MAX_BYTES = 1 << 60
_PROBES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")
_TORCH = re.compile(r"/torch/")
_TAKEN, _RETURNED = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
Frames = Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Blocks in use that the same line allocated."""

    at: str
    """`file:line in function` of the user's own code; "" without a Python stack."""
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """The allocator of one device."""

    device: int
    reserved_bytes: int
    """Taken from the device: in use and cached."""
    allocated_bytes: int
    """Given out to tensors."""
    sites: tuple[Site, ...]
    """The largest first, at most 20."""
    has_stacks: bool
    """True if any block in use has the stack that allocated it."""
    is_at_failure: bool
    """True if this is the state at the failed allocation; False if it is the later state in which the snapshot was
    taken."""
    requested_bytes: int | None
    """Bytes that the failed allocation requested; None if the snapshot has no failed one."""
    device_free_bytes: int | None
    """Free bytes on the device at that time."""
    asked_at: str
    """The line that requested the failed allocation, in the form of `Site.at`."""


def summarise(snapshot: Mapping[str, Any]) -> MemoryState:
    """The state of the device on which an allocation failed last; if none failed, of the fullest device. Raises
    ValueError if there is no device."""
    segments = [segment for segment in _list(snapshot.get("segments")) if isinstance(segment, Mapping)]
    traces = [[entry for entry in _list(trace) if isinstance(entry, Mapping)]
              for trace in _list(snapshot.get("device_traces"))]  # fmt: skip
    reserved: dict[int, int] = {}
    for segment in segments:
        device = _size(segment.get("device")) or 0
        reserved[device] = reserved.get(device, 0) + (_size(segment.get("total_size")) or 0)
    failures = {device: at for device, trace in enumerate(traces) if (at := _failure(trace)) is not None}
    if not reserved and not failures:
        raise ValueError("holds no memory of a CUDA device")
    if failures:
        device = max(failures, key=lambda one: _size(traces[one][failures[one]].get("time_us")) or 0)
    else:
        device = max(reserved, key=lambda one: reserved[one])
    live = {
        address: (size, frames)
        for segment in segments
        if (_size(segment.get("device")) or 0) == device
        for address, size, frames in _allocated(segment)
    }
    failed: Mapping[str, Any] = {}
    num_reserved = reserved.get(device, 0)
    if device in failures:
        trace, at = traces[device], failures[device]
        failed = trace[at]
        num_reserved = max(0, num_reserved + _undo(trace, at, live))
    return MemoryState(
        device=device,
        reserved_bytes=num_reserved,
        allocated_bytes=sum(size for size, _ in live.values()),
        sites=_sites(live),
        has_stacks=any(frames for _, frames in live.values()),
        is_at_failure=device in failures,
        requested_bytes=_size(failed.get("size")),
        device_free_bytes=_size(failed.get("device_free")),
        asked_at=_user_line(_list(failed.get("frames"))),
    )


def _failure(trace: Sequence[Mapping[str, Any]]) -> int | None:
    """Index in the trace of the last allocation that failed."""
    return next((at for at in reversed(range(len(trace))) if trace[at].get("action") == "oom"), None)


def _allocated(segment: Mapping[str, Any]) -> Iterator[tuple[int, int, Frames]]:
    """Yield (address, bytes, stack) of the blocks in use."""
    address = _size(segment.get("address")) or 0
    for block in _list(segment.get("blocks")):
        if not isinstance(block, Mapping):
            continue
        size = _size(block.get("size")) or 0
        block_address = _size(block.get("address"))
        if block.get("state") == "active_allocated":
            yield (address if block_address is None else block_address), size, _list(block.get("frames"))
        address += size


def _undo(trace: Sequence[Mapping[str, Any]], failure: int, live: dict[int, tuple[int, Frames]]) -> int:
    """Turn `live` into the blocks in use at the failure; returns how many more bytes were reserved then."""
    later = trace[failure + 1 :]
    freed = {entry.get("addr") for entry in later if entry.get("action") == "free_requested"}
    origin = {address: _list(entry.get("frames")) for entry in trace[:failure]
              if entry.get("action") == "alloc" and (address := _size(entry.get("addr"))) in freed}  # fmt: skip
    more = 0
    for entry in reversed(later):
        action, address, size = entry.get("action"), _size(entry.get("addr")), _size(entry.get("size"))
        if address is None or size is None:
            continue
        if action == "free_requested":
            live[address] = (size, origin.get(address, ()))
        elif action == "alloc":
            live.pop(address, None)
        elif action in _TAKEN or action in _RETURNED:
            more += size if action in _RETURNED else -size
    return more


def _sites(live: Mapping[int, tuple[int, Frames]]) -> tuple[Site, ...]:
    found: dict[str, tuple[int, int]] = {}
    lines: dict[int, str] = {}  # blocks of one stack share it
    for size, frames in live.values():
        line = lines.get(id(frames))
        if line is None:
            line = lines[id(frames)] = _user_line(frames)
        num_bytes, blocks = found.get(line, (0, 0))
        found[line] = num_bytes + size, blocks + 1
    ordered = sorted(found.items(), key=lambda pair: (-pair[1][0], pair[0]))
    return tuple(Site(at=line, bytes=size, blocks=blocks) for line, (size, blocks) in ordered[:MAX_SITES])


def _user_line(frames: Frames) -> str:
    """The innermost line outside of installed packages. Without such a line, it is the innermost line outside of torch,
    or else the innermost line of all. Innermost frames come first."""
    best, rank = "", 3
    for frame in frames:
        path = frame.get("filename") if isinstance(frame, Mapping) else None
        if not isinstance(path, str) or not path.endswith(".py"):  # a C++ frame
            continue
        is_library = _LIBRARY.search(path) is not None or path.startswith(_PROBES)
        distance = 2 if is_library and _TORCH.search(path) else 1 if is_library else 0
        if distance < rank:
            rank = distance
            line, name = _size(frame.get("line")), frame.get("name")
            where = f"{'/'.join(path.split('/')[-2:])}:{'?' if line is None else line}"
            best = (f"{where} in {name}" if isinstance(name, str) and name else where)[:MAX_TEXT]
        if not rank:
            break
    return best


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _size(value: Any) -> int | None:
    """Return the value if it can be an address or size; None for others, as from a damaged file."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= _MAX_BYTES else None
