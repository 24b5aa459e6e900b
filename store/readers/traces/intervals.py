"""Unions and intersections of sets of intervals, as sorted numpy arrays of (begin, end).

busy = union(begin, end)                     # disjoint and sorted
intersection(busy, communication)            # time in both
overlap(busy, begin, end)                    # time of `busy` within each window
"""

from __future__ import annotations

import numpy as np

from store.arrays import Floats

__all__ = ["NONE", "Spans", "intersection", "overlap", "union"]

Spans = tuple[Floats, Floats]
"""Arrays of starts and ends, sorted and disjoint."""
NONE: Spans = (np.zeros(0), np.zeros(0))


def union(begin: Floats, end: Floats) -> Spans:
    """Time covered by at least one interval, as disjoint intervals in order."""
    keep = end > begin
    begin, end = begin[keep], end[keep]
    if len(begin) == 0:
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    starts = np.append(True, begin[1:] > end[:-1])
    return begin[starts], end[np.append(np.flatnonzero(starts)[1:] - 1, len(end) - 1)]


def intersection(a: Spans, b: Spans) -> Spans:
    """Time that is in both."""
    if len(a[0]) == 0 or len(b[0]) == 0:
        return a[0][:0], a[1][:0]
    # An interval of `a` overlaps those of `b` from the first that ends after its start to the last that begins before
    # its end.
    first = np.searchsorted(b[1], a[0], side="right")
    last = np.searchsorted(b[0], a[1], side="left")
    counts = np.maximum(last - first, 0)
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return np.maximum(a[0][row], b[0][column]), np.minimum(a[1][row], b[1][column])


def overlap(spans: Spans, begin: Floats, end: Floats) -> Floats:
    """Time that `spans` cover within each window from `begin` to `end`."""
    ends = np.append(0.0, np.cumsum(spans[1] - spans[0]))

    def covered_before(at: Floats) -> Floats:
        index = np.searchsorted(spans[0], at, side="right")
        before: Floats = ends[np.maximum(index - 1, 0)]
        inside = np.where(index > 0, np.minimum(at, spans[1][index - 1] if len(spans[1]) else at), at)
        started = np.where(index > 0, spans[0][index - 1] if len(spans[0]) else at, at)
        covered: Floats = before + np.maximum(inside - started, 0.0)
        return covered

    if len(spans[0]) == 0:
        return np.zeros(len(begin))
    result: Floats = covered_before(end) - covered_before(begin)
    return result
