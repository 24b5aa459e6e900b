"""One line of advice on the terminal of a run that trains, of `rankscope train` and `rankscope run`.

console.print(advice_line(event))       # ADVICE  what is. What to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

__all__ = ["advice_line"]


def advice_line(event: Mapping[str, Any]) -> str:
    """Text of an event of advice: what was measured, and what to do. The runbook's section is in the report."""
    advised, _, _ = str(event.get("next")).partition(" See `rankscope explain ")
    return f"[cyan]ADVICE[/]  {escape(str(event.get('summary')))} {escape(advised)}"
