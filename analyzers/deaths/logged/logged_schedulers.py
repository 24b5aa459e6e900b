"""Job ends reported by a scheduler or launcher: time limit, preemption, eviction, lost node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from analyzers.logs.candidate import Candidate, from_lines
from analyzers.logs.exceptions import is_launchers, is_uncaught, is_victims
from analyzers.logs.log_events import MAX_QUOTED, LogBook, LogLine
from analyzers.logs.wording import DO_OF_LINE
from analyzers.policy import SHARED

__all__ = ["ended_by_monitor", "host_of", "limited_by", "outside_causes", "went_on"]

_OF_LAUNCHERS = re.compile(r"/(?:horovod/runner|deepspeed/launcher|colossalai/cli|ray/(?:scripts|autoscaler))/")
_HANGUP_DO = (
    "Start it where a closed terminal does not end it: as a job of the scheduler, in tmux, or by `setsid nohup`."
)
_STARTS = ("launch_failed", "worker_unregistered")
_PROBE = "Kubernetes ended the container because its probe failed: the process was busy, or the probe is too strict"


def limited_by(entry: LogLine) -> str:
    """Cause for which a scheduler ended a job; empty if the line only reports an end that has another cause."""
    if entry.kind == "node_failed":
        return "node_failed"
    resource = entry.text("resource").lower()
    if entry.kind == "evicted" and resource.startswith("memory"):
        return "host_out_of_memory"
    if entry.kind == "evicted" and resource.startswith(("ephemeral", "nodefs", "imagefs", "disk")):
        return "disk_full"
    if entry.kind in ("preempted", "evicted"):
        return "preempted"
    if entry.kind in _STARTS:
        return "launch_failed"
    reason = entry.text("reason").upper()
    for word, cause in (
        ("TIME", "time_limit"),
        ("RUNLIMIT", "time_limit"),
        ("CPUT", "time_limit"),
        ("DEADLINE", "time_limit"),
        ("NODE", "node_failed"),
        ("PREEMPT", "preempted"),
        ("REQUEUE", "preempted"),
    ):
        if word in reason:
            return cause
    return ""


def host_of(entry: LogLine) -> str:
    """Host that a scheduler's line names. If the line reports that a node failed, the host that wrote the line is not
    used: a node does not report its own loss.
    """
    is_of_another = limited_by(entry) == "node_failed" or "'s node" in entry.message
    if entry.text("at") and is_of_another:
        return ""
    return entry.text("host") or entry.text("node") or ("" if is_of_another else entry.host or "")


def went_on(entry: LogLine, book: LogBook) -> bool:
    """Return True if the job continued after the line: it trained, or failed later for another reason."""
    if (entry.number("later_steps") or 0) >= SHARED.min_times:
        return True
    if "ssh exited" in entry.message and any(
        one.source == entry.source and one.line < entry.line for one in book.of("worker_failed")
    ):
        return True  # the launcher on that node had already started the processes
    return entry.kind in _STARTS and any(
        one.source == entry.source and one.line > entry.line and is_uncaught(one)
        for one in book.of("exception")
        if not is_launchers(one) and not is_victims(one) and not _OF_LAUNCHERS.search(one.text("traceback"))
    )


def _reason(entry: LogLine) -> str:
    """Text of a launcher's line; only the error at its end if the line is long or a table."""
    is_plain = len(entry.message) <= MAX_QUOTED and "   " not in entry.message  # several spaces: columns of a table
    text = entry.message if is_plain else entry.text("error") or entry.message
    return text[:MAX_QUOTED].rstrip(". ")


def _follows_a_task(entry: LogLine, book: LogBook) -> bool:
    """Return True for a job step that srun ended because one of its tasks had failed. Older versions give no reason."""
    return entry.text("what") == "STEP" and any(
        task.source == entry.source and task.line < entry.line and task.text("how") not in ("Terminated", "")
        for task in book.of("slurm_task")
    )


def ended_by_monitor(rank: int, end: LogLine, book: LogBook) -> bool:
    """Return True if a monitor that had waited in vain for a heartbeat of the rank ended it."""
    return any(
        one.source == end.source and one.line < end.line and one.rank in (rank, None) for one in book.of("no_heartbeat")
    )


def outside_causes(book: LogBook) -> Iterator[Candidate]:
    """Candidates for each end that a scheduler, a launcher or Kubernetes states."""
    texts = {
        "time_limit": "The scheduler ended the job at its time limit",
        "node_failed": "The scheduler reports that a node failed",
        "preempted": "The scheduler took the job's nodes away (preemption or eviction)",
        "host_out_of_memory": "The cluster evicted a pod because its node ran low on memory",
        "disk_full": "The cluster evicted a pod because it or its node ran out of disk space",
        "launch_failed": "The launcher could not start processes on a node",
    }
    by_cause: dict[str, list[LogLine]] = {}
    for entry in book.of("slurm_cancelled", "node_failed", "preempted", "evicted", *_STARTS):
        if (cause := limited_by(entry)) and not went_on(entry, book):
            by_cause.setdefault(cause, []).append(entry)
    if {"host_out_of_memory", "disk_full"} & by_cause.keys():  # "Reason: Evicted" is above the line with the cause
        by_cause["preempted"] = [entry for entry in by_cause.pop("preempted", []) if entry.kind != "evicted"]
    if "preempted" in by_cause and not {*map(host_of, by_cause.get("node_failed", ()))} - {""}:
        by_cause.pop("node_failed", None)  # preemption explains it: a node that was taken away is reported as failed
    for cause, lines in by_cause.items():
        if not lines:
            continue
        entry = next((one for one in lines if host_of(one)), lines[0])
        host = host_of(entry)
        yield from_lines(
            cause,
            (entry,),
            rank_class="host",
            what=texts[cause]
            + (f" ({host})" if host and cause != "time_limit" else "")
            + (f": {_reason(entry)}" if cause == "launch_failed" else ""),
            severity="critical" if cause in ("node_failed", "launch_failed") else "warning",
            evidence={
                "host": host or None,
                "reason": entry.text("reason") or entry.text("error") or None,
                "do": DO_OF_LINE.get(entry.kind),
            },
        )
    plain = [entry for entry in book.of("probe_failed", "slurm_cancelled", "agent_signalled") if not limited_by(entry)
             and "TASK FAILURE" not in entry.text("reason") and not _follows_a_task(entry, book)]  # fmt: skip
    is_hangup = any({entry.text("signal"), entry.text("number")} & {"1", "Signals.SIGHUP"} for entry in plain)
    if plain and not by_cause:
        yield from_lines(
            "cancelled",
            plain,
            rank_class="death",
            what=_PROBE
            if plain[0].kind == "probe_failed"
            else "The job was ended from outside: a signal to the launcher, or a cancelled job"
            if not is_hangup
            else "The launcher got SIGHUP: the terminal or session that it was started in was closed",
            severity="warning",
            evidence={"do": _HANGUP_DO} if is_hangup else {},
            collect=("sacct -j JOB --format=JobID,State%30,ExitCode,Reason,End", "last -x | head"),
        )
