"""Errors without a rule: lines that a program marks as errors, used only if nothing else explains the job's end.

candidates = candidates or unnamed_errors(book)
candidate = with_error_line(candidate, book)      # adds the first error line to an end without a stated reason
"""

from __future__ import annotations

import re
from dataclasses import replace

from analyzers.causes import COLLECT
from analyzers.logs.candidate import Candidate, from_lines
from analyzers.logs.exceptions import relevance, text_of
from analyzers.logs.log_events import LogBook, LogLine
from analyzers.logs.wording import NCCL_PARTS
from analyzers.run.ends.endings import LOST_PEER

__all__ = ["failed_warnings", "unnamed_errors", "with_error_line"]

_CONSEQUENCE = re.compile(
    r"see (?:the )?(?:root cause|log|error|stack ?trace)|closing signal|failed \(exitcode|ChildFailed|shutting down|"
    r"Traceback|^RAW: |force terminated|\babort(?:ing|ed)\b|Caught signal|^-+$|^=+$|^\*+$|"
    r"^[\w.-]+: tasks? [\d,-]+: |terminat|killing|exit(?:ed|s|ing)? (?:with )?(?:code|status|return)",
    re.IGNORECASE,
)
"""Parts of lines about a consequence: another line explains the end."""
_HARMLESS = re.compile(
    r"register \w+ (?:factory|plugin)|already (?:been )?registered|computation placer|TF-TRT|TensorRT|NUMA node|"
    r"ignor(?:ed|ing)|not installed|deprecat|fall(?:ing)? ?back|\d%\||will be (?:skipped|disabled)|disabling|retry|"
    r"git repository|git root|dubious ownership|dependency (?:resolver|conflict)|W&B API|"
    r"^collecting |Lmod has detected|module\(s\) are unknown|ModuleCmd_|module: command not found|^(?:\[[^\]]*\]\s*)+$",
    re.IGNORECASE,
)
"""Parts of error lines after which programs continue. They include progress bars, because every line on stderr may be
marked as an error."""
_BUILD = re.compile(
    r"Error building extension|Error compiling objects|C\+\+ compile error|CompilationError|"
    r"Command '?\[?['\"]?\S*\b(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|nvcc|hipcc|icpx|ninja)\b"
)
"""Messages of exceptions that a failed compiler causes: its own output names the reason."""
_OF_COMPILER = re.compile(
    r"^cannot find -l|No such file or directory|undefined reference|not declared|unsupported|not found|"
    r"\bfatal\b|identifier|expected|incompatible|no matching",
    re.IGNORECASE,
)
COMPILER_LINES = 120
"""A compiler's output is searched in this many lines above and below the exception that it causes."""
_ADVICE = re.compile(r"Failed to open lib\w+\.so|NUMA auto balancing|could not be loaded")
"""NCCL warnings about optional features, which are no evidence of a failure."""
_FAILED = re.compile(r"fail|error|unable|mismatch|abort|invalid|time[ -]?out|timed out", re.IGNORECASE)
"""NCCL warnings about a failed call, as opposed to advice (a missing library, a kernel option)."""
_UNEXPLAINED = ("signal", "exit", "connection_lost", "nccl_error", "launch_failed", "rendezvous")
MAX_SHOWN = 240


def unnamed_errors(book: LogBook) -> list[Candidate]:
    """Suspect the first line marked as an error, which does not say whether it ended the job."""
    lines = _errors(book)
    if not lines:
        return []
    is_first = lines[0] is next(book.of("error_line"))
    return [
        from_lines(
            "unnamed_error",
            lines[:8],
            rank_class="victim",
            what=f"{'The first error that the log shows' if is_first else 'An error near the end of the log'} is: "
            f"{_text(lines[0])}",
            is_proven=False,
            severity="warning",
            evidence={"reported_by_ranks": sorted({entry.rank for entry in lines if entry.rank is not None})[:64]},
            collect=COLLECT["connection_lost"],
        )
    ]


def with_error_line(candidate: Candidate, book: LogBook) -> Candidate:
    """Add the first error line before an end without a stated reason, or NCCL's own warning to an NCCL error."""
    if candidate.cause == "exception" and any(_BUILD.search(text_of(entry)) for entry in candidate.lines):
        return _with_compilers_error(candidate, book)
    is_cut = candidate.cause == "exception" and bool(candidate.lines) and bool(candidate.lines[0].number("is_cut"))
    if not (candidate.cause in _UNEXPLAINED or is_cut) or not candidate.lines:
        return candidate
    if candidate.cause == "nccl_error" and (warned := [*book.of("nccl_cuda_failure"), *failed_warnings(book)]):
        return _with_warning(candidate, warned[0])
    end = min(book.position(entry) for entry in candidate.lines)
    known = {(entry.source, entry.line) for entry in candidate.lines}
    started: dict[str, int] = {}
    for entry in book.of("started"):
        started.setdefault(entry.source, entry.line)
    before = [
        entry
        for entry in _errors(book)
        if (book.position(entry) < end or len(candidate.lines) == 1)
        # lines before the launcher's start come from another program in the same shell
        and entry.line > started.get(entry.source, 0)
        and (entry.source, entry.line) not in known
        and (not candidate.ranks or entry.rank in (None, *candidate.ranks))
    ]
    if not before:
        return candidate
    return replace(
        candidate,
        what=f"{candidate.what}. Before it the log reports: {_text(before[0])}",
        lines=(*candidate.lines, *before[:3]),
        evidence={**candidate.evidence, "error_line": before[0].quoted},
    )


def failed_warnings(book: LogBook) -> list[LogLine]:
    """NCCL's warnings about calls that failed, after which the job did not continue."""
    return [
        entry
        for entry in book.of("nccl_warning")
        if _FAILED.search(entry.text("text"))
        and not _ADVICE.search(entry.text("text"))
        and relevance(entry, book) != "survived"
    ]


def _with_warning(candidate: Candidate, warned: LogLine) -> Candidate:
    """Add the call that failed, as NCCL's own line states it."""
    part, do = next((about for file, about in NCCL_PARTS.items() if file in warned.message), ("", None))
    if do is not None:
        what = f"NCCL could not set up {part}: {warned.message.rpartition('NCCL WARN ')[2][:MAX_SHOWN]}"
        return replace(candidate, what=what, why=warned.quoted, evidence={**candidate.evidence, "do": do})
    if warned in candidate.lines:
        return candidate
    text = warned.text("error") or warned.text("text") or warned.message
    what = f'{candidate.what}. NCCL warns of "{text[:MAX_SHOWN]}" ({warned.place})'
    do = candidate.evidence.get("do") or "That line names the call that failed; compare the other ranks' logs there."
    return replace(candidate, what=what, evidence={**candidate.evidence, "do": do})


def _with_compilers_error(candidate: Candidate, book: LogBook) -> Candidate:
    """Add the line in which the compiler or linker states what it lacks, nearest to the exception."""
    first = candidate.lines[0]
    near = [entry for entry in book.of("error_line") if entry.source == first.source
            and abs(entry.line - first.line) <= COMPILER_LINES and _OF_COMPILER.search(entry.text("text"))]  # fmt: skip
    if not near:
        return candidate
    stated = min(near, key=lambda entry: abs(entry.line - first.line))
    return replace(
        candidate,
        what=f"{candidate.what}. The compiler reports {_text(stated)}",
        lines=(*candidate.lines, stated),
        evidence={
            **candidate.evidence,
            "error_line": stated.quoted,
            "do": "Install on every node what the compiler lacks (the headers of Python and CUDA, the driver's libcuda "
            "in the linker's path), or use an extension that is already built.",
        },
    )


def _errors(book: LogBook) -> list[LogLine]:
    """Error lines that are not consequences, and after which neither the job nor an earlier attempt continued."""
    finished = {entry.source for entry in book.of("finished")}
    last = max((one.line for one in book.earlier if one.kind == "finished"), default=0)
    passed = {one.text("text") for one in book.earlier if one.kind == "error_line" and one.line < last}
    passed |= {one.text("text") for one in book.of("error_line") if one.number("later_steps")}
    return [
        entry
        for entry in book.of("error_line")
        if not entry.number("later_steps")
        and entry.source not in finished
        and entry.text("text") not in passed
        and not _CONSEQUENCE.search(entry.text("text"))
        and not _HARMLESS.search(entry.text("text"))
        and LOST_PEER.search(entry.text("text")) is None
        and relevance(entry, book) == "fatal"
    ]


def _text(entry: LogLine) -> str:
    text = " ".join(entry.text("text").split()).rstrip(".;: ")
    return f'"{text[:MAX_SHOWN]}" ({entry.place})'
