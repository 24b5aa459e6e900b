"""Prediction error of a graph: how well half of its steps predict the other half.

    held_out_error(graph, measured_ms)         # 0.012: every second step, predicted from the one before, is 1.2 % off

Replaying steps with their own durations reproduces the measurement even if the graph is wrong. Here every second step
is replayed with the work of the step before it, rank by rank and place by place, and the result is compared with the
measured times. Steps in which ranks make other calls than in the step before, or of which only one has an evaluation or
a checkpoint (it may make no call), predict nothing and are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from analyzers.whatif.simulate import Graph, Key, replay

__all__ = ["held_out_error", "totals_of"]


def totals_of(graph: Graph, work_ms: Sequence[float]) -> dict[Key, tuple[float, int]]:
    """{(rank, step, place): (milliseconds of work, calls that the rank makes in the step)}."""
    found: dict[Key, float] = {}
    calls: dict[tuple[int, int], int] = {}
    for (rank, step, place), ms in zip(graph.work_at, work_ms, strict=True):
        found[rank, step, place] = found.get((rank, step, place), 0.0) + ms
        calls[rank, step] = max(calls.get((rank, step), 0), place)
    return {key: (total, calls[key[0], key[1]]) for key, total in found.items()}  # type: ignore[index]


def held_out_error(
    graph: Graph, measured_ms: float, extra: Mapping[tuple[int, int], object] = MappingProxyType({})
) -> float | None:
    """Return the error of the prediction as a share of the time of the predicted steps. None if no step predicts
    another. `extra`: {(rank, step): what it did besides training}, without steps that only trained. Pure."""
    work = totals_of(graph, graph.work_ms)
    calls = {(key[0], key[1]): number for key, (_, number) in work.items()}
    before = {later: earlier for earlier, later in zip(graph.steps[::2], graph.steps[1::2], strict=False)}
    ranks = list(graph.programs)
    similar = {
        later: earlier
        for later, earlier in before.items()
        if all(
            calls.get((rank, later)) == calls.get((rank, earlier))
            and extra.get((rank, later)) == extra.get((rank, earlier))
            for rank in ranks
        )
    }
    if not similar or not measured_ms:
        return None
    predicted = list(graph.work_ms)
    given: set[Key] = set()
    for number, (rank, step, place) in enumerate(graph.work_at):
        if step not in similar:
            continue
        target, _ = work.get((rank, similar[step], place), (0.0, 0))
        total, _ = work[rank, step, place]
        if total > 0:
            predicted[number] = graph.work_ms[number] / total * target
        elif (rank, step, place) not in given:
            predicted[number] = target
        given.add((rank, step, place))
    return abs(replay(graph, predicted) / measured_ms - 1) * len(graph.steps) / len(similar)
