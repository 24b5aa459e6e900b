"""Figures of the numerics findings: loss, non-finite values, gradients by block, loss scale, noise, expert load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from analyzers.figures import course, gradients, loss, numbers
from analyzers.figures.drawing import focus, series
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.ranks import agreement
from analyzers.figures.ranks.rank_values import attempt_of
from analyzers.finding import Finding, evidence_of
from analyzers.numerics.gradient_flow import block_of
from analyzers.numerics.loss_scale import overflows
from analyzers.run.records.evaluations import evaluations
from analyzers.source import Source, floats, ints, lacking, missing_tables

__all__ = ["FIGURES", "loss_around"]

AROUND_STEPS = 40
"""Steps before and after a finding in its picture of the loss."""
MAX_RANKS = 64
MAX_SAMPLES = 400
MAX_CALLS = 24


def loss_around(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The loss and the gradient norm around the finding's steps."""
    if finding.first_step is None:
        return
    curve = course.loss_curve(source)
    step = ints(curve["step"])
    last = finding.last_step if finding.last_step is not None else finding.first_step
    near = (step >= finding.first_step - AROUND_STEPS) & (step <= last + AROUND_STEPS)
    if near.sum() < 2:
        return
    found = [mark for mark in course.marks(source) if mark.step is not None and step[near].min() <= mark.step]
    found = [mark for mark in found if mark.step is not None and mark.step <= step[near].max()]
    figure = loss.draw(
        {name: np.asarray(column)[near] for name, column in curve.items()}, found, [finding], is_numbered=False
    )
    yield Drawing(title="Loss and gradient norm around the finding", figure=figure)


def nonfinite(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Draw the ranks that passed NaN or Inf to collectives, the parameters that hold NaN or Inf, and the loss around
    that step. A reduction spreads NaN to all ranks, so only its inputs show where the NaN began.
    """
    attempt = attempt_of(source, finding)
    if attempt is not None and finding.first_step is not None:
        yield from _inputs(source, attempt, finding.first_step)
        yield from _bad_gradients(source, attempt, finding.first_step)
    yield from loss_around(source, finding)


def _inputs(source: Source, attempt: int, step: int) -> Iterator[Drawing]:
    """The calls of the step in the order of issue, from shortly before the first call with a bad input."""
    if lacking(source, collectives=("nonfinite",)):
        return
    rows = source.rows(
        """
        SELECT process_group, seq, min(op), rank, bool_or(nonfinite), min(issue_ns) FROM collectives
        WHERE attempt = ? AND step = ? AND rank >= 0 AND nonfinite IS NOT NULL AND op NOT IN ('send', 'recv')
          AND phase IS DISTINCT FROM 'replay'
        GROUP BY process_group, seq, rank ORDER BY min(issue_ns)
        """,
        [attempt, step],
    )
    calls = list(dict.fromkeys((str(group), int(seq), str(op)) for group, seq, op, *_ in rows))
    bad = {(str(group), int(seq), str(op)) for group, seq, op, _, nonfinite, _ in rows if nonfinite}
    if not bad:
        return
    first = min(calls.index(call) for call in bad)
    calls = calls[max(0, first - 4) : max(0, first - 4) + MAX_CALLS]
    culprits = {int(rank) for *_, rank, nonfinite, _ in rows if nonfinite}
    ranks = sorted(sorted({int(row[3]) for row in rows}, key=lambda rank: (rank not in culprits, rank))[:MAX_RANKS])
    grid = np.full((len(ranks), len(calls)), np.nan)
    for group, seq, op, rank, nonfinite, _ in rows:
        call = (str(group), int(seq), str(op))
        if call in calls and int(rank) in ranks:
            grid[ranks.index(int(rank)), calls.index(call)] = float(nonfinite)
    groups = sorted({group for group, *_ in calls})
    only = groups[0] if len(groups) == 1 else ""
    figure = agreement.draw(
        [f"rank {rank}" for rank in ranks],
        [f"{op} {seq}" if only else f"{op} {seq} of {group}" for group, seq, op in calls], grid,
        x=f"calls{f' of {only}' if only else ''} in the order of issue",
        words={0: "finite", 1: "held NaN or Inf"}, legend=("finite", "NaN or Inf"),
    )  # fmt: skip
    yield Drawing(title=f"Inputs of collectives in step {step}, before they were reduced", figure=figure)


def _bad_gradients(source: Source, attempt: int, step: int) -> Iterator[Drawing]:
    if not missing_tables(source, "gradients"):
        table = source.query(
            "SELECT parameter, rank, CAST(max(coalesce(nonfinite_count, 0)) AS DOUBLE) AS nonfinite FROM gradients "
            "WHERE attempt = ? AND step = ? GROUP BY parameter, rank ORDER BY rank",
            [attempt, step],
        )
        if (floats(table["nonfinite"]) > 0).any():
            figure = gradients.nonfinite(table, across="rank")
            title = f"NaN and Inf in the gradients of step {step}, by parameter and the rank that holds it"
            yield Drawing(title=title, figure=figure)
            return
    if lacking(source, steps=("nonfinite_count",)):
        return
    table = source.query(
        "SELECT 'rank ' || rank AS parameter, step, CAST(max(coalesce(nonfinite_count, 0)) AS DOUBLE) AS nonfinite "
        "FROM steps WHERE attempt = ? AND rank >= 0 AND step BETWEEN ? AND ? GROUP BY rank, step ORDER BY rank, step",
        [attempt, step - AROUND_STEPS // 2, step + AROUND_STEPS // 2],
    )
    if (floats(table["nonfinite"]) > 0).any():
        yield Drawing(title="NaN and Inf among each rank's gradients", figure=gradients.nonfinite(table))


def flow(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The gradient norm of each block over the samples: the blocks named, and the spread of the others."""
    attempt = attempt_of(source, finding)
    if attempt is None or missing_tables(source, "gradients"):
        return
    rows = source.rows(
        """
        SELECT step, parameter, max(norm) FROM gradients
        WHERE attempt = ? AND isfinite(norm)
          AND step IN (SELECT DISTINCT step FROM gradients WHERE attempt = ? ORDER BY step DESC LIMIT ?)
        GROUP BY step, parameter
        """,
        [attempt, attempt, MAX_SAMPLES],
    )
    squares: dict[str, dict[int, float]] = {}
    for step, parameter, norm in rows:
        if block := block_of(parameter or ""):
            by_step = squares.setdefault(block, {})
            by_step[int(step)] = by_step.get(int(step), 0.0) + float(norm) ** 2
    steps = sorted({step for by_step in squares.values() for step in by_step})
    blocks = {name: np.array([sums.get(step, np.nan) ** 0.5 for step in steps]) for name, sums in squares.items()}
    accused = {str(name) for name in evidence_of(finding).get("blocks", ())}
    if len(steps) > 1 and accused & set(blocks):
        at = np.array(steps, dtype=np.int64)
        comparison = focus.RankComparison.of_lines(at, blocks, accused)
        figure = focus.draw(
            comparison, y="gradient norm of a block", onset=finding.first_step, others="other blocks, min to max",
            log=True,
        )  # fmt: skip
        yield Drawing(title="Gradient norm by block", figure=figure)


def scale(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The loss scale after each overflow, and the start of the collapse."""
    changes = [(overflow.step, overflow.scale) for overflow in overflows(source, attempt_of(source, finding))]
    if changes:
        figure = numbers.scale(changes)
        focus.mark_onset(figure, finding.first_step)
        yield Drawing(title="Loss scale after each overflow", figure=figure)


def validation(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The validation loss next to the training loss, and where the rise began."""
    curve, evaluated = course.loss_curve(source), evaluations(source)
    if evaluated and len(curve["loss"]):
        figure = loss.draw(curve, evaluated=evaluated)
        focus.mark_onset(figure, finding.first_step)
        yield Drawing(title="Validation loss and training loss", figure=figure)


def noise(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The noise scale over the run, and the batch size."""
    scales = [one for one in evidence_of(finding).get("noise_scale_by_step", ()) if one.get("tokens") is not None]
    batch = evidence_of(finding).get("batch_tokens")
    if len(scales) < 2:
        return
    at = np.array([int(one["step"]) for one in scales])
    tokens = np.array([float(one["tokens"]) for one in scales])
    figure = series.draw(
        [series.Series(name="noise scale", x=at, y=tokens)], x="step", y="tokens", log=bool((tokens > 0).all())
    )
    focus.mark_limit(figure, None if not batch else (float(batch), "batch size"))
    yield Drawing(title="Gradient noise scale and batch size", figure=figure)


def experts(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The load of the named expert over the samples, and the spread of the loads of the block's other experts."""
    layer = finding.evidence.get("layer", finding.evidence.get("worst_layer"))
    attempt = attempt_of(source, finding)
    if layer is None or attempt is None or missing_tables(source, "experts"):
        return
    is_dropped = finding.cause == "dropped"
    value = "sum(dropped) / greatest(1, sum(tokens))" if is_dropped else (
        "sum(tokens) * count(*) OVER (PARTITION BY step) / greatest(1, sum(sum(tokens)) OVER (PARTITION BY step))"
    )  # fmt: skip
    rows = source.rows(
        f"SELECT step, expert, CAST({value} AS DOUBLE) FROM experts WHERE attempt = ? AND layer = ? "
        "GROUP BY step, expert ORDER BY step, expert",
        [attempt, layer],
    )
    steps = np.unique([step for step, *_ in rows])
    found: dict[str, np.ndarray] = {}
    for step, expert, load in rows:
        found.setdefault(f"expert {expert}", np.full(len(steps), np.nan))[np.searchsorted(steps, step)] = load
    if len(steps) < 2:
        return
    accused = {f"expert {finding.evidence['expert']}"} if "expert" in finding.evidence else set()
    if is_dropped:
        accused = {max(found, key=lambda name: float(np.nanmean(found[name])))}
    figure = focus.draw(
        focus.RankComparison.of_lines(steps, found, accused), others="other experts, min to max",
        y="share of its tokens dropped" if is_dropped else "load over an even share",
        limit=None if is_dropped else (1.0, "an even share"),
    )  # fmt: skip
    yield Drawing(title=f"{'Dropped tokens' if is_dropped else 'Load'} by expert of block {layer}", figure=figure)


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "non_finite": (nonfinite,),
    "loss_spike": (loss_around,),
    "divergence": (loss_around,),
    "overfitting": (validation,),
    "loss_scale_collapse": (scale,),
    "vanishing_gradients": (flow,),
    "exploding_gradients": (flow,),
    "gradient_noise": (noise,),
    "expert_imbalance": (experts,),
}
