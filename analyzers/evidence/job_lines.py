"""Judge what a job's logs, and the programs around it, recorded: lines, printed steps, readings of GPUs, stacks.

    judged = judge_lines(files, progress)
    judged.findings["log"], judged.facts["logs"]["outcome"]

1. All of it becomes rows of one store: text logs, answers of RAS, lines that plug-ins read, files of programs.
2. Lines are judged by `log_findings`, printed steps by the analyses of recorded runs (`printed_steps`), readings and
   stacks by those of devices and of hangs (`program_records`).
3. The end of the job is stated as far as lines show it (`outcome`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analyzers.evidence.job_files import JobFiles
from analyzers.evidence.judged import Judged
from analyzers.evidence.log_findings import analyze
from analyzers.evidence.outcome import earlier_ends, ended_text, num_steps, outcome_of, printed_losses
from analyzers.evidence.printed_steps import can_be_judged, printed_step_findings
from analyzers.evidence.program_records import device_findings, stack_findings
from analyzers.finding import Finding
from analyzers.logs.log_events import LogBook
from store.readers.logs.log_file import ReadLog
from store.readers.logs.rows import log_rows
from store.readers.logs.scan import read_log
from store.readers.memory_store import MemoryStore
from store.readers.ras import read_ras

__all__ = ["Progress", "judge_lines"]

Progress = Callable[[str, int, int], None]
"""Called with the name of what is being read, bytes done, and bytes in total."""
_NOTHING_READ = "Nothing was judged: no line or row was read from the files."
_NOT_CHECKED = "The steps were not checked: they have no loss, no gradient norm and too few durations."

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    logs: Sequence[ReadLog]
    events: Rows
    steps: Rows
    num_plugin_events: int

    @property
    def num_lines(self) -> int:
        return sum(log.num_lines for log in self.logs) + self.num_plugin_events


def judge_lines(files: JobFiles, progress: Progress) -> Judged:
    """Findings by source (`log`, `steps`, `health`, `stacks`), as far as there are rows of each."""
    read = _read(files, progress)
    health, stacks = files.programs.health(), files.programs.stacks()
    with MemoryStore() as store:
        store.add("log_events", read.events)
        store.add("steps", read.steps)
        if health:
            store.add("health", health)
        found = analyze(store)
        found += printed_step_findings(store, found, read.steps)
        found += [_left_open(log) for log in read.logs if log.unjudged]
        book = LogBook.load(store)
        findings: dict[str, list[Finding]] = {"health": device_findings(store)} if health else {}
    if stacks:
        findings["stacks"] = stack_findings(stacks)
    outcome = outcome_of(book, read.logs, read.steps)
    if _has_lines_alone(files) and not outcome.is_known and all(one.status == "advice" for one in found):
        silence = outcome.text if read.num_lines else _NOTHING_READ
        findings["log"] = [*found, Finding.insufficient("logs", "rank_lost", silence)]
    elif found or can_be_judged(read.steps) or outcome.is_known:
        findings["log"] = found
    elif read.steps:
        findings["steps"] = [Finding.insufficient("spike", "loss_spike", _NOT_CHECKED)]
    printed = sorted({*book.seen, *(rank for log in read.logs for rank in log.printed)})
    losses = printed_losses(sorted(read.steps, key=lambda row: row["step"]))
    facts: Mapping[str, Any] = {
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
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
    """Return True for logs of one kind and nothing else that could show how the job went."""
    return files.formats in (["log"], ["plugin"]) and not any(rows.has_records for rows in files.plugin_rows)


def _read(files: JobFiles, progress: Progress) -> _Read:
    """Rows of all these files; what is wrong with a file is listed in `files.problems`."""
    logs: list[ReadLog] = []
    paths = files.by_format["log"]
    total, done = sum(path.stat().st_size for path in paths), 0
    for path in paths:
        progress(files.names[path], done, total)
        log = read_log(
            path,
            progress=lambda num_bytes, path=path, done=done: progress(  # type: ignore[misc]
                files.names[path], done + num_bytes, total
            ),
        )
        done += path.stat().st_size
        logs.append(log)
    logs += [read_ras(path) for path in files.by_format["ras"]]
    for log in logs:
        for problem in ([log.problem] if log.problem else []) + log.given_up:
            files.problems.add_problem(log.path, problem)
    events, steps = log_rows(logs, files.names)
    of_plugins = [row for rows in files.plugin_rows for row in rows.tables["log_events"]]
    return _Read(
        logs=logs,
        events=[*events, *of_plugins, *files.programs.log_events()],
        steps=[*steps, *files.programs.steps(files.problems)],
        num_plugin_events=len(of_plugins),
    )


def _left_open(log: ReadLog) -> Finding:
    what = "Hangs were not fully checked" if log.is_compared else "Hangs were not checked"
    return Finding.not_judged("hang", "hang", what, log.unjudged, in_part=log.is_compared)
