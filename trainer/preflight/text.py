"""A preflight on the terminal: a line for each verdict, then a table of the nodes.

    print_report(report, console)

With many nodes, the table shows the outliers and the median of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from analyzers.robust import median_or_nan
from analyzers.wording import number
from probes.tape.redaction.printable import visible
from trainer.preflight.verdict.judge_devices import flops_text
from trainer.preflight.verdict.judge_links import rate_text, seconds_text
from trainer.preflight.verdict.readings import RankReading, Readings
from trainer.preflight.verdict.report import PreflightReport

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_report"]

MAX_NODES = 16
_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
_COLUMNS = ("node", "device", "matrix products", "memory", "sends", "receives", "latency", "clock")


def print_report(report: PreflightReport, console: Console) -> None:
    """Print the report. `console` must be a SafeConsole."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    readings = report.readings
    nodes = readings.nodes()
    console.print(
        f"Preflight of {readings.world_size} rank{'s' * (readings.world_size != 1)} on {len(nodes)} "
        f"node{'s' * (len(nodes) != 1)}, {number(readings.duration_s)} s",
        highlight=False,
    )
    width = max((len(line.check) for line in report.lines), default=0)
    for line in report.lines:
        text = Text(f"{line.status}  ", style=_STYLES[line.status])
        console.print(text.append(f"{line.check:<{width}}  {visible(line.text)}", style=""), soft_wrap=True)
    bad = {node for line in report.lines if line.status != "pass" for node in line.nodes}
    shown = [node for node in nodes if len(nodes) <= MAX_NODES or node in bad][:MAX_NODES]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _COLUMNS[:2] else "right", overflow="fold")
    for node in shown:
        table.add_row(visible(node), *map(visible, _row(nodes[node], readings)))
    if len(shown) < len(nodes):
        table.add_row(f"median of {len(nodes)}", *_row(readings.ranks, readings))
    console.print(table, markup=False)


def _row(ranks: Sequence[RankReading], readings: Readings) -> list[str]:
    """Cells of a table row: medians over the ranks; `-` if not measured."""
    own = {reading.rank for reading in ranks}
    sent = [link.bytes_per_s for link in readings.links if link.source in own]
    received = [link.bytes_per_s for link in readings.links if link.target in own]
    latencies = [link.latency_s for link in readings.links if link.source in own]
    products = [reading.matmul_flops_per_s for reading in ranks if reading.matmul_flops_per_s is not None]
    memory = [reading.memory_bytes_per_s for reading in ranks if reading.memory_bytes_per_s is not None]
    clocks = [reading.clock_offset_ns for reading in ranks if reading.clock_offset_ns is not None]
    return [
        ranks[0].device,
        flops_text(median_or_nan(products)) if products else "-",
        rate_text(median_or_nan(memory)) if memory else "-",
        rate_text(median_or_nan(sent)) if sent else "-",
        rate_text(median_or_nan(received)) if received else "-",
        seconds_text(median_or_nan(latencies)) if latencies else "-",
        f"{median_or_nan(clocks) / 1e6:+,.1f} ms" if clocks else "-",
    ]
