"""Non-finite values: the rank, parameter and phase that produced the first NaN or Inf, and the response to it.

1. A step is bad if its loss, local loss or gradient norm is not finite, or if it has non-finite gradients. Consecutive
   bad steps are one episode. Its first step is explained; the others are consequences.
2. A reduction, gather or exchange passes a NaN to every member, so each input is checked and flagged before it. The
   earliest flagged collective of the step names the ranks on which the input was already bad. Later flags are
   consequences of that collective. Times count from each rank's start of the step, so no clocks are compared.
3. Without flags, ranks with a non-finite local loss are named; if there are none, ranks with a non-finite local
   gradient; otherwise none (`suspect`). Members of a tensor-parallel group have the same loss, so only the group can be
   named. If the weights broke within the step (sharpness-aware minimization), the loss of the next pass is a
   consequence, too. So is the loss of a rank whose first loss was finite while another rank's was not: the update
   between them spread the NaN.
4. Phase: forward if the local loss of a named rank was not finite. Reduction if every gradient was finite before its
   reduction but the result is not. The first flags, if any, then belong to the reduction of the norm. Otherwise
   backward.
5. Parameter: backward runs from the loss to the input, so the last non-finite parameter in the model's order was first.
   Sharded gradients are checked on all ranks: the bad element lies in one shard.
6. A replay of the step (`analyzers.numerics.replay_result`) is stronger evidence than the rules above. It tells whether
   the fault was reproduced, and in which operation. It also names ranks if nothing else does. Each rank checks its own
   operations, so a value that no rank produced came from a reduction.

In a live run, a step of the newest attempt is judged once all ranks have finished it. Before that, the response may not
be recorded, and records of some ranks may be missing from the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analyzers.account.timings import TP, load_places
from analyzers.deaths.recovery_response import RESPONSE_EVENTS, Response, respond
from analyzers.finding import Finding
from analyzers.numerics.loss_scale import dropped_for_overflow
from analyzers.numerics.nonfinite_origin import (
    NORM,
    WEIGHTS,
    Flag,
    Location,
    Phase,
    RankStep,
    StepEvidence,
    is_bad,
    locate,
)
from analyzers.numerics.replay_result import REPLAY_EVENTS, Origin, ReplayResult, find_replay
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from analyzers.wording import ranks_text
from probes.tape import event_kinds

__all__ = ["WITHIN_GROUP", "non_finite_values"]

MAX_EPISODES = 50
"""Maximum episodes explained individually: more have one common cause, which the first ones show."""

INPUT_GRADIENT = "input_gradient_norm"
"""Series of `probes.collectives.gradients.input_gradient`: a rank's gradient at the first layer, not yet reduced."""
FIRST_LOSS, LARGEST_WEIGHT = "loss_of_first_pass", "largest_weight_of_last_pass"
"""Series that `probes.attach.loop.step_losses` records for steps in which the passes have different weights."""
WITHIN_GROUP = "tensor_parallel_group"
"""Value of `how` if ranks are named by their losses, which are equal in a group that sums within the forward pass."""

_EVENTS = (*RESPONSE_EVENTS, *REPLAY_EVENTS, event_kinds.NONFINITE, event_kinds.LOSS_SCALE)


def non_finite_values(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `non_finite`, one per episode.

    All attempts of a live run are judged. A restart may take less time than the interval between two analyses, and the
    bad steps of the attempt before the restart must still be reported.
    """
    if missing_tables(source, "steps"):
        why = "Non-finite values were not checked: no steps were recorded."
        return [Finding.insufficient("nonfinite", "non_finite", why)]
    log = EventLog.load(source, _EVENTS)
    return [_explain(source, log, episode) for episode in _episodes(source, scope, log)[:MAX_EPISODES]]


# ---- from the store ----


@dataclass(frozen=True, slots=True)
class _Episode:
    attempt: int
    step: int
    execution: int  # number of the step's execution within the attempt, from 0
    last_step: int
    num_steps: int


def _episodes(source: Source, scope: Scope, log: EventLog) -> list[_Episode]:
    """Group consecutive bad steps, in order of execution; a step that ran twice is judged twice."""
    episodes: list[_Episode] = []
    for attempt, step, execution in _bad_steps(source, scope, log):
        last = episodes[-1] if episodes else None
        continues = last is not None and last.attempt == attempt and step == last.last_step + 1
        if last is not None and continues and not _refused(log, attempt, last.last_step):
            episodes[-1] = _Episode(attempt, last.step, last.execution, step, last.num_steps + 1)
        else:
            episodes.append(_Episode(attempt, step, execution, step, 1))
    return episodes


def _bad_steps(source: Source, scope: Scope, log: EventLog) -> list[tuple[int, int, int]]:
    """Return (attempt, step, execution) of each execution of a step with a non-finite value."""
    bad = source.rows(
        "SELECT DISTINCT attempt, step FROM steps WHERE step >= ? AND (NOT isfinite(loss) OR NOT isfinite(local_loss) "
        "OR NOT isfinite(grad_norm) OR nonfinite_count > 0)",
        [scope.since_step],
    )
    rows = bad and source.rows(
        """
        WITH bad AS (SELECT unnest(?::INTEGER[]) AS attempt, unnest(?::BIGINT[]) AS step), executions AS (
            SELECT attempt, rank, step, start_ns,
                   row_number() OVER (PARTITION BY attempt, rank, step ORDER BY start_ns) - 1 AS execution, duration_ns,
                   coalesce(NOT isfinite(loss), false) OR coalesce(NOT isfinite(local_loss), false)
                   OR coalesce(NOT isfinite(grad_norm), false) OR coalesce(nonfinite_count > 0, false) AS is_bad
            FROM steps SEMI JOIN bad USING (attempt, step)
        )
        SELECT attempt, step, execution, min(start_ns), bool_or(is_bad), count(duration_ns)
        FROM executions GROUP BY ALL ORDER BY attempt, 4
        """,
        [[attempt for attempt, _ in bad], [step for _, step in bad]],
    )
    ((newest,),) = source.rows("SELECT max(attempt) FROM steps")
    least_ends = {newest: _num_ranks(source, newest)} if scope.is_live else {}
    # With fp16 it is normal that a step overflows at its loss scale: the step is dropped, and the scale is halved.
    overflowed = {(event.attempt, event.step) for event in log.of(event_kinds.LOSS_SCALE)}
    overflowed |= dropped_for_overflow(source) if rows else set()
    overflowed -= {(event.attempt, event.step) for event in log.of(event_kinds.NONFINITE)}
    found = [
        (attempt, step, execution)
        for attempt, step, execution, _, is_bad, num_ends in rows
        if is_bad and num_ends >= least_ends.get(attempt, 0) and (attempt, step) not in overflowed
    ]
    known = {(attempt, step) for attempt, step, _ in found}
    for event in log.of(event_kinds.NONFINITE):  # if a step never ended, only this event of the guard shows the NaN
        if scope.is_live and event.attempt == newest:
            continue
        if event.step is not None and event.step >= scope.since_step and (event.attempt, event.step) not in known:
            known.add((event.attempt, event.step))
            found.append((event.attempt, event.step, 0))
    return found


def _num_ranks(source: Source, attempt: int | None) -> int:
    """Number of ranks in `steps` or `ranks`, whichever is larger: a rank is known before its first step."""
    tables = [table for table in ("steps", "ranks") if source.has(table)]
    counts = [source.rows(f"SELECT count(DISTINCT rank) FROM {table} WHERE attempt = ?", [attempt]) for table in tables]
    return max(int(count) for ((count,),) in counts)


def _refused(log: EventLog, attempt: int, step: int) -> bool:
    """Return True if the step was undone, so that later steps are not its consequences."""
    return bool(log.of(event_kinds.NONFINITE, attempt=attempt, step=step)) or any(
        event.integer("from_step") == step for event in log.of(event_kinds.ROLLBACK, attempt=attempt)
    )


def _evidence(source: Source, log: EventLog, attempt: int, step: int, execution: int) -> StepEvidence:
    steps = source.rows(
        """
        SELECT rank, start_ns, duration_ns, local_loss, loss, grad_norm, nonfinite_count, committed, batch_index
        FROM steps WHERE attempt = ? AND step = ?
        QUALIFY row_number() OVER (PARTITION BY rank ORDER BY start_ns) = ? + 1 ORDER BY rank
        """,
        [attempt, step, execution],
    )
    events = [event for event in log.of(event_kinds.NONFINITE, attempt=attempt, step=step) if event.rank >= 0]
    first_losses = _series(source, attempt, step, FIRST_LOSS)
    largest_weights = _series(source, attempt, step, LARGEST_WEIGHT)
    sound = {rank for rank, loss in first_losses.items() if not is_bad(loss)}
    # Bad weights on one sound rank count for all, because each rank may hold only a shard.
    spread = len(sound) < len(first_losses) or any(is_bad(largest_weights.get(rank)) for rank in sound)
    broken = sound if spread else set()
    return StepEvidence(
        rows=[RankStep(rank=r[0], local_loss=r[3], loss=r[4], grad_norm=r[5], nonfinite_count=r[6], committed=r[7],
                       batch_index=r[8], weights_broke=r[0] in broken) for r in steps],
        flags=_flags(source, attempt, step, {r[0]: (r[1], r[2]) for r in steps}),
        parameters=_gradients(source, attempt, step),
        reported_phase=events[0].text("phase") if events else "",
        reported_parameters=_merged(event.texts("parameters") for event in events),
        own_gradients=[(event.rank, bad) for event in events
                       if isinstance(bad := event.detail.get("own_gradient_nonfinite"), bool)]
        or _own_gradients(source, attempt, step),
        data_parallel=_is_data_parallel(source, attempt),
    )  # fmt: skip


def _own_gradients(source: Source, attempt: int, step: int) -> list[tuple[int, bool]]:
    """Ranks on which the first layer got a non-finite gradient. Other ranks may have bad gradients in other layers."""
    return [(rank, True) for rank, norm in _series(source, attempt, step, INPUT_GRADIENT).items() if is_bad(norm)]


def _series(source: Source, attempt: int, step: int, name: str) -> dict[int, float]:
    """{rank: a logged number}. The number is NaN or Inf if any of the rank's values was non-finite."""
    if not source.has("scalars"):
        return {}
    sql = "SELECT rank, value FROM scalars WHERE attempt = ? AND step = ? AND name = ? ORDER BY isfinite(value) DESC"
    return dict(source.rows(sql, [attempt, step, name]))


def _flags(source: Source, attempt: int, step: int, starts: dict[int, tuple[int, int | None]]) -> list[Flag]:
    if not source.has("collectives"):
        return []
    rows = source.rows(
        """
        SELECT rank, process_group, seq, op, issue_ns, nonfinite, phase FROM collectives
        WHERE attempt = ? AND step = ? AND nonfinite IS NOT NULL AND op NOT IN ('send', 'recv')
              AND phase IS DISTINCT FROM 'replay'  -- the step again, maybe without the fault
        """,
        [attempt, step],
    )
    flags = []
    for rank, group, seq, op, issue_ns, nonfinite, phase in rows:
        begin_ns, duration_ns = starts.get(rank, (issue_ns, None))
        since_ns = issue_ns - begin_ns
        # A call outside this time belongs to another execution of the step.
        if since_ns >= 0 and (duration_ns is None or since_ns <= duration_ns):
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
    """Gradients in tape order, which is the model's order."""
    if not source.has("gradients"):
        return []
    sql = "SELECT rank, parameter, coalesce(nonfinite_count, 0) FROM gradients WHERE attempt = ? AND step = ?"
    return [(rank, name or "", count) for rank, name, count in source.rows(sql, [attempt, step])]


def _merged(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


# ---- the finding ----


def _explain(source: Source, log: EventLog, episode: _Episode) -> Finding:
    evidence = _evidence(source, log, episode.attempt, episode.step, episode.execution)
    where = locate(evidence)
    step = episode.step
    on_all = len(evidence.rows) > 1 and len(where.ranks) == len(evidence.rows)
    if on_all or not where.ranks:
        # If the loss became bad on all ranks in the same step, an earlier step that was not refused corrupted the
        # weights.
        before = _evidence(source, log, episode.attempt, step - 1, 0)
        if any(flag.nonfinite for flag in before.flags) or any(bad for _, bad in before.own_gradients):
            evidence, where, step = before, locate(before), step - 1
            on_all = len(evidence.rows) > 1 and len(where.ranks) == len(evidence.rows)
    known = [row.committed for row in evidence.rows if row.committed is not None]
    committed = any(known) if known else None
    if committed and _stayed_sound(source, episode):  # the loop may have dropped the gradients itself
        committed = None
    response = respond(
        log, attempt=episode.attempt, step=episode.step, execution=episode.execution, committed=committed
    )
    replayed = find_replay(log, attempt=episode.attempt, step=episode.step, execution=episode.execution)
    if replayed is not None and replayed.origin is not None and _is_narrower(replayed.origin, where):
        origin = replayed.origin
        phase: Phase = "forward" if origin.phase == "forward" else "backward"
        where = replace(where, ranks=origin.ranks, phase=phase, how="replay")
        on_all = len(evidence.rows) > 1 and len(where.ranks) == len(evidence.rows)
    elif replayed is not None and _is_by_reduction(replayed, where, evidence):
        where = replace(where, phase="reduction", how="replay")
    named = bool(where.ranks) or where.phase == "reduction" or where.how == NORM
    if where.how == "local_loss" and _share_sums(source, episode.attempt, where.ranks):
        where = replace(where, how=WITHIN_GROUP)
    replay_text = "" if replayed is None else f" {replayed.text(() if on_all else where.ranks)}"
    return Finding(
        analyzer="nonfinite",
        kind="non_finite",
        severity="warning" if response.handled else "critical",
        status="fired" if named else "suspect",
        summary=_summary(where, step, episode, _who(where, evidence, on_all=on_all), response, replay_text),
        ranks=where.ranks,
        first_step=step,
        last_step=episode.last_step,
        cause=where.phase,
        evidence=_numbers(evidence, where, episode, response) | (replayed.evidence() if replayed else {}),
        advice=f"non-finite-{where.phase}",
        attempt=episode.attempt,
    )


def _stayed_sound(source: Source, episode: _Episode) -> bool:
    """Return True if a later step has a finite loss, so that the bad values have not entered the weights it used."""
    sql = "SELECT count(*) FROM steps WHERE attempt = ? AND step > ? AND isfinite(coalesce(local_loss, loss))"
    ((num_finite,),) = source.rows(sql, [episode.attempt, episode.last_step])
    return bool(num_finite)


def _is_narrower(origin: Origin, where: Location) -> bool:
    """Return True if only the replay names ranks, or if it names some of the ranks on which the loss was not finite:
    ranks of a tensor-parallel group share the loss."""
    return not where.ranks or (where.how == "local_loss" and set(origin.ranks) < set(where.ranks))


def _is_by_reduction(replayed: ReplayResult, where: Location, evidence: StepEvidence) -> bool:
    """Return True if the fault was reproduced, and the operations of every rank, all of them checked, were finite."""
    is_whole = replayed.came_back and 1 < replayed.num_ranks == len(evidence.rows)
    return is_whole and replayed.origin is None and where.how == "nothing" and evidence.data_parallel


def _share_sums(source: Source, attempt: int, ranks: Sequence[int]) -> bool:
    """Return True for several ranks of one tensor-parallel group. The group's sums spread a NaN to all members."""
    stage, coordinates = load_places(source, attempt)
    if len(ranks) < 2 or not all(rank in coordinates for rank in ranks):
        return False
    places = {(stage.get(rank, 0), *coordinates[rank][:TP], *coordinates[rank][TP + 1 :]) for rank in ranks}
    return len(places) == 1 and len({coordinates[rank][TP] for rank in ranks}) == len(ranks)


def _who(where: Location, evidence: StepEvidence, *, on_all: bool) -> str:
    if where.ranks:
        return "all ranks" if on_all else ranks_text(where.ranks)
    by_reduction = where.how == "nothing" and where.phase == "backward" and evidence.data_parallel
    return "an unidentified rank or the reduction" if by_reduction else "an unidentified rank"


def _summary(where: Location, step: int, episode: _Episode, who: str, response: Response, replay_text: str) -> str:
    when = f"at step {step}" if episode.num_steps == 1 else f"from step {step} to {episode.last_step}"
    parameter = f" ({where.parameter})" if where.parameter else ""
    shared = ", made by one of them or in their batch" if where.how == WITHIN_GROUP else ""
    what = {
        "forward": f"The forward pass of {who} gave a NaN or Inf loss {when}{shared}",
        "backward": f"{who[0].upper()}{who[1:]} produced a NaN or Inf gradient {when}",
        "reduction": f"Finite gradients overflowed in their reduction {when}",
        "unknown": f"Values of {who} were NaN or Inf {when}",
    }[where.phase]
    if where.how == WEIGHTS:
        what = f"The weights became NaN or Inf between two passes of step {step}"
    if where.how == NORM:
        what = f"The gradient norm overflowed to Inf {when}, over gradients that were all finite"
    return f"{what}{parameter}.{replay_text} {response.text}"


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
        "ranks_with_nonfinite_gradient": [rank for rank, bad in evidence.own_gradients if bad],
        "ranks_with_checked_gradient": [rank for rank, _ in evidence.own_gradients],
        "batch_index": next((row.batch_index for row in rows if row.batch_index is not None), None),
        **response.evidence(),
    }
    if where.group:
        numbers |= {"process_group": where.group, "seq": where.seq, "op": where.op}
    return numbers
