"""Formats that other installed packages read, into rows of the tables that logs fill.

    # pyproject.toml of the package
    [project.entry-points."rankscope.readers"]
    my_format = "my_team.rankscope_reader"

The module has `recognise(first: bytes) -> bool`, which gets the first 64 KiB of a file, and `read(path: Path)`, which
returns `{"log_events": rows, "steps": rows}`: mappings from column to value (docs/schema.md). It is asked about files
that are of no format of ours, or no more than text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from probes.tape.schema import TABLES
from store.plugins import Plugin, plugins
from store.readers.external_files import SourceError, head

__all__ = ["GROUP", "HEAD_BYTES", "plugin_problems", "read_by_plugin", "reader_of"]

GROUP = "rankscope.readers"
HEAD_BYTES = 64 << 10
MAX_ROWS = 1_000_000
"""Of one file and table."""
MAX_RANK = 1_000_000
_FILLED = ("log_events", "steps")
_KNOWN = {table: {"rank", *(column.name for column in TABLES[table].columns)} for table in _FILLED}
Rows = list[dict[str, Any]]


def _readers() -> tuple[Plugin, ...]:
    return plugins(GROUP, ("recognise", "read"))


def plugin_problems() -> dict[str, str]:
    """{plug-in: why it could not be loaded}."""
    return {plugin.name: plugin.problem for plugin in _readers() if plugin.module is None}


def reader_of(first: bytes) -> Plugin | None:
    """The first plug-in that recognises a file; one that raises does not."""
    for plugin in _readers():
        if plugin.module is not None:
            try:
                if plugin.module.recognise(first):
                    return plugin
            except Exception:  # code of others: the file may still be read as a text
                continue
    return None


def read_by_plugin(path: Path, name: str) -> tuple[Rows, Rows]:
    """Rows of `log_events` and of `steps`; `name` is the file's in the report. Raises SourceError."""
    plugin = reader_of(head(path, HEAD_BYTES))
    if plugin is None or plugin.module is None:
        raise SourceError("is recognised by no plug-in any more")
    try:
        found = plugin.module.read(path)
        events, steps = (_rows(found.get(table, ()), table) for table in _FILLED)
    except Exception as error:  # code of others: the other files are still read
        raise SourceError(f"plug-in {plugin.name}: {type(error).__name__}: {error}"[:500]) from None
    return [_event(row, name) for row in events], steps


def _event(row: dict[str, Any], name: str) -> dict[str, Any]:
    """An event as our rules leave it: rank and step are among the fields too."""
    fields = {key: row[key] for key in ("rank", "step") if row.get(key) is not None}
    return {"kind": "other", "message": "", "source": name, **row, "fields": {**fields, **(row.get("fields") or {})}}


def _rows(rows: Iterable[Mapping[str, Any]], table: str) -> Rows:
    """Rows of known columns. Raises ValueError for any other."""
    kept = []
    for row in islice(rows, MAX_ROWS):
        if unknown := set(row) - _KNOWN[table]:
            raise ValueError(f"{table} has no column {', '.join(sorted(map(str, unknown)))}")
        rank = row.get("rank")
        if rank is not None and not 0 <= int(rank) < MAX_RANK:
            raise ValueError(f"rank {rank} is out of range")
        kept.append({"attempt": 0, **row})
    return kept
