"""Ranks out of sync: after a skipped or extra collective, a rank's calls are paired with calls of other steps.

    findings = desynced(store, Scope())       # kind desync, causes skipped and extra

A group's calls are paired by their sequence number. If wrongly paired calls have the same operation and size, the job
continues, and ranks reduce gradients of different steps together. If they differ and the job hangs in the first call
after the skipped or extra one, `culprits` judges the hang.

Example: a step has 3 all-reduces, so step 10 starts at number 30 on all ranks. In step 10, rank 1 makes only 2. Then
steps 11, 12, ... start at 32, 35, ... on rank 1, but at 33, 36, ... on the others. Rank 1 skipped one call in step 10.

1. In ranks that run the same program, the sequence numbers of a step's first calls are equal, or differ by the same
   amount in all steps.
2. If a rank's difference from the other ranks changes at some step and never changes back, the rank made more or fewer
   calls than the others. It did so between the last common step before the change and the first one after the change.
3. The smaller side is named. If both sides are equally large, the side that never made this number of calls in an
   earlier step is named. If neither criterion decides, both sides are suspects.
4. These are not judged:
   - Steps next to missing sequence numbers on the tape.
   - Groups with calls of background threads: such calls belong to no step. (The NCCL plugin records no thread; its
     calls belong to the step of their launch.)
   - Steps in which two ranks have different phases, if one of them had other phases in its previous step: the step may
     be counted twice or not at all.
   - Ranks in sync whose step boundaries differ. Since the change, calls with equal sequence numbers have the same
     operation and size, but calls at the same position in the step do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analyzers.finding import Finding, evidence_of
from analyzers.hangs.policy import DesyncPolicy
from analyzers.policy import SHARED
from analyzers.run.calls.device_calls import device_groups
from analyzers.run.calls.recorded_calls import Call
from analyzers.run.calls.snapshot import attempts
from analyzers.scope import Scope
from analyzers.source import Source, lacking
from analyzers.wording import ranks_text, sentence

__all__ = ["Change", "StepCalls", "change_of", "desynced", "with_desync"]

_COLLECTIVE = "op NOT IN ('send', 'recv') AND seq IS NOT NULL AND process_group IS NOT NULL AND rank >= 0"
_PHASES = "('forward', 'backward', 'optimizer')"
MAX_SUSPECTS = 8
"""Ranks of one group that are compared with the others over all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCalls:
    """The calls of one rank in one group and step. `is_whole`: no number is missing between these calls and the calls
    of the previous step.
    """

    first_seq: int
    num_calls: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """First step in which two ranks are out of sync. `extra`: how many more calls the first rank made (negative:
    fewer).
    """

    step: int
    extra: int
    last_step: int
    num_before: int
    """Number of earlier steps in which the two agreed."""
    num_after: int


def desynced(source: Source, scope: Scope, policy: DesyncPolicy = DesyncPolicy()) -> list[Finding]:
    """Findings of kind `desync`, one for each step and set of ranks."""
    if lacking(source, collectives=("step", "seq", "process_group")) or not source.has("steps"):
        return []  # `hangs` reports the missing records
    findings: dict[tuple[object, ...], Finding] = {}
    for attempt in attempts(source) if scope.attempt is None else [scope.attempt]:
        for group in _suspicious_groups(source, attempt, scope.since_step, policy):
            for found in _desyncs_of_group(source, attempt, group, scope.since_step):
                findings.setdefault((attempt, found.first_step, found.ranks), found)
    return list(findings.values())


def with_desync(source: Source, hang: Finding) -> Finding:
    """For a hang in mismatched calls, name the rank that was already out of sync in that group, if there is one.

    For calls on devices, the shift is visible in the later calls that the rank's host, which runs ahead, has enqueued.
    """
    facts = evidence_of(hang)
    if not hang.cause.startswith("mismatch") or hang.attempt is None or facts.get("seq") is None:
        return hang
    for found in desynced(source, Scope(attempt=hang.attempt)):
        desync = evidence_of(found)
        is_before = desync["process_group"] == facts["process_group"] and int(desync["seq"]) <= int(facts["seq"])
        if found.status == "fired" and is_before:
            waiting = sorted({*hang.ranks, *facts["waiting_ranks"]} - set(found.ranks))
            text = found.summary.partition(" Since then")[0]
            evidence = {**facts, "waiting_ranks": waiting}
            return replace(hang, ranks=found.ranks, summary=f"{hang.summary} {text}", evidence=evidence)
    return hang


def _suspicious_groups(source: Source, attempt: int, since_step: int, policy: DesyncPolicy) -> list[str]:
    """Groups in which the ranks' first calls of a recent step differ in sequence number. One step is enough, because a
    shift never disappears."""
    rows = source.rows(
        f"""
        WITH recent AS (
            SELECT process_group, step, rank, min(seq) AS seq FROM collectives
            WHERE attempt = ? AND step >= ? AND {_COLLECTIVE}
              AND step > (SELECT max(step) FROM collectives WHERE attempt = ?) - ?
            GROUP BY ALL
        ), odd AS (SELECT process_group FROM recent GROUP BY process_group, step HAVING min(seq) <> max(seq))
        SELECT DISTINCT process_group FROM odd ORDER BY ALL
        """,
        [attempt, max(0, since_step), attempt, policy.recent_steps],
    )
    return [group for (group,) in rows]


def _desyncs_of_group(source: Source, attempt: int, group: str, since_step: int) -> Iterator[Finding]:
    place = [attempt, group, max(0, since_step)]
    sides = _sides(source, place)
    if len(sides) < 2:
        return
    usual, *others = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
    suspects = sorted(rank for ranks in others for rank in ranks)[:MAX_SUSPECTS]
    calls = _calls_by_step(source, place, [usual[0], *suspects])
    changes: dict[tuple[int, int], tuple[Change, list[int]]] = {}
    for rank in suspects:
        change = change_of(calls.get(rank, {}), calls.get(usual[0], {}))
        if change is not None:
            changes.setdefault((change.step, change.extra), (change, []))[1].append(rank)
    if not changes:
        return
    if group not in device_groups(source, attempt) and _in_threads(source, place, [usual[0], *suspects]):
        return
    for change, ranks in changes.values():
        pair = (ranks[0], usual[0])
        if not _has_usual_phases(source, attempt, pair, change.step) or _pairs_by_number(source, place, pair, change):
            continue
        yield _finding(source, place, _suspected(calls, ranks, usual, change), change, pair)


def change_of(own: Mapping[int, StepCalls], others: Mapping[int, StepCalls]) -> Change | None:
    """The first step in which a rank's sequence numbers are shifted against another rank's.

    None if there is no shift, if the shift disappears again, if there are too few steps before or after it, or if
    records around it are missing.
    """
    steps = [step for step in sorted(own.keys() & others.keys()) if own[step].is_whole and others[step].is_whole]
    shifts = [own[step].first_seq - others[step].first_seq for step in steps]
    before = next((i for i, shift in enumerate(shifts) if shift != shifts[0]), len(shifts))
    after = shifts[before:]
    if before < SHARED.min_times or len(after) < SHARED.repeats or shifts[0] in after:
        return None
    first, following = steps[before - 1], steps[before]
    between = sorted(step for step in own.keys() | others.keys() if first <= step < following)
    step = next((step for step in between if _num_calls(own, step) != _num_calls(others, step)), None)
    extra = after[0] - shifts[0]
    if step is None or _num_calls(own, step) - _num_calls(others, step) != extra:
        return None  # the numbers do not fit: records are missing, or the ranks differ in several steps
    return Change(step=step, extra=extra, last_step=steps[-1], num_before=before, num_after=len(after))


def _num_calls(calls: Mapping[int, StepCalls], step: int) -> int:
    return calls[step].num_calls if step in calls else 0


def _sides(source: Source, place: Sequence[Any]) -> dict[int, list[int]]:
    """{sequence number of the first call: ranks} in the newest step that all ranks have recorded."""
    rows = source.rows(
        f"""
        WITH firsts AS (
            SELECT step, rank, min(seq) AS seq FROM collectives
            WHERE attempt = ? AND process_group = ? AND step >= ? AND {_COLLECTIVE} GROUP BY ALL
        ), newest AS (
            SELECT max(step) AS step FROM (SELECT step, count(*) AS ranks FROM firsts GROUP BY step)
            WHERE ranks = (SELECT count(DISTINCT rank) FROM firsts)
        )
        SELECT seq, list(rank ORDER BY rank) FROM firsts SEMI JOIN newest USING (step) GROUP BY seq
        """,
        place,
    )
    return {int(seq): [int(rank) for rank in ranks] for seq, ranks in rows}


def _calls_by_step(source: Source, place: Sequence[Any], ranks: Sequence[int]) -> dict[int, dict[int, StepCalls]]:
    rows = source.rows(
        f"""
        SELECT rank, step, seq, number, seq = last_seq - number + 1 AND before IS NOT DISTINCT FROM seq - 1 FROM (
            SELECT *, lag(last_seq) OVER (PARTITION BY rank ORDER BY step) AS before FROM (
                SELECT rank, step, min(seq) AS seq, max(seq) AS last_seq, count(*) AS number FROM collectives
                WHERE attempt = ? AND process_group = ? AND step >= ? AND {_COLLECTIVE}
                  AND rank IN ({", ".join(map(str, ranks))})
                GROUP BY ALL
            )
        )
        """,
        place,
    )
    calls: dict[int, dict[int, StepCalls]] = {}
    for rank, step, seq, num_calls, is_whole in rows:
        calls.setdefault(rank, {})[step] = StepCalls(first_seq=seq, num_calls=num_calls, is_whole=bool(is_whole))
    return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspicion:
    ranks: tuple[int, ...]
    cause: str
    is_clear: bool = True


def _suspected(
    calls: Mapping[int, Mapping[int, StepCalls]], ranks: Sequence[int], usual: Sequence[int], change: Change
) -> _Suspicion:
    """The ranks that are out of sync, and whether they made fewer or more calls; both sides if the records do not
    decide."""
    is_odd = [_is_unusual(calls[side[0]], change.step) for side in (ranks, usual)]
    if len(ranks) == len(usual) and is_odd[0] == is_odd[1]:
        return _Suspicion(ranks=tuple(sorted([*ranks, *usual])), cause="skipped", is_clear=False)
    names_usual = len(ranks) == len(usual) and is_odd[1]
    named, extra = (usual, -change.extra) if names_usual else (ranks, change.extra)
    return _Suspicion(ranks=tuple(named), cause="skipped" if extra < 0 else "extra")


def _is_unusual(calls: Mapping[int, StepCalls], step: int) -> bool:
    """Return True if a rank never made this number of calls in a step before."""
    first = min(calls, default=step)
    return _num_calls(calls, step) not in {_num_calls(calls, one) for one in range(first, step)}


def _in_threads(source: Source, place: Sequence[Any], ranks: Sequence[int]) -> bool:
    """Return True if calls of the group were made inside a phase by a thread other than the training thread.

    Those calls have no phase, and their step is meaningless.
    """
    if not source.has("spans"):
        return False
    return bool(
        source.rows(
            f"""
            SELECT 1 FROM collectives c JOIN spans s USING (attempt, rank, step)
            WHERE c.attempt = ? AND c.process_group = ? AND c.step >= ? AND c.{_COLLECTIVE.replace("AND ", "AND c.")}
              AND c.rank IN ({", ".join(map(str, ranks))}) AND coalesce(c.phase, '') = '' AND s.kind IN {_PHASES}
              AND c.issue_ns > s.start_ns AND c.issue_ns < s.end_ns
            LIMIT 1
            """,
            place,
        )
    )


def _has_usual_phases(source: Source, attempt: int, sides: tuple[int, int], step: int) -> bool:
    """Return True if two ranks have the same phases in a step, or if each has the same phases as in its previous
    step."""
    if not source.has("spans"):
        return True
    rows = source.rows(
        f"SELECT rank, step, kind, count(*) FROM spans WHERE attempt = ? AND rank IN (?, ?) AND step BETWEEN ? AND ? "
        f"AND kind IN {_PHASES} GROUP BY ALL",
        [attempt, *sides, step - 1, step],
    )
    one, other = ([{k: n for r, at, k, n in rows if (r, at) == (rank, s)} for s in (step - 1, step)] for rank in sides)
    return one[1] == other[1] or (one[0] == one[1] and other[0] == other[1])


def _pairs_by_number(source: Source, place: Sequence[Any], sides: tuple[int, int], change: Change) -> bool:
    """Return True if the calls since the change match the other rank's calls of the same number in operation and size,
    but not its calls at the same position in the step.

    Then the ranks are in sync, and only their step boundaries differ. For example, a rank in `Join` without data
    shadows the others' calls, and ends its steps between these calls.
    """
    attempt, group, _ = place
    calls = "SELECT seq, op, bytes, dtype FROM collectives WHERE attempt = ? AND process_group = ? AND rank = ? "
    calls += f"AND step > ? AND {_COLLECTIVE}"
    same = "(o.op, o.bytes, o.dtype) IS NOT DISTINCT FROM (t.op, t.bytes, t.dtype)"
    ((by_number, by_position),) = source.rows(
        f"""
        WITH own AS ({calls}), theirs AS ({calls})
        SELECT (SELECT bool_and({same}) FROM own o JOIN theirs t ON t.seq = o.seq),
               (SELECT bool_and({same}) FROM own o JOIN theirs t ON t.seq = o.seq - ?)
        """,
        [attempt, group, sides[0], change.step, attempt, group, sides[1], change.step, change.extra],
    )
    return by_number is True and by_position is False


def _finding(
    source: Source, place: Sequence[Any], suspicion: _Suspicion, change: Change, sides: tuple[int, int]
) -> Finding:
    attempt, group, _ = place
    odd, number = _odd_call(source, place, change, sides), abs(change.extra)
    call = odd.text if number == 1 else f"{number} collectives from {odd.text} on"
    who, act = ranks_text(suspicion.ranks), "skipped" if suspicion.cause == "skipped" else "made an extra"
    what = f"{who} {act} {call}" if suspicion.is_clear else f"one of {who} skipped {call}"
    if suspicion.cause == "extra" and number > 1:
        what = f"{who} made {number} extra collectives from {odd.text} on"
    return Finding(
        analyzer="desync",
        kind="desync",
        severity="critical",
        status="fired" if suspicion.is_clear else "suspect",
        ranks=suspicion.ranks,
        first_step=change.step,
        last_step=change.last_step,
        cause=suspicion.cause,
        summary=sentence(f"{what} at step {change.step}") + " Since then the group pairs calls of different steps.",
        evidence={
            "op": odd.op,
            "process_group": group,
            "seq": odd.seq,
            "caller": odd.caller,
            "phase": odd.phase,
            "num_calls": number,
            "steps_before": change.num_before,
            "steps_since": change.num_after,
        },
        advice=f"desync-{suspicion.cause}",
        attempt=attempt,
    )


def _odd_call(source: Source, place: Sequence[Any], change: Change, sides: tuple[int, int]) -> Call:
    """The first call in the step that one side made and the other did not.

    If several calls of a step are equal, it is the call at which the sequences of the two sides diverge.
    """
    attempt, group, _ = place
    rows = source.rows(
        "SELECT rank, seq, op, coalesce(caller, ''), coalesce(phase, ''), bytes, dtype FROM collectives "
        f"WHERE attempt = ? AND process_group = ? AND step = ? AND {_COLLECTIVE} AND rank IN (?, ?) ORDER BY seq",
        [attempt, group, change.step, *sides],
    )
    fewer, more = sides if change.extra < 0 else sides[::-1]
    theirs, own = ([row[1:] for row in rows if row[0] == rank] for rank in (fewer, more))
    diverged = next((i for i, call in enumerate(own) if i >= len(theirs) or theirs[i][1:] != call[1:]), 0)
    made = Counter(call[1:] for call in theirs)
    for call in own:
        if not made[call[1:]]:
            seq, op, caller, phase, *_ = own[diverged] if own[diverged][1:] == call[1:] else call
            return Call(rank=more, group=group, seq=seq, op=op, caller=caller, phase=phase)
        made[call[1:]] -= 1
    raise AssertionError("one side has more calls in the step than the other")
