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
6. If the step was replayed (`analyzers.numerics.replay_evidence`), whether it came back and with which operation says
   more than all of that; it also names ranks where nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analyzers.deaths.recovery_response import RESPONSE_EVENTS, Response, respond
from analyzers.finding import Finding
from analyzers.numerics.provenance import Flag, Location, Phase, RankStep, StepEvidence, is_bad, locate
from analyzers.numerics.replay_evidence import REPLAY_EVENTS, Replayed, find_replay
from analyzers.run.event_log import EventLog
from analyzers.source import Source, missing_tables
from probes.tape import event_kinds

__all__ = ["NonFinitePolicy", "analyze"]

_EVENTS = (*RESPONSE_EVENTS, *REPLAY_EVENTS, event_kinds.NONFINITE, event_kinds.LOSS_SCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinitePolicy:
    """Limits of the search; that a NaN is one needs no threshold."""

    max_episodes: int = 50
    """Episodes explained one by one (findings); a run with more has one cause, and the first ones show it."""
    since_step: int = 0
    """Only steps from here on (the live view)."""
    ended_only: bool = False
    """Of the newest attempt only steps that all its ranks have ended (the live view): what is done about a step is done
    before that, and what one rank has written may be read a tick before what another has. Rank 0, which writes most
    about a bad step, would often be missing, and the others be taken for the only ones whose loss is bad."""


def analyze(source: Source, policy: NonFinitePolicy | None = None) -> list[Finding]:
    """Findings of kind `non_finite`, one an episode."""
    policy = policy or NonFinitePolicy()
    if missing_tables(source, "steps"):
        return [_insufficient("the table of steps is missing")]
    log = EventLog.load(source, _EVENTS)
    episodes = _episodes(source, policy, log)
    return [_explain(source, log, episode) for episode in episodes[: policy.max_episodes]]


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
    bad = source.rows(
        "SELECT DISTINCT attempt, step FROM steps WHERE step >= ? AND (NOT isfinite(loss) OR NOT isfinite(local_loss) "
        "OR NOT isfinite(grad_norm) OR nonfinite_count > 0)",
        [policy.since_step],
    )
    rows = bad and source.rows(
        """
        WITH bad AS (SELECT unnest(?::INTEGER[]) AS attempt, unnest(?::BIGINT[]) AS step), turns AS (
            SELECT attempt, rank, step, start_ns,
                   row_number() OVER (PARTITION BY attempt, rank, step ORDER BY start_ns) - 1 AS turn, duration_ns,
                   coalesce(NOT isfinite(loss), false) OR coalesce(NOT isfinite(local_loss), false)
                   OR coalesce(NOT isfinite(grad_norm), false) OR coalesce(nonfinite_count > 0, false) AS is_bad
            FROM steps SEMI JOIN bad USING (attempt, step)
        )
        SELECT attempt, step, turn, min(start_ns), bool_or(is_bad), count(duration_ns)
        FROM turns GROUP BY ALL ORDER BY attempt, 4
        """,
        [[attempt for attempt, _ in bad], [step for _, step in bad]],
    )
    ((newest,),) = source.rows("SELECT max(attempt) FROM steps")
    least_ends = {newest: _num_ranks(source, newest)} if policy.ended_only else {}
    found = [
        (attempt, step, turn)
        for attempt, step, turn, _, is_bad, num_ends in rows
        if is_bad and num_ends >= least_ends.get(attempt, 0)
    ]
    # fp16: a step that overflowed at its loss scale was dropped, the scale halved, and that was all.
    absorbed = {(event.attempt, event.step) for event in log.of(event_kinds.LOSS_SCALE)}
    absorbed -= {(event.attempt, event.step) for event in log.of(event_kinds.NONFINITE)}
    found = [(attempt, step, turn) for attempt, step, turn in found if (attempt, step) not in absorbed]
    known = {(attempt, step) for attempt, step, _ in found}
    for event in log.of(event_kinds.NONFINITE):  # a step that never ended has its verdict only here
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


def _num_ranks(source: Source, attempt: int | None) -> int:
    """A rank is known before its first step is."""
    tables = [table for table in ("steps", "ranks") if source.has(table)]
    counts = [source.rows(f"SELECT count(DISTINCT rank) FROM {table} WHERE attempt = ?", [attempt]) for table in tables]
    return max(int(count) for ((count,),) in counts)


def _refused(log: EventLog, attempt: int, step: int) -> bool:
    """Whether training went on from before the step: what comes next is no fallout of it."""
    return bool(log.of(event_kinds.NONFINITE, attempt=attempt, step=step)) or any(
        event.integer("from_step") == step for event in log.of(event_kinds.ROLLBACK, attempt=attempt)
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
    events = [event for event in log.of(event_kinds.NONFINITE, attempt=attempt, step=step) if event.rank >= 0]
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
    places = ", ".join(f"coalesce(max({dim}), 0)" for dim in ("dp_replicate", "dp_shard", "ep", "cp"))
    (row,) = source.rows(f"SELECT {places} FROM ranks WHERE attempt = ?", [attempt])
    return any(row)


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
        "ranks_with_nonfinite_local_loss": [row.rank for row in rows if is_bad(row.local_loss)],
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
