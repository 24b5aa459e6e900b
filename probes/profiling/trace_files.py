"""The traces of one rank on disk: their names, and the budget that removes old ones.

files = TraceFiles(run, attempt=0, rank=3, budget_bytes=256 << 20)
path = files.new_path(40, 44, requested=True)      # traces/attempt-0/rank-00003-steps-40-44-requested.pt.trace.json.gz
files.pack(raw, path)
removed = files.prune()                        # the oldest of the schedule first, then the oldest requested
"""

from __future__ import annotations

import gzip
import shutil
from collections import Counter
from pathlib import Path

from ..tape.rundir import RunDir

__all__ = ["TraceFiles"]

SUFFIX = ".pt.trace.json.gz"
_LEVEL = 4  # of gzip: half the time of the default, a few percent larger


class TraceFiles:
    """A rank removes only its own files, so no two processes race."""

    def __init__(self, run: RunDir, *, attempt: int, rank: int, budget_bytes: int) -> None:
        self._root, self._attempt, self._rank = run.path, attempt, rank
        self._budget_bytes = budget_bytes
        self._num_named: Counter[str] = Counter()

    def new_path(self, first_step: int, last_step: int, *, requested: bool) -> Path:
        """Path of a new trace; its folder is made. Steps that are gone over again have their own traces."""
        folder = self._root / "traces" / f"attempt-{self._attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        kind = "requested" if requested else "scheduled"
        name = f"rank-{self._rank:05d}-steps-{first_step}-{last_step}-{kind}"
        self._num_named[name] += 1
        again = f"-{self._num_named[name]}" if self._num_named[name] > 1 else ""
        return folder / f"{name}{again}{SUFFIX}"

    def pack(self, raw: Path, path: Path) -> int:
        """Compress a trace and remove the raw file; returns the bytes. Raises OSError."""
        fresh = path.with_name(f".{path.name}")
        try:
            with raw.open("rb") as source, gzip.open(fresh, "wb", compresslevel=_LEVEL) as into:
                shutil.copyfileobj(source, into, 1 << 20)
            fresh.replace(path)
        finally:
            raw.unlink(missing_ok=True)
            fresh.unlink(missing_ok=True)
        return path.stat().st_size

    def prune(self) -> list[str]:
        """Remove what the budget has no room for; returns paths relative to the run's folder."""
        found = [
            ("requested" in path.name, path.stat().st_mtime_ns, path, path.stat().st_size)
            for path in (self._root / "traces").glob(f"attempt-*/rank-{self._rank:05d}-*{SUFFIX}")
        ]
        used, removed = sum(size for *_, size in found), []
        for _, _, path, size in sorted(found):
            if used <= self._budget_bytes:
                break
            path.unlink(missing_ok=True)
            used -= size
            removed.append(self.relative(path))
        return removed

    def relative(self, path: Path) -> str:
        """The path in the run's folder."""
        return path.relative_to(self._root).as_posix()
