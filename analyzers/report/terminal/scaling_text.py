"""A scaling report for the terminal.

render(scaling, rich.console.Console())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzers.compare.scaling import Scaling
from probes.tape.redaction.printable import visible

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["render", "sentence"]

_WORK = {
    "strong": "same tokens per step",
    "weak": "same tokens per step and rank",
    "mixed": "tokens per step and per rank differ, compare with care",
}


_LEAST_SHARE = 0.005
_HEADINGS = ("ranks", "mesh", "ms", "tokens/s", "speed-up", "efficiency", "serial", "largest loss")


def render(scaling: Scaling, console: Console) -> None:
    """Print one sentence, and a row for each run."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(visible(sentence(scaling)), style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("run", overflow="ellipsis", no_wrap=True, max_width=18)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("mesh", "largest loss") else "right", no_wrap=True)
    for point in scaling.points:
        mesh = " x ".join(f"{name} {size}" for name, size in point.mesh.items()) or "1"
        efficiency = "base" if point is scaling.points[0] else (
            f"{point.efficiency_ratio:.3f} ({point.low:.2f}-{point.high:.2f})"
        )  # fmt: skip
        lost = max((share for name, share in point.shares.items() if name != "training"), default=0.0)
        table.add_row(
            visible(point.run), str(point.num_ranks), mesh, f"{point.step_ms:.1f}",
            f"{point.tokens_per_s:,.0f}", f"{point.speedup:.2f}", efficiency,
            "" if point.serial_ratio is None else f"{point.serial_ratio:.1%}",
            f"{_short(point.lost_to)} {lost:.0%}" if lost >= _LEAST_SHARE else "",
        )  # fmt: skip
    console.print()
    console.print(table)


def _short(lost_to: str) -> str:
    """Last word of a category's name; the whole name if it has two parts, because neither alone may be true."""
    return lost_to if " or " in lost_to else lost_to.split()[-1]


def sentence(scaling: Scaling) -> str:
    """Compare the largest run with the smallest one in two sentences."""
    base, last = scaling.points[0], scaling.points[-1]
    gain = f"{last.num_ranks / base.num_ranks:g}x the ranks give {last.speedup:.2f}x the tokens/s"
    efficiency = f"efficiency {last.efficiency_ratio:.3f} (95 % interval {last.low:.3f} to {last.high:.3f})"
    lost = f" Most is lost to {last.lost_to}." if last.efficiency_ratio < 1 and last.lost_to else ""
    return f"{scaling.kind.capitalize()} scaling ({_WORK[scaling.kind]}): {gain}, {efficiency}.{lost}"
