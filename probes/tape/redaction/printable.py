"""Make text from a run safe to show: remove control characters and bidirectional marks."""

from __future__ import annotations

import re

__all__ = ["MAX_TEXT", "escaped", "visible", "visible_lines", "with_code"]

MAX_TEXT = 1_000
"""Maximum characters of one text in Markdown."""
_SPECIAL = re.compile(r"([\\`*_\[\]|<>~&$])|^([#+=-])")
_LIST_NUMBER = re.compile(r"^(\d+)([.)])")
_CODE = re.compile(r"\\`((?:\\_|[\w.=/ -])+)\\`")
"""A setting or command in backticks, in its escaped form."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Terminal colours, which torch writes into messages."""


def visible(text: str) -> str:
    """Remove everything that a terminal would interpret; line ends become spaces."""
    text = _COLOUR.sub("", text) if "\x1b" in text else text
    return _CONTROL.sub("\ufffd", text.replace("\r", " ").replace("\n", " ").replace("\t", " "))


def visible_lines(text: str) -> str:
    """Make a text of several lines printable, keeping its line breaks."""
    return "\n".join(visible(line) for line in text.split("\n"))


def escaped(text: object) -> str:
    """Escape all characters that have a meaning in Markdown or HTML."""
    shown = str(text)
    if len(shown) > MAX_TEXT:
        shown = f"{shown[:MAX_TEXT]} ... ({len(shown):,} characters)"
    return _LIST_NUMBER.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", visible(shown).strip()))


def with_code(markdown: str) -> str:
    """Escaped text, except that names in backticks stay code if they contain no other special character."""
    return _CODE.sub(lambda found: f"`{found[1].replace(chr(92), '')}`", markdown)
