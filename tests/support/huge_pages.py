"""Pages of 2 MiB: a fork copies one page-table entry for each instead of 512, and exits as cheaply."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
"""Collapses pages at once instead of in the background; without effect before Linux 6.1."""


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
    """Private, writable, anonymous address ranges."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0" and "[stack]" not in line:
            first, last = addresses.split("-")
            yield int(first, 16), int(last, 16)
