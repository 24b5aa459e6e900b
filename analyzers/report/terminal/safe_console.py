"""A rich console that escapes control characters in everything it prints.

    SafeConsole(stderr=True).print(f"{run.path}: {error}")

Names and texts of a run, a log or a trace may hold escape sequences. Everything that a console prints goes through one
method, which makes these characters visible here. What rich itself sends (colours, the cursor of a progress bar) is not
affected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from probes.tape.redaction.printable import visible_lines

__all__ = ["SafeConsole", "with_bound_units", "without_bound_units"]

_BOUND = "\ue000"
"""Stands for a space at which no line may break; rich would break lines even at a no-break space."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|(?:[nµum]?s|min|h|[kMGT]|[kKMGT]?i?B|ranks?|steps?|tokens)(?:/s)?\b))")

_PADDING = re.compile(r" +(?=\n)")
"""Trailing spaces up to the assumed width, which a narrower terminal would show as empty lines."""


def with_bound_units(text: str) -> str:
    """The text with `_BOUND` for each space between a number and its unit, so that no line breaks there; its length
    stays the same."""
    return _BEFORE_UNIT.sub(_BOUND, text)


def without_bound_units(text: str) -> str:
    """Undo `with_bound_units` after the lines were broken."""
    return text.replace(_BOUND, " ")


class SafeConsole(Console):
    """Console of all commands."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Keep a number and its unit on one line."""
        if isinstance(renderable, Text) and _BEFORE_UNIT.search(renderable.plain):
            renderable = renderable.copy()
            renderable.plain = with_bound_units(renderable.plain)
        return super().render(renderable, options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        text = super()._render_buffer(
            segment
            if segment.control or segment.text == "\r"  # print this line now, because the next line replaces it
            else Segment(visible_lines(without_bound_units(segment.text)), segment.style)
            for segment in buffer
        )
        return text if self.is_terminal else _PADDING.sub("", text)
