"""Combine a job's end with its processes' errors: name the rank of an error, and put the cause before its consequences.

candidates = name_only_end(candidates, book, ended)
candidates = in_order_of_ends(candidates, book)

1. After a device error, or an uncaught C++ exception, the runtime aborts its process. If only one rank aborted, the
   error is that rank's.
2. An exception ends its process with code 1, and a process that the launcher then ends by SIGTERM writes no traceback.
   So a single traceback belongs to the single rank that exited with code 1.
3. If a process ended with an error before the scheduler's time limit, the job had already failed: the other ranks, or
   threads of that process, only waited for the limit.
4. If ranks gave up waiting before the job was cancelled or reached its time limit, the job had already hung.
5. If a process reports that it cannot connect (wrong address or interface) and then ends, that is why it ended.
6. A connection or port that failed before a wait timed out explains the timeout: the other ranks waited for the one
   that could not connect or send.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from analyzers.causes import CAUSES
from analyzers.deaths.logged.logged_endings import Ended, is_one_node_of_several
from analyzers.logs.candidate import Candidate, who
from analyzers.logs.exceptions import is_launchers, is_stop, is_uncaught, is_victims, relevance, type_of
from analyzers.logs.log_events import LogBook, LogLine

__all__ = ["in_order_of_ends", "name_only_end"]


_NUMBERS = re.compile(r"\d+")
_TERMINATE = "terminate called after throwing"
"""What libstdc++ prints before it aborts."""
_CONNECTION_CAUSES = ("rendezvous", "no_interface", "infiniband")
_CLIENT_LINES = ("rendezvous_unreachable", "rendezvous_timeout", "nccl_infiniband")
"""Kinds of lines from a process that connects or sends. Errors of a server, such as a port in use, are left out: they
end the launch, and do not explain a wait."""
_ENDED = {
    "cancelled": "The job was cancelled afterwards",
    "time_limit": "The job then lasted until the scheduler ended it at its time limit",
}
"""{cause from outside the job: sentence that is added if the job had hung before}."""
_REFUSED = 2
"""Exit code of argparse for a command line that it refuses."""


def name_only_end(candidates: Sequence[Candidate], book: LogBook, ended: Ended) -> list[Candidate]:
    """Name the rank of candidates that lack a rank, if only one rank ended in the way that matches the error."""
    if refused := tuple(sorted(rank for rank, (code, _) in ended.exits.items() if code == _REFUSED and rank >= 0)):
        candidates = [
            _named(one, *refused) if any(type_of(line) == "ArgumentError" for line in one.lines) else one
            for one in candidates
        ]
    aborts = [one for one in candidates if one.cause == "signal" and one.evidence.get("signal") == "SIGABRT"]
    if len(aborts) == 1 and len(aborts[0].ranks) == 1 and aborts[0].is_proven:
        return [
            _named(one, aborts[0].ranks[0]) if one.cause in ("device_error", "device_assert") else one
            for one in candidates
        ]
    aborted = [rank for rank, (signal, _) in ended.signals.items() if signal == "SIGABRT"]
    if len(aborted) == 1 and aborted[0] >= 0:
        candidates = [_named(one, aborted[0]) if _TERMINATE in one.lines[0].message else one for one in candidates]
    end, raised = _only_exit(book, ended), _only_traceback(book)
    if end is None or raised is None or end[1].source != raised.source or end[1].line < raised.line:
        return list(candidates)
    return [_named(one, end[0]) if raised in one.lines else one for one in candidates]


def in_order_of_ends(candidates: Sequence[Candidate], book: LogBook) -> list[Candidate]:
    """Put the error or hang that stopped the job ahead of its consequences: an end from outside, timed-out waits."""
    candidates = _setup_before_death(_errors_before_limit(candidates), book)
    return _connection_before_wait(_hang_before_end(candidates), book)


def _errors_before_limit(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Put an error ahead of the time limit, if it ended its process before the limit was reached."""
    limit = next((one for one in candidates if one.cause == "time_limit"), None)
    if limit is None:
        return list(candidates)
    raised = [
        one
        for one in candidates
        if one.rank_class == "error"
        and one.is_proven
        and is_uncaught(one.lines[0])
        and not one.lines[0].number("later_lines")
        and _is_before(one.lines[0], limit.lines[0])
    ]
    if not raised:
        return list(candidates)
    lasted = f"{raised[0].what}. The job then lasted until the scheduler ended it at its time limit"
    first = replace(raised[0], what=lasted, lines=(*raised[0].lines, *limit.lines[:1]))
    return [first, *(one for one in candidates if one not in (raised[0], limit))]


def _hang_before_end(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Put a hang ahead of the job's cancellation or time limit, if all timeouts of the hang came earlier."""
    end = candidates[0] if candidates and candidates[0].cause in _ENDED else None
    hang = next((one for one in candidates if one.kind == "hang"), None)
    if end is None or hang is None:
        return list(candidates)
    came_before = all(_is_before(one, end.lines[0]) and not one.number("later_steps") for one in hang.lines)
    if not came_before or any(one.rank_class == "error" for one in candidates):
        return list(candidates)
    what = f"{hang.what}. {_ENDED[end.cause]}"
    first = replace(hang, what=what, lines=(*hang.lines, *end.lines[:1]))
    return [first, *(one for one in candidates if one not in (hang, end))]


def _setup_before_death(candidates: Sequence[Candidate], book: LogBook) -> list[Candidate]:
    """Put a failed connection ahead of the end of the process that reported it. A line that names no
    process may be that of a process that exited. If a signal ended it, the line may be a peer's.
    """
    if not candidates or candidates[0].rank_class != "death" or candidates[0].cause not in ("exit", "signal"):
        return list(candidates)
    end = candidates[0]
    failed = [
        one
        for one in candidates
        if one.rank_class == "network"
        and one.is_proven
        and any(_is_before(line, last) and _are_of_one_process(line, last, end) and relevance(line, book) == "fatal"
                for line in one.lines for last in end.lines[:1])
    ]  # fmt: skip
    return [*failed[:1], *(one for one in candidates if one not in failed[:1])]


def _are_of_one_process(line: LogLine, last: LogLine, end: Candidate) -> bool:
    if line.pid is not None and last.pid is not None:
        return line.pid == last.pid
    if line.rank is not None and end.ranks:
        return line.rank in end.ranks
    return end.cause == "exit" and line.pid is None and line.rank is None


def _connection_before_wait(candidates: Sequence[Candidate], book: LogBook) -> list[Candidate]:
    """Put a failed rendezvous or a wrong interface ahead of a suspected hang, if the wait timed out later."""
    if not candidates or candidates[0].kind != "hang" or candidates[0].is_proven:
        return list(candidates)
    waited = min(book.position(entry) for entry in candidates[0].lines)
    failed = [
        one
        for one in candidates
        if one.cause in _CONNECTION_CAUSES
        and any(
            entry.kind in _CLIENT_LINES and relevance(entry, book) == "fatal" and book.position(entry) < waited
            for entry in one.lines
        )
    ]
    return [*failed[:1], *(one for one in candidates if one not in failed[:1])]


def _is_before(one: LogLine, other: LogLine) -> bool:
    if one.source == other.source:
        return one.line < other.line
    return one.wall_ns is not None and other.wall_ns is not None and one.wall_ns < other.wall_ns


def _named(candidate: Candidate, *ranks: int) -> Candidate:
    if candidate.rank_class != "error" or candidate.ranks or _met_by_several(candidate):
        return candidate
    return replace(candidate, ranks=ranks, what=candidate.what.replace(who(()), who(ranks), 1))


def _met_by_several(candidate: Candidate) -> bool:
    """Return True for a fault outside the processes, such as of a file system, if several of them print it in lines
    that differ only in a number. Then no single rank is at fault.
    """
    row = CAUSES.get(candidate.cause)
    texts = {entry.message for entry in candidate.lines if not entry.text("traceback")}
    forms = {_NUMBERS.sub("#", text) for text in texts}
    return row is not None and row.blame == "outside" and len(forms) < len(texts)


def _only_exit(book: LogBook, ended: Ended) -> tuple[int, LogLine] | None:
    """The only rank that ended with code 1, and the launcher's line on it; None if another rank ended by itself."""
    ends = list(ended.exits.items())
    if len(ends) != 1 or any(signal != "SIGTERM" for signal, _ in ended.signals.values()):
        return None
    rank, (code, entry) = ends[0]
    if ended.times_s.keys() - ended.signals.keys() - {rank}:
        return None  # the launcher lists other ranks that failed
    return (rank, entry) if rank >= 0 and code == 1 and not is_one_node_of_several(book) else None


def _only_traceback(book: LogBook) -> LogLine | None:
    """The only exception that may end a process; None if there are several, or if a line of one names its rank."""
    raised = [entry for entry in book.of("exception") if not (is_launchers(entry) or is_stop(entry))
              and (entry.number("is_cut") or relevance(entry, book) == "fatal")]  # fmt: skip
    with_frames = [entry for entry in raised if entry.text("traceback")]
    if not with_frames or any(entry.rank is not None for entry in raised):
        return None
    last_lines = [entry.text("message") for entry in raised if not entry.text("traceback")]
    if len(set(last_lines)) < len(last_lines):
        return None  # the tracebacks are interleaved
    first = with_frames[0]  # its text may contain the other tracebacks, if it quotes a loader worker
    # Skip a line that only begins this message: the cause is in a later line of it.
    if any(is_victims(entry) for entry in raised if entry.text("traceback") or not _begins(first, entry)):
        return None
    are_parts = all(entry.text("traceback").rstrip() in first.text("traceback") for entry in with_frames)
    return first if are_parts and all(type_of(entry) == type_of(first) for entry in raised) else None


def _begins(whole: LogLine, line: LogLine) -> bool:
    """Return True if `line` is the first line of the exception's message."""
    return bool(line.text("message")) and whole.text("message").startswith(line.text("message"))
