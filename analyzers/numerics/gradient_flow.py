"""Gradients that vanish or explode on their way from the output to the input, in single blocks, or in the whole model.

    findings = analyze(store)          # kinds vanishing_gradients, exploding_gradients

1. Norm of a block in a sampled step: the root of the sum of squares over its parameters, largest over the ranks (each
   rank has its own shards, and shards of one block are alike).
2. `judge_sample` says of one step which blocks are wrong, and how (the finding's cause): `zero`, no gradient at all;
   `trend`, the norm changes from block to block towards the input and by `trend_factor` over the whole depth (the
   slope is the median of the slopes between all pairs of blocks, so that single odd blocks do not tilt it); `layer`,
   `factor` away from the median block, or from the trend where there is one. Several blocks in a row before the output
   that stand that far above all others are no explosion: behind them the gradient has vanished.
3. It counts when it is so in `min_samples` samples in a row, the newest included: a step may be odd.
4. `whole`: the norm of all gradients together, and that of the median block with it, are `own_factor` above all that
   the first quarter of the run's own samples had, in the newest `min_samples`.

Blocks are the names up to their number (`blocks.3`); a model without numbered blocks is not looked at. Embedding and
head are no blocks: their norms are their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from analyzers.finding import Finding
from analyzers.source import Source, missing_tables

__all__ = ["GradientFlowPolicy", "analyze", "block_of", "judge_sample", "risen_since"]

_BLOCK = re.compile(r"^(.*?\.?\d+)\.")
_KINDS = ("vanishing_gradients", "exploding_gradients")
_SHOWN_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlowPolicy:
    """What is out of all proportion. Blocks of a healthy transformer lie within a factor of ten of each other, at the
    start of training and in very deep models of a hundred (measured from 4 to 64 layers: 21 at most)."""

    factor: float = 1e4
    """How far from the median block a single one may be."""
    trend_factor: float = 1e3
    """How much the norm may change from the last block to the first where it does so from block to block: no accident
    of one layer does that, hence less than `factor`."""
    own_factor: float = 1e3
    """How much all gradients may grow over the largest of the run's first quarter. Warm-up, another batch size and a
    new data set stay far below."""
    own_samples: int = 5
    """Fewest samples of that first quarter."""
    min_samples: int = 3
    """Samples in a row."""
    min_blocks: int = 3
    """Blocks from which a median is the others' and a slope a trend."""
    window_samples: int = 20
    """Newest samples that are looked at, and as many again, evenly spread, of those before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """What is wrong with a block in one step: kind and cause of the finding, its norm and that of the comparison."""

    kind: str
    cause: str
    norm: float
    reference: float
    per_block_ratio: float | None = None
    """Of a trend: norm of a block over that of the block behind it, nearer to the output."""


def analyze(source: Source, policy: GradientFlowPolicy | None = None) -> list[Finding]:
    """One finding a kind at most, of the newest attempt; none where gradients were not sampled by parameter."""
    policy = policy or GradientFlowPolicy()
    if missing_tables(source, "gradients"):
        return []
    ((attempt,),) = source.rows("SELECT max(attempt) FROM gradients")
    samples, totals = _samples(source, attempt, policy)
    newest = sorted(samples)[-policy.window_samples :]
    judged = [(step, judge_sample(samples[step], policy)) for step in newest if samples[step]]
    findings = []
    for kind in _KINDS:
        steps_of = {
            block: steps
            for block in (judged[-1][1] if judged else ())
            if len(steps := _steps_in_a_row(judged, block, kind)) >= policy.min_samples
        }
        if steps_of:
            findings.append(_finding(kind, attempt, steps_of, dict(judged), samples))
    if not any(found.kind == "exploding_gradients" for found in findings):
        middles = {step: median(norms.values()) for step, norms in samples.items() if len(norms) >= policy.min_blocks}
        if risen := risen_since({step: totals[step] for step in middles}, middles, policy):
            findings.append(_whole(attempt, risen, totals))
    return findings


def block_of(parameter: str) -> str:
    """`blocks.3` of `blocks.3.mlp.up.weight`; nothing for a parameter outside of numbered blocks."""
    match = _BLOCK.match(parameter)
    return match[1] if match else ""


def judge_sample(norms: Mapping[str, float], policy: GradientFlowPolicy | None = None) -> dict[str, Wrong]:
    """Which blocks of one step are wrong. Pure: norm by block; too few blocks say nothing."""
    policy = policy or GradientFlowPolicy()
    if len(norms) < policy.min_blocks:
        return {}
    alive = {block: norm for block, norm in norms.items() if norm > 0}
    middle = median(alive.values()) if alive else 0.0
    wrong = {
        block: Wrong(kind="vanishing_gradients", cause="zero", norm=0.0, reference=middle)
        for block in norms
        if block not in alive
    }
    if len(alive) < policy.min_blocks:
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
                wrong[block] = Wrong(
                    kind=_KINDS[slope > 1],
                    cause="trend",
                    norm=alive[block],
                    reference=end,
                    per_block_ratio=round(slope, 4),
                )
    for block, norm in alive.items():
        if norm < usual[block] / policy.factor or norm > usual[block] * policy.factor:
            kind = _KINDS[norm > usual[block]]
            wrong[block] = Wrong(kind=kind, cause="layer", norm=norm, reference=usual[block])
    return _turned_round(wrong, alive, policy)


def risen_since(
    totals: Mapping[int, float], middles: Mapping[int, float], policy: GradientFlowPolicy | None = None
) -> tuple[list[int], float] | None:
    """The newest steps in a row in which all gradients are far above the run's own past, and the largest norm of that
    past; None if they are not. Pure: by step, norm of all gradients and of the median block."""
    policy = policy or GradientFlowPolicy()
    steps = sorted(totals)
    quarter = steps[0] + (steps[-1] - steps[0]) / 4 if steps else 0.0  # the newest samples lie closer to each other
    num_past = max(policy.own_samples, sum(step <= quarter for step in steps))
    past = steps[:num_past]
    high: list[int] = []
    for step in reversed(steps[num_past:]):
        if any(
            values[step] <= policy.own_factor * max(values[early] for early in past) for values in (totals, middles)
        ):
            break
        high.append(step)
    if len(high) < policy.min_samples or not all(totals[step] > 0 for step in past):
        return None
    return high[::-1], max(totals[step] for step in past)


def _samples(
    source: Source, attempt: int, policy: GradientFlowPolicy
) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """By step: norm of each block, and of all gradients together."""
    rows = source.rows(
        """
        WITH numbered AS (SELECT step, row_number() OVER (ORDER BY step DESC) - 1 AS age, count(*) OVER () AS number
                          FROM (SELECT DISTINCT step FROM gradients WHERE attempt = ?)),
             chosen AS (SELECT step FROM numbered WHERE age < ? OR age % greatest(1, number // ?) = 0)
        SELECT step, parameter, max(norm) FROM gradients SEMI JOIN chosen USING (step)
        WHERE attempt = ? AND isfinite(norm) GROUP BY step, parameter
        """,
        [attempt, policy.window_samples, policy.window_samples, attempt],
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
    """Norm at the output end, and the factor from a block to the one before it; None where there is no trend."""
    if len(points) < policy.min_blocks:
        return None
    logs = [(place, math.log(norm)) for place, norm in points]
    slope = median((a[1] - b[1]) / (b[0] - a[0]) for a, b in combinations(logs, 2))
    if abs(slope) * (logs[-1][0] - logs[0][0]) < math.log(policy.trend_factor):
        return None
    end = median(value - slope * (logs[-1][0] - place) for place, value in logs)
    return math.exp(end), math.exp(slope)


def _turned_round(wrong: dict[str, Wrong], alive: Mapping[str, float], policy: GradientFlowPolicy) -> dict[str, Wrong]:
    """The same, with the blocks behind a healthy output end vanishing in place of that end exploding."""
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
            wrong[block] = Wrong(kind="vanishing_gradients", cause="layer", norm=alive[block], reference=end)
    return wrong


def _steps_in_a_row(judged: Sequence[tuple[int, Mapping[str, Wrong]]], block: str, kind: str) -> list[int]:
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
    judged: Mapping[int, Mapping[str, Wrong]],
    samples: Mapping[int, Mapping[str, float]],
) -> Finding:
    first, last = min(steps[0] for steps in steps_of.values()), max(steps[-1] for steps in steps_of.values())
    now = judged[last]
    order = ("zero", "trend", "layer")
    blocks = [block for chain in _chains(samples[last]) for block in chain if block in steps_of]
    causes = sorted({now[block].cause for block in blocks}, key=order.index)
    worst = next(block for block in blocks if now[block].cause == causes[0])
    wrong = now[worst]
    more = f" and {len(blocks) - 1} more block{'s' * (len(blocks) > 2)}" if len(blocks) > 1 else ""
    when = f"in steps {first} to {last}"
    match wrong.cause:
        case "zero":
            verb = "have" if more else "has"
            told = f"{worst}{more} {verb} no gradient at all: every element is zero, {when}"
        case "trend":
            verb = "shrinks" if kind == "vanishing_gradients" else "grows"
            told = (
                f"the gradient {verb} from block to block towards the input, {wrong.per_block_ratio:.3g}x a block: "
                f"{worst}{more} has norm {wrong.norm:.3g}, the block at the output {wrong.reference:.3g}, {when}"
            )
        case _:
            told = (
                f"the gradient of {worst}{more} has norm {wrong.norm:.3g} where the others have about "
                f"{wrong.reference:.3g}, {when}"
            )
    norms = samples[last].values()
    return Finding(
        analyzer="gradient_flow",
        kind=kind,
        severity="warning",
        status="fired",
        first_step=first,
        last_step=last,
        cause=causes[0],
        summary=told,
        evidence={
            "blocks": blocks[:_SHOWN_BLOCKS],
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
        summary=f"the gradients of all blocks have exploded: norm {norm:.3g} where the run's own start had at most "
        f"{before:.3g}, in steps {steps[0]} to {steps[-1]}",
        evidence={"norm": norm, "norm_of_start": before, "rise_factor_ratio": round(norm / before, 1)},
        advice="exploding-gradients",
        attempt=attempt,
    )
