"""Name the process that another waits for, if its log ends with one line repeated.

    found = with_idle_process(found, book, logs)

A wait that names neither its call nor a rank cannot be compared over ranks. If the log of a second process of the same
job reports no wait and no error, and ends with one line repeated, that process was alive but did not join the call: a
suspicion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from analyzers.causes import anchor
from analyzers.finding import Finding
from analyzers.logs.log_events import LogBook
from analyzers.policy import SHARED
from store.readers.logs.log_file import ReadLog
from store.readers.logs.prefix import clean

__all__ = ["with_idle_process"]

_NUMBERS = re.compile(r"\d+")
_WAITS = ("gloo_timeout", "call_timeout")
"""Waits that print no number of their call."""
_TIME = re.compile(r"^\W*\d{2,4}[-/:]\d\d[-/:]\d\d[T ]?[\d:.,]*\S*\s*")
_ENDS = ("exception", "victim", "death", "root", "hang", "nccl")
_MAX_TEXT = 100


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
    doubt = " Suspected: the logs do not prove it."
    summary = (
        f'{first.summary.removesuffix(doubt).rstrip(".")}; {name} reports no wait and ends with "{text}", repeated.'
    )
    evidence = {**first.evidence, "do": f"Find out why the process of {name} did not come to this call: read its end."}
    named = replace(
        first,
        cause="not_entered",
        summary=summary + doubt,
        evidence=evidence,
        advice=anchor("hang", "not_entered"),
    )
    return [named if one is first else one for one in found]


def _repeated(log: ReadLog) -> str:
    """The line with which a log ends several times, without its time; empty if the last lines differ."""
    lines = [clean(line).strip() for line in log.tail.split(b"\n") if line.strip()][-SHARED.min_times :]
    forms = {_NUMBERS.sub("#", line) for line in lines}
    if len(lines) < SHARED.min_times or len(forms) > 1 or log.last_step_line > log.num_lines - len(lines):
        return ""
    return _TIME.sub("", lines[-1])[-_MAX_TEXT:]
