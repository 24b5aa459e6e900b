"""Ends of the attempts before a log's last one, and how the last one ended: facts added to the verdict.

earlier_ends(book)            # [{"cause": "preempted", "host": "n1", "line": "slurm-1.log:30"}, ...]
ended_text(book, findings, "finished")    # "finished, after 2 earlier attempts: preempted (n1), node_failed (n3)"
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.deaths.logged_hosts import host_of, limited_by
from analyzers.finding import Finding
from analyzers.logs.log_events import LogBook

__all__ = ["earlier_ends", "ended_text"]

_SAME_END_LINES = 10
"""Lines of one end stand this close: of each node and step of the job, and of srun."""


def earlier_ends(book: LogBook) -> list[dict[str, str | None]]:
    """Attempts after which the job began again, as schedulers and launchers report them, one entry each."""
    found: list[dict[str, str | None]] = []
    last: tuple[str, str, int] | None = None
    for entry in sorted(book.earlier, key=lambda entry: (entry.source, entry.line)):
        cause, host = limited_by(entry), host_of(entry) or None
        if not cause:
            continue
        is_same = last is not None and last[:2] == (entry.source, cause) and entry.line - last[2] <= _SAME_END_LINES
        last = (entry.source, cause, entry.line)
        if not is_same:
            found.append({"cause": cause, "host": host, "line": entry.place})
        elif found[-1]["host"] is None:
            found[-1]["host"] = host
    return found


def ended_text(book: LogBook, findings: Sequence[Finding], ended: str) -> str:
    """End of the last attempt, as far as the logs show, and of those before it."""
    is_dead = any(one.kind in ("rank_lost", "hang") for one in findings)
    is_dead |= ended != "finished" and any(book.of_role("exception", "death"))
    text = "not in the logs" if is_dead else ended
    before = earlier_ends(book)
    if not before:
        return text
    causes = ", ".join(f"{end['cause']}{f' ({host})' if (host := end['host']) else ''}" for end in before)
    attempts = "an earlier attempt" if len(before) == 1 else f"{len(before)} earlier attempts"
    return f"{text}, after {attempts}: {causes}"
