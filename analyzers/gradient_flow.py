"""Gradients that vanish or explode by layer: a block whose gradient is out of all proportion to that of the others.

    findings = analyze(store)          # kinds vanishing_gradients, exploding_gradients

1. Norm of a block in a sampled step: the root of the sum of squares over its parameters, largest over the ranks (each
   rank has its own shards, and shards of one block are alike).
2. A block is compared with the median block of the same step: far below it gradients vanish, far above they explode.
3. It counts when it is so in `min_samples` samples in a row, the newest included: a step may be odd.

Blocks are the names up to their number (`blocks.3`); a model without numbered blocks is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .finding import Finding
from .source import Source, missing_tables

__all__ = ["GradientFlowPolicy", "analyze", "block_of", "out_of_proportion"]

_BLOCK = re.compile(r"^(.*?\.?\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlowPolicy:
    """What is out of all proportion. Blocks of a healthy transformer lie within a factor of ten of each other, at the
    start of training and in very deep models of a hundred."""

    factor: float = 1e4
    """How far from the median block."""
    min_samples: int = 3
    """Samples in a row."""
    min_blocks: int = 3
    """Blocks from which a median is the others'."""
    window_samples: int = 20
    """Newest samples that are looked at."""


def analyze(source: Source, policy: GradientFlowPolicy | None = None) -> list[Finding]:
    """One finding a kind at most, of the newest attempt; none where gradients were not sampled by parameter."""
    policy = policy or GradientFlowPolicy()
    if missing_tables(source, "gradients"):
        return []
    ((attempt,),) = source.rows("SELECT max(attempt) FROM gradients")
    rows = source.rows(
        """
        WITH newest AS (SELECT DISTINCT step FROM gradients WHERE attempt = ? ORDER BY step DESC LIMIT ?)
        SELECT step, parameter, max(norm) FROM gradients SEMI JOIN newest USING (step)
        WHERE attempt = ? AND isfinite(norm) GROUP BY step, parameter
        """,
        [attempt, policy.window_samples, attempt],
    )
    samples: dict[int, dict[str, float]] = {}
    for step, parameter, norm in rows:
        if block := block_of(parameter or ""):
            blocks = samples.setdefault(step, {})
            blocks[block] = blocks.get(block, 0.0) + float(norm) ** 2
    norms = {step: {block: square**0.5 for block, square in blocks.items()} for step, blocks in samples.items()}
    findings = []
    for kind, sign in (("vanishing_gradients", -1), ("exploding_gradients", 1)):
        found = out_of_proportion(norms, sign, policy)
        if found:
            findings.append(_finding(kind, attempt, found, norms, policy))
    return findings


def block_of(parameter: str) -> str:
    """`blocks.3` of `blocks.3.mlp.up.weight`; nothing for a parameter outside of numbered blocks."""
    match = _BLOCK.match(parameter)
    return match[1] if match else ""


def out_of_proportion(
    norms: Mapping[int, Mapping[str, float]], sign: int, policy: GradientFlowPolicy
) -> dict[str, list[int]]:
    """Blocks that are out of proportion by now, below (-1) or above (1) the median block, each with its last steps in a
    row. Pure."""
    odd: list[tuple[int, set[str]]] = []
    for step, blocks in sorted(norms.items()):
        if len(blocks) >= policy.min_blocks and (middle := median(blocks.values())) > 0:
            low, high = middle / policy.factor, middle * policy.factor
            odd.append((step, {b for b, norm in blocks.items() if (norm < low if sign < 0 else norm > high)}))
    found: dict[str, list[int]] = {}
    for block in odd[-1][1] if odd else ():
        steps: list[int] = []
        for step, blocks_of in reversed(odd):
            if block not in blocks_of:
                break
            steps.append(step)
        if len(steps) >= policy.min_samples:
            found[block] = steps[::-1]
    return found


def _finding(
    kind: str,
    attempt: int,
    found: Mapping[str, Sequence[int]],
    norms: Mapping[int, Mapping[str, float]],
    policy: GradientFlowPolicy,
) -> Finding:
    blocks = sorted(found)
    first, last = min(steps[0] for steps in found.values()), max(steps[-1] for steps in found.values())
    norm, middle = norms[last][blocks[0]], median(norms[last].values())
    more = f" and {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
    return Finding(
        analyzer="gradient_flow",
        kind=kind,
        severity="warning",
        status="fired",
        first_step=first,
        last_step=last,
        cause="layer",
        summary=(
            f"the gradient of {blocks[0]}{more} has norm {norm:.3g} where the median block has {middle:.3g}, "
            f"in steps {first} to {last}"
        ),
        evidence={
            "blocks": blocks[:16],
            "norm": norm,
            "norm_of_median_block": middle,
            "limit_factor_ratio": policy.factor,
        },
        advice="vanishing-gradients" if kind == "vanishing_gradients" else "exploding-gradients",
        attempt=attempt,
    )
