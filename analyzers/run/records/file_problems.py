"""Files of a run that could not be read completely."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from analyzers.source import Source
from store.ingest.tail import CHECKSUM, KEPT

__all__ = ["file_problems", "losses"]


def file_problems(source: Source) -> list[dict[str, str]]:
    """Each file's path in the run's folder, and why."""
    if not source.has("ingest_problems"):
        return []
    rows = source.rows("SELECT path, problem FROM ingest_problems ORDER BY path")
    return [{"path": str(path), "problem": str(problem)} for path, problem in rows]


def losses(problems: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The problems without those of files whose records the store has."""
    found = list(problems)
    kept = {one["path"].removesuffix(CHECKSUM) for one in found if one["problem"].endswith(KEPT)}
    return [one for one in found if one["path"].removesuffix(CHECKSUM) not in kept]
