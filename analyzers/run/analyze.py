"""Record coverage: missing ranks, missing tables or columns, records that are not on the disk, times without `watch`.

    findings = record_coverage(store, Scope())          # kind records, status insufficient_data

"No finding" is only meaningful if the check's input was recorded. Each analysis reports its own missing input; this one
reports missing records that no analysis would notice, including columns that are all NULL.

1. A power cut may lose records that `watch` could not sync. `watch` writes an event only for the first file with each
   kind of error, so more ranks than the named ones may be affected. Symbolic links do not count as records.
2. `watch` reads its host once a second: a gap between two readings, or after the last one, is a time without `watch`. A
   gap counts if ranks of that host began and finished steps in it, over at least `StallPolicy.unwatched_s`. Hosts with
   few readings are left out, because they do not show whether `watch` was running.
"""

from __future__ import annotations

import re
from functools import partial

from analyzers.analysis import Analysis
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.policy import StallPolicy
from analyzers.run.records.elsewhere import ranks_not_here
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.source import Source, lacking, missing_tables
from analyzers.wording import ranks_text, sentence
from probes.tape import event_kinds
from probes.tape.files.safe_open import LINK, NOT_PLAIN

__all__ = ["ANALYSES", "record_coverage", "unsynced_records", "unwatched_times"]

_READ_COLUMNS = (
    ("steps", ("forward_ns", "backward_ns", "optimizer_ns"), "Some or all phases were not compared"),
    ("steps", ("collective_wait_ns",), "Waits in collectives were not judged"),
    ("steps", ("loss", "grad_norm"), "Spikes were not checked, or only in some values"),
    ("steps", ("tokens",), "Tokens per second, MFU and uneven batches are unknown"),
    ("collectives", ("seq", "phase"), "Calls are not matched over ranks, or not separated from those of checkpoints"),
    ("ranks", ("world_size", "host"), "The expected ranks or their hosts are unknown"),
    ("spans", ("kind",), "The activity of a rank within a step is unknown"),
    ("fingerprints", ("replica_group", "tensor", "hash"), "Replicas are not compared"),
    ("events", ("kind", "detail", "wall_ns"), "Events between the steps are unknown"),
    ("health", ("node",), "The host of a reading is unknown"),
)
"""(Table, columns that several analyses read, consequence if a column holds only NULL)."""

_RANK = re.compile(r"^tapes/attempt-\d{1,9}/rank-(\d{1,9})\b")
_NODE = re.compile(r"^tapes(?:/node-| of node )(\d{1,9})\b")

_GAPS = """
    WITH readings AS (
        SELECT node, sample_ns, lead(sample_ns) OVER (PARTITION BY node ORDER BY sample_ns) AS next_ns
        FROM health WHERE device = 'host'
    ), frequent AS (
        SELECT node FROM readings GROUP BY node
        HAVING count(*) >= ? AND median(next_ns - sample_ns) <= ?
    )
    SELECT node, sample_ns, next_ns FROM readings
    WHERE node IN (SELECT node FROM frequent) AND (next_ns IS NULL OR next_ns - sample_ns > ?)
    ORDER BY node, sample_ns
"""
_STEPS = """
    SELECT s.attempt, min(s.step), max(s.step), min(s.start_ns), max(s.start_ns + s.duration_ns)
    FROM steps s WHERE s.start_ns > ? AND s.start_ns + s.duration_ns < ?
    AND (s.attempt, s.rank) IN (SELECT (attempt, rank) FROM ranks WHERE host = ?)
    GROUP BY s.attempt
"""
_NEVER = 1 << 62


def record_coverage(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `records`; none if every rank of each attempt recorded its steps and spans completely."""
    findings = unsynced_records(source)
    if missing_tables(source, "steps", "ranks"):
        return findings  # missing tables are reported by the analyses that need them
    for attempt, world_size, present in source.rows(
        """
        SELECT attempt, max(world_size), (SELECT list(DISTINCT s.rank) FROM steps s WHERE s.attempt = r.attempt)
        FROM ranks r WHERE rank >= 0 GROUP BY attempt ORDER BY attempt
        """
    ):
        recorded = {int(rank) for rank in present or ()}
        silent = [rank for rank in range(world_size or 0) if rank not in recorded]
        # If no rank has recorded a step, the attempt died before its first one, and analyzer `deaths` reports that.
        if recorded and silent:
            if not_here := sorted(ranks_not_here(source, attempt)):
                findings.append(_not_here(attempt, not_here, world_size))
            if silent := sorted({*silent}.difference(not_here)):
                findings.append(_silent(attempt, silent, world_size))
    has_spans = not missing_tables(source, "spans")
    # The phase of collectives may be missing: a loop may make all its calls between its phases.
    unused = {"collectives.phase"} if has_spans else set()
    findings += [
        _insufficient(f"{consequence}: {not_recorded(absent)}.", evidence=missing(absent))
        for table, columns, consequence in _READ_COLUMNS
        if not missing_tables(source, table)
        and (absent := [name for name in lacking(source, **{table: columns}) if name not in unused])
    ]
    if not has_spans:
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


def live_failures(source: Source) -> list[Finding]:
    """One finding for each failure of an analysis or plug-in in the live run: `watch` did not judge its kinds then."""
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
    return [*record_coverage(source, scope), *live_failures(source)]


def unsynced_records(source: Source) -> list[Finding]:
    """At most one finding of kind `records`."""
    events = EventLog.load(source, (event_kinds.HEALTH_FAILED,)).all()
    reasons = [event.text("reason") for event in events if event.text("source") == "tape"]
    reasons = [reason for reason in reasons if LINK not in reason and NOT_PLAIN not in reason]
    if not reasons:
        return []
    ranks = sorted({int(found[1]) for reason in reasons if (found := _RANK.match(reason))})
    nodes = sorted({int(found[1]) for reason in reasons if (found := _NODE.match(reason))})
    named = [*([ranks_text(ranks)] if ranks else []), *(f"node {node}" for node in nodes[:3])]
    which = f", including those of {', '.join(named)}" if named else ""
    return [
        Finding.insufficient(
            "coverage",
            "records",
            f"Watch could not sync records to the disk{which}, so a power cut may lose them: look for disk "
            "errors with `dmesg`, and copy the run's folder to another one.",
            evidence={"reasons": reasons[:10]},
        )
    ]


def unwatched_times(source: Source, scope: Scope, policy: StallPolicy | None = None) -> list[Finding]:
    """One finding of kind `records` for each attempt that had a time without `watch`; it describes the longest one."""
    policy = policy or StallPolicy()
    needed = {"health": ("node", "device", "sample_ns"), "ranks": ("host",)}
    if scope.is_live or missing_tables(source, *needed, "steps") or lacking(source, **needed):
        return []
    gap_ns = int(policy.unwatched_s * 1e9)
    longest: dict[int, tuple[int, str, int, int]] = {}
    for node, begin, end in source.rows(_GAPS, [SHARED.history, int(policy.sign_of_life_s * 1e9), gap_ns]):
        found = source.rows(_STEPS, [begin, end or _NEVER, node])
        for attempt, first, last, from_ns, to_ns in found:
            if to_ns - from_ns > max(gap_ns, longest.get(attempt, (0,))[0]):
                longest[attempt] = (to_ns - from_ns, str(node), first, last)
    return [
        Finding.insufficient(
            "coverage",
            "records",
            f"Nothing watched the ranks on {node} from step {first} to {last} ({length_ns / 1e9:.0f} s): "
            "a rank that hung or stopped then was not reported.",
            attempt=attempt,
        )
        for attempt, (length_ns, node, first, last) in sorted(longest.items())
        if scope.attempt in (None, attempt)
    ]


ANALYSES = (Analysis(kinds=("records",), run=unjudged, records="sampled"),)
