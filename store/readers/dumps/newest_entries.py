"""The newest entries of a pickled flight-recorder ring, without unpickling the others.

    top = newest_entries(blob, unpickle)      # the first entry and the newest ones; None: read the full dump

Nearly all of a ring's 2,000 entries are complete. Unpickling them takes 6 of the 8 ms per dump (4,096 ranks leave 8
million entries). A pickle has no index, but it has a regular structure. Each entry starts with the same key. Keys and
frequent values are references to their first occurrence (`BINGET`).

1. Unpickle the first entries (the head). They give the memo index of each key and value.
2. Search for the starts of the newest entries (the tail), and unpickle the tail with the memo of the head.
3. Count the entries in between without unpickling them. They must be all complete or all in flight, be no
   point-to-point calls, and belong to groups in the tail. The number of skipped entries must match the record ids
   around them.

Only the newest complete calls and the oldest calls in flight matter; the oldest are in the head. The result is None for
an unfinished call among finished calls, a coalesced batch, a backend without events, a memo index that is not in the
head, or another pickler's layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

__all__ = ["Memo", "Shortened", "newest_entries"]


class Memo(Protocol):
    """The memo of an unpickler, in the form that another unpickler accepts (a dict in Python 3.11)."""

    def copy(self) -> dict[int, Any]:
        """Values by memo index."""


HEADS = (16, 320)
"""Numbers of first entries to unpickle; the second is tried if the tail refers to values that the first ones lack."""
TAILS = (32, 400)
"""Numbers of newest entries to unpickle; the second is tried if a group is too rare in the first."""
MIN_OF_GROUP = 4
"""Number of entries that a group needs in the tail for its older ones to be skipped."""
_ENTRIES_START = re.compile(
    rb"X\x07\0\0\0entries(?:q.|r....)?\](?:q.|r....)?\(\}(?:q.|r....)?\(X(?P<size>[\x01-\x1f])\0\0\0", re.DOTALL
)
_TAIL_START = b"\x80\x02}(X\x07\0\0\0entries]("  # PROTO 2, EMPTY_DICT, MARK, "entries", EMPTY_LIST, MARK
_HEAD_END = b"eu."  # APPENDS, SETITEMS, STOP
_FALSE, _TUPLE2 = b"\x89", b"\x86"
_NO_EVENTS = b"gloo:"  # the backend records no events, so the states of its calls are unknown
Unpickle = Callable[[bytes, Memo | None], tuple[Any, Memo]]


class Shortened(dict[str, Any]):
    """A dump that lacks `num_left_out` entries, all complete or all in flight."""

    num_left_out = 0


def newest_entries(blob: bytes, unpickle: Unpickle) -> Shortened | None:
    """Read the head and tail of a ring. `unpickle(bytes, memo)` returns the value and the memo; if it raises, the
    result is None.
    """
    start = _ENTRIES_START.search(blob, 0, 1 << 20)
    if start is None or b"coalesced" in blob or _NO_EVENTS in blob:
        return None
    key = blob[start.end() : start.end() + start["size"][0]].decode("utf-8", "replace")
    for num_head, num_tail in product(HEADS, TAILS):
        try:
            found = _shortened(blob, start.end(), key, (num_head, num_tail), unpickle)
        except Exception:
            continue
        if found is not None:
            return found
    return None


def _shortened(blob: bytes, at: int, key: str, sizes: tuple[int, int], unpickle: Unpickle) -> Shortened | None:
    first_key = re.compile(rb"X" + len(key).to_bytes(4, "little") + re.escape(key.encode()) + rb"(q.|r....)", re.DOTALL)
    put = first_key.search(blob, at - 5)
    if put is None:
        return None
    mark = b"(" + (b"h" if put[1][:1] == b"q" else b"j") + put[1][1:]
    cut = _nth(blob, mark, put.end(), sizes[0])
    tail = _nth_last(blob, mark, cut, sizes[1]) if cut else 0
    if not tail or tail - cut < cut:
        return None  # the part that could be skipped is too small to be worth it
    head_end, tail_start = _entry_start(blob, cut), _entry_start(blob, tail)
    top, memo = unpickle(blob[:head_end] + _HEAD_END, None)
    rest, _ = unpickle(_TAIL_START + blob[tail_start:], memo)
    entries, newest = top["entries"], rest["entries"]
    number = newest[0]["record_id"] - entries[-1]["record_id"] - 1
    between = _SkippedEntries(blob, (cut, tail), _places(memo.copy()))
    if len(entries) != sizes[0] or not between.is_plain(number, newest):
        return None
    states = [{"completed"}, {"scheduled", "started"}]
    shared = next((kinds for kinds in states if between.count("state", *kinds) == number), set())
    groups = {entry["process_group"] for entry in newest}
    for entry in entries:
        if entry["state"] not in shared or entry["is_p2p"] is not False or entry["process_group"] not in groups:
            return None
    first = entries[:1] if "completed" in shared else entries  # keep open calls: the rank waits in the oldest of them
    found = Shortened(top | rest | {"entries": [*first, *newest]})
    found.num_left_out = len(entries) - len(first) + number
    return found


@dataclass(frozen=True, slots=True)
class _SkippedEntries:
    """The part of a dump that is not unpickled. `places`: memo indices of strings and pairs of strings."""

    blob: bytes
    part: tuple[int, int]
    places: Mapping[Any, list[int]]

    def count(self, key: str, *values: Any) -> int:
        """Count the entries in which `key` has one of these values."""
        return sum(self._count(key, get) for value in values for get in _gets(self.places, value))

    def is_plain(self, number: int, newest: list[dict[str, Any]]) -> bool:
        """Return True if the part holds `number` collectives, all of groups that have enough entries in the tail."""
        if self._count("is_p2p", _FALSE) != number:
            return False
        total = 0
        for group in {entry["process_group"] for entry in newest}:
            name, description = group
            count = self.count("process_group", group)
            if count < number:  # the pickle may also build the tuple anew from its two strings
                pairs = product(_gets(self.places, name), _gets(self.places, description))
                count += sum(self._count("process_group", a + b + _TUPLE2) for a, b in pairs)
            if count and sum(entry["process_group"] == group for entry in newest) < MIN_OF_GROUP:
                return False
            total += count
        return total == number

    def _count(self, key: str, value: bytes) -> int:
        return sum(self.blob.count(get + value, *self.part) for get in _gets(self.places, key))


def _places(memo: dict[int, Any]) -> Mapping[Any, list[int]]:
    """Memo indices of each string and each tuple of strings."""
    found: dict[Any, list[int]] = {}
    for place, value in memo.items():
        if type(value) is str or (type(value) is tuple and all(type(part) is str for part in value)):
            found.setdefault(value, []).append(place)
    return found


def _gets(places: Mapping[Any, list[int]], value: Any) -> Iterator[bytes]:
    """The opcodes (BINGET, LONG_BINGET) that fetch a value from the memo."""
    for place in places.get(value, ()):
        yield b"h" + bytes([place]) if place < 256 else b"j" + place.to_bytes(4, "little")


def _nth(blob: bytes, mark: bytes, at: int, number: int) -> int:
    """Offset of the n-th mark at or after `at`; 0 if there are fewer."""
    at -= 1
    for _ in range(number):
        at = blob.find(mark, at + 1)
        if at < 0:
            return 0
    return at


def _nth_last(blob: bytes, mark: bytes, first: int, number: int) -> int:
    """Offset of the n-th mark from the end; 0 if there are fewer after `first`."""
    at = len(blob)
    for _ in range(number):
        at = blob.rfind(mark, first, at)
        if at < 0:
            return 0
    return at


def _entry_start(blob: bytes, mark: int) -> int:
    """Start of the entry that has its first key at a mark. EMPTY_DICT and perhaps an opcode for the memo precede the
    mark."""
    for width, put in ((1, b"}"), (3, b"}q"), (6, b"}r")):
        if blob[mark - width : mark - width + len(put)] == put:
            return mark - width
    raise ValueError("not the start of an entry")
