"""How ranks ended, from lines of ranks and launchers: signals, exit codes, victims, a stop from outside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from analyzers.causes import COLLECT
from analyzers.deaths.logged.logged_schedulers import ended_by_monitor
from analyzers.logs.candidate import Candidate, from_lines, who
from analyzers.logs.exceptions import is_closed_by_loss, is_launchers, is_stop, is_victims, relevance, type_of
from analyzers.logs.log_events import LogBook, LogLine
from analyzers.logs.policy import LogPolicy
from analyzers.run.ends.exceptions import Frame, own_frame, read_traceback
from analyzers.wording import cut

__all__ = ["Ended", "death_candidates", "endings", "is_one_node_of_several"]

_SIGNALS = {
    4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM",
}  # fmt: skip
_HOW = {
    "Killed": 9, "Out Of Memory": 9, "Segmentation fault": 11, "Segfault": 11, "Bus error": 7, "Aborted": 6,
    "Terminated": 15, "Floating point exception": 8, "Illegal instruction": 4, "Trace/breakpoint trap": 5,
}  # fmt: skip
"""{word that srun, bash or torch uses for a signal: its number}."""
_ENDS = (
    "worker_failed", "root_failure", "process_terminated", "slurm_task", "signal_received", "shell_killed",
    "signal_caught",
)  # fmt: skip
_OF_ANY_PROGRAM = ("shell_killed", "signal_caught")
"""Ends that a shell or library reports for any program. They are not the end of the job if its steps continue."""
_LOADER_HANGS = (
    "If the job hung before this, a data loader worker was stuck: py-spy dump of the workers, or num_workers=0, "
    "shows where. Otherwise check who or what ended the job."
)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[_T ](\d\d:\d\d:\d\d(?:\.\d{1,6})?)")


@dataclass(slots=True)
class Ended:
    """Ends of ranks as the lines of ranks and launchers report them."""

    victims: dict[int, LogLine] = field(default_factory=dict)
    """Ranks that died because of another rank, each with the line that shows it."""
    signals: dict[int, tuple[str, LogLine]] = field(default_factory=dict)
    exits: dict[int, tuple[int, LogLine]] = field(default_factory=dict)
    times_s: dict[int, float] = field(default_factory=dict)
    """Epoch seconds of each rank's end, from the launcher's table or the line's time. Rank -1: the rank is unknown."""
    victim_lines: list[LogLine] = field(default_factory=list)


def endings(book: LogBook) -> Ended:
    """Victims, signals and exit codes by rank."""
    ended = Ended()
    for entry, _ in book.of_role("victim"):
        if relevance(entry, book) == "survived":
            continue
        ended.victim_lines.append(entry)
        if entry.rank is not None:
            ended.victims.setdefault(entry.rank, entry)
    for entry in book.of("exception"):
        if is_victims(entry) and relevance(entry, book) != "survived" and not entry.number("is_cut"):
            ended.victim_lines.append(entry)
            if entry.rank is not None:
                ended.victims.setdefault(entry.rank, entry)
    for entry in book.of(*_ENDS):
        if entry.kind in _OF_ANY_PROGRAM and relevance(entry, book) == "survived":
            continue
        _take_ending(entry, ended)
    for entry in book.of("trainers_aborted"):
        _take_aborted(entry, ended)
    for entry in book.of("fatal_python"):
        number = _HOW.get(entry.text("error"))
        if number not in (None, 6):  # SIGABRT (6) is left out: a watchdog may abort because another rank failed
            ended.signals.setdefault(entry.rank if entry.rank is not None else -1, (_SIGNALS[number], entry))
    for entry in book.of("other_failures"):
        _take_others(entry, ended)
    return ended


def _take_ending(entry: LogLine, ended: Ended) -> None:
    code = entry.number("exitcode")
    ranks = entry.ranks() or ((entry.rank,) if entry.rank is not None else (-1,))
    how = entry.text("how")
    number = _HOW.get(how) or entry.number("number")
    signal = entry.text("signal") or (_SIGNALS.get(number, f"signal {number}") if number else "")
    if how.startswith("Exited with exit code"):
        code = int(how.split()[-1])
    if not signal and code is not None and (code < 0 or 128 < code < 160):
        signal = _SIGNALS.get(-code if code < 0 else code - 128, f"signal {-code if code < 0 else code - 128}")
    seen_s = _seconds(entry.text("time"))
    if seen_s is None and entry.wall_ns is not None:
        seen_s = entry.wall_ns / 1e9
    for rank in ranks:
        if seen_s is not None:
            ended.times_s.setdefault(rank, seen_s)
        if signal:
            ended.signals.setdefault(rank, (signal, entry))
        elif code:
            ended.exits.setdefault(rank, (code, entry))


def _take_aborted(entry: LogLine, ended: Ended) -> None:
    """Assign a signal from a line without a rank to the only process that Paddle's launcher found ended."""
    if len(ranks := entry.ranks()) == 1:
        if -1 in ended.signals:
            ended.signals.setdefault(ranks[0], ended.signals.pop(-1))
        elif ranks[0] not in ended.signals:
            ended.exits.setdefault(ranks[0], (0, entry))


def _take_others(entry: LogLine, ended: Ended) -> None:
    """Add the other failures in torchrun's table: ranks that failed as early as the root cause are equally suspect."""
    for part in entry.text("others").split(", "):
        rank, _, time = part.partition("@")
        if rank.isdecimal() and (seen_s := _seconds(time)) is not None:
            ended.times_s.setdefault(int(rank), seen_s)


def _seconds(text: str) -> float | None:
    match = _TIME.search(text)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(f"{match[1]}T{match[2]}").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def death_candidates(book: LogBook, ended: Ended) -> list[Candidate]:
    """Candidates for deaths that no exception explains: by signal or exit code, of a Ray worker, from outside."""
    return [
        *_signals(book, ended),
        *_exits(book, ended),
        *_unlisted(book),
        *_lost_actors(book),
        *_killed_by_launcher(book),
        *_waiting_pods(book),
        *_stops(book),
    ]


def _gave_up(book: LogBook) -> set[int | None]:
    return {entry.rank for entry in book.of("watchdog_timeout", "watchdog_stuck", "watchdog_abort")}


def _signals(book: LogBook, ended: Ended) -> Iterator[Candidate]:
    raised = {entry.rank for entry in book.of("exception") if not is_launchers(entry)}
    gave_up = _gave_up(book)
    abort_text = next(
        iter(book.of("heap_damaged", "fatal_python", "assert_text", "device_error", "kernel_fault")), None
    )
    groups: dict[str, list[tuple[int, LogLine]]] = {}
    for rank, (signal, entry) in ended.signals.items():
        if signal == "SIGTERM" or (signal == "SIGABRT" and (gave_up or ended.victim_lines or rank in ended.victims)):
            continue
        groups.setdefault(signal, []).append((rank, entry))
    ends = {entry.source: entry.line for entry in book.of("finished")}
    if abort_text is not None and any(signal == "SIGABRT" for signal, _ in ended.signals.values()):
        ends.setdefault(abort_text.source, abort_text.line)
    for signal, group in groups.items():
        if signal == "SIGKILL" and all(
            ends.get(entry.source, entry.line) < entry.line and not _was_found_ended(entry) for _, entry in group
        ):
            continue  # the job had finished or aborted, and the launcher killed the processes that remained
        if signal == "SIGKILL" and all(ended_by_monitor(rank, entry, book) for rank, entry in group):
            continue
        first = _earliest([rank for rank, _ in group], ended)
        ranks = tuple(sorted(rank for rank in first if rank >= 0))
        if signal != "SIGABRT":  # the end of a peer causes no such signal, so name the ranks that got it
            ranks = tuple(sorted(rank for rank, _ in group if rank >= 0 and _is_early(rank, ended)))
        without = "" if any(rank in raised for rank in ranks) else ", and no traceback says why"
        what = f"{who(ranks, _process_of(group))} died of {signal}{_place_of(group)}{without}"
        if signal == "SIGABRT" and abort_text is not None:
            asserted, at = abort_text.text("assertion"), abort_text.text("where")
            reason = f"assertion `{cut(asserted, 160)}` failed" if asserted else cut(abort_text.message, 160)
            what = f"{who(ranks)} aborted (SIGABRT): {reason}{f' at {at}' if asserted and at else ''}"
        is_bare_abort = signal == "SIGABRT" and abort_text is None
        if is_bare_abort:  # no reason is printed. Do not suspect the rank: ranks that only waited end in this way, too
            what = f"{who(ranks)} ended first, by SIGABRT, which is also how a watchdog ends waiting ranks"
        yield from_lines(
            "signal",
            (*(entry for _, entry in group), *([abort_text] if signal == "SIGABRT" and abort_text else [])),
            rank_class="weak" if is_bare_abort else "death",
            ranks=() if is_bare_abort else ranks,
            what=what,
            why=group[0][1].quoted,
            is_proven=signal != "SIGKILL" and not is_bare_abort,
            evidence={"signal": signal},
            collect=COLLECT.get(signal, COLLECT["signal"]),
        )


def _process_of(group: Sequence[tuple[int, LogLine]]) -> str:
    """Subject of a sentence on processes of unknown rank: the process ID and host, if the lines state them."""
    found = {(entry.pid, entry.host) for _, entry in group if entry.pid is not None and entry.host}
    if not found:
        pods = sorted({entry.text("host") for _, entry in group} - {""})
        return f"a process of {pods[0]}" if pods else "a rank that the log does not name"
    pid, host = min(found)
    return f"process {pid} on {host}" + (f" and {len(found) - 1} others" if len(found) > 1 else "")


def _place_of(group: Sequence[tuple[int, LogLine]]) -> str:
    """Return ` in libfoo.so (bar)` if all native stacks agree that the processes died there; otherwise ""."""
    places = {(entry.text("library"), entry.text("symbol")) for _, entry in group if entry.text("library")}
    if len(places) != 1:
        return ""
    library, symbol = places.pop()
    return f" in {library}" + (f" ({symbol})" if symbol else "")


def _was_found_ended(entry: LogLine) -> bool:
    """Return True for torchrun's reports: it lists processes that had ended before it ended the others."""
    return entry.kind in ("root_failure", "signal_received") or entry.number("local_rank") is not None


def _exits(book: LogBook, ended: Ended) -> Iterator[Candidate]:
    raised = {one.rank for one in book.of("exception") if not is_launchers(one) and not is_closed_by_loss(one, book)}
    # Ranks whose exit is explained. None is among them if a line without a rank may explain the exit of any rank.
    explained = raised | _gave_up(book) | set(ended.victims)
    explained |= {None} if any(book.of("nonfinite", "loss_scale_floor")) else set()  # the loop may have exited on NaN
    has_table = any(book.of("root_failure", "worker_failed"))  # the launcher's own exit code follows from its table
    silent = [(rank, code, entry) for rank, (code, entry) in ended.exits.items()
              if not {rank, None} & explained and not (has_table and entry.text("tasks"))]  # fmt: skip
    if not silent or _has_hard_signal(ended):
        return
    first = _earliest([rank for rank, _, _ in silent], ended)
    ranks = tuple(sorted(rank for rank in first if rank >= 0))
    code, entry = next(((code, entry) for rank, code, entry in silent if rank in first), silent[0][1:])
    are_timed = set(ranks) <= set(ended.times_s)
    more = (" in the same second" if are_timed else " in an unknown order") if len(ranks) > 1 else ""
    is_first = (len(ranks) == 1 or are_timed) and not is_one_node_of_several(book)
    pod = entry.text("host") if not ranks else ""
    with_code = f" with exit code {code}" if code else ""
    subject = f"a process of {pod}" if pod else "a rank that the log does not name"
    yield from_lines(
        "exit",
        tuple(entry for *_, entry in silent),
        rank_class="death",
        ranks=ranks if is_first else (),
        what=f"{who(ranks)} ended{with_code}{more}, and their errors are not in these files"
        if len(ranks) > 1
        else f"{who(ranks, subject)} ended{with_code}, and its own error is not in these files",
        why=entry.quoted,
        is_proven=False,
        evidence={"exit_code": code or None},
    )


def is_one_node_of_several(book: LogBook) -> bool:
    """Return True if torchrun's failure table of only one of several nodes is here: the cause may be on another one."""
    tables = list(book.of("root_failure"))
    is_several = any(entry.number("rank") != entry.number("local_rank") for entry in tables)
    return is_several and len({entry.text("host") for entry in tables}) < 2


def _earliest(ranks: Sequence[int], ended: Ended, policy: LogPolicy | None = None) -> list[int]:
    """Ranks with the earliest recorded end, within the policy's tolerance; all of `ranks` if no time is known."""
    policy = policy or LogPolicy()
    timed = [rank for rank in ranks if rank in ended.times_s]
    if not timed:
        return list(ranks)
    limit_s = min(ended.times_s[rank] for rank in timed) + policy.same_second_s
    # Ranks that the launcher ended by SIGTERM after the first failure have the same time, but are not the first.
    stopped = {rank for rank, (signal, _) in ended.signals.items() if signal == "SIGTERM"}
    innocent = stopped | ended.victims.keys()
    return [rank for rank, seen_s in ended.times_s.items() if seen_s < limit_s and rank not in innocent]


def _is_early(rank: int, ended: Ended) -> bool:
    """Return True if no other rank ended clearly earlier. Otherwise the launcher may have killed this rank."""
    seen_s = ended.times_s.get(rank)
    # Lines without a rank have rank -1, and are left out.
    first_s = min((time_s for other, time_s in ended.times_s.items() if other >= 0), default=seen_s)
    return seen_s is None or first_s is None or seen_s <= first_s + LogPolicy().poll_s


def _has_hard_signal(ended: Ended) -> bool:
    """Return True if a process died of a signal that another rank's end cannot cause."""
    return any(signal not in ("SIGTERM", "SIGABRT") and _is_early(rank, ended)
               for rank, (signal, _) in ended.signals.items())  # fmt: skip


def _unlisted(book: LogBook) -> Iterator[Candidate]:
    """Candidate for the task that failed first. Slurm does not list it among the tasks that it ended afterwards."""
    failed = [entry for entry in book.of("slurm_cancelled") if "TASK FAILURE" in entry.text("reason")]
    lines = list(book.of("slurm_task"))
    ended = {rank for entry in lines for rank in entry.ranks() or entry.ranks("tasks")}
    if not failed or any(entry.text("how") not in ("Terminated", "Killed") for entry in lines):
        return
    missing = sorted(set(range(min(max(ended, default=-1) + 1, 65_536))) - ended)
    ranks = tuple(missing) if len(missing) == 1 and not any(entry.text("tasks") for entry in lines) else ()
    yield from_lines(
        "exit",
        (*failed[:1], *lines[:8]),
        rank_class="death",
        ranks=ranks,
        what="A task of the job failed, and Slurm ended the others"
        + (f": task {missing[0]} is the only one missing from its list" if len(missing) == 1 else ""),
        why=failed[0].quoted,
        is_proven=False,
    )


def _stopped_at_end(entry: LogLine, book: LogBook) -> bool:
    """Return True for SIGTERM after the training had finished, which is how Ray ends all its workers."""
    return entry.text("signal") == "SIGTERM" and any(
        one.source == entry.source and one.line < entry.line for one in book.of("finished")
    )


def _lost_actors(book: LogBook) -> Iterator[Candidate]:
    lines = [entry for entry in book.of("ray_actor_died", "worker_proc_died")
             if relevance(entry, book) != "survived" and not _stopped_at_end(entry, book)]  # fmt: skip
    known = {entry.rank for entry in lines if entry.kind == "worker_proc_died" and entry.rank is not None}
    ranks = tuple(sorted(known))
    waited = next(iter(book.of("watchdog_timeout", "watchdog_stuck", "gloo_timeout")), None)
    came_first = bool(lines) and waited is not None and book.position(lines[0]) < book.position(waited)
    subject = "a Ray worker" if any(book.of("ray_actor_died")) else "a worker process"
    died = {(entry.number("pid"), entry.text("ip")) for entry in lines if entry.text("ip") and entry.number("pid")}
    if len(died) == 1:
        pid, address = died.pop()
        subject += f" (process {pid} on {address})"
    if lines and (waited is None or came_first):
        yield from_lines(
            "exit",
            lines,
            # Any line that names a cause is better evidence, except a wait that timed out after the death.
            rank_class="death" if came_first else "weak",
            ranks=ranks,
            what=f"{who(ranks, subject)} died, and its own error is not in these files",
            is_proven=False,
            evidence={
                "do": "Read that worker's own log, and `dmesg -T` of its node: whether it crashed or was killed "
                "is not in these lines."
            },
            collect=COLLECT["ray" if any(book.of("ray_actor_died")) else "connection_lost"],
        )


def _killed_by_launcher(book: LogBook) -> Iterator[Candidate]:
    """Candidate for a failed process of DeepSpeed's launcher, which kills the others before it prints the exit code."""
    lines = [entry for entry in book.of("teardown") if "Killing subprocess " in entry.message]
    if lines and not any(book.of_role("death", "outside")):
        yield from_lines(
            "exit",
            lines[:8],
            rank_class="weak",
            what="DeepSpeed's launcher killed its processes after one failed: which, and why, is not in these files",
            is_proven=False,
            collect=COLLECT["connection_lost"],
        )


def _waiting_pods(book: LogBook) -> Iterator[Candidate]:
    """Candidate for a pod that does not start. It may start later, so any line that names a cause takes precedence."""
    lines = list(book.of("pod_waits"))
    if lines:
        yield from_lines(
            "launch_failed",
            lines,
            rank_class="weak",
            what="A pod or process did not start for lack of resources, or keeps restarting",
            why=lines[-1].quoted,
            is_proven=False,
            collect=("kubectl logs POD --previous --all-containers", "kubectl describe pod POD"),
        )


def _stops(book: LogBook) -> Iterator[Candidate]:
    """Candidate for an interruption, with the user's line that it interrupted: a job that hangs is often stopped."""
    stops = [entry for entry in book.of("exception") if is_stop(entry)]
    if not stops:
        return
    links = [link for entry in stops for link in read_traceback(entry.text("traceback"))]
    user_links = [link for link in links if (frame := own_frame(link)) is not None and not frame.is_library]
    waited = bool(user_links) and all(any(_waits_for_data(frame) for frame in link.frames) for link in user_links)
    what = "The job was interrupted from outside (Ctrl-C or SIGTERM)"
    what += " while it waited for its data loader" if waited else ""
    at = frame.text if user_links and (frame := own_frame(user_links[0])) is not None else ""
    yield from_lines(
        "cancelled",
        stops,
        rank_class="death",
        what=f"{what} ({at})" if at else what,
        why=f"{stops[0].place}: {type_of(stops[0])}",
        severity="warning",
        evidence={"do": _LOADER_HANGS} if waited else {},
    )


def _waits_for_data(frame: Frame) -> bool:
    return frame.path.endswith("torch/utils/data/dataloader.py") and frame.function == "__next__"
