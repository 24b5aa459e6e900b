"""Find where each column and event kind is shown, by parsing the source; for `docs/schema.md` and a test.

    shown("steps", "data_ns")                    # ["exporters", "findings", "goodput"]

A column counts as shown by a module that names both it and its table, in SQL or in code; an event kind by a module that
names it. A name built from parts (f"{phase}_wait_ns") counts if the module also has the parts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from analyzers.account.time_classes import COMPUTE_PHASES, GAPS

__all__ = ["SURFACES", "shown", "shown_event"]

_ROOT = Path(__file__).parents[2]
SURFACES = {
    "findings": "F", "goodput": "G", "pages": "P", "reports": "R", "exporters": "X",
}  # fmt: skip
"""Surfaces, each with its letter in `docs/schema.md`."""
_SURFACE_OF = (
    ("dashboard/", "pages"), ("analyzers/account/", "goodput"), ("watch/exporting/", "exporters"),
    ("rankscope/", "reports"),
    *((f"analyzers/{folder}/", "reports") for folder in
      ("report", "verdict", "figures", "whatif", "compare", "fleet", "profiling")),
    ("analyzers/plugin_calls/", ""),
)  # fmt: skip
"""Surface of a module, by the prefix of its path; the first match counts. Empty: it shows nothing."""
_NOT_COUNTED = (
    "dashboard/views/sql.py", "dashboard/views/events.py", "rankscope/commands/sql.py",
    "analyzers/report/where_shown.py", "analyzers/report/schema_page.py",
)  # fmt: skip
"""Modules that do not count: they name records without showing them (SQL examples), or show every event kind."""
_READERS = ("analyzers", "dashboard/views", "dashboard/data", "dashboard/drawing", "watch/exporting", "rankscope")
_NAMES_OF_PARTS = frozenset((*COMPUTE_PHASES, *GAPS))
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Module:
    """Words in a module's code and strings (without docstrings), and patterns of the names that the module builds from
    parts."""

    surface: str
    words: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def names(self, word: str) -> bool:
        """Return True if the module contains the word, or a pattern that builds it."""
        return word in self.words or any(
            (match := pattern.fullmatch(word)) is not None
            and all(part in self.words or part in _NAMES_OF_PARTS for part in match.groups())
            for pattern in self.patterns
        )


def surface_of(path: str) -> str:
    """Surface that shows what the module reads; empty if none does."""
    if path in _NOT_COUNTED:
        return ""
    for prefix, surface in _SURFACE_OF:
        if path.startswith(prefix):
            return surface
    return "findings" if path.startswith("analyzers/") and path.count("/") > 1 else ""


@cache
def modules() -> tuple[Module, ...]:
    """All modules that show something."""
    found = []
    for folder in _READERS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            surface = surface_of(path.relative_to(_ROOT).as_posix())
            if surface:
                found.append(_module(ast.parse(path.read_text(encoding="utf-8")), surface))
    return tuple(found)


def _module(tree: ast.Module, surface: str) -> Module:
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
    return Module(surface, frozenset(words), tuple(patterns))


def _patterns(text: ast.JoinedStr) -> Iterator[re.Pattern[str]]:
    """Patterns of names with one variable part: (\\w+)_wait_ns for f"{phase}_wait_ns"."""
    joined = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in text.values)
    for name in re.findall(r"[\w\0]*\w\0[\w\0]*|[\w\0]*\0\w[\w\0]*", joined):
        if name.count("\0") == 1 and "_" in name:
            yield re.compile(name.replace("\0", r"(\w+?)"))


def shown(table: str, column: str) -> list[str]:
    """Surfaces that show a column."""
    return sorted({one.surface for one in modules() if one.names(table) and one.names(column)})


def shown_event(kind: str) -> list[str]:
    """Surfaces that show an event kind, besides the events page, which shows all."""
    return sorted({one.surface for one in modules() if kind.upper() in one.words or kind in one.words})
