"""Text from a run made safe to show: no control characters, no bidirectional marks."""

from __future__ import annotations

import re

__all__ = ["visible", "visible_lines"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Text from a run without anything that a terminal would obey; line ends become spaces."""
    return _CONTROL.sub("\ufffd", text.replace("\r", " ").replace("\n", " ").replace("\t", " "))


def visible_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(visible(line) for line in text.split("\n"))
