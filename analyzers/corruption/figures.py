"""Figures of the corruption findings: which ranks agree with their replicas, and the gradient that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from analyzers.corruption.replicas import ALL_TENSORS
from analyzers.figures.drawing import bars, focus
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.ranks import agreement
from analyzers.figures.ranks.rank_values import against_others, attempt_of
from analyzers.finding import Finding, evidence_of
from analyzers.source import Source, floats, ints, lacking, missing_tables
from analyzers.wording import ranks_text

__all__ = ["FIGURES"]

MAX_CHECKS = 60
MAX_RANKS = 64


def replicas(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Agreement of each rank with its replicas at each check."""
    attempt = attempt_of(source, finding)
    if attempt is None or missing_tables(source, "fingerprints"):
        return
    table = source.query(
        """
        WITH mine AS (SELECT * FROM fingerprints WHERE attempt = ? AND rank >= 0),
             checks AS (SELECT step FROM (SELECT DISTINCT step FROM mine)
                        ORDER BY abs(step - ?), step LIMIT ?),
             votes AS (SELECT step, replica_group, tensor, hash, count(*) AS votes
                       FROM mine SEMI JOIN checks USING (step) GROUP BY ALL),
             usual AS (SELECT step, replica_group, tensor, arg_max(hash, votes) AS hash, max(votes) AS votes,
                              sum(votes) AS num FROM votes GROUP BY ALL)
        SELECT m.rank, m.step,
               max(CASE WHEN m.expected_hash IS NOT NULL AND m.hash <> m.expected_hash THEN 2
                        WHEN u.votes = u.num THEN 0
                        WHEN 2 * u.votes <= u.num OR m.hash <> u.hash THEN 1 ELSE 0 END) AS state
        FROM mine m JOIN usual u USING (step, replica_group, tensor) GROUP BY m.rank, m.step ORDER BY m.rank, m.step
        """,
        [attempt, finding.first_step or 0, MAX_CHECKS],
    )
    rank, step, state = ints(table["rank"]), ints(table["step"]), floats(table["state"])
    if not len(rank):
        return
    # Show all suspects, and of the other ranks the lowest until the limit is reached.
    wrong = sorted(set(finding.ranks) | set(rank[state > 0].tolist()))[:MAX_RANKS]
    others = [one for one in np.unique(rank).tolist() if one not in wrong]
    ranks = sorted(wrong + others[: MAX_RANKS - len(wrong)])
    steps = np.unique(step).tolist()
    grid = np.full((len(ranks), len(steps)), np.nan)
    for row, column, value in zip(rank.tolist(), step.tolist(), state.tolist(), strict=True):
        if row in ranks:
            grid[ranks.index(row), steps.index(column)] = value
    tensors = [str(name) for name in evidence_of(finding).get("tensors", ()) if name != ALL_TENSORS]
    figure = agreement.draw([f"rank {row}" for row in ranks], list(map(str, steps)), grid, x="step of the check")
    what = "Agreement with replicas" if finding.kind == "replica_mismatch" else "Checks of the state"
    yield Drawing(title=f"{what}{f': {tensors[0]}' if len(tensors) == 1 else ''}", figure=figure)


def corrupted_gradient(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The gradient's peak as expected, computed and recomputed, and the gradient norm over the steps."""
    numbers = evidence_of(finding)
    peak, recomputed, ratio = (numbers.get(name) for name in ("peak", "peak_again", "ratio"))
    if peak and ratio:
        values = {"expected": float(peak) / float(ratio), "first time": float(peak)}
        if recomputed is not None and np.isfinite(recomputed):
            values["recomputed"] = float(recomputed)
        figure = bars.draw(values, accused={"first time"}, x="largest gradient of the rank", unit="", log=True)
        yield Drawing(title=f"Gradients of {ranks_text(finding.ranks)} in step {finding.first_step}", figure=figure)
    attempt = attempt_of(source, finding)
    if attempt is not None and finding.ranks and not lacking(source, steps=("local_grad_norm",)):
        comparison = against_others(source, attempt, finding.ranks, "local_grad_norm")
        if len(comparison.x) > 1:
            figure = focus.draw(comparison, y="norm of the rank's own gradient", onset=finding.first_step, log=True)
            yield Drawing(title=f"Gradient norm of {ranks_text(finding.ranks)} against the others", figure=figure)


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "replica_mismatch": (replicas,),
    "fingerprint_chain_broken": (replicas,),
    "gradient_corrupted": (corrupted_gradient,),
}
