"""Sections of the runbook by anchor, from docs/runbook.md or its copy in the wheel.

    section("straggler-compute").title       # "Slow in compute"
    advice_text("straggler-compute")         # Markdown of that section, its title in bold; "" if there is none
    nearest("stragler-compute")              # ["straggler-compute", ...]

A section is a heading with an anchor, a chapter (`## Hangs`, anchor `hangs`), or a table row with an anchor.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunbookSection", "advice_text", "anchor_of", "anchors", "explain_command", "nearest", "section", "sections"]

_PLACES = (Path(__file__).parents[2] / "docs" / "runbook.md", Path(__file__).with_name("runbook.md"))
_HEADING = re.compile(r'^(#{2,4}) (?:<a id="([a-z0-9_-]+)"></a>)?(.*)$', re.MULTILINE)
_ROW = re.compile(r'^\| <a id="([a-z0-9_-]+)"></a>\*\*(.+?)\*\*(.*)$')
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")
_CELLS = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunbookSection:
    """One section; `text` is Markdown without the title, `chapter` the title of the chapter around it."""

    anchor: str
    title: str
    chapter: str
    text: str


@functools.cache
def sections() -> dict[str, RunbookSection]:
    """All sections by anchor, in the order of the runbook."""
    text = next((path.read_text(encoding="utf-8") for path in _PLACES if path.is_file()), "")
    heads = list(_HEADING.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    found: dict[str, RunbookSection] = {}
    chapter = ""
    for head, end in zip(heads, ends, strict=True):
        title = head[3].strip()
        anchor = head[2] or (_slug(title) if head[1] == "##" else "")
        if head[1] == "##":
            chapter = title
        body = _LINK.sub(r"\1", text[head.end() : end].strip())  # links to other pages would lead nowhere in a terminal
        if anchor:
            found[anchor] = RunbookSection(anchor=anchor, title=title, chapter=chapter, text=_without_anchors(body))
        for row in _rows(body, chapter):
            found.setdefault(row.anchor, row)
    return found


def section(anchor: str) -> RunbookSection | None:
    """The section of an anchor; None if the runbook has no such section."""
    return sections().get(anchor)


def advice_text(anchor: str) -> str:
    """Markdown of the section, its title in bold; empty if the runbook has no such section."""
    found = section(anchor)
    return f"**{found.title}**\n\n{found.text}" if found is not None else ""


def anchors() -> list[str]:
    """Anchors of all sections."""
    return list(sections())


def anchor_of(text: str) -> str:
    """Extract the anchor from what a user pasted: bare, with `#`, a path, a kind, or a whole sentence of a report."""
    words = text.rpartition("#")[2].replace("rankscope explain", "").strip("`.,;:()\"' \t\r\n")
    last = words.split()[-1].strip("`.,;:()\"'") if words.split() else ""
    known = sections()
    variants = (last, last.lower(), last.lower().replace("_", "-"))
    return next((variant for variant in variants if variant in known), last)


def nearest(anchor: str) -> list[str]:
    """Anchors that resemble a misspelled one, the best first."""
    wanted = anchor.lower()
    close = difflib.get_close_matches(wanted, anchors(), n=5, cutoff=0.6)
    return close or [known for known in anchors() if wanted and wanted in known][:5]


def explain_command(anchor: str) -> str:
    """The command that prints the section; reports name it where they refer to the runbook."""
    return f"rankscope explain {anchor}"


def _slug(title: str) -> str:
    """The anchor that Markdown renderers give a heading."""
    return re.sub(r"[^a-z0-9_-]", "", title.lower().replace(" ", "-"))


def _without_anchors(body: str) -> str:
    return re.sub(r'<a id="[a-z0-9_-]+"></a>', "", body)


def _rows(body: str, chapter: str) -> list[RunbookSection]:
    """Rows of a table that have an anchor. Each cell is introduced by its column's heading."""
    found, heading = [], [""]
    for line in body.splitlines():
        if line.startswith("|") and not _ROW.match(line):
            cells = [cell.strip() for cell in _CELLS.split(line)[1:-1]]
            if not all(set(cell) <= set("-: ") for cell in cells) and heading == [""]:
                heading = cells
        elif row := _ROW.match(line):
            _, *cells = [cell.strip().replace("\\|", "|") for cell in _CELLS.split(line)[1:-1]]
            parts = [f"{name.capitalize()}: {cell}" for name, cell in zip(heading[1:], cells, strict=False)]
            found.append(RunbookSection(anchor=row[1], title=row[2], chapter=chapter, text="\n\n".join(parts)))
        else:
            heading = [""]
    return found
