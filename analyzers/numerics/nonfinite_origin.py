"""Locate the first NaN or Inf of a step from what each rank recorded of it: ranks, phase, parameter. Pure.

    where = locate(StepEvidence(rows=[RankStep(rank=0, local_loss=2.1), ...], flags=[...], parameters=[...]))
    where.ranks, where.phase, where.parameter, where.how

`analyzers.numerics.nonfinite` states the rules, and makes this evidence from the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["NORM", "WEIGHTS", "Flag", "Location", "Phase", "RankStep", "StepEvidence", "is_bad", "locate"]

Phase = Literal["forward", "backward", "reduction", "unknown"]
NORM = "finite_gradients"
"""Value of `how`: the norm overflowed although all gradients were finite."""
WEIGHTS = "weights_between_passes"
"""Value of `how`: weights were NaN or Inf in a later pass of the step, so its loss does not show a fault of that
pass."""

_EXCHANGES = frozenset(("all_gather", "all_to_all"))
"""Operations that pass values on as they are. Only a reduction can make a NaN or Inf of finite inputs."""


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
    weights_broke: bool = False
    """True if weights became NaN or Inf between two passes of the step, and the loss of the first pass was finite on
    this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One rank's input to one collective: whether it was non-finite, and the time since the rank began the step."""

    rank: int
    group: str
    seq: int
    op: str
    since_begin_ns: int
    nonfinite: bool
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """Records of one bad step. `parameters` holds (rank, name, non-finite elements) in the model's order."""

    rows: Sequence[RankStep]
    flags: Sequence[Flag] = ()
    parameters: Sequence[tuple[int, str, int]] = ()
    reported_phase: str = ""
    reported_parameters: Sequence[str] = ()
    own_gradients: Sequence[tuple[int, bool]] = ()
    """(rank, whether its own gradient held NaN or Inf before any reduction), for the ranks that checked it."""
    data_parallel: bool = False
    """True if every gradient is reduced over other ranks before the optimizer's phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Origin of the non-finite values. `how` is the evidence that named `ranks`, which is empty if none is named."""

    ranks: tuple[int, ...]
    phase: Phase
    parameter: str
    how: str
    group: str = ""
    seq: int | None = None
    op: str = ""
    others: tuple[str, ...] = field(default=())


def locate(evidence: StepEvidence) -> Location:
    """Name ranks, phase and parameter of one bad step. Pure."""
    broken = [row.rank for row in evidence.rows if row.weights_broke]
    # Gradients are checked after the step's last pass. If weights broke between two passes, they show no origin.
    parameter, others = ("", ()) if broken else _parameter(evidence)
    bad_loss = tuple(sorted(row.rank for row in evidence.rows if is_bad(row.local_loss) and row.rank not in broken))
    good_loss = [row.rank for row in evidence.rows if row.local_loss is not None and not is_bad(row.local_loss)]
    flagged = [flag for flag in evidence.flags if flag.nonfinite]
    if not flagged and not bad_loss and _only_norm(evidence):
        return Location(ranks=(), phase="unknown", parameter="", how=NORM, others=others)
    if flagged and not bad_loss and (_only_after_reduction(evidence, flagged) or _by_sharding(evidence, flagged)):
        return Location(ranks=(), phase="reduction", parameter=parameter, how="all_inputs_finite", others=others)
    if flagged:
        ranks, first = _earliest(evidence, flagged)
        forward = bool(set(ranks) & set(bad_loss))
        if forward and set(ranks) <= set(bad_loss):
            # A loss is computed before data ranks reduce anything, so each bad loss has a separate origin, unless the
            # ranks exchange values before it: features for a contrastive loss, tokens for experts, sums of a
            # tensor-parallel group. Each group exchanges separately, so no group's bad loss is a consequence of
            # another's.
            ranks = _separate_origins(evidence, flagged, bad_loss) if _precedes_loss(first) else bad_loss
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
        is_separate = good_loss or broken or len(evidence.rows) == 1
        named = bad_loss if is_separate else tuple(sorted(row.rank for row in evidence.rows))
        return Location(ranks=named, phase="forward", parameter="", how="local_loss", others=others)
    if broken:
        ranks = tuple(broken) if len(evidence.rows) == 1 else ()
        return Location(ranks=ranks, phase="backward", parameter=parameter, how=WEIGHTS, others=others)
    if own := tuple(sorted(rank for rank, bad in evidence.own_gradients if bad)):
        return Location(ranks=own, phase="backward", parameter=parameter, how="own_gradient", others=others)
    if evidence.data_parallel and {rank for rank, _ in evidence.own_gradients} >= {row.rank for row in evidence.rows}:
        return Location(ranks=(), phase="reduction", parameter=parameter, how="own_gradient", others=others)
    if len(evidence.rows) == 1:
        phase: Phase = "backward" if parameter or evidence.rows[0].nonfinite_count else "unknown"
        return Location(ranks=(evidence.rows[0].rank,), phase=phase, parameter=parameter, how="single", others=others)
    if good_loss and any(flag.op not in _EXCHANGES for flag in evidence.flags):
        return Location(ranks=(), phase="reduction", parameter=parameter, how="all_inputs_finite", others=others)
    reported = evidence.reported_phase
    phase = "backward" if reported == "backward" or parameter else "forward" if reported == "forward" else "unknown"
    return Location(ranks=(), phase=phase, parameter=parameter, how="nothing", others=others)


def _only_norm(evidence: StepEvidence) -> bool:
    """True if every rank counted NaN and Inf in its gradients and found none, so that only the norm overflowed."""
    has_bad_norm = any(is_bad(row.grad_norm) for row in evidence.rows)
    return has_bad_norm and all(row.nonfinite_count == 0 for row in evidence.rows) and not evidence.parameters


def _only_after_reduction(evidence: StepEvidence, flagged: Sequence[Flag]) -> bool:
    """True if gradients were finite before their reduction, but not after it. The first flags then belong to the
    reduction of the norm, and its input is the reduced gradient. This holds only if every gradient is reduced: the NaN
    of a single tensor-parallel rank enters no reduction except the norm's.
    """
    if not evidence.data_parallel or any(flag.phase != "optimizer" for flag in flagged):
        return False
    return any(flag.phase == "backward" and flag.op not in _EXCHANGES for flag in evidence.flags)


def _by_sharding(evidence: StepEvidence, flagged: Sequence[Flag]) -> bool:
    """True if the result of a reduce-scatter was bad although all its inputs were finite. If the shards are replicated,
    the next reduction (over the replicas) is the first with a bad input, and shows this."""
    ranks, first = _earliest(evidence, flagged)
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


def _earliest(evidence: StepEvidence, flagged: Sequence[Flag]) -> tuple[tuple[int, ...], Flag]:
    """The members with a bad input of the earliest flagged collective. If several groups that share no rank have one,
    the collective that came soonest after the start of its rank's step counts.
    """
    roots = _roots(evidence, flagged)
    first = min(roots, key=lambda flag: (flag.since_begin_ns, flag.seq, flag.rank))
    same = [flag for flag in flagged if (flag.group, flag.seq) == (first.group, first.seq)]
    return tuple(sorted({flag.rank for flag in same})), first


def _separate_origins(evidence: StepEvidence, flagged: Sequence[Flag], bad_loss: Sequence[int]) -> tuple[int, ...]:
    """Ranks with a bad loss that also had a bad input in one of the earliest collectives before the loss."""
    roots = [flag for flag in _roots(evidence, flagged) if _precedes_loss(flag)]
    return tuple(sorted({flag.rank for flag in roots} & set(bad_loss)))


def _precedes_loss(flag: Flag) -> bool:
    """True if the loss is computed from the result. A loss function that gathers features is outside of the model."""
    return flag.phase == "forward" or (flag.op in _EXCHANGES and flag.phase not in ("backward", "optimizer"))


def _roots(evidence: StepEvidence, flagged: Sequence[Flag]) -> Sequence[Flag]:
    """Flags of collectives that are not a consequence of another flagged collective.

    Ranks begin a step at different times, so only calls of one rank are ordered (by the time since the step's start, a
    late rank's first collective may be later than the second collective of other ranks). A collective is a consequence
    if one of its members had entered another flagged collective before, because its input may come from that result.
    """
    calls = {(flag.group, flag.seq) for flag in flagged}
    fallout: set[tuple[str, int]] = set()
    by_rank: dict[int, list[Flag]] = {}
    for flag in evidence.flags:
        by_rank.setdefault(flag.rank, []).append(flag)
    for flags in by_rank.values():
        flags.sort(key=lambda flag: (flag.since_begin_ns, flag.seq))
        entered = [(flag.group, flag.seq) for flag in flags if (flag.group, flag.seq) in calls]
        fallout.update(call for call in entered[1:] if call != entered[0])
    return [flag for flag in flagged if (flag.group, flag.seq) not in fallout] or flagged


def _parameter(evidence: StepEvidence) -> tuple[str, tuple[str, ...]]:
    """The non-finite parameter nearest to the loss, and all non-finite parameters."""
    seen: dict[str, int] = {}
    for _, name, count in evidence.parameters:
        seen[name] = seen.get(name, 0) + count
    bad = [name for name, count in seen.items() if count > 0] or list(evidence.reported_parameters)
    return (bad[-1] if bad else ""), tuple(bad)


def is_bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
