"""Proofs about where time goes: communication, data, pipelines, all ranks together, saves, the whole account."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from analyzers.account.exposure import measure
from analyzers.account.goodput import measure as account_of
from analyzers.account.wait_split import pipelines
from analyzers.checkpoints.analyze import SAVED
from analyzers.communication.bandwidth import call_classes
from analyzers.figures import bars, collectives, exposed, goodput, queries, saves, schedule, stacked
from analyzers.figures import focus as against
from analyzers.figures.rank_values import attempt_of
from analyzers.figures.theme import CATEGORY, PHASE
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.pipeline.pipeline_bubble import load_pipeline
from analyzers.report.html.pipeline_section import schedule_of_step
from analyzers.source import Source, floats, ints, lacking, missing_tables
from analyzers.stragglers.throughput import step_times

__all__ = ["bandwidth", "buckets", "communication", "data", "old_save", "saved", "shared", "stages", "waterfall"]

MAX_STEPS = 2_000
MAX_CLASSES = 16


def communication(source: Source, finding: Finding) -> Iterator[Drawing]:
    """What of a step is communication that nothing hides, and the bandwidth of all calls."""
    attempt = attempt_of(source, finding)
    needed = {"collectives": ("wait_ns", "issue_ns", "end_ns"), "steps": ("duration_ns",)}
    if attempt is None or lacking(source, **needed):
        return
    measured = measure(source, attempt)
    steps, place = np.unique(measured.step, return_inverse=True)
    if len(steps) > 1:
        num = np.bincount(place)
        late = np.maximum(0.0, measured.exposed_ms - measured.transfer_ms)
        parts = [np.bincount(place, weights=w) / num for w in (measured.transfer_ms, late, measured.overlapped_ms)]
        yield Drawing(title="Communication of a step, exposed and hidden", figure=exposed.draw(steps, *parts))
    calls = queries.collectives(source)
    if len(calls["op"]):
        yield Drawing(title="Bandwidth of all calls", figure=collectives.draw(calls))


def bandwidth(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The bus bandwidth of the slow group's calls beside the best that was seen, the largest messages first."""
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
        yield Drawing(title="Bandwidth beside the best of the run", figure=figure)


def buckets(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The transfer of each size of the operation beside what its bytes take at the best bandwidth that was seen."""
    attempt = attempt_of(source, finding)
    if attempt is None or missing_tables(source, "collectives"):
        return
    classes = [one for one in call_classes(source, attempt) if not finding.cause or one.op == finding.cause]
    shown = sorted(classes, key=lambda one: -one.num_calls)[:MAX_CLASSES]
    if not shown:
        return
    best = max(one.bus_gb_per_s for one in call_classes(source, attempt))
    values: dict[str, float] = {}
    for one in sorted(shown, key=lambda one: -one.num_bytes):
        values[f"{one.text}, measured"] = one.transfer_ms
        values[f"{one.text}, its bytes alone"] = one.bus_bytes / best / 1e6
    accused = {name for name in values if name.endswith("measured")}
    figure = bars.draw(values, accused=accused, x="transfer of a call (ms)", unit="ms")
    yield Drawing(title="Time of a call beside the time that its bytes need", figure=figure)


def data(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Waiting for data a step beside the whole step, the median rank, with the onset."""
    attempt = attempt_of(source, finding)
    if attempt is None or lacking(source, steps=("duration_ns", "data_ns")):
        return
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE attempt = ?", [attempt])
    whose = f" AND rank IN ({', '.join(str(int(rank)) for rank in finding.ranks)})" if finding.ranks else ""
    table = source.query(
        f"""
        SELECT step, median(coalesce(data_ns, 0) - coalesce(data_wait_ns, 0)) / 1e6 AS data,
               median(duration_ns) / 1e6 AS whole
        FROM steps WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND (step - ?) % ? = 0{whose}
        GROUP BY step ORDER BY step
        """,
        [attempt, first or 0, max(1, -(-((last or 0) - (first or 0) + 1) // MAX_STEPS))],
    )
    own, whole = floats(table["data"]), floats(table["whole"])
    if len(own) < 2:
        return
    parts = [("waiting for data", own, CATEGORY["data"]), ("rest of the step", whole - own, PHASE["recv"])]
    figure = stacked.draw(ints(table["step"]), parts, y="ms a step, median rank", onset=finding.first_step)
    yield Drawing(title="Waiting for data in each step", figure=figure)


def shared(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The time that all ranks need for a step, by what it goes to, with the onset."""
    times = step_times(source, attempt_of(source, finding))
    if times is None or len(times.step) < 2:
        return
    keep = np.arange(0, len(times.step), max(1, -(-len(times.step) // MAX_STEPS)))
    parts = [
        (name, values[keep], colour)
        for name, values, colour in (
            ("compute", times.compute, CATEGORY["training"]), ("communication", times.communication,
             CATEGORY["communication"]), ("data", times.data, CATEGORY["data"]),
        )
    ]  # fmt: skip
    figure = stacked.draw(times.step[keep], parts, y="ms a step, median rank", onset=finding.first_step)
    yield Drawing(title="What a step takes, without waiting for late ranks", figure=figure)


def stages(source: Source, finding: Finding) -> Iterator[Drawing]:
    """A pipeline's own work a stage, its idle share, and one of its steps as it ran."""
    if missing_tables(source, "ranks", "spans"):
        return
    found = [ranks for number, ranks in pipelines(source) if number == finding.attempt]
    if not found:
        return
    members = next((of for of in found if set(of) & set(finding.ranks)), found[0])
    pipeline = load_pipeline(source, finding.attempt or 0, members)
    if pipeline is None:
        return
    steps = pipeline.steps
    names = {rank: f"rank {rank} (coordinate {place})" for place, rank in enumerate(members)}
    busy = {rank: float(np.median([step.ranks[rank].busy_ns for step in steps])) / 1e6 for rank in members}
    if finding.kind == "stage_imbalance":
        others = [ms for rank, ms in busy.items() if rank not in finding.ranks]
        figure = bars.draw(
            {names[rank]: ms for rank, ms in busy.items()}, accused={names[r] for r in members if r in finding.ranks},
            x="own work of a step (ms, median)", unit="ms", usual=float(np.median(others)) if others else None,
        )  # fmt: skip
        yield Drawing(title="Own work of each coordinate of the pipeline", figure=figure)
    else:
        idle = {names[r]: float(np.median([step.ranks[r].idle_ratio for step in steps])) for r in members}
        figure = schedule.idle(idle, expected=finding.evidence.get("idle_expected_ratio"))
        yield Drawing(title="Idle share of each rank of the pipeline", figure=figure)
    typical = steps[int(np.argsort([step.total_ns for step in steps])[len(steps) // 2])].step
    attempt = finding.attempt or 0
    pieces = schedule_of_step(source, attempt, typical, members)
    if len(pieces["stage"]):
        yield Drawing(title=f"Step {typical} as it ran", figure=schedule.draw(pieces))


def saved(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Each save: how long it took and for how long training stood still."""
    if missing_tables(source, "checkpoints"):
        return
    table = source.query(
        """
        SELECT step, tier, max(duration_ns) / 1e6 AS duration_ms, max(stall_ns) / 1e6 AS stall_ms,
               CASE WHEN bool_or(state = 'failed') THEN 'failed' WHEN bool_or(state = 'delayed') THEN 'delayed'
                    ELSE 'saved' END AS state
        FROM checkpoints WHERE step IS NOT NULL AND state NOT IN ('loaded', 'removed') AND tier IN ('disk', 'memory')
        GROUP BY attempt, step, tier ORDER BY step DESC LIMIT 4000
        """
    )
    if len(table["step"]):
        yield Drawing(title="Saves over the steps", figure=saves.draw(table))


def old_save(source: Source, finding: Finding) -> Iterator[Drawing]:
    """How many steps a failure would have cost at each step, and the saves themselves."""
    if missing_tables(source, "checkpoints", "steps"):
        return
    good = sorted(
        int(step)
        for (step,) in source.rows(
            f"SELECT DISTINCT step FROM checkpoints WHERE tier = 'disk' AND state IN {SAVED} AND step IS NOT NULL AND "
            "(attempt, step) NOT IN (SELECT (attempt, step) FROM checkpoints WHERE tier = 'disk' AND "
            "state IN ('condemned', 'failed') AND step IS NOT NULL)"
        )
    )
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE duration_ns IS NOT NULL")
    if first is not None and last > first:
        # Where a line bends: just before and at each save.
        at = np.unique(np.clip([first, last, *good, *(step - 1 for step in good)], first, last))
        place = np.searchsorted(good, at, side="right")
        since = at - np.where(place > 0, np.array([0, *good])[place], 0)
        figure = saves.age(at, since.astype(np.float64), due=finding.evidence.get("interval_steps"))
        against.mark_onset(figure, finding.first_step)
        yield Drawing(title="Steps since the last good save", figure=figure)
    yield from saved(source, finding)


def waterfall(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Where the wall time of the whole run went."""
    account = account_of(source)
    if account is not None and account.wall_s > 0:
        yield Drawing(title="Where the time went", figure=goodput.waterfall(account))
