"""The newest entries of a pickled flight-recorder ring, without building those that say nothing any more.

    top = newest_entries(blob, unpickle)      # the first entry and the newest ones; None: it has to be read whole

Of a ring of 2,000 entries nearly all are complete, and unpickling them is most of the work of a dump (6 ms of 8; 4,096
ranks leave 8 million). A pickle has no index, but it repeats itself: each entry begins with the same key, and keys and
frequent values are references to where they stood first (`BINGET`).

1. The first entries are unpickled, which gives the number of each key and value in the memo.
2. The tail is found by searching for the begin of an entry, and unpickled with that memo.
3. What lies between is counted, not built: the entries there must all be complete, or all be in flight, none of them a
   p2p call, and each of a group that is in the tail too; and there must be as many as the numbers of the entries before
   and behind leave room for.

Of complete calls only the newest matter, of those in flight the oldest too: those of the head. Where anything is
otherwise (one call that never ended among others that did, a coalesced batch, a backend without events, a value
that the tail refers to and the first entries do not have, another pickler's layout) the answer is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

__all__ = ["Memo", "Shortened", "newest_entries"]


class Memo(Protocol):
    """Copy the memo of an unpickler: only another unpickler takes it (that of Python 3.11 takes a dict)."""

    def copy(self) -> dict[int, Any]:
        """By place."""


HEADS = (16, 320)
"""Entries that are built for the memo; the second if the tail refers to more, as to the calls of a whole step."""
TAILS = (32, 400)
"""Newest entries that are built; the second, if a group is too rare among them."""
MIN_OF_GROUP = 4
_BEGIN = re.compile(
    rb"X\x07\0\0\0entries(?:q.|r....)?\](?:q.|r....)?\(\}(?:q.|r....)?\(X(?P<size>[\x01-\x1f])\0\0\0", re.DOTALL
)
_FRESH = b"\x80\x02}(X\x07\0\0\0entries]("
_NO_EVENTS = b"gloo:"
Unpickle = Callable[[bytes, Memo | None], tuple[Any, Memo]]


class Shortened(dict[str, Any]):
    """A dump that lacks `num_left_out` entries, all complete or all in flight."""

    num_left_out = 0


def newest_entries(blob: bytes, unpickle: Unpickle) -> Shortened | None:
    """`unpickle(bytes, memo)` gives the value and the memo; whatever it raises means that the dump is read whole."""
    begin = _BEGIN.search(blob, 0, 1 << 20)
    if begin is None or b"coalesced" in blob or _NO_EVENTS in blob:
        return None
    key = blob[begin.end() : begin.end() + begin["size"][0]].decode("utf-8", "replace")
    for num_head, num_tail in product(HEADS, TAILS):
        try:
            found = _shortened(blob, begin.end(), key, (num_head, num_tail), unpickle)
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
        return None  # hardly anything to leave out
    head_end, tail_begin = _begin_of(blob, cut), _begin_of(blob, tail)
    top, memo = unpickle(blob[:head_end] + b"eu.", None)
    rest, _ = unpickle(_FRESH + blob[tail_begin:], memo)
    entries, newest = top["entries"], rest["entries"]
    number = newest[0]["record_id"] - entries[-1]["record_id"] - 1
    between = _Between(blob, (cut, tail), _places(memo.copy()))
    if len(entries) != sizes[0] or not between.is_plain(number, newest):
        return None
    states = [{"completed"}, {"scheduled", "started"}]
    shared = next((kinds for kinds in states if between.count("state", *kinds) == number), set())
    groups = {entry["process_group"] for entry in newest}
    for entry in entries:
        if entry["state"] not in shared or entry["is_p2p"] is not False or entry["process_group"] not in groups:
            return None
    first = entries[:1] if "completed" in shared else entries  # the oldest that is open is what the rank waits in
    found = Shortened(top | rest | {"entries": [*first, *newest]})
    found.num_left_out = len(entries) - len(first) + number
    return found


@dataclass(frozen=True, slots=True)
class _Between:
    """The part of a dump that is not built. `places`: where texts, and pairs of them, stand in the memo."""

    blob: bytes
    part: tuple[int, int]
    places: Mapping[Any, list[int]]

    def count(self, key: str, *values: Any) -> int:
        """Count the entries whose key has one of these values."""
        return sum(self._count(key, get) for value in values for get in _gets(self.places, value))

    def is_plain(self, number: int, newest: list[dict[str, Any]]) -> bool:
        """Return True if these are `number` collectives of groups that are not rare in the tail."""
        if self._count("is_p2p", b"\x89") != number:
            return False
        of_groups = 0
        for group in {entry["process_group"] for entry in newest}:
            name, description = group
            there = self.count("process_group", group)
            if there < number:  # a pair that is rebuilt each time
                pairs = product(_gets(self.places, name), _gets(self.places, description))
                there += sum(self._count("process_group", a + b + b"\x86") for a, b in pairs)
            if there and sum(entry["process_group"] == group for entry in newest) < MIN_OF_GROUP:
                return False
            of_groups += there
        return of_groups == number

    def _count(self, key: str, value: bytes) -> int:
        return sum(self.blob.count(get + value, *self.part) for get in _gets(self.places, key))


def _places(memo: dict[int, Any]) -> Mapping[Any, list[int]]:
    """Return the memo index of each text, and of each pair of texts."""
    found: dict[Any, list[int]] = {}
    for place, value in memo.items():
        if type(value) is str or (type(value) is tuple and all(type(part) is str for part in value)):
            found.setdefault(value, []).append(place)
    return found


def _gets(places: Mapping[Any, list[int]], value: Any) -> Iterator[bytes]:
    """The operations that fetch a value from the memo."""
    for place in places.get(value, ()):
        yield b"h" + bytes([place]) if place < 256 else b"j" + place.to_bytes(4, "little")


def _nth(blob: bytes, mark: bytes, at: int, number: int) -> int:
    """Return the offset of the n-th mark from a place on; 0 if there are fewer."""
    at -= 1
    for _ in range(number):
        at = blob.find(mark, at + 1)
        if at < 0:
            return 0
    return at


def _nth_last(blob: bytes, mark: bytes, first: int, number: int) -> int:
    """Return the offset of the n-th mark from the end; 0 if there are fewer behind `first`."""
    at = len(blob)
    for _ in range(number):
        at = blob.rfind(mark, first, at)
        if at < 0:
            return 0
    return at


def _begin_of(blob: bytes, mark: int) -> int:
    """The begin of the entry whose keys begin at a mark: the empty dict, and its place in the memo if it has one."""
    for width, put in ((1, b"}"), (3, b"}q"), (6, b"}r")):
        if blob[mark - width : mark - width + len(put)] == put:
            return mark - width
    raise ValueError("not the begin of an entry")
