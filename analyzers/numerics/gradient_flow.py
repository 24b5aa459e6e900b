"""Gradients that vanish or explode from the output to the input, in single blocks, or in the whole model.

1. Norm of a block in a sampled step: the root of the sum of squares over its parameters. A parameter's norm is the
   largest over the ranks: each rank has its own shard, and shards of one block are similar.
2. `wrong_blocks` finds the wrong blocks of one step, and the finding's cause. `zero`: no gradient at all. `trend`: the
   norm changes from block to block towards the input, by `trend_factor` over the depth. The slope is the median over
   all pairs of blocks, so that one deviating block does not change it. `layer`: the norm differs by `factor` from the
   median block, or from the trend if there is one. If several consecutive blocks next to the output are `factor` times
   above all others, the gradient has vanished in the others, not exploded in these.
3. A block is reported after `min_times` consecutive samples up to the newest, because a single step may be unusual.
4. `whole`: the norm of all gradients and the norm of the median block both exceed their largest value in the first
   quarter of the run by `trend_factor`, in at least the newest `min_times` samples.

A block is a name up to its number (`blocks.3`). A model without numbered blocks is not judged. Embedding and head are
not blocks: their norms have no peers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from analyzers.finding import Finding
from analyzers.numerics.policy import GradientFlowPolicy
from analyzers.policy import SHARED
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables

__all__ = ["block_of", "gradient_flow", "risen_since", "wrong_blocks"]

MAX_BLOCKS = 16
"""Maximum number of blocks listed in the evidence."""

_BLOCK = re.compile(r"^(.*?\.?\d+)\.")
_KINDS = ("vanishing_gradients", "exploding_gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBlock:
    """A block with a wrong gradient in one step: kind and cause of the finding, its norm and the norm of its peers."""

    kind: str
    cause: str
    norm: float
    reference: float
    per_block_ratio: float | None = None
    """For a trend: the norm of a block, divided by the norm of the following block (the one nearer to the output)."""


def gradient_flow(source: Source, scope: Scope, policy: GradientFlowPolicy = GradientFlowPolicy()) -> list[Finding]:
    """Return at most one finding of each kind, for the newest attempt. There are none if gradients were not sampled by
    parameter."""
    if missing_tables(source, "gradients"):
        return []
    ((attempt,),) = source.rows(
        "SELECT max(attempt) FROM gradients WHERE attempt = coalesce(?, attempt)", [scope.attempt]
    )
    samples, totals = _samples(source, attempt, scope.since_step)
    newest = sorted(samples)[-SHARED.window_samples :]
    judged = [(step, wrong_blocks(samples[step], policy)) for step in newest if samples[step]]
    findings = []
    for kind in _KINDS:
        steps_of = {
            block: steps
            for block in (judged[-1][1] if judged else ())
            if len(steps := _steps_in_a_row(judged, block, kind)) >= SHARED.min_times
        }
        if steps_of:
            findings.append(_finding(kind, attempt, steps_of, dict(judged), samples))
    if not any(found.kind == "exploding_gradients" for found in findings):
        middles = {step: median(norms.values()) for step, norms in samples.items() if len(norms) >= SHARED.min_times}
        if risen := risen_since({step: totals[step] for step in middles}, middles, policy):
            findings.append(_whole(attempt, risen, totals))
    return findings


def block_of(parameter: str) -> str:
    """`blocks.3` of `blocks.3.mlp.up.weight`; empty for a parameter outside of numbered blocks."""
    match = _BLOCK.match(parameter)
    return match[1] if match else ""


def wrong_blocks(
    norms: Mapping[str, float], policy: GradientFlowPolicy = GradientFlowPolicy()
) -> dict[str, WrongBlock]:
    """Find the wrong blocks of one step from the norm of each block. None are found if there are too few blocks to
    compare. Pure."""
    if len(norms) < SHARED.min_times:
        return {}
    alive = {block: norm for block, norm in norms.items() if norm > 0}
    middle = median(alive.values()) if alive else 0.0
    wrong = {
        block: WrongBlock(kind="vanishing_gradients", cause="zero", norm=0.0, reference=middle)
        for block in norms
        if block not in alive
    }
    if len(alive) < SHARED.min_times:
        return wrong
    usual = dict.fromkeys(alive, middle)
    for chain in _chains(norms):
        line = _trend([(place, alive[block]) for place, block in enumerate(chain) if block in alive], policy)
        if line is None:
            continue
        end, slope = line
        for distance, block in enumerate(reversed(chain)):
            if block not in alive:
                continue
            usual[block] = end * slope**distance
            if (alive[block] / end if slope > 1 else end / alive[block]) >= policy.trend_factor:
                wrong[block] = WrongBlock(
                    kind=_KINDS[slope > 1],
                    cause="trend",
                    norm=alive[block],
                    reference=end,
                    per_block_ratio=round(slope, 4),
                )
    for block, norm in alive.items():
        if norm < usual[block] / policy.factor or norm > usual[block] * policy.factor:
            kind = _KINDS[norm > usual[block]]
            wrong[block] = WrongBlock(kind=kind, cause="layer", norm=norm, reference=usual[block])
    return _vanished_behind(wrong, alive, policy)


def risen_since(
    totals: Mapping[int, float], middles: Mapping[int, float], policy: GradientFlowPolicy = GradientFlowPolicy()
) -> tuple[list[int], float] | None:
    """The newest consecutive steps in which the gradient norms are far above the norms at the run's start, and the
    largest norm of all gradients at the start; None if there are no such steps. Pure.

    `totals`, `middles`: by step, the norm of all gradients and of the median block.
    """
    steps = sorted(totals)
    # The first quarter is measured in steps and not in samples, because the newest samples may be closer together.
    quarter = steps[0] + (steps[-1] - steps[0]) / 4 if steps else 0.0
    num_past = max(SHARED.trend_values, sum(step <= quarter for step in steps))
    past = steps[:num_past]
    high: list[int] = []
    for step in reversed(steps[num_past:]):
        if any(
            values[step] <= policy.trend_factor * max(values[early] for early in past) for values in (totals, middles)
        ):
            break
        high.append(step)
    if len(high) < SHARED.min_times or not all(totals[step] > 0 for step in past):
        return None
    return high[::-1], max(totals[step] for step in past)


def _samples(source: Source, attempt: int, since_step: int) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """Return ({step: {block: norm}}, {step: norm of all gradients})."""
    rows = source.rows(
        """
        WITH numbered AS (SELECT step, row_number() OVER (ORDER BY step DESC) - 1 AS age, count(*) OVER () AS number
                          FROM (SELECT DISTINCT step FROM gradients WHERE attempt = ? AND step >= ?)),
             chosen AS (SELECT step FROM numbered WHERE age < ? OR age % greatest(1, number // ?) = 0)
        SELECT step, parameter, max(norm) FROM gradients SEMI JOIN chosen USING (step)
        WHERE attempt = ? AND isfinite(norm) GROUP BY step, parameter
        """,
        [attempt, since_step, SHARED.window_samples, SHARED.window_samples, attempt],
    )
    blocks: dict[int, dict[str, float]] = {}
    totals: dict[int, float] = {}
    for step, parameter, norm in rows:
        squares = blocks.setdefault(step, {})
        totals[step] = totals.get(step, 0.0) + float(norm) ** 2
        if block := block_of(parameter or ""):
            squares[block] = squares.get(block, 0.0) + float(norm) ** 2
    norms = {step: {block: square**0.5 for block, square in squares.items()} for step, squares in blocks.items()}
    return norms, {step: square**0.5 for step, square in totals.items()}


def _chains(blocks: Mapping[str, float]) -> list[list[str]]:
    """Blocks that follow each other, from the input to the output: `encoder.0`, `encoder.1`, ... are one chain."""
    chains: dict[str, list[tuple[int, str]]] = {}
    for block in blocks:
        prefix = block.rstrip("0123456789")
        chains.setdefault(prefix, []).append((int(block[len(prefix) :]), block))
    return [[block for _, block in sorted(chain)] for chain in chains.values()]


def _trend(points: Sequence[tuple[int, float]], policy: GradientFlowPolicy) -> tuple[float, float] | None:
    """Norm at the output end, and the factor from a block to the previous one; None if there is no trend."""
    if len(points) < SHARED.min_times:
        return None
    logs = [(place, math.log(norm)) for place, norm in points]
    slope = median((a[1] - b[1]) / (b[0] - a[0]) for a, b in combinations(logs, 2))
    if abs(slope) * (logs[-1][0] - logs[0][0]) < math.log(policy.trend_factor):
        return None
    end = median(value - slope * (logs[-1][0] - place) for place, value in logs)
    return math.exp(end), math.exp(slope)


def _vanished_behind(
    wrong: dict[str, WrongBlock], alive: Mapping[str, float], policy: GradientFlowPolicy
) -> dict[str, WrongBlock]:
    """If several consecutive blocks next to the output are far above the rest, report that the rest vanishes, not that
    these blocks explode."""
    for chain in _chains(alive):
        high = [b for b in chain if b in wrong and (wrong[b].kind, wrong[b].cause) == ("exploding_gradients", "layer")]
        rest = chain[: len(chain) - len(high)]
        if len(high) < 2 or not rest or chain[len(rest) :] != high:
            continue
        end = min(alive[block] for block in high)
        if max(alive[block] for block in rest) * policy.factor > end:
            continue
        for block in high:
            del wrong[block]
        for block in rest:
            wrong[block] = WrongBlock(kind="vanishing_gradients", cause="layer", norm=alive[block], reference=end)
    return wrong


def _steps_in_a_row(judged: Sequence[tuple[int, Mapping[str, WrongBlock]]], block: str, kind: str) -> list[int]:
    """The newest steps in which a block is wrong in this way, in order."""
    steps: list[int] = []
    for step, wrong in reversed(judged):
        if block not in wrong or wrong[block].kind != kind:
            break
        steps.append(step)
    return steps[::-1]


def _finding(
    kind: str,
    attempt: int,
    steps_of: Mapping[str, Sequence[int]],
    judged: Mapping[int, Mapping[str, WrongBlock]],
    samples: Mapping[int, Mapping[str, float]],
) -> Finding:
    first, last = min(steps[0] for steps in steps_of.values()), max(steps[-1] for steps in steps_of.values())
    now = judged[last]
    order = ("zero", "trend", "layer")
    blocks = [block for chain in _chains(samples[last]) for block in chain if block in steps_of]
    causes = sorted({now[block].cause for block in blocks}, key=order.index)
    worst = next(block for block in blocks if now[block].cause == causes[0])
    wrong = now[worst]
    norms = samples[last].values()
    return Finding(
        analyzer="gradient_flow",
        kind=kind,
        severity="warning",
        status="fired",
        first_step=first,
        last_step=last,
        cause=causes[0],
        summary=_summary(kind, worst, len(blocks) - 1, wrong, f"in steps {first} to {last}"),
        evidence={
            "blocks": blocks[:MAX_BLOCKS],
            "num_blocks": len(blocks),
            "num_blocks_of_model": len(norms),
            "norm": wrong.norm,
            "norm_of_others": wrong.reference,
            "norm_of_median_block": median(norms),
            "per_block_factor_ratio": wrong.per_block_ratio,
        },
        advice=kind.replace("_", "-"),
        attempt=attempt,
    )


def _summary(kind: str, block: str, num_more: int, wrong: WrongBlock, when: str) -> str:
    which = f"{block} and {num_more} more block{'s' * (num_more > 1)}" if num_more else block
    if wrong.cause == "zero":
        return f"No gradient reaches {which} {when}: every element is zero."
    if wrong.cause == "trend":
        verb = "shrinks" if kind == "vanishing_gradients" else "grows"
        return f"The gradient {verb} {wrong.per_block_ratio:.3g}x per block towards the input, {when}: see {which}."
    verb = "vanishes" if kind == "vanishing_gradients" else "explodes"
    return f"The gradient of {which} {verb} {when}: norm {wrong.norm:.3g} where others have {wrong.reference:.3g}."


def _whole(attempt: int, risen: tuple[list[int], float], totals: Mapping[int, float]) -> Finding:
    steps, before = risen
    norm = totals[steps[-1]]
    return Finding(
        analyzer="gradient_flow",
        kind="exploding_gradients",
        severity="warning",
        status="fired",
        first_step=steps[0],
        last_step=steps[-1],
        cause="whole",
        summary=f"All gradients explode in steps {steps[0]} to {steps[-1]}: norm {norm:.3g}, before {before:.3g}.",
        evidence={"norm": norm, "norm_of_start": before, "rise_factor_ratio": round(norm / before, 1)},
        advice="exploding-gradients",
        attempt=attempt,
    )
