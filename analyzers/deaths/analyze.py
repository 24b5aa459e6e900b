"""Lost ranks: which rank died first and why, and which died only as a consequence.

1. `run.ends.endings` gathers how every rank ended, and separates roots from deaths that followed another.
2. Roots are the first death and all others that did not follow from it, one finding per cause.
3. If all errors are lost connections and no rank is missing, no rank is named as the cause: the connections between
   ranks, or to the rendezvous store, were lost. But if the error of one rank may be its own, this rank is the root.
4. If all ranks' records stop together without an error, the run was killed or its disk is full: no rank is named.
5. If a launcher or a whole node was lost (`lost_hosts`), errors of its ranks are consequences.
6. A death that followed a standstill is its consequence: `hangs` explains it, and nothing is reported here.
7. An attempt that began but left no records was lost as a whole (`unrecorded_attempts`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from analyzers.analysis import Analysis
from analyzers.causes import CAUSES
from analyzers.deaths.exclusions import exclusions
from analyzers.deaths.finding_details import completed
from analyzers.deaths.lost_hosts import launcher_lost, node_lost, spare_nodes_lost
from analyzers.deaths.policy import DeathPolicy
from analyzers.deaths.rank_lost import ON_PURPOSE, lost_at, rank_lost
from analyzers.deaths.resume_mismatch import resume_mismatches
from analyzers.deaths.unrecorded_attempts import unrecorded_attempts
from analyzers.finding import Finding
from analyzers.hangs.culprits import find_culprits
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, RankView, attempts, take_snapshot
from analyzers.run.ends.endings import Death, find_deaths, stopped_ranks
from analyzers.run.ends.exceptions import frame_texts
from analyzers.run.ends.restarts import restart_sentence
from analyzers.run.ends.stop_requests import before_stop, killed_after, stop_while_training
from analyzers.run.ends.thread_errors import with_thread_errors
from analyzers.run.live.stall_limits import ended_cleanly, killed_by_watch, next_launch_ns, stalled_before_death
from analyzers.run.policy import StallPolicy, stall_policy
from analyzers.run.records.clock_set_back import in_order
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from analyzers.wording import counted, cut, ranks_text, sentence, size_text
from probes.tape import event_kinds
from probes.tape.signal_names import signal_name

__all__ = ["ANALYSES", "deaths_of_attempt", "lost_ranks"]

_SIGNALLED = 128
"""Offset of a shell's exit code for a process ended by a signal: 128 + signal number."""
MAX_MESSAGE = 80
"""Maximum characters of an error message in a summary; the evidence has the whole message."""


def lost_ranks(source: Source, scope: Scope, policy: StallPolicy | None = None) -> list[Finding]:
    """Findings of kind `rank_lost`, of every attempt. Without a policy, the run's own stall limits apply."""
    policy = policy or stall_policy(scope.manifest)
    findings = unrecorded_attempts(source, scope)
    if missing_tables(source, "ranks") or not source.has("steps"):
        return findings or [_insufficient("Deaths of ranks were not checked: no records of ranks or steps.")]
    if not source.has("events"):  # exits of processes are events; without them, every end would look like a kill
        return findings or [_insufficient("Deaths of ranks were not checked: no events of the run were recorded.")]
    log = in_order(EventLog.load(source, SNAPSHOT_EVENTS), source)
    known = attempts(source)
    for attempt in known:
        if scope.attempt not in (None, attempt):
            continue
        is_last = attempt == known[-1]
        view = take_snapshot(source, attempt, log)
        restart, now_ns = restart_sentence(source, attempt, known), scope.now_ns if is_last else None
        found = deaths_of_attempt(view, log, policy, is_last=is_last, now_ns=now_ns, restart=restart)
        findings += [completed(source, finding) for finding in found]
    return findings


def deaths_of_attempt(
    view: AttemptView,
    log: EventLog,
    policy: StallPolicy,
    *,
    is_last: bool,
    now_ns: int | None = None,
    restart: str = "",
) -> list[Finding]:
    """Find the lost ranks of one attempt. `restart`: sentence about the restart that followed."""
    found = _deaths(view, log, policy, is_last=is_last, now_ns=now_ns, restart=restart)
    found = [
        with_thread_errors(one, view, log, max_age_steps=SHARED.min_steps)
        if one.cause in ("exception", "exit")
        else one
        for one in found
    ]
    return [*found, *spare_nodes_lost(view, log)]


def _deaths(
    view: AttemptView, log: EventLog, policy: StallPolicy, *, is_last: bool, now_ns: int | None, restart: str
) -> list[Finding]:
    deaths = find_deaths(view, log)
    if (found := launcher_lost(view, log, deaths, restart)) is not None:
        return [found]
    if _all_ended_well(view, log):
        return []
    stop = stop_while_training(view, log, policy)
    # Was the run stopped on request: did every rank end after the request, and none of them for another reason?
    if stop is not None and all(
        death.when_ns >= stop.wall_ns and (death.collateral or death.cause == "vanished") for death in deaths
    ):
        killed = killed_after(stop, view, log)
        if not killed and ended_cleanly(view, log, policy):
            return []
        if killed or _interruption(view, log):
            how = _interruption(view, log) or f"its launcher got {stop.text('signal')}"
            return [_ended_from_outside(view, how, killed, restart)]
    # A signal that kills a rank may also be caused at interpreter shutdown.
    crashed = any(death.signal and not death.is_from_outside for death in deaths)
    if not view.ranks or (is_last and not crashed and ended_cleanly(view, log, policy)):
        return []
    is_live = now_ns is not None
    if (deaths or not is_live) and (found := node_lost(view, log, deaths, restart, is_live=is_live)) is not None:
        return [found]
    roots = [death for death in deaths if not death.collateral]
    if stalled_before_death(view, log, policy) and not _sudden(roots, log, view):
        return []
    if killed_by_watch(log, view.attempt):
        return []
    newest_ns = max((death.when_ns for death in deaths), default=0)
    age_s = math.inf if now_ns is None else (now_ns - newest_ns) / 1e9
    if age_s < DeathPolicy().report_s and not any(death.cause != "vanished" for death in roots):
        return []  # wait a little: the launcher may still report how the rank died
    if now_ns is not None and roots and all(death.exit_code == 0 for death in roots):
        recording = set(view.ranks) - {death.rank for death in deaths}
        newest_ns = max((newest_ns, *(view.ranks[rank].last_ns for rank in recording)))
        if (now_ns - newest_ns) / 1e9 < DeathPolicy().others_follow_s:
            return []  # wait: the other ranks still record, or will soon exit with code 0 as well
    if not roots:
        return _without_a_root(view, deaths, log, now_ns=now_ns, restart=restart)
    if _aborted_on_mismatch(view, roots):
        return []
    groups: dict[tuple[str, str, str], list[Death]] = {}
    for death in roots:
        groups.setdefault((death.cause, death.signal or str(death.exit_code), death.error_type), []).append(death)
    finished = {rank for rank, rank_view in view.ranks.items() if rank_view.closed} - {death.rank for death in deaths}
    victims = sorted((set(view.ranks) | {death.rank for death in deaths}) - {death.rank for death in roots} - finished)
    return [_finding(view, group, victims, restart) for group in groups.values()]


def _all_ended_well(view: AttemptView, log: EventLog) -> bool:
    """Return True if every rank of the attempt exited with code 0, as seen by the launcher, so that none was lost."""
    exits = [event for event in log.of(event_kinds.RANK_EXIT, attempt=view.attempt) if event.integer("exit_rank") >= 0]
    clean = {event.integer("exit_rank") for event in exits if event.integer("exit_code", -1) == 0}
    return len(clean) >= max(1, view.world_size) and clean == {event.integer("exit_rank") for event in exits}


def _sudden(roots: Sequence[Death], log: EventLog, view: AttemptView) -> bool:
    """Return True if a root died by a signal or an error, not because of a hang or a kill by watch."""
    return not killed_by_watch(log, view.attempt) and any(
        death.cause in ("signal", "exception", "exit", "out_of_memory") and not death.is_from_outside
        for death in before_stop(roots, view, log)
    )


def _aborted_on_mismatch(view: AttemptView, roots: Sequence[Death]) -> bool:
    """Return True if the ranks aborted because of a size mismatch, as gloo does. `hang` reports the mismatch."""
    return any(death.signal == "SIGABRT" for death in roots) and find_culprits(view).is_mismatch


def _without_a_root(
    view: AttemptView, deaths: Sequence[Death], log: EventLog, *, now_ns: int | None, restart: str
) -> list[Finding]:
    """Report deaths if it is unknown which was the first: all ranks were killed at the same time, or the first rank to
    die left no record.
    """
    if now_ns is not None and len({death.rank for death in deaths}) < len(view.ranks):
        return []
    if all(rank.closed for rank in view.ranks.values()):
        return []
    stopped = stopped_ranks(view, log)
    silent = sorted(set(view.ranks) - stopped - {death.rank for death in deaths if death.cause != "vanished"})
    if deaths and silent and len(silent) < len(view.ranks):
        vanished = [Death(rank=rank, when_ns=view.ranks[rank].last_ns, cause="vanished") for rank in silent]
        return [_finding(view, vanished, sorted(set(view.ranks) - set(silent)), restart)]
    if not deaths and ((blame := find_culprits(view)).is_proof or blame.cause == "finished"):
        return []  # the attempt hung before it ended, and analyzer `hangs` explains that
    if failed := [death for death in deaths if death.cause in ("exception", "exit")]:
        first = next((death for death in failed if not death.is_surely_backends), None)
        if first is not None:
            return [_finding(view, [first], sorted(set(view.ranks) - {first.rank}), restart)]
        return [_connections_lost(view, failed, [d.rank for d in deaths if d.signal], restart)]
    all_ranks = tuple(sorted(view.ranks))
    step = view.step
    terminated = bool(deaths) and all(death.signal == "SIGTERM" for death in deaths)
    interrupted = _interruption(view, log) or _request(view, log)
    if not (terminated or interrupted) and all(rank in stopped or view.ranks[rank].closed for rank in all_ranks):
        return []  # a launcher ended these ranks in order to restart; the cause is in the records of another node
    if interrupted:
        return [_ended_from_outside(view, interrupted, {}, restart)]
    seen, within = _all_seen(view), _within(view)
    is_one = len(all_ranks) == 1
    if terminated:
        were, they = ("was", "it") if is_one else ("were", "they")
        summary = (
            f"{sentence(seen)[:-1]} {were} terminated from outside {lost_at(view, step)}: {they} stopped{within} "
            "without an error."
        )
    else:  # after `kill -9` of all ranks, on a full disk, and in a copy of a live run nothing shows how they ended
        were, their, they = ("It was", "its", "it") if is_one else ("They were", "their", "they")
        disk = f"the disk could not store {their} records"
        reasons = f"or {disk}" if restart else f"{disk}, or this is a copy made while {they} ran"
        summary = (
            f"Records incomplete: {seen} stopped {lost_at(view, step)}{within}, and no record shows how. "
            f"{were} killed from outside, {reasons}."
        )
    cause = ON_PURPOSE if terminated else "killed_all"
    named = all_ranks if terminated else ()
    return [rank_lost(view, cause, summary, _how_records_end(view), step=step, restart=restart, ranks=named)]


def _ended_from_outside(view: AttemptView, how: str, killed: Mapping[int, float], restart: str) -> Finding:
    """Report a run that ended because its launcher was asked to end it. `killed`: the ranks that the launcher had to
    kill, with the seconds that it had waited for them."""
    if killed:
        who = sentence(ranks_text(sorted(killed)))[:-1]
        were = "was" if len(killed) == 1 else "were"
        end = f". {who} did not end within {min(killed.values()):.0f} s and {were} killed by the launcher."
    else:
        end = f", and {_all_seen(view)} stopped{_within(view)}."
    return rank_lost(
        view, ON_PURPOSE, f"The job was ended from outside {lost_at(view, view.step)}: {how}{end}",
        _how_records_end(view) | ({"killed_ranks": sorted(killed)} if killed else {}),
        step=view.step, restart=restart, ranks=tuple(sorted(killed or view.ranks)), is_requested=True,
    )  # fmt: skip


def _how_records_end(view: AttemptView) -> dict[str, Any]:
    return {
        "records_end_within_s": round(_spread_s(view), 3),
        "open_steps": sum(rank.step_is_open for rank in view.ranks.values()),
        "calls_in_flight": sum(rank.num_in_flight for rank in view.ranks.values()),
    }


def _within(view: AttemptView) -> str:
    return "" if len(view.ranks) == 1 else f" within {_spread_s(view):.1f} s of each other"


def _all_seen(view: AttemptView) -> str:
    """Describe the ranks that have records: all ranks of the job, or some of them if nodes write to separate disks."""
    if len(view.ranks) == 1:
        (rank,) = view.ranks
        more = "" if view.world_size == 1 else f" of {view.world_size} (the others are not recorded here)"
        return f"rank {rank}{more}"
    if len(view.ranks) == view.world_size:
        return f"all {len(view.ranks)} ranks"
    return f"all {len(view.ranks)} recorded ranks of {view.world_size}"


def _interruption(view: AttemptView, log: EventLog) -> str:
    """Clause on the signal that interrupted a launcher, as far as it was recorded; "" if none was interrupted."""
    next_ns = next_launch_ns(view, log)
    for event in (event for event in log.of(event_kinds.RUN_ENDED, attempt=view.attempt) if event.wall_ns < next_ns):
        number = event.integer("exit_code") - _SIGNALLED
        if event.text("reason") in ("interrupted", "preempted"):
            name = signal_name(-number)
            return f"its launcher got {name}" if name else "its launcher was interrupted"
    return ""


def _request(view: AttemptView, log: EventLog) -> str:
    """Clause on the signal that asked a launcher to end. It is recorded before the launcher ends, and even during
    start-up, before any progress."""
    signals = [event.text("signal") for event in log.of(event_kinds.STOP_REQUESTED, attempt=view.attempt)]
    return f"its launcher got {signals[0]}" if signals else ""


def _connections_lost(view: AttemptView, failed: Sequence[Death], ended: Sequence[int], restart: str) -> Finding:
    """Report lost connections: all errors are lost connections and no rank is missing, so no failed rank is the cause.
    `ended`: ranks that SIGTERM ended, before the loss or because of it."""
    first, of_store = failed[0], [death for death in failed if death.is_of_store]
    is_store = first.is_of_store or 2 * len(of_store) > len(failed)
    victims = of_store if is_store else failed
    cause = "store_lost" if is_store else "connection_lost"
    what = "the rendezvous store was lost" if is_store else "the ranks lost their connections to each other"
    who = f", and {ranks_text(ended)} ended by SIGTERM" if ended else ""
    unseen = view.world_size - len(view.ranks)
    missing = f"There are no records of {counted(unseen, 'other rank')} here" if unseen else "No rank is missing"
    summary = sentence(
        f"{what} {lost_at(view, view.step)}: {len(victims)} of {view.world_size} ranks report a lost connection, rank "
        f"{victims[0].rank} first. {missing}{who}"
    )
    evidence = {
        "error_type": victims[0].error_type or None,
        "message": victims[0].message[:2000],
        "victims": sorted(death.rank for death in victims),
        "first_to_report_rank": victims[0].rank,
        "terminated_ranks": sorted(ended),
        **_origin(victims[0]),
    }
    return rank_lost(view, cause, summary, evidence, step=view.step, restart=restart)


def _origin(death: Death) -> dict[str, Any]:
    """Origin of an exception: the line of the user's own code, and the last frames, innermost first."""
    if death.frame is None:
        return {}
    return {"raised_at": death.frame.text, "traceback": frame_texts(death.shown)}


def _spread_s(view: AttemptView) -> float:
    ends = [rank.last_ns for rank in view.ranks.values() if rank.last_ns]
    return (max(ends) - min(ends)) / 1e9 if ends else 0.0


def _finding(view: AttemptView, group: Sequence[Death], victims: Sequence[int], restart: str) -> Finding:
    ranks = tuple(sorted(death.rank for death in group))
    first = min(group, key=lambda death: death.when_ns)
    rank_view = view.ranks.get(first.rank)
    step = rank_view.step if rank_view else None
    # A host only enqueues a call on a device and continues, so its process did not die in that call, unless the
    # communicator's watchdog aborted the process because of the call. Nor did it die in a call that it began in
    # a phase that is over.
    calls = rank_view.calls if rank_view else ()
    if rank_view and first.signal != "SIGABRT":
        calls = tuple(call for call in calls if not call.on_device and not rank_view.may_have_left(call))
    doing = _doing(first, rank_view)
    has_place = rank_view is not None and (rank_view.phases or step is not None)
    where = f" in {calls[0].text}" if calls else f" {doing}" if has_place else ""
    at = f" ({first.frame.text})" if first.frame is not None else ""
    what = CAUSES[first.cause].record_text.format(
        signal=first.signal,
        error=": ".join(filter(None, (first.error_type, _short(first.message)))),
        asked=_asked_for(first.message),
        exit_code=first.exit_code,
        output=_exit_text(first),
        at=at,
    )
    evidence: dict[str, Any] = {
        "signal": first.signal or None,
        "exit_code": first.exit_code,
        "error_type": first.error_type or None,
        "message": first.message[:2000],
        "victims": list(victims),
        "doing": doing,
        **_origin(first),
    }
    if calls:
        evidence |= {"op": calls[0].op, "process_group": calls[0].group, "seq": calls[0].seq, "caller": calls[0].caller}
    enqueued = rank_view.enqueued if rank_view and first.signal == "SIGABRT" else ()
    if queued := [call.step for call in enqueued if call.step is not None]:
        evidence["device_step"] = min(queued)
    summary = sentence(f"{ranks_text(ranks)} {what} {lost_at(view, step)}{where}")
    if victims:
        are_all = len(victims) + len(group) >= view.world_size
        summary += " " + sentence(f"{'the other ranks' if are_all else ranks_text(victims)} ended because of it")
    return rank_lost(view, first.cause, summary, evidence, step=step, restart=restart, ranks=ranks)


def _doing(death: Death, rank_view: RankView | None) -> str | None:
    """Activity of the rank when it died. By the time an exception is recorded, the phase that raised it has ended, so
    the record of the exception names the phase."""
    if rank_view is None or not death.links:
        return rank_view.doing if rank_view else None
    if death.phase:
        return f"in {death.phase}"
    return rank_view.doing if death.phase == "" else replace(rank_view, last_phase="").doing


def _asked_for(message: str) -> str:
    """`: it asked for 2.00 GiB` if an allocator's message has the size, else the message; empty if it adds nothing."""
    asked = re.search(r"[Tt]ried to allocate (?:(\d{1,18}) bytes|([\d.]+ ?[KMGT]i?B))", message)
    if asked:
        return f": it asked for {size_text(int(asked[1])) if asked[1] else asked[2]}"
    return f": {_short(message)}" if message and "out of memory" not in message.lower() else ""


def _exit_text(death: Death) -> str:
    """The text that a rank gave to `sys.exit`."""
    message = _short(death.message) if death.frame is not None else ""
    return f": {message}" if message else ""


def _short(message: str) -> str:
    """The first line of a message, as a part of a sentence."""
    return cut(next((line.strip() for line in message.splitlines() if line.strip()), "").replace(";", ","), MAX_MESSAGE)


_insufficient = partial(Finding.insufficient, "rank_lost", "rank_lost")


# On a live run `watch` judges deaths itself, after it has joined the digests of the other nodes (`live`).
ANALYSES = (
    Analysis(kinds=("rank_lost",), run=lost_ranks, records="sampled"),
    Analysis(kinds=("excluded",), run=exclusions, live="each_tick"),
    Analysis(kinds=("resume_differs",), run=resume_mismatches, live="each_tick"),
)
