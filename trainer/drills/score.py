"""Score of a drill run: was the fault found, and did the run recover, from its store alone.

    score = score_run(store, run.manifest(), Wanted(expected=scenario.expected, recovery="skips", steps=40))
    score.seen, score.right_kind, score.right_rank, score.finding_s, score.recovered

1. The time of a fault is read from the events `fault_injected`. Two sets of findings are scored: the findings that
   `watch` wrote during the run, with their times, and the findings of a post-mortem over the finished store.
2. A finding is right if its kind is one that the fault requires; then rank and cause are compared. If several findings
   have the right kind, the one with the right rank counts, and the others are false alarms.
3. Every other finding is a false alarm, including one that was reported live and withdrawn later.
4. A run has recovered if it did what the fault requires (a rollback, a new attempt, a stop with a report) and completed
   every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analyzers.diagnose import diagnose
from analyzers.source import Source
from probes.tape import event_kinds
from trainer.exit_codes import EXIT_GIVEN_UP
from trainer.faults.kind import Expected, Recovery
from trainer.faults.options import Fault

__all__ = ["Answer", "Score", "Statement", "Wanted", "score_run"]

NS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One finding about the run. `wall_ns` is 0 if only the post-mortem reported it."""

    kind: str
    cause: str
    ranks: tuple[int, ...]
    summary: str = ""
    attempt: int | None = None
    wall_ns: int = 0

    @property
    def what(self) -> tuple[str, tuple[int, ...], int | None]:
        """Identity of a statement: kind, ranks and attempt."""
        return (self.kind, self.ranks, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The finding about one fault. `finding_s` is None if it was not reported during the run."""

    fault: str
    rank: int
    injected: bool
    seen: str = ""
    """live, after (only the post-mortem), or empty."""
    right_rank: bool = False
    right_cause: bool = False
    finding_s: float | None = None
    finding: Statement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of one run. Times are in seconds; `steps_lost` counts steps that were run and rolled back."""

    answers: tuple[Answer, ...] = ()
    false_alarms: tuple[Statement, ...] = ()
    num_right: int = 0
    """Number of statements with the right kind and rank."""
    injected: bool = True
    recovered: bool = False
    ended: str = ""
    training_s: float | None = None
    """From the fault to the end of the first good step after it."""
    steps_lost: int = 0
    useful_s: float = 0.0
    """Time in steps that were kept."""
    span_s: float = 0.0
    """From the start of the first step to the end of the last one."""
    problems: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Expectations against which a run is scored."""

    steps: int
    faults: Sequence[Fault] = ()
    """Faults that the run should inject."""
    expected: Sequence[tuple[Fault, Expected]] = ()
    recovery: Recovery = "goes_on"
    required_events: Sequence[tuple[str, str]] = ()
    """Events that must be on record, as (kind, state)."""
    allowed: Sequence[str] = ()
    """Kinds of findings that are not false alarms, though not asked for."""


def score_run(
    source: Source,
    manifest: Mapping[str, Any],
    wanted: Wanted,
    *,
    stacks_dir: Path | None = None,
) -> Score:
    """Compare a finished run with what its faults require."""
    injected_at = _injection_times(source)
    live = _live_statements(source)
    after = [
        Statement(kind=f.kind, cause=f.cause, ranks=f.ranks, summary=f.summary, attempt=f.attempt)
        for f in diagnose(source, manifest, stacks_dir=stacks_dir).fired
    ]
    answers: list[Answer] = []
    used: list[Statement] = []
    for fault, expected in wanted.expected:
        answer = _answer(fault, expected, _peers(source, fault.rank), injected_at, live, after, used)
        answers.append(answer)
        used += [answer.finding] if answer.finding else []
    beyond = [finding for finding in (*after, *live) if finding.kind not in wanted.allowed]
    false_alarms = _distinct([finding for finding in beyond if not any(finding.what == right.what for right in used)])
    first_ns = min(
        (ns for (kind, _), ns in injected_at.items() if kind in {f.kind for f in wanted.faults}), default=None
    )
    ended, problems = _ending(source, wanted.recovery, wanted.steps)
    problems += _missing_events(source, wanted.required_events)
    took = _steps(source)
    return Score(
        answers=tuple(answers),
        false_alarms=tuple(false_alarms),
        num_right=len(_distinct([a.finding for a in answers if a.finding is not None and a.right_rank])),
        injected=all(_injection_ns(injected_at, fault) is not None for fault in wanted.faults),
        recovered=not problems,
        ended=ended,
        training_s=_training_again_s(source, first_ns, wanted.recovery),
        problems=tuple(problems),
        steps_lost=took["run"] - took["kept"],
        useful_s=took["useful_ns"] * NS,
        span_s=took["span_ns"] * NS,
    )


# ---- findings ----


def _injection_times(source: Source) -> dict[tuple[str, int], int]:
    """Return {(kind, rank): time of its first injection, epoch nanoseconds}."""
    rows = source.rows(
        "SELECT json_extract_string(detail, '$.fault'), rank, min(wall_ns) FROM events "
        f"WHERE kind = '{event_kinds.FAULT_INJECTED}' GROUP BY ALL"
    )
    return {(str(kind), int(rank)): int(wall_ns) for kind, rank, wall_ns in rows}


def _injection_ns(injected_at: Mapping[tuple[str, int], int], fault: Fault) -> int | None:
    times = [ns for (kind, rank), ns in injected_at.items() if kind == fault.kind and fault.rank in (-1, rank)]
    return min(times, default=None)


def _live_statements(source: Source) -> list[Statement]:
    rows = source.rows(
        "SELECT finding_kind, cause, finding_ranks, summary, attempt, wall_ns FROM findings "
        "WHERE status IN ('fired', 'suspect') ORDER BY wall_ns"
    )
    return [
        Statement(
            kind=kind or "",
            cause=cause or "",
            ranks=tuple(int(rank) for rank in ranks or ()),
            summary=summary or "",
            attempt=attempt,
            wall_ns=wall_ns,
        )
        for kind, cause, ranks, summary, attempt, wall_ns in rows
    ]


def _answer(
    fault: Fault,
    expected: Expected,
    peers: frozenset[int],
    injected_at: Mapping[tuple[str, int], int],
    live: Sequence[Statement],
    after: Sequence[Statement],
    used: Sequence[Statement],
) -> Answer:
    """The finding about one fault. `used`: findings already assigned to earlier faults."""
    when_ns = _injection_ns(injected_at, fault)
    free = [finding for finding in (*after, *live) if not any(finding.what == other.what for other in used)]
    right_kind = [finding for finding in free if finding.kind in expected.kinds]
    right = [finding for finding in right_kind if _names_right_ranks(finding, fault, expected, peers)]
    best = min(
        right or right_kind,
        key=lambda finding: (finding.cause not in expected.causes, finding.attempt or 0),
        default=None,
    )
    if when_ns is None or best is None:
        return Answer(fault=fault.kind, rank=fault.rank, injected=when_ns is not None)
    in_time = [finding for finding in live if finding.what == best.what and finding.wall_ns >= when_ns]
    return Answer(
        fault=fault.kind,
        rank=fault.rank,
        injected=True,
        seen="live" if in_time else "after",
        right_rank=bool(right),
        right_cause=best.cause in expected.causes,
        finding_s=round((in_time[0].wall_ns - when_ns) * NS, 2) if in_time else None,
        finding=best,
    )


def _peers(source: Source, rank: int) -> frozenset[int]:
    """The rank's tensor-parallel group: ranks with the same coordinates except for `tp`."""
    rows = source.rows(
        """
        WITH places AS (SELECT rank, (arg_max(pp, wall_ns), arg_max(dp_replicate, wall_ns), arg_max(dp_shard, wall_ns),
                                      arg_max(ep, wall_ns), arg_max(cp, wall_ns)) AS place FROM ranks GROUP BY rank)
        SELECT rank FROM places WHERE place = (SELECT place FROM places WHERE rank = ?)
        """,
        [rank],
    )
    return frozenset(int(row[0]) for row in rows) | {rank}


def _names_right_ranks(finding: Statement, fault: Fault, expected: Expected, peers: frozenset[int]) -> bool:
    if expected.rank == "none":
        return len(finding.ranks) != 1
    if expected.rank == "tensor_group":
        return fault.rank in finding.ranks and peers.issuperset(finding.ranks)
    if expected.rank == "among":
        return fault.rank in finding.ranks
    return finding.ranks == (fault.rank,)


def _distinct(findings: Sequence[Statement]) -> list[Statement]:
    return list({one.what: one for one in reversed(findings)}.values())[::-1]


# ---- recovery ----


def _ending(source: Source, recovery: Recovery, steps: int) -> tuple[str, list[str]]:
    """The end of the run, and why it does not count as recovered."""
    rows = source.rows(
        "SELECT json_extract_string(detail, '$.reason'), CAST(json_extract_string(detail, '$.exit_code') AS BIGINT) "
        f"FROM events WHERE kind = '{event_kinds.RUN_ENDED}'"
    )
    reason, code = rows[-1] if rows else ("", None)
    counts = {kind: int(count) for kind, count in source.rows("SELECT kind, count(*) FROM events GROUP BY kind")}
    problems = []
    if recovery == "stops":
        if code != EXIT_GIVEN_UP or not counts.get(event_kinds.RUN_STOPPED):
            problems.append(f"the run should have stopped with a report, but: {reason or 'no end was recorded'}")
        return "stopped", problems
    if reason != "finished":
        problems.append(f"the run did not finish: {reason}" if reason else "the run recorded no end")
    ((fewest,),) = source.rows(
        "SELECT min(taken) FROM (SELECT count(DISTINCT step) FILTER (committed) AS taken FROM steps GROUP BY rank)"
    )
    if (fewest or 0) < steps:
        problems.append(f"a rank recorded only {fewest or 0} of {steps} steps")
    if recovery == "skips" and not counts.get(event_kinds.ROLLBACK):
        problems.append("the bad step was not rolled back")
    if recovery == "restarts" and counts.get(event_kinds.ATTEMPT_STARTED, 0) < 2:
        problems.append("there was no restart")
    return str(reason or "no end"), problems


def _missing_events(source: Source, required: Sequence[tuple[str, str]]) -> list[str]:
    """The required events, (kind, state), that were not recorded."""
    recorded = source.rows("SELECT kind, json_extract_string(detail, '$.state') FROM events GROUP BY ALL")
    missing = [
        (kind, state) for kind, state in required if not any(k == kind and state in ("", s) for k, s in recorded)
    ]
    return [f"no event {kind}{f' ({state})' if state else ''} was written" for kind, state in missing]


def _training_again_s(source: Source, injected_ns: int | None, recovery: Recovery) -> float | None:
    """Seconds from the fault to the end of the first good step after the recovery action."""
    if injected_ns is None or recovery not in ("skips", "restarts"):
        return None
    restarted = f"kind = '{event_kinds.ATTEMPT_STARTED}' AND attempt > 0"
    after = f"kind = '{event_kinds.ROLLBACK}'" if recovery == "skips" else restarted
    ((again_ns,),) = source.rows(
        f"""
        SELECT min(start_ns + duration_ns) FROM steps WHERE committed AND start_ns > (
            SELECT min(wall_ns) FROM events WHERE {after} AND wall_ns > ?)
        """,
        [injected_ns],
    )
    return None if again_ns is None else round((again_ns - injected_ns) * NS, 2)


def _steps(source: Source) -> dict[str, int]:
    """Values of the lowest rank: number of steps that ran, number of steps that were kept, time in the kept steps, and
    time from the first to the last step."""
    ((run, kept, useful_ns, span_ns),) = source.rows(
        """
        WITH one AS (SELECT * FROM steps WHERE rank = (SELECT min(rank) FROM steps)),
             kept AS (SELECT * FROM one WHERE committed
                      QUALIFY row_number() OVER (PARTITION BY step ORDER BY start_ns DESC) = 1)
        SELECT (SELECT count(*) FROM one), (SELECT count(*) FROM kept), (SELECT sum(duration_ns) FROM kept),
               (SELECT max(start_ns + coalesce(duration_ns, 0)) - min(start_ns) FROM one)
        """
    )
    return {"run": run, "kept": kept, "useful_ns": int(useful_ns or 0), "span_ns": int(span_ns or 0)}
