"""A folder of runs, which are opened by id.

    folder = RunsFolder(Path("runs"))
    folder.run_ids()                      # newest first
    folder.open("demo-20260101-120000")   # RunError for anything that is not one of them

Ids come from the browser's address bar, so an id is compared with the existing names and never used to build a path.
Links that lead out of the folder are skipped.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from probes.tape.rundir import RunDir, RunError

__all__ = ["MAX_RUNS", "RunsFolder"]

MAX_RUNS = 2_000
"""Maximum number of runs that are listed; the newest are kept."""


class RunsFolder:
    """The runs directly inside one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    def run_ids(self) -> list[str]:
        """Names of the runs, newest first by the start time in their manifests."""
        found: list[tuple[float, str]] = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if entry.is_symlink() or not entry.is_dir() or entry.name.startswith("."):
                        continue  # `latest` is a link to one of the runs
                    path = self.path / entry.name
                    if RunDir.is_run(path):
                        found.append((_began(path), entry.name))
        except OSError:
            return []
        return [name for _, name in sorted(found, reverse=True)[:MAX_RUNS]]

    def newest(self) -> str | None:
        """The run that started last."""
        return next(iter(self.run_ids()), None)

    def resolved(self, run_id: str) -> str | None:
        """Return the id itself if there is such a run, for `latest` the id that it links to, and None otherwise."""
        names = self.run_ids()
        if run_id in names:
            return run_id
        if run_id == "latest":
            target = (self.path / "latest").resolve()
            return target.name if target.parent == self.path and target.name in names else None
        return None

    def open(self, run_id: str) -> RunDir:
        """Open a run. Raises RunError if it does not exist, or was written by a newer Rankscope."""
        name = self.resolved(run_id)
        if name is None:
            raise RunError(f"no run {run_id[:120]!r} in {self.path}: choose one from the list")
        return RunDir.open(self.path / name)


@lru_cache(maxsize=2 * MAX_RUNS)
def _created_s(path: Path, stamp: tuple[int, int]) -> float | None:
    """Start time of a run in its manifest, epoch seconds; read again only if the file has changed."""
    created_ns = RunDir(path).manifest().get("created_wall_ns")
    return created_ns / 1e9 if isinstance(created_ns, int) and created_ns > 0 else None


def _began(path: Path) -> float:
    """Start time of a run in its manifest. If the manifest has none, the modification time of the manifest or folder,
    which is less reliable because each write or copy changes it.
    """
    for name in ("run.json", "tapes", "."):
        try:
            found = (path / name).stat()
        except OSError:
            continue
        created_s = _created_s(path, (found.st_mtime_ns, found.st_size)) if name == "run.json" else None
        return found.st_mtime if created_s is None else created_s
    return 0.0
