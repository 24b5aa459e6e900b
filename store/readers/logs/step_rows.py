"""Convert the printed steps and progress bars of one rank to rows of table `steps`.

    rows = step_rows(rank, lines)

1. A line without a step number gets the number of the preceding state of the training bar; without a bar, lines are
   counted.
2. The training bar is the one with the most steps, preferably with losses. A new epoch starts when the bar restarts.
   If epoch or step numbers restart, another training starts (a fold, a trial).
3. A duration that is not printed is derived from the printed throughput, scaled to the time between lines. Without a
   throughput, it is the time between lines. If a duration is printed, `other_durations` holds the derived one.
4. The times of single steps are recovered from the bar's smoothed rate (`bar_times`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from store.readers.bar_times import single_step_times
from store.readers.logs.log_file import LogStep
from store.readers.logs.progress_bars import Bar

__all__ = ["step_rows"]

SKIPPED_RATIO = 20
"""If a bar's first advance is at least this many times its usual advance, the earlier steps were skipped (a resumed
job).
"""
SETTLE_STEPS = 40
"""Steps until skipped steps no longer affect tqdm's smoothed rate (each step keeps 0.7 of the old rate)."""


def step_rows(rank: int, lines: Sequence[LogStep]) -> list[dict[str, Any]]:
    """One row per step, ordered by each step's first line."""
    name = _training_bar(lines)
    times = [line.prefix.wall_ns for line in lines if line.prefix.wall_ns is not None]
    num_cut = int(bool(lines) and lines[0].prefix.wall_ns is None)  # the file may begin in the middle of a line
    # Without times that increase, the lines are taken to be in the order of their steps.
    has_times = len(times) == len(lines) - num_cut and times == sorted(times)
    rows: dict[int, dict[str, Any]] = {}
    counted, at = 0, 0
    bar_epochs = _Epochs()
    skipped_before: dict[int, int] = {}
    engines: Counter[int] = Counter()
    settled_at = _settled(lines, name)
    passes, epochs = _Passes(), _Passes()
    usual = _usual_name(lines)
    is_after_other, last = False, None
    has_begun = False
    states = [bar for line in lines if (bar := line.step_line.bar) is not None and (bar.name, bar.total) == name]
    single_ns = {id(states[place]): took_ns for place, took_ns in single_step_times(states).items()}
    for line in lines:
        found = line.step_line
        if found.name and found.name != usual:
            continue
        if found.bar is not None and (found.bar.name, found.bar.total) == name:
            at = bar_epochs.step(found.bar)
            has_begun |= bar_epochs.has_begun
        elif found.bar is not None and (found.loss is None or name is not None):
            is_after_other = True
            continue  # a bar of an evaluation, or of another training
        is_counted = False
        is_bar_only = found.bar is not None and found.loss is None and found.grad_norm is None
        if found.step is not None:
            step = found.step
        elif name is not None:
            step = at
        else:
            counted += 1
            step, is_counted = counted, True
        if found.epoch is not None:
            epochs.take(found.epoch)
            has_begun |= epochs.has_begun
        if is_bar_only and not at:
            continue
        skipped = found.skipped
        if found.skipped_so_far is not None:
            # If a program has several DeepSpeed engines (actor, critic), each counts its own steps. At each step they
            # print in the same order.
            engine = engines[step]
            engines[step] += 1
            skipped = found.skipped_so_far - skipped_before[engine] if engine in skipped_before else None
            skipped_before[engine] = found.skipped_so_far
        total = found.total or (found.bar.total if found.bar and bar_epochs.is_of_all(found.bar) else None)
        passes.take(step)
        start_ns = line.prefix.wall_ns if has_times and not passes.is_other else None
        row = rows.setdefault(step, {"rank": rank, "step": step, "start_ns": start_ns})
        is_of_skipped = found.bar is not None and at <= settled_at and found.duration_ns == found.bar.duration_ns
        duration_ns = None if is_of_skipped or passes.is_other else found.duration_ns
        if duration_ns is not None and found.bar is not None and duration_ns == found.bar.duration_ns:
            duration_ns = single_ns.get(id(found.bar), duration_ns)
        for key, value in (
            ("duration_ns", duration_ns), ("data_ns", found.data_ns), ("loss", found.loss),
            ("grad_norm", found.grad_norm), ("lr", found.lr), ("throughput", found.throughput), ("skipped", skipped),
            ("loss_scale", found.loss_scale), ("total", total), ("is_counted", is_counted or None),
            ("per_epoch", found.bar.total if found.bar else found.per_epoch), ("of_step", found.of_step),
            ("is_of_bar", found.bar is not None or None), ("is_of_step", found.is_of_step or None),
            ("is_after_other", (is_after_other and row is not last) or None),
        ):  # fmt: skip
            if value is not None and row.get(key) is None:
                row[key] = value
        if found.loss is not None and not math.isfinite(found.loss):  # a NaN or Inf replaces a finite loss of the step
            row["loss"] = found.loss
        # The step begins a new training, unless the row has the loss of an earlier training with this step number.
        if has_begun and row.get("loss") is found.loss is not None:
            row["begins"], has_begun = True, False
        is_after_other, last = is_after_other and row is last, row
    ordered = list(rows.values())
    _mark_starts(ordered, passes.training_of)
    _add_durations(ordered, passes.pass_of)
    return ordered


def _mark_starts(rows: Sequence[dict[str, Any]], training_of: Mapping[float, int]) -> None:
    """Mark the first loss of a training that got further than the trainings before it: these have the same step
    numbers."""
    with_loss = sorted((row for row in rows if row.get("loss") is not None), key=lambda row: row["step"])
    for before, after in pairwise(with_loss):
        if training_of[before["step"]] != training_of[after["step"]]:
            after["begins"] = True


def _usual_name(lines: Sequence[LogStep]) -> str:
    """Name of the per-epoch lines that are used as steps; "" if other lines have steps, since the mean of an epoch is
    not a step.
    """
    if any(not line.step_line.name for line in lines):
        return ""
    return max(names, key=lambda name: names[name]) if (names := Counter(line.step_line.name for line in lines)) else ""


def _training_bar(lines: Sequence[LogStep]) -> tuple[str, int] | None:
    """Return (name, total) of the training bar: of the bars with losses (of all bars if none has any), the one with the
    most distinct steps. None to count lines.
    """
    states: dict[tuple[str, int], set[int]] = {}
    with_loss: Counter[tuple[str, int]] = Counter()
    last: tuple[str, int] | None = None
    for line in lines:
        bar = line.step_line.bar
        if bar is not None:
            last = (bar.name, bar.total)
            states.setdefault(last, set()).add(bar.step)
            with_loss[last] += line.step_line.loss is not None
        elif last is not None and line.step_line.loss is not None:
            with_loss[last] += 1
    num_losses = sum(
        line.step_line.loss is not None and line.step_line.step is None and line.step_line.bar is None for line in lines
    )
    if sum(map(len, states.values())) < num_losses:
        return None  # most states of the bars are missing from the log, so lines are counted instead
    return max(states, key=lambda key: (with_loss[key] > 0, len(states[key]), key[1]), default=None)


def _settled(lines: Sequence[LogStep], name: tuple[str, int] | None) -> int:
    """Last step at which skipped steps still affect the training bar's rate; 0 if none were skipped."""
    steps = [bar.step for line in lines if (bar := line.step_line.bar) is not None and (bar.name, bar.total) == name]
    at = list(dict.fromkeys(steps))[:SETTLE_STEPS]
    advances = [after - before for before, after in pairwise(at)]
    if len(advances) < 3 or at[0] > 1 or advances[0] < SKIPPED_RATIO * max(1.0, median(advances[1:])):
        return 0
    return at[1] + SETTLE_STEPS


class _Passes:
    """Passes over the step numbers. When the numbers restart at the first step, another training begins, with separate
    times.
    """

    def __init__(self) -> None:
        self.pass_of: dict[float, int] = {}
        self.training_of: dict[float, int] = {}
        """For each step, the number of the pass and the number of the training in which the step first occurred."""
        self.is_other = False
        """True if the newest pass belongs to another training than the previous pass."""
        self.has_begun = False
        """True if the newest line began another training."""
        self._turn = self._training = 0
        self._first: float | None = None
        self._newest = 0.0

    def take(self, step: float) -> None:
        """Note the step, or the epoch, of the next line."""
        self._first = step if self._first is None else self._first
        self.has_begun = step < self._newest and step <= self._first
        if step < self._newest:
            self._turn += 1
            self._training += self.has_begun
            self.is_other = self.has_begun
        self._newest = step
        self.pass_of.setdefault(step, self._turn)
        self.training_of.setdefault(step, self._training)


class _Epochs:
    """Converts a bar's step to a step counted over all epochs: a bar that restarts continues from its last step."""

    def __init__(self) -> None:
        self.has_begun = False
        """True if the newest bar begins another training."""
        self._epoch = 0
        self._last = -1
        self._part: str | None = None
        self._turn: int | None = None
        self._turns = _Passes()

    def is_of_all(self, bar: Bar) -> bool:
        """Return False if the bar is known to cover one of several epochs or trainings."""
        return bar.epoch is None and bar.turn is None and not bar.part and not self._epoch

    def step(self, bar: Bar) -> int:
        self.has_begun = self._part is not None and bar.part != self._part
        self._part = bar.part
        if bar.turn is not None:
            self._turns.take(bar.turn)
            self.has_begun |= self._turns.has_begun
        if bar.epoch is not None:
            return bar.epoch * bar.total + bar.step
        is_next = bar.turn is not None and self._turn is not None and bar.turn > self._turn
        if self._last >= bar.total - 1 and (
            (self._last > bar.step and bar.step <= max(1, bar.total // 100)) or (is_next and bar.step <= self._last)
        ):
            self._epoch += 1
        self._turn = bar.turn
        self._last = bar.step
        return self._epoch * bar.total + bar.step


def _add_durations(rows: Sequence[dict[str, Any]], passes: Mapping[float, int]) -> None:
    """Fill in durations that no line states. `passes`: {step: number of its pass}, because step numbers may restart."""
    between: dict[int, float] = {}
    before: dict[str, Any] | None = None
    for number, row in enumerate(rows):
        if row["start_ns"] is None:
            continue
        if (
            before is not None
            and row["step"] > before["step"]
            and row["start_ns"] > before["start_ns"]
            and passes[row["step"]] == passes[before["step"]]
        ):
            between[number] = (row["start_ns"] - before["start_ns"]) / (row["step"] - before["step"])
        before = row
    works = [row["throughput"] * between[number] for number, row in enumerate(rows)
             if row.get("throughput") and number in between]  # fmt: skip
    work = median(works[: max(5, len(works) // 4)]) if works else None
    rates = [row["throughput"] for row in rows if row.get("throughput")]
    is_relative = work is None and bool(rates)  # without timestamps, the rates give only relative durations
    work = median(rates) * 1e9 if is_relative else work
    are_printed = any(row.get("duration_ns") for row in rows)
    for number, row in enumerate(rows):
        other: dict[str, Any] = {"is_relative": True} if is_relative else {}
        if work is not None and row.get("throughput"):
            other["duration_ns"] = int(work / row["throughput"])
        elif number in between:
            other |= {"duration_ns": int(between[number]), "is_between": True}
        if row.get("duration_ns") is not None:
            row |= {} if row.get("is_of_step") else {"other_durations": {"duration_ns": None, **other}}
        elif not (is_relative and are_printed):
            row.update(other)
        elif number in between:
            row.update(duration_ns=int(between[number]), is_between=True)
        if row["start_ns"] is not None:  # lines are printed at the end of a step
            row["start_ns"] -= row.get("duration_ns") or 0
