"""Judge a job from its logs and from files of other programs: log lines, printed steps, GPU readings, stacks.

    judged = judge_lines(files, progress)
    judged.findings["log"], judged.facts["logs"]["outcome"]

1. Logs, NCCL RAS output, plug-ins and other programs' files become rows of one store (`store.readers.job.job_rows`).
2. Lines are judged by `log_findings`, printed steps by the analyses of recorded runs (`printed_steps`), readings and
   stacks by the analyses of devices and of hangs (`program_records`).
3. How the job ended is stated as far as its lines show (`outcome`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from analyzers.evidence.idle_processes import with_empty_files, with_idle_process
from analyzers.evidence.judged import Judged
from analyzers.evidence.kernel_warnings import kernel_warnings
from analyzers.evidence.log_findings import analyze
from analyzers.evidence.outcome import earlier_ends, ended_text, lost_at, num_steps, outcome_of, printed_losses
from analyzers.evidence.printed_steps import THROUGHPUT, can_be_judged, printed_step_findings
from analyzers.evidence.program_records import device_findings, stack_findings
from analyzers.finding import Finding
from analyzers.logs.log_events import LogBook
from analyzers.logs.policy import LogPolicy
from analyzers.numerics.loss.printed_values import nonfinite_evaluations
from analyzers.policy import SHARED
from probes.tape.event_kinds import TRAINING_BEGAN
from store.readers.job.job_files import JobFiles
from store.readers.job.job_rows import Progress, read_lines
from store.readers.logs.log_file import ReadLog
from store.readers.memory_store import MemoryStore
from store.readers.programs.rows import EVALUATION

__all__ = ["judge_lines"]

_NOTHING_READ = "Nothing was judged: no line or row was read from the files."
_NOT_CHECKED = "The steps were not checked: they have no loss, no gradient norm and too few durations."


def judge_lines(files: JobFiles, progress: Progress) -> Judged:
    """Findings by source (`log`, `steps`, `health`, `stacks`), for each source that has rows."""
    read = read_lines(files, progress)
    drop_elapsed(read.steps)
    with MemoryStore() as store:
        store.add("log_events", read.events)
        store.add("steps", read.steps)
        if read.health:
            store.add("health", read.health)
        book = LogBook.load(store)
        found = analyze(store)
        if starts := [{"kind": TRAINING_BEGAN, "rank": row["rank"], "step": row["step"]}
                      for row in read.steps if row.get("begins")]:  # fmt: skip
            store.add("events", starts)
        found += printed_step_findings(store, found, read.steps)
        if not any(one.kind == "non_finite" for one in found):
            has_losses = any(row.get("loss") is not None for row in read.steps)
            found += nonfinite_evaluations([*book.of(EVALUATION)], has_losses=has_losses)
        found += [_hangs_not_checked(log) for log in read.logs if log.unjudged]
        found = with_empty_files(with_idle_process(found, book, read.logs), files)
        findings: dict[str, list[Finding]] = {"health": device_findings(store)} if read.health else {}
    if read.stacks:
        findings["stacks"] = stack_findings(read.stacks)
    outcome = outcome_of(book, read.logs, read.steps)
    if all(one.status not in ("fired", "suspect") for one in found):
        found += kernel_warnings(book, is_finished=outcome.ended == "finished")
    if _has_lines_alone(files) and not outcome.is_known and all(one.status == "advice" for one in found):
        reason = outcome.text if read.num_lines else _NOTHING_READ
        findings["log"] = [*found, Finding.insufficient("logs", "rank_lost", reason)]
    elif found or can_be_judged(read.steps) or outcome.is_known:
        findings["log"] = found
    elif read.steps:
        findings["steps"] = [Finding.insufficient("spike", "loss_spike", _NOT_CHECKED)]
    printed = sorted({*book.seen, *(rank for log in read.logs for rank in log.printed)})
    losses = printed_losses(sorted(read.steps, key=lambda row: row["step"]))
    facts: Mapping[str, Any] = {
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "loss_lost_at_step": lost_at(read.steps),
        "num_ranks": book.world_size or len(printed) or None,
        "steps": num_steps(read.steps),
        "ended": ended_text(book, found, outcome.ended),
        "logs": {
            "files": len(files.by_format["log"]),
            "lines": read.num_lines,
            "bytes": sum(log.num_bytes for log in read.logs),
            "known_lines": len(read.events),
            "ranks_that_printed": printed[:1000],
            "printed_losses": len(losses),
            "finished": outcome.ended == "finished",
            "outcome": outcome.text if outcome.is_known else "",
            "earlier_ends": earlier_ends(book),
        },
    }
    return Judged(findings=findings, facts=facts)


def _has_lines_alone(files: JobFiles) -> bool:
    """Return True if only text logs, or only lines that a plug-in read, can show how the job ended. Files of other
    programs that contain only the values of steps are disregarded, because they do not show it.
    """
    formats = [one for one in files.formats if one != "program" or not files.programs.has_only_steps]
    return formats in (["log"], ["plugin"]) and not any(rows.has_records for rows in files.plugin_rows)


def _hangs_not_checked(log: ReadLog) -> Finding:
    what = "Hangs were not fully checked" if log.is_compared else "Hangs were not checked"
    return Finding.not_judged("hang", "hang", what, log.unjudged, in_part=log.is_compared)


def drop_elapsed(steps: Sequence[dict[str, Any]]) -> None:
    """Replace durations that are elapsed time by other durations that the rank printed. `Time: 29.5 sec` may be the
    duration of a step or the time since the start. The time since the start grows from line to line as time passes.
    """
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in steps:
        if row.get("duration_ns") and row.get("other_durations") and not row.get("is_of_bar"):
            by_rank.setdefault(row["rank"], []).append(row)
    for rows in by_rank.values():
        if len(rows) >= SHARED.many_values and _is_clock(rows):
            for row in rows:
                clock_ns = row["duration_ns"]
                row.update(row.pop("other_durations"))
                if row["start_ns"] is not None:
                    row["start_ns"] += clock_ns - (row["duration_ns"] or 0)


def _is_clock(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the durations grow from row to row by the time that passed between the lines. If lines have no
    times, nearly every duration must be longer than the one before, and the last a multiple of the first.
    """
    values: list[int] = [row["duration_ns"] for row in rows]
    ends: list[int | None] = [None if row["start_ns"] is None else row["start_ns"] + row["duration_ns"] for row in rows]
    grown = [after - before for before, after in pairwise(values)]
    passed = [after - before for before, after in pairwise(ends) if before is not None and after is not None]
    needed = THROUGHPUT.agreement_ratio * len(grown)
    if len(passed) < len(grown):  # some lines have no time
        return values[-1] >= SHARED.clear_factor * values[0] and sum(growth > 0 for growth in grown) >= needed
    resolution_ns = LogPolicy().same_second_s * 1e9
    num_equal = sum(
        0 < growth and abs(growth - time) <= SHARED.equal_ratio * time + resolution_ns
        for growth, time in zip(grown, passed, strict=True)
    )
    return num_equal >= needed and sum(growth for growth in grown if growth > 0) > SHARED.explained_ratio * sum(passed)
