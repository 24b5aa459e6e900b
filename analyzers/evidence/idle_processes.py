"""Name the process for which others wait, if its log ends with a repeated line, and the ranks whose files are empty.

    found = with_idle_process(found, book, logs)
    found = with_empty_files(found, files)

A wait cannot be compared over ranks if its line names neither the call nor a rank. If the log of exactly one other
process of the job reports no wait and no error, and ends with a repeated line, this process was alive but did not join
the call. It is suspected.

A rank that is named because it printed nothing may have an empty file: its output was lost or went elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from analyzers.causes import anchor
from analyzers.finding import Finding
from analyzers.logs.log_events import LogBook
from analyzers.policy import SHARED
from analyzers.wording import natural, ranks_text, sentence
from store.readers.job.job_files import JobFiles
from store.readers.logs.file_names import local_rank_of_log, rank_of_log
from store.readers.logs.log_file import ReadLog
from store.readers.logs.prefix import clean

__all__ = ["with_empty_files", "with_idle_process"]

_NUMBERS = re.compile(r"\d+")
_WAITS = ("gloo_timeout", "call_timeout", "no_heartbeat")
"""Kinds of timeouts that are printed without the sequence number of the call."""
_TIME = re.compile(r"^\W*\d{2,4}[-/:]\d\d[-/:]\d\d[T ]?[\d:.,]*\S*\s*")
_ENDS = ("exception", "victim", "death", "root", "hang", "nccl")
_MAX_TEXT = 100
_DOUBT = " Suspected: the logs do not prove it."


def with_idle_process(found: Sequence[Finding], book: LogBook, logs: Sequence[ReadLog]) -> list[Finding]:
    """Add the idle process to a suspected wait without a culprit."""
    first = next((one for one in found if one.status == "suspect" and one.cause == "all_entered"), None)
    waiting = {Path(entry.source).name for entry in book.of(*_WAITS)}
    if first is None or first.ranks or not waiting:
        return list(found)
    shapes = {_NUMBERS.sub("#", name) for name in waiting}
    idle = {
        log.path.name: text
        for log in logs
        if log.path.name not in waiting
        and _NUMBERS.sub("#", log.path.name) in shapes
        and not any(event.role in _ENDS for event in log.events)
        and (text := _repeated(log))
    }
    if len(idle) != 1:
        return list(found)
    ((name, text),) = idle.items()
    summary = (
        f'{first.summary.removesuffix(_DOUBT).rstrip(".")}; {name} reports no wait and ends with "{text}", repeated.'
    )
    evidence = {**first.evidence, "do": f"Find out why the process of {name} did not reach this call: read its end."}
    named = replace(
        first,
        cause="not_entered",
        summary=summary + _DOUBT,
        evidence=evidence,
        advice=anchor("hang", "not_entered"),
    )
    return [named if one is first else one for one in found]


def with_empty_files(found: Sequence[Finding], files: JobFiles) -> list[Finding]:
    """Add to each finding which of its ranks have empty files."""
    logs = [*files.by_format["log"], *files.empty]
    folders = {path.parent.parent for path in logs if local_rank_of_log(path) is not None}
    ranks = {path: _rank_of(path, is_one_node=len(folders) < 2) for path in logs}
    printed = {ranks[path] for path in files.by_format["log"]}
    empty = {path: rank for path, rank in ranks.items() if path in files.empty and rank not in (None, *printed)}
    return [_with_empty(one, {files.empty[path]: rank for path, rank in empty.items() if rank in one.ranks})
            for one in found]  # fmt: skip


def _rank_of(path: Path, *, is_one_node: bool) -> int | None:
    rank = rank_of_log(path)
    return local_rank_of_log(path) if rank is None and is_one_node else rank


def _with_empty(finding: Finding, empty: Mapping[str, int | None]) -> Finding:
    names = sorted(empty, key=natural)
    if not names or finding.status not in ("fired", "suspect"):
        return finding
    ranks = ranks_text(sorted({rank for rank in empty.values() if rank is not None}))
    is_one, more = len(names) == 1, f" and {len(names) - 1} more" if len(names) > 1 else ""
    text = f"The file{'' if is_one else 's'} of {ranks} ({names[0]}{more}) {'is' if is_one else 'are'} empty."
    begin = sentence(finding.summary.removesuffix(_DOUBT))
    doubt = _DOUBT if finding.summary.endswith(_DOUBT) else ""
    return replace(finding, summary=f"{begin} {text}{doubt}")


def _repeated(log: ReadLog) -> str:
    """The line that is repeated at the end of a log, without its time; empty if the last lines differ."""
    lines = [clean(line).strip() for line in log.tail.split(b"\n") if line.strip()][-SHARED.min_times :]
    forms = {_NUMBERS.sub("#", line) for line in lines}
    if len(lines) < SHARED.min_times or len(forms) > 1 or log.last_step_line > log.num_lines - len(lines):
        return ""
    return _TIME.sub("", lines[-1])[-_MAX_TEXT:]
