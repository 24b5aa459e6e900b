"""A rich console that passes no control character of what it prints to the terminal.

    SafeConsole(stderr=True).print(f"{run.path}: {error}")

Names and texts of a run, a log or a trace may hold escape sequences. All that a console prints goes through one method;
here it makes them visible. What rich itself sends (colours, the cursor of a progress bar) is not affected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

from probes.tape.redaction.printable import visible_lines

__all__ = ["SafeConsole"]

_PADDING = re.compile(r" +(?=\n)")
"""Spaces up to the width, which a narrower terminal than the assumed one shows as empty lines."""


class SafeConsole(Console):
    """Console of all commands."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        text = super()._render_buffer(
            segment
            if segment.control or segment.text == "\r"  # alone: the next line takes its place
            else Segment(visible_lines(segment.text), segment.style)
            for segment in buffer
        )
        return text if self.is_terminal else _PADDING.sub("", text)
