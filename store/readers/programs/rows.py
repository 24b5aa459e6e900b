"""The rows that readers of other programs' files return, and code that these readers share.

The shared code translates the programs' names of metrics into columns, and computes durations from the times of steps.

rows = ProgramRows(steps=step_rows([Point(step=10, loss=2.1, wall_ns=...), ...], rank=0))
column_of("train/loss"), column_of("eval_loss")        # "loss", None
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from store.readers.untrusted.external_files import MAX_ROWS

__all__ = [
    "EVALUATION",
    "MAX_ROWS",
    "Point",
    "ProgramRows",
    "StackOfProcess",
    "add_evaluation",
    "column_of",
    "is_of_evaluation",
    "point_of",
    "step_rows",
]

MAX_STEP = 1 << 50
_PREFIX = re.compile(r"^(?:train(?:ing|er)?|actor|metrics|loss_metrics|perf|optim|time_metrics)[/_.\- ]+")
_OTHERS = re.compile(r"(?:^|[/_.\- ])(?:e?val(?:uation|id|idation)?|test|aux|best|min|max|val)(?:[/_.\- ]|$)")
_SPLIT_COLUMNS = ("mode", "split", "phase", "stage", "set", "subset")
_EVALUATION = re.compile(r"(?:e?val|valid|test|dev|predict|infer)", re.IGNORECASE)
_LOSS_OF_EVALUATION = re.compile(r"(?:.*[/_.\- ])?(?:e?val|valid|(?:e?valu|valid)ation|test|dev)[/_.\- ]loss")
EVALUATION = "evaluation_nonfinite"
"""Kind of event: the loss of an evaluation is not finite."""
MAX_EVALUATIONS = 1000
_COLUMNS = {
    "loss": ("loss", "loss_step", "lm_loss", "lm loss", "total_loss", "global_avg_loss", "nll_loss", "pg_loss",
             "cross_entropy_loss", "ce_loss", "reduced_train_loss"),
    "grad_norm": ("grad_norm", "gradient_norm", "grad-norm", "grad norm", "gradnorm", "total_grad_norm",
                  "grad_2.0_norm_total", "global_grad_norm"),
    "lr": ("lr", "learning_rate", "learning-rate", "learning rate"),
    "duration_s": ("step_time", "step_time_s", "iter_time", "iteration_time", "iteration-time", "time_per_step",
                   "end_to_end(s)", "step_time_seconds", "seconds_per_step", "sec_per_step", "train_step_time",
                   "train_step_timing in s", "time_this_iter_s", "timing_s/step"),
}  # fmt: skip
_BY_NAME = {name: column for column, names in _COLUMNS.items() for name in names}
_IN_MS = re.compile(r"^(.+?)(?:_in)?(?:[_-]ms| ?\((?:ms|msec)\))$")
"""Name of a metric in milliseconds, without the unit."""


@dataclass(slots=True)
class Point:
    """One row of metrics: values of a step."""

    step: int
    wall_ns: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOfProcess:
    """Stack of the thread that trains, innermost frame first (`file:line function`)."""

    pid: int
    rank: int | None
    frames: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class ProgramRows:
    """Rows by table. `problem`: what could not be read."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    log_events: list[dict[str, Any]] = field(default_factory=list)
    health: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[StackOfProcess] = field(default_factory=list)
    problem: str = ""


def column_of(name: str) -> str | None:
    """Translate a program's name of a training metric ("lm loss", "learning-rate") into the column of `steps`; None for
    other metrics."""
    plain = name.strip().lower()
    if plain in _BY_NAME:
        return _BY_NAME[plain]
    if _OTHERS.search(plain):
        return None
    while (shorter := _PREFIX.sub("", plain, count=1)) != plain:
        plain = shorter
        if plain in _BY_NAME:
            return _BY_NAME[plain]
    first, _, rest = plain.partition("/")  # loss/train, lr/group_0
    if _BY_NAME.get(first) in ("loss", "lr") and re.fullmatch(r"train(?:ing)?|group_?0|pg_?0", rest):
        return _BY_NAME[first]
    return "lr" if re.fullmatch(r"lr-\w+(?:/pg1)?", plain) else None


def is_of_evaluation(row: Mapping[Any, object]) -> bool:
    """Return True if a row's mode or split says that its values are not of training."""
    parts = (value for name, value in row.items() if isinstance(name, str) and name.strip().lower() in _SPLIT_COLUMNS)
    return any(isinstance(value, str) and _EVALUATION.match(value.strip()) is not None for value in parts)


def add_evaluation(events: list[dict[str, Any]], line: int, step: object, metrics: Mapping[Any, object]) -> None:
    """Add an event if a row's loss of an evaluation is not finite."""
    for name, value in metrics.items():
        number = _number(value) if _LOSS_OF_EVALUATION.fullmatch(str(name).strip().lower()) else None
        if number is not None and not math.isfinite(number) and len(events) < MAX_EVALUATIONS:
            fields: dict[str, Any] = {"name": str(name).strip(), "value": str(number)}
            if (at := _number(step)) is not None and math.isfinite(at):
                fields["step"] = int(at)
            events.append({"kind": EVALUATION, "line": line, "message": f"{name}: {number}", "fields": fields})


def point_of(step: object, metrics: Mapping[str, object], wall_ns: int | None = None) -> Point | None:
    """Convert a row of metrics to a point; None without a step or without a known metric."""
    number = _number(step)
    if number is None or not (0 <= number < MAX_STEP) or number != int(number):
        return None
    point, is_any = Point(step=int(number), wall_ns=wall_ns), False
    for name, value in metrics.items():
        column, scale = column_of(str(name)), 1.0
        if column is None and (plain := _IN_MS.match(str(name).strip())) and column_of(plain[1]) == "duration_s":
            column, scale = "duration_s", 1e-3
        found = _number(value) if column else None
        if column and found is not None and getattr(point, column) is None:
            setattr(point, column, found * scale)
            is_any = True
    return point if is_any else None


def step_rows(points: Iterable[Point], *, rank: int) -> list[dict[str, Any]]:
    """Rows of `steps`. Points of the same step are merged. A step without a duration gets the time since the previous
    step.
    """
    by_step: dict[int, Point] = {}
    for point in points:
        known = by_step.setdefault(point.step, point)
        for name in ("wall_ns", "loss", "grad_norm", "lr", "duration_s"):
            if getattr(known, name) is None:
                setattr(known, name, getattr(point, name))
        if len(by_step) >= MAX_ROWS:
            break
    rows: list[dict[str, Any]] = []
    before: Point | None = None
    for _, point in sorted(by_step.items()):
        duration_ns = (
            None if point.duration_s is None or not 0 < point.duration_s < 1e6 else int(point.duration_s * 1e9)
        )
        if duration_ns is None and point.wall_ns is not None and before is not None and before.wall_ns is not None:
            apart_ns = point.wall_ns - before.wall_ns
            duration_ns = apart_ns // (point.step - before.step) if apart_ns > 0 else None
        is_between = duration_ns is not None and point.duration_s is None
        start_ns = None if point.wall_ns is None else point.wall_ns - (duration_ns or 0)
        rows.append(
            {"rank": rank, "step": point.step, "start_ns": start_ns, "duration_ns": duration_ns, "loss": point.loss,
             "grad_norm": point.grad_norm, "lr": point.lr, "committed": True,
             "is_between": is_between or None}
        )  # fmt: skip
        before = point
    return rows


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if not isinstance(value, int) or abs(value) < MAX_STEP else None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return math.nan if value.strip().lower() in ("nan", "-nan") else None
    return None
