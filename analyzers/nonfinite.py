"""Non-finite values: which rank, parameter and phase made the first NaN or Inf, and what the run did about it.

1. Bad steps are those whose loss, local loss, gradient norm or gradient count is not finite. Consecutive bad runs of
   steps are one episode, and its first step is the one that is explained; what follows is fallout.
2. A reduction hands a NaN to every member, so each input is flagged before it is reduced. The earliest flagged
   collective of the step, by the time since each rank's own begin of the step (no clocks are compared), names the
   ranks whose input was already bad. Later flags are fallout of that result.
3. Without flags the ranks whose own loss is not finite are named; without those, nobody is (`suspect`).
4. Phase: forward if a named rank's own loss was not finite; reduction if every gradient went into its reduction finite
   and what came out is not (the first flags, if any, are the norm's); else backward.
5. Parameter: backward runs from the loss to the input, so among the parameters that are not finite the last one in
   the model's order was first. Sharded gradients are looked for on all ranks: the bad element lies in one shard.
6. If the step was replayed (`analyzers.replayed`), whether it came back and with which operation says more than all of
   that; it also names ranks where nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .eventlog import EventLog
from .finding import Finding
from .replayed import REPLAY_EVENTS, Replayed, find_replay
from .response import RESPONSE_EVENTS, Response, respond
from .source import Source, missing_tables

__all__ = ["NonFinitePolicy", "StepEvidence", "analyze", "locate"]

Phase = Literal["forward", "backward", "reduction", "unknown"]
_EVENTS = (*RESPONSE_EVENTS, *REPLAY_EVENTS, "nonfinite", "loss_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinitePolicy:
    """Limits of the search; that a NaN is one needs no threshold."""

    max_episodes: int = 50
    """Episodes explained one by one (findings); a run with more has one cause, and the first ones show it."""
    since_step: int = 0
    """Only steps from here on (the live view)."""
    ended_only: bool = False
    """Of the newest attempt only steps that have ended (the live view): what is done about a step is done before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's row of the step. None = not recorded."""

    rank: int
    local_loss: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    nonfinite_count: int | None = None
    committed: bool | None = None
    batch_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One rank's input of one collective: whether it was non-finite, and when after the rank's begin of the step."""

    rank: int
    group: str
    seq: int
    op: str
    since_begin_ns: int
    nonfinite: bool
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """What is known of one bad step. `parameters` holds (rank, name, non-finite elements) in the model's order."""

    rows: Sequence[RankStep]
    flags: Sequence[Flag] = ()
    parameters: Sequence[tuple[int, str, int]] = ()
    reported_phase: str = ""
    reported_parameters: Sequence[str] = ()
    data_parallel: bool = False
    """Whether every gradient is reduced over other ranks before the optimizer's phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where it began. `ranks` is empty if nothing names one; `how` says which evidence did."""

    ranks: tuple[int, ...]
    phase: Phase
    parameter: str
    how: str
    group: str = ""
    seq: int | None = None
    op: str = ""
    others: tuple[str, ...] = field(default=())


def analyze(source: Source, policy: NonFinitePolicy | None = None) -> list[Finding]:
    """Findings of kind `non_finite`, one an episode."""
    policy = policy or NonFinitePolicy()
    if missing_tables(source, "steps"):
        return [_insufficient("the table of steps is missing")]
    log = EventLog.load(source, _EVENTS)
    episodes = _episodes(source, policy, log)
    return [_explain(source, log, episode) for episode in episodes[: policy.max_episodes]]


def locate(evidence: StepEvidence) -> Location:
    """Name ranks, phase and parameter of one bad step. Pure."""
    parameter, others = _parameter(evidence)
    bad_loss = tuple(sorted(row.rank for row in evidence.rows if _bad(row.local_loss)))
    good_loss = [row.rank for row in evidence.rows if row.local_loss is not None and not _bad(row.local_loss)]
    flagged = [flag for flag in evidence.flags if flag.nonfinite]
    if flagged and not bad_loss and (_only_after_reduction(evidence, flagged) or _by_sharding(evidence, flagged)):
        return Location(ranks=(), phase="reduction", parameter=parameter, how="all_inputs_finite", others=others)
    if flagged:
        ranks, first = _earliest(flagged)
        forward = bool(set(ranks) & set(bad_loss))
        if forward and first.phase != "forward" and set(ranks) <= set(bad_loss):
            ranks = bad_loss  # a loss is made before data ranks reduce anything: whose is bad made it so
        return Location(
            ranks=ranks,
            phase="forward" if forward else "backward",
            parameter="" if forward else parameter,
            how="flag",
            group=first.group,
            seq=first.seq,
            op=first.op,
            others=others,
        )
    if bad_loss:
        named = bad_loss if good_loss or len(evidence.rows) == 1 else tuple(sorted(row.rank for row in evidence.rows))
        return Location(ranks=named, phase="forward", parameter="", how="local_loss", others=others)
    if len(evidence.rows) == 1:
        phase: Phase = "backward" if parameter or evidence.rows[0].nonfinite_count else "unknown"
        return Location(ranks=(evidence.rows[0].rank,), phase=phase, parameter=parameter, how="single", others=others)
    if evidence.flags and good_loss:
        return Location(ranks=(), phase="reduction", parameter=parameter, how="all_inputs_finite", others=others)
    reported = evidence.reported_phase
    phase = "backward" if reported == "backward" or parameter else "forward" if reported == "forward" else "unknown"
    return Location(ranks=(), phase=phase, parameter=parameter, how="nothing", others=others)


def _only_after_reduction(evidence: StepEvidence, flagged: Sequence[Flag]) -> bool:
    """Whether gradients went finite into their reduction and not out of it: then the first flags are those of the
    norm, whose input is made from what was reduced. Only where every gradient is reduced at all: a tensor-parallel
    rank's own NaN meets no other reduction than the norm's."""
    if not evidence.data_parallel or any(flag.phase != "optimizer" for flag in flagged):
        return False
    return any(flag.phase == "backward" for flag in evidence.flags)


def _by_sharding(evidence: StepEvidence, flagged: Sequence[Flag]) -> bool:
    """Whether what came out of a reduce-scatter was bad although everything that went into it was finite: with
    replicas of shards, the next reduction, over the replicas, is the first that sees it."""
    ranks, first = _earliest(flagged)
    by_call: dict[tuple[str, int], list[Flag]] = {}
    for flag in evidence.flags:
        by_call.setdefault((flag.group, flag.seq), []).append(flag)
    for flag in by_call[first.group, first.seq]:
        if flag.rank not in ranks:
            continue
        earlier = [f for f in evidence.flags if f.rank == flag.rank and f.since_begin_ns < flag.since_begin_ns]
        before = max(earlier, key=lambda f: f.since_begin_ns, default=None)
        if before is None or before.op != "reduce_scatter" or before.group == flag.group:
            return False
        if any(member.nonfinite for member in by_call[before.group, before.seq]):
            return False
    return first.op == "all_reduce" and first.phase == "backward"


def _earliest(flagged: Sequence[Flag]) -> tuple[tuple[int, ...], Flag]:
    """The members with a bad input of the earliest flagged collective.

    A later collective of the same group counts neither for nor against anybody: its inputs are made from the result
    of the first. Groups that share no rank with it had no part in it either.
    """
    first = min(flagged, key=lambda flag: (flag.since_begin_ns, flag.seq, flag.rank))
    same = [flag for flag in flagged if (flag.group, flag.seq) == (first.group, first.seq)]
    return tuple(sorted({flag.rank for flag in same})), first


def _parameter(evidence: StepEvidence) -> tuple[str, tuple[str, ...]]:
    """The parameter nearest the loss among those that are not finite, and all of them."""
    seen: dict[str, int] = {}
    for _, name, count in evidence.parameters:
        seen[name] = seen.get(name, 0) + count
    bad = [name for name, count in seen.items() if count > 0] or list(evidence.reported_parameters)
    return (bad[-1] if bad else ""), tuple(bad)


def _bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


# ---- from the store ----


@dataclass(frozen=True, slots=True)
class _Episode:
    attempt: int
    step: int
    turn: int  # which run of this step within the attempt, from 0
    last_step: int
    num_steps: int


def _episodes(source: Source, policy: NonFinitePolicy, log: EventLog) -> list[_Episode]:
    """Runs of bad steps in the order in which they ran; a step that was run twice is looked at twice."""
    rows = source.rows(
        """
        WITH bad AS (
            SELECT DISTINCT attempt, step FROM steps
            WHERE step >= ? AND (NOT isfinite(loss) OR NOT isfinite(local_loss) OR NOT isfinite(grad_norm)
                                 OR nonfinite_count > 0)
        ), turns AS (
            SELECT attempt, rank, step, start_ns,
                   row_number() OVER (PARTITION BY attempt, rank, step ORDER BY start_ns) - 1 AS turn,
                   coalesce(NOT isfinite(loss), false) OR coalesce(NOT isfinite(local_loss), false)
                   OR coalesce(NOT isfinite(grad_norm), false) OR coalesce(nonfinite_count > 0, false) AS is_bad
            FROM steps SEMI JOIN bad USING (attempt, step)
        )
        SELECT attempt, step, turn, min(start_ns), bool_or(is_bad) FROM turns GROUP BY ALL ORDER BY attempt, 4
        """,
        [policy.since_step],
    )
    found = [(attempt, step, turn) for attempt, step, turn, _, is_bad in rows if is_bad]
    # fp16: a step that overflowed at its loss scale was dropped, the scale halved, and that was all.
    absorbed = {(event.attempt, event.step) for event in log.of("loss_scale")}
    absorbed -= {(event.attempt, event.step) for event in log.of("nonfinite")}
    found = [(attempt, step, turn) for attempt, step, turn in found if (attempt, step) not in absorbed]
    known = {(attempt, step) for attempt, step, _ in found}
    ((newest,),) = source.rows("SELECT max(attempt) FROM steps")
    for event in log.of("nonfinite"):  # a step that never ended has its verdict only here
        if policy.ended_only and event.attempt == newest:
            continue
        if event.step is not None and event.step >= policy.since_step and (event.attempt, event.step) not in known:
            known.add((event.attempt, event.step))
            found.append((event.attempt, event.step, 0))
    episodes: list[_Episode] = []
    for attempt, step, turn in found:
        last = episodes[-1] if episodes else None
        goes_on = last is not None and last.attempt == attempt and step == last.last_step + 1
        if last is not None and goes_on and not _refused(log, attempt, last.last_step):
            episodes[-1] = _Episode(attempt, last.step, last.turn, step, last.num_steps + 1)
        else:
            episodes.append(_Episode(attempt, step, turn, step, 1))
    return episodes


def _refused(log: EventLog, attempt: int, step: int) -> bool:
    """Whether training went on from before the step: what comes next is no fallout of it."""
    return bool(log.of("nonfinite", attempt=attempt, step=step)) or any(
        event.integer("from_step") == step for event in log.of("rollback", attempt=attempt)
    )


def _evidence(source: Source, log: EventLog, attempt: int, step: int, turn: int) -> StepEvidence:
    steps = source.rows(
        """
        SELECT rank, start_ns, duration_ns, local_loss, loss, grad_norm, nonfinite_count, committed, batch_index
        FROM steps WHERE attempt = ? AND step = ?
        QUALIFY row_number() OVER (PARTITION BY rank ORDER BY start_ns) = ? + 1 ORDER BY rank
        """,
        [attempt, step, turn],
    )
    events = [event for event in log.of("nonfinite", attempt=attempt, step=step) if event.rank >= 0]
    return StepEvidence(
        rows=[RankStep(rank=r[0], local_loss=r[3], loss=r[4], grad_norm=r[5], nonfinite_count=r[6], committed=r[7],
                       batch_index=r[8]) for r in steps],
        flags=_flags(source, attempt, step, {r[0]: (r[1], r[2]) for r in steps}),
        parameters=_gradients(source, attempt, step),
        reported_phase=events[0].text("phase") if events else "",
        reported_parameters=_merged(event.texts("parameters") for event in events),
        data_parallel=_is_data_parallel(source, attempt),
    )  # fmt: skip


def _flags(source: Source, attempt: int, step: int, begins: dict[int, tuple[int, int | None]]) -> list[Flag]:
    if not source.has("collectives"):
        return []
    rows = source.rows(
        """
        SELECT rank, process_group, seq, op, issue_ns, nonfinite, phase FROM collectives
        WHERE attempt = ? AND step = ? AND nonfinite IS NOT NULL AND op NOT IN ('send', 'recv')
              AND phase IS DISTINCT FROM 'replay'  -- the step once more, maybe without what was wrong
        """,
        [attempt, step],
    )
    flags = []
    for rank, group, seq, op, issue_ns, nonfinite, phase in rows:
        begin_ns, duration_ns = begins.get(rank, (issue_ns, None))
        since_ns = issue_ns - begin_ns
        if since_ns >= 0 and (duration_ns is None or since_ns <= duration_ns):  # else: another run of the same step
            flags.append(Flag(rank=rank, group=group or "", seq=seq if seq is not None else -1, op=op or "",
                              since_begin_ns=since_ns, nonfinite=bool(nonfinite), phase=phase or ""))  # fmt: skip
    return flags


def _is_data_parallel(source: Source, attempt: int) -> bool:
    if not source.has("ranks"):
        return False
    sql = "SELECT coalesce(max(dp_replicate), 0), coalesce(max(dp_shard), 0) FROM ranks WHERE attempt = ?"
    ((replicate, shard),) = source.rows(sql, [attempt])
    return bool(replicate or shard)


def _gradients(source: Source, attempt: int, step: int) -> list[tuple[int, str, int]]:
    """In the order of the tape, which is the model's."""
    if not source.has("gradients"):
        return []
    sql = "SELECT rank, parameter, coalesce(nonfinite_count, 0) FROM gradients WHERE attempt = ? AND step = ?"
    return [(rank, name or "", count) for rank, name, count in source.rows(sql, [attempt, step])]


def _merged(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


# ---- the finding ----


def _explain(source: Source, log: EventLog, episode: _Episode) -> Finding:
    evidence = _evidence(source, log, episode.attempt, episode.step, episode.turn)
    where = locate(evidence)
    step = episode.step
    everybody = len(evidence.rows) > 1 and len(where.ranks) == len(evidence.rows)
    if everybody or not where.ranks:
        # Everybody's loss is bad at once: the weights were ruined before, by a step that nobody refused.
        before = _evidence(source, log, episode.attempt, step - 1, 0)
        if any(flag.nonfinite for flag in before.flags):
            evidence, where, step = before, locate(before), step - 1
            everybody = len(evidence.rows) > 1 and len(where.ranks) == len(evidence.rows)
    committed = [row.committed for row in evidence.rows if row.committed is not None]
    response = respond(
        log, attempt=episode.attempt, step=episode.step, turn=episode.turn,
        committed=any(committed) if committed else None,
    )  # fmt: skip
    replayed = find_replay(log, attempt=episode.attempt, step=episode.step, turn=episode.turn)
    if replayed is not None and replayed.origin is not None and not where.ranks:
        origin = replayed.origin
        phase: Phase = "forward" if origin.phase == "forward" else "backward"
        where = replace(where, ranks=origin.ranks, phase=phase, how="replay")
        everybody = len(evidence.rows) > 1 and len(where.ranks) == len(evidence.rows)
    named = bool(where.ranks) or where.phase == "reduction"
    return Finding(
        analyzer="nonfinite",
        kind="non_finite",
        severity="warning" if response.handled else "critical",
        status="fired" if named else "suspect",
        summary=_summary(where, step, episode, everybody, response, replayed),
        ranks=where.ranks,
        first_step=step,
        last_step=episode.last_step,
        cause=where.phase,
        evidence=_numbers(evidence, where, episode, response) | (replayed.evidence() if replayed else {}),
        advice=f"non-finite-{where.phase}",
        attempt=episode.attempt,
    )


def _summary(
    where: Location, step: int, episode: _Episode, everybody: bool, response: Response, replayed: Replayed | None
) -> str:
    if everybody:
        who = "all ranks at once (the batch or the weights, not one rank)"
    elif where.ranks:
        who = f"rank{'s' if len(where.ranks) > 1 else ''} {', '.join(map(str, where.ranks[:8]))}"
    else:
        who = "no rank alone" if where.phase == "reduction" else "a rank that the records do not name"
    what = {
        "forward": "the forward pass of {who} gave a loss that is not finite",
        "backward": "{who} made a non-finite gradient in the backward pass",
        "reduction": "every input was finite and the reduced gradient is not: it overflowed in the reduction ({who})",
        "unknown": "non-finite values from {who}",
    }[where.phase].format(who=who)
    parameter = f", {where.parameter}" if where.parameter else ""
    until = f" to {episode.last_step}" if episode.num_steps > 1 else ""
    again = "" if replayed is None else f"; {replayed.text(() if everybody else where.ranks)}"
    return f"step {step}{until}: {what}{parameter}{again}; {response.text}"


def _numbers(evidence: StepEvidence, where: Location, episode: _Episode, response: Response) -> dict[str, Any]:
    rows = evidence.rows
    numbers: dict[str, Any] = {
        "phase": where.phase,
        "parameter": where.parameter,
        "num_nonfinite_parameters": len(where.others),
        "named_by": where.how,
        "num_steps": episode.num_steps,
        "ranks_with_nonfinite_local_loss": [row.rank for row in rows if _bad(row.local_loss)],
        "num_flagged_inputs": sum(flag.nonfinite for flag in evidence.flags),
        "num_checked_inputs": len(evidence.flags),
        "batch_index": next((row.batch_index for row in rows if row.batch_index is not None), None),
        **response.evidence(),
    }
    if where.group:
        numbers |= {"process_group": where.group, "seq": where.seq, "op": where.op}
    return numbers


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("nonfinite", "non_finite", f"non-finite values were not looked for: {why}")
