"""One line of advice on the terminal of a live run, for `rankscope train` and `rankscope run`.

console.print(advice_line(event))       # ADVICE  what was measured. What to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

__all__ = ["advice_line"]


def advice_line(event: Mapping[str, Any]) -> str:
    """Text of an advice event: what was measured, and what to do. The report names the runbook section."""
    advised, _, _ = str(event.get("next")).partition(" See `rankscope explain ")
    return f"[cyan]ADVICE[/]  {escape(str(event.get('summary')))} {escape(advised)}"
