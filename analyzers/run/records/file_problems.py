"""Files of a run that could not be read completely."""

from __future__ import annotations

from analyzers.source import Source

__all__ = ["file_problems"]


def file_problems(source: Source) -> list[dict[str, str]]:
    """Each file's path in the run's folder, and why."""
    if not source.has("ingest_problems"):
        return []
    rows = source.rows("SELECT path, problem FROM ingest_problems ORDER BY path")
    return [{"path": str(path), "problem": str(problem)} for path, problem in rows]
