"""The time that is left, as a column of a progress bar: `00:42 left`, since a bare time could be the elapsed one.

Progress(TextColumn("{task.description}"), TimeLeftColumn())
"""

from __future__ import annotations

from rich.progress import Task, TimeRemainingColumn
from rich.text import Text

__all__ = ["TimeLeftColumn"]


class TimeLeftColumn(TimeRemainingColumn):
    """Empty while the time is not known."""

    def __init__(self) -> None:
        super().__init__(compact=True)

    def render(self, task: Task) -> Text:
        """Rich's hook."""
        shown = super().render(task)
        return Text.assemble(shown, " left") if any(sign.isdigit() for sign in shown.plain) else Text()
