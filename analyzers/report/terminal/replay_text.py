"""Print a replayed step in the terminal: the verdict, the origin, its inputs and the worst samples.

    render(replay.found, console, kind="spike", ranks=(2,), figures=lines, loss=5.9, recorded=5.9)

Text of the run is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from analyzers.numerics.replay_result import ReplayResult
from probes.tape.redaction.printable import visible

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MAX_TEXT", "render", "verdict"]

MAX_SAMPLES = 8
MAX_TEXT = 60
SAME_RATIO = 1e-3
"""Maximum relative difference between two losses that rounding can explain, for example after a restart, or with sums
in another order."""


def verdict(found: ReplayResult, *, kind: str, ranks: Sequence[int], loss: float, recorded: float) -> str:
    """Describe the result in one or two sentences. `kind`: how the run judged the step (healthy, non_finite, spike)."""
    if kind != "healthy":
        was = "had NaN or Inf" if kind == "non_finite" else "was a loss spike"
        return f"Step {found.step} {was}. {found.text(ranks)}"
    if not math.isfinite(loss):
        return f"Step {found.step} was healthy. {found.text(ranks)}"
    if not math.isfinite(recorded):
        return f"Step {found.step} was healthy. Its loss is {loss:.6g}, and the run recorded none."
    if abs(loss - recorded) <= SAME_RATIO * abs(recorded):
        return f"Step {found.step} was healthy. Its loss is {loss:.6g}, as in the run ({recorded:.6g})."
    differs = f"Its loss is {loss:.6g} instead of {recorded:.6g}, more than rounding explains"
    return f"Step {found.step} was healthy. {differs}: data, code or a device differs."


def render(
    found: ReplayResult, console: Console, *, kind: str, ranks: Sequence[int], figures: Sequence[tuple[str, str]],
    loss: float, recorded: float, doubts: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print the replay. `figures`: (name, value) lines; `doubts`: why the replay may differ from the run."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(visible(f"Verdict   {verdict(found, kind=kind, ranks=ranks, loss=loss, recorded=recorded)}"),
                       style="bold"))  # fmt: skip
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in figures:
        table.add_row(Text(name, style="dim"), Text(visible(value)))
    if found.origin is not None:
        table.add_row(Text("first", style="dim"), Text(visible(found.origin.text)))
        table.add_row(Text("on ranks", style="dim"), Text(", ".join(map(str, found.origin.ranks[:16]))))
        for number, line in enumerate(found.origin.inputs):
            table.add_row(Text(f"input {number}", style="dim"), Text(visible(line)))
        if found.origin.samples:
            listed = ", ".join(map(str, found.origin.samples[:16]))
            table.add_row(Text("samples", style="dim"), Text(listed + ", ..." * (len(found.origin.samples) > 16)))
    console.print(table)
    if found.samples and found.came_back:
        console.print()
        console.print(Text("Samples with the highest loss", style="bold"))
        rows = Table.grid(padding=(0, 2))
        rows.add_row(*(Text(name, style="dim") for name in ("sample", "data rank", "loss", "file:byte", "text")))
        for sample in found.samples[:MAX_SAMPLES]:
            loss_text = "not finite" if sample.loss is None or not math.isfinite(sample.loss) else f"{sample.loss:.3f}"
            cells = (str(sample.number), str(sample.data_rank), loss_text, sample.place, sample.text[:MAX_TEXT])
            rows.add_row(*(Text(visible(cell)) for cell in cells))
        console.print(rows)
    for doubt in doubts:
        console.print(Text(visible(f"Note      {doubt}"), style="dim"))
