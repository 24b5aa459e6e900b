"""A request to processes of the run: a small JSON file that they poll. A new request replaces the earlier one.

write_request_file(path, request)          # `request` is a frozen dataclass; False if the folder cannot be written
poll = RequestPoll(path)
poll.changed(parse)                        # parse(fields) if the file has changed since the last call, else None
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .safe_open import read_plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["RequestPoll", "write_request_file"]

MAX_BYTES = 1 << 16
T = TypeVar("T")


def write_request_file(path: Path, request: DataclassInstance) -> bool:
    """Replace an earlier request atomically; False if the folder cannot be written."""
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        new.write_text(json.dumps(asdict(request)))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        return False
    return True


class RequestPoll:
    """Polls a request file. Without a new request this costs one `stat`, so it may be called in each step. A request
    that exists at the start counts as answered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mtime_ns = self._modified_ns()

    def changed(self, parse: Callable[[Any], T]) -> T | None:
        """The parsed request if the file has changed since the last call; None otherwise, and if it is malformed."""
        modified_ns = self._modified_ns()
        if modified_ns == self._mtime_ns:
            return None
        self._mtime_ns = modified_ns
        try:
            return parse(json.loads(read_plain(self._path, MAX_BYTES)))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def _modified_ns(self) -> int:
        try:
            return os.stat(self._path).st_mtime_ns
        except OSError:
            return 0
