"""Record coverage: missing ranks, and missing tables or columns that leave checks undecided.

    findings = record_coverage(store, Scope())          # kind records, status insufficient_data

A check without a finding means something only where its input was recorded. The analyses report what they lack
themselves; this reports what is missing without an analysis that would notice, a column of NULLs included.
"""

from __future__ import annotations

from functools import partial

from analyzers.analysis import Analysis
from analyzers.finding import Finding
from analyzers.run.elsewhere import ranks_not_here
from analyzers.run.not_recorded import missing, not_recorded
from analyzers.run.unsynced import unsynced_records
from analyzers.run.unwatched import unwatched_times
from analyzers.scope import Scope
from analyzers.source import Source, lacking, missing_tables
from analyzers.wording import ranks_text, sentence
from probes.tape import event_kinds

__all__ = ["ANALYSES", "record_coverage"]

_READ_COLUMNS = {
    "steps": (
        ("forward_ns", "backward_ns", "optimizer_ns", "collective_wait_ns", "loss", "grad_norm", "tokens"),
        "Phases, waits, spikes or throughput are judged in part or not at all",
    ),
    "collectives": (("seq", "phase"), "Calls are not matched over ranks, or not kept apart from those of saves"),
    "ranks": (("world_size", "host"), "The expected ranks or their hosts are unknown"),
    "spans": (("kind",), "The activity of a rank within a step is unknown"),
    "fingerprints": (("replica_group", "tensor", "hash"), "Replicas are not compared"),
    "events": (("kind", "detail", "wall_ns"), "Events between the steps are unknown"),
    "health": (("node",), "The host of a reading is unknown"),
}
"""Columns that several analyses read, and the consequence where one holds nothing but NULL."""


def record_coverage(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `records`; none where all ranks of each attempt have written steps and spans to the disk."""
    findings = unsynced_records(source)
    if missing_tables(source, "steps", "ranks"):
        return findings  # the tables are reported by the analyses that need them
    for attempt, world_size, present in source.rows(
        """
        SELECT attempt, max(world_size), (SELECT list(DISTINCT s.rank) FROM steps s WHERE s.attempt = r.attempt)
        FROM ranks r WHERE rank >= 0 GROUP BY attempt ORDER BY attempt
        """
    ):
        recorded = {int(rank) for rank in present or ()}
        silent = [rank for rank in range(world_size or 0) if rank not in recorded]
        # An attempt without any step died before the first one: its end is reported by `deaths`.
        if recorded and silent:
            if not_here := sorted(ranks_not_here(source, attempt)):
                findings.append(_not_here(attempt, not_here, world_size))
            if silent := sorted({*silent}.difference(not_here)):
                findings.append(_silent(attempt, silent, world_size))
    findings += [
        _insufficient(f"{consequence}: {not_recorded(absent)}.", evidence=missing(absent))
        for table, (columns, consequence) in _READ_COLUMNS.items()
        if not missing_tables(source, table) and (absent := lacking(source, **{table: columns}))
    ]
    if missing_tables(source, "spans"):
        findings.append(_insufficient("Pipelines and activity within a phase are unknown: no spans were recorded."))
    return findings + unwatched_times(source, scope)


def _not_here(attempt: int, ranks: list[int], world_size: int) -> Finding:
    return _insufficient(
        f"There are no records of {ranks_text(ranks)} in this folder ({len(ranks)} of {world_size} ranks in attempt "
        f"{attempt}): analyze the folders of all nodes together, or the published address.",
        ranks=tuple(ranks),
        attempt=attempt,
    )


def _silent(attempt: int, ranks: list[int], world_size: int) -> Finding:
    which = f"{sentence(ranks_text(ranks))[:-1]} {'has' if len(ranks) == 1 else 'have'}"
    return _insufficient(
        f"{which} no step in attempt {attempt} ({len(ranks)} of {world_size} ranks): nothing is known about "
        f"{'it' if len(ranks) == 1 else 'them'}.",
        ranks=tuple(ranks),
        attempt=attempt,
    )


def live_failures(source: Source, scope: Scope) -> list[Finding]:
    """One finding for each analysis and plug-in that failed while the run lived: `watch` did not judge it then."""
    if not source.has("events"):
        return []
    rows = source.rows(
        "SELECT DISTINCT json_extract_string(detail, '$.analyzer'), json_extract_string(detail, '$.reason') "
        "FROM events WHERE kind = ? ORDER BY ALL LIMIT 20",
        [event_kinds.ANALYZER_FAILED],
    )
    return [
        _insufficient(
            f"While the run was live, {analyzer} failed: {sentence(reason)}",
            evidence={"analyzer": analyzer, "error": reason},
        )
        for analyzer, reason in rows
    ]


_insufficient = partial(Finding.insufficient, "coverage", "records")


def unjudged(source: Source, scope: Scope) -> list[Finding]:
    """Records that are missing, and analyses that failed while the run was live."""
    return [*record_coverage(source, scope), *live_failures(source, scope)]


ANALYSES = (Analysis(kinds=("records",), run=unjudged, records="sampled"),)
