"""What is not in the records: ranks that nobody heard of, and tables without which a question stays open.

    findings = analyze(store)          # kind records, status insufficient_data

A finding that is not there means something only where its input was. The analyzers say what they lack themselves;
this says what lacks without an analyzer that would stumble over it, a column of NULLs included.
"""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.source import Source, lacking, missing_tables

__all__ = ["analyze"]

_SHOWN_RANKS = 16
_LOOKED_AT = {
    "steps": (
        ("forward_ns", "backward_ns", "optimizer_ns", "collective_wait_ns", "loss", "grad_norm", "tokens"),
        "phases and waits of a rank, spikes or the throughput are judged in part or not at all",
    ),
    "collectives": (
        ("seq", "phase"),
        "calls are not matched over ranks, or not told from those of saves",
    ),
    "ranks": (("world_size", "host"), "who should be there, or on which host, is not known"),
    "spans": (("kind",), "what a rank did within a step is not known"),
    "fingerprints": (("replica_group", "tensor", "hash"), "replicas are not compared"),
    "events": (("kind", "detail", "wall_ns"), "what happened beside the steps is not known"),
    "health": (("node",), "which host a reading is of is not known"),
}
"""Columns that several analyzers look at, and what stays open where one holds nothing but NULL."""


def analyze(source: Source) -> list[Finding]:
    """Findings of kind `records`; none where all ranks of each attempt have written steps and spans."""
    if missing_tables(source, "steps", "ranks"):
        return []  # said by whoever needs them
    findings = []
    for attempt, world_size, present in source.rows(
        """
        SELECT attempt, max(world_size), (SELECT list(DISTINCT s.rank) FROM steps s WHERE s.attempt = r.attempt)
        FROM ranks r WHERE rank >= 0 GROUP BY attempt ORDER BY attempt
        """
    ):
        heard = {int(rank) for rank in present or ()}
        silent = [rank for rank in range(world_size or 0) if rank not in heard]
        # An attempt of which nobody has a step died before the first: that is told by its end.
        if heard and silent:
            findings.append(_silent(attempt, silent, world_size))
    findings += [
        _insufficient(f"nothing in {', '.join(absent)}: {unknown}")
        for table, (columns, unknown) in _LOOKED_AT.items()
        if not missing_tables(source, table) and (absent := lacking(source, **{table: columns}))
    ]
    if missing_tables(source, "spans"):
        findings.append(
            _insufficient("no spans were recorded: nothing is known of pipelines and of what a rank did within a phase")
        )
    return findings


def _silent(attempt: int, ranks: list[int], world_size: int) -> Finding:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (", ..." if len(ranks) > _SHOWN_RANKS else "")
    which = f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"
    return _insufficient(
        f"{which} no step in attempt {attempt} ({len(ranks)} of {world_size} ranks): nothing is known of them",
        ranks=tuple(ranks),
        attempt=attempt,
    )


def _insufficient(why: str, ranks: tuple[int, ...] = (), attempt: int | None = None) -> Finding:
    return Finding.insufficient("coverage", "records", why, ranks=ranks, attempt=attempt)
