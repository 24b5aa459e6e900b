"""Figures of the cost of communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from analyzers.account.device.exposure import measure
from analyzers.communication.bandwidth import call_classes, call_columns
from analyzers.figures.drawing import bars
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.ranks.rank_values import attempt_of
from analyzers.figures.time import collectives, exposed
from analyzers.finding import Finding
from analyzers.source import Source, lacking, missing_tables

__all__ = ["FIGURES", "bandwidth", "buckets", "exposure"]

MAX_CLASSES = 16


def exposure(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Exposed and overlapped communication of each step, and the bandwidth of all calls."""
    attempt = attempt_of(source, finding)
    needed = {"collectives": ("wait_ns", "issue_ns", "end_ns"), "steps": ("duration_ns",)}
    if attempt is None or lacking(source, **needed):
        return
    steps, parts = measure(source, attempt).by_step()
    if len(steps) > 1:
        yield Drawing(title="Exposed and hidden communication per step", figure=exposed.draw(steps, *parts))
    calls = call_columns(source)
    if len(calls["op"]):
        yield Drawing(title="Bandwidth of all calls", figure=collectives.draw(calls))


def bandwidth(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Bus bandwidth of the calls of the slow and the best group, then of other groups; large messages first."""
    attempt = attempt_of(source, finding)
    if attempt is None or missing_tables(source, "collectives"):
        return
    slow, best = (str(finding.evidence.get(name) or "") for name in ("process_group", "best_process_group"))
    classes = sorted(call_classes(source, attempt), key=lambda one: -one.num_bytes)
    shown = [one for one in classes if one.process_group in (slow, best)][:MAX_CLASSES]
    shown += [one for one in classes if one not in shown][: MAX_CLASSES - len(shown)]
    if len(shown) > 1:
        figure = bars.draw(
            {one.text: one.bus_gb_per_s for one in shown}, x="bus bandwidth (GB/s)", unit="GB/s",
            accused={one.text for one in shown if one.process_group == slow},
            usual=max(one.bus_gb_per_s for one in classes), usual_name="best seen",
        )  # fmt: skip
        yield Drawing(title="Bandwidth compared with the best of the run", figure=figure)


def buckets(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Transfer time of a call for each message size, and the time that its bytes take at the best bandwidth."""
    attempt = attempt_of(source, finding)
    if attempt is None or missing_tables(source, "collectives"):
        return
    all_classes = call_classes(source, attempt)
    classes = [one for one in all_classes if not finding.cause or one.op == finding.cause]
    shown = sorted(classes, key=lambda one: -one.num_calls)[:MAX_CLASSES]
    if not shown:
        return
    best = max(one.bus_gb_per_s for one in all_classes)
    values: dict[str, float] = {}
    for one in sorted(shown, key=lambda one: -one.num_bytes):
        values[f"{one.text}, measured"] = one.transfer_ms
        values[f"{one.text}, transfer only"] = one.bus_bytes / best / 1e6
    accused = {name for name in values if name.endswith("measured")}
    figure = bars.draw(values, accused=accused, x="transfer of a call (ms)", unit="ms")
    yield Drawing(title="Call duration and the time that its bytes need", figure=figure)


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "exposed_communication": (exposure,),
    "low_bandwidth": (bandwidth,),
    "small_buckets": (buckets,),
}
