"""Find hangs, in which no rank makes progress. A finding names the rank for which the others wait, and the call in
which they wait.

Live and post-mortem analysis share one function. With `now_ns`, the silence is measured until now. Otherwise it is
measured until the first death (a kill by `watch`, a timeout of the other ranks, the launcher's end).

1. `run.live.stall_limits` decides whether the silence is longer than this run's limit in this phase.
2. `culprits` separates culprits from waiting ranks, by sequence numbers and calls in flight.
3. Two faults are reported even without silence if the records end without a reason: a stopped process, and a mismatch
   of operation, type or size. A mismatch is also reported if a rank aborted in the call, as gloo does.
4. `device_evidence` adds what the culprits' devices and hosts recorded, and names the link on which a call is stuck.
5. `stacks` groups the stacks of all ranks. Ranks with other stacks than their peers come first.
6. `deaths` reports ranks that died: in a hang, processes are alive and make no progress. While the run is live, the
   launcher handles deaths. A lost node is the exception: ranks that still wait for it hang, even if others have died
   because of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from analyzers.analysis import Analysis
from analyzers.finding import Finding
from analyzers.hangs.culprits import HangCause, find_culprits
from analyzers.hangs.desync import desynced, with_desync
from analyzers.hangs.device_evidence import with_devices, with_link
from analyzers.hangs.past_standstills import past_standstills
from analyzers.hangs.stacks import StacksAtHang, read_stack, roles_of
from analyzers.hangs.summary import behind_step, hang_summary
from analyzers.hangs.waiting_calls import evidence_of, waiting_calls
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, attempts, take_snapshot
from analyzers.run.ends.endings import Death, find_deaths, stopped_ranks
from analyzers.run.ends.lost_nodes import lost_node
from analyzers.run.ends.restarts import restart_sentence
from analyzers.run.ends.stop_requests import before_stop, stop_while_training
from analyzers.run.ends.thread_errors import with_thread_errors
from analyzers.run.live.stall_limits import (
    death_ns,
    ended_cleanly,
    killed_by_watch,
    limit_s,
    stalled_s,
    watched_ns,
    watches_left_ns,
)
from analyzers.run.policy import StallPolicy, stall_policy
from analyzers.run.records.clock_set_back import in_order
from analyzers.run.records.event_log import Event, EventLog
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.run.records.standstills import newest_start_ns
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from analyzers.wording import ranks_text
from probes.tape import event_kinds

__all__ = ["ANALYSES", "OF_FILES", "hang_finding", "hang_of_attempt", "hangs", "silent_nodes"]


def hangs(source: Source, scope: Scope, policy: StallPolicy | None = None) -> list[Finding]:
    """Findings of kind `hang`, at most one per attempt. Without a policy, the run's own stall limits apply."""
    policy = policy or stall_policy(scope.manifest)
    absent = missing_tables(source, "ranks", "steps", "collectives")
    if absent and (absent != ["collectives"] or source.rows("SELECT 1 FROM ranks WHERE world_size > 1 LIMIT 1")):
        text = f"Hangs were not checked: {not_recorded(absent)}."
        return [Finding.insufficient("hang", "hang", text, evidence=missing(absent))]
    log = in_order(EventLog.load(source, SNAPSHOT_EVENTS), source)
    known = attempts(source)
    findings = []
    for attempt in known:
        if scope.attempt not in (None, attempt):
            continue
        is_last = attempt == known[-1]
        view = take_snapshot(source, attempt, log)
        found = hang_of_attempt(
            view,
            log,
            policy,
            is_last=is_last,
            now_ns=scope.now_ns if is_last else None,
            restart=restart_sentence(source, attempt, known),
            stacks=StacksAtHang(scope.stacks_dir, roles_of(source, attempt)) if scope.stacks_dir else None,
        )
        if found:
            found = with_desync(source, with_link(source, found))
            findings.append(with_devices(source, found, view.last_ns))
        elif scope.now_ns is None and (silent_s := _silent_until_stopped(source, view, log, policy)):
            text = (
                f"Whether {ranks_text(tuple(view.ranks))} hung at step {view.step} is unknown: nothing was recorded "
                f"for {silent_s:.0f} s until the run was asked to stop, but processes computed or read files."
            )
            findings.append(Finding.insufficient("hang", "hang", text))
    return findings


def _silent_until_stopped(source: Source, view: AttemptView, log: EventLog, policy: StallPolicy) -> float:
    """Seconds from the newest start of work to a request to stop, if `watch` saw ranks compute between them, or 0."""
    stop_ns = min((event.wall_ns for event in log.of(event_kinds.STOP_REQUESTED, attempt=view.attempt)), default=0)
    started_ns = newest_start_ns(source, view.attempt)
    worked = (event.wall_ns for event in log.of(event_kinds.SILENT_WORK, attempt=view.attempt))
    silent_s = (stop_ns - started_ns) / 1e9
    # The longest step is no measure here, because it may be the interrupted step itself.
    is_long = silent_s > max(policy.floor_s, policy.step_factor * view.median_step_ns / 1e9)
    return silent_s if is_long and any(started_ns < when_ns < stop_ns for when_ns in worked) else 0.0


def hang_of_attempt(
    view: AttemptView,
    log: EventLog,
    policy: StallPolicy,
    *,
    is_last: bool,
    now_ns: int | None = None,
    restart: str = "",
    stacks: StacksAtHang | None = None,
) -> Finding | None:
    """Find the hang of one attempt, or None. `restart`: sentence about the restart that followed."""
    if not view.ranks or ended_cleanly(view, log, policy, is_last=is_last):
        return None
    deaths = find_deaths(view, log)
    by_watch = killed_by_watch(log, view.attempt)
    roots = [death for death in deaths if not death.collateral and not death.is_from_outside]
    sudden = [death for death in before_stop(roots, view, log) if death.cause in ("signal", "exception", "exit")]
    if view.reported_stall_ns is not None and len(sudden) == len(view.ranks) and all(d.signal for d in sudden):
        sudden = []  # all ranks were killed during a hang that `watch` had reported, so the kills did not cause it
    found = find_culprits(view)
    aborted = any(death.signal == "SIGABRT" for death in deaths) and found.is_mismatch
    if not aborted and not by_watch and stop_while_training(view, log, policy) is not None:
        return None  # no hang: the run was asked to stop while it still made progress
    still_wait = _wait_for_lost_node(view, log, deaths) if now_ns is not None and not by_watch else frozenset()
    if still_wait:
        found = replace(found, waiting=tuple(rank for rank in found.waiting if rank in still_wait))
    if sudden and not by_watch and not aborted and not still_wait:
        return None  # no hang: the deaths explain why the other ranks were silent
    is_left_to_launchers = now_ns is not None and not by_watch and not aborted and view.reported_stall_ns is None
    if deaths and is_left_to_launchers and not still_wait:
        return None
    left_ns = watches_left_ns(view, log)
    if now_ns is not None and left_ns is not None:
        now_ns = min(now_ns, left_ns)
    seen_ns = watched_ns(view, log)
    # A launcher that was just killed has not recorded an end, but `watch` has reported the hang.
    ended_ns = None if still_wait else death_ns(view, log)
    until_ns = ended_ns or now_ns or seen_ns or view.reported_stall_ns
    if until_ns is None and not (found.is_proof or found.cause == "finished"):
        return None  # it is unknown how long the ranks were silent, and a run that was killed looks the same
    reference_ns = until_ns or view.last_ns
    is_stalled = view.reported_stall_ns is not None or stalled_s(view, reference_ns, policy) is not None
    # `watch` takes stacks only if a run stalls. So if the silence lasted until it took them, no other proof is needed.
    if not is_stalled and not aborted and not by_watch and until_ns is not None and until_ns != seen_ns:
        return None
    silent_s = max(0.0, (reference_ns - view.last_ns) / 1e9)
    frames = {rank: read_stack(stacks.folder, view.attempt, rank) for rank in found.culprits[:8]} if stacks else {}
    finding = hang_finding(view, found, silent_s, frames, is_over=bool(restart))
    evidence: dict[str, Any] = {**finding.evidence, "limit_s": round(limit_s(view, policy), 1)}
    if groups := stacks.of(view, found.culprits) if stacks else []:
        evidence["stack_groups"] = groups
    finding = with_thread_errors(replace(finding, evidence=evidence), view, log)
    return replace(finding, summary=finding.summary + restart)


def _wait_for_lost_node(view: AttemptView, log: EventLog, deaths: Sequence[Death]) -> frozenset[int]:
    """Ranks that are still in calls after a node was lost and other ranks died because of it."""
    lost = lost_node(view, log, deaths) if deaths else None
    if lost is None:
        return frozenset()
    gone = {*lost.integers("ranks"), *(death.rank for death in deaths), *stopped_ranks(view, log)}
    return frozenset(r for r, state in view.ranks.items() if state.calls and not state.closed and r not in gone)


def hang_finding(
    view: AttemptView,
    found: HangCause,
    silent_s: float = 0.0,
    stacks: Mapping[int, list[str]] = MappingProxyType({}),
    *,
    is_over: bool = False,
) -> Finding:
    """Build the finding for a cause, from records of any source. `is_over`: the job went on with another attempt."""
    first = view.ranks.get(found.culprits[0]) if found.culprits else None
    step = (found.call.step if found.call and found.call.step is not None else None) or (first.step if first else None)
    evidence: dict[str, Any] = {
        "silent_s": round(silent_s, 1),
        "waiting_ranks": list(found.waiting),
        "doing": {str(rank): view.ranks[rank].doing for rank in found.culprits[:16] if rank in view.ranks},
    }
    if found.call is not None:
        evidence |= {
            "op": found.call.op,
            "process_group": found.call.group,
            "seq": found.call.seq,
            "bytes": found.call.num_bytes,
            "caller": found.call.caller,
        }
        if found.call.host_only and found.cause == "all_entered":
            evidence["host_only"] = True
        places = {rank: (found.call.group, rank) for rank in found.culprits[:16]}
        evidence["last_seq_of_culprits"] = {
            str(rank): view.last_seq.get(place, view.may_have_entered.get(place)) for rank, place in places.items()
        }
    if calls := evidence_of(waiting_calls(view, found)):
        evidence["waiting_calls"] = calls
    if found.unseen:
        evidence["unseen_ranks"] = list(found.unseen)
    if found.absent:
        evidence["absent_ranks"] = list(found.absent)
    if found.cycle:
        evidence["cycle"] = list(found.cycle)
    if found.differs:
        evidence["differs"] = {what: list(ranks) for what, ranks in found.differs.items()}
    frames = {str(rank): lines for rank, lines in stacks.items() if lines}
    if frames:
        evidence["stacks"] = frames
    frame = next((lines[0] for lines in stacks.values() if lines), "")
    behind = behind_step(view, found)
    culprit_step = step if behind is None else behind
    return Finding(
        analyzer="hang",
        kind="hang",
        severity="warning" if is_over else "critical",
        status="fired",
        ranks=tuple(sorted({*found.culprits, *found.absent})),
        first_step=culprit_step,
        last_step=culprit_step,
        cause=found.cause,
        summary=hang_summary(view, found, step, silent_s, frame),
        evidence=evidence,
        advice=f"hang-{found.cause}",
        attempt=view.attempt,
        cost_s=round(silent_s, 1),
    )


def silent_nodes(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `node_silent`, one per silence. The machine, its `watch` or the link to the leader failed.

    The leader's `watch` records when a node's digests stop and when they return. What the node did meanwhile is in its
    own store. Live, with an attempt in the scope, only ongoing silences are returned.
    """
    log = EventLog.load(source, (event_kinds.NODE_SILENT, event_kinds.NODE_HEARD, event_kinds.CLOCK_OFFSET))
    ongoing_only = scope.is_live and scope.attempt is not None
    findings = []
    for event in log.of(event_kinds.NODE_SILENT):
        node = event.integer("node_rank")
        # The `watch` that reported the silence may have been replaced. For the new one, the first sign that the node
        # is there again is a measured clock offset.
        later = (e for e in log.of(event_kinds.CLOCK_OFFSET) if e.attempt > event.attempt)
        answers = sorted((*log.of(event_kinds.NODE_HEARD), *later), key=lambda e: e.wall_ns)
        ends = (e for e in answers if e.integer("node_rank") == node and e.wall_ns >= event.wall_ns)
        end = next(ends, None)
        if end is None or not ongoing_only:
            findings.append(_finding(event, node, end))
    return findings


def _finding(event: Event, node: int, end: Event | None) -> Finding:
    silent_s = event.number("silent_s") or 0.0
    if end is not None:
        silent_s += (end.wall_ns - event.wall_ns) / 1e9
    where = "its machine, its watch or its link to the leader"
    what = f"stopped reporting ({silent_s:.0f} s of silence when detected)"
    if event.detail.get("never_heard"):
        what = f"has not reported since the attempt began, {silent_s:.0f} s before"
    return Finding(
        analyzer="silent_node",
        kind="node_silent",
        severity="warning",
        status="fired",
        ranks=tuple(sorted(event.integers("ranks"))),
        first_step=event.step,
        last_step=event.step,
        cause="reports_again" if end is not None else "silent",
        summary=f"Node {node} was silent for {silent_s:.0f} s and reports again: {where} was down or slow."
        if end is not None
        else f"Node {node} {what}: {where} is down.",
        evidence={
            "attempt": event.attempt,
            "node_rank": node,
            "silent_s": round(silent_s, 1),
            "reports_again": end is not None,
        },
        advice="node-silent",
    )


# On a live run, `watch` judges hangs itself, after it has joined the digests of the other nodes (`live`).
OF_FILES = ("files.dumps", "files.execution_traces")
ANALYSES = (
    Analysis(kinds=("hang",), run=hangs, records="sampled"),
    Analysis(kinds=("standstill",), run=past_standstills, records="sampled"),
    Analysis(kinds=("desync",), run=desynced, live="periodic"),
    Analysis(kinds=("node_silent",), run=silent_nodes, live="each_tick"),
)
