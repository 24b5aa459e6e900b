"""Account of each step of each rank, as arrays: nanoseconds by class, for notebooks.

account = account_by_step(source, first_step=100, last_step=200)
account.ns.shape                      # (ranks, steps, classes)
account.of("waiting")[3]              # of rank 3, by step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.account.time_classes import GAPS, PHASES, sums_sql
from analyzers.source import Source, floats, ints, lacking

__all__ = ["CLASSES", "AccountByStep", "account_by_step"]

CLASSES = (*PHASES, *GAPS, "waiting", "host_late", "not_measured")
"""Own work by phase and by gap between phases, waiting (transfers included), a GPU's wait for its host, and time that
no column accounts for."""
MAX_SHOWN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountByStep:
    """`ns[i, j, k]`: nanoseconds of class `classes[k]` in step `steps[j]` of rank `ranks[i]`; NaN: not measured."""

    ranks: npt.NDArray[np.int64]
    """Global ranks, in order."""
    steps: npt.NDArray[np.int64]
    """Step numbers, in order. If a step ran more than once, its last execution counts."""
    classes: tuple[str, ...]
    """Always `CLASSES`. The measured classes of a rank and step add up to the duration of the step."""
    ns: npt.NDArray[np.float64]
    """(ranks, steps, classes)."""

    def of(self, name: str) -> npt.NDArray[np.float64]:
        """Nanoseconds of one class, (ranks, steps). Raises ValueError."""
        if name not in self.classes:
            raise ValueError(f"{name}: the classes are {', '.join(self.classes)}")
        values: npt.NDArray[np.float64] = self.ns[:, :, self.classes.index(name)]
        return values

    def _repr_html_(self) -> str:
        """Median milliseconds of a step by rank and class, for a notebook."""
        rows = []
        for row, rank in enumerate(self.ranks[:MAX_SHOWN]):
            by_class = self.ns[row].T
            medians = [np.nanmedian(ns) / 1e6 if np.isfinite(ns).any() else np.nan for ns in by_class]
            shown = "".join(f"<td>{'' if np.isnan(ms) else f'{ms:.2f}'}</td>" for ms in medians)
            rows.append(f"<tr><th>rank {rank}</th>{shown}</tr>")
        heads = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in self.classes)
        which = f", first {MAX_SHOWN} of {len(self.ranks):,} ranks" if len(self.ranks) > MAX_SHOWN else ""
        caption = f"<caption>median milliseconds of a step{which}</caption>"
        return f"<table>{caption}<thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def account_by_step(source: Source, *, first_step: int = 0, last_step: int | None = None) -> AccountByStep:
    """Read the finished steps from `first_step` to `last_step`."""
    empty = AccountByStep(
        ranks=np.empty(0, np.int64), steps=np.empty(0, np.int64), classes=CLASSES, ns=np.empty((0, 0, len(CLASSES)))
    )
    if lacking(source, steps=("duration_ns",)):
        return empty
    parameters: list[Any] = [first_step] + ([] if last_step is None else [last_step])
    newest = f"""
        SELECT * FROM steps
        WHERE rank >= 0 AND duration_ns IS NOT NULL AND step >= ? {"" if last_step is None else "AND step <= ?"}
        QUALIFY row_number() OVER (PARTITION BY rank, step ORDER BY attempt DESC, start_ns DESC) = 1
        """
    sums = sums_sql(newest, "rank, step", more=[("count", "collective_wait_ns")])
    columns = list(source.query(sums, parameters).values())
    ranks_read, steps_read, num_waits, _, took, waited_in_phases, waited_in_gaps, late, *spent = columns
    # Where no wait was recorded (ranks on GPUs), waiting is unknown (NaN), and the time counts as not measured.
    waited = np.where(ints(num_waits) > 0, floats(waited_in_phases) + floats(waited_in_gaps), np.nan)
    host_late = np.where(ints(num_waits) > 0, floats(late), np.nan)
    classes = [*map(floats, spent), waited, host_late]
    classes.append(np.maximum(floats(took) - np.nansum(classes, axis=0), 0.0))
    rank, step = ints(ranks_read), ints(steps_read)
    if not len(rank):
        return empty
    ranks, row = np.unique(rank, return_inverse=True)
    steps, column = np.unique(step, return_inverse=True)
    ns = np.full((len(ranks), len(steps), len(CLASSES)), np.nan)
    for number in range(len(CLASSES)):
        ns[row, column, number] = classes[number]
    return AccountByStep(ranks=ranks, steps=steps, classes=CLASSES, ns=ns)
