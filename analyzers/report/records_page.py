"""`docs/records.md`: who writes each table, column and event, and where it is shown; read from the source.

    python -m analyzers.report.records_page > docs/records.md
    not_shown()                                  # ["steps.column", "event_kind"]: recorded and shown nowhere

A column counts as shown in a module that names it together with its table, in SQL or in code; a kind of event where
`event_kinds` is asked for it. Names that are put together (f"{phase}_wait_ns") count where the module has the parts.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from analyzers.account.time_classes import COMPUTE_PHASES, GAPS
from probes.tape.event_kinds import EVENT_KINDS
from probes.tape.schema import TABLES, Column
from store.ddl import store_columns

__all__ = ["markdown", "not_shown"]

_ROOT = Path(__file__).parents[2]
_WRITERS = {
    "tape": "rank, on its tape", "event": "as an event", "watch": "watch", "reader": "reader of the file",
    "derived": "watch, when it ingests",
}  # fmt: skip
_PLACES = (
    ("dashboard/data/", "pages"), ("dashboard/drawing/", "pages"), ("dashboard/", "pages"),
    ("analyzers/report/chrome_trace/", "export"), ("analyzers/report/terminal/ranks_now", "top"),
    ("analyzers/report/rank_rows", "top"), ("analyzers/report/", "report"), ("analyzers/verdict/", "report"),
    ("analyzers/account/", "account"), ("analyzers/figures/", "figures"), ("analyzers/whatif/", "what-if"),
    ("analyzers/compare/", "compare"), ("analyzers/fleet/", "fleet"), ("analyzers/profiling/", "report"),
    ("analyzers/external/", "analyze of files"), ("analyzers/plugin_calls/", ""),
    ("watch/exporting/metrics/", "metrics"),
    ("watch/exporting/otel/", "OpenTelemetry"), ("watch/exporting/trackers/", "trackers"),
    ("watch/exporting/webhook", "alerts"), ("rankscope/mcp_server/", "mcp"),
)  # fmt: skip
"""Where a module's answers are shown, by the beginning of its path; the first that fits. Empty: it shows nothing."""
_READERS = ("analyzers", "dashboard/views", "dashboard/data", "dashboard/drawing", "watch/exporting", "rankscope")
_BY_SQL = {
    "nccl_calls": {
        "nccl_seq": "tells a call of NCCL's own log", "root": "of broadcast and reduce",
        "channels_stopped": "state of a call in flight",
    },
    "nccl_communicators": {"comm_rank": "key", "event_mask": "asked for by the plugin", "created_ns": "key"},
    "nccl_groups": {"created_ns": "key"},
    "log_events": {"attempt": "key"},
    "nccl_channels": {"start_ns": "by the host's clock"},
    "nccl_links": {"start_ns": "begin of the window", "progress_ns": "state of an operation in flight",
                   "op_num_steps": "state of an operation in flight"},
}  # fmt: skip
"""Columns that only SQL reads, and what they are for: keys, and details of what is shown."""
_EVENTS_PAGE = "page events"
"""Shows every kind with its meaning and all its fields."""
_TOLD_ONLY = ("peer_copy", "verdict_refused", "records_retired", "budget_exceeded")
"""Kinds with a size or a duration that say what the telemetry did: the page of events is their place."""
_NAMES_OF_PARTS = frozenset((*COMPUTE_PHASES, *GAPS))
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Module:
    """Words of a module's code and texts, without its docstrings, and the patterns of names that it puts together."""

    place: str
    words: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def names(self, word: str) -> bool:
        """Return True if the word stands in the module, whole or put together from parts that stand there."""
        return word in self.words or any(
            (match := pattern.fullmatch(word)) is not None
            and all(part in self.words or part in _NAMES_OF_PARTS for part in match.groups())
            for pattern in self.patterns
        )


def place_of(path: str) -> str:
    """Surface on which what the module reads is shown."""
    parts = path.split("/")
    if path in ("dashboard/views/sql.py", "rankscope/commands/sql.py", "analyzers/report/records_page.py"):
        return ""  # their queries are examples; this module only lists
    if path.startswith("dashboard/views/"):
        return f"page {parts[2].removesuffix('.py')}"
    if path.startswith("rankscope/commands/"):
        return f"`{parts[2].removesuffix('.py').replace('_', '-')}`"
    for start, place in _PLACES:
        if path.startswith(start):
            return place
    return f"findings ({parts[1]})" if parts[0] == "analyzers" and len(parts) > 2 else ""


@cache
def modules() -> tuple[Module, ...]:
    """All modules that show something."""
    found = []
    for folder in _READERS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            place = place_of(path.relative_to(_ROOT).as_posix())
            if place:
                found.append(_module(ast.parse(path.read_text(encoding="utf-8")), place))
    return tuple(found)


def _module(tree: ast.Module, place: str) -> Module:
    words, patterns = set[str](), list[re.Pattern[str]]()
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.update(_WORD.findall(node.value))
        elif isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, (ast.Attribute, ast.keyword)):
            words.add(node.attr if isinstance(node, ast.Attribute) else node.arg or "")
        elif isinstance(node, ast.JoinedStr):
            patterns += _patterns(node)
    return Module(place, frozenset(words), tuple(patterns))


def _patterns(text: ast.JoinedStr) -> Iterator[re.Pattern[str]]:
    """Names with a part that is filled in: of f"{phase}_wait_ns" the pattern (\\w+)_wait_ns."""
    joined = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in text.values)
    for name in re.findall(r"[\w\0]*\w\0[\w\0]*|[\w\0]*\0\w[\w\0]*", joined):
        if name.count("\0") == 1 and "_" in name:
            yield re.compile(name.replace("\0", r"(\w+?)"))


def shown(table: str, column: str) -> list[str]:
    """Surfaces of a column."""
    return sorted({one.place for one in modules() if one.names(table) and one.names(column)})


def shown_event(kind: str) -> list[str]:
    """Surfaces of a kind of event, besides the page that shows all."""
    return sorted({one.place for one in modules() if kind.upper() in one.words or kind in one.words} - {_EVENTS_PAGE})


def not_shown() -> list[str]:
    """Columns that nothing shows, and kinds of events with a measured number that only the page of events shows."""
    columns = [
        f"{table.name}.{column.name}"
        for table in TABLES.values()
        for column in store_columns(table)
        if not shown(table.name, column.name) and column.name not in _BY_SQL.get(table.name, {})
    ]
    measured = [
        name for name, kind in EVENT_KINDS.items() if any(map(_is_measured, kind.fields)) and name not in _TOLD_ONLY
    ]
    return columns + [name for name in measured if not shown_event(name)]


def _is_measured(column: Column) -> bool:
    """Return True for a duration, a size or a share: what people plot, other than counts, names and times."""
    return column.unit in ("s", "By", "nats") or column.name.endswith(("_s", "_ms", "_bytes", "_ratio"))


def markdown() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for table in TABLES.values():
        written = _WRITERS[table.source] + (f" `{table.event_kind}`" if table.event_kind else "")
        yield f"\n## {table.name}\n\nWritten by: {written}.\n\n| column | shown in |\n|---|---|"
        rows: dict[str, list[str]] = {}
        for column in store_columns(table):
            places = _listed(shown(table.name, column.name))
            why = _BY_SQL.get(table.name, {}).get(column.name)
            rows.setdefault(places or f"`rankscope sql` only: {why}", []).append(f"`{column.name}`")
        yield from (f"| {', '.join(names)} | {places} |" for places, names in rows.items())
    yield "\n## Kinds of events\n\n| kind | written by | shown in |\n|---|---|---|"
    for kind in EVENT_KINDS.values():
        places = _listed([_EVENTS_PAGE, *shown_event(kind.name)])
        yield f"| `{kind.name}` | {kind.written_by} | {places} |"


def _listed(places: Sequence[str]) -> str:
    """The places in a line, with the folders of findings and the pages in one bracket each."""
    parts = [place for place in places if not place.startswith(("findings (", "page "))]
    for name in ("findings", "page"):
        if own := [place.removeprefix(f"{name} ").strip("()") for place in places if place.startswith(f"{name} ")]:
            parts.append(f"{name} ({', '.join(own)})")
    return ", ".join(parts)


_HEAD = """# Where each record is shown

Generated by `python -m analyzers.report.records_page > docs/records.md` from the source: who writes the tables of a run
([schema](schema.md)) and its events, and which part of the product reads each column and kind. "page (NAME)": of
the dashboard; "pages": several of them; "account": goodput and the times of steps, in report, pages and metrics;
"figures": charts of pages and HTML reports; "findings (FOLDER)": `analyzers/FOLDER`. Every kind of event is on the
page of events with its meaning and fields."""


if __name__ == "__main__":
    sys.stdout.write(markdown())
