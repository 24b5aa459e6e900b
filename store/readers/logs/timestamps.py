"""Parse timestamps of log lines to epoch nanoseconds: ISO 8601, glog, syslog, `dmesg -T`, Slurm, epoch seconds, and
trainers' formats.

    found = Clock(year=2026).read("[2026-03-01 08:30:00,123] ...")
    found.wall_ns, found.length        # and the length of the timestamp

A time without a zone is taken as UTC, because only the order of lines and the time between them matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache

__all__ = ["Clock", "Stamp"]

_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name: i + 1 for i, name in enumerate(_NAMES)}
_FRACTION = r"(?:[.,](?P<fraction>\d{1,9}))?"
_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d{2}):(?P<second>\d{2})"
_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"\[?(?P<year>20\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _,]{_CLOCK}{_FRACTION}"
        r"(?P<zone>Z|[+-]\d\d:?\d\d)?\]?",
        rf"\[?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<name>[A-Z][a-z]{{2}}) +(?P<day>\d{{1,2}}) {_CLOCK} "
        r"(?P<year>20\d\d)\]?",
        rf"(?P<name>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<day>\d{{1,2}}) {_CLOCK}",
        rf"\[?[EWIF](?P<year>20\d\d)(?P<month>\d\d)(?P<day>\d\d) {_CLOCK}{_FRACTION}",
        rf"\[?[EWIF](?P<month>\d{{1,2}}?)(?P<day>\d\d) {_CLOCK}{_FRACTION}",
        rf"\[?(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>20\d\d|\d\d) {_CLOCK}\]?",
        rf"\[?(?P<month>\d\d)-(?P<day>\d\d) {_CLOCK}{_FRACTION}\]?",
        r"(?P<epoch_s>1[5-9]\d{8})\.(?P<fraction>\d{3,9})(?= )",
    )
)


@dataclass(frozen=True, slots=True)
class Stamp:
    """A time at the start of a text, and the length of its text."""

    wall_ns: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Parses times. `year` is used for forms without a year."""

    year: int
    years: set[int | None] = field(default_factory=set)
    """Years in the times read so far; contains None if some had no year."""

    def read(self, text: str) -> Stamp | None:
        """Parse the time at the start of the text."""
        if not text or text[0] not in "[0123456789EWIFJMSONDATF":
            return None
        for form in _FORMS:
            match = form.match(text)
            if match:
                wall_ns = self._wall_ns(match)
                if wall_ns is not None:
                    return Stamp(wall_ns, match.end())
        return None

    def _wall_ns(self, match: re.Match[str]) -> int | None:
        parts = match.groupdict()
        if epoch_s := parts.get("epoch_s"):
            return int(epoch_s + parts["fraction"].ljust(9, "0"))
        stated = parts.get("year")
        self.years.add(int(stated) % 100 + 2000 if stated else None)
        month = parts.get("name") or parts.get("month") or ""
        second = _second(stated or str(self.year), month, parts["day"], parts["hour"], parts["minute"],
                         parts["second"], parts.get("zone") or "")  # fmt: skip
        fraction = (parts.get("fraction") or "").ljust(9, "0")[:9]
        return None if second is None else second * 10**9 + int(fraction)


@lru_cache(maxsize=1024)
def _second(year: str, month: str, day: str, hour: str, minute: str, second: str, zone: str) -> int | None:
    """Epoch seconds; None for an invalid date. Cached, since consecutive lines often have the same second."""
    try:
        moment = datetime(
            int(year) + (2000 if int(year) < 100 else 0), _MONTHS.get(month) or int(month),
            int(day), int(hour), int(minute), int(second), tzinfo=_zone(zone),
        )  # fmt: skip
    except ValueError:
        return None
    return int(moment.timestamp())


def _zone(text: str) -> timezone:
    if len(text) < 5:
        return UTC
    minutes = int(text[1:3]) * 60 + int(text[-2:])
    return timezone(timedelta(minutes=-minutes if text[0] == "-" else minutes))
