"""Lost ranks: who died first, of what, and who only died of it.

1. `deaths` gathers how every rank ended, and tells who only died of somebody else's death.
2. What is left are roots: the first in time, and others that did not follow from it. Ranks that died of the same are
   one finding.
3. Where every error is a backend's that lost a peer, and no rank is missing, nobody of those named is to blame: their
   connections were lost, or that to the rendezvous store, which is somebody else's. An error that may be a rank's own
   is taken for the root before that.
4. Records that stop on all ranks at nearly the same time, with no word from anybody, are a run that was killed whole.
5. A death that followed a standstill is the standstill's doing: `hang` explains it, and nothing is said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from analyzers.finding import Finding
from analyzers.hangs.wait_for import find_culprits
from analyzers.run.endings import Death, find_deaths
from analyzers.run.event_log import EventLog
from analyzers.run.exceptions import told_frames
from analyzers.run.snapshot import SNAPSHOT_EVENTS, AttemptView, attempts, take_snapshot
from analyzers.run.stall_limits import StallPolicy, ended_cleanly, killed_by_watch, stalled_before_death
from analyzers.source import Source, missing_tables
from probes.tape import event_kinds

__all__ = ["analyze", "explain", "restart"]

WORD_NS = 1_500_000_000
"""The launcher looks every 0.1 s and watch reads every 1 s: so long a silent death is not judged live."""


def analyze(source: Source, policy: StallPolicy | None = None, now_ns: int | None = None) -> list[Finding]:
    """Findings of kind `rank_lost`, of every attempt. `now_ns` (epoch) only while the run is alive."""
    policy = policy or StallPolicy()
    if missing_tables(source, "ranks") or not source.has("steps"):
        return [_insufficient("who took part is not recorded (tables ranks, steps)")]
    if not source.has("events"):  # without a word on how processes ended, each end would look like a kill
        return [_insufficient("no table events, which says how processes ended")]
    log = EventLog.load(source, SNAPSHOT_EVENTS)
    lives = attempts(source)
    findings = []
    for attempt in lives:
        is_last = attempt == lives[-1]
        view = take_snapshot(source, attempt, log)
        again = "" if is_last else restart(source, attempt, lives)
        found = explain(view, log, policy, is_last=is_last, now_ns=now_ns if is_last else None, again=again)
        findings += [completed(source, finding) for finding in found]
    return findings


def explain(
    view: AttemptView, log: EventLog, policy: StallPolicy, *, is_last: bool, now_ns: int | None = None, again: str = ""
) -> list[Finding]:
    """The lost ranks of one attempt."""
    if not view.ranks or (is_last and ended_cleanly(view, log, policy)):
        return []
    deaths = find_deaths(view, log)
    roots = [death for death in deaths if not death.collateral]
    if stalled_before_death(view, log, policy) and not _sudden(roots, log, view):
        return []
    if killed_by_watch(log, view.attempt):
        return []
    newest_ns = max((death.when_ns for death in deaths), default=0)
    if now_ns is not None and now_ns - newest_ns < WORD_NS and not any(death.cause != "vanished" for death in roots):
        return []  # the launcher's word on how it died is on its way
    if not roots:
        return _without_a_word(view, deaths, log, now_ns=now_ns, again=again)
    if _aborted_on_mismatch(view, roots):
        return []
    groups: dict[tuple[str, str, str], list[Death]] = {}
    for death in roots:
        groups.setdefault((death.cause, death.signal or str(death.exit_code), death.error_type), []).append(death)
    victims = sorted(set(view.ranks) - {death.rank for death in roots})
    return [_finding(view, group, victims, again) for group in groups.values()]


def _sudden(roots: Sequence[Death], log: EventLog, view: AttemptView) -> bool:
    """Whether a root died by itself and not of a standstill: a signal or error of its own, and no kill by watch."""
    return not killed_by_watch(log, view.attempt) and any(
        death.cause in ("signal", "exception", "out_of_memory") for death in roots
    )


def _aborted_on_mismatch(view: AttemptView, roots: Sequence[Death]) -> bool:
    """gloo aborts on a size mismatch: `hang` names the mismatch, which is the cause of the signal."""
    return any(death.signal == "SIGABRT" for death in roots) and find_culprits(view).is_mismatch


def _without_a_word(
    view: AttemptView, deaths: Sequence[Death], log: EventLog, *, now_ns: int | None, again: str
) -> list[Finding]:
    """No root: either everybody was killed at once, or one rank is missing among those who died of it."""
    if now_ns is not None and len({death.rank for death in deaths}) < len(view.ranks):
        return []
    if all(rank.closed for rank in view.ranks.values()):
        return []
    accounted = {death.rank for death in deaths if death.cause != "vanished"}
    accounted |= {event.integer("exit_rank") for event in log.of(event_kinds.RANK_STOPPED, attempt=view.attempt)}
    silent = sorted(set(view.ranks) - accounted)
    if deaths and silent and len(silent) < len(view.ranks):
        vanished = [Death(rank=rank, when_ns=view.ranks[rank].last_ns, cause="vanished") for rank in silent]
        return [_finding(view, vanished, sorted(set(view.ranks) - set(silent)), again)]
    if not deaths and ((blame := find_culprits(view)).is_proof or blame.cause == "finished"):
        return []  # whatever ended it, it stood still already: `hang` says why
    if raised := [death for death in deaths if death.cause in ("exception", "exit")]:
        own = next((death for death in raised if not death.is_surely_backends), None)
        if own is not None:
            return [_finding(view, [own], sorted(set(view.ranks) - {own.rank}), again)]
        return [_connections_lost(view, raised, [d.rank for d in deaths if d.signal], again)]
    everybody = tuple(sorted(view.ranks))
    step = view.step
    terminated = bool(deaths) and all(death.signal == "SIGTERM" for death in deaths)
    how = "terminated" if terminated else "killed"
    return [
        Finding(
            analyzer="rank_lost",
            kind="rank_lost",
            severity="warning" if again else "critical",
            status="fired",
            ranks=everybody,
            first_step=step,
            last_step=step,
            cause="killed_all",
            summary=f"every process was {how} from outside {_where(step)}: all {len(everybody)} ranks stop within "
            f"{_spread_s(view):.1f} s of each other, and nobody reported an error{again}",
            evidence={
                "records_end_within_s": round(_spread_s(view), 3),
                "open_steps": sum(rank.step_is_open for rank in view.ranks.values()),
                "calls_in_flight": sum(rank.num_in_flight for rank in view.ranks.values()),
            },
            advice="rank-lost-killed_all",
            attempt=view.attempt,
        )
    ]


def _connections_lost(view: AttemptView, raised: Sequence[Death], ended: Sequence[int], again: str) -> Finding:
    """Everybody reports a lost connection and nobody is missing: it is none of the ranks that failed.

    `ended`: the ranks that somebody ended by SIGTERM, before or because of it.
    """
    first, of_store = raised[0], [death for death in raised if death.is_of_store]
    is_store = first.is_of_store or 2 * len(of_store) > len(raised)
    told = of_store if is_store else raised
    cause = "store_lost" if is_store else "connection_lost"
    what = "the rendezvous store is gone" if is_store else "the ranks lost their connections to each other"
    to = "to it, and no rank is missing" if is_store else "and no rank is missing or says why"
    who = f"; somebody ended rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended[:8]))} by SIGTERM" if ended else ""
    error = f"{told[0].error_type or 'error'}: {_short(told[0].message)}"
    return Finding(
        analyzer="rank_lost",
        kind="rank_lost",
        severity="warning" if again else "critical",
        status="fired",
        first_step=view.step,
        last_step=view.step,
        cause=cause,
        summary=f"{what} {_where(view.step)}: {len(told)} of {len(view.ranks)} ranks report a lost connection {to}; "
        f"rank {told[0].rank} first, {error}{who}{again}",
        evidence={
            "error_type": told[0].error_type or None,
            "message": told[0].message[:2000],
            "victims": sorted(death.rank for death in told),
            "first_to_report_rank": told[0].rank,
            "terminated_ranks": sorted(ended),
            **_raised_at(told[0]),
        },
        advice=f"rank-lost-{cause}",
        attempt=view.attempt,
    )


def _raised_at(death: Death) -> dict[str, Any]:
    """Where an exception was raised: the line of the user's own code, and the last frames, innermost first."""
    if death.frame is None:
        return {}
    return {"raised_at": death.frame.text, "traceback": told_frames(death.origin)}


def _spread_s(view: AttemptView) -> float:
    ends = [rank.last_ns for rank in view.ranks.values() if rank.last_ns]
    return (max(ends) - min(ends)) / 1e9 if ends else 0.0


def _finding(view: AttemptView, group: Sequence[Death], victims: Sequence[int], again: str) -> Finding:
    ranks = tuple(sorted(death.rank for death in group))
    first = min(group, key=lambda death: death.when_ns)
    own = view.ranks.get(first.rank)
    step = own.step if own else None
    calls = own.calls if own else ()
    where = f" {own.doing}" if own and not calls else f" in {calls[0].text}" if calls else ""
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
    at = f" ({first.frame.text})" if first.frame is not None else ""
    what = {
        "signal": f"died of {first.signal}",
        "exception": f"died of {first.error_type}: {_short(first.message)}{at}",
        "out_of_memory": f"ran out of memory: {_short(first.message)}{at}",
        "exit": f"ended with exit code {first.exit_code}",
        "vanished": "is gone without a word" if len(ranks) == 1 else "are gone without a word",
    }[first.cause]
    evidence: dict[str, Any] = {
        "signal": first.signal or None,
        "exit_code": first.exit_code,
        "error_type": first.error_type or None,
        "message": first.message[:2000],
        "victims": list(victims),
        "doing": own.doing if own else None,
        **_raised_at(first),
    }
    if calls:
        evidence |= {"op": calls[0].op, "process_group": calls[0].group, "seq": calls[0].seq, "caller": calls[0].caller}
    return Finding(
        analyzer="rank_lost",
        kind="rank_lost",
        severity="warning" if again else "critical",
        status="fired",
        ranks=ranks,
        first_step=step,
        last_step=step,
        cause=first.cause,
        summary=f"{who} {what} {_where(step)}{where}{'; the others are victims' if victims else ''}{again}",
        evidence=evidence,
        advice=f"rank-lost-{first.cause}",
        attempt=view.attempt,
    )


def completed(source: Source, finding: Finding) -> Finding:
    """The finding with what only the store knows: memory, or where the rendezvous store was."""
    if finding.cause == "out_of_memory":
        return _with_memory(source, finding)
    return _with_host(source, finding) if finding.cause == "store_lost" else finding


def _with_host(source: Source, finding: Finding) -> Finding:
    """Where the store was: with the first rank, or the launcher of its node."""
    found = source.rows(
        "SELECT arg_max(node_rank, wall_ns), arg_max(host, wall_ns) FROM ranks WHERE attempt = ? AND rank = 0",
        [finding.attempt],
    )
    node, host = found[0] if found else (None, None)
    if host is None:
        return finding
    place = f"node {node if node is not None else 0}, {host}"
    summary = f"{finding.summary}; it was on {place}: in the launcher there, or in rank 0"
    return replace(finding, summary=summary, evidence={**finding.evidence, "store_node": node, "store_host": host})


def _with_memory(source: Source, finding: Finding) -> Finding:
    """Its last steps' memory beside that of its peers: a leak grows, an uneven batch does not."""
    marks = ", ".join("?" * len(finding.ranks))
    ((first, last, highest, peers),) = source.rows(
        f"""
        SELECT arg_min(memory_bytes, start_ns) FILTER (own), arg_max(memory_bytes, start_ns) FILTER (own),
               max(memory_bytes) FILTER (own), CAST(median(memory_bytes) FILTER (NOT own AND step >= newest) AS BIGINT)
        FROM (SELECT *, rank IN ({marks}) AS own, max(step) OVER () - 50 AS newest FROM steps
              WHERE attempt = ? AND memory_bytes IS NOT NULL)
        """,
        [*finding.ranks, finding.attempt],
    )
    memory = {"memory_first_bytes": first, "memory_last_bytes": last, "memory_highest_bytes": highest}
    return replace(finding, evidence={**finding.evidence, **memory, "memory_of_peers_bytes": peers})


def restart(source: Source, attempt: int, lives: Sequence[int]) -> str:
    """What happened next, for a sentence: ", restarted as attempt 1, resumed at step 30"."""
    after = next((life for life in lives if life > attempt), None)
    if after is None:
        return ""
    ((step,),) = source.rows("SELECT min(step) FROM steps WHERE attempt = ?", [after])
    return f"; restarted as attempt {after}" + (f", resumed at step {step}" if step is not None else "")


def _where(step: int | None) -> str:
    return "before the first step" if step is None else f"at step {step}"


def _short(message: str) -> str:
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return line if len(line) <= 160 else line[:157] + "..."


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("rank_lost", "rank_lost", f"deaths of ranks cannot be told for sure: {why}")
