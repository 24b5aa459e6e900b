"""Lost ranks: who died first, of what, and who only died of it.

1. Deaths are gathered from the launcher (`rank_exit`), the rank itself (`exception`) and `watch` (`rank_state` dead).
2. A death is collateral if it says so (connection closed by peer, timed out, terminated), if it is an error inside a
   collective after somebody else's death, or if watch or the agent ended the process after another failure.
3. What is left are roots: the first in time, and others that did not follow from it. Ranks that died of the same are
   one finding.
4. Records that stop on all ranks at nearly the same time, with no word from anybody, are a run that was killed whole.
5. A death that followed a standstill is the standstill's doing: `hang` explains it, and nothing is said here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .eventlog import EventLog
from .finding import Finding
from .snapshot import SNAPSHOT_EVENTS, AttemptView, attempts, take_snapshot
from .source import Source, missing_tables
from .stall import StallPolicy, ended_cleanly, killed_by_watch, stalled_before_death
from .waitfor import find_culprits

__all__ = ["Death", "analyze", "explain", "find_deaths", "restart"]

COLLATERAL = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by (the )?(peer|remote)|timed? ?out|broken pipe|remote ?error"
    r"|pair closure|heartbeat|terminat|SIGTERM|aborted by|peer (is )?(gone|closed)|SignalException|tcpstore",
    re.IGNORECASE,
)
"""What an error says that was made by somebody else's death."""
OUT_OF_MEMORY = re.compile(
    r"MemoryError|OutOfMemoryError|out of memory|can't allocate memory|cannot allocate memory|bad_alloc", re.IGNORECASE
)
"""What an error says when there was no memory left, on a device or on the host."""
WORD_NS = 1_500_000_000
"""The launcher looks every 0.1 s and watch reads every 1 s: so long a silent death is not judged live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How one rank ended. `cause` is exception, signal, out_of_memory, exit or vanished."""

    rank: int
    when_ns: int
    cause: str
    signal: str = ""
    exit_code: int | None = None
    error_type: str = ""
    message: str = ""
    collateral: bool = False


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
        findings += [
            _with_memory(source, finding) if finding.cause == "out_of_memory" else finding for finding in found
        ]
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


def find_deaths(view: AttemptView, log: EventLog) -> list[Death]:
    """Every rank that died in the attempt, in order of time, roots told from collateral ones."""
    found: dict[int, Death] = {}
    for event in log.of("exception", attempt=view.attempt):
        if event.rank >= 0 and event.rank not in found:
            said = f"{event.text('type')}: {event.text('message')}"
            found[event.rank] = Death(
                rank=event.rank,
                when_ns=event.wall_ns,
                cause="out_of_memory" if OUT_OF_MEMORY.search(said) else "exception",
                error_type=event.text("type", "Exception"),
                message=event.text("message"),
            )
    for event in log.of("rank_exit", attempt=view.attempt):
        rank, name = event.integer("exit_rank"), event.text("signal")
        code = event.integer("exit_code", 0)
        if rank in found or rank < 0 or (code == 0 and not name):
            continue
        if not name and rank in view.ranks and view.ranks[rank].closed:
            continue  # it ended in order: the code says what the run came to (given up), not what the rank died of
        exhausted = event.text("out_of_memory")
        cause = "out_of_memory" if exhausted else "signal" if name else "exit"
        message = f"killed by the kernel: {exhausted} exhausted" if exhausted else event.text("message")
        found[rank] = Death(rank=rank, when_ns=event.wall_ns, cause=cause, signal=name,
                            exit_code=code, message=message)  # fmt: skip
    for event in log.of("rank_state", attempt=view.attempt):
        rank = event.integer("state_rank")
        if event.text("state") == "dead" and rank in view.ranks and rank not in found and not view.ranks[rank].closed:
            found[rank] = Death(rank=rank, when_ns=event.wall_ns, cause="vanished")
    deaths = sorted(found.values(), key=lambda death: (death.when_ns, death.rank))
    return [_judged(death, deaths, view) for death in deaths]


def _judged(death: Death, deaths: Sequence[Death], view: AttemptView) -> Death:
    others = [other for other in deaths if other.rank != death.rank]
    # watch sees the processes that the agent ended, too: a silent end counts only where nobody else has a reason.
    reasons = [other for other in others if other.cause != "vanished" and not _blames_others(other)]
    if death.cause == "vanished":
        collateral = bool(reasons) or sum(other.cause == "vanished" for other in deaths) == len(view.ranks)
    elif death.signal and death.signal != "SIGTERM":
        collateral = False
    else:
        in_call = death.rank in view.ranks and bool(view.ranks[death.rank].calls)
        earlier = [reason for reason in reasons if reason.when_ns <= death.when_ns or reason.signal]
        collateral = _blames_others(death) or (in_call and bool(earlier))
    return replace(death, collateral=collateral)


def _blames_others(death: Death) -> bool:
    return COLLATERAL.search(f"{death.error_type} {death.message} {death.signal}") is not None


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
    silent = sorted(set(view.ranks) - {death.rank for death in deaths if death.cause != "vanished"})
    if deaths and silent and len(silent) < len(view.ranks):
        vanished = [Death(rank=rank, when_ns=view.ranks[rank].last_ns, cause="vanished") for rank in silent]
        return [_finding(view, vanished, sorted(set(view.ranks) - set(silent)), again)]
    if not deaths and ((blame := find_culprits(view)).is_proof or blame.cause == "finished"):
        return []  # whatever ended it, it stood still already: `hang` says why
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
    what = {
        "signal": f"died of {first.signal}",
        "exception": f"died of {first.error_type}: {_short(first.message)}",
        "out_of_memory": f"ran out of memory: {_short(first.message)}",
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
