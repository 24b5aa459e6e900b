"""Formats that other installed packages read, into rows of our tables.

    # pyproject.toml of the package
    [project.entry-points."rankscope.readers"]
    my_format = "my_team.rankscope_reader"

The module has `recognise(first: bytes) -> bool`, which gets the first 64 KiB of a file, and `read(path: Path)`, which
returns rows by table: `log_events`, `steps`, `collectives` and `events`, as mappings from column to value
(docs/schema.md). It is asked about files of no built-in format, or only text. It runs in a process of
its own (`store.plugins`), and each row is checked there and here (`store.readers.plugins.plugin_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.plugins import MAX_REASON_CHARS, PluginError, PluginProcess, plugins
from store.readers.plugins.plugin_rows import MAX_REASONS, READ_TABLES, Rows, checked_row
from store.readers.untrusted.external_files import SourceError, head

__all__ = ["GROUP", "HEAD_BYTES", "PluginRows", "plugin_problems", "read_by_plugin", "reader_of"]

GROUP = "rankscope.readers"
HEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRows:
    """Rows that a plug-in read from one file."""

    plugin: str
    tables: dict[str, Rows] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    """Why rows were refused, each reason once."""

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(map(len, self.tables.values()))

    @property
    def has_records(self) -> bool:
        """Return True if there are rows other than log events."""
        return any(rows for table, rows in self.tables.items() if table != "log_events")


def _readers() -> tuple[PluginProcess, ...]:
    return plugins(GROUP, "store.readers.plugins.plugin_child")


def plugin_problems() -> dict[str, str]:
    """{plug-in: why it cannot be used}."""
    found = {}
    for plugin in _readers():
        try:
            plugin.call("recognise", b"")
        except PluginError as error:
            found[plugin.name] = str(error)
    return found


def reader_of(first: bytes) -> PluginProcess | None:
    """The first plug-in that recognises a file; one that fails does not."""
    for plugin in _readers():
        try:
            if plugin.call("recognise", first):
                return plugin
        except PluginError:  # named by `plugin_problems`; the file may still be read as a text
            continue
    return None


def read_by_plugin(path: Path, name: str) -> PluginRows:
    """Rows of a file; `name` is the file's in the report. Raises SourceError."""
    plugin = reader_of(head(path, HEAD_BYTES))
    if plugin is None:
        raise SourceError("is no longer recognised by any plug-in")
    tables: dict[str, Rows] = {table: [] for table in READ_TABLES}
    refused: list[str] = []
    try:
        for table, row in plugin.call("read", str(path.absolute()), form=_rows):
            if table in tables:
                tables[table].append(row)
            elif len(refused) < MAX_REASONS:
                refused.append(" ".join(str(row).split())[:MAX_REASON_CHARS])
    except PluginError as error:
        raise SourceError(f"plug-in {plugin.name}: {error}") from None
    events = [_event(row, name) for row in tables["log_events"]]
    return PluginRows(plugin=plugin.name, tables={**tables, "log_events": events}, refused=tuple(refused))


def _rows(answer: Any) -> list[tuple[str, Any]]:
    """Rows by table and reasons, as `store.readers.plugins.plugin_child` sends them; raises for others.

    Rows are checked again: a plug-in may have changed the modules that checked them in its process.
    """
    return [(str(table), checked_row(row, table) if table in READ_TABLES else row) for table, row in answer]


def _event(row: dict[str, Any], name: str) -> dict[str, Any]:
    """An event as our rules leave it: rank and step are among the fields too."""
    fields = {key: row[key] for key in ("rank", "step") if row.get(key) is not None}
    return {"message": "", "source": name, **row, "fields": {**fields, **(row.get("fields") or {})}}
