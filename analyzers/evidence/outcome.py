"""Classify the end of a log that names no cause (finished, still running when the log was cut, ended without a stated
reason), and list the ends of earlier attempts.

outcome = outcome_of(book, logs, steps)
outcome.ended, outcome.text       # "finished", "The job finished: ..."
earlier_ends(book)                # [{"cause": "preempted", "host": "n1", "line": "slurm-1.log:30"}, ...]
ended_text(book, findings, "finished")    # "finished, after 2 earlier attempts: preempted (n1), node_failed (n3)"
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analyzers.deaths.logged.logged_schedulers import host_of, limited_by
from analyzers.finding import Finding
from analyzers.logs.exceptions import is_uncaught, relevance, type_of
from analyzers.logs.log_events import ATTEMPT, SAME_END_LINES, SAME_END_NS, LogBook, LogLine
from analyzers.policy import SHARED
from store.readers.logs.log_file import ReadLog
from store.readers.logs.prefix import clean
from store.readers.programs.sacct import wall_ns_of

__all__ = ["Outcome", "earlier_ends", "ended_text", "is_at_end", "lost_at", "num_steps", "outcome_of", "printed_losses"]

END_LINES = 15
_STARTS = ("started", "started_again")
_FAILURE = re.compile(
    r"fail|error|abort|kill|timed? ?out|cannot|can't|could not|unable|denied|refused|no such|not found|lost|died|"
    r"dead\b|lack|invalid|mismatch|exceed|unexpected|no heartbeat|not respond|stopping|missing",
    re.IGNORECASE,
)
"""Common words for a failure: a line with one is quoted, but nothing is concluded from it."""
_HARMLESS = re.compile(
    r"\b(?:no|0|zero|without)(?: \w+){0,2} (?:error|failure)s?\b|.*\b(?:skipp|ignor|retry|warn|fall(?:ing)? ?back).*",
    re.IGNORECASE,
)
"""Parts of lines that deny a failure, or after which programs continue."""
_DONE = re.compile(r"(?:^|[\])] | - |[a-z]\.[a-z]\w*: )Done[.!]?$")
"""A last line that is only "Done", possibly after a prefix of Python's logging."""
NEAR_END_LINES = 12
"""If at most this many lines (warnings, an evaluation) follow the line of the last step, the file ends in training. The
limit is twice the usual distance between the lines of steps, if that is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`is_known`: the end is known, as far as a log can tell."""

    ended: str
    text: str
    is_known: bool


def outcome_of(book: LogBook, logs: Sequence[ReadLog], steps: Sequence[Mapping[str, Any]]) -> Outcome:
    """The job's end, with the line that shows it."""
    entry = next((one for one in book.of("finished", "process_finished") if not _trained_later(one)), None)
    extent, seen = _extent(steps), _failure_seen(book)
    if entry is not None:
        killed = next(
            (one for one, _ in book.of_role("death") if one.source == entry.source and one.line > entry.line), None
        )
        after = f"After that, a process was ended ({killed.quoted})." if killed else seen
        return Outcome(ended="finished", text=f"The job finished ({entry.quoted}). {extent}{after}", is_known=True)
    if (step := is_at_end(steps)) and not _trains_on(logs):
        return Outcome(ended="finished", text=f"The job reached its last step, {step} of {step}. {extent}{seen}",
                       is_known=True)  # fmt: skip
    if steps and (done := _last_done(logs)):
        text = f"The job finished, by its last line ({done}). {extent}{seen}"
        return Outcome(ended="finished", text=text, is_known=True)
    num_lines = sum(log.num_lines for log in logs)
    if not steps:
        return Outcome(
            ended="not in the logs",
            text=f"{_no_line_names(num_lines)} a cause or a training step. {_last_words(logs)}Add the other "
            "ranks' logs, the launcher's, and each host's `dmesg -T`.",
            is_known=False,
        )
    if not logs:
        are_values = any(row.get("loss") is not None or row.get("grad_norm") is not None for row in steps)
        are_times = any(row.get("duration_ns") for row in steps)
        judged = seen if are_values else "Only the durations were judged: no loss or gradient norm is in these files."
        text = f"{extent}{judged} These files do not record how the job ended."
        return Outcome(ended="not recorded", text=text, is_known=are_values or are_times)
    if any(_ends_in_training(log) for log in logs):
        words = _last_words(logs, are_after_steps=True).rstrip()
        return Outcome(
            ended="still running, or ended without a log line",
            text=f"The log ends in training: {extent}{words or seen} Either the job was still running when the log was "
            "cut, or it ended without a line in these files.",
            is_known=False,
        )
    return Outcome(
        ended="without a reason in the logs",
        text=f"{extent}The lines after the last step name no cause. {_last_words(logs)}Add the other ranks' "
        "logs, the launcher's, and each host's `dmesg -T`.",
        is_known=False,
    )


def _failure_seen(book: LogBook) -> str:
    """Sentence on programs that failed before another program in the same file began to train."""
    failed = _failed_before(book)
    if not failed:
        return "No failure seen."
    num = "One" if len(failed) == 1 else f"{len(failed)}"
    return f"{num} of several programs in the file failed ({'; '.join(one.quoted for one in failed[:3])})."


def _failed_before(book: LogBook) -> list[LogLine]:
    """Errors of programs after which another one began to train in the same file."""
    return [entry for entry in book.of("exception") if entry.number("begins_again") and is_uncaught(entry)
            and relevance(entry, book) == "survived"]  # fmt: skip


def _trained_later(entry: LogLine) -> bool:
    """Return True if another training (fold, stage, trial) followed in the same file."""
    return (entry.number("later_losses") or 0) >= SHARED.min_times


def _trains_on(logs: Sequence[ReadLog]) -> bool:
    """Return True if a log ends within another training, because the progress bar of that training is not full."""
    last = [log.steps[-1].step_line for log in logs if log.steps]
    return any(line.bar is not None and line.loss is not None and line.bar.step < line.bar.total for line in last)


def _last_done(logs: Sequence[ReadLog]) -> str:
    """Quote the last line of a log with steps, if it only says that the program is done."""
    for log in logs:
        text = clean(log.tail.rstrip().rsplit(b"\n", 1)[-1]).strip() if log.steps else ""
        if _DONE.search(text):
            return f'{log.path.name}:{log.num_lines}: "{text[-80:]}"'
    return ""


def _no_line_names(num_lines: int) -> str:
    return "The only line does not name" if num_lines == 1 else f"None of {num_lines:,} lines names"


def _ends_in_training(log: ReadLog) -> bool:
    """Return True if only few lines follow the line of the last step (`NEAR_END_LINES`)."""
    usual = (log.last_step_line - log.first_step_line) / max(1, len(log.steps) - 1)
    return log.last_step_line > 0 and log.num_lines - log.last_step_line <= max(NEAR_END_LINES, 2 * usual)


def _last_words(logs: Sequence[ReadLog], *, are_after_steps: bool = False) -> str:
    """Quote the first of a file's last lines that mentions a failure: `rank0.log ends with "No heartbeat ...". `

    `are_after_steps`: only lines after the last step.
    """
    for log in logs:
        num = min(END_LINES, log.num_lines - log.last_step_line) if are_after_steps else END_LINES
        for line in log.tail.rstrip(b"\n").split(b"\n")[-num:] if num else ():
            text = clean(line).strip()
            if _FAILURE.search(_HARMLESS.sub("", text)) and log.num_lines:
                return f'{log.path.name} ends with "{text[:160].rstrip(". ")}". '
    return ""


def is_at_end(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """The last printed step if it is the last planned one, else None."""
    last = max(steps, key=lambda row: row["step"], default=None)
    total = last.get("total") if last else None
    return int(total) if last is not None and total and total > 1 and last["step"] >= total else None


def num_steps(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Number of the last printed step; if lines have no step number, the number of lines."""
    if any(not row.get("is_counted") for row in steps):
        return max(row["step"] for row in steps if not row.get("is_counted")) or None
    return len({row["step"] for row in steps}) or None


def printed_losses(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """The finite losses of printed steps, in the order of `steps`."""
    return [row["loss"] for row in steps if row.get("loss") is not None and math.isfinite(row["loss"])]


def lost_at(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """First step from which no printed loss is finite; None if the last one is, or if lines have no step number."""
    found = None
    for row in sorted(steps, key=lambda row: row["step"], reverse=True):
        if row.get("loss") is None or row.get("is_counted"):
            continue
        if math.isfinite(row["loss"]):
            break
        found = row["step"]
    return found


def _extent(steps: Sequence[Mapping[str, Any]]) -> str:
    """`400 printed steps to step 400, the loss fell from 6.9 to 5.7. `"""
    if not steps:
        return ""
    rows = sorted(steps, key=lambda row: row["step"])
    losses = printed_losses(rows)
    num = len({row["step"] for row in rows})
    loss = ""
    if len(losses) > 1:
        part = max(1, len(losses) // 10)
        end = sorted(losses[-part:])[part // 2]
        of = f" (median of the last {part})" if part > 1 else ""
        loss = f", the loss {'fell' if end < losses[0] else 'went'} from {losses[0]:.4g} to {end:.4g}{of}"
    if all(row.get("is_counted") for row in rows):
        return f"{num:,} printed line{'s' * (num != 1)} of a step{loss}. "
    name = "step" if rows[-1].get("of_step") in (None, rows[-1]["step"]) else "iteration"
    return f"{num} printed {name}{'s' * (num != 1)} to {name} {rows[-1]['step']}{loss}. "


def earlier_ends(book: LogBook) -> list[dict[str, str | None]]:
    """One entry for each attempt after which the job started again. The cause is the one that the scheduler or launcher
    reports, else the last error before the next start.
    """
    found: list[dict[str, str | None]] = []
    last: tuple[str, str, int] | None = None
    times: dict[str, list[int]] = {}
    """{cause: times of reported ends}. Each process of an attempt may have a file that reports the same end."""
    of_attempts: set[tuple[str, str]] = set()
    earlier = sorted(book.earlier, key=lambda entry: (entry.source, entry.line))
    starts = [entry for entry in book.lines if entry.kind in _STARTS]
    errors = _last_errors(sorted([*earlier, *starts], key=lambda entry: (entry.source, entry.line)))
    for entry in earlier:
        cause, host = limited_by(entry) or errors.get((entry.source, entry.line), ""), host_of(entry) or None
        if not cause:
            continue
        is_same = last is not None and last[:2] == (entry.source, cause) and entry.line - last[2] <= SAME_END_LINES
        if (wall_ns := entry.wall_ns or wall_ns_of(entry.text("at"))) is not None:
            known = times.setdefault(cause, [])
            is_same = any(abs(wall_ns - one) <= SAME_END_NS for one in known) or (is_same and not known)
            known.append(wall_ns)
        if attempt := ATTEMPT.match(entry.source):
            is_same = (attempt[0], cause) in of_attempts
            of_attempts.add((attempt[0], cause))
        last = (entry.source, cause, entry.line)
        if not is_same:
            found.append({"cause": cause, "host": host, "line": entry.place})
        elif found[-1]["host"] is None:
            found[-1]["host"] = host
    return found


def _last_errors(lines: Sequence[LogLine]) -> dict[tuple[str, int], str]:
    """{(source, line) of an error: its type}, for each attempt that an error ended: no scheduler reports its end, and
    no step follows the error."""
    found: dict[tuple[str, int], str] = {}
    error: LogLine | None = None
    for place, entry in enumerate(lines):
        if entry.kind == "exception" and entry.text("traceback") and not entry.number("is_warning"):
            error = entry
        elif limited_by(entry):
            error = None
        following = lines[place + 1] if place + 1 < len(lines) else None
        is_end = following is None or following.source != entry.source or following.kind in _STARTS
        if not is_end:
            continue
        after = following.number("after_step") if following is not None and following.source == entry.source else None
        if error is not None and after in (None, error.number("after_step")):
            found[error.source, error.line] = error.text("type").rpartition(".")[2]
        error = None
    return found


def _stated_end(book: LogBook) -> str:
    """How the job ended according to its scheduler or launcher: "cancelled by Slurm at 2026-11-24T13:40:22 (node
    failure)"."""
    cancelled = next((entry for entry in book.of("slurm_cancelled") if entry.text("at")), None)
    if cancelled is not None:
        reason = f" ({cancelled.text('reason').strip().lower()})" if cancelled.text("reason") else ""
        return f"cancelled by Slurm at {cancelled.text('at')}{reason}"
    failed = next((entry for entry in book.of("root_failure") if entry.text("time")), None)
    if failed is None:
        return ""
    code = failed.number("exitcode")
    how = f"exit code {code}" if code is not None else "failed"
    return f"{how} at {failed.text('time').replace('_', ' ')}, according to the launcher"


def ended_text(book: LogBook, findings: Sequence[Finding], ended: str) -> str:
    """Text on how the last attempt ended, as far as the logs show, and on the ends of earlier attempts."""
    is_dead = any(one.kind in ("rank_lost", "hang") for one in findings)
    is_dead |= ended != "finished" and any(
        relevance(entry, book) != "survived" for entry, _ in book.of_role("exception", "death")
    )
    text = (_stated_end(book) or "not in the logs") if is_dead else ended
    if is_dead and (failed := _failed_before(book)):
        programs = ", ".join(f"{type_of(entry)} at {entry.place}" for entry in failed[:3])
        num = "another program" if len(failed) == 1 else f"{len(failed)} other programs"
        text = f"{text}; {num} in the same file failed earlier: {programs}"
    before = earlier_ends(book)
    if not before:
        return text
    causes = ", ".join(f"{end['cause']}{f' ({host})' if (host := end['host']) else ''}" for end in before)
    attempts = "an earlier attempt" if len(before) == 1 else f"{len(before)} earlier attempts"
    return f"{text}, after {attempts}: {causes}"
