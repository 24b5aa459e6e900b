"""Steps of a run for experiment trackers (TensorBoard, Weights & Biases), in the order of training.

    cursor = TrackedSteps(ranks="sampled")
    for step in cursor.take(store): tracker.step(step)        # steps that ended since the last call

1. The lowest rank with steps is the reference: the start times of its steps define the order of training. After a
   rollback a step is executed again with the same number, and each execution counts. The reference does not change
   within an attempt, even if records of a lower rank arrive later, because start times differ between ranks.
2. If a step was executed several times, a record of another rank is assigned to the execution that started nearest in
   time.
3. An execution is returned once all ranks have ended it or a later one, or the run is over (`is_over`).

Times are medians and maxima over the ranks; loss, norm and learning rate are the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from analyzers.account.time_classes import OWN_WORK, PHASES, WAITED, own
from analyzers.figures.drawing.spaced_sample import spaced_sample
from analyzers.numerics.gradient_flow import block_of
from analyzers.run.records.evaluations import evaluations
from analyzers.source import Source, missing_tables
from watch.exporting.otel.step_spans import SAMPLED_RANKS
from watch.exporting.trackers.tracker import TrackedStep

__all__ = ["RANKS", "SAMPLED_RANKS", "TrackedSteps"]

RANKS = ("none", "sampled", "all")
MAX_STEPS = 500
"""Executions per call."""
_SHARED = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/learning_rate": "lr"}


class TrackedSteps:
    """A cursor over the executions of steps.

    `done`: {attempt: start of the newest returned execution, epoch ns}; `leads`: {attempt: reference rank}.
    """

    def __init__(
        self,
        *,
        ranks: Literal["none", "sampled", "all"] = "sampled",
        done: Mapping[int, int] | None = None,
        leads: Mapping[int, int] | None = None,
    ) -> None:
        self._choice = ranks
        self.done: dict[int, int] = dict(done or {})
        self.leads: dict[int, int] = dict(leads or {})

    def take(self, source: Source, *, is_over: bool = False) -> list[TrackedStep]:
        """Return at most `MAX_STEPS` new steps."""
        if missing_tables(source, "steps"):
            return []
        attempts = [int(a) for (a,) in source.rows("SELECT DISTINCT attempt FROM steps WHERE rank >= 0 ORDER BY 1")]
        for attempt in attempts:
            if any(later in self.done for later in attempts if later > attempt):
                continue  # late records of an earlier attempt are dropped, because they would break the order
            taken = list(self._of(source, attempt, is_over or attempt < attempts[-1]))
            if taken:
                return taken
        return []

    def _of(self, source: Source, attempt: int, is_over: bool) -> Iterator[TrackedStep]:
        ((lowest,),) = source.rows("SELECT min(rank) FROM steps WHERE attempt = ? AND rank >= 0", [attempt])
        lead = self.leads.get(attempt, lowest)
        executions = self._executions(source, attempt, lead, is_over)
        if not executions:
            return
        by_rank = self._by_rank(source, attempt, lead, [int(row[1]) for row in executions])
        layers = _layers(source, attempt, [int(row[0]) for row in executions])
        newest = {step: begin for step, begin, *_ in executions}
        validation = {each.step: each for each in evaluations(source) if each.attempt == attempt}
        for step, begin_ns, end_ns, _, took, slowest, own_ratio, wait, tokens, memory, *rest in executions:
            shared, phases = rest[: len(_SHARED)], rest[len(_SHARED) :]
            values = {tag: value for tag, value in zip(_SHARED, shared, strict=True) if value is not None}
            if tokens and slowest:
                values["train/tokens_per_second"] = int(tokens) / (slowest / 1e9)
            times = {"seconds": took, "seconds_max": slowest, "wait_seconds": wait}
            times |= {f"{phase}_seconds": spent for phase, spent in zip(PHASES, phases, strict=True) if spent}
            values |= {f"step/{name}": spent / 1e9 for name, spent in times.items() if spent is not None}
            if (evaluated := validation.get(step)) is not None:
                values["validation/loss"] = evaluated.loss
                values |= {f"validation/{name}/loss": loss for name, loss in evaluated.sets.items()}
            if own_ratio is not None:
                values["step/slowest_own_work_ratio"] = own_ratio
            if memory is not None:
                values["step/memory_bytes_max"] = memory
            yield TrackedStep(
                step=step, attempt=attempt, wall_s=end_ns / 1e9, values=values, ranks=by_rank.get(begin_ns, {}),
                layers=layers.get(step, {}) if newest[step] == begin_ns else {},
            )  # fmt: skip
        self.done[attempt], self.leads[attempt] = int(executions[-1][1]), int(lead)

    def _executions(self, source: Source, attempt: int, lead: int, is_over: bool) -> list[tuple[Any, ...]]:
        """Return (step, start, end, finished ranks, ...) of the executions that can be returned."""
        medians = ", ".join(f"median({own(phase)})" for phase in PHASES)
        shared = ", ".join(f"max({column})" for column in _SHARED.values())  # NaN compares as the largest value
        rows = source.rows(
            f"""
            WITH {_NEAREST}
            SELECT step, begin_ns, max(start_ns + duration_ns) AS end_ns, count(duration_ns), median(duration_ns),
                   max(duration_ns), max(own_ns) / nullif(median(own_ns), 0), median(waited_ns), sum(tokens),
                   max(memory_bytes), {shared}, {medians}
            FROM (SELECT *, {OWN_WORK} AS own_ns, {WAITED} AS waited_ns FROM nearest)
            GROUP BY step, begin_ns HAVING end_ns IS NOT NULL ORDER BY begin_ns
            """,
            self._since(attempt, lead),
        )
        if is_over:
            return rows
        ((num_ranks,),) = source.rows(
            "SELECT count(DISTINCT rank) FROM steps WHERE attempt = ? AND rank >= 0 AND start_ns > ?",
            [attempt, self.done.get(attempt, 0)],
        )
        whole = [i for i, row in enumerate(rows) if row[3] >= num_ranks]
        return rows[: whole[-1] + 1] if whole else []

    def _by_rank(
        self, source: Source, attempt: int, lead: int, begins: Sequence[int]
    ) -> dict[int, dict[int, dict[str, float]]]:
        """Return {start of the execution: {rank: values}}."""
        ranks = self._ranks(source, attempt)
        if not ranks:
            return {}
        marks = ", ".join("?" * len(ranks))
        found: dict[int, dict[int, dict[str, float]]] = {}
        for begin_ns, rank, took, wait, own_ns, memory, loss in source.rows(
            f"WITH {_NEAREST} SELECT begin_ns, rank, duration_ns, {WAITED}, {OWN_WORK}, memory_bytes, local_loss "
            f"FROM nearest WHERE duration_ns IS NOT NULL AND rank IN ({marks}) AND begin_ns <= ?",
            [*self._since(attempt, lead), *ranks, begins[-1]],
        ):
            values = {"rank/step_seconds": took / 1e9}
            if wait is not None:
                values["rank/wait_seconds"] = wait / 1e9
            if own_ns is not None:
                values["rank/own_work_seconds"] = own_ns / 1e9
            if memory is not None:
                values["rank/memory_bytes"] = memory
            if loss is not None:
                values["rank/loss"] = loss
            found.setdefault(begin_ns, {})[rank] = values
        return found

    def _ranks(self, source: Source, attempt: int) -> list[int]:
        if self._choice == "none":
            return []
        found = source.rows("SELECT DISTINCT rank FROM ranks WHERE attempt = ? AND rank >= 0 ORDER BY rank", [attempt])
        ranks = [int(rank) for (rank,) in found]
        return spaced_sample(ranks, SAMPLED_RANKS) if self._choice == "sampled" else ranks

    def _since(self, attempt: int, lead: int) -> list[int]:
        done_ns = self.done.get(attempt, 0)
        return [attempt, lead, done_ns, MAX_STEPS, attempt, done_ns - _SLACK_NS]


_SLACK_NS = 60 * 10**9
"""Maximum lag of another node's clock behind the reference rank's clock."""
_NEAREST = """
    lead AS (SELECT step, start_ns AS begin_ns FROM steps
             WHERE attempt = ? AND rank = ? AND duration_ns IS NOT NULL AND start_ns > ? ORDER BY start_ns LIMIT ?),
    nearest AS (SELECT steps.*, lead.begin_ns FROM steps JOIN lead USING (step)
                WHERE attempt = ? AND rank >= 0 AND start_ns > ?
                QUALIFY row_number() OVER (
                    PARTITION BY rank, lead.begin_ns ORDER BY abs(start_ns - lead.begin_ns), start_ns) = 1)
"""


def _layers(source: Source, attempt: int, steps: Sequence[int]) -> dict[int, dict[str, float]]:
    """Return {step: {layer: norm}}: the root of the sum of squares over a layer's parameters, maximum over the
    ranks.
    """
    if missing_tables(source, "gradients"):
        return {}
    squares: dict[int, dict[str, float]] = {}
    for step, parameter, norm in source.rows(
        "SELECT step, parameter, max(norm) FROM gradients WHERE attempt = ? AND step BETWEEN ? AND ? "
        "AND isfinite(norm) GROUP BY step, parameter",
        [attempt, min(steps), max(steps)],
    ):
        layer = block_of(parameter or "") or str(parameter or "").split(".")[0]
        of_step = squares.setdefault(step, {})
        of_step[layer] = of_step.get(layer, 0.0) + norm * norm
    return {step: {layer: math.sqrt(total) for layer, total in found.items()} for step, found in squares.items()}
