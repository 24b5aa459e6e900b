"""Check one entry of a flight recorder's ring, and convert it to a call. The fields may have any type or size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = [
    "MAX_INT",
    "MAX_RANKS",
    "NO_EVENTS",
    "TOGETHER",
    "GroupKey",
    "Ranks",
    "Recorded",
    "common_op",
    "input_sizes",
    "listed_ranks",
    "read_entry",
    "short_text",
    "unique_ranks",
    "whole_number",
]


class Ranks(tuple[int, ...]):
    """Members of a group. There may be thousands, and they are part of dict keys, so the hash is computed once."""

    _hash: int

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._hash = super().__hash__()
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return unique_ranks, (tuple(self),)


@lru_cache(maxsize=4096)
def unique_ranks(numbers: tuple[int, ...]) -> Ranks:
    """Return one shared object per set of ranks, so that keys of different dumps compare quickly."""
    return Ranks(numbers)


GroupKey = tuple[str, str, Ranks]
"""Name, description, ranks (empty if the dump does not list them). Names alone are not unique."""
MAX_RANKS = 200_000
MAX_INT = 2**62
_P2P = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})$")
_NUMBER = re.compile(r"\d{1,7}")
NO_EVENTS = ("gloo",)
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all", "alltoall", "all_reduce_barrier")
"""Operations that no rank can leave before all ranks have entered."""
_OPS = {
    "_all_gather_base": "all_gather", "all_gather_single": "all_gather", "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce", "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
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
    """One call of one rank. `peer` is a rank within the group, as in the recorder."""

    group: GroupKey
    seq: int
    op: str
    done: bool
    retired: bool
    has_events: bool
    started: bool
    """True if the device is known to have started it; torch checks only with `TORCH_NCCL_ENABLE_TIMING`."""
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
        """True if a watchdog timed it out: it is over for torch, but never completed on the device."""
        return self.has_events and self.retired and not self.done


def listed_ranks(listed: Any) -> Ranks:
    """Parse the ranks of a group: a text in every torch version so far ("[0, 1, 2]"), or a list."""
    if isinstance(listed, str):
        return _ranks_of_text(listed)
    return _ranks_of_numbers(listed if isinstance(listed, list) else [])


@lru_cache(maxsize=4096)
def _ranks_of_text(text: str) -> Ranks:
    """Cached, because all dumps of a job list the same groups."""
    return _ranks_of_numbers(_NUMBER.findall(text))


def _ranks_of_numbers(numbers: list[Any]) -> Ranks:
    return unique_ranks(
        tuple(dict.fromkeys(r for n in numbers[:MAX_RANKS] if (r := whole_number(n, MAX_RANKS)) is not None))
    )


def read_entry(entry: Mapping[str, Any], group: GroupKey) -> tuple[Recorded | None, bool]:
    """Return the call, and True if it is a point-to-point call. The call is None if the entry is damaged or not a
    separate call."""
    backend, colon, op = short_text(entry.get("profiling_name"), 200).partition(":")
    if not colon:
        backend, op = "", backend
    p2p = _P2P.fullmatch(op)
    is_p2p = p2p is not None or entry.get("is_p2p") is True
    seq = whole_number(entry.get("collective_seq_id", entry.get("seq_id")))
    if not op or (seq is None and not is_p2p):
        return None, is_p2p
    has_events = backend not in NO_EVENTS
    state, retired = entry.get("state"), entry.get("retired") is True
    done = state == "completed" if has_events else retired or state == "completed"
    issue_ns = whole_number(entry.get("time_created_ns"), default=0) or 0
    times = [whole_number(entry.get(f"time_discovered_{what}_ns"), default=0) or 0 for what in ("started", "completed")]
    num_bytes, dtype, shape = input_sizes(entry.get("input_sizes"), entry.get("input_dtypes"))
    caller = _caller(entry.get("frames"))
    call = Recorded(
        group=group, seq=seq if seq is not None else 0, op=p2p[1] if p2p else _OPS.get(op, op), done=done,
        retired=retired, has_events=has_events, started=state == "started" or times[0] > 0, issue_ns=issue_ns,
        last_ns=max(issue_ns, *times), peer=int(p2p[3]) if p2p else None, num_bytes=num_bytes, dtype=dtype, shape=shape,
        caller=caller, timeout_ms=whole_number(entry.get("timeout_ms"), default=0) or 0,
    )  # fmt: skip
    return (call if p2p or not is_p2p or op == "coalesced" else None), is_p2p


def common_op(name: str) -> str:
    """Return an operation's canonical name: `_allgather_base`, `ALLGATHER` and `all_gather_coalesced` are
    `all_gather`.
    """
    op = name.lower().removesuffix("_coalesced")
    return _OPS.get(op, op)


def input_sizes(sizes: Any, dtypes: Any) -> tuple[int | None, str, str]:
    """Bytes, element type and shape of the inputs; None and "" if they are missing or malformed."""
    names = [_DTYPES.get(n, (n.lower(), 0)) for n in _plain_texts(dtypes)]
    dtype = ", ".join(dict.fromkeys(name for name, _ in names))[:100]
    if not isinstance(sizes, list) or len(sizes) > 10_000:
        return None, dtype, ""
    total, shapes = 0, []
    for i, size in enumerate(sizes):
        dims = [whole_number(dim) for dim in size[:16]] if isinstance(size, list) else [None]
        if None in dims:
            return None, dtype, ""
        numel = 1
        for dim in dims:
            numel *= dim or 0
        if numel > MAX_INT:
            return None, dtype, ""
        total += numel * (names[i][1] if i < len(names) else 0)
        shapes.append("x".join(map(str, dims)))
    unsized = any(width == 0 for _, width in names) or len(names) < len(sizes)
    return (None if unsized and sizes else total), dtype, " + ".join(dict.fromkeys(shapes))[:200]


def _caller(frames: Any) -> str:
    """The innermost frame outside torch, or else the innermost frame of all, as `folder/file.py:120 function`."""
    first = ""
    for frame in _dicts(frames):
        name, filename = short_text(frame.get("name"), 100), short_text(frame.get("filename"), 500)
        line = whole_number(frame.get("line"))
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
    return [short_text(item, 40) for item in value[:10_000] if isinstance(item, str)] if isinstance(value, list) else []


def short_text(value: Any, limit: int) -> str:
    return value[:limit] if isinstance(value, str) else ""


def whole_number(value: Any, limit: int = MAX_INT, default: int | None = None) -> int | None:
    """Return a number from 0 to `limit`, else `default`. Text with digits is accepted, too (JSON dumps have
    text in `pg_status`).
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit:
        return value
    return default
