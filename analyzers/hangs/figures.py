"""Figures of hangs, desynced ranks and silent nodes: wait-for graph, timeline, and the progress of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from analyzers.figures.drawing import focus, series
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.time.moment import moment
from analyzers.finding import Finding, evidence_of
from analyzers.hangs import wait_for_figure
from analyzers.hangs.culprits import find_culprits
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, take_snapshot
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source, lacking
from probes.tape import event_kinds

__all__ = ["FIGURES"]

MAX_BINS = 500
"""Maximum number of time bins."""
MAX_NODES = 12


def wait_graph(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Ranks that wait, and the ranks that they wait for."""
    if finding.attempt is None:
        return
    view = take_snapshot(source, finding.attempt, EventLog.load(source, SNAPSHOT_EVENTS))
    if view.ranks:
        yield Drawing(title="Wait-for graph", figure=wait_for_figure.draw(view, find_culprits(view)))


def progress(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Newest step recorded by each node over time, the silent node first; a line marks where its silence began."""
    if lacking(source, steps=("start_ns",), ranks=("node_rank",)):
        return
    silent = int(evidence_of(finding).get("node_rank", -1))
    attempt = int(evidence_of(finding).get("attempt") or 0)
    rows = source.rows(
        """
        WITH own AS (SELECT rank, arg_max(node_rank, wall_ns) AS node FROM ranks WHERE attempt = ? AND rank >= 0
                     GROUP BY rank),
             seen AS (SELECT node, step, start_ns FROM steps JOIN own USING (rank) WHERE attempt = ?),
             span AS (SELECT min(start_ns) AS zero, greatest(1, (max(start_ns) - min(start_ns)) // ?) AS width
                      FROM seen)
        SELECT node, min(start_ns - zero) / 1e9, max(step), any_value(zero) FROM seen, span
        GROUP BY node, (start_ns - zero) // width ORDER BY 1, 2
        """,
        [attempt, attempt, MAX_BINS],
    )
    if not rows:
        return
    lines: dict[int, tuple[list[float], list[float]]] = {}
    for node, second, step, _ in rows:
        at, steps = lines.setdefault(int(node), ([], []))
        at.append(float(second))
        steps.append(float(step))
    order = sorted(lines, key=lambda node: (node != silent, node))[:MAX_NODES]
    shown = [
        series.Series(name=f"node {node}", x=np.array(lines[node][0]), y=np.array(lines[node][1])) for node in order
    ]
    figure = series.draw(shown, x="seconds", y="newest step of its ranks")
    events = EventLog.load(source, (event_kinds.NODE_SILENT,)).of(event_kinds.NODE_SILENT)
    silence = next((e for e in events if e.integer("node_rank") == silent and e.step == finding.first_step), None)
    if silence is not None:
        silent_from_s = (silence.wall_ns - int(rows[0][3])) / 1e9
        focus.mark_onset(figure, silent_from_s - (silence.number("silent_s") or 0.0))
    yield Drawing(title=f"Progress of each node, node {silent} against the others", figure=figure)


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "hang": (wait_graph, moment),
    "desync": (moment,),
    "node_silent": (progress,),
}
