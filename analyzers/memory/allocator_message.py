"""Figures in the message of a failed CUDA allocation: the request, and which processes hold the device's memory.

    found = memory_of_message("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")
    found["requested_bytes"], found["device_free_bytes"], found["others_bytes"], found["holders"]
    others_hold_it(found)       # True: without the other processes the request would have fit

The message describes the moment of the failure. A snapshot taken later, when the stack has unwound, does not show it:
the tensors of the failed step have been freed. Figures that the message lacks are absent, never 0: cuBLAS, cuDNN and
NCCL say only that there was no memory, and NVML does not count a process's memory everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from analyzers.policy import SHARED
from analyzers.wording import is_number, size_text

__all__ = ["holders_text", "memory_of_message", "others_hold_it"]

_BYTES = r"([\d.]+) ?(bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FIGURES = {
    "requested_bytes": re.compile(rf"[Tt]ried to allocate {_BYTES}"),
    "device_bytes": re.compile(rf"total capaci?ty of {_BYTES}"),
    "device_free_bytes": re.compile(rf"of which {_BYTES} is free"),
    "own_bytes": re.compile(rf"this process has {_BYTES} memory in use"),
    "allocated_bytes": re.compile(rf"{_BYTES} is allocated by PyTorch"),
    "unused_bytes": re.compile(rf"{_BYTES} is reserved by PyTorch but unallocated"),
}
_OLD_FIGURES = {
    "device_bytes": re.compile(rf"\(GPU \d{{1,4}}; {_BYTES} total capacity;"),
    "device_free_bytes": re.compile(rf"; {_BYTES} free;"),
    "allocated_bytes": re.compile(rf"; {_BYTES} already allocated;"),
    "reserved_bytes": re.compile(rf"; {_BYTES} (?:reserved in total by PyTorch|cached)"),
}
"""Figures of torch before 2.0: `(GPU 0; 23.70 GiB total capacity; 21.50 GiB already allocated; ...)`."""
_HOLDER = re.compile(rf"Process (\d{{1,10}}) has {_BYTES} memory in use")
MAX_HOLDERS = 8
UNCOUNTED_BYTES = 1 << 64
"""NVML_VALUE_NOT_AVAILABLE as torch prints it: 17179869184.00 GiB."""


def memory_of_message(
    message: str, ranks: Mapping[int, int] | None = None, own_pids: Collection[int] = ()
) -> dict[str, Any]:
    """Figures by name, in bytes. `holders`: the largest other processes; `ranks`: {pid: rank} of this run.

    `own_pids`: known pids of the process that wrote the message. torch lists it among the other processes if the driver
    knows it by another pid, as in a container.
    """
    found: dict[str, Any] = {
        name: held
        for name, pattern in (*_FIGURES.items(), *_OLD_FIGURES.items())
        if (match := pattern.search(message)) and (held := _bytes(match[1], match[2])) is not None
    }
    holders = [[int(pid), held] for pid, number, unit in _HOLDER.findall(message) if (held := _bytes(number, unit))]
    if "allocated_bytes" in found and "unused_bytes" in found:
        found["reserved_bytes"] = found["allocated_bytes"] + found["unused_bytes"]
    elif "allocated_bytes" in found and "reserved_bytes" in found:
        found["unused_bytes"] = max(0, found["reserved_bytes"] - found["allocated_bytes"])
    if not _FIGURES["own_bytes"].search(message) and (own := _own(holders, found, own_pids)):
        holders.remove(own)
        found["own_bytes"] = own[1]
    if holders:
        found["others_bytes"] = sum(held for _, held in holders)
        holders.sort(key=lambda holder: -holder[1])
        found["holders"] = [
            f"process {pid}{f' (rank {ranks[pid]})' if ranks and pid in ranks else ''}: {size_text(held)}"
            for pid, held in holders[:MAX_HOLDERS]
        ]
    return found


def _own(holders: list[list[int]], found: Mapping[str, Any], own_pids: Collection[int]) -> list[int] | None:
    """Find the failed process among the holders: by its known pid, or because the device has no room for another such
    process. It holds at least the memory reserved by torch; if several holders do, the smallest is taken.
    """
    device, reserved = found.get("device_bytes"), found.get("reserved_bytes")
    named = [holder for holder in holders if holder[0] in own_pids]
    if named or device is None or reserved is None or sum(held for _, held in holders) + reserved <= device:
        return named[0] if named else None
    large_enough = [holder for holder in holders if holder[1] >= reserved * (1 - SHARED.same_ratio)]
    return min(large_enough, key=lambda holder: holder[1], default=None)


def others_hold_it(evidence: Mapping[str, Any]) -> bool:
    """Return True if other processes hold more memory than this one, and the request would have fit without them."""
    held, asked, own = (evidence.get(name) for name in ("others_bytes", "requested_bytes", "own_bytes"))
    if not (is_number(held) and is_number(asked)):
        return False
    free = evidence.get("device_free_bytes")
    has_room = asked <= held + (free if is_number(free) else 0)  # type: ignore[operator]
    return has_room and held > (own if is_number(own) else 0)  # type: ignore[operator]


def holders_text(evidence: Mapping[str, Any]) -> str:
    """The two largest holders, for a sentence; "" if none is known."""
    holders: Any = evidence.get("holders")
    if not isinstance(holders, (list, tuple)) or not holders:
        return ""
    rest = len(holders) - 2
    return ", ".join(str(holder).replace(": ", " with ") for holder in holders[:2]) + (f" and {rest} more" * (rest > 0))


def _bytes(number: str, unit: str) -> int | None:
    try:
        found = round(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):  # "1.2.3", or hundreds of digits: a damaged text
        return None
    return found if found < UNCOUNTED_BYTES else None
