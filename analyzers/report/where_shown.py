"""Find the places that show each column and kind of event, from the source; for `docs/schema.md` and a test.

    shown("steps", "data_ns")                    # ["exporters", "findings", "goodput"]
    not_shown()                                  # ["steps.column", "event_kind"]: recorded and shown nowhere

A column counts as shown in a module that names it together with its table, in SQL or in code; a kind of event where
`event_kinds` is asked for it. Names that are put together (f"{phase}_wait_ns") count where the module has the parts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from analyzers.account.time_classes import COMPUTE_PHASES, GAPS
from probes.tape.event_kinds import EVENT_KINDS
from probes.tape.format.schema import TABLES, Column
from store.ddl import store_columns

__all__ = ["SURFACES", "not_shown", "shown", "shown_event"]

_ROOT = Path(__file__).parents[2]
SURFACES = {
    "findings": "F", "goodput": "G", "pages": "P", "reports": "R", "exporters": "X",
}  # fmt: skip
"""Surfaces, each with its letter in `docs/schema.md`."""
_PLACES = (
    ("dashboard/", "pages"), ("analyzers/account/", "goodput"), ("watch/exporting/", "exporters"),
    ("rankscope/", "reports"),
    *((f"analyzers/{folder}/", "reports") for folder in
      ("report", "verdict", "figures", "whatif", "compare", "fleet", "profiling")),
    ("analyzers/plugin_calls/", ""),
)  # fmt: skip
"""Where a module's answers are shown, by the beginning of its path; the first that fits. Empty: it shows nothing."""
_LISTS_ALL = (
    "dashboard/views/sql.py", "dashboard/views/events.py", "rankscope/commands/sql.py",
    "analyzers/report/where_shown.py", "analyzers/report/schema_page.py",
)  # fmt: skip
"""Modules that name records without showing them (examples of SQL), or that show every kind of event."""
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
    """Surface on which what the module reads is shown; empty: on none."""
    if path in _LISTS_ALL:
        return ""
    for start, place in _PLACES:
        if path.startswith(start):
            return place
    return "findings" if path.startswith("analyzers/") and path.count("/") > 1 else ""


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
    """Surfaces of a kind of event, besides the page of events, which shows all."""
    return sorted({one.place for one in modules() if kind.upper() in one.words or kind in one.words})


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
