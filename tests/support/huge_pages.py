"""Memory in pages of 2 MiB: a fork copies one entry of the page table for each, not 512, and ends as cheaply."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
"""At once, and not whenever the kernel gets to it; kernels before 6.1 do not know it, and nothing changes there."""


def use_huge_pages() -> None:
    """Move what this process has allocated so far into huge pages, where the kernel does that."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in list(_allocated()):
        start, end = -(-first // _HUGE_BYTES) * _HUGE_BYTES, last // _HUGE_BYTES * _HUGE_BYTES
        if start < end:
            advise(start, end - start, mmap.MADV_HUGEPAGE)
            advise(start, end - start, _MADV_COLLAPSE)


def _allocated() -> Iterator[tuple[int, int]]:
    """Address ranges that are private to this process, writable, and of no file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0" and "[stack]" not in line:
            first, last = place.split("-")
            yield int(first, 16), int(last, 16)
