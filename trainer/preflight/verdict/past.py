"""Earlier preflights of a fleet, kept next to its runs, one file each in FOLDER/.fleet/preflight/.

past = read_past(Path("runs"))
save_readings(readings, Path("runs"))
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from trainer.preflight.verdict.readings import Readings

__all__ = ["read_past", "save_readings"]

MAX_PAST = 50
"""Maximum number of preflights that are read, newest first."""
MAX_BYTES = 64 << 20
"""Files above this size were not written by preflight, and are skipped."""


def read_past(folder: Path) -> list[Readings]:
    """The newest `MAX_PAST` preflights, oldest first; damaged files are left out."""
    found = []
    for path in sorted(_place(folder).glob("*.json"))[-MAX_PAST:]:
        try:
            if path.stat().st_size <= MAX_BYTES:
                found.append(Readings.of_json(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def save_readings(readings: Readings, folder: Path) -> None:
    """Add a preflight's readings. Raises OSError."""
    place = _place(folder)
    place.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    whole = place / f"{name}.json"
    partial = whole.with_suffix(".partial")
    partial.write_text(json.dumps(readings.to_json()), encoding="utf-8")
    partial.rename(whole)


def _place(folder: Path) -> Path:
    return folder / ".fleet" / "preflight"
