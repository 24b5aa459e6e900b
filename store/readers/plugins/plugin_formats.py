"""File formats that plug-ins from other installed packages read.

    # pyproject.toml of the package
    [project.entry-points."rankscope.readers"]
    my_format = "my_team.rankscope_reader"

The module has `recognise(first: bytes) -> bool`, which gets the first 64 KiB of a file, and `read(path: Path)`, which
returns rows by table: `log_events`, `steps`, `collectives` and `events`, as mappings from column to value
(docs/schema.md). It is called for files that built-in readers do not recognise, or recognise only as text. It runs in a
child process (`store.plugins`), and each row is checked both there and here (`store.readers.plugins.plugin_rows`).
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
    """Distinct reasons why rows were refused."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all tables."""
        return sum(map(len, self.tables.values()))

    @property
    def has_records(self) -> bool:
        """True if there are rows other than log events."""
        return any(rows for table, rows in self.tables.items() if table != "log_events")


def _readers() -> tuple[PluginProcess, ...]:
    return plugins(GROUP, "store.readers.plugins.plugin_child")


def plugin_problems() -> dict[str, str]:
    """Return {plug-in: why it cannot be used}."""
    found = {}
    for plugin in _readers():
        try:
            plugin.call("recognise", b"")
        except PluginError as error:
            found[plugin.name] = str(error)
    return found


def reader_of(first: bytes) -> PluginProcess | None:
    """First plug-in that recognises a file; plug-ins that fail are skipped."""
    for plugin in _readers():
        try:
            if plugin.call("recognise", first):
                return plugin
        except PluginError:  # `plugin_problems` reports it; the file may still be read as text
            continue
    return None


def read_by_plugin(path: Path, name: str) -> PluginRows:
    """Read a file, called `name` in the report. Raises SourceError."""
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
    """Parse the rows and reasons that `store.readers.plugins.plugin_child` sends. Raises for anything else.

    Rows are checked again, because a plug-in may have altered the modules that check them in its process.
    """
    return [(str(table), checked_row(row, table) if table in READ_TABLES else row) for table, row in answer]


def _event(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Convert a row to a log event. As in events of built-in rules, its `fields` include rank and step."""
    fields = {key: row[key] for key in ("rank", "step") if row.get(key) is not None}
    return {"message": "", "source": name, **row, "fields": {**fields, **(row.get("fields") or {})}}
