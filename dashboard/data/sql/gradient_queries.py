"""Gradients by parameter and step, limited to what a chart can show.

found = gradient_table(store)
found.columns["norm"], found.num_parameters          # the parameters shown, and the number of all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analyzers.figures.drawing.spaced_sample import spaced_sample
from analyzers.figures.gradients import MAX_PARAMETERS
from analyzers.source import Source
from dashboard.data.sql.queries import Columns, none

__all__ = ["MAX_GRADIENT_STEPS", "MAX_PARAMETERS", "Gradients", "gradient_table"]

MAX_GRADIENT_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """`columns`: parameter, step, norm, nonfinite; one row per parameter and step shown. `num_*`: total numbers."""

    columns: Columns
    num_parameters: int = 0
    num_steps: int = 0


_BAD = """CASE WHEN nonfinite_count IS NULL AND NOT (isfinite(norm) AND isfinite(max_abs)) THEN 1
          ELSE nonfinite_count END"""
"""Number of NaN and Inf values in a gradient; 1 if a device reported only that there were some."""


def gradient_table(source: Source) -> Gradients:
    """Gradient norms, and counts of NaN and Inf, of at most `MAX_PARAMETERS` parameters in some of the steps.

    1. The norm is the maximum over the ranks, as in the analyzers (`gradient_flow`): under plain data parallelism each
       rank records the whole gradient, and shards of one parameter have equal size. If several attempts ran a step, the
       newest counts. Counts of NaN and Inf are summed over all ranks and attempts.
    2. The steps are up to `MAX_GRADIENT_STEPS` evenly spaced ones (the newest is among them), and up to
       `MAX_GRADIENT_STEPS` of those with NaN or Inf.
    3. Parameters are those with NaN or Inf, those with the largest and the smallest norms, and evenly spaced others.
    """
    nothing = Gradients(columns=none("parameter", "step", "norm", "nonfinite"))
    if not source.has("gradients"):
        return nothing
    known = [int(step) for (step,) in source.rows("SELECT DISTINCT step FROM gradients ORDER BY step")]
    bad = source.rows(f"SELECT DISTINCT step FROM gradients WHERE {_BAD} > 0 ORDER BY step")
    if not known:
        return nothing
    steps = {
        *spaced_sample(known, MAX_GRADIENT_STEPS),
        *spaced_sample([int(step) for (step,) in bad], MAX_GRADIENT_STEPS),
    }
    chosen = f"""
        WITH chosen AS (SELECT *, attempt = max(attempt) OVER (PARTITION BY step) AS is_newest FROM gradients
                        WHERE step IN ({", ".join(map(str, sorted(steps)))}))
        """
    parameters = source.rows(
        f"""{chosen} SELECT parameter, coalesce(max({_BAD}), 0) > 0, max(norm) FILTER (isfinite(norm))
        FROM chosen GROUP BY parameter ORDER BY parameter"""
    )
    names = _chosen(parameters)
    columns = source.query(
        f"""{chosen} SELECT parameter, step, max(norm) FILTER (is_newest AND isfinite(norm)) AS norm,
               CAST(coalesce(sum({_BAD}), 0) AS DOUBLE) AS nonfinite
        FROM chosen SEMI JOIN (SELECT unnest(?::VARCHAR[]) AS parameter) USING (parameter)
        GROUP BY parameter, step ORDER BY step, parameter""",
        [names],
    )
    return Gradients(columns=columns, num_parameters=len(parameters), num_steps=len(known))


def _chosen(parameters: Sequence[tuple[str, bool, float | None]]) -> list[str]:
    """Choose the parameters to show from (name, True if it had NaN or Inf, largest norm)."""
    if len(parameters) <= MAX_PARAMETERS:
        return [name for name, _, _ in parameters]
    by_norm = [name for _, name in sorted((norm, name) for name, _, norm in parameters if norm is not None)]
    num_extremes = MAX_PARAMETERS // 4
    shown = dict.fromkeys(spaced_sample([name for name, is_bad, _ in parameters if is_bad], MAX_PARAMETERS // 2))
    shown |= dict.fromkeys(by_norm[-num_extremes // 2 :] + by_norm[: num_extremes // 2])
    others = [name for name, _, _ in parameters if name not in shown]
    return [*shown, *spaced_sample(others, MAX_PARAMETERS - len(shown))]
