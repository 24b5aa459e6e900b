"""Simulated pipeline schedules whose idle share is known exactly: the reference for its measurement.

    played = play("1f1b", ranks=32, microbatches=64, jitter_ratio=0.05, seed=0)
    played.idle_ratio                 # by the simulation's clock
    played.spans                      # what the ranks would have recorded, each by a separate clock

Forward takes 1, backward 2 (zero-bubble: 1 for the input's gradient, 1 for the weights'), a message 0.01, all with
jitter; a rank's stages share its work. gpipe, 1f1b and interleaved run in their fixed orders; zero-bubble (after Qi et
al. 2023) runs what is ready: a backward before a forward before a weight, with as many microbatches in flight as 1f1b.

    python -m tests.support.simulator.schedules        # the table: 4 to 32 stages
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from analyzers.account.bubble import PipelineSpans, measure_idle

__all__ = ["SCHEDULES", "Played", "play"]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
UNIT_NS = 1_000_000
MESSAGE = 0.01
Action = tuple[str, int, int]
"""Kind, stage, microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One step of one pipeline."""

    ranks: int
    idle_ratio: float
    """Of the time from the first forward to the last backward (or weight), mean over the ranks: the truth."""
    spans: PipelineSpans


def play(
    schedule: str, *, ranks: int, microbatches: int, stages_per_rank: int = 2, jitter_ratio: float = 0.0, seed: int = 0
) -> Played:
    """Run one step. `stages_per_rank` is that of interleaved_1f1b; the others have one."""
    rng = np.random.default_rng(seed)
    chunks = stages_per_rank if schedule == "interleaved_1f1b" else 1
    last_stage = ranks * chunks - 1
    orders = [_order(schedule, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    ends: dict[Action, float] = {}
    now = [0.0] * ranks
    done: list[list[tuple[Action, float, float]]] = [[] for _ in range(ranks)]
    left = [list(order) for order in orders]
    while any(left):
        moved = False
        for rank in sorted(range(ranks), key=now.__getitem__):  # the rank that is behind goes first
            action = _next(schedule, rank, ranks, left[rank], done[rank], ends, now[rank], last_stage)
            if action is None:
                continue
            ready = _ready(action, ends, last_stage)
            assert ready is not None
            length = {"forward": 1.0, "backward": 1.0 if schedule == "zero_bubble" else 2.0, "weight": 1.0}[action[0]]
            length *= float(np.exp(jitter_ratio * rng.standard_normal())) / chunks
            start = max(now[rank], ready)
            now[rank] = ends[action] = start + length
            done[rank].append((action, start, now[rank]))
            left[rank].remove(action)
            moved = True
            break
        assert moved, f"{schedule} is stuck"
    busy = [sum(end - start for _, start, end in actions) for actions in done]
    total = max(actions[-1][2] for actions in done) - min(actions[0][1] for actions in done)
    skews = rng.integers(-(10**12), 10**12, ranks)
    rows = [
        (rank, stage, number, kind, skews[rank] + round(start * UNIT_NS), skews[rank] + round(end * UNIT_NS))
        for rank, actions in enumerate(done)
        for (kind, stage, number), start, end in actions
    ]
    columns = list(zip(*rows, strict=True))
    spans = PipelineSpans(
        rank=np.array(columns[0]), step=np.ones(len(rows), dtype=np.int64), stage=np.array(columns[1]),
        microbatch=np.array(columns[2]), kind=np.array(columns[3], dtype=object),
        start_ns=np.array(columns[4], dtype=np.int64) + 10**13, end_ns=np.array(columns[5], dtype=np.int64) + 10**13,
    )  # fmt: skip
    return Played(ranks=ranks, idle_ratio=1.0 - sum(busy) / (ranks * total), spans=spans)


def _ready(action: Action, ends: dict[Action, float], last_stage: int) -> float | None:
    """When everything that an action needs has arrived; None if something has not been made yet."""
    kind, stage, number = action
    if kind == "weight":
        return ends.get(("backward", stage, number))
    if kind == "forward":
        needed = [(("forward", stage - 1, number), MESSAGE)] if stage else []
    else:
        needed = [(("forward", stage, number), 0.0)]
        needed += [(("backward", stage + 1, number), MESSAGE)] if stage < last_stage else []
    if any(one not in ends for one, _ in needed):
        return None
    return max((ends[one] + delay for one, delay in needed), default=0.0)


def _next(
    schedule: str, rank: int, ranks: int, left: list[Action], done: list[tuple[Action, float, float]],
    ends: dict[Action, float], now: float, last_stage: int,
) -> Action | None:  # fmt: skip
    """Next operation of a rank, if it can already be decided."""
    if not left:
        return None
    if schedule != "zero_bubble":
        return left[0] if _ready(left[0], ends, last_stage) is not None else None
    kinds = [kind for (kind, _, _), _, _ in done]
    flight = kinds.count("forward") - kinds.count("backward")
    for wanted in ("backward", "forward", "weight"):
        if wanted == "forward" and flight >= ranks - rank:
            continue
        first = next((action for action in left if action[0] == wanted), None)
        ready = None if first is None else _ready(first, ends, last_stage)
        if ready is not None and (ready <= now or not any(action[0] == "weight" for action in left)):
            return first
    open_ = [(ready, action) for action in left if (ready := _ready(action, ends, last_stage)) is not None
             and not (action[0] == "forward" and flight >= ranks - rank)]  # fmt: skip
    return min(open_)[1] if open_ else None


def _order(schedule: str, rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    if schedule == "gpipe":
        return [(kind, rank, m) for kind in ("forward", "backward") for m in range(microbatches)]
    if schedule == "1f1b":
        return list(_one_by_one(
            [("forward", rank, m) for m in range(microbatches)], [("backward", rank, m) for m in range(microbatches)],
            min(ranks - rank - 1, microbatches),
        ))  # fmt: skip
    if schedule == "interleaved_1f1b":
        forward, backward = [], []
        for first in range(0, microbatches, ranks):
            group = range(first, min(first + ranks, microbatches))
            forward += [("forward", chunk * ranks + rank, m) for chunk in range(chunks) for m in group]
            backward += [("backward", chunk * ranks + rank, m) for chunk in reversed(range(chunks)) for m in group]
        warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(forward))
        return list(_one_by_one(forward, backward, warm_up))
    return [(kind, rank, m) for kind in ("forward", "backward", "weight") for m in range(microbatches)]


def _one_by_one(forward: list[Action], backward: list[Action], warm_up: int) -> Iterator[Action]:
    yield from forward[:warm_up]
    for one, other in zip(forward[warm_up:], backward, strict=False):
        yield one
        yield other
    yield from backward[len(forward) - warm_up :]


def main() -> None:
    """Truth and measurement, side by side."""
    print(f"{'schedule':17} {'stages':>6} {'microbatches':>12} {'truth':>7} {'measured':>8} {'points off':>10}")
    for schedule in SCHEDULES:
        for stages in (4, 8, 16, 32):
            ranks = stages // 2 if schedule == "interleaved_1f1b" else stages
            played = play(schedule, ranks=ranks, microbatches=2 * ranks, jitter_ratio=0.05)
            (step,) = measure_idle(played.spans, range(ranks))
            points = 100 * (step.idle_ratio - played.idle_ratio)
            ratios = f"{played.idle_ratio:7.2%} {step.idle_ratio:8.2%} {points:+10.3f}"
            print(f"{schedule:17} {stages:6} {2 * ranks:12} {ratios}")


if __name__ == "__main__":
    main()
