"""Sections of the runbook by anchor, from docs/runbook.md or its copy in the wheel.

advice_text("straggler-compute")      # Markdown of that section, without its heading; "" if there is none
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

__all__ = ["advice_text", "anchors"]

_PLACES = (Path(__file__).parents[2] / "docs" / "runbook.md", Path(__file__).with_name("runbook.md"))
_HEADING = re.compile(r'^#{2,4} (?:<a id="([a-z0-9_-]+)"></a>)?(.*)$', re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


@functools.cache
def _sections() -> dict[str, str]:
    text = next((path.read_text(encoding="utf-8") for path in _PLACES if path.is_file()), "")
    heads = list(_HEADING.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    found: dict[str, str] = {}
    for head, end in zip(heads, ends, strict=True):
        if head[1]:
            body = _LINK.sub(r"\1", text[head.end() : end].strip())  # links to other pages lead nowhere here
            found[head[1]] = f"**{head[2].strip()}**\n\n{body}"
    return found


def advice_text(anchor: str) -> str:
    """Markdown of the section, its heading in bold; empty if the runbook has no such section."""
    return _sections().get(anchor, "")


def anchors() -> list[str]:
    """Anchors of all sections."""
    return list(_sections())
